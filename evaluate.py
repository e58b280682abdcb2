"""Scores of a trained checkpoint, which the training scripts share.

    python evaluate.py accuracy --ckpt=out/vit-cifar10/ckpt.pt      top-1 on its validation split
    python evaluate.py accuracy --ckpt=crate_base.pth --data=imagenet       a published checkpoint
    python evaluate.py linear --ckpt=out/vit-cifar10/ckpt.pt        logistic regression on features
    python evaluate.py knn --ckpt=out/vit-cifar10/ckpt.pt           the 20 nearest neighbours
    python evaluate.py lm --ckpt=out/gpt-openwebtext/best.pt --data=mine            loss per token

The last line of each is one JSON object. Baselines are --untrained and --features=pixels."""
import json
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from checkpoint import open_model
from data import augment, images, text
from flags import OpenFlags, option, parse_command, SplitFlags, TypeFlags, UserError
from processes import cli, derive_seed, is_main, Processes, with_bar


# ---- Scores of images ---------------------------------------------------------------------------
def check_classes(loaded, data):
    """Raises UserError if a classifier has other classes than the data."""
    names = loaded.meta.get("classes", data.classes)            # a published one names none
    if names != data.classes or loaded.model.config.classes != len(names):
        raise UserError(f"--data={data.name} has other classes than the checkpoint")


def batches_of(split, batch_size, processes):
    """This process's share of the images and labels, in batches."""
    mine = torch.arange(len(split))[processes.interleaved].split(batch_size)
    index = [part.numpy() for part in mine]
    return with_bar(split.batches(index), "images", len(index))


@torch.no_grad()
def classify(model, split, data, processes, batch_size=500):
    """Cross-entropy and top-1 accuracy of a classifier over a split: dict(loss, acc, n)."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=processes.device)
    for batch, labels in batches_of(split, batch_size, processes):
        with processes.autocast():
            logits = model(images.model_input(batch, data, model.config.image_size))
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")
        right = (logits.argmax(-1) == labels).sum()
        total += torch.stack([loss, right])
    loss, right = processes.sum(total).tolist()
    return dict(loss=loss / len(split), acc=right / len(split), n=len(split))


@torch.no_grad()
def features(encoder, split, data, processes, kind="class", batch_size=500):
    """Features (N, D) float32 and labels (N,) of a split, on the device of every process: the class
    token, the mean of the patch tokens (kind="mean"), or the images themselves ("pixels")."""
    parts = []
    for batch, _ in batches_of(split, batch_size, processes):
        if kind == "pixels":
            x = augment.to_float(batch).flatten(1)
        else:
            with processes.autocast():
                Z = encoder(images.model_input(batch, data, encoder.config.image_size)).float()
            x = Z[:, 1:].mean(1) if kind == "mean" else Z[:, 0].clone()     # a view would keep Z
        parts.append(x)
    mine = torch.cat(parts)     # every process adds its rows to zeros: the sum has all
    result = mine.new_zeros(len(split), mine.shape[1])
    result[processes.interleaved] = mine
    return processes.sum(result), split.labels.to(result.device)


def nearest_neighbours(processes, x, y, x_test, y_test, classes, k=20, temperature=0.07):
    """Accuracy of a vote among the k nearest samples by cosine: dict(acc, k). As in DINO a vote has
    the weight exp(cosine / temperature); [B] Eq. (7.2.39) has none. x (N, D), y (N,)."""
    x, x_test, k = F.normalize(x, dim=1), F.normalize(x_test, dim=1), min(k, len(x))
    right = torch.zeros((), device=x.device)
    mine = torch.arange(len(x_test), device=x.device)[processes.interleaved]
    for part in with_bar(mine.split(1000), "neighbours"):           # 1000: for memory
        cosine, index = (x_test[part] @ x.mT).topk(k)
        votes = torch.zeros(len(part), classes, device=x.device)
        votes.scatter_add_(1, y[index], (cosine / temperature).exp())
        right += (votes.argmax(1) == y_test[part]).sum()
    return dict(acc=processes.sum(right).item() / len(x_test), k=k)


def logistic_regression(x, y, classes, decay):
    """(W, b) that minimize the mean cross-entropy of x W + b plus decay / 2 ||W||^2, by L-BFGS."""
    # on the CPU: L-BFGS reads numbers in its loop over past steps, and a GPU would wait for each
    W = torch.zeros(x.shape[1], classes, requires_grad=True)
    b = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([W, b], max_iter=200, tolerance_grad=1e-5,
                                  tolerance_change=1e-9, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        weight, bias = W.to(x.device), b.to(x.device)
        loss = F.cross_entropy(x @ weight + bias, y) + 0.5 * decay * weight.square().sum()
        loss.backward()
        return loss
    optimizer.step(closure)
    return W.detach().to(x.device), b.detach().to(x.device)


def linear_probe(processes, x, y, x_test, y_test, classes):
    """Test accuracy of a logistic regression ([B] Eq. (7.2.38)) on standardized features: dict(acc,
    decay), the decay chosen on a held-out tenth of the training samples. All processes do all."""
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)     # 1e-6: a constant feature stays finite
    x, x_test = (x - mean) / std, (x_test - mean) / std
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    held, kept = order.tensor_split([max(len(x) // 10, 1)])

    def score(decay, fit, test, labels):
        W, b = logistic_regression(x[fit], y[fit], classes, decay)
        return ((test @ W + b).argmax(1) == labels).sum().item() / len(labels)
    decays = with_bar([10.0 ** e for e in range(-5, 1)], "decays")
    best = max(decays, key=lambda decay: score(decay, kept, x[held], y[held]))
    return dict(acc=score(best, order, x_test, y_test), decay=best)


def validation_noise(model, n):
    """Noise (n, patches) that masks a masked autoencoder's n validation images, always the same."""
    return augment.BatchRandom(derive_seed("validation"), n).uniform(model.config.patches)


