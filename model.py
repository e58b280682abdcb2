"""
White-box transformers: every operator of the CRATE papers beside its equation, then the models built from them.

A layer is one step of an optimizer for the sparse rate reduction, max R(Z) - R^c(Z | U) - lambda ||Z||_0:
    Z^{l+1/2} = Z^l + MSSA(LN(Z^l))        compress them against learned subspaces U_1 .. U_K (gradient of R^c, approximately)
    Z^{l+1}   = ISTA(LN(Z^{l+1/2}))        sparsify them in a learned dictionary D (proximal gradient of a LASSO)

What differs from a plain transformer:
- one matrix U serves as query, key and value: every head compares and averages the same projections U_k^* Z;
- in the MLP's place stands a d x d dictionary and a ReLU, with no residual around it (the step has one inside);
- so a layer of width d has 3 d^2 parameters where a transformer's has 12 d^2.

Sources: [N] White-Box Transformers via Sparse Rate Reduction (NeurIPS 2023); [J] White-Box Transformers via Sparse Rate
Reduction: Compression Is All There Is? (JMLR 2024); [S] An In-depth Investigation of Sparse Rate Reduction in
Transformer-like Models (NeurIPS 2024); [B] Principles and Practice of Deep Representation Learning, Chapter 7.

Layout. The papers write Z in R^{d x n}, one token a column. Here Z is (B, n, d), one token a row. U_k^* Z is Z @ U_k, and
the column softmax of (U_k^*Z)^*(U_k^*Z) is the row softmax of w @ w.mT with w = Z @ U_k (the Gram matrix is symmetric).
K heads (subspaces), each of dimension p; d is the width.
"""
import difflib
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F


class ConfigError(ValueError):
    """A model that cannot be built or filled, in one line. Raised for the models of [N], [J], [S], [B] alike."""


# ---------------------------------------------------------------------------------------------------------------------
# Objective
# ---------------------------------------------------------------------------------------------------------------------

def _exact(*tensors):
    """The tensors in float32 or better: a logdet in half precision is wrong in the first digit ([J] Eq. (8))."""
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]


def gram_coding_rate(G, a):
    """1/2 logdet(I + a G), [J] Eq. (8), of Gram matrices G (..., m, m): (...).

    With I + a G = L L^*, that is the sum of log diag(L). A matrix that Cholesky cannot factor (G not finite) gives NaN instead
    of an error, since reading the error would stall a GPU."""
    with torch.autocast(G.device.type, enabled=False):
        G, = _exact(G)
        L, failed = torch.linalg.cholesky_ex(torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) + a * G)
        half = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return torch.where((failed == 0) & half.isfinite(), half, math.nan)


def _half_logdet(Z, a):
    """1/2 logdet(I + a Z^* Z) = 1/2 logdet(I + a Z Z^*), [J] Eq. (8), for Z (..., n, d): (...). Factors the smaller of the two."""
    with torch.autocast(Z.device.type, enabled=False):
        n, d = Z.shape[-2:]
        return gram_coding_rate(Z @ Z.mT if n < d else Z.mT @ Z, a)


def coding_rate(Z, eps=0.5):
    """R(Z) = 1/2 logdet(I + alpha Z Z^*), alpha = d / (n eps^2).  [J] Eq. (8), [N] Eq. (7).

    The nats needed to code the n tokens of Z (..., n, d) up to a distortion eps. Returns (...)."""
    Z, = _exact(Z)
    n, d = Z.shape[-2:]
    return _half_logdet(Z, d / (n * eps ** 2))


def _project(Z, U):
    """U_k^* Z of [J] Eq. (13) for all k: Z (..., n, d), U (K, d, p) -> (..., K, n, p)."""
    return Z.unsqueeze(-3) @ U


def subspace_coding_rate(Z, U, eps=0.5):
    """R^c(Z | U_[K]) = 1/2 sum_k logdet(I + beta (U_k^*Z)^*(U_k^*Z)), beta = p / (n eps^2).  [J] Eq. (13), [N] Eq. (8).

    The rate when each token is coded in K subspaces. Z (..., n, d), U (K, d, p); returns (...), in nats."""
    Z, U = _exact(Z, U)
    with torch.autocast(Z.device.type, enabled=False):
        return projected_coding_rate(_project(Z, U), eps)


def projected_coding_rate(w, eps=0.5):
    """R^c of [J] Eq. (13) from the projections w = U_k^* Z (..., K, n, p) themselves; returns (...)."""
    w, = _exact(w)
    n, p = w.shape[-2:]
    return _half_logdet(w, p / (n * eps ** 2)).sum(-1)


def class_coding_rate(Z, Pi, eps=0.5):
    """R^c(Z | Pi) = 1/2 sum_k logdet(I + gamma_k Z Pi_k Z^*), gamma_k = d / (n_k eps^2).  [J] Eq. (9).

    Pi (..., n, K) holds the membership of each token in each class, in [0, 1]; n_k = sum_i Pi_ik (a class without
    members costs nothing). Z (..., n, d); returns (...), in nats."""
    Z, Pi = _exact(Z, Pi)
    d = Z.shape[-1]
    members = Pi.sum(-2)                                                 # n_k (..., K)
    gamma = torch.where(members > 0, d / (members.clamp_min(1e-12) * eps ** 2), 0.0)
    # Z Pi_k Z^* is the Gram matrix of Pi_k^1/2 Z; the summand keeps the root's slope finite at Pi = 0
    weight = (Pi * gamma.unsqueeze(-2) + 1e-24).sqrt()                   # (..., n, K)
    return _half_logdet(Z.unsqueeze(-3) * weight.mT.unsqueeze(-1), 1.0).sum(-1)


def rate_reduction(Z, Pi, eps=0.5):
    """Delta R(Z | Pi) = R(Z) - R^c(Z | Pi), the objective before subspaces replaced memberships.  [J] Eq. (7), (9)."""
    return coding_rate(Z, eps) - class_coding_rate(Z, Pi, eps)


def sparse_rate_reduction(Z, U, eps=0.5, lambd=0.1, norm="l0"):
    """R(Z) - R^c(Z | U_[K]) - lambda ||Z||, to be maximized.  [J] Eq. (15) with norm="l0", (17) with "l1"; [N] Eq. (1).

    The norm is over all entries of Z (..., n, d); returns (...). Raises ConfigError for another norm."""
    if norm not in ("l0", "l1"):
        raise ConfigError(f"norm={norm!r} is not one of l0, l1")
    Z, U = _exact(Z, U)
    size = (Z != 0).sum((-2, -1)).to(Z.dtype) if norm == "l0" else Z.abs().sum((-2, -1))
    return coding_rate(Z, eps) - subspace_coding_rate(Z, U, eps) - lambd * size


def subspace_coding_rate_grad(Z, U, eps=0.5, neumann=False):
    """grad_Z R^c, exact or by two terms of its Neumann series.  [J] Eq. (31)-(33), [N] Eq. (9), (67)-(69).

    exact:    beta sum_k U_k (U_k^*Z) (I + beta (U_k^*Z)^*(U_k^*Z))^{-1}
    neumann:  beta sum_k U_k U_k^*Z - beta^2 sum_k U_k (U_k^*Z)(U_k^*Z)^*(U_k^*Z)

    The series converges only where beta ||U_k^*Z||^2 < 1 (spectral norm). The inverse acts on the smaller side: for
    w = (U_k^*Z)^*, (I_n + beta w w^*)^{-1} w = w (I_p + beta w^* w)^{-1}. Z (..., n, d), U (K, d, p) -> (..., n, d)."""
    Z, U = _exact(Z, U)
    with torch.autocast(Z.device.type, enabled=False):
        w = _project(Z, U)                                               # (..., K, n, p)
        n, p = w.shape[-2:]
        beta = p / (n * eps ** 2)
        if neumann:
            step = w - beta * w @ (w.mT @ w)
        elif n < p:
            step = torch.linalg.solve(torch.eye(n, dtype=w.dtype, device=w.device) + beta * w @ w.mT, w)
        else:
            step = torch.linalg.solve(torch.eye(p, dtype=w.dtype, device=w.device) + beta * w.mT @ w, w, left=False)
        return beta * (step @ U.mT).sum(-3)


def gaussian_mixture_denoise(z, U, sigma):
    """E[z_clean | z] ~ [U_1 .. U_K] [diag(softmax_k(||U_k^*z||^2 / 2 sigma^2)) (x) I_p] stack_k U_k^*z.

    [J] Eq. (47), [N] Eq. (6). One step of denoising a token drawn from Gaussians on the subspaces U
    (K, d, p, orthonormal columns) plus noise of deviation sigma. As sigma -> 0 it projects onto the nearest subspace.
    z (..., d) -> (..., d)."""
    w = _project(z.unsqueeze(-2), U)                                     # (..., K, 1, p)
    weight = torch.softmax(w.square().sum(-1) / (2 * sigma ** 2), -2)    # (..., K, 1)
    return ((weight.unsqueeze(-1) * w) @ U.mT).sum(-3).squeeze(-2)


# ---------------------------------------------------------------------------------------------------------------------
# Compression operators: the attention of each arch
# ---------------------------------------------------------------------------------------------------------------------

