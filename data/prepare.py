"""Prepares a data set: reads Parquet or text, writes plain memory-mapped files into data/cache/NAME.

    python data/prepare.py cifar10                     downloads it from the Hugging Face Hub
    python data/prepare.py cifar10 --source DIR        reads Parquet files in DIR, laid out as on the Hub
    python data/prepare.py cifar10 --verify            recomputes the checksums of what was prepared

Image sets: shapes (drawn, nothing to download), cifar10, cifar100, flowers102, pets, imagenet. Pictures of 32 px are
stored as they are; larger ones are resized to 256 px along the shorter side (bicubic, antialiased) and the middle
256 x 256 is kept. That makes imagenet 262 GB, beside 150 GB of Parquet. For the text sets see data/text.py.
"""

import argparse
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import urllib.error
import urllib.request
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of data/ itself

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tqdm import tqdm

from data import images
from data.images import DataError

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCH = 32  # rows read and decoded at a time: 6 MB of pixels at 256 px


def prepare(name, source=None, cache=images.CACHE, overwrite=False, workers=None):
    """Writes the image set `name` to cache/name, whole or not at all. Returns False if it was there already.

    `source` is a folder of Parquet files, None the Hub; `workers` the processes that decode (default: one a core).
    Raises DataError.
    """
    with images.preparing(name, cache, overwrite) as folder:
        if folder is None:
            images.load(name, cache, allow_prepare=False)
            return False
        try:
            if name == "shapes":
                fields = _draw(folder)
            else:
                fields = _write(name, folder, *(_find(name, source) if source else _download(name, cache)), workers)
            images.write_meta(folder, name, "images", image_size=images.SETS[name].size, **fields)
        except OSError as error:
            raise DataError(f"{name}: cannot write to {folder} ({error.strerror or error})") from None
    return True


def _draw(folder, train=10_000, val=2_000):
    for split, n, seed in (("train", train, 0), ("val", val, 1)):
        for kind, array in zip(("images", "labels", "masks"), images.draw_shapes(n, seed)):
            np.save(folder / f"{split}_{kind}.npy", array)
    pixels = np.load(folder / "train_images.npy").reshape(-1, 3)
    count, total, squares = len(pixels), pixels.sum(0), np.square(pixels, dtype=np.uint32).sum(0)
    return dict(classes=list(images.SHAPES), **_mean_std(count, total, squares))


def _mean_std(count, total, squares):
    """Per channel, of pixels / 255, from exact integer sums of pixels and their squares."""
    mean = total / count
    std = np.sqrt(squares / count - mean**2)
    return dict(mean=(mean / 255).tolist(), std=(std / 255).tolist())


# ----------------------------------------------------------------------------------------------------------------------
# Where the Parquet files are: ([training files], [validation files])


def _find(name, source):
    """The files below `source` whose name or folder says train or a validation split: train.parquet,
    data/train-00000-of-00002.parquet, plain_text/test-00000-of-00001.parquet, default/validation/0000.parquet ..."""
    files = {}
    for path in sorted(Path(source).rglob("*.parquet")):
        words = [word for part in (path.stem, *reversed(path.relative_to(source).parts[:-1]))
                 for word in re.split("[^a-z]+", part.lower())]
        split = next((word for word in words if word in ("train", "test", "validation", "val")), None)
        if split:
            files.setdefault(split, []).append(path)
    return _choose(name, files, f"--source {source}")


def _choose(name, files, where):
    val = next((split for split in images.SETS[name].val if split in files), None)
    for split, wanted in (("train", ("train",)), (val, images.SETS[name].val)):
        if split not in files:
            raise DataError(f"{name}: {where} has no Parquet files of the split {' or '.join(wanted)} (such as "
                            f"{wanted[0]}.parquet or data/{wanted[0]}-00000-of-00001.parquet)")
    return files["train"], files[val]


def _download(name, cache):
    """Downloads a set's Parquet files into the Hub's own cache (HF_HOME), where an interrupted download resumes."""
    repo = images.SETS[name].repo
    # Asked first, as `datasets` retries for half a minute. Told to stay offline, it looks into the Hub's cache at once.
    if os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and not _hub_answers():
        raise DataError(f"{name} is not prepared, and the Hugging Face Hub cannot be reached; "
                        f"{images.how_to_get(name, cache)}")
    import datasets

    try:
        files = datasets.load_dataset_builder(repo).config.data_files
        files = _choose(name, {split: list(urls) for split, urls in files.items()}, repo)
        if not all(url.endswith(".parquet") for split in files for url in split):
            raise DataError(f"{name}: {repo} is no longer in Parquet; {images.how_to_get(name, cache)}")
        # Not load_dataset, which would write all pictures a second time, as Arrow.
        return datasets.DownloadManager(repo).download(files)
    except DataError:
        raise
    except Exception as error:  # `datasets` raises dozens of kinds
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{name} is not prepared, and the Hugging Face Hub did not give {repo} ({reason.rstrip('.')}); "
                        f"{images.how_to_get(name, cache)}") from None


