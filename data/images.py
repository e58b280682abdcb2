"""Image sets as training reads them: batches on the device, and the pictures of `shapes`.

    load(NAME) -> ImageData -> Images -> batches

prepare.py makes the files, on first use those of the small sets. `Images` hands out batches;
`index_batches` says which images make up which step."""
import math
import signal
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps

from flags import ROOT, UserError

CACHE = ROOT / "data" / "cache"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHAPES = ("circle", "ellipse", "square", "triangle", "cross", "star", "ring", "crescent", "heart",
          "arrow")


@dataclass
class ImageData:
    """A prepared image set. Images are read-only memory maps."""
    name: str
    classes: list[str]
    mean: list[float]  # per channel, of train_images / 255
    std: list[float]
    image_size: int
    train_images: np.ndarray | None = None  # uint8 (N, H, W, 3)
    train_labels: np.ndarray | None = None  # int64 (N,)
    train_masks: np.ndarray | None = None   # uint8 (N, H, W), 1 on the object (drawn sets only)
    val_images: np.ndarray | None = None
    val_labels: np.ndarray | None = None
    val_masks: np.ndarray | None = None

    def meta(self):
        """What a checkpoint keeps of the set its model was trained on."""
        return dict(name=self.name, classes=self.classes, mean=self.mean, std=self.std,
                    image_size=self.image_size)


def load(name, cache=CACHE):
    """Opens a prepared set; one that is missing and small is prepared first. Raises UserError."""
    from data import prepare

    with prepare.opened(name, "images", cache) as (folder, meta):
        arrays = {path.stem: np.load(path, None if "labels" in path.stem else "r")
                  for path in folder.glob("*.npy")}
        return ImageData(name, meta["classes"], meta["mean"], meta["std"], meta["image_size"],
                         **arrays)


# -------------------------------------------------------------------------------------------------
# Batches
# -------------------------------------------------------------------------------------------------

