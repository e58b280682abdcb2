"""A figure from a file of records/."""
import csv

from experiments.results import recall
from flags import ROOT


def test_recall():
    """Every run of records/recall.csv at the rate 1e-3 is a dot, or counted beside a cross, but for
    one change that only TABLES has."""
    with open(ROOT / "records/recall.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["lr"] == "0.001"
                and row["change"] != "no self"]
    dots = [x for ax in recall().axes for line in ax.lines for x in line.get_xdata() if x <= 3000]
    failed = [int(text.get_text()) for ax in recall().axes for text in ax.texts]
    assert sorted(dots) == sorted(int(row["steps"]) for row in rows if row["steps"])
    assert sum(failed) == sum(not row["steps"] for row in rows)
