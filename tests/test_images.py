"""data/images.py and data/prepare.py: from Parquet to batches, against Pillow and definitions; damage; shapes."""

import io
import itertools
import json
import pickle
import shutil
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data import images, prepare
from data.images import DataError


NAMES = [f"class {i}" for i in range(100)]


def noise(width, height, seed, mode="RGB"):
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, *channels), np.uint8))


def encoded(picture):
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def write_parquet(path, pictures, image="image", names=None, row_group=4, **columns):
    """A Parquet file as the Hub has them: a struct of bytes and path, and class names beside the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": p if isinstance(p, bytes) else encoded(p), "path": None} for p in pictures]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(cells, struct), **columns})
    if names:
        features = {next(iter(columns)): {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=row_group)


def cifar100_folder(folder, train=40, val=20):
    pictures = [noise(32, 32, i) for i in range(train + val)]
    labels = [i % 5 for i in range(train + val)]
    for split, rows in (("train", slice(0, train)), ("test", slice(train, None))):
        write_parquet(folder / "cifar100" / f"{split}-00000-of-00001.parquet", pictures[rows], "img", NAMES,
                      fine_label=labels[rows], coarse_label=[0] * len(labels[rows]))
    return np.stack([np.asarray(p) for p in pictures]), np.array(labels)


def command(*arguments):
    return prepare.main([str(a) for a in arguments])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A cache with a small cifar100 in it."""
    folder = tmp_path_factory.mktemp("prepared")
    cifar100_folder(folder / "source")
    assert command("cifar100", "--source", folder / "source", "--cache", folder / "cache") == 0
    return folder / "cache"


@pytest.fixture
def damaged(prepared, tmp_path):
    """A copy of that cache, to damage."""
    shutil.copytree(prepared, tmp_path / "cache")
    return tmp_path / "cache"


def assert_fails(function, *words):
    """The one line of the DataError that `function` raises, which has all `words`."""
    with pytest.raises(DataError) as caught:
        function()
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line
    return line


# ---- preparation


def test_small_pictures_are_stored_as_they_are(tmp_path, capsys):
    pictures, labels = cifar100_folder(tmp_path / "source")
    arguments = "cifar100", "--source", tmp_path / "source", "--cache", tmp_path / "cache"
    assert command(*arguments) == 0
    assert "40 + 20 pictures of 32 px, 100 classes" in capsys.readouterr().out
    data = images.load("cifar100", tmp_path / "cache", allow_prepare=False)
    assert (data.name, data.classes, data.image_size) == ("cifar100", NAMES, 32)
    assert np.array_equal(data.train_images, pictures[:40]) and np.array_equal(data.val_images, pictures[40:])
    assert np.array_equal(data.train_labels, labels[:40]) and np.array_equal(data.val_labels, labels[40:])
    assert data.train_labels.dtype == np.int64 and data.train_masks is None and data.val_masks is None
    pixels = pictures[:40].reshape(-1, 3) / 255
    np.testing.assert_allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], rtol=1e-10)

    before = (tmp_path / "cache/cifar100/meta.json").stat().st_mtime_ns
    assert command(*arguments) == 0 and "already prepared" in capsys.readouterr().out
    assert (tmp_path / "cache/cifar100/meta.json").stat().st_mtime_ns == before
    assert command(*arguments, "--overwrite") == 0
    assert (tmp_path / "cache/cifar100/meta.json").stat().st_mtime_ns > before
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [".cifar100.lock", "cifar100"]


def test_large_pictures_are_resized_and_cropped_as_by_pillow(tmp_path):
    train = [noise(300, 400, 0), noise(500, 375, 1, "L"), noise(256, 256, 2), noise(100, 120, 3, "RGBA")]
    by_hand = [  # the size with the shorter side at 256, and the corner of the middle 256 x 256
        train[0].resize((256, 341), Image.BICUBIC).crop((0, 42, 256, 298)),
        train[1].convert("RGB").resize((341, 256), Image.BICUBIC).crop((42, 0, 298, 256)),
        train[2],
        train[3].convert("RGB").resize((256, 307), Image.BICUBIC).crop((0, 25, 256, 281))]
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", train[:3], label=[0, 1, 36], row_group=2)
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", train[3:], label=[3])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", train[:1], label=[5])
    assert command("pets", "--source", tmp_path, "--cache", tmp_path / "cache", "--workers", 1) == 0
    data = images.load("pets", tmp_path / "cache")
    assert data.image_size == 256 and data.train_labels.tolist() == [0, 1, 36, 3] and data.val_labels.tolist() == [5]
    for stored, expected in zip([*data.train_images, data.val_images[0]], by_hand + by_hand[:1]):
        assert np.array_equal(stored, np.asarray(expected))
    assert data.classes == [str(i) for i in range(37)]
    pixels = np.stack([np.asarray(p) for p in by_hand]).reshape(-1, 3) / 255
    np.testing.assert_allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], rtol=1e-10)


