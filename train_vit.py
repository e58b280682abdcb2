"""Supervised image classification with CRATE, its variants, and ViT.

    python train_vit.py shapes                                   drawn images, two CPU cores
    python train_vit.py cifar10 --arch=transformer --width=192   any preset, any flag
    torchrun --standalone --nproc_per_node=8 train_vit.py        ImageNet, the setting of [N]

[N] B.1.2: Lion, cross-entropy with smoothed labels, linear warm-up, cosine. --init_from fine-tunes
a checkpoint of this project or a published one."""
from dataclasses import dataclass, MISSING
from functools import partial

import torch
from torch.nn import functional as F

import checkpoint
from data import augment, images
from evaluate import classify
from flags import model_fields, ModelFlags, option, parse_run, UserError
from measure import count, train_flops
from model import image_config, ImageClassifier, ImageConfig, subspace_coding_rate
from optim import cosine_schedule, make_optimizers, micro_batches, take_step
from processes import cli, derive_seed, note, Processes, wants_compile
from run import Run, RunFlags

SHAPE_FIELDS = "arch", "width", "heads", "head_dim", "layers", "expansion", "patch_size"


@dataclass(kw_only=True)
class Config(RunFlags, ModelFlags):
    """With --init_from a flag at auto has the checkpoint's value; those of SHAPE_FIELDS can have no
    other. A run cannot be resumed with another value of a `fixed` flag."""
    data: str = option("imagenet", "which images: a prepared set", fixed=True)
    train_images: int | None = option(None, "use the first N training images; auto: all", low=1,
                                      fixed=True)
    val: int = option(0, "validate on the last N training images, to choose flags; 0: off", low=0,
                      fixed=True)
    image_size: int = option(32, "pixels per side that the model sees", low=1)
    patch_size: int | None = option(None, "P, pixels; auto is 16, or as pretrained", low=1)
    pool: str | None = option(None, "auto is class, or as pretrained", choices=("class", "mean"))
    dropout: float = option(0.0, "zeroed share of the activations", low=0, high=0.99)
    init_from: str | None = option(
        None, "a checkpoint whose encoder to start from, ours or a published one; auto: none",
        displaces=("size", *SHAPE_FIELDS))
    # optimization
    lr: float = option(1e-3, "peak learning rate", above=0)
    layer_decay: float = option(1.0, "ratio of a layer's lr to the next one's", above=0, high=1,
                                fixed=True)
    min_lr: float = option(0.0, "where the cosine ends", low=0)
    weight_decay: float = option(0.05, "decoupled, on matrices only", low=0, fixed=True)
    beta2: float = option(0.99, "AdamW's beta2, for squares, or Lion's", low=0, high=0.9999,
                         fixed=True)
    batch_size: int = option(128, "images a step, of all processes together", low=1, fixed=True)
    micro_batch: int | None = option(None, "images at once, to save memory; auto is all", low=1)
    epochs: float = option(5, "passes over the data, warm-up included", above=0)
    warmup_epochs: float = option(0.5, "epochs of linear warm-up, half of all at most", low=0)
    label_smoothing: float = option(0.1, "probability spread over all classes", low=0, high=0.99)
    # sparse rate reduction as a regularizer ([S])
    srr_weight: float = option(0.0, "weight of R^c, SRR's only term with a gradient", low=0)
    srr_layer: int | None = option(None, "the layer, from 1, that has it; auto: all", low=1)
    # augmentation
    crop: str = option("pad", "pad: pad and crop at the image's own scale; resized: random area "
                       "and aspect", choices=("pad", "resized"))
    padding: int = option(4, "pixels of zeros around the image before crop=pad", low=0)
    flip: bool = option(True, "mirror half of the images")
    randaugment: int = option(0, "operations of RandAugment an image", low=0)
    magnitude: int = option(9, "RandAugment's strength, 0 to 30", low=0, high=30)
    cutmix: float = option(0.0, "share of images with a square of another", low=0, high=1)


