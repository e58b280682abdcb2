"""Prepares a data set: reads it with `datasets`, writes plain memory-mapped files to data/cache.

    python data/prepare.py cifar10                  from the Hugging Face Hub
    python data/prepare.py cifar10 --source DIR     from the same files in DIR, without a network
    python data/prepare.py mine --source DIR --size=64
                                                    your pictures, DIR/{train,val}/CLASS/FILE, or
                                                    DIR/CLASS/FILE, of which a tenth validates
    python data/prepare.py mine --source DIR --tokenizer=gpt2
                                                    your text: Parquet, .jsonl (rows with `text`),
                                                    .txt files (a document each); or char

The set NAME is then data/cache/NAME, a folder that appears whole or not at all, with meta.json and

    {train,val}_images.npy, _labels.npy     uint8 (N, S, S, 3), int64 (N,)
    {train,val}_masks.npy                   uint8 (N, S, S), 1 on the object (drawn sets only)
    {train,val,test}.bin, NAME.jsonl        uint16 tokens; passages that are scored one by one

GPT-2's end-of-text token follows each document. A picture's shorter side is resized, and the middle
is kept. Disk, about: imagenet 262 GB, streamed from the Hub or DIR; openwebtext 54 GB in the cache
of `datasets` (HF_HOME) and 18 GB written.
"""
import argparse
import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])      # in place of data/ itself

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from data import shapes
from data.tokenizer import CharTokenizer, GPT2Tokenizer, PRINTABLE, pydoc
from flags import CACHE, UserError, cli
from model import not_one_of

# -------------------------------------------------------------------------------------------------
# The sets, one row each. `hub` is what load_dataset takes; a large set is not prepared unasked
# -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ImageSet:
    size: int                   # pixels per side, as stored
    hub: dict | None = None
    val: str = "test"           # the split that validates
    large: bool = False


@dataclass(frozen=True)
class TextSet:
    hub: dict | None = None
    tokenizer: object = "gpt2"
    files: dict | None = None   # {split: pattern}, where the file names do not tell the split
    column: str | None = "text"
    documents: object = None    # texts -> documents, where the rows are not the documents
    passages: bool = False      # whether evaluation scores the rows one by one
    by_position: bool = False   # the last tenth of the characters validates;
    held_out: float = 0.01      # else, where no file does, this share of the documents
    large: bool = False


def wikitext_articles(texts):
    """Titles stand between empty lines, formulas such as ` = 1 / s = ` do not."""
    whole = "".join(line or " \n" for line in texts)        # the Hub's rows are lines
    return re.split(r"(?<=\n \n)(?= = [^=\n]+ = \n \n)", whole)


SPLITS = dict(train="train", validation="val", test="test")     # names of `datasets`, ours
IMAGES = {
    "shapes": ImageSet(32),
    "camouflage": ImageSet(32),
    "cifar10": ImageSet(32, dict(path="uoft-cs/cifar10")),
    "cifar100": ImageSet(32, dict(path="uoft-cs/cifar100")),
    "flowers102": ImageSet(256, dict(path="dpdl-benchmark/oxford_flowers102")),
    "pets": ImageSet(256, dict(path="timm/oxford-iiit-pet")),
    # the labels of its test split are not public; its terms ask for `hf auth login`
    "imagenet": ImageSet(256, dict(path="ILSVRC/imagenet-1k"), "validation", large=True),
}
CONVERTED = "refs/convert/parquet"      # the Hub's own conversion of what has only a script
SHAKESPEARE = dict(path="karpathy/tiny_shakespeare", revision=CONVERTED)
TEXTS = {
    # the share is nanoGPT's, so that losses compare
    "openwebtext": TextSet(dict(path="Skylion007/openwebtext", num_proc=os.cpu_count()),
                           held_out=0.0005, large=True),
    "books": TextSet(large=True),
    "shakespeare": TextSet(SHAKESPEARE, by_position=True),
    "shakespeare_char": TextSet(SHAKESPEARE, "char", by_position=True),
    "pydoc": TextSet(tokenizer=CharTokenizer(PRINTABLE), by_position=True),
    # for zero-shot evaluation
    "wikitext": TextSet(dict(path="Salesforce/wikitext", name="wikitext-2-raw-v1"),
                        documents=wikitext_articles),
    "ptb": TextSet(dict(path="ptb-text-only/ptb_text_only", revision=CONVERTED),
                   column="sentence"),
    "lambada": TextSet(dict(path="EleutherAI/lambada_openai", revision=CONVERTED,
                            data_files={"test": "default/test/*.parquet"}), passages=True),
    # common nouns and named entities
    "cbt": TextSet(dict(path="cam-cst/cbt"), column=None, passages=True,
                   files={"CN": "CN/validation*", "NE": "NE/validation*"}),
}


