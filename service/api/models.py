"""Routes for models, versions and evaluation reports."""

from dataclasses import asdict
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Query, Response

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn
from model_store.artifacts.report import evaluation_report
from model_store.artifacts.storage import REPORT
from model_store.artifacts.summary import too_few_rows
from model_store.conformal.drift import ALARM_EVIDENCE
from model_store.errors import NotFound, StoreError
from service.api.answers import ModelAnswer, ModelsAnswer, OverviewAnswer, VersionAnswer
from service.api.dependencies import AllowedModels, CurrentContext, LinkPrefix, ModelName
from service.api.media_types import JSON
from service.api.openapi import BINARY, answers, errors
from service.api.responses import format_timestamp
from service.api.schemas import ModelsQuery
from service.auth.scopes import needs
from service.context import Context
from service.models.drift import DriftReport
from service.models.models import Models

MEDIA_TYPES = {
    "json": "application/json",
    "html": "text/html; charset=utf-8",
    "png": "image/png",
}
# Reports are untrusted, so these headers block scripts and requests.
CONFINED = {
    "Content-Security-Policy": "sandbox; default-src 'none'; img-src data:; "
    "style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
UNKNOWN_FILE = "application/octet-stream"
REPORT_CONTENT: dict[str, Any] = {JSON: {"schema": {"type": "object"}}}
FILE_CONTENT: dict[str, Any] = {
    **{media_type: {"schema": BINARY} for media_type in (UNKNOWN_FILE, *MEDIA_TYPES.values())},
    **REPORT_CONTENT,
}
REPORT_PATH = "/models/{name}/versions/{version}/report"

router = APIRouter(tags=["Models"], dependencies=[needs("read")])


@router.get(
    "/models",
    response_model=ModelsAnswer,
    response_model_exclude_unset=True,
    responses=errors(422),
)
async def get_models(
    context: CurrentContext, allowed: AllowedModels, query: Annotated[ModelsQuery, Query()]
) -> dict[str, Any]:
    """List the models by name, with their versions."""
    models = context.models
    names = [name for name in models.names(allowed) if query.after is None or name > query.after]
    page = names[: query.limit]
    overview = await context.threads.files(lambda: [_overview(models, name) for name in page])
    if query.limit is None:
        return {"models": overview}
    return {"models": overview, "next": page[-1] if len(page) < len(names) else None}


@router.get(
    "/models/{name}",
    response_model=ModelAnswer,
    response_model_exclude_unset=True,
    responses=errors(404),
)
async def get_model(context: CurrentContext, prefix: LinkPrefix, name: ModelName) -> dict[str, Any]:
    """Return a model with the drift, manifest and report of `latest`."""
    return await context.threads.files(partial(_description, context.models, name, prefix))


@router.get(
    "/models/{name}/versions/{version}",
    response_model=VersionAnswer,
    response_model_exclude_unset=True,
    responses=errors(404, 503),
)
async def get_version(
    context: CurrentContext, prefix: LinkPrefix, name: ModelName, version: str
) -> dict[str, Any]:
    """Return a version with its manifest and report."""
    return await context.threads.files(partial(_version, context.models, name, version, prefix))


def _version(models: Models, name: str, version: str, prefix: str) -> dict[str, Any]:
    number = models.resolve(name, version)
    return {
        "name": name,
        "version": number,
        "aliases": sorted(
            alias for alias, target in models.store.aliases(name).items() if target == number
        ),
        "broken": models.errors(name).get(number),
        "manifest": models.store.manifest(name, number).model_dump(mode="json"),
        "report": report_links(models, name, number, prefix),
    }


def _description(models: Models, name: str, prefix: str) -> dict[str, Any]:
    latest = models.latest(name)
    drift = None if latest is None else models.drift(latest)
    return {
        **_overview(models, name),
        "drift": None if drift is None else _drift(drift.report()),
        "manifest": None if latest is None else latest.model_dump(mode="json"),
        "report": report_links(models, name, latest.version if latest else None, prefix),
    }


def _drift(report: DriftReport) -> dict[str, Any]:
    time = format_timestamp(report.alarm_time)
    return asdict(report) | {"alarm_at": ALARM_EVIDENCE, "alarm": report.alarm, "alarm_time": time}


def _overview(models: Models, name: str) -> dict[str, Any]:
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
    return overview | {
        "method": latest.method,
        "task": latest.task,
        "input_shape": latest.input.shape,
        "columns": [_column(column) for column in latest.input.columns],
        "classes": latest.classes,
        "target": latest.target,
        "quality": latest.quality,
        "baselines": latest.baselines,
        "smallest_fpr": latest.detectors.smallest_fpr,
        "warnings": latest.warnings,
        "too_few_rows": too_few_rows(latest.detectors, categories),
        "categories": None if categories is None else categories.model_dump(),
        "encoder": None if encoder is None else encoder.model_dump(),
        "smallest_risk": None if abstention is None else abstention.smallest_risk,
    }


def _column(column: AnyColumn) -> dict[str, Any]:
    content: dict[str, Any] = {"name": column.name, "kind": column.kind}
    if isinstance(column, CategoricalColumn):
        content["categories"] = column.categories
    return content


@router.get(REPORT_PATH, responses=answers(None, 404, 503, content=REPORT_CONTENT))
async def get_report(context: CurrentContext, name: ModelName, version: str) -> Response:
    """Return the evaluation report of a version, written by `dubito evaluate`."""
    return await _file(context, name, version, REPORT)


@router.get(
    REPORT_PATH + "/{file}",
    responses=answers(None, 404, 503, content=FILE_CONTENT),
    response_class=Response,
)
async def get_report_file(
    context: CurrentContext, name: ModelName, version: str, file: str
) -> Response:
    """Return a file of an evaluation report: HTML or a plot."""
    return await _file(context, name, version, file)


async def _file(context: Context, name: str, version: str, file: str) -> Response:
    content, media_type = await context.threads.files(
        partial(report_file, context.models, name, version, file)
    )
    return Response(content, media_type=media_type, headers=CONFINED)


def report_links(
    models: Models, name: str, version: str | None, prefix: str
) -> dict[str, Any] | None:
    """Return a report's summary with links to its files, or None if no report is readable."""
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
        "files": {file: f"{href}/{quote(file)}" for file in evaluation.files},
    }
    try:
        orjson.dumps(links)
    except TypeError:  # integers beyond 64 bits or lone surrogates in a damaged report
        return None
    return links


def report_file(models: Models, name: str, version: str, file: str) -> tuple[bytes, str]:
    """Read a file of a report, and return it with its media type."""
    number = models.resolve(name, version)
    evaluation = evaluation_report(models.store, name, number)
    if evaluation is None:
        advice = f"run `dubito evaluate {name}:{number}`"
        raise NotFound("report", f"a report of model {name} version {number}", f"none: {advice}")
    return evaluation.read(file), MEDIA_TYPES.get(file.rpartition(".")[2], UNKNOWN_FILE)
