"""
Does sparse rate reduction predict generalization?

Claim of [S] Table 1: over a grid of runs the SRR measure, the negative of the sparse rate
reduction, correlates with the generalization gap better than other complexity measures (Kendall's
tau 0.45). Measures and method are those of [G]: Jiang et al., Fantastic Generalization Measures and
Where to Find Them (ICLR 2020), Section 2 and Appendix C; larger should mean a larger gap. The gap
is the validation loss less the training loss of ckpt.pt, over whole splits, without augmentation.

    python train_vit.py cifar10-small --train_images=3000 --width=128 --heads=4 --layers=4 \\
        --patch_size=8 --crop=none --flip=false --label_smoothing=0 --weight_decay=0 \\
        --warmup_epochs=1 --epochs=100 --arch=A --lr=R --min_lr=R --batch_size=B --dropout=D \\
        --seed=S --out_dir=out/grid/NAME                   # for every A, R, B, D, S
    python -m experiments.correlation --runs=out/grid --axes=arch,lr,batch_size,dropout

All runs are of equal length, at a constant rate. Those that have not fitted the training set
(--fitted) are left out, since measures compare only among runs that fit it.

Verdict (2026-11-22; 48 runs of CRATE, -C, -N, -T, eps 0.5): not confirmed. SRR has [S]'s sign, 0.24
[0.01, 0.46], hardly beyond chance; PAC-Bayes from initialization is stronger, 0.49 [0.33, 0.62].
That table's runs were stopped at equal training loss (0.09 to 0.20), not after equal length.
"""
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from analyze import spread
from checkpoint import load_model
from data import images
from flags import cli, DeviceFlags, needed, option, parse, UserError
from model import not_one_of, sparse_rate_reduction
from parallel import count, derive_seed, Processes
from scores import classify, images_for, model_input, on_device


@dataclass(kw_only=True)
class Correlation(DeviceFlags):
    runs: str | None = option(None, "the folder that holds the runs' folders")
    axes: str | None = option(None, "hyperparameters that differ, as in lr,arch; of those that "
                              "vary together, as width and heads, one")
    fitted: float = option(0.2, "the largest training loss of a run that counts", low=0)
    samples: int = option(1000, "training images for SRR, margin and flatness", low=1)
    eps: float = option(0.5, "distortion in the SRR measure; [S] does not give its own", above=0)
    lambd: float = option(0.1, "weight of ||Z||_0 in the SRR measure; likewise", low=0)
    draws: int = option(5, "of the noise on the weights (flatness)", low=1)
    bootstrap: int = option(2000, "resamplings of the runs", low=1)
    batch_size: int = option(250, "images at once", low=1)
    dtype: str = option("float32", "of autocast", choices=("float32", "bfloat16"))


def margin_of(logits, y):
    """The 10th percentile of f(x)_y - max_{j != y} f(x)_j: logits (m, classes), y (m,)."""
    right = logits.gather(1, y[:, None])
    wrong = logits.scatter(1, y[:, None], -math.inf).amax(1, keepdim=True)
    return (right - wrong)[:, 0].kthvalue(math.ceil(len(y) / 10)).values.item()


@torch.no_grad()
def path_norm(model, shape):
    """The sum of the outputs of the network with squared parameters on an input of ones (C, H, W):
    without normalization, the sum over paths of squared products. Here LayerNorms stay."""
    squared = {name: p.detach().square() for name, p in model.named_parameters()}
    ones = torch.ones(1, *shape, device=next(model.parameters()).device)
    return torch.func.functional_call(model, squared, ones).sum().item()


def largest_sigma(accuracy, drop=0.1, low=1e-5, high=10.0, rounds=12):
    """The largest sigma with accuracy(sigma) >= accuracy(0) - drop, by bisection of log sigma."""
    goal = accuracy(0.0) - drop
    for _ in range(rounds):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if accuracy(middle) >= goal else (low, middle)
    return low


