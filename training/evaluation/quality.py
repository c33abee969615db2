"""Measurements of a version's predictions, scores and flag.

Predictions are computed as in the service, in requests of `REQUEST_ROWS` rows with one seed each.
Scores are higher for more uncertain rows and for rows more unlike the data. N is the number of
rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64
from sklearn.metrics import confusion_matrix

from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores
from training import log
from training.calibration.calibrate import match_groups
from training.data.rows import Dataset, Rows
from training.evaluation.metrics import (
    Ends,
    Figure,
    Mean,
    Record,
    Resamples,
    RiskCoverage,
    RootMean,
    Share,
    TargetMeasures,
    class_figures,
    detection,
    intervals,
    is_within,
    make_record,
    pit_measures,
    regression_figures,
    reliability,
    share_interval,
    values,
)
from training.evaluation.outliers import noise_rows
from training.scoring import rows_per_draw_set, served_prediction
from training.seeds import ServedRows, hash_key

REQUEST_ROWS = 16
COVERAGES = (0.5, 0.8, 0.9, 0.95)
FPRS = (0.01, 0.05, 0.1)
SPREAD_BINS = 5
PART_COVERAGE, PART_FPR = 0.95, 0.05
NOISE_ROWS = 1000
RELIABLE_PROBABILITY = 0.9  # as the web page rates answers
MIN_UNCERTAINTY = 1e-300  # avoids a division by 0

LARGEST = np.finfo(np.float64).max
Values = Float64[np.ndarray, "N"]
Bounds = Float64[np.ndarray, "N 2"]


@dataclass(frozen=True, eq=False)
class ServedPrediction:
    """A version's predictions for N rows, and for regression the measures of their targets.

    `scores` contains the posterior scores, the detectors (densities as surprisals) and the flag's
    statistic. `flagged` contains the share of flagged rows by false-positive rate. Rows with
    non-finite results get the largest score and count as flagged.
    """

    prediction: Prediction
    scores: dict[str, Values]
    flagged: dict[str, float]
    targets: TargetMeasures | None = None


@dataclass(frozen=True)
class ServedPredictor:
    """A predictor that behaves like the service, with a seed for each named set."""

    model: Model
    draws: int
    seed: int

    def request_seed(self, name: str) -> int:
        return hash_key(self.seed, *name.encode())

    def __call__(
        self, name: str, rows: Rows | np.ndarray, group_names: tuple[str, ...] = ()
    ) -> ServedPrediction:
        """Predict rows, and measure a regression's targets if they have any."""
        measure = TargetMeasures.compute if isinstance(rows, Rows) else None
        if not isinstance(rows, Rows):
            rows = Rows(rows, np.zeros(len(rows), dtype=np.int64))
        seed = self.request_seed(name)
        prediction, targets = served_prediction(
            self.model, rows, self.draws, seed, REQUEST_ROWS, measure
        )
        prediction = _by_group(self.model, prediction, rows, group_names)
        is_refused = ~np.isfinite(prediction.scores.by_name()[prediction.scores.overall])
        if is_refused.any():
            message = (
                "%s: %s of %s rows have results that are not finite; the service refuses them, and "
                "they count as detected"
            )
            log.warning(message, name, is_refused.sum(), len(rows))
        calibration = self.model.calibration
        p_value = np.where(is_refused, 0.0, prediction.judged_p_values.p_value)
        usable = [fpr for fpr in FPRS if fpr >= calibration.smallest_fpr]
        flagged = {f"{fpr:g}": float(np.mean(p_value <= fpr)) for fpr in usable}
        densities = {name: prediction.surprisals[name] for name in calibration.standards}
        scores = {**prediction.detected, **densities, "flag": prediction.statistic}
        scores = {name: np.where(is_refused, LARGEST, score) for name, score in scores.items()}
        return ServedPrediction(prediction, scores, flagged, targets)


def _by_group(
    model: Model, prediction: Prediction, rows: Rows, group_names: tuple[str, ...]
) -> Prediction:
    groups = match_groups(model.calibration, rows, group_names)
    return prediction if groups is None else prediction.with_groups(groups)


def main_figures(predicted: ServedPrediction, y: np.ndarray) -> dict[str, Figure]:
    prediction = predicted.prediction
    if isinstance(prediction.scores, Scores):
        return class_figures(prediction.scores.probabilities, y)
    assert predicted.targets is not None
    figures = regression_figures(prediction, predicted.targets.log_likelihood, y)
    return figures | {"crps": Mean(predicted.targets.crps)}