def test_processes_decode_to_the_same_files(tmp_path):
    pictures = [noise(40, 30 + i, i) for i in range(6)]
    write_parquet(tmp_path / "train.parquet", pictures, label=list(range(6)), row_group=2)
    write_parquet(tmp_path / "validation.parquet", [noise(40, 40, 9)], label=[0])
    write_parquet(tmp_path / "test.parquet", [noise(40, 40, 8)] * 2, label=[1, 2])  # the one that papers report on
    for workers in (1, 2):
        assert prepare.prepare("flowers102", tmp_path, tmp_path / str(workers), workers=workers)
    one, two = (images.read_meta("flowers102", tmp_path / w) for w in "12")
    assert one == two and one["files"]["val_images.npy"]["shape"] == [2, 256, 256, 3]


def test_imagenet_takes_the_validation_split(tmp_path):
    write_parquet(tmp_path / "data/train-00000-of-00001.parquet", [noise(30, 30, 0)], label=[999])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", [noise(30, 30, 1)], label=[-1])
    assert_fails(lambda: prepare.prepare("imagenet", tmp_path, tmp_path / "cache"), "validation")
    write_parquet(tmp_path / "data/validation-00000-of-00001.parquet", [noise(30, 30, 2)], label=[7])
    assert prepare.prepare("imagenet", tmp_path, tmp_path / "cache")
    assert images.load("imagenet", tmp_path / "cache").val_labels.tolist() == [7]


def test_hub_files_come_through_datasets(tmp_path, monkeypatch):
    """`datasets` takes a folder for a repository, so all but the transfer itself runs here."""
    pictures, labels = cifar100_folder(tmp_path / "repository")
    monkeypatch.setattr(prepare, "_hub_answers", lambda: True)
    monkeypatch.setitem(images.SETS, "cifar100", images.ImageSet(str(tmp_path / "repository" / "cifar100"), 100, 32))
    data = images.load("cifar100", tmp_path / "cache")
    assert np.array_equal(data.train_images, pictures[:40]) and np.array_equal(data.val_labels, labels[40:])


