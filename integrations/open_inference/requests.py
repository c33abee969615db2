"""Requests of the Open Inference Protocol: a JSON object, and tensors after it as bytes.

The header `Inference-Header-Content-Length` has the length of the JSON if bytes follow. The
Content-Type is ignored, because clients send any or none.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.datastructures import Headers

from integrations.open_inference.tensors import (
    ARRAY_BYTES,
    BOOL,
    BYTES,
    DATATYPES,
    Tensor,
    array_of_bytes,
    array_of_json,
    shape_of,
    strings_of_json,
)
from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    InputSpec,
    Manifest,
    NumericColumn,
)
from model_store.errors import InvalidInput, kind_of
from model_store.sources.cells import cell_reader
from service.api.json_blocks import take_apart
from service.api.requests import (
    MAX_NESTED,
    SMALL_JSON_BYTES,
    fields_of,
    parse_json,
    refuse_none_or_many,
    reserve_json,
)
from service.api.rows import Cells, Rows
from service.errors import TooLarge
from service.request_context import RequestContext

HEADER_LENGTH = "Inference-Header-Content-Length"
MAX_TENSORS = 10_000
MAX_OUTPUTS = 1000
MAX_ID, MAX_NAME = 1024, 1000  # characters
ITEM_BYTES = {",": 40, "[": 40, "{": 40, '"': 20}  # of an item of JSON, in memory
TENSOR_BYTES = 1000  # of a tensor's description in memory
FIELDS = {"id", "parameters", "inputs", "outputs", "model_name", "model_version"}
TENSOR_FIELDS = {"name", "shape", "datatype", "data", "parameters"}
# Parameters that clients and proxies add; they are ignored.
RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "headers", "content_type"}
RESERVED_PREFIX = "triton_"
TIMEOUT, BINARY_OUTPUT = "timeout", "binary_data_output"
SAMPLES = "samples"
INPUT = "inputs"  # the tensor of a model with one; other names work too
GROUPS = "groups"  # the group of each row, if the model is calibrated by group
CELL_BYTES = 40  # of a table's cell, without its tensor
_LENGTH = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, eq=False)
class InferRequest:
    id: str | None
    fields: dict[str, Any]  # of the envelope of /predict
    tensors: list[Tensor]
    # Requested outputs, and whether as bytes; None: all but the optional ones
    outputs: dict[str, bool | None] | None
    binary_output: bool  # by default
    is_passed_on: bool = False  # whether the tensors are another model's answer


def header_length(headers: Headers, body: bytes | bytearray) -> int | None:
    """Return how many bytes of a body are JSON; None, without the header, for all."""
    given = headers.get(HEADER_LENGTH)
    if given is None:
        return None
    if not _LENGTH.fullmatch(given) or not 1 <= int(given) <= len(body):
        raise InvalidInput(HEADER_LENGTH, f"from 1 to the {len(body)} bytes of the body", "another")
    return int(given)


def read_infer(
    body: bytes | bytearray, length: int | None, max_json: int, call: RequestContext
) -> InferRequest:
    """Read a request; `length` bytes of it are JSON, or all if it is None."""
    text = body if length is None else bytes(memoryview(body)[:length])
    if len(text) > max_json:
        raise TooLarge(
            "body", f"at most {max_json} bytes of JSON", "more; tensors may follow it as bytes"
        )
    content = _large(text, call) if len(text) > SMALL_JSON_BYTES else parse_json(text)
    if not content.keys() <= FIELDS:
        raise InvalidInput("body", f"no fields but {', '.join(sorted(FIELDS))}", "another one")
    is_passed_on = content.get("inputs") is None and content.get("outputs") is not None
    where = "outputs" if is_passed_on else "inputs"
    after = memoryview(body)[len(text) :]
    tensors = _tensors(content.get(where), where, after, call)
    parameters = {} if is_passed_on else _object(content.get("parameters"), "parameters")
    outputs = None if is_passed_on else _outputs(content.get("outputs"))
    fields, binary_output = _options(parameters)
    if outputs is not None and any(name.partition(".")[0] == SAMPLES for name in outputs):
        fields["return_samples"] = True
    return InferRequest(
        _id(content.get("id")), fields, tensors, outputs, binary_output, is_passed_on
    )


def _large(text: bytes | bytearray, call: RequestContext) -> dict[str, Any]:
    """Parse long JSON, tensor by tensor."""
    reserve_json(text, "body", MAX_NESTED, call, ITEM_BYTES)
    content, tensors = take_apart(text, "inputs", MAX_TENSORS, call.pause)
    call.pause()
    if tensors is not None:
        content["inputs"] = []
        for block in tensors.parse_blocks():
            content["inputs"] += block
            call.pause()
    return content


def _object(given: Any, place: str) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise InvalidInput(place, "an object", kind_of(given))
    return given


def _id(given: Any) -> str | None:
    if given is not None and (type(given) is not str or len(given) > MAX_ID):
        raise InvalidInput("id", f"a string of at most {MAX_ID} characters", kind_of(given))
    return given or None


def _tensors(given: Any, where: str, after: memoryview, call: RequestContext) -> list[Tensor]:
    if not isinstance(given, list) or not given:
        expected = "an array of at least one tensor"
        raise InvalidInput(where, expected, "none" if not given else kind_of(given))
    if len(given) > MAX_TENSORS:
        raise TooLarge(where, f"at most {MAX_TENSORS} tensors", str(len(given)))
    call.reservation.acquire(TENSOR_BYTES * len(given))
    tensors = []
    for n, item in enumerate(given):
        tensor, after = _tensor(item, f"{where}.{n}", after, call)
        tensors.append(tensor)
        given[n] = None  # frees its JSON
        if tensor.size > SMALL_JSON_BYTES:
            call.pause()
    if len(after):
        expected = "as many bytes after the JSON as its tensors say"
        raise InvalidInput("body", expected, f"{len(after)} more")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise InvalidInput(where, "tensors of different names", "some that are the same")
    return tensors


def _tensor(
    item: Any, place: str, after: memoryview, call: RequestContext
) -> tuple[Tensor, memoryview]:
    if not isinstance(item, dict):
        raise InvalidInput(place, "an object", kind_of(item))
    if not item.keys() <= TENSOR_FIELDS:
        expected = f"no fields but {', '.join(sorted(TENSOR_FIELDS))}"
        raise InvalidInput(place, expected, "another one")
    name, datatype = _name(item.get("name"), place), item.get("datatype")
    if type(datatype) is not str or datatype not in DATATYPES:
        got = "another" if isinstance(datatype, str) else kind_of(datatype)
        raise InvalidInput(f"{place}.datatype", f"one of {', '.join(DATATYPES)}", got)
    shape = shape_of(item.get("shape"), place)
    parameters = _object(item.get("parameters"), f"{place}.parameters")
    unknown = parameters.keys() - {"binary_data_size", "content_type"}
    if unknown:  # shared memory, for one
        expected = "none but binary_data_size and content_type"
        raise InvalidInput(f"{place}.parameters", expected, "another")
    size, data = parameters.get("binary_data_size"), item.get("data")
    is_base64 = parameters.get("content_type") == "base64"
    if (size is None) == (data is None):
        got = "both" if data is not None else "neither"
        raise InvalidInput(place, "either data or parameters.binary_data_size", got)
    if size is None:
        if datatype == BYTES:
            elements = strings_of_json(data, shape, place)
            return Tensor(place, name, datatype, shape, None, elements, None, is_base64), after
        array = array_of_json(data, datatype, shape, place)
    else:
        if type(size) is not int or not 0 <= size <= len(after):
            expected = f"at most the {len(after)} bytes that are left of the body"
            raise InvalidInput(f"{place}.parameters.binary_data_size", expected, kind_of(size))
        own, after = after[:size], after[size:]
        if datatype == BYTES:
            return Tensor(place, name, datatype, shape, None, None, own, is_base64), after
        array = array_of_bytes(own, datatype, shape, place)
    call.reservation.acquire(ARRAY_BYTES * array.size)
    return Tensor(place, name, datatype, shape, array), after


def _name(name: Any, place: str) -> str:
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME:
        expected = f"a string of 1 to {MAX_NAME} characters"
        raise InvalidInput(f"{place}.name", expected, kind_of(name))
    return name


def _outputs(given: Any) -> dict[str, bool | None] | None:
    """Return the requested outputs in order, and whether each is sent as bytes; None by default."""
    if given is None or given == []:
        return None
    if not isinstance(given, list) or len(given) > MAX_OUTPUTS:
        raise InvalidInput("outputs", f"an array of at most {MAX_OUTPUTS}", kind_of(given))
    wanted: dict[str, bool | None] = {}
    for n, item in enumerate(given):
        place = f"outputs.{n}"
        if not isinstance(item, dict) or not item.keys() <= {"name", "parameters"}:
            raise InvalidInput(place, "an object of name and parameters", kind_of(item))
        name = _name(item.get("name"), place)
        parameters = _object(item.get("parameters"), f"{place}.parameters")
        if parameters.keys() - {"binary_data", "content_type"}:
            expected = "none but binary_data and content_type"
            raise InvalidInput(f"{place}.parameters", expected, "another")
        if name in wanted:
            raise InvalidInput(place, "outputs of different names", "some that are the same")
        wanted[name] = _flag(parameters.get("binary_data"), f"{place}.parameters.binary_data")
    return wanted


def _flag(given: Any, place: str) -> bool | None:
    if given is not None and type(given) is not bool:
        raise InvalidInput(place, "true or false", kind_of(given))
    return given


def _options(parameters: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the request's options from its parameters, and whether outputs are sent as bytes."""
    binary_output = _flag(parameters.get(BINARY_OUTPUT), f"parameters.{BINARY_OUTPUT}") or False
    ours = {
        name: value
        for name, value in parameters.items()
        if name not in RESERVED and name != BINARY_OUTPUT and not name.startswith(RESERVED_PREFIX)
    }
    timeout = ours.pop(TIMEOUT, None)
    fields = fields_of(ours, "parameters", also=(TIMEOUT,))
    if timeout is not None:
        microseconds = _whole(timeout)
        if microseconds is None or microseconds > 86_400_000_000:
            expected = "microseconds, at most those of a day"
            raise InvalidInput(f"parameters.{TIMEOUT}", expected, "another")
        if "deadline_s" in fields:
            raise InvalidInput(f"parameters.{TIMEOUT}", "none with deadline_s", "both")
        if microseconds:  # 0: none
            fields["deadline_s"] = microseconds / 1e6
    return fields, binary_output


