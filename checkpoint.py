"""
Checkpoints: files that show damage, one `load_model` for every task, saving and resuming a run.

    python checkpoint.py out/gpt-pydoc/best.pt mine     writes data/pretrained/mine.pt, weights in
                                                        float16; it opens as --ckpt=pretrained:mine

One schema for all tasks: {format, task, model, model_config, data_meta, run_config, step, best,
optimizer, extra}. `model` is what one evaluates (averaged weights, SimDINO's teacher);
extra["student"] holds the weights being trained where they differ. An image encoder is always
`encoder.*`.
"""
import contextlib
import hashlib
import math
import os
import reprlib
import typing
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from flags import cli, not_one_of, UserError
from parallel import derive_seed
from model import (ConfigError, ImageClassifier, ImageConfig, ImageEncoder, LanguageModel,
                   MAEConfig, MaskedAutoencoder, TextConfig, make_config, sizes_of)

FORMAT = "crate-2"
PRETRAINED = Path(__file__).resolve().parent / "data" / "pretrained"

# task -> (model, its config). SimDINO's checkpoint is read as the teacher's encoder: its projector
# serves training only.
TASKS = dict(vit=(ImageClassifier, ImageConfig), mae=(MaskedAutoencoder, MAEConfig),
             simdino=(ImageEncoder, ImageConfig), gpt=(LanguageModel, TextConfig))


# -------------------------------------------------------------------------------------------------
# Sealed files: a torch file whose zip comment is the SHA-256 of everything before it
# -------------------------------------------------------------------------------------------------

_SEAL = b"sha256:"
_SEAL_BYTES = len(_SEAL) + 64


def _digest(file, length):
    file.seek(0)
    sha = hashlib.sha256()
    while length > 0 and (block := file.read(min(length, 1 << 22))):
        sha.update(block)
        length -= len(block)
    return sha.hexdigest().encode()


