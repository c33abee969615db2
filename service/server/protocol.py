"""A uvicorn HTTP protocol with limits on time and memory.

A connection handles one request at a time, without pipelining. A request must arrive within
`receive_s` of its first byte (otherwise 408), and the client must read the answer at `MIN_RATE`.
Buffered bytes count towards the memory budget.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import Any, Literal

import h11
import orjson
from uvicorn import Config
from uvicorn.server import ServerState

from service.api.media_types import JSON, PROBLEM_JSON
from service.api.problems import other_form
from service.server.budget import Reservation
from service.server.connections import FAILED_KEYS_S, MAX_OVER_LIMIT, Connections, Turn
from service.server.http1 import (
    STATUS_LINES,
    BadRequest,
    Exchange,
    StrictBuffer,
    new_parser,
    read_head,
)
from service.server.shares import address_client

HIGH_WATER_BYTES = 64 << 10  # unprocessed input at which reading pauses
FREE_BYTES = 16 << 10  # per connection, not counted in the budget
UNSENT_BYTES = 128 << 10  # kernel send buffer per connection
MIN_RATE = 64 << 10  # bytes per second, after the first `receive_s`
LINGER_S = 2.0  # before a connection with unread input is closed, to deliver the answer
LARGE_READ = 32 << 10  # bytes per read, above which connections take turns
JOIN_BYTES = 64 << 10  # maximum answer that is written in one call
EVENTS_AT_ONCE = 250  # parser events before other connections get a turn
REFUSALS = {
    400: "malformed request framing (RFC 9112)",
    408: "the request did not arrive in time",
    429: f"too many wrong keys from this address; try again in {FAILED_KEYS_S} s",
    431: "the request's headers or chunk extensions are too large",
    500: "unexpected error",
    503: "the service has no memory left for this request; try again in 1 s",
    504: "the request waited too long for other requests of its client",
}
Timer = Literal["late", "unread", "idle"]
RETRY_AFTER = {429: b"retry-after: %d\r\n" % FAILED_KEYS_S, 503: b"retry-after: 1\r\n"}


class HttpConnection(asyncio.Protocol):
    def __init__(
        self,
        shared: Connections,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self.shared = shared
        self.config = config
        self.server_state = server_state
        self.app_state = app_state
        self.loop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport = None  # type: ignore[assignment]
        self.exchange: Exchange | None = None  # current request and its answer
        self.client: Hashable = None
        self._buffer = StrictBuffer()
        self._parser: h11.Connection | None = None  # of the incoming request
        self._is_reading_body = False
        self._read_paused = self.is_write_paused = False
        self._turn: Turn | None = None  # of the current request
        self._is_queued = False  # the current request waits for a turn
        self._waits_to_read = self._continues = False
        self._ending = False  # further input is skipped
        self._stopping = False  # closes after the current answer
        self._counted_bytes = 0  # counted in the budget
        self._idle_since = 0.0
        self._unread_since, self._written = 0.0, 0
        self._timers: dict[Timer, asyncio.TimerHandle] = {}
        self._drained: asyncio.Event | None = None

    # Called by the server and the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # count every unread byte
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES
            )
        server, client = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        self._addresses = server, client
        self.client = address_client(client)
        self.shared.add(self)
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        self._idle_since = self.loop.time()
        self._start_timer("idle", self.config.timeout_keep_alive, self._check_idle)

    def connection_lost(self, _: Exception | None) -> None:
        self.server_state.connections.discard(self)
        self.shared.forget(self)
        self._ending = True
        self._set_reading_body(False)
        self._cancel_timers("late", "unread", "idle")
        self._discard_input()
        self.is_write_paused = False
        if self._drained is not None:
            self._drained.set()
        if self.exchange is not None:
            self.exchange.disconnect()
        self.shared.budget.release(self._counted_bytes)
        self._counted_bytes = 0

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        self._buffer += data  # type: ignore[misc]
        if len(data) > LARGE_READ and self.shared.receiving > 1 and not self._waits_to_read:
            turn = self.shared.turns.begin(("read", self.client), self._begin_read)
            self._waits_to_read = turn is None
        self._advance()

    def _begin_read(self, _: Turn) -> None:
        self._waits_to_read = False
        self.update()

    def _begin_request(self, turn: Turn) -> None:
        self._is_queued = False
        if self._ending:
            turn.end()
        else:
            self._turn = turn
            self._advance()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.shared.unread.setdefault(self)
        if "unread" not in self._timers:
            self._unread_since = self.loop.time()
            self._written = self.transport.get_write_buffer_size()
            self._start_timer("unread", self.shared.receive_s, self._check_unread, 0)
        self._account()
        self.shared.relieve()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self.shared.unread.pop(self, None)
        if self.exchange is None or self.exchange.answered:
            self._cancel_timers("unread")
        if self._drained is not None:
            self._drained.set()
        self._advance()

    def shutdown(self) -> None:
        self._stopping = True
        if self.exchange is not None:
            self.exchange.keep_alive = False
        elif not self._is_queued:
            self.transport.close()

    # Called by the exchange

    def write(self, *parts: bytes) -> None:
        if self.transport.is_closing():
            return
        if len(parts) > 1 and sum(map(len, parts)) <= JOIN_BYTES:
            parts = (b"".join(parts),)
        for part in parts:
            self._written += len(part)
            self.transport.write(part)

    async def drain(self) -> None:
        while self.is_write_paused:
            self._drained = self._drained or asyncio.Event()
            self._drained.clear()
            await self._drained.wait()

    def end_answer(self, exchange: Exchange) -> None:
        self.server_state.total_requests += 1
        self._idle_since = self.loop.time()
        if not self.is_write_paused:
            self._cancel_timers("unread")
        self._turn = None  # it ends with the application's task
        exchange.body = bytearray()
        if not exchange.keep_alive or self._stopping:
            self._end()
        else:
            self._advance()

    def fail(self, exchange: Exchange) -> None:
        if exchange.started:
            self.abort()
        else:
            self._refuse(500)

    # Reading

    def _advance(self) -> None:
        if self._ending:
            return
        try:
            has_input = all(self._step() for _ in range(EVENTS_AT_ONCE))
        except BadRequest as bad:
            self._refuse(bad.status)
        except h11.RemoteProtocolError:
            self._refuse(400)
        else:
            if self.exchange is not None:
                self.exchange.notify()
            if has_input and not self._continues:
                self._continues = True
                self.loop.call_soon(self._continue)
            self.update()

    def _continue(self) -> None:
        self._continues = False
        self._advance()

    def _step(self) -> bool:
        exchange = self.exchange
        if not self._is_reading_body:
            if exchange is not None and exchange.answered:
                self.exchange = exchange = None
            if exchange is not None or self.is_write_paused or not self._buffer:
                return False
        if self._parser is None:
            if not self._has_turn():
                return False
            self._parser = new_parser(self._buffer)
        event = self._parser.next_event()
        if isinstance(event, h11.Request):
            self._start_request(event, self._parser.they_are_waiting_for_100_continue)
            return True
        if exchange is None or event is h11.NEED_DATA:
            return False
        if isinstance(event, h11.Data):
            if not exchange.answered:
                exchange.body += event.data
        else:
            self._parser = None
            self._set_reading_body(False)
            self._cancel_timers("late")
            exchange.more_body = False
        return True

    def _has_turn(self) -> bool:
        if self._turn is None and not self._is_queued:
            head = bytes(self._buffer).partition(b"\r\n\r\n")[0]
            account = self.shared.identify(head, self.client)
            self._turn = self.shared.turns.begin(account, self._begin_request)
            self._is_queued = self._turn is None
        if self._turn is not None and self._turn.kind == "refusal":
            raise BadRequest(429)
        return self._turn is not None

    def _start_request(self, request: h11.Request, expects_continue: bool) -> None:
        scope, keep_alive = read_head(request)
        server, client = self._addresses
        scope |= {
            "type": "http",
            "asgi": {"version": self.config.asgi_version, "spec_version": "2.3"},
            "server": server,
            "client": client,
            "scheme": "http",
            "root_path": "",
            "state": self.app_state.copy(),
        }
        reservation = Reservation(self.shared.budget, self.client)
        is_beyond = self in self.shared.over_limit
        keep_alive = keep_alive and not (self._stopping or is_beyond)
        self.exchange = Exchange(self, scope, reservation, keep_alive, expects_continue)
        if is_beyond and scope["path"] not in self.shared.health_paths:
            raise BadRequest(503)
        self._set_reading_body(True)
        task = self.loop.create_task(self.exchange.run(self.config.loaded_app))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)
        assert self._turn is not None
        task.add_done_callback(self._turn.end)

    def _set_reading_body(self, reads: bool) -> None:
        self.shared.receiving += reads - self._is_reading_body
        self._is_reading_body = reads

    def _discard_input(self) -> None:
        self._buffer, self._parser = StrictBuffer(), None

    def update(self) -> None:
        """Update the timers, flow control and memory budget."""
        if self._ending:
            return
        exchange = self.exchange
        if exchange is not None and not self._is_reading_body:  # the application is working
            self.shared.waiting.pop(self, None)
        elif self in self.shared.open:
            self.shared.waiting.setdefault(self)
        is_head_coming = exchange is None and bool(self._buffer) and not self.is_write_paused
        if not (self._is_reading_body or is_head_coming):
            self._cancel_timers("late")
        elif "late" not in self._timers:
            self._start_timer("late", self.shared.receive_s, self._refuse_late)
        pause = (
            self._waits_to_read
            or len(self._buffer) > HIGH_WATER_BYTES
            or (exchange is not None and len(exchange.body) > HIGH_WATER_BYTES)
        )
        if pause != self._read_paused and not self.transport.is_closing():
            self._read_paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()
        if not self._account():
            self._refuse(503)

    def _account(self) -> bool:
        """Update the memory budget. Return False if it is exhausted.

        Request bodies can exceed the budget, because the application soon reads and limits them.
        """
        buffered = len(self._buffer) + (0 if self.exchange is None else len(self.exchange.body))
        buffered = buffered if buffered > FREE_BYTES else 0
        unread = self.transport.get_write_buffer_size() if self.is_write_paused else 0
        change = buffered + unread - self._counted_bytes
        if change == 0:
            return True
        if change < 0 or unread or self._is_reading_body:
            self.shared.budget.force(change)
        elif not self.shared.budget.try_acquire(change):
            return False
        self._counted_bytes += change
        return True

    # Ending

    def evict(self) -> None:
        """Close this connection to make room for another."""
        self.shared.forget(self)
        if self.exchange is None and not self._buffer:
            self._ending = True
            self.transport.close()
        else:
            self._refuse_late()

    def abort(self) -> None:
        self.shared.forget(self)
        self._ending = True
        self.transport.abort()

    def _refuse_late(self) -> None:
        self._refuse(504 if self._is_queued else 408)

    def _refuse(self, status: int) -> None:
        if self._ending or self.transport.is_closing():
            return
        exchange = self.exchange
        if exchange is None or not exchange.started:
            retry = RETRY_AFTER.get(status, b"")
            form = None if exchange is None else other_form(exchange.scope["path"])
            title, detail = HTTPStatus(status).phrase, REFUSALS[status]
            problem = {"type": "about:blank", "title": title, "status": status, "detail": detail}
            content = orjson.dumps(form.content(status, detail) if form else problem)
            media_type = JSON if form else PROBLEM_JSON
            if exchange is not None and exchange.is_head:
                content = b""
            head = b"content-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            head = STATUS_LINES[status] + retry + head % (media_type.encode(), len(content))
            self.write(head + content)
        if exchange is not None and not exchange.answered:
            exchange.disconnect()
        self._end()

    def _end(self) -> None:
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._cancel_timers("late")
        is_coming = self._parser is not None or bool(self._buffer)
        self._discard_input()
        if is_coming and len(self.shared.over_limit) <= MAX_OVER_LIMIT:
            if self._read_paused:
                self.transport.resume_reading()
            self.transport.write_eof()
            self._start_timer("late", LINGER_S, self._check_sent)
        else:
            self.transport.close()

    # Timers

    def _start_timer(
        self, name: Timer, wait_s: float, callback: Callable[..., None], *arguments: int
    ) -> None:
        self._timers[name] = self.loop.call_later(wait_s, callback, *arguments)

    def _cancel_timers(self, *names: Timer) -> None:
        for name in names:
            if name in self._timers:
                self._timers.pop(name).cancel()

    def _check_idle(self) -> None:
        wait_s = float(self.config.timeout_keep_alive)
        if self.exchange is None and not self._buffer:
            wait_s -= self.loop.time() - self._idle_since
        if wait_s > 0:
            self._start_timer("idle", wait_s, self._check_idle)
        elif self.is_write_paused:
            self.abort()
        else:
            self.transport.close()

    def _check_unread(self, read_before: int) -> None:
        """Disconnect a client that reads its answer too slowly."""
        passed_s = self.loop.time() - self._unread_since
        read = self._written - self.transport.get_write_buffer_size()
        if self.is_write_paused and (
            read <= read_before or read < MIN_RATE * (passed_s - self.shared.receive_s)
        ):
            self.abort()
        else:
            self._start_timer("unread", self.shared.receive_s, self._check_unread, read)
            self._account()

    def _check_sent(self) -> None:
        if self.is_write_paused:
            self._start_timer("late", LINGER_S, self._check_sent)
        else:
            self.transport.close()
