"""experiments/segmentation.py: scores against plain loops, MaskCut on graphs with known parts."""
import numpy as np
import pytest
import torch
from helpers import scrambled, write_model
from torch.nn import functional as F

from data import augment, images
from experiments import segmentation
from figures import stretched
from model import ImageClassifier, ImageConfig, saliency

TINY = dict(width=16, heads=2, layers=2, image_size=32, patch_size=4, classes=10)


def grid(*rows):
    """A mask (h, w) from rows of text, # on the object."""
    return torch.tensor([[character == "#" for character in row] for row in rows])


def test_detection_ap():
    """COCO's, one IoU threshold and one recall at a time."""
    n, overlap, confidence = 60, torch.rand(60).double(), torch.randint(0, 20, (60,)).float()
    thresholds = torch.tensor([0.5, 0.75, 0.95]).double()
    order = sorted(range(n), key=lambda i: -confidence[i])
    found = segmentation.detection_ap(overlap, confidence, thresholds)
    for threshold, ap in zip(thresholds, found):
        hits = np.cumsum([bool(overlap[i] >= threshold) for i in order])
        curve = list(zip(hits / n, hits / np.arange(1, n + 1)))
        best = [max([precision for recall, precision in curve if recall >= r / 100], default=0.0)
                for r in range(101)]
        assert ap.item() == pytest.approx(np.mean(best))


def test_normalized_cut():
    """Two blocks joined by edges of 1e-3: v has one sign on each, and solves the eigenproblem."""
    member = torch.rand(4, 20) < 0.4
    A = torch.where(member[:, :, None] == member[:, None], 1.0, 1e-3).double()
    v, mu = segmentation.normalized_cut(A)
    same = (v > 0) == member
    assert (same.all(1) | (~same).all(1)).all() and (mu < 0.01).all()
    A = torch.rand(3, 9, 9).double()
    A = A + A.mT
    D = torch.diag_embed(A.sum(-1))
    v, mu = segmentation.normalized_cut(A)
    torch.testing.assert_close((D - A) @ v[..., None], mu[:, None, None] * D @ v[..., None])
    values = torch.linalg.eigvals(torch.linalg.solve(D, D - A)).real.sort(-1).values
    torch.testing.assert_close(mu, values[:, 1])


def test_the_weak_edges_of_maskcut():
    """Two kinds of patch, a and b of them, with edges of 1e-5 between: D^-1 A has the eigenvalues
    1 and 1 - mu, and the trace a / (a + 1e-5 b) + b / (b + 1e-5 a)."""
    X = torch.eye(2).repeat_interleave(torch.tensor([7, 9]), 0)
    _, confidence = segmentation.maskcut(X[None], 4)
    mu = 1e-5 * (9 / (7 + 9e-5) + 7 / (9 + 7e-5))
    assert confidence.item() == pytest.approx(-mu, abs=1e-14)


def test_foreground():
    """The side of the largest entry, without what is not connected to it; the other side where that
    one holds three corners."""
    inside = grid("......", "......", "..##..", "..##..", "......", "......")
    v = torch.where(inside, 0.4, -0.1)
    v[2, 2], v[0, 0], v[4, 4] = 0.5, 0.3, 0.4           # (4, 4) touches it by a corner only
    frame = torch.where(inside, 0.1, -0.5)
    found = segmentation.foreground(torch.stack([v, -v, frame, -frame]))
    assert torch.equal(found, inside.expand(4, -1, -1))


@torch.no_grad()
def test_keys_are_those_of_the_layer():
    encoder = ImageClassifier(ImageConfig(arch="transformer", **TINY)).eval().encoder
    x = torch.randn(2, 3, 32, 32)
    Z = encoder.tokens(x)
    for number, layer in enumerate(encoder.layers, 1):
        keys = segmentation.patch_features(encoder, x, number, "keys")
        torch.testing.assert_close(keys, layer.attention.QKV(layer.norm1(Z))[:, 1:, 16:32])
        Z = layer(Z)


def test_perfect_masks(tmp_path, monkeypatch):
    """Objects of whole patches in a colour of their own: by their pixels all are found exactly."""
    masks = np.zeros((30, 32, 32), np.uint8)
    for mask, (top, left) in zip(masks, 4 * np.random.default_rng(0).integers(1, 4, (30, 2))):
        mask[top:top + 8, left:left + 12] = 1
    pixels = (30 + 190 * masks[..., None]).repeat(3, axis=3)
    split = images.Split(pixels, np.arange(30) % 10, masks)
    data = images.ImageData("shapes", list("abcdefghij"), [0.5] * 3, [0.2] * 3, 32, split, split)
    monkeypatch.setattr(images, "load", lambda name, cache: data)
    write_model(tmp_path / "m.pt", ImageClassifier(ImageConfig(**TINY)), "vit", data.meta())
    flags = [f"--ckpt={tmp_path / 'm.pt'}", "--device=cpu", "--batch_size=7"]
    result = segmentation.main([*flags, "--features=pixels"])
    assert result["box_ap"] == result["mask_ap"] == 1
    assert segmentation.main([*flags, "--untrained"])["box_ap"] < 1


@pytest.mark.parametrize("arch", ["crate", "tost"])
@torch.no_grad()
def test_maps(arch, tmp_path, cache):
    """Every threshold and image alone; the threshold is train's best, the prior train's mean
    mask as the map of each image."""
    model, data = ImageClassifier(ImageConfig(arch=arch, **TINY)), images.load("shapes", cache)
    write_model(tmp_path / "m.pt", scrambled(model), "vit", data.meta())
    result = segmentation.main([f"--ckpt={tmp_path / 'm.pt'}", "--device=cpu", "--data=shapes",
                                f"--data_dir={cache}", "--batch_size=30"])
    prior = torch.tensor(data.train.masks[:100]).float().mean(0).expand(100, -1, -1)
    scores = []
    for x, truth in ((data.train.images[:100], data.train.masks[:100]),
                     (data.val.images, data.val.masks)):
        x = augment.normalize(augment.to_float(torch.tensor(x)), data.mean, data.std)
        maps = saliency(model.encoder.trace(x)[-1].attention, "class").mean(1).unflatten(-1, (8, 8))
        maps = F.interpolate(maps[:, None], size=(32, 32), mode="bilinear", antialias=True)[:, 0]
        maps, truth = torch.stack([maps, prior]), torch.tensor(truth) == 1
        maps = stretched(maps.flatten(2)).view_as(maps)
        scores.append([[np.mean([float((a & b).sum() / (a | b).sum())
                                 for a, b in zip(map_ >= i / 100, truth)]) for i in range(100)]
                       for map_ in maps])
    expected = [val[int(np.argmax(train))] for train, val in zip(*scores)]
    assert [result["iou"], result["iou_prior"]] == pytest.approx(expected, abs=1e-3)
