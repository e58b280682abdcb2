"""The masked autoencoder against [B] Section 7.6, one picture and one patch at a time, in float64."""
import pytest
import torch
from torch.distributions import MultivariateNormal
from torch.nn import functional as F

import model
from model import ARCHS, ConfigError, DecoderLayer, Layer, MAEConfig, MaskedAutoencoder, mae_config, patchify

MIRRORED = ("crate", "crate-c", "crate-n", "crate-t")


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def assert_near(found, expected, tol=1e-10):
    torch.testing.assert_close(found, expected, rtol=tol, atol=tol)


def randomize(module, std=0.4):
    for p in module.parameters():
        p.data.normal_(std=std)
    return module


def orthonormal(*shape):
    return torch.linalg.qr(torch.randn(*shape))[0]


def config(arch="crate", mask_tokens="before", **fields):
    """16 patches of 48 numbers, 12 of them hidden."""
    small = dict(width=16, heads=4, layers=2, image_size=16, patch_size=4)
    return MAEConfig(**small | dict(arch=arch, mask_tokens=mask_tokens) | fields)


VIT = dict(arch="transformer", mask_tokens="after", decoder_width=8, decoder_heads=2, decoder_layers=1)
BOTH = pytest.mark.parametrize("mask_tokens", ["before", "after"])


# Sizes

@pytest.mark.parametrize("size, arch, published", [
    ("small", "crate", 25_405_824), ("base", "crate", 44_638_464),
    ("small", "transformer", 47_578_240), ("base", "transformer", 143_836_416)])
def test_published_parameter_counts(size, arch, published):
    """They include the fixed position tables and, for CRATE-MAE, a second table and a Linear(d, d), both unused."""
    with torch.device("meta"):
        net = MaskedAutoencoder(mae_config(size, arch))
    d, tables = net.config.width, sum(table.numel() for table in net.buffers())
    unused = 197 * d + d * d + d if arch == "crate" else 0
    assert sum(p.numel() for p in net.parameters()) + tables + unused == published


def test_named_sizes():
    crate, vit = mae_config("base"), mae_config("small", "transformer")
    assert (crate.layers, crate.decoder_layers, crate.heads, crate.decoder_heads) == (12, 12, 12, 12)
    assert (crate.eta, crate.lambd, crate.norm_eps) == (0.1, 0.5, 1e-5)
    assert (crate.mask_tokens, crate.mask_ratio, crate.normalize_targets) == ("before", 0.75, False)
    assert (vit.width, vit.layers, vit.decoder_width, vit.decoder_layers, vit.mask_tokens) == (384, 12, 512, 8, "after")
    assert mae_config("small", lambd=0.2, decoder_layers=3).decoder_layers == 3


