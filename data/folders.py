"""A person's own folder, listed once: names alone tell which files are data, their split and class.
SPLIT stands for a key of SPLITS in any case. There is a split if every name at the top is of one,
or if some are for training and some are not; then all else is left out, counted."""
import json
import os
import re
import sys
from collections import Counter

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
    for path in sorted(folder.iterdir()) if real not in around else ():
        if path.name[0] != "." and path.name not in HIDDEN:
            yield from files_in(path, (*around, real)) if path.is_dir() else [path]


def refuse_missing_shards(files):
    """Raises UserError unless files such as train-00000-of-00002.parquet are all there."""
    shards = [re.match(r"(.+-)\d+(-of-(\d+).*)", shown(path)) for path in files]
    for (start, end, whole), n in Counter(shard.groups() for shard in shards if shard).items():
        if n != int(whole):
            raise UserError(f"incomplete: there are {n} of {whole} files such as {start}00000{end}")


def split_of(names):
    """The split that the first of a path's names stands for, or None: of a folder, or of a text
    SPLIT.EXT, NAME.SPLIT.EXT, SPLIT-00000-of-00002.EXT."""
    name = names[0].lower()
    if len(names) == 1:
        name = re.sub(r"(-\d+-of-\d+)?\.[^.]*$", "", name).rpartition(".")[2]
    return SPLITS.get(name)


def refuse_other_splits(paths):
    """Raises UserError where names beside each other differ in the word for the split, and numbers,
    alone, such as seg_train and seg_test, or cat/train and cat/val: they would be mixed."""
    def places(words):
        return {(*names[:i], re.sub(r"\d", "", re.sub(words, "*", names[i].lower()))):
                shown("/".join(names[:i + 1])) for names in paths for i in range(len(names))
                if re.search(words, names[i].lower())}

    train, others = places("train(ing)?"), places("val(id(ation)?)?|test(ing)?")
    for place in train.keys() & others.keys():
        raise UserError(f"{train[place]} and {others[place]} would be mixed: a split is named "
                        f"{', '.join(SPLITS)}, at the top of the folder")


def listed(source, suffixes, depth):
    """{split: {file: its names below the split}}; without a split all is "train". `depth` is the
    least number of folders a file lies in: 1, its class, or 0."""
    every = [*files_in(source)]
    files = {path: names for path in every if path.suffix.lower() in suffixes and path.is_file()
             and len(names := path.relative_to(source).parts) > depth}
    if not files:
        raise UserError(f"{shown([*every, source][0])} is no such data: pictures lie in DIR/CLASS/"
                        "FILE, text (it needs --tokenizer) in .parquet, .jsonl or .txt files")
    refuse_missing_shards(files)
    while (len({names[0] for names in files.values()}) == 1 and not split_of([*files.values()][0])
           and min(map(len, files.values())) > depth + 1):
        files = {path: names[1:] for path, names in files.items()}      # an archive unpacks so
    splits, parts = {split_of(names) for names in files.values()}, dict(train=files)
    if None not in splits or "train" in splits and len(splits) > 2:
        parts = {split: {path: names[1:] for path, names in files.items()
                         if split_of(names) == split and len(names) > 2 * depth}
                 for split in ("train", "val", "test") if split in splits}
    else:
        refuse_other_splits([names[:len(names) - depth] for names in files.values()])
        if names := [names[0] for names in files.values() if split_of(names)]:
            print(f"note: {names[0]} counts as one {'class' if depth else 'text'} among others: "
                  "a split has train and val or test", file=sys.stderr)
    used = {path for part in parts.values() for path in part}
    tell_left_out("files that are no such data, by their names and places",
                  [path for path in every if path not in used])
    return parts


def pictures(source):
    """{split: dict(image=paths, label=classes)}; val is test if there is no other. The class is the
    first folder."""
    suffixes = [suffix for suffix, kind in Image.registered_extensions().items()
                if kind in Image.OPEN]
    parts = {split: dict(image=[dict(path=os.fsencode(path), bytes=None) for path in files],
                         label=[shown(names[0]) for names in files.values()])
             for split, files in listed(source, suffixes, 1).items()}
    if test := parts.pop("test", None):
        parts.setdefault("val", test)
    for split, part in parts.items():
        if "train" not in parts or not {*part["label"]} & {*parts["train"]["label"]}:
            raise UserError(f"{shown(source)}: its {split} has no class folders, or none of "
                            "train's: pictures of a split lie in SPLIT/CLASS/FILE")
    return parts


def texts(source):
    """{split: files}, of Parquet, or else .jsonl, or else .txt."""
    suffixes = {path.suffix.lower() for path in files_in(source)}
    kind = next((kind for kind in (".parquet", ".jsonl") if kind in suffixes), ".txt")
    return {split: [*part] for split, part in listed(source, [kind], 0).items()}


def documents(files):
    """Yields dict(text=...) of each document. A row whose `text` is none, or has half a surrogate
    pair, is left out. Raises UserError with the file and the row that cannot be read."""
    left_out, row, found = [], 0, False
    for path in files:
        try:
            for row, text in enumerate(read(path), 1):
                if isinstance(text, str) and not re.search("[\ud800-\udfff]", text):
                    found = True
                    yield dict(text=text.removeprefix("\ufeff"))        # a byte order mark
                else:
                    left_out.append(f"row {row} of {path}")
        except Exception as error:
            raise UserError(f"{shown(path)}, row {row + 1}: {error}") from None
        row = 0
    tell_left_out("rows without a `text` that is text", left_out)
    if not found:
        raise UserError(f"{shown(files[0])}: no row has a `text`")


def read(path):
    """Yields the `text` of each row of a file, or a whole .txt."""
    if path.suffix.lower() == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches(64, columns=["text"]):      # may be books
            yield from batch["text"].to_pylist()
    elif path.suffix.lower() == ".jsonl":
        for line in filter(bytes.strip, path.open("rb")):
            yield json.loads(line).get("text")
    else:
        text = path.read_text("utf-8")
        if "\0" in text:
            raise ValueError("it has NUL characters, as UTF-16 has: save it as UTF-8")
        yield text
