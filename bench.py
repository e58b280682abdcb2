"""
Speed and memory, side by side: our fast path, the literal form it replaces, and the obvious alternatives.

    python bench.py vit          training steps of image models: CRATE-Tiny at 224 px, the cifar10 preset
    python bench.py mae          training steps of masked autoencoders: before, after, literal, ViT-MAE
    python bench.py gpt          whole training steps of language models: the pydoc preset, on CUDA CRATE-Base
    python bench.py ista         the sparsification operator alone
    python bench.py attention    the compression operator alone
    python bench.py simdino      a step of SimDINO with its views, and the views alone
    python bench.py head         the cross-entropy behind GPT-2's vocabulary: time and memory
    python bench.py length       TSSA, MSSA, MHSA: time against sequence length, and its exponent
    python bench.py generate     what the cache of each arch holds, and the time of a new token after a prefix
    python bench.py longrange    ToST, CRATE, transformer at equal parameters on sequences of 1,024 pixels or on ListOps
    python bench.py data         what it costs to feed each script, against one picture or window at a time
    python bench.py loop         each script's own steps against the bare forward, backward and optimizer step
    python bench.py scale        the papers' settings on 1, 8 and 64 GPUs, on paper; --check compares with this machine

All variants of a row run in one process, in turn, so that what disturbs one disturbs all; times are medians. The first
six tables add the ratio to the literal form; the FLOP/s that the mathematics needs, and their share of what a large
matmul reaches here; the bytes/s that the operators read and write, and their share of what a large copy reaches here
(of compiled code a lower bound: matmuls, attention and optimizer alone); and the peak memory.
"""
import contextlib
import copy
import ctypes
import functools
import io
import itertools
import json
import math
import re
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
from common import option
from data import augment, images, text
from model import (ARCHS, ISTA, MHSA, MSSA, TSSA, ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig, MaskedAutoencoder,
                   TextConfig, gram_coding_rate, image_config, linear_cross_entropy, mae_config, run_layers, text_config, train_flops_per_token)


@dataclass(kw_only=True)
class Table:
    """What every table has."""
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast; auto is bfloat16 on cuda, float32 elsewhere",
                        choices=("auto", "float32", "bfloat16"))
    json: str | None = option(None, "also write the table to this file")


@dataclass(kw_only=True)
class Bench(Table):
    """One table. Times are the median over --repeats turns."""
    repeats: int = option(9, "turns of every variant", low=1)
    compile: bool | None = option(None, "add rows for the compiled form; auto is cuda only")


@dataclass(kw_only=True)
class SimDINO(Table):
    """A step of SimDINO on pictures of 32 px, two views of which and --local_views of 16. auto: the sizes for cuda / elsewhere."""
    repeats: int = option(9, "turns of every variant", low=1)
    arch: str = option("crate", "the layer (model.py's table)", choices=tuple(ARCHS))
    width: int | None = option(None, "d; auto is 384 / 128", low=1)
    heads: int = option(4, "K", low=1)
    layers: int | None = option(None, "L; auto is 12 / 4", low=1)
    local_views: int = option(4, "small views of a picture", low=1)
    batch_size: int | None = option(None, "pictures a step; auto is 512 / 64", low=2)


@dataclass(kw_only=True)
class Gpt(Bench):
    """Training steps of a language model and of the transformer of its width. auto: the sizes for cuda / elsewhere."""
    arch: str = option("crate", "the layer (model.py's table)",
                       choices=tuple(arch for arch in ARCHS if ARCHS[arch].output in ("learned", None)))
    width: int | None = option(None, "d; auto is 768 / 256; heads have 64 of it each", low=1)
    layers: int | None = option(None, "L; auto is 12 / 4", low=1)
    context: int | None = option(None, "tokens a sequence; auto is 1024 / 128", low=2)
    batch_size: int | None = option(None, "sequences a step; auto is 16 / 32", low=1)
    vocab_size: int | None = option(None, "tokens there are; auto is 50304 / 96, printable ASCII and one", low=2)


@dataclass(kw_only=True)
class Head(Bench):
    """The cross-entropy of a language model's tied head, forward and backward."""
    repeats: int = option(5, "turns of every variant", low=1)
    width: int | None = option(None, "d; auto is 768 on cuda, 256 elsewhere", low=1)
    tokens: int | None = option(None, "tokens of the batch; auto is 16,384 on cuda, 4,096 elsewhere", low=1)
    vocab_size: int = option(50304, "tokens there are", low=2)


@dataclass(kw_only=True)
class Length(Table):
    """Forward and backward of the attention operators against the number of tokens; exponents over the longer half."""
    repeats: int = option(3, "turns of every variant", low=1)
    lengths: str = option("1024,2048,4096,8192,16384", "numbers of tokens")
    width: int = option(256, "d", low=1)
    heads: int = option(4, "K", low=1)
    batch_size: int | None = option(None, "sequences; auto is 16 on cuda, so that it has work, 1 elsewhere", low=1)


@dataclass(kw_only=True)
class Generate(Table):
    """One new token behind a prefix, with the cache and by reading everything again."""
    repeats: int = option(9, "turns of every variant", low=1)
    prefixes: str = option("128,256,512,1024,2048,4096", "numbers of tokens that came before")
    width: int = option(256, "d; heads have 64 of it each", low=1)
    layers: int = option(4, "L", low=1)
    vocab_size: int = option(512, "tokens there are: few, so that the head does not hide the layers", low=2)
    batch_size: int = option(1, "sequences", low=1)


@dataclass(kw_only=True)
class LongRange(Table):
    """[B] Table 7.10 without downloads: long sequences, classified at equal parameters (same depth, within 3 %)."""
    task: str = option("pixels", "CIFAR-10 as 1,024 grey values, or generated ListOps", choices=("pixels", "listops"))
    width: int = option(128, "d of crate, of which the other widths follow; heads have about 32 of it each", low=8)
    layers: int = option(4, "L", low=1)
    length: int = option(512, "longest ListOps expression, in tokens; the shortest are half as long", low=8)
    examples: int | None = option(None, "to train on; auto is all 50,000 pictures, or 10,000 expressions", low=1)
    held_out: int = option(2000, "to measure accuracy on", low=1)
    steps: int = option(500, "optimizer steps; the first two are not timed", low=3)
    batch_size: int = option(16, "sequences a step", low=1)
    lr: float = option(1e-3, "AdamW's, reached after a tenth of the steps; then half a cosine to 0", above=0)
    weight_decay: float = option(0.05, "decoupled, on matrices only", low=0)
    seed: int = option(0, "the same seed gives the same run", low=0)
    compile: bool | None = option(None, "torch.compile the models; auto is cuda only")
    data_dir: str = option(str(images.CACHE), "where prepared data lies")


@dataclass(kw_only=True)
class Data(Table):
    """Reading and augmenting a batch as each script does it. The map of large pictures is a new file, so it is read from the page cache."""
    repeats: int = option(9, "turns of every variant", low=1)
    pictures: int = option(1024, "of 256 px in a memory map, 0.2 MB each", low=256)
    workers: int = option(2, "processes that read it", low=0)


@dataclass(kw_only=True)
class Loop(Table):
    """The scripts themselves at small settings, on drawn pictures and the pydoc text."""
    repeats: int = option(3, "turns of every variant", low=1)
    steps: int = option(20, "of the script in a turn; the first is not timed", low=2)
    compile: bool | None = option(None, "torch.compile the models; auto is cuda only")


