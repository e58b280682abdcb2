"""model.py against the papers' equations, written here once more with tokens as columns (Z is d x n), in float64."""
import math

import pytest
import torch
from torch.nn import functional as F

import model
from model import (ARCHS, MHSA, MLP, MSSA, ODL, TSSA, ConfigError, ImageClassifier, ImageConfig, ImageEncoder,
                   image_config)


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_near(found, expected, tol=1e-10):
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


def by_column(f, Z):
    """A function of d x n matrices on the samples of Z (B, n, d)."""
    return torch.stack([f(z.T).T for z in Z])


def randomize(module, std=0.4):
    for p in module.parameters():
        p.data.normal_(std=std)
    return module


def orthonormal(*shape):
    return torch.linalg.qr(torch.randn(*shape))[0]


# Objective

def R(Z, eps):
    d, n = Z.shape
    return 0.5 * torch.logdet(torch.eye(d) + d / (n * eps ** 2) * Z @ Z.T)


def Rc(Z, U, eps):
    return sum(R(Uk.T @ Z, eps) for Uk in U)


@pytest.mark.parametrize("n, d", [(5, 9), (9, 5), (6, 6)])
def test_coding_rate(n, d):
    Z, eps = torch.randn(2, n, d), 0.3
    alpha, rate = d / (n * eps ** 2), model.coding_rate(Z, eps)
    assert_near(rate, torch.stack([R(z.T, eps) for z in Z]))
    assert_near(rate, 0.5 * torch.logdet(torch.eye(n) + alpha * Z @ Z.mT))                  # the other Gram matrix
    assert_near(rate, 0.5 * torch.log1p(alpha * torch.linalg.svdvals(Z) ** 2).sum(-1))      # its eigenvalues
    assert_near(rate, model.coding_rate(orthonormal(n, n) @ Z @ orthonormal(d, d), eps))    # a rotation of either side
    assert (model.coding_rate(0 * Z, eps) == 0).all() and (model.coding_rate(Z, 1e9) < 1e-12).all()
    assert (model.coding_rate(Z, eps / 2) > rate).all()


@pytest.mark.parametrize("n, d, K, p", [(3, 10, 2, 5), (12, 10, 3, 4)])
def test_subspace_coding_rate(n, d, K, p):
    Z, U, eps = torch.randn(2, n, d), torch.randn(K, d, p), 0.7
    rate = model.subspace_coding_rate(Z, U, eps)
    assert_near(rate, torch.stack([Rc(z.T, U, eps) for z in Z]))
    assert_near(rate, model.projected_coding_rate(torch.stack([torch.stack([z @ Uk for Uk in U]) for z in Z]), eps))
    assert_near(model.subspace_coding_rate(Z, orthonormal(1, d, d), eps), model.coding_rate(Z, eps))
    spectrum = torch.stack([torch.linalg.svdvals(Z @ Uk) ** 2 for Uk in U]) * p / (n * eps ** 2)
    assert (rate >= (spectrum / 2 - spectrum ** 2 / 4).sum((0, 2))).all()             # [S]'s lower bound


def test_class_coding_rate():
    n, d, eps = 11, 4, 0.5
    Z, label = torch.randn(n, d), torch.randint(3, (n,))
    parts = sum(R(Z[label == k].T, eps) for k in range(3))
    one_hot = F.one_hot(label, 4).to(Z.dtype)                                         # the fourth class is empty
    assert_near(model.class_coding_rate(Z, one_hot, eps), parts)
    assert_near(model.rate_reduction(Z, one_hot, eps), R(Z.T, eps) - parts)
    assert_near(model.rate_reduction(Z, torch.ones(n, 1), eps), torch.tensor(0.0))          # one class: nothing to reduce
    Pi = 0.05 * torch.rand(2, n, 3)
    gammas = d / (Pi.sum(1) * eps ** 2)
    literal = [sum(0.5 * torch.logdet(torch.eye(d) + g * Z.T @ pi.diag() @ Z) for pi, g in zip(P.T, gamma))
               for P, gamma in zip(Pi, gammas)]
    assert_near(model.class_coding_rate(Z.expand(2, n, d), Pi, eps), torch.stack(literal))


def test_sparse_rate_reduction():
    Z, U = torch.randn(2, 6, 8) * (torch.rand(2, 6, 8) < 0.6), torch.randn(2, 8, 3)
    for norm, size in (("l0", lambda z: int(z.count_nonzero())), ("l1", lambda z: z.abs().sum())):
        expected = torch.stack([R(z.T, 0.5) - Rc(z.T, U, 0.5) - 0.2 * size(z) for z in Z])
        assert_near(model.sparse_rate_reduction(Z, U, lambd=0.2, norm=norm), expected)
    with pytest.raises(ConfigError, match="l2.*l0, l1"):
        model.sparse_rate_reduction(Z, U, norm="l2")


RATES = {
    "coding": lambda Z, U, Pi: model.coding_rate(Z),
    "subspace": lambda Z, U, Pi: model.subspace_coding_rate(Z, U),
    "class": lambda Z, U, Pi: model.class_coding_rate(Z, Pi),
    "l0": lambda Z, U, Pi: model.sparse_rate_reduction(Z, U, norm="l0"),
    "l1": lambda Z, U, Pi: model.sparse_rate_reduction(Z, U, norm="l1"),
    "gradient": lambda Z, U, Pi: model.subspace_coding_rate_grad(Z, U),
}


