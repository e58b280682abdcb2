"""Prepared data sets on disk, pictures in batches on the device, and the `shapes` pictures.

A prepared set is a folder data/cache/NAME with plain arrays and a meta.json that lists them:

    {train,val}_images.npy   uint8 (N, H, W, 3)      H = W = 32 or 256
    {train,val}_labels.npy   int64 (N,)
    {train,val}_masks.npy    uint8 (N, H, W), 1 on the object (shapes only)

`data/prepare.py` writes them, `load` checks and memory-maps them, `Images` hands out batches, and `index_batches` says
which pictures make up which step.
"""

import contextlib
import difflib
import fcntl
import hashlib
import json
import math
import os
import shutil
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

CACHE = Path(__file__).resolve().parent / "cache"
RESIDENT_BYTES = 4 * 2**30  # flowers102's test split has 1.2 GB and fits on any device; ImageNet has 252 GB


class DataError(ValueError):
    """Bad or missing data. The message is one line: what is wrong, and what to do."""


@dataclass(frozen=True)
class ImageSet:
    """Where a set comes from. `repo` on the Hugging Face Hub; `size` pixels a side as stored; `val` the splits that may
    serve as validation set, best first; `on_first_use` whether a script may prepare it unasked; `gated` whether the Hub
    asks for a log-in."""

    repo: str | None
    classes: int
    size: int
    val: tuple[str, ...] = ("test", "validation", "val")
    on_first_use: bool = True
    gated: bool = False


SETS = {
    "shapes": ImageSet(None, 10, 32),
    "cifar10": ImageSet("uoft-cs/cifar10", 10, 32),
    "cifar100": ImageSet("uoft-cs/cifar100", 100, 32),
    "flowers102": ImageSet("dpdl-benchmark/oxford_flowers102", 102, 256),
    "pets": ImageSet("timm/oxford-iiit-pet", 37, 256),
    # ImageNet's test split has no labels (all are -1), so it never serves as validation set.
    "imagenet": ImageSet("ILSVRC/imagenet-1k", 1000, 256, val=("validation", "val"), on_first_use=False, gated=True),
}


# ----------------------------------------------------------------------------------------------------------------------
# Prepared sets, images and text alike: meta.json, checks, and a folder that appears whole or not at all


def unknown(what, name, allowed):
    """One line that says that `name` is no `what`, which there are, and which one was perhaps meant."""
    near = difflib.get_close_matches(str(name), allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}: there are {', '.join(allowed)}{hint}"


@contextlib.contextmanager
def preparing(name, cache=CACHE, overwrite=False):
    """Yields an empty folder to write NAME in, and on leaving renames it to cache/NAME as the last act.

    Yields None when NAME is there already (and not `overwrite`). An exception, a kill or a power cut leaves no
    cache/NAME. Only one process prepares a set at a time: others wait here, and then find it ready.
    """
    cache = Path(cache)
    folder, draft, old = cache / name, cache / f".{name}.draft", cache / f".{name}.old"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / f".{name}.lock", "w")
    except OSError as error:
        raise DataError(f"cannot write to {cache} ({error.strerror}): give another folder (--cache of prepare.py, --data_dir elsewhere)") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: another process is preparing it; waiting", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists() and not overwrite:
            yield None
            return
        for left_over in (draft, old):  # of a run that was killed: whoever holds the lock is alone
            shutil.rmtree(left_over, ignore_errors=True)
        draft.mkdir()
        try:
            yield draft
            if folder.exists():
                folder.rename(old)
            draft.rename(folder)
            _sync(cache)
        finally:
            for left_over in (draft, old):
                shutil.rmtree(left_over, ignore_errors=True)


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(meta):
    """SHA-256 of everything in `meta` but the seal itself."""
    return hashlib.sha256(json.dumps({k: meta[k] for k in meta if k != "seal"}, sort_keys=True).encode()).hexdigest()


def _command(name, cache, option=""):
    return f"python data/prepare.py {name}{option}" + (f" --cache {cache}" if Path(cache) != CACHE else "")


def _again(name, cache):
    return f"prepare it again: {_command(name, cache, ' --overwrite')}"


def write_meta(folder, name, kind, **fields):
    """Describes the files of `folder` (.npy arrays, .bin uint16 tokens, others bytes) in its meta.json.

    All is on the disk itself when this returns. `kind` is "images" or "text"; `fields` is what else belongs to the set
    (classes, mean, tokenizer ...).
    """
    files = {}
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")
        else:
            array = np.memmap(path, np.uint16 if path.suffix == ".bin" else np.uint8, "r")
        files[path.name] = {"sha256": _sha256(path), "bytes": path.stat().st_size,
                            "shape": list(array.shape), "dtype": str(array.dtype)}
        _sync(path)
    meta = {"format": 1, "name": name, "kind": kind, **fields, "files": files}
    meta["seal"] = _seal(meta)
    path = Path(folder) / "meta.json"
    path.write_text(json.dumps(meta, indent=1))
    _sync(path)
    _sync(folder)


