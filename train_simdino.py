"""
Self-supervised learning with SimDINO, and with the DINO that it simplifies.

    python train_simdino.py shapes                                  drawn data, two CPU cores, minutes
    python train_simdino.py cifar10 --arch=transformer              any preset, any flag
    torchrun --standalone --nproc_per_node=8 train_simdino.py       ImageNet, the setting of [B] 7.2

[B] 7.2: a student sees two large and several small views of a picture, a teacher (the student's moving average) the two large ones,
and each view's feature shall be that of the others. A constant would do; DINO forbids it by a softmax over prototypes, centring and
sharpening, SimDINO by the coding rate of the features, which falls if they collapse. Read the encoder with evaluate.py knn or linear,
fine-tune it with train_vit.py --init_from=out/simdino-cifar10/ckpt.pt.
"""
import copy
import math
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

import common
from common import option
from data import augment, images
from model import ARCHS, ImageConfig, ImageEncoder, gram_coding_rate, image_config, make_config, saliency


@dataclass(kw_only=True)
class Config(common.RunConfig):
    """Flags of this script; None is shown as auto."""
    data: str = option("shapes", "which pictures", choices=tuple(images.SETS))
    image_size: int = option(32, "pixels a side of a global view", low=1)
    local_size: int = option(16, "pixels a side of a local view", low=1)
    local_views: int = option(4, "small views of a picture, beside the two global ones", low=0)
    # the method
    method: str = option("simdino", "the coding rate, or the original's prototypes", choices=("simdino", "dino"))
    eps: float = option(0.05 ** 0.5, "distortion of the coding rate", above=0)
    gamma: float | None = option(None, "weight of the coding rate; auto is (p + N m) / (p N m), 0 lets the features collapse", low=0)
    hidden: int = option(2048, "width of the projector", low=1)
    output: int = option(256, "p, its output", low=2)
    prototypes: int = option(65536, "of DINO's head", low=2)
    student_temp: float = option(0.1, "of DINO's softmax", above=0)
    teacher_temp: float = option(0.07, "DINO: reached linearly from warmup_temp", above=0)
    warmup_temp: float = option(0.04, "DINO: the teacher's temperature at first", above=0)
    warmup_temp_epochs: float = option(30, "DINO: until it is teacher_temp", low=0)
    freeze_epochs: float = option(1, "DINO: epochs in which the prototypes stay as they are", low=0)
    center_momentum: float = option(0.9, "DINO: of the centre of the teacher's logits", low=0, high=1)
    momentum: float = option(0.996, "of the teacher at first; it rises to 1 as a cosine", low=0, high=1)
    # model: a named size of the arch, or width, heads and layers, or both
    arch: str = option("crate", "the layer (model.py's table)", choices=tuple(ARCHS))
    size: str | None = option(None, "tiny, small, base or large; sets width, heads and layers", displaces=("width", "heads", "head_dim", "layers"))
    width: int | None = option(None, "d", low=1)
    heads: int | None = option(None, "K", low=1)
    head_dim: int | None = option(None, "p; auto is width / heads", low=1)
    layers: int | None = option(None, "L", low=1)
    patch_size: int | None = option(None, "P, pixels", low=1)
    eta: float | None = option(None, "step of ISTA and ODL; auto is 0.1", low=0)
    lambd: float | None = option(None, "sparsity weight lambda; auto is 0.1", low=0)
    step: float | None = option(None, "step of MSSA in crate-c, -n, -t; auto is 1")
    drop_path: float = option(0.1, "of the student's residual branches", low=0, high=0.99)
    # optimization
    base_lr: float = option(5e-4, "learning rate for a batch of 256; it grows in proportion", above=0)
    min_lr: float = option(1e-6, "where the cosine ends", low=0)
    weight_decay: float = option(0.04, "decoupled, on matrices only; rises as a cosine", low=0)
    weight_decay_end: float = option(0.4, "to this", low=0)
    batch_size: int = option(256, "pictures of all processes together", low=2)
    epochs: float = option(100, "passes over the data, warm-up included", above=0)
    warmup_epochs: float = option(10, "of linear warm-up", low=0)
    clip: float = option(3.0, "largest norm of each parameter's gradient, one by one; 0: no limit", low=0)
    # views
    global_area: float = option(0.4, "a global view keeps between this share of the area and all", above=0, high=1)
    local_area: float = option(0.05, "a local view keeps between this share and global_area", above=0, high=1)
    blur: float = option(2.0, "largest deviation of the blur, pixels; 0: none", low=0)
    k: int = option(20, "neighbours of the evaluation", low=1)


