"""Predictions and the decisions based on them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.conformal.label_shift import WeightedRows
from model_store.conformal.rank_tables import ConformalPValues, RankTables, benjamini_hochberg
from model_store.errors import InvalidInput
from model_store.scores.classification import Scores
from model_store.scores.records import concatenate, take
from model_store.scores.regression import MixtureScores
from model_store.scores.tasks import AnyScores
from model_store.scores.transforms import Transform, to_target

Values = Float64[np.ndarray, "N"]
Marks = Bool[np.ndarray, "N"]
Sets = Bool[np.ndarray, "N C"]
Intervals = Float64[np.ndarray, "N 2"]

# Fields of `Prediction` with an entry per row
ROW_FIELDS = (
    *("scores", "detected", "surprisals", "statistic", "calibrated_scores", "p_values"),
    *("mass_above", "categories", "missing"),
)


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for N rows.

    `scores` use all draws. Everything that is ranked in `rank_tables` uses only the first draws, up
    to the largest calibrated draw count. So p-values, sets and intervals are exact for any number
    of requested draws.
    """

    scores: AnyScores
    detected: dict[str, Values]  # detector scores
    surprisals: dict[str, Values]  # of the detector scores
    statistic: Values  # of the flag
    calibrated_scores: AnyScores
    p_values: ConformalPValues  # among all calibration rows, in any category
    mass_above: Float64[np.ndarray, "N C"] | None  # only in a classification
    rank_tables: RankTables | WeightedRows  # weighted if there are priors
    transform: Transform | None = None  # of a regression's target
    categories: Int64[np.ndarray, "N"] | None = None  # only if the model has categories
    missing: Bool[np.ndarray, "N C"] | None = None  # cells that have the column's usual value

    @classmethod
    def concatenate(cls, parts: list["Prediction"]) -> "Prediction":
        """Concatenate predictions made with the same draws."""
        first = parts[0]
        if len(parts) == 1:
            return first
        fields = {name: concatenate([getattr(p, name) for p in parts]) for name in ROW_FIELDS}
        return replace(first, **fields)

    def take(self, rows: slice | np.ndarray) -> "Prediction":
        parts = {name: take(getattr(self, name), rows) for name in ROW_FIELDS}
        if self.calibrated_scores is self.scores:
            parts["calibrated_scores"] = parts["scores"]
        return replace(self, **parts)

    def with_groups(self, groups: Int64[np.ndarray, "N"]) -> "Prediction":
        assert self.categories is not None
        return replace(self, categories=groups)

    @cached_property
    def judged_p_values(self) -> ConformalPValues:
        """The p-values used for decisions, computed within categories if the model has any."""
        if self.categories is None:
            return self.p_values
        return self._tables.p_values(self.statistic, self.surprisals, self.categories)

    @property
    def _tables(self) -> RankTables:
        # Priors exclude categories, confidences, risks and regressions.
        assert isinstance(self.rank_tables, RankTables)
        return self.rank_tables

    def prediction_sets(self, coverage: float, confidence: float | None = None) -> Sets | None:
        """Compute prediction sets that include the predicted label. Return None for regression."""
        if not isinstance(self.scores, Scores) or self.mass_above is None:
            return None
        inside = self.rank_tables.prediction_sets(
            self.mass_above, coverage, confidence, self.categories
        )
        if self.scores is not self.calibrated_scores:
            inside[np.arange(len(inside)), self.scores.label] = True
        return inside

    def intervals(self, coverage: float, confidence: float | None = None) -> Intervals | None:
        """Compute prediction intervals in target units. Return None for classification."""
        scores = self.calibrated_scores
        if not isinstance(scores, MixtureScores):
            return None
        ends = self._tables.intervals(
            scores.mean, scores.std, coverage, confidence, self.categories
        )
        return ends if self.transform is None else to_target(self.transform, ends)

    def flag_levels(self, fpr: float, confidence: float | None = None) -> Values | float:
        """Return the largest p-value at which the flag fires, for each row."""
        if confidence is None:
            return fpr
        return self._tables.flag_levels(fpr, confidence, self.categories)

    def abstains(self, fpr: float, risk: float, confidence: float | None = None) -> Marks:
        """Mark the rows for which the service abstains.

        These include rows whose label differs between all draws and the calibrated draws.
        """
        largest = self._tables.thresholds(fpr, risk, self.categories, confidence)
        scores = self.calibrated_scores
        answers = (scores.by_name()["variation_ratio"] <= largest) & (
            self.judged_p_values.p_value > self.flag_levels(fpr, confidence)
        )
        return ~answers | (scores.labels != self.scores.labels)


def check_computed(
    scores: Values, field: str, rows: Sequence[int] | np.ndarray | None = None
) -> None:
    """Raise InvalidInput if a score is not finite because a row's numbers are too large.

    `rows` are the numbers of the rows. The default is 0 to N - 1.
    """
    invalid = np.flatnonzero(~np.isfinite(scores))
    if len(invalid):
        row = invalid[0] if rows is None else rows[invalid[0]]
        expected = "numbers that the model can compute with"
        raise InvalidInput(f"{field}.{row}", expected, "some whose result is not finite")


@dataclass(frozen=True)
class DecisionOptions:
    """The options for decisions. Rates are between 0 and 1."""

    fpr: float  # of flags without `fdr`, and for abstention
    fdr: float | None  # of flags
    coverage: float
    risk: float | None  # None: no abstention
    confidence: float | None = None  # of coverage and fpr; None: both hold on average
    priors: tuple[float, ...] | None = None  # class shares; None: as in training


@dataclass(frozen=True, eq=False)
class Decision:
    """The decisions for N rows, with their p-values."""

    p_values: ConformalPValues
    flag: Marks
    fired: dict[str, Marks]  # by detector, at `fpr` and `confidence`
    prediction_set: Sets | None  # only in a classification
    interval: Intervals | None  # only in a regression
    abstain: Marks | None  # only if a risk is set


def decide(prediction: Prediction, options: DecisionOptions) -> Decision:
    """Decide flags, abstention, sets and intervals. Rows with missing cells are flagged."""
    p_values, confidence = prediction.judged_p_values, options.confidence
    levels = prediction.flag_levels(options.fpr, confidence)
    flag = p_values.p_value <= levels
    if options.fdr is not None:
        flag = benjamini_hochberg(p_values.p_value, options.fdr)
    abstain = None
    if options.risk is not None:
        abstain = prediction.abstains(options.fpr, options.risk, confidence)
    if prediction.missing is not None:
        is_incomplete = prediction.missing.any(axis=1)
        flag = flag | is_incomplete
        abstain = None if abstain is None else abstain | is_incomplete
    return Decision(
        p_values=p_values,
        flag=flag,
        fired={name: p_value <= levels for name, p_value in p_values.detector_p_values.items()},
        interval=prediction.intervals(options.coverage, confidence),
        prediction_set=prediction.prediction_sets(options.coverage, confidence),
        abstain=abstain,
    )
