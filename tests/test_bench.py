"""The benchmarks measure what they say: equal functions, true clocks and counts, equal parameters; every table runs."""
import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import bench
import common
from data import images, text
from data.images import draw_shapes
from model import ARCHS, ISTA, MSSA, ImageClassifier, ImageConfig, LanguageModel, MAEConfig, MaskedAutoencoder, TextConfig, linear_cross_entropy

CPU = torch.device("cpu")


@pytest.fixture
def run(monkeypatch):
    """run(*argv): the lines of a table, without measuring the machine's ceilings at length."""
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype: 1e11)
    monkeypatch.setattr(bench, "copy_peak", lambda device: 1e10)
    return lambda *argv: bench.main([*argv, "--device=cpu"])


# ---------------------------------------------------------------------------------------------------------------------
# The literal form
# ---------------------------------------------------------------------------------------------------------------------

def image_loss(model):
    x, y = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.arange(3)
    logits = model(x)
    return logits, F.cross_entropy(logits, y)


def text_loss(model):
    ids = torch.arange(20).view(2, 10) * 7 % 31
    targets = ids.roll(-1, 1).index_fill(1, torch.tensor([4]), -1)
    return model(ids), model(ids, targets)


@pytest.mark.parametrize("arch, causal", [("image", False), ("crate", False), *[
    (arch, True) for arch in ("crate", "crate-alpha", "crate-mm", "aot", "tost", "transformer")]])
