"""Faults from outside: signals, kills, full disks, damaged files, hostile flags. Each test asserts
that its fault landed, then what came of it.

    python -m pytest tests/test_survive.py --full       the full counts, minutes; otherwise a sample
"""
import contextlib
import copy
import dataclasses
import errno
import itertools
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import analyze
import bench
import checkpoint
from flags import cli, RunFlags, UserError
from parallel import Processes
from run import Run
import evaluate
import helpers
import sample
import train_gpt
import train_mae
import train_simdino
import train_vit
from checkpoint import read_checkpoint
from data import images
from helpers import losses, metrics, same, weights

ROOT = Path(checkpoint.__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits, files of Linux")

SHAPES = [*helpers.IMAGES, "--layers=1"]
VIEWS = [*helpers.VIEWS, "--layers=1", "--hidden=8", "--output=8", "--prototypes=8"]
TEXT = [*helpers.TEXT, "--layers=1", "--eval_windows=4"]
OFFLINE = dict(HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")        # nothing answers there


# -------------------------------------------------------------------------------------------------
# Processes
# -------------------------------------------------------------------------------------------------

def run_script(script, argv, out):
    """What `python SCRIPT ARGV...` does, in a process forked from one that has imported torch: a
    tenth of a second instead of three."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")


class Running:
    """A script in a process of its own; only its pid, its output and its files are known."""

    def __init__(self, context, script, argv, out):
        self.out, argv = out, list(map(str, argv))
        self.process = context.Process(target=run_script, args=(script, argv, out))
        self.process.start()
        self.pid = self.process.pid

    def read(self, name):
        path = Path(f"{self.out}.{name}")
        return path.read_text() if path.exists() else ""

    def steps(self):
        """The last step that the process has reported."""
        return max(map(int, re.findall(r"^step (\d+)/.*\n", self.read("stdout"), re.M)), default=0)

    def until(self, condition, seconds=300):
        """Waits for condition(); the process must not end before."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            state = self.process.exitcode, self.read("stderr"), self.read("stdout")[-500:]
            assert self.process.is_alive() and time.monotonic() < deadline, state
            time.sleep(0.0005)
        return found

    def end(self, seconds=300):
        """(exit status, stdout, stderr), -N after signal N."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "still running"
        return self.process.exitcode, self.read("stdout"), self.read("stderr")

    def done(self):
        """Waits for a good end; returns stdout."""
        status, stdout, stderr = self.end()
        assert status == 0 and stderr == "", (status, stderr)
        return stdout

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        assert self.end()[0] == -signal.SIGKILL

    def stop(self):
        """SIGSTOP; returns when the process stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        status = Path(f"/proc/{self.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] not in "TZX":
            time.sleep(0.0005)

    def go_on(self):
        os.kill(self.pid, signal.SIGCONT)

    def limit(self, size):
        """No file of the process may grow beyond `size` bytes, -1: any size. A write then fails as
        on a full disk."""
        hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (size, hard))
        assert resource.prlimit(self.pid, resource.RLIMIT_FSIZE)[0] == size


@pytest.fixture(scope="session")
def context():
    """Processes forked from one that has imported everything."""
    with pytest.MonkeyPatch.context() as patch:
        here = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        encoding = "utf-8:strict"                       # as most locales have it, C does not
        env = dict(OFFLINE, OMP_NUM_THREADS="1", PYTHONSAFEPATH="1", PYTHONPATH=here,
                   PYTHONIOENCODING=encoding)
        for name, value in env.items():
            patch.setenv(name, value)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["test_survive", "torch._dynamo"])
        multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture
def start(context, tmp_path):
    """start(script, *flags): a Running."""
    started = []

    def begin(script, *argv):
        started.append(Running(context, script, argv, tmp_path / f"process{len(started)}"))
        return started[-1]
    yield begin
    for running in started:
        if running.process.is_alive():
            os.kill(running.pid, signal.SIGKILL)
        running.process.join()


@pytest.fixture
def vit(start, cache):
    """vit(*flags): a Running of train_vit.py; nothing is evaluated before the end."""
    def begin(*flags):
        return start("train_vit.py", *SHAPES, f"--data_dir={cache}", "--eval_every=100000", *flags)
    return begin


def one_line(err, script):
    """Asserts that stderr is one line of the script's, without a traceback; returns it."""
    assert err.count("\n") == 1 and err.startswith(f"{script}: "), err[-2000:]
    assert "Traceback" not in err
    return err


def refused(running, script="train_vit.py"):
    """The one line with which a process ends, status 2."""
    status, _, err = running.end()
    assert status == 2, (status, err[-2000:])
    return one_line(err, script)


# -------------------------------------------------------------------------------------------------
# Signals
# -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_first(vit, tmp_path, number, status):
    out = tmp_path / "out"
    running = vit("--epochs=400", f"--out_dir={out}")
    running.until(lambda: running.steps() > 2)
    os.kill(running.pid, number)
    code, stdout, stderr = running.end()
    assert code == status and "--resume continues" in stdout
    one_line(stderr, "train_vit.py")
    assert read_checkpoint(out / "ckpt.pt", "vit")["step"] == metrics(out)[-1]["step"]


@pytest.mark.parametrize("script", ["train_vit.py", "train_mae.py", "train_simdino.py",
                                    "train_gpt.py", "evaluate.py", "analyze.py", "bench.py",
                                    "sample.py", "data/prepare.py"])
def test_ctrl_c_while_torch_is_imported(tmp_path, script):
    """A module of that name, found first, sends the signal: the end is the signal's, in silence."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    ended = subprocess.run([sys.executable, ROOT / script], capture_output=True, timeout=60,
                           env=os.environ | dict(PYTHONPATH=str(tmp_path)))
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, b"", b"")


def time_of(path):
    """When a file was last written to, 0 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def kill_inside_a_write(running, tmp):
    """SIGKILL while the process writes `tmp`; returns the bytes that were there by then."""
    before = time_of(tmp)                               # an earlier kill may have left one
    while True:
        running.until(lambda: time_of(tmp) not in (0, before))
        running.stop()
        if time_of(tmp) not in (0, before):             # not renamed yet: this is inside
            size = tmp.stat().st_size
            running.kill()
            assert tmp.stat().st_size == size
            return size
        running.go_on()


KILLS = {  # script: flags, its data, kills and steps between saves, in full or not
    "train_vit.py": (SHAPES, "cache", (20, 3), (3, 2)),
    "train_gpt.py": ([*TEXT, "--warmup=5"], "text_cache", (6, 3), (1, 2))}


@pytest.mark.parametrize("script", KILLS)
def test_sigkill(start, request, tmp_path, full, script):
    """A run killed many times, every other time inside the write of a checkpoint, ends as one left
    alone does."""
    flags, data, *counts = KILLS[script]
    kills, save_every = counts[0] if full else counts[1]
    steps, draw = (kills + 1) * (4 * save_every + 10), random.Random(script)
    length = f"--epochs={steps / 20}" if script == "train_vit.py" else f"--steps={steps}"
    flags = [*flags, f"--data_dir={request.getfixturevalue(data)}", length,
             f"--save_every={save_every}", f"--eval_every={3 * save_every}"]
    whole, cut, newest, inside, short = tmp_path / "whole", tmp_path / "cut", 0, 0, 0
    start(script, *flags, f"--out_dir={whole}").done()
    for kill in range(kills):
        running = start(script, *flags, f"--out_dir={cut}", *["--resume"] * bool(newest))
        enough = newest + save_every + draw.randrange(save_every)
        running.until(lambda: running.steps() > enough)
        if kill % 2 == 0:
            size = kill_inside_a_write(running, cut / "ckpt.pt.tmp")
            short += size < (cut / "ckpt.pt").stat().st_size
            inside += 1
        else:
            time.sleep(draw.uniform(0, 0.05))
            running.kill()
        first = int(re.search(r"^step (\d+)/", running.read("stdout"), re.M)[1])
        assert first == newest + 1, "it did not continue from the newest checkpoint"
        logged, newest = len(metrics(cut)), read_checkpoint(cut / "ckpt.pt")["step"]
        assert [line["step"] for line in metrics(cut)] == list(range(1, logged + 1))
        assert 0 <= logged - newest <= save_every
    assert "\ndone: " in start(script, *flags, f"--out_dir={cut}", "--resume").done()
    for name in ("ckpt.pt", "best.pt"):
        assert same(weights(whole / name), weights(cut / name)), name
    assert metrics(cut) == metrics(whole) and metrics(cut, "val") == metrics(whole, "val")
    print(f"{script}: {kills} kills, {inside} inside a write, {short} left a file too short")
    assert inside >= kills // 2


def test_sigkill_between_the_two_files_of_an_evaluation(vit, tmp_path):
    """With a learning rate of almost 0 the first evaluation is the best, and its best.pt is the one
    being written."""
    flags = ["--eval_every=5", "--lr=1e-20"]
    vit(*flags, f"--out_dir={tmp_path / 'whole'}").done()
    flags += ["--save_every=2", f"--out_dir={tmp_path / 'cut'}"]
    kill_inside_a_write(vit(*flags), tmp_path / "cut" / "best.pt.tmp")
    vit(*flags, "--resume").done()
    best, whole = (read_checkpoint(tmp_path / run / "best.pt") for run in ("cut", "whole"))
    assert best["step"] == whole["step"] == 5 and same(best["model"], whole["model"])


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A power cut, which no test can send: the order of the calls that make a rename safe."""
    calls, real = [], (os.fsync, os.replace)

    def fsync(descriptor):
        real[0](descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append((name, os.fstat(descriptor).st_size))

    def replace(source, target):
        size = os.stat(source).st_size
        real[1](source, target)
        calls.append((str(source), str(target), size))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    path = tmp_path / "ckpt.pt"
    checkpoint.write_sealed(path, dict(w=torch.zeros(1000)))
    tmp, size = f"{path}.tmp", path.stat().st_size
    assert calls[:2] == [(tmp, size), (tmp, str(path), size)]
    assert calls[2][0] == str(tmp_path) and len(calls) == 3


# -------------------------------------------------------------------------------------------------
# Full and read-only disks
# -------------------------------------------------------------------------------------------------

def test_a_disk_full_for_a_while(vit, tmp_path):
    """Checkpoints do not fit, then they do: a warning each time, the checkpoint before stays, the
    end is that of a run left alone."""
    flags, out = ["--epochs=8", "--save_every=4", "--eval_every=40"], tmp_path / "out"
    whole = vit(*flags, f"--out_dir={tmp_path / 'whole'}")
    running = vit(*flags, f"--out_dir={out}")
    running.until((out / "ckpt.prev.pt").exists)
    running.stop()
    running.limit(30_000)                               # metrics have 20,000, a checkpoint 80,000
    before = read_checkpoint(out / "ckpt.pt")["step"]
    running.go_on()
    running.until(lambda: running.read("stdout").count("warning: ") >= 3)
    running.stop()
    assert read_checkpoint(out / "ckpt.pt")["step"] - before in (0, 4)  # one may have been open
    assert not (out / "ckpt.pt.tmp").exists()
    read_checkpoint(out / "ckpt.prev.pt")
    running.limit(-1)
    running.go_on()
    lines = [line for line in running.done().splitlines() if line.startswith("warning: ")]
    assert len(lines) >= 3
    assert all(str(out / "ckpt.pt") in line and "the run goes on" in line for line in lines)
    whole.done()
    assert same(weights(out), weights(tmp_path / "whole"))
    assert losses(out) == losses(tmp_path / "whole")


def test_a_disk_full_at_the_end(vit, tmp_path):
    """The last chance to save is lost: one line, status 2, and the checkpoint before is where
    --resume continues."""
    out = tmp_path / "out"
    flags = ["--epochs=10", "--save_every=100", f"--out_dir={out}"]
    running = vit(*flags)
    running.until((out / "ckpt.pt").exists)
    running.stop()
    os.symlink("/dev/full", out / "ckpt.pt.tmp")        # ENOSPC for every write
    running.go_on()
    assert f"cannot write {out / 'ckpt.pt'}" in refused(running) and not list(out.glob("*.tmp"))
    assert read_checkpoint(out / "ckpt.pt")["step"] == 100
    assert [line["step"] for line in metrics(out)] == list(range(1, 201))
    assert re.search(r"^step (\d+)/", vit(*flags, "--resume").done(), re.M)[1] == "101"


def test_an_image_that_cannot_be_written(start, cache, tmp_path):
    """A folder has its name: a warning, the run goes on."""
    out = tmp_path / "out"
    flags = [*SHAPES, f"--data_dir={cache}", "--eval_every=4", f"--out_dir={out}"]
    start("train_mae.py", *flags, "--epochs=0.1").done()
    (out / "step4.png").mkdir()
    stdout = start("train_mae.py", *flags, "--epochs=0.4", "--overwrite").done()
    assert stdout.count("warning: ") == 1 and "step4.png" in stdout
    assert (out / "step8.png").is_file() and read_checkpoint(out / "ckpt.pt")["step"] == 8


def test_unwritable_places(vit, tmp_path):
    """Not even by root. One line, and what is there stays."""
    (tmp_path / "file").write_text("mine")
    taken = [tmp_path / name for name in ("config.json", "metrics.jsonl", ".lock")]
    for folder in taken:
        (folder / folder.name).mkdir(parents=True)
    for out in ("/proc/self/run", "/dev/null/run", "/dev/null", tmp_path / "file",
                tmp_path / "file" / "run", tmp_path / ("long" * 100), *taken):
        assert str(out) in refused(vit("--epochs=0.1", f"--out_dir={out}", "--overwrite"))
    assert (tmp_path / "file").read_text() == "mine"


# -------------------------------------------------------------------------------------------------
# A fault at each system call of a save
# -------------------------------------------------------------------------------------------------

class Calls:
    """The system calls by which a checkpoint is written, by name; `strike(name)` comes before each.

    What it raises fails the call, a write after half of its bytes."""

    def __init__(self, patch, strike):
        self.names, self.strike = [], strike
        for name in ("fsync", "replace", "link", "unlink", "open", "close"):
            patch.setattr(os, name, self.struck(name, getattr(os, name)))
        opened = self.struck("create", open)
        patch.setattr(checkpoint, "open", lambda *a: File(opened(*a), self), raising=False)

    def struck(self, name, call, half=None):
        def struck(*args, **kwargs):
            target = f" {Path(args[1]).name}" if name == "replace" else ""
            self.names.append(name + target)
            try:
                self.strike(self.names)
            except OSError:
                if half:
                    half(*args)
                raise
            return call(*args, **kwargs)
        return struck


class File:
    """A file of which each write, flush and close is such a call."""

    def __init__(self, file, calls):
        self.file, write = file, file.write
        self.write = calls.struck("write", write, lambda data: write(data[:len(data) // 2]))
        self.flush = calls.struck("flush", file.flush)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


def written(folder, draft, strike):
    """The names of the calls that wrote `draft` to folder/ckpt.pt."""
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch, strike)
        checkpoint.write_checkpoint(folder / "ckpt.pt", draft)
    return calls.names


@pytest.fixture
def saved(trained, tmp_path, full):
    """A folder; write(): makes it hold whole checkpoints of step 9 and 10, returns the content of
    step 11; held(): {file: step}; calls: at which of a save's calls to strike."""
    content = read_checkpoint(trained / "ckpt.pt")

    def write():
        for step in (9, 10):
            checkpoint.write_checkpoint(tmp_path / "ckpt.pt", content | dict(step=step))
        return content | dict(step=11)

    def held():
        return {path.name: read_checkpoint(path)["step"] for path in sorted(tmp_path.glob("*.pt"))}
    names = written(tmp_path, write(), lambda names: None)
    calls = [n for n, name in enumerate(names, 1) if full or name != "write" or n % 40 == 0]
    assert names.count("write") > 100 and len(names) - names.count("write") > 9
    return SimpleNamespace(folder=tmp_path, write=write, held=held, calls=calls)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_an_error_at_each_call_of_a_save(saved, error):
    """Told in one line, and the checkpoint before stays; or the new one is whole. A full disk stays
    full, a bad sector is met once."""
    failed = 0
    for n in saved.calls:
        def strike(names):
            lasts = error == errno.ENOSPC and not names[-1].startswith(("unlink", "close"))
            if len(names) == n or lasts and len(names) > n:
                raise OSError(error, os.strerror(error))
        draft, now = saved.write(), 11
        try:
            written(saved.folder, draft, strike)
        except UserError as told:
            assert os.strerror(error) in str(told) and "\n" not in str(told), n
            failed, now = failed + 1, 10
        held = saved.held()
        assert held["ckpt.pt"] == now and held["ckpt.prev.pt"] in (9, 10), n
        assert not list(saved.folder.glob("*.tmp")), n
        checkpoint.write_checkpoint(saved.folder / "ckpt.pt", draft | dict(step=12))
        assert saved.held() == {"ckpt.pt": 12, "ckpt.prev.pt": now}
        assert len(list(saved.folder.iterdir())) == 2, n
    print(f"{os.strerror(error)} at {len(saved.calls)} calls: {failed} saves failed, none lost")
    assert failed > len(saved.calls) / 3


def test_a_kill_at_each_call_of_a_save(saved):
    """Then a start removes what is left over."""
    config = RunFlags(out_dir=str(saved.folder), resume=True)
    leftovers = set()
    for n in saved.calls:
        draft = saved.write()
        read, write = os.pipe()

        def strike(names):
            os.write(write, f"{names[-1]}\n".encode())
            if len(names) == n:
                os.kill(os.getpid(), signal.SIGKILL)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                written(saved.folder, draft, strike)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, n
        names = os.read(read, 1 << 16).decode().splitlines()
        os.close(read)
        os.close(write)
        done = names[:-1]                               # the last one was not carried out
        held = saved.held()
        assert held["ckpt.pt"] == (11 if "replace ckpt.pt" in done else 10), names
        assert held["ckpt.prev.pt"] == (10 if "replace ckpt.prev.pt" in done else 9), names
        leftovers |= {path.suffix for path in saved.folder.iterdir()}
        Run(config, "vit", "tiny", Processes("cpu")).close()
        assert {path.suffix for path in saved.folder.iterdir()} == {".pt", ""}, names
    assert leftovers == {".pt", ".tmp", ".link", ""}


# -------------------------------------------------------------------------------------------------
# Damaged files
# -------------------------------------------------------------------------------------------------

DAMAGE = ("bit", "bytes", "cut", "swap", "append", "zeros")


def damaged(whole, kind, draw):
    at, size = draw.randrange(len(whole)), draw.choice((1, 16, 512, 4096))
    front, back = whole[:at], whole[at + size:]
    flipped = bytes([whole[at] ^ 1 << draw.randrange(8)])
    return dict(bit=front + flipped + whole[at + 1:], bytes=front + draw.randbytes(size) + back,
                cut=front, swap=whole[at:] + front, append=whole + draw.randbytes(size),
                zeros=front + bytes(size) + back)[kind]


def mutants(whole, n, draw, kinds=DAMAGE):
    """(kind of damage, damaged copy) of `whole` (bytes), n times: all differ from it."""
    copies = ((kind, damaged(whole, kind, draw)) for kind in itertools.cycle(kinds))
    return itertools.islice(((kind, bad) for kind, bad in copies if bad != whole), n)


@pytest.fixture(scope="module")
def trained(context, cache, tmp_path_factory):
    """A finished run of ten steps, checkpoints of step 8 and 10."""
    out = tmp_path_factory.mktemp("trained") / "out"
    flags = [*SHAPES, f"--data_dir={cache}", "--epochs=0.5", "--save_every=4", "--eval_every=100"]
    running = Running(context, "train_vit.py", [*flags, f"--out_dir={out}"], out.with_name("p"))
    running.done()
    return out


def test_mutated_checkpoints(trained, tmp_path, full):
    path, whole = tmp_path / "ckpt.pt", (trained / "ckpt.pt").read_bytes()
    ends = []
    # bits of the seal: each, or one a byte
    for place in range(8 * (len(whole) - 100), 8 * len(whole), 1 if full else 9):
        bad = bytearray(whole)
        bad[place // 8] ^= 1 << place % 8
        ends.append(("end", bytes(bad)))
    for kind, bad in [*mutants(whole, 200, random.Random(0)), *ends]:
        path.write_bytes(bad)
        with pytest.raises(UserError) as error:
            read_checkpoint(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value), kind


def test_resuming_and_reading_a_damaged_checkpoint(start, vit, trained, cache, tmp_path, full):
    flags, draw = ["--save_every=4", "--eval_every=100", "--epochs=0.5"], random.Random(1)
    kinds = ["bit", "cut", "zeros", "append", "swap"]
    whole = (trained / "ckpt.pt").read_bytes()
    for i, (kind, bad) in enumerate(mutants(whole, 14 if full else 2, draw, kinds)):
        out = tmp_path / str(i)
        shutil.copytree(trained, out)
        path = out / "ckpt.pt"
        path.write_bytes(bad)
        places = [f"--ckpt={path}", f"--data_dir={cache}", "--device=cpu"]
        assert str(path) in refused(start("evaluate.py", "accuracy", *places), "evaluate.py")
        status, stdout, stderr = vit(*flags, f"--out_dir={out}", "--resume").end()
        assert status == 0 and "\nstep 9/10" in stdout, (kind, stderr)
        assert stderr.startswith("warning: ") and stderr.count("\n") == 1
        assert "continuing from ckpt.prev.pt at step 8" in stderr
        assert same(weights(out), weights(trained))
    for name in ("ckpt.pt", "ckpt.prev.pt"):
        (out / name).write_bytes(bad)
    last = refused(vit(*flags, f"--out_dir={out}", "--resume"))
    assert "no whole checkpoint before it" in last


# a script, its flags, and what the optimizer is: every shape that a checkpoint has
FORGED = {"vit": (train_vit, "--ema=0.9", "--optimizer=adamw", "--lr=1e-3"),
          "mae": (train_mae, "--optimizer=lion", "--base_lr=1e-4"),
          "simdino": (train_simdino, "--method=dino", "--freeze_epochs=0"),
          "gpt": (train_gpt, "--optimizer=muon", "--lr=1e-3")}


def strange(draw):
    """A value that may be where another one should be."""
    one = torch.ones(2, 2)
    return draw.choice([
        None, True, -1, 0, 1, 7, 0.5, -1e400, math.nan, 1e300, 2 ** 31, 10 ** 30, 10 ** 400, "",
        "two\nlines", "x" * 5000, "\0", [], [1], ["a", None], [0.5] * 3, (), {}, {"a": {}}, {1: 2},
        one, one[0, 0], one.int(), one.bool(), one * math.nan, one.to_sparse(), one.to("meta"),
        one.cfloat(), torch.nested.nested_tensor([one]), torch.ones(()).expand(9, 10 ** 9),
        torch.quantize_per_tensor(one, 1.0, 0, torch.qint8), torch.float32, one.shape, b"bytes"])


def bent(tensor, draw):
    """A tensor of another shape, type or layout; some serve as well as it did."""
    t = tensor if tensor.ndim else tensor[None]
    return draw.choice([
        t[:0], t[:1], t[..., :-1], t[None], t.flatten(), t.mT if t.ndim > 1 else -t, t * math.inf,
        t.half(), t.double(), t.long(), t.cfloat(), t.to("meta"), t.to_sparse(), torch.cat([t, t]),
        t.flatten()[0].expand(t.shape), t.flatten()[0], tensor._neg_view(),
        torch.nn.Parameter(t)])


def forged(content, draw):
    """A copy of a checkpoint's content with one to three changes anywhere; what was changed."""
    content, changes = copy.deepcopy(content), []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        place, names = content, []
        while not names or (isinstance(place[names[-1]], (dict, list)) and place[names[-1]]
                            and draw.random() < 0.8):
            place = place[names[-1]] if names else place
            names.append(draw.choice(list(place) if isinstance(place, dict) else range(len(place))))
        name, value = names[-1], place[names[-1]]
        kind = draw.choice(("change", "change", "bend", "remove", "rename", "scale"))
        if kind == "remove":
            del place[name]
        elif kind == "rename" and isinstance(place, dict):
            place[draw.choice((3, "other", None, (1, 2), name))] = place.pop(name)
        elif kind == "bend" and checkpoint._strided(value) and value.numel() < 10 ** 6:
            place[name] = bent(value, draw)
        elif kind == "scale" and type(value) in (int, float):
            place[name] = value * draw.choice((-1, 0, 2, 1000, 10 ** 9))
        else:
            place[name] = strange(draw)
        changes.append((kind, names, str(place.get(name) if isinstance(place, dict) else "")[:60]))
    return content, changes


@pytest.mark.filterwarnings("ignore")       # torch's, of nested and quantized tensors
@pytest.mark.parametrize("task", FORGED)
def test_forged_checkpoints(train, tmp_path, full, capsys, task):
    """Content changed at random, then sealed as by someone who knows how: whoever reads it says so
    in one line, or goes on and writes a checkpoint that is whole."""
    script, *flags = FORGED[task]
    flags += ["--steps=4"] if task == "gpt" else ["--epochs=0.2"]
    flags += ["--save_every=2", "--layers=1", "--eval_every=100"]
    train(script, "run", *flags)
    out, ends = tmp_path / "run", []
    content = read_checkpoint(out / "ckpt.prev.pt")
    assert content["step"] == 2
    draw = random.Random(task)
    for _ in range(400 if full else 15):
        forgery, changes = forged(content, draw)
        checkpoint.write_sealed(out / "ckpt.pt", forgery)
        for path in ("ckpt.prev.pt", "best.pt"):
            (out / path).unlink(missing_ok=True)
        for read in (lambda: checkpoint.load_model(out / "ckpt.pt"),
                     lambda: train(script, "run", *flags, "--resume")):
            try:
                read()
                ends.append(0)
            except Exception as error:
                line = str(error)
                assert getattr(error, "exit_status", None) == 2 and "\n" not in line, changes
                ends.append(2)
        if ends[-1] == 0:
            assert read_checkpoint(out / "ckpt.pt")["step"] >= 4, changes
    capsys.readouterr()
    print(f"{task}: {ends.count(2)} of {len(ends)} readings are refused in one line")
    assert ends.count(2) > len(ends) / 3


class Runs:
    """What unpickles as function(*arguments)."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_no_file_runs_code(start, vit, trained, cache, tmp_path, full):
    """Sealed as by someone who knows how, in each part of a checkpoint; a legacy file, a bare
    pickle."""
    marker, content, files = tmp_path / "ran", read_checkpoint(trained / "ckpt.pt"), []
    calls = (Runs(os.mkdir, str(marker)), Runs(os.system, f"touch {marker}"),
             Runs(exec, f"open({str(marker)!r}, 'w')"), Runs(open, str(marker), "w"))
    for i, call in enumerate(calls):
        parts = dict(model=call, extra=dict(student=call), optimizer=dict(state={0: call}),
                     step=call, best=call)
        for part, value in parts.items():
            files.append(tmp_path / f"{i}-{part}.pt")
            checkpoint.write_sealed(files[-1], content | {part: value})
        files += [tmp_path / f"{i}-legacy.pt", tmp_path / f"{i}-pickle.pt"]
        torch.save(content | dict(extra=call), files[-2], _use_new_zipfile_serialization=False)
        files[-1].write_bytes(pickle.dumps(content | dict(model=call)))
    assert b"mkdir" in files[0].read_bytes() and not marker.exists()    # the fault landed
    for path in files:
        with pytest.raises(UserError) as error:
            read_checkpoint(path)
        assert path.name in str(error.value) and "\n" not in str(error.value)
    for path in files if full else files[:1]:
        out = tmp_path / f"run-{path.stem}"
        out.mkdir()
        shutil.copy(path, out / "ckpt.pt")
        refused(vit(f"--out_dir={out}", "--resume"))
        refused(vit(f"--out_dir={out}", "--overwrite", f"--init_from={path}"))
        flags = ["linear", f"--ckpt={path}", f"--data_dir={cache}", "--device=cpu"]
        refused(start("evaluate.py", *flags), "evaluate.py")
    assert not marker.exists()


# -------------------------------------------------------------------------------------------------
# Hostile flags
# -------------------------------------------------------------------------------------------------

HOSTILE = ["", " ", "-1", "0", "-0.0", "nan", "-inf", "1e400", "1e-400", "1e30", str(10 ** 30),
           str(2 ** 63), "0x10", "1_0", "3.5", "1,2", ",", "-", "--", "=", "true", "maybe", "none",
           "naïve ☃", "\udcff", "two\nlines", "a\rb\x1b[31m", "a" * 5000, "..", "/dev/null",
           "/proc/self/x", "*", "shapes", "{}"]
ODD = ["--", "--=3", "---width=3", "--Width=3", "-w3", "extra", "", "--help=3", "--resume",
       "--overwrite", "--seed"]
USUAL = {bool: ["true", "false", "1", "off"], int: ["1", "2", "3", "4", "8", "16"],
         float: ["0", "0.1", "0.5", "1", "2e-3"]}


def kind_of(hint):
    return next((t for t in typing.get_args(hint) if t is not type(None)), hint)


def word_for(name, f, kind, draw, never, calm):
    """A word for a flag: `calm` times as often usual as at the edges of its range, or hostile."""
    m, near = f.metadata, []
    for edge in (m["low"], m["high"], m["above"]):
        near += [] if edge is None else [str(edge), str(edge - 1), str(edge + 1), repr(edge + 1e-9)]
    usual = list(map(str, m["choices"])) if m["choices"] else USUAL.get(kind, [str(f.default), "x"])
    words = draw.choice([usual] * calm + [near or usual, HOSTILE])
    allowed = [w for w in words if (name, w) not in never and (name, None) not in never]
    return draw.choice(allowed or HOSTILE[:1])


def flags_for(config_class, presets, draw, never=(), calm=3):
    """(preset, flags): up to four flags of a config, derived from its fields; `never` has (flag,
    value) that would start something large."""
    hints, words = typing.get_type_hints(config_class), []
    fields = {f.name: f for f in dataclasses.fields(config_class) if (f.name, None) not in never}
    for name in draw.sample(list(fields), draw.randint(1, 4)):
        word = word_for(name, fields[name], kind_of(hints[name]), draw, never, calm)
        words += [f"--{name}", word] if draw.random() < 0.25 else [f"--{name}={word}"]
    if draw.random() < 0.5 / calm:
        words.insert(draw.randint(0, len(words)), draw.choice(ODD))
    if not presets:
        return [], words
    return [draw.choice([*presets] * 3 * calm + HOSTILE[:6] + ["shape", "-", "shapes\n"])], words


class Built(BaseException):
    """Everything before the first step went well."""


def built(config=None, *_, **__):
    """Stands where work begins: every value so far is finite, in its range, and of its type."""
    config = getattr(config, "config", config)          # of a run, or a subcommand's own
    for f in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        value, m = getattr(config, f.name), f.metadata
        if value is None or not m:
            continue
        kind = kind_of(typing.get_type_hints(type(config))[f.name])
        assert type(value) is kind or kind is float and type(value) is int, (f.name, value)
        assert not isinstance(value, float) or math.isfinite(value), (f.name, value)
        assert m["low"] is None or value >= m["low"], (f.name, value)
        assert m["high"] is None or value <= m["high"], (f.name, value)
        assert m["above"] is None or value > m["above"], (f.name, value)
        assert not m["choices"] or value in m["choices"], (f.name, value)
    raise Built


@pytest.fixture
def outcome(monkeypatch, capfd, tmp_path):
    """outcome(module, argv): None if main(argv) got as far as the first step, else its one line of
    error."""
    nest = tmp_path / "a" / "b"
    nest.mkdir(parents=True)
    monkeypatch.chdir(nest)
    monkeypatch.setattr("run.ROOT", tmp_path)       # nothing lands in the repository's own out/
    for name, word in OFFLINE.items():
        monkeypatch.setenv(name, word)
    draw_shapes = images.draw_shapes
    monkeypatch.setattr(images, "draw_shapes", lambda n, *rest, **more: draw_shapes(40, *rest, **more))
    monkeypatch.setattr(Run, "begin", built)

    def too_long(*_):
        raise TimeoutError("half a minute, and nothing yet")
    before = signal.signal(signal.SIGALRM, too_long)

    def run(module, argv):
        name = Path(module.__file__).name
        monkeypatch.setattr(sys, "argv", [name, *argv])
        signal.alarm(30)
        try:
            cli(module.main)
        except Built:
            return None
        except SystemExit as exit:
            err = capfd.readouterr().err
            assert exit.code == 2, (argv, exit.code, err)
            return one_line(err, name)
        except BaseException as error:
            raise AssertionError(f"{name} {argv}: {type(error).__name__}: {error}") from error
        finally:
            signal.alarm(0)
            capfd.readouterr()
        raise AssertionError(argv)
    yield run
    signal.signal(signal.SIGALRM, before)


SMALL = {train_vit: SHAPES[1:], train_mae: SHAPES[1:], train_simdino: VIEWS[1:],
         train_gpt: TEXT[1:]}
# Large models, long lists and a compiler are a matter of memory and patience, not of parsing
NEVER = {("size", "small"), ("size", "base"), ("size", "medium"), ("size", "large"),
         ("width", "none"), ("compile", "true"), ("compile", "1")}      # none: the preset's size
each_script = pytest.mark.parametrize("module", SMALL, ids=lambda module: module.__name__)


@each_script
def test_flags_in_process(outcome, cache, text_cache, tmp_path, full, module):
    n, started, draw = 500 if full else 60, 0, random.Random(module.__name__)
    gpt = module is train_gpt
    data = [f"--data={'tiny' if gpt else 'shapes'}", f"--data_dir={text_cache if gpt else cache}"]
    for i in range(n):
        preset, words = flags_for(module.Config, module.PRESETS, draw, NEVER)
        argv = [*preset, *SMALL[module], *data, f"--out_dir={tmp_path / str(i)}", *words]
        started += outcome(module, argv) is None
    print(f"{module.__name__}.py: of {n} combinations {started} are valid, the rest refused")
    assert n / 20 < started < 0.9 * n


READERS = (evaluate, analyze, bench, sample)


@pytest.mark.parametrize("module", READERS, ids=lambda module: module.__name__)
def test_flags_of_the_others(outcome, monkeypatch, full, module):
    """Up to where they would begin to work."""
    n, started, draw = 500 if full else 60, 0, random.Random(module.__name__)
    commands = dict(getattr(module, "COMMANDS", {None: (sample.Sample, None)}))
    if module in (evaluate, analyze):
        nothing = {name: (config, built) for name, (config, _) in commands.items()}
        monkeypatch.setattr(module, "COMMANDS", nothing)
    monkeypatch.setattr(bench, "matmul_peak", built)
    monkeypatch.setattr(sample, "load_model", built)
    for _ in range(n):
        command = draw.choice(list(commands))
        _, words = flags_for(commands[command][0], None, draw)
        started += outcome(module, [*([command] if command else ["--ckpt=x"]), *words]) is None
    print(f"{module.__name__}.py: of {n} combinations {started} are valid, the rest refused")
    assert n / 20 < started < 0.95 * n


@each_script
def test_flags_of_whole_processes(start, cache, text_cache, tmp_path, full, module):
    """Two steps, or one line and status 2 (3 if the loss is not finite)."""
    name, draw, ends = f"{module.__name__}.py", random.Random(module.__name__ + "process"), []
    gpt = module is train_gpt
    data = [f"--data={'tiny' if gpt else 'shapes'}", f"--data_dir={text_cache if gpt else cache}"]
    short = ["--steps=2", "--context=16", "--sample=4"] if gpt else ["--epochs=0.1"]
    never = {*NEVER, ("out_dir", None), ("data_dir", None), ("data", None)}
    for i in range(20 if full else 2):
        preset, words = flags_for(module.Config, module.PRESETS, draw, never, calm=12)
        argv = [*preset, *SMALL[module], *data, f"--out_dir={tmp_path / 'runs' / str(i)}",
                "--save_every=0", "--compile=false", *short, *words, "--seed=0", *short]
        status, stdout, stderr = start(name, *argv).end()
        assert status in (0, 2, 3), (argv, stderr)
        if status == 0:
            assert "\ndone: " in stdout and stderr == "", (argv, stderr)
        else:
            one_line(stderr, name)
        ends.append(status)
    print(f"{name}: {ends.count(0)} runs done, {ends.count(2)} refused, {ends.count(3)} not finite")


@pytest.mark.parametrize("argv", [
    ["--width=1000000000"], ["--width=1000003", "--heads=2"], ["--epochs=1e12"], ["--epochs=1e300"],
    ["--init_from=" + "x" * 5000], ["--init_from=\udcff"], ["--data_dir=" + "x" * 5000],
    ["--lambd=1e308", "--eta=1e308"], ["--padding=1000000000"],
    ["--image_size=1000000000", "--patch_size=1000000000"]])
def test_sizes_that_no_machine_has(outcome, cache, tmp_path, argv):
    places = [f"--data_dir={cache}", f"--out_dir={tmp_path / 'out'}"]
    said = outcome(train_vit, [*SHAPES, *places, *argv])
    assert said is None or said.startswith("train_vit.py: ")
