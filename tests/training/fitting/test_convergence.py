import math

import numpy as np
import pytest
import torch

from experiments.certify.exact import METHODS, Problem, compare, exact, fit, recipe
from training.bayes.diagnostics import bound, pulls
from training.data import Rows, Splits
from training.fitting import steps
from training.fitting.convergence import LEVEL, _faults, convergence, slope
from training.fitting.run import Run, run_provenance
from training.fitting.steps import SPREAD_RATE
from training.fitting.stopping import is_as_good
from training.model import build
from training.recipe import Recipe

VARIANCE_TOLERANCE = 0.2


@pytest.fixture(scope="module")
def problem():
    return Problem.make()


def fit_posterior(problem, method, start, folder):
    model, run = fit(problem, recipe(method, start, **METHODS[method]), folder)
    return *compare(model, problem), run_provenance(run, problem.splits)


@pytest.mark.usefixtures("fits")
def test_the_posterior_of_a_linear_regression_is_found_from_a_spread_of_a_thousandth(
    problem, tmp_path
):
    start = -7.0
    ratio, off, facts = fit_posterior(problem, "bbb-gaussian", start, tmp_path)
    assert (ratio.log().abs() < VARIANCE_TOLERANCE / 2).all(), ratio
    assert (off.abs() < 0.1).all(), off
    assert facts.convergence["settled"], facts.convergence
    assert facts.convergence["layers"]["0"]["start_std"] == pytest.approx(math.exp(start), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("start", [-7.0, -4.0, -1.0])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_posterior_of_a_linear_regression(
    problem, method, start, tmp_path, request
):
    if (method, start) == ("bhn-weights", -1.0):  # variances end 1.1 to 3.1 times the best
        request.applymarker(
            pytest.mark.xfail(reason="too noisy a gradient for this number of steps", strict=True)
        )
    ratio, off, facts = fit_posterior(problem, method, start, tmp_path)
    assert (ratio.log().abs() < VARIANCE_TOLERANCE).all(), ratio
    assert (off.abs() < 0.1).all(), off
    assert facts.convergence["settled"], facts.convergence


@torch.no_grad()
def at_exact_posterior(problem, method, variances_times):
    """Build a model at the best posterior of its family, with scaled variances."""
    model = build(recipe(method, -3.0), (problem.inputs,), 0).eval()
    model.likelihood.start(torch.from_numpy(problem.splits.train.y))
    mean, precision = exact(model, problem)
    model.posterior.start_at(mean.float())
    sigma = (variances_times / precision.diagonal()).sqrt().float()
    (spread,) = model.posterior.spread_parameters()
    spread.copy_(torch.log(torch.expm1(sigma)))
    return model


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_the_pull_says_by_how_much_variances_are_too_large(problem, times):
    model = at_exact_posterior(problem, "bbb-gaussian", times)
    train = tuple(
        torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y)
    )
    value, error = pulls(model, *train, 1.0 / len(train[0]), seed=0)["0"]
    # 5 errors of 40 draws: a right implementation fails once in some 100,000.
    assert value == pytest.approx(times - 1.0, abs=5 * error)
    assert error < 0.25 * times


def test_the_bound_is_that_of_the_exact_posterior_in_closed_form(problem):
    model = at_exact_posterior(problem, "bbb-gaussian", 1.0)
    x, y = (torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y))
    message = bound(model, x, y, len(x), seed=0)
    mean, std = (moment.detach()[None] for moment in model.posterior.moments())
    with torch.no_grad():
        # The outputs' mean is that of the mean weights; their variance adds to the squared errors.
        result = model.likelihood(model.network(x, mean[:, None])[0])
        inputs = torch.cat(
            [(x - model.network.mean) / model.network.std, torch.ones(len(x), 1)], dim=1
        )
        spread = inputs.square() @ std[0].square() * model.likelihood.target_std.square()
        nll = -model.likelihood.log_likelihood(result, y)[0] + 0.5 * spread / result[0, :, 1].exp()
    kl = (0.5 * (std.square() + mean.square() - 1.0) - std.log()).sum().item()
    assert message["kl"] == pytest.approx(kl, rel=1e-5)
    assert message["negative_elbo"] == pytest.approx(
        nll.mean().item() + kl / len(x), abs=6 * message["negative_elbo_error"]
    )
    assert message["negative_elbo_error"] < 0.02


def test_a_slope_is_that_of_the_last_fifth():
    values = [100.0] * 40 + [5.0 - 0.5 * i for i in range(10)]
    assert slope(values) == pytest.approx((-0.5, 0.0))
    noise = np.random.default_rng(0).normal(size=10).tolist()
    model, error = slope([0.0] * 40 + noise)
    assert abs(model) < 4 * error
    assert all(math.isnan(value) for value in slope([1.0, 2.0]))


