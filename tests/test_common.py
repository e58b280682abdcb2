"""Flags, exit statuses, schedules, optimizers and run directories against their definitions."""
import json
import math
import signal
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch

import flags as flags_module
import optim
import parallel
from run import Run
from flags import UserError, option
from helpers import Launches
from model import ConfigError, ImageClassifier, ImageConfig, LanguageModel, TextConfig


@dataclass(kw_only=True)
class Config(flags_module.RunFlags):
    """Flags for these tests."""


# -------------------------------------------------------------------------------------------------
# Runs
# -------------------------------------------------------------------------------------------------

def run_in(out, **flags):
    config = Config(out_dir=str(out), log_every=1, **flags)
    return Run(config, "vit", "tiny", parallel.Processes("cpu"))


def test_a_run_directory_is_not_taken_by_accident(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="nothing to resume"):
        run_in(out, resume=True)
    assert not out.exists()
    first = run_in(out)
    assert not first.resuming
    for flags in ({}, dict(overwrite=True), dict(resume=True)):
        with pytest.raises(UserError, match="another run is writing"):
            run_in(out, **flags)
    first.close()
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="is not empty: it has no checkpoint yet"):
        run_in(out)
    run_in(out, overwrite=True).close()
    assert [p.name for p in out.iterdir()] == [".lock"]
    with pytest.raises(UserError, match="exclude each other"):
        run_in(out, overwrite=True, resume=True)
    (out / "ckpt.pt").write_text("")
    with pytest.raises(UserError, match="is not empty: --resume continues it"):
        run_in(out)
    resumed = run_in(out, resume=True)
    assert resumed.resuming
    resumed.close()


OF_A_RUN = ["metrics.jsonl", "ckpt.pt", "ckpt.prev.pt", "best.pt", "step400.png", "report.md",
            "config.json.tmp", "metrics.jsonl.tmp", "ckpt.pt.tmp", "ckpt.pt.link", "best.pt.tmp"]
OF_OTHERS = ["holiday.png", "notes.json", "weights.pt", "ckpt.pt.bak", "step.png", "notes.tmp"]


def names(folder):
    return sorted(p.name for p in folder.iterdir() if p.name != ".lock")


def test_overwrite_deletes_what_a_run_wrote_and_nothing_else(tmp_path):
    config = tmp_path / "config.json"
    for name in OF_A_RUN + OF_OTHERS:
        (tmp_path / name).write_text("mine")
    (tmp_path / "step8.png").mkdir()
    there = names(tmp_path)
    for foreign in (None, "", "{}", "[1]", '{"task": "vit"}', '{"architectures": ["ViT"]}', "\0"):
        if foreign is not None:
            config.write_text(foreign)
        with pytest.raises(UserError, match="which is not of a run, and no run: --overwrite"):
            run_in(tmp_path, overwrite=True)
        assert names(tmp_path) == sorted(there + ["config.json"] * config.exists()), foreign
    config.write_text(json.dumps(dict(task="vit", preset="tiny", out_dir="out")))
    run_in(tmp_path, overwrite=True).close()
    assert names(tmp_path) == sorted(OF_OTHERS + ["step8.png"])


def test_resuming_removes_what_a_kill_left(tmp_path):
    for name in OF_A_RUN + OF_OTHERS:
        (tmp_path / name).write_text("mine")
    run_in(tmp_path, resume=True).close()
    assert names(tmp_path) == sorted(OF_A_RUN[:6] + OF_OTHERS)


def test_a_restarted_worker_resumes_by_itself(tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    first = run_in(tmp_path)
    first.close()
    assert not first.resuming and not (tmp_path / "metrics.jsonl").exists()
    (tmp_path / "ckpt.prev.pt").write_text("")
    again = run_in(tmp_path)
    again.close()
    assert again.resuming


def test_resuming_drops_the_lines_it_will_write_again(tmp_path):
    """And what a kill, a power cut or garbage left there."""
    (tmp_path / "ckpt.pt").write_text("")
    lines = [dict(step=i, split="train", loss=1.0) for i in (1, 2, 3)]
    whole = "".join(json.dumps(line) + "\n" for line in [*lines, dict(event="done", step=2)])
    for garbage in (b"\0" * 100, b"\xff\xfe{}\n", b'[1]\n7\nnull\n{"step": "x"}\n', b'{"step": 3'):
        (tmp_path / "metrics.jsonl").write_bytes(whole.encode() + garbage)
        run = run_in(tmp_path, resume=True)
        run.step = 2                                    # as checkpoint.restore sets it
        run.begin(5, 100, "images", 1)
        run.close()
        kept = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in kept] == [1, 2], garbage


