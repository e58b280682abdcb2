"""The commands of evaluate.py, against images and passages read one at a time."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from PIL import Image
from torch.nn import functional as F

import evaluate
import train_gpt
import train_vit
from data import augment, images, text
from data.prepare import read_picture
from data.tokenizer import CharTokenizer, GPT2Tokenizer
from flags import UserError
from helpers import metrics, write_model
from model import (ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig,
                   MaskedAutoencoder, saliency, TextConfig)
from scores import stretched

CHARACTERS = CharTokenizer("\n abcdefgh.")
CONTEXT = 16
SIZE = dict(width=16, heads=2, layers=2, image_size=16, patch_size=8)
META = dict(name="pets", classes=["cat", "dog", "emu"], mean=[0.5, 0.4, 0.3], std=[0.2, 0.25, 0.3])


@pytest.fixture
def bpe(monkeypatch):
    """A small encoding in place of GPT-2's: 256 bytes, two merges, end-of-text."""
    ranks = {bytes([i]): i for i in range(256)} | {b" t": 256, b" th": 257}
    encoding = tiktoken.Encoding("small", pat_str=r" ?\w+|\s+|[^\s\w]+", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 258})
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return GPT2Tokenizer()


def scrambled(model):
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return model.eval()


def language_model(path, tokenizer=CHARACTERS, **fields):
    fields = dict(context=CONTEXT, vocab_size=tokenizer.n_vocab) | fields
    model = scrambled(LanguageModel(TextConfig(width=16, heads=2, layers=2, **fields)))
    meta = dict(name="letters", tokenizer=tokenizer.meta(), n_vocab=tokenizer.n_vocab)
    write_model(path, model, "gpt", meta, mask_rate=0.15)
    return model


@pytest.fixture
def run(tmp_path, capsys, cache):
    """run(command, *words) on tmp_path/ckpt.pt: the result, which is also the last line printed,
    and in run.lines what is printed before."""
    def run(command, *words):
        base = [f"--ckpt={tmp_path / 'ckpt.pt'}", f"--data_dir={cache}", "--device=cpu"]
        result = evaluate.main([command, *base, *words])
        out, err = capsys.readouterr()
        *run.lines, last = out.splitlines()
        assert f"{command} --ckpt=" in err              # before anything slow
        assert json.loads(last) == result
        return result
    return run


@pytest.fixture
def letters(monkeypatch):
    """`letters`, 300 characters to test on, is the only text set; these."""
    ids = np.random.default_rng(0).integers(0, 11, 300)
    data = SimpleNamespace(name="letters", tokenizer=CHARACTERS, train=None, test=ids, val=None)
    monkeypatch.setattr(text, "load", lambda name, cache: data)
    return torch.from_numpy(ids)


# ---- Images

