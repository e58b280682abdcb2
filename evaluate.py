"""
Numbers on a trained checkpoint.

    python evaluate.py accuracy --ckpt=out/vit-cifar10/best.pt            top-1 on the validation split it was trained for
    python evaluate.py accuracy --ckpt=crate_base.pth --data=imagenet     a published checkpoint
    python evaluate.py linear --ckpt=out/vit-cifar10/best.pt              logistic regression on frozen features; --features=pixels: a floor
    python evaluate.py knn --ckpt=out/vit-cifar10/best.pt                 the 20 nearest neighbours
    python evaluate.py segment --ckpt=out/vit-shapes/best.pt              saliency maps and MaskCut against the masks of `shapes`; --random: a floor
    python evaluate.py lm --ckpt=out/gpt-openwebtext/best.pt --data=wikitext      loss per token; --stride=512: in sliding windows
    python evaluate.py lambada --ckpt=out/gpt-openwebtext/best.pt         the last word of a passage, by greedy decoding
    python evaluate.py cbt --ckpt=out/gpt-openwebtext/best.pt --task=NE   the one of ten candidates that fits a gap

A number is printed as one JSON object, so that a script can read it. Losses are in nats.
"""
import json
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import common
from common import option
from data import augment, images, text
from model import MHSA, ImageEncoder, MAEConfig, MaskedAutoencoder, patchify, run_layers, saliency


@dataclass(kw_only=True)
class Accuracy:
    """Top-1 accuracy and cross-entropy of an image classifier, ours or a published one."""
    ckpt: str | None = option(None, "the checkpoint")
    data: str | None = option(None, "which pictures; auto is what the checkpoint was trained on", choices=tuple(images.SETS))
    split: str = option("val", "which part", choices=("train", "val"))
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    batch_size: int = option(500, "pictures at once", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast", choices=("auto", "float32", "bfloat16"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")
    workers: int = option(8, "processes that read pictures too many for memory", low=0)


def accuracy(c):
    """{"acc", "loss", "n", ...} of a checkpoint on a split, every picture once."""
    model, meta = common.load_classifier(needed(c.ckpt, "ckpt"), c.heads)
    name = c.data or meta.get("name")
    data = images.load(needed(name, "data"), cache=c.data_dir)
    if len(data.classes) != model.config.classes:
        raise common.UserError(f"{c.ckpt} tells {model.config.classes} classes apart, {name} has {len(data.classes)}")
    if "mean" in meta:
        data.mean, data.std = meta["mean"], meta["std"]
    else:
        data.mean, data.std = common.IMAGENET_MEAN, common.IMAGENET_STD
    processes = common.Processes(c.device)
    pictures, labels = (data.train_images, data.train_labels) if c.split == "train" else (data.val_images, data.val_labels)
    c.image_size = model.config.image_size
    split = images.Images(pictures, labels, processes.device)
    return dict(data=name, split=c.split) | common.classify(model.to(processes.device), split, data, c, processes, c.batch_size)


def needed(value, flag):
    """The value of a flag that has no default."""
    if value is None:
        raise common.UserError(f"--{flag} is needed")
    return value


@dataclass(kw_only=True)
class Probe:
    """How well frozen features tell classes apart: of an encoder (any image checkpoint), of that encoder untrained, or the pixels."""
    ckpt: str | None = option(None, "any image checkpoint, ours or a published classifier; needed unless --features=pixels")
    data: str | None = option(None, "which pictures; auto is what the checkpoint was trained on", choices=tuple(images.SETS))
    features: str = option("class", "class token, mean of the patch tokens, both side by side, or the pixels themselves",
                           choices=("class", "mean", "both", "pixels"))
    random: bool = option(False, "the checkpoint's encoder at random initialization instead")
    seed: int = option(0, "of that initialization and of the held-out tenth", low=0)
    k: int = option(20, "neighbours (knn)", low=1)
    temperature: float = option(0.07, "of the weighted vote (knn)", above=0)
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    batch_size: int = option(500, "pictures at once", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast", choices=("auto", "float32", "bfloat16"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")
    workers: int = option(8, "processes that read pictures too many for memory", low=0)


