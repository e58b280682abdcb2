"""Flags: types, ranges, presets, subcommands, and how a command ends."""
import signal
from dataclasses import dataclass

import pytest

import flags
from flags import UserError, option
from model import ConfigError, ImageConfig


@dataclass(kw_only=True)
class Config(flags.RunFlags):
    """The rate by [J] Eq. (8), in nats. More is said of it in its own help."""
    width: int = option(8, "whole", low=1)
    rate: float = option(0.5, "real", above=0, high=1)
    arch: str = option("crate", "word; elsewhere it is --model", choices=("crate", "tost"))
    limit: int | None = option(None, "maybe, at most 100 %")
    flip: bool = option(False, "yes or no")
    size: str | None = option(None, "instead of the preset's width", displaces=("width",))


@dataclass(kw_only=True)
class Files(flags.DeviceFlags):
    """Reads files."""
    files: tuple = option((), "their names", positional=True)
    sure: bool = option(False, "yes or no")


PRESETS = {"tiny": dict(width=4), "large": dict(width=64)}
COMMANDS = {"look": Config, "read": Files}


def parse(*argv):
    return flags.parse(Config, PRESETS, argv, "doc", default="tiny")


def test_flags_take_their_fields_types():
    c, preset = parse("large", "--rate=0.25", "--limit", "3", "--flip", "--arch", "tost")
    assert preset == "large" and c.width == 64 and c.rate == 0.25
    assert c.limit == 3 and c.flip is True and c.arch == "tost"
    c, preset = parse("--width=9", "--limit=none", "--flip=false", "--compile=true")
    assert preset == "tiny" and c.width == 9
    assert c.limit is None and c.flip is False and c.compile is True
    assert parse("large", "--size=big")[0].width == 8               # not the preset's any more
    assert parse("large", "--size=big", "--width=5")[0].width == 5


@pytest.mark.parametrize("argv, says", [
    (["larg"], "did you mean large"), (["--widht=3"], "did you mean --width"),
    (["--model=tost"], "did you mean --arch"), (["--rat=1"], "unknown flag --rat"),
    (["--width=3.5"], "whole number"), (["--width=99999999999"], "too large"),
    (["--width=0"], "at least 1"), (["--rate=0"], "more than 0"), (["--rate=2"], "at most 1"),
    (["--rate=nan"], "not finite"), (["--rate=x"], "a number"), (["--arch=crat"], "did you mean crate"),
    (["--flip=maybe"], "true or false"), (["--width"], "--width: expected one argument"),
    (["tiny", "extra"], "unknown argument"), (["-w3"], "unknown argument"),
])
def test_bad_flags_are_one_line(argv, says):
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_help_names_every_flag_with_the_presets_value(capsys):
    with pytest.raises(SystemExit) as exit:
        parse("large", "--help")
    words = " ".join(capsys.readouterr().out.split())
    assert exit.value.code == 0 and "presets (tiny by default): tiny, large" in words
    assert "--width int whole [64]" in words and "maybe, at most 100 % [auto]" in words
    assert all(f"--{name} " in words for name in Config.__dataclass_fields__)


def test_subcommands(capsys):
    name, c = flags.parse_command(COMMANDS, ["look", "--width=3"], "doc")
    assert name == "look" and c.width == 3
    _, c = flags.parse_command(COMMANDS, ["read", "a.png", "--sure", "b.png"], "doc")
    assert c.files == ("a.png", "b.png") and c.sure
    for argv in (["lok"], ["look", "here"], ["read", "--widht=3"]):
        with pytest.raises(UserError, match="did you mean look|unknown"):
            flags.parse_command(COMMANDS, argv, "doc")
    with pytest.raises(SystemExit) as exit:
        flags.parse_command(COMMANDS, [], "doc")
    assert exit.value.code == 2
    assert "  look        The rate by [J] Eq. (8), in nats\n" in capsys.readouterr().out


def test_set_fields_leaves_what_is_auto_to_the_model():
    c = parse("--width=12")[0]
    c.heads, c.unknown = None, 7
    assert flags.set_fields(ImageConfig, c, classes=3) == dict(arch="crate", width=12, classes=3)


@pytest.mark.parametrize("error, status, says", [
    (UserError("no\n such \tthing\x1b[31m"), 2, "no such thing"), (ConfigError("heads"), 2, "heads"),
    (flags.Diverged("step 3"), 3, "step 3"), (flags.Stopped(signal.SIGINT), 130, "SIGINT"),
    (KeyboardInterrupt(), 130, ""), (flags.Stopped(signal.SIGTERM), 143, "SIGTERM"),
    (MemoryError(), 2, "--micro_batch"), (BrokenPipeError(), 0, ""),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "does not fit in memory"),
    (OSError(28, "No space left on device", "a.pt"), 2, "No space left on device: a.pt"),
    (UserError("word " * 1000), 2, "word word"),
])
@pytest.mark.parametrize("world", [1, 2])
def test_exit_statuses(monkeypatch, capsys, error, status, says, world):
    """An error is one line of every process, since the others may not have it."""
    def main(argv):
        raise error
    monkeypatch.setattr("sys.argv", ["here/script.py"])
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as exit:
        flags.cli(main)
    err, name = capsys.readouterr().err, "script.py, rank 1: " if world > 1 else "script.py: "
    assert exit.value.code == status and err.count("\n") == bool(says)
    assert says in err and err.startswith(name if says else "")
    assert len(err) < 330 and err.replace("\n", "").isprintable()


def test_stdout_on_a_full_disk_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["here/script.py"])
    for flush in (False, True):
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", full)
            with pytest.raises(SystemExit) as exit:
                flags.cli(lambda argv: print("a result", flush=flush))
        assert exit.value.code == 2
        assert capsys.readouterr().err == "script.py: No space left on device\n"


def test_a_mistake_of_the_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        flags.cli(lambda argv: 1 / 0)
