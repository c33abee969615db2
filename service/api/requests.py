"""Reading requests: bodies within limits, strict JSON, npy arrays, and forms (RFC 7578), in memory:
nothing is written to disk."""

import mimetypes
import re
import time
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

from model_store.errors import MOST_ERRORS, InvalidInput, all_of, kind_of
from model_store.sources.columns import OddCells, odd_cells
from model_store.sources.npy import parse_npy
from model_store.sources.row_file import RowFile
from model_store.types import Pause
from service import limits
from service.api.json_blocks import JsonRows, not_json, take_apart
from service.api.media_types import JSON
from service.api.rows import NUMBERS_AT_ONCE, Cells, Rows, pool_array, rows_array
from service.api.schemas import Envelope, PredictRequest, RequestModel, leave_few_unknown
from service.context import Context
from service.engine.threads import SLICE_BYTES
from service.errors import NotAcceptable, TooLarge, Unsupported
from service.models.models import Served
from service.request_context import RequestContext

NPY = "application/x-npy"
NPZ = "application/x-npz"
PARQUET = "application/vnd.apache.parquet"
FORM = "multipart/form-data"
PURPOSE, TEST = "Dubito-Purpose", "test"  # a header and its only value
FILE_ENDINGS = {NPZ: ".npz", PARQUET: ".parquet", "application/zip": ".zip", "text/csv": ".csv"}
ENDINGS = {**FILE_ENDINGS, NPY: ".npy"}
STEP_BYTES = 1 << 20  # of a form that are parsed at once
MAX_FORM_FIELDS = 16  # of a form, in addition to its rows
SMALL_JSON_BYTES = 64 << 10  # read in one step, and not counted: it becomes 2 MB at most
NESTED_A_ROW = 64  # arrays and objects, on average
MAX_NESTED = 1_000_000
# What is kept for each, at most: a number (as float32, and whether it is finite), a row's place,
# and half of a string outside the rows; rows that are objects have fewer numbers than commas and
# colons.
JSON_OBJECT_BYTES = {",": 5, "[": 32, "{": 32, '"': 40, ":": 5}
COUNTED_BYTES = 256 << 10  # of JSON, at once: some tenths of a millisecond
AT_ONCE = {b"[": 10, b"{": 10, b":": 2, b",": 1}  # how long each takes to parse, in tenths of a us
MOST_AT_ONCE = 1_000_000
_NEVER = re.compile(r"q=0(\.0*)?")  # of a media type that a client does not take
ARRAY_BYTES = 5  # of a number of an array: as float32, and whether it is finite

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Those of /predict that go with any form of an answer.
KNOWN = tuple(
    name
    for name in PredictRequest.model_fields
    if name not in ("model", "version", "inputs", "groups", "explain")
)

AnyEnvelope = TypeVar("AnyEnvelope", bound=Envelope)
AnyQuery = TypeVar("AnyQuery", bound=RequestModel)
Validated = TypeVar("Validated", bound=BaseModel)
T = TypeVar("T")


def header(request: Request, name: bytes, default: str = "") -> str:
    """Return the first header of a name in lower case, several times as fast as Starlette does."""
    for key, value in request.scope["headers"]:
        if key == name:
            found: str = value.decode("latin-1")
            return found
    return default


def is_test(request: Request) -> bool:
    """Return whether a request is marked as a test, which counts neither for drift nor for metrics
    of rows."""
    purpose = header(request, PURPOSE.lower().encode())
    if purpose not in ("", TEST):
        raise InvalidInput(PURPOSE, f"{TEST!r}, or no such header", repr(purpose[:80]))
    return purpose == TEST


def request_media_type(request: Request) -> str:
    return header(request, b"content-type").partition(";")[0].strip().lower()


def came(request: Request) -> str:
    """Say which media type came, if it is one that has a name."""
    media_type = request_media_type(request)
    if not media_type:
        return "none"
    known = {"application/x-www-form-urlencoded", *FILE_ENDINGS, *mimetypes.types_map.values()}
    return media_type if media_type in known else "one that is not known"


