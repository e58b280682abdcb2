"""Command lines: a flag for each field of a dataclass."""
import argparse
import difflib
import inspect
import operator
import sys
import typing
from dataclasses import dataclass, field, fields, MISSING
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CACHE = ROOT / "data" / "cache"         # where prepared data lies by default


class UserError(Exception):
    """Something the user can mend, in one line."""
    exit_status = 2


# ---- Fields -------------------------------------------------------------------------------------
LIMITS = dict(choices=("one of", lambda v, words: v in words), low=("at least", operator.ge),
              above=("more than", operator.gt), high=("at most", operator.le))


def option(default, help, displaces=(), fixed=False, **limits):
    """A dataclass field with its --help text and limits. With MISSING it is required. If it is
    given, the preset's values of `displaces` do not count. A run cannot be resumed with another
    value of a `fixed` flag: its optimizer's state or the order of its data would not fit."""
    return field(default=default, metadata=dict(help=help, displaces=displaces, fixed=fixed,
                                                limits=limits))


# ---- Flags of several commands ------------------------------------------------------------------
@dataclass(kw_only=True)
class DeviceFlags:
    device: str = option("auto", "auto: cuda if there is a GPU", choices=("auto", "cuda", "cpu"))


@dataclass(kw_only=True)
class TypeFlags:
    dtype: str = option("auto", "of training and scores; auto is bfloat16 where that is fast",
                        choices=("auto", "float32", "bfloat16"))


@dataclass(kw_only=True)
class DataFlags:
    data: str | None = option(None, "data set; auto is what the checkpoint was trained on")
    data_dir: str = option(str(CACHE), "where prepared data lies")


@dataclass(kw_only=True)
class CheckpointFlags(DeviceFlags):
    ckpt: str = option(MISSING, "a checkpoint: ours, a published one, pretrained:NAME")
    heads: int | None = option(None, "K of a published file, which does not hold it", low=1)


@dataclass(kw_only=True)
class OpenFlags(CheckpointFlags, DataFlags):
    untrained: bool = option(False, "random weights instead; layers and experiments show both")
    seed: int = option(0, "of the random weights, and of what else a command draws", low=0)


@dataclass(kw_only=True)
class SplitFlags(OpenFlags):
    split: str = option("val", "which part of the data", choices=("train", "val"))


@dataclass(kw_only=True)
class SampleFlags(SplitFlags):
    samples: int = option(100, "images or windows of text, spread over the split", low=1)
    batch_size: int = option(20, "samples at once; all their attention maps are kept", low=1)


@dataclass(kw_only=True)
class ModelFlags:
    """The layers: a named size, or width, heads and layers, or both."""
    arch: str | None = option(None, "crate, transformer or another row of model.py's ARCHS; flags "
                              "that its layers do not read do nothing. Auto: crate, or the file's")
    size: str | None = option(None, "tiny, small, base, medium or large; sets width, heads, layers",
                              displaces=("width", "heads", "head_dim", "layers"))
    width: int | None = option(None, "d; auto is the size's or the checkpoint's, else 384", low=1)
    heads: int | None = option(None, "K; auto likewise, else 6", low=1)
    head_dim: int | None = option(None, "p; auto is width / heads", low=1)
    layers: int | None = option(None, "L; auto likewise, else 12", low=1, high=10_000)
    eta: float | None = option(None, "step of ISTA and ODL; auto: 0.1 or the checkpoint's", low=0)
    lambd: float | None = option(None, "sparsity weight; auto: 0.1 (mae: 0.5) or likewise", low=0)
    expansion: int | None = option(None, "C, width of MLP and ODL in units of d; auto: 4", low=1)
    ista_steps: int | None = option(None, "of ODL's code; auto: 2", low=1)
    step_size: float | None = option(None, "of crate-c, -n, -t: s of MSSA; auto: 1", low=0)
    mm_eps: float | None = option(None, "of crate-mm: its distortion; auto: 0.5", above=0)


def model_fields(cls, config, **given):
    """`given`, and every field of `cls` that `config` sets: how flags reach a model."""
    shared = {f.name: getattr(config, f.name, None) for f in fields(cls)}
    return {k: v for k, v in shared.items() if v is not None} | given


