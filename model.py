"""White-box transformers: every operator of the CRATE papers beside its equation, then the models.

A layer takes two steps that are derived from the sparse rate reduction,
max R(Z) - R^c(Z | U) - lambda ||Z||_0:

    Z^{l+1/2} = Z^l + MSSA(LN(Z^l))       compress tokens against learned subspaces U_1 .. U_K:
                                          derived from a step down R^c, though it can raise R^c
    Z^{l+1}   = ISTA(LN(Z^{l+1/2}))       sparsify them in a learned dictionary D:
                                          a proximal gradient step on a LASSO

What differs from a plain transformer:
- one matrix U is query, key and value: each head compares and averages the projections U_k^* Z;
- a d x d dictionary and a ReLU replace the MLP, with the residual inside and none around them;
- so a layer of width d has 3 d^2 parameters where a transformer's has 12 d^2.

Sources: [N] White-Box Transformers via Sparse Rate Reduction (NeurIPS 2023); [J] White-Box
Transformers via Sparse Rate Reduction: Compression Is All There Is? (JMLR 2024); [S] An In-depth
Investigation of Sparse Rate Reduction in Transformer-like Models (NeurIPS 2024); [B] Learning Deep
Representations of Data Distributions, Chapter 7. "Released code" is that of the authors.

The papers write Z in R^{d x n}, one token per column. Here Z is (B, n, d), one token per row, and
(U_k^* Z)^* is w = Z @ U_k. The row softmax of w @ w.mT, which is symmetric, is the column softmax
of (U_k^*Z)^*(U_k^*Z), transposed, as rows need it. K heads (subspaces) have dimension p each."""
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend

# ---- The objective ------------------------------------------------------------------------------
# Rates are in nats a token; ||Z||_0 counts the entries of all. eps is the distortion up to which
# tokens are coded. The papers give none: 0.5 is our choice, for tokens of norm sqrt(d), as LN's. A
# direction along which tokens have mean square eps^2 / d adds (log 2) / 2 to R. Compare rates at
# equal eps only: the released code of [N] Fig. 3 has 0.1, SimDINO sqrt(0.05)

def at_least_float32(t):
    """t in float64 if it is already, else in float32: bfloat16 is too coarse for a logdet."""
    return t if t.dtype == torch.float64 else t.float()


def gram_coding_rate(G, a):
    """1/2 logdet(I + a G) of Gram matrices G (..., m, m): [J] Eq. (8). Returns (...).

    G is float32 or float64, outside autocast. With I + a G = L L^* it is the sum of log diag(L),
    NaN where the factorization fails: to raise an error, the CPU would have to wait for the GPU."""
    eye = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    L, failed = torch.linalg.cholesky_ex(eye + a * G)
    rate = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where((failed == 0) & rate.isfinite(), rate, math.nan)


def coding_rate(Z, eps=0.5):
    """R(Z) = 1/2 logdet(I + alpha Z Z^*), alpha = d / (n eps^2).  [J] Eq. (8), [N] Eq. (7).

    The rate of coding the tokens Z (..., n, d) up to a distortion eps. Returns (...)."""
    Z = at_least_float32(Z)
    n, d = Z.shape[-2:]
    with torch.autocast(Z.device.type, enabled=False):
        # I + a Z Z^* and I + a Z^* Z have the same determinant
        return gram_coding_rate(Z @ Z.mT if n < d else Z.mT @ Z, d / (n * eps ** 2))


def subspace_coding_rate(Z, U, eps=0.5):
    """R^c(Z | U) = 1/2 sum_k logdet(I + beta (U_k^*Z)^*(U_k^*Z)), beta = p / (n eps^2).

    [J] Eq. (13), [N] Eq. (8): each token is coded in K subspaces. Z (..., n, d), U (K, d, p)."""
    Z, U = at_least_float32(Z), at_least_float32(U)
    with torch.autocast(Z.device.type, enabled=False):
        return coding_rate(Z.unsqueeze(-3) @ U, eps).sum(-1)    # the sum of R(U_k^* Z)


def sparse_rate_reduction(Z, U, eps=0.5, lambd=0.1):
    """R(Z) - R^c(Z | U) - lambda ||Z||_0, to be maximized.  [J] Eq. (15)-(16), [N] Eq. (1).

    Z (..., n, d) -> (...). [S]'s measure of a network is minus its mean over layers."""
    rates = coding_rate(Z, eps) - subspace_coding_rate(Z, U, eps)
    return rates - lambd * (Z != 0).sum((-2, -1), dtype=rates.dtype)


def subspace_coding_rate_grad(Z, U, eps=0.5, neumann=False):
    """grad_Z R^c, exact or by two terms of its Neumann series. [J] Eq. (31)-(33), [N] Eq. (66)-(69)

    exact:    beta sum_k U_k (U_k^*Z) (I + beta (U_k^*Z)^*(U_k^*Z))^{-1}
    neumann:  beta sum_k U_k U_k^*Z - beta^2 sum_k U_k (U_k^*Z)(U_k^*Z)^*(U_k^*Z)

    The series converges only where beta ||U_k^*Z||^2 < 1 (spectral norm). For rows w = Z @ U_k,
    (I_n + beta w w^*)^{-1} w = w (I_p + beta w^* w)^{-1}: the inverse of a p x p matrix."""
    Z, U = at_least_float32(Z), at_least_float32(U)
    with torch.autocast(Z.device.type, enabled=False):
        w = Z.unsqueeze(-3) @ U                                 # (U_k^* Z)^*, (..., K, n, p)
        n, p = w.shape[-2:]
        beta = p / (n * eps ** 2)
        if neumann:
            direction = w - beta * w @ (w.mT @ w)
        else:
            identity = torch.eye(p, dtype=w.dtype, device=w.device)
            direction = torch.linalg.solve(identity + beta * w.mT @ w, w, left=False)
        return beta * (direction @ U.mT).sum(-3)


def gaussian_mixture_denoise(z, U, sigma):
    """E[z_clean | z] is about sum_k softmax_k(||U_k^*z||^2 / 2 sigma^2) U_k U_k^*z.

    [J] Eq. (47), [N] Eq. (6). z (..., d) is drawn from Gaussians on subspaces with orthonormal U
    (K, d, p), plus noise of small deviation sigma. As sigma -> 0 it projects on the nearest."""
    w = torch.einsum("kdp,...d->...kp", U, z)                           # U_k^* z
    weight = torch.softmax(w.square().sum(-1) / (2 * sigma ** 2), -1)   # (..., K)
    return torch.einsum("...k,...kp,kdp->...d", weight, w, U)


# ---- The CRATE layer: MSSA compresses, ISTA sparsifies ------------------------------------------
def attention_map(q, k, scale, causal=False):
    """The row softmax of scale q k^*: q (..., m, p), k (..., n, p) -> (..., m, n). With causal, a
    token has weights on itself and those before; the queries are of the last m tokens."""
    gram = scale * (q @ k.mT)
    if causal:
        m, n = gram.shape[-2:]
        future = torch.ones(m, n, dtype=torch.bool, device=gram.device).triu(1 + n - m)
        gram = gram.masked_fill(future, -math.inf)
    return gram.softmax(-1)


