"""SimDINO and DINO: losses against plain loops, views, schedules, collapse, resume, the encoder after."""
import json
import math
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import common
import evaluate
import train_simdino
import train_vit
from data import augment, images
from model import ConfigError, ImageClassifier, ImageEncoder, coding_rate

TINY = ["shapes", "--width=16", "--heads=2", "--layers=2", "--patch_size=8", "--batch_size=20", "--epochs=1",
        "--log_every=1", "--device=cpu", "--local_views=2", "--hidden=32", "--output=16", "--prototypes=24"]


@pytest.fixture
def train(cache, tmp_path):
    """train(name, *flags): runs train_simdino in this process into tmp_path/name; returns its last line of metrics."""
    def run(name, *flags, first=TINY):
        return train_simdino.main([*first, f"--data_dir={cache}", f"--out_dir={tmp_path / name}", *flags])
    return run


def config(*flags):
    return common.parse(train_simdino.Config, train_simdino.PRESETS, [*TINY, *flags], "")[0]


def metrics(folder, split="train"):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("split") == split]


def weights(folder):
    content = common.load_checkpoint(folder / "ckpt.pt", "simdino")
    student = {f"student.{k}": v for k, v in content["extra"]["student"].items()}
    return content["model"] | student | dict(center=content["extra"]["center"])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


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


ONE = common.Processes("cpu")


# ---- losses ----------------------------------------------------------------------------------------------------------

def distance_by_hand(student, teacher):
    terms = [0.5 * (teacher[g, i] - student[v, i]).square().sum()
             for g in range(2) for v in range(len(student)) for i in range(student.shape[1]) if v != g]
    return sum(terms) / len(terms)


def cross_entropy_by_hand(student, teacher, center, student_temp, teacher_temp):
    terms = []
    for g in range(2):
        for v in range(len(student)):
            for i in range(student.shape[1]):
                target = torch.exp((teacher[g, i] - center) / teacher_temp)
                guess = torch.exp(student[v, i] / student_temp)
                if v != g:
                    terms.append(-(target / target.sum() * torch.log(guess / guess.sum())).sum())
    return sum(terms) / len(terms)


@pytest.mark.parametrize("local_views", [0, 1, 4])
def test_losses_are_means_over_pairs_of_different_views(local_views):
    student, teacher, center = unit(2 + local_views, 5, 7), unit(2, 5, 7), 0.1 * torch.randn(7, dtype=torch.float64)
    torch.testing.assert_close(train_simdino.squared_distance(student, teacher), distance_by_hand(student, teacher))
    found = train_simdino.dino_loss(student.float(), teacher.float(), center.float(), 0.1, 0.05)
    assert found.item() == pytest.approx(cross_entropy_by_hand(student, teacher, center, 0.1, 0.05).item(), rel=1e-5)
    if not local_views:                                                  # a view is never beside itself
        assert train_simdino.squared_distance(student, student.flip(0)).abs() < 1e-12
        assert train_simdino.squared_distance(student, student) > 0.1


def test_losses_are_least_where_all_views_agree():
    z = unit(5, 7)
    agreed = z.expand(2, 5, 7)
    assert train_simdino.squared_distance(z.expand(6, 5, 7), agreed).abs() < 1e-12
    assert train_simdino.squared_distance(unit(6, 5, 7), agreed) > 0.1
    center = 0.1 * torch.randn(7)
    target = ((z.float() - center) / 0.05).softmax(-1)
    entropy = -(target * target.log()).sum(-1).mean()
    best = 0.1 / 0.05 * (z.float() - center)                             # the logits whose softmax is the target
    torch.testing.assert_close(train_simdino.dino_loss(best.expand(6, 5, 7), agreed, center, 0.1, 0.05), entropy)
    for _ in range(5):
        assert train_simdino.dino_loss(best + 0.05 * torch.randn(6, 5, 7), agreed, center, 0.1, 0.05) > entropy


def rate_by_hand(Z, eps):
    """The mean over views of 1/2 log det(I + p / (m eps^2) Z^* Z), Z (2, m, p)."""
    m, p = Z.shape[1:]
    one = torch.eye(p, dtype=Z.dtype)
    return sum(0.5 * torch.linalg.slogdet(one + p / (m * eps ** 2) * z.mT @ z)[1] for z in Z) / len(Z)