def logistic_regression(x, y, classes, decay, iterations=200):
    """(W, b) that minimize the mean cross-entropy of x W + b plus decay / 2 ||W||^2, by L-BFGS. x (N, D), y (N,)."""
    W = torch.zeros(x.shape[1], classes, requires_grad=True, device=x.device)
    b = torch.zeros(classes, requires_grad=True, device=x.device)
    optimizer = torch.optim.LBFGS([W, b], max_iter=iterations, tolerance_grad=1e-5, tolerance_change=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ W + b, y) + 0.5 * decay * W.square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
    return W.detach(), b.detach()


def linear_probe(x, y, x_test, y_test, classes, seed=0):
    """Accuracy on the test split of a logistic regression on standardized features, its decay chosen on a held-out tenth."""
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x, x_test = (x - mean) / std, (x_test - mean) / std
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    held, kept = order[:len(x) // 10], order[len(x) // 10:]

    def score(decay, fit, test, labels):
        W, b = logistic_regression(x[fit], y[fit], classes, decay)
        return ((test @ W + b).argmax(1) == labels).float().mean().item()
    decays = [10.0 ** e for e in range(-5, 1)]
    best = max(decays, key=lambda decay: score(decay, kept, x[held], y[held]))
    return dict(acc=score(best, order, x_test, y_test), decay=best)


def load_frozen(c):
    """(encoder in evaluation mode, the checkpoint's data_meta), the encoder untrained if c.random."""
    config, state, meta = common.load_encoder(needed(c.ckpt, "ckpt"), c.heads)
    torch.manual_seed(c.seed)
    encoder = (MaskedAutoencoder(config).encoder if isinstance(config, MAEConfig) else ImageEncoder(config)).eval()
    if not c.random:
        common.load_into(encoder, state, c.ckpt, "encoder")
    return encoder, meta


def probe(c, classifier):
    """Features of both splits, extracted once, then `classifier` (x, y, x_test, y_test, classes) on them."""
    encoder, name, mean_std = None, c.data, None
    if c.features != "pixels":
        encoder, meta = load_frozen(c)
        name, mean_std = c.data or meta.get("name"), (meta.get("mean", common.IMAGENET_MEAN), meta.get("std", common.IMAGENET_STD))
    data = images.load(needed(name, "data"), cache=c.data_dir)
    if mean_std:
        data.mean, data.std = mean_std
    processes = common.Processes(c.device)
    if encoder is not None:
        encoder.to(processes.device)
    splits = [images.Images(*split, processes.device) for split in ((data.train_images, data.train_labels), (data.val_images, data.val_labels))]
    x, x_test = (common.features(encoder, split, data, c, processes, c.features, c.batch_size) for split in splits)
    y, y_test = (torch.from_numpy(np.array(v)).to(processes.device) for v in (data.train_labels, data.val_labels))
    found = classifier(x, y, x_test, y_test, len(data.classes))
    return dict(data=name, features=c.features, encoder=None if encoder is None else "random" if c.random else c.ckpt) | found


def linear(c):
    """Accuracy of a linear probe."""
    return probe(c, lambda *split: linear_probe(*split, seed=c.seed))


def knn(c):
    """Accuracy of the k nearest neighbours."""
    return probe(c, lambda *split: common.nearest_neighbours(*split, k=c.k, temperature=c.temperature))


@dataclass(kw_only=True)
class Segment:
    """How well an image encoder finds the objects of `shapes`, whose masks it has never seen: by its attention, and by MaskCut."""
    ckpt: str | None = option(None, "any image checkpoint, ours or a published classifier")
    split: str = option("val", "which part", choices=("train", "val"))
    layer: int | None = option(None, "which layer, from 1; auto is the last", low=1)
    query: str = option("class", "the saliency map: attention of the class token, or mean attention of the patches", choices=("class", "mean"))
    features: str = option("keys", "what MaskCut compares: a layer's keys (U^* LN(Z)), its output, or the patches' pixels: a floor",
                           choices=("keys", "output", "pixels"))
    tau: float = option(0.15, "cosine above which MaskCut joins two patches", low=-1, high=1)
    random: bool = option(False, "the checkpoint's encoder at random initialization instead")
    seed: int = option(0, "of that initialization", low=0)
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    batch_size: int = option(100, "pictures at once", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")


def iou(a, b):
    """|a and b| / |a or b| of masks (..., H, W), 0 of two empty ones: (...) float64."""
    return (a & b).sum((-2, -1)).double() / (a | b).sum((-2, -1)).clamp_min(1)


def box(mask):
    """The least box around a mask (..., H, W), as a mask."""
    rows, columns = mask.any(-1).int(), mask.any(-2).int()
    rows, columns = (v.cummax(-1).values & v.flip(-1).cummax(-1).values.flip(-1) for v in (rows, columns))
    return (rows[..., :, None] & columns[..., None, :]).bool()


def threshold_ious(maps, truth, levels=100):
    """IoU of {map >= i / levels} and the mask, i = 0 .. levels - 1: maps (B, m, P) in [0, 1], truth (B, P) bool -> (B, m, levels)."""
    level = (maps * levels).long().clamp_max(levels - 1)
    counts = (torch.zeros(*maps.shape[:2], levels).scatter_add_(2, level, counted[:, None].float().expand_as(maps))
              for counted in (truth, torch.ones_like(truth)))
    both, area = (count.flip(2).cumsum(2).flip(2) for count in counts)
    return both / (area + truth.sum(1)[:, None, None] - both)


def average_precision(score, truth):
    """AP of scores (..., P) for labels (..., P) bool: the mean over the true entries of the precision of {score >= theirs}. (...)."""
    ordered, order = score.sort(-1, descending=True)
    hit = truth.gather(-1, order).float()
    last = torch.searchsorted(-ordered, -ordered, right=True) - 1          # of the entries that score the same
    precision = hit.cumsum(-1).gather(-1, last) / (last + 1)
    return (precision * hit).sum(-1) / hit.sum(-1)


def detection_ap(overlap, confidence, thresholds):
    """COCO's AP at each IoU threshold (T,), for pictures with one object and one prediction each, by IoU (N,) and confidence (N,): (T,).

    Predictions in the order of confidence; at each recall 0, 0.01 .. 1 the largest precision there or beyond, 0 if never reached."""
    hit = overlap[confidence.argsort(descending=True, stable=True)] >= thresholds[:, None]
    found, n = hit.cumsum(1).double(), len(overlap)
    precision = (found / torch.arange(1, n + 1)).flip(1).cummax(1).values.flip(1)
    recall = (torch.arange(101, dtype=torch.float64) / 100).repeat(len(thresholds), 1)
    return F.pad(precision, (0, 1)).gather(1, torch.searchsorted(found / n, recall)).mean(1)


def normalized_cut(A):
    """(v, mu) of graphs A (B, n, n): the second smallest mu in (D - A) v = mu D v, D = diag(A 1), and its v (Shi and Malik, 2000).

    Solved as D^-1/2 A D^-1/2 y = (1 - mu) y, v = D^-1/2 y. v (B, n), of unknown sign; mu (B,), 0 if nothing joins two parts."""
    root = A.sum(-1).rsqrt()
    values, vectors = torch.linalg.eigh(root[:, :, None] * A * root[:, None])
    return root * vectors[..., -2], 1 - values[..., -2]


def foreground(v):
    """The object of a cut v (B, h, w): of the sides v > mean and v <= mean the one with the largest |v|, or the other if three of the
    picture's corners lie in it; and of that side the 4-connected part around its extreme entry. (B, h, w) bool.

    CutLER applies the corner rule to the side v > mean only, so that its choice depends on the sign that the solver returns."""
    shape, flat = v.shape, v.flatten(1)
    upper = flat > flat.mean(1, keepdim=True)
    flip = ~upper.gather(1, flat.abs().argmax(1, keepdim=True))
    corners = (upper ^ flip).view(shape)[:, ::shape[1] - 1, ::shape[2] - 1].sum((1, 2))
    flip = flip ^ (corners >= 3)[:, None]
    side = (upper ^ flip).view(shape).float()
    part = F.one_hot(torch.where(flip, -flat, flat).argmax(1), flat.shape[1]).view(shape).float()
    while True:
        spread = side * torch.maximum(F.max_pool2d(part, (3, 1), 1, (1, 0)), F.max_pool2d(part, (1, 3), 1, (0, 1)))
        if torch.equal(spread, part):
            return part.bool()
        part = spread


def maskcut(X, side, tau=0.15):
    """(mask (B, side, side), confidence (B,)): the one object that CutLER's MaskCut (Wang et al., 2023) finds by features X (B, n, d).

    The graph joins patches whose cosine exceeds tau with 1, others with 1e-5. The confidence, which CutLER does not need, is
    -mu of the normalized cut: nearly 0 where the two sides have next to nothing in common. No CRF afterwards."""
    X = F.normalize(X.double(), dim=-1)
    v, mu = normalized_cut(torch.where(X @ X.mT > tau, 1.0, 1e-5).double())
    return foreground(v.view(-1, side, side)), -mu


def look(encoder, x, c):
    """(saliency maps (B, K, n), features (B, n, d) for MaskCut) of the patches of pictures x in a layer, on the CPU."""
    number = c.layer or len(encoder.layers)
    Z, layer = run_layers(encoder.layers[:number - 1], encoder.tokens(x)), encoder.layers[number - 1]
    normed = layer.norm1(Z)
    if c.features == "pixels":
        X = patchify(x, encoder.config.patch_size)
    elif c.features == "output":
        X = layer(Z)[:, 1:]
    else:
        w = layer.attention.project(normed)
        X = (w[1] if isinstance(layer.attention, MHSA) else w).transpose(1, 2).flatten(2)[:, 1:]
    return saliency(layer.attention.map(normed), c.query).float().cpu(), X.float().cpu()


@torch.no_grad()
def segment(c):
    """{"iou", "ap", ..., "box_ap", ..., "mask_ap", ...}: saliency maps and MaskCut on `shapes`, one object a picture.

    Saliency maps ([B] Eq. (7.2.41)) are resized to the picture and stretched to [0, 1] in each. "iou": the mean over pictures of the
    IoU at one threshold for all, the best of 0, 0.01 .. 0.99 on this very split. "ap": the mean over pictures of the average precision
    of the map as a classifier of pixels. Each of the mean over heads, of every head, and of the best head, likewise chosen here. A
    map that knows nothing scores "foreground", the objects' share of the pixels, in both.

    MaskCut gives one mask a picture, in whole patches. Its box and mask AP are COCO's, averaged over IoU 0.50, 0.55 .. 0.95
    ([B] Tables 7.2, 7.4), ranked by the confidence of `maskcut`. *_ceiling: of the patches that are half object or more, ranked by
    their IoU. Objects and background of `shapes` differ in colour: --features=pixels is the floor."""
    encoder, meta = load_frozen(c)
    processes, size, count, resize = common.Processes(c.device), encoder.config.image_size, len(encoder.layers), F.interpolate
    encoder.to(processes.device)
    side, mean, std = size // encoder.config.patch_size, meta.get("mean", common.IMAGENET_MEAN), meta.get("std", common.IMAGENET_STD)
    if c.layer and c.layer > count:
        raise common.UserError(f"--layer={c.layer}: the last layer of {c.ckpt} is {count}")
    if side == 1:
        raise common.UserError(f"{c.ckpt} sees a picture as one patch: there is nothing to cut")
    data = images.load("shapes", cache=c.data_dir)
    pictures, labels, masks = (getattr(data, f"{c.split}_{kind}") for kind in ("images", "labels", "masks"))
    pictures, indices, seen = images.Images(pictures, labels, processes.device), torch.arange(len(masks)).split(c.batch_size), []
    for index in progress(indices, len(indices), processes):
        x = common.at_size(augment.to_float(pictures.batch(index)[0]), size)
        truth = torch.from_numpy(masks[index.numpy()])[:, None]
        truth = augment.center_crop(truth, min(size, truth.shape[-1])).bool()              # as at_size does; (B, 1, H, H)
        maps, X = look(encoder, augment.normalize(x, mean, std), c)

        maps = torch.cat([maps.mean(1, keepdim=True), maps], 1).unflatten(-1, (side, side))
        maps = resize(maps, size=truth.shape[2:], mode="bilinear", antialias=True).flatten(2)
        low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
        maps, on = (maps - low) / (high - low).clamp_min(1e-12), truth.flatten(2)
        curves, ap = threshold_ious(maps, on[:, 0]), average_precision(maps, on.expand_as(maps))

        cut, confidence = maskcut(X, side, c.tau)
        best = resize(truth.float(), size=(side, side), mode="area")[:, 0] >= 0.5
        cut, best = (resize(mask[:, None].float(), size=truth.shape[2:], mode="nearest-exact").bool() for mask in (cut, best))
        overlaps = [iou(a, b)[:, 0] for a, b in ((box(cut), box(truth)), (box(best), box(truth)), (cut, truth), (best, truth))]
        seen.append((on.double().mean((1, 2)), curves, ap, confidence, *overlaps))
    share, curves, ap, confidence, *overlaps = (torch.cat(parts).double() for parts in zip(*seen))
    (iou_mean, *iou_heads), (ap_mean, *ap_heads) = curves.mean(0).amax(-1).tolist(), ap.mean(0).tolist()
    result = dict(data="shapes", split=c.split, encoder="random" if c.random else c.ckpt, layer=c.layer or count, n=len(masks),
                  foreground=share.mean().item(), iou=iou_mean, iou_best=max(iou_heads), iou_heads=iou_heads,
                  ap=ap_mean, ap_best=max(ap_heads), ap_heads=ap_heads)
    thresholds = torch.arange(50, 100, 5).double() / 100
    for name, found, ceiling in (("box", *overlaps[:2]), ("mask", *overlaps[2:])):
        at = detection_ap(found, confidence, thresholds)
        result |= {f"{name}_ap50": at[0].item(), f"{name}_ap75": at[5].item(), f"{name}_ap": at.mean().item(),
                   f"{name}_ap_ceiling": detection_ap(ceiling, ceiling, thresholds).mean().item()}
    return result


@dataclass(kw_only=True)
class TextFlags:
    """What the evaluations of a language model have in common."""
    ckpt: str | None = option(None, "a checkpoint of train_gpt.py")
    batch_size: int = option(16, "sequences at once", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast", choices=("auto", "float32", "bfloat16"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")


@dataclass(kw_only=True)
class LM(TextFlags):
    """Loss per token of a text, each token but the first predicted once; of a masked model, loss and accuracy on its masked tokens."""
    data: str | None = option(None, "which text; auto is what the checkpoint was trained on")
    split: str | None = option(None, "which part; auto is test if there, else val", choices=text.SPLITS)
    stride: int = option(0, "tokens from one window to the next; 0: the context, no overlap", low=0)


@dataclass(kw_only=True)
class Lambada(TextFlags):
    """Accuracy of the last word of LAMBADA's passages by greedy decoding, and its loss."""


@dataclass(kw_only=True)
class CBT(TextFlags):
    """Accuracy on the Children's Book Test: which of ten candidates makes the passage likeliest."""
    task: str = option("both", "common nouns, named entities, or both", choices=("CN", "NE", "both"))


def load_language_model(c, processes, causal=False):
    """(language model in evaluation mode on its device, the checkpoint's content); `causal`: refuse a masked one."""
    model, content = common.load_language_model(needed(c.ckpt, "ckpt"))
    if causal and not model.config.causal:
        raise common.UserError(f"{c.ckpt} is a masked model: this needs one that predicts the next token (--objective=causal)")
    return model.to(processes.device), content


def count_bytes(tokenizer, tokens):
    """Bytes of UTF-8 that the tokens stand for: none for end-of-text, one for a character that the tokenizer does not know."""
    if isinstance(tokenizer, text.CharTokenizer):
        sizes = [len(character.encode("utf-8", "surrogatepass")) for character in tokenizer.characters] + [1]
    else:
        sizes = [0 if i == tokenizer.eot else len(tokenizer.encoding.decode_single_token_bytes(i)) for i in range(tokenizer.n_vocab)]
    return int(np.bincount(tokens, minlength=len(sizes)) @ np.array(sizes))


def score(model, x, y):
    """(log-probability of each target y >= 0, whether it is the likeliest token), row by row: two (m,) tensors for x, y (B, n)."""
    Z = model.norm(run_layers(model.layers, model.tokens(x)))
    logits = (Z[y >= 0] @ model.embed.weight.mT).float()                     # the head for these tokens only
    targets = y[y >= 0]
    return -F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


@torch.no_grad()
def lm(c):
    """{"loss" per token, "ppl", "n" tokens, ...} of a text that was prepared with the checkpoint's tokenizer.

    Causal: also "loss_per_byte", which compares tokenizers. Masked: also "acc"; the masks are those of train_gpt.py's evaluation."""
    processes = common.Processes(c.device)
    model, content = load_language_model(c, processes)
    meta, context, masked = content["data_meta"], model.config.context, not model.config.causal
    data = text.load(c.data or meta["name"], cache=c.data_dir)
    if data.tokenizer.meta() != meta["tokenizer"] or data.tokenizer.n_vocab != meta["n_vocab"]:
        raise common.UserError(f"{data.name} is in {tokens_of(data.meta)}, {c.ckpt} reads {tokens_of(meta)}: "
                               "evaluate it on a text that was prepared with its own tokenizer")
    there = [split for split in text.SPLITS if getattr(data, split) is not None]
    split = c.split or next(split for split in ("test", "val", "train") if split in there)
    if split not in there:
        raise common.UserError(f"{data.name} has no {split} part: use --split={' or --split='.join(there)}")
    tokens, stride = getattr(data, split), c.stride or context
    total = torch.zeros(3, dtype=torch.float64 if processes.device.type != "mps" else torch.float32, device=processes.device)
    step = c.batch_size * processes.world                                    # windows a batch of all processes
    batches = text.eval_batches(tokens, context, c.batch_size, processes.rank, processes.world, stride)
    for i, (x, y) in enumerate(progress(batches, math.ceil(len(text.eval_windows(len(tokens), context, stride)) / step), processes)):
        if masked:                                                           # one mask for each window's number, as in training
            for row in range(len(x)):
                window = i * step + row * processes.world + processes.rank
                hide = torch.Generator().manual_seed(common.derive_seed("masked evaluation", window))
                x[row], targets = text.mask_tokens(x[row:row + 1], hide, meta["n_vocab"], meta["n_vocab"], content["run_config"]["mask_rate"])
                y[row] = torch.where(y[row] >= 0, targets, -1)
        x, y = x.to(processes.device), y.to(processes.device)
        count = (y >= 0).sum()
        with processes.autocast(c.dtype):
            if masked:
                logp, hit = score(model, x, y)
                loss, right = -logp.sum(), hit.sum()
            else:
                loss, right = model(x, y) * count, count.new_zeros(())
        total += torch.stack([loss, right, count])
    loss, right, n = processes.sum(total).tolist()
    result = dict(data=data.name, split=split, stride=stride, loss=loss / n, ppl=math.exp(min(loss / n, 700)), n=int(n))
    return result | (dict(acc=right / n) if masked else dict(loss_per_byte=loss / count_bytes(data.tokenizer, tokens[1:])))


def tokens_of(meta):
    """What a description of a text calls its tokens, for a message."""
    return "GPT-2's tokens" if meta["tokenizer"]["kind"] == "gpt2" else f"characters of its own ({meta['n_vocab']})"


def progress(batches, total, processes):
    """A bar on rank 0's terminal."""
    return tqdm(batches, total=total, unit="batch", disable=None if processes.rank == 0 else True)


@torch.no_grad()
def continuations(model, examples, c, processes):
    """For each (ids, k), the log-probability of ids[k:] after ids[:k], and 1 if greedy decoding would write just that: (N, 2).

    Greedy decoding writes ids[k:] exactly if each of them is the likeliest token after the true ones before it."""
    scores = torch.zeros(len(examples), 2)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i][0]))[processes.rank::processes.world]     # little padding
    batches = [order[first:first + c.batch_size] for first in range(0, len(order), c.batch_size)]
    for batch in progress(batches, len(batches), processes):
        n = max(len(examples[i][0]) for i in batch) - 1
        x, y = torch.zeros(len(batch), n, dtype=torch.int64), torch.full((len(batch), n), -1)
        for row, i in enumerate(batch):                                      # filled up on the right, which a causal model does not see
            ids, k = examples[i]
            x[row, :len(ids) - 1] = torch.from_numpy(ids[:-1].astype(np.int64))
            y[row, k - 1:len(ids) - 1] = torch.from_numpy(ids[k:].astype(np.int64))
        row = torch.tensor(batch)[(y >= 0).nonzero()[:, 0]]
        with processes.autocast(c.dtype):
            logp, hit = score(model, x.to(processes.device), y.to(processes.device))
        scores[:, 0].index_add_(0, row, logp.float().cpu())
        scores[:, 1].index_add_(0, row, 1 - hit.float().cpu())               # the number of tokens missed
    scores = processes.sum(scores.to(processes.device)).cpu()
    return torch.stack([scores[:, 0], (scores[:, 1] == 0).float()], 1)


