"""Complexity measures on networks small enough to compute by hand, Kendall's tau against plain loops."""
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import analyze
import common
import train_vit
from data import images, prepare
from model import ImageClassifier, ImageConfig, sparse_rate_reduction

# Measures

def test_norm_measures():
    """W_1 = diag(2, 1) from diag(1, 1); W_2 = diag(3, 1) from diag(3, 0): squared spectral norms 4 and 9, Frobenius 5 and 10, moved 1 and 1."""
    def diagonals(*pairs):
        return {str(i): torch.diag(torch.tensor(pair)).double() for i, pair in enumerate(pairs)}
    found = analyze.norm_measures(diagonals((2.0, 1.0), (3.0, 1.0)), diagonals((1.0, 1.0), (3.0, 0.0)), margin=0.5)
    log = math.log
    expected = {"l2-norm": 15 ** 0.5, "param-norm": 15, "l2-norm-init": 2 ** 0.5, "fro-distance": 2, "spec-distance": 2, "1/margin": 4,
                "fro/spec": 5 / 4 + 10 / 9, "prod-of-spec": log(36), "prod-of-fro": log(50), "prod-of-spec/margin": log(36 * 4),
                "prod-of-fro/margin": log(50 * 4), "sum-of-spec": log(2 * 6), "sum-of-fro": log(2 * 50 ** 0.5),
                "sum-of-spec/margin": log(2 * 12), "sum-of-fro/margin": log(2 * 200 ** 0.5),
                "spec-init-main": log(36 * 4 * (1 / 4 + 1 / 9)), "spec-orig-main": log(36 * 4 * (5 / 4 + 10 / 9))}
    assert found == pytest.approx(expected)
    undefined = analyze.norm_measures(diagonals((2.0, 1.0)), diagonals((1.0, 1.0)), margin=-0.5)
    assert {name for name, value in undefined.items() if math.isnan(value)} == \
        {"1/margin", "spec-init-main", "spec-orig-main"} | {f"{kind}-of-{norm}/margin" for kind in ("sum", "prod") for norm in ("spec", "fro")}


def test_margin():
    """Margins -1, 0, .. 18 of twenty samples: the second smallest is 0."""
    y = torch.randint(0, 3, (20,))
    margins = torch.arange(-1.0, 19.0)[torch.randperm(20)]
    logits = torch.full((20, 3), -5.0).scatter(1, ((y + 1) % 3)[:, None], 2.0).scatter(1, y[:, None], 2 + margins[:, None])
    assert analyze.margin_of(logits, y) == 0 and analyze.margin_of(logits[:1], y[:1]) == margins[0]


