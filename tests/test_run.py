"""What a run does with its folder, its metrics, its checkpoints and its signals."""
import os
import signal
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import metrics
from test_checkpoint import make

from checkpoint import read_checkpoint
from flags import option, UserError
from optim import make_optimizers
from processes import Processes
from run import read_metrics, Run, RunEnded, RunFlags, share_of_peak


@dataclass(kw_only=True)
class Config(RunFlags):
    batch_size: int = option(1, "", fixed=True)
    log_every: int = option(1, "")


def run_in(out, **more):
    return Run(Config(out_dir=str(out), **more), "vit", "tiny", Processes("cpu"))


def start(out, total=10, eval_every=100, version=None, **more):
    """(run, steps, work): a run that has resumed what there is; work(loss) does what the scripts do
    in each of the steps, and returns whether an evaluation is due."""
    model = make("vit")
    optimizers = make_optimizers(model, "adamw", 1e-3, 0.1, (0.9, 0.99))
    run = run_in(out, **more)
    run.attach(model, optimizers, dict(name="abc", version=version))
    steps = run.steps(total, "a model", eval_every)

    def work(loss=1.0):
        model(torch.ones(2, 3, 16, 16)).square().mean().backward()
        optimizers[0].step()
        run.log(torch.tensor(loss), 0.1)
        return run.evaluation_due
    return run, steps, work


def test_a_folder_is_not_taken_by_accident(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="nothing to resume"):
        run_in(out, resume=True)
    assert not out.exists()
    first = run_in(out)
    with pytest.raises(UserError, match="another run is writing"):
        run_in(out, overwrite=True)
    first.close()
    ours, theirs = ["ckpt.pt", "ckpt.prev.pt", "best.pt", "metrics.jsonl"], ["notes.txt", "x.pt"]
    for name in ours + theirs:
        (out / name).touch()
    with pytest.raises(UserError, match="is not empty"):
        run_in(out)
    resumed = run_in(out, resume=True)
    assert {*ours, *theirs, ".lock"} == {p.name for p in out.iterdir()}
    resumed.close()
    with pytest.raises(UserError, match="exclude each other"):
        run_in(out, resume=True, overwrite=True)
    run_in(out, overwrite=True).close()
    assert {*theirs, ".lock"} == {p.name for p in out.iterdir()}


def test_checkpoints_that_are_kept(tmp_path):
    """A resume past them leaves them, an overwriting run does not."""
    run, steps, work = start(tmp_path, total=3, keep="2,5")
    weights = []
    for step in steps:
        work()
        weights.append(next(run.model.parameters()).clone())
    assert not (tmp_path / "ckpt-5.pt").exists()
    kept = read_checkpoint(tmp_path / "ckpt-2.pt", "vit")
    assert kept["step"] == 2 and torch.equal(next(iter(kept["model"].values())), weights[1])
    run.save("ckpt.pt")
    run.close()
    run, *_ = start(tmp_path, resume=True)
    run.close()
    assert (tmp_path / "ckpt-2.pt").exists()
    run_in(tmp_path, overwrite=True).close()
    assert not (tmp_path / "ckpt-2.pt").exists()


