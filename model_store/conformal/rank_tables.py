"""What new rows are ranked among, and what that says of them: p-values, prediction sets, intervals, abstention.

A row's p-value is (1 + #{ranking rows at least as surprising}) / (m + 1): `model_store.conformal.calibration` says
when it holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float64

from model_store.conformal import sets
from model_store.conformal.abstention import Abstention
from model_store.conformal.stopping import StoppingRule

KEPT_THRESHOLDS = 1024  # by rate and risk


@dataclass(frozen=True, eq=False)
class ConformalPValues:
    """What the detectors say of N rows. P-values lie in (0, 1]; small ones mean unlike the calibration data."""

    p_value: Float64[np.ndarray, "N"]
    detector_p_values: dict[str, Float64[np.ndarray, "N"]]

    def take(self, rows: slice | np.ndarray) -> "ConformalPValues":
        """Return the p_values of some rows."""
        return ConformalPValues(self.p_value[rows], {name: p[rows] for name, p in self.detector_p_values.items()})

    @classmethod
    def concatenate(cls, parts: list["ConformalPValues"]) -> "ConformalPValues":
        """Return the p_values of all parts' rows, in order."""
        names = parts[0].detector_p_values
        return cls(
            np.concatenate([part.p_value for part in parts]),
            {name: np.concatenate([part.detector_p_values[name] for part in parts]) for name in names},
        )


@dataclass(frozen=True, eq=False)
class RankTables:
    """The ranking rows under one way of taking draws: what new rows taken so are ranked among.

    `statistic`, `nonconformity` and the surprisals are sorted.
    """

    num_draws: int  # the most that are looked at
    rule: StoppingRule | None  # None: always as many
    statistic: Float64[np.ndarray, "m"]
    surprisals: dict[str, Float64[np.ndarray, "m"]]
    nonconformity: Float64[np.ndarray, "m"]
    abstention: Abstention | None  # of a classification

    def p_values(
        self, statistic: Float64[np.ndarray, "N"], surprisals: dict[str, Float64[np.ndarray, "N"]]
    ) -> ConformalPValues:
        """Return p-values of N rows, given the flag's statistic and each detector's surprisal."""
        return ConformalPValues(
            conformal_p_value(statistic, self.statistic),
            {name: conformal_p_value(surprisal, self.surprisals[name]) for name, surprisal in surprisals.items()},
        )

    def prediction_sets(
        self, mass: Float64[np.ndarray, "N C"], coverage: float, confidence: float | None = None
    ) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set, given the mass above each."""
        return sets.prediction_sets(mass, self.nonconformity, coverage, confidence)

    def intervals(
        self,
        mean: Float64[np.ndarray, "N"],
        std: Float64[np.ndarray, "N"],
        coverage: float,
        confidence: float | None = None,
    ) -> Float64[np.ndarray, "N 2"]:
        """Return the lower and upper end of each row's interval, given mean and std.

        They are infinite where there are too few calibration rows for `coverage`.
        """
        return sets.intervals(mean, std, self.nonconformity, coverage, confidence)

    def largest_uncertainty(self, fpr: float, risk: float) -> float:
        """Return the largest uncertainty to answer at, -inf for none.

        Raises:
            ValueError: if nothing was calibrated of which labels are wrong.
        """
        return self._kept_thresholds(fpr, risk)

    @cached_property
    def _kept_thresholds(self) -> Callable[[float, float], float]:
        return lru_cache(maxsize=KEPT_THRESHOLDS)(self._threshold)

    def _threshold(self, fpr: float, risk: float) -> float:
        return self._abstention().threshold(self.flagged(fpr), risk)

    def smallest_risk(self, fpr: float) -> float:
        """Return the smallest risk that can be certified, 1 for none.

        Raises:
            ValueError: as `largest_uncertainty` does.
        """
        return self._abstention().smallest_risk(self.flagged(fpr))

    def flagged(self, fpr: float) -> int:
        """Return how many p-values are at most `fpr`: as many of the ranking rows are at least as surprising."""
        rows = len(self.statistic)
        return int((np.arange(1, rows + 1) / (rows + 1)).searchsorted(fpr, side="right"))

    def _abstention(self) -> Abstention:
        if self.abstention is None:
            raise ValueError("expected a calibration with answers that are right or wrong, got one without")
        return self.abstention


def conformal_p_value(
    score: Float64[np.ndarray, "N"], calibration: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "N"]:
    """Return (1 + #{calibration >= score}) / (n + 1), `calibration` sorted."""
    n = len(calibration)
    return (n + 1 - calibration.searchsorted(score)) / (n + 1)
