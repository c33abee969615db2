"""Baselines for tables, with warnings if the model is worse.

| name | classification | regression |
|---|---|---|
| `constant` | shares of the classes, plus one row each | a Gaussian of the targets |
| `linear` | logistic regression | ridge regression |
| `boosting` | histogram gradient boosting | histogram gradient boosting |

All use the encoded rows, and train on all of them except the test rows. `linear` and `boosting`
are scikit-learn's estimators with default settings, on a sample of the rows if they are many. The
validation rows select boosting's number of iterations, because it can diverge with many classes.
Class probabilities are at least `MIN_PROBABILITY`, renormalised. Regressions are Gaussian, with the
RMSE of validation rows or of leave-one-out residuals (`linear`) as the standard deviation.

Log-likelihoods are compared row by row on the test rows. A model is worse than the constant if the
mean difference is below 0 by more than one standard error. This refuses 16 % of equally good
models, and .1 % of models that are better by two standard errors.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Float64

from model_store.artifacts.manifest import Description
from model_store.scores.transforms import to_target
from training import log
from training.data.rows import Rows, Splits
from training.evaluation.metrics import Figure, Mean, RootMean, class_figures, values
from training.publishing.draft import Draft, GateError

if TYPE_CHECKING:
    from training.fit import Fitted

MIN_PROBABILITY = 1e-3  # of a class, for `linear` and `boosting`
MIN_STD = 1e-6  # of residuals, relative to the targets
# Multiplications of a linear fit and of ridge's decomposition, and numbers that boosting reads, in
# about ten seconds on one core.
LOGISTIC, RIDGE, TREES = 4e8, 4e9, 5e8
MAX_NUMBERS = 2e7  # in the rows of a fit
ITERATIONS, MIN_ITERATIONS, MIN_ROWS = 100, 10, 5000
CLEAR_ERRORS = 2.0  # standard errors of a clear difference
LOG_LIKELIHOOD, ACCURACY, ERROR = "test_log_likelihood", "test_accuracy", "test_rmse"
WORSE = "worse than"
TITLES = {ACCURACY: "accuracy", ERROR: "error (RMSE)", LOG_LIKELIHOOD: "log-likelihood"}

Figures = dict[str, Figure]


def baselines(splits: Splits, classes: int, only_constant: bool = False) -> dict[str, Figures]:
    """Fit the baselines, and drop any with an infinite metric.

    `classes` is 0 for regression.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # Unconverged fits and huge values are acceptable.
        by_name = {"constant": _constant(splits, classes)}
        if not only_constant:
            by_name |= _classify(splits, classes) if classes else _regress(splits)
    return {
        name: figures
        for name, figures in by_name.items()
        if all(math.isfinite(figure.value) for figure in figures.values())
    }


def _constant(splits: Splits, classes: int) -> Figures:
    rows, test = _except_test(splits), splits.test
    if not classes:
        targets = rows.y.astype(np.float64)
        return gaussian_figures(np.full(len(test), targets.mean()), targets.std(), test.y)
    shares = (np.bincount(rows.y, minlength=classes) + 1.0) / (len(rows) + classes)
    return classification_figures(np.tile(shares, (len(test), 1)), test.y)


def _classify(splits: Splits, classes: int) -> dict[str, Figures]:
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    def to_probs(
        class_index: np.ndarray, predicted_probs: np.ndarray
    ) -> Float64[np.ndarray, "N C"]:
        probs = np.full((len(predicted_probs), classes), MIN_PROBABILITY)
        # Boosting of a single class returns two columns.
        predicted_probs = predicted_probs[:, : len(class_index)]
        probs[:, class_index] = np.maximum(predicted_probs, MIN_PROBABILITY)
        return probs / probs.sum(axis=1, keepdims=True)

    rows, test = _except_test(splits), splits.test
    sample = spread(rows, int(LOGISTIC / (rows.x.shape[1] * classes)))
    linear = LogisticRegression().fit(sample.x, sample.y)
    trees = classes if classes > 2 else 1
    boosting, _ = _fit_boosting(HistGradientBoostingClassifier, splits, trees)
    return {
        name: classification_figures(to_probs(model.classes_, model.predict_proba(test.x)), test.y)
        for name, model in (("linear", linear), ("boosting", boosting))
    }


