"""Tokenizers, preparation, batches, masking and the long-range tasks, against definitions and independent code."""

import json
import tracemalloc

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import tiktoken
import torch
from PIL import Image

from data import images, text
from data.images import DataError

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MERGES = [b"th", b"the", b" t", b" the", b"an", b"in", b"  ", b"\n\n", b" \n", b"er", b" a"]
WORDS = "the cat's hat, another thing in an inner 42 the,then\tit'll don't É naïve —".split(" ")


@pytest.fixture(scope="module")
def encoding():
    """256 bytes, a few merges, GPT-2's pattern and end-of-text as the last id: GPT-2's encoding in small."""
    ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(MERGES)}
    return tiktoken.Encoding("small", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": len(ranks)})


@pytest.fixture
def bpe(encoding):
    return text.GPT2Tokenizer(encoding)


def sentences(n, seed=0):
    rng = np.random.default_rng(seed)
    gaps = [" ", " ", " ", "\n", "\n\n", "  ", " \n", "\n "]
    return ["".join(rng.choice(WORDS) + rng.choice(gaps) for _ in range(rng.integers(1, 30))) for _ in range(n)]


def parquet(path, rows, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: rows}), path, row_group_size=7)


def documents(tokens, tokenizer):
    """The documents of a token file: what lies before each end-of-text. Nothing may follow the last one."""
    ends = np.flatnonzero(tokens == tokenizer.eot)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1] for part in [part[:-1]]]


# Tokenizers


def test_round_trips(bpe):
    for line in sentences(50):
        assert bpe.decode(bpe.encode(line)) == line
        assert bpe.encode(line).tolist() == bpe.encoding.encode_ordinary(line)
        chars = text.CharTokenizer("".join(sorted(set(line))))
        assert chars.decode(chars.encode(line)) == line and chars.encode(line).dtype == np.uint16
    assert bpe.eot not in bpe.encode("<|endoftext|>")
    assert bpe.decode([*bpe.encode("in"), bpe.n_vocab, 50303]) == "in\ufffd\ufffd"
    assert bpe.decode(bpe.encode("half \ud800 pair")) == "half \ufffd pair"


def test_char_tokenizer_has_one_id_for_the_rest():
    tokenizer = text.CharTokenizer("ba")
    assert tokenizer.n_vocab == 3 and tokenizer.eot is None
    assert tokenizer.encode("abc\U0010ffff\ud800").tolist() == [1, 0, 2, 2, 2]
    assert tokenizer.decode([1, 0, 2, 9]) == "ab\ufffd\ufffd"


def test_tokenizers_come_back_from_meta(bpe, encoding):
    for tokenizer in (bpe, text.CharTokenizer("\n abc\"é")):
        meta = json.loads(json.dumps({"name": "x", "tokenizer": tokenizer.meta(), "n_vocab": tokenizer.n_vocab}))
        again = text.tokenizer_from_meta(meta, encoding)
        assert again.n_vocab == tokenizer.n_vocab
        assert again.encode("a cab").tolist() == tokenizer.encode("a cab").tolist()
        with pytest.raises(DataError, match="prepared with 7 tokens"):
            text.tokenizer_from_meta(meta | {"n_vocab": 7}, encoding)
    with pytest.raises(DataError, match="'words'"):
        text.tokenizer_from_meta({"name": "x", "tokenizer": {"kind": "words"}})


def test_missing_bpe_files_name_the_variable(monkeypatch):
    def unreachable(name):
        raise requests.ConnectionError("no route\nto host")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    with pytest.raises(DataError, match="TIKTOKEN_CACHE_DIR") as error:
        text.GPT2Tokenizer()
    assert "\n" not in str(error.value)


# Preparation