@dataclass(kw_only=True)
class Scale(Table):
    """A step on paper: FLOPs over (MFU x peak), and what an all-reduce of float32 gradients leaves uncovered by the backward pass.

    Peak and links are the H100's data sheet and its usual network; MFU and --link_share are assumptions. What does not shrink with the share of
    a GPU (launching kernels, the optimizer, reading data) is left out: where a step takes a few milliseconds, this is a bound."""
    peak: float = option(989.0, "TFLOP/s of a GPU: H100, bf16, dense", above=0)
    mfu: float = option(0.4, "share of the peak that goes into the FLOPs the mathematics needs", above=0, high=1)
    nvlink: float = option(450.0, "GB/s each way between the GPUs of a node: NVLink 4", above=0)
    network: float = option(50.0, "GB/s each way from a GPU to another node: 400 Gbit/s InfiniBand, an adapter a GPU", above=0)
    link_share: float = option(0.8, "share of these that an all-reduce reaches", above=0, high=1)
    bucket: float = option(25.0, "MB of gradients that DDP sends at once; the last bucket is full only when the backward pass has ended", above=0)
    check: bool = option(False, "also predict steps of this machine from one of them, and compare: two processes on its CPU")
    repeats: int = option(5, "turns of what --check measures", low=1)


# ---------------------------------------------------------------------------------------------------------------------
# The literal form: what the released code computes, with the same parameters
# ---------------------------------------------------------------------------------------------------------------------

class ReleasedMSSA(MSSA):
    """MSSA as the released code has it: one projection, an explicit softmax, two matmuls ([J] Eq. (37))."""

    def forward(self, Z, state=None):
        """(B, n, d) -> (B, n, d)."""
        w = self.project(Z)
        gram = w @ w.mT * self.scale
        if self.causal:
            gram = gram.masked_fill(torch.ones(gram.shape[-2:], dtype=torch.bool, device=Z.device).triu(1), -math.inf)
        return self.W((gram.softmax(-1) @ w).transpose(1, 2).flatten(-2))


class ReleasedISTA(ISTA):
    """ISTA as the released code has it: three matmuls over the tokens ([J] Eq. (44))."""

    def forward(self, Z):
        """(B, n, d) -> (B, n, d)."""
        reconstruction = F.linear(Z, self.D)
        ascent = F.linear(reconstruction, self.D.mT)
        descent = F.linear(Z, self.D.mT)
        return F.relu(Z + self.eta * (descent - ascent) - self.eta * self.lambd)


class ReleasedLanguageModel(LanguageModel):
    """A language model that forms all its logits before it takes their cross-entropy, as nanoGPT does."""

    def forward(self, ids, targets=None):
        """As LanguageModel.forward."""
        Z = self.norm(run_layers(self.layers, self.tokens(ids)))
        return Z @ self.embed.weight.mT if targets is None else cross_entropy_at_once(Z, self.embed.weight, targets)


def cross_entropy_at_once(Z, W, targets):
    """What linear_cross_entropy computes, from all logits together ([B] Eq. (7.4.9))."""
    return F.cross_entropy((Z @ W.mT).flatten(0, -2), targets.flatten(), ignore_index=-1)


RELEASED = {MSSA: ReleasedMSSA, ISTA: ReleasedISTA, LanguageModel: ReleasedLanguageModel}


def literal(model):
    """A copy of the model whose MSSA, ISTA and text head compute as the released code does: the same function."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module.__class__ = RELEASED.get(type(module), type(module))
    return model


class TorchEncoder(nn.Module):
    """PyTorch's own TransformerEncoderLayer at a given width, with the embedding and head of our ViT."""

    def __init__(self, config):
        super().__init__()
        self.model = ImageClassifier(config)
        c = config
        self.model.encoder.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(c.width, c.heads, 4 * c.width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(c.layers))

    def forward(self, x):
        """Logits of a batch of pictures."""
        return self.model(x)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring: seconds, FLOP/s, bytes/s, memory
# ---------------------------------------------------------------------------------------------------------------------

def synchronize(device):
    """Waits until the device has done what was asked of it."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def alternate(variants, device, repeats, drain=False):
    """Seconds of each variant (a function): the median of `repeats` turns through them all, after an unmeasured one.

    drain: one more call before each measured one, for what was read ahead while others ran."""
    seconds = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, function in variants.items():
            if drain:
                function()
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def matmul_peak(device, dtype, n=None):
    """FLOP/s of a large square matmul here, best of five: the ceiling of everything that computes."""
    n = n or (8192 if device.type == "cuda" else 2048)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = min(alternate({"matmul": lambda: a @ b}, device, 1)["matmul"] for _ in range(5))
    return 2 * n ** 3 / best


def copy_peak(device, n=None):
    """Bytes/s, read and written, of a large copy here, best of five: the ceiling of everything that moves data."""
    n = n or (2 ** 28 if device.type == "cuda" else 2 ** 25)
    a, b = (torch.zeros(n, device=device) for _ in range(2))
    best = min(alternate({"copy": lambda: a.copy_(b)}, device, 1)["copy"] for _ in range(5))
    return 8 * n / best


class Traffic(TorchDispatchMode):
    """Inside it: `bytes` that all operators read and write, each for itself, and `unfusable` of them.

    Unfusable are matmuls, attention and the optimizer; what else there is, a compiler may melt into fewer passes."""

    def __init__(self):
        super().__init__()
        self.bytes = self.unfusable = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read, written, schema = tensors((args, kwargs)), tensors(out), func._schema
        if schema.is_mutable:       # what is written is among the arguments; operators on lists return nothing
            written = tensors([value for spec, value in zip(schema.arguments, args)
                               if spec.alias_info is not None and spec.alias_info.is_write])
        elif "empty" in schema.name or memory_of(written) <= memory_of(read):
            return out              # nothing moves: memory that is only set aside, or a view
        moved = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in read + written)
        self.bytes += moved
        self.unfusable += moved * any(word in schema.name for word in ("mm", "scaled_dot_product", "_fused_"))
        return out


def memory_of(tensors):
    """The addresses of the tensors' memory, as a set: views share theirs."""
    return {t.untyped_storage().data_ptr() for t in tensors}


def tensors(tree):
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def peak_memory(function, device):
    """Bytes by which a call raises the memory in use at its peak: allocated (CUDA), resident (Linux); else None."""
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if device.type != "cpu" or not reset.exists():
        return None

    def resident(key):
        return 1024 * int(re.search(rf"{key}:\s*(\d+)", status.read_text())[1])
    try:
        ctypes.CDLL(None).malloc_trim(0)        # what earlier calls freed would serve this one unseen
        reset.write_text("5")                   # sets VmHWM, the peak, back to what is resident now
    except (OSError, AttributeError):
        return None
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def held_memory(model, optimizer=None):
    """Bytes of parameters, buffers and optimizer state, which stay between steps."""
    states = optimizer.state.values() if optimizer is not None else ()
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers(), *tensors([*states])])


class Variant(NamedTuple):
    """One line of a table: what to call, and what one call needs."""
    run: Callable
    flops: float                    # by the mathematics
    items: int = 0                  # images or tokens
    held: Callable = lambda: 0      # bytes that stay between calls
    eager: Callable | None = None   # the same function where `run` is compiled
    fields: dict = {}               # what else the line should say


class Ceilings(NamedTuple):
    """What this machine reaches at best."""
    flops: float                    # a second, by a matmul
    bytes: float                    # a second, by a copy