PRESETS = {
    # [B] 7.2; areas from the released code. ViT-B: CRATE is --arch=crate
    "imagenet": dict(data="imagenet", arch="transformer", size="base", image_size=224, local_size=96, local_views=10, batch_size=1024,
                     eval_every=6255),
    # Patch 4: 65 tokens a global view and 17 a local one. A blur of 2 px at 32 px leaves little, so there is none; the teacher of a
    # run a hundred times shorter than ImageNet's has to follow faster. Width, rate and length are our choice.
    "cifar10": dict(data="cifar10", width=384, heads=6, layers=12, patch_size=4, blur=0.0, base_lr=1e-3, momentum=0.99, epochs=100, batch_size=512,
                    hidden=1024, prototypes=4096, warmup_temp_epochs=10, local_area=0.1),
    # A quarter of an hour on one CPU core. In runs as short as these two DINO's features collapse unless its prototypes stay as they are
    # drawn and its teacher is cold.
    "cifar10-small": dict(data="cifar10", width=128, heads=4, layers=4, patch_size=4, blur=0.0, base_lr=1e-3, momentum=0.98, epochs=2,
                          warmup_epochs=0.5, batch_size=128, hidden=256, output=128, prototypes=1024, teacher_temp=0.04, freeze_epochs=1000,
                          drop_path=0.0, local_area=0.1),
    "shapes": dict(data="shapes", width=64, heads=4, layers=3, patch_size=4, blur=0.0, base_lr=4e-3, momentum=0.98, epochs=6, warmup_epochs=0.5,
                   batch_size=100, hidden=256, output=64, prototypes=512, teacher_temp=0.04, freeze_epochs=1000, drop_path=0.0,
                   local_area=0.1),
}


# ---------------------------------------------------------------------------------------------------------------------
# Views
# ---------------------------------------------------------------------------------------------------------------------

def make_views(pictures, c, data, step, rows, device):
    """The views of uint8 pictures (b, H, W, 3) as [(2, b, 3, S, S), (local_views, b, 3, s, s)], normalized; a function of seed and step.

    Blur is certain on the first global view, p 0.1 on the second, 0.5 on local ones; the second global view is solarized with p 0.2."""
    x, made = augment.to_float(pictures), []
    for kind, count, size, area, blur, solar in (("global", 2, c.image_size, (c.global_area, 1.0), (1.0, 0.1), (0.0, 0.2)),
                                                 ("local", c.local_views, c.local_size, (c.local_area, c.global_area), (0.5,), (0.0,))):
        if count:
            rng = augment.BatchRandom(common.derive_seed(c.seed, step, kind), c.batch_size * count,
                                      slice(rows.start * count, rows.stop * count), device)
            v = augment.views(x, count, size, rng, area, blur if c.blur else (0.0,), solar, c.blur)
            made.append(augment.normalize(v.flatten(0, 1), data.mean, data.std).unflatten(0, (count, -1)))
    return made


# ---------------------------------------------------------------------------------------------------------------------
# Model: encoder, projector, prototypes (DINO)
# ---------------------------------------------------------------------------------------------------------------------