def attention_output(q, k, v, scale, causal=False, dropout=0.0):
    """attention_map(q, k, scale, causal) v (B, K, m, p), by the fused kernel where it is faster."""
    m, n = q.shape[2], k.shape[2]
    causal = causal and m > 1           # a single token, the newest, sees all
    other_mask = causal and m < n       # the kernel's causal mask is that of m = n
    # up to 512 tokens a CPU (Zen 5) takes longer with its kernel for bfloat16
    slow = q.device.type == "cpu" and q.dtype == torch.bfloat16 and m <= 512
    if other_mask or slow:
        return F.dropout(attention_map(q, k, scale, causal), dropout) @ v
    return F.scaled_dot_product_attention(q, k, v, None, dropout, causal, scale=scale)


def mssa(Z, U, W=None, bias=None, scale=1.0, causal=False):
    """Multi-head subspace self-attention, as printed.

    SSA(Z | U_k) = (U_k^*Z) softmax((U_k^*Z)^*(U_k^*Z))                [J] Eq. (35), [N] Eq. (11)
    without W:  [U_1 .. U_K] stack_k SSA(Z | U_k), up to a factor beta   [J] Eq. (36), [N] Eq. (12)
    with W:     W stack_k SSA(Z | U_k)        (+ bias: [N] Algorithm 3)  [J] Eq. (37), [N] Eq. (115)

    [J] Eq. (34) derives (1 - beta kappa) Z + beta kappa MSSA(Z), where the sum of U_k U_k^* is I; a
    layer is Z + MSSA(Z), Eq. (45).
    Z (..., n, d), U (K, d, p), W (d, K p) -> (..., n, d). causal: token i attends to tokens
    <= i, [B] Eq. (7.4.4)-(7.4.7). `scale` is 1 in the equations of [N], [J] and [S], but p^-1/2 in
    [N] Algorithm 3, [B] Eq. (7.2.16), (7.3.5), the released code and class MSSA."""
    w = Z.unsqueeze(-3) @ U                                         # (U_k^* Z)^*, (..., K, n, p)
    ssa = attention_map(w, w, scale, causal) @ w                    # (..., K, n, p)
    return (ssa @ U.mT).sum(-3) if W is None else F.linear(side_by_side(ssa), W, bias)


def side_by_side(heads):
    """What K heads have of each token, in one row: (..., K, n, p) -> (..., n, K p)."""
    return heads.transpose(-3, -2).flatten(-2)


def by_head(rows, K):
    """The inverse: (..., n, K p) -> (..., K, n, p)."""
    return rows.unflatten(-1, (K, -1)).transpose(-3, -2)


class Attention(nn.Module, ABC):
    """A compression operator with K heads of dimension p. A subclass adds U (or its `bases`), `map`
    and `forward`. If `causal`, no token sees a later one, and a cache from `new_cache` keeps what a
    generation has read."""

    def __init__(self, config):
        super().__init__()
        self.heads, self.p, self.causal = config.heads, config.head_dim, config.causal
        self.dropout = config.dropout

    def bases(self):
        """U_k, or what stands for them in R^c: (K, d, p)."""
        return self.U.weight.view(self.heads, self.p, -1).mT

    @abstractmethod
    def map(self, Z):
        """What a picture of the attention to Z (B, n, d) shows, (B, K, n, n) or (B, K, n)."""

    @abstractmethod
    def forward(self, Z, cache=None):
        """Z (B, n, d) -> (B, n, d). With a cache, Z are the tokens after those that it keeps."""

    def new_cache(self, room):
        """An empty cache of at most `room` tokens."""
        return Cache(room)


class SoftmaxAttention(Attention):
    """What MSSA and MHSA share: heads that average values by the softmax of queries with keys. A
    subclass adds `project`, from tokens to heads, and `join`, back to tokens."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = self.p ** -0.5         # products of two different tokens stay of order 1
        self.rotary = config.rotary
        self.mix = first_mix(self.heads) if config.shift else None

    def forward(self, Z, cache=None):
        q, k, v = self.queries_keys_values(Z, cache)
        return self.join(self.attend(q, k, v))

    @abstractmethod
    def project(self, Z):
        """Queries, keys and values of the tokens Z, (B, K, n, p) each."""

    @abstractmethod
    def join(self, heads):
        """From the heads' averages (B, K, n, p) to tokens (B, n, d)."""

    def attend(self, q, k, v):
        """The heads' averages of v (B, K, m, p)."""
        dropout = self.dropout if self.training else 0.0
        return attention_output(q, k, v, self.scale, self.causal, dropout)

    def queries_keys_values(self, Z, cache=None):
        """The projections of Z; in language models keys and values of the cache's tokens and of Z's
        after them, with --shift and --rotary as in `shift_and_rotate`."""
        q, k, v = self.project(Z)
        if cache is not None:
            k, v = cache.append(k, v)
        return shift_and_rotate(q, k, v, self.mix, self.rotary)

    def map(self, Z):
        """The attention map (B, K, n, n): row i holds the weights of token i's average."""
        q, k, _ = self.queries_keys_values(Z)
        return attention_map(q, k, self.scale, self.causal)


class MSSA(SoftmaxAttention):
    """Multi-head subspace self-attention, with one of four ways to map the heads back to R^d.

    output      the module computes              arch      source
    learned     W stack_k SSA(Z | U_k)           crate     [J] Eq. (37), [N] Eq. (115)
    subspace    s [U_1 .. U_K] stack_k SSA       crate-c   [J] Eq. (36), [S]
    negative    - s [U_1 .. U_K] stack_k SSA     crate-n   [S]: the sign of [J] Eq. (34) reversed
    transpose   s [U_1 .. U_K]^* stack_k SSA     crate-t   [S]; needs p K = d

    s is step_size, SSA as in `mssa` with scale p^-1/2. A generation caches w = U^* Z alone."""

    def __init__(self, config):
        super().__init__(config)
        self.output, self.step_size = config.row.output, config.step_size
        self.U = nn.Linear(config.width, self.heads * self.p, bias=False)   # weight [U_1 .. U_K]^*
        if self.output == "learned":
            self.W = nn.Linear(self.heads * self.p, config.width, bias=config.surroundings.out_bias)

    def project(self, Z):
        w = by_head(self.U(Z), self.heads)                              # (U_k^* Z)^*
        return w, w, w

    def join(self, heads):
        if self.output == "learned":
            return self.W(side_by_side(heads))
        back = self.U.weight if self.output == "transpose" else self.U.weight.mT
        s = -self.step_size if self.output == "negative" else self.step_size
        return F.linear(side_by_side(heads), s * back)


