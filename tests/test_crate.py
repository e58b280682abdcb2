"""crate.py computes what model.py computes, and learns."""
import torch
from torch.nn import functional as F

import crate
import model
import optim


def same_models():
    """crate.CRATE and model.ImageClassifier with the same random weights, in float64."""
    torch.manual_seed(0)
    ours = crate.CRATE(d=24, K=3, L=3, P=4, size=16).double()
    with torch.no_grad():
        for p in ours.parameters():         # LayerNorms and biases too
            p.add_(0.3 * torch.randn_like(p))
    config = model.image_config(None, width=24, heads=3, layers=3, patch_size=4, image_size=16,
                                classes=10, pool="mean")
    theirs = model.ImageClassifier(config).double()
    state = {name if name.startswith("head") else f"encoder.{name}": value
             for name, value in ours.state_dict().items()}
    theirs.load_state_dict(state)           # the names are the same, too
    return ours, theirs


def test_same_weights_same_logits():
    ours, theirs = same_models()
    x = torch.randn(5, 16, 16, 3, dtype=torch.float64)
    expected = theirs(x.permute(0, 3, 1, 2))
    torch.testing.assert_close(ours(x), expected, rtol=1e-10, atol=1e-12)
    traced = theirs.encoder.trace(x.permute(0, 3, 1, 2))
    for Z, layer in zip(ours.tokens(x)[1:], traced, strict=True):
        torch.testing.assert_close(Z, layer.out, rtol=1e-10, atol=1e-12)


def test_the_rates_are_those_of_model():
    Z = F.relu(torch.randn(4, 17, 24, dtype=torch.float64))
    U = torch.randn(3, 24, 8, dtype=torch.float64)
    torch.testing.assert_close(crate.coding_rate(Z, 0.3), model.coding_rate(Z, 0.3))
    expected = model.subspace_coding_rate(Z, U, 0.3)
    torch.testing.assert_close(crate.subspace_coding_rate(Z, U, 0.3), expected)
    expected = model.sparse_rate_reduction(Z, U, 0.3, 0.2)
    torch.testing.assert_close(crate.sparse_rate_reduction(Z, U, 0.3, 0.2), expected)


def test_newton_schulz_is_that_of_optim():
    G = torch.randn(3, 8, 8)
    torch.testing.assert_close(crate.newton_schulz(G), optim.newton_schulz(G, torch.float32))


def test_it_learns_and_looks_inside():
    torch.manual_seed(0)
    x, y = crate.shapes(40, seed=0)
    small = crate.CRATE(d=16, K=2, L=2, P=8)
    first = F.cross_entropy(small(x), y).item()
    crate.train(small, x, y, steps=60, batch=20, peak=1e-2)
    assert F.cross_entropy(small(x), y).item() < 0.9 * first
    rows = crate.look(small, x, y, x, y)
    assert len(rows) == 2
    for Rc, change, objective, nonzeros, accuracy in rows:
        assert Rc > abs(change) and objective < 0 and 0 < nonzeros < 100 and 0 <= accuracy <= 100
