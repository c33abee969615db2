"""Measurements of a published version's predictions, scores and flag.

Predictions are computed as in the service, in requests of `REQUEST_ROWS` rows with one seed each.
Scores are higher for more uncertain rows and for rows more unlike the data. N is the number of
rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.scores.records import concatenate
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores
from training import log
from training.data import Rows
from training.evaluation.detection import by_class, detection
from training.evaluation.figures import (
    Ends,
    Figure,
    Mean,
    Record,
    Resamples,
    RiskCoverage,
    RootMean,
    Share,
    intervals,
    make_record,
    share_interval,
    values,
)
from training.evaluation.metrics import (
    TargetMeasures,
    class_figures,
    is_within,
    pit_measures,
    regression_figures,
    reliability,
)
from training.scoring import served_outputs
from training.seeds import hash_key

REQUEST_ROWS = 16
COVERAGES = (0.5, 0.8, 0.9, 0.95)
FPRS = (0.01, 0.05, 0.1)
SPREAD_BINS = 5
PART_COVERAGE, PART_FPR = 0.95, 0.05
MAX_GROUPS = 100  # the largest groups

LARGEST = np.finfo(np.float64).max
Values = Float64[np.ndarray, "N"]
Bounds = Float64[np.ndarray, "N 2"]


@dataclass(frozen=True, eq=False)
class ServedPrediction:
    """A version's predictions for N rows.

    `scores` contains the posterior scores, the detectors (densities as surprisals) and the flag's
    statistic. `flagged` contains the share of flagged rows by false-positive rate. Rows with
    non-finite results get the largest score and count as flagged.
    """

    prediction: Prediction
    scores: dict[str, Values]
    flagged: dict[str, float]


@dataclass(frozen=True)
class ServedPredictor:
    """A predictor that behaves like the service, with a seed for each named set."""

    model: Model
    draws: int
    seed: int

    def request_seed(self, name: str) -> int:
        return hash_key(self.seed, *name.encode())

    def outputs(self, name: str, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return served_outputs(
            self.model.runtime, rows, self.draws, self.request_seed(name), REQUEST_ROWS
        )

    def __call__(
        self, name: str, x: np.ndarray, groups: Int64[np.ndarray, "N"] | None = None
    ) -> ServedPrediction:
        parts = self.outputs(name, Rows(x, np.zeros(len(x), dtype=np.int64)))
        prediction = Prediction.concatenate([self.model.prediction(*part) for part in parts])
        if groups is not None:
            prediction = prediction.with_groups(groups)
        is_refused = ~np.isfinite(prediction.scores.by_name()[prediction.scores.overall])
        if is_refused.any():
            log.warning(
                "%s: %s of %s rows have results that are not finite; the service refuses them, and "
                "they count as detected",
                name,
                is_refused.sum(),
                len(x),
            )
        calibration = self.model.calibration
        p_value = np.where(is_refused, 0.0, prediction.judged_p_values.p_value)
        usable = [fpr for fpr in FPRS if fpr >= calibration.smallest_fpr]
        flagged = {f"{fpr:g}": float(np.mean(p_value <= fpr)) for fpr in usable}
        densities = {name: prediction.surprisals[name] for name in calibration.standards}
        scores = {**prediction.detected, **densities, "flag": prediction.statistic}
        scores = {name: np.where(is_refused, LARGEST, score) for name, score in scores.items()}
        return ServedPrediction(prediction, scores, flagged)


def measure_test(
    predictor: ServedPredictor, predicted: ServedPrediction, test: Rows, classes: tuple[str, ...]
) -> Record:
    scores, resamples = predicted.prediction.scores, Resamples.draw(len(test), predictor.seed)
    loss = losses(scores, test.y)
    areas = {name: RiskCoverage(score, loss) for name, score in predicted.scores.items()}
    facts = {"rows": len(test), "flagged": predicted.flagged, "aurc": values(areas)}
    if isinstance(scores, Scores):
        probs = scores.probabilities
        figures = class_figures(probs, test.y)
        facts |= {
            "reliability": reliability(probs.max(axis=1), loss == 0),
            "by_class": by_class(scores.label, test.y, classes),
            "error_detection": error_detection(predicted, loss),
        }
    else:
        measures, scores = target_measures(predictor, test), scores.in_units
        bounds = {
            nominal: interval
            for nominal in COVERAGES
            if (interval := predicted.prediction.intervals(nominal)) is not None
        }
        figures = regression_figures(scores, measures.log_likelihood, bounds[0.95], test.y)
        figures["crps"] = Mean(measures.crps)
        facts |= {
            "pit": pit_measures(measures.pit),
            "intervals": [_interval(*item, test.y, resamples) for item in bounds.items()],
            "by_spread": _by_spread(scores, bounds[0.95], test.y, predictor.seed),
        }
    record = make_record(figures, resamples, **facts)
    record["confidence_intervals"] |= intervals(areas, resamples, "aurc.")
    record["confidence_intervals"] |= _flag_intervals(predicted, len(test))
    return record


def target_measures(predictor: ServedPredictor, test: Rows) -> TargetMeasures:
    transform, parts, first = predictor.model.manifest.transform, [], 0
    for outputs, _ in predictor.outputs("test", test):
        last = first + outputs.shape[1]
        parts.append(TargetMeasures.compute(outputs, test.y[first:last], transform))
        first = last
    return concatenate(parts)


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
    if isinstance(prediction.scores, Scores):
        for by, numbers in (("class", test.y), ("label", prediction.scores.label)):
            for number, name in enumerate(classes):
                rows = np.flatnonzero(numbers == number)
                if len(rows):
                    yield by, name, rows
    if test.groups is not None:
        present, counts = np.unique(test.groups, return_counts=True)
        largest = present[np.argsort(-counts, kind="stable")[:MAX_GROUPS]]
        for number in sorted(largest.tolist()):
            yield "group", groups[number], np.flatnonzero(test.groups == number)


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
    return {
        f"flagged.{fpr}": share_interval(round(rate * rows), rows)
        for fpr, rate in predicted.flagged.items()
    }
