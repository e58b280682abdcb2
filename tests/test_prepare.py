"""data/prepare.py: what is written, whole or not at all; folders.py: what is read."""
import json
import os
import resource
from dataclasses import replace

import datasets
import numpy as np
import pytest
from PIL import Image
from test_text import sentences

from data import folders, images, prepare, text
from data.shapes import draw_shapes
from flags import UserError

CHARACTERS = prepare.TextSet("char")
LISTS = dict(pictures=folders.pictures, texts=folders.texts)


def noise(width, height, seed, mode="RGB"):
    shape = height, width, len(mode)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8).squeeze())


def parquet(path, classes=None, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = datasets.Dataset.from_dict(columns)
    if classes:
        rows = rows.cast_column("label", datasets.ClassLabel(names=classes))
    rows.to_parquet(path)


def assert_fails(message, function, *arguments, **more):
    """`function` raises UserError, one line that matches `message`."""
    with pytest.raises(UserError, match=message) as error:
        function(*arguments, **more)
    assert "\n" not in str(error.value)


def test_pictures_stand_upright(tmp_path):
    """By the camera's tag (6: a quarter turn clockwise), unless it is malformed. 16 bits, which
    would clip, are refused."""
    left = np.zeros((32, 32, 3), np.uint8)
    left[:, :16] = 255
    tag = Image.Exif()
    tag[0x0112] = 6
    Image.fromarray(left).save(tmp_path / "turned.jpg", exif=tag, quality=95)
    top, bottom = np.split(folders.read_picture(tmp_path / "turned.jpg", 32)[0], 2)
    assert top.min() > 240 and bottom.max() < 15
    for kind in ("png", "webp"):
        Image.fromarray(left).save(tmp_path / f"as_is.{kind}", exif=b"Exif\0\0none", lossless=True)
        assert np.array_equal(folders.read_picture(tmp_path / f"as_is.{kind}", 32)[0], left)
    Image.fromarray(left[..., 0].astype(np.uint16)).save(tmp_path / "deep.png")
    found = folders.read_picture(tmp_path / "deep.png", 32)
    assert found == (None, "16 or 32 bits a pixel")


def test_small_images_are_stored_as_they_are(tmp_path):
    """The deviation of a constant channel is 1 / 255, so that images can be divided by it."""
    names, blue = [f"class {i}" for i in range(10)], Image.new("L", (32, 32), 255)
    pictures = [Image.merge("RGB", (*noise(32, 32, i).split()[:2], blue)) for i in range(60)]
    labels = [i % 5 for i in range(60)]
    for split, rows in (("train", slice(0, 40)), ("test", slice(40, 60))):
        parquet(tmp_path / f"source/data/{split}-00000-of-00001.parquet", names,
                img=pictures[rows], label=labels[rows])
    command = ["cifar10", f"--source={tmp_path / 'source'}", f"--data_dir={tmp_path}"]
    prepare.main(command)
    data, pixels = images.load("cifar10", tmp_path), np.stack([np.asarray(p) for p in pictures])
    assert (data.name, data.classes, data.image_size) == ("cifar10", names, 32)
    assert np.array_equal([*data.train.images, *data.val.images], pixels)
    assert np.array_equal([*data.train.labels, *data.val.labels], labels)
    assert data.mean == pytest.approx(pixels[:40].mean((0, 1, 2)) / 255)
    assert data.std == pytest.approx(pixels[:40].std((0, 1, 2)).clip(1) / 255)
    assert_fails("is there already", prepare.main, command)
    assert_fails("has a plain name", prepare.main, [str(tmp_path / "cifar10"), *command[1:]])
    assert_fails("is not one of", images.load, str(tmp_path / "cifar10"), tmp_path)


def test_large_images_are_resized_and_cropped_as_by_torchvision(tmp_path):
    """Pillow's resizing; the longer side (343.04, 349.87 px) rounded down, half a pixel to even."""
    train = [noise(300, 402, 0), noise(410, 300, 1, "L"), noise(100, 120, 2, "RGBA")]
    on_white = Image.alpha_composite(Image.new("RGBA", (100, 120), "white"), train[2])
    by_hand = [  # the shorter side at 256, and the corners of the middle 256 x 256
        train[0].resize((256, 343), Image.BICUBIC).crop((0, 44, 256, 300)),
        train[1].convert("RGB").resize((349, 256), Image.BICUBIC).crop((46, 0, 302, 256)),
        on_white.convert("RGB").resize((256, 307), Image.BICUBIC).crop((0, 26, 256, 282))]
    for part, rows in enumerate((slice(0, 2), slice(2, 3))):
        parquet(tmp_path / f"data/train-0000{part}-of-00002.parquet", image=train[rows],
                label=[0, 999, 3][rows])
    parquet(tmp_path / "data/validation-00000-of-00001.parquet", image=train[:1], label=[5])
    prepare.main(["imagenet", f"--source={tmp_path}", f"--data_dir={tmp_path}"])
    data = images.load("imagenet", tmp_path)
    assert data.image_size == 256 and data.classes == [str(i) for i in range(1000)]
    assert data.train.labels.tolist() == [0, 999, 3] and data.val.labels.tolist() == [5]
    for stored, expected in zip([*data.train.images, *data.val.images], by_hand + by_hand[:1]):
        assert np.array_equal(stored, np.asarray(expected))


@pytest.mark.parametrize("read, names, expected", [     # {split: classes or texts}, or the message
    ("pictures", "cat/a.png dog/b.JPG dog/in/deep/c.png cow.png", dict(train="cat dog dog")),
    ("pictures", "Train/cat/a.png Train/dog/a.png TESTING/cat/b.png more/d.png",
     dict(train="cat dog", val="cat")),
    ("pictures", "train/cat/a.png train/cow/a.png val/dog/b.png val/cat/c.png test/d.png",
     dict(train="cat cow", val="cat dog")),
    ("pictures", "train/cat/a.png train/dog/a.png train/b.png README.md", dict(train="cat dog")),
    ("pictures", "in/set/train/cat/a.png in/set/train/dog/a.png in/set/valid/cat/b.png",
     dict(train="cat dog", val="cat")),
    ("pictures", "bus/a.png car/a.png train/a.png", dict(train="bus car train")),
    ("pictures", ".git/a.png @eaDir/a.png __MACOSX/b/a.png cat/._a.png cat/.thumbnails/a.png "
     "cat/a.png dog/a.png dog/metadata.csv cow.zip", dict(train="cat dog")),
    ("pictures", "train/a.png val/b.png", "fewer than two class folders"),
    ("pictures", "train/cat/a.png train/dog/a.png val/images/b.png",
     "its val has none of"),
    ("pictures", "seg_train/a/a.png seg_train/b/a.png seg_test/a/b.png more/c.png",
     dict(train="a b", val="a")),
    ("pictures", "nut/train/a.png nut/test/b.png oak/c.png", "fewer than two class folders"),
    ("pictures", "train/cat.0.jpg train/dog.0.jpg test1/1.jpg", "fewer than two class folders"),
    ("pictures", "crash_test/train.jpg cat/test.jpg", dict(train="cat crash_test")),
    ("pictures", "a.png b.png", "fewer than two class folders"),
    ("texts", "ptb.train.txt ptb.valid.txt README.txt",
     dict(train="ptb.train.txt", val="ptb.valid.txt")),
    ("texts", "Training/a/b.txt VAL.TXT", dict(train="b.txt", val="VAL.TXT")),
    ("texts", "train-00000-of-00001.parquet test-00000-of-00001.parquet a.txt train.jsonl",
     dict(train="train-00000-of-00001.parquet train.jsonl", test="test-00000-of-00001.parquet")),
    ("texts", "data/train-00000-of-00001.parquet data/test-00000-of-00001.parquet a.txt",
     dict(train="train-00000-of-00001.parquet", test="test-00000-of-00001.parquet")),
    ("texts", "1.txt 2.txt test.txt", dict(train="1.txt 2.txt test.txt")),
    ("texts", "en/train.txt en/test.txt de/a.txt", dict(train="train.txt", test="test.txt")),
    ("texts", "in/test/val/a.txt in/test/val/b.txt", dict(test="a.txt b.txt")),
    ("texts", "a_train.txt a_val.txt", dict(train="a_train.txt", val="a_val.txt")),
    ("texts", "a.csv", "has no such data"),
    ("texts", "web[en]-00000-of-00001.parquet", dict(train="web[en]-00000-of-00001.parquet"))])
def test_splits_and_classes_by_names(read, names, expected, tmp_path):
    for name in names.split():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if isinstance(expected, str):
        assert_fails(expected, LISTS[read], tmp_path)
    else:
        found = LISTS[read](tmp_path)
        assert {split: " ".join(part.values() if read == "pictures" else [p.name for p in part])
                for split, part in found.items()} == expected


def test_links_and_odd_names(tmp_path, capsys):
    """A linked folder is read, one around the link is not; a name may have any bytes."""
    names = [b"a::b.png", b"we[i]rd.png", b"caf\xe9.png", b"new\nline.png", b"https:x.png"]
    (tmp_path / "real").mkdir()
    for i in range(5):
        noise(8, 8, i).save(tmp_path / "real" / os.fsdecode(names[i]), "png")
    for name in ("cat", "dog"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "link").symlink_to(tmp_path / "real")
    (tmp_path / "mine/cat/around").symlink_to(tmp_path / "mine")
    (tmp_path / "mine/cat/gone.png").symlink_to(tmp_path / "nothing")
    (tmp_path / "mine/cat/link" / os.fsdecode(b"\xe9\n.png")).write_bytes(b"no picture")
    prepare.prepare("mine", prepare.ImageSet(8), tmp_path / "mine", tmp_path / "cache")
    data, told = images.load("mine", tmp_path / "cache"), capsys.readouterr().err
    assert data.classes == ["cat", "dog"] and len(data.train.labels) + len(data.val.labels) == 10
    assert "left out: 1 of the files" in told
    assert "gone.png" in told and "link/\ufffd .png (" in told


def test_rows_of_text(tmp_path, capsys):
    """Of rows only `text` is read; one without is left out. The file and row of damage are told."""
    rows = [dict(text="2024-01-01 10:00:00"), dict(text=None), dict(text="a", meta=dict(u=1)),
            dict(text="half \ud83d"), dict(words="b"), dict(text="\ufeffc\r\n")]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    parquet(tmp_path / "b.parquet", text=["d", None], other=[1, 2])
    (tmp_path / "c.TXT").write_bytes("\ufeffé\r\n".encode())
    paths = [tmp_path / name for name in ("a.jsonl", "b.parquet", "c.TXT")]
    assert [row["text"] for row in folders.documents(paths)] == [
        "2024-01-01 10:00:00", "a", "c\r\n", "d", "é\n"]
    assert "left out: 4 of the rows" in (told := capsys.readouterr().err) and "row 2 of" in told
    for name, content, message in (
            ("a.txt", b"caf\xe9", "a.txt, row 1: 'utf-8' codec"),
            ("a.txt", b"a\0b\0", "a.txt: no row has a `text` in UTF-8"),
            ("a.jsonl", b'{"text": "a"}\n{"text": the"}', "a.jsonl, row 2: Expecting value"),
            ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', "a.jsonl, row 2: 'utf-8' codec"),
            ("a.parquet", b"none", "a.parquet, row 1: "), ("a.txt", b"", "the text is too short"),
            ("a.jsonl", b'{"words": "a"}', "a.jsonl: no row has a `text` in UTF-8"),
            ("a.txt", "".join(map(chr, range(65_536, 145_536))).encode(), "72000 different")):
        folder = tmp_path / message[:25]
        folder.mkdir()
        (folder / name).write_bytes(content)
        assert_fails(message, prepare.prepare, "mine", CHARACTERS, folder, tmp_path)


def test_own_pictures(tmp_path, capsys):
    """DIR/test validates, or a tenth. What is no picture is left out; a name may be a pattern."""
    for i, suffix in enumerate((".png", ".gif", ".bmp", ".tiff", ".webp") * 4):
        for root in ("split/train", "split/test", "flat"):
            file = tmp_path / root / ("cat" if i < 9 else "dog") / f"test [{i}]{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40 + i % 3, 36), (12 * i,) * 3).save(file)
    (tmp_path / "flat/dog/zz.jpg").write_bytes(b"no picture")
    for root in ("split", "flat"):
        prepare.prepare(root, prepare.ImageSet(24), tmp_path / root, tmp_path / "cache")
        data = images.load(root, tmp_path / "cache")
        assert data.classes == ["cat", "dog"] and data.image_size == 24
        pictures = data.train.images, data.val.images
        train, val = ((x.mean((1, 2, 3)) / 12).round() for x in pictures)
        assert np.array_equal([*data.train.labels, *data.val.labels], np.r_[train, val] >= 9)
        assert 0 < data.train.labels[:9].sum() < 9      # not one class behind the other
        assert sorted([*train, *val]) == sorted([*range(20)] * (1 + (root == "split")))
    assert 2 <= len(val) <= 3
    told = capsys.readouterr().err
    assert "left out: 1 of the pictures" in told and "zz.jpg (" in told
    assert f"'val': {len(val)}" in told
    for file in (tmp_path / "split/test").rglob("*.*"):
        file.write_bytes(b"no picture")
    assert_fails(r"no picture of its val can be .*test \[\d+\]\.\w+ \(", prepare.prepare, "no",
                 prepare.ImageSet(24), tmp_path / "split", tmp_path / "cache")


def test_a_validation_split_of_the_hub_is_val(tmp_path, monkeypatch):
    rows = dict(train=["ab", "ba"], validation=["bb"])
    sets = {split: datasets.Dataset.from_dict(dict(text=part)) for split, part in rows.items()}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: sets)
    prepare.prepare("hubs", replace(CHARACTERS, hub="a/set"), None, tmp_path)
    data = text.load("hubs", tmp_path)
    assert data.tokenizer.decode(data.train) == "abba" and data.tokenizer.decode(data.val) == "bb"


