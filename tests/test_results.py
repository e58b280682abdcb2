"""A table of TABLES and its file in records/; a figure from a file."""
import csv
import re

from experiments.results import recall
from flags import ROOT


def test_codes():
    """records/codes.csv has the numbers of TABLES."""
    section = (ROOT / "records/TABLES.md").read_text().split("\n## codes\n")[1].split("\n## ")[0]
    table = [line.split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    with open(ROOT / "records/codes.csv") as file:
        rows = [*csv.DictReader(file)]
    for row, cells in zip(rows, table, strict=True):
        assert [row["read"], row["weights"]] == cells[1:3]
        assert list(filter(None, [*row.values()][5:])) == re.findall(r"[\d.]+", " ".join(cells[4:]))


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
