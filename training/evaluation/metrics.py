"""Metrics of predictions, with confidence intervals.

A figure maps weights of shape (S, N) to S numbers. The weights count each row in each of S samples
of N rows. So the same function computes the figure and its bootstrap, and two versions can be
compared on the same samples.

A record contains figures and facts about rows, and in `confidence_intervals` the interval of each
figure by its name, or by its path if it is nested, such as `flagged.0.05`. Shares are from 0 to 1.

Intervals have level `LEVEL`. They assume independent rows, and a fixed version and calibration.
Shares use Clopper-Pearson intervals. AUROC and average precision use Wilson's, whose width is
positive even for 0 or 1. All other figures use `RESAMPLES` bootstrap samples.

Shapes: K draws, N rows, C classes, P positive rows (outliers, errors). A regression's outputs are
the mean and the log variance of each draw and row, in the units of the target or of the transformed
target. Scores are higher for more uncertain rows and for rows more unlike the data.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64, UInt16
from scipy import sparse, stats
from scipy.special import betaincinv, ndtr, ndtri
from sklearn import metrics

from model_store.inference.prediction import Prediction
from model_store.scores.classification import MIN_PROBABILITY, Scores
from model_store.scores.regression import log_density
from model_store.scores.transforms import Transform, to_fitted, to_target
from model_store.state.live import wilson_interval
from training.bayes.likelihoods import crps
from training.seeds import EvaluationStream, generator

LEVEL = 0.95
RESAMPLES = 1000
CHUNK_NUMBERS = 4_000_000  # resamples x rows in one pass
BINS = 15  # for confidences
NODES = 100  # values that represent the distribution of a draw

Ends = tuple[float, float]
Record = dict[str, Any]  # a part of `report.json`
Weights = Float64[np.ndarray, "S N"]
Samples = Float64[np.ndarray, "S"]
Values = Float64[np.ndarray, "N"]
Labels = Int64[np.ndarray, "N"]
Positive = Float64[np.ndarray, "P"]
Negative = Float64[np.ndarray, "N"]
Hits = Bool[np.ndarray, "N"]
Outputs = Float64[np.ndarray, "K N 2"]


def flag_range(rows: int, calibration_rows: int, fpr: float) -> tuple[float, float]:
    """Compute the 99 % range of the share of flagged rows among ordinary rows.

    The range includes the random choice of the calibration rows and of the ordinary rows. If all n
    calibration scores differ, the number of flagged rows is beta-binomial with parameters k and
    n + 1 - k, where k = floor(fpr (n + 1)) (Vovk 2012).
    """
    rank = math.floor(fpr * (calibration_rows + 1))
    if rank == 0:
        return 0.0, 0.0
    law = stats.betabinom(rows, rank, calibration_rows + 1 - rank)
    low, high = law.ppf([0.005, 0.995]) / rows
    return float(low), float(high)


@dataclass(frozen=True, eq=False)
class Resamples:
    """R bootstrap samples of N rows."""

    counts: UInt16[np.ndarray, "R N"]  # of each row in each sample

    @classmethod
    def draw(cls, rows: int, seed: int, resamples: int = RESAMPLES) -> "Resamples":
        random = generator(seed, EvaluationStream.RESAMPLES, rows)
        counts = np.empty((resamples, rows), dtype=np.uint16)
        for sample in counts:
            sample[:] = np.bincount(random.integers(rows, size=rows), minlength=rows)
        return cls(counts)

    def values(
        self, figure: Callable[[Weights], Float64[np.ndarray, "S *shape"]]
    ) -> Float64[np.ndarray, "R *shape"]:
        step = max(1, CHUNK_NUMBERS // self.counts.shape[1])
        chunks = (self.counts[start : start + step] for start in range(0, len(self.counts), step))
        return np.concatenate([figure(chunk.astype(np.float64)) for chunk in chunks])


def percentiles(values: Float64[np.ndarray, "R"]) -> Ends:
    low, high = np.quantile(values, [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    return float(low), float(high)


def share_interval(hits: int, rows: int) -> Ends:
    """Compute the exact Clopper-Pearson interval for a proportion.

    Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the
    binomial", 1934. It equals the interval of `scipy.stats.binomtest`, but is computed a thousand
    times faster.
    """
    tail = (1.0 - LEVEL) / 2.0
    low = 0.0 if hits == 0 else float(betaincinv(hits, rows - hits + 1, tail))
    high = 1.0 if hits == rows else float(betaincinv(hits + 1, rows - hits, 1.0 - tail))
    return low, high


class Figure(ABC):
    def __init__(self, row_values: np.ndarray) -> None:
        self.row_values = row_values

    @abstractmethod
    def __call__(self, weights: Weights) -> Samples: ...

    def interval(self, resamples: Resamples) -> Ends:
        return percentiles(resamples.values(self))

    @property
    def rows(self) -> int:
        return len(self.row_values)

    @property
    def value(self) -> float:
        return float(self(np.ones((1, self.rows)))[0])


class Mean(Figure):
    def __call__(self, weights: Weights) -> Samples:
        return weights @ self.row_values / self.rows


class Share(Mean):
    def __init__(self, hits: Hits) -> None:
        super().__init__(hits)

    def interval(self, resamples: Resamples | None = None) -> Ends:  # noqa: ARG002
        return share_interval(int(self.row_values.sum()), self.rows)


class RootMean(Mean):
    def __call__(self, weights: Weights) -> Samples:
        return np.sqrt(super().__call__(weights))


class BinnedGap(Figure):
    """The calibration error sum_b |G_b| / N, where G_b sums the gaps in bin b.

    A gap is an outcome (0 or 1) minus its predicted probability. Resampling does not change the
    bins.

    Chance biases the figure upwards, and again in each bootstrap sample, so the percentiles alone
    would exclude the true figure. The lower end is therefore the figure minus the bootstrap
    quantile of sum_b |G_b in the sample - G_b| / N, an upper bound on the bias.
    """

    def __init__(self, gaps: Values, bins: Labels, num_bins: int) -> None:
        super().__init__(gaps)
        self.bins, self.num_bins = bins, num_bins

    def __call__(self, weights: Weights) -> Samples:
        return np.abs(weights @ self._table).sum(axis=1) / self.rows

    def interval(self, resamples: Resamples) -> Ends:
        full = np.ones((1, self.rows)) @ self._table
        bias = resamples.values(lambda w: np.abs(w @ self._table - full).sum(axis=1) / self.rows)
        return max(0.0, self.value - percentiles(bias)[1]), super().interval(resamples)[1]

    @cached_property
    def _table(self) -> sparse.csr_array:
        places = np.arange(self.rows), self.bins
        return sparse.csr_array((self.row_values, places), shape=(self.rows, self.num_bins))


class RiskCoverage(Figure):
    """The area under the risk-coverage curve (AURC); lower is better.

    It is the mean over coverages 1/N to 1 of the mean loss of the answered rows, lowest scores
    first (Geifman et al., "Bias-reduced uncertainty estimation for deep neural classifiers", 2019).
    Rows of equal score count as in a random order.
    """

    def __init__(self, score: Values, loss: Values) -> None:
        self.order = np.argsort(score, kind="stable")
        super().__init__(loss[self.order])
        # Rows of equal score form a group.
        self.starts = np.flatnonzero(np.append(True, np.diff(score[self.order]) > 0))
        self.harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, len(score) + 1))])

    def __call__(self, weights: Weights) -> Samples:
        ordered = weights[:, self.order]
        count = np.add.reduceat(ordered, self.starts, axis=1)
        loss = np.add.reduceat(ordered * self.row_values, self.starts, axis=1)
        before = np.cumsum(count, axis=1) - count
        # A group of c rows with mean loss m, after k rows with total loss L, adds
        # sum_{j=1..c} (L + j m) / (k + j).
        mean = loss / np.maximum(count, 1.0)
        loss_before = np.cumsum(loss, axis=1) - loss
        first = np.rint(before).astype(np.int64)
        steps = self.harmonic[first + np.rint(count).astype(np.int64)] - self.harmonic[first]
        return (count * mean + (loss_before - mean * before) * steps).sum(axis=1) / self.rows


def values(figures: Mapping[str, Figure]) -> dict[str, float]:
    return {name: figure.value for name, figure in figures.items()}


def intervals(
    figures: Mapping[str, Figure], resamples: Resamples, path: str = ""
) -> dict[str, Ends]:
    return {f"{path}{name}": figure.interval(resamples) for name, figure in figures.items()}


def make_record(figures: Mapping[str, Figure], resamples: Resamples, **facts: Any) -> Record:
    ends = intervals(figures, resamples)
    return {**facts, **values(figures), "confidence_intervals": ends}


def class_figures(probs: Float64[np.ndarray, "N C"], y: Labels) -> dict[str, Figure]:
    """Compute accuracy, log-likelihood, Brier score and expected calibration error.

    The log-likelihood is in nats per row. The calibration error compares the label's probability
    with its accuracy, in bins of equal width.
    """
    correct, confidence = probs.argmax(axis=1) == y, probs.max(axis=1)
    likelihood = np.log(np.maximum(probs[np.arange(len(y)), y], MIN_PROBABILITY))
    gap = BinnedGap(correct - confidence, probability_bins(confidence), BINS)
    return {
        "accuracy": Share(correct),
        "log_likelihood": Mean(likelihood),
        "brier": Mean(np.square(probs - np.eye(probs.shape[1])[y]).sum(axis=1)),
        "expected_calibration_error": gap,
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


def is_within(ends: Float64[np.ndarray, "N 2"], y: np.ndarray) -> Hits:
    return (ends[:, 0] <= y) & (y <= ends[:, 1])


def probability_bins(
    probs: Float64[np.ndarray, "*shape"], bins: int = BINS
) -> Int64[np.ndarray, "*shape"]:
    return np.minimum((probs * bins).astype(np.int64), bins - 1)


def reliability(confidence: Values, correct: Hits, bins: int = BINS) -> list[Record]:
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


def transformed_crps(outputs: Outputs, y: Values, transform: Transform) -> Values:
    """Approximate the CRPS for a transformed target, E|T - y| - E|T - T'| / 2.

    Each draw's distribution is represented by `NODES` equally probable values.
    """
    mean, std = outputs[..., 0], np.exp(0.5 * outputs[..., 1])
    nodes = ndtri((np.arange(NODES) + 0.5) / NODES)[:, None, None]
    targets = np.sort(to_target(transform, mean + std * nodes).reshape(-1, len(y)), axis=0)
    count = len(targets)
    weights = (2.0 * np.arange(1, count + 1) - count - 1.0) / count**2
    distance: Values = np.abs(targets - y).mean(axis=0)
    return distance - weights @ targets


def distribution_function(outputs: Outputs, y: Values) -> Values:
    mean, std = outputs[..., 0], np.exp(0.5 * outputs[..., 1])
    return ndtr((y - mean) / std).mean(axis=0)


def pit_measures(pit: Values) -> Record:
    """Test whether probability integral transforms are uniform (Kolmogorov-Smirnov)."""
    test = stats.kstest(pit, "uniform")
    return {"distance": float(test.statistic), "p_value": float(test.pvalue)}


def detection(positive: Positive, negative: Negative) -> Record:
    """Compute a score's detection metrics, with confidence intervals."""
    is_positive = np.repeat([1, 0], [len(positive), len(negative)])
    scores = np.concatenate([positive, negative])
    area = float(metrics.roc_auc_score(is_positive, scores))
    # Rounding can push scikit-learn's sum above 1.
    precision = min(1.0, float(metrics.average_precision_score(is_positive, scores)))
    ends = {
        "auroc": auroc_interval(area, len(positive), len(negative)),
        "average_precision": wilson_interval(precision, len(positive)),
    }
    return {"auroc": area, "average_precision": precision, "confidence_intervals": ends}


def auroc_interval(area: float, positive: int, negative: int) -> Ends:
    """Compute a confidence interval for the AUROC, whose width is positive even for 0 or 1.

    It is Wilson's interval for the number of rows at which a share has the area's variance. The
    variance is from Newcombe, "Confidence intervals for an effect size measure based on the
    Mann-Whitney statistic. Part 2", 2006.
    """
    rows = (positive + negative) / 2.0 - 1.0
    spread = 1.0 + rows * (1.0 - area) / (2.0 - area) + rows * area / (1.0 + area)
    return wilson_interval(area, positive * negative / spread)
