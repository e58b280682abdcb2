"""The whole script: learning, exact resume, fine-tuning, and what a user can get wrong."""
import io
import json
import os
import signal
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import common
import evaluate
import train_vit
from data import images, prepare
from data.images import DataError
from model import ConfigError, ImageClassifier, ImageConfig, subspace_coding_rate

TINY = ["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--batch_size=20", "--epochs=1", "--log_every=1", "--device=cpu"]


@pytest.fixture
def train(cache, tmp_path):
    """train(name, *flags): runs train_vit in this process into tmp_path/name; returns its last line of metrics."""
    def run(name, *flags, first=TINY):
        return train_vit.main([*first, f"--data_dir={cache}", f"--out_dir={tmp_path / name}", *flags])
    return run


def metrics(folder, split="train"):
    return [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line.get("split") == split]


def weights(folder, name="ckpt.pt"):
    content = common.load_checkpoint(folder / name, "vit")
    return content["model"] | {f"student.{k}": v for k, v in content["extra"].get("student", {}).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("arch", ["crate", "transformer"])
def test_it_learns(train, tmp_path, arch):
    train("a", f"--arch={arch}", "--epochs=30", "--lr=3e-3", "--pool=mean", "--label_smoothing=0", "--flip=false", "--crop=none",
                 "--eval_every=1000", "--log_every=100")
    losses = [line["loss"] for line in metrics(tmp_path / "a")]
    assert losses[-1] < 0.9 * losses[0] < 2.4                            # ln 10 = 2.30; 400 pictures are learnt by heart


def test_it_stops_at_a_training_loss(train, tmp_path, cache):
    """The loss of the pictures it trains on, as they are; a run that goes on from there stops there again."""
    flags = ["--train_images=40", "--epochs=200", "--lr=1e-2", "--label_smoothing=0", "--crop=none", "--flip=false", "--eval_every=10",
             "--stop_loss=1.2", "--pool=mean", "--layers=1"]
    done = train("a", *flags)
    content = common.load_checkpoint(tmp_path / "a" / "ckpt.pt", "vit")
    assert content["step"] == done["step"] < 400 and done["step"] % 10 == 0
    assert len(metrics(tmp_path / "a", "val")) == done["step"] // 10
    c = evaluate.Accuracy(ckpt=str(tmp_path / "a" / "ckpt.pt"), split="train", data_dir=str(cache), device="cpu")
    whole = evaluate.accuracy(c)
    data = images.load("shapes", cache=cache)
    first = images.Images(data.train_images[:40], data.train_labels[:40], "cpu")
    c.image_size, c.workers = 32, 0
    fit = common.classify(common.load_classifier(tmp_path / "a" / "ckpt.pt")[0], first, data, c, common.Processes("cpu"))
    assert fit["loss"] < 1.2 < whole["loss"] and fit["n"] == 40
    assert train("a", "--resume", *flags)["step"] == done["step"]


def test_same_seed_same_run(train, tmp_path):
    train("a")
    train("b")
    train("c", "--seed=1")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b")) and not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


EVERYTHING = ["--dropout=0.1", "--drop_path=0.1", "--ema=0.99", "--clip=1", "--accumulate=2", "--randaugment=1", "--crop=resized"]


@pytest.mark.parametrize("flags", [["--optimizer=lion", "--lr=1e-4", *EVERYTHING], ["--optimizer=adamw"]])
def test_interrupted_and_resumed_is_left_alone(train, tmp_path, monkeypatch, flags):
    train("whole", *flags)
    stop_at = iter([False] * 7 + [True])

    def should_stop(run):
        run.signal = signal.SIGTERM if next(stop_at) else 0
        return run.signal != 0
    monkeypatch.setattr(common.Run, "should_stop", should_stop)
    with pytest.raises(common.Stopped) as stopped:
        train("cut", *flags)
    monkeypatch.undo()
    assert stopped.value.number == signal.SIGTERM and common.load_checkpoint(tmp_path / "cut" / "ckpt.pt")["step"] == 8
    train("cut", "--resume", *flags)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert [m["loss"] for m in metrics(tmp_path / "cut")] == [m["loss"] for m in metrics(tmp_path / "whole")]


def test_a_real_signal_saves_first(script, cache, tmp_path):
    flags = [*TINY, f"--data_dir={cache}", f"--out_dir={tmp_path / 'out'}", "--epochs=400"]
    process = script("train_vit.py", *flags)
    deadline = time.time() + 60
    while not (tmp_path / "out" / "metrics.jsonl").exists() or len(metrics(tmp_path / "out")) < 3:
        assert time.time() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in err and "--resume continues" in out
    assert common.load_checkpoint(tmp_path / "out" / "ckpt.pt", "vit")["step"] == metrics(tmp_path / "out")[-1]["step"]


def test_accumulation_changes_nothing(train, tmp_path):
    train("one")
    train("four", "--accumulate=4")
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "four")):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(train, tmp_path):
    with pytest.raises(common.Diverged, match="step"):
        train("a", "--lr=1e30", "--optimizer=lion", "--warmup_epochs=0", "--save_every=1", "--weight_decay=0")
    kept = common.load_checkpoint(tmp_path / "a" / "ckpt.pt")
    assert all(m["loss"] is not None for m in metrics(tmp_path / "a")) and kept["step"] >= 1


