"""Self-supervised learning with SimDINO, and with the DINO that it simplifies.

    python train_simdino.py shapes                               drawn images, two CPU cores
    python train_simdino.py cifar10-small --method=dino          any preset, any flag
    torchrun --standalone --nproc_per_node=8 train_simdino.py    ImageNet, the setting of [B] 7.2

[B] 7.2: a student sees two large and several small views of an image, a teacher (the student's
moving average) the two large ones, and the features of all views should agree. Constant features
would agree too: DINO prevents them by a softmax over prototypes, of logits less their mean and at
a low temperature; SimDINO by the coding rate of the features, which falls if they collapse."""
import copy
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from data import augment, images
from evaluate import features, nearest_neighbours
from flags import model_fields, ModelFlags, option, parse_run, UserError
from measure import count
from model import gram_coding_rate, image_config, ImageConfig, ImageEncoder
from optim import cosine_schedule, make_optimizers, take_step
from processes import cli, derive_seed, Processes, wants_compile
from run import Run, RunFlags

AREA = 0.4      # a global view shows at least this share of the picture, a local one at most


@dataclass(kw_only=True)
class Config(RunFlags, ModelFlags):
    """--width, --heads and --layers are those of the student and of the teacher."""
    data: str = option("imagenet", "which images: a prepared set", fixed=True)
    image_size: int = option(32, "pixels per side of a global view", low=1)
    patch_size: int | None = option(None, "P, pixels; auto is 16", low=1)
    drop_path: float = option(0.1, "the last layer's, of the student", low=0, high=0.99)
    # the method
    method: str = option("simdino", "dino is the original", choices=("simdino", "dino"))
    eps: float = option(0.05 ** 0.5, "distortion of the coding rate; the published run's", low=1e-6)
    gamma: float | None = option(None, "the rate's weight; auto 1 / output + 1 / batch_size", low=0)
    hidden: int = option(2048, "width of the projector", low=1)
    output: int = option(256, "p, the projector's output", low=2)
    momentum: float = option(0.996, "of the teacher's average; a cosine up to 1", low=0, high=1)
    prototypes: int = option(65536, "DINO: how many", low=2)
    teacher_temp: float = option(0.07, "DINO: the teacher's, rising from 0.04", above=0)
    warmup_temp_epochs: float = option(30, "DINO: epochs until teacher_temp is reached", low=0)
    freeze_epochs: float = option(1, "DINO: epochs in which the prototypes stay fixed", low=0)
    # optimization
    lr: float = option(2e-3, "peak learning rate", above=0)
    batch_size: int = option(256, "images of all processes together", low=2, fixed=True)
    epochs: float = option(100, "passes over the data, warm-up included", above=0)
    warmup_epochs: float = option(10, "epochs of linear warm-up, half of all at most", low=0)
    # views
    local_size: int = option(16, "pixels per side of a local view", low=1)
    local_views: int = option(4, "small views of an image, beside the two global ones", low=0)
    local_area: float = option(0.05, "local views: least share of the area", above=0, high=AREA)
    blur: float = option(2.0, "largest deviation of the blur, pixels; 0: none", low=0)


PRESETS = {
    "imagenet": dict(       # [B] 7.2, areas from the released code; CRATE is --arch=crate
        data="imagenet", arch="transformer", size="base", image_size=224, local_size=96,
        local_views=10, batch_size=1024,        # its lr is 5e-4 x batch_size / 256
        eval_every=6255),   # five epochs
    "cifar10-small": dict(  # a quarter of an hour on one CPU core
        data="cifar10", width=128, heads=4, layers=4, patch_size=4,
        blur=0.0,           # a deviation of 2 px leaves little of 32 px
        optimizer="muon", lr=1e-3,      # 20-NN 36.2 %; AdamW with lr=5e-4 33.9
        momentum=0.98,      # fewer steps than ImageNet's run: the teacher follows faster
        epochs=2, warmup_epochs=0.5, batch_size=128, hidden=256, output=128,
        drop_path=0.0, local_area=0.1, prototypes=1024, teacher_temp=0.04),
    "shapes": dict(
        data="shapes", width=64, heads=4, layers=3, patch_size=4, blur=0.0, lr=1.5625e-3,
        momentum=0.98, epochs=6, warmup_epochs=0.5, batch_size=100, hidden=256, output=64,
        drop_path=0.0, local_area=0.1, prototypes=512,
        teacher_temp=0.04),     # DINO collapses even so
}