def measure_test(
    predicted: ServedPrediction, test: Rows, classes: tuple[str, ...], seed: int
) -> Record:
    scores, resamples = predicted.prediction.scores, Resamples.draw(len(test), seed)
    loss = losses(scores, test.y)
    areas = {name: RiskCoverage(score, loss) for name, score in predicted.scores.items()}
    facts = {"rows": len(test), "flagged": predicted.flagged, "aurc": values(areas)}
    if isinstance(scores, Scores):
        confusion = confusion_matrix(test.y, scores.label, labels=range(len(classes)))
        facts |= {
            "reliability": reliability(scores.probabilities.max(axis=1), loss == 0),
            "classes": list(classes),
            "confusion": confusion.tolist(),
            "error_detection": error_detection(predicted, loss),
        }
    else:
        assert predicted.targets is not None
        ends = {nominal: predicted.prediction.intervals(nominal) for nominal in COVERAGES}
        bounds = {nominal: pairs for nominal, pairs in ends.items() if pairs is not None}
        facts |= {
            "pit": pit_measures(predicted.targets.pit),
            "intervals": [_interval(*item, test.y, resamples) for item in bounds.items()],
            "by_spread": _by_spread(scores.in_units, bounds[0.95], test.y, seed),
        }
    record = make_record(main_figures(predicted, test.y), resamples, **facts)
    record["confidence_intervals"] |= intervals(areas, resamples, "aurc.")
    record["confidence_intervals"] |= _flag_intervals(predicted, len(test))
    return record


def losses(scores: AnyScores, y: np.ndarray) -> Values:
    if isinstance(scores, Scores):
        return (scores.label != y).astype(np.float64)
    return np.square(scores.in_units.mean - y).astype(np.float64)


def error_detection(predicted: ServedPrediction, loss: Values) -> Record | None:
    """Measure how well each score detects errors.

    Returns None if the predictions are all right or all wrong.
    """
    is_wrong = loss > 0
    if is_wrong.all() or not is_wrong.any():
        return None
    wrong = Share(is_wrong)
    return {
        "rows": int(is_wrong.sum()),
        "base_rate": wrong.value,
        "scores": {
            name: detection(score[is_wrong], score[~is_wrong])
            for name, score in predicted.scores.items()
        },
        "confidence_intervals": {"base_rate": wrong.interval()},
    }


def measure_set(test: ServedPrediction, outliers: ServedPrediction) -> Record:
    n, m = len(test.scores["flag"]), len(outliers.scores["flag"])
    return {
        "rows": m,
        "base_rate": m / (m + n),
        "flagged": outliers.flagged,
        "scores": {
            name: detection(score, test.scores[name]) for name, score in outliers.scores.items()
        },
        "confidence_intervals": _flag_intervals(outliers, m),
    }


def measure_shift(ranking: ServedPrediction, test: ServedPrediction, y: np.ndarray) -> Record:
    """Compare results on later test rows or new groups with those on ranking rows."""
    record, covered = measure_set(ranking, test), Share(_is_covered(test.prediction, y))
    record["covered"] = covered.value
    record["confidence_intervals"]["covered"] = covered.interval()
    return record


def measure_parts(
    predicted: ServedPrediction,
    test: Rows,
    classes: tuple[str, ...],
    groups: tuple[str, ...],
    seed: int,
) -> list[Record]:
    """Compute metrics for the rows of each true class, predicted label and group.

    Coverage and flag rates within a part can differ from the nominal rates, unless the version is
    calibrated by category. `classes` and `groups` are names.
    """
    prediction = predicted.prediction
    loss, is_covered = losses(prediction.scores, test.y), _is_covered(prediction, test.y)
    is_flagged = prediction.judged_p_values.p_value <= PART_FPR
    parts = []
    for by, name, rows in _parts(prediction, test, classes, groups):
        figures: dict[str, Figure] = {}
        if classes:
            figures["accuracy"] = Share(loss[rows] == 0)
        else:
            figures["rmse"] = RootMean(loss[rows])
        figures["covered"] = Share(is_covered[rows])
        if f"{PART_FPR:g}" in predicted.flagged:
            figures["flagged"] = Share(is_flagged[rows])
        resamples, facts = Resamples.draw(len(rows), seed), {"by": by, "name": name}
        # The flag's rate is None if there are too few calibration rows.
        parts.append(make_record(figures, resamples, **facts, rows=len(rows), flagged=None))
    return parts


def _parts(
    prediction: Prediction, test: Rows, classes: tuple[str, ...], groups: tuple[str, ...]
) -> Iterator[tuple[str, str, Int64[np.ndarray, "n"]]]:
    numbers_by_kind: dict[str, tuple[np.ndarray, tuple[str, ...]]] = {}
    if isinstance(prediction.scores, Scores):
        labels = prediction.scores.label
        numbers_by_kind |= {"class": (test.y, classes), "label": (labels, classes)}
    if test.groups is not None:
        numbers_by_kind["group"] = (test.groups, groups)
    for by, (numbers, names) in numbers_by_kind.items():
        for number in np.unique(numbers).tolist():
            yield by, names[number], np.flatnonzero(numbers == number)


def _is_covered(prediction: Prediction, y: np.ndarray) -> Bool[np.ndarray, "N"]:
    sets = prediction.prediction_sets(PART_COVERAGE)
    if sets is not None:
        return sets[np.arange(len(y)), y]
    ends = prediction.intervals(PART_COVERAGE)
    assert ends is not None
    return is_within(ends, y)


