"""
Speed and memory, side by side: the fast paths, the literal forms they replace, and alternatives.

    python bench.py vit         training steps of image models: CRATE-Tiny at 224 px, cifar10
    python bench.py mae         training steps of masked autoencoders: CRATE-MAE, literal, ViT-MAE
    python bench.py gpt         training steps of language models: pydoc preset; Base on CUDA
    python bench.py ista        the sparsification operator alone
    python bench.py attention   the compression operator alone
    python bench.py head        the cross-entropy over GPT-2's vocabulary
    python bench.py simdino     a step of SimDINO with its views, and the views alone
    python bench.py length      time of TSSA, MSSA, MHSA against sequence length, and its exponent
    python bench.py generate    the cache of each arch, and the time of one more token
    python bench.py longrange   ToST, CRATE, transformer at equal parameters on long sequences
    python bench.py data        what it costs to feed each script, against one item at a time
    python bench.py loop        each script's own steps against bare forward, backward, optimizer
    python bench.py optimizer   AdamW, Lion and Muon: the update alone, its share of a step
    python bench.py profile     where the time of a training step goes, by kind of operator
    python bench.py scale       the papers' settings on 1, 8, 64 GPUs, computed; --check measures
    python bench.py gpu         a new GPU: every script for a few steps, then throughput and MFU

All variants of a table run in one process, in turn, so that a disturbance meets all of them; times
are medians. The first six tables add: the ratio to the literal form; the FLOP/s that the
mathematics needs, and their share of what a large matmul reaches here; the peak memory.
"""
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the imports: no traceback

import contextlib
import copy
import ctypes
import dataclasses
import io
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F

import train_gpt
import train_mae
import train_simdino
from flags import check_new, cli, DeviceFlags, option, parse_command, ROOT, set_fields, UserError
import optim
from parallel import (count, derive_seed, device_name, multiplies_bfloat16, peak_flops, Processes,
                      wants_compile)
import train_vit
from data import augment, images, text
from data.prepare import prepare
from model import (ARCHS, ISTA, MHSA, MSSA, TSSA, ImageClassifier, ImageConfig, LanguageModel,
                   MAEConfig, MaskedAutoencoder, TextConfig, attention_map, image_config,
                   linear_cross_entropy, run_layers, sizes_of, text_config)

# -------------------------------------------------------------------------------------------------
# The literal form: what the released code computes, with the same parameters
# -------------------------------------------------------------------------------------------------

class ReleasedMSSA(MSSA):
    """MSSA with an explicit softmax of the n x n Gram matrix and two matmuls, [J] Eq. (37)."""

    def attend(self, q, k, v):
        ssa = attention_map(q, k, self.scale, self.causal) @ v
        return ssa.transpose(1, 2).flatten(-2)


class ReleasedISTA(ISTA):
    """ISTA in three matmuls over the tokens, [J] Eq. (44)."""

    def forward(self, Z):
        ascent = F.linear(F.linear(Z, self.D), self.D.mT)       # D^* D Z
        descent = F.linear(Z, self.D.mT)                        # D^* Z
        return F.relu(Z + self.eta * (descent - ascent) - self.eta * self.lambd)


class ReleasedClassifier(ImageClassifier):
    """A classifier whose last layer computes every token, though one is read."""

    def forward(self, x):
        return self.head(self.pool(self.encoder(x)))


class ReleasedLanguageModel(LanguageModel):
    """A language model that forms all its logits before their cross-entropy, as nanoGPT does."""

    def forward(self, ids, targets=None):
        Z = self.norm(run_layers(self.layers, self.tokens(ids)))
        W = self.embed.weight
        return Z @ W.mT if targets is None else cross_entropy_at_once(Z, W, targets)


def cross_entropy_at_once(Z, W, targets):
    """What linear_cross_entropy computes, from all logits together."""
    return F.cross_entropy((Z @ W.mT).flatten(0, -2), targets.flatten(), ignore_index=-1)


RELEASED = {MSSA: ReleasedMSSA, ISTA: ReleasedISTA, ImageClassifier: ReleasedClassifier,
            LanguageModel: ReleasedLanguageModel}


def literal(model):
    """A copy of the model that computes the same function as the released code does."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module.__class__ = RELEASED.get(type(module), type(module))
    return model


def torch_vit(config):
    """Our ViT with PyTorch's own TransformerEncoderLayer in the place of our layers. These give
    every token, so all are read."""
    model = ImageClassifier(replace(config, pool="mean"))
    model.train_flops = partial(int, model.train_flops())       # PyTorch's layers have no count
    for l in range(config.layers):
        model.encoder.layers[l] = nn.TransformerEncoderLayer(
            config.width, config.heads, 4 * config.width, 0.0, "gelu", batch_first=True,
            norm_first=True)
    return model


# -------------------------------------------------------------------------------------------------
# Clocks and counters
# -------------------------------------------------------------------------------------------------

def seconds_of(function, device):
    """Seconds of one call, until the device has finished."""
    wait = getattr(torch, device.type).synchronize
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def alternate(variants, device, repeats, drain=False):
    """{name: median seconds} of functions called in turn, after one turn that is not measured.

    drain: one more call before each measured one, for what was read ahead while others ran."""
    seconds = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, function in variants.items():
            if drain:
                function()
            measured = seconds_of(function, device)
            if turn:
                seconds[name].append(measured)
    return {name: statistics.median(s) for name, s in seconds.items()}


def matmul_peak(device, dtype):
    """FLOP/s of a large square matmul, best of five: the ceiling of what computes."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    return 2 * n ** 3 / min(seconds_of(lambda: a @ b, device) for _ in range(6))


