"""Evidence about a published version: how good its predictions are, and what its scores and its
flag detect.

Everything is computed as served: by the version's own graphs, in requests of `REQUEST_ROWS` rows,
    each with the draws
of a seed of its own. N rows. Scores are higher where a row is more uncertain or more unlike the
data.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import combined_surprisal
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores
from training.data import Rows
from training.evaluation.class_probabilities import class_probabilities
from training.evaluation.figures import Figure, Mean, RiskCoverage, RootMean, Share
from training.evaluation.intervals import Ends, Resamples, share_interval
from training.evaluation.metrics import (
    by_class,
    class_figures,
    detection,
    regression_figures,
    reliability,
    values,
)
from training.evaluation.mixture import TargetMeasures, pit_measures
from training.evaluation.records import (
    AttackMeasures,
    ClassMeasures,
    ErrorDetection,
    Interval,
    RegressionMeasures,
    SetMeasures,
    SpreadBin,
)
from training.scoring import served_outputs
from training.seeds import hash_key

REQUEST_ROWS = 16
COVERAGES = (0.5, 0.8, 0.9, 0.95)
FPRS = (0.01, 0.05, 0.1)
SPREAD_BINS = 5


@dataclass(frozen=True, eq=False)
class ServedPrediction:
    """What a version says of N rows.

    `scores` has every posterior score, every detector alone, the flag's statistic, and the same
    without each detector. Density detectors are given by their surprisals: by label, and some from
    both sides, as the flag sees them. `flagged` is how often the flag fires at each false-positive
    rate that the calibration can tell.
    """

    prediction: Prediction
    scores: dict[str, Float64[np.ndarray, "N"]]
    flagged: dict[str, float]

    @classmethod
    def of(cls, prediction: Prediction, calibration: Calibration) -> "ServedPrediction":
        """Score a prediction."""
        p_value = prediction.judged_p_values.p_value
        usable = [fpr for fpr in FPRS if fpr >= calibration.smallest_fpr]
        flagged = {f"{fpr:g}": float(np.mean(p_value <= fpr)) for fpr in usable}
        return cls(prediction, _scores(prediction, calibration), flagged)


def _scores(
    prediction: Prediction, calibration: Calibration
) -> dict[str, Float64[np.ndarray, "N"]]:
    detected, combined = prediction.detected, calibration.combined
    labels, draws = prediction.calibrated_scores.labels, prediction.rank_tables.num_draws
    surprisals = calibration.surprisals_of(detected, labels, draws)
    subsets = {"flag": combined}
    if len(combined) > 1:
        subsets |= {
            f"flag without {name}": tuple(n for n in combined if n != name) for name in combined
        }
    flags = {
        flag: combined_surprisal([surprisals[name] for name in subset])
        for flag, subset in subsets.items()
    }
    alone = {
        name: surprisals[name] if name in calibration.standards else score
        for name, score in detected.items()
    }
    return {**alone, **flags}


@dataclass(frozen=True)
class ServedPredictor:
    """Predicts rows as a version is served, with a number of draws; sets of rows have seeds by
    name."""

    model: Model
    draws: int
    seed: int

    def request_seed(self, name: str) -> int:
        """Return what a set's draws are seeded by."""
        return hash_key(self.seed, *name.encode())

    def __call__(
        self, name: str, x: np.ndarray, groups: Int64[np.ndarray, "N"] | None = None
    ) -> ServedPrediction:
        """Predict a named set of rows; of a version that is calibrated by group, of these groups or
        unknown ones."""
        rows = Rows(x, np.zeros(len(x), dtype=np.int64))
        parts = served_outputs(
            self.model.runtime, rows, self.draws, self.request_seed(name), REQUEST_ROWS
        )
        predictions = [self.model.prediction(outputs, density) for outputs, density in parts]
        prediction = Prediction.concatenate(predictions)
        if groups is not None:
            prediction = prediction.of_groups(groups)
        return ServedPrediction.of(prediction, self.model.calibration)


