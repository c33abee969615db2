"""Answers about models, versions and the service."""

from typing import Any, Literal

from pydantic import BaseModel

from model_store.artifacts.manifest import CategorySpec, EncoderSpec, Manifest
from model_store.types import Task
from service.api.schemas import JobAnswer


class ColumnAnswer(BaseModel):
    """A column of a model; only categorical columns have categories."""

    name: str
    kind: Literal["numeric", "categorical", "time"]
    categories: list[str] | None = None


class ReportAnswer(BaseModel):
    """The summary of a version's evaluation report, and the paths of its files."""

    version: str
    created: Any
    summary: Any
    href: str
    files: dict[str, str]


class DriftAnswer(BaseModel):
    """The drift test on live rows. Evidence is in nats; its largest value decides the alarm."""

    rows: int
    flag_rate: float | None
    expected_flag_rate: float
    evidence: float
    largest_evidence: float
    alarm_at: float
    alarm: bool
    of_all: bool


class OverviewAnswer(BaseModel):
    """A model's versions and a description of `latest`, null if no version is served."""

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
    smallest_fpr: float | None
    warnings: list[str] | None
    too_few_rows: str | None
    categories: CategorySpec | None
    encoder: EncoderSpec | None
    smallest_risk: float | None


class ModelsAnswer(BaseModel):
    """The models. With a `limit` also `next`, null on the last page."""

    models: list[OverviewAnswer]
    next: str | None = None


class ModelAnswer(OverviewAnswer):
    """A model, with the drift, manifest and report of `latest`."""

    drift: DriftAnswer | None
    manifest: Manifest | None
    report: ReportAnswer | None


class VersionAnswer(BaseModel):
    """A version. `broken` is the reason why it cannot be served, if any."""

    name: str
    version: str
    aliases: list[str]
    broken: str | None
    manifest: Manifest
    report: ReportAnswer | None


class StatusAnswer(BaseModel):
    """The process is alive."""

    status: Literal["live"]


class ReadyAnswer(BaseModel):
    """Readiness: `degraded` if an alias cannot serve its version. The versions by model and the
    problems need a key if there are keys."""

    status: Literal["ready", "degraded"]
    models: dict[str, str] | None = None
    degraded: list[str] | None = None


class ServingAnswer(BaseModel):
    """The version that a model serves, and the reasons why others cannot be served."""

    serving: str | None
    broken: dict[str, str]


class RefreshAnswer(BaseModel):
    """The models after the store was read again."""

    models: dict[str, ServingAnswer]


class PromoteAnswer(BaseModel):
    """The version that `latest` names after a promotion, and the version served before."""

    model: str
    version: str
    before: str | None


class CandidateJobAnswer(BaseModel):
    """The last job that fits a candidate, with the end of its log. `command` fits a candidate on
    another machine; `can_fit`: this one can, too."""

    model: str
    can_fit: bool
    command: str
    job: JobAnswer | None
    lines: list[str]


class UnloadAnswer(BaseModel):
    """The version; `unloaded` is false if it was not in memory."""

    model: str
    version: str
    unloaded: bool


class DriftResetAnswer(BaseModel):
    """The version; `reset` is false if it had no live rows."""

    model: str
    version: str
    reset: bool
