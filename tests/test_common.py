"""Flags, exit statuses, schedules, optimizers and run directories against their definitions."""
import weakref
from functools import partial

import pytest
import torch

import optim
import parallel
from flags import UserError
from model import ImageClassifier, ImageConfig, LanguageModel, TextConfig


# -------------------------------------------------------------------------------------------------
# Schedules and optimizers
# -------------------------------------------------------------------------------------------------

def test_warmup_cosine():
    s = optim.warmup_cosine(2.0, 110, 10, final=0.5)
    assert len(s) == 110 and s[0] == pytest.approx(0.2) and s[9] == s[10] == pytest.approx(2.0)
    assert s[60] == pytest.approx(0.5 + 1.5 * 0.5) and s[109] == pytest.approx(0.5, abs=1e-3)
    assert all(a >= b for a, b in zip(s[10:], s[11:]))
    assert optim.warmup_cosine(1.0, 4, 100)[:2] == [0.5, 1.0]          # half of a run at most


def test_trapezoid():
    s = optim.trapezoid(2.0, 100, 10, final=0.5)
    assert s[:10] == optim.warmup_cosine(2.0, 100, 10)[:10] and s[10:61] == [2.0] * 51
    assert s[80] == pytest.approx(1.25) and s[99] == pytest.approx(0.5 + 1.5 / 40)
    for total in range(1, 12):
        assert len(optim.trapezoid(1.0, total, 100)) == total


def test_lion_is_its_definition():
    p = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    w, m = p.detach().clone(), torch.zeros(5, 3, dtype=torch.float64)
    optimizer = optim.Lion([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.3)
    for _ in range(4):
        g = torch.randn(5, 3, dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        w = (1 - 0.01 * 0.3) * w - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["lion", "adamw"])
@pytest.mark.parametrize("kind", ["image", "text"])
def test_only_matrices_are_decayed(name, kind):
    """Of those, positions and the class token are not; nor TSSA's b, which has three dimensions."""
    layers = dict(arch="tost", width=16, heads=2, layers=1)
    if kind == "image":
        model = ImageClassifier(ImageConfig(**layers, image_size=8, patch_size=4, classes=3))
    else:
        model = LanguageModel(TextConfig(**layers, context=8, vocab_size=9))
    for p in model.parameters():
        torch.nn.init.uniform_(p, 1, 2)
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    optimizer = optim.make_optimizer(model, name, 0.1, 0.5, (0.9, 0.99))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, p in model.named_parameters():
        spared = p.ndim < 2 or key.endswith(("class_token", "positions", "attention.b"))
        torch.testing.assert_close(p.detach(), (1.0 if spared else 0.95) * before[key], msg=key)


def test_ema():
    a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    average, params = list(a.parameters()), list(b.parameters())
    expected = [0.75 * p.detach() + 0.25 * q.detach() for p, q in zip(average, params)]
    optim.ema_update(average, params, 0.75)
    torch.testing.assert_close([p.detach() for p in a.parameters()], expected)


@pytest.mark.parametrize("instructions", [{}, dict(amx_bf16=True), dict(avx512_bf16=True)])
def test_autocast_is_bfloat16_where_there_are_instructions(monkeypatch, instructions):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
    Z, found = torch.ones(2, 2), {}
    for dtype in ("auto", "float32", "bfloat16"):
        with parallel.Processes("cpu").autocast(dtype):
            found[dtype] = (Z @ Z).dtype
    auto = torch.bfloat16 if instructions else torch.float32
    assert found == dict(auto=auto, float32=torch.float32, bfloat16=torch.bfloat16)


def test_largest_that_fits(monkeypatch):
    """Halved until the trial is within memory on every process. The reserve, two moments and a
    bucket, is there during the trial and gone afterwards."""
    held, empty_like, tried, params = [], torch.empty_like, [], [torch.zeros(5)]

    def watched(p):
        held.append(weakref.ref(tensor := empty_like(p)))
        return tensor
    monkeypatch.setattr(torch, "empty_like", watched)

    def trial(limit, size):
        tried.append(size)
        assert sum(r() is not None for r in held) == 3
        if size > limit:
            raise torch.OutOfMemoryError("out of memory")
    alone = parallel.Processes("cpu")
    assert parallel.largest_that_fits(48, partial(trial, 13), params, alone) == 12
    assert tried == [48, 24, 12] and not any(r() is not None for r in held)
    with pytest.raises(UserError, match="micro-batch of 1"):
        parallel.largest_that_fits(3, partial(trial, 0), params, alone)

    class Two:              # whose other process has half of this one's memory
        def largest(self, number):
            return max(number, int(tried[-1] > 6))
    assert parallel.largest_that_fits(48, partial(trial, 13), params, Two()) == 6


def test_a_gpu_is_known_by_whole_words(monkeypatch):
    for name, peak in (("A100-SXM4-80GB", 312e12), ("A10", 125e12), ("H100 80GB HBM3", 989e12),
                       ("GH200 480GB", 989e12), ("GeForce RTX 4090", 165e12), ("A10G", None),
                       ("RTX A1000", None), ("RTX A1000 Laptop GPU", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {name}")
        assert parallel.peak_flops(torch.device("cuda")) == peak, name


def test_seeds_depend_on_everything():
    purposes = [(s, step, p) for s in range(5) for step in range(50) for p in ("augment", "order")]
    seeds = {parallel.derive_seed(*purpose) for purpose in purposes}
    assert len(seeds) == 500 and all(0 <= s < 2 ** 63 for s in seeds)
