"""Accuracy, calibration and risk-coverage metrics for predictions.

Shapes: K draws, N rows, C classes. A regression's outputs are the mean and the log variance of each
draw and row, in the units of the target or of the transformed target.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from scipy import optimize, stats
from scipy.special import ndtr, ndtri
from sklearn import metrics

from model_store.inference.prediction import Prediction
from model_store.scores.classification import MIN_PROBABILITY, Scores
from model_store.scores.regression import log_density
from model_store.scores.transforms import Transform, to_fitted, to_target
from model_store.state.live import wilson_interval
from training.bayes.likelihoods import crps
from training.evaluation.figures import (
    LEVEL,
    BinnedGap,
    Ends,
    Figure,
    Mean,
    Record,
    RootMean,
    Share,
    share_interval,
)

BINS = 15  # for confidences
STEPS = 200  # of the integral on each side of a target
MAX_STDS = 10.0  # range of the integral beyond the means, in standard deviations

Values = Float64[np.ndarray, "N"]
Labels = Int64[np.ndarray, "N"]
EDGE = 1e-12  # the root search stays this far from 0 and 1
Z = float(ndtri((1.0 + LEVEL) / 2.0))

Positive = Float64[np.ndarray, "P"]
Negative = Float64[np.ndarray, "N"]


def class_figures(probs: Float64[np.ndarray, "N C"], y: Labels) -> dict[str, Figure]:
    """Compute accuracy, log-likelihood, Brier score and calibration errors.

    The log-likelihood is in nats per row. The calibration errors are:

    * expected: of the label's probability, in bins of equal width
    * adaptive: of the label's probability, in bins with equal numbers of rows (Nguyen and O'Connor,
      "Posterior calibration and exploratory analysis for natural language processing models", 2015)
    * class-wise: of each class's probability in bins of equal width, averaged over classes (Kull et
      al., "Beyond temperature scaling", 2019)
    """
    correct, confidence = probs.argmax(axis=1) == y, probs.max(axis=1)
    is_true = np.eye(probs.shape[1])[y]
    likelihood = np.log(np.maximum(probs[np.arange(len(y)), y], MIN_PROBABILITY))
    gap = (correct - confidence)[:, None]
    # Ranking with ties puts rows of equal confidence into the same bin.
    below = np.searchsorted(np.sort(confidence), confidence, side="left")
    equal_count_bins = below * BINS // len(confidence)
    equal_width_bins = probability_bins(confidence)
    return {
        "accuracy": Share(correct),
        "log_likelihood": Mean(likelihood),
        "brier": Mean(np.square(probs - is_true).sum(axis=1)),
        "expected_calibration_error": BinnedGap(gap, equal_width_bins[:, None], BINS),
        "adaptive_calibration_error": BinnedGap(gap, equal_count_bins[:, None], BINS),
        "classwise_calibration_error": BinnedGap(is_true - probs, probability_bins(probs), BINS),
    }


def regression_figures(
    prediction: Prediction, log_likelihood: Values, y: np.ndarray
) -> dict[str, Figure]:
    """Compute the RMSE, log-likelihood, mean standard deviation and interval metrics.

    The log-likelihood is in nats per row, for a density in the target's units. Intervals have
    nominal coverage .95. Their mean width is left out if it is infinite.
    """
    assert not isinstance(prediction.scores, Scores)
    scores, intervals = prediction.scores.in_units, prediction.intervals(0.95)
    assert intervals is not None
    width = intervals[:, 1] - intervals[:, 0]
    figures: dict[str, Figure] = {
        "rmse": RootMean(np.square(scores.mean - y)),
        "log_likelihood": Mean(log_likelihood),
        "std": Mean(scores.std),
        "interval_coverage_at_95": Share(is_within(intervals, y)),
    }
    return figures | ({"interval_width_at_95": Mean(width)} if np.isfinite(width).all() else {})


def is_within(ends: Float64[np.ndarray, "N 2"], y: np.ndarray) -> Bool[np.ndarray, "N"]:
    return (ends[:, 0] <= y) & (y <= ends[:, 1])


def probability_bins(
    probs: Float64[np.ndarray, "*shape"], bins: int = BINS
) -> Int64[np.ndarray, "*shape"]:
    return np.minimum((probs * bins).astype(np.int64), bins - 1)


def reliability(
    confidence: Values, correct: Bool[np.ndarray, "N"], bins: int = BINS
) -> list[Record]:
    index, results = probability_bins(confidence, bins), []
    for b in np.unique(index).tolist():
        hits = correct[index == b]
        ends = share_interval(int(hits.sum()), len(hits))
        results.append(
            {
                "rows": len(hits),
                "confidence": float(confidence[index == b].mean()),
                "accuracy": float(hits.mean()),
                "confidence_intervals": {"accuracy": ends},
            }
        )
    return results


def risk_coverage(
    score: Values, loss: Values
) -> tuple[Float64[np.ndarray, "T"], Float64[np.ndarray, "T"]]:
    """Compute the risk-coverage curve of a score."""
    order = np.argsort(score, kind="stable")
    last = np.append(np.diff(score[order]) > 0, True)
    covered = np.arange(1, len(score) + 1)[last]
    return covered / len(score), np.cumsum(loss[order])[last] / covered


@dataclass(frozen=True, eq=False)
class TargetMeasures:
    """Metrics for N targets under Gaussian mixture predictions."""

    log_likelihood: Values  # nats, for a density in the target's units
    crps: Values  # in the target's units
    pit: Values  # predictive probability of values below the target

    @classmethod
    def compute(
        cls,
        outputs: Float[np.ndarray, "K N 2"],
        y: Float[np.ndarray, "N"],
        transform: Transform | None = None,
    ) -> "TargetMeasures":
        moments, target = outputs.astype(np.float64), y.astype(np.float64)
        if transform is None:
            scores = crps(torch.from_numpy(moments), torch.from_numpy(target)).numpy()
            pit = distribution_function(moments, target)
        else:
            scores = transformed_crps(moments, target, transform)
            pit = distribution_function(moments, to_fitted(transform, target))
        return cls(log_density(moments, target, transform), scores, pit)


def transformed_crps(
    outputs: Float64[np.ndarray, "K N 2"], y: Values, transform: Transform
) -> Values:
    """Compute the CRPS for a transformed target, which has no closed form.

    It is the integral of (F(t) - 1[t >= y])^2 over the target's values t, by the midpoint rule on
    each side of y. Beyond `MAX_STDS`, F is 0 or 1.
    """
    mean, std = outputs[..., 0], np.exp(0.5 * outputs[..., 1])
    low, high = (mean - MAX_STDS * std).min(axis=0), (mean + MAX_STDS * std).max(axis=0)
    z = np.clip(to_fitted(transform, y), low, high)
    crps: Values = np.abs(y - to_target(transform, z))
    for end, is_above in ((low, 0.0), (high, 1.0)):
        for first, last in pairwise(np.linspace(z, end, STEPS + 1)):
            width = np.abs(to_target(transform, last) - to_target(transform, first))
            gap = distribution_function(outputs, 0.5 * (first + last)) - is_above
            crps += np.square(gap) * width
    return crps


def distribution_function(outputs: Float64[np.ndarray, "K N 2"], y: Values) -> Values:
    mean, std = outputs[..., 0], np.exp(0.5 * outputs[..., 1])
    below: np.ndarray = ndtr((y - mean) / std).mean(axis=0)
    return below


def pit_measures(pit: Values) -> Record:
    """Measure how far the probability integral transforms are from uniform.

    They are uniform if the predictive distributions are right. The distance and the p-value belong
    to a Kolmogorov-Smirnov test.
    """
    test = stats.kstest(pit, "uniform")
    return {"distance": float(test.statistic), "p_value": float(test.pvalue)}


def detection(positive: Positive, negative: Negative) -> Record:
    """Compute a score's detection metrics, with confidence intervals."""
    area = float(metrics.roc_auc_score(*_pool(positive, negative)))
    precision = average_precision(positive, negative)
    ends = {
        "auroc": auroc_interval(area, len(positive), len(negative)),
        "average_precision": wilson_interval(precision, len(positive)),
    }
    return {"auroc": area, "average_precision": precision, "confidence_intervals": ends}


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
