"""SimDINO and DINO: losses against plain loops, views, schedules, collapse, the encoder after."""
import math

import numpy as np
import pytest
import torch
from torch import nn

import checkpoint
from flags import parse
from parallel import count, derive_seed, Processes
import evaluate
import train_simdino
import train_vit
from data import augment, images
from helpers import VIEWS, Launches, metrics, same
from model import ImageClassifier, ImageEncoder, coding_rate

ONE = Processes("cpu")


def config(*flags):
    return parse(train_simdino.Config, train_simdino.PRESETS, [*VIEWS, *flags], "")[0]


def unit(*shape, dtype=torch.float64):
    return nn.functional.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


class Two:
    """The first or the second of two processes, whose sum over both is known."""
    world = 2

    def __init__(self, total):
        self.total = total

    def sum(self, mine):
        assert not mine.requires_grad and mine.shape == self.total.shape
        return self.total.to(mine.dtype)


# -------------------------------------------------------------------------------------------------
# Losses
# -------------------------------------------------------------------------------------------------

def pairs(student, teacher):
    """(teacher's vector, student's vector) of each image in two different views."""
    return [(teacher[g, i], student[v, i]) for g in range(2) for v in range(len(student))
            for i in range(student.shape[1]) if v != g]


def distance_by_hand(student, teacher):
    terms = [0.5 * (t - s).square().sum() for t, s in pairs(student, teacher)]
    return sum(terms) / len(terms)


def cross_entropy_by_hand(student, teacher, center, temperature):
    terms = []
    for t, s in pairs(student, teacher):
        target, guess = torch.exp((t - center) / temperature), torch.exp(s / 0.1)
        terms.append(-(target / target.sum() * torch.log(guess / guess.sum())).sum())
    return sum(terms) / len(terms)


def rate_by_hand(Z, eps):
    """The mean over views of 1/2 log det(I + p / (m eps^2) Z^* Z), Z (2, m, p)."""
    m, p = Z.shape[1:]
    one = torch.eye(p, dtype=Z.dtype)
    return sum(torch.linalg.slogdet(one + p / (m * eps ** 2) * z.mT @ z)[1] / 2 for z in Z) / len(Z)


@pytest.mark.parametrize("local_views", [0, 1, 4])
def test_losses_are_means_over_pairs_of_different_views(local_views):
    student, teacher = unit(2 + local_views, 5, 7), unit(2, 5, 7)
    center = 0.1 * torch.randn(7, dtype=torch.float64)
    found = train_simdino.squared_distance(student, teacher)
    torch.testing.assert_close(found, distance_by_hand(student, teacher))
    found = train_simdino.dino_loss(student.float(), teacher.float(), center.float(), 0.05)
    by_hand = cross_entropy_by_hand(student, teacher, center, 0.05)
    assert found.item() == pytest.approx(by_hand.item(), rel=1e-5)
    if not local_views:                                 # no view is paired with itself
        assert train_simdino.squared_distance(student, student.flip(0)).abs() < 1e-12
        assert train_simdino.squared_distance(student, student) > 0.1


