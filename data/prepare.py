"""Prepares a data set: writes it as plain memory-mapped files to data/cache/NAME.

    python data/prepare.py cifar10                  downloads it from the Hugging Face Hub
    python data/prepare.py cifar10 --source DIR     reads files in DIR, laid out as on the Hub
    python data/prepare.py cifar10 --verify         recomputes the checksums of what was prepared
    python data/prepare.py mytext --source DIR --tokenizer=char
                                                    any .txt, .jsonl or Parquet files, as mytext
"""

import argparse
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of data/ itself

from data import images, store, text


def main(argv=None):
    """The command; returns the exit status: 0, 2 after an error of the user's, 130 after Ctrl-C."""
    known = f"image sets: {', '.join(images.SETS)}\ntext sets: {', '.join(text.SETS)}"
    parser = argparse.ArgumentParser(prog="prepare.py", description=__doc__, epilog=known,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message} (see --help)\n")
    parser.add_argument("name", metavar="NAME", help="which data set")
    parser.add_argument("--source", metavar="DIR", help="folder with its files, instead of the Hub")
    parser.add_argument("--cache", metavar="DIR", default=store.CACHE, type=Path,
                        help="where prepared sets go (%(default)s)")
    parser.add_argument("--verify", action="store_true", help="only recompute the checksums")
    parser.add_argument("--overwrite", action="store_true", help="prepare again what is there")
    parser.add_argument("--tokenizer", choices=("gpt2", "char"),
                        help="for text (default: the set's usual one)")
    parser.add_argument("--workers", type=int, help="processes or threads (default: one a core)")
    args = parser.parse_args(argv)
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers={args.workers} must be at least 1")
    try:
        print(run(args))
        return 0
    except store.DataError as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"prepare.py: interrupted; {args.name} was not prepared", file=sys.stderr)
        return 130


def run(args):
    """Does what was asked for; returns what to say about it."""
    name, cache = args.name, args.cache
    if args.verify:
        files = store.verify(name, cache)["files"]
        size = sum(entry["bytes"] for entry in files.values())
        return f"{name}: {len(files)} files, {size:,} bytes, all as prepared"

    if name in images.SETS:
        new = images.prepare(name, args.source, cache, args.overwrite, args.workers)
    elif name in text.SETS or (args.source and args.tokenizer):
        if name == "shakespeare" and args.tokenizer == "char":
            name = "shakespeare_char"
        new = text.prepare(name, args.source, cache, args.tokenizer, args.workers, args.overwrite)
    else:
        raise store.DataError(store.unknown("data set", name, [*images.SETS, *text.SETS]))

    if not new:
        return f"{name} is already prepared in {cache / name} (--overwrite to do it again)"
    meta = store.read_meta(name, cache)
    if meta["kind"] == "images":
        rows = [meta["files"][f"{split}_labels.npy"]["shape"][0] for split in ("train", "val")]
        return (f"{name}: {rows[0]:,} + {rows[1]:,} images of {meta['image_size']} px, "
                f"{len(meta['classes'])} classes, in {cache / name}")
    counts = [f"{split} {n:,} tokens" for split, n in meta["tokens"].items()]
    return f"{name}: {', '.join(counts)}, in {cache / name}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up, as after Ctrl-C
    sys.exit(main())
