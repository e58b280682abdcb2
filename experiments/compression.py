"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(Z), Eq. (45), here of LN(Z), from a gradient step on R^c(Z | U),
Eq. (31)-(34). Longer tokens alone raise R^c, and the LayerNorm before the next step discards their
lengths; after it a vector added to all tokens lowers R^c. So it is measured of the tokens as they
are, and of the tokens less their mean, after a LayerNorm without gain and bias. U is at unit size.

    attention       MSSA(LN(Z))
    shuffled        the same with the weights of each token dealt at random to the others that it
                    sees; its own weight it keeps
    turned          attention's step, all of it turned by one random rotation of R^d
    own, others     its two parts: of each token's weight on itself, and of those on others
    alone           the same with each token attending to itself alone, with weight 1: no averages
                    (with --shift its value has a part of the token before)
    rest            attention's step with the part of W along [U_1 .. U_K] taken out of W
    shrink          -sum_k U_k U_k^* LN(Z), the term of Eq. (33) that Eq. (45) leaves out

There are six tables; in the first four, in nats, `before` is R^c before the step:

    raw             what a step adds to R^c of the tokens
    normed          what it adds to R^c of the tokens less their mean, after a LayerNorm
    equal_length    the same with every step, less its mean, scaled to the length of attention's
    elsewhere       as normed, but R^c of random subspaces in place of U
    lengths         of a step, less its mean, attention's being 1; "tokens" is the length of tokens
                    after attention, divided by that before
    weights         W_and_U is the cosine of W and [U_1 .. U_K], which has its place in Eq. (36)

--csv keeps them, by layer and for `all`, of which lengths and weights are means, with standard
errors over samples. What is printed are sums over layers in % of R^c before.

    python -m experiments.compression --untrained --csv=records/compression.csv
