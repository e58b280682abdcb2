r"""Do a supervised CRATE's features separate objects from background better than a transformer's?

[B] Table 7.4 says so: MaskCut (Wang et al., 2023) on COCO gives CRATE-B/8 a box AP of 1.3,
ViT-B/8 one of 0.4. Here each picture holds one drawn object with its exact mask. Its colours differ
from the background by about as much as their texture varies, so that pixels do not give it away.
Two measures: the IoU of the object with saliency maps ([B] Eq. (7.2.41)), and MaskCut's AP.

    python train_vit.py shapes --data=camouflage --pool=class --epochs=36 --lr=2.5e-3 \
        --weight_decay=0.05
    python -m experiments.segmentation --ckpt=out/vit-shapes-camouflage/ckpt.pt
    python -m experiments.segmentation --ckpt=out/vit-shapes-camouflage/ckpt.pt --untrained
    python -m experiments.segmentation --ckpt=out/vit-shapes-camouflage/ckpt.pt --features=pixels

Verdict (2026-11-27): not at this size. Box AP of CRATE 1.9 and 1.1 % in two seeds, of a transformer
of equal parameters 3.4 and 0.8, of equal width 3.4 and 5.5; untrained CRATE 0.1, pixels 1.2.
"""
import json
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from data import augment, images
from evaluate import open_model, pooling, ScoreFlags
from figures import stretched
from flags import option, parse
from model import patchify, saliency, SoftmaxAttention
from processes import cli, with_bar


@dataclass(kw_only=True)
class Config(ScoreFlags):
    data: str = option("camouflage", "which drawn set", choices=("shapes", "camouflage"))
    features: str = option("keys", "what MaskCut compares: the keys U^* LN(Z), or pixels",
                           choices=("keys", "pixels"))
    batch_size: int = option(100, "images at once", low=1)
    dtype: str = option("float32", "autocast's", choices=("auto", "float32", "bfloat16"))


# ---- MaskCut ------------------------------------------------------------------------------------
def normalized_cut(A):
    """(v, mu) of graphs A (B, n, n): the second smallest mu in (D - A) v = mu D v, D = diag(A 1),
    and its v (Shi and Malik, 2000).

    Solved as D^-1/2 A D^-1/2 y = (1 - mu) y, v = D^-1/2 y. v (B, n), of unknown sign; mu (B,), 0 if
    the graph falls into two parts."""
    root = A.sum(-1).rsqrt()
    values, vectors = torch.linalg.eigh(root[:, :, None] * A * root[:, None])
    return root * vectors[..., -2], 1 - values[..., -2]


def foreground(v):
    """The object of a cut v (B, h, w), as a mask: (B, h, w) bool.

    Of the sides v > mean and v <= mean it is the one with the largest |v|, or the other if three
    corners of the image lie in it; and of that side the 4-connected part around its extreme entry.
    CutLER applies the corner rule to the side v > mean only, so that its choice depends on the sign
    that the solver returns."""
    shape, flat = v.shape, v.flatten(1)
    upper = flat > flat.mean(1, keepdim=True)
    flip = ~upper.gather(1, flat.abs().argmax(1, keepdim=True))
    corners = (upper ^ flip).view(shape)[:, ::shape[1] - 1, ::shape[2] - 1].sum((1, 2))
    in_corners = (corners >= 3)[:, None]
    flip = flip ^ in_corners
    side = (upper ^ flip).view(shape).float()
    extreme = torch.where(flip, -flat, flat).argmax(1)
    mask = F.one_hot(extreme, flat.shape[1]).view(shape).float()
    while True:                 # grow by neighbours within the side
        vertical = F.max_pool2d(mask, (3, 1), 1, (1, 0))
        grown = side * torch.maximum(vertical, F.max_pool2d(mask, (1, 3), 1, (0, 1)))
        if torch.equal(grown, mask):
            return mask.bool()
        mask = grown


def maskcut(X, side, tau=0.15):
    """(mask (B, side, side), confidence (B,)): the object that MaskCut finds by features (B, n, d).

    Edges between patches weigh 1 where the cosine exceeds tau, 1e-5 elsewhere. CutLER has no
    confidence; here it is -mu of the normalized cut, near 0 where the two sides share next to
    nothing. No CRF afterwards."""
    X = F.normalize(X.double(), dim=-1)
    v, mu = normalized_cut((X @ X.mT > tau).double().clamp(min=1e-5))
    return foreground(v.view(-1, side, side)), -mu


def patch_features(encoder, x, number, kind):
    """Features (B, n, d) of the patches of images x in layer `number`, counted from 1."""
    if kind == "pixels":
        return patchify(x, encoder.config.patch_size)
    layer = encoder.layers[number - 1]
    attention, X = layer.attention, layer.norm1(encoder.trace(x)[number - 1].tokens)
    if isinstance(attention, SoftmaxAttention):
        _, keys, _ = attention.queries_keys_values(X)
    else:
        keys = attention.projections(X)
    return keys.transpose(1, 2).flatten(2)[:, 1:]       # heads side by side


# ---- Scores -------------------------------------------------------------------------------------
def iou(a, b):
    """|a and b| / |a or b| of masks (..., H, W), 0 of two empty ones: (...) float64."""
    return (a & b).sum((-2, -1)).double() / (a | b).sum((-2, -1)).clamp_min(1)


