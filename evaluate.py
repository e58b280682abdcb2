"""
Numbers on a trained checkpoint.

    python evaluate.py accuracy --ckpt=out/vit-cifar10/ckpt.pt      top-1 on its validation split
    python evaluate.py accuracy --ckpt=crate_base.pth --data=imagenet       a published checkpoint
    python evaluate.py linear --ckpt=out/vit-cifar10/ckpt.pt        logistic regression on features
    python evaluate.py knn --ckpt=out/vit-cifar10/ckpt.pt           the 20 nearest neighbours
    python evaluate.py segment --ckpt=out/vit-shapes/ckpt.pt        attention against object masks
    python evaluate.py predict --ckpt=out/vit-cifar10/ckpt.pt a.jpg b.png    your own pictures
    python evaluate.py lm --ckpt=out/gpt-openwebtext/best.pt --data=wikitext        loss per token
    python evaluate.py lambada --ckpt=out/gpt-openwebtext/best.pt   the last word of a passage
    python evaluate.py cbt --ckpt=out/gpt-openwebtext/best.pt       which of ten words fits a gap

The last line of each is one JSON object. Losses are in nats. Baselines of linear, knn and segment:
--random (an untrained encoder), --features=pixels (none). lm --stride=512 reads sliding windows.
"""
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from checkpoint import load_model
from flags import cli, DeviceFlags, needed, option, parse_command, ROOT, UserError
from run import Processes
from data import augment, text
from data.prepare import read_picture
from data.tokenizer import tokenizer_from_meta
from model import saliency
from scores import (classify, features, images_for, language_scores, linear_probe, model_input,
                    nearest_neighbours, on_device, pooling, statistics_of, stretched, tokens_for,
                    validation_noise, with_bar, write_overlays, write_reconstructions, write_sheet)

# ---- Images -------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class ImageFlags(DeviceFlags):
    ckpt: str | None = option(None, "an image checkpoint: ours, a published one, pretrained:NAME")
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    random: bool = option(False, "random weights instead of the checkpoint's")
    seed: int = option(0, "of the random weights, and of the tenth that linear holds out", low=0)


@dataclass(kw_only=True)
class Accuracy(ImageFlags):
    """Top-1 accuracy and cross-entropy of an image classifier, ours or a published one."""
    data: str | None = option(None, "which images; auto is what the checkpoint was trained on")
    split: str = option("val", "which part", choices=("train", "val"))
    batch_size: int = option(500, "images at once", low=1)


@dataclass(kw_only=True)
class Probe(ImageFlags):
    """How well the features of an encoder, trained or not, or the pixels separate classes."""
    data: str | None = option(None, "which images; auto is what the checkpoint was trained on")
    features: str | None = option(
        None, "class token, mean of the patch tokens, or the pixels; auto is what the head reads",
        choices=("class", "mean", "pixels"))
    k: int = option(20, "neighbours (knn)", low=1)
    out: str | None = option(None, "a PNG of validation pictures beside their nearest (knn)")
    batch_size: int = option(500, "images at once", low=1)


@dataclass(kw_only=True)
class Predict(ImageFlags):
    """The likeliest classes of each picture's centre square, and a PNG: the square beside the mean
    of the last layer's saliency maps; of a masked autoencoder its reconstruction."""
    files: tuple = option((), "pictures", positional=True)
    top: int = option(3, "classes to print", low=1)
    out: str = option(str(ROOT / "out" / "predict.png"), "the PNG, a row for each picture")


@dataclass(kw_only=True)
class Segment(ImageFlags):
    """How well an encoder's attention finds the objects of a drawn set."""
    data: str = option("shapes", "which drawn set", choices=("shapes", "camouflage"))
    layer: int | None = option(None, "which layer, from 1; auto is the last", low=1)
    batch_size: int = option(100, "images at once", low=1)
    dtype: str = option("float32", "of autocast", choices=("auto", "float32", "bfloat16"))


