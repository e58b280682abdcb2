"""data/images.py and data/prepare.py, against Pillow and definitions."""

import io
import itertools
import json
import pickle
import re
import shutil
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flags import parse
import train_mae
import train_simdino
import train_vit
from data import augment, images, prepare, store
from data.store import DataError

NAMES = [f"class {i}" for i in range(100)]


def noise(width, height, seed, mode="RGB"):
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, *channels), np.uint8))


def encoded(image):
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def write_parquet(path, pictures, image="image", names=None, row_group=4, **columns):
    """A Parquet file as on the Hub, with class names beside the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": p if isinstance(p, bytes) else encoded(p), "path": None} for p in pictures]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(cells, struct), **columns})
    if names:
        features = {next(iter(columns)): {"names": names, "_type": "ClassLabel"}}
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    pq.write_table(table, path, row_group_size=row_group)


def cifar100_folder(folder, train=40, val=20):
    pictures = [noise(32, 32, i) for i in range(train + val)]
    labels = [i % 5 for i in range(train + val)]
    for split, rows in (("train", slice(0, train)), ("test", slice(train, None))):
        file = folder / f"cifar100/{split}-00000-of-00001.parquet"
        write_parquet(file, pictures[rows], "img", NAMES, fine_label=labels[rows],
                      coarse_label=[0] * len(labels[rows]))
    return np.stack([np.asarray(p) for p in pictures]), np.array(labels)


def command(*arguments):
    return prepare.main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A cache with a small cifar100 in it."""
    folder = tmp_path_factory.mktemp("prepared")
    cifar100_folder(folder / "source")
    assert images.prepare("cifar100", folder / "source", folder / "cache")
    return folder / "cache"


# ---- preparation


def test_small_images_are_stored_as_they_are(tmp_path, capsys):
    pictures, labels = cifar100_folder(tmp_path / "source")
    arguments = "cifar100", "--source", tmp_path / "source", "--cache", tmp_path / "cache"
    assert command(*arguments) == 0
    assert "40 + 20 images of 32 px, 100 classes" in capsys.readouterr().out
    data = images.load("cifar100", tmp_path / "cache")
    assert (data.name, data.classes, data.image_size) == ("cifar100", NAMES, 32)
    assert np.array_equal(data.train_images, pictures[:40])
    assert np.array_equal(data.val_images, pictures[40:])
    assert np.array_equal(data.train_labels, labels[:40])
    assert np.array_equal(data.val_labels, labels[40:])
    assert data.train_labels.dtype == np.int64 and data.train_masks is None
    pixels = pictures[:40].reshape(-1, 3) / 255
    np.testing.assert_allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], rtol=1e-10)

    before = (tmp_path / "cache/cifar100/meta.json").stat().st_mtime_ns
    assert command(*arguments) == 0 and "already prepared" in capsys.readouterr().out
    assert (tmp_path / "cache/cifar100/meta.json").stat().st_mtime_ns == before
    assert command(*arguments, "--overwrite") == 0
    assert (tmp_path / "cache/cifar100/meta.json").stat().st_mtime_ns > before
    assert command("cifar100", "--verify", "--cache", tmp_path / "cache") == 0


def test_large_images_are_resized_and_cropped_as_by_torchvision(tmp_path):
    """Pillow's resizing; the longer side (343.04, 349.87 px) rounded down, half a pixel to even."""
    train = [noise(300, 402, 0), noise(410, 300, 1, "L"), noise(256, 256, 2),
             noise(100, 120, 3, "RGBA")]
    by_hand = [  # the shorter side at 256, and the corners of the middle 256 x 256
        train[0].resize((256, 343), Image.BICUBIC).crop((0, 44, 256, 300)),
        train[1].convert("RGB").resize((349, 256), Image.BICUBIC).crop((46, 0, 302, 256)),
        train[2],
        train[3].convert("RGB").resize((256, 307), Image.BICUBIC).crop((0, 26, 256, 282))]
    first, second = (tmp_path / f"data/train-0000{i}-of-00002.parquet" for i in range(2))
    write_parquet(first, train[:3], label=[0, 1, 36], row_group=2)
    write_parquet(second, train[3:], label=[3])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", train[:1], label=[5])
    assert images.prepare("pets", tmp_path, tmp_path / "cache", workers=1)
    data = images.load("pets", tmp_path / "cache")
    assert data.image_size == 256 and data.classes == [str(i) for i in range(37)]
    assert data.train_labels.tolist() == [0, 1, 36, 3] and data.val_labels.tolist() == [5]
    for stored, expected in zip([*data.train_images, data.val_images[0]], by_hand + by_hand[:1]):
        assert np.array_equal(stored, np.asarray(expected))
    pixels = np.stack([np.asarray(p) for p in by_hand]).reshape(-1, 3) / 255
    np.testing.assert_allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], rtol=1e-10)


