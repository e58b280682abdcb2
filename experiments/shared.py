"""What several experiments use: colours, means with their errors, a figure by layer."""
import numpy as np
import torch

from figures import legend_below, new_figure, over_layers

# the same arch has the same colour in every figure, CRATE without a learned W a grey
COLORS = {"crate": "C0", "crate-t": "0.5", "crate-n": "0.3", "crate-c": "0.7", "crate-alpha": "C2",
          "crate-alpha-one": "C8", "mssa-mlp": "0.5", "aot": "0.6", "aot-mhsa": "C5",
          "transformer": "C3"}


def averages(runs):
    """{key: mean, key_error: standard error} of the numbers of several runs; None is left out."""
    means = {}
    for key in runs[0]:
        values = [run[key] for run in runs if run[key] is not None]
        means[key] = float(np.mean(values)) if values else None
        if len(values) > 1:
            means[key + "_error"] = float(np.std(values, ddof=1) / len(values) ** 0.5)
    return means


def each_sample(**columns):
    """A dict for each sample of columns (B,)."""
    rows = torch.stack([*columns.values()], 1).tolist()
    return [dict(zip(columns, row)) for row in rows]


def dots_by_layer(panels, marks, ylabel, level, sharey=False):
    """A figure of {model: {series: its values by layer}}, a panel a model, with a line at `level`.
    `marks` has a label and a style for each series, in the order of drawing."""
    figure, (axes,) = new_figure(1, len(panels), 8 / len(panels), 3)
    for ax, (name, series) in zip(axes, panels.items()):
        if sharey:
            ax.sharey(axes[0])
        ax.axhline(level, color="black", lw=0.8)
        for key, (label, style) in marks.items():
            y = series[key]
            ax.plot(range(1, len(y) + 1), y, label=label, **dict(ls="", marker="o") | style)
        over_layers(ax, name.removeprefix("pretrained:").replace("crate-", "crate\n"))
    axes[0].set_ylabel(ylabel)
    legend_below(figure, axes[0])
    return figure
