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


@pytest.mark.parametrize("scores", ["rotated", "reflected"])
def test_turned_keys(scores):
    """They are as long as before; scores are symmetric if the matrix is. Its trace is then 0."""
    c = recall.Recall(scores=scores, width=8, heads=2)
    attention = recall.build(c, "aot").layers[0].attention
    q, k, v = attention.queries_keys_values(torch.randn(1, 3, 8))
    assert torch.equal(q, v) and torch.allclose(k.norm(dim=-1), q.norm(dim=-1))
    gram = q @ k.mT
    q, k, _ = attention.queries_keys_values(torch.randn(1, 9, 8))
    Q = torch.linalg.lstsq(q, k).solution
    if c.scores == "reflected":
        assert torch.allclose(gram, gram.mT, atol=1e-5)
        assert Q.diagonal(dim1=-2, dim2=-1).sum(-1).abs().max() < 1e-4
    else:
        assert (gram - gram.mT).abs().max() > 0.1 * gram.abs().max()


def test_scores_apart():
    """As the equation with zeros on the diagonal of the scores; nothing of later tokens."""
    model = recall.build(recall.Recall(scores="apart", width=8, heads=2), "aot")
    attention = model.layers[0].attention
    Z = torch.randn(1, 5, 8)
    w = attention.queries_keys_values(Z)[0]                                 # (1, 2, 5, 4)
    scores = attention.scale * w @ w.mT
    scores = scores - torch.diag_embed(scores.diagonal(dim1=-2, dim2=-1))
    A = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf).softmax(-1)
    expected = attention.W((A @ w).transpose(1, 2).flatten(2))
    assert torch.allclose(attention(Z), expected, atol=1e-6)


def test_recall():
    """One pair is recalled by any arch that can copy; two seeds have a mean and its error."""
    flags = "--archs=aot-mhsa", "--layers=1", "--width=16", "--heads=2", "--pairs=1", "--symbols=4"
    row, = recall.main([*flags, "--seeds=2", "--steps=400", "--lr=1e-2"])
    assert row["learned"] == "2/2" and row["accuracy"] >= 0.95 and row["steps"] <= 400
    row, = recall.main([*flags, "--seeds=1", "--steps=1"])
    assert row["learned"] == "0/1" and row["steps"] is None and row["accuracy"] < 0.7
    with pytest.raises(UserError, match="--scores: tost compares no tokens"):
        recall.main(["--archs=tost", "--scores=rotated"])
