"""
The measures that training and evaluating share, and the pictures that both write.

`split` is an images.Images, `data` has mean and std, `config` has workers. Every sample
counts once; the processes share the samples.
"""
import math
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.nn import functional as F
from tqdm import tqdm

from data import augment, images, text
from flags import needed, UserError
from model import patchify, unpatchify
from run import derive_seed


def statistics_of(meta):
    """.mean and .std, per channel, of a checkpoint's images. `meta` is the checkpoint's data_meta;
    a published one has {}, and ImageNet's values are used."""
    return SimpleNamespace(mean=list(meta.get("mean", images.IMAGENET_MEAN)),
                           std=list(meta.get("std", images.IMAGENET_STD)))


def images_for(name, meta, cache):
    """An image set, None the checkpoint's own, normalized as the checkpoint's images were."""
    data = images.load(needed(name or meta.get("name"), "data"), cache=cache)
    return replace(data, **vars(statistics_of(meta)))


def on_device(data, split, device):
    """The "train" or "val" part of an image set."""
    return images.Images(getattr(data, f"{split}_images"), getattr(data, f"{split}_labels"), device)


def pooling(loaded):
    """The tokens that training shaped: "class", or "mean" where the class token has no loss."""
    return "mean" if loaded.task == "mae" else loaded.encoder.config.pool


def model_input(batch, data, size):
    """uint8 images (B, H, H, 3) as a model of that image size sees them: (B, 3, size, size)."""
    x = augment.at_size(augment.to_float(batch), size)
    return augment.normalize(x, data.mean, data.std)


def with_bar(items, what, total=None):
    """The items, with a progress bar where rank 0 has a terminal."""
    alone = os.environ.get("RANK", "0") == "0"
    return tqdm(items, what, total, leave=False, disable=None if alone else True)


def _batches(split, batch_size, config, processes):
    """This process's share of the images and labels, in batches."""
    mine = torch.arange(processes.rank, len(split), processes.world)
    index = [part.numpy() for part in mine.split(batch_size)]
    return with_bar(split.batches(index, config.workers), "images", len(index))


def zero_sums(device):
    """Three zeros to accumulate sums in, float64 if the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(3, dtype=dtype, device=device)


@torch.no_grad()
def classify(model, split, data, config, processes, batch_size=500):
    """Cross-entropy and top-1 accuracy of a classifier over a split: dict(loss, acc, n)."""
    model.eval()
    total = zero_sums(processes.device)
    for batch, labels in _batches(split, batch_size, config, processes):
        n = len(labels)
        if n < batch_size:      # a full last batch: a compiled model sees one shape
            batch = torch.cat([batch, batch[:1].expand(batch_size - n, -1, -1, -1)])
        with processes.autocast():
            logits = model(model_input(batch, data, model.config.image_size))[:n]
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        right = (logits.argmax(-1) == labels).sum()
        total += torch.stack([loss, right, torch.as_tensor(n, device=loss.device)])
    loss, right, n = processes.sum(total).tolist()
    return dict(loss=loss / n, acc=right / n, n=int(n))


@torch.no_grad()
def features(encoder, split, data, config, processes, kind="class", batch_size=500):
    """Features (N, D) float32 of all images of a split, on the device of every process: the class
    token, or the mean of the patch tokens (kind="mean"). Without an encoder (None): the pixels."""
    result = None       # filled in place: a list of views Z[:, 0] keeps all tokens of all images
    for i, (batch, _) in enumerate(_batches(split, batch_size, config, processes)):
        if encoder is None:
            x = augment.to_float(batch).flatten(1)
        else:
            with processes.autocast():
                Z = encoder(model_input(batch, data, encoder.config.image_size)).float()
            x = Z[:, 1:].mean(1) if kind == "mean" else Z[:, 0]
        if result is None:
            result = x.new_zeros(len(split), x.shape[1])
        result[processes.rank::processes.world][i * batch_size:][:len(x)] = x
    return processes.sum(result)


def nearest_neighbours(x, y, x_test, y_test, classes, processes, k=20, temperature=0.07):
    """Accuracy of a vote among the k nearest by cosine, each with the weight
    exp(cosine / temperature), DINO's ([B] (7.2.39) has none): dict(acc, k). x (N, D), y (N,)."""
    x, x_test, k = F.normalize(x, dim=1), F.normalize(x_test, dim=1), min(k, len(x))
    right, mine = torch.zeros((), device=x.device), slice(processes.rank, None, processes.world)
    parts = [*zip(x_test[mine].split(1000), y_test[mine].split(1000))]              # for memory
    for test, labels in with_bar(parts, "neighbours"):
        cosine, index = (test @ x.mT).topk(k)
        votes = torch.zeros(len(test), classes, device=x.device)
        votes.scatter_add_(1, y[index], (cosine / temperature).exp())
        right += (votes.argmax(1) == labels).sum()
    return dict(acc=processes.sum(right).item() / len(x_test), k=k)