PRESETS = {
    "imagenet": dict(       # [N] B.1.2
        data="imagenet", image_size=224, size="base", optimizer="lion", lr=2.4e-4, weight_decay=0.5,
        batch_size=2048, epochs=150, warmup_epochs=5,     # "a total of 150 epochs"
        # as in the released main.py; it crops whole pictures, ours are central squares of 256 px
        crop="resized"),
    # width and depth are [S]'s, which gives no recipe: cifar10-cpu's, CutMix, a GPU's batches
    "cifar10": dict(
        data="cifar10", width=384, heads=6, layers=12, patch_size=4, epochs=200, warmup_epochs=2,
        batch_size=1024, optimizer="muon", lr=4e-3, weight_decay=0.2, randaugment=2, cutmix=0.5,
        eval_every=480),    # ten epochs
    "cifar10-small": dict(  # minutes on a laptop CPU
        data="cifar10", width=192, heads=6, layers=6, patch_size=4, compile=True,
        micro_batch=32,     # as below
        optimizer="muon", lr=5e-3, weight_decay=0.5),
    "cifar10-cpu": dict(    # 83.9 %, eight hours of one CPU core
        data="cifar10", width=256, heads=8, layers=8, patch_size=4, epochs=150, warmup_epochs=2,
        micro_batch=32,     # 32 fit into a core's cache: 304 images/s, all 128 have 229
        # lr x decay = 1.5e-4: weights shrink e-fold in 17 epochs, about as in [N] (1.2e-4)
        optimizer="muon", lr=1.5e-3, weight_decay=0.1, randaugment=2, compile=True,
        eval_every=780),    # two epochs
    "shapes": dict(         # the README's first command
        data="shapes", width=64, heads=4, layers=4, patch_size=4, batch_size=50, epochs=12,
        optimizer="muon", lr=5e-3, weight_decay=0.5, pool="mean", log_every=50,
        padding=2, label_smoothing=0.0),        # objects reach close to the border
    "finetune-cifar10": dict(   # [N] B.1.2 and the released finetune.py: any checkpoint, at 224 px
        data="cifar10", init_from=MISSING,      # has to be given
        image_size=224, lr=5e-5, weight_decay=0.01,
        beta2=0.999, batch_size=512, epochs=200, warmup_epochs=0, label_smoothing=0.0,
        crop="resized",     # bicubic, as all resampling here; the released code's is bilinear
        randaugment=2, magnitude=14, eval_every=388),       # four epochs
    "finetune-mine": dict(      # as the README prepares them
        data="mine", init_from="pretrained:cifar10-crate", image_size=48, batch_size=32, epochs=30,
        optimizer="muon", lr=2e-2, layer_decay=0.5),
    "finetune-shapes": dict(
        data="shapes", init_from=MISSING, batch_size=50, epochs=12, warmup_epochs=1, log_every=50,
        optimizer="muon", lr=2e-2, layer_decay=0.5, padding=2, label_smoothing=0.0),
}


# ---- Data ---------------------------------------------------------------------------------------
def augmented(pixels, rng, c, data):
    """uint8 (b, H, W, 3) to the normalized float batch (b, 3, S, S) that the model trains on."""
    x = augment.to_float(pixels)
    if c.crop == "resized":
        x = augment.random_resized_crop(x, c.image_size, rng, scale=(0.08, 1.0))
    else:
        x = augment.resize(x, c.image_size) if data.image_size < c.image_size else x
        x = augment.pad_crop(x, c.image_size, c.padding, rng)
    if c.flip:
        x = augment.flip(x, rng)
    if c.randaugment:
        x = augment.rand_augment(x, rng, n=c.randaugment, m=c.magnitude)
    return augment.normalize(x, data.mean, data.std)


# ---- Model --------------------------------------------------------------------------------------
def build_model(c, classes, loaded=None):
    """The classifier that the flags describe, its encoder filled from `loaded` if given."""
    ours = model_fields(ImageConfig, c, classes=classes)
    if loaded is None:
        return ImageClassifier(image_config(c.size, **ours))
    if c.size is not None:
        raise UserError("--size and --init_from exclude each other")
    theirs = model_fields(ImageConfig, loaded.encoder.config, pool=loaded.pooling, drop_path=0.0)
    for name in SHAPE_FIELDS:
        if ours.get(name, theirs[name]) != theirs[name]:
            raise UserError(f"--{name}={ours[name]}: {c.init_from} has {theirs[name]}")
    model = ImageClassifier(ImageConfig(**theirs | ours))
    # positions are interpolated to the image size
    state, side = loaded.encoder.state_dict(), model.config.side
    state["positions"] = loaded.encoder.position_table(side, side).detach()
    with checkpoint.reading(c.init_from):
        model.encoder.load_state_dict(state)
    return model


def lr_scale(name, L, decay):
    """decay^(L + 1 - l), the scale of a parameter's lr: l = 0 for patch embedding, class token and
    positions, l for layer l = 1 .. L, L + 1 for what follows (BEiT, MAE)."""
    _, part, *rest = name.split(".")
    if part in ("embed", "class_token", "positions"):
        return decay ** (L + 1)
    return decay ** (L - int(rest[0])) if part == "layers" else 1.0