def mssa(Z, U, W=None, bias=None, scale=1.0, causal=False):
    """Multi-head subspace self-attention, to the letter (the module MSSA computes the same, fast).

    SSA(Z | U_k) = (U_k^*Z) softmax((U_k^*Z)^*(U_k^*Z))                              [J] Eq. (35), [N] Eq. (11)
    without W:  [U_1 .. U_K] stack_k SSA(Z | U_k)       as derived, up to a step     [J] Eq. (36), [N] Eq. (12)
    with W:     W stack_k SSA(Z | U_k) + bias           as implemented               [J] Eq. (37), [N] Eq. (115)

    Z (..., n, d), U (K, d, p), W (d, K p) -> (..., n, d). `scale` multiplies the Gram matrix: 1 in the papers, p^-1/2 in the
    released code. causal: token i attends to tokens <= i, [B] Eq. (7.4.4)-(7.4.7)."""
    w = _project(Z, U)                                                   # (..., K, n, p)
    gram = scale * w @ w.mT                                              # (..., K, n, n)
    if causal:
        n = Z.shape[-2]
        gram = gram.masked_fill(torch.ones(n, n, dtype=torch.bool, device=Z.device).triu(1), -math.inf)
    ssa = gram.softmax(-1) @ w                                           # (..., K, n, p)
    if W is None:
        return (ssa @ U.mT).sum(-3)
    out = ssa.transpose(-3, -2).flatten(-2) @ W.mT                       # heads side by side, then W
    return out if bias is None else out + bias


