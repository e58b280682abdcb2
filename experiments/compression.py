"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(Z), Eq. (45), here of LN(Z), from a gradient step on R^c(Z | U),
Eq. (31)-(34). But R^c also falls as tokens get shorter or draw together on one vector. So it is
measured of tokens less their mean, and after a step each sample is scaled back to a norm it had. U
is at unit size. All steps are scaled to the length of attention's:

    attention       MSSA(LN(Z))
    next_map        the same with the map of the next sample of the batch: it compares no tokens
    mean_map        the same with the mean of the maps of all others, --batch_size less one: it
                    compares none, and averages more widely than the map of one sample
    alone           each token attends to itself alone: the same matrices, and no averages
    noise           independent Gaussians

There are four tables; in the first two, in nats, `before` is R^c of the tokens less their mean:

    projections     what a step adds to R^c if the norm of (U_k^* Z)_k, which is all that R^c sees,
                    is held
    tokens          the same if the norm of the tokens is held. Also `as_it_is`: what attention adds
                    with neither mean nor norm held, `as_it_was` being R^c before
    cosines         of a step and -grad R^c, Eq. (31): above 0 it begins downhill. Also `W_and_U`:
                    of W and [U_1 .. U_K], which has its place in Eq. (36). Below 0 W reverses it
    lengths         of a step before it is scaled, of attention's

--csv keeps them, by layer and for `all`, of which cosines and lengths are means, with standard
errors over samples. What is printed are sums over layers in % of R^c before.

    python -m experiments.compression --untrained --csv=records/compression.csv
"""
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from checkpoint import each_model
from experiments.shared import averages, each_sample, SEVEN, write_csv
from figures import new_figure, print_table
from flags import option, parse, SampleFlags, UserError
from measure import at_norm, centered, each_alone, rate_change, traces, unit_size
from model import SoftmaxAttention, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli

TABLES = "projections", "tokens", "cosines", "lengths"


@dataclass(kw_only=True)
class Compression(SampleFlags):
    ckpt: str = option(SEVEN, "checkpoints, separated by commas")
    samples: int = option(40, "images or sequences, spread over the split", low=2)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)
    batch_size: int = option(20, "samples at once; of them mean_map is a mean", low=2)
    csv: str | None = option(None, "a file for the rows of all tables; none: no file")
    figure: str | None = option(None, "a .png of the changes of the first five; none: no figure")


def with_foreign_maps(attention, X):
    """What attention makes of tokens X (B, n, d) if a sample's map is not its own, but (the next
    sample's of the batch, the mean over all others): neither compares tokens of this sample."""
    if len(X) == 1:
        raise UserError("a batch has one sample: another --samples or --batch_size, please")
    A, values = attention.map(X), attention.queries_keys_values(X)[2]
    return (attention.join(A.roll(-1, 0) @ values),
            attention.join((A.sum(0) - A) / (len(A) - 1) @ values))


def steps(layer, Z, generator):
    """{name: the step of the docstring from tokens Z (B, n, d)}, less its mean over tokens, before
    it is scaled."""
    X = layer.norm1(Z)
    attention, (next_map, mean_map) = layer.attention(X), with_foreign_maps(layer.attention, X)
    found = dict(attention=attention, next_map=next_map, mean_map=mean_map,
                 alone=each_alone(layer.attention, X),
                 noise=torch.randn(Z.shape, generator=generator, dtype=Z.dtype))
    return {name: centered(step) for name, step in found.items()}


def changes(layer, Z, generator, eps):
    """{(table, column): a number for each sample of Z (B, n, d)}."""
    U, start, W = unit_size(layer.attention.bases()), centered(Z), layer.attention.W.weight
    half, downhill = Z + layer.attention(layer.norm1(Z)), -subspace_coding_rate_grad(start, U, eps)
    before, as_it_was, after = (subspace_coding_rate(T, U, eps) for T in (start, Z, half))
    found = {("projections", "before"): before, ("tokens", "before"): before}
    unscaled = steps(layer, Z, generator)
    for name, own in unscaled.items():
        step = at_norm(own, unscaled["attention"])
        held = subspace_coding_rate(at_norm(start + step, start), U, eps)
        found |= {("projections", name): rate_change(start, step, U, eps),
                  ("tokens", name): held - before,
                  ("cosines", name): F.cosine_similarity(step.flatten(1), downhill.flatten(1)),
                  ("lengths", name): own.norm(dim=(1, 2)) / step.norm(dim=(1, 2))}
    W_and_U = F.cosine_similarity(W.flatten(), U.transpose(0, 1).flatten(), 0).expand(len(Z))
    return found | {("tokens", "as_it_was"): as_it_was, ("tokens", "as_it_is"): after - as_it_was,
                    ("cosines", "W_and_U"): W_and_U}


