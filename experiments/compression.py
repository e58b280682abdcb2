"""Does the MSSA step lower R^c?

[J] derives a gradient step on R^c(Z | U), Eq. (31)-(36); a layer, Eq. (45), drops its shrinkage of
Z. [S] tests that. Here five updates are iterated on random tokens and subspaces; step = beta kappa.

    mssa, negative   Z +- step beta [U_1 .. U_K] stack_k SSA(Z | U_k)       [J] Eq. (45), (36), [S]
    shrunk           (1 - step) Z + step beta [U_1 .. U_K] stack_k SSA      [J] Eq. (34)
    neumann, exact   Z - step / beta grad R^c, approximate or exact         [J] Eq. (33), (31)

On small tokens, where the Neumann series converges (beta ||U_k^* Z||^2 < 1), and on larger ones.

    python -m experiments.compression

Verdict (2026-11-21): with Eq. (34)'s shrinkage of Z it does. +MSSA alone (CRATE-C) raises R^c on
small and on large tokens, as [S] found; -MSSA lowers it a little, the exact gradient much more.
MSSA ascends the second Taylor term, which R^c subtracts; on small tokens it raises the first, which
R^c adds, by more. After a LayerNorm beta ||U_k^* Z||^2 is 57.6: there the series diverges.
"""
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from figures import new_figure, print_table
from flags import option, parse, ROOT, UserError
from model import mssa, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli

UPDATES = ("mssa", "negative", "shrunk", "neumann", "exact")


@dataclass(kw_only=True)
class Compression:
    width: int = option(64, "d", low=1)
    heads: int = option(8, "K; p = d / K", low=1)
    tokens: int = option(64, "n", low=1)
    eps: float = option(0.5, "distortion of the rates", low=1e-6)
    step: float = option(0.1, "step size times beta; below 2 the exact step lowers R^c", above=0)
    iterations: int = option(30, "how many steps", low=1)
    seed: int = option(0, "draws everything", low=0, high=2 ** 63)
    out: str = option(str(ROOT / "out" / "compression.png"), "the figure")


def random_subspaces(c, generator):
    """K random subspaces of R^d, each orthogonal to the others: bases (K, d, p), float64."""
    if c.heads > c.width:
        raise UserError(f"--heads={c.heads} is more than --width={c.width}")
    p = c.width // c.heads
    A = torch.randn(c.width, c.heads * p, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(A)[0].view(c.width, c.heads, p).transpose(0, 1)


def beta_of(Z, U, eps):
    return U.shape[-1] / (len(Z) * eps ** 2)        # p / (n eps^2)


def series_ratio(Z, U, eps):
    """The largest beta ||U_k^* Z||^2, a spectral norm: the Neumann series converges below 1."""
    return (beta_of(Z, U, eps) * torch.linalg.matrix_norm(Z @ U, 2).max() ** 2).item()


def directions(Z, U, eps):
    """What a step of 1 / beta adds to Z (n, d), by the update's name."""
    beta = beta_of(Z, U, eps)
    attention = beta * mssa(Z, U)
    return dict(mssa=attention, negative=-attention, shrunk=attention - Z,
                neumann=-subspace_coding_rate_grad(Z, U, eps, neumann=True) / beta,
                exact=-subspace_coding_rate_grad(Z, U, eps) / beta)


def taylor_terms(Z, U, eps):
    """beta / 2 sum_k ||U_k^* Z||_F^2 and beta^2 / 4 sum_k ||(U_k^* Z)^* U_k^* Z||_F^2; [S]: their
    difference is a lower bound of R^c."""
    w, beta = Z @ U, beta_of(Z, U, eps)
    gram = w.mT @ w
    return (beta / 2 * w.square().sum()).item(), (beta ** 2 / 4 * gram.square().sum()).item()


def iterate(Z, U, c):
    """{update: R^c over the iterations}, and the Taylor terms along the path of mssa."""
    curves = {name: [] for name in (*UPDATES, "first term", "second term")}
    for name in UPDATES:
        now = Z
        for _ in range(c.iterations + 1):
            curves[name].append(subspace_coding_rate(now, U, c.eps).item())
            if name == "mssa":
                for term, value in zip(("first term", "second term"), taylor_terms(now, U, c.eps)):
                    curves[term].append(value)
            if math.isfinite(curves[name][-1]):         # else it has diverged
                now = now + c.step * directions(now, U, c.eps)[name]
    return curves


def draw(panels, c):
    """R^c over the iterations on small and on large tokens; the Taylor terms on the small ones."""
    figure, (axes,) = new_figure(1, 3, 4.7, 4)
    for ax, (start, curves) in zip(axes, panels):
        for name in UPDATES:
            ax.plot(curves[name], label=name)
        ax.set(title=f"beta ||U_k^* Z||^2 = {start:.3g} at the start", xlabel="iteration",
               ylabel="R^c(Z | U), nats", ylim=(0, 1.2 * max(curves["mssa"])))
    small = {name: torch.tensor(curve) for name, curve in panels[0][1].items()}
    small["first - second"] = small["first term"] - small["second term"]
    for name in ("mssa", "first term", "second term", "first - second"):
        axes[2].plot(small[name], label=name.replace("mssa", "R^c"))
    axes[2].set(title="R^c and Taylor terms along mssa (left)", xlabel="iteration", ylabel="nats")
    for ax in axes:
        ax.legend(fontsize="small")
        ax.grid(alpha=0.3)
    figure.savefig(c.out, dpi=120)


def main(argv):
    """[(beta ||U_k^* Z||^2 at the start, curves) of small tokens, of large ones]."""
    c, _ = parse(Compression, {}, argv, __doc__)
    generator = torch.Generator().manual_seed(c.seed)
    U = random_subspaces(c, generator)
    Z = torch.randn(c.tokens, c.width, generator=generator, dtype=torch.float64)
    Z = F.normalize(Z, dim=-1) * c.width ** 0.5                     # as after a LayerNorm
    after_norm = series_ratio(Z, U, c.eps)

    panels = []
    for target in (0.5, 2.0):           # the series converges, and does not
        start = Z * (target / after_norm) ** 0.5
        panels.append((target, iterate(start, U, c)))
        print(f"beta ||U_k^* Z||^2 = {target:.3g} at the start: R^c, nats; terms along mssa's path")
        print_table([dict(iteration=i) | {name: curve[i] for name, curve in panels[-1][1].items()}
                     for i in range(0, c.iterations + 1, max(1, c.iterations // 10))])
    print(f"after a LayerNorm these tokens have beta ||U_k^* Z||^2 = {after_norm:.3g}")
    Path(c.out).parent.mkdir(parents=True, exist_ok=True)
    draw(panels, c)
    print(f"wrote {c.out}")
    return panels


if __name__ == "__main__":
    cli(main)
