"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(LN(Z)), Eq. (45), from a gradient step on R^c(Z | U), Eq. (31)-(34).
R^c falls with the length of tokens alone, and as they draw together on one vector. So it is that of
tokens less their mean (--uncentered: as they are), and after a step they are scaled to the norm
before it. It also falls as tokens leave what U sees: --seen scales them to the norm before of their
projections, (sum_k ||U_k^* Z||^2)^1/2, in place of ||Z||. With U_k that fill the space orthogonally
the two are one. U is at unit size. Every step has attention's length, without what moves the mean:

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

The first table has what each step adds to R^c, in nats, by layer and in all. The second has the
length of attention in units of the tokens' norm, and the cosine of each step with -grad R^c, of
both without the part along Z, which changes length alone. +- is the standard error over samples,
or over checkpoints of a config.

    python -m experiments.compression --figure=docs/figures/compression.png \\
        --ckpt=pretrained:shapes-crate,pretrained:cifar10-crate,pretrained:pydoc-crate

Verdict (2026-11-28): in four of five models attention lowers R^c, but that says little about what
it learned: reversed lowers it 0.2 to 0.5 times as far, rotated 0.5 to 0.6, alone 1.0 to 2.3. With
--seen attention lowers it on pictures, as its reverse does, and raises it on text; derived lowers
it in all five, but nearly as far with another map. Cosines of attention with -grad R^c are -0.05
to 0.09 in all 32 layers.
"""
from dataclasses import dataclass, MISSING

import torch
from torch.nn import functional as F

from analyze import at_norm, step_with, unit_size
from evaluate import batches, each_model, SampleFlags
from experiments.shared import random_subspaces, title_of
from figures import legend_below, new_figure, print_table
from flags import option, parse, UserError
from model import SoftmaxAttention, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli


@dataclass(kw_only=True)
class Compression(SampleFlags):
    ckpt: str = option(MISSING, "checkpoints, separated by commas")
    samples: int = option(100, "images or sequences, spread over the split", low=2)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)
    uncentered: bool = option(False, "rates of the tokens as they are, not less their mean")
    seen: bool = option(False, "scale to the norm that U sees, not to that of the tokens")
    batch_size: int = option(20, "samples at once", low=1)
    figure: str | None = option(None, "a .png of what all layers add to R^c; none: no figure")


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


def changes(layer, Z, generator, eps=0.1, uncentered=False, seen=False):
    """({step: what it adds to R^c, (B,)}, {step: its cosine with -grad R^c}) for Z (B, n, d);
    in the second `length` is attention's, in units of the tokens' norm."""
    def centered(T):
        return T if uncentered else T - T.mean(1, keepdim=True)

    def moved(step):
        """Z after a step of attention's length, at the scale of Z."""
        after = Z + at_norm(step, added["attention"])
        return after * seen_by(U, Z) / seen_by(U, after) if seen else at_norm(after, Z)

    U = unit_size(layer.attention.bases())
    V = random_subspaces(*U.shape[1::-1], generator)
    added = {name: centered(step) for name, step in steps(layer, Z, generator).items()}
    Z = centered(Z)
    added["gradient"] = centered(-subspace_coding_rate_grad(Z, U, eps))
    if uncentered:
        added["common"] = torch.ones_like(Z)
    before, downhill = subspace_coding_rate(Z, U, eps), tangent(added["gradient"], Z).flatten(1)
    length = added["attention"].norm(dim=(1, 2)) / Z.norm(dim=(1, 2))
    change, cosine = dict(before=before), dict(length=length)
    for name, step in added.items():
        after = moved(step)
        change[name] = subspace_coding_rate(after, U, eps) - before
        cosine[name] = F.cosine_similarity(tangent(step, Z).flatten(1), downhill)
        if name == "attention":
            change["elsewhere"] = (subspace_coding_rate(after, V, eps)
                                   - subspace_coding_rate(Z, V, eps))
    return change, cosine


