"""SimDINO and DINO: losses against plain loops, views, schedules, collapse, the encoder after."""
import copy
import math

import numpy as np
import pytest
import torch
from helpers import metrics, same, VIEWS
from torch import nn

import checkpoint
import evaluate
import train_simdino
from data import augment, images
from flags import parse_run
from model import coding_rate
from processes import derive_seed, Processes

ONE = Processes("cpu")


def config(*flags):
    return parse_run(train_simdino.Config, train_simdino.PRESETS, [*VIEWS, *flags], "")[0]


def unit(*shape):
    return nn.functional.normalize(torch.randn(*shape, dtype=torch.float64), dim=-1)


def mean_by_hand(student, teacher, term):
    terms = [term(teacher[g, i], student[v, i]) for g in range(2) for v in range(len(student))
             for i in range(student.shape[1]) if v != g]
    return sum(terms) / len(terms)


def distance(t, s):
    return 0.5 * (t - s).square().sum()


def cross_entropy(center, temperature):
    def term(t, s):
        target, guess = torch.exp((t - center) / temperature), torch.exp(s / 0.1)
        return -(target / target.sum() * torch.log(guess / guess.sum())).sum()
    return term


@pytest.mark.parametrize("local_views", [0, 1, 4])
def test_losses_are_means_over_pairs_of_different_views(local_views):
    student, teacher = unit(2 + local_views, 5, 7), unit(2, 5, 7)
    center = 0.1 * torch.randn(7, dtype=torch.float64)
    found = train_simdino.squared_distance(student, teacher)
    torch.testing.assert_close(found, mean_by_hand(student, teacher, distance))
    found = train_simdino.dino_loss(student.float(), teacher.float(), center.float(), 0.05)
    by_hand = mean_by_hand(student, teacher, cross_entropy(center, 0.05))
    assert found.item() == pytest.approx(by_hand.item(), rel=1e-5)


@pytest.fixture
def shapes(cache):
    return images.load("shapes", cache=cache)


def make_views(c, data, index=range(20), step=3, rows=slice(0, 20)):
    pixels = torch.tensor(data.train.images[index])
    return train_simdino.make_views(pixels[rows], c, data, step, rows)


def test_views_depend_on_seed_step_and_row(shapes):
    whole = make_views(config("--blur=2"), shapes)
    for other in (make_views(config("--blur=2"), shapes, step=4),
                  make_views(config("--blur=2", "--seed=1"), shapes)):
        assert all((a != b).flatten(2).any(2).all() for a, b in zip(whole, other))
    for v, part in zip(whole, make_views(config("--blur=2"), shapes, rows=slice(5, 15))):
        assert (part - v[:, 5:15]).abs().max() < 1e-5       # what one process of several sees
        # no image is seen twice alike
        assert all((v[a] != v[b]).flatten(1).any(1).all() for a in range(len(v)) for b in range(a))


def test_which_views_are_blurred_and_solarized(shapes, monkeypatch):
    """With the released probabilities; here an operation adds 10 to the pixels of its images."""
    for name in ("gaussian_blur", "solarize"):
        monkeypatch.setattr(augment, name, lambda x, rng, p, *_: x + 10 * p.view(-1, 1, 1, 1))
    monkeypatch.setattr(augment, "normalize", lambda x, mean, std: x)
    views = make_views(config("--blur=2"), shapes)
    for v, expected in zip(views, ([10, 1 + 2], [5, 5])):
        assert ((v.amin((1, 2, 3, 4)) + 0.01).floor() == torch.tensor(expected)).all()


def test_branch():
    branch = train_simdino.build_model(config("--method=dino", "--local_views=3")).eval()
    views = [torch.randn(2, 5, 3, 32, 32), torch.randn(3, 5, 3, 16, 16)]
    Z, logits = branch(views)
    for v, alone in enumerate([*views[0], *views[1]]):
        projected = branch.projector(branch.encoder(alone)[:, 0])
        cosines = nn.functional.cosine_similarity(projected[:, None], branch.prototypes, dim=-1)
        projected = nn.functional.normalize(projected, dim=-1)
        torch.testing.assert_close((Z[v], logits[v]), (projected, cosines), atol=1e-5, rtol=0)


def test_what_a_collapse_shows_in():
    Z = nn.functional.normalize(unit(12, 16) + 0.2, dim=1).float()
    share = torch.linalg.svdvals(Z.double()).square() / 12
    cosines = [(Z[i] @ Z[j]).item() for i in range(12) for j in range(12) if i != j]
    expected = dict(coding_rate=coding_rate(Z.double(), 0.3).item(), cosine=np.mean(cosines),
                    effective_rank=math.exp(-(share * share.log()).sum()))
    assert train_simdino.feature_statistics(Z, 0.3, ONE) == pytest.approx(expected, rel=1e-4)


