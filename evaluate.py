"""
Numbers on a trained checkpoint.

    python evaluate.py accuracy --ckpt=out/vit-cifar10/best.pt      top-1 on its validation split
    python evaluate.py accuracy --ckpt=crate_base.pth --data=imagenet       a published checkpoint
    python evaluate.py linear --ckpt=out/vit-cifar10/best.pt        logistic regression on features
    python evaluate.py knn --ckpt=out/vit-cifar10/best.pt           the 20 nearest neighbours
    python evaluate.py segment --ckpt=out/vit-shapes/best.pt        attention against object masks
    python evaluate.py predict --ckpt=out/vit-cifar10/best.pt a.jpg b.png    your own pictures
    python evaluate.py lm --ckpt=out/gpt-openwebtext/best.pt --data=wikitext        loss per token
    python evaluate.py lambada --ckpt=out/gpt-openwebtext/best.pt   the last word of a passage
    python evaluate.py cbt --ckpt=out/gpt-openwebtext/best.pt       which of ten words fits a gap

Each prints one JSON object. Losses are in nats. Baselines of linear, knn and segment: --random (an
untrained encoder), --features=pixels (none). lm --stride=512 reads sliding windows.
"""
import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the imports: no traceback

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from checkpoint import load_model
from flags import check_new, cli, DeviceFlags, needed, option, parse_command, ROOT, UserError
from parallel import Processes
from data import augment, images, text
from model import patchify, run_layers, saliency
from scores import (classify, features, language_scores, linear_probe, load_images, load_tokens,
                    model_input, nearest_neighbours, on_device, pooling, progress, statistics_of,
                    stretched, write_overlays, write_reconstructions)


# -------------------------------------------------------------------------------------------------
# accuracy, linear, knn
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class ImageFlags(DeviceFlags):
    """Flags of every evaluation of an image model."""
    ckpt: str | None = option(None, "an image checkpoint: ours, a published one, pretrained:NAME")
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    batch_size: int = option(500, "images at once", low=1)


@dataclass(kw_only=True)
class Accuracy(ImageFlags):
    """Top-1 accuracy and cross-entropy of an image classifier, ours or a published one."""
    data: str | None = option(None, "which images; auto is what the checkpoint was trained on")
    split: str = option("val", "which part", choices=("train", "val"))


def accuracy(c):
    """{"acc", "loss", "n", ...} of a checkpoint on a split, every image once."""
    loaded = load_model(needed(c.ckpt, "ckpt"), ("vit",), c.heads)
    data = load_images(c.data, loaded.meta, c.data_dir)
    classes = loaded.model.config.classes
    if len(data.classes) != classes:
        raise UserError(f"{c.ckpt} has {classes} classes, {data.name} has {len(data.classes)}")
    learnt = loaded.meta.get("classes")     # None: a published checkpoint
    if learnt and learnt != data.classes:
        raise UserError(f"{c.ckpt} knows other classes ({learnt[0]}, ...) than {data.name} has "
                        f"({data.classes[0]}, ...)")
    processes = Processes(c.device)
    split = on_device(data, c.split, processes.device)
    scores = classify(loaded.model.to(processes.device), split, data, c, processes, c.batch_size)
    return dict(data=data.name, split=c.split) | scores


@dataclass(kw_only=True)
class EncoderFlags(ImageFlags):
    """Flags of every evaluation of an image encoder."""
    random: bool = option(False, "the checkpoint's encoder at random initialization instead")
    seed: int = option(0, "of that initialization, and of linear's held-out tenth", low=0)


@dataclass(kw_only=True)
class Probe(EncoderFlags):
    """How well the features of an encoder, trained or not, or the pixels separate classes."""
    data: str | None = option(None, "which images; auto is what the checkpoint was trained on")
    features: str | None = option(
        None, "class token, mean of the patch tokens, both, or the pixels; auto is what the head "
        "reads", choices=("class", "mean", "both", "pixels"))
    k: int = option(20, "neighbours (knn)", low=1)
    temperature: float = option(0.07, "of the weighted vote (knn)", above=0)


def load_encoder(c):
    """`Loaded` of any image checkpoint; its weights those at initialization if c.random."""
    seed = c.seed if c.random else None
    return load_model(needed(c.ckpt, "ckpt"), ("vit", "mae", "simdino"), c.heads, seed)


