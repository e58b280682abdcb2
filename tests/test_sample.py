"""Text from a checkpoint: how it begins, and where it ends."""
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
    words = write(path, "--prompt=a bad cab", "--temperature=0", "--tokens=15")
    ids = torch.from_numpy(CHARACTERS.encode(words).astype(int))
    best = model(ids[None])[0, 8:-1, :CHARACTERS.n_text].argmax(-1)
    assert torch.equal(best, ids[9:]) and len(best) == 15
    assert capsys.readouterr().out == words + "\n"


def test_the_prompt_is_shown_as_the_model_reads_it(checkpoint):
    """And the same seed gives the same text."""
    path, _ = checkpoint()
    words = "a bad\ncafé"                               # é is not among the model's characters
    a, b = (write(path, f"--prompt={words}") for _ in range(2))
    assert a == b and a.startswith("a bad\ncaf\ufffd") and len(a) == len(words) + 300
    assert "\ufffd" not in a[len(words):]               # the model never writes it
    new, again, other = (write(path, "--tokens=50", f"--seed={seed}") for seed in (0, 0, 1))
    assert new == again != other and len(new) == 50     # a new document: nothing in front


def test_end_of_text_ends_it(checkpoint, bpe, monkeypatch):
    """It is not printed. Without one the model would go on. Some ids only pad."""
    path, _ = checkpoint(bpe, padding=5)
    flags = ["--temperature=2", "--top_k=none", "--tokens=200", "--prompt=a"]
    cut = [write(path, *flags, f"--seed={seed}") for seed in range(4)]
    bpe.eot, end = None, "<|endoftext|>"
    monkeypatch.setattr(sample, "tokenizer_from_meta", lambda meta: bpe)
    whole = [write(path, *flags, f"--seed={seed}") for seed in range(4)]
    assert len({words.find(end) for words in whole}) > 2
    assert cut == [words.split(end)[0] for words in whole]
