"""Segmentation scores against hand-computed cases and plain loops, MaskCut on graphs whose parts are known."""
import json
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import evaluate
from data import images
from model import ARCHS, ImageClassifier, ImageConfig, LanguageModel, MaskedAutoencoder, MAEConfig, TextConfig


def grid(*rows):
    """A mask (h, w) from rows of text, # on the object."""
    return torch.tensor([[character == "#" for character in row] for row in rows])


# Scores

def test_iou_and_box():
    a, b = grid("##..", "##..", "...."), grid(".##.", ".##.", "....")
    assert evaluate.iou(torch.stack([a, a, a]), torch.stack([b, a, ~a])).tolist() == [2 / 6, 1, 0]
    assert evaluate.iou(a & ~a, a & ~a) == 0
    scattered = grid("....", ".#..", "...#")
    assert torch.equal(evaluate.box(torch.stack([scattered, a, a & ~a])), torch.stack([grid("....", ".###", ".###"), a, a & ~a]))


def test_threshold_ious():
    maps, truth = torch.rand(3, 2, 50), torch.rand(3, 50) < 0.3
    maps[0, 0, :2] = torch.tensor([0.0, 1.0])
    found = evaluate.threshold_ious(maps, truth, levels=10)
    for i in range(10):
        chosen = maps >= i / 10
        both, either = (chosen & truth[:, None]).sum(2), (chosen | truth[:, None]).sum(2)
        torch.testing.assert_close(found[:, :, i], both / either)
    torch.testing.assert_close(found[:, :, 0], truth.float().mean(1, keepdim=True).expand(3, 2))          # everything is chosen
    assert (evaluate.threshold_ious(truth[:, None].float(), truth)[:, 0, 1:] == 1).all()


def test_average_precision():
    """Hand: true at ranks 1 and 3 give (1 + 2/3) / 2. Loop: sum over distinct scores of precision times the step of recall."""
    truth = torch.tensor([True, False, True, False])
    assert evaluate.average_precision(torch.tensor([4.0, 3.0, 2.0, 1.0]), truth) == pytest.approx((1 + 2 / 3) / 2)
    assert evaluate.average_precision(torch.zeros(4), truth) == 0.5 and evaluate.average_precision(truth.float(), truth) == 1
    scores, labels = torch.randint(0, 8, (5, 40)).float(), torch.rand(5, 40) < 0.4                        # many ties
    for score, label, found in zip(scores, labels, evaluate.average_precision(scores, labels)):
        expected = recall = 0.0
        for t in sorted(set(score.tolist()), reverse=True):
            hit = (label & (score >= t)).sum().item()
            expected += hit / (score >= t).sum().item() * (hit / label.sum().item() - recall)
            recall = hit / label.sum().item()
        assert found == pytest.approx(expected, abs=1e-6)


def coco_ap(overlap, confidence, threshold):
    """One IoU threshold, one recall at a time."""
    ranked = [overlap[i] >= threshold for i in sorted(range(len(overlap)), key=lambda i: -confidence[i])]
    curve = [(sum(ranked[:k]) / len(ranked), sum(ranked[:k]) / k) for k in range(1, len(ranked) + 1)]
    return sum(max([precision for recall, precision in curve if recall >= r / 100], default=0.0) for r in range(101)) / 101


def test_detection_ap():
    """Hand: hits at ranks 1 and 3 of 4 have precision 1 up to recall 1/4, 2/3 up to 1/2 and 0 beyond."""
    overlap, confidence = torch.tensor([0.6, 0.2, 0.5, 0.1]).double(), torch.tensor([0.0, -1.0, -2.0, -3.0])
    found = evaluate.detection_ap(overlap, confidence, torch.tensor([0.5, 0.55, 0.7]).double())
    assert found.tolist() == pytest.approx([(26 + 25 * 2 / 3) / 101, 26 / 101, 0])
    assert evaluate.detection_ap(torch.ones(7).double(), torch.zeros(7), torch.tensor([0.5, 0.95]).double()).tolist() == [1, 1]
    overlap, confidence = torch.rand(60).double(), torch.randint(0, 20, (60,)).float()
    thresholds = torch.arange(50, 100, 5).double() / 100
    expected = [coco_ap(overlap.tolist(), confidence.tolist(), t) for t in thresholds.tolist()]
    assert evaluate.detection_ap(overlap, confidence, thresholds).tolist() == pytest.approx(expected)


