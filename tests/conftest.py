"""One thread and one seed for every test, and small sets to train on."""
import os
import signal
import sys
from pathlib import Path

import pytest
import tiktoken
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"      # no test waits for a network
torch.cpu.get_capabilities = dict       # --dtype=auto is float32, whatever the CPU has

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
MERGES = [b"th", b"the", b" t", b" the", b"an", b"in", b"  ", b"\n\n", b" \n", b"er", b" a"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)        # processes.cli has its own


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A data directory with `shapes` of 400 + 100 images."""
    from data.prepare import DrawnSet, prepare
    cache = tmp_path_factory.mktemp("cache")
    prepare("shapes", DrawnSet((400, 100)), cache=cache)
    return cache


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory):
    """A data directory with 40,000 characters of Python's manual (`tiny`), all of it (`pydoc`), a
    short rhyme (`verse`), and a set without a training part (`exam`)."""
    from data.prepare import prepare, PRINTABLE, pydoc, SETS, TextSet
    folder = tmp_path_factory.mktemp("text")
    sets = [("tiny", "a.txt", PRINTABLE, pydoc()[:40_000]),
            ("verse", "a.txt", "\nabc", "abc\n" * 3000),
            ("exam", "test.txt", PRINTABLE, "read only\n" * 9)]
    for name, file, characters, words in sets:
        (folder / name).mkdir()
        (folder / name / file).write_text(words)
        prepare(name, TextSet("char", characters=characters), folder / name, folder / "cache")
    prepare("pydoc", SETS["pydoc"], cache=folder / "cache")
    return folder / "cache"


@pytest.fixture
def bpe(monkeypatch):
    """GPT-2's tokenizer in small: 256 bytes, a few merges, its pattern, end-of-text last."""
    from data.tokenizer import GPT2Tokenizer
    tokens = [*(bytes([i]) for i in range(256)), *MERGES]
    encoding = tiktoken.Encoding("small", pat_str=GPT2_PATTERN,
                                 mergeable_ranks={token: i for i, token in enumerate(tokens)},
                                 special_tokens={"<|endoftext|>": len(tokens)})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return GPT2Tokenizer()


@pytest.fixture
def train(cache, text_cache, tmp_path):
    """train(module, name, *flags): a tiny run of a training script in this process, into
    tmp_path/name; returns its last line of metrics."""
    from helpers import FLAGS

    def run(module, name, *flags):
        data_dir = text_cache if module.__name__ == "train_gpt" else cache
        places = [f"--data_dir={data_dir}", f"--out_dir={tmp_path / name}"]
        return module.main([*FLAGS[module.__name__], *places, *flags])
    return run
