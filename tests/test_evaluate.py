"""The scores and commands of evaluate.py, against images and passages read one at a time."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import metrics, scrambled, write_model
from torch.nn import functional as F

import evaluate
import train_gpt
import train_vit
from data import text
from data.tokenizer import CharTokenizer
from flags import UserError
from model import LanguageModel, TextConfig
from processes import Processes

CHARACTERS = CharTokenizer("\n abcdefgh.")
CONTEXT = 16


def language_model(path, tokenizer=CHARACTERS, **fields):
    fields = dict(context=CONTEXT, vocab_size=tokenizer.n_vocab) | fields
    model = scrambled(LanguageModel(TextConfig(width=16, heads=2, layers=2, **fields)))
    meta = dict(name="letters", tokenizer=tokenizer.meta())
    write_model(path, model, "gpt", meta, mask_rate=0.15)
    return model


@pytest.fixture
def run(tmp_path, capsys, cache):
    """run(command, *words) on tmp_path/ckpt.pt: the result, which is also the last line printed."""
    def run(command, *words):
        base = [f"--ckpt={tmp_path / 'ckpt.pt'}", f"--data_dir={cache}", "--device=cpu"]
        result = evaluate.main([command, *base, *words])
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
        return result
    return run


def test_nearest_neighbours_by_hand():
    x, y = F.normalize(torch.randn(60, 5), dim=1), torch.randint(3, (60,))
    tests, labels = torch.randn(23, 5), torch.randint(3, (23,))
    right = 0
    for t, label in zip(tests, labels.tolist()):
        cosine = (x @ (t / t.norm())).tolist()
        nearest = sorted(range(60), key=lambda i: -cosine[i])[:7]
        votes = [sum(np.exp(cosine[i] / 0.1) for i in nearest if y[i] == k) for k in range(3)]
        right += votes.index(max(votes)) == label
    result = evaluate.nearest_neighbours(Processes("cpu"), 3 * x, y, tests, labels, 3, 7, 0.1)
    assert result == dict(acc=pytest.approx(right / 23), k=7)


def test_logistic_regression_is_at_its_minimum():
    x, y = torch.randn(200, 4), torch.randint(3, (200,))
    W, b = evaluate.logistic_regression(x, y, 3, decay=0.1)
    slope = (x @ W + b).softmax(1) - F.one_hot(y, 3)
    assert (x.T @ slope / 200 + 0.1 * W).abs().max() < 1e-4 and slope.mean(0).abs().max() < 1e-4


@pytest.mark.parametrize("n", [10, 22])
def test_a_masked_model_sees_no_padding(monkeypatch, n):
    """Neither behind a text shorter than the context, 16, nor in a last window, which is left out
    if it is not full."""
    model = LanguageModel(TextConfig(width=16, heads=2, layers=1, context=16, vocab_size=12,
                                     causal=False))
    seen, tokens = [], 1 + np.arange(n) % 9
    monkeypatch.setattr(text, "mask_some", lambda x, *_: (seen.append(x[0].clone()) or x, x))
    evaluate.language_scores(model, tokens, Processes("cpu"), 1, 11, 0.15)
    assert len(seen) == 1 and all((x != 0).all() for x in seen)


def test_accuracy_and_probes(train, tmp_path, run):
    train(train_vit, "run")
    (tmp_path / "run" / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    line, = metrics(tmp_path / "run", "val")
    result = run("accuracy", "--batch_size=30")
    assert result["n"] == 100 and result["acc"] == line["acc"]
    assert result["loss"] == pytest.approx(line["loss"], abs=1e-5)
    assert run("linear", "--features=mean")["acc"] > 0.1
    trained, fresh = (run("knn", *more) for more in ([], ["--untrained"]))
    assert fresh["acc"] != trained["acc"] and fresh["encoder"].endswith(", random weights")
    pixels = run("knn", "--features=pixels")
    assert pixels["encoder"] is None and pixels["acc"] not in (trained["acc"], fresh["acc"])


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_lm_agrees_with_the_run(train, tmp_path, text_cache, run, objective):
    """Also with another batch size: the mask of a window depends on its number alone."""
    train(train_gpt, "out", "--mask_rate=0.3", f"--objective={objective}")
    (tmp_path / "out" / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    line = metrics(tmp_path / "out", "val")[-1]
    result = run("lm", "--batch_size=3", f"--data_dir={text_cache}")
    assert (result["data"], result["split"], result["n"]) == ("tiny", "val", line["n"])
    assert result["loss"] == pytest.approx(line["loss"], abs=1e-6)
    assert result.get("acc") == line.get("acc")


@torch.no_grad()
def test_every_token_is_predicted_once(tmp_path, run, monkeypatch):
    """From what its window holds before it."""
    letters = torch.randint(11, (300,))
    data = SimpleNamespace(name="letters", tokenizer=CHARACTERS, train=None, val=None,
                           test=letters.numpy())
    monkeypatch.setattr(text, "load", lambda name, cache: data)
    model, losses = language_model(tmp_path / "ckpt.pt", arch="tost"), []
    for target in range(1, len(letters)):
        start = (target - 1) // CONTEXT * CONTEXT
        logits = model(letters[None, start:target])[0, -1]
        losses.append(F.cross_entropy(logits, letters[target]))
    result = run("lm", "--batch_size=7")
    assert result["loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert (result["split"], result["n"]) == ("test", len(letters) - 1)
    with pytest.raises(UserError, match="--split=train.* letters has only test"):
        run("lm", "--split=train")
