"""Do the layers raise R - R^c, and what else would?

What layers add to the rate reduction R - R^c at the norm of their input, trained and at random
weights, if 1, 4, 16 or 64 samples are coded as one set: `first` the first layer, `layers` all
others, with `R` and `Rc` alone. Centred: of the set's tokens minus their mean. The layers after the
first have controls. Three are steps that end at the same angle to the tokens of the set, which are
taken for one vector, and with as many nonzero entries in each token, none below 0:

    random        in a random direction, the layer's step turned by a rotation
    reversed      in the opposite of the layer's direction
    aimed         along the gradient of R - R^c
    short_*       the layer's step and these three, 1 % as long as the tokens, any zeros
    heads         R^c of random subspaces that have the sum of U_k U_k^* in common with the learned
    elsewhere     R^c of random orthogonal subspaces that fill the space

    python -m experiments.objective --csv=a.csv         # objective.csv also has --seed=1, 2 and 3
"""
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from experiments import shared
from flags import option, parse, UserError
from measure import at_norm, traces, unit_size
from model import coding_rate, sparse_rate_reduction, subspace_coding_rate
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


def along(Z, out, direction):
    """Tokens of the norm of Z (B, n, d), at the angle to Z that `out` has, in another direction. If
    `out` has no entry below 0, they have none, and in each token at most as many above 0: those of
    a ReLU that are largest, at an angle before it that bisection finds."""
    share = (Z * direction).sum((1, 2), keepdim=True) / Z.square().sum((1, 2), keepdim=True)
    across, wanted = at_norm(direction - share * Z, Z), cosine(out, Z)

    def dense(cos):
        return cos * Z + (1 - cos ** 2).clamp_min(0).sqrt() * across

    def sparse(cos):
        T = F.relu(dense(cos))
        least = T.sort(-1, descending=True).values.gather(-1, (kept - 1).clamp_min(0))
        return at_norm(T * ((T >= least) & (kept > 0)), Z)
    if out.min() < 0:
        return dense(wanted)
    kept = (out > 0).sum(-1, keepdim=True)
    low, high = -torch.ones_like(wanted), torch.ones_like(wanted)
    for _ in range(16):
        middle = (low + high) / 2
        wide = cosine(sparse(middle), Z) < wanted
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    return sparse(high)


def uphill(Z, U, eps):
    """The gradient of R - R^c at Z (B, n, d)."""
    with torch.enable_grad():
        Z = Z.detach().requires_grad_()
        return torch.autograd.grad(sparse_rate_reduction(Z, U, eps, lambd=0).sum(), Z)[0]


def random_heads(U, rotation):
    """Subspaces (K, d, p) with the sum of U_k U_k^* in common with U: [U_1 .. U_K] turned."""
    K, d, p = U.shape
    return (U.transpose(0, 1).flatten(1) @ rotation).view(d, K, p).transpose(0, 1)


def added(traced, together, seed, eps):
    """{centred: {column: (L,), what each of the traced layers adds}} at the norm of its input, in
    nats, of `together` samples' tokens as one set."""
    rows = {False: [], True: []}
    for layer, trace in traced:
        generator = torch.Generator().manual_seed(seed)
        U = unit_size(layer.attention.bases().double())
        K, d, p = U.shape
        V = shared.random_subspaces(d, K, generator).to(U)
        mixed = random_heads(U, shared.random_rotation(K * p, generator).to(U))
        rotation = shared.random_rotation(d, generator).to(U)
        start = shared.one_set(trace.tokens, together)
        end = at_norm(shared.one_set(trace.out, together), start)
        directions = dict(random=(end - start) @ rotation, reversed=start - end,
                          aimed=uphill(start, U, eps))
        controls = {name: along(start, end, step) for name, step in directions.items()}
        for name, step in dict(layers=end - start, **directions).items():
            controls[f"short_{name}"] = start + 0.01 * at_norm(step, start)
        for centred, found in rows.items():
            Z = start - start.mean(1, keepdim=True) if centred else start

            def rates(T, subspaces=U):
                """What T adds to R and R^c."""
                T = at_norm(T - T.mean(1, keepdim=True) if centred else T, Z)
                return [(rate(T) - rate(Z)).mean() for rate in (
                    partial(coding_rate, eps=eps),
                    partial(subspace_coding_rate, U=subspaces, eps=eps))]
            R, Rc = rates(end)
            found.append(dict(layers=R - Rc, R=R, Rc=Rc)
                         | {name: torch.sub(*rates(T)) for name, T in controls.items()}
                         | dict(heads=R - rates(end, mixed)[1], elsewhere=R - rates(end, V)[1]))
    return {centred: {name: torch.stack([row[name] for row in found]) for name in found[0]}
            for centred, found in rows.items()}


@torch.no_grad()
def rows_of(loaded, c):
    """What the layers of a model add, nats: a row for each number of samples, centred or not."""
    batches, rows = [*traces(loaded, c)], []
    for together in TOGETHER:
        parts = [added(traced, together, c.seed, c.eps) for traced in batches]
        for centred, names in parts[0].items():
            changes = {name: torch.stack([part[centred][name] for part in parts]).mean(0)
                       for name in names}
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
