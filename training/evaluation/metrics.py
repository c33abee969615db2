"""Measures of served rows: the quality of predictions, and of scores that tell groups of rows apart or order rows by
their risk. Ties count as half, or together.

A score is higher where a row is more unlike the data, or its prediction more uncertain. P positive rows (outliers,
errors), N negative ones.
"""

import math

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.scores.classification import Scores
from model_store.scores.regression import MixtureScores
from training.evaluation.records import Bin, Detection
from training.scoring import log_probability

DETECTION_RATE = 0.95
RELIABILITY_BINS = 15


def quality(scores: Scores, y: np.ndarray) -> dict[str, float]:
    """Return accuracy, log-likelihood (nats a row), Brier score and expected calibration error (15 bins)."""
    probs = scores.probabilities
    confidence, correct = probs.max(axis=1), probs.argmax(axis=1) == y
    one_hot = np.eye(probs.shape[1])[y]
    return {
        "accuracy": float(correct.mean()),
        "log_likelihood": float(log_probability(scores, y).mean()),
        "brier": float(np.square(probs - one_hot).sum(axis=1).mean()),
        "expected_calibration_error": expected_calibration_error(confidence, correct),
    }


def regression_quality(
    scores: MixtureScores,
    log_likelihood: Float64[np.ndarray, "N"],
    intervals: Float64[np.ndarray, "N 2"],
    y: np.ndarray,
) -> dict[str, float]:
    """Return a regression's root mean squared error, log-likelihood (nats a row, of a density in the target's units),
    mean standard deviation, and how often intervals of coverage .95 hold the target, and their mean width.
    """
    measured = {
        "rmse": float(np.sqrt(np.square(scores.mean - y).mean())),
        "log_likelihood": float(log_likelihood.mean()),
        "std": float(scores.std.mean()),
        "interval_coverage_at_95": float(np.mean((intervals[:, 0] <= y) & (y <= intervals[:, 1]))),
    }
    width = float((intervals[:, 1] - intervals[:, 0]).mean())
    return measured | ({"interval_width_at_95": width} if math.isfinite(width) else {})


def auroc(positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]) -> float:
    """Return the probability that a positive row's score exceeds a negative one's, ties counting half, by midranks.

    It is the area under the ROC curve (Hanley and McNeil, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve", 1982).
    """
    both = np.concatenate([positive, negative])
    _values, index, counts = np.unique(both, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - 0.5 * (counts - 1)
    ranks = midranks[index[: len(positive)]].sum()
    least = 0.5 * len(positive) * (len(positive) + 1)
    return float((ranks - least) / (len(positive) * len(negative)))


def roc_curve(
    positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]
) -> tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]:
    """Return false- and true-positive rates at each threshold (score >= t), from no row to all."""
    hits, alarms, _ = _counts(positive, negative)
    return np.append(0.0, alarms / len(negative)), np.append(0.0, hits / len(positive))


def average_precision(positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]) -> float:
    """Return the mean precision over the positive rows as the threshold falls: the area under precision and recall.

    Rows of equal score are taken together. A score that says nothing comes to the base rate, P / (P + N).
    """
    hits, alarms, new_hits = _counts(positive, negative)
    return float((new_hits * hits / (hits + alarms)).sum() / len(positive))


def false_positive_rate(
    positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"], detection_rate: float = DETECTION_RATE
) -> float:
    """Return the share of negative rows above the largest threshold that detects at least `detection_rate` of the
    positive ones."""
    needed = int(np.ceil(detection_rate * len(positive) - 1e-9))
    threshold = np.sort(positive)[len(positive) - needed]
    return float(np.mean(negative >= threshold))


def risk_coverage(
    score: Float64[np.ndarray, "N"], loss: Float64[np.ndarray, "N"]
) -> tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]:
    """Return coverage, and the mean loss of the rows covered, as rows of ever higher score are answered.

    Rows of equal score are answered together.
    """
    order = np.argsort(score, kind="stable")
    last = np.append(np.diff(score[order]) > 0, True)
    covered = np.arange(1, len(score) + 1)[last]
    return covered / len(score), np.cumsum(loss[order])[last] / covered


def area_under_risk_coverage(score: Float64[np.ndarray, "N"], loss: Float64[np.ndarray, "N"]) -> float:
    """Return the mean over coverages 1/N to 1 of the risk, AURC (Geifman et al., "Bias-reduced uncertainty estimation
    for deep neural classifiers", 2019). Lower is better. Within rows of equal score it is the risk of a random order.
    """
    values, index = np.unique(score, return_inverse=True)
    sums = np.bincount(index, weights=loss, minlength=len(values))
    counts = np.bincount(index, minlength=len(values))
    mean_of_tie = (sums / counts)[np.sort(index)]
    risks = np.cumsum(mean_of_tie) / np.arange(1, len(score) + 1)
    return float(risks.mean())


def detection(positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]) -> Detection:
    """Return all measures of how well a score detects positive rows.

    `pr_plus` has the positive rows as positives, `pr_minus` the negative ones, with the score turned round; the base
    rate of the first is P / (P + N).
    """
    return Detection(
        auroc=auroc(positive, negative),
        pr_plus=average_precision(positive, negative),
        pr_minus=average_precision(-negative, -positive),
        fpr_at_95=false_positive_rate(positive, negative),
    )


def expected_calibration_error(
    confidence: Float64[np.ndarray, "N"], correct: Bool[np.ndarray, "N"], bins: int = RELIABILITY_BINS
) -> float:
    """Return the mean distance of confidence and accuracy over bins of equal width, each as heavy as its rows (Guo et
    al., "On calibration of modern neural networks", 2017, equation 3)."""
    index = _bins_of(confidence, bins)
    gaps = [abs((correct[index == b] - confidence[index == b]).sum()) for b in range(bins)]
    return float(sum(gaps) / len(confidence))


def reliability(
    confidence: Float64[np.ndarray, "N"], correct: Bool[np.ndarray, "N"], bins: int = RELIABILITY_BINS
) -> list[Bin]:
    """Return each bin that holds rows: how many, their mean confidence and accuracy."""
    index = _bins_of(confidence, bins)
    return [
        Bin(
            rows=int(np.sum(index == b)),
            confidence=float(confidence[index == b].mean()),
            accuracy=float(correct[index == b].mean()),
        )
        for b in np.unique(index).tolist()
    ]


def _counts(
    positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]
) -> tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]:
    """Return, from the highest score down, positive and negative rows at or above each, and positive rows at it."""
    both = np.concatenate([positive, negative])
    values, index = np.unique(both, return_inverse=True)
    at = np.bincount(index[: len(positive)], minlength=len(values))[::-1].astype(np.float64)
    other = np.bincount(index[len(positive) :], minlength=len(values))[::-1].astype(np.float64)
    return np.cumsum(at), np.cumsum(other), at


def _bins_of(confidence: Float64[np.ndarray, "N"], bins: int) -> Int64[np.ndarray, "N"]:
    return np.minimum((confidence * bins).astype(int), bins - 1)
