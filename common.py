"""
The plumbing of the training scripts: flags, processes, schedules, optimizers, the run's directory.

Nothing here knows a model, a loss or a data set. What a reader of a script should see (forward,
loss, clipping, optimizer step) is in the script. Checkpoints are in checkpoint.py.
"""
import contextlib
import ctypes
import dataclasses
import difflib
import hashlib
import inspect
import json
import math
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

import report

try:
    import fcntl
except ImportError:         # Windows has no flock: there two runs in one out_dir go unnoticed
    fcntl = None

ROOT = Path(__file__).resolve().parent


class UserError(Exception):
    """Something the user can mend, in one line."""
    exit_status = 2


class Diverged(Exception):
    """A loss that is not finite."""
    exit_status = 3


class Stopped(Exception):
    """A saved SIGINT or SIGTERM; the exit status is 128 + the signal's number, as in shells."""

    def __init__(self, number):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_status = 128 + number


def cli(main):
    """Runs main(argv) and exits: 0 done, 2 a user's error, 3 a loss that is not finite, 130 / 143
    after a saved signal. Errors with an `exit_status` are one line on stderr, from rank 0 only."""
    status = 0
    signal.signal(signal.SIGINT, signal.default_int_handler)    # scripts import without it
    sys.stdout.reconfigure(errors="backslashreplace")   # file names in another encoding
    try:
        main(sys.argv[1:])
        sys.stdout.flush()                      # a full disk shows here at the latest
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:                     # `... | head`: the reader has what it wanted
        pass
    except Exception as error:
        status, message = _explain(error)
        if status is None:
            raise
        if int(os.environ.get("RANK", 0)) == 0:
            message = " ".join(message.split())     # one line, whatever the quoted flag holds
            print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr, flush=True)
    _flush_or_mute()
    if dist.is_initialized():
        if status == 0:
            dist.barrier()          # gloo aborts a process whose peers have left before it
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(status)            # skips gloo's destructors, which crash now and then
    sys.exit(status)


def _flush_or_mute():
    """What is left for stdout is written, or, where it cannot be, dropped: Python would try again
    at exit and report that in two lines."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error):
    """(exit status, message) of an error that needs no traceback, (None, None) of any other."""
    if hasattr(error, "exit_status"):
        return error.exit_status, str(error)
    too_large = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    if too_large or "allocate memory" in str(error) or "Storage size" in str(error):
        return 2, "this does not fit in memory: try a smaller batch or model"
    if isinstance(error, OSError):                      # a full disk, a name too long
        return 2, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    return None, None


# -------------------------------------------------------------------------------------------------
# Flags: a dataclass a command, a field a flag
# -------------------------------------------------------------------------------------------------

def option(default, help, choices=None, low=None, high=None, above=None, displaces=()):
    """A field with its --help text and range: low <= value <= high, value > above.

    Given on the command line, it removes the preset's values of the fields in `displaces`."""
    limits = dict(choices=choices, low=low, high=high, above=above)
    return field(default=default, metadata=dict(help=help, displaces=displaces, **limits))


@dataclass(kw_only=True)
class DeviceFlags:
    """Where and in what precision to compute, and where data lies."""
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there",
                         choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast; auto is bfloat16 on CUDA and on CPUs with "
                        "instructions for it (AMX, AVX512-BF16), else float32",
                        choices=("auto", "float32", "bfloat16"))
    data_dir: str = option(str(ROOT / "data" / "cache"), "where prepared data lies")
    workers: int = option(8, "processes that read a data set too large for memory", low=0)


@dataclass(kw_only=True)
class RunFlags(DeviceFlags):
    """The flags of every training script."""
    out_dir: str | None = option(None, "where the run writes; default out/TASK-PRESET")
    resume: bool = option(False, "continue the run in out_dir from its checkpoint")
    overwrite: bool = option(False, "delete the run in out_dir first")
    seed: int = option(0, "the same seed gives the same run", low=0)
    compile: bool | None = option(None, "torch.compile the model; auto is cuda only")
    log_every: int = option(20, "steps between lines of metrics.jsonl", low=1)
    eval_every: int = option(0, "steps between evaluations; 0: every epoch, or 1000 steps of "
                             "text", low=0)
    save_every: int = option(0, "steps between checkpoints; 0: at evaluations, for at most 2 % "
                             "of the time", low=0)


def _flag_type(hint):
    """(type, optional) of a field's annotation."""
    if isinstance(hint, types.UnionType):
        kinds = [t for t in typing.get_args(hint) if t is not type(None)]
        return kinds[0], True
    return hint, False


