"""What does one matrix for query, key and value cost?

In-context recall: a small causal model reads pairs of a random key and a random value, then each
key again, in another order, and must say its value (the task of Arora et al. 2023 without gaps;
values may repeat). aot is aot-mhsa with one matrix for all three, mhsa-ista is crate with three.
With one, a head compares by inner products w_i^* w_j, which are symmetric, and prefers tokens that
are alike, above all itself. --change has controls between one matrix and three, see CHANGES.

    python -m experiments.recall
    python -m experiments.recall --archs=crate,mhsa-ista
    python -m experiments.recall --archs=aot,mssa-mlp,crate --change=negated        # or --shift
    python -m experiments.recall --archs=transformer --change=query=key

"steps": until 95 % of the values are right, checked every 50, mean over the runs that get there.
"accuracy": at the end of each run, mean over all. +- is the standard error.
"""
from dataclasses import dataclass

import torch

from experiments.shared import averages, write_csv
from flags import option, parse, UserError
from measure import count, print_table
from model import ARCHS, check_word, LanguageModel, MHSA, MSSA, TextConfig
from optim import make_optimizers, take_step
from processes import cli, derive_seed, with_bar


class Negated(MSSA):
    """One matrix, keys times -1: scores stay symmetric, and unlike tokens score high."""
    def queries_keys_values(self, Z, cache=None):
        q, k, v = super().queries_keys_values(Z, cache)
        return q, -k, v


class HalfNegated(MSSA):
    """One matrix, every second entry of keys times -1: scores stay symmetric, and prefer neither
    like tokens nor unlike ones."""
    def queries_keys_values(self, Z, cache=None):
        q, k, v = super().queries_keys_values(Z, cache)
        return q, k * (-1) ** torch.arange(self.p), v


class NoSelf(MSSA):
    """One matrix, and no token but the first attends to itself."""
    def attend(self, q, k, v):
        itself = torch.eye(q.shape[2], dtype=torch.bool).index_fill(0, torch.tensor(0), False)
        scores = self.scale * (q @ k.mT)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future | itself, -torch.inf).softmax(-1) @ v


def tied(kept, replaced):
    """MHSA in which the query, key or value (0, 1, 2) `replaced` is the one `kept`."""
    class Tied(MHSA):
        def queries_keys_values(self, Z, cache=None):
            parts = [*super().queries_keys_values(Z, cache)]
            parts[replaced] = parts[kept]
            return parts
    return Tied


CHANGES = {"negated": Negated, "half negated": HalfNegated, "no self": NoSelf,
           "query=key": tied(0, 1), "key=value": tied(1, 2), "query=value": tied(0, 2)}


@dataclass(kw_only=True)
class Recall:
    """The task and the models that learn it."""
    archs: str = option("transformer,aot-mhsa,aot,crate,tost", "which, by commas")
    change: str = option("none", "of a head: see CHANGES", choices=("none", *CHANGES))
    shift: bool = option(False, "keys and values that see the previous token")
    init: float = option(1.0, "initial U, or queries, keys and values, times this", above=0)
    layers: int = option(2, "layers of each model", low=1)
    width: int = option(64, "d", low=1)
    heads: int = option(4, "K", low=1)
    pairs: int = option(4, "pairs of a sequence, at most as many as symbols", low=1)
    symbols: int = option(8, "keys, and as many values, to draw from", low=1)
    seeds: int = option(5, "runs of each arch", low=1)
    steps: int = option(3000, "most steps of a run", low=1)
    batch_size: int = option(128, "sequences per step", low=1)
    lr: float = option(1e-3, "Muon's constant rate, after 50 steps of warm-up", above=0)
    csv: str | None = option(None, "a file for the rows of all runs; none: no file")

    def __post_init__(self):
        if self.pairs > self.symbols:
            raise UserError(f"--pairs={self.pairs} is more than --symbols={self.symbols}")


def build(c, arch):
    """A model of an arch, with the attention of --change."""
    check_word("arch", arch, ARCHS)
    row, changed = ARCHS[arch], CHANGES.get(c.change)
    if changed and not issubclass(changed, row.attention):
        raise UserError(f"--change={c.change} is of {changed.__base__.__name__}, and {arch} has "
                        f"{row.attention.__name__}")
    model = LanguageModel(TextConfig(
        arch=row._replace(attention=changed or row.attention), width=c.width, heads=c.heads,
        layers=c.layers, shift=c.shift, context=4 * c.pairs - 1, vocab_size=2 * c.symbols))
    for name, p in model.named_parameters():
        if name.endswith(("attention.U.weight", "attention.QKV.weight")):
            p.data *= c.init
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
        ids, targets = sequences(c, c.batch_size, seed, step)
        (model(ids, targets) / (targets >= 0).sum()).backward()
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
    c = parse(Recall, argv, __doc__)
    counts = {arch: count(build(c, arch), without=("positions",)) for arch in c.archs.split(",")}
    rows, every = [], []
    for arch, parameters in counts.items():
        runs = [train(c, arch, seed) for seed in range(c.seeds)]
        every += [dict(arch=arch, change=c.change, shift=c.shift, width=c.width, lr=c.lr,
                       parameters=parameters, init=c.init, seed=seed) | run
                  for seed, run in enumerate(runs)]
        learned = sum(run["steps"] is not None for run in runs)
        rows.append(dict(arch=arch, parameters=parameters, learned=f"{learned}/{c.seeds}")
                    | averages(runs))
    print_table(rows)
    if c.csv:
        write_csv(every, c.csv)
    return rows


if __name__ == "__main__":
    cli(main)
