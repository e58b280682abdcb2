"""The lesson, "From R(Z) to a layer": python -m web.lesson writes docs/index.html.

Put together are lesson.html, .css, .js and crate.js; the lines of crate.py and model.py that the
text names ({code crate.ISTA.forward}); its formulas ($...$) as MathML; its inputs ({knobs eps1});
shapes-crate, trained and untrained; what was measured on it; and numbers to compare the page's."""
import base64
import html
import inspect
import json
import re
import textwrap
from collections import Counter, defaultdict
from operator import attrgetter

import torch
from torch.nn import functional as F

import crate
import model
from analyze import layer_numbers, Layers, unit_size
from checkpoint import load_model
from data import augment
from data.images import ImageData
from data.shapes import draw_shapes
from flags import ROOT
from run import read_metrics
from web import page

WORDS = "frac|sqrt|clean|logdet|log|softmax|ReLU|ISTA|MSSA|SSA|LN|arg|min|max"
TOKEN = re.compile(rf"{WORDS}|\d+(?:\.\d+)?|\S")
CLOSING = {"(": ")", "[": "]", "‖": "‖"}

# Inputs by name: (label, values) of a choice, (label, on) of a box, (label, low, high, step, value)
KNOBS = dict(
    eps1=("error ε", 0.1, 2, 0.05, 0.5), far1=("far out by", 0.1, 2, 0.05, 1),
    shift1=("moved by", 0, 2, 0.05, 0), turn2=("turn", 0, 90, 1, 0), tilt2=("tilt", 0, 90, 1, 0),
    turn3=("turn all", 0, 360, 5, 0), lambda3=("λ", 0, 0.1, 0.005, 0.05),
    steps4=("steps", 0, 100, 1, 0), eps5=("error ε", 0.1, 3, 0.05, 1.5),
    length5=("length", 1, 8, 0.1, 1),
    layer=("layer", 1, 4, 1, 4), head=("head", 1, 4, 1, 1), token=("token", 0, 64, 1, 28),
    eta=("η", 0, 1, 0.02, 0.1), lambd=("λ", 0, 10, 0.1, 0.1), lambda11=("λ", 0, 0.2, 0.01, 0.1),
    equal7=("at the norm of <i>Z</i>", True), root=("divide by √p", True),
    noD=("D = 0", False), noLN=("no LayerNorm", False), untrained=("untrained", False),
    picture=("picture", 1, 8, 1, 8), out=("way back", ("W", "U", "−U")),
    att=("attention", ("softmax", "each token alone", "mean token")),
    prox=("threshold", ("ReLU", "soft")))


# ---- Formulas, code, inputs ---------------------------------------------------------------------
def mathml(words, display="inline"):
    """MathML of `R(Z) = frac{1}{2} logdet(I + α Z Z^*)`: one letter or number a sign, WORDS whole;
    _ and ^ for below and above, braces for groups."""
    tokens = TOKEN.findall(words)[::-1]

    def row(end=None):
        parts = []
        while tokens and tokens[-1] != end:
            parts.append(with_scripts())
        if end:
            tokens.pop()
        return "<mrow>" + "".join(parts) + "</mrow>"

    def atom():
        """The next letter, number or group."""
        token = tokens.pop()
        if token == "{":
            return row("}")
        if token in CLOSING:
            inner = row(CLOSING[token])
            tall = "" if "<mfrac>" in inner else ' stretchy="false"'
            space = ' lspace="0" rspace="0"' if token == "‖" else ""
            return (f"<mrow><mo{tall}{space}>{token}</mo>{inner}"
                    f"<mo{tall}{space}>{CLOSING[token]}</mo></mrow>")
        if token in ("frac", "sqrt"):
            return f"<m{token}>{atom()}{atom() if token == 'frac' else ''}</m{token}>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        return f"<mo>{token.replace('*', '∗')}</mo>"

    def with_scripts():
        names = ("under", "over") if tokens[-1] == "∑" else ("sub", "sup")
        base, parts = atom(), {}
        while tokens and tokens[-1] in "_^":
            place = tokens.pop()
            parts[place] = atom()
        name = "".join(name for name, place in zip(names, "_^") if place in parts)
        scripts = "".join(parts[place] for place in "_^" if place in parts)
        return f"<m{name}>{base}{scripts}</m{name}>" if parts else base

    return f'<math display="{display}">{row()}</math>'