def do(run, total, seen):
    """A training loop of which only what `run` decides is recorded."""
    model = torch.nn.Linear(1, 1)

    def save(best=False, now=False):
        seen.append(("save", run.step))
        run.saved_step = run.step
    run.begin(total, 100, "images", 10)
    run.config.dropout = 0.1
    for step in run.steps(model.eval()):
        assert model.training
        seen.append((step, torch.rand(()).item()))
        run.log_step(torch.tensor(1.0), 0.1)
        if run.evaluates():
            seen.append(("evaluate", run.step))
            save()
        run.end_step(save)
    return run.done()


def test_when_a_run_evaluates_and_saves(tmp_path, capsys):
    seen = []
    done = do(run_in(tmp_path / "a", eval_every=4, save_every=3), 10, seen)
    events = [event for event in seen if isinstance(event[0], str)]
    assert events == [("save", 3), ("evaluate", 4), ("save", 4), ("save", 6), ("evaluate", 8),
                      ("save", 8), ("save", 9), ("evaluate", 10), ("save", 10)]
    assert done["event"] == "done" and done["step"] == 10 and done["examples_per_s"] > 0
    assert "step 10/10: loss 1.0000" in capsys.readouterr().out
    drawn = [event for event in seen if not isinstance(event[0], str)]
    assert len({number for _, number in drawn}) == 10   # dropout is a function of seed and step
    again = run_in(tmp_path / "b")
    again.step = 6
    seen.clear()
    do(again, 10, seen)
    assert [event for event in seen if not isinstance(event[0], str)] == drawn[6:]


def test_what_is_done_between_steps(tmp_path, monkeypatch):
    """No seed where nothing draws; training mode only after an evaluation; no loss is looked at
    before the log."""
    run = Run(Config(out_dir=str(tmp_path), log_every=4), "vit", "tiny",
                     parallel.Processes("cpu"))
    run.begin(8, 100, "images", 1)
    model, seeds, modes = torch.nn.Linear(1, 1), [], []
    train = torch.nn.Module.train
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    monkeypatch.setattr(torch.nn.Module, "train", lambda module, mode=True:
                        modes.append(mode) or train(module, mode))
    losses = [torch.tensor(loss) for loss in (1.0, 2.0, 3.0, 4.0, 5.0, math.nan, 7.0, math.inf)]
    with pytest.raises(flags_module.Diverged, match="not finite at step 6;"):
        for step in run.steps(model):
            with Launches() as launched:
                run.log_step(losses[step], 0.1)
            assert step in (0, 3) or set(launched.names) <= {"detach"}, step
            if step == 2:
                model.eval()
    assert seeds == [] and modes == [False, True] and step == 7
    line, = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["loss"] == 2.5


def test_which_evaluation_is_the_best(tmp_path):
    run = run_in(tmp_path)
    run.begin(10, 5, "images", 1)
    assert [run.evaluated(acc=a) for a in (math.nan, 0.5, 0.5, 0.4, 0.6)] == [0, 1, 0, 0, 1]
    run.best = None
    assert [run.evaluated(min, "loss", loss=a) for a in (2.0, 3.0, 1.0)] == [1, 0, 1]
    assert not run.evaluated(min, "loss", 1.5, loss=0.5)                # another value decides
    run.close()
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first == dict(step=0, split="val", acc=None)                 # NaN is no JSON


def test_a_run_goes_on_without_metrics_on_a_full_disk(tmp_path, capsys):
    run = run_in(tmp_path)
    run.begin(3, 5, "images", 1)
    run.metrics = open("/dev/full", "w", buffering=1)
    for _ in run.steps(torch.nn.Linear(1, 1)):
        run.log_step(torch.tensor(1.0), 0.1)
    run.done()
    said = capsys.readouterr().out
    assert said.count("warning: cannot write") == 1 and "step 3/3" in said and "\ndone: " in said


def test_stdout_on_a_full_disk(monkeypatch, capsys, tmp_path):
    """Of a command: one line and status 2. A run warns once and goes on."""
    def done(main):
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", full)
            patch.setattr("sys.argv", ["here/script.py"])
            with pytest.raises(SystemExit) as exit:
                flags_module.cli(main)
        return exit.value.code, capsys.readouterr().err

    said = "script.py: No space left on device\n"
    assert done(lambda argv: print("a result")) == (2, said)
    assert done(lambda argv: print("a result", flush=True)) == (2, said)

    def train(argv):
        do(run_in(tmp_path), 3, [])
    status, err = done(train)
    assert status == 0 and err.count("\n") == 1 and "warning: cannot write to stdout" in err
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "done"
