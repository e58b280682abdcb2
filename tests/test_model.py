"""model.py against the papers' equations, written once more with tokens as columns, in float64."""
import math
from dataclasses import fields
from functools import partial

import pytest
import torch
from torch.nn import functional as F

import model
from checkpoint import TASKS
from flags import ModelFlags
from measure import count, train_flops


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


def assert_near_with_gradients(found, expected, leaves, tol=1e-10):
    probe = torch.randn_like(expected)
    assert_near(found, expected, tol)
    assert_near(*(torch.autograd.grad((out * probe).sum(), leaves) for out in (found, expected)),
                tol)


def assert_compiles(net, *inputs, tol=1e-9):
    """The whole graph, without a break, has the same outputs and gradients as eager code."""
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager", dynamic=False)
    assert_near_with_gradients(compiled(*inputs), net(*inputs), list(net.parameters()), tol)
    return compiled


def build(operator, arch="crate", **fields):
    """An operator of 12 features in 3 heads with weights N(0, 0.4); of text with causal."""
    config = model.ImageConfig
    if "causal" in fields:
        config, fields = model.TextConfig, dict(context=9) | fields
    return randomize(operator(config(arch=arch, **dict(width=12, heads=3) | fields)))


def orthonormal(*shape):
    return torch.linalg.qr(torch.randn(*shape))[0]


# ---- Objective

def R(Z, eps):
    d, n = Z.shape
    return 0.5 * torch.logdet(torch.eye(d) + d / (n * eps ** 2) * Z @ Z.T)


def Rc(Z, U, eps):
    return sum(R(Uk.T @ Z, eps) for Uk in U)


@pytest.mark.parametrize("n, d, K, p", [(5, 9, 2, 5), (9, 5, 3, 4), (6, 6, 1, 6), (12, 10, 3, 4)])
def test_rates(n, d, K, p):
    """Literal; rotations of tokens and space change nothing; one whole subspace has R^c = R. What
    is not finite makes the sample's rates NaN."""
    Z, U, eps = torch.randn(2, n, d) * (torch.rand(2, n, d) < 0.6), torch.randn(K, d, p), 0.3
    rate, parts = model.coding_rate(Z, eps), model.subspace_coding_rate(Z, U, eps)
    assert_near(rate, torch.stack([R(z.T, eps) for z in Z]))
    assert_near(parts, torch.stack([Rc(z.T, U, eps) for z in Z]))
    assert_near(rate, model.coding_rate(orthonormal(n, n) @ Z @ orthonormal(d, d), eps))
    assert_near(rate, model.subspace_coding_rate(Z, orthonormal(1, d, d), eps))
    nonzeros = torch.stack([z.count_nonzero() for z in Z])
    assert_near(model.sparse_rate_reduction(Z, U, eps, 0.2), rate - parts - 0.2 * nonzeros)
    for Z[1, 2, 3] in (math.nan, math.inf):
        rates = torch.stack([model.coding_rate(Z), model.subspace_coding_rate(Z, U)])
        assert rates.isnan().tolist() == [[False, True]] * 2


@pytest.mark.parametrize("rate", [model.sparse_rate_reduction, model.subspace_coding_rate_grad])
def test_precision_of_rates(rate):
    """Autocast changes no bit, half precision counts as float32."""
    rounded = torch.randn(3, 40, 24).relu().bfloat16(), torch.randn(2, 24, 8).bfloat16()
    single = [t.float() for t in rounded]
    with torch.autocast("cpu", torch.bfloat16):
        cast = rate(*single)
    assert torch.equal(cast, rate(*single))
    assert_near(rate(*rounded), cast, 1e-6)


