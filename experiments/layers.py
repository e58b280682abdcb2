"""Do R^c and the nonzeros fall from layer to layer?

[N] Figures 3 and 4 show that both do. Counted are the places where a layer has less than the one
before it, in trained models and, the control, in the same models at random weights. The columns
are those of `python analyze.py layers --help`.

    python -m experiments.layers --csv=records/layers.csv
"""
from dataclasses import dataclass

from checkpoint import each_model
from experiments.shared import described, Flags, write_csv
from flags import option, parse
from measure import layer_table, print_table
from processes import cli

FALLING = "Rc_tokens", "Rc", "nonzeros"


@dataclass(kw_only=True)
class LayerToLayer(Flags):
    untrained: bool = option(True, "each a second time, with random weights")
    eps: float = option(0.1, "distortion of the rates; 0.1 is [N]'s figure", low=1e-6)
    lambd: float = option(0.1, "weight of ||Z||_0 in the objective", low=0)


def places(table):
    """{column: in how many places it falls} of the rows of a model's layers."""
    return {name: sum(after[name] < before[name] for before, after in zip(table, table[1:]))
            for name in FALLING}


def main(argv):
    """[{"model", "weights", "places": how many there are, column: in how many it falls}, ...]."""
    c = parse(LayerToLayer, argv, __doc__)
    rows, counts = [], []
    for loaded in each_model(c):
        table = layer_table(loaded, c)
        rows += [described(loaded) | row for row in table]
        counts.append(described(loaded) | dict(places=len(table) - 1) | places(table))
    print("in how many places a number falls from one layer to the next")
    print_table(counts)
    if c.csv:
        write_csv(rows, c.csv)
    return counts


if __name__ == "__main__":
    cli(main)
