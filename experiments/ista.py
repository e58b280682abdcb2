"""Does the ISTA step make a sparse code of the tokens?

It is derived as one proximal gradient step, from A = X, on the LASSO of [J] Eq. (41)-(42),
lambda ||A||_1 + 1/2 ||X - D A||_F^2 with A >= 0, where X = LN(Z^{l+1/2}). This A has entries below
0, so the step starts where A may not be. The LASSO stands for lambda ||A||_0 - R(A), Eq. (38), if
R(X) = R(D A) = R(A), Eq. (39): X is D A, D^* D the identity.

    python -m experiments.ista --samples=20 --scored=0 --csv=records/ista.csv
    python -m experiments.results ista          # the figure

The table: each layer's codes A. Sums over a sample's tokens, mean +- standard error over samples.
    start     X, which has entries below 0    relu       ReLU(X), the nearest A that has none
    step      what the layer computes         threshold  ReLU(X - eta lambda): the step with D = 0
    zero      no code                         best_step  with the eta of 0.1, 0.2 .. 1 of least (41)
    optimum   of (42), within 1 %             lasso      l1 + fit, the two terms of (41)
    at_best_length      lasso of A with each token times the best number >= 0
    error     ||X - D A||_F / ||X||_F         nonzeros   of A, %
Then the score of a trained CRATE, and with D = 0.
"""
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from checkpoint import each_model
from data.images import split_for
from experiments.shared import averages, each_sample, Flags, report
from flags import option, parse, UserError
from measure import inputs, print_table, traces
from model import ISTA, ista, lasso, ODL
from processes import cli


@dataclass(kw_only=True)
class Sparsify(Flags):
    scored: int = option(10_000, "samples to score the model on, with D = 0; 0: no score", low=0)


def best_length(A, X, D, lambd):
    """A, each token times the number >= 0 that makes (41) least."""
    DA = A @ D.mT
    gain = (X * DA).sum(-1) - lambd * A.abs().sum(-1)
    return (gain.clamp_min(0) / DA.square().sum(-1).clamp_min(1e-12))[..., None] * A


def lower_bound(A, X, D, lambd):
    """(B,), at most the minimum of (42), and equal to it if A is the optimum.

    ||X||^2 / 2 - ||X - u||^2 / 2 for any u with D^* u <= lambda: here X - D A, shortened."""
    residual = X - A @ D.mT
    u = residual * (lambd / (residual @ D).amax(-1, keepdim=True).clamp_min(lambd))
    return (X.square() - (X - u).square()).sum((1, 2)) / 2


def optimum(X, D, lambd, tolerance=0.01):
    """A >= 0 (B, n, m) at which (42) is above its minimum by less than that share of it.

    ISTA from 0 in steps of 1 / ||D||^2, with momentum (FISTA) that ends where it points uphill."""
    step = 1 / torch.linalg.matrix_norm(D, 2) ** 2
    gram, correlation = D.mT @ D, X @ D
    A = ahead = torch.zeros_like(correlation)
    t = 1.0
    for i in range(100_000):            # at lambda = 0 the bound tells nothing
        if i % 20 == 0:
            above = (1 - tolerance) * sum(lasso(A, X, D, lambd)) > lower_bound(A, X, D, lambd)
            if not above.any():         # nor where it is NaN
                break
        new = F.relu(ahead - step * (ahead @ gram - correlation + lambd))
        if ((ahead - new) * (new - A)).sum() > 0:
            t = 1.0
        following = (1 + (1 + 4 * t ** 2) ** 0.5) / 2
        ahead = new + (t - 1) / following * (new - A)
        A, t = new, following
    return A


def codes(X, operator):
    """{name: A (B, n, m)}, the codes of the table."""
    A = operator.code(X)
    found = dict(step=A, zero=torch.zeros_like(A), optimum=optimum(X, operator.D, operator.lambd))
    if type(operator) is ISTA:
        steps = [ista(X, operator.D, tenths / 10, operator.lambd) for tenths in range(1, 11)]
        found |= dict(start=X, relu=F.relu(X), threshold=F.relu(X - operator.eta * operator.lambd),
                      best_step=min(steps, key=lambda A: sum(
                          lasso(A, X, operator.D, operator.lambd)).sum()))
    return found


@torch.no_grad()
def table(loaded, c):
    """The rows of the table."""
    loaded.model.cpu().double()
    if not isinstance(loaded.backbone.layers[0].sparsification, (ISTA, ODL)):
        raise UserError(f"{loaded.model.config.arch} has no sparse code in a dictionary D")
    samples = {}
    for traced in traces(loaded, c):
        for l, (layer, trace) in enumerate(traced, 1):
            X, operator = layer.norm2(trace.half), layer.sparsification
            D, lambd = operator.D, operator.lambd
            for name, A in codes(X, operator).items():
                l1, fit = lasso(A, X, D, lambd)
                scaled = sum(lasso(best_length(A, X, D, lambd), X, D, lambd))
                samples.setdefault((l, name), []).extend(each_sample(
                    lasso=l1 + fit, at_best_length=scaled, l1=l1, fit=fit,
                    error=(2 * fit).sqrt() / X.norm(dim=(1, 2)),
                    nonzeros=100 * (A != 0).double().mean((1, 2))))
    return [dict(layer=l, code=name) | averages(each) for (l, name), each in samples.items()]


@torch.no_grad()
def scores(loaded, c):
    """The score of each sample, (N,): 1 if its class is right, or its loss in nats per token."""
    model, found = loaded.model, []
    split = split_for(loaded, c)[1] if loaded.task == "vit" else None
    for index, x in inputs(loaded, replace(c, samples=c.scored)):
        if split is not None:
            found.append((model(x).argmax(-1) == split.labels[index]).double())
        else:
            logits = model(x)[:, :-1]
            found.append(F.cross_entropy(logits.mT, x[:, 1:], reduction="none").mean(1))
    return torch.cat(found)


def without_dictionary(loaded, c):
    """{"score", "score_without_D", "difference", their errors}, or None. It sets every D to 0."""
    layers = loaded.backbone.layers
    if loaded.task not in ("vit", "gpt") or not isinstance(layers[0].sparsification, ISTA):
        return None
    before = scores(loaded, c)
    for layer in layers:
        layer.sparsification.D.data.zero_()
    after = scores(loaded, c)
    return averages(each_sample(score=before, score_without_D=after, difference=after - before))


def main(argv):
    """The rows of --csv."""
    c = parse(Sparsify, argv, __doc__)
    found = report(c, table)
    for loaded in each_model(replace(c, untrained=False)) if c.scored else ():
        if without := without_dictionary(loaded, c):
            print_table([dict(model=loaded.name) | without])
    return found


if __name__ == "__main__":
    cli(main)
