"""data/text.py: tokenizers, preparation, batches, masks and the long-range tasks."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import tiktoken
import torch
from PIL import Image

from data import store, text
from data.store import DataError

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MERGES = [b"th", b"the", b" t", b" the", b"an", b"in", b"  ", b"\n\n", b" \n", b"er", b" a"]
WORDS = "the cat's hat, another thing in an inner 42 the,then\tit'll don't É naïve —".split(" ")


@pytest.fixture(scope="module")
def encoding():
    """GPT-2's encoding in small: 256 bytes, a few merges, its pattern, end-of-text last."""
    ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(MERGES)}
    return tiktoken.Encoding("small", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": len(ranks)})


@pytest.fixture
def bpe(encoding, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return text.GPT2Tokenizer()


def sentences(n, seed=0):
    rng = np.random.default_rng(seed)
    gaps = [" ", " ", " ", "\n", "\n\n", "  ", " \n", "\n "]
    return ["".join(rng.choice(WORDS) + rng.choice(gaps) for _ in range(rng.integers(1, 30)))
            for _ in range(n)]


def parquet(path, rows, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: rows}), path, row_group_size=7)


def documents(tokens, tokenizer):
    """The documents of a token file: what lies before each end-of-text. None after the last."""
    ends = np.flatnonzero(tokens == tokenizer.eot)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]]


# ---- tokenizers


def test_round_trips(bpe):
    for line in sentences(50):
        assert bpe.decode(bpe.encode(line)) == line
        assert bpe.encode(line).tolist() == bpe.encoding.encode_ordinary(line)
        chars = text.CharTokenizer("".join(sorted(set(line))))
        assert chars.decode(chars.encode(line)) == line and chars.encode(line).dtype == np.uint16
    assert text.CharTokenizer("ba").encode("abc\U0010ffff\ud800").tolist() == [1, 0, 2, 2, 2]
    assert text.CharTokenizer("ba").decode([1, 0, 2, 9]) == "ab\ufffd\ufffd"
    assert bpe.eot not in bpe.encode("<|endoftext|>")
    assert bpe.decode([*bpe.encode("in"), bpe.n_vocab, 50303]) == "in\ufffd\ufffd"
    assert bpe.decode(bpe.encode("half \ud800 pair")) == "half \ufffd pair"


def test_tokenizers_come_back_from_meta(bpe, encoding):
    for tokenizer in (bpe, text.CharTokenizer("\n abc\"é")):
        meta = {"name": "x", "tokenizer": tokenizer.meta(), "n_vocab": tokenizer.n_vocab}
        again = text.tokenizer_from_meta(meta)
        assert again.n_vocab == tokenizer.n_vocab
        assert again.encode("a cab").tolist() == tokenizer.encode("a cab").tolist()
        with pytest.raises(DataError, match="prepared with 7 tokens"):
            text.tokenizer_from_meta(meta | {"n_vocab": 7})
    with pytest.raises(DataError, match="'words'"):
        text.tokenizer_from_meta({"name": "x", "tokenizer": {"kind": "words"}})


def test_missing_bpe_files_name_the_variable(monkeypatch):
    def unreachable(name):
        raise requests.ConnectionError("no route\nto host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR") as error:
        text.GPT2Tokenizer()
    assert "\n" not in str(error.value)


# ---- preparation


def test_pydoc(tmp_path):
    data = text.load("pydoc", tmp_path)
    # whatever the Python version
    assert data.tokenizer.characters == "\n" + "".join(chr(i) for i in range(32, 127))
    assert data.tokenizer.n_vocab == 97
    from pydoc_data.topics import topics
    whole = "\n".join(topics[key] for key in sorted(topics))
    expected = "".join(c if c == "\n" or " " <= c <= "~" else "\ufffd" for c in whole)
    assert data.tokenizer.decode(np.concatenate([data.train, data.val])) == expected
    assert len(data.train) == int(0.9 * len(whole)) and data.test is None
    first = (tmp_path / "pydoc" / "train.bin").read_bytes()
    text.prepare("pydoc", cache=tmp_path, overwrite=True)
    assert (tmp_path / "pydoc" / "train.bin").read_bytes() == first
    store.verify("pydoc", tmp_path)