def load_image_model(c, *tasks):
    """(`Loaded`, on its device, with --random at random initialization; Processes)."""
    seed = c.seed if c.random else None
    loaded = load_model(needed(c.ckpt, "ckpt"), tasks, c.heads, seed)
    processes = Processes(c.device, c.dtype)
    loaded.model.to(processes.device)
    return loaded, processes


def accuracy(c):
    """{"acc", "loss", "n", ...} of a checkpoint on a split, every image once."""
    loaded, processes = load_image_model(c, "vit")
    data = images_for(c.data, loaded.meta, c.data_dir)
    names = loaded.meta.get("classes", data.classes)            # a published one names none
    if names != data.classes or loaded.model.config.classes != len(names):
        raise UserError(f"--data={data.name} has other classes than {c.ckpt}")
    split = on_device(data, c.split, processes.device)
    scores = classify(loaded.model, split, data, c, processes, c.batch_size)
    return dict(data=data.name, split=c.split) | scores


def probe(c):
    """(what was read, its features (x, y, x_test, y_test, classes), Processes, the data)."""
    if c.features == "pixels":
        encoder, meta, used, processes = None, {}, None, Processes(c.device, c.dtype)
    else:
        loaded, processes = load_image_model(c, "vit", "mae", "simdino")
        encoder, meta, used = loaded.encoder, loaded.meta, "random" if c.random else c.ckpt
    kind = c.features or pooling(loaded)
    data = images_for(c.data, meta, c.data_dir)
    samples = []
    for name in ("train", "val"):
        split = on_device(data, name, processes.device)
        x = features(encoder, split, data, c, processes, kind, c.batch_size)
        samples += [x, split.labels.to(processes.device)]
    found = dict(data=data.name, features=kind, encoder=used)
    return found, (*samples, len(data.classes)), processes, data


def linear(c):
    found, samples, *_ = probe(c)
    return found | linear_probe(*samples, c.seed)


def knn(c):
    found, samples, processes, data = probe(c)
    if c.out:
        write_neighbours(c.out, data, samples[0], samples[2])
    return found | nearest_neighbours(*samples, processes, c.k)


