"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(Z), Eq. (45), here of LN(Z), from a gradient step on R^c(Z | U),
Eq. (31)-(34). Longer tokens alone raise R^c, and the LayerNorm before the next step discards their
lengths; after it a vector added to all tokens lowers R^c. So it is measured of the tokens as they
are, and of those minus their mean, after a LayerNorm without gain and bias; with U at unit size.

    attention       MSSA(LN(Z))
    reversed        attention's step times -1
    turned          attention's step, turned by a random rotation, one a layer and a batch
    one_map         attention with the mean map of the batch for every sample
    shuffled        attention with the weights of each token dealt at random to the others that it
                    sees; its own weight it keeps
    others          attention with each token's own weight taken out, the rest divided by their sum
    alone           attention of each token to itself alone, with weight 1: no averages
    others_turned, alone_turned     these two, turned by that rotation
    shrink          -sum_k U_k U_k^* LN(Z), the term of (33) that (45) leaves out, U as learned
    gradient        minus the exact gradient (31) of R^c at LN(Z), which MSSA was derived from

Tables, by layer and for `all` in --csv; printed are sums over layers in % of R^c before the step:

    raw             what a step adds to R^c of the tokens
    normed          what it adds to R^c of the tokens minus their mean, after a LayerNorm; a step,
                    minus its mean, is as long as attention's
    own_length      the same, each step at its own length (of shrink and gradient it has no meaning)
    short           the same, each step 1 % as long as the tokens minus their mean
    elsewhere       normed, but R^c of random subspaces in place of U
    lengths         of steps, attention's being 1; "tokens": of tokens after it, divided by before

    python -m experiments.compression --untrained --csv=records/compression.csv
    python -m experiments.results compression           # the figure"""
from dataclasses import dataclass

import torch

from checkpoint import each_model
from experiments import shared
from flags import option, parse, UserError
from measure import centred_normed, print_table, traces, unit_size
from model import SoftmaxAttention, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli


@dataclass(kw_only=True)
class Compression(shared.Flags):
    ckpt: str = option(shared.WITH_TRANSFORMERS, "checkpoints, separated by commas")
    samples: int = option(40, "images or windows of text, spread over the split", low=1)
    together: int = option(1, "samples coded as one set, less its mean", low=1)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)


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


def steps(layer, Z, generator, eps):
    """{name: the step of the docstring from tokens Z (B, n, d)}."""
    attention, X, U = layer.attention, layer.norm1(Z), layer.attention.bases()
    values, A = attention.queries_keys_values(X)[2], attention.map(X)
    dealt = shuffled(A, attention.causal, generator)
    rest = A - torch.diag_embed(A.diagonal(dim1=-2, dim2=-1))
    rest = rest / rest.sum(-1, keepdim=True).clamp_min(1e-12)
    rotation = shared.random_rotation(Z.shape[2], generator).to(Z)
    step, alone = attention(X), attention.join(values)
    others = attention.join(rest @ values)
    return dict(
        attention=step, others=others, alone=alone, turned=step @ rotation,
        others_turned=others @ rotation, alone_turned=alone @ rotation, reversed=-step,
        one_map=attention.join(A.mean(0, keepdim=True) @ values),
        shuffled=attention.join(dealt @ values), shrink=-(X[:, None] @ U @ U.mT).sum(1),
        gradient=-subspace_coding_rate_grad(X, unit_size(U), eps))


def length(T):
    """Of each sample's tokens (B, n, d) minus their mean: (B, 1, 1)."""
    return (T - T.mean(1, keepdim=True)).norm(dim=(1, 2), keepdim=True)


def as_long(steps, norm):
    """The steps, each scaled to this length (B, 1, 1)."""
    return {name: step * norm / length(step) for name, step in steps.items()}


def added(steps, Z, U, eps, together=1, seen=centred_normed):
    """{"before": R^c of the tokens Z (B, n, d), and for each step what it adds}, a number for each
    sample, or each set of samples."""
    def rate(T):
        return subspace_coding_rate(seen(shared.one_set(T, together)), U, eps)
    before = rate(Z)
    return dict(before=before) | {name: rate(Z + step) - before for name, step in steps.items()}


