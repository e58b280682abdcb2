"""What analyze.py reports and draws, against the definitions."""
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import scrambled, write_model
from PIL import Image
from torch.nn import functional as F

import analyze
import measure
import model as models
from checkpoint import TASKS
from data import augment, images
from data.folders import read_picture

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
        place = f"--data_dir={cache}", f"--out={tmp_path / 'a.png'}"
        return analyze.main([command, "--device=cpu", *place, *flags])
    return run


@pytest.fixture
def sheets(monkeypatch):
    """What write_sheet is given, (pictures, columns, rows), in place of PNGs."""
    found = []
    monkeypatch.setattr(analyze, "write_sheet",
                        lambda path, *sheet: found.append(sheet))
    return found


def validation(cache, index):
    """Images of the validation split, normalized."""
    data = images.load("shapes", cache)
    return images.model_input(torch.from_numpy(data.val.images[index]), data, 32)


@pytest.mark.parametrize("arch", ["crate", "tost", "aot"])
@torch.no_grad()
def test_layers(save, call, cache, arch, eps=0.3):
    """Against [N] Figure 3's numbers and model.py's objective in float64, beside the untrained
    model. A masked autoencoder's encoder sees all."""
    vit = models.ImageClassifier(models.ImageConfig(arch=arch, **TINY)).eval()
    mae = models.MaskedAutoencoder(models.MAEConfig(arch="crate", decoder_layers=2, **TINY)).eval()
    a, b = save(vit, name="a.pt"), save(mae, "mae", name="b.pt")
    flags = "--samples=12", "--batch_size=5", "--eps=0.3", "--lambd=0.2", "--untrained", "--seed=5"
    runs = call("layers", f"--ckpt={a},{b}", *flags)
    names = [f"{Path(path).parent.name}/{Path(path).stem}" for path in (a, b)]
    order = [(name, weights) for name in names for weights in ("trained", "random")]
    assert [(run["name"], run["weights"]) for run in runs] == order
    assert len({run["objective"] for run in runs}) == 4

    x = validation(cache, np.linspace(0, 99, 12).round().astype(int))
    for encoder, run in ((vit.encoder, runs[0]), (mae.encoder, runs[2])):
        assert run["objective"] == pytest.approx(sum(row["objective"] for row in run["layers"]) / 3)
        Z, traces = encoder.tokens(x), encoder.trace(x)
        for row, layer, step in zip(run["layers"], encoder.layers, traces, strict=True):
            U, out = layer.attention.bases().double(), step.out.double()
            n, p = out.shape[1], U.shape[2]
            U = U * (len(U) * p) ** 0.5 / U.norm()
            final = out * (Z.norm(dim=(1, 2)) / out.norm(dim=(1, 2)))[:, None, None]
            normed = [(T - T.mean(1, keepdim=True)) for T in (Z.double(), step.half.double())]
            normed = [(T - T.mean(2, keepdim=True)) / (T.var(2, False, True) + 1e-5).sqrt()
                      for T in normed]
            ws = [T.double()[:, None] @ U for T in (layer.norm1(Z), Z, out, final, *normed)]
            ws[0] = ws[0] / ws[0].norm(dim=-1, keepdim=True)
            Rc_tokens, Rc_first, Rc, Rc_final, before, after = (
                0.5 * (torch.eye(n) + p / (n * eps ** 2) * w @ w.mT).logdet().sum(1) for w in ws)
            objective, first = (models.sparse_rate_reduction(T.double(), U, eps, 0.2)
                                for T in (out, Z))
            R_first, R_final = (models.coding_rate(T.double(), eps) for T in (Z, final))
            for key, values in dict(Rc_tokens=Rc_tokens, R=models.coding_rate(out, eps), Rc=Rc,
                                    attention_Rc_normed=after - before,
                                    reduction_added=R_final - Rc_final - R_first + Rc_first,
                                    nonzeros=(out != 0).double().mean((1, 2)),
                                    objective=objective, objective_added=objective - first).items():
                assert row[key] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-6), key
            Z = step.out


@torch.no_grad()
def test_rates_of_large_tokens_and_bases():
    """Tokens of a trained layer are far from 0 and close together: float32 cannot factor them. The
    size of U does not matter, and orthonormal ones are left as they are."""
    layer = models.ImageClassifier(models.ImageConfig(
        width=16, heads=2, layers=1, image_size=32, patch_size=8)).encoder.layers[0]

    def numbers(Z, **flags):
        trace = models.LayerTrace(Z, Z, Z, None, None)
        return measure.layer_numbers(layer, trace, **flags)
    Z = 1e4 * torch.randn(1, 1, 16) + torch.randn(5, 64, 16)
    assert models.coding_rate(Z, 0.1).isnan().any()
    found = numbers(Z)
    assert all(values.isfinite().all() for values in found.values())
    assert torch.allclose(found["R"], models.coding_rate(Z.double(), 0.1))

    out = torch.randn(3, 5, 16).relu()
    U = torch.nn.init.orthogonal_(layer.attention.U.weight)
    wanted = models.sparse_rate_reduction(out.double(), layer.attention.bases().double(), 0.1)
    for size in (1, 3):
        U /= size
        torch.testing.assert_close(numbers(out)["objective"], wanted)