def probe(c, classifier):
    """The features of both parts, and classifier(x, y, x_test, y_test, classes) on them."""
    processes = Processes(c.device)
    encoder, meta, used, kind = None, {}, None, c.features
    if c.features != "pixels":
        loaded = load_encoder(c)
        kind = c.features or pooling(loaded)
        encoder, meta = loaded.encoder.to(processes.device), loaded.meta
        used = "random" if c.random else c.ckpt
    data = load_images(c.data, meta, c.data_dir)
    samples = []
    for name in ("train", "val"):
        split = on_device(data, name, processes.device)
        x = features(encoder, split, data, c, processes, kind, c.batch_size)
        samples += [x, split.labels.to(processes.device)]
    found = classifier(*samples, len(data.classes))
    return dict(data=data.name, features=kind, encoder=used) | found


def linear(c):
    """Accuracy of a linear probe."""
    return probe(c, lambda *samples: linear_probe(*samples, seed=c.seed))


def knn(c):
    """Accuracy of the k nearest neighbours."""
    return probe(c, lambda *samples: nearest_neighbours(*samples, c.k, c.temperature))


# -------------------------------------------------------------------------------------------------
# predict
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Predict(ImageFlags):
    """Of each picture's centre square the likeliest classes, and a PNG: the square beside the mean
    of the last layer's saliency maps; of a masked autoencoder input, masked, reconstruction, both
    pasted."""
    files: tuple = option((), "pictures", positional=True)
    top: int = option(5, "classes to print", low=1)
    out: str | None = option(None, "the PNG, a row for each picture; auto is out/predict.png, "
                             "replaced each time")
    overwrite: bool = option(False, "replace the file that --out names")


