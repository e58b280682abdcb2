"""Figures of RESULTS.md that are drawn from records/, and that of README.md.

    python -m experiments.results               to docs/figures
    python -m experiments.results recall        one of them
"""
import csv
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.patches import Rectangle

from analyze import legend_below, new_figure, over_layers
from checkpoint import load_model
from data import augment
from data.shapes import draw_shapes
from experiments.shared import CRATES, dot_rows
from flags import not_one_of, option, parse, ROOT, UserError
from model import by_head
from processes import cli
from run import read_metrics

EPOCH = 50_000 // 128       # steps of the runs on CIFAR-10, in batches of 128
MODELS = CRATES.replace("pretrained:", "").split(",")
NAMES = {"crate": "CRATE", "mssa-mlp": "mssa-mlp", "transformer": "transformer"}
COLORS = {"crate": "C0", "mssa-mlp": "C2", "transformer": "C3"}


@dataclass(kw_only=True)
class Figures:
    names: tuple = option((), "which figures; none: all")


def rows_of(name):
    """The rows of a file of records/, as dicts of words."""
    with open(ROOT / "records" / f"{name}.csv") as file:
        return [*csv.DictReader(file)]


def scores(folder, key):
    """[(step, score)] of the evaluations of a run in records/."""
    lines = read_metrics(ROOT / "records" / folder)
    return [(line["step"], line[key]) for line in lines if line.get("split") == "val"]