def write_neighbours(path, data, x, x_test):
    """A PNG: the first validation picture of each of eight classes, then the eight training
    pictures whose features x (N, D) are the nearest by cosine, of another class in a red frame."""
    classes, first = (found[:8] for found in np.unique(data.val_labels, return_index=True))
    cosine = F.normalize(x_test[first], dim=1) @ F.normalize(x, dim=1).mT
    nearest = cosine.topk(min(8, len(x))).indices.cpu().numpy()
    pictures = np.concatenate([data.val_images[first][:, None], data.train_images[nearest]], 1)
    shown = torch.stack([augment.to_float(torch.from_numpy(row)) for row in pictures])
    edge = -(-shown.shape[-1] // 16)
    frame = F.pad(torch.zeros_like(shown[0, 0])[:, edge:-edge, edge:-edge], [edge] * 4, value=1.0)
    wrong = torch.from_numpy(data.train_labels[nearest] != classes[:, None])
    red = torch.tensor([1.0, 0.0, 0.0]).view(3, 1, 1)
    shown[:, 1:][wrong] = torch.where(frame > 0, red, shown[:, 1:][wrong])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    columns = ["image", *(f"{i}." for i in range(1, pictures.shape[1]))]
    write_sheet(path, shown, columns, [data.classes[k] for k in classes])


@torch.no_grad()
def predict(c):
    """{"pictures": {file: {class: probability}}, "wrote"}; of a masked autoencoder {"error"}, the
    mean squared error on a picture's masked patches. Prints one line a file."""
    if not c.files:
        raise UserError("which pictures? evaluate.py predict --ckpt=CHECKPOINT PICTURE ...")
    loaded, processes = load_image_model(c, "vit", "mae", "simdino")
    config, model, pixels = loaded.encoder.config, loaded.model, []
    for file in c.files:
        picture, problem = read_picture(file, config.image_size)
        if problem:
            raise UserError(f"cannot read {file}: {problem}")
        pixels.append(picture)
    pixels = torch.from_numpy(np.stack(pixels)).to(processes.device)
    data = statistics_of(loaded.meta)
    x = model_input(pixels, data, config.image_size)

    shares = [{} for _ in c.files]
    if loaded.task == "vit":
        names = loaded.meta.get("classes") or [f"class {i}" for i in range(model.config.classes)]
        with processes.autocast():
            best = model(x).float().softmax(-1).topk(min(c.top, len(names)))
        shares = [{names[i]: round(p, 4) for p, i in zip(*row)}
                  for row in zip(best.values.tolist(), best.indices.tolist())]
    elif loaded.task == "mae":
        noise = validation_noise(model, 0, len(x), x.device)
        shares = [dict(error=round(model(x[i:i + 1], noise[i:i + 1]).item(), 4))
                  for i in range(len(x))]
    labels = []
    for file, row in zip(c.files, shares):
        shown = "".join(char if char.isprintable() else " " for char in Path(file).name)
        words = [shown, *(f"{name} {p:.3f}" for name, p in row.items())]
        print("  ".join(words))
        labels.append("\n".join(words))

    Path(c.out).parent.mkdir(parents=True, exist_ok=True)
    if loaded.task == "mae":
        write_reconstructions(c.out, model, pixels, data, labels)
    else:
        with processes.autocast():
            attention = loaded.encoder.trace(x)[-1].attention.float()
        maps = saliency(attention, pooling(loaded)).mean(1, keepdim=True)
        write_overlays(c.out, augment.to_float(pixels), maps, ["saliency"], labels)
    print(f"wrote {c.out}")
    return dict(pictures=dict(zip(c.files, shares)), wrote=c.out)


def open_objects(c):
    """(`Loaded`, Processes, the drawn set, its validation split, the objects' masks (N, 1, H, W) as
    the model sees them). c.layer becomes a number."""
    loaded, processes = load_image_model(c, "vit", "mae", "simdino")
    last, size = len(loaded.encoder.layers), loaded.encoder.config.image_size
    c.layer = c.layer or last
    if c.layer > last:
        raise UserError(f"--layer={c.layer}: the last layer of {c.ckpt} is {last}")
    data = images_for(c.data, loaded.meta, c.data_dir)
    masks = torch.from_numpy(np.array(data.val_masks))[:, None]
    masks = augment.center_crop(masks, min(size, masks.shape[-1])).bool()           # as at_size
    return loaded, processes, data, on_device(data, "val", processes.device), masks


@torch.no_grad()
def segment(c):
    """{"iou", "iou_heads", "iou_prior", "foreground", ...}: the saliency maps ([B] Eq. (7.2.41)) of
    pictures with one object each, against the objects' masks. Prints a table.

    Maps are resized to the image and stretched to [0, 1]. A score is the mean IoU over images at
    one threshold for all, the best of 0, 0.01 .. 0.99 on this very split: "iou" of the mean over
    heads, "iou_heads" of every head. "iou_prior" uses the split's mean mask as the map of every
    image, which knows where objects lie on average. A constant map scores "foreground", the
    objects' share of the pixels."""
    loaded, processes, data, split, masks = open_objects(c)
    size, patch = loaded.encoder.config.image_size, loaded.encoder.config.patch_size
    side, prior, ious = size // patch, masks.float().mean(0, keepdim=True), []
    for index in with_bar(torch.arange(len(masks)).split(c.batch_size), "images"):
        x, truth = model_input(split.batch(index)[0], data, size), masks[index].flatten(1)[:, None]
        with processes.autocast():
            attention = loaded.encoder.trace(x)[c.layer - 1].attention
        maps = saliency(attention, pooling(loaded)).float().cpu().unflatten(-1, (side, side))
        maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)                     # (B, 1 + K, ..)
        maps = F.interpolate(maps, size=masks.shape[2:], mode="bilinear", antialias=True)
        maps = torch.cat([maps, prior.expand(len(x), -1, -1, -1)], 1).flatten(2)
        chosen = [stretched(maps) >= level / 100 for level in range(100)]
        ious.append(torch.stack([(mask & truth).sum(2) / (mask | truth).sum(2) for mask in chosen]))
    mean, *heads, prior = torch.cat(ious, 1).double().mean(1).amax(0).tolist()
    foreground = masks.double().mean().item()
    table = {"mean of heads": mean, **{f"head {k}": iou for k, iou in enumerate(heads, 1)},
             "prior: mean mask": prior, "a constant map": foreground}
    print(f"{'map':18}IoU")
    for name, iou in table.items():
        print(f"{name:18}{iou:.3f}")
    return dict(data=c.data, encoder="random" if c.random else c.ckpt, layer=c.layer, n=len(masks),
                iou=mean, iou_heads=heads, iou_prior=prior, foreground=foreground)


