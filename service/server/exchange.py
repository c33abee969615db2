"""The ASGI interface between a connection and the application."""

import asyncio
import logging
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Scope

from service.server.budget import SCOPE_KEY, Reservation

if TYPE_CHECKING:
    from service.server.protocol import HttpConnection

logger = logging.getLogger("dubito")

STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_BODY = {204, 304}
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
DISCONNECT = {"type": "http.disconnect"}


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
            self.connection.end_exchange(self)

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
        await self.connection.drain()
        if self.disconnected:
            return
        self.answered = not more_body
        self.connection.write(*self._head, *self._frame(body, more_body))
        self._head = []
        if not more_body:
            self.connection.end_answer(self)
            self.notify()

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
