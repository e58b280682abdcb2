"""Image sets: the table of them, batches on the device, preparation, and the `shapes` images.

    SETS -> prepare -> data/cache/NAME (see store.py) -> load -> ImageData -> Images -> batches

`prepare` turns Parquet files, as the Hub has them, into plain arrays, and `load` maps these into
memory. Any other name than those of SETS is prepared from a folder of class folders. `Images` hands
out batches; `index_batches` says which images make up which step.

Images of 32 px are stored as they are. Of larger ones the shorter side is resized to 256 px
(bicubic, antialiased), and the middle 256 x 256 is kept: imagenet takes 262 GB, beside 150 GB of
Parquet.
"""

import functools
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageOps
from tqdm import tqdm

from data import store
from data.store import CACHE, DataError, preparing, write_meta

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RESIDENT_BYTES = 4 * 2**30  # flowers102's test split has 1.2 GB and fits on any device

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPES = ("circle", "ellipse", "square", "triangle", "cross", "star", "ring", "crescent", "heart",
          "arrow")


@dataclass(frozen=True)
class ImageSet(store.Source):
    """A row of SETS: all there is to say about one set."""
    classes: int
    size: int                     # pixels a side, as stored
    names: tuple = ()             # of the classes, for files that do not name them
    val: tuple = ("test", "val")  # the splits that may validate, best first


def _hub(repository, *row, val=("test", "val"), **more):
    """An ImageSet whose Parquet files are on the Hugging Face Hub."""
    patterns = [f"*{split}*.parquet" for split in ("train", *val)]
    page = f"https://huggingface.co/datasets/{repository}"
    return ImageSet(*row, val=val, files=f"the Parquet files of {page}",
                    hub=((repository, "main", patterns),), **more)


SETS = {
    "shapes": ImageSet(10, 32, SHAPES),
    "camouflage": ImageSet(10, 32, SHAPES),
    "cifar10": _hub("uoft-cs/cifar10", 10, 32, CIFAR10),
    "cifar100": _hub("uoft-cs/cifar100", 100, 32),
    "flowers102": _hub("dpdl-benchmark/oxford_flowers102", 102, 256),
    "pets": _hub("timm/oxford-iiit-pet", 37, 256),
    # The labels of ImageNet's test split are not public: all are -1.
    "imagenet": _hub("ILSVRC/imagenet-1k", 1000, 256, val=("val",), on_first_use=False,
                     terms=" (after accepting the terms on its page and `hf auth login`)"),
}


# -------------------------------------------------------------------------------------------------
# Prepared sets
# -------------------------------------------------------------------------------------------------

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
    """Opens a prepared image set and checks header, file size and label range of all its files.

    A missing set that is small (all but imagenet) is prepared first. Raises DataError."""
    meta = store.open_set(name, cache, "images", SETS, prepare)
    data = ImageData(name, meta["classes"], meta["mean"], meta["std"], meta["image_size"])
    for split in ("train", "val"):
        for kind in ("images", "labels", "masks"):
            file = f"{split}_{kind}.npy"
            if kind != "masks" or file in meta["files"]:
                setattr(data, f"{split}_{kind}", store.open_file(meta, file, cache))
        labels = np.array(getattr(data, f"{split}_labels"))
        if labels.min() < 0 or labels.max() >= len(data.classes):
            raise store.broken(name, cache, f"{split}_labels.npy has labels {labels.min()} to "
                               f"{labels.max()}, allowed are 0 to {len(data.classes) - 1}")
        setattr(data, f"{split}_labels", labels)
    return data


def prepare(name, source=None, cache=CACHE, overwrite=False, workers=None, size=32):
    """Writes the image set `name` to cache/name, whole or not at all. False if it was there.

    `source` is a folder of Parquet files, None the Hub; for a name that SETS lacks, a folder of
    class folders, whose images are stored with `size` pixels a side. `workers` are the processes
    that decode (default: one a core). Raises DataError."""
    with preparing(name, cache, overwrite) as folder:
        if folder is None:
            load(name, cache)
            return False
        if name not in SETS:
            fields = _convert_folders(name, folder, Path(source), size, workers)
        elif SETS[name].files:
            size, fields = SETS[name].size, _convert(name, folder, source, cache, workers)
        else:
            size, fields = SETS[name].size, _draw(folder, camouflage=name == "camouflage")
        write_meta(folder, name, "images", image_size=size, **fields)
    return True


