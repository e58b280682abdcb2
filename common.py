"""
The plumbing of the four training scripts: flags, processes, schedules, optimizers, checkpoints, metrics.

Nothing here knows a model or a loss. What a reader of a script should see (forward, loss, optimizer step) is in the script.
"""
import contextlib
import ctypes
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time
import types
import typing
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from tqdm import tqdm

from data import augment
from data.images import DataError
from model import (ConfigError, ImageClassifier, ImageConfig, ImageEncoder, LanguageModel, MAEConfig, MaskedAutoencoder, TextConfig,
                   make_config, nearest, official_tensors)

try:
    import fcntl
except ImportError:                 # Windows has no flock: there two runs in one out_dir are not noticed
    fcntl = None

ROOT = Path(__file__).resolve().parent


class UserError(Exception):
    """Something the user can mend, in one line: exit status 2."""


class Diverged(Exception):
    """A loss that is not finite: exit status 3."""


class Stopped(Exception):
    """A saved SIGINT or SIGTERM: exit status 128 + the signal's number, as shells have it."""

    def __init__(self, number):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number


def cli(main):
    """Runs main(argv) and exits: 0 done, 2 the user's error, 3 a loss that is not finite, 130 / 143 after a saved signal.

    Errors are one line on stderr, from rank 0 only."""
    status = 0
    sys.stdout.reconfigure(errors="backslashreplace")    # a terminal of another alphabet, a file name that is no text
    try:
        main(sys.argv[1:])
    except (UserError, ConfigError, DataError, Diverged, Stopped) as error:
        status = 3 if isinstance(error, Diverged) else 128 + error.number if isinstance(error, Stopped) else 2
        _complain(error)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:         # `... | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:        # a full disk, a name too long: the machine's no, not the program's mistake
        status = 2
        _complain(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in str(error):
            raise
        status = 2
        _complain("this does not fit in memory: try a smaller batch or model")
    if dist.is_initialized():
        if status == 0:
            dist.barrier()          # gloo aborts in a process whose peers have left before it
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(status)            # and now and then in its destructors, which this skips
    sys.exit(status)


def _complain(message):
    """One line on stderr, whatever the flag that it quotes holds."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"{Path(sys.argv[0]).name}:", " ".join(str(message).split()), file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Flags: one dataclass, one field a flag
# ---------------------------------------------------------------------------------------------------------------------

def option(default, help, choices=None, low=None, high=None, above=None, displaces=()):
    """A field of a config with what --help says of it and the range it must lie in: low <= value <= high, value > above.

    Given on the command line, it displaces the preset's values of the fields named in `displaces`."""
    return field(default=default, metadata=dict(help=help, choices=choices, low=low, high=high, above=above, displaces=displaces))


@dataclass(kw_only=True)
class RunConfig:
    """The flags that every training script has."""
    out_dir: str | None = option(None, "where the run writes; default out/TASK-PRESET")
    resume: bool = option(False, "continue the run in out_dir from its checkpoint")
    overwrite: bool = option(False, "delete the run in out_dir first")
    seed: int = option(0, "the same seed gives the same run", low=0)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast; auto is bfloat16 on cuda, float32 elsewhere", choices=("auto", "float32", "bfloat16"))
    compile: bool | None = option(None, "torch.compile the model; auto is cuda only")
    data_dir: str = option(str(ROOT / "data" / "cache"), "where prepared data lies")
    workers: int = option(8, "processes that read pictures too many for memory", low=0)
    log_every: int = option(20, "steps between lines of metrics.jsonl", low=1)
    eval_every: int = option(0, "steps between evaluations; 0: an epoch, 1000 steps of text", low=0)
    save_every: int = option(0, "steps between checkpoints; 0: at each evaluation", low=0)


def _convert(text, hint, name):
    """The text of a flag as its field's type."""
    options = [t for t in typing.get_args(hint)] if isinstance(hint, types.UnionType) else [hint]
    if type(None) in options:
        options.remove(type(None))
        if text.lower() in ("none", "auto"):
            return None
    kind = options[0]
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
        if text.lower() in words:
            return words[text.lower()]
        raise UserError(f"--{name}={text}: expected true or false")
    try:
        value = kind(text)
    except ValueError:
        raise UserError(f"--{name}={text}: expected {'a whole number' if kind is int else 'a number'}") from None
    if kind is float and not math.isfinite(value):
        raise UserError(f"--{name}={text}: expected a finite number")
    if kind is int and abs(value) >= 1 << 31:
        raise UserError(f"--{name}={text}: expected a whole number below 2^31")
    return value


def _check_range(value, spec, name):
    m = spec.metadata
    if value is None or not m:
        return
    if m["choices"] and value not in m["choices"]:
        raise UserError(f"--{name}={value} is not one of {', '.join(map(str, m['choices']))}{nearest(value, map(str, m['choices']))}")
    if m["low"] is not None and value < m["low"]:
        raise UserError(f"--{name}={value} must be {m['low']} or more")
    if m["high"] is not None and value > m["high"]:
        raise UserError(f"--{name}={value} must be {m['high']} or less")
    if m["above"] is not None and value <= m["above"]:
        raise UserError(f"--{name}={value} must be more than {m['above']}")


def parse(config_class, presets, argv, doc, default=None):
    """[PRESET] [--name=value ...] as (config, preset name). Both --k=v and --k v work; a bare boolean is true.

    Raises UserError for anything that is not a preset, a flag, or a value of the flag's type and range."""
    fields = {f.name: f for f in dataclasses.fields(config_class)}
    hints = typing.get_type_hints(config_class)
    argv = list(argv)
    if "--help" in argv or "-h" in argv:
        named = argv[0] if argv[0] in presets else default
        print(_help(fields, hints, presets, doc, default, presets.get(named, {})))
        sys.exit(0)
    preset = argv.pop(0) if argv and not argv[0].startswith("-") else default
    if preset not in presets and not any(presets.values()):
        raise UserError(f"{preset!r} is no flag (--name=value)")
    if preset not in presets:
        known = f"one of {', '.join(presets)}"
        raise UserError(f"say which preset: {known}" if preset is None else f"preset {preset!r} is not {known}{nearest(preset, presets)}")
    given = {}
    while argv:
        word = argv.pop(0)
        if not word.startswith("--"):
            raise UserError(f"{word!r} is neither the preset (which comes first) nor a flag (--name=value)")
        name, equals, text = word[2:].partition("=")
        if name not in fields:
            raise UserError(f"no flag --{name}{nearest(name, fields)} (--help lists all)")
        if not equals:
            if bool in (hints[name], *typing.get_args(hints[name])) and (not argv or argv[0].startswith("--")):
                text = "true"
            elif argv:
                text = argv.pop(0)
            else:
                raise UserError(f"--{name} needs a value")
        given[name] = _convert(text, hints[name], name)
    displaced = {other for name in given for other in fields[name].metadata["displaces"]}
    values = {k: v for k, v in presets[preset].items() if k not in displaced} | given
    for name, value in values.items():
        _check_range(value, fields[name], name)
    return config_class(**values), preset


def _help(fields, hints, presets, doc, default, chosen):
    lines = [doc.strip(), "", "presets:"] if any(presets.values()) else [doc.strip()]
    for name, values in presets.items() if any(presets.values()) else ():
        lines.append(f"  {name}{' (default)' if name == default else ''}: " + ", ".join(f"{k}={v}" for k, v in values.items()))
    lines += ["", "flags, as the preset has them:" if chosen else "flags:"]
    for name, f in fields.items():
        kind = getattr(hints[name], "__name__", None) or str(hints[name])
        kind = " | ".join(map(str, f.metadata["choices"])) if f.metadata.get("choices") else kind.replace("None", "auto")
        value = chosen.get(name, f.default)
        shown = "auto" if value is None else str(value).replace(str(ROOT) + os.sep, "")
        lines.append(f"  --{name}={shown}  ({kind})  {f.metadata.get('help', '')}")
    return "\n".join(lines)


def parse_command(commands, argv, doc):
    """SUBCOMMAND [--name=value ...] as (subcommand, its config); `commands` maps names to config dataclasses."""
    if not argv or argv[0] in ("--help", "-h"):
        print(doc.strip() + "\n\nsubcommands: " + ", ".join(commands) + " (SUBCOMMAND --help lists its flags)")
        sys.exit(0 if argv else 2)
    if argv[0] not in commands:
        raise UserError(f"subcommand {argv[0]!r} is not one of {', '.join(commands)}{nearest(argv[0], commands)}")
    config_class = commands[argv[0]]
    return argv[0], parse(config_class, {argv[0]: {}}, argv, config_class.__doc__)[0]


def sub_config(cls, config, **fields):
    """The `fields` plus every field of `cls` that `config` also has and sets: how flags reach a model's config."""
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(cls) if hasattr(config, f.name)}
    return {k: v for k, v in shared.items() if v is not None} | fields


