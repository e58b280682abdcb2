"""A layer that is as the derivation presumes measures so; the rows are means over samples."""
import pytest
import torch
from helpers import scrambled, write_model

from data import images
from experiments import derivation
from flags import UserError
from model import coding_rate, ImageClassifier, ImageConfig


def model(arch="crate"):
    return scrambled(ImageClassifier(ImageConfig(
        arch=arch, width=16, heads=4, layers=2, image_size=32, patch_size=8, classes=10)))


@torch.no_grad()
def test_a_layer_as_presumed():
    """U orthonormal and W its transpose; D orthogonal: nothing is lost, R of D A is that of A."""
    layer = model().double().encoder.layers[0]
    Q = torch.linalg.qr(torch.randn(16, 16).double())[0]
    layer.attention.U.weight.data, layer.attention.W.weight.data = Q, Q.mT.clone()
    layer.sparsification.D.data = torch.linalg.qr(torch.randn(16, 16).double())[0]
    trace = layer.trace(torch.randn(3, 9, 16).double())
    found = derivation.of_attention(layer, trace) | derivation.of_code(layer, trace)
    presumed = dict(u_least=1, u_largest=1, frame=0, cos=1, gram=0)
    assert {name: found[name].item() for name in presumed} == pytest.approx(presumed, abs=1e-10)
    torch.testing.assert_close(found["coded"], found["kept"])
    # one token in one subspace, twice as long: the strength is four times as large
    X = layer.norm1(trace.tokens)
    inside = X.square().unflatten(-1, (4, 4)).sum(-1).amax(-1) / X.square().sum(-1)
    layer.attention.U.weight.data = torch.eye(16).double()
    again = derivation.of_attention(layer, trace)
    torch.testing.assert_close(again["near"], 100 * inside)
    layer.attention.U.weight.data *= 2
    twice = derivation.of_attention(layer, trace)
    torch.testing.assert_close(twice["strength"], 4 * again["strength"])
    layer.sparsification.D.data *= 0
    nothing = derivation.of_code(layer, trace)
    torch.testing.assert_close(nothing["miss"], torch.full((3,), 100.0).double())
    assert (nothing["coded"] == 0).all()
    kept = 100 * coding_rate(trace.code) / coding_rate(layer.norm2(trace.half))
    torch.testing.assert_close(nothing["kept"], kept)


def test_rows(tmp_path, cache):
    path, data = str(tmp_path / "a.pt"), images.load("shapes", cache).meta()
    flags = [f"--ckpt={path}", f"--data_dir={cache}", "--device=cpu", "--samples=6"]
    write_model(path, model(), "vit", data)
    first, second = (derivation.main([*flags, f"--batch_size={n}"]) for n in (4, 6))
    assert [row["layer"] for row in first] == [1, 2] and first == second
    for arch in ("crate-alpha", "crate-n"):
        write_model(path, model(arch), "vit", data)
        with pytest.raises(UserError, match="another layer"):
            derivation.main(flags)
