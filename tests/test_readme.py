"""What the README says of the code is so: lines, scripts, presets and flags."""
import re
import shlex
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_the_map_points_at_its_operators():
    source = (ROOT / "model.py").read_text().splitlines()
    entries = re.findall(r"\[`(\w+)`\]\(model\.py#L(\d+)\)", README)
    assert len(entries) > 15
    for name, line in entries:
        assert re.match(rf"(def|class) {name}\b", source[int(line) - 1]), f"{name} is not at line {line} of model.py"


def test_every_command_parses():
    import train_gpt
    import train_mae
    import train_simdino
    import train_vit
    scripts = {f"{module.__name__}.py": (module, "imagenet") for module in (train_vit, train_mae, train_simdino)}
    scripts["train_gpt.py"] = (train_gpt, "openwebtext")
    seen = 0
    for line in re.findall(r"(?:python|torchrun[^\n`]*?) (train_\w+\.py[^\n`#&]*)", README):
        name, *argv = shlex.split(line)
        assert (ROOT / name).exists(), name
        if name in scripts and "PRESET" not in line:
            module, default = scripts[name]
            common.parse(module.Config, module.PRESETS, argv, "", default=default)      # UserError if it does not
            seen += 1
    assert seen > 8
    assert all((ROOT / script).exists() for script in re.findall(r"python ([\w/]+\.py)", README))