def _whole(given: Any) -> int | None:
    """Return a non-negative integer, also from a string; None for others."""
    if type(given) is str and _LENGTH.fullmatch(given):
        given = int(given)
    return given if type(given) is int and given >= 0 else None


def rows_of(
    tensors: list[Tensor],
    manifest: Manifest,
    max_rows: int,
    is_passed_on: bool,
    call: RequestContext,
    encoded: bool = False,
) -> tuple[Rows, list[str] | None]:
    """Return the rows of a request in a form that `/predict` takes, and their groups, if any.

    Extra tensors of another model's answer are ignored.
    """
    groups = None
    given = next((tensor for tensor in tensors if tensor.name == GROUPS), None)
    if given is not None and is_by_group(manifest):
        groups = _groups(given, call)
        tensors = [tensor for tensor in tensors if tensor is not given]
    spec = manifest.input.encoded if encoded else manifest.input
    if spec.columns:
        return _cells(tensors, spec, max_rows, is_passed_on, call), groups
    named = [tensor for tensor in tensors if tensor.name == INPUT]
    if len(tensors) > 1 and is_passed_on and named:
        tensors = named
    if len(tensors) != 1:
        raise InvalidInput("inputs", "one tensor of rows", f"{len(tensors)}")
    _check_rows(tensors[0], max_rows)
    return _rows(tensors[0], spec, call), groups


