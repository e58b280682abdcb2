"""What the four training scripts promise alike."""
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import Launches, losses, metrics, same, weights

import checkpoint
import evaluate
import sample
import train_gpt
import train_mae
import train_simdino
import train_vit
from data import prepare
from experiments import recall
from flags import parse_run, UserError
from processes import cli
from run import Run, RunEnded

SCRIPTS = (train_vit, train_mae, train_simdino, train_gpt)
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
KEEP_ALL = ["--dropout=0.1", "--micro_batch=10", "--randaugment=1",
            "--crop=resized", "--optimizer=lion", "--lr=1e-4", "--cutmix=0.5"]
PRESETS = [(script, name) for script in SCRIPTS for name in script.PRESETS]


@pytest.mark.parametrize("script, preset", PRESETS, ids=[f"{s.__name__}-{p}" for s, p in PRESETS])
def test_presets_build(script, preset):
    """And their batches divide among 1 to 8 GPUs. Other data have another folder."""
    argv = [preset, "--init_from=x"] if preset.startswith("finetune") else [preset]
    c, name = parse_run(script.Config, script.PRESETS, argv, "")
    other = parse_run(script.Config, script.PRESETS, [*argv, "--data=x"], "")[1]
    tokenizer = SimpleNamespace(n_vocab=50257 if c.data == "openwebtext" else 97)
    with torch.device("meta"):
        model = script.build_model(c, *{train_vit: [100], train_gpt: [tokenizer]}.get(script, []))
    if c.data == "openwebtext":
        assert model.config.vocab_size == 50304 and model.config.causal == (preset != "bert")
    assert c.batch_size % 8 == 0 or preset.endswith("shapes")           # these are for one machine
    assert (name, other) == (preset, f"{preset}-x")


def after_each_step(monkeypatch, call):
    """Calls call(run) after every step."""
    def log_and_call(run, *args, log=Run.log):
        log(run, *args)
        call(run)
    monkeypatch.setattr(Run, "log", log_and_call)


STEADY = {"vit": (train_vit, *KEEP_ALL, "--epochs=0.5"), "mae": (train_mae, "--epochs=0.5"),
          "simdino": (train_simdino, "--epochs=0.5"),
          "dino": (train_simdino, "--method=dino", "--epochs=0.5"),
          "gpt-muon": (train_gpt, "--steps=10", "--optimizer=muon", "--lr=1e-2")}


@pytest.mark.parametrize("name", STEADY)
def test_no_steady_step_waits_for_the_device(train, monkeypatch, name):
    """The first, and those that log or evaluate, may."""
    (script, *flags), done = STEADY[name], []
    after_each_step(monkeypatch, done.append)
    with Launches(lambda: len(done) + 1) as launched:
        train(script, "a", *flags, "--log_every=4")
    assert launched.waits and launched.waits <= {1, 4, 8, 10, 11}   # 11: the end


RESUMED = {
    "vit-lion": (train_vit, *KEEP_ALL),
    "vit-adamw": (train_vit, "--eval_every=3", "--optimizer=adamw", "--lr=1e-3"),
    "vit-muon": (train_vit, "--optimizer=muon", "--lr=5e-3"),
    "mae": (train_mae, "--micro_batch=10"),
    # step 8 has frozen prototypes
    "simdino": (train_simdino, "--drop_path=0.3", "--epochs=0.8"),
    "dino": (train_simdino, "--method=dino", "--freeze_epochs=0.5", "--epochs=0.8"),
    # 3 + 3 + 2 sequences a step
    "gpt": (train_gpt, "--dropout=0.1", "--micro_batch=3", "--eval_every=5"),
    "bert": (train_gpt, "--dropout=0.1", "--objective=masked", "--arch=tost", "--optimizer=lion",
             "--lr=1e-4", "--eval_every=5"),
}


@pytest.mark.parametrize("name", RESUMED)
def test_interrupted_and_resumed_is_left_alone(train, tmp_path, monkeypatch, name):
    script, *flags = RESUMED[name]
    train(script, "whole", *flags)
    with monkeypatch.context() as patch, pytest.raises(RunEnded):
        after_each_step(patch, lambda run: run.step == 8 and os.kill(os.getpid(), signal.SIGTERM))
        train(script, "cut", *flags)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert checkpoint.read_checkpoint(cut / "ckpt.pt")["step"] == 8
    train(script, "cut", "--resume", *flags)
    assert same(weights(whole), weights(cut))
    assert metrics(whole) == metrics(cut) and metrics(whole, "val") == metrics(cut, "val")


