"""Speed: the fast paths beside the literal form, a transformer, and what the machine can do.

    python bench.py vit             training steps of image models
    python bench.py gpt             training steps of text models

A literal model computes the same function of the same weights without our fast paths.
The variants of a table take turns, so that other load slows all of them. Times are medians."""
import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from flags import DeviceFlags, option, parse_command, TypeFlags
from measure import print_table, train_flops
from model import ARCHS, attention_map, ImageClassifier, ISTA, ista, LanguageModel, MSSA
from processes import cli, device_name, Processes, wants_compile


@dataclass(kw_only=True)
class Flags(DeviceFlags, TypeFlags):
    """Times of one table, in milliseconds."""
    repeats: int = option(9, "turns of every variant", low=1)
    compile: bool | None = option(None, "torch.compile every variant; auto is cuda only")


# ---- The literal form: what the equations compute, as printed -----------------------------------
class LiteralMSSA(MSSA):
    """An explicit softmax of the n x n Gram matrix and two matmuls, [J] Eq. (35)."""
    def attend(self, q, k, v):
        return attention_map(q, k, self.scale, self.causal) @ v


class LiteralISTA(ISTA):
    """Two matmuls over the tokens, [J] Eq. (44); the released code takes three."""
    def code(self, Z):
        return ista(Z, self.D, self.eta, self.lambd)


CRATE = ARCHS["crate"]
VARIANTS = {"crate": CRATE, "literal attention": CRATE._replace(attention=LiteralMSSA),
            "literal ISTA": CRATE._replace(sparsification=LiteralISTA),
            "literal": CRATE._replace(attention=LiteralMSSA, sparsification=LiteralISTA),
            "transformer": ARCHS["transformer"]}


# ---- The clock ----------------------------------------------------------------------------------
def alternate(calls, device, repeats):
    """{name: median seconds} of functions called in turn, after one turn that is not measured."""
    wait = getattr(torch, device.type).synchronize
    seconds = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}


def forward_backward(processes, forward, leaves):
    """forward() and the gradient of its sum in the leaves, which keep none."""
    with processes.autocast():
        total = forward().sum()
    torch.autograd.grad(total, leaves)


# ---- Training steps -----------------------------------------------------------------------------
def random_batch(c, batch, device):
    """What a model of config c trains on: pictures and labels, or texts and targets."""
    if c.kind == "text":
        return torch.randint(c.vocab_size, (2, batch, c.context), device=device).unbind()
    x = torch.randn(batch, 3, c.image_size, c.image_size, device=device)
    return x, torch.randint(c.classes, (batch,), device=device)


def loss_of(model, x, y):
    return model(x, y) if model.config.kind == "text" else F.cross_entropy(model(x), y)


PYDOC = dict(context=128, width=256, heads=4, layers=4)
CIFAR10 = dict(image_size=32, patch_size=4, classes=10, width=384, heads=6)
# table -> (title, batch, fields of the model)
MODELS = {"vit": [("CRATE-Tiny, 224 px", 16, dict(width=384, heads=6)), ("cifar10", 64, CIFAR10)],
          "gpt": [("pydoc", 32, PYDOC | dict(vocab_size=97)), ("GPT-2's tokens", 8, PYDOC)]}


def build(table, variant, fields):
    """A model of a table; the transformer's width and heads are half as large."""
    model_class = dict(vit=ImageClassifier, gpt=LanguageModel)[table]
    if variant == "transformer":
        fields = fields | dict(width=fields["width"] // 2, heads=fields["heads"] // 2)
    return model_class(model_class.config_class(arch=VARIANTS[variant], **fields))


def bench_steps(table, c, processes):
    """Forward and backward of CRATE, with each fast path made literal, and of a transformer of half
    the width, with about as many parameters: times, and their shares of the time of "literal".
    "of the machine" is the rate of `train_flops` in units of that of a product of 2,048 x 2,048
    matrices, in the type that the steps are in and in the same turns."""
    device, unit = processes.device, "tokens" if table == "gpt" else "images"
    dtype = torch.bfloat16 if processes.bfloat16 else torch.float32
    A, B = torch.randn(2, 2048, 2048, device=device, dtype=dtype)
    for title, batch, fields in MODELS[table]:
        torch._dynamo.reset()       # it compiles one function only so many times
        # a GPU needs larger batches, or launching its kernels is all that is timed
        batch = 8 * batch if device.type == "cuda" else batch
        models = {name: build(table, name, fields) for name in VARIANTS}
        x, y = random_batch(models["crate"].config, batch, device)
        steps = dict(machine=partial(torch.mm, A, B))
        for name, model in models.items():
            loss = partial(loss_of, model.to(device), x, y)
            if wants_compile(c.compile, device):
                loss = torch.compile(loss)
            steps[name] = partial(forward_backward, processes, loss, list(model.parameters()))
        times = alternate(steps, device, c.repeats)
        machine = 2 * 2048 ** 3 / times["machine"]
        print(f"{title}, batch {batch}; a product of 2,048 x 2,048 matrices: {machine / 1e9:,.0f} "
              "GFLOP/s")
        print_table([{
            "variant": name, "ms": 1e3 * times[name], "of literal": times[name] / times["literal"],
            f"{unit}/s": batch * fields.get("context", 1) / times[name],
            "of the machine": batch * train_flops(model) / times[name] / machine}
            for name, model in models.items()])


COMMANDS = {table: (Flags, partial(bench_steps, table)) for table in MODELS}


def main(argv):
    _, function, c = parse_command(COMMANDS, argv, __doc__)
    processes = Processes(c.device, c.dtype)
    print(f"{device_name(processes.device)}, torch {torch.__version__}")
    function(c, processes)


if __name__ == "__main__":
    cli(main)
