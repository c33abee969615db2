"""What new rows are ranked among, and what that says of them: p-values, prediction sets, intervals,
abstention.

A row's p-value is (1 + #{calibration rows at least as surprising}) / (m + 1):
`model_store.conformal.calibration` says when it holds. Where a model is calibrated by category
there are tables of each category's rows too: `model_store.conformal.mondrian`.

**Sets and intervals** (split conformal prediction). Each of n calibration rows has a
*nonconformity*: a larger one means that the truth is farther from the prediction. A set or interval
holds whatever has a nonconformity of at most q, the ceil((n + 1) coverage)-th smallest of them. For
inputs exchangeable with the calibration rows it holds the truth with a probability of at least
`coverage`, and of at most coverage + 1 / (n + 1) if no two nonconformities are equal (Vovk,
Gammerman and Shafer, "Algorithmic learning in a random world", 2005; Lei et al., "Distribution-free
predictive inference for regression", 2018, theorem 2.2).

That is on average over the choice of calibration rows. With a `confidence` q is a larger one of
them, such that the coverage of the sets, which differs from one choice of calibration rows to
another, is at least `coverage` with that probability (training-conditional or PAC coverage: Vovk,
"Conditional validity of inductive conformal predictors", 2012, proposition 2a). Where rows are
independent, the coverage of q = the k-th smallest is at least a variable of law Beta(k, n + 1 - k),
so k is the smallest of which P(Binomial(n, coverage) <= k - 1) >= confidence.

**Classes.** A class's nonconformity is the mass above it, the sum of the probabilities of all
classes more probable than it: 0 of the most probable class. So a set is made of the most probable
classes, as many as it takes for their mass to exceed q, and is never empty. These are the adaptive
sets of Romano, Sesia and Candes, "Classification with valid and adaptive coverage", 2020, without
their random number: nothing but the row and its draws decides a set. Rows whose label is right all
have nonconformity 0: of a `coverage` below the model's accuracy the set is the label alone, and
holds the truth as often as the label is right.

**Numbers.** A target's nonconformity is |y - mean| / std, and the interval mean -/+ q std (Lei et
al. 2018, section 5.2). Where a target was fitted as z = g(y), increasing, y, mean and std here are
those of z, and the interval's ends are turned back: y lies between them exactly where z lies in the
interval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from model_store.conformal.abstention import NOTHING, Abstention
from model_store.conformal.mondrian import UNKNOWN, CategoryKind, cautious

KEPT_THRESHOLDS = 1024  # by rate and risk
KEPT_RANKS = 1024  # by rows, coverage and confidence
RANK_ROUNDING = 1e-9
# so that a p-value that is its bound counts as no more than it
ROUNDING = 4 * float(np.finfo(np.float64).eps)

Values = Float64[np.ndarray, "N"]
Numbers = Int64[np.ndarray, "N"]


@dataclass(frozen=True, eq=False)
class ConformalPValues:
    """What the detectors say of N rows. P-values lie in (0, 1]; small ones mean unlike the
    calibration data."""

    p_value: Values
    detector_p_values: dict[str, Values]


@dataclass(frozen=True, eq=False)
class RankTables:
    """The calibration rows under one number of draws: what new rows are ranked among.

    `statistic`, `nonconformity` and the surprisals are sorted. Where there are categories,
    `by_category` has the tables of each one's rows; what is asked of rows with their `categories`
    is then answered by these, and of those of an `UNKNOWN` one by the most cautious.
    """

    num_draws: int
    statistic: Float64[np.ndarray, "m"]
    surprisals: dict[str, Float64[np.ndarray, "m"]]
    # of the m rows, in a category by class of those that are truly of it
    nonconformity: Float64[np.ndarray, "t"]
    abstention: Abstention | None  # of a classification
    kind: CategoryKind | None = None
    by_category: tuple["RankTables", ...] = ()

    def p_values(
        self, statistic: Values, surprisals: dict[str, Values], categories: Numbers | None = None
    ) -> ConformalPValues:
        """Return p-values of N rows, given the flag's statistic and each detector's surprisal.

        With categories they are ranks among the rows of each row's own.
        """
        if categories is not None and self.by_category:
            empty = {name: np.empty(len(statistic)) for name in surprisals}
            p_values = ConformalPValues(np.empty(len(statistic)), empty)
            for category in np.unique(categories).tolist():
                here = categories == category
                of_these = {name: surprisal[here] for name, surprisal in surprisals.items()}
                tables = self._cautious if category == UNKNOWN else (self.by_category[category],)
                parts = [table.p_values(statistic[here], of_these) for table in tables]
                p_values.p_value[here] = np.max([part.p_value for part in parts], axis=0)
                for name, p_value in p_values.detector_p_values.items():
                    p_value[here] = np.max([part.detector_p_values[name] for part in parts], axis=0)
            return p_values
        return ConformalPValues(
            conformal_p_value(statistic, self.statistic),
            {
                name: conformal_p_value(surprisal, self.surprisals[name])
                for name, surprisal in surprisals.items()
            },
        )

    def prediction_sets(
        self,
        mass: Float64[np.ndarray, "N C"],
        coverage: float,
        confidence: float | None = None,
        categories: Numbers | None = None,
    ) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set, given the mass above each: all
        where there are too few calibration rows.

        By class each class is compared with the rows that are truly of it, whatever the rows' own
        categories.
        """
        if self.kind is None:
            return mass <= quantile(self.nonconformity, coverage, confidence)
        quantiles = self._quantiles(coverage, confidence)
        if self.kind == "class":
            return mass <= quantiles[:-1]
        return mass <= quantiles[_or_unknown(categories, len(mass))][:, None]

    def intervals(
        self,
        mean: Values,
        std: Values,
        coverage: float,
        confidence: float | None = None,
        categories: Numbers | None = None,
    ) -> Float64[np.ndarray, "N 2"]:
        """Return the lower and upper end of each row's interval, given mean and std.

        They are infinite where there are too few calibration rows for `coverage`.
        """
        q: Values | float
        if self.kind is None:
            q = quantile(self.nonconformity, coverage, confidence)
        else:
            of_each = self._quantiles(coverage, confidence)
            q = of_each[_or_unknown(categories, len(mean))]
        half = q * std
        return np.stack([mean - half, mean + half], axis=1)

    def _quantiles(self, coverage: float, confidence: float | None) -> Float64[np.ndarray, "G1"]:
        found, cautious = (
            [quantile(table.nonconformity, coverage, confidence) for table in tables]
            for tables in (self.by_category, self._cautious)
        )
        return np.array([*found, max(cautious)])

    @cached_property
    def _cautious(self) -> tuple["RankTables", ...]:
        rows = [len(table.statistic) for table in self.by_category]
        return tuple(self.by_category[c] for c in cautious(rows))

    def thresholds(
        self, fpr: float, risk: float, categories: Numbers | None = None
    ) -> Values | float:
        if self.kind is None or categories is None:
            return self.largest_uncertainty(fpr, risk)
        found = np.full(len(self.by_category) + 1, NOTHING)
        for c in np.unique(categories[categories != UNKNOWN]).tolist():
            found[c] = self.by_category[c].largest_uncertainty(fpr, risk)
        return found[categories]

    def certifies(self, fpr: float, risk: float) -> bool:
        tables = self.by_category or (self,)
        return any(table.largest_uncertainty(fpr, risk) != NOTHING for table in tables)

    @cached_property
    def largest_uncertainty(self) -> Callable[[float, float], float]:
        return lru_cache(maxsize=KEPT_THRESHOLDS)(
            lambda fpr, risk: self._abstention().threshold(self.flagged(fpr), risk)
        )

    def smallest_risk(self, fpr: float) -> float:
        if self.by_category:
            return min(table.smallest_risk(fpr) for table in self.by_category)
        return self._abstention().smallest_risk(self.flagged(fpr))

    def flagged(self, fpr: float) -> int:
        rows = len(self.statistic)
        return int((np.arange(1, rows + 1) / (rows + 1)).searchsorted(fpr, side="right"))

    def _abstention(self) -> Abstention:
        if self.abstention is None:
            expected = "a calibration with answers that are right or wrong"
            raise ValueError(f"expected {expected}, got one without")
        return self.abstention


