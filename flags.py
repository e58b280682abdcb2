"""
Flags: a dataclass is a command line, a field is a flag; and how a command ends.
"""
import dataclasses
import difflib
import inspect
import math
import os
import re
import signal
import sys
import textwrap
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from model import ARCHS, ConfigError, not_one_of

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
    flush_or_mute()
    if dist.is_initialized():
        if status == 0:
            dist.barrier()          # gloo aborts a process whose peers have left before it
        dist.destroy_process_group()
        sys.stdout.flush()
        os._exit(status)            # skips gloo's destructors, which crash now and then
    sys.exit(status)


def flush_or_mute():
    """What is left for stdout is written, or, where it cannot be, dropped: Python would try again
    at exit and report that in two lines."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _explain(error):
    """(exit status, message) of an error that needs no traceback, (None, None) of any other."""
    if isinstance(error, ConfigError):
        return 2, str(error)
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


@dataclass(kw_only=True)
class ModelFlags:
    """The layers: a named size, or width, heads and layers, or both. auto: the arch's own."""
    arch: str | None = option(None, "a row of model.py's table; auto is crate, or the checkpoint's",
                              choices=tuple(ARCHS))
    size: str | None = option(None, "tiny, small, base, medium or large; sets width, heads, layers",
                              displaces=("width", "heads", "head_dim", "layers"))
    width: int | None = option(None, "d", low=1)
    heads: int | None = option(None, "K", low=1)
    head_dim: int | None = option(None, "p; auto is width / heads", low=1)
    layers: int | None = option(None, "L", low=1, high=10_000)
    eta: float | None = option(None, "step of ISTA and ODL; auto is 0.1", low=0, high=1e6)
    lambd: float | None = option(None, "sparsity weight lambda; auto is 0.1, or the size's", low=0,
                                 high=1e6)
    step_size: float | None = option(None, "step of MSSA in crate-c, -n, -t; auto is 1", low=-1e6,
                                     high=1e6)
    layer_scale: float | None = option(None, "LayerScale at initialization; 0: none", low=0,
                                       high=1e6)


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