def accepts(accept: str, media_type: str) -> bool:
    """Whether a client with an Accept header, or none, takes a media type."""
    if accept in ("", "*/*", media_type):
        return True
    kinds = {"*/*", media_type, f"{media_type.partition('/')[0]}/*"}
    return not kinds.isdisjoint(_named(accept))


def _named(accept: str) -> set[str]:
    parts = ([word.strip() for word in part.split(";")] for part in accept.lower().split(","))
    return {kind for kind, *parameters in parts if not any(map(_NEVER.fullmatch, parameters))}


def answer_type(request: Request, *media_types: str) -> str:
    """Return the last of the media types that a client names, else the first where it takes that.

    Raises:
        NotAcceptable: if it takes none of them.
    """
    accept = header(request, b"accept")
    named = [kind for kind in media_types[1:] if kind in accept and kind in _named(accept)]
    if not named and not accepts(accept, media_types[0]):
        raise NotAcceptable(*media_types)
    return named[-1] if named else media_types[0]


def refuse_but_json(request: Request) -> None:
    """Raise Unsupported where a body is not said to be JSON: pages of others may send such."""
    if request_media_type(request) != JSON:
        raise Unsupported("Content-Type", JSON, came(request))


async def body_parts(request: Request) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def read_body(call: RequestContext, limit: int) -> bytes | bytearray:
    """Read a request's body of up to `limit` bytes, or the limit of JSON if that is smaller.

    Raises:
        TooLarge: before more than that is kept.
        Overloaded: before more is kept than the process's budget of bytes has left.
        Unsupported: if it is encoded.
    """
    request = call.request
    if header(request, b"content-encoding", "identity") != "identity":
        raise Unsupported("Content-Encoding", "none", "an encoded body")
    if request_media_type(request) == JSON:
        limit = min(limit, limits.MAX_JSON_BYTES)
    expected = f"at most {limit} bytes"
    if int(header(request, b"content-length", "0")) > limit:
        raise TooLarge("body", expected, "more")
    body: bytes | bytearray = b""
    async for part in body_parts(request):
        if len(body) + len(part) > limit:
            raise TooLarge("body", expected, "more")
        call.reservation.acquire(len(part))
        if not body:
            body = part
        elif part:
            body = body if isinstance(body, bytearray) else bytearray(body)
            body += part
    return body


async def read_rows(
    context: Context,
    call: RequestContext,
    body: bytes | bytearray,
    kind: type[AnyEnvelope],
    rows_field: str,
    max_rows: int,
    endings: Mapping[str, str] = FILE_ENDINGS,
) -> tuple[AnyEnvelope, Rows | None]:
    """Return a request's envelope and its rows as they came, None where they stand in a file: a
    body of a media type of `endings`, or one that the envelope names. Forms and long JSON take a
    thread.

    An npy body holds the rows alone; the envelope's other fields are then query parameters. A form
    holds a file for each row, and the other fields as its own or in the query.

    Raises:
        Unsupported: if the media type is none of these.
        InvalidInput: naming the field that is wrong.
        TooLarge: if there are more than `max_rows` rows.
    """
    media_type, file_field = request_media_type(call.request), f"{rows_field}_file"
    if media_type in endings:
        envelope = query_fields(call.request, kind, rows_field)
        if getattr(envelope, file_field, None) is not None:
            raise InvalidInput(file_field, "none with a body that is a file", "both")
        return envelope, None
    work = partial(_read, call, media_type, body, kind, rows_field, max_rows)
    if media_type == FORM or (media_type == JSON and len(body) > SMALL_JSON_BYTES):
        envelope, rows = await context.threads.requests.run(call, len(body), work)
    else:
        envelope, rows = work()
    call.record.read = time.perf_counter()
    if getattr(envelope, file_field, None) is not None:
        if len(rows) > 0:
            raise InvalidInput(file_field, f"none with {rows_field}", "both")
        return envelope, None
    refuse_none_or_many(rows_field, len(rows), max_rows)
    return envelope, rows


