"""What analyze.py reports, against the definitions."""
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import analyze
from checkpoint import TASKS
from data import images
from helpers import write_model
from model import (ImageClassifier, ImageConfig, LayerTrace, MAEConfig, MaskedAutoencoder,
                   coding_rate, sparse_rate_reduction)
from scores import model_input

TINY = dict(width=16, heads=2, layers=3, image_size=32, patch_size=8, classes=10)


@pytest.fixture
def save(tmp_path, cache):
    """save(model, task, name): a checkpoint as the training scripts write it; its path."""
    def write(model, task="vit", name="best.pt"):
        write_model(tmp_path / name, model, task, images.load("shapes", cache).meta())
        return str(tmp_path / name)
    return write


@pytest.fixture
def call(tmp_path, cache):
    """call(command, *flags): analyze.main on the CPU with small data; its numbers."""
    def run(command, *flags):
        out = tmp_path / f"{command}.png"
        numbers = analyze.main([command, "--device=cpu", f"--data_dir={cache}", f"--out={out}",
                                *flags])
        assert out.stat().st_size > 1000
        return numbers
    return run


def validation(cache, index):
    """Images of the validation split, normalized."""
    data = images.load("shapes", cache)
    return model_input(torch.from_numpy(data.val_images[index]), data, 32)


def check(backbone, x, rows, eps=0.3, lambd=0.1):
    """The rows of `layers`, against [N] Figure 3's numbers and model.py's objective in float64."""
    with torch.no_grad():
        Z, traces = backbone.tokens(x), backbone.trace(x)
    for row, layer, step in zip(rows, backbone.layers, traces, strict=True):
        U, out = layer.attention.bases().detach().double(), step.out.double()
        n, p = out.shape[1], U.shape[2]
        same = step.half * (Z.norm(dim=(1, 2)) / step.half.norm(dim=(1, 2)))[:, None, None]
        ws = [T.detach().double()[:, None] @ U for T in (layer.norm1(Z), Z, step.half, same)]
        ws[0] = ws[0] / ws[0].norm(dim=-1, keepdim=True)
        Rc, before, after, scaled = (
            0.5 * (torch.eye(n) + p / (n * eps ** 2) * w @ w.mT).logdet().sum(1) for w in ws)
        for key, values in dict(rate_of_subspaces=Rc, rate=coding_rate(out, eps),
                                attention=after - before, scaled=scaled - before,
                                nonzeros=(out != 0).double().mean((1, 2)),
                                srr=sparse_rate_reduction(out, U, eps, lambd)).items():
            expected = [values.mean().item(), values.std(correction=0).item()]
            assert [row[key], row[f"{key}_std"]] == pytest.approx(expected, rel=1e-4, abs=1e-6), key
        Z = step.out


def test_unit_bases_do_not_depend_on_the_size_of_U():
    """And orthonormal ones are left as they are."""
    layer = ImageClassifier(ImageConfig(**TINY)).encoder.layers[0]
    out = torch.randn(3, 5, 16).relu()
    U, found = torch.nn.init.orthogonal_(layer.attention.U.weight.data), []
    for size, unit_bases in ((1, False), (1, True), (3, True), (3, False)):
        U /= size
        c, step = analyze.Layers(unit_bases=unit_bases), LayerTrace(out, out, None)
        found.append(analyze.layer_numbers(layer, out, step, c)["srr"])
    torch.testing.assert_close(found[1:3], [found[0]] * 2)
    assert (found[3] > found[0]).all()


def test_rates_are_computed_in_float64():
    """Tokens of a trained layer: far from 0 and close together. Float32 cannot factor them."""
    layer = ImageClassifier(ImageConfig(**TINY | dict(width=32))).encoder.layers[0]
    Z = 1e4 * torch.randn(1, 1, 32) + torch.randn(5, 64, 32)
    assert coding_rate(Z, 0.1).isnan().any()
    with torch.no_grad():
        found = analyze.layer_numbers(layer, Z, LayerTrace(Z, Z, None), analyze.Layers())
    assert all(values.isfinite().all() for values in found.values())
    assert torch.allclose(found["rate"], coding_rate(Z.double(), 0.1))