def test_pydoc(tmp_path):
    data = text.load("pydoc", tmp_path)
    assert data.tokenizer.characters == "\n" + "".join(chr(i) for i in range(32, 127))  # whatever the Python version
    assert data.tokenizer.n_vocab == 97
    from pydoc_data.topics import topics
    whole = "\n".join(topics[key] for key in sorted(topics))
    expected = "".join(c if c == "\n" or " " <= c <= "~" else "\ufffd" for c in whole)
    assert data.tokenizer.decode(np.concatenate([data.train, data.val])) == expected
    assert len(data.train) == int(0.9 * len(whole)) and data.test is None
    first = (tmp_path / "pydoc" / "train.bin").read_bytes()
    text.prepare("pydoc", cache=tmp_path, overwrite=True)
    assert (tmp_path / "pydoc" / "train.bin").read_bytes() == first
    images.verify("pydoc", tmp_path)


def test_shakespeare_is_split_by_position(tmp_path, bpe, encoding):
    play = "".join(sentences(200))
    (tmp_path / "input.txt").write_text(play)
    left = int(0.9 * len(play))
    text.prepare("shakespeare", tmp_path / "input.txt", tmp_path / "a", bpe)
    data = text.load("shakespeare", tmp_path / "a", encoding)
    assert data.train.tolist() == encoding.encode_ordinary(play[:left])
    assert data.val.tolist() == encoding.encode_ordinary(play[left:])

    for split, part in zip(("train", "validation", "test"), (play[:700], play[700:1500], play[1500:])):  # as on the Hub
        parquet(tmp_path / "hub" / split / "0000.parquet", [part])
    text.prepare("shakespeare", tmp_path / "hub", tmp_path / "b", tokenizer="char")
    chars = text.load("shakespeare_char", tmp_path / "b")
    assert chars.tokenizer.characters == "".join(sorted(set(play[:left])))
    assert chars.tokenizer.decode(chars.train) == play[:left] and chars.tokenizer.decode(chars.val) == play[left:]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt"])