def ista(Z, D, eta=0.1, lambd=0.1):
    """ISTA(Z | D) = ReLU(Z - eta D^*(D Z - Z) - eta lambda 1), as printed.

    [J] Eq. (44), [N] Eq. (17). One proximal gradient step, started at Z, on the non-negative LASSO
    1/2 ||Z - D A||^2 + lambda ||A||_1, [J] Eq. (41)-(42), in place of R - lambda ||Z||_0: a nearly
    orthogonal D leaves R as it is, Eq. (39). Z (..., n, d), D (d, d) -> (..., n, d).
    [N] Eq. (15)-(16) omit the 1/2; [B] prints + eta lambda, which would not shrink."""
    residual = Z @ D.mT - Z                                 # D Z - Z
    return F.relu(Z - eta * residual @ D - eta * lambd)


def lasso(A, X, D, lambd):
    """(lambda ||A||_1, 1/2 ||X - D A||_F^2), the terms of [J] Eq. (41), (B,) each. A (B, n, m),
    X (B, n, d), D (d, m)."""
    return lambd * A.abs().sum((1, 2)), (X - A @ D.mT).square().sum((1, 2)) / 2


class Sparsification(nn.Module, ABC):
    """The second operator of a layer: ISTA, its variants, or an MLP."""

    @abstractmethod
    def code(self, Z):
        """The sparse code (B, n, m) of Z (B, n, d); of an MLP its hidden layer."""

    def decode(self, A):
        """The output (B, n, d) of the code A; of ISTA the code itself."""
        return A

    def forward(self, Z):
        return self.decode(self.code(Z))


class ISTA(Sparsification):
    """ISTA(Z | D) as in `ista`, [J] Eq. (44), in one matmul over the tokens.

    Z - eta D^*(DZ - Z) = Z + eta (D^* - D^*D) Z; for rows it is Z + Z G with G = eta (D - D^*D),
    built once per forward pass. The identity stays outside: in bfloat16, I + G would round G more.
    eta = lambda = 0.1 as released; no run with 0.02 or 0.5 is better in [N] Table 2."""

    def __init__(self, config):
        super().__init__()
        self.eta, self.lambd = config.eta, config.lambd
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(config.width, config.width)))

    def descend(self, Z):
        """Z - eta D^*(DZ - Z), the gradient step."""
        tokens, d = Z[..., 0].numel(), Z.shape[-1]
        if tokens < d:                      # as in a generation: G would cost more
            return Z - self.eta * (Z @ self.D.mT - Z) @ self.D
        return Z + Z @ (self.eta * (self.D - self.D.mT @ self.D))

    def code(self, Z):
        return F.relu(self.descend(Z) - self.eta * self.lambd)


class LayerTrace(NamedTuple):
    tokens: torch.Tensor                # Z^l (B, n, d)
    half: torch.Tensor                  # Z^{l+1/2} (B, n, d)
    out: torch.Tensor                   # Z^{l+1} (B, n, d)
    code: torch.Tensor | None           # of ISTA and ODL, or an MLP after its GELU, (B, n, m)
    attention: torch.Tensor             # (B, K, n, n); of TSSA its memberships Pi (B, K, n)


def layer_norm(config):
    around = config.surroundings
    return nn.LayerNorm(config.width, around.norm_eps, bias=around.bias)


class Layer(nn.Module):
    """A pre-norm layer of any arch maps Z^l (B, n, d) to Z^{l+1}:

        Z^{l+1/2} = Z^l + attention(LN(Z^l))
        Z^{l+1}   = ISTA(LN(Z^{l+1/2}))                     crate, -c, -n, -t: [J] Eq. (45)
        Z^{l+1}   = Z^{l+1/2} + ODL or MLP(LN(Z^{l+1/2}))   crate-alpha, tost: [B] 7.5;
                                                            transformer: [B] Eq. (7.2.13)-(7.2.14)
        Z^{l+1}   = ODL(LN(Z^{l+1/2}))                      crate-lm
        Z^{l+1}   = Z^{l+1/2}                               aot: [B] Eq. (7.5.8)

    The table ARCHS has every arch's operators. LN is not in Eq. (45) but in [J] Fig. 8. LayerScale
    and drop path are on residual branches only."""

    def __init__(self, config, drop_path=0.0):
        super().__init__()
        c, row = config, config.row
        self.norm1, self.attention = layer_norm(c), row.attention(c)
        self.norm2 = self.sparsification = self.scale1 = self.scale2 = None
        if row.sparsification is not None:
            self.norm2, self.sparsification = layer_norm(c), row.sparsification(c)
        self.residual, self.dropout, self.drop_path = row.residual, c.dropout, drop_path
        if c.layer_scale:
            self.scale1 = nn.Parameter(torch.full((c.width,), float(c.layer_scale)))
            self.scale2 = nn.Parameter(self.scale1.detach().clone()) if self.residual else None

    def scale_and_drop(self, out, scale):
        """LayerScale, then stochastic depth: the whole branch of a sample is dropped."""
        if scale is not None:
            out = out * scale
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            out = out * (torch.empty(len(out), 1, 1, device=out.device).bernoulli_(keep) / keep)
        return out

    def compress(self, Z, cache=None):
        """Z^l -> Z^{l+1/2}."""
        out = self.attention(self.norm1(Z), cache)
        out = F.dropout(out, self.dropout, self.training)
        return Z + self.scale_and_drop(out, self.scale1)

    def sparsify(self, Z):
        """Z^{l+1/2} -> (Z^{l+1}, its code)."""
        if self.sparsification is None:
            return Z, None
        code = self.sparsification.code(self.norm2(Z))
        out = self.sparsification.decode(code)
        return Z + self.scale_and_drop(out, self.scale2) if self.residual else out, code

    def forward(self, Z, cache=None):
        return self.sparsify(self.compress(Z, cache))[0]

    def trace(self, Z):
        half = self.compress(Z)
        out, code = self.sparsify(half)
        return LayerTrace(Z, half, out, code, self.attention.map(self.norm1(Z)))


def make_layers(config):
    """The L layers, drop path rising linearly with depth."""
    L = config.layers
    return nn.Sequential(*(Layer(config, config.drop_path * l / max(L - 1, 1)) for l in range(L)))


def init_linears(module, init, **options):
    """Draws the weight of every Linear in `module` with `init`; biases become 0."""
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            init(linear.weight, **options)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


class Backbone(nn.Module):
    """The part of a model that has `tokens`, x -> Z^1, and `layers`."""

    def trace(self, x):
        """What each layer does with x: a list of LayerTraces."""
        traces, Z = [], self.tokens(x)
        for layer in self.layers:
            traces.append(layer.trace(Z))
            Z = traces[-1].out
        return traces


# ---- What language models add to attention: the token before, positions, a cache ---------------
def first_mix(K):
    """The parameter of --shift before training: logits of all a_k, then of all b_k. Heads start out
    different: the last takes mostly the previous token's key and the token's own value."""
    spread = torch.linspace(-2, 2, K)
    return nn.Parameter(torch.cat([spread, -spread]))