class Branch(nn.Module):
    """Student or teacher: the class token through a three-layer MLP with GELU to the unit sphere in R^p, [B] Section 7.2.3.

    With prototypes (DINO) their inner products with unit vectors follow, [B] Section 7.2.2. branch(views) takes a list of
    (V_i, b, 3, S_i, S_i) and returns unit features (V, b, p), V the sum of V_i, and logits (V, b, prototypes) or None."""

    def __init__(self, config, hidden, output, prototypes=None):
        super().__init__()
        self.encoder = ImageEncoder(config)
        self.projector = nn.Sequential(nn.Linear(config.width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, output))
        for module in self.projector[::2]:
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        # only directions matter, but the norm sets how fast AdamW turns them: nn.Linear's, as in DINO's code
        self.prototypes = nn.Parameter(torch.empty(prototypes, output).uniform_(-1, 1) / output ** 0.5) if prototypes else None

    def forward(self, views):
        """One pass through the encoder for each size, one through the projector for all."""
        Z = torch.cat([self.encoder(v.flatten(0, 1))[:, 0].unflatten(0, v.shape[:2]) for v in views])
        Z = F.normalize(self.projector(Z).float(), dim=-1)
        return Z, None if self.prototypes is None else Z @ F.normalize(self.prototypes, dim=-1).mT


def build_model(c):
    """The branch that the flags describe. A LayerNorm ends every encoder, since features of any norm go into the projector."""
    flags = common.sub_config(ImageConfig, c, classes=1, final_norm=True)
    arch = flags.pop("arch")
    config = image_config(c.size, arch, **flags) if c.size else make_config(ImageConfig, flags | dict(arch=arch))
    if c.local_views and c.local_size % config.patch_size:
        raise common.UserError(f"--patch_size={config.patch_size} does not divide --local_size={c.local_size}")
    return Branch(config, c.hidden, c.output, c.prototypes if c.method == "dino" else None)


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------

def pairs(score):
    """The mean of score (2, V): teacher's global view by student's view, without each view beside itself."""
    return (score.sum() - score.diagonal().sum()) / (score.numel() - score.shape[0])


def squared_distance(student, teacher):
    """The mean over pairs of 1/2 ||t - s||^2, [B] Eq. (7.2.34): student (V, b, p), teacher (2, b, p), all of unit norm."""
    return pairs(1 - torch.einsum("gbp,vbp->gv", teacher, student) / student.shape[1])


def global_coding_rate(Z, eps, processes):
    """The mean over views of R_eps(Z) = 1/2 logdet(I + p / (N m eps^2) Z Z^*), [B] Eq. (7.2.34), for Z (2, m, p) of each of N processes.

    The covariance is summed over the processes in float32. DDP averages gradients, so each process gives N times the gradient
    of its own samples, and no second exchange is needed."""
    with torch.autocast(Z.device.type, enabled=False):
        Z = Z.float()
        covariance, N = Z.mT @ Z, processes.world
        if N > 1:
            covariance = N * covariance + (processes.sum(covariance.detach().clone()) - N * covariance.detach())
        return gram_coding_rate(covariance, Z.shape[-1] / (N * Z.shape[1] * eps ** 2)).mean()


def simdino_gamma(p, samples):
    """The weight of the coding rate as its authors set it: gamma = (p + N m) / (p N m)."""
    return (p + samples) / (p * samples)


def dino_loss(student, teacher, center, student_temp, teacher_temp):
    """The mean over pairs of -<softmax((t - center) / teacher_temp), log softmax(s / student_temp)>, [B] Eq. (7.2.28), for logits
    (V, b, prototypes) and (2, b, prototypes)."""
    target = ((teacher.float() - center) / teacher_temp).softmax(-1)
    guess = (student.float() / student_temp).log_softmax(-1)
    return pairs(-torch.einsum("gbk,vbk->gv", target, guess) / student.shape[1])


@torch.no_grad()
def clip_each(params, limit):
    """Scales each parameter's gradient by itself to a norm of `limit` at most, as DINO does, without waiting for the device."""
    grads = [p.grad for p in params if p.grad is not None]
    scale = [(limit / (norm + 1e-6)).clamp(max=1) for norm in torch._foreach_norm(grads)]
    torch._foreach_mul_(grads, scale)


# ---------------------------------------------------------------------------------------------------------------------
# Watching and looking
# ---------------------------------------------------------------------------------------------------------------------

