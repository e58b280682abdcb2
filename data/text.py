"""Text: tokenizers, preparation of token files, batches, masking, and two long-range tasks that need no download.

A prepared set is a folder data/cache/NAME with

    train.bin, val.bin, test.bin   uint16 tokens, memory-mapped (a set that is only evaluated has no train.bin)
    lambada.jsonl, cbt.jsonl       the passages, for the two sets that are scored by passage
    meta.json                      the tokenizer, counts and checksums

    openwebtext                    8,013,769 documents; 0.05 % of them validate, drawn with nanoGPT's seed
    books                          Parquet with a column `text`, one book a row; only with --source
    shakespeare, shakespeare_char  GPT-2 BPE and characters; the last 10 % of the text validates
    pydoc                          Python's own help topics, characters; needs no download
    wikitext, ptb, lambada, cbt    for zero-shot evaluation
    any other name                 a folder of .txt, .jsonl or Parquet files, with --source and --tokenizer

GPT-2's end-of-text token (50256) follows each document: a row, a .txt file, an article of WikiText, a sentence of PTB
(which marks nothing larger), a passage of LAMBADA or CBT. Character tokenizers have no such token, and a source that is
one single document gets none: it is split by position.
"""

import contextlib
import fnmatch
import functools
import itertools
import json
import os
import random
import re
import statistics
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import images
from data.images import DataError

SPLITS = ("train", "val", "test")
SPLIT_WORDS = {"val": "val", "valid": "val", "validation": "val", "test": "test"}
PARQUET, LINES, PLAIN = {".parquet"}, {".jsonl"}, {".txt", ".raw", ".tokens"}

# Where the Hub keeps each set: (repository, revision, files), tried in order. Some repositories have only a script on
# main, which `datasets` no longer runs; the Hub's own conversion to Parquet is on refs/convert/parquet. A folder
# `partial-train` there holds only the first 5 GB of a large set, so `train/` is asked for by name.
HUB = {
    "openwebtext": [
        ("Skylion007/openwebtext", "main", ["plain_text/*.parquet", "data/*.parquet"]),
        ("Skylion007/openwebtext", "refs/convert/parquet", ["plain_text/train/*.parquet"]),
        ("Skylion007/openwebtext", "refs/pr/20", ["data/*.parquet"]),  # the author's own conversion, 80 files
    ],
    "shakespeare": [
        ("karpathy/tiny_shakespeare", "refs/convert/parquet", ["default/*/*.parquet"]),
        ("karpathy/tiny_shakespeare", "main", ["*.parquet"]),
    ],
    # WikiText-2 and WikiText-103 have the same validation and test text.
    "wikitext": [("Salesforce/wikitext", "main", ["wikitext-2-raw-v1/test*", "wikitext-2-raw-v1/validation*"])],
    "lambada": [
        ("EleutherAI/lambada_openai", "879e19a2c9bb7ef03f9cf962089cf7d008f91e27", ["data/lambada_test.jsonl"]),
        ("EleutherAI/lambada_openai", "refs/convert/parquet", ["default/test/*.parquet"]),
    ],
    "ptb": [("ptb-text-only/ptb_text_only", "refs/convert/parquet", ["penn_treebank/*/*.parquet"])],
    "cbt": [
        ("cam-cst/cbt", "main", ["CN/validation*", "NE/validation*"]),
        ("cam-cst/cbt", "refs/convert/parquet", ["CN/validation/*.parquet", "NE/validation/*.parquet"]),
    ],
}
HUB["shakespeare_char"] = HUB["shakespeare"]
SOURCE = {
    "openwebtext": "Parquet files with a column `text`",
    "books": "train.parquet and validation.parquet with a column `text`",
    "shakespeare": "input.txt",
    "shakespeare_char": "input.txt",
    "wikitext": "test.txt and valid.txt",
    "lambada": "test.jsonl with {\"text\": ...}",
    "ptb": "ptb.test.txt and ptb.valid.txt",
    "cbt": "the Hub's CN/validation*.parquet and NE/validation*.parquet",
}
NAMES = (*SOURCE, "pydoc")
CHARACTERS = ("pydoc", "shakespeare_char")  # the others default to GPT-2's tokens
LARGE = ("openwebtext", "books")  # the others are prepared on first use
OPENWEBTEXT_DOCUMENTS = 8_013_769


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers

PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))


class CharTokenizer:
    """One id for each character of `characters`, in that order, and one more (the last) for every other character."""

    eot = None

    def __init__(self, characters):
        self.characters = characters
        self.n_vocab = len(characters) + 1
        _check_uint16(self.n_vocab)
        self.table = np.full(0x110000, len(characters), dtype=np.uint16)
        self.table[[ord(character) for character in characters]] = np.arange(len(characters))

    def encode(self, text):
        """str -> uint16 array (number of characters,)."""
        return self.table[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)]

    def decode(self, ids):
        """ids -> str; the last id, and any id beyond the vocabulary, as U+FFFD."""
        return "".join(self.characters[i] if i < len(self.characters) else "\ufffd" for i in map(int, ids))

    def meta(self):
        return {"kind": "char", "characters": self.characters}


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding (50257 ids) by tiktoken, or another `tiktoken.Encoding` in its place.

    Raises DataError if tiktoken's files are neither cached nor within reach.
    """

    def __init__(self, encoding=None):
        self.encoding = encoding or _gpt2_encoding()
        self.n_vocab = self.encoding.n_vocab
        self.eot = self.encoding.eot_token
        _check_uint16(self.n_vocab)

    def encode(self, text):
        """str -> uint16 array; text that looks like a special token is encoded as text."""
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except UnicodeEncodeError:  # half a surrogate pair, which encode_ordinary replaces
            return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids):
        """ids -> str; bytes that are not UTF-8, and ids of the padded vocabulary that stand for nothing, as U+FFFD."""
        piece = self.encoding.decode_single_token_bytes
        data = b"".join(piece(i) if i < self.n_vocab else b"\xef\xbf\xbd" for i in map(int, ids))
        return data.decode("utf-8", errors="replace")

    def meta(self):
        return {"kind": "gpt2"}


def tokenizer_from_meta(meta, encoding=None):
    """The tokenizer that a meta.json (or a checkpoint's copy of it) describes. `encoding` stands in for GPT-2's."""
    described = meta.get("tokenizer") or {}
    if described.get("kind") == "char":
        tokenizer = CharTokenizer(described["characters"])
    elif described.get("kind") == "gpt2":
        tokenizer = GPT2Tokenizer(encoding)
    else:
        raise DataError(f"unknown tokenizer {described.get('kind')!r} in the description of {meta.get('name')}: "
                        "it must be char or gpt2; prepare the set again")
    if tokenizer.n_vocab != meta.get("n_vocab", tokenizer.n_vocab):
        raise DataError(f"{meta.get('name')} was prepared with {meta['n_vocab']} tokens, its tokenizer has "
                        f"{tokenizer.n_vocab}: prepare the set again")
    return tokenizer


def _gpt2_encoding():
    import tiktoken

    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # requests' exceptions are OSErrors; a damaged file is a ValueError
        raise DataError("GPT-2's BPE files are neither in tiktoken's cache nor within reach: connect once, or set "
                        f"TIKTOKEN_CACHE_DIR to a folder that has them ({type(error).__name__})") from None


def _check_uint16(n_vocab):
    if n_vocab > 2**16:
        raise DataError(f"the vocabulary has {n_vocab} tokens, token files hold at most {2**16} (uint16)")


# ----------------------------------------------------------------------------------------------------------------------
# Reading: a source as a stream of (text, end)


def _source_files(source):
    """The folder (or the one file) the user names, as (root, files sorted by path). Raises DataError if it has none."""
    source = Path(source)
    if not source.exists():
        raise DataError(f"--source {source} does not exist")
    files = [source] if source.is_file() else sorted(file for file in source.rglob("*") if file.is_file())
    files = [file for file in files if file.suffix in PARQUET | LINES | PLAIN]
    if not files:
        raise DataError(f"--source {source} has no .parquet, .jsonl or .txt file")
    return source.parent if source.is_file() else source, files


def _hub_files(name):
    """A set's files, downloaded to the Hub's own cache, as (root, files sorted by path)."""
    from huggingface_hub import errors, snapshot_download  # comes with `datasets`, which would copy all to Arrow first

    tried = []
    for repository, revision, patterns in HUB.get(name, []):
        tried.append(f"{repository}@{revision}")
        try:
            root = Path(snapshot_download(repository, repo_type="dataset", revision=revision, allow_patterns=patterns))
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            continue
        except Exception as error:  # the client passes on whatever its HTTP library raises
            raise DataError(f"{name}: the download of {tried[-1]} failed ({_first_line(error)}); "
                            f"{how_to_get(name)}") from None
        files = sorted(file for file in root.rglob("*") if file.is_file()
                       and any(fnmatch.fnmatch(file.relative_to(root).as_posix(), pattern) for pattern in patterns))
        if files:
            return root, files
    where = f"has moved on the Hub (it is not in {', '.join(tried)})" if tried else "is not on the Hub"
    raise DataError(f"{name} {where}; {how_to_get(name)}")


def how_to_get(name):
    """The ways to a text set, for an error message."""
    command = f"python data/prepare.py {name}"
    source = f"{command} --source DIR, where DIR has {SOURCE.get(name, '.txt, .jsonl or Parquet files')}"
    if name == "pydoc":
        return f"run: {command}"
    if name in HUB:
        return f"with a network run: {command}; without one run: {source}"
    return f"run: {source}" + ("" if name in SOURCE else ", and --tokenizer=gpt2 or --tokenizer=char")


def _split(file, root):
    """train, val or test, by the words in a file's path below `root`: wiki.valid.raw, plain_text/train/0000.parquet."""
    words = re.split(r"[^a-z]+", file.relative_to(root).as_posix().lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "train")


def _parquet(file):
    """An open Parquet file and the name of its column of text."""
    import pyarrow.parquet as pq

    parquet = pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)  # reads a row group piece by piece
    names = parquet.schema_arrow.names
    for column in ("text", "sentence"):  # PTB's is `sentence`
        if column in names:
            return parquet, column
    raise ValueError(f"its columns are {', '.join(names)}, none is `text`")


