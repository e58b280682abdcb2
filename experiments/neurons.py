"""Can single neurons be read?

A neuron is one entry of the tokens after the last layer, in CRATE of its code. The controls are the
same tokens, turned by random rotations or to their principal axes: then no neuron is left, but all
that is linear in them.

The F1 score of a property, such as being a digit, of a token or of the next one: one neuron says
that a token has it, if its activation is at least a threshold, or at most one. Of all neurons, and
of each rotation, the best is taken. Neuron, side and threshold are chosen on half of the windows,
and scored on the other. The columns:

    neuron      the score of the neurons        turned, spread      mean and standard deviation of
    axes        of the principal axes                               the score over rotations
    highest     of the best rotation            reached             the share with the neurons'

    python -m experiments.neurons --untrained --csv=records/neurons.csv
"""
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from data.tokenizer import tokenizer_from_meta
from experiments.shared import Flags, random_rotation, report
from flags import option, parse
from measure import inputs
from processes import cli, with_bar


@dataclass(kw_only=True)
class Neurons(Flags):
    ckpt: str = option("pretrained:pydoc-crate-plain,pretrained:pydoc-crate,"
                       "pretrained:pydoc-transformer", "checkpoints of text, separated by commas")
    samples: int = option(2000, "windows of text, at most as many as there are", low=1)
    rotations: int = option(30, "how many", low=2)


def text_properties(pieces):
    """{property: bool (n,)} of the tokens of one window. Letters count from a word's first (with
    GPT-2's tokens, its pieces); "quoted" is after an odd number of quotation marks."""
    quoted, letter, rows = False, 0, []
    for piece in pieces:
        mark = piece.strip()
        quoted ^= piece.count('"') % 2 == 1
        letter = ((0 if piece[:1].isspace() else letter) + 1) if mark.isalpha() else 0
        rows.append({
            "digit": mark.isdigit(), "capital": mark[:1].isupper(), "quoted": quoted,
            "first letter": letter == 1, "second letter": letter == 2,
            "fifth letter or later": letter > 4, "space": not mark,
            "punctuation": bool(mark) and not mark.isalnum()})
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


class Codes(NamedTuple):
    """Tokens after the last layer; the last of a window, which has no next one, has no row."""
    values: torch.Tensor                # (N, m)
    properties: dict                    # name -> bool tensor (N,)
    fit: torch.Tensor                   # bool (N,): of the half on which neurons are chosen


@torch.no_grad()
def read_codes(loaded, c):
    """The Codes of a model."""
    decode, windows, values = tokenizer_from_meta(loaded.meta).decode, [], []
    for _, ids in inputs(loaded, c):
        windows.append(ids.cpu())
        values.append(loaded.model.trace(ids)[-1].out[:, :-1].float().cpu())
    ids = torch.cat(windows).numpy()                                    # (windows, n)
    rows = [text_properties([decode([i]) for i in window]) for window in ids]
    properties = {}
    for name in rows[0]:
        has = torch.from_numpy(np.stack([row[name] for row in rows]))
        properties |= {name: has[:, :-1].flatten(), f"next: {name}": has[:, 1:].flatten()}
    fit = torch.from_numpy(np.random.default_rng(c.seed).permutation(len(ids)) % 2 == 0)
    return Codes(torch.cat(values).flatten(0, 1), properties,
                 fit.repeat_interleave(ids.shape[1] - 1))


def f1(says, has):
    return (2 * (says & has).sum() / (says.sum() + has.sum())).item()


def best_threshold(values, order, has):
    """(F1, neuron, threshold) of the best rule "this neuron is at least that" for a property has
    (n,). values (n, m) are sorted, and order has their tokens."""
    n, m = values.shape
    above = has[order].float().flip(0).cumsum(0).flip(0)    # how many have it, from each value up
    says = torch.arange(n, 0, -1)[:, None]                  # how many the rule names
    scores = 2 * above / (says + has.sum())
    scores[1:][values[1:] == values[:-1]] = 0               # of equal values all are named
    i, j = divmod(scores.argmax().item(), m)
    return scores[i, j], j, values[i, j]


def best_scores(codes):
    """{property: F1 score of the best neuron}; without those that 20 tokens or fewer have."""
    values, order = codes.values[codes.fit].sort(0)
    test, scores = codes.values[~codes.fit], {}
    for name, each in codes.properties.items():
        has, wanted = each[codes.fit], each[~codes.fit]
        if has.sum() <= 20 or wanted.sum() <= 20:
            continue
        up, j, least = best_threshold(values, order, has)
        down, k, most = best_threshold(-values.flip(0), order.flip(0), has)     # at most
        scores[name] = f1(test[:, j] >= least if up >= down else test[:, k] <= -most, wanted)
    return scores


def scored(codes):
    """best_scores, and their mean."""
    scores = best_scores(codes)
    return scores | dict(mean=float(np.mean([*scores.values()])))


def compared(codes, rotations, seed):
    """A row for each score of the codes, beside those of the controls."""
    def turned(rotation):
        return scored(codes._replace(values=codes.values @ rotation.to(codes.values)))
    own, axes = scored(codes), turned(torch.linalg.eigh(codes.values.T.double().cov())[1])
    generator, m, rows = torch.Generator().manual_seed(seed), codes.values.shape[1], []
    others = [turned(random_rotation(m, generator)) for _ in with_bar(range(rotations), "turned")]
    for name, value in own.items():
        each = np.array([scores[name] for scores in others])
        rows.append(dict(score=name, neuron=value, axes=axes[name], turned=each.mean(),
                         spread=each.std(ddof=1), highest=each.max(),
                         reached=(each >= value).mean()))
    return rows


def rows_of(loaded, c):
    return compared(read_codes(loaded, c), c.rotations, c.seed)


def main(argv):
    """The rows of --csv."""
    return report(parse(Neurons, argv, __doc__), rows_of, "gpt")


if __name__ == "__main__":
    cli(main)
