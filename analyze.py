"""Pictures of trained checkpoints, and the numbers behind them. COMMAND --help lists its flags.

    layers --ckpt=A.pt,B.pt --untrained    rates and sparsity by layer  [N] Fig. 3-5, [S] Fig. 2
    saliency --ckpt=A.pt                   what is attended to          [B] Eq. (7.2.41), Fig. 7.11
    predict --ckpt=A.pt a.jpg b.png        the classes of your own pictures, or reconstructions
    curves out/a out/b                     loss and accuracy of runs
    page --ckpt=A.pt                       an HTML file that runs the model itself, in a browser"""
import math
import re
from dataclasses import dataclass, MISSING
from pathlib import Path

import torch
from torch.nn import functional as F

from checkpoint import each_model, load_model, open_model
from data import augment, images, text
from evaluate import check_classes, validation_noise
from flags import (
    CheckpointFlags,
    DataFlags,
    option,
    parse_command,
    ROOT,
    SampleFlags,
    SplitFlags,
    UserError,
)
from measure import layer_table, print_table, saliency, spread
from model import ARCHS, patchify, unpatchify
from processes import cli, Processes
from run import read_metrics
from web import page


@dataclass(kw_only=True)
class OutFlags:
    out: str | None = option(None, "the file, .png, of page .html; auto is out/analyze-COMMAND")


# ---- layers: rates and sparsity -----------------------------------------------------------------
def new_figure(rows, columns, width, height):
    """A matplotlib figure and its axes (rows, columns), each panel `width` x `height` inches."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def over_layers(ax, title):
    """Titles a panel whose x axis counts layers."""
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel("layer")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.spines[["top", "right"]].set_visible(False)


def legend_below(figure, ax):
    """The labels of `ax` below all panels, four a line, or two if they are long."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False,
                  ncols=4 if sum(map(len, labels)) < 90 else 2)


@dataclass(kw_only=True)
class Layers(SampleFlags, OutFlags):
    """Rates, nonzeros and the objective by layer, means over samples. Rates are in nats, with U at
    unit size; of a transformer U is its value maps. A layer takes Z to Z^{l+1/2} and Z^{l+1}.

    Rc_tokens            R^c of U_k^* LN(Z), each token scaled to norm 1, as in [N]'s code (its
                         caption has R^c(Z^{l+1/2} | U)); without --shift and --rotary
    attention_Rc         what attention, which was derived to lower R^c, adds to it
    attention_Rc_normed  the same of tokens less their mean, after a LayerNorm: longer tokens alone
                         raise R^c, a vector added to all lowers it
    R, Rc                the rates of Z^{l+1}
    nonzeros             the share of the entries of Z^{l+1} that are not zero
    objective            R - R^c - lambda ||Z||_0 of Z^{l+1}
    objective_added      what the layer adds to the objective, [J] Eq. (21)
    reduction_added      what it adds to R - R^c, Z^{l+1} scaled to the norm of Z"""
    ckpt: str = option(MISSING, "checkpoints of any task, separated by commas")
    samples: int = option(200, "images or sequences, spread over the split; [N] has 1000", low=1)
    eps: float = option(0.1, "distortion; 0.1 is [N]'s figure", low=1e-6)
    lambd: float = option(0.1, "weight of ||Z||_0 in the sparse rate reduction", low=0)


def layers(c):
    """[{"name", "weights", "layers", "objective" (the mean over layers)}, ...]."""
    runs = []
    for loaded in each_model(c):
        table = layer_table(loaded, c)
        mean = sum(row["objective"] for row in table) / len(table)
        runs.append(dict(name=loaded.name, weights=loaded.weights, objective=mean, layers=table))
        print(f"{loaded.label}, {c.split}: rates in nats, eps {c.eps:g}; --help has the columns")
        print_table(table)
        print(f"sparse rate reduction, mean over layers (higher is better): {mean:.3f}")
        falls = [f"{name} {sum(b[name] < a[name] for a, b in zip(table, table[1:]))}"
                 for name in ("Rc_tokens", "Rc", "nonzeros")]        # as both do in [N] Fig. 3, 4
        print(f"falls from a layer to the next, in {len(table) - 1} places: {', '.join(falls)}")
    draw_layers(runs, c)
    return runs


def draw_layers(runs, c):
    """Three numbers of the table over the layers."""
    panels = {"Rc_tokens": f"rate $R^c$ of the projections\n(nats, $\\epsilon$ = {c.eps:g})",
              "nonzeros": "share of entries\nthat are not zero",
              "objective": f"objective $R - R^c - {c.lambd:g}\\,\\Vert Z\\Vert_0$\n"
                           "(nats, higher is better)"}
    figure, axes = new_figure(1, 3, 3, 3)
    colors = {}                         # of a model, trained or not
    for ax, (key, title) in zip(axes.flat, panels.items()):
        for run in runs:
            color = colors.setdefault(run["name"], f"C{len(colors)}")
            look = dict(ls="--", mfc="white") if run["weights"] == "random" else {}
            l, y = zip(*((row["layer"], row[key]) for row in run["layers"]))
            ax.plot(l, y, marker="o", color=color, label=f"{run['name']}, {run['weights']}", **look)
        over_layers(ax, title)
    axes[0, 1].yaxis.set_major_formatter("{x:.0%}")
    legend_below(figure, axes[0, 0])
    figure.savefig(c.out, dpi=200)


