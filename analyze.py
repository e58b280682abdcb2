"""
Looks inside the layers of a trained checkpoint, and at the papers' arguments in isolation.

    python analyze.py layers --ckpt=out/vit-cifar10/best.pt --untrained     rates and sparsity of every layer ([N] Figures 3 to 5, [S] Figure 2)
    python analyze.py layers --ckpt=A.pt,B.pt --split=both                  several checkpoints in one figure; text and MAE too
    python analyze.py subspaces --ckpt=out/vit-cifar10/best.pt              are U_1 .. U_K incoherent? ([N] Figure 7)
    python analyze.py tokens --ckpt=out/vit-cifar10/best.pt                 Z^l of a picture, layer by layer ([N] Figure 6)
    python analyze.py saliency --ckpt=out/vit-shapes/best.pt --head=2       what the class token attends to ([B] Eq. (7.2.41), Figure 7.11)
    python analyze.py toy                                                   does MSSA lower R^c? ([S])
    python analyze.py denoise                                               a Gaussian mixture, noised and brought back ([J] Eq. (46)-(49))
    python analyze.py curves --runs=out/vit-cifar10,out/vit-shapes          metrics.jsonl of several runs ([B] Figures 7.13, 7.18)
    python analyze.py correlation --runs=out/grid --axes=arch,lr            the generalization gap against complexity measures ([S] Table 1)

Prints a table; --json=FILE also writes the numbers. Figures go to --out: maps as PNG, curves as PNG and PDF if matplotlib is there.
"""
import contextlib
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

import common
from common import UserError, option
from data import augment, images, text
from model import (MHSA, ODL, ConfigError, ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig, MaskedAutoencoder, TextConfig,
                   coding_rate, gaussian_mixture_denoise, make_config, mssa, official_tensors, projected_coding_rate, run_layers, saliency,
                   subspace_coding_rate, subspace_coding_rate_grad)


@dataclass(kw_only=True)
class Output:
    """Where every command writes."""
    json: str | None = option(None, "also write the numbers to this file")
    out: str | None = option(None, "the figure's name without .png or .pdf; auto is out/analyze-COMMAND")


@dataclass(kw_only=True)
class Look(Output):
    """What every command that opens a checkpoint has."""
    ckpt: str | None = option(None, "a checkpoint, ours or a published one")
    data: str | None = option(None, "which data; auto is what the checkpoint was trained on")
    split: str = option("val", "which part", choices=("train", "val"))
    random: bool = option(False, "the checkpoint's model at random initialization instead")
    seed: int = option(0, "of that initialization", low=0)
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")


# ---------------------------------------------------------------------------------------------------------------------
# Tables, figures, heat maps
# ---------------------------------------------------------------------------------------------------------------------

def print_table(rows):
    """Dicts with the same keys, one a line; KEY_std goes behind KEY."""
    def cell(row, key):
        value = f"{row[key]:.4g}" if isinstance(row[key], float) else "-" if row[key] is None else str(row[key])
        return value + (f" +- {row[key + '_std']:.2g}" if key + "_std" in row else "")
    keys = [key for key in rows[0] if not key.endswith("_std")]
    lines = [keys] + [[cell(row, key) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths)))


