"""What single neurons tell: codes and tokens belong together, and what was put there is found."""
import numpy as np
import pytest
import torch
from helpers import write_model

from checkpoint import load_model
from data import text
from experiments import neurons
from measure import inputs
from model import LanguageModel, TextConfig


def test_text_properties():
    found = neurons.text_properties(list('He 42, "said x"'))
    for name, marks in dict(digit="...11..........", quoted=".......1111111.",
                            punctuation=".....1.1......1").items():
        assert found[name].tolist() == [mark == "1" for mark in marks], name


def put(values, **properties):
    """Codes of these values; the first half of the tokens is for choosing."""
    each = np.arange(len(values))
    has = {name: torch.from_numpy(value) for name, value in properties.items()}
    return neurons.Codes(values, has, torch.from_numpy(each < len(values) // 2))


def test_the_best_neuron_is_found():
    """Neuron 3 is high where a token has one property, 5 low where it has another; a third one is
    nowhere, and a fourth too rare."""
    generator, each = torch.Generator().manual_seed(0), np.arange(400)
    values = torch.rand(400, 8, generator=generator)
    values[:, 3] += 2 * torch.from_numpy(each % 4 == 0)
    values[:, 5] -= 2 * torch.from_numpy(each % 5 == 0)
    nowhere = np.random.default_rng(0).random(400) < 0.3
    found = neurons.best_scores(put(values, high=each % 4 == 0, low=each % 5 == 0,
                                    nowhere=nowhere, rare=each % 20 == 0))
    assert found["high"] > 0.97 < found["low"] and "rare" not in found
    assert found["nowhere"] < 0.6


def test_scores_are_those_of_every_threshold():
    """By definition: all neurons, sides and thresholds, with values that are often equal."""
    generator = torch.Generator().manual_seed(1)
    codes = put(torch.randint(4, (120, 3), generator=generator).float(),
                some=np.random.default_rng(1).random(120) < 0.6)
    fit, test, has = codes.values[:60], codes.values[60:], codes.properties["some"]
    tried = [(neurons.f1(side(fit[:, j], t), has[:60]), neurons.f1(side(test[:, j], t), has[60:]))
             for side in (torch.ge, torch.le) for j in range(3) for t in range(4)]
    best = max(first for first, _ in tried)
    assert neurons.best_scores(codes)["some"] in [
        pytest.approx(second) for first, second in tried if first > best - 1e-6]


def test_rotations_leave_no_neuron():
    each = np.arange(400)
    values = torch.randn(400, 12, generator=torch.Generator().manual_seed(0))
    noise = neurons.compared(put(values, half=each % 2 == 0), 9, 0)[0]
    assert abs(noise["neuron"] - noise["turned"]) < 0.1         # it looks the same from every side
    values[:, 3] += 4 * torch.from_numpy(each % 4 == 0)
    row, mean = neurons.compared(put(values, high=each % 4 == 0), 9, 0)
    assert row["neuron"] == mean["neuron"] > 0.94 > row["highest"] and row["reached"] == 0


@torch.no_grad()
def test_codes_of_text(tmp_path, text_cache):
    """Codes and properties belong together; a window is whole in one half."""
    data, path = text.load("verse", text_cache), str(tmp_path / "a.pt")
    model = LanguageModel(TextConfig(arch="crate-alpha", width=16, heads=2, layers=2, context=11,
                                     vocab_size=8)).eval()
    write_model(path, model, "gpt", dict(name="verse", tokenizer=data.tokenizer.meta()))
    c = neurons.Neurons(ckpt="", data_dir=str(text_cache), device="cpu", samples=9, batch_size=4)
    codes = neurons.read_codes(load_model(path), c)
    windows = torch.cat([x for _, x in inputs(load_model(path), c)])
    space = windows == int(data.tokenizer.encode("\n")[0])
    assert codes.properties["space"].equal(space[:, :-1].flatten())
    assert codes.properties["next: space"].equal(space[:, 1:].flatten())
    assert {*codes.fit.view(9, 10).sum(1).tolist()} == {0, 10}

    out = model.layers(model.tokens(windows))
    torch.testing.assert_close(codes.values, out[:, :-1].flatten(0, 1))


def test_rows(tmp_path, text_cache):
    data, paths = text.load("verse", text_cache), []
    for arch in ("crate", "transformer"):
        model = LanguageModel(TextConfig(arch=arch, width=16, heads=2, layers=1, context=11,
                                         vocab_size=8)).eval()
        paths.append(str(tmp_path / f"{arch}.pt"))
        write_model(paths[-1], model, "gpt", data.meta())
    rows = neurons.main([f"--ckpt={','.join(paths)}", f"--data_dir={text_cache}", "--device=cpu",
                         "--samples=20", "--rotations=2"])
    assert {row["model"].split("/")[-1] for row in rows} == {"crate", "transformer"}
    assert all(0 <= row["neuron"] <= 1 and row["spread"] >= 0 for row in rows)
