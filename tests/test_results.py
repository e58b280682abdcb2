"""The control of reading beyond the length of training."""
import torch
from torch.nn import functional as F

from experiments.results import losses_by_position
from model import LanguageModel, TextConfig


@torch.no_grad()
def test_losses_by_position():
    """Each loss is of the same character in both, and short sees what lies in the window alone."""
    torch.manual_seed(0)
    model = LanguageModel(TextConfig(width=16, heads=2, layers=1, context=8, vocab_size=7,
                                     rotary=True)).eval()
    ids = torch.randint(7, (3, 21))                         # 20 characters and the one after
    full, short = losses_by_position(model, ids, at_most=8, step=4)
    assert full.shape == short.shape == (3, 12)
    wanted = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
    torch.testing.assert_close(full, wanted[:, 8:])
    for i in range(12):
        start = i // 4 * 4 + 4                              # of the eight characters that it sees
        logits = model(ids[:, start:start + 8])[:, 4 + i % 4]
        torch.testing.assert_close(short[:, i], F.cross_entropy(logits, ids[:, 9 + i],
                                                                reduction="none"))