def measure_test(
    predictor: ServedPredictor, predicted: ServedPrediction, test: Rows, classes: tuple[str, ...]
) -> ClassMeasures | RegressionMeasures:
    """Return quality on test rows, with intervals: `training.evaluation.metrics` says of what; of a
    regression also what `training.evaluation.mixture` measures. Of both how often the flag fires,
    and the area under risk against coverage of each score.
    """
    scores, resamples = predicted.prediction.scores, Resamples.of(len(test), predictor.seed)
    loss = losses(scores, test.y)
    areas = {name: RiskCoverage(score, loss) for name, score in predicted.scores.items()}
    common = {"rows": len(test), "flagged": predicted.flagged, "aurc": values(areas)}
    intervals = flagged_intervals(predicted.flagged, len(test)) | intervals_of(
        areas, resamples, "aurc."
    )
    if isinstance(scores, Scores):
        figures = class_figures(scores.probabilities, test.y)
        measured: dict[str, Any] = {
            **values(figures),
            "reliability": reliability(scores.probabilities.max(axis=1), loss == 0),
            "by_class": by_class(scores.label, test.y, classes),
            "class_probabilities": class_probabilities(
                scores.probabilities, test.y, classes, resamples
            ),
            "error_detection": error_detection(predicted, loss),
            "confidence_intervals": intervals_of(figures, resamples) | intervals,
        }
        return ClassMeasures.model_validate({**common, **measured})
    measures = target_measures(predictor, test)
    found = {coverage: predicted.prediction.intervals(coverage) for coverage in COVERAGES}
    held = {coverage: ends for coverage, ends in found.items() if ends is not None}
    scores = scores.in_units
    figures = {
        **regression_figures(scores, measures.log_likelihood, held[0.95], test.y),
        "crps": Mean(measures.crps),
    }
    pinball = {f"{q:g}": Mean(loss_of_rows) for q, loss_of_rows in measures.pinball.items()}
    measured = {
        **values(figures),
        "pinball": values(pinball),
        "pit": pit_measures(measures.pit),
        "intervals": [
            _interval(coverage, ends, test.y, resamples) for coverage, ends in held.items()
        ],
        "by_spread": _by_spread(scores, held[0.95], test.y, predictor.seed),
        "confidence_intervals": intervals_of(figures, resamples)
        | intervals_of(pinball, resamples, "pinball.")
        | intervals,
    }
    return RegressionMeasures.model_validate({**common, **measured})


def target_measures(predictor: ServedPredictor, test: Rows) -> TargetMeasures:
    """Return what is measured of the targets of a regression's test rows, as they are served."""
    outputs = served_outputs(
        predictor.model.runtime, test, predictor.draws, predictor.request_seed("test"), REQUEST_ROWS
    )
    parts, first = [], 0
    for of_request, _ in outputs:
        last = first + of_request.shape[1]
        parts.append(
            TargetMeasures.of(of_request, test.y[first:last], predictor.model.manifest.transform)
        )
        first = last
    return TargetMeasures.concatenate(parts)


def intervals_of(
    figures: Mapping[str, Figure], resamples: Resamples, path: str = ""
) -> dict[str, Ends]:
    """Return the confidence intervals of figures, by name after a path."""
    return {f"{path}{name}": figure.interval(resamples) for name, figure in figures.items()}


def flagged_intervals(flagged: dict[str, float], rows: int) -> dict[str, Ends]:
    """Return the confidence intervals of how often the flag fires, of so many rows."""
    return {
        f"flagged.{fpr}": share_interval(round(rate * rows), rows) for fpr, rate in flagged.items()
    }


def losses(scores: AnyScores, y: np.ndarray) -> Float64[np.ndarray, "N"]:
    """Return whether each row is misclassified (1), or its squared error."""
    if isinstance(scores, Scores):
        return (scores.label != y).astype(np.float64)
    return np.square(scores.in_units.mean - y).astype(np.float64)


def error_detection(
    predicted: ServedPrediction, loss: Float64[np.ndarray, "N"]
) -> ErrorDetection | None:
    """Return how well each score tells misclassified rows from the others; None where there are
    none of either."""
    wrong = loss > 0
    if wrong.all() or not wrong.any():
        return None
    measured = {
        name: detection(score[wrong], score[~wrong]) for name, score in predicted.scores.items()
    }
    return ErrorDetection(
        rows=int(wrong.sum()),
        base_rate=float(wrong.mean()),
        scores=measured,
        confidence_intervals={"base_rate": share_interval(int(wrong.sum()), len(wrong))},
    )


