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
# Around the model
# ---------------------------------------------------------------------------------------------------------------------

def test_draining_empties_what_was_read_ahead():
    calls = []
    bench.alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, 2, drain=True)
    assert calls == ["a", "a", "b", "b"] * 3


def test_training_step_takes_the_optimizer_step():
    model = LanguageModel(TextConfig(width=16, heads=2, layers=1, context=6, vocab_size=9)).double()
    ids = torch.arange(12).view(2, 6) % 9
    before = [p.detach().clone() for p in model.parameters()]
    bench.training_step(model, (ids, ids), common.Processes("cpu"), "auto")()
    assert all((a == b).all() and b.grad is None for a, b in zip(before, model.parameters()))
    loss = model(ids, ids)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    expected = [p.detach() - 0.5 * p.grad / norm for p in model.parameters()]
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    bench.training_step(model, (ids, ids), common.Processes("cpu"), "auto", optimizer, clip=0.5)()
    for p, q in zip(model.parameters(), expected):
        torch.testing.assert_close(p.detach(), q, rtol=0, atol=1e-6)     # clipping adds 1e-6 to the norm


def test_one_by_one_is_a_flipped_window():
    pictures = np.random.default_rng(0).integers(1, 256, (3, 8, 8, 3), dtype=np.uint8)
    items = bench.OneByOne(pictures, [lambda p: bench.window(8, 2, p)])
    padded = np.pad(pictures[1], ((2, 2), (2, 2), (0, 0)))
    windows = {padded[i:i + 8, j:j + 8][:, ::flip].tobytes() for i in range(5) for j in range(5) for flip in (1, -1)}
    seen = [((items[1][0].permute(1, 2, 0) * 0.25 + 0.5) * 255).round().byte().numpy().tobytes() for _ in range(200)]
    assert set(seen) <= windows and len(set(seen)) > 40
    batch, = next(items.batches(3))
    assert batch.shape == (3, 3, 8, 8) and batch.dtype == torch.float32


def test_resized_one_by_one_has_the_asked_size_and_place():
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None] * 8, (32, 32))
    picture = bench.Image.fromarray(np.stack([ramp] * 3, -1))
    means = [np.asarray(bench.resized(16, (0.05, 0.2), picture)).mean() for _ in range(100)]
    assert bench.resized(16, (0.05, 0.2), picture).size == (16, 16)
    assert min(means) < 80 and max(means) > 160                          # boxes lie everywhere
    whole = np.asarray(bench.resized(32, (0.999, 1.0), picture), dtype=float)
    assert abs(whole - ramp[..., None]).max() <= 8


def test_windows_one_by_one_follow_each_other():
    tokens = np.arange(50, dtype=np.uint16)
    x, y = bench.windows_one_by_one(tokens, 4, 7)
    assert x.shape == (4, 7) and (y == x + 1).all() and (x.diff() == 1).all() and y.max() < 50


def test_data(run, monkeypatch):
    config = dict(width=16, heads=2, layers=1, patch_size=8, classes=3)
    monkeypatch.setattr(bench, "PICTURES", [("large", ImageConfig(**config, image_size=224), 4), ("small", ImageConfig(**config, image_size=32), 8)])
    monkeypatch.setattr(bench, "AUTOENCODER", ("small", MAEConfig(**config, image_size=32), 8))
    lines = run("data", "--repeats=1", "--pictures=256", "--workers=0")
    rows = {title: [line for line in lines if line["row"] == title] for title in dict.fromkeys(line["row"] for line in lines)}
    assert [len(row) for row in rows.values()] == [4, 3, 3, 3, 3]
    for row in rows.values():
        first, step = row[0], row[-1]
        assert step["variant"] == "the bare step" and step["share"] == first["ratio"] == 1 and step["mb_per_s"] is None
        for line in row[:-1]:
            assert line["share"] == pytest.approx(line["ms"] / step["ms"]) and line["ratio"] == pytest.approx(line["ms"] / first["ms"])
    assert rows["vit, 8 of 32 px"][0]["mb_per_s"] == pytest.approx(8 * 3072 / rows["vit, 8 of 32 px"][0]["ms"] / 1e3)
    text = rows["gpt, 32 x 128 tokens"][0]
    assert text["tokens_per_s"] == pytest.approx(32 * 128 / text["ms"] * 1e3) and text["mb_per_s"] == pytest.approx(2e-6 * text["tokens_per_s"])


