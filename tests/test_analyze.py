"""What analyze.py reports, against the definitions."""
import json
import math
import sys
from dataclasses import asdict
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

import analyze
import common
from data import augment, images, text
from model import (ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig, MaskedAutoencoder, TextConfig, coding_rate, mssa,
                   subspace_coding_rate, subspace_coding_rate_grad)

TINY = dict(width=16, heads=2, layers=3, image_size=32, patch_size=8, classes=10)


@pytest.fixture
def save(tmp_path, cache):
    """save(model, task, name): a checkpoint of an untrained model as the training scripts write it, with the meta of `shapes`; its path."""
    data = images.load("shapes", cache)

    def write(model, task="vit", name="best.pt", meta=None):
        state = model.state_dict() if task != "simdino" else {f"encoder.{k}": v for k, v in model.state_dict().items()} | {"head": torch.zeros(1)}
        meta = meta or dict(name="shapes", classes=data.classes, mean=data.mean, std=data.std, image_size=data.image_size)
        common.save_checkpoint(tmp_path / name, dict(task=task, model=state, model_config=asdict(model.config), data_meta=meta, run_config={}, step=1,
                                                     best=None, optimizer={}, extra={}))
        return str(tmp_path / name)
    return write


@pytest.fixture
def call(tmp_path, cache):
    """call(command, *flags): analyze.main on the CPU with small data; its numbers."""
    def run(command, *flags):
        own = [] if command in ("toy", "denoise", "curves") else ["--device=cpu", f"--data_dir={cache}"]
        return analyze.main([command, f"--out={tmp_path / command}", *own, *map(str, flags)])
    return run


def pictures(cache, index):
    """Those of the validation split, normalized."""
    data = images.load("shapes", cache)
    return augment.normalize(augment.to_float(torch.from_numpy(data.val_images[index])), data.mean, data.std)


def expected(layer, Z, half, out, convention, eps, lambd):
    """[N] Figure 3's numbers and [S]'s measure written out, in float64, for one layer: mean and deviation over the samples of each."""
    def rate_of(tokens, unit=False):
        with torch.no_grad():
            w = layer.attention.project(tokens)
        w = (w[2] if isinstance(w, tuple) else w).double()                                       # of a transformer the values
        w = w / w.norm(dim=-1, keepdim=True) if unit else w
        n, p = w.shape[-2:]
        return 0.5 * torch.logdet(torch.eye(n) + p / (n * eps ** 2) * w @ w.mT).sum(1)
    if convention == "released":
        with torch.no_grad():
            normed = layer.norm2(half) if not hasattr(layer, "compress") else layer.norm1(Z)      # a decoder compresses last
    of_subspaces = rate_of(normed, unit=True) if convention == "released" else rate_of(half if convention == "caption" else out)
    found = dict(rate_of_subspaces=of_subspaces, rate=coding_rate(out.double(), eps), nonzeros=(out != 0).double().mean((1, 2)))
    found["srr"] = lambd * found["nonzeros"] * out[0].numel() + rate_of(out) - found["rate"]      # [S]'s, whatever the convention
    return {k: v.mean().item() for k, v in found.items()} | {f"{k}_std": v.std(correction=0).item() for k, v in found.items()}


def check(row, want):
    for key, value in want.items():
        assert row[key] == pytest.approx(value, rel=2e-2, abs=2e-3) if key.endswith("_std") else row[key] == pytest.approx(value, rel=1e-4), key


