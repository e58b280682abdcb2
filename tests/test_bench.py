"""The benchmarks measure what they say: equal functions, correct clocks and counts, equal
parameters; every table runs."""
import contextlib
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import analyze
import bench
from flags import parse, parse_command, UserError
from optim import make_optimizer
from parallel import count, Processes
import evaluate
import sample
from data import images, text
from model import (ARCHS, ISTA, MSSA, ImageClassifier, ImageConfig, LanguageModel, MAEConfig,
                   MaskedAutoencoder, TextConfig)

CPU = torch.device("cpu")
IMAGE = dict(width=32, heads=4, layers=1, image_size=16, patch_size=4, classes=5)
MAE = {name: value for name, value in IMAGE.items() if name != "classes"}
TEXT = dict(width=16, heads=2, layers=1, context=6, vocab_size=9)


def table(command="vit", **flags):
    """A Table of the command, and its flags."""
    c = bench.COMMANDS[command][0](device="cpu", **flags)
    return bench.Table(c, Processes("cpu")), c


@pytest.fixture
def run(monkeypatch):
    """run(*argv): the lines of a table, with known ceilings and small models."""
    monkeypatch.setattr(bench, "matmul_peak", lambda device, dtype: 1e11)
    large = dict(IMAGE, image_size=32)
    monkeypatch.setattr(bench, "IMAGE_MODELS", [("a", IMAGE, 2), ("b", large, 4)])
    monkeypatch.setattr(bench, "AUTOENCODER", ("mae", dict(MAE, image_size=32), 2))
    monkeypatch.setattr(bench, "SHAPES", [(2, 9, 16, 2), (2, 5, 32, 4)])
    return lambda *argv: bench.main([*argv, "--device=cpu"])


# -------------------------------------------------------------------------------------------------
# The literal form
# -------------------------------------------------------------------------------------------------

TARGETS = torch.tensor([[1, 5, 3, -1, 0, 8]])
X = torch.arange(3. * 3 * 16 * 16, dtype=torch.float64).view(3, 3, 16, 16).sin()
MODELS = {"image": (lambda: ImageClassifier(ImageConfig(**IMAGE)), (X, torch.arange(3))),
          "mae": (lambda: MaskedAutoencoder(MAEConfig(**MAE)), (X, torch.eye(16)[:3]))}
MODELS |= {arch: (lambda arch=arch: LanguageModel(TextConfig(arch=arch, **TEXT)),
                  (TARGETS.clamp_min(2), TARGETS))
           for arch in ("crate", "crate-alpha", "crate-mm", "crate-n", "aot", "tost", "transformer")}


@pytest.mark.parametrize("name", MODELS)
def test_literal_is_the_same_function(name):
    build, inputs = MODELS[name]
    fast = build().double()
    with torch.no_grad():
        for p in fast.parameters():             # away from zero biases and small residuals
            p.add_(0.2 * torch.randn_like(p))
    literal = bench.literal(fast)
    assert not {type(m) for m in literal.modules()} & set(bench.RELEASED)
    assert not {type(m) for m in fast.modules()} & set(bench.RELEASED.values())
    losses = [bench.loss_of(inputs, model) for model in (fast, literal)]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-10)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(fast.named_parameters(), literal.parameters()):
        assert a is not b and a.grad is not None, name
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-10, msg=name)


# -------------------------------------------------------------------------------------------------
# Clocks and counters
# -------------------------------------------------------------------------------------------------

def test_alternate_takes_medians_in_turn(monkeypatch):
    now, calls = [0.0], []
    durations = {"a": [100.0, 1.0, 5.0, 3.0], "b": [50.0, 2.0, 2.0, 9.0]}   # the first is a warm-up
    left = {name: iter(seconds) for name, seconds in durations.items()}

    def function(name):
        calls.append(name)
        now[0] += next(left[name])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    variants = {name: partial(function, name) for name in durations}
    assert bench.alternate(variants, CPU, 3) == {"a": 3.0, "b": 2.0}
    assert calls == ["a", "b"] * 4


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_exponent_of_the_longer_half(exponent):
    n = [1024, 2048, 4096, 8192, 16384]
    seconds = [5.0, 5.0] + [1e-6 * m ** exponent for m in n[2:]]    # overhead does not count
    assert bench.fitted_exponent(n, seconds) == pytest.approx(exponent, abs=1e-9)
    assert bench.fitted_exponent(n[2:4], seconds[2:4]) == pytest.approx(exponent, abs=1e-9)
    assert bench.fitted_exponent(n[:1], seconds[:1]) is None