@torch.no_grad()
def noisy_accuracy(model, x, y, sigma, draws):
    """Mean accuracy with noise N(0, sigma^2) on every matrix, in the same directions for each
    sigma, so that bisection can work."""
    right = 0
    for draw in range(draws):
        generator = torch.Generator().manual_seed(draw)
        noisy = {name: p + sigma * torch.randn(p.shape, generator=generator).to(p)
                 for name, p in model.named_parameters() if p.ndim == 2}
        right += (torch.func.functional_call(model, noisy, x).argmax(1) == y).sum().item()
    return right / (draws * len(y))


@torch.no_grad()
def mean_srr(encoder, x, c):
    """The mean over layers and images of the sparse rate reduction of Z^{l+1}."""
    total, layers = 0.0, encoder.layers
    for part in x.split(c.batch_size):
        for layer, trace in zip(layers, encoder.trace(part), strict=True):
            Z, U = trace.out.cpu().double(), layer.attention.bases().cpu().double()
            total += sparse_rate_reduction(Z, U, c.eps, c.lambd).sum().item()
    return total / (len(x) * len(layers))


def complexities(model, initial, x, y, m, c):
    """{measure: value, or NaN} of a network trained on m images from `initial`; x, y are some."""
    W, V = ([p.detach().cpu().double() for p in network.parameters() if p.ndim == 2]
            for network in (model, initial))
    size = sum(w.square().sum() for w in W).item()
    moved = sum((w - v).square().sum() for w, v in zip(W, V, strict=True)).item()
    with torch.no_grad():
        margin = margin_of(model(x), y)
    sigma = largest_sigma(lambda s: noisy_accuracy(model, x, y, s, c.draws))

    def pac_bayes(square):
        return math.sqrt((square / (4 * sigma ** 2) + math.log(m / sigma) + 10) / m)
    return {"# params": count(model),
            "SRR": -mean_srr(model.encoder, x, c),
            "path-norm": path_norm(model, x.shape[1:]),
            "1/margin": margin ** -2 if margin > 0 else math.nan,
            "l2-norm": math.sqrt(size),
            "l2-norm-init": math.sqrt(moved),
            "pac-bayes-init": pac_bayes(moved),
            "pac-bayes-orig": pac_bayes(size),
            "1/sigma pac-bayes-flatness": sigma ** -2}


def tau_b(x, y, counts):
    """Kendall's tau-b of x, y (n,) where run i occurs counts[b, i] times, counts (B, n): (B,).

        sum_{i<j} sign(x_i - x_j) sign(y_i - y_j) / sqrt(pairs that differ in x * in y)

    A run and its copies are no pair. 0 where all runs tie in x or y, NaN where there is no pair.
    [S] writes tau-a, with all pairs in the denominator, but its Table 1 holds tau-b (# params:
    -0.572, where three of four pairs tie)."""
    sx, sy = np.sign(x[:, None] - x), np.sign(y[:, None] - y)
    pairs, both, in_x, in_y = (((counts @ signs) * counts).sum(1)
                               for signs in (1.0 - np.eye(len(x)), sx * sy, abs(sx), abs(sy)))
    tau = both / np.sqrt(np.where(in_x * in_y > 0, in_x * in_y, 1))     # both is 0 there
    return np.where(pairs > 0, tau, np.nan)


def nanmean(parts, n):
    """The mean over parts of (n,) arrays, without NaN; NaN where nothing is left."""
    return np.ma.masked_invalid(np.reshape(parts, (-1, n))).mean(0).filled(np.nan)


def granulated_tau(x, y, thetas, axis, axes, counts):
    """psi_i of [G] Section 2.2.2: the mean of tau over groups of runs that agree in the seed and in
    every axis but `axis`."""
    groups = {}
    for i, theta in enumerate(thetas):
        others = [theta.get(name) for name in ("seed", *axes) if name != axis]
        groups.setdefault(repr(others), []).append(i)
    taus = [tau_b(x[g], y[g], counts[:, g]) for g in groups.values()
            if len({repr(thetas[i].get(axis)) for i in g}) > 1]
    return nanmean(taus, len(counts))


