"""Numbers on frozen features and on language models, against whole passages read one at a time and against models whose answers are known."""
import json
import math
from dataclasses import asdict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch
from torch.nn import functional as F

import common
import evaluate
import train_gpt
from data import augment, images, text
from data.images import DataError
from model import ImageClassifier, ImageConfig, LanguageModel, TextConfig

CHARACTERS = text.CharTokenizer("\n abcdefgh.")
CONTEXT = 16


@pytest.fixture
def bpe(monkeypatch):
    """GPT-2's encoding in small, in its place: 256 bytes, two merges, end-of-text."""
    ranks = {bytes([i]): i for i in range(256)} | {b" t": 256, b" th": 257}
    encoding = tiktoken.Encoding("small", pat_str=r" ?\w+|\s+|[^\s\w]+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(text, "_gpt2_encoding", lambda: encoding)
    return text.GPT2Tokenizer()


def save(path, model, tokenizer):
    meta = dict(name="letters", tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab, objective="causal" if model.config.causal else "masked")
    common.save_checkpoint(path, dict(task="gpt", model=model.state_dict(), model_config=asdict(model.config), data_meta=meta,
                                      run_config=dict(mask_rate=0.15), step=1, optimizer={}, extra={}))
    return model.eval()


def random_model(path, tokenizer=CHARACTERS, **fields):
    """A saved model with weights of deviation 0.3."""
    model = LanguageModel(TextConfig(**dict(width=16, heads=2, layers=2, context=CONTEXT, vocab_size=tokenizer.n_vocab) | fields))
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return save(path, model, tokenizer)


def follower(path, follows, context=64):
    """A saved model that, whatever it has read, predicts follows[c] after the character c (and c itself where there is none).

    Tokens are unit vectors, positions and attention nothing; the MLP adds three times the successor to a token. LayerNorm keeps
    the order, so the successor is the likeliest."""
    V = CHARACTERS.n_vocab
    model = LanguageModel(TextConfig(arch="transformer", width=V, heads=1, layers=1, context=context, vocab_size=V))
    mlp = model.layers[0].sparsification
    for p in (model.positions, model.layers[0].attention.W.weight, mlp.up.weight, mlp.down.weight):
        p.data.zero_()
    model.embed.weight.data.copy_(torch.eye(V))
    mlp.up.weight.data[:V] = torch.eye(V)
    for a, b in follows.items():
        mlp.down.weight.data[CHARACTERS.encode(b)[0], CHARACTERS.encode(a)[0]] = 3.0
    return save(path, model, CHARACTERS)


def prepare(folder, name, tokenizer, files):
    """folder/cache/NAME from files {name: text, or columns of a Parquet file}."""
    for path, content in files.items():
        path = folder / "sources" / name / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content) if isinstance(content, str) else pq.write_table(pa.table(content), path)
    text.prepare(name, source=folder / "sources" / name, cache=folder / "cache", tokenizer=tokenizer, workers=1, verbose=False)
    return text.load(name, folder / "cache", getattr(tokenizer, "encoding", None))


@pytest.fixture
def letters(tmp_path):
    """`letters`: 300 random characters to test on, 50 to validate."""
    words = "".join(np.random.default_rng(0).choice(list(CHARACTERS.characters), 350))
    return prepare(tmp_path, "letters", CHARACTERS, {"test.txt": words[:300], "val.txt": words[300:]})


@pytest.fixture
def run(tmp_path, capsys):
    """run(subcommand, *flags) on tmp_path/ckpt.pt; the result, which is also what is printed."""
    def run(command, *flags):
        result = evaluate.main([command, f"--ckpt={tmp_path / 'ckpt.pt'}", f"--data_dir={tmp_path / 'cache'}", "--device=cpu", *flags])
        assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
        return result
    return run


# Loss per token