_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def _convert(text, hint, name):
    """The text of a flag as its field's type."""
    kind, optional = _flag_type(hint)
    if optional and text.lower() in ("none", "auto"):
        return None
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise UserError(f"--{name}={text}: expected true or false")
        return text.lower() in _TRUE
    try:
        value = kind(text)
    except ValueError:
        expected = "a whole number" if kind is int else "a number"
        raise UserError(f"--{name}={text}: expected {expected}") from None
    if kind is float and not math.isfinite(value):
        raise UserError(f"--{name}={text}: expected a finite number")
    if kind is int and abs(value) >= 1 << 31:
        raise UserError(f"--{name}={text}: expected a whole number below 2^31")
    return value


def not_one_of(word, words):
    """"X is not one of a, b, c, did you mean b?"."""
    words = [str(w) for w in words]
    close = difflib.get_close_matches(str(word), words, 1)
    hint = f", did you mean {close[0]}?" if close else ""
    return f"{word} is not one of {', '.join(words)}{hint}"


def _check_range(value, limits, name):
    if value is None or not limits:
        return
    if limits["choices"] and value not in limits["choices"]:
        raise UserError(f"--{name}={not_one_of(value, limits['choices'])}")
    if limits["low"] is not None and value < limits["low"]:
        raise UserError(f"--{name}={value} must be {limits['low']} or more")
    if limits["high"] is not None and value > limits["high"]:
        raise UserError(f"--{name}={value} must be {limits['high']} or less")
    if limits["above"] is not None and value <= limits["above"]:
        raise UserError(f"--{name}={value} must be more than {limits['above']}")


def _read_flags(argv, fields, hints):
    """{name: value} of --name=value, --name value, and bare booleans; a field `files` takes all
    words that are no flags."""
    given, argv = {}, list(argv)
    while argv:
        word = argv.pop(0)
        if not word.startswith("--"):
            if "files" in fields:
                given["files"] = (*given.get("files", ()), word)
                continue
            raise UserError(f"unknown argument {word!r}: flags are --name=value")
        name, equals, text = word[2:].partition("=")
        if name not in fields or name == "files":
            close = difflib.get_close_matches(name, fields, 1)
            hint = f", did you mean --{close[0]}?" if close else ""
            raise UserError(f"unknown flag --{name}{hint} (--help lists all)")
        if not equals:
            bare = not argv or argv[0].startswith("--")
            if "files" in fields:               # the next word may be a file
                bare = bare or argv[0].lower() not in _TRUE + _FALSE
            if _flag_type(hints[name])[0] is bool and bare:
                text = "true"
            elif argv:
                text = argv.pop(0)
            else:
                raise UserError(f"--{name} needs a value")
        given[name] = _convert(text, hints[name], name)
    return given


def parse(config_class, presets, argv, doc, default=None):
    """[PRESET] [--name=value ...] as (config, preset name).

    Raises UserError for an unknown name, and for a value of the wrong type or out of range."""
    fields = {f.name: f for f in dataclasses.fields(config_class)}
    hints = typing.get_type_hints(config_class)
    argv = list(argv)
    if "--help" in argv or "-h" in argv:
        print(_help(fields, hints, presets, doc, default, argv[0]))
        sys.exit(0)
    preset = default
    if argv and not argv[0].startswith("-"):
        preset = argv.pop(0)
    if preset is None:
        raise UserError(f"which preset? One of {', '.join(presets)}")
    if preset not in presets:
        if any(presets.values()):
            raise UserError(f"preset {not_one_of(preset, presets)}")
        hint = f": a checkpoint is given as --ckpt={preset}" if "ckpt" in fields else ""
        raise UserError(f"unexpected {preset!r}{hint}")
    given = _read_flags(argv, fields, hints)
    displaced = {other for name in given for other in fields[name].metadata["displaces"]}
    values = {k: v for k, v in presets[preset].items() if k not in displaced} | given
    for name, value in values.items():
        _check_range(value, fields[name].metadata, name)
    return config_class(**values), preset


_OFTEN = ("data", "ckpt", "runs", "arch", "size", "width", "heads", "layers", "context", "method",
          "optimizer", "lr", "base_lr", "batch_size", "epochs", "steps", "init_from", "dtype",
          "out_dir", "resume", "overwrite", "prompt", "out", "json")


def _wrapped(text, indent):
    """`text` in lines of 100 columns, all but the first indented."""
    return textwrap.fill(text, 100, subsequent_indent=" " * indent, break_long_words=False,
                         break_on_hyphens=False)


