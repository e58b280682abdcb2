"""For every test: the repository root is importable, one thread, one seed; and small sets to train on."""
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="tests/test_survive.py with its full counts of kills, mutants and flags: ten minutes")


@pytest.fixture(scope="session")
def full(request):
    """Whether the counts are the full ones."""
    return request.config.getoption("--full")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A data directory with `shapes` of 400 + 100 pictures."""
    from data import images, prepare
    cache = tmp_path_factory.mktemp("cache")
    with images.preparing("shapes", cache) as folder:
        images.write_meta(folder, "shapes", "images", image_size=32, **prepare._draw(folder, 400, 100))
    return cache


@pytest.fixture
def script():
    """Starts `python SCRIPT ARGS...` (or torchrun with processes=N) from the repository; a Popen with text pipes."""
    started = []

    def start(*args, processes=None, **env):
        launch = [sys.executable] if processes is None else \
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
        started.append(subprocess.Popen([*launch, *map(str, args)], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]
    yield start
    for process in started:
        process.kill()
        process.communicate()
