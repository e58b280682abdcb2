"""The shared measures against plain loops, and what the pictures show."""
import io
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import scores
from data import images, text
from flags import DeviceFlags
from model import ImageEncoder, ImageConfig, LanguageModel, TextConfig
from run import Processes


def test_nearest_neighbours_by_hand():
    x, y = F.normalize(torch.randn(60, 5), dim=1), torch.randint(3, (60,))
    tests, labels = torch.randn(23, 5), torch.randint(3, (23,))
    right = 0
    for t, label in zip(tests, labels.tolist()):
        cosine = (x @ (t / t.norm())).tolist()
        nearest = sorted(range(60), key=lambda i: -cosine[i])[:7]
        votes = [sum(np.exp(cosine[i] / 0.1) for i in nearest if y[i] == k) for k in range(3)]
        right += votes.index(max(votes)) == label
    result = scores.nearest_neighbours(3 * x, y, tests, labels, 3, Processes("cpu"), 7, 0.1)
    assert result == dict(acc=pytest.approx(right / 23), k=7)


def test_logistic_regression_is_at_its_minimum():
    x, y = torch.randn(200, 4), torch.randint(3, (200,))
    W, b = scores.logistic_regression(x, y, 3, decay=0.1)
    slope = (x @ W + b).softmax(1) - F.one_hot(y, 3)
    assert (x.T @ slope / 200 + 0.1 * W).abs().max() < 1e-4 and slope.mean(0).abs().max() < 1e-4


@torch.no_grad()
def test_features(cache):
    """In the split's order: those of two processes, in batches, add up to all."""
    data = images.load("shapes", cache)
    encoder = ImageEncoder(ImageConfig(width=16, heads=2, layers=1, image_size=32, patch_size=8))
    split = images.Images(data.train_images[:9], data.train_labels[:9], "cpu")
    Z = encoder(scores.model_input(split.images, data, 32))
    processes, parts = Processes("cpu"), []
    processes.world, processes.sum = 2, parts.append
    for kind, expected in (("class", Z[:, 0]), ("mean", Z[:, 1:].mean(1))):
        for processes.rank in range(2):
            scores.features(encoder, split, data, DeviceFlags(), processes, kind, 2)
        torch.testing.assert_close(parts.pop() + parts.pop(), expected)


@pytest.mark.parametrize("n", [10, 22])
def test_a_masked_model_sees_no_padding(monkeypatch, n):
    """Neither behind a text shorter than the context, 16, nor in a last window that it does not
    fill."""
    model = LanguageModel(TextConfig(width=16, heads=2, layers=1, context=16, vocab_size=12,
                                     causal=False))
    seen, tokens = [], 1 + np.arange(n) % 9
    monkeypatch.setattr(text, "mask_tokens", lambda x, *_: (seen.append(x[0].clone()) or x, x))
    scores.language_scores(model, tokens, Processes("cpu"), 1, 11, 0.15)
    assert len(seen) == 1 + (n > 17) and all((x != 0).all() for x in seen)


def test_a_bar_is_for_the_terminal_of_rank_0(monkeypatch):
    for terminal, rank, says in ((True, "0", True), (False, "0", False), (True, "1", False)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr("sys.stderr", io.StringIO())
        monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
        assert [*scores.with_bar(range(3), "things")] == [0, 1, 2]
        assert ("things" in sys.stderr.getvalue()) == says


def test_overlays_are_red_where_a_map_is_large(tmp_path, monkeypatch):
    sheets = []
    monkeypatch.setattr(scores, "write_sheet", lambda *sheet: sheets.append(sheet))
    x, maps = torch.rand(2, 3, 32, 32), torch.rand(2, 3, 16)
    scores.write_overlays("a.png", x, 5 * maps - 1, ["a", "b", "c"])
    (_, pictures, columns, _), = sheets
    assert columns == ["image", "a", "b", "c"]
    assert torch.equal(pictures[:, 0], x)
    red = pictures[:, 1:, 0] - pictures[:, 1:, 1]
    heat = F.avg_pool2d(red, 8).flatten(2)
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    torch.testing.assert_close(heat, 0.7 * 0.9 * (maps - low) / (high - low))


def test_a_sheet_shows_its_pictures_and_any_name(tmp_path):
    """White above and beside them is room for titles; a $ in a file's name is no formula."""
    pictures = torch.zeros(2, 3, 3, 16, 16)
    pictures[1, 2, 2] = 1.0
    rows = ["a $x^.png", "b" * 400 + ".png"]                # cut, or it would fill the sheet
    scores.write_sheet(tmp_path / "a.png", pictures, ["one", "two", "three"], rows)
    sheet = np.asarray(Image.open(tmp_path / "a.png").convert("RGB")).astype(int)
    blue, black = (sheet == [0, 0, 255]).all(2), (sheet == 0).all(2)
    assert blue.sum() / (blue | black).sum() == pytest.approx(1 / 6, abs=0.02)
    assert np.nonzero(blue)[1].min() > sheet.shape[1] / 2 and sheet.shape[1] < 1100
