"""A figure from a file of records/."""
import csv
import re

from experiments.results import codes
from experiments.shared import COLORS
from flags import ROOT


def test_codes():
    """records/codes.csv has the numbers of TABLES, and the figure those of three runs."""
    section = (ROOT / "records/TABLES.md").read_text().split("\n## codes\n")[1].split("\n## ")[0]
    table = [line.split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    with open(ROOT / "records/codes.csv") as file:
        rows = [*csv.DictReader(file)]
    for row, cells in zip(rows, table, strict=True):
        assert [row["read"], row["weights"]] == cells[1:3]
        assert list(filter(None, [*row.values()][5:])) == re.findall(r"[\d.]+", " ".join(cells[4:]))
    lines = [bars.lines[0] for bars in codes().axes[0].containers]
    assert [line.get_color() for line in lines] == [COLORS[row["arch"]] for row in rows[:4]]
    for line, row in zip(lines, rows):
        assert [*line.get_ydata()] == [float(row[f"k={k}"]) for k in (1, 5, 20)]
