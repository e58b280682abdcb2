"""Prepares a data set: reads it with `datasets`, writes plain memory-mapped files to data/cache.

    python data/prepare.py cifar10                  from the Hugging Face Hub
    python data/prepare.py cifar10 --source DIR     from the same files in DIR, without a network
    python data/prepare.py mine --source DIR --size=64          your pictures, DIR/CLASS/FILE
    python data/prepare.py mine --source DIR --tokenizer=gpt2   your text (char: by characters), in
                                Parquet or .jsonl files (rows with `text`) or .txt (a document each)

DIR/train beside DIR/val or DIR/test, or texts named so, are kept as your split; pictures without a
val are validated on test. Otherwise a tenth of the pictures is held out, or a hundredth of the
documents, or the last tenth of a single one. The set is data/cache/NAME: meta.json and

    {train,val}_images.npy, _labels.npy     uint8 (N, S, S, 3), int64 (N,)
    {train,val}_masks.npy                   uint8 (N, S, S), 1 on the object (drawn sets only)
    {train,val,test}.bin                    uint16 tokens

GPT-2's end-of-text token follows each document. Disk, about: imagenet 262 GB, streamed from the Hub
or DIR; openwebtext 54 GB in the cache of `datasets` (HF_HOME) and 18 GB written."""
import contextlib
import fcntl
import io
import itertools
import json
import os
import shutil
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])      # in place of data/ itself

import numpy as np
from tqdm import tqdm

from data import folders, shapes
from data.files import documents, read_picture
from data.tokenizer import CharTokenizer, make_tokenizer
from flags import CACHE, cli, not_one_of, option, parse, UserError


# ---- The sets, one row each. `hub` is what load_dataset takes -----------------------------------
class DrawnSet(NamedTuple):
    options: dict                   # split -> options of draw_shapes
    counts: tuple = (10_000, 2_000)     # of pictures: train, val
    hub, large = None, False


class ImageSet(NamedTuple):
    size: int                       # pixels per side, as stored
    hub: dict | None = None         # None: the user's own
    val: str = "test"               # the split that validates
    large: bool = False             # not prepared unasked
    by_class: bool = False          # the rows lie so: they are stored in an order that is drawn


class TextSet(NamedTuple):
    hub: dict | None = None
    tokenizer: object = "gpt2"      # or "char", of the training text, or a tokenizer
    one_text: bool = False          # all rows are one text
    held_out: float = 0.01          # of the rows, where none are for validation
    large: bool = False
    rows: object = None             # a function that makes them, where nothing is read


def pydoc():
    """{split: rows}: one document, the English text of Python's own help topics."""
    from pydoc_data.topics import topics

    return dict(train=dict(text=["\n".join(topics[name] for name in sorted(topics))]))


IMAGES = {
    "shapes": DrawnSet({}), "camouflage": DrawnSet(shapes.CAMOUFLAGE),
    "cifar10": ImageSet(32, dict(path="uoft-cs/cifar10")),
    "cifar100": ImageSet(32, dict(path="uoft-cs/cifar100")),
    "flowers102": ImageSet(256, dict(path="dpdl-benchmark/oxford_flowers102"), by_class=True),
    "pets": ImageSet(256, dict(path="timm/oxford-iiit-pet"), by_class=True),
    # the labels of its test split are not public; its terms ask for `hf auth login`
    "imagenet": ImageSet(256, dict(path="ILSVRC/imagenet-1k"), "validation", large=True),
}
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))    # of pydoc, whatever the Python version
CONVERTED = "refs/convert/parquet"      # the Hub's own conversion of what has only a script
SHAKESPEARE = dict(path="karpathy/tiny_shakespeare", revision=CONVERTED)
TEXTS = {
    # the share is nanoGPT's, so that losses compare
    "openwebtext": TextSet(dict(path="Skylion007/openwebtext", num_proc=os.cpu_count()),
                           held_out=0.0005, large=True),
    "shakespeare": TextSet(SHAKESPEARE, one_text=True),
    "shakespeare_char": TextSet(SHAKESPEARE, tokenizer="char", one_text=True),
    "pydoc": TextSet(tokenizer=CharTokenizer(PRINTABLE), one_text=True, rows=pydoc),
}
SETS = {**IMAGES, **TEXTS}
SEED = 2357         # of every order and part that is drawn


