"""Segmentation scores against cases by hand and plain loops, MaskCut on graphs with known parts."""
import json

import numpy as np
import pytest
import torch

import evaluate
from flags import UserError
from data.prepare import prepare
from helpers import write_model
from model import (ImageClassifier, ImageConfig, LanguageModel, MaskedAutoencoder, MAEConfig,
                   TextConfig)


def grid(*rows):
    """A mask (h, w) from rows of text, # on the object."""
    return torch.tensor([[character == "#" for character in row] for row in rows])


# Scores

def test_iou_and_box():
    a, b = grid("##..", "##..", "...."), grid(".##.", ".##.", "....")
    found = evaluate.iou(torch.stack([a, a, a]), torch.stack([b, a, ~a]))
    assert found.tolist() == [2 / 6, 1, 0] and evaluate.iou(a & ~a, a & ~a) == 0
    scattered, whole = grid("....", ".#..", "...#"), grid("....", ".###", ".###")
    boxes = evaluate.box(torch.stack([scattered, a, a & ~a]))
    assert torch.equal(boxes, torch.stack([whole, a, a & ~a]))


def test_threshold_ious():
    maps, truth = torch.rand(3, 2, 50), torch.rand(3, 50) < 0.3
    maps[0, 0, :2] = torch.tensor([0.0, 1.0])
    found = evaluate.threshold_ious(maps, truth, levels=10)
    for i in range(10):
        chosen = maps >= i / 10
        both, either = (chosen & truth[:, None]).sum(2), (chosen | truth[:, None]).sum(2)
        torch.testing.assert_close(found[:, :, i], both / either)


def test_average_precision():
    """The sum over distinct scores of precision times the increase of recall."""
    scores, labels = torch.randint(0, 8, (5, 40)).float(), torch.rand(5, 40) < 0.4      # ties
    for score, label, found in zip(scores, labels, evaluate.average_precision(scores, labels)):
        expected = recall = 0.0
        for t in sorted(set(score.tolist()), reverse=True):
            hit = (label & (score >= t)).sum().item()
            precision = hit / (score >= t).sum().item()
            expected += precision * (hit / label.sum().item() - recall)
            recall = hit / label.sum().item()
        assert found == pytest.approx(expected, abs=1e-6)


def coco_ap(overlap, confidence, threshold):
    """One IoU threshold, one recall at a time."""
    n = len(overlap)
    ranked = [overlap[i] >= threshold for i in sorted(range(n), key=lambda i: -confidence[i])]
    curve = [(sum(ranked[:k]) / n, sum(ranked[:k]) / k) for k in range(1, n + 1)]
    best = [max([precision for recall, precision in curve if recall >= r / 100], default=0.0)
            for r in range(101)]
    return sum(best) / 101


def test_detection_ap():
    overlap, confidence = torch.rand(60).double(), torch.randint(0, 20, (60,)).float()
    thresholds = torch.arange(50, 100, 5).double() / 100
    expected = [coco_ap(overlap.tolist(), confidence.tolist(), t) for t in thresholds.tolist()]
    found = evaluate.detection_ap(overlap, confidence, thresholds)
    assert found.tolist() == pytest.approx(expected)


# MaskCut

def test_normalized_cut():
    """Two blocks joined by edges of 1e-3, in random order: v has one sign on each. And (v, mu)
    solves the eigenproblem."""
    member = torch.rand(4, 20) < 0.4
    A = torch.where(member[:, :, None] == member[:, None], 1.0, 1e-3).double()
    v, mu = evaluate.normalized_cut(A)
    same = (v > 0) == member
    assert (same.all(1) | (~same).all(1)).all() and (mu < 0.01).all()
    A = torch.rand(3, 9, 9).double()
    A = A + A.mT
    D = torch.diag_embed(A.sum(-1))
    v, mu = evaluate.normalized_cut(A)
    torch.testing.assert_close((D - A) @ v[..., None], mu[:, None, None] * D @ v[..., None])
    values = torch.linalg.eigvals(torch.linalg.solve(D, D - A)).real.sort(-1).values
    torch.testing.assert_close(mu, values[:, 1])


def test_foreground():
    """The side of the largest entry, without what is not connected to it; the other side where that
    one holds three corners."""
    v = torch.full((6, 6), -0.1)
    v[2:4, 2:4], v[2, 2], v[0, 0] = 0.4, 0.5, 0.3
    v[4, 4] = 0.4                                               # touches it by a corner only
    inside = grid("......", "......", "..##..", "..##..", "......", "......")
    twice = torch.stack([inside, inside])
    assert torch.equal(evaluate.foreground(torch.stack([v, -v])), twice)
    frame = torch.where(inside, 0.1, -0.5)
    assert torch.equal(evaluate.foreground(torch.stack([frame, -frame])), twice)
    half = torch.tensor([-1.0, -1.0, 0.5, 0.5]).expand(4, 4)    # two corners: allowed
    assert torch.equal(evaluate.foreground(half[None])[0], half < 0)


def test_maskcut():
    mask = grid(".....", "..##.", ".###.", "..#..", ".....")
    X = torch.where(mask.flatten()[:, None], torch.tensor([1.0, 0.2]), torch.tensor([-0.3, 1.0]))
    X = (X + 0.05 * torch.randn(2, 25, 2)) * torch.rand(2, 25, 1).add(0.5)  # lengths do not matter
    found, confidence = evaluate.maskcut(X, 5)
    assert torch.equal(found, torch.stack([mask, mask])) and (confidence.abs() < 1e-3).all()


