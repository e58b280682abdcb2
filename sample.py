"""Text from a trained causal language model.

    python sample.py --ckpt=out/gpt-shakespeare/best.pt --prompt="To be"
    cat start.txt | python sample.py --ckpt=... --prompt=- --tokens=500

One text streams to the terminal. Text goes to stdout, the rate in tokens/s to stderr."""
import sys
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

from checkpoint import CheckpointFlags, load_model
from data.tokenizer import tokenizer_from_meta
from flags import option, parse, UserError
from processes import cli, derive_seed, note, PrecisionFlags, Processes

UNKNOWN = "\ufffd"      # what tokenizers decode an unknown or incomplete character to


@dataclass(kw_only=True)
class Sample(CheckpointFlags, PrecisionFlags):
    prompt: str = option("", "how the text begins; - reads stdin; empty: a new document",
                         verbatim=True)
    tokens: int = option(300, "how many to write", low=1)
    samples: int = option(1, "how many texts; only one is streamed", low=1)
    temperature: float = option(0.8, "0 is greedy", low=0)
    top_k: int | None = option(200, "draw from the likeliest k tokens only; none: all", low=1)
    stop: bool = option(True, "end at end-of-text, where the tokenizer has one")
    seed: int = option(0, "the same seed gives the same text", low=0)


def shown(stream, tokenizer, stop):
    """Passes the tokens (1,) of one text on, and prints its characters as soon as they are whole:
    one may take several tokens."""
    pending = []
    for new in stream:
        yield new
        if int(new) != stop:
            pending.append(int(new))
        piece = tokenizer.decode(pending)
        if not piece.endswith(UNKNOWN):
            print(piece, end="", flush=True)
            pending = []
    print(tokenizer.decode(pending))


def main(argv):
    """Writes the texts to stdout and returns them, each with its prompt."""
    c = parse(Sample, argv, __doc__)
    processes = Processes(c.device, c.dtype)
    loaded = load_model(c.ckpt, c.heads, ("gpt",))
    model, tokenizer = loaded.model.to(processes.device), tokenizer_from_meta(loaded.meta)
    if not model.config.causal:
        raise UserError(f"{c.ckpt} is a masked model: it continues no text")

    prompt = sys.stdin.read() if c.prompt == "-" else c.prompt
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.start]
    opening = tokenizer.decode(ids) if prompt else ""      # the prompt as the model reads it
    if UNKNOWN in opening and UNKNOWN not in prompt:
        note(f"characters unknown to the model are read as {UNKNOWN}")
    if c.samples == 1:
        print(opening, end="", flush=True)

    stop = tokenizer.eot if c.stop else None
    began = time.perf_counter()
    generator = torch.Generator(processes.device).manual_seed(derive_seed(c.seed, "sample"))
    start = torch.tensor([ids] * c.samples, device=processes.device)
    with processes.autocast():
        stream = model.stream(start, c.tokens, c.temperature, c.top_k, stop, generator,
                              tokenizer.known)
        if c.samples == 1:
            stream = shown(stream, tokenizer, stop)
        else:
            stream = tqdm(stream, total=c.tokens, disable=None)
        rows = torch.stack(list(stream), 1).tolist()
    rate = len(rows) * len(rows[0]) / (time.perf_counter() - began)
    rows = [row[:row.index(stop)] if stop in row else row for row in rows]
    texts = [opening + tokenizer.decode(row) for row in rows]
    if c.samples > 1:
        print("\n---\n".join(texts))
    print(f"{rate:,.0f} tokens/s", file=sys.stderr)
    return texts


if __name__ == "__main__":
    cli(main)