# ---------------------------------------------------------------------------------------------------------------------
# Processes, devices, randomness
# ---------------------------------------------------------------------------------------------------------------------

class Processes:
    """This process among those of torchrun (rank, world, device), and the few collectives that the scripts need."""

    def __init__(self, device="auto"):
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        if device == "auto":
            device = next(name for name, there in available.items() if there)
        elif not available[device]:
            raise UserError(f"--device={device}: this machine has none")
        if device == "cuda" and local >= torch.cuda.device_count():
            raise UserError(f"--nproc_per_node is more than the {torch.cuda.device_count()} GPUs of this machine")
        self.device = torch.device(device, local) if device == "cuda" else torch.device(device)
        if device == "cpu":
            keep_freed_memory()
        if device == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.control = None
        self.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if self.world > 1:
            if not dist.is_initialized():
                store, rank, world = next(dist.rendezvous("env://"))
                dist.init_process_group("nccl" if device == "cuda" else "gloo", store=own_store(store, rank, world), rank=rank, world_size=world)
            # stop flags travel on the CPU, so that asking for them every step does not stall the GPU
            self.control = dist.new_group(backend="gloo") if device == "cuda" else dist.group.WORLD
            self.restarts = self.largest(self.restarts)                  # each agent of torchrun counts its own

    def rows(self, n):
        """This process's slice of n rows. Raises UserError if the processes cannot share them equally."""
        if n % self.world:
            raise UserError(f"{n} samples do not divide among {self.world} processes")
        return slice(self.rank * n // self.world, (self.rank + 1) * n // self.world)

    def sum(self, tensor):
        """The tensor summed over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, number):
        """The largest of every process's whole number."""
        if self.world == 1:
            return number
        flag = torch.tensor([number])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        return int(flag)

    def share(self, value):
        """Rank 0's value on every process."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self.control)
        return box[0]

    def main_only(self, function):
        """function() on rank 0, its result (or its UserError) on every process."""
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except UserError as e:
                error = str(e)
        result, error = self.share((result, error))
        if error is not None:
            raise UserError(error)
        return result

    def wrap(self, model, **options):
        """The model under DistributedDataParallel if there are several processes, itself otherwise."""
        if self.world == 1:
            return model
        ids = [self.device.index] if self.device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **options)

    def autocast(self, dtype):
        """The autocast context of --dtype."""
        on = dtype == "bfloat16" or (dtype == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, torch.bfloat16) if on else contextlib.nullcontext()


def own_store(store, rank, world):
    """The part of torchrun's store that belongs to this start of the processes.

    The store outlives a restart, and what the processes before left in it are addresses of the dead. So each process
    writes a random word, and all go on when all have read the same words, which then name the part."""
    store.set(f"word/{rank}", os.urandom(8).hex())
    while True:
        words = b"".join(store.multi_get([f"word/{i}" for i in range(world)]))
        store.set(f"read/{rank}", words)
        if all(read == words for read in store.multi_get([f"read/{i}" for i in range(world)])):
            return dist.PrefixStore(hashlib.sha256(words).hexdigest(), store)
        time.sleep(0.05)


def keep_freed_memory():
    """Tells glibc to keep what is freed. By default each large tensor's memory goes back to the kernel and comes again page by
    page, zeroed: that costs a CPU training step 5 to 10 %, and several times its duration on some virtual machines."""
    with contextlib.suppress(OSError, AttributeError):                   # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25)                     # M_MMAP_THRESHOLD; some versions allow 32 MB only
        mallopt(-1, (1 << 31) - 1)                                       # M_TRIM_THRESHOLD


def derive_seed(*purpose):
    """A 63-bit seed that is a function of (seed, step, purpose, ...) alone: no generator's state has to be saved."""
    return int.from_bytes(hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest(), "big") >> 1


def accumulating(model, last):
    """no_sync of DDP on all but the last of a step's micro-batches."""
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


# Dense bf16 FLOP/s of the data sheets, without sparsity
_PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10": 125e12, "4090": 165e12, "3090": 71e12, "V100": 125e12}


def peak_flops(device):
    """The bf16 FLOP/s of a GPU known by name, for MFU; None otherwise."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in _PEAK.items() if key in name), None)


# ---------------------------------------------------------------------------------------------------------------------
# Schedules and optimizers
# ---------------------------------------------------------------------------------------------------------------------

def warmup_cosine(base, total, warmup=0, final=0.0):
    """A list of `total` values: linear up to `base` over `warmup` steps (half of a run at most), then half a cosine to `final`."""
    if total > 100_000_000:
        raise UserError(f"{total:.3g} steps are more than a run can have (100 million): fewer epochs or steps")
    warmup = min(warmup, total // 2)
    down = max(total - warmup, 1)
    return [base * (i + 1) / warmup if i < warmup else final + (base - final) * 0.5 * (1 + math.cos(math.pi * (i - warmup) / down))
            for i in range(total)]


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023), the optimizer of [N] B.1.2, for all tensors at once.

        u = sign(b1 m + (1 - b1) g);   w = (1 - lr wd) w - lr u;   m = b2 m + (1 - b2) g"""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads = [p.grad for p in params]
            for p in params:
                if "m" not in self.state[p]:
                    self.state[p]["m"] = torch.zeros_like(p)
            m = [self.state[p]["m"] for p in params]
            (b1, b2), lr = group["betas"], group["lr"]
            update = torch._foreach_lerp(m, grads, 1 - b1)
            torch._foreach_sign_(update)
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, update, alpha=-lr)
            torch._foreach_lerp_(m, grads, 1 - b2)
        return loss