def test_loop_reads_the_scripts_own_rate(run, monkeypatch):
    """A script that says a known rate, and a model whose bare step takes 20 ms of a clock that stands still otherwise."""
    seen, now = [], [0.0]

    def script(path):
        def main(argv):
            seen.append(argv)
            return dict(examples_per_s=100.0)
        return dict(main=main)
    monkeypatch.setattr(bench.runpy, "run_path", script)
    monkeypatch.setattr(bench.common, "load_checkpoint", lambda path: {})
    monkeypatch.setattr(bench, "bare_step", lambda *a: lambda: now.__setitem__(0, now[0] + 0.02))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "SCRIPTS", {"train_vit.py": (("shapes", 4), None)})
    whole, bare = run("loop", "--steps=3", "--repeats=2")
    assert whole["ms"] == pytest.approx(40) and bare["ms"] == pytest.approx(20)      # 4 pictures at 100 a second
    assert whole["overhead"] == pytest.approx(1) and bare["overhead"] == 0
    assert seen[0][0] == "shapes" and {"--batch_size=4", "--epochs=1.0", "--compile=False"} <= set(seen[0]) and len(seen) == 2


@pytest.mark.parametrize("script", list(bench.SCRIPTS))
def test_loop(run, monkeypatch, script):
    monkeypatch.setattr(bench, "SCRIPTS", {script: (("pydoc" if "gpt" in script else "shapes", 4), None)})
    whole, bare = run("loop", "--steps=3", "--repeats=1")
    assert whole["row"].startswith(script) and whole["ms"] > 0 and bare["ms"] > 0


# ---------------------------------------------------------------------------------------------------------------------
# On paper
# ---------------------------------------------------------------------------------------------------------------------

def test_ring():
    assert bench.ring_bytes(100, 1) == 0 and bench.ring_bytes(100, 2) == 100 and bench.ring_bytes(100, 4) == 150
    assert bench.ring_bytes(100, 10 ** 9) == pytest.approx(200)


def test_on_paper_by_hand():
    c = bench.Scale(peak=1.0, mfu=0.5, nvlink=10.0, network=1.0, link_share=0.5, bucket=1.0)
    # 8e12 FLOPs on 4 x 2 GPUs of 0.5 TFLOP/s: 2 s. 40 MB: inside 2 x 3/4 x 40 = 60 MB at 5 GB/s, across 2 x 1/2 x 10 = 10 MB at 0.5 GB/s
    paper = bench.on_paper(8e12, 10_000_000, 4, 2, 1, c)
    assert (paper["bytes_sent"], paper["compute_ms"]) == (70e6, 2000)
    assert paper["exchange_ms"] == pytest.approx(12 + 20)
    assert paper["exposed_ms"] == pytest.approx(32 / 40)                 # all but the last bucket, 1 MB of 40, is covered
    assert paper["efficiency"] == pytest.approx(2000 / 2000.8) and paper["ms"] == pytest.approx(2000.8)
    slow = bench.on_paper(8e12, 10_000_000, 4, 2, 1, bench.replace(c, nvlink=0.02))          # 6 s inside, 2/3 of 2 s covered
    assert slow["exposed_ms"] == pytest.approx(6020 - 4000 / 3)
    micro = bench.on_paper(8e12, 10_000_000, 4, 2, 4, bench.replace(c, nvlink=0.02))         # the last of four passes covers a quarter
    assert micro["exposed_ms"] == pytest.approx(6020 - 1000 / 3)
    assert bench.on_paper(8e12, 10_000_000, 1, 1, 1, c)["efficiency"] == 1
    assert bench.on_paper(8e12, 1000, 4, 2, 1, c)["exposed_ms"] == bench.on_paper(8e12, 1000, 4, 2, 1, c)["exchange_ms"]      # one bucket


