"""What commands show: tables, figures, and sheets of pictures as PNG files."""
import math
import re

import torch
from torch.nn import functional as F

from data.augment import luma
from model import patchify, unpatchify


def print_table(rows):
    """Dicts with the same keys, one a line; a standard error KEY_error follows KEY."""
    def cell(row, key):
        value, extra = row[key], row.get(key + "_error")
        shown = "-" if value is None else str(value)
        if isinstance(value, float):
            shown = f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
        return f"{shown} +- {extra:.2g}" if extra and extra > 1e-12 else shown      # of rounding

    keys = [key for key in rows[0] if not key.endswith("_error")]
    lines = [keys] + [[cell(row, key) for key in keys] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths)))


def new_figure(rows, columns, width, height):
    """A matplotlib figure and its axes (rows, columns), each panel `width` x `height` inches."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def over_layers(ax, title):
    """Titles a panel whose x axis counts layers."""
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel("layer")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.spines[["top", "right"]].set_visible(False)


def legend_below(figure, ax):
    """The labels of `ax` below all panels, four a line, or two if they are long."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False,
                  ncols=4 if sum(map(len, labels)) < 90 else 2)


def write_sheet(path, pictures, columns, rows):
    """A PNG of pictures (n, m, 3, H, W) in [0, 1] under the titles of the m columns, beside the
    names of the n rows, whose long lines lose their middle."""
    from matplotlib.figure import Figure
    n, m, _, height, width = pictures.shape
    gap = width // 16
    sheet = F.pad(pictures.float().clamp(0, 1), (0, gap, 0, gap), value=1.0)
    sheet = sheet.permute(0, 3, 1, 4, 2).reshape(n * (height + gap), m * (width + gap), 3)
    # no pixel is lost; matplotlib draws at most 65,536 per side
    inches = min(max(1.5, max(height, width) / 150), 400 / max(n, m))
    axes = Figure((inches * m, inches * n)).add_axes((0, 0, 1, 1))
    axes.imshow(sheet.cpu().numpy(), interpolation="nearest")
    rows = [re.sub(r"(?m)^(.{11}).{3,}(.{11})$", r"\1..\2", row) for row in rows]
    axes.set_xticks([(width + gap) * i + width / 2 for i in range(m)], columns, parse_math=False)
    axes.set_yticks([(height + gap) * i + height / 2 for i in range(n)], rows, parse_math=False)
    axes.tick_params(length=0, labelsize=9, top=False, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.figure.savefig(path, format="png", dpi=150, bbox_inches="tight")


def stretched(maps):
    """Maps (..., P), each from its least value at 0 to its largest at 1."""
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    return (maps - low) / (high - low).clamp_min(1e-12)


def overlays(x, maps):
    """Pictures (n, 1 + m, 3, H, H) for a sheet: an image of x (n, 3, H, H), then each of its maps
    (n, m, patches), stretched, in red over its greys."""
    side = math.isqrt(maps.shape[-1])
    heat = F.interpolate(stretched(maps).unflatten(-1, (side, side)), size=x.shape[-1])[:, :, None]
    red = torch.tensor([1.0, 0.1, 0.1], device=maps.device).view(3, 1, 1)
    over = (1 - 0.7 * heat) * 0.7 * luma(x)[:, None] + 0.7 * heat * red
    return torch.cat([x[:, None], over], 1)


@torch.no_grad()
def reconstructions(model, x, noise, mean, std):
    """(pictures (n, 4, 3, H, H), their titles) of images x, normalized with mean and std: input,
    masked, reconstruction, and the reconstruction with the visible patches pasted in."""
    c, mask = model.eval().config, model.mask_from(noise)
    target = patchify(x, c.patch_size)
    masked, guess = mask[..., None], model.predicted(x, mask).float()
    columns = {"input": target, "masked": torch.where(masked, 0.0, target),
               "reconstruction": guess, "pasted": torch.where(masked, guess, target)}
    mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (mean, std))
    pictures = [unpatchify(patches, c.patch_size) * std + mean for patches in columns.values()]
    return torch.stack(pictures, 1), list(columns)
