"""model.py's image models: classifier, trace, compiler, counts, patches and positions."""
import math

import pytest
import torch
from test_model import assert_compiles, assert_near, config, float64, randomize  # noqa: F401
from torch.nn import functional as F

import model
from model import ARCHS, ConfigError, ImageClassifier, ImageEncoder


@pytest.mark.parametrize("arch", ARCHS)
def test_classifier(arch):
    """Every parameter has a gradient; the trace holds what the layers compute."""
    net, x = randomize(ImageClassifier(config(arch))), torch.randn(3, 3, 8, 8)
    encoder = net.encoder
    logits = net(x)
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())
    Z = encoder.tokens(x)
    for layer, traced in zip(encoder.layers, encoder.trace(x), strict=True):
        half, attention = layer.compress(Z), layer.attention.map(layer.norm1(Z))
        assert_near((traced.tokens, traced.half, traced.attention), (Z, half, attention))
        Z = layer(Z)
        assert_near(traced.out, Z)
        if net.config.arch == "crate":                      # which passes on its code alone
            assert_near(traced.code, Z)
    if net.config.final_norm:                               # else the head begins with an LN
        Z = F.layer_norm(Z, (16,), encoder.norm.weight, encoder.norm.bias, 1e-6)
    assert_near(logits, net.head(Z[:, 0]))
    net.config.pool = "mean"
    assert_near(net(x), net.head(sum(Z[:, i] for i in range(1, 5)) / 4))


@pytest.mark.parametrize("arch, side", [
    ("crate", 8), ("crate-mm", 16), ("crate-alpha", 8), ("tost", 8)])
def test_compiled_equals_eager(arch, side):
    """Also at another image size, where positions are interpolated."""
    net = randomize(ImageClassifier(config(arch, layers=1)))
    assert_compiles(net, torch.randn(2, 3, side, side), tol=1e-6 if side == 16 else 1e-9)


def patches_literally(x, P):
    """(B, C, H, W) -> (B, n, P^2 C): patches in raster order, pixels by row, column, channel."""
    B, C, H, W = x.shape
    corners = [(i, j) for i in range(0, H, P) for j in range(0, W, P)]
    return torch.stack([x[:, :, i:i + P, j:j + P].permute(0, 2, 3, 1).flatten(1)
                        for i, j in corners], 1)


def test_patchify():
    x, square = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 6, 6)
    assert torch.equal(model.patchify(x, 2), patches_literally(x, 2))
    assert torch.equal(model.unpatchify(model.patchify(square, 3), 3), square)


def test_sincos_positions():
    d, side = 12, 3
    omega = [10000 ** (-4 * i / d) for i in range(d // 4)]
    code = [[f(at * o) for at in (column, row) for f in (math.sin, math.cos) for o in omega]
            for row in range(side) for column in range(side)]
    expected = torch.tensor([[0.0] * d] + code)[None]
    assert_near(model.sincos_positions(d, side).double(), expected, 1e-6)


@torch.no_grad()
def test_position_interpolation():
    """Patch centres lie at (i + 1/2) old / new - 1/2; inside, the cubic is near a straight line."""
    encoder, old, new = randomize(ImageEncoder(config(image_size=32))), 8, (16, 12)
    at = torch.arange(float(old))
    encoder.positions[0, 1:, :2] = torch.cartesian_prod(at, at)
    table = encoder.position_table(*new)
    centres = [(torch.arange(float(m)) + 0.5) * old / m - 0.5 for m in new]
    error = table[0, 1:, :2] - torch.cartesian_prod(*centres)
    assert error.view(*new, 2)[4:-4, 4:-4].abs().max() < 0.05
    assert torch.equal(table[:, 0], encoder.positions[:, 0])
    pytest.raises(ConfigError, encoder, torch.randn(1, 3, 30, 32))


def test_an_arch_of_ones_own():
    """It equals the row it was made from; with in_text=None it is for images alone."""
    torch.manual_seed(0)
    named = ImageClassifier(config("tost"))
    torch.manual_seed(0)
    own = ImageClassifier(config(ARCHS["tost"]._replace(in_text=None)))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(own(x), named(x))
    with pytest.raises(ConfigError, match="for images only"):
        model.TextConfig(arch=own.config.arch, width=16, heads=4)
