"""MLflow's scoring protocol: `POST /invocations`, `GET /ping` and `GET /version`.

Rows are sent as a data frame or in the form of TensorFlow Serving, with `params`. The default model
answers, or the one in `params.model`. As for `/v2`, others have specified these routes, so they are
not in our OpenAPI document.
"""

import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput, kind_of
from service import VERSION, limits
from service.api.health import refuse_unready
from service.api.json_blocks import JsonRows, take_apart
from service.api.media_types import JSON
from service.api.pool_files import open_file
from service.api.predict import PredictWork, predict
from service.api.problems import ErrorForm, register_error_form
from service.api.requests import (
    SMALL_JSON_BYTES,
    came,
    envelope_of,
    fields_of,
    parse_json,
    read_body,
    refuse_none_or_many,
    request_media_type,
    reserve_json,
    run_reading,
)
from service.api.responses import predict_json, response
from service.api.rows import Cells, Rows
from service.api.schemas import PredictRequest
from service.auth.scopes import OPEN_TO_ALL, needs
from service.context import Context, context_of
from service.errors import Unsupported
from service.request_context import RequestContext

CSV = "text/csv"
FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
SPLIT, RECORDS, INSTANCES, INPUTS = FORMS
PARAMS = "params"
ITEM_BYTES = dict.fromkeys(",[{:", 60)  # of an item of JSON, in memory
NANS_AT_ONCE = 4096
# Up to the next NaN outside a string. Python writes missing values so.
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
    refuse_unready(context_of(request))
    return Response(b"\n", media_type="text/plain")


@router.get("/version", dependencies=[OPEN_TO_ALL])
async def get_version() -> Response:
    return Response(VERSION.encode(), media_type="text/plain")


@router.post("/invocations", dependencies=[needs("predict")])
async def post_invocations(request: Request) -> Response:
    """Predict rows. The answer is that of `POST /predict`."""
    context = context_of(request)
    call = context.begin(request, has_rows=True)
    if request.query_params:
        raise InvalidInput("query", "nothing, since params stand in the body", "parameters")
    asked = await _read(context, call)
    return response(await predict(context, asked, predict_json), JSON)


async def _read(context: Context, call: RequestContext) -> PredictWork:
    settings, media_type = context.settings, request_media_type(call.request)
    if media_type == CSV:
        return await _read_csv(context, call)
    if media_type != JSON:
        raise Unsupported("Content-Type", f"{JSON} or {CSV}", came(call.request))
    body = await read_body(call, limits.MAX_JSON_BYTES)
    work = partial(read_invocation, body, settings.max_rows, call)
    size = len(body)
    envelope, form, given = await run_reading(context, call, size, work)
    del body, work
    call.record.read = time.perf_counter()
    served = await context.find_model(call, envelope)
    spec = served.model.manifest.input
    spec = spec.encoded if envelope.encoded else spec
    rows = await run_reading(
        context, call, size, partial(rows_of, form, given, spec, settings.max_rows)
    )
    return PredictWork(call, envelope, served, rows)


async def _read_csv(context: Context, call: RequestContext) -> PredictWork:
    settings = context.settings
    body = await read_body(call, limits.MAX_JSON_BYTES)
    envelope = envelope_of_params({})
    served = await context.find_model(call, envelope)
    pool = await open_file(context, call, body, served, "body", envelope.encoded, ".csv")
    refuse_none_or_many("body", pool.rows, settings.max_rows)
    return PredictWork(call, envelope, served, pool)


