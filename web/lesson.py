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
from checkpoint import load_model
from data import augment
from data.images import ImageData, Split
from data.shapes import draw_shapes
from flags import ROOT
from measure import at_norm, centered, each_alone, layer_numbers, rate_change, unit_size
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


def of_layer(layer, trace):
    """{name in the text: what a layer has, or makes of the traced tokens}."""
    attention, U = layer.attention, layer.attention.bases()
    X, Q, unit = layer.norm1(trace.tokens), torch.linalg.qr(U)[0], unit_size(U)
    w = attention.projections(X)
    n, p = w.shape[2:]                                                  # w (B, K, n, p)
    start, step = centered(trace.tokens), centered(trace.half - trace.tokens)
    steps = dict(attention=step, alone=centered(each_alone(attention, X)),
                 downhill=-crate.subspace_coding_rate_grad(start, unit, 0.1))
    before, after = (crate.subspace_coding_rate(Z, unit, 0.1) for Z in (trace.tokens, trace.half))
    D, lambd = layer.sparsification.D, layer.sparsification.lambd
    Y, A, gram, eye = layer.norm2(trace.half), trace.code, D.T @ D, torch.eye(len(D))
    DA = A @ D.mT
    noise = at_norm(torch.randn(A.shape, generator=torch.Generator().manual_seed(0)).to(A), A)

    def share(T):                       # of R(X), %
        return 100 * crate.coding_rate(T) / crate.coding_rate(Y)

    def lasso(A):                       # in % of that of no code
        return 100 * ((Y - A @ D.mT).square().sum() + 2 * lambd * A.abs().sum()) / Y.square().sum()
    return dict(
        s=p / (n * 0.5 ** 2) * torch.linalg.matrix_norm(w, 2) ** 2,     # beta times tau^2
        length=X.norm(dim=-1),
        near=100 * (X[:, None] @ Q).square().sum(-1).amax(1) / X.square().sum(-1),
        u_least=torch.linalg.svdvals(U).min(), u_largest=torch.linalg.svdvals(U).max(),
        before=before, as_it_is=after - before,
        **{k: rate_change(start, at_norm(T, step), unit, 0.1) for k, T in steps.items()},
        cos=F.cosine_similarity(attention.W.weight.T.flatten(), attention.U.weight.flatten(), 0),
        kept=share(A), noise_kept=share(noise), coded=share(DA), coded_long=share(at_norm(DA, Y)),
        gram=apart(gram, eye), miss=apart(DA, Y),
        scaled=apart(gram * gram.trace() / gram.square().sum(), eye),
        start=lasso(Y), lasso=lasso(A), relu=lasso(Y.relu()),
        **{k: v for k, v in layer_numbers(layer, trace, lambd=0).items() if k in ("rise", "gain")})


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
    shown = "attention", "as_it_is", "rise", "lasso", "miss"
    known |= {name: numbers[name][-1] for name in shown}
    data |= dict(points=plane,
                 known=known | dict(chance=chances[0, 0]), many_labels=labels[:40],
                 many=page.base64_of(torch.from_numpy(images[:40])))
    text = dict(data="{data}")              # which page.filled fills
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
    out = re.sub(r"\{code (.*?)\}", lambda found: code(found[1]), out)
    out = re.sub(r"\{slider (\S+) (\S+) (\S+) (\S+) (\S+) (.*?)\}", (
        r'<label>\6 <input type="range" name="\1" min="\2" max="\3" step="\4" value="\5">'
        "</label>"), out)
    out = re.sub(r"<td>\{(\w+)\}", lambda found: "<td>" + text[found[1]].replace(", ", "<td>"), out)
    out = re.sub(r"\{(\w+)\}", lambda found: text[found[1]], out)
    return page.filled(out, data)


if __name__ == "__main__":
    target = ROOT / "docs" / "index.html"
    target.write_text(written(), "utf-8")
    print(f"wrote {target.relative_to(ROOT)}, {target.stat().st_size / 1e3:.0f} KB")