def _hub_answers():
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# Parquet to arrays


def _write(name, folder, train, val, workers):
    """Writes images and labels of both splits; returns classes, mean and std."""
    spec = images.SETS[name]
    schema = _open(train[0]).schema_arrow
    columns = _columns(schema, train[0])
    numbers = [str(i) for i in range(spec.classes)]
    classes = _class_names(schema, columns[1]) or (CIFAR10 if name == "cifar10" else numbers)
    if len(classes) != spec.classes:
        raise DataError(f"{name} has {spec.classes} classes, these files name {len(classes)}: they are another set")
    jobs = {split: list(_jobs(files, columns)) for split, files in (("train", train), ("val", val))}
    counts = {split: sum(n for *_, n in jobs[split]) for split in jobs}
    needed, free = sum(counts.values()) * spec.size**2 * 3, shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(f"{name}: needs {needed / 1e9:.1f} GB, {folder.parent} has {free / 1e9:.1f} GB; choose another "
                        "folder with --cache DIR")
    for split, n in counts.items():
        if n == 0:
            raise DataError(f"{name}: the {split} Parquet files have no rows")
        path = folder / f"{split}_images.npy"
        np.lib.format.open_memmap(path, "w+", np.uint8, (n, spec.size, spec.size, 3))
        tasks, start = [], 0
        for file, group, first, rows in jobs[split]:
            tasks.append((file, group, first, columns, len(classes), path, start, spec.size))
            start += rows
        labels, total, squares = np.empty(n, np.int64), 0, 0
        with tqdm(total=n, unit="img", desc=f"{name} {split}", disable=None) as progress:
            for start, part, part_total, part_squares in _run(tasks, workers or os.cpu_count(), small=spec.size < 256):
                labels[start : start + len(part)] = part
                total, squares = total + part_total, squares + part_squares
                progress.update(len(part))
        np.save(folder / f"{split}_labels.npy", labels)
        if split == "train":
            statistics = _mean_std(n * spec.size**2, total, squares)
    return dict(classes=classes, **statistics)


def _open(path):
    try:
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20)  # else it keeps a second copy of a row group
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path} as Parquet ({str(error).splitlines()[0]})") from None


def _columns(schema, path):
    """The names of the image and the label column."""
    pictures = [f.name for f in schema if pa.types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0]
    integers = [f.name for f in schema if pa.types.is_integer(f.type)]
    labels = [name for name in integers if name in ("label", "labels", "fine_label")] or integers
    for kind, names in (("image (a struct with bytes)", pictures), ("label (label, labels or fine_label)", labels)):
        if len(names) != 1:
            raise DataError(f"{path}: cannot tell which column is the {kind}: {', '.join(names) or 'none'} of "
                            f"{', '.join(schema.names)}")
    return pictures[0], labels[0]


def _class_names(schema, label):
    """The names that the Hub stores beside the schema, or None."""
    try:
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (TypeError, KeyError, ValueError):
        return None
    return [str(name) for name in names] or None


def _jobs(files, columns):
    """(file, row group, its first row in the file, its number of rows) for all row groups in order."""
    for path in files:
        file, first = _open(path), 0
        missing = set(columns) - set(file.schema_arrow.names)
        if missing:
            raise DataError(f"{path}: has no column {', '.join(sorted(missing))}, unlike the first training file")
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            yield str(path), group, first, rows
            first += rows


