"""Reading requests: bodies within limits, strict JSON, npy arrays, forms with images, rows of the
model's shape."""

import asyncio
import base64
import binascii
import math
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from fastapi import Request
from jaxtyping import Float32
from starlette.requests import ClientDisconnect

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.sources.columns import from_cells, from_objects
from model_store.sources.images import decoded_pixels, open_image, pixels, resized_pixels
from model_store.sources.npy import parse_npy
from model_store.sources.row_file import Part, RowFile, shapes_of
from service.api.json_blocks import JsonRows, parse, take_apart
from service.api.multipart import parse_form
from service.api.schemas import Envelope, kind_of, validate
from service.api.schemas import Request as Envelope_
from service.call import Call
from service.errors import TooLarge, Unsupported

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder

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
FEW_NUMBERS = (
    4096  # looked at by Python: numpy lets go of the interpreter, and may wait long to get it back
)
MAX_FORM_FIELDS = 16  # of a form, beside its rows
DECODED_BYTES = 10  # that decoding takes for each pixel of an image, at most
NUMBERS_AT_ONCE = 1 << 16  # of rows in lists: a millisecond or so a step
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


@dataclass(frozen=True, eq=False)
class Cells:
    """Rows as the cells of each column, as `from_cells` takes them."""

    of: dict[str, list[Any] | np.ndarray]
    count: int

    def __len__(self) -> int:
        """How many rows there are."""
        return self.count

    def take(self, rows: slice) -> dict[str, list[Any] | np.ndarray]:
        """Return the cells of some rows."""
        return {name: cells[rows] for name, cells in self.of.items()}


Rows = list[Any] | np.ndarray | JsonRows | Cells


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
    """Return the first header of a name in lower case; the framework's own search takes several
    times as long."""
    return next(
        (value.decode("latin-1") for key, value in request.scope["headers"] if key == name), default
    )


def request_media_type(request: Request) -> str:
    """Return the type of a request's body, without parameters, in lower case."""
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


