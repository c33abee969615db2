"""Parse request bodies: JSON, npy arrays and multipart forms (RFC 7578)."""

import mimetypes
import mmap
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import Request
from jaxtyping import Float32
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from model_store.errors import (
    MAX_ERRORS,
    InvalidInput,
    describe_value,
    list_choices,
    merge_errors,
)
from model_store.sources.columns import UnusualCells, check_complete, unusual_cells
from model_store.sources.npy import parse_npy
from model_store.sources.row_file import RowFile
from model_store.types import Content, Pause, no_pause
from service import limits
from service.api.json_blocks import JsonRows, invalid_json, split_json
from service.api.media_types import JSON, list_header, weight
from service.api.rows import NUMBERS_AT_ONCE, Cells, Rows, file_array, rows_array
from service.api.schemas import Envelope, PredictRequest, RequestModel, drop_extra_unknown
from service.context import Context
from service.engine.threads import SLICE_BYTES
from service.errors import NotAcceptable, TooLarge, Unsupported
from service.models.models import ServedModel
from service.request_context import RequestContext

NPY = "application/x-npy"
NPZ = "application/x-npz"
PARQUET = "application/vnd.apache.parquet"
FORM = "multipart/form-data"
PURPOSE, TEST = "Dubito-Purpose", "test"  # header and its only value
FILE_ENDINGS = {NPZ: ".npz", PARQUET: ".parquet", "application/zip": ".zip", "text/csv": ".csv"}
ENDINGS = {**FILE_ENDINGS, NPY: ".npy"}
FORM_STEP_BYTES = 1 << 20  # parsed between two pauses
MAX_FORM_FIELDS = 16  # in addition to the rows
# Smaller JSON is parsed at once without reserving memory. Its objects take up to 2 MB.
SMALL_JSON_BYTES = 64 << 10
LARGE_BODY_BYTES = 1 << 20
MAX_NESTED_PER_ROW = 64  # arrays and objects per row, on average
MAX_NESTED = 1_000_000
# Upper bounds in bytes for each punctuation mark. A comma or colon stands for a number (float32
# and a finite flag), a bracket for the offsets of a row, and a quote for half a string.
JSON_OBJECT_BYTES = {",": 5, "[": 32, "{": 32, '"': 40, ":": 5}
COUNT_STEP_BYTES = 256 << 10  # takes a few tenths of a millisecond
# Time to parse each mark, in tenths of a microsecond
PARSE_COSTS = {"[": 10, "{": 10, ":": 2, ",": 1}
MAX_PARSE_COST = 1_000_000
ARRAY_BYTES = 5  # per number: float32 and a finite flag

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Fields of /predict that other protocols take as parameters
PREDICT_OPTIONS = tuple(
    name
    for name in PredictRequest.model_fields
    if name not in ("model", "version", "inputs", "groups", "explain")
)

AnyEnvelope = TypeVar("AnyEnvelope", bound=Envelope)
AnyQuery = TypeVar("AnyQuery", bound=RequestModel)
Validated = TypeVar("Validated", bound=BaseModel)
T = TypeVar("T")


def header(request: Request, name: bytes, default: str = "") -> str:
    """Return the first header with this lower-case name.

    Building Starlette's `Headers` takes several times longer.
    """
    for key, value in request.scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return default


def is_test(request: Request) -> bool:
    """Return whether the request is marked as a test, so that drift and metrics skip it."""
    purpose = header(request, PURPOSE.lower().encode())
    if purpose not in ("", TEST):
        raise InvalidInput(PURPOSE, f"{TEST!r}, or no header", repr(purpose[:80]))
    return purpose == TEST


def request_media_type(request: Request) -> str:
    return header(request, b"content-type").partition(";")[0].strip().lower()


def describe_media_type(request: Request) -> str:
    """Return the body's media type for an error message, but do not repeat unknown names."""
    media_type = request_media_type(request)
    if not media_type:
        return "none"
    names = {"application/x-www-form-urlencoded", *FILE_ENDINGS, *mimetypes.types_map.values()}
    return media_type if media_type in names else "an unknown media type"


