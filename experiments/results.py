"""Figures of RESULTS.md, drawn from the logs in records/ and from pretrained models.

    python -m experiments.results               all of them, to docs/figures
    python -m experiments.results text          one: images, text, length, objective

images    accuracy over the epochs of CIFAR-10: CRATE (three seeds), its variants, a transformer
text      loss on Python's manual, a dot a seed, without and with --rotary --shift; and on books
          by how much three archs are behind a transformer, over the characters read
length    loss of three pretrained models that are read in longer windows than they were trained on
objective the objective of each layer's output by its parts, each divided by the number of tokens
"""
from dataclasses import dataclass, replace

import evaluate
from analyze import layer_table, Layers
from figures import COLORS, new_figure
from flags import not_one_of, option, parse, ROOT, UserError
from processes import cli
from run import read_metrics

NAMES = {"crate": "CRATE", "crate-alpha": "CRATE-alpha", "crate-alpha-one": "CRATE-alpha, one step",
         "mssa-mlp": "CRATE's attention, MLP", "transformer": "transformer",
         "crate-t": "CRATE-T", "crate-n": "CRATE-N", "crate-c": "CRATE-C"}


@dataclass(kw_only=True)
class Figures:
    names: tuple = option((), "which figures; none: all")
    data_dir: str = option(Layers(ckpt="").data_dir, "where prepared data lies")
    samples: int = option(100, "samples of `objective`", low=1)


def scores(folder, key):
    """[(step, score)] of the evaluations of a run in records/."""
    lines = read_metrics(ROOT / "records" / folder)
    return [(line["step"], line[key]) for line in lines if line.get("split") == "val"]


def name_ends(ax, ends):
    """Writes labels {text: (y, color)} at the right of the axes, apart from each other."""
    low, high = ax.get_ylim()
    below = float("-inf")
    for text, (y, color) in sorted(ends.items(), key=lambda item: item[1][0]):
        below = max(y, below + 0.06 * (high - low) * (1 + text.count("\n")))
        ax.annotate(text, (1.02, below), xycoords=("axes fraction", "data"), color=color,
                    va="center", fontsize="small")


def images(c):
    figure, ((ax,),) = new_figure(1, 1, 7, 3.4)
    ends = {}
    for arch in ("crate", "crate-t", "crate-n", "crate-c", "transformer"):
        for seed in range(3 if arch == "crate" else 1):
            steps, y = zip(*scores(f"cifar10-cpu-30-{arch}-{seed}", "acc"))
            y = [100 * value for value in y]
            ax.plot([step / 391 for step in steps], y, "o-", color=COLORS[arch], ms=3)   # epochs
        ends[NAMES[arch]] = y[-1], COLORS[arch]
    ax.set(xlabel="epochs", ylabel="accuracy on CIFAR-10, %")
    name_ends(ax, ends)
    return figure


def text(c):
    figure, ((left, right),) = new_figure(1, 2, 4, 3.2)
    rows = {"crate": ("", "-shift"), "crate-alpha": (None, "-shift"), "crate-alpha-one": (None, ""),
            "mssa-mlp": (None, "-shift"), "transformer": ("", "-shift")}
    for place, (arch, suffixes) in enumerate(rows.items()):
        for suffix, fill in zip(suffixes, ("white", COLORS[arch])):
            for seed in range(3 if suffix is not None else 0):
                loss = scores(f"pydoc-{arch}{suffix}-{seed}", "loss")[-1][1]
                left.plot(loss, place, "o", mec=COLORS[arch], mfc=fill)
    left.set_yticks(range(len(rows)), [NAMES[arch] for arch in rows])
    left.set_xlabel("loss on Python's manual, nats a character\n"
                    "(filled: with rotary positions and shift)")
    best, ends = dict(scores("bookchars-transformer-0", "loss")), {}
    for arch in ("crate", "crate-alpha", "crate-alpha-one"):
        # the last evaluation is of the whole split
        steps, losses = zip(*scores(f"bookchars-{arch}-0", "loss")[:-1])
        behind = [loss - best[step] for step, loss in zip(steps, losses)]
        right.plot([step * 32 * 128 / 1e6 for step in steps], behind, "o-", color=COLORS[arch],
                   ms=3)
        ends[NAMES[arch].replace(", ", ",\n")] = behind[-1], COLORS[arch]
    right.axhline(0, color=COLORS["transformer"])
    right.set_xlabel("millions of characters of books read\n(3.2 million parameters)")
    right.set_ylabel("nats behind the transformer")
    name_ends(right, ends)
    return figure


