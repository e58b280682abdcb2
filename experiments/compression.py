"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(LN(Z)), Eq. (45), from a gradient step on R^c(Z | U), Eq. (31)-(34).
R^c falls with the length of tokens alone, and as they draw together on one vector. So it is that of
tokens less their mean, and after a step they are scaled to the norm before it: in the first table
theirs, ||Z||. R^c also falls as tokens leave what U sees: in the second table it is the norm of
their projections, (sum_k ||U_k^* Z||^2)^1/2. With U_k that fill the space orthogonally the two are
one. U is at unit size. Every step has attention's length, without what moves the mean:

    attention    MSSA(LN(Z)); `before` is R^c before it
    as_it_is     the same, but nothing is held: neither mean nor norm; `as_it_was` is R^c before
    swapped      attention with the map of another sample
    alone        each token attends to itself alone, without --shift
    rotated      attention, turned by a random rotation, as if its output were not learned
    reversed     attention with the opposite sign
    derived      -X + sum_k U_k (U_k^* X) A_k, X = LN(Z), A_k its own map: Eq. (34), no beta in (36)
    derived_swapped, derived_alone    derived with the map of another sample, with the map I
    shrinking    -sum_k U_k U_k^* X, the first term of Eq. (33), which compares no tokens
    gradient     -grad R^c, Eq. (31)
    random_subspaces    what attention adds to R^c of random subspaces that fill the space

These tables have what each step adds to R^c, in nats, by layer and in all. The third has the length
of attention in units of the tokens' norm, the cosine of W with U, and that of each step with
-grad R^c, of both without the part along Z, which changes length alone. +- is the standard error
over samples, or over checkpoints of a config. --csv keeps all.

    python -m experiments.compression --untrained --csv=records/compression.csv

