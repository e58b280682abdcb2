"""Text sets: the table of them, tokenizers, preparation, batches, masks, and two long-range tasks.

    SETS -> prepare -> data/cache/NAME (see store.py) -> load -> TextData -> batch, eval_batches

Any other name than those of SETS is prepared from a folder of .txt, .jsonl or Parquet files, with
--source and --tokenizer.

GPT-2's end-of-text token (50256) follows each document: a row, a .txt file, an article of WikiText,
a sentence of PTB (which marks nothing larger), a passage of LAMBADA or CBT. Character tokenizers
have no such token, and a source that is one single document gets none: it is split by position.
"""

import contextlib
import functools
import itertools
import json
import os
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from data import store
from data.store import CACHE, DataError, reading

SPLITS = ("train", "val", "test")
SUFFIXES = (".parquet", ".jsonl", ".txt", ".md", ".raw", ".tokens")


# -------------------------------------------------------------------------------------------------
# Tokenizers
# -------------------------------------------------------------------------------------------------

PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))


class CharTokenizer:
    """One id for each of `characters`, in that order, and one more (the last) for any other."""

    eot = None

    def __init__(self, characters):
        self.characters = characters
        self.n_vocab = len(characters) + 1
        self.table = np.full(0x110000, len(characters), dtype=np.uint16)
        self.table[[ord(character) for character in characters]] = np.arange(len(characters))

    def encode(self, text):
        """str -> uint16 array (number of characters,)."""
        return self.table[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)]

    def decode(self, ids):
        """ids -> str; the last id, and any id beyond the vocabulary, as U+FFFD."""
        known = len(self.characters)
        return "".join(self.characters[i] if i < known else "\ufffd" for i in map(int, ids))

    def meta(self):
        return {"kind": "char", "characters": self.characters}


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding: 50257 ids.

    Raises DataError if tiktoken's files are neither cached nor within reach."""

    def __init__(self):
        import tiktoken
        try:
            self.encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError) as error:  # no network; a damaged file
            raise DataError("GPT-2's BPE files are neither in tiktoken's cache nor within reach: "
                            "connect once, or set TIKTOKEN_CACHE_DIR to a folder that has them "
                            f"({type(error).__name__})") from None
        self.n_vocab = self.encoding.n_vocab
        self.eot = self.encoding.eot_token

    def encode(self, text):
        """str -> uint16 array; text that looks like a special token is encoded as text."""
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
        except UnicodeEncodeError:  # half a surrogate pair, which encode_ordinary replaces
            return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids):
        """ids -> str; bytes that are not UTF-8, and ids of the padded vocabulary, as U+FFFD."""
        piece = self.encoding.decode_single_token_bytes
        data = b"".join(piece(i) if i < self.n_vocab else b"\xef\xbf\xbd" for i in map(int, ids))
        return data.decode("utf-8", errors="replace")

    def meta(self):
        return {"kind": "gpt2"}


def tokenizer_from_meta(meta):
    """The tokenizer that a meta.json, or a checkpoint's copy of it, describes. Raises DataError."""
    described = meta.get("tokenizer") or {}
    if described.get("kind") == "char":
        tokenizer = CharTokenizer(described["characters"])
    elif described.get("kind") == "gpt2":
        tokenizer = GPT2Tokenizer()
    else:
        raise DataError(f"unknown tokenizer {described.get('kind')!r} in the description of "
                        f"{meta.get('name')}: it must be char or gpt2; prepare the set again")
    if tokenizer.n_vocab != meta.get("n_vocab", tokenizer.n_vocab):
        raise DataError(f"{meta.get('name')} was prepared with {meta['n_vocab']} tokens, its "
                        f"tokenizer has {tokenizer.n_vocab}: prepare the set again")
    return tokenizer


# -------------------------------------------------------------------------------------------------
# Readers: a file as a stream of (text, end); `end` says that a document ends here
# -------------------------------------------------------------------------------------------------

