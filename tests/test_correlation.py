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
from experiments.correlation import granulated_tau, tau_b
from model import ImageClassifier, ImageConfig, sparse_rate_reduction


def test_margin_and_flatness():
    """Margins -1, 0, .. 18 of twenty samples: the second smallest is 0. Accuracy falls by 0.1 at
    sigma = 0.3. With weights (1, -1) and noise of deviation 1 a sample is right iff N(0, 2) > -2,
    so with probability Phi(2^1/2) = 0.921."""
    logits = torch.tensor([-5.0, 2.0, 2.0]).repeat(20, 1)
    logits[:, 1] += torch.arange(-1.0, 19.0)[torch.randperm(20)]
    assert correlation.margin_of(logits, torch.ones(20).long()) == 0
    found = correlation.largest_sigma(lambda s: 0.9 - s / 3, rounds=30)
    assert found == pytest.approx(0.3, rel=1e-4)
    network = nn.Linear(1, 2)
    network.weight.data, network.bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    found = correlation.noisy_accuracy(network, torch.ones(1, 1), torch.zeros(1).long(), 1.0, 2000)
    assert found == pytest.approx(0.921, abs=0.03)


def test_complexities():
    """The norms are those of all matrices; SRR is [S]'s, the negative of model.py's."""
    config = ImageConfig(width=8, heads=2, layers=2, image_size=8, patch_size=4, classes=5)
    model, initial = (ImageClassifier(config).eval() for _ in range(2))
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    c = correlation.Correlation(lambd=0.2, draws=1)
    found = correlation.complexities(model, initial, x, y, 100, c)
    pairs = [(w, v) for w, v in zip(model.parameters(), initial.parameters()) if w.ndim == 2]
    sigma = found["1/sigma pac-bayes-flatness"] ** -0.5
    assert found["l2-norm"] == pytest.approx(sum(w.square().sum() for w, _ in pairs).item() ** 0.5)
    moved = sum((w - v).square().sum() for w, v in pairs).item()
    inside = moved / (4 * sigma ** 2) + math.log(100 / sigma) + 10
    assert found["pac-bayes-init"] == pytest.approx((inside / 100) ** 0.5)
    with torch.no_grad():
        srr = [sparse_rate_reduction(step.out, layer.attention.bases(), 0.5, 0.2).mean()
               for layer, step in zip(model.encoder.layers, model.encoder.trace(x))]
    assert found["SRR"] == pytest.approx(-sum(srr).item() / 2, rel=1e-4)


def test_tau():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (2, 12)).astype(float)
    counts = rng.integers(0, 3, (5, 12))
    for count, found in zip(counts, tau_b(x, y, counts)):       # one pair at a time
        pairs = list(itertools.combinations(zip(np.repeat(x, count), np.repeat(y, count)), 2))
        a, b = np.sign([(p[0] - q[0], p[1] - q[1]) for p, q in pairs]).T
        assert found == pytest.approx((a * b).sum() / math.sqrt(abs(a).sum() * abs(b).sum()))

    # a grid of lr by arch by seed: the measure follows the gap along lr, opposes it along arch
    thetas = [dict(lr=lr, arch=arch, seed=seed, width=5)
              for lr in (1, 2, 3) for arch in "ab" for seed in (0, 1)]
    signs = np.array([[10 * t["lr"], t["arch"] == "b", 100 * t["seed"]] for t in thetas])
    gap, x = signs @ [1.0, 1.0, 1.0], signs @ [1.0, -1.0, -1.0]
    once = np.ones((1, 12))
    assert granulated_tau(x, gap, thetas, "lr", once) == 1
    assert granulated_tau(x, gap, thetas, "arch", once) == -1
    assert np.isnan(granulated_tau(x, gap, thetas, "width", once))
    x[[0, 4]] = x[[4, 0]]               # lr 1 and 2 of one group of four: its tau is 1/3
    assert granulated_tau(x, gap, thetas, "lr", once) == pytest.approx((3 + 1 / 3) / 4)


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
    flags = [*places, f"--out_dir={tmp_path}", "--samples=20", "--draws=1"]
    table, rows = correlation.main([*flags, "--fitted=9"])
    assert list(table["SRR"]) == ["arch", "lr", "overall", "psi"]
    for row, theta in zip(rows, grid, strict=True):
        val = metrics(tmp_path / "-".join(map(str, theta.values())), "val")[-1]["loss"]
        assert row["gap"] + row["train_loss"] == pytest.approx(val, abs=1e-5)
        # lr 1e-30 changes nothing: the initial model is made anew from the seed
        assert (row["measures"]["l2-norm-init"] == 0) == (theta["lr"] == 1e-30)

    folder, first = tmp_path / "-".join(map(str, grid[1].values())), rows[1]["train_loss"]
    monkeypatch.setattr(correlation, "GRID", [grid[1]] * 3)
    rows = correlation.main([*flags, f"--fitted={first - 1e-3}"])[1]
    assert rows[0]["train_loss"] < first - 1e-3 and rows == [rows[0]] * 3
    epochs = json.loads((folder / "config.json").read_text())["epochs"]
    train_vit.main([*recipe, *places, *(f"--{k}={v}" for k, v in grid[1].items()), "--min_lr=0.01",
                    f"--epochs={epochs}", f"--out_dir={tmp_path / 'long'}", "--dtype=float32"])
    assert epochs >= 6 and same(weights(tmp_path / "long"), weights(folder))
