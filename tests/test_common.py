"""Flags, schedules, optimizers, checkpoints and run directories against their definitions."""
import json
import math
import random
from dataclasses import dataclass

import pytest
import torch

import common
from common import UserError, option


@dataclass(kw_only=True)
class Config(common.RunConfig):
    """Flags for these tests."""
    width: int = option(8, "whole", low=1)
    rate: float = option(0.5, "real", above=0, high=1)
    arch: str = option("crate", "word", choices=("crate", "tost"))
    limit: int | None = option(None, "maybe")
    flip: bool = option(False, "yes or no")
    size: str | None = option(None, "instead of the preset's width", displaces=("width",))


PRESETS = {"tiny": dict(width=4), "large": dict(width=64)}


def parse(*argv):
    return common.parse(Config, PRESETS, argv, "doc", default="tiny")


def test_flags_take_their_fields_types():
    c, preset = parse("large", "--rate=0.25", "--limit", "3", "--flip", "--arch", "tost")
    assert (preset, c.width, c.rate, c.limit, c.flip, c.arch) == ("large", 64, 0.25, 3, True, "tost")
    c, preset = parse("--width=9", "--limit=none", "--flip=false", "--compile=true")
    assert (preset, c.width, c.limit, c.flip, c.compile) == ("tiny", 9, None, False, True)


@pytest.mark.parametrize("argv, says", [
    (["larg"], "did you mean large"), (["--widht=3"], "did you mean width"), (["--width=3.5"], "whole number"),
    (["--width=0"], "1 or more"), (["--rate=0"], "more than 0"), (["--rate=2"], "1 or less"), (["--rate=nan"], "finite"),
    (["--rate=x"], "a number"), (["--arch=crat"], "did you mean crate"), (["--flip=maybe"], "true or false"),
    (["--width"], "needs a value"), (["tiny", "extra"], "neither"), (["-w3"], "neither"), (["--device=tpu"], "not one of"),
])
def test_bad_flags_are_one_line(argv, says):
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_flag_displaces_what_the_preset_says_of_the_same():
    assert parse("large", "--size=big")[0].width == 8 and parse("large", "--size=big", "--width=5")[0].width == 5


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as exit:
        parse("--help")
    text = capsys.readouterr().out
    assert exit.value.code in (0, None) and all(f"--{name}=" in text for name in Config.__dataclass_fields__)


def test_warmup_cosine():
    s = common.warmup_cosine(2.0, 110, 10, final=0.5)
    assert s[0] == pytest.approx(0.2) and s[9] == s[10] == pytest.approx(2.0) and len(s) == 110
    assert s[60] == pytest.approx(0.5 + 1.5 * 0.5) and s[109] == pytest.approx(0.5, abs=1e-3)
    assert all(a >= b for a, b in zip(s[10:], s[11:]))


def test_lion_is_its_definition():
    p = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
    optimizer, w, m = common.Lion([p], lr=0.01, betas=(0.9, 0.99), weight_decay=0.3), p.detach().clone(), torch.zeros(5, 3, dtype=torch.float64)
    for _ in range(4):
        g = torch.randn(5, 3, dtype=torch.float64)
        p.grad = g.clone()
        optimizer.step()
        for i in range(5):
            for j in range(3):
                u = math.copysign(1, 0.9 * m[i, j] + 0.1 * g[i, j])
                w[i, j] = w[i, j] - 0.01 * (u + 0.3 * w[i, j])
                m[i, j] = 0.99 * m[i, j] + 0.01 * g[i, j]
    torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["lion", "adamw"])
def test_only_matrices_are_decayed(name):
    from model import ImageClassifier, ImageConfig
    model = ImageClassifier(ImageConfig(width=16, heads=2, layers=1, image_size=8, patch_size=4, classes=3, arch="tost"))
    before = {k: v.detach().clone() for k, v in model.named_parameters()}
    optimizer = common.make_optimizer(model, name, 0.1, 0.5, (0.9, 0.99))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for key, p in model.named_parameters():
        kept = 1.0 if p.ndim < 2 or key.endswith(("class_token", "positions")) else 0.95
        torch.testing.assert_close(p.detach(), kept * before[key], msg=key)


