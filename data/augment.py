"""Image augmentation in batch, of square images x (B, 3, S, S) float32 in [0, 1], on any device.

Each sample has its own random parameters. The CPU draws them, so it knows which samples an
operation changes and never waits for a GPU to say; the GPU gets them by copies that do not block.
Each operation but CutMix and blur is as torchvision and Pillow define it, so that published recipes
carry over. Call these outside autocast, which would round pixels to 8 bits."""
import math
from functools import partial

import torch
from torch.nn import functional as F

from processes import to_device


class BatchRandom:
    """Random numbers for a global batch, of which this process keeps its own rows; on the CPU. Each
    draw is made for all `batch` samples and then cut to the b of `rows`, so that N processes with
    the same seed see the images that one would."""

    def __init__(self, seed, batch, rows=slice(None)):
        self.batch, self.rows = batch, rows
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape, low=0.0, high=1.0):
        """(b, *shape) float32, uniform in [low, high)."""
        drawn = torch.rand(self.batch, *shape, generator=self.generator)[self.rows]
        return low + (high - low) * drawn

    def integers(self, high, *shape):
        """(b, *shape) int64, uniform in {0, ..., high - 1}."""
        return torch.randint(high, (self.batch, *shape), generator=self.generator)[self.rows]

    def bernoulli(self, p):
        """(b,) bool, true with probability p, a number or one for each of the b."""
        return self.uniform() < p


def _each(ops, choice, x, *params):
    """A copy of x with x[rows] = op(x[rows], params[rows]) for each op; rows are the samples whose
    choice is the op's place in ops. None changes nothing. choice (b,) and params are on the CPU."""
    counts = choice.long().bincount(minlength=len(ops)).tolist()    # known without waiting
    order = choice.argsort()
    sorted_by_op = [to_device(t, x.device) for t in (order, *(p[order] for p in params))]
    x = x.clone()
    for op, rows, *values in zip(ops, *(t.split(counts) for t in sorted_by_op)):
        if op and len(rows):
            done = op(x.index_select(0, rows), *values)
            x.index_copy_(0, rows, done)        # a third of the time of x[rows] = done
    return x


# ---- Pixels -------------------------------------------------------------------------------------
def to_float(images):
    """uint8 (B, H, W, 3) -> float32 (B, 3, H, W) in [0, 1]."""
    return images.permute(0, 3, 1, 2).contiguous() / 255


def normalize(x, mean, std):
    """mean and std: a number per channel."""
    mean, std = to_device(torch.tensor([mean, std]), x.device).view(2, 3, 1, 1)
    return (x - mean).div_(std)


def luma(x):
    """(B, 1, H, W) of ITU-R 601-2: .299, .587, .114, in 16 bits as in Pillow."""
    red, green, blue = x.split(1, 1)
    return 19595 / 65536 * red + 38470 / 65536 * green + 7471 / 65536 * blue


# ---- Crops, sizes, flips ------------------------------------------------------------------------
def pad_crop(x, size, padding, rng):
    """Pads with zeros, then crops a random size x size window."""
    x = F.pad(x, [padding] * 4)
    side, window = x.shape[-1], torch.arange(size, device=x.device)
    row, column = (to_device(rng.integers(side - size + 1, 1), x.device) + window for _ in range(2))
    index = (row[:, :, None] * side + column[:, None]).flatten(1)       # (B, size^2)
    return x.flatten(2).gather(2, index[:, None].expand(-1, 3, -1)).unflatten(2, (size, size))


def _bicubic(t):
    t = t.abs().clamp(max=2)
    return torch.where(t < 1, (1.5 * t - 2.5) * t * t + 1, -0.5 * (((t - 5) * t + 8) * t - 4))


def _resampling(start, length, size, out):
    """Matrices (B, out, size) that resample [start, start + length) of `size` pixels to `out`.
    As Pillow: out[i] = sum_j k((j + 1/2 - c_i) / max(s, 1)) in[j], rows normalised to 1, with
    s = length / out the pixels per output pixel, c_i = start + (i + 1/2) s, and j over the stretch,
    of whole pixels. start and length (B, 1, 1)."""
    pixel = torch.arange(size, device=start.device) + 0.5
    scale = length / out
    center = start + (torch.arange(out, device=start.device).view(-1, 1) + 0.5) * scale
    weight = _bicubic((pixel - center) / scale.clamp(min=1))
    weight = weight * ((pixel > start) & (pixel < start + length))
    return weight / weight.sum(-1, keepdim=True)


