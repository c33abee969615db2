"""How good each class's probability is, the class against all others: calibration, and precision
against recall."""

import numpy as np
from jaxtyping import Float64, Int64

from training.evaluation.figures import BinnedGap
from training.evaluation.intervals import Resamples, wilson_interval
from training.evaluation.metrics import BINS, average_precision, probability_bins, reliability
from training.evaluation.records import ClassProbability


def class_probabilities(
    probs: Float64[np.ndarray, "N C"],
    y: Int64[np.ndarray, "N"],
    classes: tuple[str, ...],
    resamples: Resamples,
) -> list[ClassProbability]:
    """Return of each class the calibration error and the average precision of its probability, and
    its reliability.

    The average precision is None of a class without rows, or without others.
    """
    measured = []
    for c, name in enumerate(classes):
        is_class, prob = y == c, probs[:, c]
        count = int(is_class.sum())
        error = BinnedGap((is_class - prob)[:, None], probability_bins(prob, BINS)[:, None], BINS)
        intervals = {"calibration_error": error.interval(resamples)}
        precision = (
            average_precision(prob[is_class], prob[~is_class]) if 0 < count < len(y) else None
        )
        if precision is not None:
            intervals["average_precision"] = wilson_interval(precision, count)
        measured.append(
            ClassProbability(
                name=name,
                rows=count,
                calibration_error=error.value,
                average_precision=precision,
                reliability=reliability(prob, is_class),
                confidence_intervals=intervals,
            )
        )
    return measured
