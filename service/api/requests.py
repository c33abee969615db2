"""Reading requests: bodies within limits, strict JSON, npy arrays, and forms (RFC 7578), in memory:
nothing is written to disk."""

import asyncio
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from model_store.errors import InvalidInput
from model_store.sources.npy import parse_npy
from model_store.types import Pause
from service.api.json_blocks import parse, take_apart
from service.api.rows import Rows
from service.api.schemas import Envelope, kind_of, validate
from service.api.schemas import Request as Envelope_
from service.call import Call
from service.errors import TooLarge, Unsupported

if TYPE_CHECKING:
    pass

JSON = "application/json"
NPY = "application/x-npy"
NPZ = "application/x-npz"
PARQUET = "application/vnd.apache.parquet"
FORM = "multipart/form-data"
FILE_ENDINGS = {
    NPZ: ".npz",
    PARQUET: ".parquet",
    "application/zip": ".zip",
    "text/csv": ".csv",
}  # of pools
STEP_BYTES = 1 << 20  # of a form that are parsed at once
MAX_FORM_FIELDS = 16  # of a form, beside its rows
SMALL_JSON_BYTES = 64 << 10  # read in one step, and not counted: it becomes 2 MB at most
NESTED_A_ROW = 64  # arrays and objects, on average
MAX_NESTED = 1_000_000
# What is kept for each, at most: a number (as float32, and whether it is finite), a row's place,
# and half of a string
# that stands beside the rows; rows that are objects have fewer numbers than commas and colons.
JSON_OBJECT_BYTES = {",": 5, "[": 32, "{": 32, '"': 40, ":": 5}
WINDOWS = {"gzip": 31, "deflate": 15}  # of zlib, by the encoding of a body
INFLATED_AT_ONCE = 256 << 10  # bytes: a millisecond or so
ARRAY_BYTES = 5  # of a number of an array: as float32, and whether it is finite


async def read_body(call: Call, limit: int, json_limit: int) -> bytes | bytearray:
    """Read a request's body of at most `limit` bytes, or `json_limit` of JSON, which takes longer
    to read.

    Raises:
        TooLarge: before more than that is kept.
        Overloaded: before more is kept than the process's budget of bytes has left.
        Unsupported: if it is encoded.
    """
    request = call.request
    if header(request, b"content-encoding", "identity") != "identity":
        raise Unsupported("Content-Encoding: expected none, got an encoded body")
    if request_media_type(request) == JSON:
        limit = min(limit, json_limit)
    too_large = TooLarge(f"body: expected at most {limit} bytes, got more")
    if int(header(request, b"content-length", "0")) > limit:
        raise too_large
    body: bytes | bytearray = b""
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        if len(body) + len(part) > limit:
            raise too_large
        call.reservation.acquire(len(part))
        if not body:
            body = part
        elif part:
            body = body if isinstance(body, bytearray) else bytearray(body)
            body += part
    return body


async def read_inflated(call: Call, limit: int) -> bytes | bytearray:
    """Read a request's body of at most `limit` bytes, which may be compressed by gzip or deflate
    (zlib).

    What is inflated counts as it comes, a step of `INFLATED_AT_ONCE` before it is there.

    Raises:
        TooLarge, Overloaded: before more than that is inflated and kept, as `read_body`.
        Unsupported: if it is encoded otherwise.
        InvalidInput: if it is not one whole compressed body.
    """
    coding = header(call.request, b"content-encoding", "identity").strip().lower()
    if coding == "identity":
        return await read_body(call, limit, limit)
    if coding not in WINDOWS:
        raise Unsupported(f"Content-Encoding: expected none, {' or '.join(WINDOWS)}, got another")
    wrong = InvalidInput(
        "body", f"one body compressed by {coding}, as its Content-Encoding says", "something else"
    )
    inflater, body = zlib.decompressobj(WINDOWS[coding]), bytearray()
    more = True
    while more:
        message = await call.request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        inflated = None
        while (
            part or inflated is None or len(inflated) == INFLATED_AT_ONCE
        ):  # of which more may be to come
            call.reservation.acquire(INFLATED_AT_ONCE)
            try:
                inflated = inflater.decompress(part, INFLATED_AT_ONCE)
            except zlib.error:
                raise wrong from None
            call.reservation.release(INFLATED_AT_ONCE - len(inflated))
            if len(body) + len(inflated) > limit:
                raise TooLarge(f"body: expected at most {limit} bytes once inflated, got more")
            body += inflated
            if inflater.unused_data:
                raise wrong
            part = inflater.unconsumed_tail
            await asyncio.sleep(0)  # others' turn: a small part may become much
    if not inflater.eof:
        raise wrong
    return body