def test_end_of_text_after_each_document(kind, tmp_path, bpe, encoding, monkeypatch):
    rows = sentences(90) + [""]
    source = tmp_path / "source"
    source.mkdir()
    for split, part in (("train", rows), ("validation", rows[:4])):
        if kind == "parquet":
            parquet(source / f"{split}.parquet", part)
        elif kind == "jsonl":
            (source / f"{split}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in part))
        else:
            (source / split).mkdir()
            for i, row in enumerate(part):
                (source / split / f"{i:03}.txt").write_text(row)
    monkeypatch.setattr(text._chunks, "__defaults__", (200,))  # many chunks, so that the threads overtake each other
    text.prepare("books", source, tmp_path, bpe, workers=3)
    data = text.load("books", tmp_path, encoding)
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
        split = datasets.Dataset.from_dict({"i": range(n)}).train_test_split(test_size=fraction, seed=2357)
        assert set(split["test"]["i"]) == set(np.flatnonzero(text.validation_rows(n, fraction)))
    rows = [f"{i} {row}" for i, row in enumerate(sentences(150))]
    parquet(tmp_path / "source" / "a.parquet", rows[:60])
    parquet(tmp_path / "source" / "b.parquet", rows[60:])
    text.prepare("mine", tmp_path / "source", tmp_path, bpe)
    data = text.load("mine", tmp_path, encoding)
    chosen = set(split["test"]["i"])
    assert documents(data.val, bpe) == [row for i, row in enumerate(rows) if i in chosen]
    assert documents(data.train, bpe) == [row for i, row in enumerate(rows) if i not in chosen]


def test_wikitext_articles(tmp_path, bpe, encoding):
    lines = [" \n", " = One = \n", " \n", " the first \n", " = = part = = \n", " \n", " a formula \n", " = 1 / s = \n",
             " \n", " = Two ( film ) = \n", " \n", " the second \n"]
    (tmp_path / "wiki.test.tokens").write_text("".join(lines))
    parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", [line if line.strip() else "" for line in lines])
    for source in ("wiki.test.tokens", "hub"):
        text.prepare("wikitext", tmp_path / source, tmp_path, bpe, overwrite=True)
        data = text.load("wikitext", tmp_path, encoding)
        assert documents(data.test, bpe) == ["".join(lines[:9]), "".join(lines[9:])]
        assert data.train is None and data.val is None


def test_ptb_sentences(tmp_path, bpe, encoding):
    (tmp_path / "ptb.test.txt").write_text(" the <unk> is N \n in an inn \n")
    parquet(tmp_path / "hub" / "validation" / "0000.parquet", ["an in", "a the"], "sentence")
    text.prepare("ptb", tmp_path, tmp_path / "cache", bpe)
    data = text.load("ptb", tmp_path / "cache", encoding)
    assert documents(data.test, bpe) == ["the <unk> is N", "in an inn"]
    assert documents(data.val, bpe) == ["an in", "a the"]


def test_passages(tmp_path, bpe, encoding):
    rows = sentences(5) + ["odd é"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    text.prepare("lambada", tmp_path, tmp_path / "cache", bpe)
    data = text.load("lambada", tmp_path / "cache", encoding)
    assert [passage["text"] for passage in data.passages] == rows == documents(data.test, bpe)

    cbt = {"sentences": [["One .", "Two ."]], "question": ["a XXXXX ran"], "answer": ["cat"],
           "options": [["cat", "dog"]]}
    for task in ("CN", "NE", "V"):
        (tmp_path / "cbt" / task).mkdir(parents=True)
        for split in ("validation", "test"):
            pq.write_table(pa.table(cbt), tmp_path / "cbt" / task / f"{split}-00000-of-00001.parquet")
    text.prepare("cbt", tmp_path / "cbt", tmp_path / "cache", bpe)
    data = text.load("cbt", tmp_path / "cache", encoding)
    assert data.passages == [{"task": task, "context": "One . Two .", "question": "a XXXXX ran",
                              "options": ["cat", "dog"], "answer": "cat"} for task in ("CN", "NE")]
    assert documents(data.val, bpe) == ["One . Two . a cat ran"] * 2


def test_writer_reads_ahead_a_few_chunks_only(tmp_path):
    tokenizer, workers, size = text.CharTokenizer("ab"), 2, 1 << 18
    read, encoded, lag = 0, 0, []
    encode = tokenizer.encode

    def counted(piece):
        nonlocal encoded
        encoded += len(piece)
        return encode(piece)

    def pieces():
        nonlocal read
        for i in range(600):
            piece = "ab" * 50_000 + str(i)
            read += len(piece)
            lag.append(read - encoded)
            yield "train", piece, True

    tokenizer.encode = counted
    tracemalloc.start()
    tokens, n_documents, n_bytes, sample = text.write_tokens(tmp_path, pieces(), tokenizer, workers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(lag) <= (2 * workers + 2) * (size + 100_003)
    assert peak < sum(map(len, sample)) + 24 * size * workers < n_bytes  # a character is 1 byte, its UTF-32 and token 6
    assert tokens == {"train": read} and n_documents == {"train": 600} and n_bytes == read
    assert (tmp_path / "train.bin").stat().st_size == 2 * read


def test_interrupted_preparation_leaves_nothing(tmp_path, bpe, monkeypatch):
    source = tmp_path / "train.jsonl"
    source.write_text("".join(json.dumps({"text": row}) + "\n" for row in sentences(50)) + "{\n")
    with pytest.raises(DataError, match="cannot read .*train.jsonl"):
        text.prepare("mine", source, tmp_path / "cache", bpe)
    source.write_text("".join(json.dumps({"text": row}) + "\n" for row in sentences(50)))

    def interrupt(piece):
        raise KeyboardInterrupt

    monkeypatch.setattr(bpe, "encode", interrupt)
    with pytest.raises(KeyboardInterrupt):
        text.prepare("mine", source, tmp_path / "cache", bpe)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".mine.lock"]
    with pytest.raises(DataError, match="unknown text set 'mine'"):
        text.load("mine", tmp_path / "cache")


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
                            ("columns.parquet", "columns are body"), ("blank.parquet", "has no text")):
        with pytest.raises(DataError, match=message) as error:
            text.prepare("mine", tmp_path / source, tmp_path / "cache", bpe)
        assert "\n" not in str(error.value)
    for name, tokenizer, workers in (("../mine", bpe, 1), ("mine", "words", 1), ("mine", bpe, 0)):
        with pytest.raises(DataError):
            text.prepare(name, tmp_path, tmp_path / "cache", tokenizer, workers)


def test_damaged_sets_are_one_line(tmp_path, encoding, bpe):
    (tmp_path / "input.txt").write_text("the cat\n" * 40)

    def damage(path, edit):
        text.prepare("shakespeare", tmp_path / "input.txt", tmp_path, bpe, overwrite=True)
        path = tmp_path / "shakespeare" / path
        path.write_bytes(edit(path.read_bytes()))

    for path, edit in (("train.bin", lambda b: b[:-2]), ("train.bin", lambda b: b + b"\0"),
                       ("val.bin", lambda b: b[:-2] + np.uint16(encoding.n_vocab).tobytes()),
                       ("meta.json", lambda b: b.replace(b'"gpt2"', b'"char"')), ("meta.json", lambda b: b[:-9]),
                       ("meta.json", lambda b: b"[]")):
        damage(path, edit)
        with pytest.raises(DataError, match="prepare.py shakespeare .*--overwrite") as error:
            text.load("shakespeare", tmp_path, encoding)
        assert "\n" not in str(error.value)
    damage("train.bin", lambda b: b"\1\0" + b[2:])  # a legal token in the place of another: only the checksum tells
    with pytest.raises(DataError, match="train.bin"):
        images.verify("shakespeare", tmp_path)


def test_huge_files_are_scanned_in_blocks():
    tokens = np.zeros(10_000, dtype=np.uint16)
    for place in (0, 9_999):
        tokens[place] = 7
        assert text._largest(tokens, block=10, blocks=20) == 7 == text._largest(tokens)
        tokens[place] = 0


def test_missing_sets_say_how_to_get_them(tmp_path):
    for name, words in (("books", "prepare.py books --source DIR"), ("openwebtext", "prepare.py openwebtext;"),
                        ("wikitxt", "did you mean 'wikitext'")):
        with pytest.raises(DataError, match=words) as error:
            text.load(name, tmp_path)
        assert "\n" not in str(error.value)


def test_hub_is_tried_in_order(tmp_path, bpe, encoding, monkeypatch):
    """main has only a script, the Parquet branch only the first 5 GB, the pull request all."""
    rows = sentences(300)
    (tmp_path / "hub" / "main").mkdir(parents=True)
    parquet(tmp_path / "hub" / "refs/convert/parquet/plain_text/partial-train/0000.parquet", rows[:9])
    parquet(tmp_path / "hub" / "refs/pr/20/data/train-00000-of-00080.parquet", rows)
    asked = []

    def snapshot_download(repository, repo_type, revision, allow_patterns):
        asked.append(revision)
        return str(tmp_path / "hub" / revision)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    text.prepare("openwebtext", cache=tmp_path, tokenizer=bpe)
    assert asked == ["main", "refs/convert/parquet", "refs/pr/20"]
    data = text.load("openwebtext", tmp_path, encoding)
    assert data.meta["documents"] == {"train": 299, "val": 1}

    monkeypatch.setitem(text.HUB, "openwebtext", text.HUB["openwebtext"][:2])
    with pytest.raises(DataError, match="openwebtext@main, .*openwebtext@refs/convert/parquet.*--source DIR") as error:
        text.prepare("openwebtext", cache=tmp_path, tokenizer=bpe, overwrite=True)
    assert "\n" not in str(error.value)
    assert len(text.load("openwebtext", tmp_path, encoding).train) == len(data.train)  # the old one is still there


def test_without_a_network(tmp_path, monkeypatch):
    def snapshot_download(*args, **kwargs):
        raise requests.ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    for name in text.HUB:
        with pytest.raises(DataError, match=f"no route.*prepare.py {name} --source DIR") as error:
            text.prepare(name, cache=tmp_path)
        assert "\n" not in str(error.value)


# Batches


def test_batches_depend_on_seed_and_step_only():
    tokens = np.arange(5000, dtype=np.uint16)
    x, y = text.batch(tokens, 3, 12, 32, seed=5)
    assert x.shape == (12, 32) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(32))  # the tokens are 0, 1, 2 ...
    assert all(map(torch.equal, (x, y), text.batch(tokens, 3, 12, 32, seed=5)))
    assert not torch.equal(x, text.batch(tokens, 4, 12, 32, seed=5)[0])
    assert not torch.equal(x, text.batch(tokens, 3, 12, 32, seed=6)[0])
    ranks = [text.batch(tokens, 3, 12, 32, seed=5, rows=slice(rank * 6, rank * 6 + 6)) for rank in range(2)]
    assert torch.equal(torch.cat([rank[0] for rank in ranks]), x)
    assert torch.equal(torch.cat([rank[1] for rank in ranks]), y)