def prepare_shapes(cache=CACHE, train=10_000, val=2_000):
    """Writes `shapes` with that many images to cache/shapes."""
    with preparing("shapes", cache) as folder:
        if folder:
            write_meta(folder, "shapes", "images", image_size=32, **_draw(folder, train, val))


# -------------------------------------------------------------------------------------------------
# Batches
# -------------------------------------------------------------------------------------------------

def order(n, epoch, seed):
    """The order of `n` images in an epoch: a permutation, int64 (n,), drawn from (seed, epoch)."""
    return np.random.default_rng([seed, epoch]).permutation(n)


def index_batches(n, batch_size, seed, start_step=0, rows=slice(None)):
    """Endless generator: the indices of this rank's `rows` of the global batch, from start_step on.

    Step s is batch k of epoch e, where e, k = divmod(s, n // batch_size):
    order(n, e, seed)[k B : (k + 1) B]. What is left of an epoch and does not fill a batch is
    skipped. Any step can be the first, at the cost of one permutation. DataError if n < batch_size.
    """
    if n < batch_size:
        raise DataError(f"batch size {batch_size} exceeds the {n} training images; use {n} or less")
    epoch, batch = divmod(start_step, n // batch_size)
    while True:
        permutation = order(n, epoch, seed)
        for start in range(batch * batch_size, n - batch_size + 1, batch_size):
            yield permutation[start : start + batch_size][rows]
        epoch, batch = epoch + 1, 0


class Images:
    """Batches of one split on `device`.

    `images` uint8 (N, H, W, 3) and `labels` int64 (N,) as in ImageData. A resident split (by
    default one below 4 GiB) is one tensor on the device, and a batch is a gather there; any other
    is read from the memory map batch by batch."""

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
        """Images `index` (int64, array or tensor), uint8 (b, H, W, 3), and their labels (b,)."""
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

    def __getstate__(self):
        """A memory map is sent to a spawned worker as its address, not as all its data."""
        if isinstance(self.images, np.memmap):
            return (self.images.filename, self.images.offset, self.images.shape), self.labels
        return self.images, self.labels

    def __setstate__(self, state):
        self.images, self.labels = state
        if isinstance(self.images, tuple):
            path, offset, shape = self.images
            self.images = np.memmap(path, np.uint8, "r", offset, shape)


def _leave_signals_to_parent(worker):
    # Ctrl-C and torchrun signal the whole process group, but the parent has a step to finish.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# -------------------------------------------------------------------------------------------------
# Parquet to arrays
# -------------------------------------------------------------------------------------------------

def _convert(name, folder, source, cache, workers):
    """Writes images and labels of both splits; returns classes, mean and std."""
    row = SETS[name]
    root, files = row.find(name, source, cache, [".parquet"])
    by_split = {split: [file for file in files if store.split_of(file, root) == split]
                for split in ("train", *row.val)}
    by_split["val"] = next((by_split[split] for split in row.val if by_split[split]), [])
    for split, allowed in (("train", "train"), ("val", row.val[0])):
        if not by_split[split]:
            raise DataError(f"{name}: {root} has no Parquet file of the {allowed} split (such as "
                            f"{allowed}.parquet or data/{allowed}-00000-of-00001.parquet)")

    classes, columns = _classes_and_columns(name, by_split["train"][0])
    counts = {split: sum(map(_count_rows, by_split[split])) for split in ("train", "val")}
    needed, free = sum(counts.values()) * row.size**2 * 3, shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{name}: needs {needed / 1e9:.1f} GB, {folder.parent} has "
                        f"{free / 1e9:.1f} GB; choose another folder with --cache DIR")

    for split, n in counts.items():
        path = folder / f"{split}_images.npy"
        np.lib.format.open_memmap(path, "w+", np.uint8, (n, row.size, row.size, 3))
        labels, total, squares = [], 0, 0
        rows = _rows(by_split[split], columns, len(classes))
        processes = min(workers or os.cpu_count(), math.ceil(n / BATCH))
        with tqdm(total=n, unit="img", desc=f"{name} {split}", disable=None) as progress:
            for batch, sums in _decode_all(rows, path, row.size, processes):
                labels += batch.labels
                total, squares = total + sums[0], squares + sums[1]
                progress.update(len(batch.labels))
        np.save(folder / f"{split}_labels.npy", np.array(labels, np.int64))
        if split == "train":
            statistics = _mean_std(n * row.size**2, total, squares)
    return dict(classes=classes, **statistics)


