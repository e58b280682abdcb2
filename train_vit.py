"""
Supervised image classification with CRATE, its variants, and ViT.

    python train_vit.py shapes                                            drawn data, two CPU cores, under three minutes
    python train_vit.py cifar10 --arch=transformer --width=192            any preset, any flag
    torchrun --standalone --nproc_per_node=8 train_vit.py                 ImageNet, the setting of [N]

[N] B.1.2: Lion, cross-entropy with smoothed labels, linear warm-up, cosine. --init_from fine-tunes a checkpoint of this
project or a published one.
"""
import copy
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional as F

import common
from common import option
from data import augment, images
from model import ARCHS, ImageClassifier, ImageConfig, image_config, make_config, projected_coding_rate


@dataclass(kw_only=True)
class Config(common.RunConfig):
    """Flags of this script; None is shown as auto."""
    data: str = option("shapes", "which pictures", choices=tuple(images.SETS))
    train_images: int | None = option(None, "how many of the training pictures, the first; auto is all", low=1)
    image_size: int = option(32, "pixels a side that the model sees", low=1)
    # model: a named size of the arch, or width, heads and layers, or both
    arch: str | None = option(None, "the layer (model.py's table); auto is crate, or the checkpoint's", choices=tuple(ARCHS))
    size: str | None = option(None, "tiny, small, base or large; sets width, heads and layers", displaces=("width", "heads", "head_dim", "layers"))
    width: int | None = option(None, "d", low=1)
    heads: int | None = option(None, "K", low=1)
    head_dim: int | None = option(None, "p; auto is width / heads", low=1)
    layers: int | None = option(None, "L", low=1)
    patch_size: int | None = option(None, "P, pixels", low=1)
    stem: str | None = option(None, "patch embedding; auto is the arch's", choices=("norm", "plain"))
    pool: str | None = option(None, "what the head reads; auto is class", choices=("class", "mean"))
    eta: float | None = option(None, "step of ISTA and ODL; auto is 0.1", low=0)
    lambd: float | None = option(None, "sparsity weight lambda; auto is 0.1", low=0)
    step: float | None = option(None, "step of MSSA in crate-c, -n, -t; auto is 1")
    layer_scale: float | None = option(None, "LayerScale at initialization; auto is the arch's", low=0)
    dropout: float = option(0.0, "after embedding, attention and MLP", low=0, high=0.99)
    drop_path: float = option(0.0, "stochastic depth of the last layer", low=0, high=0.99)
    init_from: str | None = option(None, "a checkpoint whose encoder to start from, ours or a published one",
                                   displaces=("arch", "size", "width", "heads", "head_dim", "layers", "patch_size", "stem", "pool"))
    # optimization
    optimizer: str = option("adamw", "update rule", choices=("lion", "adamw"))
    lr: float = option(1e-3, "peak learning rate", above=0)
    min_lr: float = option(0.0, "where the cosine ends", low=0)
    weight_decay: float = option(0.05, "decoupled, on matrices only", low=0)
    beta1: float = option(0.9, "momentum", low=0, high=0.9999)
    beta2: float = option(0.99, "second average", low=0, high=0.9999)
    batch_size: int = option(128, "of all processes together", low=1)
    accumulate: int = option(1, "micro-batches a step", low=1)
    epochs: float = option(5, "passes over the data, warm-up included", above=0)
    warmup_epochs: float = option(0.5, "of linear warm-up", low=0)
    stop_loss: float = option(0.0, "end where an evaluation finds a training loss below; 0: nowhere", low=0)
    clip: float = option(0.0, "largest norm of the gradient; 0: no limit", low=0)
    label_smoothing: float = option(0.1, "probability spread over all classes", low=0, high=0.99)
    ema: float = option(0.0, "momentum of averaged weights, which are then evaluated; 0: none", low=0, high=0.999999)
    # sparse rate reduction as a regularizer ([S])
    srr_weight: float = option(0.0, "weight of the SRR measure beside the cross-entropy; 0: none", low=0)
    srr_layers: str = option("all", "where it is taken: all, random (another one each step), or numbers as in 2,4")
    srr_eps: float = option(0.5, "its distortion", above=0)
    # augmentation
    crop: str = option("pad", "pad: pad and crop at the pictures' own scale; resized: random area and aspect; none", choices=("pad", "resized", "none"))
    padding: int = option(4, "pixels of zeros around the picture before crop=pad", low=0)
    crop_area: float = option(0.08, "smallest share of the area in crop=resized", above=0, high=1)
    flip: bool = option(True, "mirror half of the pictures")
    randaugment: int = option(0, "operations of RandAugment a picture", low=0)
    magnitude: int = option(9, "of RandAugment, 0 to 30", low=0, high=30)


