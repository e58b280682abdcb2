"""Language models: sizes, causality, the loss in blocks, cached generation and sampling, against definitions and literal code."""
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import (ARCHS, TEXT_SIZES, ConfigError, LanguageModel, TextConfig, choose, linear_cross_entropy, text_config,
                   train_flops_per_token)

V, CONTEXT = 23, 12


def build(arch="crate", **fields):
    """A small model in evaluation mode whose tokens matter to each other: weights of deviation 0.3, and LayerScale 1."""
    model = LanguageModel(TextConfig(**dict(arch=arch, width=16, heads=4, layers=2, context=CONTEXT, vocab_size=V, layer_scale=0.0) | fields))
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return model.eval()


def draw(rows, n):
    return torch.randint(V, (rows, n))


def assert_near(found, expected, tol=1e-10):
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


# Sizes and initialisation

@pytest.mark.parametrize("arch, size, millions, count", [
    ("crate", "base", 60, 59_886_336), ("crate-alpha", "small", 57, 57_225_728), ("transformer", "small", 64, 63_517_184),
    ("transformer", "base", 124, 123_587_328), ("tost", "base", 110, 109_597_584), ("tost", "medium", 304, 303_662_464),
    ("tost", "large", 655, 655_136_720), ("aot", "base", 102, 101_868_544), ("aot", "medium", 182, 182_401_280),
    ("aot-mhsa", "base", 122, 122_165_120),
    # [B] says 120M. The embedding (38.6M) and 12 layers of W, U, D and D_hat (10 d^2 = 5.9M) are 109.4M; no text names the rest.
    ("crate-alpha", "base", None, 109_431_552)])
def test_published_parameter_counts(arch, size, millions, count):
    with torch.device("meta"):
        model = LanguageModel(text_config(size, arch))
    assert model.count() == count == sum(p.numel() for p in model.parameters()) - model.positions.numel()
    assert millions is None or round(count / 1e6) == millions
    assert model.train_flops() == train_flops_per_token(model.layers, 1024) + 6 * 50304 * model.config.width     # the head is used once


@pytest.mark.parametrize("arch", TEXT_SIZES)
@torch.no_grad()
def test_initial_loss(arch):
    """ln V at the width of the base model, where a tied head shows what is wrong with an initialisation."""
    model = LanguageModel(text_config("base", arch, layers=6, vocab_size=4096, context=64)).eval()
    ids = torch.randint(4096, (4, 65))
    assert float(model(ids[:, :-1], ids[:, 1:])) == pytest.approx(math.log(4096), rel=0.05)


@torch.no_grad()
def test_initial_loss_with_the_released_layer_scale_of_tost():
    """Why our default is 1: branches of 1e-5 leave LN(e + p): its product with e is 0.02 d / sqrt(2), with another embedding it varies by 0.02 sqrt(d)."""
    d = 512
    model = LanguageModel(text_config("base", "tost", width=d, heads=8, layers=2, vocab_size=4096, context=64,
                                      layer_scale=1e-5)).eval()
    ids = torch.randint(4096, (4, 65))
    expected = math.log(4095 * math.exp(0.02 ** 2 * d / 2) + math.exp(0.02 * d / 2 ** 0.5))
    assert float(model(ids[:, :-1], ids[:, 1:])) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("arch, ends", [("crate", "attention.W.weight"), ("transformer", "sparsification.down.weight")])
def test_initialisation(arch, ends):
    model = LanguageModel(TextConfig(arch=arch, width=128, heads=4, layers=8, context=64, vocab_size=500))
    for name, p in model.named_parameters():
        if name.endswith(("D", "norm.weight", "norm1.weight", "norm2.weight")):
            continue
        last = name.endswith(("attention.W.weight", ends))
        assert float(p.detach().std()) == pytest.approx(0.02 / 4 if last else 0.02, rel=0.05), name
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


# The forward pass