def read_meta(name, cache=CACHE):
    """The meta.json of a prepared set: a dict whose `name`, `kind` and `files` can be relied on. Raises DataError."""
    path = Path(cache) / name / "meta.json"
    again = _again(name, cache)
    try:
        meta = json.loads(path.read_bytes())
        sealed = isinstance(meta, dict) and meta.get("seal") == _seal(meta)
    except OSError as error:
        raise DataError(f"{name}: cannot read {path} ({error.strerror}); {again}") from None
    except (ValueError, RecursionError):
        raise DataError(f"{name}: {path} is damaged (not JSON); {again}") from None
    if not sealed:
        raise DataError(f"{name}: {path} is damaged or was edited (its checksum differs); {again}")
    files = meta.get("files")
    if (meta.get("format") != 1 or meta.get("name") != name or meta.get("kind") not in ("images", "text")
            or not isinstance(files, dict) or not all(map(_is_file_entry, files, files.values()))):
        raise DataError(f"{name}: {path} does not describe this set in a format known here; {again}")
    return meta


def _is_file_entry(name, entry):
    return (Path(name).name == name and isinstance(entry, dict) and isinstance(entry.get("sha256"), str)
            and entry.get("dtype") in ("uint8", "uint16", "int64")
            and isinstance(entry.get("shape"), list) and len(entry["shape"]) > 0
            and all(type(size) is int and size >= 0 for size in [entry.get("bytes"), *entry["shape"]]))


def open_file(meta, file, cache=CACHE):
    """Read-only memory map of one prepared file, its size, header, shape and dtype checked. Raises DataError."""
    path, again = Path(cache) / meta["name"] / file, _again(meta["name"], cache)
    entry = meta["files"].get(file)
    if entry is None:
        raise DataError(f"{meta['name']}: meta.json does not list {file}; {again}")
    try:
        found = path.stat().st_size
        if found != entry["bytes"]:
            raise DataError(f"{path} is damaged ({found:,} bytes, should be {entry['bytes']:,}); {again}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own, of odd syntax in a damaged header
            if path.suffix == ".npy":
                array = np.lib.format.open_memmap(path, mode="r")  # unlike np.load, never takes a pickle or an archive
            else:
                array = np.memmap(path, entry["dtype"], "r")
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror or error}); {again}") from None
    except Exception:  # a damaged header can make numpy raise anything from SyntaxError to OverflowError
        raise DataError(f"{path} is damaged (its header is not that of an array); {again}") from None
    if [*array.shape] != entry["shape"] or str(array.dtype) != entry["dtype"] or not array.flags.c_contiguous:
        raise DataError(f"{path} is damaged (holds {array.dtype} {array.shape}, should be {entry['dtype']} "
                        f"{tuple(entry['shape'])}); {again}")
    return array


def verify(name, cache=CACHE):
    """Recomputes the SHA-256 of each file of a prepared set; returns meta. Raises DataError naming what differs."""
    meta = read_meta(name, cache)
    for file in meta["files"]:
        open_file(meta, file, cache)
    wrong = [file for file, entry in meta["files"].items() if _sha256(Path(cache) / name / file) != entry["sha256"]]
    if wrong:
        raise DataError(f"{name}: {', '.join(wrong)} differs from what was prepared (SHA-256); {_again(name, cache)}")
    return meta


# ----------------------------------------------------------------------------------------------------------------------
# Image sets


@dataclass
class ImageData:
    """A prepared image set. Images are read-only memory maps; `mean`, `std` are per channel, of train_images / 255."""

    name: str
    classes: list[str]
    mean: list[float]
    std: list[float]
    image_size: int
    train_images: np.ndarray  # uint8 (N, H, W, 3)
    train_labels: np.ndarray  # int64 (N,)
    val_images: np.ndarray
    val_labels: np.ndarray
    train_masks: np.ndarray | None = None  # uint8 (N, H, W), 1 on the object
    val_masks: np.ndarray | None = None