@pytest.mark.parametrize("arch", ARCHS)
def test_decoder(arch):
    """CRATE's runs backwards whatever its size; without a size of its own it has the encoder's, head_dim included."""
    mirrored = arch in MIRRORED + ("crate-mm",)
    for fields in (dict(), dict(decoder_heads=2), dict(mask_tokens="after", decoder_width=8, decoder_heads=2)):
        net = MaskedAutoencoder(config(arch, **dict(decoder_layers=3) | fields))
        attention = net.decoder[0].attention
        assert [type(layer) for layer in net.decoder] == 3 * [DecoderLayer if mirrored else Layer]
        c = net.config
        assert (attention.heads, attention.p) == (c.decoder_heads, c.decoder_width // c.decoder_heads)
        assert net(torch.randn(2, 3, 16, 16), torch.rand(2, 16)).isfinite()
    if arch != "crate-t":
        attention = MaskedAutoencoder(config(arch, heads=3, head_dim=6)).decoder[0].attention
        assert (attention.heads, attention.p) == (3, 6)


@torch.no_grad()
def test_initialisation():
    """Xavier-uniform Linears without bias, class and mask token N(0, 0.02), D kaiming: by bound and deviation."""
    net = MaskedAutoencoder(config(width=128))
    linears = {name: m for name, m in net.named_modules() if isinstance(m, torch.nn.Linear)}
    bounds = {m.weight: (6 / sum(m.weight.shape)) ** 0.5 for m in linears.values()}
    bounds |= {D: (6 / 128) ** 0.5 for D in (net.encoder.layers[0].sparsification.D, net.decoder[0].D)}
    for weight, bound in bounds.items():
        assert 0.98 * bound < weight.abs().max() <= bound
        assert float(weight.std()) == pytest.approx(bound / 3 ** 0.5, rel=0.03)
    assert len(linears) == 4 * 2 + 2 and all(m.bias is None or not m.bias.any() for m in linears.values())
    for token in (net.mask_token, net.encoder.class_token):
        assert float(token.std()) == pytest.approx(0.02, rel=0.2)


# Forward

def ln(Z, norm, eps):
    return F.layer_norm(Z, Z.shape[-1:], norm.weight, norm.bias, eps)


def attention_literally(layer, Z):
    op = layer.attention
    U = torch.stack([op.U.weight[k * op.p:(k + 1) * op.p].T for k in range(op.heads)])
    return model.mssa(Z, U, op.W.weight, op.W.bias, scale=op.p ** -0.5)


def encoder_layer(layer, Z, c):
    """[B] Eq. (7.3.3)-(7.3.6) on the tokens (n, d) of one picture; of another arch, the tested Layer."""
    if c.arch != "crate":
        return layer(Z[None])[0]
    half = Z + attention_literally(layer, ln(Z, layer.norm1, 1e-5))
    return model.ista(ln(half, layer.norm2, 1e-5), layer.sparsification.D, c.eta, c.lambd)


def decoder_layer(layer, Z, c):
    """[B] Eq. (7.6.3)-(7.6.4)."""
    if c.arch != "crate":
        return layer(Z[None])[0]
    Y = torch.stack([layer.D @ z for z in ln(Z, layer.norm1, 1e-5)])
    return Y - attention_literally(layer, ln(Y, layer.norm2, 1e-5))


def forward_literally(net, x, noise):
    """Predicted patches (B, n, 48) and the loss."""
    c, e = net.config, net.encoder
    P, side = c.patch_size, c.image_size // c.patch_size
    painted, errors = [], []
    for picture, draw in zip(x, noise.tolist()):
        patches = [picture[:, P * i:P * i + P, P * j:P * j + P].permute(1, 2, 0).flatten()
                   for i in range(side) for j in range(side)]
        hidden = sorted(range(len(patches)), key=draw.__getitem__)[-c.masked():]
        tokens = [e.class_token[0, 0] + e.positions[0, 0]]
        for i, patch in enumerate(patches):
            if i not in hidden:
                tokens.append(e.embed[0].weight @ patch + e.embed[0].bias + e.positions[0, 1 + i])
            elif c.mask_tokens == "before":
                tokens.append(net.mask_token[0, 0] + e.positions[0, 1 + i])
        Z = torch.stack(tokens)
        for layer in e.layers:
            Z = encoder_layer(layer, Z, c)
        Z = ln(Z, e.norm, 1e-6)
        if c.mask_tokens == "after":
            seen = iter(Z @ net.decoder_embed.weight.T + net.decoder_embed.bias)
            tokens = [next(seen)] + [net.mask_token[0, 0] if i in hidden else next(seen) for i in range(len(patches))]
            Z = torch.stack(tokens) + net.decoder_positions[0]
        for layer in net.decoder:
            Z = decoder_layer(layer, Z, c)
        prediction = (ln(Z, net.decoder_norm, 1e-6) @ net.predict.weight.T + net.predict.bias)[1:]
        for i in hidden:
            target = patches[i]
            if c.normalize_targets:
                variance = (target - target.mean()).square().sum() / (len(target) - 1)
                target = (target - target.mean()) / (variance + 1e-6) ** 0.5
            errors.append((prediction[i] - target).square().mean())
        painted.append(prediction)
    return torch.stack(painted), sum(errors) / len(errors)


@pytest.mark.parametrize("normalize_targets", [False, True])
@pytest.mark.parametrize("fields", [dict(lambd=0.5), dict(mask_tokens="after", eta=0.3, decoder_layers=3), VIT])
@torch.no_grad()
def test_forward(fields, normalize_targets):
    net = randomize(MaskedAutoencoder(config(**fields, normalize_targets=normalize_targets)))
    x, noise = 0.01 * torch.randn(3, 3, 16, 16), torch.rand(3, 16)                    # dark, so that the 1e-6 is felt
    painted, loss = forward_literally(net, x, noise)
    assert_near(net.decode(net.encode(x, noise), noise), painted)
    assert_near(net(x, noise), loss)


@pytest.mark.parametrize("fields", [dict(), VIT])
@torch.no_grad()
def test_trace(fields):
    """A list receives the layers that encode, then those that decode; asking for it changes nothing."""
    net, x, noise = randomize(MaskedAutoencoder(config(**fields))), torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    encoded, trace = [], []
    Z = net.encode(x, noise, encoded)
    assert torch.equal(net(x, noise, trace), net(x, noise)) and len(trace) == 2 + len(net.decoder)
    for found, again in zip(encoded, trace):
        assert torch.equal(found.out, again.out)
    assert_near(Z, ln(trace[1].out, net.encoder.norm, 1e-6))
    if net.config.arch == "crate":
        for layer, (half, out, attention) in zip(net.decoder, trace[2:], strict=True):
            assert_near(half, ln(Z, layer.norm1, 1e-5) @ layer.D.T)
            assert_near(out, half - layer.attention(layer.norm2(half)))
            assert_near(attention, layer.attention.map(layer.norm2(half)))
            Z = out
    else:
        Z = trace[-1].out
    painted = ln(Z, net.decoder_norm, 1e-6) @ net.predict.weight.T + net.predict.bias
    assert_near(net.decode(net.encode(x, noise), noise), painted[:, 1:])


@pytest.mark.parametrize("fields", [dict(), VIT])
def test_compiled_equals_eager(fields):
    """Without a graph break: loss and gradients."""
    torch._dynamo.reset()
    net = randomize(MaskedAutoencoder(config(**fields | dict(layers=1, decoder_layers=1))))
    x, noise = torch.randn(2, 3, 16, 16), torch.rand(2, 16)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_near(compiled(x, noise), net(x, noise), 1e-6)
    for g, h in zip(*(torch.autograd.grad(f(x, noise), list(net.parameters())) for f in (compiled, net))):
        assert_near(g, h, 1e-6)


@BOTH
@pytest.mark.parametrize("arch", ARCHS)
def test_every_parameter_learns(arch, mask_tokens):
    """From the first step on. The first loss is the variance of the target, 1, and that of the guess: xavier-uniform
    weights make it 2 d / (d + 48) on normalised tokens."""
    net, x, noise = MaskedAutoencoder(config(arch, mask_tokens)), torch.randn(32, 3, 16, 16), torch.rand(32, 16)
    loss = net(x, noise)
    loss.backward()
    silent = [k for k, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()]
    assert silent == []
    assert loss.item() == pytest.approx(1 + 2 * 16 / (16 + 48), rel=0.25)


# Masks

@pytest.mark.parametrize("image_size, patch_size, ratio, masked", [
    (224, 16, 0.75, 147), (32, 4, 0.75, 48), (12, 4, 0.75, 7), (16, 4, 0.5, 8), (8, 4, 0.75, 3), (8, 4, 0.25, 1),
    (20, 4, 0.8, 20), (40, 4, 0.9, 90), (224, 16, 0.9, 177)])
def test_number_of_hidden_patches(image_size, patch_size, ratio, masked):
    c = config(image_size=image_size, patch_size=patch_size, mask_ratio=ratio)
    noise = torch.rand(50, c.patches())
    assert c.masked() == masked
    assert MaskedAutoencoder(c).hidden(noise).sum(1).tolist() == [masked] * 50


def test_masks_follow_the_noise():
    net, noise, order = MaskedAutoencoder(config()), torch.rand(4000, 16), torch.randperm(16)
    hidden = net.hidden(noise)
    assert (noise.where(hidden, torch.tensor(2.0)).amin(1) > noise.where(~hidden, torch.tensor(-1.0)).amax(1)).all()
    assert torch.equal(net.hidden(noise[:, order]), hidden[:, order])
    # each patch equally often, each pair equally often: within 5 deviations of 4000 draws
    assert (hidden.double().mean(0) - 12 / 16).abs().max() < 5 * (0.75 * 0.25 / 4000) ** 0.5
    pairs = hidden.double().T @ hidden.double() / 4000
    assert (pairs[~torch.eye(16, dtype=torch.bool)] - 12 * 11 / (16 * 15)).abs().max() < 5 * (0.55 * 0.45 / 4000) ** 0.5


@BOTH
@pytest.mark.parametrize("arch", ["crate", "transformer"])
def test_encoder_sees_the_visible_patches_only(arch, mask_tokens):
    net, noise = randomize(MaskedAutoencoder(config(arch, mask_tokens))), torch.rand(3, 16)
    x = torch.randn(3, 3, 16, 16, requires_grad=True)
    Z, hidden = net.encode(x, noise), net.hidden(noise)
    grad, = torch.autograd.grad((Z * torch.randn_like(Z)).sum(), x)
    assert torch.equal(patchify(grad, 4).abs().amax(-1) > 0, ~hidden)
    other = model.unpatchify(patchify(x, 4) + 9 * hidden[..., None], 4)
    assert torch.equal(net.encode(other, noise), Z) and not torch.equal(other, x)
    assert Z.shape == (3, 1 + 16 if mask_tokens == "before" else 1 + 4, 16)


@BOTH
@torch.no_grad()
def test_patches_in_any_order(mask_tokens):
    """Without positions, pictures and noise with their patches moved alike are painted the same, moved alike."""
    net = randomize(MaskedAutoencoder(config(mask_tokens=mask_tokens)))
    x, noise, order = torch.randn(2, 3, 16, 16), torch.rand(2, 16), torch.randperm(16)
    for table in net.buffers():
        table.zero_()
    moved = model.unpatchify(patchify(x, 4)[:, order], 4)
    painted, again = (net.decode(net.encode(a, b), b) for a, b in ((x, noise), (moved, noise[:, order])))
    assert_near(again, painted[:, order])
    assert_near(net(moved, noise[:, order]), net(x, noise), 1e-6)


@pytest.mark.parametrize("normalize_targets", [False, True])
def test_loss_is_of_the_hidden_patches(normalize_targets):
    net = MaskedAutoencoder(config(normalize_targets=normalize_targets))
    x, noise = torch.rand(3, 3, 16, 16), torch.rand(3, 16)
    hidden, targets = net.hidden(noise), net.targets(x)
    visible = ~hidden[..., None]
    prediction = (targets + 7 * visible * torch.randn(3, 16, 48)).requires_grad_()    # right where it counts
    net.decode = lambda Z, noise, trace: prediction
    assert net(x, noise) == 0
    assert net(model.unpatchify(patchify(x, 4) + visible * torch.rand(3, 16, 48), 4), noise) == 0
    prediction.data += 0.25 * torch.randn(3, 16, 48)
    grad, = torch.autograd.grad(net(x, noise), prediction)
    assert_near(grad, 2 * (prediction - targets) * hidden[..., None] / (3 * 12 * 48), 1e-6)


def test_normalized_targets():
    net = MaskedAutoencoder(config(normalize_targets=True))
    x = 3 + 2 * torch.randn(2, 3, 16, 16)
    x[0, :, :4, :4] = 0.7                                                             # a patch of one colour
    targets = net.targets(x)
    assert_near(targets.mean(-1), torch.zeros(2, 16))
    assert (targets[0, 0].abs() < 1e-10).all()
    assert_near(targets.var(-1).flatten()[1:], torch.ones(31), 1e-5)
    net.config.normalize_targets = False
    assert torch.equal(net.targets(x), patchify(x, 4))


def test_train_flops():
    """Multiply-adds of one picture, counted by hand; 2 FLOPs each, 3 passes. Attention is (2 x n x 16) a token."""
    d2, n = 16 ** 2, 17
    layer = 6 * 3 * d2 + 12 * n * 16
    ends = 6 * 16 * 48 * 16 + 6 * n * 16 * 48
    assert MaskedAutoencoder(config(decoder_layers=3)).train_flops() == n * (2 + 3) * layer + ends
    after = 5 * 2 * (6 * 3 * d2 + 12 * 5 * 16) + 6 * 5 * d2                           # 4 patches seen, decoder_embed
    assert MaskedAutoencoder(config(mask_tokens="after")).train_flops() == after + n * 2 * layer + ends


# The decoder layer as an inverse, half by half. LN stands outside of it (see the last test)

def bare(arch, d=16):
    """An encoder layer and the decoder layer that shares its operators, both without LayerNorms."""
    c = config(arch, width=d, eta=1.0, lambd=0.0)
    encoder, decoder = randomize(Layer(c)), DecoderLayer(c)
    encoder.norm1 = encoder.norm2 = decoder.norm1 = decoder.norm2 = torch.nn.Identity()
    decoder.attention = encoder.attention
    return encoder, decoder


def set_step(attention, W, s):
    """Makes it s MSSA."""
    if attention.output == "learned":
        attention.W.weight.data, attention.W.bias.data = s * W[0], s * W[1]
    else:
        attention.step = s


@pytest.mark.parametrize("arch", MIRRORED)
@torch.no_grad()
def test_compression_is_inverted_to_second_order(arch):
    """(I - s MSSA)(I + s MSSA) Z = Z - s^2 MSSA'(Z) MSSA(Z) + O(s^3), where (I + s MSSA)^2 is off by O(s)."""
    encoder, decoder = bare(arch)
    decoder.D.data, Z = torch.eye(16), torch.randn(2, 6, 16)
    W = (encoder.attention.W.weight.data, encoder.attention.W.bias.data) if arch == "crate" else None
    set_step(encoder.attention, W, 1.0)
    M = encoder.attention(Z)
    second = (encoder.attention(Z + 1e-5 * M) - encoder.attention(Z - 1e-5 * M)) / 2e-5   # MSSA'(Z) MSSA(Z)
    errors, wrong_sign = [], []
    for s in (2e-4, 1e-4):
        set_step(encoder.attention, W, s)
        errors.append(decoder(encoder.compress(Z)) - Z)
        wrong_sign.append(encoder.compress(encoder.compress(Z)) - Z)
        assert (errors[-1] / s ** 2 + second).norm() < 0.02 * second.norm()
    assert float(errors[0].norm() / errors[1].norm()) == pytest.approx(4, rel=0.01)
    assert float(wrong_sign[0].norm() / wrong_sign[1].norm()) == pytest.approx(2, rel=0.01)


@torch.no_grad()
def test_sparsification_is_inverted_up_to_lambda():
    """D ISTA(D A) = D ReLU(A - lambda) for codes A >= 0, orthogonal D and eta = 1: it misses min(A, lambda), at most
    lambda sqrt(nnz) a token, and as much as that where no code is smaller than lambda."""
    encoder, decoder = bare("crate-c")
    decoder.attention.step = 0
    D = encoder.sparsification.D.data = decoder.D.data = orthonormal(16, 16)
    codes = torch.rand(3, 50, 16) * (torch.rand(3, 50, 16) < 0.5)
    for A, reached in ((codes, False), (codes + 0.3 * (codes > 0), True)):
        half, nnz = A @ D.T, A.count_nonzero(-1)                                      # rows: D a
        for lambd in (0.0, 0.1, 0.3):
            encoder.sparsification.lambd = lambd
            assert_near(encoder.sparsify(half), (A - lambd).relu())
            error = (decoder(encoder.sparsify(half)) - half).norm(dim=-1)
            assert_near(error, A.clamp_max(lambd).norm(dim=-1))
            assert (error <= lambd * nnz ** 0.5 + 1e-12).all()
            assert lambd == 0 or torch.allclose(error, lambd * nnz ** 0.5) == reached


@pytest.mark.parametrize("arch", MIRRORED)
@torch.no_grad()
def test_layer_is_inverted_to_second_order(arch):
    """Both halves at once: tokens whose compressed form D A has a code A >= 0 come back up to O(s^2)."""
    encoder, decoder = bare(arch)
    D = encoder.sparsification.D.data = decoder.D.data = orthonormal(16, 16)
    half, errors = torch.rand(2, 6, 16) @ D.T, []
    W = (encoder.attention.W.weight.data, encoder.attention.W.bias.data) if arch == "crate" else None
    for s in (2e-4, 1e-4):
        set_step(encoder.attention, W, s)
        Z = half
        for _ in range(20):                                                           # solves Z + s MSSA(Z) = D A
            Z = half - encoder.attention(Z)
        assert_near(encoder.compress(Z), half)
        errors.append((decoder(encoder(Z)) - Z).norm())
    assert float(errors[0] / errors[1]) == pytest.approx(4, rel=0.01) and errors[1] < 1e-6 * half.norm()


@torch.no_grad()
def test_what_no_decoder_can_bring_back():
    """Tokens far apart with one code: LN divides out scale and mean, ReLU cuts off the negative part."""
    c = config("crate-c", eta=1.0, lambd=0.0, step=0.0)
    encoder, half = Layer(c), torch.randn(2, 6, 16)
    encoder.sparsification.D.data = orthonormal(16, 16)
    code = encoder.sparsify(half)
    assert code.any() and half.norm() > 5
    for other in (3 * half, half + 2):
        assert_near(encoder.sparsify(other), code, 1e-4)                              # but for the 1e-5 under LN's root
    encoder.norm2 = torch.nn.Identity()
    decoder = DecoderLayer(c)
    decoder.norm1 = torch.nn.Identity()
    D = decoder.D.data = encoder.sparsification.D.data
    A = torch.randn(2, 6, 16)
    assert_near(encoder.sparsify(A @ D.T), encoder.sparsify(A.relu() @ D.T))
    assert_near((decoder(encoder.sparsify(A @ D.T)) - A @ D.T).norm(), A.clamp_max(0).norm())
    assert A.clamp_max(0).norm() > 5


def test_one_token_denoiser():
    """[J] Eq. (47) is O(sigma^2) off E[z_clean | z]: [N] A.1, by Bayes' rule and by Tweedie's formula, [J] Eq. (46)."""
    d, K, p = 9, 4, 2
    U, spectrum, of = orthonormal(K, d, p), torch.tensor([1.0, 2.5]), torch.arange(200) % K
    covariance = U * spectrum @ U.mT
    clean, w = torch.einsum("idp,ip->id", U[of], spectrum.sqrt() * torch.randn(200, p)), torch.randn(200, d)
    errors = []
    for sigma in (0.2, 0.1, 0.05, 0.025):
        z = (clean + sigma * w).requires_grad_()
        noisy = covariance + sigma ** 2 * torch.eye(d)
        density = torch.stack([MultivariateNormal(torch.zeros(d), C).log_prob(z) for C in noisy], 1)
        mean = sum(weight[:, None] * z @ torch.linalg.solve(noisy[k], covariance[k])
                   for k, weight in enumerate(density.softmax(1).T))
        assert_near(mean, z + sigma ** 2 * torch.autograd.grad(density.logsumexp(1).sum(), z)[0], 1e-9)
        errors.append((model.gaussian_mixture_denoise(z, U, sigma) - mean).norm().item())
    assert errors[-1] < 1e-3 * mean.norm()
    for coarse, fine in zip(errors, errors[1:]):
        assert coarse / fine == pytest.approx(4, rel=0.1)


# Published checkpoints

def official(d=16, P=4, side=3, layers=2, decoder_layers=3):
    """Random tensors under the names and in the shapes of the authors' checkpoints."""
    shapes = {"patch_embed.proj.weight": (d, 3, P, P), "patch_embed.proj.bias": (d,),
              "cls_token": (1, 1, d), "mask_token": (1, 1, d),
              "pos_embed": (1, side ** 2 + 1, d), "decoder_pos_embed": (1, side ** 2 + 1, d),
              "decoder_embed.weight": (d, d), "decoder_embed.bias": (d,),
              "decoder_pred.weight": (3 * P * P, d), "decoder_pred.bias": (3 * P * P,)}
    shapes |= {f"{norm}.{kind}": (d,) for norm in ("norm", "decoder_norm") for kind in ("weight", "bias")}
    for stack, count, attention in (("blocks", layers, 0), ("decoder_blocks", decoder_layers, 1)):
        for block in (f"{stack}.{l}.layers.0" for l in range(count)):
            shapes |= {f"{block}.{i}.norm.{kind}": (d,) for i in range(2) for kind in ("weight", "bias")}
            shapes |= {f"{block}.{attention}.fn.qkv.weight": (d, d), f"{block}.{attention}.fn.to_out.0.weight": (d, d),
                       f"{block}.{attention}.fn.to_out.0.bias": (d,), f"{block}.{1 - attention}.fn.weight": (d, d)}
    return {name: (0.4 * torch.randn(shape)).float().double() for name, shape in shapes.items()}


def released_forward(t, x, hidden, heads, P=4):
    """The authors' network on their tensors: predicted patches."""
    def norm(Z, name, eps=1e-5):
        return F.layer_norm(Z, Z.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    def attend(Z, name):
        w = norm(Z, f"{name}.norm") @ t[f"{name}.fn.qkv.weight"].T
        p = w.shape[-1] // heads
        out = torch.cat([(h @ h.mT * p ** -0.5).softmax(-1) @ h for h in w.split(p, -1)], -1)
        return F.linear(out, t[f"{name}.fn.to_out.0.weight"], t[f"{name}.fn.to_out.0.bias"])

    Z = F.conv2d(x, t["patch_embed.proj.weight"], t["patch_embed.proj.bias"], stride=P).flatten(2).mT.clone()
    Z[hidden] = t["mask_token"][0]
    Z = torch.cat([t["cls_token"].expand(len(x), -1, -1), Z], 1) + t["decoder_pos_embed"]
    for name in ("blocks.0.layers.0", "blocks.1.layers.0"):
        Z = norm(Z + attend(Z, f"{name}.0"), f"{name}.1.norm")
        D = t[f"{name}.1.fn.weight"]
        Z = (Z + 0.1 * (Z @ D - Z @ D.T @ D) - 0.1 * 0.5).relu()
    Z = norm(Z, "norm", 1e-6)
    for name in (f"decoder_blocks.{l}.layers.0" for l in range(3)):
        Z = norm(Z, f"{name}.0.norm") @ t[f"{name}.0.fn.weight"].T
        Z = Z - attend(Z, f"{name}.1")
    return F.linear(norm(Z, "decoder_norm", 1e-6), t["decoder_pred.weight"], t["decoder_pred.bias"])[:, 1:]


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: {"model": t, "epoch": 799},
                                  lambda t: {"state_dict": {f"module.{k}": v for k, v in t.items()}}])
