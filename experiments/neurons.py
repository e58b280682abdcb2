"""Can single neurons be read?

A neuron is one entry of a layer's code, by default the last's: ISTA's or ODL's code, or that of an
MLP after its GELU. Rows are means over an arch's checkpoints.

A k-sparse probe (Gurnee et al., Finding Neurons in a Haystack, 2023) is a logistic regression on
the k neurons whose standardized means differ most with a property. It is fitted on half of the
windows, with as many rows that have the property as not, and scored on the other half
(chance is 50 %). "k=5" is its mean accuracy over the properties. Purity is the share of one token
among a neuron's 20 highest activations, mean over at most 100 neurons that fire 20 times.
Of every model as many neurons are drawn as the narrowest model has dimensions. The control of
--turned is the same code, turned at random: then no neuron is left, but all that is linear in them.

    python -m experiments.neurons --ckpt=a.pt,b.pt --untrained
    python -m experiments.neurons --ckpt=a.pt --stream                  the tokens themselves
"""
from dataclasses import dataclass, MISSING
from typing import NamedTuple

import numpy as np
import torch

from checkpoint import each_model
from data.tokenizer import tokenizer_from_meta
from evaluate import logistic_regression
from experiments.shared import averages, Flags, random_rotation, write_csv
from flags import option, parse, UserError
from measure import inputs, print_table
from processes import cli


@dataclass(kw_only=True)
class Neurons(Flags):
    ckpt: str = option(MISSING, "checkpoints of text, separated by commas")
    layer: int | None = option(None, "which layer, from 1; auto: the last", low=1)
    turned: bool = option(False, "also of each code turned by a random rotation")
    stream: bool = option(False, "read the tokens after the layer, which CRATE's code is, instead")
    samples: int = option(2000, "windows of text, spread over the split", low=1)


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
    """What neurons are read from, a row a token."""
    values: torch.Tensor                # (N, m)
    properties: dict                    # name -> bool (N,)
    ids: np.ndarray                     # (N,): which token
    window: np.ndarray                  # (N,): in which window


@torch.no_grad()
def read_codes(loaded, c):
    """The Codes of a layer."""
    layers, decode = loaded.model.layers, tokenizer_from_meta(loaded.meta).decode
    if c.layer and c.layer > len(layers):
        raise UserError(f"--layer={c.layer}: {loaded.name} has {len(layers)} layers")
    if layers[-1].sparsification is None and not c.stream:
        raise UserError(f"the layers of {loaded.model.config.arch} have no code")
    windows, values = [], []
    for _, ids in inputs(loaded, c):
        trace = loaded.model.trace(ids)[(c.layer or 0) - 1]
        windows.append(ids.cpu())
        values.append((trace.out if c.stream else trace.code).float().cpu())
    ids = torch.cat(windows).numpy()                                    # (windows, n)
    rows = [text_properties([decode([i]) for i in window]) for window in ids]
    properties = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return Codes(torch.cat(values).flatten(0, 1), properties, ids.flatten(),
                 np.arange(len(ids)).repeat(ids.shape[1]))


def sparse_probe(codes, has, window, k, seed):
    """Accuracy of a k-sparse probe for the property has (N,), or None where it is too rare. Whole
    windows (N,) are for fitting or for testing."""
    rng, halves = np.random.default_rng(seed), []
    side = rng.permutation(window.max() + 1)[window] % 2
    for half in (0, 1):
        rows = [rng.permutation(np.flatnonzero((side == half) & (has == value)))
                for value in (False, True)]
        n = min(1000, *map(len, rows))
        if n < 10:
            return None
        halves.append((codes[np.concatenate([row[:n] for row in rows])], torch.arange(2 * n) // n))
    (x, y), (x_test, y_test) = halves
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x, x_test = (x - mean) / std, (x_test - mean) / std
    best = (x[y == 1].mean(0) - x[y == 0].mean(0)).abs().topk(min(k, x.shape[1])).indices
    W, b = logistic_regression(x[:, best], y, 2, 1e-4)
    return ((x_test[:, best] @ W + b).argmax(1) == y_test).float().mean().item()


def purity(codes, columns):
    """How much of the 20 highest activations of each neuron in `columns` is one token."""
    top = codes.values[:, columns].topk(min(20, len(codes.values)), 0).indices.numpy()
    return np.array([np.unique(ids, return_counts=True)[1].max() / len(ids)
                     for ids in codes.ids[top].T])


def probed(codes, width, seed):
    """The numbers of one row of the table, of `width` of the code's neurons."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(codes.values.shape[1], generator=generator)[:width]
    values = codes.values[:, chosen]
    numbers = dict(neurons=codes.values.shape[1],
                   nonzeros=(codes.values != 0).float().mean().item())
    for k in (1, 5, 20):
        scores = [score for has in codes.properties.values()
                  if (score := sparse_probe(values, has, codes.window, k, seed)) is not None]
        numbers[f"k={k}"] = float(np.mean(scores)) if scores else None
    alive = chosen[(values != 0).sum(0) >= 20][:100]
    numbers["purity"] = float(purity(codes, alive).mean()) if len(alive) else None
    return numbers


def turned(codes, seed):
    """The Codes, with values turned by one random rotation."""
    generator = torch.Generator().manual_seed(seed)
    rotation = random_rotation(codes.values.shape[1], generator).to(codes.values)
    return codes._replace(values=codes.values @ rotation)


def main(argv):
    """[{"code", "runs", "neurons", "nonzeros", "k=1", "k=5", "k=20", "purity"}, ...]."""
    c = parse(Neurons, argv, __doc__)
    models, runs = [*each_model(c, "gpt")], {}
    width = min(loaded.model.config.width for loaded in models)
    for loaded in models:
        name = f"{loaded.model.config.arch}, {loaded.weights}"
        seed, codes = c.seed + len(runs.setdefault(name, [])), read_codes(loaded, c)
        runs[name].append(probed(codes, width, seed))
        if c.turned:
            others = runs.setdefault(name + ", turned", [])
            others.append(probed(turned(codes, seed), width, seed))
    rows = [dict(code=name, runs=len(each)) | averages(each) for name, each in runs.items()]
    print_table(rows)
    if c.csv:
        write_csv(rows, c.csv)
    return rows


if __name__ == "__main__":
    cli(main)