def negotiate_media_type(request: Request, default: str, *others: str) -> str:
    """Choose the media type of the response from the `Accept` header.

    The highest weight decides. Among equal weights, a media type in the header has precedence over
    the default, and the default over the rest.

    Raises:
        NotAcceptable: if the client accepts none of them.
    """
    if all(name != b"accept" for name, _ in request.scope["headers"]):
        return default
    accept = list_header(request.scope, b"accept")
    best, media_type = weight(accept, default), default
    for other in others:
        if other in accept.lower() and weight(accept, other) >= best:
            best, media_type = weight(accept, other), other
    if best == 0:
        raise NotAcceptable(default, *others)
    return media_type


def require_json(request: Request) -> None:
    """Raise Unsupported unless the body is JSON.

    Browsers let other sites send forms and text without a preflight request.
    """
    if request_media_type(request) != JSON:
        raise Unsupported("Content-Type", JSON, describe_media_type(request))


async def body_parts(request: Request) -> AsyncIterator[bytes]:
    is_complete = False
    while not is_complete:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        is_complete = not message.get("more_body", False)
        yield message.get("body", b"")


async def read_body(call: RequestContext, limit: int) -> Content:
    """Read a request body of up to `limit` bytes, or `MAX_JSON_BYTES` if that is less.

    Raises:
        TooLarge: if the body exceeds the limit.
        Overloaded: if the body exceeds the process's memory budget.
        Unsupported: if the body has a Content-Encoding.
    """
    request = call.request
    if header(request, b"content-encoding", "identity") != "identity":
        raise Unsupported("Content-Encoding", "none", "an encoded body")
    if request_media_type(request) == JSON:
        limit = min(limit, limits.MAX_JSON_BYTES)
    expected = f"at most {limit} bytes"
    length = int(header(request, b"content-length", "0"))
    if length > limit:
        raise TooLarge("body", expected, "more")
    body: Content = _map_memory(length) if length >= LARGE_BODY_BYTES else bytearray()
    size = 0
    async for part in body_parts(request):
        size += len(part)
        if size > limit:
            raise TooLarge("body", expected, "more")
        call.reservation.acquire(len(part))
        if isinstance(body, mmap.mmap):
            body[size - len(part) : size] = part
        else:
            body += part
    return body