@torch.no_grad()
def test_from_official(wrap):
    tensors, x, noise = official(), torch.randn(2, 3, 12, 12), torch.rand(2, 9)
    net = MaskedAutoencoder.from_official(wrap(tensors), heads=4)
    c = net.config
    assert (c.width, c.layers, c.decoder_layers, c.patch_size, c.image_size, c.lambd) == (16, 2, 3, 4, 12, 0.5)
    assert not net.training
    assert_near(net.decode(net.encode(x, noise), noise), released_forward(tensors, x, net.hidden(noise), heads=4))


def test_from_official_does_not_need_the_unused():
    tensors = official()
    used = {k: v for k, v in tensors.items() if k not in ("pos_embed", "decoder_embed.weight", "decoder_embed.bias")}
    all_of_it, enough = (MaskedAutoencoder.from_official(t, heads=2).state_dict() for t in (tensors, used))
    assert all(torch.equal(all_of_it[name], enough[name]) for name in all_of_it) and len(used) == len(tensors) - 3


def test_from_official_knows_published_heads():
    assert MaskedAutoencoder.from_official(official(d=576, layers=1, decoder_layers=1)).config.heads == 12
    with pytest.raises(ConfigError, match="width 16.*heads="):
        MaskedAutoencoder.from_official(official())


