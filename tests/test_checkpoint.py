"""Checkpoint files, loading models of every task and published ones, saving and resuming a run.

Damage of every kind is in test_survive.py, whole runs are in test_scripts.py."""
import math
import signal
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import checkpoint
from flags import RunFlags, UserError
from optim import make_optimizer
from parallel import derive_seed, Processes
from run import Run
from helpers import same
from model import (ARCHS, ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig,
                   MaskedAutoencoder, TextConfig)
from test_published import official

IMAGE = dict(width=16, heads=2, layers=1, image_size=16, patch_size=8, classes=3)
TEXT = dict(width=16, heads=2, layers=1, context=8, vocab_size=11)


class Branch(nn.Module):
    """Like SimDINO's: an encoder and something behind it."""

    def __init__(self, config):
        super().__init__()
        self.encoder, self.projector = ImageEncoder(config), nn.Linear(16, 4)


def make(task):
    """(a model of the task, its config)."""
    if task == "gpt":
        model = LanguageModel(TextConfig(**TEXT))
    elif task == "mae":
        model = MaskedAutoencoder(MAEConfig(**IMAGE))
    elif task == "simdino":
        model = Branch(ImageConfig(**IMAGE, final_norm=True))
        return model, model.encoder.config
    else:
        model = ImageClassifier(ImageConfig(**IMAGE))
    return model, model.config


def content(task="vit", step=3, **fields):
    model, config = make(task)
    letters = dict(name="letters", n_vocab=11, tokenizer=dict(kind="char", characters="0123456789"))
    return dict(task=task, model=model.state_dict(), model_config=asdict(config), step=step,
                best=None, data_meta=letters if task == "gpt" else dict(name="shapes"),
                run_config=dict(seed=0), optimizer={}, extra={}) | fields


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------

def test_a_checkpoint_is_a_torch_file(tmp_path):
    path = tmp_path / "ckpt.pt"
    checkpoint.write_checkpoint(path, content())
    loaded = checkpoint.read_checkpoint(path, "vit")
    plain = torch.load(path, weights_only=True)
    assert same(loaded["model"], plain["model"]) and loaded["step"] == 3
    checkpoint.write_checkpoint(path, content(step=4))
    checkpoint.write_checkpoint(path, content(step=5), keep_previous=False)
    steps = [checkpoint.read_checkpoint(p)["step"] for p in (path, tmp_path / "ckpt.prev.pt")]
    assert steps == [5, 3] and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("write, says", [
    (lambda path: None, "No such file"), (lambda path: path.mkdir(), "it is a folder"),
    (lambda path: (path.mkdir(), (path / "best.pt").touch()), "x.pt/best.pt?"),
    (lambda path: path.write_text("hello"), "torn, or no torch file"),
    (lambda path: torch.save(dict(a=1), path), "no checkpoint of this project"),
    (lambda path: torch.save(dict(format="crate-2"), path), "checksum is missing"),
    (lambda path: checkpoint.write_sealed(path, content() | dict(format="crate-1")), "crate-1"),
    (lambda path: checkpoint.write_checkpoint(path, content(task="poetry")), "'poetry'"),
    (lambda path: checkpoint.write_checkpoint(path, content(extra=None)), "extra=None"),
    (lambda path: checkpoint.write_checkpoint(path, content("gpt")), "task gpt, not vit"),
])
def test_other_files_are_refused_in_one_line(tmp_path, write, says):
    path = tmp_path / "x.pt"
    write(path)
    with pytest.raises(UserError) as error:
        checkpoint.read_checkpoint(path, "vit")
    assert says in str(error.value) and str(path) in str(error.value)
    assert "\n" not in str(error.value)


# -------------------------------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------------------------------

KINDS = dict(vit=ImageClassifier, mae=MaskedAutoencoder, simdino=ImageEncoder, gpt=LanguageModel)