def test_missing_data_offline(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    both = ("cifar10 is not prepared", f"python data/prepare.py cifar10 --cache {tmp_path};",
            f"python data/prepare.py cifar10 --source DIR --cache {tmp_path}", "uoft-cs/cifar10")
    line = assert_fails(lambda: images.load("cifar10", tmp_path), *both)
    assert command("cifar10", "--cache", tmp_path) == 2
    assert capsys.readouterr().err == f"prepare.py: {line}\n"
    assert_fails(lambda: images.load("imagenet", tmp_path), "python data/prepare.py imagenet", "--source DIR", "hf auth login")
    assert_fails(lambda: images.load("cifar10", tmp_path, allow_prepare=False), "is missing", "--source DIR")
    assert not (tmp_path / "cifar10").exists()


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

    assert "did you mean 'cifar100'" in line("cifar-100")
    assert "no such folder" in line("pets", "--source", tmp_path / "nowhere")
    assert "--frobnicate" in line("pets", "--frobnicate")
    assert "not prepared" in line("pets", "--verify")
    assert_fails(lambda: images.load("cifra10"), "did you mean 'cifar10'")

    source = tmp_path / "source"
    source.mkdir()
    assert "train.parquet" in line("pets", "--source", source)
    write_parquet(source / "train.parquet", [noise(9, 9, 0)], label=[0])
    write_parquet(source / "rest.parquet", [noise(9, 9, 0)], label=[0])
    assert "test.parquet" in line("pets", "--source", source)
    (source / "rest.parquet").rename(source / "test.parquet")
    good = [noise(9, 9, i) for i in range(3)]
    cases = {
        "cannot tell which column is the label": dict(pictures=good, fine_label=[0, 1, 2], label=[0, 1, 2]),
        "none of image, name": dict(pictures=good, name=["a", "b", "c"]),
        "train.parquet row 2: label 37, allowed are 0 to 36": dict(pictures=good, label=[0, 36, 37]),
        "train.parquet row 1: label -1": dict(pictures=good, label=[0, -1, 0]),
        "train.parquet row 0: label None": dict(pictures=good, label=pa.array([None, 1, 2], pa.int64())),
        "train.parquet row 1: damaged picture": dict(pictures=[good[0], encoded(good[1])[:60]], label=[0, 0]),
        "train.parquet row 2: has no picture": dict(pictures=[*good[:2], b""], label=[0, 0, 0]),
    }
    for expected, table in cases.items():
        write_parquet(source / "train.parquet", **table)
        assert expected in line("pets", "--source", source)
    write_parquet(source / "train.parquet", good, label=[0, 1, 2])
    assert "row 0: the picture is 9 x 9, expected 32 x 32" in line("cifar10", "--source", source)
    whole = (source / "train.parquet").read_bytes()
    (source / "train.parquet").write_bytes(whole[:-9])
    assert "cannot read" in line("pets", "--source", source)
    assert not list((tmp_path / "cache").glob("[!.]*")) and not list((tmp_path / "cache").glob(".*.draft"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, OSError(28, "No space left on device")])
def test_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch, error):
    cifar100_folder(tmp_path / "source")
    calls, decode = itertools.count(), prepare._decode

    def interrupted(*arguments):
        if next(calls) == 50:  # in the validation split: the training files are there by then
            raise error
        return decode(*arguments)

    monkeypatch.setattr(prepare, "_decode", interrupted)
    with pytest.raises((type(error), DataError) if isinstance(error, OSError) else error):
        prepare.prepare("cifar100", tmp_path / "source", tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [".cifar100.lock"]
    assert_fails(lambda: images.load("cifar100", tmp_path / "cache", allow_prepare=False), "is missing")


def test_left_over_of_a_killed_run_is_replaced(tmp_path):
    cifar100_folder(tmp_path / "source")
    draft = tmp_path / "cache" / ".cifar100.draft"
    draft.mkdir(parents=True)
    (draft / "train_images.npy").write_bytes(b"half")
    assert_fails(lambda: images.load("cifar100", tmp_path / "cache", allow_prepare=False), "is missing")
    assert prepare.prepare("cifar100", tmp_path / "source", tmp_path / "cache") and not draft.exists()
    images.verify("cifar100", tmp_path / "cache")


def test_two_preparations_at_once(tmp_path, capsys):
    cifar100_folder(tmp_path / "source", train=300)
    results = []
    threads = [threading.Thread(target=lambda: results.append(
        prepare.prepare("cifar100", tmp_path / "source", tmp_path / "cache"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, False, True]
    images.verify("cifar100", tmp_path / "cache")


# ---- damage


def test_verify_sees_a_flipped_bit(damaged, capsys):
    assert command("cifar100", "--cache", damaged, "--verify") == 0
    assert "all as prepared" in capsys.readouterr().out
    path = damaged / "cifar100" / "val_images.npy"
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    assert command("cifar100", "--cache", damaged, "--verify") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "val_images.npy" in error and "train" not in error and "--overwrite" in error


def test_mutated_files_load_unaffected_or_give_one_line(damaged):
    whole = {path: path.read_bytes() for path in (damaged / "cifar100").iterdir()}
    expected, rng, refused = images.load("cifar100", damaged), np.random.default_rng(0), 0
    for trial in range(300):
        path = sorted(whole)[trial % len(whole)]
        content = bytearray(whole[path])
        near = len(content) if path.suffix == ".json" or trial % 2 else 128  # half of the time in the header
        if trial % 11 == 0:
            content = content[: rng.integers(len(content))]
        elif trial % 13 == 0:
            content += b"\0"
        else:
            for _ in range(rng.integers(1, 4)):
                content[rng.integers(near)] = rng.integers(256)
        path.write_bytes(content)
        try:
            data = images.load("cifar100", damaged)
            assert data.classes == expected.classes and data.mean == expected.mean
            assert data.train_images.shape == (40, 32, 32, 3) and data.val_images.dtype == np.uint8
            assert 0 <= data.train_labels.min() and data.train_labels.max() < 5 and len(data.val_labels) == 20
        except DataError as error:
            assert "\n" not in str(error) and "cifar100" in str(error) and "--overwrite" in str(error)
            refused += 1
        if path.suffix == ".npy" and content != whole[path]:
            assert_fails(lambda: images.verify("cifar100", damaged), path.name)
        path.write_bytes(whole[path])
    assert refused > 150


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b"[" * 100_000, b'{"seal": NaN}', b"\xff\xfe\x00"])
def test_meta_that_is_something_else(damaged, content):
    (damaged / "cifar100" / "meta.json").write_bytes(content)
    assert_fails(lambda: images.load("cifar100", damaged), "meta.json", "--overwrite")


@pytest.mark.parametrize("change", [
    dict(classes=["a"]), dict(classes=[]), dict(classes=[1] * 5), dict(mean=[0.5, 0.5]), dict(std=[0.0, 1.0, 1.0]),
    dict(mean="grey"), dict(image_size=64), dict(image_size="32"), dict(name="pets"), dict(kind="text"), dict(kind=[]),
    dict(format=2), dict(files={}), dict(files={"train_images.npy": 3}),
    dict(files={"train_images.npy": dict(sha256="", bytes=1, shape=[-1], dtype="object")})])
def test_meta_with_a_valid_checksum_but_wrong_content(damaged, change):
    path = damaged / "cifar100" / "meta.json"
    meta = json.loads(path.read_text()) | change
    path.write_text(json.dumps(meta | {"seal": images._seal(meta)}))
    assert_fails(lambda: images.load("cifar100", damaged), "cifar100", "--overwrite")


def test_labels_out_of_range_and_missing_files(damaged):
    path = damaged / "cifar100" / "train_labels.npy"
    labels = np.load(path)
    for wrong in (-1, 100):
        labels[7] = wrong
        np.save(path, labels)
        assert_fails(lambda: images.load("cifar100", damaged), "train_labels.npy", "allowed are 0 to 99")
    path.unlink()
    assert_fails(lambda: images.load("cifar100", damaged), "train_labels.npy", "No such file")


def test_a_pickle_is_never_run(damaged):
    class Trap:
        def __reduce__(self):
            return (open, (str(damaged / "sprung"), "w"))

    path = damaged / "cifar100" / "train_labels.npy"
    size, meta = path.stat().st_size, path.parent / "meta.json"
    description = meta.read_bytes()
    for write in (lambda: np.save(path, np.array([Trap()], object), allow_pickle=True),
                  lambda: path.write_bytes(pickle.dumps(Trap()))):
        write()
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))
        assert_fails(lambda: images.load("cifar100", damaged), "train_labels.npy")
        meta.write_bytes(pickle.dumps(Trap()))
        assert_fails(lambda: images.load("cifar100", damaged), "meta.json")
        meta.write_bytes(description)
    assert not (damaged / "sprung").exists()


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
        resumed = itertools.islice(images.index_batches(n, size, seed=3, start_step=start), 25 - start)
        assert all(np.array_equal(a, b) for a, b in zip(resumed, steps[start:], strict=True))
    other = next(images.index_batches(n, size, seed=4))
    assert not np.array_equal(other, steps[0])
    assert np.array_equal(np.sort(images.order(n, 5, 3)), np.arange(n)) and images.order(n, 5, 3).dtype == np.int64
    assert_fails(lambda: next(images.index_batches(9, 10, 0)), "batch size 10")


