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
def test_the_shape_of_a_pareto_sample_is_found(shape):
    count = 5000
    sample = np.sort(genpareto.rvs(shape, scale=3.0, size=count, random_state=0))
    # (1 + k) / sqrt(n) is the asymptotic error of the maximum of the likelihood; 5 of them.
    assert pareto_shape(sample) == pytest.approx(shape, abs=5 * (1 + shape) / math.sqrt(count))


@pytest.mark.parametrize("shape", [0.2, 0.6, 1.2])
@pytest.mark.parametrize("shift", [-2000.0, 0.0, 3000.0])
def test_ratios_may_have_any_size(shape, shift):
    ratios = np.log(genpareto.rvs(shape, size=DRAWS, random_state=1)) + shift
    tail = 3 * math.sqrt(DRAWS)
    assert pareto_k(ratios) == pytest.approx(shape, abs=5 * (1 + shape) / math.sqrt(tail))


def test_equal_ratios_have_no_tail():
    assert pareto_k(np.full(100, 7.0)) == 0.0


def test_far_apart_ratios_are_a_heavy_tail():
    assert pareto_k(np.linspace(0.0, 5000.0, 200)) > 1.0


def test_a_posterior_that_covers_has_a_small_k_and_one_too_narrow_a_large_one():
    problem = Problem.make(
        inputs=1
    )  # two numbers, nearly independent: the factorial Gaussian is nearly exact
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    actual = {
        times: pareto_k(
            log_ratios(at_exact_posterior(problem, "bbb-gaussian", times), x, y, 1 / len(x), 250, 0)
        )
        for times in (1.0, 0.1)
    }
    # Of a Gaussian the ratio's tail has the index 1 - variance over the target's variance; its
    # error here is some .2.
    assert actual[1.0] < 0.4 < actual[0.1]


def test_ratios_are_those_of_the_densities(problem):
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
def test_methods_with_a_density_have_ratios(problem, method):
    model = build(recipe(method, -3.0), (problem.inputs,), 0)
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    assert np.isfinite(log_ratios(model, x, y, 1 / len(x), 5, 0)).all()


def test_with_too_many_rows_there_are_none(problem, monkeypatch):
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    model = build(recipe("mvn", -3.0), (problem.inputs,), 0)
    monkeypatch.setattr(diagnostics, "MAX_FLOPS", 1.0)
    assert log_ratios(model, x, y, 1 / len(x), 5, 0) is None
