"""A figure from a file of records/."""
import csv

from experiments.results import recall
from flags import ROOT


def test_recall():
    """Every run of records/recall.csv without a change, at the rate 1e-3, is a dot, or counted
    beside a cross, but for the narrower mssa-mlp."""
    with open(ROOT / "records/recall.csv") as file:
        rows = [row for row in csv.DictReader(file) if (row["lr"], row["change"], row["shift"]) == (
            "0.001", "none", "False") and (row["arch"], row["width"]) != ("mssa-mlp", "64")]
    dots = [y for ax in recall().axes for line in ax.lines for y in line.get_ydata()]
    failed = [int(text.get_text()) for ax in recall().axes for text in ax.texts]
    steps = sorted(int(row["steps"]) for row in rows if row["steps"])
    assert sorted(y for y in dots if y in steps and y <= 3000) == steps
    assert sum(failed) == sum(not row["steps"] for row in rows)
