"""Faults from outside: kills, full disks, damaged files, hostile flags. Each test asserts that its fault landed, then what came of it.

    python -m pytest tests/test_survive.py --full          the full counts, minutes; without --full a sample of each"""
import contextlib
import dataclasses
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
import threading
import time
import typing
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import analyze
import bench
import common
import evaluate
import sample
import train_gpt
import train_mae
import train_simdino
import train_vit
from data import images, prepare, text
from data.images import DataError

ROOT = Path(common.__file__).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, limits and files of Linux")

TINY = ["shapes", "--width=16", "--heads=2", "--layers=1", "--patch_size=8", "--batch_size=20", "--log_every=1", "--device=cpu"]
TINY_TEXT = ["pydoc", "--width=16", "--heads=2", "--layers=1", "--context=16", "--batch_size=8", "--micro_batch=8", "--log_every=1", "--device=cpu",
             "--sample=0", "--eval_windows=4"]


# ---- processes


def _run_script(script, argv, out):
    """What `python SCRIPT ARGV...` does, in a process forked from one that has imported torch: a tenth of a second instead of three."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{out}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    torch.set_num_threads(1)
    sys.argv = [script, *argv]
    runpy.run_path(str(ROOT / script), run_name="__main__")


class Running:
    """A script in a process of its own, of which only the pid, the output and the files are known."""

    def __init__(self, context, script, argv, out):
        self.out = out
        self.process = context.Process(target=_run_script, args=(script, list(map(str, argv)), out))
        self.process.start()
        self.pid = self.process.pid

    def read(self, name):
        path = Path(f"{self.out}.{name}")
        return path.read_text() if path.exists() else ""

    def until(self, condition, seconds=300):
        """Waits for condition(); the process must not end before."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.is_alive() and time.monotonic() < deadline, (self.process.exitcode, self.read("stderr"), self.read("stdout")[-500:])
            time.sleep(0.0005)
        return found

    def end(self, seconds=300):
        """(exit status, stdout, stderr), -N after signal N."""
        self.process.join(seconds)
        assert self.process.exitcode is not None, "still running"
        return self.process.exitcode, self.read("stdout"), self.read("stderr")

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)
        assert self.end()[0] == -signal.SIGKILL


@pytest.fixture(scope="session")
def context():
    """Processes forked from one that has imported everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")                    # nothing answers there
        patch.setenv("PYTHONSAFEPATH", "1")
        patch.setenv("PYTHONIOENCODING", "utf-8:strict")                     # as most locales have it, C does not
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(Path(__file__).parent)]))
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


def one_line(err, script):
    """Asserts that stderr is one line of the script's, without a traceback; returns it."""
    assert err.count("\n") == 1 and err.startswith(f"{script}: ") and "Traceback" not in err, err[-2000:]
    return err


def refused(status, out, err, script="train_vit.py"):
    assert status == 2, (status, err[-2000:])
    return one_line(err, script)


@pytest.fixture(scope="module")
def text_cache(tmp_path_factory):
    """A data directory with `pydoc`."""
    cache = tmp_path_factory.mktemp("text")
    text.prepare("pydoc", cache=cache, workers=1, verbose=False)
    return cache


def lines(folder, split="train"):
    """The whole lines of metrics.jsonl: a kill may tear the last one."""
    path = folder / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [line for line in map(json.loads, whole) if line.get("split") == split]


def steps_done(running):
    """The last step that the process has reported on stdout."""
    return max(map(int, re.findall(r"^step (\d+)/.*\n", running.read("stdout"), re.M)), default=0)


