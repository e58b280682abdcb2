"""The predictions of experiments/scale.py, by hand."""
import pytest

from experiments import scale


def test_a_predicted_step_by_hand():
    c = scale.Flags(rate=0.5, nvlink=5.0, network=0.5)
    assert [scale.ring_bytes(100, n) for n in (1, 2, 4)] == [0, 100, 150]
    # 8e12 FLOPs on 2 x 4 GPUs of 0.5 TFLOP/s: 2 s. Of 40 MB, 2 x 3/4 x 40 = 60 MB inside at 5 GB/s
    # and 2 x 1/2 x 10 = 10 MB across at 0.5 GB/s. All but the last bucket, 25 MB, is hidden.
    sent, compute, wait = scale.predict(8e12, 10_000_000, 2, 4, c)
    assert (sent, compute) == (70e6, 2) and wait == pytest.approx((0.012 + 0.02) * 25 / 40)
    # 6.02 s of exchange, of which two thirds of the computation hide a part
    slow = scale.Flags(rate=0.5, nvlink=0.01, network=0.5)
    assert scale.predict(8e12, 10_000_000, 2, 4, slow)[2] == pytest.approx(6.02 - 2 / 3 * 2)
    assert scale.predict(8e12, 10_000_000, 1, 1, c) == (0, 16, 0)
    sent, _, wait = scale.predict(8e12, 1000, 2, 4, c)      # one bucket: nothing is hidden
    assert wait == pytest.approx(6000 / 5e9 + 1000 / 0.5e9)


def test_flops_of_simdino_by_hand():
    """Per token 6 x (12 d^2 a layer) and 12 n d; 1 + 196 tokens of a global view, 1 + 36 of a local
    one; a teacher's forward is a third of a step."""
    def view(n, d=768, L=12):
        projector = 768 * 2048 + 2048 * 2048 + 2048 * 256
        return n * L * (6 * 12 * d * d + 12 * n * d) + 6 * projector
    flops, _ = scale.papers_settings()["train_simdino imagenet"]
    assert flops == pytest.approx(1024 * ((2 + 2 / 3) * view(197) + 10 * view(37)), rel=1e-5)
