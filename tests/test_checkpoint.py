"""Checkpoint files, and loading models of every task and published ones.

Damage is in test_survive.py, saving and resuming a run in test_run.py."""
from dataclasses import asdict

import pytest
import torch
from torch import nn

import checkpoint
from flags import UserError
from helpers import same
from model import (ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig,
                   MaskedAutoencoder, TextConfig)
from optim import make_optimizer
from test_published import official

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


def test_a_checkpoint_is_a_torch_file(tmp_path):
    path = tmp_path / "ckpt.pt"
    for step, keep in ((3, True), (4, True), (5, False)):
        checkpoint.write_checkpoint(path, content(step=step), keep)
    loaded = checkpoint.read_checkpoint(path, "vit")
    assert same(loaded["model"], torch.load(path, weights_only=True)["model"])
    steps = [checkpoint.read_checkpoint(p)["step"] for p in (path, tmp_path / "ckpt.prev.pt")]
    assert steps == [5, 3] and len(list(tmp_path.iterdir())) == 2


def forged(**fields):
    """content() with other fields of its model_config."""
    whole = content()
    return whole | dict(model_config=whole["model_config"] | fields)


def with_weight(change):
    whole = content()
    return whole | dict(model={name: change(t) for name, t in whole["model"].items()})


REFUSED = [
    (dict(a=1), "no official checkpoint"), (content() | dict(format="crate-2"), "format crate-3"),
    (content() | dict(task="poetry"), "task poetry"), (dict(format="crate-3"), "KeyError: 'task'"),
    (content("gpt"), "task gpt, not vit"), (content("vit", model_config=7), "AttributeError"),
    # a config may claim any size: layers are counted, the rest is built without memory
    (forged(layers=10 ** 9), "layers=1000000000"), (forged(width=2 ** 30), "1073741824"),
    (forged(image_size=8 * 10 ** 6), "1000000000001"), (forged(width=10 ** 30), "cannot be read"),
    (forged(width="16"), "width=16"), (forged(heads=5), "(40, 16) here"),
    (forged(stem="none"), "stem=none is not one of"), (forged(depth=3), "depth"),
    (forged(layer_scale=7), "layers.0.scale1 is missing in it"),
    (with_weight(lambda t: t.to(torch.float8_e4m3fn)), "no tensor of finite weights"),
    (with_weight(lambda t: t / 0), "no tensor of finite weights"),
    (with_weight(lambda t: t.new_ones(()).expand(t.shape)), "no tensor of finite weights"),
    (content(model={"a\x1b[31m\nb": 7}), "a [31m b"),
    (content(data_meta=dict(classes=["x"] * 4)), "names 4 classes of 3"),
    (content(data_meta=dict(classes=["x", "y", "\x1b[2J"])), "classes"),
    (content(data_meta=dict(classes=7)), "cannot be read"),
    (content(model={"x" * 9999: 7}), "xxxx")]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_whatever_is_wrong_is_one_line(tmp_path, number):
    whole, says = REFUSED[number]
    path = tmp_path / "x.pt"
    torch.save(dict(format=checkpoint.FORMAT) | whole if "task" in whole else whole, path)
    with pytest.raises(UserError) as error:
        checkpoint.load_model(path, ("vit",))
    message = str(error.value)
    assert says in message and str(path) in message and len(message) <= 300
    assert message.isprintable()


@pytest.mark.parametrize("write, says", [
    (lambda path: None, "No such file"), (lambda path: path.mkdir(), "Is a directory"),
    (lambda path: path.write_text("hello"), "no torch file"), (lambda path: path.touch(), "x.pt")])
def test_other_files_are_one_line(tmp_path, write, says):
    write(tmp_path / "x.pt")
    with pytest.raises(UserError, match=says):
        checkpoint.read_checkpoint(tmp_path / "x.pt")


def test_a_tokenizer_without_characters(tmp_path):
    meta = dict(name="none", n_vocab=1, tokenizer=dict(kind="char", characters=""))
    checkpoint.write_checkpoint(tmp_path / "x.pt", content("gpt", data_meta=meta))
    with pytest.raises(UserError, match="its tokenizer has no characters"):
        checkpoint.load_model(tmp_path / "x.pt")


