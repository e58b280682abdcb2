"""What the lesson says of the trained model, and PyTorch's numbers that the page is compared with.

All are rounded, so that another CPU has the same."""
import itertools
import math

import numpy as np
import torch
from torch.nn import functional as F

import crate
from data import augment
from data.shapes import draw_shapes
from flags import ROOT
from model import coding_rate, sparse_rate_reduction, subspace_coding_rate
from run import read_metrics

KINDS = ("softmax", "each token alone", "mean token")
SWITCHES = dict(att="softmax", out="W", prox="ReLU", root=1, noD=0, noLN=0)
SWITCHED = {                # a row of the last step's table: what is not as trained
    "as trained": {}, "D = 0": dict(noD=1), "without √p": dict(root=0),
    "no LayerNorm": dict(noLN=1), "each token alone": dict(att=KINDS[1]), "U for W": dict(out="U"),
    "the mean token": dict(att=KINDS[2]), "soft threshold": dict(prox="soft"),
    "−U for W": dict(out="−U")}


def pictures(meta, size, n):
    """n drawn pictures, one of each class, then again: normalized, as uint8, and labels."""
    images, labels, _ = draw_shapes(n, seed=1)
    rounds = [(labels[:i] == label).sum() for i, label in enumerate(labels)]
    order = np.lexsort((labels, rounds))
    images, labels = images[order], labels[order]
    x = augment.at_size(augment.to_float(torch.from_numpy(images)), size)
    return augment.normalize(x, meta["mean"], meta["std"]), images, labels


# ---- Operators that the lesson varies -----------------------------------------------------------
def averaged(w, kind, scale):
    """w (B, K, n, p) after one of three attentions, heads side by side: (B, n, K p)."""
    if kind == "mean token":
        w = w.mean(2, keepdim=True).expand_as(w)
    elif kind == "softmax":
        w = (scale * w @ w.mT).softmax(-1) @ w
    return w.transpose(1, 2).flatten(2)


def switched(model, x, att, out, prox, root, noD, noLN):
    """The logits of the model with the switches of the last step."""
    Z = model.encoder.tokens(x)
    for layer in model.encoder.layers:
        a, s = layer.attention, layer.sparsification
        w = a.projections(Z if noLN else layer.norm1(Z))
        heads = averaged(w, att, a.scale if root else 1)
        Z = Z + (a.W(heads) if out == "W" else (1 if out == "U" else -1) * heads @ a.U.weight)
        X = Z if noLN else layer.norm2(Z)
        D, threshold = s.D * (1 - noD), s.eta * s.lambd
        Z = X - s.eta * (X @ D.mT - X) @ D
        Z = F.relu(Z - threshold) if prox == "ReLU" else F.softshrink(Z, threshold)
    return model.head(Z[:, 1:].mean(1))


def traced(model, x):
    """(layer, Z^l, its trace, U scaled to the size of orthonormal bases) of each layer."""
    Z, found = model.encoder.tokens(x), []
    for layer in model.encoder.layers:
        U, trace = layer.attention.bases(), layer.trace(Z)
        found.append((layer, Z, trace, U * (U.shape[0] * U.shape[2]) ** 0.5 / U.norm()))
        Z = trace.out
    return found


def resized(Z, like):
    return Z * (like.norm(dim=(1, 2)) / Z.norm(dim=(1, 2)))[:, None, None]


def changes(layer, Z, U, eps=0.1):
    """[change of R^c, of R - R^c] by each kind of attention, at the norm of Z: means."""
    a, found = layer.attention, []
    for kind in KINDS:
        half = resized(Z + a.W(averaged(a.projections(layer.norm1(Z)), kind, a.scale)), Z)
        Rc = (subspace_coding_rate(half, U, eps) - subspace_coding_rate(Z, U, eps)).mean().item()
        R = (coding_rate(half, eps) - coding_rate(Z, eps)).mean().item()
        found.append([Rc, R - Rc])
    return found


def lasso(X, A, layer):
    s = layer.sparsification
    return (0.5 * (X - A @ s.D.mT).square().sum() + s.lambd * A.abs().sum()) / len(X)


def apart(A, B):
    return ((A - B).norm() / B.norm()).item()