def documents(tokens, tokenizer):
    """What lies before each end-of-text, which is also the last token."""
    *found, last = np.split(tokens, np.flatnonzero(tokens == tokenizer.eot) + 1)
    assert not len(last)
    return [tokenizer.decode(part[:-1]) for part in found]


def test_shakespeare_is_split_by_position(tmp_path, bpe):
    """The three parts of the Hub are one text."""
    play = "".join(sentences(200))
    left = int(0.9 * len(play))
    for split, part in dict(train=play[:700], validation=play[700:1500], test=play[1500:]).items():
        parquet(tmp_path / f"hub/{split}/0000.parquet", text=[part])
    for name, tokenizer in (("plays", "gpt2"), ("shakespeare_char", "char")):
        row = replace(prepare.SETS["shakespeare_char"], tokenizer=tokenizer)
        prepare.prepare(name, row, tmp_path / "hub", tmp_path)
        data = text.load(name, tmp_path)
        assert data.tokenizer.decode(data.train) == play[:left]
        assert data.tokenizer.decode(data.val) == play[left:]
    assert data.tokenizer.characters == "".join(sorted(set(play[:left])))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt"])
def test_end_of_text_after_each_document(kind, tmp_path, bpe):
    """In order, whatever the batches."""
    rows = sentences(90) + [""]
    for split, part in (("train", rows), ("validation", rows[:4])):
        folder = tmp_path / "a" / split
        folder.mkdir(parents=True)
        if kind == "txt":
            for i, row in enumerate(part):
                (folder / f"{i:03}.txt").write_text(row)
        else:
            table = datasets.Dataset.from_dict({"text": part})
            (table.to_json if kind == "jsonl" else table.to_parquet)(folder / f"0.{kind}")
    prepare.prepare("books", prepare.TextSet("gpt2"), tmp_path / "a", tmp_path)
    data = text.load("books", tmp_path)
    assert documents(data.train, bpe) == rows and documents(data.val, bpe) == rows[:4]
    # of one part alone, a hundredth of the documents validates
    prepare.prepare("mine", prepare.TextSet("gpt2"), tmp_path / "a/train", tmp_path)
    data = text.load("mine", tmp_path)
    train, val = documents(data.train, bpe), documents(data.val, bpe)
    assert sorted(train + val) == sorted(rows) and len(val) == 1


