"""What does one matrix for query, key and value cost?

In-context recall: a small causal model reads pairs of a random key and a random value, then each
key again, in another order, and must say its value (the task of Arora et al. 2023 without gaps;
values may repeat). aot is aot-mhsa with one matrix for all three, mhsa-ista is crate with three.
With one, the matrix of scores is symmetric, and a token's score with itself is large. --turn=random
ends both without a new parameter, --turn=symmetric the second alone.

    python -m experiments.recall
    python -m experiments.recall --archs=crate,mhsa-ista
    python -m experiments.recall --archs=aot,mssa-mlp,crate --turn=random       # or --shift

"steps": until 95 % of the values are right, checked every 50, mean over the runs that get there.
"accuracy": at the end of each run, mean over all. +- is the standard error.

Verdict (2026-11-27; 2 layers, 5 seeds, 1,500 steps): attention alone learns it with three matrices
in 250 steps, with one not at all, with one and --turn in 300: it is the symmetry that costs. CRATE
fails with one, with --turn and with three: more than symmetry is in its way. --shift mends all;
its heads start out near what the task needs.
"""
from dataclasses import dataclass

import torch

from experiments.shared import averages, COLORS
from figures import new_figure, print_table
from flags import cli, option, parse, UserError
from model import LanguageModel, SoftmaxAttention, TextConfig
from optim import count, make_optimizers, take_step
from processes import derive_seed, with_bar


@dataclass(kw_only=True)
class Recall:
    """The task and the models that learn it."""
    archs: str = option("transformer,aot-mhsa,aot,crate,tost", "which, by commas")
    turn: str = option("no", "map keys by a fixed orthogonal matrix: see turn_keys",
                       choices=("no", "random", "symmetric"))
    shift: bool = option(False, "keys and values that see the previous token")
    layers: int = option(2, "layers of each model", low=1)
    width: int = option(64, "d", low=1)
    heads: int = option(4, "K", low=1)
    pairs: int = option(4, "pairs of a sequence, at most as many as symbols", low=1)
    symbols: int = option(8, "keys, and as many values, to draw from", low=1)
    seeds: int = option(5, "runs of each arch", low=1)
    steps: int = option(1500, "most steps of a run", low=1)
    batch_size: int = option(128, "sequences per step", low=1)
    lr: float = option(3e-3, "Muon's constant rate, after 50 steps of warm-up", above=0)
    figure: str | None = option(None, "a .png of accuracy over steps; none: no figure")

    def __post_init__(self):
        if self.pairs > self.symbols:
            raise UserError(f"--pairs={self.pairs} is more than --symbols={self.symbols}")


def turn_keys(attention, kind):
    """Each head's keys k become Q k with a random orthogonal Q (p, p) that is not learned. With one
    matrix for query and key, scores w_i^* Q w_j are then no longer symmetric; with a symmetric Q,
    which reflects half of the directions, they are, but w_i^* Q w_i is 0 on average."""
    Q = torch.linalg.qr(torch.randn(attention.heads, attention.p, attention.p))[0]
    if kind == "symmetric":
        Q = Q @ torch.diag((-1.0) ** torch.arange(attention.p)) @ Q.mT
    before = attention.queries_keys_values

    def turned(Z, cache=None):
        q, k, v = before(Z, cache)
        return q, k @ Q.mT, v
    attention.queries_keys_values = turned


def build(c, arch):
    model = LanguageModel(TextConfig(arch=arch, width=c.width, heads=c.heads, layers=c.layers,
                                     shift=c.shift, context=4 * c.pairs - 1,
                                     vocab_size=2 * c.symbols))
    if c.turn != "no":
        for layer in model.layers:
            if not isinstance(layer.attention, SoftmaxAttention):
                raise UserError(f"--turn: {arch} has no keys")
            turn_keys(layer.attention, c.turn)
    return model


def sequences(c, n, *purpose):
    """(ids (n, 4 pairs - 1), targets likewise, -1 except where a key is asked for its value)."""
    generator = torch.Generator().manual_seed(derive_seed("recall", *purpose))
    keys = torch.rand(n, c.symbols, generator=generator).argsort(1)[:, :c.pairs]
    values = torch.randint(c.symbols, 2 * c.symbols, (n, c.pairs), generator=generator)
    shown = torch.stack([keys, values], 2)                          # (n, pairs, 2)
    order = torch.rand(n, c.pairs, generator=generator).argsort(1)
    asked = shown.gather(1, order[..., None].expand(-1, -1, 2))
    ids = torch.cat([shown, asked], 1).flatten(1)
    targets = torch.full_like(ids, -1)
    targets[:, 2 * c.pairs::2] = asked[..., 1]
    return ids[:, :-1], targets[:, :-1]


def train(c, arch, seed):
    """Trains one model: dict(steps until 95 % or None, the last accuracy), [(step, accuracy)]."""
    torch.manual_seed(derive_seed(seed, "weights"))
    model = build(c, arch)
    optimizers = make_optimizers(model, "muon", c.lr, 0.0, (0.9, 0.99), hidden=[model.layers])
    held_out, answers = sequences(c, 1000, seed, "held out")
    curve = []
    for step in with_bar(range(1, c.steps + 1), f"{arch}, seed {seed}"):
        model(*sequences(c, c.batch_size, seed, step)).backward()
        take_step(optimizers, c.lr * min(1, step / 50))
        if step % 50 == 0 or step == c.steps:
            with torch.no_grad():
                right = (model(held_out).argmax(-1) == answers)[answers >= 0]
            accuracy = right.float().mean().item()
            curve.append((step, accuracy))
            if accuracy >= 0.95:
                return dict(steps=step, accuracy=accuracy), curve
    return dict(steps=None, accuracy=accuracy), curve


def draw(curves, c):
    """Accuracy over steps, a line a run; `curves` {arch: [[(step, accuracy)]]}."""
    figure, ((ax,),) = new_figure(1, 1, 7, 3)
    names = {"aot-mhsa": "attention alone,\nthree matrices", "aot": "attention alone,\none matrix",
             "crate": "CRATE"}
    for arch, runs in curves.items():
        for curve in runs:
            steps, accuracy = zip(*curve)
            ax.plot(steps, [100 * a for a in accuracy], color=COLORS.get(arch, "0.3"), lw=1)
        step, accuracy = curve[-1]
        below = arch == "aot"               # it ends where CRATE does
        ax.annotate(names.get(arch, arch), (step, 100 * accuracy), color=COLORS.get(arch, "0.3"),
                    xytext=(-4, -4 if below else 4), textcoords="offset points", ha="right",
                    va="top" if below else "bottom", fontsize="small")
    ax.set(xlabel="training steps", ylabel="values recalled, %", ylim=(20, 118))
    ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(c.figure, dpi=200)


def main(argv):
    """[{"arch", "parameters", "learned", "steps", "accuracy"}, ...]."""
    c, _ = parse(Recall, {}, argv, __doc__)
    counts = {arch: count(build(c, arch), without=("positions",)) for arch in c.archs.split(",")}
    rows, curves = [], {}
    for arch, parameters in counts.items():
        runs, curves[arch] = zip(*(train(c, arch, seed) for seed in range(c.seeds)))
        learned = sum(run["steps"] is not None for run in runs)
        rows.append(dict(arch=arch, parameters=parameters, learned=f"{learned}/{c.seeds}")
                    | averages(runs))
    print_table(rows)
    if c.figure:
        draw(curves, c)
    return rows


if __name__ == "__main__":
    cli(main)
