"""Prepares a data set: reads it with `datasets`, writes plain memory-mapped files to data/cache.

    python data/prepare.py cifar10                  from the Hugging Face Hub
    python data/prepare.py cifar10 --source DIR     from the same files in DIR, without a network
    python data/prepare.py mine --source DIR --size=64
                                                    your pictures, DIR/CLASS/FILE, of which a tenth
                                                    validates, or DIR/{train,val}/CLASS/FILE
    python data/prepare.py mine --source DIR --tokenizer=gpt2
                                                    your text: Parquet, .jsonl (rows with `text`),
                                                    .txt files (a document each); or char

The set NAME is then data/cache/NAME, a folder that appears whole or not at all, with meta.json and

    {train,val}_images.npy, _labels.npy     uint8 (N, H, W, 3), int64 (N,)
    {train,val}_masks.npy                   uint8 (N, H, W), 1 on the object (drawn sets only)
    {train,val,test}.bin, NAME.jsonl        uint16 tokens; passages that are scored one by one

GPT-2's end-of-text token follows each document. Pictures of large sets have their shorter side at
256 px, and the middle is kept. Disk, about: imagenet 262 GB, streamed from the Hub or DIR;
openwebtext 54 GB in the cache of `datasets` (HF_HOME) and 18 GB written.
"""
import argparse
import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])      # in place of data/ itself

import numpy as np
from tqdm import tqdm

from data import images, text
from flags import UserError, cli
from model import not_one_of

# -------------------------------------------------------------------------------------------------
# The sets, a row each. `hub` is what load_dataset takes; a large set is not prepared unasked
# -------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ImageSet:
    classes: int
    size: int                   # pixels a side, as stored
    hub: dict | None = None
    val: str = "test"           # the split that validates
    large: bool = False


@dataclass(frozen=True)
class TextSet:
    hub: dict | None = None
    tokenizer: str = "gpt2"
    documents: object = None    # texts -> documents, where the rows are not the documents
    passage: object = None      # (row, part) -> passage, of a set that is scored one by one
    parts: tuple = ()           # the folders that count, if not all do
    by_position: bool = False   # the last tenth of the characters validates;
    held_out: float = 0.01      # else, where no file does, this share of the documents
    large: bool = False


def wikitext_articles(texts):
    """Titles stand between empty lines, formulas such as ` = 1 / s = ` do not."""
    whole = "".join(line or " \n" for line in texts)        # the Hub's rows are lines
    return re.split(r"(?<=\n \n)(?= = [^=\n]+ = \n \n)", whole)


def ptb_sentences(texts):
    return [line.strip() for words in texts for line in words.splitlines() if line.strip()]


def cbt_passage(row, part):
    """Common nouns (CN) or named entities (NE); XXXXX where an option belongs."""
    context, question, answer = " ".join(row["sentences"]), row["question"], row["answer"]
    return dict(task=part, context=context, question=question, options=row["options"],
                answer=answer, text=f"{context} {question.replace('XXXXX', answer)}")


IMAGES = {
    "shapes": ImageSet(10, 32),
    "camouflage": ImageSet(10, 32),
    "cifar10": ImageSet(10, 32, dict(path="uoft-cs/cifar10")),
    "cifar100": ImageSet(100, 32, dict(path="uoft-cs/cifar100")),
    "flowers102": ImageSet(102, 256, dict(path="dpdl-benchmark/oxford_flowers102")),
    "pets": ImageSet(37, 256, dict(path="timm/oxford-iiit-pet")),
    # the labels of its test split are not public; its terms ask for `hf auth login`
    "imagenet": ImageSet(1000, 256, dict(path="ILSVRC/imagenet-1k"), "validation", large=True),
}
CONVERTED = "refs/convert/parquet"      # the Hub's own conversion of what has only a script
SHAKESPEARE = dict(path="karpathy/tiny_shakespeare", revision=CONVERTED)
TEXTS = {
    # the share is nanoGPT's, so that losses compare
    "openwebtext": TextSet(dict(path="Skylion007/openwebtext"), held_out=0.0005, large=True),
    "books": TextSet(large=True),
    "shakespeare": TextSet(SHAKESPEARE, by_position=True),
    "shakespeare_char": TextSet(SHAKESPEARE, "char", by_position=True),
    "pydoc": TextSet(tokenizer="char", by_position=True),
    # for zero-shot evaluation
    "wikitext": TextSet(dict(path="Salesforce/wikitext", name="wikitext-2-raw-v1"),
                        documents=wikitext_articles),
    "ptb": TextSet(dict(path="ptb-text-only/ptb_text_only", revision=CONVERTED),
                   documents=ptb_sentences),
    "lambada": TextSet(dict(path="EleutherAI/lambada_openai", revision=CONVERTED,
                            data_files={"test": "default/test/*.parquet"}),
                       passage=lambda row, part: dict(text=row["text"])),
    "cbt": TextSet(dict(path="cam-cst/cbt"), passage=cbt_passage, parts=("CN", "NE")),
}
DRAWN = ("shapes", "camouflage")
SPLITS = dict(train="train", val="val", valid="val", validation="val", test="test")