def test_processes_decode_to_the_same_files(tmp_path):
    write_parquet(tmp_path / "train.parquet", [noise(40, 30 + i % 7, i) for i in range(70)],
                  label=list(range(70)), row_group=50)
    write_parquet(tmp_path / "validation.parquet", [noise(40, 40, 9)], label=[0])
    write_parquet(tmp_path / "test.parquet", [noise(40, 40, 8)] * 2, label=[1, 2])  # preferred
    for workers in (1, 2):
        assert images.prepare("flowers102", tmp_path, tmp_path / str(workers), workers=workers)
    one, two = (store.read_meta("flowers102", tmp_path / w) for w in "12")
    assert one == two and one["files"]["val_images.npy"]["shape"] == [2, 256, 256, 3]


def test_imagenet_takes_the_validation_split(tmp_path):
    def file(split):
        return tmp_path / f"data/{split}-00000-of-00001.parquet"

    write_parquet(file("train"), [noise(30, 30, 0)], label=[999])
    write_parquet(file("test"), [noise(30, 30, 1)], label=[-1])
    with pytest.raises(DataError, match="no Parquet file of the val split"):
        images.prepare("imagenet", tmp_path, tmp_path / "cache")
    write_parquet(file("validation"), [noise(30, 30, 2)], label=[7])
    assert images.prepare("imagenet", tmp_path, tmp_path / "cache")
    assert images.load("imagenet", tmp_path / "cache").val_labels.tolist() == [7]


def test_download_on_first_use(tmp_path, monkeypatch):
    pictures, labels = cifar100_folder(tmp_path / "repository")
    asked = {}

    def snapshot_download(repository, **arguments):
        asked[repository] = arguments["allow_patterns"]
        return tmp_path / "repository"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    data = images.load("cifar100", tmp_path / "cache")
    assert np.array_equal(data.train_images, pictures[:40])
    assert np.array_equal(data.val_labels, labels[40:])
    assert asked == {"uoft-cs/cifar100": ["*train*.parquet", "*test*.parquet", "*val*.parquet"]}


def save_pictures(root, labels, first=0, suffix=".png"):
    """root/LABEL/NUMBER.png, one for each label; {path: picture}."""
    saved = {}
    for i, label in enumerate(labels, first):
        picture = noise(40 + i % 3, 36 + i % 5, i)
        path = root / label / f"{i:03}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        saved[path] = picture
    return saved


def test_own_pictures_hold_out_a_tenth_of_each_class(tmp_path, capsys):
    """Of the files of a class in order, the first and every tenth after it. Broken ones are named,
    others of a folder not looked at; the rest is as for the published sets."""
    saved = save_pictures(tmp_path / "a", ["cat", "dog", "dog"] * 7)
    (tmp_path / "a/cat/zz.jpg").write_bytes(b"no picture")
    (tmp_path / "a/cat/notes.txt").write_text("not looked at")
    assert command("mine", "--source", tmp_path / "a", "--cache", tmp_path / "c", "--size=24") == 0
    out, errors = capsys.readouterr()
    assert out.startswith("mine: 18 + 3 images of 24 px, 2 classes")
    assert "left out" in errors and "zz.jpg" in errors and "left out 1 of 22 pictures" in errors

    data = images.load("mine", tmp_path / "c")
    assert data.classes == ["cat", "dog"] and data.image_size == 24
    by_class = {label: sorted(p for p in saved if p.parent.name == label) for label in data.classes}
    held_out = [path for files in by_class.values() for path in files[::10]]
    kept = [path for files in by_class.values() for path in files if path not in held_out]
    for split, files in (("train", kept), ("val", held_out)):
        wanted = np.stack([images.resize_crop(saved[path], 24) for path in files])
        assert np.array_equal(getattr(data, f"{split}_images"), wanted)
        labels = [data.classes.index(path.parent.name) for path in files]
        assert getattr(data, f"{split}_labels").tolist() == labels
    pixels = data.train_images.reshape(-1, 3) / 255
    assert np.allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], atol=1e-12)
    assert command("mine", "--verify", "--cache", tmp_path / "c") == 0


