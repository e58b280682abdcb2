"""Flags: types, ranges, presets, subcommands, and how a command ends."""
from dataclasses import dataclass

import pytest
import torch

import flags
import processes
from flags import option, UserError
from model import ConfigError
from run import RunEnded


@dataclass(kw_only=True)
class Config:
    """The rate by [J] Eq. (8), in nats. More is said of it in its own help."""
    data: str = option("shapes", "of the presets")
    width: int = option(8, "whole", low=1)
    rate: float = option(0.5, "real", above=0, high=1)
    arch: str = option("crate", "word", choices=("crate", "tost"))
    limit: int | None = option(None, "maybe, at most 100 %")
    flip: bool = option(False, "yes or no")
    size: str | None = option(None, "not the preset's width", displaces=("width",))
    prompt: str = option("", "a text")


@dataclass
class Files:
    """Reads files."""
    files: tuple = option((), "their names")
    sure: bool = option(False, "yes or no")


PRESETS = {"tiny": dict(data="shapes", width=4), "large": dict(data="shapes", width=64)}
COMMANDS = {"look": (Config, print), "read": (Files, print)}


def parse(*argv):
    return flags.parse_run(Config, PRESETS, argv, "doc", default="tiny")


def test_flags_take_their_fields_types():
    c, preset = parse("large", "--rate=0.25", "--limit", "3", "--flip", "--arch", "tost")
    assert preset == "large" and c.width == 64 and c.rate == 0.25
    assert c.limit == 3 and c.flip is True and c.arch == "tost"
    c, preset = parse("--width=9", "--limit=none", "--flip=false")
    assert preset == "tiny" and c.width == 9 and c.limit is None and c.flip is False
    c, _ = parse("large", "--size=big")       # not the preset's width
    assert (c.width, c.size) == (8, "big")
    assert parse("large", "--size=big", "--width=5")[0].width == 5
    assert parse("large", "--size=auto")[0] == parse("large")[0]


@pytest.mark.parametrize("argv, sure", [
    (["--sure", "a.jpg"], True), (["a.jpg", "--sure"], True),
    (["--sure", "False", "a.jpg"], False)])
def test_a_file_after_a_switch_is_a_file(argv, sure):
    c = flags.parse(Files, argv, "doc")
    assert (c.files, c.sure) == (["a.jpg"], sure)


@pytest.mark.parametrize("argv, says", [
    ("--aarch=tost", "did you mean --arch"), ("--rat=1", "unknown argument --rat=1"),
    ("--width=3.5", "--width: invalid int value: '3.5'"), ("--arch=tots", "one of"),
    ("--width=0", "at least 1"), ("--rate=nan", "more than 0"), ("--rate=2", "at most 1"),
    ("--flip=maybe", "invalid bool value"),
    ("--width", "--width: expected one argument"), ("--width=3 tiny", "unknown argument tiny")])
def test_bad_flags_are_one_line(argv, says):
    with pytest.raises(UserError) as error:
        parse(*argv.split())
    assert says in str(error.value) and "\n" not in str(error.value)


def test_subcommands():
    name, _, c = flags.parse_command(COMMANDS, ["look", "--width=3"], "doc")
    assert name == "look" and c.width == 3
    c = flags.parse_command(COMMANDS, "read a.png --sure=true b.png --sure".split(), "doc")[-1]
    assert c.files == ["a.png", "b.png"] and c.sure
    with pytest.raises(UserError, match="is not one of look"):
        flags.parse_command(COMMANDS, ["lok"], "doc")


@pytest.mark.parametrize("error, status, says", [
    (UserError("no\n such \tthing" + " word" * 1000), 2, "no such thing word"),
    (ConfigError("d"), 2, "d"), (RunEnded(3, "step 3"), 3, "step 3"),
    (KeyboardInterrupt(), 130, ""), (torch.OutOfMemoryError("CUDA"), 2, "does not fit in memory"),
    (OSError(28, "No space left on device", "a.pt"), 2, "No space left on device: 'a.pt'")])
def test_exit_statuses(monkeypatch, capsys, error, status, says):
    def main(argv):
        raise error
    monkeypatch.setattr("sys.argv", ["here/script.py"])
    with pytest.raises(SystemExit) as exit:
        processes.cli(main)
    err = capsys.readouterr().err
    assert exit.value.code == status and err.count("\n") == bool(says)
    assert says in err and len(err) < 330 and err.startswith("script.py: " if says else "")


def test_errors_are_told_by_their_type():
    """PyTorch's allocator is out of memory; a mistake that speaks of memory keeps its traceback; a
    closed pipe says nothing."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2 ** 50, dtype=torch.uint8)
    assert processes.ending(error.value)[0] == 2
    assert processes.ending(RuntimeError("cannot allocate memory, said MemoryError")) is None