def test_characters_are_those_of_train(tmp_path):
    for split in ("val", "test"):
        (tmp_path / "mine" / split).mkdir(parents=True)
        (tmp_path / "mine" / split / "a.txt").write_text("abc" * 40)
    assert_fails("the characters of a part `train`", prepare.prepare, "text", CHARACTERS,
                 tmp_path / "mine", tmp_path)


def test_what_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    def stop(classes, size, draft):
        assert (draft / "val_masks.bin").exists() and not (draft / "half.bin").exists()
        raise KeyboardInterrupt

    (tmp_path / ".drawn.draft").mkdir()                # as a kill leaves it
    (tmp_path / ".drawn.draft/half.bin").write_bytes(b"half")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(prepare, "image_meta", stop)
        prepare.prepare("drawn", prepare.DrawnSet((20, 10)), cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".drawn.lock"]
    prepare.prepare("drawn", prepare.DrawnSet((30, 10)), cache=tmp_path)
    data, drawn = images.load("drawn", tmp_path), draw_shapes(10, 1)
    assert len(data.train.labels) == 30 and np.array_equal(data.val.images, drawn[0])


def test_damage_is_one_line(tmp_path):
    """A file that was cut off, or of other bytes, or none."""
    prepare.prepare("shapes", prepare.DrawnSet((20, 10)), cache=tmp_path)
    for file in ("train_labels.bin", "val_images.bin", "meta.json"):
        path = tmp_path / "shapes" / file
        whole = path.read_bytes()
        for damage in (whole[:-1], b"\xff"):
            path.write_bytes(damage)
            assert_fails("shapes: .* prepare it again", images.load, "shapes", tmp_path)
        path.write_bytes(whole)
    path.unlink()
    assert_fails("shapes: .* prepare it again", images.load, "shapes", tmp_path)