def weights(path):
    content = common.load_checkpoint(path)
    return content["model"] | {f"optimizer.{i}.{k}": v for i, s in content["optimizer"].get("state", {}).items() for k, v in s.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


# ---- SIGKILL


def stop(running):
    """SIGSTOP; returns when the process stands still."""
    os.kill(running.pid, signal.SIGSTOP)
    while Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TZX":
        time.sleep(0.0005)


def time_of(path):
    """When a file was last written to, 0 if it is not there."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def kill_inside_a_write(running, tmp):
    """SIGKILL while the process writes `tmp`; returns the bytes that were there by then."""
    before = time_of(tmp)                                                    # an earlier kill may have left one
    while True:
        running.until(lambda: time_of(tmp) not in (0, before))
        stop(running)
        if time_of(tmp) not in (0, before):                                  # neither finished nor renamed: this is inside
            size = tmp.stat().st_size
            running.kill()
            assert tmp.stat().st_size == size
            return size
        os.kill(running.pid, signal.SIGCONT)


def survive(start, script, flags, out, kills, save_every, draw):
    """A run killed `kills` times, every other time inside the write of a checkpoint, must end as one left alone does.

    Returns how many kills left a file under way, and how many of these files were short."""
    flags = [*flags, f"--save_every={save_every}", f"--eval_every={3 * save_every}"]
    assert start(script, *flags, f"--out_dir={out / 'whole'}").end()[0] == 0
    whole, cut, newest, inside, short = out / "whole", out / "cut", 0, 0, 0
    for kill in range(kills):
        running = start(script, *flags, f"--out_dir={cut}", *(["--resume"] if newest else []))
        running.until(lambda: steps_done(running) > newest + save_every + draw.randrange(save_every))
        if kill % 2 == 0:
            short += kill_inside_a_write(running, cut / "ckpt.pt.tmp") < (cut / "ckpt.pt").stat().st_size
            inside += 1
        else:
            time.sleep(draw.uniform(0, 0.05))
            running.kill()
        first = int(re.search(r"^step (\d+)/", running.read("stdout"), re.M)[1])
        assert first == newest + 1, "it did not continue from the newest checkpoint"
        logged, newest = [line["step"] for line in lines(cut)], common.load_checkpoint(cut / "ckpt.pt")["step"]
        assert logged == list(range(1, len(logged) + 1)) and 0 <= len(logged) - newest <= save_every
    status, stdout, stderr = start(script, *flags, f"--out_dir={cut}", "--resume").end()
    assert status == 0 and "\ndone: " in stdout and stderr == "", stderr
    for name in ("ckpt.pt", "best.pt"):
        assert same(weights(whole / name), weights(cut / name)), name
    for split in ("train", "val"):
        assert [(m["step"], m["loss"]) for m in lines(cut, split)] == [(m["step"], m["loss"]) for m in lines(whole, split)]
    return inside, short


def test_sigkill(start, cache, tmp_path, full):
    kills, save_every = (20, 3) if full else (3, 2)
    flags = [*TINY, f"--data_dir={cache}", f"--epochs={(kills + 1) * (4 * save_every + 10) / 20}"]
    inside, short = survive(start, "train_vit.py", flags, tmp_path, kills, save_every, random.Random(0))
    print(f"train_vit.py: {kills} kills, {inside} of them inside the write of a checkpoint, {short} left a file too short")
    assert inside >= kills // 2


def test_sigkill_of_a_language_model(start, text_cache, tmp_path, full):
    kills, save_every = (6, 3) if full else (1, 2)
    flags = [*TINY_TEXT, f"--data_dir={text_cache}", f"--steps={(kills + 1) * (4 * save_every + 10)}", "--warmup=5"]
    inside, short = survive(start, "train_gpt.py", flags, tmp_path, kills, save_every, random.Random(1))
    print(f"train_gpt.py: {kills} kills, {inside} of them inside the write of a checkpoint, {short} left a file too short")
    assert inside >= kills // 2


def test_sigkill_between_the_two_files_of_an_evaluation(start, cache, tmp_path):
    """With a learning rate of almost 0 the first evaluation is the best, and its best.pt is the one under way."""
    flags = [*TINY, f"--data_dir={cache}", "--epochs=1", "--eval_every=5", "--lr=1e-20"]
    assert start("train_vit.py", *flags, f"--out_dir={tmp_path / 'whole'}").end()[0] == 0
    running = start("train_vit.py", *flags, "--save_every=2", f"--out_dir={tmp_path / 'cut'}")
    kill_inside_a_write(running, tmp_path / "cut" / "best.pt.tmp")
    status, _, stderr = start("train_vit.py", *flags, "--save_every=2", f"--out_dir={tmp_path / 'cut'}", "--resume").end()
    assert status == 0, stderr
    best, whole = (common.load_checkpoint(tmp_path / run / "best.pt") for run in ("cut", "whole"))
    assert best["step"] == whole["step"] == 5 and same(best["model"], whole["model"])


def test_sigkill_before_the_first_checkpoint(script, start, cache, tmp_path):
    """A process from the shell, without the fork of the other tests."""
    flags = [*TINY, f"--data_dir={cache}", f"--out_dir={tmp_path / 'out'}", "--epochs=1000", "--eval_every=100000"]
    process = script("train_vit.py", *flags)
    deadline = time.monotonic() + 300
    while len(lines(tmp_path / "out")) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "out" / "ckpt.pt").exists() and lines(tmp_path / "out")
    assert "nothing to resume" in refused(*start("train_vit.py", *flags, "--resume").end())
    assert "is not empty" in refused(*start("train_vit.py", *flags).end())
    assert lines(tmp_path / "out")                                           # neither deleted anything


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """A power cut, which no test can send: the order of the calls that make a rename safe."""
    calls, real = [], (os.fsync, os.replace)

    def fsync(descriptor):
        real[0](descriptor)
        calls.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    def replace(source, target):
        size = os.stat(source).st_size
        real[1](source, target)
        calls.append((str(source), str(target), size))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    common.write_sealed(tmp_path / "ckpt.pt", dict(w=torch.zeros(1000)))
    tmp, path, size = str(tmp_path / "ckpt.pt.tmp"), str(tmp_path / "ckpt.pt"), (tmp_path / "ckpt.pt").stat().st_size
    assert calls[:2] == [(tmp, size), (tmp, path, size)] and calls[2][0] == str(tmp_path) and len(calls) == 3


def test_resuming_keeps_the_metrics_until_the_new_ones_are_whole(start, cache, tmp_path):
    """What a kill, a power cut or garbage left in metrics.jsonl neither stops a run nor stays."""
    out, flags = tmp_path / "out", [*TINY, f"--data_dir={cache}", f"--out_dir={tmp_path / 'out'}", "--epochs=0.5", "--save_every=4", "--eval_every=100"]
    assert start("train_vit.py", *flags).end()[0] == 0
    good = (out / "metrics.jsonl").read_bytes()
    for garbage in (b"\0" * 100, b"\xff\xfe{}\n", b"[1]\n7\nnull\n", b'{"step": "x"}\n', b'{"step": 9, "spl'):
        (out / "metrics.jsonl").write_bytes(good + garbage)
        os.replace(out / "ckpt.prev.pt", out / "ckpt.pt")                    # of step 8
        status, _, stderr = start("train_vit.py", *flags, "--resume").end()
        assert status == 0 and stderr == "" and common.load_checkpoint(out / "ckpt.pt")["step"] == 10, stderr
        assert sorted(m["step"] for m in lines(out)) == list(range(1, 11)), garbage


# ---- full and read-only disks


def limit(running, size):
    """No file of the process may grow beyond `size` bytes, -1: any size. A write then fails as on a full disk."""
    hard = resource.prlimit(running.pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (size, hard))
    assert resource.prlimit(running.pid, resource.RLIMIT_FSIZE)[0] == size


def test_a_disk_full_for_a_while(start, cache, tmp_path):
    """Checkpoints do not fit, then they do: a warning a time, the checkpoint before stays, the end is that of a run left alone."""
    flags = [*TINY, f"--data_dir={cache}", "--epochs=8", "--save_every=4", "--eval_every=40"]
    whole = start("train_vit.py", *flags, f"--out_dir={tmp_path / 'whole'}")
    running, out = start("train_vit.py", *flags, f"--out_dir={tmp_path / 'out'}"), tmp_path / "out"
    running.until(lambda: (out / "ckpt.prev.pt").exists())
    stop(running)
    limit(running, 30_000)                                                   # the metrics have 20,000, a checkpoint more than 80,000
    before = common.load_checkpoint(out / "ckpt.pt")["step"]
    os.kill(running.pid, signal.SIGCONT)
    running.until(lambda: running.read("stdout").count("warning: ") >= 3)
    stop(running)
    assert common.load_checkpoint(out / "ckpt.pt")["step"] - before in (0, 4) and not (out / "ckpt.pt.tmp").exists()   # one may have been under way
    common.load_checkpoint(out / "ckpt.prev.pt")
    limit(running, -1)
    os.kill(running.pid, signal.SIGCONT)
    status, stdout, stderr = running.end()
    assert status == 0 and stderr == "", stderr
    warnings = [line for line in stdout.splitlines() if line.startswith("warning: ")]
    assert len(warnings) >= 3 and all(str(out / "ckpt.pt") in line and "the run goes on" in line for line in warnings)
    assert whole.end()[0] == 0 and same(weights(out / "ckpt.pt"), weights(tmp_path / "whole" / "ckpt.pt"))
    assert [m["loss"] for m in lines(out)] == [m["loss"] for m in lines(tmp_path / "whole")]


def test_a_best_checkpoint_that_did_not_fit(start, cache, tmp_path):
    """An accuracy that was not saved does not count as reached: the next evaluation as good writes best.pt."""
    out = tmp_path / "out"
    running = start("train_vit.py", *TINY, f"--data_dir={cache}", "--epochs=10", "--eval_every=50", "--lr=1e-20", f"--out_dir={out}")
    running.until(lambda: steps_done(running) > 2)
    limit(running, 15_000)
    running.until(lambda: "warning: " in running.read("stdout"))
    stop(running)
    assert not (out / "best.pt").exists() and steps_done(running) < 150
    limit(running, -1)
    os.kill(running.pid, signal.SIGCONT)
    assert running.end()[0] == 0
    best = common.load_checkpoint(out / "best.pt")
    assert best["step"] in (100, 150) and best["best"] == lines(out, "val")[0]["acc"]


@pytest.mark.parametrize("fault", ["no room", "/dev/full"])
def test_a_disk_full_at_the_end(start, cache, tmp_path, fault):
    """The last chance to save is lost: one line, status 2, and the checkpoint before is where --resume continues."""
    out, flags = tmp_path / "out", [*TINY, f"--data_dir={cache}", "--epochs=10", "--save_every=100", "--eval_every=100000"]
    running = start("train_vit.py", *flags, f"--out_dir={out}")
    running.until(lambda: (out / "ckpt.pt").exists())
    stop(running)
    if fault == "no room":
        limit(running, 40_000)
    else:
        os.symlink("/dev/full", out / "ckpt.pt.tmp")                         # the kernel says ENOSPC to every write
    os.kill(running.pid, signal.SIGCONT)
    line = refused(*running.end())
    assert f"cannot write {out / 'ckpt.pt'}" in line and not list(out.glob("*.tmp")), line
    assert common.load_checkpoint(out / "ckpt.pt")["step"] == 100 and [m["step"] for m in lines(out)] == list(range(1, 201))
    status, stdout, stderr = start("train_vit.py", *flags, f"--out_dir={out}", "--resume").end()
    assert status == 0 and re.search(r"^step (\d+)/", stdout, re.M)[1] == "101", stderr


def test_a_disk_too_full_for_a_line_of_metrics(start, cache, tmp_path):
    """A run is worth more than its log: one warning, it goes on; --resume writes the lines that are missing."""
    out, flags = tmp_path / "out", [*TINY, f"--data_dir={cache}", "--epochs=6", "--save_every=50", "--eval_every=100000"]
    running = start("train_vit.py", *flags, f"--out_dir={out}")
    running.until(lambda: (out / "ckpt.pt").exists())
    stop(running)
    limit(running, (out / "metrics.jsonl").stat().st_size + 30)
    os.truncate(f"{running.out}.stdout", 0)                                  # or its output would be the first that is too long
    os.kill(running.pid, signal.SIGCONT)
    status, stdout, stderr = running.end()
    assert "cannot write" in refused(status, stdout, stderr) and stdout.count("metrics.jsonl") == 1 and "\nstep 120/120" in stdout
    assert len(lines(out)) < 120
    assert start("train_vit.py", *flags, f"--out_dir={out}", "--resume").end()[0] == 0
    assert [m["step"] for m in lines(out)] == list(range(1, 121))


@pytest.mark.parametrize("script", ["train_mae.py", "train_simdino.py"])
def test_a_disk_too_full_for_a_picture(start, cache, tmp_path, script):
    """The picture of an evaluation fails (a folder has its name): a warning, the run goes on."""
    out = tmp_path / "out"
    (out / "step4.png").mkdir(parents=True)
    extra = ["--hidden=8", "--output=8", "--local_views=1"] if script == "train_simdino.py" else []
    status, stdout, stderr = start(script, *TINY, *extra, f"--data_dir={cache}", "--epochs=0.4", "--eval_every=4", f"--out_dir={out}", "--overwrite").end()
    assert status == 0 and stderr == "", stderr[-1000:]
    assert stdout.count("warning: ") == 1 and "step4.png" in stdout and (out / "step8.png").is_file() and common.load_checkpoint(out / "ckpt.pt")["step"] == 8


def test_a_file_system_that_is_full(script, cache, tmp_path, full):
    """A file system of its own, filled to the last byte in mid-run. Then room is made."""
    out = tmp_path / "disk"
    out.mkdir()
    mount = ["unshare", "--user", "--map-root-user", "--mount"]
    if not full or subprocess.run([*mount, "mount", "-t", "tmpfs", "none", str(out)], capture_output=True).returncode:
        pytest.skip("needs --full and leave to mount a file system")
    command = 'mount -t tmpfs -o size=2m none "$1" && shift && exec "$@"'
    process = subprocess.Popen([*mount, "sh", "-c", command, "sh", out, sys.executable, "train_vit.py", *TINY, f"--data_dir={cache}", "--epochs=30",
                                "--save_every=5", "--eval_every=100000", f"--out_dir={out / 'run'}"], cwd=ROOT, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    inside = Path("/proc", str(process.pid), "root", *out.parts[1:])
    try:
        deadline = time.monotonic() + 300
        while not (inside / "run" / "ckpt.prev.pt").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        output, enough = [], threading.Event()

        def fill():
            """Takes what room there is, again and again: a save frees the checkpoint before the last, and could live on that."""
            with open(inside / "filler", "ab", buffering=0) as filler:
                while not enough.is_set():
                    with contextlib.suppress(OSError):
                        filler.write(b"\0" * 4096)
        with ThreadPoolExecutor(1) as pool:
            filling = pool.submit(fill)
            try:
                while sum("ckpt.pt: " in line and line.startswith("warning: ") for line in output) < 3:
                    output.append(process.stdout.readline())
                    assert output[-1], process.stderr.read()
            finally:
                enough.set()
            filling.result()
        common.load_checkpoint(inside / "run" / "ckpt.pt")
        common.load_checkpoint(inside / "run" / "ckpt.prev.pt")
        (inside / "filler").unlink()
        rest, stderr = process.communicate(timeout=300)
        assert process.returncode == 0 and stderr == "" and "\ndone: 600 steps" in rest and "No space left on device" in "".join(output)
    finally:
        process.kill()
        process.communicate()


def test_places_where_nothing_can_be_written(start, cache, tmp_path):
    """Not even by root. One line, and what is there stays."""
    (tmp_path / "file").write_text("mine")
    for name in ("config.json", "metrics.jsonl", ".lock"):
        (tmp_path / name / name).mkdir(parents=True)
    for out in ("/proc/self/run", "/dev/null/run", "/dev/null", tmp_path / "file", tmp_path / "file" / "run", tmp_path / ("long" * 100),
                *(tmp_path / name for name in ("config.json", "metrics.jsonl", ".lock"))):
        line = refused(*start("train_vit.py", *TINY, f"--data_dir={cache}", "--epochs=0.1", f"--out_dir={out}", "--overwrite").end())
        assert str(out) in line, line
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_whose_name_is_no_text(start, cache, tmp_path):
    """File names are bytes. The last line of the run and the command to go on have to name this one."""
    out = tmp_path / os.fsdecode(b"run\xff")
    for more in (["--epochs=0.2"], ["--epochs=0.4", "--resume"]):
        status, stdout, stderr = start("train_vit.py", *TINY, f"--data_dir={cache}", f"--out_dir={out}", *more).end()
        assert status == 0 and "\ndone: " in stdout and stderr == "", stderr
    assert common.load_checkpoint(out / "ckpt.pt")["step"] == 8
    assert "is not empty" in refused(*start("train_vit.py", *TINY, f"--data_dir={cache}", f"--out_dir={out}").end())


def test_two_runs_in_one_folder(start, cache, tmp_path):
    """The second is refused, even with --overwrite or --resume; the first ends as if alone."""
    flags = [*TINY, f"--data_dir={cache}", "--epochs=10", "--save_every=10", "--eval_every=100000"]
    alone = start("train_vit.py", *flags, f"--out_dir={tmp_path / 'alone'}")
    first, out = start("train_vit.py", *flags, f"--out_dir={tmp_path / 'out'}"), tmp_path / "out"
    first.until(lambda: steps_done(first) > 10)
    stop(first)                                                              # or it might be done before the others have come
    for more in ([], ["--overwrite"], ["--resume"]):
        assert f"another run is writing to {out}" in refused(*start("train_vit.py", *flags, f"--out_dir={out}", *more, "--seed=1").end())
    assert first.process.is_alive()
    os.kill(first.pid, signal.SIGCONT)
    for running in (alone, first):
        assert running.end()[0] == 0
    assert same(weights(out / "ckpt.pt"), weights(tmp_path / "alone" / "ckpt.pt")) and [m["step"] for m in lines(out)] == list(range(1, 201))


# ---- damaged files


def mutants(whole, n, draw, kinds=("bit", "byte", "bytes", "cut", "swap", "append", "zeros")):
    """n damaged copies of `whole` (bytes) with the kind of damage: all differ from it."""
    made = 0
    for kind in itertools.cycle(kinds):
        bad, at = bytearray(whole), draw.randrange(len(whole))
        size = min(draw.choice((1, 16, 512, 4096)), len(whole) // 3)
        if kind == "bit":
            bad[at] ^= 1 << draw.randrange(8)
        elif kind == "byte":
            bad[at] = draw.randrange(256)
        elif kind == "bytes":
            bad[at:at + size] = draw.randbytes(size)
        elif kind == "cut":
            del bad[at:]
        elif kind == "swap":
            a, b = sorted(draw.randrange(len(whole) - size) for _ in range(2))
            bad[a:a + size], bad[b:b + size] = bad[b:b + size], bad[a:a + size]
        elif kind == "append":
            bad += draw.randbytes(size)
        elif kind == "zeros":
            bad[at:at + size] = bytes(len(bad[at:at + size]))
        if bad != whole:
            yield kind, bytes(bad)
            made += 1
        if made == n:
            return


@pytest.fixture(scope="module")
def trained(context, cache, tmp_path_factory):
    """A finished run of ten steps, checkpoints of step 8 and 10."""
    out = tmp_path_factory.mktemp("trained") / "out"
    running = Running(context, "train_vit.py", [*TINY, f"--data_dir={cache}", "--epochs=0.5", "--save_every=4", "--eval_every=100", f"--out_dir={out}"],
                      out.with_name("process"))
    assert running.end()[0] == 0
    return out


def test_mutated_checkpoints(trained, tmp_path):
    path, whole, draw, loaded = tmp_path / "ckpt.pt", (trained / "ckpt.pt").read_bytes(), random.Random(0), 0
    for kind, bad in mutants(whole, 200, draw):
        path.write_bytes(bad)
        with pytest.raises(common.UserError) as error:
            common.load_checkpoint(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value), kind
    for place in range(8 * (len(whole) - 100), 8 * len(whole)):              # each bit of the end, where the seal is
        bad = bytearray(whole)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(common.UserError):
            common.load_checkpoint(path)
    for _, bad in mutants(whole, 200, draw, ["bit"]):                        # what the seal is for
        path.write_bytes(bad)
        with contextlib.suppress(Exception):
            torch.load(path, weights_only=True)
            loaded += 1
    print(f"of 200 checkpoints with one bit flipped torch.load takes {loaded} without a word, load_checkpoint none")
    assert loaded > 100


def test_resuming_and_reading_a_damaged_checkpoint(start, trained, cache, tmp_path, full):
    flags, draw = [*TINY, f"--data_dir={cache}", "--save_every=4", "--eval_every=100", "--epochs=0.5"], random.Random(1)
    for i, (kind, bad) in enumerate(mutants((trained / "ckpt.pt").read_bytes(), 14 if full else 2, draw, ["bit", "cut", "zeros", "append", "swap"])):
        out = tmp_path / str(i)
        shutil.copytree(trained, out)
        (out / "ckpt.pt").write_bytes(bad)
        line = refused(*start("evaluate.py", "accuracy", f"--ckpt={out / 'ckpt.pt'}", f"--data_dir={cache}", "--device=cpu").end(), "evaluate.py")
        assert str(out / "ckpt.pt") in line, line
        status, stdout, stderr = start("train_vit.py", *flags, f"--out_dir={out}", "--resume").end()
        assert status == 0 and "\nstep 9/10" in stdout, (kind, stderr)
        assert stderr.startswith("warning: ") and stderr.count("\n") == 1 and "continuing from ckpt.prev.pt at step 8" in stderr
        assert same(weights(out / "ckpt.pt"), weights(trained / "ckpt.pt"))
    for name in ("ckpt.pt", "ckpt.prev.pt"):
        (out / name).write_bytes(bad)
    assert "no whole checkpoint before it" in refused(*start("train_vit.py", *flags, f"--out_dir={out}", "--resume").end())


class Runs:
    """What unpickles as function(*arguments)."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_no_file_runs_code(start, trained, cache, tmp_path, full):
    """Sealed as by someone who knows how, in each part of a checkpoint, as a zip, a legacy file or a bare pickle."""
    marker, content, files = tmp_path / "ran", common.load_checkpoint(trained / "ckpt.pt"), []
    for i, runs in enumerate((Runs(os.mkdir, str(marker)), Runs(os.system, f"touch {marker}"), Runs(exec, f"open({str(marker)!r}, 'w')"), Runs(open, str(marker), "w"))):
        for j, (part, value) in enumerate((("model", runs), ("extra", dict(student=runs)), ("optimizer", dict(state={0: runs})), ("step", runs), ("best", runs))):
            files.append(tmp_path / f"{i}-{j}.pt")
            common.write_sealed(files[-1], content | {part: value})
        for name, write in (("legacy", lambda p: torch.save(content | dict(extra=runs), p, _use_new_zipfile_serialization=False)),
                            ("pickle", lambda p: p.write_bytes(pickle.dumps(content | dict(model=runs))))):
            files.append(tmp_path / f"{i}-{name}.pt")
            write(files[-1])
    pickled = files[0].read_bytes()
    assert b"mkdir" in pickled and not marker.exists()                       # the fault landed
    for path in files:
        with pytest.raises(common.UserError) as error:
            common.load_checkpoint(path)
        assert path.name in str(error.value) and "\n" not in str(error.value)
    for path in files if full else files[:1]:
        out = tmp_path / f"run-{path.stem}"
        out.mkdir()
        shutil.copy(path, out / "ckpt.pt")
        common_flags = [*TINY, f"--data_dir={cache}", "--epochs=0.5"]
        refused(*start("train_vit.py", *common_flags, f"--out_dir={out}", "--resume").end())
        refused(*start("train_vit.py", *common_flags, f"--out_dir={out}", "--overwrite", f"--init_from={path}").end())
        refused(*start("evaluate.py", "linear", f"--ckpt={path}", f"--data_dir={cache}", "--device=cpu").end(), "evaluate.py")
    assert not marker.exists()


def test_mutated_data(cache, text_cache, tmp_path):
    """Every load refuses in one line or gives data that passes its checks; --verify sees every change."""
    def check_images():
        data = images.load("shapes", tmp_path, allow_prepare=False)
        for split, n in (("train", 400), ("val", 100)):
            pictures, labels = getattr(data, f"{split}_images"), getattr(data, f"{split}_labels")
            assert pictures.shape == (n, 32, 32, 3) and pictures.dtype == np.uint8 and labels.shape == (n,) and 0 <= labels.min() and labels.max() < 10

    def check_text():
        data = text.load("pydoc", tmp_path, allow_prepare=False)
        for split in (data.train, data.val):
            assert split.dtype == np.uint16 and split.max() < data.tokenizer.n_vocab == 97

    draw, refused_count, accepted = random.Random(0), 0, 0
    for name, source, check in (("shapes", cache, check_images), ("pydoc", text_cache, check_text)):
        shutil.copytree(source / name, tmp_path / name)
        files = sorted((tmp_path / name).iterdir())
        for number, path in enumerate(files):
            whole = path.read_bytes()
            for kind, bad in mutants(whole, 100 // len(files) + (number < 100 % len(files)), draw):
                path.write_bytes(bad)
                try:
                    check()
                    accepted += 1
                    assert path.suffix != ".json" and kind not in ("cut", "append") or same_json(bad, whole), (path, kind)
                except DataError as error:
                    assert "\n" not in str(error) and name in str(error) and "--overwrite" in str(error), (path, kind, error)
                    refused_count += 1
                if path.suffix == ".json" and same_json(bad, whole):
                    continue                                                 # white space: another file, the same description
                with pytest.raises(DataError) as error:
                    images.verify(name, tmp_path)
                assert "\n" not in str(error.value)
            path.write_bytes(whole)
        images.verify(name, tmp_path)
    print(f"of 200 damaged data files {refused_count} are refused at loading, all by --verify")
    assert refused_count + accepted == 200 and refused_count > 80


def same_json(a, b):
    """White space changes a file, not what it describes."""
    with contextlib.suppress(ValueError):
        return json.loads(a) == json.loads(b)
    return False


def test_scripts_on_mutated_data(start, cache, text_cache, tmp_path):
    shutil.copytree(cache / "shapes", tmp_path / "shapes")
    shutil.copytree(text_cache / "pydoc", tmp_path / "pydoc")
    commands = {"shapes": ("train_vit.py", *TINY), "pydoc": ("train_gpt.py", *TINY_TEXT)}
    for file, at, says in (("shapes/train_images.npy", 20, "header"), ("shapes/val_labels.npy", 128 + 7, "allowed are 0 to 9"), ("shapes/meta.json", 30, "meta.json"),
                           ("pydoc/train.bin", 1001, "allowed are 0 to 96"), ("pydoc/meta.json", 40, "meta.json")):
        path, name = tmp_path / file, file.split("/")[0]
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1:])
        script, *flags = commands[name]
        line = refused(*start(script, *flags, f"--data_dir={tmp_path}", f"--out_dir={tmp_path / 'out'}").end(), script)
        assert says in line and "--overwrite" in line, line
        refused(*start("data/prepare.py", name, "--verify", "--cache", tmp_path).end(), "prepare.py")
        path.write_bytes(whole)
    path = tmp_path / "shapes/val_images.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])  # one bit of one pixel: for --verify alone
    images.load("shapes", tmp_path)
    assert "val_images.npy" in refused(*start("data/prepare.py", "shapes", "--verify", "--cache", tmp_path).end(), "prepare.py")


