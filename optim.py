"""What the training loops share: micro-batches, schedules, optimizers; what a step costs, and how
fast steps are."""
import contextlib
import math
import time

import torch

from model import MHSA, SoftmaxAttention
from processes import device_name, is_fast_in_bfloat16


def micro_batches(model, size, *batch):
    """The tensors of a batch, `size` rows at a time; all if None. DDP exchanges gradients only
    after the last part, when they are the sum of all parts."""
    *before, last = zip(*(t.split(size or len(t)) for t in batch))
    without_exchange = getattr(model, "no_sync", contextlib.nullcontext)
    for part in before:
        with without_exchange():            # as long as the caller works on the part
            yield part
    yield last


def cosine_schedule(base, total, warmup=0, final=0.0):
    """A list of `total` values: a straight rise to `base` over `warmup` steps, at most half of all,
    then half a cosine towards `final`. It starts at base / warmup; DINO and MAE start at 0."""
    warmup = min(warmup, total // 2)
    down = max(total - warmup, 1)
    rise = [base * (i + 1) / warmup for i in range(warmup)]
    fall = [0.5 * (1 + math.cos(math.pi * i / down)) for i in range(total - warmup)]
    return rise + [final + (base - final) * share for share in fall]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), the optimizer of [N] B.1.2, for all tensors at once.

        u = sign(b1 m + (1 - b1) g);   w = (1 - lr wd) w - lr u;   m = b2 m + (1 - b2) g"""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                if "m" not in self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
            m = [self.state[p]["m"] for p in params]
            (b1, b2), lr = group["betas"], group["lr"]
            update = torch._foreach_lerp(m, grads, 1 - b1)
            torch._foreach_sign_(update)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, update, alpha=-lr)
            torch._foreach_lerp_(m, grads, 1 - b2)


def newton_schulz(G, dtype):
    """Nearly P Q^* of each G = P S Q^* (its SVD) in a stack (m, rows, columns): five quintic steps

        X = 3.4445 X + (-4.7750 A + 2.0315 A^2) X,   A = X X^*,

    from X = G / ||G||_F, which bring singular values above 0.0015 ||G||_F to between 0.68 and 1.2.
    The coefficients are Jordan's: steep at 0 rather than exact at 1. bfloat16 is enough."""
    X = G.to(dtype)
    tall = X.shape[-2] > X.shape[-1]
    X = X.mT if tall else X                 # the smaller Gram matrix
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=-4.7750, alpha=2.0315)
        X = torch.baddbmm(X, B, X, beta=3.4445)
    return X.mT if tall else X


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024; decay and s: Liu et al. 2025): momentum, singular values brought
    near 1. Matrices of one shape are updated together, and `parts` matrices in one as several.

        m = 0.95 m + 0.05 g;   O = newton_schulz(0.05 g + 0.95 m);   W = (1 - lr wd) W - lr s O

    s = 0.2 sqrt(max(rows, columns)) gives entries the size of AdamW's steps: they share a rate."""

    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, parts=1))

    @torch.no_grad()
    def step(self):
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape, device = {}, group["params"][0].device
            dtype = torch.bfloat16 if is_fast_in_bfloat16(device) else torch.float32
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
                    if "momentum_buffer" not in self.state[p]:
                        self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            for (rows, columns), params in by_shape.items():
                grads = [p.grad for p in params]
                m = [self.state[p]["momentum_buffer"] for p in params]
                torch._foreach_lerp_(m, grads, 0.05)
                G = torch.stack(torch._foreach_lerp(grads, m, 0.95))
                apart = G.view(-1, rows // group["parts"], columns)
                update = newton_schulz(apart, dtype).to(G.dtype).reshape(G.shape)
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
                scale = group["lr"] * 0.2 * math.sqrt(max(apart.shape[1:]))
                torch._foreach_add_(params, update.unbind(), alpha=-scale)


def make_optimizers(model, name, lr, weight_decay, betas, hidden=(), scale=None):
    """[Lion], [AdamW], or [Muon for the matrices in the modules `hidden`, AdamW for the rest];
    scale(key), if given, multiplies the learning rate of the parameter key.

    `hidden` are layers, MLPs, MAE's map to pixels. As Jordan advises, embeddings, classifiers and
    prototypes stay AdamW's, and MHSA's Q, K, V count as three matrices. Matrices are decayed;
    vectors, positions, special tokens and TSSA's b (K, T, 1) are not, as in timm (nanoGPT decays
    positions, released CRATE all)."""
    inside = {p for module in hidden for p in module.parameters()} if name == "muon" else set()
    three = {module.QKV.weight for module in model.modules() if isinstance(module, MHSA)}
    muon, rest = {}, {}         # lists of groups, by what a group's parameters have in common
    for key, p in model.named_parameters():
        decays = p.ndim == 2 and key.split(".")[-1] != "positions"
        by_muon = decays and p in inside
        common = dict(weight_decay=weight_decay * decays, decays=decays,
                      scale=scale(key) if scale else 1.0, parts=3 if by_muon and p in three else 1)
        groups = muon if by_muon else rest
        groups.setdefault(tuple(common.items()), common | dict(params=[]))["params"].append(p)
    muon, rest = [*muon.values()], [*rest.values()]
    if name == "lion":
        return [Lion(rest, lr=lr, betas=betas)]
    adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True)
    return [Muon(muon, lr=lr), adamw] if name == "muon" else [adamw]


