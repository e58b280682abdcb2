"""
Speed and memory: the fast paths beside the literal form of the same function and a transformer.

    python bench.py vit --json=rows.jsonl       one table; --help lists the others
    python bench.py gpu                         a new GPU: does everything run, and how fast

Literal is the same function of the same parameters without our fast paths. The variants of a table
take turns in one process, so that a disturbance meets all of them; times are medians. GFLOP/s
counts operations as `train_flops` of model.py does; the first row is a large matmul's.
"""
import copy
import ctypes
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
from torch.nn import functional as F

import train_gpt
import train_mae
import train_vit
from cross_entropy import linear_cross_entropy
from data.prepare import prepare
from flags import cli, DeviceFlags, model_fields, option, parse_command, ROOT
from model import (ARCHS, attention_map, CBSA, ImageClassifier, ImageConfig, ISTA, LanguageModel,
                   MAEConfig, MaskedAutoencoder, MHSA, MSSA, run_layers, sizes_of, TextConfig, TSSA)
from parallel import device_name, Processes, wants_compile
from run import read_metrics


@dataclass(kw_only=True)
class Flags(DeviceFlags):
    repeats: int = option(9, "turns of every variant", low=1)
    compile: bool | None = option(None, "torch.compile every variant; auto is cuda only")
    json: str | None = option(None, "add the rows to this file, one JSON object a line")
    longest: int = option(4096, "of `length` and `generate`: the largest number of tokens", low=64)


# ---- The literal form: what the equations compute, as printed, with the same parameters ---------
def literal_attend(self, q, k, v):
    """MSSA with an explicit softmax of the n x n Gram matrix and two matmuls, [J] Eq. (37)."""
    ssa = attention_map(q, k, self.scale, self.causal) @ v
    return ssa.transpose(1, 2).flatten(-2)


def literal_ista(self, Z):
    """ISTA in three matmuls over the tokens, [J] Eq. (44)."""
    ascent = F.linear(F.linear(Z, self.D), self.D.mT)       # D^* D Z
    descent = F.linear(Z, self.D.mT)                        # D^* Z
    return F.relu(Z + self.eta * (descent - ascent) - self.eta * self.lambd)


def literal_language_model(self, ids, targets):
    """A language model that forms all its logits before their cross-entropy, as nanoGPT does."""
    Z = self.norm(run_layers(self.layers, self.tokens(ids)))
    return literal_cross_entropy(Z, self.embed.weight, targets)


def literal_cross_entropy(Z, W, targets):
    """What linear_cross_entropy computes, from all logits together."""
    return F.cross_entropy((Z @ W.mT).flatten(0, -2), targets.flatten(), ignore_index=-1)


LITERAL = {MSSA: literal_attend, ISTA: literal_ista, LanguageModel: literal_language_model}


def literal(model):
    """A copy of the model that computes the same function without our fast paths."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if type(module) in LITERAL:
            method = LITERAL[type(module)].__get__(module)
            setattr(module, "attend" if isinstance(module, MSSA) else "forward", method)
    return model


# ---- Clock, memory, a row -----------------------------------------------------------------------
def alternate(calls, device, repeats):
    """{name: median seconds} of functions called in turn, after one turn that is not measured."""
    wait = getattr(torch, device.type).synchronize
    seconds = {name: [] for name in calls}
    for name, call in (repeats + 1) * list(calls.items()):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def peak_memory(call, device):
    """MB by which a call raises the memory in use at its peak; None where that is not known."""
    def mb(key):
        return 1024e-6 * int(re.search(key + r"\s+(\d+)", Path("/proc/self/status").read_text())[1])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    ctypes.CDLL(None).malloc_trim(0)                # else memory freed earlier serves unseen
    Path("/proc/self/clear_refs").write_text("5")   # VmHWM, the peak, becomes what is resident
    before = mb("VmRSS:")
    call()
    return mb("VmHWM:") - before


def row(c, title, variant, **values):
    """Prints a row and adds it to the file of --json. A value's name is its unit; None: unknown."""
    if c.json:
        with open(c.json, "a") as file:
            print(json.dumps(dict(title=title, variant=variant) | values), file=file)
    cells = []
    for unit, value in values.items():
        if isinstance(value, (int, float)):
            number = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            value = f"{number:>9} {unit.replace('_per_', '/').replace('_', ' ')}"
        cells.append(value or "-")
    print(f"{title:30} {variant:22}", *cells, flush=True)


