"""What a model says of rows: scores, conformal p-values, and what follows from ranks: sets,
intervals, abstention."""

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


@dataclass(frozen=True, eq=False)
class RankedRows:
    """What N rows are ranked by within categories, and which these are."""

    categories: Int64[np.ndarray, "N"]
    statistic: Float64[np.ndarray, "N"]
    surprisals: dict[str, Float64[np.ndarray, "N"]]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says of N rows: the scores of all their draws, and the flag's p_values.

    `detected` holds each detector's score. Detectors of posterior scores look at the first draws,
    as many as the largest calibrated number (`calibrated_scores` are of these draws). So p-values,
    prediction sets and intervals, which are ranks among `rank_tables`, are exact whatever number
    was requested.

    `p_values` are ranks among all ranking rows. Where a model is calibrated by category, rows are
    judged by `judged_p_values`, and `ranked` is what these are made of.
    """

    scores: AnyScores
    detected: dict[str, Float64[np.ndarray, "N"]]
    calibrated_scores: AnyScores
    p_values: ConformalPValues
    # Each class, of the calibrated draws; None in a regression
    mass_above: Float64[np.ndarray, "N C"] | None
    rank_tables: RankTables | WeightedRows  # the latter under priors
    transform: Transform | None = None  # of a regression's target
    ranked: RankedRows | None = None  # None: there are no categories

    @classmethod
    def concatenate(cls, parts: list["Prediction"]) -> "Prediction":
        """Return the prediction of all parts' rows, in order, under as many draws each."""
        first = parts[0]
        if len(parts) == 1:
            return first
        return cls(
            concatenate([part.scores for part in parts]),
            {
                name: np.concatenate([part.detected[name] for part in parts])
                for name in first.detected
            },
            concatenate([part.calibrated_scores for part in parts]),
            concatenate([part.p_values for part in parts]),
            None
            if first.mass_above is None
            else np.concatenate([part.mass_above for part in parts]),
            first.rank_tables,
            first.transform,
            None if first.ranked is None else concatenate([p.ranked for p in parts if p.ranked]),
        )

    def take(self, rows: slice | np.ndarray) -> "Prediction":
        scores = take(self.scores, rows)
        return Prediction(
            scores,
            {name: detected[rows] for name, detected in self.detected.items()},
            scores if self.calibrated_scores is self.scores else take(self.calibrated_scores, rows),
            take(self.p_values, rows),
            None if self.mass_above is None else self.mass_above[rows],
            self.rank_tables,
            self.transform,
            None if self.ranked is None else take(self.ranked, rows),
        )

    def of_groups(self, groups: Int64[np.ndarray, "N"]) -> "Prediction":
        if self.ranked is None:
            raise ValueError("expected a model with categories, got one without")
        return replace(self, ranked=replace(self.ranked, categories=groups))

    @property
    def categories(self) -> Int64[np.ndarray, "N"] | None:
        return None if self.ranked is None else self.ranked.categories

    @cached_property
    def judged_p_values(self) -> ConformalPValues:
        """The p-values that rows are judged by: within their categories, where there are such."""
        if self.ranked is None:
            return self.p_values
        assert isinstance(self.rank_tables, RankTables)  # priors go with no categories
        return self.rank_tables.p_values(
            self.ranked.statistic, self.ranked.surprisals, self.ranked.categories
        )

    def prediction_sets(
        self, coverage: float, confidence: float | None = None
    ) -> Bool[np.ndarray, "N C"] | None:
        """Return which classes belong to each row's prediction set, None in a regression;
        `confidence` as of `sets`.

        A row's label belongs to it, whatever the draws say that were calibrated.
        """
        if not isinstance(self.scores, Scores) or self.mass_above is None:
            return None
        if isinstance(self.rank_tables, WeightedRows):
            if confidence is not None:
                raise ValueError("expected no confidence under priors, got one")
            inside = self.rank_tables.prediction_sets(self.mass_above, coverage)
        else:
            inside = self.rank_tables.prediction_sets(
                self.mass_above, coverage, confidence, self.categories
            )
        if self.scores is not self.calibrated_scores:
            inside[np.arange(len(inside)), self.scores.label] = True
        return inside

    def intervals(
        self, coverage: float, confidence: float | None = None
    ) -> Float64[np.ndarray, "N 2"] | None:
        """Return each row's interval in the target's units; None for classification."""
        scores = self.calibrated_scores
        if not isinstance(scores, MixtureScores) or isinstance(self.rank_tables, WeightedRows):
            return None
        ends = self.rank_tables.intervals(
            scores.mean, scores.std, coverage, confidence, self.categories
        )
        return ends if self.transform is None else to_target(self.transform, ends)

    def abstains(self, fpr: float, risk: float) -> Bool[np.ndarray, "N"]:
        """Return which rows of a classification are left undecided, where the flag fires at `fpr`.

        Of a number of draws that was not calibrated so are rows whose label is not that of the
        calibrated draws. Raises ValueError in a regression, as `RankTables.largest_uncertainty`
        does, and under priors.
        """
        if isinstance(self.rank_tables, WeightedRows):
            raise ValueError("expected no risk under priors, got one")
        largest = self.rank_tables.thresholds(fpr, risk, self.categories)
        scores = self.calibrated_scores
        answers = (scores.by_name()["variation_ratio"] <= largest) & (
            self.judged_p_values.p_value > fpr
        )
        return ~answers | (scores.labels != self.scores.labels)


