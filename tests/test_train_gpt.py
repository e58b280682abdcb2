"""Language models: learning, masked tokens, the final evaluation, starting from weights."""
import math

import numpy as np
import pytest
from helpers import losses, metrics

import train_gpt
from data import text


def entropy(tokens):
    """The least loss of a model that knows how frequent each token is, and not their order."""
    p = np.bincount(tokens) / len(tokens)
    return -(p[p > 0] * np.log(p[p > 0])).sum()


@pytest.mark.parametrize("arch", ["crate", "tost"])
def test_it_learns(train, tmp_path, text_cache, arch):
    train(train_gpt, "a", f"--arch={arch}", "--width=32", "--batch_size=32", "--micro_batch=32",
          "--steps=120", "--warmup=20", "--optimizer=muon", "--lr=3e-2", "--log_every=20")
    first, last = losses(tmp_path / "a")[0], metrics(tmp_path / "a", "val")[-1]
    unigram = entropy(text.load("tiny", text_cache).train)
    assert last["loss"] < 0.92 * unigram < first < math.log(97) + 0.1
    assert last["ppl"] == pytest.approx(math.exp(last["loss"]))


def test_it_learns_to_fill_in(train, tmp_path, text_cache):
    """abc, abc, abc: a masked letter follows from either neighbour."""
    train(train_gpt, "a", "--data=verse", "--objective=masked", "--arch=transformer", "--width=32",
          "--context=8", "--batch_size=16", "--micro_batch=16", "--steps=200", "--warmup=20",
          "--lr=5e-3", "--log_every=20")
    last = metrics(tmp_path / "a", "val")[-1]
    assert last["loss"] < 0.3 * entropy(text.load("verse", text_cache).train) and last["acc"] > 0.9


def test_the_last_evaluation_is_of_all_tokens(train, tmp_path, text_cache):
    """And the best checkpoint is chosen on the same windows throughout."""
    done = train(train_gpt, "a", "--eval_every=6", "--eval_windows=10", "--micro_batch=7")
    middle, last = metrics(tmp_path / "a", "val")
    assert done["best"] != last["loss"] and done["best"] < middle["loss"]
    tokens = text.load("tiny", text_cache).val
    assert middle["n"] == 10 * 16 and last["n"] == len(tokens) - 1
