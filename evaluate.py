"""Numbers of a trained checkpoint, of its layers, and the scores that training scripts share.

    python evaluate.py accuracy --ckpt=out/vit-cifar10/ckpt.pt      top-1 on its validation split
    python evaluate.py accuracy --ckpt=crate_base.pth --data=imagenet       a published checkpoint
    python evaluate.py linear --ckpt=out/vit-cifar10/ckpt.pt        logistic regression on features
    python evaluate.py knn --ckpt=out/vit-cifar10/ckpt.pt           the 20 nearest neighbours
    python evaluate.py lm --ckpt=out/gpt-openwebtext/best.pt --data=mine            loss per token

The last line of each is one JSON object. Baselines are --untrained and --features=pixels."""
import json
import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from checkpoint import open_model
from data import augment, images, text
from data.samples import split_for
from flags import OpenFlags, option, parse_command, PrecisionFlags, SampleFlags, UserError
from model import coding_rate, SoftmaxAttention, sparse_rate_reduction, subspace_coding_rate
from processes import cli, derive_seed, is_main, with_bar


# ---- Scores of images ---------------------------------------------------------------------------
def check_classes(loaded, data):
    """Raises UserError if a classifier has other classes than the data."""
    names = loaded.meta.get("classes", data.classes)            # a published one names none
    if names != data.classes or loaded.model.config.classes != len(names):
        raise UserError(f"--data={data.name} has other classes than the checkpoint")


def batches_of(split, batch_size, processes):
    """This process's share of the images and labels, in batches."""
    mine = torch.arange(len(split))[processes.rank::processes.world].split(batch_size)
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
    mine = torch.cat(parts)
    result = mine.new_zeros(len(split), mine.shape[1])
    result[processes.rank::processes.world] = mine
    return processes.sum(result), split.labels.to(result.device)


def nearest_neighbours(x, y, x_test, y_test, classes, processes, k=20, temperature=0.07):
    """Accuracy of a vote among the k nearest by cosine, each with the weight
    exp(cosine / temperature), DINO's ([B] (7.2.39) has none): dict(acc, k). x (N, D), y (N,)."""
    x, x_test, k = F.normalize(x, dim=1), F.normalize(x_test, dim=1), min(k, len(x))
    right = torch.zeros((), device=x.device)
    mine = torch.arange(len(x_test), device=x.device)[processes.rank::processes.world]
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


def linear_probe(x, y, x_test, y_test, classes, seed=0):
    """Test accuracy of a logistic regression ([B] Eq. (7.2.38)) on standardized features: dict(acc,
    decay), the decay chosen on a held-out tenth of the training samples."""
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)     # 1e-6: a constant feature stays finite
    x, x_test = (x - mean) / std, (x_test - mean) / std
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
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


# ---- Scores of text -----------------------------------------------------------------------------
@torch.no_grad()
def language_scores(model, tokens, processes, batch_size, n_vocab=None, mask_rate=None,
                    context=None):
    """Loss in nats over a text: dict(loss, ppl, n). A causal model predicts each token but the
    first, once; a masked one the masked tokens of whole windows, with their top-1 accuracy "acc".
    A window's mask is a function of its number, at every evaluation, on any number of processes."""
    model.eval()
    masked, rank, world = not model.config.causal, processes.rank, processes.world
    batches = text.eval_batches(tokens, context or model.config.context, batch_size, rank, world,
                                whole=masked)
    total = torch.zeros(3, dtype=torch.float64, device=processes.device)
    for i, (x, y) in enumerate(with_bar(batches, "batches")):
        if masked:
            for row in range(batch_size):
                window = (i * batch_size + row) * world + rank
                rng = torch.Generator().manual_seed(derive_seed("masked evaluation", window))
                inputs, targets = text.mask_some(x[row:row + 1], rng, n_vocab, mask_rate)
                x[row], y[row] = inputs[0], torch.where(y[row] >= 0, targets[0], -1)
        x, y = x.to(processes.device), y.to(processes.device)
        count, right = (y >= 0).sum(), torch.zeros((), device=y.device)
        with processes.autocast():
            if masked:
                logits = model(x).flatten(0, 1).float()
                loss = F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="sum")
                right = (logits.argmax(-1) == y.flatten()).sum()
            else:
                loss = model(x, y) * count
        total += torch.stack([loss, right, count])
    loss, right, n = processes.sum(total).tolist()
    scores = dict(loss=loss / n, ppl=math.exp(min(loss / n, 700)), n=int(n))
    return scores | dict(acc=right / n) if masked else scores