def test_literal_is_the_same_function(arch, causal):
    shape = dict(width=16, heads=2, layers=2)
    if arch == "image":
        fast, loss_of = ImageClassifier(ImageConfig(**shape, image_size=16, patch_size=4, classes=5)), image_loss
    else:
        config = TextConfig(**shape, arch=arch, context=12, vocab_size=31, causal=causal)
        fast, loss_of = LanguageModel(config), text_loss
    fast = fast.double()
    with torch.no_grad():
        for p in fast.parameters():                                      # away from zero biases and tiny residuals
            p.add_(0.2 * torch.randn_like(p))
    literal = bench.literal(fast)
    assert not {type(m) for m in literal.modules()} & {MSSA, ISTA, LanguageModel}
    assert not {type(m) for m in fast.modules()} & set(bench.RELEASED.values())
    for model in (fast, literal):
        torch.manual_seed(1)
        model.logits, model.loss = loss_of(model)
        model.loss.backward()
    torch.testing.assert_close(literal.logits, fast.logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(literal.loss, fast.loss, rtol=0, atol=1e-10)
    for (name, a), b in zip(fast.named_parameters(), literal.parameters()):
        assert a is not b and a.grad is not None, name
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("block", [4096, 7, 5])
def test_head_in_blocks_is_the_head_at_once(block):
    y = torch.randint(13, (2, 10)).index_fill(1, torch.tensor([3]), -1)
    results = []
    for loss_of in (bench.cross_entropy_at_once, lambda *a: linear_cross_entropy(*a, block=block)):
        torch.manual_seed(2)
        Z, W = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 10, 6), (13, 6)))
        loss = loss_of(Z, W, y)
        loss.backward()
        results.append((loss, Z.grad, W.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Clocks and counts
# ---------------------------------------------------------------------------------------------------------------------

def test_alternate_takes_medians_in_turn(monkeypatch):
    now, calls = [0.0], []
    durations = {"a": [100.0, 1.0, 5.0, 3.0], "b": [50.0, 2.0, 2.0, 9.0]}           # the first of each is the warm-up
    left = {name: iter(seconds) for name, seconds in durations.items()}

    def variant(name):
        def function():
            calls.append(name)
            now[0] += next(left[name])
        return function
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    assert bench.alternate({name: variant(name) for name in durations}, CPU, 3) == {"a": 3.0, "b": 2.0}
    assert calls == ["a", "b"] * 4


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_exponent_of_the_longer_half(exponent):
    n = [1024, 2048, 4096, 8192, 16384]
    seconds = [5.0, 5.0] + [1e-6 * m ** exponent for m in n[2:]]         # short lengths: overhead, which must not count
    assert bench.fitted_exponent(n, seconds) == pytest.approx(exponent, abs=1e-9)
    assert bench.fitted_exponent(n[2:4], seconds[2:4]) == pytest.approx(exponent, abs=1e-9)
    assert bench.fitted_exponent(n[:1], seconds[:1]) is None
    noisy = [s * f for s, f in zip(seconds[2:], (1.05, 1.0, 0.95))]
    x, y = np.log(n[2:]), np.log(noisy)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    assert bench.fitted_exponent(n, seconds[:2] + noisy) == pytest.approx(slope, rel=1e-9)


def test_traffic_counts_what_is_read_and_written():
    a, b = torch.randn(100, 50), torch.randn(100, 50)
    with bench.Traffic() as count:
        c = a + b
        c.view(-1)[10:].view(10, -1).mT
        torch.empty(1000)
        c.mul_(2)                                                        # reads c, writes c
    assert (count.bytes, count.unfusable) == ((3 + 2) * 4 * 5000, 0)
    with bench.Traffic() as count:
        a @ b.mT
    assert count.bytes == count.unfusable == 4 * (5000 + 5000 + 100 * 100)
    p = torch.nn.Parameter(torch.randn(64, 64))
    optimizer = common.make_optimizer(torch.nn.ParameterDict({"p": p}), "adamw", 1e-3, 0.1, (0.9, 0.95))
    for _ in range(2):
        p.grad = torch.randn(64, 64)
        with bench.Traffic() as count:
            optimizer.step()
    # parameter and both averages are read and written, the gradient is read (its alias says written too); a counter
    assert 7 * 4 * 64 * 64 <= count.unfusable <= 8 * 4 * 64 * 64 + 100
    assert bench.held_memory(torch.nn.ParameterList([p]), optimizer) == 3 * 4 * 64 * 64 + 4


def test_peak_memory_sees_what_is_freed_again():
    def use(mb):
        return lambda: torch.ones(mb * 250_000).sum()
    if bench.peak_memory(use(1), CPU) is None:
        pytest.skip("resident memory cannot be asked here")
    use(200)()                                                           # what it frees must not hide the next call
    for mb in (100, 40):
        assert bench.peak_memory(use(mb), CPU) == pytest.approx(mb * 1e6, abs=8e6)


# ---------------------------------------------------------------------------------------------------------------------
# Equal parameters, long range
# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arch", ["tost", "transformer", "crate-alpha", "crate"])
@pytest.mark.parametrize("width", [64, 128, 200, 384])
def test_equal_parameters(arch, width):
    fields = dict(layers=3, context=8, vocab_size=16)
    crate, other = (LanguageModel(bench.equal_config(a, width, **fields)) for a in ("crate", arch))
    assert bench.non_embedding(crate) == crate.count() - 16 * width      # count() leaves the positions out
    assert bench.non_embedding(other) == pytest.approx(bench.non_embedding(crate), rel=0.03)
    assert len(other.layers) == 3 and not other.config.causal and (arch != "crate" or other.config.width == width)


def test_padding_does_not_count_in_the_mean():
    config = TextConfig(width=16, heads=2, layers=1, context=6, vocab_size=9, causal=False)
    model = bench.SequenceClassifier(config, 4, pad=0)
    ids = torch.tensor([[3, 1, 4, 0, 0, 0], [5, 2, 6, 5, 3, 5]])
    kept = {}
    model.backbone.norm.register_forward_hook(lambda module, args, out: kept.update(Z=out))
    logits = model(ids)
    means = torch.stack([kept["Z"][0, :3].mean(0), kept["Z"][1].mean(0)])
    torch.testing.assert_close(logits, model.head(means))
    model.pad = None
    torch.testing.assert_close(model(ids), model.head(kept["Z"].mean(1)))


@pytest.mark.parametrize("batch_size", [1, 4, 7, 10, 16])
def test_accuracy_counts_every_example_once(batch_size):
    x = torch.arange(10, dtype=torch.uint8)[:, None]
    y = torch.arange(10)
    y[[0, 7, 9]] += 1                                                    # where batches wrap round, and in the last one
    model = lambda ids: F.one_hot(ids[:, 0], 11).float()
    assert bench.accuracy(model, x, y, batch_size, common.Processes("cpu"), "auto") == 0.7


def test_pixels_are_cifar_in_grey(run, tmp_path):
    with images.preparing("cifar10", tmp_path) as folder:
        for split, seed, n in (("train", 0, 30), ("val", 1, 20)):
            pictures, labels, _ = draw_shapes(n, seed)
            np.save(folder / f"{split}_images.npy", pictures)
            np.save(folder / f"{split}_labels.npy", labels)
        images.write_meta(folder, "cifar10", "images", image_size=32, classes=list("abcdefghij"), mean=[0.5] * 3,
                          std=[0.25] * 3)
    c = bench.LongRange(data_dir=str(tmp_path), examples=25, held_out=20)
    data = bench.sequences(c)
    pictures, labels, _ = draw_shapes(20, 1)
    assert data.x.shape == (25, 1024) and (data.vocab_size, data.classes, data.pad) == (256, 10, None)
    assert np.array_equal(data.x_test.numpy(), text.grey_pixels(pictures))
    assert np.array_equal(data.y_test.numpy(), labels)
    lines = run("longrange", f"--data_dir={tmp_path}", "--width=16", "--layers=1", "--steps=3", "--batch_size=2",
                "--held_out=4")
    assert [line["length"] for line in lines] == [1024] * 3 and all(line["examples"] == 30 for line in lines)


def test_listops_are_not_all_padding_at_the_end():
    data = bench.sequences(bench.LongRange(task="listops", length=40, examples=50, held_out=30))
    assert len(data.x) == 50 and len(data.x_test) == 30 and data.x.shape[1] == data.x_test.shape[1] <= 40
    assert (torch.cat([data.x, data.x_test]) != 0).any(0).all()
    seen = [row.tolist() for row in data.x]
    assert not any(row.tolist() in seen for row in data.x_test if (row != 0).sum() > 12)        # drawn for themselves


def test_longrange_learns_what_can_be_learnt(run, monkeypatch):
    """Rigged: the class of a sequence is the word that occurs most often in it."""
    def rigged(c):
        y = torch.arange(160) % 4
        x = torch.randint(1, 9, (160, 16))
        x[:, ::2] = 1 + y[:, None]
        return bench.Sequences(x[:128].byte(), y[:128], x[128:].byte(), y[128:], 9, 4, 0)
    monkeypatch.setattr(bench, "sequences", rigged)
    flags = ("longrange", "--width=16", "--layers=1", "--steps=40", "--batch_size=32", "--lr=0.02")
    torch.manual_seed(3)
    lines = run(*flags)
    assert [line["variant"] for line in lines] == ["tost", "crate", "transformer"]
    assert all(line["accuracy"] > 0.9 for line in lines)
    torch.manual_seed(3)
    assert all(a[key] == b[key] for a, b in zip(lines, run(*flags)) for key in ("accuracy", "loss", "parameters"))
    torch.manual_seed(3)
    assert any(a["loss"] != b["loss"] for a, b in zip(lines, run(*flags, "--seed=1")))


# ---------------------------------------------------------------------------------------------------------------------
# Every table, end to end
# ---------------------------------------------------------------------------------------------------------------------

def check_rows(lines, unit):
    for line in lines:
        for key in ("ms", "ratio", "gflops_per_s", "of_matmul", "gb_per_s", "of_copy", f"{unit}_per_s"):
            assert line[key] > 0, key
        assert line["peak_mb"] is None or line["peak_mb"] >= 0
        assert line["ratio"] == 1 or "literal" not in line["variant"]
    assert any("literal" in line["variant"] for line in lines)


def test_vit(run, monkeypatch):
    config = ImageConfig(width=32, heads=4, layers=1, image_size=16, patch_size=4, classes=5)
    monkeypatch.setattr(bench, "PICTURES", [("small", config, 2)])
    lines = run("vit", "--repeats=1")
    check_rows(lines, "images")
    assert [line["variant"] for line in lines] == ["fast", "literal (released code)", "transformer, equal params",
                                                   "torch layer, equal width"]


def test_mae(run, monkeypatch):
    config = MAEConfig(width=32, heads=4, layers=1, image_size=16, patch_size=4)
    monkeypatch.setattr(bench, "AUTOENCODER", ("small", config, 2))
    lines = run("mae", "--repeats=1")
    check_rows(lines, "images")
    assert [line["variant"] for line in lines] == ["fast, before", "literal (released code)", "fast, after", "transformer, before", "transformer, after"]
    assert lines[0]["parameters"] == lines[1]["parameters"] == common.count(MaskedAutoencoder(config))
    model = MaskedAutoencoder(config).double()
    x, noise = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.rand(3, 16)
    torch.testing.assert_close(model(x, noise), bench.literal(model)(x, noise))


def test_simdino_shares_are_of_the_whole_step(run):
    whole, learning, views = run("simdino", "--repeats=3", "--width=16", "--layers=1", "--batch_size=8")
    assert whole["share"] == 1 and learning["share"] == learning["ms"] / whole["ms"] and 0 < views["share"] < 1
    assert whole["images_per_s"] == pytest.approx(8e3 / whole["ms"])


@pytest.mark.parametrize("command", ["ista", "attention"])
def test_operators(run, monkeypatch, command):
    monkeypatch.setattr(bench, "SHAPES", [("small", 2, 9, 16, 2), ("large", 2, 5, 32, 4)])
    lines = run(command, "--repeats=1")
    check_rows(lines, "tokens")
    assert [line["row"] for line in lines] == ["small"] * 2 + ["large"] * 2


def test_gpt(run):
    lines = run("gpt", "--repeats=1", "--width=64", "--layers=1", "--context=16", "--batch_size=2", "--vocab_size=40")
    check_rows(lines, "tokens")
    assert [line["variant"] for line in lines] == ["crate, fast", "crate, literal", "transformer"]
    for line, arch in zip(lines, ("crate", "crate", "transformer")):
        model = LanguageModel(TextConfig(arch=arch, width=64, heads=1, layers=1, context=16, vocab_size=40))
        assert line["parameters"] == model.count()
        assert line["tokens_per_s"] == pytest.approx(2 * 16 / line["ms"] * 1e3)
        assert line["peak_mb"] is None or line["peak_mb"] > 4 * 3 * line["parameters"] / 1e6    # weights, two averages


def test_head(run):
    lines = run("head", "--repeats=1", "--width=16", "--tokens=4096", "--vocab_size=4096")
    check_rows(lines, "tokens")
    peak = {line["variant"]: line["peak_mb"] for line in lines}
    if peak["literal"] is not None:
        assert peak["literal"] > 2 * 4 * 4096 ** 2 / 1e6                 # logits and their gradient
        assert peak["fast, blocks of 1024"] < 0.6 * peak["literal"]


def test_length(run):
    lines = run("length", "--lengths=64,32,64,128", "--repeats=1", "--width=16", "--heads=2")
    names = [name + suffix for suffix in ("", ", causal") for name in ("TSSA", "MSSA", "MHSA")]
    assert [line["variant"] for line in lines] == names
    for line in lines:
        assert line["lengths"] == [32, 64, 128] and len(line["ms"]) == 3 and min(line["ms"]) > 0
        assert math.isfinite(line["exponent"])


def test_generate(run):
    lines = run("generate", "--prefixes=8,24", "--repeats=1", "--width=128", "--layers=2", "--batch_size=3",
                "--vocab_size=20")
    assert [line["variant"] for line in lines] == list(ARCHS)
    for line in lines:
        arch = line["variant"]
        tensors = {"tost": 0, "aot-mhsa": 2, "transformer": 2}.get(arch, 1)         # a layer: MSSA half of MHSA
        assert line["bytes_per_token"] == tensors * 2 * 128 * 4
        # TSSA: norm and moment (K p) and mass (K) a layer
        assert line["bytes_constant"] == (2 * (2 * 128 + 2) * 4 if arch == "tost" else 0)
        assert ("cached_ms" in line) == (arch in bench.TIMED)
        for kind in ("cached_ms", "uncached_ms") if arch in bench.TIMED else ():
            assert len(line[kind]) == 2 and min(line[kind]) > 0


def test_longrange(run):
    lines = run("longrange", "--task=listops", "--width=16", "--layers=1", "--length=12", "--steps=3", "--batch_size=4",
                "--examples=20", "--held_out=10")
    for line in lines:
        assert line["accuracy"] in [i / 10 for i in range(11)] and (line["examples"], line["held_out"]) == (20, 10)
        assert min(line[key] for key in ("ms", "loss", "parameters", "width", "length")) > 0


def test_json(run, tmp_path):
    path = tmp_path / "table.json"
    path.write_text("what was here before")
    lines = run("length", "--lengths=16,32", "--repeats=1", "--width=16", "--heads=2", f"--json={path}")
    report = json.loads(path.read_text())
    assert report["rows"] == lines and report["command"] == "length"
    assert report["matmul_gflops_per_s"] == 100 and report["torch"] == torch.__version__


@pytest.mark.parametrize("argv, message", [
    ("length --lengths=1,x", "--lengths=1,x: expected whole numbers"),
    ("generate --prefixes=0,4", "--prefixes=0,4: expected whole numbers"),
    ("head --json=/nowhere/at/all", "--json=/nowhere/at/all: cannot write there"),
    ("gpt --arch=crate-c", "--arch=crate-c is not one of"),
    ("longrange --task=path", "--task=path is not one of"),
    ("longrange --repeats=3", "no flag --repeats"),
    ("lenght", "did you mean length")])
def test_mistakes(run, argv, message):
    with pytest.raises(common.UserError, match=message):
        run(*argv.split())