def _help(fields, hints, presets, doc, default, first):
    """The docstring, the presets, and the flags with the preset's values: those that one changes
    often, then the rest."""
    lines = [inspect.cleandoc(doc), ""]
    if any(presets.values()):
        lines.append("presets:")
        for name, values in presets.items():
            mark = " (default)" if name == default else ""
            lines.append(_wrapped(f"  {name}{mark}: " + " ".join(
                f"{k}={v}" for k, v in values.items()), 6))
        lines.append("")
    preset = first if first in presets else default
    chosen = presets.get(preset, {})
    often = f"flags, as preset {preset} has them" if chosen else "flags"
    parts = {often: [name for name in _OFTEN if name in fields],
             "flags that one seldom changes": [name for name in fields if name not in _OFTEN]}
    for title, names in parts.items():
        lines.append(f"{title}:")
        for name in names:
            if name == "files":
                continue        # words without --, which the docstring names
            f, (kind, optional) = fields[name], _flag_type(hints[name])
            choices = f.metadata["choices"] or [kind.__name__ + " | auto" * optional]
            value = chosen.get(name, f.default)
            shown = "auto" if value is None else str(value).replace(str(ROOT) + os.sep, "")
            text = f"  --{name}={shown}  ({' | '.join(map(str, choices))})  {f.metadata['help']}"
            lines.append(_wrapped(text, 6))
        lines.append("")
    return "\n".join(lines).rstrip()


def parse_command(commands, argv, doc):
    """SUBCOMMAND [--name=value ...] as (subcommand, config); `commands`: name -> dataclass."""
    if not argv or argv[0] in ("--help", "-h"):
        print(f"{doc.strip()}\n\nsubcommands, each with its own --help:")
        for name, config_class in commands.items():
            paragraph = " ".join(config_class.__doc__.strip().partition("\n\n")[0].split())
            first = re.split(r"(?<!Eq)(?<!\.)\. ", paragraph)[0].rstrip(".:")
            print(_wrapped(f"  {name:12}{first}", 14))
        sys.exit(0 if argv else 2)
    if argv[0] not in commands:
        raise UserError(f"subcommand {not_one_of(argv[0], commands)}")
    config_class = commands[argv[0]]
    config, _ = parse(config_class, {argv[0]: {}}, argv, config_class.__doc__)
    return argv[0], config


def needed(value, flag):
    """The value of a flag that has no default."""
    if value is None:
        raise UserError(f"--{flag} is needed")
    return value


def check_new(flag, path, overwrite):
    """Raises UserError for a file that is there already, unless it is empty: who knows whose."""
    if path and os.path.isfile(path) and os.path.getsize(path) and not overwrite:
        raise UserError(f"--{flag}: {path} is there already; --overwrite replaces it")


def set_fields(cls, config, **fields):
    """`fields`, and every field of `cls` that `config` sets: how flags reach a model."""
    shared = {f.name: getattr(config, f.name, None) for f in dataclasses.fields(cls)}
    return {k: v for k, v in shared.items() if v is not None} | fields


# -------------------------------------------------------------------------------------------------
# Processes, devices, randomness
# -------------------------------------------------------------------------------------------------

class Processes:
    """This process among those of torchrun (rank, world, device), and the collectives."""

    def __init__(self, device="auto"):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0))
        available = dict(cuda=torch.cuda.is_available(),
                         mps=torch.backends.mps.is_available(), cpu=True)
        if device == "auto":
            device = next(name for name, there in available.items() if there)
        if not available[device]:
            raise UserError(f"--device={device}: this machine has none")
        if device == "cuda" and local >= torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise UserError(f"--nproc_per_node is more than the {gpus} GPUs of this machine")
        self.device = torch.device(device, local) if device == "cuda" else torch.device(device)
        if device == "cpu":
            keep_freed_memory()
        if device == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.control = None
        self.restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        if self.world > 1:
            self._join()
            self.restarts = self.largest(self.restarts)     # each agent of torchrun counts its own

    def _join(self):
        cuda = self.device.type == "cuda"
        if not dist.is_initialized():
            store, rank, world = next(dist.rendezvous("env://"))
            store = _fresh_store(store, rank, world)
            backend = "nccl" if cuda else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        # stop flags travel on the CPU, so that asking for them every step does not stall the GPU
        self.control = dist.new_group(backend="gloo") if cuda else dist.group.WORLD

    def rows(self, n, accumulate=1):
        """This process's slice of n rows. Raises UserError if they do not divide among the
        processes and, there, among `accumulate` micro-batches."""
        if n % self.world:
            raise UserError(f"{n} samples do not divide among {self.world} processes")
        share = n // self.world
        if share % accumulate:
            raise UserError(f"--accumulate={accumulate} does not divide the {share} samples of a "
                            "process")
        return slice(self.rank * share, (self.rank + 1) * share)

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

    def main_only(self, function):
        """function() on rank 0; its result, or its UserError, on every process."""
        outcome = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except UserError as error:
                outcome[1] = str(error)
        if self.world > 1:
            dist.broadcast_object_list(outcome, 0, group=self.control)
        result, error = outcome
        if error is not None:
            raise UserError(error)
        return result

    def wrap(self, model, **options):
        """The model, under DistributedDataParallel if there are several processes."""
        if self.world == 1:
            return model
        if self.device.type == "cuda":
            options["device_ids"] = [self.device.index]
        ddp = torch.nn.parallel.DistributedDataParallel
        return ddp(model, gradient_as_bucket_view=True, **options)

    def autocast(self, dtype):
        """The autocast context of --dtype."""
        if dtype == "bfloat16" or (dtype == "auto" and multiplies_bfloat16(self.device)):
            return torch.autocast(self.device.type, torch.bfloat16)
        return contextlib.nullcontext()


