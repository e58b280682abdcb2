"""
Checkpoints: files written whole, one `load_model` for every task, published checkpoints.

    python checkpoint.py out/gpt-pydoc/best.pt mine     writes data/pretrained/mine.pt, weights in
                                                        float16; it opens as --ckpt=pretrained:mine

One schema for all tasks: {format, task, model, model_config, data_meta, run_config, step, best,
optimizer, extra}. `model` is what one evaluates (averaged weights, SimDINO's teacher);
extra["student"] holds the weights being trained where they differ. An image encoder is always
`encoder.*`.
"""
import contextlib
import itertools
import math
import os
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from flags import cli, UserError
from model import (ConfigError, ImageClassifier, ImageConfig, ImageEncoder, LanguageModel,
                   MAEConfig, MaskedAutoencoder, TextConfig, make_config, not_one_of, sizes_of)

FORMAT = "crate-3"
PRETRAINED = Path(__file__).resolve().parent / "data" / "pretrained"

# task -> (model, its config). SimDINO's checkpoint is read as the teacher's encoder: its projector
# serves training only.
TASKS = dict(vit=(ImageClassifier, ImageConfig), mae=(MaskedAutoencoder, MAEConfig),
             simdino=(ImageEncoder, ImageConfig), gpt=(LanguageModel, TextConfig))


# -------------------------------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------------------------------

def write_checkpoint(path, content, keep_previous=True):
    """Saves to path.tmp, makes sure that it is on the disk, and renames it; the file that was there
    becomes NAME.prev.pt just before. So one of the two is whole at every moment.

    Raises UserError where it cannot be written."""
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "wb") as file:
            torch.save(dict(format=FORMAT) | content, file)
            file.flush()
            os.fsync(file.fileno())
        if keep_previous and path.exists():
            os.replace(path, path.with_suffix(".prev.pt"))
        os.replace(tmp, path)
    except (OSError, RuntimeError) as error:    # of torch.save, on a full disk
        with contextlib.suppress(OSError):
            tmp.unlink()
        raise UserError(f"cannot write {path}: {error}") from None
    with contextlib.suppress(OSError):          # so that the renames survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


@contextlib.contextmanager
def reading(path):
    """Around all that is done with a file's content: whatever is wrong with it is one UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{path} cannot be read as a checkpoint: {reason}") from None


def find(path):
    """The file of `path`: that of data/pretrained/ for pretrained:NAME, else `path` itself."""
    kind, _, name = str(path).partition(":")
    if kind != "pretrained":
        return Path(path)
    names = sorted(file.stem for file in PRETRAINED.glob("*.pt"))
    if name not in names:
        raise UserError(f"pretrained model {not_one_of(name, names)}")
    return PRETRAINED / f"{name}.pt"


def _read(path):
    """What torch.save wrote: tensors and plain values. zipfile looks at the CRC that torch.save
    gave to each part of the file, torch.load does not."""
    path = find(path)
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip() is None:
                return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:                           # of many kinds, with a page of text
        pass
    raise ValueError("it is damaged, no torch file, or holds more than tensors and plain values, "
                     "which could run code")


def read_checkpoint(path, task=None):
    """The content of a checkpoint of this project, of the given task if any, or UserError."""
    with reading(path):
        content = _read(path)
        if content.get("format") != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        _check_task(content["task"], task and [task])
        return content


def _check_task(task, tasks):
    if tasks and task not in tasks:
        raise ValueError(f"it is of task {task}, not {' or '.join(tasks)}")


class Loaded(NamedTuple):
    """A checkpoint as a model in evaluation mode."""
    task: str                       # vit, mae, simdino, gpt
    model: nn.Module
    encoder: nn.Module | None       # of image models
    meta: dict                      # data_meta: classes, mean, tokenizer ...; {} of a published one
    content: dict                   # the whole checkpoint; {} of a published one


def load_model(path, tasks=None, heads=None, untrained_seed=None):
    """Any checkpoint, ours or a published one, as `Loaded`.

    `tasks` names those that are accepted; `heads` is K of a published one of unpublished width.
    With an `untrained_seed` the weights are those at initialization. Raises UserError."""
    with reading(path):
        content = _read(path)
        if content.get("format") == FORMAT:
            task, state = content["task"], content["model"]
            _check_task(task, tasks)
            if task == "simdino":
                state = {name.removeprefix("encoder."): tensor for name, tensor in state.items()
                         if name.startswith("encoder.")}
            model_class, config_class = TASKS[task]
            model = _filled(model_class, make_config(config_class, content["model_config"]), state)
        else:
            model, content = from_official(content, heads), {}
            task = next(task for task, (kind, _) in TASKS.items() if isinstance(model, kind))
            if task == "gpt":
                content = dict(data_meta=dict(tokenizer=dict(kind="gpt2"), n_vocab=50257))
            _check_task(task, tasks)
    if untrained_seed is not None:
        torch.manual_seed(untrained_seed)
        model = TASKS[task][0](model.config)
    model.eval()
    encoder = None if task == "gpt" else getattr(model, "encoder", model)
    return Loaded(task, model, encoder, content.get("data_meta", {}), content)


def _filled(model_class, config, state, names={}):
    """The model with the weights of `state`; `names` maps ours to those there. It is built without
    memory, and takes the file's tensors once all shapes are the same."""
    with torch.device("meta"):
        model = model_class(config)
    own = model.state_dict()
    theirs = {name: names.get(name, name) for name in own}
    if problem := _misfit({theirs[name]: tensor for name, tensor in own.items()}, state):
        raise ConfigError(problem)
    own = {name: state[theirs[name]].to(own[name].dtype) for name in own}
    model.load_state_dict(own, assign=True)
    return model