def check_computed(scores: Float64[np.ndarray, "N"], field: str, first_row: int = 0) -> None:
    """Raise InvalidInput for the first row whose score is not a number: its inputs are too large to
    compute with. Rows count from `first_row`.
    """
    computed = np.isfinite(scores)
    if not computed.all():
        n = int(np.argmin(computed))
        raise InvalidInput(
            f"{field}.{first_row + n}",
            "numbers that the model can compute with",
            "some whose result is not finite",
        )


@dataclass(frozen=True)
class DecisionOptions:
    """How to decide. Rates lie between 0 and 1.

    Without `fdr` a row is flagged by itself, at `fpr`; abstention and stopping go by `fpr` anyway.
    """

    fpr: float
    fdr: float | None
    coverage: float
    risk: float | None  # None: no row is left undecided
    confidence: float | None = None  # with which coverage is kept; None: on average
    # Shares of the classes among the rows; None: as in training
    priors: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Decision:
    """What is decided of N rows, and the p-values and categories (None where there are none) that
    it goes by."""

    p_values: ConformalPValues
    categories: Int64[np.ndarray, "N"] | None
    flag: Bool[np.ndarray, "N"]
    fired: dict[str, Bool[np.ndarray, "N"]]  # by detector, whether its own p-value is at most `fpr`
    prediction_set: Bool[np.ndarray, "N C"] | None  # None in a regression
    interval: Float64[np.ndarray, "N 2"] | None  # None in a classification
    abstain: Bool[np.ndarray, "N"] | None  # None where no risk is in force


def decide(prediction: Prediction, options: DecisionOptions) -> Decision:
    """Decide flags, sets, intervals and abstentions for the rows of a request."""
    p_values, fpr = prediction.judged_p_values, options.fpr
    interval = prediction.intervals(options.coverage, options.confidence)
    return Decision(
        p_values=p_values,
        categories=prediction.categories,
        flag=p_values.p_value <= fpr
        if options.fdr is None
        else benjamini_hochberg(p_values.p_value, options.fdr),
        fired={name: p_value <= fpr for name, p_value in p_values.detector_p_values.items()},
        prediction_set=prediction.prediction_sets(options.coverage, options.confidence),
        interval=interval,
        abstain=None if options.risk is None else prediction.abstains(fpr, options.risk),
    )