def code(name):
    """The lines of `crate.ISTA.forward` without its docstring."""
    module, _, path = name.partition(".")
    source = inspect.getsource(attrgetter(path)({"crate": crate, "model": model}[module]))
    source = re.sub(r'\n *""".*?"""', "", textwrap.dedent(source), count=1, flags=re.DOTALL)
    lines = re.sub(" +(#.*)", r"  <i>\1</i>", html.escape(source.rstrip(), quote=False))
    return f"<pre><small>{module}.py, {path}</small>\n{lines}</pre>"


def knobs(names):
    """The inputs of these names, as <label>s in one paragraph."""
    found = []
    for name in names.split():
        label, *kind = KNOBS[name]
        if len(kind) > 1:
            low, high, step, value = kind
            box = (f'<input type="range" name="{name}" min="{low}" max="{high}" step="{step}" '
                   f'value="{value}"><output></output>')
        elif isinstance(kind[0], bool):
            box = f'<input type="checkbox" name="{name}"{" checked" * kind[0]}>'
        else:
            options = "".join(f"<option>{word}" for word in kind[0])
            box = f'<select name="{name}">{options}</select>'
        found.append(f"<label><span>{label}</span>{box}</label>")
    return f'<p class="knobs">{"".join(found)}</p>'


# ---- Numbers ------------------------------------------------------------------------------------
def apart(A, B):
    return (A - B).norm() / B.norm()


def traced(net, x):
    """[(layer, Z^l, its trace, X = LN(Z^{l+1/2}), R - R^c at Z^l, Z^{l+1/2} and Z^{l+1})]."""
    Z, found = net.encoder.tokens(x), []
    for layer, trace in zip(net.encoder.layers, net.encoder.trace(x)):
        U = unit_size(layer.attention.bases())
        rates = [crate.sparse_rate_reduction(T, U, lambd=0) for T in (Z, trace.half, trace.out)]
        found.append((layer, Z, trace, layer.norm2(trace.half), rates))
        Z = trace.out
    return found


def changes(layer, Z, trace):
    """What attention adds to R^c at equal norm, and a step as long in which tokens are alone."""
    numbers = layer_numbers(layer, Z, trace, Layers(ckpt="", eps=0.1, unit_bases=True))
    return numbers["Rc_change"].mean(), numbers["Rc_alone"].mean()


def lasso(layer, X, A):
    s = layer.sparsification
    return (0.5 * (X - A @ s.D.mT).square().sum() + s.lambd * A.abs().sum()) / len(X)


def facts(net, untrained, x):
    """{name in the text: what was measured on the pictures x}."""
    spans, counts, eye = defaultdict(list), Counter(), torch.eye(net.config.width)
    for (layer, Z, trace, X, rates), (*_, drawn) in zip(traced(net, x), traced(untrained, x)):
        a, A, D, tokens = layer.attention, trace.out, layer.sparsification.D, layer.norm1(Z)
        w, Q = a.projections(tokens), torch.linalg.qr(a.bases())[0]
        energy, (K, n, p) = w.square().sum(-1), w.shape[1:]
        cosines = torch.linalg.svdvals(Q[:, None].mT @ Q)[..., 0]           # of each two heads
        spans["s"].append(p / (n * 0.25) * (torch.linalg.matrix_norm(w, 2) ** 2).mean())
        spans["length"].append(tokens.norm(dim=-1).mean())
        spans["near"].append((energy.amax(1) / energy.sum(1)).mean())
        spans["u"] += torch.linalg.svdvals(a.bases()).flatten()
        spans["angles"] += cosines[~torch.eye(K, dtype=torch.bool)]
        spans["sums"].append(100 * apart(a.U.weight.T @ a.U.weight, eye))
        spans["cos"].append(F.cosine_similarity(a.W.weight.flatten(), a.U.weight.T.flatten(), 0))
        spans["miss"].append(100 * apart(A @ D.mT, X))
        spans["gram"].append(100 * apart(D.T @ D, eye))
        (attention, alone), cost = changes(layer, Z, trace), lasso(layer, X, A)
        counts["att_down"] += attention < 0
        counts["alone_more"] += alone < attention
        counts["below_relu"] += cost < lasso(layer, X, X.relu())
        counts["above_zero"] += cost > lasso(layer, X, 0 * X)
        counts["rise_trained"] += rates[2].mean() > rates[0].mean()
        counts["rise_untrained"] += drawn[2].mean() > drawn[0].mean()
    known = {name: int(count) for name, count in counts.items()}
    for name, values in spans.items():
        low, high = (f"{float(choose(values)):.3g}" for choose in (min, max))
        known[name] = f"{low} to {high}".replace("-", "−")
    for name, arch in dict(acc_w="crate", acc_u="crate-c", acc_n="crate-n").items():
        lines = read_metrics(ROOT / "records" / f"cifar10-cpu-30-{arch}-0")
        known[name] = f"{100 * [line['acc'] for line in lines if 'acc' in line][-1]:.1f}"
    return known


