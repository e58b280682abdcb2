"""Rates of layers whose tokens and bases are large. test_analyze.py has the rest of the columns."""
import torch

import model as models
from measure import layer_numbers


@torch.no_grad()
def test_rates_of_large_tokens_and_bases():
    """Tokens of a trained layer are far from 0 and close together: float32 cannot factor them. The
    size of U does not matter, and orthonormal ones are left as they are."""
    layer = models.ImageClassifier(models.ImageConfig(
        width=16, heads=2, layers=1, image_size=32, patch_size=8)).encoder.layers[0]

    def numbers(Z, **flags):
        trace = models.LayerTrace(Z, Z, None, Z, None)
        return layer_numbers(layer, trace, **flags)
    Z = 1e4 * torch.randn(1, 1, 16) + torch.randn(5, 64, 16)
    assert models.coding_rate(Z, 0.1).isnan().any()
    found = numbers(Z)
    assert all(values.isfinite().all() for values in found.values())
    assert torch.allclose(found["R"], models.coding_rate(Z.double(), 0.1))

    out = torch.randn(3, 5, 16).relu()
    U = torch.nn.init.orthogonal_(layer.attention.U.weight)
    wanted = models.sparse_rate_reduction(out.double(), layer.attention.bases().double(), 0.1)
    for size in (1, 3):
        U /= size
        torch.testing.assert_close(numbers(out)["objective"], wanted)
