"""
Masked autoencoding with CRATE-MAE, and ViT-MAE as the baseline.

    python train_mae.py shapes                                            drawn data, two CPU cores, minutes
    python train_mae.py cifar10 --arch=transformer --mask_tokens=after    any preset, any flag
    torchrun --standalone --nproc_per_node=8 train_mae.py                 ImageNet, the setting of [B] 7.6

[B] 7.6: hide three quarters of the patches, encode with CRATE layers, decode with the same layers run backwards, and compare what
was hidden. Each evaluation writes a picture: input, masked, reconstruction, and the two pasted. Fine-tune the encoder with
train_vit.py --init_from=out/mae-cifar10/ckpt.pt, or read it with evaluate.py linear.
"""
from dataclasses import asdict, dataclass

import numpy as np
import torch
from PIL import Image

import common
from common import option
from data import augment, images
from model import ARCHS, MAEConfig, MaskedAutoencoder, mae_config, make_config, patchify, unpatchify


@dataclass(kw_only=True)
class Config(common.RunConfig):
    """Flags of this script; None is shown as auto."""
    data: str = option("shapes", "which pictures", choices=tuple(images.SETS))
    image_size: int = option(32, "pixels a side that the model sees", low=1)
    # model: a named size of the arch, or width, heads and layers, or both
    arch: str = option("crate", "the layer (model.py's table)", choices=tuple(ARCHS))
    size: str | None = option(None, "small or base; sets width, heads, layers and decoder", displaces=("width", "heads", "head_dim", "layers"))
    width: int | None = option(None, "d", low=1)
    heads: int | None = option(None, "K", low=1)
    head_dim: int | None = option(None, "p; auto is width / heads", low=1)
    layers: int | None = option(None, "layers that encode", low=1)
    decoder_layers: int | None = option(None, "layers that decode; auto is as many", low=1)
    decoder_width: int | None = option(None, "d of the decoder; auto is the encoder's", low=1)
    decoder_heads: int | None = option(None, "K of the decoder; auto is the encoder's", low=1)
    patch_size: int | None = option(None, "P, pixels", low=1)
    mask_ratio: float = option(0.75, "share of the patches that is hidden", above=0, high=0.99)
    mask_tokens: str | None = option(None, "where mask tokens enter; auto is before the encoder", choices=("before", "after"))
    normalize_targets: bool = option(False, "each patch to mean 0 and variance 1")
    eta: float | None = option(None, "step of ISTA and ODL; auto is 0.1", low=0)
    lambd: float | None = option(None, "sparsity weight lambda of the encoder", low=0)
    step: float | None = option(None, "step of MSSA in crate-c, -n, -t; auto is 1")
    # optimization
    optimizer: str = option("adamw", "update rule", choices=("lion", "adamw"))
    base_lr: float = option(1.5e-4, "learning rate for a batch of 256; it grows in proportion", above=0)
    weight_decay: float = option(0.05, "decoupled, on matrices only", low=0)
    beta1: float = option(0.9, "momentum", low=0, high=0.9999)
    beta2: float = option(0.95, "second average", low=0, high=0.9999)
    batch_size: int = option(256, "of all processes together", low=1)
    accumulate: int = option(1, "micro-batches a step", low=1)
    epochs: float = option(800, "passes over the data, warm-up included", above=0)
    warmup_epochs: float = option(40, "of linear warm-up", low=0)
    clip: float = option(0.0, "largest norm of the gradient; 0: no limit", low=0)
    crop_area: float = option(0.2, "smallest share of the area that a crop keeps", above=0, high=1)
    flip: bool = option(True, "mirror half of the pictures")


