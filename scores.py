"""
The measures that training and evaluating share.

In what follows `split` is an images.Images, `data` has mean and std, `config` has dtype and
workers. Every sample counts once; the processes share them.
"""
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F
from tqdm import tqdm

from data import augment, images, text
from flags import UserError
from model import patchify, unpatchify
from parallel import derive_seed


# -------------------------------------------------------------------------------------------------
# Images
# -------------------------------------------------------------------------------------------------

def progress(batches, total, show):
    return tqdm(batches, total=total, unit="batch", disable=None if show else True)


def _zeros(n, device):
    """n sums, in float64 where the device has it."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros(n, dtype=dtype, device=device)


def _shares(split, batch_size, processes):
    """The numbers of this process's images, in batches."""
    mine = torch.arange(processes.rank, len(split), processes.world)
    return [index.numpy() for index in mine.split(batch_size)]


def model_input(batch, data, size):
    """uint8 images (B, H, H, 3) as a model of that image size sees them: (B, 3, size, size)."""
    x = augment.at_size(augment.to_float(batch), size)
    return augment.normalize(x, data.mean, data.std)


@torch.no_grad()
def classify(model, split, data, config, processes, batch_size=500):
    """Cross-entropy and top-1 accuracy of a classifier over a split: dict(loss, acc, n)."""
    model.eval()
    total = _zeros(3, processes.device)
    shares = _shares(split, batch_size, processes)
    for batch, labels in split.batches(shares, config.workers):
        n = len(labels)
        if n < batch_size:      # a full last batch: a compiled model sees one shape
            filling = batch[:1].expand(batch_size - n, -1, -1, -1)
            batch = torch.cat([batch, filling])
        with processes.autocast(config.dtype):
            logits = model(model_input(batch, data, model.config.image_size))[:n]
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        right = (logits.argmax(-1) == labels).sum()
        total += torch.stack([loss, right, torch.as_tensor(n, device=loss.device)])
    loss, right, n = processes.sum(total).tolist()
    return dict(loss=loss / n, acc=right / n, n=int(n))


@torch.no_grad()
def features(encoder, split, data, config, processes, kind="class", batch_size=500):
    """Features (N, D) float32 of all images of a split, on the device of every process.

    kind: the class token ("class"), the mean of the patch tokens ("mean"), or both side by side
    ("both"). Without an encoder (None): the pixels."""
    found = None
    shares = _shares(split, batch_size, processes)
    for index, (batch, _) in zip(shares, split.batches(shares, config.workers)):
        if encoder is None:
            x = augment.to_float(batch).flatten(1)
        else:
            with processes.autocast(config.dtype):
                Z = encoder(model_input(batch, data, encoder.config.image_size)).float()
            first, mean = Z[:, 0], Z[:, 1:].mean(1)
            x = dict(mean=mean, both=torch.cat([first, mean], 1)).get(kind, first)
        if found is None:
            found = x.new_zeros(len(split), x.shape[1])
        found[index] = x
    return processes.sum(found)


def nearest_neighbours(x, y, x_test, y_test, classes, k=20, temperature=0.07, processes=None,
                       chunk=1000):
    """Accuracy of a vote among the k nearest by cosine, DINO's protocol ([B] Section 7.2):
    dict(acc, plain, k).

    acc: votes weigh exp(cosine / temperature); plain: 1. x (N, D), y (N,). Test samples come in
    chunks, so that (chunk, N) similarities are in memory, and `processes` share them if given."""
    x, x_test = F.normalize(x, dim=1), F.normalize(x_test, dim=1)
    k = min(k, len(x))
    right = torch.zeros(2, device=x.device)
    mine = slice(processes.rank, None, processes.world) if processes else slice(None)
    for test, labels in zip(x_test[mine].split(chunk), y_test[mine].split(chunk)):
        cosine, index = (test @ x.mT).topk(k)
        for i, weight in enumerate(((cosine / temperature).exp(), torch.ones_like(cosine))):
            votes = torch.zeros(len(test), classes, device=x.device)
            votes.scatter_add_(1, y[index], weight)
            right[i] += (votes.argmax(1) == labels).sum()
    weighted, plain = (processes.sum(right) if processes else right).tolist()
    return dict(acc=weighted / len(x_test), plain=plain / len(x_test), k=k)


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
    decays = [10.0 ** e for e in range(-5, 1)]
    best = max(decays, key=lambda decay: score(decay, kept, x[held], y[held]))
    return dict(acc=score(best, order, x_test, y_test), decay=best)


# -------------------------------------------------------------------------------------------------
# Text
# -------------------------------------------------------------------------------------------------

def load_tokens(name, split, meta, cache):
    """(text set, split, its tokens), None the checkpoint's own set and its test part or, if there
    is none, val. `meta` is the checkpoint's data_meta, the tokenizer must be the same."""
    data = text.load(name or meta["name"], cache=cache)
    if data.tokenizer.meta() != meta["tokenizer"]:
        found, own = (f"{m['tokenizer']['kind']}, {m['n_vocab']} tokens" for m in (data.meta, meta))
        raise UserError(f"{data.name} was prepared with another tokenizer ({found}) than the "
                        f"checkpoint was trained with ({own})")
    existing = [split for split in text.SPLITS if getattr(data, split) is not None]
    split = split or next(split for split in ("test", "val", "train") if split in existing)
    if split not in existing:
        raise UserError(f"{data.name} has no {split} part, only {' and '.join(existing)}")
    return data, split, getattr(data, split)