@pytest.mark.parametrize("name", RATES)
def test_precision_of_rates(name):
    """float64 stays exact, autocast changes no bit, and half-precision input counts as the float32 numbers it holds."""
    rate, inputs = RATES[name], (torch.randn(3, 40, 24).relu(), torch.randn(2, 24, 8), torch.rand(3, 40, 2))
    exact = rate(*inputs)
    torch.set_default_dtype(torch.float32)
    assert_near(rate(*inputs), exact)
    single, half = [t.float() for t in inputs], [t.bfloat16() for t in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        cast = rate(*single)
    assert cast.dtype == rate(*half).dtype == torch.float32 and torch.equal(cast, rate(*single))
    assert_near(rate(*half), rate(*(t.float() for t in half)), 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [4, 9])
def test_rates_of_non_finite_tokens_are_nan(bad, n):
    Z, U, Pi = torch.randn(3, n, 6), torch.randn(2, 6, 3), torch.rand(3, n, 2)
    Z[1, 2, 3] = bad
    for rate in (model.coding_rate(Z), model.subspace_coding_rate(Z, U), model.class_coding_rate(Z, Pi)):
        assert rate.isnan().tolist() == [False, True, False]


# Compression

@pytest.mark.parametrize("n, p", [(4, 6), (9, 3)])
def test_gradient_of_subspace_rate(n, p):
    d, K, eps = 8, 3, 0.6
    beta = p / (n * eps ** 2)
    Z, U = torch.randn(2, n, d, requires_grad=True), torch.randn(K, d, p)
    exact, = torch.autograd.grad(sum(Rc(z.T, U, eps) for z in Z), Z)
    assert_near(model.subspace_coding_rate_grad(Z, U, eps), exact)
    assert_near(model.subspace_coding_rate_grad(Z, U, eps, neumann=True), by_column(
        lambda z: sum(beta * Uk @ Uk.T @ z - beta ** 2 * Uk @ Uk.T @ z @ (Uk.T @ z).T @ (Uk.T @ z) for Uk in U), Z))


def test_neumann_series():
    n, d, K, p, eps = 6, 8, 2, 3, 1.0
    beta = p / (n * eps ** 2)
    Z, U = torch.randn(n, d), torch.randn(K, d, p)
    Z = Z / (beta ** 0.5 * torch.linalg.matrix_norm(Z @ U, 2).max())                  # max_k beta ||U_k^*Z||^2 = 1
    grad = model.subspace_coding_rate_grad
    error = [(grad(t * Z, U, eps) - grad(t * Z, U, eps, neumann=True)).norm() for t in (0.02, 0.01)]
    assert error[0] / error[1] == pytest.approx(2 ** 5, rel=0.01)                     # next is beta^3 w (w^*w)^2
    for radius, converges in ((0.9, True), (1.1, False)):
        Y = math.sqrt(radius) * Z
        series = beta * sum(sum(Uk @ Uk.T @ Y.T @ torch.linalg.matrix_power(-beta * (Y @ Uk) @ (Y @ Uk).T, i)
                                for i in range(300)) for Uk in U)
        assert ((series - grad(Y, U, eps).T).norm() < 1e-8) == converges


def test_gaussian_mixture_denoise():
    d, K, p, sigma = 9, 4, 2, 0.8
    z, U = torch.randn(3, 5, d), orthonormal(K, d, p)
    found, basis = model.gaussian_mixture_denoise(z, U, sigma), torch.cat(list(U), 1)  # [U_1 .. U_K], d x K p
    for zi, xi in zip(z.flatten(0, 1), found.flatten(0, 1)):
        weight = torch.stack([(Uk.T @ zi).norm() ** 2 / (2 * sigma ** 2) for Uk in U]).softmax(0)
        assert_near(xi, basis @ torch.kron(weight.diag(), torch.eye(p)) @ (basis.T @ zi))
    for zi, xi in zip(z[0], model.gaussian_mixture_denoise(z[0], U, 1e-3)):           # a projection in the limit
        assert_near(xi, min((Uk @ Uk.T @ zi for Uk in U), key=lambda x: (x - zi).norm()))


def stacked_ssa(Z, U, scale, causal):
    """stack_k SSA(Z | U_k), K p x n."""
    def ssa(w):
        gram = scale * w.T @ w
        if causal:
            gram = gram.masked_fill(torch.ones_like(gram).tril(-1) > 0, -math.inf)    # column i keeps rows <= i
        return w @ gram.softmax(0)
    return torch.cat([ssa(Uk.T @ Z) for Uk in U])


@pytest.mark.parametrize("causal", [False, True])
def test_mssa_function(causal):
    d, K, p, n = 10, 3, 4, 6
    Z, U, W, bias = torch.randn(2, n, d), torch.randn(K, d, p), torch.randn(d, K * p), torch.randn(d)
    for scale in (1.0, p ** -0.5):
        derived = by_column(lambda z: torch.cat(list(U), 1) @ stacked_ssa(z, U, scale, causal), Z)
        learned = by_column(lambda z: W @ stacked_ssa(z, U, scale, causal), Z)
        assert_near(model.mssa(Z, U, scale=scale, causal=causal), derived)
        assert_near(model.mssa(Z, U, W, scale=scale, causal=causal), learned)
        assert_near(model.mssa(Z[0], U, W, bias, scale, causal), learned[0] + bias)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("output", ["learned", "subspace", "negative", "transpose"])
def test_mssa_module(output, causal):
    """The equation at the released code's scale p^-1/2: values, and gradients with respect to tokens and U."""
    d, K, n, step = 12, 3, 7, 1.0 if output == "learned" else 0.7
    p = 4 if output == "transpose" else 5
    op = randomize(MSSA(d, K, p, output, causal, step))
    U = [op.U.weight[k * p:(k + 1) * p].T for k in range(K)]
    assert_near(op.bases(), torch.stack(U))
    basis, bias = torch.cat(U, 1), op.W.bias[:, None] if output == "learned" else 0
    outer = {"subspace": step * basis, "negative": -step * basis, "transpose": step * basis.T}.get(output)
    outer = op.W.weight if output == "learned" else outer
    Z, probe = torch.randn(2, n, d, requires_grad=True), torch.randn(2, n, d)
    found, literal = op(Z), by_column(lambda z: outer @ stacked_ssa(z, U, p ** -0.5, causal) + bias, Z)
    assert_near(found, literal)
    for g, h in zip(*(torch.autograd.grad((out * probe).sum(), (Z, op.U.weight)) for out in (found, literal))):
        assert_near(g, h)


def test_where_mssa_has_W():
    op, Z = MSSA(8, 1), torch.randn(1, 5, 8)                                          # K = 1, p = d: W is the identity
    assert [name for name, _ in op.named_parameters()] == ["U.weight"]
    assert_near(op(Z), by_column(lambda z: stacked_ssa(z, [op.U.weight.T], 8 ** -0.5, False), Z))
    assert MSSA(8, 1, p=4).W.weight.shape == (8, 4) and not hasattr(MSSA(8, 2, output="subspace"), "W")
    assert MSSA(8, 2).W.bias is not None and MSSA(8, 2, bias=False).W.bias is None
    with pytest.raises(ConfigError, match="crate-t"):
        MSSA(8, 2, p=3, output="transpose")


@pytest.mark.parametrize("causal", [False, True])
def test_mhsa(causal):
    d, K, p = 12, 3, 5
    op, Z = randomize(MHSA(d, K, p, causal)), torch.randn(2, 7, d)

    def literal(z):
        q, k, v = (op.QKV.weight @ z + op.QKV.bias[:, None]).view(3, K, p, -1)
        gram = k.mT @ q * p ** -0.5
        gram = gram.masked_fill(torch.ones_like(gram).tril(-1) > 0, -math.inf) if causal else gram
        return op.W.weight @ (v @ gram.softmax(-2)).flatten(0, 1) + op.W.bias[:, None]

    assert_near(op(Z), by_column(literal, Z))


def tssa(Z, op):
    K, p, n = op.heads, op.p, Z.shape[1]
    w = (op.U.weight @ Z + (0 if op.U.bias is None else op.U.bias[:, None])).view(K, p, n)
    seen = [slice(0, i + 1 if op.causal else n) for i in range(n)]
    b = op.b[:, :n, 0] if op.causal else torch.zeros(K, n)
    energy = [[op.eta[k] * sum((w[k, j, i] / max(w[k, j, seen[i]].norm(), 1e-12)) ** 2 + b[k, i] for j in range(p))
               for i in range(n)] for k in range(K)]
    Pi, out = torch.tensor(energy).softmax(0), torch.empty(K, p, n)
    for k in range(K):
        for i in range(n):
            s = (Pi[k, seen[i]] * w[k, :, seen[i]] ** 2).sum(1) / (Pi[k, seen[i]].sum() + 1e-8)
            out[k, :, i] = -Pi[k, i] * w[k, :, i] / (1 + s)
    return op.W.weight @ out.flatten(0, 1) + op.W.bias[:, None]


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_tssa(causal):
    op, Z = randomize(TSSA(12, 3, p=5, causal=causal, context=9)), torch.randn(2, 7, 12)
    assert_near(op(Z), by_column(lambda z: tssa(z, op), Z))
    assert_near(op.map(Z).sum(1), torch.ones(2, 7))                                         # memberships: over heads


@torch.no_grad()
def test_tssa_details():
    causal, whole, Z = randomize(TSSA(12, 3, causal=True, context=7)), TSSA(12, 3), torch.randn(2, 7, 12)
    assert (TSSA(12, 3, causal=True, context=7).b == 0).all() and (whole.eta == 1).all()
    causal.b.zero_()
    whole.load_state_dict({k: v for k, v in causal.state_dict().items() if k != "b"})
    assert_near(causal.map(Z)[..., -1], whole.map(Z)[..., -1])                              # the last token has seen all
    assert not torch.allclose(causal.map(Z)[..., 0], whole.map(Z)[..., 0])
    op = randomize(TSSA(12, 3, bias=False))
    op.W.bias.zero_()
    assert_near(1e12 * op(1e-12 * Z), 1e12 * by_column(lambda z: tssa(z, op), 1e-12 * Z), 1e-6)     # about the guard
    assert (op(0 * Z) == 0).all()
    assert op.project(Z).dtype == torch.float64 and op.bfloat16().project(Z.bfloat16()).dtype == torch.float32


ATTENTION = {
    "mssa": lambda causal: MSSA(12, 3, causal=causal), "mhsa": lambda causal: MHSA(12, 3, causal=causal),
    "crate-n": lambda causal: MSSA(12, 3, output="negative", causal=causal),
    "tssa": lambda causal: TSSA(12, 3, causal=causal, context=7),
}


@pytest.mark.parametrize("kind", ATTENTION)
@torch.no_grad()
def test_causality_and_equivariance(kind):
    op, Z, order = randomize(ATTENTION[kind](True)), torch.randn(2, 7, 12), torch.randperm(7)
    for j in range(1, 7):
        other = Z.clone()
        other[:, j] = torch.randn(2, 12)
        assert torch.equal(op(other)[:, :j], op(Z)[:, :j]) and not torch.allclose(op(other)[:, j:], op(Z)[:, j:])
    op = randomize(ATTENTION[kind](False))
    assert_near(op(Z[:, order]), op(Z)[:, order])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["mssa", "mhsa"])