def test_peak_memory_sees_what_is_freed_again():
    def use(mb):
        return lambda: torch.ones(mb * 250_000).sum()
    if bench.peak_memory(use(1), CPU) is None:
        pytest.skip("resident memory is unknown here")
    use(200)()                                                      # must not hide the next call
    for mb in (100, 40):
        assert bench.peak_memory(use(mb), CPU) == pytest.approx(mb * 1e6, abs=8e6)


def test_timed_step_clips_and_steps():
    model = LanguageModel(TextConfig(**TEXT)).double()
    ids = torch.arange(12).view(2, 6) % 9
    model(ids, ids).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    expected = [p.detach() - 0.5 * p.grad / norm for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model.zero_grad()
    bench.timed_step(lambda: model(ids, ids), model.parameters(), contextlib.nullcontext,
                     optimizer=optimizer, clip=0.5)()
    for p, q in zip(model.parameters(), expected):
        torch.testing.assert_close(p.detach(), q, rtol=0, atol=1e-6)        # clipping adds 1e-6
        assert p.grad is None
    memory = bench.peak_mb(lambda: None, CPU, model, bench.make_optimizer(model))
    assert memory is None or memory >= 8 * count(model) / 1e6


# -------------------------------------------------------------------------------------------------
# Long range
# -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("arch", ["tost", "transformer", "crate-alpha", "crate"])
@pytest.mark.parametrize("width", [64, 128, 200, 384])
def test_equal_parameters(arch, width):
    fields = dict(layers=3, context=8, vocab_size=16)
    crate, other = (bench.equal_config(a, width, **fields) for a in ("crate", arch))
    assert bench.non_embedding(crate) == LanguageModel(crate).count() - 16 * width
    assert bench.non_embedding(other) == pytest.approx(bench.non_embedding(crate), rel=0.03)
    assert other.layers == 3 and not other.causal and (arch != "crate" or other.width == width)


def test_padding_does_not_count_in_the_mean():
    model = bench.SequenceClassifier(TextConfig(causal=False, **TEXT), 4, pad=0)
    ids = torch.tensor([[3, 1, 4, 0, 0, 0], [5, 2, 6, 5, 3, 5]])
    kept = {}
    model.norm.register_forward_hook(lambda module, args, out: kept.update(Z=out))
    logits = model(ids)
    means = torch.stack([kept["Z"][0, :3].mean(0), kept["Z"][1].mean(0)])
    torch.testing.assert_close(logits, model.head(means))
    model.pad = -1
    torch.testing.assert_close(model(ids), model.head(kept["Z"].mean(1)))


def test_pixels_are_cifar_in_grey(cache, monkeypatch):
    shapes = images.load("shapes", cache)
    monkeypatch.setattr(bench.images, "load", lambda name, folder: shapes)
    _, c = table("longrange", examples=25, held_out=20, data_dir=str(cache))
    data = bench.sequences(c)
    assert data.x.shape == (25, 1024) and (data.vocab_size, data.classes) == (256, 10)
    assert np.array_equal(data.x_test.numpy(), text.grey_pixels(shapes.val_images[:20]))
    assert np.array_equal(data.y_test.numpy(), shapes.val_labels[:20])
    assert (data.x != data.pad).all()


def test_longrange_learns(run, monkeypatch):
    """A task that can be learned: the class is the word that occurs most often."""
    y = torch.arange(160) % 4
    x = torch.randint(1, 9, (160, 16))
    x[:, ::2] = 1 + y[:, None]
    task = SimpleNamespace(x=x[:128], y=y[:128], x_test=x[128:], y_test=y[128:], vocab_size=9,
                           classes=4, pad=0)
    monkeypatch.setattr(bench, "sequences", lambda c: task)
    flags = ("longrange", "--width=16", "--layers=1", "--steps=40", "--batch_size=30", "--lr=0.02")
    lines, again = run(*flags), run(*flags)
    assert [line["variant"].split()[0] for line in lines] == ["tost", "crate", "transformer"]
    for line, same in zip(lines, again):
        assert line["accuracy"] > 0.9 and line["ms"] > 0
        assert (line["accuracy"], line["loss"]) == (same["accuracy"], same["loss"])


# -------------------------------------------------------------------------------------------------
# Data and loop
# -------------------------------------------------------------------------------------------------

def test_loop_reads_the_scripts_own_rate(run, monkeypatch):
    """A script with a known rate, and a bare step that takes 20 ms on a clock that stands still
    otherwise."""
    seen, now = [], [0.0]

    def main(argv):
        seen.append(argv)
        return dict(examples_per_s=100.0)
    step = lambda: now.__setitem__(0, now[0] + 0.02)
    monkeypatch.setattr(bench, "bare_step", lambda *a: step)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench.train_vit, "main", main)
    monkeypatch.setattr(bench, "SCRIPTS", {bench.train_vit: (None, ("shapes", 4))})
    whole, bare = run("loop", "--steps=3", "--repeats=2")
    assert whole["ms"] == pytest.approx(40) and bare["ms"] == pytest.approx(20)
    assert whole["overhead"] == pytest.approx(1) and bare["overhead"] == 0
    assert len(seen) == 2 and seen[0][0] == "shapes"
    assert {"--batch_size=4", "--epochs=1.0", "--compile=False"} <= set(seen[0])