def peak_memory(function, device):
    """Bytes by which a call raises the memory in use at its peak: allocated (CUDA), resident
    (Linux); None elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before

    def resident(key):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"{key}:\s*(\d+)", status)[1])
    try:
        ctypes.CDLL(None).malloc_trim(0)                # else memory freed earlier serves unseen
        Path("/proc/self/clear_refs").write_text("5")   # VmHWM, the peak, becomes what is resident
    except (OSError, AttributeError):
        return None
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def tensors(dicts):
    """The tensors in a list of dicts."""
    return [value for one in dicts for value in one.values() if torch.is_tensor(value)]


def peak_mb(function, device, model, optimizer=None):
    """`peak_memory` and what stays between calls (parameters, buffers, optimizer state), in MB."""
    used = peak_memory(function, device)
    if used is None:
        return None
    held = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    if optimizer is not None:
        held += tensors(optimizer.state.values())
    return (used + sum(tensor.nbytes for tensor in held)) / 1e6


# -------------------------------------------------------------------------------------------------
# A table: its lines, and what is timed in them
# -------------------------------------------------------------------------------------------------

# How the values of a line are printed, in the line's order; others are only in --json
FORMATS = dict(
    ms="{:10.2f} ms", ratio="{:6.2f}", gflops_per_s="{:9.1f} GFLOP/s",
    of_matmul="{:6.1%} of matmul", peak_mb="{:7,.0f} MB", share="{:8.2%} of the step",
    overhead="{:+8.1%}", images_per_s="{:12,.0f} images/s", tokens_per_s="{:12,.0f} tokens/s",
    sequences_per_s="{:12,.0f} sequences/s", exponent="{:8.2f}",
    bytes_per_token="{:12,.0f} bytes a token", bytes_constant="{:8,.0f} and constant",
    non_embedding="{:12,} parameters", accuracy="{:8.2%} right",
    tflop="{:6,.0f} TFLOP a step", sent_mb="{:6,.0f} MB sent", compute_ms="compute {:8,.1f} ms",
    exchange_ms="exchange {:5.1f} ms", exposed_ms="{:6.2f} ms of it exposed",
    efficiency="efficiency {:6.1%}", predicted_ms="predicted {:8.1f} ms",
    measured_ms="measured {:8.1f} ms", mfu="mfu {:6.1%}", seconds="{:8.1f} s", outcome="{}")


class Table:
    """A table in the making: this machine, and the lines so far."""

    def __init__(self, c, processes, matmul_flops=1.0, file=None, about=None):
        self.file, self.about = file, about
        self.processes, self.device = processes, processes.device
        self.cuda = self.device.type == "cuda"
        self.larger = 8 if self.cuda else 1     # on a CPU's batches a GPU waits for its launches
        self.matmul_flops = matmul_flops
        self.autocast = partial(processes.autocast, c.dtype)
        self.compile = hasattr(c, "compile") and wants_compile(c, processes, 0)
        self.repeats = getattr(c, "repeats", 1)
        self.lines = []

    def seconds(self, variants, **options):
        return alternate(variants, self.device, self.repeats, **options)

    def add(self, row, variant, **values):
        """Keeps a line, in the file too, and prints it; None is printed as -, a list as columns."""
        self.lines.append(dict(row=row, variant=variant, **values))
        if self.file:
            self.file.seek(0)
            self.file.truncate()
            json.dump(self.about | dict(rows=self.lines), self.file, indent=1)
            self.file.flush()
        cells = []
        for key, value in values.items():
            if isinstance(value, list):
                cells += [f"{v:9,.2f}" if isinstance(v, float) else f"{v:9,}" for v in value]
            elif key in FORMATS:
                cells.append("-" if value is None else FORMATS[key].format(value))
        print(f"{row:30} {variant:33}", *cells, flush=True)

    def compare(self, title, unit, items, calls, forward, inputs=(), gradient=None, optimize=False,
                flops=lambda model: model.train_flops()):
        """A line for each of {name: module or function}, and with --compile another of its compiled
        form: forward(call), backward and, if asked for, clipping and AdamW.

        items of `unit` and flops(call) each; inputs: leaves beside the parameters. The ratio is to
        the name with "literal" in it."""
        steps, memory, needed = {}, {}, {}
        for name, call in calls.items():
            leaves = list(inputs)
            if isinstance(call, nn.Module):
                leaves += call.to(self.device).parameters()
            optimizer = make_optimizer(call) if optimize else None
            forms = {name: call}
            if self.compile:
                forms[f"{name}, compiled"] = torch.compile(call)
            for key, form in forms.items():
                steps[key] = timed_step(partial(forward, form), leaves, self.autocast, gradient,
                                        optimizer, clip=1.0 if optimize else None)
                steps[key]()        # compiles, warms up, and makes the optimizer's state
                memory[key] = peak_mb(steps[key], self.device, call, optimizer)
                needed[key] = items * flops(call)
        times = self.seconds(steps)
        base = next(seconds for name, seconds in times.items() if "literal" in name)
        for name, seconds in times.items():
            flops_per_s = needed[name] / seconds
            self.add(title, name, ms=1e3 * seconds, ratio=seconds / base,
                     gflops_per_s=flops_per_s / 1e9, of_matmul=flops_per_s / self.matmul_flops,
                     peak_mb=memory[name], **{f"{unit}_per_s": items / seconds})


def make_optimizer(model, name="adamw"):
    return optim.make_optimizer(model, name, 1e-4, 0.1, (0.9, 0.95))


def timed_step(forward, leaves, autocast, gradient=None, optimizer=None, clip=None):
    """Forward, backward and, if given, clipping and optimizer, as a function without arguments.

    gradient: that of forward()'s output, unless it is a loss. No gradient is left in `leaves`."""
    leaves = list(leaves)

    def step():
        with autocast():
            out = forward()
        out.backward(None if gradient is None else gradient.to(out.dtype))
        if clip:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        if optimizer is not None:
            optimizer.step()
        for leaf in leaves:
            leaf.grad = None
        return out.detach()
    return step


def training_step(t, model, batch, optimizer="adamw", clip=None, feed=None):
    """`timed_step` of a model's loss on one random batch; `feed`, if given, makes new images for
    each step."""
    inputs = batch_for(model.to(t.device).config, batch, t.device)
    if t.compile:
        model.compile()
    step = timed_step(partial(loss_of, inputs, model), model.parameters(), t.autocast,
                      optimizer=optimizer and make_optimizer(model, optimizer), clip=clip)
    return (lambda: (inputs[0].copy_(next(feed)), step())) if feed else step


def loss_of(inputs, model):
    """model(*inputs), or the cross-entropy of a classifier's logits if `inputs` end with labels."""
    if inputs[0].ndim == 4 and inputs[1].ndim == 1:
        return F.cross_entropy(model(inputs[0]), inputs[1])
    return model(*inputs)


def batch_for(config, batch, device):
    """Random inputs of a training step: (x, labels), (x, noise that masks), or (ids, targets)."""
    if isinstance(config, TextConfig):
        return torch.randint(config.vocab_size, (2, batch, config.context), device=device)
    x = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
    if isinstance(config, MAEConfig):
        return x, torch.rand(batch, config.patches(), device=device)
    return x, torch.randint(config.classes, (batch,), device=device)


# -------------------------------------------------------------------------------------------------
# Models and operators
# -------------------------------------------------------------------------------------------------

def preset(script, name, **fields):
    """The config of a training script's preset."""
    return script.Config(**script.PRESETS[name] | fields)


# title, fields of the config, batch; on CUDA Table.larger times as many, here and below
IMAGE_MODELS = [
    ("CRATE-Tiny, 224 px", sizes_of("image", "crate")["tiny"], 16),
    ("cifar10 preset, 32 px",
     set_fields(ImageConfig, preset(train_vit, "cifar10"), classes=10), 64)]
AUTOENCODER = ("cifar10 preset, 32 px",
               set_fields(MAEConfig, preset(train_mae, "cifar10")), 64)