COLLAPSED_RANK, COLLAPSED_COSINE = 2.0, 0.99


@torch.no_grad()
def watch(Z, eps, processes):
    """What a collapse shows in, for unit features Z (m, p) of each process: the coding rate, the effective rank exp(entropy of the
    eigenvalues of Z^* Z / N m), and the mean cosine of two different pictures."""
    total = processes.sum(torch.cat([Z.mT @ Z, Z.sum(0, keepdim=True)]))
    n = Z.shape[0] * processes.world
    if not total.isfinite().all():
        return dict.fromkeys(("coding_rate", "effective_rank", "cosine"), math.nan)
    share = torch.linalg.eigvalsh(total[:-1].cpu().double() / n).clamp_min(1e-12)
    return dict(coding_rate=gram_coding_rate(total[:-1], Z.shape[1] / (n * eps ** 2)).item(), effective_rank=math.exp(-(share * share.log()).sum()),
                cosine=(total[-1].square().sum().item() - n) / (n * (n - 1)))


def collapsed(seen):
    """Whether `watch` saw a collapse: an effective rank below 2, or a mean cosine above 0.99."""
    return seen["effective_rank"] < COLLAPSED_RANK or seen["cosine"] > COLLAPSED_COSINE


def evaluate(teacher, train, val, data, c, processes):
    """k-NN accuracy of the teacher's class token."""
    teacher.eval()
    x, x_test = (common.features(teacher.encoder, split, data, c, processes) for split in (train, val))
    labels = [torch.as_tensor(split.labels).to(x.device) for split in (train, val)]
    return common.nearest_neighbours(x, labels[0], x_test, labels[1], len(data.classes), c.k, processes=processes)


@torch.no_grad()
def write_saliency(encoder, val, data, path, n=8):
    """A PNG with one picture a row: the picture, what the class token attends to on average over the heads, and in each head ([B] Eq.
    (7.2.41)), over the picture in red. TSSA, which has no map, shows each head's membership Pi."""
    pictures, _ = val.batch(torch.arange(min(n, len(val))))
    trace, size = [], encoder.config.image_size
    x = common.at_size(augment.to_float(pictures), size)
    encoder(augment.normalize(x, data.mean, data.std), trace=trace)
    maps = saliency(trace[-1].attention.float())
    common.write_overlays(path, x, torch.cat([maps.mean(1, keepdim=True), maps], 1))