@torch.no_grad()
def predict(c):
    """{"pictures": {file: {class: probability}}, "wrote"}, the likeliest first; where there is no
    classifier, "pictures" is a list of the files."""
    if not c.files:
        raise UserError("which pictures? evaluate.py predict --ckpt=CHECKPOINT PICTURE ...")
    check_new("out", c.out, c.overwrite)
    out = c.out or str(ROOT / "out" / "predict.png")
    loaded = load_model(needed(c.ckpt, "ckpt"), ("vit", "mae", "simdino"), c.heads)
    processes = Processes(c.device)
    config, model = loaded.encoder.config, loaded.model.to(processes.device)
    pixels = []
    for file in c.files:
        read, problem = images.read_picture(file, config.image_size)
        if problem:
            raise UserError(f"cannot read {file}: {problem}")
        pixels.append(read)
    pixels = torch.from_numpy(np.stack(pixels)).to(processes.device)
    data = statistics_of(loaded.meta)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    found = dict(pictures=list(c.files), wrote=out)
    if loaded.task == "mae":
        write_reconstructions(out, model, pixels, data)
        return found

    x = model_input(pixels, data, config.image_size)
    with processes.autocast(c.dtype):
        trace = loaded.encoder.trace(x)
    maps = saliency(trace[-1].attention.float(), config.pool).mean(1, keepdim=True)
    write_overlays(out, augment.to_float(pixels), maps, max(1, 256 // config.image_size))
    if loaded.task == "vit":
        with processes.autocast(c.dtype):
            logits = model(x).float()
        names = loaded.meta.get("classes") or [f"class {i}" for i in range(logits.shape[1])]
        best = logits.softmax(-1).topk(min(c.top, len(names)))
        found["pictures"] = {}
        for file, shares, labels in zip(c.files, best.values.tolist(), best.indices.tolist()):
            shown = {names[i]: round(share, 4) for i, share in zip(labels, shares)}
            found["pictures"][file] = shown
    return found


# -------------------------------------------------------------------------------------------------
# segment: scores of maps and masks
# -------------------------------------------------------------------------------------------------

def iou(a, b):
    """|a and b| / |a or b| of masks (..., H, W), 0 of two empty ones: (...) float64."""
    return (a & b).sum((-2, -1)).double() / (a | b).sum((-2, -1)).clamp_min(1)


def box(mask):
    """The bounding box of a mask (..., H, W), as a mask."""
    def between(line):          # from the first to the last true entry
        line = line.int()
        return line.cummax(-1).values & line.flip(-1).cummax(-1).values.flip(-1)
    rows, columns = between(mask.any(-1)), between(mask.any(-2))
    return (rows[..., :, None] & columns[..., None, :]).bool()


def threshold_ious(maps, truth, levels=100):
    """IoU of {map >= i / levels} and the mask, i = 0 .. levels - 1.

    Maps (B, m, P) in [0, 1], truth (B, P) bool -> (B, m, levels)."""
    level = (maps * levels).long().clamp_max(levels - 1)

    def at_least(counted):
        count = torch.zeros(*maps.shape[:2], levels)
        count.scatter_add_(2, level, counted[:, None].float().expand_as(maps))
        return count.flip(2).cumsum(2).flip(2)
    both, area = at_least(truth), at_least(torch.ones_like(truth))
    return both / (area + truth.sum(1)[:, None, None] - both)


def average_precision(score, truth):
    """Mean over the true entries of the precision of {score >= theirs}. Score, truth (..., P)."""
    ordered, order = score.sort(-1, descending=True)
    hit = truth.gather(-1, order).float()
    last = torch.searchsorted(-ordered, -ordered, right=True) - 1       # of entries of equal score
    precision = hit.cumsum(-1).gather(-1, last) / (last + 1)
    return (precision * hit).sum(-1) / hit.sum(-1)


def detection_ap(overlap, confidence, thresholds):
    """COCO's AP at each IoU threshold (T,), for images with one object and one prediction each, of
    IoU (N,) and confidence (N,): (T,).

    Predictions are ranked by confidence. AP is the mean over recall 0, 0.01 .. 1 of the largest
    precision there or beyond, 0 where that recall is never reached."""
    ranked = overlap[confidence.argsort(descending=True, stable=True)]
    found, n = (ranked >= thresholds[:, None]).cumsum(1).double(), len(overlap)
    precision = found / torch.arange(1, n + 1)
    precision = precision.flip(1).cummax(1).values.flip(1)              # there or beyond
    recall = (torch.arange(101, dtype=torch.float64) / 100).repeat(len(thresholds), 1)
    reached = torch.searchsorted(found / n, recall)                     # n: never
    return F.pad(precision, (0, 1)).gather(1, reached).mean(1)


# -------------------------------------------------------------------------------------------------
# segment: MaskCut
# -------------------------------------------------------------------------------------------------

def normalized_cut(A):
    """(v, mu) of graphs A (B, n, n): the second smallest mu in (D - A) v = mu D v, D = diag(A 1),
    and its v (Shi and Malik, 2000).

    Solved as D^-1/2 A D^-1/2 y = (1 - mu) y, v = D^-1/2 y. v (B, n), of unknown sign; mu (B,), 0 if
    the graph falls into two parts."""
    root = A.sum(-1).rsqrt()
    values, vectors = torch.linalg.eigh(root[:, :, None] * A * root[:, None])
    return root * vectors[..., -2], 1 - values[..., -2]


def foreground(v):
    """The object of a cut v (B, h, w), as a mask: (B, h, w) bool.

    Of the sides v > mean and v <= mean it is the one with the largest |v|, or the other if three
    corners of the image lie in it; and of that side the 4-connected part around its extreme entry.
    CutLER applies the corner rule to the side v > mean only, so that its choice depends on the sign
    that the solver returns."""
    shape, flat = v.shape, v.flatten(1)
    upper = flat > flat.mean(1, keepdim=True)
    flip = ~upper.gather(1, flat.abs().argmax(1, keepdim=True))
    corners = (upper ^ flip).view(shape)[:, ::shape[1] - 1, ::shape[2] - 1].sum((1, 2))
    flip = flip ^ (corners >= 3)[:, None]
    side = (upper ^ flip).view(shape).float()
    extreme = torch.where(flip, -flat, flat).argmax(1)
    found = F.one_hot(extreme, flat.shape[1]).view(shape).float()
    while True:                 # grow by neighbours within the side
        vertical = F.max_pool2d(found, (3, 1), 1, (1, 0))
        grown = side * torch.maximum(vertical, F.max_pool2d(found, (1, 3), 1, (0, 1)))
        if torch.equal(grown, found):
            return found.bool()
        found = grown


def maskcut(X, side, tau=0.15):
    """(mask (B, side, side), confidence (B,)): the object that CutLER's MaskCut (Wang et al., 2023)
    finds by features X (B, n, d).

    Edges between patches weigh 1 where the cosine exceeds tau, 1e-5 elsewhere. CutLER has no
    confidence; here it is -mu of the normalized cut, near 0 where the two sides share next to
    nothing. No CRF afterwards."""
    X = F.normalize(X.double(), dim=-1)
    v, mu = normalized_cut(torch.where(X @ X.mT > tau, 1.0, 1e-5).double())
    return foreground(v.view(-1, side, side)), -mu


@dataclass(kw_only=True)
class Segment(EncoderFlags):
    """How well an encoder's attention, and MaskCut on its features, find the objects of a drawn
    set."""
    data: str = option("shapes", "which", choices=("shapes", "camouflage"))
    split: str = option("val", "which part", choices=("train", "val"))
    layer: int | None = option(None, "which layer, from 1; auto is the last", low=1)
    query: str | None = option(None, "map: attention of the class token, or mean of the patches'; "
                               "auto is what its head reads", choices=("class", "mean"))
    features: str = option("keys", "what MaskCut compares: keys U^* LN(Z), layer output, or pixels",
                           choices=("keys", "output", "pixels"))
    tau: float = option(0.15, "cosine above which MaskCut joins two patches", low=-1, high=1)
    batch_size: int = option(100, "images at once", low=1)
    dtype: str = option("float32", "of autocast", choices=("auto", "float32", "bfloat16"))


def maps_and_features(encoder, x, number, query="class", kind="keys"):
    """(saliency maps (B, K, n), features (B, n, d) for MaskCut) of the patches of images x in layer
    `number`, counted from 1. Both on the CPU."""
    Z = run_layers(encoder.layers[:number - 1], encoder.tokens(x))
    layer = encoder.layers[number - 1]
    normed = layer.norm1(Z)
    if kind == "pixels":
        X = patchify(x, encoder.config.patch_size)
    elif kind == "output":
        X = layer(Z)[:, 1:]
    else:
        X = layer.attention.keys(normed).transpose(1, 2).flatten(2)[:, 1:]     # heads side by side
    maps = saliency(layer.attention.map(normed), query)
    return maps.float().cpu(), X.float().cpu()


def map_scores(maps, truth):
    """(IoU at each threshold (B, 1 + K, 100), average precision (B, 1 + K)) of the mean of the maps
    (B, K, n) and of each, at the resolution of the masks (B, 1, H, H)."""
    side = math.isqrt(maps.shape[-1])
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1).unflatten(-1, (side, side))
    maps = F.interpolate(maps, size=truth.shape[2:], mode="bilinear", antialias=True)
    maps, truth = stretched(maps.flatten(2)), truth.flatten(2)
    return threshold_ious(maps, truth[:, 0]), average_precision(maps, truth.expand_as(maps))


def mask_overlaps(cut, truth):
    """IoU with the masks (B, 1, H, H), each (B,): of the boxes of `cut` (B, side, side), of the
    boxes of the best patches, of `cut`, of the best patches (those at least half object)."""
    best = F.interpolate(truth.float(), size=cut.shape[1:], mode="area") >= 0.5
    cut, best = (F.interpolate(mask.float(), size=truth.shape[2:], mode="nearest-exact").bool()
                 for mask in (cut[:, None], best))
    pairs = (box(cut), box(truth)), (box(best), box(truth)), (cut, truth), (best, truth)
    return [iou(a, b)[:, 0] for a, b in pairs]


@torch.no_grad()
def segment(c):
    """{"iou", "ap", ..., "box_ap", ..., "mask_ap", ...}: saliency maps and MaskCut on pictures with
    one object each.

    Saliency maps ([B] Eq. (7.2.41)) are resized to the image and stretched to [0, 1]. "iou": the
    mean IoU over images at one threshold for all, the best of 0, 0.01 .. 0.99 on this very split.
    "ap": the mean over images of the average precision of the map as a classifier of pixels. Each
    for the mean over heads, for every head, and for the best head, likewise chosen here. A constant
    map scores "foreground", the objects' share of the pixels, in both; "prior" is the score of this
    split's mean mask as the map of every image, which knows where objects lie on average.

    MaskCut gives one mask an image, in whole patches. Its box and mask AP are COCO's, averaged over
    IoU 0.50, 0.55 .. 0.95 ([B] Tables 7.2, 7.4), ranked by the confidence of `maskcut`. *_ceiling:
    of the patches that are half object or more, ranked by their IoU. Objects and background of
    `shapes` differ in colour, those of `camouflage` by about as much as their texture varies:
    --features=pixels is the baseline."""
    loaded = load_encoder(c)
    encoder, size = loaded.encoder, loaded.encoder.config.image_size
    side, number = size // encoder.config.patch_size, c.layer or len(encoder.layers)
    if number > len(encoder.layers):
        raise UserError(f"--layer={number}: the last layer of {c.ckpt} is {len(encoder.layers)}")
    if side == 1:
        raise UserError(f"{c.ckpt} sees an image as one patch: there is nothing to cut")
    query = c.query or pooling(loaded)
    processes = Processes(c.device)
    encoder.to(processes.device)
    data = load_images(c.data, loaded.meta, c.data_dir)
    split, masks = on_device(data, c.split, processes.device), getattr(data, f"{c.split}_masks")

    truths = torch.from_numpy(np.array(masks))[:, None]
    truths = augment.center_crop(truths, min(size, truths.shape[-1])).bool()            # as at_size
    scores, prior = [], truths.float().mean(0).flatten()
    indices = torch.arange(len(masks)).split(c.batch_size)
    for index in progress(indices, len(indices), processes.rank == 0):
        x = model_input(split.batch(index)[0], data, size)
        truth = truths[index]
        with processes.autocast(c.dtype):
            maps, X = maps_and_features(encoder, x, number, query, c.features)
        cut, confidence = maskcut(X, side, c.tau)
        share, overlaps = truth.double().mean((1, 2, 3)), mask_overlaps(cut, truth)
        prior_scores = [score[:, 0] for score in map_scores(prior.expand(len(x), 1, -1), truth)]
        scores.append((share, *map_scores(maps, truth), *prior_scores, confidence, *overlaps))

    share, ious, ap, iou_prior, ap_prior, confidence, *overlaps = (
        torch.cat(v).double() for v in zip(*scores))
    iou_mean, *iou_heads = ious.mean(0).amax(-1).tolist()
    ap_mean, *ap_heads = ap.mean(0).tolist()
    result = dict(data=c.data, split=c.split, encoder="random" if c.random else c.ckpt,
                  layer=number, n=len(masks), foreground=share.mean().item(),
                  iou_prior=iou_prior.mean(0).max().item(), ap_prior=ap_prior.mean().item(),
                  iou=iou_mean, iou_best=max(iou_heads), iou_heads=iou_heads,
                  ap=ap_mean, ap_best=max(ap_heads), ap_heads=ap_heads)
    thresholds = torch.arange(50, 100, 5).double() / 100
    for name, found, ceiling in (("box", *overlaps[:2]), ("mask", *overlaps[2:])):
        at = detection_ap(found, confidence, thresholds)
        result[f"{name}_ap50"] = at[0].item()
        result[f"{name}_ap75"] = at[5].item()
        result[f"{name}_ap"] = at.mean().item()
        result[f"{name}_ap_ceiling"] = detection_ap(ceiling, ceiling, thresholds).mean().item()
    return result


# -------------------------------------------------------------------------------------------------
# lm: loss per token
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class TextFlags(DeviceFlags):
    """Flags of every evaluation of a language model."""
    ckpt: str | None = option(None, "a checkpoint of train_gpt.py, or pretrained:NAME")
    batch_size: int = option(16, "sequences at once", low=1)


@dataclass(kw_only=True)
class LM(TextFlags):
    """Loss per token of a text; of a masked model, loss and accuracy of its masked tokens."""
    data: str | None = option(None, "which text; auto is what the checkpoint was trained on")
    split: str | None = option(None, "which part; auto is test if it exists, else val",
                               choices=text.SPLITS)
    stride: int = option(0, "tokens from one window to the next; 0: the context, no overlap", low=0)


def load_language_model(c, causal=False):
    """(`Loaded` of a language model, on its device; Processes). `causal`: a masked one is refused.
    """
    loaded, processes = load_model(needed(c.ckpt, "ckpt"), ("gpt",)), Processes(c.device)
    if causal and not loaded.model.config.causal:
        raise UserError(f"{c.ckpt} is a masked model: this needs one that predicts the next token "
                        "(--objective=causal)")
    loaded.model.to(processes.device)
    return loaded, processes


def count_bytes(tokenizer, tokens):
    """Bytes of UTF-8 that the tokens stand for: 0 for end-of-text, 1 for a character unknown to the
    tokenizer."""
    if isinstance(tokenizer, text.CharTokenizer):
        characters = tokenizer.characters
        sizes = [len(one.encode("utf-8", "surrogatepass")) for one in characters] + [1]
    else:
        token_bytes = tokenizer.encoding.decode_single_token_bytes
        sizes = [0 if i == tokenizer.eot else len(token_bytes(i)) for i in range(tokenizer.n_vocab)]
    return int(np.bincount(tokens, minlength=len(sizes)) @ np.array(sizes))


def lm(c):
    """{"loss" per token, "ppl", "n", ...} of a text prepared with the checkpoint's tokenizer.

    Causal: also "loss_per_byte", which compares tokenizers. Masked: also "acc"."""
    loaded, processes = load_language_model(c)
    model, meta = loaded.model, loaded.meta
    data, split, tokens = load_tokens(c.data, c.split, meta, c.data_dir)
    stride = c.stride or model.config.context
    scores = language_scores(model, tokens, c, processes, c.batch_size, meta["n_vocab"],
                             loaded.content["run_config"].get("mask_rate"), stride,
                             bar=processes.rank == 0)
    if model.config.causal:
        nats = scores["loss"] * scores["n"]
        scores["loss_per_byte"] = nats / count_bytes(data.tokenizer, tokens[1:])
    return dict(data=data.name, split=split, stride=stride) | scores


# -------------------------------------------------------------------------------------------------
# lambada, cbt: the probability of one piece of text after another
# -------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class Lambada(TextFlags):
    """Accuracy of the last word of LAMBADA's passages by greedy decoding, and its loss."""


@dataclass(kw_only=True)
class CBT(TextFlags):
    """Accuracy on the Children's Book Test: which of ten candidates makes the passage likeliest."""
    task: str = option("both", "common nouns, named entities, or both",
                       choices=("CN", "NE", "both"))


def score_targets(model, x, y):
    """(log-probability of each target y >= 0, whether it is the likeliest token), row by row: two
    (m,) tensors for x, y (B, n)."""
    Z = model.norm(run_layers(model.layers, model.tokens(x)))
    logits = (Z[y >= 0] @ model.embed.weight.mT).float()    # logits of the scored positions only
    targets = y[y >= 0]
    return -F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


@torch.no_grad()
def score_continuations(model, examples, c, processes):
    """For each (ids, k), the log-probability of ids[k:] after ids[:k], and 1 if greedy decoding
    writes exactly that: (N, 2).

    Greedy decoding does if each token is the likeliest after the true ones before it."""
    scores = torch.zeros(len(examples), 2)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i][0]))     # little padding
    mine = order[processes.rank::processes.world]
    batches = [mine[first:first + c.batch_size] for first in range(0, len(mine), c.batch_size)]
    for batch in progress(batches, len(batches), processes.rank == 0):
        n = max(len(examples[i][0]) for i in batch) - 1
        x = torch.zeros(len(batch), n, dtype=torch.int64)   # padded on the right, unseen there
        y = torch.full((len(batch), n), -1)
        for row, i in enumerate(batch):
            ids, k = examples[i]
            ids = torch.from_numpy(ids.astype(np.int64))
            x[row, :len(ids) - 1] = ids[:-1]
            y[row, k - 1:len(ids) - 1] = ids[k:]
        row = torch.tensor(batch)[(y >= 0).nonzero()[:, 0]]
        with processes.autocast(c.dtype):
            logp, hit = score_targets(model, x.to(processes.device), y.to(processes.device))
        scores[:, 0].index_add_(0, row, logp.float().cpu())
        scores[:, 1].index_add_(0, row, 1 - hit.float().cpu())      # the number of tokens missed
    scores = processes.sum(scores.to(processes.device)).cpu()
    return torch.stack([scores[:, 0], (scores[:, 1] == 0).float()], 1)


