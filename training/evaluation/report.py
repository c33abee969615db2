"""Records of an evaluation report (`report.json`).

Shares are from 0 to 1. `confidence_intervals` contains intervals by figure name, or by path for
nested figures, such as `flagged.0.05`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from training.evaluation.figures import Ends

ByName = dict[str, Ends]


class Measures(BaseModel):
    """A frozen record that is written without unset fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def content(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True)


class Detection(Measures):
    auroc: float
    average_precision: float
    confidence_intervals: ByName = {}


class Bin(Measures):
    rows: int
    confidence: float
    accuracy: float
    confidence_intervals: ByName = {}


class Interval(Measures):
    nominal: float
    covered: float
    width: float | None  # None if infinite
    confidence_intervals: ByName = {}


class ClassResult(Measures):
    name: str
    rows: int
    labelled: list[int]  # row of the confusion matrix
    recall: float | None
    precision: float | None
    confidence_intervals: ByName = {}


class PitBin(Measures):
    share: float
    confidence_intervals: ByName = {}


class Pit(Measures):
    """The probability integral transforms: the predictive CDF at each target.

    They are uniform if the predictive distributions are right.
    """

    distance: float  # Kolmogorov-Smirnov distance from the uniform distribution
    p_value: float  # of this distance
    bins: list[PitBin]


class SpreadBin(Measures):
    rows: int
    std: float
    rmse: float
    covered: float  # by intervals of coverage .95
    confidence_intervals: ByName = {}


class ErrorDetection(Measures):
    rows: int
    base_rate: float
    scores: dict[str, Detection]
    confidence_intervals: ByName = {}


class PartMeasures(Measures):
    """Metrics for a true class, a predicted label or a group."""

    by: Literal["class", "label", "group"]
    name: str
    rows: int
    accuracy: float | None = None
    rmse: float | None = None
    covered: float  # by sets or intervals of coverage .95
    flagged: float | None  # at .05; None with too few calibration rows
    confidence_intervals: ByName = {}


class ClassMeasures(Measures):
    rows: int
    accuracy: float
    log_likelihood: float
    brier: float
    expected_calibration_error: float
    adaptive_calibration_error: float
    classwise_calibration_error: float
    reliability: list[Bin]
    by_class: list[ClassResult]
    error_detection: ErrorDetection | None  # None if all rows are right, or all wrong
    flagged: dict[str, float]  # by false-positive rate
    aurc: dict[str, float]  # by score
    confidence_intervals: ByName = {}


class RegressionMeasures(Measures):
    rows: int
    rmse: float
    log_likelihood: float
    crps: float
    std: float
    interval_coverage_at_95: float
    interval_width_at_95: float | None = None
    pit: Pit
    intervals: list[Interval]
    by_spread: list[SpreadBin]
    flagged: dict[str, float]
    aurc: dict[str, float]
    confidence_intervals: ByName = {}


class SetMeasures(Measures):
    rows: int
    base_rate: float
    flagged: dict[str, float]
    scores: dict[str, Detection]
    confidence_intervals: ByName = {}


class ShiftMeasures(SetMeasures):
    """The measures of later test rows or new groups, compared with ranking rows."""

    by: Literal["time", "group"]
    column: str
    covered: float  # by sets or intervals of coverage .95


class Detectors(Measures):
    all: list[str]
    combined: list[str]


class Report(Measures):
    model: str
    version: str
    task: str
    method: str
    created: str
    data: str
    seed: int
    draws: int
    judged_draws: int
    rows_per_request: int
    confidence_level: float
    resamples: int
    detectors: Detectors
    convergence: dict[str, Any] | None = None  # of a variational fit
    baselines: dict[str, dict[str, float]] = {}  # of a table, from its publication
    warnings: list[str] = []  # as in the manifest
    summary: dict[str, float]
    summary_intervals: ByName
    test: ClassMeasures | RegressionMeasures
    parts: list[PartMeasures]
    shift: ShiftMeasures | None = None  # with data.time or data.group
    outliers: dict[str, SetMeasures]
