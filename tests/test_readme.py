"""What the documents say of the code is so: names, files, headings, presets, flags, the diff."""
import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
from PIL import Image

import model

ROOT = Path(__file__).resolve().parents[1]
FILES = [*ROOT.glob("*.md"), *ROOT.glob("records/*.md"), *ROOT.glob("docs/*.md"),
         ROOT / "data" / "pretrained" / "README.md"]
TEXTS = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files_and_headings(name):
    for file, heading in re.findall(r"\]\(([\w./-]*)#?([\w-]*)\)", TEXTS[name]):
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), file
        if heading:
            headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in headings]
            assert heading in slugs


def test_the_names_beside_the_equations_exist():
    table, = re.findall(r"name in model.py \|\n((?:\|.*\n)+)", TEXTS["README.md"])
    names = re.findall(r"`(\w+)`", " ".join(row.rsplit("|", 2)[1] for row in table.splitlines()))
    assert len(names) > 6 and all(hasattr(model, name) for name in names)


class Parsed(Exception):
    """A command's flags are good; it need not run."""


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_parses(name, monkeypatch):
    """UserError if a preset, subcommand or flag does not exist."""
    command = (r"(?:python|torchrun[^\n`|]*?) (?:-m (experiments\.\w+)|(?:data/)?(\w+)\.py)"
               r"([^\n`#&|;]*)")
    for experiment, script, words in re.findall(command, TEXTS[name].replace("\\\n", " ")):
        if script == "prepare":
            continue
        module = importlib.import_module(experiment or script)
        for parser in {"parse", "parse_command"} & set(vars(module)):
            def check(*args, real=getattr(module, parser), **options):
                real(*args, **options)
                raise Parsed
            monkeypatch.setattr(module, parser, check)
            words = re.sub(r"--\w+=\$?[A-Z]+\b", "", words)     # capitals stand for any value
            with pytest.raises(Parsed):
                module.main(shlex.split(words))


def test_the_lines_of_python_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, size in (("a.png", (90, 60)), ("b.jpg", (50, 70))):
        Image.new("RGB", size, "orange").save(file)
    code, = re.findall(r"```python\n(from .*?)```", TEXTS["README.md"], re.S)
    found = {}
    exec(code, found)
    assert found["logits"].shape == (2, 10) and len(found["trace"]) == 8
    assert torch.equal(found["trace"][-1].out, found["loaded"].encoder(found["x"]))


@pytest.mark.parametrize("place", [0, 1])
def test_the_diffs_apply(place):
    """What they remove stands in crate.py as it is printed; the changed file trains."""
    diff = re.findall(r"```diff\n(.*?)```", TEXTS["docs/QUESTIONS.md"], re.S)[place]
    before, after = ("\n".join(line[1:] for line in diff.splitlines() if line[0] != sign)
                     for sign in "+-")
    code = (ROOT / "crate.py").read_text()
    assert before in code
    changed = {"__name__": "changed"}
    exec(code.replace(before, after), changed)
    x, y = changed["shapes"](20, seed=0)
    model = changed["CRATE"](d=16, K=2, L=2, P=8)
    first = torch.nn.functional.cross_entropy(model(x), y)
    changed["train"](model, x, y, steps=30, batch=20)
    assert torch.nn.functional.cross_entropy(model(x), y) < first
