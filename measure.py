"""What the layers of a checkpoint do to samples of a data set, in numbers: used by analyze.py, the
lesson and the experiments."""
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional as F

import evaluate
from checkpoint import CheckpointFlags
from flags import CACHE, option, UserError
from model import coding_rate, SoftmaxAttention, sparse_rate_reduction, subspace_coding_rate
from processes import with_bar


# ---- Checkpoints and samples --------------------------------------------------------------------
@dataclass(kw_only=True)
class SampleFlags(CheckpointFlags):
    data: str | None = option(None, "data set; auto is what the checkpoint was trained on")
    split: str = option("val", "which part of it", choices=("train", "val"))
    untrained: bool = option(False, "random weights instead (layers: beside the trained ones)")
    seed: int = option(0, "draws the random weights", low=0)
    data_dir: str = option(str(CACHE), "where prepared data lies")


def each_model(c):
    """Yields (path, whether untrained, `Loaded`) for the checkpoints of c.ckpt, which commas
    separate; with c.untrained each of them a second time, with random weights of its own."""
    for i, path in enumerate(c.ckpt.split(",")):
        for untrained in (False, True) if c.untrained else (False,):
            one = replace(c, ckpt=path, seed=c.seed + i, untrained=untrained)
            yield path, untrained, evaluate.open_model(one)[0]


def spread(total, n):
    """n indices spread evenly over 0 .. total - 1: some sets are sorted by class."""
    return torch.linspace(0, total - 1, min(n, total), dtype=torch.float64).round().long()


def split_for(loaded, c):
    """(image set, its split on the model's device), to be normalized as in the model's training."""
    data = evaluate.images_for(c.data, loaded.meta, c.data_dir)
    return data, data.on_device(c.split, next(loaded.model.parameters()).device)


def batches(loaded, c):
    """Yields (numbers of images (B,) or tokens (B, n), the backbone's input), batch by batch, for
    c.samples images or windows of text, spread over the split. Nothing is masked."""
    config, device = loaded.model.config, next(loaded.model.parameters()).device
    if loaded.task == "gpt":
        tokens = evaluate.tokens_for(c.data, c.split, loaded.meta, c.data_dir)[2]
        n = min(config.context, len(tokens))
        samples = tokens[:len(tokens) // n * n].reshape(-1, n)
    else:
        data, samples = split_for(loaded, c)
    for index in with_bar(spread(len(samples), c.samples).split(c.batch_size), "samples"):
        if loaded.task == "gpt":
            ids = torch.from_numpy(samples[index.numpy()].astype(np.int64)).to(device)
            yield ids, ids
        else:
            yield index, evaluate.model_input(samples.batch(index)[0], data, config.image_size)


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
    layer.attention.attend = lambda q, k, v: attend(v).transpose(1, 2).flatten(2)
    try:
        return layer.compress(Z) - Z
    finally:
        del layer.attention.attend          # the class's own is back


def in_sets(T, together):
    """T (B, n, d) as sets of the tokens of `together` samples: (B / together, together n, d)."""
    if len(T) % together:
        raise UserError(f"--together={together} does not divide a batch of {len(T)} samples")
    return T.unflatten(0, (-1, together)).flatten(1, 2)


# ---- A layer in numbers -------------------------------------------------------------------------
def layer_numbers(layer, trace, eps=0.1, lambd=0.1, unit_bases=False, together=1):
    """{name: a number for each set of tokens}, of a layer that took the steps of `trace`; what they
    are says `analyze.py layers --help`. Float64, as float32 may give NaN; on the CPU for mps."""
    U = layer.attention.bases().cpu().double()
    U = unit_size(U) if unit_bases else U

    def coded(T):
        return in_sets(T.cpu().double(), together)
    X, Z = coded(layer.norm1(trace.tokens)), coded(trace.tokens)
    half, out = coded(trace.half), coded(trace.out)

    def rates(T):
        """R and R^c, at the norm of Z."""
        T = at_norm(T, Z)
        return coding_rate(T, eps), subspace_coding_rate(T, U, eps)
    (R, Rc), (R_out, Rc_out) = rates(Z), rates(out)
    w = F.normalize(X[:, None] @ U, dim=-1)                                     # (B, K, n, p)
    objective = sparse_rate_reduction(out, U, eps, lambd)
    numbers = dict(
        Rc_tokens=coding_rate(w, eps).sum(-1), Rc_change=rates(half)[1] - Rc,
        R_change=R_out - R, gain=R_out - Rc_out - R + Rc,
        R=coding_rate(out, eps), Rc=subspace_coding_rate(out, U, eps),
        nonzeros=(out != 0).double().mean((-2, -1)),
        objective=objective, rise=objective - sparse_rate_reduction(Z, U, eps, lambd))
    if isinstance(layer.attention, SoftmaxAttention):
        alone = coded(step_with(layer, trace.tokens, lambda values: values))
        numbers["Rc_alone"] = rates(Z + at_norm(alone, half - Z))[1] - Rc
    return numbers