def shift_and_rotate(q, k, v, mix=None, rotary=False):
    """Queries, keys and values (B, K, n, p) as attention takes them; q is of the last tokens of k.

    shift: k_i becomes (1 - a) k_i + a k_{i-1}, v_i likewise with b; each head has its a and b.
    rotary: then q_i and k_i turn by R_i."""
    if mix is not None:
        a, b = mix.sigmoid().view(2, -1, 1, 1)
        k, v = shift(k, a), shift(v, b)
    if rotary:
        phase = phases(k.shape[2], k.shape[3], k)
        q, k = rotate(q, phase[-q.shape[2]:]), rotate(k, phase)
    return q, k, v


def shift(w, a):
    """(1 - a) w_i + a w_{i-1} for every token i, 0 before the first: keys or values that see the
    token before (Xu et al. 2025: two weights of any sum). w (..., K, n, p), shares a (K, 1, 1)."""
    return w.lerp(F.pad(w[..., :-1, :], (0, 0, 1, 0)), a.to(w.dtype))


def phases(n, p, like):
    """e^{i t theta_m}, theta_m = 10000^(-2m/p), for positions t = 0 .. n - 1: complex (n, p/2)."""
    options = dict(dtype=at_least_float32(like).dtype, device=like.device)
    theta = 1e4 ** (-torch.arange(0, p, 2, **options) / p)
    angle = torch.arange(n, **options)[:, None] * theta
    return torch.polar(torch.ones_like(angle), angle)


def rotate(w, phase):
    """R_t w_t for every token t (Su et al. 2021): entries 2m and 2m + 1 turn by t theta_m, so that
    (R_s q)^* R_t k = q^* R_{t-s} k depends on t - s alone. w (..., n, p), phase as `phases`."""
    # with cosines and sines it would compile, but takes a CPU longer
    pairs = torch.view_as_complex(at_least_float32(w).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * phase).flatten(-2).to(w.dtype)


@dataclass
class Cache:
    """What attention keeps of the n tokens that a generation has read: keys and values, side by
    side; of MSSA, whose keys are its values, w = U^* Z alone."""
    room: int
    n: int = 0
    past: torch.Tensor | None = None    # (B, K, room, p or 2 p), the first n tokens filled

    def append(self, k, v):
        """Adds the keys and values of m tokens, (B, K, m, p), and returns those of all n."""
        new = k if k is v else torch.cat([k, v], -1)
        if self.past is None:
            self.past = new.new_empty(*new.shape[:2], self.room, new.shape[3])
        start, self.n = self.n, self.n + new.shape[2]
        self.past[:, :, start:self.n] = new
        seen = self.past[:, :, :self.n]
        return (seen, seen) if k is v else seen.chunk(2, -1)


# ---- The other archs' operators -----------------------------------------------------------------
class MHSA(SoftmaxAttention):
    """Multi-head self-attention of the baselines, [B] Eq. (7.2.15)-(7.2.19): separate queries, keys
    and values. Which have a bias, config.surroundings says."""

    def __init__(self, config):
        super().__init__(config)
        around, inner = config.surroundings, self.heads * self.p
        self.QKV = nn.Linear(config.width, 3 * inner, bias=around.qkv_bias)
        self.W = nn.Linear(inner, config.width, bias=around.out_bias)

    def bases(self):
        return self.QKV.weight.view(3, self.heads, self.p, -1)[2].mT    # the values', without bias

    def project(self, Z):
        heads = self.QKV(Z).unflatten(-1, (3, self.heads, self.p))
        return heads.permute(2, 0, 3, 1, 4).unbind(0)

    def join(self, heads):
        return self.W(side_by_side(heads))


@dataclass
class Sums:
    """What TSSA keeps in place of a cache, sums over the n tokens that a generation has read."""
    n: int = 0
    energy: torch.Tensor | float = 0.0      # of w^2 (B, K, 1, p)
    moment: torch.Tensor | float = 0.0      # of Pi w^2 (B, K, 1, p)
    mass: torch.Tensor | float = 0.0        # of Pi (B, K, 1)


class TSSA(Attention):
    """Token-statistics self-attention (ToST), linear in n.

    Named in [B] Section 7.5.2; the formula is the released code's. With w = U_k^* Z for head k:
        Pi_ik   = softmax over k of eta_k sum_j (w_ij / ||w_:j||)^2   membership of token i in k
        s_k     = sum_i Pi_ik w_i^2 / sum_i Pi_ik                     its second moments, a p-vector
        out_ik  = - Pi_ik w_i / (1 + s_k)                      entries with a small s change most
    then W. Causal (released code): norm and sums run over tokens <= i, and a bias b (K, T, 1), at
    first 0, is added to each of the p normalised squares. eta starts at 1 and is not decayed."""

    def __init__(self, config):
        super().__init__(config)
        self.U = nn.Linear(config.width, self.heads * self.p, bias=config.surroundings.qkv_bias)
        self.eta = nn.Parameter(torch.ones(self.heads))
        if self.causal:
            # no matrix, so that it is not decayed: `make_optimizers`
            self.b = nn.Parameter(torch.zeros(self.heads, config.context, 1))
        self.W = nn.Linear(self.heads * self.p, config.width, bias=config.surroundings.out_bias)

    def new_cache(self, room):
        return Sums()

    def statistics(self, w, cache):
        """Pi (B, K, n) and s (B, K, n or 1, p)."""
        square, eta = w.square(), at_least_float32(self.eta)[:, None]
        if not self.causal:
            # as released: the norm is at least 1e-12, its square 1e-24, and the sum is 1e-8 more
            share = square / square.sum(-2, keepdim=True).clamp_min(1e-24)
            Pi = (eta * share.sum(-1)).softmax(-2)
            return Pi, (Pi / (Pi.sum(-1, keepdim=True) + 1e-8)).unsqueeze(-2) @ square
        before = Sums() if cache is None else cache
        end = before.n + w.shape[-2]
        energy = square.cumsum(-2) + before.energy              # squared norm so far
        share = (square / energy.clamp_min(1e-12)).sum(-1)      # the released causal code's guard
        Pi = (eta * (share + self.p * self.b[:, before.n:end, 0])).softmax(-2)
        moment = (Pi.unsqueeze(-1) * square).cumsum(-2) + before.moment
        mass = Pi.cumsum(-1) + before.mass
        if cache is not None:
            cache.n, cache.mass = end, mass[..., -1:].clone()
            cache.energy, cache.moment = (t[..., -1:, :].clone() for t in (energy, moment))
        return Pi, moment / (mass + 1e-8).unsqueeze(-1)

    def map(self, Z):
        """TSSA has no attention map; this is Pi (B, K, n)."""
        return self.statistics(at_least_float32(by_head(self.U(Z), self.heads)), None)[0]

    def forward(self, Z, cache=None):
        w = at_least_float32(by_head(self.U(Z), self.heads))
        with torch.autocast(Z.device.type, enabled=False):
            Pi, s = self.statistics(w, cache)
            damping = F.dropout(1 / (1 + s), self.dropout, self.training)   # as released ToST
            out = -Pi.unsqueeze(-1) * w * damping
        return self.W(side_by_side(out.to(Z.dtype)))