def equal_vit(fields):
    """The transformer of half the width and heads, which has about as many parameters."""
    half = dict(width=fields["width"] // 2, heads=fields["heads"] // 2)
    return fields | half | dict(arch="transformer")


def bench_vit(t, c):
    """Fast, literal, a ViT of equal parameters, and PyTorch's own layer at equal width."""
    for title, fields, batch in IMAGE_MODELS:
        batch *= t.larger
        fast = ImageClassifier(ImageConfig(**fields))
        models = {"fast": fast, "literal (released code)": literal(fast),
                  "transformer, equal params": ImageClassifier(ImageConfig(**equal_vit(fields))),
                  "torch layer, equal width":
                      torch_vit(ImageConfig(**fields | dict(arch="transformer")))}
        inputs = batch_for(fast.config, batch, t.device)
        t.compare(f"{title}, batch {batch}", "images", batch, models, partial(loss_of, inputs))


def bench_mae(t, c):
    """Mask tokens before and after the encoder, for CRATE-MAE and a ViT-MAE of equal parameters.
    The literal form is that of `before`."""
    title, fields, batch = AUTOENCODER
    batch *= t.larger
    fast = MaskedAutoencoder(MAEConfig(**fields))
    models = {"fast, before": fast, "literal (released code)": literal(fast)}
    models["fast, after"] = MaskedAutoencoder(MAEConfig(**fields, mask_tokens="after"))
    for when in ("before", "after"):
        vit = MAEConfig(**equal_vit(fields), mask_tokens=when)
        models[f"transformer, {when}"] = MaskedAutoencoder(vit)
    inputs = batch_for(fast.config, batch, t.device)
    t.compare(f"{title}, batch {batch}", "images", batch, models, partial(loss_of, inputs))


def bench_gpt(t, c):
    """Steps with clipping and AdamW: fast, literal, and the transformer of that width."""
    config = TextConfig(arch=c.arch, width=c.width, heads=max(1, c.width // 64), layers=c.layers,
                        context=c.context, vocab_size=c.vocab_size)
    fast = LanguageModel(config)
    models = {f"{c.arch}, fast": fast, f"{c.arch}, literal": literal(fast)}
    if c.arch != "transformer":
        models["transformer"] = LanguageModel(replace(config, arch="transformer", layer_scale=None))
    inputs = batch_for(config, c.batch_size, t.device)
    t.compare(f"{c.batch_size} x {c.context} x {c.width}, {c.layers} layers", "tokens",
              inputs[0].numel(), models, partial(loss_of, inputs), optimize=True)


# B, n, d, K: CRATE-Tiny and CRATE-Base at 224 px, the cifar10 preset
SHAPES = [(16, 197, 384, 6), (16, 197, 768, 12), (64, 65, 384, 6)]


def bench_operator(t, c, make):
    """Fast against literal for one operator: make(d, K, n) returns it and its multiply-adds."""
    for B, n, d, K in SHAPES:
        B *= t.larger
        module, multiply_adds = make(d, K, n)
        Z = torch.randn(B, n, d, device=t.device, requires_grad=True)
        calls = {"fast": module, "literal (released code)": literal(module)}
        t.compare(f"{B} x {n} x {d}, {K} heads", "tokens", B * n, calls,
                  lambda operator: operator(Z), [Z], torch.randn_like(Z),
                  flops=lambda operator: 6 * multiply_adds)


def bench_ista(t, c):
    """One matmul against three."""
    bench_operator(t, c, lambda d, K, n: (ISTA(d), ISTA(d).multiply_adds()))


def bench_attention(t, c):
    """Fused attention against an explicit softmax."""
    bench_operator(t, c, lambda d, K, n: (MSSA(d, K), MSSA(d, K).multiply_adds(n) / n))


def bench_head(t, c):
    """linear_cross_entropy in blocks of two sizes, and the cross-entropy of all logits at once."""
    Z = torch.randn(c.tokens, c.width, device=t.device).requires_grad_()
    W = torch.randn(c.vocab_size, c.width, device=t.device).mul_(0.02).requires_grad_()
    y = torch.randint(c.vocab_size, (c.tokens,), device=t.device)
    calls = {"fast": linear_cross_entropy,
             "fast, blocks of 1024": partial(linear_cross_entropy, block=1024),
             "literal": cross_entropy_at_once}
    t.compare(f"{c.tokens} x {c.width}, vocabulary {c.vocab_size}", "tokens", c.tokens, calls,
              lambda loss: loss(Z, W, y), [Z, W], flops=lambda loss: 6 * W.numel())


# What the scripts want to know of a data set; mean and deviation do not matter for time
PIXELS = dict(mean=[0.5] * 3, std=[0.25] * 3)


def simdino_views(t, c, pixels):
    """views(step): those of uint8 images as train_simdino.py makes them."""
    make = partial(train_simdino.make_views, c=c, data=SimpleNamespace(**PIXELS))
    if t.compile:
        make = augment.compiled(make, t.device)
    rows = slice(0, len(pixels))
    return lambda step: make(pixels, *train_simdino.random_numbers(c, step, rows, t.device))


def simdino_step(t, c):
    """learn(views): the rest of a SimDINO step: teacher, student, loss, update, moving average."""
    student = train_simdino.build_model(c).to(t.device)
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    params, averages = list(student.parameters()), list(teacher.parameters())
    optimizer = make_optimizer(student, c.optimizer)
    gamma = train_simdino.simdino_gamma(c.output, c.batch_size)
    if t.compile:
        student.compile()
        teacher.compile()

    def learn(views):
        with torch.no_grad(), t.autocast():
            target, _ = teacher(views[:1])
        with t.autocast():
            features, _ = student(views)
        distance = train_simdino.squared_distance(features, target)
        rate = train_simdino.global_coding_rate(features[:2], c.eps, t.processes)
        (distance - gamma * rate).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        optim.ema_update(averages, params, c.momentum)
    return learn


def bench_simdino(t, c):
    """A whole step at 32 px (two global views, and --local_views of 16 px), and the views alone."""
    sizes = ("arch", "width", "heads", "layers", "local_views", "batch_size")
    config = preset(train_simdino, "cifar10", drop_path=0.0, **{k: getattr(c, k) for k in sizes})
    pixels = torch.randint(256, (c.batch_size, 32, 32, 3), dtype=torch.uint8, device=t.device)
    learn, views = simdino_step(t, config), map(simdino_views(t, config, pixels), itertools.count())
    times = t.seconds({"whole step": lambda: learn(next(views)), "the views": lambda: next(views)})
    for name, seconds in times.items():
        t.add(f"{c.arch}, {c.batch_size} images", name, ms=1e3 * seconds,
              share=seconds / times["whole step"], images_per_s=c.batch_size / seconds)


def whole_numbers(text, flag):
    """"128,256" as [128, 256], rising. Raises UserError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--{flag}={text}: expected whole numbers with commas between them, "
                               "as in 128,256,512")
    return sorted({int(word) for word in words})


def fitted_exponent(lengths, seconds):
    """The least-squares slope of log seconds over log length, for the longer half (at least two;
    None of one)."""
    first = max(0, min(len(lengths) // 2, len(lengths) - 2))
    x, y = np.log(lengths[first:]), np.log(seconds[first:])
    return float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else None


def bench_length(t, c):
    """Forward and backward of TSSA, MSSA and MHSA, with and without a causal mask. The exponent is
    that of the longer half of the lengths."""
    lengths = whole_numbers(c.lengths, "lengths")
    operators = {}
    for causal, suffix in ((False, ""), (True, ", causal")):
        size = dict(d=c.width, heads=c.heads, causal=causal)
        operators[f"TSSA{suffix}"] = TSSA(context=lengths[-1], **size).to(t.device)
        operators[f"MSSA{suffix}"] = MSSA(**size).to(t.device)
        operators[f"MHSA{suffix}"] = MHSA(**size).to(t.device)
    times = {name: [] for name in operators}
    for n in lengths:
        Z = torch.randn(c.batch_size, n, c.width, device=t.device, requires_grad=True)
        gradient, steps = torch.randn_like(Z), {}
        for name, operator in operators.items():
            leaves = [Z, *operator.parameters()]
            steps[name] = timed_step(partial(operator, Z), leaves, t.autocast, gradient)
        for name, seconds in t.seconds(steps).items():
            times[name].append(seconds)
    title = f"{c.batch_size} x n x {c.width}, {c.heads} heads"
    t.add(title, "tokens", lengths=lengths)
    for name, seconds in times.items():
        t.add(title, f"{name}, ms", ms=[1e3 * s for s in seconds],
              exponent=fitted_exponent(lengths, seconds))


def cache_bytes(state):
    """Bytes of what generation keeps for the tokens read; of a buffer, the part in use."""
    return sum(kept[:, :, :layer["n"]].nbytes for layer in state for kept in tensors([layer]))


@torch.no_grad()
def bench_generate(t, c):
    """The cache of every arch, in bytes a token and a sequence; of three archs also the time of one
    more token behind a prefix, with the cache and by reading everything again."""
    prefixes = whole_numbers(c.prefixes, "prefixes")
    context = prefixes[-1] + 1
    ids = torch.randint(c.vocab_size, (c.batch_size, context), device=t.device)
    title = f"{c.layers} layers, width {c.width}"
    models = {}

    def advance(arch, new, state):
        """One more call; `state` stays as it is, since each call gets copies of its dicts."""
        state = [dict(layer) for layer in state]
        with t.autocast():
            models[arch].advance(new, state)
        return state
    for arch in ARCHS:
        config = TextConfig(arch=arch, width=c.width, heads=max(1, c.width // 64), layers=c.layers,
                            context=context, vocab_size=c.vocab_size)
        models[arch] = LanguageModel(config).to(t.device).eval()
        state = advance(arch, ids[:, :prefixes[0]], [])
        size = cache_bytes(state) / c.batch_size
        growth = cache_bytes(advance(arch, ids[:, :1], state)) / c.batch_size - size
        t.add(title, arch, bytes_per_token=growth, bytes_constant=size - growth * prefixes[0])
    times = {}
    for n in prefixes:
        variants = {}
        for arch in ("crate", "tost", "transformer"):
            state = advance(arch, ids[:, :n], [])
            variants[f"{arch}, cached"] = partial(advance, arch, ids[:, n:n + 1], state)
            variants[f"{arch}, uncached"] = partial(advance, arch, ids[:, :n + 1], [])
        for name, seconds in t.seconds(variants).items():
            times.setdefault(name, []).append(1e3 * seconds)
    t.add(title, "one more token behind", prefixes=prefixes)
    for name, ms in times.items():
        t.add(title, f"{name}, ms", ms=ms)


# -------------------------------------------------------------------------------------------------
# Long range
# -------------------------------------------------------------------------------------------------

class SequenceClassifier(LanguageModel):
    """A bidirectional language model with a linear head on the mean of its tokens.

    model(ids) takes (B, n) and returns logits (B, classes). Layers treat padding (ids equal to
    `pad`) as any other token; the mean leaves it out."""

    def __init__(self, config, classes, pad):
        super().__init__(config)
        self.pad = pad
        self.head = nn.Linear(config.width, classes)

    def forward(self, ids):
        Z = self.norm(run_layers(self.layers, self.tokens(ids)))
        kept = (ids != self.pad)[..., None]
        return self.head((Z * kept).sum(1) / kept.sum(1))


def non_embedding(config):
    """Parameters of a LanguageModel except for the embedding of tokens and positions."""
    with torch.device("meta"):
        return LanguageModel(config).count() - config.vocab_size * config.width


def equal_config(arch, width, head_dim=32, **fields):
    """The bidirectional TextConfig of `arch` with as many non-embedding parameters as crate of this
    width and the same depth: within 3 % from width 64 on. Heads have about head_dim features."""
    def config(arch, width):
        heads = max(1, round(width / head_dim))
        return TextConfig(arch=arch, width=width, heads=heads, head_dim=round(width / heads),
                          causal=False, **fields)
    target = non_embedding(config("crate", width))
    # counts grow as width^2
    guess = round(width * (target / non_embedding(config(arch, width))) ** 0.5)
    near = [config(arch, w) for w in range(max(1, guess - 4), guess + 5)]
    return min(near, key=lambda found: abs(non_embedding(found) - target))


def sequences(c):
    """The task: token ids x (N, n), labels y (N,), those held out, vocab_size, classes, pad."""
    if c.task == "listops":
        x, y = text.listops(c.examples or 10_000, derive_seed(c.seed, "train"), c.length)
        x_test, y_test = text.listops(c.held_out, derive_seed(c.seed, "test"), c.length)
        longest = int((torch.cat([x, x_test]) != 0).any(0).sum())       # rarely all of --length
        return SimpleNamespace(x=x[:, :longest], y=y, x_test=x_test[:, :longest], y_test=y_test,
                               vocab_size=len(text.LISTOPS_VOCAB), classes=10, pad=0)
    data, n, m = images.load("cifar10", c.data_dir), c.examples, c.held_out
    return SimpleNamespace(x=torch.from_numpy(text.grey_pixels(data.train_images[:n])),
                           y=torch.from_numpy(data.train_labels[:n]),
                           x_test=torch.from_numpy(text.grey_pixels(data.val_images[:m])),
                           y_test=torch.from_numpy(data.val_labels[:m]),
                           vocab_size=256, classes=len(data.classes), pad=-1)


@torch.no_grad()
def accuracy(model, x, y, batch_size, t):
    """The share of sequences x (N, n) that the model puts in their class y (N,)."""
    right = 0
    for ids, labels in zip(x.split(batch_size), y.split(batch_size)):
        with t.autocast():
            chosen = model(ids.long().to(t.device)).argmax(-1)
        right += (chosen.cpu() == labels).sum().item()
    return right / len(x)


def bench_longrange(t, c):
    """[B] Table 7.10 in small: tost, crate and transformer of equal parameters and depth, trained
    on the same batches, in turn."""
    data = sequences(c)
    n = data.x.shape[1]
    models, optimizers = {}, {}
    for arch in ("tost", "crate", "transformer"):
        torch.manual_seed(derive_seed(c.seed, "weights"))
        config = equal_config(arch, c.width, layers=c.layers, context=n, vocab_size=data.vocab_size)
        model = models[arch] = SequenceClassifier(config, data.classes, data.pad).to(t.device)
        optimizers[arch] = optim.make_optimizer(model, "adamw", c.lr, c.weight_decay, (0.9, 0.95))
        if t.compile:
            model.compile()
    schedule = optim.warmup_cosine(c.lr, c.steps, c.steps // 10)
    batches = images.index_batches(len(data.x), c.batch_size, c.seed)
    losses, seconds = {arch: [] for arch in models}, {arch: [] for arch in models}
    tenth = max(1, c.steps // 10)
    for step in range(c.steps):
        index = torch.from_numpy(next(batches))
        x, y = data.x[index].long().to(t.device), data.y[index].to(t.device)
        for arch, model in models.items():
            optim.set_lr(optimizers[arch], schedule[step])
            learn = timed_step(lambda: F.cross_entropy(model(x), y), model.parameters(), t.autocast,
                               optimizer=optimizers[arch], clip=1.0)
            seconds[arch].append(seconds_of(lambda: losses[arch].append(learn()), t.device))
        if (step + 1) % tenth == 0 or step + 1 == c.steps:
            recent = {arch: torch.stack(losses[arch][-tenth:]).mean().item() for arch in models}
            shown = (f"{arch} {loss:.3f}" for arch, loss in recent.items())
            print(f"step {step + 1}/{c.steps}: loss", *shown, flush=True)
    for arch, model in models.items():
        right = accuracy(model, data.x_test, data.y_test, c.batch_size, t)
        t.add(f"{c.task}, {n} tokens", f"{arch} of width {model.config.width}",
              non_embedding=non_embedding(model.config), loss=recent[arch], accuracy=right,
              ms=1e3 * statistics.median(seconds[arch][1:]))      # the first compiles, warms up


# -------------------------------------------------------------------------------------------------
# Around the model: data and loop
# -------------------------------------------------------------------------------------------------

def one_by_one(pixels, crops, batch, device, workers=0):
    """Endless: batches as torchvision makes them, a tensor for every function in `crops`."""
    loader = torch.utils.data.DataLoader(
        range(len(pixels)), batch, shuffle=True, drop_last=True, num_workers=workers,
        prefetch_factor=4 if workers else None, persistent_workers=workers > 0,
        collate_fn=partial(by_pillow, pixels, crops))
    while True:
        for views in loader:
            yield [x.to(device) for x in views]


def by_pillow(pixels, crops, index):
    """Images `index` of (N, H, W, 3), each cropped, flipped and normalized by itself."""
    def view(crop, i):
        image = crop(Image.fromarray(pixels[i]))
        if torch.rand(()) < 0.5:
            image = ImageOps.mirror(image)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return (x.float() / 255 - 0.5) / 0.25
    return [torch.stack([view(crop, i) for i in index]) for crop in crops]


def window(size, padding, image):
    """torchvision's RandomCrop with padding."""
    image = ImageOps.expand(image, padding)
    left, top = (int(torch.randint(0, side - size + 1, ())) for side in image.size)
    return image.crop((left, top, left + size, top + size))


def resized(size, area, image):
    """torchvision's RandomResizedCrop; the boxes are augment.random_boxes'."""
    rng = augment.BatchRandom(int(torch.randint(2 ** 31, ())), 1)
    box = augment.random_boxes(rng, image.height, image.width, scale=area)[0]
    top, left, height, width = box.tolist()
    corners = (left, top, left + width, top + height)
    return image.resize((size, size), Image.Resampling.BICUBIC, corners)


def windows_one_by_one(tokens, batch, context):
    """nanoGPT's batch: every window converted by itself, inputs and targets alike."""
    starts = torch.randint(len(tokens) - context, (batch,))
    return [torch.stack([torch.from_numpy(tokens[i + shift:i + shift + context].astype(np.int64))
                         for i in starts]) for shift in (0, 1)]


def batched(t, pixels, c, batch=None, workers=0, resident=None):
    """Endless: batches as train_vit.py makes them with the config c."""
    batch = batch or c.batch_size
    data = SimpleNamespace(image_size=pixels.shape[1], **PIXELS)
    source = images.Images(pixels, np.zeros(len(pixels), np.int64), t.device, resident)
    augmentation = partial(train_vit.augmented, c=c, data=data)
    if t.compile:
        augmentation = augment.compiled(augmentation, t.device)
    index = images.index_batches(len(pixels), batch, 0)
    for step, (found, _) in enumerate(source.batches(index, workers)):
        yield augmentation(found, augment.BatchRandom(step, batch, device=t.device))


def compare_feeds(t, title, step, feeds, ahead=1):
    """Lines for endless streams of batches, and for the training step that they feed. A timed call
    takes `ahead` batches."""
    variants = {name: lambda s=s: [next(s) for _ in range(ahead)] for name, s in feeds.items()}
    times = t.seconds(variants | {"the bare step": step}, drain=ahead > 1)
    for name in feeds:
        times[name] /= ahead
    for name, seconds in times.items():
        t.add(title, name, ms=1e3 * seconds, share=seconds / times["the bare step"])


def bench_data(t, c):
    """Reading and augmenting a batch: ours, one by one, and as a share of the bare training step of
    that batch. Models and batches are those of the other tables.

    One by one means crop and flip, without colours. Large images come from a new memory map, and so
    from the page cache."""
    device, counter = t.device, itertools.count()
    small, _, _ = images.draw_shapes(2048, 0)
    vit = preset(train_vit, "cifar10")
    crop = replace(vit, randaugment=0)
    area = preset(train_mae, "cifar10").crop_area

    _, fields, batch = IMAGE_MODELS[1]
    batch *= t.larger
    step = training_step(t, ImageClassifier(ImageConfig(**fields)), batch)
    compare_feeds(t, f"vit, {batch} of 32 px", step, {
        "batched: crop, flip, RandAugment": batched(t, small, vit, batch),
        "batched: crop, flip": batched(t, small, crop, batch),
        "one by one: crop, flip": one_by_one(small, [partial(window, 32, 4)], batch, device)})

    _, fields, batch = AUTOENCODER
    batch *= t.larger
    step = training_step(t, MaskedAutoencoder(MAEConfig(**fields)), batch)
    compare_feeds(t, f"mae, {batch} of 32 px", step, {
        "batched: resized crop, flip":
            batched(t, small, replace(crop, crop="resized", crop_area=area), batch),
        "one by one: resized crop, flip":
            one_by_one(small, [partial(resized, 32, (area, 1))], batch, device)})

    config = preset(train_simdino, "cifar10", width=128, heads=4, layers=4, drop_path=0.0,
                    local_views=4, batch_size=64 * t.larger)
    batch = config.batch_size
    pixels = torch.from_numpy(small[:batch]).to(device)
    step = bare_step(t, train_simdino, config)
    crops = [partial(resized, 32, (0.4, 1))] * 2 + [partial(resized, 16, (0.1, 0.4))] * 4
    compare_feeds(t, f"simdino, {batch} x (2 + 4) views", step, {
        "batched: views with colours": map(simdino_views(t, config, pixels), counter),
        "one by one: resized crop, flip": one_by_one(small, crops, batch, device)})

    size, batch = ("base", 128) if t.cuda else ("tiny", 16)
    large = np.random.default_rng(0).integers(256, size=(c.pictures, 256, 256, 3), dtype=np.uint8)
    vit, crop = preset(train_vit, "imagenet"), partial(window, 224, 0)
    step = training_step(t, ImageClassifier(image_config(size)), batch)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/large.npy", large)
        large = np.load(f"{folder}/large.npy", mmap_mode="r")
        compare_feeds(t, f"vit, {batch} of 256 px, {c.workers} workers", step, {
            "batched: crop, flip": batched(t, large, vit, batch, c.workers, resident=False),
            "one by one: crop, flip": one_by_one(large, [crop], batch, device, c.workers)},
            ahead=max(1, 4 * c.workers))

    gpt = preset(train_gpt, "pydoc")
    batch, n = gpt.batch_size, gpt.context
    config = TextConfig(**set_fields(TextConfig, gpt, vocab_size=96))
    step = training_step(t, LanguageModel(config), batch, clip=1.0)
    tokens = np.random.default_rng(0).integers(96, size=2 ** 22, dtype=np.uint16)
    ours = (text.batch(tokens, i, batch, n, 0) for i in counter)
    theirs = (windows_one_by_one(tokens, batch, n) for _ in counter)
    compare_feeds(t, f"gpt, {batch} x {n} tokens", step, {
        "one draw, one array": ([x.to(device) for x in pair] for pair in ours),
        "one by one": ([x.to(device) for x in pair] for pair in theirs)})


# script: (preset, batch) on cuda, and elsewhere
SCRIPTS = {train_vit: (("cifar10", 512), ("cifar10-small", 128)),
           train_mae: (("cifar10", 256), ("cifar10-small", 128)),
           train_simdino: (("cifar10", 512), ("cifar10-small", 128)),
           train_gpt: (("shakespeare", 64), ("pydoc", 32))}


def bare_step(t, script, c):
    """Forward, loss, backward and update of a script's model on one batch, over and over; of
    SimDINO with its moving average."""
    if script is train_simdino:
        pixels = torch.randint(256, (c.batch_size, 32, 32, 3), dtype=torch.uint8, device=t.device)
        return partial(simdino_step(t, c), simdino_views(t, c, pixels)(0))
    about = []
    if script is train_vit:
        about = [len(images.SHAPES)]
    if script is train_gpt:
        about = [text.load(c.data, c.data_dir).tokenizer]
    return training_step(t, script.build_model(c, *about), c.batch_size, c.optimizer)


def bench_loop(t, c):
    """A step of each script at small settings, by its own rate, and the bare step of its model.

    What the script adds counts: reading, augmenting (SimDINO's views too), masks, clipping, the
    moving average of train_vit.py, schedules, checks of the loss, log lines. Its first step,
    evaluation and checkpoints do not."""
    small = 0 if t.cuda else 1
    n = c.steps * max(settings[small][1] for settings in SCRIPTS.values())
    with tempfile.TemporaryDirectory() as folder:
        prepare("shapes", cache=folder, drawn=(n, 100))
        for script, settings in SCRIPTS.items():
            name, batch = settings[small]
            flags = dict(data="shapes", epochs=c.steps / (n // batch))
            if script is train_gpt:
                flags = dict(data="pydoc", steps=c.steps, sample=0)
            flags |= dict(overwrite=True, out_dir=f"{folder}/{script.__name__}", data_dir=folder,
                          device=t.device.type, dtype=c.dtype, compile=t.compile, batch_size=batch,
                          optimizer="adamw")                # as the bare step
            config = preset(script, name, **flags)
            argv = [name, *(f"--{flag}={value}" for flag, value in flags.items())]
            bare = bare_step(t, script, config)
            bare()
            seconds = {"the script": [], "the bare step": []}
            for _ in range(c.repeats):
                quiet = io.StringIO()
                with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
                    done = script.main(argv)
                rate = done.get("examples_per_s") or done["tokens_per_s"] / config.context
                seconds["the script"].append(batch / rate)
                total = seconds_of(lambda: [bare() for _ in range(c.steps - 1)], t.device)
                seconds["the bare step"].append(total / (c.steps - 1))
            times = {variant: statistics.median(s) for variant, s in seconds.items()}
            for variant, s in times.items():
                t.add(f"{script.__name__}.py {name}, {batch}", variant, ms=1e3 * s,
                      overhead=s / times["the bare step"] - 1)


# -------------------------------------------------------------------------------------------------
# Optimizers
# -------------------------------------------------------------------------------------------------

def optimizer_models(cuda):
    """{title: (model, batch)} whose updates are timed; on CUDA the papers' Base sizes too."""
    small = preset(train_gpt, "pydoc")
    fields = set_fields(ImageConfig, preset(train_vit, "cifar10-small"), classes=10)
    found = {"cifar10-small preset, batch 128": (ImageClassifier(ImageConfig(**fields)), 128),
             "pydoc preset, 32 x 128": (LanguageModel(text_config(None, **set_fields(
                 TextConfig, small, vocab_size=96))), small.batch_size)}
    if cuda:
        found["CRATE-Base, 224 px, batch 64"] = (ImageClassifier(image_config("base")), 64)
        found["causal CRATE-Base, 16 x 1024"] = (LanguageModel(text_config("base")), 16)
    return found


def bench_optimizer(t, c):
    """Forward and backward, then the update alone with each optimizer, on the same gradients.

    Muon's cost is its five Newton-Schulz steps, about 15 d^3 multiply-adds for a d x d matrix,
    whatever the batch: its share falls as the batch grows."""
    for title, (model, batch) in optimizer_models(t.cuda).items():
        variants = {"forward and backward": training_step(t, model, batch, optimizer=None)}
        for name in ("adamw", "lion", "muon"):
            trained = copy.deepcopy(model)
            loss_of(batch_for(trained.config, 2, t.device), trained).backward()
            optimizer = make_optimizer(trained, name, 1e-6, 0.1, (0.9, 0.95))
            variants[name] = optimizer.step
        times = t.seconds(variants)
        rest = times.pop("forward and backward")
        t.add(title, "forward and backward", ms=1e3 * rest)
        for name, seconds in times.items():
            t.add(title, name, ms=1e3 * seconds, share=seconds / (rest + seconds))


# PyTorch's operators by what they are for; what no pattern names is elementwise
KINDS = {"matmuls": r"mm|addmm", "attention": r"bmm|_softmax|_softmax_backward_data|.*attention.*",
         "LayerNorm": r".*layer_norm.*", "casts and copies": r"copy_|cat|fill_|zero_",
         "optimizer": r"_fused_.*|Optimizer.*"}


def bench_profile(t, c):
    """Where the time of a training step goes: forward, backward, AdamW. The profiler's own cost is
    part of each operator's time, so only the shares mean something."""
    for title, (model, batch) in optimizer_models(t.cuda).items():
        step = training_step(t, model, batch)
        step()
        with torch.profiler.profile() as profile:
            for _ in range(c.repeats):
                step()
        times = dict.fromkeys([*KINDS, "elementwise, other"], 0.0)
        for event in profile.key_averages():
            name = event.key.removeprefix("aten::")
            kinds = (kind for kind, names in KINDS.items() if re.fullmatch(names, name))
            kind = next(kinds, "elementwise, other")
            times[kind] += event.self_device_time_total if t.cuda else event.self_cpu_time_total
        for kind, us in times.items():
            t.add(title, kind, ms=us / 1e3 / c.repeats, share=us / sum(times.values()))


# -------------------------------------------------------------------------------------------------
# Scale: steps on many GPUs, computed
# -------------------------------------------------------------------------------------------------

def ring_bytes(size, n):
    """Bytes that each of n processes sends to sum a buffer of `size` bytes around a ring."""
    return 2 * (n - 1) / n * size


def predicted_step(flops, parameters, gpus, nodes, passes, c):
    """A step of `flops` in all on `nodes` x `gpus`, in `passes` micro-batches.

    float32 gradients are summed around a ring within each node, then each GPU's share of them
    around a ring across the nodes. The backward of the last pass, two thirds of its time, hides
    what is sent meanwhile; the last bucket is sent when it has ended."""
    size = 4 * parameters
    inside, across = ring_bytes(size, gpus), ring_bytes(size / gpus, nodes)
    compute = flops / (gpus * nodes) / (c.mfu * c.peak * 1e12)
    exchange = (inside / c.nvlink + across / c.network) / (c.link_share * 1e9)
    last_bucket = exchange * min(1, c.bucket * 1e6 / size)
    exposed = max(exchange - 2 / 3 * compute / passes, last_bucket)
    return dict(tflop=flops / 1e12, sent_mb=(inside + across) / 1e6, compute_ms=1e3 * compute,
                exchange_ms=1e3 * exchange, exposed_ms=1e3 * exposed,
                efficiency=compute / (compute + exposed))


def simdino_flops(c):
    """Operations of a step of SimDINO for one image."""
    with torch.device("meta"):
        student = train_simdino.build_model(c)
        config = student.encoder.config
        large = ImageClassifier(config).train_flops()
        small = ImageClassifier(replace(config, image_size=c.local_size)).train_flops()
    projector = 6 * sum(p.numel() for p in student.projector.parameters() if p.ndim == 2)
    # the student sees every view; the teacher, whose forward is a third of a step, the global two
    return (2 + 2 / 3) * (large + projector) + c.local_views * (small + projector)


def papers_settings():
    """(name, FLOPs of an item, parameters, items a step, unit, micro-batches on n GPUs) of the
    presets that have the papers' sizes."""
    vit, mae = preset(train_vit, "imagenet"), preset(train_mae, "imagenet")
    dino, gpt = preset(train_simdino, "imagenet"), preset(train_gpt, "openwebtext")
    with torch.device("meta"):
        classifier, autoencoder = train_vit.build_model(vit, 1000), train_mae.build_model(mae)
        student, language = train_simdino.build_model(dino), LanguageModel(text_config(gpt.size))
    return [("train_vit imagenet", classifier.train_flops(), count(classifier),
             vit.batch_size, "images", lambda n: 1),
            ("train_mae imagenet", autoencoder.train_flops(), count(autoencoder),
             mae.batch_size, "images", lambda n: math.ceil(mae.batch_size / n / mae.micro_batch)),
            ("train_simdino imagenet", simdino_flops(dino), count(student), dino.batch_size,
             "images", lambda n: 1),
            ("train_gpt openwebtext", gpt.context * language.train_flops(), count(language),
             gpt.batch_size, "sequences",
             lambda n: math.ceil(gpt.batch_size / n / gpt.micro_batch))]


def bench_scale(t, c):
    """A step of the papers' settings on 1, 8 and 8 x 8 GPUs: FLOPs / (MFU x peak), and the part of
    the all-reduce of float32 gradients that the backward pass does not hide. --check also compares
    predictions with measurements of this machine.

    Peak and links are the H100's data sheet and its usual network; --mfu and --link_share are
    assumptions. Launching kernels, the optimizer and reading data are left out: where a step takes
    a few milliseconds, the efficiency is an upper bound."""
    for name, flops, parameters, batch, unit, passes_on in papers_settings():
        for nodes, gpus in ((1, 1), (1, 8), (8, 8)):
            passes = passes_on(nodes * gpus)
            step = predicted_step(batch * flops, parameters, gpus, nodes, passes, c)
            ms = step["compute_ms"] + step["exposed_ms"]
            t.add(name, f"{nodes} x {gpus} GPUs", **step, **{f"{unit}_per_s": 1e3 * batch / ms})
    if c.check:
        check_predictions(t, c)


def check_predictions(t, c):
    """A step predicted from another model's FLOP/s, an all-reduce from another size's bytes/s, and
    a step of two processes from the step of one and that rate."""
    def add(name, predicted, measured):
        t.add("check", name, predicted_ms=1e3 * predicted, measured_ms=1e3 * measured,
              ratio=measured / predicted)
    steps, flops = {}, []
    for title, fields, batch in IMAGE_MODELS:
        model = ImageClassifier(ImageConfig(**fields))
        steps[title] = training_step(t, model, batch, optimizer=None)
        flops.append(batch * model.train_flops())
    (known, seconds), (other, measured) = t.seconds(steps).items()
    add(f"{other}, from {known}", seconds * flops[1] / flops[0], measured)

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(one_of_two, (folder, IMAGE_MODELS[1][1], c.repeats), nprocs=2)
        two = SimpleNamespace(**json.loads(Path(folder, "seconds").read_text()))
    size = 4 * two.parameters
    rate = ring_bytes(2 ** 27, 2) / two.large
    predicted = ring_bytes(size, 2) / rate
    add(f"all-reduce of {size / 1e6:.0f} MB, from 134 MB", predicted, two.gradients)
    here = replace(c, peak=two.flops / two.alone / 1e12, mfu=1.0, nvlink=rate / 1e9, link_share=1.0)
    step = predicted_step(2 * two.flops, two.parameters, 2, 1, 1, here)
    predicted = (step["compute_ms"] + step["exposed_ms"]) / 1e3
    add("2 processes, from 1 and that rate", predicted, two.together)


def one_of_two(rank, folder, fields, repeats, batch=8):
    """A process of one thread: its step alone (while the other takes one too), its step with DDP,
    and two all-reduces; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    t = Table(Flags(device="cpu"), Processes("cpu"))
    model = ImageClassifier(ImageConfig(**fields))
    ddp = nn.parallel.DistributedDataParallel
    parallel = ddp(copy.deepcopy(model), gradient_as_bucket_view=True)
    parallel.config, n = model.config, count(model)
    gradients, large = torch.zeros(n), torch.zeros(2 ** 25)
    seconds = alternate({
        "alone": training_step(t, model, batch, optimizer=None),
        "together": training_step(t, parallel, batch, optimizer=None),
        "gradients": partial(distributed.all_reduce, gradients),
        "large": partial(distributed.all_reduce, large)}, t.device, repeats)
    if rank == 0:
        seconds |= dict(parameters=n, flops=batch * model.train_flops())
        Path(folder, "seconds").write_text(json.dumps(seconds))
    distributed.destroy_process_group()


# -------------------------------------------------------------------------------------------------
# A new GPU: does everything run, and how fast
# -------------------------------------------------------------------------------------------------

# Short runs on generated data, and what reads their checkpoints; {} is the folder of the runs
SHORT = dict(
    vit="train_vit.py shapes --epochs=1",
    mae="train_mae.py shapes --epochs=1",
    simdino="train_simdino.py shapes --epochs=1",
    dino="train_simdino.py shapes --epochs=1 --method=dino",
    gpt="train_gpt.py pydoc --steps=8 --sample=20",
    masked="train_gpt.py pydoc --steps=8 --objective=masked")
READERS = dict(
    accuracy="evaluate.py accuracy --ckpt={}/vit-crate-eager/best.pt",
    linear="evaluate.py linear --ckpt={}/mae-crate-eager/best.pt",
    knn="evaluate.py knn --ckpt={}/simdino-crate-eager/best.pt",
    lm="evaluate.py lm --ckpt={}/gpt-crate-eager/best.pt",
    layers="analyze.py layers --ckpt={}/vit-crate-eager/best.pt --samples=20 --out={}/layers",
    sample="sample.py --ckpt={}/gpt-crate-eager/best.pt --tokens=20",
    fill="sample.py --ckpt={}/masked-crate-eager/best.pt --fill=a___b")


def trials(cuda):
    """Two stages of {name: words}: training runs; some of them resumed, and READERS. On CUDA all
    archs, eager and compiled, and each script once in float32."""
    archs, forms = ("crate", "tost"), dict(eager="--compile=false")
    if cuda:
        archs = ARCHS
        forms |= dict(compiled="--compile=true", float32="--compile=true --dtype=float32")
    runs, resumed = {}, {}
    for name, words in SHORT.items():
        for arch, form in itertools.product(archs if name in ("vit", "gpt") else ["crate"], forms):
            run = f"{name}-{arch}-{form}"
            if form != "float32" or arch == "crate":
                runs[run] = (f"{words} --arch={arch} --width=128 --heads=2 --layers=2 "
                             f"{forms[form]} --out_dir={{}}/{run}")
        last = f"{name}-crate-{'compiled' if cuda else 'eager'}"
        longer = "--steps=16" if "--steps" in words else "--epochs=2"
        resumed[f"{last}-resumed"] = f"{runs[last]} {longer} --resume"
    return runs, resumed | READERS


def attempt(c, device, folder, trial):
    """(trial, how it went) of one (name, words), in a process of its own."""
    name, words = trial
    command = [sys.executable, *(word.format(folder) for word in words.split()),
               f"--device={device.type}", f"--data_dir={folder}"]
    threads = str(max(1, os.cpu_count() // c.jobs))
    environment = dict(OMP_NUM_THREADS=threads, TORCHINDUCTOR_COMPILE_THREADS=threads) | os.environ
    path, start = Path(folder, f"{name}.log"), time.perf_counter()
    with path.open("w") as log:
        try:
            status = subprocess.run(command, cwd=ROOT, env=environment, timeout=c.limit,
                                    stdin=subprocess.DEVNULL, stdout=log, stderr=log).returncode
        except subprocess.TimeoutExpired:
            status = f"stopped after {c.limit} s"
    end = told(status, path.read_text(errors="replace")) if status else dict(outcome="ok")
    return trial, dict(seconds=time.perf_counter() - start) | end


def told(status, output):
    """The outcome of a failure, with the last error of the output, whose end goes to --json."""
    lines = [line for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Unsupported)\b", line)]
    return dict(outcome=f"FAILED ({status}) {(errors or lines)[-1]}", output=output[-8000:])


def whole_steps(t):
    """{title: (unit, items a step, FLOPs of one, function that makes the step)}; tiny on a CPU."""
    small, few, n = dict(width=64, heads=2, layers=1), dict(batch_size=4), 32
    if t.cuda:
        small, few, n = {}, {}, 1024
    vit, mae, dino = (preset(script, "cifar10", **small, **few)
                      for script in (train_vit, train_mae, train_simdino))
    pixels, _, _ = images.draw_shapes(2 * vit.batch_size, 0)
    crate, gpt2 = (LanguageModel(text_config("base", arch, context=n, **small))
                   for arch in ("crate", "transformer"))
    models = {
        "train_vit cifar10, augmented": (train_vit.build_model(vit, 10), vit.batch_size,
                                         batched(t, pixels, vit)),
        "CRATE-B at 224 px": (ImageClassifier(image_config("base", **small)),
                              few.get("batch_size", 256)),
        "train_mae cifar10": (train_mae.build_model(mae), mae.batch_size),
        "causal CRATE-Base": (crate, 16),
        "GPT-2 as nanoGPT has it": (literal(gpt2), 16)}     # all logits, then their cross-entropy
    steps = {}
    for title, (model, batch, *feed) in models.items():
        unit, length = ("tokens", n) if isinstance(model, LanguageModel) else ("images", 1)
        steps[title] = (unit, batch * length, model.train_flops(),
                        partial(training_step, t, model, batch, "adamw", None, *feed))
    return steps | {"train_simdino cifar10": ("images", dino.batch_size, simdino_flops(dino),
                                              partial(bare_step, t, train_simdino, dino))}


def bench_gpu(t, c):
    """Every script for a few steps on generated data, then throughput and MFU of whole steps. What
    fails is listed, the rest goes on, and the exit status is 1.

    First all archs, eager and compiled, resumed, evaluated, sampled, each in a process of its own.
    Then forward, backward and optimizer, several steps at a time: the host may run ahead as in
    training. On a CPU both are a few tiny models."""
    with tempfile.TemporaryDirectory() as folder:
        prepare("shapes", cache=folder, drawn=(400, 100))
        text.load("pydoc", folder)
        stages = trials(t.cuda)
        print(f"{sum(map(len, stages))} commands, {c.jobs} at once; then whole steps")
        for stage in stages:
            with ThreadPool(c.jobs) as pool:
                ends = pool.imap_unordered(partial(attempt, c, t.device, folder), stage.items())
                for (name, words), end in ends:
                    t.add(name, words.split()[0], **end, command=words)
    n, peak = 10 if t.cuda else 1, peak_flops(t.device)
    for title, (unit, items, flops, make) in whole_steps(t).items():
        torch._dynamo.reset()           # else it compiles one forward only so many times
        try:
            step = make()
            seconds = t.seconds({title: lambda: [step() for _ in range(n)]})[title] / n
            rate = items / seconds
            end = {"ms": 1e3 * seconds, f"{unit}_per_s": rate,
                   "mfu": peak and rate * flops / peak, "outcome": "ok"}
        except Exception as error:
            end = told(type(error).__name__, traceback.format_exc())
        form = f"{'compiled' if t.compile else 'eager'}{'' if t.cuda else ', tiny'}"
        t.add(title, f"{items:,} {unit} a step, {form}", **end)


# -------------------------------------------------------------------------------------------------
# The commands and their flags
# -------------------------------------------------------------------------------------------------

COUNT, ABOVE, SHARE = dict(low=1), dict(above=0), dict(above=0, high=1)
# type, help, range
FLAGS = dict(
    repeats=(int, "turns of every variant", COUNT),
    jobs=(int, "commands at once", COUNT),
    limit=(int, "seconds that a command may take", COUNT),
    compile=(bool | None, "torch.compile: a row more, or all models; auto is cuda only", {}),
    arch=(str, "a row of model.py's table", dict(choices=tuple(ARCHS))),
    width=(int, "d", COUNT),
    heads=(int, "K", COUNT),
    layers=(int, "L", COUNT | dict(high=10_000)),
    context=(int, "tokens a sequence", dict(low=2)),
    batch_size=(int, "images or sequences a step", COUNT),
    vocab_size=(int, "V", dict(low=2)),
    tokens=(int, "tokens of the batch", COUNT),
    local_views=(int, "small views of an image", COUNT),
    lengths=(str, "numbers of tokens", {}),
    prefixes=(str, "numbers of tokens that came before", {}),
    pictures=(int, "images of 256 px in the memory map, 0.2 MB each", dict(low=256)),
    workers=(int, "processes that read the memory map", dict(low=0)),
    task=(str, "CIFAR-10 as 1,024 grey values, or generated ListOps",
          dict(choices=("pixels", "listops"))),
    length=(int, "longest ListOps expression, in tokens", dict(low=8)),
    examples=(int | None, "to train on; auto is all images, or 10,000 expressions", COUNT),
    held_out=(int, "examples to measure accuracy on", COUNT),
    steps=(int, "optimizer steps; the first ones are not timed", dict(low=3)),
    lr=(float, "AdamW's; warm-up over a tenth of the steps, cosine to 0", ABOVE),
    weight_decay=(float, "decoupled, on matrices only", dict(low=0)),
    seed=(int, "the same seed gives the same run", dict(low=0)),
    peak=(float, "TFLOP/s of a GPU: H100, bf16, dense", ABOVE),
    mfu=(float, "share of the peak that training reaches", SHARE),
    nvlink=(float, "GB/s each way between GPUs of a node: NVLink 4", ABOVE),
    network=(float, "GB/s each way to another node: 400 Gbit/s a GPU", ABOVE),
    link_share=(float, "share of these that an all-reduce reaches", SHARE),
    bucket=(float, "MB of gradients that DDP sends at once", ABOVE),
    check=(bool, "also compare predictions with measurements of this machine", {}))


@dataclasses.dataclass(kw_only=True)
class Flags(DeviceFlags):
    """The flags of every table."""
    json: str | None = option(None, "also write the table to this file")
    overwrite: bool = option(False, "replace the file that --json names")


def command(function, **defaults):
    """(dataclass of the flags, function). A default that is a pair means (on cuda, elsewhere)."""
    fields, auto = [], {}
    for name, default in defaults.items():
        kind, help, limits = FLAGS[name]
        if isinstance(default, tuple):
            auto[name] = default
            help += "; auto is {:,} on cuda, {:,} elsewhere".format(*default)
            kind, default = kind | None, None
        fields.append((name, kind, option(default, help, **limits)))
    namespace = dict(__doc__=function.__doc__, auto=auto)
    flags = dataclasses.make_dataclass("Flags", fields, bases=(Flags,), namespace=namespace,
                                       kw_only=True)
    return flags, function


COMPARED = dict(repeats=9, compile=None)
COMMANDS = dict(
    vit=command(bench_vit, **COMPARED),
    mae=command(bench_mae, **COMPARED),
    gpt=command(bench_gpt, **COMPARED, arch="crate", width=(768, 256), layers=(12, 4),
                context=(1024, 128), batch_size=(16, 32), vocab_size=(50304, 96)),
    ista=command(bench_ista, **COMPARED),
    attention=command(bench_attention, **COMPARED),
    head=command(bench_head, repeats=5, compile=None, width=(768, 256), tokens=(16_384, 4096),
                 vocab_size=50304),
    simdino=command(bench_simdino, repeats=9, compile=None, arch="crate", width=(384, 128), heads=4,
                    layers=(12, 4), local_views=4, batch_size=(512, 64)),
    length=command(bench_length, repeats=3, lengths="1024,2048,4096,8192,16384", width=256, heads=4,
                   batch_size=(16, 1)),     # 16, so that a GPU has work
    generate=command(bench_generate, repeats=9, prefixes="128,256,512,1024,2048,4096", width=256,
                     layers=4, batch_size=1,
                     vocab_size=512),       # small, so that the head does not hide the layers
    longrange=command(bench_longrange, task="pixels", width=128, layers=4, length=512,
                      examples=None, held_out=2000, steps=500, batch_size=16, lr=1e-3,
                      weight_decay=0.05, seed=0, compile=None),
    data=command(bench_data, repeats=9, compile=None, pictures=1024, workers=2),
    loop=command(bench_loop, repeats=3, steps=20, compile=None),
    optimizer=command(bench_optimizer, repeats=9, compile=None),
    profile=command(bench_profile, repeats=3, compile=None),
    scale=command(bench_scale, repeats=5, peak=989.0, mfu=0.4, nvlink=450.0, network=50.0,
                  link_share=0.8, bucket=25.0, check=False),
    gpu=command(bench_gpu, repeats=5, compile=None, jobs=(8, 2), limit=240))


def main(argv):
    """Makes one table, prints it, and returns its lines."""
    flags = {name: config for name, (config, _) in COMMANDS.items()}
    name, c = parse_command(flags, argv, __doc__)
    check_new("json", c.json, c.overwrite)
    processes = Processes(c.device)
    device = processes.device
    for field, (cuda, elsewhere) in c.auto.items():
        if getattr(c, field) is None:
            setattr(c, field, cuda if device.type == "cuda" else elsewhere)
    try:
        report = open(c.json, "a") if c.json else None      # before the measurement, not after
    except OSError as error:
        raise UserError(f"--json={c.json}: cannot write there ({error.strerror})") from None
    half = c.dtype == "bfloat16" or (c.dtype == "auto" and multiplies_bfloat16(device))
    matmul_flops = matmul_peak(device, torch.bfloat16 if half else torch.float32)
    machine = dict(device=device_name(device), torch=torch.__version__,
                   matmul_gflops_per_s=matmul_flops / 1e9)
    print("{device}, torch {torch}, matmul {matmul_gflops_per_s:,.0f} GFLOP/s".format(**machine))
    table = Table(c, processes, matmul_flops, report, dict(command=name, **machine))
    COMMANDS[name][1](table, c)
    if report:
        report.close()
    failed = [line for line in table.lines if line.get("outcome", "ok") != "ok"]
    for line in failed:
        print("{row}: {outcome}".format(**line))
    if failed:
        sys.exit(f"{len(failed)} of {len(table.lines)} failed")
    return table.lines


if __name__ == "__main__":
    cli(main)
