"""What an evaluation report holds: `evidence.json`, record by record. Shares are from 0 to 1."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Measures(BaseModel):
    """A frozen record, written without what was not given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def content(self) -> dict[str, Any]:
        """Return the record as the report holds it."""
        return self.model_dump(exclude_unset=True, by_alias=True)


class Detection(Measures):
    """How well a score detects positive rows: `training.evaluation.metrics.detection`."""

    auroc: float
    pr_plus: float
    pr_minus: float
    fpr_at_95: float


class Bin(Measures):
    """Rows of nearly one confidence."""

    rows: int
    confidence: float
    accuracy: float


class Interval(Measures):
    """Intervals of a nominal coverage: how often they hold the target, and their mean width, None if infinite."""

    nominal: float
    covered: float
    width: float | None


class ErrorDetection(Measures):
    """How well each score tells misclassified rows from the others."""

    rows: int
    base_rate: float
    scores: dict[str, Detection]


class ClassMeasures(Measures):
    """What was measured of the test rows of a classification."""

    rows: int
    accuracy: float
    log_likelihood: float
    brier: float
    expected_calibration_error: float
    reliability: list[Bin]
    error_detection: ErrorDetection | None  # None where all rows are right, or none
    flagged: dict[str, float]  # by false-positive rate
    aurc: dict[str, float]  # by score


class RegressionMeasures(Measures):
    """What was measured of the test rows of a regression."""

    rows: int
    rmse: float
    log_likelihood: float
    std: float
    interval_coverage_at_95: float
    interval_width_at_95: float | None = None
    intervals: list[Interval]
    flagged: dict[str, float]
    aurc: dict[str, float]


class SetMeasures(Measures):
    """What was measured of a set of rows unlike the data, against the test rows."""

    rows: int
    base_rate: float
    flagged: dict[str, float]
    scores: dict[str, Detection]


class AttackMeasures(SetMeasures):
    """What was measured of attacked rows, against the test rows.

    `hits` is the share of all rows whose label is wrong and whose flag stays quiet at a false-positive rate of .05.
    """

    accuracy: float
    hits: float
    mean_scores: dict[str, float]
    error_detection: ErrorDetection | None


class AttackFacts(Measures):
    """What an attack did."""

    attack: str
    target: int | None = Field(default=None, serialization_alias="class")
    radius: float | None = None
    step: float | None = None
    draws: int
    fresh: bool | None = None
    iterations: int | None = None


class Attack(Measures):
    """An attack, and what was measured of its rows; the report holds both as one."""

    facts: AttackFacts
    measures: AttackMeasures

    def content(self) -> dict[str, Any]:
        """Return facts and measures together."""
        return {**self.facts.content(), **self.measures.content()}


class Detectors(Measures):
    """Names of all scores that detect, and of those that the flag combines."""

    all: list[str]
    combined: list[str]


class Report(Measures):
    """An evaluation report, but for the names of its files."""

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
    detectors: Detectors
    convergence: dict[str, Any] | None = None  # of a variational fit
    summary: dict[str, float]
    test: ClassMeasures | RegressionMeasures
    outliers: dict[str, SetMeasures]
    attacks: dict[str, Attack]

    def content(self) -> dict[str, Any]:
        """Return the report as it is written."""
        attacks = {name: attack.content() for name, attack in self.attacks.items()}
        return {**super().content(), "attacks": attacks}
