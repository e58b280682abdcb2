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
import math
import os
import re
import typing
import warnings
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
    except (OSError, RuntimeError) as error:    # torch.save may hide a full disk in a RuntimeError
        with contextlib.suppress(OSError):
            tmp.unlink()
        errors = [e for e in (error, error.__context__) if isinstance(e, OSError)] or [error]
        raise UserError(f"cannot write {path}: {errors[0]}") from None
    with contextlib.suppress(OSError):          # so that the renames survive a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def plain(text):
    """One line of at most 300 characters, whatever the file that it quotes holds."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())[:300]


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
        raise UserError(plain(f"{path} cannot be read as a checkpoint: {reason}")) from None


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
    """What torch.save wrote: tensors and plain values. torch.load does not look at the CRC that
    torch.save gave to each part of the file, zipfile does."""
    with open(find(path), "rb") as file:
        if file.read(2) == b"PK":               # else of torch before 1.6, or no torch file
            damaged = zipfile.ZipFile(file).testzip()
            if damaged:
                raise ValueError(f"{damaged} in it is damaged")
        file.seek(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")     # torch's, of pickles that it then refuses
                return torch.load(file, map_location="cpu", weights_only=True)
        except Exception:                           # of many kinds, with a page of text
            raise ValueError("it is torn, no torch file, or holds more than tensors and plain "
                             "values, which could run code") from None


def read_checkpoint(path, task=None):
    """The content of a checkpoint of this project, of the given task if any, or UserError."""
    with reading(path):
        content = _read(path)
        _checked_config(content, task and [task])
        return content


def _checked_config(content, tasks=None):
    """The model's config. Raises an error if the rest of the code cannot rely on the content."""
    if not (isinstance(content, dict) and content.get("format") == FORMAT):
        raise ValueError(f"it is not of format {FORMAT}")
    task, state, fields = content["task"], content["model"], content["model_config"]
    if task not in (tasks or TASKS):
        raise ValueError(f"it is of task {task}, not {' or '.join(tasks or TASKS)}")
    for name, tensor in state.items():
        if not _is_finite(tensor):
            raise ValueError(f"{name} is no tensor of finite weights")
    config_class = TASKS[task][1]
    hints = typing.get_type_hints(config_class)
    for name, value in fields.items():
        if not isinstance(value, hints[name] | int):
            raise ValueError(f"model_config has {name}={value}")
        if "layers" in name and value > len(state):     # they are built before shapes are compared
            raise ValueError(f"it has {len(state)} tensors for {name}={value}")
    config, meta = make_config(config_class, fields), content["data_meta"]
    if task == "vit" and [plain(name) for name in meta["classes"]] != meta["classes"]:
        raise ValueError("its classes have no names")
    if task == "vit" and len(meta["classes"]) != config.classes:
        raise ValueError(f"it names {len(meta['classes'])} classes of {config.classes}")
    if task == "gpt" and not meta["tokenizer"].get("characters", "of another kind"):
        raise ValueError("its tokenizer has no characters")
    return config


def _is_finite(tensor):
    """Whether it is a tensor of finite numbers of a common kind, with memory for each of them."""
    common = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return (isinstance(tensor, torch.Tensor) and tensor.dtype in common
            and tensor.layout is torch.strided
            and tensor.untyped_storage().nbytes() >= tensor.nbytes
            and bool(tensor.isfinite().all()))


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
        if isinstance(content, dict) and "format" in content:
            config, task = _checked_config(content, tasks), content["task"]
            state = content["model"]
            if task == "simdino":
                state = {name.removeprefix("encoder."): tensor for name, tensor in state.items()
                         if name.startswith("encoder.")}
            model = _filled(TASKS[task][0], config, state)
        else:
            model, content = from_official(content, None, heads), {}
            task = "mae" if isinstance(model, MaskedAutoencoder) else "vit"
        if tasks is not None and task not in tasks:
            raise ValueError(f"it is of task {task}, not {' or '.join(tasks)}")
    if untrained_seed is not None:
        torch.manual_seed(untrained_seed)
        model = TASKS[task][0](model.config)
    model.eval()
    encoder = None if task == "gpt" else getattr(model, "encoder", model)
    return Loaded(task, model, encoder, content.get("data_meta", {}), content)


