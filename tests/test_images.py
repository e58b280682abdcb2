"""data/images.py: batches; data/shapes.py: what `shapes` shows."""
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train_mae
import train_simdino
import train_vit
from data import augment, images, shapes
from flags import parse_run


def test_index_batches_cover_each_epoch_once_and_start_anywhere():
    n, size = 103, 10
    steps = list(itertools.islice(images.index_batches(n, size, seed=3), 25))
    for epoch in range(2):
        seen = np.concatenate(steps[10 * epoch : 10 * (epoch + 1)])
        assert len(np.unique(seen)) == 100 and seen.min() >= 0 and seen.max() < n
    for start in (0, 7, 10, 19):
        ranks = [images.index_batches(n, size, seed=3, start_step=start, rows=rows)
                 for rows in (slice(5), slice(5, 10))]
        for step in steps[start:]:
            assert np.array_equal(step, np.concatenate([next(rank) for rank in ranks]))
    assert not np.array_equal(steps[0], steps[10])
    assert not np.array_equal(next(images.index_batches(n, size, seed=4)), steps[0])


def test_streaming_equals_resident(cache, monkeypatch):
    data = images.load("shapes", cache)
    resident = images.Images(data.hold_out(0, 40).train, "cpu")
    monkeypatch.setattr(images, "RESIDENT", 0)
    streaming = images.Images(data.hold_out(0, 40).train, "cpu")
    assert resident.resident and not streaming.resident
    state = torch.get_rng_state()
    both = [split.batches(images.index_batches(40, 8, seed=0)) for split in (resident, streaming)]
    for index in itertools.islice(images.index_batches(40, 8, seed=0), 12):
        for x, y in (*map(next, both), streaming.batch(index)):
            assert np.array_equal(x, data.train.images[index])
            assert np.array_equal(y, data.train.labels[index])
    assert torch.equal(torch.get_rng_state(), state)


class OneDevice(TorchDispatchMode):
    """Raises at an operation between tensors of two devices: it copies one of them, or all."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        assert len({t.device for t in tensors}) < 2, func
        return out


@pytest.mark.parametrize("script, flags", [(train_vit, []), (train_vit, ["--crop=resized"]),
                                           (train_mae, []), (train_simdino, ["--blur=2"])])
@pytest.mark.parametrize("most", [1e9, 0])
def test_a_gpu_is_fed_without_waiting_for_it(script, flags, most, monkeypatch):
    """The meta device stands for it: tensors there have no values, so to ask for one (.item(), a
    mask, a count) raises, and only to_device() copies to it."""
    def to_gpu(t, device):
        return torch.empty(t.shape, dtype=t.dtype, device=device)

    c, _ = parse_run(script.Config, script.PRESETS, ["cifar10-small", "--batch_size=8", *flags], "")
    data = SimpleNamespace(image_size=32, mean=[0.4] * 3, std=[0.2] * 3)
    pixels = np.zeros((40, 32, 32, 3), np.uint8)
    monkeypatch.setattr(images, "RESIDENT", most)
    source = images.Images(images.Split(pixels, np.zeros(40, np.int64)), "meta")
    rng, tensor = augment.BatchRandom(0, 8), torch.tensor
    monkeypatch.setattr(augment, "to_device", to_gpu)
    monkeypatch.setattr(images, "to_device", to_gpu)
    monkeypatch.setattr(torch, "tensor", lambda v, dtype=None: tensor(v, dtype=dtype))  # on a CPU
    with OneDevice():
        batch, labels = next(source.batches(images.index_batches(40, 8, 0)))
        if script is train_simdino:
            views = script.make_views(batch, c, data, 0, slice(0, 8))
        else:
            views = script.augmented(batch, rng, c, data)
        if script is train_vit:
            views, _ = augment.cutmix(views, torch.empty(8, 10, device="meta"), rng, 0.5)
    assert labels.shape == (8,) and views[0].is_meta and views[0].shape[-3:] == (3, 32, 32)


def test_masks_are_the_objects():
    """Pixels are nearer to the mean colour of their side, as masks tell the sides."""
    pictures, labels, masks = shapes.draw_shapes(1000, seed=0)
    assert np.bincount(labels).tolist() == [100] * 10
    assert np.bincount(labels[:300], minlength=10).min() > 10       # in random order
    area, inside = masks.mean((1, 2)), masks[..., None] == 1
    assert area.min() > 0.1 and area.max() < 0.5
    front, back = (np.linalg.norm(pictures - pictures.mean((1, 2), where=side, keepdims=True),
                                  axis=-1) for side in (inside, ~inside))
    agreement = ((front < back) == masks).mean((1, 2))
    assert agreement.mean() > 0.97 and np.quantile(agreement, 0.02) > 0.85
