"""Parse and validate request headers, bodies, queries and forms (RFC 7578)."""

import mmap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from io import BytesIO
from typing import Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import File, FormParser, parse_options_header

from model_store.errors import (
    MAX_ERRORS,
    InvalidInput,
    TooLarge,
    describe_value,
    expected_value,
    list_choices,
    merge_errors,
)
from model_store.sources.npy import parse_npy
from model_store.sources.rows import Rows
from model_store.types import Content, Pause
from service import limits
from service.api.json_blocks import (
    JSON_OBJECT_BYTES,
    MAX_NESTED,
    JsonRows,
    count_marks,
    invalid_json,
    reserve_json,
    split_json,
)
from service.api.media_types import ENDINGS, FILE_ENDINGS, FORM, JSON, NPY, NPZ, list_header, weight
from service.api.schemas import Envelope, RequestModel, drop_extra_unknown
from service.context import Context
from service.errors import Unsupported
from service.request_context import RequestContext

PURPOSE, TEST = "Dubito-Purpose", "test"  # header and its only value
# Smaller JSON is parsed at once without reserving memory. Its objects take up to 2 MB.
SMALL_JSON_BYTES = 64 << 10
LARGE_BODY_BYTES = 1 << 20
MAX_FORM_FIELDS = 16  # in addition to the rows
ARRAY_BYTES = 5  # per number: float32 and a finite flag
# Time to parse each mark, in tenths of a microsecond
PARSE_COSTS = {"[": 10, "{": 10, ":": 2, ",": 1}
MAX_PARSE_COST = 1_000_000
FORM_STEP_BYTES = 1 << 20  # parsed between two pauses

AnyEnvelope = TypeVar("AnyEnvelope", bound=Envelope)
AnyQuery = TypeVar("AnyQuery", bound=RequestModel)
Validated = TypeVar("Validated", bound=BaseModel)
T = TypeVar("T")


def header(request: Request, name: bytes, default: str = "") -> str:
    """Return the first header with a lower-case name, faster than Starlette's `Headers`."""
    for key, value in request.scope["headers"]:
        if key == name:
            return str(value, "latin-1")
    return default


def is_test(request: Request) -> bool:
    """Check whether the request is marked as a test, which drift and metrics skip."""
    purpose = header(request, PURPOSE.lower().encode())
    if purpose not in ("", TEST):
        raise InvalidInput(PURPOSE, f"{TEST!r}, or no header", repr(purpose[:80]))
    return purpose == TEST


def request_media_type(request: Request) -> str:
    return header(request, b"content-type").partition(";")[0].strip().lower()


def prefers_npz(request: Request) -> bool:
    """Check whether the `Accept` header names npz with at least the weight of JSON."""
    if all(name != b"accept" for name, _ in request.scope["headers"]):
        return False
    accept = list_header(request.scope, b"accept")
    npz = weight(accept, NPZ)
    return NPZ in accept.lower() and npz > 0 and npz >= weight(accept, JSON)


def unsupported(request: Request, expected: str) -> Unsupported:
    """Create the error for a body of another media type."""
    received = "another media type" if request_media_type(request) else "none"
    return Unsupported("Content-Type", expected, received)


def require_json(request: Request) -> None:
    """Raise Unsupported unless the body is JSON.

    Browsers let other sites send forms and text without a preflight request.
    """
    if request_media_type(request) != JSON:
        raise unsupported(request, JSON)