def test_accuracy_and_probes(train, tmp_path, run):
    train(train_vit, "run")
    (tmp_path / "run" / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    line, = metrics(tmp_path / "run", "val")
    result = run("accuracy", "--batch_size=30")
    assert result["n"] == 100 and result["acc"] == line["acc"]
    assert result["loss"] == pytest.approx(line["loss"], abs=1e-5)
    trained, fresh = (run("linear", "--features=mean", *more) for more in ([], ["--random"]))
    assert fresh["acc"] != trained["acc"] and fresh["encoder"] == "random"
    assert run("knn", "--data=shapes", "--features=pixels")["encoder"] is None
    with pytest.raises(UserError, match="--data is needed"):
        run("knn", "--features=pixels")


def test_neighbours_are_shown_in_order(monkeypatch, tmp_path):
    """One validation picture a class, the nearest by angle first, wrong ones in a red frame;
    picture i is of grey i."""
    train, val = (np.tile(np.arange(n, dtype=np.uint8)[:, None, None, None], (1, 4, 4, 3))
                  for n in (20, 4))
    data = SimpleNamespace(train_images=train, val_images=val, classes=["ant", "cat", "dog"],
                           train_labels=np.arange(20) % 3,
                           val_labels=np.array([2, 2, 1, 1]))          # no ant
    x, x_test, sheets = torch.randn(20, 3), torch.randn(4, 3), []
    monkeypatch.setattr(evaluate, "write_sheet", lambda *sheet: sheets.append(sheet[1:]))
    evaluate.write_neighbours(tmp_path / "a.png", data, x, x_test)
    (shown, columns, rows), = sheets
    for row, i, label in zip((255 * shown).round(), (2, 0), (1, 2), strict=True):
        nearest = F.cosine_similarity(x_test[i], x).argsort(descending=True)[:8].tolist()
        assert row[:, 1, 1, 1].tolist() == [i, *nearest]
        framed = [k for k in range(9) if row[k, :, 0, 0].tolist() == [255, 0, 0]]
        assert framed == [k for k, j in enumerate(nearest, 1) if j % 3 != label]
    assert columns == ["image", "1.", "2.", "3.", "4.", "5.", "6.", "7.", "8."]
    assert rows == ["cat", "dog"]


@pytest.mark.parametrize("arch", ["crate", "tost"])
def test_segment(tmp_path, run, cache, arch):
    """Every threshold, map and image alone; the prior is the mean mask as the map of each image."""
    fields = dict(arch=arch, classes=10, **SIZE | dict(image_size=32))
    model, data = scrambled(ImageClassifier(ImageConfig(**fields))), images.load("shapes", cache)
    write_model(tmp_path / "ckpt.pt", model, "vit", data.meta())
    x = augment.to_float(torch.from_numpy(np.array(data.val_images)))
    truth = torch.from_numpy(np.array(data.val_masks)) == 1
    attention = model.encoder.trace(augment.normalize(x, data.mean, data.std))[0].attention
    heads = saliency(attention, "class").unflatten(-1, (4, 4)).detach()
    heads = F.interpolate(heads, size=(32, 32), mode="bilinear", antialias=True)
    result = run("segment", "--layer=1", "--batch_size=30")
    prior = truth.float().mean(0).expand(100, -1, -1)
    for maps, found in zip((heads.mean(1), *heads.unbind(1), prior),
                           (result["iou"], *result["iou_heads"], result["iou_prior"]), strict=True):
        maps = stretched(maps.flatten(1)).view_as(truth)
        ious = [[float((a & b).sum() / (a | b).sum()) for a, b in zip(maps >= i / 100, truth)]
                for i in range(100)]
        assert found == pytest.approx(max(np.mean(ious, 1)), abs=1e-3)
    assert run.lines[-1] == f"a constant map    {truth.float().mean().item():.3f}"


@torch.no_grad()
def test_predict(tmp_path, run, monkeypatch):
    """One line a picture, without what a terminal would obey; the sheet names the same."""
    paths, sheets = [str(tmp_path / name) for name in ("a\x1b[2J.png", "b.png")], []
    for path, shape in zip(paths, ((40, 30, 3), (20, 20, 3))):
        Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8)).save(path)
    pixels = [read_picture(path, 16)[0] for path in paths]
    pixels = augment.to_float(torch.from_numpy(np.stack(pixels)))
    monkeypatch.setattr("scores.write_sheet", lambda *sheet: sheets.append(sheet[1:]))

    def predict(model, task):
        write_model(tmp_path / "ckpt.pt", scrambled(model), task, META)
        result = run("predict", paths[0], "--top=2", paths[1], f"--out={tmp_path / 'a.png'}")
        return list(result["pictures"].values()), *sheets[-1]

    model = ImageClassifier(ImageConfig(classes=3, **SIZE))
    shares, shown, columns, rows = predict(model, "vit")
    x = augment.normalize(pixels, META["mean"], META["std"])
    for share, wanted in zip(shares, model(x).softmax(-1).tolist()):
        wanted = sorted(zip(META["classes"], wanted), key=lambda pair: -pair[1])[:2]
        assert list(share) == [name for name, _ in wanted]
        assert share == pytest.approx(dict(wanted), abs=1e-4)
    assert columns == ["image", "saliency"] and torch.equal(shown[:, 0], pixels)
    maps = saliency(model.encoder.trace(x)[-1].attention).mean(1)
    red = F.avg_pool2d(shown[:, 1, 0] - shown[:, 1, 1], 8).flatten(1)
    assert torch.equal(red.argmax(1), maps.argmax(1))
    assert [row.splitlines() for row in rows] == [line.split("  ") for line in run.lines[:2]]
    assert run.lines[0].startswith("a [2J.png  ")

    encoder = torch.nn.ModuleDict(dict(encoder=ImageEncoder(ImageConfig(**SIZE))))
    encoder.config = encoder["encoder"].config
    assert predict(encoder, "simdino")[0] == [{}, {}]                   # it has no classes
    model = MaskedAutoencoder(MAEConfig(**SIZE))
    shares, shown, columns, _ = predict(model, "mae")
    assert columns == ["input", "masked", "reconstruction", "pasted"]
    std = torch.tensor(META["std"]).view(3, 1, 1)
    for (seen, masked, guess, _), share in zip(shown, shares, strict=True):
        error = ((guess - seen) / std)[:, (masked != seen).any(0)].square().mean().item()
        assert share == dict(error=pytest.approx(error, abs=1e-3))
    torch.testing.assert_close(shown[:, 0], pixels)


