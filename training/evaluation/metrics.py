"""Measures of served rows: the quality of predictions, and of scores that tell groups of rows apart
or order rows by their risk. Ties count as half, or together.

A score is higher where a row is more unlike the data, or its prediction more uncertain. P positive
rows (outliers, errors), N negative ones.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.scores.classification import LEAST_PROBABILITY
from model_store.scores.regression import MixtureScores
from training.evaluation.figures import BinnedGap, Figure, Mean, RiskCoverage, RootMean, Share
from training.evaluation.intervals import (
    auroc_interval,
    false_positive_rate_interval,
    share_interval,
    wilson_interval,
)
from training.evaluation.records import Bin, Detection, OfClass

DETECTION_RATE = 0.95
BINS = 15  # of confidence


def class_figures(
    probs: Float64[np.ndarray, "N C"], y: Int64[np.ndarray, "N"]
) -> dict[str, Figure]:
    """Return accuracy, log-likelihood (nats a row), Brier score and three calibration errors.

    Of the calibration errors, the expected one is that of the label's probability in bins of equal
    width, the adaptive one in bins of as many rows each (Nguyen and O'Connor, "Posterior
    calibration and exploratory analysis for natural language processing models", 2015), and the
    class-wise one the mean over classes of that of each class' probability, in bins of equal width
    (Kull et al., "Beyond temperature scaling", 2019).
    """
    correct, confidence = probs.argmax(axis=1) == y, probs.max(axis=1)
    is_true = np.eye(probs.shape[1])[y]
    likelihood = np.log(np.maximum(probs[np.arange(len(y)), y], LEAST_PROBABILITY))
    gap = (correct - confidence)[:, None]
    return {
        "accuracy": Share(correct),
        "log_likelihood": Mean(likelihood),
        "brier": Mean(np.square(probs - is_true).sum(axis=1)),
        "expected_calibration_error": BinnedGap(
            gap, probability_bins(confidence, BINS)[:, None], BINS
        ),
        "adaptive_calibration_error": BinnedGap(
            gap, _equal_bins_of(confidence, BINS)[:, None], BINS
        ),
        "classwise_calibration_error": BinnedGap(
            is_true - probs, probability_bins(probs, BINS), BINS
        ),
    }


def regression_figures(
    scores: MixtureScores,
    log_likelihood: Float64[np.ndarray, "N"],
    intervals: Float64[np.ndarray, "N 2"],
    y: np.ndarray,
) -> dict[str, Figure]:
    """Return a regression's root mean squared error, log-likelihood (nats a row, of a density in
    the target's units), mean standard deviation, and how often intervals of coverage .95 hold the
    target, and their mean width.
    """
    width = intervals[:, 1] - intervals[:, 0]
    of_width: dict[str, Figure] = (
        {"interval_width_at_95": Mean(width)} if np.isfinite(width).all() else {}
    )
    return {
        "rmse": RootMean(np.square(scores.mean - y)),
        "log_likelihood": Mean(log_likelihood),
        "std": Mean(scores.std),
        "interval_coverage_at_95": Share((intervals[:, 0] <= y) & (y <= intervals[:, 1])),
        **of_width,
    }


def values(figures: Mapping[str, Figure]) -> dict[str, float]:
    """Return the figures of the rows as they are."""
    return {name: figure.value for name, figure in figures.items()}


def by_class(
    label: Int64[np.ndarray, "N"], y: Int64[np.ndarray, "N"], classes: tuple[str, ...]
) -> list[OfClass]:
    """Return each class's recall and precision, and the labels that its rows were given.

    Recall is None of a class without rows, precision of one that is no row's label.
    """
    confusion = confusion_matrix(label, y, len(classes))
    rows, labelled, right = confusion.sum(axis=1), confusion.sum(axis=0), np.diag(confusion)
    measured = []
    for c, name in enumerate(classes):
        shares = {"recall": int(rows[c]), "precision": int(labelled[c])}
        hits = int(right[c])
        measured.append(
            OfClass(
                name=name,
                rows=int(rows[c]),
                labelled=confusion[c].tolist(),
                recall=hits / shares["recall"] if shares["recall"] else None,
                precision=hits / shares["precision"] if shares["precision"] else None,
                confidence_intervals={
                    key: share_interval(hits, of) for key, of in shares.items() if of
                },
            )
        )
    return measured


def confusion_matrix(
    label: Int64[np.ndarray, "N"], y: Int64[np.ndarray, "N"], num_classes: int
) -> Int64[np.ndarray, "C C"]:
    """Return how many rows of each class (first axis) were given each label."""
    return np.bincount(y * num_classes + label, minlength=num_classes**2).reshape(
        num_classes, num_classes
    )


def auroc(positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]) -> float:
    """Return the probability that a positive row's score exceeds a negative one's, ties counting
    half, by midranks.

    It is the area under the ROC curve (Hanley and McNeil, "The meaning and use of the area under a
    receiver operating characteristic (ROC) curve", 1982).
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


def average_precision(
    positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]
) -> float:
    """Return the mean precision over the positive rows as the threshold falls: the area under
    precision and recall.

    Rows of equal score are taken together. A score that says nothing comes to the base rate, P / (P
    + N).
    """
    hits, alarms, new_hits = _counts(positive, negative)
    return float((new_hits * hits / (hits + alarms)).sum() / len(positive))


def false_positive_rate(
    positive: Float64[np.ndarray, "P"],
    negative: Float64[np.ndarray, "N"],
    detection_rate: float = DETECTION_RATE,
) -> float:
    """Return the share of negative rows above the largest threshold that detects at least
    `detection_rate` of the positive ones."""
    needed = int(np.ceil(detection_rate * len(positive) - 1e-9))
    threshold = np.sort(positive)[len(positive) - needed]
    return float(np.mean(negative >= threshold))


def risk_coverage(
    score: Float64[np.ndarray, "N"], loss: Float64[np.ndarray, "N"]
) -> tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]:
    """Return coverage, and the mean loss of the rows covered, as rows of ever higher score are
    answered.

    Rows of equal score are answered together.
    """
    order = np.argsort(score, kind="stable")
    last = np.append(np.diff(score[order]) > 0, True)
    covered = np.arange(1, len(score) + 1)[last]
    return covered / len(score), np.cumsum(loss[order])[last] / covered