def _fresh_store(store, rank, world):
    """The part of torchrun's store that belongs to this start of the processes.

    The store outlives a restart and keeps the stale addresses of previous workers. So each writes a
    random word, and all go on once all have read the same words, which then name the part."""
    store.set(f"word/{rank}", os.urandom(8).hex())
    while True:
        words = b"".join(store.multi_get([f"word/{i}" for i in range(world)]))
        store.set(f"read/{rank}", words)
        if all(read == words for read in store.multi_get([f"read/{i}" for i in range(world)])):
            return dist.PrefixStore(hashlib.sha256(words).hexdigest(), store)
        time.sleep(0.05)


def keep_freed_memory():
    """Tells glibc to keep freed memory. By default the pages of each large tensor go back to the
    kernel and come again zeroed: 5 to 10 % of a CPU step, more on some virtual machines."""
    with contextlib.suppress(OSError, AttributeError):      # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25)    # M_MMAP_THRESHOLD; some allow 32 MB only
        mallopt(-1, (1 << 31) - 1)                      # M_TRIM_THRESHOLD


def derive_seed(*purpose):
    """A 63-bit seed, a function of (seed, step, purpose, ...): no state has to be saved."""
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def accumulating(model, last):
    """no_sync of DDP on all but the last of a step's micro-batches."""
    return contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()


def wants_compile(config, device):
    """--compile, by default on for cuda only: on a CPU Inductor takes long and gains little."""
    return device.type == "cuda" if config.compile is None else config.compile


def largest_that_fits(size, trial, params, processes):
    """`size` or the first of its halves with which trial(size), a forward and backward pass, stays
    within the GPU's memory on every process.

    AdamW's two moments and DDP's buckets, which come later, are held in reserve meanwhile. Raises
    UserError if not even 1 fits."""
    while True:
        fits = True
        try:
            reserve = [torch.empty_like(p) for p in params for _ in range(3)]
            trial(size)
        except torch.OutOfMemoryError:
            fits = False
        reserve = None
        if processes.largest(int(not fits)) == 0:
            return size
        if size == 1:
            raise UserError("a micro-batch of 1 does not fit in memory: try a smaller model, or "
                            "a shorter --context")
        size //= 2
        torch.cuda.empty_cache()


def multiplies_bfloat16(device):
    """Whether a device has instructions for bfloat16: cuda, and a CPU with AMX or AVX512-BF16."""
    if device.type == "cpu":
        can = torch.cpu.get_capabilities()
        return can.get("amx_bf16", False) or can.get("avx512_bf16", False)
    return device.type == "cuda"