def _except_test(splits: Splits) -> Rows:
    parts = (splits.train, splits.validation, splits.reference, splits.ranking)
    x = np.concatenate([part.x for part in parts])
    return Rows(x, np.concatenate([part.y for part in parts]))


def classification_figures(probs: Float64[np.ndarray, "N C"], y: np.ndarray) -> Figures:
    figures = class_figures(probs, y)
    return {ACCURACY: figures["accuracy"], LOG_LIKELIHOOD: figures["log_likelihood"]}


def _regress(splits: Splits) -> dict[str, Figures]:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import RidgeCV

    rows, test = _except_test(splits), splits.test
    rows = replace(rows, y=rows.y.astype(np.float64))
    columns, min_error = rows.x.shape[1], MIN_STD * rows.y.std()
    sample = spread(rows, int(max(RIDGE / columns**2, math.sqrt(RIDGE / columns))))
    linear = RidgeCV(np.logspace(-3, 3, 13)).fit(sample.x, sample.y)
    boosting, half_square = _fit_boosting(HistGradientBoostingRegressor, splits, 1)
    errors = {"linear": math.sqrt(-linear.best_score_), "boosting": math.sqrt(2.0 * half_square)}
    return {
        name: gaussian_figures(model.predict(test.x), max(errors[name], min_error), test.y)
        for name, model in (("linear", linear), ("boosting", boosting))
    }


def gaussian_figures(mean: Float[np.ndarray, "N"], std: float, y: np.ndarray) -> Figures:
    """Compute the metrics of Gaussian predictions with a common standard deviation."""
    squares = np.square(mean - y.astype(np.float64))
    log_density = -0.5 * (np.log(2 * np.pi * std**2) + squares / std**2)
    return {ERROR: RootMean(squares), LOG_LIKELIHOOD: Mean(log_density)}


def _fit_boosting(estimator: type[Any], splits: Splits, trees: int) -> tuple[Any, float]:
    """Fit boosting, choosing the number of iterations by the validation loss.

    An iteration adds `trees` trees. Returns the estimator and the loss.
    """

    def fit(train: Rows, max_iterations: int, validation: Rows | None = None) -> Any:
        columns, options = train.x.shape[1], {}
        sample = spread(train, max(MIN_ROWS, int(TREES / (ITERATIONS * trees * columns))))
        affordable = max(int(TREES / (len(sample) * columns * trees)), MIN_ITERATIONS)
        iterations, stops = min(affordable, max_iterations), validation is not None
        boosting = estimator(max_iter=iterations, early_stopping=stops, random_state=0)
        if validation is not None:
            if sample.y.dtype.kind != "f":  # Boosting refuses classes that the sample lacks.
                rows = np.flatnonzero(np.isin(validation.y, sample.y))
                validation = validation.take(rows) if len(rows) else sample
            options = {"X_val": validation.x, "y_val": validation.y}
        return boosting.fit(sample.x, sample.y, **options)

    first = fit(splits.train, ITERATIONS, splits.validation)
    losses = -first.validation_score_
    return fit(_except_test(splits), max(1, int(np.argmin(losses)))), float(losses.min())


def spread(rows: Rows, max_rows: int) -> Rows:
    """Select up to `max_rows` rows, spread evenly over the classes or targets."""
    max_rows = min(max_rows, int(MAX_NUMBERS / rows.x.shape[1]))
    if len(rows) <= max_rows:
        return rows
    order = np.argsort(rows.y, kind="stable")
    return rows.take(order[np.linspace(0, len(rows) - 1, max(max_rows, 2)).astype(np.int64)])