def _read_parquet(file):
    parquet, column = _parquet(file)
    for rows in parquet.iter_batches(batch_size=32, columns=[column]):
        for text in rows.column(0).to_pylist():
            yield text or "", True


def _read_lines(file):
    with open(file, encoding="utf-8") as stream:
        for line in filter(str.strip, stream):
            yield json.loads(line)["text"], True


def _read_plain(file, size=1 << 20):
    """One document in pieces of about `size` characters. A piece ends after a single line break between two words:
    GPT-2's pattern always splits there, so the tokens are those of the whole text."""
    text = ""
    with open(file, encoding="utf-8") as stream:
        while more := stream.read(size):
            text += more
            if cut := re.match(r"(?s).*\S\n(?=\S)", text):
                yield text[:cut.end()], False
                text = text[cut.end():]
    yield text, True


def _read(file):
    """(text, end) of a file: documents, long ones in pieces; `end` says that the document ends here."""
    reader = _read_parquet if file.suffix in PARQUET else _read_lines if file.suffix in LINES else _read_plain
    with _reading(file):
        for text, end in reader(file):
            if not isinstance(text, str):
                raise ValueError("`text` is not a string")
            yield text, end


@contextlib.contextmanager
def _reading(file):
    try:
        yield
    except KeyError as error:
        raise DataError(f"cannot read {file}: no {error} in it") from None
    except (ValueError, TypeError, OSError) as error:  # not UTF-8, not JSON, not Parquet, not readable
        raise DataError(f"cannot read {file}: {_first_line(error)}") from None


def _first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


def _whole(file):
    return "".join(text for text, _ in _read(file))


