"""Do the layers raise R - R^c, and what else would?

What layers add to the rate reduction R - R^c at the norm of their input, trained and at random
weights, if 1, 4, 16 or 64 samples are coded as one set: `first` the first layer, `layers` all
others, with `R` and `Rc` alone. Centred: of the set's tokens minus their mean, which ISTA moves,
since its output has no entries below 0. The layers after the first have controls:

    turned        the layer's step turned by a random rotation, at the same angle to the tokens of
                  the set, which are taken for one vector
    sparse        the same with as many nonzero entries in each token as the layer's output has,
                  none below 0; of a transformer, whose output is dense, `turned` again
    heads         R^c of random subspaces that have the sum of U_k U_k^* in common with the learned
    elsewhere     R^c of random orthogonal subspaces that fill the space

    python -m experiments.objective --csv=a.csv         # objective.csv also has --seed=1, 2 and 3
"""
import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from experiments import shared
from flags import option, parse, UserError
from measure import at_norm, traces, unit_size
from model import coding_rate, subspace_coding_rate
from processes import cli

TOGETHER = 1, 4, 16, 64      # samples coded together


@dataclass(kw_only=True)
class Objective(shared.Flags):
    untrained: bool = option(True, "each a second time, with random weights")
    samples: int = option(64, "images or windows of text, a multiple of 64", low=64)
    batch_size: int = option(64, "samples at once, a multiple of 64", low=64)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)


def cosine(T, Z):
    """Of each set of tokens T (B, n, d) with that of Z: (B, 1, 1)."""
    return F.cosine_similarity(T.flatten(1), Z.flatten(1))[:, None, None]


def turned(Z, out, rotation, cos=None):
    """Tokens of the norm of Z (B, n, d), at the angle to Z that `out` has, or of another cosine, in
    a random direction."""
    step, cos = (out - Z) @ rotation, cosine(out, Z) if cos is None else cos
    across = step - (Z * step).sum((1, 2), keepdim=True) / Z.square().sum((1, 2), keepdim=True) * Z
    return cos * Z + (1 - cos ** 2).clamp_min(0).sqrt() * at_norm(across, Z)


def sparse(Z, out, rotation):
    """The same with at most as many entries above 0 in each token as `out` has, and none below: a
    ReLU, of whose entries the largest stay, of tokens at another angle, found by bisection."""
    kept = (out > 0).sum(-1, keepdim=True)

    def at(cos):
        T = F.relu(turned(Z, out, rotation, cos))
        rank = T.argsort(-1, descending=True).argsort(-1)
        return at_norm(T * (rank < kept), Z)
    low, high = -torch.ones_like(cosine(out, Z)), torch.ones_like(cosine(out, Z))
    for _ in range(20):
        middle = (low + high) / 2
        wide = cosine(at(middle), Z) < cosine(out, Z)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return at(high)


def random_heads(U, rotation):
    """Subspaces (K, d, p) with the sum of U_k U_k^* in common with U: [U_1 .. U_K] turned."""
    K, d, p = U.shape
    return (U.transpose(0, 1).flatten(1) @ rotation).view(d, K, p).transpose(0, 1)


def added(traced, together, centred, seed, eps):
    """{column: (L,), what each of the traced layers adds} at the norm of its input, in nats, of
    `together` samples' tokens as one set, or of these minus their mean (centred)."""
    rows = []
    for layer, trace in traced:
        generator = torch.Generator().manual_seed(seed)
        U = unit_size(layer.attention.bases().double())
        K, d, p = U.shape
        V = shared.random_subspaces(d, K, generator).to(U)
        mixed = random_heads(U, shared.random_rotation(K * p, generator).to(U))
        rotation = shared.random_rotation(d, generator).to(U)
        Z, out = shared.one_set(trace.tokens, together), shared.one_set(trace.out, together)
        same_zeros = (sparse if out.min() >= 0 else turned)(Z, out, rotation)
        if centred:
            Z, out, same_zeros = (T - T.mean(1, keepdim=True) for T in (Z, out, same_zeros))
        out, same_zeros = at_norm(out, Z), at_norm(same_zeros, Z)
        other = turned(Z, out, rotation)

        def R(T):
            return (coding_rate(T, eps) - coding_rate(Z, eps)).mean()

        def Rc(T, subspaces=U):
            before = subspace_coding_rate(Z, subspaces, eps)
            return (subspace_coding_rate(T, subspaces, eps) - before).mean()
        R_out, Rc_out = R(out), Rc(out)
        rows.append(dict(layers=R_out - Rc_out, R=R_out, Rc=Rc_out, turned=R(other) - Rc(other),
                         sparse=R(same_zeros) - Rc(same_zeros), heads=R_out - Rc(out, mixed),
                         elsewhere=R_out - Rc(out, V)))
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@torch.no_grad()
def rows_of(loaded, c):
    """What the layers of a model add, nats: a row for each number of samples, centred or not."""
    batches, rows = [*traces(loaded, c)], []
    for together, centred in itertools.product(TOGETHER, (False, True)):
        parts = [added(traced, together, centred, c.seed, c.eps) for traced in batches]
        changes = {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
        row = dict(together=together, centred=centred, seed=c.seed,
                   first=changes["layers"][0].item())
        rows.append(row | {name: change[1:].sum().item() for name, change in changes.items()})
    return rows


def main(argv):
    """The rows of --csv."""
    c = parse(Objective, argv, __doc__)
    if c.samples % TOGETHER[-1] or c.batch_size % TOGETHER[-1]:
        raise UserError(f"--samples and --batch_size are multiples of {TOGETHER[-1]}")
    return shared.report(c, rows_of)


if __name__ == "__main__":
    cli(main)
