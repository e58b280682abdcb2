"""Muon beside AdamW: who updates which parameter, the update against its definition, and rates."""
import copy
import math

import pytest
import torch

from optim import make_optimizer, set_decay, set_lr
import train_simdino
from model import (ARCHS, ImageClassifier, ImageConfig, LanguageModel, MAEConfig,
                   MaskedAutoencoder, TextConfig)

SMALL = dict(width=16, heads=2, layers=2)
LR, DECAY, BETAS = 0.01, 0.3, (0.9, 0.95)


def build(task, arch="crate"):
    if task == "gpt":
        return LanguageModel(TextConfig(arch=arch, context=8, vocab_size=11, **SMALL))
    config = dict(arch=arch, image_size=8, patch_size=4, classes=3, **SMALL)
    if task == "mae":
        return MaskedAutoencoder(MAEConfig(**config))
    if task == "simdino":
        return train_simdino.Branch(ImageConfig(**config), hidden=8, output=4, prototypes=6)
    return ImageClassifier(ImageConfig(**config))


def split(model):
    """{parameter's name: "muon", "decayed" or "rest"}, each exactly once."""
    names = {p: name for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, "muon", LR, DECAY, BETAS)
    found = {}
    for part, torch_optimizer in optimizer.parts.items():
        for group in torch_optimizer.param_groups:
            kind = part if part == "muon" else "decayed" if group["weight_decay"] else "rest"
            found |= {names.pop(p): kind for p in group["params"]}
    assert not names
    return optimizer, found


@pytest.mark.parametrize("task, arch", [("vit", arch) for arch in ARCHS] + [
    ("gpt", "crate"), ("gpt", "tost"), ("mae", "crate"), ("mae", "transformer"),
    ("simdino", "transformer")])
def test_muon_has_the_matrices_of_hidden_layers(task, arch):
    model = build(task, arch)
    _, found = split(model)
    for name, p in model.named_parameters():
        hidden = any(word in name for word in ("layers.", "decoder.", "projector.", "predict."))
        assert (found[name] == "muon") == (hidden and p.ndim == 2), name
        if name.endswith(("positions", "class_token", "mask_token", "eta", "bias")):
            assert found[name] == "rest", name
        # a convolution, which no model has, would be spared like TSSA's b: say so if one comes
        assert p.ndim < 3 or name.endswith(("positions", "_token", "attention.b")), name
    for name in ("embed.weight", "head.1.weight"):
        assert found.get(name, "decayed") == "decayed"


def orthogonal_factor(G):
    """Five quintic Newton-Schulz steps towards U V^* of G = U S V^*, in float64."""
    X = G.double() / G.double().norm()
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.775 * A + 2.0315 * A @ A) @ X
    return X


def test_the_update_is_muons():
    """Two steps from its definition; Newton-Schulz runs in bfloat16, which costs 1 % an entry."""
    model = build("vit")
    optimizer, found = split(model)
    name = "encoder.layers.0.attention.U.weight"
    p = dict(model.named_parameters())[name]
    W, m = p.detach().double().clone(), torch.zeros_like(p, dtype=torch.float64)
    for _ in range(2):
        for q in model.parameters():
            q.grad = torch.randn_like(q)
        g = p.grad.double()
        m = 0.95 * m + 0.05 * g
        O = orthogonal_factor(0.05 * g + 0.95 * m)
        W = (1 - LR * DECAY) * W - LR * 0.2 * math.sqrt(max(p.shape)) * O
        optimizer.step()
        assert torch.allclose(p.double(), W, rtol=0,
                              atol=0.05 * LR * 0.2 * math.sqrt(max(p.shape)))
    assert found[name] == "muon"


def test_every_direction_moves_alike():
    """The step's singular values lie around one, however unequal the gradient's are."""
    model = build("gpt", "transformer")
    optimizer, _ = split(model)
    set_decay(optimizer, 0.0)
    p = model.layers[0].sparsification.up.weight                    # (64, 16)
    before = p.detach().clone()
    p.grad = torch.randn_like(p) * torch.logspace(0, -1.5, p.shape[1])
    optimizer.step()
    step = (before - p.detach()) / (LR * 0.2 * 8)                    # sqrt(64) = 8
    values = torch.linalg.svdvals(step)
    assert 0.5 < values.min() and values.max() < 1.4
    assert torch.linalg.svdvals(p.grad).max() / torch.linalg.svdvals(p.grad).min() > 10


def test_the_rest_is_adamws():
    """Beside Muon, embeddings, heads and vectors move as under AdamW alone."""
    torch.manual_seed(0)
    mixed = build("gpt")
    alone = copy.deepcopy(mixed)
    optimizers = [split(mixed)[0], make_optimizer(alone, "adamw", LR, DECAY, BETAS)]
    for _ in range(3):
        for p, q in zip(mixed.parameters(), alone.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(mixed.embed.weight, alone.embed.weight)
    assert torch.equal(mixed.layers[0].norm1.weight, alone.layers[0].norm1.weight)
    assert not torch.equal(mixed.layers[0].attention.U.weight, alone.layers[0].attention.U.weight)


def test_rates_decay_and_state():
    model = build("vit")
    optimizer, _ = split(model)
    set_lr(optimizer, 0.5)
    set_decay(optimizer, 0.7)
    muon, decayed, rest = optimizer.param_groups
    assert [group["lr"] for group in (muon, decayed, rest)] == [0.5, 0.5, 0.5]
    assert [group["weight_decay"] for group in (muon, decayed, rest)] == [0.7, 0.7, 0.0]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())

    twin = copy.deepcopy(model)
    other, _ = split(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(model.parameters(), twin.parameters()):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
    optimizer.step()
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters()))
    with pytest.raises((KeyError, ValueError)):
        other.load_state_dict(make_optimizer(twin, "lion", LR, DECAY, BETAS).state_dict())
