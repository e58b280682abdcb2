"""The lesson, "From R(Z) to a layer": python -m web.lesson writes docs/index.html.

In lesson.html formulas ($...$) become MathML; {code crate.ISTA.forward} stands for these lines of
crate.py, {slider NAME LOW HIGH STEP VALUE WORDS} for an input, {crate.js} for this file, {miss} for
what was measured on shapes-crate. The page gets this model, trained and untrained, and numbers of
PyTorch's, with which it compares its own."""
import html
import inspect
import pkgutil
import re
import textwrap

import torch
from torch.nn import functional as F

import crate
from analyze import at_norm, layer_numbers
from checkpoint import load_model
from data import augment
from data.images import ImageData, Split
from data.shapes import draw_shapes
from experiments.compression import changes
from flags import ROOT
from model import by_head, lasso
from web import page
from web.mathml import mathml


# ---- Code and numbers ---------------------------------------------------------------------------
def code(name):
    """The lines of `crate.ISTA.forward` without its docstring."""
    module, _, path = name.partition(".")
    source = textwrap.dedent(inspect.getsource(pkgutil.resolve_name(name)))
    source = re.sub(r'\n *""".*?"""', "", source, count=1, flags=re.DOTALL)
    lines = re.sub(" +(#.*)", r"  <i>\1</i>", html.escape(source.rstrip(), quote=False))
    lines = re.sub("^(.*)$", r"<code>\1</code>", lines, flags=re.MULTILINE)
    return f"<pre><small>{module}.py, {path}</small>\n{lines}</pre>"


def apart(A, B):
    """The distance of A from B in % of the length of B."""
    return 100 * (A - B).norm() / B.norm()


def of_subspaces(layer, trace):
    """How far U, W and the tokens are from what the derivation presumes."""
    attention, U, X = layer.attention, layer.attention.bases(), layer.norm1(trace.tokens)
    w, Q = by_head(attention.U(X), len(U)), torch.linalg.qr(U)[0]
    n, p = w.shape[2:]                                                  # w (B, K, n, p)
    return dict(
        s=p / (n * 0.5 ** 2) * torch.linalg.matrix_norm(w, 2) ** 2,     # beta times tau^2
        length=X.norm(dim=-1),
        near=100 * (X[:, None] @ Q).square().sum(-1).amax(1) / X.square().sum(-1),
        u_least=torch.linalg.svdvals(U).min(), u_largest=torch.linalg.svdvals(U).max(),
        frame=apart((U @ U.mT).sum(0), torch.eye(len(U[0]))),
        cos=F.cosine_similarity(attention.W.weight.T.flatten(), attention.U.weight.flatten(), 0))


def of_attention(layer, trace):
    """What steps as long as attention's add to R^c after a LayerNorm, and R^c before them."""
    added = changes(layer, trace.tokens, torch.Generator().manual_seed(0), 0.1)
    return dict(normed_before=added["normed", "before"],
                **{name: added["normed", name] for name in ("alone", "turned", "alone_turned")})


def of_code(layer, trace):
    """What the code A of tokens X costs, and what it keeps, in % of what X or no code has."""
    X, A, D = layer.norm2(trace.half), trace.code, layer.sparsification.D
    DA = A @ D.mT
    noise = at_norm(torch.randn(A.shape, generator=torch.Generator().manual_seed(0)).to(A), A)

    def rate(T):
        return 100 * crate.coding_rate(T) / crate.coding_rate(X)

    def cost(A):
        return 100 * sum(lasso(A, X, D, layer.sparsification.lambd)).sum() / (X.square().sum() / 2)
    return dict(
        kept=rate(A), noise_kept=rate(noise), coded=rate(DA), coded_long=rate(at_norm(DA, X)),
        gram=apart(D.T @ D, torch.eye(len(D))), miss=apart(DA, X),
        start=cost(X), lasso=cost(A), relu=cost(X.relu()))


def of_layer(layer, trace):
    """{name in the text: what a layer has, or makes of the traced tokens}."""
    return (layer_numbers(layer, trace, lambd=0) | of_subspaces(layer, trace)
            | of_attention(layer, trace) | of_code(layer, trace))


