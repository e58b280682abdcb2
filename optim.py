"""What the training loops share: micro-batches, schedules, optimizers."""
import contextlib
import math

import torch

from model import MHSA
from processes import is_fast_in_bfloat16


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
    vectors, positions, special tokens and TSSA's b (K, T, 1) are not, as in timm."""
    inside = {p for module in hidden for p in module.parameters()} if name == "muon" else set()
    three = {module.QKV.weight for module in model.modules() if isinstance(module, MHSA)}
    muon, rest = {}, {}         # lists of groups, by what a group's parameters have in common
    for key, p in model.named_parameters():
        decays = p.ndim == 2 and key.split(".")[-1] != "positions"
        by_muon = decays and p in inside
        common = dict(weight_decay=weight_decay * decays, decays=decays,
                      scale=scale(key) if scale else 1.0, parts=3 if by_muon and p in three else 1)
        groups = muon if by_muon else rest
        group = groups.setdefault(tuple(common.items()), common | dict(params=[]))
        group["params"].append(p)
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
