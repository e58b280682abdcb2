"""What a run does with its folder, its metrics, its checkpoints and its signals."""
import math
import os
import signal
from dataclasses import asdict

import pytest
import torch

import flags
import run as run_module
from flags import Diverged, RunFlags, Stopped, UserError
from helpers import metrics, same
from model import ImageConfig
from optim import make_optimizer
from parallel import Processes
from run import read_metrics, Run
from test_checkpoint import IMAGE, make


def run_in(out, **more):
    config = RunFlags(out_dir=str(out), **dict(log_every=1) | more)
    return Run(config, "vit", "tiny", Processes("cpu"))


def start(out, total=10, eval_every=100, **more):
    """(run, content, step): a run that has restored what there is; step(loss) does a step of it,
    as in the scripts, and returns whether an evaluation is due."""
    run, model = run_in(out, **more), make("vit")
    optimizer = make_optimizer(model, "adamw", 1e-3, 0.1, (0.9, 0.99))
    run.restore(model.config, optimizer, model)
    run.begin(total, eval_every, "images", 1)

    def content():
        return dict(model=model.state_dict(), model_config=asdict(model.config), extra={},
                    data_meta=dict(classes=list("abc")), optimizer=optimizer.state_dict())

    def step(loss=1.0):
        model(torch.ones(2, 3, 16, 16)).square().mean().backward()
        optimizer.step()
        run.log_step(torch.tensor(loss), 0.1)
        return run.evaluation_due()
    return run, content, step


# -------------------------------------------------------------------------------------------------
# The folder
# -------------------------------------------------------------------------------------------------

def test_a_folder_is_not_taken_by_accident(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="nothing to resume"):
        run_in(out, resume=True)
    assert not out.exists()
    first = run_in(out)
    assert not first.resuming
    with pytest.raises(UserError, match="another run is writing"):
        run_in(out, overwrite=True)
    first.close()
    (out / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="is not empty"):
        run_in(out)
    run_in(out, overwrite=True).close()
    assert [p.name for p in out.iterdir()] == [".lock"]
    with pytest.raises(UserError, match="exclude each other"):
        run_in(out, overwrite=True, resume=True)
    (out / "ckpt.prev.pt").write_text("")
    resumed = run_in(out, resume=True)
    assert resumed.resuming
    resumed.close()


def test_overwrite_deletes_what_a_run_wrote_and_nothing_else(tmp_path):
    ours = ["config.json", "ckpt.pt", "ckpt.prev.pt", "best.pt", "step400.png", "run.png",
            "metrics.jsonl.tmp", "ckpt.pt.tmp"]
    theirs = ["holiday.png", "notes.json", "weights.pt", "ckpt.pt.bak", "step.png", "notes.tmp"]
    (tmp_path / "config.json").write_text("of another program")
    with pytest.raises(UserError, match="holds config.json and no run"):
        run_in(tmp_path, overwrite=True)
    for name in ours + theirs:
        (tmp_path / name).write_text("mine")
    run_in(tmp_path, resume=True).close()       # which drops what a kill left
    assert not {"metrics.jsonl.tmp", "ckpt.pt.tmp"} & {p.name for p in tmp_path.iterdir()}
    run_in(tmp_path, overwrite=True).close()
    assert {p.name for p in tmp_path.iterdir()} == {*theirs, ".lock"}


def test_a_restarted_worker_resumes_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run, content, step = start(tmp_path)        # nothing to resume yet: from the beginning
    step()
    run.save(content)
    run.close()
    run, *_ = start(tmp_path)
    assert run.step == 1
    run.close()


# -------------------------------------------------------------------------------------------------
# Metrics
# -------------------------------------------------------------------------------------------------

def train(out, until=None, **more):
    """20 steps, whose losses are 0, 1, 2 ...; logs every 6, saves every 4 and evaluates every 5."""
    run, content, step = start(out, 20, 5, log_every=6, save_every=4, **more)
    while run.step < run.total:
        if step(float(run.step)):
            run.check_finite()
            run.save(content, run.record_scores("loss", loss=1.0))
        if run.step == until:
            os.kill(os.getpid(), signal.SIGTERM)
        run.end_step(content)
    return run.done()


def test_a_line_is_the_mean_of_all_steps_since_the_last(tmp_path):
    """Whatever is saved or evaluated between, and when the run is stopped and resumed."""
    train(tmp_path / "whole")
    with pytest.raises(Stopped):
        train(tmp_path / "cut", until=9)
    train(tmp_path / "cut", resume=True)
    for name in ("whole", "cut"):
        found = {line["step"]: line["loss"] for line in metrics(tmp_path / name)}
        assert found == {6: 2.5, 12: 8.5, 18: 14.5, 20: 18.5}, name


def test_a_finished_run_that_is_resumed_changes_nothing(tmp_path, capsys):
    train(tmp_path)
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes())
              for path in tmp_path.iterdir() if path.name != ".lock"}
    assert {"run.png", "metrics.jsonl", "config.json", "ckpt.pt"} <= before.keys()
    train(tmp_path, resume=True, seed=3)
    assert "nothing left to do" in capsys.readouterr().out
    assert before == {path.name: (path.stat().st_mtime_ns, path.read_bytes())
                      for path in tmp_path.iterdir() if path.name != ".lock"}