def listed(values):
    """The numbers of the layers for a sentence, all to the same decimal."""
    decimals = sum(max(map(abs, values)) < bound for bound in (20, 1))
    return ", ".join(f"{value:z.{decimals}f}" for value in values).replace("-", "−")


def by_layer(net, x):
    """{name: its mean in each layer} of the numbers of `of_layer`, on the pictures x."""
    rows = [*map(of_layer, net.encoder.layers, net.encoder.trace(x))]
    return {name: [float(row[name].mean()) for row in rows] for name in rows[0]}


def points():
    """({name: the points of steps 1, 2, 3, and of 4 and 5}, what PyTorch computes of them)."""
    torch.manual_seed(3)
    cloud = torch.randn(12, 2) * torch.tensor([1.5, 0.4])
    lines = (3.6 * torch.rand(24, 1) - 1.8) * torch.eye(3)[torch.arange(24) % 2]
    near = lines + 0.06 * torch.randn(24, 3)
    head = torch.randn(24, 2) * torch.tensor([1, 0.3])
    axes, plane = torch.eye(3)[:2, :, None], torch.eye(2)[None]
    return dict(cloud=cloud, near=near, lines=lines, head=head), dict(
        R=crate.coding_rate(cloud), Rc=crate.subspace_coding_rate(near[None], axes)[0],
        exact=crate.subspace_coding_rate_grad(head[None], plane, 2).norm(),
        two=torch.sub(*crate.neumann_terms(head[None], plane, 2)).norm())


# ---- The page -----------------------------------------------------------------------------------
@torch.no_grad()
def measured():
    """(what the page has for its scripts, {name in the text: what stands for it})."""
    loaded = load_model("pretrained:shapes-crate")
    untrained = load_model("pretrained:shapes-crate", untrained_seed=0)
    loaded.model.half().float()                         # as the page keeps it
    images, labels, _ = draw_shapes(100, seed=1)
    data = page.content("shapes-crate", loaded, untrained,
                        ImageData(**loaded.meta, val=Split(images, labels)))
    x = augment.normalize(augment.to_float(torch.from_numpy(images)), data["mean"], data["std"])
    x, trained, drawn = x.double(), loaded.model.double(), untrained.model.double()
    first, (plane, known) = x[labels == 0][:1], points()
    numbers, chances = by_layer(trained, first), trained(first).softmax(1)
    shown = "attention_Rc_normed", "attention_Rc", "objective_added", "lasso", "miss"
    known |= {name: numbers[name][-1] for name in shown}
    data |= dict(points=plane,
                 known=known | dict(chance=chances[0, 0]), many_labels=labels[:40],
                 many=page.base64_of(torch.from_numpy(images[:40])))
    text = {}
    for prefix, net in (("", trained), ("random_", drawn)):
        numbers = by_layer(net, x)
        text |= {prefix + name: listed(values) for name, values in numbers.items()}
    return data, text


def written():
    """The page's text."""
    data, text = measured()
    out = (ROOT / "web" / "lesson.html").read_text("utf-8")
    out = re.sub(r"\$\$([^$]*)\$\$(\(.*\))", lambda found: (
        f'<p class="equation"><math display="block">{mathml(found[1])}</math>'
        f"<span>{found[2]}</span></p>"), out)

    def fill(found):
        kind, rest, cell, name = found.groups()
        if kind == "code":
            return code(rest)
        if kind == "slider":
            name, low, high, step, value, words = rest.split(" ", 5)
            return (f'<label>{words} <input type="range" name="{name}" min="{low}" max="{high}" '
                    f'step="{step}" value="{value}"></label>')
        if name == "data":              # which page.filled fills
            return found[0]
        return cell + text[name].replace(", ", "<td>") if cell else text[name]

    out = re.sub(r"\{(code|slider) (.*?)\}|(<td>)?\{(\w+)\}", fill, out)
    return page.filled(out, data)


if __name__ == "__main__":
    target = ROOT / "docs" / "index.html"
    target.write_text(written(), "utf-8")
    print(f"wrote {target.relative_to(ROOT)}, {target.stat().st_size / 1e3:.0f} KB")