@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_forward_is_the_chain_it_says(arch):
    model, ids, targets = build(arch).double(), draw(3, 9), draw(3, 9)
    Z = model.embed.weight[ids] + model.positions[:9]
    for layer in model.layers:
        Z = layer(Z)
    mean, variance = Z.mean(-1, True), Z.var(-1, unbiased=False, keepdim=True)
    logits = (Z - mean) / (variance + 1e-5).sqrt() * model.norm.weight @ model.embed.weight.T
    assert_near(model(ids), logits)
    targets[0, :4] = -1
    chosen = logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    assert_near(model(ids, targets), -chosen[targets >= 0].mean())
    trace = []
    assert_near(model(ids, trace=trace), logits)
    assert_near(trace[-1].out, Z)
    assert len(trace) == 2 and trace[0].attention.shape[:2] == (3, 4)


@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_causality(arch):
    model, ids = build(arch), draw(2, CONTEXT)
    before = model(ids)
    for j in range(1, CONTEXT):
        changed = ids.clone()
        changed[:, j] = (ids[:, j] + 1) % V
        after = model(changed)
        assert torch.equal(after[:, :j], before[:, :j]) and not torch.allclose(after[:, j], before[:, j])


@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_a_masked_model_sees_both_sides(arch):
    model, ids = build(arch, causal=False).double(), draw(2, CONTEXT)
    before = model(ids)
    for j in (0, 5, CONTEXT - 1):
        changed = ids.clone()
        changed[:, j] = (ids[:, j] + 1) % V
        assert ((model(changed) - before).abs().amax(-1) > 1e-9).all()                # every token feels it
    with pytest.raises(ConfigError, match="13 tokens exceed the context of 12"):
        model(draw(1, 13))


# The loss

def both(f, Z, W):
    """Value and two gradients."""
    loss = f(Z, W)
    return loss.detach(), *torch.autograd.grad(loss, (Z, W))


def tokens_and_head(n=37, d=6, dtype=torch.float64):
    Z, W = torch.randn(n, d, dtype=dtype, requires_grad=True), torch.randn(V, d, dtype=dtype, requires_grad=True)
    return Z, W, torch.randint(-1, V, (n,))


@pytest.mark.parametrize("block", [1, 8, 37, 100])
def test_linear_cross_entropy(block):
    Z, W, targets = tokens_and_head()
    expected = both(lambda Z, W: F.cross_entropy(Z @ W.T, targets, ignore_index=-1), Z, W)
    for found in (both(lambda Z, W: linear_cross_entropy(Z, W, targets, block), Z, W),
                  both(lambda Z, W: linear_cross_entropy(Z[None], W, targets[None], block), Z, W)):
        for a, b in zip(found, expected):
            assert_near(a, b)
    assert torch.autograd.gradcheck(lambda Z, W: 3 * linear_cross_entropy(Z, W, targets, block), (Z, W))
    for value in both(lambda Z, W: linear_cross_entropy(Z, W, torch.full_like(targets, -1), block), Z, W):
        assert (value == 0).all()                                                     # a share of a batch without targets


class Watch(TorchDispatchMode):
    """The numbers in the largest result of an operation, and how many matrix products there were."""
    largest = matmuls = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        self.matmuls += f is torch.ops.aten.mm.default
        return out


def test_logits_are_never_whole():
    Z, W, targets = torch.randn(80, 4, requires_grad=True), torch.randn(100, 4, requires_grad=True), torch.randint(100, (80,))
    with Watch() as training:
        linear_cross_entropy(Z, W, targets, block=8).backward()
    with Watch() as evaluation, torch.no_grad():
        linear_cross_entropy(Z, W, targets, block=8)
    assert training.largest == evaluation.largest == 8 * 100
    assert (training.matmuls, evaluation.matmuls) == (3 * 10, 10)                     # an evaluation makes no gradient


def test_linear_cross_entropy_compiled():
    torch._dynamo.reset()
    Z, W, targets = tokens_and_head()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    for a, b in zip(both(lambda Z, W: compiled(Z, W, targets, 8), Z, W), both(lambda Z, W: linear_cross_entropy(Z, W, targets, 8), Z, W)):
        assert_near(a, b)


