"""
Speed, side by side: our fast path, the literal form it replaces, and the obvious alternatives.

    python bench.py vit          whole training steps (forward, backward): CRATE-Tiny at 224 px, the cifar10 preset
    python bench.py ista         the sparsification operator alone
    python bench.py attention    the compression operator alone

All variants of a row run in one process, in turn, so that what disturbs one disturbs all; the median is reported, with its
ratio to the literal form, the FLOP/s that the mathematics needs, and their share of what a large matmul reaches here.
"""
import copy
import json
import statistics
import time
import types
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import common
from common import option
from model import ISTA, MSSA, ImageClassifier, ImageConfig, image_config, train_flops_per_token


@dataclass(kw_only=True)
class Bench:
    """One table. The first column of times is the median over --repeats turns."""
    repeats: int = option(9, "turns of every variant", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast", choices=("auto", "float32", "bfloat16"))
    compile: bool = option(False, "add a row for the compiled model")
    json: str | None = option(None, "also write the table to this file")


def released_mssa(self, Z, state=None):
    """MSSA as the released code has it: one projection, an explicit softmax, two matmuls ([J] Eq. (37))."""
    w = self.project(Z)
    weights = (w @ w.mT * self.scale).softmax(-1)
    return self.W((weights @ w).transpose(1, 2).flatten(-2))


def released_ista(self, Z):
    """ISTA as the released code has it: three matmuls over the tokens ([J] Eq. (44))."""
    reconstruction = F.linear(Z, self.D)
    ascent = F.linear(reconstruction, self.D.mT)
    descent = F.linear(Z, self.D.mT)
    return F.relu(Z + self.eta * (descent - ascent) - self.eta * self.lambd)


def literal(model):
    """A copy of the model whose MSSA and ISTA compute as the released code does. Same parameters, same function."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, (MSSA, ISTA)):
            module.forward = types.MethodType(released_mssa if isinstance(module, MSSA) else released_ista, module)
    return model


class TorchEncoder(nn.Module):
    """PyTorch's own TransformerEncoderLayer at a given width, with the embedding and head of our ViT."""

    def __init__(self, config):
        super().__init__()
        self.model = ImageClassifier(config)
        c = config
        self.model.encoder.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(c.width, c.heads, 4 * c.width, 0.0, "gelu", batch_first=True, norm_first=True) for _ in range(c.layers))

    def forward(self, x):
        """Logits of a batch of pictures."""
        return self.model(x)


def synchronize(device):
    """Waits until the device has done what was asked of it."""
    if device.type in ("cuda", "mps"):
        getattr(torch, device.type).synchronize()


def alternate(variants, device, repeats):
    """Seconds of each variant (a function), the median of `repeats` turns through all of them after one unmeasured turn."""
    seconds = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, function in variants.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def matmul_peak(device, dtype, n=None):
    """FLOP/s of a large square matmul here, best of five: the ceiling for everything below."""
    n = n or (8192 if device.type == "cuda" else 2048)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = min(alternate({"matmul": lambda: a @ b}, device, 1)["matmul"] for _ in range(5))
    return 2 * n ** 3 / best


def training_step(model, x, y, processes, dtype):
    """Forward, loss and backward of one batch, as a function without arguments."""
    def step():
        with processes.autocast(dtype):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.grad = None
    return step


def row(title, variants, flops, processes, c, peak):
    """Times the variants, prints their lines, and returns them. `flops` is what the mathematics of each needs."""
    if processes.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = alternate(variants, processes.device, c.repeats)
    base = next((t for name, t in times.items() if "literal" in name), None)
    lines = []
    for name, seconds in times.items():
        rate = flops[name] / seconds
        lines.append(dict(row=title, variant=name, ms=1e3 * seconds, ratio=seconds / base if base else None, gflops_per_s=rate / 1e9, of_matmul=rate / peak))
        ratio = f"{seconds / base:6.2f}" if base else "      "
        print(f"{title:34} {name:26} {1e3 * seconds:10.2f} ms {ratio} {rate / 1e9:10.1f} GFLOP/s {rate / peak:6.1%}", flush=True)
    return lines