PRESETS = {
    # [B] 7.6: rate 3e-5 x batch / 256 and decay 0.1 for CRATE-MAE; ViT-MAE takes --base_lr=1.5e-4 --weight_decay=0.05
    "imagenet": dict(data="imagenet", image_size=224, size="base", base_lr=3e-5, weight_decay=0.1, batch_size=4096, accumulate=2,
                     eval_every=3130),
    # Patch 4 gives 64 patches, of which 16 are seen; rate, width and length are our choice
    "cifar10": dict(data="cifar10", width=192, heads=6, layers=6, patch_size=4, lambd=0.5, base_lr=2e-3, epochs=100, warmup_epochs=5),
    # A quarter of an hour on two CPU cores
    "cifar10-small": dict(data="cifar10", width=128, heads=4, layers=4, patch_size=4, lambd=0.5, base_lr=4e-3, batch_size=128, epochs=6,
                          warmup_epochs=1),
    "shapes": dict(data="shapes", width=64, heads=4, layers=3, patch_size=4, lambd=0.5, base_lr=8e-3, batch_size=100, epochs=12, warmup_epochs=1,
                   crop_area=0.6),
}


def build_model(c):
    """The masked autoencoder that the flags describe."""
    flags = common.sub_config(MAEConfig, c)
    arch = flags.pop("arch")
    return MaskedAutoencoder(mae_config(c.size, arch, **flags) if c.size else make_config(MAEConfig, flags | dict(arch=arch)))