def _wikitext_articles(file):
    # The Hub's rows are lines, with the empty ones (` \n` in the files) stripped.
    text = "".join(row or " \n" for row, _ in _read(file)) if file.suffix in PARQUET else _whole(file)
    # Titles stand between empty lines, formulas such as ` = 1 / s = ` do not: 60 articles validate, 60 test.
    return re.split(r"(?<=\n \n)(?= = [^=\n]+ = \n \n)", text)


def _ptb_sentences(file):
    rows = _whole(file).splitlines() if file.suffix in PLAIN else [row for row, _ in _read(file)]
    return [row.strip() for row in rows if row.strip()]


def _cbt_passages(file):
    """{"task", "context", "question", "options", "answer"}: the question has XXXXX where an option belongs."""
    import pyarrow.parquet as pq

    with _reading(file):
        rows = pq.read_table(file, columns=["sentences", "question", "options", "answer"]).to_pylist()
    return [{"task": _cbt_task(file), "context": " ".join(row["sentences"]), "question": row["question"],
             "options": row["options"], "answer": row["answer"]} for row in rows]


def _cbt_task(file):
    """CN (common nouns) or NE (named entities), by the folder; None for what is not evaluated."""
    return next((part for part in reversed(file.parts) if part in ("CN", "NE")), None)


def _passages(name, files, root):
    """The passages of lambada (test) or cbt (validation) as dictionaries, and each as one text."""
    if name == "lambada":
        files = [file for file in files if _split(file, root) == "test"] or files
        passages = [{"text": text} for file in files for text, _ in _read(file)]
        return passages, [passage["text"] for passage in passages]
    files = [file for file in files if _split(file, root) == "val" and _cbt_task(file)]
    passages = [passage for file in files for passage in _cbt_passages(file)]
    return passages, [f"{p['context']} {p['question'].replace('XXXXX', p['answer'])}" for p in passages]


def _pydoc():
    from pydoc_data.topics import topics
    return "\n".join(topics[name] for name in sorted(topics))


# ----------------------------------------------------------------------------------------------------------------------
# Splits


def validation_rows(n, fraction):
    """Which of n documents validate: the boolean (n,) of `Dataset.train_test_split(test_size=fraction, seed=2357)`."""
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(2357).permutation(n)[:int(np.ceil(fraction * n))]] = True
    return chosen


def _by_position(read):
    """The first 90 % of the characters train, the rest validates, as in nanoGPT. `read()` gives (text, end)."""
    left = int(0.9 * sum(len(text) for text, _ in read()))
    for text, _ in read():
        if text[:left]:
            yield "train", text[:left], False
        if text[left:]:
            yield "val", text[left:], False
        left = max(0, left - len(text))


def _by_row(read, chosen):
    row = 0
    for text, end in read():
        yield "val" if chosen[row] else "train", text, end
        row += end


def _count_documents(file):
    if file.suffix in PARQUET:
        with _reading(file):
            return _parquet(file)[0].metadata.num_rows
    return sum(1 for _ in _read(file)) if file.suffix in LINES else 1


def _pieces(name, files, root):
    """(split, text, end) of a whole set, in order, read as a stream."""
    if name == "pydoc":
        return _by_position(lambda: [(_pydoc(), True)])
    by_split = {split: [file for file in files if _split(file, root) == split] for split in SPLITS}

    def read(split):
        documents = {"wikitext": _wikitext_articles, "ptb": _ptb_sentences}.get(name)
        for file in by_split[split]:
            yield from ((text, True) for text in documents(file)) if documents else _read(file)

    if name in ("shakespeare", "shakespeare_char"):  # the Hub cuts it in three, in the order of the text
        return _by_position(lambda: (piece for split in SPLITS for piece in read(split)))
    if name in ("lambada", "cbt"):
        split = "test" if name == "lambada" else "val"
        return ((split, text, True) for text in _passages(name, files, root)[1])
    rest = ((split, text, end) for split in ("val", "test") for text, end in read(split))
    if by_split["val"] or not by_split["train"]:
        return itertools.chain((("train", text, end) for text, end in read("train")), rest)
    read_train = functools.partial(read, "train")
    if name in ("wikitext", "ptb"):
        n_documents = sum(1 for _ in read_train())
    else:
        n_documents = sum(map(_count_documents, by_split["train"]))
    if name == "openwebtext" and n_documents != OPENWEBTEXT_DOCUMENTS:
        print(f"openwebtext: {n_documents:,} documents, not {OPENWEBTEXT_DOCUMENTS:,}: "
              "its validation set is not nanoGPT's")
    if n_documents == 1:
        return itertools.chain(_by_position(read_train), rest)
    chosen = validation_rows(n_documents, 0.0005 if name == "openwebtext" else 0.01)
    return itertools.chain(_by_row(read_train, chosen), rest)