@torch.no_grad()
def language_scores(model, tokens, config, processes, batch_size, n_vocab=None, mask_rate=None,
                    stride=None, bar=False):
    """Loss in nats of a language model over a text, each token but the first predicted once:
    dict(loss, ppl, n), n the number of predictions.

    Of a masked model, the loss of the masked tokens and their top-1 accuracy "acc". The mask of a
    window is a function of its number: the same at every evaluation, on any number of processes.
    `n_vocab` is the tokenizer's. `stride` as in text.eval_windows."""
    model.eval()
    masked, context, device = not model.config.causal, model.config.context, processes.device
    rank, world = processes.rank, processes.world
    windows = len(text.eval_windows(len(tokens), context, stride))
    batches = text.eval_batches(tokens, context, batch_size, rank, world, stride, not masked)
    total = _zeros(3, device)
    for i, (x, y) in enumerate(progress(batches, math.ceil(windows / (batch_size * world)), bar)):
        if masked:
            for row in range(batch_size):
                window = (i * batch_size + row) * world + rank
                rng = torch.Generator().manual_seed(derive_seed("masked evaluation", window))
                ids, targets = text.mask_tokens(x[row:row + 1], rng, n_vocab, n_vocab, mask_rate)
                x[row] = ids
                y[row] = torch.where(y[row] >= 0, targets, -1)      # -1: not to be counted
        x, y = x.to(device), y.to(device)
        count = (y >= 0).sum()
        with processes.autocast(config.dtype):
            loss = model(x, y) * count
            right = (model(x).argmax(-1) == y).sum() if masked else torch.zeros_like(count)
        total += torch.stack([loss, right, count])
    loss, right, n = processes.sum(total).tolist()
    scores = dict(loss=loss / n, ppl=math.exp(min(loss / n, 700)), n=int(n))
    return scores | dict(acc=right / n) if masked else scores


def load_images(name, meta, cache):
    """An image set, None the checkpoint's own, to be normalized as the checkpoint's images were:
    `meta` is its data_meta, {} of a published one, which was trained on ImageNet."""
    name = name or meta.get("name")
    if name is None:
        raise UserError("--data is needed")
    learnt = statistics_of(meta)
    return replace(images.load(name, cache=cache), mean=learnt.mean, std=learnt.std)


def statistics_of(meta):
    """.mean and .std, per channel, that a checkpoint's images were normalized with."""
    return SimpleNamespace(mean=list(meta.get("mean", images.IMAGENET_MEAN)),
                           std=list(meta.get("std", images.IMAGENET_STD)))


def on_device(data, split, device):
    """The "train" or "val" part of an image set."""
    arrays = getattr(data, f"{split}_images"), getattr(data, f"{split}_labels")
    return images.Images(*arrays, device)


def pooling(loaded):
    """The tokens that training shaped: "class", or "mean" where the class token has no loss."""
    return "mean" if loaded.task == "mae" else loaded.encoder.config.pool


# -------------------------------------------------------------------------------------------------
# Pictures
# -------------------------------------------------------------------------------------------------

def stretched(maps):
    """Maps (..., P), each from its least value at 0 to its largest at 1."""
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    return (maps - low) / (high - low).clamp_min(1e-12)


def write_overlays(path, x, maps, enlarge=4):
    """A PNG with an image a row: the image, then each of its maps in red over its greys.

    x (n, 3, H, H) in [0, 1]; maps (n, m, patches), each stretched from its least to its largest
    value."""
    n, m, patches = maps.shape
    side, size = math.isqrt(patches), x.shape[-1]
    heat = stretched(maps).view(n, m, 1, side, side)
    heat = heat.repeat_interleave(size // side, 3).repeat_interleave(size // side, 4)
    red = torch.tensor([1.0, 0.1, 0.1], device=maps.device).view(3, 1, 1)
    grey = augment.luma(x)[:, None]
    overlays = (1 - 0.7 * heat) * 0.7 * grey + 0.7 * heat * red     # (n, m, 3, H, H)
    sheet = torch.cat([x[:, None], overlays], 1).permute(0, 3, 1, 4, 2)
    sheet = sheet.reshape(n * size, (1 + m) * size, 3).clamp(0, 1)
    pixels = sheet.mul(255).round().byte().cpu().numpy()
    Image.fromarray(pixels.repeat(enlarge, 0).repeat(enlarge, 1)).save(path)


def validation_noise(model, first, n, device):
    """The noise (n, patches) of validation images first, first + 1 ...: the same at every
    evaluation."""
    rng = augment.BatchRandom(derive_seed("validation", first), n, device=device)
    return rng.uniform(model.config.patches())


@torch.no_grad()
def write_reconstructions(path, model, pixels, data):
    """A PNG with one of the uint8 images (n, H, H, 3) a row: input, masked, reconstruction, and it
    with the visible patches pasted in."""
    model.eval()
    c = model.config
    x = model_input(pixels, data, c.image_size)
    noise = validation_noise(model, 0, len(x), x.device)
    mask, target = model.draw_mask(noise), patchify(x, c.patch_size)
    masked, guess = mask.masked[..., None], model.predicted(x, mask).float()
    # back to pixels with the patch's own statistics, which the model does not know
    if c.normalize_targets:
        guess = guess * (target.var(-1, keepdim=True) + 1e-6).sqrt() + target.mean(-1, keepdim=True)
    columns = [target, torch.where(masked, 0.0, target), guess, torch.where(masked, guess, target)]
    mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (data.mean, data.std))
    row = torch.cat([(unpatchify(p, c.patch_size) * std + mean).clamp(0, 1) for p in columns], 3)
    sheet = (torch.cat(list(row), 1).permute(1, 2, 0) * 255).round().byte().cpu().numpy()
    enlarge = max(1, 128 // c.image_size)
    Image.fromarray(np.repeat(np.repeat(sheet, enlarge, 0), enlarge, 1)).save(path)
