"""Metrics for outlier detection, error detection and classification.

Scores are higher for rows more unlike the data and for more uncertain predictions. Shapes: P
positive rows (outliers, errors), N negative rows. Confidence intervals, at `figures.LEVEL`:

* Area under the ROC curve: the wider of two intervals. DeLong et al. 1988, on the log-odds scale;
  and Newcombe 2006, which has a positive width even for an area of 0 or 1.
* Average precision: Wilson, "Probable inference, the law of succession, and statistical inference",
  1927, treating it as a share of the positive rows. It is conservative and has a positive width.
* False-positive rate at a detection rate: order statistics of the positive rows for the threshold,
  Clopper-Pearson for the rate. Its coverage is exact.
"""

import numpy as np
from jaxtyping import Float64, Int64
from scipy import optimize, stats
from scipy.special import expit, logit, ndtri
from sklearn import metrics

from model_store.state.live import wilson_interval
from training.evaluation.figures import LEVEL, BinnedGap, Ends, Resamples, share_interval
from training.evaluation.metrics import BINS, probability_bins, reliability
from training.evaluation.report import ClassProbability, ClassResult, Detection

DETECTION_RATE = 0.95
EDGE = 1e-12  # the root search stays this far from 0 and 1
Z = float(ndtri((1.0 + LEVEL) / 2.0))

Positive = Float64[np.ndarray, "P"]
Negative = Float64[np.ndarray, "N"]
Curve = tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]


def detection(positive: Positive, negative: Negative) -> Detection:
    """Compute all detection metrics of a score.

    `pr_plus` is the average precision for positive rows, with base rate P / (P + N). `pr_minus` is
    the average precision for negative rows by the negated score.
    """
    area = float(metrics.roc_auc_score(*_pool(positive, negative)))
    plus, minus = average_precision(positive, negative), average_precision(-negative, -positive)
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


def roc_curve(positive: Positive, negative: Negative) -> Curve:
    false, true, _ = metrics.roc_curve(*_pool(positive, negative), drop_intermediate=False)
    return false, true


def average_precision(positive: Positive, negative: Negative) -> float:
    """Compute the average precision. A random score gets the base rate, P / (P + N)."""
    # Rounding can push scikit-learn's sum above 1.
    return min(1.0, float(metrics.average_precision_score(*_pool(positive, negative))))


def false_positive_rate(
    positive: Positive, negative: Negative, detection_rate: float = DETECTION_RATE
) -> float:
    """Compute the false-positive rate at a given detection rate."""
    false, true = roc_curve(positive, negative)
    return float(false[np.argmax(true >= detection_rate - 1e-9)])


def auroc_interval(area: float, positive: Positive, negative: Negative) -> Ends:
    newcombe = _newcombe(area, len(positive), len(negative))
    delong = _delong(area, positive, negative)
    return min(newcombe[0], delong[0]), max(newcombe[1], delong[1])


def auroc_variance(positive: Positive, negative: Negative) -> float:
    """Estimate the variance of the AUROC. Both groups need at least two rows.

    DeLong et al., "Comparing the areas under two or more correlated receiver operating
    characteristic curves: a nonparametric approach", 1988, computed by ranks.
    """
    ranks = stats.rankdata(np.concatenate([positive, negative]))
    # Count the negatives below each positive, and the positives above each negative.
    below_P = ranks[: len(positive)] - stats.rankdata(positive)
    above_N = len(positive) - (ranks[len(positive) :] - stats.rankdata(negative))
    positive_part = (below_P / len(negative)).var(ddof=1) / len(positive)
    negative_part = (above_N / len(positive)).var(ddof=1) / len(negative)
    return float(positive_part + negative_part)


def _delong(area: float, positive: Positive, negative: Negative) -> Ends:
    if not 0.0 < area < 1.0 or min(len(positive), len(negative)) < 2:
        return area, area
    half = Z * np.sqrt(auroc_variance(positive, negative)) / (area * (1.0 - area))
    return float(expit(logit(area) - half)), float(expit(logit(area) + half))


def _newcombe(area: float, positive: int, negative: int) -> Ends:
    """Invert a score test of the area.

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


def false_positive_rate_interval(
    positive: Positive, negative: Negative, detection_rate: float
) -> Ends:
    """Compute a confidence interval for the false-positive rate at a detection rate.

    Half of the error probability goes to the threshold, which is between two order statistics of
    the positive rows. The other half goes to the false-positive rates at these thresholds.
    """
    half = (1.0 + LEVEL) / 2.0
    ordered, rows = np.sort(positive), len(positive)
    tails = np.array([(1.0 - half) / 2.0, (1.0 + half) / 2.0])
    # The true threshold has from `first` to `last` positive rows below it.
    first, last = stats.binom.ppf(tails, rows, 1.0 - detection_rate).astype(int)
    lowest = ordered[first - 1] if first > 0 else -np.inf
    highest = ordered[last] if last < rows else np.inf
    low, _ = share_interval(int(np.sum(negative >= highest)), len(negative), half)
    _, high = share_interval(int(np.sum(negative >= lowest)), len(negative), half)
    return low, high


def by_class(
    label: Int64[np.ndarray, "N"], y: Int64[np.ndarray, "N"], classes: tuple[str, ...]
) -> list[ClassResult]:
    """Compute the recall, the precision and the confusion matrix row of each class.

    Recall is None if the class has no rows, precision if the class was never predicted.
    """
    confusion = metrics.confusion_matrix(y, label, labels=range(len(classes)))
    results = []
    for c, name in enumerate(classes):
        hits = int(confusion[c, c])
        counts = {"recall": int(confusion[c].sum()), "precision": int(confusion[:, c].sum())}
        results.append(
            ClassResult(
                name=name,
                rows=counts["recall"],
                labelled=confusion[c].tolist(),
                **{key: hits / count if count else None for key, count in counts.items()},
                confidence_intervals={
                    key: share_interval(hits, count) for key, count in counts.items() if count
                },
            )
        )
    return results


def class_probabilities(
    probs: Float64[np.ndarray, "N C"],
    y: Int64[np.ndarray, "N"],
    classes: tuple[str, ...],
    resamples: Resamples,
) -> list[ClassProbability]:
    """Compute the one-vs-rest calibration and average precision of each class probability.

    The average precision is None if no row, or every row, is of the class.
    """
    results = []
    for c, name in enumerate(classes):
        is_class, prob = y == c, probs[:, c]
        count = int(is_class.sum())
        error = BinnedGap((is_class - prob)[:, None], probability_bins(prob)[:, None], BINS)
        intervals, precision = {"calibration_error": error.interval(resamples)}, None
        if 0 < count < len(y):
            precision = average_precision(prob[is_class], prob[~is_class])
            intervals["average_precision"] = wilson_interval(precision, count)
        results.append(
            ClassProbability(
                name=name,
                rows=count,
                calibration_error=error.value,
                average_precision=precision,
                reliability=reliability(prob, is_class),
                confidence_intervals=intervals,
            )
        )
    return results


def _pool(
    positive: Positive, negative: Negative
) -> tuple[Int64[np.ndarray, "M"], Float64[np.ndarray, "M"]]:
    is_positive = np.repeat([1, 0], [len(positive), len(negative)])
    return is_positive, np.concatenate([positive, negative])