@pytest.mark.parametrize("n, p", [(4, 6), (9, 3)])
def test_gradient_of_subspace_rate(n, p):
    d, K, eps = 8, 3, 0.6
    beta = p / (n * eps ** 2)
    Z, U = torch.randn(2, n, d, requires_grad=True), torch.randn(K, d, p)
    exact, = torch.autograd.grad(sum(Rc(z.T, U, eps) for z in Z), Z)
    assert_near(model.subspace_coding_rate_grad(Z, U, eps), exact)

    def two_terms(z):
        return sum(beta * Uk @ Uk.T @ z - beta ** 2 * Uk @ Uk.T @ z @ (Uk.T @ z).T @ (Uk.T @ z)
                   for Uk in U)
    assert_near(model.subspace_coding_rate_grad(Z, U, eps, neumann=True), by_column(two_terms, Z))


def test_gaussian_mixture_denoise():
    d, K, p, sigma = 9, 4, 2, 0.8
    z, U = torch.randn(5, d), orthonormal(K, d, p)
    basis = torch.cat(list(U), 1)                           # [U_1 .. U_K], d x K p
    # the projection onto the nearest subspace, if there is no noise
    nearest = [min((Uk @ Uk.T @ zi for Uk in U), key=lambda x: (x - zi).norm()) for zi in z]
    assert_near(model.gaussian_mixture_denoise(z, U, 1e-3), torch.stack(nearest))
    for zi, found in zip(z, model.gaussian_mixture_denoise(z, U, sigma)):
        energy = torch.stack([(Uk.T @ zi).norm() ** 2 for Uk in U])
        weight = (energy / (2 * sigma ** 2)).softmax(0)
        assert_near(found, basis @ torch.kron(weight.diag(), torch.eye(p)) @ (basis.T @ zi))


# ---- Compression operators

def column_softmax(gram, causal):
    if causal:                                              # column i keeps rows <= i
        gram = gram.masked_fill(torch.ones_like(gram).tril(-1) > 0, -math.inf)
    return gram.softmax(-2)


def stacked_ssa(Z, U, scale, causal):
    """stack_k SSA(Z | U_k), K p x n."""
    w = [Uk.T @ Z for Uk in U]
    return torch.cat([wk @ column_softmax(scale * wk.T @ wk, causal) for wk in w])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("arch", ["crate-c", "crate-n", "crate-t"])
def test_mssa(arch, causal):
    """The function, and operators without W at the released code's scale p^-1/2."""
    d, K, p = 12, 3, 4 if arch == "crate-t" else 5
    op, Z = build(model.MSSA, arch, head_dim=p, causal=causal, step_size=0.7), torch.randn(2, 7, d)
    U, W, bias = op.U.weight.view(K, p, d).mT, torch.randn(d, K * p), torch.randn(d)
    basis = torch.cat([*U], 1)
    outer = 0.7 * {"crate-c": basis, "crate-n": -basis, "crate-t": basis.T}[arch]

    def literal(outer, scale):
        return by_column(lambda z: outer @ stacked_ssa(z, U, scale, causal), Z)

    assert_near(op.bases(), U)
    assert_near(model.mssa(Z, U, causal=causal), literal(basis, 1.0))
    assert_near(model.mssa(Z, U, W, bias, 0.5, causal), literal(W, 0.5) + bias)
    Z.requires_grad_()
    assert_near_with_gradients(op(Z), literal(outer, p ** -0.5), (Z, op.U.weight))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_bfloat16_on_the_cpu(causal):
    """There the map is formed. A bfloat16 is rounded by up to 2^-9, a softmax's scores too."""
    op, w = build(model.MSSA, width=48, causal=causal), torch.randn(2, 3, 40, 16).bfloat16()
    exact, found = op.attend(*[w.double()] * 3), op.attend(w, w, w)
    assert found.dtype == torch.bfloat16 and (found - exact).norm() < 2 ** -8 * exact.norm()