def test_batches_reach_both_ends():
    x, y = text.batch(np.arange(12, dtype=np.uint16), 0, 400, 8, seed=0)
    assert set(x[:, 0].tolist()) == {0, 1, 2, 3} and y.max() == 11
    with pytest.raises(DataError, match="smaller context"):
        text.batch(np.arange(8, dtype=np.uint16), 0, 2, 8, seed=0)


@pytest.mark.parametrize("n", [2, 3, 8, 9, 10, 16, 17, 33, 100])
@pytest.mark.parametrize("stride", [None, 1, 3, 8])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_target_is_counted_once(n, stride, world):
    tokens, counted, n_batches = np.arange(n, dtype=np.uint16), [], set()
    for rank in range(world):
        batches = list(text.eval_batches(tokens, 8, 2, rank, world, stride))
        n_batches.add(len(batches))
        for x, y in batches:
            assert x.shape == y.shape == (2, 8)
            for row, column in (y >= 0).nonzero().tolist():
                target = y[row, column].item()
                counted.append(target)
                start = target - 1 - column
                assert x[row, : column + 1].tolist() == list(range(start, target))  # predicted from what precedes it
                assert start == 0 or column + 1 >= 8 - (stride or 8) + 1
    assert sorted(counted) == list(range(1, n)) and len(n_batches) == 1