@pytest.mark.parametrize("task", KINDS)
def test_one_loader_for_every_task(tmp_path, task):
    path, full = tmp_path / "a.pt", content(task)
    checkpoint.write_checkpoint(path, full)
    loaded = checkpoint.load_model(path, ("other", task))
    assert type(loaded.model) is KINDS[task] and not loaded.model.training
    assert loaded.task == task and loaded.meta == full["data_meta"]
    assert loaded.content["step"] == 3 and asdict(loaded.model.config) == full["model_config"]
    found = loaded.model.state_dict()
    if task == "simdino":
        assert loaded.encoder is loaded.model
        found = {f"encoder.{k}": v for k, v in found.items()} \
            | {k: v for k, v in full["model"].items() if "projector" in k}
    else:
        assert loaded.encoder is getattr(loaded.model, "encoder", None)
    assert same(found, full["model"])
    with pytest.raises(UserError, match=f"task {task}, not other or another"):
        checkpoint.load_model(path, ("other", "another"))


def test_an_untrained_model_is_drawn_as_its_task_draws_it(tmp_path):
    checkpoint.write_checkpoint(tmp_path / "a.pt", content("mae"))
    first, again, other = (checkpoint.load_model(tmp_path / "a.pt", untrained_seed=seed).encoder
                           for seed in (4, 4, 5))
    assert same(first.state_dict(), again.state_dict())
    assert not same(first.state_dict(), other.state_dict())
    bound = (6 / (192 + 16)) ** 0.5                     # xavier-uniform, not PyTorch's default
    assert 0.9 * bound < first.embed[0].weight.abs().max() <= bound
    assert ImageEncoder(first.config).embed[0].weight.abs().max() <= 192 ** -0.5


def test_initial_model(tmp_path):
    torch.manual_seed(derive_seed(7, "weights"))
    drawn = content("vit", run_config=dict(seed=7))
    assert same(checkpoint.initial_model(drawn).state_dict(), drawn["model"])
    with pytest.raises(UserError, match="--init_from"):
        checkpoint.initial_model(content(run_config=dict(seed=7, init_from="x.pt")))


@pytest.mark.parametrize("name, value, says", [
    ("width", "16", "width='16'"), ("eta", float("nan"), "eta=nan"), ("layers", 0, "layers=0"),
    ("heads", True, "heads=True"), ("heads", 5, "does not divide width"), ("arch", "rate", "rate"),
    ("depth", 3, "depth"), ("layers", 2, "layers.1.norm1.weight is missing in it"),
    ("classes", 2, "is (3, 16) there, (2, 16) here"), ("channels", 10 ** 6, "channels=1000000"),
    ("arch", ["crate"], "arch=['crate']"), ("stem", "none", "stem=none is not one of"),
    ("dropout", 1.5, "dropout=1.5"), ("mm_eps", 0.0, "mm_eps=0.0"), ("eta", 10 ** 400, "eta=1000"),
    ("layer_scale", 7, "layers.0.scale1 is missing in it"),
])
def test_a_config_that_does_not_fit_is_refused(tmp_path, name, value, says):
    full = content()
    full["model_config"] |= dict(head_dim=None) | {name: value}
    checkpoint.write_checkpoint(tmp_path / "a.pt", full)
    with pytest.raises(UserError) as error:
        checkpoint.load_model(tmp_path / "a.pt")
    assert says in str(error.value) and "a.pt" in str(error.value)


def test_positions_are_interpolated_to_another_image_size(tmp_path):
    checkpoint.write_checkpoint(tmp_path / "a.pt", content())
    loaded = checkpoint.load_model(tmp_path / "a.pt")
    encoder = ImageEncoder(ImageConfig(**IMAGE | dict(image_size=32)))
    checkpoint.load_resized(encoder, loaded, "a.pt")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(encoder(x), loaded.encoder(x))
    with pytest.raises(UserError, match="a.pt does not fit this model: class_token"):
        checkpoint.load_resized(ImageEncoder(ImageConfig(**IMAGE | dict(width=32))), loaded, "a.pt")


@pytest.mark.parametrize("kind, task", [
    ("crate", "vit"), ("crate-alpha", "vit"), ("crate-mae", "mae")])