# ---- flags


HOSTILE = ["", " ", "-1", "0", "-0.0", "nan", "-inf", "1e400", "1e-400", "1e30", str(10 ** 30), str(-10 ** 30), str(2 ** 63), "9" * 5000, "0x10", "1_0", "１６", "3.5",
           "1,2", ",", "-", "--", "=", "true", "maybe", "none", "None", "naïve ☃", "\udcff", "two\nlines", "a\rb\x1b[31m", "a" * 5000, "..", "/dev/null", "/proc/self/x",
           "*", "shapes", "{}"]
ODD = ["--", "--=3", "---width=3", "--Width=3", "-w3", "extra", "", "--help=3", "--resume", "--overwrite", "--seed"]


def kind_of(hint):
    return next((t for t in typing.get_args(hint) if t is not type(None)), hint)


def value(name, f, kind, draw, never, calm):
    """A word for a flag: `calm` times as often of its range as at the edges of it, or hostile."""
    m, near = f.metadata, []
    for edge in (m["low"], m["high"], m["above"]):
        near += [] if edge is None else [str(edge), str(edge - 1), str(edge + 1), repr(edge + 1e-9)]
    usual = {bool: ["true", "false", "1", "off"], int: ["1", "2", "3", "4", "8", "16"], float: ["0", "0.1", "0.5", "1", "2e-3"], str: [str(f.default), "x"]}[kind]
    usual = list(map(str, m["choices"])) if m["choices"] else usual
    words = draw.choice([usual] * calm + [near or usual, HOSTILE])
    return draw.choice([word for word in words if (name, word) not in never and (name, None) not in never] or HOSTILE[:1])


