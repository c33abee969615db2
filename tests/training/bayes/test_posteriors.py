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


@pytest.mark.parametrize("couplings", [1, 3])
@pytest.mark.parametrize("flow", [realnvp, iaf])
def test_log_q_is_the_change_of_variables_by_autograd(flow, couplings):
    created = posterior(flow, 5, couplings)
    eps = standard_noise(7, 5, 1).double()
    theta, density = log_q(created, eps)
    torch.testing.assert_close(theta, created(eps))
    for row in range(7):
        jacobian = torch.func.jacrev(lambda e: created.flow(e)[0])(eps[row])
        expected = (
            Normal(0.0, 1.0).log_prob(eps[row]).sum() - torch.linalg.slogdet(jacobian).logabsdet
        )
        torch.testing.assert_close(density[row], expected)


@pytest.mark.parametrize("flow", [realnvp, iaf])
def test_q_integrates_to_one_over_theta(flow):
    # A fine grid of noise maps to a mesh of small triangles in theta, whose areas need no Jacobian.
    created = posterior(flow, 2, 2)
    axis = torch.linspace(-5, 5, 401, dtype=torch.float64)
    with torch.no_grad():
        theta, density = log_q(created, torch.cartesian_prod(axis, axis))
    theta, density = theta.reshape(401, 401, 2), density.exp().reshape(401, 401)
    total = 0.0
    for corners in (
        (theta[:-1, :-1], theta[1:, :-1], theta[:-1, 1:]),
        (theta[1:, 1:], theta[1:, :-1], theta[:-1, 1:]),
    ):
        a, b = corners[1] - corners[0], corners[2] - corners[0]
        area = 0.5 * (a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]).abs()
        mean = (density[:-1, :-1] + density[1:, :-1] + density[:-1, 1:] + density[1:, 1:]) / 4
        total += (area * mean).sum().item()
    assert total == pytest.approx(1.0, abs=2e-3)


def test_training_noise_is_a_function_of_its_key_alone():
    first = standard_noise(3, 4, 7, 1, 2)
    torch.manual_seed(0)
    torch.randn(10)
    assert torch.equal(standard_noise(3, 4, 7, 1, 2), first)
    assert not torch.equal(standard_noise(3, 4, 7, 2, 1), first)
    assert not torch.equal(standard_noise(3, 4, 7, 1, 3), first)


def test_training_noise_leaves_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.randn(1)
    torch.manual_seed(0)
    standard_noise(3, 4, 7)
    assert torch.equal(torch.randn(1), expected)
