"""Augmentation: operations and random draws against Pillow or their definitions."""
import colorsys
import math
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch.nn import functional as F

from data import augment
from data.augment import BatchRandom

SIDE = 37               # odd, so that no half pixel goes unseen


def pictures(batch=4, side=SIDE):
    """uint8 (B, S, S, 3): colour gradients under noise, so that histograms are full."""
    smooth = F.interpolate(torch.rand(batch, 3, 4, 4), side, mode="bicubic")
    x = smooth + 0.05 * torch.randn(batch, 3, side, side)
    return (255 * x.clamp(0, 1)).byte().permute(0, 2, 3, 1)


RANDOM = {
    "pad_crop": lambda x, rng: augment.pad_crop(x, 32, 4, rng),
    "random_resized_crop": lambda x, rng: augment.random_resized_crop(x, 32, rng, (0.08, 1)),
    "flip": lambda x, rng: augment.flip(x, rng),
    "color_jitter": lambda x, rng: augment.color_jitter(x, rng, 0.4, 0.4, 0.2, 0.1, p=0.8),
    "rand_augment": lambda x, rng: augment.rand_augment(x, rng, n=2, m=14),
    "gaussian_blur": lambda x, rng: augment.gaussian_blur(x, rng, 0.5, (0.1, 2.0)),
}


@pytest.mark.parametrize("name", RANDOM)
def test_rows_of_a_global_batch(name):
    """What a sample becomes depends on its own row only: any cut sees what one process sees."""
    x = augment.to_float(pictures(16))
    whole = RANDOM[name](x, BatchRandom(3, 16))
    for rows in (slice(0, 8), slice(8, 16)):
        part = RANDOM[name](x[rows], BatchRandom(3, 16, rows))
        torch.testing.assert_close(part, whole[rows], rtol=0, atol=1e-6)
    assert not torch.equal(whole, RANDOM[name](x, BatchRandom(4, 16)))


# ---- Pixels, crops, sizes

def test_pad_crop_takes_every_window():
    x = augment.to_float(pictures(600, 6)) + 0.01  # above the zeros of the padding
    padded = F.pad(x, [2] * 4)
    windows = torch.stack([padded[:, :, i:i + 6, j:j + 6] for i in range(5) for j in range(5)])
    found = (windows == augment.pad_crop(x, 6, 2, BatchRandom(0, 600))).flatten(2).all(2)
    assert (found.sum(0) == 1).all() and (found.sum(1) > 0).all()


def test_pixels_and_sizes():
    images = pictures(2, 9)
    x = augment.to_float(images)
    assert x.is_contiguous() and torch.equal(x, images.permute(0, 3, 1, 2) / 255)
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.1, 0.2, 0.3]]).view(2, 3, 1, 1)
    y = augment.normalize(x, mean.flatten().tolist(), std.flatten().tolist())
    torch.testing.assert_close(y * std + mean, x)
    assert torch.equal(augment.at_size(x, 4), x[:, :, 2:6, 2:6])    # round() rounds to even
    assert torch.equal(augment.at_size(x, 12), augment.resize(x, 12))


@pytest.mark.parametrize("operation, p, definition", [(augment.flip, 0.5, lambda x: x.flip(3)),
    (partial(augment.grayscale, p=0.5), 0.5,
     lambda x: (x * torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)),
    (partial(augment.solarize, p=0.2), 0.2, lambda x: x.where((255 * x).round() < 128, 1 - x))])
def test_what_is_done_to_some(operation, p, definition):
    x = augment.to_float(pictures(2000, 9))
    y = operation(x, BatchRandom(0, 2000))
    changed = (y != x).flatten(1).any(1)
    assert abs(changed.float().mean() - p) < 0.05
    torch.testing.assert_close(y, definition(x).where(changed.view(-1, 1, 1, 1), x))


def test_cutmix_cuts_squares_from_neighbours():
    x = torch.linspace(0, 1, 1000).view(-1, 1, 1, 1).expand(-1, 3, 16, 16)
    y, targets = augment.cutmix(x, torch.eye(1000), BatchRandom(0, 1000), 0.5)
    cut = (y == x[(other := torch.arange(1000) ^ 1)])[:, 0].float()
    rows, columns = cut.amax(2), cut.amax(1)
    assert torch.equal(cut, rows[:, :, None] * columns[:, None])
    assert (torch.cat([rows, columns]).diff().abs().sum(1) <= 2).all()      # without a gap
    assert torch.equal(y, x.lerp(x[other], cut[:, None])) and (targets.sum(1) == 1).all()
    torch.testing.assert_close(targets[range(1000), other], cut.mean((1, 2)))
    assert abs(cut.mean() - 0.5 * 0.321) < 0.03     # (sqrt(u) - u / 4)^2 for u from 0 to 1