def report(name, left_out):
    """One line for all that could not be read."""
    if left_out:
        some = ", ".join(left_out[:3]) + ", ..." * (len(left_out) > 3)
        print(f"{name}: left out {len(left_out)} that cannot be read: {some}", file=sys.stderr)


# -------------------------------------------------------------------------------------------------
# Images: decoded by threads, in order
# -------------------------------------------------------------------------------------------------

def read_pictures(row, source, scratch):
    """{split: dataset} of the Hub, of Parquet files, or of the user's own folders of pictures."""
    from datasets import load_dataset

    if source is None:
        return load_dataset(**row.hub, streaming=True)
    if row.hub:
        return load_dataset("parquet", data_dir=str(source), streaming=True)
    splits = {path.name: f"{path}/**" for path in source.iterdir() if path.name in SPLITS}
    if "train" in splits:
        return load_dataset("imagefolder", data_files=splits, drop_labels=False, streaming=True)
    every = load_dataset("imagefolder", data_files=f"{source}/**", drop_labels=False,
                         cache_dir=scratch)["train"]
    train = [i for i in range(len(every)) if i % 10]
    return dict(train=every.select(train), val=every.select(range(0, len(every), 10)))


def write_images(name, size, source, workers, draft, scratch):
    """Writes the pictures and labels of both splits; returns the classes' names and the size."""
    from datasets import Image

    row = IMAGES.get(name, ImageSet(0, size))
    sets, left_out = read_pictures(row, source, scratch), []
    unseen = set() if row.hub else {str(path) for path in source.rglob("[!.]*") if path.is_file()}
    val = next((split for split in (row.val, *SPLITS) if split in sets and split != "train"), None)
    if "train" not in sets or val is None:
        raise UserError(f"only {' and '.join(sets)} is there, but train and {row.val} are needed")
    features = sets["train"].features
    column = "img" if "img" in features else "image"
    label = next(key for key in ("label", "labels", "fine_label") if key in features)
    classes = getattr(features[label], "names", None) or [str(i) for i in range(row.classes)]
    if len(classes) < 2 or len(classes) != (row.classes or len(classes)):
        raise UserError(f"there are {len(classes)} classes, not {row.classes or 'two or more'}")

    def read(cell):
        file = io.BytesIO(cell["bytes"]) if cell["bytes"] else cell["path"]
        return images.read_picture(file, row.size)

    for split, part in (("train", "train"), ("val", val)):
        rows, labels = sets[part].cast_column(column, Image(decode=False)), []
        with open(draft / f"{split}_images.npy", "wb") as out, ThreadPoolExecutor(workers) as pool:
            start = write_header(out, (0, row.size, row.size, 3))
            progress = tqdm(unit="img", desc=f"{name} {split}", disable=None)
            for batch in rows.iter(64 * workers):
                cells, numbers = batch[column], batch[label]
                for cell, number, (pixels, problem) in zip(cells, numbers, pool.map(read, cells)):
                    progress.update()
                    unseen.discard(cell["path"])
                    if problem:
                        left_out.append(f"{cell['path']} ({problem})")
                        continue
                    out.write(pixels.tobytes())
                    labels.append(number)
            # numpy pads the header, so that the true number of pictures takes the same place
            assert write_header(out, (len(labels), row.size, row.size, 3)) == start
        if not labels or min(labels) < 0 or max(labels) >= len(classes):
            raise UserError(f"{part} has {len(labels)} pictures that can be read, with labels "
                            f"{min(labels, default='')} to {max(labels, default='')}")
        np.save(draft / f"{split}_labels.npy", np.array(labels, np.int64))
    report(name, left_out + sorted(unseen))
    return classes, row.size