def test_the_same_loader_reads_published_files(tmp_path, kind, task):
    """Their numbers are in test_published.py."""
    tensors, path = official(kind), tmp_path / "their.pth"
    torch.save(dict(state_dict={f"module.{k}": t for k, t in tensors.items()}, epoch=1), path)
    loaded = checkpoint.load_model(path, ("vit", "mae"), heads=4)
    assert loaded.task == task and loaded.meta == loaded.content == {}
    assert type(loaded.model) is KINDS[task] and not loaded.model.training
    ours = checkpoint.from_official(tensors, task, heads=4)
    assert same(loaded.model.state_dict(), ours.state_dict())
    with pytest.raises(UserError, match="their.pth: no published .* has width 16"):
        checkpoint.load_model(path)


@pytest.mark.parametrize("task", ["vit", "mae", "simdino", "gpt"])
def test_published_in_this_repository(tmp_path, monkeypatch, task):
    """pretrained:NAME is the model with its weights rounded to float16, and no more than it needs:
    no optimizer, no projector, no folder of the machine that trained it."""
    monkeypatch.setattr(checkpoint, "PRETRAINED", tmp_path)
    flags = dict(seed=7, data_dir="/home/me/data", out_dir="/home/me/out")
    trained = content(task, run_config=flags, optimizer=dict(state={}),
                      extra=dict(student={}, center=torch.zeros(1)))
    checkpoint.write_checkpoint(tmp_path / "whole.pt", trained)
    checkpoint.main([str(tmp_path / "whole.pt"), "small"])

    loaded = checkpoint.load_model("pretrained:small", (task,))
    whole = checkpoint.load_model(tmp_path / "whole.pt").model
    assert same(loaded.model.state_dict(),
                {name: tensor.half().float() for name, tensor in whole.state_dict().items()})
    kept = {key for key in trained["model"] if task != "simdino" or key.startswith("encoder.")}
    assert set(loaded.content["model"]) == kept
    assert loaded.content["run_config"] == dict(seed=7)
    assert loaded.content["optimizer"] == loaded.content["extra"] == {}


def test_an_unknown_published_model_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "PRETRAINED", tmp_path)
    checkpoint.write_checkpoint(tmp_path / "mine.pt", content())
    for name in ("yours", "", "../mine", "mine.pt"):
        with pytest.raises(UserError, match="pretrained model .* is not one of mine"):
            checkpoint.load_model(f"pretrained:{name}")


# -------------------------------------------------------------------------------------------------
# Saving and resuming
# -------------------------------------------------------------------------------------------------

def start(out, total=10, **flags):
    """(run, model, optimizer, save) of a run that has restored what there is, as in the scripts."""
    config = RunFlags(out_dir=str(out), **flags)
    run = Run(config, "vit", "tiny", Processes("cpu"))
    model, model_config = make("vit")
    optimizer = make_optimizer(model, "adamw", 1e-3, 0.1, (0.9, 0.99))
    checkpoint.restore(run, model_config, optimizer, model)
    run.begin(total, 100, "images", 1)

    def describe():
        return dict(model=model.state_dict(), model_config=asdict(model_config), extra={},
                    data_meta=dict(name="shapes"), optimizer=optimizer.state_dict())
    return run, model, optimizer, checkpoint.saver(run, describe)


def step(run, model, optimizer):
    model(torch.ones(2, 3, 16, 16)).square().mean().backward()
    optimizer.step()
    run.log_step(torch.tensor(1.0), 0.1)


