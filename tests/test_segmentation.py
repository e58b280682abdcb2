"""experiments/segmentation.py: scores against plain loops."""
import numpy as np
import pytest
import torch
from helpers import scrambled, write_model
from torch.nn import functional as F

from analyze import stretched
from data import augment, images
from experiments import segmentation
from measure import saliency
from model import ImageClassifier, ImageConfig

TINY = dict(width=16, heads=2, layers=2, image_size=32, patch_size=4, classes=10)


@pytest.mark.parametrize("arch", ["crate", "tost"])
@torch.no_grad()
def test_maps(arch, tmp_path, cache):
    """Every threshold and image alone; the threshold is train's best, the prior train's mean
    mask as the map of each image."""
    model, data = ImageClassifier(ImageConfig(arch=arch, **TINY)), images.load("shapes", cache)
    write_model(tmp_path / "m.pt", scrambled(model), "vit", data.meta())
    result = segmentation.main([f"--ckpt={tmp_path / 'm.pt'}", "--device=cpu", "--data=shapes",
                                f"--data_dir={cache}", "--batch_size=30"])
    prior = torch.tensor(data.train.masks[:100]).float().mean(0).expand(100, -1, -1)
    scores = []
    for x, truth in ((data.train.images[:100], data.train.masks[:100]),
                     (data.val.images, data.val.masks)):
        x = augment.normalize(augment.to_float(torch.tensor(x)), data.mean, data.std)
        maps = saliency(model.encoder.trace(x)[-1].attention, "class").mean(1).unflatten(-1, (8, 8))
        maps = F.interpolate(maps[:, None], size=(32, 32), mode="bilinear", antialias=True)[:, 0]
        maps, truth = torch.stack([maps, prior]), torch.tensor(truth) == 1
        maps = stretched(maps.flatten(2)).view_as(maps)
        scores.append([[np.mean([float((a & b).sum() / (a | b).sum())
                                 for a, b in zip(map_ >= i / 100, truth)]) for i in range(100)]
                       for map_ in maps])
    expected = [val[int(np.argmax(train))] for train, val in zip(*scores)]
    assert [result["iou"], result["iou_prior"]] == pytest.approx(expected, abs=1e-3)