def measure_set(test: ServedPrediction, outliers: ServedPrediction) -> SetMeasures:
    """Return how well each score tells a set's rows (positive) from the test rows, and how often
    the flag fires."""
    known, rows = (predicted.scores for predicted in (test, outliers))
    n, m = len(known["flag"]), len(rows["flag"])
    detected = {name: detection(rows[name], known[name]) for name in rows}
    return SetMeasures(
        rows=m,
        base_rate=m / (m + n),
        flagged=outliers.flagged,
        scores=detected,
        confidence_intervals=flagged_intervals(outliers.flagged, m),
    )


def measure_attack(
    test: ServedPrediction, attacked: ServedPrediction, y: np.ndarray, seed: int
) -> AttackMeasures:
    """Return what `measure_set` does of attacked rows, and their accuracy, mean scores and error
    detection."""
    scores = attacked.prediction.scores
    assert isinstance(scores, Scores)
    wrong = scores.label != y
    quiet = attacked.prediction.judged_p_values.p_value > 0.05
    of_set = measure_set(test, attacked)
    shares = {"accuracy": Share(~wrong), "hits": Share(wrong & quiet)}
    means = {name: Mean(score) for name, score in attacked.prediction.detected.items()}
    resamples = Resamples.of(len(y), seed)
    intervals = intervals_of(shares, resamples) | intervals_of(means, resamples, "mean_scores.")
    return AttackMeasures(
        rows=of_set.rows,
        base_rate=of_set.base_rate,
        flagged=of_set.flagged,
        scores=of_set.scores,
        **values(shares),
        mean_scores=values(means),
        error_detection=error_detection(attacked, wrong.astype(np.float64)),
        confidence_intervals={**of_set.confidence_intervals, **intervals},
    )


def mean_scores(predicted: ServedPrediction) -> dict[str, float]:
    """Return each detector's mean score."""
    return {name: float(score.mean()) for name, score in predicted.prediction.detected.items()}


def measure_sets(
    predictor: ServedPredictor,
    test: ServedPrediction,
    sets: dict[str, Float32[np.ndarray, "N I"]],
    done: Callable[[str], None],
) -> tuple[dict[str, SetMeasures], dict[str, ServedPrediction]]:
    """Return what `measure_set` says of each set, and what the version says of it."""
    predicted = {}
    for name, rows in sets.items():
        predicted[name] = predictor(name, rows)
        done(name)
    return {name: measure_set(test, rows) for name, rows in predicted.items()}, predicted


def _interval(
    coverage: float, ends: Float64[np.ndarray, "N 2"], y: np.ndarray, resamples: Resamples
) -> Interval:
    inside, width = Share(_holds(ends, y)), Mean(ends[:, 1] - ends[:, 0])
    is_finite = bool(np.isfinite(width.values).all())
    figures: dict[str, Figure] = {"covered": inside, **({"width": width} if is_finite else {})}
    return Interval(
        nominal=coverage,
        covered=inside.value,
        width=width.value if is_finite else None,
        confidence_intervals=intervals_of(figures, resamples),
    )


def _by_spread(
    scores: MixtureScores, ends: Float64[np.ndarray, "N 2"], y: np.ndarray, seed: int
) -> list[SpreadBin]:
    """Return coverage and error of as many rows each, from those predicted to be the surest to the
    least sure."""
    measured = []
    for rows in np.array_split(np.argsort(scores.std, kind="stable"), min(SPREAD_BINS, len(y))):
        figures: dict[str, Figure] = {
            "std": Mean(scores.std[rows]),
            "rmse": RootMean(np.square(scores.mean - y)[rows]),
            "covered": Share(_holds(ends, y)[rows]),
        }
        intervals = intervals_of(figures, Resamples.of(len(rows), seed))
        measured.append(
            SpreadBin(rows=len(rows), **values(figures), confidence_intervals=intervals)
        )
    return measured


def _holds(ends: Float64[np.ndarray, "N 2"], y: np.ndarray) -> Bool[np.ndarray, "N"]:
    return (ends[:, 0] <= y) & (y <= ends[:, 1])
