"""What is measured of a model: rates and sparsity of its layers, on samples of its data; what its
attention covers; its parameters, and the operations of a training step."""
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from data import images, text
from flags import SampleFlags
from model import coding_rate, SoftmaxAttention, sparse_rate_reduction, subspace_coding_rate
from processes import with_bar


# ---- Samples of a checkpoint's data, and what its layers do with them ---------------------------
def spread(total, n):
    """n indices spread evenly over 0 .. total - 1: some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def inputs(loaded, c: SampleFlags):
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


def traces(loaded, c: SampleFlags):
    """Yields [(layer, its LayerTrace) ...] for each batch of `inputs`."""
    for _, x in inputs(loaded, c):
        yield [*zip(loaded.backbone.layers, loaded.backbone.trace(x))]


# ---- Rates and sparsity of layers ---------------------------------------------------------------
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


def saliency(attention, query="class"):
    """The weights that an attention map (B, K, 1 + n, 1 + n) gives the patches, (B, K, n): in the
    class token's row, below [B] Eq. (7.2.41), or ("mean", for a mean-pooled head) on average over
    the patches' rows. TSSA has memberships Pi (B, K, 1 + n) instead."""
    if attention.ndim == 3:
        return attention[..., 1:]
    return attention[:, :, 0, 1:] if query == "class" else attention[:, :, 1:, 1:].mean(2)


# ---- Parameters and operations ------------------------------------------------------------------
def count(model, without=()):
    """How many parameters a model has. [B] Tables 7.5 to 7.11 seem to be without ("positions",)."""
    return sum(p.numel() for name, p in model.named_parameters() if name not in without)


def train_flops(model):
    """Operations of forward and backward for an image or a text of full context, as nanoGPT counts:
    n (6 N + 12 L n d) for n tokens and N weights in the matrices of the layers and a tied head. A
    causal map counts in full. Not counted: another use of the same D or U, TSSA's products,
    the heads of images."""
    n = model.config.context
    multiply_adds = n * model.embed.weight.numel() if model.config.kind == "text" else 0
    for layer in (*getattr(model, "encoder", model).layers, *getattr(model, "decoder", [])):
        multiply_adds += n * sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        if isinstance(layer.attention, SoftmaxAttention):           # scores and averages
            multiply_adds += 2 * n * n * layer.attention.heads * layer.attention.p
    return 6 * multiply_adds            # each is 2 operations, in 3 passes


# ---- Numbers, printed ---------------------------------------------------------------------------
def print_table(rows):
    """Dicts with the same keys, one a line; a standard error KEY_error follows KEY."""
    def cell(row, key):
        value, extra = row[key], row.get(key + "_error")
        shown = "-" if value is None else str(value)
        if isinstance(value, float):
            shown = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
        return f"{shown} +- {extra:.2g}" if extra and extra > 1e-12 else shown      # of rounding

    keys = [key for key in rows[0] if not key.endswith("_error")]
    lines = [keys] + [[cell(row, key) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths)))