def picture_noise(c, step, batch, rows, device):
    """The noise (b, n) that chooses which patches of this step are hidden, a function of seed and step."""
    rng = augment.BatchRandom(common.derive_seed(c.seed, step, "mask"), batch, rows, device)
    return rng.uniform((c.image_size // c.patch_size) ** 2)


@torch.no_grad()
def validate(model, val, data, c, processes, batch_size=256):
    """The mean loss over the validation pictures, every one once, its mask a function of its number; shared among the processes."""
    model.eval()
    total = torch.zeros(2, device=processes.device)
    patches = model.config.patches()
    mine = torch.arange(len(val)).split(batch_size)[processes.rank::processes.world]
    for index, (pictures, _) in zip(mine, val.batches([i.numpy() for i in mine], c.workers)):
        noise = augment.BatchRandom(common.derive_seed("validation", int(index[0])), len(index), device=processes.device).uniform(patches)
        x = augment.normalize(common.at_size(augment.to_float(pictures), c.image_size), data.mean, data.std)
        with processes.autocast(c.dtype):
            loss = model(x, noise)
        total += torch.stack([loss.float() * len(index), torch.tensor(float(len(index)), device=loss.device)])
    loss, n = processes.sum(total).tolist()
    return dict(loss=loss / n, n=int(n))


@torch.no_grad()
def write_grid(model, val, data, c, path, n=8):
    """A PNG with one picture a row: input, masked, reconstruction, and the reconstruction with the visible patches pasted in."""
    model.eval()
    pictures, _ = val.batch(torch.arange(min(n, len(val))))
    x = augment.normalize(common.at_size(augment.to_float(pictures), c.image_size), data.mean, data.std)
    P, device = model.config.patch_size, x.device
    noise = augment.BatchRandom(common.derive_seed("validation", 0), len(x), device=device).uniform(model.config.patches())
    hidden, target = model.hidden(noise)[..., None], patchify(x, P)
    painted = model.decode(model.encode(x, noise), noise).float()
    if model.config.normalize_targets:      # back to pixels with the patch's own mean and deviation, which the model is not told
        painted = painted * (target.var(-1, keepdim=True) + 1e-6).sqrt() + target.mean(-1, keepdim=True)
    columns = [target, torch.where(hidden, 0.0, target), painted, torch.where(hidden, painted, target)]
    mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in (data.mean, data.std))
    rows = torch.cat([(unpatchify(p, P) * std + mean).clamp(0, 1) for p in columns], 3)             # (n, 3, H, 4 W)
    sheet = (torch.cat(list(rows), 1).permute(1, 2, 0) * 255).round().byte().cpu().numpy()
    enlarge = max(1, 128 // c.image_size)
    Image.fromarray(np.repeat(np.repeat(sheet, enlarge, 0), enlarge, 1)).save(path)


def main(argv):
    """Trains one masked autoencoder; returns the last line of metrics.jsonl."""
    c, preset = common.parse(Config, PRESETS, argv, __doc__, default="imagenet")
    processes = common.Processes(c.device)
    device, rows = processes.device, processes.rows(c.batch_size)
    if (rows.stop - rows.start) % c.accumulate:
        raise common.UserError(f"--accumulate={c.accumulate} does not divide the {rows.stop - rows.start} pictures of each process")
    data = images.load(c.data, cache=c.data_dir)
    torch.manual_seed(common.derive_seed(c.seed, "weights"))
    model = build_model(c).to(device)
    c.patch_size = model.config.patch_size
    run = common.Run(c, "mae", preset, processes)
    train = images.Images(data.train_images, data.train_labels, device)
    val = images.Images(data.val_images, data.val_labels, device)
    steps_per_epoch = max(len(train) // c.batch_size, 1)
    total = max(round(c.epochs * steps_per_epoch), 1)
    lr = c.base_lr * c.batch_size / 256
    schedule = common.warmup_cosine(lr, total, round(c.warmup_epochs * steps_per_epoch))
    eval_every = c.eval_every or steps_per_epoch
    save_every = c.save_every or eval_every

    optimizer = common.make_optimizer(model, c.optimizer, lr, c.weight_decay, (c.beta1, c.beta2))
    if run.resumed is not None:
        common.restore(run, model.config, optimizer, model)
    if common.wants_compile(c, device):
        model.compile()
    parallel = processes.wrap(model)
    run.begin(total, "images", c.batch_size, flops=model.train_flops())
    run.say(f"{model.config.arch}, {common.count(model):,} parameters, {c.data} at {c.image_size} px, {model.config.masked()} of "
            f"{model.config.patches()} patches hidden, {total} steps of {c.batch_size} on {processes.world} x {common.device_name(device)}")

    def checkpoint():
        return dict(model=model.state_dict(), model_config=asdict(model.config), optimizer=optimizer.state_dict(), extra={},
                    data_meta=dict(name=c.data, classes=data.classes, mean=data.mean, std=data.std, image_size=data.image_size))

    batches = train.batches(images.index_batches(len(train), c.batch_size, c.seed, start_step=run.start, rows=rows), c.workers)
    for step in range(run.start, total):
        torch.manual_seed(common.derive_seed(c.seed, step, "dropout", processes.rank))
        model.train()
        common.set_lr(optimizer, schedule[step])
        pictures, _ = next(batches)
        rng = augment.BatchRandom(common.derive_seed(c.seed, step, "augment"), c.batch_size, rows, device)
        x = augment.random_resized_crop(augment.to_float(pictures), c.image_size, rng, scale=(c.crop_area, 1.0))
        x = augment.normalize(augment.flip(x, rng) if c.flip else x, data.mean, data.std)
        noise = picture_noise(c, step, c.batch_size, rows, device)

        loss = 0.0
        for micro, (x_part, noise_part) in enumerate(zip(x.chunk(c.accumulate), noise.chunk(c.accumulate))):
            with common.accumulating(parallel, last=micro == c.accumulate - 1):
                with processes.autocast(c.dtype):
                    part = parallel(x_part, noise_part) / c.accumulate
                part.backward()
            loss = loss + part.detach()
        if c.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        run.stepped(loss, schedule[step])

        stop, last = run.should_stop(), step == total - 1
        if (step + 1) % eval_every == 0 or last:
            with run.untimed():
                best = run.evaluated(min, "loss", **validate(model, val, data, c, processes))
                if run.is_main:
                    with run.optional(f"step{run.step}.png"):
                        write_grid(model, val, data, c, run.dir / f"step{run.step}.png")
                run.save(checkpoint(), best=best, last=last)
        elif stop or (step + 1) % save_every == 0:
            with run.untimed():
                run.save(checkpoint(), last=stop)
        if stop and not last:
            run.interrupted()
    return run.done()


if __name__ == "__main__":
    common.cli(main)