def test_path_norm():
    """Paths of [[1, -2]] after [[1, 3], [-1, 0]]: squares 1 (1 + 9) + 4 (1 + 0) = 14."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
    network[1].weight.data, network[3].weight.data = torch.tensor([[1.0, 3.0], [-1.0, 0.0]]), torch.tensor([[1.0, -2.0]])
    assert analyze.path_norm(network, (2, 1, 1)) == 14
    assert network[1].weight[1, 0] == -1                                                      # left as it was


def test_flatness():
    """Accuracy falls by 0.1 at sigma = 0.3. One sample with weights (1, -1): right iff N(0, 2 sigma^2) > -2, so with Phi(2^1/2 / sigma)."""
    assert analyze.largest_sigma(lambda s: 0.9 - s / 3, rounds=30) == pytest.approx(0.3, rel=1e-4)
    assert analyze.largest_sigma(lambda s: 1.0) == pytest.approx(10, rel=0.01)
    network, x, y = nn.Linear(1, 2), torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    network.weight.data, network.bias.data = torch.tensor([[1.0], [-1.0]]), torch.zeros(2)
    for sigma in (0.0, 1.0, 3.0):
        expected = 1.0 if sigma == 0 else 0.5 * (1 + math.erf(1 / sigma))
        assert analyze.noisy_accuracy(network, x, y, sigma, 2000, 1) == pytest.approx(expected, abs=0.03)
    assert network.weight.flatten().tolist() == [1, -1]


def test_pac_bayes():
    """||w||^2 = 25, sigma = 1/2, m = 100: (25 / (4 / 4) + log 200 + 10) / 100 under the root."""
    assert analyze.pac_bayes(25, 0.5, 100) == pytest.approx(((25 + math.log(200) + 10) / 100) ** 0.5)


def test_srr():
    """One token 2, U = 3, eps = 1: 0.1 + 1/2 log 37 - 1/2 log 5. And the definition, with weights drawn at random."""
    model = ImageClassifier(ImageConfig(width=1, heads=1, layers=1, image_size=4, patch_size=4))
    model.encoder.layers[0].attention.U.weight.data.fill_(3.0)
    assert analyze.srr_measure(model, [torch.full((1, 1, 1), 2.0)], 1.0, 0.1).item() == pytest.approx(0.1 + 0.5 * math.log(37 / 5))
    model = ImageClassifier(ImageConfig(width=8, heads=2, layers=3, image_size=8, patch_size=4)).eval()
    with torch.no_grad():
        _, Z = model(torch.randn(4, 3, 8, 8), outputs=True)
        expected = [-sparse_rate_reduction(out, layer.attention.bases(), 0.5, 0.2) for layer, out in zip(model.encoder.layers, Z)]
        torch.testing.assert_close(analyze.srr_measure(model, Z, 0.5, 0.2), sum(expected) / 3)


def test_matrices():
    found = analyze.matrices(ImageClassifier(ImageConfig(width=8, heads=2, layers=1, image_size=8, patch_size=4)))
    layer = "encoder.layers.0"
    assert set(found) == {"encoder.embed.1.weight", f"{layer}.attention.U.weight", f"{layer}.attention.W.weight",
                          f"{layer}.sparsification.D", "head.1.weight"}


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
    """Hand: 1 2 3 4 against 1 3 2 4 has 5 pairs in order and 1 not; 1 1 2 against 1 2 3 has 2 of (2 x 3)^1/2."""
    one = np.ones((1, 4))
    assert analyze.tau_b(np.arange(4.0), np.array([1.0, 3, 2, 4]), one) == pytest.approx(4 / 6)
    assert analyze.tau_b(np.array([1.0, 1, 2]), np.arange(3.0), one[:, :3]) == pytest.approx(2 / 6 ** 0.5)
    rng = np.random.default_rng(0)
    x, y, counts = rng.integers(0, 6, 12).astype(float), rng.integers(0, 6, 12).astype(float), rng.integers(0, 3, (5, 12))
    expected = [plain_tau(np.repeat(x, count), np.repeat(y, count)) for count in counts]
    assert analyze.tau_b(x, y, counts) == pytest.approx(expected)
    assert analyze.tau_b(np.ones(4), np.arange(4.0), one) == 0                               # all tie
    assert np.isnan(analyze.tau_b(np.arange(4.0), np.arange(4.0), np.array([[3, 0, 0, 0]])))  # one run and its copies


def test_granulated_tau():
    """A grid of lr by arch by seed in which the measure follows the gap along lr, opposes it along arch."""
    thetas = [dict(lr=lr, arch=arch, seed=seed, width=5) for lr in (1, 2, 3) for arch in "ab" for seed in (0, 1)]
    gap = np.array([10.0 * t["lr"] + (t["arch"] == "b") + 100 * t["seed"] for t in thetas])
    x = np.array([10.0 * t["lr"] - (t["arch"] == "b") - 100 * t["seed"] for t in thetas])
    groups = analyze.grouped(thetas, "lr", ["lr", "arch"])
    assert sorted(map(len, groups)) == [3] * 4 and all(len({(thetas[i]["arch"], thetas[i]["seed"]) for i in g}) == 1 for g in groups)
    ones = np.ones((1, 12))
    assert analyze.granulated_tau(x, gap, groups, ones) == 1
    assert analyze.granulated_tau(x, gap, analyze.grouped(thetas, "arch", ["lr", "arch"]), ones) == -1
    assert np.isnan(analyze.granulated_tau(x, gap, analyze.grouped(thetas, "width", ["lr", "arch", "width"]), ones))
    swapped = x.copy()
    swapped[[0, 4]] = swapped[[4, 0]]                                        # lr 1 and 2 of one group of four: its tau is 1/3
    assert analyze.granulated_tau(swapped, gap, groups, ones) == pytest.approx((3 + 1 / 3) / 4)


def test_correlations():
    rng = np.random.default_rng(0)
    thetas = [dict(lr=lr, width=w, seed=s) for lr in range(3) for w in range(3) for s in range(3)]
    rows = [dict(theta=t, gap=gap, measures=dict(same=gap, opposite=-gap, constant=1.0, noise=rng.random(),
                                                 part=gap if i < 20 else math.nan, never=math.nan))
            for i, (t, gap) in enumerate(zip(thetas, rng.random(27)))]
    table = analyze.correlations(rows, ["lr", "width"], draws=300)
    assert all(table["same"][key] == pytest.approx([1, 1, 1]) for key in ("lr", "width", "overall", "psi")) and not table["same"]["inconclusive"]
    assert all(table["opposite"][key] == pytest.approx([-1, -1, -1]) for key in ("lr", "width", "overall", "psi"))
    assert table["constant"]["psi"] == [0, 0, 0] and table["constant"]["inconclusive"]
    tau, low, high = table["noise"]["overall"]
    assert low < tau < high and low < 0 < high and table["noise"]["inconclusive"] and table["noise"]["n"] == 27
    assert table["noise"]["psi"][0] == pytest.approx((table["noise"]["lr"][0] + table["noise"]["width"][0]) / 2)
    assert table["part"]["n"] == 20 and table["part"]["overall"] == pytest.approx([1, 1, 1]) and table["never"] == dict(n=0, inconclusive=True)


# The whole

@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Four runs of two steps, one that only began, and the data that they saw."""
    folder = tmp_path_factory.mktemp("grid")
    with images.preparing("shapes", folder / "cache") as draft:
        images.write_meta(draft, "shapes", "images", image_size=32, **prepare._draw(draft, 200, 100))
    for arch in ("crate", "transformer"):
        for lr in ("1e-30", "1e-2"):
            train_vit.main(["shapes", f"--arch={arch}", f"--lr={lr}", "--weight_decay=0", f"--data_dir={folder / 'cache'}", "--device=cpu",
                            f"--out_dir={folder / 'runs' / (arch + lr)}", "--epochs=0.5", "--width=16", "--layers=2", "--patch_size=8", "--seed=3"])
    (folder / "runs" / "began").mkdir()
    (folder / "runs" / "began" / "config.json").write_text("{}")
    return folder