def test_evaluate_agrees_with_the_run(train, tmp_path, cache, capsys):
    done = train("a", "--ema=0.9", "--save_every=7")
    last = metrics(tmp_path / "a", "val")[-1]
    result = evaluate.main(["accuracy", f"--ckpt={tmp_path / 'a' / 'ckpt.pt'}", f"--data_dir={cache}", "--device=cpu", "--batch_size=33"])
    assert result["acc"] == last["acc"] and result["loss"] == pytest.approx(last["loss"], abs=1e-6) and result["n"] == 100
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result and done["best"] == max(m["acc"] for m in metrics(tmp_path / "a", "val"))


def test_fine_tuning_starts_from_the_encoder(train, tmp_path, cache):
    train("a")
    c, _ = common.parse(train_vit.Config, train_vit.PRESETS, ["shapes", f"--init_from={tmp_path / 'a' / 'ckpt.pt'}", "--image_size=48", "--width=16"], "")
    ours, theirs = train_vit.build_model(c, 5), weights(tmp_path / "a")
    for name, value in ours.encoder.state_dict().items():
        if name != "positions":
            assert torch.equal(value, theirs["encoder." + name]), name
    small = ImageClassifier(ImageConfig(**common.load_checkpoint(tmp_path / "a" / "ckpt.pt")["model_config"]))
    small.load_state_dict(theirs)
    x = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(ours.encoder(x), small.encoder(x))        # the same function at the new size, positions resized once
    assert ours.head[1].out_features == 5
    c.lambd = 0.7
    with pytest.raises(common.UserError, match="--lambd=0.7 contradicts"):
        train_vit.build_model(c, 5)


def test_published_checkpoints_are_read_everywhere(tmp_path, cache):
    d = 384
    ours = ImageClassifier(ImageConfig(width=d, heads=6, layers=1, image_size=32, patch_size=8, classes=10)).state_dict()
    names = {"encoder.class_token": "cls_token", "encoder.positions": "pos_embedding", "head.": "mlp_head.", ".attention.U.": ".0.fn.qkv.",
             ".attention.W.": ".0.fn.to_out.0.", ".norm1.": ".0.norm.", ".norm2.": ".1.norm.", ".sparsification.D": ".1.fn.weight",
             "encoder.layers.": "transformer.layers."} | {f"encoder.embed.{i}.": f"to_patch_embedding.{i + 1}." for i in range(3)}
    official = {}
    for key, value in ours.items():
        for a, b in names.items():
            key = key.replace(a, b)
        official["module." + key] = value
    torch.save(dict(state_dict=official, epoch=1), tmp_path / "crate.pth")
    result = evaluate.main(["accuracy", f"--ckpt={tmp_path / 'crate.pth'}", "--data=shapes", f"--data_dir={cache}", "--device=cpu"])
    c, _ = common.parse(train_vit.Config, train_vit.PRESETS, ["shapes", f"--init_from={tmp_path / 'crate.pth'}"], "")
    model = train_vit.build_model(c, 10)
    assert result["n"] == 100 and torch.equal(model.encoder.layers[0].sparsification.D, ours["encoder.layers.0.sparsification.D"])


