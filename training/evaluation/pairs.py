"""Paired tests and intervals for two versions on the same rows.

Shares of rows use the exact, binomial test of McNemar ("Note on the sampling error of the
difference between correlated proportions or percentages", 1947) and the interval of Tango
("Equivalence test and confidence interval for the difference in proportions for the paired-sample
design", 1998), which has a positive width even if the versions agree on every row. All other
figures use the bootstrap, with the same samples of rows for both versions.

Chance alone raises calibration errors above 0, especially for uncertain predictions
(`figures.BinnedGap`). The comparison subtracts a bound on this bias, so it is conservative.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from training.evaluation.figures import (
    LEVEL,
    BinnedGap,
    Ends,
    Figure,
    Resamples,
    Share,
    Values,
    percentiles,
)
from training.recipe import BETTER

MIN_VARIANCE = 1e-12  # absorbs rounding
EDGE = 1e-6  # the root search stays this far from -1 and 1


@dataclass(frozen=True)
class Difference:
    first: float
    second: float
    interval: Ends
    p_value: float  # two-sided
    test: str  # mcnemar or bootstrap

    @property
    def value(self) -> float:
        return self.second - self.first


@dataclass(frozen=True)
class Pairs:
    """The numbers of rows that only one of two versions predicts correctly."""

    gained: int  # hits of the second version only
    lost: int  # hits of the first version only
    rows: int

    @classmethod
    def count(cls, first: Share, second: Share) -> "Pairs":
        before, after = first.row_values, second.row_values
        return cls(int((after & ~before).sum()), int((before & ~after).sum()), len(before))

    def mcnemar(self) -> float:
        """Compute the two-sided McNemar p-value."""
        rows = self.gained + self.lost
        return float(stats.binomtest(self.lost, rows).pvalue) if rows else 1.0

    def score(self, difference: float) -> float:
        """Compute Tango's score statistic for a hypothesised difference in proportions."""
        n, b, c = self.rows, self.gained, self.lost
        above = b - c - n * difference
        if above == 0.0 or abs(difference) >= 1.0:
            return math.copysign(math.inf, above) if above else 0.0
        linear = (2.0 * n - b + c) * difference - b - c
        constant = -c * difference * (1.0 - difference)
        # The maximum-likelihood share of lost rows under the supposed difference.
        share = (math.sqrt(max(linear**2 - 8.0 * n * constant, 0.0)) - linear) / (4.0 * n)
        variance = n * (2.0 * share + difference * (1.0 - difference))
        return above / math.sqrt(max(variance, MIN_VARIANCE))

    def interval(self, level: float = LEVEL) -> Ends:
        z = float(stats.norm.ppf((1.0 + level) / 2.0))
        estimate = (self.gained - self.lost) / self.rows
        start, end = -1.0 + EDGE, 1.0 - EDGE
        low, high = -1.0, 1.0
        if estimate > start:
            low = optimize.brentq(lambda d: self.score(d) - z, start, min(estimate, end))
        if estimate < end:
            high = optimize.brentq(lambda d: self.score(d) + z, max(estimate, start), end)
        return float(low), float(high)


def difference(first: Figure, second: Figure, resamples: Resamples) -> Difference:
    if isinstance(first, Share) and isinstance(second, Share):
        pairs = Pairs.count(first, second)
        return Difference(first.value, second.value, pairs.interval(), pairs.mcnemar(), "mcnemar")
    lower, upper = _excess(first, second, resamples)
    p_value = min(1.0, 2.0 * min(_tail(lower <= 0.0), _tail(upper >= 0.0)))
    ends = percentiles(lower)[0], percentiles(upper)[1]
    return Difference(first.value, second.value, ends, p_value, "bootstrap")


def measure_loss(
    metric: str, figure: Figure, baseline: Figure, resamples: Resamples
) -> tuple[float, Ends]:
    """Compute by how much a figure is worse than a baseline, with an interval."""
    better = BETTER[metric]
    if isinstance(better, float):
        sampled, values = (
            np.abs(new - better) - np.abs(old - better)
            for new, old in (
                (resamples.values(figure), resamples.values(baseline)),
                (figure.value, baseline.value),
            )
        )
        return float(values), percentiles(sampled)
    if better == "less":
        change = difference(baseline, figure, resamples)
    else:
        change = difference(figure, baseline, resamples)
    return change.value, change.interval


def _excess(first: Figure, second: Figure, resamples: Resamples) -> tuple[Values, Values]:
    if not (isinstance(first, BinnedGap) and isinstance(second, BinnedGap)):
        sampled = resamples.values(second) - resamples.values(first)
        return sampled, sampled
    first_chance, first_sampled = first.chance(resamples).T
    second_chance, second_sampled = second.chance(resamples).T
    lower = (second.value - second_chance) - (2.0 * first.value - first_sampled)
    upper = (2.0 * second.value - second_sampled) - (first.value - first_chance)
    return lower, upper


def _tail(is_extreme: np.ndarray) -> float:
    """Compute a bootstrap p-value, counting the observed data as one sample."""
    return float((1 + np.count_nonzero(is_extreme)) / (len(is_extreme) + 1))