def is_by_group(manifest: Manifest) -> bool:
    """Whether a tensor `groups` has the rows' groups, and is no column."""
    categories = manifest.categories
    is_column = any(column.name == GROUPS for column in manifest.input.columns)
    return categories is not None and categories.kind == "group" and not is_column


def _groups(tensor: Tensor, call: RequestContext) -> list[str]:
    if tensor.datatype != BYTES:
        expected = f"{BYTES}, the group of each row"
        raise InvalidInput(f"{tensor.place}.datatype", expected, tensor.datatype)
    return ["" if v is None else _text(v, tensor.place) for v in tensor.values(call)]


def _check_rows(tensor: Tensor, max_rows: int) -> None:
    refuse_none_or_many(f"{tensor.place}.shape", tensor.shape[0], max_rows)


def _check_one_each(tensor: Tensor) -> None:
    if len(tensor.shape) > 2 or tensor.size != tensor.shape[0]:
        expected = "(N,) or (N, 1), an element for each row"
        raise InvalidInput(f"{tensor.place}.shape", expected, f"{len(tensor.shape)} axes")


def _refuse_base64(tensor: Tensor) -> None:
    if tensor.is_base64:  # else the encoded text would be predicted
        field = f"{tensor.place}.parameters.content_type"
        raise InvalidInput(field, "text as it is (str), or none", "base64")