@pytest.mark.parametrize(
    ("fall", "said"),
    [
        (0.001, []),
        (0.02, ["its bound fell 1.2 % over the second half of the path"]),
        (0.2, ["its bound fell 9.3 % over the second half of the path"]),
    ],
)
def test_a_bound_that_still_falls_is_seen_though_rates_have_decayed(fall, said):
    """It falls to .7 as the root of the path: its last epochs are level, as the rates are small."""
    rates = 1e-2 * 100.0 ** (-np.arange(1, 201) / 200)
    path = np.cumsum(rates) / rates.sum()
    bounds = 0.7 + fall * path**-0.5
    history = [
        {"objective": bound, "learning_rate": rate}
        for bound, rate in zip(bounds, rates, strict=True)
    ]
    assert -slope(bounds.tolist())[0] < LEVEL * bounds[-1] / 40
    actual = list(_faults({"layers": {}}, history))
    assert [item[: len(start)] for item, start in zip(actual, said, strict=True)] == said


def test_a_checkpoint_is_as_good_within_one_standard_error():
    lowest = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert is_as_good(lowest + 0.1 * torch.tensor([-1.0, 1.0, -1.0, 2.0]), lowest, paired=True)
    assert not is_as_good(lowest + 0.1, lowest, paired=True)
    assert is_as_good(lowest + 0.1, lowest, paired=False)
    assert not is_as_good(lowest + 2.0, lowest, paired=False)


def small_run(folder, start=-3.0, **training):
    """A run of four epochs on three classes around three points of the plane."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 128)
    x = (np.array([[0, 0], [4, 0], [0, 4]])[y] + rng.normal(size=(128, 2))).astype(np.float32)
    rows = Rows(x, y)
    settings = Recipe.model_validate(
        {
            "name": "small",
            "method": "bbb-gaussian",
            "data": {
                "source": "digits",
                "validation": 1,
                "reference": 1,
                "ranking": 1,
            },
            "network": {"hidden": [4]},
            "posterior": {"initial_log_std": start},
            "training": {"epochs": 4, "batch_rows": 16} | training,
        }
    )
    splits = Splits(rows, *(rows.take(np.arange(32 * i, 32 * (i + 1))) for i in range(4)))
    return Run(settings, splits, (2,), 3, folder, torch.device("cpu")), splits


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize("choose", ["elbo", "likelihood"])
@pytest.mark.parametrize(("ramp", "earliest"), [(0.0, 1), (2.5, 4), (4.0, 4), (9.0, 4)])
def test_no_checkpoint_is_taken_while_the_kls_weight_rises(tmp_path, choose, ramp, earliest):
    run, splits = small_run(tmp_path, kl_ramp_epochs=ramp, choose=choose)
    run.fit(quiet=True)
    assert earliest <= run.progress.best_epoch <= 4
    assert run_provenance(run, splits).choose == choose


def test_log_standard_deviations_have_a_learning_rate_of_their_own(tmp_path):
    run, _ = small_run(tmp_path, learning_rate=2e-3)
    rates = {group["first_lr"]: group["params"] for group in run.optimizer.param_groups}
    assert [p is run.model.posterior.rho for p in rates[SPREAD_RATE]] == [True]
    assert len(rates[2e-3]) == len([*run.model.parameters()]) - 1


@pytest.mark.usefixtures("fits")
def test_a_fit_too_short_says_that_it_has_not_converged(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "SPREAD_RATE", 1e-3)
    run, splits = small_run(tmp_path, start=-7.0)
    run.fit(quiet=True)
    facts = run_provenance(run, splits).convergence
    assert not facts["settled"]
    assert facts["says"].startswith("the posterior had not converged: ")


def test_a_fit_without_a_bound_reports_none(problem):
    train = tuple(
        torch.from_numpy(part) for part in (problem.splits.train.x, problem.splits.train.y)
    )
    history = [{"objective": 1.0, "learning_rate": 0.1}] * 3
    for method, alpha, has_bound in (
        ("bbb-gaussian", 0.0, True),
        ("bbb-gaussian", 0.5, False),
        ("variational-hypernet", 0.0, False),
    ):
        model = build(recipe(method, -3.0), (problem.inputs,), 0)
        facts = convergence(model, train, history, 1.0 / len(train[0]), {}, 0, alpha)
        pulled = any("pull" in layer for layer in facts["layers"].values())
        assert ("negative_elbo" in facts, pulled) == (has_bound, has_bound)