def compare(c, processes, title, items, unit, variants):
    """A row for each of {name: (forward, leaves, FLOPs of an item)}: the time of forward(), which
    processes `items` of `unit`, and of backward to the leaves; and that as a share of "literal"."""
    torch._dynamo.reset()       # it compiles one function only so many times
    steps, memory = {}, {}
    for name, (forward, leaves, _) in variants.items():
        if wants_compile(c, processes, 0):
            forward = torch.compile(forward)
        steps[name] = partial(forward_backward, processes, forward, leaves)
        steps[name]()           # compiles
        memory[name] = peak_memory(steps[name], processes.device)
    times = alternate(steps, processes.device, c.repeats)
    for name, seconds in times.items():
        row(c, title, name, ms=1e3 * seconds, of_literal=seconds / times["literal"],
            GFLOP_per_s=items * variants[name][2] / seconds / 1e9, MB=memory[name],
            **{f"{unit}_per_s": items / seconds})


def forward_backward(processes, forward, leaves):
    """forward() and the gradient of its sum; none is left in the leaves."""
    with processes.autocast():
        total = forward().sum()
    total.backward()
    for leaf in leaves:
        leaf.grad = None


def larger(batch, device):
    """A GPU would only wait for its launches on a CPU's batches."""
    return 8 * batch if device.type == "cuda" else batch


def loss_function(model, batch, device):
    """A function that computes the model's loss on one random batch."""
    config = model.config
    if isinstance(config, TextConfig):
        ids, targets = torch.randint(config.vocab_size, (2, batch, config.context), device=device)
        return lambda: model(ids, targets)
    x = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
    if isinstance(config, MAEConfig):
        noise = torch.rand(batch, config.patches(), device=device)
        return lambda: model(x, noise)
    labels = torch.randint(config.classes, (batch,), device=device)
    return lambda: F.cross_entropy(model(x), labels)


def compare_models(c, processes, title, batch, build, fields, vit_fields):
    """`compare` for training steps of build(fields): fast, literal, beside a transformer."""
    device, variants = processes.device, {}
    fast, transformer = build(fields), build(vit_fields | dict(arch="transformer"))
    for name, model in dict(fast=fast, literal=literal(fast), transformer=transformer).items():
        leaves = list(model.to(device).parameters())
        variants[name] = loss_function(model, batch, device), leaves, model.train_flops()
    is_text = isinstance(fast, LanguageModel)
    items, unit = (batch * fast.config.context, "tokens") if is_text else (batch, "images")
    compare(c, processes, f"{title}, batch {batch}", items, unit, variants)


def preset(script, name, config_class):
    """The model's fields that a training script's preset sets."""
    return model_fields(config_class, script.Config(**script.PRESETS[name]))


def halved(fields):
    """Half the width and heads: a transformer then has about as many parameters as CRATE."""
    return fields | dict(width=fields["width"] // 2, heads=fields["heads"] // 2)


IMAGE_MODELS = [("CRATE-Tiny, 224 px", sizes_of("image", "crate")["tiny"], 16),     # batch
                ("cifar10, 32 px", preset(train_vit, "cifar10", ImageConfig), 64)]
# B, n, d, K: CRATE-Tiny and CRATE-Base at 224 px, the cifar10 preset
SHAPES = [(16, 197, 384, 6), (16, 197, 768, 12), (64, 65, 384, 6)]
HEAD = 4096, 256, 50304         # tokens, width, GPT-2's vocabulary


def bench_vit(c, processes):
    """Training steps of image models: CRATE-Tiny at 224 px and the cifar10 preset, beside a
    transformer of equal parameters."""
    for title, fields, batch in IMAGE_MODELS:
        compare_models(c, processes, title, larger(batch, processes.device),
                       lambda f: ImageClassifier(ImageConfig(**f)), fields, halved(fields))


def bench_mae(c, processes):
    """Training steps of a masked autoencoder, beside a ViT-MAE of equal parameters."""
    fields = preset(train_mae, "cifar10", MAEConfig)
    compare_models(c, processes, "cifar10, 32 px", larger(64, processes.device),
                   lambda f: MaskedAutoencoder(MAEConfig(**f)), fields, halved(fields))


def bench_gpt(c, processes):
    """Training steps of language models: Base on CUDA, the pydoc preset elsewhere, beside the
    transformer of that width."""
    fields, batch = preset(train_gpt, "pydoc", TextConfig) | dict(vocab_size=96), 32
    if processes.device.type == "cuda":
        fields, batch = sizes_of("text", "crate")["base"], 16
    compare_models(c, processes, f"width {fields['width']}", batch,
                   lambda f: LanguageModel(TextConfig(**f)), fields, fields)


def compare_operator(c, processes, build):
    """`compare` for one operator: build(config, n) returns it and its multiply-adds per token."""
    for B, n, d, K in SHAPES:
        B = larger(B, processes.device)
        Z = torch.randn(B, n, d, device=processes.device, requires_grad=True)
        fast, multiply_adds = build(ImageConfig(width=d, heads=K), n)
        variants = {}
        for name, operator in (("fast", fast.to(Z.device)), ("literal", literal(fast))):
            leaves = [Z, *operator.parameters()]
            variants[name] = partial(operator, Z), leaves, 6 * multiply_adds
        compare(c, processes, f"{B} x {n} x {d}, {K} heads", B * n, "tokens", variants)


def bench_ista(c, processes):
    """The sparsification operator alone: one matmul against three."""
    compare_operator(c, processes, lambda config, n: (ISTA(config), config.width ** 2))


def bench_attention(c, processes):
    """The compression operator alone: fused attention against an explicit softmax."""
    compare_operator(c, processes, lambda config, n: (
        MSSA(config), 2 * config.width * (config.width + n)))


def bench_head(c, processes):
    """The cross-entropy over a vocabulary, in blocks of two sizes and of all logits at once."""
    (tokens, width, vocab_size), device = HEAD, processes.device
    tokens = larger(tokens, device)
    Z = torch.randn(tokens, width, device=device, requires_grad=True)
    W = torch.randn(vocab_size, width, device=device).mul_(0.02).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,), device=device)
    losses = {"fast": linear_cross_entropy, "literal": literal_cross_entropy,
              "fast, blocks of 1024": partial(linear_cross_entropy, block=1024)}
    variants = {name: (partial(loss, Z, W, targets), [Z, W], 6 * W.numel())
                for name, loss in losses.items()}
    compare(c, processes, f"{tokens} x {width} x {vocab_size}", tokens, "tokens", variants)


