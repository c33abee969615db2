"""HTTP/1.1 as bytes (RFC 9112), in its strict form: every message has one meaning, or is refused.

What parsers are known to read in different ways is refused: `Content-Length` beside
    `Transfer-Encoding` or more than
once, codings but `chunked`, folded headers, lines that end in a bare LF, control characters,
several hosts. `Upgrade` is one header among others: no upgrade is ever granted, and bodies are read
whatever it says.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote

MAX_HEAD_BYTES = (
    64 << 10
)  # of a request's line and headers, and of all that a chunked body has beside its data
MAX_FIELDS = 256
MAX_BLANK_BYTES = (
    64  # of empty lines before a request, which some clients send after the one before
)
MAX_CHUNK_LINE_BYTES = 4096
CHUNKS_AT_ONCE = 1000  # others get their turn between: a byte each they would take long

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*+"
_BLANK = re.compile(rb"(?:\r\n)*+")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_REQUEST_LINE = re.compile(rb"([A-Z]{1,24}+) (?:https?://[^/?# ]*+)?([!\"$-~]*+) HTTP/1\.([01])")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):[ \t]*+(" + _TEXT + rb")")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(;" + _TEXT + rb")?")

Headers = list[tuple[bytes, bytes]]


class BadRequest(Exception):
    """What cannot be read: the connection ends with this status."""

    def __init__(self, status: int = 400) -> None:
        super().__init__(status)
        self.status = status


@dataclass(slots=True)
class Head:
    """A request's line and headers; their names are in lower case."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    version: str
    headers: Headers
    length: int  # of the body, in bytes
    chunked: bool
    keep_alive: bool
    expects_continue: bool


def find_head(buffer: bytearray, searched: int) -> tuple[int, int] | None:
    """Return where a request's head begins and ends, without its empty line; None if it has not
    come whole.

    The first `searched` bytes are known to hold no end.

    Raises:
        BadRequest: if it is too long, or cannot become a head.
    """
    blank = _BLANK.match(buffer)
    start = 0 if blank is None else blank.end()
    end = buffer.find(b"\r\n\r\n", max(start, searched - 3))
    if (len(buffer) if end < 0 else end) - start > MAX_HEAD_BYTES:
        raise BadRequest(431)
    if start > MAX_BLANK_BYTES:
        raise BadRequest
    if end >= 0:
        return start, end
    if len(buffer) > start and not (b"A"[0] <= buffer[start] <= b"Z"[0] or buffer[start:] == b"\r"):
        raise BadRequest  # at once, not when it is late: TLS, for one
    if _BARE_LF.search(buffer, max(start, searched - 1)):
        raise BadRequest
    return None


def parse_head(content: bytes) -> Head:
    """Return a request's head, given its lines without the empty one.

    Raises:
        BadRequest: if it is not one, or its body could be read in several ways.
    """
    first, *lines = content.split(b"\r\n")
    line = _REQUEST_LINE.fullmatch(first)
    if line is None or line[1] == b"CONNECT":
        raise BadRequest
    if len(lines) > MAX_FIELDS:
        raise BadRequest(431)
    headers: Headers = []
    lengths, codings, hosts, connection, expects_continue = [], [], 0, b"", False
    for text in lines:
        field = _FIELD.fullmatch(text)
        if field is None:
            raise BadRequest
        name, value = field[1].lower(), field[2].rstrip(b" \t")
        headers.append((name, value))
        if name == b"content-length":
            lengths.append(value)
        elif name == b"transfer-encoding":
            codings.append(value)
        elif name == b"host":
            hosts += 1
        elif name == b"connection":
            connection += value.lower() + b","
        elif name == b"expect":
            expects_continue = value.lower() == b"100-continue"
    is_old = line[3] == b"0"
    if hosts > 1 or (hosts == 0 and not is_old):
        raise BadRequest
    target = line[2] or b"/"
    raw_path, _, query = target.partition(b"?")
    path = raw_path.decode("ascii") or "/"
    return Head(
        method=line[1].decode(),
        path=unquote(path) if "%" in path else path,
        raw_path=raw_path or b"/",
        query=query,
        version="1.0" if is_old else "1.1",
        headers=headers,
        length=_body_length(lengths, codings, is_old),
        chunked=bool(codings),
        keep_alive=not is_old
        and b"close" not in [token.strip() for token in connection.split(b",")],
        expects_continue=expects_continue and not is_old,
    )