@torch.no_grad()
def test_attention_maps(kind, causal):
    op, Z = randomize(ATTENTION[kind](causal)), torch.randn(2, 7, 12)
    A, values = op.map(Z), op.project(Z) if kind == "mssa" else op.project(Z)[2]
    assert (A >= 0).all() and (A.triu(1) == 0).all() == causal
    assert_near(A.sum(-1), torch.ones(2, 3, 7))
    assert_near(op.W((A @ values).transpose(1, 2).flatten(2)), op(Z))


@pytest.mark.parametrize("chunks", [(1,) * 7, (4, 1, 1, 1), (3, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ATTENTION)
@torch.no_grad()
def test_cached_generation(kind, chunks):
    op, Z, state = randomize(ATTENTION[kind](True)), torch.randn(2, 7, 12), {"room": 7}
    assert_near(torch.cat([op(z, state) for z in Z.split(chunks, 1)], 1), op(Z))
    held = sum(t.numel() for t in state.values() if isinstance(t, torch.Tensor))      # one tensor, two, running sums
    assert held == {"mhsa": 2 * 2 * 7 * 12, "tssa": 2 * (12 + 12 + 3)}.get(kind, 2 * 7 * 12) and state["n"] == 7


# Sparsification

def prox_step(A, Z, D, eta, lambd):
    """One proximal gradient step at A on 1/2 ||Z - D A||^2 + lambda ||A||_1 over A >= 0."""
    return (A - eta * D.T @ (D @ A - Z) - eta * lambd).relu()


def test_ista():
    d, eta, lambd = 9, 0.15, 0.25
    Z, op = torch.randn(2, 6, d), randomize(model.ISTA(d, eta, lambd))
    literal = by_column(lambda z: prox_step(z, z, op.D, eta, lambd), Z)
    assert_near(model.ista(Z, op.D, eta, lambd), literal)
    assert_near(op(Z), literal)
    assert model.ISTA(d).eta == model.ISTA(d).lambd == 0.1


def test_ista_solves_the_lasso():
    for _ in range(10):                                                               # downhill from a feasible start
        Z, D, lambd = torch.randn(9, 4).relu(), torch.randn(9, 9), 0.3
        A = model.ista(Z.T, D, 0.99 / torch.linalg.matrix_norm(D, 2) ** 2, lambd).T
        before, after = (0.5 * (Z - D @ X).norm() ** 2 + lambd * X.abs().sum() for X in (Z, A))
        assert (A >= 0).all() and after <= before
    D, A = orthonormal(9, 9), torch.randn(4, 9).relu()                                # orthogonal: one step is enough
    assert_near(model.ista(A @ D.T, D, eta=1.0, lambd=0.0), A)
    assert_near(model.ista(A @ D.T, D, eta=1.0, lambd=0.2), (A - 0.2).relu())
    swap, Z = torch.eye(8)[[1, 0, 3, 2, 5, 4, 7, 6]], torch.rand(4, 4).repeat_interleave(2, 1)
    assert_near(model.ista(Z, swap, 0.3, 0.0), Z)                                           # D Z = Z: a fixed point


def test_mmprox():
    d, n, lambd, eps = 8, 5, 0.3, 0.4
    Z, op, alpha = torch.randn(2, n, d), randomize(model.MMProx(d, lambd, eps)), d / (n * eps ** 2)
    assert_near(op(Z), by_column(lambda z: ((1 + 4 / (9 * (1 + alpha))) * op.D.T @ z - 4 * lambd / (9 * alpha)).relu(), Z))


def test_odl():
    d, C, eta, lambd = 6, 3, 0.2, 0.15
    Z, op = torch.randn(2, 5, d), randomize(ODL(d, C, eta, lambd))

    def code(z):
        return prox_step(prox_step(torch.zeros(C * d, 5), z, op.D, eta, lambd), z, op.D, eta, lambd)

    assert_near(op.code(Z), by_column(code, Z))
    assert_near(op(Z), by_column(lambda z: op.D_hat @ code(z), Z))


def test_mlp():
    Z, op = torch.randn(2, 5, 6), randomize(MLP(6, 24))
    x = Z @ op.up.weight.T + op.up.bias
    assert_near(op(Z), x * 0.5 * (1 + torch.erf(x / 2 ** 0.5)) @ op.down.weight.T + op.down.bias)


# Layers

def config(arch, **fields):
    return ImageConfig(**dict(arch=arch, width=16, heads=4, layers=2, image_size=8, patch_size=4, classes=5) | fields)


NO_RESIDUAL = ("crate", "crate-c", "crate-n", "crate-t", "crate-mm")                  # their step replaces the tokens
OUTPUT = {"crate-c": "subspace", "crate-n": "negative", "crate-t": "transpose"}
PARTS = {"crate-alpha": ("MSSA", "ODL"), "tost": ("TSSA", "MLP"), "aot": ("MSSA", "NoneType"),
         "crate-mm": ("MSSA", "MMProx"), "aot-mhsa": ("MHSA", "NoneType"), "transformer": ("MHSA", "MLP")}


@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_layer(arch):
    fields = dict(eta=0.2, lambd=0.3, eps=0.4, step=0.6 if arch in OUTPUT else 1.0)
    layer = randomize(model.Layer(config(arch, layer_scale=0.5, expansion=2, **fields)))
    norm_eps = 1e-5 if arch in NO_RESIDUAL else 1e-6

    def ln(Z, norm):
        variance = Z.var(-1, unbiased=False, keepdim=True)
        return (Z - Z.mean(-1, True)) / (variance + norm_eps).sqrt() * norm.weight + norm.bias

    Z = 2e-3 * torch.randn(3, 5, 16)                                                  # so small that norm_eps is felt
    half = out = Z + layer.scale1 * layer.attention(ln(Z, layer.norm1))
    if arch in NO_RESIDUAL:
        out = layer.sparsification(ln(half, layer.norm2))
    elif layer.sparsification is not None:
        out = half + layer.scale2 * layer.sparsification(ln(half, layer.norm2))
    assert_near(layer.compress(Z), half)
    assert_near(layer(Z), out)
    parts = PARTS.get(arch, ("MSSA", "ISTA"))
    assert (type(layer.attention).__name__, type(layer.sparsification).__name__) == parts
    if parts[0] == "MSSA":
        assert (layer.attention.output, layer.attention.step) == (OUTPUT.get(arch, "learned"), fields["step"])
    assert all(getattr(layer.sparsification, name, value) == value for name, value in fields.items())
    assert parts[1] != "ODL" or layer.sparsification.D.shape == layer.sparsification.D_hat.shape == (16, 32)
    assert parts[1] != "MLP" or layer.sparsification.up.weight.shape == (32, 16)


@pytest.mark.parametrize("arch", ARCHS)
@torch.no_grad()
def test_causal_layer(arch):
    """[B] Eq. (7.4.3): the first tokens of a sequence come out the same whatever follows them, and from a cache."""
    layer = randomize(model.Layer(config(arch), causal=True, context=7))
    Z, state = torch.randn(2, 7, 16), {"room": 7}
    assert_near(layer(Z[:, :4]), layer(Z)[:, :4])
    assert_near(torch.cat([layer(z, state) for z in Z.split((4, 1, 1, 1), 1)], 1), layer(Z))


@torch.no_grad()
def test_layer_defaults():
    for arch, layers, value in (("tost", 12, 1.0), ("tost", 24, 1e-5), ("crate", 24, None), ("transformer", 24, None)):
        scale = model.Layer(config(arch, layers=layers)).scale1
        assert scale is None if value is None else (scale == value).all()
    attention = {arch: model.Layer(config(arch)).attention for arch in ARCHS if arch not in OUTPUT}
    assert [arch for arch in attention if attention[arch].W.bias is None] == ["crate-alpha"]
    assert attention["transformer"].QKV.bias is not None and attention["tost"].U.bias is not None


@torch.no_grad()
def test_initialisation():
    """The released codes' distributions, by bound or deviation on matrices large enough to see it."""
    big = dict(width=128, image_size=32)
    crate, alpha, vit = (ImageEncoder(config(arch, **big)) for arch in ("crate", "crate-alpha", "transformer"))
    ista, odl, mssa = crate.layers[0].sparsification, alpha.layers[0].sparsification, crate.layers[0].attention
    for D, bound in ((ista.D, (6 / 128) ** 0.5), (odl.D, (6 / 128) ** 0.5), (odl.D_hat, (6 / 128) ** 0.5),
                     (mssa.U.weight, 128 ** -0.5), (mssa.W.weight, 128 ** -0.5)):
        assert 0.98 * bound < D.abs().max() <= bound and float(D.std()) == pytest.approx(bound / 3 ** 0.5, rel=0.03)
    mhsa, mlp = vit.layers[0].attention, vit.layers[0].sparsification
    for t, std in ((crate.positions, 1), (crate.class_token, 1), (alpha.positions, 0.02), (alpha.class_token, 1e-6),
                   (alpha.layers[0].attention.U.weight, 0.02), (alpha.layers[0].attention.W.weight, 0.02),
                   (vit.positions, 0.02), (mhsa.QKV.weight, 0.02), (mhsa.W.weight, 0.02), (mlp.up.weight, 0.02)):
        assert float(t.std()) == pytest.approx(std, rel=0.2 if t.numel() == 128 else 0.05)


@pytest.mark.parametrize("arch", ["crate", "transformer"])
@torch.no_grad()
def test_drop_path(arch):
    layer, Z = randomize(model.Layer(config(arch), drop_path=0.3), 0.2), torch.randn(1, 5, 16).expand(4000, 5, 16)
    branch = layer.eval().compress(Z) - Z
    assert torch.equal(layer(Z)[0], layer(Z)[1])
    dropped = layer.train().compress(Z) - Z
    kept = dropped.abs().sum((1, 2)) > 0
    assert_near(dropped[kept], branch[kept] / 0.7)                                          # so that the mean stays
    assert float(kept.double().mean()) == pytest.approx(0.7, abs=0.03)
    rates = [layer.drop_path for layer in ImageEncoder(config(arch, layers=4, drop_path=0.3)).layers]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])


