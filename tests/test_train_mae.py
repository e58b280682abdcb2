"""Masked autoencoding: validation, the images it writes. test_train_vit.py has that it learns."""
import pytest
import torch
from helpers import FLAGS

import analyze
import train_mae
from data import augment, images
from evaluate import reconstruction_loss, validation_noise
from flags import parse_run
from processes import Processes


@torch.no_grad()
def test_validation_and_the_sheet(cache):
    """The loss of every image once; input, mask, reconstruction and the two pasted together."""
    data = images.load("shapes", cache=cache)
    c, _ = parse_run(train_mae.Config, train_mae.PRESETS, FLAGS["train_mae"], "")
    val = images.Images(data.val, "cpu")
    model = train_mae.build_model(c).eval()
    x = augment.normalize(augment.to_float(val.images), data.mean, data.std)
    noise = validation_noise(model, 100)
    # every image hides 12 of 16 patches: the mean of means is the mean
    total = sum(model(x[i:i + 1], noise[i:i + 1]).item() for i in range(100))
    found = reconstruction_loss(model, val, data, Processes("cpu"), batch_size=30)
    assert found["n"] == 100 and found["loss"] == pytest.approx(total / 100, abs=1e-5)

    sheet, _ = analyze.reconstructions(model, x[:3], noise[:3], data.mean, data.std)
    given, masked, guess, pasted = sheet.permute(1, 0, 3, 4, 2)         # each (3, 32, 32, RGB)
    torch.testing.assert_close(255 * given, torch.tensor(data.val.images[:3]).float())
    hidden = model.mask_from(noise[:3]).view(3, 4, 4)
    hidden = hidden.repeat_interleave(8, 1).repeat_interleave(8, 2)
    torch.testing.assert_close(masked[hidden], torch.tensor(data.mean).expand_as(masked[hidden]))
    assert torch.equal(pasted[hidden], guess[hidden])
    assert torch.equal(masked[~hidden], given[~hidden])
    assert torch.equal(pasted[~hidden], given[~hidden])