# ---- saliency, predict --------------------------------------------------------------------------
def write_sheet(path, pictures, columns, rows):
    """A PNG of pictures (n, m, 3, H, W) in [0, 1] under the titles of the m columns, beside the
    names of the n rows, whose long lines lose their middle."""
    from matplotlib.figure import Figure
    n, m, _, height, width = pictures.shape
    gap = width // 16
    sheet = F.pad(pictures.float().clamp(0, 1), (0, gap, 0, gap), value=1.0)
    sheet = sheet.permute(0, 3, 1, 4, 2).reshape(n * (height + gap), m * (width + gap), 3)
    # no pixel is lost; matplotlib draws at most 65,536 per side
    inches = min(max(1.5, max(height, width) / 150), 400 / max(n, m))
    axes = Figure((inches * m, inches * n)).add_axes((0, 0, 1, 1))
    axes.imshow(sheet.cpu().numpy(), interpolation="nearest")
    rows = [re.sub(r"(?m)^(.{11}).{3,}(.{11})$", r"\1..\2", row) for row in rows]
    axes.set_xticks([(width + gap) * i + width / 2 for i in range(m)], columns, parse_math=False)
    axes.set_yticks([(height + gap) * i + height / 2 for i in range(n)], rows, parse_math=False)
    axes.tick_params(length=0, labelsize=9, top=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def stretched(maps):
    """Maps (..., P), each from its least value at 0 to its largest at 1."""
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    return (maps - low) / (high - low).clamp_min(1e-12)


def overlays(x, maps):
    """Pictures (n, 1 + m, 3, H, H) for a sheet: an image of x (n, 3, H, H), then each of its maps
    (n, m, patches), stretched, in red over its greys."""
    side = math.isqrt(maps.shape[-1])
    heat = F.interpolate(stretched(maps).unflatten(-1, (side, side)), size=x.shape[-1])[:, :, None]
    red = torch.tensor([1.0, 0.1, 0.1], device=maps.device).view(3, 1, 1)
    over = (1 - 0.7 * heat) * 0.7 * augment.luma(x)[:, None] + 0.7 * heat * red
    return torch.cat([x[:, None], over], 1)


@torch.no_grad()
def reconstructions(model, x, noise, mean, std):
    """(pictures (n, 4, 3, H, H), their titles) of images x, normalized with mean and std: input,
    masked, reconstruction, and the reconstruction with the visible patches pasted in."""
    c, mask = model.eval().config, model.mask_from(noise)
    target = patchify(x, c.patch_size)
    masked, guess = mask[..., None], model.predicted(x, mask).float()
    columns = {"input": target, "masked": torch.where(masked, 0.0, target),
               "reconstruction": guess, "pasted": torch.where(masked, guess, target)}
    mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (mean, std))
    pictures = [unpatchify(patches, c.patch_size) * std + mean for patches in columns.values()]
    return torch.stack(pictures, 1), list(columns)


@dataclass(kw_only=True)
class Pictures(SplitFlags, OutFlags):
    files: tuple = option((), "your own pictures in place of the data set's")
    pictures: int = option(8, "how many images of the data set, spread over the split", low=1)


def open_pictures(c, *tasks):
    """(c.ckpt as `Loaded`, the names of c.files or of c.pictures images of the split, the images
    (B, 3, H, H) in [0, 1], the same normalized)."""
    loaded = open_model(c, Processes(c.device).device, *tasks)
    if c.files:
        pixels, x = images.read_pictures(c.files, loaded)
        return loaded, [*c.files], pixels, x
    data, split = images.split_for(loaded, c)
    index = spread(len(split), c.pictures)
    batch, labels = split.batch(index)
    names = [f"{i}, labelled {data.classes[y]}" for i, y in zip(index.tolist(), labels.tolist())]
    pixels = augment.at_size(augment.to_float(batch), loaded.encoder.config.image_size)
    return loaded, names, pixels, augment.normalize(pixels, data.mean, data.std)


@dataclass(kw_only=True)
class Saliency(Pictures):
    """What the class token attends to, in red over the image: the mean of the heads, then each head
    ([B] Eq. (7.2.41)). For a mean-pooled model or a masked autoencoder: what the patches attend to
    on average. For TSSA, without a map: each patch's membership Pi. Of the last layer."""