@pytest.mark.parametrize("task", KINDS)
def test_one_loader_for_every_task(tmp_path, task):
    path, full = tmp_path / "a.pt", content(task)
    checkpoint.write_checkpoint(path, full)
    loaded = checkpoint.load_model(path, ("other", task))
    assert type(loaded.model) is KINDS[task] and not loaded.model.training
    assert loaded.task == task and loaded.meta == full["data_meta"]
    assert asdict(loaded.model.config) == full["model_config"]
    found = loaded.model.state_dict()
    if task == "simdino":
        assert loaded.encoder is loaded.model
        found = {f"encoder.{k}": v for k, v in found.items()} \
            | {k: v for k, v in full["model"].items() if "projector" in k}
    else:
        assert loaded.encoder is getattr(loaded.model, "encoder", None)
    assert same(found, full["model"])


def test_an_untrained_model_is_drawn_from_its_seed(tmp_path):
    checkpoint.write_checkpoint(tmp_path / "a.pt", content("mae"))
    first, again, other = (checkpoint.load_model(tmp_path / "a.pt", untrained_seed=seed).encoder
                           for seed in (4, 4, 5))
    assert same(first.state_dict(), again.state_dict())
    assert not same(first.state_dict(), other.state_dict())


def test_positions_are_interpolated_to_another_image_size(tmp_path):
    checkpoint.write_checkpoint(tmp_path / "a.pt", content())
    loaded = checkpoint.load_model(tmp_path / "a.pt")
    encoder = ImageEncoder(ImageConfig(**IMAGE | dict(image_size=32)))
    checkpoint.load_resized(encoder, loaded, "a.pt")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(encoder(x), loaded.encoder(x))
    with pytest.raises(UserError, match="a.pt does not fit this model: class_token"):
        checkpoint.load_resized(ImageEncoder(ImageConfig(**IMAGE | dict(width=32))), loaded, "a.pt")


def test_the_same_loader_reads_published_files(tmp_path):
    """Their numbers are in test_published.py."""
    path = tmp_path / "their.pth"
    torch.save(dict(state_dict={f"module.{k}": t for k, t in official("crate").items()}), path)
    loaded = checkpoint.load_model(path, ("vit", "mae"), heads=4)
    assert loaded.task == "vit" and loaded.meta == loaded.content == {}
    with pytest.raises(UserError, match="their.pth .*no published .* has width 16"):
        checkpoint.load_model(path)


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
    with pytest.raises(UserError, match="pretrained model .* is not one of small, whole"):
        checkpoint.load_model("pretrained:../small")


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_an_optimizer_state_has_to_fit_its_parameters(name):
    """A fused kernel would write past the end of a smaller one. Hyperparameters are the flags'."""
    model = make("vit")
    fresh, used = (make_optimizer(model, name, lr, 0.1, (0.9, 0.99)) for lr in (1e-3, 2e-3))
    model(torch.ones(2, 3, 16, 16)).square().mean().backward()
    used.step()
    whole = used.state_dict()
    checkpoint.load_optimizer(fresh, whole)
    parts = getattr(fresh, "parts", {"": fresh})
    for kind, part in parts.items():
        theirs = whole[kind] if kind else whole
        assert part.param_groups[0]["lr"] == 1e-3
        assert all(same(part.state_dict()["state"][i], theirs["state"][i]) for i in theirs["state"])
        number, kept = list(theirs["state"].items())[1]
        key, t = [(key, t) for key, t in kept.items() if t.ndim][0]
        for bad in (t.flatten()[:1], t[None], t.to_sparse(), t.int(), t * float("nan"), None,
                    t.new_ones(()).expand(t.shape)):
            forged = theirs | dict(state=theirs["state"] | {number: kept | {key: bad}})
            with pytest.raises(ValueError, match="is not like the parameter"):
                checkpoint.load_optimizer(fresh, whole | {kind: forged} if kind else forged)
