"""The lesson, "From R(Z) to a layer": python -m web.lesson writes docs/index.html.

Put together are lesson.html, .css, .js and crate.js; the lines of crate.py and model.py that the
text names ({code crate.ISTA.forward}); its formulas ($...$) as MathML; its inputs ({knobs eps1});
shapes-crate, trained and untrained; and the numbers of facts.py."""
import ast
import html
import json
import re
import textwrap

import torch

from checkpoint import load_model
from data.images import ImageData
from flags import ROOT
from web import facts, page

WORDS = ("frac|sqrt|sum|stack|clean|lowers|with|logdet|log|softmax|ReLU|ISTA|MSSA|SSA|LN|arg|min"
         "|max")
TOKEN = re.compile(rf"{WORDS}|\d+(?:\.\d+)?|\S")
CLOSING = {"(": ")", "[": "]", "‖": "‖"}

# Inputs by name: (label, values) of a choice, (label, on) of a box, (label, low, high, step, value)
KNOBS = dict(
    eps1=("error ε", 0.1, 2, 0.05, 0.5), far1=("far out by", 0.1, 2, 0.05, 1),
    shift1=("moved by", 0, 2, 0.05, 0),
    turn2=("turn", 0, 90, 1, 35), tilt2=("tilt", 0, 90, 1, 0),
    noise2=("noise σ", 0, 0.4, 0.02, 0.06),
    turn3=("turn all", 0, 360, 5, 0), lambda3=("λ", 0, 0.1, 0.005, 0.05),
    steps4=("steps", 0, 100, 1, 0), eps4=("error ε", 0.1, 1.5, 0.05, 0.5),
    eps5=("error ε", 0.1, 3, 0.05, 1.5), length5=("length", 1, 8, 0.1, 1),
    layer=("layer", 1, 4, 1, 4), head=("head", 1, 4, 1, 1), token=("token", 0, 64, 1, 28),
    eta=("η", 0, 1, 0.02, 0.1), lambd=("λ", 0, 10, 0.1, 0.1), lambda11=("λ", 0, 0.2, 0.01, 0.1),
    equal7=("rescale all to the length of <i>Z</i>", False), root=("divide by √p", True),
    noD=("D = 0", False), noLN=("no LayerNorm", False), untrained=("untrained", False),
    picture=("picture", 1, 10, 1, 9), att=("attention", facts.KINDS),
    out=("way back", ("W", "U", "−U")), prox=("threshold", ("ReLU", "soft")))


# ---- Formulas, code, inputs ---------------------------------------------------------------------
def mathml(words, display="inline"):
    """MathML of `R(Z) = frac{1}{2} logdet(I + α Z Z^*)`: one letter or number a sign, WORDS whole;
    _ and ^ for below and above, braces for groups, stack{{a}{b}} for a column in brackets."""
    tokens = TOKEN.findall(words)[::-1]

    def row(end=None):
        parts = []
        while tokens and tokens[-1] != end:
            parts.append(with_scripts())
        if end:
            tokens.pop()
        return "<mrow>" + "".join(parts) + "</mrow>"

    def atom():
        token = tokens.pop()
        if token == "{":
            return row("}")
        if token in CLOSING:
            inner = row(CLOSING[token])
            tall = "" if "<mfrac>" in inner or "mtable" in inner else ' stretchy="false"'
            space = ' lspace="0" rspace="0"' if token == "‖" else ""
            return (f"<mrow><mo{tall}{space}>{token}</mo>{inner}"
                    f"<mo{tall}{space}>{CLOSING[token]}</mo></mrow>")
        if token in ("frac", "sqrt"):
            return f"<m{token}>{atom()}{atom() if token == 'frac' else ''}</m{token}>"
        if token == "stack":
            tokens.pop()
            cells = []
            while tokens[-1] != "}":
                cells.append(f"<mtr><mtd>{atom()}</mtd></mtr>")
            tokens.pop()
            return f"<mrow><mo>[</mo><mtable>{''.join(cells)}</mtable><mo>]</mo></mrow>"
        if token in ("lowers", "with"):
            return f"<mtext>&nbsp;{token}&nbsp;</mtext>"
        if token == "sum":
            return "<mo>∑</mo>"
        if token.isalpha():
            return f"<mi>{token}</mi>"
        if token[0].isdigit():
            return f"<mn>{token}</mn>"
        return f"<mo>{token.replace('*', '∗')}</mo>"

    def with_scripts():
        names = ("under", "over") if tokens[-1] == "sum" else ("sub", "sup")
        base, parts = atom(), {}
        while tokens and tokens[-1] in "_^":
            place = tokens.pop()
            parts[place] = atom()
        name = "".join(name for name, place in zip(names, "_^") if place in parts)
        scripts = "".join(parts[place] for place in "_^" if place in parts)
        return f"<m{name}>{base}{scripts}</m{name}>" if parts else base

    return f'<math display="{display}">{row()}</math>'