@torch.no_grad()
def saliency_maps(c):
    """(images, 1 + heads, patches), the mean of the heads first."""
    loaded, names, pixels, x = open_pictures(c, "vit", "mae", "simdino")
    maps = saliency(loaded.encoder.trace(x)[-1].attention, loaded.pooling)
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    columns = ["image", "mean of heads", *(f"head {k}" for k in range(1, maps.shape[1]))]
    write_sheet(c.out, overlays(pixels, maps), columns, names)
    return maps


@dataclass(kw_only=True)
class Predict(Pictures):
    """The likeliest classes of pictures (of your own: of the centre square) beside the last layer's
    mean saliency; of a masked autoencoder the error on masked patches and the reconstruction."""


@torch.no_grad()
def predict(c):
    """[{class: probability}] of each picture; of a masked autoencoder [{"error"}], mean squared."""
    loaded, names, pixels, x = open_pictures(c, "vit", "mae")
    model = loaded.model
    if loaded.task == "mae":
        noise = validation_noise(model, len(x)).to(x.device)
        answers = [dict(error=model(x[i:i + 1], noise[i:i + 1]).item()) for i in range(len(x))]
        sheet = reconstructions(model, x, noise, *images.statistics_of(loaded.meta))
    else:
        classes = loaded.meta.get("classes") or [f"class {i}" for i in range(model.config.classes)]
        best = model(x).softmax(-1).topk(min(3, len(classes)))
        answers = [{classes[i]: y for i, y in zip(*row)}
                   for row in zip(best.indices.tolist(), best.values.tolist())]
        maps = saliency(loaded.encoder.trace(x)[-1].attention, loaded.pooling)
        query = {"mean": "patches", "class": "class token"}[loaded.pooling]
        sheet = overlays(pixels, maps.mean(1, True)), ["image", f"attention of the {query}"]
    words = [[f"{key} {y:.3f}" for key, y in answer.items()] for answer in answers]
    for name, parts in zip(names, words):
        print(f"{name}: {', '.join(parts)}")
    titles = ["\n".join([name, *parts]) for name, parts in zip(names, words)]
    write_sheet(c.out, *sheet, titles)
    return answers


# ---- curves, page -------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Curves(OutFlags):
    """Loss and any accuracy over the steps of runs: training as a line, validation as points."""
    folders: tuple = option(MISSING, "folders of runs")


def curves(c):
    """Draws the loss and, where one is scored, the accuracy of c.folders."""
    runs = [(Path(folder).name, read_metrics(folder)) for folder in c.folders]
    scored = any("acc" in line for _, lines in runs for line in lines)
    names = ["loss", "acc"] if scored else ["loss"]
    figure, (axes,) = new_figure(1, len(names), 4.5, 3.5)
    for ax, name in zip(axes, names):
        for i, (run, lines) in enumerate(runs):
            for split, style in (("train", "-"), ("val", "o--")):
                points = [(line["step"], line[name]) for line in lines
                          if line.get("split") == split and line.get(name) is not None]
                if points:
                    ax.plot(*zip(*points), style, color=f"C{i}", ms=3, label=f"{run} {split}")
                    ax.legend()
        ax.set(xlabel="step", ylabel=name)
    figure.savefig(c.out)


@dataclass(kw_only=True)
class Page(CheckpointFlags, DataFlags, OutFlags):
    """One HTML file that runs the model itself in a browser, with trained and untrained weights."""


def write_page(c):
    """Raises UserError for a model that the page cannot run."""
    loaded, untrained = (load_model(c.ckpt, c.heads, ("vit", "mae", "gpt"), seed)
                         for seed in (None, 0))
    if loaded.model.config.row != ARCHS["crate"]:           # before the data is prepared
        raise UserError(f"{c.ckpt} is of arch {loaded.model.config.arch}; the page runs crate")
    if loaded.task == "gpt":
        data, _, ids = text.tokens_for(c.data, "val", loaded.meta, c.data_dir)
    else:
        data, ids = images.load_for(c.data, loaded.meta, c.data_dir), None
        if loaded.task == "vit":
            check_classes(loaded, data)
    Path(c.out).write_text(page.html(loaded.name, loaded, untrained, data, ids), encoding="utf-8")


COMMANDS = dict(layers=(Layers, layers), saliency=(Saliency, saliency_maps),
                predict=(Predict, predict), curves=(Curves, curves), page=(Page, write_page))


def main(argv):
    command, function, c = parse_command(COMMANDS, argv, __doc__)
    suffix = ".html" if command == "page" else ".png"
    c.out = str(c.out or ROOT / "out" / f"analyze-{command}").removesuffix(suffix) + suffix
    Path(c.out).parent.mkdir(parents=True, exist_ok=True)
    found = function(c)
    print(f"wrote {c.out}")
    return found


if __name__ == "__main__":
    cli(main)
