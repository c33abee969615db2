from math import log, pi

import numpy as np
import pytest
import torch

from model_store.artifacts.store import ModelStore
from model_store.scores.classification import predictive_scores, predictive_sums
from model_store.scores.regression import mixture_scores, mixture_sums
from tests.support.recipes import recipe_with, write_recipe
from training.__main__ import main
from training.bayes.diagnostics import guess_nll
from training.data.rows import Rows, Splits
from training.evaluation.metrics import Mean, Share
from training.evaluation.quality import Quality, disagreement
from training.methods import METHODS
from training.publishing.baselines import (
    ACCURACY,
    ERROR,
    LOG_LIKELIHOOD,
    MIN_PROBABILITY,
    baselines,
    lead,
    spread,
    warn_if_worse,
)
from training.publishing.draft import _agreement_warnings, fit_warnings
from training.versions import Provenance, TemperatureChoice

RANDOM = np.random.default_rng(3)


def get_rows(y):
    x = np.stack([y, RANDOM.normal(size=len(y))], axis=1).astype(np.float32)
    return Rows(x, y)


def get_splits(train, test):
    """Divide rows into training, validation and calibration rows."""
    parts = np.array_split(np.arange(len(train)), 4)
    return Splits(*map(train.take, parts), test)


def test_constant_baseline_uses_smoothed_class_shares():
    train, test = get_rows(np.array([0] * 6 + [1] * 3)), get_rows(np.array([0, 1, 2, 0]))
    actual = baselines(get_splits(train, test), 3)["constant"]
    by_hand = (2 * log(7 / 12) + log(4 / 12) + log(1 / 12)) / 4
    assert actual[LOG_LIKELIHOOD].value == pytest.approx(by_hand)
    assert actual[ACCURACY].value == 0.5


def test_constant_baseline_of_regression_is_gaussian():
    train, test = get_rows(np.float32([1, 2, 6])), get_rows(np.float32([3, 0]))
    actual = baselines(get_splits(train, test), 0)["constant"]
    variance = (4 + 1 + 9) / 3
    by_hand = -0.5 * log(2 * pi * variance) - (0 + 9) / 2 / (2 * variance)
    assert actual[LOG_LIKELIHOOD].value == pytest.approx(by_hand)
    assert actual[ERROR].value == pytest.approx((9 / 2) ** 0.5)


@pytest.mark.parametrize("classes", [0, 2, 4])
def test_linear_and_boosting_learn_from_informative_column(classes):
    y = np.arange(200) % classes if classes else RANDOM.normal(size=200).astype(np.float32)
    rows = get_rows(y)
    actual = baselines(get_splits(rows, rows), classes)
    assert list(actual) == ["constant", "linear", "boosting"]
    constant = actual.pop("constant")
    for figures in actual.values():
        assert lead(figures[LOG_LIKELIHOOD], constant[LOG_LIKELIHOOD])[0] > 0.3
        assert figures[LOG_LIKELIHOOD].value <= 0 or not classes


def test_class_without_rows_keeps_minimum_probability():
    y = np.append(1, np.zeros(12_000, dtype=np.int64))
    actual = baselines(get_splits(get_rows(y), get_rows(np.array([2, 0]))), 3)
    for name in ("linear", "boosting"):
        assert actual[name][LOG_LIKELIHOOD].value > log(MIN_PROBABILITY)


@pytest.mark.parametrize("validation", [[0, 1, 2], [1]])
def test_boosting_accepts_validation_classes_missing_from_its_sample(validation, monkeypatch):
    monkeypatch.setattr("training.publishing.baselines.MIN_ROWS", 40)
    monkeypatch.setattr("training.publishing.baselines.TREES", 0)
    train = get_rows(np.repeat([0, 1, 2], [100, 1, 99]))
    splits = Splits(train, get_rows(np.array(validation)), train, train, train)
    assert baselines(splits, 3)["boosting"][ACCURACY].value > 0.9


def test_spread_rows_include_first_and_last_class():
    y = np.append(np.ones(5000, dtype=np.int64), [0, 2])
    small = spread(get_rows(y), 100)
    assert len(small) == 100
    assert sorted({*small.y.tolist()}) == [0, 1, 2]


def get_figures(log_likelihood, hits):
    return {LOG_LIKELIHOOD: Mean(np.array(log_likelihood)), ACCURACY: Share(np.array(hits))}


def test_warnings_name_clearly_better_baselines_and_ties_with_constant():
    even = [-0.5, -0.6] * 50
    model = get_figures(even, [True, False] * 50)
    better = get_figures(np.array(even) + [0.1, 0.2] * 50, [True] * 100)
    tied = get_figures(np.array(even) + [2.0, -1.9] * 50, [True, False] * 50)
    worse = get_figures(np.array(even) - 0.1, [True, False] * 50)
    assert list(warn_if_worse(model, {"constant": worse, "linear": tied}, "always 'ok'")) == []
    (no_better,) = warn_if_worse(model, {"constant": tied}, "always 'ok'")
    assert no_better.startswith("no better than always 'ok': log-likelihood -0.55 against -0.5")
    assert list(warn_if_worse(model, {"linear": better, "boosting": tied}, "always 'ok'")) == [
        "worse than linear: log-likelihood -0.55 against -0.4 on 100 test rows (difference -0.15, "
        "standard error 0.005)"
    ]
    likelihood, accuracy = warn_if_worse(model, {"constant": better}, "always 'ok'")
    assert likelihood.startswith("worse than always 'ok': log-likelihood -0.55 against -0.4")
    assert accuracy == "accuracy 0.5 is below the 1 of always 'ok'"