def device_name(device):
    """For the reader of a log."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


# Dense bf16 FLOP/s of the data sheets, without sparsity
_PEAK = dict(GH200=989e12, H200=989e12, H100=989e12, A100=312e12, L40S=362e12, A10=125e12)
_PEAK |= {"4090": 165e12, "3090": 71e12}


def peak_flops(device):
    """The bf16 FLOP/s of a GPU known by name, for MFU; None otherwise."""
    if device.type != "cuda":
        return None
    words = re.split(r"\W", torch.cuda.get_device_name(device))      # an A1000 is no A100
    return next((peak for key, peak in _PEAK.items() if key in words), None)


def count(model):
    """The number of parameters."""
    return sum(p.numel() for p in model.parameters())


# -------------------------------------------------------------------------------------------------
# Schedules and optimizers
# -------------------------------------------------------------------------------------------------

def steps_per_epoch(samples, batch_size):
    """Whole batches in an epoch. Raises UserError if there is none."""
    if batch_size > samples:
        raise UserError(f"--batch_size={batch_size} is more than the {samples} training images")
    return samples // batch_size


def warmup_cosine(base, total, warmup=0, final=0.0):
    """A list of `total` values: linear up to `base` over `warmup` steps (half of a run at most),
    then half a cosine to `final`. Step 0 has base / warmup; DINO and MAE begin at 0."""
    if total > 100_000_000:
        raise UserError(f"{total:.3g} steps are more than a run can have (100 million)")
    warmup = min(warmup, total // 2)
    down = max(total - warmup, 1)
    rise = [base * (i + 1) / warmup for i in range(warmup)]
    fall = [0.5 * (1 + math.cos(math.pi * i / down)) for i in range(total - warmup)]
    return rise + [final + (base - final) * share for share in fall]


def trapezoid(base, total, warmup=0, final=0.0):
    """As warmup_cosine, but at `base` until a straight line to `final` over the last 40 %."""
    warmup, down = min(warmup, total // 2), round(0.4 * total)
    rise = warmup_cosine(base, total, warmup)[:warmup]
    fall = [final + (base - final) * (1 - i / down) for i in range(down)]
    return rise + [base] * (total - warmup - down) + fall


SCHEDULES = dict(cosine=warmup_cosine, trapezoid=trapezoid)


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


class MuonAdamW:
    """Muon for the matrices of hidden layers, AdamW for the rest, as one optimizer.

    Muon (Jordan et al. 2024), torch's own: m = 0.95 m + 0.05 g, then W = (1 - lr wd) W - lr s O,
    where O is an approximate orthogonal factor of the Nesterov momentum (five Newton-Schulz steps
    in bfloat16) and s = 0.2 sqrt(max(rows, columns)) gives the step AdamW's usual size, so that
    both share one scale of rates (adjust_lr_fn="match_rms_adamw")."""

    def __init__(self, muon_groups, adamw_groups, lr, betas):
        muon = torch.optim.Muon(muon_groups, lr=lr, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(adamw_groups, lr=lr, betas=betas, fused=True)
        self.parts = dict(muon=muon, adamw=adamw)

    @property
    def param_groups(self):
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self):
        """One update of every parameter that has a gradient."""
        for part in self.parts.values():
            part.step()

    def zero_grad(self, set_to_none=True):
        """Drops the gradients."""
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def state_dict(self):
        """{"muon": ..., "adamw": ...}, each as torch has it."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state):
        """Raises KeyError or ValueError for another optimizer's state."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


# Our choice, and timm's: nanoGPT, ToST's text code, DINO and MAE decay those that they train, and
# released CRATE decays every parameter, vectors too
_NEVER_DECAYED = ("class_token", "mask_token", "positions")
_HIDDEN = {"layers", "decoder", "projector", "predict"}     # Muon's: not embeddings, classifiers


def make_optimizer(model, name, lr, weight_decay, betas, scale=lambda key: 1.0):
    """lion, adamw or muon; scale(key) multiplies the rate of the parameter of that name.

    Matrices are decayed; vectors, positions, special tokens and TSSA's b (K, T, 1) are not. No
    model here has a convolution: its weight (4-D) would have to be let in."""
    hidden, others = {}, {}
    for key, p in model.named_parameters():
        if not p.requires_grad:
            continue
        words = key.split(".")
        decays = p.ndim == 2 and words[-1] not in _NEVER_DECAYED
        muon = name == "muon" and decays and _HIDDEN & set(words[:2])
        groups = hidden if muon else others
        groups.setdefault((not decays, scale(key)), []).append(p)
    hidden, others = (
        [dict(params=params, weight_decay=0.0 if spared else weight_decay, decays=not spared,
              scale=factor) for (spared, factor), params in sorted(groups.items())]
        for groups in (hidden, others))
    if name == "muon":
        return MuonAdamW(hidden, others, lr, betas)
    if name == "lion":
        return Lion(others, lr=lr, betas=betas)
    return torch.optim.AdamW(others, lr=lr, betas=betas, fused=True)


def set_lr(optimizer, lr):
    """The learning rate of every group, times the group's own scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]


def set_decay(optimizer, weight_decay):
    """The weight decay of every group that is decayed."""
    for group in optimizer.param_groups:
        if group["decays"]:
            group["weight_decay"] = weight_decay


@torch.no_grad()
def ema_update(average, params, momentum):
    """average = momentum average + (1 - momentum) params, two lists of parameters."""
    torch._foreach_lerp_(average, params, 1 - momentum)


# -------------------------------------------------------------------------------------------------
# A run: its directory, steps, metrics and signals
# -------------------------------------------------------------------------------------------------

# What a run writes in its directory; a kill may leave .tmp and .link
_OF_A_RUN = re.compile(r"(config\.json|metrics\.jsonl|report\.md|step\d+\.png|"
                       r"(ckpt|ckpt\.prev|best)\.pt)(\.tmp|\.link)?")