# ---- Text

@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_lm_agrees_with_the_run(train, tmp_path, text_cache, run, objective):
    """Also with another batch size: the mask of a window depends on its number alone."""
    train(train_gpt, "out", "--mask_rate=0.3", f"--objective={objective}")
    (tmp_path / "out" / "ckpt.pt").rename(tmp_path / "ckpt.pt")
    line = metrics(tmp_path / "out", "val")[-1]
    result = run("lm", "--batch_size=3", f"--data_dir={text_cache}")
    assert (result["data"], result["split"], result["n"]) == ("tiny", "val", line["n"])
    assert result["loss"] == pytest.approx(line["loss"], abs=1e-6)
    assert result["ppl"] == pytest.approx(line["ppl"]) and result.get("acc") == line.get("acc")


@pytest.mark.parametrize("stride", [5, CONTEXT])
@torch.no_grad()
def test_sliding_windows(tmp_path, run, letters, stride):
    """Each token is predicted from what the first window that reaches it holds before it."""
    model, losses = language_model(tmp_path / "ckpt.pt", arch="tost"), []
    for target in range(1, len(letters)):
        start = max(0, -(-(target - CONTEXT) // stride)) * stride
        logits = model(letters[None, start:target])[0, -1]
        losses.append(F.cross_entropy(logits, letters[target]))
    result = run("lm", f"--stride={stride}", "--batch_size=7")
    assert result["loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    assert (result["split"], result["n"]) == ("test", len(letters) - 1)
    for flag, says in (("--split=train", "letters has only test"), ("--stride=17", "exceeds")):
        with pytest.raises(UserError, match=f"{flag}.* {says}"):
            run("lm", flag)


@pytest.mark.parametrize("strict", [False, True])
@torch.no_grad()
def test_lambada_passage_by_passage(tmp_path, run, monkeypatch, strict):
    """Greedily, a token at a time. By default quotes are made plain, and the word may come anywhere
    in ten tokens, in any case."""
    few = CharTokenizer('\n "aAb“')
    model, rng = language_model(tmp_path / "ckpt.pt", few, context=24), np.random.default_rng(0)
    texts = [" ".join("".join(rng.choice(list("aAb“"), rng.integers(1, 3)))
                      for _ in range(rng.integers(2, 20))) for _ in range(80)]
    data = SimpleNamespace(passages=[dict(text=passage) for passage in texts])
    monkeypatch.setattr(text, "load", lambda name, cache: data)
    right = 0
    for passage in texts:
        before, word = (passage if strict else passage.replace("“", '"')).rsplit(" ", 1)
        ids = few.encode("\n" + before).tolist()[-14:]
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        written = few.decode(ids[-10:])
        right += written.startswith(" " + word) if strict else word.lower() in written.lower()
    result = run("lambada", f"--strict={strict}", "--batch_size=7")
    assert result["acc"] == right / 80 and 0 < right < result["n"] == 80


@pytest.mark.parametrize("context", [64, 24])
@torch.no_grad()
def test_cbt_passage_by_passage(tmp_path, run, monkeypatch, bpe, context):
    """The likelihood of whole passages behind end-of-text; beyond the context, all candidates lose
    the same tokens."""
    model = language_model(tmp_path / "ckpt.pt", bpe, arch="crate-alpha", context=context)
    rng, passages, right = np.random.default_rng(1), [], []
    word = lambda: "".join(rng.choice(list("the"), rng.integers(1, 5)))
    for i in range(40):
        options = [word() for _ in range(4)]
        before, question = " ".join(word() for _ in range(8)), f"{word()} XXXXX {word()} ."
        passages.append(dict(task=("CN", "NE")[i % 2], sentences=before.split(), question=question,
                             options=options, answer=options[rng.integers(4)]))
        ids = [[bpe.eot, *bpe.encode(before), *bpe.encode(" " + question.replace("XXXXX", option))]
               for option in options]
        lost, logp = max(0, max(map(len, ids)) - context - 1), []
        for one in ids:
            one = torch.tensor([int(i) for i in one[lost:]])
            steps = model(one[None, :-1])[0].log_softmax(-1)
            logp.append(float(steps.gather(-1, one[1:, None]).sum()))
        right.append(options[int(np.argmax(logp))] == passages[-1]["answer"])
    monkeypatch.setattr(text, "load", lambda name, cache: SimpleNamespace(passages=passages))
    assert run("cbt") == dict(data="cbt", acc_CN=np.mean(right[::2]), n_CN=20,
                              acc_NE=np.mean(right[1::2]), n_NE=20)
    assert 0 < sum(right) < 40