def main(argv):
    """Trains one student and its teacher; returns the last line of metrics.jsonl."""
    c, preset = common.parse(Config, PRESETS, argv, __doc__, default="imagenet")
    if c.local_area > c.global_area:
        raise common.UserError(f"--local_area={c.local_area} is more than --global_area={c.global_area}")
    processes = common.Processes(c.device)
    device, rows = processes.device, processes.rows(c.batch_size)
    data = images.load(c.data, cache=c.data_dir)
    torch.manual_seed(common.derive_seed(c.seed, "weights"))
    student = build_model(c).to(device)
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    c.patch_size = student.encoder.config.patch_size
    run = common.Run(c, "simdino", preset, processes)
    train = images.Images(data.train_images, data.train_labels, device)
    val = images.Images(data.val_images, data.val_labels, device)
    steps_per_epoch = max(len(train) // c.batch_size, 1)
    total = max(round(c.epochs * steps_per_epoch), 1)
    eval_every = c.eval_every or steps_per_epoch
    save_every = c.save_every or eval_every

    # [B] 7.2: everything that changes over the run, as arrays
    lr = c.base_lr * c.batch_size / 256
    rates = common.warmup_cosine(lr, total, round(c.warmup_epochs * steps_per_epoch), min(c.min_lr, lr))
    decays = common.warmup_cosine(c.weight_decay, total, final=c.weight_decay_end)
    momenta = common.warmup_cosine(c.momentum, total, final=1.0)
    rise = max(round(c.warmup_temp_epochs * steps_per_epoch), 1)
    temps = [c.warmup_temp + (c.teacher_temp - c.warmup_temp) * min(i / rise, 1) for i in range(total)]
    gamma = simdino_gamma(c.output, c.batch_size) if c.gamma is None else c.gamma

    optimizer = common.make_optimizer(student, "adamw", lr, c.weight_decay, (0.9, 0.999))
    center = torch.zeros(c.prototypes if c.method == "dino" else 1, device=device)
    if run.resumed is not None:
        common.restore(run, student.encoder.config, optimizer, student, teacher)
        center.copy_(run.resumed["extra"]["center"])
    if common.wants_compile(c, device):
        student.compile()
        teacher.compile()
    parallel = processes.wrap(student)
    run.begin(total, "images", c.batch_size)
    run.say(f"{c.method}, {c.arch}, {common.count(student.encoder):,} parameters and {common.count(student) - common.count(student.encoder):,} behind them, "
            f"{c.data}, 2 views of {c.image_size} px and {c.local_views} of {c.local_size}, {total} steps of {c.batch_size} on "
            f"{processes.world} x {common.device_name(device)}")

    def checkpoint():
        return dict(model=teacher.state_dict(), model_config=asdict(student.encoder.config), optimizer=optimizer.state_dict(),
                    extra=dict(student=student.state_dict(), center=center),
                    data_meta=dict(name=c.data, classes=data.classes, mean=data.mean, std=data.std, image_size=data.image_size))

    batches = train.batches(images.index_batches(len(train), c.batch_size, c.seed, start_step=run.start, rows=rows), c.workers)
    told = False
    for step in range(run.start, total):
        torch.manual_seed(common.derive_seed(c.seed, step, "dropout", processes.rank))
        student.train()
        common.set_lr(optimizer, rates[step])
        optimizer.param_groups[0]["weight_decay"] = decays[step]
        pictures, _ = next(batches)
        views = make_views(pictures, c, data, step, rows, device)

        with torch.no_grad(), processes.autocast(c.dtype):
            t, t_logits = teacher(views[:1])
        with processes.autocast(c.dtype):
            s, s_logits = parallel(views)
        if c.method == "simdino":
            distance, rate = squared_distance(s, t), global_coding_rate(s[:2], c.eps, processes)
            loss, terms = distance - gamma * rate, dict(distance=distance, expansion=gamma * rate)
        else:
            loss = dino_loss(s_logits, t_logits, center, c.student_temp, temps[step])
            terms = dict(cross_entropy=loss)
            mean = processes.sum(t_logits.float().mean((0, 1))) / processes.world
            center.lerp_(mean, 1 - c.center_momentum)
        loss.backward()
        if c.clip:
            clip_each(student.parameters(), c.clip)
        if c.method == "dino" and step < c.freeze_epochs * steps_per_epoch:
            student.prototypes.grad = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        common.ema_update(teacher, student, momenta[step])

        last = step == total - 1
        seen = {}
        if (step + 1) % c.log_every == 0 or last:
            seen = watch(s[0].detach(), c.eps, processes)
            if collapsed(seen) and not told and step >= min(c.warmup_epochs * steps_per_epoch, total // 2):     # random features begin alike
                run.say(f"step {step + 1}: the features have collapsed (effective rank {seen['effective_rank']:.2f}, mean cosine {seen['cosine']:.4f})")
                told = True
            seen |= {name: (processes.sum(v.detach().clone()) / processes.world).item() for name, v in terms.items()}
        run.stepped(loss, rates[step], **seen)

        stop = run.should_stop()
        if (step + 1) % eval_every == 0 or last:
            with run.untimed():
                best = run.evaluated(**evaluate(teacher, train, val, data, c, processes))
                if run.is_main:
                    with run.optional(f"step{run.step}.png"):
                        write_saliency(teacher.encoder, val, data, run.dir / f"step{run.step}.png")
                run.save(checkpoint(), best=best, last=last)
        elif stop or (step + 1) % save_every == 0:
            with run.untimed():
                run.save(checkpoint(), last=stop)
        if stop and not last:
            run.interrupted()
    return run.done()


if __name__ == "__main__":
    common.cli(main)
