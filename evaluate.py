"""
Numbers on a trained checkpoint.

    python evaluate.py accuracy --ckpt=out/vit-cifar10/best.pt            top-1 on the validation split it was trained for
    python evaluate.py accuracy --ckpt=crate_base.pth --data=imagenet     a published checkpoint
    python evaluate.py linear --ckpt=out/vit-cifar10/best.pt              logistic regression on frozen features; --features=pixels: a floor
    python evaluate.py knn --ckpt=out/vit-cifar10/best.pt                 the 20 nearest neighbours
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
from tqdm import tqdm

import common
from common import option
from data import images, text
from model import ImageEncoder, LanguageModel, MAEConfig, MaskedAutoencoder, TextConfig, make_config, run_layers


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
        loss = torch.nn.functional.cross_entropy(x @ W + b, y) + 0.5 * decay * W.square().sum()
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


def probe(c, classifier):
    """Features of both splits, extracted once, then `classifier` (x, y, x_test, y_test, classes) on them."""
    encoder = None
    name, mean_std = c.data, None
    if c.features != "pixels":
        config, state = common.load_encoder(needed(c.ckpt, "ckpt"), c.heads)
        content, _ = common.read_torch(c.ckpt)
        meta = content.get("data_meta") or {}
        name, mean_std = c.data or meta.get("name"), (meta.get("mean", common.IMAGENET_MEAN), meta.get("std", common.IMAGENET_STD))
        torch.manual_seed(c.seed)
        encoder = (MaskedAutoencoder(config).encoder if isinstance(config, MAEConfig) else ImageEncoder(config)).eval()
        if not c.random:
            common.load_into(encoder, state, c.ckpt, "encoder")
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
    content = common.load_checkpoint(needed(c.ckpt, "ckpt"), "gpt")
    model = LanguageModel(make_config(TextConfig, content["model_config"]))
    common.load_into(model, content["model"], c.ckpt)
    if causal and not model.config.causal:
        raise common.UserError(f"{c.ckpt} is a masked model: this needs one that predicts the next token (--objective=causal)")
    return model.eval().to(processes.device), content


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
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


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
            "lm": (LM, lm), "lambada": (Lambada, lambada), "cbt": (CBT, cbt)}


def main(argv):
    """Runs one subcommand, prints its result (rank 0 only), and returns it."""
    command, config = common.parse_command({name: flags for name, (flags, _) in COMMANDS.items()}, argv, __doc__)
    result = COMMANDS[command][1](config)
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    common.cli(main)
