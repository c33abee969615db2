import math

import pytest
import torch
from torch.distributions import Independent, Normal, kl_divergence

from training.bayes.flows import iaf, realnvp
from training.bayes.hypernetwork import HypernetworkPosterior
from training.bayes.posterior import log_normal, standard_noise


def posterior(flow, dimension, couplings, prior_std=1.0, log_scale=-0.5, seed=0):
    """A posterior in float64 whose parameters are away from their start."""
    generator = torch.Generator().manual_seed(seed)
    created = HypernetworkPosterior(
        flow(dimension, couplings, 8, log_scale, generator), dimension, prior_std
    ).double()
    with torch.no_grad():
        for parameter in created.parameters():
            parameter.add_(
                0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            )
    return created


def log_q(made, eps):
    """log q(theta) of `sample`'s draws, the prior taken off again."""
    theta, log_ratio = made.sample(eps)
    return theta, log_ratio + log_normal(theta, made.prior_std)


def gaussian(made):
    """The factorial Gaussian that a posterior without couplings is."""
    return Independent(Normal(made.output.shift, made.output.log_scale.exp()), 1)


@pytest.mark.parametrize("std", [0.1, 1.0, 3.0])
def test_log_normal_is_the_density_of_a_factorial_gaussian(std):
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = Independent(Normal(torch.zeros(4, dtype=torch.float64), std), 1).log_prob(x)
    torch.testing.assert_close(log_normal(x, std), expected)


@pytest.mark.parametrize("prior_std", [0.5, 2.0])
@pytest.mark.parametrize("flow", [realnvp, iaf])
def test_without_couplings_it_is_a_factorial_gaussian_with_its_analytic_kl(flow, prior_std):
    created = posterior(flow, 6, 0, prior_std)
    eps = standard_noise(20_000, 6, 1).double()
    with torch.no_grad():
        theta, density = log_q(created, eps)
        torch.testing.assert_close(density, gaussian(created).log_prob(theta))
        prior = Independent(Normal(torch.zeros(6, dtype=torch.float64), prior_std), 1)
        estimates = created.sample(eps)[1]
        standard_error = (estimates.std() / math.sqrt(len(estimates))).item()
        analytic = kl_divergence(gaussian(created), prior).item()
        # Five standard errors of a mean of 20,000 draws: a right implementation fails once in 1.7
        # million.
        assert estimates.mean().item() == pytest.approx(analytic, abs=5 * standard_error)


def test_training_noise_is_a_function_of_its_key_alone():
    first = standard_noise(3, 4, 7, 1, 2)
    torch.manual_seed(0)
    torch.randn(10)
    assert torch.equal(standard_noise(3, 4, 7, 1, 2), first)
    assert not torch.equal(standard_noise(3, 4, 7, 2, 1), first)
    assert not torch.equal(standard_noise(3, 4, 7, 1, 3), first)