@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_lm_agrees_with_the_run(tmp_path, run, objective):
    words = "the cat sat on the mat, and that was that. "
    prepare(tmp_path, "tiny", text.CharTokenizer(text.PRINTABLE), {"train.txt": words * 40, "val.txt": words.upper() * 9})
    train_gpt.main(["pydoc", "--data=tiny", f"--data_dir={tmp_path / 'cache'}", f"--out_dir={tmp_path / 'out'}", "--width=16", "--heads=2", "--layers=1",
                    "--context=16", "--batch_size=8", "--micro_batch=5", "--steps=5", "--device=cpu", "--sample=0", "--mask_rate=0.3",
                    f"--objective={objective}"])
    (tmp_path / "out" / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    line = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-2])
    found = run("lm", "--batch_size=3")
    assert (found["data"], found["split"], found["n"]) == ("tiny", "val", line["n"]) and found["loss"] == pytest.approx(line["loss"], abs=1e-6)
    assert found["ppl"] == pytest.approx(line["ppl"]) and found.get("acc") == line.get("acc")
    assert objective == "masked" or found["loss_per_byte"] == found["loss"]           # one byte a character


@pytest.mark.parametrize("stride", [1, 5, CONTEXT])
@torch.no_grad()
def test_sliding_windows(tmp_path, run, letters, stride):
    """Each token is predicted from what its window holds before it: from the whole context but for the last `stride` tokens."""
    model, tokens = random_model(tmp_path / "ckpt.pt", arch="tost"), torch.from_numpy(letters.test.astype(np.int64))
    losses = []
    for target in range(1, len(tokens)):
        start = max(0, -(-(target - CONTEXT) // stride)) * stride                     # the first window that reaches the target
        losses.append(F.cross_entropy(model(tokens[None, start:target])[0, -1], tokens[target]))
    found = run("lm", f"--stride={stride}", "--batch_size=7")
    assert found["loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert (found["data"], found["split"], found["n"], found["stride"]) == ("letters", "test", len(tokens) - 1, stride)
    if stride == CONTEXT:
        assert run("lm") == found | dict(loss=pytest.approx(found["loss"]), ppl=pytest.approx(found["ppl"]), loss_per_byte=pytest.approx(found["loss_per_byte"]))


def test_the_parts_of_a_set(tmp_path, run, letters):
    random_model(tmp_path / "ckpt.pt")
    assert run("lm", "--split=val")["n"] == len(letters.val) - 1 == 49
    full, half = run("lm"), run("lm", "--dtype=bfloat16")
    assert half["loss"] != full["loss"] and half["loss"] == pytest.approx(full["loss"], rel=0.02)


def test_loss_per_byte(tmp_path, run, bpe):
    """End-of-text is predicted, and has no bytes."""
    documents = ["the café is there", "thé ", "a € b"]
    prepare(tmp_path, "notes", bpe, {"test.jsonl": "".join(json.dumps(dict(text=words)) + "\n" for words in documents)})
    random_model(tmp_path / "ckpt.pt", bpe)
    found = run("lm", "--data=notes")
    n_bytes = sum(len(words.encode()) for words in documents) - 1                     # the first token, t, is not predicted
    assert found["loss_per_byte"] * n_bytes == pytest.approx(found["loss"] * found["n"])
    characters = text.CharTokenizer("aé€")
    assert evaluate.count_bytes(characters, characters.encode("a€éx")) == 1 + 3 + 2 + 1


# Passages

def jsonl(texts):
    return {"test.jsonl": "".join(json.dumps(dict(text=words)) + "\n" for words in texts)}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_lambada_of_a_known_model(tmp_path, run, batch_size):
    """A model that writes " abc" after f and after a new line."""
    follower(tmp_path / "ckpt.pt", {"f": " ", "\n": " ", " ": "a", "a": "b", "b": "c"})
    right = ["bad cafe f abc", "f ab", "abc", "gaga " * 5 + "f abc"]                   # the third: a prompt starts with a new line
    wrong = ["f abd", "d abc", "f c", "f abcd"]
    prepare(tmp_path, "lambada", CHARACTERS, jsonl(right[:2] + wrong + right[2:]))
    assert run("lambada", f"--batch_size={batch_size}")["acc"] == 0.5
    prepare(tmp_path / "right", "lambada", CHARACTERS, jsonl(right))
    assert run("lambada", f"--data_dir={tmp_path / 'right' / 'cache'}")["acc"] == 1.0


def log_probabilities(model, ids):
    """log p(ids[i] | ids[:i]) for i = 1, 2, ..."""
    ids = torch.tensor(ids)
    return model(ids[None, :-1])[0].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


@torch.no_grad()
def test_lambada_word_by_word(tmp_path, run):
    """Decoded in earnest, one passage at a time; those beyond the context lose their beginning."""
    few = text.CharTokenizer("\n ab")                                                 # so that a random model is right now and then
    model, rng = random_model(tmp_path / "ckpt.pt", few), np.random.default_rng(0)
    texts = [" ".join("".join(rng.choice(list("ab"), rng.integers(1, 3))) for _ in range(rng.integers(1, 20))) for _ in range(120)]
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
    assert found["acc"] == pytest.approx(np.mean(right)) and found["word_loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def cbt(rows):
    """Columns of the Hub's files from (context in two sentences, question, options, answer)."""
    return dict(sentences=[row[0] for row in rows], question=[row[1] for row in rows], options=[row[2] for row in rows], answer=[row[3] for row in rows])


def test_cbt_of_a_known_model(tmp_path, run):
    """After a comes b, after b comes a: abab is the likeliest word wherever it stands, and its neighbours do not count."""
    follower(tmp_path / "ckpt.pt", {"a": "b", "b": "a"})
    known = [(["c d.", "e."], "f XXXXX f.", ["acac", "abab", "bcbc"], "abab"), (["c" * 90, "d"], "XXXXX.", ["abab", "adad"], "abab"),
             (["c d."], "f gXXXXX", ["agag", "abab"], "abab"), (["c d."], "f XXXXX c", ["abab", "aeae"], "aeae")]
    prepare(tmp_path, "cbt", CHARACTERS, {"CN/validation-0.parquet": cbt(known), "NE/validation-0.parquet": cbt(known[:2])})
    assert run("cbt", "--batch_size=2") == dict(data="cbt", acc_CN=0.75, n_CN=4, acc_NE=1.0, n_NE=2)
    assert run("cbt", "--task=NE") == dict(data="cbt", acc_NE=1.0, n_NE=2)


@pytest.mark.parametrize("context", [64, 24])
@torch.no_grad()
def test_cbt_passage_by_passage(tmp_path, run, context):
    """The likelihood of whole passages, one at a time; where they exceed the context, all candidates lose the same beginning."""
    model, rng = random_model(tmp_path / "ckpt.pt", arch="crate-alpha", context=context), np.random.default_rng(1)
    rows, right = [], 0
    for _ in range(40):
        word = lambda: "".join(rng.choice(list("abcdefgh"), rng.integers(1, 5)))      # noqa: E731
        options = [word() for _ in range(4)]
        sentences, question = [" ".join(word() for _ in range(4)) + " ." for _ in range(2)], f"{word()} XXXXX {word()} ."
        ids = [CHARACTERS.encode(" ".join([*sentences, question.replace("XXXXX", option)])).tolist() for option in options]
        extra = max(0, max(map(len, ids)) - context - 1)
        likelihood = [float(log_probabilities(model, one[extra:]).sum()) for one in ids]
        rows.append((sentences, question, options, options[int(rng.integers(4))]))
        right += options[int(np.argmax(likelihood))] == rows[-1][3]
    prepare(tmp_path, "cbt", CHARACTERS, {"CN/validation-0.parquet": cbt(rows)})
    assert run("cbt", "--task=CN")["acc_CN"] == right / 40 and 0 < right < 40
    with pytest.raises(common.UserError, match="no NE passages"):
        run("cbt")


# Mistakes

def test_another_tokenizer_is_refused(tmp_path, run, letters, bpe):
    prepare(tmp_path, "notes", bpe, {"test.txt": "the end"})
    prepare(tmp_path, "other", text.CharTokenizer("abcdefgh. \n"), {"test.txt": "the end"})
    random_model(tmp_path / "ckpt.pt")
    for name, says in (("notes", "notes is in GPT-2's tokens, .* reads characters of its own .12."), ("other", "other is in characters of its own .12.")):
        with pytest.raises(common.UserError, match=says) as error:
            run("lm", f"--data={name}")
        assert "\n" not in str(error.value)
    random_model(tmp_path / "ckpt.pt", bpe)
    with pytest.raises(common.UserError, match="letters is in characters"):
        run("lm")


def test_mistakes_are_one_line(tmp_path, run, letters):
    random_model(tmp_path / "ckpt.pt", causal=False)
    prepare(tmp_path, "lambada", CHARACTERS, jsonl(["a bad cab", "a " + "bad" * 20]))
    for task in ("lambada", "cbt"):
        with pytest.raises(common.UserError, match="is a masked model"):
            run(task)
    random_model(tmp_path / "ckpt.pt")
    for flags, says in ((["lm", "--split=train"], "has no train part: use --split=val or --split=test"), (["lm", "--stride=17"], "stride 17 must be 1 to 16"),
                        (["lm", "--data=wikitex"], "unknown text set 'wikitex'"), (["lambada"], "a context of 16 tokens is too short: 61"),
                        (["cbt", "--task=V"], "not one of CN, NE, both"), (["cbt", "--batch_size=0"], "1 or more"), (["lambda"], "did you mean lambada")):
        with pytest.raises((common.UserError, DataError)) as error:
            run(*flags)
        assert says in str(error.value) and "\n" not in str(error.value)
    content = common.load_checkpoint(tmp_path / "ckpt.pt")
    common.save_checkpoint(tmp_path / "ckpt.pt", content | dict(task="vit"))
    with pytest.raises(common.UserError, match="of task vit, not gpt"):
        run("lm")
    with pytest.raises(common.UserError, match="--ckpt is needed"):
        evaluate.main(["lm"])


# Frozen features

def test_nearest_neighbours_by_hand():
    x = torch.nn.functional.normalize(torch.randn(60, 5), dim=1)
    y, tests = torch.randint(3, (60,)), torch.randn(23, 5)
    labels, right = torch.randint(3, (23,)), [0, 0]
    for t, label in zip(tests, labels.tolist()):
        cosine = (x @ (t / t.norm())).tolist()
        nearest = sorted(range(60), key=lambda i: -cosine[i])[:7]
        for j, weigh in enumerate((lambda i: math.exp(cosine[i] / 0.1), lambda i: 1.0)):
            votes = [sum(weigh(i) for i in nearest if y[i] == k) for k in range(3)]
            right[j] += votes.index(max(votes)) == label
    found = common.nearest_neighbours(3 * x, y, tests, labels, 3, k=7, temperature=0.1, chunk=10)
    assert found["acc"] == pytest.approx(right[0] / 23) and found["plain"] == pytest.approx(right[1] / 23, abs=1 / 23)      # ties may differ


def test_logistic_regression_is_at_its_minimum():
    x, y = torch.randn(200, 4), torch.randint(3, (200,))
    W, b = evaluate.logistic_regression(x, y, 3, decay=0.1)
    slope = (x @ W + b).softmax(1) - torch.nn.functional.one_hot(y, 3)
    torch.testing.assert_close(x.T @ slope / 200 + 0.1 * W, torch.zeros(4, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(slope.mean(0), torch.zeros(3), atol=1e-4, rtol=0)


def test_probes_on_features(cache, tmp_path):
    import train_vit
    train_vit.main(["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--epochs=0.1", "--device=cpu", "--ema=0.5",
                    f"--data_dir={cache}", f"--out_dir={tmp_path / 'run'}"])
    base = [f"--data_dir={cache}", "--device=cpu", f"--ckpt={tmp_path / 'run' / 'ckpt.pt'}"]
    data = images.load("shapes", cache)
    content = common.load_checkpoint(tmp_path / "run" / "ckpt.pt")
    model = ImageClassifier(ImageConfig(**content["model_config"])).eval()
    model.load_state_dict(content["model"])
    with torch.no_grad():
        x = augment.normalize(augment.to_float(torch.from_numpy(data.train_images[:9].copy())), data.mean, data.std)
        Z = model.encoder(x)
    c = common.parse_command({"linear": evaluate.Probe}, ["linear", *base, "--features=both", "--batch_size=4"], "")[1]
    nine = images.Images(data.train_images[:9], data.train_labels[:9], "cpu")
    found = common.features(model.encoder, nine, data, c, common.Processes("cpu"), "both", batch_size=4)
    torch.testing.assert_close(found, torch.cat([Z[:, 0], Z[:, 1:].mean(1)], 1))
    trained, fresh, again = (evaluate.main(["linear", *base, "--features=mean", *more]) for more in ([], ["--random"], ["--random"]))
    assert fresh == again and fresh["encoder"] == "random" and trained["encoder"] != "random" and 0 < trained["acc"] < 1
    assert evaluate.main(["knn", f"--data_dir={cache}", "--data=shapes", "--features=pixels"])["encoder"] is None
    with pytest.raises(common.UserError, match="--ckpt is needed"):
        evaluate.main(["knn", "--data=shapes"])