# -------------------------------------------------------------------------------------------------
# Optimizers
# -------------------------------------------------------------------------------------------------

def test_optimizer_shares(run, monkeypatch):
    """Every update takes 10 ms on a clock that stands still otherwise, forward and backward 30."""
    now, models = [0.0], {"a": (ImageClassifier(ImageConfig(**IMAGE)), 2),
                          "b": (LanguageModel(TextConfig(**TEXT)), 2)}
    wait = lambda s, f: lambda *a, **k: (f(*a, **k), now.__setitem__(0, now[0] + s))[0]
    make = make_optimizer

    def slow(*arguments):
        optimizer = make(*arguments)
        optimizer.step = wait(0.01, optimizer.step)
        return optimizer
    monkeypatch.setattr("optim.make_optimizer", slow)
    monkeypatch.setattr(bench, "training_step", wait(0, lambda *a, **k: wait(0.03, lambda: None)))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(bench, "optimizer_models", lambda cuda: models)
    lines = run("optimizer", "--repeats=2")
    assert [line["row"] for line in lines] == ["a"] * 4 + ["b"] * 4
    for line in lines:
        bare = line["variant"] == "forward and backward"
        assert line["ms"] == pytest.approx(30 if bare else 10)
        assert bare or line["share"] == pytest.approx(0.25)


