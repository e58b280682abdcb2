"""Masked autoencoding with CRATE-MAE, or with another arch in its place.

    python train_mae.py shapes                                   drawn images, two CPU cores
    python train_mae.py cifar10-small --arch=transformer         any preset, any flag
    torchrun --standalone --nproc_per_node=8 train_mae.py        ImageNet, the setting of [B] 7.6

[B] 7.6: mask three quarters of the patches, encode with CRATE layers, decode with layers that
reverse CRATE's, and compare the masked patches with their pixels."""
from dataclasses import dataclass

import torch

from data import augment, images
from evaluate import reconstruction_loss
from flags import model_fields, ModelFlags, option, parse_run
from measure import count, train_flops
from model import mae_config, MAEConfig, MaskedAutoencoder
from optim import cosine_schedule, make_optimizers, micro_batches, take_step
from processes import cli, derive_seed, Processes, to_device, wants_compile
from run import Run, RunFlags


@dataclass(kw_only=True)
class Config(RunFlags, ModelFlags):
    """--layers are those of the encoder."""
    data: str = option("imagenet", "which images: a prepared set", fixed=True)
    image_size: int = option(32, "pixels per side that the model sees", low=1)
    patch_size: int | None = option(None, "P, pixels; auto is 16", low=1)
    decoder_layers: int | None = option(None, "auto is as many as encode", low=1, high=10_000)
    mask_ratio: float = option(0.75, "share of the patches that is masked", above=0, high=0.99)
    # optimization
    lr: float = option(2.4e-3, "peak learning rate", above=0)
    weight_decay: float = option(0.05, "decoupled, on matrices only", low=0, fixed=True)
    batch_size: int = option(256, "images a step, of all processes together", low=1, fixed=True)
    micro_batch: int | None = option(None, "images at once, to save memory; auto is all", low=1)
    epochs: float = option(800, "passes over the data, warm-up included", above=0)
    warmup_epochs: float = option(40, "epochs of linear warm-up, half of all at most", low=0)
    crop_area: float = option(0.2, "smallest share of the area that a crop keeps", above=0, high=1)


PRESETS = {
    "imagenet": dict(       # [B] 7.6
        data="imagenet", image_size=224, size="base", weight_decay=0.1, batch_size=4096,
        lr=4.8e-4,          # [B]'s 3e-5 as MAE's base rate: x batch_size / 256
        micro_batch=256,    # two a step on each of 8 GPUs
        eval_every=3120),   # ten epochs
    "cifar10": dict(        # width, lr and length are our choice
        data="cifar10", width=192, heads=6, layers=6,
        patch_size=4,       # 64 patches, of which 16 are seen
        lr=2e-3, epochs=100, warmup_epochs=5,
        eval_every=780),    # four epochs
    "cifar10-small": dict(  # a quarter of an hour on two CPU cores
        data="cifar10", width=128, heads=4, layers=4, patch_size=4,
        optimizer="muon", lr=4e-3,      # loss 0.312; AdamW with lr=2e-3 0.365
        batch_size=128, epochs=6, warmup_epochs=1, compile=True),
    "shapes": dict(
        data="shapes", width=64, heads=4, layers=3, patch_size=4,
        optimizer="muon", lr=6.25e-3,   # loss 0.232; AdamW with lr=3.125e-3 0.325
        batch_size=100, epochs=12, warmup_epochs=1,
        crop_area=0.6),     # smaller crops lose the one object
}


# ---- Data ---------------------------------------------------------------------------------------
def augmented(pixels, rng, c, data):
    """uint8 (b, H, W, 3) to the normalized float batch (b, 3, S, S) that the model trains on."""
    x = augment.to_float(pixels)
    x = augment.random_resized_crop(x, c.image_size, rng, scale=(c.crop_area, 1.0))
    return augment.normalize(augment.flip(x, rng), data.mean, data.std)


# ---- Model --------------------------------------------------------------------------------------
def build_model(c):
    return MaskedAutoencoder(mae_config(c.size, **model_fields(MAEConfig, c)))


def main(argv):
    """Trains one masked autoencoder; returns the last line of metrics.jsonl."""
    # ---- config
    c, name = parse_run(Config, PRESETS, argv, __doc__, default="imagenet")
    processes = Processes(c.device, c.dtype)
    device, rows = processes.device, processes.rows(c.batch_size)

    # ---- data
    data = images.load(c.data, cache=c.data_dir)
    epoch_steps = images.steps_per_epoch(len(data.train.labels), c.batch_size)
    total = max(round(c.epochs * epoch_steps), 1)

    # ---- model
    torch.manual_seed(derive_seed(c.seed, "weights"))
    model = build_model(c).to(device)

    # ---- optimizer
    optimizers = make_optimizers(model, c.optimizer, c.lr, c.weight_decay, (0.9, 0.95),
                                 hidden=[model.encoder.layers, model.decoder, model.predict])
    schedule = cosine_schedule(c.lr, total, round(c.warmup_epochs * epoch_steps))

    # ---- run
    run = Run(c, "mae", name, processes)
    run.attach(model, optimizers, data.meta())
    train, val = (images.Images(split, device) for split in (data.train, data.val))
    ddp = processes.wrap(model)
    if wants_compile(c.compile, device):
        model.compile()
    batches = train.batches(images.index_batches(len(train), c.batch_size, c.seed, run.step, rows))
    what = (f"{model.config.arch}, {count(model):,} parameters, {c.data} of {data.image_size} px "
            f"at {c.image_size} px, {model.config.masked_patches()} of {model.config.patches} "
            f"patches masked, batches of {c.batch_size}")
    for step in run.steps(total, what, eval_every=epoch_steps, flops=train_flops(model)):
        model.train()

        # batch
        pixels, _ = next(batches)
        rng = augment.BatchRandom(derive_seed(c.seed, step, "augment"), c.batch_size, rows)
        x = augmented(pixels, rng, c, data)
        masks = augment.BatchRandom(derive_seed(c.seed, step, "mask"), c.batch_size, rows)
        noise = to_device(masks.uniform(model.config.patches), device)

        # forward and backward
        loss = 0.0
        for micro_x, micro_noise in micro_batches(ddp, c.micro_batch, x, noise):
            with processes.autocast():
                micro_loss = ddp(micro_x, micro_noise) * (len(micro_x) / len(x))
            micro_loss.backward()
            loss = loss + micro_loss.detach()

        take_step(optimizers, schedule[step])

        # log, and evaluate if that is due
        run.log(loss, schedule[step])
        if run.evaluation_due:
            run.record(reconstruction_loss(model, val, data, processes))
    return run.done("python evaluate.py linear --ckpt={dir}/ckpt.pt    # a linear probe",
                    "python analyze.py predict --ckpt={dir}/ckpt.pt    # reconstructions")


if __name__ == "__main__":
    cli(main)