BOXES = [(0, 0, 37, 37), (3, 7, 20, 30), (30, 24, 5, 9), (0, 11, 37, 3), (2, 4, 17, 30)]


@pytest.mark.parametrize("size", [8, 37, 64])
def test_resizing_is_pillows(size):
    """A box is Pillow's crop and resize, here in float32 (Pillow's mode F), channel by channel."""
    x = augment.to_float(pictures(len(BOXES)))
    cropped = augment.resized_crop(x, torch.tensor(BOXES), size)
    torch.testing.assert_close(augment.resize(x[:1], size), cropped[:1])
    for image, (top, left, height, width), crop in zip(x, BOXES, cropped):
        inside = image[:, top:top + height, left:left + width]
        for plane, found in zip(inside.numpy(), crop.numpy()):
            resized = Image.fromarray(plane).resize(found.shape, Image.Resampling.BICUBIC)
            np.testing.assert_allclose(found, np.asarray(resized).clip(0, 1), atol=1e-4)


def test_random_boxes_are_torchvisions():
    boxes = augment.random_boxes(BatchRandom(0, 20000), 32, (0.2, 0.4))
    start, length = boxes.split(2, 1)
    room = 32 - length
    assert torch.equal(boxes, boxes.round()) and (start >= 0).all() and (room >= start).all()
    assert (start == 0).any(0).all() and (start == room).any(0).all()
    assert abs(torch.corrcoef((start / room).mT)[0, 1]) < 0.03
    h, w = length.unbind(1)
    for value, low, high, pixels in ((h * w / 32 ** 2, 0.2, 0.4, 0.03), (start / room, 0, 1, 0),
                                     ((w / h).log(), math.log(3 / 4), math.log(4 / 3), 0.1)):
        assert abs(value.min() - low) <= pixels and abs(value.max() - high) <= pixels
        assert abs(value.mean() - (low + high) / 2) < 0.01
    # no box of the whole area has another shape than the image's
    boxes = augment.random_boxes(BatchRandom(0, 99), 32, (1, 1))
    assert (boxes == torch.tensor([0, 0, 32, 32])).all()


# ---- Colour, blur

def turn_hue(image, turn):
    pixels = [colorsys.rgb_to_hsv(*pixel) for pixel in np.asarray(image).reshape(-1, 3) / 255]
    turned = [colorsys.hsv_to_rgb((h + turn) % 1, s, v) for h, s, v in pixels]
    return 255 * np.array(turned).reshape(*image.size[::-1], 3)


def enhanced(name):
    return lambda image, shift: getattr(ImageEnhance, name)(image).enhance(1 + shift)


@pytest.mark.parametrize("place, by_hand", [
    (0, enhanced("Brightness")), (1, enhanced("Contrast")), (2, enhanced("Color")), (3, turn_hue)])
def test_jitter_is_pillows_and_turns_the_hue(place, by_hand):
    images = pictures(8)
    images[0, ..., 1:] = images[0, ..., :1]     # a grey picture keeps its hue
    strengths = [0.5 * (i == place) for i in range(4)]
    factors = BatchRandom(5, 8).uniform(4, low=-0.5, high=0.5)[:, place].tolist()
    y = augment.color_jitter(augment.to_float(images), BatchRandom(5, 8), *strengths)
    assert min(factors) < -0.1 and max(factors) > 0.1
    for image, factor, out in zip(images, factors, 255 * y.permute(0, 2, 3, 1).numpy()):
        expected = np.asarray(by_hand(Image.fromarray(image.numpy()), factor))
        assert np.abs(out - expected).max() < (0.01 if by_hand is turn_hue else 1.6)


def test_jitter_orders_and_rate():
    x = augment.to_float(pictures(1, 4)).expand(400, -1, -1, -1)
    jittered = augment.color_jitter(x, BatchRandom(0, 400), 0.4, 0.4, 0.2, 0.1, p=0.8)
    assert abs((jittered == x).flatten(1).all(1).float().mean() - 0.2) < 0.06
    rng, uniform = BatchRandom(0, 400), BatchRandom(0, 400).uniform
    # one factor for all: only the order can make a difference
    rng.uniform = lambda *shape: uniform(4) if shape == (4,) else torch.full((400, *shape), 0.9)
    jittered = augment.color_jitter(x, rng, 0.9, 0.9, 0.9, 0.3)
    assert 12 < len(jittered.flatten(1).unique(dim=0)) <= 24


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
def test_blur_is_a_gaussian_with_replicated_edges(sigma):
    x = augment.to_float(pictures(2))
    y = augment.gaussian_blur(x, BatchRandom(0, 2), 1.0, sigma=(sigma, sigma))
    reach = math.ceil(8 * sigma)
    bell = torch.exp(-torch.arange(-reach, reach + 1).double() ** 2 / (2 * sigma ** 2))
    kernel = (bell[:, None] * bell / bell.sum() ** 2).expand(3, 1, -1, -1)
    padded = F.pad(x.double(), [reach] * 4, mode="replicate")
    expected = F.conv2d(padded, kernel, groups=3)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=3e-6)


