"""What the layers of a checkpoint do to samples of its data: traces, and rates at one scale."""
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from data import images, text
from flags import UserError
from model import coding_rate, sparse_rate_reduction, subspace_coding_rate
from processes import with_bar


# ---- Samples ------------------------------------------------------------------------------------
def spread(total, n):
    """n indices spread evenly over 0 .. total - 1: some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def traces(loaded, c):
    """Yields (which samples, [(layer, its LayerTrace) ...]) for each batch of `inputs`."""
    backbone = loaded.backbone
    for index, x in inputs(loaded, c):
        yield index, [*zip(backbone.layers, backbone.trace(x))]


def inputs(loaded, c):
    """Yields (which images of the split (B,), or which tokens (B, n); the backbone's input), batch
    by batch, for c.samples images or windows of text, spread over the split. Images have the type
    of the weights; nothing is masked."""
    config, weight = loaded.model.config, next(loaded.model.parameters())
    if loaded.task == "gpt":
        tokens = text.tokens_for(c.data, c.split, loaded.meta, c.data_dir)[2]
        n = min(config.context, len(tokens))
        samples = tokens[:len(tokens) // n * n].reshape(-1, n)
    else:
        data, samples = images.split_for(loaded, c)
    for index in with_bar(spread(len(samples), c.samples).split(c.batch_size), "samples"):
        if loaded.task == "gpt":
            ids = torch.from_numpy(samples[index.numpy()].astype(np.int64)).to(weight.device)
            yield ids, ids
        else:
            x = images.model_input(samples.batch(index)[0], data, config.image_size)
            yield index, x.to(weight.dtype)


def saliency(attention, query="class"):
    """The weights that an attention map (B, K, 1 + n, 1 + n) gives the patches, (B, K, n): in the
    class token's row, below [B] Eq. (7.2.41), or ("mean", for a mean-pooled head) on average over
    the patches' rows. TSSA has memberships Pi (B, K, 1 + n) instead."""
    if attention.ndim == 3:
        return attention[..., 1:]
    return attention[:, :, 0, 1:] if query == "class" else attention[:, :, 1:, 1:].mean(2)


# ---- Rates --------------------------------------------------------------------------------------
def at_norm(Z, other):
    """Each sample of Z (..., n, d), scaled to the norm of that of `other`."""
    return Z * (other.norm(dim=(-2, -1)) / Z.norm(dim=(-2, -1)))[..., None, None]


def normed(Z):
    """Tokens (..., n, d) less their mean, after a LayerNorm without gain and bias: much as the next
    step reads them. Longer tokens alone have a higher rate, and those to which one vector is added
    a lower one after a LayerNorm."""
    return F.layer_norm(Z - Z.mean(-2, keepdim=True), Z.shape[-1:])


def unit_size(U):
    """U (K, d, p) times the number that makes ||U||_F^2 = K p, as orthonormal bases have it."""
    return U * (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()


def lasso(A, X, D, lambd):
    """(lambda ||A||_1, 1/2 ||X - D A||_F^2), the terms of [J] Eq. (41), (B,) each. A (B, n, m),
    X (B, n, d), D (d, m)."""
    return lambd * A.abs().sum((1, 2)), (X - A @ D.mT).square().sum((1, 2)) / 2


def one_set(T, together):
    """The tokens T (B, n, d) of `together` samples as one set: (B / together, together n, d)."""
    if len(T) % together:
        raise UserError(f"{len(T)} samples at once are no multiple of {together} coded together")
    return T.double().unflatten(0, (-1, together)).flatten(1, 2)


def layer_numbers(layer, trace, eps=0.1, lambd=0.1, together=1):
    """{column of `layers`: a number for each set of tokens} of a layer that made `trace`. In
    float64, as float32 may give NaN."""
    U = unit_size(layer.attention.bases().double())
    Z, half, out, X = (one_set(T, together) for T in (
        trace.tokens, trace.half, trace.out, layer.norm1(trace.tokens)))

    rate = partial(subspace_coding_rate, U=U, eps=eps)
    objective = partial(sparse_rate_reduction, U=U, eps=eps, lambd=lambd)
    scaled = at_norm(out, Z)
    R_change = coding_rate(scaled, eps) - coding_rate(Z, eps)
    return dict(
        Rc_tokens=coding_rate(F.normalize(X[:, None] @ U, dim=-1), eps).sum(1),
        attention_Rc=rate(half) - rate(Z),
        attention_Rc_normed=rate(normed(half)) - rate(normed(Z)),
        R_change=R_change, gain=R_change - (rate(scaled) - rate(Z)),
        R=coding_rate(out, eps), Rc=rate(out), nonzeros=(out != 0).double().mean((1, 2)),
        objective=objective(out), rise=objective(out) - objective(Z))