def read_documents(file):
    """Rows of .parquet (column text or sentence) and .jsonl (key text); any other file as one."""
    read = {".parquet": _read_parquet, ".jsonl": _read_lines}.get(file.suffix, _read_plain)
    with reading(file):
        for text, end in read(file):
            if not isinstance(text, str):
                raise ValueError("`text` is not a string")
            yield text, end


def _read_parquet(file):
    parquet = pq.ParquetFile(file, **store.PARQUET)
    names = parquet.schema_arrow.names
    column = next((name for name in ("text", "sentence") if name in names), None)
    if column is None:
        raise ValueError(f"its columns are {', '.join(names)}, none is `text`")
    for rows in parquet.iter_batches(batch_size=32, columns=[column]):
        for text in rows.column(0).to_pylist():
            yield text or "", True


def _read_lines(file):
    with open(file, encoding="utf-8") as stream:
        for line in filter(str.strip, stream):
            yield json.loads(line)["text"], True


def _read_plain(file, size=1 << 20):
    """One document in pieces of about `size` characters.

    A piece ends after a single line break between two words: GPT-2's pattern always splits there,
    so the tokens are those of the whole text."""
    text = ""
    with open(file, encoding="utf-8") as stream:
        while more := stream.read(size):
            text += more
            if cut := re.match(r"(?s).*\S\n(?=\S)", text):
                yield text[:cut.end()], False
                text = text[cut.end():]
    yield text, True


def read_pydoc(file=None):
    """The English text of Python's own help topics."""
    from pydoc_data.topics import topics

    yield "\n".join(topics[name] for name in sorted(topics)), True


def read_wikitext(file):
    """Articles. Titles stand between empty lines, formulas such as ` = 1 / s = ` do not."""
    rows = (text for text, _ in read_documents(file))
    if file.suffix == ".parquet":  # the Hub's rows are lines, the empty ones (` \n`) stripped
        rows = (row or " \n" for row in rows)
    for article in re.split(r"(?<=\n \n)(?= = [^=\n]+ = \n \n)", "".join(rows)):
        yield article, True


def read_ptb(file):
    """Sentences: the lines of a text file, the rows of any other."""
    rows = [text for text, _ in read_documents(file)]
    if file.suffix not in (".parquet", ".jsonl"):
        rows = "".join(rows).splitlines()
    for row in rows:
        if row.strip():
            yield row.strip(), True


def lambada_passages(file):
    return [{"text": text} for text, _ in read_documents(file)]


def cbt_passages(file):
    """Common nouns (CN) and named entities (NE), by the folder; XXXXX where an option belongs."""
    task = next((part for part in reversed(file.parts) if part in ("CN", "NE")), None)
    if task is None:
        return []
    with reading(file):
        rows = pq.read_table(file).to_pylist()
        return [{"task": task, "context": " ".join(row["sentences"]), "question": row["question"],
                 "options": row["options"], "answer": row["answer"]} for row in rows]


def _passage_text(passage):
    if "text" in passage:
        return passage["text"]
    return f"{passage['context']} {passage['question'].replace('XXXXX', passage['answer'])}"


# -------------------------------------------------------------------------------------------------
# The sets
# -------------------------------------------------------------------------------------------------

@dataclass(frozen=True, kw_only=True)
class TextSet(store.Source):
    """A row of SETS: all there is to say about one set."""
    tokenizer: str = "gpt2"           # or "char", of ...
    characters: str | None = None     # ... these; None: those of the training text
    read: Callable = read_documents   # file -> (text, end) ...
    passages: Callable | None = None  # or file -> passages, which evaluate.py scores one by one
    only: str | None = None           # the one split there is
    held_out: float | None = 0.01     # share of the documents that validates if no file does;
                                      # None: the last 10 % of the text validates
    n_documents: int | None = None    # of the published set


SHAKESPEARE = (("karpathy/tiny_shakespeare", "refs/convert/parquet", ["default/*/*.parquet"]),
               ("karpathy/tiny_shakespeare", "main", ["*.parquet"]))