# ---- layers ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost", "transformer", "aot"])
@pytest.mark.parametrize("convention", ["released", "caption", "output"])
def test_layers(save, call, cache, tmp_path, arch, convention):
    model = ImageClassifier(ImageConfig(arch=arch, **TINY)).eval()
    run, = call("layers", f"--ckpt={save(model)}", "--samples=12", "--batch_size=5", f"--convention={convention}", "--eps=0.3", "--lambd=0.2",
                f"--json={tmp_path / 'table.json'}")["runs"]
    x, trace = pictures(cache, np.linspace(0, 99, 12).round().astype(int)), []
    with torch.no_grad():
        Z = model.encoder.tokens(x)
        model.encoder(x, trace)
    assert [row["layer"] for row in run["layers"]] == [1, 2, 3]
    for row, layer, traced in zip(run["layers"], model.encoder.layers, trace):
        check(row, expected(layer, Z, traced.half, traced.out, convention, 0.3, 0.2))
        assert row["nonzeros"] < 1 if arch == "crate" else row["nonzeros"] == 1
        if arch == "crate" and convention == "output":
            assert row["rate_of_subspaces"] == pytest.approx(subspace_coding_rate(traced.out, layer.attention.bases(), 0.3).mean().item(), rel=1e-4)
        if arch == "crate-alpha":
            code = layer.sparsification.code(layer.norm2(traced.half))
            assert row["code_nonzeros"] == pytest.approx((code != 0).double().mean().item())
        Z = traced.out
    assert run["srr_measure"] == pytest.approx(sum(row["srr"] for row in run["layers"]) / 3)
    saved = json.loads((tmp_path / "table.json").read_text())
    assert saved["flags"]["eps"] == 0.3 and saved["runs"][0]["layers"][2]["srr"] == run["layers"][2]["srr"]


@pytest.mark.parametrize("arch,mask_tokens", [("crate", "before"), ("crate-alpha", "after")])
def test_layers_of_a_masked_autoencoder(save, call, cache, arch, mask_tokens):
    model = MaskedAutoencoder(MAEConfig(arch=arch, decoder_layers=2, mask_tokens=mask_tokens, **TINY)).eval()
    tables = [call("layers", f"--ckpt={save(model, 'mae')}", "--samples=9", f"--batch_size={b}", "--convention=caption", "--eps=0.3")["runs"][0]
              for b in (4, 9)]
    index = np.linspace(0, 99, 9).round().astype(int)
    noise = torch.stack([torch.rand(16, generator=torch.Generator().manual_seed(common.derive_seed("validation", int(i)))) for i in index])
    trace = []
    with torch.no_grad():
        model(pictures(cache, index), noise, trace)
    assert [row["part"] for row in tables[0]["layers"]] == 3 * ["encoder"] + 2 * ["decoder"]
    for row, other, layer, traced in zip(*(t["layers"] for t in tables), [*model.encoder.layers, *model.decoder], trace):
        check(row, expected(layer, None, traced.half, traced.out, "caption", 0.3, 0.1))
        assert row["srr"] == pytest.approx(other["srr"], rel=1e-5)                              # a mask belongs to its picture, not to the batch
    assert tables[0]["srr_measure"] == pytest.approx(sum(row["srr"] for row in tables[0]["layers"][:3]) / 3)


def test_the_softmax_of_a_decoder_sees_what_is_measured(save, call, cache):
    model = MaskedAutoencoder(MAEConfig(**TINY)).eval()
    table = call("layers", f"--ckpt={save(model, 'mae')}", "--samples=1", "--eps=0.3")["runs"][0]["layers"]
    noise = torch.rand(1, 16, generator=torch.Generator().manual_seed(common.derive_seed("validation", 0)))
    trace = []
    with torch.no_grad():
        model(pictures(cache, [0]), noise, trace)
        Y = trace[3].half                                                                       # of the decoder's first layer
        assert torch.allclose(trace[3].out, Y - model.decoder[0].attention(model.decoder[0].norm2(Y)), atol=1e-6)
    check(table[3], expected(model.decoder[0], None, Y, trace[3].out, "released", 0.3, 0.1))


