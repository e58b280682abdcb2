"""Text from a trained causal language model.

    python sample.py --ckpt=out/gpt-shakespeare/best.pt --prompt="To be"
    cat start.txt | python sample.py --ckpt=... --prompt=- --tokens=500

Text goes to stdout, the rate in tokens/s to stderr."""
import sys
import time
from dataclasses import dataclass

import torch

from checkpoint import CheckpointFlags, load_model
from data.tokenizer import tokenizer_from_meta
from flags import option, parse
from processes import cli, derive_seed, note, PrecisionFlags, Processes

UNKNOWN = "\ufffd"      # what tokenizers decode an unknown or incomplete character to


@dataclass(kw_only=True)
class Sample(CheckpointFlags, PrecisionFlags):
    prompt: str = option("", "how the text begins; - reads stdin; empty: a new document")
    tokens: int = option(300, "how many to write", low=1)
    samples: int = option(1, "how many texts", low=1)
    temperature: float = option(0.8, "0 is greedy", low=0)
    top_k: int | None = option(200, "draw from the likeliest k tokens only; none: all", low=1)
    stop: bool = option(True, "end at end-of-text, where the tokenizer has one")
    seed: int = option(0, "the same seed gives the same text", low=0)


def main(argv):
    """Writes the texts to stdout and returns them, each with its prompt."""
    c = parse(Sample, argv, __doc__)
    processes = Processes(c.device, c.dtype)
    loaded = load_model(c.ckpt, c.heads, ("gpt",))
    model, tokenizer = loaded.model.to(processes.device), tokenizer_from_meta(loaded.meta)

    prompt = sys.stdin.read() if c.prompt == "-" else c.prompt
    ids = tokenizer.encode(prompt).tolist() or [tokenizer.start]
    opening = tokenizer.decode(ids) if prompt else ""      # the prompt as the model reads it
    if UNKNOWN in opening and UNKNOWN not in prompt:
        note(f"characters unknown to the model are read as {UNKNOWN}")
    began = time.perf_counter()
    generator = torch.Generator(processes.device).manual_seed(derive_seed(c.seed, "sample"))
    start = torch.tensor([ids] * c.samples, device=processes.device)
    stop = tokenizer.eot if c.stop else None
    with processes.autocast():
        written = model.generate(start, c.tokens, c.temperature, c.top_k, stop, generator,
                                 tokenizer.known)[:, len(ids):].tolist()
    seconds = time.perf_counter() - began
    written = [row[:row.index(stop)] if stop in row else row for row in written]
    texts = [opening + tokenizer.decode(row) for row in written]
    print("\n---\n".join(texts))
    print(f"{sum(map(len, written)) / seconds:,.0f} tokens/s", file=sys.stderr)
    return texts


if __name__ == "__main__":
    cli(main)
