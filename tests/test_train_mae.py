"""Masked autoencoding: learning, validation, the images it writes."""
import numpy as np
import pytest
import torch

from flags import parse
from run import derive_seed, Processes
import train_mae
from data import augment, images, show
from helpers import losses, metrics


@pytest.mark.parametrize("flags", [
    [], ["--mask_tokens=after"],
    ["--arch=transformer", "--mask_tokens=after", "--decoder_width=12", "--decoder_heads=2"]])
def test_it_learns_more_than_the_mean(train, tmp_path, flags):
    train(train_mae, "a", "--epochs=6", "--lr=6e-3", "--eval_every=1000", "--log_every=20",
          "--warmup_epochs=1", *flags)
    first, *_, last = losses(tmp_path / "a")
    assert last < 0.85 * first and metrics(tmp_path / "a", "val")[-1]["loss"] < 0.88  # variance: 1


@pytest.fixture
def setup(cache):
    """setup(*flags): (model, validation images, data, config)."""
    def make(*flags):
        data = images.load("shapes", cache=cache)
        flags = ["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", *flags]
        c, _ = parse(train_mae.Config, train_mae.PRESETS, flags, "")
        model = train_mae.build_model(c).eval()
        return model, images.Images(data.val_images, data.val_labels, torch.device("cpu")), data, c
    return make


def test_validation_is_the_loss_of_every_image_once(setup):
    model, val, data, c = setup()
    found = train_mae.validate(model, val, data, c, Processes("cpu"), batch_size=30)
    total = 0.0
    for start in range(0, 100, 30):
        rows = torch.arange(start, min(start + 30, 100))
        noise = augment.BatchRandom(derive_seed("validation", start), len(rows)).uniform(16)
        x = augment.normalize(augment.to_float(val.batch(rows)[0]), data.mean, data.std)
        for i in range(len(rows)):      # every image hides 12 of 16: the mean of means is the mean
            total += model(x[i:i + 1], noise[i:i + 1]).item()
    assert found["n"] == 100 and found["loss"] == pytest.approx(total / 100, abs=1e-5)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_sheet_shows_input_mask_reconstruction_and_both(setup, normalize):
    model, val, data, _ = setup(f"--normalize_targets={normalize}")
    x = augment.normalize(augment.to_float(val.batch(torch.arange(3))[0]), data.mean, data.std)
    noise = augment.BatchRandom(derive_seed("validation", 0), 3).uniform(16)
    sheet, columns = show.reconstructions(model, x, noise, data.mean, data.std)
    assert columns == ["input", "masked", "reconstruction", "pasted"]
    given, masked, guess, pasted = sheet.permute(1, 0, 3, 4, 2)         # each (3, 32, 32, RGB)
    pixels = torch.from_numpy(data.val_images[:3].astype(np.float32))
    torch.testing.assert_close(255 * given, pixels)
    hidden = model.draw_mask(noise).view(3, 4, 4)
    hidden = hidden.repeat_interleave(8, 1).repeat_interleave(8, 2)
    assert hidden.float().mean() == 0.75
    grey = torch.tensor(data.mean).expand_as(masked[hidden])
    torch.testing.assert_close(masked[hidden], grey)
    assert torch.equal(masked[~hidden], given[~hidden])
    assert torch.equal(pasted[hidden], guess[hidden])
    assert torch.equal(pasted[~hidden], given[~hidden])