def take_step(optimizers, lr, weight_decay=None):
    """One step of every optimizer at learning rate lr, times a group's own scale, with the weight
    decay, if it is given, in every group that is decayed. Then it drops the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["scale"]
            if weight_decay is not None and group["decays"]:
                group["weight_decay"] = weight_decay
        optimizer.step()
        optimizer.zero_grad()


# ---- What a step costs --------------------------------------------------------------------------
# Dense bf16 FLOP/s of the data sheets, of the SXM version if there are two
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def share_of_peak(flops, processes):
    """MFU: what share of the GPUs' peak in bfloat16 `flops` operations a second are; None where
    that peak is not known or the run is in float32."""
    words = device_name(processes.device).replace("-", " ").split()
    peaks = [PEAK[word] for word in words if word in PEAK and processes.bfloat16]
    return flops / (processes.world * peaks[0]) if peaks else None


def count(model, without=()):
    """How many parameters a model has. [B] Tables 7.5 to 7.11 seem to be without ("positions",)."""
    return sum(p.numel() for name, p in model.named_parameters() if name not in without)


def train_flops(model):
    """Operations of forward and backward for an image or a text of full context, as nanoGPT counts:
    n (6 N + 12 L n d) for n tokens and N weights in the matrices of the layers and a tied head. A
    causal map counts in full. Not counted: another use of the same D or U, TSSA's products,
    the heads of images."""
    n = model.config.context
    multiply_adds = n * model.embed.weight.numel() if model.config.kind == "text" else 0
    for layer in (*getattr(model, "encoder", model).layers, *getattr(model, "decoder", [])):
        multiply_adds += n * sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        if isinstance(layer.attention, SoftmaxAttention):           # scores and averages
            multiply_adds += 2 * n * n * layer.attention.heads * layer.attention.p
    return 6 * multiply_adds            # each is 2 operations, in 3 passes


def in_words(speed):
    """A Meter's speed, for a line that begins with something else."""
    words = dict(tokens_per_s=", {:,.0f} tokens/s", examples_per_s=", {:,.0f} images/s",
                 mfu=", mfu {:.1%}")
    return "".join(words[name].format(value) for name, value in speed.items())


class Meter:
    """The losses of the last steps, which stay on the device until they are read, and the seconds
    of each step, without evaluations and checkpoints. A step trains on `samples` images, or texts
    of `tokens` tokens each. A sample takes `flops` operations; with 0 the MFU is not counted."""

    def __init__(self, processes, samples, flops=0, tokens=None):
        self.processes, self.samples, self.flops, self.tokens = processes, samples, flops, tokens
        self.losses, self.seconds, self.started = [], [], None

    def start(self):
        self.started = time.perf_counter()

    def stop(self, loss, read):
        """Ends a step. If `read`, it returns the losses since they were read last, each the mean
        over the processes; else []. Reading waits for the GPU, so the clock stops after it."""
        self.losses.append(loss.detach())
        losses = []
        if read:
            losses, self.losses = torch.stack(self.losses), []
            losses = (self.processes.sum(losses) / self.processes.world).tolist()
        self.seconds.append(time.perf_counter() - self.started)
        return losses

    def speed(self, steps):
        """{name in metrics.jsonl: value} over the last steps. The first step of all does not count,
        as it may compile; if there is no other, the dict is empty."""
        seconds = self.seconds[max(1, len(self.seconds) - steps):]
        if not seconds:
            return {}
        samples = self.samples * len(seconds) / sum(seconds)
        mfu = share_of_peak(samples * self.flops, self.processes)
        speed = dict(tokens_per_s=samples * self.tokens) if self.tokens else dict(
            examples_per_s=samples)
        return speed | dict(mfu=mfu) if mfu else speed