def _misfit(own, state):
    """What is wrong with the first tensor of `state` that is not like that of `own`, or None."""
    for name in [*own, *state]:
        if name not in state:
            return f"{name} is missing in it"
        if name not in own:
            return f"{name} in it has no place here"
        if state[name].shape != own[name].shape:
            return f"{name} is {tuple(state[name].shape)} there, {tuple(own[name].shape)} here"


def load_into(module, state, path):
    """module.load_state_dict(state); a UserError names the first tensor that does not fit."""
    if problem := _misfit(module.state_dict(), state):
        raise UserError(f"{path} does not fit this model: {problem}")
    module.load_state_dict(state)


def load_resized(encoder, loaded, path):
    """Fills `encoder` from a loaded one, learned positions interpolated to its own image size."""
    c, theirs = encoder.config, loaded.encoder
    state = theirs.state_dict()
    if c.image_size != theirs.config.image_size:
        side, positions = c.image_size // c.patch_size, encoder.positions
        if theirs.config.positions == "learned":
            positions = theirs.position_table(side, side)
        state["positions"] = positions.detach()
    load_into(encoder, state, path)


def load_optimizer(optimizer, saved):
    """Fills the state of each parameter. Rates, betas and decays stay those of the flags.

    A fused kernel writes as many numbers as the parameter has, past the end of a smaller state: so
    each shape is compared first. Raises ValueError."""
    parts = getattr(optimizer, "parts", None)
    for name, part in (parts or {"": optimizer}).items():
        theirs, own = saved[name] if parts else saved, part.state_dict()["param_groups"]
        params = [p for group in part.param_groups for p in group["params"]]
        if [g["params"] for g in theirs["param_groups"]] != [g["params"] for g in own]:
            raise ValueError("its optimizer has other parameters")
        for i, kept in theirs["state"].items():
            for key, tensor in kept.items():
                if tensor.shape != (() if key == "step" else params[i].shape):
                    raise ValueError(f"{key} of parameter {i} is not like the parameter")
        part.load_state_dict(dict(state=theirs["state"], param_groups=own))


def publish(path, name):
    """Writes data/pretrained/NAME.pt: what load_model needs of a checkpoint, weights in float16."""
    content = read_checkpoint(path)
    weights = {key: tensor.half() for key, tensor in content["model"].items()
               if content["task"] != "simdino" or key.startswith("encoder.")}
    flags = {key: value for key, value in content["run_config"].items()
             if key not in ("data_dir", "out_dir")}         # folders of the machine that trained it
    kept = dict(model=weights, run_config=flags, optimizer={}, extra={})
    write_checkpoint(PRETRAINED / f"{name}.pt", content | kept)


