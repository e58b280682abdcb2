"""Two processes under torchrun do what one does, share the evaluation, and outlive one of them.

The two have an agent of torchrun each, as on two machines, and meet over the loopback."""
import fcntl
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import common
import train_gpt
import train_mae
import train_vit
from data import images, prepare, text

ROOT = Path(common.__file__).parent
PICTURES = ["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--batch_size=20", "--log_every=1", "--device=cpu"]
SIMDINO = [*PICTURES, "--epochs=0.5", "--local_views=2", "--hidden=32", "--output=16", "--prototypes=24", "--drop_path=0", "--freeze_epochs=0.1"]
GPT = ["pydoc", "--data=tiny", "--width=16", "--heads=2", "--layers=2", "--context=16", "--batch_size=8", "--micro_batch=3", "--steps=12",
       "--warmup=2", "--log_every=1", "--eval_every=5", "--eval_windows=7", "--sample=0", "--device=cpu"]
RUNS = {        # a process's 4 sequences are split in 3 + 1, its 10 pictures in 5 + 5
    "vit": ("train_vit", *PICTURES, "--epochs=1", "--crop=resized", "--randaugment=1", "--accumulate=2"),
    "mae-before": ("train_mae", *PICTURES, "--epochs=0.5", "--accumulate=2", "--mask_tokens=before"),
    "mae-after": ("train_mae", *PICTURES, "--epochs=0.5", "--accumulate=2", "--mask_tokens=after"),
    "simdino": ("train_simdino", *SIMDINO, "--method=simdino"),
    "dino": ("train_simdino", *SIMDINO, "--method=dino"),
    "gpt": ("train_gpt", *GPT, "--arch=crate-alpha"),
    "bert": ("train_gpt", *GPT, "--objective=masked", "--arch=transformer"),
}
LONG = ["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--batch_size=10", "--epochs=1.9", "--save_every=30",
        "--eval_every=1000", "--log_every=1", "--dropout=0.1", "--drop_path=0.1", "--ema=0.9", "--device=cpu"]               # 76 steps
# The last run starts where LONG has ended, and only one of the agents counts it as a restart.
SCRIPT = f"""
import importlib, json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import common
rank = os.environ["RANK"]
def main(argv):
    for name, (script, *flags) in json.loads(argv[0]):
        if name == "again":
            os.environ["TORCHELASTIC_RESTART_COUNT"] = rank
        importlib.import_module(script).main([*flags, f"--out_dir=rank{{rank}}/{{name.replace('again', 'long')}}"])
common.cli(main)
"""


def metrics(folder, split="train"):
    return [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line.get("split") == split]


def weights(folder):
    content = common.load_checkpoint(folder / "ckpt.pt")
    extra = content["extra"]
    return content["model"] | {f"student.{k}": v for k, v in extra.get("student", {}).items()} | {k: v for k, v in extra.items() if k != "student"}


def torchrun(*args, cwd=ROOT):
    """A Popen of torchrun, its output in one pipe."""
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *map(str, args)], cwd=cwd, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})


def end(process):
    """SIGTERM, which torchrun hands on to its workers; SIGKILL would orphan them."""
    process.terminate()
    process.communicate()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """401 + 101 pictures, and 40,000 characters of Python's manual: nothing divides by 2."""
    folder = tmp_path_factory.mktemp("odd")
    with images.preparing("shapes", folder) as draft:
        images.write_meta(draft, "shapes", "images", image_size=32, **prepare._draw(draft, 401, 101))
    (folder / "manual.txt").write_text(text._pydoc()[:40_000])
    text.prepare("tiny", source=folder / "manual.txt", cache=folder, tokenizer=text.CharTokenizer(text.PRINTABLE), workers=1, verbose=False)
    return folder