def test_shakespeare_is_split_by_position(tmp_path, bpe, encoding):
    play = "".join(sentences(200))
    (tmp_path / "input.txt").write_text(play)
    left = int(0.9 * len(play))
    text.prepare("shakespeare", tmp_path / "input.txt", tmp_path / "a", bpe)
    data = text.load("shakespeare", tmp_path / "a")
    assert data.train.tolist() == encoding.encode_ordinary(play[:left])
    assert data.val.tolist() == encoding.encode_ordinary(play[left:])

    parts = zip(("train", "validation", "test"), (play[:700], play[700:1500], play[1500:]))
    for split, part in parts:  # as on the Hub
        parquet(tmp_path / "hub" / split / "0000.parquet", [part])
    text.prepare("shakespeare_char", tmp_path / "hub", tmp_path / "b")
    chars = text.load("shakespeare_char", tmp_path / "b")
    assert chars.tokenizer.characters == "".join(sorted(set(play[:left])))
    assert chars.tokenizer.decode(chars.train) == play[:left]
    assert chars.tokenizer.decode(chars.val) == play[left:]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt"])
def test_end_of_text_after_each_document(kind, tmp_path, bpe, encoding, monkeypatch):
    rows = sentences(90) + [""]
    source = tmp_path / "source"
    source.mkdir()
    for split, part in (("train", rows), ("validation", rows[:4])):
        if kind == "parquet":
            parquet(source / f"{split}.parquet", part)
        elif kind == "jsonl":
            lines = (json.dumps({"text": row}) + "\n" for row in part)
            (source / f"{split}.jsonl").write_text("".join(lines))
        else:
            (source / split).mkdir()
            for i, row in enumerate(part):
                (source / split / f"{i:03}.txt").write_text(row)
    monkeypatch.setattr(text._chunks, "__defaults__", (200,))  # so that threads overtake each other
    text.prepare("books", source, tmp_path, bpe, workers=3)
    data = text.load("books", tmp_path)
    assert documents(data.train, bpe) == rows and documents(data.val, bpe) == rows[:4]
    assert data.meta["tokens"] == {"train": len(data.train), "val": len(data.val)}
    assert data.meta["documents"] == {"train": 91, "val": 4}


def test_pieces_of_a_long_file_give_the_tokens_of_the_whole(tmp_path, bpe):
    whole = "".join(sentences(300))
    (tmp_path / "long.txt").write_text(whole)
    pieces = list(text._read_plain(tmp_path / "long.txt", size=100))
    assert len(pieces) > 50 and [end for _, end in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece for piece, _ in pieces) == whole
    assert [i for piece, _ in pieces for i in bpe.encode(piece)] == bpe.encode(whole).tolist()


def test_validation_documents_are_those_of_train_test_split(tmp_path, bpe, encoding):
    for n, fraction in ((20_001, 0.0005), (150, 0.01)):
        split = datasets.Dataset.from_dict({"i": range(n)})
        split = split.train_test_split(test_size=fraction, seed=2357)
        assert set(split["test"]["i"]) == set(np.flatnonzero(text.validation_rows(n, fraction)))
    rows = [f"{i} {row}" for i, row in enumerate(sentences(150))]
    parquet(tmp_path / "source" / "a.parquet", rows[:60])
    parquet(tmp_path / "source" / "b.parquet", rows[60:])
    text.prepare("mine", tmp_path / "source", tmp_path, bpe)
    data = text.load("mine", tmp_path)
    chosen = set(split["test"]["i"])
    assert documents(data.val, bpe) == [row for i, row in enumerate(rows) if i in chosen]
    assert documents(data.train, bpe) == [row for i, row in enumerate(rows) if i not in chosen]


def test_wikitext_articles(tmp_path, bpe, encoding):
    lines = [" \n", " = One = \n", " \n", " first \n", " = = part = = \n", " \n", " formula \n",
             " = 1 / s = \n", " \n", " = Two ( film ) = \n", " \n", " the second \n"]
    (tmp_path / "wiki.test.tokens").write_text("".join(lines))
    rows = [line if line.strip() else "" for line in lines]
    parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", rows)
    for source in ("wiki.test.tokens", "hub"):
        text.prepare("wikitext", tmp_path / source, tmp_path, bpe, overwrite=True)
        data = text.load("wikitext", tmp_path)
        assert documents(data.test, bpe) == ["".join(lines[:9]), "".join(lines[9:])]
        assert data.train is None and data.val is None