# ---- RandAugment

def affine(image, *coefficients):
    return image.transform(image.size, Image.Transform.AFFINE, coefficients,
                           Image.Resampling.NEAREST)


PILLOW = {  # of a picture and the signed magnitude on torchvision's scale of 0 to 30
    "ShearX": lambda image, m: affine(image, 1, 0.3 * m / 30, 0, 0, 1, 0),
    "ShearY": lambda image, m: affine(image, 1, 0, 0, 0.3 * m / 30, 1, 0),
    "TranslateX": lambda image, m: affine(image, 1, 0, -int(150 / 331 * SIDE * m / 30), 0, 1, 0),
    "TranslateY": lambda image, m: affine(image, 1, 0, 0, 0, 1, -int(150 / 331 * SIDE * m / 30)),
    "Rotate": lambda image, m: image.rotate(m, Image.Resampling.NEAREST),
    "Posterize": lambda image, m: ImageOps.posterize(image, 8 - round(4 * abs(m) / 30)),
    "Solarize": lambda image, m: ImageOps.solarize(image, 255 - 255 * abs(m) / 30),
    "AutoContrast": lambda image, m: ImageOps.autocontrast(image),
    "Equalize": lambda image, m: ImageOps.equalize(image),
}


@pytest.mark.parametrize("name", PILLOW)
@pytest.mark.parametrize("m", [0, 9, 14, 30])
def test_rand_augment_operations_are_pillows(name, m):
    images = pictures(6)
    images[4] = images[4] // 3 + 40  # a narrow histogram
    images[5] = 77  # one level
    for image, s in zip(images, (1, -1, 1, -1, -1, 1)):
        out, = augment.OPERATIONS[name](augment.to_float(image[None]) * 255, s * m)
        expected = np.asarray(PILLOW[name](Image.fromarray(image.numpy()), s * m)).astype(float)
        difference = np.abs(out.permute(1, 2, 0).numpy() - expected)
        # Pillow truncates a floating-point product, which may be just below an integer
        assert difference.max() <= (name == "AutoContrast")
        assert (difference > 0).mean() < 0.03


@pytest.mark.parametrize("name", ["Brightness", "Color", "Contrast", "Sharpness"])
def test_enhanced_levels_are_torchvisions(name):
    """At every magnitude, by 1 + a float32 number: of PIL images by Pillow, of uint8 tensors by
    blending, clamping and truncating."""
    images, every = pictures(2), torch.arange(256, dtype=torch.uint8)
    levels, ramp = augment.to_float(images) * 255, every.view(1, 1, 1, 256).float()
    for m, magnitude in enumerate(torch.linspace(0.0, 0.9, 31)):
        for sign in (1, -1):
            factor = 1.0 + sign * float(magnitude.item())
            outs = augment.OPERATIONS[name](levels, sign * m).permute(0, 2, 3, 1).numpy()
            for image, out in zip(images, outs):
                pillows = getattr(ImageEnhance, name)(Image.fromarray(image.numpy()))
                assert np.array_equal(out, np.asarray(pillows.enhance(factor))), (m, sign)
            if name == "Brightness":
                blended = factor * every + (1.0 - factor) * torch.zeros_like(every)
                assert torch.equal(augment.OPERATIONS[name](ramp, sign * m).flatten().byte(),
                                   blended.clamp(0, 255).to(torch.uint8)), (m, sign)


def test_rand_augment_draws_each_operation_alike(monkeypatch):
    """Operation k leaves a one and its sign at place k of the channels. Rounds are independent."""
    def mark(x, m, k):
        s = math.copysign(1, m)
        return x + torch.eye(14)[k] * torch.tensor([1, s, s])[:, None, None]
    monkeypatch.setattr(augment, "OPERATIONS", {k: partial(mark, k=k) for k in range(14)})
    out = augment.rand_augment(torch.zeros(5000, 3, 1, 14), BatchRandom(0, 5000), n=2)
    done, sign, _ = (255 * out[:, :, 0]).round().unbind(1)
    assert (done.sum(1) == 2).all() and abs((done == 2).sum() / 5000 - 1 / 14) < 0.015
    assert (done.mean(0) * 7 - 1).abs().max() < 0.15 and sign.mean(0).abs().max() < 0.02