@pytest.mark.parametrize("flags, says", [
    (["--heads=3"], "does not divide width"), (["--patch_size=5"], "does not divide image_size"), (["--arch=crate", "--step=2"], "step"),
    (["--accumulate=3"], "accumulate"), (["--batch_size=500"], "batch_size=500 is more than the 400"), (["--data=cifar10"], "--source DIR"),
    (["--init_from=nowhere.pt"], "nowhere.pt"), (["--size=tiny", "--init_from=x"], "exclude"), (["--size=huge"], "did you mean"),
    (["--arch=crat"], "did you mean crate"), (["--lr=fast"], "a number"), (["--learning_rate=1"], "no flag"),
])
def test_mistakes_are_one_line(train, tmp_path, flags, says, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")                 # nothing answers there
    if says == "did you mean":
        says = "is not one of"
    with pytest.raises((common.UserError, ConfigError, DataError)) as error:
        train("a", *flags)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "a" / "ckpt.pt").exists()


def test_resuming_another_model_is_refused(train, tmp_path):
    train("a")
    before = weights(tmp_path / "a")
    with pytest.raises(common.UserError, match="width=16, the flags say 32"):
        train("a", "--resume", "--width=32")
    with pytest.raises(common.UserError, match="averages weights"):
        train("a", "--resume", "--ema=0.9")
    assert same(before, weights(tmp_path / "a"))


def test_the_exit_status_of_a_mistake(script, cache, tmp_path):
    evil, marker = tmp_path / "evil.pt", tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(marker),)
    torch.save(dict(format=common.FORMAT, model=Runs()), evil)
    torn = tmp_path / "torn.pt"
    torn.write_bytes(evil.read_bytes()[:200])
    cases = [["shaped"], ["shapes", "--epoch=1"], ["shapes", f"--init_from={evil}"], ["shapes", f"--init_from={torn}"],
             ["shapes", "--heads=7", f"--out_dir={tmp_path / 'o'}"]]
    processes = [script("train_vit.py", *case, f"--data_dir={cache}") for case in cases]
    for case, process in zip(cases, processes):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2 and err.count("\n") == 1 and err.startswith("train_vit.py: "), (case, err)
    assert not marker.exists()


@pytest.mark.parametrize("name, columns, classes, stored", [("cifar100", ("img", "fine_label"), 100, 32), ("flowers102", ("image", "label"), 102, 256),
                                                            ("pets", ("image", "label"), 37, 256)])
def test_presets_run_on_other_sets(train, tmp_path, name, columns, classes, stored):
    """From Parquet laid out as on the Hub to a fine-tuned checkpoint: every class, pictures of every shape."""
    draw = np.random.default_rng(0)
    for split, n in (("train", 2 * classes), ("test", classes)):
        cells = []
        for i in range(n):
            shape = (32, 32, 3) if stored == 32 else (20 + i % 7, 24, 3)
            file = io.BytesIO()
            Image.fromarray(draw.integers(0, 256, shape, np.uint8)).save(file, "png")
            cells.append({"bytes": file.getvalue(), "path": None})
        table = pa.table({columns[0]: pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
                          columns[1]: [i % classes for i in range(n)]})
        (tmp_path / "source").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "source" / f"{split}-00000-of-00001.parquet")
    assert prepare.main([name, "--source", str(tmp_path / "source"), "--cache", str(tmp_path / "cache")]) == 0
    first = [*TINY, f"--data={name}", "--epochs=1", "--batch_size=37", "--randaugment=2", "--crop=resized"]
    train("first", f"--data_dir={tmp_path / 'cache'}", first=first)
    content = common.load_checkpoint(tmp_path / "first" / "best.pt")
    assert content["model"]["head.1.weight"].shape[0] == classes == len(content["data_meta"]["classes"])
    assert content["data_meta"]["image_size"] == stored and metrics(tmp_path / "first", "val")[-1]["n"] == classes
    train("second", f"--data_dir={tmp_path / 'cache'}", f"--data={name}", "--batch_size=37", "--epochs=1", "--lr=1e-9", "--image_size=64",
          f"--init_from={tmp_path / 'first' / 'best.pt'}", first=["finetune-cifar10", "--device=cpu"])
    tuned = weights(tmp_path / "second")
    torch.testing.assert_close(tuned["encoder.layers.0.sparsification.D"], content["model"]["encoder.layers.0.sparsification.D"], atol=1e-6, rtol=0)
    assert tuned["encoder.positions"].shape[1] == 65