# MaskCut

def test_normalized_cut_finds_the_blocks():
    """Two blocks that edges of weight 1e-3 join, in random order: v has one sign on each; and (v, mu) solves the problem."""
    member = torch.rand(4, 20) < 0.4
    A = torch.where(member[:, :, None] == member[:, None], 1.0, 1e-3).double()
    v, mu = evaluate.normalized_cut(A)
    same = (v > 0) == member
    assert (same.all(1) | (~same).all(1)).all() and (mu < 0.01).all()
    A = torch.rand(3, 9, 9).double()
    A, D = A + A.mT, torch.diag_embed((A + A.mT).sum(-1))
    v, mu = evaluate.normalized_cut(A)
    torch.testing.assert_close((D - A) @ v[..., None], mu[:, None, None] * D @ v[..., None])
    torch.testing.assert_close(mu, torch.linalg.eigvals(torch.linalg.solve(D, D - A)).real.sort(-1).values[:, 1])
    assert evaluate.normalized_cut(torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).double()[None])[1] == pytest.approx(0, abs=1e-12)


def test_foreground():
    """The side of the largest entry, without what is not connected to it; the other side where that one holds three corners."""
    v = torch.full((6, 6), -0.1)
    v[2:4, 2:4], v[2, 2], v[0, 0] = 0.4, 0.5, 0.3
    inside = grid("......", "......", "..##..", "..##..", "......", "......")
    assert torch.equal(evaluate.foreground(torch.stack([v, -v])), torch.stack([inside, inside]))
    v[4, 4] = 0.4                                                                           # touches it by a corner only
    assert torch.equal(evaluate.foreground(v[None])[0], inside)
    frame = torch.where(inside, 0.1, -0.5)
    assert torch.equal(evaluate.foreground(torch.stack([frame, -frame])), torch.stack([inside, inside]))
    half = torch.tensor([-1.0, -1.0, 0.5, 0.5]).expand(4, 4)                                # two corners: no objection
    assert torch.equal(evaluate.foreground(half[None])[0], half < 0)


def test_maskcut():
    object = grid(".....", "..##.", ".###.", "..#..", ".....")
    X = torch.where(object.flatten()[:, None], torch.tensor([1.0, 0.2]), torch.tensor([-0.3, 1.0]))
    X = (X + 0.05 * torch.randn(2, 25, 2)) * torch.rand(2, 25, 1).add(0.5)                  # lengths do not matter
    mask, confidence = evaluate.maskcut(X, 5)
    assert torch.equal(mask, torch.stack([object, object])) and (confidence.abs() < 1e-3).all()


# The whole

def save(path, model, task="vit"):
    common.save_checkpoint(path, dict(task=task, model=model.state_dict(), model_config=asdict(model.config), run_config={}, step=1,
                                      data_meta=dict(name="shapes", mean=[0.5] * 3, std=[0.2] * 3), optimizer={}, extra={}))
    return model.eval()


@pytest.fixture
def run(tmp_path, capsys, cache):
    """run(*flags) of `segment` on tmp_path/ckpt.pt; the result, which is also what is printed."""
    def run(*flags, data_dir=cache):
        found = evaluate.main(["segment", f"--ckpt={tmp_path / 'ckpt.pt'}", f"--data_dir={data_dir}", "--device=cpu", *flags])
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
        return found
    return run


TINY = dict(width=16, heads=2, layers=2, image_size=32, patch_size=8, classes=10)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_arch(tmp_path, run, arch):
    save(tmp_path / "ckpt.pt", ImageClassifier(ImageConfig(arch=arch, **TINY)))
    found = run()
    assert len(found["iou_heads"]) == len(found["ap_heads"]) == 2 and (found["layer"], found["n"]) == (2, 100)
    assert found["iou_best"] == max(found["iou_heads"]) and 0.1 < found["foreground"] < 0.4
    assert all(0 <= value <= 1 for name, value in found.items() if name.startswith(("ap_best", "box", "mask")))
    assert all(value >= found["foreground"] - 1e-6 for value in [found["iou"], *found["iou_heads"]])      # threshold 0 chooses all
    assert found["mask_ap"] <= found["mask_ap_ceiling"] < found["box_ap_ceiling"] + 0.2


