"""Evaluation reports over HTTP: links to a version's report, and its files."""

from functools import partial
from typing import Any
from urllib.parse import quote

import orjson
from fastapi import APIRouter, Request, Response

from model_store.artifacts.report import EvaluationReport, evaluation_report
from model_store.artifacts.storage import REPORT
from model_store.errors import NotFound, StoreError
from service.api.openapi import BINARY, answers
from service.context import context_of
from service.error_forms import JSON
from service.models.models import Models

MEDIA_TYPES = {
    "json": "application/json",
    "md": "text/markdown; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "png": "image/png",
}
# Whatever is in a page of the store, it runs nothing, loads nothing, and is of no origin.
CONFINED = {
    "Content-Security-Policy": "sandbox; default-src 'none'; img-src data:; "
    "style-src 'unsafe-inline'",
    "X-Content-Type-Options": "nosniff",
}
OTHER = "application/octet-stream"
A_REPORT: dict[str, Any] = {JSON: {"schema": {"type": "object"}}}
ANY_FILE: dict[str, Any] = {
    **{media_type: {"schema": BINARY} for media_type in (OTHER, *MEDIA_TYPES.values())},
    **A_REPORT,
}

router = APIRouter(tags=["Models"])
PATH = "/models/{name}/versions/{version}/evidence"


@router.get(PATH, responses=answers(None, 404, 503, content=A_REPORT))
async def get_evidence(request: Request, name: str, version: str) -> Response:
    """Give the evaluation report of a version: what `dubito evaluate` measured of
    it."""
    return await _file(request, name, version, REPORT)


@router.get(
    PATH + "/{file}",
    responses=answers(None, 404, 503, content=ANY_FILE),
    response_class=Response,
)
async def get_evidence_file(request: Request, name: str, version: str, file: str) -> Response:
    """Give a file of a version's evaluation report: HTML, Markdown, or a plot."""
    return await _file(request, name, version, file)


async def _file(request: Request, name: str, version: str, file: str) -> Response:
    context = context_of(request)
    content, media_type = await context.threads.files(
        partial(report_file, context.models, name, version, file)
    )
    return Response(content, media_type=media_type, headers=CONFINED)


def report_links(
    models: Models, name: str, version: str | None, prefix: str
) -> dict[str, Any] | None:
    """Return the summary of a version's report and where its files are, by paths that begin with
    `prefix`; None where no report can be read."""
    if version is None:
        return None
    try:
        found = evaluation_report(models.store, name, version)
    except StoreError:  # the route of the report says what is wrong with it
        return None
    if found is None:
        return None
    href = f"{prefix}/models/{quote(name)}/versions/{version}/evidence"
    links = {
        "version": version,
        "created": found.report.get("created"),
        "summary": found.report.get("summary"),
        "href": href,
        "files": {file: f"{href}/{quote(file)}" for file in found.files},
    }
    try:
        orjson.dumps(links)
    except TypeError:  # integers beyond 64 bits, lone surrogates: nothing that we wrote
        return None
    return links


def report_file(models: Models, name: str, version: str, file: str) -> tuple[bytes, str]:
    """Return a file of a version's report, and its media type; reads the store."""
    name = models.name(name)
    number = models.resolve(name, version)
    found: EvaluationReport | None = evaluation_report(models.store, name, number)
    if found is None:
        how = f"run `dubito evaluate {name}:{number}`"
        raise NotFound(
            f"evidence: expected a report of model {name} version {number}, got none: {how}"
        )
    return found.read(file), MEDIA_TYPES.get(file.rpartition(".")[2], OTHER)
