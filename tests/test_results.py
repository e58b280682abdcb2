"""The control of reading beyond the length of training; what a run has kept is what is drawn."""
import pytest
import torch
from helpers import write_model
from torch.nn import functional as F

from data import images, text
from experiments import results
from experiments.results import losses_by_position
from flags import UserError
from model import ImageClassifier, ImageConfig, LanguageModel, TextConfig


@torch.no_grad()
def test_losses_by_position():
    """Each loss is of the same character in both, and short sees what lies in the window alone."""
    torch.manual_seed(0)
    model = LanguageModel(TextConfig(width=16, heads=2, layers=1, context=8, vocab_size=7,
                                     rotary=True)).eval()
    ids = torch.randint(7, (3, 21))                         # 20 characters and the one after
    full, short = losses_by_position(model, ids, at_most=8, step=4)
    assert full.shape == short.shape == (3, 12)
    wanted = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(full, wanted[:, 8:])
    for i in range(12):
        start = i // 4 * 4 + 4                              # of the eight characters that it sees
        logits = model(ids[:, start:start + 8])[:, 4 + i % 4]
        torch.testing.assert_close(short[:, i], F.cross_entropy(logits, ids[:, 9 + i],
                                                                reduction="none"))


def test_training(tmp_path, cache, text_cache):
    for folder in (cache / "shapes", text_cache / "pydoc"):
        (tmp_path / folder.name).symlink_to(folder)
    c = results.Figures(samples=5, runs=str(tmp_path), data_dir=str(tmp_path))
    with pytest.raises(UserError, match="vit-shapes has no ckpt-STEP.pt: train with --keep"):
        results.training(c)
    small = dict(width=8, heads=2, layers=2)
    runs = {"vit-shapes": ("vit", images.load("shapes", cache), lambda: ImageClassifier(
                ImageConfig(**small, image_size=32, patch_size=8, classes=10))),
            "gpt-pydoc": ("gpt", text.load("pydoc", text_cache), lambda: LanguageModel(
                TextConfig(**small, context=16, vocab_size=97)))}
    for folder, (task, data, build) in runs.items():
        (tmp_path / folder).mkdir()
        for step in (40, 200):
            write_model(tmp_path / folder / f"ckpt-{step}.pt", build(), task, data.meta())
    axes = results.training(c).axes
    for ax, folder in zip(axes[1::3], runs):
        for line, step in zip(ax.lines[1:], (40, 200), strict=True):        # after the untrained
            table, _ = results.by_layer(c, tmp_path / folder / f"ckpt-{step}.pt")
            assert line.get_ydata() == pytest.approx([100 * row["nonzeros"] for row in table])
    assert [label.get_text() for label in axes[2].texts] == ["step 0", "step 40", "step 200"]