# ---- Text ---------------------------------------------------------------------------------------
@dataclass(kw_only=True)
class TextFlags(DeviceFlags):
    ckpt: str | None = option(None, "a checkpoint of train_gpt.py, or pretrained:NAME")
    batch_size: int = option(16, "sequences at once", low=1)


@dataclass(kw_only=True)
class LM(TextFlags):
    """Loss per token of a text; of a masked model, loss and accuracy of its masked tokens."""
    data: str | None = option(None, "which text; auto is what the checkpoint was trained on")
    split: str | None = option(None, "which part; auto is test if it exists, else val",
                               choices=text.SPLITS)
    stride: int = option(0, "tokens from one window to the next; 0: the context, no overlap", low=0)


@dataclass(kw_only=True)
class Lambada(TextFlags):
    """How often greedy decoding writes the last word of LAMBADA's passages."""
    strict: bool = option(False, "the passage as it is; the word must come at once, in its case")


@dataclass(kw_only=True)
class CBT(TextFlags):
    """Accuracy on the Children's Book Test: which of ten words makes the passage likeliest."""


def load_language_model(c, causal=True):
    """(`Loaded` on its device, tokenizer, Processes). With `causal` a masked model is refused."""
    loaded, processes = load_model(needed(c.ckpt, "ckpt"), ("gpt",)), Processes(c.device, c.dtype)
    if causal and not loaded.model.config.causal:
        raise UserError(f"--ckpt={c.ckpt} is a masked model: this needs one that predicts the next "
                        "token (--objective=causal)")
    loaded.model.to(processes.device)
    return loaded, tokenizer_from_meta(loaded.meta), processes


def lm(c):
    """{"loss" per token, "ppl", "n", ...}; of a masked model also "acc"."""
    loaded, tokenizer, processes = load_language_model(c, causal=False)
    context = loaded.model.config.context
    if c.stride > context:
        raise UserError(f"--stride={c.stride} exceeds the context, {context} tokens")
    data, split, tokens = tokens_for(c.data, c.split, loaded.meta, c.data_dir)
    stride, mask_rate = c.stride or context, loaded.content["run_config"].get("mask_rate")
    scores = language_scores(loaded.model, tokens, processes, c.batch_size, tokenizer.n_vocab,
                             mask_rate, stride)
    return dict(data=data.name, split=split, stride=stride) | scores


