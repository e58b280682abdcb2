"""
Numbers on a trained checkpoint.

    python evaluate.py accuracy --ckpt=out/vit-cifar10/best.pt            top-1 on the validation split it was trained for
    python evaluate.py accuracy --ckpt=crate_base.pth --data=imagenet     a published checkpoint

A number is printed as one JSON object, so that a script can read it.
"""
import json
from dataclasses import dataclass

import common
from common import option
from data import images

# What the published image models were trained on, RGB in [0, 1]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(kw_only=True)
class Accuracy:
    """Top-1 accuracy and cross-entropy of an image classifier, ours or a published one."""
    ckpt: str | None = option(None, "the checkpoint")
    data: str | None = option(None, "which pictures; auto is what the checkpoint was trained on", choices=tuple(images.SETS))
    split: str = option("val", "which part", choices=("train", "val"))
    heads: int | None = option(None, "K of a published checkpoint of unpublished width", low=1)
    batch_size: int = option(500, "pictures at once", low=1)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast", choices=("auto", "float32", "bfloat16"))
    data_dir: str = option(str(images.CACHE), "where prepared data lies")
    workers: int = option(8, "processes that read pictures too many for memory", low=0)


def accuracy(c):
    """{"acc", "loss", "n", ...} of a checkpoint on a split, every picture once."""
    model, meta = common.load_classifier(needed(c.ckpt, "ckpt"), c.heads)
    name = c.data or meta.get("name")
    data = images.load(needed(name, "data"), cache=c.data_dir)
    if len(data.classes) != model.config.classes:
        raise common.UserError(f"{c.ckpt} tells {model.config.classes} classes apart, {name} has {len(data.classes)}")
    if "mean" in meta:
        data.mean, data.std = meta["mean"], meta["std"]
    else:
        data.mean, data.std = IMAGENET_MEAN, IMAGENET_STD
    processes = common.Processes(c.device)
    pictures, labels = (data.train_images, data.train_labels) if c.split == "train" else (data.val_images, data.val_labels)
    c.image_size = model.config.image_size
    split = images.Images(pictures, labels, processes.device)
    return dict(data=name, split=c.split) | common.classify(model.to(processes.device), split, data, c, processes, c.batch_size)


def needed(value, flag):
    """The value of a flag that has no default."""
    if value is None:
        raise common.UserError(f"--{flag} is needed")
    return value


COMMANDS = {"accuracy": Accuracy}


def main(argv):
    """Runs one subcommand, prints its result, and returns it."""
    command, config = common.parse_command(COMMANDS, argv, __doc__)
    result = {"accuracy": accuracy}[command](config)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    common.cli(main)
