"""Checkpoints: writes files whole, and opens those of every task and of the authors.

One schema for all tasks: {format, task, model, model_config, data_meta, run_config, step, best,
optimizer, extra}. `model` holds the weights to evaluate, SimDINO's teacher's; its student's are in
extra["student"]. An image encoder is always `encoder.*`."""
import argparse
import math
import os
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from flags import not_one_of, OpenFlags, ROOT, UserError
from model import CRATE_SIZES, ImageClassifier, ImageEncoder, LanguageModel, MaskedAutoencoder
from processes import note, one_line, Processes

FORMAT = "crate-3"
PRETRAINED = ROOT / "data" / "pretrained"
# The model of each training script. SimDINO's checkpoints keep the teacher's encoder
TASKS = dict(vit=ImageClassifier, mae=MaskedAutoencoder, simdino=ImageEncoder, gpt=LanguageModel)


# ---- Files --------------------------------------------------------------------------------------
def write_checkpoint(path, content, keep_previous=True):
    """Saves to path.tmp, makes sure that it is on the disk, and renames it; the file that was there
    becomes NAME.prev.pt just before: one of the two is whole at every moment. Raises UserError."""
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
    except (OSError, RuntimeError) as error:    # torch.save's own may hide a full disk
        tmp.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else error.__context__ or error
        raise UserError(f"cannot write {path}: {cause}") from None


def reading(path):
    """Around reading a file and what takes its content: whatever is wrong with it is a UserError.
    Models are built outside, so that a mistake in an operator keeps its traceback."""
    return one_line(f"{path} cannot be read as a checkpoint")


