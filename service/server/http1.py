"""Strict parsing of HTTP/1.1 requests (RFC 9112) with h11.

Ambiguous requests, which allow request smuggling, are rejected: repeated `Content-Length`,
`Content-Length` with `Transfer-Encoding`, codings other than `chunked`, folded headers, bare line
feeds, control characters, several hosts. `Upgrade` is ignored.
"""

import re
import sys
from typing import Any
from urllib.parse import unquote

import h11
from h11._receivebuffer import ReceiveBuffer

MAX_HEAD_BYTES = 64 << 10  # also for all chunk extensions and trailers
MAX_FIELDS = 256
MAX_BLANK_BYTES = 64  # some clients send empty lines before a request
MAX_CHUNK_LINE_BYTES = 4096

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
    """Return the request's ASGI scope and whether to keep the connection alive.

    Raise BadRequest if the head is invalid or ambiguous.
    """
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
