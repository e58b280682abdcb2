"""
report.md of a run: what was trained and on what, how far it came, what to look at next.
"""
import json
import math
import subprocess
from pathlib import Path

HEIGHTS = "▁▂▃▄▅▆▇█"


def sparkline(values, width=60):
    """A row of at most `width` heights: the means of equal shares of `values`, the least at the
    bottom, the largest at the top. Values that are not finite are left out."""
    values = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    n = min(width, len(values))
    shares = [values[i * len(values) // n:(i + 1) * len(values) // n] for i in range(n)]
    means = [sum(share) / len(share) for share in shares]
    low, high = (min(means), max(means)) if means else (0, 0)
    scale = (len(HEIGHTS) - 1) / (high - low) if high > low else 0
    return "".join(HEIGHTS[round((mean - low) * scale)] for mean in means)


def commit():
    """The commit of this repository, with + if files differ from it; None outside of git."""
    def git(*words):
        return subprocess.run(["git", "-C", Path(__file__).resolve().parent, *words],
                              capture_output=True, text=True, timeout=10).stdout.strip()
    try:
        found = git("rev-parse", "--short=12", "HEAD")
        return found + "+" * bool(found and git("status", "--porcelain", "-uno")) or None
    except (OSError, subprocess.SubprocessError):
        return None


def write(folder, command, about, then):
    """Writes folder/report.md from metrics.jsonl, the {name: text} of `about`, and the commands in
    `then` that are worth trying with the run's checkpoint."""
    lines = []
    for line in (Path(folder) / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            lines.append(dict(json.loads(line)))
        except (ValueError, TypeError):         # torn by a kill
            continue
    text = [f"# {Path(folder).name}", "", f"    {command}", "", "| | |", "|---|---|"]
    text += [f"| {name} | {value} |" for name, value in about.items() if value is not None]
    for split, title in (("train", "training"), ("val", "validation")):
        rows = [line for line in lines if line.get("split") == split]
        for name in ("loss", "acc", "knn"):
            values = [row[name] for row in rows if isinstance(row.get(name), float)]
            if values:
                text.append(f"| {title} {name} | {values[0]:.4g} `{sparkline(values)}` "
                            f"{values[-1]:.4g} |")
    samples = [line["sample"] for line in lines if isinstance(line.get("sample"), str)]
    if samples:
        text += ["", "The last sample:", "", *("    " + row for row in samples[-1].splitlines())]
    steps = [(int(path.stem[4:]), path.name) for path in Path(folder).glob("step*.png")
             if path.stem[4:].isdecimal()]
    if steps:
        text += ["", f"![the last evaluation]({max(steps)[1]})"]
    text += ["", "Next:", "", *("    " + line for line in then), ""]
    (Path(folder) / "report.md").write_text("\n".join(text))