def test_every_operator_of_a_step_is_of_one_kind(run, monkeypatch):
    """The parts are the whole, and the operators that a step surely calls are where they belong."""
    event = SimpleNamespace
    events = [event(key=key, self_cpu_time_total=us) for key, us in (
        ("aten::mm", 100), ("aten::addmm", 100), ("aten::bmm", 50), ("aten::_softmax", 50),
        ("aten::native_layer_norm_backward", 40), ("aten::copy_", 30), ("aten::_fused_adamw_", 20),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", 100), ("aten::relu", 10))]
    profile = lambda: contextlib.nullcontext(event(key_averages=lambda: events))
    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(bench, "training_step", lambda *_: lambda: None)
    monkeypatch.setattr(bench, "optimizer_models", lambda cuda: {"a": (None, 2)})
    found = {line["variant"]: line["share"] for line in run("profile", "--repeats=2")}
    assert found == pytest.approx({"matmuls": 0.4, "attention": 0.4, "LayerNorm": 0.08,
                                   "casts and copies": 0.06, "optimizer": 0.04,
                                   "elementwise, other": 0.02})


# -------------------------------------------------------------------------------------------------
# Scale
# -------------------------------------------------------------------------------------------------

def test_predicted_step_by_hand():
    _, c = table("scale", peak=1.0, mfu=0.5, nvlink=10.0, network=1.0, link_share=0.5, bucket=1.0)
    assert [bench.ring_bytes(100, n) for n in (1, 2, 4)] == [0, 100, 150]
    # 8e12 FLOPs on 4 x 2 GPUs of 0.5 TFLOP/s: 2 s. Of 40 MB, 2 x 3/4 x 40 = 60 MB inside at 5 GB/s
    # and 2 x 1/2 x 10 = 10 MB across at 0.5 GB/s. All but the last bucket, 1 MB of 40, is hidden.
    step = bench.predicted_step(8e12, 10_000_000, 4, 2, 1, c)
    assert (step["sent_mb"], step["compute_ms"]) == (70, 2000)
    assert step["exchange_ms"] == pytest.approx(12 + 20)
    assert step["exposed_ms"] == pytest.approx(32 / 40)
    assert step["efficiency"] == pytest.approx(2000 / 2000.8)
    # 6.02 s of exchange, of which 2/3 of the last pass hides a part
    slow = bench.replace(c, nvlink=0.02)
    for passes in (1, 4):
        step = bench.predicted_step(8e12, 10_000_000, 4, 2, passes, slow)
        assert step["exposed_ms"] == pytest.approx(6020 - 2 / 3 * 2000 / passes)
    assert bench.predicted_step(8e12, 10_000_000, 1, 1, 1, c)["efficiency"] == 1
    one_bucket = bench.predicted_step(8e12, 1000, 4, 2, 1, c)
    assert one_bucket["exposed_ms"] == one_bucket["exchange_ms"]


def test_scale(run):
    lines = run("scale")
    assert len(lines) == 12
    for one, eight, many in zip(lines[::3], lines[1::3], lines[2::3]):
        assert one["efficiency"] == 1 > eight["efficiency"] > many["efficiency"] > 0.5
        assert one["sent_mb"] == 0 and one["tflop"] == eight["tflop"] == many["tflop"]


def test_flops_of_simdino_by_hand():
    """Per token 6 x (12 d^2 a layer) and 12 n d; 1 + 196 tokens of a global view, 1 + 36 of a local
    one; a teacher's forward is a third of a step."""
    d, L = 768, 12

    def view(n):
        layers = n * L * (6 * 12 * d * d + 12 * n * d)
        layers -= (n - 1) * (6 * 9 * d * d + 12 * n * d)    # the last one: of these only Q, K, V
        return layers + 6 * (n - 1) * 768 * d + 6 * (768 * 2048 + 2048 * 2048 + 2048 * 256)
    settings = {row[0]: row[1:] for row in bench.papers_settings()}
    by_hand = (2 + 2 / 3) * view(197) + 10 * view(37)
    assert settings["train_simdino imagenet"][0] == pytest.approx(by_hand, rel=1e-5)
    assert [settings["train_gpt openwebtext"][-1](n) for n in (1, 8, 64)] == [24, 3, 1]


def test_check_predicts_from_other_measurements(run, monkeypatch):
    """Two processes whose step takes 2 s alone and whose all-reduce moves 0.1 GB/s."""
    times = (3.0, 7.0)
    monkeypatch.setattr(bench, "alternate", lambda steps, device, repeats: dict(zip(steps, times)))
    two = dict(alone=2.0, together=2.3, gradients=0.3, large=2 ** 27 / 1e8, parameters=10_000_000,
               flops=1e9)
    monkeypatch.setattr(bench.multiprocessing, "spawn", lambda function, args, nprocs:
                        bench.Path(args[0], "seconds").write_text(json.dumps(two)))
    a, b = (ImageClassifier(ImageConfig(**fields)).train_flops() * batch
            for _, fields, batch in bench.IMAGE_MODELS)
    lines = run("scale", "--check", "--bucket=25")[12:]
    found = [(line["predicted_ms"], line["measured_ms"]) for line in lines]
    assert found == [pytest.approx(pair) for pair in
                     [(3000 * b / a, 7000), (400, 300), (2000 + 400 * 25 / 40, 2300)]]


# -------------------------------------------------------------------------------------------------
# A new GPU
# -------------------------------------------------------------------------------------------------

TRAINED = {f"{script.__name__}.py": script for script in bench.SCRIPTS}
COMMANDS = {"evaluate.py": evaluate.COMMANDS, "analyze.py": analyze.COMMANDS}


@pytest.mark.parametrize("cuda", [False, True])
def test_trials(cuda):
    """Flags that the scripts take; on CUDA all archs, eager and compiled; what is read is there."""
    runs, after = bench.trials(cuda)
    written, forms = set(), set()
    for name, words in (runs | after).items():
        script, *flags = [word.format("folder") for word in words.split()]
        if script in TRAINED:
            c, _ = parse(TRAINED[script].Config, TRAINED[script].PRESETS, flags, "")
            assert c.resume == (c.out_dir in written)
            written.add(c.out_dir)
            forms.add((script, c.arch, c.compile, c.dtype))
        elif script == "sample.py":
            c, _ = parse(sample.Sample, {"": {}}, flags, "", default="")
        else:
            flags_of = {name: command[0] for name, command in COMMANDS[script].items()}
            _, c = parse_command(flags_of, flags, "")
        if script not in TRAINED:
            assert c.ckpt.removesuffix("/best.pt") in written
    archs, compiled = (ARCHS, (False, True)) if cuda else (("crate", "tost"), (False,))
    assert {(script, arch, form, "auto") for script in ("train_vit.py", "train_gpt.py")
            for arch in archs for form in compiled} <= forms
    assert cuda == all((script, "crate", True, "float32") in forms for script in TRAINED)
    assert {words.split()[0] for words in (runs | after).values()} == {*TRAINED, *COMMANDS,
                                                                      "sample.py"}


def test_gpu_goes_on_after_failures(run, monkeypatch, capsys, tmp_path):
    short = "train_vit.py shapes --train_images=50 --width=16 --heads=2 --layers=1 --epochs=1"
    stages = ({"vit": f"{short} --out_dir={{}}/a", "missing": "no_such.py"},
              {"read": "-c open('{}/a/best.pt')", "wrong": "-c raise(KeyError(1))"})

    def bare_step(*arguments):
        raise ValueError("this one fails\nfor a reason")
    monkeypatch.setattr(bench, "trials", lambda cuda: stages)
    monkeypatch.setattr(bench, "bare_step", bare_step)
    monkeypatch.setattr(bench.text, "load", lambda *arguments: None)
    monkeypatch.setattr(bench, "peak_flops", lambda device: 1e12)
    path = tmp_path / "gpu.json"
    with pytest.raises(SystemExit, match="3 of 10 failed") as stopped:      # a message: status 1
        run("gpu", "--repeats=1", f"--json={path}")
    assert isinstance(stopped.value.code, str)
    rows = {line["row"]: line for line in json.loads(path.read_text())["rows"]}
    failed = {name: line["outcome"] for name, line in rows.items() if line["outcome"] != "ok"}
    assert failed.keys() == {"missing", "wrong", "train_simdino cifar10"}
    assert failed["wrong"] == "FAILED (1) KeyError: 1"
    assert failed["train_simdino cifar10"] == "FAILED (ValueError) ValueError: this one fails"
    assert "for a reason" in rows["train_simdino cifar10"]["output"]
    assert failed["missing"].startswith("FAILED (2)") and "no_such.py" in failed["missing"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == [f"{name}: {outcome}" for name, outcome in failed.items()]
    flops = LanguageModel(TextConfig(width=64, heads=2, layers=1, context=32)).train_flops()
    line = rows["causal CRATE-Base"]
    assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / 1e12)
    assert line["tokens_per_s"] == pytest.approx(16 * 32 * 1e3 / line["ms"])


def test_a_command_that_hangs_is_stopped(tmp_path):
    _, c = table("gpu", limit=1, jobs=1)
    trial = ("endless", "-c while(1):pass")
    again, end = bench.attempt(c, CPU, tmp_path, trial)
    assert again == trial and 1 <= end["seconds"] < 20
    assert end["outcome"] == "FAILED (stopped after 1 s) no output"


def test_the_error_is_found_before_what_follows_it():
    output = ("Traceback (most recent call last):\n  raise Error: no\n"
              "torch._inductor.exc.InductorError: RuntimeError: no kernel\n\nSet TORCH_LOGS=...")
    assert bench.told(1, output)["outcome"] == (
        "FAILED (1) torch._inductor.exc.InductorError: RuntimeError: no kernel")
    assert bench.told(2, "a note\nbench.py: a mistake\n\n")["outcome"] == (
        "FAILED (2) bench.py: a mistake")


def test_a_gpu_takes_larger_batches(monkeypatch):
    _, c = table("vit")
    device = torch.device("cuda")
    assert bench.Table(c, SimpleNamespace(device=device, autocast=print)).larger > 1
    t, c = table("vit")
    sizes, t.larger = {}, 3
    t.compare = lambda title, unit, items, *rest, **flops: sizes.update({title: items})
    monkeypatch.setattr(bench, "IMAGE_MODELS", [("a", IMAGE, 2)])
    monkeypatch.setattr(bench, "AUTOENCODER", ("b", dict(MAE, image_size=32), 4))
    monkeypatch.setattr(bench, "SHAPES", [(2, 9, 16, 2)])
    for measure in (bench.bench_vit, bench.bench_mae, bench.bench_ista):
        measure(t, c)
    assert sizes == {"a, batch 6": 6, "b, batch 12": 12, "6 x 9 x 16, 2 heads": 54}


# -------------------------------------------------------------------------------------------------
# Every table, end to end
# -------------------------------------------------------------------------------------------------

GPT = ["--width=64", "--layers=1", "--context=16", "--batch_size=2", "--vocab_size=40"]
COMPARED = {
    "vit": ("images", ["fast", "literal (released code)", "transformer, equal params",
                       "torch layer, equal width"] * 2, []),
    "mae": ("images", ["fast, before", "literal (released code)", "fast, after",
                       "transformer, before", "transformer, after"], []),
    "ista": ("tokens", ["fast", "literal (released code)"] * 2, []),
    "attention": ("tokens", ["fast", "literal (released code)"] * 2, []),
    "gpt": ("tokens", ["crate, fast", "crate, literal", "transformer"], GPT),
    "head": ("tokens", ["fast", "fast, blocks of 1024", "literal"],
             ["--width=16", "--tokens=4096", "--vocab_size=4096"])}


@pytest.mark.parametrize("command", COMPARED)
def test_compared(run, capsys, command):
    unit, variants, flags = COMPARED[command]
    lines = run(command, "--repeats=1", *flags)
    assert [line["variant"] for line in lines] == variants
    for line in lines:
        assert all(line[key] > 0 for key in ("ms", "ratio", "gflops_per_s", "of_matmul",
                                             f"{unit}_per_s"))
        assert line["ratio"] == 1 or "literal" not in line["variant"]
    printed = capsys.readouterr().out.splitlines()[1:]
    assert len(printed) == len(lines)
    for word in ("ms", "GFLOP/s", "of matmul", "MB", f"{unit}/s"):
        assert all(word in line for line in printed)
    peak = {line["variant"]: line["peak_mb"] for line in lines}
    if None in peak.values():
        return
    if command == "gpt":
        for line in lines:
            arch = line["variant"].split(",")[0]
            model = LanguageModel(TextConfig(arch=arch, width=64, heads=1, layers=1, context=16,
                                             vocab_size=40))
            assert line["tokens_per_s"] == pytest.approx(32e3 / line["ms"])
            assert line["peak_mb"] > 4 * 3 * model.count() / 1e6            # weights, two averages
    if command == "head":
        assert peak["literal"] > 2 * 4 * 4096 ** 2 / 1e6                    # logits, their gradient
        assert peak["fast, blocks of 1024"] < 0.6 * peak["literal"]


def test_simdino_shares_are_of_the_whole_step(run):
    flags = ("--repeats=3", "--width=16", "--layers=1", "--batch_size=8")
    whole, views = run("simdino", *flags)
    assert whole["share"] == 1 and 0 < views["share"] < 1
    assert whole["images_per_s"] == pytest.approx(8e3 / whole["ms"])


def test_length(run, tmp_path):
    path = tmp_path / "table.json"
    path.write_text("what was here before")
    head, *lines = run("length", "--lengths=64,32,64,128", "--repeats=1", "--width=16", "--heads=2",
                       f"--json={path}", "--overwrite")
    assert head["lengths"] == [32, 64, 128]
    assert [line["variant"] for line in lines] == [
        f"{name}{causal}, ms" for causal in ("", ", causal") for name in ("TSSA", "MSSA", "MHSA")]
    for line in lines:
        assert len(line["ms"]) == 3 and min(line["ms"]) > 0 and math.isfinite(line["exponent"])
    report = json.loads(path.read_text())
    assert report["rows"] == [head, *lines] and report["matmul_gflops_per_s"] == 100
    with pytest.raises(UserError, match="table.json is there already; --overwrite"):
        run("length", f"--json={path}")
    assert json.loads(path.read_text()) == report


def test_generate(run):
    lines = run("generate", "--prefixes=8,24", "--repeats=1", "--width=128", "--layers=2",
                "--batch_size=3", "--vocab_size=20")
    assert [line["variant"] for line in lines[:len(ARCHS)]] == list(ARCHS)
    for line in lines[:len(ARCHS)]:
        tensors = {"tost": 0, "aot-mhsa": 2, "transformer": 2}.get(line["variant"], 1)
        assert line["bytes_per_token"] == tensors * 2 * 128 * 4             # MSSA: half of MHSA
        # TSSA: norm and moment (K p), mass (K) a layer
        assert line["bytes_constant"] == (2 * (2 * 128 + 2) * 4 if line["variant"] == "tost" else 0)
    head, *times = lines[len(ARCHS):]
    assert head["prefixes"] == [8, 24] and len(times) == 6
    assert all(len(line["ms"]) == 2 and min(line["ms"]) > 0 for line in times)


def test_data(run, monkeypatch):
    small = ImageConfig(**dict(IMAGE, image_size=224, patch_size=56))
    monkeypatch.setattr(bench, "image_config", lambda size: small)
    lines = run("data", "--repeats=1", "--pictures=256", "--workers=0")
    rows = {}
    for line in lines:
        rows.setdefault(line["row"], []).append(line)
    assert [len(row) for row in rows.values()] == [4, 3, 3, 3, 3]
    for first, *others, step in rows.values():
        assert step["variant"] == "the bare step" and step["share"] == 1
        for line in (first, *others):
            assert line["share"] == pytest.approx(line["ms"] / step["ms"])


@pytest.mark.parametrize("script", bench.SCRIPTS, ids=lambda script: script.__name__)
def test_loop(run, monkeypatch, script):
    preset = "pydoc" if script is bench.train_gpt else "shapes"
    monkeypatch.setattr(bench, "SCRIPTS", {script: (None, (preset, 4))})
    whole, bare = run("loop", "--steps=3", "--repeats=1")
    assert whole["row"].startswith(script.__name__) and whole["ms"] > 0 and bare["ms"] > 0


@pytest.mark.parametrize("argv, message", [
    ("length --lengths=1,x", "--lengths=1,x: expected whole numbers"),
    ("generate --prefixes=0,4", "--prefixes=0,4: expected whole numbers"),
    ("head --json=/nowhere/at/all", "--json=/nowhere/at/all: cannot write there"),
    ("longrange --task=path", "--task=path is not one of")])
def test_mistakes(run, argv, message):
    with pytest.raises(UserError, match=message):
        run(*argv.split())
