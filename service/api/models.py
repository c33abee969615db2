"""Routes for models, versions and evaluation reports."""

from dataclasses import asdict
from functools import partial
from typing import Any, Literal
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Response
from pydantic import BaseModel

from model_store.artifacts.manifest import CategorySpec, EncoderSpec, Manifest
from model_store.artifacts.report import FILES, PAGE, evaluation_report
from model_store.artifacts.storage import REPORT
from model_store.conformal.drift import ALARM_EVIDENCE
from model_store.errors import NotFound, StoreError
from model_store.types import JsonObject, Task
from service.api.media_types import JSON
from service.api.openapi import BINARY
from service.api.responses import format_timestamp
from service.api.schemas import Timestamp
from service.auth.scopes import needs
from service.context import AllowedModels, Context, CurrentContext, LinkPrefix, ModelName
from service.models.drift import DriftReport
from service.models.models import Models

MEDIA_TYPES = {REPORT: JSON, PAGE: "text/html; charset=utf-8"}
# Reports are untrusted, so these headers block scripts and requests.
CONFINED = {
    "Content-Security-Policy": "sandbox; default-src 'none'; img-src data:; "
    "style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
REPORT_CONTENT: JsonObject = {JSON: {"schema": {"type": "object"}}}
FILE_CONTENT: JsonObject = {MEDIA_TYPES[PAGE]: {"schema": BINARY}, **REPORT_CONTENT}
# Fields of the manifest that describe a model
DESCRIPTIVE_FIELDS = ("method", "task", "classes", "target", "quality", "baselines", "warnings")
REPORT_PATH = "/models/{name}/versions/{version}/report"


class ColumnAnswer(BaseModel):
    """An input column of a tabular model."""

    name: str
    kind: Literal["numeric", "categorical", "time"]
    categories: list[str] | None = None


class ReportAnswer(BaseModel):
    """An evaluation report's summary, with the paths of its files."""

    version: str
    created: Any
    summary: Any
    href: str
    files: dict[str, str]


class DriftAnswer(BaseModel):
    """The state of the drift test on live rows.

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


class OverviewAnswer(BaseModel):
    """An overview of a model's versions.

    Fields that describe `latest` are null if no version is served.
    """

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
    """The models, sorted by name."""

    models: list[OverviewAnswer]


class ModelAnswer(OverviewAnswer):
    """A model, with the drift, manifest and report of its `latest` version."""

    drift: DriftAnswer | None
    manifest: Manifest | None
    report: ReportAnswer | None


class VersionAnswer(BaseModel):
    """A model version. If it cannot be served, `broken` is the reason."""

    name: str
    version: str
    aliases: list[str]
    broken: str | None
    manifest: Manifest
    report: ReportAnswer | None


router = APIRouter(tags=["Models"], dependencies=[needs("read")])


@router.get("/models", response_model=ModelsAnswer, response_model_exclude_unset=True)
async def get_models(context: CurrentContext, allowed: AllowedModels) -> JsonObject:
    """List the models and their versions, sorted by name."""
    models = context.models

    def describe() -> list[JsonObject]:
        return [_overview(models, name) for name in models.names(allowed)]

    return {"models": await context.threads.files(describe)}


@router.get("/models/{name}", response_model=ModelAnswer, response_model_exclude_unset=True)
async def get_model(context: CurrentContext, prefix: LinkPrefix, name: ModelName) -> JsonObject:
    """Return a model, with the drift, manifest and report of its `latest` version."""
    return await context.threads.files(partial(_description, context.models, name, prefix))


@router.get(
    "/models/{name}/versions/{version}",
    response_model=VersionAnswer,
    response_model_exclude_unset=True,
)
async def get_version(
    context: CurrentContext, prefix: LinkPrefix, name: ModelName, version: str
) -> JsonObject:
    """Return a version with its manifest and report."""
    return await context.threads.files(partial(_version, context.models, name, version, prefix))


def _version(models: Models, name: str, version: str, prefix: str) -> JsonObject:
    number, aliases = models.resolve(name, version), models.store.aliases(name)
    return {
        "name": name,
        "version": number,
        "aliases": sorted(alias for alias, target in aliases.items() if target == number),
        "broken": models.errors(name).get(number),
        "manifest": models.store.manifest(name, number).model_dump(mode="json"),
        "report": report_links(models, name, number, prefix),
    }


def _description(models: Models, name: str, prefix: str) -> JsonObject:
    latest = models.latest(name)
    drift = None if latest is None else models.drift(latest)
    return {
        **_overview(models, name),
        "drift": None if drift is None else _drift(drift.report()),
        "manifest": None if latest is None else latest.model_dump(mode="json"),
        "report": report_links(models, name, latest.version if latest else None, prefix),
    }


def _drift(report: DriftReport) -> JsonObject:
    time = format_timestamp(report.alarm_time)
    return asdict(report) | {"alarm_at": ALARM_EVIDENCE, "alarm": report.alarm, "alarm_time": time}


def _overview(models: Models, name: str) -> JsonObject:
    latest = models.latest(name)
    loaded = [version for version in models.loaded() if version.name == name]
    overview = {
        "name": name,
        "serving": None if latest is None else latest.version,
        "versions": models.store.versions(name),
        "aliases": models.store.aliases(name),
        "in_memory": {s.version: models.model_bytes(s.model.manifest) for s in loaded},
        "broken": models.errors(name),
    }
    if latest is None:
        return dict.fromkeys(OverviewAnswer.model_fields) | overview
    categories, encoder, abstention = latest.categories, latest.encoder, latest.abstention
    return {
        **overview,
        **{name: getattr(latest, name) for name in DESCRIPTIVE_FIELDS},
        "input_shape": latest.input.shape,
        "columns": [vars(column) for column in latest.input.columns],
        "smallest_fpr": latest.detectors.smallest_fpr,
        "too_few_rows": latest.too_few_rows,
        "categories": None if categories is None else categories.model_dump(),
        "encoder": None if encoder is None else encoder.model_dump(),
        "smallest_risk": None if abstention is None else abstention.smallest_risk,
    }


@router.get(REPORT_PATH, responses={200: {"content": REPORT_CONTENT}})
async def get_report(context: CurrentContext, name: ModelName, version: str) -> Response:
    """Return a version's evaluation report, as written by `dubito evaluate`."""
    return await _file(context, name, version, REPORT)


@router.get(
    REPORT_PATH + "/{file}", responses={200: {"content": FILE_CONTENT}}, response_class=Response
)
async def get_report_file(
    context: CurrentContext, name: ModelName, version: str, file: str
) -> Response:
    """Return a file from an evaluation report, as JSON or HTML."""
    return await _file(context, name, version, file)


async def _file(context: Context, name: str, version: str, file: str) -> Response:
    models = context.models

    def read() -> bytes:
        number = models.resolve(name, version)
        evaluation = evaluation_report(models.store, name, number)
        if evaluation is None:
            report = f"a report of model {name} version {number}"
            raise NotFound("report", report, f"none: run `dubito evaluate {name}:{number}`")
        return evaluation.read(file)

    content = await context.threads.files(read)
    return Response(content, media_type=MEDIA_TYPES[file], headers=CONFINED)


def report_links(models: Models, name: str, version: str | None, prefix: str) -> JsonObject | None:
    """Return a report's summary and file links, or None if no report can be read."""
    if version is None:
        return None
    try:
        evaluation = evaluation_report(models.store, name, version)
    except StoreError:  # GET .../report returns this error
        return None
    if evaluation is None:
        return None
    href = f"{prefix}/models/{quote(name)}/versions/{version}/report"
    links = {
        "version": version,
        "created": evaluation.report.get("created"),
        "summary": evaluation.report.get("summary"),
        "href": href,
        "files": {file: f"{href}/{file}" for file in FILES},
    }
    try:
        orjson.dumps(links)
    except TypeError:  # integers beyond 64 bits or lone surrogates in a damaged report
        return None
    return links