def _attention_map(q, k, scale, causal):
    """The matrix that scaled_dot_product_attention never forms, [J] Eq. (35): (B, K, n, p) twice -> (B, K, n, n)."""
    gram = scale * q @ k.mT
    if causal:
        gram = gram.masked_fill(torch.ones(gram.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return gram.softmax(-1)


def saliency(attention, query="class"):
    """What an attention map (B, K, 1 + n, 1 + n) says of each patch: the class token's row without itself, [B] Eq. (7.2.41): (B, K, n).

    query="mean": the mean of the patches' rows, which is how much of each patch a mean-pooled head reads. TSSA has no rows, but
    Pi (B, K, 1 + n): the membership of each patch in each subspace."""
    if attention.ndim == 3:
        return attention[..., 1:]
    return attention[:, :, 0, 1:] if query == "class" else attention[:, :, 1:, 1:].mean(2)


def _append(state, **new):
    """Write new (B, K, m, p) tensors behind those in `state`; returns what there is so far, and the causal mask for it.

    The cache of causal attention ([B] Section 7.4, its footnote on inference): `state` holds buffers with room for state["room"] tokens and
    state["n"], the number in use. The mask comes as arguments of scaled_dot_product_attention."""
    n = state.get("n", 0)
    m = next(iter(new.values())).shape[2]
    if n + m > state["room"]:
        raise ConfigError(f"{n + m} tokens exceed the context of {state['room']}")
    for name, tensor in new.items():
        if name not in state:
            B, K, _, p = tensor.shape
            state[name] = tensor.new_empty(B, K, state["room"], p)
        state[name][:, :, n:n + m] = tensor
    state["n"] = n + m
    device = next(iter(new.values())).device
    mask = None if n == 0 or m == 1 else torch.ones(m, n + m, dtype=torch.bool, device=device).tril(n)
    return [state[name][:, :, :n + m] for name in new], dict(is_causal=n == 0, attn_mask=mask)


class MSSA(nn.Module):
    """Multi-head subspace self-attention, one of four ways to bring the heads back to R^d. SSA as in `mssa`, scale p^-1/2.

    output      the module computes                     arch      source
    learned     W stack_k SSA(Z | U_k)                  crate     [J] Eq. (37), [N] Eq. (115)
    subspace    step [U_1 .. U_K] stack_k SSA           crate-c   [J] Eq. (36), [S]; step = beta: [N] Eq. (12), there scale 1
    negative    - step [U_1 .. U_K] stack_k SSA         crate-n   [S]: the sign that descends R^c; crate-c's can raise it
    transpose   step [U_1 .. U_K]^* stack_k SSA         crate-t   [S]; needs p K = d

    (B, n, d) -> (B, n, d). U has no bias; W has one where the released code has (and is absent when K = 1 and p = d).
    One tensor w = U^* Z is query, key and value, so `state`, the cache of generation, holds one tensor a layer."""

    def __init__(self, d, heads, p=None, output="learned", causal=False, step=1.0, bias=True, dropout=0.0):
        super().__init__()
        self.heads, self.p, self.output, self.causal = heads, p or d // heads, output, causal
        self.step, self.dropout = step, dropout
        self.scale = self.p ** -0.5
        self.U = nn.Linear(d, heads * self.p, bias=False)                # weight = [U_1 .. U_K]^*, as in the released code
        if output == "learned":
            self.W = nn.Identity() if heads == 1 and self.p == d else nn.Linear(heads * self.p, d, bias=bias)
        elif output == "transpose" and heads * self.p != d:
            raise ConfigError(f"crate-t needs heads x head_dim = width, not {heads} x {self.p} and {d}")

    def bases(self):
        """[U_1 .. U_K] of [J] Eq. (13) as (K, d, p)."""
        return self.U.weight.view(self.heads, self.p, -1).mT

    def project(self, Z):
        """U_k^* Z for every head, [J] Eq. (35): (B, n, d) -> (B, K, n, p)."""
        return self.U(Z).unflatten(-1, (self.heads, self.p)).transpose(1, 2)

    def map(self, Z):
        """softmax((U_k^*Z)^*(U_k^*Z)) of [J] Eq. (35): (B, K, n, n), row i the weights with which token i is averaged."""
        w = self.project(Z)
        return _attention_map(w, w, self.scale, self.causal)

    def forward(self, Z, state=None):
        """(B, n, d) -> (B, n, d). With a `state` (causal only), Z holds the next tokens of sequences whose past is in it."""
        w = past = self.project(Z)
        mask = dict(is_causal=self.causal)
        if state is not None:
            (past,), mask = _append(state, w=w)
        ssa = F.scaled_dot_product_attention(w, past, past, scale=self.scale, **mask,
                                             dropout_p=self.dropout if self.training else 0.0)
        ssa = ssa.transpose(1, 2).flatten(-2)                            # (B, n, K p): heads side by side
        if self.output == "learned":
            return F.dropout(self.W(ssa), self.dropout, self.training)
        U = self.U.weight.mT if self.output != "transpose" else self.U.weight
        step = -self.step if self.output == "negative" else self.step
        return F.dropout(F.linear(ssa, step * U), self.dropout, self.training)


class MHSA(nn.Module):
    """Multi-head self-attention with separate queries, keys and values: the baseline's.  [B] Eq. (7.2.15)-(7.2.19).

    (B, n, d) -> (B, n, d), scale p^-1/2. `bias`: on the queries, keys and values; `out_bias`: on the output map."""

    def __init__(self, d, heads, p=None, causal=False, bias=True, out_bias=True, dropout=0.0):
        super().__init__()
        self.heads, self.p, self.causal, self.dropout = heads, p or d // heads, causal, dropout
        self.scale = self.p ** -0.5
        self.QKV = nn.Linear(d, 3 * heads * self.p, bias=bias)
        self.W = nn.Linear(heads * self.p, d, bias=out_bias)

    def project(self, Z):
        """Queries, keys and values, [B] Eq. (7.2.15): (B, n, d) -> three times (B, K, n, p)."""
        return self.QKV(Z).unflatten(-1, (3, self.heads, self.p)).permute(2, 0, 3, 1, 4).unbind(0)

    def map(self, Z):
        """The attention map, [B] Eq. (7.2.19): (B, K, n, n)."""
        q, k, _ = self.project(Z)
        return _attention_map(q, k, self.scale, self.causal)

    def forward(self, Z, state=None):
        """(B, n, d) -> (B, n, d); `state` as in MSSA.forward, with two tensors in it."""
        q, k, v = self.project(Z)
        mask = dict(is_causal=self.causal)
        if state is not None:
            (k, v), mask = _append(state, k=k, v=v)
        out = F.scaled_dot_product_attention(q, k, v, scale=self.scale, **mask,
                                             dropout_p=self.dropout if self.training else 0.0)
        return F.dropout(self.W(out.transpose(1, 2).flatten(-2)), self.dropout, self.training)


class TSSA(nn.Module):
    """Token-statistics self-attention (ToST), linear in n.  Named in [B] Section 7.5.2; the formula is the released code's.

    With w = U_k^* Z (n x p) for head k:
        Pi_ik   = softmax over k of eta_k sum_j (w_ij / ||w_:j||)^2      membership of token i in subspace k
        s_k     = sum_i Pi_ik w_i^2 / sum_i Pi_ik                        second moments of the subspace, a p-vector
        out_ik  = - Pi_ik w_i / (1 + s_k)                                compress where the subspace has little energy
    then W (in images with bias). Causal, by the released code: norm and both sums run over tokens <= i, and b (K, T, 1), initially 0, is added to each of
    the p normalised squares. (B, n, d) -> (B, n, d). eta starts at 1 and, being one-dimensional, is not decayed."""

    def __init__(self, d, heads, p=None, causal=False, context=None, bias=True, out_bias=True, dropout=0.0):
        super().__init__()
        self.heads, self.p, self.causal, self.dropout = heads, p or d // heads, causal, dropout
        self.U = nn.Linear(d, heads * self.p, bias=bias)
        self.eta = nn.Parameter(torch.ones(heads))
        self.b = nn.Parameter(torch.zeros(heads, context, 1)) if causal else None
        self.W = nn.Linear(heads * self.p, d, bias=out_bias)

    def bases(self):
        """[U_1 .. U_K] as (K, d, p), as MSSA.bases, [J] Eq. (13)."""
        return self.U.weight.view(self.heads, self.p, -1).mT

    def project(self, Z):
        """w = U_k^* Z (+ bias) for every head, [B] Section 7.5.2: (B, n, d) -> (B, K, n, p), in float32 or better."""
        return _exact(self.U(Z).unflatten(-1, (self.heads, self.p)).transpose(1, 2))[0]

    def _statistics(self, w, state):
        """Pi (B, K, n) and s (B, K, n or 1, p) of the class's formula ([B] Section 7.5.2)."""
        square = w.square()
        eta = _exact(self.eta)[0][:, None]
        if not self.causal:
            # 1e-12 under the norm (1e-24 under its square) and 1e-8 under the sum: the released code's guards
            Pi = (eta * (square / square.sum(-2, keepdim=True).clamp_min(1e-24)).sum(-1)).softmax(-2)
            return Pi, (Pi / (Pi.sum(-1, keepdim=True) + 1e-8)).unsqueeze(-2) @ square
        start = 0 if state is None else state.get("n", 0)
        n = w.shape[-2]
        if start + n > self.b.shape[1]:
            raise ConfigError(f"{start + n} tokens exceed the context of {self.b.shape[1]}")
        norm, moment, mass = (0.0, 0.0, 0.0) if not start else (state["norm"], state["moment"], state["mass"])
        norm = norm + square.cumsum(-2)
        Pi = (eta * (square / norm.clamp_min(1e-12) + self.b[:, start:start + n]).sum(-1)).softmax(-2)
        moment = moment + (Pi.unsqueeze(-1) * square).cumsum(-2)
        mass = mass + Pi.cumsum(-1)
        if state is not None:                                            # running statistics: constant in the past's length
            state.update(n=start + n, norm=norm[..., -1:, :].clone(), moment=moment[..., -1:, :].clone(), mass=mass[..., -1:].clone())
        return Pi, moment / (mass + 1e-8).unsqueeze(-1)

    def map(self, Z):
        """TSSA has no attention map; this is Pi of [B] Section 7.5.2, (B, K, n)."""
        return self._statistics(self.project(Z), None)[0]

    def forward(self, Z, state=None):
        """(B, n, d) -> (B, n, d); `state` as in MSSA.forward, holding running sums only."""
        w = self.project(Z)
        with torch.autocast(Z.device.type, enabled=False):
            Pi, s = self._statistics(w, state)
            out = -Pi.unsqueeze(-1) * w / (1 + s)
        out = out.to(Z.dtype).transpose(1, 2).flatten(-2)
        return F.dropout(self.W(out), self.dropout, self.training)


# ---------------------------------------------------------------------------------------------------------------------
# Sparsification operators: what stands in the MLP's place
# ---------------------------------------------------------------------------------------------------------------------

def ista(Z, D, eta=0.1, lambd=0.1):
    """ISTA(Z | D) = ReLU(Z - eta D^*(D Z - Z) - eta lambda 1), to the letter.  [J] Eq. (44), [N] Eq. (17).

    One proximal gradient step, started at Z, on the non-negative LASSO 1/2 ||Z - D A||^2 + lambda ||A||_1 ([J] Eq. (41)-(42)).
    Three matmuls over the tokens, as in the released code. Z (..., n, d), D (d, d) -> (..., n, d)."""
    residual = Z @ D.mT - Z                                              # D Z - Z
    return F.relu(Z - eta * residual @ D - eta * lambd)                  # [B] prints + eta lambda; the minus is right


class ISTA(nn.Module):
    """ISTA(Z | D) as in `ista`, [J] Eq. (44), in one matmul over the tokens.

    Exactly, Z - eta D^*(DZ - Z) = Z + eta (D^* - D^*D) Z. For rows that is Z + Z G with G = eta (D - D^*D), a d x d matrix
    built once a step. The identity stays outside G: inside, bf16 would round G against it."""

    def __init__(self, d, eta=0.1, lambd=0.1):
        super().__init__()
        self.eta, self.lambd = eta, lambd
        self.D = nn.Parameter(torch.empty(d, d))
        nn.init.kaiming_uniform_(self.D)

    def forward(self, Z):
        """(B, n, d) -> (B, n, d), entries >= 0."""
        if Z.numel() < self.D.numel():                                   # fewer tokens than d (generation): G would cost more
            return ista(Z, self.D, self.eta, self.lambd)
        G = self.eta * (self.D - self.D.mT @ self.D)
        return F.relu(Z + Z @ G - self.eta * self.lambd)


class MMProx(nn.Module):
    """ReLU((1 + 4 / (9 (1 + alpha))) D^*Z - 4 lambda / (9 alpha) 1), alpha = d / (n eps^2).  [N] Eq. (92).

    The sparsification step by majorization-minimization of the rate itself instead of a LASSO. (B, n, d) -> (B, n, d)."""

    def __init__(self, d, lambd=0.1, eps=0.5, context=None):
        super().__init__()
        self.lambd, self.eps, self.context = lambd, eps, context         # causal: n is the context, whatever has been read
        self.D = nn.Parameter(torch.empty(d, d))
        nn.init.kaiming_uniform_(self.D)

    def forward(self, Z):
        """(B, n, d) -> (B, n, d), entries >= 0."""
        n, d = Z.shape[-2:]
        alpha = d / ((self.context or n) * self.eps ** 2)
        return F.relu((1 + 4 / (9 * (1 + alpha))) * (Z @ self.D) - 4 * self.lambd / (9 * alpha))


class ODL(nn.Module):
    """Overcomplete dictionary learning (CRATE-alpha): two ISTA steps from 0, then back.  [B] Eq. (7.5.3)-(7.5.5).

        a1 = ReLU(eta D^*Z - eta lambda),   a2 = ReLU(a1 - eta D^*(D a1 - Z) - eta lambda),   output D_hat a2

    D and D_hat are (d, C d); the layer adds a residual around it. (B, n, d) -> (B, n, d)."""

    def __init__(self, d, C=4, eta=0.1, lambd=0.1):
        super().__init__()
        self.eta, self.lambd = eta, lambd
        self.D = nn.Parameter(torch.empty(d, C * d))
        self.D_hat = nn.Parameter(torch.empty(d, C * d))
        for D in (self.D, self.D_hat):
            nn.init.uniform_(D, -(6 / d) ** 0.5, (6 / d) ** 0.5)         # the released training code's bound

    def code(self, Z):
        """The sparse code a2 of [B] Eq. (7.5.3): (B, n, d) -> (B, n, C d), entries >= 0."""
        threshold = self.eta * self.lambd
        a1 = F.relu(self.eta * Z @ self.D - threshold)
        return F.relu(a1 + self.eta * (Z - a1 @ self.D.mT) @ self.D - threshold)

    def forward(self, Z):
        """(B, n, d) -> (B, n, d)."""
        return self.code(Z) @ self.D_hat.mT


class MLP(nn.Module):
    """Linear, GELU, Linear with hidden width 4 d: the baseline's.  [B] Eq. (7.2.20) prints ReLU; ViT and GPT-2 use GELU."""

    def __init__(self, d, hidden, bias=True, dropout=0.0):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(d, hidden, bias=bias), nn.Linear(hidden, d, bias=bias), dropout

    def forward(self, Z):
        """(B, n, d) -> (B, n, d)."""
        return F.dropout(self.down(F.gelu(self.up(Z))), self.dropout, self.training)


# ---------------------------------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------------------------------

class Arch(NamedTuple):
    """One row of the table of layers: [N], [J], [S] and [B] differ only in these three words."""
    attention: str                  # mssa, tssa, mhsa
    output: str | None              # of MSSA
    sparsification: str | None      # ista, mmprox (no residual); odl, mlp (residual)


ARCHS = {
    "crate": Arch("mssa", "learned", "ista"),          # [J] Eq. (45)
    "crate-c": Arch("mssa", "subspace", "ista"),       # [S]
    "crate-n": Arch("mssa", "negative", "ista"),       # [S]
    "crate-t": Arch("mssa", "transpose", "ista"),      # [S]
    "crate-mm": Arch("mssa", "learned", "mmprox"),     # [N] Eq. (92), Table 3
    "crate-alpha": Arch("mssa", "learned", "odl"),     # [B] Eq. (7.5.3)-(7.5.5)
    "tost": Arch("tssa", None, "mlp"),                 # [B] Eq. (7.5.6)-(7.5.7)
    "aot": Arch("mssa", "learned", None),              # [B] Eq. (7.5.8)
    "aot-mhsa": Arch("mhsa", None, None),              # [B] Eq. (7.5.8) with MHSA
    "transformer": Arch("mhsa", None, "mlp"),          # [B] Eq. (7.2.13)-(7.2.22)
}
# After ISTA or MMProx tokens are bounded by the LN in front of the step; elsewhere they grow and want a last LN.
CRATE_FAMILY = ("crate", "crate-c", "crate-n", "crate-t", "crate-mm")


def nearest(word, words):
    """", did you mean X?" when a word of the list is close: for messages about names, as the archs of [S] are many."""
    close = difflib.get_close_matches(str(word), list(words), 1)
    return f", did you mean {close[0]}?" if close else ""


@dataclass(kw_only=True)
class BackboneConfig:
    """What the layers of every model share. None means: as the arch's authors have it. [J] Section 2.5, [B] Section 7.5.

    Raises ConfigError for a combination that cannot be built."""
    arch: str = "crate"
    width: int = 384                # d
    heads: int = 6                  # K
    layers: int = 12                # L
    head_dim: int | None = None     # p; None is width / heads
    eta: float = 0.1                # step of ISTA and ODL
    lambd: float = 0.1              # sparsity weight of ISTA, MMProx and ODL
    step: float = 1.0               # step of MSSA where it has no W (crate-c, -n, -t)
    eps: float = 0.5                # distortion in MMProx's alpha
    expansion: int = 4              # MLP's hidden width, or ODL's overcompleteness, in units of d
    dropout: float = 0.0
    drop_path: float = 0.0          # rate of the last layer, rising linearly from 0
    layer_scale: float | None = None    # initial LayerScale; 0: none
    norm_eps: float | None = None
    norm_bias: bool = True
    qkv_bias: bool | None = None    # on MHSA's and TSSA's projections; MSSA's U never has one
    out_bias: bool | None = None    # on the attention's output map
    mlp_bias: bool = True

    def __post_init__(self):
        if self.arch not in ARCHS:
            raise ConfigError(f"arch {self.arch!r} is not one of {', '.join(ARCHS)}{nearest(self.arch, ARCHS)}")
        self._whole("width", "heads", "layers", "expansion", *(["head_dim"] if self.head_dim is not None else []))
        if self.head_dim is None:
            if self.width % self.heads:
                fits = [h for h in range(1, 65) if self.width % h == 0]
                raise ConfigError(f"heads={self.heads} does not divide width={self.width}; use one of {fits}")
            self.head_dim = self.width // self.heads
        if self.arch == "crate-t" and self.heads * self.head_dim != self.width:
            raise ConfigError(f"crate-t needs heads x head_dim = width, not {self.heads} x {self.head_dim} and {self.width}")
        for name in ("eta", "lambd", "step", "eps", "dropout", "drop_path", "layer_scale", "norm_eps"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)):
                raise ConfigError(f"{name}={value!r} must be a finite number")
            if value is not None and value < 0 and name != "step" or value == 0 and name in ("eps", "norm_eps"):
                raise ConfigError(f"{name}={value!r} must be {'more than 0' if name in ('eps', 'norm_eps') else '0 or more'}")
        if self.step != 1.0 and ARCHS[self.arch].output not in ("subspace", "negative", "transpose"):
            raise ConfigError(f"step={self.step} is for crate-c, crate-n and crate-t; {self.arch} learns its own (W)")
        for name in ("dropout", "drop_path"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be less than 1")

    def _whole(self, *names):
        """ConfigError unless these fields are whole numbers, 1 or more."""
        for name in names:
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number, 1 or more")


class LayerTrace(NamedTuple):
    """What one layer did, on request: the two halves of [J] Eq. (45), and the attention map (Pi for TSSA)."""
    half: torch.Tensor              # Z^{l+1/2} (B, n, d)
    out: torch.Tensor               # Z^{l+1} (B, n, d)
    attention: torch.Tensor         # (B, K, n, n), or Pi (B, K, n)


class Layer(nn.Module):
    """One layer of any arch, pre-norm.

        Z^{l+1/2} = Z^l + attention(LN(Z^l))
        Z^{l+1}   = ISTA(LN(Z^{l+1/2}))                     crate and its variants: [J] Eq. (45), [B] Eq. (7.3.3)-(7.3.6)
        Z^{l+1}   = Z^{l+1/2} + ODL or MLP(LN(Z^{l+1/2}))   crate-alpha, tost, transformer: [B] Section 7.5, Eq. (7.2.14)
        Z^{l+1}   = Z^{l+1/2}                               aot: [B] Eq. (7.5.8)

    The LN is that of [N] Algorithm 2 and [J] Fig. 8; Eq. (45) itself has none. LayerScale and drop path act on the residual branches only."""

    def __init__(self, config, causal=False, context=None, drop_path=0.0):
        super().__init__()
        c, arch = config, ARCHS[config.arch]
        shared = dict(causal=causal, dropout=c.dropout)
        self.norm1 = nn.LayerNorm(c.width, c.norm_eps, bias=c.norm_bias)
        if arch.attention == "mssa":
            self.attention = MSSA(c.width, c.heads, c.head_dim, arch.output, step=c.step, bias=c.out_bias, **shared)
        elif arch.attention == "tssa":
            self.attention = TSSA(c.width, c.heads, c.head_dim, context=context, bias=c.qkv_bias, out_bias=c.out_bias, **shared)
        else:
            self.attention = MHSA(c.width, c.heads, c.head_dim, bias=c.qkv_bias, out_bias=c.out_bias, **shared)
        if arch.sparsification is not None:
            self.norm2 = nn.LayerNorm(c.width, c.norm_eps, bias=c.norm_bias)
            self.sparsification = {
                "ista": lambda: ISTA(c.width, c.eta, c.lambd),
                "mmprox": lambda: MMProx(c.width, c.lambd, c.eps, context),
                "odl": lambda: ODL(c.width, c.expansion, c.eta, c.lambd),
                "mlp": lambda: MLP(c.width, c.expansion * c.width, c.mlp_bias, c.dropout),
            }[arch.sparsification]()
        else:
            self.sparsification = None
        self.residual = arch.sparsification in ("odl", "mlp")
        self.drop_path = drop_path
        if c.layer_scale:
            self.scale1 = nn.Parameter(torch.full((c.width,), c.layer_scale))
            self.scale2 = nn.Parameter(torch.full((c.width,), c.layer_scale)) if self.residual else None
        else:
            self.scale1 = self.scale2 = None

    def _branch(self, out, scale):
        """LayerScale, then stochastic depth: a whole sample's branch is dropped, as in the released code of [B] Section 7.2."""
        out = out if scale is None else out * scale
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            out = out * (torch.empty(len(out), 1, 1, device=out.device).bernoulli_(keep) / keep)
        return out

    def compress(self, Z, state=None):
        """Z^l -> Z^{l+1/2}, the first half of [J] Eq. (45)."""
        return Z + self._branch(self.attention(self.norm1(Z), state), self.scale1)

    def sparsify(self, Z):
        """Z^{l+1/2} -> Z^{l+1}, the second half of [J] Eq. (45)."""
        if self.sparsification is None:
            return Z
        out = self.sparsification(self.norm2(Z))
        return Z + self._branch(out, self.scale2) if self.residual else out

    def forward(self, Z, state=None):
        """Z^l (B, n, d) -> Z^{l+1} (B, n, d)."""
        return self.sparsify(self.compress(Z, state))

    def trace(self, Z):
        """The same, with everything that happened on the way: a LayerTrace."""
        half = self.compress(Z)
        return LayerTrace(half, self.sparsify(half), self.attention.map(self.norm1(Z)))


def run_layers(layers, Z, trace=None, outputs=None):
    """Z^1 -> Z^{L+1}, [J] Eq. (45) L times; a list given as `trace` receives each layer's LayerTrace, one given as `outputs` its Z^{l+1}."""
    for layer in layers:
        if trace is None:
            Z = layer(Z)
        else:
            trace.append(layer.trace(Z))
            Z = trace[-1].out
        if outputs is not None:
            outputs.append(Z)
    return Z


def train_flops_per_token(layers, n):
    """Floating-point operations of forward and backward per token in a sequence of n: 6 N + 12 L n d.

    A weight takes part in one multiply-add forward and two backward each time it is used: once, but for the U of
    crate-c, -n, -t (there and back, [J] Eq. (36)) and the D of ODL (three times, [B] Eq. (7.5.3)). ISTA counts as one d x d
    matmul, since [J] Eq. (44) needs no more; TSSA has no n x n part."""
    total = 0
    for layer in layers:
        total += 6 * sum(p.numel() for p in layer.parameters() if p.ndim == 2)
        if isinstance(layer.sparsification, ODL):
            total += 12 * layer.sparsification.D.numel()
        if isinstance(layer.attention, MSSA) and layer.attention.output != "learned":
            total += 6 * layer.attention.U.weight.numel()
        if not isinstance(layer.attention, TSSA):
            total += 12 * n * layer.attention.heads * layer.attention.p
    return total


# ---------------------------------------------------------------------------------------------------------------------
# Image models
# ---------------------------------------------------------------------------------------------------------------------

# width, heads, layers. CRATE: [N] Table 1. ViT: DeiT's ([N]'s baselines) and, above small, the standard ViT's.
# CRATE-alpha and ToST: the released code's; ToST-M is left out, since no text gives its width.
_CRATE = {"tiny": (384, 6, 12), "small": (576, 12, 12), "base": (768, 12, 12), "large": (1024, 16, 24)}
_VIT = {"tiny": (192, 3, 12), "small": (384, 6, 12), "base": (768, 12, 12), "large": (1024, 16, 24)}
IMAGE_SIZES = {arch: _CRATE for arch in CRATE_FAMILY + ("aot",)} | {
    "crate-alpha": _VIT | {"small": (576, 12, 12)}, "transformer": _VIT, "aot-mhsa": _VIT, "tost": {"tiny": (192, 4, 12), "small": (384, 8, 12)}}


@dataclass(kw_only=True)
class ImageConfig(BackboneConfig):
    """An image encoder and its classifier; None means: as the arch's authors have it. [N] Section B.1 and released code."""
    image_size: int = 224           # pixels a side, square
    patch_size: int = 16            # P
    channels: int = 3
    classes: int = 1000
    stem: str | None = None         # norm: LN, Linear, LN ([N] Section B.1.1); plain: one Linear
    positions: str = "learned"      # learned; sincos: fixed, 2-D (MAE)
    pool: str = "class"             # class: the class token; mean: mean of the patch tokens
    final_norm: bool | None = None  # LN after the last layer; where there is none the head begins with one

    def __post_init__(self):
        super().__post_init__()
        transformer = self.arch in ("transformer", "aot-mhsa")
        if self.stem is None:
            self.stem = "norm" if self.arch in CRATE_FAMILY else "plain"
        if self.final_norm is None:
            self.final_norm = self.arch not in CRATE_FAMILY + ("crate-alpha",)
        if self.norm_eps is None:
            self.norm_eps = 1e-5 if self.arch in CRATE_FAMILY else 1e-6
        if self.qkv_bias is None:
            self.qkv_bias = transformer or self.arch == "tost"
        if self.out_bias is None:
            self.out_bias = self.arch != "crate-alpha"
        if self.layer_scale is None:
            self.layer_scale = 0.0 if self.arch != "tost" else 1.0 if self.layers <= 12 else 1e-5
        self._whole("image_size", "patch_size", "channels", "classes")
        if self.image_size % self.patch_size:
            raise ConfigError(f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        for name, allowed in (("stem", ("norm", "plain")), ("positions", ("learned", "sincos")), ("pool", ("class", "mean"))):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.positions == "sincos" and self.width % 4:
            raise ConfigError(f"sincos positions need a width that 4 divides, not {self.width}")


def image_config(size, arch="crate", **overrides):
    """The ImageConfig of a named size (tiny, small, base, large), with any field overridden. [N] Table 1, [B] Section 7.5.

    Raises ConfigError for an unknown size, arch or field."""
    large_alpha = dict(patch_size=14) if (arch, size) == ("crate-alpha", "large") else {}
    return named_config(ImageConfig, IMAGE_SIZES, size, arch, large_alpha | overrides)


def named_config(cls, table, size, arch, fields):
    """The config `cls` of a named size from a table arch -> size -> (width, heads, layers), as in [N] Table 1."""
    for what, name, known in (("arch", arch, table), (f"size of {arch}", size, table.get(arch, ()))):
        if name not in known:
            raise ConfigError(f"{what} {name!r} is not one of {', '.join(known)}{nearest(name, known)}")
    width, heads, layers = table[arch][size]
    return make_config(cls, dict(arch=arch, width=width, heads=heads, layers=layers) | fields)


def make_config(cls, fields):
    """cls(**fields) with a ConfigError for a field that a config ([N] Section B.1) does not have."""
    known = cls.__dataclass_fields__
    for name in fields:
        if name not in known:
            raise ConfigError(f"{cls.__name__} has no field {name!r}{nearest(name, known)}")
    return cls(**fields)


def patchify(x, P):
    """(B, C, H, W) -> (B, n, P^2 C): non-overlapping P x P patches, pixels by row, column, channel as in [N]'s code."""
    B, C, H, W = x.shape
    return x.view(B, C, H // P, P, W // P, P).permute(0, 2, 4, 3, 5, 1).reshape(B, (H // P) * (W // P), P * P * C)


def unpatchify(patches, P, channels=3):
    """The inverse of `patchify` for square images ([B] Section 7.6): (B, n, P^2 C) -> (B, C, H, H)."""
    B, n, _ = patches.shape
    h = math.isqrt(n)
    return patches.view(B, h, h, P, P, channels).permute(0, 5, 1, 3, 2, 4).reshape(B, channels, h * P, h * P)


def sincos_positions(d, side):
    """The fixed table of MAE ([B] Section 7.6) for a class token (a row of zeros) and side x side patches: (1, 1 + side^2, d).

    Half of the features encode the column, half the row, each as sin and cos at d / 4 frequencies from 1 towards 1e-4."""
    omega = 10000 ** (-torch.arange(d // 4, dtype=torch.float64) / (d / 4))
    angle = torch.arange(side, dtype=torch.float64)[:, None] * omega                        # (side, d / 4)
    code = torch.cat([angle.sin(), angle.cos()], 1)                                         # (side, d / 2)
    column, row = code.repeat(side, 1), code.repeat_interleave(side, 0)                     # (side^2, d / 2)
    table = torch.cat([column, row], 1)
    return torch.cat([torch.zeros(1, d, dtype=torch.float64), table]).float()[None]


class ImageEncoder(nn.Module):
    """Patches to tokens, a class token in front, positions, then the layers.  [N] Section B.1.1, [B] Section 7.3.

    encoder(x) takes (B, C, H, W) and returns the tokens (B, 1 + n, d). H and W may differ from config.image_size if the
    patch divides them: learned positions are then interpolated (fine-tuning, multi-crop)."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        patch = c.channels * c.patch_size ** 2
        self.embed = nn.Sequential(nn.LayerNorm(patch), nn.Linear(patch, c.width), nn.LayerNorm(c.width)) \
            if c.stem == "norm" else nn.Sequential(nn.Linear(patch, c.width))
        self.class_token = nn.Parameter(torch.zeros(1, 1, c.width))
        side = c.image_size // c.patch_size
        if c.positions == "learned":
            self.positions = nn.Parameter(torch.zeros(1, 1 + side ** 2, c.width))
        else:
            self.register_buffer("positions", sincos_positions(c.width, side))
        rates = [c.drop_path * l / max(c.layers - 1, 1) for l in range(c.layers)]
        self.layers = nn.ModuleList(Layer(c, drop_path=rate) for rate in rates)
        self.norm = nn.LayerNorm(c.width, 1e-6) if c.final_norm else nn.Identity()      # ViT's eps, also behind CRATE layers (MAE)
        self.init_weights()

    def init_weights(self):
        """As the authors of each arch: released CRATE leaves Linears at PyTorch's default and draws class token and positions
        from N(0, 1); CRATE-alpha, ToST and ViT draw weights and positions from N(0, 0.02), but for CRATE-alpha's embedding
        (Kaiming, our choice) ([N] Section B.1, [B] Section 7.5)."""
        c = self.config
        small = c.arch not in CRATE_FAMILY
        with torch.no_grad():
            for module in self.modules():
                if small and isinstance(module, nn.Linear):
                    nn.init.trunc_normal_(module.weight, std=0.02)
                    if module.bias is not None:
                        nn.init.zeros_(module.bias)
            if c.arch == "crate-alpha":
                nn.init.kaiming_uniform_(self.embed[0].weight)
            nn.init.normal_(self.class_token, std=1e-6 if c.arch == "crate-alpha" else 0.02 if small else 1.0)
            if isinstance(self.positions, nn.Parameter):
                nn.init.normal_(self.positions, std=0.02 if small else 1.0)

    def position_table(self, rows, columns):
        """Positions (1, 1 + n, d) for another grid of patches by bicubic interpolation, the class token's untouched."""
        side = self.config.image_size // self.config.patch_size
        if rows == columns == side:
            return self.positions
        grid = self.positions[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        grid = F.interpolate(_exact(grid)[0], size=(rows, columns), mode="bicubic", align_corners=False)
        return torch.cat([self.positions[:, :1], grid.flatten(2).mT.to(self.positions.dtype)], 1)

    def tokens(self, x):
        """Z^1 of [N] Section B.1.1: (B, C, H, W) -> (B, 1 + n, d)."""
        P = self.config.patch_size
        B, C, H, W = x.shape
        if H % P or W % P:
            raise ConfigError(f"patch_size={P} does not divide an image of {H} x {W} pixels")
        Z = self.embed(patchify(x, P))
        Z = torch.cat([self.class_token.expand(B, -1, -1), Z], 1) + self.position_table(H // P, W // P)
        return F.dropout(Z, self.config.dropout, self.training)

    def forward(self, x, trace=None, outputs=None):
        """(B, C, H, W) -> (B, 1 + n, d). A list given as `trace` receives one LayerTrace a layer, as `outputs` one Z^{l+1}."""
        return self.norm(run_layers(self.layers, self.tokens(x), trace, outputs))


class ImageClassifier(nn.Module):
    """Encoder, pooling, and a linear head (behind a LayerNorm unless the encoder ends with one).  [N] Section B.1.1.

    model(x) takes (B, C, H, W) and returns logits (B, classes)."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.encoder = ImageEncoder(c)
        norm = nn.Identity() if c.final_norm else nn.LayerNorm(c.width, c.norm_eps)
        self.head = nn.Sequential(norm, nn.Linear(c.width, c.classes))
        if c.arch not in CRATE_FAMILY:
            nn.init.trunc_normal_(self.head[1].weight, std=0.02)
            nn.init.zeros_(self.head[1].bias)

    def pool(self, Z):
        """(B, 1 + n, d) -> (B, d): the class token ([B] Eq. (7.2.23)), or the mean of the others ([N] Algorithm 1 includes it)."""
        return Z[:, 0] if self.config.pool == "class" else Z[:, 1:].mean(1)

    def forward(self, x, trace=None, outputs=False):
        """(B, C, H, W) -> logits (B, classes), or (logits, every Z^{l+1}) if `outputs`. A list given as `trace` receives LayerTraces."""
        kept = [] if outputs else None
        logits = self.head(self.pool(self.encoder(x, trace, kept)))
        return (logits, kept) if outputs else logits

    def train_flops(self, image_size=None):
        """Floating-point operations of forward and backward for one image; see train_flops_per_token ([J] Eq. (44))."""
        c = self.config
        n = 1 + ((image_size or c.image_size) // c.patch_size) ** 2
        patches = 6 * (n - 1) * c.channels * c.patch_size ** 2 * c.width
        return n * train_flops_per_token(self.encoder.layers, n) + patches + 6 * c.width * c.classes

    @classmethod
    def from_official(cls, state_dict, heads=None):
        """The published CRATE (and CRATE-alpha) image checkpoints of [N] and [B], as a model in evaluation mode.

        Takes the file's content, or the state dict under its key "state_dict", with or without "module." before each name.
        Width, patch, image size, depth and classes are read off the tensors, heads off the published sizes (or `heads`).
        Raises ConfigError naming the first tensor that does not fit."""
        tensors = official_tensors(state_dict)
        alpha = "conv1.weight" in tensors
        first = "conv1.weight" if alpha else "to_patch_embedding.2.weight"
        embed, positions, head = (official_tensor(tensors, name, ndim) for name, ndim in
                                  ((first, 4 if alpha else 2), ("pos_embedding", 3), ("mlp_head.1.weight", 2)))
        d, n = embed.shape[0], positions.shape[1] - 1
        P, side = math.isqrt(embed[0].numel() // 3), math.isqrt(max(n, 0))
        if P * P * 3 != embed[0].numel() or P == 0:
            raise ConfigError(f"{first} has shape {tuple(embed.shape)}, which is no square patch of three channels")
        if side * side != n or n == 0:
            raise ConfigError(f"pos_embedding has shape {tuple(positions.shape)}, which is no square grid and a class token")
        layers = official_depth(tensors, "transformer.layers.")
        if heads is None:
            arch = "crate-alpha" if alpha else "crate"
            published = {width: K for width, K, _ in IMAGE_SIZES[arch].values()}
            if d not in published:
                raise ConfigError(f"no published {arch} has width {d}: say how many heads this one has (heads=)")
            heads = published[d]
        model = cls(ImageConfig(arch="crate-alpha" if alpha else "crate", width=d, heads=heads, layers=layers,
                                image_size=P * side, patch_size=P, classes=head.shape[0]))
        names = {"encoder.class_token": "cls_token", "encoder.positions": "pos_embedding"}
        for ours, theirs in ({"encoder.embed.0": "conv1"} if alpha else
                             {f"encoder.embed.{i}": f"to_patch_embedding.{i + 1}" for i in range(3)}).items():
            names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
        for i in range(2):
            names |= {f"head.{i}.{kind}": f"mlp_head.{i}.{kind}" for kind in ("weight", "bias")}
        for l in range(layers):
            ours, theirs = f"encoder.layers.{l}", f"transformer.layers.{l}"
            for kind in ("weight", "bias"):
                names |= {f"{ours}.norm1.{kind}": f"{theirs}.0.norm.{kind}",
                          f"{ours}.norm2.{kind}": f"{theirs}.1.norm.{kind}",
                          f"{ours}.attention.W.{kind}": f"{theirs}.0.fn.to_out.0.{kind}"}
            names[f"{ours}.attention.U.weight"] = f"{theirs}.0.fn.qkv.weight"
            names |= {f"{ours}.sparsification.D": f"{theirs}.1.fn.D", f"{ours}.sparsification.D_hat": f"{theirs}.1.fn.D1"} \
                if alpha else {f"{ours}.sparsification.D": f"{theirs}.1.fn.weight"}
        if alpha:
            tensors[first] = embed.permute(0, 2, 3, 1).flatten(1)        # a P x P convolution is a Linear on patches
        return fill_official(model, tensors, names)


def official_tensors(content):
    """The flat name -> tensor dict inside an official checkpoint of [N] or [B], without "module."; ConfigError if none."""
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise ConfigError("not an official checkpoint: no dictionary of tensors in it")
    return {str(k).removeprefix("module."): v for k, v in content.items()}


def official_tensor(tensors, name, ndim):
    """tensors[name] of an official checkpoint ([N] or [B]), or a ConfigError that names it."""
    if name not in tensors:
        raise ConfigError(f"not an official checkpoint of this kind: {name} is missing")
    if tensors[name].ndim != ndim:
        raise ConfigError(f"{name} has shape {tuple(tensors[name].shape)}, not {ndim} dimensions")
    return tensors[name]


def official_depth(tensors, prefix):
    """The number of layers in an official checkpoint ([N] or [B]): 1 + the largest index that follows the prefix."""
    index = [int(i) for i in (name[len(prefix):].split(".")[0] for name in tensors if name.startswith(prefix)) if i.isdecimal()]
    if not index:
        raise ConfigError(f"not an official checkpoint of this kind: no tensor's name begins with {prefix}")
    return 1 + max(index)


def fill_official(model, tensors, names):
    """Copies official tensors ([N] or [B]) into `model` by the table our name -> their name, each checked; returns the model."""
    left = dict(tensors)
    ours = model.state_dict()
    for name, target in ours.items():
        if name not in names or names[name] not in left:
            raise ConfigError(f"{names.get(name, name)} is missing from the official checkpoint")
        found = left.pop(names[name])
        if found.shape != target.shape:
            raise ConfigError(f"{names[name]} has shape {tuple(found.shape)}, expected {tuple(target.shape)}")
        target.copy_(found)
    if left:
        raise ConfigError(f"{next(iter(left))} is in the official checkpoint, but has no place in this model")
    return model.eval()


# ---------------------------------------------------------------------------------------------------------------------
# Masked autoencoder
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(kw_only=True)
class MAEConfig(ImageConfig):
    """An encoder of `layers` layers and the decoder that mirrors it. [B] Section 7.6; None means: as CRATE-MAE's released code."""
    decoder_layers: int | None = None       # None: as many as encode
    decoder_width: int | None = None        # None: the encoder's; another needs mask_tokens=after
    decoder_heads: int | None = None
    mask_ratio: float = 0.75
    mask_tokens: str = "before"             # before the encoder (released CRATE-MAE), or after it (He et al.)
    normalize_targets: bool = False         # each patch to mean 0 and variance 1
    stem: str | None = "plain"
    positions: str = "sincos"
    final_norm: bool | None = True

    def __post_init__(self):
        super().__post_init__()
        for name in ("layers", "width", "heads"):
            if getattr(self, f"decoder_{name}") is None:
                setattr(self, f"decoder_{name}", getattr(self, name))
        self._whole("decoder_layers", "decoder_width", "decoder_heads")
        if not 0 < self.mask_ratio < 1:
            raise ConfigError(f"mask_ratio={self.mask_ratio} must be between 0 and 1")
        if not 1 <= self.masked() < self.patches():
            raise ConfigError(f"mask_ratio={self.mask_ratio} leaves {self.patches() - self.masked()} of {self.patches()} patches")
        if self.mask_tokens not in ("before", "after"):
            raise ConfigError(f"mask_tokens={self.mask_tokens!r} is not one of before, after")
        if self.mask_tokens == "before" and self.decoder_width != self.width:
            raise ConfigError(f"decoder_width={self.decoder_width} needs mask_tokens=after: before, encoder and decoder share the tokens")
        if not self.same_decoder() and self.decoder_width % self.decoder_heads:
            raise ConfigError(f"decoder_heads={self.decoder_heads} does not divide decoder_width={self.decoder_width}")
        if self.mask_tokens == "after" and self.decoder_width % 4:
            raise ConfigError(f"sincos positions need a decoder_width that 4 divides, not {self.decoder_width}")

    def same_decoder(self):
        """Whether the decoder has the encoder's width and heads, and so its head_dim ([B] Section 7.6)."""
        return (self.decoder_width, self.decoder_heads) == (self.width, self.heads)

    def patches(self):
        """n, the number of patches of a picture ([B] Section 7.6)."""
        return (self.image_size // self.patch_size) ** 2

    def masked(self):
        """How many of them are hidden ([B] Section 7.6); the rest is rounded down, as in the released code."""
        return self.patches() - int(self.patches() * (1 - self.mask_ratio) + 1e-9)      # 100 * (1 - 0.9) is a little below 10


MAE_SIZES = {arch: {"small": (576, 12, 12), "base": (768, 12, 12)} for arch in CRATE_FAMILY + ("aot",)} | {
    arch: {"small": (384, 6, 12), "base": (768, 12, 12)} for arch in ("crate-alpha", "transformer", "aot-mhsa")} | {
    "tost": {"small": (384, 8, 12)}}


def mae_config(size, arch="crate", **overrides):
    """The MAEConfig of a named size, with any field overridden. [B] Section 7.6.

    CRATE-MAE encodes with 12 layers and decodes with 12, lambda 0.5; ViT-MAE decodes with 8 layers of width 512 (small) or 768.
    Raises ConfigError for an unknown size, arch or field."""
    defaults = dict(lambd=0.5) if arch in CRATE_FAMILY else {}
    if arch == "transformer":
        defaults = dict(mask_tokens="after", decoder_layers=8, decoder_width=512 if size == "small" else 768, decoder_heads=16)
    return named_config(MAEConfig, MAE_SIZES, size, arch, defaults | overrides)


class DecoderLayer(nn.Module):
    """A CRATE layer run backwards.  [B] Eq. (7.6.3)-(7.6.4), [J] Section 3.3.

        Y = D~ LN(Z~),   Z~' = Y - MSSA(LN(Y))

    Sparsification first, since it came last, and the sign of the compression reversed: D~ takes the place of the inverse of
    ISTA (on codes >= 0 with orthogonal D and eta = 1 it is exact at lambda = 0, at most lambda sqrt(nnz) off otherwise), and
    I - MSSA that of I + MSSA, up to second order in MSSA. What LN divides out and ReLU cuts off cannot be brought back: it
    has to be learned. D~ is a plain d x d map without bias or residual. (B, n, d) -> (B, n, d)."""

    def __init__(self, config):
        super().__init__()
        c = config
        self.norm1 = nn.LayerNorm(c.width, c.norm_eps, bias=c.norm_bias)
        self.D = nn.Parameter(torch.empty(c.width, c.width))
        nn.init.kaiming_uniform_(self.D)
        self.norm2 = nn.LayerNorm(c.width, c.norm_eps, bias=c.norm_bias)
        self.attention = MSSA(c.width, c.heads, c.head_dim, ARCHS[c.arch].output, step=c.step, bias=c.out_bias, dropout=c.dropout)
        self.sparsification = None

    def forward(self, Z):
        """(B, n, d) -> (B, n, d)."""
        Y = self.norm1(Z) @ self.D.mT
        return Y - self.attention(self.norm2(Y))

    def trace(self, Z):
        """The same as a LayerTrace; `half` is Y of [B] Eq. (7.6.3)."""
        Y = self.norm1(Z) @ self.D.mT
        return LayerTrace(Y, Y - self.attention(self.norm2(Y)), self.attention.map(self.norm2(Y)))


class MaskedAutoencoder(nn.Module):
    """Hides three quarters of the patches and learns to paint them.  [B] Eq. (7.6.1)-(7.6.7).

    model(x, noise) takes pictures (B, C, H, W) and uniform noise (B, n) that chooses the patches to hide, and returns the
    mean squared error on those. With mask_tokens="before" a mask token (zero in [B]) takes their place before the encoder, which
    so sees all 1 + n tokens, and positions are added once (released CRATE-MAE; [B] Eq. (7.6.6) has the decoder undo them);
    with "after" the encoder sees the visible ones only."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.encoder = ImageEncoder(c)
        d = c.decoder_width
        self.mask_token = nn.Parameter(torch.zeros(1, 1, d))
        if c.mask_tokens == "after":
            self.decoder_embed = nn.Linear(c.width, d)
            self.register_buffer("decoder_positions", sincos_positions(d, c.image_size // c.patch_size))
        theirs = c if c.same_decoder() else replace(c, width=d, heads=c.decoder_heads, head_dim=None)
        layer = DecoderLayer if c.arch in CRATE_FAMILY else Layer
        self.decoder = nn.ModuleList(layer(theirs) for _ in range(c.decoder_layers))
        self.decoder_norm = nn.LayerNorm(d, 1e-6)
        self.predict = nn.Linear(d, c.channels * c.patch_size ** 2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.normal_(self.encoder.class_token, std=0.02)

    def hidden(self, noise):
        """(B, n) noise -> (B, n) bool, true on the patches that are hidden: those with the largest noise ([B] Section 7.6)."""
        return noise.argsort(1).argsort(1) >= self.config.patches() - self.config.masked()

    def encode(self, x, noise, trace=None):
        """The encoder's tokens: (B, 1 + n, d) before, (B, 1 + visible, d) after ([B] Section 7.6, Eq. (7.3.3)-(7.3.4))."""
        e, c = self.encoder, self.config
        Z, positions = e.embed(patchify(x, c.patch_size)), e.positions
        first = (e.class_token + positions[:, :1]).expand(len(x), -1, -1)
        if c.mask_tokens == "before":
            Z = torch.where(self.hidden(noise)[..., None], self.mask_token.to(Z.dtype), Z)
        Z = Z + positions[:, 1:]
        if c.mask_tokens == "after":
            visible = noise.argsort(1)[:, :c.patches() - c.masked(), None]
            Z = Z.gather(1, visible.expand(-1, -1, c.width))
        return e.norm(run_layers(e.layers, torch.cat([first, Z], 1), trace))

    def decode(self, Z, noise, trace=None):
        """The encoder's tokens -> predicted patches (B, n, P^2 C) ([B] Eq. (7.6.2), (7.6.6))."""
        if self.config.mask_tokens == "after":
            Z = self.decoder_embed(Z)
            order = noise.argsort(1)
            rest = self.mask_token.to(Z.dtype).expand(len(Z), order.shape[1] - Z.shape[1] + 1, -1)
            patches = torch.cat([Z[:, 1:], rest], 1).gather(1, order.argsort(1)[..., None].expand(-1, -1, Z.shape[-1]))
            Z = torch.cat([Z[:, :1], patches], 1) + self.decoder_positions
        return self.predict(self.decoder_norm(run_layers(self.decoder, Z, trace)))[:, 1:]

    def targets(self, x):
        """What is to be predicted, (B, n, P^2 C): the patches, each normalised by its own unbiased variance + 1e-6 if asked for."""
        patches = patchify(x, self.config.patch_size)
        if not self.config.normalize_targets:
            return patches
        mean, var = patches.mean(-1, keepdim=True), patches.var(-1, keepdim=True)
        return (patches - mean) / (var + 1e-6).sqrt()

    def forward(self, x, noise, trace=None):
        """The mean squared error, [B] Eq. (7.6.7), over the hidden patches only, as in the released code."""
        predicted = self.decode(self.encode(x, noise, trace), noise, trace)
        predicted, targets = _exact(predicted, self.targets(x))
        error = (predicted - targets).square().mean(-1)
        hidden = self.hidden(noise)
        return (error * hidden).sum() / hidden.sum()

    def train_flops(self):
        """Floating-point operations of forward and backward for one image; see train_flops_per_token ([J] Eq. (44))."""
        c = self.config
        patch = c.channels * c.patch_size ** 2
        n, m = 1 + c.patches(), 1 + c.patches() - (c.masked() if c.mask_tokens == "after" else 0)
        total = m * train_flops_per_token(self.encoder.layers, m) + n * train_flops_per_token(self.decoder, n)
        total += 6 * m * c.width * c.decoder_width if c.mask_tokens == "after" else 0
        return total + 6 * (n - 1) * patch * c.width + 6 * n * patch * c.decoder_width

    @classmethod
    def from_official(cls, state_dict, heads=None):
        """The published CRATE-MAE checkpoints of [B] Section 7.6, as a model in evaluation mode.

        Takes what ImageClassifier.from_official takes. Of the two position tables the one in use is read; the other and
        `decoder_embed`, which the released model never applies, are left out. Raises ConfigError naming the first tensor
        that does not fit."""
        tensors = official_tensors(state_dict)
        embed = official_tensor(tensors, "patch_embed.proj.weight", 4)
        positions = official_tensor(tensors, "decoder_pos_embed", 3)
        d, P, side = embed.shape[0], embed.shape[-1], math.isqrt(max(positions.shape[1] - 1, 0))
        if embed.shape[1:] != (3, P, P):
            raise ConfigError(f"patch_embed.proj.weight has shape {tuple(embed.shape)}, which is no square patch of three channels")
        if side * side != positions.shape[1] - 1 or side == 0:
            raise ConfigError(f"decoder_pos_embed has shape {tuple(positions.shape)}, which is no square grid and a class token")
        published = {width: K for width, K, _ in MAE_SIZES["crate"].values()}
        if heads is None and d not in published:
            raise ConfigError(f"no published CRATE-MAE has width {d}: say how many heads this one has (heads=)")
        layers, decoder_layers = official_depth(tensors, "blocks."), official_depth(tensors, "decoder_blocks.")
        model = cls(MAEConfig(width=d, heads=heads or published[d], layers=layers, decoder_layers=decoder_layers, lambd=0.5,
                              image_size=P * side, patch_size=P))
        names = {"encoder.class_token": "cls_token", "mask_token": "mask_token", "encoder.positions": "decoder_pos_embed"}
        for kind in ("weight", "bias"):
            names |= {f"encoder.embed.0.{kind}": f"patch_embed.proj.{kind}", f"encoder.norm.{kind}": f"norm.{kind}",
                      f"decoder_norm.{kind}": f"decoder_norm.{kind}", f"predict.{kind}": f"decoder_pred.{kind}"}
        for ours, theirs, count, mssa_at in (("encoder.layers", "blocks", layers, 0), ("decoder", "decoder_blocks", decoder_layers, 1)):
            for l in range(count):
                block, attention, other = f"{theirs}.{l}.layers.0", ("norm1", "norm2")[mssa_at], ("norm2", "norm1")[mssa_at]
                for kind in ("weight", "bias"):
                    names |= {f"{ours}.{l}.{attention}.{kind}": f"{block}.{mssa_at}.norm.{kind}",
                              f"{ours}.{l}.{other}.{kind}": f"{block}.{1 - mssa_at}.norm.{kind}",
                              f"{ours}.{l}.attention.W.{kind}": f"{block}.{mssa_at}.fn.to_out.0.{kind}"}
                names[f"{ours}.{l}.attention.U.weight"] = f"{block}.{mssa_at}.fn.qkv.weight"
                names[f"{ours}.{l}.{'D' if mssa_at else 'sparsification.D'}"] = f"{block}.{1 - mssa_at}.fn.weight"
        tensors["patch_embed.proj.weight"] = embed.permute(0, 2, 3, 1).flatten(1)
        for unused in ("pos_embed", "decoder_embed.weight", "decoder_embed.bias"):
            tensors.pop(unused, None)
        return fill_official(model, tensors, names)


# ---------------------------------------------------------------------------------------------------------------------
# Text models
# ---------------------------------------------------------------------------------------------------------------------

# width, heads, layers. Causal CRATE: [B] Section 7.4; CRATE-alpha, ToST, AoT and the GPT-2 baselines: [B] Section 7.5, inferred
# from the published parameter counts, which CRATE-alpha-B (109.4M, not "120M") does not meet; causal CRATE's "small" is ours.
_SMALL, _BASE, _MEDIUM, _LARGE = (512, 8, 12), (768, 12, 12), (1024, 16, 24), (1280, 20, 36)
TEXT_SIZES = {arch: {"small": _SMALL, "base": _BASE} for arch in CRATE_FAMILY + ("crate-alpha", "transformer")} | {
    "tost": {"base": _BASE, "medium": _MEDIUM, "large": _LARGE},
    "aot": {"base": _MEDIUM, "medium": _LARGE}, "aot-mhsa": {"base": (896, 14, 24)}}


@dataclass(kw_only=True)
class TextConfig(BackboneConfig):
    """A language model; None means: as nanoGPT and ToST's text code have it, without biases. [B] Sections 7.4, 7.5."""
    context: int = 1024
    vocab_size: int = 50304         # GPT-2's 50257, padded to a multiple of 64
    causal: bool = True             # False: every token sees all others (masked language modelling)
    norm_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        super().__post_init__()
        for name in ("context", "vocab_size"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 2:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be a whole number, 2 or more")
        self.norm_eps = 1e-5 if self.norm_eps is None else self.norm_eps
        self.qkv_bias, self.out_bias = bool(self.qkv_bias), bool(self.out_bias)
        if self.layer_scale is None:
            # Released ToST has 1e-5. Then the last LN sees little but the embedding, and the tied head gives the token just read
            # a logit of 0.014 d: the first loss is 7 % above ln V at d = 768 and worse beyond. With 1 it is ln V.
            self.layer_scale = 1.0 if self.arch == "tost" else 0.0


def text_config(size, arch="crate", **overrides):
    """The TextConfig of a named size, with any field overridden. [B] Sections 7.4, 7.5.

    Raises ConfigError for an unknown size, arch or field."""
    return named_config(TextConfig, TEXT_SIZES, size, arch, overrides)


class _LinearCrossEntropy(torch.autograd.Function):
    """The mean cross-entropy of softmax(Z W^*), [B] Eq. (7.4.1), and its gradients in one pass; see linear_cross_entropy."""

    @staticmethod
    def forward(ctx, Z, W, targets, block, wanted):
        """Z (N, d), W (V, d), targets (N,) -> the loss; the gradients, if `wanted`, are kept for backward."""
        count = (targets >= 0).sum().clamp_min(1)
        dZ = torch.empty_like(Z) if wanted else None
        dW = torch.zeros(W.shape, dtype=torch.promote_types(W.dtype, torch.float32), device=W.device) if wanted else None
        total = Z.new_zeros((), dtype=torch.promote_types(Z.dtype, torch.float32))
        for start in range(0, len(Z), block):
            z, y = Z[start:start + block], targets[start:start + block]
            logits = (z @ W.mT).to(total.dtype)
            valid, index = y >= 0, y.clamp_min(0)[:, None]
            norm = logits.logsumexp(-1, keepdim=True)
            total = total + ((norm - logits.gather(-1, index))[:, 0] * valid).sum()
            if wanted:                                                   # d loss / d logits = (softmax - one-hot) / count
                slope = logits.sub_(norm).exp_().scatter_add_(-1, index, -torch.ones_like(norm))
                slope = slope.mul_((valid.to(slope.dtype) / count)[:, None]).to(Z.dtype)
                dZ[start:start + block] = slope @ W
                dW += slope.mT @ z
        ctx.save_for_backward(*(t for t in (dZ, dW) if t is not None))
        return total / count

    @staticmethod
    def backward(ctx, grad):
        dZ, dW = ctx.saved_tensors
        return grad.to(dZ.dtype) * dZ, (grad * dW).to(dZ.dtype), None, None, None


def linear_cross_entropy(Z, W, targets, block=4096):
    """Mean over targets >= 0 of -log softmax(Z W^*)_target, [B] Eq. (7.4.1) and (7.4.9), for tokens Z (..., d) and the tied head W (V, d).

    The logits of GPT-2's vocabulary outweigh everything else in memory. Since the loss is a scalar, its gradient is
    known up to a factor in the forward pass already: logits live for `block` tokens at a time and are never kept."""
    if torch.is_autocast_enabled(Z.device.type):
        dtype = torch.get_autocast_dtype(Z.device.type)
        Z, W = Z.to(dtype), W.to(dtype)
    wanted = torch.is_grad_enabled() and (Z.requires_grad or W.requires_grad)
    with torch.autocast(Z.device.type, enabled=False):
        return _LinearCrossEntropy.apply(Z.flatten(0, -2), W, targets.flatten(), block, wanted)


class LanguageModel(nn.Module):
    """Token and position embeddings, layers, a last LN, and the head, which is the token embedding.  [B] Section 7.4.

    model(ids) takes (B, n) and returns logits (B, n, V); model(ids, targets) returns the mean cross-entropy over targets >= 0."""

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.width)
        self.positions = nn.Parameter(torch.zeros(c.context, c.width))
        rates = [c.drop_path * l / max(c.layers - 1, 1) for l in range(c.layers)]
        self.layers = nn.ModuleList(Layer(c, causal=c.causal, context=c.context, drop_path=rate) for rate in rates)
        self.norm = nn.LayerNorm(c.width, c.norm_eps, bias=c.norm_bias)
        self.init_weights()

    def init_weights(self):
        """nanoGPT's: N(0, 0.02), and 0.02 / sqrt(2 L) for the maps that end a residual branch ([B] Section 7.4). D and D_hat as in model.ISTA, ODL."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                last = name.endswith((".attention.W", ".sparsification.down"))
                nn.init.normal_(module.weight, std=0.02 / (2 * self.config.layers) ** 0.5 if last else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def tokens(self, ids, start=0):
        """Z^1 of [B] Eq. (7.4.2): (B, n) -> (B, n, d), the first token at position `start`. Raises ConfigError past the context."""
        n = ids.shape[1]
        if start + n > self.config.context:
            raise ConfigError(f"{start + n} tokens exceed the context of {self.config.context}")
        Z = self.embed(ids) + self.positions[start:start + n]
        return F.dropout(Z, self.config.dropout, self.training)

    def forward(self, ids, targets=None, trace=None):
        """(B, n) -> logits (B, n, V), or the loss if there are targets (B, n), -1 where none. `trace` receives LayerTraces."""
        Z = self.norm(run_layers(self.layers, self.tokens(ids), trace))
        return Z @ self.embed.weight.mT if targets is None else linear_cross_entropy(Z, self.embed.weight, targets)

    def count(self):
        """Parameters, positions not counted, as [B] Tables 7.5 to 7.11 count them."""
        return sum(p.numel() for name, p in self.named_parameters() if name != "positions")

    def train_flops(self):
        """Floating-point operations of forward and backward per token at full context; see train_flops_per_token ([J] Eq. (44))."""
        return train_flops_per_token(self.layers, self.config.context) + 6 * self.embed.weight.numel()

    def advance(self, ids, state):
        """Logits (B, V) of the token after `ids` (B, m), which continue the sequences in `state`, a dict for each layer.

        The first call takes any m, later ones one token each. What `state` keeps is one tensor a layer for MSSA, two for MHSA,
        running sums for TSSA ([B] Section 7.5.2). Raises ConfigError for a model that is not causal."""
        if not self.config.causal:
            raise ConfigError("a model with causal=False sees all tokens at once: there is no next one")
        if not state:
            state.extend(dict(room=self.config.context) for _ in self.layers)
        Z = self.tokens(ids, state[0].get("n", 0))
        for layer, past in zip(self.layers, state):
            Z = layer(Z, past)
        return self.norm(Z[:, -1]) @ self.embed.weight.mT

    @torch.no_grad()
    def stream(self, ids, n, temperature=1.0, top_k=None, top_p=None, stop=None, generator=None):
        """Yields n times the next tokens (B,) of the prompts `ids` (B, m), drawn from [B] Eq. (7.4.9); ends early when all rows met `stop`.

        temperature 0 is greedy; top_k and top_p keep the likeliest tokens, by number or by total probability. At the end of
        the context the last half of it is read again and the rest forgotten. A row that met `stop` repeats it."""
        state, half = [], self.config.context // 2
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        ids = new = ids if ids.shape[1] <= self.config.context else ids[:, -half:]
        for _ in range(n):
            if state and state[0]["n"] == self.config.context:
                state, new = [], ids[:, -half:]
            chosen = choose(self.advance(new, state), temperature, top_k, top_p, generator)
            if stop is not None:
                chosen = torch.where(ended, stop, chosen)
                ended |= chosen == stop
            yield chosen
            if stop is not None and ended.all():
                return
            new = chosen[:, None]
            ids = torch.cat([ids[:, -self.config.context:], new], 1)

    def generate(self, ids, n, **options):
        """The prompts `ids` (B, m) with up to n tokens behind them; options as in `stream` ([B] Eq. (7.4.9))."""
        return torch.cat([ids, *(t[:, None] for t in self.stream(ids, n, **options))], 1)


def choose(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token a row from logits (B, V), [B] Eq. (7.4.9): (B,). See LanguageModel.stream for the options."""
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    probability = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probability.sort(-1, descending=True)
        ordered[:, 1:] = ordered[:, 1:].masked_fill((ordered.cumsum(-1) - ordered)[:, 1:] >= top_p, 0.0)   # the likeliest stays
        probability = torch.zeros_like(probability).scatter_(-1, order, ordered)
    return torch.multinomial(probability, 1, generator=generator)[:, 0]