@torch.no_grad()
def measured(loaded, c):
    """{(table, column): numbers (L + 1, N) of each layer and of all, and of each sample} of one
    model, in float64."""
    loaded.model.cpu().double()
    config, generator = loaded.model.config, torch.Generator().manual_seed(c.seed)
    if not issubclass(config.spec.attention, SoftmaxAttention):
        raise UserError(f"{config.arch} has no attention map, which a control replaces")
    batches = [[changes(layer, trace.tokens, generator, c.eps) for layer, trace in traced]
               for _, traced in traces(loaded, c)]
    numbers = {}
    for table, column in batches[0][0]:
        each = torch.cat([torch.stack([layer[table, column] for layer in batch])
                          for batch in batches], 1)                                     # (L, N)
        every = each.mean(0) if table in ("cosines", "lengths") else each.sum(0)
        numbers[table, column] = torch.cat([each, every[None]])
    return numbers


def keep(runs, path):
    """Writes a row for each model, table and layer: means and standard errors."""
    rows = []
    for run in runs:
        for table in TABLES:
            columns = {column: each for (of, column), each in run["numbers"].items() if of == table}
            for l, values in enumerate(zip(*columns.values()), 1):
                last = l == len(columns["attention"])
                row = dict(model=run["name"], table=table, layer="all" if last else l)
                rows.append(row | averages(each_sample(**dict(zip(columns, values)))))
    write_csv(rows, path)


# row of the figure: table, column, R^c before it
LINES = {"attention": ("tokens", "as_it_is", "as_it_was"),
         "the same, length held": ("projections", "attention", "before"),
         "another sample's map, length held": ("projections", "next_map", "before"),
         "each token alone, length held": ("projections", "alone", "before"),
         "noise, length held": ("projections", "noise", "before")}


def shares(run):
    """{row of the figure: what its step adds, summed over layers, in % of R^c before}."""
    whole = {key: each[-1].mean().item() for key, each in run["numbers"].items()}
    return {line: 100 * whole[table, step] / whole[table, before]
            for line, (table, step, before) in LINES.items()}


def draw(runs, path):
    """What steps of five models add to R^c, in % of R^c before them. A circle is a model, its
    layers summed, hollow for pictures and filled for text."""
    figure, ((ax,),) = new_figure(1, 1, 6.5, 3.25)
    ax.axvline(0, color="black", lw=0.8)
    for place, run in enumerate(runs):
        text = run["task"] == "gpt"
        for line, share in enumerate(shares(run).values()):
            ax.plot(share, line + 0.16 * (place - 2), "o", ms=5,
                    mfc=None if text else "white", color="C0" if line < 2 else "0.3",
                    label="models of text" if text else "models of pictures")
    for line in range(len(LINES) + 1):
        ax.axhline(line - 0.5, color="0.85", lw=0.6, zorder=0)
    ax.set(xlabel="change of $R^c$, %", ylim=(len(LINES) - 0.5, -0.5))
    ax.set_yticks(range(len(LINES)), LINES)
    ax.tick_params(left=False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = ax.get_legend_handles_labels()
    last = dict(zip(labels, handles))               # of each label
    figure.legend(last.values(), last, loc="outside lower center", frameon=False, ncols=2)
    figure.savefig(path, dpi=200)


def main(argv):
    """[{"name", "task", "untrained", "numbers"}, ...]."""
    c = parse(Compression, argv, __doc__)
    runs = []
    for loaded in each_model(c):
        runs.append(dict(name=loaded.name, task=loaded.task, untrained=loaded.untrained,
                         numbers=measured(loaded, c)))
        print(f"{loaded.name}, {c.samples} samples of {c.split}, eps {c.eps:g}: what layers add to "
              "R^c, in %, summed; below 0 a step compresses")
        print_table([dict(step=line, added=round(share, 2))
                     for line, share in shares(runs[-1]).items()])
        reversal = runs[-1]["numbers"]["cosines", "W_and_U"][:-1, 0]
        print("cosine of W and [U_1 .. U_K] by layer:", *(f"{cos:.2f}" for cos in reversal))
    if c.csv:
        keep(runs, c.csv)
    if c.figure:
        draw([run for run in runs if not run["untrained"]][:5], c.figure)
        print(f"wrote {c.figure}")
    return runs


if __name__ == "__main__":
    cli(main)