# ---- What the text says -------------------------------------------------------------------------
def facts(model, untrained, other, x, larger):
    """({name in the text: words}, changes of the model's and the other model's layers)."""
    layers, eye, known = traced(model, x), torch.eye(model.config.width), {}

    def note(name, values, form=".2f", sign=""):
        low, high = (f"{choose(values):{form}}{sign}".replace("-", "−") for choose in (min, max))
        known.update({f"{name}_low": low, f"{name}_high": high, name: f"{low} to {high}"})

    def rises(model, x):                            # of R - R^c in a layer
        return sum((sparse_rate_reduction(trace.out, U, lambd=0)
                    > sparse_rate_reduction(Z, U, lambd=0)).float().mean().item() > 0.5
                   for _, Z, trace, U in traced(model, x))

    attentions = [layer.attention for layer, *_ in layers]
    Us = [attention.bases() for attention in attentions]
    tokens = [layer.norm1(Z) for layer, Z, *_ in layers]
    w = [attention.projections(X) for attention, X in zip(attentions, tokens)]
    energies = [heads.square().sum(-1) for heads in w]
    bases = [torch.linalg.qr(U)[0] for U in Us]
    cosines = [torch.linalg.svdvals(a.T @ b)[0].item()
               for heads in bases for a, b in itertools.combinations(heads, 2)]
    K, n, p = w[0].shape[1:]
    strengths = [(p / (n * 0.25) * torch.linalg.matrix_norm(heads, 2) ** 2).mean().item()
                 for heads in w]
    note("s", strengths, ".0f")
    note("u", torch.linalg.svdvals(torch.stack(Us)).flatten().tolist())
    note("length", [X.norm(dim=-1).mean().item() for X in tokens], ".1f")
    note("near", [(energy.amax(1) / energy.sum(1)).mean().item() for energy in energies])
    note("angles", cosines)
    note("sums", [100 * apart(a.U.weight.T @ a.U.weight, eye) for a in attentions], ".0f", " %")
    note("cos", [F.cosine_similarity(a.W.weight.flatten(), a.U.weight.T.flatten(), 0).item()
                 for a in attentions])
    for name, net, inputs in (("", model, x), ("other_", other, larger)):
        codes = [(layer.norm2(trace.half), trace.out, layer) for layer, _, trace, _
                 in traced(net, inputs)]
        costs = [[lasso(X, A, layer).item() for A in (X.relu(), code, 0 * X)]
                 for X, code, layer in codes]
        note(f"{name}relu", [100 * (X > 0).float().mean().item() for X, *_ in codes], ".0f")
        note(f"{name}code", [100 * (A > 0).float().mean().item() for _, A, _ in codes], ".0f")
        known[f"{name}lasso_down"] = sum(code < relu for relu, code, _ in costs)
        known[f"{name}zero_better"] = sum(zero < code for _, code, zero in costs)
    codes = [(layer, layer.norm2(trace.half), trace.out) for layer, _, trace, _ in layers]
    Ds = [layer.sparsification.D for layer, *_ in codes]
    note("miss", [100 * apart(A @ D.mT, X) for (_, X, A), D in zip(codes, Ds)], ".0f", " %")
    note("gram", [100 * apart(D.T @ D, eye) for D in Ds], ".0f", " %")
    note("size", [X.square().mean().item() ** 0.5 for _, X, _ in codes], ".1f")
    moved = [changes(layer, Z, U) for layer, Z, _, U in layers]
    known |= dict(
        count=len(x), weights=f"{sum(p.numel() for p in model.parameters()):,}",
        u_cos=f"{max(cosines):.2f}", eps_needed=f"{0.5 * max(strengths) ** 0.5:.1f}",
        att_down=sum(attention[0] < 0 for attention, *_ in moved),
        alone_more=sum(alone[0] < attention[0] for attention, alone, _ in moved),
        r_down=sum((coding_rate(A).mean() < coding_rate(X).mean()).item() for _, X, A in codes),
        rise_trained=rises(model, x), rise_untrained=rises(untrained, x),
        rise_other=rises(other, larger))
    for name, arch in dict(acc_w="crate", acc_u="crate-c", acc_n="crate-n").items():
        lines = read_metrics(ROOT / "records" / f"cifar10-cpu-30-{arch}-0")
        known[name] = f"{100 * [line['acc'] for line in lines if 'acc' in line][-1]:.1f}"
    return known, [moved, [changes(layer, Z, U) for layer, Z, _, U in traced(other, larger)]]


def scores(model, x, labels):
    """The accuracy in % with each switch of the last step."""
    return {name: 100 * (switched(model, x, **SWITCHES | change).argmax(1).numpy() == labels).mean()
            for name, change in SWITCHED.items()}


# ---- Points that can be moved, and what PyTorch makes of all ------------------------------------
def toys():
    """The points of steps 1 to 5 and 7, rounded."""
    g = torch.Generator().manual_seed(3)

    def drawn(n, stds, angle):
        c, s = math.cos(angle), math.sin(angle)
        return torch.randn(n, 2, generator=g) * torch.tensor(stds) @ torch.tensor([[c, s], [-s, c]])

    head = drawn(24, [1, 0.3], 0.5)
    U = torch.linalg.qr(torch.randn(16, 16, generator=g))[0]
    own = F.one_hot(torch.arange(32) % 4)[:, :, None] * torch.randn(32, 1, 4, generator=g)
    tokens = own.flatten(1) @ U + 0.1 * torch.randn(32, 16, generator=g)    # near 4 subspaces
    made = dict(cloud=drawn(12, [1, 0.4], 0.4), coefficients=1.2 * torch.randn(24, generator=g),
                noise=torch.randn(24, 3, generator=g), U=U, tokens=F.normalize(tokens, dim=-1),
                head=head / head.square().sum(1).mean() ** 0.5)
    return {name: value.double().round(decimals=3).tolist() for name, value in made.items()}


