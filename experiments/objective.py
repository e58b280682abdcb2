"""Do the layers raise R - R^c, and would any subspaces do?

What layers add to the rate reduction R - R^c at the norm of their input, trained and at random
weights, if 1, 4, 16 or 64 samples are coded as one set: the first layer, and later the others.
Elsewhere is the control: R^c of random orthogonal subspaces that fill the space. Centred: of the
set's tokens less their mean, which ISTA moves, since its output has no entries below 0.

    python -m experiments.objective --csv=records/objective.csv
"""
import itertools
from dataclasses import dataclass

import torch

from analyze import at_norm, traces, unit_size
from checkpoint import each_model
from experiments.shared import described, Flags, one_set, random_subspaces, write_csv
from figures import print_table
from flags import option, parse, UserError
from model import coding_rate, subspace_coding_rate
from processes import cli

TOGETHER = 1, 4, 16, 64      # samples coded together


@dataclass(kw_only=True)
class Objective(Flags):
    untrained: bool = option(True, "each a second time, with random weights")
    samples: int = option(64, "images or windows of text, a multiple of 64", low=64)
    batch_size: int = option(64, "samples at once, a multiple of 64", low=64)


def added(traced, together, centred, seed, eps=0.1):
    """(3, L): what each of the traced layers adds, at the norm of its input, to R, to R^c, and to
    the R^c of random subspaces that fill the space; of `together` samples' tokens as one set, or of
    these less their mean (centred), in nats, mean over the sets."""
    rows, generator = [], torch.Generator()
    for layer, trace in traced:
        Z, out = one_set(trace.tokens, together), one_set(trace.out, together)
        if centred:
            Z, out = Z - Z.mean(1, keepdim=True), out - out.mean(1, keepdim=True)
        out, U = at_norm(out, Z), unit_size(layer.attention.bases().double())
        V = random_subspaces(U.shape[1], U.shape[0], generator.manual_seed(seed)).to(U)
        before, after = (torch.stack([coding_rate(T, eps), subspace_coding_rate(T, U, eps),
                                      subspace_coding_rate(T, V, eps)]) for T in (Z, out))
        rows.append((after - before).mean(1))
    return torch.stack(rows, 1)


@torch.no_grad()
def main(argv):
    """The rows of the table, in nats."""
    c = parse(Objective, argv, __doc__)
    if c.samples % TOGETHER[-1] or c.batch_size % TOGETHER[-1]:
        raise UserError(f"--samples and --batch_size are multiples of {TOGETHER[-1]}")
    rows = []
    for loaded in each_model(c):
        batches = {key: [] for key in itertools.product(TOGETHER, (False, True))}
        for traced in traces(loaded, c):
            for key, parts in batches.items():
                parts.append(added(traced, *key, c.seed))
        for (together, centred), parts in batches.items():
            R, Rc, elsewhere = torch.stack(parts).mean(0)
            changes = dict(later=R - Rc, later_elsewhere=R - elsewhere, later_R=R, later_Rc=Rc)
            first = dict(together=together, centred=centred, first=(R[0] - Rc[0]).item())
            rows.append(described(loaded) | first | {
                name: change[1:].sum().item() for name, change in changes.items()})
    print("what layers add, nats")
    print_table(rows)
    if c.csv:
        write_csv(rows, c.csv)
    return rows


if __name__ == "__main__":
    cli(main)
