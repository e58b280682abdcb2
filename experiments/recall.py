"""What does one matrix for query, key and value cost?

In-context recall: a small causal model reads pairs of a random key and a random value, then each
key again, in another order, and must say its value (the task of Arora et al. 2023 without gaps;
values may repeat). aot is aot-mhsa with one matrix for all three, mhsa-ista is crate with three.
With one, scores are inner products w_i^* w_j: symmetric, and none is negative of a token with
itself. --scores takes these away, without a new parameter: see change_scores.

    python -m experiments.recall
    python -m experiments.recall --archs=crate,mhsa-ista
    python -m experiments.recall --archs=aot,mssa-mlp,crate --scores=rotated        # or --shift

"steps": until 95 % of the values are right, checked every 50, mean over the runs that get there.
"accuracy": at the end of each run, mean over all. +- is the standard error.

Verdict (2026-11-27; 2 layers, 5 seeds, 1,500 steps): attention alone learns it with three matrices
in 250 steps, with one not at all. Scores that stay symmetric but are no inner products (reflected)
mend it in 380 steps, asymmetric ones (rotated) in 300; no scores of tokens with themselves (apart)
do not. So it is not symmetry that costs, nor attention to oneself alone: it is that a head prefers
tokens that are alike. CRATE fails with any of these and with three matrices: more is in its way.
--shift mends all; its heads start out near what the task needs.
"""
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from experiments.shared import averages
from figures import print_table
from flags import option, parse, UserError
from model import LanguageModel, SoftmaxAttention, TextConfig
from optim import count, make_optimizers, take_step
from processes import cli, derive_seed, with_bar


@dataclass(kw_only=True)
class Recall:
    """The task and the models that learn it."""
    archs: str = option("transformer,aot-mhsa,aot,crate,tost", "which, by commas")
    scores: str = option("plain", "what keys and queries are compared by: see change_scores",
                         choices=("plain", "rotated", "reflected", "apart"))
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

    def __post_init__(self):
        if self.pairs > self.symbols:
            raise UserError(f"--pairs={self.pairs} is more than --symbols={self.symbols}")


def change_scores(attention, kind):
    """Scores q_i^* k_j become q_i^* Q k_j with an orthogonal Q (p, p) for each head, random and not
    learned: "rotated" by any Q; "reflected" by a symmetric one, with -1 for half of the directions,
    so that with one matrix w_i^* Q w_j is symmetric and w_i^* Q w_i of either sign.
    "apart": the scores of tokens with themselves become 0."""
    Q = torch.linalg.qr(torch.randn(attention.heads, attention.p, attention.p))[0]
    if kind == "reflected":
        Q = Q @ torch.diag((-1.0) ** torch.arange(attention.p)) @ Q.mT
    before, scale = attention.queries_keys_values, attention.scale

    def turned(Z, cache=None):
        q, k, v = before(Z, cache)
        return q, k @ Q.mT, v

    def apart(q, k, v):
        bias = -scale * torch.diag_embed((q * k).sum(-1))
        bias = bias + torch.full(bias.shape[-2:], -torch.inf).triu(1)
        ssa = F.scaled_dot_product_attention(q, k, v, bias, scale=scale)
        return ssa.transpose(1, 2).flatten(2)
    if kind == "apart":
        attention.attend = apart
    else:
        attention.queries_keys_values = turned


def build(c, arch):
    model = LanguageModel(TextConfig(arch=arch, width=c.width, heads=c.heads, layers=c.layers,
                                     shift=c.shift, context=4 * c.pairs - 1,
                                     vocab_size=2 * c.symbols))
    if c.scores != "plain":
        for layer in model.layers:
            if not isinstance(layer.attention, SoftmaxAttention):
                raise UserError(f"--scores: {arch} compares no tokens")
            change_scores(layer.attention, c.scores)
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
    """Trains one model: dict(steps until 95 % or None, the last accuracy)."""
    torch.manual_seed(derive_seed(seed, "weights"))
    model = build(c, arch)
    optimizers = make_optimizers(model, "muon", c.lr, 0.0, (0.9, 0.99), hidden=[model.layers])
    held_out, answers = sequences(c, 1000, seed, "held out")
    for step in with_bar(range(1, c.steps + 1), f"{arch}, seed {seed}"):
        model(*sequences(c, c.batch_size, seed, step)).backward()
        take_step(optimizers, c.lr * min(1, step / 50))
        if step % 50 == 0 or step == c.steps:
            with torch.no_grad():
                right = (model(held_out).argmax(-1) == answers)[answers >= 0]
            accuracy = right.float().mean().item()
            if accuracy >= 0.95:
                return dict(steps=step, accuracy=accuracy)
    return dict(steps=None, accuracy=accuracy)


def main(argv):
    """[{"arch", "parameters", "learned", "steps", "accuracy"}, ...]."""
    c, _ = parse(Recall, {}, argv, __doc__)
    counts = {arch: count(build(c, arch), without=("positions",)) for arch in c.archs.split(",")}
    rows = []
    for arch, parameters in counts.items():
        runs = [train(c, arch, seed) for seed in range(c.seeds)]
        learned = sum(run["steps"] is not None for run in runs)
        rows.append(dict(arch=arch, parameters=parameters, learned=f"{learned}/{c.seeds}")
                    | averages(runs))
    print_table(rows)
    return rows


if __name__ == "__main__":
    cli(main)