class MMProx(Sparsification):
    """ReLU((1 + 4 / (9 (1 + alpha))) D^*Z - 4 lambda / (9 alpha) 1), alpha = d / (n eps^2).

    [N] Eq. (92): majorization-minimization of the rate itself, for orthogonal D and Z^*Z = I,
    instead of a LASSO step. n is the model's context. (After LN Z has another norm: sqrt(d).)"""

    def __init__(self, config):
        super().__init__()
        alpha = config.width / (config.context * config.mm_eps ** 2)
        self.gain, self.threshold = 1 + 4 / (9 * (1 + alpha)), 4 * config.lambd / (9 * alpha)
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(config.width, config.width)))

    def code(self, Z):
        return F.relu(self.gain * (Z @ self.D) - self.threshold)


class Threshold(Sparsification):
    """ReLU(Z - eta lambda 1), the ISTA step without a dictionary (D = 0 or I in [J] Eq. (44)): an
    ablation, which asks what D is worth."""

    def __init__(self, config):
        super().__init__()
        self.threshold = config.eta * config.lambd

    def code(self, Z):
        return F.relu(Z - self.threshold)


class ODL(Sparsification):
    """Overcomplete dictionary learning (CRATE-alpha): two ISTA steps from 0, then back.

    [B] Eq. (7.5.3)-(7.5.5), D (d, C d), with a D_hat of its own on the way back, as [B] notes:
        a1 = ReLU(eta D^*Z - eta lambda)
        a2 = ReLU(a1 - eta D^*(D a1 - Z) - eta lambda)
        output = D_hat a2
    With ista_steps=1 the output is D_hat a1: an MLP with ReLU, whose bias is fixed, -eta lambda. At
    first ||D||^2 is about 2 (1 + C^1/2)^2, 18 for C = 4: descent is only sure for eta < 2 / 18."""
    tied = False

    def __init__(self, config):
        super().__init__()
        self.eta, self.lambd, self.steps = config.eta, config.lambd, config.ista_steps
        shape = config.width, config.expansion * config.width
        limit = (6 / config.width) ** 0.5               # as released
        self.D = nn.Parameter(torch.empty(shape).uniform_(-limit, limit))
        if not self.tied:
            self.D_hat = nn.Parameter(torch.empty(shape).uniform_(-limit, limit))

    def code(self, Z):
        """a2, or after another number of steps their code: (B, n, C d), entries >= 0."""
        threshold = self.eta * self.lambd
        a = F.relu(self.eta * Z @ self.D - threshold)
        for _ in range(self.steps - 1):
            a = F.relu(a + self.eta * (Z - a @ self.D.mT) @ self.D - threshold)
        return a

    def decode(self, A):
        return A @ (self.D if self.tied else self.D_hat).mT


class TiedODL(ODL):
    """ODL with one dictionary both ways, D_hat = D (crate-lm)."""
    tied = True


class MLP(Sparsification):
    """Linear, GELU ([B] Eq. (7.2.20) prints ReLU), Linear, as in ViT and GPT-2; not sparse."""

    def __init__(self, config):
        super().__init__()
        self.dropout = config.dropout
        d, m, bias = config.width, config.expansion * config.width, config.surroundings.bias
        self.up = nn.Linear(d, m, bias=bias)
        self.down = nn.Linear(m, d, bias=bias)

    def code(self, Z):
        return F.gelu(self.up(Z))           # dense

    def decode(self, A):
        return F.dropout(self.down(A), self.dropout, self.training)


# ---- The archs, their sizes, and a model's config -----------------------------------------------
class ConfigError(ValueError):
    """A model that cannot be built; the message is one line."""
    exit_status = 2


def check_word(name, word, words):
    if word not in words:
        raise ConfigError(f"{name}={word} is not one of {', '.join(words)}")


@dataclass(frozen=True)
class Surroundings:
    """What the authors of an arch put around its operators."""
    norm_eps: float = 1e-6              # of all LayerNorms but an image model's last
    bias: bool = True                   # of LayerNorms and MLPs
    qkv_bias: bool = True               # only MHSA and TSSA can have it
    out_bias: bool = True               # on the attention's output map


@dataclass(frozen=True)
class ImageSurroundings(Surroundings):
    """The same in image models, and their initialization; `LanguageModel` has its own."""
    stem: str = "plain"                 # norm: LN, Linear, LN on each patch; plain: one Linear
    final_norm: bool = True             # an LN after the last layer
    init_std: float | None = 0.02       # of Linears; None: PyTorch's
    class_token_std: float = 0.02
    positions_std: float = 0.02
    embed_kaiming: bool = False         # patch embedding, as in CRATE-alpha's released JAX code


AS_CRATE = ImageSurroundings(norm_eps=1e-5, qkv_bias=False, stem="norm", final_norm=False,
                             init_std=None, class_token_std=1.0, positions_std=1.0)
AS_ALPHA = ImageSurroundings(out_bias=False, final_norm=False, class_token_std=1e-6,
                             embed_kaiming=True)
AS_VIT = ImageSurroundings()
AS_GPT = Surroundings(norm_eps=1e-5, bias=False, qkv_bias=False, out_bias=False)
AS_CRATE_LM = Surroundings(norm_eps=1e-5)
FINAL_EPS = 1e-6        # of the LN after an image model's last layer: ViT's, and CRATE-MAE's too


class Arch(NamedTuple):
    """The operators of a layer, and their surroundings."""
    attention: type
    sparsification: type | None         # None: attention only
    in_images: ImageSurroundings
    residual: bool = False              # around step 2; a proximal step has one inside
    output: str = "learned"             # of MSSA
    layer_scale: float = 0.0            # at initialization; 0: none
    sizes: str = "crate"                # the arch whose sizes it has if it has none in SIZES
    in_text: Surroundings | None = AS_GPT   # nanoGPT's, and ToST's too; None: for images only