@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost", "transformer"])
def test_compiled_model(arch):
    """Loss and gradients of the training graph, without a graph break."""
    torch._dynamo.reset()
    model, ids = build(arch, layers=1).double().train(), draw(3, CONTEXT)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = (torch.autograd.grad(f(ids, ids.roll(-1, 1)), list(model.parameters())) for f in (compiled, model))
    for a, b in zip(found, expected):
        assert_near(a, b, 1e-9)


def test_linear_cross_entropy_in_bf16():
    Z, W, targets = tokens_and_head(n=200, dtype=torch.float32)
    loss, dZ, dW = both(lambda Z, W: F.cross_entropy(Z @ W.T, targets, ignore_index=-1), Z, W)
    with torch.autocast("cpu", torch.bfloat16):
        found = both(lambda Z, W: linear_cross_entropy(Z, W, targets, 64), Z, W)
    assert all(t.dtype == torch.float32 for t in found)
    assert float(found[0]) == pytest.approx(float(loss), rel=5e-3)
    for a, b in zip(found[1:], (dZ, dW)):
        assert (a - b).norm() < 0.01 * b.norm()


# Generation

@pytest.mark.parametrize("prefill", [1, 5, CONTEXT])
@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_cached_equals_uncached(arch, prefill):
    model, ids, state = build(arch), draw(3, CONTEXT), []
    logits = model(ids)
    assert_near(model.advance(ids[:, :prefill], state), logits[:, prefill - 1], 1e-5)
    for i in range(prefill, CONTEXT):
        assert_near(model.advance(ids[:, i:i + 1], state), logits[:, i], 1e-5)
    with pytest.raises(ConfigError, match="13 tokens exceed the context of 12"):
        model.advance(ids[:, :1], state)


def held(arch, n, context):
    """Bytes in the cache after a prompt of n tokens and one more, for two sequences of a model with 2 layers of width 16."""
    model, state = build(arch, context=context), []
    with torch.no_grad():
        model.advance(draw(2, n), state)
        model.advance(draw(2, 1), state)
    tensors = [t for layer in state for t in layer.values() if isinstance(t, torch.Tensor)]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def test_size_of_the_cache():
    """MSSA holds one tensor a layer, MHSA two; TSSA's running sums (two of width 16 and K = 4 masses) do not grow."""
    assert held("crate", 10, 64) == 64 * (2 * 2 * 16 * 4)
    assert held("transformer", 10, 64) == 2 * held("crate", 10, 64)
    assert held("tost", 1, 64) == held("tost", 60, 64) == held("tost", 60, 1000) == 2 * 2 * (16 + 16 + 4) * 4


def by_hand(model, ids, n, **options):
    """Generation with no cache: after the context is full, the model reads the last half of it, and goes on from there."""
    half = model.config.context // 2
    seen = ids if ids.shape[1] <= model.config.context else ids[:, -half:]
    for _ in range(n):
        if seen.shape[1] > model.config.context:
            seen = ids[:, -half:]
        new = choose(model(seen)[:, -1], **options)[:, None]
        ids, seen = torch.cat([ids, new], 1), torch.cat([seen, new], 1)
    return ids


@pytest.mark.parametrize("prompt", [1, CONTEXT, 20])
@pytest.mark.parametrize("arch", ["crate", "crate-mm", "tost", "transformer"])
@torch.no_grad()
def test_generation_past_the_context(arch, prompt):
    model, ids = build(arch).double(), draw(3, prompt)
    found = model.generate(ids, 40, temperature=0.7, top_k=9, generator=torch.Generator().manual_seed(5))
    expected = by_hand(model, ids, 40, temperature=0.7, top_k=9, generator=torch.Generator().manual_seed(5))
    assert found.shape == (3, prompt + 40) and torch.equal(found, expected) and len(found[:, prompt:].unique()) > 5
    assert torch.equal(model.generate(ids, 40, temperature=0), by_hand(model, ids, 40, temperature=0))


def test_greedy_in_three_ways():
    model, ids = build("crate-alpha"), draw(2, 4)
    greedy = model.generate(ids, 30, temperature=0)
    for options in (dict(top_k=1), dict(top_p=1e-6), dict(temperature=1e-4), dict(temperature=5.0, top_k=1)):
        assert torch.equal(model.generate(ids, 30, **options), greedy)
    assert not torch.equal(model.generate(ids, 30, generator=torch.Generator().manual_seed(0)), greedy)


