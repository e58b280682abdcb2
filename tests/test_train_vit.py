"""Image classification: learning, fine-tuning, held-out images, and SRR."""
from dataclasses import replace

import pytest
import torch
from helpers import losses, metrics, write_model
from test_checkpoint import official

import checkpoint
import evaluate
import train_mae
import train_vit
from data import augment, images
from flags import parse_run, UserError
from model import ImageClassifier, ImageConfig, subspace_coding_rate
from processes import derive_seed


def test_fine_tuning_starts_from_the_encoder(train, tmp_path):
    """It is the same function at the new size, with other classes."""
    train(train_vit, "a")
    flags = ["shapes", f"--init_from={tmp_path}/a/ckpt.pt", "--image_size=48"]
    c, _ = parse_run(train_vit.Config, train_vit.PRESETS, flags, "")
    start, x = checkpoint.load_model(c.init_from), torch.randn(2, 3, 48, 48)
    model = train_vit.build_model(c, 5, start)
    torch.testing.assert_close(model.encoder(x), start.encoder(x))
    assert model(x).shape == (2, 5)
    c.lambd = 0.7                                               # a flag that is given counts
    assert train_vit.build_model(c, 5, start).encoder.layers[0].sparsification.lambd == 0.7
    for name, value, has in (("layers", 3, 2), ("arch", "crate-alpha", "crate")):
        with pytest.raises(UserError, match=f"--{name}={value}: .* has {has}"):
            train_vit.build_model(replace(c, **{name: value}), 5, start)


@pytest.mark.parametrize("published", [False, True])
def test_a_fine_tuned_encoder_sees_images_as_before(train, tmp_path, cache, monkeypatch, published):
    """Normalized as in its pretraining (a published one by ImageNet's statistics): in training, in
    validation, and by who reads the checkpoint."""
    path, mean, std = tmp_path / "start.pt", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    if published:
        torch.save(official("crate"), path)
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    else:
        fields = dict(width=16, heads=4, layers=2, image_size=12, patch_size=4, classes=7)
        write_model(path, ImageClassifier(ImageConfig(**fields)), "vit", dict(
            name="cifar10", classes=list("abcdefg"), mean=mean, std=std, image_size=32))
    seen, normalize = set(), augment.normalize
    monkeypatch.setattr(augment, "normalize", lambda x, mean, std: (
        seen.add((tuple(mean), tuple(std))) or normalize(x, mean, std)))
    train_vit.main(["finetune-shapes", f"--init_from={path}", "--heads=4", "--image_size=12",
                    "--batch_size=20", "--epochs=0.2", "--device=cpu", f"--data_dir={cache}",
                    f"--out_dir={tmp_path / 'a'}"])
    tuned, line = tmp_path / "a" / "ckpt.pt", metrics(tmp_path / "a", "val")[-1]
    found = evaluate.main(["accuracy", f"--ckpt={tuned}", "--device=cpu", f"--data_dir={cache}"])
    assert seen == {(mean, std)} and found["loss"] == pytest.approx(line["loss"], abs=1e-6)
    kept = checkpoint.read_checkpoint(tuned)["data_meta"]
    assert (kept["name"], tuple(kept["mean"]), tuple(kept["std"])) == ("shapes", mean, std)


def test_layer_decay(train, tmp_path):
    """Layer l of L learns at lr decay^(L + 1 - l), the embedding (l = 0) slowest, the head at lr:
    Lion's first step moves every weight by just its rate."""
    train(train_vit, "a", "--layer_decay=0.7", "--optimizer=lion", "--lr=1e-3", "--layers=3",
          "--weight_decay=0", "--epochs=0.05", "--arch=transformer")
    path = tmp_path / "a" / "ckpt.pt"
    trained = checkpoint.load_model(path).model.state_dict()
    initial = checkpoint.load_model(path, untrained_seed=derive_seed(0, "weights")).model
    powers = {"layers.0": 3, "layers.1": 2, "layers.2": 1, "encoder.norm": 0, "head": 0}
    for name, p in initial.named_parameters():
        power = next((power for part, power in powers.items() if part in name), 4)
        moved = (trained[name] - p.detach()).abs().max().item()
        assert moved == pytest.approx(1e-3 * 0.7 ** power, rel=1e-3), name


@pytest.mark.parametrize("preset, arch", [("shapes", "crate"), ("finetune-shapes", "transformer")])
def test_masked_autoencoding_then_fine_tuning(train, tmp_path, cache, preset, arch):
    """As the README has it. The autoencoder learns; the head reads the tokens that were trained,
    and 30 steps on 50 images go well below chance, ln 10 = 2.30."""
    train(train_mae, "mae", f"--arch={arch}", "--width=32", "--batch_size=50", "--epochs=3")
    first, *_, last = losses(tmp_path / "mae")
    assert last < 0.95 * first
    train_vit.main([preset, f"--init_from={tmp_path}/mae/ckpt.pt", "--train_images=50",
                    "--padding=0", "--epochs=30", "--flip=false", "--eval_every=30", "--device=cpu",
                    "--log_every=5", f"--data_dir={cache}", f"--out_dir={tmp_path}/a"])
    assert checkpoint.read_checkpoint(tmp_path / "a" / "ckpt.pt")["model_config"]["pool"] == "mean"
    assert losses(tmp_path / "a")[-1] < 1.6


def test_srr_is_the_mean_coding_rate_in_the_subspaces_of_the_outputs():
    """Its gradient reaches the bases of the chosen layers alone."""
    fields = dict(width=16, heads=4, layers=3, image_size=32, patch_size=8, classes=10)
    model, x = ImageClassifier(ImageConfig(**fields)), torch.randn(4, 3, 32, 32)
    rates = []
    for trace, layer in zip(model.encoder.trace(x), model.encoder.layers):
        U = layer.attention.U.weight.view(4, 4, 16).mT.double()
        rates.append(subspace_coding_rate(trace.out.double(), U, eps=0.3).mean().item())
    for layer, chosen in {None: (0, 1, 2), 1: (0,), 3: (2,)}.items():
        model.zero_grad()
        found = train_vit.srr_loss(model, x, layer, eps=0.3)
        expected = sum(rates[l] for l in chosen) / len(chosen)
        assert found.item() == pytest.approx(expected, rel=1e-5)
        found.backward()
        reached = [name for name, p in model.named_parameters() if p.grad is not None]
        assert reached == [f"encoder.layers.{l}.attention.U.weight" for l in chosen]


def test_held_out_images_are_not_trained_on(train, tmp_path, cache, monkeypatch):
    """They are the last ones."""
    splits, Images = [], images.Images
    monkeypatch.setattr(images, "Images", lambda split, device: (
        splits.append(split) or Images(split, device)))
    train(train_vit, "a", "--val=90", "--epochs=0.1")
    data = images.load("shapes", cache=cache)
    for (x, y, _), rows in zip(splits, (slice(310), slice(310, 400)), strict=True):
        assert (x == data.train.images[rows]).all() and (y == data.train.labels[rows]).all()
    assert metrics(tmp_path / "a", "val")[-1]["n"] == 90
