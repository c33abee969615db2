"""What is decided of rows: flags, sets or intervals, and whether to abstain. A pure function of a
prediction."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.conformal.false_discovery import benjamini_hochberg
from model_store.conformal.rank_tables import ConformalPValues
from model_store.conformal.stopping import StoppingRule
from model_store.inference.prediction import Prediction


@dataclass(frozen=True)
class DecisionOptions:
    """How to decide. Rates lie between 0 and 1.

    Without `fdr` a row is flagged by itself, at `fpr`; abstention and stopping go by `fpr` anyway.
    """

    fpr: float
    fdr: float | None
    coverage: float
    risk: float | None  # None: no row is left undecided
    rule: StoppingRule | None  # when a row stops drawing; None: at the request's number of draws
    confidence: float | None = None  # with which coverage is kept; None: on average
    priors: tuple[float, ...] | None = (
        None  # shares of the classes among the rows; None: as in training
    )


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

    def take(self, rows: slice) -> "Decision":
        """Return what is decided of some rows."""
        return Decision(
            self.p_values.take(rows),
            None if self.categories is None else self.categories[rows],
            self.flag[rows],
            {name: fired[rows] for name, fired in self.fired.items()},
            None if self.prediction_set is None else self.prediction_set[rows],
            None if self.interval is None else self.interval[rows],
            None if self.abstain is None else self.abstain[rows],
        )


def decide(prediction: Prediction, options: DecisionOptions) -> Decision:
    """Return what is decided of the rows of one request, each by itself but for flags at a false
    discovery rate."""
    p_values, fpr = prediction.judged_p_values, options.fpr
    return Decision(
        p_values=p_values,
        categories=prediction.categories,
        flag=p_values.p_value <= fpr
        if options.fdr is None
        else benjamini_hochberg(p_values.p_value, options.fdr),
        fired={name: p_value <= fpr for name, p_value in p_values.detector_p_values.items()},
        prediction_set=prediction.prediction_sets(options.coverage, options.confidence),
        interval=prediction.intervals(options.coverage, options.confidence),
        abstain=None if options.risk is None else prediction.abstains(fpr, options.risk),
    )
