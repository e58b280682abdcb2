"""Checkpoint files and models of every task. Damage: test_survive.py, runs: test_run.py."""
from argparse import Namespace
from dataclasses import asdict

import pytest
import torch
from helpers import same
from test_image_model import patches_literally
from test_model import assert_near, float64  # noqa: F401 (a fixture)
from torch import nn
from torch.nn import functional as F

import checkpoint
import model as model_module
from checkpoint import load_model
from flags import UserError
from processes import cli

IMAGE = dict(width=16, heads=2, layers=1, image_size=16, patch_size=8, classes=3)
TEXT = dict(width=16, heads=2, layers=1, context=8, vocab_size=11)


def make(task):
    """A model; of simdino a Branch, which is an encoder with something behind it."""
    model_class = checkpoint.TASKS[task]
    config = model_class.config_class(**TEXT if task == "gpt" else IMAGE)
    model = model_class(config)
    if task == "simdino":
        model = nn.ModuleDict(dict(encoder=model, projector=nn.Linear(16, 4)))
    model.config = config
    return model


def content(task="vit", **fields):
    model = make(task)
    meta = dict(name="shapes", classes=["disc", "ring", "star"])
    if task == "gpt":
        meta = dict(name="digits", tokenizer=dict(kind="char", characters="0123456789"))
    return dict(task=task, model=model.state_dict(), model_config=asdict(model.config), step=3,
                best=None, data_meta=meta, run_config=dict(seed=0), optimizer={}, extra={}) | fields


def test_files_are_written_whole(tmp_path):
    """What was there is kept, and stays where the new one cannot be written."""
    path, previous = tmp_path / "ckpt.pt", tmp_path / "ckpt.prev.pt"
    for step, keep in ((3, True), (4, True), (5, False)):
        checkpoint.write_checkpoint(path, content(step=step), keep)
    (tmp_path / "ckpt.pt.tmp").symlink_to("/dev/full")
    for extra in ({}, dict(large=torch.zeros(1 << 20))):        # an OSError; torch's RuntimeError
        with pytest.raises(UserError, match="cannot write .*ckpt.pt: .*No space left on device"):
            checkpoint.write_checkpoint(path, content(extra=extra))
        (tmp_path / "ckpt.pt.tmp").symlink_to("/dev/full")
    assert [checkpoint.read_checkpoint(p, "vit")["step"] for p in (path, previous)] == [5, 3]
    assert len(list(tmp_path.iterdir())) == 3


def config(**fields):
    return content(model_config=content()["model_config"] | fields)


REFUSED = {"KeyError: 'task'": dict(a=1), "task gpt, not vit": content("gpt"),
           r"\[40, 16\]": config(heads=5), "32768": config(width=2 ** 15),  # without memory
           "Missing key.*layers.0.scale1": config(layer_scale=7),
           "argument .qkv_bias": config(qkv_bias=True)}      # an older file's field


@pytest.mark.parametrize("says", REFUSED)
def test_other_files_are_refused(tmp_path, says):
    checkpoint.write_checkpoint(tmp_path / "x.pt", REFUSED[says])
    with pytest.raises(UserError, match=f"x.pt.*{says}"):
        load_model(tmp_path / "x.pt", tasks=("vit",))
    with pytest.raises(UserError, match="nowhere.pt.*No such file"):
        load_model("nowhere.pt")


def test_a_mistake_in_an_operator_keeps_its_traceback(tmp_path, monkeypatch):
    checkpoint.write_checkpoint(tmp_path / "a.pt", content())
    monkeypatch.setattr(model_module.ISTA, "__init__", lambda self, *args: 1 + "1")
    with pytest.raises(TypeError):
        cli(lambda argv: load_model(tmp_path / "a.pt"))


@pytest.mark.parametrize("task", checkpoint.TASKS)
def test_one_loader_for_every_task(tmp_path, monkeypatch, task):
    """By the recipe in data/pretrained, pretrained:NAME is the model, its weights rounded to
    float16, and no more than it needs: no projector, no folder of the machine that trained."""
    readme = (checkpoint.PRETRAINED / "README.md").read_text()
    recipe = readme.split("```python\n")[1].split("```")[0]
    monkeypatch.setattr(checkpoint, "PRETRAINED", tmp_path / "data/pretrained")
    monkeypatch.chdir(tmp_path)
    for folder in ("out/gpt-pydoc", "data/pretrained"):
        (tmp_path / folder).mkdir(parents=True)
    path = "out/gpt-pydoc/best.pt"
    full = content(task, run_config=dict(seed=7, data_dir="/home/me/data", out_dir="out"))
    checkpoint.write_checkpoint(path, full)
    exec(recipe, {})
    loaded, mine = (load_model(file, tasks=(task,)) for file in (path, "pretrained:mine"))
    assert type(loaded.model) is checkpoint.TASKS[task] and not loaded.model.training
    assert loaded.task == task and loaded.meta == full["data_meta"]
    assert asdict(loaded.model.config) == full["model_config"]
    state = full["model"]
    if task == "simdino":
        state = {name[8:]: t for name, t in state.items() if name.startswith("encoder.")}
    assert same(loaded.model.state_dict(), state)
    assert same(mine.model.state_dict(), {name: t.half().float() for name, t in state.items()})
    assert not any("projector" in name for name in mine.content["model"])
    assert mine.content["run_config"] == dict(seed=7)
    pytest.raises(UserError, load_model, "pretrained:../mine")


