"""data/tokenizer.py, and data/text.py: batches and masks."""
import numpy as np
import pytest
import torch

from data import text
from data.tokenizer import CharTokenizer

WORDS = "the cat's hat, another thing in an inner 42 the,then\tit'll don't É naïve —".split(" ")


def sentences(n, seed=0):
    rng = np.random.default_rng(seed)
    gaps = [" ", " ", " ", "\n", "\n\n", "  ", " \n", "\n "]
    return ["".join(rng.choice(WORDS) + rng.choice(gaps) for _ in range(rng.integers(1, 30)))
            for _ in range(n)]


def test_round_trips(bpe):
    for line in sentences(50):
        assert bpe.decode(bpe.encode(line)) == line
        assert bpe.encode(line).tolist() == bpe.encoding.encode_ordinary(line)
        chars = CharTokenizer("".join(sorted(set(line))))
        assert chars.decode(chars.encode(line)) == line
    assert CharTokenizer("ba").encode("abc\U0010ffff\ud800").tolist() == [1, 0, 2, 2, 2]
    assert CharTokenizer("ba").decode([1, 0, 2, 9]) == "ab\ufffd"
    assert bpe.eot not in bpe.encode("<|endoftext|>")
    assert bpe.decode([*bpe.encode("in"), bpe.n_vocab, 50303]) == "in"


def test_batches_depend_on_seed_and_step_only():
    tokens = np.arange(5000, dtype=np.uint16)
    x, y = text.batch(tokens, 3, 12, 32, seed=5)
    assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(32))
    assert all(map(torch.equal, (x, y), text.batch(tokens, 3, 12, 32, seed=5)))
    for step, seed in ((4, 5), (3, 6)):
        assert not torch.equal(x, text.batch(tokens, step, 12, 32, seed)[0])
    x, y = text.batch(tokens[:12], 0, 400, 8, seed=0)               # they reach both ends
    assert set(x[:, 0].tolist()) == {0, 1, 2, 3} and y.max() == 11


def test_each_token_is_a_target_once():
    """In another order for another seed; the last, partly filled window is left out."""
    tokens = np.arange(100, dtype=np.uint16)
    x, y = map(torch.cat, zip(*(text.batch(tokens, step, 4, 8, 5, once=True) for step in range(3))))
    assert torch.equal(y, x + 1) and sorted(y.flatten().tolist()) == [*range(1, 97)]
    first, again, other = (text.batch(tokens, 0, 4, 8, s, once=True)[0] for s in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("n", [2, 8, 9, 17, 100])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("whole", [True, False])
def test_each_target_is_counted_once(n, world, whole):
    """A model that sees the whole window sees no padding where something is counted."""
    tokens, counted, n_batches = np.arange(n, dtype=np.uint16), [], set()
    for rank in range(world):
        batches = list(text.eval_batches(tokens, 8, 2, rank, world, whole))
        n_batches.add(len(batches))
        for x, y in batches:
            for row, column in (y >= 0).nonzero().tolist():
                counted.append(y[row, column].item())
                start = counted[-1] - 1 - column
                seen = x[row] if whole else x[row, : column + 1]
                assert seen.tolist() == list(range(start, start + len(seen)))
    windows = (n - 1) // min(n - 1, 8) * min(n - 1, 8)
    assert sorted(counted) == list(range(1, 1 + windows if whole else n)) and len(n_batches) == 1


def test_masking_rates():
    n, p, vocab = 400_000, 0.15, 1000
    x = torch.randint(vocab, (400, n // 400))
    inputs, targets = text.mask_some(x, torch.Generator().manual_seed(1), vocab)
    selected = targets >= 0
    assert torch.equal(targets[selected], x[selected])
    assert torch.equal(inputs[~selected], x[~selected])
    masked, kept = (inputs == vocab) & selected, (inputs == x) & selected
    m = selected.sum().item()
    # a random token is the old one once in `vocab`; 4 standard deviations of a binomial
    for count, of, rate in ((m, n, p), (masked.sum(), m, 0.8), (kept.sum(), m, 0.1 + 0.1 / vocab)):
        assert abs(count - of * rate) < 4 * (of * rate * (1 - rate)) ** 0.5
    drawn = inputs[selected & ~masked & ~kept].double()
    deviation = vocab / 12 ** 0.5 / len(drawn) ** 0.5
    assert drawn.max() < vocab and abs(drawn.mean() - (vocab - 1) / 2) < 4 * deviation