FOLDER = TextSet(files=".txt, .md, .jsonl or Parquet files, and --tokenizer is gpt2 or char")
# Some repositories have only a script on main; the Hub's own conversion is on refs/convert/parquet.
SETS = {
    "openwebtext": TextSet(
        files="Parquet files with a column `text`", on_first_use=False,
        held_out=0.0005, n_documents=8_013_769,  # as nanoGPT's, so that losses compare
        hub=(("Skylion007/openwebtext", "main", ["plain_text/*.parquet", "data/*.parquet"]),
             # by name, since plain_text/partial-train/ has only the first 5 GB
             ("Skylion007/openwebtext", "refs/convert/parquet", ["plain_text/train/*.parquet"]),
             ("Skylion007/openwebtext", "refs/pr/20", ["data/*.parquet"]))),  # the author's own
    "books": TextSet(
        files="train.parquet and validation.parquet with a column `text`, one book a row",
        on_first_use=False),
    "shakespeare": TextSet(files="input.txt", hub=SHAKESPEARE, held_out=None),
    "shakespeare_char": TextSet(
        files="input.txt", hub=SHAKESPEARE, held_out=None, tokenizer="char"),
    "pydoc": TextSet(read=read_pydoc, held_out=None, tokenizer="char", characters=PRINTABLE),
    # For zero-shot evaluation. WikiText-2 and WikiText-103 have the same validation and test text.
    "wikitext": TextSet(
        files="test.txt and valid.txt", read=read_wikitext,
        hub=(("Salesforce/wikitext", "main",
              ["wikitext-2-raw-v1/test*", "wikitext-2-raw-v1/validation*"]),)),
    "ptb": TextSet(
        files="ptb.test.txt and ptb.valid.txt", read=read_ptb,
        hub=(("ptb-text-only/ptb_text_only", "refs/convert/parquet",
              ["penn_treebank/*/*.parquet"]),)),
    "lambada": TextSet(
        files='test.jsonl with {"text": ...}', passages=lambada_passages, only="test",
        hub=(("EleutherAI/lambada_openai", "879e19a2c9bb7ef03f9cf962089cf7d008f91e27",
              ["data/lambada_test.jsonl"]),
             ("EleutherAI/lambada_openai", "refs/convert/parquet", ["default/test/*.parquet"]))),
    "cbt": TextSet(
        files="the Hub's CN/validation*.parquet and NE/validation*.parquet",
        passages=cbt_passages, only="val",
        hub=(("cam-cst/cbt", "main", ["CN/validation*", "NE/validation*"]),
             ("cam-cst/cbt", "refs/convert/parquet",
              ["CN/validation/*.parquet", "NE/validation/*.parquet"]))),
}


# -------------------------------------------------------------------------------------------------
# Splits: a set as one stream of (split, text, end)
# -------------------------------------------------------------------------------------------------

def validation_rows(n, fraction):
    """Which of n documents validate, bool (n,): as datasets' train_test_split(seed=2357)."""
    chosen = np.zeros(n, dtype=bool)
    chosen[np.random.default_rng(2357).permutation(n)[:int(np.ceil(fraction * n))]] = True
    return chosen


def _pieces(name, files, root):
    """(split, text, end) of a whole set, in order."""
    row = SETS.get(name, FOLDER)
    by_split = {split: [] for split in SPLITS}
    for file in files:
        by_split[store.split_of(file, root, row.only or "train")].append(file)

    def read(*splits):
        for split in splits:
            for file in by_split[split]:
                if row.passages:
                    documents = ((_passage_text(passage), True) for passage in row.passages(file))
                else:
                    documents = row.read(file)
                for text, end in documents:
                    yield split, text, end

    if row.only:
        return read(row.only)
    if row.held_out is None:
        return _by_position(functools.partial(read, *SPLITS))
    if by_split["val"] or not by_split["train"]:
        return read(*SPLITS)

    n = sum(_count_documents(row, file) for file in by_split["train"])
    if row.n_documents not in (None, n):
        print(f"{name}: {n:,} documents, not {row.n_documents:,}: its validation set is not that "
              "of published results")
    if n == 1:
        train = _by_position(functools.partial(read, "train"))
    else:
        train = _by_document(read("train"), validation_rows(n, row.held_out))
    return itertools.chain(train, read("test"))


