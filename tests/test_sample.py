"""Text from a checkpoint: where the prompt comes from, what is printed, and how gaps are filled."""
import io
import sys
from dataclasses import asdict

import pytest
import tiktoken
import torch

import common
import sample
from data import text
from model import ConfigError, LanguageModel, TextConfig

CHARACTERS = text.CharTokenizer("\n abcdefgh.")


@pytest.fixture
def bpe(monkeypatch):
    """GPT-2's encoding in small, in its place: 256 bytes, two merges, end-of-text."""
    ranks = {bytes([i]): i for i in range(256)} | {b" t": 256, b" th": 257}
    encoding = tiktoken.Encoding("small", pat_str=r" ?\w+|\s+|[^\s\w]+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(text, "_gpt2_encoding", lambda: encoding)
    return text.GPT2Tokenizer()


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(tokenizer, ...) writes one of a model with weights of deviation 0.3; returns its path and the model."""
    def write(tokenizer=CHARACTERS, masked=False, padding=0, **fields):
        config = TextConfig(**dict(width=16, heads=2, layers=2, context=24, vocab_size=tokenizer.n_vocab + masked + padding, causal=not masked) | fields)
        model = LanguageModel(config).eval()
        for p in model.parameters():
            p.data.normal_(std=0.3)
        meta = dict(name="x", tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab, objective="masked" if masked else "causal")
        common.save_checkpoint(tmp_path / "ckpt.pt", dict(task="gpt", model=model.state_dict(), model_config=asdict(config), data_meta=meta,
                                                          run_config={}, step=1, optimizer={}, extra={}))
        return tmp_path / "ckpt.pt", model
    return write


def write(path, *flags):
    return sample.main([f"--ckpt={path}", "--device=cpu", *flags])


@torch.no_grad()
def test_it_is_the_models_own_text(checkpoint, capsys):
    """Greedy, against the model read again from its first token at every step."""
    path, model = checkpoint()
    ids = CHARACTERS.encode("a bad cab").tolist()
    for _ in range(15):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert write(path, "--prompt=a bad cab", "--temperature=0", "--tokens=15") == [CHARACTERS.decode(ids)]
    out, err = capsys.readouterr()
    assert out == CHARACTERS.decode(ids) + "\n" and err.endswith(" tokens/s\n") and float(err.split()[0].replace(",", "")) > 0


def test_the_prompt_comes_from_flag_file_or_stdin(checkpoint, tmp_path, monkeypatch):
    path, _ = checkpoint()
    words = "a bad\ncafé"                                                    # é is not among the model's characters
    (tmp_path / "prompt.txt").write_text(words, encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(words))
    found = [write(path, flag)[0] for flag in (f"--prompt={words}", f"--prompt_file={tmp_path / 'prompt.txt'}", "--prompt=-")]
    assert found[0] == found[1] == found[2] and found[0].startswith("a bad\ncaf\ufffd") and len(found[0]) == len(words) + 300
    assert len(write(path, "--tokens=7")[0]) == 7                            # a new document: nothing in front


def test_seeds(checkpoint):
    path, _ = checkpoint()
    first = write(path, "--prompt=a")
    assert write(path, "--prompt=a") == first != write(path, "--prompt=a", "--seed=1")
    three = write(path, "--prompt=a", "--samples=3", "--tokens=50")
    assert len(set(three)) == 3 and all(words[0] == "a" and len(words) == 51 for words in three)


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_streamed_is_what_is_returned(checkpoint, bpe, capsys, seed):
    """With tokens that are bytes: a random model writes much that is not UTF-8, and ids that only pad the vocabulary."""
    path, _ = checkpoint(bpe, padding=5)
    found, = write(path, "--prompt=the café", "--temperature=3", "--top_k=none", "--stop=false", f"--seed={seed}")
    assert capsys.readouterr().out == found + "\n" and found.startswith("the café") and "\ufffd" in found


def test_a_character_is_printed_when_it_is_whole(checkpoint, bpe, monkeypatch):
    path, _ = checkpoint(bpe)
    written = [*bpe.encode("é€"), *bpe.encode(" th")[:1], 0xe2, 0x82, *b"a", 0xc3]         # two characters, a token, two broken ones
    monkeypatch.setattr(LanguageModel, "stream", lambda self, ids, *rest: (torch.tensor([int(i)]) for i in written))
    pieces = []
    monkeypatch.setattr(sample, "print", lambda *words, file=None, **_: pieces.extend(words if file is None else ()), raising=False)
    found, = write(path, "--prompt=x")
    assert pieces == ["x", "é", "€", " th", "\ufffda", "\ufffd"] and "".join(pieces) == found


def test_end_of_text_ends_it(checkpoint, bpe, capsys):
    """Each text ends where its own end-of-text came, which is not printed; with --stop=false it is, and the text goes on."""
    path, _ = checkpoint(bpe)
    flags = ["--samples=4", "--temperature=2", "--top_k=none", "--tokens=2000", "--prompt=a"]
    whole, cut = write(path, *flags, "--stop=false"), write(path, *flags)
    end = "<|endoftext|>"
    assert all(end in words for words in whole) and len({words.index(end) for words in whole}) == 4
    assert cut == [words[:words.index(end)] for words in whole]
    capsys.readouterr()
    one, = write(path, *flags, "--samples=1")
    assert end not in one and capsys.readouterr().out == one + "\n"


@torch.no_grad()
def test_gaps_are_filled_and_nothing_else(checkpoint, capsys):
    path, model = checkpoint(masked=True)
    found = write(path, "--fill=a b___d ca_____ f.")
    ids = [*CHARACTERS.encode("a b"), 12, *CHARACTERS.encode("d ca"), 12, *CHARACTERS.encode(" f.")]
    filled = [CHARACTERS.decode([i]) for i in model(torch.tensor([[int(i) for i in ids]]))[0, :, :12].argmax(-1)]
    assert found == f"a b{filled[3]}d ca{filled[8]} f." and capsys.readouterr().out == found + "\n"


@torch.no_grad()
def test_a_gap_takes_the_space_before_it(checkpoint, bpe):
    path, model = checkpoint(bpe, masked=True)
    ids = [*map(int, bpe.encode("so")), 259, *map(int, bpe.encode(" the")), 259]
    filled = model(torch.tensor([ids]))[0, :, :259].argmax(-1)
    assert write(path, "--fill=so ___ the ___") == bpe.decode([*ids[:2], int(filled[2]), *ids[3:-1], int(filled[-1])])


@pytest.mark.parametrize("masked, flags, says", [
    (False, ["--fill=a ___"], "--objective=masked"), (True, ["--fill=a"], "needs a gap"), (True, ["--prompt=a"], "is a masked model"),
    (True, ["--fill=" + "a" * 30 + "___"], "31 tokens exceed the context of 24"), (False, ["--prompt_file=nowhere"], "cannot read the prompt"),
    (False, ["--temperature=-1"], "0 or more"), (False, ["--top_p=0"], "more than 0"), (False, ["--token=3"], "did you mean tokens")])
def test_mistakes_are_one_line(checkpoint, masked, flags, says):
    path, _ = checkpoint(masked=masked)
    with pytest.raises((common.UserError, ConfigError)) as error:
        write(path, *flags)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_other_files_are_refused(tmp_path, checkpoint):
    path, _ = checkpoint()
    content = common.load_checkpoint(path)
    common.save_checkpoint(tmp_path / "vit.pt", content | dict(task="vit"))
    (tmp_path / "torn.pt").write_bytes(path.read_bytes()[:-100])
    for name, says in (("vit.pt", "of task vit, not gpt"), ("torn.pt", "torn.pt"), ("nowhere.pt", "No such file")):
        with pytest.raises(common.UserError, match=says):
            write(tmp_path / name)
    with pytest.raises(common.UserError, match="--ckpt is needed"):
        sample.main(["--prompt=a"])
