"""`GET /models`, `GET /models/{name}` and of its versions: what is served, and what cannot be and
why."""

from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn
from model_store.artifacts.summary import too_few_rows
from service.api.openapi import ERRORS
from service.api.report import report_links
from service.api.requests import JSON
from service.context import context_of
from service.models.drift import drift_content
from service.models.models import Models

router = APIRouter()


@router.get("/models")
async def get_models(request: Request) -> Response:
    """List the models: what is served of each, and what cannot be and why."""
    context = context_of(request)
    models = context.models
    overview = await context.threads.files(
        lambda: [_overview(models, name) for name in models.names()]
    )
    return Response(orjson.dumps({"models": overview}), media_type=JSON)


@router.get("/models/{name}", responses={404: ERRORS[404]})
async def get_model(request: Request, name: str) -> Response:
    """Describe a model: versions, aliases, and of what `latest` serves the drift, the manifest and
    evidence."""
    context = context_of(request)
    content = await context.threads.files(
        partial(_description, context.models, context.models.name(name))
    )
    return Response(orjson.dumps(content), media_type=JSON)


@router.get("/models/{name}/versions/{version}", responses={404: ERRORS[404], 503: ERRORS[503]})
async def get_version(request: Request, name: str, version: str) -> Response:
    """Describe a version: aliases that name it, whether it can be served, its manifest and
    evidence."""
    context = context_of(request)
    content = await context.threads.files(partial(_version, context.models, name, version))
    return Response(orjson.dumps(content), media_type=JSON)


def _version(models: Models, name: str, version: str) -> dict[str, Any]:
    """Return what there is to know of a version, whether it is served or not. Reads files."""
    name = models.name(name)
    number = models.resolve(name, version)
    return {
        "name": name,
        "version": number,
        "aliases": sorted(
            alias for alias, named in models.store.aliases(name).items() if named == number
        ),
        "broken": models.broken(name).get(number),
        "manifest": models.store.manifest(name, number).model_dump(mode="json"),
        "evidence": report_links(models, name, number),
    }


def _description(models: Models, name: str) -> dict[str, Any]:
    latest = models.latest(name)
    drift = None if latest is None else models.drift(latest)
    return {
        **_overview(models, name),
        "drift": None if drift is None else drift_content(drift.report()),
        "manifest": None if latest is None else latest.model_dump(mode="json"),
        "evidence": report_links(models, name, None if latest is None else latest.version),
    }


def _overview(models: Models, name: str) -> dict[str, Any]:
    latest = models.latest(name)
    return {
        "name": name,
        "serving": None if latest is None else latest.version,
        "versions": models.store.versions(name),
        "aliases": models.store.aliases(name),
        "in_memory": {
            s.version: models.model_bytes(s.model.manifest)
            for s in models.loaded()
            if s.name == name
        },
        "broken": models.broken(name),
        "method": None if latest is None else latest.method,
        "task": None if latest is None else latest.task,
        "input_shape": None if latest is None else latest.input.shape,
        "columns": None if latest is None else [_column(column) for column in latest.input.columns],
        "classes": None if latest is None else latest.classes,
        "target": None if latest is None else latest.target,
        "quality": None if latest is None else latest.quality,
        "smallest_fpr": None if latest is None else latest.detectors.smallest_fpr,
        "too_few_rows": None
        if latest is None
        else too_few_rows(latest.detectors, latest.categories),
        "categories": None
        if latest is None or latest.categories is None
        else latest.categories.model_dump(),
        "encoder": None
        if latest is None or latest.encoder is None
        else latest.encoder.model_dump(),
        "smallest_risk": None
        if latest is None or latest.abstention is None
        else latest.abstention.smallest_risk,
    }


def _column(column: AnyColumn) -> dict[str, Any]:
    """Return what a caller must know of a column to send it; only some have categories."""
    content: dict[str, Any] = {"name": column.name, "kind": column.kind}
    return content | (
        {"categories": column.categories} if isinstance(column, CategoricalColumn) else {}
    )