def _by_position(read):
    """The first 90 % of the characters train, the rest validates, as in nanoGPT."""
    left = int(0.9 * sum(len(text) for _, text, _ in read()))
    for _, text, _ in read():
        if text[:left]:
            yield "train", text[:left], False
        if text[left:]:
            yield "val", text[left:], False
        left = max(0, left - len(text))


def _by_document(pieces, chosen):
    document = 0
    for _, text, end in pieces:
        yield "val" if chosen[document] else "train", text, end
        document += end


def _count_documents(row, file):
    if file.suffix == ".parquet" and row.read is read_documents:
        with reading(file):
            return pq.read_metadata(file).num_rows
    return sum(end for _, end in row.read(file))


# -------------------------------------------------------------------------------------------------
# Preparation: token files, written in parallel and in constant memory
# -------------------------------------------------------------------------------------------------

def prepare(name, source=None, cache=CACHE, tokenizer=None, workers=None, overwrite=False):
    """Writes cache/NAME: token files and meta.json, all or nothing. False if it was there already.

    `source` is a folder or a file, None the Hub. `tokenizer` is "gpt2", "char" (the characters of
    the training text), a tokenizer object or None, the set's usual one. `workers` threads tokenize
    (default: one a core). Raises DataError."""
    row = SETS.get(name, FOLDER)
    tokenizer = tokenizer or row.tokenizer
    with store.preparing(name, cache, overwrite) as folder:
        if folder is None:
            load(name, cache)
            return False
        if row.files:
            root, files = row.find(name, source, cache, SUFFIXES)
        else:
            root, files = Path(), [Path(name)]  # of which `read` needs nothing
        if tokenizer == "gpt2":
            tokenizer = GPT2Tokenizer()
        elif tokenizer == "char":
            tokenizer = CharTokenizer(row.characters or _characters(name, files, root))

        pieces = _pieces(name, files, root)
        size = sum(map(_size, files)) if row.files else None
        tokens, documents = write_tokens(folder, pieces, tokenizer, workers, size, name)
        short = [split for split in tokens if tokens[split] < 2]
        if short or not tokens:
            raise DataError(f"{name}: the source has no text for {', '.join(short) or 'any split'}")
        if row.passages:
            with open(folder / f"{name}.jsonl", "w") as lines:
                for file in files:
                    if store.split_of(file, root, row.only) == row.only:
                        lines.writelines(json.dumps(p) + "\n" for p in row.passages(file))
        store.write_meta(folder, name, "text", tokenizer=tokenizer.meta(),
                         n_vocab=tokenizer.n_vocab, eot=tokenizer.eot, tokens=tokens,
                         documents=documents)
    return True


def _characters(name, files, root):
    """The characters of the training text, sorted, as one string."""
    characters = set()
    for split, text, _ in _pieces(name, files, root):
        if split == "train":
            characters.update(text)
    if not characters:
        raise DataError(f"{name} has no training text to take characters from: "
                        "use --tokenizer=gpt2")
    return "".join(sorted(characters))


def _size(file):
    """Bytes of text in a file, about, for the progress bar."""
    if file.suffix != ".parquet":
        return file.stat().st_size
    with reading(file):
        meta = pq.read_metadata(file)
    return sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))


def write_tokens(folder, pieces, tokenizer, workers=None, size=None, desc=None):
    """Streams (split, text, end) to folder/SPLIT.bin; returns tokens and documents by split.

    Threads are enough: tiktoken works outside Python's lock. In memory are at most 2 * workers
    chunks of 256k characters, or one longer document each."""
    workers = workers or os.cpu_count() or 1
    tokens, documents = Counter(), Counter()
    encode = functools.partial(_encode, tokenizer)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        bar = stack.enter_context(
            tqdm(total=size, desc=desc, unit="B", unit_scale=True, disable=None))
        files = {}
        for chunk, encoded in store.in_order(pool, encode, _chunks(pieces), 2 * workers):
            for split, ids in encoded.items():
                if split not in files:
                    files[split] = stack.enter_context(open(Path(folder) / f"{split}.bin", "wb"))
                files[split].write(ids)
                tokens[split] += len(ids)
            documents.update(split for split, _, end in chunk if end)
            bar.update(sum(len(text) for _, text, _ in chunk))
    return dict(tokens), dict(documents)