def _mean_std(count, total, squares):
    """Per channel, of pixels / 255, from exact integer sums of pixels and of their squares."""
    mean = total / count
    std = np.sqrt(squares / count - mean**2)
    return dict(mean=(mean / 255).tolist(), std=(std / 255).tolist())


def _classes_and_columns(name, file):
    """Class names, and the names of the image column and of the label column of a Parquet file."""
    with store.reading(file):
        schema = pq.read_schema(file)
    images = [field.name for field in schema
              if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0]
    integers = [field.name for field in schema if pa.types.is_integer(field.type)]
    labels = [n for n in integers if n in ("label", "labels", "fine_label")] or integers
    for kind, found in (("image (a struct with bytes)", images),
                        ("label (label, labels or fine_label)", labels)):
        if len(found) != 1:
            raise DataError(f"{file}: cannot tell which column is the {kind}: "
                            f"{', '.join(found) or 'none'} of {', '.join(schema.names)}")

    row = SETS[name]
    try:  # the Hub stores names beside the schema
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        classes = list(features[labels[0]]["names"])
    except (TypeError, KeyError, ValueError):
        classes = list(row.names) or [str(i) for i in range(row.classes)]
    if len(classes) != row.classes:
        raise DataError(f"{name} has {row.classes} classes, these files name {len(classes)}: "
                        "they are another set")
    return classes, (images[0], labels[0])


def _count_rows(file):
    with store.reading(file):
        return pq.read_metadata(file).num_rows


BATCH = 32  # rows that a process decodes at a time: 6 MB of pixels at 256 px


@dataclass
class Rows:
    """Some rows of a source file."""
    file: Path
    first: int         # number of the first row in the file
    start: int         # number of the first row in the prepared array
    labels: list[int]
    images: list       # encoded, as bytes


def _rows(files, columns, classes):
    """The rows of some Parquet files, BATCH at a time."""
    start = 0
    for path in files:
        first = 0
        with store.reading(path):
            file = pq.ParquetFile(path, **store.PARQUET)
            for batch in file.iter_batches(BATCH, columns=list(columns)):
                found = batch.to_pydict()
                cells, labels = (found[name] for name in columns)
                for i, label in enumerate(labels, first):
                    if label is None or not 0 <= label < classes:
                        raise DataError(f"{path} row {i}: label {label}, allowed are 0 to "
                                        f"{classes - 1}")
                images = [cell and cell["bytes"] for cell in cells]
                yield Rows(path, first, start, labels, images)
                first, start = first + len(labels), start + len(labels)


def _decode_all(rows, path, size, processes):
    """Yields (batch, _decode_rows(batch)) of each batch of `rows`.

    Images of 32 px are decoded here: 60,000 take less time than processes take to import torch."""
    decode = functools.partial(_decode_rows, path=path, size=size)
    if size < 256 or processes < 2:
        for batch in rows:
            yield batch, decode(batch)
        return
    # spawn: whoever prepares on first use may hold CUDA and threads, which do not survive a fork
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"),
                               initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield from store.in_order(pool, decode, rows, 4 * processes)
    except BrokenProcessPool:
        raise DataError("a decoding process was killed (out of memory?); try fewer with "
                        "--workers=N") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_rows(rows, path, size):
    """Decodes into the array in file `path`; returns the sums of pixels and of their squares."""
    out = np.lib.format.open_memmap(path, "r+")[rows.start : rows.start + len(rows.images)]
    for i, data in enumerate(rows.images):
        out[i] = _decode(data, size, f"{rows.file} row {rows.first + i}")
    return out.sum((0, 1, 2), np.uint64), np.square(out, dtype=np.uint32).sum((0, 1, 2), np.uint64)