def flags(config_class, presets, draw, never=(), calm=3):
    """A preset and up to four flags of a config, derived from its fields; `never` has (flag, value) that would start something large."""
    hints, words = typing.get_type_hints(config_class), []
    fields = {f.name: f for f in dataclasses.fields(config_class) if (f.name, None) not in never}
    for name in draw.sample(list(fields), draw.randint(1, 4)):
        word = value(name, fields[name], kind_of(hints[name]), draw, never, calm)
        words += draw.choice([[f"--{name}={word}"], [f"--{name}={word}"], [f"--{name}={word}"], [f"--{name}", word]])
    if draw.random() < 0.5 / calm:
        words.insert(draw.randint(0, len(words)), draw.choice(ODD))
    preset = draw.choice([*presets] * 3 * calm + HOSTILE[:6] + ["shape", "-", "shapes\n"]) if presets else None
    return [preset] * bool(presets), words


class Built(BaseException):
    """Everything before the first step went well."""


def built(config=None, *_, **__):
    """Stands where work begins: every value that has come so far is finite, in its range, and of its type."""
    config = getattr(config, "config", config)                               # of a run, or a subcommand's own
    for f in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        value, m = getattr(config, f.name), f.metadata
        if value is not None:
            kind = kind_of(typing.get_type_hints(type(config))[f.name])
            assert type(value) is kind or kind is float and type(value) is int, (f.name, value)
            assert not isinstance(value, float) or math.isfinite(value), (f.name, value)
            assert (m["low"] is None or value >= m["low"]) and (m["high"] is None or value <= m["high"]), (f.name, value)
            assert (m["above"] is None or value > m["above"]) and (not m["choices"] or value in m["choices"]), (f.name, value)
    raise Built


