import math

import pytest
import torch

from training.fitting.steps import alpha_objective


def log_likelihoods():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 2


@pytest.mark.parametrize("kl_weight", [0.0, 0.01, 1.0])
def test_loss_is_negative_elbo_at_alpha_0(kl_weight):
    log_likelihood, kl = log_likelihoods(), torch.tensor([7.0, 1.0, 4.0], dtype=torch.float64)
    loss, nll = alpha_objective(log_likelihood, kl, kl_weight)
    expected = -sum(log_likelihood[k, n].item() for k in range(3) for n in range(4)) / 12
    assert nll.item() == pytest.approx(expected)
    assert loss.item() == pytest.approx(expected + kl_weight * 4.0)


@pytest.mark.parametrize("alpha", [-1.0, 0.5, 1.0, 2.0])
def test_likelihood_term_matches_its_equation(alpha):
    log_likelihood = log_likelihoods()
    expected = 0.0
    for n in range(4):
        mean = sum(math.exp(log_likelihood[k, n].item()) ** alpha for k in range(3)) / 3
        expected -= math.log(mean) / alpha / 4
    assert alpha_objective(log_likelihood, torch.zeros(3), 1.0, alpha)[1].item() == pytest.approx(
        expected
    )


def test_alpha_0_is_the_limit_and_alpha_does_not_affect_one_draw():
    log_likelihood, kl = log_likelihoods(), torch.zeros(3)
    limit = alpha_objective(log_likelihood, kl, 1.0)[0].item()
    # The second term of the expansion is -alpha var_k / 2.
    assert alpha_objective(log_likelihood, kl, 1.0, 1e-6)[0].item() == pytest.approx(
        limit, abs=1e-5
    )
    losses = [
        alpha_objective(log_likelihood[:1], kl[:1], 1.0, alpha)[0].item()
        for alpha in (0.0, 0.5, 1.0)
    ]
    assert losses == pytest.approx([losses[0]] * 3)


def test_loss_stays_finite_if_likelihood_underflows():
    assert alpha_objective(torch.full((3, 2), -1e4), torch.zeros(3), 1.0, 0.5)[
        0
    ].item() == pytest.approx(1e4)
