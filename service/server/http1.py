"""HTTP/1.1 requests, parsed strictly (RFC 9112) with h11, and their responses.

Ambiguous requests, which allow request smuggling, are rejected: repeated `Content-Length`,
`Content-Length` with `Transfer-Encoding`, codings other than `chunked`, folded headers, bare line
feeds, control characters, several hosts. `Upgrade` is ignored.
"""

import asyncio
import logging
import re
import sys
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import h11
from h11._receivebuffer import ReceiveBuffer
from starlette.types import ASGIApp, Message, Scope

from service.server.budget import SCOPE_KEY, Reservation

if TYPE_CHECKING:
    from service.server.protocol import HttpConnection

logger = logging.getLogger("dubito")

MAX_HEAD_BYTES = 64 << 10  # also for all chunk extensions and trailers
MAX_FIELDS = 256
MAX_BLANK_BYTES = 64  # some clients send empty lines before a request
MAX_CHUNK_LINE_BYTES = 4096

STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_BODY = {204, 304}
DISCONNECT = {"type": "http.disconnect"}

_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BLANK = re.compile(rb"(?:\r\n)*+")
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*+"
_LINES = re.compile(rb"(?:" + _TEXT + rb"\r\n(?![ \t]))*+" + _TEXT + rb"\r?")
_CHUNK_LINE = re.compile(rb"[0-9A-Fa-f]{1,15}(?:;" + _TEXT + rb")?")
_LENGTH_LINE = re.compile(rb"[^:]*:[ \t]*+[0-9]{1,18}[ \t]*+")
_METHOD = re.compile(rb"(?!CONNECT\Z)[A-Z]{1,24}")
_TARGET = re.compile(rb"(?:https?://[^/?# ]*+)?([!\"$-~]*+)")


class BadRequest(Exception):
    def __init__(self, status: int = 400) -> None:
        super().__init__(status)
        self.status = status


class StrictBuffer(ReceiveBuffer):
    """A receive buffer that is stricter than h11's own."""

    def __init__(self) -> None:
        super().__init__()
        self._is_head = True  # the next lines are a head
        self._checked = 0  # validated bytes of an incomplete head
        self._extra = 0  # bytes of chunk extensions

    def expect_head(self) -> None:
        self._is_head, self._checked, self._extra = True, 0, 0

    def maybe_extract_lines(self) -> list[bytearray] | None:
        start = 0
        if self._is_head:
            blank = _BLANK.match(self._data)
            start = blank.end() if blank else 0
        elif self._data.startswith(b"\r\n"):
            return super().maybe_extract_lines()
        end = self._data.find(b"\r\n\r\n", max(start, self._checked - 3))
        stop = len(self._data) if end < 0 else end
        if stop - start > MAX_HEAD_BYTES - self._extra:
            raise BadRequest(431)
        if start > MAX_BLANK_BYTES:
            raise BadRequest
        if not _LINES.fullmatch(self._data, max(start, self._checked), stop + 4):
            raise BadRequest
        if end < 0:
            tail = self._data[-2:]
            self._checked = stop - (2 if tail == b"\r\n" else tail.endswith(b"\r"))
            return None
        self._checked = 0
        if not self._is_head:
            return super().maybe_extract_lines()
        self._is_head = False
        del self._data[:start]
        lines = super().maybe_extract_lines()
        lengths = [line for line in lines or () if line[:15].lower() == b"content-length:"]
        # h11 merges repeated equal lengths.
        if len(lengths) > 1 or (lengths and not _LENGTH_LINE.fullmatch(lengths[0])):
            raise BadRequest
        return lines

    def is_next_line_obviously_invalid_request_line(self) -> bool:
        """Detect input that is not HTTP, such as TLS."""
        start = self._data.lstrip(b"\r\n")[:1]
        return bool(start) and not start.isupper()

    def maybe_extract_next_line(self) -> bytearray | None:
        """Return the line before a chunk, or None if it is incomplete."""
        line = super().maybe_extract_next_line()
        text = self._data.removesuffix(b"\r") if line is None else line[:-2]
        if len(text) > MAX_CHUNK_LINE_BYTES:
            raise BadRequest(431)
        if not _CHUNK_LINE.fullmatch(text) and (text or line is not None):
            raise BadRequest
        if line is not None:
            self._extra += len(line.partition(b";")[2])
            if self._extra > MAX_HEAD_BYTES:
                raise BadRequest(431)
        return line


def new_parser(buffer: StrictBuffer) -> h11.Connection:
    parser = h11.Connection(h11.SERVER, max_incomplete_event_size=sys.maxsize)
    # h11 lacks a public way to set the buffer.
    parser._receive_buffer = buffer
    buffer.expect_head()
    return parser


