"""Prepares a data set: reads it with `datasets`, writes plain memory-mapped files to data/cache.

    python data/prepare.py cifar10                  from the Hugging Face Hub
    python data/prepare.py cifar10 --source DIR     from the same files in DIR, without a network
    python data/prepare.py mine --source DIR --size=64          your pictures, DIR/CLASS/FILE
    python data/prepare.py mine --source DIR --tokenizer=gpt2   your text (char: by characters), in
                                Parquet or .jsonl files (rows with `text`) or .txt (a document each)

DIR/train beside DIR/val or DIR/test, or texts named so, are kept as your split; pictures without a
val are validated on test. Otherwise a tenth of the pictures is held out, or a hundredth of the
documents, or the last tenth of a single one. GPT-2's end-of-text token follows each document.
imagenet takes 262 GB of disk, openwebtext 18 GB, and 54 in the cache of `datasets` (HF_HOME)."""
import contextlib
import fcntl
import io
import json
import math
import os
import re
import shutil
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])      # in place of data/ itself

import numpy as np
from tqdm import tqdm

from data import folders, shapes
from data.tokenizer import CharTokenizer, GPT2Tokenizer
from flags import CACHE, not_one_of, option, parse, UserError
from processes import cli, note, one_line

SEED = 2357         # of every order and part that is drawn


# ---- Kinds of sets ------------------------------------------------------------------------------
@dataclass(kw_only=True)
class Set:
    """A kind has write(source, draft), which fills `draft` and returns what meta.json says."""
    hub: str | None = None      # its name on the Hub; None: drawn, or a person's own
    disk: str = ""              # the room of a set that is too large to be made unasked


@dataclass
class DrawnSet(Set):
    """Pictures of shapes.py, with the exact mask of each object."""
    counts: tuple = (10_000, 2_000)     # of pictures: train, val
    size: int = 32                      # pixels per side

    def write(self, source, draft):
        for seed, (split, n) in enumerate(zip(("train", "val"), self.counts)):
            arrays = shapes.draw_shapes(n, seed, self.size)
            for kind, array in zip(("images", "labels", "masks"), arrays):
                array.tofile(draft / f"{split}_{kind}.bin")
        return image_meta(list(shapes.SHAPES), self.size, draft)


@dataclass
class ImageSet(Set):
    """Square pictures by class, of the Hub or of a person's own folder."""
    size: int                       # pixels per side, as stored
    val: str = "val"                # the split that validates
    image: str = "image"            # the column of the pictures
    label: str = "label"            # the column of their classes
    streamed: bool = False          # read as it comes, and keeps its order; else one is drawn

    def read(self, source, draft):
        """{split: rows}, of the Hub, of its files in a folder, or of a person's own folder."""
        from datasets import ClassLabel, Dataset, Image, load_dataset

        if self.hub:
            sets = load_dataset(str(source or self.hub),
                                cache_dir=str(draft / "scratch"), streaming=self.streamed)
            return sets.cast_column(self.image, Image(decode=False))
        sets, parts = {}, folders.pictures(source)
        classes = ClassLabel(names=sorted(set().union(*(part.values() for part in parts.values()))))
        for split, part in parts.items():
            rows = [dict(image=dict(path=os.fsencode(path), bytes=None), label=name)
                    for path, name in part.items()]
            sets[split] = Dataset.from_list(rows).cast_column("label", classes)
        return with_val(sets, 0.1)

    def write_split(self, split, rows, draft):
        """Writes the pictures that can be read, and their labels."""
        labels, problems = [], []
        with open(draft / f"{split}_images.bin", "wb") as out, ThreadPoolExecutor() as threads:
            for batch in tqdm(rows.iter(512), f"{split}, 512", disable=None):
                cells = batch[self.image]
                files = [io.BytesIO(cell["bytes"]) if cell["bytes"] else cell["path"]
                         for cell in cells]
                decoded = threads.map(lambda file: folders.read_picture(file, self.size), files)
                for cell, label, (pixels, problem) in zip(cells, batch[self.label], decoded):
                    if problem:
                        problems.append(f"{folders.shown(cell['path'] or '')} ({problem})")
                    else:
                        out.write(pixels)
                        labels.append(label)
        np.array(labels, np.int64).tofile(draft / f"{split}_labels.bin")
        folders.tell_left_out("pictures", problems)
        if not labels:
            raise UserError(f"no picture of its {split} can be read: {problems[:1]}")

    def write(self, source, draft):
        sets = self.read(source, draft)
        for split, name in (("train", "train"), ("val", self.val)):
            if name not in sets:
                raise UserError(f"there is no part `{name}`, only {', '.join(sets)}")
            rows = sets[name] if self.streamed else sets[name].shuffle(seed=SEED)
            self.write_split(split, rows, draft)
        classes = getattr(sets["train"].features[self.label], "names", None)
        return image_meta(classes, self.size, draft)