@torch.no_grad()
def lambada(c):
    """{"acc", "n"}: how often greedy decoding writes the last word of a passage.

    The prompt is a newline and the passage up to its last space. By default as ToST's released code
    has it, so that numbers compare with [B] Table 7.9: typographic quotes become ", and the word
    may come anywhere in the ten tokens after the prompt, in any case. --strict: the passage as it
    is, and the next tokens are those of a space and the word."""
    loaded, tokenizer, processes = load_language_model(c)
    model = loaded.model
    n, by_length = 10, {}               # ten: GPT-2's tokens of LAMBADA's longest word
    passages = text.load("lambada", cache=c.data_dir).passages
    for passage in passages:
        words = passage["text"].strip()
        if not c.strict:            # as OpenAI prepared LAMBADA; `` and '' are TeX's quotes
            words = re.sub("[“”]|``|''", '"', words)
        before, _, word = words.rpartition(" ")
        prompt = tokenizer.encode("\n" + before)[-max(model.config.context - n, 1):]
        by_length.setdefault(len(prompt), []).append((prompt.astype(np.int64), word))
    right = 0
    for same in with_bar(by_length.values(), "lengths"):
        for first in range(0, len(same), c.batch_size):
            prompts, words = zip(*same[first:first + c.batch_size])
            x = torch.from_numpy(np.stack(prompts)).to(processes.device)
            with processes.autocast():
                written = model.generate(x, n, temperature=0)[:, -n:].tolist()
            for ids, word in zip(written, words):
                if c.strict:
                    target = tokenizer.encode(" " + word).tolist()
                    right += ids[:len(target)] == target
                else:
                    right += word.lower() in tokenizer.decode(ids).lower()
    return dict(data="lambada", strict=c.strict, acc=right / len(passages), n=len(passages))


def likeliest(model, candidates, processes):
    """The index of the likeliest of token lists that begin alike.

    Only what follows the beginning is scored. If the longest exceeds the context, every list drops
    the same number of tokens on its left."""
    longest, shared = max(map(len, candidates)), 1
    while shared < min(map(len, candidates)) and len({ids[shared] for ids in candidates}) == 1:
        shared += 1
    y = torch.tensor([ids + [-1] * (longest - len(ids)) for ids in candidates])
    lost = max(longest - model.config.context - 1, 0)
    y, shared = y[:, lost:].to(processes.device), max(shared - lost, 1)
    with processes.autocast():
        Z = model.layers(model.tokens(y[:, :-1].clamp_min(0)))
        logits = model.norm(Z[:, shared - 1:]) @ model.embed.weight.mT
    losses = F.cross_entropy(logits.float().mT, y[:, shared:], ignore_index=-1, reduction="none")
    return int(losses.sum(1).argmin())


@torch.no_grad()
def cbt(c):
    """{"acc_CN", "n_CN", "acc_NE", "n_NE"}: how often a passage is likeliest with the right
    candidate in its gap, for common nouns and for named entities. As in ToST's released code,
    end-of-text stands before the passage."""
    loaded, tokenizer, processes = load_language_model(c)
    start = [] if tokenizer.eot is None else [tokenizer.eot]
    right, result = {}, dict(data="cbt")
    for passage in with_bar(text.load("cbt", cache=c.data_dir).passages, "passages"):
        before = start + tokenizer.encode(" ".join(passage["sentences"])).tolist()
        filled = [" " + passage["question"].replace("XXXXX", one) for one in passage["options"]]
        candidates = [before + tokenizer.encode(words).tolist() for words in filled]
        chosen = passage["options"][likeliest(loaded.model, candidates, processes)]
        right.setdefault(passage["task"], []).append(chosen == passage["answer"])
    for task, hits in sorted(right.items()):
        result |= {f"acc_{task}": sum(hits) / len(hits), f"n_{task}": len(hits)}
    return result


COMMANDS = {"accuracy": (Accuracy, accuracy), "linear": (Probe, linear), "knn": (Probe, knn),
            "segment": (Segment, segment), "predict": (Predict, predict), "lm": (LM, lm),
            "lambada": (Lambada, lambada), "cbt": (CBT, cbt)}


def main(argv):
    """Runs one subcommand, prints its result (rank 0 only), and returns it."""
    command, config = parse_command({name: row[0] for name, row in COMMANDS.items()}, argv, __doc__)
    is_main = os.environ.get("RANK", "0") == "0"
    if is_main:
        print(*argv, "...", file=sys.stderr, flush=True)
    result = COMMANDS[command][1](config)
    if is_main:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    cli(main)