def fit_context(ids, k, context):
    """[(ids, k), ...] for `score_continuations` from token arrays that share ids[:k]: all lose as
    many tokens on the left as the longest needs to fit."""
    longest = max(map(len, ids))
    extra = max(0, longest - context - 1)
    if extra >= k:
        raise UserError(f"a context of {context} tokens is too short: {longest - k} have to be "
                        "predicted from others")
    return [(one[extra:], k - extra) for one in ids]


def lambada(c):
    """{"acc", "word_loss", "n"}: how often greedy decoding writes the target word, and the mean of
    its -log-probability.

    The prompt is a newline and the passage up to its last space; the target is the rest, with that
    space. (In 7 of the 5,153 passages a line break comes after the last space; the field's usual
    code splits there all the same.)"""
    loaded, processes = load_language_model(c, causal=True)
    tokenizer, context = text.tokenizer_from_meta(loaded.meta), loaded.model.config.context
    examples = []
    for passage in text.load("lambada", cache=c.data_dir).passages:
        before, _, word = passage["text"].rstrip().rpartition(" ")
        prompt = tokenizer.encode("\n" + before)
        ids = np.concatenate([prompt, tokenizer.encode(" " + word)])
        examples += fit_context([ids], len(prompt), context)
    scores = score_continuations(loaded.model, examples, c, processes)
    logp, right = scores.double().mean(0).tolist()
    return dict(data="lambada", acc=right, word_loss=-logp, n=len(examples))