@pytest.mark.parametrize("word", ["val", "validation", "test"])
def test_own_pictures_in_splits(tmp_path, word):
    """ImageFolder's layout; a folder below the class belongs to it."""
    save_pictures(tmp_path / "a/train", ["cat", "dog", "dog/old"])
    save_pictures(tmp_path / "a" / word, ["dog"], first=3, suffix=".webp")
    command("mine", "--source", tmp_path / "a", "--cache", tmp_path)
    data = images.load("mine", tmp_path)
    assert data.train_labels.tolist() == [0, 1, 1] and data.val_labels.tolist() == [1]


def test_own_pictures_stand_upright(tmp_path):
    """The camera's orientation tag is applied: 6 is a quarter turn clockwise."""
    for name in ("a/x/1.jpg", "a/x/2.jpg", "a/y/1.jpg"):
        left = np.zeros((32, 32, 3), np.uint8)
        left[:, :16] = 255
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        tag = Image.Exif()
        tag[0x0112] = 6
        Image.fromarray(left).save(tmp_path / name, exif=tag, quality=95)
    command("mine", "--source", tmp_path / "a", "--cache", tmp_path)
    top, bottom = np.split(images.load("mine", tmp_path).train_images[0], 2)
    assert top.min() > 240 and bottom.max() < 15