def test_seeds_and_rows():
    model, ids = build("tost"), draw(3, 4)

    def sample(seed):
        return model.generate(ids, 30, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(sample(1), sample(1)) and not torch.equal(sample(1), sample(2))
    alone = [model.generate(row[None], 30, temperature=0) for row in ids]
    assert torch.equal(model.generate(ids, 30, temperature=0), torch.cat(alone))       # a row does not see the others


def test_a_stop_token_ends_a_row_and_then_the_batch():
    model, ids = build("crate"), draw(4, 5)
    free = model.generate(ids, 200, generator=torch.Generator().manual_seed(3))[:, 5:]
    stop = int(free[0, 20])
    found = model.generate(ids, 200, stop=stop, generator=torch.Generator().manual_seed(3))[:, 5:]
    ends = [row.index(stop) if stop in row else None for row in free.tolist()]
    assert None not in ends and len(set(ends)) > 1                                    # each row meets it, at its own time
    for row, end in enumerate(ends):
        assert torch.equal(found[row, :end + 1], free[row, :end + 1]) and (found[row, end:] == stop).all()
    assert found.shape[1] == max(ends) + 1
    assert sum(1 for _ in model.stream(ids, 7, temperature=0)) == 7


def test_choose_draws_from_the_softmax():
    logits, n = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -math.inf]), 40_000

    def frequencies(**options):
        return choose(logits.expand(n, -1), generator=torch.Generator().manual_seed(0), **options).bincount(minlength=6) / n

    def expected(kept, temperature=1.0):
        weights = [math.exp(float(l) / temperature) if i in kept else 0.0 for i, l in enumerate(logits)]
        return torch.tensor([w / sum(weights) for w in weights])
    # the likeliest hold 0.565, 0.208, 0.126, 0.077, 0.023: top_p keeps the fewest that reach it
    for kept, options in ((range(5), {}), (range(5), dict(temperature=2.0)), (range(5), dict(temperature=0.5)), (range(5), dict(top_k=50)),
                          (range(3), dict(top_k=3)), (range(2), dict(top_p=0.6)), (range(3), dict(top_p=0.8)), (range(5), dict(top_p=1.0)),
                          (range(2), dict(top_k=2, top_p=0.95)), (range(3), dict(top_p=0.7, temperature=2.0))):
        found, p = frequencies(**options), expected(kept, options.get("temperature", 1.0))
        assert (found[p == 0] == 0).all(), options
        assert ((found - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all(), options      # five standard deviations
    rows = torch.randn(50, V)
    assert torch.equal(choose(rows, temperature=0), rows.argmax(-1)) and torch.equal(choose(rows, top_k=1), rows.argmax(-1))


# Mistakes

@pytest.mark.parametrize("build, says", [
    (lambda: text_config("basse"), "did you mean base"), (lambda: text_config("large"), "small, base"),
    (lambda: text_config("base", "tots"), "did you mean tost"), (lambda: text_config("base", contxt=4), "did you mean context"),
    (lambda: TextConfig(vocab_size=1), "vocab_size=1"), (lambda: TextConfig(context=1), "context=1"),
    (lambda: TextConfig(context=2.5), "context=2.5"), (lambda: TextConfig(width=10, heads=3), "does not divide"),
    (lambda: TextConfig(dropout=1.0), "less than 1"), (lambda: TextConfig(arch="transformer", step=2.0), "step=2.0")])
def test_config_errors(build, says):
    with pytest.raises(ConfigError) as error:
        build()
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_likeliest_token_always_stays():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert all(choose(logits, top_p=0.0) == 1 for _ in range(20))


def test_a_bidirectional_model_has_no_next_token():
    model = LanguageModel(TextConfig(width=16, heads=2, layers=1, context=8, vocab_size=11, causal=False))
    with pytest.raises(ConfigError, match="causal=False"):
        model.advance(torch.zeros(1, 3, dtype=torch.long), [])