# ---- Published files, of random tensors, against the authors' networks written once more

d, P, SIDE, LAYERS, DECODER_LAYERS, CLASSES = 16, 4, 3, 2, 3, 7


def official(kind, d=d):
    """Random tensors under the names and in the shapes of a published checkpoint."""
    positions = (1, SIDE ** 2 + 1, d)
    alone, biased = dict(cls_token=(1, 1, d)), {}       # shapes: of tensors, of weights with a bias
    if kind == "crate-mae":
        alone |= dict(mask_token=(1, 1, d), pos_embed=positions, decoder_pos_embed=positions)
        biased |= {"patch_embed.proj": (d, 3, P, P), "norm": (d,), "decoder_norm": (d,),
                   "decoder_embed": (d, d), "decoder_pred": (3 * P * P, d)}
        layers = [(f"blocks.{l}.layers.0.0", f"blocks.{l}.layers.0.1") for l in range(LAYERS)]
        decoder = [f"decoder_blocks.{l}.layers.0." for l in range(DECODER_LAYERS)]
        layers += [(name + "1", name + "0") for name in decoder]
    else:
        alone["pos_embedding"] = positions
        biased |= {"mlp_head.0": (d,), "mlp_head.1": (CLASSES, d)}
        layers = [(f"transformer.layers.{l}.0", f"transformer.layers.{l}.1") for l in range(LAYERS)]
    if kind == "crate":
        biased |= {"to_patch_embedding.1": (3 * P * P,), "to_patch_embedding.2": (d, 3 * P * P),
                   "to_patch_embedding.3": (d,)}
    if kind == "crate-alpha":
        biased["conv1"] = (d, 3, P, P)
    for attention, sparsification in layers:
        biased |= {f"{attention}.norm": (d,), f"{sparsification}.norm": (d,)}
        alone[f"{attention}.fn.qkv.weight"] = (d, d)
        if kind == "crate-alpha":
            alone[f"{attention}.fn.to_out.0.weight"] = (d, d)
            alone[f"{sparsification}.fn.D"] = alone[f"{sparsification}.fn.D1"] = (d, 4 * d)
        else:
            biased[f"{attention}.fn.to_out.0"] = alone[f"{sparsification}.fn.weight"] = (d, d)
    alone |= {f"{name}.weight": shape for name, shape in biased.items()}
    alone |= {f"{name}.bias": shape[:1] for name, shape in biased.items()}
    return {name: (0.4 * torch.randn(shape)).float().double() for name, shape in alone.items()}