def write_header(out, shape):
    """Writes the header of a .npy file of bytes; returns where the bytes start."""
    out.seek(0)
    about = dict(descr="|u1", fortran_order=False, shape=shape)
    np.lib.format.write_array_header_1_0(out, about)
    return out.tell()


def write_shapes(name, counts, draft):
    """Draws `shapes` or `camouflage`; returns the classes' names and the size."""
    print(f"{name}: drawing {sum(counts):,} pictures, once", file=sys.stderr, flush=True)
    for seed, (split, n) in enumerate(zip(("train", "val"), counts)):
        hidden = images.CAMOUFLAGE[split] if name == "camouflage" else {}
        arrays = images.draw_shapes(n, seed, **hidden)
        for kind, array in zip(("images", "labels", "masks"), arrays):
            np.save(draft / f"{split}_{kind}.npy", array)
    return images.SHAPES, 32


def mean_std(pixels):
    """Per channel, of uint8 (N, H, W, 3) / 255, from exact integer sums."""
    total = squares = 0
    for start in range(0, len(pixels), 1000):
        part = pixels[start:start + 1000].reshape(-1, 3)
        total = total + part.sum(0, np.uint64)
        squares = squares + np.square(part, dtype=np.uint32).sum(0, np.uint64)
    count = pixels[..., 0].size
    mean = total / count
    return dict(mean=(mean / 255).tolist(), std=(np.sqrt(squares / count - mean**2) / 255).tolist())


# -------------------------------------------------------------------------------------------------
# Text: encoded by tiktoken's threads, in order
# -------------------------------------------------------------------------------------------------

def read_rows(row, source, scratch, workers):
    """{split: dataset} of the rows of tables, or of whole files, text None where it is no UTF-8."""
    from datasets import load_dataset

    where = dict(row.hub) if source is None else dict(cache_dir=scratch)
    if row.parts:
        where["data_files"] = {part: os.path.join(source or "", part, "validation*")
                               for part in row.parts}
    elif source and source.is_dir():
        where["data_dir"] = str(source)
    elif source:
        words = re.split("[^a-z]+", source.name.lower())
        where["data_files"] = {next((w for w in words if w in SPLITS), "train"): str(source)}
    if source is None:
        return load_dataset(**where, num_proc=workers if row.large else None)
    suffixes = {path.suffix for path in (source, *source.rglob("*"))}
    for suffix, builder in ((".parquet", "parquet"), (".jsonl", "json")):
        if suffix in suffixes:
            return load_dataset(builder, **where)

    def as_utf8(record):        # latin-1 has a character for every byte
        try:
            return dict(text=record["text"].encode("latin-1").decode())
        except UnicodeDecodeError:
            return dict(text=None)
    sets = load_dataset("text", sample_by="document", encoding="latin-1", **where)
    return sets.map(as_utf8, features=next(iter(sets.values())).features)


def documents_of(row, sets):
    """{split: documents} of {split: dataset}, and passages."""
    if row.passage:
        passages = [row.passage(record, part) for part in sets for record in sets[part]]
        split = SPLITS.get(next(iter(sets)), "val")
        return {split: [passage["text"] for passage in passages]}, passages
    names = next(iter(sets.values())).column_names
    column = next((each for each in ("text", "sentence") if each in names), None)
    if column is None:
        raise UserError(f"its columns are {', '.join(names)}, none is `text`")
    alone = [*sets] == ["train"] and len(sets["train"]) > 1
    if alone and not (row.by_position or row.documents):
        halves = sets["train"].train_test_split(row.held_out, seed=2357)
        sets = dict(train=halves["train"], val=halves["test"])
    parts = {SPLITS[split]: sets[split][column] for split in SPLITS if split in sets}
    return {k: row.documents(v) if row.documents else v for k, v in parts.items()}, None


