"""The whole script: learning, exact resume, micro-batches, the final evaluation, and what a user can get wrong."""
import json
import math
import signal

import numpy as np
import pytest
import tiktoken
import torch
from torch.nn import functional as F

import common
import train_gpt
from data import text
from data.images import DataError
from model import ConfigError, LanguageModel, TextConfig

TINY = ["pydoc", "--data=tiny", "--width=16", "--heads=2", "--layers=2", "--context=16", "--batch_size=8", "--micro_batch=8", "--steps=12", "--warmup=2",
        "--log_every=1", "--eval_every=100", "--sample=0", "--device=cpu"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A data directory with 40,000 characters of Python's manual (`tiny`), a short rhyme (`verse`), and a set without a training part (`exam`)."""
    folder = tmp_path_factory.mktemp("text")
    for name, file, words, characters in (("tiny", "manual.txt", text._pydoc()[:40_000], text.PRINTABLE), ("verse", "verse.txt", "abc\n" * 3000, "\nabc"),
                                          ("exam", "test.txt", "read only\n" * 9, text.PRINTABLE)):
        (folder / name).mkdir()
        (folder / name / file).write_text(words)
        text.prepare(name, source=folder / name, cache=folder / "cache", tokenizer=text.CharTokenizer(characters), workers=1, verbose=False)
    return folder / "cache"


@pytest.fixture
def train(cache, tmp_path):
    """train(name, *flags): runs train_gpt in this process into tmp_path/name; returns its last line of metrics."""
    def run(name, *flags, first=TINY):
        return train_gpt.main([*first, f"--data_dir={cache}", f"--out_dir={tmp_path / name}", *flags])
    return run


def metrics(folder, split="train"):
    return [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line.get("split") == split]


def weights(folder, name="ckpt.pt"):
    return common.load_checkpoint(folder / name, "gpt")["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def entropy(tokens):
    """The least loss of a model that knows the frequencies of the tokens and nothing of their order."""
    p = np.bincount(tokens) / len(tokens)
    return -(p[p > 0] * np.log(p[p > 0])).sum()


@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost"])
def test_it_learns(train, tmp_path, cache, arch):
    train("a", f"--arch={arch}", "--width=32", "--batch_size=32", "--micro_batch=32", "--steps=300", "--warmup=20", "--lr=1e-2", "--log_every=20")
    first, last = metrics(tmp_path / "a")[0]["loss"], metrics(tmp_path / "a", "val")[-1]
    assert last["loss"] < 0.92 * entropy(text.load("tiny", cache).train) < first < math.log(97) + 0.1
    assert last["ppl"] == pytest.approx(math.exp(last["loss"]))


def test_it_learns_to_fill_in(train, tmp_path, cache):
    """abc, abc, abc: a masked letter follows from either neighbour."""
    train("a", "--data=verse", "--objective=masked", "--arch=transformer", "--width=32", "--context=8", "--batch_size=16", "--micro_batch=16", "--steps=200",
          "--warmup=20", "--lr=5e-3", "--log_every=20")
    last = metrics(tmp_path / "a", "val")[-1]
    assert last["loss"] < 0.3 * entropy(text.load("verse", cache).train) and last["acc"] > 0.9


def test_same_seed_same_run(train, tmp_path):
    flags = ["--dropout=0.1", "--sample=20", "--eval_every=6"]
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(name, f"--seed={seed}", *flags)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b")) and not same(weights(tmp_path / "a"), weights(tmp_path / "c"))
    samples = [[line["sample"] for line in metrics(tmp_path / name, "val")] for name in "abc"]
    assert samples[0] == samples[1] != samples[2] and [len(words) for words in samples[0]] == [20, 20]


@pytest.mark.parametrize("flags", [[], ["--objective=masked", "--arch=tost", "--optimizer=lion", "--lr=1e-4"]], ids=["causal", "masked"])
def test_interrupted_and_resumed_is_left_alone(train, tmp_path, monkeypatch, flags):
    flags = [*flags, "--dropout=0.1", "--micro_batch=3", "--eval_every=5", "--sample=5"]            # 3 + 3 + 2 sequences a step
    train("whole", *flags)
    stop_at = iter([False] * 6 + [True])

    def should_stop(run):
        run.signal = signal.SIGTERM if next(stop_at) else 0
        return run.signal != 0
    monkeypatch.setattr(common.Run, "should_stop", should_stop)
    with pytest.raises(common.Stopped):
        train("cut", *flags)
    monkeypatch.undo()
    assert common.load_checkpoint(tmp_path / "cut" / "ckpt.pt")["step"] == 7
    train("cut", "--resume", *flags)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut")) and same(weights(tmp_path / "whole", "best.pt"), weights(tmp_path / "cut", "best.pt"))
    for split in ("train", "val"):
        whole, cut = ([{k: v for k, v in line.items() if k != "tokens_per_s"} for line in metrics(tmp_path / name, split)] for name in ("whole", "cut"))
        assert whole == cut


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_micro_batches_change_nothing(train, tmp_path, objective):
    for size in (8, 3, 1):
        train(str(size), f"--objective={objective}", f"--micro_batch={size}")
    whole = metrics(tmp_path / "8")
    for size in (3, 1):
        assert [line["loss"] for line in metrics(tmp_path / str(size))] == pytest.approx([line["loss"] for line in whole], abs=1e-5)
        a, b = metrics(tmp_path / "8", "val")[-1], metrics(tmp_path / str(size), "val")[-1]
        assert a["n"] == b["n"] and a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_the_last_evaluation_counts_every_token_once(train, tmp_path, cache):
    train("a", "--eval_every=6", "--eval_windows=10", "--micro_batch=7")
    middle, last = metrics(tmp_path / "a", "val")
    tokens = torch.from_numpy(text.load("tiny", cache).val.astype(np.int64))
    assert middle["n"] == 10 * 16 and last["n"] == len(tokens) - 1
    content = common.load_checkpoint(tmp_path / "a" / "ckpt.pt", "gpt")
    model = LanguageModel(TextConfig(**content["model_config"])).eval()
    model.load_state_dict(content["model"])
    with torch.no_grad():
        losses = [F.cross_entropy(model(x[None, :-1])[0], x[1:], reduction="none")
                  for x in (tokens[start:start + 17] for start in range(0, len(tokens) - 1, 16))]
    assert last["loss"] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(train, tmp_path):
    with pytest.raises(common.Diverged, match="step"):
        train("a", "--lr=1e30", "--warmup=0", "--optimizer=lion", "--clip=0", "--save_every=1")
    assert all(m["loss"] is not None for m in metrics(tmp_path / "a"))


def test_starting_from_weights(train, tmp_path, cache):
    train("a")
    flags = [*TINY, f"--init_from={tmp_path / 'a' / 'ckpt.pt'}"]
    c, _ = common.parse(train_gpt.Config, train_gpt.PRESETS, flags, "")
    tokenizer = text.load("tiny", cache).tokenizer
    assert same(train_gpt.build_model(c, tokenizer).state_dict(), weights(tmp_path / "a"))
    c.width = 32
    with pytest.raises(common.UserError, match="positions is .16, 16. there, .16, 32. here"):
        train_gpt.build_model(c, tokenizer)


# Parameters without positions: PAPERS' "60M", "57M / 120M" and so on belong to the sizes of model.py, tested there
PUBLISHED = {"openwebtext": 59_886_336, "crate-alpha": 109_431_552, "tost": 109_597_584, "aot": 101_868_544, "gpt2": 123_587_328, "bert": 59_886_336}


@pytest.mark.parametrize("preset", train_gpt.PRESETS)
def test_presets(preset):
    """Each builds, its batch divides among 1 to 8 GPUs, and on GPT-2's tokens the model is the published one."""
    c, name = common.parse(train_gpt.Config, train_gpt.PRESETS, [preset], "", default="openwebtext")
    ranks = {bytes([i]): i for i in range(256)}
    bpe = text.GPT2Tokenizer(tiktoken.Encoding("bytes", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256}))
    bpe.n_vocab = 50257
    tokenizer = bpe if preset in PUBLISHED else text.CharTokenizer(text.PRINTABLE)
    with torch.device("meta"):
        model = train_gpt.build_model(c, tokenizer)
    assert name == preset and model.count() == PUBLISHED.get(preset, model.count())
    assert model.config.vocab_size == (50304 if preset in PUBLISHED else 97)
    assert model.config.causal == (preset != "bert") and c.warmup < c.steps and all(c.batch_size % gpus == 0 for gpus in (1, 2, 4, 8))


def test_the_default_is_the_papers_setting():
    c, preset = common.parse(train_gpt.Config, train_gpt.PRESETS, [], "", default="openwebtext")
    assert (preset, c.data, c.arch, c.size, c.context, c.batch_size, c.steps) == ("openwebtext", "openwebtext", "crate", "base", 1024, 384, 600_000)
    assert (c.optimizer, c.lr, c.min_lr, c.warmup, c.beta1, c.beta2, c.weight_decay, c.clip) == ("adamw", 6e-4, 6e-5, 2000, 0.9, 0.95, 0.1, 1.0)


@pytest.mark.parametrize("flags, says", [
    (["--heads=3"], "does not divide width"), (["--size=bas"], "did you mean base"), (["--arch=tos"], "did you mean tost"),
    (["--step=2"], "step"), (["--objective=mask"], "did you mean masked"), (["--context=50000"], "use a smaller context"),
    (["--data=openwebtext"], "python data/prepare.py openwebtext"), (["--data=exam"], "no training or no validation part"),
    (["--init_from=nowhere.pt"], "nowhere.pt"), (["--lr=fast"], "a number"), (["--learning_rate=1"], "no flag"), (["--mask_rate=0"], "more than 0"),
    (["--resume"], "nothing to resume"), (["--device=cuda"] if not torch.cuda.is_available() else ["--device=mps"], "this machine has none")])
def test_mistakes_are_one_line(train, tmp_path, flags, says):
    with pytest.raises((common.UserError, ConfigError, DataError)) as error:
        train("a", *flags)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "a").glob("*.json*"))


def test_resuming_another_model_is_refused(train, tmp_path):
    train("a")
    before = weights(tmp_path / "a")
    for flag, says in (("--width=32", "width=16, the flags say 32"), ("--objective=masked", "vocab_size=97, the flags say 98")):
        with pytest.raises(common.UserError, match=says):
            train("a", "--resume", flag)
    with pytest.raises(common.UserError, match="is not empty"):
        train("a")
    assert same(before, weights(tmp_path / "a"))


def test_exit_status_of_a_mistake(script):
    cases = [["train_gpt.py", "pydocs"], ["sample.py", "--ckpt=nowhere.pt"], ["sample.py", "best.pt"]]
    for (name, *flags), process in [(case, script(*case)) for case in cases]:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and err.count("\n") == 1 and err.startswith(f"{name}: "), err
