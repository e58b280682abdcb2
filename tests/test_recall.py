"""In-context recall: its sequences, its turned keys, and that it is learned."""
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
    assert not torch.equal(ids, recall.sequences(c, 50, 8)[0])
    assert torch.equal(ids, recall.sequences(c, 50, 7)[0])


@pytest.mark.parametrize("kind", ["rotated", "reflected", "apart"])
def test_scores(kind):
    """Against the equation. Rotated scores are not symmetric; the matrix of a reflection has trace
    0, and turned keys are as long as before."""
    model = recall.build(recall.Recall(scores=kind, width=8, heads=2), "aot")
    attention, Z = model.layers[0].attention, torch.randn(1, 9, 8)
    w, k, v = attention.queries_keys_values(Z)                              # (1, 2, 9, 4)
    scores = w @ k.mT
    if kind == "apart":
        scores = scores - torch.diag_embed(scores.diagonal(dim1=-2, dim2=-1))
    A = scores.masked_fill(torch.ones(9, 9).triu(1) > 0, -torch.inf) * attention.scale
    expected = attention.W((A.softmax(-1) @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(attention(Z), expected, atol=1e-6)
    assert torch.allclose(scores, scores.mT, atol=1e-5) == (kind != "rotated")
    assert torch.equal(w, v) and torch.allclose(k.norm(dim=-1), w.norm(dim=-1))
    if kind == "reflected":
        Q = torch.linalg.lstsq(w, k).solution
        assert Q.diagonal(dim1=-2, dim2=-1).sum(-1).abs().max() < 1e-4


def test_recall():
    """One pair is recalled by any arch that can copy; two seeds have a mean and its error."""
    flags = "--archs=aot-mhsa", "--layers=1", "--width=16", "--heads=2", "--pairs=1", "--symbols=4"
    row, = recall.main([*flags, "--seeds=2", "--steps=400", "--lr=1e-2"])
    assert row["learned"] == "2/2" and row["accuracy"] >= 0.95 and row["steps"] <= 400
    row, = recall.main([*flags, "--seeds=1", "--steps=1"])
    assert row["learned"] == "0/1" and row["steps"] is None and row["accuracy"] < 0.7
    with pytest.raises(UserError, match="--scores: tost compares no tokens"):
        recall.main(["--archs=tost", "--scores=rotated"])
