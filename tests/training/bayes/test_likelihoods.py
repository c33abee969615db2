import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from model_store.scores.regression import log_density
from training.bayes.likelihoods import Categorical, Gaussian, crps
from training.data.rows import Rows
from training.export.graphs import CHECKED_DETECTORS, PARITY_TOLERANCE, export, load_runtime, parity
from training.export.served import fold, served_network
from training.fitting.stopping import add_wrong_row
from training.model import build, initialise
from training.recipe import Recipe

ROWS, INPUTS = 20, 5
METHODS = {
    "homoscedastic": ("bbb-gaussian", {"initial_log_std": -2.0}),
    "heteroscedastic": ("batch-ensemble", {"members": 3, "prior_std": 1.0}),
}


def test_gaussian_log_likelihood_matches_torch():
    mean, std, y = torch.randn(3, 5), torch.rand(3, 5) + 0.1, torch.randn(5)
    moments = torch.stack([mean, 2 * std.log()], dim=-1)
    expected = torch.distributions.Normal(mean, std).log_prob(y)
    torch.testing.assert_close(Gaussian("homoscedastic").log_likelihood(moments, y), expected)


@pytest.mark.parametrize("kind", METHODS)
def test_outputs_are_in_target_units(kind):
    likelihood = Gaussian(kind)
    y = 1000.0 + 30.0 * torch.randn(50, generator=torch.Generator().manual_seed(0))
    likelihood.start(y)
    outputs = torch.tensor([[[0.0, 0.0], [1.0, math.log(0.25)]]])[..., : likelihood.outputs]
    mean, log_variance = likelihood(outputs).unbind(-1)
    std = y.std(correction=0).item()
    np.testing.assert_allclose(mean[0].detach(), [y.mean(), y.mean() + std], rtol=1e-5)
    expected = [std, 0.5 * std] if kind == "heteroscedastic" else [std, std]
    np.testing.assert_allclose((0.5 * log_variance[0]).exp().detach(), expected, rtol=1e-5)


def test_variances_stay_finite_and_positive_for_extreme_outputs():
    likelihood = Gaussian("heteroscedastic")
    variance = likelihood(torch.tensor([[[0.0, 1e30], [0.0, -1e30]]]))[..., 1].exp()
    assert torch.isfinite(variance).all()
    assert (variance > 0).all()


def test_added_wrong_row_uses_predicted_error_probabilities():
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(4, 6, 3, dtype=torch.float64, generator=generator).log_softmax(-1)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    probs = log_probs.exp().mean(0)
    error_probs = [probs[i, c].item() for i in range(6) for c in range(3) if c != y[i]]
    error_log_likelihood = sum(p * math.log(p) for p in error_probs) / sum(error_probs)
    label_log_probs = probs[torch.arange(6), y].log()
    _, log_likelihood, _, *columns, _ = Categorical(3).validation(log_probs, y).unbind(1)
    torch.testing.assert_close(log_likelihood, label_log_probs)
    actual = add_wrong_row(log_likelihood, *columns).item()
    assert actual == pytest.approx((label_log_probs.sum().item() + error_log_likelihood) / 7)


def test_best_probability_for_n_correct_rows_is_n_over_n_plus_1():
    probs, rows = torch.linspace(0.5, 0.9999, 5000, dtype=torch.float64), 18
    log_probs = torch.stack([probs, 1 - probs], dim=-1).log()
    y = torch.zeros(rows, dtype=torch.int64)
    actual = []
    for row in log_probs:
        columns = Categorical(2).validation(row.expand(1, rows, -1), y)
        _, log_likelihood, _, *error_columns, _ = columns.unbind(1)
        actual.append(add_wrong_row(log_likelihood, *error_columns).item())
    assert probs[int(np.argmax(actual))].item() == pytest.approx(rows / (rows + 1), abs=1e-3)


def test_added_wrong_row_counts_if_probabilities_underflow_to_0():
    log_probs = torch.tensor([[[0.0, -800.0, -900.0], [-900.0, 0.0, -700.0]]])
    columns = Categorical(3).validation(log_probs, torch.tensor([0, 1])).T
    _, log_likelihood, _, *error_columns, _ = columns
    assert add_wrong_row(log_likelihood, *error_columns).item() == pytest.approx(-700.0 / 3)


def test_validation_scores_of_the_mixture_match_service():
    moments, y = torch.randn(7, 30, 2, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    columns = Gaussian("homoscedastic").validation(moments, y).unbind(1)
    _, log_likelihood, errors, epistemic = columns
    np.testing.assert_allclose(epistemic, moments[..., 0].numpy().std(0), rtol=1e-10)
    np.testing.assert_allclose(log_likelihood, log_density(moments.numpy(), y.numpy()), rtol=1e-10)
    np.testing.assert_allclose(errors, (moments[..., 0].mean(0) - y) ** 2, rtol=1e-10)


@settings(max_examples=20)
@given(draws=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_crps_matches_its_integral(draws, seed):
    generator = np.random.default_rng(seed)
    mean, std, y = (
        generator.normal(size=draws),
        np.exp(generator.normal(size=draws)),
        generator.normal(),
    )

    def cdf(t):
        return np.mean(stats.norm.cdf(t, mean, std))

    low, high = min(y, (mean - 10 * std).min()), max(y, (mean + 10 * std).max())
    expected = (
        integrate.quad(lambda t: cdf(t) ** 2, low, y, limit=300)[0]
        + integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, high, limit=300)[0]
    )
    moments = torch.tensor(np.stack([mean, 2 * np.log(std)], axis=-1))[:, None]
    assert crps(moments, torch.tensor([y])).item() == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module", params=METHODS)
def case(request):
    method, posterior = METHODS[request.param]
    recipe = Recipe.model_validate(
        {
            "name": "a",
            "method": method,
            "task": "regression",
            "posterior": posterior,
            "data": {
                "source": "npz:a",
                "validation": 1,
                "reference": 1,
                "ranking": 1,
            },
            "network": {"hidden": [20]},
            "likelihood": {"noise": request.param},
            "training": {"epochs": 1},
        }
    )
    generator = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(ROWS, INPUTS, generator=generator)
    y = 500 + 40 * torch.randn(ROWS, generator=generator)
    model = build(recipe, (INPUTS,), 0)
    initialise(model, x)
    model.likelihood.start(y)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, x, y


@pytest.mark.usefixtures("fits")
def test_torch_and_onnxruntime_agree(case):
    model, x, y = case
    model.eval()
    fold(model)
    result = served_network(model, x, 0, names=CHECKED_DETECTORS)
    runtime = load_runtime(model, export(model, result))
    assert runtime.task == "regression"
    differences = parity(model, result, runtime, Rows(x.numpy(), y.numpy()))
    assert set(differences) == {"theta", "mean", "log_variance", "density"}
    assert all(0 <= difference < PARITY_TOLERANCE / 10 for difference in differences.values())