def _map_memory(size: int) -> mmap.mmap:
    """Allocate memory in huge pages, which the kernel provides when they are written.

    Growing a bytearray to 6 MB takes 20 times longer, and blocks all threads.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


async def read_rows(
    context: Context,
    call: RequestContext,
    body: Content,
    kind: type[AnyEnvelope],
    rows_field: str,
    max_rows: int,
    endings: Mapping[str, str] = FILE_ENDINGS,
) -> tuple[AnyEnvelope, Rows | None]:
    """Parse the envelope and the rows of a request.

    The rows are None if they are in a file: a body with a media type of `endings`, or a file named
    in the envelope. An npy body holds only rows, so the other fields are query parameters. A form
    has one part per row, and the other fields in further parts or the query.

    Raises:
        Unsupported: if the media type is unknown.
        InvalidInput: if a field is invalid.
        TooLarge: if there are more than `max_rows` rows.
    """
    media_type, file_field = request_media_type(call.request), f"{rows_field}_file"
    if media_type in endings:
        envelope = parse_query(call.request, kind, rows_field)
        if getattr(envelope, file_field, None) is not None:
            raise InvalidInput(file_field, "no value if the body is a file", "both")
        return envelope, None
    work = partial(_read, call, media_type, body, kind, rows_field, max_rows)
    if media_type == FORM or (media_type == JSON and len(body) > SMALL_JSON_BYTES):
        envelope, rows = await context.threads.requests.run(call, len(body), work)
    else:
        envelope, rows = work()
    if getattr(envelope, file_field, None) is not None:
        if len(rows) > 0:
            raise InvalidInput(file_field, f"no value with {rows_field}", "both")
        return envelope, None
    check_row_count(rows_field, len(rows), max_rows)
    return envelope, rows


async def run_parser(context: Context, call: RequestContext, size: int, work: Callable[[], T]) -> T:
    """Run a parser, in a worker thread if `size` (in bytes) is large."""
    if size <= SMALL_JSON_BYTES:
        return work()
    return await context.threads.requests.run(call, size, work)


def check_row_count(field: str, rows: int, max_rows: int, advice: str = "") -> None:
    """Check that there are 1 to `max_rows` rows. `advice` is added to the error message."""
    if rows == 0:
        raise InvalidInput(field, "at least one row", "none")
    if rows > max_rows:
        raise TooLarge(field, f"at most {max_rows} rows", f"{rows}{advice}")


def _read(
    call: RequestContext,
    media_type: str,
    body: Content,
    kind: type[AnyEnvelope],
    rows_field: str,
    max_rows: int,
) -> tuple[AnyEnvelope, Rows]:
    request, rows = call.request, list[Any]()
    if media_type == JSON:
        # A seed in the query would be ignored silently.
        if request.scope["query_string"] and request.query_params:
            expected = "no parameters, because a JSON body has all fields"
            raise InvalidInput("query", expected, "some")
        if len(body) > SMALL_JSON_BYTES:
            reserve_json(body, rows_field, max_rows, call)
            content, blocks = split_json(body, rows_field, max_rows, call.pause)
            return validate(kind, content), rows if blocks is None else blocks
        content = parse_json(body)
        rows = content.get(rows_field, rows)
        if isinstance(rows, list) and rows_field in content:
            content = {**content, rows_field: []}
        return validate(kind, content), rows
    if media_type == NPY:
        envelope = parse_query(request, kind, rows_field)
        array = parse_npy(body, rows_field)
        call.reservation.acquire(ARRAY_BYTES * array.size)
        return envelope, array
    if media_type != FORM:
        names = ", ".join((JSON, NPY, *FILE_ENDINGS))
        raise Unsupported("Content-Type", f"{names} or {FORM}", describe_media_type(call.request))
    call.reservation.acquire(2 * len(body))  # parts exist twice while they are collected
    max_parts = max_rows + MAX_FORM_FIELDS
    pairs = request.query_params.multi_items()
    for part in parse_form(body, request.headers["content-type"], max_parts, call.pause):
        if part.name == rows_field:
            rows.append(bytes(part.content))
        else:
            pairs.append((part.name, part.content.decode("utf-8", "replace")))
    fields = text_fields(pairs, kind, rows_field, "form")
    return validate(kind, {rows_field: [], **fields}), rows


async def to_numbers(
    context: Context,
    call: RequestContext,
    rows: Rows | RowFile,
    loaded: ServedModel,
    rows_field: str,
    envelope: Envelope,
) -> Float32[np.ndarray, "N I"]:
    """Convert rows to numbers, in a worker thread if this takes long.

    Missing cells are NaN, or an error if the request rejects them.
    """
    model, max_pixels = loaded.model, limits.MAX_IMAGE_PIXELS
    size, encoder = 4 * len(rows) * model.row_size, model.text_encoder
    if isinstance(rows, RowFile):
        call.reservation.reserve(size, rows.field)
        work, is_slow = partial(file_array, rows, max_pixels, call, encoder), True
    else:
        call.reservation.reserve(size, rows_field)
        spec = model.manifest.input
        spec = spec.encoded if envelope.encoded else spec
        work = partial(rows_array, rows, spec, rows_field, max_pixels, call, encoder)
        is_slow = isinstance(rows, JsonRows | Cells) or (
            isinstance(rows, list) and isinstance(rows[0], str | bytes | dict)
        )
    is_slow = is_slow or size > 4 * NUMBERS_AT_ONCE
    x = await context.threads.requests.run(call, size, work) if is_slow else work()
    if envelope.missing == "reject":
        check_complete(x, model.manifest.input.columns, rows_field)
    return x


async def find_unusual_cells(
    context: Context, call: RequestContext, rows: Rows, loaded: ServedModel
) -> list[UnusualCells] | None:
    """Find unknown categories and missing values. Return None unless all rows are objects."""
    columns = loaded.model.manifest.input.columns

    def work() -> list[UnusualCells] | None:
        results = []
        blocks: Iterable[Any] = rows.parse_blocks() if isinstance(rows, JsonRows) else [rows]
        for row in chain.from_iterable(blocks):
            if not isinstance(row, dict):
                return None
            results.append(unusual_cells(row, columns))
            call.pause()
        return results

    return await context.threads.requests.run(call, SLICE_BYTES, work)


def validate(kind: type[Validated], content: dict[str, Any]) -> Validated:
    try:
        if len(content) > len(kind.model_fields):
            content = drop_extra_unknown(kind, content)
        return kind.model_validate(content)
    except ValidationError as error:
        errors = error.errors(include_url=False)[:MAX_ERRORS]
    raise merge_errors([_invalid(kind, each) for each in errors])


def _invalid(kind: type[BaseModel], error: ErrorDetails) -> InvalidInput:
    path = error["loc"][:1] if "priors" in error["loc"] else error["loc"]
    name, received = ".".join(map(str, path)), describe_value(error["input"])
    match error["type"]:
        case "extra_forbidden":
            name = name if len(name) <= 80 else name[:77] + "..."
            return InvalidInput(name, list_choices(sorted(kind.model_fields)), "an unknown field")
        case "missing":
            return InvalidInput(name, "a value", "none")
        case "too_short":
            return InvalidInput(name, f"at least {error['ctx']['min_length']}", received)
    return InvalidInput(name, str(error["msg"]).removeprefix("Input should be "), received)


def parse_query(request: Request, kind: type[AnyQuery], rows_field: str = "") -> AnyQuery:
    """Parse the query parameters. `rows_field` is the field that the body provides."""
    fields = text_fields(request.query_params.multi_items(), kind, rows_field, "query")
    for name in (name for name, value in fields.items() if value is None):
        raise InvalidInput(name, "a value (leave the parameter out for the default)", "null")
    return validate(kind, {rows_field: [], **fields} if rows_field else fields)


def parse_options(
    parameters: dict[str, Any], where: str, extra: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Convert another protocol's parameters to fields of /predict. Strings are parsed as JSON."""
    fields: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in PREDICT_OPTIONS:
            place = f"{where}.{name}" if _NAME.fullmatch(name) else where
            expected = list_choices(sorted((*PREDICT_OPTIONS, *extra)))
            raise InvalidInput(place, expected, "an unknown parameter")
        if isinstance(value, str):
            try:
                value = orjson.loads(value.encode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                expected = "a number, possibly as a string"
                raise InvalidInput(f"{where}.{name}", expected, "another string") from None
        fields[name] = value
    return fields


def build_envelope(fields: dict[str, Any], where: str) -> PredictRequest:
    """Validate fields from `parse_options`. Errors name the parameters in `where`."""
    try:
        return validate(PredictRequest, {"inputs": [], **fields})
    except InvalidInput as error:
        raise error.rename_fields(lambda field: f"{where}.{field}") from None


def reserve_json(
    body: Content,
    field: str,
    max_rows: int,
    call: RequestContext,
    mark_bytes: Mapping[str, int] = JSON_OBJECT_BYTES,
) -> None:
    """Reserve memory for parsing a JSON body, estimated from its punctuation.

    The default `mark_bytes` assume that rows become arrays and other fields become objects.
    """
    counts = _count_marks(body, call.pause)
    nested, max_nested = counts["["] + counts["{"], min(max_rows * MAX_NESTED_PER_ROW, MAX_NESTED)
    if nested > max_nested:
        raise TooLarge(field, f"at most {max_nested} arrays and objects", str(nested))
    size = sum(mark_bytes.get(mark, 0) * count for mark, count in counts.items())
    call.reservation.reserve(size, "body")


def _count_marks(body: Content, pause: Pause) -> dict[str, int]:
    """Count the structural characters of a JSON text.

    `bytes.count` would block other threads, and is slower if there are many matches.
    """
    array, counts = np.frombuffer(body, dtype=np.uint8), dict.fromkeys(JSON_OBJECT_BYTES, 0)
    for first in range(0, len(array), COUNT_STEP_BYTES):
        part = array[first : first + COUNT_STEP_BYTES]
        for mark in counts:
            counts[mark] += int(np.count_nonzero(part == ord(mark)))
        pause()
    return counts


def parse_json(body: Content) -> dict[str, Any]:
    """Parse a JSON object. Limits its size, because the parser blocks all other threads."""
    cost = max(PARSE_COSTS.values()) * len(body)
    if cost > MAX_PARSE_COST:  # count exactly only if this upper bound is too high
        counts = _count_marks(body, no_pause)
        cost = sum(weight * counts[mark] for mark, weight in PARSE_COSTS.items())
    if cost > MAX_PARSE_COST:
        counting = "[ and { count ten times, : twice"
        expected = f"JSON of at most {MAX_PARSE_COST} punctuation marks ({counting})"
        raise TooLarge("body", expected, str(cost))
    try:
        content = orjson.loads(memoryview(body))
    except orjson.JSONDecodeError as error:
        raise invalid_json(error.msg) from None
    if not isinstance(content, dict):
        raise InvalidInput("body", "a JSON object", describe_value(content))
    return content


@cache
def _json_types(kind: type[RequestModel]) -> dict[str, tuple[str, str]]:
    """Return the JSON type of each field and of its items, `string` if unspecified."""
    types = {}
    for name, schema in kind.model_json_schema()["properties"].items():
        value = schema.get("anyOf", [schema])[0]
        types[name] = value.get("type", "string"), value.get("items", {}).get("type", "string")
    return types


def text_fields(
    pairs: Iterable[tuple[str, str]], kind: type[RequestModel], rows_field: str, where: str
) -> dict[str, Any]:
    """Parse the fields of a query or form. Fields that are not strings are parsed as JSON."""
    fields: dict[str, Any] = {}
    repeated = set()  # arrays sent item by item
    for name, text in pairs:
        field_type, item_type = _json_types(kind).get(name, ("string", "string"))
        is_item = field_type == "array" and name != rows_field and not text.startswith("[")
        value: Any = text
        if (item_type if is_item else field_type) != "string" and name != rows_field:
            try:
                value = orjson.loads(text.encode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                raise InvalidInput(f"{where}: {name}", "a JSON value", "other text") from None
        if is_item and (name in repeated or name not in fields):
            repeated.add(name)
            fields.setdefault(name, []).append(value)
            continue
        if name == rows_field or name in fields:
            raise InvalidInput(f"{where}: {name[:80]}", "one value, outside the rows", "another")
        fields[name] = value
    return fields


@dataclass
class FormPart:
    name: str = ""
    content: bytearray = field(default_factory=bytearray)


class Form:
    def __init__(self, max_parts: int) -> None:
        self.max_parts = max_parts
        self.parts: list[FormPart] = []
        self.is_complete = False
        self._header = bytearray()
        self._value = bytearray()

    def on_part_begin(self) -> None:
        if len(self.parts) == self.max_parts:
            raise TooLarge("body", f"a form of at most {self.max_parts} parts", "more")
        self.parts.append(FormPart())

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].content += data[start:end]

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        """Read the part's name from its Content-Disposition header."""
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self.parts[-1].name = options.get(b"name", b"").decode("utf-8", "replace")
        self._header.clear()
        self._value.clear()

    def on_end(self) -> None:
        self.is_complete = True


def parse_form(body: Content, content_type: str, max_parts: int, pause: Pause) -> list[FormPart]:
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if not options.get(b"boundary"):
        raise InvalidInput("Content-Type", "multipart/form-data with a boundary", "no boundary")
    form = Form(max_parts)
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        for start in range(0, len(body), FORM_STEP_BYTES):
            parser.write(bytes(body[start : start + FORM_STEP_BYTES]))
            pause()
        parser.finalize()
    except FormParserError:
        expected = "multipart/form-data with the boundary of its Content-Type"
        raise InvalidInput("body", expected, "a malformed form") from None
    if not form.is_complete:
        raise InvalidInput("body", "a complete form", "an incomplete form")
    if not all(part.name for part in form.parts):
        raise InvalidInput("body", "a name for each part", "an unnamed part")
    return form.parts
