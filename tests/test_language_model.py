"""Language models, their loss in blocks and their cached generation against literal code."""
import math

import pytest
import torch
from test_model import assert_compiles, assert_near, assert_near_with_gradients, float64, randomize  # noqa: F401
from torch.nn import functional as F

import model as models

V, CONTEXT = 23, 12


def build(arch="crate", **fields):
    """A small model in evaluation mode whose tokens matter to each other: weights N(0, 0.3)."""
    small = dict(width=16, heads=4, layers=2, context=CONTEXT, vocab_size=V, layer_scale=0.0)
    arch, *switches = arch.split()                          # "crate rotary shift"
    fields = dict.fromkeys(switches, True) | fields
    config = models.TextConfig(**small | dict(arch=arch) | fields)
    return randomize(models.LanguageModel(config), 0.3).eval()


TEXT_ARCHS = [arch for arch, row in models.ARCHS.items() if row.in_text]
BOTH = ["crate rotary shift", "transformer rotary shift"]


def draw(rows, n):
    return torch.randint(V, (rows, n))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost", "transformer"])
@torch.no_grad()
def test_initialization(arch):
    """N(0, 0.02), 0.02 / sqrt(2 L) at the end of a residual branch, no biases; and a first loss of
    ln V, at a width where a tied head shows what is wrong."""
    c = models.TextConfig(arch=arch, width=768, heads=12, layers=3, vocab_size=2048, context=32)
    net, ids = models.LanguageModel(c).eval().float(), torch.randint(2048, (4, 33))
    assert float(net(ids[:, :-1], ids[:, 1:])) / 128 == pytest.approx(math.log(2048), rel=0.05)
    for name, p in net.named_parameters():
        assert not name.endswith("bias")
        if p.ndim == 2 and ".D" not in name:
            last = name.endswith(("attention.W.weight", "sparsification.down.weight"))
            assert float(p.std()) == pytest.approx(0.02 / (6 ** 0.5 if last else 1), rel=0.05)


@pytest.mark.parametrize("arch", TEXT_ARCHS)
@torch.no_grad()
def test_forward(arch):
    net, ids = build(arch), draw(3, 9)
    Z = net.embed.weight[ids] + net.positions[:9]
    for layer in net.layers:
        Z = layer(Z)
    logits = F.layer_norm(Z, (16,), net.norm.weight, net.norm.bias, 1e-5) @ net.embed.weight.T
    assert_near(net(ids), logits)
    assert_near(net.trace(ids)[-1].out, Z)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("arch", TEXT_ARCHS + BOTH)
@torch.no_grad()
def test_causality(arch, causal):
    """[B] Eq. (7.4.3): a token changes those behind it, in a masked language model all others."""
    net, ids = build(arch, causal=causal), draw(2, CONTEXT)
    before = net(ids)
    for j in range(CONTEXT):
        changed = ids.clone()
        changed[:, j] = (ids[:, j] + 1) % V
        felt = (net(changed) - before).abs().amax(-1) > 1e-9
        assert felt[:, j:].all()
        assert not felt[:, :j].any() if causal else felt.all()


@pytest.mark.parametrize("arch", ["tost", *BOTH])
def test_compiled_equals_eager(arch):
    ids = draw(3, CONTEXT)
    assert_compiles(build(arch, layers=1).train(), ids, ids.roll(-1, 1))


def test_the_loss_is_a_sum_over_targets():
    """-1 is no target; a share of a batch without any has loss and gradient 0."""
    net, ids, targets = build("crate"), draw(2, CONTEXT), draw(2, CONTEXT)
    targets[0, 3:] = -1
    kept = targets >= 0
    expected = -net(ids).log_softmax(-1)[kept].gather(1, targets[kept][:, None]).sum()
    assert_near_with_gradients(net(ids, targets), expected, list(net.parameters()))
    nothing = net(ids, torch.full_like(targets, -1))
    assert nothing == 0 and not any(g.any() for g in torch.autograd.grad(nothing, net.parameters()))


@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("arch", TEXT_ARCHS + BOTH)
@torch.no_grad()
def test_cached_equals_uncached(arch, prompt):
    """A prompt, three tokens at once, then token by token. MSSA keeps one tensor a layer, MHSA two,
    TSSA its sums."""
    net, ids, read = build(arch), draw(3, CONTEXT), 0
    logits, state = net(ids), net.new_caches()
    for piece in ids.split([prompt, 3] + [1] * (CONTEXT - prompt - 3), 1):
        read += piece.shape[1]
        assert_near(net.advance(piece, state), logits[:, read - 1])
    held = sum(t.numel() for t in vars(state[0]).values() if torch.is_tensor(t))
    kinds = {models.MHSA: 2 * CONTEXT * 16, models.TSSA: 16 + 16 + 4}
    assert held == 3 * kinds.get(type(net.layers[0].attention), CONTEXT * 16)
    if net.positions is not None:                                           # beyond the context
        pytest.raises(models.ConfigError, net.advance, ids[:, :1], state)


def without_cache(net, ids, n, **options):
    """Once the context is full, the model reads the last half of it and goes on from there."""
    seen = ids
    for _ in range(n):
        if seen.shape[1] > CONTEXT:
            seen = ids[:, -(CONTEXT // 2):]
        new = models.choose(net(seen)[:, -1], **options)[:, None]
        ids, seen = torch.cat([ids, new], 1), torch.cat([seen, new], 1)
    return ids


@pytest.mark.parametrize("prompt", [1, CONTEXT, 20])
@pytest.mark.parametrize("arch", ["crate", "crate-mm", "tost", "transformer", BOTH[0]])
@torch.no_grad()
def test_generation_past_the_context(arch, prompt):
    net, ids, options = build(arch), draw(3, prompt), dict(temperature=0.7, top_k=9)
    found = net.generate(ids, 40, generator=seeded(5), **options)
    assert torch.equal(found, without_cache(net, ids, 40, generator=seeded(5), **options))
    greedy = net.generate(ids, 40, temperature=0)           # a row does not see the others
    assert torch.equal(greedy, torch.cat([net.generate(row[None], 40, top_k=1) for row in ids]))


def test_a_stop_token_ends_a_row_and_then_the_batch():
    net, ids = build(), draw(4, 5)
    free = net.generate(ids, 200, generator=seeded(3))[:, 5:]
    stop = free[0, 20]
    found = net.generate(ids, 200, stop=stop, generator=seeded(3))[:, 5:]
    after = (free == stop).cumsum(1)[:, :found.shape[1]] > 0        # from a row's first one on
    assert torch.equal(found, free[:, :found.shape[1]].where(~after, stop))
    assert after[:, -1].all() and not after[:, -2].all()


@pytest.mark.parametrize("kept, options", [
    (5, dict(temperature=2.0)), (5, dict(top_k=50)), (3, dict(top_k=3)),
    (2, dict(top_k=2, temperature=2.0)), (1, dict(temperature=0)), (1, dict(temperature=1e-4))])
def test_choose_draws_from_the_softmax(kept, options):
    logits, n = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -math.inf]), 40_000
    found = models.choose(logits.expand(n, -1), generator=seeded(0), **options)
    found = found.bincount(minlength=6) / n
    cut = logits.where(torch.arange(6) < kept, -math.inf)
    p = (cut / (options.get("temperature") or 1.0)).softmax(-1)
    assert ((found - p).abs() <= 5 * (p * (1 - p) / n).sqrt()).all()    # five standard deviations