def test_train_flops():
    """Multiply-adds of one token with the matrices of a layer of width 16, counted by hand; 2 FLOPs each, 3 passes."""
    d2, n = 16 ** 2, 50
    matrices = {"crate": 3, "crate-mm": 3, "crate-c": 3, "crate-t": 3, "crate-alpha": 2 + 3 * 4 + 4,
                "aot": 2, "aot-mhsa": 4, "tost": 2 + 8, "transformer": 4 + 8}
    for arch, count in matrices.items():
        found = model.train_flops_per_token([model.Layer(config(arch))] * 3, n)
        assert found == 3 * (6 * count * d2 + (0 if arch == "tost" else 12 * n * 16)), arch
    net = ImageClassifier(config("crate"))                                            # 2 x 2 patches of 48 numbers
    assert net.train_flops() == 5 * 2 * (6 * 3 * d2 + 12 * 5 * 16) + 6 * 4 * 48 * 16 + 6 * 16 * 5
    assert net.train_flops(16) == 17 * 2 * (6 * 3 * d2 + 12 * 17 * 16) + 6 * 16 * 48 * 16 + 6 * 16 * 5


# Image models

@pytest.mark.parametrize("arch", ARCHS)
def test_classifier(arch):
    net, x, trace = randomize(ImageClassifier(config(arch))), torch.randn(3, 3, 8, 8), []
    logits, e = net(x), net.encoder
    logits.square().sum().backward()
    silent = [k for k, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    assert silent == [] and logits.shape == (3, 5)
    assert torch.equal(net(x, trace), logits) and torch.equal(net(x), logits)
    Z = e.tokens(x)
    for layer, (half, out, attention) in zip(e.layers, trace, strict=True):
        assert_near(half, layer.compress(Z))
        assert_near(out, layer(Z))
        assert_near(attention, layer.attention.map(layer.norm1(Z)))
        assert half.shape == out.shape == (3, 5, 16)
        assert attention.shape == ((3, 4, 5) if arch == "tost" else (3, 4, 5, 5))
        Z = out
    plain = arch in NO_RESIDUAL + ("crate-alpha",)                                    # the others end with an LN
    assert_near(e(x), Z if plain else F.layer_norm(Z, (16,), e.norm.weight, e.norm.bias, 1e-6))


@pytest.mark.parametrize("arch", ARCHS)
def test_compiled_equals_eager(arch):
    """Without a graph break: logits and gradients, and logits of a second image size (with interpolated positions)."""
    torch._dynamo.reset()
    net, x, y = randomize(ImageClassifier(config(arch, layers=1))), torch.randn(2, 3, 8, 8), torch.randn(2, 3, 16, 16)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=None if arch == "crate" else False)
    assert_near(compiled(x), net(x), 1e-9)
    for g, h in zip(*(torch.autograd.grad(f(x).square().sum(), list(net.parameters())) for f in (compiled, net))):
        assert_near(g, h, 1e-9)
    with torch.no_grad():
        assert_near(compiled(y), net(y), 1e-6)


