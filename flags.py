"""
Flags: a dataclass is a command line and a field is a flag; and how a command ends.
"""
import argparse
import difflib
import inspect
import operator
import os
import re
import signal
import sys
import typing
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent
CACHE = ROOT / "data" / "cache"         # where prepared data lies by default


# ---- How a command ends -------------------------------------------------------------------------
class UserError(Exception):
    """Something the user can mend, in one line."""
    exit_status = 2


class Diverged(Exception):
    """A loss that is not finite."""
    exit_status, shared = 3, True       # every process raises it


class Stopped(Exception):
    """A saved SIGINT or SIGTERM; the exit status is 128 + the signal's number, as in shells."""
    shared = True

    def __init__(self, number):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_status = 128 + number


TOO_LARGE = ("this does not fit in memory: try a smaller --micro_batch, where there is one, or "
             "--batch_size, or a smaller model")
ENDS = (    # (error, words in its message, exit status, line), of errors without an exit_status
    (KeyboardInterrupt, "", 130, ""),
    (BrokenPipeError, "", 0, ""),               # `... | head`: the reader has what it wanted
    ((MemoryError, torch.OutOfMemoryError), "", 2, TOO_LARGE),
    (Exception, "allocate memory|Storage size", 2, TOO_LARGE),
    (UnicodeDecodeError, "", 2, "not UTF-8: {0}"),                          # of stdin
    (OSError, "", 2, "{0}"),
    (Exception, "No space left", 2, "{0} (perhaps in TMPDIR, where torch.compile writes)"))


def cli(main):
    """Runs main(argv) and exits: 0 done, 2 a user's error, 3 a loss that is not finite, 130 / 143
    after a saved signal. Each of these errors is one line on stderr."""
    signal.signal(signal.SIGINT, interrupt)             # shells ignore it in the background
    for name in ("stdout", "stderr"):                   # None where the shell has closed them
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))
    status = 0
    try:
        main(sys.argv[1:])
        sys.stdout.flush()                              # a full disk shows here at the latest
    except (KeyboardInterrupt, Exception) as error:
        status, line = getattr(error, "exit_status", None), "{0}"
        for kind, words, code, text in ENDS:
            if status is None and isinstance(error, kind) and re.search(words, str(error)):
                status, line = code, text
        if status is None:
            raise                                       # a mistake of the program
        # Before the processes join, all meet the same error, and some later errors are shared
        # too: then one process speaks. Any other error may be one process's own.
        alone = dist.is_initialized() and not getattr(error, "shared", False)
        name = Path(sys.argv[0]).name + (f", rank {dist.get_rank()}" if alone else "")
        printable = "".join(c if c.isprintable() else " " for c in line.format(error))
        if line and (alone or os.environ.get("LOCAL_RANK", "0") == "0"):
            sys.stderr.write(f"{name}: {' '.join(printable.split())[:300]}\n")
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    flush_or_mute()
    if dist.is_initialized():
        if status == 0:
            dist.barrier()          # gloo aborts a process whose peers have left before it
        dist.destroy_process_group()
        os._exit(status)            # skips gloo's destructors, which crash now and then
    sys.exit(status)


def interrupt(number, frame):
    """The first Ctrl-C ends a command. Another one would end that ending with a traceback."""
    signal.signal(number, lambda *_: os._exit(130))
    raise KeyboardInterrupt


def flush_or_mute():
    """Writes what stdout still holds, or drops it: else Python would fail to write it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ---- Fields -------------------------------------------------------------------------------------
def option(default, help, displaces=(), positional=False, **limits):
    """A field with its --help text and limits: choices, low <= value <= high, value > above.

    Given on the command line, it removes the preset's values of the fields in `displaces`. One
    that is `positional`, a tuple, takes the words that are no flags."""
    return field(default=default, metadata=dict(help=help, displaces=displaces,
                                                positional=positional, **limits))


@dataclass(kw_only=True)
class DeviceFlags:
    """Where and in what precision to compute, and where data lies."""
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there",
                         choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast; auto is bfloat16 where there are instructions for it",
                        choices=("auto", "float32", "bfloat16"))
    data_dir: str = option(str(CACHE), "where prepared data lies")
    workers: int = option(8, "processes that read a data set too large for memory", low=0)


@dataclass(kw_only=True)
class RunFlags(DeviceFlags):
    """The flags of every training script."""
    out_dir: str | None = option(None, "where the run writes; auto is out/TASK-PRESET[-DATA]")
    resume: bool = option(False, "continue the run in out_dir, with the same flags")
    overwrite: bool = option(False, "delete the run in out_dir first")
    seed: int = option(0, "the same seed gives the same run", low=0)
    compile: bool | None = option(None, "torch.compile the model; auto: on cuda")
    log_every: int = option(20, "steps between lines of metrics.jsonl", low=1)
    eval_every: int = option(0, "steps between evaluations; 0: an epoch, or 1000 of text", low=0)
    save_every: int = option(0, "steps between checkpoints; 0: only at evaluations", low=0)


@dataclass(kw_only=True)
class ModelFlags:
    """The layers: a named size, or width, heads and layers, or both. auto: the arch's own."""
    arch: str | None = option(None, "a row of model.py's ARCHS; auto: crate, or the checkpoint's")
    size: str | None = option(None, "tiny, small, base, medium or large; sets width, heads, layers",
                              displaces=("width", "heads", "head_dim", "layers"))
    width: int | None = option(None, "d", low=1)
    heads: int | None = option(None, "K", low=1)
    head_dim: int | None = option(None, "p; auto is width / heads", low=1)
    layers: int | None = option(None, "L", low=1, high=10_000)
    eta: float | None = option(None, "step of ISTA and ODL; auto is 0.1", low=0)
    lambd: float | None = option(None, "sparsity weight; auto is 0.1, in train_mae.py 0.5", low=0)
    step_size: float | None = option(None, "step of MSSA in crate-c, -n, -t; auto is 1")
    layer_scale: float | None = option(None, "LayerScale at initialization; 0: none", low=0)


