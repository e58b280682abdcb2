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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])      # in place of data/ itself

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from data import shapes
from data.tokenizer import CharTokenizer, GPT2Tokenizer, PRINTABLE, pydoc
from flags import CACHE, Parser, UserError, cli
from model import not_one_of

# ---- The sets, one row each. `hub` is what load_dataset takes -----------------------------------

@dataclass(frozen=True)
class ImageSet:
    size: int                       # pixels per side, as stored
    hub: dict | None = None         # None: drawn, or the user's own
    val: str = "test"               # the split that validates
    large: bool = False             # not prepared unasked


@dataclass(frozen=True)
class TextSet:
    hub: dict | None = None
    tokenizer: object = "gpt2"      # or "char", of the training text, or a tokenizer
    files: dict | None = None       # {split: pattern}, where the file names do not tell the split
    documents: object = itemgetter("text")     # of a split's rows; None: passages alone
    passages: bool = False          # whether evaluation scores the rows one by one
    one_text: bool = False          # all rows are one text, whose last tenth validates; else, where
    held_out: float = 0.01          # no file validates, this share of the documents does
    large: bool = False


def wikitext_articles(rows):
    """Titles stand between empty lines, formulas such as ` = 1 / s = ` do not."""
    whole = "".join(line or " \n" for line in rows["text"])     # the Hub's rows are lines
    return re.split(r"(?<=\n \n)(?= = [^=\n]+ = \n \n)", whole)


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
    "shakespeare": TextSet(SHAKESPEARE, one_text=True),
    "shakespeare_char": TextSet(SHAKESPEARE, "char", one_text=True),
    "pydoc": TextSet(tokenizer=CharTokenizer(PRINTABLE), one_text=True),
    # for zero-shot evaluation
    "wikitext": TextSet(dict(path="Salesforce/wikitext", name="wikitext-2-raw-v1"),
                        documents=wikitext_articles),
    "ptb": TextSet(dict(path="ptb-text-only/ptb_text_only", revision=CONVERTED),
                   documents=itemgetter("sentence")),
    "lambada": TextSet(dict(path="EleutherAI/lambada_openai", revision=CONVERTED,
                            data_files={"test": "default/test/*.parquet"}), passages=True),
    # common nouns and named entities
    "cbt": TextSet(dict(path="cam-cst/cbt"), files={"CN": "CN/validation*", "NE": "NE/validation*"},
                   documents=None, passages=True),
}
SPLITS = dict(train="train", validation="val", val="val", test="test")      # {theirs: ours}


# ---- Reading: {split: rows} by `datasets`, whose copies of a folder's files go into the draft ---

def read_rows(row, source, draft, **how):
    """The rows of a set on the Hub, or of the Parquet, .jsonl or .txt files in a folder."""
    from datasets import config, load_dataset
    from huggingface_hub import constants, utils

    if source is None:
        try:
            utils.get_session().head(constants.ENDPOINT, timeout=10)
        except Exception:       # no network; `datasets` would ask six times, in half a minute
            config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True     # what it has kept serves
        return load_dataset(**how | row.hub)
    for path in source.rglob("*-[0-9]*-of-[0-9]*.parquet"):     # train-00000-of-00002.parquet
        part, count = re.match(r"(.+-)\d+-of-(\d+)", path.name).groups()
        there = len(list(path.parent.glob(f"{part}*-of-{count}*")))
        if there != int(count):
            raise UserError(f"incomplete: there are {there} of {count} files such as {path.name}")
    kinds = {".parquet": "parquet", ".jsonl": "json", ".txt": "text"}
    suffix = next((suffix for suffix in kinds if any(source.rglob("*" + suffix))), None)
    if suffix is None:
        raise UserError(f"there is no .parquet, .jsonl or .txt file in {source}")
    if row.hub is None:
        how["data_files"] = own_texts(source, suffix)
    if suffix == ".txt":
        how |= dict(sample_by="document", encoding_errors="replace")
    how |= dict(data_dir=str(source), cache_dir=str(draft / "scratch"))
    sets = load_dataset(kinds[suffix], **how)
    if suffix != ".txt":
        return sets
    utf8 = sets.filter(lambda row: "\ufffd" not in row["text"])     # what replaces other bytes
    say_left_out("documents", sum(len(sets[k]) - len(utf8[k]) for k in sets), "no UTF-8")
    return utf8


