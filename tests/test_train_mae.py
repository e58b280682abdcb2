"""Masked autoencoding as a whole script: learning, resume, the picture, the encoder handed on."""
import json
import signal

import numpy as np
import pytest
import torch
from PIL import Image

import common
import evaluate
import train_mae
import train_vit
from data import augment, images
from model import ConfigError, ImageEncoder, MAEConfig, MaskedAutoencoder

TINY = ["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--batch_size=20", "--epochs=1", "--log_every=1", "--device=cpu"]


@pytest.fixture
def train(cache, tmp_path):
    """train(name, *flags): runs train_mae in this process into tmp_path/name; returns its last line of metrics."""
    def run(name, *flags, first=TINY):
        return train_mae.main([*first, f"--data_dir={cache}", f"--out_dir={tmp_path / name}", *flags])
    return run


def metrics(folder, split="train"):
    return [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line.get("split") == split]


def weights(folder):
    return common.load_checkpoint(folder / "ckpt.pt", "mae")["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("flags", [[], ["--mask_tokens=after"], ["--arch=transformer", "--mask_tokens=after", "--decoder_width=12", "--decoder_heads=2"]])
def test_it_learns_more_than_the_mean(train, tmp_path, flags):
    train("a", "--epochs=8", "--base_lr=0.05", "--eval_every=1000", "--log_every=20", *flags)
    losses = [line["loss"] for line in metrics(tmp_path / "a")]
    assert losses[-1] < 0.85 * losses[0] and metrics(tmp_path / "a", "val")[-1]["loss"] < 0.88      # pixels have variance 1


@pytest.mark.parametrize("flags", [["--mask_tokens=before", "--accumulate=2", "--clip=1"], ["--mask_tokens=after", "--normalize_targets=true"]])
def test_interrupted_and_resumed_is_left_alone(train, tmp_path, monkeypatch, flags):
    train("whole", *flags)
    stop_at = iter([False] * 7 + [True])

    def should_stop(run):
        run.signal = signal.SIGTERM if next(stop_at) else 0
        return run.signal != 0
    monkeypatch.setattr(common.Run, "should_stop", should_stop)
    with pytest.raises(common.Stopped):
        train("cut", *flags)
    monkeypatch.undo()
    train("cut", "--resume", *flags)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "cut"))
    assert [m["loss"] for m in metrics(tmp_path / "cut")] == [m["loss"] for m in metrics(tmp_path / "whole")]


def test_validation_is_the_loss_of_every_picture_once(cache):
    data = images.load("shapes", cache=cache)
    c, _ = common.parse(train_mae.Config, train_mae.PRESETS, [*TINY, f"--data_dir={cache}"], "")
    model = train_mae.build_model(c)
    val = images.Images(data.val_images, data.val_labels, torch.device("cpu"))
    processes = common.Processes("cpu")
    found = train_mae.validate(model, val, data, c, processes, batch_size=30)
    total = 0.0
    for start in range(0, 100, 30):
        rows = torch.arange(start, min(start + 30, 100))
        noise = augment.BatchRandom(common.derive_seed("validation", start), len(rows), device=torch.device("cpu")).uniform(16)
        x = augment.normalize(augment.to_float(val.batch(rows)[0]), data.mean, data.std)
        for i in range(len(rows)):                                       # every picture hides 12 of 16: the mean of means is the mean
            total += model.eval()(x[i:i + 1], noise[i:i + 1]).item()
    assert found["n"] == 100 and found["loss"] == pytest.approx(total / 100, abs=1e-5)
    assert found == train_mae.validate(model, val, data, c, processes, batch_size=30)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_picture_shows_input_mask_reconstruction_and_both(cache, tmp_path, normalize):
    data = images.load("shapes", cache=cache)
    c, _ = common.parse(train_mae.Config, train_mae.PRESETS, [*TINY, f"--normalize_targets={normalize}"], "")
    model, val = train_mae.build_model(c), images.Images(data.val_images, data.val_labels, torch.device("cpu"))
    train_mae.write_grid(model, val, data, c, tmp_path / "grid.png", n=3)
    sheet = np.asarray(Image.open(tmp_path / "grid.png"))
    assert sheet.shape == (3 * 128, 4 * 128, 3)
    sheet = torch.from_numpy(sheet[::4, ::4].astype(np.int16)).view(3, 32, 4, 32, 3)
    given, masked, painted, pasted = sheet.unbind(2)
    pixels = torch.from_numpy(np.array(data.val_images[:3]).astype(np.int16))
    assert (given - pixels).abs().max() <= 1
    noise = augment.BatchRandom(common.derive_seed("validation", 0), 3, device=torch.device("cpu")).uniform(16)
    hidden = model.hidden(noise).view(3, 4, 4).repeat_interleave(8, 1).repeat_interleave(8, 2)
    grey = torch.tensor(data.mean).mul(255).round().short()
    assert hidden.float().mean() == 0.75
    assert ((masked[hidden] - grey).abs() <= 1).all() and torch.equal(masked[~hidden], given[~hidden])
    assert torch.equal(pasted[hidden], painted[hidden]) and torch.equal(pasted[~hidden], given[~hidden])