@pytest.mark.parametrize("m, eps", [(12, 0.5), (12, 0.05 ** 0.5), (40, 0.05 ** 0.5)])
def test_the_coding_rate_of_the_features(m, eps):
    """Value and gradient, of one process and of each of two."""
    Z = unit(2, m, 16).requires_grad_()
    literal = rate_by_hand(Z, eps)
    torch.testing.assert_close(literal, coding_rate(Z, eps).mean())
    expected, = torch.autograd.grad(literal, Z)
    found = train_simdino.global_coding_rate(Z, eps, ONE)
    gradient, = torch.autograd.grad(found, Z)
    assert found.item() == pytest.approx(literal.item(), rel=1e-5)
    close = dict(atol=1e-5 * expected.abs().max().item(), rtol=0)
    torch.testing.assert_close(gradient, expected, **close)
    total = (Z.mT @ Z).detach()
    for half in (slice(0, m // 2), slice(m // 2, m)):
        mine = Z[:, half].detach().requires_grad_()
        value = train_simdino.global_coding_rate(mine, eps, Two(total))
        gradient, = torch.autograd.grad(value, mine)
        assert value.item() == pytest.approx(literal.item(), rel=1e-5)
        torch.testing.assert_close(gradient / 2, expected[:, half], **close)    # DDP's mean


def test_clipping_calls_a_few_operators_however_many_parameters():
    """And gives the numbers of the definition, bit for bit."""
    params = [nn.Parameter(torch.randn(5, 3)) for _ in range(50)]
    for p in params:
        p.grad = 2 * torch.randn(5, 3)
    expected = [p.grad * (3.0 / (p.grad.norm() + 1e-6)).clamp(max=1) for p in params]
    with Launches() as launched:
        train_simdino.clip_each(params, 3.0)
    assert len(launched.names) < 10
    assert all(torch.equal(p.grad, g) for p, g in zip(params, expected))


# -------------------------------------------------------------------------------------------------
# Views and model
# -------------------------------------------------------------------------------------------------

@pytest.fixture
def shapes(cache):
    return images.load("shapes", cache=cache)


def make_views(pixels, c, data, step=0):
    rngs = train_simdino.random_numbers(c, step, slice(0, len(pixels)), "cpu")
    return train_simdino.make_views(pixels, *rngs, c=c, data=data)


def views_of(data, c, step=3):
    pixels = torch.from_numpy(np.array(data.train_images[:c.batch_size]))
    return make_views(pixels, c, data, step)


def test_views_depend_on_seed_and_step(shapes):
    flags = ["--local_views=3", "--blur=2"]
    whole = views_of(shapes, config(*flags))
    assert [tuple(v.shape) for v in whole] == [(2, 20, 3, 32, 32), (3, 20, 3, 16, 16)]
    others = views_of(shapes, config(*flags), 4), views_of(shapes, config(*flags, "--seed=1"))
    for other in others:
        assert all((a != b).flatten(2).any(2).all() for a, b in zip(whole, other))
    for v in whole:                                     # no image is seen twice alike
        assert all((v[a] != v[b]).flatten(1).any(1).all() for a in range(len(v)) for b in range(a))
    assert len(views_of(shapes, config("--local_views=0"))) == 1


def test_branch():
    branch = train_simdino.build_model(config("--method=dino", "--local_views=3")).eval()
    views = [torch.randn(2, 5, 3, 32, 32), torch.randn(3, 5, 3, 16, 16)]
    Z, logits = branch(views)
    assert Z.shape == (5, 5, 16) and logits.shape == (5, 5, 24)
    close = dict(atol=1e-5, rtol=0)
    for v, alone in enumerate([*views[0], *views[1]]):
        class_token = branch.encoder(alone)[:, 0]
        projected = nn.functional.normalize(branch.projector(class_token), dim=-1)
        torch.testing.assert_close(Z[v], projected, **close)
        cosines = nn.functional.cosine_similarity(projected[:, None], branch.prototypes, dim=-1)
        torch.testing.assert_close(logits[v], cosines, **close)
    with torch.no_grad():
        branch.prototypes.mul_(torch.rand(24, 1) + 0.1)         # directions only
    torch.testing.assert_close(branch(views)[1], logits)
    encoder = ImageEncoder(branch.encoder.config)
    assert branch.encoder.config.final_norm
    projector = (16 * 32 + 32) + (32 * 32 + 32) + (32 * 16 + 16)
    assert count(branch) - count(encoder) == projector + 24 * 16
    simdino = train_simdino.build_model(config())
    assert simdino.prototypes is None and simdino(views)[1] is None


# -------------------------------------------------------------------------------------------------
# Collapse
# -------------------------------------------------------------------------------------------------

def test_what_a_collapse_shows_in():
    n, p = 12, 16
    z = unit(1, p).float()
    alone, axes, line = z.expand(n, p), torch.eye(p)[:n], z * torch.tensor([1.0, -1.0] * 6)[:, None]
    for Z, rank, cosine in ((alone, 1, 1), (axes, n, 0), (line, 1, -1 / (n - 1))):
        seen = train_simdino.feature_statistics(Z, 0.5, ONE)
        assert seen["effective_rank"] == pytest.approx(rank, rel=1e-4)
        assert seen["cosine"] == pytest.approx(cosine, abs=1e-5)
    Z = nn.functional.normalize(unit(n, p) + 0.2, dim=1).float()
    share = torch.linalg.svdvals(Z.double()).square() / n
    cosines = [(Z[i] @ Z[j]).item() for i in range(n) for j in range(n) if i != j]
    expected = dict(coding_rate=coding_rate(Z.double(), 0.3).item(), cosine=np.mean(cosines),
                    effective_rank=math.exp(-(share * share.log()).sum()))
    assert train_simdino.feature_statistics(Z, 0.3, ONE) == pytest.approx(expected, rel=1e-4)


def test_without_the_coding_rate_the_features_collapse(train, tmp_path, capsys):
    flags = ["--batch_size=50", "--local_views=0", "--epochs=6", "--warmup_epochs=3",
             "--lr=0.0039", "--momentum=0.5", "--log_every=4", "--eval_every=1000"]
    train(train_simdino, "without", "--gamma=0", *flags)
    said = capsys.readouterr().out
    warned = [line for line in said.splitlines() if "collapsed" in line]
    assert said.index("before training: 20-NN accuracy 0.") < said.index("step 4/")
    assert len(warned) == 1 and "effective rank 1.0" in warned[0] and warned[0].startswith("step ")
    train(train_simdino, "with", *flags)
    assert "collapsed" not in capsys.readouterr().out
    without, sound = (metrics(tmp_path / name)[-1] for name in ("without", "with"))
    assert without["cosine"] > 0.999 and without["distance"] < 1e-3 and without["expansion"] == 0
    assert sound["cosine"] < 0.8 and sound["effective_rank"] > 2.5
    assert sound["coding_rate"] > 2 * without["coding_rate"]


# -------------------------------------------------------------------------------------------------
# Runs
# -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", ["simdino", "dino"])
def test_the_first_loss_by_hand(train, tmp_path, shapes, method):
    flags = [f"--method={method}", "--gamma=auto", "--eps=0.3", "--seed=4"]
    train(train_simdino, "a", *flags, "--epochs=0.05")
    c = config(*flags)
    torch.manual_seed(derive_seed(4, "weights"))
    branch = train_simdino.build_model(c)
    index = next(images.index_batches(400, 20, 4))
    pixels = torch.from_numpy(np.array(shapes.train_images))[index]
    views = make_views(pixels, c, shapes)
    with torch.no_grad():
        Z, logits = branch(views)
    line, Z = metrics(tmp_path / "a")[0], Z.double()
    if method == "dino":
        expected = cross_entropy_by_hand(logits.double(), logits[:2].double(), 0, 0.04)
    else:
        gamma = (16 + 20) / (16 * 20)
        distance, rate = distance_by_hand(Z, Z[:2]), rate_by_hand(Z[:2], 0.3)
        expected = distance - gamma * rate
        assert line["distance"] == pytest.approx(distance.item(), abs=1e-5)
        assert line["expansion"] == pytest.approx(gamma * rate.item(), rel=1e-5)
    assert line["loss"] == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("method", ["simdino", "dino"])
def test_schedules_teacher_center_and_frozen_prototypes(train, monkeypatch, method):
    seen, optimizers, calls, norms = [], [], [], []
    make, update = train_simdino.make_optimizer, train_simdino.ema_update
    loss = train_simdino.dino_loss
    forward = train_simdino.Branch.forward

    def gradient_norms(optimizer, *_):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.stack([p.grad.norm() for p in params if p.grad is not None]))

    def make_optimizer(*args):
        optimizers.append(make(*args))
        optimizers[-1].register_step_pre_hook(gradient_norms)
        return optimizers[-1]

    def checked(branch, views):
        assert branch.training == torch.is_grad_enabled()               # the teacher drops nothing
        return forward(branch, views)

    def ema_update(teacher, student, momentum):
        assert all(p.grad is None and not p.requires_grad for p in teacher)
        expected = [momentum * t + (1 - momentum) * s for t, s in zip(teacher, student)]
        update(teacher, student, momentum)
        for t, w in zip(teacher, expected, strict=True):
            torch.testing.assert_close(t.detach(), w, atol=1e-6, rtol=0)
        decayed, rest = optimizers[0].param_groups
        prototypes = [p.detach().clone() for p in student if p.shape == (24, 16)]
        seen.append(dict(momentum=momentum, lr=decayed["lr"], lr_rest=rest["lr"],
                         decay=decayed["weight_decay"], decay_rest=rest["weight_decay"],
                         prototypes=prototypes))

    def dino_loss(student, teacher, center, temperature):
        calls.append(dict(teacher=teacher.clone(), center=center.clone(), temp=temperature))
        return loss(student, teacher, center, temperature)
    monkeypatch.setattr(train_simdino, "make_optimizer", make_optimizer)
    monkeypatch.setattr(train_simdino, "ema_update", ema_update)
    monkeypatch.setattr(train_simdino.Branch, "forward", checked)
    monkeypatch.setattr(train_simdino, "dino_loss", dino_loss)
    train(train_simdino, "a", f"--method={method}", "--epochs=2", "--lr=1e-3",
          "--clip_each=0.001", "--min_lr=1e-5", "--warmup_epochs=0.5", "--momentum=0.9",
          "--weight_decay=0.04",
          "--weight_decay_end=0.4", "--warmup_temp_epochs=1", "--teacher_temp=0.07",
          "--freeze_epochs=0.5")
    assert len(seen) == len(norms) == 40                # each parameter is clipped by itself
    assert all(norm.max() < 0.001001 and (norm > 0.00099).sum() > 1 for norm in norms)
    for i, now in enumerate(seen):
        fall, half = (0.5 * (1 + math.cos(math.pi * x)) for x in ((i - 10) / 30, i / 40))
        lr = 1e-3 * (i + 1) / 10 if i < 10 else 1e-5 + (1e-3 - 1e-5) * fall
        assert now["lr"] == now["lr_rest"] == pytest.approx(lr) and now["decay_rest"] == 0
        assert now["momentum"] == pytest.approx(1 - 0.1 * half)
        assert now["decay"] == pytest.approx(0.4 - 0.36 * half)
    assert seen[0]["momentum"] == 0.9 and 0.999 < seen[-1]["momentum"] < 1
    if method == "simdino":
        assert not calls
        return
    center = torch.zeros(24)
    for i, now in enumerate(calls):                     # the loss sees the center of earlier steps
        torch.testing.assert_close(now["center"], center)
        center = 0.9 * center + 0.1 * now["teacher"].mean((0, 1))
        assert now["temp"] == pytest.approx(0.04 + 0.03 * min(i / 20, 1))
    assert len(calls) == 40 and center.abs().max() > 0.01
    prototypes = [now["prototypes"][0] for now in seen]
    assert all(torch.equal(P, prototypes[0]) for P in prototypes[:10])
    assert all(not torch.equal(a, b) for a, b in zip(prototypes[9:], prototypes[10:]))


def test_the_checkpoint_is_the_teacher(train, tmp_path, cache):
    train(train_simdino, "a", "--lr=0.0015625", "--momentum=0.9")
    path, val = tmp_path / "a" / "ckpt.pt", metrics(tmp_path / "a", "val")[-1]
    content = checkpoint.read_checkpoint(path, "simdino")
    teacher, student = content["model"], content["extra"]["student"]
    assert teacher.keys() == student.keys() and not same(teacher, student)
    found = evaluate.main(["knn", f"--ckpt={path}", "--device=cpu", f"--data_dir={cache}"])
    assert (found["acc"], found["k"]) == (val["acc"], val["k"])
    flags = ["shapes", f"--init_from={path}", "--width=16", "--pool=class"]
    c, _ = parse(train_vit.Config, train_vit.PRESETS, flags, "")
    classifier = train_vit.build_model(c, 10, checkpoint.load_model(path))
    assert isinstance(classifier, ImageClassifier) and classifier.encoder.config.final_norm
    ours = {f"encoder.{k}": v for k, v in classifier.encoder.state_dict().items()}
    assert same(ours, {k: v for k, v in teacher.items() if k.startswith("encoder.")})
