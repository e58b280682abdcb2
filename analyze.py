"""
Looks inside the layers of trained checkpoints, and tests arguments of the papers in isolation.

    layers --ckpt=A.pt,B.pt --untrained    rates and sparsity by layer  [N] Fig. 3-5, [S] Fig. 2
    subspaces --ckpt=A.pt                  are U_1 .. U_K incoherent?   [N] Fig. 7
    tokens --ckpt=A.pt                     Z^l of one image             [N] Fig. 6
    saliency --ckpt=A.pt --head=2          what is attended to          [B] Eq. (7.2.41), Fig. 7.11
    toy                                    does MSSA lower R^c?         [S]
    denoise                                a Gaussian mixture           [J] Eq. (46)-(49)
    neurons --ckpt=A.pt,B.pt               can single neurons be read?
    recall                                 what does one matrix for query, key and value cost?
    curves --runs=out/A,out/B              metrics.jsonl                [B] Fig. 7.13, 7.18
    correlation --runs=out/grid            generalization gap against complexity   [S] Table 1

`python analyze.py COMMAND` prints a table; --json=FILE also writes the numbers. Figures go to
--out, as PNG.
"""
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the imports: no traceback

import contextlib
import itertools
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import plot
from checkpoint import initial_model, load_model, read_checkpoint
from flags import (check_new, cli, DeviceFlags, needed, not_one_of, option, parse_command, ROOT,
                   RunFlags, UserError)
from optim import make_optimizer, set_lr
from parallel import count, derive_seed, Processes
from data import augment, images
from scores import (classify, load_images, load_tokens, logistic_regression, model_input,
                      on_device, pooling, write_overlays)
from model import (MHSA, ODL, LanguageModel, coding_rate, gaussian_mixture_denoise, mssa,
                   projected_coding_rate, projected_sparse_rate_reduction, run_layers, saliency,
                   subspace_coding_rate, subspace_coding_rate_grad, text_config)


@dataclass(kw_only=True)
class Output:
    """Where every command writes."""
    json: str | None = option(None, "also write the numbers to this file")
    out: str | None = option(None, "figure's name without suffix; auto is out/analyze-COMMAND")
    overwrite: bool = option(False, "replace the files that --json and --out name")


@dataclass(kw_only=True)
class OneModel(Output):
    """The flags of every command that opens a checkpoint."""
    ckpt: str | None = option(None, "a checkpoint: ours, a published one, pretrained:NAME")
    data: str | None = option(None, "data set; auto is what the checkpoint was trained on")
    split: str = option("val", "which part of it", choices=("train", "val"))
    random: bool = option(False, "the checkpoint's model at random initialization instead")
    seed: int = option(0, "of that initialization", low=0)
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there",
                         choices=("auto", "cuda", "mps", "cpu"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")


# -------------------------------------------------------------------------------------------------
# Tables, figures
# -------------------------------------------------------------------------------------------------

def print_table(rows):
    """Dicts with the same keys, one a line; KEY_std (a deviation) or KEY_error (a standard error)
    follows KEY."""
    def cell(row, key):
        value = row[key]
        if value is None:
            return "-"
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        extra = row.get(key + "_std", row.get(key + "_error"))
        return f"{shown} +- {extra:.2g}" if extra else shown

    keys = [key for key in rows[0] if not key.endswith(("_std", "_error"))]
    lines = [keys] + [[cell(row, key) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths)))


def figure(c, *panels):
    """Line charts side by side, as plot.py describes them."""
    plot.write(c.out + ".png", *panels)
    print(f"wrote {c.out}.png")


# -------------------------------------------------------------------------------------------------
# Checkpoints and their inputs
# -------------------------------------------------------------------------------------------------

def words(value, flag):
    """The items of a flag, separated by commas."""
    found = [word.strip() for word in (value or "").split(",") if word.strip()]
    return needed(found or None, flag)


def open_model(path, c, untrained=False, tasks=None):
    """A checkpoint as `Loaded`, on its device; at random initialization if `untrained`."""
    loaded = load_model(path, tasks, c.heads, c.seed if untrained else None)
    loaded.model.to(Processes(c.device).device)
    return loaded


def layers_of(loaded):
    """All layers, first to last; of a masked autoencoder the encoder's, then the decoder's."""
    backbone = loaded.encoder or loaded.model
    return [*backbone.layers, *getattr(loaded.model, "decoder", ())]


