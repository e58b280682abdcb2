"""The trained models in data/pretrained score what README.md says of them."""
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import checkpoint
from parallel import Processes
from data import images, text
from scores import classify, features, language_scores, nearest_neighbours, statistics_of
from train_mae import validate

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = Processes("cpu")
CONFIG = SimpleNamespace(dtype="float32", workers=0, image_size=32)
# of README.md's table: name -> score
TABLE = {name: float(score) for name, score in re.findall(
    r"^\| `pretrained:([\w-]+)` \|.*\| ([\d.]+) (?:%|nats|of)[^|]*\|$",
    (ROOT / "README.md").read_text(), re.M)}


@pytest.fixture(scope="module")
def drawn():
    """{name: the 2,000 validation images of a drawn set, as preparing it draws them}."""
    sets = dict(shapes={}, camouflage=images.CAMOUFLAGE["val"])
    return {name: images.Images(*images.draw_shapes(2000, seed=1, **hidden)[:2], "cpu")
            for name, hidden in sets.items()}


def test_the_table_and_the_files_agree():
    files = list(checkpoint.PRETRAINED.iterdir())
    assert {file.stem for file in files} == set(TABLE) and len(files) >= 5
    assert sum(file.stat().st_size for file in files) < 12e6
    for file in files:
        content = checkpoint.read_checkpoint(file)
        assert not content["optimizer"] and not content["extra"]
        assert not re.search(r"/\w+/", str(content["run_config"])), "a folder of some machine"
        assert {tensor.dtype for tensor in content["model"].values()} == {torch.float16}


@pytest.mark.parametrize("name", TABLE)
def test_scores(name, drawn, text_cache):
    """On the validation parts of the drawn sets and of pydoc (the manual differs a little between
    versions of Python). CIFAR-10 is not here: its models agree on a picture with
    themselves mirrored, mostly, and do not call everything one class."""
    loaded = checkpoint.load_model(f"pretrained:{name}")
    data = statistics_of(loaded.meta)
    if loaded.task == "gpt":
        tokens = text.load("pydoc", text_cache).val
        loss = language_scores(loaded.model, tokens, CONFIG, PROCESSES, 32)["loss"]
        assert loss == pytest.approx(TABLE[name], abs=0.1)
    elif loaded.meta["name"] == "cifar10":
        x = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        x = x.cumsum(2).cumsum(3) / 16                              # smooth, as pictures are
        with torch.no_grad():
            guess, mirrored = (loaded.model(v).argmax(1) for v in (x, x.flip(3)))
        assert (guess == mirrored).float().mean() > 0.5 and len(guess.unique()) > 4
    elif loaded.task == "vit":
        acc = classify(loaded.model, drawn[loaded.meta["name"]], data, CONFIG, PROCESSES)["acc"]
        assert 100 * acc == pytest.approx(TABLE[name], abs=0.3)
    elif loaded.task == "mae":
        loss = validate(loaded.model, drawn["shapes"], data, CONFIG, PROCESSES)["loss"]
        assert loss == pytest.approx(TABLE[name], abs=0.002)
    else:
        pixels, labels, _ = images.draw_shapes(10_000, seed=0)
        train = images.Images(pixels, labels, "cpu")
        x, z = (features(loaded.encoder, split, data, CONFIG, PROCESSES)
                for split in (train, drawn["shapes"]))
        acc = nearest_neighbours(x, train.labels, z, drawn["shapes"].labels, 10)["acc"]
        assert 100 * acc == pytest.approx(TABLE[name], abs=0.5)