def _rows(tensor: Tensor, spec: InputSpec, call: RequestContext) -> Rows:
    takes_bytes = spec.image is not None or spec.text is not None
    if tensor.datatype == BOOL or (tensor.datatype == BYTES and not takes_bytes):
        expected = "a datatype of numbers, FP32 for one"
        raise InvalidInput(f"{tensor.place}.datatype", expected, tensor.datatype)
    if tensor.datatype == BYTES:
        _check_one_each(tensor)
        if spec.image is None:
            _refuse_base64(tensor)
        return tensor.values(call)
    assert tensor.array is not None
    return tensor.array


def _cells(
    tensors: list[Tensor], spec: InputSpec, max_rows: int, is_passed_on: bool, call: RequestContext
) -> Cells:
    by_name = {tensor.name: tensor for tensor in tensors}
    names = [column.name for column in spec.columns]
    absent = next((name for name in names if name not in by_name), None)
    if absent is not None:
        expected = f"a tensor for each of the {len(names)} columns (or with `encoded` true one)"
        raise InvalidInput("inputs", expected, f"none of {absent!r}"[:100])
    extra = next((tensor for tensor in tensors if tensor.name not in names), None)
    if extra is not None and not is_passed_on:
        known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise InvalidInput(f"{extra.place}.name", f"one of the columns {known[:500]}", "another")
    count = by_name[names[0]].shape[0]
    cells: dict[str, list[Any] | np.ndarray] = {}
    for column in spec.columns:
        tensor = by_name[column.name]
        _check_rows(tensor, max_rows)
        _check_one_each(tensor)
        if tensor.size != count:
            expected = f"{count} rows, as the tensors before it"
            raise InvalidInput(f"{tensor.place}.shape", expected, f"{tensor.size}")
        call.reservation.reserve(CELL_BYTES * count, "inputs")
        cells[column.name] = _column(tensor, column, spec, call)
        call.pause()
    return Cells(cells, count)


def _column(
    tensor: Tensor, column: AnyColumn, spec: InputSpec, call: RequestContext
) -> list[Any] | np.ndarray:
    """Return the cells of a column. NaN is a missing value."""
    if tensor.datatype == BYTES:
        _refuse_base64(tensor)
        read = cell_reader(column, spec.missing_values)
        values = tensor.values(call)
        return [None if value is None else read(_text(value, tensor.place)) for value in values]
    assert tensor.array is not None
    flat = tensor.array.reshape(-1)
    if isinstance(column, CategoricalColumn):
        return [None if value != value else value for value in flat.tolist()]
    is_number = isinstance(column, NumericColumn)
    if tensor.datatype == BOOL or not is_number:
        expected = f"a datatype of numbers, or {BYTES}" if is_number else f"{BYTES}, times as text"
        raise InvalidInput(f"{tensor.place}.datatype", expected, tensor.datatype)
    return flat.astype(np.float64)


def _text(value: str | bytes, place: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidInput(place, "text in UTF-8", "other bytes") from None