def test_ptb_sentences(tmp_path, bpe, encoding):
    (tmp_path / "ptb.test.txt").write_text(" the <unk> is N \n in an inn \n")
    parquet(tmp_path / "hub" / "validation" / "0000.parquet", ["an in", "a the"], "sentence")
    text.prepare("ptb", tmp_path, tmp_path / "cache", bpe)
    data = text.load("ptb", tmp_path / "cache")
    assert documents(data.test, bpe) == ["the <unk> is N", "in an inn"]
    assert documents(data.val, bpe) == ["an in", "a the"]


def test_passages(tmp_path, bpe, encoding):
    rows = sentences(5) + ["odd é"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    text.prepare("lambada", tmp_path, tmp_path / "cache", bpe)
    data = text.load("lambada", tmp_path / "cache")
    assert [passage["text"] for passage in data.passages] == rows == documents(data.test, bpe)

    cbt = {"sentences": [["One .", "Two ."]], "question": ["a XXXXX ran"], "answer": ["cat"],
           "options": [["cat", "dog"]]}
    for task in ("CN", "NE", "V"):
        (tmp_path / "cbt" / task).mkdir(parents=True)
        for split in ("validation", "test"):
            pq.write_table(pa.table(cbt), tmp_path / f"cbt/{task}/{split}-00000-of-00001.parquet")
    text.prepare("cbt", tmp_path / "cbt", tmp_path / "cache", bpe)
    data = text.load("cbt", tmp_path / "cache")
    assert data.passages == [{"task": task, "context": "One . Two .", "question": "a XXXXX ran",
                              "options": ["cat", "dog"], "answer": "cat"} for task in ("CN", "NE")]
    assert documents(data.val, bpe) == ["One . Two . a cat ran"] * 2


def test_bad_sources_are_one_line(tmp_path, bpe):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "bad.parquet").write_bytes(b"nothing of the kind")
    (tmp_path / "bad.jsonl").write_text('{"words": "the"}\n')
    (tmp_path / "null.jsonl").write_text('\n{"text": null}\n')
    parquet(tmp_path / "columns.parquet", ["the"], "body")
    parquet(tmp_path / "blank.parquet", [])
    for source, message in (("nowhere", "does not exist"), ("empty", "has no .parquet"),
                            ("bad.txt", "cannot read .*utf-8"), ("bad.parquet", "cannot read"),
                            ("bad.jsonl", "no 'text' in it"), ("null.jsonl", "not a string"),
                            ("columns.parquet", "columns are body"),
                            ("blank.parquet", "has no text")):
        with pytest.raises(DataError, match=message) as error:
            text.prepare("mine", tmp_path / source, tmp_path / "cache", bpe)
        assert "\n" not in str(error.value)


def test_huge_files_are_scanned_in_blocks():
    tokens = np.zeros(10_000, dtype=np.uint16)
    for place in (0, 9_999):
        tokens[place] = 7
        assert text._largest(tokens, block=10, blocks=20) == 7 == text._largest(tokens)
        tokens[place] = 0


# ---- batches


def test_batches_depend_on_seed_and_step_only():
    tokens = np.arange(5000, dtype=np.uint16)
    x, y = text.batch(tokens, 3, 12, 32, seed=5)
    assert x.shape == (12, 32) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(32))
    assert all(map(torch.equal, (x, y), text.batch(tokens, 3, 12, 32, seed=5)))
    assert not torch.equal(x, text.batch(tokens, 4, 12, 32, seed=5)[0])
    assert not torch.equal(x, text.batch(tokens, 3, 12, 32, seed=6)[0])
    ranks = [text.batch(tokens, 3, 12, 32, seed=5, rows=rows) for rows in (slice(6), slice(6, 12))]
    assert torch.equal(torch.cat([rank[0] for rank in ranks]), x)
    assert torch.equal(torch.cat([rank[1] for rank in ranks]), y)


def test_batches_reach_both_ends():
    x, y = text.batch(np.arange(12, dtype=np.uint16), 0, 400, 8, seed=0)
    assert set(x[:, 0].tolist()) == {0, 1, 2, 3} and y.max() == 11
    with pytest.raises(DataError, match="smaller context"):
        text.batch(np.arange(8, dtype=np.uint16), 0, 2, 8, seed=0)
    with pytest.raises(DataError, match="stride 9"):
        text.eval_windows(100, 8, 9)