# ---- Reading: {split: rows} by `datasets` -------------------------------------------------------
def read_pictures(row, source, draft):
    """The pictures of a set on the Hub, of its files in a folder, or of a user's own folder."""
    from datasets import ClassLabel, Dataset, load_dataset

    if source is None:
        return load_dataset(**row.hub, streaming=not row.by_class)
    if row.hub:
        folders.refuse_missing_shards(folders.files_in(source))
        return load_dataset("parquet", data_dir=str(source), cache_dir=str(draft / "scratch"),
                            streaming=not row.by_class)
    parts = folders.pictures(source)
    label = ClassLabel(names=sorted({name for part in parts.values() for name in part.values()}))
    sets = {}
    for split, part in parts.items():
        files = [dict(path=os.fsencode(path), bytes=None) for path in part]
        rows = Dataset.from_dict(dict(image=files, label=[*part.values()]))
        sets[split] = rows.cast_column("label", label)
    return hold_out(sets, 0.1)


def read_texts(row, source, draft):
    """The texts of a set on the Hub, or of the files in a folder: the Hub's or a user's own."""
    from datasets import Dataset, Features, load_dataset, Value

    if row.rows:
        return row.rows()
    if source is None:
        return load_dataset(**row.hub)
    return {split: Dataset.from_generator(      # 64 at once: they may be books
                partial(documents, files), Features(text=Value("large_string")),
                cache_dir=str(draft / "scratch"), writer_batch_size=64)
            for split, files in folders.texts(source).items()}


def hold_out(sets, share):
    """This share of the rows for training validates, if no others do."""
    if {"val", "validation"}.intersection(sets) or len(sets.get("train", [])) < 2:
        return sets
    halves = sets["train"].train_test_split(share, seed=SEED)
    return {**sets, "train": halves["train"], "val": halves["test"]}


# ---- Images: decoded by threads, in order -------------------------------------------------------
def write_pictures(path, row, rows, label):
    """Writes those that can be read; returns their labels, and what is wrong with the others."""
    from datasets import Image as ImageColumn

    def read(cell):
        return read_picture(io.BytesIO(cell["bytes"]) if cell["bytes"] else cell["path"], row.size)

    column = "img" if "img" in rows.features else "image"
    if row.by_class:
        rows = rows.shuffle(seed=SEED)
    if row.hub:         # the cells of a user's own are files already
        rows = rows.cast_column(column, ImageColumn(decode=False))
    labels, problems = [], []
    with open(path, "wb") as out, ThreadPoolExecutor() as threads:
        out.seek(128)               # the header comes last: not every picture can be read
        for batch in tqdm(rows.iter(512), f"{path.name}, 512", disable=None):
            decoded = threads.map(read, batch[column])
            for cell, number, (pixels, problem) in zip(batch[column], batch[label], decoded):
                if problem:
                    problems.append(f"{folders.shown(cell['path'] or '')} ({problem})")
                else:
                    out.write(pixels.tobytes())
                    labels.append(number)
        out.seek(0)
        np.lib.format.write_array_header_1_0(out, dict(
            descr="|u1", fortran_order=False, shape=(len(labels), row.size, row.size, 3)))
    return labels, problems


def write_images(row, source, draft):
    """Writes the pictures and labels of both splits; returns what meta.json says of them."""
    sets = read_pictures(row, source, draft)
    features = sets["train"].features
    label = next(key for key in ("label", "labels", "fine_label") if key in features)
    classes = getattr(features[label], "names", None)
    used = []
    for split, part in dict(train="train", val="val" if "val" in sets else row.val).items():
        labels, problems = write_pictures(draft / f"{split}_images.npy", row, sets[part], label)
        np.save(draft / f"{split}_labels.npy", np.array(labels, np.int64))
        classes = classes or [str(i) for i in range(max(labels, default=0) + 1)]
        if len(classes) < 2 or not labels:
            raise UserError(f"fewer than two classes of {part} can be read {problems[:3] or ''}")
        if problems:
            print(f"{len(problems)} pictures left out: {problems[:3]}", file=sys.stderr)
        used.append(set(labels))
    lone = used[0] ^ used[1]
    if lone:
        print(f"note: {len(lone)} classes have pictures to train on or to validate on, not both, "
              f"such as {classes[min(lone)]}", file=sys.stderr)
    return image_meta(classes, draft)