def by_model(rows, xlabel, values, markers, on_one_scale=5):
    """A panel for each model of MODELS, of which so many are on one scale: a row for each of `rows`
    with dots at values(model, row), a list for each of the looks `markers`. Controls are grey."""
    figure, (axes,) = new_figure(1, len(MODELS), 7.6 / len(MODELS), 1 + 0.26 * len(rows))
    for ax in axes[1:on_one_scale]:
        ax.sharex(axes[0])
    for ax, model in zip(axes, MODELS):
        dot_rows(ax, rows, "")
        for place, row in enumerate(rows):
            for value, marker in zip(values(model, row), markers):
                ax.plot(value, [place] * len(value), "o", ms=5, **marker, zorder=4,
                        color=COLORS["crate"] if "attention" in row else "0.3")
        ax.set_title(model.replace("-", "-\n", 1), fontsize="small")
        ax.tick_params(labelleft=ax is axes[0])
        ax.xaxis.get_major_locator().set_params(nbins=3, integer=True)
    axes[len(axes) // 2].set_xlabel(xlabel)
    return figure


def compression(brief=False):
    """How far short steps lower R^c, in % of the gradient's, all layers together, from
    compression.csv; brief: README's rows."""
    rows = {"attention": "attention", "its opposite": "reversed", "each token alone": "alone"}
    if not brief:
        rows |= {"one map for all": "one_map", "weights dealt at random": "shuffled",
                 "the term left out": "shrink"}
    whole = {row["model"]: row for row in rows_of("compression")
             if (row["weights"], row["table"], row["layer"]) == ("trained", "short", "all")}

    def share(model, row):
        return [[100 * float(whole[model][rows[row]]) / float(whole[model]["gradient"])]]
    label = "how far short steps lower $R^c$, % of the gradient's (right: they compress)"
    return by_model(rows, label, share, [{}], on_one_scale=1)


def ista():
    """The LASSO of three codes of each layer of trained models, in units of that of no code."""
    marks = dict(step=("the ISTA step", dict(color="C0")),
                 threshold=("the step with D = 0", dict(color="0.6")),
                 optimum=("the best code", dict(mfc="white", mec="black")))
    lasso = {(row["model"], int(row["layer"]), row["code"]): float(row["lasso"])
             for row in rows_of("ista") if row["weights"] == "trained"}
    figure, (axes,) = new_figure(1, len(MODELS), 9 / len(MODELS), 3)
    for ax, model in zip(axes, MODELS):
        ax.sharey(axes[0])
        ax.axhline(1, color="black", lw=0.8)
        layers = sorted({l for name, l, _ in lasso if name == model})
        for code, (label, style) in marks.items():
            shares = [lasso[model, l, code] / lasso[model, l, "zero"] for l in layers]
            ax.plot(layers, shares, "o", label=label, **style)
        ax.tick_params(labelleft=ax is axes[0])
        over_layers(ax, model)
    axes[0].set_ylabel("LASSO objective / that of no code\n(above 1: worse than none)")
    legend_below(figure, axes[0])
    return figure


def objective():
    """What the layers after the first of five models add to R - R^c of 64 samples together, and
    what controls add, in % of it, from objective.csv: filled, of the tokens as they are; hollow,
    minus their mean."""
    rows = {"random step": "random", "the reverse": "reversed", "random subspaces": "elsewhere",
            "random heads": "heads"}
    found = {}
    for row in rows_of("objective"):
        if row["together"] == "64" and row["weights"] == "trained":
            found.setdefault((row["model"], row["centred"]), []).append(row)

    def shares(model, row):
        return [[100 * float(draw[rows[row]]) / float(draw["layers"])
                 for draw in found[model, centred]] for centred in ("False", "True")]
    figure = by_model(rows, "added to $R-R^c$, % of what the layers add (blue)", shares,
                      [{}, dict(mfc="white")])
    for ax in figure.axes:
        ax.axvline(100, color=COLORS["crate"])
    return figure


def images():
    """Accuracy by epoch of the runs cifar10-cpu-30-* of records/."""
    figure, ((ax,),) = new_figure(1, 1, 7, 3.4)
    for (arch, name), side in zip(NAMES.items(), ("center", "bottom", "top")):
        for folder in sorted((ROOT / "records").glob(f"cifar10-cpu-30-{arch}-[0-9]")):
            steps, y = zip(*scores(folder, "acc"))
            x, y = [step / EPOCH for step in steps], [100 * value for value in y]
            ax.plot(x, y, "o-", color=COLORS[arch], ms=3)
        ax.text(x[-1] + 0.5, y[-1], name, color=COLORS[arch], va=side)
    ax.set(xlabel="epochs", ylabel="accuracy on CIFAR-10, %", xlim=(4, 34.5))
    return figure


def text():
    """How far the loss of each run on text is above the mean of the transformer's three."""
    sets = {"Python's manual": "pydoc-{}-neither", "the same, --rotary --shift": "pydoc-{}-shift",
            "books, --rotary --shift": "bookchars-short-{}",
            "masked characters": "pydoc-masked-{}"}
    figure, ((ax,),) = new_figure(1, 1, 7, 2.5)
    dot_rows(ax, sets, "loss above the transformer's, nats a character")
    for place, folder in enumerate(sets.values()):
        losses = {arch: [scores(f"{folder.format(arch)}-{seed}", "loss")[-1][1]
                         for seed in range(3)] for arch in NAMES}
        zero = sum(losses["transformer"]) / 3
        for arch, name in NAMES.items():
            ax.plot([loss - zero for loss in losses[arch]], [place] * 3, "o", mfc="none",
                    color=COLORS[arch], label=None if place else name)
    legend_below(figure, ax)
    return figure


def recall():
    """Steps until each of five runs of records/recall.csv has learned, by the scale of the initial
    projections; a cross: how many have not."""
    figure, (axes,) = new_figure(1, 3, 2.6, 2.6)
    panels = {"attention and an MLP": (("transformer", "64"), ("mssa-mlp", "72")),
              "attention only": (("aot-mhsa", "64"), ("aot", "64")),
              "attention and ISTA": (("mhsa-ista", "64"), ("crate", "64"))}
    rows = [row for row in rows_of("recall")
            if (row["change"], row["shift"], row["lr"]) == ("none", "False", "0.001")]
    for ax, (title, archs) in zip(axes, panels.items()):
        for (arch, width), color, aside, label in zip(
                archs, ("C3", "C0"), (0.93, 1.07), ("three matrices", "one matrix")):
            for init in ("1.0", "2.0", "4.0", "8.0", "16.0"):
                steps = [row["steps"] for row in rows
                         if (row["arch"], row["width"], row["init"]) == (arch, width, init)]
                learned, x = [int(n) for n in steps if n], float(init) * aside
                ax.plot([x] * len(learned), learned, "o", mfc="none", color=color, ms=5,
                        label=label if init == "1.0" else None)
                if failed := len(steps) - len(learned):
                    ax.plot(x, 3300, "x", color=color)
                    ax.text(x, 3420, failed, ha="center", fontsize="small", color=color)
        ax.axhline(3100, color="0.85", lw=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xticks([1, 2, 4, 8, 16], [1, 2, 4, 8, 16])
        ax.set(xlim=(0.8, 20), ylim=(0, 3750))
        ax.set_title(title, fontsize="medium")
        ax.tick_params(labelleft=ax is axes[0])
    axes[0].set_ylabel("training steps until 95 %\nof the answers are right")
    axes[1].set_xlabel("scale of the initial weights of attention (1: standard deviation 0.02)")
    legend_below(figure, axes[0])
    return figure


def segmentation():
    """How well attention covers the object in each of ten runs of records/segmentation.csv."""
    figure, ((ax,),) = new_figure(1, 1, 7, 1.6)
    archs, rows = ("crate", "transformer"), rows_of("segmentation")
    dot_rows(ax, [NAMES[arch] for arch in archs], "intersection over union with the object, %")
    for row in rows:
        look = dict(mfc="none") if row["weights"] == "trained" else dict(color="0.3")
        ax.plot(float(row["iou"]), archs.index(row["arch"]), "o",
                **dict(color=COLORS[row["arch"]]) | look)
    ax.axvline(56, color="0.3", ls="--")        # the mean mask of the training pictures
    ax.text(56.5, 0.72, "one mask for all")
    ax.text(21, 0.72, "grey: random weights", color="0.3")
    ax.set_xlim(20, 70)
    return figure


def pretraining():
    """Accuracy by cost of the runs labels-* of records/, from scratch and after an MAE, whose own
    cost is that of 240 epochs of the 1,000 pictures."""
    figure, ((ax,),) = new_figure(1, 1, 7, 2.8)
    for start, before, epochs, style, place, label in (
            ("scratch", 0, (24, 72, 144, 264, 384), "o-", (112, 90),
             "from scratch\n(24 epochs: 50 %)"),
            ("mae", 240, (24, 72, 144), "s--", (320, 91), "after pretraining,\nits cost counted"),
            ("mae", 0, (24, 72, 144), "s:", (8, 96.5), "after pretraining,\ncost not counted")):
        runs = torch.tensor([[scores(f"labels-{start}-{n}-{seed}", "acc")[-1][1]
                              for seed in range(3)] for n in epochs])
        ax.errorbar([before + n for n in epochs], 100 * runs.mean(1), 100 * runs.std(1) / 3 ** 0.5,
                    fmt=style, ms=4, color=COLORS["crate"],
                    mfc="white" if start == "mae" else None)
        ax.text(*place, label)
    ax.set(xlabel="cost of training, in epochs of the 1,000 labelled pictures",
           ylabel="accuracy on shapes, %", ylim=(86, 99.5))
    return figure


def lesson(layer=0, head=2, picture=34, patch=51):
    """One head of shapes-crate on a drawn picture: similarities, their softmax, a patch's weights.
    Of 60 pictures this patch's weights in this head are among those that follow the object best."""
    loaded = load_model("pretrained:shapes-crate")
    pixels = torch.from_numpy(draw_shapes(60, seed=1)[0][picture:picture + 1])
    x = augment.normalize(augment.to_float(pixels), loaded.meta["mean"], loaded.meta["std"])
    with torch.no_grad():
        trace, part = loaded.encoder.trace(x)[layer], loaded.encoder.layers[layer]
        w = by_head(part.attention.U(part.norm1(trace.tokens)), part.attention.heads)[0, head, 1:]
    weights = trace.attention[0, head, 1:, 1:]
    figure, (axes,) = new_figure(1, 4, 2.4, 2.6)
    for ax, title in zip(axes, ("a picture", "how similar its patches are",
                                "softmax of each row", "weights of one patch")):
        ax.set_title(title, fontsize="medium")
        ax.set_axis_off()
    axes[0].imshow(pixels[0])
    axes[1].imshow(w @ w.mT, cmap="PuOr_r", vmin=-8, vmax=8)
    axes[2].imshow(weights, cmap="Oranges", vmax=0.1)
    axes[3].imshow(weights[patch].view(8, 8), cmap="Oranges")
    for ax, size in ((axes[0], 4), (axes[3], 1)):       # a frame around the patch
        ax.add_patch(Rectangle((patch % 8 * size - 0.5, patch // 8 * size - 0.5), size, size,
                               fill=False, edgecolor="black"))
    return figure


FIGURES = dict(compression=compression, attention=partial(compression, brief=True),
               ista=ista, objective=objective, images=images, text=text, recall=recall,
               segmentation=segmentation, pretraining=pretraining, lesson=lesson)


def main(argv):
    """The files' paths."""
    c = parse(Figures, argv, __doc__)
    paths = []
    for name in c.names or FIGURES:
        if name not in FIGURES:
            raise UserError(f"figure {not_one_of(name, FIGURES)}")
        figure = FIGURES[name]()
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        paths.append(ROOT / "docs" / "figures" / f"{name}.png")
        figure.savefig(paths[-1], dpi=200)
        print(f"wrote {paths[-1].relative_to(ROOT)}")
    return paths


if __name__ == "__main__":
    cli(main)
