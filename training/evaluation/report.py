"""The records of an evaluation report, `report.json`. Shares are from 0 to 1.

`confidence_intervals` of a record are those of its figures by name; figures in a table go by path,
such as `flagged.0.05`.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from training.evaluation.figures import Ends

ByName = dict[str, Ends]


class Measures(BaseModel):
    """A frozen record, written without what was not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def content(self) -> dict[str, Any]:
        return self.model_dump(exclude_unset=True, by_alias=True)


class Detection(Measures):
    auroc: float
    pr_plus: float
    pr_minus: float
    fpr_at_95: float
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


class OfClass(Measures):
    name: str
    rows: int
    labelled: list[int]  # by label, in the classes' order: a row of the confusion matrix
    recall: float | None
    precision: float | None
    confidence_intervals: ByName = {}


class PitBin(Measures):
    share: float
    confidence_intervals: ByName = {}


class Pit(Measures):
    """Probability integral transforms: what share of its predictive distribution lies below each
    target.

    They are uniform where the predictive distributions are right. `distance` is the largest
    distance of their distribution function from the uniform one (Kolmogorov and Smirnov), and
    `p_value` how often it would be as large by chance.
    """

    distance: float
    p_value: float
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
    """Test rows of a part: of a true class, of those given a label, or of a group.

    `covered` is the share of sets or intervals of coverage .95 that hold the truth, `flagged` how
    often the flag fires at .05, None where the calibration cannot tell that.
    """

    by: Literal["class", "label", "group"]
    name: str
    rows: int
    accuracy: float | None = None
    rmse: float | None = None
    covered: float
    flagged: float | None
    confidence_intervals: ByName = {}


class ClassProbability(Measures):
    """A class's probability, the class against all others.

    `confidence` and `accuracy` of its reliability are the mean probability of a bin and the share
    that is the class.
    """

    name: str
    rows: int
    calibration_error: float
    average_precision: float | None
    reliability: list[Bin]
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
    by_class: list[OfClass]
    class_probabilities: list[ClassProbability] = []
    error_detection: ErrorDetection | None  # None where all rows are right, or none
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
    pinball: dict[str, float]  # by quantile
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


class AttackMeasures(SetMeasures):
    """Attacked rows, against the test rows.

    `hits` is the share of all rows whose label is wrong and whose flag stays quiet at a
    false-positive rate of .05.
    """

    accuracy: float
    hits: float
    mean_scores: dict[str, float]
    error_detection: ErrorDetection | None


class AttackSettings(Measures):
    attack: str
    target: int | None = Field(default=None, serialization_alias="class")
    radius: float | None = None
    step: float | None = None
    draws: int
    fresh: bool | None = None
    iterations: int | None = None


class Attack(Measures):
    settings: AttackSettings
    measures: AttackMeasures

    def content(self) -> dict[str, Any]:
        return {**self.settings.content(), **self.measures.content()}


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
    # Of a table: figures of its publication, of this model and of plain ones on the same rows
    baselines: dict[str, dict[str, float]] = {}
    warnings: list[str] = []  # as in the manifest
    summary: dict[str, float]
    summary_intervals: ByName
    test: ClassMeasures | RegressionMeasures
    parts: list[PartMeasures]
    outliers: dict[str, SetMeasures]
    attacks: dict[str, Attack]

    def content(self) -> dict[str, Any]:
        attacks = {name: attack.content() for name, attack in self.attacks.items()}
        return {**super().content(), "attacks": attacks}