def box(mask):
    """The bounding box of a mask (..., H, W), as a mask."""
    def between(line):          # from the first to the last true entry
        line = line.int()
        return line.cummax(-1).values & line.flip(-1).cummax(-1).values.flip(-1)
    rows, columns = between(mask.any(-1)), between(mask.any(-2))
    return (rows[..., :, None] & columns[..., None, :]).bool()


def detection_ap(overlap, confidence, thresholds):
    """COCO's AP at each IoU threshold (T,), for images with one object and one prediction each, of
    IoU (N,) and confidence (N,): (T,).

    Predictions are ranked by confidence. AP is the mean over recall 0, 0.01 .. 1 of the largest
    precision there or beyond, 0 where that recall is never reached."""
    ranked = overlap[confidence.argsort(descending=True, stable=True)]
    hits, n = (ranked >= thresholds[:, None]).cumsum(1).double(), len(overlap)
    precision = hits / torch.arange(1, n + 1)
    precision = precision.flip(1).cummax(1).values.flip(1)              # there or beyond
    recall = (torch.arange(101, dtype=torch.float64) / 100).repeat(len(thresholds), 1)
    reached = torch.searchsorted(hits / n, recall)                      # n: never
    return F.pad(precision, (0, 1)).gather(1, reached).mean(1)


def overlap_at_thresholds(maps, truth):
    """IoU (100, B, m) with the objects (B, 1, H, W) of maps (B, m, h, w), resized to H x W and
    stretched to [0, 1], cut at each of 0, 0.01 .. 0.99."""
    maps = F.interpolate(maps, size=truth.shape[2:], mode="bilinear", antialias=True)
    maps = stretched(maps.flatten(2)).view_as(maps)
    return torch.stack([iou(maps >= level / 100, truth) for level in range(100)])


def open_objects(c):
    """(`Loaded`, Processes, the drawn set, {split: the objects' masks (n, 1, H, W) at the model's
    size}) of the pictures of val, and as many of train."""
    loaded, processes = open_model(c, "vit", "mae", "simdino")
    size = loaded.encoder.config.image_size
    data = images.load_for(c.data, loaded.meta, c.data_dir)
    masks = dict(train=data.train.masks[:len(data.val.masks)], val=data.val.masks)
    for split, array in masks.items():
        mask = torch.tensor(array)[:, None]
        masks[split] = augment.at_size(mask, min(size, mask.shape[-1])).bool()
    return loaded, processes, data, masks


@torch.no_grad()
def segment(c):
    """{"iou", "iou_prior", "box_ap50", "box_ap", "mask_ap50", "mask_ap"} of the pictures of val,
    with one object each.

    A score of IoU is the mean over images at one threshold for all, the best on as many pictures of
    train: "iou" of the mean over heads of the saliency maps. "iou_prior" takes the mean mask of
    train as the map of every image, which knows where objects lie on average.

    MaskCut gives one mask an image, in whole patches. Its box and mask AP are COCO's, averaged over
    IoU 0.50, 0.55 .. 0.95, ranked by the confidence of `maskcut`."""
    loaded, processes, data, masks = open_objects(c)
    encoder, last = loaded.encoder, len(loaded.encoder.layers)
    size = encoder.config.image_size
    side = size // encoder.config.patch_size
    overlaps, mean_mask = {}, masks["train"].float().mean(0, keepdim=True)
    of_boxes, of_masks, confidences = [], [], []
    for split, objects in masks.items():
        of_maps, pictures = [], images.Images(getattr(data, split), processes.device)
        for index in with_bar(torch.arange(len(objects)).split(c.batch_size), split):
            x, truth = images.model_input(pictures.batch(index)[0], data, size), objects[index]
            with processes.autocast():
                maps = saliency(encoder.trace(x)[-1].attention, pooling(loaded))
            maps = maps.mean(1, keepdim=True).float().cpu().unflatten(-1, (side, side))
            of_maps.append(overlap_at_thresholds(maps, truth))
            if split == "val":
                with processes.autocast():
                    X = patch_features(encoder, x, last, c.features).float().cpu()
                cut, confidence = maskcut(X, side)
                cut = F.interpolate(cut[:, None].float(), size=truth.shape[2:],
                                    mode="nearest-exact").bool()
                of_boxes.append(iou(box(cut), box(truth))[:, 0])
                of_masks.append(iou(cut, truth)[:, 0])
                confidences.append(confidence)
        prior = overlap_at_thresholds(mean_mask, objects)                   # (100, N, 1)
        overlaps[split] = torch.cat([torch.cat(of_maps, 1), prior], 2).mean(1)
    best = overlaps["train"].argmax(0, keepdim=True)
    mean, prior = overlaps["val"].gather(0, best)[0].tolist()
    result = dict(data=c.data, encoder="random" if c.untrained else c.ckpt, features=c.features,
                  n=len(masks["val"]), iou=mean, iou_prior=prior)
    thresholds = torch.arange(50, 100, 5).double() / 100
    for name, parts in (("box", of_boxes), ("mask", of_masks)):
        ap = detection_ap(torch.cat(parts), torch.cat(confidences), thresholds)
        result |= {f"{name}_ap50": ap[0].item(), f"{name}_ap": ap.mean().item()}
    return result


def main(argv):
    """Prints and returns the scores of `segment`."""
    c = parse(Config, argv, __doc__)
    result = segment(c)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    cli(main)