# -------------------------------------------------------------------------------------------------
# Published checkpoints: our names -> theirs, {l} the number of a layer, {k} weight or bias
# -------------------------------------------------------------------------------------------------

_CRATE = {
    "encoder.class_token": "cls_token",
    "encoder.positions": "pos_embedding",
    "encoder.embed.0.{k}": "to_patch_embedding.1.{k}",
    "encoder.embed.1.{k}": "to_patch_embedding.2.{k}",
    "encoder.embed.2.{k}": "to_patch_embedding.3.{k}",
    "encoder.layers.{l}.norm1.{k}": "transformer.layers.{l}.0.norm.{k}",
    "encoder.layers.{l}.attention.U.weight": "transformer.layers.{l}.0.fn.qkv.weight",
    "encoder.layers.{l}.attention.W.{k}": "transformer.layers.{l}.0.fn.to_out.0.{k}",
    "encoder.layers.{l}.norm2.{k}": "transformer.layers.{l}.1.norm.{k}",
    "encoder.layers.{l}.sparsification.D": "transformer.layers.{l}.1.fn.weight",
    "head.0.{k}": "mlp_head.0.{k}",
    "head.1.{k}": "mlp_head.1.{k}",
}
_CRATE_ALPHA = {name: theirs for name, theirs in _CRATE.items() if "embed." not in name} | {
    "encoder.embed.0.{k}": "conv1.{k}",
    "encoder.layers.{l}.sparsification.D": "transformer.layers.{l}.1.fn.D",
    "encoder.layers.{l}.sparsification.D_hat": "transformer.layers.{l}.1.fn.D1",
}
_CRATE_MAE = {name: theirs.replace("transformer.layers.{l}", "blocks.{l}.layers.0")
              for name, theirs in _CRATE.items() if ".layers." in name} | {
    "encoder.class_token": "cls_token",
    "mask_token": "mask_token",
    "encoder.positions": "decoder_pos_embed",
    "encoder.embed.0.{k}": "patch_embed.proj.{k}",
    "encoder.norm.{k}": "norm.{k}",
    "decoder.{l}.norm1.{k}": "decoder_blocks.{l}.layers.0.0.norm.{k}",
    "decoder.{l}.D": "decoder_blocks.{l}.layers.0.0.fn.weight",
    "decoder.{l}.norm2.{k}": "decoder_blocks.{l}.layers.0.1.norm.{k}",
    "decoder.{l}.attention.U.weight": "decoder_blocks.{l}.layers.0.1.fn.qkv.weight",
    "decoder.{l}.attention.W.{k}": "decoder_blocks.{l}.layers.0.1.fn.to_out.0.{k}",
    "decoder_norm.{k}": "decoder_norm.{k}",
    "predict.{k}": "decoder_pred.{k}",
}
# stored and counted in the released CRATE-MAE, but never applied
_UNUSED = ("pos_embed", "decoder_embed.weight", "decoder_embed.bias")

# of crate-lm: nanoGPT's names
_CRATE_LM = {
    "embed.weight": "transformer.wte.weight",
    "positions": "transformer.wpe.weight",
    "layers.{l}.norm1.{k}": "transformer.h.{l}.prenorm_1.{k}",
    "layers.{l}.attention.U.weight": "transformer.h.{l}.attn.c_attn.weight",
    "layers.{l}.attention.W.{k}": "transformer.h.{l}.attn.c_proj.{k}",
    "layers.{l}.norm2.{k}": "transformer.h.{l}.prenorm_2.{k}",
    "layers.{l}.sparsification.D": "transformer.h.{l}.ista.weight",
    "norm.{k}": "transformer.ln_f.{k}",
}

# (task, arch, names): another kind of published checkpoint is another row
PUBLISHED = [("vit", "crate", _CRATE), ("vit", "crate-alpha", _CRATE_ALPHA),
             ("mae", "crate", _CRATE_MAE)]