# ---- Views --------------------------------------------------------------------------------------
def make_views(pixels, c, data, step, rows):
    """The views of uint8 images (b, H, W, 3), `rows` of a step's batch, normalized: (2, b, 3, S, S)
    and (local_views, b, 3, s, s), if any. Areas and probabilities are those of the released code,
    `blur` and `solarize` one for each view."""
    x = augment.to_float(pixels)

    def make(kind, size, area, blur, solarize):
        n = len(blur)
        rng = augment.BatchRandom(derive_seed(c.seed, step, kind), c.batch_size * n,
                                  slice(rows.start * n, rows.stop * n))
        v = augment.random_resized_crop(x.repeat_interleave(n, 0), size, rng, area)
        v = augment.flip(v, rng)
        v = augment.color_jitter(v, rng, 0.4, 0.4, 0.2, 0.1, p=0.8)
        v = augment.grayscale(v, rng, 0.2)
        if c.blur:
            v = augment.gaussian_blur(v, rng, torch.tensor(blur).repeat(len(x)), (0.1, c.blur))
        v = augment.solarize(v, rng, torch.tensor(solarize).repeat(len(x)))
        v = augment.normalize(v, data.mean, data.std)
        return v.unflatten(0, (len(x), n)).transpose(0, 1)

    views = [make("global", c.image_size, (AREA, 1.0), blur=[1.0, 0.1], solarize=[0.0, 0.2])]
    if c.local_views:
        views.append(make("local", c.local_size, (c.local_area, AREA),
                          blur=[0.5] * c.local_views, solarize=[0.0] * c.local_views))
    return views


# ---- Model: encoder, projector, prototypes (DINO) -----------------------------------------------
class Branch(nn.Module):
    """Student or teacher: a three-layer MLP maps the class token to the unit sphere in R^p, [B]
    7.2.3. DINO adds inner products with prototypes of norm 1, [B] Section 7.2.2.
    branch(views) takes a list of (V_i, b, 3, S_i, S_i) and returns unit features (V, b, p), V the
    sum of V_i, and logits (V, b, prototypes) or None."""

    def __init__(self, config, hidden, output, prototypes=None):
        super().__init__()
        self.config, self.encoder = config, ImageEncoder(config)
        self.projector = nn.Sequential(nn.Linear(config.width, hidden), nn.GELU(),
                                       nn.Linear(hidden, hidden), nn.GELU(),
                                       nn.Linear(hidden, output))
        for module in self.projector[::2]:
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        self.prototypes = None
        if prototypes:      # used at norm 1; the norm that they start with sets how fast they turn
            start = torch.empty(prototypes, output).uniform_(-1, 1)
            self.prototypes = nn.Parameter(start * output ** -0.5)

    def forward(self, views):
        """One pass through the encoder for each size, one through the projector for all."""
        tokens = [self.encoder(v.flatten(0, 1))[:, 0].unflatten(0, v.shape[:2]) for v in views]
        Z = F.normalize(self.projector(torch.cat(tokens)).float(), dim=-1)
        if self.prototypes is None:
            return Z, None
        return Z, Z @ F.normalize(self.prototypes, dim=-1).mT


def build_model(c):
    """The branch that the flags describe. A LayerNorm before the projector bounds its input."""
    config = image_config(c.size, **model_fields(ImageConfig, c, classes=1, final_norm=True))
    if c.local_views and c.local_size % config.patch_size:
        raise UserError(f"patch_size={config.patch_size} does not divide local_size={c.local_size}")
    return Branch(config, c.hidden, c.output, c.prototypes if c.method == "dino" else None)


# ---- Losses -------------------------------------------------------------------------------------
def mean_over_pairs(score):
    """The mean of score (2, V): teacher's global view by student's view, without equal views."""
    return (score.sum() - score.diagonal().sum()) / (score.numel() - score.shape[0])


def squared_distance(student, teacher):
    """The mean over pairs of 1/2 ||t - s||^2 = 1 - <t, s>, [B] Eq. (7.2.34), for unit
    vectors (V, b, p) and (2, b, p)."""
    return mean_over_pairs(1 - torch.einsum("gbp,vbp->gv", teacher, student) / student.shape[1])


def global_coding_rate(Z, eps, processes):
    """The mean over views of R_eps(Z) = 1/2 logdet(I + p / (N m eps^2) Z^* Z), [B] Eq. (7.2.34) for
    rows: Z (2, m, p) of m images in each of N processes. Z^* Z is summed over all, so that N
    processes are one; by default released SimDINO does not (it does with --reduce_cov 1), although
    its factor too has N m."""
    with torch.autocast(Z.device.type, enabled=False):
        Z, N = Z.float(), processes.world
        own = Z.mT @ Z
        covariance = processes.sum(own.detach())
        covariance = covariance + N * (own - own.detach())      # the gradient: DDP divides it by N
        return gram_coding_rate(covariance, Z.shape[-1] / (N * Z.shape[1] * eps ** 2)).mean()


def dino_loss(student, teacher, center, temperature):
    """The mean over pairs of -<softmax((t - center) / temperature), log softmax(s / 0.1)>.
    [B] Eq. (7.2.28), for logits (V, b, prototypes) and (2, b, prototypes). As in DINO the teacher's
    temperature rises and the student's is fixed; [B]'s text has it the other way round."""
    target = ((teacher.float() - center) / temperature).softmax(-1)
    guess = (student.float() / 0.1).log_softmax(-1)
    return mean_over_pairs(-torch.einsum("gbk,vbk->gv", target, guess) / student.shape[1])


