"""
Line charts and heat maps as PNG, with Pillow alone.

A panel is (curves, settings). A curve is (name, xs, ys) or (name, xs, ys, options): color (a number
of COLORS, or a grey level such as "0.5"), marker, line (False: dots only), dashes, and band, the
half-width of a band around it. Settings: xlabel, title, log (both axes), ylim, equal (one scale).
"""
import itertools
import math

from PIL import Image, ImageDraw, ImageFont

COLORS = ["#1f77b4", "#d6604d", "#3a923a", "#8c6bb1", "#8c564b", "#e08214", "#666666", "#17a2b8"]
WIDTH, HEIGHT = 470, 380                            # pixels of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46           # its margins
FINE = 3            # drawn larger by this factor and then reduced, which smooths the lines


def ticks(low, high, log=False, whole=False):
    """Round numbers from low to high: powers of ten, or about five multiples of 1, 2 or 5 times
    one; `whole` numbers only."""
    if log:
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        return [10.0 ** power for power in list(powers)[::max(len(powers) // 6, 1)]]
    unit = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(unit * m for m in (1, 2, 5, 10) if (high - low) / (unit * m) <= 7)
    step = max(step, 1) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def limits(values, log=False):
    """The smallest and the largest finite value, a little apart from the axis."""
    values = [v for v in values if v is not None and math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if log:
        low, high = math.log10(low), math.log10(high)
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin
    return (10 ** low, 10 ** high) if log else (low, high)


class Axes:
    """Where numbers lie in the panel with the left border `left`, all in fine pixels."""

    def __init__(self, curves, settings, left):
        self.log = settings.get("log", False)
        ys = []
        for _, _, values, *options in curves:
            band = dict(*options).get("band")
            band = [0.0] * len(values) if band is None else band
            ys += [float(y) + sign * float(b) for y, b in zip(values, band) for sign in (-1, 1)]
        xs = [float(x) for curve in curves for x in curve[1]]
        self.x, self.whole = limits(xs, self.log), all(x.is_integer() for x in xs)
        self.y = settings.get("ylim") or limits(ys, self.log)
        self.box = [left + LEFT * FINE, TOP * FINE,
                    left + (WIDTH - RIGHT) * FINE, (HEIGHT - BOTTOM) * FINE]
        if settings.get("equal"):       # the shorter range grows around its middle
            x0, y0, x1, y1 = self.box
            unit = max((self.x[1] - self.x[0]) / (x1 - x0), (self.y[1] - self.y[0]) / (y1 - y0))
            grow = lambda r, n: (sum(r) / 2 - n * unit / 2, sum(r) / 2 + n * unit / 2)
            self.x, self.y = grow(self.x, x1 - x0), grow(self.y, y1 - y0)

    def at(self, x, y):
        """The pixel of (x, y)."""
        scale = math.log10 if self.log else float
        share = lambda v, r: (scale(v) - scale(r[0])) / (scale(r[1]) - scale(r[0]))
        x0, y0, x1, y1 = self.box
        return x0 + share(x, self.x) * (x1 - x0), y1 - share(y, self.y) * (y1 - y0)


def draw_frame(draw, axes, settings, font):
    """Border, grid, numbers, title and name of the x axis."""
    x0, y0, x1, y1 = axes.box
    for x in ticks(*axes.x, axes.log, axes.whole):
        at = axes.at(x, axes.y[0])[0]
        draw.line([at, y0, at, y1], fill="#e4e4e4", width=FINE)
        draw.text((at, y1 + 4 * FINE), f"{x:,.6g}", "#333333", font, anchor="ma")
    for y in ticks(*axes.y, axes.log):
        at = axes.at(axes.x[0], y)[1]
        draw.line([x0, at, x1, at], fill="#e4e4e4", width=FINE)
        draw.text((x0 - 5 * FINE, at), f"{y:,.6g}", "#333333", font, anchor="rm")
    draw.rectangle(axes.box, outline="#999999", width=FINE)
    draw.text((x0, y0 - 8 * FINE), settings.get("title", ""), "black", font, anchor="ls")
    draw.text(((x0 + x1) / 2, y1 + 22 * FINE), settings.get("xlabel", ""), "black", font,
              anchor="ma")


def visible(axes, xs, ys):
    """[(index, pixel)] of the finite points, on log axes of the positive ones; y cut to the box."""
    points = [(i, float(x), float(y)) for i, (x, y) in enumerate(zip(xs, ys))]
    return [(i, axes.at(x, min(max(y, axes.y[0]), axes.y[1]))) for i, x, y in points
            if math.isfinite(x) and math.isfinite(y) and (not axes.log or min(x, y) > 0)]


def draw_curve(sheet, draw, axes, points, color, marker=False, line=True, dashes=False, band=None):
    """One curve through `visible` points."""
    pixels = [pixel for _, pixel in points]
    if band is not None and len(points) > 1:
        unit = (axes.box[3] - axes.box[1]) / (axes.y[1] - axes.y[0])
        cut = lambda y: min(max(y, axes.box[1]), axes.box[3])
        edges = [[(x, cut(y + sign * float(band[i]) * unit)) for i, (x, y) in points]
                 for sign in (-1, 1)]
        layer = Image.new("RGBA", sheet.size)
        ImageDraw.Draw(layer).polygon(edges[0] + edges[1][::-1], fill=color + "26")
        sheet.alpha_composite(layer)
    if line and dashes:
        for (ax, ay), (bx, by) in itertools.pairwise(pixels):
            pieces = max(round(math.hypot(bx - ax, by - ay) / (5 * FINE)), 1)
            for i in range(0, pieces, 2):
                a, b = i / pieces, (i + 1) / pieces
                draw.line([ax + a * (bx - ax), ay + a * (by - ay),
                           ax + b * (bx - ax), ay + b * (by - ay)], fill=color, width=2 * FINE)
    elif line and pixels:
        draw.line(pixels, fill=color, width=2 * FINE, joint="curve")
    radius = (3.2 if line else 1.8) * FINE
    for x, y in pixels if marker or not line else ():
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], fill=color)


def draw_legend(draw, axes, names, drawn, font):
    """The names beside their colours, where on the right or left edge the curves cross least."""
    if not names:
        return
    x0, y0, x1, y1 = axes.box
    edge = 8 * FINE
    width = max(font.getlength(name) for name, _ in names) + 26 * FINE
    height = 16 * FINE * len(names)
    on_curves = [(ax + t / 8 * (bx - ax), ay + t / 8 * (by - ay)) for points in drawn
                 for (_, (ax, ay)), (_, (bx, by)) in itertools.pairwise(points) for t in range(9)]
    places = itertools.product((x1 - edge - width, x0 + edge),
                               (y0 + edge, y1 - edge - height, (y0 + y1 - height) / 2))
    left, top = min(places, key=lambda place: sum(
        -edge < x - place[0] < width + edge and -edge < y - place[1] < height + edge
        for x, y in on_curves))
    for i, (name, color) in enumerate(names):
        y = top + (16 * i + 8) * FINE
        draw.line([left + 3 * FINE, y, left + 17 * FINE, y], fill=color, width=3 * FINE)
        draw.text((left + 22 * FINE, y), name, "#222222", font, anchor="lm")


def color_of(given):
    """#rrggbb of a number of COLORS or of a grey level such as "0.5"."""
    if isinstance(given, int):
        return COLORS[given % len(COLORS)]
    return "#" + 3 * f"{round(255 * float(given)):02x}"


def write(path, *panels):
    """Draws the panels side by side."""
    sheet = Image.new("RGBA", (WIDTH * FINE * len(panels), HEIGHT * FINE), "white")
    draw = ImageDraw.Draw(sheet, "RGBA")
    font = ImageFont.load_default(12 * FINE)
    for number, (curves, settings) in enumerate(panels):
        axes = Axes(curves, settings, number * WIDTH * FINE)
        draw_frame(draw, axes, settings, font)
        styles = [dict(*options) for _, _, _, *options in curves]
        colors = [color_of(style.pop("color", i)) for i, style in enumerate(styles)]
        names = [(name, color) for (name, *_), color in zip(curves, colors) if name]
        drawn = [visible(axes, xs, ys) for _, xs, ys, *_ in curves]
        draw_legend(draw, axes, names, drawn, font)
        for points, color, style in zip(drawn, colors, styles):
            draw_curve(sheet, draw, axes, points, color, **style)
    small = sheet.convert("RGB").resize((WIDTH * len(panels), HEIGHT), Image.Resampling.LANCZOS)
    small.quantize(128).save(path, optimize=True)       # a third of the bytes


def heat(path, maps, enlarge):
    """Matrices (h, w), one a layer, four a row: white is 0, black 1 and more."""
    h, w = maps[0].shape[0] * enlarge, maps[0].shape[1] * enlarge
    columns = min(4, len(maps))
    rows = -(-len(maps) // columns)
    sheet = Image.new("L", (columns * (w + 8) - 8, rows * (h + 14)), 225)
    for i, matrix in enumerate(maps):
        left, top = i % columns * (w + 8), i // columns * (h + 14)
        ImageDraw.Draw(sheet).text((left + 2, top + 1), f"layer {i + 1}", fill=0)
        grey = Image.fromarray((255 * (1 - matrix.clamp(0, 1))).round().byte().cpu().numpy())
        sheet.paste(grey.resize((w, h), Image.Resampling.NEAREST), (left, top + 14))
    sheet.save(path)