def load(name, cache=CACHE, allow_prepare=True):
    """Opens a prepared image set and checks header, file size and label range of all its files.

    A missing set that is small (all but imagenet) is prepared on the spot if `allow_prepare`. Raises DataError.
    """
    if name not in SETS:
        raise DataError(unknown("image set", name, list(SETS)))
    if not (Path(cache) / name).exists():
        if not (allow_prepare and SETS[name].on_first_use):
            raise DataError(f"{name} is not prepared ({Path(cache) / name} is missing); {how_to_get(name, cache)}")
        from data import prepare

        prepare.prepare(name, cache=cache)
    meta = read_meta(name, cache)
    if meta["kind"] == "text" and "tokenizer" in meta:
        raise DataError(f"{name} is a set of text, not of pictures")
    again = _again(name, cache)
    classes, size = meta.get("classes"), meta.get("image_size")
    if not (meta["kind"] == "images" and type(size) is int and isinstance(classes, list) and len(classes) > 0
            and all(isinstance(c, str) for c in classes) and _is_colour(meta.get("mean"))
            and _is_colour(meta.get("std")) and min(meta["std"]) > 0):
        raise DataError(f"{name}: meta.json does not describe an image set; {again}")
    data = ImageData(name, classes, meta["mean"], meta["std"], size, *[None] * 4)
    for split in ("train", "val"):
        images = open_file(meta, f"{split}_images.npy", cache)
        labels = np.array(open_file(meta, f"{split}_labels.npy", cache))
        masks = open_file(meta, f"{split}_masks.npy", cache) if f"{split}_masks.npy" in meta["files"] else None
        shapes_fit = images.shape == (len(labels), size, size, 3) and (masks is None or masks.shape == images.shape[:3])
        if not shapes_fit or len(labels) == 0 or images.dtype != np.uint8 or labels.dtype != np.int64:
            raise DataError(f"{name}: its {split} files do not fit together; {again}")
        if labels.min() < 0 or labels.max() >= len(classes):
            raise DataError(f"{name}: {split}_labels.npy has labels {labels.min()} to {labels.max()}, allowed are 0 to "
                            f"{len(classes) - 1}; {again}")
        for kind, array in (("images", images), ("labels", labels), ("masks", masks)):
            setattr(data, f"{split}_{kind}", array)
    return data


def _is_colour(value):
    return isinstance(value, list) and len(value) == 3 and all(type(v) is float and math.isfinite(v) for v in value)


def how_to_get(name, cache=CACHE):
    """The ways to an image set, for an error message."""
    spec, command = SETS[name], _command(name, cache)
    if spec.repo is None:
        return f"run: {command}"
    page = f"https://huggingface.co/datasets/{spec.repo}"
    terms = f" (after accepting the terms on {page} and `hf auth login`)" if spec.gated else ""
    return (f"with a network run: {command}{terms}; without one, put the Parquet files of {page} in a folder DIR "
            f"and run: {_command(name, cache, ' --source DIR')}")


