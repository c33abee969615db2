"""HTTP connections within limits: the server's own protocol bounds neither heads nor how long a client may take.

A request must come whole in `receive_s` from its first byte, or is answered 408; what comes beside bodies (lines,
headers, trailers) is read up to `MAX_HEAD_BYTES`, then answered 431. A client that reads nothing of its answer for
`receive_s` is hung up on.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10


class BoundedProtocol(HttpToolsProtocol):
    """The server's protocol, with limits. Only requests that come, and answers that leave, in pieces are timed."""

    def __init__(self, receive_s: float, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.receive_s = receive_s
        self._head_bytes = 0  # since the last of a body, or the last whole head
        self._receiving = False  # in the middle of a request
        self._late: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a connection on which nothing comes is closed as one that is kept alive would be."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._late = _cancelled(self._late)
        self._unread = _cancelled(self._unread)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in a piece of what the client sends."""
        self._head_bytes += len(data)
        self._receiving = True
        super().data_received(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431)
        elif not self._receiving:
            self._late = _cancelled(self._late)
        elif self._late is None:
            self._late = self.loop.call_later(self.receive_s, self._refuse, 408)

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._receiving = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Go on to its body."""
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take in a piece of its body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End it."""
        self._head_bytes, self._receiving = 0, False
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Begin to watch whether the client reads its answer."""
        super().pause_writing()
        self._watch_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """End that."""
        self._unread = _cancelled(self._unread)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle; `close` alone would wait for a client that does not read."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _watch_reading(self, unread: int) -> None:
        self._unread = self.loop.call_later(self.receive_s, self._look, unread)

    def _look(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._watch_reading(unread)
        else:
            self.transport.abort()

    def _refuse(self, status: int) -> None:
        """Answer a request that has not come whole, unless the answer would be taken for another's, and hang up."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        in_body = cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline
        if cycle is None or cycle.response_complete or in_body:
            head = STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head)
        self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; return that there is none now."""
    if timer is not None:
        timer.cancel()
    return None