def correlations(rows, axes, draws=2000, seed=0):
    """{measure: {axis or "overall" or "psi": [tau, low, high], "n": runs}} of rows
    dict(theta, gap, measures).

    An axis is missing where no two runs differ in it alone; psi is the mean over axes. low and high
    are the 2.5 and 97.5 percentiles over bootstrap samples of the runs. Runs in which a measure is
    not finite are left out for it."""
    table = {}
    for name in rows[0]["measures"]:
        kept = [row for row in rows if math.isfinite(row["measures"][name])]
        n = len(kept)
        table[name] = dict(n=n)
        if n < 3:
            continue
        x, y = np.array([(row["measures"][name], row["gap"]) for row in kept]).T
        samples = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), draws)
        counts = np.concatenate([np.ones((1, n)), samples])         # the runs themselves come first
        thetas = [row["theta"] for row in kept]
        taus = {axis: granulated_tau(x, y, thetas, axis, axes, counts) for axis in axes}
        psi = nanmean(list(taus.values()), len(counts))
        for key, tau in (taus | dict(overall=tau_b(x, y, counts), psi=psi)).items():
            if not np.isnan(tau[0]):
                interval = np.nanpercentile(tau[1:], (2.5, 97.5))
                table[name][key] = [float(tau[0]), *interval.tolist()]
    return table


def examine(folder, c, processes):
    """One run: dict(theta, gap, train_loss, measures)."""
    loaded = load_model(folder / "ckpt.pt", ("vit",))
    theta, model = loaded.content["run_config"], loaded.model.to(processes.device)
    initial = load_model(folder / "ckpt.pt", untrained_seed=derive_seed(theta["seed"], "weights"))
    data = images_for(None, loaded.meta, c.data_dir)
    n = theta.get("train_images")                                   # None: all
    train = images.Images(data.train_images[:n], data.train_labels[:n], processes.device)
    val = on_device(data, "val", processes.device)
    train_loss, val_loss = (classify(model, split, data, c, processes, c.batch_size)["loss"]
                            for split in (train, val))

    batch, y = train.batch(spread(len(train), c.samples))
    x = model_input(batch, data, model.config.image_size)
    return dict(theta=theta, gap=val_loss - train_loss, train_loss=train_loss,
                measures=complexities(model, initial.model, x, y, len(train), c))


def examine_all(c):
    """The rows of the runs that count. Says which are left out."""
    rows = []
    for run in sorted(Path(needed(c.runs, "runs")).glob("*/metrics.jsonl")):
        if '"event": "done"' not in run.read_text():
            print(f"{run.parent.name}: left out: not finished", file=sys.stderr)
            continue
        row = examine(run.parent, c, Processes(c.device, c.dtype))
        fits = row["train_loss"] <= c.fitted
        rows += [row] * fits
        print(f"{run.parent.name}: training loss {row['train_loss']:.4f}, gap {row['gap']:.4f}"
              f"{', left out' * (not fits)}", file=sys.stderr, flush=True)
    if len(rows) < 3:
        raise UserError(f"--runs={c.runs}: {len(rows)} finished runs with a training loss of at "
                        f"most --fitted={c.fitted:g}, 3 are needed")
    return rows


def main(argv):
    """(taus, rows): Kendall's tau by hyperparameter, overall and psi, with 95 % intervals."""
    c, _ = parse(Correlation, {}, argv, __doc__)
    rows, axes = examine_all(c), needed(c.axes, "axes").split(",")
    for axis in axes:
        if axis not in rows[0]["theta"]:
            raise UserError(f"--axes: {not_one_of(axis, rows[0]['theta'])}")
    table, columns = correlations(rows, axes, c.bootstrap), [*axes, "overall", "psi"]
    print(f"{'measure':27}" + "".join(f"{key:>24}" for key in columns) + "   runs")
    for name, line in sorted(table.items(), key=lambda item: -item[1].get("overall", [-2])[0]):
        cells = ("{:6.3f} [{:5.2f}, {:5.2f}]".format(*line[key]) if key in line else "undefined"
                 for key in columns)
        print(f"{name:27}" + "".join(f"{cell:>24}" for cell in cells) + f"{line['n']:7}")
    return table, rows


if __name__ == "__main__":
    cli(main)