def test_resuming_drops_the_lines_it_will_write_again(tmp_path):
    run, content, step = start(tmp_path)
    for _ in range(3):
        step()
    run.save(content)
    step()
    run.write(dict(step=4, split="val", loss=math.nan))
    assert read_metrics(tmp_path)[-1] == dict(step=4, split="val", loss=None)
    run.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "spl')          # torn by a kill
    run, *_ = start(tmp_path, resume=True)
    run.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_which_evaluation_is_the_best(tmp_path):
    run, *_ = start(tmp_path)
    assert [run.record_scores("acc", acc=a) for a in (math.nan, 0.5, 0.5, 0.4, 0.6)] == \
        [False, True, False, False, True]
    run.best = None
    assert [run.record_scores("loss", loss=a) for a in (2.0, 3.0, 1.0)] == [True, False, True]
    assert not run.record_scores("loss", 1.5, loss=0.5)         # another value decides
    run.close()


def test_a_run_goes_on_without_its_lesser_files(tmp_path, capsys, monkeypatch):
    """Metrics on a full disk, a picture that cannot be drawn: one warning each."""
    run, _, step = start(tmp_path, total=3)
    run.metrics.close()
    run.metrics = open("/dev/full", "a", buffering=1)

    def no_space(folders, path):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(run_module, "draw_curves", no_space)
    for _ in range(3):
        step()
    run.done()
    out = capsys.readouterr().out
    assert out.count("warning: cannot write") == 2 and "done: 3 steps" in out


# -------------------------------------------------------------------------------------------------
# Saving, resuming, ending
# -------------------------------------------------------------------------------------------------

def test_resuming_says_what_differs(tmp_path, capsys):
    """Of the model's own flags, which may be auto, it is the model that is compared."""
    run, content, step = start(tmp_path, seed=1, log_every=2)
    step()
    run.config.arch = "crate"
    run.save(content)
    run.close()
    config = RunFlags(out_dir=str(tmp_path), resume=True, seed=2, log_every=3)
    config.arch = None
    run, model = Run(config, "vit", "tiny", Processes("cpu")), make("vit")
    optimizer = make_optimizer(model, "adamw", 1e-3, 0.1, (0.9, 0.99))
    kept = run.restore(model.config, optimizer, model)
    assert capsys.readouterr().out == "note: --seed was 1, is now 2\n"
    assert run.step == 1 and same(model.state_dict(), kept["model"])
    with pytest.raises(UserError, match="its model has width=16, the flags say 32"):
        run.restore(ImageConfig(**IMAGE | dict(width=32)), optimizer, model)
    with pytest.raises(UserError, match="averages weights"):
        run.restore(model.config, optimizer, model, averaged=model)
    run.close()


def test_a_loss_that_is_not_finite(tmp_path):
    """Is seen before an evaluation, and no checkpoint takes it."""
    run, content, step = start(tmp_path, log_every=100)
    step()
    run.save(content)
    before = (tmp_path / "ckpt.pt").read_bytes()
    step(math.nan)
    step()
    for check in (run.check_finite, lambda: run.save(content)):
        run.fresh = run.fresh or [torch.tensor(math.nan), torch.tensor(1.0)]
        with pytest.raises(Diverged, match="not finite at step 2; the last good checkpoint is"):
            check()
    assert (tmp_path / "ckpt.pt").read_bytes() == before


def test_a_second_sigterm_waits_for_the_first(tmp_path):
    """torchrun sends each signal to all its processes, which may have had it before."""
    run, content, step = start(tmp_path)
    step()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        run.end_step(content)
    assert stopped.value.exit_status == 143 and (tmp_path / "ckpt.pt").exists()


def test_ctrl_c_twice_before_the_first_step(monkeypatch, capsys):
    """The second one comes while the command is ending."""
    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(flags, "flush_or_mute", interrupt)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as exit:
        flags.cli(interrupt)
    signal.signal(signal.SIGINT, before)
    assert exit.value.code == 130 and capsys.readouterr().err == ""


def test_a_save_that_fails(tmp_path, capsys):
    """In mid-run it is a warning, and the next best weights have to beat those on the disk."""
    run, content, step = start(tmp_path, total=3)
    for score in (0.1, 0.9):
        step()
        run.save(content, run.record_scores("acc", acc=score))
        (tmp_path / "best.pt.tmp").symlink_to("/dev/full")
    assert capsys.readouterr().out.count("warning: cannot write") == 1 and run.best == 0.1
    step()
    (tmp_path / "ckpt.pt.tmp").symlink_to("/dev/full")
    with pytest.raises(UserError, match="cannot write .*ckpt.pt: .*No space left on device"):
        run.save(content)
    assert run_module.read_checkpoint(tmp_path / "ckpt.pt")["step"] == 1
    run.close()