Verdict (2026-11-28): as it is, attention raises R^c in four of five models of CRATE. At the tokens'
norm it lowers R^c in four; of that fall 0.2 to 0.5 are left reversed, 0.3 to 0.7 swapped, 1.0 to
2.3 alone. At the projections' norm it lowers R^c on pictures, as its reverse does, and raises it on
text; derived lowers it in all five, but nearly as far swapped.
"""
import csv
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from checkpoint import each_model
from data.samples import batches
from evaluate import alone, at_norm, centered, random_subspaces, rate_change, unit_size
from experiments.shared import FIVE
from figures import new_figure, print_table
from flags import option, parse, SampleFlags, UserError
from model import SoftmaxAttention, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli

TABLES = {"tokens": "change of R^c, the norm of the tokens held",
          "projections": "change of R^c, the norm of their projections held",
          "cosines": "attention's length in units of the tokens' norm; cosines of W with U, and of "
                     "steps with -grad R^c"}


@dataclass(kw_only=True)
class Compression(SampleFlags):
    ckpt: str = option(f"{FIVE},pretrained:cifar10-transformer,pretrained:pydoc-transformer",
                       "checkpoints, separated by commas")
    samples: int = option(40, "images or sequences, spread over the split", low=2)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)
    batch_size: int = option(20, "samples at once", low=1)
    csv: str | None = option(None, "a file for the rows of all tables; none: no file")
    figure: str | None = option(None, "a .png of the changes of the first five; none: no figure")


def tangent(T, Z):
    """T (B, n, d) without its part along each sample of Z, which changes the norm alone."""
    return T - (T * Z).sum((1, 2), keepdim=True) / Z.square().sum((1, 2), keepdim=True) * Z


def seen_by(U, Z):
    """(sum_k ||U_k^* z_i||^2 over all tokens)^1/2 of each sample of Z (B, n, d): (B, 1, 1)."""
    return (Z[:, None] @ U).square().sum((1, 2, 3)).sqrt().view(-1, 1, 1)


def steps(layer, Z, generator):
    """{name: what it adds to Z (B, n, d)}, at a length of its own: the steps of the docstring but
    the gradient."""
    X, U, d = layer.norm1(Z), unit_size(layer.attention.bases()), Z.shape[2]
    A, values = layer.attention.map(X), layer.attention.queries_keys_values(X)[2]
    swapped, attention, w = A.roll(1, 0), layer.attention(X), X[:, None] @ U    # w (B, K, n, p)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=Z.dtype))[0]
    return dict(
        attention=attention, swapped=layer.attention.join(swapped @ values),
        alone=alone(layer.attention, X), rotated=attention @ rotation, reversed=-attention,
        derived=(A @ w @ U.mT).sum(1) - X, derived_swapped=(swapped @ w @ U.mT).sum(1) - X,
        derived_alone=(w @ U.mT).sum(1) - X, shrinking=-(w @ U.mT).sum(1))


def changes(layer, Z, generator, eps=0.1):
    """{(table, step): a number for each sample of Z (B, n, d)}. It is what a step adds to R^c,
    or in `cosines` its cosine with -grad R^c; there `length` is attention's, in units of the
    tokens', and W_U the cosine of a learned W with [U_1 .. U_K]."""
    attention, U = layer.attention, unit_size(layer.attention.bases())
    V = random_subspaces(*U.shape[1::-1], generator)
    added = {name: centered(step) for name, step in steps(layer, Z, generator).items()}
    was, then = (subspace_coding_rate(T, U, eps)
                 for T in (Z, Z + attention(layer.norm1(Z))))
    Z = centered(Z)
    added["gradient"] = centered(-subspace_coding_rate_grad(Z, U, eps))
    before = subspace_coding_rate(Z, U, eps)
    downhill = tangent(added["gradient"], Z).flatten(1)
    numbers = {("cosines", "length"): added["attention"].norm(dim=(1, 2)) / Z.norm(dim=(1, 2))}
    if hasattr(attention, "W"):
        W_U = F.cosine_similarity(attention.W.weight.flatten(), torch.cat([*U], 1).flatten(), 0)
        numbers["cosines", "W_U"] = W_U.expand(len(Z))
    for name, step in added.items():
        numbers["cosines", name] = F.cosine_similarity(tangent(step, Z).flatten(1), downhill)
        step = at_norm(step, added["attention"])
        numbers["tokens", "before"] = numbers["projections", "before"] = before
        numbers["tokens", name] = rate_change(Z, step, U, eps)
        after = (Z + step) * seen_by(U, Z) / seen_by(U, Z + step)
        numbers["projections", name] = subspace_coding_rate(after, U, eps) - before
    numbers |= {("tokens", "as_it_was"): was, ("tokens", "as_it_is"): then - was}
    numbers["tokens", "random_subspaces"] = rate_change(Z, added["attention"], V, eps)
    return numbers


@torch.no_grad()
def measured(loaded, c):
    """What `changes` returns, but (L, N) of N samples in L layers. In float64."""
    loaded.model.cpu().double()
    backbone = loaded.backbone
    if not isinstance(backbone.layers[0].attention, SoftmaxAttention):
        raise UserError(f"{backbone.config.arch} has no softmax, which the controls replace")
    generator, found = torch.Generator().manual_seed(c.seed), []
    for _, x in batches(loaded, c):
        found.append([changes(layer, trace.tokens, generator, c.eps)
                      for layer, trace in zip(backbone.layers, backbone.trace(x))])
    layers = range(len(backbone.layers))
    return {key: torch.stack([torch.cat([batch[l][key] for batch in found]) for l in layers])
            for key in found[0][0]}


def rows_of(found, table):
    """The rows of one table of numbers (L, N): a mean and its standard error for each layer and,
    of what steps add, for the sum over all layers."""
    values = {step: each for (name, step), each in found.items() if name == table}
    L = len(values["attention"])
    rows = [dict(layer=l) for l in range(1, L + 1)] + [dict(layer="all")] * (table != "cosines")
    for step, each in values.items():
        for row, numbers in zip(rows, [*each, each.sum(0)]):
            row[step] = numbers.mean().item()
            row[f"{step}_error"] = (numbers.std() / len(numbers) ** 0.5).item()
    return rows