def bench_length(c, processes):
    """Forward and backward of TSSA, CBSA, MSSA and MHSA for four square grids of n patches and a
    class token, each grid four times the one before, and the power of n that time grows with."""
    lengths = [(math.isqrt(c.longest) >> i) ** 2 for i in (3, 2, 1, 0)]
    device = processes.device
    operators = {kind.__name__: kind(ImageConfig(width=256, heads=4, qkv_bias=True)).to(device)
                 for kind in (TSSA, CBSA, MSSA, MHSA)}
    medians = {name: [] for name in operators}
    for n in lengths:
        Z = torch.randn(larger(1, device), 1 + n, 256, device=device, requires_grad=True)
        steps = {name: partial(forward_backward, processes, partial(operator, Z),
                               [Z, *operator.parameters()])
                 for name, operator in operators.items()}
        for name, seconds in alternate(steps, device, c.repeats).items():
            row(c, f"{n} patches", name, ms=1e3 * seconds)
            medians[name].append(seconds)
    for name, seconds in medians.items():
        row(c, "time grows", name, as_n_to_the_power=math.log(seconds[-1] / seconds[-2], 4))


@torch.no_grad()
def advance(processes, model, ids, state):
    """The state after the tokens `ids`; the given one stays as it is."""
    state = [copy.copy(cache) for cache in state]
    with processes.autocast():
        model.advance(ids, state)
    return state


def cache_bytes(state):
    """What generation keeps for the tokens read; of a buffer, the part in use."""
    return sum(kept[:, :, :cache.n].nbytes for cache in state for kept in vars(cache).values()
               if torch.is_tensor(kept))


TEXT_ARCHS = [arch for arch in ARCHS if arch != "cbsa"]      # which pools a grid of patches