@torch.no_grad()
def reconstruction_loss(model, split, data, processes, batch_size=250):
    """The mean loss of a masked autoencoder over a split: dict(loss, n)."""
    model.eval()
    noise = validation_noise(model, len(split))[processes.interleaved].split(batch_size)
    total = torch.zeros((), device=processes.device)
    for (batch, _), part in zip(batches_of(split, batch_size, processes), noise):
        x = images.model_input(batch, data, model.config.image_size)
        with processes.autocast():
            total += len(part) * model(x, part.to(processes.device))
    return dict(loss=processes.sum(total).item() / len(split), n=len(split))


# ---- Scores of text -----------------------------------------------------------------------------
def masked_batches(batches, n_vocab, mask_rate, rank, world):
    """Windows of `text.eval_batches` with BERT's masks: inputs, and targets where one is masked."""
    for i, (x, y) in enumerate(batches):
        for row in range(len(x)):
            window = (i * len(x) + row) * world + rank
            rng = torch.Generator().manual_seed(derive_seed("masked evaluation", window))
            inputs, targets = text.mask_some(x[row:row + 1], rng, n_vocab, mask_rate)
            x[row], y[row] = inputs[0], torch.where(y[row] >= 0, targets[0], -1)
        yield x, y


@torch.no_grad()
def language_scores(model, tokens, processes, batch_size, n_vocab=None, mask_rate=None,
                    context=None):
    """Loss in nats, perplexity and top-1 accuracy over a text: dict(loss, ppl, acc, n). A causal
    model predicts each token but the first, once; a masked one the masked tokens of whole windows.
    A window has the same mask in every evaluation, on any number of processes."""
    model.eval()
    masked, rank, world = not model.config.causal, processes.rank, processes.world
    batches = text.eval_batches(tokens, context or model.config.context, batch_size, rank, world,
                                whole=masked)
    if masked:
        batches = masked_batches(batches, n_vocab, mask_rate, rank, world)
    total = torch.zeros(3, dtype=torch.float64, device=processes.device)
    for x, y in with_bar(batches, "batches"):
        x, y = x.to(processes.device), y.to(processes.device)
        with processes.autocast():
            logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), ignore_index=-1,
                               reduction="sum")
        total += torch.stack([loss, (logits.argmax(-1) == y).sum(), (y >= 0).sum()])
    loss, right, n = processes.sum(total).tolist()
    return dict(loss=loss / n, ppl=math.exp(min(loss / n, 700)), acc=right / n, n=int(n))


# ---- Commands -----------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Accuracy(SplitFlags, TypeFlags):
    """Top-1 accuracy and cross-entropy of an image classifier, ours or a published one."""
    batch_size: int = option(500, "images at once", low=1)


def accuracy(c):
    """{"acc", "loss", "n", ...} of a checkpoint on a split, every image once."""
    processes = Processes(c.device, c.dtype)
    loaded = open_model(c, processes.device, "vit")
    data, split = images.split_for(loaded, c)
    check_classes(loaded, data)
    return dict(data=data.name, split=c.split) | classify(
        loaded.model, split, data, processes, c.batch_size)


@dataclass(kw_only=True)
class Probe(OpenFlags, TypeFlags):
    """How well features separate the classes: an encoder's, trained or not, or the pixels."""
    batch_size: int = option(500, "images at once", low=1)
    features: str | None = option(
        None, "class token, mean of the patch tokens, or the pixels; auto is what the head reads",
        choices=("class", "mean", "pixels"))


def probe(c, score):
    """{what was read} | score(processes, x, y, x_test, y_test, number of classes)."""
    processes = Processes(c.device, c.dtype)
    loaded = open_model(c, processes.device, "vit", "mae", "simdino")
    data, kind = images.load_for(c.data, loaded.meta, c.data_dir), c.features or loaded.pooling
    samples = []
    for split in (data.train, data.val):
        split = images.Images(split, processes.device)
        samples += features(loaded.encoder, split, data, processes, kind, c.batch_size)
    encoder = None if kind == "pixels" else loaded.label
    return dict(data=data.name, features=kind, encoder=encoder) | score(
        processes, *samples, len(data.classes))


@dataclass(kw_only=True)
class LM(OpenFlags, TypeFlags):
    """Loss and accuracy per token of a text; of a masked model, of its masked tokens."""
    split: str | None = option(None, "which part; auto is test if it exists, else val",
                               choices=("train", "val", "test"))
    batch_size: int = option(16, "windows at once", low=1)
    context: int | None = option(None, "tokens a window; with rotary positions also more", low=1)


def lm(c):
    """{"loss" per token, "ppl", "acc", "n", ...}."""
    processes = Processes(c.device, c.dtype)
    loaded = open_model(c, processes.device, "gpt")
    mask_rate = loaded.content["run_config"].get("mask_rate")
    data, split, tokens = text.tokens_for(c.data, c.split, loaded.meta, c.data_dir)
    return dict(data=data.name, split=split) | language_scores(
        loaded.model, tokens, processes, c.batch_size, data.tokenizer.n_vocab, mask_rate, c.context)


COMMANDS = {"accuracy": (Accuracy, accuracy), "lm": (LM, lm),
            "linear": (Probe, partial(probe, score=linear_probe)),
            "knn": (Probe, partial(probe, score=nearest_neighbours))}


def main(argv):
    _, function, config = parse_command(COMMANDS, argv, __doc__)
    result = function(config)
    if is_main():
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    cli(main)