PRESETS = {
    # [N] B.1.2. Pictures are stored at 256 px, from which 224 are cropped at random.
    "imagenet": dict(data="imagenet", image_size=224, size="base", optimizer="lion", lr=2.4e-4, weight_decay=0.5, batch_size=2048,
                     epochs=155, warmup_epochs=5, padding=0),
    # Width and depth of [S]; patch 4 at 32 px is our choice, as are rate and batch: [S] gives them for its correlation study alone.
    "cifar10": dict(data="cifar10", width=384, heads=6, layers=12, patch_size=4, optimizer="adamw", lr=1e-3, weight_decay=0.05,
                    batch_size=512, epochs=200, warmup_epochs=10, randaugment=2, magnitude=14, ema=0.999),
    # Minutes on a laptop CPU.
    "cifar10-small": dict(data="cifar10", width=192, heads=6, layers=6, patch_size=4, lr=1e-3, batch_size=128, epochs=5,
                          warmup_epochs=0.5),
    # The README's first command.
    "shapes": dict(data="shapes", width=64, heads=4, layers=4, patch_size=4, pool="mean", lr=3e-3, batch_size=50, epochs=12,
                   warmup_epochs=0.5, padding=2, label_smoothing=0.0, log_every=50),
    # [N] B.1.2: any checkpoint, at 224 px. torchvision's scale for the magnitude, as in the released code.
    "finetune-cifar10": dict(data="cifar10", image_size=224, optimizer="adamw", lr=5e-5, weight_decay=0.01, beta2=0.999, batch_size=512,
                             epochs=200, warmup_epochs=5, crop="resized", randaugment=2, magnitude=14),
}


def build_model(c, classes):
    """The classifier that the flags describe, its encoder filled from --init_from if given."""
    flags = common.sub_config(ImageConfig, c, classes=classes)
    if c.init_from is None:
        if c.size is not None:
            arch = flags.pop("arch", "crate")
            return ImageClassifier(image_config(c.size, arch, **flags))
        return ImageClassifier(make_config(ImageConfig, flags))
    if c.size is not None:
        raise common.UserError("--size and --init_from exclude each other: the checkpoint has its own size")
    config, encoder, _ = common.load_encoder(c.init_from, heads=c.heads)
    theirs = {name: getattr(config, name) for name in ImageConfig.__dataclass_fields__}
    for name in ("arch", "width", "heads", "head_dim", "layers", "patch_size", "stem", "eta", "lambd", "step"):
        if getattr(c, name) is not None and getattr(c, name) != theirs[name]:
            raise common.UserError(f"--{name}={getattr(c, name)} contradicts {c.init_from}, which has {theirs[name]}")
    model = ImageClassifier(ImageConfig(**theirs | dict(classes=classes, image_size=c.image_size, dropout=c.dropout,
                                                        drop_path=c.drop_path, pool=c.pool or "class")))
    common.load_resized(model.encoder, config, encoder, c.init_from)
    return model


def srr_layers(c, model, step):
    """The layers, counted from 0, whose SRR measure this step adds to the loss."""
    L = model.config.layers
    if c.srr_layers == "all":
        return range(L)
    if c.srr_layers == "random":
        return [common.derive_seed(c.seed, step, "srr") % L]
    chosen = [int(word) for word in c.srr_layers.split(",") if word.strip().isdecimal()]
    if len(chosen) < len(c.srr_layers.split(",")) or not all(1 <= l <= L for l in chosen):
        raise common.UserError(f"--srr_layers={c.srr_layers} is not all, random, or numbers from 1 to {L} as in 2,4")
    return [l - 1 for l in chosen]


def srr(model, outputs, chosen, eps):
    """The mean over the chosen layers of R^c(StopGrad(Z^l) | U^l), Z^l the output of layer l: what has a gradient in [S]'s

        1/L sum_l lambda ||Z^l||_0 + R^c(Z^l | U^l) - R(Z^l)

    with the gradient through Z^l stopped. It reaches U^l only. U = 0 would be its minimum: the cross-entropy, which then has no
    attention, is what keeps U from it, so that the weight has to stay small."""
    with torch.autocast(outputs[0].device.type, enabled=False):
        rates = [projected_coding_rate(outputs[l].detach().float()[:, None] @ model.encoder.layers[l].attention.bases(), eps).mean() for l in chosen]
    return torch.stack(rates).mean()


def augmented(pictures, rng, c, data):
    """uint8 (b, H, W, 3) to the normalized float batch (b, 3, S, S) that the model trains on."""
    x = augment.to_float(pictures)
    if c.crop == "resized":
        x = augment.random_resized_crop(x, c.image_size, rng, scale=(c.crop_area, 1.0))
    elif c.crop == "pad":
        x = augment.resize(x, c.image_size) if data.image_size < c.image_size else x
        x = augment.pad_crop(x, c.image_size, c.padding, rng)
    else:
        x = common.at_size(x, c.image_size)
    if c.flip:
        x = augment.flip(x, rng)
    if c.randaugment:
        x = augment.rand_augment(x, rng, n=c.randaugment, m=c.magnitude)
    return augment.normalize(x, data.mean, data.std)


