"""Figures of N rows, such as accuracy, and their confidence intervals at a level of `LEVEL`.

A figure takes weights, how often each row is in each of S samples, and gives S numbers. Weights of
a sample add up to N. So a figure and its bootstrap are one function, and figures of two versions
can be compared on the same samples.

Intervals are for rows that are independent. They say how much a figure may change with other rows
of the same kind; the version stays the same, with its calibration. For shares of rows they are
Clopper and Pearson's, for anything else the bootstrap's, by `RESAMPLES` samples of the rows with
replacement.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt16
from scipy import sparse
from scipy.special import betaincinv

from training.seeds import EvaluationStream, generator

LEVEL = 0.95
RESAMPLES = 1000
CHUNK_NUMBERS = 4_000_000  # of resamples x rows at once

Ends = tuple[float, float]
Weights = Float64[np.ndarray, "S N"]
Values = Float64[np.ndarray, "S"]


@dataclass(frozen=True, eq=False)
class Resamples:
    """How often each of N rows is in each of R samples of N rows, drawn with replacement."""

    counts: UInt16[np.ndarray, "R N"]

    @classmethod
    def of(cls, rows: int, seed: int, resamples: int = RESAMPLES) -> "Resamples":
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
    """Return the interval of a share of rows, which holds exactly.

    Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the
    binomial", 1934; as `scipy.stats.binomtest`, which takes a thousand times as long.
    """
    tail = (1.0 - level) / 2.0
    low = 0.0 if hits == 0 else float(betaincinv(hits, rows - hits + 1, tail))
    high = 1.0 if hits == rows else float(betaincinv(hits + 1, rows - hits, 1.0 - tail))
    return low, high


class Figure(ABC):
    def __init__(self, of_rows: np.ndarray) -> None:
        self.of_rows = of_rows

    @abstractmethod
    def __call__(self, weights: Weights) -> Values: ...

    def interval(self, resamples: Resamples) -> Ends:
        return percentiles(resamples.values(self))

    @property
    def rows(self) -> int:
        return len(self.of_rows)

    @property
    def value(self) -> float:
        return float(self(np.ones((1, self.rows)))[0])


class Mean(Figure):
    def __call__(self, weights: Weights) -> Values:
        mean: np.ndarray = weights @ self.of_rows / self.rows
        return mean


class Share(Mean):
    def __init__(self, hits: Bool[np.ndarray, "N"]) -> None:
        super().__init__(hits)

    def interval(self, resamples: Resamples | None = None) -> Ends:  # noqa: ARG002
        return share_interval(int(self.of_rows.sum()), self.rows)


class RootMean(Mean):
    def __call__(self, weights: Weights) -> Values:
        return np.sqrt(super().__call__(weights))


class BinnedGap(Figure):
    """How far predicted probabilities are from what happens, bin by bin: sum_b |sum of b's rows'
    gaps| / (N T).

    Each of T tables puts every row into one of B bins, with a gap: what happened less its predicted
    probability. Bins stay as they are when rows are sampled.

    Where gaps are only chance the figure is above 0 all the same, the more so the fewer rows there
    are, and more so still in samples of samples: percentiles alone would leave out the true figure.
    So the interval begins the bootstrap's quantile of sum_b |gap of b in a sample - gap of b| / (N
    T) below the figure, which is the most that chance adds, and ends at the percentile, which
    chance only makes larger.
    """

    def __init__(
        self, gaps: Float64[np.ndarray, "N T"], bins: Int64[np.ndarray, "N T"], num_bins: int
    ) -> None:
        super().__init__(gaps)
        self.bins, self.num_bins = bins, num_bins

    def __call__(self, weights: Weights) -> Values:
        return np.abs(weights @ self._table).sum(axis=1) / self.of_rows.size

    def interval(self, resamples: Resamples) -> Ends:
        tail = (1.0 + LEVEL) / 2.0
        chance, sampled = np.quantile(self.chance(resamples), tail, axis=0)
        return max(0.0, self.value - float(chance)), float(sampled)

    def chance(self, resamples: Resamples) -> Float64[np.ndarray, "R 2"]:
        """Return of each sample the most that chance adds, sum_b |change of b's gap| / (N T), and
        the figure."""
        here = np.ones((1, self.rows)) @ self._table

        def two_sums(weights: Weights) -> Float64[np.ndarray, "S 2"]:
            by_bin = weights @ self._table
            sums = np.stack([np.abs(by_bin - here).sum(axis=1), np.abs(by_bin).sum(axis=1)], axis=1)
            return sums / self.of_rows.size

        return resamples.values(two_sums)

    @cached_property
    def _table(self) -> sparse.csr_array:
        rows, tables = self.of_rows.shape
        column = self.bins + self.num_bins * np.arange(tables)
        row = np.repeat(np.arange(rows), tables)
        shape = (rows, self.num_bins * tables)
        return sparse.csr_array((self.of_rows.ravel(), (row, column.ravel())), shape=shape)


class RiskCoverage(Figure):
    """The area under risk against coverage, AURC: the mean over coverages 1/N to 1 of the mean loss
    of the rows answered, the lowest score first. Lower is better.

    Geifman et al., "Bias-reduced uncertainty estimation for deep neural classifiers", 2019. Within
    rows of equal score it is the risk of a random order.
    """

    def __init__(self, score: Float64[np.ndarray, "N"], loss: Float64[np.ndarray, "N"]) -> None:
        self.order = np.argsort(score, kind="stable")
        super().__init__(loss[self.order])
        # of rows of equal score
        self.starts = np.flatnonzero(np.append(True, np.diff(score[self.order]) > 0))
        self.harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, len(score) + 1))])

    def __call__(self, weights: Weights) -> Values:
        ordered = weights[:, self.order]
        count = np.add.reduceat(ordered, self.starts, axis=1)
        loss = np.add.reduceat(ordered * self.of_rows, self.starts, axis=1)
        before = np.cumsum(count, axis=1) - count
        # A group of c equal scores of mean loss m, after k rows of loss L: sum over j to c of (L +
        # j m) / (k + j).
        mean = loss / np.maximum(count, 1.0)
        lost = np.cumsum(loss, axis=1) - loss
        first = np.rint(before).astype(np.int64)
        steps = self.harmonic[first + np.rint(count).astype(np.int64)] - self.harmonic[first]
        return (count * mean + (lost - mean * before) * steps).sum(axis=1) / self.rows


def values(figures: Mapping[str, Figure]) -> dict[str, float]:
    return {name: figure.value for name, figure in figures.items()}


def intervals(
    figures: Mapping[str, Figure], resamples: Resamples, path: str = ""
) -> dict[str, Ends]:
    return {f"{path}{name}": figure.interval(resamples) for name, figure in figures.items()}
