"""CRATE in one file: a transformer whose layers are derived from optimization steps.

    python crate.py         trains on drawn shapes, minutes, then looks inside every layer

Tokens Z should be spread out (high R), compressed in subspaces U_1 .. U_K (low R^c) and sparse:
max R(Z) - R^c(Z | U) - lambda ||Z||_0. A layer takes two steps towards that:

    Z^{l+1/2} = Z^l + MSSA(LN(Z^l))          one matrix U in place of query, key and value
    Z^{l+1}   = ISTA(LN(Z^{l+1/2}))          in place of the MLP, and without a residual

Attention comes from a gradient step of size kappa on R^c: with beta = p / (n eps^2), and if the sum
of U_k U_k^* is I, Eq. (34) is (1 - beta kappa) Z + beta kappa MSSA(Z), MSSA with beta [U_1 .. U_K]
in place of W. The layer, Eq. (45), keeps all of Z and adds MSSA(Z): the second term of a step
downhill, which by itself points uphill, with a softmax in it. A learned W may undo it: see `look`.

Equations are those of arXiv 2311.13110, where Z is d x n, a token a column; here it is (B, n, d), a
token a row. model.py has the same operators made fast, and their variants."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from data.shapes import draw_shapes


def coding_rate(Z, eps=0.5):
    """R(Z) = 1/2 logdet(I + d / (n eps^2) Z Z^*), Eq. (8), of Z (..., n, d)."""
    n, d = Z.shape[-2:]                                                # d is p where Z is U_k^* Z
    return 0.5 * torch.logdet(torch.eye(d).to(Z) + d / (n * eps ** 2) * Z.mT @ Z)


def subspace_coding_rate(Z, U, eps=0.5):
    """R^c(Z | U), the sum of R(U_k^* Z), Eq. (13), of Z (B, n, d), U (K, d, p)."""
    return coding_rate(Z[:, None] @ U, eps).sum(1)


def sparse_rate_reduction(Z, U, eps=0.5, lambd=0.1):
    """The objective R(Z) - R^c(Z | U) - lambda ||Z||_0, Eq. (16), of Z (B, n, d), U (K, d, p). As
    in the papers, the rates are nats for one token, but ||Z||_0 counts the entries of all."""
    return coding_rate(Z, eps) - subspace_coding_rate(Z, U, eps) - lambd * Z.ne(0).to(Z).sum((1, 2))


def subspace_coding_rate_grad(Z, U, eps=0.5):
    """The gradient of R^c, Eq. (31): beta sum_k U_k (U_k^*Z) (I + beta (U_k^*Z)^* U_k^*Z)^-1."""
    w = Z[:, None] @ U                                      # (U_k^*Z)^*, (B, K, n, p)
    n, p = w.shape[-2:]
    beta = p / (n * eps ** 2)
    inverse = torch.linalg.inv(torch.eye(n).to(Z) + beta * w @ w.mT)
    return beta * (inverse @ w @ U.mT).sum(1)


def neumann_terms(Z, U, eps=0.5):
    """(first, second) of Eq. (33): the gradient is near first - second if beta ||w||_2^2 << 1."""
    w = Z[:, None] @ U
    n, p = w.shape[-2:]
    beta = p / (n * eps ** 2)
    first = beta * (w @ U.mT).sum(1)
    return first, beta ** 2 * (w @ w.mT @ w @ U.mT).sum(1)


class MSSA(nn.Module):
    """Multi-head subspace self-attention, Eq. (37): W stack_k U_k^*Z softmax((U_k^*Z)^* U_k^*Z). In
    rows, w is (U_k^*Z)^*. As in the released code scores are over sqrt(p), and W has a bias."""
    def __init__(self, d, K):
        super().__init__()
        self.K, self.p = K, d // K
        self.U = nn.Linear(d, d, bias=False)                                # [U_1 .. U_K]^*
        self.W = nn.Linear(d, d)

    def forward(self, Z):
        w = self.U(Z).unflatten(2, (self.K, self.p)).transpose(1, 2)        # (B, K, n, p)
        attention = (w @ w.mT / self.p ** 0.5).softmax(-1)                  # (B, K, n, n)
        return self.W((attention @ w).transpose(1, 2).flatten(2))


class ISTA(nn.Module):
    """ReLU(Z - eta D^*(D Z - Z) - eta lambda), Eq. (44): one proximal gradient step, from A = Z, on
    1/2 ||Z - D A||^2 + lambda ||A||_1 with A >= 0."""
    def __init__(self, d, eta=0.1, lambd=0.1):
        super().__init__()
        self.eta, self.lambd = eta, lambd
        self.D = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(d, d)))

    def forward(self, Z):
        gradient = (Z @ self.D.mT - Z) @ self.D
        return F.relu(Z - self.eta * gradient - self.eta * self.lambd)


class Layer(nn.Module):
    """Z^l to Z^{l+1}, Eq. (45). Its LayerNorms are not in the equation but in Figure 8."""
    def __init__(self, d, K):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), MSSA(d, K)
        self.norm2, self.sparsification = nn.LayerNorm(d), ISTA(d)

    def forward(self, Z):
        Z = Z + self.attention(self.norm1(Z))                       # derived to compress
        return self.sparsification(self.norm2(Z))                   # derived to sparsify


class CRATE(nn.Module):
    """Patches of P x P pixels become tokens; their mean after the last layer gives ten logits."""
    def __init__(self, d=64, K=4, L=4, P=4, side=32, classes=10):
        super().__init__()
        self.P, pixels = P, 3 * P * P
        self.embed = nn.Sequential(nn.LayerNorm(pixels), nn.Linear(pixels, d), nn.LayerNorm(d))
        self.class_token = nn.Parameter(torch.randn(1, 1, d))   # as released; no head here reads it
        self.positions = nn.Parameter(torch.randn(1, 1 + (side // P) ** 2, d))
        self.layers = nn.ModuleList(Layer(d, K) for _ in range(L))
        self.head = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, classes))

    def all_tokens(self, x):
        """Pictures (B, side, side, 3) to the list Z^1 .. Z^{L+1}, each (B, 1 + n, d)."""
        patches = x.unfold(1, self.P, self.P).unfold(2, self.P, self.P)     # (B, h, w, 3, P, P)
        patches = patches.permute(0, 1, 2, 4, 5, 3).flatten(3).flatten(1, 2)
        Z = torch.cat([self.class_token.expand(len(x), -1, -1), self.embed(patches)], 1)
        Zs = [Z + self.positions]
        for layer in self.layers:
            Zs.append(layer(Zs[-1]))
        return Zs

    def forward(self, x):
        return self.head(self.all_tokens(x)[-1][:, 1:].mean(1))


def newton_schulz(G):
    """Nearly G with every singular value 1 (Jordan et al. 2024)."""
    X = G / G.norm()
    for _ in range(5):
        A = X @ X.mT
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


def train(model, x, y, steps=2400, batch=50, peak=5e-3, decay=0.5):
    """Muon for the layers' matrices M, AdamW for the rest; linear warm-up, then a cosine.

    m = 0.95 m + 0.05 g;   M = (1 - lr decay) M - lr scale newton_schulz(0.05 g + 0.95 m)"""
    matrices = [M for M in model.layers.parameters() if M.ndim == 2]
    rest = [w for w in model.parameters() if all(w is not M for M in matrices)]
    adamw, momenta = torch.optim.AdamW(rest, weight_decay=0), [0 * M.data for M in matrices]
    for step in range(steps):
        rows = torch.randint(len(x), (batch,))
        pictures = x[rows].roll(torch.randint(-2, 3, (2,)).tolist(), (1, 2))  # one shift a batch
        loss = F.cross_entropy(model(pictures.flip(2) if step % 2 else pictures), y[rows])
        loss.backward()
        lr = peak * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for M, momentum in zip(matrices, momenta):
            momentum.lerp_(M.grad, 0.05)
            update = newton_schulz(M.grad.lerp(momentum, 0.95))                         # Nesterov
            scale = 0.2 * max(M.shape) ** 0.5           # entries as large as in AdamW's steps
            M.data.mul_(1 - lr * decay).sub_(lr * scale * update)
        adamw.param_groups[0]["lr"] = lr
        adamw.step()
        model.zero_grad()
        if step == 0 or step % 100 == 99:
            print(f"step {step + 1} of {steps}: loss {loss:.3f}", flush=True)


@torch.no_grad()
def look(model, x, eps=0.1):                        # the eps of the first paper's figures
    """A dict for each layer, of means over the pictures x; U has the norm of orthonormal bases:

    attention, %      what the attention step adds to R^c of Z^l
    after LN, %       the same of tokens minus their mean, after a LayerNorm: lengths do not count
    alone, %          after LN, a control: each token attends to itself alone, its step as long
    objective         R - R^c - lambda ||Z||_0 of Z^{l+1}; zeros decide it
    nonzeros, %       of the entries of Z^{l+1}"""
    centred = lambda T: T - T.mean(1, keepdim=True)     # one vector added to all is no compression
    normed = lambda T: F.layer_norm(centred(T), T.shape[-1:])
    length = lambda T: centred(T).norm(dim=(1, 2), keepdim=True)
    rows, Zs = [], model.all_tokens(x)
    for layer, Z, out in zip(model.layers, Zs, Zs[1:]):
        U = layer.attention.U.weight.unflatten(0, (layer.attention.K, -1)).mT   # (K, d, p)
        U = U * (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()
        X = layer.norm1(Z)
        step, alone = layer.attention(X), layer.attention.W(layer.attention.U(X))
        alone = alone * length(step) / length(alone)
        Rc = lambda T: subspace_coding_rate(T, U, eps).mean()
        rows.append({"attention, %": 100 * (Rc(Z + step) / Rc(Z) - 1),
                     "after LN, %": 100 * (Rc(normed(Z + step)) / Rc(normed(Z)) - 1),
                     "alone, %": 100 * (Rc(normed(Z + alone)) / Rc(normed(Z)) - 1),
                     "objective": sparse_rate_reduction(out, U, eps).mean(),
                     "nonzeros, %": 100 * (out != 0).float().mean()})
    return rows


def shapes(n, seed):
    """Ten kinds of shape, drawn: pictures (n, 32, 32, 3), about in [-2, 2], and labels (n,)."""
    pictures, labels, _ = draw_shapes(n, seed)
    return torch.from_numpy(pictures) / 64 - 2, torch.from_numpy(labels)


if __name__ == "__main__":
    print("drawing 12,000 pictures, looking at the untrained model ...", flush=True)
    torch.set_num_threads(1)            # more would be slower: the matrices are small
    torch.manual_seed(0)
    (x, y), (val_x, val_y) = shapes(10_000, seed=0), shapes(2_000, seed=1)
    model = CRATE()
    before = look(model, val_x)
    train(model, x, y)
    after = look(model, val_x)
    print("untrained -> trained; below 0 % R^c falls, RESULTS.md has more controls")
    print("       ", *(f"{name:>16}" for name in after[0]))
    for l, (old, new) in enumerate(zip(before, after)):
        print(f"layer {l + 1}", *(f"{old[name]:6.1f} -> {new[name]:6.1f}" for name in new))
    with torch.no_grad():
        print(f"accuracy {(model(val_x).argmax(1) == val_y).float().mean():.3f}")
