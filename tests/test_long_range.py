"""The models of experiments/long_range.py are comparable, and learn."""
from types import SimpleNamespace

import numpy as np
import pytest

from data import images
from experiments import long_range
from model import LanguageModel, TextConfig
from optim import count


def test_equal_parameters():
    parameters = []
    for arch, size in long_range.SIZES.items():
        config = TextConfig(arch=arch, layers=4, context=8, vocab_size=16, causal=False, **size)
        parameters.append(count(LanguageModel(config), without=("positions",)) - 16 * config.width)
    assert parameters == pytest.approx([197_000] * 3, rel=0.01)


def test_learns(monkeypatch):
    """A task that can be learned: the class is the grey level of most pixels."""
    y = np.arange(160) % 4
    levels = np.where(np.random.default_rng(0).random((160, 4, 4)) < 0.5, y[:, None, None], 5)
    pictures = (40 * levels).repeat(8, 1).repeat(8, 2)[..., None].repeat(3, 3).astype(np.uint8)
    data = SimpleNamespace(train_images=pictures[:120], train_labels=y[:120],
                           val_images=pictures[120:], val_labels=y[120:])
    monkeypatch.setattr(images, "load", lambda name, cache: data)
    rows = long_range.main(["--steps=30", "--batch_size=20", "--lr=0.006", "--device=cpu",
                            "--side=4", "--seeds=1"])
    assert [row["arch"] for row in rows] == [*long_range.SIZES]
    assert min(row["accuracy"] for row in rows) > 0.9 and all(row["ms"] > 0 for row in rows)
