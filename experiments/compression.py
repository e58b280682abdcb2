"""Does the attention step lower R^c, and would anything else?

[J] derives the step Z + MSSA(LN(Z)), Eq. (45), from a gradient step on R^c(Z | U), Eq. (31)-(34).
As R^c falls with the length of Z alone, steps end at the norm of Z. Four tables a model, in nats,
with U at unit size: changes of R^c; of R - R^c; of R - R^c by the whole layer, with ISTA; and the
cosines of the steps with -grad R^c, of both without the part along Z, which changes length alone.

    attention    MSSA(LN(Z)); before is R^c(Z)
    alone        the attention map is I: each token attends to itself alone
    mean         all its weights are equal (in text: of the tokens so far)
    half         the mean of these two maps
    kept         each token's weight for itself as in attention, all others equal
    shuffled     attention whose weights for other tokens go to others at random
    noise        Gaussian
    gradient     -grad R^c(Z | U), Eq. (31), which attention was derived from
    derived      -X + sum_k U_k SSA(X | U_k), X = LN(Z): Eq. (34), beta kappa = 1, no beta in (36)
    shrinking    -sum_k U_k U_k^* X, the first term of Eq. (33), which compares no tokens
    common       one vector for all tokens, with equal entries
    elsewhere    what attention does to the R^c of random orthogonal subspaces that fill the space

Every step has attention's length (with --own_length not
alone, mean and half). +- is the standard error over samples, or over checkpoints of one config.

    python -m experiments.compression --centered --figure=docs/figures/compression.png \\
        --ckpt=pretrained:shapes-crate,pretrained:cifar10-crate,pretrained:pydoc-crate

Verdict (2026-11-27): in four of five models attention lowers the R^c of tokens less their mean, by
its choice of tokens: kept leaves at most 55 % of it, shuffled 30 %. But alone lowers it as far or
further. Not centered, common lowers R^c further than attention in all five. Attention is no step
down the gradient: its cosines are -0.03 to 0.15 in all 32 layers, those of shrinking larger in 31.
"""
from dataclasses import dataclass, MISSING

import torch
from torch.nn import functional as F

from analyze import at_norm, in_sets, step_with, tangent, unit_size
from evaluate import batches, each_model, SampleFlags
from experiments.shared import averages, each_sample, random_subspaces
from figures import new_figure, print_table
from flags import option, parse, UserError
from model import coding_rate, SoftmaxAttention, subspace_coding_rate, subspace_coding_rate_grad
from processes import cli


@dataclass(kw_only=True)
class Compression(SampleFlags):
    ckpt: str = option(MISSING, "checkpoints, separated by commas")
    samples: int = option(100, "images or sequences, spread over the split", low=2)
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)
    together: int = option(1, "samples whose tokens are coded as one set", low=1)
    own_length: bool = option(False, "alone, mean and half keep their own length")
    centered: bool = option(False, "rates of tokens less their mean, at the norm of such Z")
    batch_size: int = option(20, "samples at once", low=1)
    figure: str | None = option(None, "a .png of what all layers add to R^c; none: no figure")


def shuffled(A, generator, causal):
    """Maps A (B, K, n, n): the weights that a token gives to others go to others at random (of text
    to those before it); what it gives to itself stays."""
    n = A.shape[-1]
    place = torch.arange(n).expand(n, n)
    others = place < place.mT if causal else place != place.mT
    in_order = torch.where(others, place, n + place).argsort(-1).expand_as(A)
    at_random = torch.where(others, torch.rand(A.shape, generator=generator), n + place).argsort(-1)
    return torch.zeros_like(A).scatter(-1, at_random, A.gather(-1, in_order))


def steps(layer, Z, generator, own_length=False):
    """{name: what it adds to Z (B, n, d)}, the steps of the docstring."""
    A, n = layer.attention.map(layer.norm1(Z)), Z.shape[1]          # (B, K, n, n)
    identity, seen = torch.eye(n).to(Z), torch.ones(n, n).to(Z)
    if layer.attention.causal:
        seen = seen.tril()                                          # the tokens so far
    mean, others = seen / seen.sum(-1, keepdim=True), seen - identity
    others = others / others.sum(-1, keepdim=True).clamp(min=1)     # a first token of text has none
    own = A.diagonal(dim1=-2, dim2=-1)[..., None]
    maps = dict(alone=identity, mean=mean, half=(identity + mean) / 2,
                kept=own * identity + (1 - own) * others,
                shuffled=shuffled(A, generator, layer.attention.causal))
    added = {name: step_with(layer, Z, lambda values: M @ values) for name, M in maps.items()}
    added["noise"] = torch.randn(Z.shape, generator=generator, dtype=Z.dtype)
    attention, free = layer.compress(Z) - Z, ("alone", "mean", "half") if own_length else ()
    return dict(attention=attention) | {name: step if name in free else at_norm(step, attention)
                                        for name, step in added.items()}


TABLES = ("change of R^c", "change of R - R^c", "change of R - R^c, by the layer",
          "cosine with -grad R^c")