def _or_unknown(categories: Numbers | None, rows: int) -> Numbers:
    return np.full(rows, UNKNOWN) if categories is None else categories


def conformal_p_value(score: Values, calibration: Float64[np.ndarray, "n"]) -> Values:
    """Return (1 + #{calibration >= score}) / (n + 1), `calibration` sorted."""
    n = len(calibration)
    return (n + 1 - calibration.searchsorted(score)) / (n + 1)


def benjamini_hochberg(p_values: Values, fdr: float) -> Bool[np.ndarray, "N"]:
    """Return which rows to flag together at a false discovery rate of `fdr`, in (0, 1): E[(flagged
    rows that are like the calibration data) / max(flagged rows, 1)].

    Those whose p-value is at most the largest p_(k) <= fdr k / N, p_(1) <= ... <= p_(N) being the
    sorted p-values (Benjamini and Hochberg, "Controlling the false discovery rate", 1995).
    Conformal p-values of rows that are independent given the calibration data depend on each other
    through these, positively (PRDS), and then the rate is at most fdr times the share of rows that
    are like the calibration data (Benjamini and Yekutieli 2001; Bates, Candes, Lei, Romano and
    Sesia, "Testing for outliers with conformal p-values", 2023).
    """
    rows = len(p_values)
    ordered = np.sort(p_values)
    below = np.flatnonzero(ordered <= (1.0 + ROUNDING) * fdr * np.arange(1, rows + 1) / rows)
    return p_values <= (ordered[below[-1]] if len(below) else 0.0)


