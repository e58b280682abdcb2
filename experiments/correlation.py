"""Does sparse rate reduction predict generalization?

Claim of [S] Table 1: over a grid of runs the SRR measure, the negative of the sparse rate
reduction, correlates with the generalization gap, Kendall's tau being 0.45. The gap is the
validation loss less the training loss, over whole splits. Runs compare only if they fit the
training set alike, so each ends soon after its training loss falls below 0.2.

    python -m experiments.correlation       # trains the 48 runs of GRID, or those that are left
"""
import contextlib
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
from flags import CacheFlags, DeviceFlags, option, parse, ROOT, UserError
from measure import spread
from model import sparse_rate_reduction
from processes import cli, Processes

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
    samples: int = option(1000, "training images of which SRR is the mean", low=1)
    dtype: str = option("float32", "autocast's", choices=("float32", "bfloat16"))


# ---- The measure --------------------------------------------------------------------------------
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


def correlation(x, y, draws=2000, seed=0):
    """[tau, low, high] of x and y (n,); low and high are the 2.5 and 97.5 percentiles of
    bootstrapped runs."""
    n = len(x)
    samples = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), draws)
    tau, *taus = tau_b(x, y, np.concatenate([np.ones((1, n)), samples]))     # as they are, first
    return [tau, *np.percentile(taus, (2.5, 97.5))]


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
    """One run: dict(theta, train_loss, gap, srr)."""
    folder = Path(c.out_dir) / "-".join(map(str, theta.values()))
    loaded, data, train, loss = fit(theta, folder, c, processes)
    val = images.Images(data.val, processes.device)
    gap = classify(loaded.model, val, data, processes)["loss"] - loss
    batch = train.batch(spread(len(train), c.samples))[0]
    x = images.model_input(batch, data, loaded.encoder.config.image_size)
    return dict(theta=theta, train_loss=loss, gap=gap, srr=-mean_objective(loaded.encoder, x))


def main(argv):
    """([tau, low, high], rows): Kendall's tau of SRR and gap with its 95 % interval, the runs."""
    c = parse(Correlation, argv, __doc__)
    processes, rows = Processes(c.device, c.dtype), []
    for number, theta in enumerate(GRID, 1):
        row = examine(theta, c, processes)
        print(f"{number}/{len(GRID)} {theta}: training loss {row['train_loss']:.4f}, gap "
              f"{row['gap']:.4f}, SRR {row['srr']:.2f}", file=sys.stderr, flush=True)
        if row["train_loss"] <= c.fitted:
            rows.append(row)
    if len(rows) < 3:
        raise UserError(f"--fitted={c.fitted:g} is reached by {len(rows)} runs, 3 are needed")
    found = correlation(*(np.array([row[name] for row in rows]) for name in ("srr", "gap")))
    print(f"Kendall's tau of {len(rows)} runs: {found[0]:.2f}, 95 % interval {found[1]:.2f} to "
          f"{found[2]:.2f}")
    return found, rows


if __name__ == "__main__":
    cli(main)
