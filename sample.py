"""
Text from a trained language model.

    python sample.py --ckpt=out/gpt-shakespeare/best.pt --prompt="To be"      streams to the terminal
    cat start.txt | python sample.py --ckpt=... --prompt=- --tokens=500       the prompt from stdin, or --prompt_file=PATH
    python sample.py --ckpt=out/gpt-bert/best.pt --fill="The ___ is on the table."      masked models fill the gaps

Text goes to stdout, the rate in tokens/s to stderr.
"""
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import common
from common import option
from data import text


@dataclass(kw_only=True)
class Sample:
    """Flags of this script; None is shown as auto."""
    ckpt: str | None = option(None, "a checkpoint of train_gpt.py")
    prompt: str = option("", "the beginning; - reads stdin, empty is a new document")
    prompt_file: str | None = option(None, "a file with the beginning")
    fill: str | None = option(None, "a sentence with gaps, each ___, for a masked model")
    tokens: int = option(300, "how many to write", low=1)
    samples: int = option(1, "how many texts; only one is streamed", low=1)
    temperature: float = option(0.8, "0 is greedy", low=0)
    top_k: int | None = option(200, "draw from the likeliest k tokens only; none: all", low=1)
    top_p: float | None = option(None, "draw from the likeliest tokens that hold this probability", above=0, high=1)
    stop: bool = option(True, "end at end-of-text, where the tokenizer has one")
    seed: int = option(0, "the same seed gives the same text", low=0)
    device: str = option("auto", "auto takes cuda, mps or cpu by what is there", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = option("auto", "of autocast", choices=("auto", "float32", "bfloat16"))


def read_prompt(c):
    """The prompt from the flag, stdin or a file."""
    try:
        if c.prompt_file is not None:
            return Path(c.prompt_file).read_text(encoding="utf-8")
        return sys.stdin.read() if c.prompt == "-" else c.prompt
    except (OSError, UnicodeDecodeError) as error:
        raise common.UserError(f"cannot read the prompt: {error}") from None


def printable(tokenizer, ids):
    """The text of token ids, without those that only pad the vocabulary."""
    return tokenizer.decode([i for i in ids if i < tokenizer.n_vocab])


@torch.no_grad()
def fill(model, tokenizer, sentence, device):
    """The sentence with each ___ replaced by the likeliest token, all gaps at once."""
    if model.config.causal:
        raise common.UserError("--fill needs a model trained with --objective=masked")
    pieces = re.split("_{3,}", sentence)
    if len(pieces) == 1:
        raise common.UserError("--fill needs a gap, written ___")
    ids, gaps = [], []
    for i, piece in enumerate(pieces):
        # GPT-2's words carry the space before them, so a gap takes that space along
        words = tokenizer.encode(piece.rstrip(" ") if i < len(pieces) - 1 and tokenizer.eot is not None else piece)
        ids += [int(t) for t in words]
        if i < len(pieces) - 1:
            gaps.append(len(ids))
            ids.append(tokenizer.n_vocab)
    logits = model(torch.tensor([ids], device=device))[0, :, :tokenizer.n_vocab]
    for gap in gaps:
        ids[gap] = int(logits[gap].argmax())
    return printable(tokenizer, ids)


def main(argv):
    """Writes the text to stdout and returns it."""
    c, _ = common.parse(Sample, {"sample": {}}, argv, __doc__, default="sample")
    if c.ckpt is None:
        raise common.UserError("--ckpt is needed")
    processes = common.Processes(c.device)
    device = processes.device
    model, content = common.load_language_model(c.ckpt)
    model, tokenizer = model.to(device), text.tokenizer_from_meta(content["data_meta"])
    if c.fill is not None:
        filled = fill(model, tokenizer, c.fill, device)
        print(filled)
        return filled
    if not model.config.causal:
        raise common.UserError(f"{c.ckpt} is a masked model: it fills gaps (--fill), it does not continue a text")

    prompt = read_prompt(c)
    ids = [int(t) for t in tokenizer.encode(prompt)] or [tokenizer.eot if tokenizer.eot is not None else int(tokenizer.encode("\n")[0])]
    start = torch.tensor([ids] * c.samples, device=device)
    generator = torch.Generator(device).manual_seed(common.derive_seed(c.seed, "sample"))
    stop = tokenizer.eot if c.stop else None
    opening = printable(tokenizer, ids) if prompt else ""                    # the prompt as the model reads it
    if "\ufffd" in opening and "\ufffd" not in prompt:
        print("note: the model's alphabet lacks characters of the prompt, which it reads as \ufffd", file=sys.stderr)
    written, pending, began = [], [], time.perf_counter()
    if c.samples == 1:
        print(opening, end="", flush=True)
    with processes.autocast(c.dtype):
        for new in model.stream(start, c.tokens, c.temperature, c.top_k, c.top_p, stop, generator):
            written.append(new)
            if c.samples == 1 and int(new) != stop:
                pending.append(int(new))
                now = printable(tokenizer, pending)
                if not now.endswith("\ufffd"):                               # a character may take several tokens: print what is whole
                    print(now, end="", flush=True)
                    pending = []
    seconds = time.perf_counter() - began
    rows = [row[:row.index(stop)] if stop in row else row for row in torch.stack(written, 1).tolist()]
    texts = [opening + printable(tokenizer, row) for row in rows]
    print(printable(tokenizer, pending) if c.samples == 1 else "\n---\n".join(texts))
    print(f"{len(written) * c.samples / seconds:,.0f} tokens/s", file=sys.stderr)
    return texts


if __name__ == "__main__":
    common.cli(main)