@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost", "aot"])
def test_layers(save, call, cache, arch):
    """Beside the untrained model. A masked autoencoder's encoder sees all."""
    vit = ImageClassifier(ImageConfig(arch=arch, **TINY)).eval()
    mae = MaskedAutoencoder(MAEConfig(arch="crate", decoder_layers=2, **TINY)).eval()
    a, b = save(vit, name="a.pt"), save(mae, "mae", name="b.pt")
    flags = "--samples=12", "--batch_size=5", "--eps=0.3", "--lambd=0.2", "--untrained", "--seed=5"
    runs = call("layers", f"--ckpt={a},{b}", *flags)["runs"]
    assert [(run["ckpt"], run["untrained"]) for run in runs] == [(a, False), (a, True), (b, False),
                                                                 (b, True)]
    assert len({run["srr"] for run in runs}) == 4
    x = validation(cache, np.linspace(0, 99, 12).round().astype(int))
    for net, run in ((vit, runs[0]), (mae, runs[2])):
        check(net.encoder, x, run["layers"], lambd=0.2)
        assert run["srr"] == pytest.approx(sum(row["srr"] for row in run["layers"]) / 3)
    coded = "code_nonzeros" in runs[0]["layers"][0]
    assert coded == (arch not in ("crate", "aot"))              # else it is Z^{l+1}


def test_subspaces(save, call):
    """Orthogonal bases have coherence 0, whatever their norm; else it is that of each pair."""
    U = torch.linalg.qr(torch.randn(12, 12).double())[0].view(12, 3, 4).transpose(0, 1)
    gram, found = analyze.coherence(5 * U)
    assert torch.allclose(gram, torch.eye(12).double()) and max(found.values()) < 1e-12
    U = torch.randn(3, 7, 2)
    columns = [U[k, :, j] / U[k, :, j].norm() for k in range(3) for j in range(2)]
    same, other = ([abs(float(columns[i] @ columns[j])) for i in range(6) for j in range(6)
                    if i != j and (i // 2 == j // 2) == within] for within in (True, False))
    assert analyze.coherence(U)[1] == pytest.approx(dict(
        within_mean=np.mean(same), within_max=max(same),
        across_mean=np.mean(other), across_max=max(other)))
    found = call("subspaces", f"--ckpt={save(ImageClassifier(ImageConfig(**TINY)))}")
    directions = F.normalize(torch.randn(20_000, 16), dim=1)
    assert found["random"] == pytest.approx(directions[:, 0].abs().mean().item(), rel=4e-2)


def test_tokens(save, call, cache):
    model = ImageClassifier(ImageConfig(**TINY)).eval()
    rows = call("tokens", f"--ckpt={save(model)}", "--index=7")["layers"]
    for row, step in zip(rows, model.encoder.trace(validation(cache, [7])), strict=True):
        Z = step.out[0].detach().double().numpy()
        assert row["nonzeros"] == pytest.approx((Z != 0).mean())
        share = np.linalg.svd(Z, compute_uv=False) ** 2 / (Z ** 2).sum()
        entropy = -(share * np.log(share + 1e-30)).sum()
        assert row["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-4)


@pytest.mark.parametrize("arch, task", [("crate", "vit"), ("tost", "vit"), ("crate", "mae")])
def test_saliency(arch, task, save, call, cache):
    """Of the class token or, since no loss shapes an autoencoder's, of the patches' mean."""
    kind, config = TASKS[task]
    model = kind(config(arch=arch, **TINY)).eval()
    flags = [f"--ckpt={save(model, task)}", "--pictures=5", "--index=2", "--layer=2"]
    found = call("saliency", *flags)
    with torch.no_grad():
        attention = model.encoder.trace(validation(cache, [2, 3, 4, 5, 6]))[1].attention
    maps = attention[:, :, 1:] if arch == "tost" else attention[:, :, 0, 1:]
    maps = attention[:, :, 1:, 1:].mean(2) if task == "mae" else maps
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    assert found["heads"] == ["mean of heads", "head 1", "head 2"]
    torch.testing.assert_close(found["maps"], maps)
    only = call("saliency", *flags, "--head=2")
    assert only["heads"] == ["head 2"] and torch.equal(only["maps"], found["maps"][:, 2:])
