"""The tasks of experiments/long_range.py are what they say, and its models are comparable."""
import pytest
import torch

from experiments import long_range
from model import LanguageModel, TextConfig


def value_of(words):
    """The value of a ListOps expression, by a stack and sorting alone."""
    stack = []
    for word in words:
        if word != "]":
            stack.append(int(word) if word.isdigit() else word)
            continue
        digits = []
        while isinstance(stack[-1], int):
            digits.append(stack.pop())
        digits.sort()
        middle = digits[(len(digits) - 1) // 2] + digits[len(digits) // 2]
        stack.append({"[MIN": digits[0], "[MAX": digits[-1], "[MED": middle // 2,
                      "[SM": sum(digits) % 10}[stack.pop()])
    value, = stack
    return value


def test_values_of_listops():
    x, y = long_range.listops(300, 0, 120)
    lengths = (x > 0).sum(1)
    for ids, value, length in zip(x, y, lengths):
        assert value_of([long_range.LISTOPS_VOCAB[i] for i in ids[:length]]) == value
    assert 60 < lengths.max() <= 120 and set(y.tolist()) == set(range(10))
    assert not torch.equal(long_range.listops(300, 1, 120)[0], x)


def test_equal_parameters():
    parameters = []
    for arch, size in long_range.SIZES.items():
        config = TextConfig(arch=arch, layers=4, context=8, vocab_size=16, causal=False, **size)
        parameters.append(LanguageModel(config).count() - 16 * config.width)
    assert parameters == pytest.approx([197_000] * 3, rel=0.01)


def test_padding_does_not_count_in_the_mean():
    config = TextConfig(width=16, heads=2, layers=1, context=6, vocab_size=9, causal=False)
    model, kept = long_range.SequenceClassifier(config), {}
    model.norm.register_forward_hook(lambda module, args, out: kept.update(Z=out))
    logits = model(torch.tensor([[3, 1, 4, 0, 0, 0], [5, 2, 6, 5, 3, 5]]))
    means = torch.stack([kept["Z"][0, :3].mean(0), kept["Z"][1].mean(0)])
    torch.testing.assert_close(logits, model.head(means))


def test_learns(monkeypatch):
    """A task that can be learned: the class is the id that occurs most often."""
    y = torch.arange(160) % 4
    x = torch.randint(1, 9, (160, 16))
    x[:, ::2] = 1 + y[:, None]
    monkeypatch.setattr(long_range, "load_task", lambda c: (x[:128], y[:128], x[128:], y[128:], 9))
    results = long_range.main(["--steps=40", "--batch_size=30", "--lr=0.005", "--device=cpu"])
    assert results.keys() == long_range.SIZES.keys() and min(results.values()) > 0.9
