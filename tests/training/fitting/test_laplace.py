import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from experiments.certify.exact import Problem, exact
from experiments.certify.exact import recipe as linear_recipe
from tests.support.recipes import content_with, recipe_with
from tests.support.refusals import assert_invalid
from training.bayes.laplace import Eigen, best_precision, log_marginal_likelihood
from training.bayes.posterior import noise
from training.fitting.laplace import LOST_NATS, check_trained, fit_laplace
from training.fitting.run import Run, run_provenance
from training.model import build, initialise
from training.recipe import Recipe, validate


@pytest.fixture(scope="module")
def problem():
    return Problem.make(rows=200)


def get_recipe(epochs=40):
    content = linear_recipe("mvn", 0.0, epochs).model_dump(exclude_none=True)
    posterior = {"prior_std": 1.0}
    training = {"epochs": epochs, "batch_rows": 50, "learning_rate": 0.1, "choose": "elbo"}
    return Recipe.model_validate(
        {**content, "method": "laplace", "posterior": posterior, "training": training}
    )


def get_rows(split):
    return torch.from_numpy(split.x), torch.from_numpy(split.y)


def build_at_exact_mean(problem, settings):
    """Build an unfitted model at the exact posterior's mean."""
    model = build(settings, (problem.inputs,), 0).eval()
    model.likelihood.start(get_rows(problem.splits.train)[1])
    mean, precision = exact(model, problem)
    model.posterior.start_at(mean.float())
    return model, precision


def fit_posterior(model, settings, problem):
    return fit_laplace(
        model,
        settings.posterior,
        get_rows(problem.splits.train),
        get_rows(problem.splits.validation),
        0,
        20,
    )


def covariance(posterior):
    deviations = posterior(torch.eye(posterior.noise_dimension)) - posterior.mean
    return (deviations.T @ deviations).detach().double()


def test_covariance_is_exact_for_linear_gaussian_problem(problem):
    settings = get_recipe()
    model, precision = build_at_exact_mean(problem, settings)
    fit_posterior(model, settings, problem)
    torch.testing.assert_close(
        covariance(model.posterior), precision.inverse(), rtol=1e-4, atol=1e-8
    )


def test_marginal_likelihood_matches_evidence(problem):
    settings = get_recipe()
    model, _ = build_at_exact_mean(problem, settings)
    facts = fit_posterior(model, settings, problem)
    assert facts["log_marginal_likelihood"] == pytest.approx(
        evidence(model, problem, 1.0), abs=1e-3
    )
    assert facts["log_marginal_likelihood"] < facts["log_likelihood"]


def evidence(model, problem, prior_std):
    x, y = (part.double() for part in get_rows(problem.splits.train))
    scale = model.likelihood.target_std.double()
    inputs = torch.cat([x, torch.ones(len(x), 1)], 1) * scale * prior_std
    spread = inputs @ inputs.T + scale**2 * torch.eye(len(x))
    diff = y - model.likelihood.target_mean.double()
    log_det = torch.linalg.slogdet(spread)[1]
    return (
        -0.5 * (diff @ torch.linalg.solve(spread, diff) + log_det + len(x) * math.log(2 * math.pi))
    ).item()


def test_fit_ends_at_exact_posterior(problem, tmp_path, fits):
    run = Run(get_recipe(), problem.splits, (problem.inputs,), 0, tmp_path, torch.device("cpu"))
    model = run.fit(quiet=True).eval()
    mean, precision = exact(model, problem)
    std = precision.inverse().diagonal().sqrt()
    assert ((model.posterior.mean.double() - mean).abs() < 0.1 * std).all()
    torch.testing.assert_close(
        covariance(model.posterior), precision.inverse(), rtol=1e-3, atol=1e-7
    )
    facts = run_provenance(run, problem.splits)
    assert facts.laplace["summary"].startswith(
        "laplace, 6 weights: prior_std 1 as configured, log marginal likelihood -"
    )
    assert facts.convergence is None


