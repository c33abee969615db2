"""`POST /acquire/preview`, and files of rows: bodies, or files in the operator's folder."""

import base64
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from model_store.errors import InvalidInput, describe_value
from model_store.sources.files import open_rows
from model_store.sources.row_file import Bounds, Part, RowFile, Source
from service.api.dependencies import CurrentContext, CurrentRequest
from service.api.openapi import ROW_ERRORS, file_body
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
from service.api.schemas import Envelope, PreviewAnswer, PreviewRequest
from service.auth.scopes import needs
from service.context import Context
from service.engine.threads import SLICE_BYTES
from service.errors import Unsupported
from service.models.models import ServedModel
from service.request_context import RequestContext

PARQUET_ENDING = FILE_ENDINGS[PARQUET]
TEXT_LETTERS = 1000  # shown of a text
ROWS_BYTES = 64 << 20  # shown of all rows
NUMBER_BYTES = 12  # of a number as JSON, about

router = APIRouter(tags=["Acquire"])


@router.post(
    "/acquire/preview",
    response_model=PreviewAnswer,
    responses=ROW_ERRORS,
    openapi_extra=file_body(PreviewRequest, ENDINGS),
    dependencies=[needs("acquire")],
)
async def post_preview(request: Request, context: CurrentContext, call: CurrentRequest) -> Response:
    """Show some rows of a file as the service reads them, before or after it is ranked."""
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
    shown = await context.threads.requests.run(call, len(body), work)
    answer = {
        "model": loaded.name,
        "version": loaded.version,
        "rows": pool.rows,
        "read_as": pool.read_as,
        "ignored_columns": pool.ignored,
        "preview": shown,
    }
    return json_response(answer)


async def open_rows_file(
    context: Context,
    call: RequestContext,
    body: bytes | bytearray,
    envelope: Envelope,
    loaded: ServedModel,
    field: str,
) -> RowFile:
    """Open a request's file of rows: its body, or a file named in its envelope."""
    file_field = f"{field}_file"
    name = getattr(envelope, file_field, None)
    if name is not None:
        path = await context.threads.state(
            partial(resolve_path, context.settings.pools, name, file_field)
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
    """Open a file of rows. Its memory counts towards the request."""
    bounds = Bounds(call.reservation.reserve, call.pause)
    spec = loaded.model.manifest.input
    spec = spec.encoded if encoded else spec
    if ending == PARQUET_ENDING and not isinstance(source, Path):
        check = partial(context.file_preflights.reserve, source, spec, field, call)
        await context.threads.preflights.run(call, len(source), check)
    work = partial(open_rows, source, spec, field, ending, bounds)
    return await context.threads.requests.run(call, SLICE_BYTES, work)


def preview_rows(pool: RowFile, rows: list[int]) -> list[dict[str, Any]]:
    """Return rows to show, up to `ROWS_BYTES` of them, without those that do not exist."""
    ids = pool.ids()
    found: dict[int, Any] = {}
    left, first, wanted = ROWS_BYTES, 0, sorted(set(rows))
    for part in pool.parts() if wanted else ():
        size = len(next(iter(part.values()))) if isinstance(part, dict) else len(part)
        for row in wanted:
            if first <= row < first + size:
                shown, cost = _as_json(part, row - first, pool.spec.text is not None)
                left -= cost
                if left < 0:
                    break
                pool.bounds.reserve(2 * cost, "rows")
                found[row] = shown
        first += size
        pool.bounds.pause()
        if first > wanted[-1] or left < 0:
            break
    return [
        {"index": row, "id": str(row) if ids is None else ids[row], "row": found[row]}
        for row in rows
        if row in found
    ]


def _as_json(part: Part, row: int, is_text: bool) -> tuple[Any, int]:
    """Return a row for JSON, a file as base64, and about how many bytes it takes."""
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
    text = text[:TEXT_LETTERS]
    return text, len(text)


def _plain(cell: Any) -> Any:
    if isinstance(cell, float | np.floating):
        return float(cell) if np.isfinite(cell) else None
    return cell if isinstance(cell, int | str | None) else str(cell)


def resolve_path(folder: Path | None, name: str, field: str) -> Path:
    """Return the file with this name in the operator's folder."""
    if folder is None:
        expected = "none, since the service has no folder of pools (DUBITO_POOLS)"
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
        raise InvalidInput(field, expected, "a path that leads out of it")
    if not path.is_file():
        raise InvalidInput(field, expected, "one that is not there")
    return path
