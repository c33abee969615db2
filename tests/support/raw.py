"""A strict HTTP client on sockets, which can send malformed requests."""

import re
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

HOST = "127.0.0.1"
JSON = "application/json"
STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]*\r\n")


class ConnectionClosed(Exception):
    """The server closed the connection before a response."""


@dataclass(frozen=True)
class Answer:
    """A response. Header names are in lower case."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes

    @property
    def closes(self):
        return self.headers.get(b"connection", b"").lower() == b"close"


def request(method, path, body=None, headers=(), content_type=JSON):
    """Encode a request. Without a body, it has no Content-Length."""
    lines = [b"%s %s HTTP/1.1" % (raw(method), raw(path)), b"Host: dubito"]
    if body is not None:
        lines += [b"Content-Type: " + raw(content_type), b"Content-Length: %d" % len(body)]
    lines += [raw(name) + b": " + raw(value) for name, value in headers]
    return b"\r\n".join([*lines, b"", body or b""])


def raw(text):
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


class Connection:
    """A connection to a local service. Raises TimeoutError after `timeout_s`."""

    def __init__(self, port, timeout_s=30.0, receive_bytes=None, source=HOST):
        self.socket = socket.socket()
        self.socket.bind((source, 0))
        if receive_bytes is not None:  # a small window soon blocks the server
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(timeout_s)
        self.socket.connect((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = bytearray()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, content):
        """Send bytes. Raises Ended if the server has closed the connection."""
        try:
            self.socket.sendall(content)
        except (BrokenPipeError, ConnectionResetError):
            raise ConnectionClosed from None

    def answer(self, head=False):
        while True:
            end = self._until(b"\r\n\r\n")
            start = bytes(self.received[: end + 2])
            line = STATUS_LINE.match(start)
            assert line, start[:100]
            headers = dict(_header(field) for field in start[line.end() :].split(b"\r\n")[:-1])
            del self.received[: end + 4]
            if line[1] != b"100":
                return Answer(int(line[1]), headers, b"" if head else self._body(headers))

    def ask(self, content, head=False):
        """Send a request and return its answer."""
        self.send(content)
        return self.answer(head)

    def answers_until_end(self, patience_s=0.0):
        """Read responses until the server closes the connection.

        Close our side after `patience_s` without a response.
        """
        if not self.received:
            select.select([self.socket], [], [], patience_s)
        answers = []
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        try:
            while True:
                answers.append(self.answer())
        except ConnectionClosed:
            return answers

    def reset(self):
        """Reset the connection like a crashed client."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self):
        self.socket.close()

    def _body(self, headers):
        if headers.get(b"transfer-encoding") == b"chunked":
            body = bytearray()
            while size := int(self._take(self._until(b"\r\n") + 2), 16):
                body += self._take(size + 2)[:-2]
            self._take(2)
            return bytes(body)
        return self._take(int(headers[b"content-length"]))

    def _until(self, mark):
        while (end := self.received.find(mark)) < 0:
            self._read()
        return end

    def _take(self, size):
        while len(self.received) < size:
            self._read()
        content = bytes(self.received[:size])
        del self.received[:size]
        return content

    def _read(self):
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        if not data:
            raise ConnectionClosed
        self.received += data


def _header(line):
    name, colon, value = line.partition(b":")
    assert colon, line
    return name.lower(), value.strip()
