"""What one file of a person's own holds: a picture, or texts."""
import contextlib
import json
import os
import re
import sys

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from flags import UserError


# ---- Messages -----------------------------------------------------------------------------------
def shown(path):
    """A path, whatever bytes it has, as one line for a message."""
    return " ".join(os.fsencode(path).decode(errors="replace").split())


def tell_left_out(what, items):
    if items:
        tqdm.write(f"left out: {len(items)} {what}, such as {shown(items[0])}", sys.stderr)


# ---- Pictures -----------------------------------------------------------------------------------
def read_picture(file, size):
    """(RGB array (size, size, 3), None), or (None, what is wrong with the file). A picture is
    turned as its tag says, its shorter side resized (bicubic), the longer one rounded down; sides
    and crop are torchvision's."""
    try:
        image = Image.open(file)
        image.load()
        with contextlib.suppress(Exception):    # a malformed tag costs the turn alone
            image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":               # convert() would clip them at 255
            return None, "16 or 32 bits a pixel"
        width, height = (side * size // min(image.size) for side in image.size)
        left, top = round((width - size) / 2), round((height - size) / 2)
        image = image.convert("RGB").resize((width, height), Image.BICUBIC)
        return np.asarray(image.crop((left, top, left + size, top + size))), None
    except Exception as error:      # a damaged file can make a decoder raise anything
        return None, " ".join(str(error).split()) or type(error).__name__


# ---- Texts --------------------------------------------------------------------------------------
def rows_of(path):
    """Yields the `text` of each row of a Parquet or .jsonl file, or the whole of a .txt."""
    if path.suffix.lower() == ".parquet":
        from pyarrow.parquet import ParquetFile

        for batch in ParquetFile(path).iter_batches(64, columns=["text"]):      # may be books
            yield from batch["text"].to_pylist()
    elif path.suffix.lower() == ".jsonl":
        for line in filter(bytes.strip, path.open("rb")):
            yield json.loads(line).get("text")
    else:
        yield path.read_text("utf-8")


def documents(paths):
    """Yields dict(text=...) of each document; a row without sound text is left out. Raises
    UserError if all are, or with the row that cannot be read."""
    left_out, found = [], 0
    for path in paths:
        row = 0
        try:
            for row, text in enumerate(rows_of(path), 1):
                if isinstance(text, str) and not re.search("[\0\ud800-\udfff]", text):
                    found += 1
                    yield dict(text=text.removeprefix("\ufeff"))        # a byte order mark
                else:
                    left_out.append(f"row {row} of {path}")
        except Exception as error:
            raise UserError(f"{shown(path)}, row {row + 1}: {error}") from None
    tell_left_out("rows without `text`, or with NUL (as in UTF-16) or half a character", left_out)
    if not found:
        raise UserError(f"{shown(paths[0])}: no row has a `text` in UTF-8")
