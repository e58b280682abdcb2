"""data/store.py: prepared folders appear whole or not at all, and damage is told in one line."""

import itertools
import json
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors

from data import images, store, text
from data.store import DataError


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A cache with 40 + 20 `shapes`."""
    cache = tmp_path_factory.mktemp("prepared")
    images.prepare_shapes(cache, 40, 20)
    return cache


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
    assert caught.value.exit_status == 2
    return line


def write(folder, content=b"even"):
    (folder / "train.bin").write_bytes(content)
    store.write_meta(folder, "mine", "text")


# ---- preparing


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError(), OSError(28, "disk full")])
def test_what_is_interrupted_leaves_nothing(tmp_path, error):
    with pytest.raises(DataError if isinstance(error, OSError) else type(error)):
        with store.preparing("mine", tmp_path) as folder:
            write(folder)
            raise error
    assert [path.name for path in tmp_path.iterdir()] == [".mine.lock"]


def test_a_draft_left_by_a_kill_is_replaced_and_the_old_set_kept_until_then(tmp_path):
    (tmp_path / ".mine.draft").mkdir()
    (tmp_path / ".mine.draft" / "half.bin").write_bytes(b"half")
    with store.preparing("mine", tmp_path) as folder:
        assert not list(folder.iterdir())
        write(folder, b"1234")
    with store.preparing("mine", tmp_path) as folder:
        assert folder is None
    with store.preparing("mine", tmp_path, overwrite=True) as folder:
        write(folder, b"567890")
        assert (tmp_path / "mine/train.bin").read_bytes() == b"1234"
    assert (tmp_path / "mine/train.bin").read_bytes() == b"567890"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.lock", "mine"]
    store.verify("mine", tmp_path)


def test_one_process_prepares_at_a_time(tmp_path):
    inside, wrote = [], []

    def prepare():
        with store.preparing("mine", tmp_path) as folder:
            if folder:
                inside.append(len(inside) + 1)
                write(folder)
                wrote.append(folder)

    threads = [threading.Thread(target=prepare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [1] and len(wrote) == 1
    store.verify("mine", tmp_path)


def test_folders_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    assert_fails(lambda: store.preparing("mine", tmp_path / "file").__enter__(), "cannot write")
    for name in ("../mine", ".mine", "a/b"):
        assert_fails(lambda: store.preparing(name, tmp_path).__enter__(), "cannot name a data set")


def test_sets_prepared_by_earlier_versions_load(tmp_path):
    """A folder of format 1, byte for byte. A change that refuses it must change FORMAT."""
    meta = """{"format": 1, "name": "old", "kind": "text",
    "tokenizer": {"kind": "char", "characters": "ab"}, "n_vocab": 3, "eot": null,
    "tokens": {"val": 3}, "documents": {}, "files": {"val.bin": {
    "sha256": "90c2698921ca9fd02950be353f721888760e33ab5095a21e50f1e4360b6de1a0", "bytes": 6,
    "shape": [3], "dtype": "uint16"}},
    "seal": "5b324cad3a7830a2b9d1be21f5395234462b6d0b2391067bad9407334e707d6c"}"""
    (tmp_path / "old").mkdir()
    (tmp_path / "old/val.bin").write_bytes(b"\0\0\1\0\2\0")
    (tmp_path / "old/meta.json").write_text(meta)
    data = text.load("old", tmp_path)
    assert data.tokenizer.decode(data.val) == "ab\ufffd" and data.train is None
    store.verify("old", tmp_path)


# ---- damage


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"[" * 100_000, b'{"seal": NaN}', b"\xff"])
def test_meta_that_is_something_else(damaged, content):
    (damaged / "shapes/meta.json").write_bytes(content)
    assert_fails(lambda: images.load("shapes", damaged), "meta.json", "--overwrite")


def test_sets_of_another_name_kind_or_format(damaged):
    (damaged / "shapes").rename(damaged / "cifar10")
    assert_fails(lambda: images.load("cifar10", damaged), "does not describe this set")
    (damaged / "cifar10").rename(damaged / "shapes")
    assert_fails(lambda: text.load("shapes", damaged), "prepared as images, not as text")
    path = damaged / "shapes/meta.json"
    meta = json.loads(path.read_text()) | {"format": 2}
    path.write_text(json.dumps(meta | {"seal": store._seal(meta)}))
    assert_fails(lambda: images.load("shapes", damaged), "known format", "--overwrite")


def test_a_pickle_is_never_run(damaged):
    class Trap:
        def __reduce__(self):
            return (open, (str(damaged / "sprung"), "w"))

    path, meta = damaged / "shapes/train_labels.npy", damaged / "shapes/meta.json"
    size = path.stat().st_size
    for save in (lambda: np.save(path, np.array([Trap()], object), allow_pickle=True),
                 lambda: path.write_bytes(pickle.dumps(Trap()))):
        save()
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))
        assert_fails(lambda: images.load("shapes", damaged), "train_labels.npy")
    meta.write_bytes(pickle.dumps(Trap()))
    assert_fails(lambda: images.load("shapes", damaged), "meta.json")
    assert not (damaged / "sprung").exists()


# ---- where sets come from


def test_missing_sets_say_how_to_get_them(tmp_path):
    assert_fails(lambda: images.load("cifra10", tmp_path), "did you mean 'cifar10'")
    assert_fails(lambda: text.load("wikitxt", tmp_path), "did you mean 'wikitext'")
    assert_fails(lambda: text.load("books", tmp_path), "prepare.py books --source DIR", "a column")
    assert_fails(lambda: images.load("imagenet", tmp_path), "prepare.py imagenet --data_dir",
                 "--source DIR", "hf auth login")


def test_no_network(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise errors.LocalEntryNotFoundError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    for load, sets in ((images.load, images.SETS), (text.load, text.SETS)):
        for name, row in sets.items():
            if row.hub and row.on_first_use:
                assert_fails(lambda: load(name, tmp_path), f"prepare.py {name} --data_dir",
                             f"prepare.py {name} --source DIR", "no route")
                assert not (tmp_path / name).exists()


def test_hub_is_tried_in_order(tmp_path, monkeypatch):
    """A revision that is gone, one without such files, one that has them."""
    places = tuple(("a/b", revision, ["data/*.parquet"]) for revision in ("gone", "script", "good"))
    row = store.Source(files="Parquet files", hub=places)
    good = tmp_path / "good/data"
    good.mkdir(parents=True)
    (tmp_path / "script").mkdir()
    for name in ("data.parquet", "data/train-00000-of-00002.parquet", "data/test-0.parquet"):
        (tmp_path / "good" / name).write_bytes(b"")
    asked = []

    def snapshot_download(repository, repo_type, revision, allow_patterns):
        asked.append(revision)
        if revision == "gone":
            raise errors.RevisionNotFoundError.__new__(errors.RevisionNotFoundError)
        if revision == "gated":
            raise errors.GatedRepoError.__new__(errors.GatedRepoError)
        return str(tmp_path / revision)

    def find():
        return row.find("mine", None, tmp_path, [".parquet"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_fails(find, "incomplete", "train-*-of-00002.parquet", "--source DIR")
    (good / "train-00001-of-00002.parquet").write_bytes(b"")
    root, files = find()
    assert asked == ["gone", "script", "good"] * 2 and root == tmp_path / "good"
    assert [store.split_of(file, root) for file in files] == ["test", "train", "train"]

    row = store.Source(files="Parquet files", hub=places[:2])
    assert_fails(find, "not on the Hub", "a/b@gone, a/b@script", "--source DIR")
    row = store.Source(files="it", hub=(("a/b", "gated", ["*"]),), terms=" (after accepting)")
    assert_fails(find, "download of a/b@gated failed", "(after accepting)")


def test_results_come_in_order_and_items_are_read_as_needed():
    read = itertools.count()
    with ThreadPoolExecutor(2) as pool:
        results = store.in_order(pool, lambda i: i * i, read, ahead=4)
        assert [next(results) for _ in range(10)] == [(i, i * i) for i in range(10)]
    assert next(read) <= 14