ARCHS = {
    "crate": Arch(MSSA, ISTA, AS_CRATE),                            # [J] Eq. (45)
    "crate-c": Arch(MSSA, ISTA, AS_CRATE, output="subspace"),       # [S]
    "crate-n": Arch(MSSA, ISTA, AS_CRATE, output="negative"),       # [S]
    "crate-t": Arch(MSSA, ISTA, AS_CRATE, output="transpose"),      # [S]
    "crate-mm": Arch(MSSA, MMProx, AS_CRATE),                       # [N] Eq. (92), Table 3
    "crate-relu": Arch(MSSA, Threshold, AS_CRATE),                  # an ablation: no dictionary
    "crate-residual": Arch(MSSA, ISTA, AS_CRATE, residual=True),    # an ablation: the residual
    # [B] Eq. (7.5.3)-(7.5.5); Bai and Ma 2025
    "crate-alpha": Arch(MSSA, ODL, AS_ALPHA, residual=True, sizes="transformer"),
    "crate-lm": Arch(MSSA, TiedODL, AS_ALPHA, in_text=AS_CRATE_LM, sizes="transformer"),
    # [B] Eq. (7.5.6)-(7.5.7). Released ToST has LayerScale 1e-5 in text, with a higher first loss
    "tost": Arch(TSSA, MLP, AS_VIT, residual=True, layer_scale=1.0, sizes="transformer"),
    "aot": Arch(MSSA, None, AS_VIT),                                # [B] Eq. (7.5.8)
    "aot-mhsa": Arch(MHSA, None, AS_VIT),                           # [B] Eq. (7.5.8) with MHSA
    # [B] Eq. (7.2.13)-(7.2.22)
    "transformer": Arch(MHSA, MLP, AS_VIT, residual=True, sizes="transformer"),
    # what lies between: one matrix for query, key and value; ISTA in place of the MLP
    "mssa-mlp": Arch(MSSA, MLP, AS_VIT, residual=True, sizes="transformer"),
    "mhsa-ista": Arch(MHSA, ISTA, AS_CRATE),
    "crate-mlp": Arch(MSSA, MLP, AS_CRATE, residual=True),          # an MLP in CRATE's surroundings
    "mssa-ista": Arch(MSSA, ISTA, AS_VIT),                          # ISTA in a transformer's
}


def _size(width, heads, layers):
    return dict(width=width, heads=heads, layers=layers)


SMALL, BASE, LARGE = _size(576, 12, 12), _size(768, 12, 12), _size(1024, 16, 24)
CRATE_SIZES = dict(tiny=_size(384, 6, 12), small=SMALL, base=BASE, large=LARGE)
VIT_SIZES = dict(tiny=_size(192, 3, 12), small=_size(384, 6, 12), base=BASE, large=LARGE)
GPT_SIZES = dict(small=_size(512, 8, 12), base=BASE)

# kind of model -> arch -> size -> fields. An arch without a row has that of its Arch.sizes.
# Image sizes are the released code's (vit: DeiT's tiny, small, ViT's base, large), aot's ours; text
# sizes are inferred from the counts in [B] 7.4 and 7.5 (CRATE-alpha base has 109.4M here, not 120M)
SIZES = {
    "image": {
        "crate": CRATE_SIZES,
        "crate-alpha": VIT_SIZES | dict(small=SMALL, large=LARGE | dict(patch_size=14)),
        "tost": dict(tiny=_size(192, 4, 12), small=_size(384, 8, 12),
                     medium=_size(512, 8, 24) | dict(layer_scale=1e-5)),
        "transformer": VIT_SIZES},
    "mae": {
        "crate": dict(small=SMALL, base=BASE),
        "transformer": dict(small=_size(384, 6, 12), base=BASE)},
    "text": {
        "crate": GPT_SIZES,
        "tost": dict(base=BASE, medium=LARGE, large=_size(1280, 20, 36)),
        "aot": dict(base=LARGE, medium=_size(1280, 20, 36)),
        "aot-mhsa": dict(base=_size(896, 14, 24)),
        "transformer": GPT_SIZES}}


@dataclass(kw_only=True)
class BackboneConfig:
    """What the layers of every model share. A subclass adds the class variable `kind` of SIZES,
    `causal` and `context`, how many tokens."""
    arch: str | Arch = "crate"          # a row of ARCHS by its name, or one of your own
    width: int = 384                    # d
    heads: int = 6                      # K
    layers: int = 12                    # L
    head_dim: int | None = None         # p; None is width / heads
    eta: float = 0.1                    # step of ISTA and ODL
    lambd: float = 0.1                  # sparsity weight of ISTA, MMProx and ODL
    step_size: float = 1.0              # of MSSA where it has no W (crate-c, -n, -t)
    mm_eps: float = 0.5                 # distortion in MMProx's alpha
    expansion: int = 4                  # width of MLP, atoms of ODL, in units of d
    ista_steps: int = 2                 # of ODL
    dropout: float = 0.0
    drop_path: float = 0.0              # of the last layer, rising linearly from 0
    layer_scale: float | None = None    # at initialization; 0: none; None: the arch's
    rotary: bool = False                # of text: rotary positions for the learned ones, `rotate`
    shift: bool = False                 # of text: keys, values that see the token before, `shift`

    @property
    def row(self):
        """Its Arch: the layers' operators, and what is around them."""
        return self.arch if isinstance(self.arch, Arch) else ARCHS[self.arch]

    @property
    def surroundings(self):
        return self.row.in_text if self.kind == "text" else self.row.in_images

    def __post_init__(self):
        if not isinstance(self.arch, Arch):
            check_word("arch", self.arch, ARCHS)
        if self.surroundings is None:
            raise ConfigError("this arch is for images only")
        if self.rotary or self.shift:
            if self.kind != "text" or not issubclass(self.row.attention, SoftmaxAttention):
                raise ConfigError("rotary and shift are for text, with MSSA or MHSA")
        d, K = self.width, self.heads
        if self.layer_scale is None:
            self.layer_scale = self.row.layer_scale
        if self.head_dim is None:
            if d % K:
                fits = [h for h in range(1, 65) if d % h == 0]
                raise ConfigError(f"heads={K} does not divide width={d}; use one of {fits}")
            self.head_dim = d // K
        if self.row.output == "transpose" and K * self.head_dim != d:
            raise ConfigError(f"heads x head_dim, {K} x {self.head_dim}, is not {d}, as U^* needs")
        if self.rotary and self.head_dim % 2:
            raise ConfigError(f"rotary turns pairs of entries: head_dim={self.head_dim} is odd")


@dataclass(kw_only=True)
class ImageConfig(BackboneConfig):
    """An image encoder and its classifier."""
    kind: ClassVar = "image"            # of SIZES
    causal: ClassVar = False
    image_size: int = 224               # pixels per side, square
    patch_size: int = 16                # P
    classes: int = 1000
    stem: str | None = None             # norm or plain; None: its arch's
    positions: str = "learned"          # learned; sincos: fixed, 2-D (MAE)
    pool: str = "class"                 # class: the class token; mean: mean of the patch tokens
    final_norm: bool | None = None      # LN after the last layer, else in the head; None likewise

    def __post_init__(self):
        super().__post_init__()
        if self.stem is None:
            self.stem = self.surroundings.stem
        if self.final_norm is None:
            self.final_norm = self.surroundings.final_norm
        check_word("pool", self.pool, ("class", "mean"))
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"patch_size={self.patch_size} does not divide image_size={self.image_size}")
        self.side = self.image_size // self.patch_size              # in patches
        self.patches = self.side ** 2
        self.context = 1 + self.patches                             # tokens of an image