def write_shapes(row, source, draft):
    """Draws the pictures; returns what meta.json says of them."""
    for seed, (split, n) in enumerate(zip(("train", "val"), row.counts)):
        arrays = shapes.draw_shapes(n, seed, **row.options.get(split, {}))
        for kind, array in zip(("images", "labels", "masks"), arrays):
            np.save(draft / f"{split}_{kind}.npy", array)
    return image_meta(list(shapes.SHAPES), draft)


def image_meta(classes, draft):
    """Mean and deviation are per channel, of train_images / 255, from exact integer sums."""
    pixels, sums = np.load(draft / "train_images.npy", "r"), np.zeros((2, 3), np.uint64)
    labels = [np.load(draft / f"{split}_labels.npy") for split in ("train", "val")]
    checksum = zlib.crc32(np.concatenate(labels))
    for start in range(0, len(pixels), 1000):
        part = pixels[start:start + 1000].reshape(-1, 3)
        checksum = zlib.crc32(part, checksum)
        sums += [part.sum(0, np.uint64), np.square(part, dtype=np.uint32).sum(0, np.uint64)]
    mean, mean_square = sums / pixels[..., 0].size
    std = np.sqrt(np.maximum(mean_square - mean ** 2, 1))       # 1: a channel may be constant
    return dict(kind="images", classes=classes, image_size=pixels.shape[1], checksum=checksum,
                images=dict(train=len(labels[0]), val=len(labels[1])),
                mean=(mean / 255).tolist(), std=(std / 255).tolist())


# ---- Text: encoded by tiktoken's threads, in order ----------------------------------------------
def split_texts(row, source, draft):
    """{split: documents}, and whether train and val are one text: the last tenth of a single
    document validates, where there is no other."""
    sets = read_texts(row, source, draft)
    if not row.one_text:
        sets = hold_out(sets, row.held_out)
    parts = {folders.SPLITS[split]: rows["text"] for split, rows in sets.items()}
    if row.one_text:
        parts = dict(train=["".join(itertools.chain(*parts.values()))])
    if "train" not in parts or "val" in parts:
        return parts, False
    [whole] = parts["train"]
    end = int(0.9 * len(whole))
    return {**parts, "train": [whole[:end]], "val": [whole[end:]]}, True


def write_text(row, source, draft):
    """Writes the tokens of all splits; returns what meta.json says of them."""
    parts, one_text = split_texts(row, source, draft)
    tokenizer = make_tokenizer(row.tokenizer, parts.get("train", []))
    end = [] if one_text or tokenizer.eot is None else [tokenizer.eot]
    tokens, checksum = {}, 0
    for split, texts in parts.items():
        with open(draft / f"{split}.bin", "wb") as out:
            # 64 at once: they may be books, and memory holds their tokens
            for start in tqdm(range(0, len(texts), 64), split, disable=None):
                for ids in tokenizer.encode_batch(texts[start:start + 64]):
                    ids = np.concatenate([ids, end], dtype=np.uint16, casting="unsafe")
                    checksum = zlib.crc32(ids, checksum)
                    out.write(ids)
            tokens[split] = out.tell() // 2
        if tokens[split] < 2:
            raise UserError(f"its part {split} has {tokens[split]} tokens: the text is too short")
    return dict(kind="text", tokenizer=tokenizer.meta(), tokens=tokens, checksum=checksum)


# ---- Preparing and opening ----------------------------------------------------------------------
WRITERS = {DrawnSet: write_shapes, ImageSet: write_images, TextSet: write_text}