def main(argv):
    """Trains one classifier; returns the last line of metrics.jsonl."""
    c, preset = common.parse(Config, PRESETS, argv, __doc__, default="imagenet")
    if preset == "finetune-cifar10" and c.init_from is None:
        raise common.UserError("finetune-cifar10 needs --init_from=CHECKPOINT")
    processes = common.Processes(c.device)
    device = processes.device
    rows = processes.rows(c.batch_size)
    if (rows.stop - rows.start) % c.accumulate:
        raise common.UserError(f"--accumulate={c.accumulate} does not divide the {rows.stop - rows.start} pictures of each process")

    data = images.load(c.data, cache=c.data_dir)
    pictures = len(data.train_labels[:c.train_images])
    if c.batch_size > pictures:
        raise common.UserError(f"--batch_size={c.batch_size} is more than the {pictures} training pictures")
    torch.manual_seed(common.derive_seed(c.seed, "weights"))
    model = build_model(c, len(data.classes)).to(device)
    if c.srr_weight and not hasattr(model.encoder.layers[0].attention, "U"):
        raise common.UserError(f"--srr_weight needs subspaces U_k, which --arch={model.config.arch} does not have")
    if c.srr_weight:
        srr_layers(c, model, 0)
    run = common.Run(c, "vit", preset, processes)
    train = images.Images(data.train_images[:c.train_images], data.train_labels[:c.train_images], device)
    val = images.Images(data.val_images, data.val_labels, device)
    steps_per_epoch = len(train) // c.batch_size
    total = max(round(c.epochs * steps_per_epoch), 1)
    schedule = common.warmup_cosine(c.lr, total, round(c.warmup_epochs * steps_per_epoch), c.min_lr)
    eval_every = c.eval_every or max(steps_per_epoch, 1)
    save_every = c.save_every or eval_every

    optimizer = common.make_optimizer(model, c.optimizer, c.lr, c.weight_decay, (c.beta1, c.beta2))
    averaged = copy.deepcopy(model) if c.ema else None
    if run.resumed is not None:
        common.restore(run, model.config, optimizer, model, averaged)
    if common.wants_compile(c, device):
        model.compile()
    parallel = processes.wrap(model)
    run.begin(total, "images", c.batch_size, flops=model.train_flops())
    run.say(f"{model.config.arch}, {common.count(model):,} parameters, {c.data} at {c.image_size} px, {total} steps of {c.batch_size} "
            f"on {processes.world} x {common.device_name(device)}")

    def checkpoint():
        evaluated, extra = (averaged, dict(student=model.state_dict())) if c.ema else (model, {})
        return dict(model=evaluated.state_dict(), model_config=asdict(model.config), optimizer=optimizer.state_dict(), extra=extra,
                    data_meta=dict(name=c.data, classes=data.classes, mean=data.mean, std=data.std, image_size=data.image_size))

    index = images.index_batches(len(train), c.batch_size, c.seed, start_step=run.start, rows=rows)
    batches = train.batches(index, c.workers)
    for step in range(run.start, total):
        if c.stop_loss and step and step % eval_every == 0:
            with run.untimed():
                fit = common.classify(averaged or model, train, data, c, processes)["loss"]
            if fit < c.stop_loss:
                run.say(f"step {step}: the training loss, {fit:.4f}, is below --stop_loss={c.stop_loss:g}")
                break
        torch.manual_seed(common.derive_seed(c.seed, step, "dropout", processes.rank))
        model.train()
        common.set_lr(optimizer, schedule[step])
        pictures, labels = next(batches)
        rng = augment.BatchRandom(common.derive_seed(c.seed, step, "augment"), c.batch_size, rows, device)
        x = augmented(pictures, rng, c, data)

        loss = 0.0
        for micro, (x_part, y_part) in enumerate(zip(x.chunk(c.accumulate), labels.chunk(c.accumulate))):
            with common.accumulating(parallel, last=micro == c.accumulate - 1):
                with processes.autocast(c.dtype):
                    logits, Z = parallel(x_part, outputs=True) if c.srr_weight else (parallel(x_part), None)
                    part = F.cross_entropy(logits, y_part, label_smoothing=c.label_smoothing) / c.accumulate
                if c.srr_weight:
                    part = part + c.srr_weight * srr(model, Z, srr_layers(c, model, step), c.srr_eps) / c.accumulate
                part.backward()
            loss = loss + part.detach()
        if c.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if c.ema:
            common.ema_update(averaged, model, min(c.ema, (step + 1) / (step + 10)))       # the average forgets the start quickly
        run.stepped(loss, schedule[step])

        stop, last = run.should_stop(), step == total - 1
        if (step + 1) % eval_every == 0 or last:
            with run.untimed():
                scores = common.classify(averaged or model, val, data, c, processes)
                best = run.evaluated(**scores)
                run.save(checkpoint(), best=best, last=last)
        elif stop or (step + 1) % save_every == 0:
            with run.untimed():
                run.save(checkpoint(), last=stop)
        if stop and not last:
            run.interrupted()
    return run.done()


if __name__ == "__main__":
    common.cli(main)