def test_the_encoder_is_handed_on(train, tmp_path, cache):
    train("a", "--epochs=0.2")
    path = tmp_path / "a" / "ckpt.pt"
    c, _ = common.parse(train_vit.Config, train_vit.PRESETS, ["shapes", f"--init_from={path}", "--width=16", "--pool=mean"], "")
    classifier, theirs = train_vit.build_model(c, 10), weights(tmp_path / "a")
    for name, value in classifier.encoder.state_dict().items():
        assert torch.equal(value, theirs["encoder." + name]), name
    trained = evaluate.main(["linear", f"--ckpt={path}", f"--data_dir={cache}", "--features=mean", "--device=cpu"])
    random = evaluate.main(["linear", f"--ckpt={path}", f"--data_dir={cache}", "--features=mean", "--device=cpu", "--random"])
    assert trained["encoder"] == str(path) and random["encoder"] == "random" and trained["acc"] != random["acc"]


def test_the_random_encoder_is_drawn_as_the_autoencoder_draws_it(train, tmp_path):
    train("a", "--epochs=0.1")
    config, *_ = common.load_encoder(tmp_path / "a" / "ckpt.pt")
    assert isinstance(config, MAEConfig) and config == MaskedAutoencoder(config).config
    d = config.width
    bound = (6 / (192 + d)) ** 0.5                                       # xavier-uniform, not PyTorch's default
    drawn = MaskedAutoencoder(config).encoder.embed[0].weight
    assert 0.9 * bound < drawn.abs().max() <= bound and ImageEncoder(config).embed[0].weight.abs().max() <= 192 ** -0.5


def test_published_crate_mae_is_an_encoder(tmp_path):
    ours = MaskedAutoencoder(MAEConfig(width=16, heads=2, layers=1, image_size=32, patch_size=8)).double().float()
    state = ours.state_dict()
    theirs = {}
    for name, value in state.items():
        for a, b in (("encoder.class_token", "cls_token"), ("encoder.positions", "decoder_pos_embed"), ("encoder.embed.0.", "patch_embed.proj."),
                     ("encoder.norm.", "norm."), ("predict.", "decoder_pred."), ("encoder.layers.0.norm1", "blocks.0.layers.0.0.norm"),
                     ("encoder.layers.0.norm2", "blocks.0.layers.0.1.norm"), ("encoder.layers.0.attention.U", "blocks.0.layers.0.0.fn.qkv"),
                     ("encoder.layers.0.attention.W", "blocks.0.layers.0.0.fn.to_out.0"), ("encoder.layers.0.sparsification.D", "blocks.0.layers.0.1.fn.weight"),
                     ("decoder.0.norm1", "decoder_blocks.0.layers.0.0.norm"), ("decoder.0.norm2", "decoder_blocks.0.layers.0.1.norm"),
                     ("decoder.0.attention.U", "decoder_blocks.0.layers.0.1.fn.qkv"), ("decoder.0.attention.W", "decoder_blocks.0.layers.0.1.fn.to_out.0"),
                     ("decoder.0.D", "decoder_blocks.0.layers.0.0.fn.weight")):
            if name.startswith(a):
                name = b + name[len(a):]
                break
        theirs[name] = value.view(16, 8, 8, 3).permute(0, 3, 1, 2) if name == "patch_embed.proj.weight" else value
    torch.save(dict(model=theirs), tmp_path / "published.pth")
    config, encoder, _ = common.load_encoder(tmp_path / "published.pth", heads=2)
    assert config.arch == "crate" and config.layers == 1 and same(encoder, ours.encoder.state_dict())


@pytest.mark.parametrize("flags, message", [
    (["--mask_ratio=0.999"], "mask_ratio"), (["--mask_ratio=0.95"], "mask_ratio=0.95 leaves 0 of 16"), (["--patch_size=5"], "patch_size=5"),
    (["--decoder_width=8"], "decoder_width=8 needs mask_tokens=after"), (["--mask_tokens=middle"], "mask_tokens"),
    (["--accumulate=3"], "accumulate=3"), (["--size=huge"], "huge"), (["--mask_tokens=after", "--decoder_width=9", "--decoder_heads=2"], "decoder_heads=2")])
def test_mistakes_are_told_in_one_line(train, tmp_path, flags, message):
    with pytest.raises((common.UserError, ConfigError), match=message) as error:
        train("x", *flags)
    assert "\n" not in str(error.value) and not (tmp_path / "x" / "ckpt.pt").exists()