def _interval(coverage: float, ends: Bounds, y: np.ndarray, resamples: Resamples) -> Record:
    covered, width = Share(is_within(ends, y)), Mean(ends[:, 1] - ends[:, 0])
    is_finite = bool(np.isfinite(width.row_values).all())
    figures: dict[str, Figure] = {"covered": covered} | ({"width": width} if is_finite else {})
    return make_record(figures, resamples, nominal=coverage, width=None)


def _by_spread(scores: MixtureScores, bounds: Bounds, y: np.ndarray, seed: int) -> list[Record]:
    bins = []
    for rows in np.array_split(np.argsort(scores.std, kind="stable"), min(SPREAD_BINS, len(y))):
        figures: dict[str, Figure] = {
            "std": Mean(scores.std[rows]),
            "rmse": RootMean(np.square(scores.mean - y)[rows]),
            "covered": Share(is_within(bounds, y)[rows]),
        }
        bins.append(make_record(figures, Resamples.draw(len(rows), seed), rows=len(rows)))
    return bins


def _flag_intervals(predicted: ServedPrediction, rows: int) -> dict[str, Ends]:
    flagged = {fpr: round(rate * rows) for fpr, rate in predicted.flagged.items()}
    return {f"flagged.{fpr}": share_interval(n, rows) for fpr, n in flagged.items()}


@dataclass(frozen=True, eq=False)
class Quality:
    figures: dict[str, Figure]
    disagreement: float  # between draws, on test rows
    disagreement_on_noise: float


def disagreement(scores: AnyScores) -> float:
    """Compute mean BALD / mean entropy, or mean epistemic variance / mean variance."""
    if isinstance(scores, Scores):
        part, total = scores.bald, scores.entropy
    else:
        part, total = np.square(scores.epistemic_std), np.square(scores.std)
    return float(part.mean() / max(total.mean(), MIN_UNCERTAINTY))


def measure(model: Model, rows: Rows, data: Dataset, seed: int) -> Quality:
    """Measure predictions on test rows, and the flag rate on test and noise rows.

    Rows are scored as served, in requests of `REQUEST_ROWS` rows (or more, if more must share a
    draw set) with the default draws. The flag's rates are at fpr .05.
    """
    draws = int(model.calibration.draw_counts[-1])
    share = max(REQUEST_ROWS, rows_per_draw_set(model.runtime, len(rows), draws))
    test_seed, noise_seed = hash_key(seed, ServedRows.TEST), hash_key(seed, ServedRows.NOISE)
    test, likelihoods = served_prediction(model, rows, draws, test_seed, share)
    test = _by_group(model, test, rows, data.group_names)
    spec, count = model.manifest.input, min(len(rows), NOISE_ROWS)
    x = noise_rows(spec, rows.x, count, seed, ServedRows.NOISE_VALUES)
    noise, _ = served_prediction(model, Rows(x, rows.y), draws, noise_seed, share, None)
    if isinstance(test.scores, Scores):
        probs = _reorder(test.scores.probabilities, model.manifest.classes or (), data.classes)
        figures = class_figures(probs, rows.y)
        is_reliable = _find_reliable(test)
        if is_reliable.any():
            figures["reliable_accuracy"] = Share((probs.argmax(axis=1) == rows.y)[is_reliable])
    else:
        figures = regression_figures(test, likelihoods, rows.y)
    figures = {f"test_{key}": figure for key, figure in figures.items()}
    figures["flag_rate_at_05"] = Share(test.judged_p_values.p_value <= 0.05)
    figures["uniform_noise_flagged_at_05"] = Share(noise.judged_p_values.p_value <= 0.05)
    return Quality(figures, disagreement(test.scores), disagreement(noise.scores))


def _find_reliable(test: Prediction) -> Bool[np.ndarray, "N"]:
    """Mark unflagged rows with a probable label and a single class in their 95 % set."""
    sets = test.prediction_sets(0.95)
    assert sets is not None
    assert isinstance(test.scores, Scores)
    is_probable = test.scores.probabilities.max(axis=1) > RELIABLE_PROBABILITY
    is_flagged = test.judged_p_values.p_value <= 0.05
    return is_probable & ~is_flagged & (sets.sum(axis=1) == 1)


def _reorder(
    probs: Float64[np.ndarray, "N C"], names: tuple[str, ...], classes: tuple[str, ...]
) -> Float64[np.ndarray, "N D"]:
    """Reorder class probabilities to match `classes`, with extra classes at the end.

    Classes that are not in `names` get probability 0.
    """
    if classes == names:
        return probs
    order = [*classes, *(name for name in names if name not in classes)]
    padded = np.column_stack([probs, np.zeros(len(probs))])  # the last column is for other classes
    return padded[:, [names.index(c) if c in names else -1 for c in order]]