def test_without_the_coding_rate_the_features_collapse(train, tmp_path):
    flags = ["--batch_size=50", "--local_views=0", "--epochs=6", "--warmup_epochs=3",
             "--lr=0.0039", "--momentum=0.5", "--log_every=4", "--eval_every=1000"]
    train(train_simdino, "without", "--gamma=0", *flags)
    train(train_simdino, "with", *flags)
    without, sound = (metrics(tmp_path / name)[-1] for name in ("without", "with"))
    assert without["cosine"] > 0.999 and without["effective_rank"] < 1.1
    assert abs(without["loss"]) < 1e-3
    assert sound["cosine"] < 0.8 and sound["effective_rank"] > 2.5
    assert sound["coding_rate"] > 2 * without["coding_rate"]


@pytest.mark.parametrize("method", ["simdino", "dino"])
def test_the_first_loss_by_hand(train, tmp_path, shapes, method):
    """The student drops branches, the teacher does not."""
    flags = [f"--method={method}", "--eps=0.3", "--seed=4", "--drop_path=0.5"]
    train(train_simdino, "a", *flags, "--epochs=0.05")
    c, line = config(*flags), metrics(tmp_path / "a")[0]
    torch.manual_seed(derive_seed(4, "weights"))
    student = train_simdino.build_model(c)
    teacher = copy.deepcopy(student).eval()
    views = make_views(c, shapes, next(images.index_batches(400, 20, 4)), step=0)
    torch.manual_seed(derive_seed(4, 0, "dropout", 0))
    with torch.no_grad():
        (s, s_logits), (t, t_logits) = student(views), teacher(views[:1])
    if method == "dino":
        expected = mean_by_hand(s_logits, t_logits, cross_entropy(0, 0.04))
    else:
        gamma = (16 + 20) / (16 * 20)
        expected = mean_by_hand(s, t, distance) - gamma * coding_rate(s[:2], 0.3).mean()
    assert line["loss"] == pytest.approx(expected.item(), abs=1e-5)


def test_schedules_clipping_teacher_center_and_frozen_prototypes(train, monkeypatch):
    """One step of DINO after another, by hand; a hundred times the loss needs clipping."""
    steps, update = [], torch._foreach_lerp_
    loss, take_step = train_simdino.dino_loss, train_simdino.take_step

    def dino_loss(student, teacher, center, temperature):
        seen = dict(center=center.clone(), temperature=temperature)
        steps.append(seen | dict(mean=teacher.mean((0, 1))))
        return 100 * loss(student, teacher, center, temperature)

    def one_step(optimizers, lr, decay):
        decayed, rest = optimizers[0].param_groups
        norms = torch.stack([p.grad.norm() for p in decayed["params"] if p.grad is not None])
        assert norms.max() < 3.001 and (norms > 2.999).sum() > 1        # each is clipped by itself
        take_step(optimizers, lr, decay)
        assert decayed["weight_decay"] == decay and rest["weight_decay"] == 0
        steps[-1] |= dict(lr=(decayed["lr"], rest["lr"]), decay=decay)

    def average(teacher, student, share):
        momentum = 1 - share
        expected = [momentum * t + share * s for t, s in zip(teacher, student)]
        update(teacher, student, share)
        torch.testing.assert_close(teacher, expected, atol=1e-6, rtol=0)
        prototypes, = (p.detach().clone() for p in student if p.shape == (24, 16))
        steps[-1] |= dict(momentum=momentum, prototypes=prototypes)

    monkeypatch.setattr(train_simdino, "dino_loss", dino_loss)
    monkeypatch.setattr(train_simdino, "take_step", one_step)
    monkeypatch.setattr(torch, "_foreach_lerp_", average)
    train(train_simdino, "a", "--method=dino", "--epochs=2", "--lr=1e-3", "--warmup_epochs=0.5",
          "--momentum=0.9", "--warmup_temp_epochs=1", "--teacher_temp=0.07", "--freeze_epochs=0.5")
    center = torch.zeros(24)
    for i, now in enumerate(steps):
        fall, half = (0.5 * (1 + math.cos(math.pi * x)) for x in ((i - 10) / 30, i / 40))
        lr = 1e-3 * (i + 1) / 10 if i < 10 else 1e-6 + (1e-3 - 1e-6) * fall
        assert now["lr"] == pytest.approx((lr, lr))
        assert now["momentum"] == pytest.approx(1 - 0.1 * half)
        assert now["decay"] == pytest.approx(0.4 - 0.36 * half)
        assert now["temperature"] == pytest.approx(0.04 + 0.03 * min(i / 20, 1))
        torch.testing.assert_close(now["center"], center)       # the one of earlier steps
        center = 0.9 * center + 0.1 * now["mean"]
    assert len(steps) == 40 and center.abs().max() > 0.01
    P = [now["prototypes"] for now in steps]
    assert all(torch.equal(a, b) == (i < 9) for i, (a, b) in enumerate(zip(P, P[1:])))


def test_the_checkpoint_is_the_teacher(train, tmp_path, cache):
    train(train_simdino, "a", "--lr=0.0015625", "--momentum=0.9")
    path, val = tmp_path / "a" / "ckpt.pt", metrics(tmp_path / "a", "val")[-1]
    content = checkpoint.read_checkpoint(path, "simdino")
    assert not same(content["model"], content["extra"]["student"])
    found = evaluate.main(["knn", f"--ckpt={path}", "--device=cpu", f"--data_dir={cache}"])
    assert (found["acc"], found["k"]) == (val["acc"], val["k"])