def write_sealed(path, content):
    """torch.save(content) so that `path` is at every moment the old file or the new one, whole.

    Written to path.tmp, sealed, fsynced, renamed. The seal is the comment of torch.save's zip file,
    so torch.load reads it as any other. Raises UserError where it cannot be written."""
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "w+b") as file:
            torch.save(content, file)
            length = file.seek(0, os.SEEK_END) - 2      # the last two bytes: the comment's length
            comment = _SEAL + _digest(file, length)
            file.seek(length)
            file.write(_SEAL_BYTES.to_bytes(2, "little") + comment)
            file.flush()
            os.fsync(file.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as error:    # torch.save may hide a full disk in a RuntimeError
        with contextlib.suppress(OSError):
            tmp.unlink()
        reasons = [getattr(e, "strerror", None) for e in (error, error.__context__)]
        reason = next(filter(None, reasons), str(error).splitlines()[0])
        raise UserError(f"cannot write {path}: {reason}") from None
    with contextlib.suppress(OSError):          # so that the rename survives a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write_checkpoint(path, content, keep_previous=True):
    """write_sealed, with the file that was there kept as NAME.prev.pt until the next one."""
    path = Path(path)
    if keep_previous and path.exists():
        spare = path.with_name(path.name + ".link")
        with contextlib.suppress(OSError):      # a file system without hard links has no spare
            spare.unlink(missing_ok=True)
            os.link(path, spare)
            os.replace(spare, path.with_suffix(".prev.pt"))
            spare.unlink(missing_ok=True)       # a rename between names of one file does nothing
    write_sealed(path, dict(format=FORMAT) | content)


def read_sealed(path):
    """(content of a torch file, whether it has a seal), the seal checked, loaded as weights only.

    Raises UserError, one line, for a file that is missing, torn, altered, or would run code."""
    path = find(path)
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            header = _SEAL_BYTES.to_bytes(2, "little") + _SEAL
            length = max(size - len(header) - 64, 0)
            file.seek(length)
            comment = file.read()
            sealed = comment.startswith(header)
            if sealed and _digest(file, length) != comment[len(header):]:
                raise UserError(f"{path} is damaged: its checksum does not match")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")     # torch's, of pickles that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True), sealed
    except IsADirectoryError:
        inside = [Path(path, name) for name in ("best.pt", "ckpt.pt") if Path(path, name).exists()]
        hint = f", did you mean {inside[0]}?" if inside else ""
        raise UserError(f"cannot read {path}: it is a folder{hint}") from None
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:      # what torch.load raises depends on where a file is torn
        reason = "it is torn, or no torch file"
        if "Unsupported global" in str(error):
            reason = "it holds objects other than tensors, which could run code"
        raise UserError(f"cannot read {path}: {reason}") from None


# -------------------------------------------------------------------------------------------------
# Reading
#
# A seal says that a file is whole, not who wrote it. So all that is read has to be of the type and
# in the range that the rest of the code relies on, before anything is built from it.
# -------------------------------------------------------------------------------------------------

def _number(low, high):
    return lambda value: type(value) in (int, float) and low <= value <= high       # NaN is not


def _whole(low, high=1 << 31):
    return lambda value: type(value) is int and low <= value <= high


def _maybe(fits):
    return lambda value: value is None or fits(value)


def _three(fits):
    return lambda value: isinstance(value, (list, tuple)) and len(value) == 3 and all(
        map(fits, value))


def _strided(value):
    """Whether it is a tensor with numbers in memory: not sparse, quantized, nested, or "meta"."""
    return (isinstance(value, torch.Tensor) and not value.is_nested and value.device.type == "cpu"
            and value.layout is torch.strided and value.is_floating_point())


_SCORE, _FRACTION = _number(-1e300, 1e300), _number(-1e6, 1e6)
_SCHEMA = {     # "?": may be missing
    "task": str, "step": _whole(0, 100_000_000), "best": _maybe(_SCORE), "model": dict,
    "extra": {"student?": dict}, "optimizer": dict, "model_config": dict, "data_meta": dict,
    "run_config": lambda flags: isinstance(flags, dict) and all(
        v is None or type(v) in (bool, str) or _SCORE(v) for v in flags.values())}
_FLAGS = {"seed": _whole(0), "mask_rate?": _maybe(_number(0, 0.99)),    # those that are read again
          "train_images?": _maybe(_whole(1))}
_IMAGES = {"name": str, "mean?": _three(_FRACTION), "std?": _three(_number(1e-6, 1e6))}
_TEXT = {"name": str, "n_vocab": _whole(1), "tokenizer": {"kind": str, "characters?": str}}
_RANGES = dict(dropout=_number(0, 0.99), drop_path=_number(0, 0.99), mask_ratio=_number(0, 1),
               mm_eps=_number(1e-6, 1e6), channels=_whole(3, 3))        # of model_config


def _demand(path, value, like, name="", says="is damaged"):
    """Raises UserError for the first part of a value that is not like `like`: a type, a predicate,
    a tensor (finite, of its shape), or a dict (with these keys and maybe others)."""
    if isinstance(like, dict) and isinstance(value, dict):
        for key, part in like.items():
            key, needed = key.rstrip("?"), key[-1] != "?"
            if key in value:
                _demand(path, value[key], part, f"{name}.{key}", says)
            elif needed:
                raise UserError(f"{path} {says}: {(name + '.' + key).lstrip('.')} is missing")
        return
    if isinstance(like, torch.Tensor):
        fits = _strided(value) and value.shape == like.shape and value.isfinite().all()
    elif isinstance(like, type):
        fits = isinstance(value, like)
    else:
        fits = callable(like) and like(value)
    if not fits:
        raise UserError(f"{path} {says}: {name.lstrip('.')}={_shown(value)}")


def _shown(value):
    """A value from a file in a few words, whatever it is."""
    return " ".join(reprlib.repr(value).split())


@contextlib.contextmanager
def reading(path):
    """Around the use of what a file holds: whatever is wrong with it is one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} cannot be read as a checkpoint: {error}") from None


def find(path):
    """The file of `path`: that of data/pretrained/ for pretrained:NAME, else `path` itself."""
    kind, _, name = str(path).partition(":")
    if kind != "pretrained":
        return Path(path)
    names = sorted(file.stem for file in PRETRAINED.glob("*.pt"))
    if name not in names:
        raise UserError(f"pretrained model {not_one_of(name, names)}")
    return PRETRAINED / f"{name}.pt"


def read_checkpoint(path, task=None):
    """The content of a checkpoint of this project, whole and of the given task, or UserError."""
    content, sealed = read_sealed(path)
    if not is_ours(content):
        raise UserError(f"{path} is no checkpoint of this project")
    _check_schema(path, content, sealed, task)
    return content


def is_ours(content):
    return isinstance(content, dict) and "format" in content


def _check_schema(path, content, sealed, task):
    """All that can be checked without a model; returns the model's config."""
    if content["format"] != FORMAT:
        found = _shown(content["format"])
        raise UserError(f"{path} has format {found}; this version reads {FORMAT}")
    if not sealed:
        raise UserError(f"{path} is damaged: its checksum is missing")
    _demand(path, content, _SCHEMA)
    found, state = content["task"], content["model"]
    if found not in TASKS:
        raise UserError(f"{path} has task {_shown(found)}, which this version does not know")
    if task is not None and found != task:
        raise UserError(f"{path} is a checkpoint of task {found}, not {task}")
    _demand(path, content, dict(run_config=_FLAGS, data_meta=_TEXT if found == "gpt" else _IMAGES))
    config = read_config(path, found, content["model_config"])
    if found == "gpt":              # [MASK] is one id more than the tokenizer has
        known = _whole(1, config.vocab_size - (not config.causal))
        _demand(path, content, dict(data_meta=dict(n_vocab=known)))
    if found == "simdino" and "student" in content["extra"]:
        center = torch.empty(state["prototypes"].shape[:1] if "prototypes" in state else 1)
        _demand(path, content, dict(extra=dict(center=center)))
    for name, t in [*state.items(), *content["extra"].get("student", {}).items()]:
        if not (type(name) is str and _strided(t) and t.is_contiguous() and t.isfinite().all()):
            raise UserError(f"{path} is damaged: {_shown(name)} is no tensor of finite weights")
    return config


def read_config(path, task, fields):
    """The model's config from a checkpoint; UserError for a value of another type or range."""
    config_class = TASKS[task][1]
    for name, hint in typing.get_type_hints(config_class).items():
        kinds = typing.get_args(hint) or (hint,)
        fits = _FRACTION if float in kinds else (       # every whole number is a size
            lambda value: type(value) in kinds and (type(value) is not int or _whole(1)(value)))
        if name in fields:
            _demand(path, fields[name], _RANGES.get(name, fits), f"model_config.{name}")
    try:
        return make_config(config_class, fields)
    except ConfigError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from None


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
    content, sealed = read_sealed(path)
    if is_ours(content):
        config = _check_schema(path, content, sealed, None)
        task, meta, state = content["task"], content["data_meta"], content["model"]
        if task == "simdino":
            inside = [name for name in state if name.startswith("encoder.")]
            state = {name.removeprefix("encoder."): state[name] for name in inside}
    else:
        try:
            published = from_official(content, None, heads)
        except ConfigError as error:
            raise UserError(f"{path}: {error}") from None
        task = "mae" if isinstance(published, MaskedAutoencoder) else "vit"
        config, state, meta, content = published.config, published.state_dict(), {}, {}
    if tasks is not None and task not in tasks:
        raise UserError(f"{path} is a checkpoint of task {task}, not {' or '.join(tasks)}")
    if untrained_seed is not None:
        torch.manual_seed(untrained_seed)
    model = TASKS[task][0](config)
    if untrained_seed is None:
        load_into(model, state, path)
    model.eval()
    encoder = None if task == "gpt" else getattr(model, "encoder", model)
    return Loaded(task, model, encoder, meta, content)


def publish(path, name):
    """Writes data/pretrained/NAME.pt: what load_model needs of a checkpoint, weights in float16."""
    content = read_checkpoint(path)
    weights = {key: tensor.half() for key, tensor in content["model"].items()
               if content["task"] != "simdino" or key.startswith("encoder.")}
    flags = {key: value for key, value in content["run_config"].items()
             if key not in ("data_dir", "out_dir")}         # folders of the machine that trained it
    kept = dict(model=weights, run_config=flags, optimizer={}, extra={})
    write_checkpoint(PRETRAINED / f"{name}.pt", content | kept)


def initial_model(content):
    """The classifier as train_vit.py built it from its seed, before the first step.

    Raises UserError for a run that started from a checkpoint."""
    if content["run_config"].get("init_from") is not None:
        raise UserError("it started from a checkpoint (--init_from), not from its seed")
    torch.manual_seed(derive_seed(content["run_config"]["seed"], "weights"))
    return ImageClassifier(make_config(ImageConfig, content["model_config"]))


def load_into(module, state, path):
    """module.load_state_dict(state); a UserError names the first tensor that does not fit."""
    own = module.state_dict()
    for name in [*own, *state]:
        problem = None
        if name not in state:
            problem = "is missing in it"
        elif name not in own:
            problem = "has no place here"
        elif state[name].shape != own[name].shape:
            problem = f"is {tuple(state[name].shape)} there, {tuple(own[name].shape)} here"
        if problem:
            raise UserError(f"{path} does not fit this model: {name} {problem}")
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


# -------------------------------------------------------------------------------------------------
# Saving and resuming a run
# -------------------------------------------------------------------------------------------------

# what an optimizer keeps of a parameter: tensors of its shape, and AdamW the number of its steps
_KEPT = dict(AdamW=("step", "exp_avg", "exp_avg_sq"), Lion=("m",), Muon=("momentum_buffer",))


def load_optimizer(optimizer, saved, path):
    """Fills the state of each parameter. Rates, betas and decays stay those of the flags.

    A fused kernel writes as many numbers as the parameter has, past the end of a smaller state: so
    each shape is checked, and the numbers are copied. Raises UserError."""
    def fitted(part, saved):
        """The saved state of one optimizer as its own parameters need it."""
        def demand(value, like, name=""):
            _demand(path, value, like, "optimizer" + name, "does not fit this optimizer")
        own, state = part.state_dict()["param_groups"], {}
        params = [p for group in part.param_groups for p in group["params"]]

        def same_sizes(groups):
            return isinstance(groups, list) and len(groups) == len(own) and all(
                isinstance(theirs, dict) and isinstance(theirs.get("params"), list)
                and len(theirs["params"]) == len(ours["params"])
                for theirs, ours in zip(groups, own))
        demand(saved, dict(state=dict, param_groups=same_sizes))
        for i, kept in saved["state"].items():
            demand(i, lambda i: type(i) is int and 0 <= i < len(params), ".state")
            like = dict.fromkeys(_KEPT[type(part).__name__], params[i])
            if "step" in like:
                like["step"] = lambda t: _strided(t) and t.ndim == 0 and t >= 1
            demand(kept, like, f".state.{i}")
            state[i] = {key: torch.empty(kept[key].shape).copy_(kept[key]) for key in like}
        return dict(state=state, param_groups=own)
    parts = getattr(optimizer, "parts", None)
    optimizer.load_state_dict(
        {name: fitted(part, saved.get(name)) for name, part in parts.items()} if parts else
        fitted(optimizer, saved))


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
_CRATE_MAE = {
    "encoder.class_token": "cls_token",
    "mask_token": "mask_token",
    "encoder.positions": "decoder_pos_embed",
    "encoder.embed.0.{k}": "patch_embed.proj.{k}",
    "encoder.norm.{k}": "norm.{k}",
    "encoder.layers.{l}.norm1.{k}": "blocks.{l}.layers.0.0.norm.{k}",
    "encoder.layers.{l}.attention.U.weight": "blocks.{l}.layers.0.0.fn.qkv.weight",
    "encoder.layers.{l}.attention.W.{k}": "blocks.{l}.layers.0.0.fn.to_out.0.{k}",
    "encoder.layers.{l}.norm2.{k}": "blocks.{l}.layers.0.1.norm.{k}",
    "encoder.layers.{l}.sparsification.D": "blocks.{l}.layers.0.1.fn.weight",
    "decoder.{l}.norm1.{k}": "decoder_blocks.{l}.layers.0.0.norm.{k}",
    "decoder.{l}.D": "decoder_blocks.{l}.layers.0.0.fn.weight",
    "decoder.{l}.norm2.{k}": "decoder_blocks.{l}.layers.0.1.norm.{k}",
    "decoder.{l}.attention.U.weight": "decoder_blocks.{l}.layers.0.1.fn.qkv.weight",
    "decoder.{l}.attention.W.{k}": "decoder_blocks.{l}.layers.0.1.fn.to_out.0.{k}",
    "decoder_norm.{k}": "decoder_norm.{k}",
    "predict.{k}": "decoder_pred.{k}",
}
# stored and counted in the released CRATE-MAE, but never applied
_CRATE_MAE_UNUSED = ("pos_embed", "decoder_embed.weight", "decoder_embed.bias")


def from_official(content, task=None, heads=None):
    """A published CRATE, CRATE-alpha ("vit") or CRATE-MAE ("mae") as a model in evaluation mode.

    Takes the file's content or the state dict in it, with or without "module." before each name.
    Width, patch, image size, depth and classes are read off the tensors, heads off the published
    sizes (or `heads`). Raises ConfigError naming the first tensor that does not fit."""
    tensors = _official_tensors(content)
    if task is None:
        task = "mae" if any(name.startswith("decoder_blocks.") for name in tensors) else "vit"
    arch, table, blocks, positions = "crate", _CRATE, "transformer.layers.", "pos_embedding"
    embed = "to_patch_embedding.2.weight"
    if task == "mae":
        table, blocks, positions = _CRATE_MAE, "blocks.", "decoder_pos_embed"
        embed = "patch_embed.proj.weight"
        tensors = {name: t for name, t in tensors.items() if name not in _CRATE_MAE_UNUSED}
    elif "conv1.weight" in tensors:
        arch, table, embed = "crate-alpha", _CRATE_ALPHA, "conv1.weight"

    # the patch embedding gives d and P, the positions the number of patches
    convolution = table is not _CRATE
    weight = _tensor(tensors, embed, 4 if convolution else 2)
    places = _tensor(tensors, positions, 3)
    d, n = weight.shape[0], max(places.shape[1] - 1, 0)
    P, side = math.isqrt(weight.shape[1:].numel() // 3), math.isqrt(n)
    square = (3, P, P) if convolution else (3 * P * P,)
    if P == 0 or d == 0 or tuple(weight.shape[1:]) != square:
        raise ConfigError(f"{embed} has shape {tuple(weight.shape)}, which is no square patch of "
                          "three channels")
    if n == 0 or side * side != n:
        raise ConfigError(f"{positions} has shape {tuple(places.shape)}, which is no square grid "
                          "and a class token")
    if convolution:     # P x P with stride P is a Linear on patches; ours have the channels last
        tensors[embed] = weight.permute(0, 2, 3, 1).flatten(1)

    fields = dict(arch=arch, width=d, heads=heads or _published_heads(arch, task, d),
                  layers=_depth(tensors, blocks), image_size=P * side, patch_size=P)
    if task == "mae":
        depth = _depth(tensors, "decoder_blocks.")
        fields |= dict(decoder_layers=depth, lambd=0.5)
        model = MaskedAutoencoder(make_config(MAEConfig, fields))
    else:
        classes = _tensor(tensors, "mlp_head.1.weight", 2).shape[0]
        model = ImageClassifier(make_config(ImageConfig, fields | dict(classes=classes)))
    return _fill(model, tensors, table)


def _official_tensors(content):
    """The flat name -> tensor dict inside a published checkpoint, without "module."."""
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    tensors = content if isinstance(content, dict) else {}
    if not tensors or not all(map(_strided, tensors.values())):
        raise ConfigError("not an official checkpoint: no dictionary of tensors in it")
    return {str(name).removeprefix("module."): tensor for name, tensor in tensors.items()}


def _tensor(tensors, name, ndim):
    if name not in tensors:
        raise ConfigError(f"not an official checkpoint of this kind: {name} is missing")
    if tensors[name].ndim != ndim:
        raise ConfigError(f"{name} has shape {tuple(tensors[name].shape)}, not {ndim} dimensions")
    return tensors[name]


def _depth(tensors, prefix):
    """How many different numbers follow the prefix."""
    numbers = {name[len(prefix):].split(".")[0] for name in tensors if name.startswith(prefix)}
    numbers = [word for word in numbers if word.isdecimal()]
    if not numbers:
        raise ConfigError("not an official checkpoint of this kind: no tensor's name begins with "
                          + prefix)
    return len(numbers)


def _published_heads(arch, task, d):
    sizes = sizes_of("mae" if task == "mae" else "image", arch)
    heads = {size["width"]: size["heads"] for size in sizes.values()}
    if d not in heads:
        name = "CRATE-MAE" if task == "mae" else arch
        raise ConfigError(f"no published {name} has width {d}: say how many heads this one has "
                          "(heads=)")
    return heads[d]


def _fill(model, tensors, table):
    """Copies published tensors into `model` by the table our name -> their name, each checked."""
    numbers = range(max(len(model.encoder.layers), len(getattr(model, "decoder", ()))))
    names = {ours.format(l=l, k=k): theirs.format(l=l, k=k)
             for ours, theirs in table.items() for l in numbers for k in ("weight", "bias")}
    left = dict(tensors)
    for name, target in model.state_dict().items():
        theirs = names.get(name, name)
        if theirs not in left:
            raise ConfigError(f"{theirs} is missing from the official checkpoint")
        found = left.pop(theirs)
        if found.shape != target.shape:
            raise ConfigError(f"{theirs} has shape {tuple(found.shape)}, "
                              f"expected {tuple(target.shape)}")
        target.copy_(found)
    if left:
        raise ConfigError(f"{next(iter(left))} is in the official checkpoint, but has no place in "
                          "this model")
    return model.eval()


def _official(task):
    return staticmethod(lambda content, heads=None: from_official(content, task, heads))


# attached here, since model.py knows nothing of published files
ImageClassifier.from_official = _official("vit")
MaskedAutoencoder.from_official = _official("mae")


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