_NEVER_DECAYED = ("class_token", "mask_token", "positions")


def make_optimizer(model, name, lr, weight_decay, betas):
    """lion or adamw over the trainable parameters; vectors, positions and special tokens are not decayed (the field's habit)."""
    decayed, rest = [], []
    for key, p in model.named_parameters():
        if p.requires_grad:
            (decayed if p.ndim >= 2 and key.rsplit(".", 1)[-1] not in _NEVER_DECAYED else rest).append(p)
    groups = [dict(params=decayed, weight_decay=weight_decay), dict(params=rest, weight_decay=0.0)]
    groups = [g for g in groups if g["params"]]
    if name == "lion":
        return Lion(groups, lr=lr, betas=betas)
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def set_lr(optimizer, lr):
    """The learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def ema_update(average, model, momentum):
    """average = momentum average + (1 - momentum) model, parameter by parameter; buffers are copied."""
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - momentum)
    for a, b in zip(average.buffers(), model.buffers()):
        a.copy_(b)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: a torch file whose zip comment is the SHA-256 of everything before it
# ---------------------------------------------------------------------------------------------------------------------

FORMAT = "crate-1"
_SEAL = b"sha256:"
_FIELDS = dict(task=str, model=dict, model_config=dict, data_meta=dict, run_config=dict, step=int, optimizer=dict, extra=dict)


def _digest(f, length):
    f.seek(0)
    sha = hashlib.sha256()
    while length > 0:
        block = f.read(min(length, 1 << 22))
        if not block:
            break
        sha.update(block)
        length -= len(block)
    return sha.hexdigest().encode()


def write_sealed(path, content):
    """torch.save(content) so that `path` is at every moment the old file or the new one, whole.

    Written to path.tmp, sealed, fsynced, renamed. The seal is the comment of the zip file that torch.save writes, so
    torch.load reads the file as any other."""
    path = Path(path)
    tmp = path.with_name(path.name + ".tmp")
    try:
        with open(tmp, "w+b") as f:
            torch.save(content, f)
            length = f.seek(0, os.SEEK_END) - 2                          # the last two bytes are the comment's length, 0
            comment = _SEAL + _digest(f, length)
            f.seek(length)
            f.write(len(comment).to_bytes(2, "little") + comment)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as error:                             # torch.save reports a full disk as a RuntimeError
        with contextlib.suppress(OSError):
            tmp.unlink()
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', None) or str(error).splitlines()[0]}") from None
    with contextlib.suppress(OSError):                                   # the rename itself survives a power cut
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def save_checkpoint(path, content, keep_previous=True):
    """write_sealed, with the file that was there kept as NAME.prev.pt until the next save."""
    path = Path(path)
    if keep_previous and path.exists():
        spare = path.with_name(path.name + ".link")
        with contextlib.suppress(OSError):                               # without hard links the old file is kept until the rename
            spare.unlink(missing_ok=True)
            os.link(path, spare)
            os.replace(spare, path.with_suffix(".prev.pt"))
    write_sealed(path, dict(format=FORMAT) | content)


def read_torch(path):
    """The content of a torch file, loaded with weights_only=True and its seal checked if it has one, and whether it had.

    Raises UserError, one line, for a file that is missing, torn, altered, or would run code."""
    path = Path(path)
    try:
        with open(path, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            seal = (len(_SEAL) + 64).to_bytes(2, "little") + _SEAL       # as written: the comment's length, then the comment
            length = max(size - len(seal) - 64, 0)
            f.seek(length)
            comment = f.read()
            sealed = comment.startswith(seal)
            if sealed and _digest(f, length) != comment[len(seal):]:
                raise UserError(f"{path} is damaged: its checksum does not match")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")                              # torch's, of pickles that it then refuses
            return torch.load(path, map_location="cpu", weights_only=True), sealed
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UserError:
        raise
    except Exception as error:      # what torch.load raises for a foreign or torn file depends on where it is torn
        reason = "it holds objects other than tensors, which could run code" if "Unsupported global" in str(error) else "it is torn, or no torch file"
        raise UserError(f"cannot read {path}: {reason}") from None


def load_checkpoint(path, task=None):
    """A checkpoint of this project, whole and of the given task, or UserError."""
    content, sealed = read_torch(path)
    if not isinstance(content, dict) or "format" not in content:
        raise UserError(f"{path} is no checkpoint of this project")
    return check_checkpoint(path, content, sealed, task)


def check_checkpoint(path, content, sealed, task=None):
    """The content if it is a checkpoint of this format, sealed and of the given task; UserError otherwise."""
    if content["format"] != FORMAT:
        raise UserError(f"{path} has format {content['format']!r}; this version reads {FORMAT}")
    if not sealed:
        raise UserError(f"{path} is damaged: its checksum is missing")
    for name, kind in _FIELDS.items():
        if not isinstance(content.get(name), kind):
            raise UserError(f"{path} is damaged: no {name} in it")
    if task is not None and content["task"] != task:
        raise UserError(f"{path} is a checkpoint of task {content['task']}, not {task}")
    return content


def load_into(module, state, path, what="model"):
    """module.load_state_dict(state), with a UserError that names the first tensor that does not fit."""
    own = module.state_dict()
    for name in [*own, *state]:
        if name not in state:
            raise UserError(f"{path} does not fit this {what}: {name} is missing in it")
        if name not in own:
            raise UserError(f"{path} does not fit this {what}: {name} has no place here")
        if state[name].shape != own[name].shape:
            raise UserError(f"{path} does not fit this {what}: {name} is {tuple(state[name].shape)} there, {tuple(own[name].shape)} here")
    module.load_state_dict(state)


def load_encoder(path, heads=None):
    """(config, encoder state dict, data_meta) of any image checkpoint: ours (`encoder.*`), or a published classifier or CRATE-MAE.

    The config is a MAEConfig where a masked autoencoder was trained, otherwise an ImageConfig. data_meta of a published one is {}."""
    content, sealed = read_torch(path)
    if isinstance(content, dict) and "format" in content:
        content = check_checkpoint(path, content, sealed)
        state = {k.removeprefix("encoder."): v for k, v in content["model"].items() if k.startswith("encoder.")}
        if not state:
            raise UserError(f"{path} has no image encoder: it is a checkpoint of task {content['task']}")
        cls = MAEConfig if content["task"] == "mae" else ImageConfig
        return make_config(cls, {k: v for k, v in content["model_config"].items() if k in cls.__dataclass_fields__}), state, content["data_meta"]
    try:
        masked = any(name.startswith("decoder_blocks.") for name in official_tensors(content))
        model = (MaskedAutoencoder if masked else ImageClassifier).from_official(content, heads=heads)
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from None
    return model.config, model.encoder.state_dict(), {}


def load_resized(encoder, config, state, path):
    """Fills `encoder` from the state of one with `config`, learned positions interpolated to the encoder's own image size."""
    side = encoder.config.image_size // encoder.config.patch_size
    if encoder.config.image_size != config.image_size:
        with torch.no_grad():
            theirs = ImageEncoder(config)
            load_into(theirs, state, path, "encoder")
            state = state | dict(positions=theirs.position_table(side, side) if config.positions == "learned" else encoder.positions)
    load_into(encoder, state, path, "encoder")