def bench_vit(c, processes, peak):
    """Training steps of the fast path, the literal form, a ViT of equal parameters, and PyTorch's own layer at equal width."""
    device, lines = processes.device, []
    settings = [("CRATE-Tiny, 224 px, batch 16", image_config("tiny"), 16),
                ("cifar10 preset, 32 px, batch 64", ImageConfig(width=384, heads=6, layers=12, image_size=32, patch_size=4, classes=10), 64)]
    for title, config, batch in settings:
        x = torch.randn(batch, 3, config.image_size, config.image_size, device=device)
        y = torch.randint(config.classes, (batch,), device=device)
        equal = ImageConfig(**{**vars(config), "arch": "transformer", "width": config.width // 2, "heads": config.heads // 2, "head_dim": None,
                               **dict.fromkeys(("stem", "final_norm", "norm_eps", "qkv_bias", "out_bias", "layer_scale"))})
        wide = ImageConfig(**{**vars(equal), "width": config.width, "heads": config.heads, "head_dim": None})
        fast = ImageClassifier(config).to(device)
        models = {"fast": fast, "literal (released code)": literal(fast), "transformer, equal params": ImageClassifier(equal).to(device),
                  "torch layer, equal width": TorchEncoder(wide).to(device)}
        need = {name: batch * fast.train_flops() for name in ("fast", "literal (released code)", "fast, compiled")}
        need["transformer, equal params"] = batch * models["transformer, equal params"].train_flops()
        need["torch layer, equal width"] = batch * ImageClassifier(wide).train_flops()
        if c.compile:
            models["fast, compiled"] = torch.compile(copy.deepcopy(fast))
        steps = {name: training_step(model, x, y, processes, c.dtype) for name, model in models.items()}
        lines += row(title, steps, need, processes, c, peak)
    return lines


def operator_steps(modules, Z, g, processes, dtype):
    """Forward and backward of each operator on Z (B, n, d) with upstream gradient g."""
    def step(module):
        def run():
            with processes.autocast(dtype):
                out = module(Z)
            out.backward(g.to(out.dtype))
            Z.grad = None
            for p in module.parameters():
                p.grad = None
        return run
    return {name: step(module) for name, module in modules.items()}


def bench_operator(c, processes, peak, make, shapes):
    """Fast against literal for one operator at the shapes of CRATE-Tiny (224 px), CRATE-Base and the cifar10 preset."""
    lines = []
    for title, B, n, d, K in shapes:
        module = make(d, K).to(processes.device)
        Z = torch.randn(B, n, d, device=processes.device, requires_grad=True)
        models = {"fast": module, "literal (released code)": literal(module)}
        layer = types.SimpleNamespace(parameters=module.parameters, attention=module, sparsification=None)
        per_token = 6 * sum(p.numel() for p in module.parameters() if p.ndim == 2) if isinstance(module, ISTA) else train_flops_per_token([layer], n)
        lines += row(title, operator_steps(models, Z, torch.randn_like(Z), processes, c.dtype), dict.fromkeys(models, B * n * per_token), processes, c, peak)
    return lines


SHAPES = [("16 x 197 x 384, 6 heads", 16, 197, 384, 6), ("16 x 197 x 768, 12 heads", 16, 197, 768, 12), ("64 x 65 x 384, 6 heads", 64, 65, 384, 6)]
COMMANDS = {
    "vit": bench_vit,
    "ista": lambda c, processes, peak: bench_operator(c, processes, peak, lambda d, K: ISTA(d), SHAPES),
    "attention": lambda c, processes, peak: bench_operator(c, processes, peak, lambda d, K: MSSA(d, K), SHAPES),
}


def main(argv):
    """Runs one table, prints it, and returns its lines."""
    command, c = common.parse_command(dict.fromkeys(COMMANDS, Bench), argv, __doc__)
    processes = common.Processes(c.device)
    half = c.dtype == "bfloat16" or (c.dtype == "auto" and processes.device.type == "cuda")
    peak = matmul_peak(processes.device, torch.bfloat16 if half else torch.float32)
    print(f"{common.device_name(processes.device)}, torch {torch.__version__}, matmul {peak / 1e9:,.0f} GFLOP/s; ratio is to the literal form")
    lines = COMMANDS[command](c, processes, peak)
    if c.json:
        with open(c.json, "w") as f:
            json.dump(dict(device=common.device_name(processes.device), torch=torch.__version__, matmul_gflops_per_s=peak / 1e9, rows=lines), f, indent=1)
    return lines


if __name__ == "__main__":
    common.cli(main)
