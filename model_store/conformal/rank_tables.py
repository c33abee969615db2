"""Compute p-values, prediction sets and intervals from ranks among calibration rows.

A row's p-value is (1 + #{calibration rows at least as surprising}) / (m + 1); see
`model_store.conformal.calibration` for its guarantee. A model with categories also has a table of
the rows of each category (`model_store.conformal.mondrian`).

**Sets and intervals** (split conformal prediction). Each of n calibration rows has a
*nonconformity*, which is larger if the truth is farther from the prediction. A set or interval
contains every value with a nonconformity up to q, the ceil((n + 1) coverage)-th smallest. For
inputs exchangeable with the calibration rows, it contains the truth with probability `coverage` or
more, and coverage + 1 / (n + 1) or less if all nonconformities differ (Vovk, Gammerman and Shafer,
"Algorithmic learning in a random world", 2005; Lei et al., "Distribution-free predictive inference
for regression", 2018, theorem 2.2).

This probability is an average over calibration splits. With a `confidence`, q is larger, so that
the sets' coverage given the calibration split is `coverage` or more with that confidence
(training-conditional or PAC coverage: Vovk, "Conditional validity of inductive conformal
predictors", 2012, proposition 2a). For independent rows and q = the k-th smallest, the coverage is
stochastically at least Beta(k, n + 1 - k). So k is the smallest number with
P(Binomial(n, coverage) <= k - 1) >= confidence.

**Classes.** The nonconformity of a class is the mass above it: the sum of the probabilities of all
more probable classes. For the most probable class it is 0. So a set consists of the most probable
classes until their mass exceeds q, and is never empty. These are the adaptive sets of Romano, Sesia
and Candes, "Classification with valid and adaptive coverage", 2020, without randomisation: only the
row and its draws determine a set. All rows with a correct label have nonconformity 0. So if
`coverage` is below the model's accuracy, the set is the label alone, and its coverage is the
accuracy.

**Numbers.** The nonconformity of a target is |y - mean| / std, and the interval is mean -/+ q std
(Lei et al. 2018, section 5.2). If the model was fitted to z = g(y) with increasing g, then y, mean
and std belong to z, and the interval's ends are transformed back. y lies between these ends if and
only if z lies in the interval.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from model_store.conformal.abstention import NO_THRESHOLD, Abstention
from model_store.conformal.mondrian import UNKNOWN, CategoryKind, cautious_categories

MAX_CACHED_THRESHOLDS = 1024  # pairs of fpr and risk
MAX_CACHED_RANKS = 1024  # triples of rows, coverage and confidence
RANK_ROUNDING = 1e-9
# Relative tolerance, so that a p-value equal to its bound does not exceed it
ROUNDING = 4 * float(np.finfo(np.float64).eps)

Values = Float64[np.ndarray, "N"]
Numbers = Int64[np.ndarray, "N"]


@dataclass(frozen=True, eq=False)
class ConformalPValues:
    """The p-values of N rows, in (0, 1]. Small values indicate unusual rows."""

    p_value: Values
    detector_p_values: dict[str, Values]


@dataclass(frozen=True, eq=False)
class RankTables:
    """The sorted calibration rows for one draw count.

    `by_category` has a table of the rows of each category, if there are categories. Methods with an
    argument `categories` use the table of each row's category. For `UNKNOWN` they use the most
    cautious result of several tables.
    """

    num_draws: int
    statistic: Float64[np.ndarray, "m"]
    surprisals: dict[str, Float64[np.ndarray, "m"]]
    # In a category by class: of the rows with that true class
    nonconformity: Float64[np.ndarray, "t"]
    abstention: Abstention | None  # only in a classification
    kind: CategoryKind | None = None
    by_category: tuple["RankTables", ...] = ()

    def p_values(
        self, statistic: Values, surprisals: dict[str, Values], categories: Numbers | None = None
    ) -> ConformalPValues:
        if categories is not None and self.by_category:
            empty = {name: np.empty(len(statistic)) for name in surprisals}
            p_values = ConformalPValues(np.empty(len(statistic)), empty)
            for category in np.unique(categories).tolist():
                rows = categories == category
                row_surprisals = {name: surprisal[rows] for name, surprisal in surprisals.items()}
                tables = self._cautious if category == UNKNOWN else (self.by_category[category],)
                parts = [table.p_values(statistic[rows], row_surprisals) for table in tables]
                p_values.p_value[rows] = np.max([part.p_value for part in parts], axis=0)
                for name, p_value in p_values.detector_p_values.items():
                    p_value[rows] = np.max([part.detector_p_values[name] for part in parts], axis=0)
            return p_values
        by_detector = {n: conformal_p_value(s, self.surprisals[n]) for n, s in surprisals.items()}
        return ConformalPValues(conformal_p_value(statistic, self.statistic), by_detector)

    def prediction_sets(
        self,
        mass: Float64[np.ndarray, "N C"],
        coverage: float,
        confidence: float | None = None,
        categories: Numbers | None = None,
    ) -> Bool[np.ndarray, "N C"]:
        """Compute each row's prediction set from the total probability of more probable classes.

        Sets contain all classes if there are too few calibration rows. With categories by class,
        `categories` is not used: each class is compared with the calibration rows of that class.
        """
        if self.kind == "class":
            tables = self.by_category
            return mass <= [quantile(t.nonconformity, coverage, confidence) for t in tables]
        return mass <= self._quantiles(len(mass), coverage, confidence, categories)[:, None]

    def intervals(
        self,
        mean: Values,
        std: Values,
        coverage: float,
        confidence: float | None = None,
        categories: Numbers | None = None,
    ) -> Float64[np.ndarray, "N 2"]:
        """Compute prediction intervals. They are infinite if there are too few calibration rows."""
        half_width = self._quantiles(len(mean), coverage, confidence, categories) * std
        return np.stack([mean - half_width, mean + half_width], axis=1)

    def _quantiles(
        self, rows: int, coverage: float, confidence: float | None, categories: Numbers | None
    ) -> Values:
        if self.kind is None:
            return np.full(rows, quantile(self.nonconformity, coverage, confidence))
        quantiles, cautious = (
            [quantile(table.nonconformity, coverage, confidence) for table in tables]
            for tables in (self.by_category, self._cautious)
        )
        index = np.full(rows, UNKNOWN) if categories is None else categories
        return np.array([*quantiles, max(cautious)])[index]

    @cached_property
    def _cautious(self) -> tuple["RankTables", ...]:
        rows = [len(table.statistic) for table in self.by_category]
        return tuple(self.by_category[c] for c in cautious_categories(rows))

    def flag_levels(
        self, fpr: float, confidence: float | None = None, categories: Numbers | None = None
    ) -> Values | float:
        """Return the largest p-value at which the flag fires.

        At level h / (n + 1), the flag's rate given the calibration rows is distributed as
        Beta(h, n + 1 - h). With a confidence, h is the largest number for which this rate stays
        within fpr with that confidence (Bates et al. 2023, section 3; here for a single fpr).
        """
        if confidence is None:
            return fpr
        if self.kind is None or categories is None:
            rows = len(self.statistic)
            return (rows + 1 - confident_rank(rows, 1.0 - fpr, confidence)) / (rows + 1)
        levels, cautious = (
            [table.flag_levels(fpr, confidence) for table in tables]
            for tables in (self.by_category, self._cautious)
        )
        return np.array([*levels, min(cautious)])[categories]

    def thresholds(
        self,
        fpr: float,
        risk: float,
        categories: Numbers | None = None,
        confidence: float | None = None,
    ) -> Values | float:
        if self.kind is None or categories is None:
            return self.largest_uncertainty(fpr, risk, confidence)
        thresholds = np.full(len(self.by_category) + 1, NO_THRESHOLD)
        for c in np.unique(categories[categories != UNKNOWN]).tolist():
            thresholds[c] = self.by_category[c].largest_uncertainty(fpr, risk, confidence)
        return thresholds[categories]

    def certifies(self, fpr: float, risk: float, confidence: float | None = None) -> bool:
        tables = self.by_category or (self,)
        thresholds = (table.largest_uncertainty(fpr, risk, confidence) for table in tables)
        return any(threshold != NO_THRESHOLD for threshold in thresholds)

    @cached_property
    def largest_uncertainty(self) -> Callable[..., float]:
        return lru_cache(maxsize=MAX_CACHED_THRESHOLDS)(
            lambda fpr, risk, confidence=None: self._abstention().threshold(
                self.count_flagged(fpr, confidence), risk
            )
        )

    def smallest_risk(
        self, fpr: float, confidence: float | None = None, above: float = 0.0
    ) -> float:
        if self.by_category:
            return min(table.smallest_risk(fpr, confidence, above) for table in self.by_category)
        return self._abstention().smallest_risk(self.count_flagged(fpr, confidence), above)

    def count_flagged(self, fpr: float, confidence: float | None = None) -> int:
        rows, level = len(self.statistic), self.flag_levels(fpr, confidence)
        return int((np.arange(1, rows + 1) / (rows + 1)).searchsorted(level, side="right"))

    def _abstention(self) -> Abstention:
        assert self.abstention is not None
        return self.abstention


def conformal_p_value(score: Values, calibration: Float64[np.ndarray, "n"]) -> Values:
    """Compute (1 + #{calibration >= score}) / (n + 1). `calibration` must be sorted."""
    n = len(calibration)
    return (n + 1 - calibration.searchsorted(score)) / (n + 1)


def benjamini_hochberg(p_values: Values, fdr: float) -> Bool[np.ndarray, "N"]:
    """Select the rows to flag with the Benjamini-Hochberg procedure.

    The rate is E[(flagged rows like the calibration data) / max(flagged rows, 1)]. With sorted
    p-values p_(1) <= ... <= p_(N), the procedure flags all rows with p-values up to the largest
    p_(k) <= fdr k / N (Benjamini and Hochberg, "Controlling the false discovery rate", 1995). Rows
    that are independent given the calibration data have positively dependent conformal p-values
    (PRDS). Then the rate does not exceed fdr times the share of rows like the calibration data
    (Benjamini and Yekutieli 2001; Bates, Candes, Lei, Romano and Sesia, "Testing for outliers with
    conformal p-values", 2023).
    """
    rows = len(p_values)
    ordered = np.sort(p_values)
    ranks = np.flatnonzero(ordered <= (1.0 + ROUNDING) * fdr * np.arange(1, rows + 1) / rows)
    return p_values <= (ordered[ranks[-1]] if len(ranks) else 0.0)


def mass_above(probs: Float64[np.ndarray, "N C"]) -> Float64[np.ndarray, "N C"]:
    """Compute the total probability of all classes that are more probable than each class.

    Among classes with equal probabilities, the first counts as more probable.
    """
    order = np.argsort(-probs, axis=1, kind="stable")
    # Subtracting the mass of less probable classes from 1 distinguishes classes even if the
    # first probability rounds to 1.
    rows = np.arange(len(probs))[:, None]
    mass_below = probs[rows, order[:, ::-1]].cumsum(axis=1)[:, ::-1]
    sorted_mass = np.maximum(1.0 - mass_below, 0.0)
    sorted_mass[:, 0] = 0.0
    mass = np.empty_like(probs)
    mass[rows, order] = sorted_mass
    return mass


def class_nonconformity(probs: Float64[np.ndarray, "N C"], labels: Numbers) -> Values:
    return mass_above(probs)[np.arange(len(labels)), labels]


def target_nonconformity(mean: Values, std: Values, y: Float[np.ndarray, "N"]) -> Values:
    return np.abs(y - mean) / std


def quantile(
    nonconformity: Float64[np.ndarray, "n"], coverage: float, confidence: float | None = None
) -> float:
    """Return the quantile q of sorted nonconformity scores, or infinity for too few scores."""
    rows = len(nonconformity)
    if confidence is None:
        rank = coverage_rank(rows, coverage)
    else:
        rank = confident_rank(rows, coverage, confidence)
    return math.inf if rank > rows else float(nonconformity[rank - 1])


def coverage_rank(rows: int, coverage: float) -> int:
    """Compute the rank of q for a coverage. It exceeds `rows` if there are too few rows."""
    return math.ceil((rows + 1) * coverage * (1.0 - RANK_ROUNDING))


@lru_cache(maxsize=MAX_CACHED_RANKS)
def confident_rank(rows: int, coverage: float, confidence: float) -> int:
    """Compute the rank of q that guarantees a coverage with the given confidence."""
    ranks = np.arange(1, rows + 1)
    log_factorial = np.concatenate([[0.0], np.log(ranks).cumsum()])
    log_pmf = log_factorial[rows] - log_factorial[ranks] - log_factorial[rows - ranks]
    log_pmf += ranks * math.log(coverage) + (rows - ranks) * math.log1p(-coverage)
    # P(Binomial >= k), the probability of a smaller coverage, for each rank k
    tail = np.exp(log_pmf)[::-1].cumsum()[::-1]
    indices = np.flatnonzero(tail <= (1.0 + RANK_ROUNDING) * (1.0 - confidence))
    return max(coverage_rank(rows, coverage), int(indices[0]) + 1) if len(indices) else rows + 1


def largest_coverage(rows: int, confidence: float) -> float:
    """Compute the largest coverage that can be guaranteed with the given confidence."""
    return float(min((1.0 - confidence) ** (1.0 / rows), rows / (rows + 1.0)))