def _run(tasks, workers, small):
    """Results of `_decode_rows` over `tasks`, in any order, each (start, labels, sum of pixels, sum of squares).

    Small pictures are decoded here: 60,000 take less time than it takes to start processes and import torch in them.
    """
    if small or workers < 2 or len(tasks) < 2:
        for task in tasks:
            yield from _decode_rows(*task)
        return
    # spawn: whoever prepares on first use may already hold CUDA and threads, which do not survive a fork
    pool = ProcessPoolExecutor(min(workers, len(tasks)), multiprocessing.get_context("spawn"),
                               initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        for future in as_completed([pool.submit(_decode_list, task) for task in tasks]):
            yield from future.result()
    except BrokenProcessPool:
        raise DataError("a decoding process was killed (out of memory?); try fewer with --workers=N") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_list(task):
    return list(_decode_rows(*task))


def _decode_rows(file, group, first, columns, classes, out, start, size):
    """Decodes one row group into rows `start`... of the array in file `out`."""
    pictures = np.lib.format.open_memmap(out, "r+")
    batches = _open(file).iter_batches(BATCH, row_groups=[group], columns=list(columns))
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} row {first} or later: damaged ({str(error).splitlines()[0]})") from None
        if batch is None:
            return
        labels = batch.column(columns[1]).to_pylist()
        for row, (label, cell) in enumerate(zip(labels, batch.column(columns[0]).to_pylist()), first):
            if label is None or not 0 <= label < classes:
                raise DataError(f"{file} row {row}: label {label}, allowed are 0 to {classes - 1}")
            pictures[start + row - first] = _decode(cell, size, f"{file} row {row}")
        done = pictures[start : start + len(labels)]
        yield (start, np.array(labels, np.int64), done.sum((0, 1, 2), np.uint64),
               np.square(done, dtype=np.uint32).sum((0, 1, 2), np.uint64))
        first, start = first + len(labels), start + len(labels)


def _decode(cell, size, where):
    """An image cell {"bytes", "path"} as an RGB picture of size x size."""
    if not cell or not cell["bytes"]:
        raise DataError(f"{where}: has no picture in it; only pictures stored as bytes can be read")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's, of damaged EXIF data in a few of ImageNet's pictures
            picture = Image.open(io.BytesIO(cell["bytes"])).convert("RGB")
    except Exception as error:  # a damaged file can make a decoder raise anything
        raise DataError(f"{where}: damaged picture ({str(error).splitlines()[0] if str(error) else error!r})") from None
    if picture.size != (size, size) and size < 256:
        raise DataError(f"{where}: the picture is {picture.width} x {picture.height}, expected {size} x {size}")
    return np.asarray(resize_crop(picture, size))


def resize_crop(picture, size=256):
    """Pillow picture with its shorter side resized to `size` (bicubic, antialiased), then its middle size x size."""
    width, height = (max(size, round(side * size / min(picture.size))) for side in picture.size)
    left, top = (width - size) // 2, (height - size) // 2
    return picture.resize((width, height), Image.BICUBIC).crop((left, top, left + size, top + size))


# ----------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    """The command; returns the exit status: 0, 2 after an error of the user's, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="prepare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (--help lists the options)\n")
    parser.add_argument("name", metavar="NAME", help="which data set")
    parser.add_argument("--source", metavar="DIR", help="folder with its files, instead of the Hub")
    parser.add_argument("--cache", metavar="DIR", default=images.CACHE, type=Path,
                        help="where prepared sets go (%(default)s)")
    parser.add_argument("--verify", action="store_true", help="only recompute the checksums of what was prepared")
    parser.add_argument("--overwrite", action="store_true", help="prepare again what is there already")
    parser.add_argument("--tokenizer", help="gpt2 or char, for text (default: the set's usual one)")
    parser.add_argument("--workers", type=int, help="processes or threads to use (default: one a core)")
    args = parser.parse_args(argv)
    try:
        return _command(args)
    except DataError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"prepare.py: interrupted; {args.name} was not prepared", file=sys.stderr)
        return 130


def _command(args):
    name, folder = args.name, args.cache / args.name
    if args.source and not Path(args.source).exists():
        raise DataError(f"--source {args.source}: there is no such folder")
    from data import text  # which nothing but this command needs

    if args.verify:
        if not folder.exists():
            raise DataError(f"{name} is not prepared ({folder} is missing)")
        meta = images.verify(name, args.cache)
        size = sum(entry["bytes"] for entry in meta["files"].values())
        print(f"{name}: {len(meta['files'])} files, {size:,} bytes, all as prepared")
    elif name in images.SETS:
        if not prepare(name, args.source, args.cache, args.overwrite, args.workers):
            print(f"{name} is already prepared in {folder} (--overwrite to do it again)")
        else:
            data = images.load(name, args.cache, allow_prepare=False)
            print(f"{name}: {len(data.train_labels):,} + {len(data.val_labels):,} pictures of {data.image_size} px, "
                  f"{len(data.classes)} classes, in {folder}")
    elif name in text.NAMES or (args.source and args.tokenizer):
        text.prepare(name, args.source, args.cache, args.tokenizer, args.workers, args.overwrite)
    else:
        raise DataError(images.unknown("data set", name, [*images.SETS, *text.NAMES]))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it cleans up, as after Ctrl-C
    sys.exit(main())
