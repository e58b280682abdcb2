"""Prepared data sets: folders that appear whole or not at all, and are checked when opened.

A set NAME is the folder data/cache/NAME:

    {train,val}_images.npy   uint8 (N, H, W, 3)        written and read by images.py
    {train,val}_labels.npy   int64 (N,)
    {train,val}_masks.npy    uint8 (N, H, W), 1 on the object (`shapes` only)
    {train,val,test}.bin     uint16 tokens             written and read by text.py
    NAME.jsonl               the passages of a set that is scored passage by passage
    meta.json                kind of set, class names or tokenizer; size, shape, dtype and SHA-256
                             of each file; sealed by a SHA-256 of its own

Nothing here knows a particular set: those are the rows of images.SETS and text.SETS."""

import contextlib
import difflib
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import sys
import warnings
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flags import UserError

CACHE = Path(__file__).resolve().parent / "cache"
FORMAT = 1


class DataError(UserError, ValueError):
    """Bad or missing data. The message is one line: what is wrong, and what to do."""


# -------------------------------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------------------------------

def unknown(what, name, allowed):
    """One line: `name` is no `what`, these are, and perhaps this one was meant."""
    near = difflib.get_close_matches(str(name), allowed, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}: there are {', '.join(allowed)}{hint}"


def broken(name, cache, what):
    """The DataError for a prepared set that cannot be used."""
    return DataError(f"{name}: {what}; prepare it again: {_command(name, cache, ' --overwrite')}")


def _command(name, cache, option=""):
    elsewhere = "" if Path(cache) == CACHE else f" --data_dir {cache}"
    return f"python data/prepare.py {name}{option}{elsewhere}"


def first_line(error):
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def reading(file):
    """What goes wrong inside while `file` is read, as a DataError of one line."""
    try:
        yield
    except DataError:
        raise
    except KeyError as error:
        raise DataError(f"cannot read {file}: no {error} in it") from None
    except (ValueError, TypeError, OSError, NotImplementedError) as error:  # pyarrow's too
        raise DataError(f"cannot read {file}: {first_line(error)}") from None


# -------------------------------------------------------------------------------------------------
# Writing a prepared set
# -------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def preparing(name, cache=CACHE, overwrite=False):
    """Yields an empty folder to write NAME in, and renames it to cache/NAME as the last act.

    Yields None if NAME exists already (and not `overwrite`). An exception, a kill or a power cut
    leaves no cache/NAME. One process prepares a set at a time: others wait, and then find it ready.
    """
    cache = Path(cache)
    if Path(name).name != name or name.startswith("."):
        raise DataError(f"{name!r} cannot name a data set: it becomes a folder in {cache}")
    folder, draft, old = cache / name, cache / f".{name}.draft", cache / f".{name}.old"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = open(cache / f".{name}.lock", "w")
    except OSError as error:
        raise DataError(f"cannot write to {cache} ({error.strerror}): give another folder "
                        "(--data_dir)") from None

    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{name}: another process is preparing it; waiting", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists() and not overwrite:
            yield None
            return

        # left by a run that was killed: whoever holds the lock is alone
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        try:
            draft.mkdir()
            yield draft
            if folder.exists():
                folder.rename(old)
            draft.rename(folder)
            _sync(cache)
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{name}: cannot write to {draft} ({reason})") from None
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def _sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_meta(folder, name, kind, **fields):
    """Describes the files of `folder` in its meta.json; all is on the disk itself on return.

    `kind` is "images" or "text"; `fields` is what else belongs to the set (classes, tokenizer ...).
    """
    files = {}
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")
        else:
            array = np.memmap(path, np.uint16 if path.suffix == ".bin" else np.uint8, "r")
        files[path.name] = {"sha256": _sha256(path), "bytes": path.stat().st_size,
                            "shape": list(array.shape), "dtype": str(array.dtype)}
        _sync(path)
    meta = {"format": FORMAT, "name": name, "kind": kind, **fields, "files": files}
    meta["seal"] = _seal(meta)
    path = Path(folder) / "meta.json"
    path.write_text(json.dumps(meta, indent=1))
    _sync(path)
    _sync(folder)