@dataclass
class TextSet(Set):
    """Texts, stored as the tokens of each split."""
    tokenizer: str = "gpt2"         # or "char"
    revision: str | None = None
    one_text: bool = False          # the rows are parts of one text
    held_out: float = 0.01          # of the rows, where none are for validation
    make: Callable | None = None    # returns the one text, where nothing is read
    characters: str | None = None   # of "char", in place of those of the training text

    def read(self, source, draft):
        """{split: texts}, of the Hub or of a person's own folder. A single one has no val."""
        if self.make:
            return dict(train=[self.make()])
        from datasets import Dataset, Features, load_dataset, Value

        if source is None:
            sets = load_dataset(self.hub, revision=self.revision,
                                num_proc=os.cpu_count())
        else:
            strings = Features(text=Value("large_string"))
            sets = {split: Dataset.from_generator(      # a list of paths would be a call for each
                        folders.documents, strings, str(draft / "scratch"),
                        gen_kwargs=dict(paths=tuple(files)), writer_batch_size=64)  # may be books
                    for split, files in folders.texts(source).items()}
        if self.one_text:
            return dict(train=["".join(text for rows in sets.values() for text in rows["text"])])
        return {split: rows["text"] for split, rows in with_val(sets, self.held_out).items()}

    def tokenizer_for(self, texts):
        """The tokenizer; that of characters has those of the training text, or its row's."""
        if self.tokenizer == "gpt2":
            return GPT2Tokenizer()
        if not self.characters and "train" not in texts:
            raise UserError("--tokenizer=char takes the characters of a part `train`")
        return CharTokenizer("".join(self.characters or sorted(set().union(*texts["train"]))))

    def write(self, source, draft):
        """Writes the tokens of each split; of a single text the last tenth validates."""
        texts = self.read(source, draft)
        single = "train" in texts and "val" not in texts
        if single:
            text = texts["train"][0]
            length = int(0.9 * len(text))
            texts |= dict(train=[text[:length]], val=[text[length:]])
        tokenizer = self.tokenizer_for(texts)
        end = np.array([] if single or tokenizer.eot is None else [tokenizer.eot], np.uint16)
        tokens, checksum = {}, 0
        for split, part in texts.items():
            with open(draft / f"{split}.bin", "wb") as out, ThreadPoolExecutor() as threads:
                for start in tqdm(range(0, len(part), 64), split, disable=None):
                    for ids in threads.map(tokenizer.encode, part[start:start + 64]):
                        ids = np.concatenate([ids, end])
                        checksum = zlib.crc32(ids, checksum)
                        out.write(ids)
                tokens[split] = out.tell() // 2
            if tokens[split] < 2:
                raise UserError(f"its {split} has {tokens[split]} tokens: the text is too short")
        return dict(kind="text", tokenizer=tokenizer.meta(), tokens=tokens, checksum=checksum)


def with_val(sets, share):
    """The sets, named train, val and test. Of two rows for training or more, this share validates
    if no others do."""
    sets = {folders.split_of(name) or name: rows for name, rows in sets.items()}
    if "val" in sets or len(sets.get("train", [])) < 2:
        return sets
    halves = sets["train"].train_test_split(share, seed=SEED)
    return sets | dict(train=halves["train"], val=halves["test"])


def image_meta(classes, size, draft):
    """Mean and deviation are per channel, of train_images / 255, from exact integer sums. Without
    names, the classes are numbers."""
    train, val = (np.fromfile(draft / f"{split}_labels.bin", int) for split in ("train", "val"))
    labels, lone = np.concatenate([train, val]), np.setxor1d(train, val)
    classes = classes or [str(i) for i in range(labels.max() + 1)]
    if len(lone):
        note(f"{len(lone)} of the classes have no pictures to train on, or none to validate on, "
             f"such as {classes[lone[0]]}")
    pictures = mapped(draft / "train_images.bin", np.uint8, (len(train), size, size, 3))
    if len(val) < 100:
        note(f"only {len(val)} pictures validate: an accuracy of theirs is rough")
    checksum = zlib.crc32(labels)
    sums = np.zeros((2, 3), np.int64)
    for picture in pictures:
        checksum = zlib.crc32(picture, checksum)
        pixels = picture.reshape(-1, 3).astype(np.int64)
        sums += [pixels.sum(0), (pixels ** 2).sum(0)]
    mean, mean_square = sums / pictures[..., 0].size
    std = np.sqrt(np.maximum(mean_square - mean ** 2, 1))       # 1: a channel may be constant
    return dict(kind="images", classes=classes, image_size=size, checksum=checksum,
                images=dict(train=len(train), val=len(val)),
                mean=(mean / 255).tolist(), std=(std / 255).tolist())