def get_eigen(*values):
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    return Eigen(column, torch.eye(len(values)).double(), torch.eye(1).double())


def test_best_precision_maximises_marginal_likelihood():
    eigen, square = get_eigen(0.0, 0.5, 20.0, 3.0, 400.0), 2.5
    best = best_precision(eigen, square)
    maximum = log_marginal_likelihood(0.0, eigen, square, best)
    for factor in (0.99, 1.01, 0.1, 10.0):
        assert log_marginal_likelihood(0.0, eigen, square, best * factor) < maximum
    assert eigen.effective_parameters(best) == pytest.approx(best * square, rel=1e-5)


def test_best_precision_is_bounded():
    assert best_precision(get_eigen(1.0), 0.0) == pytest.approx(1e8)
    assert best_precision(get_eigen(0.0), 1.0) == pytest.approx(1e-8)


# Trained networks


def tanh_network(shape, outputs):
    module = nn.Sequential(nn.Linear(shape[0], 6), nn.Tanh(), nn.Linear(6, outputs))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


TRAINED = {"factory": f"{__name__}:tanh_network", "start": "trained"}


def test_trained_network_stays_fixed_and_noise_matches_its_error(problem, tmp_path, fits):
    settings = recipe_with(
        method="laplace", task="regression", network=TRAINED, training={"epochs": None}
    )
    run = Run(settings, problem.splits, (problem.inputs,), 0, tmp_path, torch.device("cpu"))
    assert run.steps == 0
    model = run.fit(quiet=True).eval()
    module = tanh_network((problem.inputs,), 1)
    expected = torch.cat([module[2].weight.T, module[2].bias[None]]).flatten()
    assert torch.equal(model.posterior.mean.detach(), expected.detach())
    x, y = get_rows(problem.splits.train)
    result = model.likelihood(model.network(x, model.posterior.centre()[None, None]))
    errors = (module(x)[:, 0] - y).square().mean()
    torch.testing.assert_close(
        result[0, :, 1].exp(), errors.expand(len(x)).detach(), rtol=1e-4, atol=0
    )
    facts = run_provenance(run, problem.splits)
    assert (facts.epochs, facts.steps) == (0, 0)
    assert math.isfinite(facts.validation_log_likelihood)
    log_likelihood = model.likelihood.log_likelihood(result, y).sum().item()
    assert facts.laplace["log_likelihood"] == pytest.approx(log_likelihood, rel=1e-4)
    assert run.checkpoint.exists()


def test_repeated_run_finds_the_same_posterior(problem, tmp_path, fits):
    network = {"hidden": [3]}
    settings = recipe_with(
        method="laplace", task="regression", network=network, training={"epochs": 2}
    )
    folder = tmp_path / "run"
    folder.mkdir()
    draws = []
    for _ in range(2):
        run = Run(settings, problem.splits, (problem.inputs,), 0, folder, torch.device("cpu"))
        model = run.fit(quiet=True)
        draws.append(model.posterior(noise(model.posterior, 3, 0)))
    assert torch.equal(*draws)


