"""The steps of experiments/compression.py are what they claim, and so are their controls."""
import csv

import pytest
import torch
from helpers import scrambled, write_model
from test_model import assert_near

import crate
import model as models
from checkpoint import load_model
from data import images
from experiments import compression
from experiments.random_tokens import directions, random_tokens
from experiments.shared import random_subspaces
from measure import unit_size


def start(seed, norm):
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(20, 24, generator=generator, dtype=torch.float64)
    return norm * Z / 24 ** 0.5, random_subspaces(24, 4, generator)


@pytest.mark.parametrize("norm", [0.5, 2.0])
def test_directions_are_the_gradients_they_claim(norm):
    Z, U = start(1, norm)
    bases = torch.cat([*U], 1)                                      # orthonormal, all of them
    assert_near(bases.mT @ bases, torch.eye(24).double())
    beta = 6 / (20 * 0.5 ** 2)
    Z.requires_grad_()
    w = Z @ U
    first, second = beta / 2 * w.square().sum(), -beta ** 2 / 4 * (w @ w.mT).square().sum()
    rate = models.subspace_coding_rate(Z, U, 0.5)
    assert first + second <= rate                                   # [S]'s lower bound
    added = directions(Z.detach(), U, 0.5).values()
    attention, negative, shorter, shrunk, alone, *gradients = added
    for found, function in zip(gradients, (first + second, rate), strict=True):
        gradient, = torch.autograd.grad(function, Z, retain_graph=True)
        assert_near(found, -gradient / beta)
    assert_near(attention, beta * models.mssa(Z, U))
    assert_near(Z + 0.1 * shrunk, 0.9 * Z + 0.1 * attention)        # [J] Eq. (34)
    assert_near(Z + 0.1 * alone, 0.9 * Z)
    assert_near(-negative, attention)
    assert_near(shorter.norm(), attention.norm())


def test_shrinking_does_what_the_step_was_derived_to_do():
    """On random tokens. + MSSA raises R^c, as [S] found; with Eq. (34)'s shrinkage R^c falls, but
    no more than by shrinking alone; at the norm of Z it is + MSSA that lowers R^c, a little."""
    attention, negative, shorter, shrunk, alone, terms, gradient = random_tokens(0)
    assert list(attention)[1::2] == ["0.5", "2", "57.6"]            # the series converges in one
    for size in ("0.5", "2", "57.6"):
        equal = f"{size}, equal norm"
        assert alone[size] < shrunk[size] < 0 < attention[size]
        assert shorter[size] < negative[size] < 0
        assert shorter[equal] == alone[equal] == 0
        assert attention[equal] < 0 < negative[equal] and shrunk[equal] < 0
        assert gradient[size] < 0 and gradient[equal] < 0
    assert terms["0.5"] < 0 < terms["2"] < terms["57.6"]


@pytest.mark.parametrize("causal", [True, False])
def test_shuffled(causal):
    """A row keeps its own weight and those of tokens it does not see; the others change places,
    each to each with the same chance."""
    A = torch.arange(1.0, 26).view(1, 1, 5, 5).expand(6000, 1, 5, 5)
    A = A.tril() if causal else A
    found = compression.shuffled(A, causal, torch.Generator().manual_seed(0))
    for i in range(5):
        others = [j for j in range(i if causal else 5) if j != i]
        stays = [j for j in range(5) if j not in others]
        assert torch.equal(found[..., i, stays], A[..., i, stays])
        assert torch.equal(found[..., i, others].sort(-1)[0], A[..., i, others].sort(-1)[0])
        for j in others:
            wanted = A[0, 0, i, others].mean().item()
            assert found[..., i, j].mean().item() == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("text", [True, False])
@torch.no_grad()
def test_controls(text):
    """A token alone has its own value; turning keeps lengths and angles; the gradient is (31)."""
    if text:
        model = models.LanguageModel(models.TextConfig(
            width=16, heads=2, layers=1, context=9, vocab_size=8, rotary=True, shift=True))
    else:
        model = models.ImageEncoder(models.ImageConfig(
            width=16, heads=2, layers=1, image_size=32, patch_size=8))
    layer, Z = scrambled(model).double().layers[0], torch.randn(3, 9, 16).double()
    attention, X = layer.attention, layer.norm1(Z)
    found = compression.steps(layer, Z, torch.Generator(), 0.3)
    assert_near(found["attention"], attention(X))
    values = attention.queries_keys_values(X)[2]
    eye = torch.eye(9).double()
    assert_near(found["alone"], attention.join(eye @ values))
    others = attention.map(X) * (1 - eye)
    others[..., 1 if text else 0:, :] /= others[..., 1 if text else 0:, :].sum(-1, keepdim=True)
    assert_near(found["others"], attention.join(others @ values))
    first, _ = crate.neumann_terms(X, attention.bases())
    assert_near(found["shrink"], -first / (8 / (9 * 0.5 ** 2)))         # less beta
    assert_near(found["reversed"], -attention(X))
    assert_near(found["gradient"],
                -crate.subspace_coding_rate_grad(X, unit_size(attention.bases()), 0.3))
    equal = compression.steps(layer, Z[:1].expand(3, -1, -1), torch.Generator(), 0.3)
    assert_near(equal["one_map"], attention(X)[:1].expand(3, -1, -1))   # equal samples have one map
    assert not torch.allclose(found["one_map"], attention(X))
    for name in ("attention", "others", "alone"):
        own = found[name].flatten(0, 1)
        turned = found[f"{name}_turned".removeprefix("attention_")].flatten(0, 1)
        assert_near(turned @ turned.mT, own @ own.mT)
        assert not torch.allclose(turned, own)
    assert not torch.allclose(found["shuffled"], attention(X))