def _resample(x, rows, columns):
    """rows X columns^T for each channel X; rows (B, h, H), columns (B, w, W) -> (B, 3, h, w)."""
    # the three channels at once: a broadcast would copy `columns`
    across = torch.bmm(x.flatten(1, 2), columns.mT)
    return rows[:, None] @ across.unflatten(1, x.shape[1:3])


def resize(x, size):
    """To size x size; bicubic, antialiased."""
    # clamped, as bicubic overshoots
    return F.interpolate(x, (size, size), mode="bicubic", antialias=True).clamp_(0, 1)


def at_size(x, size):
    """At a model's size, for evaluation: the centre if larger, resized if smaller."""
    if x.shape[-1] < size:
        return resize(x, size)
    start = round((x.shape[-1] - size) / 2)
    return x[:, :, start:start + size, start:start + size]


def resized_crop(x, boxes, size):
    """A box of each sample, boxes (B, 4) of (top, left, height, width), whole pixels, resampled to
    size x size; antialiased. Nothing outside the box is seen."""
    top, left, height, width = boxes[..., None, None].unbind(1)
    rows = _resampling(top, height, x.shape[2], size)                   # (B, size, S)
    columns = _resampling(left, width, x.shape[3], size)
    return _resample(x, rows, columns).clamp_(0, 1)     # bicubic overshoots


def random_boxes(rng, size, scale):
    """(b, 4) boxes (top, left, height, width) of whole pixels in images of size x size. The area is
    uniform in `scale` (of the image's), width over height log-uniform from 3/4 to 4/3: the first of
    ten attempts that fits, else the whole image."""
    area = rng.uniform(10, low=scale[0], high=scale[1]) * size ** 2
    aspect = rng.uniform(10, low=math.log(3 / 4), high=math.log(4 / 3)).exp()
    h, w = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (h > 0) & (h <= size) & (w > 0) & (w <= size)
    first = fits.float().argmax(1, keepdim=True)    # of equals, argmax takes the first
    sides = torch.cat([h.gather(1, first), w.gather(1, first)], 1)
    sides = torch.where(fits.any(1, keepdim=True), sides, size)
    room = size - sides
    place = (rng.uniform(2) * (room + 1)).floor().minimum(room)     # may be rounded to room + 1
    return torch.cat([place, sides], 1)


def random_resized_crop(x, size, rng, scale):
    return resized_crop(x, to_device(random_boxes(rng, x.shape[-1], scale), x.device), size)


def flip(x, rng):
    """Left and right exchanged with probability 1/2."""
    return _each([None, lambda x: x.flip(3)], rng.bernoulli(0.5), x)


def cutmix(x, targets, rng, p):
    """CutMix (Yun et al. 2019): with probability p, an image gets a square of its neighbour. Images
    2 i and 2 i + 1 are neighbours, in an even batch. The square's area is uniform up to the
    image's, its centre is anywhere, and what crosses the border is lost. targets (b, classes) mix
    in proportion to the pixels. Returns (images, targets)."""
    size = x.shape[-1]
    side = size * rng.uniform(1, 1).sqrt() * rng.bernoulli(p)[:, None, None]
    inside = (torch.arange(size) + 0.5 - size * rng.uniform(2, 1)).abs() < side / 2
    rows, columns = to_device(inside, x.device).unbind(1)                   # (b, size)
    square = (rows[:, :, None] & columns[:, None])[:, None]                 # (b, 1, size, size)
    other = torch.arange(len(x), device=x.device) ^ 1
    share = square.float().mean((2, 3))
    return torch.where(square, x[other], x), targets.lerp(targets[other], share)


# ---- Colour, blur -------------------------------------------------------------------------------
def _blend(x, base, factor):
    return (x - base).mul_(factor).add_(base)


