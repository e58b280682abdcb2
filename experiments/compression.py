"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(Z), Eq. (45), here of LN(Z), from a gradient step on R^c(Z | U), Eq.
(31)-(34).
But R^c also falls as tokens get shorter or draw together on one vector. So it is measured of tokens
less their mean, and after a step each sample is scaled back to its norm. U is at unit size. Steps:

    attention       MSSA(LN(Z))
    own, others     its two parts, by a token's weight on itself and by those on other tokens
    shuffled        others, with each row's weights on other tokens dealt out among them at random
    alone           each token attends to itself alone: the same matrices, and no averages
    turned          attention, turned in each sample by another random rotation: the same averages
                    of tokens, in a direction that was not learned
    noise           independent Gaussians
    derived         -X + sum_k U_k (U_k^* X) A_k, X = LN(Z), A_k its own map: Eq. (34) with 1 for
                    the beta of (36), which is far from 1 at this eps
    gradient        -grad R^c, Eq. (31)

The parts and `shuffled` have their own length, the others attention's. There are three tables:

    tokens      what a step adds to R^c, in nats; `before` is R^c of the tokens. Of attention also
                `as_it_is`, with neither mean nor norm held, `as_it_was` being R^c before, and
                `projections_held`, at the norm of (U_k^* Z)_k before: leaving U gains nothing
    slopes      what a small part of a step adds, by its share: <grad R^c, step> without their part
                along Z. Steps this long can raise R^c although they begin downhill. Of attention
                also `projections_held`, and `tenth`, what a tenth of it adds, times 10
    cosines     of a step with -grad R^c, without their part along Z; `length` is attention's, in
                units of the tokens' norm

+- is the standard error over samples. --csv keeps all.

    python -m experiments.compression --untrained --csv=records/compression.csv
"""
import csv
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from checkpoint import each_model
from experiments.shared import FIVE
from figures import new_figure, print_table
from flags import option, parse, SampleFlags, UserError
from measure import at_norm, centered, each_alone, rate_change, traces, unit_size
from model import SoftmaxAttention, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli

OWN_LENGTH = "own", "others", "shuffled"        # steps that keep it; the rest have attention's
ATTENTION = "attention", "as_it_is", "projections_held"         # the layer's own step
TABLES = {"tokens": "added to R^c, the norm of the tokens held",
          "slopes": "added by a small part of a step, by its share, the norm of the tokens held",
          "cosines": "attention's length; cosines of steps with -grad R^c"}


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


def shuffled(A, generator):
    """Attention maps A (..., n, n) with the weights of each row on other tokens in random order. A
    token's weight on itself stays, and so do weights of 0, as on later tokens."""
    stays = torch.eye(A.shape[-1], dtype=torch.bool) | (A == 0)
    noise = torch.rand(A.shape, generator=generator, dtype=A.dtype)
    place, order = (scores.masked_fill(stays, torch.inf).argsort(dim=-1, stable=True)
                    for scores in (torch.zeros_like(A), noise))
    return torch.empty_like(A).scatter(-1, order, A.gather(-1, place))


def turned(step, generator):
    """A step (B, n, d), turned in each sample by another random rotation of R^d, as if its output
    were not learned: lengths and angles of tokens stay."""
    B, _, d = step.shape
    Q, R = torch.linalg.qr(torch.randn(B, d, d, generator=generator, dtype=step.dtype))
    return step @ (Q * R.diagonal(dim1=1, dim2=2).sign()[:, None])      # uniform with these signs


def steps(layer, Z, generator, eps):
    """{name: the step of the docstring from tokens Z (B, n, d)}, less its mean over tokens."""
    attention, X = layer.attention, layer.norm1(Z)
    A, values = attention.map(X), attention.queries_keys_values(X)[2]
    U = unit_size(attention.bases())
    itself = torch.eye(A.shape[-1], dtype=torch.bool)
    found = dict(
        attention=attention(X), own=attention.join(A.where(itself, 0) @ values),
        others=attention.join(A.where(~itself, 0) @ values),
        shuffled=attention.join(shuffled(A, generator).where(~itself, 0) @ values),
        alone=each_alone(attention, X), turned=turned(attention(X), generator),
        noise=torch.randn(Z.shape, generator=generator, dtype=Z.dtype),
        derived=(A @ (X[:, None] @ U) @ U.mT).sum(1) - X,
        gradient=-subspace_coding_rate_grad(centered(Z), U, eps))
    return {name: centered(step) if name in OWN_LENGTH
            else at_norm(centered(step), centered(found["attention"]))
            for name, step in found.items()}


def changes(layer, Z, generator, eps):
    """{table: {column: a number for each sample of Z (B, n, d)}}."""
    attention, U = layer.attention, unit_size(layer.attention.bases())
    added, start = steps(layer, Z, generator, eps), centered(Z)
    before, step = subspace_coding_rate(start, U, eps), added["attention"]
    as_it_is = Z + attention(layer.norm1(Z))
    as_it_was, then = (subspace_coding_rate(T, U, eps) for T in (Z, as_it_is))
    seen_as_before = (start + step) * seen_by(U, start) / seen_by(U, start + step)
    uphill = centered(subspace_coding_rate_grad(start, U, eps))
    downhill = tangent(-uphill, start)
    # the slope at the norm of the projections: their growth is undone along Z
    growth = ((start[:, None] @ U) * (step[:, None] @ U)).sum((1, 2, 3), keepdim=True)[:, 0]
    seen_slope = uphill * (step - growth / seen_by(U, start).square() * start)
    tokens = {name: rate_change(start, step, U, eps) for name, step in added.items()}
    slopes = {name: -(step * downhill).sum((1, 2)) for name, step in added.items()}
    cosines = {name: F.cosine_similarity(tangent(step, start).flatten(1), downhill.flatten(1))
               for name, step in added.items()}
    return dict(
        tokens=dict(
            before=before, **tokens, as_it_was=as_it_was, as_it_is=then - as_it_was,
            projections_held=subspace_coding_rate(seen_as_before, U, eps) - before),
        slopes=dict(before=before, **slopes, projections_held=seen_slope.sum((1, 2)),
                    tenth=10 * rate_change(start, step / 10, U, eps)),
        cosines=dict(length=step.norm(dim=(1, 2)) / start.norm(dim=(1, 2)), **cosines))