def write_text(name, tokenizer, source, workers, draft, scratch):
    """Writes the tokens of all splits; returns what meta.json says of them."""
    row, passages, left_out = TEXTS.get(name, TextSet()), None, []
    tokenizer = tokenizer or row.tokenizer
    if name == "pydoc":
        parts = dict(train=[text.pydoc()])
    else:
        parts, passages = documents_of(row, read_rows(row, source, scratch, workers))
    one = row.by_position or [*parts] == ["train"]      # document, cut by position
    if one:
        whole = "".join(words for part in parts.values() for words in part)
        parts = dict(train=[whole[:int(0.9 * len(whole))]], val=[whole[int(0.9 * len(whole)):]])
    if tokenizer == "char":
        characters = set().union(*(words or "" for words in parts.get("train", [])))
        tokenizer = text.CharTokenizer(
            text.PRINTABLE if name == "pydoc" else "".join(sorted(characters)))
    tokenizer = text.GPT2Tokenizer() if tokenizer == "gpt2" else tokenizer
    end = [] if one or tokenizer.eot is None else [tokenizer.eot]

    tokens, documents = {}, {}
    for split, texts in parts.items():
        progress = tqdm(texts, f"{name} {split}", unit="doc", disable=None)
        tokens[split] = documents[split] = 0
        with open(draft / f"{split}.bin", "wb") as out:
            for batch in batches(progress):
                for ids in tokenizer.encode_batch(batch, workers):
                    out.write(np.array([*ids, *end], np.uint16))
                    tokens[split] += len(ids) + len(end)
                documents[split] += len(batch)
        if tokens[split] < 2:
            raise UserError(f"there is no text for {split}")
        if missing := len(texts) - documents[split]:
            left_out += [f"a document of {split} (no UTF-8)"] * missing
    report(name, left_out)
    if passages:
        lines = [json.dumps(passage) + "\n" for passage in passages]
        (draft / f"{name}.jsonl").write_text("".join(lines))
    return dict(tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab, eot=tokenizer.eot,
                tokens=tokens, documents=documents)


def batches(texts, size=1 << 22):
    """Lists of texts of about `size` characters: memory holds the tokens of one."""
    batch, length = [], 0
    for words in texts:
        if words is not None:
            batch.append(words)
            length += len(words)
        if length > size:
            yield batch
            batch, length = [], 0
    yield batch


# -------------------------------------------------------------------------------------------------
# Preparing and opening
# -------------------------------------------------------------------------------------------------

def how_to(name, cache):
    """Both ways to a set, for messages."""
    row = IMAGES.get(name) or TEXTS.get(name) or TextSet()
    command = f"python data/prepare.py {name}"
    if Path(cache) != images.CACHE:
        command += f" --data_dir={cache}"
    if not row.hub:
        return f"{command} --source DIR, where DIR has its files"
    page = f"https://huggingface.co/datasets/{row.hub['path']}"
    return f"{command} with a network, or --source DIR where DIR has the files of {page}"


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
        raise UserError(f"{name}: {type(cause).__name__}: {reason}; {advice}") from error