@pytest.fixture
def outcome(monkeypatch, capfd, tmp_path):
    """outcome(module, argv): None if main(argv) got as far as the first step, otherwise the one line that it ended with."""
    nest = tmp_path / "a" / "b"
    nest.mkdir(parents=True)
    monkeypatch.chdir(nest)
    monkeypatch.setattr(common, "ROOT", tmp_path)                            # nothing falls back on the repository's own out/
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    draw_pictures = prepare._draw
    monkeypatch.setattr(prepare, "_draw", lambda folder: draw_pictures(folder, 40, 20))
    monkeypatch.setattr(common.Run, "begin", built)

    def too_long(*_):
        raise TimeoutError("half a minute, and nothing yet")
    before = signal.signal(signal.SIGALRM, too_long)

    def run(module, argv):
        name = Path(module.__file__).name
        monkeypatch.setattr(sys, "argv", [name, *argv])
        signal.alarm(30)
        try:
            common.cli(module.main)
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


SMALL = {train_vit: TINY[1:], train_mae: TINY[1:], train_simdino: [*TINY[1:], "--hidden=8", "--output=8", "--prototypes=8", "--local_size=16"],
         train_gpt: TINY_TEXT[1:]}
# Large models and long lists, a compiler, and what the Hub would be asked for: a matter of memory and patience, not of parsing.
NEVER = {("size", "small"), ("size", "base"), ("size", "large"), ("compile", "true"), ("compile", "1")}