def read_head(request: h11.Request) -> tuple[dict[str, Any], bool]:
    """Return a request's scope and whether to keep the connection alive, or raise BadRequest."""
    headers = list(request.headers)
    if len(headers) > MAX_FIELDS:
        raise BadRequest(431)
    target = _TARGET.fullmatch(request.target)
    is_http10 = request.http_version == b"1.0"
    names = [name for name, _ in headers]
    hosts, is_chunked = names.count(b"host"), b"transfer-encoding" in names
    if (
        target is None
        or _METHOD.fullmatch(request.method) is None
        or not (is_http10 or request.http_version == b"1.1")
        or hosts > 1
        or (hosts == 0 and not is_http10)
        or (is_chunked and (is_http10 or b"content-length" in names))
    ):
        raise BadRequest
    raw_path, _, query = target[1].partition(b"?")
    raw_path = raw_path or b"/"
    path = raw_path.decode("ascii")
    scope: dict[str, Any] = {
        "http_version": "1.0" if is_http10 else "1.1",
        "method": request.method.decode(),
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
    }
    connection = b",".join(value for name, value in headers if name == b"connection").lower()
    closes = b"close" in [token.strip() for token in connection.split(b",")]
    return scope, not (is_http10 or closes)


@dataclass(eq=False)
class Exchange:
    """A request and its response."""

    connection: "HttpConnection"
    scope: Scope
    reservation: Reservation
    keep_alive: bool
    expects_continue: bool
    body: bytearray = field(default_factory=bytearray)  # not yet read by the application
    more_body: bool = True  # the request is incomplete
    started: bool = False  # the application has sent the head of the answer
    answered: bool = False
    disconnected: bool = False

    def __post_init__(self) -> None:
        self.is_head = self.scope["method"] == "HEAD"  # middleware can change the scope's method
        self.scope[SCOPE_KEY] = self.reservation
        self._body_read = False  # the application has read the whole body
        self._head: list[bytes] = []  # sent with the first part of the body
        self._chunked = self._has_no_body = False
        self._news: asyncio.Event | None = None

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except Exception as error:  # unexpected, because the middleware handles exceptions
            logger.error("an answer failed: %s", type(error).__name__)
        finally:
            self.reservation.release()
            if not (self.answered or self.disconnected):
                self.connection.fail(self)

    def notify(self) -> None:
        if self._news is not None:
            self._news.set()

    def disconnect(self) -> None:
        self.disconnected = True
        self.body = bytearray()
        self.notify()

    async def receive(self) -> Message:
        if self.expects_continue and not self.started:
            self.expects_continue = False
            self.connection.write(CONTINUE)
        while not (self.disconnected or self.answered):
            if self.body or not (self.more_body or self._body_read):
                body, self.body = bytes(self.body), bytearray()
                self._body_read = not self.more_body
                self.connection.update()
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            self._news = self._news or asyncio.Event()
            self._news.clear()
            await self._news.wait()
        return DISCONNECT

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
            return
        body, more_body = message.get("body", b""), message.get("more_body", False)
        if self.connection.is_write_paused:
            await self.connection.drain()
        if self.disconnected:
            return
        parts, self._head = [*self._head, *self._frame(body, more_body)], []
        self.answered = not more_body
        if self.answered:
            self.notify()
        self.connection.write(*parts)
        if self.answered:
            self.connection.end_answer(self)

    def _start(self, status: int, headers: Any) -> None:
        self.started = True
        has_length = says_close = False
        head = [STATUS_LINES[status]]
        for name, value in (*self.connection.server_state.default_headers, *headers):
            if _CONTROL.search(value):
                raise RuntimeError("a header has control characters")
            if name == b"content-length" and status == 204:
                continue  # RFC 9110, section 8.6
            if name == b"content-length":
                has_length = True
            elif name == b"connection" and value == b"close":
                self.keep_alive, says_close = False, True
            head += (name, b": ", value, b"\r\n")
        if self.expects_continue:  # it is unknown whether the client sends the body
            self.keep_alive = False
        if self.is_head or status in NO_BODY:
            self._has_no_body = True
        elif not has_length:
            if self.scope["http_version"] == "1.0":
                self.keep_alive = False  # closing the connection ends the body
            else:
                self._chunked = True
                head.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive and not says_close:
            head.append(b"connection: close\r\n")
        self._head = [b"".join([*head, b"\r\n"])]

    def _frame(self, body: bytes, more_body: bool) -> list[bytes]:
        if self._has_no_body:
            return []
        if not self._chunked:
            return [body]
        parts = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
        return parts if more_body else [*parts, b"0\r\n\r\n"]