# The command

TINY = dict(width=16, heads=2, layers=2, image_size=32, patch_size=8, classes=10)


@pytest.fixture
def run(tmp_path, capsys, cache):
    """run(model, *flags) of `segment`; the result, which is also what is printed."""
    def run(model, *flags, data_dir=cache):
        task = {ImageClassifier: "vit", MaskedAutoencoder: "mae", LanguageModel: "gpt"}[type(model)]
        meta = dict(name="shapes", mean=[0.5] * 3, std=[0.2] * 3)
        if task == "gpt":
            meta = dict(name="abcd", tokenizer=dict(kind="char", characters="abcd"), n_vocab=5)
        write_model(tmp_path / "ckpt.pt", model, task, meta)
        base = [f"--ckpt={tmp_path / 'ckpt.pt'}", f"--data_dir={data_dir}", "--device=cpu"]
        found = evaluate.main(["segment", *base, *flags])
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
        return found
    return run


def classifier(**fields):
    return ImageClassifier(ImageConfig(**TINY | fields)).eval()


@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost", "transformer"])
def test_every_kind_of_arch(run, arch):
    found = run(classifier(arch=arch))
    assert len(found["iou_heads"]) == len(found["ap_heads"]) == 2
    assert (found["layer"], found["n"]) == (2, 100) and 0.1 < found["foreground"] < 0.4
    scores = [v for k, v in found.items() if k.startswith(("ap_best", "box", "mask"))]
    assert len(scores) == 9 and all(0 <= value <= 1 for value in scores)
    for value in (found["iou"], *found["iou_heads"]):           # threshold 0 chooses all pixels
        assert value >= found["foreground"] - 1e-6


@torch.no_grad()
def test_maps_and_features():
    """The maps are rows of the attention that the whole encoder reports, the features those of the
    same layer."""
    encoder, x = classifier(arch="transformer").encoder, torch.randn(2, 3, 32, 32)
    Z = encoder.tokens(x)
    for number, (_, out, attention) in enumerate(encoder.trace(x), 1):
        maps, X = evaluate.maps_and_features(encoder, x, number, "class", "output")
        torch.testing.assert_close(maps, attention[:, :, 0, 1:])
        torch.testing.assert_close(X, out[:, 1:])
        maps, X = evaluate.maps_and_features(encoder, x, number, "mean", "keys")
        torch.testing.assert_close(maps, attention[:, :, 1:].mean(2)[..., 1:])
        layer = encoder.layers[number - 1]
        torch.testing.assert_close(X, layer.attention.QKV(layer.norm1(Z))[:, 1:, 16:32])
        Z = out


def test_perfect_masks(tmp_path, run):
    """Objects of whole patches in a colour of their own: by their pixels all are found exactly."""
    rng = np.random.default_rng(0)
    pixels, masks = np.full((30, 32, 32, 3), 30, np.uint8), np.zeros((30, 32, 32), np.uint8)
    for image, mask in zip(pixels, masks):
        top, left = 4 * rng.integers(1, 4, 2)
        mask[top:top + 8, left:left + 12] = 1
        image[mask == 1] = 220
    prepare("shapes", cache=tmp_path / "cache", drawn=(30, 30))
    for kind, array in dict(images=pixels, labels=np.arange(30) % 10, masks=masks).items():
        for split in ("train", "val"):
            np.save(tmp_path / f"cache/shapes/{split}_{kind}.npy", array)
    found = run(classifier(patch_size=4), "--features=pixels", data_dir=tmp_path / "cache")
    for name in ("ap50", "ap75", "ap", "ap_ceiling"):
        assert found[f"box_{name}"] == found[f"mask_{name}"] == 1
    assert found["foreground"] == pytest.approx(96 / 1024)

    prior = masks.mean(0) / masks.mean(0).max()         # the mean mask; 0 in the corners
    ious = [[((prior >= i / 100) & mask).sum() / ((prior >= i / 100) | mask).sum()
             for mask in masks == 1] for i in range(100)]
    assert found["iou_prior"] == pytest.approx(max(np.mean(ious, 1)), abs=1e-6)
    assert found["ap_prior"] > found["iou_prior"] > found["foreground"]


def test_random_encoder_layers_and_sizes(run):
    model = classifier()
    trained, fresh = run(model), run(model, "--random", "--seed=1")
    assert fresh["encoder"] == "random" and fresh["ap"] != trained["ap"]
    assert run(model, "--random", "--seed=1") == fresh != run(model, "--random")
    assert run(model, "--layer=1")["ap"] != trained["ap"]
    assert run(model, "--batch_size=7")["ap"] == pytest.approx(trained["ap"])
    # scored at the images' own size, or on the part that the model sees
    assert run(classifier(image_size=64))["foreground"] == trained["foreground"]
    assert run(classifier(image_size=16))["foreground"] > trained["foreground"]
    assert run(MaskedAutoencoder(MAEConfig(**TINY)), "--split=train")["n"] == 400


def test_refused(run):
    with pytest.raises(UserError, match="--layer=3: the last layer of .* is 2"):
        run(classifier(), "--layer=3")
    with pytest.raises(UserError, match="one patch"):
        run(classifier(patch_size=32))
    text = TextConfig(width=16, heads=2, layers=1, context=8, vocab_size=5)
    with pytest.raises(UserError, match="of task gpt, not vit"):
        run(LanguageModel(text))
