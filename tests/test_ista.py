"""The optimum of (42) is one, and the table of experiments/ista.py holds what it claims."""
from dataclasses import replace

import pytest
import torch
from helpers import scrambled, write_model
from test_model import assert_near

from checkpoint import load_model
from data import images
from experiments import ista
from model import ImageClassifier, ImageConfig

LAMBD = 0.3


@pytest.fixture
def problem():
    """X (2, 7, 6) and D (6, 9), float64."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64)
    return X, torch.randn(6, 9, generator=generator, dtype=torch.float64) / 2


def test_optimum(problem):
    """KKT: D^*(D A - X) + lambda is 0 where A > 0, and not negative where A = 0. No other code is
    better, the bound is tight, and a loose optimum is within its tolerance."""
    X, D = problem
    A = ista.optimum(X, D, LAMBD, 1e-10)
    gradient = (A @ D.mT - X) @ D + LAMBD
    assert (A >= 0).all() and (A > 0).any() and (A == 0).any()
    assert gradient[A > 0].abs().max() < 1e-4 and gradient.min() > -1e-4
    least = sum(ista.lasso(A, X, D, LAMBD))
    assert_near(ista.lower_bound(A, X, D, LAMBD), least, 1e-6)
    for other in (torch.zeros_like(A), 1.01 * A, 0.99 * A, A + 1e-3, torch.rand_like(A)):
        assert (sum(ista.lasso(other, X, D, LAMBD)) > least).all()
        assert (ista.lower_bound(other, X, D, LAMBD) <= least + 1e-9).all()
    loose = sum(ista.lasso(ista.optimum(X, D, LAMBD, 0.05), X, D, LAMBD))
    assert (least <= loose).all() and (loose <= least / 0.95).all()
    for orthogonal in (torch.eye(6).double(), torch.linalg.qr(D)[0]):       # the closed form
        wanted = (X @ orthogonal - LAMBD).relu()
        assert_near(ista.optimum(X, orthogonal, LAMBD, 1e-12), wanted, 1e-5)


@pytest.mark.parametrize("arch", ["crate", "crate-alpha"])
@torch.no_grad()
def test_table(tmp_path, cache, arch):
    path = str(tmp_path / "a.pt")
    wider = dict(expansion=2) if arch == "crate-alpha" else {}
    model = ImageClassifier(ImageConfig(arch=arch, width=16, heads=2, layers=2, image_size=32,
                                        patch_size=8, classes=10, **wider))
    write_model(path, scrambled(model), "vit", images.load("shapes", cache).meta())
    flags = [f"--data_dir={cache}", "--device=cpu", "--samples=6", "--batch_size=4", "--scored=30"]
    found = ista.main([f"--ckpt={path}", *flags])
    names = ["step", "zero", "optimum"]
    if arch == "crate":
        names += ["start", "relu", "threshold", "best_step"]
    rows = {(row["layer"], row["code"]): row for row in found}
    assert list(rows) == [(l, name) for l in (1, 2) for name in names]
    for l in (1, 2):
        assert all(row["lasso"] == pytest.approx(row["l1"] + row["fit"]) for row in rows.values())
        assert rows[l, "zero"]["error"] == 1 and rows[l, "zero"]["nonzeros"] == 0
        least = rows[l, "optimum"]["lasso"]
        assert all(least < 1.01 * rows[l, name]["lasso"] for name in names if name != "start")
        best = rows[l, names[-1]]["lasso"]          # of ten eta, among them this model's
        assert best <= rows[l, "step"]["lasso"] or arch != "crate"
    if arch == "crate-alpha":                           # D = 0 would leave nothing of step 2
        assert ista.without_dictionary(load_model(path), None) is None
        return
    # the model with D = 0 is crate-relu
    relu = ImageClassifier(replace(model.config, arch="crate-relu")).eval()
    relu.load_state_dict({k: v for k, v in model.state_dict().items() if ".D" not in k})
    c = ista.Sparsify(ckpt="", data_dir=str(cache), device="cpu", scored=30, batch_size=7)
    wanted = ista.scores(load_model(path)._replace(model=relu), c)
    assert len(wanted) == 30
    without = ista.without_dictionary(load_model(path), c)
    assert without["score_without_D"] == pytest.approx(wanted.mean().item())