@pytest.mark.parametrize(("value", "has_warning"), [(9.996, True), (2.0, False), (0.3, False)])
def test_temperature_above_two_causes_warning(value, has_warning):
    choice = TemperatureChoice(value=value, fitted=value, gain=1.0, standard_error=0.1)
    messages = tuple(fit_warnings(Provenance(temperature=choice)))
    assert bool(messages) == has_warning
    assert all(
        f"the network alone is overconfident (temperature {value:.4g})" in item for item in messages
    )


@pytest.mark.parametrize(
    ("method", "weight", "notes"),
    [
        (
            "bbb-gaussian",
            1e-4,
            ["a tempered posterior with temperature 0.1 (training.kl_weight)"],
        ),
        ("bbb-gaussian", 1e-3, []),
        ("bbb-gaussian", None, []),
        ("mle", 1e-4, []),
    ],
)
def test_tempered_posterior_is_reported_with_temperature(method, weight, notes):
    recipe = recipe_with(method=method, training={"kl_weight": weight}).model_dump(mode="json")
    actual = list(fit_warnings(Provenance(recipe=recipe, rows={"train": 1000})))
    assert actual == notes


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("bhn-realnvp", "initial_log_std"),
        ("laplace", "prior_std"),
        ("dropout-alpha", "rate"),
        ("ensemble", "members"),
    ],
)
def test_posterior_without_disagreement_causes_warning_with_remedy(method, remedy):
    def get_notes(rows, noise, max_draws=None):
        return list(_agreement_warnings(Quality({}, rows, noise), METHODS[method], max_draws))

    (warning,) = get_notes(1e-5, 2e-4)
    assert "their disagreement is 0.001 % of the total uncertainty on test rows" in warning
    assert remedy in warning
    assert get_notes(1e-5, 0.1) == get_notes(0.1, 1e-5) == get_notes(0.0, 0.0, max_draws=1) == []


@pytest.mark.parametrize(("nll", "is_collapsed"), [(0.68, False), (0.7, True), (2.4, True)])
def test_posterior_no_better_than_guess_causes_warning(nll, is_collapsed):
    guess = guess_nll(torch.tensor([0, 1] * 50))
    assert guess == pytest.approx(log(2))
    facts = {"nll": nll, "uncertainty_change": {"median": 0.1, "p90": 0.2}}
    actual = list(fit_warnings(Provenance(convergence={**facts, "guess_nll": guess})))
    assert [f"{nll:.3g} against 0.693 nats per row" in item for item in actual] == [
        True
    ] * is_collapsed
    assert list(fit_warnings(Provenance(convergence=facts))) == list(fit_warnings(Provenance()))


def test_regression_guess_is_gaussian():
    y = torch.tensor([-2.0, 2.0] * 20)
    assert guess_nll(y) == pytest.approx(0.5 * log(2 * pi * 4) + 0.5)


def test_disagreement_is_share_of_uncertainty_between_draws():
    equal = np.log(np.tile([0.9, 0.1], (2, 3, 1)))
    assert disagreement(predictive_scores(predictive_sums(equal))) == pytest.approx(0.0, abs=1e-12)
    certain = np.log(np.array([[[1.0, 1e-30]] * 3, [[1e-30, 1.0]] * 3]))
    assert disagreement(predictive_scores(predictive_sums(certain))) == pytest.approx(1.0)
    means, log_variances = np.array([[[1.0], [-1.0]], np.zeros((2, 1))])
    outputs = np.stack([means, log_variances], axis=-1)
    # The variance is 2 between the two means and 1 within each draw.
    assert disagreement(mixture_scores(mixture_sums(outputs))) == pytest.approx(2 / 3)


@pytest.fixture
def fit(tmp_path, monkeypatch, capsys, fits):
    for key, folder in {"STORE": "models", "RUNS": "runs", "DATA": "."}.items():
        monkeypatch.setenv(f"DUBITO_{key}", str(tmp_path / folder))
    draw = np.random.default_rng(0)
    lines = [f"{draw.normal():.3f},{'late' if i % 4 == 0 else 'ok'}" for i in range(400)]
    (tmp_path / "flights.csv").write_text("\n".join(["hours,is", *lines]))

    def run(*options, **training):
        path = write_recipe(
            tmp_path,
            name="flights",
            data={"source": "csv:flights.csv", "target": "is"},
            training={"batch_rows": 8, **training},
            serving={"temperature": False},
        )
        code = main(["fit", str(path), "--quiet", "--device", "cpu", *options])
        return code, *capsys.readouterr()

    return run


def test_model_worse_than_constant_is_published_only_with_anyway(fit, tmp_path):
    training = {"epochs": 3, "learning_rate": 0.5, "final_learning_rate": 0.5}
    code, _, errors = fit(**training)
    assert code == 1
    assert "is not published because it is worse than always" in errors
    assert "--anyway" in errors
    store = ModelStore(tmp_path / "models")
    assert store.versions("flights") == []
    code, out, anyway_errors = fit("--anyway", **training)
    assert code == 0, anyway_errors
    assert "worse than always 'ok': log-likelihood" in anyway_errors
    (constant,) = [line for line in out.splitlines() if line.startswith("always 'ok'")]
    manifest = store.manifest("flights", "1")
    likelihood = manifest.baselines["constant"][LOG_LIKELIHOOD]
    assert constant.endswith(f" {likelihood:.4g}")
    assert f"against {likelihood:.4g} on 80 test rows" in errors
    assert set(manifest.baselines) == {"constant", "linear", "boosting"}
    assert any(message.startswith("worse than always 'ok'") for message in manifest.warnings)
