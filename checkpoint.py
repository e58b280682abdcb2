"""
Checkpoints: files written whole, one `load_model` for every task and for published ones.

    python checkpoint.py out/gpt-pydoc/best.pt mine     writes data/pretrained/mine.pt, weights in
                                                        float16; it opens as --ckpt=pretrained:mine

One schema for all tasks: {format, task, model, model_config, data_meta, run_config, step, best,
optimizer, extra}. `model` is what one evaluates (averaged weights, SimDINO's teacher);
extra["student"] holds the weights being trained where they differ. An image encoder is always
`encoder.*`.
"""
import argparse
import contextlib
import os
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import published
from flags import cli, UserError
from model import (ConfigError, ImageClassifier, ImageConfig, ImageEncoder, LanguageModel,
                   MAEConfig, MaskedAutoencoder, TextConfig, make_config, not_one_of)

FORMAT = "crate-3"
PRETRAINED = Path(__file__).resolve().parent / "data" / "pretrained"

# task, named by its script -> (model, its config). SimDINO's checkpoint is read as the teacher's
# encoder: its projector serves training only.
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
    except (OSError, RuntimeError) as error:    # of torch.save; behind it may be the full disk
        with contextlib.suppress(OSError):
            tmp.unlink()
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise UserError(f"cannot write {path}: {cause}") from None
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
    """What torch.save wrote: tensors, plain values, and the argparse.Namespace of official files.
    zipfile looks at the CRC that torch.save gave to each part of the file, torch.load does not."""
    path = find(path)
    if path.exists() and not path.is_file():
        raise ValueError("it is no regular file")               # /dev/zero would never end
    try:
        with zipfile.ZipFile(path) as file, \
                torch.serialization.safe_globals([argparse.Namespace]):
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
    meta: dict                      # data_meta: classes, mean ...; of a published one its tokenizer
    content: dict                   # the checkpoint; of a published one data_meta and run_config


def load_model(path, tasks=None, heads=None, untrained_seed=None):
    """Any checkpoint, ours or a published one, as `Loaded`.

    `tasks` names those that are accepted; `heads` gives K of a published file whose width matches
    no published size.
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
            model = _filled(model_class, make_config(config_class, **content["model_config"]), state)
        elif "format" in content:
            raise ValueError(f"it is of format {content['format']}, not {FORMAT}")
        else:
            task, config, tensors, names = published.describe(content, heads)
            _check_task(task, tasks)
            model = _filled(TASKS[task][0], config, tensors, names)
            meta = dict(tokenizer=dict(kind="gpt2")) if task == "gpt" else {}
            content = dict(data_meta=meta, run_config={})
    if untrained_seed is not None:
        torch.manual_seed(untrained_seed)
        model = TASKS[task][0](model.config)
    model.eval()
    encoder = None if task == "gpt" else getattr(model, "encoder", model)
    return Loaded(task, model, encoder, content.get("data_meta", {}), content)


def _filled(model_class, config, state, names=None):
    """The model with the weights of `state`; `names` maps ours to those there. It is built without
    memory, and takes the file's tensors once all shapes are the same."""
    with torch.device("meta"):
        model = model_class(config)
    own = model.state_dict()
    theirs = {name: (names or {}).get(name, name) for name in own}
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


def load_optimizers(optimizers, saved):
    """Fills the state of each parameter. Rates, betas and decays stay those of the flags.

    A fused kernel writes as many numbers as the parameter has, past the end of a smaller state: so
    each shape is compared first. Raises ValueError."""
    for optimizer, theirs in zip(optimizers, saved, strict=True):
        own = optimizer.state_dict()["param_groups"]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if [g["params"] for g in theirs["param_groups"]] != [g["params"] for g in own]:
            raise ValueError("its optimizer has other parameters")
        for i, kept in theirs["state"].items():
            for key, tensor in kept.items():
                if tensor.shape != (() if key == "step" else params[i].shape):
                    raise ValueError(f"{key} of parameter {i} is not like the parameter")
        optimizer.load_state_dict(dict(state=theirs["state"], param_groups=own))


def publish(path, name):
    """Writes data/pretrained/NAME.pt: what load_model needs of a checkpoint, weights in float16."""
    content, out = read_checkpoint(path), PRETRAINED / f"{name}.pt"
    if out.exists() or out.parent != PRETRAINED:
        raise UserError(f"{name} is not a new name: {out}")
    weights = {key: tensor.half() for key, tensor in content["model"].items()
               if content["task"] != "simdino" or key.startswith("encoder.")}
    flags = {key: value for key, value in content["run_config"].items()
             if key not in ("data_dir", "out_dir", "init_from")}    # paths of the training machine
    kept = dict(model=weights, run_config=flags, optimizer={}, extra={})
    write_checkpoint(out, content | kept, keep_previous=False)
    print(f"wrote {out}; --ckpt=pretrained:{name} opens it")


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
