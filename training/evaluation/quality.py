"""Evidence about a published version: how good its predictions are, and what its scores and its flag detect.

Everything is computed as served: by the version's own graphs, in requests of `REQUEST_ROWS` rows, each with the draws
of a seed of its own. N rows. Scores are higher where a row is more uncertain or more unlike the data.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64

from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import combined_surprisal
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores
from training.data import Rows
from training.evaluation.metrics import area_under_risk_coverage, detection, quality, regression_quality, reliability
from training.evaluation.records import (
    AttackMeasures,
    ClassMeasures,
    ErrorDetection,
    Interval,
    RegressionMeasures,
    SetMeasures,
)
from training.scoring import scores_and_likelihoods, served_outputs
from training.seeds import hash_key

REQUEST_ROWS = 16
COVERAGES = (0.5, 0.8, 0.9, 0.95)
FPRS = (0.01, 0.05, 0.1)


@dataclass(frozen=True, eq=False)
class ServedPrediction:
    """What a version says of N rows.

    `scores` has every posterior score, every detector alone, the flag's statistic, and the same without each
    detector. Density detectors are given by their surprisals: by label, and some from both sides, as the flag sees
    them. `flagged` is how often the flag fires at each false-positive rate that the calibration can tell.
    """

    prediction: Prediction
    scores: dict[str, Float64[np.ndarray, "N"]]
    flagged: dict[str, float]

    @classmethod
    def of(cls, prediction: Prediction, calibration: Calibration) -> "ServedPrediction":
        """Score a prediction."""
        p_value = prediction.p_values.p_value
        usable = [fpr for fpr in FPRS if fpr >= calibration.smallest_fpr]
        flagged = {f"{fpr:g}": float(np.mean(p_value <= fpr)) for fpr in usable}
        return cls(prediction, _scores(prediction, calibration), flagged)


def _scores(prediction: Prediction, calibration: Calibration) -> dict[str, Float64[np.ndarray, "N"]]:
    detected, combined = prediction.detected, calibration.combined
    labels, draws = prediction.calibrated_scores.labels, prediction.rank_tables.num_draws
    surprisals = calibration.surprisals_of(detected, labels, draws)
    subsets = {"flag": combined}
    if len(combined) > 1:
        subsets |= {f"flag without {name}": tuple(n for n in combined if n != name) for name in combined}
    flags = {flag: combined_surprisal([surprisals[name] for name in subset]) for flag, subset in subsets.items()}
    alone = {name: surprisals[name] if name in calibration.standards else score for name, score in detected.items()}
    return {**alone, **flags}


@dataclass(frozen=True)
class ServedPredictor:
    """Predicts rows as a version is served, with a number of draws; sets of rows have seeds by name."""

    model: Model
    draws: int
    seed: int

    def request_seed(self, name: str) -> int:
        """Return what a set's draws are seeded by."""
        return hash_key(self.seed, *name.encode())

    def __call__(self, name: str, x: np.ndarray) -> ServedPrediction:
        """Predict a named set of rows."""
        rows = Rows(x, np.zeros(len(x), dtype=np.int64))
        parts = served_outputs(self.model.runtime, rows, self.draws, self.request_seed(name), REQUEST_ROWS)
        predictions = [self.model.prediction(outputs, density) for outputs, density in parts]
        return ServedPrediction.of(Prediction.concatenate(predictions), self.model.calibration)


def measure_test(
    predictor: ServedPredictor, predicted: ServedPrediction, test: Rows
) -> ClassMeasures | RegressionMeasures:
    """Return quality on test rows: of classes accuracy, log-likelihood (nats a row), Brier score, calibration error
    and error detection; of a regression error, log-likelihood and coverage of intervals; of both how often the flag
    fires, and the area under risk against coverage of each score.
    """
    scores = predicted.prediction.scores
    loss = losses(scores, test.y)
    areas = {name: area_under_risk_coverage(score, loss) for name, score in predicted.scores.items()}
    common = {"rows": len(test), "flagged": predicted.flagged, "aurc": areas}
    if isinstance(scores, Scores):
        table = reliability(scores.probabilities.max(axis=1), loss == 0)
        errors = error_detection(predicted, loss)
        measured = {**quality(scores, test.y), "reliability": table, "error_detection": errors}
        return ClassMeasures.model_validate({**common, **measured})
    seed = predictor.request_seed("test")
    _, _, density = scores_and_likelihoods(predictor.model.runtime, test, predictor.draws, seed, REQUEST_ROWS)
    calibrated, tables = predicted.prediction.calibrated_scores, predicted.prediction.rank_tables
    assert isinstance(calibrated, MixtureScores)
    intervals = {coverage: tables.intervals(calibrated.mean, calibrated.std, coverage) for coverage in COVERAGES}
    held = [_interval(coverage, ends, test.y) for coverage, ends in intervals.items()]
    of_regression = regression_quality(scores, density, intervals[0.95], test.y)
    return RegressionMeasures.model_validate({**common, **of_regression, "intervals": held})


def losses(scores: AnyScores, y: np.ndarray) -> Float64[np.ndarray, "N"]:
    """Return whether each row is misclassified (1), or its squared error."""
    if isinstance(scores, Scores):
        return (scores.label != y).astype(np.float64)
    return np.square(scores.mean - y).astype(np.float64)


def error_detection(predicted: ServedPrediction, loss: Float64[np.ndarray, "N"]) -> ErrorDetection | None:
    """Return how well each score tells misclassified rows from the others; None where there are none of either."""
    wrong = loss > 0
    if wrong.all() or not wrong.any():
        return None
    measured = {name: detection(score[wrong], score[~wrong]) for name, score in predicted.scores.items()}
    return ErrorDetection(rows=int(wrong.sum()), base_rate=float(wrong.mean()), scores=measured)


def measure_set(test: ServedPrediction, outliers: ServedPrediction) -> SetMeasures:
    """Return how well each score tells a set's rows (positive) from the test rows, and how often the flag fires."""
    known, rows = (predicted.scores for predicted in (test, outliers))
    n, m = len(known["flag"]), len(rows["flag"])
    detected = {name: detection(rows[name], known[name]) for name in rows}
    return SetMeasures(rows=m, base_rate=m / (m + n), flagged=outliers.flagged, scores=detected)


def measure_attack(test: ServedPrediction, attacked: ServedPrediction, y: np.ndarray) -> AttackMeasures:
    """Return what `measure_set` does of attacked rows, and their accuracy, mean scores and error detection."""
    scores = attacked.prediction.scores
    assert isinstance(scores, Scores)
    wrong = scores.label != y
    quiet = attacked.prediction.p_values.p_value > 0.05
    of_set = measure_set(test, attacked)
    return AttackMeasures(
        rows=of_set.rows,
        base_rate=of_set.base_rate,
        flagged=of_set.flagged,
        scores=of_set.scores,
        accuracy=float(1.0 - wrong.mean()),
        hits=float(np.mean(wrong & quiet)),
        mean_scores=mean_scores(attacked),
        error_detection=error_detection(attacked, wrong.astype(np.float64)),
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


def _interval(coverage: float, ends: Float64[np.ndarray, "N 2"], y: np.ndarray) -> Interval:
    inside = (ends[:, 0] <= y) & (y <= ends[:, 1])
    width = float(np.mean(ends[:, 1] - ends[:, 0]))
    return Interval(nominal=coverage, covered=float(inside.mean()), width=width if np.isfinite(width) else None)
