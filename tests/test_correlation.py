"""Complexity measures on networks small enough to compute by hand, Kendall's tau by plain loops."""
import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import metrics, same, weights
from torch import nn

import train_vit
from experiments import correlation
from experiments.correlation import tau_b
from model import ImageClassifier, ImageConfig, sparse_rate_reduction


def test_flatness():
    """Accuracy falls by 0.1 at sigma = 0.3. With weights (1, -1) and noise of deviation 1 a sample
    is right iff N(0, 2) > -2, so with probability Phi(2^1/2) = 0.921."""
    found = correlation.largest_sigma(lambda s: 0.9 - s / 3, rounds=30)
    assert found == pytest.approx(0.3, rel=1e-4)
    network = nn.Linear(1, 2)
    network.weight.data, network.bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    found = correlation.noisy_accuracy(network, torch.ones(1, 1), torch.zeros(1).long(), 1.0, 2000)
    assert found == pytest.approx(0.921, abs=0.03)


def test_complexities(monkeypatch):
    """PAC-Bayes takes all matrices and nothing else; SRR is [S]'s, the negative of model.py's."""
    config = ImageConfig(width=8, heads=2, layers=2, image_size=8, patch_size=4, classes=5)
    model, initial = (ImageClassifier(config).eval() for _ in range(2))
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    monkeypatch.setattr(correlation, "largest_sigma", lambda accuracy: 0.5)
    found = correlation.complexities(model, initial, x, y, 100)
    moved = sum((w - v).square().sum().item()
                for w, v in zip(model.parameters(), initial.parameters()) if w.ndim == 2)
    bound = (moved / (4 * 0.5 ** 2) + math.log(100 / 0.5) + 10) / 100
    assert found["PAC-Bayes"] == pytest.approx(bound ** 0.5)
    with torch.no_grad():
        srr = [sparse_rate_reduction(step.out, layer.attention.bases(), 0.5, 0.1).mean()
               for layer, step in zip(model.encoder.layers, model.encoder.trace(x))]
    assert found["SRR"] == pytest.approx(-sum(srr).item() / 2, rel=1e-4)


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
    rows = [dict(gap=gap, measures=dict(up=gap ** 3, down=-gap, noise=a)) for gap, a in zip(
        rng.normal(size=30), rng.normal(size=30))]
    table = correlation.correlations(rows)
    assert table["up"] == pytest.approx([1] * 3) and table["down"] == pytest.approx([-1] * 3)
    tau, low, high = table["noise"]
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
    measured, moved = correlation.complexities, []

    def watched(model, initial, *rest):
        pairs = zip(model.parameters(), initial.parameters())
        moved.append(not all(torch.equal(w, v) for w, v in pairs if w.ndim == 2))
        return measured(model, initial, *rest)
    monkeypatch.setattr(correlation, "complexities", watched)
    places = [f"--data_dir={cache}", "--device=cpu"]
    flags = [*places, f"--out_dir={tmp_path}", "--samples=20"]
    table, rows = correlation.main([*flags, "--fitted=9"])
    assert list(table) == ["SRR", "PAC-Bayes"]
    assert moved == [False, True, False]        # lr 1e-30 moves nothing: the first model, made anew
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