def _hue(x, shift):
    """HSV with H moved by `shift` turns: V - C clamp(min(k, 4 - k), 0, 1), where value V and chroma
    C stay, with k = (n + 6 H) mod 6 and n = 5, 3, 1 for red, green, blue."""
    red, green, blue = x.split(1, 1)
    high = x.amax(1, keepdim=True)
    chroma = high - x.amin(1, keepdim=True)
    some = chroma.clamp(min=1e-8)       # a grey has no hue: any will do
    hue = torch.where(high == green, 2 + (blue - red) / some, 4 + (red - green) / some)
    hue = torch.where(high == red, (green - blue) / some, hue)
    k = (hue + (6 * shift + torch.arange(5, 0, -2, device=x.device).view(3, 1, 1))).remainder_(6)
    return torch.addcmul(high, chroma, torch.minimum(k, 4 - k).clamp_(0, 1), value=-1)


def color_jitter(x, rng, brightness, contrast, saturation, hue, p=1.0):
    """With probability p, the four changes in an order of the sample's own. Strength b draws a
    factor from [1 - b, 1 + b] for factor x + (1 - factor) base: base is black (brightness), the
    mean luma (contrast) or the luma (saturation). hue draws a shift from [-hue, hue], in turns."""
    low = [1 - brightness, 1 - contrast, 1 - saturation, -hue]
    high = [1 + brightness, 1 + contrast, 1 + saturation, hue]
    low, high = torch.tensor([low, high]).view(2, 4, 1, 1, 1)
    factors = low + (high - low) * rng.uniform(4, 1, 1, 1)
    ops = (lambda x, f: (f[:, 0] * x).clamp_(0, 1),
           lambda x, f: _blend(x, luma(x).mean((1, 2, 3), keepdim=True), f[:, 1]).clamp_(0, 1),
           lambda x, f: _blend(x, luma(x), f[:, 2]).clamp_(0, 1),
           lambda x, f: _hue(x, f[:, 3]), None)
    order = rng.uniform(4).argsort(1).masked_fill(~rng.bernoulli(p)[:, None], 4)
    for choice in order.unbind(1):
        x = _each(ops, choice, x, factors)
    return x


def grayscale(x, rng, p):
    """With probability p the luma in all three channels."""
    return _each([None, lambda x: luma(x).expand_as(x)], rng.bernoulli(p), x)


def _blur(x, sigma, reach):
    """Each sigma's Gaussian out to `reach` pixels; beyond the edges their pixels are repeated."""
    pixel = torch.arange(x.shape[-1] + 2 * reach, device=x.device)
    distance = pixel - pixel[reach:-reach, None]                    # (size, size + 2 reach)
    bell = torch.exp(-distance ** 2 / (2 * sigma.view(-1, 1, 1) ** 2))
    rows = bell / bell.sum(2, keepdim=True)
    return _resample(F.pad(x, [reach] * 4, mode="replicate"), rows, rows)


def gaussian_blur(x, rng, p, sigma):
    """With probability p, a number or one per sample, a Gaussian of standard deviation uniform in
    `sigma` pixels. Pillow approximates it by three box filters."""
    blur = partial(_blur, reach=math.ceil(5 * sigma[1]))    # 6e-7 of a Gaussian lies beyond
    return _each([None, blur], rng.bernoulli(p), x, rng.uniform(low=sigma[0], high=sigma[1]))


def solarize(x, rng, p):
    """With probability p, pixels of level 128 and more are inverted."""
    level = 128 / 255 - 1e-6        # k / 255 may be rounded either way
    return _each([None, lambda x: torch.where(x < level, x, 1 - x)], rng.bernoulli(p), x)


# ---- RandAugment: x in 8-bit levels 0 ... 255, m the magnitude with its sign ---------------------
def _moved(x, a, b, c, d, e, f):
    """out(u, v) = in(a u + b v + c, d u + e v + f) at pixel centres, nearest, black outside. In
    fixed point with 16 bits, as in Pillow: a shear puts whole rows on the boundary of two pixels,
    where floats would be rounded either way."""
    c, f = c + (a + b) / 2, f + (d + e) / 2         # 1/2: a pixel's centre
    a, b, c, d, e, f = (math.floor(65536 * number + 0.5) for number in (a, b, c, d, e, f))
    side = x.shape[-1]
    u = torch.arange(side, device=x.device)
    v = u[:, None]
    column, row = (a * u + b * v + c) >> 16, (d * u + e * v + f) >> 16          # (H, W)
    inside = (column >= 0) & (column < side) & (row >= 0) & (row < side)
    index = row.clamp(0, side - 1) * side + column.clamp(0, side - 1)
    return x.flatten(2)[:, :, index] * inside


