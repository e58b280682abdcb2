"""In-context recall: its sequences, its negated keys, and that it is learned."""
import pytest
import torch

from experiments import recall
from flags import UserError


def test_sequences():
    c = recall.Recall(pairs=3, symbols=5)
    ids, targets = recall.sequences(c, 50, 7)
    assert ids.shape == targets.shape == (50, 11)
    for row, target in zip(ids.tolist(), targets.tolist()):
        shown = dict(zip(row[0:6:2], row[1:6:2]))
        assert len(shown) == 3 and max(shown) < 5 <= min(shown.values()) and max(row) < 10
        assert sorted(row[6::2]) == sorted(shown)
        assert [shown[key] for key in row[6::2]] == target[6::2]
        assert row[7::2] == target[6:-1:2]                  # the answer follows the question
        assert all(target[i] == -1 for i in [*range(6), 7, 9])
    assert [torch.equal(ids, recall.sequences(c, 50, s)[0]) for s in (7, 8)] == [True, False]


def test_negated():
    """Scores keep their size and their symmetry, but for the sign."""
    c = recall.Recall(negated=True, width=8, heads=2)
    attention = recall.build(c, "aot").layers[0].attention
    q, k, v = attention.queries_keys_values(torch.randn(1, 9, 8))      # (1, 2, 9, 4)
    assert torch.equal(q, v) and torch.equal(k, -q)


def test_recall():
    """One pair is recalled by any arch that can copy; two seeds have a mean and its error."""
    flags = "--archs=aot-mhsa", "--layers=1", "--width=16", "--heads=2", "--pairs=1", "--symbols=4"
    row, = recall.main([*flags, "--seeds=2", "--steps=400", "--lr=1e-2"])
    assert row["learned"] == "2/2" and row["accuracy"] >= 0.95 and row["steps"] <= 400
    row, = recall.main([*flags, "--seeds=1", "--steps=1"])
    assert row["learned"] == "0/1" and row["steps"] is None and row["accuracy"] < 0.7
    with pytest.raises(UserError, match="tost, negated: its attention is not MSSA"):
        recall.main(["--archs=tost", "--negated"])
