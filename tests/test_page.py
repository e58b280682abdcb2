"""The page holds the model it names, and what PyTorch makes of its first example."""
import base64
import json
import re

import numpy as np
import pytest
import torch

import analyze
from checkpoint import load_model
from flags import UserError
from helpers import write_model
from model import ImageClassifier, ImageConfig


def embedded(path):
    """The numbers in the page, and the page."""
    text = path.read_text(encoding="utf-8")
    data, = re.findall(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', text, re.S)
    return json.loads(data), text


@torch.no_grad()
def test_the_weights_and_logits_are_the_models(cache, tmp_path):
    out = tmp_path / "page.html"
    analyze.main(["page", "--ckpt=pretrained:shapes-crate", f"--data_dir={cache}", f"--out={out}"])
    content, text = embedded(out)
    model = load_model("pretrained:shapes-crate").model        # its weights are float16 already
    weights = np.frombuffer(base64.b64decode(content["trained"]["at"]), np.float16)
    expected = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    assert torch.equal(torch.from_numpy(weights.copy()).float(), expected)
    pixels = np.frombuffer(base64.b64decode(content["pictures"]), np.uint8).reshape(8, 32, 32, 3)
    mean, std = (torch.tensor(content[name]) for name in ("mean", "std"))
    x = (torch.from_numpy(pixels[:1].copy()) / 255 - mean) / std
    found = np.frombuffer(base64.b64decode(content["expected"]), np.float32)
    torch.testing.assert_close(torch.from_numpy(found.copy()), model(x.permute(0, 3, 1, 2))[0])
    assert len(text) < 1e6 and not re.search(r"(src|href)=.?https?:", text)


def test_a_name_is_shown_and_not_run(cache, tmp_path):
    """And an arch that the page does not know is refused."""
    meta = dict(name="shapes", classes=list("abcdefghij"), mean=[0.5] * 3, std=[0.2] * 3)
    for arch, name in (("crate", "<script>alert(1)<_script>.pt"), ("tost", "tost.pt")):
        config = ImageConfig(arch=arch, width=16, heads=2, layers=1, image_size=32, patch_size=8,
                             classes=10)
        write_model(tmp_path / name, ImageClassifier(config), "vit", meta)
    flags = [f"--data_dir={cache}", f"--out={tmp_path / 'page.html'}"]
    analyze.main(["page", f"--ckpt={tmp_path / '<script>alert(1)<_script>.pt'}", *flags])
    content, text = embedded(tmp_path / "page.html")
    assert content["name"].startswith("<script>") and "<script>alert" not in text
    with pytest.raises(UserError, match="tost"):
        analyze.main(["page", f"--ckpt={tmp_path / 'tost.pt'}", *flags])