# What the published image models were trained on, RGB in [0, 1]
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def load_classifier(path, heads=None):
    """(model in evaluation mode, data_meta) of a classifier's checkpoint, ours or a published one (data_meta is then empty)."""
    content, sealed = read_torch(path)
    if isinstance(content, dict) and "format" in content:
        content = check_checkpoint(path, content, sealed, "vit")
        model = ImageClassifier(make_config(ImageConfig, content["model_config"]))
        load_into(model, content["model"], path)
        return model.eval(), content["data_meta"]
    try:
        return ImageClassifier.from_official(content, heads=heads), {}
    except ConfigError as error:
        raise UserError(f"{path}: {error}") from None


def load_language_model(path):
    """(model in evaluation mode, the checkpoint's content) of a language model."""
    content = load_checkpoint(path, "gpt")
    model = LanguageModel(make_config(TextConfig, content["model_config"]))
    load_into(model, content["model"], path)
    return model.eval(), content


# ---------------------------------------------------------------------------------------------------------------------
# A run: its directory, checkpoints, metrics and signals
# ---------------------------------------------------------------------------------------------------------------------

class Run:
    """One training run in one directory. Only rank 0 writes; every method is called by all processes.

    out_dir/config.json, metrics.jsonl (one object a line), ckpt.pt (latest), ckpt.prev.pt (the one before), best.pt."""

    def __init__(self, config, task, preset, processes):
        self.config, self.task, self.preset, self.processes = config, task, preset, processes
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{preset}")
        self.step = self.start = 0
        self.best, self.best_name = None, ""
        self.resumed = processes.main_only(self._open)
        self.signal = 0
        self.bar = None
        self._lost = set()

    @property
    def is_main(self):
        """Whether this process writes."""
        return self.processes.rank == 0

    def _open(self):
        """Locks the directory and decides: the checkpoint's content to resume from, or None for a fresh start."""
        c = self.config
        if c.resume and c.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        if c.resume and not self.dir.exists() and not self.processes.restarts:
            raise UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.dir / ".lock", "a+")
        except OSError as error:
            raise UserError(f"cannot write to --out_dir={self.dir}: {error.strerror}") from None
        if fcntl:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"another run is writing to {self.dir}: wait for it, or choose another --out_dir") from None
        restarted = self.processes.restarts > 0
        there = [p for p in self.dir.iterdir() if p.name != ".lock"]
        checkpoints = [p for p in (self.dir / "ckpt.pt", self.dir / "ckpt.prev.pt") if p.exists()]
        if (c.resume or restarted) and checkpoints:
            return self._newest_whole(checkpoints)
        if c.resume and not restarted:
            raise UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        if there and not c.overwrite and not restarted:
            ways = "--resume continues it" if checkpoints else "it has no checkpoint yet"
            raise UserError(f"{self.dir} is not empty: {ways}, --overwrite deletes it, --out_dir goes elsewhere")
        for p in there:
            if p.is_file() and (p.suffix in (".pt", ".jsonl", ".json", ".png", ".tmp", ".link")):
                p.unlink()
        return None

    def _newest_whole(self, paths):
        problems = []
        for path in paths:
            try:
                content = load_checkpoint(path, self.task)
            except UserError as error:
                problems.append(str(error))
                continue
            if problems:
                print(f"warning: {problems[0]}; continuing from {path.name} at step {content['step']}", file=sys.stderr, flush=True)
            return content
        raise UserError(f"{problems[0]}, and no whole checkpoint before it" if len(problems) > 1 else problems[0])

    def begin(self, total, unit, per_step, flops=None):
        """Starts the clock, the bar and the metrics. unit: "images" or "tokens", per_step of them a step, `flops` each."""
        self.total, self.unit, self.per_step, self.flops = total, unit, per_step, flops
        self.rate_name = f"{'tokens' if unit == 'tokens' else 'examples'}_per_s"
        if self.resumed is not None:
            self.start = self.step = self.resumed["step"]
            self.best = self.resumed["best"]
            if self.start < total:
                self.say(f"going on after step {self.start}")
        self.processes.main_only(self._start_files)
        if self.is_main:
            terminal = sys.stderr.isatty() and self.total > self.start
            self.bar = tqdm(total=total, initial=self.start, unit="step", dynamic_ncols=True, disable=not terminal)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):                        # not in the main thread: a test's business
                signal.signal(number, self._on_signal)
        self.began = self.lap = time.perf_counter()
        self.timed, self.timed_steps, self.lap_steps, self.first_step_s = 0.0, 0, 0, None
        self.loss_sum, self.loss_n, self.bad_step = 0.0, 0, None

    def _start_files(self):
        try:
            (self.dir / "config.json").write_text(json.dumps(dict(task=self.task, preset=self.preset) | vars(self.config), indent=1) + "\n")
            self._truncate_metrics()
            self.metrics = open(self.dir / "metrics.jsonl", "a", buffering=1)
        except OSError as error:
            raise UserError(f"cannot write {error.filename or self.dir}: {error.strerror}") from None

    def _truncate_metrics(self):
        """Drops what a resumed run will write again: every line after the checkpoint's step."""
        path, tmp = self.dir / "metrics.jsonl", self.dir / "metrics.jsonl.tmp"
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):     # a line torn by a kill, or garbage
                if json.loads(line).get("step", math.inf) <= self.start and "event" not in json.loads(line):
                    kept.append(line + b"\n")
        tmp.write_bytes(b"".join(kept))
        os.replace(tmp, path)

    def _on_signal(self, number, frame):
        if self.signal:                                                  # the second one does not wait for a checkpoint
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number

    def should_stop(self):
        """Whether any process has been asked to stop. Asked once a step."""
        self.signal = self.processes.largest(int(self.signal))
        return self.signal != 0

    def stepped(self, loss, lr, **values):
        """After each optimizer step: counts it, and every log_every steps writes a line. `loss` stays on the device until then."""
        self.step += 1
        loss = loss.detach()
        bad = torch.where(torch.isfinite(loss), math.inf, float(self.step))
        self.bad_step = bad if self.bad_step is None else torch.minimum(self.bad_step, bad)
        self.loss_sum, self.loss_n, self.lap_steps = self.loss_sum + loss, self.loss_n + 1, self.lap_steps + 1
        if self.first_step_s is None:
            loss.item()
            now = time.perf_counter()
            self.first_step_s, self.lap, self.lap_steps = now - self.lap, now, 0
        if self.bar is not None:
            self.bar.update(1)
        if self.step % self.config.log_every == 0 or self.step == self.total:
            mean = float(self._check_finite())
            rate = self._lap()
            line = dict(step=self.step, split="train", loss=mean, lr=lr, **{self.rate_name: rate}, **values)
            mfu = self.mfu(rate)
            self.write(line if mfu is None else line | dict(mfu=mfu))
            self.show(loss=mean, lr=lr, rate=rate, mfu=mfu)

    def _lap(self):
        """Images or tokens a second since the last lap, and the sum for the run."""
        now = time.perf_counter()
        seconds, steps = now - self.lap, self.lap_steps
        self.timed, self.timed_steps = self.timed + seconds, self.timed_steps + steps
        self.lap, self.lap_steps = now, 0
        return self.per_step * steps / seconds if steps else 0.0

    def mfu(self, rate):
        """The share of the GPUs' bf16 peak that goes into the FLOPs the mathematics needs; None where the peak is unknown."""
        peak = peak_flops(self.processes.device)
        return None if not peak or not self.flops else rate * self.flops / (peak * self.processes.world)

    def _check_finite(self):
        """The mean loss since the last line, over all processes; raises Diverged if any was not finite."""
        total = torch.stack([torch.as_tensor(self.loss_sum / max(self.loss_n, 1)).float(), self.bad_step.float()])
        if self.processes.world > 1:
            lowest = total[1:].clone()
            dist.all_reduce(total)
            dist.all_reduce(lowest, dist.ReduceOp.MIN)
            total = torch.cat([total[:1] / self.processes.world, lowest])
        mean, bad = total.tolist()
        self.loss_sum, self.loss_n = 0.0, 0
        if bad < math.inf:
            last = self.dir / "ckpt.pt"
            kept = f"the last good checkpoint is {last}" if last.exists() else "no checkpoint was written yet"
            self.close()
            raise Diverged(f"the loss is not finite at step {int(bad)}; {kept}")
        return mean

    def show(self, loss, lr, rate, mfu=None):
        """The bar's postfix on a terminal, a plain line elsewhere."""
        if not self.is_main:
            return
        text = f"loss {loss:.4f}, {rate:,.0f} {self.unit}/s" + (f", mfu {mfu:.1%}" if mfu else "")
        if not self.bar.disable:
            self.bar.set_postfix_str(text)
            return
        left = f", {(self.total - self.step) * self.per_step / rate:,.0f} s left" if rate else ""
        print(f"step {self.step}/{self.total}: {text}, lr {lr:.2e}{left}", flush=True)

    def say(self, text):
        """A line for the reader, from rank 0, that does not tear the bar."""
        if self.is_main:
            tqdm.write(text) if self.bar is not None and not self.bar.disable else print(text, flush=True)

    def write(self, line):
        """One JSON object to metrics.jsonl; NaN and infinity become null."""
        if self.is_main:
            clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            with self.optional("metrics.jsonl"):
                self.metrics.write(json.dumps(clean) + "\n")

    @contextlib.contextmanager
    def optional(self, name):
        """Around the writing of a file that a run can do without: if the disk is full, it says so once and goes on."""
        try:
            yield
        except OSError as error:
            if name not in self._lost:
                self.say(f"warning: cannot write {self.dir / name}: {error.strerror}; the run goes on without")
            self._lost.add(name)

    def evaluated(self, better=max, key="acc", value=None, **values):
        """Records a validation; returns whether `key` (or `value`, if given) is the best so far, by `better`."""
        self.write(dict(step=self.step, split="val", **values))
        self.say(f"step {self.step}: validation " + ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items() if not isinstance(v, str)))
        self.best_name = key if value is None else f"{key} on the windows of --eval_windows"
        value = values[key] if value is None else value
        improved = math.isfinite(value) and (self.best is None or (better(value, self.best) == value and value != self.best))
        if improved:
            self.best, self.best_before = value, self.best
        return improved

    @contextlib.contextmanager
    def untimed(self):
        """Around evaluation and saving: their seconds do not count in the training rate."""
        if self.lap_steps:
            self._lap()
        yield
        self.lap, self.lap_steps = time.perf_counter(), 0

    def save(self, content, best=False, last=False):
        """Writes ckpt.pt (and best.pt). `content`: model, model_config, data_meta, optimizer, extra.

        A failed write keeps the previous checkpoint; it is a warning in mid-run, an error where it was the last chance."""
        self._check_finite() if self.loss_n else None
        full = dict(task=self.task, step=self.step, best=self.best, run_config=dict(preset=self.preset) | vars(self.config)) | content

        def write():
            if best:                                                     # first: a run killed between the two evaluates this step again
                save_checkpoint(self.dir / "best.pt", full | dict(optimizer={}), keep_previous=False)
            save_checkpoint(self.dir / "ckpt.pt", full)
        try:
            self.processes.main_only(write)
        except UserError as error:
            if best:                                                     # best.pt is still the one before
                self.best = self.best_before
            if last:
                raise
            self.say(f"warning: {error}; the run goes on and keeps the checkpoint before")

    def interrupted(self):
        """After the checkpoint that a signal asked for: says so and leaves with the signal's status."""
        self.say(f"saved step {self.step} to {self.dir / 'ckpt.pt'}; --resume continues")
        self.close()
        raise Stopped(self.signal)

    def done(self, **values):
        """The last line of metrics.jsonl and of the terminal; returns it."""
        if self.lap_steps:
            self._lap()
        rate = self.per_step * self.timed_steps / self.timed if self.timed_steps else None
        line = dict(event="done", step=self.step, seconds=round(time.perf_counter() - self.began, 3),
                    first_step_s=self.first_step_s and round(self.first_step_s, 3), **{self.rate_name: rate}, best=self.best, **values)
        self.write(line)
        mfu = self.mfu(rate) if rate else None
        self.say(f"done: {self.step} steps" + (f" in {line['seconds']:.0f} s" if self.first_step_s else ", nothing left to do")
                 + (f", first step {self.first_step_s:.1f} s, then {rate:,.0f} {self.unit}/s" if rate else "") + (f" (mfu {mfu:.1%})" if mfu else "")
                 + (f"; best validation {self.best_name}".rstrip() + f" {self.best:.4f}" if self.best is not None else "") + f"; written to {self.dir}")
        self.close()
        return line

    def close(self):
        """Ends the bar, the metrics and the signal handlers."""
        if self.bar is not None:
            self.bar.close()
            with self.optional("metrics.jsonl"):
                self.metrics.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        if self.is_main:
            self._lock.close()


