"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(LN(Z)), Eq. (45), from a gradient step on R^c(Z | U), Eq. (31)-(34).
R^c falls with the length of tokens alone, and as they draw together on one vector. So it is that of
tokens less their mean (--uncentered: as they are), and after a step they are scaled to the norm
before it. Norm 1 is theirs, ||Z||. R^c also falls as tokens leave what U sees: norm 2 is that of
their projections, (sum_k ||U_k^* Z||^2)^1/2. With U_k that fill the space orthogonally the two are
one. U is at unit size. Every step has attention's length, without what moves the mean:

    attention    MSSA(LN(Z)); before is R^c before it
    swapped      attention with the map of another sample
    others       each token gives itself no weight (a first token of text, which has none: all)
    alone        the map is I: each token attends to itself alone
    rotated      attention, turned by a random rotation, as if its output were not learned
    reversed     attention with the opposite sign
    derived      -X + sum_k U_k SSA(X | U_k), X = LN(Z): Eq. (34), beta kappa = 1, no beta in (36)
    derived_swapped    derived with the map of another sample
    shrinking    -sum_k U_k U_k^* X, the first term of Eq. (33), which compares no tokens
    gradient     -grad R^c, Eq. (31)
    common       one vector for all tokens, with equal entries (--uncentered alone)
    noise        Gaussian
    elsewhere    what attention does to the R^c of random orthogonal subspaces that fill the space

The first two tables have what each step adds to R^c, in nats, by layer and in all, by norm 1 and
by norm 2. The third has the length of attention in units of the tokens' norm, and the cosine of
each step with -grad R^c, of both without the part along Z, which changes length alone. +- is the
standard error over samples, or over checkpoints of a config.

    python -m experiments.compression --figure=docs/figures/compression.png \\
        --ckpt=pretrained:shapes-crate,pretrained:cifar10-crate,pretrained:pydoc-crate