@pytest.mark.parametrize("m, eps", [(12, 0.5), (12, 0.05 ** 0.5), (40, 0.05 ** 0.5)])
def test_the_coding_rate_of_the_features(m, eps):
    Z = unit(2, m, 16).requires_grad_()
    literal = rate_by_hand(Z, eps)
    torch.testing.assert_close(literal, coding_rate(Z, eps).mean())
    wanted, = torch.autograd.grad(literal, Z)
    found = train_simdino.global_coding_rate(Z, eps, ONE)
    got, = torch.autograd.grad(found, Z)
    assert found.item() == pytest.approx(literal.item(), rel=1e-5)
    close = dict(atol=1e-5 * wanted.abs().max().item(), rtol=0)
    torch.testing.assert_close(got, wanted, **close)
    total = (Z.mT @ Z).detach()                                          # of both processes
    for half in (slice(0, m // 2), slice(m // 2, m)):
        mine = Z[:, half].detach().requires_grad_()
        value = train_simdino.global_coding_rate(mine, eps, Two(total))
        gradient, = torch.autograd.grad(value, mine)
        assert value.item() == pytest.approx(literal.item(), rel=1e-5)
        torch.testing.assert_close(gradient / 2, wanted[:, half], **close)           # DDP takes the mean


def test_the_weight_of_the_coding_rate():
    assert train_simdino.simdino_gamma(256, 1024) == pytest.approx(1 / 256 + 1 / 1024)
    Z = torch.eye(8).expand(2, 8, 8)                                     # R = p/2 log(1 + 1 / eps^2), gamma = 2/p
    found = train_simdino.simdino_gamma(8, 8) * train_simdino.global_coding_rate(Z, 0.1, ONE)
    assert found.item() == pytest.approx(math.log(1 + 1 / 0.1 ** 2), rel=1e-5)


def test_each_gradient_is_clipped_by_itself():
    params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (5,), (2, 2, 2), (6,), (1,))]
    for p, size in zip(params[:-1], (50.0, 0.1, 3.1, 2.9)):
        p.grad = size * nn.functional.normalize(torch.randn(p.shape).flatten(), dim=0).view(p.shape)
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params[:-1], copies):
        q.grad = p.grad.clone()
        nn.utils.clip_grad_norm_([q], 3.0)
    train_simdino.clip_each(params, 3.0)
    for p, q in zip(params[:-1], copies):
        torch.testing.assert_close(p.grad, q.grad)
    assert params[-1].grad is None and params[0].grad.norm() < 3.001 and params[1].grad.norm() > 0.099


# ---- views and model -------------------------------------------------------------------------------------------------

@pytest.fixture
def shapes(cache):
    return images.load("shapes", cache=cache)


def pictures_of(data, n):
    return torch.from_numpy(np.array(data.train_images[:n]))


def views_of(data, c, step=3, rows=slice(None)):
    rows = slice(0, c.batch_size) if rows == slice(None) else rows
    return train_simdino.make_views(pictures_of(data, c.batch_size)[rows], c, data, step, rows, torch.device("cpu"))


def test_views_are_a_function_of_seed_and_step(shapes):
    c = config("--local_views=3", "--blur=2")
    whole = views_of(shapes, c)
    assert [tuple(v.shape) for v in whole] == [(2, 20, 3, 32, 32), (3, 20, 3, 16, 16)]
    torch.manual_seed(1)
    assert all(map(torch.equal, whole, views_of(shapes, c)))
    for i, v in enumerate(whole):
        assert (views_of(shapes, c, step=4)[i] != v).flatten(2).any(2).all()
        assert (views_of(shapes, config("--local_views=3", "--blur=2", "--seed=1"))[i] != v).flatten(2).any(2).all()
        for a in range(len(v)):
            for b in range(a):
                assert (v[a] != v[b]).flatten(1).any(1).all()            # no picture is seen twice alike
        halves = [views_of(shapes, c, rows=rows)[i] for rows in (slice(0, 10), slice(10, 20))]
        torch.testing.assert_close(torch.cat(halves, 1), v, atol=1e-5, rtol=0)
    assert [tuple(v.shape) for v in views_of(shapes, config("--local_views=0"))] == [(2, 20, 3, 32, 32)]


