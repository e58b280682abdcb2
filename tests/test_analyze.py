"""What analyze.py reports, against the definitions."""
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import analyze
from flags import UserError
from parallel import derive_seed
import plot
from data import augment, images, text
from helpers import write_model
from model import (ConfigError, ImageClassifier, ImageConfig, LanguageModel, MAEConfig,
                   MaskedAutoencoder, TextConfig, coding_rate, mssa, subspace_coding_rate,
                   subspace_coding_rate_grad)

TINY = dict(width=16, heads=2, layers=3, image_size=32, patch_size=8, classes=10)


@pytest.fixture
def save(tmp_path, cache):
    """save(model, task, name): a checkpoint as the training scripts write it; its path."""
    data = images.load("shapes", cache)
    shapes = dict(name="shapes", mean=data.mean, std=data.std)

    def write(model, task="vit", name="best.pt", meta=shapes):
        write_model(tmp_path / name, model, task, meta)
        return str(tmp_path / name)
    return write


@pytest.fixture
def call(tmp_path, cache):
    """call(command, *flags): analyze.main on the CPU with small data; its numbers."""
    def run(command, *flags):
        opens_model = command not in ("toy", "denoise", "curves", "recall")
        own = ["--device=cpu", f"--data_dir={cache}"] if opens_model else []
        out = [f"--out={tmp_path / command}", "--overwrite"]
        return analyze.main([command, *out, *own, *map(str, flags)])
    return run


def validation(cache, index):
    """Images of the validation split, normalized."""
    data = images.load("shapes", cache)
    x = augment.to_float(torch.from_numpy(data.val_images[index]))
    return augment.normalize(x, data.mean, data.std)


def expected(layer, Z, half, out, convention, eps, lambd):
    """[N] Figure 3's numbers and [S]'s measure written out in float64 for one layer."""
    def rate_of(tokens, unit=False):
        with torch.no_grad():
            w = layer.attention.project(tokens)
        w = (w[2] if isinstance(w, tuple) else w).double()          # a transformer's values
        w = w / w.norm(dim=-1, keepdim=True) if unit else w
        n, p = w.shape[-2:]
        return 0.5 * torch.logdet(torch.eye(n) + p / (n * eps ** 2) * w @ w.mT).sum(1)

    if convention == "released":
        with torch.no_grad():                                       # a decoder compresses last
            entered = layer.norm1(Z) if hasattr(layer, "compress") else layer.norm2(half)
        rate_of_subspaces = rate_of(entered, unit=True)
    else:
        rate_of_subspaces = rate_of(half if convention == "caption" else out)
    nonzeros = (out != 0).double()
    rate = coding_rate(out.double(), eps)
    return dict(rate_of_subspaces=rate_of_subspaces, rate=rate, nonzeros=nonzeros.mean((1, 2)),
                srr=lambd * nonzeros.sum((1, 2)) + rate_of(out) - rate)


def check(row, found):
    for key, values in found.items():
        assert row[key] == pytest.approx(values.mean().item(), rel=1e-4), key
        std = values.std(correction=0).item()
        assert row[f"{key}_std"] == pytest.approx(std, rel=2e-2, abs=2e-3), key


# layers

@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost", "transformer", "aot"])
@pytest.mark.parametrize("convention", ["released", "caption", "output"])
def test_layers(save, call, cache, tmp_path, arch, convention):
    model = ImageClassifier(ImageConfig(arch=arch, **TINY)).eval()
    flags = [f"--ckpt={save(model)}", "--samples=12", "--batch_size=5", "--eps=0.3", "--lambd=0.2"]
    run, = call("layers", *flags, f"--convention={convention}",
                f"--json={tmp_path / 'a.json'}")["runs"]
    x = validation(cache, np.linspace(0, 99, 12).round().astype(int))
    with torch.no_grad():
        Z = model.encoder.tokens(x)
        trace = model.encoder.trace(x)
    for row, layer, traced in zip(run["layers"], model.encoder.layers, trace, strict=True):
        check(row, expected(layer, Z, traced.half, traced.out, convention, 0.3, 0.2))
        assert row["nonzeros"] < 1 if arch == "crate" else row["nonzeros"] == 1
        if arch == "crate-alpha":
            code = layer.sparsification.code(layer.norm2(traced.half))
            nonzeros = (code != 0).double().mean().item()
            assert row["code_nonzeros"] == pytest.approx(nonzeros)
        U = torch.cat(list(layer.attention.bases()), 1)
        assert row["norm_U"] ** 2 == pytest.approx(torch.linalg.eigvalsh(U @ U.mT)[-1].item())
        assert ("norm_D" in row) == arch.startswith("crate")
        Z = traced.out
    assert run["srr_measure"] == pytest.approx(sum(row["srr"] for row in run["layers"]) / 3)
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["flags"]["eps"] == 0.3
    assert saved["runs"][0]["layers"][2]["srr"] == run["layers"][2]["srr"]


