"""Faults from outside: signals, kills, closed pipes, damaged files. A kill comes inside a chosen
call, so that no test depends on when something happens."""
import contextlib
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

import checkpoint
import helpers
import train_gpt
from checkpoint import read_checkpoint
from flags import UserError
from helpers import metrics, same, weights
from run import read_metrics

ROOT = Path(checkpoint.__file__).parent
FLAGS = [*helpers.TEXT, "--layers=1", "--eval_every=8", "--save_every=3"]


# ---- Whole processes

# train_gpt.py, which gets a signal in step 5
SIGNALLED = """
import signal
import flags, run, train_gpt
def log_step(self, *loss, real=run.Run.log_step):
    self.step == 4 and signal.raise_signal(signal.SIGTERM)
    return real(self, *loss)
run.Run.log_step = log_step
flags.cli(train_gpt.main)
"""


@pytest.fixture(scope="module")
def whole(text_cache, tmp_path_factory):
    """The folder of a run that was left alone."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train_gpt.main([*FLAGS, f"--data_dir={text_cache}", f"--out_dir={out}"])
    return out


def assert_equal_runs(out, whole):
    for name in ("ckpt.pt", "best.pt"):
        assert same(weights(out / name), weights(whole / name)), name
    for split in ("train", "val"):
        assert metrics(out, split) == metrics(whole, split)


def test_a_stopped_process_goes_on_as_if_it_had_not_been(text_cache, tmp_path, monkeypatch, whole):
    """Nor does it matter to it that its reader leaves (... | head -1), or that stdout is full."""
    out = tmp_path / "out"
    flags = [*FLAGS, f"--data_dir={text_cache}", f"--out_dir={out}"]
    env = os.environ | dict(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    running = subprocess.Popen([sys.executable, "-c", SIGNALLED, *flags], env=env, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.readline()
    running.stdout.close()
    assert running.stderr.read() == "-c: stopped by SIGTERM\n"
    assert running.wait(300) == 143 and read_checkpoint(out / "ckpt.pt")["step"] == 5
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        train_gpt.main([*flags, "--resume"])
    assert_equal_runs(out, whole)
    assert read_metrics(out)[-1]["event"] == "done"


# ---- A kill in a save

class Killed(BaseException):
    """No handler of the code under test catches it, as none catches SIGKILL."""


def kill_before(patch, number):
    """The number-th call of fsync or replace from now on is not done. Returns the list of calls."""
    calls = []
    for name in ("fsync", "replace"):
        def call(*args, name=name, real=getattr(os, name)):
            calls.append(name)
            if len(calls) == number:
                raise Killed
            real(*args)
        patch.setattr(os, name, call)
    return calls


# of a save with a best.pt: best.pt, its folder, ckpt.pt, ckpt.prev.pt, its folder
SAVE = ["fsync", "replace", "fsync", "fsync", "replace", "replace", "fsync"]


@pytest.mark.parametrize("number", range(1, len(SAVE) + 1))
def test_a_kill_before_each_call_of_a_save(text_cache, tmp_path, whole, number):
    """The first evaluation, after steps 3 and 6 were saved. At every moment there is a whole
    checkpoint, and the run that continues from it is the run left alone."""
    out = tmp_path / "out"
    flags = [*FLAGS, f"--data_dir={text_cache}", f"--out_dir={out}"]
    save, calls = train_gpt.Run.save, []

    def save_and_die(run, content, best=False):
        if run.step == 8:
            calls.append(kill_before(patch, number))
        try:
            save(run, content, best)
        except Killed:
            run.close()                                 # the lock, as the system does
            raise
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(train_gpt.Run, "save", save_and_die)
        train_gpt.main(flags)
    assert calls[0] == SAVE[:number]
    kept = [path for path in (out / "ckpt.pt", out / "ckpt.prev.pt") if path.exists()]
    assert kept and all(read_checkpoint(path)["step"] in (3, 6, 8) for path in kept)
    train_gpt.main([*flags, "--resume"])
    assert_equal_runs(out, whole)
    assert not list(out.glob("*.tmp"))


# ---- Damaged files

def test_mutants_of_a_checkpoint(whole, tmp_path):
    """With the end cut off or a bit flipped, each is refused, or it holds what the file held."""
    path, content, kept = tmp_path / "x.pt", read_checkpoint(whole / "ckpt.pt"), 0
    data, draw = (whole / "ckpt.pt").read_bytes(), random.Random(0)
    for i in range(40):
        at = draw.randrange(len(data))
        flipped = bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1:]
        path.write_bytes(data[:at] + flipped * (i % 2))
        with contextlib.suppress(UserError):
            found, kept = read_checkpoint(path, "gpt"), kept + 1
            assert same(weights(path), weights(whole))
            for key in ("step", "best", "model_config", "run_config", "data_meta"):
                assert found[key] == content[key]
    assert kept < 15


def test_a_damaged_checkpoint_is_one_warning(train, tmp_path, capsys):
    """The one before it serves; with neither there is no silent restart."""
    train(train_gpt, "a", "--save_every=4")
    out = tmp_path / "a"
    end = weights(out)
    (out / "ckpt.pt").write_bytes((out / "ckpt.pt").read_bytes()[:-100])
    train(train_gpt, "a", "--save_every=4", "--resume")
    captured = capsys.readouterr()
    assert captured.err.count("warning: ") == 1 and "resuming after step 8" in captured.out
    assert same(end, weights(out))
    (out / "ckpt.prev.pt").unlink()
    (out / "ckpt.pt").write_bytes(b"")
    with pytest.raises(UserError, match="ckpt.pt cannot be read as a checkpoint"):
        train(train_gpt, "a", "--resume")


def test_no_file_runs_code(whole, tmp_path):
    class Code:
        """Unpickled, it makes a folder."""
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)
    path, content = tmp_path / "x.pt", read_checkpoint(whole / "ckpt.pt")
    for part in ("model", "extra", "step"):
        checkpoint.write_checkpoint(path, content | {part: Code()})
        with pytest.raises(UserError, match="could run code"):
            checkpoint.load_model(path)
    path.write_bytes(pickle.dumps(Code()))
    with pytest.raises(UserError, match="could run code"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(path.read_bytes())
    assert (tmp_path / "ran").exists()                  # so it would have