def add_baselines(draft: Draft, result: "Fitted", only_constant: bool = False) -> Draft:
    """Fit the baselines of a table, and add their metrics and warnings to a draft.

    Models with class weights get no warnings, because their weighted class shares differ from the
    test rows'. Models with an encoder have no baselines.
    """
    data, splits, transform = result.data, result.splits, result.transform
    if not data.columns or result.encoding is not None:
        return draft
    if transform is not None:
        train, validation = (
            replace(rows, y=to_target(transform, rows.y.astype(np.float64)))
            for rows in (splits.train, splits.validation)
        )
        splits = replace(splits, train=train, validation=validation)
    if not only_constant:
        log.info("fitting baselines")
    by_name = baselines(splits, len(data.classes), only_constant)
    numbers = {name: values(figures) for name, figures in by_name.items()}
    description = draft.description.model_copy(update={"baselines": numbers})
    if result.recipe.data.class_weights is not None:
        return replace(draft, description=description)
    known = draft.description.baselines
    new = {name: figures for name, figures in by_name.items() if name not in known}
    worse = tuple(warn_if_worse(draft.figures, new, describe_constant(description)))
    for warning in worse:
        log.warning("%s", warning)
    update = {"warnings": (*description.warnings, *worse)}
    return replace(draft, description=description.model_copy(update=update))


def check_constant(name: str, draft: Draft) -> None:
    for warning in draft.description.warnings:
        if warning.startswith(f"{WORSE} {describe_constant(draft.description)}: "):
            remedy = "to publish it, set --anyway (anyway=True)"
            raise GateError(f"{name} is not published because it is {warning}; {remedy}")


def warn_if_worse(
    model_figures: Figures, by_name: dict[str, Figures], constant: str
) -> Iterator[str]:
    """Yield a warning for each metric on which a baseline beats the model.

    The log-likelihood must be better than the constant's by one standard error.
    """
    for name, figures in by_name.items():
        model, baseline = model_figures[LOG_LIKELIHOOD], figures[LOG_LIKELIHOOD]
        gain, error = lead(model, baseline)
        if gain < (1.0 if name == "constant" else -CLEAR_ERRORS) * error:
            title = constant if name == "constant" else name
            relation = WORSE if gain < -error else "no better than"
            yield (
                f"{relation} {title}: log-likelihood {model.value:.4g} against "
                f"{baseline.value:.4g} on {model.rows} test rows (difference {gain:.3g}, "
                f"standard error {error:.2g})"
            )

    for key, sign in ((ACCURACY, 1.0), (ERROR, -1.0)):
        if key in model_figures and key in by_name.get("constant", {}):
            model, baseline = model_figures[key], by_name["constant"][key]
            gain, error = lead(model, baseline)
            if sign * gain < -error:
                side = "below" if sign > 0 else "above"
                yield (
                    f"{TITLES[key]} {model.value:.4g} is {side} the {baseline.value:.4g} of "
                    f"{constant}"
                )


def lead(first: Figure, second: Figure) -> tuple[float, float]:
    """Compute the mean per-row difference between two metrics and its standard error."""
    gains = first.row_values.astype(np.float64) - second.row_values
    error = gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
    return float(gains.mean()), float(error)


def describe_constant(description: Description) -> str:
    if description.classes is None or description.priors is None:
        return "always the mean"
    return f"always {description.classes[int(np.argmax(description.priors))]!r}"


def table(description: Description) -> list[str]:
    by_title = {"this model": description.quality}
    for name in ("boosting", "linear", "constant"):
        if name in description.baselines:
            title = describe_constant(description) if name == "constant" else name
            by_title[title] = description.baselines[name]
    keys = [key for key in TITLES if all(key in values for values in by_title.values())]
    rows = {"on test rows": [TITLES[key] for key in keys]}
    rows |= {name: [f"{values[key]:.4g}" for key in keys] for name, values in by_title.items()}
    width = max(map(len, rows))
    lines = {name: "".join(f"{cell:>16}" for cell in row) for name, row in rows.items()}
    return [f"{name:{width}}{line}" for name, line in lines.items()]