# ---- What a layer does to the rates, at one scale -----------------------------------------------
def at_norm(Z, other):
    """Each sample of Z (..., n, d), scaled to the norm of that of `other`."""
    return Z * (other.norm(dim=(-2, -1)) / Z.norm(dim=(-2, -1)))[..., None, None]


def centered(Z):
    """Tokens (..., n, d) less their mean."""
    return Z - Z.mean(-2, keepdim=True)


def rate_change(Z, step, U, eps):
    """What `step` adds to R^c(Z | U) of tokens Z (B, n, d), with each sample back at its norm, as
    longer tokens alone raise R^c: (B,)."""
    after = at_norm(Z + step, Z)
    return subspace_coding_rate(after, U, eps) - subspace_coding_rate(Z, U, eps)


def unit_size(U):
    """U (K, d, p) times the number that makes ||U||_F^2 = K p, as orthonormal bases have it."""
    return U * (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()


def random_subspaces(d, K, generator):
    """K random subspaces of R^d, each orthogonal to the others: bases (K, d, p), float64."""
    A = torch.randn(d, d // K * K, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(A)[0].view(d, K, d // K).transpose(0, 1)


def alone(attention, X):
    """What softmax attention would give X (B, n, d) if each token attended to itself alone, with
    neither --shift nor a bias of the values."""
    return attention.join(X[:, None] @ attention.bases())


def one_set(T, together):
    """The tokens T (B, n, d) of `together` samples as one set: (B / together, together n, d)."""
    if len(T) % together:
        raise UserError(f"{len(T)} samples at once are no multiple of {together} coded together")
    return T.double().unflatten(0, (-1, together)).flatten(1, 2)


def layer_numbers(layer, trace, eps=0.1, lambd=0.1, together=1):
    """Numbers of a layer that took the steps of `trace`, {name: one for each set of tokens}. Rates
    are in nats, with U at unit size, and in float64, as float32 may give NaN.

    Rc_tokens    R^c of U_k^* LN(Z^l), each token scaled to norm 1, as in [N]'s code (its caption
                 has R^c(Z^{l+1/2} | U)); without --shift and --rotary
    Rc_change    what attention, derived to lower R^c, adds to it, as `rate_change`, of tokens less
                 their mean
    Rc_alone     the same of its control, a step as long in which each token attends to itself alone
    R_change     what the layer adds to R at the norm of Z^l, the mean included; gain to R - R^c
    objective    R - Rc - lambda ||Z||_0 of Z^{l+1}; so are R, Rc and nonzeros
    rise         what the layer adds to the objective, [J] Eq. (21)"""
    U = unit_size(layer.attention.bases().double())
    X, Z, half, out = (one_set(T, together) for T in (
        layer.norm1(trace.tokens), trace.tokens, trace.half, trace.out))

    def gain(T):
        """R - R^c, at the norm of Z."""
        return sparse_rate_reduction(at_norm(T, Z), U, eps, lambd=0)

    attended = centered(half - Z)
    w = F.normalize(X[:, None] @ U, dim=-1)                                     # (B, K, n, p)
    objective = sparse_rate_reduction(out, U, eps, lambd)
    numbers = dict(
        Rc_tokens=coding_rate(w, eps).sum(-1), Rc_change=rate_change(centered(Z), attended, U, eps),
        R_change=coding_rate(at_norm(out, Z), eps) - coding_rate(Z, eps), gain=gain(out) - gain(Z),
        R=coding_rate(out, eps), Rc=subspace_coding_rate(out, U, eps),
        nonzeros=(out != 0).double().mean((-2, -1)),
        objective=objective, rise=objective - sparse_rate_reduction(Z, U, eps, lambd))
    if isinstance(layer.attention, SoftmaxAttention):
        step = centered(one_set(alone(layer.attention, layer.norm1(trace.tokens)), together))
        numbers["Rc_alone"] = rate_change(centered(Z), at_norm(step, attended), U, eps)
    return numbers


# ---- Commands -----------------------------------------------------------------------------------
@dataclass(kw_only=True)
class ScoreFlags(OpenFlags, PrecisionFlags):
    batch_size: int = option(500, "images at once", low=1)


@dataclass(kw_only=True)
class Accuracy(ScoreFlags, SampleFlags):
    """Top-1 accuracy and cross-entropy of an image classifier, ours or a published one."""


def accuracy(c):
    """{"acc", "loss", "n", ...} of a checkpoint on a split, every image once."""
    loaded, processes = open_model(c, "vit")
    data, split = split_for(loaded, c)
    check_classes(loaded, data)
    return dict(data=data.name, split=c.split) | classify(
        loaded.model, split, data, processes, c.batch_size)


@dataclass(kw_only=True)
class Probe(ScoreFlags):
    """How well features separate the classes: an encoder's, trained or not, or the pixels."""
    features: str | None = option(
        None, "class token, mean of the patch tokens, or the pixels; auto is what the head reads",
        choices=("class", "mean", "pixels"))


def probe(c):
    """(what was read, its features and labels [x, y, x_test, y_test], Processes, the data)."""
    loaded, processes = open_model(c, "vit", "mae", "simdino")
    data, kind = images.load_for(c.data, loaded.meta, c.data_dir), c.features or loaded.pooling
    samples = []
    for split in (data.train, data.val):
        split = images.Images(split, processes.device)
        samples += features(loaded.encoder, split, data, processes, kind, c.batch_size)
    encoder = "random" if c.untrained else c.ckpt
    what = dict(data=data.name, features=kind, encoder=None if kind == "pixels" else encoder)
    return what, samples, processes, data


def linear(c):
    what, samples, _, data = probe(c)
    return what | linear_probe(*samples, len(data.classes), c.seed)


def knn(c):
    what, samples, processes, data = probe(c)
    return what | nearest_neighbours(*samples, len(data.classes), processes)


@dataclass(kw_only=True)
class LM(OpenFlags, PrecisionFlags):
    """Loss per token of a text; of a masked model, loss and accuracy of its masked tokens."""
    split: str | None = option(None, "which part; auto is test if it exists, else val",
                               choices=("train", "val", "test"))
    batch_size: int = option(16, "windows at once", low=1)
    context: int | None = option(None, "tokens a window; with rotary positions also more", low=1)


def lm(c):
    """{"loss" per token, "ppl", "n", ...}; of a masked model also "acc"."""
    loaded, processes = open_model(c, "gpt")
    mask_rate = loaded.content["run_config"].get("mask_rate")
    data, split, tokens = text.tokens_for(c.data, c.split, loaded.meta, c.data_dir)
    return dict(data=data.name, split=split) | language_scores(
        loaded.model, tokens, processes, c.batch_size, data.tokenizer.n_vocab, mask_rate, c.context)


COMMANDS = dict(accuracy=(Accuracy, accuracy), linear=(Probe, linear), knn=(Probe, knn),
                lm=(LM, lm))


def main(argv):
    _, function, config = parse_command(COMMANDS, argv, __doc__)
    result = function(config)
    if is_main():
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    cli(main)