class Run:
    """One training run in one directory. All processes call every method, rank 0 writes.

    out_dir holds config.json, metrics.jsonl (one object a line), and what checkpoint.py writes:
    ckpt.pt (latest), ckpt.prev.pt (the one before), best.pt."""

    def __init__(self, config, task, preset, processes):
        self.config, self.task, self.preset, self.processes = config, task, preset, processes
        self.dir = Path(config.out_dir or ROOT / "out" / f"{task}-{preset}")
        self.is_main = processes.rank == 0
        self.step = 0                       # steps done
        self.best = None
        self.best_name = ""
        self.signal = 0                     # received by this process
        self.stopping = 0                   # received by any, as all of them know
        self.bar = None
        self._unwritable = set()
        self.about = None
        self.resuming = processes.main_only(self._open)

    # ---- the directory

    def _open(self):
        """Locks the directory, removes what a kill left there, and returns whether to resume in it;
        if not, removes what a run wrote. Other files stay."""
        c, restarted = self.config, self.processes.restarts > 0
        if c.resume and c.overwrite:
            raise UserError("--resume and --overwrite exclude each other")
        nothing = UserError(f"nothing to resume in {self.dir}: there is no ckpt.pt")
        if c.resume and not self.dir.exists() and not restarted:
            raise nothing
        self._lock_directory()
        there = [p for p in self.dir.iterdir() if p.name != ".lock"]
        ours = [p for p in there if p.is_file() and _OF_A_RUN.fullmatch(p.name)]
        checkpoints = any(p.name in ("ckpt.pt", "ckpt.prev.pt") for p in there)
        resuming = (c.resume or restarted) and checkpoints
        if c.resume and not resuming and not restarted:
            raise nothing
        if there and not (resuming or c.overwrite or restarted):
            resume = "--resume continues it" if checkpoints else "it has no checkpoint yet"
            raise UserError(f"{self.dir} is not empty: {resume}, --overwrite deletes it, "
                            "--out_dir goes elsewhere")
        others = sorted(p.name for p in there if p not in ours or p.name == "config.json")
        if others and not resuming and not self._has_config():
            raise UserError(f"{self.dir} holds {others[0]}, which is not of a run, and no run: "
                            "--overwrite deletes nothing there, --out_dir goes elsewhere")
        for p in ours:
            if not resuming or p.suffix in (".tmp", ".link"):
                p.unlink()
        return resuming

    def _has_config(self):
        """Whether config.json is a run's."""
        with contextlib.suppress(OSError, ValueError):
            flags = json.loads((self.dir / "config.json").read_text())
            return isinstance(flags, dict) and {"task", "preset", "out_dir"} <= flags.keys()
        return False

    def _lock_directory(self):
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.dir / ".lock", "a+")
        except OSError as error:
            raise UserError(f"cannot write to --out_dir={self.dir}: {error.strerror}") from None
        if fcntl:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"another run is writing to {self.dir}: wait for it, or choose "
                                "another --out_dir") from None

    def begin(self, total, eval_every, unit, per_step, flops=None):
        """Starts clock, bar and metrics; a checkpoint may have set `step` and `best` before.

        unit: "images" or "tokens"; per_step of them a step; `flops` each, for MFU."""
        self.total, self.unit, self.per_step, self.flops = total, unit, per_step, flops
        self.eval_every = self.config.eval_every or eval_every
        self.rate_name = f"{'tokens' if unit == 'tokens' else 'examples'}_per_s"
        self.start = self.saved_step = self.step
        if 0 < self.start < total:
            self.say(f"resuming after step {self.start}")
        self.processes.main_only(self._start_files)
        if self.is_main:
            terminal = sys.stderr.isatty() and total > self.start
            self.bar = tqdm(total=total, initial=self.start, unit="step", dynamic_ncols=True,
                            disable=not terminal)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):           # not in the main thread
                signal.signal(number, self._on_signal)
        self.began = self.lap = time.perf_counter()
        self.timed, self.timed_steps, self.lap_steps, self.first_step_s = 0.0, 0, 0, None
        self.losses = []                    # of the steps since mean_loss, on the device

    def _start_files(self):
        flags = dict(task=self.task, preset=self.preset) | vars(self.config)
        try:
            tmp = self.dir / "config.json.tmp"
            tmp.write_text(json.dumps(flags, indent=1) + "\n")
            os.replace(tmp, self.dir / "config.json")
            self._truncate_metrics()
            self.metrics = open(self.dir / "metrics.jsonl", "a", buffering=1)
        except OSError as error:
            path = error.filename or self.dir
            raise UserError(f"cannot write {path}: {error.strerror}") from None

    def _truncate_metrics(self):
        """Drops what a resumed run will write again: every line after the checkpoint's step."""
        path, tmp = self.dir / "metrics.jsonl", self.dir / "metrics.jsonl.tmp"
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError):    # torn by a kill
                entry = json.loads(line)
                if entry.get("step", math.inf) <= self.start and "event" not in entry:
                    kept.append(line + b"\n")
        tmp.write_bytes(b"".join(kept))
        os.replace(tmp, path)

    # ---- steps

    def steps(self, model):
        """The numbers of the steps to come. Before each one: training mode, and a seed for dropout
        and drop path, if there are any, that is a function of (seed, step, rank)."""
        seed, rank = self.config.seed, self.processes.rank
        draws = any(getattr(self.config, name, 0) for name in ("dropout", "drop_path"))
        while self.step < self.total:
            if draws:
                torch.manual_seed(derive_seed(seed, self.step, "dropout", rank))
            if not model.training:      # after an evaluation; it visits every module
                model.train()
            yield self.step

    def log_step(self, loss, lr, **values):
        """Counts an optimizer step, and every log_every steps writes a line. `loss` and `values`
        may be tensors; they stay on the device until then."""
        self.step += 1
        self.losses.append(loss.detach())
        self.lap_steps += 1
        if self.first_step_s is None:                       # compilation and warm-up: timed apart
            loss.item()
            now = time.perf_counter()
            self.first_step_s, self.lap, self.lap_steps = now - self.lap, now, 0
        if self.bar is not None:
            self.bar.update(1)
        if self.logs(self.step):
            mean, rate = self.mean_loss(), self._lap()
            mfu = self.mfu(rate)
            line = dict(step=self.step, split="train", loss=mean, lr=lr)
            line |= {self.rate_name: rate} | values
            self.write(line if mfu is None else line | dict(mfu=mfu))
            self._show(mean, lr, rate, mfu)

    def logs(self, step):
        """Whether a line is written after this many steps."""
        return step % self.config.log_every == 0 or step == self.total

    def evaluates(self):
        """Whether an evaluation is due after the step just logged."""
        return self.step % self.eval_every == 0 or self.step == self.total

    def end_step(self, save):
        """Saves every --save_every steps, and leaves, with a checkpoint, after a signal."""
        self.stopping = self.processes.largest(int(self.signal))
        if self.stopping and self.step < self.total:
            save(now=True)
            self.say(f"saved step {self.step} to {self.dir / 'ckpt.pt'}; --resume continues")
            self.close()
            raise Stopped(self.stopping)
        every = self.config.save_every
        if every and self.step % every == 0 and self.saved_step != self.step:
            save(now=True)

    def _on_signal(self, number, frame):
        if self.signal:                                     # the second one does not wait
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number

    def mean_loss(self):
        """The mean loss since it was last asked for, over all processes; None without a step.

        Raises Diverged if one was not finite."""
        if not self.losses:
            return None
        sums = self.processes.sum(torch.stack(self.losses).float())     # NaN and infinity survive
        losses, self.losses = (sums / self.processes.world).tolist(), []
        bad = [self.step - i for i, loss in enumerate(losses[::-1]) if not math.isfinite(loss)]
        if bad:
            last, kept = self.dir / "ckpt.pt", "no checkpoint was written yet"
            if last.exists():
                kept = f"the last good checkpoint is {last}"
            self.close()
            raise Diverged(f"the loss is not finite at step {bad[-1]}; {kept}")
        return sum(losses) / len(losses)

    # ---- clock

    def _lap(self):
        """Images or tokens a second since the last lap; adds to the run's sum."""
        now = time.perf_counter()
        seconds, steps = now - self.lap, self.lap_steps
        self.timed, self.timed_steps = self.timed + seconds, self.timed_steps + steps
        self.lap, self.lap_steps = now, 0
        return self.per_step * steps / seconds if steps else 0.0

    @contextlib.contextmanager
    def untimed(self):
        """Around evaluation and saving: their seconds do not count in the training rate."""
        if self.lap_steps:
            self._lap()
        try:
            yield
        finally:
            self.lap, self.lap_steps = time.perf_counter(), 0

    def mfu(self, rate):
        """The share of the GPUs' bf16 peak that the mathematics needs; None where unknown."""
        peak = peak_flops(self.processes.device)
        if not peak or not self.flops:
            return None
        return rate * self.flops / (peak * self.processes.world)

    # ---- output

    def _show(self, loss, lr, rate, mfu):
        """The bar's postfix on a terminal, a plain line elsewhere."""
        if not self.is_main:
            return
        text = f"loss {loss:.4f}, {rate:,.0f} {self.unit}/s" + (f", mfu {mfu:.1%}" if mfu else "")
        if not self.bar.disable:
            self.bar.set_postfix_str(text)
            return
        seconds = (self.total - self.step) * self.per_step / rate if rate else 0
        left = f", {seconds:,.0f} s left" if rate else ""
        self.say(f"step {self.step}/{self.total}: {text}, lr {lr:.2e}{left}")

    def say(self, text):
        """A line for the reader, from rank 0, that does not tear the bar. With stdout on a full
        disk the run goes on in silence."""
        if not self.is_main:
            return
        try:
            if self.bar is not None and not self.bar.disable:
                tqdm.write(text)
            else:
                print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            print(f"warning: cannot write to stdout: {error.strerror}; the run goes on without",
                  file=sys.stderr, flush=True)
            _flush_or_mute()

    def write(self, line):
        """One JSON object to metrics.jsonl; NaN and infinity become null."""
        if not self.is_main:
            return
        bad = [k for k, v in line.items() if isinstance(v, float) and not math.isfinite(v)]
        with self.optional("metrics.jsonl"):
            self.metrics.write(json.dumps(line | dict.fromkeys(bad)) + "\n")

    @contextlib.contextmanager
    def optional(self, name):
        """Around writing a file that a run can do without: a full disk is one warning."""
        try:
            yield
        except OSError as error:
            if name not in self._unwritable:
                path = self.dir / name
                self.say(f"warning: cannot write {path}: {error.strerror}; the run goes on without")
            self._unwritable.add(name)

    def evaluated(self, better=max, key="acc", value=None, **scores):
        """Records a validation; returns whether `key` (or `value`, if given) is the best so far."""
        self.write(dict(step=self.step, split="val", **scores))
        shown = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in scores.items()}
        shown = [f"{k} {v}" for k, v in shown.items() if not isinstance(scores[k], str)]
        self.say(f"step {self.step}: validation " + ", ".join(shown))
        self.best_name = key if value is None else f"{key} on the windows of --eval_windows"
        value = scores[key] if value is None else value
        improved = self.best is None or better(value, self.best) == value != self.best
        improved = improved and math.isfinite(value)
        if improved:
            self.best = value
        return improved

    def describe(self, text):
        """Says what is trained, and in what precision; the report repeats it."""
        with self.processes.autocast(self.config.dtype):
            half = torch.is_autocast_enabled(self.processes.device.type)
        self.about = f"{text}, {'bfloat16' if half else 'float32'}"
        self.say(self.about)

    def done(self, *then):
        """The last line of metrics.jsonl and of the terminal, and report.md; returns the line.

        `then`: commands to try next, {ckpt} in them stands for the best checkpoint."""
        if self.lap_steps:
            self._lap()
        rate = self.per_step * self.timed_steps / self.timed if self.timed_steps else None
        seconds = round(time.perf_counter() - self.began, 3)
        first = self.first_step_s and round(self.first_step_s, 3)
        line = dict(event="done", step=self.step, seconds=seconds, first_step_s=first,
                    **{self.rate_name: rate}, best=self.best)
        self.write(line)
        text = f"done: {self.step} steps"
        text += f", {self.step - self.start} of them now," if 0 < self.start < self.step else ""
        text += f" in {seconds:.0f} s" if first else ", nothing left to do"
        if rate:
            mfu = self.mfu(rate)
            text += f", first step {first:.1f} s, then {rate:,.0f} {self.unit}/s"
            text += f" (mfu {mfu:.1%})" if mfu else ""
        if self.best is not None:
            text += f"; best validation {self.best_name}".rstrip() + f" {self.best:.4f}"
        self.say(f"{text}; written to {self.dir}")
        then = [line.format(ckpt=self.dir / "best.pt") for line in then]
        for command in then:
            self.say(f"  {command}")
        if self.is_main:
            about = dict(run=self.about, result=text, torch=torch.__version__,
                         commit=report.commit(), date=time.strftime("%Y-%m-%d"))
            with self.optional("report.md"):
                report.write(self.dir, self._command(), about, then)
        self.close()
        return line

    def _command(self):
        """The command line that started this process."""
        launcher = f"torchrun --standalone --nproc_per_node={self.processes.world}"
        words = [Path(sys.argv[0]).name, *sys.argv[1:]]
        return f"{launcher if self.processes.world > 1 else 'python'} {shlex.join(words)}"

    def close(self):
        """Ends the bar, the metrics and the signal handlers."""
        if self.bar is not None:
            self.bar.close()
            with self.optional("metrics.jsonl"):
                self.metrics.close()
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.is_main:
            self._lock.close()