# ----------------------------------------------------------------------------------------------------------------------
# Writing token files, in parallel and in constant memory


def _chunks(pieces, size=1 << 18):
    """Lists of pieces, each list about `size` characters: small enough to share out, large enough to be worth it."""
    chunk, length = [], 0
    for piece in pieces:
        chunk.append(piece)
        length += len(piece[1])
        if length >= size:
            yield chunk
            chunk, length = [], 0
    if chunk:
        yield chunk


def _encode(tokenizer, chunk):
    """A chunk's tokens by split, with end-of-text after each document, and its size in bytes of UTF-8."""
    tokens, size = {}, 0
    for split, text, end in chunk:
        tokens.setdefault(split, []).append(tokenizer.encode(text))
        if end and tokenizer.eot is not None:
            tokens[split].append(np.array([tokenizer.eot], dtype=np.uint16))
        size += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return {split: np.concatenate(parts) for split, parts in tokens.items()}, size


def _in_order(pool, function, items, ahead):
    """pool.map with at most `ahead` results under way: Executor.map would read all of `items` first."""
    waiting = deque()
    for item in items:
        waiting.append((item, pool.submit(function, item)))
        if len(waiting) >= ahead:
            item, result = waiting.popleft()
            yield item, result.result()
    while waiting:
        item, result = waiting.popleft()
        yield item, result.result()


def write_tokens(folder, pieces, tokenizer, workers, total_bytes=None, desc=None):
    """Streams (split, text, end) to folder/SPLIT.bin; returns tokens and documents by split, bytes, and a sample.

    Threads are enough: tiktoken works outside Python's lock. In memory are at most 2 * workers chunks of 256k
    characters (or one longer document each) and the sample, 16 MB of text for `tokenizer_rate`.
    """
    tokens, documents, n_bytes, sample = Counter(), Counter(), 0, []
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        bar = stack.enter_context(tqdm(total=total_bytes, desc=desc, unit="B", unit_scale=True, disable=None))
        files = {}
        encode = functools.partial(_encode, tokenizer)
        for chunk, (encoded, size) in _in_order(pool, encode, _chunks(pieces), 2 * workers):
            for split, ids in encoded.items():
                if split not in files:
                    files[split] = stack.enter_context(open(Path(folder) / f"{split}.bin", "wb"))
                files[split].write(ids)
                tokens[split] += len(ids)
            documents.update(split for split, _, end in chunk if end)
            if n_bytes < 16e6:
                sample.extend(text for _, text, _ in chunk)
            n_bytes += size
            bar.update(size)
    return dict(tokens), dict(documents), n_bytes, sample


def tokenizer_rate(texts, encoding, workers):
    """MB/s of `encoding` (tiktoken's) alone on a list of texts: what `write_tokens` is measured against."""
    n_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    start = time.perf_counter()
    encoding.encode_ordinary_batch(texts, num_threads=workers)
    return n_bytes / 1e6 / (time.perf_counter() - start)


def _size(file):
    """Bytes of text in a file, nearly, for the progress bar."""
    if file.suffix not in PARQUET:
        return file.stat().st_size
    with _reading(file):
        parquet, text = _parquet(file)
    groups = [parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)]
    columns = [group.column(j) for group in groups for j in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text)