def restore(run, model_config, optimizer, model, averaged=None):
    """Weights and optimizer of the checkpoint that `run` resumes; `averaged` (EMA, teacher) takes the evaluated weights.

    Raises UserError if the flags describe another model than the checkpoint's; says which other flags differ."""
    content, path = run.resumed, run.dir / "ckpt.pt"
    ours = dataclasses.asdict(model_config)
    for name in {**ours, **content["model_config"]}:
        if ours.get(name) != content["model_config"].get(name):
            raise UserError(f"cannot resume {run.dir}: its model has {name}={content['model_config'].get(name)}, the flags say {ours.get(name)}")
    harmless = ("resume", "overwrite", "out_dir", "device", "compile", "workers", "log_every", "data_dir", "preset")
    for name, value in vars(run.config).items():
        if name not in harmless and content["run_config"].get(name) != value:
            run.say(f"note: --{name} was {content['run_config'].get(name)}, is now {value}")
    if (averaged is not None) != ("student" in content["extra"]):
        raise UserError(f"cannot resume {run.dir}: one run averages weights, the other does not")
    if averaged is None:
        load_into(model, content["model"], path)
    else:
        load_into(averaged, content["model"], path)
        load_into(model, content["extra"]["student"], path)
    try:
        optimizer.load_state_dict(content["optimizer"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot resume {run.dir}: the optimizer's state does not fit ({error})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Small things
# ---------------------------------------------------------------------------------------------------------------------

def count(model):
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters())


def device_name(device):
    """For the reader of a log."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({torch.get_num_threads()} threads)"


def wants_compile(config, device):
    """--compile, which by default is on for cuda only: on a CPU Inductor takes long and gains little."""
    return device.type == "cuda" if config.compile is None else config.compile


def at_size(x, size):
    """Pictures (b, 3, H, H) at the size that a model sees: the centre of larger ones, smaller ones resized ([N]'s evaluation)."""
    return augment.center_crop(x, size) if x.shape[-1] > size else augment.resize(x, size) if x.shape[-1] < size else x


@torch.no_grad()
def classify(model, split, data, config, processes, batch_size=500):
    """Loss and top-1 accuracy of a classifier over a split, every picture counted once, shared among the processes."""
    model.eval()
    mine = torch.arange(processes.rank, len(split), processes.world)
    total = torch.zeros(3, dtype=torch.float64 if processes.device.type != "mps" else torch.float32, device=processes.device)
    for pictures, labels in split.batches([part.numpy() for part in mine.split(batch_size)], getattr(config, "workers", 0)):
        n = len(labels)
        if n < batch_size:          # a full last batch, so that a compiled model sees one shape; the filling is not counted
            pictures = torch.cat([pictures, pictures[:1].expand(batch_size - n, -1, -1, -1)])
        x = augment.normalize(at_size(augment.to_float(pictures), config.image_size), data.mean, data.std)
        with processes.autocast(config.dtype):
            logits = model(x)[:n]
        loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        total += torch.stack([loss, (logits.argmax(-1) == labels).sum(), torch.as_tensor(n, device=loss.device)])
    loss, right, n = processes.sum(total).tolist()
    return dict(loss=loss / n, acc=right / n, n=int(n))


@torch.no_grad()
def features(encoder, split, data, config, processes, kind="class", batch_size=500):
    """Frozen features (N, D) float32 of all pictures of a split, on the device: the class token, the mean of the other tokens, or both.

    `encoder` None gives the pixels. Every process extracts its share and receives the whole."""
    out = None
    mine = torch.arange(processes.rank, len(split), processes.world).split(batch_size)
    for index, (pictures, _) in zip(mine, split.batches([part.numpy() for part in mine], getattr(config, "workers", 0))):
        x = augment.to_float(pictures)
        if encoder is not None:
            x = augment.normalize(at_size(x, encoder.config.image_size), data.mean, data.std)
            with processes.autocast(config.dtype):
                Z = encoder(x).float()
            x = dict(mean=Z[:, 1:].mean(1), both=torch.cat([Z[:, 0], Z[:, 1:].mean(1)], 1)).get(kind, Z[:, 0])
        if out is None:
            out = x.new_zeros(len(split), x[0].numel())
        out[index.to(x.device)] = x.flatten(1)
    return processes.sum(out)


def nearest_neighbours(x, y, x_test, y_test, classes, k=20, temperature=0.07, processes=None, chunk=1000):
    """Accuracy of the k nearest by cosine: each votes for its class with weight exp(cosine / temperature), and with weight 1.

    In chunks of test samples, so that only (chunk, N) similarities are held: DINO's protocol ([B] Section 7.2). The test
    samples are shared among the processes. Returns dict(acc=weighted, plain=unweighted, k=k)."""
    x, x_test = (torch.nn.functional.normalize(t, dim=1) for t in (x, x_test))
    k, right, mine = min(k, len(x)), torch.zeros(2, device=x.device), slice(processes.rank if processes else 0, None, processes.world if processes else 1)
    for test, labels in zip(x_test[mine].split(chunk), y_test[mine].split(chunk)):
        cosine, index = (test @ x.mT).topk(k)
        for i, weight in enumerate(((cosine / temperature).exp(), torch.ones_like(cosine))):
            votes = torch.zeros(len(test), classes, device=x.device).scatter_add_(1, y[index], weight)
            right[i] += (votes.argmax(1) == labels).sum()
    weighted, plain = (processes.sum(right) if processes else right).tolist()
    return dict(acc=weighted / len(x_test), plain=plain / len(x_test), k=k)


def write_overlays(path, pictures, maps, enlarge=4):
    """A PNG with one picture a row: the picture, then each of its maps in red over its greys. pictures (n, 3, H, H) in [0, 1], maps (n, m, patches),
    each map stretched from its least to its largest value."""
    n, m, patches = maps.shape
    side, size = math.isqrt(patches), pictures.shape[-1]
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    heat = ((maps - low) / (high - low).clamp_min(1e-12)).view(n, m, side, side)
    heat = heat.repeat_interleave(size // side, 2).repeat_interleave(size // side, 3)[:, :, None]                    # (n, m, 1, H, H)
    red = torch.tensor([1.0, 0.1, 0.1], device=maps.device).view(3, 1, 1)
    grey = augment.luma(pictures)[:, None]
    shown = torch.cat([pictures[:, None], (1 - 0.7 * heat) * 0.7 * grey + 0.7 * heat * red], 1)                      # (n, 1 + m, 3, H, H)
    sheet = shown.permute(0, 3, 1, 4, 2).reshape(n * size, (1 + m) * size, 3).clamp(0, 1).mul(255).round().byte().cpu().numpy()
    Image.fromarray(sheet.repeat(enlarge, 0).repeat(enlarge, 1)).save(path)