def combinations(module, n, draw, never=NEVER, calm=3):
    for _ in range(n):
        yield flags(module.Config, module.PRESETS, draw, never, calm)


@pytest.mark.parametrize("module", SMALL, ids=lambda module: module.__name__)
def test_flags_in_process(outcome, cache, text_cache, tmp_path, full, module):
    n, started, draw = 500 if full else 60, 0, random.Random(module.__name__)
    data = ["--data=pydoc", f"--data_dir={text_cache}"] if module is train_gpt else ["--data=shapes", f"--data_dir={cache}"]
    for i, (preset, words) in enumerate(combinations(module, n, draw)):
        argv = [*preset, *SMALL[module], *data, f"--out_dir={tmp_path / str(i)}", *words]
        started += outcome(module, argv) is None
    print(f"{module.__name__}.py: of {n} combinations of flags {started} are valid, {n - started} are refused in one line")
    assert n / 20 < started < 0.9 * n


READERS = {evaluate: evaluate.COMMANDS, analyze: analyze.COMMANDS, bench: bench.COMMANDS, sample: {None: (sample.Sample, None)}}


@pytest.mark.parametrize("module", READERS, ids=lambda module: module.__name__)
def test_flags_of_the_others(outcome, monkeypatch, tmp_path, full, module):
    """Up to where they would begin to work."""
    n, started, draw, commands = 500 if full else 60, 0, random.Random(module.__name__), dict(READERS[module])
    if module in (evaluate, analyze):
        monkeypatch.setattr(module, "COMMANDS", {name: (config, built) for name, (config, _) in commands.items()})
    monkeypatch.setattr(bench, "matmul_peak", built)
    monkeypatch.setattr(common, "load_language_model", built)
    for _ in range(n):
        command = draw.choice(list(commands))
        _, words = flags(commands[command][0], None, draw)
        started += outcome(module, [*([command] if command else ["--ckpt=x"]), *words]) is None
    print(f"{module.__name__}.py: of {n} combinations of flags {started} are valid, {n - started} are refused in one line")
    assert n / 20 < started < 0.95 * n


