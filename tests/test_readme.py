"""What README.md and RESULTS.md say of the code is so: lines, files, presets and flags."""
import importlib
import re
import shlex
from pathlib import Path

import pytest

from flags import parse, parse_command

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {name: (ROOT / name).read_text() for name in ("README.md", "RESULTS.md")}
DEFAULTS = dict(train_vit="imagenet", train_mae="imagenet", train_simdino="imagenet",
                train_gpt="openwebtext")


def test_the_map_points_at_its_operators():
    entries = re.findall(r"\[`([\w.]+)`\]\((\w+\.py)#L(\d+)\)", TEXTS["README.md"])
    assert len(entries) > 15
    for name, file, line in entries:
        source = (ROOT / file).read_text().splitlines()[int(line) - 1]
        defined = rf"\s*(def|class) {name}\b|{name} = "
        assert re.match(defined, source), f"{name} is not at line {line} of {file}"


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files(name):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", TEXTS[name])
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_parses(name):
    """UserError if a preset, subcommand or flag does not exist."""
    command = r"(?:python|torchrun[^\n`|]*?) ((?:data/)?\w+\.py)([^\n`#&|<>]*)"
    seen = 0
    for script, words in re.findall(command, TEXTS[name].replace("\\\n", " ")):
        assert (ROOT / script).exists(), script
        words = re.sub(r"--\w+=[A-Z]\b", "", words)    # a letter stands for any number
        module, argv = script.removesuffix(".py"), shlex.split(words)
        if module in DEFAULTS and not {"PRESET", "..."} & set(argv):
            script = importlib.import_module(module)
            parse(script.Config, script.PRESETS, argv, "", DEFAULTS[module])
            seen += 1
        elif module in ("evaluate", "analyze", "bench") and argv and "..." not in argv:
            commands = importlib.import_module(module).COMMANDS
            parse_command({k: config for k, (config, _) in commands.items()}, argv, "")
            seen += 1
    assert seen > 5


def test_python_of_the_readme_runs(monkeypatch):
    """What the block says of shapes is so."""
    monkeypatch.chdir(ROOT)
    block, = re.findall(r"```python\n(.*?)```", TEXTS["README.md"], re.S)
    names = {}
    exec(block, names)
    assert names["logits"].shape == (8, 10) and names["rates"].shape == (8,)
    d = names["loaded"].encoder.config.width
    assert names["Z"].shape == (8, 65, d) and names["features"].shape == (8, d)
    assert names["maps"].shape == (8, 4, 65, 65)
    right = names["logits"].argmax(1) == names["torch"].from_numpy(names["labels"])
    assert right.float().mean() > 0.8
