"""Pictures of trained checkpoints, and the numbers behind them. COMMAND --help lists its flags.

    layers --ckpt=A.pt,B.pt --untrained    rates and sparsity by layer  [N] Fig. 3-5, [S] Fig. 2
    saliency --ckpt=A.pt                   what is attended to          [B] Eq. (7.2.41), Fig. 7.11
    predict --ckpt=A.pt a.jpg b.png        the classes of your own pictures, or reconstructions
    curves out/a out/b                     loss and accuracy of runs
    page --ckpt=A.pt                       an HTML file that runs the model itself, in a browser"""
from dataclasses import dataclass, MISSING
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import figures
from checkpoint import each_model, load_model, open_model
from data import augment, images, text
from evaluate import check_classes, validation_noise
from flags import CheckpointFlags, DataFlags, option, parse_command, ROOT, SplitFlags, UserError
from model import coding_rate, sparse_rate_reduction, subspace_coding_rate
from processes import cli, Processes, with_bar
from run import read_metrics
from web import page


@dataclass(kw_only=True)
class OutFlags:
    out: str | None = option(None, "the file, .png, of page .html; auto is out/analyze-COMMAND")


# ---- Samples of a checkpoint's data, and what its layers do with them ---------------------------
def spread(total, n):
    """n indices spread evenly over 0 .. total - 1: some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def inputs(loaded, c):
    """Yields (index (B,), x) of c.samples images or windows of text, spread over the split: which
    they are, and what the backbone takes, images in the type of its weights or ids (B, n)."""
    config, weight = loaded.model.config, next(loaded.model.parameters())
    if loaded.task == "gpt":
        tokens = text.tokens_for(c.data, c.split, loaded.meta, c.data_dir)[2]
        n = min(config.context, len(tokens))
        windows = tokens[:len(tokens) // n * n].reshape(-1, n)
        total = len(windows)
    else:
        data, split = images.split_for(loaded, c)
        total = len(split)
    for index in with_bar(spread(total, c.samples).split(c.batch_size), "samples"):
        if loaded.task == "gpt":
            x = torch.from_numpy(windows[index.numpy()].astype(np.int64)).to(weight.device)
        else:
            x = images.model_input(split.batch(index)[0], data, config.image_size).to(weight.dtype)
        yield index, x


def traces(loaded, c):
    """Yields [(layer, its LayerTrace) ...] for each batch of `inputs`."""
    for _, x in inputs(loaded, c):
        yield [*zip(loaded.backbone.layers, loaded.backbone.trace(x))]


# ---- layers: rates and sparsity -----------------------------------------------------------------
def at_norm(Z, other):
    """Each sample of Z (..., n, d), scaled to the norm of that of `other`."""
    return Z * (other.norm(dim=(-2, -1)) / Z.norm(dim=(-2, -1)))[..., None, None]


def centred_normed(Z):
    """Tokens (..., n, d) less their mean, after a LayerNorm without gain and bias: much as the next
    step reads them. Longer tokens alone have a higher rate, and those to which one vector is added
    a lower one after a LayerNorm."""
    return F.layer_norm(Z - Z.mean(-2, keepdim=True), Z.shape[-1:])


def unit_size(U):
    """U (K, d, p) times the number that makes ||U||_F^2 = K p, as orthonormal bases have it."""
    return U * (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()


def layer_numbers(layer, trace, eps=0.1, lambd=0.1):
    """{column of `layers`: a number for each sample (B,)} of a layer that made `trace`. In float64,
    as float32 may give NaN."""
    U = unit_size(layer.attention.bases().double())
    Z, half, out, X = (T.double() for T in (
        trace.tokens, trace.half, trace.out, layer.norm1(trace.tokens)))

    rate = partial(subspace_coding_rate, U=U, eps=eps)
    objective = partial(sparse_rate_reduction, U=U, eps=eps, lambd=lambd)
    reduction = partial(sparse_rate_reduction, U=U, eps=eps, lambd=0)
    return dict(
        Rc_tokens=coding_rate(F.normalize(X[:, None] @ U, dim=-1), eps).sum(1),
        attention_Rc=rate(half) - rate(Z),
        attention_Rc_normed=rate(centred_normed(half)) - rate(centred_normed(Z)),
        R=coding_rate(out, eps), Rc=rate(out), nonzeros=(out != 0).double().mean((1, 2)),
        objective=objective(out), objective_added=objective(out) - objective(Z),
        reduction_added=reduction(at_norm(out, Z)) - reduction(Z))


@torch.no_grad()
def layer_table(loaded, c):
    """One dict a layer: the mean over samples of each number."""
    batches = [[layer_numbers(layer, trace, c.eps, c.lambd) for layer, trace in traced]
               for traced in traces(loaded, c)]
    return [dict(layer=l) | {key: torch.cat([part[key] for part in parts]).mean().item()
                             for key in parts[0]} for l, parts in enumerate(zip(*batches), 1)]


@dataclass(kw_only=True)
class Layers(SplitFlags, OutFlags):
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
    batch_size: int = option(10, "samples at once; all their attention maps are kept", low=1)


def layers(c):
    """[{"name", "weights", "layers", "objective" (the mean over layers)}, ...]."""
    runs = []
    for loaded in each_model(c):
        table = layer_table(loaded, c)
        mean = sum(row["objective"] for row in table) / len(table)
        runs.append(dict(name=loaded.name, weights=loaded.weights, objective=mean, layers=table))
        print(f"{loaded.label}, {c.split}: rates in nats, eps {c.eps:g}; --help has the columns")
        figures.print_table(table)
        print(f"sparse rate reduction, mean over layers (higher is better): {mean:.3f}")
    draw_layers(runs, c)
    return runs


def draw_layers(runs, c):
    """Three numbers of the table over the layers."""
    panels = {"Rc_tokens": f"rate $R^c$ of the projections\n(nats, $\\epsilon$ = {c.eps:g})",
              "nonzeros": "share of entries\nthat are not zero",
              "objective": f"objective $R - R^c - {c.lambd:g}\\,\\Vert Z\\Vert_0$\n"
                           "(nats, higher is better)"}
    figure, axes = figures.new_figure(1, 3, 3, 3)
    colors = {}                         # of a model, trained or not
    for ax, (key, title) in zip(axes.flat, panels.items()):
        for run in runs:
            color = colors.setdefault(run["name"], f"C{len(colors)}")
            look = dict(ls="--", mfc="white") if run["weights"] == "random" else {}
            l, y = zip(*((row["layer"], row[key]) for row in run["layers"]))
            ax.plot(l, y, marker="o", color=color, label=f"{run['name']}, {run['weights']}", **look)
        figures.over_layers(ax, title)
    axes[0, 1].yaxis.set_major_formatter("{x:.0%}")
    figures.legend_below(figure, axes[0, 0])
    figure.savefig(c.out, dpi=200)


# ---- saliency, predict --------------------------------------------------------------------------
def saliency(attention, query="class"):
    """The weights that an attention map (B, K, 1 + n, 1 + n) gives the patches, (B, K, n): in the
    class token's row, below [B] Eq. (7.2.41), or ("mean", for a mean-pooled head) on average over
    the patches' rows. TSSA has memberships Pi (B, K, 1 + n) instead."""
    if attention.ndim == 3:
        return attention[..., 1:]
    return attention[:, :, 0, 1:] if query == "class" else attention[:, :, 1:, 1:].mean(2)


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
    figures.write_sheet(c.out, figures.overlays(pixels, maps), columns, names)
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
        sheet = figures.reconstructions(model, x, noise, *images.statistics_of(loaded.meta))
    else:
        classes = loaded.meta.get("classes") or [f"class {i}" for i in range(model.config.classes)]
        best = model(x).softmax(-1).topk(min(3, len(classes)))
        answers = [{classes[i]: y for i, y in zip(*row)}
                   for row in zip(best.indices.tolist(), best.values.tolist())]
        maps = saliency(loaded.encoder.trace(x)[-1].attention, loaded.pooling)
        query = {"mean": "patches", "class": "class token"}[loaded.pooling]
        sheet = figures.overlays(pixels, maps.mean(1, True)), ["image", f"attention of the {query}"]
    words = [[f"{key} {y:.3f}" for key, y in answer.items()] for answer in answers]
    for name, parts in zip(names, words):
        print(f"{name}: {', '.join(parts)}")
    titles = ["\n".join([name, *parts]) for name, parts in zip(names, words)]
    figures.write_sheet(c.out, *sheet, titles)
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
    figure, (axes,) = figures.new_figure(1, len(names), 4.5, 3.5)
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
    if (arch := loaded.model.config.arch) != "crate":       # before the data is prepared
        raise UserError(f"{c.ckpt} is of arch {arch}; the page runs crate")
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