def mass_above(probs: Float64[np.ndarray, "N C"]) -> Float64[np.ndarray, "N C"]:
    """Return for each row and class the probability of all classes more probable than it, from 0 to
    1.

    Of classes with equal probabilities the first counts as more probable.
    """
    order = np.argsort(-probs, axis=1, kind="stable")
    # 1 - the mass of a class and all below it: a row's classes differ even where the first's
    # probability rounds to 1.
    rows = np.arange(len(probs))[:, None]
    rest = probs[rows, order[:, ::-1]].cumsum(axis=1)[:, ::-1]
    sorted_mass = np.maximum(1.0 - rest, 0.0)
    sorted_mass[:, 0] = 0.0
    mass = np.empty_like(probs)
    mass[rows, order] = sorted_mass
    return mass


def class_nonconformity(
    probs: Float64[np.ndarray, "N C"], labels: Int64[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    return mass_above(probs)[np.arange(len(labels)), labels]


def target_nonconformity(
    mean: Float64[np.ndarray, "N"], std: Float64[np.ndarray, "N"], y: Float[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    return np.abs(y - mean) / std


def quantile(
    nonconformity: Float64[np.ndarray, "n"], coverage: float, confidence: float | None = None
) -> float:
    """Return q, of sorted nonconformities; infinite where they are too few."""
    rows = len(nonconformity)
    if confidence is None:
        rank = coverage_rank(rows, coverage)
    else:
        rank = confident_rank(rows, coverage, confidence)
    return math.inf if rank > rows else float(nonconformity[rank - 1])


def coverage_rank(rows: int, coverage: float) -> int:
    """Return which of `rows` sorted nonconformities q is, from 1; `rows` + 1 or more where they are
    too few."""
    return math.ceil((rows + 1) * coverage * (1.0 - RANK_ROUNDING))


@lru_cache(maxsize=KEPT_RANKS)
def confident_rank(rows: int, coverage: float, confidence: float) -> int:
    """Return the same such that coverage is kept with a confidence; never less than without one.

    Coverage and confidence are in (0, 1).
    """
    ranks = np.arange(1, rows + 1)
    log_factorial = np.concatenate([[0.0], np.log(ranks).cumsum()])
    log_pmf = log_factorial[rows] - log_factorial[ranks] - log_factorial[rows - ranks]
    log_pmf += ranks * math.log(coverage) + (rows - ranks) * math.log1p(-coverage)
    # P(Binomial >= k): that coverage is less, for each rank k
    missed = np.exp(log_pmf)[::-1].cumsum()[::-1]
    enough = np.flatnonzero(missed <= (1.0 + RANK_ROUNDING) * (1.0 - confidence))
    return max(coverage_rank(rows, coverage), int(enough[0]) + 1) if len(enough) else rows + 1


def largest_coverage(rows: int, confidence: float) -> float:
    """Return the largest coverage that calibration rows can keep with a confidence, and on
    average."""
    return float(min((1.0 - confidence) ** (1.0 / rows), rows / (rows + 1.0)))