def _sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(meta):
    """SHA-256 of everything in `meta` but the seal itself."""
    content = {key: value for key, value in meta.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# -------------------------------------------------------------------------------------------------
# Reading a prepared set
# -------------------------------------------------------------------------------------------------

def open_set(name, cache, kind, sets, prepare):
    """The meta.json of a set of this `kind`; if missing and small, `prepare` writes it first.

    `sets` are the known ones, Source by name. Raises DataError."""
    folder = Path(cache) / name
    if not folder.exists():
        if name not in sets:
            own = [path.parent.name for path in Path(cache).glob("[!.]*/meta.json")]
            known = list(dict.fromkeys([*sets, *sorted(own)]))
            raise DataError(unknown(f"{kind.rstrip('s')} set", name, known))
        if not sets[name].on_first_use:
            raise DataError(f"{name} is not prepared ({folder} is missing); "
                            f"{sets[name].how_to_get(name, cache)}")
        prepare(name, cache=cache)
    meta = read_meta(name, cache)
    if meta["kind"] != kind:
        raise DataError(f"{name} is prepared as {meta['kind']}, not as {kind}")
    return meta


def read_meta(name, cache=CACHE):
    """The meta.json of a prepared set, as a dict. Raises DataError.

    The seal is checked, so that what write_meta wrote can be relied on."""
    path = Path(cache) / name / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
    except OSError as error:
        raise broken(name, cache, f"cannot read {path} ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise broken(name, cache, f"{path} is damaged (not JSON)") from None
    if not isinstance(meta, dict) or meta.get("seal") != _seal(meta):
        raise broken(name, cache, f"{path} is damaged or was edited (its checksum differs)")
    if meta.get("format") != FORMAT or meta.get("name") != name:
        raise broken(name, cache, f"{path} does not describe this set in a known format")
    return meta


def open_file(meta, file, cache=CACHE):
    """Read-only memory map of a prepared file, its size and header checked. Raises DataError."""
    name, path, entry = meta["name"], Path(cache) / meta["name"] / file, meta["files"].get(file)
    if entry is None:
        raise broken(name, cache, f"meta.json does not list {file}")
    try:
        size = path.stat().st_size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own, about odd syntax in a damaged header
            if path.suffix == ".npy":
                array = np.lib.format.open_memmap(path, mode="r")  # unlike np.load, never unpickles
            else:
                array = np.memmap(path, entry["dtype"], "r")
        found = [size, str(array.dtype), list(array.shape), array.flags.c_contiguous]
    except OSError as error:
        raise broken(name, cache, f"cannot read {path} ({error.strerror or error})") from None
    except Exception:  # a damaged header makes numpy raise anything, even SyntaxError
        found = None
    if found != [entry["bytes"], entry["dtype"], entry["shape"], True]:
        raise broken(name, cache, f"{path} is damaged (its size or header is not as prepared)")
    return array


def verify(name, cache=CACHE):
    """Recomputes the SHA-256 of each file of a prepared set; returns meta. Raises DataError."""
    meta = read_meta(name, cache)
    for file, entry in meta["files"].items():
        open_file(meta, file, cache)
        if _sha256(Path(cache) / name / file) != entry["sha256"]:
            raise broken(name, cache, f"{file} differs from what was prepared (SHA-256)")
    return meta


# -------------------------------------------------------------------------------------------------
# Where a set comes from: a folder of the user's, or the Hugging Face Hub
# -------------------------------------------------------------------------------------------------

SPLIT_WORDS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
PARQUET = dict(pre_buffer=False, buffer_size=2**20)  # read a row group piece by piece


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a row of images.SETS or of text.SETS says about where the set comes from."""
    files: str | None = None    # what the folder of --source must hold; None: nothing is read
    hub: tuple = ()             # (repository, revision, file patterns) on the Hub, tried in order
    terms: str = ""             # what the Hub asks for first
    on_first_use: bool = True   # False: too large to be prepared unasked

    def how_to_get(self, name, cache):
        """The ways to the set, for an error message."""
        source = f"run: {_command(name, cache, ' --source DIR')}, where DIR has {self.files}"
        if not self.hub:
            return source
        return f"with a network run: {_command(name, cache)}{self.terms}; without one {source}"

    def find(self, name, source, cache, suffixes):
        """The files to read as (root, files sorted by path), downloaded if `source` is None.

        Downloads go to the Hub's own cache (HF_HOME), where an interrupted one resumes. Raises
        DataError."""
        if source:
            source = Path(source)
            if not source.exists():
                raise DataError(f"--source {source} does not exist")
            files = [source] if source.is_file() else files_below(source)
            files = [file for file in files if file.suffix in suffixes]
            if not files:
                raise DataError(f"--source {source} has no {', '.join(suffixes)} file")
            return source.parent if source.is_file() else source, files

        from huggingface_hub import errors, snapshot_download  # comes with `datasets`

        help, tried = self.how_to_get(name, cache), []
        for repository, revision, patterns in self.hub:
            tried.append(f"{repository}@{revision}")
            try:
                root = Path(snapshot_download(repository, repo_type="dataset", revision=revision,
                                              allow_patterns=patterns))
            except Exception as error:  # the client passes on whatever its HTTP library raises
                moved = errors.RepositoryNotFoundError, errors.RevisionNotFoundError
                if isinstance(error, moved) and not isinstance(error, errors.GatedRepoError):
                    continue
                reason = first_line(error).rstrip(".")
                raise DataError(f"{name} is not prepared, and the download of {tried[-1]} failed "
                                f"({reason}); {help}") from None
            files = [file for file in files_below(root) if any(
                fnmatch.fnmatch(file.relative_to(root).as_posix(), each) for each in patterns)]
            if files:
                _check_complete(name, files, help)
                return root, files
        where = f" ({', '.join(tried)})" if tried else ""
        raise DataError(f"{name} is not on the Hub{where}; {help}")


def files_below(folder):
    """All files in a folder and its folders, sorted."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _check_complete(name, files, help):
    """Without a network, the client takes what an interrupted download has left for the whole."""
    shards = Counter(re.sub(r"-\d+-of-", "-*-of-", str(file)) for file in files)
    for pattern, count in shards.items():
        of = re.search(r"-\*-of-(\d+)", pattern)
        if of and count != int(of[1]):
            raise DataError(f"{name}: the download is incomplete ({count} of {pattern}); {help}")


def split_of(file, root, default=None):
    """train, val or test, by the words of a path below `root`: wiki.valid.raw, test/0.parquet."""
    words = re.split("[^a-z]+", file.relative_to(root).as_posix().lower())
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), default)


def in_order(pool, function, items, ahead):
    """Yields (item, result), at most `ahead` under way: pool.map would read all items first."""
    waiting = deque()
    for item in items:
        waiting.append((item, pool.submit(function, item)))
        if len(waiting) >= ahead:
            item, result = waiting.popleft()
            yield item, result.result()
    for item, result in waiting:
        yield item, result.result()
