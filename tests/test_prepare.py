"""data/prepare.py: what is written, and that it appears whole or not at all."""

import io
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data import images, prepare, text
from flags import UserError
from test_text import bpe, encoding, sentences      # noqa: F401 (fixtures)


def noise(width, height, seed, mode="RGB"):
    channels = {"L": (), "RGB": (3,), "RGBA": (4,)}[mode]
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, *channels), np.uint8))


def write_parquet(path, pictures, image="image", names=None, **columns):
    """A Parquet file as on the Hub, with class names beside the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [io.BytesIO() for _ in pictures]
    for picture, file in zip(pictures, files):
        picture.save(file, "png")
    cells = [{"bytes": file.getvalue(), "path": None} for file in files]
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({image: pa.array(cells, struct), **columns})
    if names:
        features = {image: {"_type": "Image"},
                    next(iter(columns)): {"names": names, "_type": "ClassLabel"}}
        info = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": info})
    pq.write_table(table, path)


def parquet(path, rows, column="text"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: rows}), path, row_group_size=7)


def save_pictures(root, names):
    """{path: picture}, each of its own shape."""
    saved = {}
    for i, name in enumerate(names):
        saved[root / name] = noise(40 + i % 3, 36 + i % 5, i)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        saved[root / name].save(root / name)
    return saved


def command(*arguments):
    prepare.main([str(a) for a in arguments])


def fails(message, function, *arguments, **more):
    """`function` raises UserError, one line that matches `message`."""
    with pytest.raises(UserError, match=message) as error:
        function(*arguments, **more)
    assert "\n" not in str(error.value)


# ---- images


def test_small_images_are_stored_as_they_are(tmp_path, capsys):
    names = [f"class {i}" for i in range(10)]
    pictures, labels = [noise(32, 32, i) for i in range(60)], [i % 5 for i in range(60)]
    for split, rows in (("train", slice(0, 40)), ("test", slice(40, 60))):
        write_parquet(tmp_path / f"source/data/{split}-00000-of-00001.parquet", pictures[rows],
                      "img", names, label=labels[rows])
    arguments = "cifar10", "--source", tmp_path / "source", "--data_dir", tmp_path
    command(*arguments)
    assert "40 pictures to train on" in capsys.readouterr().err
    data, pixels = images.load("cifar10", tmp_path), np.stack([np.asarray(p) for p in pictures])
    assert (data.name, data.classes, data.image_size) == ("cifar10", names, 32)
    assert np.array_equal(data.train_images, pixels[:40])
    assert np.array_equal(data.val_images, pixels[40:])
    assert np.array_equal([*data.train_labels, *data.val_labels], labels)
    assert data.train_labels.dtype == np.int64 and data.train_masks is None
    pixels = pixels[:40].reshape(-1, 3) / 255
    np.testing.assert_allclose([data.mean, data.std], [pixels.mean(0), pixels.std(0)], rtol=1e-10)

    before = (tmp_path / "cifar10/meta.json").stat().st_ino
    command(*arguments)
    assert (tmp_path / "cifar10/meta.json").stat().st_ino == before
    (tmp_path / "source/data/train-00001-of-00003.parquet").write_bytes(b"")
    fails("incomplete: there are 1 of .*train-.-of-00003", command, *arguments, "--overwrite")
    assert (tmp_path / "cifar10/meta.json").stat().st_ino == before


def test_large_images_are_resized_and_cropped_as_by_torchvision(tmp_path):
    """Pillow's resizing; the longer side (343.04, 349.87 px) rounded down, half a pixel to even."""
    train = [noise(300, 402, 0), noise(410, 300, 1, "L"), noise(256, 256, 2),
             noise(100, 120, 3, "RGBA")]
    by_hand = [  # the shorter side at 256, and the corners of the middle 256 x 256
        train[0].resize((256, 343), Image.BICUBIC).crop((0, 44, 256, 300)),
        train[1].convert("RGB").resize((349, 256), Image.BICUBIC).crop((46, 0, 302, 256)),
        train[2],
        train[3].convert("RGB").resize((256, 307), Image.BICUBIC).crop((0, 26, 256, 282))]
    for part, rows in enumerate((slice(0, 3), slice(3, 4))):
        write_parquet(tmp_path / f"data/train-0000{part}-of-00002.parquet", train[rows],
                      label=[0, 1, 999, 3][rows])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", train[:1], label=[-1])
    fails("labels -1 to -1", prepare.prepare, "imagenet", tmp_path, tmp_path)
    write_parquet(tmp_path / "data/validation-00000-of-00001.parquet", train[:1], label=[5])
    prepare.prepare("imagenet", tmp_path, tmp_path, workers=2)
    data = images.load("imagenet", tmp_path)
    assert data.image_size == 256 and data.classes == [str(i) for i in range(1000)]
    assert data.train_labels.tolist() == [0, 1, 999, 3] and data.val_labels.tolist() == [5]
    for stored, expected in zip([*data.train_images, data.val_images[0]], by_hand + by_hand[:1]):
        assert np.array_equal(stored, np.asarray(expected))


