"""Checkpoint files, and loading models of every task.

Damage is in test_survive.py, runs in test_run.py, published files in test_published.py."""
from dataclasses import asdict

import pytest
import torch
from torch import nn

import checkpoint
from flags import UserError
from helpers import same
from model import (ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig,
                   MaskedAutoencoder, TextConfig)
from optim import make_optimizers

IMAGE = dict(width=16, heads=2, layers=1, image_size=16, patch_size=8, classes=3)
TEXT = dict(width=16, heads=2, layers=1, context=8, vocab_size=11)
KINDS = dict(vit=ImageClassifier, mae=MaskedAutoencoder, simdino=ImageEncoder, gpt=LanguageModel)


class Branch(nn.Module):
    """Like SimDINO's: an encoder and something behind it."""

    def __init__(self, config):
        super().__init__()
        self.config, self.encoder, self.projector = config, ImageEncoder(config), nn.Linear(16, 4)


def make(task):
    configs = dict(gpt=TextConfig(**TEXT), mae=MAEConfig(**IMAGE), vit=ImageConfig(**IMAGE),
                   simdino=ImageConfig(**IMAGE, final_norm=True))
    return dict(KINDS, simdino=Branch)[task](configs[task])


def content(task="vit", **fields):
    model = make(task)
    meta = dict(name="shapes", classes=["disc", "ring", "star"])
    if task == "gpt":
        meta = dict(name="digits", n_vocab=11, tokenizer=dict(kind="char", characters="0123456789"))
    return dict(task=task, model=model.state_dict(), model_config=asdict(model.config), step=3,
                best=None, data_meta=meta, run_config=dict(seed=0), optimizer={}, extra={}) | fields


def test_files_are_written_whole(tmp_path):
    """What was there is kept, and stays where the new one cannot be written."""
    path, previous = tmp_path / "ckpt.pt", tmp_path / "ckpt.prev.pt"
    for step, keep in ((3, True), (4, True), (5, False)):
        checkpoint.write_checkpoint(path, content(step=step), keep)
    (tmp_path / "ckpt.pt.tmp").symlink_to("/dev/full")
    for extra in ({}, dict(large=torch.zeros(1 << 20))):        # an OSError; torch's RuntimeError
        with pytest.raises(UserError, match="cannot write .*ckpt.pt: .*No space left on device"):
            checkpoint.write_checkpoint(path, content(extra=extra))
        (tmp_path / "ckpt.pt.tmp").symlink_to("/dev/full")
    assert [checkpoint.read_checkpoint(p, "vit")["step"] for p in (path, previous)] == [5, 3]
    assert len(list(tmp_path.iterdir())) == 3


def config(**fields):
    return content(model_config=content()["model_config"] | fields)


REFUSED = {"No such file": None, "no torch file": "hello", "no regular file": "/dev/zero",
           "an official checkpoint": dict(a=1),
           "task gpt, not vit": content("gpt"), r"\(40, 16\) here": config(heads=5),
           "layers.0.scale1 is missing in it": config(layer_scale=7),
           "1073741824": config(width=2 ** 30)}             # built without memory


@pytest.mark.parametrize("says", REFUSED)
def test_other_files_are_refused(tmp_path, says):
    path, whole = tmp_path / "x.pt", REFUSED[says]
    if says == "no regular file":
        path.symlink_to(whole)
    elif isinstance(whole, str):
        path.write_text(whole)
    elif whole is not None:
        torch.save(whole if "a" in whole else dict(format=checkpoint.FORMAT) | whole, path)
    with pytest.raises(UserError, match=f"x.pt.*{says}"):
        checkpoint.load_model(path, ("vit",))


@pytest.mark.parametrize("task", KINDS)
def test_one_loader_for_every_task(tmp_path, task):
    path, full = tmp_path / "a.pt", content(task)
    checkpoint.write_checkpoint(path, full)
    loaded = checkpoint.load_model(path, (task,))
    assert type(loaded.model) is KINDS[task] and not loaded.model.training
    assert loaded.task == task and loaded.meta == full["data_meta"]
    assert asdict(loaded.model.config) == full["model_config"]
    found = loaded.model.state_dict()
    if task == "simdino":
        found = {f"encoder.{k}": v for k, v in found.items()} \
            | {k: v for k, v in full["model"].items() if "projector" in k}
    assert same(found, full["model"])


@pytest.mark.parametrize("task", KINDS)
def test_published_in_this_repository(tmp_path, monkeypatch, task):
    """pretrained:NAME is the model with its weights rounded to float16, and no more than it needs:
    no optimizer, no projector, no folder of the machine that trained it."""
    monkeypatch.setattr(checkpoint, "PRETRAINED", tmp_path)
    flags = dict(seed=7, data_dir="/home/me/data", out_dir="/home/me/out")
    checkpoint.write_checkpoint(tmp_path / "whole.pt", content(task, run_config=flags))
    checkpoint.main([str(tmp_path / "whole.pt"), "small"])
    loaded = checkpoint.load_model("pretrained:small", (task,))
    whole = checkpoint.load_model(tmp_path / "whole.pt").model
    assert same(loaded.model.state_dict(),
                {name: tensor.half().float() for name, tensor in whole.state_dict().items()})
    assert not any("projector" in name for name in loaded.content["model"])
    assert loaded.content["run_config"] == dict(seed=7)
    with pytest.raises(UserError, match="small is not a new name"):
        checkpoint.main([str(tmp_path / "whole.pt"), "small"])
    with pytest.raises(UserError, match="pretrained model .* is not one of small, whole"):
        checkpoint.load_model("pretrained:../small")


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_an_optimizer_state_has_to_fit_its_parameters(name):
    """A fused kernel would write past the end of a smaller one. Hyperparameters are the flags'."""
    model = make("vit")
    fresh, used = (make_optimizers(model, name, lr, 0.1, (0.9, 0.99), [model.encoder.layers])
                   for lr in (1e-3, 2e-3))
    model(torch.ones(2, 3, 16, 16)).square().mean().backward()
    for optimizer in used:
        optimizer.step()
    whole = [optimizer.state_dict() for optimizer in used]
    checkpoint.load_optimizers(fresh, whole)
    for optimizer, theirs in zip(fresh, (state["state"] for state in whole), strict=True):
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert all(same(optimizer.state_dict()["state"][i], theirs[i]) for i in theirs)
        theirs[1] |= {key: state.flatten()[:1] for key, state in theirs[1].items() if key != "step"}
        with pytest.raises(ValueError, match="of parameter 1 is not like the parameter"):
            checkpoint.load_optimizers(fresh, whole)