def order(n, epoch, seed):
    """The order of `n` pictures in an epoch: a permutation, int64 (n,), that depends on nothing but its arguments."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def index_batches(n, batch_size, seed, start_step=0, rows=slice(None)):
    """Endless generator: the indices of this rank's `rows` of the global batch, from step start_step on.

    Step s is batch k of epoch e, where e, k = divmod(s, n // batch_size): order(n, e, seed)[k B : (k + 1) B]. What is
    left of an epoch and does not fill a batch is skipped. Any step can be the first, at the cost of one permutation.
    Raises DataError if n < batch_size.
    """
    if n < batch_size:
        raise DataError(f"batch size {batch_size} exceeds the {n} training pictures; use {n} or less")
    epoch, batch = divmod(start_step, n // batch_size)
    while True:
        permutation = order(n, epoch, seed)
        for start in range(batch * batch_size, n - batch_size + 1, batch_size):
            yield permutation[start : start + batch_size][rows]
        epoch, batch = epoch + 1, 0


class Images:
    """Batches of one split on `device`.

    `images` uint8 (N, H, W, 3) and `labels` int64 (N,) as in ImageData. A resident split (by default one below 4 GiB)
    is one tensor on the device, and a batch is a gather there; any other is read from the memory map batch by batch.
    """

    def __init__(self, images, labels, device, resident=None):
        self.device = torch.device(device)
        self.resident = images.nbytes < RESIDENT_BYTES if resident is None else resident
        self.images, self.labels = images, torch.from_numpy(np.array(labels))
        if self.resident:
            self.images = torch.from_numpy(np.array(images)).to(self.device)
            self.labels = self.labels.to(self.device)

    def __len__(self):
        return len(self.labels)

    def batch(self, index):
        """The pictures `index` (int64, array or tensor) as uint8 (b, H, W, 3) and their labels (b,), on the device."""
        if self.resident:
            index = torch.as_tensor(index).to(self.device)
            return self.images[index], self.labels[index]
        images, labels = _Rows(self.images, self.labels)[index]
        return images.to(self.device), labels.to(self.device)

    def batches(self, index_batches, workers=0):
        """Yields `batch(index)` for each index array of an iterable, which may be endless.

        A split that is not resident is read ahead by `workers` processes, each fetching whole batches: they consume
        `index_batches` a few steps before they are yielded.
        """
        if self.resident or workers == 0:
            yield from map(self.batch, index_batches)
            return
        loader = torch.utils.data.DataLoader(
            _Rows(self.images, self.labels), batch_size=None, sampler=index_batches, num_workers=workers,
            prefetch_factor=4, pin_memory=self.device.type == "cuda", worker_init_fn=_leave_signals_to_parent,
            generator=torch.Generator())  # of its own: the global one must not depend on how batches are read
        for images, labels in loader:
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


class _Rows(torch.utils.data.Dataset):
    """Item `index` (int64 array) is the whole batch of those rows."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __getitem__(self, index):
        index = np.asarray(index)
        return torch.from_numpy(self.images[index]), self.labels[index]

    def __getstate__(self):  # a pickled memory map would be a copy of all its data: send a started process its address
        maps = isinstance(self.images, np.memmap)
        return (self.images.filename, self.images.offset, self.images.shape) if maps else self.images, self.labels

    def __setstate__(self, state):
        images, self.labels = state
        if isinstance(images, tuple):
            path, offset, shape = images
            images = np.memmap(path, np.uint8, "r", offset, shape)
        self.images = images


def _leave_signals_to_parent(worker):
    # Ctrl-C and torchrun signal the whole process group, but the parent still needs batches to finish its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# ----------------------------------------------------------------------------------------------------------------------
# shapes: ten kinds of object, drawn

SHAPES = ("circle", "ellipse", "square", "triangle", "cross", "star", "ring", "crescent", "heart", "arrow")


def _inside(shape, x, y):
    """Whether points (x, y), y upwards, lie in a shape. All reach about as far as the unit circle, 1.07 at most."""
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
    if shape == "star":  # a point is in a pentagram if it is beyond at most one of the five lines through its edges
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


def _texture(rng, n, size):
    """Smooth random colours, float32 (n, size, size, 3): noise on coarse grids, linearly interpolated, about 0."""
    out = np.zeros((n, size * size, 3), np.float32)
    for cells, strength in ((2, 0.085), (5, 0.055), (11, 0.04)):
        at = np.linspace(0, cells - 1, size)
        weights = np.maximum(0, 1 - abs(at[:, None] - np.arange(cells))).astype(np.float32)  # (size, cells)
        grid = rng.standard_normal((n, cells * cells, 3), np.float32)
        out += strength * (np.kron(weights, weights) @ grid)
    return out.reshape(n, size, size, 3)


def draw_shapes(n, seed, size=32):
    """Draws images uint8 (n, size, size, 3), labels int64 (n,) and masks uint8 (n, size, size), 1 on the object.

    One whole object a picture, of random place, scale, tilt and colour. Its colours and texture come from the
    background's distribution, so that only the outline tells the class. Every class as often, in random order.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % len(SHAPES))
    images, masks = np.empty((n, size, size, 3), np.uint8), np.empty((n, size, size), np.uint8)
    grid = (np.arange(4 * size, dtype=np.float32) + 0.5) / 4  # 4 x 4 points in each pixel
    for label, shape in enumerate(SHAPES):
        for rows in np.array_split(np.flatnonzero(labels == label), max(1, n // 500)):
            m = len(rows)
            scale = rng.uniform(0.32, 0.44, m).astype(np.float32) * size
            reach = 1.07 * scale
            centre = reach + rng.random((2, m), np.float32) * (size - 2 * reach)
            angle = rng.uniform(-math.pi / 9, math.pi / 9, m)  # up to 20 degrees: a heart stays a heart, not a spade
            cos, sin = (np.cos(angle) / scale).astype(np.float32), (np.sin(angle) / scale).astype(np.float32)
            dx, dy = grid - centre[0][:, None], centre[1][:, None] - grid  # (m, 4 size); y upwards
            x = (cos[:, None] * dx)[:, None] + (sin[:, None] * dy)[:, :, None]  # (m, row, column)
            y = (cos[:, None] * dy)[:, :, None] - (sin[:, None] * dx)[:, None]
            cover = _inside(shape, x, y).reshape(m, size, 4, size, 4).mean((2, 4), dtype=np.float32)

            colours = rng.uniform(0.1, 0.9, (m, 8, 3)).astype(np.float32)  # background, seven tries for the object
            contrast = np.linalg.norm(colours[:, 1:] - colours[:, :1], axis=-1)
            tries = 1 + np.argmax(np.where(contrast > 0.6, 2, contrast), 1)  # the first that shows, else the best
            back = colours[:, 0][:, None, None] + _texture(rng, m, size)
            front = colours[np.arange(m), tries][:, None, None] + _texture(rng, m, size)
            picture = back + cover[..., None] * (front - back)
            picture += 0.04 * rng.standard_normal(picture.shape, np.float32)
            images[rows] = (255 * picture.clip(0, 1)).round()
            masks[rows] = cover >= 0.5
    return images, labels, masks