@torch.no_grad()
def measured(loaded, c):
    """({step: changes}, {step: cosines}), each (L, N) of N samples in L layers. In float64."""
    backbone = loaded.backbone.cpu().double()
    if not isinstance(backbone.layers[0].attention, SoftmaxAttention):
        raise UserError(f"{backbone.config.arch} has no softmax, which the controls replace")
    generator, found = torch.Generator().manual_seed(c.seed), []
    for _, x in batches(loaded, c):
        traces = backbone.trace(x.double() if x.is_floating_point() else x)
        found.append([changes(layer, trace.tokens, generator, c.eps, c.uncentered, c.seen)
                      for layer, trace in zip(backbone.layers, traces)])
    return tuple({name: torch.stack([torch.cat([batch[l][table][name] for batch in found])
                                     for l in range(len(backbone.layers))])
                  for name in found[0][0][table]} for table in (0, 1))


def summary(values):
    """{name: mean, name_error: standard error} of values {name: (N,)}."""
    return {key: number for name, each in values.items() for key, number in (
        (name, each.mean().item()), (f"{name}_error", (each.std() / len(each) ** 0.5).item()))}


def measure(c):
    """[{"names", "untrained", "changes", "cosines"}, ...], one for the checkpoints of one config;
    the tables have a row for each layer, and changes one for all, the last."""
    runs = {}
    for path, untrained, loaded in each_model(c):
        key = untrained, repr((loaded.meta.get("name"), loaded.model.config))
        run = runs.setdefault(key, dict(names=[], untrained=untrained, each=[]))
        run["names"].append(path)
        run["each"].append(measured(loaded, c))
    for run in runs.values():
        several = len(run["names"]) > 1         # then a checkpoint's mean is one of N values
        run["changes"], run["cosines"] = (
            {name: torch.stack([values[name].mean(1) for values in tables], 1) if several
             else tables[0][name] for name in tables[0]} for tables in zip(*run.pop("each")))
        rows = [("all", {name: values.sum(0) for name, values in run["changes"].items()})]
        for table in ("changes", "cosines"):
            by_layer = [(l + 1, {name: values[l] for name, values in run[table].items()})
                        for l in range(len(run[table]["attention"]))]
            run[table] = [dict(layer=l) | summary(values)
                          for l, values in by_layer + rows * (table == "changes")]
    return [*runs.values()]


def show(run, c):
    """Prints the tables of checkpoints of one config."""
    print(f"{', '.join(run['names'])}{', untrained' * run['untrained']}: {c.samples} samples of "
          f"{c.split}, eps {c.eps:g}{', uncentered' * c.uncentered}{', seen' * c.seen}")
    print("change of R^c")
    print_table(run["changes"])
    print("length of attention in units of the tokens' norm; cosine of steps with -grad R^c")
    print_table(run["cosines"])


def draw(runs, path):
    """How far each step lowers R^c in all layers, in units of attention: a mark for each trained
    model in which attention lowers it."""
    steps = dict(elsewhere="elsewhere: on random subspaces", derived="derived: Eq. (34)",
                 reversed="reversed", rotated="rotated at random",
                 alone="alone: each token by itself", others="others: no weight on itself",
                 swapped="swapped: map of another sample")
    figure, ((ax,),) = new_figure(1, 1, 7, 2.9)
    ax.margins(y=0.12)
    ax.axvline(1, color="C0")
    ax.axvline(0, color="black", lw=0.8)
    ax.annotate("attention", (1, 1), xycoords=("data", "axes fraction"), color="C0", ha="center",
                va="bottom")
    lowered = [run for run in runs if not run["untrained"] and run["changes"][-1]["attention"] < 0]
    for run, mark in zip(lowered, "os^D"):
        last = run["changes"][-1]
        ax.plot([last[name] / last["attention"] for name in steps], list(steps.values()), mark,
                color="0.3", mfc="none", label=title_of(run["names"][0]).replace("\n", " "))
    ax.set_xlabel("how far $R^c$ falls, in units of attention's")
    ax.spines[["top", "right", "left"]].set_visible(False)
    legend_below(figure, ax)
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