async def run_reading(
    context: Context, call: RequestContext, size: int, work: Callable[[], T]
) -> T:
    """Return the result of work that reads `size` bytes: few at once, many off the event loop."""
    if size <= SMALL_JSON_BYTES:
        return work()
    return await context.threads.requests.run(call, size, work)


def refuse_none_or_many(field: str, rows: int, most: int, otherwise: str = "") -> None:
    """Raise InvalidInput or TooLarge unless there are 1 to `most` rows; `otherwise` says what takes
    more."""
    if rows == 0:
        raise InvalidInput(field, "at least one row", "none")
    if rows > most:
        raise TooLarge(field, f"at most {most} rows", f"{rows}{otherwise}")


def _read(
    call: RequestContext,
    media_type: str,
    body: bytes | bytearray,
    kind: type[AnyEnvelope],
    rows_field: str,
    max_rows: int,
) -> tuple[AnyEnvelope, Rows]:
    request, rows = call.request, list[Any]()
    if media_type == JSON:
        # else a seed put there would be passed over in silence
        if request.scope["query_string"] and request.query_params:
            expected = "nothing, since a JSON body holds every field"
            raise InvalidInput("query", expected, "parameters")
        if len(body) > SMALL_JSON_BYTES:
            reserve_json(body, rows_field, max_rows, call)
            content, found = take_apart(body, rows_field, max_rows, call.pause)
            return validate(kind, content), rows if found is None else found
        content = parse_json(body)
        rows = content.get(rows_field, rows)
        if isinstance(rows, list) and rows_field in content:
            content = {**content, rows_field: []}
        return validate(kind, content), rows
    if media_type == NPY:
        envelope = query_fields(request, kind, rows_field)
        array = parse_npy(body, rows_field)
        call.reservation.acquire(ARRAY_BYTES * array.size)
        return envelope, array
    if media_type != FORM:
        known = ", ".join((JSON, NPY, *FILE_ENDINGS))
        raise Unsupported("Content-Type", f"{known} or {FORM}", came(call.request))
    call.reservation.acquire(2 * len(body))  # parts as they are gathered, and as they are kept
    max_parts = max_rows + MAX_FORM_FIELDS
    others = request.query_params.multi_items()
    for part in parse_form(body, request.headers["content-type"], max_parts, call.pause):
        if part.name == rows_field:
            rows.append(bytes(part.content))
        else:
            others.append((part.name, part.content.decode("utf-8", "replace")))
    fields = text_fields(others, kind, rows_field, "form")
    return validate(kind, {rows_field: [], **fields}), rows


async def row_numbers(
    context: Context,
    call: RequestContext,
    rows: Rows | RowFile,
    served: Served,
    rows_field: str,
    encoded: bool,
) -> Float32[np.ndarray, "N I"]:
    """Return a request's rows as numbers; files, objects and many numbers take a thread."""
    model, max_pixels = served.model, limits.MAX_IMAGE_PIXELS
    size, encoder = 4 * len(rows) * model.row_size, model.text_encoder
    if isinstance(rows, RowFile):
        call.reservation.reserve(size, rows.field)
        work, is_dear = partial(pool_array, rows, max_pixels, call, encoder), True
    else:
        call.reservation.reserve(size, rows_field)
        spec = model.manifest.input.encoded if encoded else model.manifest.input
        work = partial(rows_array, rows, spec, rows_field, max_pixels, call, encoder)
        is_dear = isinstance(rows, JsonRows | Cells) or (
            isinstance(rows, list) and isinstance(rows[0], str | bytes | dict)
        )
    if size > 4 * NUMBERS_AT_ONCE or is_dear:
        return await context.threads.requests.run(call, size, work)
    return work()