@pytest.mark.parametrize("size, arch, count", [
    ("tiny", "crate", 6_090_856), ("small", "crate", 13_116_328),
    ("base", "crate", 22_796_008), ("large", "crate", 77_641_192),
    ("tiny", "transformer", 5_717_416), ("small", "transformer", 22_050_664),
    ("base", "crate-alpha", 72_328_936), ("large", "crate-alpha", 253_650_920)])
def test_published_parameter_counts(size, arch, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in ImageClassifier(image_config(size, arch)).parameters()) == count


def patches_literally(x, P):
    """(B, C, H, W) -> (B, n, P^2 C): patches in raster order, each unrolled row by row, a pixel's channels together."""
    B, C, H, W = x.shape
    return torch.stack([torch.stack([x[:, c, i + r, j + s] for r in range(P) for s in range(P) for c in range(C)], 1)
                        for i in range(0, H, P) for j in range(0, W, P)], 1)


def test_patchify():
    x, square = torch.randn(2, 3, 4, 6), torch.randn(2, 5, 6, 6)
    assert torch.equal(model.patchify(x, 2), patches_literally(x, 2))
    assert torch.equal(model.unpatchify(model.patchify(square, 3), 3, channels=5), square)


def test_sincos_positions():
    d, side = 12, 3
    table, omega = model.sincos_positions(d, side), [10000 ** (-4 * i / d) for i in range(d // 4)]
    code = [[f(at * o) for at in (column, row) for f in (math.sin, math.cos) for o in omega]
            for row in range(side) for column in range(side)]
    assert_near(table.double(), torch.tensor([[0.0] * d] + code)[None], 1e-6)
    buffers = dict(ImageEncoder(config("crate", positions="sincos")).named_buffers())
    assert torch.equal(buffers["positions"], model.sincos_positions(16, 2))


@torch.no_grad()
def test_position_interpolation():
    encoder = randomize(ImageEncoder(config("crate", image_size=32)))
    assert encoder.position_table(8, 8) is encoder.positions
    row, column = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    encoder.positions[0, 1:, :3] = torch.stack([row, column, torch.full((8, 8), 7.0)], -1).flatten(0, 1)
    table = encoder.position_table(16, 12)
    assert table.shape == (1, 1 + 16 * 12, 16) and torch.equal(table[:, 0], encoder.positions[:, 0])
    # patch centres lie at (i + 1/2) old / new - 1/2; inside, the cubic stays within 0.05 of a straight line
    centres = [(torch.arange(new) + 0.5) * 8 / new - 0.5 for new in (16, 12)]
    row, column = torch.meshgrid(*centres, indexing="ij")
    expected = torch.stack([row, column, torch.full((16, 12), 7.0)], -1)
    assert (table[0, 1:, :3].view(16, 12, 3) - expected)[4:-4, 4:-4].abs().max() < 0.05
    assert encoder(torch.randn(2, 3, 64, 48)).shape == (2, 1 + 16 * 12, 16)
    with pytest.raises(ConfigError, match="patch_size=4.*30 x 32"):
        encoder(torch.randn(1, 3, 30, 32))


@pytest.mark.parametrize("pool", ["class", "mean"])
@pytest.mark.parametrize("arch", ["crate", "transformer"])
def test_stem_and_pooling(arch, pool):
    net, x = randomize(ImageClassifier(config(arch, pool=pool))), torch.randn(2, 3, 8, 8)
    e, Z = net.encoder, patches_literally(x, 4)

    def ln(Z, norm):
        return F.layer_norm(Z, Z.shape[-1:], norm.weight, norm.bias, 1e-5)

    if arch == "crate":                                                               # LN, Linear, LN; LN in the head
        Z = ln(ln(Z, e.embed[0]) @ e.embed[1].weight.T + e.embed[1].bias, e.embed[2])
    else:
        Z = Z @ e.embed[0].weight.T + e.embed[0].bias
    assert_near(e.tokens(x), torch.cat([e.class_token.expand(2, 1, 16), Z], 1) + e.positions)
    pooled = e(x)[:, 0] if pool == "class" else sum(e(x)[:, i] for i in range(1, 5)) / 4
    pooled = ln(pooled, net.head[0]) if arch == "crate" else pooled
    assert_near(net(x), pooled @ net.head[1].weight.T + net.head[1].bias)


# Published checkpoints

def official(alpha, d=16, P=4, side=3, layers=2, classes=7):
    """Random tensors under the names and in the shapes of the authors' checkpoints."""
    shapes = {"pos_embedding": (1, side ** 2 + 1, d), "cls_token": (1, 1, d), "mlp_head.1.weight": (classes, d),
              "mlp_head.1.bias": (classes,), "mlp_head.0.weight": (d,), "mlp_head.0.bias": (d,)}
    stem = "to_patch_embedding"
    shapes |= {"conv1.weight": (d, 3, P, P), "conv1.bias": (d,)} if alpha else {
        f"{stem}.1.weight": (3 * P ** 2,), f"{stem}.1.bias": (3 * P ** 2,), f"{stem}.2.weight": (d, 3 * P ** 2),
        f"{stem}.2.bias": (d,), f"{stem}.3.weight": (d,), f"{stem}.3.bias": (d,)}
    for name in (f"transformer.layers.{l}" for l in range(layers)):
        shapes |= {f"{name}.{i}.norm.{kind}": (d,) for i in range(2) for kind in ("weight", "bias")}
        shapes |= {f"{name}.0.fn.qkv.weight": (d, d), f"{name}.0.fn.to_out.0.weight": (d, d)}
        shapes |= {f"{name}.1.fn.D": (d, 4 * d), f"{name}.1.fn.D1": (d, 4 * d)} if alpha else {
            f"{name}.0.fn.to_out.0.bias": (d,), f"{name}.1.fn.weight": (d, d)}
    return {name: 0.4 * torch.randn(shape) for name, shape in shapes.items()}


def released_forward(t, x, heads, P=4):
    """The authors' network on their tensors, tokens as rows."""
    alpha = "conv1.weight" in t

    def norm(Z, name):
        return F.layer_norm(Z, Z.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], 1e-6 if alpha else 1e-5)

    def linear(Z, name):
        return F.linear(Z, t[f"{name}.weight"], t.get(f"{name}.bias"))

    if alpha:
        Z = F.conv2d(x, t["conv1.weight"], t["conv1.bias"], stride=P).flatten(2).mT
    else:
        Z = linear(norm(patches_literally(x, P), "to_patch_embedding.1"), "to_patch_embedding.2")
        Z = norm(Z, "to_patch_embedding.3")
    Z = torch.cat([t["cls_token"].expand(len(x), -1, -1), Z], 1) + t["pos_embedding"]
    p = Z.shape[-1] // heads
    for name in ("transformer.layers.0", "transformer.layers.1"):
        w = linear(norm(Z, f"{name}.0.norm"), f"{name}.0.fn.qkv")
        averaged = [(h @ h.mT * p ** -0.5).softmax(-1) @ h for h in w.split(p, -1)]
        Z = Z + linear(torch.cat(averaged, -1), f"{name}.0.fn.to_out.0")
        y = norm(Z, f"{name}.1.norm")
        if alpha:
            D, D1 = t[f"{name}.1.fn.D"], t[f"{name}.1.fn.D1"]
            a = (0.1 * y @ D - 0.01).relu()
            Z = Z + (a - 0.1 * (a @ D.T - y) @ D - 0.01).relu() @ D1.T
        else:
            D = t[f"{name}.1.fn.weight"]
            Z = (y + 0.1 * (y @ D - y @ D.T @ D) - 0.01).relu()
    return linear(norm(Z[:, 0], "mlp_head.0"), "mlp_head.1")


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"state_dict": t, "epoch": 3},
                                  lambda t: {"state_dict": {f"module.{k}": v for k, v in t.items()}}])
