"""crate.py computes what model.py computes, and learns."""
import torch
from test_model import assert_near
from torch.nn import functional as F

import crate
import measure
import model
import optim
from experiments import compression


def test_same_weights_same_logits():
    """The names of the weights are the same, too. LayerNorms and biases are not as at the start."""
    ours = crate.CRATE(d=24, K=3, L=3, P=4, side=16).double()
    for p in ours.parameters():
        p.data += 0.3 * torch.randn_like(p)
    theirs = model.ImageClassifier(model.image_config(
        None, width=24, heads=3, layers=3, patch_size=4, image_size=16, classes=10, pool="mean"))
    theirs.double().load_state_dict({name if name.startswith("head") else f"encoder.{name}": value
                                     for name, value in ours.state_dict().items()})
    x = torch.randn(5, 16, 16, 3, dtype=torch.float64)
    channels_first = x.permute(0, 3, 1, 2)
    assert_near(ours(x), theirs(channels_first))
    rows, traces = crate.look(ours, x), theirs.encoder.trace(channels_first)
    for row, Z, layer, trace in zip(rows, ours.all_tokens(x)[1:], theirs.encoder.layers, traces):
        assert_near(Z, trace.out)
        numbers = measure.layer_numbers(layer, trace)
        U = measure.unit_size(layer.attention.bases())
        control = compression.changes(layer, trace.tokens, torch.Generator(), 0.1)
        before, start = (model.subspace_coding_rate(T, U, 0.1)
                         for T in (trace.tokens, measure.centred_normed(trace.tokens)))
        for value, wanted in zip(row.values(), (
                100 * numbers["attention_Rc"].mean() / before.mean(),
                100 * numbers["attention_Rc_normed"].mean() / start.mean(),
                100 * control["normed"]["alone"].mean() / start.mean(),
                numbers["objective"], 100 * numbers["nonzeros"]), strict=True):
            assert_near(value.double(), wanted.double().mean(), 1e-5)


def test_the_rates_are_those_of_model():
    Z = F.relu(torch.randn(4, 17, 24, dtype=torch.float64))
    U = torch.randn(3, 24, 8, dtype=torch.float64)
    for name, inputs in dict(coding_rate=(Z, 0.3), subspace_coding_rate=(Z, U, 0.3),
                             sparse_rate_reduction=(Z, U, 0.3, 0.2)).items():
        assert_near(getattr(crate, name)(*inputs), getattr(model, name)(*inputs), 1e-6)


def test_the_gradient_of_the_rate_and_its_two_terms():
    """Autograd's; where the tokens are short, the terms' error is the series' third term."""
    Z = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    U = torch.randn(3, 12, 4, dtype=torch.float64)
    expected, = torch.autograd.grad(crate.subspace_coding_rate(Z, U).sum(), Z)
    assert_near(crate.subspace_coding_rate_grad(Z, U), expected, 1e-9)
    for length in (1, 1e-3):
        first, second = crate.neumann_terms(length * Z, U)
        assert_near(first - second, model.subspace_coding_rate_grad(length * Z, U, neumann=True))
    assert_near(first - second, crate.subspace_coding_rate_grad(length * Z, U), 1e-6)


def test_newton_schulz_is_that_of_optim():
    G = torch.randn(1, 8, 12)
    assert_near(crate.newton_schulz(G[0]), optim.newton_schulz(G, torch.float32)[0], 1e-5)


def test_it_learns():
    x, y = crate.shapes(40, seed=0)
    small = crate.CRATE(d=16, K=2, L=2, P=8)
    first = F.cross_entropy(small(x), y).item()
    crate.train(small, x, y, steps=60, batch=20, peak=1e-2)
    assert F.cross_entropy(small(x), y).item() < 0.9 * first

