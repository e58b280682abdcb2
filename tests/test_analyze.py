"""What analyze.py reports, against the definitions."""
import json

import pytest
import torch

import analyze
import common
import train_vit
from data import augment, images
from model import ImageClassifier, ImageConfig, coding_rate, subspace_coding_rate


@pytest.mark.parametrize("arch", ["crate", "crate-alpha", "tost", "transformer", "aot"])
@pytest.mark.parametrize("convention", ["released", "caption"])
def test_layers(tmp_path, cache, arch, convention):
    train_vit.main(["shapes", f"--arch={arch}", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--epochs=0.2", "--device=cpu",
                    f"--data_dir={cache}", f"--out_dir={tmp_path / 'run'}"])
    table = analyze.main(["layers", f"--ckpt={tmp_path / 'run' / 'ckpt.pt'}", f"--data_dir={cache}", "--samples=30", "--batch_size=7",
                          f"--convention={convention}", "--eps=0.3", "--device=cpu", f"--json={tmp_path / 'table.json'}"])
    content = common.load_checkpoint(tmp_path / "run" / "ckpt.pt")
    model = ImageClassifier(ImageConfig(**content["model_config"])).eval()
    model.load_state_dict(content["model"])
    data = images.load("shapes", cache)
    x = augment.normalize(augment.to_float(torch.from_numpy(data.val_images[:30].copy())), data.mean, data.std)
    trace = []
    with torch.no_grad():
        Z = model.encoder.tokens(x)
        model.encoder(x, trace)
    assert [line["layer"] for line in table] == [1, 2]
    for line, layer, traced in zip(table, model.encoder.layers, trace):
        assert line["rate"] == pytest.approx(coding_rate(traced.out, 0.3).mean().item(), rel=1e-4)
        assert line["nonzeros"] == pytest.approx((traced.out != 0).double().mean().item())
        if arch == "crate":
            U = layer.attention.bases()
            if convention == "caption":
                expected = subspace_coding_rate(traced.half, U, 0.3)
            else:
                w = layer.norm1(Z)[:, None] @ U
                w = w / w.norm(dim=-1, keepdim=True)
                n, p = w.shape[-2:]
                beta = p / (n * 0.3 ** 2)
                expected = 0.5 * torch.logdet(torch.eye(n) + beta * w @ w.mT).sum(1)
            assert line["rate_of_subspaces"] == pytest.approx(expected.mean().item(), rel=1e-3)
            assert line["rate_of_subspaces_std"] == pytest.approx(expected.std(correction=0).item(), rel=2e-2)
            assert 0 < line["nonzeros"] < 1
        assert line["srr"] == pytest.approx(0.1 * line["nonzeros"] * Z[0].numel() + line["rate_of_subspaces"] - line["rate"], rel=1e-4)
        Z = traced.out
    saved = json.loads((tmp_path / "table.json").read_text())
    assert saved["srr_measure"] == pytest.approx((table[0]["srr"] + table[1]["srr"]) / 2)


def test_mistakes_are_one_line(tmp_path):
    for argv, says in ((["layer"], "did you mean layers"), (["layers"], "--ckpt is needed"), (["layers", "--ckpt=none.pt"], "none.pt")):
        with pytest.raises(common.UserError, match=says):
            analyze.main(argv)
