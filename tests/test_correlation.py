"""The measure against model.py's objective, Kendall's tau by plain loops, a grid of runs."""
import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import metrics, same, weights

import train_vit
from experiments import correlation
from experiments.correlation import tau_b
from model import ImageClassifier, ImageConfig, sparse_rate_reduction


def test_mean_objective():
    """The mean of model.py's over layers and images, whatever parts they come in."""
    config = ImageConfig(width=8, heads=2, layers=2, image_size=8, patch_size=4, classes=5)
    encoder, x = ImageClassifier(config).eval().encoder, torch.randn(260, 3, 8, 8)
    with torch.no_grad():
        each = [sparse_rate_reduction(step.out, layer.attention.bases(), 0.5, 0.1)
                for layer, step in zip(encoder.layers, encoder.trace(x))]
    found = correlation.mean_objective(encoder, x)
    assert found == pytest.approx(torch.stack(each).mean().item(), rel=1e-4)


def test_tau():
    """One pair at a time; bootstrapped runs that follow the gap always do so."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (2, 12)).astype(float)
    counts = rng.integers(0, 3, (5, 12))
    for count, found in zip(counts, tau_b(x, y, counts)):
        pairs = list(itertools.combinations(zip(np.repeat(x, count), np.repeat(y, count)), 2))
        a, b = np.sign([(p[0] - q[0], p[1] - q[1]) for p, q in pairs]).T
        assert found == pytest.approx((a * b).sum() / math.sqrt(abs(a).sum() * abs(b).sum()))
    assert tau_b(x, np.ones(12), counts).tolist() == [0] * 5
    gap, noise = rng.normal(size=(2, 30))
    assert correlation.correlation(gap ** 3, gap) == pytest.approx([1] * 3)
    assert correlation.correlation(-gap, gap) == pytest.approx([-1] * 3)
    tau, low, high = correlation.correlation(noise, gap)
    assert low < tau < high and 0.2 < high - low < 0.8


def test_a_grid(tmp_path, cache, monkeypatch):
    """Each run ends once it fits. One that had to be made longer is the run that was as long from
    the start; the same run again trains nothing."""
    recipe = ["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--crop=none",
              "--train_images=200", "--weight_decay=0", "--warmup_epochs=1", "--flip=false"]
    grid = [dict(arch=arch, lr=lr, batch_size=20, dropout=0.1, seed=3)
            for arch, lr in (("crate", 1e-30), ("crate", 1e-2), ("crate-n", 1e-30))]
    monkeypatch.setattr(correlation, "RECIPE", recipe)
    monkeypatch.setattr(correlation, "GRID", grid)
    places = [f"--data_dir={cache}", "--device=cpu"]
    flags = [*places, f"--out_dir={tmp_path}", "--samples=20"]
    (tau, low, high), rows = correlation.main([*flags, "--fitted=9"])
    assert low <= tau <= high
    for row, theta in zip(rows, grid, strict=True):
        val = metrics(tmp_path / "-".join(map(str, theta.values())), "val")[-1]["loss"]
        assert row["gap"] + row["train_loss"] == pytest.approx(val, abs=1e-5)

    folder, first = tmp_path / "-".join(map(str, grid[1].values())), rows[1]["train_loss"]
    monkeypatch.setattr(correlation, "GRID", [grid[1]] * 3)
    rows = correlation.main([*flags, f"--fitted={first - 1e-3}"])[1]
    assert rows[0]["train_loss"] < first - 1e-3 and rows == [rows[0]] * 3
    epochs = json.loads((folder / "config.json").read_text())["epochs"]
    train_vit.main([*recipe, *places, *(f"--{k}={v}" for k, v in grid[1].items()), "--min_lr=0.01",
                    f"--epochs={epochs}", f"--out_dir={tmp_path / 'long'}", "--dtype=float32"])
    assert epochs >= 6 and same(weights(tmp_path / "long"), weights(folder))