@pytest.mark.parametrize("arch", ["crate", "tost", "aot-mhsa"])
def test_unit_bases_do_not_depend_on_the_size_of_U(arch):
    """And orthonormal ones are left as they are."""
    torch.manual_seed(0)
    layer = ImageClassifier(ImageConfig(arch=arch, **TINY)).encoder.layers[0]
    attention, out = layer.attention, torch.randn(3, 5, 16).relu()
    weight = attention.QKV.weight if arch == "aot-mhsa" else attention.U.weight
    values = weight.data[-16:]
    torch.nn.init.orthogonal_(values)

    def measured(unit_bases):
        c = analyze.Layers(convention="output", unit_bases=unit_bases)
        with torch.no_grad():
            found = analyze.layer_numbers(layer, None, out, out, c)
        return torch.stack([found["rate_of_subspaces"], found["srr"]])

    plain = measured(False)
    torch.testing.assert_close(measured(True), plain)
    values /= 3
    torch.testing.assert_close(measured(True), plain)
    assert (measured(False) < plain).all()


@pytest.mark.parametrize("arch,mask_tokens", [("crate", "before"), ("crate-alpha", "after")])
def test_layers_of_a_masked_autoencoder(save, call, cache, arch, mask_tokens):
    config = MAEConfig(arch=arch, decoder_layers=2, mask_tokens=mask_tokens, **TINY)
    model = MaskedAutoencoder(config).eval()
    flags = [f"--ckpt={save(model, 'mae')}", "--samples=9", "--eps=0.3"]
    run, other = (call("layers", *flags, f"--batch_size={size}")["runs"][0] for size in (4, 9))
    index = np.linspace(0, 99, 9).round().astype(int)
    generators = [torch.Generator().manual_seed(derive_seed("validation", int(i)))
                  for i in index]
    noise = torch.stack([torch.rand(16, generator=generator) for generator in generators])
    with torch.no_grad():
        trace = model.trace(validation(cache, index), noise)
    layers = [*model.encoder.layers, *model.decoder]
    assert [row["part"] for row in run["layers"]] == 3 * ["encoder"] + 2 * ["decoder"]
    for l, (row, traced, layer) in enumerate(zip(run["layers"], trace, layers, strict=True)):
        if l not in (0, 3) or l == 3 and arch == "crate":           # else what enters is not traced
            Z = trace[l - 1].out
            check(row, expected(layer, Z, traced.half, traced.out, "released", 0.3, 0.1))
        # a mask belongs to its image, not to the batch
        assert row["srr"] == pytest.approx(other["layers"][l]["srr"], rel=1e-5)
    encoder = [row["srr"] for row in run["layers"][:3]]
    assert run["srr_measure"] == pytest.approx(sum(encoder) / 3)