# Sparse rate reduction as a regularizer

def srr_setup(**fields):
    model = ImageClassifier(ImageConfig(**dict(width=16, heads=4, layers=3, image_size=32, patch_size=8, classes=10) | fields))
    return model, torch.randn(4, 3, 32, 32)


def test_srr_is_the_mean_coding_rate_in_the_subspaces_of_the_outputs():
    model, x = srr_setup()
    trace = []
    logits, outputs = model(x, outputs=True)
    torch.testing.assert_close(logits, model(x, trace))
    expected = 0
    for l in (0, 2):
        U = model.encoder.layers[l].attention.U.weight.view(4, 4, 16).mT.double()
        expected += subspace_coding_rate(trace[l].out.double(), U, eps=0.3).mean() / 2
    assert train_vit.srr(model, outputs, [0, 2], eps=0.3).item() == pytest.approx(expected.item(), rel=1e-5)


def test_srr_gradient_reaches_the_chosen_U_only():
    model, x = srr_setup()
    train_vit.srr(model, model(x, outputs=True)[1], [1], eps=0.5).backward()
    reached = [name for name, p in model.named_parameters() if p.grad is not None]
    assert reached == ["encoder.layers.1.attention.U.weight"] and model.encoder.layers[1].attention.U.weight.grad.norm() > 0
    with torch.no_grad():
        rate = train_vit.srr(model, model(x, outputs=True)[1], [1], 0.5)
        model.encoder.layers[1].attention.U.weight.mul_(0.5)
        outputs = model(x, outputs=True)[1]
        assert train_vit.srr(model, outputs, [1], 0.5) < rate            # U -> 0 is its minimum
        model.encoder.layers[1].attention.U.weight.zero_()
        assert train_vit.srr(model, outputs, [1], 0.5) == 0


def test_srr_in_a_run(train, tmp_path):
    train("none")
    train("zero", "--srr_weight=0", "--srr_layers=2")
    train("some", "--srr_weight=0.1", "--srr_layers=random", "--accumulate=2")
    train("more", "--srr_weight=0.1", "--srr_layers=random")
    assert same(weights(tmp_path / "none"), weights(tmp_path / "zero")) and not same(weights(tmp_path / "none"), weights(tmp_path / "more"))
    for a, b in zip(metrics(tmp_path / "some"), metrics(tmp_path / "more")):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    assert metrics(tmp_path / "more")[0]["loss"] > metrics(tmp_path / "none")[0]["loss"]


def test_srr_layers_are_counted_from_one_and_drawn_evenly():
    model, _ = srr_setup()
    c = train_vit.Config(srr_layers="1,3")
    assert train_vit.srr_layers(c, model, 0) == [0, 2]
    c.srr_layers = "all"
    assert list(train_vit.srr_layers(c, model, 0)) == [0, 1, 2]
    c.srr_layers = "random"
    drawn = [train_vit.srr_layers(c, model, step)[0] for step in range(300)]
    assert all(70 < drawn.count(l) < 130 for l in range(3)) and drawn == [train_vit.srr_layers(c, model, step)[0] for step in range(300)]


@pytest.mark.parametrize("flags, message", [(["--srr_layers=4"], "from 1 to 2"), (["--srr_layers=0"], "from 1 to 2"), (["--srr_layers=first"], "first"),
                                            (["--srr_layers=1,"], "1,"), (["--arch=transformer"], "transformer")])
def test_srr_mistakes(train, flags, message):
    with pytest.raises(common.UserError, match=message):
        train("a", "--srr_weight=0.1", *flags)