def cbt_candidates(passage, tokenizer, context):
    """The examples of a passage, one for each candidate in the gap.

    Up to the gap the candidates' texts, and so their probabilities, are the same: only what follows
    is scored."""
    before = tokenizer.encode(passage["context"])
    filled = [tokenizer.encode(" " + passage["question"].replace("XXXXX", candidate))
              for candidate in passage["options"]]
    shared = 0
    while shared < min(map(len, filled)) and len({int(ids[shared]) for ids in filled}) == 1:
        shared += 1
    ids = [np.concatenate([before, one]) for one in filled]
    return fit_context(ids, len(before) + shared, context)


def cbt(c):
    """{"acc_CN", "n_CN", "acc_NE", "n_NE"}: how often the passage is likeliest with the right
    candidate in the gap."""
    loaded, processes = load_language_model(c, causal=True)
    tokenizer, context = text.tokenizer_from_meta(loaded.meta), loaded.model.config.context
    data, result = text.load("cbt", cache=c.data_dir), dict(data="cbt")
    for task in ("CN", "NE") if c.task == "both" else (c.task,):
        passages = [p for p in data.passages if p["task"] == task]
        if not passages:
            raise UserError(f"the prepared cbt has no {task} passages: prepare it again from both "
                            "folders, or give the other --task")
        examples = [e for p in passages for e in cbt_candidates(p, tokenizer, context)]
        logp = iter(score_continuations(loaded.model, examples, c, processes)[:, 0].tolist())
        chosen = [max(p["options"], key=lambda candidate: next(logp)) for p in passages]
        right = sum(choice == p["answer"] for choice, p in zip(chosen, passages))
        result[f"acc_{task}"] = right / len(passages)
        result[f"n_{task}"] = len(passages)
    return result


COMMANDS = {"accuracy": (Accuracy, accuracy), "linear": (Probe, linear), "knn": (Probe, knn),
            "segment": (Segment, segment), "predict": (Predict, predict), "lm": (LM, lm),
            "lambada": (Lambada, lambada), "cbt": (CBT, cbt)}


def main(argv):
    """Runs one subcommand, prints its result (rank 0 only), and returns it."""
    flags = {name: config_class for name, (config_class, _) in COMMANDS.items()}
    command, config = parse_command(flags, argv, __doc__)
    result = COMMANDS[command][1](config)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    cli(main)