@pytest.mark.parametrize("alpha", [False, True])
@torch.no_grad()
def test_from_official(alpha, wrap):
    tensors, x = official(alpha), torch.randn(2, 3, 12, 12)
    net = ImageClassifier.from_official(wrap(tensors), heads=4)
    c = net.config
    assert (c.width, c.layers, c.patch_size, c.image_size, c.classes, net.training) == (16, 2, 4, 12, 7, False)
    assert_near(net(x), released_forward(tensors, x, heads=4))


def test_from_official_knows_published_heads():
    assert ImageClassifier.from_official(official(False, d=576)).config.heads == 12
    with pytest.raises(ConfigError, match="width 16.*heads="):
        ImageClassifier.from_official(official(True))


@pytest.mark.parametrize("name, shape, message", [
    ("cls_token", None, "cls_token"),                                                 # None: the tensor is missing
    ("pos_embedding", None, "pos_embedding"),
    ("mlp_head.1.weight", None, "mlp_head.1.weight"),
    ("transformer.layers.1.0.fn.qkv.weight", None, "transformer.layers.1.0.fn.qkv.weight"),
    ("extra.weight", (2,), "extra.weight"),
    ("transformer.layers.0.1.fn.weight", (16, 64), r"transformer.layers.0.1.fn.weight.*\(16, 64\).*\(16, 16\)"),
    ("mlp_head.0.weight", (8,), r"mlp_head.0.weight.*\(8,\).*\(16,\)"),
    ("pos_embedding", (1, 9, 16), "pos_embedding.*square"),
    ("pos_embedding", (10, 16), "pos_embedding"),
    ("to_patch_embedding.2.weight", (16, 50), "to_patch_embedding.2.weight")])