def how_to(name, cache):
    """How to get a set of the Hub, for messages; None for any other."""
    hub = SETS[name].hub if name in SETS else None
    return hub and (f"python data/prepare.py {name} --data_dir={cache} with a network, or --source "
                    f"DIR with the files of huggingface.co/datasets/{hub['path']}")


@contextlib.contextmanager
def one_line(name, advice):
    """What goes wrong inside is one line for the user, whatever a reader or the Hub raises."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error        # behind "an error while generating the dataset"
        if isinstance(cause, UserError):
            raise UserError(f"{name}: {cause}") from None
        reason = f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        raise UserError(f"{name}: {reason}{f'; {advice}' if advice else ''}") from error


def prepare(name, source=None, cache=CACHE, tokenizer=None, size=32, drawn=None):
    """Writes cache/NAME, if it is not there. A set of the user's own is text if it has a tokenizer
    ("gpt2", "char" or an object); `drawn` are other numbers of pictures of a drawn set."""
    own = TextSet(tokenizer=tokenizer) if tokenizer else ImageSet(size, by_class=True)
    row = SETS.get(name, own)
    row = row._replace(counts=drawn) if drawn else row
    folder, draft = Path(cache) / name, Path(cache) / f".{name}.draft"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_line(name, how_to(name, cache)), open(draft.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                # another process waits, and finds the set
        if folder.exists():
            return
        print(f"{name}: preparing it, once ...", file=sys.stderr, flush=True)
        shutil.rmtree(draft, ignore_errors=True)        # left by a run that was killed
        draft.mkdir()
        try:
            source = Path(source).resolve() if source else None
            meta = WRITERS[type(row)](row, source, draft)
            (draft / "meta.json").write_text(json.dumps(dict(name=name, **meta), indent=1))
            shutil.rmtree(draft / "scratch", ignore_errors=True)        # of `datasets`
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    print(f"{name} is ready in {folder}: {meta.get('images') or meta['tokens']}", file=sys.stderr)


@contextlib.contextmanager
def opened(name, kind, cache):
    """The folder and the meta.json of a prepared set; a small one that is missing is prepared."""
    folder, sets = Path(cache) / name, dict(images=IMAGES, text=TEXTS)[kind]
    own = {path.parent.name for path in Path(cache).glob("[!.]*/meta.json")}
    if name not in own.union(sets):
        raise UserError(f"--data={not_one_of(name, sorted(own.union(sets)))}; "
                        "python data/prepare.py NAME --source DIR makes your own")
    if not folder.exists():
        if sets[name].large:
            raise UserError(f"{name} is not prepared: {how_to(name, cache)}; --help lists presets")
        prepare(name, cache=cache)
    with one_line(name, f"delete {folder} and prepare it again"):
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["kind"] != kind:
            raise UserError(f"this is a set of {meta['kind']}, not of {kind}")
        yield folder, meta


@dataclass(kw_only=True)
class Flags:
    name: tuple = option((), f"{', '.join(SETS)}, or your own")
    source: str | None = option(None, "where the files are; auto is the Hub")
    data_dir: str = option(str(CACHE), "where sets go")
    tokenizer: str | None = option(None, "of your own text", choices=("gpt2", "char"))
    size: int | None = option(None, "of your own pictures, pixels; auto is 32", low=1, high=512)


def main(argv):
    c = parse(Flags, {}, argv, __doc__)[0]
    name = " ".join(c.name)
    row = SETS.get(name)
    if not row and not c.source:
        raise UserError(f"{not_one_of(name or 'NAME', SETS)} (your own needs --source)")
    if row and any([c.tokenizer, c.size, c.source and not row.hub]):
        raise UserError(f"{name} is ours and takes no such flag: give your own set another name")
    if Path(name).name != name or name in ("", ".."):
        raise UserError(f"{name or 'NAME'} is no name of a set; its files are in --source=DIR")
    if Path(c.data_dir, name).exists():
        raise UserError(f"{c.data_dir}/{name} is there already: delete it to prepare it again")
    prepare(name, c.source, c.data_dir, c.tokenizer, c.size or 32)


if __name__ == "__main__":
    cli(main)