# ---- The sets, one row each ---------------------------------------------------------------------
def pydoc():
    """The English text of Python's own help topics."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


IMAGES = {
    "shapes": DrawnSet(),
    "cifar10": ImageSet(32, hub="uoft-cs/cifar10", val="test", image="img", streamed=True),
    "pets": ImageSet(256, hub="timm/oxford-iiit-pet", val="test"),
    # the labels of its test split are not public; its terms ask for `hf auth login`
    "imagenet": ImageSet(256, hub="ILSVRC/imagenet-1k", val="validation", streamed=True,
                         disk="262 GB"),
}
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))    # of pydoc, whatever the Python version
TEXTS = {
    # the share is nanoGPT's, so that losses compare
    "openwebtext": TextSet("gpt2", hub="Skylion007/openwebtext", held_out=0.0005, disk="18 GB"),
    # its own files are a script, which the Hub has converted
    "shakespeare_char": TextSet("char", hub="karpathy/tiny_shakespeare",
                                revision="refs/convert/parquet", one_text=True),
    "pydoc": TextSet("char", make=pydoc, characters=PRINTABLE),
}
SETS = {**IMAGES, **TEXTS}


# ---- Preparing and opening ----------------------------------------------------------------------
def prepare(name, row, source=None, cache=CACHE):
    """Writes cache/NAME as its row says, if it is not there."""
    folder, draft = Path(cache) / name, Path(cache) / f".{name}.draft"
    folder.parent.mkdir(parents=True, exist_ok=True)
    advice = "" if row.hub is None else (
        f"; it comes by network, or python data/prepare.py {name} --data_dir={cache} --source DIR "
        f"with the files of huggingface.co/datasets/{row.hub}")
    with one_line(name, advice), open(draft.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                # another process waits, and finds the set
        if folder.exists():
            return
        print(f"{name}: preparing it, once ...", file=sys.stderr, flush=True)
        shutil.rmtree(draft, ignore_errors=True)        # left by a run that was killed
        draft.mkdir()
        try:
            meta = row.write(source and Path(source).resolve(), draft)
            (draft / "meta.json").write_text(json.dumps(dict(name=name, **meta), indent=1))
            shutil.rmtree(draft / "scratch", ignore_errors=True)        # of `datasets`
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    what = ", ".join([str(meta.get("images") or meta["tokens"]), *meta.get("classes", [])[:12]])
    print(f"{name} is ready in {folder}: {what}", file=sys.stderr)


def mapped(path, dtype, shape):
    """A file as a read-only array. Raises ValueError if it has another size."""
    numbers = np.memmap(path, dtype, "r")
    if numbers.size != math.prod(shape):
        raise ValueError(f"{path.name} has {numbers.size} numbers, not {shape}")
    return numbers.reshape(shape)


def how_to_get(name, sets, cache):
    """What to do about a set that is not prepared, and that is not made unasked."""
    if name in sets:
        return f"--data={name}: data/prepare.py {name} makes it, {sets[name].disk}"
    own = {path.parent.name for path in Path(cache).glob("[!.]*/meta.json")} - SETS.keys()
    names = sorted(own | {small for small, row in sets.items() if not row.disk})
    return (f"--data={not_one_of(name, names)}; your own: python data/prepare.py NAME --source "
            "DIR, for texts with --tokenizer=char")


@contextlib.contextmanager
def opened(name, kind, cache):
    """The folder and the meta.json of a prepared set; a small one that is missing is prepared."""
    folder, sets = Path(cache) / name, IMAGES if kind == "images" else TEXTS
    if folder.name != name or not folder.exists():          # "../set" is no name
        if name not in sets or sets[name].disk:
            raise UserError(how_to_get(name, sets, cache))
        prepare(name, sets[name], cache=cache)
    again = f"; delete {folder} and prepare it again"
    with one_line(name, again):
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["kind"] != kind:
            raise UserError(f"this is a set of {meta['kind']}, not of {kind}")
        yield folder, meta


@dataclass(kw_only=True)
class Flags:
    data_dir: str = option(str(CACHE), "where prepared data lies")
    source: str | None = option(None, "where the files are; auto is the Hub")
    tokenizer: str | None = option(None, "of your own text", choices=("gpt2", "char"))
    size: int | None = option(None, "of your own pictures, pixels; auto is 32", low=1, high=512)


def main(argv):
    """Prepares the set NAME, the first word. Raises UserError for one that is there already."""
    name, *flags = argv if argv and not argv[0].startswith("-") else ["", *argv]
    c = parse(Flags, flags, __doc__, usage=" NAME",
              epilog=f"NAME: your own, or one of {', '.join(SETS)}")
    row = SETS.get(name)
    if row and any([c.tokenizer, c.size, c.source and not row.hub]):
        raise UserError(f"{name} is ours and takes no such flag: give your own set another name")
    if not row and not (c.source and re.fullmatch(r"\w[^/]*", name)):
        raise UserError(f"{not_one_of(name or 'NAME', SETS)}; your own has a plain name, without "
                        "/, and its files are in --source=DIR")
    if Path(c.data_dir, name).exists():
        raise UserError(f"{c.data_dir}/{name} is there already: delete it to prepare it again")
    if not row:
        row = TextSet(c.tokenizer) if c.tokenizer else ImageSet(c.size or 32)
    prepare(name, row, c.source, c.data_dir)


if __name__ == "__main__":
    cli(main)
