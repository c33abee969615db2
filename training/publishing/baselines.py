"""Baselines of a table: what plain models reach on its test rows, and what is said of a model
that is worse.

| name | classification | regression |
|---|---|---|
| `constant` | shares of the classes, one row more of each | a Gaussian of the targets |
| `linear` | logistic regression | ridge regression |
| `boosting` | histogram gradient boosting | histogram gradient boosting |

All are fitted on the training rows, encoded as the network takes them; the last two are
scikit-learn's with its defaults. They take seconds: of large data they see some of the rows, and
boosting has fewer iterations; how many it uses, validation rows say, as of ours. Of many classes it
would diverge otherwise. Their probabilities are at least `LEAST`, renormalised. Their
regressions are Gaussian, with the root mean square of the validation rows' residuals as standard
deviation.

Log-likelihoods are compared row by row. A model is worse than the constant if the mean difference
is below 0 by more than its standard error: of models that are just as good 16 % are refused, of
those that are better by two standard errors .1 %. Worse than the others takes two standard errors.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float64

from model_store.artifacts.manifest import Description
from model_store.scores.transforms import to_target
from training import log
from training.data import Rows
from training.evaluation.figures import Figure, Mean, RootMean
from training.evaluation.metrics import class_figures
from training.publishing.draft import Draft
from training.publishing.gate import GateError

if TYPE_CHECKING:
    from training.fit import Fitted

LEAST = 1e-3  # probability of a class by `linear` and `boosting`
LEAST_STD = 1e-6  # of residuals, as a part of the targets' standard deviation
# What takes about ten seconds of one core: products of a linear fit, of ridge's decomposition, and
# numbers that boosting's trees look at
LOGISTIC, RIDGE, TREES = 4e8, 4e9, 5e8
NUMBERS = 2e7  # of the rows of a fit
ITERATIONS, FEWEST_ITERATIONS, FEWEST_ROWS = 100, 10, 5000
CLEARLY = 2.0  # standard errors
LOG_LIKELIHOOD, ACCURACY, ERROR = "test_log_likelihood", "test_accuracy", "test_rmse"
TITLES = {ACCURACY: "accuracy", ERROR: "error (RMSE)", LOG_LIKELIHOOD: "log-likelihood"}

Figures = dict[str, Figure]


def baselines(train: Rows, validation: Rows, test: Rows, classes: int) -> dict[str, Figures]:
    """Return the figures of each baseline by their names in `quality`; `classes` is 0 of a
    regression.

    A baseline whose figures are not finite is left out.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # iterations that end early, huge values
        found = (
            _of_classes(train, validation, test, classes)
            if classes
            else _of_targets(train, validation, test)
        )
    return {
        name: figures
        for name, figures in found.items()
        if all(math.isfinite(figure.value) for figure in figures.values())
    }


def _of_classes(train: Rows, validation: Rows, test: Rows, classes: int) -> dict[str, Figures]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    def probs_of(known: np.ndarray, given: np.ndarray) -> Float64[np.ndarray, "N C"]:
        probs = np.full((len(given), classes), LEAST)
        probs[:, known] = np.maximum(given, LEAST)
        return probs / probs.sum(axis=1, keepdims=True)

    shares = (np.bincount(train.y, minlength=classes) + 1.0) / (len(train) + classes)
    found = {"constant": np.tile(shares, (len(test), 1))}
    rows = spread(train, int(LOGISTIC / (train.x.shape[1] * classes)))
    linear = LogisticRegression().fit(rows.x, rows.y)
    found["linear"] = probs_of(linear.classes_, linear.predict_proba(test.x))
    rows, settings = _boosted(train, classes if classes > 2 else 1)
    boosting = HistGradientBoostingClassifier(**settings).fit(rows.x, rows.y)
    known, at = boosting.classes_, np.arange(len(validation))
    held_out = [
        np.log(probs_of(known, given)[at, validation.y]).mean()
        for given in boosting.staged_predict_proba(validation.x)
    ]
    given = _stage(boosting.staged_predict_proba(test.x), int(np.argmax(held_out)))
    found["boosting"] = probs_of(known, given)
    return {name: figures_of_classes(probs, test.y) for name, probs in found.items()}


def figures_of_classes(probs: Float64[np.ndarray, "N C"], y: np.ndarray) -> Figures:
    figures = class_figures(probs, y)
    return {ACCURACY: figures["accuracy"], LOG_LIKELIHOOD: figures["log_likelihood"]}


def _of_targets(train: Rows, validation: Rows, test: Rows) -> dict[str, Figures]:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import RidgeCV

    targets, columns = train.y.astype(np.float64), train.x.shape[1]
    mean, std = targets.mean(), targets.std()

    def error_of(predicted: Float[np.ndarray, "N"]) -> float:
        error = math.sqrt(np.square(predicted - validation.y.astype(np.float64)).mean())
        return max(error, LEAST_STD * std)

    found = {"constant": figures_of_targets(np.full(len(test), mean), std, test.y)}
    rows = spread(train, int(max(RIDGE / columns**2, math.sqrt(RIDGE / columns))))
    linear = RidgeCV(np.logspace(-3, 3, 13)).fit(rows.x, rows.y.astype(np.float64))
    error = error_of(linear.predict(validation.x))
    found["linear"] = figures_of_targets(linear.predict(test.x), error, test.y)
    rows, settings = _boosted(train, 1)
    boosting = HistGradientBoostingRegressor(**settings).fit(rows.x, rows.y.astype(np.float64))
    errors = [error_of(predicted) for predicted in boosting.staged_predict(validation.x)]
    predicted = _stage(boosting.staged_predict(test.x), int(np.argmin(errors)))
    found["boosting"] = figures_of_targets(predicted, min(errors), test.y)
    return found