def test_views_belong_to_their_picture(shapes):
    """A picture of one grey, whatever is done to it, keeps its grey in every view if colours are left alone."""
    c = config("--local_views=3", "--blur=1")
    levels = torch.arange(20, dtype=torch.uint8) * 6                     # below solarize's threshold
    plain = levels.view(20, 1, 1, 1).expand(20, 32, 32, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(augment, "color_jitter", lambda x, *_, **__: x)
        for v in train_simdino.make_views(plain, c, shapes, 0, slice(0, 20), torch.device("cpu")):
            grey = v * torch.tensor(shapes.std).view(3, 1, 1) + torch.tensor(shapes.mean).view(3, 1, 1)
            torch.testing.assert_close(grey * 255, levels.float().view(1, 20, 1, 1, 1).expand_as(v), atol=0.01, rtol=0)


def test_which_views_are_blurred_and_solarized(shapes, monkeypatch):
    c = config("--batch_size=400", "--blur=2")
    real = views_of(shapes, c)
    monkeypatch.setattr(augment, "solarize", lambda x, rng, p: x)
    no_solarize = views_of(shapes, c)
    changed = [(a != b).flatten(2).any(2).float().mean(1).tolist() for a, b in zip(real, no_solarize)]
    assert changed[0][0] == 0 and changed[1] == [0, 0]
    assert 0.13 < changed[0][1] < 0.27                                   # 0.2, standard deviation 0.02

    def no_blur(x, rng, p, sigma):
        assert sigma == (0.1, c.blur)
        rng.uniform()                                                    # what is drawn afterwards stays the same
        return x
    monkeypatch.setattr(augment, "gaussian_blur", no_blur)
    sharp = views_of(shapes, c)
    changed = [(a != b).flatten(2).any(2).float().mean(1).tolist() for a, b in zip(no_solarize, sharp)]
    assert changed[0][0] > 0.93                                          # below 0.17 px, one in 26, no float32 changes
    assert 0.04 < changed[0][1] < 0.16 and all(0.42 < share < 0.58 for share in changed[1])
    c.blur = 0.0
    monkeypatch.setattr(augment, "gaussian_blur", None)
    for a, b in zip(views_of(shapes, c), sharp):
        assert torch.equal(a, b)


def test_colours_change_in_four_of_five_views_and_vanish_in_one(shapes, monkeypatch):
    jitter, greys, jittered = augment.color_jitter, [], []

    def spy(x, rng, *strengths, p):
        assert strengths == (0.4, 0.4, 0.2, 0.1)
        out = jitter(x, rng, *strengths, p=p)
        jittered.append((out != x).flatten(1).any(1).float().mean().item())
        return out
    monkeypatch.setattr(augment, "color_jitter", spy)
    for v in views_of(shapes, config("--batch_size=400")):
        v = v * torch.tensor(shapes.std).view(3, 1, 1) + torch.tensor(shapes.mean).view(3, 1, 1)
        greys.append((v.amax(2) - v.amin(2) < 1e-5).flatten(2).all(2).float().mean().item())
    assert all(0.75 < share < 0.85 for share in jittered) and all(0.15 < share < 0.27 for share in greys)


def test_local_views_are_cut_from_less(shapes, monkeypatch):
    boxes, draw = [], augment.random_boxes
    monkeypatch.setattr(augment, "random_boxes", lambda *a: boxes.append(draw(*a)) or boxes[-1])
    views_of(shapes, config("--batch_size=400", "--global_area=0.4", "--local_area=0.05"))
    big, small = (box[:, 2:].prod(1) / 32 ** 2 for box in boxes)
    assert len(big) == len(small) == 800
    assert big.min() > 0.37 and big.max() > 0.9                          # sides are whole pixels
    assert small.max() < 0.43 and 0.03 < small.min() < 0.08
    assert abs(small.mean() - 0.225) < 0.02


def test_branch():
    c = config("--method=dino", "--local_views=3")
    branch = train_simdino.build_model(c).eval()
    views = [torch.randn(2, 5, 3, 32, 32), torch.randn(3, 5, 3, 16, 16)]
    Z, logits = branch(views)
    assert Z.shape == (5, 5, 16) and logits.shape == (5, 5, 24)
    torch.testing.assert_close(Z.norm(dim=-1), torch.ones(5, 5))
    for v, alone in enumerate([*views[0], *views[1]]):
        features, cosines = branch([alone[None]])
        torch.testing.assert_close(features[0], Z[v], atol=1e-5, rtol=0)
        torch.testing.assert_close(cosines[0], logits[v], atol=1e-5, rtol=0)
        class_token = branch.encoder(alone)[:, 0]
        projected = nn.functional.normalize(branch.projector(class_token), dim=-1)
        torch.testing.assert_close(features[0], projected, atol=1e-5, rtol=0)
    cosines = nn.functional.cosine_similarity(Z[:, :, None], branch.prototypes, dim=-1)
    torch.testing.assert_close(cosines, logits, atol=1e-5, rtol=0)
    with torch.no_grad():
        branch.prototypes.mul_(torch.rand(24, 1) + 0.1)                  # directions only
    torch.testing.assert_close(branch(views)[1], logits)
    encoder = ImageEncoder(branch.encoder.config)
    assert common.count(branch.encoder) == common.count(encoder) and branch.encoder.config.final_norm
    assert common.count(branch) - common.count(encoder) == (16 * 32 + 32) + (32 * 32 + 32) + (32 * 16 + 16) + 24 * 16
    simdino = train_simdino.build_model(config())
    assert simdino.prototypes is None and simdino(views)[1] is None


# ---- collapse --------------------------------------------------------------------------------------------------------

def test_watching_for_a_collapse():
    n, p = 12, 16
    z = unit(1, p).float()
    alone, axes, line = z.expand(n, p), torch.eye(p)[:n], z * torch.tensor([1.0, -1.0] * 6)[:, None]
    for Z, rank, cosine, collapsed in ((alone, 1, 1, True), (axes, n, 0, False), (line, 1, -1 / (n - 1), True)):
        seen = train_simdino.watch(Z, 0.5, ONE)
        assert seen["effective_rank"] == pytest.approx(rank, rel=1e-4)
        assert seen["cosine"] == pytest.approx(cosine, abs=1e-5)
        assert train_simdino.collapsed(seen) == collapsed
    Z = unit(n, p) + 0.2
    Z = (Z / Z.norm(dim=1, keepdim=True)).float()
    share = torch.linalg.svdvals(Z.double()).square() / n
    wanted = dict(coding_rate=coding_rate(Z.double(), 0.3).item(),
                  effective_rank=math.exp(-(share * share.log()).sum()),
                  cosine=np.mean([(Z[i] @ Z[j]).item() for i in range(n) for j in range(n) if i != j]))
    assert train_simdino.watch(Z, 0.3, ONE) == pytest.approx(wanted, rel=1e-4)
    total = torch.cat([Z.mT @ Z, Z.sum(0, keepdim=True)])
    assert train_simdino.watch(Z[:6], 0.3, Two(total)) == pytest.approx(wanted, rel=1e-4)


def test_without_the_coding_rate_the_features_collapse(train, tmp_path, capsys):
    flags = ["--batch_size=50", "--local_views=0", "--epochs=6", "--warmup_epochs=3", "--base_lr=0.02",
             "--momentum=0.5", "--log_every=4", "--eval_every=1000"]
    train("without", "--gamma=0", *flags)
    told = [line for line in capsys.readouterr().out.splitlines() if "collapsed" in line]
    assert len(told) == 1 and "effective rank 1.0" in told[0] and told[0].startswith("step ")
    train("with", *flags)
    assert "collapsed" not in capsys.readouterr().out
    without, sound = metrics(tmp_path / "without")[-1], metrics(tmp_path / "with")[-1]
    assert without["cosine"] > 0.999 and without["distance"] < 1e-3 and without["expansion"] == 0
    assert sound["cosine"] < 0.8 and sound["effective_rank"] > 2.5 and sound["coding_rate"] > 2 * without["coding_rate"]


# ---- the run ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("method", ["simdino", "dino"])
def test_the_first_loss_by_hand(train, tmp_path, cache, shapes, method):
    flags = [f"--method={method}", "--gamma=auto", "--eps=0.3", "--seed=4"]
    train("a", *flags, "--epochs=0.05")
    c = config(*flags)
    torch.manual_seed(common.derive_seed(4, "weights"))
    branch = train_simdino.build_model(c)
    index = next(images.index_batches(400, 20, 4))
    pictures = pictures_of(shapes, 400)[index]
    views = train_simdino.make_views(pictures, c, shapes, 0, slice(0, 20), torch.device("cpu"))
    with torch.no_grad():
        Z, logits = branch(views)
    line, Z = metrics(tmp_path / "a")[0], Z.double()
    if method == "dino":
        wanted = cross_entropy_by_hand(logits.double(), logits[:2].double(), 0, 0.1, 0.04)
    else:
        distance, rate = distance_by_hand(Z, Z[:2]), rate_by_hand(Z[:2], 0.3)
        wanted = distance - (16 + 20) / (16 * 20) * rate
        assert line["distance"] == pytest.approx(distance.item(), abs=1e-5)
        assert line["expansion"] == pytest.approx((16 + 20) / (16 * 20) * rate.item(), rel=1e-5)
    assert line["loss"] == pytest.approx(wanted.item(), abs=1e-5)


@pytest.mark.parametrize("method", ["simdino", "dino"])
def test_schedules_teacher_center_and_frozen_prototypes(train, monkeypatch, method):
    seen, optimizers, losses, norms = [], [], [], []
    make, update, loss = common.make_optimizer, common.ema_update, train_simdino.dino_loss

    def make_optimizer(*args):
        optimizers.append(make(*args))
        optimizers[-1].register_step_pre_hook(lambda optimizer, *_: norms.append(torch.stack(
            [p.grad.norm() for group in optimizer.param_groups for p in group["params"] if p.grad is not None])))
        return optimizers[-1]

    def ema_update(teacher, student, momentum):
        assert not teacher.training and all(p.grad is None and not p.requires_grad for p in teacher.parameters())
        wanted = [momentum * t + (1 - momentum) * s for t, s in zip(teacher.parameters(), student.parameters())]
        update(teacher, student, momentum)
        for t, w in zip(teacher.parameters(), wanted, strict=True):
            torch.testing.assert_close(t.detach(), w, atol=1e-6, rtol=0)
        decayed, rest = optimizers[0].param_groups
        seen.append(dict(momentum=momentum, lr=decayed["lr"], lr_rest=rest["lr"], decay=decayed["weight_decay"],
                         decay_rest=rest["weight_decay"],
                         prototypes=None if student.prototypes is None else student.prototypes.detach().clone()))

    def dino_loss(student, teacher, center, student_temp, teacher_temp):
        losses.append(dict(teacher=teacher.clone(), center=center.clone(), temps=(student_temp, teacher_temp)))
        return loss(student, teacher, center, student_temp, teacher_temp)
    monkeypatch.setattr(common, "make_optimizer", make_optimizer)
    monkeypatch.setattr(common, "ema_update", ema_update)
    monkeypatch.setattr(train_simdino, "dino_loss", dino_loss)
    train("a", f"--method={method}", "--epochs=2", "--base_lr=0.0128", "--min_lr=1e-5", "--warmup_epochs=0.5",
          "--momentum=0.9", "--weight_decay=0.04", "--weight_decay_end=0.4", "--warmup_temp_epochs=1", "--teacher_temp=0.07",
          "--freeze_epochs=0.5", "--clip=0.001")
    assert len(seen) == len(norms) == 40
    assert all(norm.max() < 0.001001 and (norm > 0.00099).sum() > 1 for norm in norms)       # each parameter by itself
    for i, now in enumerate(seen):
        fall, half = (0.5 * (1 + math.cos(math.pi * x)) for x in ((i - 10) / 30, i / 40))
        lr = 1e-3 * (i + 1) / 10 if i < 10 else 1e-5 + (1e-3 - 1e-5) * fall      # 0.0128 * 20 / 256 = 1e-3
        assert now["lr"] == now["lr_rest"] == pytest.approx(lr) and now["decay_rest"] == 0
        assert now["momentum"] == pytest.approx(1 - 0.1 * half) and now["decay"] == pytest.approx(0.4 - 0.36 * half)
    assert seen[0]["momentum"] == 0.9 and 0.999 < seen[-1]["momentum"] < 1
    if method == "simdino":
        assert not losses
        return
    center = torch.zeros(24)
    for i, now in enumerate(losses):
        torch.testing.assert_close(now["center"], center)                # the loss sees the centre of the steps before
        center = 0.9 * center + 0.1 * now["teacher"].mean((0, 1))
        assert now["temps"] == pytest.approx((0.1, 0.04 + 0.03 * min(i / 20, 1)))
    assert len(losses) == 40 and center.abs().max() > 0.01
    assert all(torch.equal(now["prototypes"], seen[0]["prototypes"]) for now in seen[:10])
    assert all(not torch.equal(a["prototypes"], b["prototypes"]) for a, b in zip(seen[9:], seen[10:]))


@pytest.mark.parametrize("method", ["simdino", "dino"])
def test_interrupted_and_resumed_is_left_alone(train, tmp_path, monkeypatch, method):
    flags = [f"--method={method}", "--drop_path=0.3", "--freeze_epochs=0.5", "--epochs=0.8"]   # step 8 is frozen
    train("whole", *flags)
    stop_at = iter([False] * 7 + [True])

    def should_stop(run):
        run.signal = signal.SIGTERM if next(stop_at) else 0
        return run.signal != 0
    monkeypatch.setattr(common.Run, "should_stop", should_stop)
    with pytest.raises(common.Stopped):
        train("cut", *flags)
    monkeypatch.undo()
    assert common.load_checkpoint(tmp_path / "cut" / "ckpt.pt")["step"] == 8
    train("cut", "--resume", *flags)
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert same(whole, cut) and whole["center"].any() == (method == "dino")
    assert [m["loss"] for m in metrics(tmp_path / "cut")] == [m["loss"] for m in metrics(tmp_path / "whole")]
    assert metrics(tmp_path / "cut", "val") == metrics(tmp_path / "whole", "val")
    with pytest.raises(common.UserError, match="prototypes"):
        train("cut", "--resume", *flags, f"--method={'dino' if method == 'simdino' else 'simdino'}")


def test_the_checkpoint_is_the_teacher(train, tmp_path, cache, capsys):
    train("a", "--epochs=1", "--base_lr=0.02", "--momentum=0.9")
    path, val = tmp_path / "a" / "ckpt.pt", metrics(tmp_path / "a", "val")[-1]
    content = common.load_checkpoint(path, "simdino")
    teacher, student = content["model"], content["extra"]["student"]
    assert teacher.keys() == student.keys() and not same(teacher, student)
    flags = ["--device=cpu", f"--data_dir={cache}"]
    found = evaluate.main(["knn", f"--ckpt={path}", *flags])
    assert (found["acc"], found["plain"], found["k"]) == (val["acc"], val["plain"], val["k"])
    evaluate.main(["knn", f"--ckpt={tmp_path / 'a' / 'best.pt'}", *flags])
    flags = ["shapes", f"--init_from={path}", "--width=16", "--pool=class"]
    c, _ = common.parse(train_vit.Config, train_vit.PRESETS, flags, "")
    classifier = train_vit.build_model(c, 10)
    assert isinstance(classifier, ImageClassifier) and classifier.encoder.config.final_norm
    ours = classifier.encoder.state_dict()
    assert same(ours, {k.removeprefix("encoder."): v for k, v in teacher.items() if k.startswith("encoder.")})


def test_a_loss_that_is_not_finite_stops_the_run(train, tmp_path):
    for method in ("simdino", "dino"):
        with pytest.raises(common.Diverged, match="not finite at step"):
            train(method, f"--method={method}", "--base_lr=1e30", "--warmup_epochs=0", "--weight_decay=0",
                  "--weight_decay_end=0")


# ---- looking ---------------------------------------------------------------------------------------------------------

def test_overlays_show_the_largest_value_where_it_is(tmp_path):
    pictures, maps = torch.rand(2, 3, 12, 12), torch.rand(2, 4, 9)
    maps[1, 2] = torch.tensor([0.0] * 5 + [3.0] + [0.0] * 3)             # the second row's last patch
    common.write_overlays(tmp_path / "a.png", pictures, maps)
    sheet = np.asarray(Image.open(tmp_path / "a.png"))
    assert sheet.shape == (2 * 48, 5 * 48, 3) and (sheet == sheet[::4, ::4].repeat(4, 0).repeat(4, 1)).all()
    sheet = torch.from_numpy(sheet[::4, ::4].astype(np.int64)).view(2, 12, 5, 12, 3).transpose(1, 2)
    assert (sheet[:, 0].permute(0, 3, 1, 2) - 255 * pictures).abs().max() <= 0.51
    red = sheet[..., 0] - sheet[..., 1]
    hot = red[1, 3] > 100
    assert hot[4:8, 8:12].all() and hot.sum() == 16
    heat = red[:, 1:].unflatten(2, (3, 4)).unflatten(4, (3, 4)).float().mean((3, 5)).flatten(2)
    assert torch.equal(heat.argmax(2), maps.argmax(2)) and heat.amin() <= 1


@pytest.mark.parametrize("arch", ["crate", "transformer", "tost"])
def test_saliency_is_what_the_class_token_attends_to(train, tmp_path, shapes, arch):
    train("a", f"--arch={arch}", "--epochs=0.1", "--base_lr=0.05", "--patch_size=4")
    content = common.load_checkpoint(tmp_path / "a" / "ckpt.pt")
    branch = train_simdino.build_model(config(f"--arch={arch}", "--patch_size=4")).eval()
    branch.load_state_dict(content["model"])
    sheet = np.asarray(Image.open(tmp_path / "a" / "step2.png"))
    assert sheet.shape == (8 * 128, 4 * 128, 3)                          # picture, mean, two heads; a pixel is 4 wide
    sheet = torch.from_numpy(sheet[::4, ::4].astype(np.float32)).view(8, 32, 4, 32, 3).transpose(1, 2)
    pictures = torch.from_numpy(np.array(shapes.val_images[:8]))
    assert torch.equal(sheet[:, 0], pictures.float())
    with torch.no_grad():
        Z = branch.encoder.tokens(augment.normalize(augment.to_float(pictures), shapes.mean, shapes.std))
        Z = branch.encoder.layers[-1].norm1(branch.encoder.layers[0](Z))
        attention = branch.encoder.layers[-1].attention
        if arch == "tost":
            maps = attention.map(Z)[:, :, 1:]
        else:
            q, k = attention.QKV(Z).chunk(3, -1)[:2] if arch == "transformer" else 2 * [attention.U(Z)]
            maps = torch.stack([(q[:, :1, h] @ k[:, :, h].mT / 8 ** 0.5).softmax(-1)[:, 0, 1:]
                                for h in (slice(0, 8), slice(8, 16))], 1)
    maps = torch.cat([maps.mean(1, keepdim=True), maps], 1)
    low, high = maps.amin(-1, keepdim=True), maps.amax(-1, keepdim=True)
    heat = (sheet[..., 0] - sheet[..., 1]) / (0.7 * 0.9 * 255)           # 0.7 of the red (1, 0.1, 0.1) over a grey
    heat = heat[:, 1:, 2::4, 2::4].flatten(2)
    told = (high - low > 1e-5).expand_as(maps)                            # a map that is flat but for rounding may be stretched to anything
    assert told.float().mean() > 0.5
    torch.testing.assert_close(heat[told], ((maps - low) / (high - low).clamp_min(1e-12))[told], atol=0.02, rtol=0)


# ---- mistakes --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("flags, says", [
    (["--local_size=12"], "--patch_size=8 does not divide --local_size=12"),
    (["--patch_size=5"], "patch_size=5 does not divide image_size"),
    (["--local_area=0.5"], "--local_area=0.5 is more than --global_area=0.4"),
    (["--method=byol"], "--method=byol is not one of simdino, dino"),
    (["--batch_size=500"], "batch size 500"), (["--batch_size=1"], "batch_size=1"), (["--eps=0"], "eps=0"),
    (["--gamma=-1"], "gamma=-1"), (["--momentum=1.5"], "momentum=1.5"), (["--global_area=0"], "global_area=0"),
    (["--heads=3"], "does not divide width"), (["--size=huge"], "huge"), (["--local_views=-1"], "local_views=-1")])
def test_mistakes_are_one_line(train, tmp_path, flags, says):
    with pytest.raises((common.UserError, ConfigError, images.DataError)) as error:
        train("a", *flags)
    assert says in str(error.value) and "\n" not in str(error.value) and not (tmp_path / "a" / "ckpt.pt").exists()


def test_a_batch_that_the_processes_cannot_share(train, monkeypatch):
    start = common.Processes.__init__

    def three(self, device):
        start(self, device)
        self.world = 3
    monkeypatch.setattr(common.Processes, "__init__", three)
    with pytest.raises(common.UserError, match="^20 samples do not divide among 3 processes$"):
        train("a")


def test_local_views_switched_off_need_no_size(train, tmp_path):
    train("a", "--local_views=0", "--local_size=13", "--epochs=0.05")
    assert metrics(tmp_path / "a")[0]["loss"] is not None