"""
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from analyze import normed, traces, unit_size
from checkpoint import each_model
from experiments.shared import (
    averages,
    dot_rows,
    each_sample,
    one_set,
    random_subspaces,
    SEVEN,
    write_csv,
)
from figures import new_figure, print_table
from flags import option, parse, SplitFlags, UserError
from model import side_by_side, SoftmaxAttention, subspace_coding_rate
from processes import cli

TABLES = "raw", "normed", "equal_length", "elsewhere", "lengths", "weights"


@dataclass(kw_only=True)
class Compression(SplitFlags):
    ckpt: str = option(SEVEN, "checkpoints, separated by commas")
    samples: int = option(40, "images or sequences, spread over the split", low=1)
    together: int = option(1, "samples coded as one set, less its mean", low=1)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)
    batch_size: int = option(20, "samples at once", low=1)
    csv: str | None = option(None, "a file for the rows of all tables; none: no file")
    figure: str | None = option(None, "a .png of the changes of the first five; none: no figure")


def shuffled(A, causal, generator):
    """The maps A (B, K, n, n) with the weights in each row dealt at random to the tokens that it
    sees, but to itself."""
    n = A.shape[-1]
    stays = torch.eye(n, dtype=torch.bool)
    if causal:
        stays |= torch.ones(n, n, dtype=torch.bool).triu(1)
    drawn = torch.rand(A.shape, generator=generator)
    # both orders end with what stays, by place
    dealt, order = (keys.masked_fill(stays, 2).argsort(dim=-1, stable=True)
                    for keys in (drawn, torch.arange(n).expand_as(A) / n))
    return torch.zeros_like(A).scatter(-1, order, A.gather(-1, dealt))


def steps(layer, Z, generator):
    """{name: the step of the docstring from tokens Z (B, n, d)}."""
    attention, X, d = layer.attention, layer.norm1(Z), Z.shape[2]
    values, step, A = attention.queries_keys_values(X)[2], attention(X), attention.map(X)
    dealt = shuffled(A, attention.causal, generator)
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=Z.dtype))[0]
    on_itself = torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))
    weights = dict(shuffled=dealt, own=on_itself, others=A - on_itself)
    shrink = -(X[:, None] @ attention.bases() @ attention.bases().mT).sum(1)
    found = dict(attention=step, turned=step @ rotation, alone=attention.join(values),
                 shrink=shrink)
    found |= {name: attention.join(each @ values) for name, each in weights.items()}
    if hasattr(attention, "W"):         # crate-c, -n and -t have none
        U, W = attention.bases().transpose(0, 1).flatten(1), attention.W                # (d, K p)
        rest = W.weight - (W.weight * U).sum() / U.square().sum() * U
        found["rest"] = F.linear(side_by_side(A @ values), rest, W.bias)
    return found


def changes(layer, Z, generator, eps, together=1):
    """{(table, column): a number for each sample of Z (B, n, d), or each set of samples}."""
    U, W = unit_size(layer.attention.bases()), getattr(layer.attention, "W", None)
    V = random_subspaces(U.shape[1], U.shape[0], generator).to(U)
    every, found = steps(layer, Z, generator), {}

    def measure(table, bases, look, steps):
        def rate(T):
            return subspace_coding_rate(look(one_set(T, together)), bases, eps)
        before = found[table, "before"] = rate(Z)
        for name, step in steps.items():
            found[table, name] = rate(Z + step) - before
    length = {name: (step - step.mean(1, keepdim=True)).norm(dim=(1, 2))
              for name, step in every.items()}
    scaled = {name: step * (length["attention"] / length[name])[:, None, None]
              for name, step in every.items()}
    measure("raw", U, lambda T: T, every)
    measure("normed", U, normed, every)
    measure("equal_length", U, normed, scaled)
    measure("elsewhere", V, normed, every)
    found["lengths", "tokens"] = ((Z + every["attention"]).norm(dim=2) / Z.norm(dim=2)).mean(1)
    for name in every:
        found["lengths", name] = length[name] / length["attention"]
    if W is not None:
        W_and_U = F.cosine_similarity(W.weight.flatten(), U.transpose(0, 1).flatten(), 0)
        found["weights", "W_and_U"] = W_and_U.expand(len(Z))
    return found


@torch.no_grad()
def measured(loaded, c):
    """{(table, column): numbers (L + 1, N) of each layer and of all, and of each sample} of one
    model, in float64."""
    loaded.model.cpu().double()
    config, generator = loaded.model.config, torch.Generator().manual_seed(c.seed)
    if not issubclass(config.spec.attention, SoftmaxAttention):
        raise UserError(f"{config.arch} has no attention map, which a control replaces")
    batches = [[changes(layer, trace.tokens, generator, c.eps, c.together)
                for layer, trace in traced] for _, traced in traces(loaded, c)]
    numbers = {}
    for table, column in batches[0][0]:
        each = torch.cat([torch.stack([layer[table, column] for layer in batch])
                          for batch in batches], 1)                                     # (L, N)
        every = each.mean(0) if table in ("lengths", "weights") else each.sum(0)
        numbers[table, column] = torch.cat([each, every[None]])
    return numbers


def keep(runs, path):
    """Writes a row for each model, table and layer: means and standard errors."""
    rows = []
    for run in runs:
        for table in TABLES:
            columns = {column: each for (of, column), each in run["numbers"].items() if of == table}
            for l, values in enumerate(zip(*columns.values()), 1):
                last = l == len(run["numbers"]["raw", "before"])
                row = dict(model=run["name"], table=table, layer="all" if last else l)
                rows.append(row | averages(each_sample(**dict(zip(columns, values)))))
    write_csv(rows, path)


# row of the figure: table, column
LINES = {"as they are: attention": ("raw", "attention"),
         "as they are: turned": ("raw", "turned"),
         "after LayerNorm: attention": ("normed", "attention"),
         "after LayerNorm: turned": ("equal_length", "turned"),
         "after LayerNorm: shuffled": ("equal_length", "shuffled"),
         "after LayerNorm: each token alone": ("equal_length", "alone"),
         "after LayerNorm: the term left out": ("equal_length", "shrink"),
         "after LayerNorm: random subspaces": ("elsewhere", "attention")}


def shares(run):
    """{row of the figure: what its step adds, summed over layers, in % of R^c before}."""
    whole = {key: each[-1].mean().item() for key, each in run["numbers"].items()}
    return {line: 100 * whole[table, step] / whole[table, "before"]
            for line, (table, step) in LINES.items()}


def draw(runs, path):
    """What steps of five models add to R^c, in % of R^c before them. A circle is a model, its
    layers summed, hollow for pictures and filled for text."""
    figure, ((ax,),) = new_figure(1, 1, 7, 4.8)
    dot_rows(ax, LINES, "change of $R^c$, % (left: it compresses)")
    for place, run in enumerate(runs):
        text, height = run["task"] == "gpt", 0.17 * (place - 2)
        for line, (name, share) in enumerate(shares(run).items()):
            color = "C0" if name.endswith("attention") else "0.3"
            ax.plot(share, line + height, "o", ms=5, mfc=None if text else "white", color=color,
                    label="models of text" if text else "models of pictures")
        ax.annotate(run["name"].removeprefix("pretrained:"),
                    ([*shares(run).values()][0], height), (9, 0), textcoords="offset points",
                    va="center", fontsize=7, bbox=dict(fc="white", ec="none", pad=0))
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
        if (cosines := runs[-1]["numbers"].get(("weights", "W_and_U"))) is not None:
            print("cosine of W and [U_1 .. U_K]:", *(f"{cos:.2f}" for cos in cosines[:-1, 0]))
    if c.csv:
        keep(runs, c.csv)
    if c.figure:
        draw([run for run in runs if not run["untrained"]][:5], c.figure)
        print(f"wrote {c.figure}")
    return runs


if __name__ == "__main__":
    cli(main)
