"""Requests of MLflow's scoring protocol: a data frame, or rows as TensorFlow Serving has them, and
`params`."""

import re
from collections.abc import Callable
from typing import Any

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput, kind_of
from service.api.json_blocks import JsonRows, take_apart
from service.api.options import envelope_of, fields_of
from service.api.requests import SMALL_JSON_BYTES, parse_json, refuse_none_or_many
from service.api.rows import Cells, Rows
from service.api.schemas import PredictRequest
from service.call import Call

FORMS = ("dataframe_split", "dataframe_records", "instances", "inputs")
SPLIT, RECORDS, INSTANCES, INPUTS = FORMS
PARAMS = "params"
ITEM_BYTES = 60  # of an item of JSON, in memory
NANS_AT_ONCE = 4096
# Up to the next NaN that is not in a string: Python's writers of JSON have it for a missing value.
_NAN = re.compile(rb'(?:[^"N]++|"(?:[^"\\]++|\\.)*+"|N(?!aN\b))*+NaN\b', re.DOTALL)


def read_invocation(
    body: bytes | bytearray, max_rows: int, call: Call
) -> tuple[PredictRequest, str, Any]:
    """Return the envelope of a request, which form its rows have, and these as they came."""
    if b"NaN" in body:
        call.reservation.acquire(3 * len(body) // 2)
        body = _without_nan(body, call)
    if len(body) > SMALL_JSON_BYTES:
        items = body.count(b",") + body.count(b"[") + body.count(b"{") + body.count(b":")
        call.reservation.reserve(ITEM_BYTES * items, "body")
        call.pause()
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
    """Return the envelope that `params` give; they also say which model, where several are
    served."""
    named: dict[str, Any] = {name: params[name] for name in ("model", "version") if name in params}
    others = {name: value for name, value in params.items() if name not in named}
    return envelope_of({**fields_of(others, PARAMS, also=("model", "version")), **named}, PARAMS)


def rows_of(form: str, given: Any, spec: InputSpec, max_rows: int) -> Rows:
    """Return the rows of a request as `/predict` takes them. Columns that the model does not take
    are passed over."""
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
    """Return rows that came as an array for each column, or of a model without columns as one array
    of rows."""
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
    """Return the columns that a model takes; None where it takes whole rows: numbers, images, or
    texts that came alone."""
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
    """Return rows; the only cell of each may be the row itself: a text, a file, or an array."""
    is_row = bool(data) and len(data[0]) == 1 and isinstance(data[0][0], str | list)
    return [row[0] for row in data] if is_row else data


def _without_nan(body: bytes | bytearray, call: Call) -> bytearray:
    """Return JSON with null for NaN; pauses after each of many steps."""
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