def test_own_pictures(tmp_path, capsys):
    """Every tenth of all files in order validates. What is no picture is counted, in one line."""
    suffixes = (".png", ".gif", ".bmp", ".tiff", ".webp")
    names = [f"{'cat' if i < 9 else 'dog'}/{i:02}{suffixes[i % 5]}" for i in range(21)]
    saved = save_pictures(tmp_path / "a", names)
    (tmp_path / "a/dog/zz.jpg").write_bytes(b"no picture")
    (tmp_path / "a/dog/notes.txt").write_text("no picture either")
    command("mine", "--source", tmp_path / "a", "--data_dir", tmp_path, "--size=24")
    errors = capsys.readouterr().err
    assert "18 pictures to train on, with --image_size=24" in errors
    line, = [line for line in errors.splitlines() if "left out" in line]
    assert "left out 2" in line and "zz.jpg" in line and "notes.txt" in line

    data = images.load("mine", tmp_path)
    assert data.classes == ["cat", "dog"] and data.image_size == 24
    for split, chosen in (("train", [n for i, n in enumerate(names) if i % 10]),
                          ("val", names[::10])):
        wanted = [images.read_picture(tmp_path / "a" / name, 24)[0] for name in chosen]
        assert np.array_equal(getattr(data, f"{split}_images"), wanted)
        labels = [data.classes.index(name[:3]) for name in chosen]
        assert getattr(data, f"{split}_labels").tolist() == labels
    first = next(iter(saved))
    assert np.array_equal(data.val_images[0], images.resize_crop(saved[first], 24))

    save_pictures(tmp_path / "b", ["train/cat/1.png", "train/dog/1.png", "val/dog/2.png"])
    prepare.prepare("yours", tmp_path / "b", tmp_path)
    data = images.load("yours", tmp_path)
    assert data.train_labels.tolist() == [0, 1] and data.val_labels.tolist() == [1]
    save_pictures(tmp_path / "c", ["cat/1.png", "cat/2.png"])
    fails("there are 1 classes", prepare.prepare, "other", tmp_path / "c", tmp_path)


@pytest.mark.parametrize("name", ["shapes", "camouflage"])
def test_drawn_sets_are_prepared_on_first_use(tmp_path, monkeypatch, capsys, name):
    draw = images.draw_shapes
    monkeypatch.setattr(images, "draw_shapes", lambda n, seed, **more: draw(n // 100, seed, **more))
    data = images.load(name, tmp_path)
    assert "drawing 12,000 pictures" in capsys.readouterr().err
    assert data.classes == list(images.SHAPES) and data.image_size == 32
    assert data.train_images.shape == (100, 32, 32, 3) and data.val_masks.shape == (20, 32, 32)
    hidden = images.CAMOUFLAGE["val"] if name == "camouflage" else {}
    assert np.array_equal(data.val_images, draw(20, 1, **hidden)[0])


# ---- text


def documents(tokens, tokenizer):
    """The documents of a token file: what lies before each end-of-text. None after the last."""
    ends = np.flatnonzero(tokens == tokenizer.eot)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]]


def test_pydoc(tmp_path):
    data = text.load("pydoc", tmp_path)
    assert data.tokenizer.characters == "\n" + "".join(chr(i) for i in range(32, 127))
    from pydoc_data.topics import topics
    whole = "\n".join(topics[key] for key in sorted(topics))
    expected = "".join(c if c == "\n" or " " <= c <= "~" else "\ufffd" for c in whole)
    assert data.tokenizer.decode(np.concatenate([data.train, data.val])) == expected
    assert len(data.train) == int(0.9 * len(whole)) and data.test is None


