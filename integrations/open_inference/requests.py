"""Parse Open Inference Protocol requests.

If binary tensors follow, the header `Inference-Header-Content-Length` has the length of the JSON.
The Content-Type is ignored, because clients send different values or none.
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
    check_shape,
    decode_array,
    parse_array,
    parse_strings,
)
from integrations.requests import Cells, parse_options
from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    InputSpec,
    Manifest,
    NumericColumn,
)
from model_store.errors import InvalidInput, TooLarge, describe_value
from model_store.sources.cells import cell_reader
from model_store.sources.rows import Rows
from model_store.types import Content
from service.api.requests import (
    SMALL_JSON_BYTES,
    check_row_count,
    read_json,
)
from service.request_context import RequestContext

HEADER_LENGTH = "Inference-Header-Content-Length"
MAX_TENSORS = 10_000
MAX_OUTPUTS = 1000
MAX_ID, MAX_NAME = 1024, 1000  # characters
ITEM_BYTES = {",": 40, "[": 40, "{": 40, '"': 20}  # memory of a JSON item, by its first character
TENSOR_BYTES = 1000  # memory of a tensor's description
FIELDS = {"id", "parameters", "inputs", "outputs", "model_name", "model_version"}
TENSOR_FIELDS = {"name", "shape", "datatype", "data", "parameters"}
# Clients and proxies add these parameters, which are ignored.
RESERVED = {"sequence_id", "sequence_start", "sequence_end", "priority", "headers", "content_type"}
RESERVED_PREFIX = "triton_"
TIMEOUT, BINARY_OUTPUT = "timeout", "binary_data_output"
SAMPLES = "samples"
INPUT = "inputs"  # documented name of a single input tensor
GROUPS = "groups"  # group of each row, if calibrated by group
CELL_BYTES = 40  # memory of a table's cell, without its tensor
_LENGTH = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, eq=False)
class InferRequest:
    id: str | None
    fields: dict[str, Any]  # options of /predict
    tensors: list[Tensor]
    outputs: dict[str, bool | None] | None  # whether each is binary; None: default outputs
    binary_output: bool  # default of `outputs`
    is_passed_on: bool = False  # tensors are another model's answer


def header_length(headers: Headers, body: Content) -> int | None:
    """Parse the header with the JSON part's length. Return None if the header is missing."""
    value = headers.get(HEADER_LENGTH)
    if value is None:
        return None
    if not _LENGTH.fullmatch(value) or not 1 <= int(value) <= len(body):
        raise InvalidInput(HEADER_LENGTH, f"a length from 1 to {len(body)} (the body)", "another")
    return int(value)


def read_infer(
    body: Content, length: int | None, max_json: int, call: RequestContext
) -> InferRequest:
    """Parse an inference request. Its first `length` bytes are JSON, or all if None."""
    text = body if length is None else bytes(memoryview(body)[:length])
    if len(text) > max_json:
        received = "more; send tensors in binary format"
        raise TooLarge("body", f"at most {max_json} bytes of JSON", received)
    content, blocks = read_json(text, "inputs", MAX_TENSORS, call, ITEM_BYTES)
    for block in () if blocks is None else blocks.parts():
        content["inputs"] += block
        call.pause()
    if not content.keys() <= FIELDS:
        raise InvalidInput("body", f"only the fields {', '.join(sorted(FIELDS))}", "another")
    is_passed_on = content.get("inputs") is None and content.get("outputs") is not None
    field = "outputs" if is_passed_on else "inputs"
    binary = memoryview(body)[len(text) :]
    tensors = _tensors(content.get(field), field, binary, call)
    parameters = {} if is_passed_on else _object(content.get("parameters"), "parameters")
    outputs = None if is_passed_on else _outputs(content.get("outputs"))
    fields, binary_output = _options(parameters)
    if outputs is not None and any(name.partition(".")[0] == SAMPLES for name in outputs):
        fields["return_samples"] = True
    return InferRequest(
        _id(content.get("id")), fields, tensors, outputs, binary_output, is_passed_on
    )