Verdict (2026-11-28): in four of five models attention lowers R^c, but that says little about what
it learned: reversed lowers it 0.2 to 0.5 times as far, rotated 0.5 to 0.6, alone 1.0 to 2.3. By
norm 2 attention lowers it on pictures, as its reverse does, and raises it on text; derived lowers
it in all five, but nearly as far with another map. Cosines of attention with -grad R^c are -0.05
to 0.09 in all 32 layers.
"""
from dataclasses import dataclass, MISSING

import torch
from torch.nn import functional as F

from analyze import at_norm, step_with, unit_size
from evaluate import batches, each_model, SampleFlags
from experiments.shared import random_subspaces, title_of
from figures import new_figure, print_table
from flags import option, parse, UserError
from model import SoftmaxAttention, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli


@dataclass(kw_only=True)
class Compression(SampleFlags):
    ckpt: str = option(MISSING, "checkpoints, separated by commas")
    samples: int = option(100, "images or sequences, spread over the split", low=2)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)
    uncentered: bool = option(False, "rates of the tokens as they are, not less their mean")
    batch_size: int = option(20, "samples at once", low=1)
    figure: str | None = option(None, "a .png of the changes of trained models; none: no figure")


def tangent(T, Z):
    """T (B, n, d) without its part along each sample of Z, which changes the norm alone."""
    return T - (T * Z).sum((1, 2), keepdim=True) / Z.square().sum((1, 2), keepdim=True) * Z


def seen_by(U, Z):
    """(sum_k ||U_k^* z_i||^2 over all tokens)^1/2 of each sample of Z (B, n, d): (B, 1, 1)."""
    return (Z[:, None] @ U).square().sum((1, 2, 3)).sqrt().view(-1, 1, 1)


def steps(layer, Z, generator):
    """{name: what it adds to Z (B, n, d)}, at a length of its own: the steps of the docstring but
    the gradient."""
    X, U, (n, d) = layer.norm1(Z), unit_size(layer.attention.bases()), Z.shape[1:]
    A, identity = layer.attention.map(X), torch.eye(n).to(Z)
    others = A * (1 - identity)
    sums = others.sum(-1, keepdim=True)
    maps = dict(swapped=A.roll(1, 0), others=torch.where(sums > 0, others / sums, identity),
                alone=identity)
    by_maps = {name: step_with(layer, Z, lambda values: M @ values) for name, M in maps.items()}
    attention, w = layer.compress(Z) - Z, X[:, None] @ U            # w (B, K, n, p)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=Z.dtype))[0]
    return dict(attention=attention) | by_maps | dict(
        rotated=attention @ rotation, reversed=-attention,
        derived=(A @ w @ U.mT).sum(1) - X,
        derived_swapped=(maps["swapped"] @ w @ U.mT).sum(1) - X, shrinking=-(w @ U.mT).sum(1),
        noise=torch.randn(Z.shape, generator=generator, dtype=Z.dtype))


def changes(layer, Z, generator, eps=0.1, uncentered=False):
    """({step: what it adds to R^c by norm 1, (B,)}, the same by norm 2, {step: its cosine with
    -grad R^c}) for Z (B, n, d); in the third `length` is attention's, in units of the tokens'."""
    def centered(T):
        return T if uncentered else T - T.mean(1, keepdim=True)

    U = unit_size(layer.attention.bases())
    V = random_subspaces(*U.shape[1::-1], generator)
    added = {name: centered(step) for name, step in steps(layer, Z, generator).items()}
    Z = centered(Z)
    added["gradient"] = centered(-subspace_coding_rate_grad(Z, U, eps))
    if uncentered:
        added["common"] = torch.ones_like(Z)
    before, downhill = subspace_coding_rate(Z, U, eps), tangent(added["gradient"], Z).flatten(1)
    length = added["attention"].norm(dim=(1, 2)) / Z.norm(dim=(1, 2))
    by_norm, cosine = (dict(before=before), dict(before=before)), dict(length=length)
    for name, step in added.items():
        cosine[name] = F.cosine_similarity(tangent(step, Z).flatten(1), downhill)
        moved = Z + at_norm(step, added["attention"])
        scaled = at_norm(moved, Z), moved * seen_by(U, Z) / seen_by(U, moved)
        for change, after in zip(by_norm, scaled):
            change[name] = subspace_coding_rate(after, U, eps) - before
            if name == "attention":
                change["elsewhere"] = (subspace_coding_rate(after, V, eps)
                                       - subspace_coding_rate(Z, V, eps))
    return *by_norm, cosine


@torch.no_grad()
def measured(loaded, c):
    """What `changes` returns, but (L, N) of N samples in L layers. In float64."""
    backbone = loaded.backbone.cpu().double()
    if not isinstance(backbone.layers[0].attention, SoftmaxAttention):
        raise UserError(f"{backbone.config.arch} has no softmax, which the controls replace")
    generator, found = torch.Generator().manual_seed(c.seed), []
    for _, x in batches(loaded, c):
        traces = backbone.trace(x.double() if x.is_floating_point() else x)
        found.append([changes(layer, trace.tokens, generator, c.eps, c.uncentered)
                      for layer, trace in zip(backbone.layers, traces)])
    return tuple({name: torch.stack([torch.cat([batch[l][table][name] for batch in found])
                                     for l in range(len(backbone.layers))])
                  for name in found[0][0][table]} for table in (0, 1, 2))


def summary(values):
    """{name: mean, name_error: standard error} of values {name: (N,)}."""
    return {key: number for name, each in values.items() for key, number in (
        (name, each.mean().item()), (f"{name}_error", (each.std() / len(each) ** 0.5).item()))}


def measure(c):
    """[{"names", "untrained", "norm 1", "norm 2", "cosines"}, ...], one for the checkpoints of one
    config; the tables have a row for each layer, and those by norm one for all, the last."""
    runs = {}
    for path, untrained, loaded in each_model(c):
        key = untrained, repr((loaded.meta.get("name"), loaded.model.config))
        run = runs.setdefault(key, dict(names=[], untrained=untrained, each=[]))
        run["names"].append(path)
        run["each"].append(measured(loaded, c))
    for run in runs.values():
        several = len(run["names"]) > 1         # then a checkpoint's mean is one of N values
        for name, tables in zip(("norm 1", "norm 2", "cosines"), zip(*run.pop("each"))):
            found = {step: torch.stack([table[step].mean(1) for table in tables], 1) if several
                     else values for step, values in tables[0].items()}
            rows = [(l + 1, {step: values[l] for step, values in found.items()})
                    for l in range(len(found["attention"]))]
            if name != "cosines":
                rows.append(("all", {step: values.sum(0) for step, values in found.items()}))
            run[name] = [dict(layer=l) | summary(values) for l, values in rows]
    return [*runs.values()]


def show(run, c):
    """Prints the tables of checkpoints of one config."""
    print(f"{', '.join(run['names'])}{', untrained' * run['untrained']}: {c.samples} samples of "
          f"{c.split}, eps {c.eps:g}{', uncentered' * c.uncentered}")
    for name in ("norm 1", "norm 2"):
        print(f"change of R^c by {name}")
        print_table(run[name])
    print("length of attention in units of the tokens' norm; cosine of steps with -grad R^c")
    print_table(run["cosines"])


def draw(runs, path):
    """What each step adds to R^c in all layers, in % of R^c before it: a panel for each norm, both
    at one scale, a mark for each trained model, filled for the fourth and fifth."""
    steps = dict(attention="attention", swapped="swapped: another sample's map",
                 others="others: no weight on itself", alone="alone: each token by itself",
                 rotated="rotated at random", reversed="reversed", derived="derived: Eq. (34)",
                 derived_swapped="derived and swapped", elsewhere="elsewhere: random subspaces")
    figure, (axes,) = new_figure(1, 2, 4, 4.3)
    trained = [run for run in runs if not run["untrained"]]
    for ax, norm, of in zip(axes, ("norm 1", "norm 2"), ("the tokens", "their projections")):
        ax.axvline(0, color="black", lw=0.8)
        for place, (run, mark) in enumerate(zip(trained, "os^Dv")):
            last, fill = run[norm][-1], {} if place > 2 else dict(mfc="white")
            x = [100 * last[step] / last["before"] for step in steps]
            y = [row + 0.19 * (place - 2) for row in range(len(steps))]
            ax.plot(x, y, mark, color="0.3", ms=4.5, **fill,
                    label=title_of(run["names"][0]).replace("\n", " "))
            ax.plot(x[0], y[0], mark, color="C0", ms=4.5, **fill)
        for row in range(len(steps) + 1):
            ax.axhline(row - 0.5, color="0.85", lw=0.6, zorder=0)
        ax.set_title(f"{norm}: of {of}", fontsize="medium")
        ax.set(xlabel="change of $R^c$, %", ylim=(len(steps) - 0.5, -0.5))
        ax.set_yticks(range(len(steps)), steps.values())
        ax.tick_params(left=False, labelleft=ax is axes[0])
        ax.locator_params(axis="x", nbins=7, steps=(5, 10))
        ax.spines[["top", "right", "left"]].set_visible(False)
    limits = [ax.get_xlim() for ax in axes]
    axes[0].get_gridspec().set_width_ratios([high - low for low, high in limits])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
                  frameon=False, columnspacing=1, handletextpad=0)
    figure.savefig(path, dpi=200)


def main(argv):
    """What `measure` returns."""
    c = parse(Compression, argv, __doc__)
    runs = measure(c)
    for run in runs:
        show(run, c)
    if c.figure:
        draw(runs, c.figure)
        print(f"wrote {c.figure}")
    return runs


if __name__ == "__main__":
    cli(main)
