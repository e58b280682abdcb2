"""How far are trained layers from what the derivation presumes?

[N], Approximation 4, presumes tokens of length 1 near incoherent subspaces with orthonormal U_k;
[J] that two terms stand for the inverse in (31), and that a code A rebuilds tokens in a nearly
orthogonal dictionary, so that R stays as it is. X is LN(Z) for attention and LN(Z^{l+1/2}) for A.
Means over samples, by layer:

    s              beta ||U_k^*X||^2 (spectral norm), eps 0.5: below 1 the series (32) converges
    length         of a token of X; presumed 1
    near           share of its square length in its best subspace, %; presumed 100
    u_least        least singular value of the U_k, and u_largest; presumed 1
    frame          distance of sum_k U_k U_k^* from the nearest a I, % of its norm; presumed 0
    cos            cosine of W^* with [U_1 .. U_K]^*
    normed_before  R^c before the step, and what steps add to it: alone, turned and alone_turned of
                   `experiments.compression`, table `normed`
    miss           ||X - D A||, % of ||X||; presumed 0
    gram           distance of D^* D from the nearest a I, % of its norm; presumed 0
    coded, kept    R(D A) and R(A), % of R(X), eps 0.5; coded_long: of D A as long as X; noise_kept:
                   of noise as long as A
    start, lasso, relu      the LASSO (41) of A = X, of the code, of ReLU(X), % of that of no code

and the columns of `python analyze.py layers --help`, at lambda 0.

    python -m experiments.derivation --ckpt=pretrained:shapes-crate
"""
import torch
from torch.nn import functional as F

from analyze import at_norm, inputs, layer_numbers
from checkpoint import each_model
from experiments.compression import changes
from experiments.shared import described, Flags, write_csv
from figures import print_table
from flags import parse, UserError
from model import by_head, coding_rate, ISTA, lasso, MSSA
from processes import cli


def apart(A, B):
    """The distance of each A (..., n, m) from B, in % of the norm of B."""
    return 100 * (A - B).norm(dim=(-2, -1)) / B.norm(dim=(-2, -1))


def off_identity(M):
    """The distance of M (m, m) from the nearest multiple of the identity, in % of its norm."""
    return apart(M.trace() / len(M) * torch.eye(len(M)), M)


def of_attention(layer, trace):
    """The columns of X, U and W."""
    attention, U, X = layer.attention, layer.attention.bases(), layer.norm1(trace.tokens)
    w, Q = by_head(attention.U(X), len(U)), torch.linalg.qr(U)[0]
    n, p = w.shape[2:]                                                  # w (B, K, n, p)
    added = changes(layer, trace.tokens, torch.Generator().manual_seed(0), eps=0.1)
    return dict(
        s=p / (n * 0.5 ** 2) * torch.linalg.matrix_norm(w, 2) ** 2,
        length=X.norm(dim=-1),
        near=100 * (X[:, None] @ Q).square().sum(-1).amax(1) / X.square().sum(-1),
        u_least=torch.linalg.svdvals(U).min(), u_largest=torch.linalg.svdvals(U).max(),
        frame=off_identity((U @ U.mT).sum(0)),
        cos=F.cosine_similarity(attention.W.weight.T.flatten(), attention.U.weight.flatten(), 0),
        normed_before=added["normed", "before"],
        **{name: added["normed", name] for name in ("alone", "turned", "alone_turned")})


def of_code(layer, trace):
    """The columns of A and D."""
    X, A, D = layer.norm2(trace.half), trace.code, layer.sparsification.D
    DA = A @ D.mT
    noise = at_norm(torch.randn(A.shape, generator=torch.Generator().manual_seed(0)).to(A), A)

    def rate(T):
        return 100 * coding_rate(T) / coding_rate(X)

    def cost(A):
        no_code = X.square().sum((1, 2)) / 2
        return 100 * sum(lasso(A, X, D, layer.sparsification.lambd)) / no_code
    return dict(
        kept=rate(A), noise_kept=rate(noise), coded=rate(DA), coded_long=rate(at_norm(DA, X)),
        gram=off_identity(D.T @ D), miss=apart(DA, X),
        start=cost(X), lasso=cost(A), relu=cost(X.relu()))


@torch.no_grad()
def by_layer(backbone, x):
    """{column: its mean over x in each layer}, also of `layer_numbers`."""
    rows = [layer_numbers(layer, trace, lambd=0) | of_attention(layer, trace)
            | of_code(layer, trace) for layer, trace in zip(backbone.layers, backbone.trace(x))]
    return {name: [float(row[name].mean()) for row in rows] for name in rows[0]}


def main(argv):
    """The rows of --csv, one a layer."""
    c = parse(Flags, argv, __doc__)
    found = []
    for loaded in each_model(c):
        config = loaded.model.cpu().double().config
        if config.operators[:2] != (MSSA, ISTA) or config.operators.output != "learned":
            raise UserError(f"{config.arch} has another layer than CRATE's")
        x = torch.cat([x for _, x in inputs(loaded, c)])
        columns = by_layer(loaded.backbone, x)
        rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
        print(loaded.label)
        print_table([dict(column=name) | {f"layer {l}": value for l, value in enumerate(row, 1)}
                     for name, row in columns.items()])
        found += [described(loaded) | dict(layer=l) | row for l, row in enumerate(rows, 1)]
    if c.csv:
        write_csv(found, c.csv)
    return found


if __name__ == "__main__":
    cli(main)