def logistic_regression(x, y, classes, decay, iterations=200):
    """(W, b) that minimize the mean cross-entropy of x W + b plus decay / 2 ||W||^2, by L-BFGS."""
    W = torch.zeros(x.shape[1], classes, requires_grad=True, device=x.device)
    b = torch.zeros(classes, requires_grad=True, device=x.device)
    optimizer = torch.optim.LBFGS([W, b], max_iter=iterations, tolerance_grad=1e-5,
                                  tolerance_change=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ W + b, y) + 0.5 * decay * W.square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
    return W.detach(), b.detach()


def linear_probe(x, y, x_test, y_test, classes, seed=0):
    """Test accuracy of a logistic regression on standardized features: dict(acc, decay), the decay
    chosen on a held-out tenth of the training samples."""
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)     # 1e-6: a constant feature stays finite
    x, x_test = (x - mean) / std, (x_test - mean) / std
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    held, kept = order[:len(x) // 10], order[len(x) // 10:]

    def score(decay, fit, test, labels):
        W, b = logistic_regression(x[fit], y[fit], classes, decay)
        return ((test @ W + b).argmax(1) == labels).float().mean().item()
    decays = with_bar([10.0 ** e for e in range(-5, 1)], "decays")
    best = max(decays, key=lambda decay: score(decay, kept, x[held], y[held]))
    return dict(acc=score(best, order, x_test, y_test), decay=best)


# -------------------------------------------------------------------------------------------------
# Text
# -------------------------------------------------------------------------------------------------

def tokens_for(name, split, meta, cache):
    """(text set, split, its tokens), by default the checkpoint's own set and its test part or, if
    there is none, val. `meta` is the checkpoint's data_meta."""
    data = text.load(needed(name or meta.get("name"), "data"), cache=cache)
    if data.tokenizer.meta() != meta["tokenizer"]:
        raise UserError(f"--data={data.name} was prepared with another tokenizer than the "
                        "checkpoint's")
    existing = [part for part in ("test", "val", "train") if getattr(data, part) is not None]
    split = split or next(iter(existing), "test")       # CBT has passages alone
    if split not in existing:
        raise UserError(f"--split={split}: {data.name} has only {' and '.join(existing)}")
    return data, split, getattr(data, split)


@torch.no_grad()
def language_scores(model, tokens, processes, batch_size, n_vocab=None, mask_rate=None,
                    stride=None):
    """Loss in nats over a text, each token but the first predicted once: dict(loss, ppl, n).

    Of a masked model, the loss of the masked tokens and their top-1 accuracy "acc". The mask of a
    window is a function of its number: the same at every evaluation, on any number of processes.
    `n_vocab` is the tokenizer's. `stride` as in text.eval_batches."""
    model.eval()
    masked, rank, world = not model.config.causal, processes.rank, processes.world
    batches = text.eval_batches(tokens, model.config.context, batch_size, rank, world, stride,
                                not masked)
    total = zero_sums(processes.device)
    for i, (x, y) in enumerate(with_bar(batches, "batches")):
        if masked:
            for row in range(batch_size):
                window = (i * batch_size + row) * world + rank
                rng = torch.Generator().manual_seed(derive_seed("masked evaluation", window))
                x[row], targets = text.mask_tokens(x[row:row + 1], rng, n_vocab, mask_rate)
                y[row] = torch.where(y[row] >= 0, targets, -1)      # -1: not to be counted
        x, y = x.to(processes.device), y.to(processes.device)
        count = (y >= 0).sum()
        with processes.autocast():
            loss = model(x, y) * count
            right = (model(x).argmax(-1) == y).sum() if masked else torch.zeros_like(count)
        total += torch.stack([loss, right, count])
    loss, right, n = processes.sum(total).tolist()
    scores = dict(loss=loss / n, ppl=math.exp(min(loss / n, 700)), n=int(n))
    return scores | dict(acc=right / n) if masked else scores


# -------------------------------------------------------------------------------------------------
# Pictures
# -------------------------------------------------------------------------------------------------

def write_sheet(path, pictures, columns, rows=None):
    """A PNG of pictures (n, m, 3, H, W) in [0, 1] under the titles of the m columns, beside the
    names of the n rows, whose long lines lose their middle."""
    from matplotlib.figure import Figure
    n, m, _, height, width = pictures.shape
    gap = width // 16
    sheet = F.pad(pictures.float().clamp(0, 1), (0, gap, 0, gap), value=1.0)
    sheet = sheet.permute(0, 3, 1, 4, 2).reshape(n * (height + gap), m * (width + gap), 3)
    inches = min(1.5, 400 / max(n, m))          # matplotlib draws at most 65,536 pixels per side
    axes = Figure((inches * m, inches * n)).add_axes((0, 0, 1, 1))
    axes.imshow(sheet.cpu().numpy(), interpolation="nearest")
    rows = [re.sub(r"(?m)^(.{11}).{3,}(.{11})$", r"\1..\2", row)
            for row in rows or (f"image {i}" for i in range(1, n + 1))]
    axes.set_xticks([(width + gap) * i + width / 2 for i in range(m)], columns, parse_math=False)
    axes.set_yticks([(height + gap) * i + height / 2 for i in range(n)], rows, parse_math=False)
    axes.tick_params(length=0, labelsize=9, top=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def stretched(maps):
    """Maps (..., P), each from its least value at 0 to its largest at 1."""
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    return (maps - low) / (high - low).clamp_min(1e-12)


def write_overlays(path, x, maps, columns, rows=None):
    """A PNG with an image x (n, 3, H, H) per row, then each of its maps (n, m, patches), stretched,
    in red over its greys. `columns` names the maps."""
    side = math.isqrt(maps.shape[-1])
    heat = F.interpolate(stretched(maps).unflatten(-1, (side, side)), size=x.shape[-1])[:, :, None]
    red = torch.tensor([1.0, 0.1, 0.1], device=maps.device).view(3, 1, 1)
    overlays = (1 - 0.7 * heat) * 0.7 * augment.luma(x)[:, None] + 0.7 * heat * red
    write_sheet(path, torch.cat([x[:, None], overlays], 1), ["image", *columns], rows)


def validation_noise(model, first, n, device):
    """The noise (n, patches) of validation images first .. first + n - 1: a function of these."""
    rng = augment.BatchRandom(derive_seed("validation", first), n)
    return rng.uniform(model.config.patches()).to(device)


@torch.no_grad()
def write_reconstructions(path, model, pixels, data, rows=None):
    """A PNG with a uint8 image (n, H, H, 3) per row: input, masked, reconstruction, and the
    reconstruction with the visible patches pasted in."""
    c = model.eval().config
    x = model_input(pixels, data, c.image_size)
    mask = model.draw_mask(validation_noise(model, 0, len(x), x.device))
    target = patchify(x, c.patch_size)
    masked, guess = mask[..., None], model.predicted(x, mask).float()
    # back to pixels with the patch's own statistics, which the model does not know
    if c.normalize_targets:
        guess = guess * (target.var(-1, keepdim=True) + 1e-6).sqrt() + target.mean(-1, keepdim=True)
    columns = {"input": target, "masked": torch.where(masked, 0.0, target),
               "reconstruction": guess, "pasted": torch.where(masked, guess, target)}
    mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (data.mean, data.std))
    pictures = [unpatchify(patches, c.patch_size) * std + mean for patches in columns.values()]
    write_sheet(path, torch.stack(pictures, 1), list(columns), rows)