def _chunks(pieces, size=1 << 18):
    """Lists of pieces of about `size` characters: enough work to be worth handing to a thread."""
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
    """A chunk's tokens by split, with end-of-text after each document."""
    tokens = {}
    for split, text, end in chunk:
        tokens.setdefault(split, []).append(tokenizer.encode(text))
        if end and tokenizer.eot is not None:
            tokens[split].append(np.array([tokenizer.eot], dtype=np.uint16))
    return {split: np.concatenate(parts) for split, parts in tokens.items()}


# -------------------------------------------------------------------------------------------------
# Prepared sets
# -------------------------------------------------------------------------------------------------

@dataclass
class TextData:
    """A prepared text set. The splits there are, are read-only memory maps of uint16 tokens."""
    name: str
    tokenizer: CharTokenizer | GPT2Tokenizer
    meta: dict
    train: np.ndarray | None = None
    val: np.ndarray | None = None
    test: np.ndarray | None = None
    passages: list[dict] | None = None  # as lambada_passages and cbt_passages give them


def load(name, cache=CACHE):
    """Opens a prepared text set and checks the size of its files and the range of their tokens.

    A missing set that is small (all but openwebtext and books) is prepared first. Raises
    DataError."""
    meta = store.open_set(name, cache, "text", SETS, prepare)
    data = TextData(name, tokenizer_from_meta(meta), meta)
    for split in SPLITS:
        if f"{split}.bin" in meta["files"]:
            tokens = store.open_file(meta, f"{split}.bin", cache)
            largest, n_vocab = _largest(tokens), data.tokenizer.n_vocab
            if largest >= n_vocab:
                raise store.broken(name, cache, f"{split}.bin has token {largest}, allowed are 0 "
                                   f"to {n_vocab - 1}")
            setattr(data, split, tokens)
    if f"{name}.jsonl" in meta["files"]:
        lines = store.open_file(meta, f"{name}.jsonl", cache).tobytes().splitlines()
        try:
            data.passages = [json.loads(line) for line in lines]
        except ValueError:
            raise store.broken(name, cache, f"{name}.jsonl is damaged (not JSON)") from None
    return data


def _largest(tokens, block=1 << 16, blocks=512):
    """The largest token; of a file above 64 MB, in blocks spread evenly from start to end."""
    if len(tokens) <= block * blocks:
        return int(tokens.max())
    starts = np.linspace(0, len(tokens) - block, blocks).astype(np.int64)
    return max(int(tokens[start : start + block].max()) for start in starts)


# -------------------------------------------------------------------------------------------------
# Batches
# -------------------------------------------------------------------------------------------------

