"""A person's own folder, listed once: names alone tell which files are data, their split and class.

    pictures    [SPLIT/]CLASS/.../FILE
    texts       SPLIT/.../FILE, SPLIT.EXT, NAME.SPLIT.EXT, SPLIT-00000-of-00002.EXT

SPLIT is a key of SPLITS in any case. Folders around all of this do not count."""
import os
import re
import sys
from collections import Counter, defaultdict

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


def refuse_missing_shards(files):
    """Raises UserError unless files such as train-00000-of-00002.parquet are all there."""
    shards = [re.match(r"(.+-)\d+(-of-(\d+).*)", shown(path)) for path in files]
    counts = Counter(shard.groups() for shard in shards if shard)
    for (start, end, whole), n in counts.items():
        if n != int(whole):
            raise UserError(f"incomplete: there are {n} of {whole} files such as {start}00000{end}")


# ---- Splits. `files` is {path: the names of the folders that it lies in} ------------------------
def without_outer(files, depth):
    """Without the folders around all files, as an archive unpacks: down to a split, a choice or the
    last `depth` folders."""
    outer = 0
    for names in zip(*[above[:len(above) - depth] for above in files.values()]):
        if len(set(names)) > 1 or names[0].lower() in SPLITS:
            break
        outer += 1
    return {path: above[outer:] for path, above in files.items()}


def split_of(path, above):
    """The split that a file's first folder, or else its own name, stands for; or None."""
    if above:
        return SPLITS.get(above[0].lower())
    stem = re.sub(r"-\d+-of-\d+$", "", path.stem)
    return SPLITS.get(stem.split(".")[-1].lower())


def refuse_mixed(paths):
    """Raises UserError where two names in a folder differ in the word for the split alone, or in
    numbers too: seg_train and seg_test, train and test1, cat/train and cat/val."""
    alike = defaultdict(set)        # folder, and a name in it without that word -> the names
    for path in paths:
        for i, name in enumerate(path):
            word_out = re.sub("train(ing)?|val(id(ation)?)?|test(ing)?", "*", name.lower())
            alike[path[:i], re.sub(r"\d", "", word_out)].add(name)
    for (folder, _), names in alike.items():
        train = {name for name in names if "train" in name.lower()}
        if train and train != names:
            one, other = (shown("/".join((*folder, min(some)))) for some in (train, names - train))
            raise UserError(f"{one} and {other} would be mixed: a split is named "
                            f"{', '.join(SPLITS)}, at the top of the folder")


def split_up(files, depth):
    """{split: files below it}. There is a split if every name at the top is of one, or if some are
    for training and some are not; then what lies outside is left out. Else all is "train"."""
    splits = {path: split_of(path, above) for path, above in files.items()}
    named = set(splits.values()) - {None}
    if None not in splits.values() or ("train" in named and len(named) > 1):
        return {split: {path: above[1:] for path, above in files.items()
                        if splits[path] == split and len(above[1:]) >= depth}
                for split in ("train", "val", "test") if split in named}
    whole = [above if depth else (*above, path.name) for path, above in files.items()]
    refuse_mixed(whole)
    tops = [(*above, path.name)[0] for path, above in files.items() if splits[path]]
    if tops:
        print(f"note: {tops[0]} counts as one {'class' if depth else 'text'} among others: "
              "a split has train and val or test", file=sys.stderr)
    return dict(train=files)


def listed(source, suffixes, depth):
    """{split: {file: the folders it lies in, below the split}}. `depth` is the least number of
    folders: 1, a picture's class, or 0, for a text. Raises UserError if there is no such file."""
    every = list(files_in(source))
    files = {path: path.relative_to(source).parts[:-1] for path in every
             if path.suffix.lower() in suffixes and path.is_file()}     # a link may be broken
    files = {path: above for path, above in files.items() if len(above) >= depth}
    if not files:
        raise UserError(f"{shown([*every, source][0])} is no such data: pictures lie in DIR/CLASS/"
                        "FILE, text (it needs --tokenizer) in .parquet, .jsonl or .txt files")
    refuse_missing_shards(files)
    parts = split_up(without_outer(files, depth), depth)
    used = set().union(*parts.values())
    tell_left_out("files that are no such data, by their names and places",
                  [path for path in every if path not in used])
    return parts


def pictures(source):
    """{split: {file: its class}}, the class being the first folder; val is test if there is no
    other. Raises UserError for a split without classes, or with none of train's."""
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items()
                if kind in Image.OPEN}
    parts = {split: {path: shown(above[0]) for path, above in files.items()}
             for split, files in listed(source, suffixes, 1).items()}
    if "test" in parts:
        parts.setdefault("val", parts.pop("test"))
    classes = set(parts.get("train", {}).values())
    for split, part in parts.items():
        if classes.isdisjoint(part.values()):
            raise UserError(f"{shown(source)}: its {split} has no class folders, or none of "
                            "train's: pictures of a split lie in SPLIT/CLASS/FILE")
    return parts


def texts(source):
    """{split: files}, of Parquet, or else .jsonl, or else .txt."""
    suffixes = {path.suffix.lower() for path in files_in(source)}
    kind = next((kind for kind in (".parquet", ".jsonl") if kind in suffixes), ".txt")
    return {split: list(files) for split, files in listed(source, {kind}, 0).items()}