def read_request(
    call: Call,
    body: bytes | bytearray,
    kind: type[Envelope_],
    rows_field: str,
    max_rows: int,
    file_field: str | None = None,
) -> tuple[Envelope_, Rows]:
    """Return the envelope of a JSON, npy or form request, and its rows as they came.

    An npy body holds the rows alone; the envelope's other fields are then query parameters. A form
    holds a file for each row, and the other fields beside them or in the query. Where JSON names a
    file, in `file_field`, there are no rows.

    Raises:
        Unsupported: if the media type is none of these.
        InvalidInput: naming the field that is wrong.
        TooLarge: if there are more than `max_rows` rows.
    """
    request, media_type = call.request, request_media_type(call.request)
    rows: Rows
    if media_type == JSON:
        if request.query_params:  # else a seed put there would be passed over in silence
            raise InvalidInput(
                "query", "nothing, since a JSON body holds every field", "parameters"
            )
        if len(body) > SMALL_JSON_BYTES:
            reserve_json(body, rows_field, max_rows, call)
            content, found = take_apart(body, rows_field, max_rows, call.pause)
            rows = [] if found is None else found
        else:
            content = parse_json(body)
            rows = content.get(rows_field, [])
            if isinstance(rows, list):
                content = {**content, rows_field: []} if rows_field in content else content
        envelope = validate(kind, content)
    elif media_type == NPY:
        fields = text_fields(request.query_params.multi_items(), kind, rows_field, "query")
        envelope = validate(kind, {rows_field: [], **fields})
        rows = parse_npy(body, rows_field)
        call.reservation.acquire(ARRAY_BYTES * rows.size)
    elif media_type == FORM:
        call.reservation.acquire(2 * len(body))  # parts as they are gathered, and as they are kept
        max_parts = max_rows + MAX_FORM_FIELDS
        parts = parse_form(body, request.headers["content-type"], max_parts, call.pause)
        rows = [bytes(part.content) for part in parts if part.name == rows_field]
        beside = [
            (p.name, p.content.decode("utf-8", "replace")) for p in parts if p.name != rows_field
        ]
        fields = text_fields(
            [*request.query_params.multi_items(), *beside], kind, rows_field, "form"
        )
        envelope = validate(kind, {rows_field: [], **fields})
    else:
        raise Unsupported(f"Content-Type: expected {JSON}, {NPY} or {FORM}, got another")
    if file_field is not None and getattr(envelope, file_field) is not None:
        if len(rows) > 0:
            raise InvalidInput(file_field, f"none beside {rows_field}", "both")
        return envelope, rows
    if len(rows) == 0:
        raise InvalidInput(rows_field, "at least one row", "none")
    if len(rows) > max_rows:
        raise TooLarge(f"{rows_field}: expected at most {max_rows} rows, got {len(rows)}")
    return envelope, rows


def envelope_of_query(
    request: Request, kind: type[Envelope_], rows_field: str, file_field: str
) -> Envelope_:
    """Return the envelope of a request whose body is a file of rows: its fields are query
    parameters.

    Raises:
        InvalidInput: naming the field that is wrong.
    """
    envelope = validate(
        kind, text_fields(request.query_params.multi_items(), kind, rows_field, "query")
    )
    if getattr(envelope, file_field) is not None:
        raise InvalidInput(file_field, "none beside a body that is a file", "both")
    return envelope