def index_batches(n, batch_size, seed, start_step=0, rows=slice(None)):
    """Endless generator: the indices of this rank's `rows` of the global batch, from start_step on.

    Step s is batch k of epoch e, where e, k = divmod(s, n // batch_size), of a permutation drawn
    from (seed, e). What is left of an epoch and fills no batch is skipped."""
    if n < batch_size:
        raise UserError(f"batch size {batch_size} exceeds the {n} training images; use {n} or less")
    epoch, batch = divmod(start_step, n // batch_size)
    while True:
        permutation = np.random.default_rng([seed, epoch]).permutation(n)
        for start in range(batch * batch_size, n - batch_size + 1, batch_size):
            yield permutation[start : start + batch_size][rows]
        epoch, batch = epoch + 1, 0


class Images:
    """Batches of one split on `device`: images uint8 (N, H, W, 3), labels int64 (N,).

    A resident split is one tensor on the device, and a batch is a gather there; any other is read
    from the memory map batch by batch. By default one below 4 GiB is resident: flowers102's test
    split has 1.2 GB and fits on any device."""

    def __init__(self, images, labels, device, resident=None):
        self.device = torch.device(device)
        self.resident = images.nbytes < 4 * 2**30 if resident is None else resident
        self.images, self.labels = images, torch.from_numpy(np.array(labels))
        if self.resident:
            self.images = torch.from_numpy(np.array(images)).to(self.device)
            self.labels = self.labels.to(self.device)

    def __len__(self):
        return len(self.labels)

    def batch(self, index):
        """Images and labels of `index`, int64 (b,), array or tensor."""
        if self.resident:
            index = self._to_device(torch.as_tensor(index))
            return self.images[index], self.labels[index]
        return tuple(map(self._to_device, _Gather(self.images, self.labels)[index]))

    def _to_device(self, t):
        """A copy from memory that is not pinned would wait for a GPU to finish what it has."""
        if self.device.type == "cuda":
            return t.pin_memory().to(self.device, non_blocking=True)
        return t.to(self.device)

    def batches(self, index_batches, workers=0):
        """Yields `batch(index)` for each index array of an iterable, which may be endless.

        A split that is not resident is read ahead by `workers` processes, each fetching whole
        batches: they consume `index_batches` a few steps before they are yielded."""
        if self.resident or workers == 0:
            yield from map(self.batch, index_batches)
            return
        loader = torch.utils.data.DataLoader(
            _Gather(self.images, self.labels), batch_size=None, sampler=index_batches,
            num_workers=workers, prefetch_factor=4, pin_memory=self.device.type == "cuda",
            multiprocessing_context="fork",     # a spawned worker would get a copy of the images
            worker_init_fn=_leave_signals_to_parent,
            generator=torch.Generator())  # else the global one's state would depend on `workers`
        for images, labels in loader:
            yield self._to_device(images), self._to_device(labels)


class _Gather(torch.utils.data.Dataset):
    """Item `index` (int64 array) is the whole batch of those rows."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __getitem__(self, index):
        index = np.asarray(index)
        return torch.from_numpy(self.images[index]), self.labels[index]


def _leave_signals_to_parent(worker):
    # Ctrl-C and torchrun signal the whole process group, but the parent has a step to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# -------------------------------------------------------------------------------------------------
# Pictures
# -------------------------------------------------------------------------------------------------

def resize_crop(image, size=256):
    """The middle of a Pillow image whose shorter side is resized to `size` (bicubic), the longer
    one rounded down; sides and crop are torchvision's."""
    width, height = (side * size // min(image.size) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), Image.BICUBIC).crop((left, top, left + size, top + size))


def read_picture(file, size):
    """(RGB array (size, size, 3), None), or (None, what is wrong with the file)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # Pillow's, of damaged EXIF data
            image = ImageOps.exif_transpose(Image.open(file))       # upright
        if image.mode.startswith("I"):          # 16 bits a pixel, which convert() would clip at 255
            image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
        if image.has_transparency_data:         # on white: hidden colours are not meant to be seen
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return np.asarray(resize_crop(image.convert("RGB"), size)), None
    except Exception as error:  # a damaged file can make a decoder raise anything
        return None, " ".join(str(error).split()) or type(error).__name__


# -------------------------------------------------------------------------------------------------
# shapes: ten kinds of object, drawn, so that all works without a network
# -------------------------------------------------------------------------------------------------

# Contrasts to learn from and to be scored at; small, so that no one place is a good guess
CAMOUFLAGE = dict(train=dict(contrast=(0.3, 1.5), scale=(0.18, 0.28)),
                  val=dict(contrast=(0.3, 0.3), scale=(0.18, 0.28)))


def _inside(shape, x, y):
    """Whether points (x, y), y upwards, lie in a shape of about the unit circle's reach, 1.07."""
    if shape == "circle":
        return x * x + y * y < 0.8**2
    if shape == "ellipse":
        return x * x + (y / 0.5) ** 2 < 1.05**2
    if shape == "square":
        return np.maximum(abs(x), abs(y)) < 0.7
    if shape == "triangle":
        return np.maximum(math.sqrt(0.75) * abs(x) + 0.5 * y, -y) < 0.53
    if shape == "cross":
        return (np.minimum(abs(x), abs(y)) < 0.28) & (np.maximum(abs(x), abs(y)) < 0.95)
    if shape == "star":  # in a pentagram is what lies beyond at most one of its five edges' lines
        turns = 2 * math.pi / 5 * np.arange(5)
        return sum((x * math.sin(t) + y * math.cos(t) > 0.33).astype(np.int8) for t in turns) < 2
    if shape == "ring":
        return abs(x * x + y * y - 0.58) < 0.34
    if shape == "crescent":
        return (x * x + y * y < 1) & ((x - 0.5) ** 2 + y * y > 0.75**2)
    if shape == "heart":
        x2, y = (1.3 * x) ** 2, 1.3 * y + 0.1
        return (x2 + y * y - 1) ** 3 < x2 * y**3
    assert shape == "arrow"
    return np.where(y > 0, y + abs(x) < 1, (abs(x) < 0.32) & (y > -1))


def _texture(rng, n, size, scales=((2, 0.085), (5, 0.055), (11, 0.04))):
    """float32 (n, size, size, 3) around 0: interpolated noise of (cells a side, strength) each."""
    out = np.zeros((n, size * size, 3), np.float32)
    for cells, strength in scales:
        at = np.linspace(0, cells - 1, size)
        weights = np.maximum(0, 1 - abs(at[:, None] - np.arange(cells))).astype(np.float32)
        grid = rng.standard_normal((n, cells * cells, 3), np.float32)
        out += strength * (np.kron(weights, weights) @ grid)
    return out.reshape(n, size, size, 3)


def draw_shapes(n, seed, size=32, contrast=None, scale=(0.32, 0.44)):
    """Images uint8 (n, size, size, 3), labels int64 (n,), masks uint8 (n, size, size) of 0 and 1.

    One whole object an image, of random place, tilt, colour and scale (about half its height, in
    heights of the image). Its colours and texture come from the background's distribution, so that
    only the outline tells the class. Every class is as frequent. With `contrast` (low, high) the
    colours are that far apart, under a texture of two pixels a grain, 0.23 from its colour."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % len(SHAPES))
    images = np.empty((n, size, size, 3), np.uint8)
    masks = np.empty(images.shape[:3], np.uint8)
    grid = (np.arange(4 * size, dtype=np.float32) + 0.5) / 4  # 4 x 4 points in each pixel
    for label, shape in enumerate(SHAPES):
        for rows in np.array_split(np.flatnonzero(labels == label), max(1, n // 500)):
            m = len(rows)
            # the share of each pixel that the object covers
            radius = rng.uniform(*scale, m).astype(np.float32) * size
            reach = 1.07 * radius
            centre = reach + rng.random((2, m), np.float32) * (size - 2 * reach)
            angle = rng.uniform(-math.pi / 9, math.pi / 9, m)  # 20 degrees: a heart stays a heart
            cos = (np.cos(angle) / radius).astype(np.float32)
            sin = (np.sin(angle) / radius).astype(np.float32)
            dx, dy = grid - centre[0][:, None], centre[1][:, None] - grid  # (m, 4 size); y upwards
            x = (cos[:, None] * dx)[:, None] + (sin[:, None] * dy)[:, :, None]  # (m, row, column)
            y = (cos[:, None] * dy)[:, :, None] - (sin[:, None] * dx)[:, None]
            inside = _inside(shape, x, y).reshape(m, size, 4, size, 4)
            cover = inside.mean((2, 4), dtype=np.float32)
            if contrast:
                colour = rng.uniform(0.3, 0.7, (m, 1, 1, 3)).astype(np.float32)
                apart = rng.standard_normal((m, 1, 1, 3), np.float32)
                apart /= np.linalg.norm(apart, axis=-1, keepdims=True)
                apart *= rng.uniform(*contrast, (m, 1, 1, 1)).astype(np.float32)
                back, front = (shade + _texture(rng, m, size, [(16, 0.2)])
                               for shade in (colour - apart / 2, colour + apart / 2))
            else:
                # a colour for the background, and the first of seven that stands out, else the best
                colours = rng.uniform(0.1, 0.9, (m, 8, 3)).astype(np.float32)
                distance = np.linalg.norm(colours[:, 1:] - colours[:, :1], axis=-1)
                choice = 1 + np.argmax(np.where(distance > 0.6, 2, distance), 1)
                back = colours[:, 0][:, None, None] + _texture(rng, m, size)
                front = colours[np.arange(m), choice][:, None, None] + _texture(rng, m, size)
            image = back + cover[..., None] * (front - back)
            image += 0.04 * rng.standard_normal(image.shape, np.float32)
            images[rows] = (255 * image.clip(0, 1)).round()
            masks[rows] = cover >= 0.5
    return images, labels, masks