def read_file(path):
    """What torch.save wrote: tensors, plain values, and the argparse.Namespace of official files.
    testzip checks each part's CRC, torch.load does not."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip() is not None:
                raise zipfile.BadZipFile
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:                             # such as: there is no file
        raise
    except Exception:                           # any kind, and a page of text
        raise UserError("it is damaged, not of torch, or holds more than tensors and plain "
                        "values, which could run code") from None


def read_checkpoint(path, *tasks, heads=None):
    """The content of a checkpoint, ours or a published one, which is translated; of one of `tasks`
    if any are given. UserError otherwise. pretrained:NAME is a file of this project."""
    ours = {file.stem: file for file in sorted(PRETRAINED.glob("*.pt"))}
    kind, _, name = str(path).partition(":")
    if kind == "pretrained" and name not in ours:
        raise UserError(f"pretrained model {not_one_of(name, ours)}")
    with reading(path):
        content = read_file(ours[name] if kind == "pretrained" else path)
        if "format" not in content:
            content = dict(format=FORMAT) | translated(content, heads)
        if content["format"] != FORMAT:
            raise UserError(f"it is not of format {FORMAT}")
        task = content["task"]
    if tasks and task not in tasks:
        raise UserError(f"{path} is of task {task}, not {' or '.join(tasks)}")
    return content


# ---- Models -------------------------------------------------------------------------------------
class Loaded(NamedTuple):
    """A checkpoint as a model in evaluation mode."""
    task: str                       # vit, mae, simdino, gpt
    model: nn.Module
    encoder: nn.Module | None       # of image models
    meta: dict                      # data_meta: classes, mean ..., or the tokenizer
    content: dict                   # the whole file; published ones have an empty run_config
    name: str = ""                  # of its folder and file, or of a pretrained model
    weights: str = "trained"        # or random

    @property
    def label(self):
        return f"{self.name}, {self.weights} weights"

    @property
    def backbone(self):
        """What has `tokens` and `layers`."""
        return self.model if self.encoder is None else self.encoder

    @property
    def pooling(self):
        """"class", or "mean" where the class token has no loss ([B] Eq. (7.6.9) still takes it)."""
        return "mean" if self.task == "mae" else self.encoder.config.pool


def load_model(path, heads=None, tasks=(), untrained_seed=None):
    """Any checkpoint of `tasks` (none: of all), ours or a published one, as `Loaded`. `heads` is K
    of a published file. With an `untrained_seed` the weights are random. Raises UserError."""
    content = read_checkpoint(path, *tasks, heads=heads)
    with reading(path):
        task, state, meta = content["task"], content["model"], content["data_meta"]
        model_class = TASKS[task]
        config = model_class.config_class(**content["model_config"])
    if task == "simdino":
        state = {name.removeprefix("encoder."): tensor for name, tensor in state.items()
                 if name.startswith("encoder.")}
    if untrained_seed is not None:
        torch.manual_seed(untrained_seed)
        model = model_class(config)
    else:
        with torch.device("meta"):      # without memory: it takes the file's tensors
            model = model_class(config)
        state = {name: tensor.to(torch.get_default_dtype()) for name, tensor in state.items()}
        with reading(path):
            model.load_state_dict(state, assign=True)
    model.eval()
    encoder = None if task == "gpt" else getattr(model, "encoder", model)
    name = "/".join(Path(str(path).removeprefix("pretrained:")).with_suffix("").parts[-2:])
    weights = "trained" if untrained_seed is None else "random"
    return Loaded(task, model, encoder, meta, content, name, weights)


def open_model(c: OpenFlags, device, *tasks):
    """c.ckpt as `Loaded`, on the device; with c.untrained its weights are random."""
    loaded = load_model(c.ckpt, c.heads, tasks, c.seed if c.untrained else None)
    loaded.model.to(device)
    return loaded


def each_model(c: OpenFlags, *tasks):
    """Yields a `Loaded` for each checkpoint of c.ckpt, which commas separate; with c.untrained each
    of them a second time, with random weights of its own."""
    device = Processes(c.device).device
    for i, path in enumerate(c.ckpt.split(",")):
        for untrained in (False, True) if c.untrained else (False,):
            one = replace(c, ckpt=path, seed=c.seed + i, untrained=untrained)
            yield open_model(one, device, *tasks)


# ---- The authors' files -------------------------------------------------------------------------
# CRATE and CRATE-alpha (vit), CRATE-MAE (mae), crate-lm (gpt); tried with made-up files only
NAMES = (          # (theirs, ours): each pattern is replaced in each name, in this order
    (r"^(module\.|_orig_mod\.)+", ""),
    # stored, but never applied by CRATE-MAE; nanoGPT's causal masks
    (r"^(pos_embed|decoder_embed\..*|.*\.attn\.bias)$", ""),
    (r"^cls_token$", "encoder.class_token"),
    (r"^(pos_embedding|decoder_pos_embed)$", "encoder.positions"),
    (r"^(conv1|patch_embed\.proj|to_patch_embedding\.1)\.", "encoder.embed.0."),
    (r"^to_patch_embedding\.2\.", "encoder.embed.1."),
    (r"^to_patch_embedding\.3\.", "encoder.embed.2."),
    (r"^norm\.", "encoder.norm."),              # of CRATE-MAE; below, of crate-lm
    (r"^mlp_head\.", "head."), (r"^decoder_pred\.", "predict."),
    (r"^transformer\.wte\.", "embed."), (r"^transformer\.wpe\.weight$", "positions"),
    (r"^transformer\.ln_f\.", "norm."),
    (r"^decoder_blocks\.(\d+)\.layers\.0\.", r"decoder.\1."),
    (r"^blocks\.(\d+)\.layers\.0\.", r"encoder.layers.\1."),
    (r"^transformer\.layers\.", "encoder.layers."), (r"^transformer\.h\.", "layers."),
    (r"\.0\.norm\.|\.prenorm_1\.", ".norm1."),
    (r"\.1\.norm\.|\.prenorm_2\.", ".norm2."),
    (r"\.[01]\.fn\.qkv\.|\.attn\.c_attn\.", ".attention.U."),
    (r"\.[01]\.fn\.to_out\.0\.|\.attn\.c_proj\.", ".attention.W."),
    (r"^(decoder\.\d+)\.0\.fn\.weight$", r"\1.D"),
    (r"\.1\.fn\.D1$", ".sparsification.D_hat"),
    (r"\.1\.fn\.(D|weight)$|\.ista\.weight$", ".sparsification.D"),
)

HEADS = {size["width"]: size["heads"] for size in CRATE_SIZES.values()}


def translated(content, heads=None):
    """What `load_model` needs of a published file, which is a state dict or holds one. Sizes are
    read off the tensors. `heads` leave no trace in them: those of the published widths are known,
    crate-lm has one for each 64 dimensions, other widths need them. Raises UserError."""
    for key in ("state_dict", "model"):         # one of them, or none, is around it
        content = content.get(key, content)
    state = {}
    for name, tensor in content.items():
        for theirs, ours in NAMES:
            name = re.sub(theirs, ours, name)
        if name:                    # else the table drops it
            state[name] = tensor
    dictionaries = [name for name in state if name.endswith(".D")]
    layers = sum("sparsification" in name for name in dictionaries)
    if not layers:
        raise UserError("it has no dictionary, neither as ours nor as an official checkpoint")

    if "embed.weight" in state:
        task, arch, meta = "gpt", "crate-lm", dict(tokenizer=dict(kind="gpt2"))
        if not state.pop("lm_head.weight", state["embed.weight"]).equal(state["embed.weight"]):
            raise UserError("its lm_head.weight is not its embedding")
        state |= {name: state[name].mT for name in dictionaries}        # theirs are (4 d, d)
        config = dict(vocab_size=len(state["embed.weight"]), context=len(state["positions"]))
    else:
        task, meta = "mae" if "mask_token" in state else "vit", {}
        arch = "crate-alpha" if "encoder.layers.0.sparsification.D_hat" in state else "crate"
        embed = f"encoder.embed.{int('encoder.embed.1.weight' in state)}.weight"
        if state[embed].ndim == 4:      # P x P with stride P is a Linear on patches, channels last
            state[embed] = state[embed].permute(0, 2, 3, 1).flatten(1)
        P = math.isqrt(state[embed].shape[1] // 3)
        side = math.isqrt(state["encoder.positions"].shape[1] - 1)
        config = dict(image_size=P * side, patch_size=P)
        if task == "mae":
            config |= dict(decoder_layers=len(dictionaries) - layers)
        else:
            config |= dict(classes=len(state["head.1.weight"]))

    d, atoms = state[dictionaries[0]].shape
    if heads is None:
        heads = d // 64 if task == "gpt" else HEADS.get(d)
        if heads is None:
            raise UserError(f"no published {arch} has width {d}: say how many --heads it has")
        note(f"read as {arch} of width {d}, {layers} layers and K = {heads} heads, which the file "
             "does not hold; another K (the authors' emergence demo has 6) is --heads=K")
    config |= dict(arch=arch, width=d, heads=heads, layers=layers)
    config |= dict(expansion=atoms // d) if arch != "crate" else {}
    return dict(task=task, model_config=config, model=state, data_meta=meta, run_config={})