def test_rates_leave_out_the_first_step_evaluation_and_saving(tmp_path, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("run.time.perf_counter", lambda: now[0])
    run, steps, work = start(tmp_path, eval_every=3, log_every=5)
    monkeypatch.setattr("run.write_checkpoint", lambda *file, **how: now.append(now.pop() + 100))
    for seconds, _ in zip([50] + 9 * [0.25], steps):
        now[0] += seconds
        if work():
            now[0] += 100
            run.record(dict(loss=1.0))
    done = run.done()
    lines = read_metrics(tmp_path)
    rates = [line["examples_per_s"] for line in lines[1:] if "loss" not in line or "lr" in line]
    assert rates == pytest.approx(6 * [4]) and done == lines[-1]
    assert (done["event"], done["seconds"], done["best"]) == ("done", 852.25, None)
    out = capsys.readouterr().out
    assert "step 1/10: loss 1.0000, lr 1.00e-01\n" in out
    assert "step 5/10: loss 1.0000, 4 images/s, lr 1.00e-01, 0.0 min left\n" in out
    assert "done: 10 steps in 852 s, 4 images/s; written" in out


def train(out, until=None, **more):
    """20 steps, whose losses are 0, 1, 2 ...; logs every 6 and evaluates every 5."""
    run, steps, work = start(out, 20, 5, log_every=6, **more)
    for step in steps:
        if work(float(step)):
            run.record(dict(loss=1.0))
        if run.step == until:
            os.kill(os.getpid(), signal.SIGTERM)
    return run.done()


def test_a_line_is_the_mean_of_all_steps_since_the_last(tmp_path, monkeypatch, capsys):
    """Whatever is saved or evaluated between, also with a full disk behind stdout. The first after
    a resume is of its own steps, and a finished run that is resumed changes nothing."""
    def files():
        return {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()}
    train(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(RunEnded):
        patch.setattr("sys.stdout", Mock(write=Mock(side_effect=OSError(28, "a full disk"))))
        train(tmp_path / "cut", until=9)
    train(tmp_path / "cut", resume=True)
    for name, at_10 in (("whole", 7.5), ("cut", 9)):
        found = {line["step"]: line["loss"] for line in metrics(tmp_path / name)}
        means = {1: 0, 5: 2.5, 6: 5, 10: at_10, 12: 10.5, 15: 13, 18: 16, 20: 18.5}
        assert found == means, name
    before = files()
    train(tmp_path / "cut", resume=True)
    assert "done: 20 steps in 0 s; written" in capsys.readouterr().out and files() == before


def test_resuming_drops_the_lines_it_will_write_again(tmp_path):
    run, steps, work = start(tmp_path)
    for step in steps:
        work()
        if step == 2:
            run.save("ckpt.pt")
        if step == 3:
            break
    run.write(dict(step=4, split="val", loss=1.0))
    run.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('\0\n\xff\n{"step": 1, "spl')         # torn
    run, steps, _ = start(tmp_path, resume=True)
    next(steps)
    run.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_set_that_was_prepared_anew_is_refused(tmp_path):
    run, steps, work = start(tmp_path, version="1")
    next(steps)
    work()
    run.save("ckpt.pt")
    run.close()
    start(tmp_path, version="1", resume=True)[0].close()
    with pytest.raises(UserError, match="prepared anew"):
        start(tmp_path, version="2", resume=True)


def test_best_pt_has_the_lowest_loss(tmp_path):
    run, steps, work = start(tmp_path)
    for (loss, best), _ in zip(((2.0, 1), (3.0, 1), (1.0, 3), (None, 3)), steps):
        work()
        run.record(dict(loss=0.5), loss)
        assert read_checkpoint(tmp_path / "best.pt")["step"] == best
    run.close()


def test_a_second_sigterm_waits_for_the_first(tmp_path):
    """torchrun sends each signal to all its processes, which may have had it before."""
    run, steps, work = start(tmp_path)
    next(steps)
    work()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(RunEnded) as stopped:
        next(steps)
    assert stopped.value.exit_status == 143 and (tmp_path / "ckpt.pt").exists()


@pytest.mark.parametrize("instructions", [{}, dict(amx_bf16=True), dict(avx512_bf16=True)])
def test_autocast_is_bfloat16_where_there_are_instructions(monkeypatch, instructions):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    Z, found = torch.ones(2, 2), {}
    for dtype in ("auto", "float32", "bfloat16"):
        with Processes("cpu", dtype).autocast():
            found[dtype] = (Z @ Z).dtype
    auto = torch.bfloat16 if instructions else torch.float32
    assert found == dict(auto=auto, float32=torch.float32, bfloat16=torch.bfloat16)


@pytest.mark.parametrize("name, peak", [("NVIDIA H100 80GB HBM3", 989e12), ("RTX 4090", 165e12),
                                        ("NVIDIA A100-SXM4-40GB", 312e12), ("Tesla T4", None)])
def test_share_of_the_peak_of_all_gpus(monkeypatch, name, peak):
    monkeypatch.setattr("run.device_name", lambda device: name)
    two = SimpleNamespace(world=2, bfloat16=True, device=None)
    assert share_of_peak(1e12, two) == (peak and 1e12 / (2 * peak))
    two.bfloat16 = False
    assert share_of_peak(1e12, two) is None