def _stage(stages: Iterator[np.ndarray], wanted: int) -> np.ndarray:
    return next(islice(stages, wanted, None))


def figures_of_targets(mean: Float[np.ndarray, "N"], std: float, y: np.ndarray) -> Figures:
    """Return the figures of Gaussians around `mean`, all of one standard deviation."""
    squares = np.square(mean - y.astype(np.float64))
    log_density = -0.5 * (np.log(2 * np.pi * std**2) + squares / std**2)
    return {ERROR: RootMean(squares), LOG_LIKELIHOOD: Mean(log_density)}


def _boosted(train: Rows, trees: int) -> tuple[Rows, dict[str, Any]]:
    """Return the rows that boosting is fitted on, and its settings; an iteration has that many
    trees."""
    columns = train.x.shape[1]
    rows = spread(train, max(FEWEST_ROWS, int(TREES / (ITERATIONS * trees * columns))))
    iterations = int(TREES / (len(rows) * columns * trees))
    iterations = min(max(iterations, FEWEST_ITERATIONS), ITERATIONS)
    return rows, {"max_iter": iterations, "early_stopping": False, "random_state": 0}


def spread(rows: Rows, most: int) -> Rows:
    """Return at most that many rows, evenly spread over the classes or targets."""
    most = min(most, int(NUMBERS / rows.x.shape[1]))
    if len(rows) <= most:
        return rows
    order = np.argsort(rows.y, kind="stable")
    return rows.take(order[np.linspace(0, len(rows) - 1, max(most, 2)).astype(np.int64)])


def with_baselines(draft: Draft, fitted: "Fitted") -> Draft:
    """Return a draft with the baselines of a table and the sentences that follow.

    None follow where a recipe weighs classes, since its model is for other shares of the classes
    than those of the test rows. What an encoder takes has no baselines.
    """
    data, splits, transform = fitted.data, fitted.splits, fitted.transform
    if not data.columns or fitted.encoding is not None:
        return draft
    train, validation = splits.train, splits.validation
    if transform is not None:
        train, validation = (
            replace(rows, y=to_target(transform, rows.y.astype(np.float64)))
            for rows in (train, validation)
        )
    log.info("fitting baselines")
    found = baselines(train, validation, splits.test, len(data.classes))
    of_each = {
        name: {key: figure.value for key, figure in figures.items()}
        for name, figures in found.items()
    }
    description = draft.description.model_copy(update={"baselines": of_each})
    if fitted.recipe.data.class_weights is not None:
        return replace(draft, description=description)
    said = tuple(sentences(draft.figures, found, constant_of(description)))
    for sentence in said:
        log.warning("%s", sentence)
    update = {"warnings": (*description.warnings, *said)}
    description = description.model_copy(update=update)
    return replace(draft, description=description, baselines=found)


def check_constant(name: str, draft: Draft) -> None:
    """Refuse a model that is worse than the constant."""
    if "constant" not in draft.baselines:
        return
    mine, its = draft.figures[LOG_LIKELIHOOD], draft.baselines["constant"][LOG_LIKELIHOOD]
    gain, error = lead(mine, its)
    if gain < -error:
        raise GateError(
            f"{name} is not published, since it is worse than a guess: log-likelihood "
            f"{mine.value:.4g} nats a row, where {constant_of(draft.description)} has "
            f"{its.value:.4g} on the same {mine.rows} test rows (difference {gain:.3g}, standard "
            f"error {error:.2g}); --anyway (anyway=True) publishes it without another fit"
        )


def sentences(mine: Figures, found: dict[str, Figures], constant: str) -> list[str]:
    said = []
    for name, figures in found.items():
        its, own = figures[LOG_LIKELIHOOD], mine[LOG_LIKELIHOOD]
        gain, error = lead(own, its)
        if gain < -(1.0 if name == "constant" else CLEARLY) * error:
            called = constant if name == "constant" else name
            said.append(
                f"worse than {called}: log-likelihood {own.value:.4g} against {its.value:.4g} on "
                f"{own.rows} test rows (difference {gain:.3g}, standard error {error:.2g})"
            )
    if "constant" not in found:
        return said
    for key, sign in ((ACCURACY, 1.0), (ERROR, -1.0)):
        if key in mine and key in found["constant"]:
            own, its = mine[key], found["constant"][key]
            gain, error = lead(own, its)
            if sign * gain < -error:
                side = "below" if sign > 0 else "above"
                title = f"{TITLES[key]} {own.value:.4g} is {side}"
                said.append(f"{title} the {its.value:.4g} of {constant}")
    return said


def lead(mine: Figure, its: Figure) -> tuple[float, float]:
    """Return the mean difference of two figures' rows, and its standard error."""
    gains = mine.of_rows.astype(np.float64) - its.of_rows
    error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return float(gains.mean()), float(error)


def constant_of(description: Description) -> str:
    if description.classes is None or description.priors is None:
        return "always the mean"
    return f"always {description.classes[int(np.argmax(description.priors))]!r}"


def lines(description: Description) -> list[str]:
    """Return a line for each figure of the baselines, with the model's own."""
    found = description.baselines
    names = {"boosting": "boosting", "linear": "linear", "constant": constant_of(description)}
    said = []
    for key, title in TITLES.items():
        values = {"this model": description.quality.get(key)}
        values |= {shown: found[name].get(key) for name, shown in names.items() if name in found}
        parts = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
        if len(parts) > 1:
            said.append(f"{title}: {', '.join(parts)}")
    return said
