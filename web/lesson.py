"""The lesson, "From R(Z) to a layer": python -m web.lesson writes docs/index.html.

In lesson.html formulas ($...$) become MathML, before the scripts, whose ${...} look alike, come in.
{code crate.ISTA.forward} stands for these lines of crate.py, {slider NAME LOW HIGH STEP VALUE
WORDS} for an input, {crate.js} for this file, and {numbers miss} or {cells miss}, in a table, for
what `in_layers` measures in each layer of shapes-crate. The page gets this model, trained and
untrained, and numbers of PyTorch's, with which it compares its own."""
import html
import inspect
import pkgutil
import re
import textwrap

import torch

import crate
from checkpoint import load_model
from data import augment
from data.images import ImageData, Split
from data.shapes import draw_shapes
from experiments import compression, derivation
from flags import ROOT
from measure import layer_numbers, unit_size
from model import lasso
from web import page


# ---- Code and numbers ---------------------------------------------------------------------------
def code(name):
    """The lines of `crate.ISTA.forward` without its docstring."""
    module, _, path = name.partition(".")
    source = textwrap.dedent(inspect.getsource(pkgutil.resolve_name(name)))
    source = re.sub(r'\n *""".*?"""', "", source, count=1, flags=re.DOTALL)
    lines = re.sub(" +(#.*)", r"  <i>\1</i>", html.escape(source.rstrip(), quote=False))
    lines = re.sub("^(.*)$", r"<code>\1</code>", lines, flags=re.MULTILINE)
    return f"<pre><small>{module}.py, {path}</small>\n{lines}</pre>"


def slider(rest):
    """An input of `NAME LOW HIGH STEP VALUE WORDS`."""
    name, low, high, step, value, words = rest.split(" ", 5)
    return (f'<label>{words} <input type="range" name="{name}" min="{low}" max="{high}" '
            f'step="{step}" value="{value}"></label>')


def rounded(values):
    """The numbers of the layers as words, all to the same decimal."""
    largest = max(map(abs, values))
    decimals = 2 if largest < 1 else 1 if largest < 20 else 0
    return [f"{value:z.{decimals}f}".replace("-", "−") for value in values]


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


def costs(layer, trace):
    """The LASSO (41) of A = X, of the layer's code, and of ReLU(X), in % of that of no code."""
    X, D, lambd = layer.norm2(trace.half), layer.sparsification.D, layer.sparsification.lambd
    no_code = X.square().sum((1, 2)) / 2
    return {name: 100 * sum(lasso(A, X, D, lambd)) / no_code
            for name, A in dict(start=X, lasso=trace.code, relu=X.relu()).items()}


def in_layers(backbone, x):
    """{name: its mean over x in each layer} of `costs`, of `python analyze.py layers` at lambda 0,
    and of the experiments derivation and, of R^c after a LayerNorm, compression."""
    rows = derivation.by_layer(backbone, x)
    for row, layer, trace in zip(rows, backbone.layers, backbone.trace(x)):
        Z, U = trace.tokens, unit_size(layer.attention.bases())
        steps = compression.steps(layer, Z, torch.Generator().manual_seed(0), eps=0.1)
        steps = {name: steps[name] for name in ("attention", "alone", "turned")}
        steps = compression.as_long(steps, compression.length(steps["attention"]))
        added = compression.added(steps, Z, U, eps=0.1)
        numbers = layer_numbers(layer, trace, lambd=0) | costs(layer, trace) | added
        row |= {name: value.mean().item() for name, value in numbers.items()}
    return {name: [row[name] for row in rows] for name in rows[0]}


# ---- The page -----------------------------------------------------------------------------------
@torch.no_grad()
def measured():
    """(what the page has for its scripts, {name: its words in each layer})."""
    loaded = load_model("pretrained:shapes-crate")
    untrained = load_model("pretrained:shapes-crate", untrained_seed=0)
    loaded.model.half().float()                         # as the page keeps it
    images, labels, _ = draw_shapes(100, seed=1)
    data = page.content("shapes-crate", loaded, untrained,
                        ImageData(**loaded.meta, val=Split(images, labels)))
    x = augment.normalize(augment.to_float(torch.from_numpy(images)), data["mean"], data["std"])
    x, trained, drawn = x.double(), loaded.model.double(), untrained.model.double()
    first, (of_steps, known) = x[labels == 0][:1], points()
    numbers, chance = in_layers(trained.encoder, first), trained(first).softmax(1)[0, 0]
    shown = "attention_Rc_normed", "attention_Rc", "objective_added", "lasso", "miss"
    known |= {name: numbers[name][-1] for name in shown}
    data |= dict(points=of_steps, many=page.base64_of(torch.from_numpy(images[:40])),
                 known=known | dict(way_back=chance, chance=chance), many_labels=labels[:40])
    words = {}
    for prefix, net in (("", trained), ("random_", drawn)):
        for name, values in in_layers(net.encoder, x).items():
            words[prefix + name] = rounded(values)
    return data, words


def written():
    """The page's text."""
    data, words = measured()
    makers = dict(code=code, slider=slider, numbers=lambda name: ", ".join(words[name]),
                  cells=lambda name: "".join(f"<td>{word}" for word in words[name]))
    out = (ROOT / "web" / "lesson.html").read_text("utf-8")
    out = re.sub(r"\$\$([^$]*)\$\$(\(.*\))", r'<p class="equation">$$\1$$<span>\2</span></p>', out)
    out = re.sub(r"\{(code|slider|numbers|cells) (.*?)\}",
                 lambda found: makers[found[1]](found[2]), out)
    return page.filled(out, data)


if __name__ == "__main__":
    target = ROOT / "docs" / "index.html"
    target.write_text(written(), "utf-8")
    print(f"wrote {target.relative_to(ROOT)}, {target.stat().st_size / 1e3:.0f} KB")