def model_fields(cls, config, **given):
    """`given`, and every field of `cls` that `config` sets: how flags reach a model."""
    shared = {f.name: getattr(config, f.name, None) for f in fields(cls)}
    return {k: v for k, v in shared.items() if v is not None} | given


def needed(value, flag):
    """The value of a flag that has no default."""
    if value is None:
        raise UserError(f"--{flag} is needed")
    return value


def not_one_of(word, words):
    """"X is not one of a, b, c, did you mean b?", for messages about names."""
    hint = "".join(f", did you mean {near}?" for near in difflib.get_close_matches(word, words, 1))
    return f"{word} is not one of {', '.join(words)}{hint}"


# ---- Command lines ------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Argparse whose errors are one line, and status 2."""

    def error(self, message):
        raise UserError(message)


LIMITS = dict(choices=("one of", lambda value, choices: value in choices),
              low=("at least", operator.ge), above=("more than", operator.gt),
              high=("at most", operator.le))


def reader(field, kind, optional):
    """The function by which argparse turns the text of a flag into its value."""
    def read(text):
        if optional and text.lower() in ("none", "auto"):
            return None
        value = bool(("false", "true").index(text.lower())) if kind is bool else kind(text)
        for name, (words, holds) in LIMITS.items():
            limit = field.metadata.get(name)
            if limit is not None and not holds(value, limit):
                raise argparse.ArgumentTypeError(f"{text} is not {words} {limit}")
        return value
    read.__name__ = {int: "whole number", float: "number"}.get(kind, kind.__name__)
    return read


def parse(config_class, presets, argv, doc, default=None, subcommand=""):
    """[PRESET] [--name=value ...] as (config, name); presets: {preset: {field: value}}. `name` is
    for the run's folder: PRESET, or PRESET-DATA where --data is not the preset's. A bare --name
    means true. Raises UserError for an unknown name, a wrong type and a value out of range."""
    argv, name, flags = list(argv), default, {f.name: f for f in fields(config_class)}
    if presets and argv and not argv[0].startswith("-"):
        name = argv.pop(0)
        if name not in presets:
            raise UserError(f"preset {not_one_of(name, presets)}")
    values, hints = presets.get(name, {}), typing.get_type_hints(config_class)
    spec = sys.modules["__main__"].__spec__                 # of python -m
    command = f"-m {spec.name}" if spec else Path(sys.argv[0]).name + subcommand
    parser = Parser(
        usage=f"python {command}{' [PRESET]' if presets else ''} [--name=value ...]",
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, width=100),
        description=inspect.cleandoc(doc), argument_default=argparse.SUPPRESS, allow_abbrev=False,
        epilog=f"presets ({default} by default): {', '.join(presets)}" if presets else None)
    for flag, f in flags.items():
        if f.metadata["positional"]:
            parser.add_argument(flag, nargs="*", help=f.metadata["help"])
            continue
        kind, *optional = typing.get_args(hints[flag]) or [hints[flag]]         # kind | None
        value = values.get(flag, f.default)
        shown = f"{f.metadata['help']} [{'auto' if value is None else value}]".replace("%", "%%")
        parser.add_argument(f"--{flag}", help=shown,
                            metavar="|".join(f.metadata.get("choices", [kind.__name__])),
                            type=reader(f, kind, optional))
        if kind is bool:
            argv = [f"{word}=true" if word == f"--{flag}" else word for word in argv]
    given, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].strip("-").partition("=")[0], flags, 1)
        hint = f", did you mean --{near[0]}?" if near else ""
        raise UserError(f"unknown argument {unknown[0]}{hint} (a preset comes first; see --help)")
    given = {flag: tuple(v) if isinstance(v, list) else v for flag, v in vars(given).items()}
    displaced = {other for flag in given for other in flags[flag].metadata["displaces"]}
    config = config_class(**{k: v for k, v in values.items() if k not in displaced} | given)
    if name and values.get("data") != getattr(config, "data", None):
        name += f"-{config.data}"
    return config, name


def parse_command(commands, argv, doc):
    """SUBCOMMAND [--name=value ...] as (subcommand, config); `commands`: name -> dataclass."""
    if not argv or argv[0] in ("--help", "-h"):
        print(f"{inspect.cleandoc(doc)}\n\nsubcommands, each with its own --help:")
        for name, config_class in commands.items():
            sentence = re.split(r"(?<!Eq)\.(?: |$)", " ".join(config_class.__doc__.split()))[0]
            print(f"  {name:12}{sentence}")
        sys.exit(0 if argv else 2)
    if argv[0] not in commands:
        raise UserError(f"subcommand {not_one_of(argv[0], commands)}")
    name, config_class = argv[0], commands[argv[0]]
    return name, parse(config_class, {}, argv[1:], config_class.__doc__, subcommand=f" {name}")[0]