@pytest.mark.parametrize("module", SMALL, ids=lambda module: module.__name__)
def test_flags_of_whole_processes(start, cache, text_cache, tmp_path, full, module):
    """Two steps, or one line and status 2 (3 if the loss is not finite)."""
    name, draw, ends = f"{module.__name__}.py", random.Random(module.__name__ + "process"), []
    data = ["--data=pydoc", f"--data_dir={text_cache}"] if module is train_gpt else ["--data=shapes", f"--data_dir={cache}"]
    never = {*NEVER, ("out_dir", None), ("data_dir", None), ("data", None)}
    for i, (preset, words) in enumerate(combinations(module, 20 if full else 2, draw, never, calm=12)):
        budget = [*SMALL[module], *data, f"--out_dir={tmp_path / 'runs' / str(i)}", "--save_every=0", "--compile=false",
                  *(["--steps=2", "--context=16", "--sample=4"] if module is train_gpt else ["--epochs=0.1"])]
        argv = [*preset, *budget, *words, "--seed=0", *(budget[-3:] if module is train_gpt else budget[-1:])]
        status, stdout, stderr = start(name, *argv).end()
        assert status in (0, 2, 3), (argv, stderr)
        if status == 0:
            assert "\ndone: " in stdout and stderr == "", (argv, stderr)
        else:
            one_line(stderr, name)
        ends.append(status)
    print(f"{name}: {len(ends)} runs of random flags: {ends.count(0)} done, {ends.count(2)} refused, {ends.count(3)} not finite")


@pytest.mark.parametrize("argv", [
    ["--width=1" + "0" * 30], ["--width=1000000000"], ["--width=1000003", "--heads=2"], ["--epochs=1e12"], ["--epochs=1e300"], ["--batch_size=1" + "0" * 30],
    ["--seed=1" + "0" * 30], ["--eval_every=" + "9" * 5000], ["--arch=two\nlines"], ["--init_from=" + "x" * 5000], ["--init_from=\udcff"], ["--data_dir=" + "x" * 5000],
    ["--lambd=1e308", "--eta=1e308"], ["--padding=1" + "0" * 12], ["--image_size=1" + "0" * 12, "--patch_size=1" + "0" * 12]])
def test_flags_that_once_were_too_much(outcome, cache, tmp_path, argv):
    """Sizes that no machine has, and words that no file system takes."""
    said = outcome(train_vit, [*TINY, f"--data_dir={cache}", f"--out_dir={tmp_path / 'out'}", *argv])
    assert said is None or said.startswith("train_vit.py: ")
