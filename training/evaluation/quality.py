"""Evidence about a published version: how good its predictions are, and what its scores and its flag detect.

Everything is computed as served: by the version's own graphs, in requests of `REQUEST_ROWS` rows, each with the draws
of a seed of its own. N rows. Scores are higher where a row is more uncertain or more unlike the data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64

from model_store.conformal.calibration import Calibration
from model_store.conformal.detectors import combined_surprisal
from model_store.inference.model import Model
from model_store.inference.prediction import Prediction
from model_store.scores.classification import Scores
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import labels_of
from training.data import Rows
from training.evaluation.metrics import area_under_risk_coverage, detection, quality, regression_quality, reliability
from training.scoring import scores_and_likelihoods, served_outputs
from training.seeds import hash_key

REQUEST_ROWS = 16
COVERAGES = (0.5, 0.8, 0.9, 0.95)
FPRS = (0.01, 0.05, 0.1)


@dataclass(frozen=True)
class ServedPrediction:
    """What a version says of N rows."""

    prediction: Prediction
    calibration: Calibration

    @cached_property
    def scores(self) -> dict[str, Float64[np.ndarray, "N"]]:
        """Every posterior score, every detector alone, the flag's statistic, and the same without each detector.

        Density detectors are given by their surprisals: by label, and some from both sides, as the flag sees them.
        """
        detected, combined = self.prediction.detected, self.calibration.combined
        labels, draws = labels_of(self.prediction.calibrated_scores), self.prediction.rank_tables.num_draws
        surprisals = self.calibration.surprisals_of(detected, labels, draws)
        subsets = {"flag": combined}
        if len(combined) > 1:
            subsets |= {f"flag without {name}": tuple(n for n in combined if n != name) for name in combined}
        flags = {flag: combined_surprisal([surprisals[name] for name in subset]) for flag, subset in subsets.items()}
        alone = {
            name: surprisals[name] if name in self.calibration.standards else score
            for name, score in detected.items()
        }
        return {**alone, **flags}

    @property
    def flagged(self) -> dict[str, float]:
        """How often the flag fires at each false-positive rate that the calibration can tell."""
        p_value = self.prediction.p_values.p_value
        usable = [fpr for fpr in FPRS if fpr >= self.calibration.smallest_fpr]
        return {f"{fpr:g}": float(np.mean(p_value <= fpr)) for fpr in usable}


@dataclass(frozen=True)
class ServedPredictor:
    """Judges rows as a version is served, with a number of draws; row sets are told apart by name in their seeds."""

    model: Model
    draws: int
    seed: int

    def request_seed(self, name: str) -> int:
        """Return what a set's draws are seeded by."""
        return hash_key(self.seed, *name.encode())

    def __call__(self, name: str, x: np.ndarray) -> ServedPrediction:
        """ServedPredictor rows."""
        rows = Rows(x, np.zeros(len(x), dtype=np.int64))
        parts = served_outputs(self.model.runtime, rows, self.draws, self.request_seed(name), REQUEST_ROWS)
        predictions = [self.model.prediction(outputs, density) for outputs, density in parts]
        return ServedPrediction(Prediction.concatenate(predictions), self.model.calibration)


def measure_test(predictor: ServedPredictor, predicted: ServedPrediction, test: Rows) -> dict[str, Any]:
    """Return quality on test rows: of classes accuracy, log-likelihood (nats a row), Brier score, calibration error
    and error detection; of a regression error, log-likelihood and coverage of intervals; of both how often the flag
    fires, and the area under risk against coverage of each score.
    """
    scores = predicted.prediction.scores
    measured: dict[str, Any]
    if isinstance(scores, Scores):
        loss = (scores.label != test.y).astype(np.float64)
        measured = {
            **quality(scores, test.y),
            "reliability": reliability(scores.probabilities.max(axis=1), loss == 0),
            "error_detection": error_detection(predicted, loss),
        }
    else:
        calibrated, tables = predicted.prediction.calibrated_scores, predicted.prediction.rank_tables
        assert isinstance(scores, MixtureScores)
        assert isinstance(calibrated, MixtureScores)
        loss = np.square(scores.mean - test.y).astype(np.float64)
        seed = predictor.request_seed("test")
        _, _, density = scores_and_likelihoods(predictor.model.runtime, test, predictor.draws, seed, REQUEST_ROWS)
        intervals = {coverage: tables.intervals(calibrated.mean, calibrated.std, coverage) for coverage in COVERAGES}
        table = [_interval(coverage, ends, test.y) for coverage, ends in intervals.items()]
        measured = {**regression_quality(scores, density, intervals[0.95], test.y), "intervals": table}
    areas = {name: area_under_risk_coverage(score, loss) for name, score in predicted.scores.items()}
    return {"rows": len(test), **measured, "flagged": predicted.flagged, "aurc": areas}


def error_detection(predicted: ServedPrediction, loss: Float64[np.ndarray, "N"]) -> dict[str, Any] | None:
    """Return how well each score tells misclassified rows from the others; None where there are none of either."""
    wrong = loss > 0
    if wrong.all() or not wrong.any():
        return None
    measured = {name: detection(score[wrong], score[~wrong]) for name, score in predicted.scores.items()}
    return {"rows": int(wrong.sum()), "base_rate": float(wrong.mean()), "scores": measured}


def measure_set(test: ServedPrediction, outliers: ServedPrediction) -> dict[str, Any]:
    """Return how well each score tells a set's rows (positive) from the test rows, and how often the flag fires."""
    known, rows = (predicted.scores for predicted in (test, outliers))
    n, m = len(known["flag"]), len(rows["flag"])
    return {
        "rows": m,
        "base_rate": m / (m + n),
        "flagged": outliers.flagged,
        "scores": {name: detection(rows[name], known[name]) for name in rows},
    }


def measure_attack(test: ServedPrediction, attacked: ServedPrediction, y: np.ndarray) -> dict[str, Any]:
    """Return what `measure_set` does of attacked rows, and their accuracy, mean scores and error detection.

    `hits` is the share of all rows whose label is wrong and whose flag stays quiet at a false-positive rate of .05.
    """
    scores = attacked.prediction.scores
    assert isinstance(scores, Scores)
    wrong = scores.label != y
    quiet = attacked.prediction.p_values.p_value > 0.05
    return {
        **measure_set(test, attacked),
        "accuracy": float(1.0 - wrong.mean()),
        "hits": float(np.mean(wrong & quiet)),
        "mean_scores": {name: float(score.mean()) for name, score in attacked.prediction.detected.items()},
        "error_detection": error_detection(attacked, wrong.astype(np.float64)),
    }


def measure_sets(
    predictor: ServedPredictor,
    test: ServedPrediction,
    sets: dict[str, Float32[np.ndarray, "N I"]],
    done: Callable[[str], None],
) -> tuple[dict[str, Any], dict[str, ServedPrediction]]:
    """Return what `measure_set` says of each set, and what the version says of it."""
    predicted = {}
    for name, rows in sets.items():
        predicted[name] = predictor(name, rows)
        done(name)
    return {name: measure_set(test, rows) for name, rows in predicted.items()}, predicted


def _interval(coverage: float, ends: Float64[np.ndarray, "N 2"], y: np.ndarray) -> dict[str, float | None]:
    inside = (ends[:, 0] <= y) & (y <= ends[:, 1])
    width = float(np.mean(ends[:, 1] - ends[:, 0]))
    return {"nominal": coverage, "covered": float(inside.mean()), "width": width if np.isfinite(width) else None}
