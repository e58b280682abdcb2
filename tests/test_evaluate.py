"""Numbers on features and on language models, against passages read one at a time."""
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch
from torch.nn import functional as F

import evaluate
import scores
import train_gpt
import train_vit
from checkpoint import load_model
from flags import DeviceFlags, UserError
from parallel import Processes
from data import augment, images, text
from data.prepare import prepare as prepare_set
from helpers import write_model
from model import LanguageModel, TextConfig

CHARACTERS = text.CharTokenizer("\n abcdefgh.")
CONTEXT = 16


@pytest.fixture
def bpe(monkeypatch):
    """A small encoding in place of GPT-2's: 256 bytes, two merges, end-of-text."""
    ranks = {bytes([i]): i for i in range(256)} | {b" t": 256, b" th": 257}
    encoding = tiktoken.Encoding("small", pat_str=r" ?\w+|\s+|[^\s\w]+", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return text.GPT2Tokenizer()



def random_model(path, tokenizer=CHARACTERS, **fields):
    """A saved model with weights of deviation 0.3."""
    fields = dict(context=CONTEXT, vocab_size=tokenizer.n_vocab) | fields
    model = LanguageModel(TextConfig(width=16, heads=2, layers=2, **fields))
    for p in model.parameters():
        p.data.normal_(std=0.3)
    meta = dict(name="letters", tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab)
    write_model(path, model, "gpt", meta, mask_rate=0.15)
    return model.eval()


def prepare(folder, name, tokenizer, files):
    """folder/cache/NAME from files {name: text, or columns of a Parquet file}."""
    source = folder / "sources" / name
    for path, content in files.items():
        path = source / path
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.write_text(content)
        else:
            pq.write_table(pa.table(content), path)
    prepare_set(name, source, folder / "cache", tokenizer)


def jsonl(texts):
    return {"test.jsonl": "".join(json.dumps(dict(text=words)) + "\n" for words in texts)}


@pytest.fixture
def letters(tmp_path):
    """`letters`, 300 random characters to test on and 50 to validate; returns the 300."""
    words = "".join(np.random.default_rng(0).choice(list(CHARACTERS.characters), 350))
    prepare(tmp_path, "letters", CHARACTERS, {"test.txt": words[:300], "val.txt": words[300:]})
    return torch.from_numpy(CHARACTERS.encode(words[:300]).astype(np.int64))


@pytest.fixture
def run(tmp_path, capsys):
    """run(subcommand, *flags) on tmp_path/ckpt.pt; the result, which is also what is printed."""
    def run(command, *flags):
        base = [f"--ckpt={tmp_path / 'ckpt.pt'}", f"--data_dir={tmp_path / 'cache'}"]
        result = evaluate.main([command, *base, "--device=cpu", *flags])
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
        return result
    return run


# Loss per token

@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_lm_agrees_with_the_run(tmp_path, run, objective):
    """Also with another batch size: the mask of a window depends on its number alone."""
    words = "the cat sat on the mat, and that was that. "
    prepare(tmp_path, "tiny", text.CharTokenizer(text.PRINTABLE),
            {"train.txt": words * 40, "val.txt": words.upper() * 9})
    out = tmp_path / "out"
    train_gpt.main(["pydoc", "--data=tiny", f"--data_dir={tmp_path / 'cache'}", f"--out_dir={out}",
                    "--width=16", "--heads=2", "--layers=1", "--context=16", "--batch_size=8",
                    "--micro_batch=5", "--steps=5", "--device=cpu", "--sample=0", "--mask_rate=0.3",
                    f"--objective={objective}"])
    (out / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-2])
    found = run("lm", "--batch_size=3")
    assert (found["data"], found["split"], found["n"]) == ("tiny", "val", line["n"])
    assert found["loss"] == pytest.approx(line["loss"], abs=1e-6)
    assert found["ppl"] == pytest.approx(line["ppl"]) and found.get("acc") == line.get("acc")
    if objective == "causal":       # one byte a character
        assert found["loss_per_byte"] == pytest.approx(found["loss"])


@pytest.mark.parametrize("n", [10, CONTEXT + 6])
def test_a_masked_model_sees_no_padding(tmp_path, monkeypatch, n):
    """Neither behind a text shorter than the context nor in a last window that it does not fill."""
    model, seen = random_model(tmp_path / "ckpt.pt", causal=False), []
    tokens = 1 + np.arange(n) % 9
    monkeypatch.setattr(text, "mask_tokens", lambda x, *_: (seen.append(x[0].clone()) or x, x))
    scores.language_scores(model, tokens, DeviceFlags(), Processes("cpu"), 1,
                             CHARACTERS.n_vocab, 0.15)
    assert len(seen) == 1 + (n > CONTEXT + 1) and all((x != 0).all() for x in seen)


