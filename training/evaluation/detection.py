"""How well scores tell groups of rows apart, and probabilities one class from the others.

A score is higher where a row is more unlike the data, or its prediction more uncertain. P positive
rows (outliers, errors), N negative ones. Confidence intervals, at `figures.LEVEL`:

* The area under the ROC curve: the wider of two. DeLong et al. 1988, on the scale of log odds; and
  Newcombe 2006, which has a length where no pair is out of order.
* Average precision: Wilson, "Probable inference, the law of succession, and statistical inference",
  1927, as of a share of the positive rows. It is wider than needed, and always has a length.
* The false-positive rate at a detection rate: order statistics of the positive rows, and Clopper
  and Pearson at both. It holds exactly.
"""

import numpy as np
from jaxtyping import Float64, Int64
from scipy import optimize, stats
from scipy.special import expit, logit, ndtri
from sklearn import metrics

from model_store.state.live import wilson_interval
from training.evaluation.figures import LEVEL, BinnedGap, Ends, Resamples, share_interval
from training.evaluation.metrics import BINS, probability_bins, reliability
from training.evaluation.report import ClassProbability, Detection, OfClass

DETECTION_RATE = 0.95
EDGE = 1e-12  # how near to 0 and 1 an area under a curve is looked for
Z = float(ndtri((1.0 + LEVEL) / 2.0))

Positive = Float64[np.ndarray, "P"]
Negative = Float64[np.ndarray, "N"]
Curve = tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]


def detection(positive: Positive, negative: Negative) -> Detection:
    """Return all measures of how well a score detects positive rows.

    `pr_plus` has the positive rows as positives, `pr_minus` the negative ones, with the score
    turned round; the base rate of the first is P / (P + N).
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
    """Return the mean precision over the positive rows as the threshold falls.

    Rows of equal score are taken together. A score that says nothing comes to the base rate, P / (P
    + N).
    """
    # scikit-learn's sum may exceed 1 by rounding
    return min(1.0, float(metrics.average_precision_score(*_pool(positive, negative))))


def false_positive_rate(
    positive: Positive, negative: Negative, detection_rate: float = DETECTION_RATE
) -> float:
    """Return the share of negative rows above the largest threshold that detects at least
    `detection_rate` of the positive ones."""
    false, true = roc_curve(positive, negative)
    return float(false[np.argmax(true >= detection_rate - 1e-9)])


def auroc_interval(area: float, positive: Positive, negative: Negative) -> Ends:
    newcombe = _newcombe(area, len(positive), len(negative))
    delong = _delong(area, positive, negative)
    return min(newcombe[0], delong[0]), max(newcombe[1], delong[1])


def auroc_variance(positive: Positive, negative: Negative) -> float:
    """Return the variance of an area under the ROC curve; each group must have two rows.

    DeLong et al., "Comparing the areas under two or more correlated receiver operating
    characteristic curves: a nonparametric approach", 1988, computed by ranks.
    """
    ranks = stats.rankdata(np.concatenate([positive, negative]))
    # negative rows below each positive one, and positive rows above each negative one
    below_P = ranks[: len(positive)] - stats.rankdata(positive)
    above_N = len(positive) - (ranks[len(positive) :] - stats.rankdata(negative))
    of_positive = (below_P / len(negative)).var(ddof=1) / len(positive)
    of_negative = (above_N / len(positive)).var(ddof=1) / len(negative)
    return float(of_positive + of_negative)


def _delong(area: float, positive: Positive, negative: Negative) -> Ends:
    if not 0.0 < area < 1.0 or min(len(positive), len(negative)) < 2:
        return area, area
    half = Z * np.sqrt(auroc_variance(positive, negative)) / (area * (1.0 - area))
    return float(expit(logit(area) - half)), float(expit(logit(area) + half))


def _newcombe(area: float, positive: int, negative: int) -> Ends:
    """Return where the area is a normal quantile of its standard deviations from what was found.

    Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic.
    Part 2", 2006, method 5.
    """
    rows = (positive + negative) / 2.0 - 1.0

    def beyond(true: float) -> float:
        spread = 1.0 + rows * (1.0 - true) / (2.0 - true) + rows * true / (1.0 + true)
        variance = true * (1.0 - true) * spread / (positive * negative)
        return float((true - area) ** 2 - Z * Z * variance)

    low = 0.0 if area <= EDGE else optimize.brentq(beyond, 0.0, min(area, 1.0 - EDGE))
    high = 1.0 if area >= 1.0 - EDGE else optimize.brentq(beyond, max(area, EDGE), 1.0)
    return float(low), float(high)


def false_positive_rate_interval(
    positive: Positive, negative: Negative, detection_rate: float
) -> Ends:
    """Return the interval of the false-positive rate at which a share `detection_rate` of positive
    rows is detected.

    Half of what may go wrong goes to the threshold, which lies between two order statistics of the
    positive rows, the other half to the rates of the negative rows at these.
    """
    half = (1.0 + LEVEL) / 2.0
    ordered, rows = np.sort(positive), len(positive)
    tails = np.array([(1.0 - half) / 2.0, (1.0 + half) / 2.0])
    # rows below the true threshold
    first, last = stats.binom.ppf(tails, rows, 1.0 - detection_rate).astype(int)
    lowest = ordered[first - 1] if first > 0 else -np.inf
    highest = ordered[last] if last < rows else np.inf
    least, most = int(np.sum(negative >= highest)), int(np.sum(negative >= lowest))
    low, _ = share_interval(least, len(negative), half)
    _, high = share_interval(most, len(negative), half)
    return low, high


def by_class(
    label: Int64[np.ndarray, "N"], y: Int64[np.ndarray, "N"], classes: tuple[str, ...]
) -> list[OfClass]:
    """Return each class's recall and precision, and the labels that its rows were given.

    Recall is None of a class without rows, precision of one that is no row's label.
    """
    confusion = metrics.confusion_matrix(y, label, labels=range(len(classes)))
    measured = []
    for c, name in enumerate(classes):
        hits = int(confusion[c, c])
        counts = {"recall": int(confusion[c].sum()), "precision": int(confusion[:, c].sum())}
        measured.append(
            OfClass(
                name=name,
                rows=counts["recall"],
                labelled=confusion[c].tolist(),
                **{key: hits / count if count else None for key, count in counts.items()},
                confidence_intervals={
                    key: share_interval(hits, count) for key, count in counts.items() if count
                },
            )
        )
    return measured


def class_probabilities(
    probs: Float64[np.ndarray, "N C"],
    y: Int64[np.ndarray, "N"],
    classes: tuple[str, ...],
    resamples: Resamples,
) -> list[ClassProbability]:
    """Return of each class, against all others, the calibration error and the average precision of
    its probability, and its reliability.

    The average precision is None of a class without rows, or without others.
    """
    measured = []
    for c, name in enumerate(classes):
        is_class, prob = y == c, probs[:, c]
        count = int(is_class.sum())
        error = BinnedGap((is_class - prob)[:, None], probability_bins(prob)[:, None], BINS)
        intervals, precision = {"calibration_error": error.interval(resamples)}, None
        if 0 < count < len(y):
            precision = average_precision(prob[is_class], prob[~is_class])
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


def _pool(
    positive: Positive, negative: Negative
) -> tuple[Int64[np.ndarray, "M"], Float64[np.ndarray, "M"]]:
    is_positive = np.repeat([1, 0], [len(positive), len(negative)])
    return is_positive, np.concatenate([positive, negative])
