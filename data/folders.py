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
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from flags import UserError


# ---- Messages -----------------------------------------------------------------------------------
def shown(path):
    """A path, whatever bytes it has, as one line for a message."""
    return " ".join(os.fsencode(path).decode(errors="replace").split())


def tell_left_out(what, items):
    if items:
        tqdm.write(f"left out: {len(items)} {what}, such as {shown(items[0])}", sys.stderr)


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


def refuse_missing_shards(files):
    """Raises UserError unless files such as train-00000-of-00002.parquet are all there."""
    shards = [re.match(r"(.+-)\d+(-of-(\d+).*)", shown(path)) for path in files]
    counts = Counter(shard.groups() for shard in shards if shard)
    for (start, end, whole), n in counts.items():
        if n != int(whole):
            raise UserError(f"incomplete: there are {n} of {whole} files such as {start}00000{end}")


def split_of(name):
    """train, val or test, if the name of a folder or a file ends in it, or in training, testing,
    valid, validation; in any case, and with numbers behind: seg_train, ptb.valid.txt, test1."""
    told = re.fullmatch(r"(.*[._-])?(train|val|test)(ing|id|idation)?(-\d+-of-)?\d*",
                        Path(name).stem.lower())
    return told and told[2]


def by_split(places):
    """{split: {file: the names below its split}}, given the names that lead to each file."""
    parts, outside = {"train": {}, "val": {}, "test": {}}, []
    for file, names in places.items():
        for depth, name in enumerate(names, 1):
            if split := split_of(name):
                parts[split][file] = names[depth:]
                break
        else:
            outside.append(names)
    parts = {split: part for split, part in parts.items() if part}
    if not any(outside) or "train" in parts and len(parts) > 1:     # a picture at the top has none
        return parts
    for split in parts:
        print(f"note: `{split}` by itself is taken for a class or a text", file=sys.stderr)
    return dict(train=places)


def data_in(source, suffixes, classes=False):
    """{split: {file: the names below its split}}, of the files with these suffixes. With classes,
    only folders have names, and a file that has none below its split is left out."""
    every = list(files_in(source))
    places = {path: path.relative_to(source).parts for path in every        # a link may be broken
              if path.suffix.lower() in suffixes and path.is_file()}
    if not places:
        raise UserError(f"{shown(source)} has no such data: pictures lie in DIR/CLASS/FILE, text "
                        "(it needs --tokenizer) in .parquet, .jsonl or .txt files")
    refuse_missing_shards(places)
    if classes:
        places = {path: names[:-1] for path, names in places.items()}
    parts = {split: {path: below for path, below in part.items() if below or not classes}
             for split, part in by_split(places).items()}
    used = set().union(*parts.values())
    tell_left_out("files", [path.relative_to(source) for path in every if path not in used])
    return parts


# ---- Pictures -----------------------------------------------------------------------------------
def pictures(source):
    """{split: {file: its class}}; test validates if there is no val. Raises UserError unless there
    are two classes to train on, and one of them in val."""
    parts = data_in(source, Image.registered_extensions(), classes=True)
    parts = {split: {file: shown(folders[0]) for file, folders in part.items()}
             for split, part in parts.items()}
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
TEXT_SUFFIXES = (".parquet", ".jsonl", ".txt")


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
    tell_left_out("rows without `text`, or with NUL (as in UTF-16) or half a character", left_out)
    if not found:
        raise UserError(f"{shown(paths[0])}: no row has a `text` in UTF-8")
