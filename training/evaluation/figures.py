"""Figures of N rows that can be made of any sample of them: what they are, and their intervals.

A figure takes weights, how often each row is in each of S samples, and gives S numbers. Weights of
a sample add up to N. So a figure and its bootstrap are one function, and two versions' figures can
be compared on the same samples.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy import sparse

from training.evaluation.intervals import LEVEL, Ends, Resamples, percentiles, share_interval

Weights = Float64[np.ndarray, "S N"]
Values = Float64[np.ndarray, "S"]


class Figure(ABC):
    """A figure of N rows."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """N."""

    @abstractmethod
    def __call__(self, weights: Weights) -> Values:
        """Return the figure of each sample."""

    @abstractmethod
    def interval(self, resamples: Resamples) -> Ends:
        """Return its confidence interval."""

    @property
    def value(self) -> float:
        """The figure of the rows as they are."""
        return float(self(np.ones((1, self.rows)))[0])


@dataclass(frozen=True, eq=False)
class Share(Figure):
    """The share of rows of which something is true."""

    hits: Bool[np.ndarray, "N"]

    @property
    def rows(self) -> int:
        """N."""
        return len(self.hits)

    def __call__(self, weights: Weights) -> Values:
        """Return the share."""
        return weights @ self.hits / self.rows

    def interval(self, resamples: Resamples) -> Ends:  # noqa: ARG002
        """Return Clopper and Pearson's interval, for which no sample is needed."""
        return self.exact_interval

    @property
    def exact_interval(self) -> Ends:
        """Its confidence interval."""
        return share_interval(int(self.hits.sum()), self.rows)


@dataclass(frozen=True, eq=False)
class Mean(Figure):
    """The mean of a number that each row has."""

    values: Float64[np.ndarray, "N"]

    @property
    def rows(self) -> int:
        """N."""
        return len(self.values)

    def __call__(self, weights: Weights) -> Values:
        """Return the mean."""
        return weights @ self.values / self.rows

    def interval(self, resamples: Resamples) -> Ends:
        """Return percentiles of the samples' means."""
        return percentiles(resamples.values(self))


@dataclass(frozen=True, eq=False)
class RootMean(Figure):
    """The root of the mean of a number, 0 or more, that each row has."""

    squares: Float64[np.ndarray, "N"]

    @property
    def rows(self) -> int:
        """N."""
        return len(self.squares)

    def __call__(self, weights: Weights) -> Values:
        """Return the root of the mean."""
        return np.sqrt(weights @ self.squares / self.rows)

    def interval(self, resamples: Resamples) -> Ends:
        """Return percentiles of the samples' roots."""
        return percentiles(resamples.values(self))


@dataclass(frozen=True, eq=False)
class BinnedGap(Figure):
    """How far predicted probabilities are from what happens, bin by bin: sum_b |sum of b's rows'
    gaps| / (N T).

    Each of T tables puts every row into one of B bins, with a gap: what happened less its predicted
        probability. Bins
    stay as they are when rows are sampled.

    Where gaps are only chance the figure is above 0 all the same, the more so the fewer rows there
    are, and more so still in samples of samples: percentiles alone would leave out the true figure.
    So the interval begins the bootstrap's quantile of sum_b |gap of b in a sample - gap of b| / (N
    T) below the figure, which is the most that chance adds, and ends at the percentile, which
    chance only makes larger.
    """

    gaps: Float64[np.ndarray, "N T"]
    bins: Int64[np.ndarray, "N T"]
    num_bins: int

    @property
    def rows(self) -> int:
        """N."""
        return len(self.gaps)

    def __call__(self, weights: Weights) -> Values:
        """Return the mean distance."""
        return np.abs(self._by_bin(weights)).sum(axis=1) / self.gaps.size

    def interval(self, resamples: Resamples) -> Ends:
        """Return what the class says."""
        tail = (1.0 + LEVEL) / 2.0
        chance, sampled = np.quantile(self.chance(resamples), tail, axis=0)
        return max(0.0, self.value - float(chance)), float(sampled)

    def chance(self, resamples: Resamples) -> Float64[np.ndarray, "R 2"]:
        """Return of each sample the most that chance adds, sum_b |change of b's gap| / (N T), and
        the figure."""
        here = self._by_bin(np.ones((1, self.rows)))

        def two_sums(weights: Weights) -> Float64[np.ndarray, "S 2"]:
            by_bin = self._by_bin(weights)
            sums = np.stack([np.abs(by_bin - here).sum(axis=1), np.abs(by_bin).sum(axis=1)], axis=1)
            return sums / self.gaps.size

        return resamples.values(two_sums)

    def _by_bin(self, weights: Weights) -> Float64[np.ndarray, "S B"]:
        summed: np.ndarray = weights @ self._table
        return summed

    @cached_property
    def _table(self) -> sparse.csr_array:
        rows, tables = self.gaps.shape
        column = self.bins + self.num_bins * np.arange(tables)
        row = np.repeat(np.arange(rows), tables)
        shape = (rows, self.num_bins * tables)
        return sparse.csr_array((self.gaps.ravel(), (row, column.ravel())), shape=shape)


class RiskCoverage(Figure):
    """The area under risk against coverage, AURC:
    `training.evaluation.metrics.area_under_risk_coverage`."""

    def __init__(self, score: Float64[np.ndarray, "N"], loss: Float64[np.ndarray, "N"]) -> None:
        """Take a score by which rows are answered, the lowest first, and their loss."""
        self.order = np.argsort(score, kind="stable")
        self.loss = loss[self.order]
        self.starts = np.flatnonzero(
            np.append(True, np.diff(score[self.order]) > 0)
        )  # of rows of equal score
        self.harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, len(score) + 1))])

    @property
    def rows(self) -> int:
        """N."""
        return len(self.loss)

    def __call__(self, weights: Weights) -> Values:
        """Return the mean over coverages 1/N to 1 of the risk."""
        ordered = weights[:, self.order]
        count = np.add.reduceat(ordered, self.starts, axis=1)
        loss = np.add.reduceat(ordered * self.loss, self.starts, axis=1)
        before = np.cumsum(count, axis=1) - count
        # A group of c equal scores of mean loss m, after k rows of loss L: sum over j to c of (L +
        # j m) / (k + j).
        mean = loss / np.maximum(count, 1.0)
        lost = np.cumsum(loss, axis=1) - loss
        first = np.rint(before).astype(np.int64)
        steps = self.harmonic[first + np.rint(count).astype(np.int64)] - self.harmonic[first]
        return (count * mean + (lost - mean * before) * steps).sum(axis=1) / self.rows

    def interval(self, resamples: Resamples) -> Ends:
        """Return percentiles of the samples' areas."""
        return percentiles(resamples.values(self))