def batch(tokens, step, batch_size, context, seed, rows=slice(None)):
    """Rows `rows` of step's batch: x, y int64 (b, context), y[i, t] being the token after x[i, t].

    The places of all batch_size windows are drawn from (seed, step) alone, so that any rank,
    micro-batch or resumed run finds its rows of the same global batch. Raises DataError."""
    if len(tokens) <= context:
        raise DataError(f"{len(tokens):,} tokens are too few for a context of {context}: use a "
                        "smaller context")
    rng = np.random.default_rng([seed, step])
    starts = rng.integers(len(tokens) - context, size=batch_size)[rows]
    windows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def eval_windows(n_tokens, context, stride=None):
    """Starts of the windows that evaluate n_tokens tokens, one each `stride` (default: context).

    Window k reads tokens [k s, k s + context) and predicts (k s, k s + context]. It counts the
    targets that window k - 1 did not predict, the last s: each token but the first is then counted
    once, and one after the first window is predicted from at least context - s + 1 tokens."""
    stride = stride or context
    if not 0 < stride <= context:
        raise DataError(f"stride {stride} must be 1 to {context}, the context")
    return np.arange(max(1, -(-(n_tokens - 1 - context) // stride) + 1)) * stride


def eval_batches(tokens, context, batch_size, rank=0, world=1, stride=None, causal=True):
    """Yields x, y int64 (batch_size, n): over all ranks, each of tokens[1:] is a target once.

    n is `context`, or less if the text is. y is -1 where nothing is counted: beyond the end, in
    rows that fill up the last batch, and where an earlier window has counted. A causal model does
    not see the padding behind a last, partly filled window; any other would, so its last window
    ends with the text and overlaps the one before. All ranks get equally many batches, all of one
    shape: one compiled graph, and no rank waits in vain for another."""
    stride = stride or context
    starts = eval_windows(len(tokens), context, stride)
    n = min(context, len(tokens) - 1)
    for first in range(0, len(starts), batch_size * world):
        x = np.zeros((batch_size, n), dtype=np.int64)
        y = np.full((batch_size, n), -1, dtype=np.int64)
        for row, start in enumerate(starts[first + rank : first + batch_size * world : world]):
            counted = context - stride if start else 0
            back = 0 if causal else max(0, start + n + 1 - len(tokens))
            window = tokens[start - back : start - back + n + 1]
            x[row, : len(window[:n])] = window[:n]
            y[row, counted + back : len(window) - 1] = window[counted + back + 1 :]
        yield torch.from_numpy(x), torch.from_numpy(y)


def mask_tokens(x, generator, mask_id, vocab_size, p=0.15, rows=slice(None), batch_size=None):
    """BERT's corruption of x, int64 (b, n): inputs, and targets that are -1 where not predicted.

    A token is selected with probability p; of the selected, 80 % become `mask_id`, 10 % a random id
    below `vocab_size`, 10 % stay. With `batch_size`, the draws are those of a global batch of that
    many rows, of which x is `rows`. Use the tokenizer's n_vocab as `mask_id`: GPT-2's is 50257, the
    first id of the padded vocabulary."""
    shape, device = (batch_size or len(x), x.shape[1]), generator.device
    u = torch.rand(shape, generator=generator, device=device)[rows].to(x.device)
    others = torch.randint(vocab_size, shape, generator=generator, device=device)[rows].to(x.device)
    inputs = torch.where(u < 0.8 * p, mask_id, torch.where(u < 0.9 * p, others, x))
    return inputs, torch.where(u < p, x, -1)


# -------------------------------------------------------------------------------------------------
# Two tasks of the Long Range Arena: ListOps, drawn here, and images as sequences of pixels
# -------------------------------------------------------------------------------------------------

LISTOPS_VOCAB = ["<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]
LISTOPS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda digits: int(statistics.median(digits)),  # of an even number: rounded down
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
    """n expressions such as [MAX 2 9 [MIN 4 7 ] 0 ], and their values, int64 (n,) in 0..9.

    The expressions are int64 (n, max_length), indices into LISTOPS_VOCAB (16 words) padded with 0;
    lengths vary up to max_length, with 2 to 5 arguments each."""
    rng = random.Random(seed)
    x, y = torch.zeros(n, max_length, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
    ids = {word: i for i, word in enumerate(LISTOPS_VOCAB)}
    for row in range(n):
        words, y[row] = _expression(rng, rng.randint(max_length // 2, max_length))
        x[row, : len(words)] = torch.tensor([ids[word] for word in words])
    return x, y


def grey_pixels(images):
    """Images uint8 (N, 32, 32, 3) as rows of grey values, one after another: uint8 (N, 1024).

    Luma of ITU-R BT.601, 0.299 R + 0.587 G + 0.114 B, rounded in 16-bit fixed point as Pillow does.
    """
    red, green, blue = (images[..., i].reshape(len(images), -1).astype(np.uint32) for i in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 2**15) >> 16).astype(np.uint8)