ACCUMULATED = {
    "srr": (train_vit, "--micro_batch=7", "--srr_weight=0.1"),
    "mae": (train_mae, "--micro_batch=7"),
    "bert": (train_gpt, "--micro_batch=3", "--objective=masked"),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_micro_batches_change_nothing(train, tmp_path, name):
    script, split, *flags = ACCUMULATED[name]
    train(script, "whole", *flags)
    train(script, "split", split, *flags)
    whole, split = tmp_path / "whole", tmp_path / "split"
    assert losses(split) == pytest.approx(losses(whole), abs=1e-5)
    a, b = metrics(whole, "val")[-1], metrics(split, "val")[-1]
    assert a["n"] == b["n"] and a["loss"] == pytest.approx(b["loss"], abs=1e-4)


@each_script
def test_a_loss_that_is_not_finite_stops_the_run(train, tmp_path, script):
    more = {train_simdino: [], train_gpt: ["--weight_decay=0", "--clip=0", "--log_every=9"]}
    with pytest.raises(RunEnded, match="not finite at step"):
        train(script, "a", "--lr=1e30", "--optimizer=lion", "--eval_every=1",
              *more.get(script, ["--weight_decay=0"]))
    assert all(loss is not None for loss in losses(tmp_path / "a"))
    kept = weights(tmp_path / "a") if (tmp_path / "a/ckpt.pt").exists() else {}     # a good step's
    assert all(tensor.isfinite().all() for name, tensor in kept.items() if "." in name)


MISTAKES = {        # one of each kind, and what the line says
    train_vit: {"shape": "shape is not one of", "--heads=3": "does not divide width",
                "--batch_size=500": "batch_size=500 is more than the 400",
                "--data=cifar10": "--source DIR",
                "--data=cifar10 --init_from=nowhere.pt": "nowhere.pt",
                "--device=mps": "mps is not one of",
                "--srr_weight=0.1 --srr_layer=3": "layers are 1 to 2"},
    train_mae: {"--mask_ratio=0.95": "mask_ratio=0.95 masks 16 of 16"},
    train_simdino: {"--local_size=12": "patch_size=8 does not divide local_size=12"},
    train_gpt: {"--context=50000": "too few for --context=50000",
                "--data=exam": "exam has no part to train on"},
    sample: {"": "are required: --ckpt"}, recall: {"--pairs=9": "is more than --symbols=8"},
    evaluate: {"accuracy --ckpt=pretrained:shapes": "is not one of"},
    prepare: {"mine --size=x": "invalid int value", "cifar10 --size=64": "is ours"}}
MISTAKES = [(script, *row) for script, rows in MISTAKES.items() for row in rows.items()]


@pytest.mark.parametrize("script, line, says", MISTAKES,
                         ids=[f"{script.__name__} {line}" for script, line, _ in MISTAKES])
def test_any_mistake_is_one_line(train, monkeypatch, capsys, script, line, says):
    """And ends with status 2."""
    monkeypatch.setattr("sys.argv", ["script.py", *line.split()])
    tiny = script in SCRIPTS and line.startswith("--")          # else it is a preset's name
    with pytest.raises(SystemExit) as exit:
        cli((lambda argv: train(script, "a", *argv)) if tiny else script.main)
    *doing, error = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and error.startswith("script.py: ") and says in error
    assert all(line.endswith(" ...") for line in doing)         # what it was about to do


OTHER = {train_vit: ("--train_images=300", "train_images=None, the flags say 300"),
         train_mae: ("--layers=1", "layers=2, the flags say 1"),
         train_simdino: ("--method=dino", "prototypes"),
         train_gpt: ("--objective=masked", "vocab_size=97, the flags say 98")}


@each_script
def test_resuming_another_model_is_refused(train, tmp_path, script):
    train(script, "a")
    before, (flag, says) = weights(tmp_path / "a"), OTHER[script]
    with pytest.raises(UserError, match=says):
        train(script, "a", "--resume", flag)
    assert same(before, weights(tmp_path / "a"))
