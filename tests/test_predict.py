"""evaluate.py predict: one's own pictures through any image checkpoint."""
import json

import numpy as np
import pytest
import torch
from PIL import Image

import evaluate
from flags import UserError
from data import augment, images
from helpers import write_model
from model import (ImageClassifier, ImageConfig, ImageEncoder, MAEConfig, MaskedAutoencoder,
                   saliency)

SIZE = dict(width=16, heads=2, layers=2, image_size=16, patch_size=8)
META = dict(name="pets", classes=["cat", "dog", "emu"], mean=[0.5, 0.4, 0.3], std=[0.2, 0.25, 0.3])


@pytest.fixture
def pictures(tmp_path):
    """Two pictures of other sizes than the model's; their paths."""
    rng = np.random.default_rng(0)
    paths = [str(tmp_path / name) for name in ("a.png", "b.webp")]
    for path, shape in zip(paths, ((40, 30, 3), (20, 20, 3))):
        pixels = rng.integers(0, 256, shape, np.uint8)
        Image.fromarray(pixels).save(path, **dict(lossless=True) if path.endswith("webp") else {})
    return paths


@pytest.fixture
def predict(tmp_path, pictures):
    """predict(model, task, *flags): the result, and the PNG as an array."""
    def run(model, task, *flags, meta=META):
        for p in model.parameters():
            p.data.normal_(std=0.3)
        write_model(tmp_path / "m.pt", model, task, meta)
        argv = ["predict", f"--ckpt={tmp_path / 'm.pt'}", pictures[0], "--device=cpu", *flags,
                f"--out={tmp_path / 'new' / 'sheet.png'}", "--overwrite", pictures[1]]
        found = evaluate.main(argv)
        return found, np.asarray(Image.open(tmp_path / "new" / "sheet.png"))
    return run


def as_seen(path, mean=META["mean"], std=META["std"]):
    pixels = np.asarray(images.resize_crop(Image.open(path).convert("RGB"), 16))
    x = augment.to_float(torch.from_numpy(pixels.copy())[None])
    return augment.normalize(x, mean, std), pixels


def test_classes_and_saliency(predict, pictures, capsys):
    model = ImageClassifier(ImageConfig(classes=3, **SIZE)).eval()
    found, sheet = predict(model, "vit", "--top=2")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert sheet.shape == (2 * 256, 2 * 256, 3)
    for row, path in enumerate(pictures):
        x, pixels = as_seen(path)
        shares = dict(zip(META["classes"], model(x).softmax(-1)[0].tolist()))
        wanted = sorted(shares, key=shares.get, reverse=True)[:2]
        assert list(found["pictures"][path]) == wanted
        assert found["pictures"][path] == pytest.approx({k: shares[k] for k in wanted}, abs=1e-4)

        shown = sheet[256 * row:256 * (row + 1)][8::16, 8::16]
        assert np.array_equal(shown[:, :16], pixels)
        trace = model.encoder.trace(x)
        patches = saliency(trace[-1].attention).mean(1).view(2, 2)
        red = shown[:, 16:, 0].astype(int) - shown[:, 16:, 1]
        hottest = red.reshape(2, 8, 2, 8).mean((1, 3)).argmax()
        assert hottest == patches.argmax()


def test_other_checkpoints(predict, pictures):
    """SimDINO has no classes; a masked autoencoder reconstructs; unnamed classes have numbers
    for names. Without statistics of its own a model takes ImageNet's."""
    encoder = torch.nn.ModuleDict(dict(encoder=ImageEncoder(ImageConfig(**SIZE))))
    encoder.config = encoder["encoder"].config
    found, sheet = predict(encoder, "simdino")
    assert found["pictures"] == list(pictures)
    _, sheet = predict(MaskedAutoencoder(MAEConfig(**SIZE)), "mae")
    assert sheet.shape == (2 * 128, 4 * 128, 3)
    assert np.abs(sheet[4:128:8, 4:128:8].astype(int) - as_seen(pictures[0])[1]).max() <= 1
    model = ImageClassifier(ImageConfig(classes=3, **SIZE)).eval()
    found, _ = predict(model, "vit", meta=dict(name="imagenet"))
    x, _ = as_seen(pictures[0], images.IMAGENET_MEAN, images.IMAGENET_STD)
    assert next(iter(found["pictures"][pictures[0]])) == f"class {int(model(x).argmax())}"


def test_mistakes(predict, pictures, tmp_path):
    model = ImageClassifier(ImageConfig(classes=3, **SIZE))
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    for word, message in ((str(tmp_path / "none.png"), "cannot read .*none.png"),
                          (str(tmp_path / "broken.jpg"), "cannot read .*broken.jpg"),
                          ("--files=a", "unknown flag --files")):
        with pytest.raises(UserError, match=message):
            predict(model, "vit", word)
    with pytest.raises(UserError, match="which pictures"):
        evaluate.main(["predict", f"--ckpt={tmp_path / 'm.pt'}"])
    with pytest.raises(UserError, match="unknown argument 'a.png'"):
        evaluate.main(["accuracy", "a.png"])