def expected(net, points, x):
    """[(step, {what it shows of the points, or of picture x in the last layer: its value})]."""
    P, eye = torch.tensor(points).double(), torch.eye(3).double()
    cloud, head = P[:12, :2] * torch.tensor([1.5, 0.4]), P[None, :24, 2:4] * torch.tensor([1, 0.3])
    line = 1.2 * P[:24, 4:5] * eye[torch.arange(24) % 2]
    axes, plane = eye[:2, :, None], eye[None, :2, :2]
    layer, Z, trace, X, rates = traced(net, x)[-1]
    (attention, alone), DA = changes(layer, Z, trace), trace.out @ layer.sparsification.D.mT
    return [
        (1, dict(R=crate.coding_rate(cloud))),
        (2, dict(Rc=crate.subspace_coding_rate((line + 0.06 * P[:24, 5:8])[None], axes))),
        (3, dict(R=crate.coding_rate(line), Rc=crate.subspace_coding_rate(line[None], axes))),
        (4, dict(Rc=crate.subspace_coding_rate(head, plane))),
        (5, dict(two=torch.sub(*crate.neumann_terms(head, plane, 1.5)).norm(),
                 exact=crate.subspace_coding_rate_grad(head, plane, 1.5).norm())),
        (6, dict(largest=layer.attention.map(layer.norm1(Z))[0, 0, 28].max())),
        (7, dict(attention=attention, alone=alone)),
        (9, dict(X=crate.coding_rate(X), DA=crate.coding_rate(DA), miss=apart(DA, X))),
        (10, dict(lasso=lasso(layer, X, trace.out), relu=lasso(layer, X, X.relu()))),
        (11, dict(attention=rates[1] - rates[0], ISTA=rates[2] - rates[1])),
        (12, dict(chance=net(x).softmax(1)[0, 0]))]


# ---- The page -----------------------------------------------------------------------------------
@torch.no_grad()
def content():
    """(what the page has for its scripts, {name in the text: what stands for it})."""
    loaded = load_model("pretrained:shapes-crate")
    untrained = load_model("pretrained:shapes-crate", untrained_seed=0)
    images, labels, _ = draw_shapes(100, seed=1)
    data = page.content("shapes-crate", loaded, untrained, ImageData(
        **loaded.meta, val_images=images, val_labels=labels))           # rounds the model, too
    x = augment.normalize(augment.to_float(torch.from_numpy(images)), data["mean"], data["std"])
    points = torch.randn(32, 8, generator=torch.Generator().manual_seed(3)).tolist()
    data |= dict(points=points, tests=expected(loaded.model, points, x[labels == 0][:1]),
                 many=page.base64_of(torch.from_numpy(images[:40])),
                 many_labels=labels[:40].tolist())
    figure = base64.b64encode((ROOT / "docs" / "figures" / "compression.png").read_bytes())
    return data, facts(loaded.model, untrained.model, x) | dict(
        weights=data["weights"], compression=figure.decode())


def written():
    """The page's text."""
    (data, known), out = content(), (ROOT / "web" / "lesson.html").read_text("utf-8")
    out = re.sub(r"\$\$([^$]*)\$\$(\(.*\))", lambda found: (
        f'<p class="equation">{mathml(found[1], "block")}<span>{found[2]}</span></p>'), out)
    out = re.sub(r"\$([^$]*)\$", lambda found: mathml(found[1]), out)
    out = re.sub(r"\{code (.*?)\}", lambda found: code(found[1]), out)
    out = re.sub(r"\{knobs (.*?)\}", lambda found: knobs(found[1]), out)
    out = re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), out)
    for part in ("lesson.css", "crate.js", "lesson.js"):
        out = out.replace(f"{{{part}}}", (ROOT / "web" / part).read_text("utf-8"))
    return out.replace("{data}", json.dumps(data, default=float).replace("<", "\\u003c"))


if __name__ == "__main__":
    target = ROOT / "docs" / "index.html"
    target.write_text(written(), "utf-8")
    print(f"wrote {target.relative_to(ROOT)}, {target.stat().st_size / 1e3:.0f} KB")
