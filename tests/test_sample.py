"""Text from a checkpoint: where the prompt comes from, and where it ends."""
import io
import sys

import pytest
import torch
from test_evaluate import CHARACTERS, language_model

import sample


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(tokenizer, ...) writes one of a random model; returns its path and the model."""
    def write(tokenizer=CHARACTERS, masked=False, padding=0):
        path, vocab = tmp_path / "ckpt.pt", tokenizer.n_vocab + masked + padding
        fields = dict(context=24, vocab_size=vocab, causal=not masked)
        return path, language_model(path, tokenizer, **fields)
    return write


def write(path, *flags):
    return sample.main([f"--ckpt={path}", "--device=cpu", *flags])


@torch.no_grad()
def test_greedy_text_is_the_models_own(checkpoint, capsys):
    """Against the model read again from its first token at every step."""
    path, model = checkpoint()
    words, = write(path, "--prompt=a bad cab", "--temperature=0", "--tokens=15")
    ids = torch.from_numpy(CHARACTERS.encode(words).astype(int))
    best = model(ids[None])[0, 8:-1, :CHARACTERS.known].argmax(-1)
    assert torch.equal(best, ids[9:]) and len(best) == 15
    out, err = capsys.readouterr()
    assert out == words + "\n" and err.endswith(" tokens/s\n")


def test_the_prompt_comes_from_flag_or_stdin(checkpoint, monkeypatch, capsys):
    path, _ = checkpoint()
    words = "a bad\ncafé"                               # é is not among the model's characters
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    a, b = (write(path, flag)[0] for flag in (f"--prompt={words}", "--prompt=-"))
    assert a == b and a.startswith("a bad\ncaf\ufffd") and len(a) == len(words) + 300
    assert "\ufffd" not in a[len(words):]               # the model never writes it
    assert "unknown to the model" in capsys.readouterr().err
    three, again, other = (write(path, "--samples=3", "--tokens=50", f"--seed={seed}")
                           for seed in (0, 0, 1))
    assert three == again != other and len({*three}) == 3
    assert [*map(len, three)] == [50] * 3               # a new document: nothing in front


def test_end_of_text_ends_it(checkpoint, bpe):
    """At each text's own, which is not printed; with --stop=false all go on. Some ids only pad."""
    path, _ = checkpoint(bpe, padding=5)
    flags = ["--samples=4", "--temperature=2", "--top_k=none", "--tokens=1000", "--prompt=a"]
    whole, cut = write(path, *flags, "--stop=false"), write(path, *flags)
    end = "<|endoftext|>"
    assert len({words.index(end) for words in whole}) > 2
    assert cut == [words[:words.index(end)] for words in whole]
