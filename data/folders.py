"""A person's own folder, listed once: names alone tell which files are data, their split and class.

    pictures    [SPLIT/]CLASS/.../FILE
    texts       SPLIT/.../FILE, SPLIT.EXT, NAME.SPLIT.EXT, SPLIT-00000-of-00002.EXT

SPLIT is a key of SPLITS in any case. Folders around all of this do not count."""
import os
import re
import sys
from itertools import takewhile
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from flags import UserError

SPLITS = dict(train="train", training="train", val="val", valid="val", validation="val",
              test="test", testing="test")
HIDDEN = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information",
          "lost+found", "Thumbs.db", "desktop.ini"}     # and every name with a dot before it


def shown(path):
    """A path, whatever bytes it has, as one line for a message."""
    return " ".join(os.fsencode(path).decode(errors="replace").split())


def tell_left_out(what, items):
    if items:
        tqdm.write(f"left out: {len(items)} {what}, such as {shown(items[0])}", sys.stderr)


def files_in(folder, around=()):
    """Yields the visible files of a folder, however deep, by name. A link is followed, but not into
    a folder that it lies in."""
    real = folder.resolve()
    if real in around:
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in HIDDEN:
            continue
        if path.is_dir():
            yield from files_in(path, (*around, real))
        else:
            yield path


def named(place):
    """The names of a path, the first of which may be a split's: it is `train` for train.txt too."""
    stem = re.sub(r"-\d+-of-\d+$", "", place.stem)
    return place.parts if len(place.parts) > 1 else (stem.split(".")[-1], place.name)


def refuse_mixed(files):
    """Raises UserError where two names in a folder differ in the word for the split alone, or in
    numbers too: seg_train and seg_test, train and test1, cat/train and cat/val."""
    places = {place for path in files for place in (path, *path.parents)}
    alike = {(place.parent, re.sub(r"\d", "", place.name.lower())): place for place in places}
    for folder, name in sorted(key for key in alike if "train" in key[1]):
        for word in ("val", "valid", "validation", "test", "testing"):
            other = folder, re.sub("train(ing)?", word, name)
            if other in alike:
                one, other = shown(alike[folder, name]), shown(alike[other])
                raise UserError(f"{one} and {other} would be mixed: a split is named "
                                f"{', '.join(SPLITS)}, at the top of the folder")


def listed(source, suffixes, least):
    """{split: {file: the next name below the split}}, of files with at least so many names below
    it. There is a split if every name at the top is of one, or if some are for training and some
    are not; then what lies outside is left out. Else all is "train". Raises UserError if there is
    no such file."""
    every = list(files_in(source))
    files = [path for path in every         # a link may be broken
             if path.suffix.lower() in suffixes and path.is_file()]
    if not files:
        raise UserError(f"{shown([*every, source][0])} is no such data: pictures lie in DIR/CLASS/"
                        "FILE, text (it needs --tokenizer) in .parquet, .jsonl or .txt files")
    # the folders around all files do not count, down to a split
    around = Path(os.path.commonpath([path.parent for path in files])).relative_to(source)
    top = source.joinpath(*takewhile(lambda name: name.lower() not in SPLITS, around.parts))
    places = [path.relative_to(top) for path in files]
    names = {top / place: named(place) for place in places if len(place.parts) >= least}
    splits = {SPLITS.get(first.lower()) for first, *_ in names.values()}
    if None in splits and not {"train"} < splits - {None}:
        refuse_mixed(places)
        for split in sorted(splits - {None}):
            print(f"note: `{split}` is taken for the name of a class or a text: a split has train "
                  "and val or test", file=sys.stderr)
        names = {path: ("train", *path.relative_to(top).parts) for path in names}
        splits = {"train"}
    parts = {split: {path: shown(below[0]) for path, (first, *below) in names.items()
                     if SPLITS.get(first.lower()) == split and len(below) >= least}
             for split in ("train", "val", "test") if split in splits}
    used = set().union(*parts.values())
    tell_left_out("files that are no such data, by their names and places",
                  [path for path in every if path not in used])
    return parts


def pictures(source):
    """{split: {file: its class}}, the class being the first folder; val is test if there is no
    other. Raises UserError for a split without classes, or with none of train's."""
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items()
                if kind in Image.OPEN}
    parts = dict(train={}) | listed(source, suffixes, 2)
    if "test" in parts:
        parts.setdefault("val", parts.pop("test"))
    train, where = set(parts["train"].values()), "pictures lie in DIR/[SPLIT/]CLASS/FILE"
    if len(train) < 2:
        raise UserError(f"{shown(source)}: fewer than two class folders to train on: {where}")
    for split, part in parts.items():
        if train.isdisjoint(part.values()):
            raise UserError(f"{shown(source)}: its {split} has none of train's classes: {where}")
    return parts


def texts(source):
    """{split: files}, of Parquet, or else .jsonl, or else .txt."""
    suffixes = {path.suffix.lower() for path in files_in(source)}
    kind = next((kind for kind in (".parquet", ".jsonl") if kind in suffixes), ".txt")
    return {split: list(files) for split, files in listed(source, {kind}, 1).items()}
