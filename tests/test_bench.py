"""The benchmarks compare equal functions, with correct clocks and counts; every table runs."""
from functools import partial

import pytest
import torch

import bench
from model import (ImageClassifier, ImageConfig, LanguageModel, MAEConfig, MaskedAutoencoder,
                   TextConfig, train_flops)

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
    literal, losses = bench.literal(fast, *bench.LITERAL), []
    replaced = {type(m) for m in literal.modules() if {"attend", "forward"} & vars(m).keys()}
    owners = {owner for owner, *_ in bench.LITERAL.values()}
    assert replaced == {type(m) for m in fast.modules()} & owners
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
def run(monkeypatch):
    """run(command, *flags): the rows of a table, of small models."""
    text = dict(TEXT)
    models = dict(vit=[("a", 2, IMAGE), ("b", 4, IMAGE)], mae=[("a", 2, MAE)], gpt=[("a", 2, text)])
    rows = []
    monkeypatch.setattr(bench, "MODELS", models)
    monkeypatch.setattr(bench, "row", lambda title, variant, **values: rows.append(
        dict(title=title, variant=variant) | values))

    def run(*argv):
        bench.main([*argv, "--device=cpu", "--repeats=1"])
        return rows
    return run


STEPS = ["fast", "literal attention", "literal ISTA", "literal", "transformer"]


@pytest.mark.parametrize("table, unit, variants", [
    ("vit", "images", STEPS * 2), ("mae", "images", STEPS),
    ("gpt", "tokens", [*STEPS[:3], "literal head", *STEPS[3:]])])
def test_training_steps(run, table, unit, variants):
    rows = run(table)
    assert [row["variant"] for row in rows] == variants
    for row in rows:
        assert min(row[key] for key in ("ms", "of_literal", "GFLOP_per_s", f"{unit}_per_s")) > 0
        assert row["of_literal"] == 1 or row["variant"] != "literal"
    if table == "vit":
        flops = 2 * train_flops(ImageClassifier(ImageConfig(**IMAGE)))
        assert rows[0]["GFLOP_per_s"] == pytest.approx(1e-6 * flops / rows[0]["ms"])


def test_generate_and_length(run):
    rows = run("generate", "--longest=64")
    assert [row["title"] for row in rows[::6]] == ["one token after 2", "one token after 64"]
    assert len(rows) == 12 and all(row["ms"] > 0 for row in rows)
    titles = [row["title"] for row in run("length", "--longest=64")[12:]]
    assert titles == [f"{n} patches" for n in (1, 4, 16, 64) for _ in range(4)]