def _shift(x, m):
    return -int(150 / 331 * x.shape[-1] * m / 30)       # 150 of 331 pixels at magnitude 30


def _rotate(x, m):
    cos, sin, mid = math.cos(math.radians(m)), math.sin(math.radians(m)), x.shape[-1] / 2
    return _moved(x, cos, -sin, mid - cos * mid + sin * mid, sin, cos, mid - sin * mid - cos * mid)


ENHANCED = torch.linspace(0, 0.9, 31).tolist()      # by how much at m: float32, as in torchvision


def _enhance(x, base, m):
    factor = 1 + math.copysign(ENHANCED[abs(m)], m)
    return _blend(x, base, factor).clamp_(0, 255).floor_()


def _gray_levels(x):
    return (luma(x) + 0.5).floor()


def _sharpness(x, m):
    # 1/13 of the 3 x 3 neighbourhood and 4/13 more of the pixel itself; the border is as it was
    smooth, inner = x.clone(), x[:, :, 1:-1, 1:-1]
    smooth[:, :, 1:-1, 1:-1] = (9 / 13 * F.avg_pool2d(x, 3, 1) + 4 / 13 * inner).round()
    return _enhance(x, smooth, m)


def _autocontrast(x, m):
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, ((x - low) * 255 / (high - low).clamp(min=1)).floor(), x)


def _equalize(x, m):
    """Level i -> (step // 2 + pixels below i) // step; 255 steps: all but the brightest level's."""
    levels = x.flatten(2).long()    # (B, 3, HW)
    counts = torch.zeros(*x.shape[:2], 256, device=x.device)
    counts.scatter_add_(2, levels, torch.ones_like(x).flatten(2))
    brightest = counts.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - brightest) // 255
    table = ((step // 2 + counts.cumsum(2) - counts) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step > 0, table.gather(2, levels), x.flatten(2)).view_as(x)


OPERATIONS = {
    "Identity": None,
    "ShearX": lambda x, m: _moved(x, 1, 0.01 * m, 0, 0, 1, 0),
    "ShearY": lambda x, m: _moved(x, 1, 0, 0, 0.01 * m, 1, 0),
    "TranslateX": lambda x, m: _moved(x, 1, 0, _shift(x, m), 0, 1, 0),
    "TranslateY": lambda x, m: _moved(x, 1, 0, 0, 0, 1, _shift(x, m)),
    "Rotate": _rotate,
    "Brightness": lambda x, m: _enhance(x, 0, m),
    "Color": lambda x, m: _enhance(x, _gray_levels(x), m),
    "Contrast": lambda x, m: _enhance(
        x, (_gray_levels(x).mean((1, 2, 3), keepdim=True) + 0.5).floor(), m),
    "Sharpness": _sharpness,
    "Posterize": lambda x, m: x - x % 2 ** round(abs(m) / 7.5),  # 8 bits at magnitude 0, 4 at 30
    "Solarize": lambda x, m: torch.where(x >= 255 - 8.5 * abs(m), 255 - x, x),
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
}


def rand_augment(x, rng, n=2, m=9):
    """Applies n random operations in turn, of the fourteen of torchvision's RandAugment. m is on
    its scale of 0 to 30 (timm's ends at 10), and its sign is random. Resampling takes the nearest
    neighbour, and black outside the image. As in the original, x is rounded to 8-bit levels, the
    multiples of 1/255."""
    levels = (x * 255).round_()
    ops = [op and partial(op, m=signed) for op in OPERATIONS.values() for signed in (m, -m)]
    for _ in range(n):
        negative, choice = rng.integers(2), rng.integers(len(OPERATIONS))
        levels = _each(ops, 2 * choice + negative, levels)
    return levels.div_(255)