def row(title, variants, processes, c, peak, unit):
    """Times the variants, counts their bytes and memory, prints their lines, and returns them."""
    device, memory, traffic = processes.device, {}, {}
    for name, v in variants.items():
        v.run()                     # compiles, warms up, and makes the optimizer's state
        used = peak_memory(v.run, device)
        memory[name] = None if used is None else used + v.held()
        with Traffic() as count:
            (v.eager or v.run)()
        traffic[name] = count.unfusable if v.eager else count.bytes
    times = alternate({name: v.run for name, v in variants.items()}, device, c.repeats)
    base = next((t for name, t in times.items() if "literal" in name), None)
    known, lines = common.peak_flops(device), []                         # the data sheet's, as in the training scripts
    for name, v in variants.items():
        seconds, rate, moved = times[name], v.flops / times[name], traffic[name] / times[name]
        line = dict(row=title, variant=name, ms=1e3 * seconds, ratio=seconds / base if base else None,
                    gflops_per_s=rate / 1e9, of_matmul=rate / peak.flops, mfu=known and rate / known,
                    gb_per_s=moved / 1e9, of_copy=moved / peak.bytes, peak_mb=megabytes(memory[name]))
        lines.append(line | {f"{unit}_per_s": v.items / seconds} | v.fields)
        print(f"{title:34} {name:26} {line['ms']:10.2f} ms", f"{line['ratio']:6.2f}" if base else " " * 6,
              f"{line['gflops_per_s']:10.1f} GFLOP/s {line['of_matmul']:6.1%}",
              f"{'>' if v.eager else ' '}{line['gb_per_s']:8.1f} GB/s {line['of_copy']:6.1%}",
              f"{shown(line['peak_mb'])} MB {v.items / seconds:12,.0f} {unit}/s", flush=True)
    return lines


def megabytes(count):
    """Bytes in MB; None stays None."""
    return None if count is None else count / 1e6


def shown(number):
    """A number of a table, or a dash where there is none."""
    return f"{'-':>9}" if number is None else f"{number:9,.0f}"


def free_gradients(model):
    """Drops the gradients, so that each step makes its own."""
    for p in model.parameters():
        p.grad = None


# ---------------------------------------------------------------------------------------------------------------------
# The tables
# ---------------------------------------------------------------------------------------------------------------------

def training_step(model, inputs, processes, dtype, optimizer=None, clip=None):
    """Forward, loss, backward and, if given, clipping and optimizer, as a function without arguments.

    The loss is model(*inputs), of classifiers the cross-entropy of their logits with the last of `inputs`."""
    classifies = not isinstance(getattr(model, "module", getattr(model, "_orig_mod", model)), (MaskedAutoencoder, LanguageModel))

    def step():
        """One step."""
        with processes.autocast(dtype):
            loss = F.cross_entropy(model(*inputs[:-1]), inputs[-1]) if classifies else model(*inputs)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if optimizer:
            optimizer.step()
        free_gradients(model)
    return step


def picture_batch(config, batch, device):
    """Inputs of a training step of an image model: (x, labels), or (x, noise) of a masked autoencoder."""
    x = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
    if isinstance(config, MAEConfig):
        return x, torch.rand(batch, config.patches(), device=device)
    return x, torch.randint(config.classes, (batch,), device=device)


def adamw(model):
    """The optimizer of whole steps."""
    return common.make_optimizer(model, "adamw", 1e-4, 0.1, (0.9, 0.95))