async def find_odd_cells(
    context: Context, call: RequestContext, rows: Rows, served: Served
) -> list[OddCells] | None:
    """Return what is odd about the cells of rows that were objects, None of others."""
    columns = served.model.manifest.input.columns

    def work() -> list[OddCells] | None:
        found = []
        blocks: Iterable[Any] = rows.parse_blocks() if isinstance(rows, JsonRows) else [rows]
        for row in chain.from_iterable(blocks):
            if not isinstance(row, dict):
                return None
            found.append(odd_cells(row, columns))
            call.pause()
        return found

    return await context.threads.requests.run(call, SLICE_BYTES, work)


def validate(kind: type[Validated], content: dict[str, Any]) -> Validated:
    try:
        if len(content) > len(kind.model_fields):
            content = leave_few_unknown(kind, content)
        return kind.model_validate(content)
    except ValidationError as error:
        found = error.errors(include_url=False)[:MOST_ERRORS]
    raise all_of([_invalid(kind, each) for each in found])


def _invalid(kind: type[BaseModel], error: ErrorDetails) -> InvalidInput:
    path = error["loc"][:1] if "priors" in error["loc"] else error["loc"]
    name, got = ".".join(map(str, path)), kind_of(error["input"])
    match error["type"]:
        case "extra_forbidden":
            name = name if len(name) <= 80 else name[:77] + "..."
            return InvalidInput(name, f"one of {sorted(kind.model_fields)}", "an unknown field")
        case "missing":
            return InvalidInput(name, "a value", "none")
        case "too_short":
            return InvalidInput(name, f"at least {error['ctx']['min_length']}", got)
    return InvalidInput(name, str(error["msg"]).removeprefix("Input should be "), got)


def query_fields(request: Request, kind: type[AnyQuery], rows_field: str = "") -> AnyQuery:
    """Return the parameters of a query; the rows of `rows_field` are in the body."""
    fields = text_fields(request.query_params.multi_items(), kind, rows_field, "query")
    for name in (name for name, value in fields.items() if value is None):
        raise InvalidInput(name, "a value, where it is not left out", "null")
    return validate(kind, {rows_field: [], **fields} if rows_field else fields)


