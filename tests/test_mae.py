"""The masked autoencoder against [B] Section 7.6, one image and one patch at a time, in float64.
Its decoder's layers, Eq. (7.6.3)-(7.6.4), are written out in test_checkpoint.py."""
import pytest
import torch
from test_image_model import patches_literally
from test_model import assert_compiles, assert_near, float64, orthonormal, randomize  # noqa: F401
from torch.nn import functional as F

from model import ARCHS, DecoderLayer, ISTA, MAEConfig, MaskedAutoencoder


def config(arch="crate", **fields):
    """16 patches of 48 numbers, 12 of them masked."""
    small = dict(width=16, heads=4, layers=2, image_size=16, patch_size=4)
    return MAEConfig(**small | dict(arch=arch) | fields)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_parameter_learns(arch):
    """From the first step on. The first loss is the variance of the targets, 1, and that of the
    prediction: xavier-uniform weights make it 2 d / (d + 48) on normalised tokens."""
    net = MaskedAutoencoder(config(arch, decoder_layers=1))
    loss = net(torch.randn(32, 3, 16, 16), torch.rand(32, 16))
    loss.backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in net.parameters())
    backwards = ARCHS[arch].sparsification is ISTA and not ARCHS[arch].residual
    assert isinstance(net.decoder[0], DecoderLayer) == backwards
    assert loss.item() == pytest.approx(1 + 2 * 16 / (16 + 48), rel=0.25)


def forward_literally(net, image, draw):
    """Predicted patches (n, 48) of one image, and the mean squared error of each masked one."""
    c, e, n = net.config, net.encoder, net.config.patches
    patches = patches_literally(image[None], c.patch_size)[0]
    masked = sorted(range(n), key=draw.__getitem__)[-c.masked_patches():]

    tokens = [e.class_token[0, 0] + e.positions[0, 0]]
    for i, patch in enumerate(patches):
        if i not in masked:
            tokens.append(e.embed[0].weight @ patch + e.embed[0].bias + e.positions[0, 1 + i])
        else:
            tokens.append(net.mask_token[0, 0] + e.positions[0, 1 + i])
    Z = torch.stack(tokens)[None]
    for layer in e.layers:
        Z = layer(Z)
    Z = F.layer_norm(Z, (16,), e.norm.weight, e.norm.bias, 1e-6)

    for layer in net.decoder:
        Z = layer(Z)
    norm = net.decoder_norm
    Z = F.layer_norm(Z, (16,), norm.weight, norm.bias, 1e-6)
    predicted = (Z @ net.predict.weight.T + net.predict.bias)[0, 1:]
    return predicted, (predicted - patches)[masked].square().mean(1)


@pytest.mark.parametrize("fields", [dict(), dict(decoder_layers=3, arch="transformer")])
@torch.no_grad()
def test_forward(fields):
    net = randomize(MaskedAutoencoder(config(**fields)))
    x, noise = torch.randn(3, 3, 16, 16), torch.rand(3, 16)
    literal = [forward_literally(net, image, draw) for image, draw in zip(x, noise.tolist())]
    predicted, errors = zip(*literal)
    assert_near(net.predicted(x, net.mask_from(noise)), torch.stack(predicted))
    assert_near(net(x, noise), torch.cat(errors).mean())


def test_compiled_equals_eager():
    net = MaskedAutoencoder(config(layers=1))
    assert_compiles(randomize(net), torch.randn(2, 3, 16, 16), torch.rand(2, 16), tol=1e-6)


@pytest.mark.parametrize("image_size, patch_size, ratio, masked", [
    (224, 16, 0.75, 147), (12, 4, 0.75, 7), (20, 4, 0.8, 20), (40, 4, 0.9, 90)])
def test_masked_patches(image_size, patch_size, ratio, masked):
    """As many as the released code masks; test_forward has which ones."""
    c = config(image_size=image_size, patch_size=patch_size, mask_ratio=ratio)
    assert MaskedAutoencoder(c).mask_from(torch.rand(1, c.patches)).sum() == masked
