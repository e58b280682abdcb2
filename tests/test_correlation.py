"""Complexity measures on networks small enough to compute by hand, Kendall's tau by plain loops."""
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import analyze
import checkpoint
import train_vit
from flags import UserError
from parallel import count
from helpers import metrics
from model import ImageClassifier, ImageConfig, sparse_rate_reduction

# Measures


def measures(W, V, margin=0.5):
    W, V = ([torch.tensor(pair).double().diag() for pair in pairs] for pairs in (W, V))
    q = analyze.Quantities(*analyze.norms(W, V), margin=margin, sigma=0.5, m=100, params=8,
                           path_norm=6.0, srr=7.0)
    return {name: float(measure(q)) for name, measure in analyze.MEASURES.items()}


def test_measures():
    """W_1 = diag(2, 1) from diag(1, 1), W_2 = diag(3, 1) from diag(3, 0): squared spectral norms 4
    and 9, Frobenius 5 and 10, moved 1 and 1."""
    log = math.log
    assert measures([(2, 1), (3, 1)], [(1, 1), (3, 0)]) == pytest.approx({
        "# params": 8, "path-norm": 6, "SRR": 7, "1/margin": 4,
        "l2-norm": 15 ** 0.5, "param-norm": 15, "l2-norm-init": 2 ** 0.5,
        "fro-distance": 2, "spec-distance": 2, "fro/spec": 5 / 4 + 10 / 9,
        "prod-of-spec": log(36), "prod-of-spec/margin": log(36 * 4),
        "prod-of-fro": log(50), "prod-of-fro/margin": log(50 * 4),
        "sum-of-spec": log(2 * 6), "sum-of-spec/margin": log(2 * 12),
        "sum-of-fro": log(2 * 50 ** 0.5), "sum-of-fro/margin": log(2 * 200 ** 0.5),
        "spec-init-main": log(36 * 4 * (1 / 4 + 1 / 9)),
        "spec-orig-main": log(36 * 4 * (5 / 4 + 10 / 9)),
        "pac-bayes-init": ((2 + log(200) + 10) / 100) ** 0.5,
        "pac-bayes-orig": ((15 + log(200) + 10) / 100) ** 0.5,
        "1/sigma pac-bayes-flatness": 4})
    undefined = measures([(2, 1)], [(1, 1)], margin=math.nan)
    with_margin = {name for name in undefined if "margin" in name or name.endswith("-main")}
    assert {name for name, value in undefined.items() if math.isnan(value)} == with_margin


def test_margin():
    """Margins -1, 0, .. 18 of twenty samples: the second smallest is 0."""
    y = torch.randint(0, 3, (20,))
    margins = torch.arange(-1.0, 19.0)[torch.randperm(20)]
    logits = torch.full((20, 3), -5.0).scatter(1, ((y + 1) % 3)[:, None], 2.0)
    logits = logits.scatter(1, y[:, None], 2 + margins[:, None])
    assert analyze.margin_of(logits, y) == 0
    assert analyze.margin_of(logits[:1], y[:1]) == margins[0]