def test_ranks_share_the_global_batch():
    whole = images.index_batches(50, 8, seed=1, start_step=2)
    ranks = [images.index_batches(50, 8, seed=1, start_step=2, rows=slice(4 * r, 4 * r + 4)) for r in range(2)]
    for _ in range(9):
        assert np.array_equal(next(whole), np.concatenate([next(rank) for rank in ranks]))


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_equals_resident(prepared, workers):
    data = images.load("cifar100", prepared)
    resident = images.Images(data.train_images, data.train_labels, "cpu")
    streaming = images.Images(data.train_images, data.train_labels, "cpu", resident=False)
    assert resident.resident and not streaming.resident and len(streaming) == 40
    state = torch.get_rng_state()
    both = [split.batches(images.index_batches(40, 8, seed=0), workers) for split in (resident, streaming)]
    for index in itertools.islice(images.index_batches(40, 8, seed=0), 12):
        (x, y), (x_streamed, y_streamed) = map(next, both)
        assert x.dtype == torch.uint8 and x.shape == (8, 32, 32, 3) and y.dtype == torch.int64
        assert torch.equal(x, x_streamed) and torch.equal(y, y_streamed)
        assert np.array_equal(x, data.train_images[index]) and np.array_equal(y, data.train_labels[index])
    assert torch.equal(torch.get_rng_state(), state)
    for index in (np.array([3, 0]), torch.tensor([3, 0])):
        assert torch.equal(streaming.batch(index)[0], resident.batch(index)[0])


