"""Does sparse rate reduction predict generalization?

Claim of [S] Table 1: over a grid of runs the SRR measure, the negative of the sparse rate
reduction, correlates with the generalization gap (Kendall's tau 0.45) and better than other
measures. The one that was strongest here stands beside it, PAC-Bayes from initialization of [G]
(Jiang et al., Fantastic Generalization Measures and Where to Find Them, ICLR 2020, Appendix C);
larger should mean a larger gap. The gap is the validation loss less the training loss, over whole
splits. Measures compare only among runs that fit the training set alike, so each run ends soon
after its training loss falls below 0.2.

    python -m experiments.correlation       # trains the 48 runs of GRID, or those that are left
"""
import contextlib
import math
import os
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

import train_vit
from checkpoint import load_model
from data import images
from evaluate import classify
from figures import print_table
from flags import CacheFlags, DeviceFlags, option, parse, ROOT, UserError
from measure import spread
from model import sparse_rate_reduction
from processes import cli, derive_seed, Processes

RECIPE = ("cifar10-small --train_images=3000 --width=128 --heads=4 --layers=4 --patch_size=8 "
          "--crop=none --flip=false --label_smoothing=0 --weight_decay=0 --warmup_epochs=1 "
          "--eval_every=1000000 --compile=false").split()
GRID = [dict(arch=arch, lr=lr, batch_size=batch_size, dropout=dropout, seed=seed)
        for arch, lr, batch_size, (dropout, seed) in product(
            ("crate", "crate-c", "crate-n", "crate-t"), (2.5e-3, 5e-3), (64, 128),
            ((0.0, 0), (0.0, 1), (0.1, 0)))]


@dataclass(kw_only=True)
class Correlation(DeviceFlags, CacheFlags):
    out_dir: str = option(str(ROOT / "out" / "grid"), "where the folders of the runs are")
    fitted: float = option(0.2, "the training loss at which a run ends, looked at every three "
                           "epochs; one that does not get there in 99 is left out", above=0)
    samples: int = option(1000, "training images for the measures", low=1)
    dtype: str = option("float32", "autocast's", choices=("float32", "bfloat16"))


# ---- Measures -----------------------------------------------------------------------------------
def largest_sigma(accuracy, drop=0.1, low=1e-5, high=10.0, rounds=12):
    """The largest sigma with accuracy(sigma) >= accuracy(0) - drop, by bisection of log sigma."""
    goal = accuracy(0.0) - drop
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if accuracy(middle) >= goal else (low, middle)
    return low


@torch.no_grad()
def noisy_accuracy(model, x, y, sigma, draws=5):
    """Mean accuracy with noise N(0, sigma^2) on every matrix, from the same draws for any sigma."""
    right = 0
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        noisy = {name: p + sigma * torch.randn(p.shape, generator=generator).to(p)
                 for name, p in model.named_parameters() if p.ndim == 2}
        right += (torch.func.functional_call(model, noisy, x).argmax(1) == y).sum().item()
    return right / (draws * len(y))


@torch.no_grad()
def mean_objective(encoder, x):
    """The mean over layers and images of R(Z) - R^c(Z | U) - lambda ||Z||_0 of Z = Z^{l+1}, with
    our eps 0.5 and lambda 0.1: [S] does not give its own."""
    total, layers = 0.0, encoder.layers
    for part in x.split(250):
        for layer, trace in zip(layers, encoder.trace(part), strict=True):
            Z, U = trace.out.cpu().double(), layer.attention.bases().cpu().double()
            total += sparse_rate_reduction(Z, U).sum().item()
    return total / (len(x) * len(layers))


def complexities(model, initial, x, y, m):
    """{measure: value} of a network trained on m images from `initial`; x, y are some. PAC-Bayes is
    ((||W - W_0||^2 / (4 sigma^2) + log(m / sigma) + 10) / m)^1/2, with the largest sigma whose
    noise costs at most a tenth of accuracy."""
    moved = sum((w - v).detach().cpu().double().square().sum().item()
                for w, v in zip(model.parameters(), initial.to(x.device).parameters(), strict=True)
                if w.ndim == 2)
    sigma = largest_sigma(lambda s: noisy_accuracy(model, x, y, s))
    bound = (moved / (4 * sigma ** 2) + math.log(m / sigma) + 10) / m
    return {"SRR": -mean_objective(model.encoder, x), "PAC-Bayes": math.sqrt(bound)}