def expected(model, points, x, labels):
    """[(step, its knobs, {what it shows of the first picture or of points: PyTorch's number})]."""
    p, found = {name: torch.tensor(value).double() for name, value in points.items()}, []

    def say(step, knobs, **numbers):
        found.append((step, knobs, {key: float(f"{float(y):.5g}") for key, y in numbers.items()}))

    for eps, far, shift in ((0.5, 1, 0), (0.2, 2, 0), (1, 0.15, 1.5)):
        Z = far * p["cloud"] + torch.tensor([shift, 0])
        say(1, dict(eps1=eps, far1=far, shift1=shift), R=crate.coding_rate(Z, eps))

    line = F.one_hot(torch.arange(24) % 2, 3) * p["coefficients"][:, None]
    for turn, tilt, noise in ((35, 0, 0.06), (0, 90, 0.06), (20, 60, 0.3)):
        Z, (a, b) = line + noise * p["noise"], (math.radians(turn), math.radians(tilt))
        U = torch.tensor([[math.cos(a) * math.cos(b), math.sin(a) * math.cos(b), math.sin(b)],
                          [-math.sin(a), math.cos(a), 0]]).double()
        say(2, dict(turn2=turn, tilt2=tilt, noise2=noise),
            Rc=crate.subspace_coding_rate(Z[None], U[:, :, None]),
            missed=1 - (Z @ U.T).square().sum() / Z.square().sum())
    U = torch.eye(3).double()[:2, :, None]
    say(3, dict(turn3=0), R=crate.coding_rate(line), Rc=crate.subspace_coding_rate(line[None], U),
        objective=crate.sparse_rate_reduction(line[None], U, lambd=0.05))

    plane = torch.eye(2).double()[None]
    for steps, eps in ((0, 0.5), (20, 0.5), (100, 1)):
        Z, beta = p["head"][None], 2 / (24 * eps ** 2)
        for _ in range(steps):
            Z = Z - 0.1 / beta * crate.subspace_coding_rate_grad(Z, plane, eps)
        say(4, dict(steps4=steps, eps4=eps), Rc=crate.subspace_coding_rate(Z, plane, eps))
    for eps, length in ((1.5, 1), (0.5, 8)):
        Z = length * p["head"][None]
        first, second = crate.neumann_terms(Z, plane, eps)
        say(5, dict(eps5=eps, length5=length), two=(first - second).norm(),
            exact=crate.subspace_coding_rate_grad(Z, plane, eps).norm(),
            strength=2 / (24 * eps ** 2) * torch.linalg.matrix_norm(Z[0], 2) ** 2)

    Z, U, beta = p["tokens"][None], p["U"].view(4, 4, 16).mT, 4 / (32 * 0.25)
    attention = 0.1 * beta * averaged(Z[:, None] @ U, "softmax", 1) @ p["U"]
    steps = dict(exact=Z - 0.1 / beta * crate.subspace_coding_rate_grad(Z, U), shrunk=0.9 * Z,
                 derived=0.9 * Z + attention, kept=Z + attention)
    layers = traced(model, x)
    trained = [Rc for Rc, _ in changes(layers[-1][0], layers[-1][1], layers[-1][3])]
    for equal in (0, 1):
        say(7, dict(equal7=equal), **dict(zip(("attention", "alone", "mean"), trained)), **{
            name: crate.subspace_coding_rate(resized(T, Z) if equal else T, U)
            - crate.subspace_coding_rate(Z, U) for name, T in steps.items()})

    for l, (layer, Z, trace, U) in enumerate(layers, 1):
        X, A, D = layer.norm2(trace.half), trace.out, layer.sparsification.D
        w = layer.attention.projections(layer.norm1(Z))[0, 0]
        gram = layer.attention.scale * w @ w.T
        say(6, dict(layer=l), most=gram.max(), least=gram.min(), largest=gram[28].softmax(0).max(),
            root=(gram[28] / layer.attention.scale).softmax(0).max())
        say(9, dict(layer=l), X=coding_rate(X), DA=coding_rate(A @ D.mT), A=coding_rate(A),
            miss=apart(A @ D.mT, X))
        say(10, dict(layer=l), lasso=lasso(X, A, layer), relu=lasso(X, X.relu(), layer),
            nonzeros=(A != 0).float().mean())
        say(11, dict(layer=l), before=sparse_rate_reduction(Z, U),
            half=sparse_rate_reduction(trace.half, U), after=sparse_rate_reduction(A, U))
    for change in SWITCHED.values():
        say(12, change, chance=switched(model, x, **SWITCHES | change).softmax(1)[0, labels[0]])
    return found