def not_one_of(word, words):
    """"X is not one of a, b, c", for messages about names."""
    return f"{word} is not one of {', '.join(words)}"


# ---- Command lines ------------------------------------------------------------------------------
class Parser(argparse.ArgumentParser):
    """Argparse whose errors are one line, and status 2."""

    def error(self, message):
        raise UserError(message)


def boolean(text):
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def converter(f, kind, optional):
    """The function that turns a flag's text into its value."""
    def convert(text):
        if optional and text.lower() in ("none", "auto"):
            return None
        try:
            value = boolean(text) if kind is bool else kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid {kind.__name__} value: {text!r}") from None
        for name, limit in f.metadata["limits"].items():
            words, holds = LIMITS[name]
            if not holds(value, limit):
                raise argparse.ArgumentTypeError(f"{text} is not {words} {limit}")
        return value
    return convert


def add_flag(parser, f, default):
    """Adds a flag to `parser` for the dataclass field f. A field of type tuple is no flag: it gets
    the words of the command line that belong to none, such as file names."""
    kind, *optional = typing.get_args(f.type) or [f.type]       # (int, NoneType) of int | None
    if kind is tuple:
        parser.add_argument(f.name, nargs="+" if default is MISSING else "*",
                            help=f.metadata["help"])
        return
    words = f.metadata["limits"].get("choices", ["[bool]" if kind is bool else kind.__name__])
    shown = "" if default is None else f" [{'needed' if default is MISSING else default}]"
    parser.add_argument(
        f"--{f.name}", help=f"{f.metadata['help']}{shown}".replace("%", "%%"),
        metavar="|".join(words), type=converter(f, kind, optional), required=default is MISSING)


def with_switches_on(argv, flags):
    """--flip as --flip=true: else argparse takes a file's name after it for its value."""
    switches = [f"--{f.name}" for f in flags.values() if f.type in (bool, bool | None)]
    values = "true", "false", "auto", "none"
    return [f"{word}=true" if word in switches and after.lower() not in values else word
            for word, after in zip(argv, [*argv[1:], ""])]


def parse(config_class, argv, doc, preset=None, usage="", epilog=None):
    """[--name=value ...] as config_class, over the values of a preset. Raises UserError."""
    flags, preset = {f.name: f for f in fields(config_class)}, preset or {}
    parser = Parser(usage=f"%(prog)s{usage} [--name=value ...]", epilog=epilog,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    description=inspect.cleandoc(doc), argument_default=argparse.SUPPRESS,
                    allow_abbrev=False)
    for f in flags.values():
        add_flag(parser, f, preset.get(f.name, f.default))
    namespace, unknown = parser.parse_known_intermixed_args(with_switches_on(argv, flags))
    if unknown:
        near = difflib.get_close_matches(unknown[0].strip("-").partition("=")[0], flags, 1, 0.7)
        hint = f", did you mean --{near[0]}?" if near else "; --help says what comes where"
        raise UserError(f"unknown argument {unknown[0]}{hint}")
    given = vars(namespace)
    displaced = [other for name, value in given.items() if value is not None
                 for other in flags[name].metadata["displaces"]]
    return config_class(**{k: v for k, v in preset.items() if k not in displaced} | given)


def parse_run(config_class, presets, argv, doc, default=None):
    """[PRESET] [--name=value ...] as (config, name of the run's folder)."""
    named = argv and not argv[0].startswith("-")
    name, *rest = argv if named else [default, *argv]
    if name not in presets:
        raise UserError(f"preset {not_one_of(name, presets)}")
    config = parse(config_class, rest, doc, presets[name], " [PRESET]",
                   f"presets ({default} by default): {', '.join(presets)}")
    return config, name if config.data == presets[name]["data"] else f"{name}-{config.data}"


def parse_command(commands, argv, doc):
    """SUBCOMMAND [--name=value ...] as (subcommand, its function, config); `commands` has a
    (dataclass, function) for each subcommand."""
    if not argv or argv[0] in ("--help", "-h"):
        print(inspect.cleandoc(doc))
        sys.exit(0 if argv else 2)
    name, *rest = argv
    if name not in commands:
        raise UserError(f"subcommand {not_one_of(name, commands)}")
    config_class, function = commands[name]
    return name, function, parse(config_class, rest, config_class.__doc__, usage=f" {name}")