@pytest.fixture(scope="module")
def runs(cache, tmp_path_factory):
    """A folder with all RUNS of one process in one/ and of two in rank0/, where LONG is too; and how the agents ended."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "runs.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    todo = [(name, [*run, f"--data_dir={cache}"]) for name, run in (RUNS | {name: ("train_vit", *LONG) for name in ("long", "again")}).items()]
    agents = [torchrun("--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--local_addr=127.0.0.1",
                       "runs.py", json.dumps(todo), cwd=folder) for _ in range(2)]
    try:
        for name, (script, *flags) in RUNS.items():
            importlib.import_module(script).main([*flags, f"--data_dir={cache}", f"--out_dir={folder / 'one' / name}"])
        said = [agent.communicate(timeout=400)[0] for agent in agents]
    finally:
        for agent in agents:
            end(agent)
    return folder, [agent.returncode for agent in agents], "\n".join(said)


def test_both_agents_end_well_and_one_process_writes(runs):
    folder, status, said = runs
    assert status == [0, 0], said[-5000:]
    assert sorted(os.listdir(folder)) == ["one", "rank0", "runs.py"]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_are_one(runs, name):
    one, two = runs[0] / "one" / name, runs[0] / "rank0" / name
    a_lines, b_lines = metrics(one), metrics(two)
    steps = {"vit": 20, "gpt": 12, "bert": 12}.get(name, 10)
    assert [line["step"] for line in a_lines] == [line["step"] for line in b_lines] == list(range(1, steps + 1))
    for a, b in zip(a_lines, b_lines):
        early = a["step"] <= 3 or "dino" not in name                     # AdamW makes much of a rounding error where a gradient is almost 0
        assert a.keys() == b.keys()
        for key in a.keys() - {"split", "examples_per_s", "tokens_per_s"}:
            large = key in ("coding_rate", "effective_rank")
            assert a[key] == pytest.approx(b[key], abs=1e-5 if early else 1e-4, rel=1e-4 if large else 0), (key, a["step"])
    a, b = weights(one), weights(two)
    assert a.keys() == b.keys() and max((a[k] - b[k]).abs().max() for k in a) < 5e-4


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_evaluate_every_sample_once(runs, name):
    one, two = (metrics(runs[0] / folder / name, "val") for folder in ("one", "rank0"))
    assert len(one) == (3 if name in ("gpt", "bert") else 1)
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        # a picture or a token may sit on the fence; DINO's and SimDINO's neighbours are found among 101
        near = dict(loss=1e-4 if name == "vit" else 1e-5, ppl=1e-3, acc=0.03 if "dino" in name else 2e-3 if name == "bert" else 0.011, plain=0.03)
        for key in a.keys() - {"split"}:
            assert a[key] == pytest.approx(b[key], abs=near.get(key, 0)), key
    if name == "vit" or "mae" in name:
        assert one[-1]["n"] == 101
    if name == "gpt":
        assert one[0]["n"] == 7 * 16 and one[-1]["n"] > 100 * 16


def test_three_ranks_share_the_evaluation(cache):
    """Each takes a third of what there is, and the thirds are the whole."""
    data, words = images.load("shapes", cache=cache), text.load("tiny", cache)
    val = images.Images(data.val_images, data.val_labels, "cpu")
    flags = {train_vit: PICTURES, train_mae: PICTURES, train_gpt: [*GPT, "--objective=masked"]}
    c = {script: common.parse(script.Config, script.PRESETS, given, "")[0] for script, given in flags.items()}
    vit, mae = train_vit.build_model(c[train_vit], 10).eval(), train_mae.build_model(c[train_mae])
    bert = train_gpt.build_model(c[train_gpt], words.tokenizer)
    x, y = torch.randn(101, 4), torch.arange(101) % 10
    todo = dict(
        classify=lambda p: common.classify(vit, val, data, c[train_vit], p, batch_size=20),
        features=lambda p: common.features(vit.encoder, val, data, c[train_vit], p, batch_size=20),
        neighbours=lambda p: common.nearest_neighbours(x, y, x[:50], y[:50] // 2, 10, k=3, processes=p, chunk=9),
        mae=lambda p: train_mae.validate(mae, val, data, c[train_mae], p, batch_size=8),
        bert=lambda p: train_gpt.evaluate(bert, words.val, c[train_gpt], words.tokenizer, p, all_tokens=True))
    for name, evaluate in todo.items():
        parts = []
        for rank, world in ((0, 1), (0, 3), (1, 3), (2, 3)):
            one_of_them = common.Processes("cpu")
            one_of_them.rank, one_of_them.world, one_of_them.sum = rank, world, lambda total: parts.append(total.clone()) or total
            evaluate(one_of_them)
        whole, *thirds = parts
        torch.testing.assert_close(sum(thirds), whole, atol=1e-4, rtol=1e-5)
        if name == "features":
            assert [int(third.any(1).sum()) for third in thirds] == [34, 34, 33]
        elif name != "neighbours":
            counts = [int(third[-1]) for third in thirds]
            assert max(counts) < 0.4 * int(whole[-1]), name


def test_a_start_does_not_see_what_the_one_before_left_in_the_store():
    """Though one of the new processes comes long before the other."""
    store = dist.HashStore()
    for start in range(3):
        with ThreadPoolExecutor(2) as pool:
            early = pool.submit(common.own_store, store, start % 2, 2)
            time.sleep(0.2)
            assert not early.done()
            late = pool.submit(common.own_store, store, 1 - start % 2, 2)
            mine, theirs = early.result(60), late.result(60)
        assert not mine.check(["address"]) and not theirs.check(["address"])
        mine.set("address", str(start))
        assert theirs.get("address") == str(start).encode()


def workers(agent):
    """{RANK: pid} of the processes that an agent of torchrun has started."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == agent.pid and b"train_vit.py" in (entry / "cmdline").read_bytes():
                    told = dict(line.split("=", 1) for line in (entry / "environ").read_text().split("\0") if "=" in line)
                    found[int(told["RANK"])] = int(entry.name)
            except (OSError, KeyError, ValueError):                      # it has ended meanwhile, or is just starting
                pass
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the workers are found in /proc")
def test_a_killed_worker_is_replaced_and_the_run_goes_on(runs, cache, tmp_path):
    """One is killed before there is a checkpoint, the other, which writes, after: the run ends as if nothing had happened."""
    out = tmp_path / "out"
    agent = torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=2", "train_vit.py", *LONG, f"--data_dir={cache}", f"--out_dir={out}")

    def steps():
        try:
            return [line["step"] for line in metrics(out)]
        except (OSError, ValueError):                                    # nothing yet, or half a line
            return []

    def until(condition):
        deadline = time.monotonic() + 300
        while not condition():
            assert agent.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        return steps()[-1]

    def locked():
        with open(out / ".lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False
    try:
        until(steps)
        first = workers(agent)
        assert len(first) == 2 and locked()
        os.kill(first[1], signal.SIGKILL)
        assert not (out / "ckpt.pt").exists()
        until(lambda: not Path(f"/proc/{first[0]}").exists() and len(workers(agent)) == 2)
        second = workers(agent)
        reached = until(lambda: (out / "ckpt.pt").exists() and steps() and steps()[-1] > 30)
        os.kill(second[0], signal.SIGKILL)
        assert not set(first.values()) & set(second.values())
        assert common.load_checkpoint(out / "ckpt.pt", "vit")["step"] in (30, 60) and reached < 76
        said = agent.communicate(timeout=300)[0]
    finally:
        end(agent)
    assert agent.returncode == 0, said[-5000:]
    assert said.count("step 1/76:") == 2 and said.count("step 30/76:") == said.count("step 76/76:") == 1 and said.count("step 31/76:") == 2
    assert steps() == list(range(1, 77)) and not locked()
    whole = runs[0] / "rank0" / "long"
    a, b = weights(whole), weights(out)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert [m["loss"] for m in metrics(out)] == [m["loss"] for m in metrics(whole)] and metrics(out, "val") == metrics(whole, "val")
