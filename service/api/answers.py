"""Pydantic models of responses about models, versions and the service."""

from typing import Any, Literal

from pydantic import BaseModel

from model_store.artifacts.manifest import CategorySpec, EncoderSpec, Manifest
from model_store.types import Task
from service.api.schemas import JobAnswer, Timestamp


class ColumnAnswer(BaseModel):
    """An input column of a tabular model."""

    name: str
    kind: Literal["numeric", "categorical", "time"]
    categories: list[str] | None = None


class ReportAnswer(BaseModel):
    """Summary of an evaluation report, with the paths of its files."""

    version: str
    created: Any
    summary: Any
    href: str
    files: dict[str, str]


class DriftAnswer(BaseModel):
    """Drift test on live rows.

    The alarm is on if the largest evidence, in nats, reached `alarm_at`.
    """

    rows: int
    flag_rate: float | None
    expected_flag_rate: float
    evidence: float
    largest_evidence: float
    alarm_at: float
    alarm: bool
    alarm_time: Timestamp | None
    is_global: bool


class OverviewAnswer(BaseModel):
    """Versions of a model. Fields that describe `latest` are null if no version is served."""

    name: str
    serving: str | None
    versions: list[str]
    aliases: dict[str, str]
    in_memory: dict[str, int]
    broken: dict[str, str]
    method: str | None
    task: Task | None
    input_shape: list[int] | None
    columns: list[ColumnAnswer] | None
    classes: list[str] | None
    target: str | None
    quality: dict[str, float] | None
    baselines: dict[str, dict[str, float]] | None
    smallest_fpr: float | None
    warnings: list[str] | None
    too_few_rows: str | None
    categories: CategorySpec | None
    encoder: EncoderSpec | None
    smallest_risk: float | None


class ModelsAnswer(BaseModel):
    """Models by name. If the request has a `limit`, `next` is null on the last page."""

    models: list[OverviewAnswer]
    next: str | None = None


class ModelAnswer(OverviewAnswer):
    """A model with the drift, manifest and report of `latest`."""

    drift: DriftAnswer | None
    manifest: Manifest | None
    report: ReportAnswer | None


class VersionAnswer(BaseModel):
    """A model version. `broken` is the reason why it cannot be served, or null."""

    name: str
    version: str
    aliases: list[str]
    broken: str | None
    manifest: Manifest
    report: ReportAnswer | None


class StatusAnswer(BaseModel):
    """The process is running."""

    status: Literal["live"]


class ReadyAnswer(BaseModel):
    """Readiness, `degraded` if an alias cannot serve its version.

    If API keys are configured, only requests with a key get the other fields.
    """

    status: Literal["ready", "degraded"]
    models: dict[str, str] | None = None
    degraded: list[str] | None = None


class ServingAnswer(BaseModel):
    """Served version of a model, and the reasons why other versions are broken."""

    serving: str | None
    broken: dict[str, str]


class RefreshAnswer(BaseModel):
    """Models after a refresh."""

    models: dict[str, ServingAnswer]


class UnusualRow(BaseModel):
    p_value: float
    input: Any


class DriftDetailsAnswer(BaseModel):
    """Shifts of a table's columns, and the most unusual of the `rows` recent live rows.

    A shift above `limit` is significant.
    """

    model: str
    version: str
    rows: int
    columns: dict[str, float]
    limit: float | None
    unusual: list[UnusualRow]


class PromoteAnswer(BaseModel):
    """Promoted version, the version served before, and the name of the key that promoted it."""

    model: str
    version: str
    before: str | None
    key: str | None


class CandidateJobAnswer(BaseModel):
    """Last job that fitted a candidate, with the end of the log.

    `can_fit` is true if the service can run the job. `command` fits a candidate elsewhere.
    """

    model: str
    can_fit: bool
    command: str
    job: JobAnswer | None
    lines: list[str]


class UnloadAnswer(BaseModel):
    """Result of unloading a version. `unloaded` is false if it was not in memory."""

    model: str
    version: str
    unloaded: bool


class DriftResetAnswer(BaseModel):
    """Result of a drift reset. `reset` is false if there were no live rows."""

    model: str
    version: str
    reset: bool
