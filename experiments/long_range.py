"""Does attention by token statistics lose anything on long sequences?

Claim, [B] Table 7.10 (long-range arena): ToST's attention, whose cost grows as n and not as n^2,
loses nothing: ToST reaches 59.90 on average over five tasks, the transformer 59.24. Here its task
"image" (46.62 and 42.94): CIFAR-10 as a sequence of grey pixels, by models of equal parameters.

    python -m experiments.long_range                # 16 x 16 pixels; the claim's: --side=32

Verdict: the cost is as claimed. With four times the tokens (16 x 16, then 32 x 32 pixels) a step on
16 pictures takes ToST 3.9 times as long (74, 291 ms), the transformer 11.6 (85, 987) and CRATE 13
times (132, 1,730; --seeds=1 --steps=6, one core of Zen 4, 2026-11-26). Whether ToST loses accuracy
is open: with --steps=400 it gets 16.6 % right, the transformer 17.6, CRATE 20.4, each +- 0.7.
"""
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from data import augment, images
from figures import averages, print_table
from flags import DataFlags, option, parse
from model import LanguageModel, TextConfig
from optim import make_optimizers, take_step, warmup_cosine
from processes import cli, derive_seed, PrecisionFlags, Processes

# 197,000 parameters each beside the embeddings, in four layers
SIZES = {"tost": dict(width=70, heads=2), "transformer": dict(width=64, heads=2),
         "crate": dict(width=128, heads=4)}


@dataclass(kw_only=True)
class LongRange(PrecisionFlags, DataFlags):
    side: int = option(16, "pixels per side of a picture", low=1, high=32)
    held_out: int = option(5000, "pictures to test on", low=1)
    seeds: int = option(3, "runs of each arch", low=1)
    steps: int = option(1000, "steps of each run; the first is not timed", low=2)
    batch_size: int = option(16, "sequences per step", low=1)
    lr: float = option(1e-3, "AdamW's; warm-up over a tenth of the steps, cosine to 0", above=0)


def grey_pixels(pictures, side):
    """uint8 (N, 32, 32, 3) as rows of grey pixels, one after another: 0 to 255, (N, side^2)."""
    grey = augment.luma(augment.to_float(torch.from_numpy(np.array(pictures))))
    return (255 * F.adaptive_avg_pool2d(grey, side)).round().long().flatten(1)


class SequenceClassifier(LanguageModel):
    """model(ids) takes (B, n) and returns logits (B, 10), from the mean of the tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.head = nn.Linear(config.width, 10)

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.tokens(ids))).mean(1))


def train(c, arch, seed, x, y, processes):
    """(A model trained on ids x (N, n) and their classes y (N,), median seconds of a step)."""
    torch.manual_seed(derive_seed(seed, arch))
    config = TextConfig(arch=arch, layers=4, context=x.shape[1], vocab_size=256, causal=False,
                        **SIZES[arch])
    model = SequenceClassifier(config).to(processes.device)
    optimizers = make_optimizers(model, "adamw", c.lr, 0.05, (0.9, 0.95))
    rates = warmup_cosine(c.lr, c.steps, c.steps // 10)
    batches = images.index_batches(len(x), c.batch_size, seed)          # the same for every arch
    seconds = []
    for step in tqdm(range(c.steps), f"{arch} {seed}", disable=None):
        index = next(batches)
        start = time.perf_counter()
        with processes.autocast():
            loss = F.cross_entropy(model(x[index]), y[index])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        take_step(optimizers, rates[step])
        loss.item()                         # waits for the device, so that the clock is right
        seconds.append(time.perf_counter() - start)
    return model, statistics.median(seconds[1:])


@torch.no_grad()
def accuracy(model, x, y, processes):
    with processes.autocast():
        chosen = torch.cat([model(ids).argmax(-1) for ids in x.split(100)])
    return (chosen == y).double().mean().item()


def main(argv):
    """[{"arch", "ms", "accuracy", ...}, ...]: means over the seeds, and their standard errors."""
    c, _ = parse(LongRange, {}, argv, __doc__)
    processes = Processes(c.device, c.dtype)
    data = images.load("cifar10", c.data_dir)

    def on_device(pictures, labels):
        return (grey_pixels(pictures, c.side).to(processes.device),
                torch.from_numpy(labels).to(processes.device))

    x, y = on_device(data.train_images, data.train_labels)
    x_test, y_test = on_device(data.val_images[:c.held_out], data.val_labels[:c.held_out])
    rows = []
    for arch in SIZES:
        runs = []
        for seed in range(c.seeds):
            model, seconds = train(c, arch, seed, x, y, processes)
            runs.append(dict(ms=1e3 * seconds, accuracy=accuracy(model, x_test, y_test, processes)))
        rows.append(dict(arch=arch) | averages(runs))
    print_table(rows)
    return rows


if __name__ == "__main__":
    cli(main)