def bench_vit(c, processes, peak):
    """Training steps: fast, literal, a ViT of equal parameters, and PyTorch's own layer at equal width."""
    device, lines = processes.device, []
    for title, config, batch in PICTURES:
        inputs = picture_batch(config, batch, device)
        as_usual = dict.fromkeys(("head_dim", "stem", "final_norm", "norm_eps", "qkv_bias", "out_bias", "layer_scale"))
        equal = ImageConfig(**{**vars(config), **as_usual, "arch": "transformer", "width": config.width // 2,
                               "heads": config.heads // 2})
        wide = ImageConfig(**{**vars(equal), "width": config.width, "heads": config.heads, "head_dim": None})
        fast, small = ImageClassifier(config).to(device), ImageClassifier(equal).to(device)
        models = {"fast": (fast, fast), "literal (released code)": (literal(fast), fast),
                  "transformer, equal params": (small, small),
                  "torch layer, equal width": (TorchEncoder(wide).to(device), ImageClassifier(wide))}
        variants = {}
        for name, (model, counted) in models.items():
            step = training_step(model, inputs, processes, c.dtype)
            variants[name] = Variant(step, batch * counted.train_flops(), batch, functools.partial(held_memory, model),
                                     fields=dict(parameters=common.count(model)))
        if common.wants_compile(c, device):
            step = training_step(torch.compile(fast), inputs, processes, c.dtype)
            variants["fast, compiled"] = variants["fast"]._replace(run=step, eager=variants["fast"].run)
        lines += row(title, variants, processes, c, peak, "images")
    return lines


def bench_mae(c, processes, peak):
    """Training steps of masked autoencoders at the cifar10 preset: mask tokens before and after the encoder, the literal form, ViT-MAE
    of equal parameters. The literal form and `before` are the same function."""
    device, (title, config, batch) = processes.device, AUTOENCODER
    vit = dict(arch="transformer", width=config.width // 2, heads=config.heads // 2, layers=config.layers, image_size=config.image_size,
               patch_size=config.patch_size)
    before = MaskedAutoencoder(config).to(device)
    models = {"fast, before": before, "literal (released code)": literal(before),
              "fast, after": MaskedAutoencoder(replace(config, mask_tokens="after")).to(device)}
    for when in ("before", "after"):
        models[f"transformer, {when}"] = MaskedAutoencoder(MAEConfig(mask_tokens=when, **vit)).to(device)
    inputs = picture_batch(config, batch, device)
    variants = {name: Variant(training_step(model, inputs, processes, c.dtype), batch * model.train_flops(), batch,
                              functools.partial(held_memory, model), fields=dict(parameters=common.count(model))) for name, model in models.items()}
    if common.wants_compile(c, device):
        step = training_step(torch.compile(before), inputs, processes, c.dtype)
        variants["fast, before, compiled"] = variants["fast, before"]._replace(run=step, eager=variants["fast, before"].run)
    return row(title, variants, processes, c, peak, "images")


def simdino_views(pictures, seed, local):
    """The views of uint8 pictures (b, 32, 32, 3) as train_simdino.py makes them at the cifar10 preset: [(2, b, 3, 32, 32), (local, b, 3, 16, 16)]."""
    x = augment.to_float(pictures)
    return [augment.views(x, count, size, augment.BatchRandom(seed, len(x) * count, device=x.device), area, (0.0,), solar)
            for count, size, area, solar in ((2, 32, (0.4, 1.0), (0.0, 0.2)), (local, 16, (0.1, 0.4), (0.0,)))]


def simdino_step(config, hidden, p, batch, processes, dtype, compile=False):
    """learn(views): a step of SimDINO but for its views: teacher, student, coding rate, AdamW, moving average."""
    student = nn.ModuleDict(dict(encoder=ImageEncoder(config), projector=nn.Sequential(
        nn.Linear(config.width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, p)))).to(processes.device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = adamw(student)
    for part in [*student.values(), *teacher.values()] if compile else ():
        part.compile()

    def features(model, views):
        """Unit features (V, b, p) of the views of one size each."""
        with processes.autocast(dtype):
            Z = torch.cat([model["encoder"](v.flatten(0, 1))[:, 0].unflatten(0, v.shape[:2]) for v in views])
            return F.normalize(model["projector"](Z).float(), dim=-1)

    def learn(views):
        """One step on views as simdino_views makes them."""
        with torch.no_grad():
            t = features(teacher, views[:1])
        s = features(student, views)
        score = torch.einsum("gbp,vbp->gv", t, s)
        distance = 1 - (score.sum() - score.diagonal().sum()) / (batch * (score.numel() - 2))
        rate = gram_coding_rate(s[:2].mT @ s[:2], p / (batch * 0.05)).mean()
        (distance - (p + batch) / (p * batch) * rate).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        common.ema_update(teacher, student, 0.996)
    return learn


def bench_simdino(c, processes, peak):
    """A whole step of SimDINO (views, teacher, student, coding rate, AdamW, moving average), and the making of the views alone."""
    device, cuda = processes.device, processes.device.type == "cuda"
    config = ImageConfig(arch=c.arch, width=c.width or (384 if cuda else 128), heads=c.heads, layers=c.layers or (12 if cuda else 4),
                         image_size=32, patch_size=4, classes=1, final_norm=True)
    batch, counter = c.batch_size or (512 if cuda else 64), itertools.count()
    pictures = torch.randint(256, (batch, 32, 32, 3), dtype=torch.uint8, device=device)
    learn = simdino_step(config, 1024, 256, batch, processes, c.dtype)

    def views():
        return simdino_views(pictures, next(counter), c.local_views)
    made = views()
    variants = {"whole step": lambda: learn(views()), "without the views": lambda: learn(made), "the views": views}
    times = alternate(variants, device, c.repeats)
    lines = []
    for name, seconds in times.items():
        lines.append(dict(row=f"{c.arch}, {batch} pictures", variant=name, ms=1e3 * seconds, share=seconds / times["whole step"],
                          images_per_s=batch / seconds))
        print(f"{lines[-1]['row']:34} {name:26} {1e3 * seconds:10.2f} ms {lines[-1]['share']:7.1%} of the step {batch / seconds:12,.0f} images/s",
              flush=True)
    return lines


def bench_gpt(c, processes, peak):
    """Whole training steps (forward, backward, clipping, AdamW): fast, literal, and the transformer of equal width."""
    device, cuda = processes.device, processes.device.type == "cuda"
    width, layers = c.width or (768 if cuda else 256), c.layers or (12 if cuda else 4)
    context, batch = c.context or (1024 if cuda else 128), c.batch_size or (16 if cuda else 32)
    vocab = c.vocab_size or (50304 if cuda else 96)
    x, y = torch.randint(vocab, (2, batch, context), device=device)

    def build(arch):
        config = TextConfig(arch=arch, width=width, heads=max(1, width // 64), layers=layers, context=context,
                            vocab_size=vocab)
        return LanguageModel(config).to(device)
    fast = build(c.arch)
    models, variants = {f"{c.arch}, fast": fast, f"{c.arch}, literal": literal(fast)}, {}
    if c.arch != "transformer":
        models["transformer"] = build("transformer")
    for name, model in models.items():
        optimizer = adamw(model)
        held = functools.partial(held_memory, model, optimizer)
        step = functools.partial(training_step, inputs=(x, y), processes=processes, dtype=c.dtype, optimizer=optimizer, clip=1.0)
        v = variants[name] = Variant(step(model), x.numel() * model.train_flops(), x.numel(), held,
                                     fields=dict(parameters=model.count()))
        if common.wants_compile(c, device):
            variants[f"{name}, compiled"] = v._replace(run=step(torch.compile(model)), eager=v.run)
    return row(f"{batch} x {context} x {width}, {layers} layers", variants, processes, c, peak, "tokens")


def operator_steps(modules, Z, g, processes, dtype):
    """Forward and backward of each operator on Z (B, n, d) with upstream gradient g."""
    def step(module):
        """One of them, as a function without arguments."""
        def run():
            with processes.autocast(dtype):
                out = module(Z)
            out.backward(g.to(out.dtype))
            Z.grad = None
            free_gradients(module)
        return run
    return {name: step(module) for name, module in modules.items()}


def bench_operator(c, processes, peak, make):
    """Fast against literal for one operator at the shapes of CRATE-Tiny (224 px), CRATE-Base and the cifar10 preset."""
    lines = []
    for title, B, n, d, K in SHAPES:
        module = make(d, K).to(processes.device)
        Z = torch.randn(B, n, d, device=processes.device, requires_grad=True)
        models = {"fast": module, "literal (released code)": literal(module)}
        compiled = common.wants_compile(c, processes.device)
        if compiled:
            models["fast, compiled"] = torch.compile(module)
        per_token = 6 * sum(p.numel() for p in module.parameters() if p.ndim == 2)
        if isinstance(module, MSSA):
            layer = nn.Module()
            layer.attention, layer.sparsification = module, None
            per_token = train_flops_per_token([layer], n)
        steps = operator_steps(models, Z, torch.randn_like(Z), processes, c.dtype)
        variants = {name: Variant(step, B * n * per_token, B * n) for name, step in steps.items()}
        if compiled:
            variants["fast, compiled"] = variants["fast, compiled"]._replace(eager=steps["fast"])
        lines += row(title, variants, processes, c, peak, "tokens")
    return lines


def bench_head(c, processes, peak):
    """linear_cross_entropy, in blocks of two sizes, against the cross-entropy of all logits at once."""
    device, cuda = processes.device, processes.device.type == "cuda"
    d, n, V = c.width or (768 if cuda else 256), c.tokens or (16_384 if cuda else 4096), c.vocab_size
    Z, W = (torch.randn(m, d, device=device).mul_(scale).requires_grad_() for m, scale in ((n, 1.0), (V, 0.02)))
    y = torch.randint(V, (n,), device=device)

    def step(loss_of):
        def run():
            with processes.autocast(c.dtype):
                loss = loss_of(Z, W, y)
            loss.backward()
            Z.grad = W.grad = None
        return run
    ways = {"fast": linear_cross_entropy, "fast, blocks of 1024": functools.partial(linear_cross_entropy, block=1024),
            "literal": cross_entropy_at_once}
    variants = {name: Variant(step(loss_of), 6 * n * V * d, n) for name, loss_of in ways.items()}
    if common.wants_compile(c, device):
        v = variants["literal"]
        variants["literal, compiled"] = v._replace(run=step(torch.compile(cross_entropy_at_once)), eager=v.run)
    return row(f"{n} x {d}, vocabulary {V}", variants, processes, c, peak, "tokens")


def whole_numbers(text, flag):
    """"128,256" as [128, 256], rising. Raises UserError."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise common.UserError(f"--{flag}={text}: expected whole numbers with commas between them, as in 128,256,512")
    return sorted({int(word) for word in words})


def fitted_exponent(lengths, seconds):
    """The least-squares slope of log seconds over log length, for the longer half (two at least; None of one)."""
    longer = max(0, min(len(lengths) // 2, len(lengths) - 2))
    x, y = np.log(lengths[longer:]), np.log(seconds[longer:])
    return float(np.polyfit(x, y, 1)[0]) if len(x) > 1 else None


def bench_length(c, processes, peak):
    """Time of TSSA, MSSA and MHSA, each with and without a causal mask, against the number of tokens."""
    device, lengths = processes.device, whole_numbers(c.lengths, "lengths")
    batch = c.batch_size or (16 if device.type == "cuda" else 1)
    operators = {}
    for causal, suffix in ((False, ""), (True, ", causal")):
        operators |= {f"TSSA{suffix}": TSSA(c.width, c.heads, causal=causal, context=lengths[-1]),
                      f"MSSA{suffix}": MSSA(c.width, c.heads, causal=causal),
                      f"MHSA{suffix}": MHSA(c.width, c.heads, causal=causal)}
    operators = {name: module.to(device) for name, module in operators.items()}
    times = {name: [] for name in operators}
    for n in lengths:
        Z = torch.randn(batch, n, c.width, device=device, requires_grad=True)
        steps = operator_steps(operators, Z, torch.randn_like(Z), processes, c.dtype)
        for name, seconds in alternate(steps, device, c.repeats).items():
            times[name].append(seconds)
    title = f"{batch} x n x {c.width}, {c.heads} heads; ms"
    print(f"{title:34}" + "".join(f"{n:11,}" for n in lengths) + "   exponent")
    lines = []
    for name, seconds in times.items():
        exponent = fitted_exponent(lengths, seconds)
        lines.append(dict(row=title, variant=name, lengths=lengths, ms=[1e3 * s for s in seconds], exponent=exponent))
        print(f"{name:34}" + "".join(f"{1e3 * s:11.2f}" for s in seconds),
              f"{exponent:9.2f}" if exponent is not None else "", flush=True)
    return lines


def cache_bytes(state):
    """Bytes of what generation has kept for the tokens it has read; of a buffer with room for more, the part in use."""
    return sum(t[:, :, :layer["n"]].numel() * t.element_size() for layer in state for t in tensors(layer))


TIMED = ("crate", "tost", "transformer")


@torch.no_grad()
def bench_generate(c, processes, peak):
    """Every arch's cache, in bytes a token and a sequence; for three, the time of one more token, cached or not."""
    device, prefixes = processes.device, whole_numbers(c.prefixes, "prefixes")
    ids = torch.randint(c.vocab_size, (c.batch_size, prefixes[-1] + 1), device=device)
    models, lines = {}, {}
    title = f"{c.layers} layers, width {c.width}"
    for arch in ARCHS:
        config = TextConfig(arch=arch, width=c.width, heads=max(1, c.width // 64), layers=c.layers,
                            context=prefixes[-1] + 1, vocab_size=c.vocab_size)
        model, state, sizes = LanguageModel(config).to(device).eval(), [], []
        with processes.autocast(c.dtype):
            for new in ids[:, :prefixes[0]], ids[:, :1]:
                model.advance(new, state)
                sizes.append(cache_bytes(state) / c.batch_size)
        growth = sizes[1] - sizes[0]
        constant = sizes[0] - growth * prefixes[0]
        lines[arch] = dict(row=title, variant=arch, bytes_per_token=growth, bytes_constant=constant)
        if arch in TIMED:
            models[arch] = model
            lines[arch] |= dict(prefixes=prefixes, cached_ms=[], uncached_ms=[])

    def one_more(model, new, state):
        with processes.autocast(c.dtype):
            model.advance(new, [dict(layer) for layer in state])         # copies of the dicts: the same token each time
    for n in prefixes:
        variants = {}
        for arch, model in models.items():
            state = []
            with processes.autocast(c.dtype):
                model.advance(ids[:, :n], state)
            variants[arch, "cached_ms"] = functools.partial(one_more, model, ids[:, n:n + 1], state)
            variants[arch, "uncached_ms"] = functools.partial(one_more, model, ids[:, :n + 1], [])
        for (arch, kind), seconds in alternate(variants, device, c.repeats).items():
            lines[arch][kind].append(1e3 * seconds)

    print(f"cache, {title:26} {'bytes a token':>14} {'and constant':>14}")
    for arch, line in lines.items():
        print(f"{arch:33} {line['bytes_per_token']:14,.0f} {line['bytes_constant']:14,.0f}")
    print(f"{'ms of one more token, behind':34}" + "".join(f"{n:10,}" for n in prefixes))
    for arch in models:
        for kind in ("cached", "uncached"):
            print(f"{arch + ', ' + kind:34}" + "".join(f"{ms:10.2f}" for ms in lines[arch][f"{kind}_ms"]))
    return list(lines.values())


# ---------------------------------------------------------------------------------------------------------------------
# Long range
# ---------------------------------------------------------------------------------------------------------------------

class SequenceClassifier(nn.Module):
    """The backbone of a bidirectional language model, the mean of its tokens, and a linear head.

    model(ids) takes (B, n) and returns logits (B, classes). To the layers of every arch padding is a token like any
    other; in the mean it does not count."""

    def __init__(self, config, classes, pad=None):
        super().__init__()
        self.backbone, self.pad = LanguageModel(config), pad
        self.head = nn.Linear(config.width, classes)

    def forward(self, ids):
        """(B, n) -> (B, classes)."""
        model = self.backbone
        Z = model.norm(run_layers(model.layers, model.tokens(ids)))
        if self.pad is None:
            return self.head(Z.mean(1))
        counts = (ids != self.pad)[..., None]
        return self.head((Z * counts).sum(1) / counts.sum(1))


def non_embedding(model):
    """Parameters of a LanguageModel but for the embedding of tokens and positions."""
    return sum(p.numel() for name, p in model.named_parameters() if name not in ("embed.weight", "positions"))


def equal_config(arch, width, head_dim=32, **fields):
    """The bidirectional TextConfig of `arch` with as many parameters, embeddings not counted, as crate of this width.

    Heads have about `head_dim` features each. Same depth; the count agrees within 3 % from width 64 on."""
    def config(arch, width):
        heads = max(1, round(width / head_dim))
        return TextConfig(arch=arch, width=width, heads=heads, head_dim=round(width / heads), causal=False, **fields)

    def count(config):
        with torch.device("meta"):
            return non_embedding(LanguageModel(config))
    target = count(config("crate", width))
    guess = round(width * (target / count(config(arch, width))) ** 0.5)      # counts grow with the width's square
    near = (config(arch, w) for w in range(max(1, guess - 4), guess + 5))
    return min(near, key=lambda found: abs(count(found) - target))


class Sequences(NamedTuple):
    """A task: token ids (N, n), labels (N,), and those held out."""
    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor
    vocab_size: int
    classes: int
    pad: int | None


def sequences(c):
    """The Sequences of --task."""
    if c.task == "listops":
        x, y = text.listops(c.examples or 10_000, common.derive_seed(c.seed, "train"), c.length)
        x_test, y_test = text.listops(c.held_out, common.derive_seed(c.seed, "test"), c.length)
        longest = int((torch.cat([x, x_test]) != 0).any(0).sum())        # rarely all of --length
        return Sequences(x[:, :longest].byte(), y, x_test[:, :longest].byte(), y_test, len(text.LISTOPS_VOCAB), 10, 0)
    data = images.load("cifar10", c.data_dir)

    def grey(pictures):             # in parts, since text.grey_pixels counts in int64
        parts = np.array_split(pictures, len(pictures) // 1000 + 1)
        return torch.from_numpy(np.concatenate([text.grey_pixels(part).astype(np.uint8) for part in parts]))
    n, m = c.examples or len(data.train_labels), c.held_out
    y, y_test = torch.from_numpy(data.train_labels[:n]), torch.from_numpy(data.val_labels[:m])
    return Sequences(grey(data.train_images[:n]), y, grey(data.val_images[:m]), y_test, 256, len(data.classes), None)


@torch.no_grad()
def accuracy(model, x, y, batch_size, processes, dtype):
    """The share of sequences x (N, n) that the model puts in their class y (N,), each counted once."""
    right = 0
    for start in range(0, len(x), batch_size):
        rows = torch.arange(start, start + batch_size) % len(x)          # one shape; what wraps round is not counted
        with processes.autocast(dtype):
            chosen = model(x[rows].long().to(processes.device)).argmax(-1)
        right += (chosen.cpu() == y[rows])[:len(x) - start].sum().item()
    return right / len(x)


def bench_longrange(c, processes, peak):
    """Trains tost, crate and transformer at equal parameters on the same batches, in turn: accuracy, time, memory."""
    device, data = processes.device, sequences(c)
    n = data.x.shape[1]
    schedule = common.warmup_cosine(c.lr, c.steps, c.steps // 10)
    models, steps, optimizers = {}, {}, {}
    for arch in ("tost", "crate", "transformer"):
        torch.manual_seed(common.derive_seed(c.seed, "weights"))
        config = equal_config(arch, c.width, layers=c.layers, context=n, vocab_size=data.vocab_size)
        models[arch] = model = SequenceClassifier(config, data.classes, data.pad).to(device)
        if common.wants_compile(c, device):
            model.compile()
        optimizers[arch] = common.make_optimizer(model, "adamw", c.lr, c.weight_decay, (0.9, 0.95))

    def train(arch, lr, x, y):
        """One optimizer step of one arch on a batch."""
        model, optimizer = models[arch], optimizers[arch]
        common.set_lr(optimizer, lr)
        with processes.autocast(c.dtype):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses[arch].append(loss.detach())

    batches = images.index_batches(len(data.x), c.batch_size, c.seed)
    memory, losses, seconds = {}, {arch: [] for arch in models}, {arch: [] for arch in models}
    tenth = max(1, c.steps // 10)

    def recent(arch):
        return torch.stack(losses[arch][-tenth:]).mean().item()
    for step in range(c.steps):
        index = torch.from_numpy(next(batches))
        x, y = data.x[index].long().to(device), data.y[index].to(device)
        for arch in models:
            run = functools.partial(train, arch, schedule[step], x, y)
            if step == 1:                              # the first step also compiles and warms up
                used = peak_memory(run, device)
                memory[arch] = None if used is None else used + held_memory(models[arch], optimizers[arch])
                continue
            synchronize(device)
            start = time.perf_counter()
            run()
            synchronize(device)
            seconds[arch].append(time.perf_counter() - start)
        if (step + 1) % tenth == 0:
            print(f"step {step + 1}/{c.steps}: loss", *(f"{arch} {recent(arch):.3f}" for arch in models), flush=True)
    lines = []
    for arch, model in models.items():
        right = accuracy(model, data.x_test, data.y_test, c.batch_size, processes, c.dtype)
        width, count = model.backbone.config.width, non_embedding(model.backbone)
        ms = 1e3 * statistics.median(seconds[arch][1:])
        line = dict(row=c.task, variant=arch, width=width, parameters=count, length=n, examples=len(data.x),
                    held_out=len(data.x_test), steps=c.steps, batch_size=c.batch_size, loss=recent(arch),
                    accuracy=right, ms=ms, peak_mb=megabytes(memory[arch]))
        lines.append(line)
        print(f"{c.task}, {n} tokens: {arch:12} width {width:4} {count:10,} parameters",
              f"{right:7.2%} of {len(data.x_test):,} {ms:10.1f} ms a step {shown(line['peak_mb'])} MB", flush=True)
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Around the model: data, the loop
# ---------------------------------------------------------------------------------------------------------------------

class OneByOne(torch.utils.data.Dataset):
    """Pictures (N, H, W, 3) as torchvision feeds them: Pillow crops and flips each for itself; item i has a tensor for every crop."""

    def __init__(self, pictures, crops):
        self.pictures, self.crops = pictures, crops

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, i):
        return [self.finish(crop(Image.fromarray(self.pictures[i]))) for crop in self.crops]

    def finish(self, picture):
        """Flip, ToTensor, Normalize."""
        if torch.rand(()) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return (torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous().float() / 255 - 0.5) / 0.25

    def batches(self, batch, workers=0):
        """Endless: `batch` items together."""
        loader = torch.utils.data.DataLoader(self, batch, shuffle=True, drop_last=True, num_workers=workers, prefetch_factor=4 if workers else None,
                                             persistent_workers=workers > 0)
        while True:
            yield from loader


def window(size, padding, picture):
    """torchvision's RandomCrop with padding."""
    picture = ImageOps.expand(picture, padding)
    left, top = (int(torch.randint(0, side - size + 1, ())) for side in picture.size)
    return picture.crop((left, top, left + size, top + size))


def resized(size, area, picture):
    """torchvision's RandomResizedCrop; the boxes are augment.random_boxes'."""
    rng = augment.BatchRandom(int(torch.randint(2 ** 31, ())), 1)
    top, left, height, width = augment.random_boxes(rng, picture.height, picture.width, scale=area)[0].tolist()
    return picture.resize((size, size), Image.Resampling.BICUBIC, (left, top, left + width, top + height))


def windows_one_by_one(tokens, batch, context):
    """nanoGPT's batch: every window converted for itself, inputs and targets alike."""
    starts = torch.randint(len(tokens) - context, (batch,))
    return [torch.stack([torch.from_numpy(tokens[i + shift:i + shift + context].astype(np.int64)) for i in starts]) for shift in (0, 1)]


def bench_data(c, processes, peak):
    """Milliseconds to read and augment a batch: ours, one by one, and as a share of the bare training step of that batch.

    Batches and models are those of the other tables: the cifar10 presets (of SimDINO bench.py simdino's model), CRATE-Tiny at 224 px and on
    CUDA CRATE-Base, the pydoc preset. One by one means crop and flip alone, and for SimDINO's views no colours either.
    MB are those read: uint8 pixels, uint16 tokens."""
    device, cuda, lines = processes.device, processes.device.type == "cuda", []
    small, labels, _ = images.draw_shapes(2048, 0)
    tokens = np.random.default_rng(0).integers(96, size=2 ** 22, dtype=np.uint16)
    counter = itertools.count()

    def batched(pictures, labels, batch, make, workers=0, resident=None):
        """Endless: what the scripts make of `batch` pictures."""
        source = images.Images(pictures, labels, device, resident)
        for found, _ in source.batches(images.index_batches(len(labels), batch, 0), workers):
            x = make(augment.to_float(found), augment.BatchRandom(next(counter), batch, device=device))
            yield augment.normalize(x, [0.5] * 3, [0.25] * 3)

    def moved(batches):
        """The same on the device."""
        for made in batches:
            yield [x.to(device) for x in made]

    def table(title, unit, items, size, feeds, step, ahead=1):
        """Times the streams of `feeds`, `ahead` batches at once, beside the step; `size` bytes an item."""
        variants = {name: lambda s=s: [next(s) for _ in range(ahead)] for name, s in feeds.items()}
        times = alternate(variants | {"the bare step": step}, device, c.repeats, drain=ahead > 1)
        ours = times[next(iter(feeds))] / ahead
        for name, seconds in times.items():
            seconds /= ahead if name in feeds else 1
            line = dict(row=title, variant=name, ms=1e3 * seconds, ratio=seconds / ours, share=seconds / times["the bare step"],
                        mb_per_s=items * size / seconds / 1e6 if name in feeds else None)
            lines.append(line | {f"{unit}_per_s": items / seconds})
            print(f"{title:34} {name:38} {line['ms']:9.2f} ms {line['ratio']:8.2f} {line['share']:8.2%} of the step",
                  f"{shown(line['mb_per_s'])} MB/s {items / seconds:12,.0f} {unit}/s", flush=True)

    def crop(x, rng):
        return augment.flip(augment.pad_crop(x, 32, 4, rng), rng)
    _, config, batch = PICTURES[1]
    model = ImageClassifier(config).to(device)
    table(f"vit, {batch} of 32 px", "images", batch, 32 * 32 * 3, {
        "batched: crop, flip, RandAugment": batched(small, labels, batch, lambda x, rng: augment.rand_augment(crop(x, rng), rng, 2, 14)),
        "batched: crop, flip": batched(small, labels, batch, crop),
        "one by one: crop, flip": moved(OneByOne(small, [functools.partial(window, 32, 4)]).batches(batch))},
        training_step(model, picture_batch(config, batch, device), processes, c.dtype, adamw(model)))

    _, config, batch = AUTOENCODER
    model = MaskedAutoencoder(config).to(device)
    table(f"mae, {batch} of 32 px", "images", batch, 32 * 32 * 3, {
        "batched: resized crop, flip": batched(small, labels, batch,
                                               lambda x, rng: augment.flip(augment.random_resized_crop(x, 32, rng, (0.2, 1)), rng)),
        "one by one: resized crop, flip": moved(OneByOne(small, [functools.partial(resized, 32, (0.2, 1))]).batches(batch))},
        training_step(model, picture_batch(config, batch, device), processes, c.dtype, adamw(model)))

    config, batch = ImageConfig(width=128, heads=4, layers=4, image_size=32, patch_size=4, classes=1, final_norm=True), 64
    learn, pictures = simdino_step(config, 1024, 256, batch, processes, c.dtype), torch.from_numpy(small[:batch]).to(device)
    views = simdino_views(pictures, 0, 4)
    crops = [functools.partial(resized, 32, (0.4, 1))] * 2 + [functools.partial(resized, 16, (0.1, 0.4))] * 4
    table(f"simdino, {batch} x (2 + 4) views", "images", batch, 32 * 32 * 3, {
        "batched: views with colours": (simdino_views(pictures, seed, 4) for seed in counter),
        "one by one: resized crop, flip": moved(OneByOne(small, crops).batches(batch))}, lambda: learn(views))

    config, batch = (image_config("base"), 128) if cuda else PICTURES[0][1:]
    model = ImageClassifier(config).to(device)
    with tempfile.TemporaryDirectory() as folder:
        large = np.lib.format.open_memmap(f"{folder}/large.npy", "w+", np.uint8, (c.pictures, 256, 256, 3))
        large[:] = np.random.default_rng(0).integers(256, size=large.shape[1:], dtype=np.uint8)
        large.flush()
        large = np.load(f"{folder}/large.npy", mmap_mode="r")
        table(f"vit, {batch} of 256 px, {c.workers} workers", "images", batch, 256 * 256 * 3, {
            "batched: crop, flip": batched(large, np.zeros(c.pictures, np.int64), batch,
                                           lambda x, rng: augment.flip(augment.pad_crop(x, 224, 0, rng), rng), c.workers, resident=False),
            "one by one: crop, flip": moved(OneByOne(large, [functools.partial(window, 224, 0)]).batches(batch, c.workers))},
            training_step(model, picture_batch(config, batch, device), processes, c.dtype, adamw(model)), ahead=max(1, 4 * c.workers))

    config = TextConfig(width=256, heads=4, layers=4, context=128, vocab_size=96)
    model, batch = LanguageModel(config).to(device), 32
    table(f"gpt, {batch} x {config.context} tokens", "tokens", batch * config.context, 2, {
        "one draw, one array": moved(text.batch(tokens, step, batch, config.context, 0) for step in counter),
        "one by one": moved(windows_one_by_one(tokens, batch, config.context) for _ in counter)},
        training_step(model, torch.randint(96, (2, batch, config.context), device=device), processes, c.dtype, adamw(model), clip=1.0))
    return lines


# script: its preset and batch elsewhere, and on cuda
SCRIPTS = {"train_vit.py": (("cifar10-small", 128), ("cifar10", 512)), "train_mae.py": (("cifar10-small", 128), ("cifar10", 256)),
           "train_simdino.py": (("cifar10-small", 128), ("cifar10", 512)), "train_gpt.py": (("pydoc", 32), ("shakespeare", 64))}


def bare_step(content, batch, processes, c):
    """Forward, loss, backward and AdamW of the model in a checkpoint's content on one batch, over and over; of SimDINO with its moving average."""
    device, task, fields = processes.device, content["task"], content["model_config"]
    if task == "simdino":
        run, small = content["run_config"], torch.randint(256, (batch, 32, 32, 3), dtype=torch.uint8, device=device)
        views = simdino_views(small, 0, run["local_views"])
        return functools.partial(simdino_step(ImageConfig(**fields), run["hidden"], run["output"], batch, processes, c.dtype,
                                              common.wants_compile(c, device)), views)
    make, config = {"vit": (ImageClassifier, ImageConfig), "mae": (MaskedAutoencoder, MAEConfig), "gpt": (LanguageModel, TextConfig)}[task]
    config = config(**fields)
    model = make(config).to(device)
    if common.wants_compile(c, device):
        model.compile()
    inputs = torch.randint(config.vocab_size, (2, batch, config.context), device=device) if task == "gpt" else picture_batch(config, batch, device)
    return training_step(model, inputs, processes, c.dtype, adamw(model))


def bench_loop(c, processes, peak):
    """Milliseconds of a step in each training script, by its own metrics.jsonl, and of the bare step of the same model; in turn.

    What the script adds counts: reading, augmenting (SimDINO's views too), masks, clipping, train_vit's moving average, schedules, checks of
    the loss, log lines. Its first step, evaluation and checkpoints do not: its rate leaves them out, as in training."""
    cuda, lines = processes.device.type == "cuda", []
    with tempfile.TemporaryDirectory() as folder:
        n = c.steps * max(batch for _, batch in (presets[cuda] for presets in SCRIPTS.values()))
        with images.preparing("shapes", folder) as draft:
            for split, m in (("train", n), ("val", 100)):
                for kind, array in zip(("images", "labels"), images.draw_shapes(m, m)):
                    np.save(draft / f"{split}_{kind}.npy", array)
            images.write_meta(draft, "shapes", "images", image_size=32, classes=list(images.SHAPES), mean=[0.5] * 3, std=[0.25] * 3)
        for script, presets in SCRIPTS.items():
            preset, batch = presets[cuda]
            main, out = runpy.run_path(str(Path(__file__).with_name(script)))["main"], f"{folder}/{script}"
            argv = [preset, "--overwrite", f"--out_dir={out}", f"--data_dir={folder}", f"--device={processes.device.type}", f"--dtype={c.dtype}",
                    f"--compile={common.wants_compile(c, processes.device)}", f"--batch_size={batch}"]
            argv += ["--data=pydoc", f"--steps={c.steps}", "--sample=0"] if script == "train_gpt.py" else \
                ["--data=shapes", f"--epochs={c.steps / (n // batch)}"]
            seconds, bare = {"the script": [], "the bare step": []}, None
            for _ in range(c.repeats):
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    done = main(argv)
                if bare is None:
                    content = common.load_checkpoint(f"{out}/ckpt.pt")
                    bare = bare_step(content, batch, processes, c)
                    bare()
                seconds["the script"].append(batch / done["examples_per_s"] if "examples_per_s" in done else
                                             batch * content["model_config"]["context"] / done["tokens_per_s"])
                synchronize(processes.device)
                start = time.perf_counter()
                for _ in range(c.steps - 1):
                    bare()
                synchronize(processes.device)
                seconds["the bare step"].append((time.perf_counter() - start) / (c.steps - 1))
            times = {name: statistics.median(s) for name, s in seconds.items()}
            for name, t in times.items():
                lines.append(dict(row=f"{script} {preset}", variant=name, batch_size=batch, ms=1e3 * t, overhead=t / times["the bare step"] - 1))
                print(f"{lines[-1]['row']:34} batch {batch:4} {name:14} {1e3 * t:10.2f} ms {lines[-1]['overhead']:+8.1%}", flush=True)
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# On paper
# ---------------------------------------------------------------------------------------------------------------------

def ring_bytes(size, n):
    """Bytes that each of n processes sends to add up a buffer of `size` bytes around a ring: 2 (n - 1) / n of it."""
    return 2 * (n - 1) / n * size


def on_paper(flops, parameters, gpus, nodes, passes, c):
    """A step of `flops` in all on `nodes` x `gpus`, in `passes` micro-batches: dict of bytes and seconds.

    float32 gradients are summed within each node around a ring, each GPU's share of them across the nodes around another. The last pass
    covers what is sent with its backward, two thirds of its time; the last bucket starts when that has ended."""
    size = 4 * parameters
    inside, across = ring_bytes(size, gpus), ring_bytes(size / gpus, nodes)
    compute = flops / (gpus * nodes) / (c.mfu * c.peak * 1e12)
    exchange = (inside / c.nvlink + across / c.network) / (c.link_share * 1e9)
    exposed = max(exchange - 2 / 3 * compute / passes, exchange * min(1, c.bucket * 1e6 / size))
    return dict(flops=flops, bytes_sent=inside + across, compute_ms=1e3 * compute, exchange_ms=1e3 * exchange, exposed_ms=1e3 * exposed,
                ms=1e3 * (compute + exposed), efficiency=compute / (compute + exposed))


def papers_settings():
    """The scripts' presets: name -> FLOPs of an item, parameters, items a step, what they are, and the micro-batches on each of n GPUs."""
    with torch.device("meta"):
        vit, mae = ImageClassifier(image_config("base")), MaskedAutoencoder(mae_config("base", "crate"))
        dino, gpt = ImageClassifier(image_config("base", "transformer", classes=1, final_norm=True)), LanguageModel(text_config("base"))
    # SimDINO: the student sees 2 views of 224 px and 10 of 96, the teacher, which learns nothing, the first 2; behind each a projector
    projector = 768 * 2048 + 2048 ** 2 + 2048 * 256
    views = (2 + 2 / 3) * dino.train_flops() + 10 * dino.train_flops(96) + (12 + 2 / 3) * 6 * projector
    return {"train_vit imagenet": (vit.train_flops(), common.count(vit), 2048, "images", lambda n: 1),
            "train_mae imagenet": (mae.train_flops(), common.count(mae), 4096, "images", lambda n: 2),
            "train_simdino imagenet": (views, common.count(dino.encoder) + projector + 2 * 2048 + 256, 1024, "images", lambda n: 1),
            "train_gpt openwebtext": (1024 * gpt.train_flops(), common.count(gpt), 384, "sequences", lambda n: math.ceil(384 / n / 16))}


def bench_scale(c, processes, peak):
    """The papers' settings on 1, 8 and 8 x 8 GPUs; with --check, predictions for this machine beside what it does."""
    lines = []
    for name, (flops, parameters, batch, unit, passes_on) in papers_settings().items():
        for nodes, gpus in ((1, 1), (1, 8), (8, 8)):
            passes = passes_on(nodes * gpus)
            line = dict(row=name, nodes=nodes, gpus=gpus, passes=passes) | on_paper(batch * flops, parameters, gpus, nodes, passes, c)
            lines.append(line | {f"{unit}_per_s": batch / line["ms"] * 1e3})
            print(f"{name:24} {nodes} x {gpus} GPUs {line['flops'] / 1e12:8,.0f} TFLOP a step, {line['bytes_sent'] / 1e6:5,.0f} MB sent, compute",
                  f"{line['compute_ms']:9,.1f} ms, exchange {line['exchange_ms']:5.1f} of which {line['exposed_ms']:5.2f} uncovered,",
                  f"efficiency {line['efficiency']:6.1%}, {batch / line['ms'] * 1e3:8,.0f} {unit}/s", flush=True)
    return lines + (check(c, processes) if c.check else [])


def check(c, processes):
    """Predicted and measured: a step from another model's FLOP/s, an all-reduce from another size's bytes/s, and a step of two
    processes from the step of one and that rate."""
    steps = {title: training_step(model, picture_batch(config, batch, processes.device), processes, c.dtype)
             for title, config, batch in PICTURES for model in [ImageClassifier(config).to(processes.device)]}
    (known, t), (other, measured) = alternate(steps, processes.device, c.repeats).items()
    needed = [batch * ImageClassifier(config).train_flops() for _, config, batch in PICTURES]
    found = [(f"{other}, from {known}", t * needed[1] / needed[0], measured)]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(one_of_two, (folder, PICTURES[1][1], c.repeats), nprocs=2)
        seconds = json.loads(Path(folder, "seconds").read_text())
    size, flops = seconds.pop("bytes"), seconds.pop("flops")
    rate = ring_bytes(2 ** 27, 2) / seconds["128 MB"]
    found.append((f"all-reduce of {size / 1e6:.0f} MB, from 134 MB", ring_bytes(size, 2) / rate, seconds["gradients"]))
    here = replace(c, peak=flops / seconds["alone"] / 1e12, mfu=1.0, nvlink=rate / 1e9, link_share=1.0)
    paper = on_paper(2 * flops, size // 4, 2, 1, 1, here)
    found.append(("2 processes, from 1 and that rate", paper["ms"] / 1e3, seconds["together"]))
    lines = []
    for name, predicted, measured in found:
        lines.append(dict(row=name, predicted_ms=1e3 * predicted, measured_ms=1e3 * measured, ratio=measured / predicted))
        print(f"{name:64} predicted {1e3 * predicted:9.1f} ms, measured {1e3 * measured:9.1f} ms: {measured / predicted:.2f}", flush=True)
    print(f"efficiency of 2 processes: predicted {paper['efficiency']:.1%}, measured {seconds['alone'] / seconds['together']:.1%}")
    return lines


def one_of_two(rank, folder, config, repeats, batch=8):
    """A process of one thread: its step alone (while the other takes one too), with DDP, and the all-reduces; rank 0 writes the seconds."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    processes = common.Processes("cpu")
    model = ImageClassifier(config)
    inputs, size = picture_batch(config, batch, processes.device), 4 * common.count(model)
    parallel = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    buffers = {"gradients": torch.zeros(size // 4), "128 MB": torch.zeros(2 ** 25)}
    variants = {"alone": training_step(model, inputs, processes, "float32"), "together": training_step(parallel, inputs, processes, "float32")}
    variants |= {name: functools.partial(distributed.all_reduce, buffer) for name, buffer in buffers.items()}
    seconds = alternate(variants, processes.device, repeats) | dict(bytes=size, flops=batch * model.train_flops())
    if rank == 0:
        Path(folder, "seconds").write_text(json.dumps(seconds))
    distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------

_CIFAR10 = ImageConfig(width=384, heads=6, layers=12, image_size=32, patch_size=4, classes=10)
PICTURES = [("CRATE-Tiny, 224 px, batch 16", image_config("tiny"), 16),
            ("cifar10 preset, 32 px, batch 64", _CIFAR10, 64)]
AUTOENCODER = ("cifar10 preset, 32 px, batch 64", MAEConfig(width=192, heads=6, layers=6, image_size=32, patch_size=4, lambd=0.5), 64)
SHAPES = [("16 x 197 x 384, 6 heads", 16, 197, 384, 6), ("16 x 197 x 768, 12 heads", 16, 197, 768, 12),
          ("64 x 65 x 384, 6 heads", 64, 65, 384, 6)]
COMMANDS = {
    "vit": (Bench, bench_vit),
    "mae": (Bench, bench_mae),
    "gpt": (Gpt, bench_gpt),
    "ista": (Bench, functools.partial(bench_operator, make=lambda d, K: ISTA(d))),
    "attention": (Bench, functools.partial(bench_operator, make=MSSA)),
    "simdino": (SimDINO, bench_simdino),
    "head": (Head, bench_head),
    "length": (Length, bench_length),
    "generate": (Generate, bench_generate),
    "longrange": (LongRange, bench_longrange),
    "data": (Data, bench_data),
    "loop": (Loop, bench_loop),
    "scale": (Scale, bench_scale),
}


def main(argv):
    """Runs one table, prints it, and returns its lines."""
    command, c = common.parse_command({name: config for name, (config, _) in COMMANDS.items()}, argv, __doc__)
    processes = common.Processes(c.device)
    device = processes.device
    half = c.dtype == "bfloat16" or (c.dtype == "auto" and device.type == "cuda")
    try:
        report = open(c.json, "a") if c.json else None                   # before the measurement, not after
    except OSError as error:
        raise common.UserError(f"--json={c.json}: cannot write there ({error.strerror})") from None
    peak = Ceilings(matmul_peak(device, torch.bfloat16 if half else torch.float32), copy_peak(device))
    machine = dict(device=common.device_name(device), torch=torch.__version__, matmul_gflops_per_s=peak.flops / 1e9,
                   copy_gb_per_s=peak.bytes / 1e9)
    print(f"{machine['device']}, torch {torch.__version__},",
          f"matmul {peak.flops / 1e9:,.0f} GFLOP/s, copy {peak.bytes / 1e9:,.0f} GB/s")
    if command in ("vit", "mae", "gpt", "ista", "attention", "head"):
        print(f"{'':61} {'median':>13} {'ratio':>6} {'arithmetic, of matmul':>25} {'moved, of copy':>20} {'peak memory':>14}")
    lines = COMMANDS[command][1](c, processes, peak)
    if report:
        report.truncate(0)
        json.dump(dict(command=command, **machine, rows=lines), report, indent=1)
        report.close()
    return lines


if __name__ == "__main__":
    common.cli(main)