@pytest.mark.parametrize("is_confident", [True, False])
def test_marginal_likelihood_selects_prior_unless_held_out_loss_rises(is_confident):
    """Draws lower the likelihood of a confident network with few rows, but not of a calibrated
    network with many rows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 5, generator=generator)
    rows = 3 if is_confident else 300
    settings = recipe_with(method="laplace", network=TRAINED)
    model = build(settings, (5,), 3)
    initialise(model, x, standardise=False)
    if is_confident:
        model.posterior.mean.data.mul_(20.0)
    centre = model.network(x, model.posterior.centre()[None, None])[0]
    y = centre.argmax(1)
    if not is_confident:
        y = torch.multinomial(torch.softmax(centre, 1), 1, generator=generator.manual_seed(1))[:, 0]
    held_out, eps = (x[300:], y[300:]), noise(model.posterior, 20, 0, 4)

    def loss():
        predictions = model.predict(held_out[0], eps)
        return -model.likelihood.mixture_log_likelihood(predictions, held_out[1]).mean().item()

    initial_loss = loss()
    facts = fit_laplace(model, settings.posterior, (x[:rows], y[:rows]), held_out, 0, 20)
    assert ("by marginal likelihood" in facts["summary"]) is not is_confident
    if is_confident:
        assert loss() < initial_loss + 3 * LOST_NATS


def test_tempered_likelihood_is_equivalent_to_repeated_rows(problem):
    settings = get_recipe()
    model, _ = build_at_exact_mean(problem, settings)
    repeated_rows = get_rows(problem.splits.train)
    repeated_rows = tuple(torch.cat([part, part]) for part in repeated_rows)
    held_out = get_rows(problem.splits.validation)
    facts = fit_laplace(model, settings.posterior, repeated_rows, held_out, 0, 20)
    expected = covariance(model.posterior)
    tempered = fit_laplace(
        model, settings.posterior, get_rows(problem.splits.train), held_out, 0, 20, times=2.0
    )
    torch.testing.assert_close(covariance(model.posterior), expected, rtol=1e-4, atol=1e-8)
    assert tempered["log_marginal_likelihood"] == pytest.approx(
        facts["log_marginal_likelihood"], rel=1e-5
    )


class HeadFirst(nn.Module):
    """A module that creates its last layer first."""

    def __init__(self, shape, outputs):
        super().__init__()
        self.head, self.body = nn.Linear(4, outputs), nn.Linear(shape[0], 4)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def test_layer_that_runs_last_is_drawn():
    model = build(
        recipe_with(method="laplace", network={"factory": f"{__name__}:HeadFirst"}), (5,), 3
    )
    assert [slot.name for slot in model.network.slots] == ["head"]


# Errors


def test_contradictory_recipes_are_rejected():
    laplace_content = content_with(method="laplace", training={"epochs": 0})
    assert_invalid(
        lambda: check_trained(Recipe.model_validate(laplace_content), None),
        "training.epochs: expected 1 or more, or a trained",
    )
    flow_content = content_with(training={"epochs": 0})
    assert_invalid(
        lambda: validate(flow_content, "r.toml"),
        "r.toml: training.epochs: expected 1 or more for method bhn-realnvp, got 0",
    )
    for prior_std in (0, -1.0, "marginal", True):
        content = content_with(method="laplace", posterior={"prior_std": prior_std})
        assert_invalid(
            lambda content=content: validate(content, "r"),
            "r: posterior.prior_std: expected ",
        )
    auto = content_with(
        method="laplace",
        task="regression",
        network=TRAINED,
        data={"target_transform": "auto"},
        training={},
    )
    del auto["training"]["epochs"]
    assert_invalid(
        lambda: check_trained(Recipe.model_validate(auto), None),
        "data.target_transform: expected the transform of",
    )


@pytest.mark.parametrize(
    ("network", "field", "message"),
    [
        ({"hidden": [4], "bayesian": ["2"]}, "network.bayesian", "which draws only the last layer"),
        ({"factory": f"{__name__}:squashed"}, "network: expected a final", "got layer 1: Linear("),
        ({"factory": f"{__name__}:pooled"}, "network: expected a final", "got layer 0: Conv2d("),
    ],
)
def test_networks_without_a_drawable_last_layer_are_rejected(network, field, message):
    settings = recipe_with(method="laplace", network=network)
    assert_invalid(lambda: build(settings, (1, 5, 5), 3), field, message)


def squashed(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(25, outputs), nn.Tanh())


def pooled(shape, outputs):
    return nn.Sequential(nn.Conv2d(shape[0], outputs, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_epochs_are_optional_with_a_weights_file(tmp_path):
    module = tanh_network((5,), 3)
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    network = {"factory": f"{__name__}:tanh_network", "weights": str(tmp_path / "w.safetensors")}
    for epochs in (None, 0, 3):
        check_trained(
            recipe_with(method="laplace", network=network, training={"epochs": epochs}), None
        )