def prepare(name, source=None, cache=images.CACHE, tokenizer=None, workers=None, overwrite=False, verbose=True):
    """Writes cache/NAME: token files and meta.json, all or nothing; prints counts and rates. Raises DataError.

    `source` is a folder or a file; without it a set of HUB is downloaded. `tokenizer` is "gpt2", "char" (the characters
    of the training text) or a tokenizer object; the default is char for pydoc and shakespeare_char, else gpt2.
    `workers` threads tokenize (default: as many as there are processors).
    """
    if Path(name).name != name or name.startswith("."):
        raise DataError(f"{name!r} cannot name a data set: it becomes a folder in {cache}")
    if name == "shakespeare" and tokenizer == "char":
        name = "shakespeare_char"
    tokenizer = tokenizer or ("char" if name in CHARACTERS else "gpt2")
    if isinstance(tokenizer, str) and tokenizer not in ("gpt2", "char"):
        raise DataError(images.unknown("tokenizer", tokenizer, ["gpt2", "char"]))
    workers = workers if workers is not None else os.cpu_count() or 1
    if workers < 1:
        raise DataError(f"{workers} workers cannot work: give 1 or more")
    with images.preparing(name, cache, overwrite) as folder:
        if folder is None:
            load(name, cache, getattr(tokenizer, "encoding", None), allow_prepare=False)
            if verbose:
                print(f"{name} is already prepared in {Path(cache) / name} (--overwrite to do it again)")
            return
        root, files = (None, []) if name == "pydoc" else _source_files(source) if source else _hub_files(name)
        if tokenizer == "gpt2":
            tokenizer = GPT2Tokenizer()
        elif tokenizer == "char":
            tokenizer = CharTokenizer(PRINTABLE if name == "pydoc" else _characters(name, files, root))
        start = time.perf_counter()
        try:
            total = sum(map(_size, files)) if files and name != "cbt" else None
            pieces = _pieces(name, files, root)
            tokens, documents, n_bytes, sample = write_tokens(folder, pieces, tokenizer, workers, total, name)
            if name in ("lambada", "cbt"):
                lines = (json.dumps(passage) + "\n" for passage in _passages(name, files, root)[0])
                (folder / f"{name}.jsonl").write_text("".join(lines))
        except OSError as error:
            raise DataError(f"{name}: cannot write to {folder} ({error.strerror or error})") from None
        seconds = time.perf_counter() - start
        short = [split for split in tokens if tokens[split] < 2]
        if short or not tokens:
            raise DataError(f"{name}: the source has no text for {', '.join(short) or 'any split'}")
        images.write_meta(folder, name, "text", tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab,
                          eot=tokenizer.eot, tokens=tokens, documents=documents)
    if not verbose:
        return
    counts = ", ".join(f"{split} {tokens[split]:,} tokens" + (f" ({documents[split]:,} documents)" if documents else "")
                       for split in SPLITS if split in tokens)
    print(f"{name}: {counts}; {n_bytes / 1e6:.1f} MB in {seconds:.1f} s, {n_bytes / 1e6 / seconds:.1f} MB/s "
          f"with {workers} threads")
    if isinstance(tokenizer, GPT2Tokenizer) and n_bytes > 1e6:
        rate = tokenizer_rate(sample, tokenizer.encoding, workers)
        print(f"{name}: tiktoken alone, encode_ordinary_batch on {sum(map(len, sample)) / 1e6:.1f} MB of it with "
              f"{workers} threads: {rate:.1f} MB/s")


def _characters(name, files, root):
    """The characters of the training text, sorted, as one string."""
    characters = set()
    for split, text, _ in _pieces(name, files, root):
        if split == "train":
            characters.update(text)
    if not characters:
        raise DataError(f"{name} has no training text to take characters from: use --tokenizer=gpt2")
    return "".join(sorted(characters))


# ----------------------------------------------------------------------------------------------------------------------
# Reading prepared sets


@dataclass
class TextData:
    """A prepared text set; the splits it has are read-only memory maps, uint16 (number of tokens,)."""

    name: str
    tokenizer: CharTokenizer | GPT2Tokenizer
    train: np.ndarray | None
    val: np.ndarray | None
    test: np.ndarray | None
    meta: dict
    passages: list[dict] | None = None  # lambada: {"text"}; cbt: {"task", "context", "question", "options", "answer"}


