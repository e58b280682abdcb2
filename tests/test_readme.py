"""What README.md and RESULTS.md say of the code is so: names, files, presets, flags, the diff.

    python tests/test_readme.py         writes the present line numbers into README.md's links
"""
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {f: (ROOT / f).read_text() for f in ("README.md", "RESULTS.md", "records/README.md")}
ENTRY = re.compile(r"\[`(\w+)`\]\((\w+\.py)#L\d+\)")


def line_of(name, file):
    """The line, from 1, at which `file` defines `name`; None if it does not."""
    found = re.search(rf"^(def|class) {name}\b|^{name} = ", (ROOT / file).read_text(), re.M)
    return found and found.string.count("\n", 0, found.start()) + 1


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files_names_and_headings(name):
    """The lines may be off by what was inserted since; the command above renews them."""
    assert [entry for entry in ENTRY.findall(TEXTS[name]) if line_of(*entry) is None] == []
    for file, heading in re.findall(r"\]\(([\w./-]*)#?([\w-]*)\)", TEXTS[name]):
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), file
        if heading and not re.fullmatch(r"L\d+", heading):
            headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]
            assert heading in slugs


class Parsed(Exception):
    """A command's flags are good; it need not run."""


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_parses(name, monkeypatch):
    """UserError if a preset, subcommand or flag does not exist."""
    command, seen = (r"(?:python|torchrun[^\n`|]*?) (?:-m (experiments\.\w+)|(?:data/)?(\w+)\.py)"
                     r"([^\n`#&|;]*)"), 0
    for experiment, script, words in re.findall(command, TEXTS[name].replace("\\\n", " ")):
        if script == "prepare":
            continue
        module = importlib.import_module(experiment or script)
        for parser in {"parse", "parse_command"} & set(vars(module)):
            def check(*args, real=getattr(module, parser), **options):
                real(*args, **options)
                raise Parsed
            monkeypatch.setattr(module, parser, check)
            words = re.sub(r"--\w+=[A-Z]+\b", "", words)     # capitals stand for any value
            with pytest.raises(Parsed):
                module.main(shlex.split(words))
            seen += 1
    assert seen > 2


def test_the_lines_of_python_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, size in (("a.png", (90, 60)), ("b.jpg", (50, 70))):
        Image.new("RGB", size, "orange").save(file)
    code, = re.findall(r"```python\n(from .*?)```", TEXTS["README.md"], re.S)
    found = {}
    exec(code, found)
    assert torch.equal(found["trace"][-1].out, found["tokens"])
    assert len(found["trace"]) == 8 and found["U"].shape == (8, 256, 32)


def test_the_diff_applies():
    """What it removes stands in crate.py as it is printed, in this order."""
    diff, = re.findall(r"```diff\n(.*?)```", TEXTS["README.md"], re.S)
    before = "\n".join(line[1:] for line in diff.splitlines() if line[0] != "+")
    assert before in (ROOT / "crate.py").read_text()


if __name__ == "__main__":
    def renewed(entry):
        return f"[`{entry[1]}`]({entry[2]}#L{line_of(entry[1], entry[2])})"

    (ROOT / "README.md").write_text(ENTRY.sub(renewed, TEXTS["README.md"]))