@pytest.mark.parametrize("flag, factor", [("nvlink", 2), ("network", 2), ("link_share", 1.2), ("mfu", 0.5), ("peak", 0.5), ("bucket", 0.1)])
def test_efficiency_rises_with_links_and_falls_with_compute(flag, factor):
    c = bench.Scale()
    better = bench.replace(c, **{flag: factor * getattr(c, flag)})
    a, b = (bench.on_paper(62e12, 22_800_000, 8, 8, 1, config)["efficiency"] for config in (c, better))
    assert 0 < a < b < 1


def test_papers_settings_are_the_presets():
    import train_gpt
    import train_mae
    import train_simdino
    import train_vit
    settings = bench.papers_settings()
    for script, preset in ((train_vit, "imagenet"), (train_mae, "imagenet"), (train_simdino, "imagenet"), (train_gpt, "openwebtext")):
        name, c = script.__name__, script.Config(**script.PRESETS[preset])
        flops, parameters, batch, _, passes = settings[f"{name} {preset}"]
        assert batch == c.batch_size
        with torch.device("meta"):
            tokenizer = text.GPT2Tokenizer.__new__(text.GPT2Tokenizer)   # without its vocabulary, which is a download
            tokenizer.n_vocab = 50257
            model = script.build_model(c, *{train_vit: [1000], train_gpt: [tokenizer]}.get(script, []))
        assert parameters == common.count(model)
        if script is train_gpt:
            assert flops == c.context * model.train_flops()
            assert [passes(n) for n in (1, 8, 64)] == [len(torch.zeros(batch // n).split(c.micro_batch)) for n in (1, 8, 64)]
        elif script is not train_simdino:
            assert flops == model.train_flops() and passes(8) == c.accumulate


def test_flops_of_simdino_by_hand():
    """Per token 6 x (12 d^2 a layer) and 12 n d; 1 + 196 tokens of a global view, 1 + 36 of a local one; a teacher's forward is a third."""
    d, L = 768, 12

    def view(n):
        return n * L * (6 * 12 * d * d + 12 * n * d) + 6 * (n - 1) * 768 * d
    head = 6 * (768 * 2048 + 2048 * 2048 + 2048 * 256)
    by_hand = 2 * (view(197) + head) + 10 * (view(37) + head) + 2 / 3 * (view(197) + head)
    assert bench.papers_settings()["train_simdino imagenet"][0] == pytest.approx(by_hand, rel=1e-5)


def test_scale(run):
    lines = run("scale")
    assert len(lines) == 12 and [line["efficiency"] for line in lines[::3]] == [1] * 4
    for one, eight, many in zip(lines[::3], lines[1::3], lines[2::3]):
        assert 1 > eight["efficiency"] > many["efficiency"] > 0.5 and one["bytes_sent"] == 0
        assert one["flops"] == eight["flops"] == many["flops"]


def test_check_predicts_from_other_measurements(run, monkeypatch):
    """Rigged: two processes whose step takes 2 s alone and whose all-reduce moves 0.1 GB/s."""
    config = ImageConfig(width=32, heads=4, layers=1, image_size=16, patch_size=4, classes=5)
    monkeypatch.setattr(bench, "PICTURES", [("a", config, 4), ("b", config, 8)])
    monkeypatch.setattr(bench, "alternate", lambda steps, device, repeats: dict(zip(steps, (3.0, 7.0))))
    seconds = {"alone": 2.0, "together": 2.3, "gradients": 0.3, "128 MB": 2 ** 27 / 1e8, "bytes": 40_000_000, "flops": 1e9}
    monkeypatch.setattr(bench.multiprocessing, "spawn", lambda f, args, nprocs: bench.Path(args[0], "seconds").write_text(json.dumps(seconds)))
    other, reduced, together = run("scale", "--check", "--bucket=25")[12:]
    assert (other["predicted_ms"], other["measured_ms"]) == (pytest.approx(6000), 7000) and other["ratio"] == pytest.approx(7 / 6)
    assert (reduced["predicted_ms"], reduced["measured_ms"]) == (pytest.approx(400), 300)
    assert (together["predicted_ms"], together["measured_ms"]) == (pytest.approx(2000 + 400 * 25 / 40), 2300)


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
