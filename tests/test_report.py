"""report.md: what is in metrics.jsonl, told to a reader."""
import json
import math

import pytest

from flags import RunFlags
from parallel import Processes
from run import Run
import report


@pytest.mark.parametrize("values, width, wanted", [
    ([0, 1, 2, 3, 4, 5, 6, 7], 60, "▁▂▃▄▅▆▇█"), ([7.0, 0.0], 60, "█▁"), ([3, 3, 3], 60, "▁▁▁"),
    ([], 60, ""), ([0, 2, 13, 15], 2, "▁█"), ([0, math.nan, 7, None, math.inf, "x"], 60, "▁█")])
def test_sparkline(values, width, wanted):
    assert report.sparkline(values, width) == wanted


def test_sparkline_takes_means_of_equal_shares():
    line = report.sparkline(range(600), 60)
    assert len(line) == 60 and list(line) == sorted(line)
    assert {line.count(height) for height in report.HEIGHTS} <= {5, 8, 9}    # ends: halves


def test_report_of_a_run(tmp_path, monkeypatch, capsys):
    """Command, description, first and last values, the last sample and picture, what to try next;
    torn lines and other files do no harm."""
    monkeypatch.setattr("sys.argv", ["/somewhere/train_gpt.py", "pydoc", "--lr=1e-2", "--data=a b"])
    config = RunFlags(out_dir=str(tmp_path / "run"), device="cpu")
    run = Run(config, "gpt", "pydoc", Processes("cpu"))
    run.begin(4, 2, "tokens", 10)
    run.describe("a small model")
    for name in ("step2.png", "step10.png", "stepx.png"):
        (tmp_path / "run" / name).write_bytes(b"")
    for step, loss in enumerate((3.0, 2.0, 1.0)):
        run.write(dict(step=step, split="train", loss=loss))
    run.metrics.write('{"step": 3, "spl\n[1]\n')
    for sample in ("first", "second\nline"):
        run.evaluated(min, "loss", loss=2.5, sample=sample)
    run.done("python sample.py --ckpt={ckpt}")
    text = (tmp_path / "run" / "report.md").read_text()
    assert text.startswith("# run\n\n    python train_gpt.py pydoc --lr=1e-2 '--data=a b'\n")
    assert "| run | a small model, float32 |" in text and "| result | done: 0 steps" in text
    assert "| training loss | 3 `█▄▁` 1 |" in text or "| training loss | 3 `█▅▁` 1 |" in text
    assert "    second\n    line" in text and "first" not in text
    assert "![the last evaluation](step10.png)" in text
    command = f"python sample.py --ckpt={tmp_path / 'run' / 'best.pt'}"
    assert text.endswith(f"Next:\n\n    {command}\n")
    assert capsys.readouterr().out.splitlines()[-1] == f"  {command}"
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["best"] == 2.5


def test_a_full_disk_costs_the_report_only(tmp_path, monkeypatch, capsys):
    config = RunFlags(out_dir=str(tmp_path), device="cpu")
    run = Run(config, "gpt", "pydoc", Processes("cpu"))
    run.begin(4, 2, "tokens", 10)

    def full(*arguments):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(report, "write", full)
    assert run.done()["event"] == "done"
    assert "report.md: No space left" in capsys.readouterr().out


def test_the_commit_is_optional(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert report.commit() is None