def _object(value: Any, field: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidInput(field, "an object", describe_value(value))
    return value


def _id(value: Any) -> str | None:
    if value is not None and (type(value) is not str or len(value) > MAX_ID):
        raise InvalidInput("id", f"a string of up to {MAX_ID} characters", describe_value(value))
    return value or None


def _tensors(items: Any, field: str, binary: memoryview, call: RequestContext) -> list[Tensor]:
    if not isinstance(items, list) or not items:
        expected = "an array of at least one tensor"
        raise InvalidInput(field, expected, "none" if not items else describe_value(items))
    if len(items) > MAX_TENSORS:
        raise TooLarge(field, f"at most {MAX_TENSORS} tensors", str(len(items)))
    call.reservation.acquire(TENSOR_BYTES * len(items))
    tensors = []
    for n, item in enumerate(items):
        tensor, binary = _tensor(item, f"{field}.{n}", binary, call)
        tensors.append(tensor)
        items[n] = None  # frees the memory of its JSON
        if tensor.size > SMALL_JSON_BYTES:
            call.pause()
    if len(binary):
        expected = "binary data of the total binary_data_size"
        raise InvalidInput("body", expected, f"{len(binary)} more bytes")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise InvalidInput(field, "tensors with distinct names", "duplicates")
    return tensors


def _tensor(
    item: Any, place: str, binary: memoryview, call: RequestContext
) -> tuple[Tensor, memoryview]:
    """Parse a tensor. Also return the remaining binary data."""
    if not isinstance(item, dict):
        raise InvalidInput(place, "an object", describe_value(item))
    if not item.keys() <= TENSOR_FIELDS:
        expected = f"only the fields {', '.join(sorted(TENSOR_FIELDS))}"
        raise InvalidInput(place, expected, "another")
    name, datatype = _name(item.get("name"), place), item.get("datatype")
    if type(datatype) is not str or datatype not in DATATYPES:
        received = "another" if isinstance(datatype, str) else describe_value(datatype)
        raise InvalidInput(f"{place}.datatype", f"one of {', '.join(DATATYPES)}", received)
    shape = check_shape(item.get("shape"), place)
    parameters = _object(item.get("parameters"), f"{place}.parameters")
    if parameters.keys() - {"binary_data_size", "content_type"}:
        expected = "only binary_data_size and content_type"
        raise InvalidInput(f"{place}.parameters", expected, "another")
    size, data = parameters.get("binary_data_size"), item.get("data")
    is_base64 = parameters.get("content_type") == "base64"
    if (size is None) == (data is None):
        received = "both" if data is not None else "neither"
        raise InvalidInput(place, "either data or parameters.binary_data_size", received)
    if size is None:
        if datatype == BYTES:
            elements = parse_strings(data, shape, place)
            return Tensor(place, name, datatype, shape, None, elements, None, is_base64), binary
        array = parse_array(data, datatype, shape, place)
    else:
        if type(size) is not int or not 0 <= size <= len(binary):
            expected = f"up to {len(binary)}, the remaining bytes of the body"
            raise InvalidInput(
                f"{place}.parameters.binary_data_size", expected, describe_value(size)
            )
        data, binary = binary[:size], binary[size:]
        if datatype == BYTES:
            return Tensor(place, name, datatype, shape, None, None, data, is_base64), binary
        array = decode_array(data, datatype, shape, place)
    call.reservation.acquire(ARRAY_BYTES * array.size)
    return Tensor(place, name, datatype, shape, array), binary


def _name(name: Any, place: str) -> str:
    if type(name) is not str or not 1 <= len(name) <= MAX_NAME:
        expected = f"a string of 1 to {MAX_NAME} characters"
        raise InvalidInput(f"{place}.name", expected, describe_value(name))
    return name


def _outputs(items: Any) -> dict[str, bool | None] | None:
    """Parse the requested outputs and whether to send each one as binary data.

    Return None if the request does not list any outputs.
    """
    if items is None or items == []:
        return None
    if not isinstance(items, list) or len(items) > MAX_OUTPUTS:
        raise InvalidInput("outputs", f"an array of up to {MAX_OUTPUTS}", describe_value(items))
    outputs: dict[str, bool | None] = {}
    for n, item in enumerate(items):
        place = f"outputs.{n}"
        if not isinstance(item, dict) or not item.keys() <= {"name", "parameters"}:
            raise InvalidInput(place, "an object with name and parameters", describe_value(item))
        name = _name(item.get("name"), place)
        parameters = _object(item.get("parameters"), f"{place}.parameters")
        if parameters.keys() - {"binary_data", "content_type"}:
            expected = "only binary_data and content_type"
            raise InvalidInput(f"{place}.parameters", expected, "another")
        if name in outputs:
            raise InvalidInput(place, "outputs with distinct names", "duplicates")
        outputs[name] = _flag(parameters.get("binary_data"), f"{place}.parameters.binary_data")
    return outputs


def _flag(value: Any, field: str) -> bool | None:
    if value is not None and type(value) is not bool:
        raise InvalidInput(field, "true or false", describe_value(value))
    return value


def _options(parameters: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Parse a request's parameters. Also return the default for binary outputs."""
    binary_output = _flag(parameters.get(BINARY_OUTPUT), f"parameters.{BINARY_OUTPUT}") or False
    options = {
        name: value
        for name, value in parameters.items()
        if name not in RESERVED and name != BINARY_OUTPUT and not name.startswith(RESERVED_PREFIX)
    }
    timeout = options.pop(TIMEOUT, None)
    fields = parse_options(options, "parameters", extra=(TIMEOUT,))
    if timeout is not None:
        microseconds = _parse_integer(timeout)
        if microseconds is None or microseconds > 86_400_000_000:
            expected = "microseconds, up to one day"
            raise InvalidInput(f"parameters.{TIMEOUT}", expected, "another")
        if "deadline_s" in fields:
            raise InvalidInput(f"parameters.{TIMEOUT}", "either timeout or deadline_s", "both")
        if microseconds:  # 0 is no timeout
            fields["deadline_s"] = microseconds / 1e6
    return fields, binary_output


def _parse_integer(value: Any) -> int | None:
    """Parse a non-negative integer, or a string of digits. Return None if it is invalid."""
    if type(value) is str and _LENGTH.fullmatch(value):
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def read_rows(
    tensors: list[Tensor],
    manifest: Manifest,
    max_rows: int,
    is_passed_on: bool,
    call: RequestContext,
) -> tuple[Rows, list[str] | None]:
    """Convert tensors to rows for `/predict`. Also return the groups if the model has any.

    Extra tensors of another model's answer are ignored.
    """
    groups = None
    group_tensor = next((tensor for tensor in tensors if tensor.name == GROUPS), None)
    if group_tensor is not None and is_by_group(manifest):
        groups = _groups(group_tensor, call)
        tensors = [tensor for tensor in tensors if tensor is not group_tensor]
    spec = manifest.input
    if spec.columns:
        return _cells(tensors, spec, max_rows, is_passed_on, call), groups
    inputs = [tensor for tensor in tensors if tensor.name == INPUT]
    if len(tensors) > 1 and is_passed_on and inputs:
        tensors = inputs
    if len(tensors) != 1:
        raise InvalidInput("inputs", "one tensor of rows", f"{len(tensors)}")
    _check_rows(tensors[0], max_rows)
    return _rows(tensors[0], spec, call), groups


def is_by_group(manifest: Manifest) -> bool:
    """Check whether the model expects a `groups` tensor with each row's group."""
    categories = manifest.categories
    is_column = any(column.name == GROUPS for column in manifest.input.columns)
    return categories is not None and categories.kind == "group" and not is_column


def _groups(tensor: Tensor, call: RequestContext) -> list[str]:
    if tensor.datatype != BYTES:
        expected = f"{BYTES}, the group of each row"
        raise InvalidInput(f"{tensor.place}.datatype", expected, tensor.datatype)
    return ["" if v is None else _text(v, tensor.place) for v in tensor.values(call)]


def _check_rows(tensor: Tensor, max_rows: int) -> None:
    check_row_count(f"{tensor.place}.shape", tensor.shape[0], max_rows)


def _check_single_column(tensor: Tensor) -> None:
    if len(tensor.shape) > 2 or tensor.size != tensor.shape[0]:
        expected = "(N,) or (N, 1), one element per row"
        raise InvalidInput(f"{tensor.place}.shape", expected, f"{len(tensor.shape)} axes")


def _check_is_text(tensor: Tensor) -> None:
    if tensor.is_base64:
        field = f"{tensor.place}.parameters.content_type"
        raise InvalidInput(field, "plain text (str), or none", "base64")


def _rows(tensor: Tensor, spec: InputSpec, call: RequestContext) -> Rows:
    takes_bytes = spec.image is not None or spec.text is not None
    if tensor.datatype == BOOL or (tensor.datatype == BYTES and not takes_bytes):
        expected = "a numeric datatype, such as FP32"
        raise InvalidInput(f"{tensor.place}.datatype", expected, tensor.datatype)
    if tensor.datatype == BYTES:
        _check_single_column(tensor)
        if spec.image is None:
            _check_is_text(tensor)
        return tensor.values(call)
    assert tensor.array is not None
    return tensor.array


def _cells(
    tensors: list[Tensor], spec: InputSpec, max_rows: int, is_passed_on: bool, call: RequestContext
) -> Cells:
    by_name = {tensor.name: tensor for tensor in tensors}
    names = [column.name for column in spec.columns]
    missing = next((name for name in names if name not in by_name), None)
    if missing is not None:
        expected = f"a tensor for each of the {len(names)} columns"
        raise InvalidInput("inputs", expected, f"none for {missing!r}"[:100])
    extra = next((tensor for tensor in tensors if tensor.name not in names), None)
    if extra is not None and not is_passed_on:
        columns = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise InvalidInput(f"{extra.place}.name", f"one of the columns {columns[:500]}", "another")
    count = by_name[names[0]].shape[0]
    cells: dict[str, list[Any] | np.ndarray] = {}
    for column in spec.columns:
        tensor = by_name[column.name]
        _check_rows(tensor, max_rows)
        _check_single_column(tensor)
        if tensor.size != count:
            expected = f"{count} rows, like the other tensors"
            raise InvalidInput(f"{tensor.place}.shape", expected, f"{tensor.size}")
        call.reservation.reserve(CELL_BYTES * count, "inputs")
        cells[column.name] = _column(tensor, column, spec, call)
        call.pause()
    return Cells(cells, count)


def _column(
    tensor: Tensor, column: AnyColumn, spec: InputSpec, call: RequestContext
) -> list[Any] | np.ndarray:
    """Read a column's cells. NaN is treated as a missing value."""
    if tensor.datatype == BYTES:
        _check_is_text(tensor)
        read = cell_reader(column, spec.missing_values)
        values = tensor.values(call)
        return [None if value is None else read(_text(value, tensor.place)) for value in values]
    assert tensor.array is not None
    flat = tensor.array.reshape(-1)
    if isinstance(column, CategoricalColumn):
        return [None if value != value else value for value in flat.tolist()]
    is_number = isinstance(column, NumericColumn)
    if tensor.datatype == BOOL or not is_number:
        expected = f"a numeric datatype, or {BYTES}" if is_number else f"{BYTES}, times as text"
        raise InvalidInput(f"{tensor.place}.datatype", expected, tensor.datatype)
    return flat.astype(np.float64)


def _text(value: str | bytes, place: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidInput(place, "UTF-8 text", "other bytes") from None
