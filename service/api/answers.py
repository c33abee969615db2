"""Answers about models, versions, the service in the OpenAPI
document."""

from typing import Any, Literal

from pydantic import BaseModel

from model_store.artifacts.manifest import CategorySpec, EncoderSpec, Manifest
from model_store.types import Task
from service.api.schemas import JobAnswer


class ColumnAnswer(BaseModel):
    """What a caller must know of a column; only some have categories."""

    name: str
    kind: Literal["numeric", "categorical", "time"]
    categories: list[str] | None = None


class ReportAnswer(BaseModel):
    """The summary of a version's evaluation report, and where its files are."""

    version: str
    created: Any
    summary: Any
    href: str
    files: dict[str, str]


class DriftAnswer(BaseModel):
    """What was seen of live rows. Evidence is in nats; the alarm is of the largest so far."""

    rows: int
    flag_rate: float | None
    expected_flag_rate: float
    evidence: float
    largest_evidence: float
    alarm_at: float
    alarm: bool
    of_all: bool


class OverviewAnswer(BaseModel):
    """What there is of a model, and how `latest` is; null where no version is served."""

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
    """The models. With a `limit` also `next`: null where these are the last."""

    models: list[OverviewAnswer]
    next: str | None = None


class ModelAnswer(OverviewAnswer):
    """A model; drift, manifest and report are those of the version that `latest` serves."""

    drift: DriftAnswer | None
    manifest: Manifest | None
    report: ReportAnswer | None


class VersionAnswer(BaseModel):
    """A version. `broken` says why it cannot be served."""

    name: str
    version: str
    aliases: list[str]
    broken: str | None
    manifest: Manifest
    report: ReportAnswer | None


class StatusAnswer(BaseModel):
    """That the process answers."""

    status: Literal["live"]


class ReadyAnswer(BaseModel):
    """Whether every alias serves what it names; versions by model, and what is degraded, for those
    who may see models."""

    status: Literal["ready", "degraded"]
    models: dict[str, str] | None = None
    degraded: list[str] | None = None


class ServingAnswer(BaseModel):
    """What is served of a model, and what cannot be."""

    serving: str | None
    broken: dict[str, str]


class RefreshAnswer(BaseModel):
    """What is served after a look at the store."""

    models: dict[str, ServingAnswer]


class PromoteAnswer(BaseModel):
    """Which version `latest` names by now, and which was served before."""

    model: str
    version: str
    before: str | None


class CandidateJobAnswer(BaseModel):
    """Whether a candidate can be fitted here, the command elsewhere, and the last job that does so,
    with the last lines of its log."""

    model: str
    can_fit: bool
    command: str
    job: JobAnswer | None
    lines: list[str]


class UnloadAnswer(BaseModel):
    """Whether a version was in memory."""

    model: str
    version: str
    unloaded: bool


class DriftResetAnswer(BaseModel):
    """Whether rows of a version were watched."""

    model: str
    version: str
    reset: bool
