"""In-context recall: its sequences, its controls, and that it is learned."""
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


@pytest.mark.parametrize("change", recall.CHANGES)
def test_changes(change):
    c = recall.Recall(change=change, width=8, heads=2)
    arch = "aot-mhsa" if "=" in change else "aot"
    attention, Z = recall.build(c, arch).layers[0].attention, torch.randn(1, 9, 8)
    q, k, v = attention.queries_keys_values(Z)                          # (1, 2, 9, 4)
    if change == "negated":                 # scores keep their size and symmetry, but for the sign
        assert torch.equal(q, v) and torch.equal(k, -q)
    elif change == "half negated":          # symmetric; a token's score with itself has any sign
        assert torch.equal(q, v) and torch.equal(k, torch.tensor([1, -1, 1, -1]) * q)
    elif change == "no self":
        weights = attention.attend(q, k, torch.eye(9).expand(1, 2, 9, 9))
        assert torch.equal((weights[0, 0] > 0).long(), torch.ones(9, 9).tril(-1).long().index_put(
            (torch.tensor(0), torch.tensor(0)), torch.tensor(1)))
        assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 9))
    else:
        parts = dict(query=q, key=k, value=v)
        same, other = change.split("="), {*parts} - {*change.split("=")}
        assert torch.equal(parts[same[0]], parts[same[1]])
        assert not torch.equal(parts[same[0]], parts[other.pop()])


def test_recall():
    """One pair is recalled by any arch that can copy; two seeds have a mean and its error."""
    flags = "--archs=aot-mhsa", "--layers=1", "--width=16", "--heads=2", "--pairs=1", "--symbols=4"
    row, = recall.main([*flags, "--seeds=2", "--steps=400", "--lr=1e-2"])
    assert row["learned"] == "2/2" and row["accuracy"] >= 0.95 and row["steps"] <= 400
    row, = recall.main([*flags, "--seeds=1", "--steps=1"])
    assert row["learned"] == "0/1" and row["steps"] is None and row["accuracy"] < 0.7
    with pytest.raises(UserError, match="--change=negated is of MSSA, and tost has TSSA"):
        recall.main(["--archs=tost", "--change=negated"])
