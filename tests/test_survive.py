"""Kills and damaged files. A kill comes inside a chosen call, so that no test depends on time."""
import contextlib
import os
import pickle
import random

import helpers
import pytest
from helpers import metrics, same, weights

import checkpoint
import train_gpt
from checkpoint import read_checkpoint
from flags import UserError

FLAGS = [*helpers.TEXT, "--layers=1", "--eval_every=4"]


@pytest.fixture(scope="module")
def whole(text_cache, tmp_path_factory):
    """The folder of a run that was left alone."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train_gpt.main([*FLAGS, f"--data_dir={text_cache}", f"--out_dir={out}"])
    return out


class Killed(BaseException):
    """No handler of the code under test catches it, as none catches SIGKILL."""


# of a save with a best.pt: best.pt, ckpt.pt, ckpt.prev.pt
SAVE = ["fsync", "replace", "fsync", "replace", "replace"]


@pytest.mark.parametrize("number", range(len(SAVE)))
def test_a_kill_before_each_call_of_a_save(text_cache, tmp_path, monkeypatch, whole, number):
    """At the second evaluation. At every moment there is a whole checkpoint, and the run that
    continues from it is the run left alone."""
    out, calls = tmp_path / "out", []
    flags = [*FLAGS, f"--data_dir={text_cache}", f"--out_dir={out}"]

    def save_and_die(run, *names, save=train_gpt.Run.save):
        for name in SAVE[:2] * (run.step == 8):
            def call(*args, name=name, real=getattr(os, name)):
                if len(calls) == number:
                    raise Killed
                calls.append(name)
                real(*args)
            patch.setattr(os, name, call)
        try:
            save(run, *names)
        except Killed:
            run.close()                                 # the lock, as the system does
            raise
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(train_gpt.Run, "save", save_and_die)
        train_gpt.main(flags)
    assert calls == SAVE[:number]
    kept = [path for path in (out / "ckpt.pt", out / "ckpt.prev.pt") if path.exists()]
    assert kept and all(read_checkpoint(path)["step"] in (4, 8) for path in kept)
    train_gpt.main([*flags, "--resume"])
    for name in ("ckpt.pt", "best.pt"):
        assert same(weights(out / name), weights(whole / name)), name
    for split in ("train", "val"):
        assert metrics(out, split) == metrics(whole, split)
    assert not list(out.glob("*.tmp"))


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
            tensors = ("model", "optimizer", "extra")
            assert all(found[key] == content[key] for key in content if key not in tensors)
    assert kept < 15


def test_a_damaged_checkpoint_is_one_warning(train, tmp_path, capsys):
    """The one before it serves; with neither there is no silent restart."""
    train(train_gpt, "a", "--eval_every=4")
    end, path = weights(tmp_path / "a"), tmp_path / "a" / "ckpt.pt"
    path.write_bytes(path.read_bytes()[:-100])
    train(train_gpt, "a", "--eval_every=4", "--resume")
    captured = capsys.readouterr()
    assert captured.err.count("note: ") == 1 and "resuming after step 8" in captured.out
    assert same(end, weights(path))
    path.with_name("ckpt.prev.pt").unlink()
    path.write_bytes(b"")
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