# -------------------------------------------------------------------------------------------------
# Rows
# -------------------------------------------------------------------------------------------------

def read_rows(row, source, draft, **how):
    """{split: rows} of a set on the Hub, or of the Parquet, .jsonl or .txt files in a folder."""
    from datasets import config, load_dataset
    from huggingface_hub import constants, utils

    if source is None and row.hub is None:
        raise UserError("there is no such text on the Hub: give your own by --source DIR")
    if source is None:
        try:
            utils.get_session().head(constants.ENDPOINT, timeout=10)
        except Exception:       # no network; `datasets` would ask six times, in half a minute
            config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True     # what it has kept serves
        return load_dataset(**{**how, **row.hub})
    for path in source.rglob("*-[0-9]*-of-[0-9]*.parquet"):     # train-00000-of-00002.parquet
        part, count = re.match(r"(.+-)\d+-of-(\d+)", path.name).groups()
        there = len(list(path.parent.glob(f"{part}*-of-{count}*")))
        if there != int(count):
            raise UserError(f"incomplete: there are {there} of {count} files such as {path.name}")
    how["cache_dir"], how["data_dir"] = str(draft / "scratch"), str(source)
    suffix = next((suffix for suffix in (".parquet", ".jsonl", ".txt")
                   if any(source.rglob("*" + suffix))), None)
    if row.hub is None:
        how["data_files"] = own_texts(source, suffix)
    if suffix == ".txt":
        sets = load_dataset("text", sample_by="document", encoding_errors="replace", **how)
        utf8 = sets.filter(lambda row: "\ufffd" not in row["text"])     # what replaces other bytes
        say_left_out("documents", sum(len(sets[k]) - len(utf8[k]) for k in sets), "no UTF-8")
        return utf8
    return load_dataset("json" if suffix == ".jsonl" else "parquet", **how)


def own_texts(source, suffix):
    """{split: files} of a user's own text: by name, where all files, or the folders that hold them,
    are called train, val, validation or test; else every file is for training."""
    if suffix is None:
        raise UserError(f"there is no .parquet, .jsonl or .txt file in {source}")
    found, others = {}, 0
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        others += path.suffix != suffix
        if path.suffix == suffix:
            name = re.sub(r"-\d+-of-\d+$", "", path.relative_to(source).parts[0].split(".")[0])
            found.setdefault("validation" if name == "val" else name, []).append(str(path))
    say_left_out("files", others, f"no {suffix}")
    return found if found.keys() <= SPLITS.keys() else dict(train=sum(found.values(), []))


def say_left_out(what, number, why):
    """One line for all that cannot be read."""
    if number:
        print(f"{number} {what} left out: {why}", file=sys.stderr)


def hold_out(sets, share):
    """This share of the rows validates, if all are for training."""
    if [*sets] != ["train"] or len(sets["train"]) == 1:
        return sets
    halves = sets["train"].train_test_split(share, seed=2357)
    return dict(train=halves["train"], validation=halves["test"])


# -------------------------------------------------------------------------------------------------
# Images: decoded by threads, in order
# -------------------------------------------------------------------------------------------------