@pytest.mark.parametrize("name, shape, message", [
    ("cls_token", None, "cls_token"),                                                 # None: the tensor is missing
    ("mask_token", None, "mask_token"),
    ("patch_embed.proj.weight", None, "patch_embed.proj.weight"),
    ("decoder_pos_embed", None, "decoder_pos_embed"),
    ("blocks.1.layers.0.0.fn.qkv.weight", None, "blocks.1.layers.0.0.fn.qkv.weight"),
    ("decoder_blocks.2.layers.0.1.fn.to_out.0.bias", None, "decoder_blocks.2.layers.0.1.fn.to_out.0.bias"),
    ("extra.weight", (2,), "extra.weight"),
    ("blocks.0.layers.0.1.fn.weight", (16, 64), r"blocks.0.layers.0.1.fn.weight.*\(16, 64\).*\(16, 16\)"),
    ("decoder_blocks.0.layers.0.0.fn.weight", (4, 16), r"decoder_blocks.0.layers.0.0.fn.weight.*\(4, 16\).*\(16, 16\)"),
    ("decoder_pred.weight", (27, 16), r"decoder_pred.weight.*\(27, 16\).*\(48, 16\)"),
    ("decoder_norm.bias", (8,), r"decoder_norm.bias.*\(8,\).*\(16,\)"),
    ("decoder_pos_embed", (1, 9, 16), "decoder_pos_embed.*square"),
    ("decoder_pos_embed", (10, 16), "decoder_pos_embed"),
    ("decoder_pos_embed", (1, 10, 12), r"decoder_pos_embed.*\(1, 10, 12\).*\(1, 10, 16\)"),
    ("patch_embed.proj.weight", (16, 48), "patch_embed.proj.weight"),
    ("patch_embed.proj.weight", (16, 3, 4, 5), "patch_embed.proj.weight.*square"),
    ("patch_embed.proj.weight", (16, 1, 4, 4), "patch_embed.proj.weight.*three channels")])