def bench_generate(c, processes):
    """The cache of every arch, and the time of one more token after a short and a long prefix:
    with the cache, and without it by reading everything again."""
    ids, behind = torch.randint(512, (1, c.longest + 1), device=processes.device), {}
    for arch in TEXT_ARCHS:     # a small vocabulary, so that the head does not hide the layers
        model = LanguageModel(TextConfig(arch=arch, width=256, heads=4, layers=4, vocab_size=512,
                                         context=c.longest + 1)).to(ids.device).eval()
        behind[arch] = partial(advance, processes, model)
        one, two = (cache_bytes(behind[arch](ids[:, :n], [])) for n in (1, 2))
        row(c, "4 layers of width 256", arch, bytes_a_token=two - one, bytes_constant=2 * one - two)
    for n in (c.longest // 32, c.longest):
        calls = {}
        for arch in ("crate", "tost", "transformer"):
            state = behind[arch](ids[:, :n], [])
            calls[f"{arch}, cached"] = partial(behind[arch], ids[:, n:n + 1], state)
            calls[f"{arch}, uncached"] = partial(behind[arch], ids[:, :n + 1], [])
        for name, seconds in alternate(calls, ids.device, c.repeats).items():
            row(c, f"one token after {n}", name, ms=1e3 * seconds)


# ---- A new GPU: does everything run, and how fast -----------------------------------------------
SHORT = dict(vit="train_vit.py shapes --epochs=1", gpt="train_gpt.py pydoc --steps=8",
             mae="train_mae.py shapes --epochs=1", simdino="train_simdino.py shapes --epochs=1",
             dino="train_simdino.py shapes --epochs=1 --method=dino",
             masked="train_gpt.py pydoc --steps=8 --objective=masked")
READ = ["evaluate.py accuracy --ckpt={}/vit/best.pt", "evaluate.py linear --ckpt={}/mae/best.pt",
        "evaluate.py knn --ckpt={}/simdino/best.pt", "evaluate.py lm --ckpt={}/gpt/best.pt",
        "analyze.py layers --ckpt={}/vit/best.pt --samples=20 --out={}/a.png",
        "sample.py --ckpt={}/gpt/best.pt", "sample.py --ckpt={}/masked/best.pt --fill=a___b"]
TIMED = ["train_vit.py imagenet --data=shapes --crop=resized --batch_size=256 --epochs=4",
         "train_gpt.py openwebtext --data=pydoc --batch_size=48 --steps=40",
         "train_gpt.py openwebtext --data=pydoc --batch_size=48 --steps=40 --arch=transformer"]


def short_commands(cuda):
    """Three lists, {} is the folder of the runs: every script for a few steps, on CUDA with all
    archs, compiled and eager; what reads the checkpoints; on CUDA runs whose rate and MFU count."""
    train = [f"{script} --width=128 --heads=2 --layers=2 --out_dir={{}}/{name}"
             for name, script in SHORT.items()]
    read = [f"{train[0]} --epochs=2 --resume", *READ]
    timed = [f"{script} --out_dir={{}}/{i}" for i, script in enumerate(TIMED)] if cuda else []
    archs, forms = (TEXT_ARCHS, ("true", "false")) if cuda else (("tost",), ("false",))
    train += [f"{run}-{arch}-{form} --arch={arch} --compile={form}"
              for run in train[:2] for arch in archs for form in forms]
    return train, read, timed


def attempt(c, device, folder, command):
    """Runs a command and prints how it ended, with a run's last rate. Returns whether it failed."""
    command, start = command.format(folder, folder), time.perf_counter()
    script, *words = command.split()
    done = subprocess.run(
        [sys.executable, script, *words, f"--device={device.type}", f"--data_dir={folder}"],
        cwd=ROOT, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT)
    logged = read_metrics(command.partition("--out_dir=")[2].partition(" ")[0])
    rates = {k: v for line in logged for k, v in line.items() if k.endswith("_per_s") or k == "mfu"}
    last = done.stdout.strip().rpartition("\n")[2]
    outcome = f"FAILED ({done.returncode}) {last}" if done.returncode else "ok"
    row(c, script, " ".join(words), s=time.perf_counter() - start, outcome=outcome, **rates)
    return done.returncode != 0


def bench_gpu(c, processes):
    """A new GPU: every script for a few steps on generated data, then rate and MFU of larger runs.
    What fails is listed, the rest goes on, and the exit status is 1."""
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        prepare("shapes", cache=folder, drawn=(2000, 100))
        prepare("pydoc", cache=folder)
        stages = short_commands(processes.device.type == "cuda")
        for commands, at_once in zip(stages, (4, 4, 1)):        # alone while they are timed
            with ThreadPool(at_once) as pool:
                failed += pool.map(partial(attempt, c, processes.device, folder), commands, 1)
    if any(failed):
        sys.exit(f"{sum(failed)} of {len(failed)} failed")


COMMANDS = dict(vit=bench_vit, mae=bench_mae, gpt=bench_gpt, ista=bench_ista,
                attention=bench_attention, head=bench_head, length=bench_length,
                generate=bench_generate, gpu=bench_gpu)


def main(argv):
    flags = {name: type(name, (Flags,), dict(__doc__=function.__doc__))
             for name, function in COMMANDS.items()}
    command, c = parse_command(flags, argv, __doc__)
    processes = Processes(c.device, c.dtype)
    n = larger(1024, processes.device)
    a, b = torch.randn(2, n, n, device=processes.device)
    with processes.autocast():
        seconds = alternate({"matmul": lambda: a @ b}, processes.device, 5)["matmul"]
    row(c, device_name(processes.device), f"torch {torch.__version__}",
        GFLOP_per_s_of_a_large_matmul=2e-9 * n ** 3 / seconds)
    COMMANDS[command](c, processes)


if __name__ == "__main__":
    cli(main)