def changes(layer, Z, generator, c):
    """What each step does, {name: a number for each set of tokens}: one dict for each of TABLES."""
    U = unit_size(layer.attention.bases())
    V = random_subspaces(*U.shape[1::-1], generator)

    def coded(T):           # as sets of tokens, at the norm of Z
        T, before = in_sets(T, c.together), in_sets(Z, c.together)
        if c.centered:
            T, before = T - T.mean(1, keepdim=True), before - before.mean(1, keepdim=True)
        return at_norm(T, before)

    def rates(T):
        Rc = subspace_coding_rate(coded(T), U, c.eps)
        return Rc, coding_rate(coded(T), c.eps) - Rc
    Rc, gain = rates(Z)
    added = steps(layer, Z, generator, c.own_length)
    X = layer.norm1(Z)
    back = (layer.attention.map(X) @ (X[:, None] @ U) @ U.mT).sum(1)    # sum_k U_k SSA
    downhill = -subspace_coding_rate_grad(Z, U, c.eps)
    added |= {name: at_norm(step, added["attention"]) for name, step in dict(
        gradient=downhill, derived=back - X, shrinking=-(X[:, None] @ U @ U.mT).sum(1),
        common=torch.ones_like(Z)).items()}
    elsewhere = [subspace_coding_rate(coded(T), V, c.eps) for T in (Z + added["attention"], Z)]
    rows = dict(before=Rc, elsewhere=elsewhere[0] - elsewhere[1]), {}, {}, {}
    for name, step in added.items():
        Rc_after, gain_after = rates(Z + step)
        _, gain_last = rates(layer.sparsify(Z + step))
        across = (tangent(in_sets(T, c.together), in_sets(Z, c.together)).flatten(1)
                  for T in (step, downhill))
        cosine = F.cosine_similarity(*across)
        for row, change in zip(rows, (Rc_after - Rc, gain_after - gain, gain_last - gain, cosine)):
            row[name] = change
    return rows


@torch.no_grad()
def by_layer(loaded, c):
    """The means and standard errors over samples, in each layer a dict for each of TABLES. In
    float64."""
    backbone = loaded.backbone.cpu().double()
    if not isinstance(backbone.layers[0].attention, SoftmaxAttention):
        raise UserError(f"{backbone.config.arch} has no softmax, which the controls replace")
    samples = [[[] for _ in TABLES] for _ in backbone.layers]
    generator = torch.Generator().manual_seed(c.seed)
    for _, x in batches(loaded, c):
        traces = backbone.trace(x.double() if x.is_floating_point() else x)
        for tables, layer, trace in zip(samples, backbone.layers, traces):
            for rows, columns in zip(tables, changes(layer, trace.tokens, generator, c)):
                rows += each_sample(**columns)
    return [[averages(rows) for rows in tables] for tables in samples]


def over_checkpoints(rows):
    """Means and standard errors over the rows of several checkpoints; of one, its own."""
    return rows[0] if len(rows) == 1 else averages(
        [{key: value for key, value in row.items() if not key.endswith("_error")} for row in rows])


def measure(c):
    """[{"names", "untrained", "layers"}, ...], one for the checkpoints of one config."""
    runs = {}
    for path, untrained, loaded in each_model(c):
        key = untrained, repr((loaded.meta.get("name"), loaded.model.config))
        run = runs.setdefault(key, dict(names=[], untrained=untrained, each=[]))
        run["names"].append(path)
        run["each"].append(by_layer(loaded, c))
    for run in runs.values():
        run["layers"] = [[over_checkpoints(rows) for rows in zip(*layer)]
                         for layer in zip(*run.pop("each"))]
    return [*runs.values()]


def show(run, c):
    """Prints the tables of checkpoints of one config."""
    print(f"{', '.join(run['names'])}{', untrained' if run['untrained'] else ''}: {c.samples} "
          f"samples of {c.split}, eps {c.eps:g}")
    for title, rows in zip(TABLES, zip(*run["layers"])):
        print(title)
        print_table([dict(layer=l) | row for l, row in enumerate(rows, 1)])


def draw(runs, path):
    """The sum over layers of the change of R^c, by attention and by controls: a panel a model."""
    bars = dict(shuffled="weights for others shuffled", kept="weights for others equal",
                alone="each token alone", derived="the step as derived, (34)",
                attention="attention")
    trained = [run for run in runs if not run["untrained"]]
    figure, (axes,) = new_figure(1, len(trained), 8 / len(trained), 2)
    for ax, run in zip(axes, trained):
        sums = {name: sum(row[key] for row, *_ in run["layers"]) for key, name in bars.items()}
        ax.barh([*sums], [*sums.values()],
                color=["C0" if name == "attention" else "0.6" for name in sums])
        ax.axvline(0, color="black", lw=0.8)
        ax.tick_params(left=False, labelleft=ax is axes[0])
        ax.set_title(run["names"][0].removeprefix("pretrained:").replace("crate-", "crate-\n"),
                     fontsize="medium")
        ax.spines[["top", "right", "left"]].set_visible(False)
    axes[len(axes) // 2].set_xlabel("change of $R^c$ over all layers, nats (below 0: compression)")
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