def area_under_risk_coverage(
    score: Float64[np.ndarray, "N"], loss: Float64[np.ndarray, "N"]
) -> float:
    """Return the mean over coverages 1/N to 1 of the risk, AURC (Geifman et al., "Bias-reduced
    uncertainty estimation for deep neural classifiers", 2019). Lower is better. Within rows of
    equal score it is the risk of a random order.
    """
    return RiskCoverage(score, loss).value


def detection(positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]) -> Detection:
    """Return all measures of how well a score detects positive rows.

    `pr_plus` has the positive rows as positives, `pr_minus` the negative ones, with the score
    turned round; the base rate of the first is P / (P + N).
    """
    area, plus, minus = (
        auroc(positive, negative),
        average_precision(positive, negative),
        average_precision(-negative, -positive),
    )
    return Detection(
        auroc=area,
        pr_plus=plus,
        pr_minus=minus,
        fpr_at_95=false_positive_rate(positive, negative),
        confidence_intervals={
            "auroc": auroc_interval(area, positive, negative),
            "pr_plus": wilson_interval(plus, len(positive)),
            "pr_minus": wilson_interval(minus, len(negative)),
            "fpr_at_95": false_positive_rate_interval(positive, negative, DETECTION_RATE),
        },
    )


def reliability(
    confidence: Float64[np.ndarray, "N"], correct: Bool[np.ndarray, "N"], bins: int = BINS
) -> list[Bin]:
    """Return each bin that holds rows: how many, their mean confidence and accuracy."""
    index = probability_bins(confidence, bins)
    return [
        Bin(
            rows=int(np.sum(index == b)),
            confidence=float(confidence[index == b].mean()),
            accuracy=float(correct[index == b].mean()),
            confidence_intervals={
                "accuracy": share_interval(int(correct[index == b].sum()), int(np.sum(index == b)))
            },
        )
        for b in np.unique(index).tolist()
    ]


def precision_recall(
    positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]
) -> tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]:
    """Return recall and precision at each threshold (score >= t), from the highest down."""
    hits, alarms, _ = _counts(positive, negative)
    return hits / len(positive), hits / (hits + alarms)


def _counts(
    positive: Float64[np.ndarray, "P"], negative: Float64[np.ndarray, "N"]
) -> tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]:
    """Return, from the highest score down, positive and negative rows at or above each, and
    positive rows at it."""
    both = np.concatenate([positive, negative])
    values, index = np.unique(both, return_inverse=True)
    at = np.bincount(index[: len(positive)], minlength=len(values))[::-1].astype(np.float64)
    other = np.bincount(index[len(positive) :], minlength=len(values))[::-1].astype(np.float64)
    return np.cumsum(at), np.cumsum(other), at


def probability_bins(
    probs: Float64[np.ndarray, "*shape"], bins: int
) -> Int64[np.ndarray, "*shape"]:
    """Return which of the bins of equal width from 0 to 1 each probability is in."""
    return np.minimum((probs * bins).astype(np.int64), bins - 1)


def _equal_bins_of(confidence: Float64[np.ndarray, "N"], bins: int) -> Int64[np.ndarray, "N"]:
    """Return which bin each row is in, of bins of as many rows each; rows of equal confidence are
    in one bin."""
    lowest = np.searchsorted(np.sort(confidence), confidence, side="left")
    return lowest * bins // len(confidence)