def test_stride_beyond_the_context_is_refused():
    with pytest.raises(DataError, match="stride 9"):
        text.eval_windows(100, 8, 9)


def test_masking_rates():
    n, p, vocab = 400_000, 0.15, 1000
    x = torch.randint(vocab, (400, n // 400), generator=torch.Generator().manual_seed(0))
    inputs, targets = text.mask_tokens(x, torch.Generator().manual_seed(1), vocab, vocab)
    selected = targets >= 0
    assert torch.equal(targets[selected], x[selected]) and torch.equal(inputs[~selected], x[~selected])
    masked, kept = (inputs == vocab) & selected, (inputs == x) & selected
    replaced = selected & ~masked & ~kept
    m = selected.sum().item()
    # a random token is the old one once in `vocab`; 4 standard deviations of a binomial
    for count, of, rate in ((m, n, p), (masked.sum(), m, 0.8), (kept.sum(), m, 0.1 + 0.1 / vocab),
                            (replaced.sum(), m, 0.1 - 0.1 / vocab)):
        assert abs(count - of * rate) < 4 * (of * rate * (1 - rate)) ** 0.5
    drawn = inputs[replaced].double()
    assert drawn.max() < vocab and abs(drawn.mean() - (vocab - 1) / 2) < 4 * vocab / 12 ** 0.5 / len(drawn) ** 0.5


def test_masks_of_two_ranks_are_those_of_one():
    x = torch.randint(50, (6, 40))
    whole = text.mask_tokens(x, torch.Generator().manual_seed(3), 50, 50)
    for rows in (slice(0, 3), slice(3, 6)):
        part = text.mask_tokens(x[rows], torch.Generator().manual_seed(3), 50, 50, rows=rows, batch_size=6)
        assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])


# Long range


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
        stack.append({"[MIN": digits[0], "[MAX": digits[-1], "[MED": middle // 2, "[SM": sum(digits) % 10}[operator])
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
    assert torch.equal(text.listops(300, 0, 120)[0], x) and not torch.equal(text.listops(300, 1, 120)[0], x)


def test_grey_pixels_are_pillows():
    pictures = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    grey = text.grey_pixels(pictures)
    assert grey.shape == (5, 1024) and grey.dtype == np.int64
    for picture, row in zip(pictures, grey):
        assert np.array_equal(row.reshape(32, 32), np.asarray(Image.fromarray(picture).convert("L")))