def test_shakespeare_is_split_by_position(tmp_path, bpe, encoding):
    play = "".join(sentences(200))
    (tmp_path / "input.txt").write_text(play)
    left = int(0.9 * len(play))
    prepare.prepare("shakespeare", tmp_path / "input.txt", tmp_path)
    data = text.load("shakespeare", tmp_path)
    assert data.train.tolist() == encoding.encode_ordinary(play[:left])
    assert data.val.tolist() == encoding.encode_ordinary(play[left:])

    parts = zip(("train", "validation", "test"), (play[:700], play[700:1500], play[1500:]))
    for split, part in parts:  # as on the Hub
        parquet(tmp_path / "hub" / split / "0000.parquet", [part])
    prepare.prepare("shakespeare_char", tmp_path / "hub", tmp_path)
    chars = text.load("shakespeare_char", tmp_path)
    assert chars.tokenizer.characters == "".join(sorted(set(play[:left])))
    assert chars.tokenizer.decode(chars.train) == play[:left]
    assert chars.tokenizer.decode(chars.val) == play[left:]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "txt"])
def test_end_of_text_after_each_document(kind, tmp_path, bpe, monkeypatch, capsys):
    """In order, whatever the batches; a file that is no UTF-8 is counted and left out."""
    rows = sentences(90) + [""]
    for split, part in (("train", rows), ("validation", rows[:4])):
        (tmp_path / "a" / split).mkdir(parents=True)
        if kind == "parquet":
            parquet(tmp_path / f"a/{split}/0.parquet", part)
        elif kind == "jsonl":
            lines = (json.dumps({"text": row}) + "\n" for row in part)
            (tmp_path / f"a/{split}/0.jsonl").write_text("".join(lines))
        else:
            for i, row in enumerate(part):
                (tmp_path / f"a/{split}/{i:03}.txt").write_text(row)
            (tmp_path / f"a/{split}/bad.txt").write_bytes(b"caf\xe9 au lait")
    monkeypatch.setattr(prepare.batches, "__defaults__", (200,))
    prepare.prepare("books", tmp_path / "a", tmp_path, workers=3)
    data = text.load("books", tmp_path)
    assert documents(data.train, bpe) == rows and documents(data.val, bpe) == rows[:4]
    assert data.meta["tokens"] == {"train": len(data.train), "val": len(data.val)}
    assert data.meta["documents"] == {"train": 91, "val": 4}
    said = "left out 2 that cannot be read: a document of train" in capsys.readouterr().err
    assert said == (kind == "txt")


def test_validation_documents_are_those_of_train_test_split(tmp_path, bpe):
    rows = [f"{i} {row}" for i, row in enumerate(sentences(150))]
    parquet(tmp_path / "a" / "a.parquet", rows[:60])
    parquet(tmp_path / "a" / "b.parquet", rows[60:])
    prepare.prepare("mine", tmp_path / "a", tmp_path, "gpt2")
    halves = datasets.Dataset.from_dict({"text": rows}).train_test_split(0.01, seed=2357)
    data = text.load("mine", tmp_path)
    assert documents(data.val, bpe) == halves["test"]["text"][:]
    assert documents(data.train, bpe) == halves["train"]["text"][:]
    assert len(halves["test"]) == 2


def test_articles_and_sentences(tmp_path, bpe):
    lines = [" \n", " = One = \n", " \n", " first \n", " = = part = = \n", " \n", " formula \n",
             " = 1 / s = \n", " \n", " = Two ( film ) = \n", " \n", " the second \n"]
    (tmp_path / "wiki.test.tokens").write_text("".join(lines))
    rows = [line if line.strip() else "" for line in lines]
    parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", rows)
    for source in ("wiki.test.tokens", "hub"):
        prepare.prepare("wikitext", tmp_path / source, tmp_path, overwrite=True)
        data = text.load("wikitext", tmp_path)
        assert documents(data.test, bpe) == ["".join(lines[:9]), "".join(lines[9:])]
        assert data.train is None and data.val is None
    (tmp_path / "a").mkdir()
    (tmp_path / "a/ptb.test.txt").write_text(" the <unk> is N \n in an inn \n")
    prepare.prepare("ptb", tmp_path / "a", tmp_path)
    assert documents(text.load("ptb", tmp_path).test, bpe) == ["the <unk> is N", "in an inn"]


