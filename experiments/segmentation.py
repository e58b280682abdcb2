"""Is a supervised CRATE's attention on the object more than a transformer's?

[B] Table 7.4 says that its features separate objects better: MaskCut on COCO gives CRATE-B/8 a box
AP of 1.3, ViT-B/8 one of 0.4. Here each picture holds one drawn object with its exact mask. The
measure is the IoU of the object with saliency maps, [B] Eq. (7.2.41).

    python train_vit.py shapes --pool=class
    python -m experiments.segmentation --ckpt=out/vit-shapes/ckpt.pt
"""
import json
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from analyze import stretched
from checkpoint import open_model
from data import augment, images
from flags import OpenFlags, option, parse, TypeFlags, UserError
from measure import saliency
from processes import cli, Processes, with_bar


@dataclass(kw_only=True)
class Config(OpenFlags, TypeFlags):
    batch_size: int = option(100, "images at once", low=1)
    dtype: str = option("float32", "autocast's", choices=("auto", "float32", "bfloat16"))


def iou(a, b):
    """|a and b| / |a or b| of masks (..., H, W), 0 of two empty ones: (...) float64."""
    return (a & b).sum((-2, -1)).double() / (a | b).sum((-2, -1)).clamp_min(1)


def overlap_at_thresholds(maps, truth):
    """IoU (100, B) with the objects (B, H, W) of maps (B, h, w), resized to H x W and stretched to
    [0, 1], cut at each of 0, 0.01 .. 0.99."""
    maps = F.interpolate(maps[:, None], size=truth.shape[1:], mode="bilinear", antialias=True)
    maps = stretched(maps.flatten(1)).view(-1, *truth.shape[1:])
    return torch.stack([iou(maps >= level / 100, truth) for level in range(100)])


@torch.no_grad()
def segment(c):
    """{"iou", "iou_prior"} of the pictures of val, with one object each.

    A score is the mean over images at one threshold for all, the best on as many pictures of train:
    "iou" of the mean over heads of the saliency maps. "iou_prior" takes the mean mask of train as
    the map of every image, which knows where objects lie on average."""
    processes = Processes(c.device, c.dtype)
    loaded = open_model(c, processes.device, "vit", "mae", "simdino")
    encoder, size = loaded.encoder, loaded.encoder.config.image_size
    data = images.load_for(c.data, loaded.meta, c.data_dir)
    if data.val.masks is None:
        raise UserError(f"{data.name} has no masks of objects; shapes has")
    n, overlaps = len(data.val.masks), {}

    def objects(split):
        masks = torch.tensor(split.masks[:n])[:, None]
        return augment.at_size(masks, min(size, masks.shape[-1]))[:, 0].bool()
    prior = objects(data.train).float().mean(0, keepdim=True)
    for name, split in (("train", data.train), ("val", data.val)):
        truth, pictures, parts = objects(split), images.Images(split, processes.device), []
        for index in with_bar(torch.arange(n).split(c.batch_size), name):
            x = images.model_input(pictures.batch(index)[0], data, size)
            with processes.autocast():
                maps = saliency(encoder.trace(x)[-1].attention, loaded.pooling)
            maps = maps.mean(1).float().cpu().unflatten(-1, (encoder.config.side, -1))
            parts.append(overlap_at_thresholds(maps, truth[index]))
        of_prior = overlap_at_thresholds(prior, truth)
        overlaps[name] = torch.stack([torch.cat(parts, 1), of_prior], 2).mean(1)    # (100, 2)
    best = overlaps["train"].argmax(0, keepdim=True)
    mean, of_prior = overlaps["val"].gather(0, best)[0].tolist()
    return dict(data=data.name, encoder=loaded.label, n=n, iou=mean, iou_prior=of_prior)


def main(argv):
    """Prints and returns the scores of `segment`."""
    c = parse(Config, argv, __doc__)
    result = segment(c)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    cli(main)