def load(name, cache=images.CACHE, encoding=None, allow_prepare=True):
    """Opens a prepared text set and checks the size of its files and the range of their tokens.

    A missing set of a few MB (all of NAMES but openwebtext and books) is prepared on the spot if `allow_prepare`.
    `encoding` stands in for GPT-2's. Raises DataError.
    """
    folder = Path(cache) / name
    if not folder.exists():
        if name not in NAMES:
            raise DataError(f"{images.unknown('text set', name, list(NAMES))}; or {how_to_get(name)}")
        if name in LARGE or not allow_prepare:
            raise DataError(f"{name} is not prepared ({folder} is missing); {how_to_get(name)}")
        bpe = encoding and name not in CHARACTERS
        prepare(name, cache=cache, tokenizer=GPT2Tokenizer(encoding) if bpe else None, verbose=False)
    meta = images.read_meta(name, cache)
    if meta["kind"] == "images" and "classes" in meta:
        raise DataError(f"{name} is a set of pictures, not of text")
    again = f"prepare it again: python data/prepare.py {name} --overwrite"
    if meta["kind"] != "text" or not isinstance(meta.get("tokenizer"), dict):
        raise DataError(f"{name}: meta.json does not describe a text set; {again}")
    data = TextData(name, tokenizer_from_meta(meta, encoding), None, None, None, meta)
    for split in SPLITS:
        if f"{split}.bin" in meta["files"]:
            tokens = images.open_file(meta, f"{split}.bin", cache)
            largest = _largest(tokens)
            if largest >= data.tokenizer.n_vocab:
                raise DataError(f"{folder / split}.bin has token {largest}, allowed are 0 to "
                                f"{data.tokenizer.n_vocab - 1}; {again}")
            setattr(data, split, tokens)
    if f"{name}.jsonl" in meta["files"]:
        images.open_file(meta, f"{name}.jsonl", cache)
        try:
            data.passages = [json.loads(line) for line in (folder / f"{name}.jsonl").read_bytes().splitlines()]
        except ValueError:
            raise DataError(f"{folder / name}.jsonl is damaged (not JSON); {again}") from None
    return data


def _largest(tokens, block=1 << 16, blocks=512):
    """The largest token; of a file above 64 MB, in 512 blocks spread evenly from the first token to the last."""
    if len(tokens) <= block * blocks:
        return int(tokens.max())
    starts = np.linspace(0, len(tokens) - block, blocks).astype(np.int64)
    return max(int(tokens[start : start + block].max()) for start in starts)


# ----------------------------------------------------------------------------------------------------------------------
# Batches