@pytest.mark.parametrize("n", [2, 8, 9, 17, 100])
@pytest.mark.parametrize("stride", [None, 1, 3])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_each_target_is_counted_once(n, stride, world, causal):
    """A model that sees the whole window sees no padding where something is counted."""
    tokens, counted, n_batches = np.arange(n, dtype=np.uint16), [], set()
    for rank in range(world):
        batches = list(text.eval_batches(tokens, 8, 2, rank, world, stride, causal))
        n_batches.add(len(batches))
        for x, y in batches:
            assert x.shape == y.shape == (2, min(8, n - 1))
            for row, column in (y >= 0).nonzero().tolist():
                target = y[row, column].item()
                counted.append(target)
                start = target - 1 - column
                seen = x[row, : column + 1] if causal else x[row]
                assert seen.tolist() == list(range(start, start + len(seen)))
                assert start == 0 or column + 1 >= 8 - (stride or 8) + 1
    assert sorted(counted) == list(range(1, n)) and len(n_batches) == 1


def test_masking_rates():
    n, p, vocab = 400_000, 0.15, 1000
    x = torch.randint(vocab, (400, n // 400), generator=torch.Generator().manual_seed(0))
    inputs, targets = text.mask_tokens(x, torch.Generator().manual_seed(1), vocab, vocab)
    selected = targets >= 0
    assert torch.equal(targets[selected], x[selected])
    assert torch.equal(inputs[~selected], x[~selected])
    masked, kept = (inputs == vocab) & selected, (inputs == x) & selected
    replaced = selected & ~masked & ~kept
    m = selected.sum().item()
    # a random token is the old one once in `vocab`; 4 standard deviations of a binomial
    for count, of, rate in ((m, n, p), (masked.sum(), m, 0.8), (kept.sum(), m, 0.1 + 0.1 / vocab),
                            (replaced.sum(), m, 0.1 - 0.1 / vocab)):
        assert abs(count - of * rate) < 4 * (of * rate * (1 - rate)) ** 0.5
    drawn = inputs[replaced].double()
    deviation = vocab / 12 ** 0.5 / len(drawn) ** 0.5
    assert drawn.max() < vocab and abs(drawn.mean() - (vocab - 1) / 2) < 4 * deviation


def test_masks_of_two_ranks_are_those_of_one():
    x = torch.randint(50, (6, 40))
    whole = text.mask_tokens(x, torch.Generator().manual_seed(3), 50, 50)
    for rows in (slice(0, 3), slice(3, 6)):
        part = text.mask_tokens(x[rows], torch.Generator().manual_seed(3), 50, 50, rows=rows,
                                batch_size=6)
        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])


# ---- long range


def evaluate(words):
    """Value of a ListOps expression, by a stack and sorting alone."""
    stack = []
    for word in words:
        if word != "]":
            stack.append(word)
            continue
        digits = []
        while not isinstance(stack[-1], str) or stack[-1].isdigit():
            digits.append(int(stack.pop()))
        digits.sort()
        middle = digits[(len(digits) - 1) // 2] + digits[len(digits) // 2]
        operator = stack.pop()
        stack.append({"[MIN": digits[0], "[MAX": digits[-1], "[MED": middle // 2,
                      "[SM": sum(digits) % 10}[operator])
    assert len(stack) == 1
    return int(stack[0])


def test_listops_values():
    x, y = text.listops(300, seed=0, max_length=120)
    lengths = (x > 0).sum(1)
    for row, value, length in zip(x, y, lengths):
        assert row[length:].eq(0).all()
        assert evaluate([text.LISTOPS_VOCAB[i] for i in row[:length]]) == value
    assert 60 < lengths.max() <= 120 and lengths.min() >= 4
    assert set(y.tolist()) == set(range(10))
    assert torch.equal(text.listops(300, 0, 120)[0], x)
    assert not torch.equal(text.listops(300, 1, 120)[0], x)


def test_grey_pixels_are_pillows():
    pictures = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    grey = text.grey_pixels(pictures)
    assert grey.shape == (5, 1024) and grey.dtype == np.uint8
    for picture, row in zip(pictures, grey):
        expected = np.asarray(Image.fromarray(picture).convert("L"))
        assert np.array_equal(row.reshape(32, 32), expected)