def test_layers_of_text(save, call, text_cache):
    data = text.load("verse", text_cache)
    model = LanguageModel(TextConfig(width=16, heads=2, layers=2, context=11, vocab_size=8)).eval()
    meta = dict(name="verse", tokenizer=data.tokenizer.meta(),
                n_vocab=data.tokenizer.n_vocab)
    path = save(model, "gpt", meta=meta)
    run, = call("layers", f"--ckpt={path}", f"--data_dir={text_cache}", "--samples=7", "--eps=0.3",
                "--batch_size=3")["runs"]
    starts = np.linspace(0, len(data.val) // 11 - 1, 7).round().astype(int) * 11
    ids = torch.from_numpy(np.stack([data.val[s:s + 11] for s in starts]).astype(np.int64))
    with torch.no_grad():
        Z = model.tokens(ids)
        trace = model.trace(ids)
    for row, layer, traced in zip(run["layers"], model.layers, trace, strict=True):
        check(row, expected(layer, Z, traced.half, traced.out, "released", 0.3, 0.1))
        Z = traced.out
    assert len(call("subspaces", f"--ckpt={path}")["layers"]) == 2
    with pytest.raises(UserError, match="task gpt"):
        call("tokens", f"--ckpt={path}")
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        call("layers", f"--ckpt={path}", "--data=tiny", f"--data_dir={text_cache}")


def test_layers_side_by_side(save, call):
    crate = ImageClassifier(ImageConfig(**TINY))
    tost = ImageClassifier(ImageConfig(arch="tost", **TINY | dict(layers=2)))
    a, b = save(crate, name="a.pt"), save(tost, name="b.pt")
    flags = ["--samples=4", "--seed=5"]
    runs = call("layers", f"--ckpt={a},{b}", "--split=both", "--untrained", *flags)["runs"]
    cases = [(path, untrained, split) for path in (a, b) for untrained in (False, True)
             for split in ("train", "val")]
    assert [(run["ckpt"], run["untrained"], run["split"]) for run in runs] == cases
    assert [len(run["layers"]) for run in runs] == 4 * [3] + 4 * [2]
    measures = [run["srr_measure"] for run in runs]
    assert len(set(measures)) == 8
    only, = call("layers", f"--ckpt={a}", "--random", *flags)["runs"]
    assert only["untrained"] and only["srr_measure"] == measures[3]


# subspaces, tokens, saliency

def test_coherence():
    U = torch.linalg.qr(torch.randn(12, 12).double())[0].view(12, 3, 4).transpose(0, 1)
    gram, found = analyze.coherence(5 * U)
    assert torch.allclose(gram, torch.eye(12).double()) and max(found.values()) < 1e-12

    U = torch.randn(3, 7, 2)
    columns = [U[k, :, j] / U[k, :, j].norm() for k in range(3) for j in range(2)]
    same, other = [], []
    for i in range(6):
        for j in set(range(6)) - {i}:
            (same if i // 2 == j // 2 else other).append(abs(float(columns[i] @ columns[j])))
    found = analyze.coherence(U)[1]
    assert found == pytest.approx(dict(within_mean=np.mean(same), within_max=max(same),
                                       across_mean=np.mean(other), across_max=max(other)))
    assert analyze.coherence(U[:1])[1]["across_mean"] is None
    assert analyze.coherence(U[:, :, :1])[1]["within_max"] is None


def test_subspaces(save, call, tmp_path):
    model = ImageClassifier(ImageConfig(**TINY))
    with torch.no_grad():
        model.encoder.layers[1].attention.U.weight.copy_(3 * torch.eye(16))
    found = call("subspaces", f"--ckpt={save(model)}")
    assert found["layers"][1] == dict(layer=2, within_mean=0, within_max=0, across_mean=0,
                                      across_max=0)
    assert found["layers"][0]["across_mean"] > 0
    directions = torch.nn.functional.normalize(torch.randn(20_000, 16), dim=1)
    assert found["random"] == pytest.approx(directions[:, 0].abs().mean().item(), rel=2e-2)
    sheet = np.asarray(Image.open(tmp_path / "subspaces.png"))      # 16 pixels an entry
    assert (sheet[14:, 264:520][8::16, 8::16] == 255 * (1 - np.eye(16))).all()


def test_tokens(save, call, cache, tmp_path):
    model = ImageClassifier(ImageConfig(**TINY)).eval()
    rows = call("tokens", f"--ckpt={save(model)}", "--index=7")["layers"]
    with torch.no_grad():
        trace = model.encoder.trace(validation(cache, [7]))
    for row, traced in zip(rows, trace, strict=True):
        assert row["nonzeros"] == pytest.approx((traced.out != 0).double().mean().item())
        share = np.linalg.svd(traced.out[0].double().numpy(), compute_uv=False) ** 2
        share = share / share.sum()
        entropy = -(share * np.log(share + 1e-30)).sum()
        assert row["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-3)
    sheet = np.asarray(Image.open(tmp_path / "tokens.png"))         # 24 pixels an entry
    Z = trace[0].out[0]
    white = (Z < Z.quantile(0.99) / 510).numpy()                    # zero, to a grey level
    assert ((sheet[14:, :16 * 24][12::24, 12::24] == 255) == white).all()


@pytest.mark.parametrize("arch", ["crate", "tost", "transformer"])
def test_saliency(arch, save, call, cache, tmp_path):
    model = ImageClassifier(ImageConfig(arch=arch, **TINY)).eval()
    flags = [f"--ckpt={save(model)}", "--pictures=5", "--index=2", "--layer=2"]
    heads = call("saliency", *flags)["heads"]
    with torch.no_grad():
        trace = model.encoder.trace(validation(cache, [2, 3, 4, 5, 6]))
    attention = trace[1].attention
    maps = attention[:, :, 1:] if arch == "tost" else attention[:, :, 0, 1:]
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    share = maps / maps.sum(-1, keepdim=True)
    entropy = -(share * share.log()).sum(-1)
    for i, (row, name) in enumerate(zip(heads, ["mean", 1, 2], strict=True)):
        assert row == dict(head=name, patches=pytest.approx(entropy[:, i].exp().mean().item()),
                           largest=pytest.approx(share[:, i].amax(-1).mean().item()))
    sheet = np.asarray(Image.open(tmp_path / "saliency.png"))       # image, mean, two heads
    assert sheet.shape == (5 * 4 * 32, 4 * 4 * 32, 3)
    assert call("saliency", *flags, "--head=2")["heads"] == heads[2:]
    one = np.asarray(Image.open(tmp_path / "saliency.png"))
    assert (one == np.concatenate([sheet[:, :128], sheet[:, 384:]], 1)).all()


# toy

def toy_flags(**changes):
    return analyze.Toy(width=24, heads=4, head_dim=6, tokens=20, iterations=12, **changes)


def toy_start(seed, norm):
    generator, c = torch.Generator().manual_seed(seed), toy_flags()
    Z = torch.randn(c.tokens, c.width, generator=generator, dtype=torch.float64)
    return norm * Z / c.width ** 0.5, analyze.random_subspaces(c, generator)


@pytest.mark.parametrize("norm", [0.5, 2.0])
def test_directions_are_the_gradients_they_claim(norm):
    Z, U = toy_start(1, norm)
    bases = torch.cat([*U], 1)                                      # orthonormal, all of them
    assert torch.allclose(bases.mT @ bases, torch.eye(24).double(), atol=1e-12)
    beta = 6 / (20 * 0.5 ** 2)
    Z.requires_grad_()
    w = Z @ U
    first, second = beta / 2 * w.square().sum(), -beta ** 2 / 4 * (w @ w.mT).square().sum()
    rate = subspace_coding_rate(Z, U, 0.5)
    functions = {"first term": first, "second term": second, "neumann": first + second,
                 "exact": rate}
    found = {name: direction(Z, U, 0.5).detach()
             for name, direction in (analyze.UPDATES | analyze.TERMS).items()}
    for name, function in functions.items():
        gradient, = torch.autograd.grad(function, Z, retain_graph=True)
        assert torch.allclose(found[name], -gradient / beta, atol=1e-10), name
    assert torch.allclose(found["mssa"], beta * mssa(Z, U))
    assert torch.equal(found["negative"], -found["mssa"])
    assert torch.allclose(Z + 0.1 * found["shrunk"], 0.9 * Z + 0.1 * beta * mssa(Z, U))  # (34)
    assert first + second <= rate                                   # [S]'s lower bound
    assert analyze.taylor_terms(Z, U, 0.5) == pytest.approx((first.item(), -second.item()))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("norm", [0.3, 1.0, 5.0])
def test_mssa_raises_what_the_gradient_lowers(seed, norm):
    Z, U = toy_start(seed, norm)
    panel = analyze.toy_run(Z, U, toy_flags(step=0.1))
    rates = panel["rates"]
    slope = {row["direction"]: row["slope"] for row in panel["directions"]}
    assert all(a < b for a, b in zip(rates["mssa"], rates["mssa"][1:]))         # [S]'s answer
    # shrunk: large tokens attend to themselves, and beta is 1.2 here
    for name in ("exact", "negative", *["shrunk"] * (norm < 5)):
        assert all(a > b for a, b in zip(rates[name], rates[name][1:]))
    # of the two terms MSSA keeps the one that raises R^c
    assert slope["first term"] < 0 < slope["second term"] and slope["mssa"] > 0
    gradient = subspace_coding_rate_grad(Z, U, 0.5)
    assert slope["exact"] == pytest.approx(-gradient.square().sum().item() / panel["beta"])


def test_a_small_step_changes_the_rate_by_its_slope():
    for row in analyze.toy_run(*toy_start(2, 1.0), toy_flags(step=1e-4))["directions"]:
        assert row["change"] == pytest.approx(1e-4 * row["slope"], rel=1e-3), row["direction"]


def test_toy(call, tmp_path):
    small, large = call("toy", "--width=24", "--heads=4", "--head_dim=6", "--tokens=20",
                        "--iterations=12", f"--json={tmp_path / 'toy.json'}")["panels"]
    assert small["validity"] == pytest.approx(0.5) and large["validity"] == pytest.approx(2)
    assert small["rates"]["neumann"] == pytest.approx(small["rates"]["exact"], rel=0.5)
    beyond = large["rates"]["neumann"]
    assert beyond[3] > beyond[0] and math.isnan(beyond[-1])
    saved = json.loads((tmp_path / "toy.json").read_text())
    assert saved["panels"][1]["rates"]["neumann"][-1] is None       # JSON has no NaN


# denoise

@pytest.mark.parametrize("sigma", [0.1, 0.7])
def test_posterior_mean(sigma):
    U = torch.linalg.qr(torch.randn(3, 8, 2).double())[0]           # not orthogonal to each other
    z = analyze.mixture(U, 40, torch.Generator().manual_seed(0))
    z = z + sigma * torch.randn(40, 8).double()
    covariance = U @ U.mT + sigma ** 2 * torch.eye(8).double()
    parts = torch.distributions.MultivariateNormal(torch.zeros(3, 8).double(), covariance)
    z.requires_grad_()
    score, = torch.autograd.grad(parts.log_prob(z[:, None]).logsumexp(1).sum(), z)
    found = analyze.posterior_mean(z, U, sigma)
    assert torch.allclose((found - z) / sigma ** 2, score, atol=1e-8)       # [J] Eq. (46)


def test_reverse_diffusion():
    generator = torch.Generator().manual_seed(0)
    U = analyze.random_subspaces(analyze.Denoise(width=12, heads=3, head_dim=2), generator)
    clean = analyze.mixture(U, 2000, generator)
    z = clean + 0.5 * torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
    sde = analyze.reverse_diffusion(z, U, 0.5, 60, generator)
    posterior = analyze.posterior_mean(z, U, 0.5)
    # clean tokens and samples are two draws of one posterior
    error, least = ((back - clean).square().sum(1).mean().item() for back in (sde, posterior))
    assert error == pytest.approx(2 * least, rel=0.08)
    for back in (sde, analyze.reverse_diffusion(z, U, 0.5, 60)):    # distributed as clean tokens
        square = back.square().sum(1).mean().item()
        projected = (back[:, None, None] @ U).square().sum((-2, -1)).amax(1).mean().item()
        assert projected == pytest.approx(square, rel=1e-3) and square == pytest.approx(2, rel=0.08)


def test_denoise(call):
    found = call("denoise", "--width=12", "--heads=3", "--head_dim=2", "--tokens=600",
                 "--sigmas=0.01,0.3", "--steps=20")
    rows = {(row["sigma"], row["method"]): row for row in found["levels"]}
    for sigma in (0.01, 0.3):
        error = {method: row["error"] for (level, method), row in rows.items() if level == sigma}
        assert error["noisy"] == pytest.approx(12 * sigma ** 2, rel=0.1)
        assert error["posterior"] <= min(error.values()) * 1.001
        assert rows[sigma, "sde"]["off"] < 1e-6 > rows[sigma, "flow"]["off"]
    # a projection: the noise within the subspace is left
    assert rows[0.01, "closed"]["error"] == pytest.approx(2 * 0.01 ** 2, rel=0.15)
    oblique, orthogonal, axes = found["sets"]                       # [J] Figure 5
    assert oblique["gain"] < orthogonal["gain"] == pytest.approx(axes["gain"])
    assert oblique["nonzeros"] == orthogonal["nonzeros"] == 1
    assert axes["nonzeros"] == pytest.approx(2 / 12)


# curves, figures, mistakes

def write_run(folder, *lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 6, "spl')
    return folder


def test_text_properties():
    found = analyze.text_properties(list('He 42, "said x"'))
    assert found.keys() == {"digit", "capital", "quoted", "first letter", "second letter",
                            "fifth letter or later", "space", "punctuation"}
    for name, marks in {"digit":         "...11..........", "capital":       "1..............",
                        "quoted":        ".......1111111.", "first letter":  "1.......1....1.",
                        "second letter": ".1.......1.....", "space":         "..1...1.....1..",
                        "punctuation":   ".....1.1......1"}.items():
        assert found[name].tolist() == [mark == "1" for mark in marks], name
    assert analyze.text_properties(list("quietly"))["fifth letter or later"].sum() == 3
    pieces = analyze.text_properties([" the", " dog", "ged"])           # GPT-2's
    assert pieces["first letter"].tolist() == [True, True, False]


def coded(values, kinds, group=None, **properties):
    return analyze.Codes(values, 0.5, properties, kinds,
                         np.arange(len(values)) if group is None else group)


def test_sparse_probes_and_purity_find_what_was_put_there():
    """Neuron 3 tells the property, the rest are noise; neuron i is highest on tokens of kind i."""
    generator = torch.Generator().manual_seed(0)
    codes, each = torch.rand(400, 30, generator=generator), np.arange(400)
    has = each % 4 == 0
    codes[:, 3] += 2 * torch.from_numpy(has)
    assert analyze.sparse_probe(codes, has, each, 1, 0) == 1
    assert analyze.sparse_probe(codes, each < 19, each, 1, 0) is None           # too rare to tell

    noise = torch.rand(80, 20_000, generator=generator)     # one of so many fits any 40 rows
    few = np.arange(80)
    chance = [analyze.sparse_probe(noise, few % 2 == 0, few, 1, seed) for seed in range(8)]
    assert 0.4 < np.mean(chance) < 0.6
    # what is alike within a window only is no knowledge: windows are not divided
    windows = torch.rand(80, 400, generator=generator).repeat_interleave(5, 0)
    has = np.random.default_rng(0).random(80).repeat(5) < 0.5
    divided, whole = ([analyze.sparse_probe(windows, has, group, 20, seed) for seed in range(8)]
                      for group in (each, each // 5))
    assert np.mean(whole) < 0.6 < 0.7 < np.mean(divided)

    kinds = each % 10
    pure = coded(torch.eye(10)[kinds], kinds, has=has)
    assert analyze.neuron_numbers(pure, 10, 0)["purity"] == 1
    mixed = analyze.neuron_numbers(coded(noise[:, :10].repeat(5, 1), kinds, has=has), 4, 0)
    assert mixed["purity"] < 0.4 and mixed["neurons"] == 10
    dead = analyze.neuron_numbers(coded(torch.zeros(400, 10), kinds, rare=each < 3), 10, 0)
    assert dead["purity"] is None and dead["k=1"] is None


def test_neurons_of_text(save, call, text_cache):
    """Codes and tokens belong together: a model whose ISTA passes on the token itself is read."""
    data = text.load("verse", text_cache)
    torch.manual_seed(0)
    paths = []
    for arch in ("crate", "crate-alpha"):
        model = LanguageModel(TextConfig(arch=arch, width=16, heads=2, layers=1, context=11,
                                         vocab_size=8))
        torch.nn.init.orthogonal_(model.embed.weight)
        torch.nn.init.zeros_(model.positions)
        meta = dict(name="verse", tokenizer=data.tokenizer.meta(), n_vocab=data.tokenizer.n_vocab)
        paths.append(save(model.eval(), "gpt", name=f"{arch}.pt", meta=meta))
        flags = analyze.Neurons(ckpt=paths[-1], data_dir=str(text_cache), device="cpu", samples=9)
        codes = analyze.last_codes(analyze.load_model(paths[-1]), flags)
        windows = data.val[:len(data.val) // 11 * 11].reshape(-1, 11)
        windows = windows[analyze.spread(len(windows), 9).numpy()]
        assert np.array_equal(codes.kinds, windows.ravel())
        assert np.array_equal(codes.group, np.arange(9).repeat(11))
        with torch.no_grad():
            trace = model.trace(torch.from_numpy(windows.astype(np.int64)))
            layer = model.layers[0]
            wanted = layer.norm2(trace[0].half)
            wanted = (layer.sparsification(wanted) if arch == "crate" else
                      layer.sparsification.code(wanted))
        torch.testing.assert_close(codes.values, wanted.flatten(0, 1))
    rows = call("neurons", f"--ckpt={','.join(paths)}", f"--data_dir={text_cache}",
                "--random")["rows"]
    assert {row["code"] for row in rows} >= {"crate, untrained", "crate-alpha, untrained"}


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_neurons_of_images(pool, save, call, cache):
    """Row by row: CRATE's code is Z^{l+1} of what the head reads, a transformer's is GELU(up)."""
    torch.manual_seed(0)
    paths = [save(ImageClassifier(ImageConfig(arch=arch, pool=pool, **TINY)), name=f"{arch}.pt")
             for arch in ("crate", "transformer")]
    rows = call("neurons", f"--ckpt={','.join(paths)}", "--untrained", "--samples=100")["rows"]
    assert [row["code"] for row in rows] == [
        "crate", "crate, untrained", "transformer", "transformer, kept", "transformer, untrained",
        "transformer, untrained, kept"]
    nonzeros = {row["code"]: row["nonzeros"] for row in rows}
    assert nonzeros["transformer, kept"] == pytest.approx(nonzeros["crate"], abs=0.02)

    for path, code in zip(paths, (
            lambda layer, half: layer.sparsification(layer.norm2(half)),
            lambda layer, half: F.gelu(layer.sparsification.up(layer.norm2(half))))):
        loaded = analyze.load_model(path)
        flags = analyze.Neurons(ckpt=path, samples=30, data_dir=str(cache), device="cpu")
        codes = analyze.last_codes(loaded, flags)
        index = analyze.spread(100, 30).numpy()
        data = images.load("shapes", cache)
        assert np.array_equal(codes.kinds, data.val_labels[index])
        red = data.val_images[index].reshape(30, -1, 3).mean(1).argmax(1) == 0
        assert np.array_equal(codes.properties["red"], red)
        with torch.no_grad():
            trace = loaded.encoder.trace(validation(cache, index))
            wanted = code(loaded.encoder.layers[-1], trace[-1].half)
        assert codes.nonzeros == pytest.approx((wanted != 0).float().mean().item(), abs=1e-3)
        wanted = wanted[:, 0] if pool == "class" else wanted[:, 1:].mean(1)
        torch.testing.assert_close(codes.values, wanted, rtol=1e-4, atol=1e-5)


def test_recall_sequences():
    c = analyze.Recall(pairs=3, symbols=5)
    ids, targets = analyze.recall_sequences(c, 50, 7)
    assert ids.shape == targets.shape == (50, 11)
    for row, target in zip(ids.tolist(), targets.tolist()):
        shown = dict(zip(row[0:6:2], row[1:6:2]))
        assert len(shown) == 3 and max(shown) < 5 <= min(shown.values()) and max(row) < 10
        assert sorted(row[6::2]) == sorted(shown)
        assert [shown[key] for key in row[6::2]] == target[6::2]
        assert row[7::2] == target[6:-1:2]                  # the answer follows the question
        assert all(target[i] == -1 for i in [*range(6), 7, 9])
    assert not torch.equal(ids, analyze.recall_sequences(c, 50, 8)[0])
    assert torch.equal(ids, analyze.recall_sequences(c, 50, 7)[0])


def test_ties():
    """Tied rows are the key's, in the layer's output and in its parameters' gradients."""
    c = analyze.Recall(tie="qk", width=8, heads=2)
    for tie, pair in (("qk", (0, 1)), ("kv", (1, 2))):
        c.tie = tie
        attention = analyze.recall_model(c, "aot-mhsa").layers[0].attention
        q, k, v = (w.mT.flatten(-2) for w in attention.project(torch.randn(1, 3, 8)))
        same = [torch.equal(a, b) for a, b in ((q, k), (k, v))]
        assert same == [pair == (0, 1), pair == (1, 2)]


def test_recall(call):
    """One pair is recalled by any arch that can copy; two seeds have a mean and its error."""
    flags = "--archs=aot-mhsa", "--layers=1", "--width=16", "--heads=2", "--pairs=1", "--symbols=4"
    row, = call("recall", *flags, "--seeds=2", "--steps=400", "--lr=1e-2")["archs"]
    assert row["learnt"] == "2/2" and row["accuracy"] >= 0.95 and row["steps"] <= 400
    row, = call("recall", *flags, "--seeds=1", "--steps=1")["archs"]
    assert row["learnt"] == "0/1" and row["steps"] is None and row["accuracy"] < 0.7


def test_averages():
    found = analyze.averages([dict(x=1.0, y=None), dict(x=2.0, y=4), dict(x=6.0, y=None)])
    assert found == pytest.approx(dict(x=3.0, x_error=(7 / 3) ** 0.5, y=4.0))
    assert analyze.averages([dict(x=None)]) == dict(x=None)


def test_curves(call, tmp_path, capsys):
    a = write_run(tmp_path / "a", dict(step=2, split="train", loss=3.0, lr=1.0),
                  dict(step=2, split="val", loss=2.0, acc=0.5),
                  dict(step=4, split="train", loss=None),
                  dict(step=4, split="val", loss=2.5, acc=0.25), dict(event="done", step=4, loss=9))
    b = write_run(tmp_path / "b", dict(step=3, split="val", loss=1.0, acc=0.1))
    first, second = call("curves", f"--runs={a}, {b / 'metrics.jsonl'}")["runs"]
    assert first["train"] == [[2, 3.0]] and first["val"] == [[2, 2.0], [4, 2.5]]
    assert second["train"] == []
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["4", "3", "2.5", "2", "2"]
    call("curves", f"--runs={a}", "--value=acc")                    # the best is the largest
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["4", "-", "0.25", "0.5", "2"]
    with pytest.raises(UserError, match="has no los; it has acc, loss, lr"):
        call("curves", f"--runs={a}", "--value=los")


def test_figures(save, call, tmp_path, monkeypatch):
    path = save(ImageClassifier(ImageConfig(arch="crate-alpha", **TINY)))
    run = write_run(tmp_path / "run", dict(step=2, split="val", loss=2.0))
    commands = {"layers": [f"--ckpt={path}", "--samples=2", "--convention=caption", "--eps=0.3"],
                "toy": ["--iterations=2"], "denoise": ["--tokens=20", "--steps=2"],
                "curves": [f"--runs={run}"]}
    seen = {}
    monkeypatch.setattr(plot, "write", lambda path, *panels: seen.update({path: panels}))
    for command, argv in commands.items():
        call(command, *argv)
        assert len(seen[str(tmp_path / command) + ".png"]) == dict(
            layers=4, toy=3, denoise=3, curves=1)[command]             # no training loss: no panel
    panels = seen[str(tmp_path / "layers.png")]
    assert "Z^(l+1/2)" in panels[0][1]["title"] and "0.3" in panels[0][1]["title"]
    assert len(panels[2][0]) == 2                                   # ODL's code beside Z
    assert [name for name, *_ in seen[str(tmp_path / "curves.png")][0][0]] == ["run"]


def test_mistakes_are_one_line(save, call, tmp_path):
    path = save(ImageClassifier(ImageConfig(**TINY)))
    bare = save(ImageClassifier(ImageConfig(arch="aot", **TINY)), name="aot.pt")
    (tmp_path / "none").mkdir()
    for argv, says in (
            (["layers"], "--ckpt is needed"),
            (["layers", f"--ckpt={path}", "--data=shape"], "did you mean 'shapes'"),
            (["saliency", f"--ckpt={path}", "--head=3"], "--head=3: .* has 2"),
            (["saliency", f"--ckpt={path}", "--layer=4"], "has 3"),
            (["tokens", f"--ckpt={path}", "--index=100"], "shapes has 100 val images"),
            (["denoise", "--sigmas=0"], "numbers above 0"),
            (["toy", "--width=8"], "do not fit into --width=8"),
            (["recall", "--pairs=9"], "--pairs=9 different keys"),
            (["recall", "--archs=transformer,crat"], "did you mean crate"),
            (["recall", "--archs=aot", "--tie=qk"], "aot has one matrix"),
            (["neurons", f"--ckpt={bare}"], "arch aot has no sparsification"),
            (["curves"], "--runs is needed"),
            (["curves", f"--runs={tmp_path / 'none'}"], "cannot read .*metrics.jsonl"),
            (["curves", f"--runs={path}"], "not text")):
        with pytest.raises((UserError, ConfigError), match=says) as error:
            call(*argv)
        assert "\n" not in str(error.value)


def test_no_file_is_replaced_unasked(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "val", "loss": 2.0}\n' * 2)
    table, figure = tmp_path / "table.json", tmp_path / "figure.png"
    argv = ["curves", f"--runs={tmp_path}", f"--json={table}", f"--out={tmp_path / 'figure'}"]
    for mine in (table, figure):
        mine.write_text("mine")
        with pytest.raises(UserError, match=f"{mine.name} is there already; --overwrite"):
            analyze.main(argv)
        assert mine.read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
        mine.unlink()
    analyze.main(argv)
    figure.write_text("mine")
    analyze.main([*argv, "--overwrite"])
    assert json.loads(table.read_text())["runs"] and figure.read_bytes()[1:4] == b"PNG"