def fields_of(parameters: dict[str, Any], where: str, also: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return parameters as fields of /predict; numbers, booleans, null and `priors` may come as
    strings of JSON."""
    fields: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in KNOWN:
            place = f"{where}.{name}" if _NAME.fullmatch(name) else where
            expected = f"one of {', '.join(sorted((*KNOWN, *also)))}"
            raise InvalidInput(place, expected, "an unknown one")
        if isinstance(value, str):
            try:
                value = orjson.loads(value.encode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                expected = "a number, or one as a string"
                raise InvalidInput(f"{where}.{name}", expected, "another string") from None
        fields[name] = value
    return fields


def envelope_of(fields: dict[str, Any], where: str) -> PredictRequest:
    """Return the envelope of a request whose fields came as parameters."""
    try:
        return validate(PredictRequest, {"inputs": [], **fields})
    except InvalidInput as error:
        raise error.renamed(lambda field: f"{where}.{field}") from None


def reserve_json(
    body: bytes | bytearray,
    field: str,
    max_rows: int,
    call: RequestContext,
    bytes_of: Mapping[str, int] = JSON_OBJECT_BYTES,
) -> None:
    """Take from the budget what a JSON body will need, counted by its punctuation before it is
    parsed: by default rows become arrays a block at a time, and all else is held as objects."""
    counts = _count_marks(body, call.pause)
    nested, most = counts["["] + counts["{"], min(max_rows * NESTED_A_ROW, MAX_NESTED)
    if nested > most:
        raise TooLarge(field, f"at most {most} arrays and objects", str(nested))
    size = sum(bytes_of.get(mark, 0) * count for mark, count in counts.items())
    call.reservation.reserve(size, "body")


def _count_marks(body: bytes | bytearray, pause: Pause) -> dict[str, int]:
    """Count the punctuation of JSON in steps: `bytes.count` keeps the interpreter, and takes longer
    where it finds many."""
    whole, counts = np.frombuffer(body, dtype=np.uint8), dict.fromkeys(JSON_OBJECT_BYTES, 0)
    for first in range(0, len(whole), COUNTED_BYTES):
        part = whole[first : first + COUNTED_BYTES]
        for mark in counts:
            counts[mark] += int(np.count_nonzero(part == ord(mark)))
        pause()
    return counts


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object in one step, in which nobody else has a turn."""
    cost = max(AT_ONCE.values()) * len(body)  # at most
    if cost > MOST_AT_ONCE:  # as few bodies may
        cost = sum(weight * body.count(mark) for mark, weight in AT_ONCE.items())
    if cost > MOST_AT_ONCE:
        expected = f"at most {MOST_AT_ONCE} marks, of [ and {{ ten each and of : two"
        raise TooLarge("body", f"JSON of {expected}", str(cost))
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise not_json(error.msg) from None
    if not isinstance(content, dict):
        raise InvalidInput("body", "a JSON object", kind_of(content))
    return content


@cache
def _json_types(kind: type[RequestModel]) -> dict[str, tuple[str, str]]:
    """Return by field what it is in JSON, and of an array what its items are; else a string."""
    types = {}
    for name, schema in kind.model_json_schema()["properties"].items():
        of = schema.get("anyOf", [schema])[0]
        types[name] = of.get("type", "string"), of.get("items", {}).get("type", "string")
    return types


def text_fields(
    pairs: Iterable[tuple[str, str]], kind: type[RequestModel], rows_field: str, where: str
) -> dict[str, Any]:
    """Return the envelope's fields that a query or form gives, as JSON values where they are, else
    as strings."""
    fields: dict[str, Any] = {}
    items = set()  # fields that come item by item
    for name, text in pairs:
        of, of_item = _json_types(kind).get(name, ("string", "string"))
        is_item = of == "array" and name != rows_field and not text.startswith("[")
        value: Any = text
        if (of_item if is_item else of) != "string" and name != rows_field:
            try:
                value = orjson.loads(text.encode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                raise InvalidInput(f"{where}: {name}", "a JSON value", "something else") from None
        if is_item and (name in items or name not in fields):  # a field for each
            items.add(name)
            fields.setdefault(name, []).append(value)
            continue
        if name == rows_field or name in fields:
            raise InvalidInput(f"{where}: {name[:80]}", "once, next to the rows", "it again")
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
        self.ended = False
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
        """Take the part's name from its Content-Disposition, and nothing from other headers."""
        if bytes(self._header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self.parts[-1].name = options.get(b"name", b"").decode("utf-8", "replace")
        self._header.clear()
        self._value.clear()

    def on_end(self) -> None:
        self.ended = True


def parse_form(
    body: bytes | bytearray, content_type: str, max_parts: int, pause: Pause
) -> list[FormPart]:
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    if not options.get(b"boundary"):
        raise InvalidInput("Content-Type", "multipart/form-data with a boundary", "one without")
    form = Form(max_parts)
    callbacks = {name: getattr(form, name) for name in dir(form) if name.startswith("on_")}
    try:
        parser = MultipartParser(options[b"boundary"], callbacks)  # type: ignore[arg-type]
        for start in range(0, len(body), STEP_BYTES):
            parser.write(bytes(body[start : start + STEP_BYTES]))
            pause()
        parser.finalize()
    except FormParserError:
        expected = "multipart/form-data with the boundary of its Content-Type"
        raise InvalidInput("body", expected, "another") from None
    if not form.ended:
        raise InvalidInput("body", "a whole form", "one without its end")
    if not all(part.name for part in form.parts):
        raise InvalidInput("body", "parts with a name each", "one without")
    return form.parts