def changes(layer, Z, generator, eps, together=1):
    """{table: {column: a number for each sample of Z (B, n, d), or each set of samples}}."""
    U = unit_size(layer.attention.bases())
    V = shared.random_subspaces(U.shape[1], U.shape[0], generator).to(U)
    own, how = steps(layer, Z, generator, eps), dict(eps=eps, together=together)
    attentions = length(own["attention"])
    scaled = as_long(own, attentions)
    lengths = {name: (length(step) / attentions).flatten() for name, step in own.items()}
    longer = ((Z + own["attention"]).norm(dim=2) / Z.norm(dim=2)).mean(1)
    return dict(
        raw=added(own, Z, U, **how, seen=torch.nn.Identity()), normed=added(scaled, Z, U, **how),
        own_length=added(own, Z, U, **how), short=added(as_long(own, length(Z) / 100), Z, U, **how),
        elsewhere=added(scaled, Z, V, **how), lengths=dict(tokens=longer) | lengths)


@torch.no_grad()
def measured(loaded, c):
    """{table: {column: numbers (L + 1, N) of each layer and of all, and of each sample}} of one
    model, in float64."""
    loaded.model.cpu().double()
    config, generator = loaded.model.config, torch.Generator().manual_seed(c.seed)
    if not issubclass(config.row.attention, SoftmaxAttention):
        raise UserError(f"{config.arch} has no attention map, which a control replaces")
    batches = [[changes(layer, trace.tokens, generator, c.eps, c.together)
                for layer, trace in traced] for traced in traces(loaded, c)]

    def of_layers(table, column):
        each = torch.cat([torch.stack([layer[table][column] for layer in batch])
                          for batch in batches], 1)                                     # (L, N)
        every = each.mean(0) if table == "lengths" else each.sum(0)
        return torch.cat([each, every[None]])
    return {table: {column: of_layers(table, column) for column in columns}
            for table, columns in batches[0][0].items()}


def rows_of(numbers):
    """A row for each table and layer, and for all layers: means and standard errors."""
    rows = []
    for table, columns in numbers.items():
        for l, values in enumerate(zip(*columns.values()), 1):
            last = l == len(numbers["raw"]["before"])
            row = dict(table=table, layer="all" if last else l)
            rows.append(row | shared.averages(shared.each_sample(**dict(zip(columns, values)))))
    return rows


def shares(rows):
    """What steps add, summed over layers, in % of R^c before: {table: {column: %}}."""
    return {row["table"]: {
        name: round(100 * value / row["before"], 3) for name, value in row.items()
        if name not in ("table", "layer", "before") and not name.endswith("_error")}
        for row in rows if row["layer"] == "all" and row["table"] != "lengths"}


def moves(share):
    return f"{'lowers' if share < 0 else 'raises'} it by {abs(share):.2g} %"


def main(argv):
    """The rows of --csv."""
    c = parse(Compression, argv, __doc__)
    found = []
    for loaded in each_model(c):
        rows = rows_of(measured(loaded, c))
        found += [shared.described(loaded) | row for row in rows]
        print(f"{loaded.label}, {c.samples} samples of {c.split}, eps {c.eps:g}: what steps add to "
              "R^c, %, all layers; --help explains; normed: of centred tokens")
        tables = shares(rows)
        print_table([dict(step=step) | {name: table[step] for name, table in tables.items()}
                     for step in tables["raw"]])
        normed, short = tables["normed"], tables["short"]
        print(f"R^c of centred tokens: attention {moves(normed['attention'])}, each token alone "
              f"{moves(normed['alone'])}; by short steps attention {moves(short['attention'])}, "
              f"the gradient {moves(short['gradient'])}")
    if c.csv:
        shared.write_csv(found, c.csv)
    return found


if __name__ == "__main__":
    cli(main)