def released_forward(t, x, masked=None, heads=4):
    """The authors' network on their tensors, tokens as rows: logits, or predicted patches."""
    alpha, mae = "conv1.weight" in t, "mask_token" in t

    def norm(Z, name, eps=1e-6 if alpha else 1e-5):
        return F.layer_norm(Z, Z.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps)

    def linear(Z, name):
        return F.linear(Z, t[f"{name}.weight"], t.get(f"{name}.bias"))

    def conv(name):
        return F.conv2d(x, t[f"{name}.weight"], t[f"{name}.bias"], stride=P).flatten(2).mT.clone()

    def attend(Z, name):
        w = linear(norm(Z, f"{name}.norm"), f"{name}.fn.qkv")
        out = [(h @ h.mT * h.shape[-1] ** -0.5).softmax(-1) @ h for h in w.split(d // heads, -1)]
        return linear(torch.cat(out, -1), f"{name}.fn.to_out.0")

    def ista(Z, name, lambd):
        y, D = norm(Z, f"{name}.norm"), t[f"{name}.fn.weight"]
        return (y + 0.1 * (y @ D - y @ D.T @ D) - 0.1 * lambd).relu()

    def odl(Z, name):
        y, D, D1 = norm(Z, f"{name}.norm"), t[f"{name}.fn.D"], t[f"{name}.fn.D1"]
        a = (0.1 * y @ D - 0.01).relu()
        return (a - 0.1 * (a @ D.T - y) @ D - 0.01).relu() @ D1.T

    positions = t["decoder_pos_embed" if mae else "pos_embedding"]
    blocks = "blocks.{}.layers.0" if mae else "transformer.layers.{}"
    if mae:
        Z = conv("patch_embed.proj")
        Z[masked] = t["mask_token"][0]
    elif alpha:
        Z = conv("conv1")
    else:
        Z = norm(patches_literally(x, P), "to_patch_embedding.1")
        Z = norm(linear(Z, "to_patch_embedding.2"), "to_patch_embedding.3")
    Z = torch.cat([t["cls_token"].expand(len(x), -1, -1), Z], 1) + positions
    for name in map(blocks.format, range(LAYERS)):
        Z = Z + attend(Z, f"{name}.0")
        Z = Z + odl(Z, f"{name}.1") if alpha else ista(Z, f"{name}.1", 0.5 if mae else 0.1)
    if not mae:
        return linear(norm(Z[:, 0], "mlp_head.0"), "mlp_head.1")

    Z = norm(Z, "norm", 1e-6)
    for name in map("decoder_blocks.{}.layers.0".format, range(DECODER_LAYERS)):
        Z = linear(norm(Z, f"{name}.0.norm"), f"{name}.0.fn")
        Z = Z - attend(Z, f"{name}.1")
    return linear(norm(Z, "decoder_norm", 1e-6), "decoder_pred")[:, 1:]


@pytest.mark.parametrize("kind", ["crate", "crate-alpha", "crate-mae"])
@torch.no_grad()
def test_published_files_open_as_the_authors_networks(kind, tmp_path):
    def load(tensors, heads=None):
        state, args = {f"module.{name}": t for name, t in tensors.items()}, Namespace(lr=1e-3)
        torch.save(dict(state_dict=state, epoch=799, args=args), tmp_path / "their.pth")
        return load_model(tmp_path / "their.pth", heads, ("vit", "mae"))

    tensors, x, masked = official(kind), torch.randn(2, 3, 12, 12), torch.rand(2, 9) < 0.75
    net = load(tensors, heads=4).model
    found = net.predicted(x, masked) if kind == "crate-mae" else net(x)
    assert_near(found, released_forward(tensors, x, masked))
    assert load(official(kind, d=576)).model.config.heads == 12         # a published width
    with pytest.raises(UserError, match="their.pth .*no published .* has width 16.*--heads"):
        load(tensors)


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@torch.no_grad()
def test_crate_lm(prefix, tmp_path):
    """A nanoGPT-style file opens as the authors' network."""
    V, n, d = 11, 6, 128
    shapes = {"transformer.wte.weight": (V, d), "transformer.wpe.weight": (n, d),
              "transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}
    for l in range(LAYERS):
        h = f"transformer.h.{l}."
        shapes |= {f"{h}attn.c_attn.weight": (d, d), f"{h}attn.c_proj.weight": (d, d),
                   f"{h}attn.c_proj.bias": (d,), f"{h}ista.weight": (4 * d, d),
                   f"{h}attn.bias": (1, 1, n, n)}           # nanoGPT's causal mask
        shapes |= {f"{h}prenorm_{i}.{k}": (d,) for i in (1, 2) for k in ("weight", "bias")}
    t = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    t["lm_head.weight"] = t["transformer.wte.weight"]
    path = tmp_path / "ckpt.pt"
    torch.save(dict(model={prefix + name: x for name, x in t.items()}, args=Namespace(lr=1)), path)
    loaded = load_model(path, 2, ("gpt",))
    assert loaded.meta["tokenizer"]["kind"] == "gpt2"

    def norm(Z, name):
        return F.layer_norm(Z, (d,), t[f"{name}.weight"], t[f"{name}.bias"])

    ids, future = torch.randint(V, (2, n)), torch.full((n, n), -torch.inf).triu(1)
    Z = t["transformer.wte.weight"][ids] + t["transformer.wpe.weight"]
    for l in range(LAYERS):
        h = f"transformer.h.{l}."
        w, D = norm(Z, f"{h}prenorm_1") @ t[f"{h}attn.c_attn.weight"].T, t[f"{h}ista.weight"]
        heads = [(w @ w.mT / 8 + future).softmax(-1) @ w for w in w.split(64, -1)]
        Z = Z + torch.cat(heads, -1) @ t[f"{h}attn.c_proj.weight"].T + t[f"{h}attn.c_proj.bias"]
        x = norm(Z, f"{h}prenorm_2")
        a1 = (0.1 * x @ D.T - 0.01).relu()
        a2 = (a1 - 0.1 * (a1 @ D - x) @ D.T - 0.01).relu()
        Z = a2 @ D
    assert_near(loaded.model(ids), norm(Z, "transformer.ln_f") @ t["lm_head.weight"].T)
    for wrong in ("lm_head.weight", "transformer.h.0.attn.c_attn.bias"):    # untied, a query's bias
        torch.save(t | {wrong: torch.ones(V, d)}, path)
        pytest.raises(UserError, load_model, path, 2)
