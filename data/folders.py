"""A person's own folder: names alone tell which files are data, and their split and class.

    pictures    [SPLIT/]CLASS/.../FILE
    texts       SPLIT/.../FILE, SPLIT.EXT, NAME.SPLIT.EXT, SPLIT-00000-of-00002.EXT

SPLIT is a key of SPLITS in any case."""
import os
import re
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from flags import UserError

SPLITS = dict(train="train", training="train", val="val", valid="val", validation="val",
              test="test", testing="test")
HIDDEN = ["__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information",
          "lost+found", "Thumbs.db", "desktop.ini"]     # and every name that begins with a dot


def shown(path):
    """A path, whatever bytes it has, as one line for a message."""
    return " ".join(os.fsencode(path).decode(errors="replace").split())


def tell_left_out(what, items):
    if items:
        tqdm.write(f"left out: {len(items)} {what}, such as {shown(items[0])}", sys.stderr)


def files_in(folder):
    """Yields the visible files of a folder, however deep, by name. A link is followed, but not into
    a folder that it lies in."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in HIDDEN:
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
    """The split that a name at the top of the folder tells, or "outside"."""
    stem = re.sub(r"-\d+-of-\d+$", "", Path(name).stem)
    return SPLITS.get(stem.split(".")[-1].lower(), "outside")


def refuse_mixed(places):
    """Raises UserError where two names in a folder differ in the word for the split alone, or in
    numbers too: seg_train and seg_test, train and test1, cat/train and cat/val."""
    found = {}
    for place in sorted({part for place in places for part in (place, *place.parents)}):
        name = re.sub(r"\d", "", place.name.lower())
        alike = re.sub("(train|val|test)(ing|idation|id)?", "SPLIT", name)
        other, other_name = found.setdefault((place.parent, alike), (place, name))
        if ("train" in name) != ("train" in other_name):
            train, other = (place, other) if "train" in name else (other, place)
            raise UserError(f"{shown(train)} and {shown(other)} would be mixed: a split is named "
                            f"{', '.join(SPLITS)}, at the top of the folder")


def data_in(source, *kinds):
    """{file: its path in the folder}, of the first kind that is there: a list of suffixes. Folders
    around all files do not count, down to a split's."""
    every = list(files_in(source))
    for suffixes in kinds:
        files = [path for path in every         # a link may be broken
                 if path.suffix.lower() in suffixes and path.is_file()]
        if files:
            refuse_missing_shards(files)
            tell_left_out("files that are no such data", sorted(set(every) - set(files)))
            common = Path(os.path.commonpath([path.parent for path in files]))
            around = common.relative_to(source).parts
            top = source.joinpath(*takewhile(lambda name: split_of(name) == "outside", around))
            return {path: path.relative_to(top) for path in files}
    raise UserError(f"{shown(source)} has no such data: pictures lie in DIR/CLASS/FILE, text (it "
                    "needs --tokenizer) in .parquet, .jsonl or .txt files")


def by_split(files, least=1):
    """{split: {file: its names below the split}}, given {file: its path}. There are splits if all
    files of at least so many names lie in one, or if some are for training and some are not. Else
    all files are "train"."""
    parts = dict(train={}, val={}, test={}, outside={})
    for path, place in files.items():
        if len(place.parts) >= least:
            parts[split_of(place.parts[0])][path] = place.parts[1:]
    outside = parts.pop("outside")
    parts = {split: part for split, part in parts.items() if part}
    if not outside or "train" in parts and len(parts) > 1:
        used = set().union(*parts.values())
        tell_left_out("files outside the splits", sorted(files.keys() - used))
        return parts
    refuse_mixed(files.values())
    for split in parts:
        print(f"note: `{split}` is taken for the name of a class or a text: a split has train and "
              "val or test", file=sys.stderr)
    return dict(train={path: place.parts for path, place in files.items()})


def pictures(source):
    """{split: {file: its class}}; test validates if there is no val. Raises UserError unless there
    are two classes to train on, and one of them in val."""
    parts, where = {}, "pictures lie in DIR/[SPLIT/]CLASS/FILE"
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items()
                if kind in Image.OPEN}
    for split, files in by_split(data_in(source, suffixes), least=2).items():
        parts[split] = {path: shown(names[0]) for path, names in files.items() if len(names) > 1}
        tell_left_out(f"pictures of {split} without a class folder",
                      sorted(files.keys() - parts[split].keys()))
    if "test" in parts:
        parts.setdefault("val", parts.pop("test"))
    classes = set(parts.get("train", {}).values())
    if len(classes) < 2:
        raise UserError(f"{shown(source)}: fewer than two class folders to train on: {where}")
    if "val" in parts and classes.isdisjoint(parts["val"].values()):
        raise UserError(f"{shown(source)}: its val has none of train's classes: {where}")
    return parts


def texts(source):
    """{split: files}, of Parquet, or else .jsonl, or else .txt."""
    parts = by_split(data_in(source, [".parquet"], [".jsonl"], [".txt"]))
    return {split: list(files) for split, files in parts.items()}
