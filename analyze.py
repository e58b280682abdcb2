"""
Looks inside the layers of trained checkpoints.

    layers --ckpt=A.pt,B.pt --untrained    rates and sparsity by layer  [N] Fig. 3-5, [S] Fig. 2
    subspaces --ckpt=A.pt                  are U_1 .. U_K incoherent?   [N] Fig. 7
    tokens --ckpt=A.pt                     Z^{l+1} of one image         [N] Fig. 6
    saliency --ckpt=A.pt --head=2          what is attended to          [B] Eq. (7.2.41), Fig. 7.11
    page --ckpt=A.pt                       an HTML file that runs the model itself, in a browser

`python analyze.py COMMAND` draws a figure; the first three also print a table.
"""
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from checkpoint import load_model
from flags import CACHE, cli, needed, option, parse_command, ROOT, UserError
from run import Processes
from data import augment, page
from model import coding_rate, saliency, sparse_rate_reduction, subspace_coding_rate
from scores import images_for, model_input, on_device, pooling, tokens_for, with_bar, write_overlays


@dataclass(kw_only=True)
class OneModel:
    """The flags of every command."""
    ckpt: str | None = option(None, "a checkpoint: ours, a published one, pretrained:NAME")
    data: str | None = option(None, "data set; auto is what the checkpoint was trained on")
    split: str = option("val", "which part of it", choices=("train", "val"))
    untrained: bool = option(False, "random weights instead; layers shows both")
    seed: int = option(0, "of the random weights", low=0)
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there",
                         choices=("auto", "cuda", "mps", "cpu"))
    data_dir: str = option(str(CACHE), "where prepared data lies")
    out: str | None = option(None, "the figure; auto is out/analyze-COMMAND.png")


def print_table(rows):
    """Dicts with the same keys, one a line; a deviation KEY_std or KEY_error follows KEY."""
    def cell(row, key):
        value, extra = row[key], row.get(key + "_std", row.get(key + "_error"))
        shown = f"{value:.4g}" if isinstance(value, float) else str(value).replace("None", "-")
        return f"{shown} +- {extra:.2g}" if extra else shown

    keys = [key for key in rows[0] if not key.endswith(("_std", "_error"))]
    lines = [keys] + [[cell(row, key) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths)))


