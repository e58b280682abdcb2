"""What several experiments use: flags, means with their errors, files, a kind of figure, random
subspaces and rotations."""
import csv
from dataclasses import dataclass

import numpy as np
import torch

from checkpoint import each_model
from flags import option, SampleFlags, UserError
from measure import print_table

CRATES = ",".join(f"pretrained:{name}" for name in (
    "shapes-crate", "cifar10-crate", "cifar10-crate-large", "pydoc-crate-plain", "pydoc-crate"))
WITH_TRANSFORMERS = f"{CRATES},pretrained:cifar10-transformer,pretrained:pydoc-transformer"


@dataclass(kw_only=True)
class Flags(SampleFlags):
    """What an experiment measures, and where it writes."""
    ckpt: str = option(CRATES, "checkpoints, separated by commas")
    untrained: bool = option(False, "each a second time, with random weights")
    csv: str | None = option(None, "a file for the rows; none: no file")


def averages(runs):
    """{key: mean, key_error: standard error} of the numbers of several runs; None is left out."""
    means = {}
    for key in runs[0]:
        values = [run[key] for run in runs if run[key] is not None]
        means[key] = float(np.mean(values)) if values else None
        if len(values) > 1:
            means[key + "_error"] = float(np.std(values, ddof=1) / len(values) ** 0.5)
    return means


def described(loaded):
    """The first columns of a row: which model, and whether its weights are trained or random."""
    return dict(model=loaded.name, weights=loaded.weights)


def each_sample(**columns):
    """A dict for each sample of columns (B,)."""
    rows = torch.stack([*columns.values()], 1).tolist()
    return [dict(zip(columns, row)) for row in rows]


def write_csv(rows, path):
    """Rows, as dicts, with four digits of each number; a cell of a missing key is empty."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*dict.fromkeys(key for row in rows for key in row)],
                                lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.4g}" if isinstance(value, float) else value
                          for key, value in row.items()} for row in rows)


def report(c, rows_of, *tasks):
    """Prints the rows, dicts, that rows_of(loaded, c) has of each model of c.ckpt, and writes those
    of all models to c.csv. Returns these."""
    found = []
    for loaded in each_model(c, *tasks):
        rows = rows_of(loaded, c)
        print(loaded.label)
        print_table(rows)
        found += [described(loaded) | row for row in rows]
    if c.csv:
        write_csv(found, c.csv)
    return found


def one_set(T, together):
    """The tokens T (B, n, d) of `together` samples as one set: (B / together, together n, d)."""
    if len(T) % together:
        raise UserError(f"{len(T)} samples at once are no multiple of {together} coded together")
    return T.double().unflatten(0, (-1, together)).flatten(1, 2)


def dot_rows(ax, names, xlabel):
    """Makes `ax` a panel for dots: a row for each name, from the top, and a line at x = 0."""
    ax.axvline(0, color="black", lw=0.8)
    for place in range(len(names)):
        ax.axhline(place + 0.5, color="0.85", lw=0.6, zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlabel=xlabel, ylim=(len(names) - 0.5, -0.5))
    ax.tick_params(left=False)
    ax.spines[["top", "right", "left"]].set_visible(False)


def random_subspaces(d, K, generator):
    """K random subspaces of R^d, each orthogonal to the others: bases (K, d, p), float64."""
    A = torch.randn(d, d // K * K, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(A)[0].view(d, K, d // K).transpose(0, 1)


def random_rotation(d, generator):
    """A random orthogonal matrix (d, d), float64."""
    return torch.linalg.qr(torch.randn(d, d, generator=generator).double())[0]