def own_texts(source, suffix):
    """{split: files} of a user's own text: by the names of the files, or of the folders that hold
    them, where each is one of SPLITS; else every file is for training."""
    files = sorted(source.rglob("*" + suffix))
    names = [re.split(r"\.|-\d+-of-", path.relative_to(source).parts[0])[0] for path in files]
    say_left_out("files", sum(map(Path.is_file, source.rglob("*"))) - len(files), f"no {suffix}")
    if not {*names} <= SPLITS.keys():
        names = ["train"] * len(files)
    return {split: [str(path) for path, name in zip(files, names) if name == split]
            for split in names}


def own_pictures(source, draft):
    """The rows of a user's own pictures. Files lie by class: shuffled, as a run may take a part."""
    from datasets import load_dataset

    if {path.suffix for path in source.rglob("*.*")} <= {".txt", ".jsonl", ".parquet"}:
        raise UserError("DIR holds text: add --tokenizer=gpt2 or char")
    say_left_out("files", sum(path.is_file() for path in source.iterdir()), "in no CLASS")
    files = {"train": f"{source}/*/**"}
    if (source / "train").is_dir():
        files = {"train": f"{source}/train/**", "validation": f"{source}/val/**"}
    sets = hold_out(load_dataset("imagefolder", data_files=files, drop_labels=False,
                                 cache_dir=str(draft / "scratch")), 0.1)
    return dict(sets, train=sets["train"].shuffle(seed=2357))


def hold_out(sets, share):
    """This share of the rows validates, if all are for training."""
    if [*sets] != ["train"] or len(sets["train"]) == 1:
        return sets
    halves = sets["train"].train_test_split(share, seed=2357)
    return dict(train=halves["train"], validation=halves["test"])


def say_left_out(what, number, why):
    """One line for all that cannot be read."""
    if number:
        print(f"{number} {what} left out: {why}", file=sys.stderr)


# ---- Images: decoded by threads, in order -------------------------------------------------------