def test_files_fit_their_meta(tmp_path):
    prepare.prepare("shapes", prepare.DrawnSet((20, 10)), cache=tmp_path)
    for name, wrong in (("train_labels", np.zeros(19, int)), ("val_labels", np.full(10, 10)),
                        ("train_images", np.zeros((20, 32, 32, 3))), ("val_masks", np.zeros(10)),
                        ("val_labels", np.full(10, -1))):
        path = tmp_path / "shapes" / f"{name}.bin"
        whole = path.read_bytes()
        wrong.tofile(path)
        assert_fails(f"{name}.bin has .* prepare it again", images.load, "shapes", tmp_path)
        path.write_bytes(whole)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/a.txt").write_text("abc" * 40)
    prepare.prepare("text", CHARACTERS, tmp_path / "mine", tmp_path)
    np.zeros(9, np.uint16).tofile(tmp_path / "text/train.bin")
    assert_fails("train.bin has .* prepare it again", text.load, "text", tmp_path)


def test_a_set_that_is_prepared_anew_has_another_version(tmp_path):
    """If it is another one. Rows that lie by class are stored mixed."""
    (tmp_path / "words").mkdir()
    metas = []
    for i in range(3):          # twice the same; then two pictures and two letters change places
        order = [*range(60)] if i < 2 else [59, *range(1, 59), 0]
        for split in ("train", "test"):
            parquet(tmp_path / f"pets/{split}.parquet", [f"class {k}" for k in range(6)],
                    image=[noise(8, 8, k) for k in order], label=[k // 10 for k in order])
        (tmp_path / "words/a.txt").write_text("abc" * 30 + ["ab", "ab", "ba"][i] + "abc" * 30)
        prepare.prepare("pets", prepare.SETS["pets"], tmp_path / "pets", tmp_path / str(i))
        prepare.prepare("words", CHARACTERS, tmp_path / "words", tmp_path / str(i))
        data = images.load("pets", tmp_path / str(i))
        metas.append((data.meta(), text.load("words", tmp_path / str(i)).meta()))
    assert len({*data.train.labels[:12]}) > 3 < len({*data.val.labels[-12:]})
    for first, same, other in zip(*metas):
        assert first["version"] == same["version"] != other["version"]


def test_a_full_disk_is_named(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))     # of a file
    try:
        assert_fails("shapes: OSError: ", prepare.prepare, "shapes", prepare.DrawnSet((99, 9)),
                     cache=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_missing_sets_say_how_to_get_them(tmp_path):
    """An image set is not answered with texts."""
    assert_fails("imagenet: data/prepare.py imagenet makes it", images.load,
                 "imagenet", tmp_path)
    assert_fails("pets: .*it comes by network, or .*prepare.py pets .*--source DIR", images.load,
                 "pets", tmp_path)
    assert_fails("for texts with --tokenizer", text.load, "books", tmp_path)
    prepare.prepare("pydoc", prepare.SETS["pydoc"], cache=tmp_path)
    assert_fails("this is a set of text, not of images", images.load, "pydoc", tmp_path)
    with pytest.raises(UserError) as raised:
        images.load("nothing", tmp_path)
    assert "shapes" in str(raised.value) and "pydoc" not in str(raised.value)