def batch(tokens, step, batch_size, context, seed, rows=slice(None)):
    """Rows `rows` of the training batch of `step`: x, y int64 (b, context) with y[i, t] the token after x[i, t].

    The places of all batch_size windows are drawn from (seed, step) alone, so that any rank, micro-batch or resumed run
    finds its rows of the same global batch.
    """
    if len(tokens) <= context:
        raise DataError(f"{len(tokens):,} tokens are too few for a context of {context}: use a smaller context")
    starts = np.random.default_rng([seed, step]).integers(len(tokens) - context, size=batch_size)[rows]
    windows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def eval_windows(n_tokens, context, stride=None):
    """Starts of the windows that evaluate n_tokens tokens, int64 (m,), one each `stride` tokens (default: context).

    Window k reads tokens [k s, k s + context) and predicts (k s, k s + context]. It counts the targets that window
    k - 1 did not predict, the last s: each token but the first is then counted once, and one after the first window is
    predicted from at least context - s + 1 tokens.
    """
    stride = stride or context
    if not 0 < stride <= context:
        raise DataError(f"stride {stride} must be 1 to {context}, the context")
    return np.arange(max(1, -(-(n_tokens - 1 - context) // stride) + 1)) * stride


def eval_batches(tokens, context, batch_size, rank=0, world=1, stride=None):
    """Yields x, y int64 (batch_size, context) such that over all ranks each of tokens[1:] is a target once.

    y is -1 where nothing is counted: beyond the end, in rows that fill up the last batch, and, with `stride` < context,
    where an earlier window has counted. All ranks get equally many batches, all of one shape: one compiled graph, and
    no rank waits in vain for another.
    """
    stride = stride or context
    starts = eval_windows(len(tokens), context, stride)
    for first in range(0, len(starts), batch_size * world):
        x = np.zeros((batch_size, context), dtype=np.int64)
        y = np.full((batch_size, context), -1, dtype=np.int64)
        for row, start in enumerate(starts[first + rank : first + batch_size * world : world]):
            window = tokens[start : start + context + 1]
            x[row, : len(window[:context])] = window[:context]
            counted = context - stride if start else 0
            y[row, counted : len(window) - 1] = window[counted + 1 :]
        yield torch.from_numpy(x), torch.from_numpy(y)


def mask_tokens(x, generator, mask_id, vocab_size, p=0.15, rows=slice(None), batch_size=None):
    """BERT's corruption of x, int64 (b, n): inputs and targets, both (b, n); targets are -1 where nothing is predicted.

    A token is selected with probability p; of the selected, 80 % become `mask_id`, 10 % a random id below `vocab_size`,
    10 % stay. With `batch_size`, the draws are those of a global batch of that many rows, of which x is `rows`. Use the
    tokenizer's n_vocab as `mask_id`: GPT-2's is 50257, the first id of the padded vocabulary.
    """
    shape = (batch_size or len(x), x.shape[1])
    u = torch.rand(shape, generator=generator, device=generator.device)[rows].to(x.device)
    others = torch.randint(vocab_size, shape, generator=generator, device=generator.device)[rows].to(x.device)
    inputs = torch.where(u < 0.8 * p, mask_id, torch.where(u < 0.9 * p, others, x))
    return inputs, torch.where(u < p, x, -1)


# ----------------------------------------------------------------------------------------------------------------------
# Long range without downloads

LISTOPS_VOCAB = ["<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
LISTOPS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda digits: int(statistics.median(digits)),  # of an even number of digits, rounded down
    "[SM": lambda digits: sum(digits) % 10,
}


def _expression(rng, length):
    """A random ListOps expression of at most `length` tokens, as a list of words, and its value."""
    if length < 4:
        value = rng.randrange(10)
        return [str(value)], value
    operator = rng.choice(list(LISTOPS))
    n_arguments = rng.randint(2, min(5, length - 2))
    cuts = sorted(rng.sample(range(1, length - 2), n_arguments - 1))
    arguments = [_expression(rng, b - a) for a, b in zip([0, *cuts], [*cuts, length - 2])]
    words = [operator, *itertools.chain.from_iterable(words for words, _ in arguments), "]"]
    return words, LISTOPS[operator]([value for _, value in arguments])


def listops(n, seed, max_length):
    """n expressions such as [MAX 2 9 [MIN 4 7 ] 0 ] and their values: x int64 (n, max_length), y int64 (n,) in 0..9.

    x indexes LISTOPS_VOCAB (16 words) and is padded with 0; lengths vary up to max_length, with 2 to 5 arguments each.
    """
    rng = random.Random(seed)
    x, y = torch.zeros(n, max_length, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    ids = {word: i for i, word in enumerate(LISTOPS_VOCAB)}
    for row in range(n):
        words, y[row] = _expression(rng, rng.randint(max_length // 2, max_length))
        x[row, : len(words)] = torch.tensor([ids[word] for word in words])
    return x, y


def grey_pixels(pictures):
    """Pictures uint8 (N, 32, 32, 3) as sequences of grey values, row by row: int64 (N, 1024) in 0..255.

    Luma of ITU-R BT.601, 0.299 R + 0.587 G + 0.114 B, rounded in 16-bit fixed point as Pillow's convert("L") does.
    """
    weights = np.array([19595, 38470, 7471], dtype=np.int64)
    return (pictures.reshape(len(pictures), -1, 3) @ weights + 2**15) >> 16