# ---- Sparse rate reduction as a regularizer -----------------------------------------------------
def srr_loss(model, x, layer=None, eps=0.5):
    """R^c(Z^{l+1} | U^l) of layer l, counted from 1, or the mean over all layers.

    [S] adds eta / L sum_l (lambda ||Z^l||_0 + R^c(Z^l | U^l) - R(Z^l)) to the loss, Z^l constant;
    we take it to be the output of layer l, here Z^{l+1}. Only R^c has a gradient, for U^l. It is
    least at U = 0; only the cross-entropy keeps U away, so the weight has to be small. eps is ours.
    """
    rates, Z = [], model.encoder.tokens(x)      # a second pass, with another dropout
    for l, part in enumerate(model.encoder.layers[:layer], 1):
        with torch.no_grad():
            Z = part(Z)
        if layer in (None, l):
            rates.append(subspace_coding_rate(Z, part.attention.bases(), eps))
    return torch.stack(rates).mean()


def main(argv):
    """Trains one classifier; returns the last line of metrics.jsonl."""
    # ---- config
    c, name = parse_run(Config, PRESETS, argv, __doc__, default="imagenet")
    processes = Processes(c.device, c.dtype)
    device, rows = processes.device, processes.rows(c.batch_size)
    if c.cutmix and c.batch_size // processes.world % 2:
        raise UserError("--cutmix pairs images: a process needs an even number of them")

    # ---- data; a pretrained encoder gets images normalized as in its pretraining
    if c.init_from is None:
        loaded, data = None, images.load(c.data, cache=c.data_dir)
    else:
        loaded = checkpoint.load_model(c.init_from, c.heads, ("vit", "mae", "simdino"))
        data = images.load_for(c.data, loaded.meta, c.data_dir)
    if c.crop == "pad" and data.image_size > c.image_size:
        note(f"the model sees {c.image_size} of {data.image_size} px: --image_size=N sees N")
    data = data.hold_out(c.val, c.train_images)
    epoch_steps = images.steps_per_epoch(len(data.train.labels), c.batch_size)
    total = max(round(c.epochs * epoch_steps), 1)

    # ---- model
    torch.manual_seed(derive_seed(c.seed, "weights"))
    model = build_model(c, len(data.classes), loaded).to(device)
    L = model.config.layers
    if c.srr_layer and c.srr_layer > L:
        raise UserError(f"--srr_layer={c.srr_layer}: the layers are 1 to {L}")

    # ---- optimizer
    scale = partial(lr_scale, L=L, decay=c.layer_decay)
    optimizers = make_optimizers(model, c.optimizer, c.lr, c.weight_decay, (0.9, c.beta2),
                                 hidden=[model.encoder.layers], scale=scale)
    schedule = cosine_schedule(c.lr, total, round(c.warmup_epochs * epoch_steps),
                               min(c.min_lr, c.lr))

    # ---- run
    run = Run(c, "vit", name, processes)
    run.attach(model, optimizers, data.meta())
    train, val = (images.Images(split, device) for split in (data.train, data.val))
    ddp = processes.wrap(model)
    if wants_compile(c.compile, device):
        model.compile()
    batches = train.batches(images.index_batches(len(train), c.batch_size, c.seed, run.step, rows))
    start = f" from {c.init_from}" if c.init_from else ""
    what = (f"{model.config.arch}{start}, {count(model):,} parameters, {c.data} of "
            f"{data.image_size} px at {c.image_size} px, batches of {c.batch_size}")
    for step in run.steps(total, what, eval_every=epoch_steps, flops=train_flops(model)):
        model.train()
        torch.manual_seed(derive_seed(c.seed, step, "dropout", processes.rank))

        # batch
        pixels, labels = next(batches)
        rng = augment.BatchRandom(derive_seed(c.seed, step, "augment"), c.batch_size, rows)
        x = augmented(pixels, rng, c, data)
        if c.cutmix:
            targets = torch.eye(len(data.classes), device=device)[labels]
            x, labels = augment.cutmix(x, targets, rng, c.cutmix)

        # forward and backward
        loss = 0.0
        for micro_x, micro_labels in micro_batches(ddp, c.micro_batch, x, labels):
            with processes.autocast():
                micro_loss = F.cross_entropy(ddp(micro_x), micro_labels,
                                             label_smoothing=c.label_smoothing)
                if c.srr_weight:
                    micro_loss += c.srr_weight * srr_loss(model, micro_x, c.srr_layer)
            micro_loss = micro_loss * (len(micro_x) / len(x))
            micro_loss.backward()
            loss = loss + micro_loss.detach()

        take_step(optimizers, schedule[step])

        # log, and evaluate if that is due
        run.log(loss, schedule[step])
        if run.evaluation_due:
            run.record(classify(model, val, data, processes))
    return run.done("python analyze.py layers --ckpt={dir}/ckpt.pt --untrained    # rates by layer",
                    "python analyze.py predict --ckpt={dir}/ckpt.pt    # add your a.jpg")


if __name__ == "__main__":
    cli(main)
