"""Text sets as training reads them: load(NAME) -> TextData -> batch, eval_batches; BERT's masks.
prepare.py makes the files; a small set is prepared at its first use."""
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from data import prepare
from data.tokenizer import CharTokenizer, GPT2Tokenizer, tokenizer_from_meta
from flags import CACHE, UserError


@dataclass
class TextData:
    """A prepared text set. Its splits are read-only memory maps of uint16 tokens."""
    name: str
    tokenizer: CharTokenizer | GPT2Tokenizer
    train: np.ndarray | None = None
    val: np.ndarray | None = None
    test: np.ndarray | None = None
    version: str | None = None      # of the files: a set prepared anew may have another

    def meta(self):
        """What a checkpoint keeps of the set its model was trained on."""
        return dict(name=self.name, tokenizer=self.tokenizer.meta(), version=self.version)


def load(name, cache=CACHE):
    """Opens a prepared set; one that is missing and small is prepared first. Raises UserError."""
    with prepare.opened(name, "text", cache) as (folder, meta):
        tokenizer, splits = tokenizer_from_meta(meta), {}
        for split, n in meta["tokens"].items():
            splits[split] = prepare.mapped(folder / f"{split}.bin", np.uint16, (n,))
        return TextData(name, tokenizer, **splits,
                        version=f"{meta['tokens']}, checksum {meta.get('checksum')}")


def tokens_for(name, split, meta, cache):
    """(text set, split, its tokens), by default the checkpoint's own set and its test part or, if
    there is none, val. `meta` is the checkpoint's data_meta."""
    data = load(name or meta.get("name", ""), cache=cache)
    if data.tokenizer.meta() != meta["tokenizer"]:
        raise UserError(f"--data={data.name} has another tokenizer than the checkpoint")
    existing = [part for part in ("test", "val", "train") if getattr(data, part) is not None]
    split = split or existing[0]
    if split not in existing:
        raise UserError(f"--split={split}: {data.name} has only {' and '.join(existing)}")
    return data, split, getattr(data, split)


# ---- Batches ------------------------------------------------------------------------------------
@lru_cache(1)
def window_order(windows, seed):
    """A permutation of the windows of a text: OpenWebText has 9 million of them."""
    return np.random.default_rng(seed).permutation(windows)


def batch(tokens, step, batch_size, context, seed, once=False):
    """The batch of a step: x, y int64 (batch_size, context), y[i, t] being the token after x[i, t].
    It is drawn from (seed, step) alone, so that any process or resumed run finds its rows of the
    same one. once: the text is cut into windows, whose order is drawn from the seed, and no token
    is a target twice."""
    if once:
        order = window_order((len(tokens) - 1) // context, seed)
        starts = context * order[step * batch_size:(step + 1) * batch_size]
    else:
        starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - context, batch_size)
    windows = np.stack([tokens[i:i + context + 1] for i in starts]).astype(np.int64)
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def eval_batches(tokens, context, batch_size, rank=0, world=1, whole=False):
    """Yields x, y int64 (batch_size, n), n being `context`, or less if the text is: over all ranks,
    each of tokens[1:] is in y once. y is -1 beyond the end and in rows that fill the last batch.
    whole: a last window that is not full is left out, for a model that would see its padding.
    All ranks get equally many batches of one shape: one compiled graph, no rank waits in vain."""
    last = len(tokens) - 1              # this token is a target alone
    n = min(context, last)
    starts = np.arange(0, last // n * n if whole else last, n)
    for first in range(0, len(starts), batch_size * world):
        x = np.zeros((batch_size, n), dtype=np.int64)
        y = np.full((batch_size, n), -1, dtype=np.int64)
        for row, start in enumerate(starts[first + rank:first + batch_size * world:world]):
            end = min(start + n, last)
            x[row, :end - start] = tokens[start:end]
            y[row, :end - start] = tokens[start + 1:end + 1]
        yield torch.from_numpy(x), torch.from_numpy(y)


def mask_some(x, generator, n_vocab, p=0.15):
    """BERT's corruption of x, int64 (b, n): inputs, and targets that are -1 where not predicted. A
    token is selected with probability p; of the selected, 80 % become [MASK], the id `n_vocab`
    after the tokenizer's own, 10 % a random id of those, 10 % stay."""
    u = torch.rand(x.shape, generator=generator)
    others = torch.randint(n_vocab, x.shape, generator=generator)
    inputs = torch.where(u < 0.8 * p, n_vocab, torch.where(u < 0.9 * p, others, x))
    return inputs, torch.where(u < p, x, -1)