@pytest.mark.parametrize("arch", ["crate", "transformer"])
@torch.no_grad()
def test_changes(arch, eps=0.3):
    """Of the tokens, and of those less their mean after a LayerNorm, whatever their lengths; of
    steps as they are and at attention's length; on U and on random subspaces."""
    model = models.ImageEncoder(models.ImageConfig(
        arch=arch, width=16, heads=2, layers=1, image_size=32, patch_size=8))
    layer, Z = scrambled(model).double().layers[0], torch.randn(3, 17, 16).double()
    U, generator = unit_size(layer.attention.bases()), torch.Generator()
    V = random_subspaces(16, 2, generator)
    added = compression.steps(layer, Z, generator, eps)
    found = compression.changes(layer, Z, torch.Generator(), eps)

    def rate(T, U=U):
        return models.subspace_coding_rate(T, U, eps)

    def after_norm(T):
        T = T - T.mean(1, keepdim=True)
        T = T - T.mean(2, keepdim=True)
        return T / (T.square().mean(2, keepdim=True) + 1e-5).sqrt()
    grown = (Z + added["attention"]).norm(dim=2) / Z.norm(dim=2)
    assert_near(found["lengths"]["tokens"], grown.mean(1))
    for name, step in added.items():
        length, own = ((T - T.mean(1, keepdim=True)).norm(dim=(1, 2))
                       for T in (step, added["attention"]))
        length = length / own
        assert_near(found["lengths"][name], length)
        assert_near(found["raw"][name], rate(Z + step) - rate(Z))
        scaled = step / length[:, None, None]
        tokens = (Z - Z.mean(1, keepdim=True)).norm(dim=(1, 2)) / own
        for table, (step, bases) in dict(
                normed=(scaled, U), own_length=(step, U), elsewhere=(scaled, V),
                short=(0.01 * tokens[:, None, None] * scaled, U)).items():
            assert_near(found[table][name],
                        rate(after_norm(Z + step), bases) - rate(after_norm(Z), bases))
    of_all = compression.changes(layer, Z, torch.Generator(), eps, together=3)
    whole, one = (T.flatten(0, 1)[None] for T in (Z, Z + added["attention"]))
    assert_near(of_all["normed"]["attention"], rate(after_norm(one)) - rate(after_norm(whole)))


@torch.no_grad()
def test_tables(tmp_path, cache):
    """A row for each layer and for all of them; what is printed are shares of R^c before."""
    model, path = models.ImageClassifier(models.ImageConfig(
        width=16, heads=2, layers=2, image_size=32, patch_size=8, classes=10)), tmp_path / "a.pt"
    write_model(path, model, "vit", images.load("shapes", cache).meta())
    table = tmp_path / "a.csv"
    flags = [f"--ckpt={path}", f"--data_dir={cache}", "--device=cpu", "--samples=6",
             "--batch_size=4"]
    rows = compression.main([*flags, f"--csv={table}"])
    assert [row["layer"] for row in rows] == [1, 2, "all"] * 6
    for row, kept in zip(rows, csv.DictReader(table.open()), strict=True):
        assert float(kept["alone"]) == pytest.approx(row["alone"], rel=1e-3)
    c = compression.parse(compression.Compression, flags, "")
    numbers = compression.measured(load_model(path), c)
    own = numbers["normed"]["alone"]
    assert own.shape == (3, 6)                                          # layers and all, samples
    assert rows[3]["alone"] == pytest.approx(own[0].mean().item())
    assert rows[3]["alone_error"] == pytest.approx((own[0].std() / 6 ** 0.5).item())
    assert rows[5]["alone"] == pytest.approx(own[:2].mean(1).sum().item())
    assert rows[17]["alone"] == pytest.approx(numbers["lengths"]["alone"][:2].mean().item())
    share = compression.shares(compression.rows_of(numbers))["normed"]
    assert share["alone"] == pytest.approx(100 * rows[5]["alone"] / rows[5]["before"], abs=0.01)
