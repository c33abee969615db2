"""Two versions' figures of the same rows, compared in pairs: by how much they differ, and whether
beyond chance.

Shares of rows: of the rows of which something is true under one version only, as many are of either
version by chance (McNemar, "Note on the sampling error of the difference between correlated
proportions or percentages", 1947; here the exact, binomial test). The interval of the difference is
Tango's ("Equivalence test and confidence interval for the difference in proportions for the
paired-sample design", 1998), whose length is not 0 where no row differs. All other figures: the
bootstrap, both versions on the same samples of the rows.

Calibration errors are above 0 by chance alone, those of unsure predictions more so
(`figures.BinnedGap`). So of a version's error as much is taken off as chance may add before it
counts as more than the other's. That is careful: the interval has a length even for a version and
itself.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
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

LEAST_VARIANCE = 1e-12  # what rounding leaves of none
EDGE = 1e-6  # how near to -1 and 1 a difference is looked for


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
class Worsening:
    """By how much a figure is worse than another.

    `p_value` is how often it would look as bad by chance if it were worse by just as much as is
    allowed.
    """

    value: float
    interval: Ends
    p_value: float
    test: str


@dataclass(frozen=True)
class Pairs:
    """Of how many of `rows` rows something is true under the second version only, and under the
    first only."""

    gained: int
    lost: int
    rows: int

    @classmethod
    def of(cls, first: Share, second: Share) -> "Pairs":
        before, after = first.of_rows, second.of_rows
        return cls(int((after & ~before).sum()), int((before & ~after).sum()), len(before))

    def mcnemar(self) -> float:
        gained = Pairs(self.lost, self.gained, self.rows)
        return min(1.0, 2.0 * min(self.mcnemar_lost(), gained.mcnemar_lost()))

    def mcnemar_lost(self) -> float:
        """Return how often as many rows are lost by chance, of those that are gained or lost."""
        return float(stats.binom.sf(self.lost - 1, self.gained + self.lost, 0.5))

    def score(self, difference: float) -> float:
        """Return by how many standard deviations what was found is above a supposed difference of
        shares."""
        n, b, c = self.rows, self.gained, self.lost
        above = b - c - n * difference
        if above == 0.0 or abs(difference) >= 1.0:
            return math.copysign(math.inf, above) if above else 0.0
        linear = (2.0 * n - b + c) * difference - b - c
        constant = -c * difference * (1.0 - difference)
        # of rows lost, if the difference were true
        share = (math.sqrt(max(linear**2 - 8.0 * n * constant, 0.0)) - linear) / (4.0 * n)
        variance = n * (2.0 * share + difference * (1.0 - difference))
        return above / math.sqrt(max(variance, LEAST_VARIANCE))

    def interval(self, level: float = LEVEL) -> Ends:
        z = float(stats.norm.ppf((1.0 + level) / 2.0))
        found = (self.gained - self.lost) / self.rows
        least, most = -1.0 + EDGE, 1.0 - EDGE
        low, high = -1.0, 1.0
        if found > least:
            low = optimize.brentq(lambda d: self.score(d) - z, least, min(found, most))
        if found < most:
            high = optimize.brentq(lambda d: self.score(d) + z, max(found, least), most)
        return float(low), float(high)


def difference(first: Figure, second: Figure, resamples: Resamples) -> Difference:
    if isinstance(first, Share) and isinstance(second, Share):
        pairs = Pairs.of(first, second)
        return Difference(first.value, second.value, pairs.interval(), pairs.mcnemar(), "mcnemar")
    least, most = _excess(first, second, resamples)
    p_value = min(1.0, 2.0 * min(_tail(least <= 0.0), _tail(most >= 0.0)))
    ends = percentiles(least)[0], percentiles(most)[1]
    return Difference(first.value, second.value, ends, p_value, "bootstrap")


def worsening(
    metric: str, figure: Figure, other: Figure, allowed: float, resamples: Resamples
) -> Worsening:
    value = worse_by(metric, figure.value, other.value)
    better = BETTER[metric]
    if isinstance(figure, Share) and isinstance(other, Share) and isinstance(better, str):
        pairs = Pairs.of(other, figure) if better == "more" else Pairs.of(figure, other)
        low, high = pairs.interval()
        if allowed > 0:
            p_value = float(stats.norm.cdf(pairs.score(-allowed)))
            return Worsening(value, (-high, -low), p_value, "score")
        return Worsening(value, (-high, -low), pairs.mcnemar_lost(), "mcnemar")
    if better == "less":
        least, most = _excess(other, figure, resamples)
    else:
        least = most = worse_by_each(metric, resamples.values(figure), resamples.values(other))
    ends = percentiles(least)[0], percentiles(most)[1]
    return Worsening(value, ends, _tail(least <= allowed), "bootstrap")


def _excess(first: Figure, second: Figure, resamples: Resamples) -> tuple[Values, Values]:
    """Return by how much the second figure is above the first in each sample, at least and at
    most."""
    if not (isinstance(first, BinnedGap) and isinstance(second, BinnedGap)):
        sampled = resamples.values(second) - resamples.values(first)
        return sampled, sampled
    (chance, of_first), (its_chance, of_second) = (
        figure.chance(resamples).T for figure in (first, second)
    )
    least = (second.value - its_chance) - (2.0 * first.value - of_first)
    most = (2.0 * second.value - of_second) - (first.value - chance)
    return least, most


def worse_by(metric: str, value: float, other: float) -> float:
    return float(worse_by_each(metric, np.array([value]), np.array([other]))[0])


def worse_by_each(
    metric: str, values: Float64[np.ndarray, "R"], others: Float64[np.ndarray, "R"]
) -> Float64[np.ndarray, "R"]:
    better = BETTER[metric]
    if better == "more":
        return others - values
    if better == "less":
        return values - others
    return np.abs(values - better) - np.abs(others - better)


def _tail(is_beyond: np.ndarray) -> float:
    """Return a p-value: the share of samples, the rows themselves counted as one."""
    return float((1 + np.count_nonzero(is_beyond)) / (len(is_beyond) + 1))