def rows_of(by_layer):
    """The rows of one table of {column: numbers of N samples} by layer: means, standard errors, and
    those of the sum over layers."""
    rows = [dict(layer=l) for l in range(1, len(by_layer) + 1)] + [dict(layer="all")]
    for column in by_layer[0]:
        numbers = torch.stack([values[column] for values in by_layer])              # (L, N)
        for row, each in zip(rows, [*numbers, numbers.sum(0)]):
            row[column] = each.mean().item()
            row[f"{column}_error"] = (each.std() / len(each) ** 0.5).item()
    return rows


@torch.no_grad()
def measured(loaded, c):
    """{table: its rows} of one model, in float64. The layers' cosines have no sum."""
    loaded.model.cpu().double()
    config, generator = loaded.model.config, torch.Generator().manual_seed(c.seed)
    if not issubclass(config.spec.attention, SoftmaxAttention):
        raise UserError(f"{config.arch} has no softmax, which the controls replace")
    found = [[changes(layer, trace.tokens, generator, c.eps) for layer, trace in traced]
             for _, traced in traces(loaded, c)]                    # by batch, layer and table
    tables = {}
    for table in TABLES:
        by_layer = [{column: torch.cat([batch[table][column] for batch in batches])
                     for column in batches[0][table]} for batches in zip(*found)]
        tables[table] = rows_of(by_layer)
    tables["cosines"].pop()
    return tables


def show(run, c):
    """Prints the tables of a model."""
    print(f"{run['name']}: {c.samples} samples of {c.split}, eps {c.eps:g}")
    for table, words in TABLES.items():
        print(words)
        print_table(run[table])


def keep(runs, path):
    """Writes the rows of all tables, four digits of each number."""
    rows = [dict(model=run["name"], table=table) | row
            for run in runs for table in TABLES for row in run[table]]
    with open(path, "w", newline="") as file:
        columns = dict.fromkeys(key for row in rows for key in row)
        writer = csv.DictWriter(file, [*columns], lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.4g}" if isinstance(value, float) else value
                          for key, value in row.items()} for row in rows)


# figure -> what its axis shows, and row -> table, step, and R^c before it
FIGURES = {
    "": ("change of $R^c$, %", {
        "attention": ("tokens", "as_it_is", "as_it_was"),
        "the same, length held": ("tokens", "attention", "before"),
        "each token alone, length held": ("tokens", "alone", "before"),
        "turned at random, length held": ("tokens", "turned", "before"),
        "noise, length held": ("tokens", "noise", "before")}),
    "-slopes": ("slope of $R^c$, % a step", {
        "attention": ("slopes", "attention", "before"),
        "from the token itself": ("slopes", "own", "before"),
        "from other tokens": ("slopes", "others", "before"),
        "turned at random": ("slopes", "turned", "before"),
        "attention, projections held": ("slopes", "projections_held", "before")})}


def draw(runs, path, label, lines):
    """What steps of five models add to R^c, in % of R^c before them: `lines` of the figure as in
    FIGURES. A circle is a model, its layers summed, hollow for pictures and filled for text; a dot,
    of slopes, is a layer."""
    figure, ((ax,),) = new_figure(1, 1, 6.5, 1 + 0.45 * len(lines))
    ax.axvline(0, color="black", lw=0.8)
    for place, run in enumerate(runs):
        text = run["task"] == "gpt"
        for line, (table, step, before) in enumerate(lines.values()):
            *layers, model = (100 * row[step] / row[before] for row in run[table])
            y, color = line + 0.16 * (place - 2), "C0" if step in ATTENTION else "0.3"
            if table == "slopes":
                ax.plot(layers, [y] * len(layers), ".", ms=3.5, mew=0, color=color, alpha=0.6)
            ax.plot(model, y, "o", ms=5, mfc=None if text else "white", color=color,
                    label="models of text" if text else "models of pictures")
    for line in range(len(lines) + 1):
        ax.axhline(line - 0.5, color="0.85", lw=0.6, zorder=0)
    ax.set(xlabel=label, ylim=(len(lines) - 0.5, -0.5))
    ax.set_yticks(range(len(lines)), lines)
    ax.tick_params(left=False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    last = dict(zip(labels, handles))               # of each label
    figure.legend(last.values(), last, loc="outside lower center", frameon=False, ncols=2)
    figure.savefig(path, dpi=200)


def main(argv):
    """[{"name", "task", "untrained", and the rows of each of TABLES}, ...]."""
    c = parse(Compression, argv, __doc__)
    runs = []
    for loaded in each_model(c):
        runs.append(dict(name=loaded.name, task=loaded.task, untrained=loaded.untrained)
                    | measured(loaded, c))
        show(runs[-1], c)
    if c.csv:
        keep(runs, c.csv)
    if c.figure:
        trained = [run for run in runs if not run["untrained"]]
        for name, (label, lines) in FIGURES.items():
            draw(trained[:5], c.figure.replace(".png", f"{name}.png"), label, lines)
        print(f"wrote {c.figure}, and -slopes.png")
    return runs


if __name__ == "__main__":
    cli(main)