# ---- Kendall's tau ------------------------------------------------------------------------------
def tau_b(x, y, counts):
    """Kendall's tau-b of x, y (n,) where run i occurs counts[b, i] times, counts (B, n): (B,).

        sum_{i<j} sign(x_i - x_j) sign(y_i - y_j) / sqrt(pairs that differ in x * in y)

    A run and its copies are no pair. 0 where all runs tie in x or y.
    [S] prints tau-a but has tau-b: -0.572 for # params, where half the pairs tie, exceeds 1/2."""
    sx, sy = np.sign(x[:, None] - x), np.sign(y[:, None] - y)
    both, in_x, in_y = (((counts @ signs) * counts).sum(1)
                        for signs in (sx * sy, abs(sx), abs(sy)))
    return both / np.sqrt(np.where(in_x * in_y > 0, in_x * in_y, 1))        # both is 0 there


def correlations(rows, draws=2000, seed=0):
    """{measure: [tau, low, high]} of rows dict(gap, measures); low and high are the 2.5 and 97.5
    percentiles of bootstrapped runs."""
    n, y = len(rows), np.array([row["gap"] for row in rows])
    samples = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), draws)
    counts = np.concatenate([np.ones((1, n)), samples])             # the runs themselves come first
    table = {}
    for name in rows[0]["measures"]:
        taus = tau_b(np.array([row["measures"][name] for row in rows]), y, counts)
        table[name] = [taus[0], *np.percentile(taus[1:], (2.5, 97.5))]
    return table


# ---- The runs -----------------------------------------------------------------------------------
def fit(theta, folder, c, processes):
    """Trains a run of the grid, or what is left of it, until its training loss is at most c.fitted:
    (`Loaded`, the image set, its part that is trained on, training loss)."""
    flags = theta | {name: getattr(c, name) for name in ("device", "dtype", "data_dir")}
    flags |= dict(min_lr=theta["lr"], out_dir=folder)
    for epochs in range(3, 100, 3):         # at a constant rate, so that a run can be made longer
        there = (folder / "ckpt.pt").exists()
        flags |= dict(epochs=epochs, resume=there, overwrite=not there)
        with open(os.devnull, "w") as mute, contextlib.redirect_stdout(mute):
            train_vit.main([*RECIPE, *(f"--{name}={value}" for name, value in flags.items())])
        loaded = load_model(folder / "ckpt.pt", tasks=("vit",))
        data = images.load_for(None, loaded.meta, c.data_dir)
        n = loaded.content["run_config"]["train_images"]
        train = images.Images(data.hold_out(0, n).train, processes.device)
        loss = classify(loaded.model.to(processes.device), train, data, processes)["loss"]
        if loss <= c.fitted:
            break
    return loaded, data, train, loss


def examine(theta, c, processes):
    """One run: dict(theta, train_loss, gap, measures)."""
    folder = Path(c.out_dir) / "-".join(map(str, theta.values()))
    loaded, data, train, loss = fit(theta, folder, c, processes)
    model = loaded.model
    initial = load_model(folder / "ckpt.pt", untrained_seed=derive_seed(theta["seed"], "weights"))
    val = images.Images(data.val, processes.device)
    gap = classify(model, val, data, processes)["loss"] - loss
    batch, y = train.batch(spread(len(train), c.samples))
    x = images.model_input(batch, data, model.config.image_size)
    return dict(theta=theta, train_loss=loss, gap=gap,
                measures=complexities(model, initial.model, x, y, len(train)))


def main(argv):
    """(taus, rows): Kendall's tau of each measure with its 95 % interval, and the runs."""
    c = parse(Correlation, argv, __doc__)
    processes, rows = Processes(c.device, c.dtype), []
    for number, theta in enumerate(GRID, 1):
        row = examine(theta, c, processes)
        fits = row["train_loss"] <= c.fitted
        if fits:
            rows.append(row)
        print(f"{number}/{len(GRID)} {theta}: training loss {row['train_loss']:.4f}, gap "
              f"{row['gap']:.4f}{', left out' * (not fits)}", file=sys.stderr, flush=True)
    if len(rows) < 3:
        raise UserError(f"--fitted={c.fitted:g} is reached by {len(rows)} runs, 3 are needed")
    table = correlations(rows)
    print(f"Kendall's tau of {len(rows)} runs, and its 95 % interval")
    print_table([dict(measure=name, tau="{:.2f} [{:.2f}, {:.2f}]".format(*line))
                 for name, line in table.items()])
    return table, rows


if __name__ == "__main__":
    cli(main)