def read_picture(file, size):
    """(RGB array (size, size, 3), None), or (None, what is wrong with the file). The shorter side
    is resized (bicubic), the longer one rounded down; sides and crop are torchvision's."""
    try:
        image = ImageOps.exif_transpose(Image.open(file))       # upright
        if image.mode[0] in "IF":               # convert() would clip them at 255
            raise ValueError("16 or 32 bits a pixel")
        if image.has_transparency_data:         # on white: hidden colours are not meant to be seen
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        width, height = (side * size // min(image.size) for side in image.size)
        left, top = round((width - size) / 2), round((height - size) / 2)
        image = image.convert("RGB").resize((width, height), Image.BICUBIC)
        return np.asarray(image.crop((left, top, left + size, top + size))), None
    except Exception as error:      # a damaged file can make a decoder raise anything
        return None, " ".join(str(error).split()) or type(error).__name__


def readable(rows, column, label, size, problems):
    """Yields (pixels, label) in order. What is wrong with the other files goes into `problems`."""
    def read(cell):
        file = io.BytesIO(cell["bytes"]) if cell["bytes"] else cell["path"]
        pixels, problem = read_picture(file, size)
        return pixels, problem and f"{cell['path']} ({problem})"

    with ThreadPoolExecutor() as pool:
        for batch in rows.iter(512):
            for number, (pixels, problem) in zip(batch[label], pool.map(read, batch[column])):
                if problem:
                    problems.append(problem)
                else:
                    yield pixels, number


def write_images(name, size, source, draft):
    """Writes the pictures and labels of both splits; returns what meta.json says of them."""
    from datasets import Image as ImageColumn

    row, problems = IMAGES.get(name, ImageSet(size, val="validation")), []
    sets = read_rows(row, source, draft, streaming=True) if row.hub else own_pictures(source, draft)
    features = sets["train"].features
    column = "img" if "img" in features else "image"
    label = next(key for key in ("label", "labels", "fine_label") if key in features)
    classes = getattr(features[label], "names", None)
    for split, part in (("train", "train"), ("val", row.val)):
        rows, labels = sets[part].cast_column(column, ImageColumn(decode=False)), []
        pictures = readable(rows, column, label, row.size, problems)
        with open(draft / f"{split}_images.npy", "wb") as out:
            out.seek(128)           # the header comes last: not every picture can be read
            for pixels, number in tqdm(pictures, f"{name} {split}", disable=None):
                out.write(pixels.tobytes())
                labels.append(number)
            shape = (len(labels), row.size, row.size, 3)
            out.seek(0)
            np.lib.format.write_array_header_1_0(
                out, dict(descr="|u1", fortran_order=False, shape=shape))
        if not labels:
            raise UserError(f"no picture of {part} can be read: {', '.join(problems[:3])}")
        np.save(draft / f"{split}_labels.npy", np.array(labels, np.int64))
        classes = classes or [str(i) for i in range(max(labels) + 1)]
    if len(classes) < 2:
        raise UserError("there is one class alone; pictures lie in DIR/CLASS/FILE")
    say_left_out("pictures", len(problems), ", ".join(problems[:3]) + ", ..." * (len(problems) > 3))
    return image_meta(classes, draft)


def write_shapes(name, counts, draft):
    """Draws `shapes` or `camouflage`; returns what meta.json says of them."""
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


# ---- Text: encoded by tiktoken's threads, in order ----------------------------------------------

def write_text(name, tokenizer, source, draft):
    """Writes the tokens of all splits, and passages; returns what meta.json says of them."""
    row, sets = TEXTS.get(name, TextSet()), dict(train=dict(text=[pydoc()]))
    if name != "pydoc":
        sets = read_rows(row, source, draft, data_files=row.files)
    if row.passages:
        lines = [json.dumps(dict(one, task=task)) + "\n" for task in sets for one in sets[task]]
        (draft / f"{name}.jsonl").write_text("".join(lines))
    if not row.one_text:
        sets = hold_out(sets, row.held_out)
    parts = {SPLITS[split]: row.documents(sets[split]) for split in sets if row.documents}
    one_text = row.one_text or [*parts] == ["train"]        # a single document
    if one_text:
        whole = "".join(document for part in parts.values() for document in part)
        cut = int(0.9 * len(whole))
        parts = dict(train=[whole[:cut]], val=[whole[cut:]])

    tokenizer = tokenizer or row.tokenizer
    if tokenizer == "char":
        tokenizer = CharTokenizer("".join(sorted(set().union(*parts["train"]))))
    elif tokenizer == "gpt2":
        tokenizer = GPT2Tokenizer()
    end = [] if one_text or tokenizer.eot is None else [tokenizer.eot]
    tokens = {}
    for split, documents in parts.items():
        with open(draft / f"{split}.bin", "wb") as out:
            # 64 at once: they may be books, and memory holds their tokens
            for start in tqdm(range(0, len(documents), 64), f"{name} {split}", disable=None):
                for ids in tokenizer.encode_batch(documents[start:start + 64]):
                    out.write(np.array([*ids, *end], np.uint16))
            tokens[split] = out.tell() // 2
    return dict(kind="text", tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab, tokens=tokens)


# ---- Preparing and opening ----------------------------------------------------------------------

def how_to(name, cache):
    """Both ways to a set, for messages."""
    row = IMAGES.get(name) or TEXTS.get(name)
    command = f"python data/prepare.py {name} --data_dir={cache}"
    if row is None or row.hub is None:
        return f"{command} --source DIR, where DIR has its files"
    return (f"{command} with a network, or --source DIR with the files of huggingface.co/datasets/"
            f"{row.hub['path']}")


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
        print(f"{name}: preparing it, once ...", file=sys.stderr, flush=True)
        shutil.rmtree(draft, ignore_errors=True)        # left by a run that was killed
        draft.mkdir()
        try:
            source = Path(source).resolve(strict=True) if source else None
            if name in TEXTS or tokenizer:
                meta = write_text(name, tokenizer, source, draft)
            elif name in ("shapes", "camouflage"):
                meta = write_shapes(name, drawn, draft)
            else:
                meta = write_images(name, size, source, draft)
            (draft / "meta.json").write_text(json.dumps(dict(name=name, **meta), indent=1))
            shutil.rmtree(draft / "scratch", ignore_errors=True)        # of `datasets`
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
    parser = Parser(prog="prepare.py", description=__doc__,
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