async def read_body(call: RequestContext, limit: int) -> Content:
    """Read a request body of up to `limit` bytes, or up to `MAX_JSON_BYTES` of JSON."""
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
    async for part in request.stream():
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
    """Allocate memory in huge pages, which the kernel provides on first write.

    Growing a bytearray to 6 MB takes 20 times longer, and blocks all threads.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def parse_rows(
    call: RequestContext,
    body: Content,
    kind: type[AnyEnvelope],
    field: str,
    max_rows: int,
    is_job: bool,
) -> tuple[AnyEnvelope, Rows | None]:
    """Parse a request's envelope and rows.

    The rows are None if they are in a file: the body, or a file named in the envelope.
    """
    request, media_type = call.request, request_media_type(call.request)
    rows: Rows | None = None
    if media_type == JSON:
        # A seed in the query would be ignored silently.
        if request.scope["query_string"] and request.query_params:
            expected = "no parameters, because a JSON body has all fields"
            raise InvalidInput("query", expected, "some")
        content, rows = read_json(body, field, max_rows, call)
        if rows is None:
            rows = content.get(field, [])
            if isinstance(rows, list) and field in content:
                content = {**content, field: []}
        envelope = validate(kind, content)
    elif media_type == FORM:
        call.reservation.acquire(2 * len(body))  # parts exist twice while they are collected
        max_parts = max_rows + MAX_FORM_FIELDS
        parts = parse_form(body, request.headers["content-type"], max_parts, call.pause)
        rows = [part for name, part in parts if name == field]
        pairs = request.query_params.multi_items()
        pairs += [(name, part.decode("utf-8", "replace")) for name, part in parts if name != field]
        envelope = validate(kind, {field: [], **text_fields(pairs, kind, field, "form")})
    elif media_type in ENDINGS:
        envelope = parse_query(request, kind, field)
        if media_type == NPY and not is_job:
            rows = parse_npy(body, field)
            call.reservation.acquire(ARRAY_BYTES * rows.size)
    else:
        names = ", ".join((JSON, NPY, *FILE_ENDINGS))
        raise unsupported(request, f"{names} or {FORM}")
    if getattr(envelope, f"{field}_file", None) is not None:
        if rows is None or len(rows) > 0:
            raise InvalidInput(f"{field}_file", f"no value with other {field}", "both")
        return envelope, None
    if rows is not None:
        check_row_count(field, len(rows), max_rows)
    return envelope, rows


async def run_parser(context: Context, call: RequestContext, size: int, work: Callable[[], T]) -> T:
    """Run a parser, using a worker thread if `size` (in bytes) is large."""
    if size <= SMALL_JSON_BYTES:
        return work()
    return await context.threads.requests.run(call, size, work)


def check_row_count(field: str, rows: int, max_rows: int, advice: str = "") -> None:
    """Check that there are 1 to `max_rows` rows. `advice` is appended to the error message."""
    if rows == 0:
        raise InvalidInput(field, "at least one row", "none")
    if rows > max_rows:
        raise TooLarge(field, f"at most {max_rows} rows", f"{rows}{advice}")


def validate(kind: type[Validated], content: dict[str, Any]) -> Validated:
    try:
        if len(content) > len(kind.model_fields):
            content = drop_extra_unknown(kind, content)
        return kind.model_validate(content)
    except ValidationError as error:
        errors = error.errors(include_url=False)[:MAX_ERRORS]
    raise merge_errors([_invalid(kind, each) for each in errors])


def _invalid(kind: type[BaseModel], error: ErrorDetails) -> InvalidInput:
    name, received = ".".join(map(str, error["loc"])), describe_value(error["input"])
    match error["type"]:
        case "extra_forbidden":
            name = name if len(name) <= 80 else name[:77] + "..."
            return InvalidInput(name, list_choices(sorted(kind.model_fields)), "an unknown field")
        case "missing":
            return InvalidInput(name, "a value", "none")
        case "too_short":
            return InvalidInput(name, f"at least {error['ctx']['min_length']}", received)
    return InvalidInput(name, expected_value(error["msg"]), received)


def parse_query(request: Request, kind: type[AnyQuery], rows_field: str = "") -> AnyQuery:
    """Parse the query parameters. `rows_field` is the field that the body provides."""
    fields = text_fields(request.query_params.multi_items(), kind, rows_field, "query")
    for name in (name for name, value in fields.items() if value is None):
        raise InvalidInput(name, "a value (leave the parameter out for the default)", "null")
    return validate(kind, {rows_field: [], **fields} if rows_field else fields)


def read_json(
    body: Content,
    rows_field: str,
    max_rows: int,
    call: RequestContext,
    mark_bytes: Mapping[str, int] = JSON_OBJECT_BYTES,
) -> tuple[dict[str, Any], JsonRows | None]:
    """Parse a JSON object, but leave the rows of a large one unparsed. See `reserve_json`."""
    if len(body) <= SMALL_JSON_BYTES:
        return parse_json(body), None
    reserve_json(body, rows_field, max_rows, call, mark_bytes)
    return split_json(body, rows_field, max_rows, call.pause)


def parse_json(body: Content) -> dict[str, Any]:
    """Parse a JSON object of a few megabytes. The parser blocks all other threads."""
    if len(body) > SMALL_JSON_BYTES:
        counts = count_marks(body, "body", MAX_NESTED)
        if sum(cost * counts[mark] for mark, cost in PARSE_COSTS.items()) > MAX_PARSE_COST:
            maxima = ", ".join(f"{MAX_PARSE_COST // PARSE_COSTS[mark]} {mark!r}" for mark in "[{:,")
            raise TooLarge("body", f"JSON of at most {maxima}", "more")
    try:
        content = orjson.loads(memoryview(body))
    except orjson.JSONDecodeError as error:
        raise invalid_json(error.msg) from None
    if not isinstance(content, dict):
        raise InvalidInput("body", "a JSON object", describe_value(content))
    return content


@cache
def _json_types(kind: type[RequestModel]) -> dict[str, tuple[str, str]]:
    """Return the JSON types of each field and its items. An unspecified type is `string`."""
    types = {}
    for name, schema in kind.model_json_schema()["properties"].items():
        value = schema.get("anyOf", [schema])[0]
        types[name] = value.get("type", "string"), value.get("items", {}).get("type", "string")
    return types


def text_fields(
    pairs: Iterable[tuple[str, str]], kind: type[RequestModel], rows_field: str, prefix: str
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
                raise InvalidInput(f"{prefix}: {name}", "a JSON value", "other text") from None
        if is_item and (name in repeated or name not in fields):
            repeated.add(name)
            fields.setdefault(name, []).append(value)
            continue
        if name == rows_field or name in fields:
            raise InvalidInput(f"{prefix}: {name[:80]}", "one value, outside the rows", "another")
        fields[name] = value
    return fields


def parse_form(
    body: Content, content_type: str, max_parts: int, pause: Pause
) -> list[tuple[str, bytes]]:
    """Parse a multipart form into the names and contents of its parts."""
    _, options = parse_options_header(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidInput("Content-Type", f"{FORM} with a boundary", "no boundary")
    parts: list[tuple[str, bytes]] = []
    ends: list[bool] = []

    def add(name: bytes | None, content: bytes | None) -> None:
        if len(parts) == max_parts:
            raise TooLarge("body", f"a form of at most {max_parts} parts", "more")
        if not name:
            raise InvalidInput("body", "a name for each part", "an unnamed part")
        parts.append((name.decode("utf-8", "replace"), content or b""))

    def add_file(file: File) -> None:
        assert isinstance(file.file_object, BytesIO)
        add(file.field_name, file.file_object.getvalue())

    try:
        parser = FormParser(
            FORM,
            on_field=lambda part: add(part.field_name, part.value),
            on_file=add_file,
            on_end=lambda: ends.append(True),
            boundary=boundary,
            config={"MAX_MEMORY_FILE_SIZE": len(body)},
        )
        for start in range(0, len(body), FORM_STEP_BYTES):
            parser.write(bytes(body[start : start + FORM_STEP_BYTES]))
            pause()
        parser.finalize()
    except FormParserError:
        expected = f"{FORM} with the boundary of its Content-Type and a name for each part"
        raise InvalidInput("body", expected, "a malformed form") from None
    if not ends:
        raise InvalidInput("body", "a complete form", "an incomplete form")
    return parts