def resize_crop(image, size):
    """The middle of a Pillow image whose shorter side is resized to `size` (bicubic), the longer
    one rounded down; sides and crop are torchvision's."""
    width, height = (side * size // min(image.size) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), Image.BICUBIC).crop((left, top, left + size, top + size))


def read_picture(file, size):
    """(RGB array (size, size, 3), None), or (None, what is wrong with the file)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # Pillow's, of damaged EXIF data
            image = ImageOps.exif_transpose(Image.open(file))       # upright
        if image.mode in ("I", "F"):
            raise ValueError("32 bits a pixel")
        if image.mode.startswith("I"):          # 16 bits a pixel, which convert() would clip at 255
            image = Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
        if image.has_transparency_data:         # on white: hidden colours are not meant to be seen
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return np.asarray(resize_crop(image.convert("RGB"), size)), None
    except Exception as error:      # a damaged file can make a decoder raise anything
        return None, " ".join(str(error).split()) or type(error).__name__


def write_images(name, size, source, draft):
    """Writes the pictures and labels of both splits; returns what meta.json says of them."""
    from datasets import Image as ImageColumn, load_dataset

    row = IMAGES.get(name, ImageSet(size, val="validation"))
    if row.hub:
        sets = read_rows(row, source, draft, streaming=True)
    else:
        files = {"train": f"{source}/*/**"}
        say_left_out("files", sum(path.is_file() for path in source.iterdir()), "in no CLASS")
        if (source / "train").is_dir():
            files = {"train": f"{source}/train/**", "validation": f"{source}/val/**"}
        sets = hold_out(load_dataset("imagefolder", data_files=files, drop_labels=False,
                                     cache_dir=str(draft / "scratch")), 0.1)
        sets["train"] = sets["train"].shuffle(seed=2357)    # files lie by class; a run takes a part
    features = sets["train"].features
    column = "img" if "img" in features else "image"
    label = next(key for key in ("label", "labels", "fine_label") if key in features)
    classes, problems = getattr(features[label], "names", None), []

    def read(cell):
        file = io.BytesIO(cell["bytes"]) if cell["bytes"] else cell["path"]
        pixels, problem = read_picture(file, row.size)
        return pixels, problem and f"{cell['path']} ({problem})"

    for split, part in (("train", "train"), ("val", row.val)):
        rows, labels = sets[part].cast_column(column, ImageColumn(decode=False)), []
        with open(draft / f"{split}_images.npy", "wb") as out, ThreadPoolExecutor() as pool:
            out.seek(128)           # the header comes last: not every picture can be read
            for batch in tqdm(rows.iter(512), f"{name} {split}", unit_scale=512, disable=None):
                for number, (pixels, problem) in zip(batch[label], pool.map(read, batch[column])):
                    if problem:
                        problems.append(problem)
                        continue
                    out.write(pixels.tobytes())
                    labels.append(number)
            about = dict(descr="|u1", fortran_order=False, shape=(len(labels), *2 * [row.size], 3))
            out.seek(0)
            np.lib.format.write_array_header_1_0(out, about)
        if not labels:
            raise UserError(f"no picture of {part} can be read: {', '.join(problems[:3])}")
        classes = classes or [str(i) for i in range(max(labels) + 1)]
        if len(classes) < 2 or not 0 <= min(labels) <= max(labels) < len(classes):
            raise UserError(f"the labels of {part} are {min(labels)} to {max(labels)}, of "
                            f"{len(classes)} classes; pictures lie in DIR/CLASS/FILE")
        np.save(draft / f"{split}_labels.npy", np.array(labels, np.int64))
    say_left_out("pictures", len(problems), ", ".join(problems[:3]) + ", ..." * (len(problems) > 3))
    return image_meta(classes, draft)


def write_shapes(name, counts, draft):
    """Draws `shapes` or `camouflage`; returns what meta.json says of them."""
    print(f"{name}: drawing {sum(counts):,} pictures, once", file=sys.stderr, flush=True)
    for seed, (split, n) in enumerate(zip(("train", "val"), counts)):
        hidden = shapes.CAMOUFLAGE[split] if name == "camouflage" else {}
        arrays = shapes.draw_shapes(n, seed, **hidden)
        for kind, array in zip(("images", "labels", "masks"), arrays):
            np.save(draft / f"{split}_{kind}.npy", array)
    return image_meta(list(shapes.SHAPES), draft)


def image_meta(classes, draft):
    """Mean and deviation are per channel, of train_images / 255, from exact integer sums."""
    pixels, total, squares = np.load(draft / "train_images.npy", "r"), 0, 0
    for start in range(0, len(pixels), 1000):
        part = pixels[start:start + 1000].reshape(-1, 3)
        total = total + part.sum(0, np.uint64)
        squares = squares + np.square(part, dtype=np.uint32).sum(0, np.uint64)
    mean, square = total / pixels[..., 0].size, squares / pixels[..., 0].size
    counts = {split: len(np.load(draft / f"{split}_labels.npy")) for split in ("train", "val")}
    return dict(kind="images", classes=classes, image_size=pixels.shape[1], images=counts,
                mean=(mean / 255).tolist(), std=(np.sqrt(square - mean ** 2) / 255).tolist())


# -------------------------------------------------------------------------------------------------
# Text: encoded by tiktoken's threads, in order
# -------------------------------------------------------------------------------------------------

def write_text(name, tokenizer, source, draft):
    """Writes the tokens of all splits, and passages; returns what meta.json says of them."""
    row = TEXTS.get(name, TextSet())
    sets = dict(train=dict(text=[pydoc()]))
    if name != "pydoc":
        sets = read_rows(row, source, draft, data_files=row.files)
    if row.passages:
        lines = [json.dumps(dict(one, task=task)) + "\n" for task in sets for one in sets[task]]
        (draft / f"{name}.jsonl").write_text("".join(lines))
    if not row.by_position:
        sets = hold_out(sets, row.held_out)
    parts = {SPLITS[split]: sets[split][row.column] for split in sets if row.column}
    if row.documents:
        parts = {split: row.documents(rows) for split, rows in parts.items()}
    one = row.by_position or [*parts] == ["train"]      # document, cut by position
    if one:
        whole = "".join(words for part in parts.values() for words in part)
        parts = dict(train=[whole[:int(0.9 * len(whole))]], val=[whole[int(0.9 * len(whole)):]])

    tokenizer = tokenizer or row.tokenizer
    if tokenizer == "char":
        tokenizer = CharTokenizer("".join(sorted(set().union(*parts["train"]))))
    elif tokenizer == "gpt2":
        tokenizer = GPT2Tokenizer()
    end = [] if one or tokenizer.eot is None else [tokenizer.eot]
    tokens = {}
    for split, texts in parts.items():
        with open(draft / f"{split}.bin", "wb") as out:
            # 64 at once: they may be books, and memory holds their tokens
            for start in tqdm(range(0, len(texts), 64), f"{name} {split}", disable=None):
                for ids in tokenizer.encode_batch(texts[start:start + 64]):
                    out.write(np.array([*ids, *end], np.uint16))
            tokens[split] = out.tell() // 2
        if tokens[split] < 2:
            raise UserError(f"there is no text for {split}")
    return dict(kind="text", tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab, tokens=tokens)


# -------------------------------------------------------------------------------------------------
# Preparing and opening
# -------------------------------------------------------------------------------------------------

def how_to(name, cache):
    """Both ways to a set, for messages."""
    row = IMAGES.get(name) or TEXTS.get(name) or TextSet()
    both = (f" with a network, or --source DIR with the files of huggingface.co/datasets/"
            f"{row.hub['path']}") if row.hub else " --source DIR, where DIR has its files"
    return f"python data/prepare.py {name} --data_dir={cache}{both}"


@contextlib.contextmanager
def one_line(name, advice):
    """What goes wrong inside is one line for the user, whatever a reader or the Hub raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except Exception as error:
        cause = error.__cause__ or error        # behind "an error while generating the dataset"
        reason = " ".join(str(cause).split())[:200]
        # of a full disk numpy says "Not enough free space" or "9 requested and 5 written"
        if re.search("No space left|Not enough .* space|requested and", reason):
            raise UserError(f"{name}: {os.strerror(errno.ENOSPC)}") from error
        raise UserError(f"{name}: {type(cause).__name__}: {reason}; {advice}") from error


def prepare(name, source=None, cache=CACHE, tokenizer=None, size=32, drawn=(10_000, 2_000)):
    """Writes cache/NAME, if it is not there. A set of the user's own is text if it has a tokenizer
    ("gpt2", "char" or an object); `drawn` are the numbers of pictures of a drawn set."""
    folder, draft = Path(cache) / name, Path(cache) / f".{name}.draft"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_line(name, how_to(name, cache)), open(draft.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                # another process waits, and finds the set
        if folder.exists():
            return
        shutil.rmtree(draft, ignore_errors=True)        # left by a run that was killed
        draft.mkdir()
        try:
            source = Path(source).resolve(strict=True) if source else None
            if source and name not in {**IMAGES, **TEXTS} and not tokenizer:
                if {path.suffix for path in source.rglob("*.*")} <= {".txt", ".jsonl", ".parquet"}:
                    raise UserError("DIR holds text: add --tokenizer=gpt2 or char")
            if name in TEXTS or tokenizer:
                meta = write_text(name, tokenizer, source, draft)
            elif name in ("shapes", "camouflage"):
                meta = write_shapes(name, drawn, draft)
            else:
                meta = write_images(name, size, source, draft)
            (draft / "meta.json").write_text(json.dumps(dict(name=name, **meta), indent=1))
            shutil.rmtree(draft / "scratch", ignore_errors=True)        # of `datasets`
            for path in (*draft.iterdir(), draft):      # a power cut leaves whole files, or no set
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    unit = "tokens" if meta["kind"] == "text" else "images"
    counts = ", ".join(f"{split} {n:,}" for split, n in meta[unit].items())
    print(f"{name} is ready in {folder}: {counts} {unit}", file=sys.stderr)


@contextlib.contextmanager
def opened(name, kind, cache):
    """The folder and the meta.json of a prepared set; a small one that is missing is prepared."""
    folder, sets = Path(cache) / name, dict(images=IMAGES, text=TEXTS)[kind]
    if not folder.exists():
        if name not in sets:
            own = [path.parent.name for path in sorted(Path(cache).glob("*/meta.json"))
                   if f'"kind": "{kind}"' in path.read_text()]
            raise UserError(f"--data: {not_one_of(name, dict.fromkeys([*own, *sets]))}; "
                            "python data/prepare.py NAME --source DIR makes your own")
        if sets[name].large:
            raise UserError(f"{name} is not prepared: {how_to(name, cache)}")
        prepare(name, cache=cache)
    with one_line(name, f"delete {folder} and prepare it again"):
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["kind"] != kind:
            raise UserError(f"this is a set of {meta['kind']}, not of {kind}")
        yield folder, meta


def main(argv):
    """Prepares one set."""
    parser = argparse.ArgumentParser(prog="prepare.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help=f"{', '.join([*IMAGES, *TEXTS])}, or your own")
    parser.add_argument("--source", metavar="DIR", help="where the files are, instead of the Hub")
    parser.add_argument("--data_dir", default=CACHE, help="where sets go (%(default)s)")
    parser.add_argument("--tokenizer", choices=("gpt2", "char"), help="of your own text")
    parser.add_argument("--size", type=int, default=32, help="pixels per side of your own pictures")
    c = parser.parse_args(argv)
    if c.name not in {**IMAGES, **TEXTS} and not c.source:
        raise UserError(f"{not_one_of(c.name, [*IMAGES, *TEXTS])} (your own needs --source)")
    if (folder := Path(c.data_dir) / c.name).exists():
        raise UserError(f"{folder} is there already: delete it to prepare it again")
    prepare(c.name, c.source, c.data_dir, c.tokenizer, c.size)


if __name__ == "__main__":
    cli(main)