@dataclass(kw_only=True)
class MAEConfig(ImageConfig):
    """An encoder of `layers` layers and its decoder, of the same width and heads.  [B] 7.6."""
    kind: ClassVar = "mae"
    lambd: float = 0.5                      # these three as in the released code
    stem: str = "plain"
    final_norm: bool = True
    decoder_layers: int | None = None       # None: as many as encode
    mask_ratio: float = 0.75
    positions: str = "sincos"

    def __post_init__(self):
        super().__post_init__()
        self.decoder_layers = self.decoder_layers or self.layers
        n, masked = self.patches, self.masked_patches()
        if not 1 <= masked < n:
            raise ConfigError(f"mask_ratio={self.mask_ratio} masks {masked} of {n} patches")

    def masked_patches(self):
        """How many are masked. As released, the visible ones are rounded down."""
        # 1e-9, as in floating point 100 (1 - 0.9) is a little below 10
        return self.patches - int(self.patches * (1 - self.mask_ratio) + 1e-9)


@dataclass(kw_only=True)
class TextConfig(BackboneConfig):
    """A language model."""
    kind: ClassVar = "text"
    context: int = 1024
    vocab_size: int = 50304         # GPT-2's 50257, padded to a multiple of 64
    causal: bool = True             # False: every token sees all others (masked language modelling)


def make_config(cls, size=None, arch="crate", **given):
    """A config: the size's row of SIZES, then `given`; what both leave open, the arch decides."""
    if size is not None:
        if not isinstance(arch, Arch):
            check_word("arch", arch, ARCHS)
        table, row = SIZES[cls.kind], ARCHS.get(arch, arch)
        sizes = table.get(arch, table[row.sizes])
        check_word("size", size, sizes)
        given = sizes[size] | given
    return cls(arch=arch, **given)


image_config = partial(make_config, ImageConfig)        # (size, arch="crate", **given)
mae_config = partial(make_config, MAEConfig)
text_config = partial(make_config, TextConfig)


