"""MLflow's scoring protocol: `POST /invocations`, `GET /ping` and `GET /version`.

Requests have rows as a data frame or in TensorFlow Serving's format, and options in `params`. The
default model answers unless `params.model` names another. MLflow specifies these routes, so our
OpenAPI document does not include them.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from integrations.requests import Cells, build_envelope, parse_options
from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput, describe_value
from model_store.sources.rows import Rows
from model_store.types import Content
from model_store.version import VERSION
from service import limits
from service.api.health import check_ready
from service.api.json_blocks import JsonRows
from service.api.media_types import JSON
from service.api.predict import PredictWork, open_file, predict
from service.api.problems import ErrorForm, register_error_form
from service.api.requests import (
    check_row_count,
    read_body,
    read_json,
    request_media_type,
    run_parser,
    unsupported,
)
from service.api.responses import predict_json, response
from service.api.schemas import PredictRequest
from service.auth.scopes import OPEN_TO_ALL, needs
from service.context import Context, get_context
from service.request_context import RequestContext

CSV = "text/csv"
FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
SPLIT, RECORDS, INSTANCES, INPUTS = FORMS
PARAMS = "params"
ITEM_BYTES = dict.fromkeys(",[{:", 60)  # memory of a JSON item, by its first character
NANS_PER_STEP = 4096
# Matches up to the next NaN outside a string. Python's JSON has NaN for missing values.
_NAN = re.compile(rb'(?:[^"N]++|"(?:[^"\\]++|\\.)*+"|N(?!aN\b))*+NaN\b', re.DOTALL)

CODES = {
    400: "BAD_REQUEST",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "RESOURCE_DOES_NOT_EXIST",
    405: "BAD_REQUEST",
    413: "BAD_REQUEST",
    415: "BAD_REQUEST",
    429: "REQUEST_LIMIT_EXCEEDED",
    503: "TEMPORARILY_UNAVAILABLE",
}
PATHS = {"/invocations", "/ping", "/version"}


def _error(status: int, detail: str) -> dict[str, str]:
    code = CODES.get(status, "BAD_REQUEST" if status < 500 else "INTERNAL_ERROR")
    return {"error_code": code, "message": detail}


register_error_form(ErrorForm(PATHS.__contains__, _error, "docs/open-inference.md"))

router = APIRouter(include_in_schema=False)


@router.get("/ping", dependencies=[OPEN_TO_ALL])
async def get_ping(request: Request) -> Response:
    check_ready(get_context(request))
    return Response(b"\n", media_type="text/plain")


@router.get("/version", dependencies=[OPEN_TO_ALL])
async def get_version() -> Response:
    return Response(VERSION.encode(), media_type="text/plain")


@router.post("/invocations", dependencies=[needs("predict")])
async def post_invocations(request: Request) -> Response:
    """Predict rows. The response is the same as for `POST /predict`."""
    context = get_context(request)
    call = context.begin(request, has_rows=True)
    if request.query_params:
        raise InvalidInput("query", "no parameters, as `params` belongs in the body", "some")
    work = await _read(context, call)
    return response(await predict(context, work, predict_json), JSON)


async def _read(context: Context, call: RequestContext) -> PredictWork:
    settings, media_type = context.settings, request_media_type(call.request)
    if media_type == CSV:
        return await _read_csv(context, call)
    if media_type != JSON:
        raise unsupported(call.request, f"{JSON} or {CSV}")
    body = await read_body(call, limits.MAX_JSON_BYTES)
    parse = partial(read_invocation, body, settings.max_rows, call)
    size = len(body)
    envelope, form, content = await run_parser(context, call, size, parse)
    del body, parse  # frees the memory of the body
    loaded = await context.find_model(call, envelope)
    spec = loaded.model.manifest.input
    rows = await run_parser(
        context, call, size, partial(read_rows, form, content, spec, settings.max_rows)
    )
    return PredictWork(call, envelope, loaded, rows)


async def _read_csv(context: Context, call: RequestContext) -> PredictWork:
    settings = context.settings
    body = await read_body(call, limits.MAX_JSON_BYTES)
    envelope = read_params({})
    loaded = await context.find_model(call, envelope)
    pool = await open_file(context, call, body, loaded, "body", ".csv")
    check_row_count("body", pool.rows, settings.max_rows)
    return PredictWork(call, envelope, loaded, pool, "body")


def read_invocation(
    body: Content, max_rows: int, call: RequestContext
) -> tuple[PredictRequest, str, Any]:
    """Parse a request's options, input format and rows."""
    if body.find(b"NaN") >= 0:
        call.reservation.acquire(3 * len(body) // 2)
        body = _without_nan(body, call)
    content, rows = read_json(body, INPUTS, max_rows, call, ITEM_BYTES)
    if rows is not None:
        content[INPUTS] = rows
    if content.keys() - {*FORMS, PARAMS}:
        raise InvalidInput("body", f"one of {', '.join(FORMS)}, and {PARAMS}", "another field")
    forms = [form for form in FORMS if form in content]
    if len(forms) != 1:
        raise InvalidInput("body", f"one of {', '.join(FORMS)}", f"{len(forms)} of them")
    params = content.get(PARAMS)
    if params is not None and not isinstance(params, dict):
        raise InvalidInput(PARAMS, "an object", describe_value(params))
    return read_params(params or {}), forms[0], content[forms[0]]


def read_params(params: dict[str, Any]) -> PredictRequest:
    """Convert `params` to `/predict` options, including the model and its version."""
    model: dict[str, Any] = {name: params[name] for name in ("model", "version") if name in params}
    options = {name: value for name, value in params.items() if name not in model}
    return build_envelope(
        {**parse_options(options, PARAMS, extra=("model", "version")), **model}, PARAMS
    )


def read_rows(form: str, content: Any, spec: InputSpec, max_rows: int) -> Rows:
    """Convert a request's rows to rows for `/predict`, dropping extra columns."""
    rows: Rows
    first = content[0] if isinstance(content, list) and content else None
    if form == SPLIT:
        rows = _split(content, spec)
    elif form == RECORDS:
        rows = _records(content, spec, RECORDS)
    elif isinstance(content, dict) and form == INPUTS:
        rows = _columnar(content, spec)
    elif isinstance(first, dict) and not spec.columns:
        rows = _records(content, spec, form)
    elif isinstance(content, list | JsonRows):
        rows = content
    else:
        raise InvalidInput(form, "an array of rows", describe_value(content))
    check_row_count(form, len(rows), max_rows)
    return rows


def _split(content: Any, spec: InputSpec) -> Rows:
    known = {"columns", "data", "index"}
    if not isinstance(content, dict) or not {"columns", "data"} <= content.keys() <= known:
        expected = "an object with columns, data and optionally index"
        raise InvalidInput(SPLIT, expected, describe_value(content))
    names, data = content["columns"], content["data"]
    if not isinstance(names, list) or len({str(name) for name in names}) < len(names):
        raise InvalidInput(f"{SPLIT}.columns", "an array of distinct names", describe_value(names))
    if not isinstance(data, list):
        raise InvalidInput(f"{SPLIT}.data", "an array of rows", describe_value(data))
    for n, row in enumerate(data):
        if not isinstance(row, list) or len(row) != len(names):
            expected = f"an array of {len(names)} cells, one per column"
            raise InvalidInput(f"{SPLIT}.data.{n}", expected, describe_value(row))

    def column(name: str) -> list[Any]:
        index = names.index(name)
        return [row[index] for row in data]

    rows = _take_columns(names, column, len(data), spec, f"{SPLIT}.columns")
    return _unwrap_cells(data) if rows is None else rows


def _records(content: Any, spec: InputSpec, form: str) -> Rows:
    if not isinstance(content, list) or not all(isinstance(record, dict) for record in content):
        raise InvalidInput(form, "an array of objects", describe_value(content))
    if not content:
        return []
    for n, record in enumerate(content):
        if record.keys() != content[0].keys():
            raise InvalidInput(f"{form}.{n}", "the columns of the first row", "other columns")

    def column(name: str) -> list[Any]:
        return [record[name] for record in content]

    rows = _take_columns(list(content[0]), column, len(content), spec, form)
    return _unwrap_cells([list(row.values()) for row in content]) if rows is None else rows


def _columnar(content: dict[str, Any], spec: InputSpec) -> Rows:
    """Convert one array per column to rows. Models without columns accept a single array."""
    columns = list(content.values())
    if not columns or not all(
        isinstance(column, list) and len(column) == len(columns[0]) for column in columns
    ):
        raise InvalidInput(INPUTS, "arrays of equal length, by column", "others")
    rows = _take_columns(list(content), content.__getitem__, len(columns[0]), spec, INPUTS)
    if rows is not None:
        return rows
    if len(columns) != 1:
        expected = "a single array of rows, since the model has no columns"
        raise InvalidInput(INPUTS, expected, f"{len(columns)} arrays")
    array: list[Any] = columns[0]
    return array


def _take_columns(
    names: list[Any],
    column: Callable[[str], list[Any]],
    count: int,
    spec: InputSpec,
    field: str,
) -> Rows | None:
    """Select the model's columns. Return None if it has no named columns."""
    selected = [column.name for column in spec.columns]
    if spec.text is not None and len(names) > 1:
        selected = [spec.text.column]
    for name in selected:
        if name not in names:
            raise InvalidInput(field, f"a column {name[:80]}", "no such column")
    if spec.columns:
        return Cells({name: column(name) for name in selected}, count)
    return column(selected[0]) if selected else None


def _unwrap_cells(data: list[list[Any]]) -> list[Any]:
    """If rows consist of a single text, file or array, replace each row with that value."""
    is_row = bool(data) and len(data[0]) == 1 and isinstance(data[0][0], str | list)
    return [row[0] for row in data] if is_row else data


def _without_nan(body: Content, call: RequestContext) -> bytearray:
    """Replace NaN with null in a request body, pausing between chunks."""
    valid = bytearray()
    position = count = 0
    while (match := _NAN.match(body, position)) is not None:
        valid += memoryview(body)[position : match.end() - 3]
        valid += b"null"
        position, count = match.end(), count + 1
        if count % NANS_PER_STEP == 0:
            call.pause()
    valid += memoryview(body)[position:]
    return valid
