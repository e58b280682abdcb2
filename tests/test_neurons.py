"""What single neurons tell: codes and tokens belong together, probes find what was put there."""
import numpy as np
import pytest
import torch
from helpers import write_model
from torch.nn import functional as F

from checkpoint import load_model
from data import text
from experiments import neurons
from flags import UserError
from model import LanguageModel, TextConfig


def test_text_properties():
    found = neurons.text_properties(list('He 42, "said x"'))
    for name, marks in dict(digit="...11..........", quoted=".......1111111.",
                            punctuation=".....1.1......1").items():
        assert found[name].tolist() == [mark == "1" for mark in marks], name


def test_sparse_probes_and_purity_find_what_was_put_there():
    """Neuron 3 tells the property, the rest are noise; neuron i is highest on tokens of kind i."""
    generator = torch.Generator().manual_seed(0)
    codes, each = torch.rand(400, 30, generator=generator), np.arange(400)
    has = each % 4 == 0
    codes[:, 3] += 2 * torch.from_numpy(has)
    assert neurons.sparse_probe(codes, has, each, 1, 0) == 1
    assert neurons.sparse_probe(codes, each < 19, each, 1, 0) is None           # too rare to tell
    # what is alike within a window only is no knowledge: windows are not divided
    windows = torch.rand(80, 400, generator=generator).repeat_interleave(5, 0)
    has = np.random.default_rng(0).random(80).repeat(5) < 0.5
    whole = [neurons.sparse_probe(windows, has, each // 5, 20, seed) for seed in range(8)]
    assert np.mean(whole) < 0.6 < 0.7 < neurons.sparse_probe(windows, has, each, 20, 0)

    for values, low, high in ((torch.eye(10)[each % 10], 1, 1), (codes, 0, 0.4)):
        found = neurons.probed(neurons.Codes(values, dict(has=has), each % 10, each), 10, 0)
        assert low <= found["purity"] <= high


def test_turned():
    """No neuron is left, but lengths and angles."""
    values = torch.rand(50, 8)
    codes = neurons.Codes(values, {}, np.arange(50), np.arange(50))
    found = neurons.turned(codes, 0).values
    torch.testing.assert_close(found @ found.mT, values @ values.mT)
    assert not torch.allclose(found, values)


@torch.no_grad()
def test_codes_of_text(tmp_path, text_cache):
    data, path = text.load("verse", text_cache), str(tmp_path / "a.pt")
    model = LanguageModel(TextConfig(arch="crate-alpha", width=16, heads=2, layers=2, context=11,
                                     vocab_size=8)).eval()
    write_model(path, model, "gpt", dict(name="verse", tokenizer=data.tokenizer.meta()))
    c = neurons.Neurons(ckpt="", data_dir=str(text_cache), device="cpu", samples=9, batch_size=4)
    codes, layer = neurons.read_codes(load_model(path), c), model.layers[-1]
    assert np.array_equal(codes.ids[:11], data.val[:11])
    half = model.trace(torch.from_numpy(codes.ids.reshape(9, 11)))[-1].half
    code = layer.sparsification.code(layer.norm2(half))
    torch.testing.assert_close(codes.values, code.flatten(0, 1))
    c.stream = True
    found = neurons.read_codes(load_model(path), c).values
    torch.testing.assert_close(found, layer.sparsify(half).flatten(0, 1))
    c.layer = 1
    found, ids = neurons.read_codes(load_model(path), c).values, codes.ids.reshape(9, 11)
    torch.testing.assert_close(found, model.trace(torch.from_numpy(ids))[0].out.flatten(0, 1))


def test_rows(tmp_path, text_cache):
    """Means over an arch's checkpoints; a transformer's code is GELU(up)."""
    data, paths = text.load("verse", text_cache), []
    for arch in ("crate", "crate", "transformer"):
        model = LanguageModel(TextConfig(arch=arch, width=16, heads=2, layers=1, context=11,
                                         vocab_size=8)).eval()
        paths.append(str(tmp_path / f"{len(paths)}.pt"))
        write_model(paths[-1], model, "gpt", data.meta())
    flags = [f"--data_dir={text_cache}", "--device=cpu", "--samples=20", "--turned"]
    rows = neurons.main([f"--ckpt={','.join(paths)}", *flags])
    assert [(row["code"], row["runs"], row["neurons"]) for row in rows] == [
        ("crate, trained", 2, 16), ("crate, trained, turned", 2, 16),
        ("transformer, trained", 1, 64), ("transformer, trained, turned", 1, 64)]
    c = neurons.Neurons(ckpt="", samples=5, data_dir=str(text_cache), device="cpu")
    codes, layer = neurons.read_codes(load_model(paths[2]), c), model.layers[0]
    half = model.trace(torch.from_numpy(codes.ids.astype(np.int64).reshape(5, 11)))[0].half
    wanted = F.gelu(layer.sparsification.up(layer.norm2(half)))
    torch.testing.assert_close(codes.values, wanted.detach().flatten(0, 1))
    with pytest.raises(UserError, match="has 1 layers"):
        neurons.main([f"--ckpt={paths[0]}", "--layer=2", *flags])