@pytest.mark.parametrize("stride", [1, 5, CONTEXT])
@torch.no_grad()
def test_sliding_windows(tmp_path, run, letters, stride):
    """Each token is predicted from what the first window that reaches it holds before it."""
    model, losses = random_model(tmp_path / "ckpt.pt", arch="tost"), []
    for target in range(1, len(letters)):
        start = max(0, -(-(target - CONTEXT) // stride)) * stride
        logits = model(letters[None, start:target])[0, -1]
        losses.append(F.cross_entropy(logits, letters[target]))
    found = run("lm", f"--stride={stride}", "--batch_size=7")
    assert found["loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert (found["split"], found["n"], found["stride"]) == ("test", len(letters) - 1, stride)
    if stride == CONTEXT:
        assert run("lm")["loss"] == pytest.approx(found["loss"])
        assert run("lm", "--split=val")["n"] == 49
        half = run("lm", "--dtype=bfloat16")["loss"]
        assert half != found["loss"] and half == pytest.approx(found["loss"], rel=0.02)


def test_loss_per_byte(tmp_path, run, bpe):
    """End-of-text is predicted, and has no bytes."""
    documents = ["the café is there", "thé ", "a € b"]
    prepare(tmp_path, "notes", bpe, jsonl(documents))
    random_model(tmp_path / "ckpt.pt", bpe)
    found = run("lm", "--data=notes")
    n_bytes = sum(len(words.encode()) for words in documents) - 1   # the first, t, is not predicted
    assert found["loss_per_byte"] * n_bytes == pytest.approx(found["loss"] * found["n"])
    characters = text.CharTokenizer("aé€")
    assert evaluate.count_bytes(characters, characters.encode("a€éx")) == 1 + 3 + 2 + 1


# Passages

def log_probabilities(model, ids):
    """log p(ids[i] | ids[:i]) for i = 1, 2, ..."""
    ids = torch.tensor(ids)
    return model(ids[None, :-1])[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@torch.no_grad()
def test_lambada_word_by_word(tmp_path, run):
    """Decoded greedily, a passage at a time; those beyond the context lose their beginning."""
    few, rng = text.CharTokenizer("\n ab"), np.random.default_rng(0)    # few, to be right sometimes
    model = random_model(tmp_path / "ckpt.pt", few)
    texts = [" ".join("".join(rng.choice(list("ab"), rng.integers(1, 3)))
                      for _ in range(rng.integers(1, 20))) for _ in range(120)]
    prepare(tmp_path, "lambada", few, jsonl(texts))
    right, losses = [], []
    for words in texts:
        start = words.rindex(" ") if " " in words else 0
        target = few.encode(" " + words[start:].strip()).tolist()
        prompt = few.encode("\n" + words[:start]).tolist()[-(CONTEXT + 1 - len(target)):]
        losses.append(-float(log_probabilities(model, prompt + target)[-len(target):].sum()))
        written = list(prompt)
        for _ in target:
            written.append(int(model(torch.tensor([written]))[0, -1].argmax()))
        right.append(written[len(prompt):] == target)
    found = run("lambada", "--batch_size=50")
    assert 0 < sum(right) < found["n"] == 120 and max(map(len, texts)) > 2 * CONTEXT
    assert found["acc"] == pytest.approx(np.mean(right))
    assert found["word_loss"] == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize("context", [64, 24])
@torch.no_grad()
def test_cbt_passage_by_passage(tmp_path, run, context):
    """The likelihood of whole passages; beyond the context, all candidates lose the same tokens."""
    model = random_model(tmp_path / "ckpt.pt", arch="crate-alpha", context=context)
    rng, rows, right = np.random.default_rng(1), [], 0

    def word():
        return "".join(rng.choice(list("abcdefgh"), rng.integers(1, 5)))
    for _ in range(40):
        options = [word() for _ in range(4)]
        sentences = [" ".join(word() for _ in range(4)) + " ." for _ in range(2)]
        question = f"{word()} XXXXX {word()} ."
        filled = [" ".join([*sentences, question.replace("XXXXX", option)]) for option in options]
        ids = [CHARACTERS.encode(words).tolist() for words in filled]
        extra = max(0, max(map(len, ids)) - context - 1)
        likelihood = [float(log_probabilities(model, one[extra:]).sum()) for one in ids]
        rows.append((sentences, question, options, options[int(rng.integers(4))]))
        right += options[int(np.argmax(likelihood))] == rows[-1][3]
    names = "sentences", "question", "options", "answer"        # as the Hub's files have them
    columns = dict(zip(names, map(list, zip(*rows))))
    files = {f"{task}/validation-0.parquet": columns for task in ("CN", "NE")}
    prepare(tmp_path, "cbt", CHARACTERS, files)
    found = run("cbt", "--batch_size=7")
    assert found["acc_CN"] == found["acc_NE"] == right / 40 and 0 < right < 40
    assert run("cbt", "--task=NE") == dict(data="cbt", acc_NE=right / 40, n_NE=40)


# Mistakes

def test_another_tokenizer_is_refused(tmp_path, run, letters, bpe):
    prepare(tmp_path, "notes", bpe, {"test.txt": "the end"})
    prepare(tmp_path, "other", text.CharTokenizer("abcdefgh. \n"), {"test.txt": "the end"})
    random_model(tmp_path / "ckpt.pt")
    for name, found in (("notes", "gpt2, 259 tokens"), ("other", "char, 12 tokens")):
        says = f"{name} was prepared with another tokenizer .{found}. .* .char, 12 tokens."
        with pytest.raises(UserError, match=says):
            run("lm", f"--data={name}")


@pytest.mark.parametrize("flags, says", [
    (["lm", "--split=train"], "has no train part, only val and test"),
    (["lm", "--stride=17"], "stride 17 must be 1 to 16"),
    (["lm", "--data=wikitex"], "wikitex is not one of"),
    (["lambada"], "a context of 16 tokens is too short: 61"),
    (["cbt", "--task=V"], "not one of CN, NE, both"),
    (["lambda"], "did you mean lambada"),
    (["accuracy"], "of task gpt, not vit")])
def test_mistakes_are_one_line(tmp_path, run, letters, flags, says):
    random_model(tmp_path / "ckpt.pt")
    prepare(tmp_path, "lambada", CHARACTERS, jsonl(["a bad cab", "a " + "bad" * 20]))
    with pytest.raises(UserError) as error:
        run(*flags)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_masked_models_have_no_next_token(tmp_path, run):
    random_model(tmp_path / "ckpt.pt", causal=False, vocab_size=CHARACTERS.n_vocab + 1)     # [MASK]
    for task in ("lambada", "cbt"):
        with pytest.raises(UserError, match="is a masked model"):
            run(task)


# Features

def test_nearest_neighbours_by_hand():
    x, y = F.normalize(torch.randn(60, 5), dim=1), torch.randint(3, (60,))
    tests, labels = torch.randn(23, 5), torch.randint(3, (23,))
    right = [0, 0]
    for t, label in zip(tests, labels.tolist()):
        cosine = (x @ (t / t.norm())).tolist()
        nearest = sorted(range(60), key=lambda i: -cosine[i])[:7]
        for j, weigh in enumerate((lambda i: math.exp(cosine[i] / 0.1), lambda i: 1.0)):
            votes = [sum(weigh(i) for i in nearest if y[i] == k) for k in range(3)]
            right[j] += votes.index(max(votes)) == label
    found = scores.nearest_neighbours(3 * x, y, tests, labels, 3, k=7, temperature=0.1, chunk=10)
    assert found["acc"] == pytest.approx(right[0] / 23)
    assert found["plain"] == pytest.approx(right[1] / 23, abs=1 / 23)       # ties may differ


def test_logistic_regression_is_at_its_minimum():
    x, y = torch.randn(200, 4), torch.randint(3, (200,))
    W, b = scores.logistic_regression(x, y, 3, decay=0.1)
    slope = (x @ W + b).softmax(1) - F.one_hot(y, 3)
    gradient = x.T @ slope / 200 + 0.1 * W
    torch.testing.assert_close(gradient, torch.zeros(4, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(slope.mean(0), torch.zeros(3), atol=1e-4, rtol=0)


def test_accuracy_and_probes(cache, tmp_path, monkeypatch):
    out = tmp_path / "run"
    flags = [f"--data_dir={cache}", "--device=cpu"]
    train_vit.main(["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8",
                    "--epochs=0.1", "--ema=0.5", f"--out_dir={out}", *flags])
    flags.append(f"--ckpt={out / 'ckpt.pt'}")
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-2])
    found = evaluate.main(["accuracy", *flags, "--batch_size=30"])
    assert found["n"] == 100 and found["acc"] == line["acc"]
    assert found["loss"] == pytest.approx(line["loss"], abs=1e-5)

    other = dict(train_images=np.zeros((2, 32, 32, 3), np.uint8), train_labels=np.arange(2),
                 val_images=np.zeros((2, 32, 32, 3), np.uint8), val_labels=np.arange(2))
    digits = images.ImageData("digits", list("0123456789"), [0] * 3, [1] * 3, 32, **other)
    with monkeypatch.context() as patch:
        patch.setattr(images, "load", lambda name, cache: digits)
        with pytest.raises(UserError, match="other classes .circle, ...*digits has .0, ..."):
            evaluate.main(["accuracy", *flags, "--data=digits"])

    data, encoder = images.load("shapes", cache), load_model(out / "ckpt.pt").encoder
    with torch.no_grad():
        x = augment.to_float(torch.from_numpy(data.train_images[:9].copy()))
        Z = encoder(augment.normalize(x, data.mean, data.std))
    nine = images.Images(data.train_images[:9], data.train_labels[:9], "cpu")
    processes = Processes("cpu")
    found = scores.features(encoder, nine, data, DeviceFlags(), processes, "both", 4)
    torch.testing.assert_close(found, torch.cat([Z[:, 0], Z[:, 1:].mean(1)], 1))

    flags.append("--features=mean")
    trained, *fresh = (evaluate.main(["linear", *flags, *more])
                       for more in ([], ["--random"], ["--random"]))
    assert fresh[0] == fresh[1] != trained and fresh[0]["encoder"] == "random"
    assert 0 < trained["acc"] < 1
    pixels = ["knn", f"--data_dir={cache}", "--data=shapes"]
    assert evaluate.main([*pixels, "--features=pixels"])["encoder"] is None
    with pytest.raises(UserError, match="--ckpt is needed"):
        evaluate.main(pixels)