def reserve_json(body: bytes | bytearray, rows_field: str, max_rows: int, call: Call) -> None:
    """Take from the budget what a JSON body will need, counted by its punctuation before it is
    parsed.

    Rows become arrays a block at a time; what stands beside them is held as objects.

    Raises:
        TooLarge: if it has more arrays and objects than rows need, or needs more than there is.
        Overloaded: if so much is not left now.
    """
    counts = {mark: body.count(mark.encode()) for mark in JSON_OBJECT_BYTES}
    nested, most = counts["["] + counts["{"], min(max_rows * NESTED_A_ROW, MAX_NESTED)
    if nested > most:
        raise TooLarge(f"{rows_field}: expected at most {most} arrays and objects, got {nested}")
    call.reservation.reserve(
        sum(JSON_OBJECT_BYTES[mark] * count for mark, count in counts.items()), "body"
    )


def parse_json(body: bytes | bytearray) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidInput: if it is not JSON, or not an object.
    """
    content = parse(body)
    if not isinstance(content, dict):
        raise InvalidInput("body", "a JSON object", kind_of(content))
    return content


def header(request: Request, name: bytes, default: str = "") -> str:
    """Return the first header of a name in lower case; Starlette's own search takes several times
    as long."""
    return next(
        (value.decode("latin-1") for key, value in request.scope["headers"] if key == name), default
    )


def request_media_type(request: Request) -> str:
    return header(request, b"content-type").partition(";")[0].strip().lower()


def text_fields(
    pairs: Iterable[tuple[str, str]], kind: type[Envelope], rows_field: str, where: str
) -> dict[str, Any]:
    """Return the envelope's fields that a query or form gives, as JSON values where they are, else
    as strings."""
    fields: dict[str, Any] = {}
    items = set()  # fields that come item by item
    for name, text in pairs:
        annotation = str(kind.model_fields[name].annotation) if name in kind.model_fields else ""
        is_item = "list" in annotation and name != rows_field and not text.startswith("[")
        if is_item and (name in items or name not in fields):  # a field for each
            items.add(name)
            fields.setdefault(name, []).append(text)
            continue
        if name == rows_field or name in fields:
            raise InvalidInput(f"{where}: {name[:80]}", "once, beside the rows", "it again")
        if (
            "int" in annotation
            or "float" in annotation
            or "bool" in annotation
            or "list" in annotation
        ):
            try:
                fields[name] = orjson.loads(text.encode("utf-8", "replace"))
            except orjson.JSONDecodeError:
                raise InvalidInput(f"{where}: {name}", "a JSON value", "something else") from None
        else:
            fields[name] = text
    return fields


@dataclass
class FormPart:
    name: str = ""
    content: bytearray = field(default_factory=bytearray)


class Form:
    """The callbacks of the parser."""

    def __init__(self, max_parts: int) -> None:
        self.max_parts = max_parts
        self.parts: list[FormPart] = []
        self.ended = False
        self._header = bytearray()
        self._value = bytearray()

    def on_part_begin(self) -> None:
        if len(self.parts) == self.max_parts:
            raise TooLarge(f"body: expected a form of at most {self.max_parts} parts, got more")
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
    """Return the parts of a form in order.

    Raises:
        InvalidInput: if it is not a whole form, or a part has no name.
        TooLarge: if it has more parts than `max_parts`.
    """
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
        raise InvalidInput(
            "body", "multipart/form-data with the boundary of its Content-Type", "another"
        ) from None
    if not form.ended:
        raise InvalidInput("body", "a whole form", "one without its end")
    if not all(part.name for part in form.parts):
        raise InvalidInput("body", "parts with a name each", "one without")
    return form.parts
