"""Prepares a data set: writes it as plain memory-mapped files to data/cache/NAME.

    python data/prepare.py cifar10                  downloads it from the Hugging Face Hub
    python data/prepare.py cifar10 --source DIR     reads files in DIR, laid out as on the Hub
    python data/prepare.py cifar10 --verify         recomputes the checksums of what was prepared
    python data/prepare.py mytext --source DIR --tokenizer=char
                                                    any .txt, .jsonl or Parquet files, as mytext
    python data/prepare.py mine --source DIR --size=32
                                                    pictures in class folders, DIR/CLASS/FILE or
                                                    DIR/{train,val}/CLASS/FILE, as mine
"""

import argparse
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)    # Ctrl-C during the imports: no traceback
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
    parser.add_argument("--data_dir", "--cache", dest="cache", metavar="DIR", default=store.CACHE,
                        type=Path, help="where prepared sets go (%(default)s)")
    parser.add_argument("--verify", action="store_true", help="only recompute the checksums")
    parser.add_argument("--overwrite", action="store_true", help="prepare again what is there")
    parser.add_argument("--tokenizer", choices=("gpt2", "char"),
                        help="for text (default: the set's usual one)")
    parser.add_argument("--size", type=int, help="pixels a side of your own pictures (default: 32)")
    parser.add_argument("--workers", type=int, help="processes or threads (default: one a core)")
    args = parser.parse_args(argv)
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers={args.workers} must be at least 1")
    if args.size is not None and not 1 <= args.size <= 1024:
        parser.error(f"--size={args.size} must be from 1 to 1024")
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

    known = name in images.SETS or name in text.SETS
    if args.source and not Path(args.source).exists():
        raise store.DataError(f"--source {args.source} does not exist")
    own_pictures = not known and args.source and images.is_folder_of_pictures(args.source)
    if args.size and not own_pictures:
        raise store.DataError("--size is for a folder of your own pictures (--source)")
    if own_pictures:
        new = images.prepare(name, args.source, cache, args.overwrite, args.workers,
                             args.size or 32)
    elif name in images.SETS:
        new = images.prepare(name, args.source, cache, args.overwrite, args.workers)
    elif name in text.SETS or (args.source and args.tokenizer):
        if name == "shakespeare" and args.tokenizer == "char":
            name = "shakespeare_char"
        new = text.prepare(name, args.source, cache, args.tokenizer, args.workers, args.overwrite)
    else:
        problem = store.unknown("data set", name, [*images.SETS, *text.SETS])
        if args.source:
            problem += (f"; {args.source} has no pictures (.jpg, .png, .webp), and your own text "
                        "needs --tokenizer")
        raise store.DataError(problem)

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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # cleans up, as after Ctrl-C
    sys.exit(main())