@contextlib.contextmanager
def whole_or_not_at_all(name, cache, overwrite):
    """Yields an empty folder, renamed to cache/NAME at the end; None if NAME is there already.

    One process prepares a set at a time: others wait, and then find it."""
    if Path(name).name != name or name.startswith("."):
        raise UserError(f"this cannot name a folder in {cache}")
    folder, draft = cache / name, cache / f".{name}.draft"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists() and not overwrite:
            yield None
            return
        shutil.rmtree(draft, ignore_errors=True)        # left by a run that was killed
        draft.mkdir()
        try:
            yield draft
            for path in (*draft.iterdir(), draft):      # a power cut leaves whole files, or no set
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def prepare(name, source=None, cache=images.CACHE, tokenizer=None, size=32, workers=None,
            overwrite=False, drawn=(10_000, 2_000)):
    """Writes cache/NAME, if it is not there. A set of the user's own is text if it has a tokenizer
    ("gpt2", "char" or an object); `drawn` are the pictures of a drawn set."""
    workers, source = workers or os.cpu_count(), Path(source).resolve() if source else None
    with (one_line(name, how_to(name, cache)),
          whole_or_not_at_all(name, Path(cache), overwrite) as draft):
        if draft is None:
            return
        if source:
            check_complete(source)
        with tempfile.TemporaryDirectory(dir=draft) as scratch:     # of `datasets`
            places = source, workers, draft, scratch
            if name in TEXTS or name not in IMAGES and tokenizer:
                meta = dict(kind="text", **write_text(name, tokenizer, *places))
                what = " and ".join(f"{n:,} {split}" for split, n in meta["tokens"].items())
                what += " tokens"
            else:
                classes, size = (write_shapes(name, drawn, draft) if name in DRAWN
                                 else write_images(name, size, *places))
                train = np.load(draft / "train_images.npy", "r")
                meta = dict(kind="images", classes=list(classes), image_size=size,
                            **mean_std(train))
                what = f"{len(train):,} pictures to train on, with --image_size={size} or less"
        (draft / "meta.json").write_text(json.dumps(dict(name=name, **meta), indent=1))
    print(f"{name}: {what}, in {Path(cache) / name}", file=sys.stderr)


def check_complete(source):
    """Raises UserError for a folder that has train-00000-of-00002.parquet without the other."""
    if not source.exists():
        raise UserError(f"--source={source} does not exist")
    shards = Counter(re.sub(r"-\d+-of-", "-*-of-", str(path)) for path in source.rglob("*-of-*"))
    for pattern, count in shards.items():
        if (of := re.search(r"-\*-of-(\d+)", pattern)) and count != int(of[1]):
            raise UserError(f"incomplete: there are {count} of {pattern}")


@contextlib.contextmanager
def opened(name, kind, cache):
    """The folder and the meta.json of a prepared set; a small one that is missing is prepared."""
    folder, sets = Path(cache) / name, dict(images=IMAGES, text=TEXTS)[kind]
    if not folder.exists():
        if name not in sets:
            own = [path.parent.name for path in Path(cache).glob("[!.]*/meta.json")
                   if f'"kind": "{kind}"' in path.read_text()]
            raise UserError(f"--data: {not_one_of(name, dict.fromkeys([*sets, *own]))}")
        if sets[name].large:
            raise UserError(f"{name} is not prepared ({folder} is missing): {how_to(name, cache)}")
        prepare(name, cache=cache)
    with one_line(name, f"prepare it again: python data/prepare.py {name} --overwrite"):
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["kind"] != kind:
            raise UserError(f"this is a set of {meta['kind']}, not of {kind}")
        yield folder, meta


def main(argv):
    """Prepares one set."""
    known = f"images: {', '.join(IMAGES)}\ntext: {', '.join(TEXTS)}"
    parser = argparse.ArgumentParser(prog="prepare.py", description=__doc__, epilog=known,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--source", metavar="DIR", help="where the files are, instead of the Hub")
    parser.add_argument("--data_dir", default=images.CACHE, help="where sets go (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="prepare again what is there")
    parser.add_argument("--tokenizer", choices=("gpt2", "char"), help="of your own text")
    parser.add_argument("--size", type=int, default=32, help="pixels a side of your own pictures")
    parser.add_argument("--workers", type=int, help="threads (default: one a core)")
    c = parser.parse_args(argv)
    if c.name not in {**IMAGES, **TEXTS} and not c.source:
        raise UserError(f"{not_one_of(c.name, [*IMAGES, *TEXTS])} (your own needs --source)")
    if (Path(c.data_dir) / c.name).exists() and not c.overwrite:
        print(f"{c.name} is there already: --overwrite prepares it again")
    prepare(c.name, c.source, c.data_dir, c.tokenizer, c.size, c.workers, c.overwrite)


if __name__ == "__main__":
    cli(main)