# ---- Image models -------------------------------------------------------------------------------
def patchify(x, P):
    """P x P patches, pixels by row, column, channel: (B, C, H, W) -> (B, n, P^2 C)."""
    B, C, H, W = x.shape
    grid = x.view(B, C, H // P, P, W // P, P).permute(0, 2, 4, 3, 5, 1)
    return grid.reshape(B, (H // P) * (W // P), P * P * C)


def unpatchify(patches, P):
    """The inverse of `patchify` for square images: (B, n, 3 P^2) -> (B, 3, H, H)."""
    side = math.isqrt(patches.shape[1])
    grid = patches.view(-1, side, side, P, P, 3).permute(0, 5, 1, 3, 2, 4)
    return grid.reshape(-1, 3, side * P, side * P)


def sincos_positions(d, side):
    """MAE's fixed table (1, 1 + side^2, d): zeros for the class token, then side x side patches;
    column and row, each as sin and cos at d / 4 frequencies from 1 towards 1e-4."""
    if d % 4:
        raise ConfigError(f"sincos positions need a width that 4 divides, not {d}")
    omega = 10000 ** (-torch.arange(d // 4, dtype=torch.float64) / (d / 4))
    angle = torch.arange(side, dtype=torch.float64)[:, None] * omega        # (side, d / 4)
    code = torch.cat([angle.sin(), angle.cos()], 1)                         # (side, d / 2)
    column, row = code.repeat(side, 1), code.repeat_interleave(side, 0)     # (side^2, d / 2)
    return F.pad(torch.cat([column, row], 1), (0, 0, 1, 0)).float()[None]


class ImageEncoder(Backbone):
    """Patches to tokens, a class token in front, positions, then the layers.  [N] Section B.1.1.

    encoder(x): (B, C, H, W) -> tokens (B, 1 + n, d). Other sizes than config.image_size will do."""
    config_class = ImageConfig

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        patch = 3 * c.patch_size ** 2
        embed = [nn.Linear(patch, c.width)]
        if c.stem == "norm":
            embed = [nn.LayerNorm(patch, c.surroundings.norm_eps), *embed, layer_norm(c)]
        self.embed = nn.Sequential(*embed)
        self.class_token = nn.Parameter(torch.zeros(1, 1, c.width))
        if c.positions == "learned":
            self.positions = nn.Parameter(torch.zeros(1, c.context, c.width))
        else:
            self.register_buffer("positions", sincos_positions(c.width, c.side))
        self.layers = make_layers(c)
        self.norm = nn.LayerNorm(c.width, FINAL_EPS) if c.final_norm else nn.Identity()
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        surroundings = self.config.surroundings
        if surroundings.init_std is not None:
            init_linears(self, nn.init.trunc_normal_, std=surroundings.init_std)
        if surroundings.embed_kaiming:
            nn.init.kaiming_uniform_(self.embed[0].weight)
        nn.init.normal_(self.class_token, std=surroundings.class_token_std)
        if isinstance(self.positions, nn.Parameter):
            nn.init.normal_(self.positions, std=surroundings.positions_std)

    def position_table(self, rows, columns):
        """Positions (1, 1 + n, d) for a grid of patches, by bicubic interpolation where its size is
        another. The scale is rows / side; DINO's is (rows + 0.1) / side."""
        positions, side = self.positions, self.config.side
        if rows == columns == side:
            return positions
        grid = positions[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2)
        grid = F.interpolate(at_least_float32(grid), size=(rows, columns), mode="bicubic")
        return torch.cat([positions[:, :1], grid.flatten(2).mT.to(positions.dtype)], 1)

    def tokens(self, x, masked=None, mask_token=None):
        """Z^1: (B, C, H, W) -> (B, 1 + n, d). The mask token stands for `masked` (B, n) patches."""
        P = self.config.patch_size
        B, C, H, W = x.shape
        if H % P or W % P:
            raise ConfigError(f"patch_size={P} does not divide an image of {H} x {W} pixels")
        Z = self.embed(patchify(x, P))
        if masked is not None:
            Z = torch.where(masked[..., None], mask_token.to(Z.dtype), Z)
        Z = torch.cat([self.class_token.expand(B, -1, -1), Z], 1)
        Z = Z + self.position_table(H // P, W // P)
        return F.dropout(Z, self.config.dropout, self.training)

    def forward(self, x):
        return self.norm(self.layers(self.tokens(x)))


class ImageClassifier(nn.Module):
    """model(x): (B, C, H, W) -> logits (B, classes). The head is linear, after exactly one LN."""
    config_class = ImageConfig

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.encoder = ImageEncoder(c)
        norm = nn.Identity() if c.final_norm else layer_norm(c)
        self.head = nn.Sequential(norm, nn.Linear(c.width, c.classes))
        if (std := c.surroundings.init_std) is not None:
            init_linears(self.head, nn.init.trunc_normal_, std=std)

    def pool(self, Z):
        """The class token, [B] Section 7.3.2, or the mean of the patch tokens: (B, d)."""
        return Z[:, 0] if self.config.pool == "class" else Z[:, 1:].mean(1)

    def forward(self, x):
        return self.head(self.pool(self.encoder(x)))


# ---- Masked autoencoder -------------------------------------------------------------------------
class DecoderLayer(nn.Module):
    """A CRATE layer in reverse.  [B] Eq. (7.6.3)-(7.6.4). Z~ (B, n, d) -> Z~':

        Y = D~ LN(Z~),   Z~' = Y - MSSA(LN(Y))

    D~, a plain d x d map ([B] prints it transposed), stands for the inverse of ISTA: where Z = D A
    with A >= 0, D orthogonal and eta = 1, D undoes ISTA up to lambda sqrt(nnz) per token. I - MSSA
    inverts I + MSSA up to second order if U and W are equal; here the decoder learns its own."""

    def __init__(self, c):
        super().__init__()
        self.norm1 = layer_norm(c)
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(c.width, c.width)))
        self.norm2 = layer_norm(c)
        self.attention = c.row.attention(c)

    def forward(self, Z):
        Y = self.norm1(Z) @ self.D.mT
        return Y - self.attention(self.norm2(Y))


class MaskedAutoencoder(nn.Module):
    """Masks mask_ratio of the patches and learns to reconstruct them.  [B] Eq. (7.6.1)-(7.6.7).

    model(x, noise) takes images (B, C, H, W) and uniform noise (B, n) that chooses the patches to
    mask, and returns the mean squared error on those. A mask token stands for them in the encoder
    ([B] sets them to 0; ViT-MAE's encoder sees the other patches only). Positions are added once,
    as released; in [B] Eq. (7.6.6) the unembedding removes them."""
    config_class = MAEConfig

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.encoder = ImageEncoder(c)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, c.width))
        # DecoderLayer reverses the ISTA step; a residual branch has no such reverse
        step = c.row.sparsification or object
        layer = DecoderLayer if issubclass(step, ISTA) and not c.row.residual else Layer
        self.decoder = nn.Sequential(*(layer(c) for _ in range(c.decoder_layers)))
        self.decoder_norm = nn.LayerNorm(c.width, FINAL_EPS)
        self.predict = nn.Linear(c.width, 3 * c.patch_size ** 2)
        init_linears(self, nn.init.xavier_uniform_)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.normal_(self.encoder.class_token, std=0.02)

    def mask_from(self, noise):
        """Which patches are masked, bool (B, n): those with the largest noise (B, n)."""
        visible = self.config.patches - self.config.masked_patches()
        return noise.argsort(1).argsort(1) >= visible

    def predicted(self, x, masked):
        """The prediction for every patch, (B, n, P^2 C), of images with `masked` (B, n) patches."""
        encoder = self.encoder
        Z = encoder.norm(encoder.layers(encoder.tokens(x, masked, self.mask_token)))
        return self.predict(self.decoder_norm(self.decoder(Z)))[:, 1:]

    def forward(self, x, noise):
        """[B] Eq. (7.6.7), over the masked patches only, as in the released code."""
        masked = self.mask_from(noise)
        target = at_least_float32(patchify(x, self.config.patch_size))
        error = (at_least_float32(self.predicted(x, masked)) - target).square().mean(-1)
        return (error * masked).sum() / masked.sum()


# ---- Text models --------------------------------------------------------------------------------
# Kernels for generation, without cuDNN's, which plans anew for each length
FOR_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LanguageModel(Backbone):
    """Token embeddings plus learned positions (none if rotary: it then reads any length), layers, a
    last LN, and the embedding as head.  [B] 7.4.

    model(ids): (B, n) -> logits (B, n, V). model(ids, targets): the loss, summed over targets that
    are not -1, so that parts of a batch add up; [B] Eq. (7.4.1) is its mean."""
    config_class = TextConfig

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.width)
        self.positions = None if c.rotary else nn.Parameter(torch.zeros(c.context, c.width))
        self.layers = make_layers(c)
        self.norm = layer_norm(c)
        self.init_weights()

    def init_weights(self):
        """nanoGPT's: N(0, 0.02), with which a tied head starts near a loss of ln V. Maps that end a
        residual branch have 0.02 / sqrt(2 L), so that their sum over layers has the same size at
        any depth. D and D_hat keep the initialization of their modules."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                ends_branch = name.endswith((".attention.W", ".sparsification.down"))
                std = 0.02 / (2 * self.config.layers) ** 0.5 if ends_branch else 0.02
                init_linears(module, nn.init.normal_, std=std)
        nn.init.normal_(self.embed.weight, std=0.02)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=0.02)

    def tokens(self, ids, start=0):
        """Z^1 of [B] Eq. (7.4.2): (B, n) -> (B, n, d), the first token at position `start`."""
        end, Z = start + ids.shape[1], self.embed(ids)
        if self.positions is not None:
            if end > len(self.positions):
                raise ConfigError(f"{end} tokens exceed the context of {len(self.positions)}")
            Z = Z + self.positions[start:end]
        return F.dropout(Z, self.config.dropout, self.training)

    def forward(self, ids, targets=None):
        logits = self.norm(self.layers(self.tokens(ids))) @ self.embed.weight.mT
        if targets is None:
            return logits
        return F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten(),
                               ignore_index=-1, reduction="sum")

    def new_caches(self):
        """An empty cache for each layer."""
        if not self.config.causal:
            raise ConfigError("a masked model continues no text: its tokens attend to later ones")
        return [layer.attention.new_cache(self.config.context) for layer in self.layers]

    def advance(self, ids, caches):
        """Logits (B, V) of the token after `ids` (B, m), which continue the texts that `caches`
        have read, and are read into them."""
        Z = self.tokens(ids, caches[0].n)
        with sdpa_kernel(FOR_ANY_LENGTH):
            for layer, cache in zip(self.layers, caches):
                Z = layer(Z, cache)
        return self.norm(Z[:, -1]) @ self.embed.weight.mT

    @torch.no_grad()
    def generate(self, ids, n, temperature=1.0, top_k=None, stop=None, generator=None, n_text=None):
        """The texts `ids` (B, m) with n tokens after them, or fewer once all have ended.

        temperature 0 is greedy; top_k keeps the likeliest tokens; ids from n_text on, padding, are
        never drawn. After `stop` come only stops. Of a full context the last half is reread."""
        half = self.config.context // 2
        caches = self.new_caches()
        ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        new = ids if ids.shape[1] <= self.config.context else ids[:, -half:]
        for _ in range(n):
            if caches[0].n == self.config.context:
                caches, new = self.new_caches(), ids[:, -half:]
            logits = self.advance(new, caches)
            logits[:, (n_text or self.config.vocab_size):] = -math.inf
            chosen = choose(logits, temperature, top_k, generator)
            if stop is not None:
                chosen = torch.where(ended, stop, chosen)
                ended |= chosen == stop
            new = chosen[:, None]
            ids = torch.cat([ids, new], 1)
            if stop is not None and ended.all():
                break
        return ids


def choose(logits, temperature=1.0, top_k=None, generator=None):
    """One token for each of logits (B, V), [B] Eq. (7.4.9); options as in `generate`."""
    if temperature < 1e-9:              # 0, or so low that the quotient would overflow
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