def new_figure(rows, columns, width, height):
    """A matplotlib figure and its axes (rows, columns), each panel `width` x `height` inches."""
    from matplotlib.figure import Figure            # without pyplot: no window, no global state
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def draw_heat_maps(c, maps, title, xlabel, ylabel, scale):
    """Matrices of one shape with entries in [0, 1], one per layer, four per row."""
    rows, columns = -(-len(maps) // 4), min(4, len(maps))
    height = max(1.2, min(3.2 * len(maps[0]) / len(maps[0].mT), 4.8)) + 0.4
    figure, axes = new_figure(rows, columns, 3.2, height)
    for ax in axes.flat[len(maps):]:
        ax.axis("off")
    for l, (ax, matrix) in enumerate(zip(axes.flat, maps), 1):
        shown = ax.imshow(matrix.cpu().numpy(), cmap="Greys", vmin=0, vmax=1)
        ax.set(title=f"layer {l}", xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(shown, ax=axes, label=scale, aspect=40)
    figure.suptitle(title)
    figure.savefig(c.out, dpi=120)


def open_model(path, c, untrained=False, tasks=None):
    """A checkpoint as `Loaded`, on the device of the flags c."""
    loaded = load_model(path, tasks, c.heads, c.seed if untrained else None)
    loaded.model.to(Processes(c.device).device)
    return loaded


def backbone_of(loaded):
    """The part of the model that has .layers, .tokens(x) = Z^1 and .trace(x)."""
    return loaded.encoder or loaded.model


def spread(total, n):
    """n indices spread evenly over 0 .. total - 1, because some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def split_for(loaded, c):
    """(image set, its split on the model's device), to be normalized as in the model's training."""
    data = images_for(c.data, loaded.meta, c.data_dir)
    return data, on_device(data, c.split, next(loaded.model.parameters()).device)


def open_pictures(c, count):
    """(c.ckpt as `Loaded`, names of `count` images or fewer from c.index on, the images
    (B, 3, H, H) in [0, 1], the same normalized)."""
    loaded = open_model(needed(c.ckpt, "ckpt"), c, c.untrained, ("vit", "mae", "simdino"))
    data, split = split_for(loaded, c)
    index = torch.arange(len(split))[c.index:c.index + count]
    if len(index) == 0:
        raise UserError(f"--index={c.index}: {data.name} has {len(split):,} {c.split} images")
    batch, labels = split.batch(index)
    names = [f"{i}: {data.classes[y]}" for i, y in zip(index.tolist(), labels.tolist())]
    size = loaded.encoder.config.image_size
    pixels = augment.at_size(augment.to_float(batch), size)
    return loaded, names, pixels, model_input(batch, data, size)


def batches(loaded, c):
    """c.samples images, or windows of text as long as the context, spread over the split: (the
    images' numbers (B,) or the tokens (B, n), the backbone's input). Nothing is masked."""
    config, device = backbone_of(loaded).config, next(loaded.model.parameters()).device
    if loaded.task == "gpt":
        tokens = tokens_for(c.data, c.split, loaded.meta, c.data_dir)[2]
        n = min(config.context, len(tokens))
        windows = tokens[:len(tokens) // n * n].reshape(-1, n)
        for index in with_bar(spread(len(windows), c.samples).split(c.batch_size), "samples"):
            ids = torch.from_numpy(windows[index.numpy()].astype(np.int64)).to(device)
            yield ids, ids
    else:
        data, split = split_for(loaded, c)
        for index in with_bar(spread(len(split), c.samples).split(c.batch_size), "samples"):
            yield index, model_input(split.batch(index)[0], data, config.image_size)


# -------------------------------------------------------------------------------------------------
# layers: rates and sparsity
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Layers(OneModel):
    """R^c, R(Z^{l+1}), the fraction of nonzeros of Z^{l+1} and the sparse rate reduction, layer by
    layer: mean and deviation over samples.

    R^c is that of the projections in the softmax, U_k^* LN(Z^l), each token scaled to norm 1, as in
    [N]'s code; the caption of [N]'s figure says R^c(Z^{l+1/2} | U). "attention" is the change of
    R^c by attention, R^c(Z^{l+1/2} | U) - R^c(Z^l | U), which was derived to be negative. For
    "scaled", Z^{l+1/2} has the norm of Z^l: longer tokens alone raise R^c. "srr" is of Z^{l+1}.
    Rates are in nats, from float64 (float32 has NaNs). Without U, value maps are in its place."""
    ckpt: str | None = option(None, "checkpoints of any task, separated by commas")
    samples: int = option(200, "images or sequences, spread over the split; [N] has 1000", low=1)
    eps: float = option(0.1, "distortion; 0.1 is [N]'s figure", low=1e-6)
    lambd: float = option(0.1, "weight of ||Z||_0 in the sparse rate reduction", low=0)
    unit_bases: bool = option(False, "U of each layer times one number that makes ||U||_F^2 = K p, "
                              "as orthonormal bases have it: R^c(Z | U) falls with U's size alone")
    batch_size: int = option(10, "samples at once; all their attention maps are kept", low=1)


def in_float64(Z):
    return Z.cpu().double() if Z.device.type == "mps" else Z.double()       # mps has none


def layer_numbers(layer, Z, trace, c):
    """The numbers of one layer, each (B,), from Z^l (B, n, d) and its LayerTrace."""
    U, out = in_float64(layer.attention.bases()), in_float64(trace.out)
    if c.unit_bases:
        U = U * (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()
    w = F.normalize(in_float64(layer.norm1(Z)).unsqueeze(1) @ U, dim=-1)    # (B, K, n, p)
    Z, half = in_float64(Z), in_float64(trace.half)
    scaled = half * (Z.norm(dim=(1, 2)) / half.norm(dim=(1, 2)))[:, None, None]
    before, after, scaled = (subspace_coding_rate(T, U, c.eps) for T in (Z, half, scaled))
    found = dict(rate_of_subspaces=coding_rate(w, c.eps).sum(-1), attention=after - before,
                 scaled=scaled - before, rate=coding_rate(out, c.eps),
                 nonzeros=(out != 0).double().mean((-2, -1)))
    if layer.sparsification is not None:
        code = layer.sparsification.code(layer.norm2(trace.half))
        if layer.residual or code.shape != out.shape:       # else the code is Z^{l+1}
            found["code_nonzeros"] = (code != 0).double().mean((-2, -1))
    return found | dict(srr=sparse_rate_reduction(out, U, c.eps, c.lambd))


@torch.no_grad()
def layer_table(loaded, c):
    """One dict a layer: mean and deviation over samples of each number."""
    backbone = backbone_of(loaded)
    found = [[] for _ in backbone.layers]
    for _, x in batches(loaded, c):
        Z = backbone.tokens(x)
        for parts, layer, trace in zip(found, backbone.layers, backbone.trace(x)):
            parts.append(layer_numbers(layer, Z, trace, c))
            Z = trace.out

    table = []
    for l, parts in enumerate(found, 1):
        row = dict(layer=l)
        for key in parts[0]:
            values = torch.cat([part[key] for part in parts])
            row[key] = values.mean().item()
            row[f"{key}_std"] = values.std(correction=0).item()
        table.append(row)
    return table


def layers(c):
    """{"runs": [{"ckpt", "untrained", "srr", "layers"}, ...]}, srr the mean over layers."""
    runs = []
    for path in needed(c.ckpt, "ckpt").split(","):
        for untrained in (False, True) if c.untrained else (False,):
            loaded = open_model(path, c, untrained)
            table = layer_table(loaded, c)
            mean = sum(row["srr"] for row in table) / len(table)
            runs.append(dict(ckpt=path, untrained=untrained, srr=mean, layers=table))
            print(f"{path}{', untrained' * untrained}, {c.split}: rates in nats, eps {c.eps:g}"
                  f"{', U at unit size' * c.unit_bases}")
            print_table(table)
            print(f"sparse rate reduction, mean over layers (higher is better): {mean:.3f}")
    draw_layers(runs, c)
    return dict(runs=runs)


def draw_layers(runs, c):
    """R^c, R, nonzeros and sparse rate reduction over the layers; bands are one deviation."""
    bases = ", U at unit size" * c.unit_bases
    panels = {"rate_of_subspaces": ("R^c of the normalized U^* LN(Z^l)", f"nats, eps {c.eps:g}"),
              "rate": ("R(Z^(l+1))", f"nats, eps {c.eps:g}"),
              "nonzeros": ("nonzeros of Z^(l+1)", "fraction of entries"),
              "srr": ("sparse rate reduction of Z^(l+1), higher is better",
                      f"R - R^c - {c.lambd:g} |Z|_0, nats{bases}")}
    figure, axes = new_figure(2, 2, 5.2, 3.4)
    for ax, (key, (title, ylabel)) in zip(axes.flat, panels.items()):
        for i, run in enumerate(runs):
            l, y, std = (np.array([row[name] for row in run["layers"]])
                         for name in ("layer", key, f"{key}_std"))
            name = "/".join(Path(run["ckpt"]).parts[-2:]) + ", untrained" * run["untrained"]
            ax.plot(l, y, "o--" if run["untrained"] else "o-", color=f"C{i}", label=name)
            ax.fill_between(l, y - std, y + std, color=f"C{i}", alpha=0.15, linewidth=0)
        ax.set(title=title, xlabel="layer l", ylabel=ylabel)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3)
    axes[1, 0].legend(fontsize="small")
    figure.savefig(c.out, dpi=120)


# -------------------------------------------------------------------------------------------------
# subspaces, tokens, saliency
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Subspaces(OneModel):
    """|<u, v>| of the columns of U_1 to U_K, each of norm 1, within one subspace and across two,
    layer by layer ([N] Figure 7)."""


def coherence(U):
    """|<u, v>| of the columns of U (K, d, p), each scaled to norm 1: the matrix (K p, K p), and its
    mean (NaN where there is no pair) and maximum within and across subspaces."""
    columns = F.normalize(torch.cat([*U], 1), dim=0)
    gram = (columns.mT @ columns).abs()
    owner = torch.arange(len(U), device=U.device).repeat_interleave(U.shape[2])
    same = owner[:, None] == owner
    itself = torch.eye(len(gram), dtype=torch.bool, device=U.device)
    found = {}
    for name, pairs in (("within", same & ~itself), ("across", ~same)):
        found[f"{name}_mean"] = gram[pairs].mean().item()
        found[f"{name}_max"] = (gram * pairs).max().item()
    return gram, found


@torch.no_grad()
def subspaces(c):
    """{"layers": coherence of each, "random": the mean of |<u, v>| for random directions}."""
    loaded = open_model(needed(c.ckpt, "ckpt"), c, c.untrained)
    found = [coherence(layer.attention.bases()) for layer in backbone_of(loaded).layers]
    rows = [dict(layer=l) | numbers for l, (_, numbers) in enumerate(found, 1)]
    d = loaded.model.config.width
    random = (2 / (math.pi * d)) ** 0.5         # E |<u, v>| of unit vectors, up to O(1 / d)
    print_table(rows)
    print(f"random directions in R^{d} have a mean of {random:.4f}")
    draw_heat_maps(c, [gram for gram, _ in found], "|<u, v>| of the columns of [U_1 .. U_K]",
                   "column u", "column v", "|<u, v>|")
    return dict(layers=rows, random=random)


@dataclass(kw_only=True)
class Tokens(OneModel):
    """|Z^{l+1}| of one image, tokens by features, layer by layer ([N] Figure 6).

    The effective rank is exp of the entropy of the squared singular values. Black is the 99th
    percentile of a layer and more."""
    index: int = option(0, "the image's number in the split", low=0)


@torch.no_grad()
def tokens(c):
    """{"layers": nonzeros and effective rank of each Z^{l+1}}."""
    loaded, (name,), _, x = open_pictures(c, 1)
    rows, maps = [], []
    for l, step in enumerate(loaded.encoder.trace(x), 1):
        Z = in_float64(step.out[0])
        share = torch.linalg.svdvals(Z).square()
        entropy = torch.special.entr(share / share.sum()).sum()
        rows.append(dict(layer=l, nonzeros=(Z != 0).double().mean().item(),
                         effective_rank=entropy.exp().item()))
        maps.append(Z.abs() / Z.abs().quantile(0.99).clamp_min(1e-12))
    print_table(rows)
    draw_heat_maps(c, maps, f"|Z^(l+1)| of image {name}", "feature", "token",
                   "share of the layer's 99th percentile")
    return dict(layers=rows)


@dataclass(kw_only=True)
class Saliency(OneModel):
    """What the class token attends to, in red over the image: the mean of the heads, then each head
    ([B] Eq. (7.2.41)). For a mean-pooled model or a masked autoencoder: what the patches attend to
    on average. For TSSA, which has no attention map: each patch's membership Pi. --head shows only
    that head ([B] Figure 7.11)."""
    layer: int | None = option(None, "l, counted from 1; auto is the last", low=1)
    head: int | None = option(None, "k, counted from 1; auto is all, and their mean", low=1)
    index: int = option(0, "the first image's number in the split", low=0)
    pictures: int = option(8, "how many images, one per row", low=1)


@torch.no_grad()
def saliency_maps(c):
    """{"heads": names, "maps": (images, heads, patches)}."""
    loaded, names, pixels, x = open_pictures(c, c.pictures)
    K, L = loaded.encoder.config.heads, len(loaded.encoder.layers)
    for flag, value, most in (("layer", c.layer, L), ("head", c.head, K)):
        if value and value > most:
            raise UserError(f"--{flag}={value}: {c.ckpt} has {most}")

    trace = loaded.encoder.trace(x)[(c.layer or L) - 1]
    maps = saliency(trace.attention.float(), pooling(loaded))
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    heads = ["mean of heads", *(f"head {k}" for k in range(1, K + 1))]
    if c.head:
        maps, heads = maps[:, c.head:c.head + 1], heads[c.head:c.head + 1]
    write_overlays(c.out, pixels, maps, heads, names)
    return dict(heads=heads, maps=maps)


@dataclass(kw_only=True)
class Page(OneModel):
    """One HTML file that runs the model itself in a browser: CRATE, -C, -N, -T, CRATE-alpha."""
    out: str | None = option(None, "the file; auto is out/analyze-page.html")


def write_page(c):
    """{"megabytes"} of the file. Raises UserError for a model that the page cannot run."""
    path, tokens = needed(c.ckpt, "ckpt"), None
    loaded, untrained = (load_model(path, None, c.heads, seed) for seed in (None, c.seed))
    if loaded.task == "gpt":
        data, _, tokens = tokens_for(c.data, c.split, loaded.meta, c.data_dir)
    else:
        data = images_for(c.data, loaded.meta, c.data_dir)
    text = page.html(Path(path).name.removeprefix("pretrained:"), loaded, untrained, data, tokens)
    Path(c.out).write_text(text, encoding="utf-8")
    return dict(megabytes=len(text) / 1e6)


COMMANDS = dict(layers=(Layers, layers), subspaces=(Subspaces, subspaces), tokens=(Tokens, tokens),
                saliency=(Saliency, saliency_maps), page=(Page, write_page))


def main(argv):
    """Runs one subcommand; returns its numbers."""
    command, c = parse_command({name: row[0] for name, row in COMMANDS.items()}, argv, __doc__)
    suffix = ".html" if command == "page" else ".png"
    c.out = str(c.out or ROOT / "out" / f"analyze-{command}").removesuffix(suffix) + suffix
    Path(c.out).parent.mkdir(parents=True, exist_ok=True)
    print(*argv, "...", file=sys.stderr, flush=True)
    numbers = COMMANDS[command][1](c)
    print(f"wrote {c.out}")
    return numbers


if __name__ == "__main__":
    cli(main)
