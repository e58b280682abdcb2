"""The steps of experiments/compression.py are what they claim, and so are their controls."""
import pytest
import torch
from helpers import scrambled, write_model
from test_model import assert_near
from torch.nn import functional as F

import model as models
from analyze import unit_size
from data import images
from experiments import compression
from experiments.compression import random_subspaces, steps
from experiments.random_tokens import directions, random_tokens
from flags import UserError


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


@pytest.mark.parametrize("text", [True, False])
@torch.no_grad()
def test_controls(text):
    """Alone is attention with the map I, mean with a map of equal weights, on the layer's values:
    with --shift they have a part of the token before."""
    if text:
        model = models.LanguageModel(models.TextConfig(
            width=16, heads=2, layers=1, context=9, vocab_size=8, rotary=True, shift=True))
    else:
        model = models.ImageEncoder(models.ImageConfig(
            width=16, heads=2, layers=1, image_size=32, patch_size=8))
    layer, Z = scrambled(model).double().layers[0], torch.randn(3, 9, 16).double()
    attention = layer.attention

    def heads_joined(A):
        values = attention.queries_keys_values(layer.norm1(Z))[2]
        return attention.W((A @ values).transpose(1, 2).flatten(2))
    ones = torch.ones(9, 9).double()
    equal = ones.tril() if text else ones
    generator = torch.Generator().manual_seed(0)
    found = steps(layer, Z, generator, own_length=True)
    assert_near(found["attention"], attention(layer.norm1(Z)))
    assert_near(found["alone"], heads_joined(torch.eye(9).double()))
    assert_near(found["mean"], heads_joined(equal / equal.sum(1, keepdim=True)))
    assert_near(found["half"], (found["alone"] + found["mean"]) / 2)
    own = attention.map(layer.norm1(Z)).diagonal(dim1=-2, dim2=-1)          # (B, K, n)
    kept = torch.stack([(1 - own[..., i]) / max(1, equal[i].sum() - 1) for i in range(9)], -1)
    kept = torch.diag_embed(own - kept) + kept[..., None] * equal
    kept = heads_joined(kept)
    length = found["attention"].norm(dim=(1, 2))
    scaled = steps(layer, Z, generator)
    for step in scaled.values():
        assert_near(step.norm(dim=(1, 2)), length)
    assert_near(F.normalize(scaled["kept"].flatten(1)), F.normalize(kept.flatten(1)))
    for name in ("alone", "mean"):
        assert_near(F.normalize(scaled[name].flatten(1)), F.normalize(found[name].flatten(1)))


@pytest.mark.parametrize("causal", [False, True])
def test_shuffled_maps(causal):
    """A row keeps its diagonal and its weights, and of text nothing is after the token. Each order
    is as likely: over many maps the mean weight of the others is the same."""
    scores = torch.randn(1, 2, 6, 6).double()
    if causal:
        scores = scores.masked_fill(~torch.ones(6, 6).tril().bool(), -torch.inf)
    A = scores.softmax(-1).expand(4000, 2, 6, 6)
    found = compression.shuffled(A, torch.Generator().manual_seed(0), causal)
    assert_near(found.diagonal(0, -2, -1), A.diagonal(0, -2, -1))
    assert_near(found.sort(-1).values, A.sort(-1).values)
    others = ~torch.eye(6).bool()
    others &= torch.ones(6, 6).tril().bool() if causal else others
    equal = ((A * others).sum(-1) / others.sum(-1).clamp_min(1))[0]
    mean = found.mean(0)
    assert ((mean - equal[..., None]) * others).abs().max() < 0.02


@torch.no_grad()
def test_tables_and_figure(tmp_path, cache):
    """One checkpoint: errors are over samples. Two of one config: over checkpoints."""
    meta, paths = images.load("shapes", cache).meta(), []
    for seed in range(2):
        torch.manual_seed(seed)
        model = models.ImageClassifier(models.ImageConfig(
            width=16, heads=2, layers=2, image_size=32, patch_size=8, classes=10))
        paths.append(str(tmp_path / f"{seed}.pt"))
        write_model(paths[-1], model, "vit", meta)
    flags = [f"--data_dir={cache}", "--device=cpu", "--samples=6", "--batch_size=4"]
    each = [compression.main([f"--ckpt={path}", *flags])[0]["layers"] for path in paths]
    copies = compression.Compression(ckpt="", together=2)
    Z, generator = torch.randn(1, 17, 16).double(), torch.Generator()
    layer = model.double().encoder.layers[0]
    twice, *_ = compression.changes(layer, Z.repeat(2, 1, 1), generator, copies)
    once, *_, cosine = compression.changes(layer, Z, generator, compression.Compression(ckpt=""))
    assert_near(twice["alone"], once["alone"])
    assert once["gradient"] < min(once["attention"], 0)
    X, bases, U = layer.norm1(Z), layer.attention.bases(), unit_size(layer.attention.bases())
    back = models.mssa(X, bases, scale=8 ** -0.5) * (U / bases).square().mean()
    uphill = models.subspace_coding_rate_grad(Z, U, 0.1)
    first = -(X[:, None] @ U @ U.mT).sum(1)
    for name, step in dict(derived=back - X, shrinking=first, gradient=-uphill).items():
        along = Z.flatten() / Z.norm()
        a, b = (T.flatten() - (T.flatten() @ along) * along for T in (step, -uphill))
        assert_near(cosine[name], F.cosine_similarity(a[None], b[None]))
    with pytest.raises(UserError, match="--together=2 does not divide a batch of 1"):
        compression.changes(layer, Z, generator, copies)
    run, = compression.main([f"--ckpt={','.join(paths)}", *flags, f"--figure={tmp_path / 'a.png'}"])
    assert (tmp_path / "a.png").exists() and run["names"] == paths
    for (row, *_), ((first, *_), (second, *_)) in zip(run["layers"], zip(*each), strict=True):
        assert row.keys() == first.keys() and first["attention_error"] > 0
        assert row["attention"] == pytest.approx((first["attention"] + second["attention"]) / 2)
        assert row["attention_error"] == pytest.approx(
            abs(first["attention"] - second["attention"]) / 2)