def test_a_started_process_gets_the_address_of_the_pictures(prepared):
    data = images.load("cifar100", prepared)
    sent = pickle.dumps(images._Rows(data.train_images, torch.from_numpy(data.train_labels)))
    assert len(sent) < 5_000 < data.train_images.nbytes
    assert np.array_equal(pickle.loads(sent)[np.array([5, 2])][0], data.train_images[[5, 2]])


# ---- shapes


@pytest.fixture(scope="module")
def shapes():
    return images.draw_shapes(4000, seed=0)


def test_shapes_depend_on_the_seed_alone(shapes):
    first, again, other = images.draw_shapes(60, 5), images.draw_shapes(60, 5), images.draw_shapes(60, 6)
    assert all(np.array_equal(a, b) for a, b in zip(first, again)) and not np.array_equal(first[0], other[0])
    pictures, labels, masks = shapes
    assert pictures.shape == (4000, 32, 32, 3) and masks.shape == (4000, 32, 32)
    assert pictures.dtype == masks.dtype == np.uint8 and labels.dtype == np.int64
    assert np.bincount(labels).tolist() == [400] * len(images.SHAPES) == [400] * 10
    assert np.bincount(labels[:1000], minlength=10).min() > 50  # in random order


def test_masks_are_the_objects(shapes):
    pictures, labels, masks = shapes
    assert np.isin(masks, (0, 1)).all()
    area = masks.mean((1, 2))
    assert area.min() > 0.1 and area.max() < 0.5
    # Told apart by which of the two mean colours is nearer, pixels fall to either side as the mask says.
    x, inside = pictures.astype(np.float32), masks[..., None] == 1
    front = (x * inside).sum((1, 2), keepdims=True) / inside.sum((1, 2), keepdims=True)
    back = (x * ~inside).sum((1, 2), keepdims=True) / (~inside).sum((1, 2), keepdims=True)
    nearer = np.linalg.norm(x - front, axis=-1) < np.linalg.norm(x - back, axis=-1)
    agreement = (nearer == masks).mean((1, 2))
    assert agreement.mean() > 0.97 and np.quantile(agreement, 0.02) > 0.85
    # The mask of a circle is the disc of its area about its centre; of a ring, that without its middle.
    rows, columns = np.mgrid[:32, :32]
    for name, filled in (("circle", 1), ("ring", 0)):
        for mask in masks[labels == images.SHAPES.index(name)][:50]:
            y, x = (np.average(axis, weights=mask) for axis in (rows, columns))
            radius = np.hypot(rows - y, columns - x)
            assert mask[radius < 2].all() == filled and mask[radius < 2].any() == filled
            if filled:
                assert (mask != (np.pi * radius**2 < mask.sum())).sum() < 0.06 * mask.sum()


def test_a_linear_classifier_does_badly_on_shapes(shapes):
    pictures, labels, _ = shapes
    x = torch.from_numpy(pictures).flatten(1).float() / 255
    x = x - x[:3000].mean(0)
    targets = torch.nn.functional.one_hot(torch.from_numpy(labels[:3000])).float() - 0.1
    gram = x[:3000] @ x[:3000].T
    best = 0
    for ridge in (30.0, 300.0):
        scores = x[3000:] @ (x[:3000].T @ torch.linalg.solve(gram + ridge * torch.eye(3000), targets))
        best = max(best, (scores.argmax(1).numpy() == labels[3000:]).mean())
    assert best < 0.4


def test_shapes_are_prepared_on_first_use(tmp_path, monkeypatch):
    draw = prepare._draw
    monkeypatch.setattr(prepare, "_draw", lambda folder: draw(folder, 200, 50))
    data = images.load("shapes", tmp_path)
    assert data.classes == list(images.SHAPES) and data.image_size == 32
    for split, n in (("train", 200), ("val", 50)):
        assert getattr(data, f"{split}_images").shape == (n, 32, 32, 3)
        assert getattr(data, f"{split}_masks").shape == (n, 32, 32)
    pixels = data.train_images.reshape(-1, 3) / 255
    np.testing.assert_allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], rtol=1e-10)
    images.verify("shapes", tmp_path)


def test_files_of_another_set_are_refused(tmp_path, capsys):
    for split in ("train", "test"):
        write_parquet(tmp_path / "source" / f"{split}.parquet", [noise(32, 32, i) for i in range(4)], "img", list("abcde"), fine_label=[0, 1, 2, 3])
    assert command("cifar100", "--source", tmp_path / "source", "--cache", tmp_path / "cache") == 2
    assert "another set" in capsys.readouterr().err and not (tmp_path / "cache" / "cifar100").exists()