def test_errors_of_own_pictures(tmp_path, capsys):
    picture = noise(8, 8, 0)
    for path in ("flat/1.png", "one/cat/1.png", "noval/train/cat/1.png", "noval/train/dog/1.png",
                 "new/train/cat/1.png", "new/train/dog/1.png", "new/val/emu/1.png"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        picture.save(tmp_path / path)
    for label in ("cat", "dog"):
        (tmp_path / "bad" / label).mkdir(parents=True)
        for name in ("1.png", "2.png"):
            (tmp_path / "bad" / label / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for folder, message in (("flat", "is in no class folder"), ("one", "has 1 class folders"),
                            ("noval", "no pictures to validate with"),
                            ("new", "class emu has no training pictures"),
                            ("bad", "none of the 2 pictures of the train split"),
                            ("empty", "has no pictures .* needs --tokenizer")):
        assert command("mine", "--source", tmp_path / folder, "--cache", tmp_path / "c") == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("prepare.py: ") and re.search(message, error)
        assert not (tmp_path / "c/mine").exists()
    assert command("cifar10", "--size=8", "--source", tmp_path) == 2
    assert "--size is for a folder of your own pictures" in capsys.readouterr().err


def test_errors_of_the_user(tmp_path, capsys):
    def line(*arguments):
        capsys.readouterr()
        try:
            status = command(*arguments, "--cache", tmp_path / "cache")
        except SystemExit as stop:
            status = stop.code
        error = capsys.readouterr().err
        assert status == 2 and error.count("\n") == 1, error
        return error

    source = tmp_path / "source"
    source.mkdir()
    assert "did you mean 'cifar100'" in line("cifar-100")
    assert "--workers=0" in line("pets", "--workers=0")
    assert "cannot read" in line("pets", "--verify")
    assert "has no .parquet file" in line("pets", "--source", source)
    good = [noise(9, 9, i) for i in range(3)]
    write_parquet(source / "test.parquet", good[:1], label=[0])
    cases = {
        "they are another set": dict(pictures=good, names=list("abcde"), label=[0, 1, 2]),
        "cannot tell which column is the label":
            dict(pictures=good, fine_label=[0, 1, 2], label=[0, 1, 2]),
        "train.parquet row 2: label 37, allowed are 0 to 36":
            dict(pictures=good, label=[0, 36, 37]),
        "train.parquet row 0: label None":
            dict(pictures=good, label=pa.array([None, 1, 2], pa.int64())),
        "train.parquet row 1: damaged image":
            dict(pictures=[good[0], encoded(good[1])[:60]], label=[0, 0]),
        "train.parquet row 2: has no image": dict(pictures=[*good[:2], b""], label=[0, 0, 0]),
    }
    for expected, table in cases.items():
        write_parquet(source / "train.parquet", **table)
        assert expected in line("pets", "--source", source)
    assert "row 0: the image is 9 x 9, expected 32 x 32" in line("cifar10", "--source", source)
    (source / "train.parquet").write_bytes((source / "train.parquet").read_bytes()[:-9])
    assert "cannot read" in line("pets", "--source", source)
    assert not list((tmp_path / "cache").glob("[!.]*"))
    assert not list((tmp_path / "cache").glob(".*.draft"))


def test_labels_out_of_range_and_missing_files(prepared, tmp_path):
    folder = tmp_path / "cifar100"
    shutil.copytree(prepared / "cifar100", folder)
    labels = np.load(folder / "train_labels.npy")
    for wrong in (-1, 100):
        labels[7] = wrong
        np.save(folder / "train_labels.npy", labels)
        with pytest.raises(DataError, match="train_labels.npy .* allowed are 0 to 99"):
            images.load("cifar100", tmp_path)
    (folder / "train_labels.npy").unlink()
    with pytest.raises(DataError, match="train_labels.npy .*No such file"):
        images.load("cifar100", tmp_path)


# ---- batches


def test_index_batches_cover_each_epoch_once_and_start_anywhere():
    n, size = 103, 10
    steps = list(itertools.islice(images.index_batches(n, size, seed=3), 25))
    for epoch in range(2):
        seen = np.concatenate(steps[10 * epoch : 10 * (epoch + 1)])
        assert len(np.unique(seen)) == 100 and seen.min() >= 0 and seen.max() < n
        assert np.array_equal(seen, images.order(n, epoch, 3)[:100])
    assert not np.array_equal(steps[0], steps[10])
    for start in (0, 7, 10, 19):
        resumed = images.index_batches(n, size, seed=3, start_step=start)
        assert all(np.array_equal(a, next(resumed)) for a in steps[start:])
    other = next(images.index_batches(n, size, seed=4))
    assert not np.array_equal(other, steps[0])
    assert np.array_equal(np.sort(images.order(n, 5, 3)), np.arange(n))
    with pytest.raises(DataError, match="batch size 10"):
        next(images.index_batches(9, 10, 0))


def test_ranks_share_the_global_batch():
    whole = images.index_batches(50, 8, seed=1, start_step=2)
    ranks = [images.index_batches(50, 8, seed=1, start_step=2, rows=slice(4 * r, 4 * r + 4))
             for r in range(2)]
    for _ in range(9):
        assert np.array_equal(next(whole), np.concatenate([next(rank) for rank in ranks]))


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_equals_resident(prepared, workers):
    data = images.load("cifar100", prepared)
    resident = images.Images(data.train_images, data.train_labels, "cpu")
    streaming = images.Images(data.train_images, data.train_labels, "cpu", resident=False)
    assert resident.resident and not streaming.resident and len(streaming) == 40
    state = torch.get_rng_state()
    both = [split.batches(images.index_batches(40, 8, seed=0), workers)
            for split in (resident, streaming)]
    for index in itertools.islice(images.index_batches(40, 8, seed=0), 12):
        (x, y), (x_streamed, y_streamed) = map(next, both)
        assert x.dtype == torch.uint8 and x.shape == (8, 32, 32, 3) and y.dtype == torch.int64
        assert torch.equal(x, x_streamed) and torch.equal(y, y_streamed)
        assert np.array_equal(x, data.train_images[index])
        assert np.array_equal(y, data.train_labels[index])
    assert torch.equal(torch.get_rng_state(), state)
    for index in (np.array([3, 0]), torch.tensor([3, 0])):
        assert torch.equal(streaming.batch(index)[0], resident.batch(index)[0])


class OneDevice(TorchDispatchMode):
    """Raises at an operation between tensors of two devices: it copies one of them, or all."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        assert len({t.device for t in tensors}) < 2, func
        return out


@pytest.mark.parametrize("script, flags", [(train_vit, []), (train_vit, ["--crop=resized"]),
                                           (train_mae, []), (train_simdino, ["--blur=2"])])
@pytest.mark.parametrize("resident", [True, False])
def test_a_gpu_is_fed_without_waiting_for_it(script, flags, resident, monkeypatch):
    """The meta device stands for it: tensors there have no values, so to ask for one (.item(), a
    mask, a count) raises, and only a pinned copy gets there."""
    def to_gpu(t, target, **how):
        if target != torch.device("cuda"):
            return to(t, target, **how)
        assert t.pinned and how == dict(non_blocking=True)
        return torch.empty(t.shape, dtype=t.dtype, device="meta")

    def pin(t):
        t.pinned = True
        return t

    c, _ = parse(script.Config, script.PRESETS, ["cifar10", "--batch_size=8", *flags], "")
    data = SimpleNamespace(image_size=32, mean=[0.4] * 3, std=[0.2] * 3)
    pixels, labels = np.zeros((40, 32, 32, 3), np.uint8), np.zeros(40, np.int64)
    source = images.Images(pixels, labels, "meta", resident)
    source.device, to = torch.device("cuda"), torch.Tensor.to
    if script is train_simdino:
        augmented = script.make_views
        rngs = script.random_numbers(c, 0, slice(0, 8), "cpu")
    else:
        augmented, rngs = script.augmented, [augment.BatchRandom(0, 8)]
    monkeypatch.setattr(augment.BatchRandom, "draw", lambda rng, function, shape: function(
        (rng.batch, *shape), device="meta")[rng.rows])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to_gpu)
    monkeypatch.setattr(torch, "tensor", None)      # on a GPU a copy that waits
    with OneDevice():
        batch, labels = next(source.batches(images.index_batches(40, 8, 0)))
        views = augmented(batch, *rngs, c=c, data=data)
    assert labels.shape == (8,) and views[0].is_meta and views[0].shape[-3:] == (3, 32, 32)


def test_a_spawned_worker_gets_the_address_of_the_images(prepared):
    data = images.load("cifar100", prepared)
    sent = pickle.dumps(images._Gather(data.train_images, torch.from_numpy(data.train_labels)))
    assert len(sent) < 5_000 < data.train_images.nbytes
    assert np.array_equal(pickle.loads(sent)[np.array([5, 2])][0], data.train_images[[5, 2]])


# ---- shapes


@pytest.fixture(scope="module")
def shapes():
    return images.draw_shapes(4000, seed=0)


def test_shapes_depend_on_the_seed_alone(shapes):
    first, again, other = (images.draw_shapes(60, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not np.array_equal(first[0], other[0])
    pictures, labels, masks = shapes
    assert pictures.shape == (4000, 32, 32, 3) and masks.shape == (4000, 32, 32)
    assert pictures.dtype == masks.dtype == np.uint8 and labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [400] * len(images.SHAPES) == [400] * 10
    assert np.bincount(labels[:1000], minlength=10).min() > 50  # in random order


def test_masks_are_the_objects(shapes):
    pictures, _, masks = shapes
    assert np.isin(masks, (0, 1)).all()
    area = masks.mean((1, 2))
    assert area.min() > 0.1 and area.max() < 0.5
    # Told apart by the nearer of the two mean colours, pixels fall to either side as the mask says.
    x, inside = pictures.astype(np.float32), masks[..., None] == 1
    front = (x * inside).sum((1, 2), keepdims=True) / inside.sum((1, 2), keepdims=True)
    back = (x * ~inside).sum((1, 2), keepdims=True) / (~inside).sum((1, 2), keepdims=True)
    nearer = np.linalg.norm(x - front, axis=-1) < np.linalg.norm(x - back, axis=-1)
    agreement = (nearer == masks).mean((1, 2))
    assert agreement.mean() > 0.97 and np.quantile(agreement, 0.02) > 0.85


def test_camouflaged_objects_differ_by_what_their_texture_varies():
    """Mean colours are 0.3 apart, pixels nearly as far from their mean; no place is a good guess."""
    pictures, labels, masks = images.draw_shapes(1000, seed=3, **images.CAMOUFLAGE["val"])
    assert np.bincount(labels).tolist() == [100] * 10
    x, inside = pictures / 255, masks[..., None].astype(bool)
    object_, ground = (x.mean((1, 2), where=where) for where in (inside, ~inside))
    assert 0.24 < np.median(np.linalg.norm(object_ - ground, axis=1)) < 0.32
    assert 0.2 < np.median(np.sqrt(x.var((1, 2), where=~inside).sum(1))) < 0.3
    assert masks.mean(0).max() < 0.45 and 0.08 < masks.mean() < 0.12


@pytest.mark.parametrize("name", ["shapes", "camouflage"])
def test_drawn_sets_are_prepared_on_first_use(tmp_path, monkeypatch, name):
    draw = images._draw
    monkeypatch.setattr(images, "_draw", lambda folder, **more: draw(folder, 200, 50, **more))
    data = images.load(name, tmp_path)
    assert data.classes == list(images.SHAPES) and data.image_size == 32
    for split, n in (("train", 200), ("val", 50)):
        assert getattr(data, f"{split}_images").shape == (n, 32, 32, 3)
        assert getattr(data, f"{split}_masks").shape == (n, 32, 32)
    pixels = data.train_images.reshape(-1, 3) / 255
    np.testing.assert_allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], rtol=1e-10)
    hidden = images.CAMOUFLAGE["val"] if name == "camouflage" else {}
    assert np.array_equal(data.val_images, images.draw_shapes(50, 1, **hidden)[0])
    store.verify(name, tmp_path)
