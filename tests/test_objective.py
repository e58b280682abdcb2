"""What layers add to the rates, against each layer's own numbers."""
import copy

import pytest
import torch
from helpers import scrambled

import crate
import model as models
from experiments import objective
from experiments.shared import random_rotation, random_subspaces
from measure import at_norm


@pytest.mark.parametrize("centred", [False, True])
@torch.no_grad()
def test_added(centred):
    """At the norm of a layer's input, of two samples' tokens as one set, mean over the sets."""
    net = scrambled(models.ImageEncoder(models.ImageConfig(
        width=16, heads=2, layers=2, image_size=16, patch_size=8)))
    x = torch.randn(8, 3, 16, 16)
    traced = [*zip(net.layers, net.trace(x))]
    found = objective.added(traced, 2, seed=3, eps=0.3)[centred]
    Zs = [net.tokens(x).detach().double()]
    for layer in copy.deepcopy(net.layers).double():
        Zs.append(layer(Zs[-1]).detach())
    for l, (Z, out) in enumerate(zip(Zs, Zs[1:])):
        before, after = (T.reshape(4, 2 * 5, 16) for T in (Z, out))
        if centred:
            before, after = (T - T.mean(1, keepdim=True) for T in (before, after))
        after = after * (before.norm(dim=(1, 2)) / after.norm(dim=(1, 2)))[:, None, None]
        U = net.layers[l].attention.bases().detach().double()
        U = U * 4 / U.norm()                                    # ||U||^2 = K p = 16
        V = random_subspaces(16, 2, torch.Generator().manual_seed(3))
        R, Rc, elsewhere = (after_rate - rate for rate, after_rate in zip(*(
            [crate.coding_rate(T, 0.3), crate.subspace_coding_rate(T, U, 0.3),
             crate.subspace_coding_rate(T, V, 0.3)] for T in (before, after))))
        for name, wanted in (("layers", R - Rc), ("R", R), ("Rc", Rc),
                             ("elsewhere", R - elsewhere)):
            torch.testing.assert_close(found[name][l], wanted.mean(), rtol=1e-4, atol=1e-4)
    assert (found["short_aimed"] > found["short_random"]).all() and (found["short_aimed"] > 0).all()
    for name in ("random", "reversed", "aimed", "heads"):
        assert not torch.allclose(found[name], found["layers"])


def test_random_heads():
    U = torch.randn(3, 7, 2).double()
    V = objective.random_heads(U, random_rotation(6, torch.Generator()))
    torch.testing.assert_close((V @ V.mT).sum(0), (U @ U.mT).sum(0))
    assert V.shape == U.shape and not torch.allclose(V[0] @ V[0].mT, U[0] @ U[0].mT)


def test_along():
    """A control is at the same angle to Z, of its norm; in the same direction it is the same."""
    Z, out = torch.randn(2, 3, 7, 5).double()
    out = at_norm(out, Z)
    torch.testing.assert_close(objective.along(Z, out, out - Z), out)
    other = objective.along(Z, out, (out - Z) @ random_rotation(5, torch.Generator()))
    for product in ((other * other, Z * Z), (other * Z, out * Z)):
        torch.testing.assert_close(*(part.sum((1, 2)) for part in product))
    assert not torch.allclose(other, out)


def test_along_with_zeros():
    """This one has the zeros of the layer's output, too, token by token."""
    Z, noise = torch.randn(2, 3, 40, 50).double()
    Z, out = Z.relu(), at_norm((Z + noise / 2 - 0.5).relu(), Z.relu())
    torch.testing.assert_close(objective.along(Z, out, out - Z), out, rtol=1e-3, atol=1e-3)
    other = objective.along(Z, out, (out - Z) @ random_rotation(50, torch.Generator()))
    assert (other >= 0).all() and other.ne(0).sum(-1).equal(out.ne(0).sum(-1))
    for product in ((other * other, Z * Z), (other * Z, out * Z)):
        torch.testing.assert_close(*(part.sum((1, 2)) for part in product), rtol=1e-3, atol=0)
    assert not torch.allclose(other, out)


def test_uphill():
    """A small step along it raises R - R^c."""
    Z, U = torch.randn(2, 9, 6).double(), torch.randn(2, 6, 3).double()
    before, after = (crate.sparse_rate_reduction(T, U, 0.3, 0)
                     for T in (Z, Z + 1e-3 * objective.uphill(Z, U, 0.3)))
    assert (after > before).all()
