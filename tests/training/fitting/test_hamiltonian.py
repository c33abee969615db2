import numpy as np
import pytest
import torch

from experiments.certify.exact import Problem, exact
from experiments.certify.exact import recipe as linear_recipe
from model_store.errors import InvalidInput
from tests.support.recipes import recipe_with
from training.bayes.posterior import noise
from training.fitting import laplace
from training.fitting.laplace import fit_laplace
from training.model import build
from training.recipe import Recipe

DRAWS = 1000

pytestmark = pytest.mark.fits


def test_draws_of_a_linear_gaussian_model_match_the_exact_posterior():
    problem = Problem.make(rows=200)
    content = linear_recipe("mvn", 0.0, 40).model_dump(exclude_none=True)
    posterior = {"prior_std": 1.0, "draws": DRAWS}
    content |= {"method": "last-layer-hmc", "posterior": posterior}
    content["training"] = {"epochs": 40, "choose": "elbo"}
    settings = Recipe.model_validate(content)
    model = build(settings, (problem.inputs,), 0).eval()
    train, validation = (
        (torch.from_numpy(rows.x), torch.from_numpy(rows.y))
        for rows in (problem.splits.train, problem.splits.validation)
    )
    model.likelihood.start(train[1])
    mean, precision = exact(model, problem)
    model.posterior.start_at(mean.float())
    facts = fit_laplace(model, settings.posterior, train, validation, 0, 20)
    assert facts["hamiltonian"]["r_hat"] < 1.05
    draws = model.posterior(noise(model.posterior, DRAWS)).double()
    std = precision.inverse().diagonal().sqrt()
    # The bounds are four standard errors. Squared deviations of successive draws correlate, so
    # 1,000 draws count like 370.
    assert ((draws.mean(0) - mean).abs() < 0.13 * std).all()
    assert (draws.std(0) / std - 1.0).abs().max() < 0.15


@pytest.mark.slow
def test_class_probabilities_match_a_grid_over_the_exact_posterior():
    """Two classes and one input without a bias, so only w_1 - w_0 matters."""
    torch.manual_seed(0)
    x = torch.tensor([[-1.0], [0.2], [0.7], [1.5], [-0.4]])
    y = torch.tensor([0, 1, 0, 1, 1])
    recipe = recipe_with(
        method="last-layer-hmc",
        posterior={"draws": DRAWS, "prior_std": 2.0},
        network={"factory": f"{__name__}:linear", "standardise": False},
    )
    model = build(recipe, (1,), 2)
    slope = torch.linspace(-20.0, 20.0, 8001, dtype=torch.float64)  # w_1 - w_0 ~ N(0, 2 * 2^2)
    log_odds = slope[:, None] * x[:, 0].double()
    log_likelihood = torch.nn.functional.logsigmoid(torch.where(y == 1, log_odds, -log_odds))
    weights = torch.softmax(log_likelihood.sum(1) - slope.square() / 16.0, dim=0)
    mode = slope[weights.argmax()].float()
    model.posterior.start_at(torch.stack([-mode / 2, mode / 2]))  # the maximum a posteriori
    fit_laplace(model, recipe.posterior, (x, y), (x, y), 0, 6)
    test_rows = torch.tensor([[-2.0], [0.5], [3.0]])
    probs = model.predict(test_rows, noise(model.posterior, DRAWS)).exp()[:, :, 1]
    exact_probs = torch.sigmoid(slope[:, None] * test_rows[:, 0].double())
    mean = weights @ exact_probs
    std = (weights @ (exact_probs - mean).square()).sqrt()
    assert ((probs.mean(0) - mean).abs() < 0.13 * std).all()
    assert (probs.std(0) / std - 1.0).abs().max() < 0.15


def linear(shape, outputs):
    return torch.nn.Linear(int(np.prod(shape)), outputs, bias=False)


def test_too_many_rows_are_rejected_with_an_alternative(monkeypatch):
    monkeypatch.setattr(laplace, "MAX_OUTPUTS", 10)
    recipe = recipe_with(method="last-layer-hmc", network={"hidden": [5]})
    model = build(recipe, (3,), 4)
    x, y = torch.randn(20, 3), torch.arange(20) % 4
    with pytest.raises(InvalidInput, match="laplace for more than 2 training rows"):
        fit_laplace(model, recipe.posterior, (x, y), (x, y), 0, 6)
