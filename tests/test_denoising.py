"""Denoisers against the mixture's own score, and what is known of their errors."""
import pytest
import torch

from experiments import denoising
from experiments.compression import random_subspaces


@pytest.mark.parametrize("sigma", [0.1, 0.7])
def test_posterior_mean(sigma):
    U = torch.linalg.qr(torch.randn(3, 8, 2).double())[0]           # not orthogonal to each other
    z = denoising.mixture(U, 40, torch.Generator().manual_seed(0))
    z = z + sigma * torch.randn(40, 8).double()
    covariance = U @ U.mT + sigma ** 2 * torch.eye(8).double()
    parts = torch.distributions.MultivariateNormal(torch.zeros(3, 8).double(), covariance)
    z.requires_grad_()
    score, = torch.autograd.grad(parts.log_prob(z[:, None]).logsumexp(1).sum(), z)
    found = denoising.posterior_mean(z, U, sigma)
    assert torch.allclose((found - z) / sigma ** 2, score, atol=1e-8)       # [J] Eq. (46)


def test_reverse_diffusion():
    generator = torch.Generator().manual_seed(0)
    U = random_subspaces(12, 3, generator)
    clean = denoising.mixture(U, 2000, generator)
    z = clean + 0.5 * torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
    sde = denoising.reverse_diffusion(z, U, 0.5, 60, generator)
    posterior = denoising.posterior_mean(z, U, 0.5)
    # clean tokens and samples are two draws of one posterior
    error, least = ((back - clean).square().sum(1).mean().item() for back in (sde, posterior))
    assert error == pytest.approx(2 * least, rel=0.08)
    assert sde.square().sum(1).mean().item() == pytest.approx(4, rel=0.08)  # as of clean tokens


def test_denoising(monkeypatch):
    monkeypatch.setattr(denoising, "SIGMAS", (0.01, 0.3))
    levels = denoising.main(["--width=12", "--heads=3", "--tokens=600", "--steps=20"])
    rows = {(row["sigma"], row["method"]): row for row in levels}
    for sigma in (0.01, 0.3):
        error = {method: row["error"] for (level, method), row in rows.items() if level == sigma}
        assert error["noisy"] == pytest.approx(12 * sigma ** 2, rel=0.1)
        assert error["posterior"] <= min(error.values()) * 1.001
        assert rows[sigma, "sde"]["off"] < 1e-6
    # a projection: the noise within the subspace is left
    assert rows[0.01, "closed"]["error"] == pytest.approx(4 * 0.01 ** 2, rel=0.15)