def test_from_official_names_what_does_not_fit(name, shape, message):
    tensors = official() | ({} if shape is None else {name: torch.zeros(shape)})
    if shape is None:
        del tensors[name]
    with pytest.raises(ConfigError, match=message) as error:
        MaskedAutoencoder.from_official(tensors, heads=4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stack", ["blocks.", "decoder_blocks."])
def test_from_official_needs_both_stacks(stack):
    with pytest.raises(ConfigError, match=f"begins with {stack}"):
        MaskedAutoencoder.from_official({k: v for k, v in official().items() if not k.startswith(stack)}, heads=4)


# Configuration

@pytest.mark.parametrize("build, message", [
    (lambda: config(mask_ratio=0), "mask_ratio=0 .*between 0 and 1"),
    (lambda: config(mask_ratio=1.0), "mask_ratio=1.0 .*between 0 and 1"),
    (lambda: config(mask_ratio=-0.5), "mask_ratio=-0.5"),
    (lambda: config(mask_ratio=float("nan")), "mask_ratio=nan"),
    (lambda: config(mask_ratio=0.99), "mask_ratio=0.99 leaves 0 of 16"),
    (lambda: config(patch_size=16), "mask_ratio=0.75 leaves 0 of 1"),
    (lambda: config(mask_tokens="never"), "mask_tokens='never'.*before, after"),
    (lambda: config(decoder_width=8), "decoder_width=8.*mask_tokens=after"),
    (lambda: config(mask_tokens="after", decoder_width=8, decoder_heads=3), "decoder_heads=3.*decoder_width=8"),
    (lambda: config(mask_tokens="after", decoder_width=12, heads=8), "decoder_heads=8.*decoder_width=12"),
    (lambda: config(mask_tokens="after", decoder_width=6, decoder_heads=2), "sincos.*decoder_width.*6"),
    (lambda: config(decoder_layers=0), "decoder_layers=0"),
    (lambda: config(decoder_layers=-1), "decoder_layers=-1"),
    (lambda: config(decoder_layers=2.5), "decoder_layers=2.5"),
    (lambda: config(decoder_heads=-4), "decoder_heads=-4"),
    (lambda: config(mask_tokens="after", decoder_width=0), "decoder_width=0"),
    (lambda: config(heads=5), "heads=5.*width=16"),
    (lambda: config(patch_size=3), "patch_size=3.*image_size=16"),
    (lambda: mae_config("large"), "'large'.*small, base"),
    (lambda: mae_config("small", "crat"), "'crat'.*did you mean crate"),
    (lambda: mae_config("small", mask_ration=0.5), "'mask_ration'.*did you mean mask_ratio")])
def test_config_errors(build, message):
    with pytest.raises(ConfigError, match=message) as error:
        build()
    assert "\n" not in str(error.value)
