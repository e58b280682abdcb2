"""What commands and experiments measure a model with: checkpoints, samples of their data, and what
a layer does to these, at one scale."""
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

from checkpoint import CheckpointFlags, load_model
from data import images, text
from flags import CacheFlags, option, UserError
from model import coding_rate, SoftmaxAttention, sparse_rate_reduction, subspace_coding_rate
from processes import Processes, with_bar


# ---- Opened checkpoints -------------------------------------------------------------------------
@dataclass(kw_only=True)
class DataFlags(CheckpointFlags, CacheFlags):
    data: str | None = option(None, "data set; auto is what the checkpoint was trained on")
    seed: int = option(0, "draws the random weights, and linear's held-out tenth", low=0)


@dataclass(kw_only=True)
class OpenFlags(DataFlags):
    untrained: bool = option(False, "random weights instead (layers, experiments: too)")


def open_model(c, *tasks):
    """(c.ckpt as `Loaded`, on its device, with --untrained at random initialization; Processes).
    A command without --dtype computes in float32."""
    loaded = load_model(c.ckpt, c.heads, tasks, c.seed if c.untrained else None)
    processes = Processes(c.device, getattr(c, "dtype", "float32"))
    loaded.model.to(processes.device)
    return loaded, processes


@dataclass(kw_only=True)
class SampleFlags(OpenFlags):
    split: str = option("val", "which part of it", choices=("train", "val"))


def each_model(c):
    """Yields (path, whether untrained, `Loaded`) for the checkpoints of c.ckpt, which commas
    separate; with c.untrained each of them a second time, with random weights of its own."""
    for i, path in enumerate(c.ckpt.split(",")):
        for untrained in (False, True) if c.untrained else (False,):
            one = replace(c, ckpt=path, seed=c.seed + i, untrained=untrained)
            yield path, untrained, open_model(one)[0]


# ---- Samples of their data ----------------------------------------------------------------------
def spread(total, n):
    """n indices spread evenly over 0 .. total - 1: some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def split_for(loaded, c):
    """(image set, its split on the model's device), to be normalized as in the model's training."""
    data = images.load_for(c.data, loaded.meta, c.data_dir)
    return data, images.Images(getattr(data, c.split), next(loaded.model.parameters()).device)


def batches(loaded, c):
    """Yields (numbers of images (B,) or tokens (B, n), the backbone's input), batch by batch, for
    c.samples images or windows of text, spread over the split. Nothing is masked."""
    config, device = loaded.model.config, next(loaded.model.parameters()).device
    if loaded.task == "gpt":
        tokens = text.tokens_for(c.data, c.split, loaded.meta, c.data_dir)[2]
        n = min(config.context, len(tokens))
        samples = tokens[:len(tokens) // n * n].reshape(-1, n)
    else:
        data, samples = split_for(loaded, c)
    for index in with_bar(spread(len(samples), c.samples).split(c.batch_size), "samples"):
        if loaded.task == "gpt":
            ids = torch.from_numpy(samples[index.numpy()].astype(np.int64)).to(device)
            yield ids, ids
        else:
            yield index, images.model_input(samples.batch(index)[0], data, config.image_size)


# ---- Tokens and steps at one scale --------------------------------------------------------------
def at_norm(Z, other):
    """Each sample of Z (..., n, d), scaled to the norm of that of `other`."""
    return Z * (other.norm(dim=(-2, -1)) / Z.norm(dim=(-2, -1)))[..., None, None]


def unit_size(U):
    """U (K, d, p) times the number that makes ||U||_F^2 = K p, as orthonormal bases have it."""
    return U * (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()


def step_with(layer, Z, attend):
    """What attention adds to Z (B, n, d) if attend(values (B, K, n, p)) takes the place of the
    softmax: of MSSA and MHSA. With --shift a value already has a part of the token before."""
    layer.attention.attend = lambda q, k, v: attend(v)
    try:
        return layer.compress(Z) - Z
    finally:
        del layer.attention.attend          # the class's own is back


def one_set(T, together):
    """The tokens T (B, n, d) of `together` samples as one set: (B / together, together n, d)."""
    if len(T) % together:
        raise UserError(f"--together={together} does not divide a batch of {len(T)}")
    return T.double().unflatten(0, (-1, together)).flatten(1, 2)


def layer_numbers(layer, trace, eps=0.1, lambd=0.1, together=1):
    """{name: a number for each set of tokens}, of a layer that took the steps of `trace`; what they
    are says `analyze.py layers --help`. In float64, as float32 may give NaN."""
    U = unit_size(layer.attention.bases().double())
    X, Z, half, out = (one_set(T, together) for T in (
        layer.norm1(trace.tokens), trace.tokens, trace.half, trace.out))

    def gain(T):
        """R - R^c, at the norm of Z."""
        return sparse_rate_reduction(at_norm(T, Z), U, eps, lambd=0)

    def centered(T):
        return T - T.mean(1, keepdim=True)

    def change_by(step):
        """Of the R^c of Z less its mean, by a step that is added to it."""
        after = at_norm(centered(Z) + step, centered(Z))
        return subspace_coding_rate(after, U, eps) - subspace_coding_rate(centered(Z), U, eps)
    attended = centered(half - Z)
    w = F.normalize(X[:, None] @ U, dim=-1)                                     # (B, K, n, p)
    objective = sparse_rate_reduction(out, U, eps, lambd)
    numbers = dict(
        Rc_tokens=coding_rate(w, eps).sum(-1), Rc_change=change_by(attended),
        R_change=coding_rate(at_norm(out, Z), eps) - coding_rate(Z, eps), gain=gain(out) - gain(Z),
        R=coding_rate(out, eps), Rc=subspace_coding_rate(out, U, eps),
        nonzeros=(out != 0).double().mean((-2, -1)),
        objective=objective, rise=objective - sparse_rate_reduction(Z, U, eps, lambd))
    if isinstance(layer.attention, SoftmaxAttention):
        alone = one_set(step_with(layer, trace.tokens, lambda values: values), together)
        numbers["Rc_alone"] = change_by(at_norm(centered(alone), attended))
    return numbers