def measure(c):
    """[{"names", "untrained", and the rows of each of TABLES}, ...], one for the checkpoints of one
    config; of several checkpoints each one's mean is one of the N numbers."""
    runs = {}
    for loaded in each_model(c):
        key = loaded.untrained, repr((loaded.meta.get("name"), loaded.model.config))
        run = runs.setdefault(key, dict(names=[], untrained=loaded.untrained, each=[]))
        run["names"].append(loaded.name)
        run["each"].append(measured(loaded, c))
    for run in runs.values():
        first, *others = run.pop("each")
        found = {key: torch.stack([one[key].mean(1) for one in (first, *others)], 1)
                 for key in first} if others else first
        run |= {table: rows_of(found, table) for table in TABLES}
    return [*runs.values()]


def show(run, c):
    """Prints the tables of checkpoints of one config."""
    print(f"{'; '.join(run['names'])}: {c.samples} samples of {c.split}, eps {c.eps:g}")
    for table, words in TABLES.items():
        print(words)
        print_table(run[table])


def keep(runs, path):
    """Writes the rows of all tables, four digits of each number."""
    rows = [dict(models="; ".join(run["names"]), table=table) | row
            for run in runs for table in TABLES for row in run[table]]
    with open(path, "w", newline="") as file:
        columns = dict.fromkeys(key for row in rows for key in row)
        writer = csv.DictWriter(file, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.4g}" if isinstance(value, float) else value
                          for key, value in row.items()} for row in rows)


# row of the figure -> whether at random weights, step
ROWS = {"attention": (False, "attention"), "attention, random weights": (True, "attention"),
        "reversed": (False, "reversed"), "alone": (False, "alone"),
        "rotated at random": (False, "rotated"),
        "derived, Eq. (34)\nwithout $\\beta$": (False, "derived")}
SHORT = "attention", "reversed", "alone"


def draw(runs, path, rows):
    """What steps add to R^c in all layers, in % of R^c before them: a panel for each norm, both at
    one scale, a mark for each of five models, filled for the fourth and fifth."""
    figure, (axes,) = new_figure(1, 2, 4, 1 + 0.4 * len(rows))
    found = {run["names"][0]: run for run in runs}
    trained = [run for run in runs if not run["untrained"]]
    for ax, norm in zip(axes, ("tokens", "projections")):
        ax.axvline(0, color="black", lw=0.8)
        for place, (run, mark) in enumerate(zip(trained, "os^Dv")):
            name, fill = run["names"][0], {} if place > 2 else dict(mfc="white")
            for row, (untrained, step) in enumerate(rows.values()):
                last = found[f"{name}, untrained" if untrained else name][norm][-1]
                ax.plot(100 * last[step] / last["before"], row + 0.17 * (place - 2), mark, ms=4.5,
                        color="0.3" if row else "C0", **fill,
                        label=name.removeprefix("pretrained:") if row == 1 else None)
        for row in range(len(rows) + 1):
            ax.axhline(row - 0.5, color="0.85", lw=0.6, zorder=0)
        ax.set_title(f"norm of the {norm} held", fontsize="medium")
        ax.set(xlabel="change of $R^c$, %", ylim=(len(rows) - 0.5, -0.5))
        ax.set_yticks(range(len(rows)), rows)
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
    if c.csv:
        keep(runs, c.csv)
    if c.figure:
        rows = {words: row for words, row in ROWS.items() if c.untrained or not row[0]}
        draw(runs, c.figure, rows)
        short = {words: row for words, row in rows.items() if row[1] in SHORT}
        draw(runs, c.figure.replace(".png", "-short.png"), short)
        print(f"wrote {c.figure}, and -short.png with fewer steps")
    return runs


if __name__ == "__main__":
    cli(main)