def _filled(model_class, config, state, names={}):
    """The model with the weights of `state`; `names` maps ours to those there. It is built without
    memory, and takes the file's tensors once all shapes are the same: a config can claim any
    size."""
    with torch.device("meta"):
        model = model_class(config)
    own = model.state_dict()
    theirs = {name: names.get(name, name) for name in own}
    problem = _misfit({theirs[name]: tensor for name, tensor in own.items()}, state)
    if problem:
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
    module.load_state_dict(dict(state))         # without its _metadata, which may be anything


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


# what an optimizer keeps of a parameter: tensors of its shape, and AdamW the number of its steps
_KEPT = dict(AdamW={"step", "exp_avg", "exp_avg_sq"}, Lion={"m"}, Muon={"momentum_buffer"})


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
            if kept.keys() != _KEPT[type(part).__name__]:
                raise ValueError(f"its optimizer is not {type(part).__name__}")
            for key, tensor in kept.items():
                shape = () if key == "step" else params[i].shape
                if not _is_finite(tensor) or tensor.shape != shape:
                    raise ValueError(f"{key} of parameter {i} is not like the parameter")
                kept[key] = tensor.clone(memory_format=torch.contiguous_format)
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

# (task, arch, names): another kind of published checkpoint is another row
PUBLISHED = [("vit", "crate", _CRATE), ("vit", "crate-alpha", _CRATE_ALPHA),
             ("mae", "crate", _CRATE_MAE)]


def from_official(content, task=None, heads=None):
    """A published CRATE, CRATE-alpha ("vit") or CRATE-MAE ("mae") as a model in evaluation mode.

    Takes the file's content or the state dict in it, with or without "module." before each name.
    Width, patch, image size, depth and classes are read off the tensors, heads off the published
    sizes (or `heads`). Raises ConfigError naming the first tensor that does not fit."""
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(map(_is_finite, content.values())):
        raise ConfigError("no official checkpoint: it is no dictionary of finite tensors")
    tensors = {str(name).removeprefix("module."): tensor for name, tensor in content.items()}
    for kind, arch, table in PUBLISHED:
        layer = table["encoder.layers.{l}.sparsification.D"]
        if layer.format(l=0) in tensors and task in (None, kind):
            break
    else:
        raise ConfigError("no official checkpoint: it lacks the dictionary of the first layer")
    for name in _UNUSED if kind == "mae" else ():
        tensors.pop(name, None)

    def found(ours):
        name = table[ours].format(k="weight")
        if name not in tensors:
            raise ConfigError(f"{name} is missing from the official checkpoint")
        return name, tensors[name]

    def depth(ours):
        prefix = table[ours].partition("{l}")[0]
        return len({name[len(prefix):].split(".")[0] for name in tensors
                    if name.startswith(prefix)})

    # the patch embedding gives d and P, the positions the number of patches
    embed, weight = found("encoder.embed.0.{k}" if table is not _CRATE else "encoder.embed.1.{k}")
    if weight.ndim == 4:    # P x P with stride P is a Linear on patches; ours have channels last
        weight = tensors[embed] = weight.permute(0, 2, 3, 1).flatten(1)
    P = math.isqrt(weight.shape[1] // 3)
    side, d = math.isqrt(found("encoder.positions")[1].shape[1] - 1), len(weight)
    sizes = sizes_of("mae" if kind == "mae" else "image", arch)
    heads = heads or {size["width"]: size["heads"] for size in sizes.values()}.get(d)
    if heads is None:
        raise ConfigError(f"no published {arch} has width {d}: say how many heads this one has "
                          "(heads=)")
    fields = dict(arch=arch, width=d, heads=heads,
                  layers=depth("encoder.layers.{l}.norm1.{k}"), image_size=P * side, patch_size=P)
    if kind == "mae":
        fields |= dict(decoder_layers=depth("decoder.{l}.norm1.{k}"), lambd=0.5)
    else:
        fields["classes"] = len(found("head.1.{k}")[1])
    names = {ours.format(l=l, k=k): theirs.format(l=l, k=k) for ours, theirs in table.items()
             for l in range(max(fields["layers"], fields.get("decoder_layers", 0)))
             for k in ("weight", "bias")}
    model_class, config_class = TASKS[kind]
    return _filled(model_class, make_config(config_class, fields), tensors, names).eval()


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
