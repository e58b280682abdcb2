"""Does a step Z + MSSA(Z) lower R^c on random tokens?

[S] found that it raises R^c and that Z - MSSA(Z) lowers it. Here every form of the step starts at
random tokens and subspaces: as it is, and scaled back, as longer tokens alone raise R^c.

    python -m experiments.random_tokens
"""
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from experiments.shared import random_subspaces
from flags import option, parse
from measure import at_norm, print_table
from model import mssa, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli


@dataclass(kw_only=True)
class RandomTokens:
    seed: int = option(0, "draws the tokens and the subspaces", low=0)


def directions(Z, U, eps):
    """What a step of 1 / beta adds to Z (n, d), by the update's name."""
    beta = U.shape[-1] / (len(Z) * eps ** 2)        # p / (n eps^2)
    attention = beta * mssa(Z, U)
    return {
        "+ MSSA, Eq. (45), CRATE-C": attention,
        "- MSSA, CRATE-N": -attention,
        "shrunk by MSSA's length": -at_norm(Z, attention),
        "shrunk + MSSA, Eq. (34)": attention - Z,
        "shrunk alone": -Z,
        "two terms of the gradient, (33)": -subspace_coding_rate_grad(Z, U, eps, True) / beta,
        "the gradient, (31)": -subspace_coding_rate_grad(Z, U, eps) / beta}


def random_tokens(seed, d=64, K=8, n=64, eps=0.5, step=0.1):
    """A row for each update: the change of R^c by one step of beta kappa = 0.1, and the same at the
    norm of Z, on tokens as after a LayerNorm and on two sizes of smaller ones."""
    generator = torch.Generator().manual_seed(seed)
    U = random_subspaces(d, K, generator)
    Z = torch.randn(n, d, generator=generator, dtype=torch.float64)
    Z = F.normalize(Z, dim=-1) * d ** 0.5
    # the largest beta ||U_k^* Z||^2, a spectral norm: below 1 the Neumann series (32) converges
    after_norm = (d / K / (n * eps ** 2) * torch.linalg.matrix_norm(Z @ U, 2).max() ** 2).item()
    rows = {}
    for ratio in (0.5, 2.0, after_norm):
        start = Z * (ratio / after_norm) ** 0.5
        before = subspace_coding_rate(start, U, eps)
        for name, direction in directions(start, U, eps).items():
            after, row = start + step * direction, rows.setdefault(name, dict(update=name))
            for key, tokens in (("", after), (", equal norm", at_norm(after, start))):
                change = subspace_coding_rate(tokens, U, eps) - before
                row[f"{ratio:.3g}{key}"] = round(change.item(), 5)
    return [*rows.values()]


def main(argv):
    """The rows of random_tokens."""
    c = parse(RandomTokens, argv, __doc__)
    rows = random_tokens(c.seed)
    print("change of R^c by one step on random tokens, by their beta ||U_k^* Z||^2, nats")
    print_table(rows)
    return rows


if __name__ == "__main__":
    cli(main)
