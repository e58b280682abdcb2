"""A person's own folder: its files, what their names say of split and class, what they hold.

    pictures    [SPLIT/]CLASS/.../FILE
    texts       SPLIT/.../FILE, [NAME.]SPLIT.EXT, SPLIT-00000-of-00002.EXT

SPLIT may lie in other folders; split_of() says how it is named. There are splits if every file has
one, or if some are for training and some are not: then a file that has none is left out."""
import contextlib
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from flags import UserError
from processes import note


# ---- Messages -----------------------------------------------------------------------------------
def shown(path):
    """A path, whatever bytes it has, as one line for a message."""
    return " ".join(os.fsencode(path).decode(errors="replace").split())


def tell_left_out(what, items):
    if items:
        tqdm.write(f"left out: {len(items)} of the {what}, such as {shown(items[0])}", sys.stderr)


# ---- Names --------------------------------------------------------------------------------------
def files_in(folder):
    """Yields the visible files of a folder, however deep, by name. A link is followed, but not into
    a folder that it lies in."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in ("__MACOSX", "@eaDir", "Thumbs.db"):
            continue
        if not path.is_dir():
            yield path
        elif path.resolve() not in [parent.resolve() for parent in path.parents]:
            yield from files_in(path)


SPLITS = dict(train="train", training="train", val="val", valid="val", validation="val",
              test="test", testing="test")


def split_of(name):
    """train, val or test, if the name of a folder or a file ends in a word of SPLITS, in any case:
    seg_train, ptb.valid.txt; a number may follow: test1, train-00000-of-00002.parquet."""
    words = re.sub(r"(-\d+-of-)?\d*$", "", Path(name).stem.lower())
    return SPLITS.get(re.split("[._-]", words)[-1])


def split_at(names):
    """(split, the names below it) for the names that lead to a file; (None, all) without one."""
    for depth, name in enumerate(names, 1):
        if split := split_of(name):
            return split, names[depth:]
    return None, names


def by_split(places):
    """{split: {file: the names below its split}}, given {file: the names that lead to it}. Whether
    there are splits is said above; a file that no name leads to does not count."""
    parts, outside = dict(train={}, val={}, test={}), []
    for file, names in places.items():
        split, below = split_at(names)
        if split:
            parts[split][file] = below
        elif names:
            outside.append(file)
    parts = {split: part for split, part in parts.items() if part}
    if (parts and not outside) or ("train" in parts and len(parts) > 1):
        return parts
    for split in parts:
        note(f"`{split}` by itself is taken for a class or a text")
    return dict(train=places)


def data_in(source, suffixes):
    """The files with these suffixes, however deep. Raises UserError if there are none."""
    files = [path for path in files_in(source)
             if path.suffix.lower() in suffixes and path.is_file()]        # a link may be broken
    if not files:
        raise UserError(f"{shown(source)} has no such data: pictures lie in DIR/CLASS/FILE, text "
                        "(it needs --tokenizer) in .parquet, .jsonl or .txt files")
    return files


def tell_unused(source, parts):
    used = set().union(*parts.values())
    unused = [path.relative_to(source) for path in files_in(source) if path not in used]
    tell_left_out("files", unused)


# ---- Pictures -----------------------------------------------------------------------------------
def pictures(source):
    """{split: {file: its class}}; test validates if there is no val. Raises UserError unless there
    are two classes to train on, and one of them in val."""
    files = data_in(source, Image.registered_extensions())
    parts = by_split({path: path.relative_to(source).parts[:-1] for path in files})
    parts = {split: {path: shown(folders[0]) for path, folders in part.items() if folders}
             for split, part in parts.items()}
    tell_unused(source, parts)
    if "test" in parts:
        parts.setdefault("val", parts.pop("test"))
    classes, where = set(parts.get("train", {}).values()), "pictures lie in DIR/[SPLIT/]CLASS/FILE"
    if len(classes) < 2:
        raise UserError(f"{shown(source)}: fewer than two class folders to train on: {where}")
    if "val" in parts and classes.isdisjoint(parts["val"].values()):
        raise UserError(f"{shown(source)}: its val has none of train's classes: {where}")
    return parts


def read_picture(file, size):
    """(RGB array (size, size, 3), None), or (None, what is wrong with the file). A picture is
    turned as its tag says, its shorter side resized (bicubic), the longer one rounded down; sides
    and crop are torchvision's."""
    try:
        image = Image.open(file)
        image.load()
        with contextlib.suppress(Exception):    # a malformed tag costs the turn alone
            image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":               # convert() would clip them at 255
            return None, "16 or 32 bits a pixel"
        if image.has_transparency_data:         # on white, else hidden colours would be seen
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        width, height = (side * size // min(image.size) for side in image.size)
        left, top = round((width - size) / 2), round((height - size) / 2)
        image = image.convert("RGB").resize((width, height), Image.BICUBIC)
        return np.asarray(image.crop((left, top, left + size, top + size))), None
    except Exception as error:      # a damaged file can make a decoder raise anything
        return None, " ".join(str(error).split()) or type(error).__name__


# ---- Texts --------------------------------------------------------------------------------------
def texts(source):
    """{split: its files}."""
    files = data_in(source, (".parquet", ".jsonl", ".txt"))
    parts = by_split({path: path.relative_to(source).parts for path in files})
    tell_unused(source, parts)
    return {split: [*part] for split, part in parts.items()}


def rows_of(path):
    """Yields the `text` of each row of a Parquet or .jsonl file, or the whole of a .txt."""
    if path.suffix.lower() == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches(64, columns=["text"]):      # may be books
            yield from batch["text"].to_pylist()
    elif path.suffix.lower() == ".jsonl":
        for line in filter(bytes.strip, path.open("rb")):
            yield json.loads(line).get("text")
    else:
        yield path.read_text("utf-8")


def documents(paths):
    """Yields dict(text=...) of each document; a row without sound text is left out. Raises
    UserError if all are, or with the row that cannot be read."""
    left_out, found = [], 0
    for path in paths:
        row = 0
        try:
            for row, text in enumerate(rows_of(path), 1):
                if isinstance(text, str) and not re.search("[\0\ud800-\udfff]", text):
                    found += 1
                    yield dict(text=text.removeprefix("\ufeff"))        # a byte order mark
                else:
                    left_out.append(f"row {row} of {path}")
        except Exception as error:
            raise UserError(f"{shown(path)}, row {row + 1}: {error}") from None
    tell_left_out("rows (no `text`, or NUL as in UTF-16, or half a character)", left_out)
    if not found:
        raise UserError(f"{shown(paths[0])}: no row has a `text` in UTF-8")