def _decode(data, size, where):
    """An image file, as bytes, as an RGB array (size, size, 3)."""
    if not data:
        raise DataError(f"{where}: has no image in it; only images stored as bytes can be read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of damaged EXIF data in some of ImageNet
            image = Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:  # a damaged file can make a decoder raise anything
        raise DataError(f"{where}: damaged image ({store.first_line(error)})") from None
    if image.size != (size, size) and size < 256:
        raise DataError(f"{where}: the image is {image.width} x {image.height}, "
                        f"expected {size} x {size}")
    return np.asarray(resize_crop(image, size))


def resize_crop(image, size=256):
    """The middle of a Pillow image whose shorter side is resized to `size` (bicubic), the longer
    one rounded down; sides and crop are torchvision's."""
    width, height = (side * size // min(image.size) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), Image.BICUBIC).crop((left, top, left + size, top + size))


# -------------------------------------------------------------------------------------------------
# Folders of pictures to arrays
# -------------------------------------------------------------------------------------------------

PICTURES = (".jpg", ".jpeg", ".png", ".webp")


def is_folder_of_pictures(path):
    """Whether anything below `path` is named like a picture."""
    return any(file.suffix.lower() in PICTURES for file in Path(path).rglob("*"))


def by_class_and_split(root):
    """({"train": [(file, class)], "val": ...}, classes) of a folder of class folders.

    Either CLASS/.../FILE, of which every tenth file of a class validates, or SPLIT/CLASS/.../FILE,
    the layout of torchvision's ImageFolder and of the Hub's imagefolder. Raises DataError."""
    found = {}                                              # (split or None, class) -> files
    for file in store.files_below(root):
        *folders, _ = file.relative_to(root).parts
        if file.suffix.lower() not in PICTURES or file.name.startswith("."):
            continue
        split = store.SPLIT_WORDS.get(folders[0].lower()) if folders else None
        if len(folders) <= bool(split):
            raise DataError(f"{file} is in no class folder: expected CLASS/FILE or "
                            "train/CLASS/FILE and val/CLASS/FILE")
        found.setdefault((split, folders[bool(split)]), []).append(file)
    classes = sorted({label for split, label in found if split in (None, "train")})
    if len(classes) < 2:
        raise DataError(f"{root} has {len(classes)} class folders of pictures; two are needed")

    parts = dict(train=[], val=[])
    for (split, label), files in sorted(found.items(), key=str):
        if label not in classes:
            raise DataError(f"{root}: class {label} has no training pictures")
        held_out = set(files[::10]) if split is None and len(files) > 1 else set()
        for file in files:
            chosen = split or ("val" if file in held_out else "train")
            parts["train" if chosen == "train" else "val"].append((file, label))
    if not parts["val"]:
        raise DataError(f"{root} has no pictures to validate with: give it a folder val, or two "
                        "pictures of a class")
    return parts, classes


def read_picture(file, size):
    """(RGB array (size, size, 3), None), or (None, what is wrong with the file)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")    # upright
        return np.asarray(resize_crop(image, size)), None
    except Exception as error:  # a damaged file can make a decoder raise anything
        return None, store.first_line(error)


def _write_header(out, shape):
    """Writes the header of a .npy file of bytes; returns where the bytes start."""
    out.seek(0)
    about = dict(descr="|u1", fortran_order=False, shape=shape)
    np.lib.format.write_array_header_1_0(out, about)
    return out.tell()


def _convert_folders(name, folder, root, size, workers):
    """Writes images and labels of both splits; returns classes, mean and std. What cannot be
    decoded is named on stderr and left out."""
    if not root.is_dir():
        raise DataError(f"--source {root} is no folder")
    parts, classes = by_class_and_split(root)
    read, skipped = functools.partial(read_picture, size=size), 0
    for split, files in parts.items():
        labels, total, squares = [], 0, 0
        with open(folder / f"{split}_images.npy", "wb") as out:
            start = _write_header(out, (len(files), size, size, 3))
            with ThreadPoolExecutor(workers or os.cpu_count()) as pool:     # Pillow frees the GIL
                progress = tqdm(total=len(files), unit="img", desc=f"{name} {split}", disable=None)
                for (file, label), result in store.in_order(
                        pool, lambda item: read(item[0]), files, 256):
                    pixels, problem = result
                    progress.update()
                    if problem:
                        skipped += 1
                        print(f"{name}: left out {file}: {problem}", file=sys.stderr)
                        continue
                    out.write(pixels.tobytes())
                    labels.append(classes.index(label))
                    total = total + pixels.sum((0, 1), np.uint64)
                    squares = squares + np.square(pixels, dtype=np.uint32).sum((0, 1), np.uint64)
                progress.close()
            if not labels:
                raise DataError(f"{name}: none of the {len(files)} pictures of the {split} split "
                                "could be read")
            # numpy pads the header: the number that could be read takes the same place
            assert _write_header(out, (len(labels), size, size, 3)) == start
        np.save(folder / f"{split}_labels.npy", np.array(labels, np.int64))
        if split == "train":
            statistics = _mean_std(len(labels) * size**2, total, squares)
    if skipped:
        total = sum(map(len, parts.values()))
        print(f"{name}: left out {skipped} of {total} pictures", file=sys.stderr)
    return dict(classes=classes, **statistics)


# -------------------------------------------------------------------------------------------------
# shapes: ten kinds of object, drawn, so that everything works without a network
# -------------------------------------------------------------------------------------------------

# Contrasts to learn from and to be scored at; small, so that no one place is a good guess
CAMOUFLAGE = dict(train=dict(contrast=(0.3, 1.5), scale=(0.18, 0.28)),
                  val=dict(contrast=(0.3, 0.3), scale=(0.18, 0.28)))


def _draw(folder, train=10_000, val=2_000, camouflage=False):
    """Writes images, labels and masks of both splits; returns classes, mean and std."""
    for split, n, seed in (("train", train, 0), ("val", val, 1)):
        drawn = draw_shapes(n, seed, **CAMOUFLAGE[split] if camouflage else {})
        for kind, array in zip(("images", "labels", "masks"), drawn):
            np.save(folder / f"{split}_{kind}.npy", array)
    pixels = np.load(folder / "train_images.npy").reshape(-1, 3)
    squares = np.square(pixels, dtype=np.uint32).sum(0)
    return dict(classes=list(SHAPES), **_mean_std(len(pixels), pixels.sum(0), squares))


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
    """Smooth random colours around 0, float32 (n, size, size, 3): interpolated coarse noise, of
    (cells a side, strength) each."""
    out = np.zeros((n, size * size, 3), np.float32)
    for cells, strength in scales:
        at = np.linspace(0, cells - 1, size)
        weights = np.maximum(0, 1 - abs(at[:, None] - np.arange(cells)))  # (size, cells)
        weights = weights.astype(np.float32)
        grid = rng.standard_normal((n, cells * cells, 3), np.float32)
        out += strength * (np.kron(weights, weights) @ grid)
    return out.reshape(n, size, size, 3)


def draw_shapes(n, seed, size=32, contrast=None, scale=(0.32, 0.44)):
    """Images uint8 (n, size, size, 3), labels int64 (n,), masks uint8 (n, size, size) of 0 and 1.

    One whole object an image, of random place, tilt, colour and scale (about half its height, in
    heights of the image). Its colours and texture come from the background's distribution, so that
    only the outline tells the class. Every class is as frequent, in random order.

    With `contrast` (low, high) the two colours are that far apart, at most, since they are clipped,
    under a texture whose grains of two pixels are 0.23 from their colour on average."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % len(SHAPES))
    images = np.empty((n, size, size, 3), np.uint8)
    masks = np.empty((n, size, size), np.uint8)
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