def test_what_is_looked_at(tmp_path):
    """The maps are rows of the attention that the whole encoder reports, the features those of the same layer."""
    encoder = ImageClassifier(ImageConfig(arch="transformer", **TINY)).eval().encoder
    x, trace = torch.randn(2, 3, 32, 32), []
    with torch.no_grad():
        encoder(x, trace)
        for layer, (_, out, attention) in enumerate(trace, 1):
            maps, X = evaluate.look(encoder, x, SimpleNamespace(layer=layer, query="class", features="output"))
            torch.testing.assert_close(maps, attention[:, :, 0, 1:])
            torch.testing.assert_close(X, out[:, 1:])
            maps, X = evaluate.look(encoder, x, SimpleNamespace(layer=layer, query="mean", features="keys"))
            torch.testing.assert_close(maps, attention[:, :, 1:].mean(2)[..., 1:])
            Z = encoder.tokens(x) if layer == 1 else trace[0].out
            keys = encoder.layers[layer - 1].attention.QKV(encoder.layers[layer - 1].norm1(Z))[..., 16:32]
            torch.testing.assert_close(X, keys[:, 1:])


def test_perfect_masks(tmp_path, run):
    """Objects of whole patches in a colour of their own: by their pixels MaskCut finds all of them exactly."""
    rng = np.random.default_rng(0)
    pictures, masks = np.full((30, 32, 32, 3), 30, np.uint8), np.zeros((30, 32, 32), np.uint8)
    for picture, mask in zip(pictures, masks):
        top, left = 4 * rng.integers(1, 4, 2)
        mask[top:top + 8, left:left + 12] = 1
        picture[mask == 1] = 220
    with images.preparing("shapes", tmp_path / "cache") as folder:
        for split in ("train", "val"):
            for kind, array in (("images", pictures), ("labels", np.arange(30) % 10), ("masks", masks)):
                np.save(folder / f"{split}_{kind}.npy", array)
        images.write_meta(folder, "shapes", "images", image_size=32, classes=[str(i) for i in range(10)], mean=[0.5] * 3, std=[0.2] * 3)
    save(tmp_path / "ckpt.pt", ImageClassifier(ImageConfig(**TINY | dict(patch_size=4))))
    found = run("--features=pixels", data_dir=tmp_path / "cache")
    assert all(found[f"{name}_{score}"] == 1 for name in ("box", "mask") for score in ("ap50", "ap75", "ap", "ap_ceiling"))
    assert found["foreground"] == pytest.approx(96 / 1024)


def test_random_encoder_and_size(tmp_path, run):
    torch.manual_seed(5)
    save(tmp_path / "ckpt.pt", ImageClassifier(ImageConfig(**TINY)))
    trained, fresh = run(), run("--random")
    assert fresh["encoder"] == "random" and fresh["ap"] != trained["ap"] and run("--random") == fresh != run("--random", "--seed=1")
    assert run("--layer=1")["ap"] != trained["ap"] and run("--batch_size=7")["ap"] == pytest.approx(trained["ap"])
    save(tmp_path / "ckpt.pt", ImageClassifier(ImageConfig(**TINY | dict(image_size=64))))
    assert run()["foreground"] == trained["foreground"]                                     # scored at the pictures' own size
    save(tmp_path / "ckpt.pt", ImageClassifier(ImageConfig(**TINY | dict(image_size=16))))
    assert run()["foreground"] > trained["foreground"]                                      # objects rather fill the middle
    save(tmp_path / "ckpt.pt", MaskedAutoencoder(MAEConfig(**TINY)), task="mae")
    assert run("--split=train")["n"] == 400


def test_refused(tmp_path, run):
    with pytest.raises(common.UserError, match="--ckpt is needed"):
        evaluate.main(["segment"])
    save(tmp_path / "ckpt.pt", ImageClassifier(ImageConfig(**TINY)))
    with pytest.raises(common.UserError, match="--layer=3: the last layer of .* is 2"):
        run("--layer=3")
    save(tmp_path / "ckpt.pt", ImageClassifier(ImageConfig(**TINY | dict(patch_size=32))))
    with pytest.raises(common.UserError, match="one patch"):
        run()
    save(tmp_path / "ckpt.pt", LanguageModel(TextConfig(width=16, heads=2, layers=1, context=8, vocab_size=5)), task="gpt")
    with pytest.raises(common.UserError, match="no image encoder"):
        run()