def from_official(content, heads=None):
    """A published CRATE, CRATE-alpha, CRATE-MAE or crate-lm as a model in evaluation mode.

    Takes the file's content or the state dict in it, with or without "module." or "_orig_mod."
    before each name. Sizes are read off the tensors, heads off the published sizes (or `heads`).
    Raises KeyError or ConfigError with the name of what does not fit."""
    for key in ("state_dict", "model"):
        content = content.get(key, content)
    tensors = {name.removeprefix("module.").removeprefix("_orig_mod."): tensor
               for name, tensor in content.items()}
    if "transformer.h.0.ista.weight" in tensors:
        return _crate_lm(tensors, heads)
    for kind, arch, table in PUBLISHED:
        if table["encoder.layers.{l}.sparsification.D"].format(l=0) in tensors:
            break
    else:
        raise ConfigError(f"neither of format {FORMAT} nor an official checkpoint: it lacks the "
                          "dictionary of the first layer")
    for name in _UNUSED if kind == "mae" else ():
        tensors.pop(name, None)

    def depth(name):
        return next(l for l in itertools.count() if table[name].format(l=l) not in tensors)

    # the patch embedding, which CRATE has behind a norm, gives d and P
    embed = table[f"encoder.embed.{int(table is _CRATE)}.{{k}}"].format(k="weight")
    weight = tensors[embed]
    if weight.ndim == 4:    # P x P with stride P is a Linear on patches; ours have channels last
        weight = tensors[embed] = weight.permute(0, 2, 3, 1).flatten(1)
    P = math.isqrt(weight.shape[1] // 3)
    side, d = math.isqrt(tensors[table["encoder.positions"]].shape[1] - 1), len(weight)
    sizes = sizes_of("mae" if kind == "mae" else "image", arch)
    heads = heads or {size["width"]: size["heads"] for size in sizes.values()}.get(d)
    if heads is None:
        raise ConfigError(f"no published {arch} has width {d}: say how many heads this one has "
                          "(heads=)")
    fields = dict(arch=arch, width=d, heads=heads, image_size=P * side, patch_size=P,
                  layers=depth("encoder.layers.{l}.sparsification.D"))
    if kind == "mae":
        fields |= dict(decoder_layers=depth("decoder.{l}.D"), lambd=0.5)
    else:
        fields["classes"] = len(tensors[table["head.1.{k}"].format(k="weight")])
    names = {ours.format(l=l, k=k): theirs.format(l=l, k=k) for ours, theirs in table.items()
             for l in range(max(fields["layers"], fields.get("decoder_layers", 0)))
             for k in ("weight", "bias")}
    model_class, config_class = TASKS[kind]
    return _filled(model_class, make_config(config_class, fields), tensors, names).eval()


def _crate_lm(tensors, heads):
    """Of a state dict whose head is the embedding and whose dictionaries are (4 d, d)."""
    tensors = {name: tensor.mT if name.endswith("ista.weight") else tensor
               for name, tensor in tensors.items()
               if name != "lm_head.weight" and not name.endswith("attn.bias")}      # causal masks
    (V, d), (n, _) = (tensors[f"transformer.{name}.weight"].shape for name in ("wte", "wpe"))
    depth = sum(name.endswith("ista.weight") for name in tensors)
    fields = dict(arch="crate-lm", width=d, heads=heads or d // 64, layers=depth, vocab_size=V,
                  context=n, expansion=tensors["transformer.h.0.ista.weight"].shape[1] // d)
    names = {ours.format(l=l, k=k): theirs.format(l=l, k=k) for ours, theirs in _CRATE_LM.items()
             for l in range(depth) for k in ("weight", "bias")}
    return _filled(LanguageModel, make_config(TextConfig, fields), tensors, names).eval()


# -------------------------------------------------------------------------------------------------
# The command
# -------------------------------------------------------------------------------------------------

def main(argv):
    """The command of the module's header."""
    if len(argv) != 2:
        raise UserError("usage: python checkpoint.py CHECKPOINT NAME")
    publish(*argv)


if __name__ == "__main__":
    cli(main)
