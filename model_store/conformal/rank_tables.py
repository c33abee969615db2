"""What new rows are ranked among, and what that says of them: p-values, prediction sets, intervals,
abstention.

A row's p-value is (1 + #{ranking rows at least as surprising}) / (m + 1):
`model_store.conformal.calibration` says when it holds. Where a model is calibrated by category
there are tables of each category's rows too: `model_store.conformal.mondrian`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.conformal import sets
from model_store.conformal.abstention import NOTHING, Abstention
from model_store.conformal.mondrian import CAUTIOUS_ROWS, UNKNOWN, CategoryKind
from model_store.conformal.stopping import StoppingRule

KEPT_THRESHOLDS = 1024  # by rate and risk


@dataclass(frozen=True, eq=False)
class ConformalPValues:
    """What the detectors say of N rows. P-values lie in (0, 1]; small ones mean unlike the
    calibration data."""

    p_value: Float64[np.ndarray, "N"]
    detector_p_values: dict[str, Float64[np.ndarray, "N"]]


@dataclass(frozen=True, eq=False)
class RankTables:
    """The ranking rows under one way of taking draws: what new rows taken so are ranked among.

    `statistic`, `nonconformity` and the surprisals are sorted. Where there are categories,
    `by_category` has the tables of each one's rows; what is asked of rows with their `categories`
    is then answered by these, and of those of an `UNKNOWN` one by the most cautious.
    """

    num_draws: int  # the most that are looked at
    rule: StoppingRule | None  # None: always as many
    statistic: Float64[np.ndarray, "m"]
    surprisals: dict[str, Float64[np.ndarray, "m"]]
    # of the m rows, in a category by class of those that are truly of it
    nonconformity: Float64[np.ndarray, "t"]
    abstention: Abstention | None  # of a classification
    kind: CategoryKind | None = None
    by_category: tuple["RankTables", ...] = ()

    def p_values(
        self,
        statistic: Float64[np.ndarray, "N"],
        surprisals: dict[str, Float64[np.ndarray, "N"]],
        categories: Int64[np.ndarray, "N"] | None = None,
    ) -> ConformalPValues:
        """Return p-values of N rows, given the flag's statistic and each detector's surprisal.

        With categories they are ranks among the rows of each row's own.
        """
        if categories is not None and self.by_category:
            p_values = ConformalPValues(
                np.empty(len(statistic)), {n: np.empty(len(statistic)) for n in surprisals}
            )
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
        categories: Int64[np.ndarray, "N"] | None = None,
    ) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set, given the mass above each.

        By class each class is compared with the rows that are truly of it, whatever the rows' own
        categories.
        """
        if self.kind is None:
            return sets.prediction_sets(mass, self.nonconformity, coverage, confidence)
        quantiles = self._quantiles(coverage, confidence)
        if self.kind == "class":
            return mass <= quantiles[:-1]
        return mass <= quantiles[_or_unknown(categories, len(mass))][:, None]

    def intervals(
        self,
        mean: Float64[np.ndarray, "N"],
        std: Float64[np.ndarray, "N"],
        coverage: float,
        confidence: float | None = None,
        categories: Int64[np.ndarray, "N"] | None = None,
    ) -> Float64[np.ndarray, "N 2"]:
        """Return the lower and upper end of each row's interval, given mean and std.

        They are infinite where there are too few calibration rows for `coverage`.
        """
        if self.kind is None:
            return sets.intervals(mean, std, self.nonconformity, coverage, confidence)
        half = self._quantiles(coverage, confidence)[_or_unknown(categories, len(mean))] * std
        return np.stack([mean - half, mean + half], axis=1)

    def _quantiles(self, coverage: float, confidence: float | None) -> Float64[np.ndarray, "G1"]:
        """Return q of each category, and last, where `UNKNOWN` points, the largest."""
        found, cautious = (
            [sets.quantile(table.nonconformity, coverage, confidence) for table in tables]
            for tables in (self.by_category, self._cautious)
        )
        return np.array([*found, max(cautious)])

    @cached_property
    def _cautious(self) -> tuple["RankTables", ...]:
        large = tuple(table for table in self.by_category if len(table.statistic) >= CAUTIOUS_ROWS)
        return large or self.by_category

    def thresholds(
        self, fpr: float, risk: float, categories: Int64[np.ndarray, "N"] | None = None
    ) -> Float64[np.ndarray, "N"] | float:
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
        """The largest uncertainty to answer at, of a false-positive rate and a risk."""
        return lru_cache(maxsize=KEPT_THRESHOLDS)(
            lambda fpr, risk: self._abstention().threshold(self.flagged(fpr), risk)
        )

    def smallest_risk(self, fpr: float) -> float:
        if self.by_category:
            return min(table.smallest_risk(fpr) for table in self.by_category)
        return self._abstention().smallest_risk(self.flagged(fpr))

    def flagged(self, fpr: float) -> int:
        """Return how many p-values are at most `fpr`."""
        rows = len(self.statistic)
        return int((np.arange(1, rows + 1) / (rows + 1)).searchsorted(fpr, side="right"))

    def _abstention(self) -> Abstention:
        if self.abstention is None:
            expected = "a calibration with answers that are right or wrong"
            raise ValueError(f"expected {expected}, got one without")
        return self.abstention


def _or_unknown(categories: Int64[np.ndarray, "N"] | None, rows: int) -> Int64[np.ndarray, "N"]:
    return np.full(rows, UNKNOWN) if categories is None else categories


def conformal_p_value(
    score: Float64[np.ndarray, "N"], calibration: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "N"]:
    """Return (1 + #{calibration >= score}) / (n + 1), `calibration` sorted."""
    n = len(calibration)
    return (n + 1 - calibration.searchsorted(score)) / (n + 1)