def length(c):
    figure, ((ax,),) = new_figure(1, 1, 7, 3)
    lengths, ends = (64, 128, 192, 256, 384, 512), {}
    for arch in ("crate", "crate-alpha", "transformer"):
        y = [evaluate.main(["lm", f"--ckpt=pretrained:pydoc-{arch}", f"--context={n}",
                            "--dtype=float32", f"--data_dir={c.data_dir}"])["loss"]
             for n in lengths]
        ax.plot(lengths, y, "o-", color=COLORS[arch])
        ends[NAMES[arch]] = y[-1], COLORS[arch]
    ax.axvline(128, color="0.7", ls=":")
    ax.set(xlabel="characters in a window (dotted: in training)", ylabel="loss, nats a character",
           xticks=lengths)
    name_ends(ax, ends)
    return figure


def objective(c):
    figure, axes = new_figure(1, 4, 1.75, 3)
    parts = {"$R$": ("R", 1, "0.35"), "$-R^c$": ("Rc", -1, "0.6"),
             "price of the nonzeros": ("price", -1, "0.85")}
    for place, name in enumerate(("shapes-crate", "cifar10-crate")):
        for untrained in (False, True):
            flags = Layers(ckpt=f"pretrained:{name}", untrained=untrained, unit_bases=True,
                           samples=c.samples, data_dir=c.data_dir)
            loaded, _ = evaluate.open_model(flags)
            table, n = layer_table(loaded, flags), 1 + loaded.encoder.config.patches
            ax, layers = axes[0, 2 * place + untrained], [row["layer"] for row in table]
            bottom = [0] * len(table)
            for label, (key, sign, color) in parts.items():
                y = [sign * (row["R"] - row["Rc"] - row["objective"] if key == "price"
                             else row[key]) / n for row in table]
                ax.bar(layers, y, bottom=bottom if sign < 0 else 0, color=color, label=label)
                bottom = [b + v for b, v in zip(bottom, y)] if sign < 0 else bottom
            ax.plot(layers, [row["objective"] / n for row in table], "ko-", ms=3, label="their sum")
            ax.axhline(0, color="black", lw=0.8)
            ax.set_title(f"{name}\n{'untrained' if untrained else 'trained'}", fontsize="medium")
            ax.set(xlabel="layer", xticks=layers)
        low, high = (choose(limit for ax in axes[0, 2 * place:2 * place + 2]
                            for limit in ax.get_ylim()) for choose in (min, max))
        for ax in axes[0, 2 * place:2 * place + 2]:
            ax.set_ylim(low, high)
    axes[0, 0].set_ylabel("nats a token")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                  frameon=False)
    return figure


FIGURES = dict(images=images, text=text, length=length, objective=objective)


def main(argv):
    """The files' paths."""
    c, _ = parse(Figures, {}, argv, __doc__)
    paths = []
    for name in c.names or FIGURES:
        if name not in FIGURES:
            raise UserError(f"figure {not_one_of(name, FIGURES)}")
        figure = FIGURES[name](replace(c))
        for ax in figure.axes:
            ax.spines[["top", "right"]].set_visible(False)
        paths.append(ROOT / "docs" / "figures" / f"{name}.png")
        figure.savefig(paths[-1], dpi=200)
        print(f"wrote {paths[-1].relative_to(ROOT)}")
    return paths


if __name__ == "__main__":
    cli(main)