def test_initial_weights(grid):
    """A run whose rate is next to nothing ends with the weights that `initial` makes anew."""
    for arch in ("crate", "transformer"):
        content = common.load_checkpoint(grid / "runs" / f"{arch}1e-30" / "ckpt.pt")
        first = analyze.initial(content).state_dict()
        assert all(torch.allclose(first[name], tensor, rtol=0, atol=1e-20) for name, tensor in content["model"].items())
    with pytest.raises(common.UserError, match="init_from"):
        analyze.initial(content | dict(run_config=content["run_config"] | dict(init_from="x.pt")))


def test_folder_of_runs(grid, capsys):
    base = ["correlation", f"--runs={grid / 'runs'}", f"--data_dir={grid / 'cache'}", "--device=cpu", "--samples=20", "--draws=1", "--bootstrap=50"]
    table = analyze.main([*base, "--tolerance=10", f"--json={grid / 'taus.json'}"])["taus"]
    printed = capsys.readouterr().out
    assert "left out: began, not finished" in printed and all(name in printed for name in table)
    assert len(table) == 23 and "psi" in printed and list(table["SRR"]) == ["arch", "lr", "overall", "psi", "n", "inconclusive"]
    written = json.loads((grid / "taus.json").read_text())
    assert len(written["runs"]) == 4 and written["taus"]["SRR"] == table["SRR"]
    for row in written["runs"]:
        model, meta = common.load_classifier(grid / "runs" / row["run"] / "ckpt.pt")
        line = [json.loads(line) for line in (grid / "runs" / row["run"] / "metrics.jsonl").read_text().splitlines()][-2]
        assert row["val_loss"] == pytest.approx(line["loss"], abs=1e-5) and row["gap"] == row["val_loss"] - row["train_loss"]
        assert row["measures"]["# params"] == common.count(model)
        assert (row["measures"]["l2-norm-init"] == 0) == row["run"].endswith("1e-30")
    for flags, message in ((["--train_loss=9"], "0 runs"), (["--axes=lrr"], "lrr is no flag of these runs, did you mean lr"),
                           (["--runs=/nowhere"], "no folder /nowhere"), ([f"--runs={grid / 'cache'}"], "0 finished runs in"),
                           ([f"--runs={next((grid / 'runs').glob('*e-30'))}"], "it is a run itself")):
        with pytest.raises(common.UserError, match=message):
            analyze.main([*base, *flags])
