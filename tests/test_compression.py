"""The updates of experiments/compression.py are what they claim, and do to R^c what [S] found."""
import math

import pytest
import torch
from test_model import assert_near

from experiments import compression
from experiments.compression import Compression, directions
from model import mssa, subspace_coding_rate


def start(seed, norm):
    generator, c = torch.Generator().manual_seed(seed), Compression(width=24, heads=4)
    Z = torch.randn(20, 24, generator=generator, dtype=torch.float64)
    return norm * Z / 24 ** 0.5, compression.random_subspaces(c, generator)


@pytest.mark.parametrize("norm", [0.5, 2.0])
def test_directions_are_the_gradients_they_claim(norm):
    Z, U = start(1, norm)
    bases = torch.cat([*U], 1)                                      # orthonormal, all of them
    assert_near(bases.mT @ bases, torch.eye(24).double())
    beta = 6 / (20 * 0.5 ** 2)
    Z.requires_grad_()
    w = Z @ U
    first, second = beta / 2 * w.square().sum(), -beta ** 2 / 4 * (w @ w.mT).square().sum()
    rate = subspace_coding_rate(Z, U, 0.5)
    found = directions(Z.detach(), U, 0.5)
    for name, function in {"neumann": first + second, "exact": rate}.items():
        gradient, = torch.autograd.grad(function, Z, retain_graph=True)
        assert_near(found[name], -gradient / beta)
    attention = beta * mssa(Z, U)
    assert_near(found["mssa"], attention)
    assert_near(Z + 0.1 * found["shrunk"], 0.9 * Z + 0.1 * attention)       # [J] Eq. (34)
    assert first + second <= rate                                   # [S]'s lower bound
    terms = compression.taylor_terms(Z, U, 0.5)
    assert terms == pytest.approx((first.item(), -second.item()))


@pytest.mark.parametrize("norm", [0.3, 1.0, 5.0])
def test_mssa_raises_what_the_gradient_lowers(norm):
    Z, U = start(0, norm)
    curves = compression.iterate(Z, U, Compression(iterations=12))
    assert math.isnan(compression.iterate(Z, U, Compression(step=50))["neumann"][-1])   # no error
    assert all(a < b for a, b in zip(curves["mssa"], curves["mssa"][1:]))       # [S]'s answer
    # shrunk: large tokens attend to themselves, and beta is 1.2 here
    for name in ("exact", "negative", *["shrunk"] * (norm < 5)):
        assert all(a > b for a, b in zip(curves[name], curves[name][1:])), name
    first, second = (torch.tensor(curves[term]) for term in ("first term", "second term"))
    assert (first.diff() > 0).all() and (second.diff() > 0).all()       # MSSA raises both
    assert norm > 0.5 or (first.diff() > second.diff()).all()       # R^c is about first - second


def test_the_series_diverges_beyond_one(tmp_path):
    flags = ["--width=24", "--heads=4", "--tokens=20", "--iterations=12"]
    small, large = compression.main([*flags, f"--out={tmp_path / 'new' / 'a.png'}"])
    assert small[1]["neumann"] == pytest.approx(small[1]["exact"], rel=0.5)
    beyond = large[1]["neumann"]
    assert beyond[3] > beyond[0] and math.isnan(beyond[-1])
    assert (tmp_path / "new" / "a.png").exists()
    Z, U = start(0, 1.0)
    largest = max(torch.linalg.svdvals(Z @ u)[0].item() ** 2 for u in U)
    assert compression.series_ratio(Z, U, 0.5) == pytest.approx(6 / (20 * 0.5 ** 2) * largest)