def _body_length(lengths: list[bytes], codings: list[bytes], is_old: bool) -> int:
    """Return the announced length of a body; 0 without one."""
    if codings:
        if lengths or is_old or len(codings) > 1 or codings[0].lower() != b"chunked":
            raise BadRequest
        return 0
    if not lengths:
        return 0
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        raise BadRequest
    return int(lengths[0])


class LengthBody:
    """Reads a body of an announced length."""

    has_more = False  # in the buffer

    def __init__(self, length: int) -> None:
        self.left = length

    @property
    def ended(self) -> bool:
        """Whether the body has come whole."""
        return self.left == 0

    def take(self, buffer: bytearray) -> bytes:
        """Take from the buffer what belongs to the body, and return it."""
        piece = bytes(buffer[: self.left]) if len(buffer) > self.left else bytes(buffer)
        del buffer[: len(piece)]
        self.left -= len(piece)
        return piece


class ChunkedBody:
    """Reads a chunked body; extensions and trailers are read over."""

    def __init__(self) -> None:
        self.ended = False
        self.has_more = False  # in the buffer, perhaps
        self._left: int | None = (
            None  # of the chunk, its line break included; None: before its line
        )
        self._in_trailers = False
        self._beside = 0  # bytes of extensions and trailers

    def take(self, buffer: bytearray) -> bytes:
        """Take from the buffer what belongs to the body, at most `CHUNKS_AT_ONCE`, and return its
        data.

        Raises:
            BadRequest: if it is no chunked body, or has too much beside its data.
        """
        pieces: list[bytes] = []
        self.has_more = False
        for _ in range(CHUNKS_AT_ONCE):
            if self.ended or not buffer:
                break
            if self._left is not None:
                if not self._data(buffer, pieces):
                    break
            elif not self._line(buffer):
                break
        else:
            self.has_more = not self.ended
        return b"".join(pieces)

    def _data(self, buffer: bytearray, pieces: list[bytes]) -> bool:
        """Take a chunk's data and line break, or what is there of them; return whether it went
        on."""
        assert self._left is not None
        data = min(self._left - 2, len(buffer))
        if data > 0:
            pieces.append(bytes(buffer[:data]))
            del buffer[:data]
            self._left -= data
            return True
        if not b"\r\n".startswith(buffer[:2]):
            raise BadRequest
        if len(buffer) < 2:
            return False
        del buffer[:2]
        self._left = None
        return True

    def _line(self, buffer: bytearray) -> bool:
        """Take a chunk's line or one of the trailers; return whether there was a whole one."""
        most = MAX_HEAD_BYTES - self._beside if self._in_trailers else MAX_CHUNK_LINE_BYTES
        end = buffer.find(b"\r\n", 0, most + 2)
        if end < 0:
            if len(buffer) > most:
                raise BadRequest(431)
            if _BARE_LF.search(buffer) or not (
                self._in_trailers or _CHUNK.fullmatch(buffer.removesuffix(b"\r"))
            ):
                raise BadRequest
            return False
        line = bytes(buffer[:end])
        del buffer[: end + 2]
        if not self._in_trailers:
            chunk = _CHUNK.fullmatch(line)
            if chunk is None:
                raise BadRequest
            self._note(len(chunk[2] or b""))
            size = int(chunk[1], 16)
            self._in_trailers = size == 0
            self._left = size + 2 if size else None
        elif line:
            if _FIELD.fullmatch(line) is None:
                raise BadRequest
            self._note(len(line) + 2)
        else:
            self.ended = True
        return True

    def _note(self, beside: int) -> None:
        self._beside += beside
        if self._beside > MAX_HEAD_BYTES:
            raise BadRequest(431)