def test_path_norm():
    """Paths of [[1, -2]] after [[1, 3], [-1, 0]]: squares 1 (1 + 9) + 4 (1 + 0) = 14."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False), nn.ReLU(),
                            nn.Linear(2, 1, bias=False))
    network[1].weight.data = torch.tensor([[1.0, 3.0], [-1.0, 0.0]])
    network[3].weight.data = torch.tensor([[1.0, -2.0]])
    assert analyze.path_norm(network, (2, 1, 1)) == 14
    assert network[1].weight[1, 0] == -1                            # left as it was


def test_flatness():
    """Accuracy falls by 0.1 at sigma = 0.3. One sample with weights (1, -1) is right iff
    N(0, 2 sigma^2) > -2, so with probability Phi(2^1/2 / sigma)."""
    assert analyze.largest_sigma(lambda s: 0.9 - s / 3, rounds=30) == pytest.approx(0.3, rel=1e-4)
    assert analyze.largest_sigma(lambda s: 1.0) == pytest.approx(10, rel=0.01)
    network, x, y = nn.Linear(1, 2), torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    network.weight.data, network.bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    for sigma in (0.0, 1.0, 3.0):
        probability = 0.5 * (1 + math.erf(1 / sigma)) if sigma else 1
        accuracy = analyze.noisy_accuracy(network, x, y, sigma, 2000, 1)
        assert accuracy == pytest.approx(probability, abs=0.03)
    assert network.weight.flatten().tolist() == [1, -1]


def test_srr():
    """One token 2, U = 3, eps = 1: 0.1 + 1/2 log 37 - 1/2 log 5. And of a model, the mean over
    layers and images."""
    config = ImageConfig(width=1, heads=1, layers=1, image_size=4, patch_size=4)
    attention = ImageClassifier(config).encoder.layers[0].attention
    attention.U.weight.data.fill_(3.0)
    found = analyze.srr(attention, torch.full((1, 1, 1), 2.0), 1.0, 0.1)
    assert found.item() == pytest.approx(0.1 + 0.5 * math.log(37 / 5))

    config = ImageConfig(width=8, heads=2, layers=3, image_size=8, patch_size=4, classes=5)
    model = ImageClassifier(config).eval()
    x, y = torch.randn(4, 3, 8, 8), torch.arange(4)
    c = analyze.Correlation(eps=0.5, lambd=0.2, batch_size=3)
    margin, found = analyze.measure_outputs(model, x, y, c)
    with torch.no_grad():
        logits, trace = model(x), model.encoder.trace(x)
        U = [layer.attention.bases() for layer in model.encoder.layers]
        srr = torch.stack([sparse_rate_reduction(Z, *u, 0.5, 0.2) for (_, Z, _), *u in zip(trace, U)])
    assert found == pytest.approx(-srr.mean().item(), rel=1e-5)
    assert margin == pytest.approx(analyze.margin_of(logits, y), rel=1e-5)


def test_matrices():
    config = ImageConfig(width=8, heads=2, layers=1, image_size=8, patch_size=4, classes=5)
    model = ImageClassifier(config)
    layer = model.encoder.layers[0]
    expected = [model.encoder.embed[1].weight, layer.attention.U.weight, layer.attention.W.weight,
                layer.sparsification.D, model.head[1].weight]
    for ours, theirs in zip(analyze.matrices(model), expected, strict=True):
        assert torch.equal(ours, theirs.double())


# Rank correlation

def plain_tau(x, y):
    """tau-b, one pair at a time."""
    both = in_x = in_y = 0
    for i in range(len(x)):
        for j in range(i):
            a, b = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
            both, in_x, in_y = both + a * b, in_x + abs(a), in_y + abs(b)
    return both / math.sqrt(in_x * in_y)


def test_tau():
    one, line = np.ones((1, 4)), np.arange(4.0)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (2, 12)).astype(float)
    counts = rng.integers(0, 3, (5, 12))
    expected = [plain_tau(np.repeat(x, count), np.repeat(y, count)) for count in counts]
    assert analyze.tau_b(x, y, counts) == pytest.approx(expected)
    assert analyze.tau_b(np.ones(4), line, one) == 0                # all tie
    copies = np.array([[3, 0, 0, 0]])                               # of one run
    assert np.isnan(analyze.tau_b(line, line, copies))


def test_granulated_tau():
    """A grid of lr by arch by seed: the measure follows the gap along lr, opposes it along arch."""
    thetas = [dict(lr=lr, arch=arch, seed=seed, width=5)
              for lr in (1, 2, 3) for arch in "ab" for seed in (0, 1)]
    signs = np.array([[10 * t["lr"], t["arch"] == "b", 100 * t["seed"]] for t in thetas])
    gap, x = signs @ [1.0, 1.0, 1.0], signs @ [1.0, -1.0, -1.0]
    ones, axes = np.ones((1, 12)), ["lr", "arch", "width"]
    groups = analyze.grouped(thetas, "lr", axes)
    assert sorted(map(len, groups)) == [3] * 4
    assert all(len({(thetas[i]["arch"], thetas[i]["seed"]) for i in g}) == 1 for g in groups)
    assert analyze.granulated_tau(x, gap, groups, ones) == 1
    assert analyze.granulated_tau(x, gap, analyze.grouped(thetas, "arch", axes), ones) == -1
    nothing = analyze.granulated_tau(x, gap, analyze.grouped(thetas, "width", axes), ones)
    assert np.isnan(nothing)
    x[[0, 4]] = x[[4, 0]]               # lr 1 and 2 of one group of four: its tau is 1/3
    assert analyze.granulated_tau(x, gap, groups, ones) == pytest.approx((3 + 1 / 3) / 4)


def test_correlations():
    rng = np.random.default_rng(0)
    rows = []
    for i, gap in enumerate(rng.random(27)):
        theta = dict(lr=i // 9, width=i // 3 % 3, seed=i % 3)
        rows.append(dict(theta=theta, gap=gap, measures=dict(
            same=gap, opposite=-gap, constant=1.0, noise=rng.random(),
            part=gap if i < 20 else math.nan, never=math.nan)))
    table = analyze.correlations(rows, ["lr", "width"], draws=300)
    for key in ("lr", "width", "overall", "psi"):
        assert table["same"][key] == pytest.approx([1, 1, 1])
        assert table["opposite"][key] == pytest.approx([-1, -1, -1])
    assert table["constant"]["psi"] == [0, 0, 0]
    noise = table["noise"]
    tau, low, high = noise["overall"]
    assert low < tau < high and low < 0 < high and noise["n"] == 27
    assert noise["psi"][0] == pytest.approx((noise["lr"][0] + noise["width"][0]) / 2)
    inconclusive = [name for name, line in table.items() if line["inconclusive"]]
    assert inconclusive == ["constant", "noise", "never"]
    assert table["part"]["n"] == 20 and table["part"]["overall"] == pytest.approx([1, 1, 1])
    assert table["never"] == dict(n=0, inconclusive=True)


# The whole

@pytest.fixture(scope="module")
def grid(tmp_path_factory, cache):
    """Four runs of a few steps, and one that only began."""
    folder = tmp_path_factory.mktemp("grid")
    for arch in ("crate", "transformer"):
        for lr in ("1e-30", "1e-2"):
            train_vit.main(["shapes", f"--arch={arch}", f"--lr={lr}", "--weight_decay=0",
                            f"--data_dir={cache}", "--device=cpu", f"--out_dir={folder / arch}{lr}",
                            "--epochs=0.5", "--width=16", "--layers=2", "--patch_size=8",
                            "--train_images=200", "--seed=3"])
    (folder / "began").mkdir()
    (folder / "began" / "config.json").write_text("{}")
    return folder


def test_folder_of_runs(grid, cache, capsys):
    base = ["correlation", f"--runs={grid}", f"--data_dir={cache}", "--device=cpu", "--samples=20",
            "--draws=1", "--bootstrap=50", f"--out={grid / 'figure'}"]
    table = analyze.main([*base, "--tolerance=10", f"--json={grid / 'taus.json'}"])["taus"]
    printed = capsys.readouterr().out
    assert "left out: began, not finished" in printed and all(name in printed for name in table)
    assert list(table) == list(analyze.MEASURES)
    assert list(table["SRR"]) == ["arch", "lr", "overall", "psi", "n", "inconclusive"]
    saved = json.loads((grid / "taus.json").read_text())
    assert len(saved["runs"]) == 4 and saved["taus"]["SRR"] == table["SRR"]
    for row in saved["runs"]:
        model = checkpoint.load_model(grid / row["run"] / "ckpt.pt").model
        last = metrics(grid / row["run"], "val")[-1]
        assert row["val_loss"] == pytest.approx(last["loss"], abs=1e-5)
        assert row["gap"] == row["val_loss"] - row["train_loss"]
        assert row["measures"]["# params"] == count(model)
        # lr 1e-30 changes nothing: the initial model is made anew from the seed
        assert (row["measures"]["l2-norm-init"] == 0) == row["run"].endswith("1e-30")
    for flags, message in ((["--train_loss=9"], "0 runs in"),
                           (["--axes=lrr"], "lrr is not one of .*, did you mean lr"),
                           (["--runs=/nowhere"], "no folder /nowhere"),
                           ([f"--runs={cache}"], "0 finished runs in")):
        with pytest.raises(UserError, match=message):
            analyze.main([*base, *flags])
