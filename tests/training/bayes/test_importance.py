import math

import numpy as np
import pytest
import torch
from scipy.stats import genpareto

from experiments.certify.exact import Problem, exact, recipe
from tests.training.fitting.test_convergence import at_exact_posterior
from training.bayes import diagnostics
from training.bayes.diagnostics import log_ratios, pareto_k, pareto_shape
from training.model import build

DRAWS = 4000


@pytest.fixture(scope="module")
def problem():
    return Problem.make()


@pytest.mark.parametrize("shape", [-0.4, 0.1, 0.5, 0.9, 1.5])
def test_pareto_shape_is_recovered_from_a_sample(shape):
    count = 5000
    sample = np.sort(genpareto.rvs(shape, scale=3.0, size=count, random_state=0))
    # The bound is five asymptotic errors of maximum likelihood, (1 + k) / sqrt(n).
    assert pareto_shape(sample) == pytest.approx(shape, abs=5 * (1 + shape) / math.sqrt(count))


@pytest.mark.parametrize("shape", [0.2, 0.6, 1.2])
@pytest.mark.parametrize("shift", [-2000.0, 0.0, 3000.0])
def test_pareto_k_does_not_depend_on_the_size_of_ratios(shape, shift):
    ratios = np.log(genpareto.rvs(shape, size=DRAWS, random_state=1)) + shift
    tail = 3 * math.sqrt(DRAWS)
    assert pareto_k(ratios) == pytest.approx(shape, abs=5 * (1 + shape) / math.sqrt(tail))


def test_pareto_k_is_0_for_equal_ratios():
    assert pareto_k(np.full(100, 7.0)) == 0.0


def test_pareto_k_is_large_for_widely_spread_ratios():
    assert pareto_k(np.linspace(0.0, 5000.0, 200)) > 1.0


def test_pareto_k_is_small_at_best_posterior_and_large_if_too_narrow():
    problem = Problem.make(inputs=1)  # two nearly independent weights
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    k = {
        scale: pareto_k(
            log_ratios(at_exact_posterior(problem, "bbb-gaussian", scale), x, y, 1 / len(x), 250, 0)
        )
        for scale in (1.0, 0.1)
    }
    # For a Gaussian, k is 1 - variance / target variance. Its standard error here is about .2.
    assert k[1.0] < 0.4 < k[0.1]


def test_log_ratios_match_exact_densities(problem):
    model = at_exact_posterior(problem, "bbb-gaussian", 1.0)
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    actual = log_ratios(model, x, y, 1 / len(x), 50, seed=3)
    mean, precision = exact(model, problem)
    eps = diagnostics.standard_noise(50, model.posterior.noise_dimension, 3)
    with torch.no_grad():
        theta = model.posterior(eps).double()
        q_mean, q_std = (moment.double() for moment in model.posterior.moments())
    target = torch.distributions.MultivariateNormal(mean, precision_matrix=precision).log_prob(
        theta
    )
    q = torch.distributions.Normal(q_mean, q_std).log_prob(theta).sum(1)
    expected = (target - q).numpy()
    assert actual - actual.mean() == pytest.approx(expected - expected.mean(), abs=1e-2)


@pytest.mark.parametrize("method", ["mvn", "bhn-weights", "bbb-mixture"])
def test_log_ratios_are_finite_for_methods_with_a_density(problem, method):
    model = build(recipe(method, -3.0), (problem.inputs,), 0)
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    assert np.isfinite(log_ratios(model, x, y, 1 / len(x), 5, 0)).all()


def test_log_ratios_are_skipped_for_too_many_rows(problem, monkeypatch):
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    model = build(recipe("mvn", -3.0), (problem.inputs,), 0)
    monkeypatch.setattr(diagnostics, "MAX_FLOPS", 1.0)
    assert log_ratios(model, x, y, 1 / len(x), 5, 0) is None
