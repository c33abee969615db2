"""Metrics such as accuracy, with confidence intervals.

A figure maps weights of shape (S, N) to S numbers. The weights count each row in each of S samples
of N rows. So the same function computes the figure and its bootstrap, and two versions can be
compared on the same samples.

A record contains figures and facts about rows, and in `confidence_intervals` the interval of each
figure by its name, or by its path if it is nested, such as `flagged.0.05`. Shares are from 0 to 1.

Intervals have level `LEVEL`. They assume independent rows, and a fixed version and calibration.
Shares use Clopper-Pearson intervals. All other figures use `RESAMPLES` bootstrap samples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt16
from scipy import sparse
from scipy.special import betaincinv

from training.seeds import EvaluationStream, generator

LEVEL = 0.95
RESAMPLES = 1000
CHUNK_NUMBERS = 4_000_000  # resamples x rows in one pass

Ends = tuple[float, float]
Record = dict[str, Any]  # a part of `report.json`
Weights = Float64[np.ndarray, "S N"]
Values = Float64[np.ndarray, "S"]


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


def share_interval(hits: int, rows: int, level: float = LEVEL) -> Ends:
    """Compute the exact Clopper-Pearson interval for a proportion.

    Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the
    binomial", 1934. It equals the interval of `scipy.stats.binomtest`, but is computed a thousand
    times faster.
    """
    tail = (1.0 - level) / 2.0
    low = 0.0 if hits == 0 else float(betaincinv(hits, rows - hits + 1, tail))
    high = 1.0 if hits == rows else float(betaincinv(hits + 1, rows - hits, 1.0 - tail))
    return low, high


class Figure(ABC):
    def __init__(self, row_values: np.ndarray) -> None:
        self.row_values = row_values

    @abstractmethod
    def __call__(self, weights: Weights) -> Values: ...

    def interval(self, resamples: Resamples) -> Ends:
        return percentiles(resamples.values(self))

    @property
    def rows(self) -> int:
        return len(self.row_values)

    @property
    def value(self) -> float:
        return float(self(np.ones((1, self.rows)))[0])


class Mean(Figure):
    def __call__(self, weights: Weights) -> Values:
        mean: np.ndarray = weights @ self.row_values / self.rows
        return mean


class Share(Mean):
    def __init__(self, hits: Bool[np.ndarray, "N"]) -> None:
        super().__init__(hits)

    def interval(self, resamples: Resamples | None = None) -> Ends:  # noqa: ARG002
        return share_interval(int(self.row_values.sum()), self.rows)


class RootMean(Mean):
    def __call__(self, weights: Weights) -> Values:
        return np.sqrt(super().__call__(weights))


class BinnedGap(Figure):
    """The calibration error sum_b |G_b| / (N T), where G_b sums the gaps in bin b.

    A gap is an outcome (0 or 1) minus its predicted probability. Each of T tables assigns every row
    to one of B bins. Resampling does not change the bins.

    Chance biases the figure upwards, more with fewer rows, and again in each bootstrap sample. So
    percentiles alone would exclude the true figure. The interval's lower end is therefore the
    figure minus the bootstrap quantile of sum_b |G_b in the sample - G_b| / (N T), an upper bound
    on the bias. The upper end is the percentile, which the bias only raises.
    """

    def __init__(
        self, gaps: Float64[np.ndarray, "N T"], bins: Int64[np.ndarray, "N T"], num_bins: int
    ) -> None:
        super().__init__(gaps)
        self.bins, self.num_bins = bins, num_bins

    def __call__(self, weights: Weights) -> Values:
        return np.abs(weights @ self._table).sum(axis=1) / self.row_values.size

    def interval(self, resamples: Resamples) -> Ends:
        tail = (1.0 + LEVEL) / 2.0
        chance, sampled = np.quantile(self.chance(resamples), tail, axis=0)
        return max(0.0, self.value - float(chance)), float(sampled)

    def chance(self, resamples: Resamples) -> Float64[np.ndarray, "R 2"]:
        """Compute the bound on the bias, and the figure, for each bootstrap sample."""
        full = np.ones((1, self.rows)) @ self._table

        def two_sums(weights: Weights) -> Float64[np.ndarray, "S 2"]:
            by_bin = weights @ self._table
            sums = np.stack([np.abs(by_bin - full).sum(axis=1), np.abs(by_bin).sum(axis=1)], axis=1)
            return sums / self.row_values.size

        return resamples.values(two_sums)

    @cached_property
    def _table(self) -> sparse.csr_array:
        rows, tables = self.row_values.shape
        column = self.bins + self.num_bins * np.arange(tables)
        row = np.repeat(np.arange(rows), tables)
        shape = (rows, self.num_bins * tables)
        return sparse.csr_array((self.row_values.ravel(), (row, column.ravel())), shape=shape)


class RiskCoverage(Figure):
    """The area under the risk-coverage curve (AURC); lower is better.

    It is the mean over coverages 1/N to 1 of the mean loss of the answered rows, lowest scores
    first (Geifman et al., "Bias-reduced uncertainty estimation for deep neural classifiers", 2019).
    Rows of equal score count as in a random order.
    """

    def __init__(self, score: Float64[np.ndarray, "N"], loss: Float64[np.ndarray, "N"]) -> None:
        self.order = np.argsort(score, kind="stable")
        super().__init__(loss[self.order])
        # Rows of equal score form a group.
        self.starts = np.flatnonzero(np.append(True, np.diff(score[self.order]) > 0))
        self.harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, len(score) + 1))])

    def __call__(self, weights: Weights) -> Values:
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
