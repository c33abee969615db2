"""Metrics for the detection of outliers and errors.

Scores are higher for rows more unlike the data and for more uncertain predictions. Shapes: P
positive rows (outliers, errors), N negative rows. Confidence intervals, at `figures.LEVEL`:

* Area under the ROC curve: Newcombe 2006, which has a positive width even for an area of 0 or 1.
* Average precision: Wilson, "Probable inference, the law of succession, and statistical inference",
  1927, treating it as a share of the positive rows. It is conservative and has a positive width.
"""

import numpy as np
from jaxtyping import Float64, Int64
from scipy import optimize
from scipy.special import ndtri
from sklearn import metrics

from model_store.state.live import wilson_interval
from training.evaluation.figures import LEVEL, Ends, Record

EDGE = 1e-12  # the root search stays this far from 0 and 1
Z = float(ndtri((1.0 + LEVEL) / 2.0))

Positive = Float64[np.ndarray, "P"]
Negative = Float64[np.ndarray, "N"]
Curve = tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]


def detection(positive: Positive, negative: Negative) -> Record:
    """Compute a score's detection metrics, with confidence intervals."""
    area = float(metrics.roc_auc_score(*_pool(positive, negative)))
    precision = average_precision(positive, negative)
    ends = {
        "auroc": auroc_interval(area, len(positive), len(negative)),
        "average_precision": wilson_interval(precision, len(positive)),
    }
    return {"auroc": area, "average_precision": precision, "confidence_intervals": ends}


def roc_curve(positive: Positive, negative: Negative) -> Curve:
    false, true, _ = metrics.roc_curve(*_pool(positive, negative), drop_intermediate=False)
    return false, true


def average_precision(positive: Positive, negative: Negative) -> float:
    """Compute the average precision, which is about P / (P + N) for a random score."""
    # Rounding can push scikit-learn's sum above 1.
    return min(1.0, float(metrics.average_precision_score(*_pool(positive, negative))))


def auroc_interval(area: float, positive: int, negative: int) -> Ends:
    """Compute a confidence interval for the AUROC by inverting a score test.

    Its width is positive even for an area of 0 or 1.

    Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic.
    Part 2", 2006, method 5.
    """
    rows = (positive + negative) / 2.0 - 1.0

    def excess(true: float) -> float:
        spread = 1.0 + rows * (1.0 - true) / (2.0 - true) + rows * true / (1.0 + true)
        variance = true * (1.0 - true) * spread / (positive * negative)
        return float((true - area) ** 2 - Z * Z * variance)

    low = 0.0 if area <= EDGE else optimize.brentq(excess, 0.0, min(area, 1.0 - EDGE))
    high = 1.0 if area >= 1.0 - EDGE else optimize.brentq(excess, max(area, EDGE), 1.0)
    return float(low), float(high)


def _pool(
    positive: Positive, negative: Negative
) -> tuple[Int64[np.ndarray, "M"], Float64[np.ndarray, "M"]]:
    is_positive = np.repeat([1, 0], [len(positive), len(negative)])
    return is_positive, np.concatenate([positive, negative])
