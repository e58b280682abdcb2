"""The control of reading beyond the length of training; a figure from a file of records/."""
import csv
import re

import torch
from torch.nn import functional as F

from experiments.results import codes, losses_by_position
from experiments.shared import COLORS
from flags import ROOT
from model import LanguageModel, TextConfig


@torch.no_grad()
def test_losses_by_position():
    """Each loss is of the same character in both, and short sees what lies in the window alone."""
    torch.manual_seed(0)
    model = LanguageModel(TextConfig(width=16, heads=2, layers=1, context=8, vocab_size=7,
                                     rotary=True)).eval()
    ids = torch.randint(7, (3, 21))                         # 20 characters and the one after
    full, short = losses_by_position(model, ids, at_most=8, step=4)
    assert full.shape == short.shape == (3, 12)
    wanted = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(full, wanted[:, 8:])
    for i in range(12):
        start = i // 4 * 4 + 4                              # of the eight characters that it sees
        logits = model(ids[:, start:start + 8])[:, 4 + i % 4]
        torch.testing.assert_close(short[:, i], F.cross_entropy(logits, ids[:, 9 + i],
                                                                reduction="none"))


def test_codes():
    """records/codes.csv has the numbers of TABLES, and the figure those of three runs."""
    section = (ROOT / "records/TABLES.md").read_text().split("\n## codes\n")[1].split("\n## ")[0]
    table = [line.split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    with open(ROOT / "records/codes.csv") as file:
        rows = [*csv.DictReader(file)]
    for row, cells in zip(rows, table, strict=True):
        assert [row["read"], row["weights"]] == cells[1:3]
        assert list(filter(None, [*row.values()][5:])) == re.findall(r"[\d.]+", " ".join(cells[4:]))
    lines = [bars.lines[0] for bars in codes(None).axes[0].containers]
    assert [line.get_color() for line in lines] == [COLORS[row["arch"]] for row in rows[:4]]
    for line, row in zip(lines, rows):
        assert [*line.get_ydata()] == [float(row[f"k={k}"]) for k in (1, 5, 20)]