def code(name, first="", last=""):
    """The lines of `crate.ISTA.forward` without its docstring; or those from the one that begins
    with `first` to the one that begins with `last`."""
    module, *path = name.split(".")
    source = (ROOT / f"{module}.py").read_text("utf-8")
    node = ast.parse(source)
    for part in path:
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    rows, body = source.splitlines(), node.body
    if isinstance(body[0], ast.Expr):                           # a docstring
        rows[body[0].lineno - 1:body[0].end_lineno] = []
        node.end_lineno -= body[0].end_lineno - body[0].lineno + 1
    rows = textwrap.dedent("\n".join(rows[node.lineno - 1:node.end_lineno])).splitlines()
    begins = [row.strip() for row in rows]
    if first:
        start, end = (next(i for i, row in enumerate(begins) if row.startswith(words))
                      for words in (first, last))
        rows = textwrap.dedent("\n".join(rows[start:end + 1])).splitlines()
    rows = [re.sub(r" +(#.*)", r"  <i>\1</i>", html.escape(row, quote=False)) for row in rows]
    return f"<pre><small>{module}.py, {'.'.join(path)}</small>\n{chr(10).join(rows)}</pre>"


def knobs(names):
    """The inputs of these names, as <label>s in one paragraph."""
    found = []
    for name in names.split():
        label, *range_ = KNOBS[name]
        if len(range_) > 1:
            low, high, step, value = range_
            found.append(f'<label><span>{label}</span><input type="range" name="{name}" min="{low}"'
                         f' max="{high}" step="{step}" value="{value}"><output></output></label>')
        elif isinstance(range_[0], bool):
            found.append(f'<label><input type="checkbox" name="{name}"{" checked" * range_[0]}>'
                         f"{label}</label>")
        else:
            options = "".join(f"<option>{value}" for value in range_[0])
            found.append(f'<label><span>{label}</span>'
                         f'<select name="{name}">{options}</select></label>')
    return f'<p class="knobs">{"".join(found)}</p>'


def picture():
    """The picture in sight, on which one can paint, and what chooses another."""
    return (f'<div class="choose"><canvas class="sight"></canvas><div>{knobs("picture")}'
            '<p class="knobs"><label><span>paint on it</span><input type="color" name="colour" '
            'value="#ffd400"></label><label><span>or open one</span><input type="file" '
            'accept="image/*"></label></p></div></div>')