def rows_array(
    rows: Rows | Part,
    spec: InputSpec,
    field: str,
    max_pixels: int,
    call: Call,
    encoder: "TextEncoder | None" = None,
    first_row: int = 0,
) -> Float32[np.ndarray, "N I"]:
    """Return rows as a flat float32 array. Decoding holds memory of its own for the moment. Errors
    count from `first_row`.

    Each comes flat or in the model's input shape; to a model of columns also as an object keyed by
    column, and all of them as cells by column; to a model of images also as an image file, of which
    all together may have `max_pixels`; to a model of text also as a string, an object of that
    alone, or a file.

    Raises:
        InvalidInput: naming the row and element that is not a finite float32 number, or no id of
            the model's, or the shape that is wrong.
        TooLarge: if images have more pixels, or one takes more memory to decode than there may be.
        Overloaded: if there is no memory left to decode an image.
    """
    shape = spec.shape
    size = math.prod(shape)
    if isinstance(rows, dict):
        call.pause()
        return from_cells(rows, spec.columns, field, first_row)
    if isinstance(rows, np.ndarray):
        if rows.shape[1:] not in (shape, (size,)):
            raise InvalidInput(
                field, f"an array of shape {shapes_of(shape)}", f"shape {rows.shape}"
            )
        flat = rows.reshape(len(rows), size)
        if spec.takes_ids:
            _check_ids(flat, spec, field, first_row)
        with np.errstate(over="ignore"):
            flat = np.ascontiguousarray(flat, dtype=np.float32)
        _check_finite(flat, field, first_row)
        return flat
    at_once = max(1, NUMBERS_AT_ONCE // size)
    if isinstance(rows, Cells):
        x = np.empty((len(rows), size), dtype=np.float32)
        for first in range(0, len(rows), at_once):
            here = slice(first, first + at_once)
            x[here] = from_cells(rows.take(here), spec.columns, field, first_row + first)
            call.pause()
        return x
    if isinstance(rows, list) and len(rows) <= at_once and not _is_long(rows[0], spec):
        return _Reader(rows[0], spec, field, max_pixels, call, encoder).block(rows, first_row)
    blocks: Iterable[list[Any]]
    blocks = (
        rows.parsed()
        if isinstance(rows, JsonRows)
        else (rows[first : first + at_once] for first in range(0, len(rows), at_once))
    )
    x = np.empty((len(rows), size), dtype=np.float32)
    reader, done = None, 0
    for block in blocks:
        reader = reader or _Reader(block[0], spec, field, max_pixels, call, encoder)
        step = 1 if _is_long(block[0], spec) else len(block)
        for first in range(0, len(block), step):
            part = block[first : first + step]
            x[done : done + len(part)] = reader.block(part, first_row + done)
            done += len(part)
            call.pause()
    assert done == len(rows)
    return x


def pool_array(
    pool: RowFile, max_pixels: int, call: Call, encoder: "TextEncoder | None"
) -> Float32[np.ndarray, "N I"]:
    """Return all rows of a file; otherwise as `rows_array`."""
    x = np.empty((pool.rows, pool.row_size), dtype=np.float32)
    first = 0
    for part in pool.parts():
        rows = rows_array(part, pool.spec, pool.field, max_pixels, call, encoder, first)
        x[first : first + len(rows)] = rows
        first += len(rows)
        call.pause()
    return x


def _is_long(row: Any, spec: InputSpec) -> bool:
    """Return whether a row is one that is read by itself: an image or a text."""
    return isinstance(row, str | bytes) or (spec.text is not None and isinstance(row, dict))


class _Reader:
    """Reads rows in lists; the first row decides what all are."""

    def __init__(
        self,
        first: Any,
        spec: InputSpec,
        field: str,
        max_pixels: int,
        call: Call,
        encoder: "TextEncoder | None",
    ) -> None:
        self.reservation = call.reservation
        self.spec = spec
        self.encoder = encoder
        self.field = field
        self.max_pixels = max_pixels
        self.pixels = 0  # of images so far
        self.is_objects = bool(spec.columns) and isinstance(first, dict)
        self.is_images = spec.image is not None and isinstance(first, str | bytes)
        self.is_texts = spec.text is not None and isinstance(first, str | bytes | dict)
        nested = (
            len(spec.shape) > 1
            and isinstance(first, list)
            and first != []
            and isinstance(first[0], list)
        )
        self.lengths = spec.shape if nested else (math.prod(spec.shape),)

    def block(self, rows: list[Any], first_row: int) -> Float32[np.ndarray, "n I"]:
        """Return rows, of which the first is `first_row` of all."""
        if self.is_objects:
            return from_objects(rows, self.spec.columns, self.field, first_row)
        if self.is_images:
            return np.stack(
                [
                    self._image(row, f"{self.field}.{n}")
                    for n, row in enumerate(rows, start=first_row)
                ]
            )
        if self.is_texts:
            return np.stack(
                [
                    self._text(row, f"{self.field}.{n}")
                    for n, row in enumerate(rows, start=first_row)
                ]
            )
        return _block(rows, first_row, self.lengths, self.spec, self.field)

    def _text(self, row: Any, field: str) -> Float32[np.ndarray, "I"]:
        """Return a text, a string, the bytes of a file or an object of its column alone, as a row
        of ids.

        Raises:
            InvalidInput: if it is none, or too long.
            Overloaded: if there is too little memory to tokenise it.
        """
        assert self.spec.text is not None
        assert self.encoder is not None
        if isinstance(row, dict):
            row, field = (
                _only(row, self.spec.text.column, field),
                f"{field}.{self.spec.text.column}",
            )
        if isinstance(row, bytes):
            try:
                row = row.decode("utf-8-sig")  # without the mark that some editors begin with
            except UnicodeDecodeError:
                raise InvalidInput(field, "a text in UTF-8", "other bytes") from None
        if type(row) is not str:
            raise InvalidInput(field, "a string, as the row before it", kind_of(row))
        with self.reservation.hold(self.encoder.bytes_for(row, field), field):
            try:
                return self.encoder.row(row)
            except ValueError:
                raise InvalidInput(
                    field, "text that the version's tokenizer takes", "other text"
                ) from None

    def _image(self, row: Any, field: str) -> Float32[np.ndarray, "I"]:
        """Return an image, the bytes of a file or base64 of them, as a flat row of pixels.

        Raises:
            InvalidInput: if it is not a whole image of the model's size.
            TooLarge, Overloaded: if it and those before it have more than `max_pixels`, or there is
                too little memory to decode it; it is not decoded then.
        """
        assert self.spec.image is not None
        image = open_image(_content(row, field), field)
        spec = self.spec.image
        resized = resized_pixels(image, spec, field)
        self.pixels += decoded_pixels(image) + resized
        if self.pixels > self.max_pixels:
            expected = f"expected images of at most {self.max_pixels} pixels together"
            raise TooLarge(f"{self.field}: {expected}, got more")
        with self.reservation.hold(DECODED_BYTES * (image.width * image.height + resized), field):
            return pixels(image, self.spec.shape, spec, field).astype(np.float32)


def _only(row: dict[str, Any], name: str, field: str) -> Any:
    """Return the value of an object of one key.

    Raises:
        InvalidInput: if it has another one, or not that.
    """
    if name not in row:
        raise InvalidInput(f"{field}.{name[:80]}", "a string", "no such column")
    unknown = next((key for key in row if key != name), None)
    if unknown is not None:
        raise InvalidInput(
            f"{field}.{unknown[:80]}", f"no column but {name[:80]}", "an unknown one"
        )
    return row[name]


def _content(row: Any, field: str) -> bytes:
    if isinstance(row, bytes):
        return row
    if not isinstance(row, str):
        raise InvalidInput(field, "base64 of an image file, as the row before it", kind_of(row))
    try:
        return base64.b64decode(row, validate=True)
    except (binascii.Error, ValueError):  # the latter of text beyond ASCII
        raise InvalidInput(
            field, "base64 of an image file", f"{kind_of(row)} that is not base64"
        ) from None


def _block(
    rows: list[Any], first_row: int, lengths: tuple[int, ...], spec: InputSpec, field: str
) -> Float32[np.ndarray, "N I"]:
    """Return rows of numbers in lists, nested by `lengths`."""
    shape = spec.shape
    size = math.prod(shape)

    def path(i: int, axis: int) -> str:
        return _path(field, first_row * math.prod(lengths[:axis]) + i, lengths[:axis])

    level: list[Any] = rows
    for axis, length in enumerate(lengths):
        for i, part in enumerate(level):
            if type(part) is not list or len(part) != length:
                expected = f"an array of {length}"
                if axis == 0:
                    expected += f" (rows have shape {shape}{_alternatives(spec)})"
                of_rows = (
                    "; a file of many rows is a body of its own" if isinstance(part, bytes) else ""
                )
                raise InvalidInput(path(i, axis), expected, kind_of(part) + of_rows)
        level = level[0] if len(level) == 1 else list(chain.from_iterable(level))
    if not set(map(type, level)) <= {int, float}:
        i = next(i for i, value in enumerate(level) if type(value) not in (int, float))
        raise InvalidInput(path(i, len(lengths)), "a number", kind_of(level[i]))
    if spec.takes_ids:
        _check_ids(
            np.array(level, dtype=np.float64).reshape(len(rows), size), spec, field, first_row
        )
    numbers = array(
        "f", level
    )  # in half of numpy's time, and too large ones become infinite without a warning
    flat = np.frombuffer(numbers, dtype=np.float32).reshape(len(rows), size)
    if len(numbers) > FEW_NUMBERS or not math.isfinite(sum(numbers)):
        _check_finite(flat, field, first_row)
    return flat


def _check_finite(flat: Float32[np.ndarray, "N I"], field: str, first_row: int = 0) -> None:
    """Raise InvalidInput for the first number that is not finite."""
    finite = np.isfinite(flat)
    if not finite.all():
        n, i = np.argwhere(~finite)[0]
        expected = "a finite number in float32's range"
        raise InvalidInput(f"{field}.{n + first_row}.{i}", expected, "one that is not")


def _check_ids(flat: np.ndarray, spec: InputSpec, field: str, first_row: int = 0) -> None:
    """Raise InvalidInput for the first number that is no id of the model's."""
    is_id = (flat >= spec.minimum) & (flat <= spec.maximum) & (flat == np.floor(flat))
    if not is_id.all():
        n, i = np.argwhere(~is_id)[0]
        expected = f"an id, a whole number from {spec.minimum:.0f} to {spec.maximum:.0f}"
        raise InvalidInput(f"{field}.{n + first_row}.{i}", expected, f"{flat[n, i]:.17g}"[:40])


def _alternatives(spec: InputSpec) -> str:
    """Say how else a row may come."""
    flat = f", or {math.prod(spec.shape)} numbers flat" if len(spec.shape) > 1 else ""
    objects = ", or are objects keyed by column" if spec.columns else ""
    texts = "" if spec.text is None else f", or are strings, or objects of {spec.text.column[:80]}"
    return flat + objects + texts + (", or are image files" if spec.image is not None else "")


def _path(field: str, index: int, lengths: tuple[int, ...]) -> str:
    """Return the JSON path of an element, given its index among all elements at its depth."""
    parts = []
    for length in reversed(lengths):
        index, part = divmod(index, length)
        parts.append(str(part))
    return ".".join([field, str(index), *reversed(parts)])
