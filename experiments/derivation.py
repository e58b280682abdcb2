"""How far are trained layers from what the derivation presumes?

[N], Approximation 4, presumes tokens of length 1 near incoherent subspaces with orthonormal U_k;
[J] that two terms stand for the inverse in (31), and that a code A rebuilds tokens in a nearly
orthogonal dictionary, so that R stays as it is, (39)-(40). The columns are explained where they are
computed; shares are in %. X is LN(Z) for attention, LN(Z^{l+1/2}) for the code; eps is 0.5.

    python -m experiments.derivation --ckpt=pretrained:shapes-crate         # means, by layer
"""
import torch
from torch.nn import functional as F

from experiments.shared import Flags, report
from flags import parse, UserError
from measure import at_norm, inputs
from model import ARCHS, by_head, coding_rate
from processes import cli

EPS = 0.5


def apart(A, B):
    """The distance of each A (..., n, m) from B, in % of the norm of B."""
    return 100 * (A - B).norm(dim=(-2, -1)) / B.norm(dim=(-2, -1))


def off_identity(M):
    """The distance of M (m, m) from the nearest multiple of the identity, in % of its norm."""
    return apart(M.trace() / len(M) * torch.eye(len(M)), M)


def of_attention(layer, trace):
    """{column: presumed to be} of X, U and W."""
    attention, U, X = layer.attention, layer.attention.bases(), layer.norm1(trace.tokens)
    w, Q = by_head(attention.U(X), len(U)), torch.linalg.qr(U)[0]
    n, p = w.shape[2:]                                                  # w (B, K, n, p)
    singular, strengths = torch.linalg.svdvals(U), p / (n * EPS ** 2) * torch.linalg.svdvals(w) ** 2
    near = (X[:, None] @ Q).square().sum(-1).amax(1) / X.square().sum(-1)
    return dict(
        # beta tau^2 of the singular values tau of U_k^*X. If all are below 1, (32) converges
        strength=strengths[..., 0], beyond=100 * (strengths > 1).double(),      # %: 0
        length=X.norm(dim=-1),                                          # of a token: 1
        near=100 * near,                # of a token's square length, in its best subspace: 100
        u_least=singular.min(), u_largest=singular.max(),               # singular values: 1
        frame=off_identity((U @ U.mT).sum(0)),                          # sum_k U_k U_k^*: 0
        cos=F.cosine_similarity(attention.W.weight.T.flatten(),         # W^*, [U_1 .. U_K]^*: 1
                                attention.U.weight.flatten(), 0))


def of_code(layer, trace):
    """{column: presumed to be} of A and D."""
    X, A, D = layer.norm2(trace.half), trace.code, layer.sparsification.D
    DA = A @ D.mT
    noise = at_norm(torch.randn(A.shape, generator=torch.Generator().manual_seed(0)).to(A), A)

    def of_R(T):
        return 100 * coding_rate(T, EPS) / coding_rate(X, EPS)
    return dict(
        miss=apart(DA, X),                                              # ||X - D A||: 0
        gram=off_identity(D.T @ D),                                     # D^* D: 0
        coded=of_R(DA), coded_long=of_R(at_norm(DA, X)),                # 100; DA as long as X
        kept=of_R(A), noise_kept=of_R(noise))                           # 100; noise as long as A


@torch.no_grad()
def by_layer(backbone, x):
    """[{column: its mean over x}] of the layers."""
    rows = [of_attention(layer, trace) | of_code(layer, trace)
            for layer, trace in zip(backbone.layers, backbone.trace(x))]
    return [{name: value.mean().item() for name, value in row.items()} for row in rows]


def rows_of(loaded, c):
    """A row for each layer of a CRATE, in float64."""
    config = loaded.model.cpu().double().config
    if config.row != ARCHS["crate"]:
        raise UserError(f"{config.arch} has another layer than CRATE's")
    x = torch.cat([x for _, x in inputs(loaded, c)])
    return [dict(layer=l) | row for l, row in enumerate(by_layer(loaded.backbone, x), 1)]


def main(argv):
    """The rows of --csv, one a layer."""
    return report(parse(Flags, argv, __doc__), rows_of)


if __name__ == "__main__":
    cli(main)