def turned(x, t):
    """Pairs of the p entries of x as points of the plane, turned by t theta_m."""
    out = torch.empty_like(x)
    for m in range(len(x) // 2):
        c, s = (f(t * 1e4 ** (-2 * m / len(x))) for f in (math.cos, math.sin))
        out[2 * m] = c * x[2 * m] - s * x[2 * m + 1]
        out[2 * m + 1] = s * x[2 * m] + c * x[2 * m + 1]
    return out


def by_token(op, z):
    """Attention token by token, from the weights: tokens as rows of z (n, d), (n, K p)."""
    linear, none, heads = op.QKV if isinstance(op, model.MHSA) else op.U, torch.zeros(op.p), []
    w = z @ linear.weight.T + (0 if linear.bias is None else linear.bias)
    for w in w.unflatten(1, (-1, op.heads, op.p)).permute(2, 1, 0, 3):      # (1 or 3, n, p)
        Q, K, V = w if len(w) == 3 else (w[0], w[0], w[0])
        a = b = torch.tensor(0.0)
        if op.mix is not None:
            a, b = op.mix[[len(heads), op.heads + len(heads)]].sigmoid()
        queries, keys, values, rows = list(Q), [], [], []
        for i in range(len(z)):
            keys.append((1 - a) * K[i] + a * (K[i - 1] if i else none))
            values.append((1 - b) * V[i] + b * (V[i - 1] if i else none))
        if op.rotary:
            queries, keys = ([turned(x, t) for t, x in enumerate(xs)] for xs in (queries, keys))
        for i, q in enumerate(queries):
            seen = range(i + 1 if op.causal else len(z))
            share = torch.stack([op.p ** -0.5 * q @ keys[j] for j in seen]).softmax(0)
            rows.append(share @ torch.stack(values[:len(seen)]))
        heads.append(torch.stack(rows))
    return torch.cat(heads, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("kind", [model.MSSA, model.MHSA])
def test_attention_and_its_map(kind, rotary, shift, causal):
    """Against a loop over tokens, with gradients; and the map times the values is the output."""
    op = build(kind, head_dim=6, causal=causal, rotary=rotary, shift=shift)
    Z = torch.randn(2, 5, 12, requires_grad=True)
    literal = op.W(torch.stack([by_token(op, z) for z in Z]))
    assert_near_with_gradients(op(Z), literal, [Z, *op.parameters()])
    A, values = op.map(Z), op.queries_keys_values(Z)[2]
    assert (A >= 0).all() and (A.triu(1) == 0).all() == causal
    assert_near(A.sum(-1), torch.ones(2, 3, 5))
    assert_near(op.W((A @ values).transpose(1, 2).flatten(2)), literal)


def tssa(Z, op):
    """Token by token: its squares normalised over the tokens seen, memberships, moments, output."""
    K, p, n = op.heads, op.p, Z.shape[1]
    bias = 0 if op.U.bias is None else op.U.bias[:, None]
    w = (op.U.weight @ Z + bias).view(K, p, n)
    seen = [slice(0, i + 1 if op.causal else n) for i in range(n)]
    energy, out = [], []
    for i in range(n):
        norm = w[:, :, seen[i]].norm(dim=2).clamp_min(1e-6 if op.causal else 1e-12)     # (K, p)
        ratio = (w[:, :, i] / norm) ** 2
        b = op.b[:, i] if op.causal else 0                                              # (K, 1)
        energy.append(op.eta * (ratio + b).sum(1))
    Pi = torch.stack(energy, 1).softmax(0)                                              # (K, n)
    for i in range(n):
        member = Pi[:, None, seen[i]]
        s = (member * w[:, :, seen[i]] ** 2).sum(2) / (member.sum(2) + 1e-8)
        out.append(-Pi[:, i, None] * w[:, :, i] / (1 + s))
    return op.W.weight @ torch.stack(out, 2).flatten(0, 1) + op.W.bias[:, None]


@pytest.mark.parametrize("causal, size", [(False, 1), (True, 1), (False, 1e-12), (True, 1e-6)])
@torch.no_grad()
def test_tssa(causal, size):
    """Also of tokens as small as the released guard under the norm, and of zero."""
    arch = "transformer" if size == 1 else "crate"          # with a bias of U, and without
    op = build(model.TSSA, arch, head_dim=5)
    if causal:
        op = build(model.TSSA, "crate-lm", head_dim=5, causal=True)
        op.U.bias *= size == 1
    op.W.bias *= size
    Z = size * torch.randn(2, 7, 12)
    literal = by_column(partial(tssa, op=op), Z)
    assert_near(op(Z) / size, literal / size, 1e-10 if size == 1 else 1e-6)
    assert_near(op.map(Z).sum(1), torch.ones(2, 7))         # memberships: a softmax over heads
    assert size == 1 or (op(0 * Z) == op.W.bias).all()


# ---- Sparsification operators

def prox_step(A, Z, D, eta, lambd):
    """One proximal gradient step at A on 1/2 ||Z - D A||^2 + lambda ||A||_1 over A >= 0."""
    return (A - eta * D.T @ (D @ A - Z) - eta * lambd).relu()


@pytest.mark.parametrize("n", [3, 12])                      # fewer tokens than d, and more
def test_ista(n):
    """For orthogonal D and eta = 1 one step solves the LASSO."""
    d, eta, lambd = 9, 0.15, 0.25
    Z, op = torch.randn(1, n, d), build(model.ISTA, width=d, eta=eta, lambd=lambd)
    literal = by_column(lambda z: prox_step(z, z, op.D, eta, lambd), Z)
    assert_near(model.ista(Z, op.D, eta, lambd), literal)
    assert_near(op(Z), literal)
    D, A = orthonormal(d, d), Z.relu()
    assert_near(model.ista(A @ D.T, D, 1.0, lambd), (A - lambd).relu())


def test_odl():
    fields = dict(width=6, expansion=3, eta=0.2, lambd=0.15)
    d, C, eta, lambd = fields.values()
    Z, op = torch.randn(2, 5, d), build(model.ODL, "crate-alpha", **fields)

    def code(z):
        a1 = prox_step(torch.zeros(C * d, 5), z, op.D, eta, lambd)
        return prox_step(a1, z, op.D, eta, lambd)

    assert_near(op.code(Z), by_column(code, Z))
    assert_near(op(Z), by_column(lambda z: op.D_hat @ code(z), Z))
    tied = build(model.TiedODL, "crate-alpha", **fields)
    assert [name for name, _ in tied.named_parameters()] == ["D"]
    tied.D.data = op.D.data
    assert_near(tied(Z), by_column(lambda z: op.D @ code(z), Z))

    op.steps, op.eta, W = 1, 1.0, op.D.T
    assert_near(op(Z), by_column(lambda z: op.D_hat @ (W @ z - lambd).relu(), Z))       # an MLP
    op.steps, op.eta = 5000, torch.linalg.matrix_norm(op.D, 2).item() ** -2
    with torch.no_grad():
        A = op.code(Z)                                  # solves the LASSO: its conditions hold
        slope = (A @ op.D.T - Z) @ op.D + lambd
    assert (slope > -1e-6).all() and (slope[A > 1e-6].abs() < 1e-6).all()


def test_mmprox_and_mlp():
    mlp = build(model.MLP)
    op = build(model.MMProx, "crate-mm", lambd=0.3, mm_eps=0.4, image_size=8, patch_size=4)
    Z, alpha = torch.randn(2, 5, 12), 12 / (5 * 0.4 ** 2)           # of 4 patches
    gain, cut = 1 + 4 / (9 * (1 + alpha)), 4 * 0.3 / (9 * alpha)
    assert_near(op(Z), by_column(lambda z: (gain * op.D.T @ z - cut).relu(), Z))
    assert_near(mlp(Z), mlp.down(F.gelu(Z @ mlp.up.weight.T + mlp.up.bias)))


def test_threshold_is_ista_without_a_dictionary():
    """D = 0 and D = I have no gradient."""
    op, Z = build(model.Threshold, eta=0.2, lambd=0.3), torch.randn(2, 5, 12)
    assert_near(op(Z), (Z - 0.06).relu())
    assert_near(op(Z), model.ista(Z, torch.zeros(12, 12), 0.2, 0.3))
    assert_near(op(Z), model.ista(Z, torch.eye(12), 0.2, 0.3))


# ---- Layers

def config(arch="crate", **fields):
    """4 patches of 48 numbers."""
    small = dict(width=16, heads=4, layers=2, image_size=8, patch_size=4, classes=5)
    return model.ImageConfig(**small | dict(arch=arch) | fields)


@pytest.mark.parametrize("arch", model.ARCHS)
@torch.no_grad()
def test_layer(arch):
    """[J] Eq. (45) and [B] Section 7.5 from the operators."""
    row, fields = model.ARCHS[arch], dict(eta=0.2, lambd=0.3, mm_eps=0.4)
    norm_eps = 1e-5 if row.in_images is model.AS_CRATE else 1e-6
    layer = model.Layer(config(arch, layer_scale=0.5, **fields))
    op, nonlinear = randomize(layer).attention, layer.sparsification

    def ln(Z, norm):
        return F.layer_norm(Z, (16,), norm.weight, norm.bias, norm_eps)

    Z = 2e-3 * torch.randn(3, 5, 16)                        # so small that norm_eps is felt
    half = out = Z + layer.scale1 * op(ln(Z, layer.norm1))
    if nonlinear is not None:
        out = nonlinear(ln(half, layer.norm2))
        out = half + layer.scale2 * out if row.residual else out
    assert_near(layer.compress(Z), half)
    assert_near(layer(Z), out)
    assert all(getattr(nonlinear, name, value) == value for name, value in fields.items())


@torch.no_grad()
def test_initialization():
    """The released codes' distributions, on matrices large enough to see bound or deviation."""
    for size, scale in (("small", 1.0), ("medium", 1e-5)):
        assert model.image_config(size, "tost").layer_scale == scale
    assert (model.Layer(config("tost", layer_scale=0.3)).scale1 == 0.3).all()
    big = dict(width=128, image_size=32)
    crate, alpha, vit = (model.ImageEncoder(config(arch, **big))
                         for arch in ("crate", "crate-alpha", "transformer"))
    mae = model.MaskedAutoencoder(model.MAEConfig(**big, heads=4, layers=1, patch_size=4))
    mssa, ista = crate.layers[0].attention, crate.layers[0].sparsification
    odl = alpha.layers[0].sparsification
    uniform = {D: (6 / 128) ** 0.5 for D in (ista.D, odl.D, odl.D_hat, mae.decoder[0].D)}
    uniform |= {alpha.embed[0].weight: (6 / 48) ** 0.5, mssa.U.weight: 128 ** -0.5,
                mssa.W.weight: 128 ** -0.5}
    uniform |= {m.weight: (6 / sum(m.weight.shape)) ** 0.5 for m in mae.modules()
                if isinstance(m, torch.nn.Linear)}
    for weight, bound in uniform.items():
        assert 0.98 * bound < weight.abs().max() <= bound
        assert float(weight.std()) == pytest.approx(bound / 3 ** 0.5, rel=0.03)

    normal = {crate.positions: 1, crate.class_token: 1, alpha.class_token: 1e-6}
    normal |= {weight: 0.02 for weight in (
        alpha.positions, alpha.layers[0].attention.U.weight, vit.positions, mae.mask_token,
        mae.encoder.class_token, vit.layers[0].attention.QKV.weight,
        vit.layers[0].sparsification.up.weight)}
    for weight, std in normal.items():
        rel = 0.2 if weight.numel() == 128 else 0.05
        assert float(weight.std()) == pytest.approx(std, rel=rel)


@torch.no_grad()
def test_drop_path():
    layer = randomize(model.Layer(config(), drop_path=0.3), 0.2)
    Z = torch.randn(1, 5, 16).expand(4000, 5, 16)
    branch = layer.eval().compress(Z) - Z
    dropped = layer.train().compress(Z) - Z
    kept = dropped.abs().sum((1, 2)) > 0
    assert_near(dropped[kept], branch[kept] / 0.7)          # so that the mean stays
    assert float(kept.double().mean()) == pytest.approx(0.7, abs=0.03)

    layers = model.ImageEncoder(config(layers=4, drop_path=0.3)).layers
    assert [layer.drop_path for layer in layers] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_configs_refuse_what_no_model_does():
    """Rotary positions of an image, unknown words."""
    for wrong in (dict(rotary=True), dict(pool="max")):
        with pytest.raises(model.ConfigError, match=[*wrong][0]):
            model.ImageConfig(**wrong)


def test_flags_of_the_layers_are_fields_of_a_config():
    flags, config = ({f.name for f in fields(cls)} for cls in (ModelFlags, model.BackboneConfig))
    assert flags - config == {"size"}


@pytest.mark.parametrize("arch, matrices", [("crate", 3), ("tost", 10), ("transformer", 12)])
def test_train_flops(arch, matrices):
    """6 N + 12 L n d a token, without the second part for TSSA; N = `matrices` of d^2 a layer."""
    def layers(number, n):
        return n * number * (6 * matrices * 16 ** 2 + (0 if arch == "tost" else 12 * n * 16))
    assert train_flops(model.ImageEncoder(config(arch, layers=3, image_size=28))) == layers(3, 50)
    c = model.MAEConfig(arch=arch, width=16, heads=4, layers=2, image_size=16, patch_size=4,
                        decoder_layers=3)
    assert train_flops(model.MaskedAutoencoder(c)) == layers(5, 17)


@pytest.mark.parametrize("task, arch, counts", [
    ("vit", "crate", dict(tiny=6_090_856, small=13_116_328, base=22_796_008, large=77_641_192)),
    ("vit", "crate-alpha", dict(base=72_328_936, large=253_650_920)),
    ("vit", "transformer", dict(tiny=5_717_416, small=22_050_664)),
    # 24 layers of 10 d^2 + 13 d + K; embedding, class token, positions, norm and head around them
    ("vit", "tost", dict(
        medium=24 * (10 * 512 ** 2 + 13 * 512 + 8) + (769 + 1 + 197 + 2) * 512 + 513_000)),
    ("mae", "crate", dict(small=25_405_824, base=44_638_464)),
    ("gpt", "crate", dict(base=59_886_336)),
    # [B] says 120M. The embedding (38.6M) and 12 layers of U, W, D, D_hat (10 d^2) are 109.4M
    ("gpt", "crate-alpha", dict(small=57_225_728, base=109_431_552)),
    ("gpt", "crate-lm", dict(base=81_148_416)),
    ("gpt", "transformer", dict(small=63_517_184, base=123_587_328)),
    ("gpt", "tost", dict(base=109_597_584, medium=303_662_464, large=655_136_720)),
    ("gpt", "aot", dict(base=101_868_544, medium=182_401_280)),
    ("gpt", "aot-mhsa", dict(base=122_165_120))])
def test_published_parameter_counts(task, arch, counts):
    """Of text without positions, published in millions; of autoencoders with position tables and
    CRATE-MAE's unused weights, a second table and a Linear(d, d)."""
    model_class = TASKS[task]
    for size, published in counts.items():
        with torch.device("meta"):
            net = model_class(model.make_config(model_class.config_class, size, arch))
        found, d = sum(p.numel() for p in net.parameters()), net.config.width
        if task == "gpt":
            found -= net.positions.numel()
            assert count(net, without=("positions",)) == found
        if task == "mae":
            found += sum(table.numel() for table in net.buffers())
            found += 197 * d + d * d + d if arch == "crate" else 0
        assert found == published