def cut(ids, k, context):
    """[(ids, k), ...] for `continuations` from token arrays that share ids[:k], cut on the left, equally, until a context holds the longest."""
    extra = max(0, max(map(len, ids)) - context - 1)
    if extra >= k:
        raise common.UserError(f"a context of {context} tokens is too short: {max(map(len, ids)) - k} have to be predicted from others")
    return [(one[extra:], k - extra) for one in ids]


def lambada(c):
    """{"acc", "word_loss", "n"}: how often greedy decoding writes the target word, and the mean of its -log-probability.

    The prompt is a newline and the passage up to its last space; the target is the rest, with that space. (In 7 of the 5,153
    passages a line break comes after the last space; the field's usual code splits there all the same.)"""
    processes = common.Processes(c.device)
    model, content = load_language_model(c, processes, causal=True)
    tokenizer = text.tokenizer_from_meta(content["data_meta"])
    examples = []
    for passage in text.load("lambada", cache=c.data_dir).passages:
        before, _, word = passage["text"].rstrip().rpartition(" ")
        prompt = tokenizer.encode("\n" + before)
        examples += cut([np.concatenate([prompt, tokenizer.encode(" " + word)])], len(prompt), model.config.context)
    logp, right = continuations(model, examples, c, processes).double().mean(0).tolist()
    return dict(data="lambada", acc=right, word_loss=-logp, n=len(examples))