def test_restore_refuses_another_model_and_names_other_flags(tmp_path, capsys):
    run, model, optimizer, save = start(tmp_path, seed=1)
    step(run, model, optimizer)
    save()
    run.close()
    run = start(tmp_path, resume=True, seed=2, log_every=3)[0]
    run.close()
    assert "note: --seed was 1, is now 2\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="its model has width=16, the flags say 32"):
        checkpoint.restore(run, ImageConfig(**IMAGE | dict(width=32)), optimizer, model)
    with pytest.raises(UserError, match="averages weights"):
        checkpoint.restore(run, model.config, optimizer, model, averaged=model)
    with pytest.raises(UserError, match="does not fit this optimizer: optimizer.param_groups"):
        checkpoint.restore(run, model.config, torch.optim.SGD([model.head[1].weight], 0.1), model)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_an_optimizer_state_has_to_fit_its_parameters(tmp_path, name):
    """A fused kernel would write past the end of a smaller one. Hyperparameters are the flags'."""
    model = make("vit")[0]
    fresh, used = (make_optimizer(model, name, 1e-3, 0.1, (0.9, 0.99)) for _ in range(2))
    model(torch.ones(2, 3, 16, 16)).square().mean().backward()
    used.step()
    whole = used.state_dict()
    for kind in ("muon", "adamw") if name == "muon" else (None,):
        part = whole[kind] if kind else whole
        number, kept = list(part["state"].items())[1]
        key, t = [(key, t) for key, t in kept.items() if t.ndim][0]
        bad = [kept | {key: b} for b in (
            t.flatten()[:1], t[None], t.to_sparse(), t.int(), t.to("meta"), t * math.nan, None)]
        bad += [{}, [t], {"x": t}]
        for state in [{number: state} for state in bad] + [{99: kept}, {"0": kept}]:
            forged = part | dict(state=part["state"] | state)
            with pytest.raises(UserError, match="a.pt does not fit this optimizer: .*state"):
                checkpoint.load_optimizer(fresh, whole | {kind: forged} if kind else forged, "a.pt")
        kept[key] = t.new_ones(()).expand(t.shape)      # the right shape, but one number in memory
        for group in part["param_groups"]:
            group |= dict(lr="x", betas=[0.9], amsgrad=True, momentum=None, weight_decay=-1)

    def hyperparameters():
        return [{k: v for k, v in group.items() if k != "params"} for group in fresh.param_groups]
    before = hyperparameters()
    checkpoint.load_optimizer(fresh, whole, "a.pt")
    assert hyperparameters() == before
    parts = fresh.parts if name == "muon" else {None: fresh}
    for kind, part in parts.items():
        state = part.state_dict()["state"]
        theirs = (whole[kind] if kind else whole)["state"]
        assert state and state.keys() == theirs.keys()
        assert all(same(state[i], theirs[i]) for i in state)
        assert all(t.is_contiguous() for kept in state.values() for t in kept.values())


def test_a_save_that_fails(tmp_path, capsys, monkeypatch):
    """In mid-run a warning, after a signal an error; the best weights wait for the next write."""
    run, model, optimizer, save = start(tmp_path, total=3)
    write = checkpoint.write_sealed

    def full(path, content):
        raise UserError(f"cannot write {path}: No space left on device")
    for number in (1, 2):
        monkeypatch.setattr(checkpoint, "write_sealed", write if number == 1 else full)
        step(run, model, optimizer)
        assert run.evaluated(acc=number / 10)
        save(best=True, now=True)
    assert capsys.readouterr().out.count("warning: cannot write") == 1
    run.signal = signal.SIGTERM
    with pytest.raises(UserError, match="cannot write"):
        run.end_step(save)
    assert checkpoint.read_checkpoint(tmp_path / "best.pt")["best"] == 0.1
    monkeypatch.setattr(checkpoint, "write_sealed", write)
    step(run, model, optimizer)
    save()
    best = checkpoint.read_checkpoint(tmp_path / "best.pt")
    assert (best["best"], best["step"]) == (0.2, 2)
    run.close()


def test_saving_takes_a_fiftieth_of_the_time(tmp_path, monkeypatch):
    """By a clock on which a step takes a second and a file half of one. The best weights are those
    of their step, however late they are written, and the end is written always."""
    now, written, write = [0.0], [], checkpoint.write_sealed

    def slowly(path, content):
        now[0] += 0.5
        written.append((path.name, run.step))
        write(path, content)
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(checkpoint, "write_sealed", slowly)
    run, model, optimizer, save = start(tmp_path, total=100)
    for number in range(1, 101):
        step(run, model, optimizer)
        now[0] += 1
        better = number in (1, 30)
        if better:
            kept = {name: t.clone() for name, t in model.state_dict().items()}
        save(best=better)
        run.end_step(save)
    assert written == [("best.pt", 1), ("ckpt.pt", 1), ("best.pt", 52), ("ckpt.pt", 52),
                       ("ckpt.pt", 100)]
    best = checkpoint.read_checkpoint(tmp_path / "best.pt")
    assert best["step"] == 30 and same(best["model"], kept)
    run.close()
