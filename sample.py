"""Text from a trained causal language model.

    python sample.py --ckpt=out/gpt-shakespeare/best.pt --prompt=ROMEO"""
from dataclasses import dataclass

import torch

from checkpoint import load_model
from data.tokenizer import tokenizer_from_meta
from flags import CheckpointFlags, option, parse, TypeFlags
from processes import cli, derive_seed, Processes


@dataclass(kw_only=True)
class Sample(CheckpointFlags, TypeFlags):
    prompt: str = option("", "how the text begins; empty: a new document")
    tokens: int = option(300, "how many to write, fewer if the model ends the text", low=1)
    temperature: float = option(0.8, "0 is greedy", low=0)
    top_k: int | None = option(200, "draw from the likeliest k tokens only; none: all", low=1)
    seed: int = option(0, "the same seed gives the same text", low=0)


def main(argv):
    """Writes the text to stdout and returns it, with its prompt as the model reads it."""
    c = parse(Sample, argv, __doc__)
    processes = Processes(c.device, c.dtype)
    loaded = load_model(c.ckpt, c.heads, ("gpt",))
    model, tokenizer = loaded.model.to(processes.device), tokenizer_from_meta(loaded.meta)

    ids = tokenizer.encode(c.prompt).tolist() or [tokenizer.start]
    start = torch.tensor([ids], device=processes.device)
    generator = torch.Generator(processes.device).manual_seed(derive_seed(c.seed, "sample"))
    with processes.autocast():
        written = model.generate(start, c.tokens, c.temperature, c.top_k, tokenizer.eot, generator,
                                 tokenizer.n_text)[0, len(ids):].tolist()
    if tokenizer.eot in written:
        written = written[:written.index(tokenizer.eot)]
    text = tokenizer.decode(ids + written if c.prompt else written)
    print(text)
    return text


if __name__ == "__main__":
    cli(main)
