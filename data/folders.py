"""A person's own folder: names alone tell which files are data, and their split and class.

    pictures    [SPLIT/]CLASS/.../FILE
    texts       SPLIT/.../FILE, SPLIT.EXT, NAME.SPLIT.EXT, SPLIT-00000-of-00002.EXT

SPLIT is a key of SPLITS in any case. There are splits if every name at the top of the folder tells
one, or if some are for training and some are not; what tells none is left out then."""
import os
import re
import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path

from PIL import Image

from data.files import shown, tell_left_out
from flags import UserError

SPLITS = dict(train="train", training="train", val="val", valid="val", validation="val",
              test="test", testing="test")
HIDDEN = ["__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information",
          "lost+found", "Thumbs.db", "desktop.ini"]     # and every name that begins with a dot


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
    """The split that a name at the top of the folder tells, or None."""
    stem = re.sub(r"-\d+-of-\d+$", "", Path(name).stem)
    return SPLITS.get(stem.split(".")[-1].lower())


def refuse_mixed(names):
    """Raises UserError if names tell of training and of testing in other words than SPLITS, or not
    at the top: seg_train and seg_test, train and test1, cat/train and cat/val."""
    word = r"(?<![a-z])(train|val|test)(ing|id|idation)?(?![a-z])"
    telling = sorted((name for name in names if re.search(word, name.lower())),
                     key=lambda name: "train" not in name.lower())
    if telling and "train" in telling[0].lower() and "train" not in telling[-1].lower():
        raise UserError(f"{shown(telling[0])} and {shown(telling[-1])} would be mixed: a split is "
                        f"named {', '.join(SPLITS)}, at the top of the folder")


def by_split(places, depth):
    """{split: {path: its folders below the split}}, given paths from the top of the folder. Names
    of what lies in fewer folders than `depth` do not tell a split."""
    splits = {place.parts[0]: split_of(place.parts[0])
              for place in places if len(place.parts) > depth}
    found = set(splits.values())
    if None not in found or "train" in found and found & {"val", "test"}:
        return {split: {place: place.parts[1:-1] for place in places
                        if splits.get(place.parts[0]) == split}
                for split in ("train", "val", "test") if split in found}
    refuse_mixed({name for place in places for name in place.parts[:len(place.parts) - depth]})
    for split in sorted(found - {None}):
        print(f"note: `{split}` is taken for the name of a class or a text: a split has train and "
              "val or test", file=sys.stderr)
    return dict(train={place: place.parts[:-1] for place in places})


def data_in(source, *kinds, depth=0):
    """{split: {file: its folders below the split}}, of the files of the first kind that is there: a
    list of suffixes. One that lies in fewer folders than `depth` is left out. Folders around all of
    them do not count, down to a split's."""
    every = list(files_in(source))
    for suffixes in kinds:
        files = [path for path in every                 # a link may be broken
                 if path.suffix.lower() in suffixes and path.is_file()]
        if files:
            break
    else:
        raise UserError(f"{shown(source)} has no such data: pictures lie in DIR/CLASS/FILE, text "
                        "(it needs --tokenizer) in .parquet, .jsonl or .txt files")
    refuse_missing_shards(files)
    around = Path(os.path.commonpath([path.parent for path in files])).relative_to(source).parts
    top = source.joinpath(*takewhile(lambda name: not split_of(name), around))
    parts = {split: {top / place: folders for place, folders in part.items()
                     if len(folders) >= depth}
             for split, part in by_split([path.relative_to(top) for path in files], depth).items()}
    used = set().union(*parts.values())
    tell_left_out("files", [path.relative_to(source) for path in every if path not in used])
    return parts


def pictures(source):
    """{split: {file: its class}}; test validates if there is no val. Raises UserError unless there
    are two classes to train on, and one of them in val."""
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items()
                if kind in Image.OPEN}
    parts = {split: {path: shown(folders[0]) for path, folders in files.items()}
             for split, files in data_in(source, suffixes, depth=1).items()}
    if "test" in parts:
        parts.setdefault("val", parts.pop("test"))
    classes, where = set(parts.get("train", {}).values()), "pictures lie in DIR/[SPLIT/]CLASS/FILE"
    if len(classes) < 2:
        raise UserError(f"{shown(source)}: fewer than two class folders to train on: {where}")
    if "val" in parts and classes.isdisjoint(parts["val"].values()):
        raise UserError(f"{shown(source)}: its val has none of train's classes: {where}")
    return parts


def texts(source):
    """{split: files}, of Parquet, or else .jsonl, or else .txt."""
    parts = data_in(source, [".parquet"], [".jsonl"], [".txt"])
    return {split: list(files) for split, files in parts.items()}
