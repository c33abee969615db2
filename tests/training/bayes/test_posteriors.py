import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from training.bayes.flows import iaf, realnvp
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.posterior import log_normal, standard_noise


def build_posterior(flow, dimension, couplings, prior_std=1.0, log_scale=-0.5, seed=0):
    """Build a posterior in float64 with perturbed parameters."""
    generator = torch.Generator().manual_seed(seed)
    posterior = HypernetworkPosterior(
        flow(dimension, couplings, 8, log_scale, generator), dimension, prior_std
    ).double()
    with torch.no_grad():
        for parameter in posterior.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return posterior


def log_q(posterior, eps):
    """Return draws and log q(theta), with the log prior removed."""
    theta, log_ratio = posterior.sample(eps)
    return theta, log_ratio + log_normal(theta, posterior.prior_std)


def gaussian(posterior):
    """Build the Gaussian that equals a posterior without couplings."""
    return Independent(Normal(posterior.output.shift, posterior.output.log_scale.exp()), 1)


@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
def test_log_normal_matches_factorised_gaussian_density(std):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = Independent(Normal(torch.zeros(4, dtype=torch.float64), std), 1).log_prob(x)
    torch.testing.assert_close(log_normal(x, std), expected)


@pytest.mark.parametrize("prior_std", [0.5, 2.0])
@pytest.mark.parametrize("flow", [realnvp, iaf])
def test_flow_without_couplings_is_gaussian_with_analytic_kl(flow, prior_std):
    posterior = build_posterior(flow, 6, 0, prior_std)
    eps = standard_noise(20_000, 6, 1).double()
    with torch.no_grad():
        theta, density = log_q(posterior, eps)
        torch.testing.assert_close(density, gaussian(posterior).log_prob(theta))
        prior = Independent(Normal(torch.zeros(6, dtype=torch.float64), prior_std), 1)
        estimates = posterior.sample(eps)[1]
        standard_error = (estimates.std() / math.sqrt(len(estimates))).item()
        analytic = kl_divergence(gaussian(posterior), prior).item()
        # A correct implementation exceeds five standard errors once in 1.7 million.
        assert estimates.mean().item() == pytest.approx(analytic, abs=5 * standard_error)


def test_training_noise_depends_only_on_its_key():
    first = standard_noise(3, 4, 7, 1, 2)
    torch.manual_seed(0)
    torch.randn(10)
    assert torch.equal(standard_noise(3, 4, 7, 1, 2), first)
    assert not torch.equal(standard_noise(3, 4, 7, 2, 1), first)
    assert not torch.equal(standard_noise(3, 4, 7, 1, 3), first)
