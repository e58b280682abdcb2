"""
Looks inside the layers of a trained checkpoint.

    python analyze.py layers --ckpt=out/vit-cifar10-small/best.pt        rates and sparsity of every layer ([N] Figures 3 to 5)

Prints a table; --json also writes the numbers.
"""
import json
from dataclasses import dataclass

import torch

import common
from common import option
from data import augment, images
from model import MHSA, ODL, coding_rate, projected_coding_rate


@dataclass(kw_only=True)
class Layers:
    """R^c(Z^{l+1/2}), R(Z^{l+1}), the fraction of nonzeros of Z^{l+1} and the SRR measure, layer by layer."""
    ckpt: str | None = option(None, "an image classifier's checkpoint, ours or a published one")
    data: str | None = option(None, "which pictures; auto is what the checkpoint was trained on", choices=tuple(images.SETS))
    split: str = option("val", "which part", choices=("train", "val"))
    samples: int = option(1000, "pictures, as in [N]", low=1)
    convention: str = option("released", "released: the normalized projections that enter the softmax; caption: U^* Z^{l+1/2}",
                             choices=("released", "caption"))
    eps: float = option(0.1, "distortion; 0.1 is [N]'s figure", above=0)
    lambd: float = option(0.1, "weight of ||Z||_0 in the SRR measure", low=0)
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    batch_size: int = option(100, "pictures at once", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")
    json: str | None = option(None, "also write the table to this file")


def projections(attention, Z):
    """U_k^* Z (B, K, n, p): of MHSA, which has no U, the value heads."""
    return attention.project(Z)[2] if isinstance(attention, MHSA) else attention.project(Z)


def layer_numbers(layer, Z, traced, c):
    """R^c, R, nonzeros (and of ODL's code) of one layer for a batch Z (B, n, d), each (B,); the conventions of [N] Figure 3.

    released: the hook of the released code sees U^* LN(Z^l), each token scaled to norm 1 in each head. caption: R^c of
    Z^{l+1/2} as the caption of [N] Figure 3 has it, nothing scaled."""
    if c.convention == "released":
        w = torch.nn.functional.normalize(projections(layer.attention, layer.norm1(Z)), dim=-1)
    else:
        w = projections(layer.attention, traced.half)
    out = dict(rate_of_subspaces=projected_coding_rate(w, c.eps), rate=coding_rate(traced.out, c.eps),
               nonzeros=(traced.out != 0).float().mean((-2, -1)))
    if isinstance(layer.sparsification, ODL):
        out["code_nonzeros"] = (layer.sparsification.code(layer.norm2(traced.half)) != 0).float().mean((-2, -1))
    out["srr"] = c.lambd * (traced.out != 0).float().sum((-2, -1)) + out["rate_of_subspaces"] - out["rate"]
    return out


@torch.no_grad()
def layers(c):
    """A list with one dict a layer: mean and deviation over pictures of each number."""
    if c.ckpt is None:
        raise common.UserError("--ckpt is needed")
    model, meta = common.load_classifier(c.ckpt, c.heads)
    name = c.data or meta.get("name")
    if name is None:
        raise common.UserError("--data is needed for a published checkpoint")
    data = images.load(name, cache=c.data_dir)
    device = common.Processes(c.device).device
    model.to(device)
    pictures, labels = (data.train_images, data.train_labels) if c.split == "train" else (data.val_images, data.val_labels)
    split = images.Images(pictures, labels, device)
    mean, std = meta.get("mean", common.IMAGENET_MEAN), meta.get("std", common.IMAGENET_STD)
    seen = [[] for _ in model.encoder.layers]
    for index in torch.arange(min(c.samples, len(split))).split(c.batch_size):
        x = augment.normalize(common.at_size(augment.to_float(split.batch(index)[0]), model.config.image_size), mean, std)
        trace = []
        Z = model.encoder.tokens(x)
        model.encoder(x, trace)
        for l, (layer, traced) in enumerate(zip(model.encoder.layers, trace)):
            seen[l].append(layer_numbers(layer, Z, traced, c))
            Z = traced.out
    table = []
    for l, batches in enumerate(seen, 1):
        numbers = {key: torch.cat([b[key] for b in batches]) for key in batches[0]}
        table.append(dict(layer=l) | {k: v.mean().item() for k, v in numbers.items()} |
                     {f"{k}_std": v.std(correction=0).item() for k, v in numbers.items()})
    return table


def main(argv):
    """Runs one subcommand, prints its table, and returns it."""
    command, c = common.parse_command({"layers": Layers}, argv, __doc__)
    table = layers(c)
    keys = [k for k in table[0] if k != "layer" and not k.endswith("_std")]
    print("layer " + " ".join(f"{k:>24}" for k in keys))
    for line in table:
        print(f"{line['layer']:5} " + " ".join(f"{line[k]:14.4f} +- {line[k + '_std']:6.3f}" for k in keys))
    measure = sum(line["srr"] for line in table) / len(table)
    print(f"SRR measure, the mean of srr over layers ([S]; lower is better): {measure:.3f}")
    if c.json:
        with open(c.json, "w") as f:
            json.dump(dict(vars(c), srr_measure=measure, layers=table), f, indent=1)
    return table


if __name__ == "__main__":
    common.cli(main)