def read_invocation(
    body: bytes | bytearray, max_rows: int, call: RequestContext
) -> tuple[PredictRequest, str, Any]:
    """Return a request's options, the form of its rows, and the rows."""
    if b"NaN" in body:
        call.reservation.acquire(3 * len(body) // 2)
        body = _without_nan(body, call)
    if len(body) > SMALL_JSON_BYTES:
        reserve_json(body, "body", max_rows, call, ITEM_BYTES)
        content, rows = take_apart(body, INPUTS, max_rows, call.pause)
        if rows is not None:
            content[INPUTS] = rows
    else:
        content = parse_json(body)
    if content.keys() - {*FORMS, PARAMS}:
        raise InvalidInput("body", f"one of {', '.join(FORMS)}, and {PARAMS}", "another field")
    given = [form for form in FORMS if form in content]
    if len(given) != 1:
        raise InvalidInput("body", f"one of {', '.join(FORMS)}", f"{len(given)} of them")
    params = content.get(PARAMS)
    if params is not None and not isinstance(params, dict):
        raise InvalidInput(PARAMS, "an object", kind_of(params))
    return envelope_of_params(params or {}), given[0], content[given[0]]


def envelope_of_params(params: dict[str, Any]) -> PredictRequest:
    """Return the options in `params`, which can also name the model."""
    named: dict[str, Any] = {name: params[name] for name in ("model", "version") if name in params}
    others = {name: value for name, value in params.items() if name not in named}
    return envelope_of({**fields_of(others, PARAMS, also=("model", "version")), **named}, PARAMS)


def rows_of(form: str, given: Any, spec: InputSpec, max_rows: int) -> Rows:
    """Return the rows of a request in a form that `/predict` takes, without extra columns."""
    rows: Rows
    if form == SPLIT:
        rows = _split(given, spec)
    elif form == RECORDS:
        rows = _records(given, spec, RECORDS)
    elif isinstance(given, dict) and form == INPUTS:
        rows = _columnar(given, spec)
    elif isinstance(given, list) and given and isinstance(given[0], dict) and not spec.columns:
        rows = _records(given, spec, form)
    elif isinstance(given, list | JsonRows):
        rows = given
    else:
        raise InvalidInput(form, "an array of rows", kind_of(given))
    refuse_none_or_many(form, len(rows), max_rows)
    return rows


def _split(given: Any, spec: InputSpec) -> Rows:
    known = {"columns", "data", "index"}
    if not isinstance(given, dict) or not {"columns", "data"} <= given.keys() <= known:
        expected = "an object of columns and data, and perhaps index"
        raise InvalidInput(SPLIT, expected, kind_of(given))
    names, data = given["columns"], given["data"]
    if not isinstance(names, list) or len({str(name) for name in names}) < len(names):
        raise InvalidInput(f"{SPLIT}.columns", "an array of different names", kind_of(names))
    if not isinstance(data, list):
        raise InvalidInput(f"{SPLIT}.data", "an array of rows", kind_of(data))
    for n, row in enumerate(data):
        if not isinstance(row, list) or len(row) != len(names):
            expected = f"an array of {len(names)}, as there are columns"
            raise InvalidInput(f"{SPLIT}.data.{n}", expected, kind_of(row))

    def column(name: str) -> list[Any]:
        place = names.index(name)
        return [row[place] for row in data]

    wanted = _take_columns(names, column, len(data), spec, f"{SPLIT}.columns")
    return _whole_rows(data) if wanted is None else wanted


def _records(given: Any, spec: InputSpec, form: str) -> Rows:
    if not isinstance(given, list) or not all(isinstance(record, dict) for record in given):
        raise InvalidInput(form, "an array of objects", kind_of(given))
    if not given:
        return []
    for n, record in enumerate(given):
        if record.keys() != given[0].keys():
            raise InvalidInput(f"{form}.{n}", "the same columns as the row before it", "others")

    def column(name: str) -> list[Any]:
        return [record[name] for record in given]

    wanted = _take_columns(list(given[0]), column, len(given), spec, form)
    return _whole_rows([list(row.values()) for row in given]) if wanted is None else wanted


def _columnar(given: dict[str, Any], spec: InputSpec) -> Rows:
    """Return rows from arrays by column, or from one array of rows if the model has no columns."""
    columns = list(given.values())
    if not columns or not all(
        isinstance(column, list) and len(column) == len(columns[0]) for column in columns
    ):
        raise InvalidInput(INPUTS, "arrays of one length, by column", "others")
    wanted = _take_columns(list(given), given.__getitem__, len(columns[0]), spec, INPUTS)
    if wanted is not None:
        return wanted
    if len(given) != 1:
        expected = "one array of rows, since the model takes no columns"
        raise InvalidInput(INPUTS, expected, f"{len(given)} arrays")
    rows: list[Any] = columns[0]
    return rows


def _take_columns(
    names: list[Any],
    column: Callable[[str], list[Any]],
    count: int,
    spec: InputSpec,
    place: str,
) -> Rows | None:
    """Return the columns that a model takes; None if it takes rows: numbers, images or texts."""
    wanted = [column.name for column in spec.columns]
    if spec.text is not None and len(names) > 1:
        wanted = [spec.text.column]
    for name in wanted:
        if name not in names:
            raise InvalidInput(place, f"a column {name[:80]}", "none of that name")
    if spec.columns:
        return Cells({name: column(name) for name in wanted}, count)
    return column(wanted[0]) if wanted else None


def _whole_rows(data: list[list[Any]]) -> list[Any]:
    """Return rows. A single cell can be the row itself: a text, a file or an array."""
    is_row = bool(data) and len(data[0]) == 1 and isinstance(data[0][0], str | list)
    return [row[0] for row in data] if is_row else data


def _without_nan(body: bytes | bytearray, call: RequestContext) -> bytearray:
    """Replace NaN in JSON by null; pause between steps."""
    changed = bytearray()
    at = count = 0
    while (found := _NAN.match(body, at)) is not None:
        changed += memoryview(body)[at : found.end() - 3]
        changed += b"null"
        at, count = found.end(), count + 1
        if count % NANS_AT_ONCE == 0:
            call.pause()
    changed += memoryview(body)[at:]
    return changed