def test_layers_of_text(save, call, tmp_path, cache):
    (tmp_path / "rhyme.txt").write_text("".join(chr(97 + i * i % 7) for i in range(6000)))
    text.prepare("rhyme", source=tmp_path / "rhyme.txt", cache=tmp_path / "texts", tokenizer=text.CharTokenizer("abcdefg"), workers=1, verbose=False)
    data = text.load("rhyme", tmp_path / "texts")
    model = LanguageModel(TextConfig(width=16, heads=2, layers=2, context=12, vocab_size=8)).eval()
    path = save(model, "gpt", meta=dict(name="rhyme", tokenizer=data.tokenizer.meta(), n_vocab=data.tokenizer.n_vocab))
    for split in ("train", "val"):
        run, = call("layers", f"--ckpt={path}", f"--data_dir={tmp_path / 'texts'}", f"--split={split}", "--samples=7", "--eps=0.3",
                    "--batch_size=3")["runs"]
        tokens = getattr(data, split)
        starts = np.linspace(0, len(tokens) // 12 - 1, 7).round().astype(int) * 12
        ids, trace = torch.from_numpy(np.stack([tokens[s:s + 12] for s in starts]).astype(np.int64)), []
        with torch.no_grad():
            Z = model.tokens(ids)
            model(ids, trace=trace)
        for row, layer, traced in zip(run["layers"], model.layers, trace, strict=True):
            check(row, expected(layer, Z, traced.half, traced.out, "released", 0.3, 0.1))
            Z = traced.out
    assert len(call("subspaces", f"--ckpt={path}")["layers"]) == 2
    with pytest.raises(common.UserError, match="language model"):
        call("tokens", f"--ckpt={path}")


def test_layers_side_by_side(save, call):
    crate, encoder = ImageClassifier(ImageConfig(**TINY)), ImageEncoder(ImageConfig(arch="tost", **TINY | dict(layers=2)))
    paths = [save(crate, name="a.pt"), save(encoder, "simdino", name="b.pt")]
    runs = call("layers", f"--ckpt={','.join(paths)}", "--samples=4", "--split=both", "--untrained", "--seed=5")["runs"]
    cases = [(path, untrained, split) for path in paths for untrained in (False, True) for split in ("train", "val")]
    assert [(run["ckpt"], run["untrained"], run["split"]) for run in runs] == cases
    assert [len(run["layers"]) for run in runs] == 4 * [3] + 4 * [2]
    measures = [run["srr_measure"] for run in runs]
    assert len(set(measures)) == 8
    only = call("layers", f"--ckpt={paths[0]}", "--samples=4", "--random", "--seed=5")["runs"]
    assert [(run["untrained"], run["srr_measure"]) for run in only] == [(True, measures[3])]


# ---- subspaces, tokens, saliency -------------------------------------------------------------------------------------

def test_coherence():
    U = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))[0].view(12, 3, 4).transpose(0, 1)
    gram, found = analyze.coherence(5 * U)
    assert torch.allclose(gram, torch.eye(12, dtype=torch.float64), atol=1e-12) and all(v < 1e-12 for v in found.values())
    U = torch.randn(3, 7, 2)
    columns = [U[k, :, j] / U[k, :, j].norm() for k in range(3) for j in range(2)]
    same, other = [], []
    for i in range(6):
        for j in range(6):
            if i != j:
                (same if i // 2 == j // 2 else other).append(abs(float(columns[i] @ columns[j])))
    gram, found = analyze.coherence(U)
    assert gram[1, 4].item() == pytest.approx(abs(float(columns[1] @ columns[4])), rel=1e-5)
    want = dict(within_mean=np.mean(same), within_max=max(same), across_mean=np.mean(other), across_max=max(other))
    assert found == pytest.approx(want, rel=1e-5)
    assert analyze.coherence(U[:1])[1]["across_mean"] is None and analyze.coherence(U[:, :, :1])[1]["within_max"] is None


def test_bases_are_what_projects():
    for arch in ("crate", "tost", "transformer"):
        layer = ImageEncoder(ImageConfig(arch=arch, **TINY)).layers[0]
        Z = torch.randn(2, 5, 16)
        w = analyze.projections(layer.attention, Z) - analyze.projections(layer.attention, torch.zeros_like(Z))        # less the bias
        assert torch.allclose(w, Z[:, None] @ analyze.bases(layer.attention), atol=1e-5)


def test_subspaces(save, call, tmp_path):
    model = ImageClassifier(ImageConfig(**TINY))
    with torch.no_grad():
        model.encoder.layers[1].attention.U.weight.copy_(3 * torch.eye(16))
    result = call("subspaces", f"--ckpt={save(model)}")
    assert result["layers"][1] == dict(layer=2, within_mean=0, within_max=0, across_mean=0, across_max=0)
    assert result["layers"][0]["across_mean"] > 0
    draws = torch.nn.functional.normalize(torch.randn(20_000, 16), dim=1)[:, 0].abs().mean().item()
    assert result["random"] == pytest.approx(draws, rel=2e-2)
    sheet = np.asarray(Image.open(tmp_path / "subspaces.png"))                                   # 16 pixels an entry, 8 between, 14 above
    second = sheet[14:, 264:520][8::16, 8::16]
    assert (second == 255 * (1 - np.eye(16))).all()


def test_tokens(save, call, cache, tmp_path):
    model = ImageClassifier(ImageConfig(**TINY)).eval()
    rows, trace = call("tokens", f"--ckpt={save(model)}", "--index=7")["layers"], []
    with torch.no_grad():
        model.encoder(pictures(cache, [7]), trace)
    for row, traced in zip(rows, trace, strict=True):
        assert row["nonzeros"] == pytest.approx((traced.out != 0).double().mean().item())
        share = np.linalg.svd(traced.out[0].double().numpy(), compute_uv=False) ** 2
        share = share / share.sum()
        assert row["effective_rank"] == pytest.approx(math.exp(-(share * np.log(share + 1e-30)).sum()), rel=1e-3)
    sheet = np.asarray(Image.open(tmp_path / "tokens.png"))
    first = sheet[14:, :16 * 24][12::24, 12::24]
    assert ((first == 255) == (trace[0].out[0].numpy() < trace[0].out[0].quantile(0.99).item() / 510)).all()       # white: zero, to a grey level


@pytest.mark.parametrize("arch", ["crate", "tost", "transformer"])
def test_saliency(arch, cache):
    encoder, x, trace = ImageEncoder(ImageConfig(arch=arch, **TINY)).eval(), pictures(cache, [3, 4, 5]), []
    with torch.no_grad():
        encoder(x, trace)
    for layer in (0, 1, -1):
        map = trace[layer].attention
        want = map[:, :, 1:] if arch == "tost" else map[:, :, 0, 1:]
        got = analyze.saliency_of(encoder, x, layer)
        assert got.shape == (3, 2, 16) and torch.allclose(got, want, atol=1e-6)


def test_saliency_command(save, call, cache, tmp_path):
    model = ImageClassifier(ImageConfig(**TINY)).eval()
    path = save(model)
    heads = call("saliency", f"--ckpt={path}", "--pictures=5", "--index=2", "--layer=2")["heads"]
    maps = analyze.saliency_of(model.encoder, pictures(cache, [2, 3, 4, 5, 6]), 1)
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    share = maps / maps.sum(-1, keepdim=True)
    assert [row["head"] for row in heads] == ["mean", 1, 2]
    for row, one in zip(heads, share.transpose(0, 1)):
        assert row["patches"] == pytest.approx((-(one * one.log()).sum(-1)).exp().mean().item(), rel=1e-5)
        assert row["largest"] == pytest.approx(one.max(-1).values.mean().item(), rel=1e-5)
    assert Image.open(tmp_path / "saliency.png").size == (4 * 4 * 32, 5 * 4 * 32)                # picture, mean, two heads, fourfold
    whole = np.asarray(Image.open(tmp_path / "saliency.png"))
    one = call("saliency", f"--ckpt={path}", "--pictures=5", "--index=2", "--layer=2", "--head=2")["heads"]
    assert one == heads[2:]
    assert (np.asarray(Image.open(tmp_path / "saliency.png")) == np.concatenate([whole[:, :128], whole[:, 384:]], 1)).all()
    pi = call("saliency", f"--ckpt={save(ImageClassifier(ImageConfig(arch='tost', **TINY)))}")["heads"]
    assert all(1 <= row["patches"] <= 16 for row in pi)


# ---- toy -------------------------------------------------------------------------------------------------------------

def toy_flags(**changes):
    return analyze.Toy(width=24, heads=4, head_dim=6, tokens=20, iterations=12, **changes)


def toy_start(seed, norm):
    generator, c = torch.Generator().manual_seed(seed), toy_flags()
    return norm * torch.randn(c.tokens, c.width, generator=generator, dtype=torch.float64) / c.width ** 0.5, analyze.random_subspaces(c, generator)


def test_random_subspaces_are_orthonormal():
    _, U = toy_start(0, 1)
    assert torch.allclose(torch.einsum("kdp,jdq->kpjq", U, U).reshape(24, 24), torch.eye(24, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("norm", [0.5, 2.0])
def test_directions_are_the_gradients_they_claim(norm):
    Z, U = toy_start(1, norm)
    n, p, eps = 20, 6, 0.5
    beta = p / (n * eps ** 2)
    Z.requires_grad_()
    w = Z @ U
    first, second = beta / 2 * w.square().sum(), -beta ** 2 / 4 * (w @ w.mT).square().sum()
    gradients = [torch.autograd.grad(f, Z, retain_graph=True)[0] for f in (first, second, first + second, subspace_coding_rate(Z, U, eps))]
    with torch.no_grad():
        found = {name: analyze.toy_direction(name, Z, U, eps) for name in analyze.UPDATES + analyze.TERMS}
        for name, gradient in zip(("first term", "second term", "neumann", "exact"), gradients):
            assert torch.allclose(found[name], -gradient / beta, atol=1e-10), name
        assert torch.allclose(found["mssa"], beta * mssa(Z, U)) and torch.equal(found["negative"], -found["mssa"])
        assert torch.allclose(Z + 0.1 * found["shrunk"], 0.9 * Z + 0.1 * beta * mssa(Z, U))      # [J] Eq. (34)
        assert first + second <= subspace_coding_rate(Z, U, eps)                                 # [S]'s lower bound


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("norm", [0.3, 1.0, 5.0])
def test_mssa_raises_what_the_gradient_lowers(seed, norm):
    Z, U = toy_start(seed, norm)
    panel = analyze.toy_run(Z, U, toy_flags(step=0.1))
    rates, slope = panel["rates"], {row["direction"]: row["slope"] for row in panel["directions"]}
    assert all(a < b for a, b in zip(rates["mssa"], rates["mssa"][1:]))                          # [S]'s answer
    for name in ("exact", "negative", *["shrunk"] * (norm < 5)):         # large tokens attend to themselves, and here beta is 1.2
        assert all(a > b for a, b in zip(rates[name], rates[name][1:]))
    assert slope["first term"] < 0 < slope["second term"] and slope["mssa"] > 0                  # of the two terms MSSA keeps the one that raises it
    gradient = subspace_coding_rate_grad(Z, U, 0.5)
    assert slope["exact"] == pytest.approx(-gradient.square().sum().item() / panel["beta"])
    assert all(t1 - t2 <= rate for t1, t2, rate in zip(*panel["terms"].values(), rates["mssa"]))


def test_a_small_exact_step_changes_the_rate_by_its_slope():
    Z, U = toy_start(2, 1.0)
    for step in (1e-3, 1e-4):
        for row in analyze.toy_run(Z, U, toy_flags(step=step))["directions"]:
            assert row["change"] == pytest.approx(step * row["slope"], rel=10 * step), row["direction"]


def test_toy(call, tmp_path):
    flags = ("--width=24", "--heads=4", "--head_dim=6", "--tokens=20", "--iterations=12", f"--json={tmp_path / 'toy.json'}")
    small, large = call("toy", *flags)["panels"]
    assert small["validity"] == pytest.approx(0.5) and large["validity"] == pytest.approx(2)
    assert small["rates"]["neumann"] == pytest.approx(small["rates"]["exact"], rel=0.5)
    assert small["rates"]["neumann"][-1] < 0.3 * small["rates"]["neumann"][0]
    beyond = large["rates"]["neumann"]
    assert beyond[3] > beyond[0] and math.isnan(beyond[-1]) and large["rates"]["exact"][-1] < large["rates"]["exact"][0]
    assert json.loads((tmp_path / "toy.json").read_text())["panels"][1]["rates"]["neumann"][-1] is None


# ---- denoise ---------------------------------------------------------------------------------------------------------

def mixture_of(U, sigma):
    """The noisy tokens' distribution by torch.distributions: U (K, d, p)."""
    K, d, p = U.shape
    covariance = U @ U.mT + sigma ** 2 * torch.eye(d, dtype=U.dtype)
    parts = torch.distributions.MultivariateNormal(torch.zeros(K, d, dtype=U.dtype), covariance)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(torch.ones(K)), parts), covariance


@pytest.mark.parametrize("sigma", [0.1, 0.7])
def test_posterior_mean_and_score(sigma):
    U = torch.linalg.qr(torch.randn(3, 8, 2, dtype=torch.float64))[0]                            # not orthogonal to each other
    z = analyze.mixture(U, 40, torch.Generator().manual_seed(0)) + sigma * torch.randn(40, 8, dtype=torch.float64)
    q, covariance = mixture_of(U, sigma)
    weight = q.component_distribution.log_prob(z[:, None]).softmax(1)
    means = torch.einsum("kde,kef,nf->nkd", U @ U.mT, torch.linalg.inv(covariance), z)           # Cov(clean, noisy) Cov(noisy)^-1 z
    assert torch.allclose(analyze.posterior_mean(z, U, sigma), (weight[..., None] * means).sum(1), atol=1e-10)
    z.requires_grad_()
    slope, = torch.autograd.grad(q.log_prob(z).sum(), z)
    assert torch.allclose(analyze.score(z, U, sigma), slope, atol=1e-8)


def test_reverse_diffusion():
    generator = torch.Generator().manual_seed(0)
    U = analyze.random_subspaces(analyze.Denoise(width=12, heads=3, head_dim=2), generator)
    clean = analyze.mixture(U, 2000, generator)
    z = clean + 0.5 * torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
    error = {name: (back - clean).square().sum(1).mean().item() for name, back in dict(
        posterior=analyze.posterior_mean(z, U, 0.5), sde=analyze.reverse_diffusion(z, U, 0.5, 60, generator)).items()}
    assert error["sde"] == pytest.approx(2 * error["posterior"], rel=0.08)                       # clean and sample: two draws of one posterior
    again = analyze.reverse_diffusion(z, U, 0.5, 60, generator)
    for back in (again, analyze.reverse_diffusion(z, U, 0.5, 60)):                              # what was clean, in distribution
        assert (back[:, None, None] @ U).square().sum((-2, -1)).amax(1).mean().item() == pytest.approx(back.square().sum(1).mean().item(), rel=1e-3)
        assert back.square().sum(1).mean().item() == pytest.approx(2, rel=0.08)


def test_denoise(call):
    found = call("denoise", "--width=12", "--heads=3", "--head_dim=2", "--tokens=600", "--sigmas=0.01,0.3", "--steps=20")
    rows = {(row["sigma"], row["method"]): row for row in found["levels"]}
    for sigma in (0.01, 0.3):
        assert rows[sigma, "noisy"]["error"] == pytest.approx(12 * sigma ** 2, rel=0.1)
        assert rows[sigma, "posterior"]["error"] <= min(rows[sigma, m]["error"] for m in ("noisy", "closed", "sde", "flow")) * 1.001
        assert rows[sigma, "sde"]["off"] < 1e-6 > rows[sigma, "flow"]["off"]
    assert rows[0.01, "closed"]["error"] == pytest.approx(2 * 0.01 ** 2, rel=0.15)               # a projection: the noise within is left
    oblique, orthogonal, axes = found["sets"]                                                    # [J] Figure 5
    assert oblique["gain"] < orthogonal["gain"] == pytest.approx(axes["gain"])
    assert oblique["nonzeros"] == orthogonal["nonzeros"] == 1 and axes["nonzeros"] == pytest.approx(2 / 12)


# ---- curves, figures, mistakes ---------------------------------------------------------------------------------------

def write_run(folder, *lines):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return folder


def test_curves(call, tmp_path, capsys):
    a = write_run(tmp_path / "a", dict(step=2, split="train", loss=3.0, lr=1.0), dict(step=2, split="val", loss=2.0, acc=0.5),
                  dict(step=4, split="train", loss=None), dict(step=4, split="val", loss=2.5, acc=0.25), dict(event="done", step=4, loss=9.0),
                  '{"step": 6, "spl')
    b = write_run(tmp_path / "b", dict(step=3, split="val", loss=1.0, acc=0.1))
    first, second = call("curves", f"--runs={a}, {b / 'metrics.jsonl'}")["runs"]
    assert first["train"] == [[2, 3.0]] and first["val"] == [[2, 2.0], [4, 2.5]] and second["train"] == []
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["4", "3", "2.5", "2", "2"]
    call("curves", f"--runs={a}", "--value=acc")
    assert capsys.readouterr().out.splitlines()[1].split()[1:] == ["4", "-", "0.25", "0.5", "2"]                       # the best is the largest
    with pytest.raises(common.UserError, match="has no los; it has acc, loss, lr"):
        call("curves", f"--runs={a}", "--value=los")


def test_figures(save, call, tmp_path, monkeypatch, capsys):
    path = save(ImageClassifier(ImageConfig(arch="crate-alpha", **TINY)))
    run = write_run(tmp_path / "run", dict(step=2, split="val", loss=2.0))
    commands = {"layers": [f"--ckpt={path}", "--samples=2"], "toy": ["--iterations=2"], "denoise": ["--tokens=20", "--steps=2"],
                "curves": [f"--runs={run}"]}
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for command, flags in commands.items():
        call(command, *flags)
        assert "pip install matplotlib" in capsys.readouterr().out
    sheet = MagicMock()
    sheet.subplots.side_effect = lambda rows, columns, squeeze: [[getattr(sheet, f"panel{i}") for i in range(columns)]]
    monkeypatch.setitem(sys.modules, "matplotlib", MagicMock())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", MagicMock(Figure=lambda **_: sheet))
    for command, flags in commands.items():
        sheet.reset_mock()
        call(command, *flags)
        assert [one.args[0] for one in sheet.savefig.call_args_list] == [str(tmp_path / command) + end for end in (".png", ".pdf")]
        drawn = sheet.panel1
        assert drawn.set.call_args.kwargs["xlabel"] and drawn.set.call_args.kwargs["ylabel"]
        assert drawn.plot.called or drawn.loglog.called
    sheet.reset_mock()
    call("layers", *commands["layers"], "--convention=caption", "--eps=0.3")
    name = sheet.panel0.set.call_args.kwargs["ylabel"]
    assert "Z^{l+1/2}" in name and "0.3" in name                                                 # the convention is on the axis
    assert len(sheet.panel2.plot.call_args_list) == 2 * len(sheet.panel1.plot.call_args_list)    # ODL's code beside Z


def test_mistakes_are_one_line(save, call, tmp_path):
    path = save(ImageClassifier(ImageConfig(**TINY)))
    (tmp_path / "none").mkdir()
    for argv, says in ((["layer"], "did you mean layers"), (["layers"], "--ckpt is needed"), (["layers", "--ckpt=none.pt"], "none.pt"),
                       (["saliency", f"--ckpt={path}", "--head=3"], "--head=3: .* has 2"), (["saliency", f"--ckpt={path}", "--layer=4"], "has 3"),
                       (["tokens", f"--ckpt={path}", "--index=100"], "shapes has 100 val pictures"),
                       (["denoise", "--sigmas=1,x"], "numbers above 0"), (["denoise", "--sigmas=0"], "numbers above 0"),
                       (["toy", "--width=8"], "do not fit into --width=8"), (["curves"], "--runs is needed"),
                       (["curves", f"--runs={tmp_path / 'none'}"], "cannot read .*metrics.jsonl"), (["curves", f"--runs={path}"], "not text"),
                       (["toy", "--iterations=1", f"--json={tmp_path / 'nowhere' / 'x'}"], "cannot write .*nowhere")):
        with pytest.raises(common.UserError, match=says) as error:
            call(*argv)
        assert "\n" not in str(error.value)