def test_ema():
    a, b = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    expected = 0.75 * a.weight.detach() + 0.25 * b.weight.detach()
    common.ema_update(a, b, 0.75)
    torch.testing.assert_close(a.weight.detach(), expected)


def test_seeds_depend_on_everything():
    seeds = {common.derive_seed(s, step, p) for s in range(5) for step in range(50) for p in ("augment", "order")}
    assert len(seeds) == 500 and all(0 <= s < 2 ** 63 for s in seeds)


def content(step=3):
    return dict(task="vit", model=dict(w=torch.randn(20, 20)), model_config={}, data_meta={}, run_config={}, step=step, best=None,
                optimizer=dict(state={}), extra={})


def test_a_checkpoint_is_a_torch_file(tmp_path):
    common.save_checkpoint(tmp_path / "ckpt.pt", content())
    loaded = common.load_checkpoint(tmp_path / "ckpt.pt", "vit")
    plain = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert torch.equal(loaded["model"]["w"], plain["model"]["w"]) and loaded["step"] == 3


def test_every_altered_bit_is_seen(tmp_path):
    path = tmp_path / "ckpt.pt"
    common.save_checkpoint(path, content())
    whole, draw = path.read_bytes(), random.Random(0)
    for trial in range(60):
        bad = bytearray(whole)
        at = draw.randrange(len(bad))
        bad[at] ^= 1 << draw.randrange(8)
        path.write_bytes(bad if trial % 3 else whole[:at])
        with pytest.raises(UserError) as error:
            common.load_checkpoint(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


class Runs:
    """Unpickling this would create the file named `at`."""
    def __init__(self, at):
        self.at = at

    def __reduce__(self):
        return (open, (self.at, "w"))


def test_foreign_files_run_nothing(tmp_path):
    marker = tmp_path / "ran"
    torch.save(dict(format=common.FORMAT, model=Runs(str(marker))), tmp_path / "evil.pt")
    (tmp_path / "text.pt").write_text("hello")
    torch.save(dict(a=1), tmp_path / "other.pt")
    for name in ("evil.pt", "text.pt", "other.pt", "missing.pt"):
        with pytest.raises(UserError) as error:
            common.load_checkpoint(tmp_path / name)
        assert name in str(error.value) and "\n" not in str(error.value)
    assert not marker.exists()


def test_checkpoint_of_another_task(tmp_path):
    common.save_checkpoint(tmp_path / "a.pt", content())
    with pytest.raises(UserError, match="task vit, not gpt"):
        common.load_checkpoint(tmp_path / "a.pt", "gpt")


def run_in(tmp_path, **flags):
    return common.Run(Config(out_dir=str(tmp_path / "out"), **flags), "vit", "tiny", common.Processes("cpu"))


def test_the_checkpoint_before_stands_in_for_a_damaged_one(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    common.save_checkpoint(out / "ckpt.pt", content(step=1))
    common.save_checkpoint(out / "ckpt.pt", content(step=2))
    assert run_in(tmp_path, resume=True).resumed["step"] == 2
    (out / "ckpt.pt").write_bytes((out / "ckpt.pt").read_bytes()[:-500])
    assert run_in(tmp_path, resume=True).resumed["step"] == 1
    assert "continuing from ckpt.prev.pt at step 1" in capsys.readouterr().err
    (out / "ckpt.prev.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no whole checkpoint"):
        run_in(tmp_path, resume=True)


def test_a_run_directory_is_not_taken_by_accident(tmp_path):
    with pytest.raises(UserError, match="nothing to resume"):
        run_in(tmp_path, resume=True)
    first = run_in(tmp_path)
    with pytest.raises(UserError, match="another run is writing"):
        run_in(tmp_path)
    first.close()
    (tmp_path / "out" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="is not empty"):
        run_in(tmp_path)
    run_in(tmp_path, overwrite=True).close()
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    with pytest.raises(UserError, match="exclude each other"):
        run_in(tmp_path, overwrite=True, resume=True)


def test_resuming_drops_the_lines_it_will_write_again(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    common.save_checkpoint(out / "ckpt.pt", content(step=2))
    lines = [dict(step=i, split="train", loss=1.0) for i in (1, 2, 3)] + [dict(event="done", step=2)]
    (out / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 3, "spl')
    run = run_in(tmp_path, resume=True)
    run.begin(5, "images", 1)
    run.close()
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2]