def figure(beside):
    """The changes of R^c and of R - R^c in the layers of two models, as SVG."""
    parts = []

    def word(x, y, words, kind=""):
        parts.append(f'<text x="{x}" y="{y:.0f}" class="{kind}">{words}</text>')

    for panel in range(4):
        name, rate = ("shapes-crate: ", "cifar10-crate: ")[panel // 2], ("Rᶜ", "R − Rᶜ")[panel % 2]
        layers = [[change[panel % 2] for change in layer] for layer in beside[panel // 2]]
        low, high = (choose(value for layer in beside[panel // 2] for change in layer
                            for value in change) for choose in (min, max))
        left, y = 34 + 156 * panel, lambda value: 30 + 130 * (high - value) / (high - low)
        word(left, 14, name + rate)
        word(left, 184, "layer 1")
        word(left + 118, 184, len(layers), "end")
        for value in (low, 0, high) if panel % 2 == 0 else ():      # two panels have one scale
            word(left - 8, y(value) + 4, f"{value:.0f}".replace("-", "−"), "end")
        parts.append(f'<path class="faint" d="M{left} {y(0):.1f}h120"/>')
        for l, values in enumerate(layers):
            x, (attention, alone, mean) = left + 120 * (l + 0.5) / len(layers), map(y, values)
            parts.append(f'<circle class="hot" cx="{x:.1f}" cy="{attention:.1f}" r="4.5"/>'
                         f'<path class="dark" d="M{x - 4:.1f} {alone - 4:.1f}l8 8m0-8l-8 8"/>'
                         f'<circle class="ring" cx="{x:.1f}" cy="{mean:.1f}" r="4"/>')
    return (f'<svg viewBox="0 0 640 190" role="img" aria-label="change of the rates by layer">'
            f'{"".join(parts)}</svg>')


def table(rows):
    return "<table>" + "".join("<tr><th>" + "<td>".join(row) for row in rows) + "</table>"


# ---- The page -----------------------------------------------------------------------------------
@torch.no_grad()
def content():
    """(what the page has for its scripts, {name in the text: what stands for it})."""
    loaded = load_model("pretrained:shapes-crate")
    untrained = load_model("pretrained:shapes-crate", untrained_seed=0)
    other = load_model("pretrained:cifar10-crate")
    x, images, labels = facts.pictures(loaded.meta, 32, 200)
    larger, *_ = facts.pictures(other.meta, other.model.config.image_size, 10)
    drawn = ImageData(**loaded.meta, val_images=images, val_labels=labels)
    written = page.html("shapes-crate", loaded, untrained, drawn)       # rounds the model, too
    data = json.loads(re.search('json">(.*?)</script>', written)[1])

    known, beside = facts.facts(loaded.model, untrained.model, other.model, x[:100], larger)
    premises = (("", "[N]", "here"), ("length of a token, LN(<i>Z</i>)", "1", known["length"]),
                ("share of its energy in its best head", "near 1", known["near"]),
                ("singular values of <i>U<sub>k</sub></i>", "1", known["u"]),
                ("largest cosine between two heads", "near 0", known["angles"]),
                ("distance of ∑ <i>U<sub>k</sub>U<sub>k</sub></i><sup>∗</sup> from <i>I</i>",
                 "near 0", known["sums"]))
    switches = facts.scores(loaded.model, x, labels)
    known |= dict(scored=len(x), premises=table(premises), beside=figure(beside), switches=table(
        (name, f"{score:.0f} %") for name, score in switches.items()))
    points = facts.toys()
    data |= points | dict(tests=facts.expected(loaded.model, points, x[:1], labels),
                          labels=labels[:40].tolist(),
                          pictures=page.base64_of(torch.from_numpy(images[:40].copy())))
    return data, known


def written():
    """The page's text."""
    (data, known), out = content(), (ROOT / "web" / "lesson.html").read_text("utf-8")
    out = re.sub(r"\$\$(.*?)\$\$(\([^<\n]*\))", lambda found: (
        f'<p class="equation">{mathml(found[1], "block")}<span>{found[2]}</span></p>'), out,
        flags=re.DOTALL)
    out = re.sub(r"\$(.*?)\$", lambda found: mathml(found[1]), out, flags=re.DOTALL)
    out = re.sub(r"\{code ([\w.]+) ?(.*?)(?: \.\. (.*?))?\}", lambda found: code(
        found[1], found[2], found[3] or found[2]), out)
    titles = re.findall(r'<section id="(s\d+)">\s*<div class="says"><h2>(.*?)</h2>', out)
    known |= dict(picture=picture(), contents="".join(
        f'<a href="#{step}">{title}</a>' for step, title in titles))
    out = re.sub(r"\{knobs (.*?)\}", lambda found: knobs(found[1]), out)
    out = re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), out)
    for part in ("lesson.css", "crate.js", "lesson.js"):
        out = out.replace(f"{{{part}}}", (ROOT / "web" / part).read_text("utf-8"))
    return out.replace("{data}", json.dumps(data).replace("<", "\\u003c"))


if __name__ == "__main__":
    target = ROOT / "docs" / "index.html"
    target.write_text(written(), "utf-8")
    print(f"wrote {target.relative_to(ROOT)}, {target.stat().st_size / 1e3:.0f} KB")
