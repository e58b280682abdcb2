"""Schedules, Lion and Muon against their definitions; which parameter is updated by what."""
import math

import pytest
import torch

import optim
import train_simdino
from checkpoint import TASKS
from model import ARCHS

LR, DECAY, BETAS = 0.01, 0.3, (0.9, 0.95)


def test_a_warm_up_takes_half_of_a_run_at_most():
    """test_train_simdino.py has the schedule by hand."""
    assert optim.cosine_schedule(1.0, 4, 100)[:2] == [0.5, 1.0]


def test_lion_is_its_definition():
    p = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    w, m = p.detach().clone(), 0
    optimizer = optim.Lion([p], lr=LR, betas=(0.9, 0.99), weight_decay=DECAY)
    for _ in range(4):
        p.grad = torch.randn_like(p)
        optimizer.step()
        w = (1 - LR * DECAY) * w - LR * torch.sign(0.9 * m + 0.1 * p.grad)
        m = 0.99 * m + 0.01 * p.grad
    torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6)])
def test_newton_schulz_is_its_definition(shape):
    G = torch.randn(3, *shape, dtype=torch.float64) * torch.logspace(0, -1, shape[-1])
    X = G / G.norm(dim=(1, 2), keepdim=True)
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.775 * A + 2.0315 * A @ A) @ X
    torch.testing.assert_close(optim.newton_schulz(G, torch.float64), X, atol=1e-6, rtol=0)


@pytest.mark.parametrize("instructions, dtype", [
    ({}, torch.float32), (dict(amx_bf16=True), torch.bfloat16)])
def test_muon_is_torchs(instructions, dtype, monkeypatch):
    """Up to the rounding of bfloat16, in which torch's always computes. Ours orthogonalizes the
    matrices of one shape together, and in float32 where bfloat16 is emulated."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    shapes = [(8, 8), (8, 24), (8, 8), (24, 8), (8, 24), (24, 8)]
    stacks, newton_schulz = [], optim.newton_schulz
    monkeypatch.setattr(optim, "newton_schulz", lambda G, dtype: (
        stacks.append((len(G), dtype)) or newton_schulz(G, dtype)))
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]

    def apart(tensors):             # the last is a stack of three
        return [t.detach().clone() for t in (*tensors[:-1], *tensors[-1].chunk(3))]
    theirs = [torch.nn.Parameter(t) for t in apart(ours)]
    optimizers = [optim.Muon([dict(params=ours[:-1]), dict(params=ours[-1:], parts=3)], lr=LR,
                             weight_decay=DECAY),
                  torch.optim.Muon(theirs, lr=LR, weight_decay=DECAY, momentum=0.95,
                                   adjust_lr_fn="match_rms_adamw")]
    for _ in range(3):
        for a in ours:
            a.grad = torch.randn_like(a)
        for b, grad in zip(theirs, apart([a.grad for a in ours])):
            b.grad = grad
        for optimizer in optimizers:
            optimizer.step()
    near = 0.02 * LR * 0.2 * math.sqrt(24)
    torch.testing.assert_close(apart(ours), [b.detach() for b in theirs], atol=near, rtol=0)
    assert stacks == [(2, dtype), (2, dtype), (1, dtype), (3, dtype)] * 3


@pytest.mark.parametrize("task, arch", [("vit", arch) for arch in ARCHS] + [
    ("gpt", "crate"), ("gpt", "tost"), ("mae", "crate"), ("mae", "transformer"),
    ("simdino", "transformer")])
def test_muon_has_the_matrices_of_hidden_layers_and_only_matrices_are_decayed(task, arch):
    """Each parameter is with one optimizer; without gradients only the decay moves it."""
    fields = dict(context=8, vocab_size=11) if task == "gpt" else dict(image_size=8, patch_size=4)
    kind, config = TASKS[task], TASKS[task].config_class
    config = config(arch=arch, width=16, heads=2, layers=2, **fields)
    if task == "simdino":
        model = train_simdino.Branch(config, hidden=8, output=4, prototypes=6)
    else:
        model = kind(config)
    parts = "layers", "encoder.layers", "decoder", "predict", "projector"
    hidden = [module for name, module in model.named_modules() if name in parts]
    muon, adamw = optim.make_optimizers(model, "muon", LR, DECAY, BETAS, hidden)
    assert isinstance(muon, optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert all(group["betas"] == BETAS for group in adamw.param_groups)
    before = [p.detach().clone() for p in model.parameters()]
    where = [(p, optimizer) for optimizer in (muon, adamw)
             for group in optimizer.param_groups for p in group["params"]]
    assert len(where) == len(dict(where)) == len(before)
    apart = [len(group["params"]) for group in muon.param_groups if group["parts"] == 3]
    assert sum(apart) == sum("QKV.weight" in name for name, _ in model.named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    muon.step()
    adamw.step()
    for (name, p), start in zip(model.named_parameters(), before):
        hidden = any(word in name for word in ("layers.", "decoder.", "projector.", "predict."))
        spared = p.ndim != 2 or name.endswith(("positions", "class_token", "mask_token"))
        assert dict(where)[p] is (muon if hidden and not spared else adamw), name
        factor = 1.0 if spared else 1 - LR * DECAY
        torch.testing.assert_close(p.detach(), factor * start, msg=name)