@pytest.mark.parametrize("arch, task", [("crate", "vit"), ("tost", "vit"), ("crate", "mae")])
@torch.no_grad()
def test_saliency(arch, task, save, call, sheets, cache):
    """Of the class token or, since no loss shapes an autoencoder's, of the patches' mean; red where
    a map is large."""
    kind, config = TASKS[task], TASKS[task].config_class
    model = kind(config(arch=arch, **TINY)).eval()
    flags = f"--ckpt={save(model, task)}", "--pictures=5"
    found = call("saliency", *flags)
    attention = model.encoder.trace(validation(cache, [0, 25, 50, 74, 99]))[2].attention
    maps = attention[:, :, 1:] if arch == "tost" else attention[:, :, 0, 1:]
    maps = attention[:, :, 1:, 1:].mean(2) if task == "mae" else maps
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    torch.testing.assert_close(found, maps)
    heat = F.avg_pool2d(sheets[0][0][:, 1:, 0] - sheets[0][0][:, 1:, 1], 8).flatten(2)
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    torch.testing.assert_close(heat, 0.63 * (maps - low) / (high - low).clamp_min(1e-12))


def test_a_sheet_shows_its_pictures_and_any_name(tmp_path):
    """A $ in a file's name is no formula; a long one does not fill the sheet."""
    pictures = torch.zeros(2, 3, 3, 16, 16)
    pictures[1, 2, 2] = 1.0
    rows = ["a $x^.png", "b" * 400 + ".png"]
    analyze.write_sheet(tmp_path / "a.png", pictures, ["one", "two", "three"], rows)
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    blue, black = (sheet == [0, 0, 255]).all(2), (sheet == 0).all(2)
    assert blue.sum() / (blue | black).sum() == pytest.approx(1 / 6, abs=0.02)
    assert np.nonzero(blue)[1].min() > sheet.shape[1] / 2 and sheet.shape[1] < 1100


@torch.no_grad()
def test_predict(tmp_path, save, call, sheets, cache, capsys):
    """Of one's own pictures; the sheet says what is printed."""
    data = images.load("shapes", cache)
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    for path, shape in zip(paths, ((40, 30, 3), (20, 20, 3))):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8)).save(path)
    pixels = [read_picture(path, 32)[0] for path in paths]
    pixels = augment.to_float(torch.from_numpy(np.stack(pixels)))

    def predict(model, task):
        path = save(scrambled(model), task)
        return call("predict", f"--ckpt={path}", *paths), *sheets[-1]

    model = models.ImageClassifier(models.ImageConfig(**TINY))
    shares, _, _, rows = predict(model, "vit")
    x = augment.normalize(pixels, data.mean, data.std)
    for share, wanted in zip(shares, model(x).softmax(-1).tolist()):
        wanted = sorted(zip(data.classes, wanted), key=lambda pair: -pair[1])[:3]
        assert list(share.items()) == [(name, pytest.approx(y, abs=1e-4)) for name, y in wanted]
    lines = capsys.readouterr().out.splitlines()
    told = [row.replace("\n", ": ", 1).replace("\n", ", ") for row in rows]
    assert told == lines[:2] and told[0].startswith(f"{paths[0]}: ")

    shares, shown, *_ = predict(models.MaskedAutoencoder(models.MAEConfig(**TINY)), "mae")
    std = torch.tensor(data.std).view(3, 1, 1)
    for (seen, masked, guess, _), share in zip(shown, shares, strict=True):
        error = ((guess - seen) / std)[:, (masked != seen).any(0)].square().mean().item()
        assert share == dict(error=pytest.approx(error, abs=1e-3))


def test_curves_of_recorded_runs(tmp_path):
    """A metrics.jsonl alone is enough."""
    lines = dict(step=1, split="train", loss=2.0), dict(step=1, split="val", acc=0.5)
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curves = ["curves", str(tmp_path), f"--out={tmp_path}/curves.png"]
    analyze.main(curves)
    assert Image.open(tmp_path / "curves.png").size == (900, 350)
    with pytest.raises(FileNotFoundError, match="b/metrics.jsonl"):
        analyze.main([*curves, f"{tmp_path}/b"])