def cbt(c):
    """{"acc_CN", "n_CN", "acc_NE", "n_NE"}: how often the passage is likeliest with the right candidate in the gap.

    Up to the gap the candidates' passages are the same, and so is its probability: only what follows is scored."""
    processes = common.Processes(c.device)
    model, content = load_language_model(c, processes, causal=True)
    tokenizer = text.tokenizer_from_meta(content["data_meta"])
    data, result = text.load("cbt", cache=c.data_dir), {}
    for task in ("CN", "NE") if c.task == "both" else (c.task,):
        passages, examples = [p for p in data.passages if p["task"] == task], []
        if not passages:
            raise common.UserError(f"the prepared cbt has no {task} passages: prepare it again from both folders, or give the other --task")
        for p in passages:
            context = tokenizer.encode(p["context"])
            filled = [tokenizer.encode(" " + p["question"].replace("XXXXX", option)) for option in p["options"]]
            shared = next((k for k, tokens in enumerate(zip(*filled)) if len(set(tokens)) > 1), min(map(len, filled)))
            examples += cut([np.concatenate([context, one]) for one in filled], len(context) + shared, model.config.context)
        logp, right = iter(continuations(model, examples, c, processes)[:, 0].tolist()), 0
        for p in passages:
            right += max(p["options"], key=lambda option: next(logp)) == p["answer"]
        result |= {f"acc_{task}": right / len(passages), f"n_{task}": len(passages)}
    return dict(data="cbt") | result


COMMANDS = {"accuracy": (Accuracy, accuracy), "linear": (Probe, linear), "knn": (Probe, knn),
            "segment": (Segment, segment), "lm": (LM, lm), "lambada": (Lambada, lambada), "cbt": (CBT, cbt)}


def main(argv):
    """Runs one subcommand, prints its result (rank 0 only), and returns it."""
    command, config = common.parse_command({name: flags for name, (flags, _) in COMMANDS.items()}, argv, __doc__)
    result = COMMANDS[command][1](config)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    common.cli(main)
