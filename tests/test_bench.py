"""The benchmarks compare equal functions, with correct clocks and counts; every table runs."""
import json
import re
from functools import partial

import pytest
import torch

import analyze
import bench
import evaluate
import sample
import train_gpt
import train_mae
import train_simdino
import train_vit
from flags import parse, parse_command
from bench import TEXT_ARCHS
from model import (ImageClassifier, ImageConfig, LanguageModel, MAEConfig, MaskedAutoencoder,
                   TextConfig)

CPU = torch.device("cpu")
IMAGE = dict(width=32, heads=4, layers=1, image_size=16, patch_size=4, classes=5)
MAE = {name: value for name, value in IMAGE.items() if name != "classes"}
TEXT = dict(width=16, heads=2, layers=1, context=6, vocab_size=9)

MODELS = {"image": lambda: ImageClassifier(ImageConfig(**IMAGE)),
          "mae": lambda: MaskedAutoencoder(MAEConfig(**MAE))}
for name in ("crate", "crate-alpha", "crate-mm", "crate-n", "aot", "tost", "transformer"):
    MODELS[name] = lambda arch=name: LanguageModel(TextConfig(arch=arch, **TEXT))


@pytest.mark.parametrize("name", MODELS)
def test_literal_is_the_same_function(monkeypatch, name):
    monkeypatch.setattr(torch, "randn", partial(torch.randn, dtype=torch.float64))
    fast = MODELS[name]().double()
    with torch.no_grad():
        for p in fast.parameters():             # away from zero biases and small residuals
            p.add_(0.2 * torch.randn_like(p))
    literal, losses = bench.literal(fast), []
    replaced = {type(m) for m in literal.modules() if {"attend", "forward"} & vars(m).keys()}
    assert replaced == {type(m) for m in fast.modules()} & set(bench.LITERAL)
    for model in (fast, literal):
        torch.manual_seed(1)                    # the same batch
        losses.append(bench.loss_function(model, 3, CPU)())
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=0, atol=1e-10)
    for (key, a), b in zip(fast.named_parameters(), literal.parameters()):
        assert a is not b and a.grad is not None, key
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-10, msg=key)


def test_alternate_takes_medians_in_turn(monkeypatch):
    now, calls = [0.0], []
    durations = {"a": [100.0, 1.0, 5.0, 3.0], "b": [50.0, 2.0, 2.0, 9.0]}   # the first is a warm-up
    left = {name: iter(seconds) for name, seconds in durations.items()}

    def call(name):
        calls.append(name)
        now[0] += next(left[name])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    both = {name: partial(call, name) for name in durations}
    assert bench.alternate(both, CPU, 3) == {"a": 3.0, "b": 2.0}
    assert calls == ["a", "b"] * 4


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run(command, *flags): the rows of a table."""
    monkeypatch.setattr(bench, "preset", lambda script, name, config: (
        MAE | dict(image_size=32) if config is MAEConfig else dict(TEXT)))
    monkeypatch.setattr(bench, "IMAGE_MODELS", [("a", IMAGE, 2), ("b", IMAGE, 4)])
    monkeypatch.setattr(bench, "SHAPES", [(2, 9, 16, 2), (2, 5, 32, 4)])
    monkeypatch.setattr(bench, "HEAD", (2048, 16, 2048))

    def run(*argv):
        path = tmp_path / "rows"
        bench.main([*argv, "--device=cpu", "--repeats=1", f"--json={path}"])
        machine, *rows = map(json.loads, path.read_text().splitlines())
        assert machine["GFLOP_per_s_of_a_large_matmul"] > 0
        path.unlink()
        return rows
    return run


THREE = ["fast", "literal", "transformer"]


@pytest.mark.parametrize("command, unit, variants", [
    ("vit", "images", THREE * 2), ("mae", "images", THREE), ("gpt", "tokens", THREE),
    ("ista", "tokens", THREE[:2] * 2), ("attention", "tokens", THREE[:2] * 2),
    ("head", "tokens", THREE[:2] + ["fast, blocks of 1024"])])
def test_compared(run, command, unit, variants):
    rows = run(command)
    assert [row["variant"] for row in rows] == variants
    for row in rows:
        assert min(row[key] for key in ("ms", "of_literal", "GFLOP_per_s", f"{unit}_per_s")) > 0
        assert row["of_literal"] == 1 or row["variant"] != "literal"
    if command == "vit":
        flops = 2 * ImageClassifier(ImageConfig(**IMAGE)).train_flops()
        assert rows[0]["GFLOP_per_s"] == pytest.approx(1e-6 * flops / rows[0]["ms"])
    if command == "head" and rows[1]["MB"] is not None:     # the logits and their gradient, or less
        assert rows[1]["MB"] > 2 * 4 * 2048 ** 2 / 1e6 and rows[2]["MB"] < 0.6 * rows[1]["MB"]


def test_generate(run):
    rows = run("generate", "--longest=64", "--dtype=float32")
    for row in rows[:len(TEXT_ARCHS)]:   # tensors of width 256, 4 layers: MSSA has one, MHSA two
        tensors = {"tost": 0, "aot-mhsa": 2, "transformer": 2}.get(row["variant"], 1)
        assert row["bytes_a_token"] == tensors * 4 * 256 * 4
        sums = 2 * 256 + 4 if row["variant"] == "tost" else 0   # norm and moment (K p), mass (K)
        assert row["bytes_constant"] == sums * 4 * 4
    assert len(rows) == len(TEXT_ARCHS) + 12
    assert all(row["ms"] > 0 for row in rows[len(TEXT_ARCHS):])


@pytest.mark.parametrize("cuda", [False, True])
def test_short_commands_parse(cuda):
    """Flags that the scripts take; what is read was written by the stage before."""
    training = {f"{s.__name__}.py": s for s in (train_vit, train_mae, train_simdino, train_gpt)}
    readers = {"evaluate.py": evaluate.COMMANDS, "analyze.py": analyze.COMMANDS}
    written = set()
    for command in sum(bench.short_commands(cuda), []):
        script, *argv = command.split()
        if script in training:
            c, _ = parse(training[script].Config, training[script].PRESETS, argv, "")
            assert c.resume == (c.out_dir in written)
            written.add(c.out_dir)
            continue
        if script == "sample.py":
            c, _ = parse(sample.Sample, {}, argv, "")
        else:
            flags = {name: command[0] for name, command in readers[script].items()}
            _, c = parse_command(flags, argv, "")
        assert c.ckpt.removesuffix("/best.pt") in written


TRAIN = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1].removeprefix("--out_dir="))
folder.mkdir()
(folder / "metrics.jsonl").write_text('{"examples_per_s": 7}\\n')
"""


def test_gpu_goes_on_after_failures(run, monkeypatch, capsys, tmp_path):
    """And reads the rate of a run, which a few lines stand for here, from its metrics."""
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.setattr(bench, "short_commands", lambda cuda: (
        [f"{tmp_path}/train.py --out_dir={{}}/a"], ["-c open('{}/a/metrics.jsonl')"], ["-c 1/0"]))
    with pytest.raises(SystemExit, match="1 of 3 failed"):      # a message: status 1
        run("gpu")
    printed = capsys.readouterr().out.splitlines()[1:]
    done, fine, fails = (re.split(r" {2,}\S+ s ", line)[-1] for line in printed)
    assert done.split() == ["ok", "7", "examples/s"] and fine == "ok"
    assert fails.startswith("FAILED (1) ZeroDivisionError")