def figure(c, panels, draw):
    """draw(axes, ...) on a row of `panels` axes, written as PNG and PDF; without matplotlib, one line that says how to get it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no figure without matplotlib: pip install matplotlib")
        return
    sheet = Figure(figsize=(4.2 * panels, 3.6), layout="constrained")
    draw(*sheet.subplots(1, panels, squeeze=False)[0])
    for suffix in (".png", ".pdf"):
        sheet.savefig(c.out + suffix, dpi=120)
    print(f"wrote {c.out}.png and .pdf")


def label(axes, x, y):
    """Names the axes and explains the lines."""
    axes.set(xlabel=x, ylabel=y)
    axes.legend(fontsize="small")


def write_heat(c, maps, enlarge):
    """A PNG of matrices (h, w), one a layer, four a row: white is 0, black 1 and more."""
    h, w, columns = maps[0].shape[0] * enlarge, maps[0].shape[1] * enlarge, min(4, len(maps))
    sheet = Image.new("L", (columns * (w + 8) - 8, -(-len(maps) // columns) * (h + 14)), 225)
    for i, one in enumerate(maps):
        left, top = i % columns * (w + 8), i // columns * (h + 14)
        ImageDraw.Draw(sheet).text((left + 2, top + 1), f"layer {i + 1}", fill=0)
        grey = Image.fromarray((255 * (1 - one.clamp(0, 1))).round().byte().cpu().numpy())
        sheet.paste(grey.resize((w, h), Image.Resampling.NEAREST), (left, top + 14))
    sheet.save(c.out + ".png")
    print(f"wrote {c.out}.png")


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, and what they are shown
# ---------------------------------------------------------------------------------------------------------------------

TASKS = {"vit": (ImageClassifier, ImageConfig), "mae": (MaskedAutoencoder, MAEConfig), "simdino": (ImageEncoder, ImageConfig),
         "gpt": (LanguageModel, TextConfig)}


def words(value, flag):
    """What a flag lists, separated by commas; UserError if that is nothing."""
    found = [word.strip() for word in (value or "").split(",") if word.strip()]
    if not found:
        raise UserError(f"--{flag} is needed")
    return found


def load_model(path, heads=None, random=False, seed=0):
    """(model in evaluation mode, data_meta) of any checkpoint, ours or published (data_meta is then empty); UserError if it is none.

    SimDINO's is the teacher's encoder. random: the same model at its initialization."""
    content, sealed = common.read_torch(path)
    if isinstance(content, dict) and "format" in content:
        content = common.check_checkpoint(path, content, sealed)
        if content["task"] not in TASKS:
            raise UserError(f"{path} is a checkpoint of task {content['task']}, not of {', '.join(TASKS)}")
        cls, config_class = TASKS[content["task"]]
        config, state, meta = make_config(config_class, content["model_config"]), content["model"], content["data_meta"]
        if cls is ImageEncoder:
            state = {name.removeprefix("encoder."): v for name, v in state.items() if name.startswith("encoder.")}
    else:
        try:
            masked = any(name.startswith("decoder_blocks.") for name in official_tensors(content))
            official = (MaskedAutoencoder if masked else ImageClassifier).from_official(content, heads=heads)
        except ConfigError as error:
            raise UserError(f"{path}: {error}") from None
        cls, config, state, meta = type(official), official.config, official.state_dict(), {}
    torch.manual_seed(seed)
    model = cls(config)
    if not random:
        common.load_into(model, state, path)
    return model.eval(), meta


def picture_reader(model, meta, c, split, device):
    """(number of pictures, function of int64 indices that returns them (b, 3, S, S) in [0, 1] and as the model sees them, normalized)."""
    name = c.data or meta.get("name")
    if name is None:
        raise UserError("--data is needed for a published checkpoint")
    data = images.load(name, cache=c.data_dir)
    pictures = data.train_images if split == "train" else data.val_images

    def read(index):
        if index.max() >= len(pictures):
            raise UserError(f"--index: {name} has {len(pictures):,} {split} pictures, counted from 0")
        x = common.at_size(augment.to_float(torch.from_numpy(pictures[index.numpy()]).to(device)), model.config.image_size)
        return x, augment.normalize(x, meta.get("mean", common.IMAGENET_MEAN), meta.get("std", common.IMAGENET_STD))
    return len(pictures), read


def open_encoder(c):
    """(the image encoder of c.ckpt on its device, the function of picture_reader); UserError for a language model."""
    model, meta = load_model(words(c.ckpt, "ckpt")[0], c.heads, c.random, c.seed)
    if isinstance(model, LanguageModel):
        raise UserError(f"{c.ckpt} is a language model: this looks at pictures")
    device = common.Processes(c.device).device
    encoder = getattr(model, "encoder", model).to(device)
    return encoder, picture_reader(encoder, meta, c, c.split, device)[1]


def batches(model, meta, c, split, device):
    """Yields the arguments of `forward` for c.samples samples, spread evenly over the split since some sets are sorted by class.

    A sample is a picture, or as many tokens of text as the context holds. A masked autoencoder also gets the noise that chooses
    the patches to hide, a function of the picture's number."""
    def spread(n):
        return torch.linspace(0, n - 1, min(c.samples, n), dtype=torch.float64).round().long().split(c.batch_size)
    if isinstance(model, LanguageModel):
        data = text.load(c.data or meta["name"], cache=c.data_dir)
        tokens = getattr(data, split)
        if tokens is None or data.tokenizer.meta() != meta["tokenizer"]:
            raise UserError(f"{data.name} has no {split} part" if tokens is None else f"{data.name} was not prepared with the checkpoint's tokenizer")
        n = min(model.config.context, len(tokens))
        for index in spread(len(tokens) // n):
            yield (torch.from_numpy(np.stack([tokens[i * n:(i + 1) * n] for i in index.tolist()]).astype(np.int64)).to(device),)
        return
    count, read = picture_reader(model, meta, c, split, device)
    for index in spread(count):
        x = read(index)[1]
        if isinstance(model, MaskedAutoencoder):
            draws = [torch.Generator().manual_seed(common.derive_seed("validation", i)) for i in index.tolist()]
            yield x, torch.stack([torch.rand(model.config.patches(), generator=draw) for draw in draws]).to(device)
        else:
            yield (x,)


def forward(model, x, noise=None):
    """All layers of any model on pictures (b, 3, S, S) or tokens (b, n)."""
    if isinstance(model, LanguageModel):
        run_layers(model.layers, model.tokens(x))
    elif isinstance(model, MaskedAutoencoder):
        model.decode(model.encode(x, noise), noise)
    else:
        getattr(model, "encoder", model)(x)


def layers_of(model):
    """All layers from first to last; of a masked autoencoder the encoder's, then the decoder's."""
    return [*(model.layers if hasattr(model, "layers") else model.encoder.layers), *getattr(model, "decoder", ())]


# ---------------------------------------------------------------------------------------------------------------------
# layers
# ---------------------------------------------------------------------------------------------------------------------

CONVENTIONS = {"released": r"$R^c$ of the normalized $U^* LN(Z^l)$", "caption": r"$R^c(Z^{l+1/2})$", "output": r"$R^c(Z^{l+1})$"}


@dataclass(kw_only=True)
class Layers(Look):
    """R^c, R(Z^{l+1}), the fraction of nonzeros of Z^{l+1} and the SRR measure, layer by layer, mean and deviation over samples.

    Of text a sample is as many tokens as the context holds, none of them masked; of a masked autoencoder come the encoder's layers
    and then the decoder's, on pictures masked as in training. An arch without U (transformer, aot-mhsa) has its value heads instead."""
    ckpt: str | None = option(None, "checkpoints, separated by commas: classifier, SimDINO, MAE, language model, published")
    split: str = option("val", "which part", choices=("train", "val", "both"))
    untrained: bool = option(False, "beside each checkpoint, its model at random initialization")
    samples: int = option(1000, "pictures as in [N], or sequences, evenly spread over the split", low=1)
    convention: str = option("released", "R^c of the projections that enter the softmax, normalized; of Z^{l+1/2}; or of Z^{l+1}, as [S]",
                             choices=tuple(CONVENTIONS))
    eps: float = option(0.1, "distortion; 0.1 is [N]'s figure", above=0)
    lambd: float = option(0.1, "weight of ||Z||_0 in the SRR measure", low=0)
    batch_size: int = option(50, "samples at once", low=1)


def projections(attention, Z):
    """U_k^* Z (B, K, n, p), without the bias that TSSA adds: of MHSA, which has no U, the value heads ([J] Section C.9)."""
    return attention.project(Z)[2] if isinstance(attention, MHSA) else Z[:, None] @ attention.bases()


def layer_numbers(layer, entered, half, out, c):
    """R^c, R, nonzeros (and of ODL's code) and SRR of one layer, each (B,), from LN(Z^l), Z^{l+1/2} and Z^{l+1}, (B, n, d).

    released: the hook of [N]'s code sees U^* LN(Z^l), each token scaled to norm 1 in each head. caption: R^c(Z^{l+1/2}) as
    [N] Figure 3 says, nothing scaled. output: R^c(Z^{l+1} | U^l). SRR is [S]'s, all of it on Z^{l+1}, whatever the convention."""
    w = projections(layer.attention, dict(released=entered, caption=half, output=out)[c.convention])
    if c.convention == "released":
        w = F.normalize(w, dim=-1)
    found = dict(rate_of_subspaces=projected_coding_rate(w, c.eps), rate=coding_rate(out, c.eps), nonzeros=(out != 0).float().mean((-2, -1)))
    if isinstance(layer.sparsification, ODL):
        found["code_nonzeros"] = (layer.sparsification.code(layer.norm2(half)) != 0).float().mean((-2, -1))
    own = projected_coding_rate(projections(layer.attention, out), c.eps)
    return found | dict(srr=c.lambd * (out != 0).float().sum((-2, -1)) + own - found["rate"])


def watch(layer, c):
    """The list to which hooks append the layer's numbers at each pass, keeping nothing else.

    In a decoder's layer ([B] Eq. (7.6.3)) Y takes the place of Z^{l+1/2}, and LN(Y) enters the attention."""
    now, seen = {}, []
    layer.attention.register_forward_pre_hook(lambda _, inputs: now.update(entered=inputs[0]))
    if hasattr(layer, "norm2"):
        layer.norm2.register_forward_pre_hook(lambda _, inputs: now.update(half=inputs[0]))
    layer.register_forward_hook(lambda _, inputs, out: seen.append(layer_numbers(layer, now["entered"], now.get("half", out), out, c)))
    return seen


@torch.no_grad()
def layer_table(model, inputs, c):
    """A list with one dict a layer: mean and deviation over samples of each number; `inputs` as `batches` yields them."""
    seen, table = [watch(layer, c) for layer in layers_of(model)], []
    for batch in inputs:
        forward(model, *batch)
    for l, found in enumerate(seen, 1):
        row = dict(layer=l)
        if isinstance(model, MaskedAutoencoder):
            row["part"] = "encoder" if l <= model.config.layers else "decoder"
        for key in found[0]:
            values = torch.cat([one[key] for one in found])
            row |= {key: values.mean().item(), f"{key}_std": values.std(correction=0).item()}
        table.append(row)
    return table


def layers(c):
    """{"runs": [{"ckpt", "untrained", "split", "srr_measure", "layers"}, ...]}; [S]'s measure is the mean of srr over layers, but a decoder's."""
    runs, device = [], common.Processes(c.device).device
    cases = [(path, untrained, split) for path in words(c.ckpt, "ckpt") for untrained in sorted({c.random, c.random or c.untrained})
             for split in (("train", "val") if c.split == "both" else (c.split,))]
    for path, untrained, split in cases:
        model, meta = load_model(path, c.heads, untrained, c.seed)
        table = layer_table(model.to(device), batches(model, meta, c, split, device), c)
        own = [row["srr"] for row in table if row.get("part") != "decoder"]
        runs.append(dict(ckpt=path, untrained=untrained, split=split, srr_measure=sum(own) / len(own), layers=table))
        print(f"{path}{', untrained' if untrained else ''}, {split}: {CONVENTIONS[c.convention].replace('$', '')}, eps {c.eps:g}")
        print_table(table)
        print(f"SRR measure, the mean of srr over layers ([S]; lower is better): {runs[-1]['srr_measure']:.3f}")
    figure(c, 4, lambda *axes: draw_layers(runs, c, *axes))
    return dict(runs=runs)


def draw_layers(runs, c, *panels):
    """R^c, R, nonzeros (of ODL's code too, dashed) and SRR over the layers; bands are one deviation over samples."""
    names = {"rate_of_subspaces": f"{CONVENTIONS[c.convention]}, $\\epsilon$ = {c.eps:g}", "rate": f"$R(Z^{{l+1}})$, $\\epsilon$ = {c.eps:g}",
             "nonzeros": "nonzeros of $Z^{l+1}$ (fraction)", "srr": f"SRR: {c.lambd:g} $||Z^{{l+1}}||_0 + R^c(Z^{{l+1}}) - R(Z^{{l+1}})$"}
    for axes, (key, name) in zip(panels, names.items()):
        for i, run in enumerate(runs):
            title = "/".join(Path(run["ckpt"]).parts[-2:]) + (", untrained, " if run["untrained"] else ", ") + run["split"]
            style = dict(color=f"C{i % 10}", label=title)
            x, mean, std = (np.array([row[k] for row in run["layers"]]) for k in ("layer", key, f"{key}_std"))
            axes.plot(x, mean, "o-", **style)
            axes.fill_between(x, mean - std, mean + std, color=style["color"], alpha=0.15)
            if key == "nonzeros" and "code_nonzeros" in run["layers"][0]:
                axes.plot(x, [row["code_nonzeros"] for row in run["layers"]], "s--", **style | dict(label="of ODL's code"))
        label(axes, "layer $l$", name)


# ---------------------------------------------------------------------------------------------------------------------
# subspaces, tokens, saliency
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Subspaces(Look):
    """|[U_1 .. U_K]^* [U_1 .. U_K]| with columns of norm 1, layer by layer ([N] Figure 7), of any checkpoint: heat map, mean, maximum.

    "within": two different columns of one subspace; "across": of two subspaces. An arch without U has its value heads instead."""


def bases(attention):
    """[U_1 .. U_K] as (K, d, p); of MHSA the maps to the values."""
    return attention.QKV.weight.view(3, attention.heads, attention.p, -1)[2].mT if isinstance(attention, MHSA) else attention.bases()


def coherence(U):
    """|<u, v>| of all columns of U (K, d, p), each scaled to norm 1: the matrix (K p, K p), and its mean and maximum within and across
    subspaces, None where there is no pair."""
    K, d, p = U.shape
    columns = F.normalize(U.transpose(0, 1).reshape(d, K * p), dim=0)
    gram, owner, found = (columns.mT @ columns).abs(), torch.arange(K, device=U.device).repeat_interleave(p), {}
    same = owner[:, None] == owner
    for name, pairs in (("within", same & ~torch.eye(K * p, dtype=torch.bool, device=U.device)), ("across", ~same)):
        values = gram[pairs]
        found |= {f"{name}_mean": values.mean().item() if len(values) else None, f"{name}_max": values.max().item() if len(values) else None}
    return gram, found


@torch.no_grad()
def subspaces(c):
    """{"layers": coherence of each, "random": the mean of |<u, v>| for random directions}."""
    model, _ = load_model(words(c.ckpt, "ckpt")[0], c.heads, c.random, c.seed)
    found = [coherence(bases(layer.attention).float()) for layer in layers_of(model)]
    rows, d = [dict(layer=l) | numbers for l, (_, numbers) in enumerate(found, 1)], model.config.width
    random = math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.pi ** 0.5
    print_table(rows)
    print(f"random directions in R^{d} have a mean of {random:.4f}")
    write_heat(c, [gram for gram, _ in found], max(1, 256 // len(found[0][0])))
    return dict(layers=rows, random=random)


@dataclass(kw_only=True)
class Tokens(Look):
    """|Z^{l+1}| of one picture, tokens by features, layer by layer ([N] Figure 6): heat map, fraction of nonzeros, effective rank.

    The effective rank is exp of the entropy of the squared singular values. Black is the 99th percentile of a layer and more."""
    index: int = option(0, "the picture's number in the split", low=0)


@torch.no_grad()
def tokens(c):
    """{"layers": nonzeros and effective rank of each Z^{l+1}}."""
    encoder, read = open_encoder(c)
    outputs, rows = [], []
    encoder(read(torch.tensor([c.index]))[1], outputs=outputs)
    for l, (Z,) in enumerate(outputs, 1):
        share = torch.linalg.svdvals(Z).square()
        entropy = torch.special.entr(share / share.sum()).sum()
        rows.append(dict(layer=l, nonzeros=(Z != 0).float().mean().item(), effective_rank=entropy.exp().item()))
    print_table(rows)
    write_heat(c, [Z.abs() / Z.abs().quantile(0.99).clamp_min(1e-12) for (Z,) in outputs], max(1, 384 // outputs[0].shape[-1]))
    return dict(layers=rows)


@dataclass(kw_only=True)
class Saliency(Look):
    """What the class token attends to, patch by patch, over the picture in red: the mean of the heads, then each ([B] Eq. (7.2.41)).

    The table has, over the pictures, the effective number of patches (exp of the map's entropy) and the share of the largest. With
    --head, that head alone across the pictures ([B] Figure 7.11). TSSA has no attention map: there it is each patch's membership Pi."""
    layer: int | None = option(None, "l, counted from 1; auto is the last", low=1)
    head: int | None = option(None, "k, counted from 1; auto is all, and their mean", low=1)
    index: int = option(0, "the first picture's number in the split", low=0)
    pictures: int = option(8, "how many, one a row", low=1)


@torch.no_grad()
def saliency_of(encoder, x, layer=-1):
    """model.saliency of one layer ([B] Eq. (7.2.41)): x (B, 3, H, W) -> (B, K, patches). `layer` counts from 0, or from the end if negative."""
    layer = range(len(encoder.layers))[layer]
    Z = run_layers(encoder.layers[:layer], encoder.tokens(x))
    return saliency(encoder.layers[layer].attention.map(encoder.layers[layer].norm1(Z)).float())


def saliency_maps(c):
    """{"heads": [{"head", "patches", "largest"}, ...]}, means over the pictures."""
    encoder, read = open_encoder(c)
    for name, most in (("layer", len(encoder.layers)), ("head", encoder.config.heads)):
        if (getattr(c, name) or 1) > most:
            raise UserError(f"--{name}={getattr(c, name)}: {c.ckpt} has {most}")
    pictures, x = read(torch.arange(c.index, c.index + c.pictures))
    maps = saliency_of(encoder, x, (c.layer or 0) - 1)
    maps, names = torch.cat([maps.mean(1, keepdim=True), maps], 1), ["mean", *range(1, encoder.config.heads + 1)]
    if c.head:
        maps, names = maps[:, c.head:c.head + 1], [c.head]
    share = maps / maps.sum(-1, keepdim=True)
    spread, largest = torch.special.entr(share).sum(-1).exp().mean(0).tolist(), share.amax(-1).mean(0).tolist()
    rows = [dict(head=name, patches=one, largest=most) for name, one, most in zip(names, spread, largest)]
    print_table(rows)
    common.write_overlays(c.out + ".png", pictures, maps, max(1, 128 // pictures.shape[-1]))
    print(f"wrote {c.out}.png, one picture a row: as it is, then with head " + ", ".join(map(str, names)))
    return dict(heads=rows)


# ---------------------------------------------------------------------------------------------------------------------
# toy: does MSSA lower R^c?
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Drawn(Output):
    """What the two experiments on random subspaces have."""
    width: int = option(64, "d", low=1)
    heads: int = option(8, "K", low=1)
    head_dim: int = option(8, "p", low=1)
    eps: float = option(0.5, "distortion of the rates", above=0)
    seed: int = option(0, "of all that is drawn", low=0)


@dataclass(kw_only=True)
class Toy(Drawn):
    """[S]'s experiment: from random tokens, iterate the MSSA update, its negative, [J]'s with shrinking, the Neumann step and the exact gradient step of R^c.

        mssa, negative   Z +- step beta [U_1 .. U_K] stack_k SSA(Z | U_k)           [S], [J] Eq. (35), (36), (45)
        shrunk           (1 - step) Z + step beta [U_1 .. U_K] stack_k SSA(Z | U_k)   [J] Eq. (34), step = beta kappa
        neumann, exact   Z - step / beta (approximate, exact gradient of R^c)       [J] Eq. (33), (31)

    Twice: on tokens small enough for the Neumann series, beta ||U_k^* Z||^2 < 1, and on larger ones, where its step diverges."""
    tokens: int = option(64, "n", low=1)
    step: float = option(0.1, "step size times beta; below 2 the exact gradient step lowers R^c", above=0)
    iterations: int = option(30, "how many steps", low=1)
    valid: float = option(0.5, "the largest beta ||U_k^* Z||^2 of the first tokens", above=0)
    beyond: float = option(2.0, "that of the second", above=0)


def random_subspaces(c, generator):
    """K random subspaces of R^d, each orthogonal to the others, with orthonormal bases: (K, d, p) in float64."""
    if c.heads * c.head_dim > c.width:
        raise UserError(f"--heads={c.heads} subspaces of --head_dim={c.head_dim} do not fit into --width={c.width}")
    Q = torch.linalg.qr(torch.randn(c.width, c.heads * c.head_dim, generator=generator, dtype=torch.float64))[0]
    return Q.view(c.width, c.heads, c.head_dim).transpose(0, 1)


UPDATES, TERMS = ("mssa", "negative", "shrunk", "neumann", "exact"), ("first term", "second term")


def toy_direction(name, Z, U, eps):
    """What a step of 1 / beta adds to Z (n, d) in one of UPDATES, or minus the gradient over beta of one of the two Taylor TERMS of R^c:

        R^c >= beta / 2 sum_k ||U_k^* Z||_F^2 - beta^2 / 4 sum_k ||(U_k^* Z)^* U_k^* Z||_F^2          [S]

    MSSA stands for the second term's alone: a softmax in the place of (U_k^* Z)^* U_k^* Z, with the sign it has there. The -Z of
    [J] Eq. (34) stands for the first term's, as if the subspaces filled the space."""
    beta = U.shape[-1] / (Z.shape[0] * eps ** 2)
    if name == "shrunk":
        return toy_direction("mssa", Z, U, eps) - Z
    if name in ("mssa", "negative"):
        return (beta if name == "mssa" else -beta) * mssa(Z, U)
    if name in ("neumann", "exact"):
        return -subspace_coding_rate_grad(Z, U, eps, neumann=name == "neumann") / beta
    first = -((Z @ U) @ U.mT).sum(0)
    return first if name == "first term" else toy_direction("neumann", Z, U, eps) - first


def toy_run(Z, U, c):
    """One panel: {"validity", "directions" at the start, "rates": R^c over the iterations of each update, "terms": of Taylor along mssa's, ...}."""
    beta = U.shape[-1] / (Z.shape[0] * c.eps ** 2)
    start, gradient, directions = subspace_coding_rate(Z, U, c.eps), subspace_coding_rate_grad(Z, U, c.eps), []
    for name in UPDATES + TERMS:
        step = toy_direction(name, Z, U, c.eps)
        directions.append(dict(direction=name, cosine_with_descent=-F.cosine_similarity(step.flatten(), gradient.flatten(), dim=0).item(),
                               slope=(step * gradient).sum().item(), change=(subspace_coding_rate(Z + c.step * step, U, c.eps) - start).item()))
    rates, terms = {name: [] for name in UPDATES}, {name: [] for name in TERMS}
    for name, curve in rates.items():
        now = Z
        for _ in range(c.iterations + 1):
            curve.append(subspace_coding_rate(now, U, c.eps).item())
            if name == "mssa":
                w = now @ U
                terms["first term"].append((beta / 2 * w.square().sum()).item())
                terms["second term"].append((beta ** 2 / 4 * (w.mT @ w).square().sum()).item())
            now = now + c.step * toy_direction(name, now, U, c.eps)
    return dict(beta=beta, validity=(beta * torch.linalg.matrix_norm(Z @ U, 2).max() ** 2).item(), token_norm=Z.norm(dim=-1).mean().item(),
                directions=directions, rates=rates, terms=terms)


def toy(c):
    """{"panels": [toy_run on small tokens, on large ones], "validity_behind_a_norm"}."""
    generator = torch.Generator().manual_seed(c.seed)
    U = random_subspaces(c, generator)
    Z = F.normalize(torch.randn(c.tokens, c.width, generator=generator, dtype=torch.float64), dim=-1) * c.width ** 0.5     # as behind a LayerNorm
    validity = (c.head_dim / (c.tokens * c.eps ** 2) * torch.linalg.matrix_norm(Z @ U, 2).max() ** 2).item()
    panels = [toy_run(Z * (wanted / validity) ** 0.5, U, c) for wanted in (c.valid, c.beyond)]
    for panel in panels:
        print(f"beta ||U_k^* Z||^2 = {panel['validity']:.3g}: the Neumann series {'converges' if panel['validity'] < 1 else 'diverges'}; tokens of "
              f"norm {panel['token_norm']:.3g}. At the start, R^c's slope along each direction, and its change by a step of {c.step:g}:")
        print_table(panel["directions"])
        print("R^c over the iterations, and its two Taylor terms along mssa's:")
        shown = range(0, c.iterations + 1, max(1, c.iterations // 10))
        print_table([dict(iteration=i) | {name: curve[i] for name, curve in (panel["rates"] | panel["terms"]).items()} for i in shown])
    print(f"the same tokens behind a LayerNorm, of norm {c.width ** 0.5:.3g}, have beta ||U_k^* Z||^2 = {validity:.3g}")
    figure(c, 3, lambda *axes: draw_toy(panels, *axes))
    return dict(panels=panels, validity_behind_a_norm=validity)


def draw_toy(panels, small, large, terms):
    """R^c over the iterations on small and on large tokens, and the Taylor terms along MSSA's path on the small ones."""
    for axes, panel in ((small, panels[0]), (large, panels[1])):
        for name, curve in panel["rates"].items():
            axes.plot(curve, label=name)
        axes.set(title=f"$\\beta ||U_k^* Z||^2$ = {panel['validity']:.3g} at the start", ylim=(0, 1.2 * max(panel["rates"]["mssa"])))
        label(axes, "iteration", "$R^c(Z | U)$")
    first, second = (np.array(panels[0]["terms"][name]) for name in TERMS)
    for curve, name in ((panels[0]["rates"]["mssa"], "$R^c$"), (first, "first term"), (second, "second term"), (first - second, "first - second")):
        terms.plot(curve, label=name)
    label(terms, "iteration of the MSSA update", "nats")


# ---------------------------------------------------------------------------------------------------------------------
# denoise: a Gaussian mixture on subspaces
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Denoise(Drawn):
    """Tokens U_s alpha, alpha ~ N(0, I), s uniform ([J] Eq. (10)), noised with deviation sigma and brought back four ways.

        closed       the approximation of [J] Eq. (47)
        posterior    E[clean | noisy], which no estimate beats in mean square ([N] Section A.1)
        sde          the reverse diffusion of [J] Eq. (49) in small steps: a sample of what was clean, so twice the posterior's error
        flow         the same score in small steps without noise

    "error": mean squared distance to the clean token; "off": to the nearest subspace. Then [J] Figure 5: R - R^c and the nonzeros of clean
    tokens on oblique subspaces, on orthogonal ones, and on the coordinate axes."""
    tokens: int = option(500, "n", low=1)
    sigmas: str = option("0.05,0.1,0.2,0.5,1", "noise levels")
    steps: int = option(100, "of sde and flow", low=1)


def posterior_mean(z, U, sigma):
    """E[z_clean | z] for z_clean = U_s alpha, alpha ~ N(0, I), s uniform, noise of deviation sigma ([N] Section A.1): (..., d) -> (..., d).

    With c = 1 / (1 + sigma^2), it is c sum_k softmax_k(c ||U_k^* z||^2 / 2 sigma^2) U_k U_k^* z: [J] Eq. (47) but for c."""
    c = 1 / (1 + sigma ** 2)
    return c * gaussian_mixture_denoise(z, U, sigma / c ** 0.5)


def score(z, U, sigma):
    """grad log q(z), q the density of the noisy tokens, by Tweedie's formula [J] Eq. (46): (..., d) -> (..., d)."""
    return (posterior_mean(z, U, sigma) - z) / sigma ** 2


def reverse_diffusion(z, U, sigma, steps, generator=None):
    """[J] Eq. (49) from t = sigma^2 to 0, in steps of equal sqrt(t); without a generator its flow, dz = score / 2 dt and no noise.

    The noise of a step to t' is scaled by sqrt(t' / t): just what is left across a subspace, and none in the last step."""
    levels = [sigma * (1 - i / steps) for i in range(steps + 1)]
    for s, below in zip(levels, levels[1:]):
        if generator is None:
            z = z + s * (s - below) * score(z, U, s)
        else:
            dt = s ** 2 - below ** 2
            z = z + dt * score(z, U, s) + dt ** 0.5 * below / s * torch.randn(z.shape, generator=generator, dtype=z.dtype)
    return z


def mixture(U, n, generator):
    """n clean tokens of [J] Eq. (10) on the subspaces U (K, d, p): (n, d)."""
    K, d, p = U.shape
    alpha = torch.randn(n, p, 1, generator=generator, dtype=U.dtype)
    return (U[torch.randint(K, (n,), generator=generator)] @ alpha)[..., 0]


def denoise(c):
    """{"levels": [{"sigma", "method", "error", "off"}, ...], "sets": [{"subspaces", "gain", "nonzeros"}, ...]}."""
    try:
        sigmas = [float(word) for word in words(c.sigmas, "sigmas")]
    except ValueError:
        sigmas = [math.nan]
    if not all(0 < sigma < math.inf for sigma in sigmas):
        raise UserError(f"--sigmas={c.sigmas}: expected numbers above 0, separated by commas")
    generator = torch.Generator().manual_seed(c.seed)
    U = random_subspaces(c, generator)
    clean = mixture(U, c.tokens, generator)
    noise, rows = torch.randn(clean.shape, generator=generator, dtype=clean.dtype), []
    for sigma in sigmas:
        z = clean + sigma * noise
        for method, back in dict(noisy=z, closed=gaussian_mixture_denoise(z, U, sigma), posterior=posterior_mean(z, U, sigma),
                                 sde=reverse_diffusion(z, U, sigma, c.steps, generator), flow=reverse_diffusion(z, U, sigma, c.steps)).items():
            nearest = (back[:, None, None] @ U).square().sum((-2, -1)).amax(-1)                  # squared norm of the best projection
            rows.append(dict(sigma=sigma, method=method, error=(back - clean).square().sum(-1).mean().item(),
                             off=(back.square().sum(-1) - nearest).clamp_min(0).mean().item()))
    oblique, sets = torch.linalg.qr(torch.randn(U.shape, generator=generator, dtype=U.dtype))[0], []
    axes = torch.eye(c.width, dtype=U.dtype)[:, :c.heads * c.head_dim].view(c.width, c.heads, c.head_dim).transpose(0, 1)
    for name, V in dict(oblique=oblique, orthogonal=U, axes=axes).items():
        z = mixture(V, c.tokens, torch.Generator().manual_seed(c.seed))
        sets.append(dict(subspaces=name, gain=(coding_rate(z, c.eps) - subspace_coding_rate(z, V, c.eps)).item(),
                         nonzeros=(z.abs() > 1e-9).double().mean().item()))
    print_table(rows)
    print("R - R^c of clean tokens, and their nonzeros, on three kinds of subspaces ([J] Figure 5):")
    print_table(sets)
    figure(c, 3, lambda *panels: draw_denoise(rows, *panels))
    return dict(levels=rows, sets=sets)


def draw_denoise(rows, error, off, plane):
    """Error and distance to the subspaces over sigma; and in the plane, where Eq. (47) takes noisy tokens of two lines ([J] Figure 9)."""
    for axes, key, name in ((error, "error", "to the clean token"), (off, "off", "to the nearest subspace")):
        for method in ("noisy", "closed", "posterior", "sde", "flow"):
            axes.loglog(*zip(*[(row["sigma"], max(row[key], 1e-8)) for row in rows if row["method"] == method]), "o-", label=method)
        label(axes, r"$\sigma$", f"squared distance {name}")
    generator = torch.Generator().manual_seed(0)
    U = torch.tensor([[[1.0], [0.0]], [[0.5], [3 ** 0.5 / 2]]])
    z = mixture(U, 80, generator)
    z = z + 0.2 * torch.randn(z.shape, generator=generator)
    back = gaussian_mixture_denoise(z, U, 0.2)
    plane.plot(torch.stack([z[:, 0], back[:, 0]]), torch.stack([z[:, 1], back[:, 1]]), color="0.8", linewidth=0.8)
    plane.plot(*z.T, ".", color="0.5", label=r"noisy, $\sigma$ = 0.2")
    plane.plot(*back.T, ".", color="C3", label="[J] Eq. (47)")
    plane.set_aspect("equal")
    label(plane, "$z_1$", "$z_2$")


# ---------------------------------------------------------------------------------------------------------------------
# curves
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Curves(Output):
    """A number of metrics.jsonl over the steps, training and validation, for several runs in one figure ([B] Figures 7.13, 7.18)."""
    runs: str | None = option(None, "folders of runs, separated by commas")
    value: str = option("loss", "which number: loss, acc, ppl, ... whatever the runs have written")


def read_curve(path, value):
    """{"train": [[step, value], ...], "val": ...} of a run's folder or metrics.jsonl; UserError if the number is not in it."""
    file = Path(path) / "metrics.jsonl" if Path(path).is_dir() else Path(path)
    try:
        content, lines = file.read_text(), []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    for line in content.splitlines():
        with contextlib.suppress(ValueError):                            # torn by a kill
            lines.append(json.loads(line))
    lines = [line for line in lines if isinstance(line, dict) and "step" in line]
    curve = {split: [[line["step"], line[value]] for line in lines if line.get("split") == split and isinstance(line.get(value), (int, float))]
             for split in ("train", "val")}
    if not curve["train"] and not curve["val"]:
        known = sorted({key for line in lines if "split" in line for key, v in line.items() if isinstance(v, (int, float))} - {"step"})
        raise UserError(f"{file} has no {value}; it has {', '.join(known) or 'no numbers at all'}")
    return curve


def curves(c):
    """{"runs": [{"run", "train", "val"}, ...]}; the table has the last values and the best of validation: the least of losses, else the largest."""
    found, rows = [dict(run=path) | read_curve(path, c.value) for path in words(c.runs, "runs")], []
    for one in found:
        step, best = (min if c.value in ("loss", "ppl") else max)(one["val"], key=lambda point: point[1], default=(None, None))
        last = {split: one[split][-1] if one[split] else (None, None) for split in ("train", "val")}
        rows.append(dict(run=one["run"], steps=max(s for s, _ in last.values() if s is not None), train=last["train"][1], val=last["val"][1],
                         best_val=best, at_step=step))
    print_table(rows)
    figure(c, 2, lambda *axes: draw_curves(found, c.value, *axes))
    return dict(runs=found)


def draw_curves(found, value, train, val):
    """Training and validation, one line a run."""
    for axes, split, name in ((train, "train", "training"), (val, "val", "validation")):
        for i, one in enumerate(found):
            axes.plot([step for step, _ in one[split]], [v for _, v in one[split]], color=f"C{i % 10}", label=Path(one["run"]).name)
        label(axes, "step", f"{name} {value}")


# ---------------------------------------------------------------------------------------------------------------------
# correlation: the generalization gap against complexity measures ([S] Table 1). [G]: Jiang et al., Fantastic Generalization Measures and
# Where to Find Them (ICLR 2020), Section 2 and Appendix C.
# ---------------------------------------------------------------------------------------------------------------------

# Flags of a run that are no hyperparameters
BOOKKEEPING = ("task", "preset", "out_dir", "resume", "overwrite", "seed", "device", "dtype", "compile", "data_dir", "workers",
               "log_every", "eval_every", "save_every")


@dataclass(kw_only=True)
class Correlation(Output):
    """Kendall's tau between complexity measures and the generalization gap over a folder of train_vit.py runs ([S] Table 1).

    The gap is the validation loss less the training loss of ckpt.pt, both cross-entropies of whole splits without augmentation and
    smoothing. Runs whose training loss is further than the tolerance from train_loss are left out: comparing measures makes sense
    among runs that fit the training set equally well."""
    runs: str | None = option(None, "the folder that holds the runs' folders")
    axes: str | None = option(None, "hyperparameters, as in lr,arch; auto is every flag (but the seed) that differs among the runs")
    train_loss: float | None = option(None, "which all runs should have reached; auto is the runs' median", low=0)
    tolerance: float = option(0.05, "how far from it a run may be", low=0)
    samples: int = option(1000, "training pictures for SRR, margin and flatness", low=1)
    eps: float = option(0.5, "distortion in the SRR measure; [S] does not give its own", above=0)
    lambd: float = option(0.1, "weight of ||Z||_0 in the SRR measure; likewise", low=0)
    draws: int = option(5, "of the noise on the weights (flatness)", low=1)
    bootstrap: int = option(2000, "resamplings of the runs", low=1)
    batch_size: int = option(250, "pictures at once", low=1)
    dtype: str = option("float32", "of autocast", choices=("float32", "bfloat16"))
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")


# Measures: larger should mean a larger gap

def matrices(model):
    """The weights W_1 .. W_d of [G]: every matrix of the model, in float64. Biases, gains, positions and class token are none."""
    return {name: p.detach().cpu().double() for name, p in model.named_parameters() if p.ndim == 2}


def norm_measures(W, W0, margin):
    """The measures of [G] Appendix C that the weights W, the initial weights W0 (dicts of d matrices) and the margin determine.

    With s_i = ||W_i||_2^2, f_i = ||W_i||_F^2, products over i, and g = margin: prod-of-spec = prod s_i, sum-of-spec =
    d (prod s_i)^(1/d), both with fro for f_i; .../margin: the product is divided by g^2; fro/spec = sum f_i / s_i; spec-init-main =
    prod s_i / g^2 sum_j ||W_j - W0_j||_F^2 / s_j, spec-orig-main the same with f_j / s_j; fro-distance, spec-distance =
    sum ||W_i - W0_i||^2; param-norm = sum f_i; l2-norm its root, l2-norm-init that of fro-distance. Products and sum-of- as
    logarithms, which ranks do not feel. A margin <= 0 leaves what contains it undefined: NaN."""
    def squares(matrices, order):
        return torch.stack([torch.linalg.matrix_norm(w, order) for w in matrices]).square()
    change, d = [W[name] - W0[name] for name in W], len(W)
    spec, fro, moved = squares(W.values(), 2), squares(W.values(), "fro"), squares(change, "fro")
    log_margin = 2 * math.log(margin) if margin > 0 else math.nan
    out = {"l2-norm": fro.sum().sqrt(), "l2-norm-init": moved.sum().sqrt(), "1/margin": math.exp(-log_margin),
           "fro/spec": (fro / spec).sum(), "fro-distance": moved.sum(), "spec-distance": squares(change, 2).sum(), "param-norm": fro.sum()}
    for name, product in (("spec", spec.log().sum()), ("fro", fro.log().sum())):
        out |= {f"prod-of-{name}": product, f"prod-of-{name}/margin": product - log_margin,
                f"sum-of-{name}": math.log(d) + product / d, f"sum-of-{name}/margin": math.log(d) + (product - log_margin) / d}
    out |= {"spec-init-main": out["prod-of-spec/margin"] + (moved / spec).sum().log(),
            "spec-orig-main": out["prod-of-spec/margin"] + (fro / spec).sum().log()}
    return {name: float(value) for name, value in out.items()}


def margin_of(logits, y):
    """The 10th percentile over samples, the ceil(m / 10)-th smallest, of f(x)_y - max_{j != y} f(x)_j ([G]): logits (m, classes), y (m,)."""
    right = logits.gather(1, y[:, None])
    wrong = logits.scatter(1, y[:, None], -math.inf).amax(1, keepdim=True)
    return (right - wrong)[:, 0].kthvalue(math.ceil(len(y) / 10)).values.item()


@torch.no_grad()
def path_norm(model, shape):
    """The sum of the outputs of the network with squared parameters on an input of ones ([G]); shape (C, H, W).

    That is the sum over paths of squared products in a ReLU network without normalization. Taken to the letter here: LayerNorms stay."""
    squared = {name: p.detach().square() for name, p in model.named_parameters()}
    ones = torch.ones(1, *shape, device=next(iter(squared.values())).device)
    return torch.func.functional_call(model, squared, ones).sum().item()


def largest_sigma(accuracy, drop=0.1, low=1e-5, high=10.0, rounds=12):
    """The largest sigma with accuracy(sigma) >= accuracy(0) - drop, by bisection of its logarithm between low and high ([G])."""
    goal = accuracy(0.0) - drop
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if accuracy(middle) >= goal else (low, middle)
    return low


def pac_bayes(square, sigma, m):
    """sqrt((||.||^2 / (4 sigma^2) + log(m / sigma) + 10) / m) for m training pictures: pac-bayes-init of ||w - w0||^2, -orig of ||w||^2 ([G])."""
    return math.sqrt((square / (4 * sigma ** 2) + math.log(m / sigma) + 10) / m)


@torch.no_grad()
def noisy_accuracy(model, x, y, sigma, draws, batch_size):
    """Mean accuracy with noise N(0, sigma^2) on every matrix; the draws' directions are the same for each sigma, so bisection can work."""
    right = 0
    for draw in range(draws if sigma else 1):
        rng = torch.Generator().manual_seed(draw)
        noisy = {name: p + sigma * torch.randn(p.shape, generator=rng).to(p) for name, p in model.named_parameters() if p.ndim == 2}
        right += sum((torch.func.functional_call(model, noisy, part).argmax(1) == label).sum().item()
                     for part, label in zip(x.split(batch_size), y.split(batch_size))) / len(y)
    return right / (draw + 1)


def srr_measure(model, Z, eps, lambd):
    """For each picture lambda ||Z^l||_0 + R^c(Z^l | U^l) - R(Z^l), the mean over layers: the SRR measure of [S]. Z: a list of (B, n, d).

    Z^l is the output of layer l as it stands; of MHSA, which has no U, the value heads serve. (B,)."""
    total = 0.0
    for layer, out in zip(model.encoder.layers, Z):
        w = projections(layer.attention, out)
        total = total + lambd * (out != 0).float().sum((1, 2)) + projected_coding_rate(w, eps) - coding_rate(out, eps)
    return total / len(Z)


# Rank correlation

def tau_b(x, y, counts):
    """Kendall's tau-b of x, y (n,) where run i is there counts[b, i] times, for counts (B, n): (B,).

    sum_{i<j} sign(x_i - x_j) sign(y_i - y_j) / sqrt(pairs that differ in x  *  pairs that differ in y); a run and its copies are no
    pair. [S] writes tau-a, whose denominator is all pairs, but its Table 1 holds tau-b (# params: -0.572 where three of four tie). 0 where all runs tie in x or in y, as in [S] (# params), NaN where there is no pair."""
    sx, sy = np.sign(x[:, None] - x), np.sign(y[:, None] - y)
    pairs, both, in_x, in_y = (((counts @ s) * counts).sum(1) for s in (1.0 - np.eye(len(x)), sx * sy, abs(sx), abs(sy)))
    tau = np.divide(both, np.sqrt(in_x * in_y), out=np.zeros(len(counts)), where=in_x * in_y > 0)
    return np.where(pairs > 0, tau, np.nan)


def nanmean(parts, n):
    """The mean over parts of (n,) arrays, without NaN; NaN where nothing is left."""
    parts = np.array(parts).reshape(-1, n)
    there = (~np.isnan(parts)).sum(0)
    return np.divide(np.nansum(parts, 0), there, out=np.full(n, np.nan), where=there > 0)


def granulated_tau(x, y, groups, counts):
    """psi_i of [G] Section 2.2.2: the mean of tau over groups of runs (lists of indices) that differ in one hyperparameter only."""
    return nanmean([tau_b(x[g], y[g], counts[:, g]) for g in groups], len(counts))


def grouped(thetas, axis, axes):
    """Lists of indices of runs that agree in the seed and in every other axis, two runs or more, for dicts `thetas`."""
    groups = {}
    for i, theta in enumerate(thetas):
        groups.setdefault(repr([theta.get(name) for name in ("seed", *axes) if name != axis]), []).append(i)
    return [g for g in groups.values() if len({repr(thetas[i].get(axis)) for i in g}) > 1]


def correlations(rows, axes, draws=2000, seed=0):
    """{measure: {axis or "overall" or "psi": [tau, low, high], "n": runs, "inconclusive": bool}} of rows dict(theta, gap, measures).

    An axis is missing where no two runs differ in it alone (name axes that vary together, as width and heads, once).
    Psi is the mean over axes of psi_i ([G] Section 2.2.2). low, high: the 2.5 and 97.5 percentiles over bootstrap samples of the
    runs (drawn with replacement; what occurs twice is no pair with itself). A measure is inconclusive if the overall tau's hold 0
    between them. Runs in which a measure is not finite are left out for that measure."""
    table = {}
    for name in rows[0]["measures"]:
        kept = [row for row in rows if math.isfinite(row["measures"][name])]
        if len(kept) < 3:
            table[name] = dict(n=len(kept), inconclusive=True)
            continue
        x, y, n = np.array([row["measures"][name] for row in kept]), np.array([row["gap"] for row in kept]), len(kept)
        counts = np.concatenate([np.ones((1, n)), np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), draws)])
        taus = {axis: granulated_tau(x, y, grouped([row["theta"] for row in kept], axis, axes), counts) for axis in axes}
        taus |= dict(overall=tau_b(x, y, counts), psi=nanmean(list(taus.values()), len(counts)))
        defined = {key: tau for key, tau in taus.items() if not np.isnan(tau[0])}
        table[name] = {key: [float(tau[0]), *np.nanpercentile(tau[1:], (2.5, 97.5)).tolist()] for key, tau in defined.items()}
        low, high = table[name]["overall"][1:]
        table[name] |= dict(n=n, inconclusive=low <= 0 <= high)
    return table


# Runs

def initial(content):
    """The model as train_vit.py built it from its seed, before the first step. UserError for a run that started from a checkpoint."""
    if content["run_config"].get("init_from") is not None:
        raise UserError("it started from a checkpoint (--init_from), not from its seed")
    torch.manual_seed(common.derive_seed(content["run_config"]["seed"], "weights"))
    return ImageClassifier(make_config(ImageConfig, content["model_config"]))


def examine(folder, c, processes):
    """dict(run, theta, train_loss, train_acc, val_loss, val_acc, gap, measures) of one run."""
    path = folder / "ckpt.pt"
    content, (model, meta) = common.load_checkpoint(path, "vit"), common.load_classifier(path)
    data = images.load(meta["name"], cache=c.data_dir)
    model.to(processes.device)
    data.mean, data.std, c.image_size = meta["mean"], meta["std"], model.config.image_size
    seen = content["run_config"].get("train_images")
    train = images.Images(data.train_images[:seen], data.train_labels[:seen], processes.device)
    val = images.Images(data.val_images, data.val_labels, processes.device)
    fit, held = (common.classify(model, split, data, c, processes, c.batch_size) for split in (train, val))
    x, y = train.batch(torch.linspace(0, len(train) - 1, min(c.samples, len(train)), dtype=torch.float64).round().long())
    x = augment.normalize(common.at_size(augment.to_float(x), c.image_size), data.mean, data.std)
    with torch.no_grad():
        seen = [model(part, outputs=True) for part in x.split(c.batch_size)]
        logits, srr = torch.cat([out for out, _ in seen]), torch.cat([srr_measure(model, Z, c.eps, c.lambd) for _, Z in seen])
    W, W0 = matrices(model), matrices(initial(content))
    sigma = largest_sigma(lambda s: noisy_accuracy(model, x, y, s, c.draws, c.batch_size))
    measures = norm_measures(W, W0, margin_of(logits, y))
    measures |= {"# params": common.count(model), "path-norm": path_norm(model, x.shape[1:]), "SRR": srr.mean().item(),
                 "pac-bayes-init": pac_bayes(measures["fro-distance"], sigma, len(train)),
                 "pac-bayes-orig": pac_bayes(measures["param-norm"], sigma, len(train)), "1/sigma pac-bayes-flatness": sigma ** -2}
    return dict(run=folder.name, theta=content["run_config"], gap=held["loss"] - fit["loss"], measures=measures,
                **{f"{name}_{key}": scores[key] for name, scores in (("train", fit), ("val", held)) for key in ("loss", "acc")})


def examined(c):
    """(table of `correlations`, rows of the runs that count, names of those left out with the reason)."""
    if c.runs is None or not Path(c.runs).is_dir():
        raise UserError("--runs=FOLDER is needed, a folder whose folders are runs of train_vit.py" if c.runs is None else f"no folder {c.runs}")
    rows, left_out, processes = [], {}, common.Processes(c.device)
    folders = sorted(path.parent for path in Path(c.runs).glob("*/config.json"))
    finished = [folder for folder in folders if (folder / "metrics.jsonl").exists() and b'"event": "done"' in (folder / "metrics.jsonl").read_bytes()]
    if len(finished) < 3:
        hint = " (it is a run itself: name the folder above it)" if (Path(c.runs) / "config.json").exists() else ""
        raise UserError(f"{len(finished)} finished runs in {c.runs}{hint}, 3 are needed")
    axes, known = c.axes.split(",") if c.axes else [], {name for folder in folders for name in json.loads((folder / "config.json").read_text())}
    for axis in axes:
        if axis not in known:
            raise UserError(f"--axes={c.axes}: {axis} is no flag of these runs{common.nearest(axis, known)}")
    for folder in folders:
        if folder not in finished:
            left_out[folder.name] = "not finished"
            continue
        print(f"{folder.name} ...", file=sys.stderr, end=" ", flush=True)
        try:
            rows.append(examine(folder, c, processes))
            print(f"training loss {rows[-1]['train_loss']:.4f}, gap {rows[-1]['gap']:.4f}", file=sys.stderr, flush=True)
        except UserError as error:
            left_out[folder.name] = str(error)
            print("left out", file=sys.stderr, flush=True)
    goal = c.train_loss if c.train_loss is not None else float(np.median([row["train_loss"] for row in rows] or [0]))
    left_out |= {row["run"]: f"training loss {row['train_loss']:.4f}" for row in rows if abs(row["train_loss"] - goal) > c.tolerance}
    rows = [row for row in rows if row["run"] not in left_out]
    if len(rows) < 3:
        raise UserError(f"{len(rows)} runs in {c.runs} have a training loss of {goal:.4f} +- {c.tolerance}, 3 are needed: see --tolerance")
    differs = {name for name in known if len({repr(row["theta"].get(name)) for row in rows}) > 1}
    axes = axes or [name for name in rows[0]["theta"] if name in differs and name not in BOOKKEEPING]
    return correlations(rows, axes, c.bootstrap), rows, left_out


def correlation(c):
    """{"taus", "runs", "left_out"}; the table has Kendall's tau per hyperparameter, overall and Psi, each with its 95 % interval."""
    table, rows, left_out = examined(c)
    for name, reason in left_out.items():
        print(f"left out: {name}, {reason}")
    columns = list(dict.fromkeys(key for line in table.values() for key in line if key not in ("n", "inconclusive")))
    print(f"{'measure':27}" + "".join(f"{key:>24}" for key in columns) + "   runs")
    for name, line in sorted(table.items(), key=lambda item: -item[1].get("overall", [-2])[0]):
        cells = ("{:6.3f} [{:5.2f}, {:5.2f}]".format(*line[key]) if key in line else "undefined" for key in columns)
        print(f"{name:27}" + "".join(f"{cell:>24}" for cell in cells) + f"{line['n']:7}" + "  inconclusive" * line["inconclusive"])
    return dict(taus=table, runs=rows, left_out=left_out)


# ---------------------------------------------------------------------------------------------------------------------

COMMANDS = {"layers": (Layers, layers), "subspaces": (Subspaces, subspaces), "tokens": (Tokens, tokens), "saliency": (Saliency, saliency_maps),
            "toy": (Toy, toy), "denoise": (Denoise, denoise), "curves": (Curves, curves),
            "correlation": (Correlation, correlation)}


def main(argv):
    """Runs one subcommand, which prints its table and writes its figure; returns its numbers, which --json gets with the flags."""
    command, c = common.parse_command({name: flags for name, (flags, _) in COMMANDS.items()}, argv, __doc__)
    c.out = (c.out or str(common.ROOT / "out" / f"analyze-{command}")).removesuffix(".png").removesuffix(".pdf")
    try:
        Path(c.out).parent.mkdir(parents=True, exist_ok=True)
        result = COMMANDS[command][1](c)
        if c.json:                                                       # NaN, which JSON does not have, becomes null
            content = json.loads(json.dumps(dict(flags=vars(c)) | result), parse_constant=lambda _: None)
            Path(c.json).write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None
    return result


if __name__ == "__main__":
    common.cli(main)
