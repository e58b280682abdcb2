"""experiments/results.py: labels do not overlap; the numbers drawn are those of TABLES and of the
checkpoints that a run has kept."""
import pytest
from helpers import write_model

from data import images, text
from experiments import results
from figures import new_figure
from flags import UserError
from model import ImageClassifier, ImageConfig, LanguageModel, TextConfig


def test_labels():
    """They are in the order of the ends, a line apart, in the middle of ends that coincide."""
    figure, ((ax,),) = new_figure(1, 1, 2, 2)
    ax.set_ylim(0, 1)
    results.name_ends(ax, dict(a=(0.5, "C0"), b=(0.5, "C1"), c=(0.9, "C2")), line=0.1)
    assert [label.xy[1] for label in ax.texts] == pytest.approx([0.45, 0.55, 0.9])


def test_sparsity():
    ax, = results.sparsity(results.Figures()).axes
    untrained, *_, decayed = (line.get_ydata() for line in ax.lines)
    assert untrained.tolist() == [49, 37, 34, 32, 32, 30]
    assert decayed.tolist() == [48, 34, 30, 28, 26, 34]


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
