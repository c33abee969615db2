"""Row files from request bodies or `DUBITO_POOLS`, and `POST /acquire/preview`."""

import base64
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from model_store.errors import InvalidInput, describe_value
from model_store.sources.files import open_rows
from model_store.sources.row_file import Bounds, Part, RowFile, Source
from model_store.types import Content
from service.api.dependencies import CurrentContext, CurrentRequest
from service.api.openapi import file_body
from service.api.requests import (
    ENDINGS,
    FILE_ENDINGS,
    PARQUET,
    describe_media_type,
    parse_query,
    read_body,
    request_media_type,
)
from service.api.responses import json_response
from service.api.schemas import Envelope, ModelRequest
from service.auth.scopes import POOLS_KEY, needs
from service.context import Context
from service.engine.threads import SLICE_BYTES
from service.errors import Unsupported
from service.models.models import ServedModel
from service.request_context import RequestContext

PARQUET_ENDING = FILE_ENDINGS[PARQUET]
MAX_CHARACTERS = 1000  # of a text
MAX_PREVIEW_BYTES = 64 << 20
NUMBER_BYTES = 12  # in JSON, approximately


class PreviewRequest(ModelRequest):
    """A request to preview rows of a file."""

    rows: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] = Field(
        default=list(range(10)), max_length=1000
    )
    """indices of the rows to show; indices out of range are skipped"""


class PreviewRow(BaseModel):
    """A row of a file: an object, the start of a text, a base64 image file or numbers."""

    index: int
    id: str
    row: dict[str, Any] | list[float] | str


class PreviewAnswer(BaseModel):
    """A preview of a file's rows, as the service reads them."""

    model: str
    version: str
    rows: int
    read_as: str
    ignored_columns: list[str]
    preview: list[PreviewRow]


router = APIRouter(tags=["Acquire"])


@router.post(
    "/acquire/preview",
    response_model=PreviewAnswer,
    openapi_extra=file_body(PreviewRequest, ENDINGS),
    dependencies=[needs("acquire")],
)
async def post_preview(request: Request, context: CurrentContext, call: CurrentRequest) -> Response:
    """Preview rows of a file, as the service reads them."""
    body = await read_body(call, context.settings.max_body_bytes)
    ending = ENDINGS.get(request_media_type(request))
    if ending is None:
        raise Unsupported(
            "Content-Type", f"one of {', '.join(ENDINGS)}", describe_media_type(request)
        )
    query = parse_query(request, PreviewRequest)
    loaded = await context.find_model(call, query)
    pool = await open_file(context, call, body, loaded, "pool", query.encoded, ending)
    work = partial(preview_rows, pool, query.rows)
    preview = await context.threads.requests.run(call, len(body), work)
    answer = {
        "model": loaded.name,
        "version": loaded.version,
        "rows": pool.rows,
        "read_as": pool.read_as,
        "ignored_columns": pool.ignored,
        "preview": preview,
    }
    return json_response(answer)


async def open_rows_file(
    context: Context,
    call: RequestContext,
    body: Content,
    envelope: Envelope,
    loaded: ServedModel,
    field: str,
) -> RowFile:
    """Open the row file that is the request body or is named in the envelope."""
    file_field = f"{field}_file"
    name = getattr(envelope, file_field, None)
    if name is not None:
        allowed = call.request.scope.get(POOLS_KEY)
        path = await context.threads.state(
            partial(resolve_path, context.settings.pools, name, file_field, allowed)
        )
        return await open_file(context, call, path, loaded, file_field, envelope.encoded)
    ending = ENDINGS[request_media_type(call.request)]
    return await open_file(context, call, body, loaded, field, envelope.encoded, ending)


async def open_file(
    context: Context,
    call: RequestContext,
    source: Source,
    loaded: ServedModel,
    field: str,
    encoded: bool,
    ending: str | None = None,
) -> RowFile:
    """Open a row file and reserve memory for it."""
    bounds = Bounds(call.reservation.reserve, call.pause)
    spec = loaded.model.manifest.input
    spec = spec.encoded if encoded else spec
    if ending == PARQUET_ENDING and not isinstance(source, Path):
        check = partial(context.file_preflights.reserve, source, spec, field, call)
        await context.threads.preflights.run(call, len(source), check)
    work = partial(open_rows, source, spec, field, ending, bounds)
    return await context.threads.requests.run(call, SLICE_BYTES, work)


def preview_rows(pool: RowFile, rows: list[int]) -> list[dict[str, Any]]:
    """Return the requested rows that exist, up to `MAX_PREVIEW_BYTES` in total."""
    ids = pool.ids()
    values: dict[int, Any] = {}
    remaining_bytes, first, sorted_rows = MAX_PREVIEW_BYTES, 0, sorted(set(rows))
    for part in pool.parts() if sorted_rows else ():
        size = len(next(iter(part.values()))) if isinstance(part, dict) else len(part)
        for row in sorted_rows:
            if first <= row < first + size:
                value, size_bytes = _as_json(part, row - first, pool.spec.text is not None)
                remaining_bytes -= size_bytes
                if remaining_bytes < 0:
                    break
                pool.bounds.reserve(2 * size_bytes, "rows")
                values[row] = value
        first += size
        pool.bounds.pause()
        if first > sorted_rows[-1] or remaining_bytes < 0:
            break
    return [
        {"index": row, "id": str(row) if ids is None else ids[row], "row": values[row]}
        for row in rows
        if row in values
    ]


def _as_json(part: Part, row: int, is_text: bool) -> tuple[Any, int]:
    """Convert a row to JSON-serialisable values and estimate its size in bytes."""
    if isinstance(part, dict):
        cells = {name: _plain(values[row]) for name, values in part.items()}
        return cells, sum(len(str(cell)) for cell in cells.values())
    value = part[row]
    if isinstance(value, np.ndarray):
        with np.errstate(over="ignore"):
            return value.ravel().astype(np.float32), NUMBER_BYTES * value.size
    if isinstance(value, bytes) and not is_text:
        return base64.b64encode(value).decode(), 2 * len(value)
    text = value.decode("utf-8-sig", "replace") if isinstance(value, bytes) else str(value)
    text = text[:MAX_CHARACTERS]
    return text, len(text)


def _plain(cell: Any) -> Any:
    if isinstance(cell, float | np.floating):
        return float(cell) if np.isfinite(cell) else None
    return cell if isinstance(cell, int | str | None) else str(cell)


def resolve_path(
    folder: Path | None, name: str, field: str, allowed: frozenset[str] | None = None
) -> Path:
    """Return the path of a file in the pools folder.

    Args:
        allowed: the files and folders that the request's key can use, or None for all.
    """
    if folder is None:
        expected = "none, because DUBITO_POOLS is not set"
        raise InvalidInput(field, expected, "a name")
    if "\0" in name or not name:
        raise InvalidInput(field, "the name of a file", "none")
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError):
        raise InvalidInput(field, "the name of a file", describe_value(name)) from None
    expected = "the name of a file in the folder of pools"
    if Path(name).is_absolute() or not path.is_relative_to(root) or path == root:
        raise InvalidInput(field, expected, "a path outside the folder")
    if allowed is not None and not any(
        path.is_relative_to((root / pool).resolve()) for pool in allowed
    ):
        raise InvalidInput(field, expected, "a missing file")
    if not path.is_file():
        raise InvalidInput(field, expected, "a missing file")
    return path