# ---- Signs of collapse --------------------------------------------------------------------------
@torch.no_grad()
def feature_statistics(Z, eps, processes):
    """Measures of collapse, of the unit features Z (m, p) of each process: the coding rate, the
    effective rank exp(entropy of the eigenvalues of Z^* Z / N m), and two images' mean cosine."""
    gram, summed = processes.sum(Z.mT @ Z), processes.sum(Z.sum(0))
    n = Z.shape[0] * processes.world
    share = torch.linalg.eigvalsh(gram.cpu().double() / n).clamp_min(1e-12)
    return dict(coding_rate=gram_coding_rate(gram, Z.shape[1] / (n * eps ** 2)).item(),
                effective_rank=math.exp(-(share * share.log()).sum()),
                cosine=(summed.square().sum().item() - n) / (n * (n - 1)))


def main(argv):
    """Trains one student and its teacher; returns the last line of metrics.jsonl."""
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
    student = build_model(c).to(device)
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    params, averages = list(student.parameters()), list(teacher.parameters())
    center = torch.zeros(c.prototypes if c.method == "dino" else 1, device=device)

    # ---- optimizer, and what changes over the run, [B] 7.2: lists of a value for each step
    lr = cosine_schedule(c.lr, total, round(c.warmup_epochs * epoch_steps), final=1e-6)
    weight_decay = cosine_schedule(0.04, total, final=0.4)
    momentum = cosine_schedule(c.momentum, total, final=1.0)
    rise = max(round(c.warmup_temp_epochs * epoch_steps), 1)    # each step; DINO's each epoch
    temperature = [0.04 + (c.teacher_temp - 0.04) * min(i / rise, 1) for i in range(total)]
    optimizers = make_optimizers(student, c.optimizer, c.lr, weight_decay[0], (0.9, 0.999),
                                 hidden=[student.encoder.layers, student.projector])
    # the weight of the coding rate as its authors set it, (p + N m) / (p N m)
    gamma = 1 / c.output + 1 / c.batch_size if c.gamma is None else c.gamma

    # ---- run
    run = Run(c, "simdino", name, processes)
    if resumed := run.attach(teacher, optimizers, data.meta(),
                             dict(student=student.state_dict(), center=center)):
        student.load_state_dict(resumed["extra"]["student"])
        center.copy_(resumed["extra"]["center"])
    train, val = (images.Images(split, device) for split in (data.train, data.val))
    ddp = processes.wrap(student)
    if wants_compile(c.compile, device):
        for module in (student, teacher, teacher.encoder):      # the last is what is evaluated
            module.compile()

    batches = train.batches(images.index_batches(len(train), c.batch_size, c.seed, run.step, rows))
    what = (f"{c.method}, {student.config.arch}, {count(student.encoder):,} of {count(student):,} "
            f"parameters in the encoder, {c.data} of {data.image_size} px, 2 views of "
            f"{c.image_size} px and {c.local_views} of {c.local_size}, batches of {c.batch_size}")
    for step in run.steps(total, what, eval_every=epoch_steps):
        student.train()
        torch.manual_seed(derive_seed(c.seed, step, "dropout", processes.rank))

        # batch
        pixels, _ = next(batches)
        views = make_views(pixels, c, data, step, rows)

        # forward
        with torch.no_grad(), processes.autocast():
            t, t_logits = teacher(views[:1])                # the global views only
        with processes.autocast():
            s, s_logits = ddp(views)

        # loss and backward
        if c.method == "simdino":
            distance = squared_distance(s, t)
            # of the student's features, as in [B]; released, of their mean with the teacher's
            loss = distance - gamma * global_coding_rate(s[:2], c.eps, processes)
        else:
            loss = dino_loss(s_logits, t_logits, center, temperature[step])
            mean = processes.sum(t_logits.float().mean((0, 1))) / processes.world
            center.lerp_(mean, 0.1)
        loss.backward()

        # clip each parameter's gradient by itself, and step
        for p in params:
            nn.utils.clip_grad_norm_(p, 3.0)
        if c.method == "dino" and step < c.freeze_epochs * epoch_steps:
            student.prototypes.grad = None
        take_step(optimizers, lr[step], weight_decay[step])
        with torch.no_grad():               # the teacher: momentum t + (1 - momentum) s
            torch._foreach_lerp_(averages, params, 1 - momentum[step])

        # log, with statistics of the first view, and evaluate if that is due
        numbers = partial(feature_statistics, s[0].detach(), c.eps, processes)
        run.log(loss, lr[step], numbers)
        if run.evaluation_due:              # by neighbours of the teacher's class token
            first, second = (features(teacher.encoder, split, data, processes)
                             for split in (train, val))
            run.record(nearest_neighbours(processes, *first, *second, len(data.classes)))
    return run.done("python evaluate.py knn --ckpt={dir}/ckpt.pt    # nearest neighbours",
                    "python analyze.py saliency --ckpt={dir}/ckpt.pt    # where attention looks")


if __name__ == "__main__":
    cli(main)