def test_passages(tmp_path, bpe):
    rows = sentences(5) + ["odd é"]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    prepare.prepare("lambada", tmp_path / "test.jsonl", tmp_path)
    data = text.load("lambada", tmp_path)
    assert [passage["text"] for passage in data.passages] == rows == documents(data.test, bpe)

    cbt = {"sentences": [["One .", "Two ."]], "question": ["a XXXXX ran"], "answer": ["cat"],
           "options": [["cat", "dog"]]}
    for task in ("CN", "NE", "V"):
        (tmp_path / "cbt" / task).mkdir(parents=True)
        for split in ("validation", "test"):
            pq.write_table(pa.table(cbt), tmp_path / f"cbt/{task}/{split}-00000-of-00001.parquet")
    prepare.prepare("cbt", tmp_path / "cbt", tmp_path / "cache")
    data = text.load("cbt", tmp_path / "cache")
    assert data.passages == [{"task": task, "context": "One . Two .", "question": "a XXXXX ran",
                              "options": ["cat", "dog"], "answer": "cat",
                              "text": "One . Two . a cat ran"} for task in ("CN", "NE")]
    assert documents(data.val, bpe) == ["One . Two . a cat ran"] * 2 and data.test is None


# ---- whole or not at all


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "disk full")])
def test_what_is_interrupted_leaves_what_was_there(tmp_path, monkeypatch, error):
    """A draft left by a kill is replaced, and the set that was there is kept until the end."""
    prepare.prepare("shapes", cache=tmp_path, drawn=(20, 10))
    before = (tmp_path / "shapes/train_labels.npy").read_bytes()
    (tmp_path / ".shapes.draft").mkdir()
    (tmp_path / ".shapes.draft" / "half.npy").write_bytes(b"half")
    fresh = dict(cache=tmp_path, drawn=(30, 10), overwrite=True)
    with monkeypatch.context() as patch:
        def stop(pixels):
            assert (tmp_path / ".shapes.draft/val_masks.npy").exists()
            raise error
        patch.setattr(prepare, "mean_std", stop)
        with pytest.raises(UserError if isinstance(error, OSError) else KeyboardInterrupt):
            prepare.prepare("shapes", **fresh)
    assert (tmp_path / "shapes/train_labels.npy").read_bytes() == before
    prepare.prepare("shapes", **fresh)
    assert len(images.load("shapes", tmp_path).train_labels) == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == [".shapes.lock", "shapes"]
    assert not (tmp_path / "shapes/half.npy").exists()


def test_damage_is_one_line(tmp_path):
    prepare.prepare("shapes", cache=tmp_path, drawn=(20, 10))
    fails("this is a set of images, not of text", text.load, "shapes", tmp_path)
    for file, content in (("meta.json", b"[1]"), ("meta.json", b"\xff"), ("train_labels.npy", b""),
                          ("val_images.npy", b"\x93NUMPY\x01\0v\0{'descr': (((")):
        path = tmp_path / "shapes" / file
        whole = path.read_bytes()
        path.write_bytes(content)
        fails("prepare it again: python data/prepare.py shapes", images.load, "shapes", tmp_path)
        path.write_bytes(whole)
    path.write_bytes(whole[:-1])
    fails("prepare it again", images.load, "shapes", tmp_path)
    path.unlink()
    fails("val_images.npy", images.load, "shapes", tmp_path)


def test_missing_sets_say_how_to_get_them(tmp_path):
    """Without a network (conftest.py sees to that); an image set is not answered with texts."""
    fails("did you mean cifar10", images.load, "cifra10", tmp_path)
    with pytest.raises(UserError) as error:
        images.load("wikitext", tmp_path)
    assert "openwebtext" not in str(error.value)
    for name in ("imagenet", "cifar10"):
        fails(f"{name}.*prepare.py {name} .* with a network, or --source DIR", images.load, name,
              tmp_path)
    fails("prepare.py books --data_dir.* --source DIR", text.load, "books", tmp_path)
    for source, says in (("nowhere", "does not exist"), ("a.jsonl", "words, none is `text`"),
                         ("b.jsonl", "JSON")):
        (tmp_path / "a.jsonl").write_text('{"words": "the"}\n')
        (tmp_path / "b.jsonl").write_text('{"words": the"}\n')
        fails(says, prepare.prepare, "mine", tmp_path / source, tmp_path, "char")
    fails("cannot name a folder", prepare.prepare, "../mine", tmp_path, tmp_path)
    assert not list(tmp_path.glob("[!.]*/meta.json"))