def spread(total, n):
    """n indices spread evenly over 0 .. total - 1, because some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def open_split(loaded, c, split):
    """(image set, its split on the model's device), to be normalized as in the model's training."""
    data = load_images(c.data, loaded.meta, c.data_dir)
    return data, on_device(data, split, next(loaded.model.parameters()).device)


def open_images(c, count):
    """(image encoder of c.ckpt, up to `count` images from number c.index on in [0, 1], the same
    normalized)."""
    loaded = open_model(words(c.ckpt, "ckpt")[0], c, c.random, ("vit", "mae", "simdino"))
    data, split = open_split(loaded, c, c.split)
    if c.index >= len(split):
        raise UserError(f"--index: {data.name} has {len(split):,} {c.split} images, counted from 0")
    batch, _ = split.batch(torch.arange(c.index, min(c.index + count, len(split))))
    size = loaded.encoder.config.image_size
    pixels = augment.at_size(augment.to_float(batch), size)
    return loaded.encoder, pixels, model_input(batch, data, size)


def pass_samples(loaded, c, split):
    """Passes c.samples samples, spread over the split, through all layers; yields after each batch
    its tokens (B, n), or its images' numbers (B,).

    A sample is an image, or as many tokens of text as the context holds, none of them masked. In a
    masked autoencoder the patches to hide are a function of the image's number."""
    model, device = loaded.model, next(loaded.model.parameters()).device
    if loaded.task == "gpt":
        _, _, tokens = load_tokens(c.data, split, loaded.meta, c.data_dir)
        n = min(model.config.context, len(tokens))
        windows = tokens[:len(tokens) // n * n].reshape(-1, n)
        for index in spread(len(windows), c.samples).split(c.batch_size):
            ids = torch.from_numpy(windows[index.numpy()].astype(np.int64)).to(device)
            run_layers(model.layers, model.tokens(ids))
            yield ids
        return

    data, split = open_split(loaded, c, split)
    for index in spread(len(split), c.samples).split(c.batch_size):
        x = model_input(split.batch(index)[0], data, model.config.image_size)
        if loaded.task == "mae":
            generators = [torch.Generator().manual_seed(derive_seed("validation", i))
                          for i in index.tolist()]
            n = model.config.patches()
            noise = torch.stack([torch.rand(n, generator=g) for g in generators]).to(device)
            model(x, noise)
        else:
            loaded.encoder(x)
        yield index


# -------------------------------------------------------------------------------------------------
# layers
# -------------------------------------------------------------------------------------------------

CONVENTIONS = {
    "released": "R^c of the normalized U^* LN(Z^l)",
    "caption": "R^c(Z^(l+1/2))",
    "output": "R^c(Z^(l+1))",
}


@dataclass(kw_only=True)
class Layers(OneModel):
    """R^c, R(Z^{l+1}), the fraction of nonzeros of Z^{l+1} and the SRR measure, layer by layer,
    mean and deviation over samples; and the largest singular values of [U_1 .. U_K] and D.

    Text is not masked; images are masked as in training for a masked autoencoder, whose decoder
    layers follow the encoder's. An arch without U (transformer, aot-mhsa) has its value heads."""
    ckpt: str | None = option(None, "checkpoints of any task, separated by commas")
    split: str = option("val", "which part of the data", choices=("train", "val", "both"))
    untrained: bool = option(False, "also each checkpoint's model at random initialization")
    samples: int = option(1000, "images (as in [N]) or sequences, spread over the split", low=1)
    convention: str = option("released", "R^c of the normalized projections in the softmax, "
                             "of Z^{l+1/2}, or of Z^{l+1} as [S]", choices=tuple(CONVENTIONS))
    eps: float = option(0.1, "distortion; 0.1 is [N]'s figure", above=0)
    lambd: float = option(0.1, "weight of ||Z||_0 in the SRR measure", low=0)
    unit_bases: bool = option(False, "R^c with each layer's U (and an MHSA's value bias) times one "
                              "number that makes ||U||_F^2 = K p, as orthonormal bases have it: "
                              "R^c(Z | U) falls with the size of U alone")
    batch_size: int = option(50, "samples at once", low=1)


def srr(attention, Z, eps, lambd, scale=1.0):
    """The measure of [S] for one layer, minus the sparse rate reduction, with scale U in U's place.
    Z (B, n, d) -> (B,)."""
    return -projected_sparse_rate_reduction(Z, scale * attention.values(Z), eps, lambd)


def layer_numbers(layer, entered, half, out, c):
    """The numbers of one layer, each (B,), from LN(Z^l), Z^{l+1/2} and Z^{l+1}, all (B, n, d).

    released: as the released measurement of [N] scales U^* LN(Z^l), each token to norm 1 in each
    head. caption: as [N] Figure 3 says. SRR is [S]'s, of Z^{l+1} under every convention."""
    measured = dict(released=entered, caption=half, output=out)[c.convention]
    U, scale = layer.attention.bases(), 1.0
    if c.unit_bases:
        scale = (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()
    w = scale * layer.attention.values(measured)
    if c.convention == "released":
        w = F.normalize(w, dim=-1)
    found = dict(rate_of_subspaces=projected_coding_rate(w, c.eps),
                 rate=coding_rate(out, c.eps),
                 nonzeros=(out != 0).float().mean((-2, -1)))
    if isinstance(layer.sparsification, ODL):
        code = layer.sparsification.code(layer.norm2(half))
        found["code_nonzeros"] = (code != 0).float().mean((-2, -1))
    return found | dict(srr=srr(layer.attention, out, c.eps, c.lambd, scale))


def watch(layer, c):
    """A list to which hooks append the layer's numbers at each forward pass.

    Hooks, because a LayerTrace keeps the attention maps of all layers at once. A decoder's layer
    ([B] Eq. (7.6.3)) has Y in the place of Z^{l+1/2}, and LN(Y) enters its attention."""
    seen, found = {}, []

    def at_end(module, inputs, out):
        half = seen.get("half", out)                # attention only: Z^{l+1} = Z^{l+1/2}
        found.append(layer_numbers(layer, seen["entered"], half, out, c))

    layer.attention.register_forward_pre_hook(lambda _, inputs: seen.update(entered=inputs[0]))
    if layer.norm2 is not None:
        layer.norm2.register_forward_pre_hook(lambda _, inputs: seen.update(half=inputs[0]))
    layer.register_forward_hook(at_end)
    return found


def spectral_norms(layer):
    """The largest singular values of [U_1 .. U_K] and, where the layer has one, of D."""
    D = getattr(layer.sparsification or layer, "D", None)
    matrices = dict(norm_U=layer.attention.bases().transpose(0, 1).flatten(1), norm_D=D)
    return {name: torch.linalg.matrix_norm(W.float(), 2).item()
            for name, W in matrices.items() if W is not None}


@torch.no_grad()
def layer_table(loaded, c, split):
    """One dict a layer: mean and deviation over samples of each number; the spectral norms."""
    layers = layers_of(loaded)
    found = [watch(layer, c) for layer in layers]
    for _ in pass_samples(loaded, c, split):
        pass
    table = []
    for l, (layer, parts) in enumerate(zip(layers, found), 1):
        row = dict(layer=l)
        if loaded.task == "mae":
            row["part"] = "encoder" if l <= loaded.model.config.layers else "decoder"
        for key in parts[0]:
            values = torch.cat([part[key] for part in parts])
            row[key] = values.mean().item()
            row[f"{key}_std"] = values.std(correction=0).item()
        table.append(row | spectral_norms(layer))
    return table


def layers(c):
    """{"runs": [{"ckpt", "untrained", "split", "srr_measure", "layers"}, ...]}."""
    splits = ("train", "val") if c.split == "both" else (c.split,)
    initializations = (True,) if c.random else (False, True) if c.untrained else (False,)
    runs = []
    cases = itertools.product(words(c.ckpt, "ckpt"), initializations, splits)
    for path, untrained, split in cases:
        table = layer_table(open_model(path, c, untrained), c, split)
        encoder = [row["srr"] for row in table if row.get("part") != "decoder"]
        measure = sum(encoder) / len(encoder)
        runs.append(dict(ckpt=path, untrained=untrained, split=split, srr_measure=measure,
                         layers=table))
        convention = CONVENTIONS[c.convention]
        print(f"{path}{', untrained' * untrained}, {split}: {convention}, eps {c.eps:g}"
              + ", unit bases" * c.unit_bases)
        print_table(table)
        print(f"SRR measure, the mean of srr over layers ([S]; lower is better): {measure:.3f}")
    figure(c, *layer_panels(runs, c))
    return dict(runs=runs)


def layer_panels(runs, c):
    """R^c, R, nonzeros and SRR over the layers; bands are one deviation over samples."""
    bases = ", unit bases" * c.unit_bases
    names = {
        "rate_of_subspaces": f"{CONVENTIONS[c.convention]}{bases}, eps {c.eps:g}",
        "rate": f"R(Z^(l+1)), eps {c.eps:g}",
        "nonzeros": "nonzeros of Z^(l+1), fraction",
        "srr": f"SRR{bases}: {c.lambd:g} |Z|_0 + R^c(Z) - R(Z) of Z^(l+1)",
    }
    for key, name in names.items():
        curves = []
        for i, run in enumerate(runs):
            columns = {name: np.array([row[name] for row in run["layers"]])
                       for name in run["layers"][0]}
            x = columns["layer"]
            title = "/".join(Path(run["ckpt"]).parts[-2:]) + ", untrained" * run["untrained"]
            line = dict(color=i, marker=True, band=columns[f"{key}_std"])
            curves.append((f"{title}, {run['split']}", x, columns[key], line))
            if key == "nonzeros" and "code_nonzeros" in columns:
                dashed = dict(color=i, marker=True, dashes=True)
                curves.append(("of ODL's code", x, columns["code_nonzeros"], dashed))
        yield curves, dict(xlabel="layer l", title=name)


# -------------------------------------------------------------------------------------------------
# subspaces, tokens, saliency
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Subspaces(OneModel):
    """|[U_1 .. U_K]^* [U_1 .. U_K]| with columns of norm 1, layer by layer ([N] Figure 7).

    "within": two different columns of one subspace; "across": of two subspaces. An arch without U
    has its value heads instead."""


def coherence(U):
    """|<u, v>| of the columns of U (K, d, p), each scaled to norm 1: the matrix (K p, K p), and its
    mean and maximum within and across subspaces (None where there is no pair)."""
    K, d, p = U.shape
    columns = F.normalize(U.transpose(0, 1).reshape(d, K * p), dim=0)
    gram = (columns.mT @ columns).abs()
    owner = torch.arange(K, device=U.device).repeat_interleave(p)
    same = owner[:, None] == owner
    itself = torch.eye(K * p, dtype=torch.bool, device=U.device)

    found = {}
    for name, pairs in (("within", same & ~itself), ("across", ~same)):
        values = gram[pairs]
        found[f"{name}_mean"] = values.mean().item() if len(values) else None
        found[f"{name}_max"] = values.max().item() if len(values) else None
    return gram, found


@torch.no_grad()
def subspaces(c):
    """{"layers": coherence of each, "random": the mean of |<u, v>| for random directions}."""
    loaded = open_model(words(c.ckpt, "ckpt")[0], c, c.random)
    found = [coherence(layer.attention.bases().float()) for layer in layers_of(loaded)]
    rows = [dict(layer=l) | numbers for l, (_, numbers) in enumerate(found, 1)]
    # E |<u, v>| = Gamma(d / 2) / (Gamma((d + 1) / 2) sqrt(pi)) for random unit vectors
    d = loaded.model.config.width
    random = math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.pi ** 0.5
    print_table(rows)
    print(f"random directions in R^{d} have a mean of {random:.4f}")
    plot.heat(c.out + ".png", [gram for gram, _ in found], max(1, 256 // len(found[0][0])))
    print(f"wrote {c.out}.png")
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
    encoder, _, x = open_images(c, 1)
    rows, maps = [], []
    for l, (_, (Z,), _) in enumerate(encoder.trace(x), 1):
        share = torch.linalg.svdvals(Z).square()
        entropy = torch.special.entr(share / share.sum()).sum()
        rows.append(dict(layer=l, nonzeros=(Z != 0).float().mean().item(),
                         effective_rank=entropy.exp().item()))
        maps.append(Z.abs() / Z.abs().quantile(0.99).clamp_min(1e-12))
    print_table(rows)
    plot.heat(c.out + ".png", maps, max(1, 384 // maps[0].shape[-1]))
    print(f"wrote {c.out}.png")
    return dict(layers=rows)


@dataclass(kw_only=True)
class Saliency(OneModel):
    """What the class token attends to, in red over the image: the mean of the heads, then each head
    ([B] Eq. (7.2.41)). Of a mean-pooled model: what its patches attend to on average.

    The table has, as means over the images, the effective number of patches (exp of the map's
    entropy) and the share of the largest. With --head only that head ([B] Figure 7.11). TSSA has
    no attention map: there it is each patch's membership Pi."""
    layer: int | None = option(None, "l, counted from 1; auto is the last", low=1)
    head: int | None = option(None, "k, counted from 1; auto is all, and their mean", low=1)
    index: int = option(0, "the first image's number in the split", low=0)
    pictures: int = option(8, "how many images, one a row", low=1)


@torch.no_grad()
def saliency_maps(c):
    """{"heads": [{"head", "patches", "largest"}, ...]}."""
    encoder, pixels, x = open_images(c, c.pictures)
    K = encoder.config.heads
    for name, most in (("layer", len(encoder.layers)), ("head", K)):
        if (getattr(c, name) or 1) > most:
            raise UserError(f"--{name}={getattr(c, name)}: {c.ckpt} has {most}")

    trace = encoder.trace(x)
    maps = saliency(trace[(c.layer or 0) - 1].attention.float(), encoder.config.pool)
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    names = ["mean", *range(1, K + 1)]
    if c.head:
        maps, names = maps[:, c.head:c.head + 1], [c.head]

    share = maps / maps.sum(-1, keepdim=True)
    patches = torch.special.entr(share).sum(-1).exp().mean(0).tolist()
    largest = share.amax(-1).mean(0).tolist()
    rows = [dict(head=name, patches=n, largest=most)
            for name, n, most in zip(names, patches, largest)]
    print_table(rows)
    write_overlays(c.out + ".png", pixels, maps, max(1, 128 // pixels.shape[-1]))
    print(f"wrote {c.out}.png, a row for each image: the image, then head "
          + ", ".join(map(str, names)))
    return dict(heads=rows)


# -------------------------------------------------------------------------------------------------
# toy: does MSSA lower R^c?
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class RandomSubspaces(Output):
    """The flags of the two experiments on random subspaces."""
    width: int = option(64, "d", low=1)
    heads: int = option(8, "K", low=1)
    head_dim: int = option(8, "p", low=1)
    eps: float = option(0.5, "distortion of the rates", above=0)
    seed: int = option(0, "of all that is drawn", low=0)


@dataclass(kw_only=True)
class Toy(RandomSubspaces):
    """[S]'s experiment: iterates five updates from random tokens and follows R^c.

        mssa, negative   Z +- step beta [U_1 .. U_K] stack_k SSA(Z | U_k)       [S], [J] Eq. (36)
        shrunk           (1 - step) Z + step beta [U_1 .. U_K] stack_k SSA      [J] Eq. (34)
        neumann, exact   Z - step / beta (approximate, exact gradient of R^c)   [J] Eq. (33), (31)

    Twice: on tokens small enough for the Neumann series, beta ||U_k^* Z||^2 < 1, and on larger
    ones, where its step diverges."""
    tokens: int = option(64, "n", low=1)
    step: float = option(0.1, "step size times beta; below 2 the exact gradient step lowers R^c",
                         above=0)
    iterations: int = option(30, "how many steps", low=1)
    valid: float = option(0.5, "the largest beta ||U_k^* Z||^2 of the first tokens", above=0)
    beyond: float = option(2.0, "that of the second", above=0)


def descent(Z, U, eps, neumann):
    """Minus the gradient of R^c over beta, exact or by two terms of its Neumann series."""
    return -subspace_coding_rate_grad(Z, U, eps, neumann) / beta_of(Z, U, eps)


# name -> what a step of 1 / beta adds to Z (n, d)
UPDATES = {
    "mssa": lambda Z, U, eps: beta_of(Z, U, eps) * mssa(Z, U),
    "negative": lambda Z, U, eps: -beta_of(Z, U, eps) * mssa(Z, U),
    "shrunk": lambda Z, U, eps: beta_of(Z, U, eps) * mssa(Z, U) - Z,
    "neumann": lambda Z, U, eps: descent(Z, U, eps, neumann=True),
    "exact": lambda Z, U, eps: descent(Z, U, eps, neumann=False),
}
# The two terms of neumann. MSSA stands for the second alone: a softmax in the place of
# (U_k^* Z)^* U_k^* Z, with the sign it has there. The -Z of [J] Eq. (34) stands for the first, as
# if the subspaces filled the space.
TERMS = {
    "first term": lambda Z, U, eps: -((Z @ U) @ U.mT).sum(0),
    "second term": lambda Z, U, eps: descent(Z, U, eps, neumann=True) + ((Z @ U) @ U.mT).sum(0),
}


def random_subspaces(c, generator):
    """K random subspaces of R^d, each orthogonal to the others: bases (K, d, p), float64."""
    if c.heads * c.head_dim > c.width:
        raise UserError(f"--heads={c.heads} subspaces of --head_dim={c.head_dim} do not fit into "
                        f"--width={c.width}")
    A = torch.randn(c.width, c.heads * c.head_dim, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(A)[0].view(c.width, c.heads, c.head_dim).transpose(0, 1)


def beta_of(Z, U, eps):
    """beta = p / (n eps^2) of R^c."""
    return U.shape[-1] / (Z.shape[0] * eps ** 2)


def validity_of(Z, U, eps):
    """The largest beta ||U_k^* Z||^2 (spectral norm). The Neumann series converges below 1."""
    return (beta_of(Z, U, eps) * torch.linalg.matrix_norm(Z @ U, 2).max() ** 2).item()


def taylor_terms(Z, U, eps):
    """(a, b) of [S]'s lower bound R^c >= a - b, a = beta / 2 sum_k ||U_k^* Z||_F^2,
    b = beta^2 / 4 sum_k ||(U_k^* Z)^* U_k^* Z||_F^2."""
    w, beta = Z @ U, beta_of(Z, U, eps)
    a = beta / 2 * w.square().sum()
    b = beta ** 2 / 4 * (w.mT @ w).square().sum()
    return a.item(), b.item()


def toy_run(Z, U, c):
    """The directions at Z; R^c over the iterations of each update; the Taylor terms along mssa."""
    start = subspace_coding_rate(Z, U, c.eps)
    gradient = subspace_coding_rate_grad(Z, U, c.eps)
    directions = []
    for name, direction_of in (UPDATES | TERMS).items():
        direction = direction_of(Z, U, c.eps)
        cosine = F.cosine_similarity(direction.flatten(), gradient.flatten(), dim=0)
        after = subspace_coding_rate(Z + c.step * direction, U, c.eps)
        directions.append(dict(direction=name, cosine_with_descent=-cosine.item(),
                               slope=(direction * gradient).sum().item(),
                               change=(after - start).item()))

    rates, terms = {}, []
    for name, direction_of in UPDATES.items():
        rates[name], now = [], Z
        for _ in range(c.iterations + 1):
            rates[name].append(subspace_coding_rate(now, U, c.eps).item())
            if name == "mssa":
                terms.append(taylor_terms(now, U, c.eps))
            now = now + c.step * direction_of(now, U, c.eps)
    return dict(beta=beta_of(Z, U, c.eps), validity=validity_of(Z, U, c.eps),
                token_norm=Z.norm(dim=-1).mean().item(), directions=directions, rates=rates,
                terms=dict(zip(TERMS, map(list, zip(*terms)))))


def toy(c):
    """{"panels": [toy_run on small tokens, on large ones], "validity_behind_a_norm"}."""
    generator = torch.Generator().manual_seed(c.seed)
    U = random_subspaces(c, generator)
    Z = torch.randn(c.tokens, c.width, generator=generator, dtype=torch.float64)
    Z = F.normalize(Z, dim=-1) * c.width ** 0.5                     # as behind a LayerNorm
    behind_norm = validity_of(Z, U, c.eps)
    panels = [toy_run(Z * (target / behind_norm) ** 0.5, U, c) for target in (c.valid, c.beyond)]

    for panel in panels:
        verb = "converges" if panel["validity"] < 1 else "diverges"
        print(f"beta ||U_k^* Z||^2 = {panel['validity']:.3g}: the Neumann series {verb}; tokens of "
              f"norm {panel['token_norm']:.3g}. Slope of R^c along each direction, and its change "
              f"by a step of {c.step:g}:")
        print_table(panel["directions"])
        print("R^c over the iterations, and its two Taylor terms along the path of mssa:")
        curves = panel["rates"] | panel["terms"]
        print_table([dict(iteration=i) | {name: curve[i] for name, curve in curves.items()}
                     for i in range(0, c.iterations + 1, max(1, c.iterations // 10))])
    print(f"the same tokens behind a LayerNorm, of norm {c.width ** 0.5:.3g}, have "
          f"beta ||U_k^* Z||^2 = {behind_norm:.3g}")
    figure(c, *toy_panels(*panels))
    return dict(panels=panels, validity_behind_a_norm=behind_norm)


def toy_panels(small, large):
    """R^c over the iterations on small and on large tokens, and the Taylor terms on the small."""
    steps = range(len(small["rates"]["mssa"]))
    for panel in (small, large):
        title = f"R^c(Z | U); beta |U_k^* Z|^2 = {panel['validity']:.3g} at the start"
        yield ([(name, steps, curve) for name, curve in panel["rates"].items()],
               dict(title=title, ylim=(0, 1.2 * max(panel["rates"]["mssa"])),
                    xlabel="iteration"))
    curves = {"R^c": small["rates"]["mssa"]} | small["terms"]
    curves["first - second"] = np.subtract(*small["terms"].values())
    yield ([(name, steps, curve) for name, curve in curves.items()],
           dict(xlabel="iteration of the MSSA update", title="nats"))


# -------------------------------------------------------------------------------------------------
# denoise: a Gaussian mixture on subspaces
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Denoise(RandomSubspaces):
    """Tokens U_s alpha, alpha ~ N(0, I), s uniform ([J] Eq. (10)), with noise of deviation sigma,
    denoised four ways.

        closed       the approximation of [J] Eq. (47)
        posterior    E[clean | noisy], the least mean squared error possible ([N] Section A.1)
        sde          the reverse diffusion of [J] Eq. (49) in small steps: a sample of the
                     posterior, so twice its error
        flow         the same score in small steps without noise

    "error": mean squared distance to the clean token; "off": to the nearest subspace. Then [J]
    Figure 5: R - R^c and the nonzeros of clean tokens on oblique subspaces, on orthogonal ones,
    and on the coordinate axes."""
    tokens: int = option(500, "n", low=1)
    sigmas: str = option("0.05,0.1,0.2,0.5,1", "noise levels")
    steps: int = option(100, "of sde and flow", low=1)


def posterior_mean(z, U, sigma):
    """E[z_clean | z] of z = U_s alpha + noise ([N] Section A.1): (..., d) -> (..., d).

    With c = 1 / (1 + sigma^2), it is c sum_k softmax_k(c ||U_k^* z||^2 / 2 sigma^2) U_k U_k^* z:
    [J] Eq. (47) but for c."""
    c = 1 / (1 + sigma ** 2)
    return c * gaussian_mixture_denoise(z, U, sigma / c ** 0.5)


def reverse_diffusion(z, U, sigma, steps, generator=None):
    """[J] Eq. (49) from t = sigma^2 to 0, in steps of equal sqrt(t); without a generator its flow,
    dz = score / 2 dt.

    The noise of a step to t' is scaled by sqrt(t' / t): what is left across a subspace, and none in
    the last step."""
    levels = [sigma * (1 - i / steps) for i in range(steps + 1)]
    for s, below in zip(levels, levels[1:]):
        score = (posterior_mean(z, U, s) - z) / s ** 2              # Tweedie, [J] Eq. (46)
        if generator is None:
            z = z + s * (s - below) * score
        else:
            dt = s ** 2 - below ** 2
            noise = torch.randn(z.shape, generator=generator, dtype=z.dtype)
            z = z + dt * score + dt ** 0.5 * below / s * noise
    return z


def mixture(U, n, generator):
    """n clean tokens of [J] Eq. (10) on the subspaces U (K, d, p): (n, d)."""
    K, d, p = U.shape
    alpha = torch.randn(n, p, 1, generator=generator, dtype=U.dtype)
    s = torch.randint(K, (n,), generator=generator)
    return (U[s] @ alpha)[..., 0]


def denoise(c):
    """{"levels": a dict for each sigma and method, "sets": one for each kind of subspaces}."""
    try:
        sigmas = [float(word) for word in words(c.sigmas, "sigmas")]
    except ValueError:
        sigmas = [math.nan]
    if not all(0 < sigma < math.inf for sigma in sigmas):
        raise UserError(f"--sigmas={c.sigmas}: expected numbers above 0, separated by commas")
    generator = torch.Generator().manual_seed(c.seed)
    U = random_subspaces(c, generator)
    clean = mixture(U, c.tokens, generator)
    noise = torch.randn(clean.shape, generator=generator, dtype=clean.dtype)

    levels = []
    for sigma in sigmas:
        z = clean + sigma * noise
        estimates = dict(noisy=z,
                         closed=gaussian_mixture_denoise(z, U, sigma),
                         posterior=posterior_mean(z, U, sigma),
                         sde=reverse_diffusion(z, U, sigma, c.steps, generator),
                         flow=reverse_diffusion(z, U, sigma, c.steps))
        for method, estimate in estimates.items():
            error = (estimate - clean).square().sum(-1).mean().item()
            projected = (estimate[:, None, None] @ U).square().sum((-2, -1)).amax(-1)
            off = (estimate.square().sum(-1) - projected).clamp_min(0).mean().item()
            levels.append(dict(sigma=sigma, method=method, error=error, off=off))

    oblique = torch.linalg.qr(torch.randn(U.shape, generator=generator, dtype=U.dtype))[0]
    axes = torch.eye(c.width, dtype=U.dtype)[:, :c.heads * c.head_dim]
    axes = axes.view(c.width, c.heads, c.head_dim).transpose(0, 1)
    sets = []
    for name, V in dict(oblique=oblique, orthogonal=U, axes=axes).items():
        z = mixture(V, c.tokens, torch.Generator().manual_seed(c.seed))
        gain = coding_rate(z, c.eps) - subspace_coding_rate(z, V, c.eps)
        nonzeros = (z.abs() > 1e-9).double().mean()
        sets.append(dict(subspaces=name, gain=gain.item(), nonzeros=nonzeros.item()))

    print_table(levels)
    print("R - R^c of clean tokens, and their nonzeros, on three sets of subspaces ([J] Figure 5):")
    print_table(sets)
    figure(c, *denoise_panels(levels))
    return dict(levels=levels, sets=sets)


def denoise_panels(levels):
    """Error and distance to the subspaces over sigma; and in the plane, where Eq. (47) takes noisy
    tokens of two lines ([J] Figure 9)."""
    for key, target in (("error", "clean token"), ("off", "nearest subspace")):
        curves = []
        for method in dict.fromkeys(row["method"] for row in levels):
            rows = [row for row in levels if row["method"] == method]
            curves.append((method, [row["sigma"] for row in rows],
                           [max(row[key], 1e-8) for row in rows], dict(marker=True)))
        yield curves, dict(log=True, xlabel="sigma", title=f"squared distance to the {target}")

    generator = torch.Generator().manual_seed(0)
    U = torch.tensor([[[1.0], [0.0]], [[0.5], [3 ** 0.5 / 2]]])
    z = mixture(U, 80, generator)
    z = z + 0.2 * torch.randn(z.shape, generator=generator)
    back = gaussian_mixture_denoise(z, U, 0.2)
    moves = [(None, *pair.T, dict(color="0.85")) for pair in torch.stack([z, back], 1)]
    curves = [*moves, ("noisy, sigma 0.2", *z.T, dict(color="0.5", line=False)),
              ("[J] Eq. (47)", *back.T, dict(color=1, line=False))]
    yield curves, dict(equal=True, xlabel="z_1", title="z_2")


# -------------------------------------------------------------------------------------------------
# neurons: can they be read?
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Neurons(OneModel):
    """What single neurons of the last layer tell: of ISTA's Z^{l+1}, ODL's a_2, an MLP's hidden
    layer. Means and standard errors over the checkpoints of an arch.

    k-sparse probes (Gurnee et al., Finding Neurons in a Haystack, 2023): a logistic regression on
    the k neurons whose means differ most with a property, in deviations, fitted on half of the
    windows or images, as many rows with it as without; the accuracy on the other half (chance: 50
    %), mean over the properties. Purity: how much of a neuron's 20 highest activations is one
    character or class; mean over 100 neurons that fire at least 20 times. Each model offers as many
    neurons as the narrowest model is wide. "kept" is a code without its smallest values: as small a
    share is left as in the first checkpoint's.

    The head reads ISTA's code itself, but of ODL and MLP a branch's inner layer is taken: so
    compare with --untrained too."""
    ckpt: str | None = option(None, "checkpoints of text or of images, separated by commas")
    untrained: bool = option(False, "also each checkpoint's model at random initialization")
    samples: int = option(2000, "images, or windows of text, spread over the split", low=1)
    batch_size: int = option(50, "samples at once", low=1)


def text_properties(pieces):
    """{property: bool (n,)} of the tokens of one window. Letters count from a word's first (with
    GPT-2's tokens, its pieces); "quoted" is behind an odd number of quotation marks."""
    quoted, letter, rows = False, 0, []
    for piece in pieces:
        mark = piece.strip()
        quoted ^= piece.count('"') % 2 == 1
        letter = (0 if piece[:1].isspace() else letter) + 1 if mark.isalpha() else 0
        rows.append((mark.isdigit(), mark[:1].isupper(), quoted, letter == 1, letter == 2,
                     letter > 4, not mark, bool(mark) and not mark.isalnum()))
    names = ("digit", "capital", "quoted", "first letter", "second letter", "fifth letter or later",
             "space", "punctuation")
    return dict(zip(names, np.array(rows).T))


class Codes(NamedTuple):
    """What neurons are read from: a row is a token or, as the head reads it, an image."""
    values: torch.Tensor                # (N, m)
    nonzeros: float                     # before an image's patches are averaged
    properties: dict                    # name -> bool (N,); of an image class and strongest channel
    kinds: np.ndarray                   # (N,): token or class
    group: np.ndarray                   # (N,): which window or image


@torch.no_grad()
def last_codes(loaded, c):
    """The Codes of the last layer."""
    found, layer = [], (loaded.encoder or loaded.model).layers[-1].sparsification
    if layer is None:
        raise UserError(f"arch {loaded.model.config.arch} has no sparsification to look into")
    hook = layer.register_forward_pre_hook(lambda _, inputs: found.append(layer.code(inputs[0])))
    given = torch.cat(list(pass_samples(loaded, c, c.split))).cpu().numpy()
    hook.remove()
    values = torch.cat(found).float().cpu()                         # (samples, tokens, m)
    nonzeros, group = (values != 0).float().mean().item(), np.arange(len(given))
    if loaded.task == "gpt":
        decode = load_tokens(c.data, c.split, loaded.meta, c.data_dir)[0].tokenizer.decode
        rows = [text_properties([decode([i]) for i in window]) for window in given]
        properties = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        return Codes(values.flatten(0, 1), nonzeros, properties, given.flatten(),
                     group.repeat(given.shape[1]))
    data = load_images(c.data, loaded.meta, c.data_dir)
    labels = getattr(data, f"{c.split}_labels")[given]
    channel = getattr(data, f"{c.split}_images")[given].mean((1, 2)).argmax(1)
    properties = {f"class {i}": labels == i for i in np.unique(labels)}
    properties |= {name: channel == i for i, name in enumerate(("red", "green", "blue"))}
    values = values[:, 0] if pooling(loaded) == "class" else values[:, 1:].mean(1)
    return Codes(values, nonzeros, properties, labels, group)


def sparse_probe(codes, has, group, k, seed):
    """Accuracy of a k-sparse probe for the property has (N,), or None where it is too rare. Whole
    windows or images, group (N,), are for fitting or for testing."""
    rng, halves = np.random.default_rng(seed), []
    side = rng.permutation(group.max() + 1)[group] % 2
    for half in (0, 1):
        rows = [rng.permutation(np.flatnonzero((side == half) & (has == value)))
                for value in (False, True)]
        n = min(1000, *map(len, rows))
        if n < 10:
            return None
        halves.append((codes[np.concatenate([row[:n] for row in rows])], torch.arange(2 * n) // n))
    (x, y), (x_test, y_test) = halves
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x, x_test = (x - mean) / std, (x_test - mean) / std
    best = (x[y == 1].mean(0) - x[y == 0].mean(0)).abs().topk(min(k, x.shape[1])).indices
    W, b = logistic_regression(x[:, best], y, 2, 1e-4)
    return ((x_test[:, best] @ W + b).argmax(1) == y_test).float().mean().item()


def neuron_numbers(codes, width, seed):
    """The numbers of one row of the table, of `width` of the code's neurons."""
    generator = torch.Generator().manual_seed(seed)
    values = codes.values[:, torch.randperm(codes.values.shape[1], generator=generator)[:width]]
    found = dict(neurons=codes.values.shape[1], nonzeros=codes.nonzeros)
    for k in (1, 5, 20):
        scores = [sparse_probe(values, has, codes.group, k, seed)
                  for has in codes.properties.values()]
        scores = [score for score in scores if score is not None]
        found[f"k={k}"] = float(np.mean(scores)) if scores else None
    alive = ((values != 0).sum(0) >= 20).nonzero()[:100, 0]
    top = codes.kinds[values[:, alive].topk(min(20, len(values)), 0).indices.numpy()].T
    shares = [np.unique(kinds, return_counts=True)[1].max() / len(kinds) for kinds in top]
    found["purity"] = float(np.mean(shares)) if shares else None
    return found


def neurons(c):
    """{"rows": [{"code", "runs", "neurons", "nonzeros", "k=1", "k=5", "k=20", "purity"}, ...]}."""
    opened = [(path, load_model(path, heads=c.heads).model.config)
              for path in words(c.ckpt, "ckpt")]
    width, share, runs = min(config.width for _, config in opened), None, {}
    for path, config in opened:
        for untrained in (True,) if c.random else (False, True)[:1 + c.untrained]:
            row = runs.setdefault(config.arch + ", untrained" * untrained, [])
            seed = c.seed + len(row)
            codes = last_codes(open_model(path, replace(c, seed=seed), untrained), c)
            row.append(neuron_numbers(codes, width, seed))
            share = share or codes.nonzeros
            if codes.nonzeros > share + 0.05:
                size = codes.values.abs()
                least = size.kthvalue(round((1 - share) * size.shape[1]), 1, True).values
                kept = codes._replace(values=codes.values.where(size > least, 0), nonzeros=share)
                row = runs.setdefault(f"{config.arch}{', untrained' * untrained}, kept", [])
                row.append(neuron_numbers(kept, width, seed))
    rows = [dict(code=name, runs=len(found)) | averages(found) for name, found in runs.items()]
    print_table(rows)
    return dict(rows=rows)


def averages(runs):
    """{key: mean, key_error: standard error} of the numbers of several runs; None is left out."""
    found = {}
    for key in runs[0]:
        values = [run[key] for run in runs if run[key] is not None]
        found[key] = float(np.mean(values)) if values else None
        if len(values) > 1:
            found[key + "_error"] = float(np.std(values, ddof=1) / len(values) ** 0.5)
    return found


# -------------------------------------------------------------------------------------------------
# recall: what does one matrix for query, key and value cost?
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Recall(Output):
    """In-context recall: small causal models read pairs of a random key and a random value, then
    each key again in another order, and say its value. Easier than the task of Zoology (Arora et
    al., 2023): nothing lies between, and values may repeat.

    The archs have equal width; aot is aot-mhsa with one matrix as query, key and value, and --tie
    makes two of aot-mhsa's three one. "steps" is the mean, over the seeds that got there, of the
    steps until 95 % of the values are right, looked at every 50 steps; "accuracy" the last of each
    seed's. Behind +- stands the standard error."""
    archs: str = option("transformer,aot-mhsa,aot,crate,crate-alpha,tost", "which, by commas")
    tie: str | None = option(None, "query and key, or key and value, of archs with three matrices",
                             choices=("qk", "kv"))
    layers: int = option(2, "of each model", low=1)
    width: int = option(64, "d", low=1)
    heads: int = option(4, "K", low=1)
    pairs: int = option(4, "of a sequence", low=1)
    symbols: int = option(8, "keys, and as many values, to draw from", low=1)
    seeds: int = option(5, "runs of each arch", low=1)
    steps: int = option(2000, "at most, of each run", low=1)
    batch_size: int = option(128, "sequences of a step", low=1)
    lr: float = option(3e-3, "Muon's constant rate, after 50 steps of warm-up", above=0)


class Tied(nn.Module):
    """QKV (3 K p, d) with the key's rows in the place of the query's or of the value's."""

    def __init__(self, tie):
        super().__init__()
        self.tie = tie

    def forward(self, QKV):
        Q, key, V = QKV.chunk(3)
        return torch.cat([key, key, V] if self.tie == "qk" else [Q, key, key])


def recall_model(c, arch):
    """An untrained model. Raises ConfigError, or UserError where there is nothing to tie."""
    model = LanguageModel(text_config(None, arch=arch, layers=c.layers, width=c.width,
                                      heads=c.heads, context=4 * c.pairs - 1,
                                      vocab_size=2 * c.symbols))
    if c.tie:
        if not isinstance(model.layers[0].attention, MHSA):
            raise UserError(f"--tie: {arch} has one matrix as query, key and value")
        for layer in model.layers:
            parametrize.register_parametrization(layer.attention.QKV, "weight", Tied(c.tie))
    return model


def recall_sequences(c, n, *purpose):
    """(ids (n, 4 pairs - 1), targets alike, -1 but where a key is asked for its value)."""
    generator = torch.Generator().manual_seed(derive_seed("recall", *purpose))
    keys = torch.rand(n, c.symbols, generator=generator).argsort(1)[:, :c.pairs]
    values = torch.randint(c.symbols, 2 * c.symbols, (n, c.pairs), generator=generator)
    shown = torch.stack([keys, values], 2)                          # (n, pairs, 2)
    order = torch.rand(n, c.pairs, generator=generator).argsort(1)
    asked = shown.gather(1, order[..., None].expand(-1, -1, 2))
    ids = torch.cat([shown, asked], 1).flatten(1)
    targets = torch.full_like(ids, -1)
    targets[:, 2 * c.pairs::2] = asked[..., 1]
    return ids[:, :-1], targets[:, :-1]


def recall_run(c, arch, seed):
    """Trains one model: dict(steps until 95 % or None, the last accuracy)."""
    torch.manual_seed(derive_seed(seed, "weights"))
    model = recall_model(c, arch)
    optimizer = make_optimizer(model, "muon", c.lr, 0.0, (0.9, 0.99))
    held_out, answers = recall_sequences(c, 1000, seed, "held out")
    for step in range(1, c.steps + 1):
        model(*recall_sequences(c, c.batch_size, seed, step)).backward()
        set_lr(optimizer, c.lr * min(1, step / 50))
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == c.steps:
            with torch.no_grad():
                right = (model(held_out).argmax(-1) == answers)[answers >= 0]
            accuracy = right.float().mean().item()
            if accuracy >= 0.95:
                return dict(steps=step, accuracy=accuracy)
    return dict(steps=None, accuracy=accuracy)


def recall(c):
    """{"archs": [{"arch", "parameters", "learnt", "steps", "accuracy"}, ...]}."""
    if c.symbols < c.pairs:
        raise UserError(f"--pairs={c.pairs} different keys need as many --symbols, not {c.symbols}")
    shared = c.layers * c.width ** 2 if c.tie else 0            # rows of QKV that are not read
    counts = {arch: recall_model(c, arch).count() - shared for arch in words(c.archs, "archs")}
    rows = []
    for arch, count in counts.items():
        runs = [recall_run(c, arch, seed) for seed in range(c.seeds)]
        learnt = sum(run["steps"] is not None for run in runs)
        rows.append(dict(arch=arch, parameters=count, learnt=f"{learnt}/{c.seeds}")
                    | averages(runs))
        print(f"{arch}: {rows[-1]['learnt']}", file=sys.stderr, flush=True)
    print_table(rows)
    return dict(archs=rows)


# -------------------------------------------------------------------------------------------------
# curves
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Curves(Output):
    """A value of metrics.jsonl over the steps, of several runs ([B] Figures 7.13, 7.18)."""
    runs: str | None = option(None, "folders of runs, separated by commas")
    value: str = option("loss", "loss, acc, ppl, ... whatever the runs have written")


def read_curve(path, value):
    """{"train": [[step, value], ...], "val": ...} of a run's folder or metrics.jsonl."""
    file = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    try:
        content = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"cannot read {file}: {reason}") from None

    curve, known = dict(train=[], val=[]), set()
    for line in content.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # torn by a kill
            line = json.loads(line)
            step, split = line["step"], line["split"]
            numbers = {key: v for key, v in line.items() if isinstance(v, (int, float))}
            known |= numbers.keys() - {"step"}
            if value in numbers:
                curve[split].append([step, numbers[value]])
    if not curve["train"] and not curve["val"]:
        raise UserError(f"{file} has no {value}; it has {', '.join(sorted(known)) or 'no numbers'}")
    return curve


def curves(c):
    """{"runs": [{"run", "train", "val"}, ...]}; the table has the last values and the best of the
    validation (the smallest loss or ppl, the largest of anything else)."""
    best_of = min if c.value in ("loss", "ppl") else max
    runs = [dict(run=path) | read_curve(path, c.value) for path in words(c.runs, "runs")]
    rows = []
    for run in runs:
        step, best = best_of(run["val"], key=lambda point: point[1], default=(None, None))
        train, val = (run[split][-1] if run[split] else (0, None) for split in ("train", "val"))
        rows.append(dict(run=run["run"], steps=max(train[0], val[0]), train=train[1], val=val[1],
                         best_val=best, at_step=step))
    print_table(rows)
    panels = []
    for split, name in (("train", "training"), ("val", "validation")):
        curves = [(Path(run["run"]).name, [step for step, _ in run[split]],
                   [value for _, value in run[split]]) for run in runs]
        if any(run[split] for run in runs):
            panels.append((curves, dict(xlabel="step", title=f"{name} {c.value}")))
    figure(c, *panels)
    return dict(runs=runs)


# -------------------------------------------------------------------------------------------------
# correlation: complexity measures
#
# [G]: Jiang et al., Fantastic Generalization Measures and Where to Find Them (ICLR 2020), Section 2
# and Appendix C. Larger should mean a larger generalization gap.
# -------------------------------------------------------------------------------------------------

class Quantities(NamedTuple):
    """What the measures are functions of. W_1 .. W_d are the matrices of the trained network,
    V_1 .. V_d their initial values; tensors are (d,), float64."""
    s: torch.Tensor                     # ||W_i||_2^2, spectral norm
    f: torch.Tensor                     # ||W_i||_F^2
    moved_s: torch.Tensor               # ||W_i - V_i||_2^2
    moved_f: torch.Tensor               # ||W_i - V_i||_F^2
    margin: float                       # NaN if not positive: measures with a margin are undefined
    sigma: float                        # noise on the weights that costs 0.1 of the accuracy
    m: int                              # training images
    params: int
    path_norm: float
    srr: float


def log_product(norms, margin=1.0):
    """log(prod_i norm_i / margin^2)."""
    return norms.log().sum() - 2 * math.log(margin)


def log_sum(norms, margin=1.0):
    """log(d (prod_i norm_i / margin^2)^(1/d))."""
    return math.log(len(norms)) + log_product(norms, margin) / len(norms)


def pac_bayes(square, q):
    """sqrt((square / (4 sigma^2) + log(m / sigma) + 10) / m), for the square of a norm."""
    return math.sqrt((square / (4 * q.sigma ** 2) + math.log(q.m / q.sigma) + 10) / q.m)


# Products, and what contains them, as logarithms: ranks stay the same
MEASURES = {
    "# params": lambda q: q.params,
    "SRR": lambda q: q.srr,
    "path-norm": lambda q: q.path_norm,
    "1/margin": lambda q: q.margin ** -2,
    "l2-norm": lambda q: q.f.sum().sqrt(),
    "l2-norm-init": lambda q: q.moved_f.sum().sqrt(),
    "param-norm": lambda q: q.f.sum(),
    "fro-distance": lambda q: q.moved_f.sum(),
    "spec-distance": lambda q: q.moved_s.sum(),
    "fro/spec": lambda q: (q.f / q.s).sum(),
    "prod-of-spec": lambda q: log_product(q.s),
    "prod-of-spec/margin": lambda q: log_product(q.s, q.margin),
    "prod-of-fro": lambda q: log_product(q.f),
    "prod-of-fro/margin": lambda q: log_product(q.f, q.margin),
    "sum-of-spec": lambda q: log_sum(q.s),
    "sum-of-spec/margin": lambda q: log_sum(q.s, q.margin),
    "sum-of-fro": lambda q: log_sum(q.f),
    "sum-of-fro/margin": lambda q: log_sum(q.f, q.margin),
    "spec-init-main": lambda q: log_product(q.s, q.margin) + (q.moved_f / q.s).sum().log(),
    "spec-orig-main": lambda q: log_product(q.s, q.margin) + (q.f / q.s).sum().log(),
    "pac-bayes-init": lambda q: pac_bayes(q.moved_f.sum(), q),
    "pac-bayes-orig": lambda q: pac_bayes(q.f.sum(), q),
    "1/sigma pac-bayes-flatness": lambda q: q.sigma ** -2,
}


def matrices(model):
    """W_1 .. W_d: every matrix of the model, in float64 on the CPU."""
    return [p.detach().cpu().double() for p in model.parameters() if p.ndim == 2]


def norms(W, V):
    """The fields s, f, moved_s and moved_f of Quantities, from the matrices themselves."""
    def squares(matrices, order):
        return torch.stack([torch.linalg.matrix_norm(w, order) for w in matrices]).square()
    change = [w - v for w, v in zip(W, V, strict=True)]
    return squares(W, 2), squares(W, "fro"), squares(change, 2), squares(change, "fro")


def margin_of(logits, y):
    """The 10th percentile of f(x)_y - max_{j != y} f(x)_j: logits (m, classes), y (m,)."""
    right = logits.gather(1, y[:, None])
    wrong = logits.scatter(1, y[:, None], -math.inf).amax(1, keepdim=True)
    return (right - wrong)[:, 0].kthvalue(math.ceil(len(y) / 10)).values.item()


@torch.no_grad()
def path_norm(model, shape):
    """The sum of the outputs of the network with squared parameters on an input of ones (C, H, W).

    In a ReLU network without normalization that is the sum over paths of squared products. Here it
    is taken to the letter: LayerNorms stay."""
    squared = {name: p.detach().square() for name, p in model.named_parameters()}
    ones = torch.ones(1, *shape, device=next(model.parameters()).device)
    return torch.func.functional_call(model, squared, ones).sum().item()


def largest_sigma(accuracy, drop=0.1, low=1e-5, high=10.0, rounds=12):
    """The largest sigma with accuracy(sigma) >= accuracy(0) - drop, by bisection of log sigma."""
    goal = accuracy(0.0) - drop
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        if accuracy(middle) >= goal:
            low = middle
        else:
            high = middle
    return low


@torch.no_grad()
def noisy_accuracy(model, x, y, sigma, draws, batch_size):
    """Mean accuracy with noise N(0, sigma^2) on every matrix.

    The draws have the same directions for each sigma, so that bisection can work."""
    right = 0
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        noisy = {name: p + sigma * torch.randn(p.shape, generator=generator).to(p)
                 for name, p in model.named_parameters() if p.ndim == 2}
        for images, labels in zip(x.split(batch_size), y.split(batch_size)):
            logits = torch.func.functional_call(model, noisy, images)
            right += (logits.argmax(1) == labels).sum().item()
    return right / (draws * len(y))


@torch.no_grad()
def measure_outputs(model, x, y, c):
    """(margin, SRR measure of [S]: the mean over layers and images)."""
    logits, total = [], 0.0
    for part in x.split(c.batch_size):
        logits.append(model(part))
        for layer, traced in zip(model.encoder.layers, model.encoder.trace(part), strict=True):
            total += srr(layer.attention, traced.out, c.eps, c.lambd).sum().item()
    return margin_of(torch.cat(logits), y), total / (len(x) * len(model.encoder.layers))


# -------------------------------------------------------------------------------------------------
# correlation: Kendall's tau
# -------------------------------------------------------------------------------------------------

def tau_b(x, y, counts):
    """Kendall's tau-b of x, y (n,) where run i occurs counts[b, i] times, counts (B, n): (B,).

        sum_{i<j} sign(x_i - x_j) sign(y_i - y_j) / sqrt(pairs that differ in x * in y)

    A run and its copies are no pair. 0 where all runs tie in x or y, NaN where there is no pair.
    [S] writes tau-a, with all pairs in the denominator, but its Table 1 holds tau-b (# params:
    -0.572, where three of four pairs tie)."""
    sx, sy = np.sign(x[:, None] - x), np.sign(y[:, None] - y)
    pairs, both, in_x, in_y = (((counts @ signs) * counts).sum(1)
                               for signs in (1.0 - np.eye(len(x)), sx * sy, abs(sx), abs(sy)))
    zeros = np.zeros(len(counts))
    tau = np.divide(both, np.sqrt(in_x * in_y), out=zeros, where=in_x * in_y > 0)
    return np.where(pairs > 0, tau, np.nan)


def nanmean(parts, n):
    """The mean over parts of (n,) arrays, without NaN; NaN where nothing is left."""
    parts = np.array(parts).reshape(-1, n)
    there = (~np.isnan(parts)).sum(0)
    return np.divide(np.nansum(parts, 0), there, out=np.full(n, np.nan), where=there > 0)


def granulated_tau(x, y, groups, counts):
    """psi_i of [G] Section 2.2.2: the mean of tau over groups of runs (lists of indices) that
    differ in one hyperparameter only."""
    return nanmean([tau_b(x[g], y[g], counts[:, g]) for g in groups], len(counts))


def grouped(thetas, axis, axes):
    """Lists of indices of the runs that agree in the seed and in every axis but `axis`."""
    groups = {}
    for i, theta in enumerate(thetas):
        others = [theta.get(name) for name in ("seed", *axes) if name != axis]
        groups.setdefault(repr(others), []).append(i)
    return [g for g in groups.values() if len({repr(thetas[i].get(axis)) for i in g}) > 1]


def correlations(rows, axes, draws=2000, seed=0):
    """{measure: {axis or "overall" or "psi": [tau, low, high], "n": runs, "inconclusive": bool}} of
    rows dict(theta, gap, measures).

    An axis is missing where no two runs differ in it alone (name axes that vary together, as width
    and heads, once). psi is the mean of psi_i over axes. low and high are the 2.5 and 97.5
    percentiles over bootstrap samples of the runs; a measure is inconclusive if 0 lies between
    those of its overall tau. Runs in which a measure is not finite are left out for it."""
    table = {}
    for name in rows[0]["measures"]:
        kept = [row for row in rows if math.isfinite(row["measures"][name])]
        n = len(kept)
        if n < 3:
            table[name] = dict(n=n, inconclusive=True)
            continue
        x = np.array([row["measures"][name] for row in kept])
        y = np.array([row["gap"] for row in kept])
        thetas = [row["theta"] for row in kept]
        samples = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), draws)
        counts = np.concatenate([np.ones((1, n)), samples])         # the runs themselves come first

        taus = {axis: granulated_tau(x, y, grouped(thetas, axis, axes), counts) for axis in axes}
        psi = nanmean(list(taus.values()), len(counts))
        taus |= dict(overall=tau_b(x, y, counts), psi=psi)
        table[name] = {key: [float(tau[0]), *np.nanpercentile(tau[1:], (2.5, 97.5)).tolist()]
                       for key, tau in taus.items() if not np.isnan(tau[0])}
        low, high = table[name]["overall"][1:]
        table[name] |= dict(n=n, inconclusive=low <= 0 <= high)
    return table


# -------------------------------------------------------------------------------------------------
# correlation: the runs
# -------------------------------------------------------------------------------------------------

# Flags of a run that are no hyperparameters
BOOKKEEPING = {"task", "preset", *RunFlags.__dataclass_fields__}


@dataclass(kw_only=True)
class Correlation(DeviceFlags, Output):
    """Kendall's tau between complexity measures and the generalization gap over a folder of
    train_vit.py runs ([S] Table 1).

    The gap is the validation loss less the training loss of ckpt.pt: cross-entropies of whole
    splits, without augmentation and smoothing. Measures compare only among runs that fit the
    training set equally well: those further than the tolerance from train_loss are left out."""
    runs: str | None = option(None, "the folder that holds the runs' folders")
    axes: str | None = option(None, "hyperparameters, as in lr,arch; auto: all that differ")
    train_loss: float | None = option(None, "that all should have reached; auto: the median", low=0)
    tolerance: float = option(0.05, "how far from it a run may be", low=0)
    samples: int = option(1000, "training images for SRR, margin and flatness", low=1)
    eps: float = option(0.5, "distortion in the SRR measure; [S] does not give its own", above=0)
    lambd: float = option(0.1, "weight of ||Z||_0 in the SRR measure; likewise", low=0)
    draws: int = option(5, "of the noise on the weights (flatness)", low=1)
    bootstrap: int = option(2000, "resamplings of the runs", low=1)
    batch_size: int = option(250, "images at once", low=1)
    dtype: str = option("float32", "of autocast", choices=("float32", "bfloat16"))


def examine(folder, c, processes):
    """One run: dict(run, theta, gap, measures, train_loss, train_acc, val_loss, val_acc)."""
    path = folder / "ckpt.pt"
    content = read_checkpoint(path, "vit")
    initial = initial_model(content)
    model = load_model(path).model.to(processes.device)
    meta, theta = content["data_meta"], content["run_config"]
    data = load_images(meta["name"], meta, c.data_dir)
    n = theta.get("train_images")                                   # None: all
    train = images.Images(data.train_images[:n], data.train_labels[:n], processes.device)
    val = on_device(data, "val", processes.device)
    on_train = classify(model, train, data, c, processes, c.batch_size)
    on_val = classify(model, val, data, c, processes, c.batch_size)

    batch, y = train.batch(spread(len(train), c.samples))
    x = model_input(batch, data, model.config.image_size)
    margin, srr_measure = measure_outputs(model, x, y, c)
    sigma = largest_sigma(lambda s: noisy_accuracy(model, x, y, s, c.draws, c.batch_size))
    q = Quantities(*norms(matrices(model), matrices(initial)),
                   margin=margin if margin > 0 else math.nan, sigma=sigma, m=len(train),
                   params=count(model), path_norm=path_norm(model, x.shape[1:]),
                   srr=srr_measure)
    return dict(run=folder.name, theta=theta, gap=on_val["loss"] - on_train["loss"],
                measures={name: float(measure(q)) for name, measure in MEASURES.items()},
                train_loss=on_train["loss"], train_acc=on_train["acc"],
                val_loss=on_val["loss"], val_acc=on_val["acc"])


def examine_all(c):
    """(rows of the runs that count, axes, {run left out: reason})."""
    folder = Path(needed(c.runs, "runs"))
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    folders = sorted(path.parent for path in folder.glob("*/config.json"))
    finished = [run for run in folders if (run / "metrics.jsonl").exists()
                and b'"event": "done"' in (run / "metrics.jsonl").read_bytes()]
    if len(finished) < 3:
        raise UserError(f"{len(finished)} finished runs in {folder}, 3 are needed "
                        "(--runs names the folder that holds the runs' folders)")
    flags = {name for run in folders for name in json.loads((run / "config.json").read_text())}
    axes = words(c.axes, "axes") if c.axes else []
    for axis in axes:
        if axis not in flags:
            raise UserError(f"--axes: {not_one_of(axis, sorted(flags))}")

    rows, left_out = [], {run.name: "not finished" for run in folders if run not in finished}
    for run in finished:
        print(f"{run.name} ...", file=sys.stderr, end=" ", flush=True)
        try:
            rows.append(examine(run, c, Processes(c.device)))
            said = "training loss {train_loss:.4f}, gap {gap:.4f}".format(**rows[-1])
        except UserError as error:
            left_out[run.name] = str(error)
            said = "left out"
        print(said, file=sys.stderr, flush=True)

    goal = c.train_loss
    if goal is None:
        goal = float(np.median([row["train_loss"] for row in rows] or [0]))
    for row in rows:
        if abs(row["train_loss"] - goal) > c.tolerance:
            left_out[row["run"]] = f"training loss {row['train_loss']:.4f}"
    rows = [row for row in rows if row["run"] not in left_out]
    if len(rows) < 3:
        raise UserError(f"{len(rows)} runs in {folder} have a training loss of {goal:.4f} "
                        f"+- {c.tolerance}, 3 are needed: see --tolerance")
    if not axes:
        axes = [name for name in rows[0]["theta"] if name not in BOOKKEEPING
                and len({repr(row["theta"].get(name)) for row in rows}) > 1]
    return rows, axes, left_out


def correlation(c):
    """{"taus", "runs", "left_out"}: tau by hyperparameter, overall and psi, with 95 % intervals."""
    rows, axes, left_out = examine_all(c)
    table = correlations(rows, axes, c.bootstrap)
    for name, reason in left_out.items():
        print(f"left out: {name}, {reason}")
    columns = list(dict.fromkeys(key for line in table.values() for key in line))
    columns = [key for key in columns if key not in ("n", "inconclusive")]
    print(f"{'measure':27}" + "".join(f"{key:>24}" for key in columns) + "   runs")
    for name, line in sorted(table.items(), key=lambda item: -item[1].get("overall", [-2])[0]):
        cells = ("{:6.3f} [{:5.2f}, {:5.2f}]".format(*line[key]) if key in line else "undefined"
                 for key in columns)
        print(f"{name:27}" + "".join(f"{cell:>24}" for cell in cells) + f"{line['n']:7}"
              + "  inconclusive" * line["inconclusive"])
    return dict(taus=table, runs=rows, left_out=left_out)


# -------------------------------------------------------------------------------------------------

COMMANDS = {
    "layers": (Layers, layers),
    "subspaces": (Subspaces, subspaces),
    "tokens": (Tokens, tokens),
    "saliency": (Saliency, saliency_maps),
    "toy": (Toy, toy),
    "denoise": (Denoise, denoise),
    "neurons": (Neurons, neurons),
    "recall": (Recall, recall),
    "curves": (Curves, curves),
    "correlation": (Correlation, correlation),
}


def main(argv):
    """Runs one subcommand; returns its numbers, which --json gets together with the flags."""
    flags = {name: config for name, (config, _) in COMMANDS.items()}
    command, c = parse_command(flags, argv, __doc__)
    check_new("json", c.json, c.overwrite)
    if c.out is not None:
        c.out = c.out.removesuffix(".png").removesuffix(".pdf")
        check_new("out", c.out + ".png", c.overwrite)
    c.out = c.out or str(ROOT / "out" / f"analyze-{command}")
    Path(c.out).parent.mkdir(parents=True, exist_ok=True)
    result = COMMANDS[command][1](c)
    if c.json:                                      # NaN, which JSON does not have, becomes null
        numbers = json.dumps(dict(flags=vars(c)) | result)
        content = json.loads(numbers, parse_constant=lambda _: None)
        Path(c.json).write_text(json.dumps(content, indent=1) + "\n")
    return result


if __name__ == "__main__":
    cli(main)