def test_from_official_names_what_does_not_fit(name, shape, message):
    tensors = official(False) | ({} if shape is None else {name: torch.zeros(shape)})
    if shape is None:
        del tensors[name]
    with pytest.raises(ConfigError, match=message):
        ImageClassifier.from_official(tensors, heads=4)


@pytest.mark.parametrize("content", [{}, {"state_dict": {}}, {"epoch": 3}, [1], {"a": torch.zeros(2), "b": "text"}])
def test_from_official_refuses_other_files(content):
    with pytest.raises(ConfigError, match="official"):
        ImageClassifier.from_official(content)


@pytest.mark.parametrize("build, message", [
    (lambda: config("crat"), "'crat'.*did you mean crate"),
    (lambda: image_config("tiny", "crate-alfa"), "did you mean crate-alpha"),
    (lambda: image_config("tinny"), "'tinny'.*tiny, small, base, large.*did you mean tiny"),
    (lambda: image_config("base", "tost"), "tiny, small"),
    (lambda: image_config("tiny", wdth=3), "'wdth'.*did you mean width"),
    (lambda: config("crate", heads=5), r"heads=5.*width=16.*\[1, 2, 4, 8, 16\]"),
    (lambda: config("crate", patch_size=3), "patch_size=3.*image_size=8"),
    (lambda: config("crate", step=0.5), "step=0.5.*crate-c.*crate learns"),
    (lambda: config("crate-t", head_dim=3), "crate-t.*4 x 3 and 16"),
    (lambda: config("crate", head_dim=-2), "head_dim=-2"),
    (lambda: config("crate", stem="conv"), "stem='conv'.*norm, plain"),
    (lambda: config("crate", pool="max"), "pool='max'.*class, mean"),
    (lambda: config("crate", positions="sincos", width=6, heads=1), "sincos.*6"),
    (lambda: config("crate", layers=0), "layers=0"),
    (lambda: config("crate", eta=math.nan), "eta=nan"),
    (lambda: config("crate", eps=0), "eps=0.*more than 0"),
    (lambda: config("crate", dropout=1.0), "dropout=1.0")])
def test_config_errors(build, message):
    with pytest.raises(ConfigError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_class_rate_has_its_slope_where_nothing_belongs():
    Z, Pi, h = torch.randn(6, 4), torch.eye(3).repeat(2, 1), 1e-6
    Pi = Pi.requires_grad_()
    value = model.class_coding_rate(Z, Pi)
    value.backward()
    for i, k in ((0, 1), (2, 0), (5, 1)):
        moved = Pi.detach().clone()
        moved[i, k] += h
        assert ((model.class_coding_rate(Z, moved) - value) / h).item() == pytest.approx(Pi.grad[i, k].item(), rel=1e-3)
    assert model.class_coding_rate(Z, torch.cat([Pi.detach(), torch.zeros(6, 1)], 1)).item() == pytest.approx(value.item())
