"""HTTP connections within limits: our protocol under the server (uvicorn), which has none of its
own.

A connection has one request at a time: the next is read when the one before is answered and its
    answer is read, so
nothing queues up. A request must come whole in `receive_s` from its first byte or is answered 408;
an answer must be read at `LEAST_BYTES_S` at least. What connections hold counts in the process's
budget of bytes, and there are at most `max_connections`: beyond that the one that has kept us
waiting longest goes, or the new one is answered 503.
"""

import asyncio
import contextlib
import socket
from collections.abc import Hashable
from typing import Any

from starlette.types import Scope
from uvicorn import Config
from uvicorn.server import ServerState

from service.error_forms import error_form, is_of_others
from service.server.budget import ByteBudget, Reservation
from service.server.exchange import STATUS_LINES, Exchange
from service.server.http1 import BadRequest, ChunkedBody, Head, LengthBody, find_head, parse_head
from service.server.shares import Shares, address_client

HIGH_WATER_BYTES = 64 << 10  # of what is received and not yet taken: no more is read then
FREE_BYTES = 16 << 10  # that a connection holds without counting
UNSENT_BYTES = 128 << 10  # of answers, that the system keeps for a connection
LEAST_BYTES_S = 64 << 10  # at which an answer is read, after the first `receive_s`
# after a refusal, in which the rest of the request is passed over so that the answer arrives
LINGER_S = 2.0
MOST_REFUSED = 100  # connections beyond the limit that get such a moment
READ_AT_ONCE = 32 << 10  # bytes: who sends more at a time takes turns with others that do
TURN_S = 0.001
WRITTEN_AT_ONCE = 64 << 10  # head and body of an answer
REFUSED = {  # what is said of a request that has not come whole, where its protocol says anything
    400: "body: expected one that is framed as RFC 9112 has it, got another",
    408: "body: expected it whole in time, got a part of it",
    431: "body: expected less beside its data, got more",
    500: "an error that Dubito did not expect",
    503: "the service has no memory left for this request; try again in 1 s",
}


class Connections:
    """What the connections of a process share."""

    def __init__(self, receive_s: float, max_connections: int, budget: ByteBudget) -> None:
        self.receive_s = receive_s
        self.max_connections = max_connections
        self.budget = budget
        self.open: set[HttpConnection] = set()
        self.waiting: dict[HttpConnection, None] = {}  # for their clients, the longest first
        self.refused: set[HttpConnection] = set()  # beyond the limit, and about to end
        self.unread: dict[
            HttpConnection, None
        ] = {}  # have answers that nobody has read yet, the oldest first
        self.receiving = 0  # connections in the middle of a body
        self._next_to_read: Shares[HttpConnection] = Shares()  # of these, that wait for their turn
        self._is_ticking = False

    def make_room(self) -> bool:
        """Return whether there is room for another connection, after one has been ended for it if
        need be."""
        if len(self.open) < self.max_connections:
            return True
        longest = next(iter(self.waiting), None)
        if longest is None:
            return False
        longest.give_way()
        return True

    def forget(self, connection: "HttpConnection") -> None:
        """Forget a connection that has ended or is about to."""
        self.open.discard(connection)
        self.refused.discard(connection)
        self.waiting.pop(connection, None)
        self.unread.pop(connection, None)

    def read_in_turn(self, connection: "HttpConnection", received: int) -> None:
        """Have a connection of which so many bytes were just received wait for its turn to be read
        from again."""
        self._next_to_read.put(connection, connection.client, received)
        if not self._is_ticking:
            self._is_ticking = True
            connection.loop.call_later(TURN_S, self._turn, connection.loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the next connection read from."""
        piece = self._next_to_read.turns()[0]
        self._next_to_read.take([piece])
        piece.work.its_turn()
        self._is_ticking = len(self._next_to_read) > 0
        if self._is_ticking:
            loop.call_later(TURN_S, self._turn, loop)

    def relieve(self) -> None:
        """While more is held than may be, end the connections whose answers have been unread
        longest."""
        while self.budget.overdrawn and self.unread:
            next(iter(self.unread)).abort()


class HttpConnection(asyncio.Protocol):
    """A connection. The server calls it as it does its own protocols."""

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
        self.exchange: Exchange | None = None  # until its request has come whole and is answered
        self._buffer = bytearray()  # received, and not yet read
        self._searched = 0  # bytes of it that hold no end of a head
        self._reader: LengthBody | ChunkedBody | None = None  # of the body that comes
        self._read_paused = self._write_paused = False
        self._waits_for_turn = self._is_receiving = False
        self.client: Hashable = None
        self._ending = False  # what still comes is passed over
        self._stopping = False  # ends with its answer
        self._held = 0  # bytes of the budget
        self._idle_since = 0.0
        self._idle: asyncio.TimerHandle | None = None
        self._late: asyncio.TimerHandle | None = None
        self._turn: asyncio.Handle | None = None  # of a chunked body in very many pieces
        self._unread: asyncio.TimerHandle | None = None
        self._unread_since, self._written = 0.0, 0
        self._drained: asyncio.Event | None = None

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of every answer."""
        return self.server_state.default_headers

    # The server's and the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a connection on which nothing comes is closed as one that is kept alive would
        be."""
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # any unread byte counts
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES
            )
        if not self.shared.make_room():
            self.shared.refused.add(self)
            self._refuse(503)
            return
        self.server_state.connections.add(self)  # type: ignore[arg-type]
        self.shared.open.add(self)
        self.shared.waiting[self] = None
        self.client = address_client(transport.get_extra_info("peername"))
        self._address = (transport.get_extra_info("sockname"), transport.get_extra_info("peername"))
        self._idle_since = self.loop.time()
        self._idle = self.loop.call_later(self.config.timeout_keep_alive, self._look_whether_idle)

    def connection_lost(self, _: Exception | None) -> None:
        """End."""
        self.server_state.connections.discard(self)
        self.shared.forget(self)
        self._ending = True
        if self._is_receiving:
            self._is_receiving = False
            self.shared.receiving -= 1
        for timer in (self._idle, self._late, self._unread):
            _cancelled(timer)
        self._buffer.clear()
        self._write_paused = False
        if self._drained is not None:
            self._drained.set()
        if self.exchange is not None:
            self._leave(self.exchange)
        self.shared.budget.release(self._held)
        self._held = 0

    def eof_received(self) -> None:
        """Take the end of what the client sends for its end."""

    def data_received(self, data: bytes) -> None:
        """Take in a piece of what the client sends."""
        if not self._ending:
            self._buffer += data
            if len(data) > READ_AT_ONCE and self.shared.receiving > 1 and not self._waits_for_turn:
                self._waits_for_turn = True
                self.shared.read_in_turn(self, len(data))
            self._advance()

    def its_turn(self) -> None:
        """Go on reading: others were read from since."""
        self._waits_for_turn = False
        if not self._ending:
            self._settle()

    def pause_writing(self) -> None:
        """Begin to watch whether the client reads its answer."""
        self._write_paused = True
        self.shared.unread.setdefault(self)
        if self._unread is None:
            self._unread_since, self._written = (
                self.loop.time(),
                self.transport.get_write_buffer_size(),
            )
            self._unread = self.loop.call_later(self.shared.receive_s, self._look_whether_read, 0)
        self._account()
        self.shared.relieve()

    def resume_writing(self) -> None:
        """End that, and go on."""
        self._write_paused = False
        self.shared.unread.pop(self, None)
        if self.exchange is None or self.exchange.answered:  # else more of the answer is to come
            self._unread = _cancelled(self._unread)
        if self._drained is not None:
            self._drained.set()
        if not self._ending:
            self._advance()

    def shutdown(self) -> None:
        """End with the answer that is due, or at once."""
        self._stopping = True
        if self.exchange is None:
            self.transport.close()
        else:
            self.exchange.keep_alive = False

    # The exchange's calls

    def write(self, *parts: bytes) -> None:
        """Send bytes."""
        if self.transport.is_closing():
            return
        if len(parts) > 1 and sum(map(len, parts)) <= WRITTEN_AT_ONCE:
            parts = (b"".join(parts),)
        for part in parts:
            self._written += len(part)
            self.transport.write(part)

    async def read_by_client(self) -> None:
        """Return when all that was sent has been read, or the connection has ended."""
        while self._write_paused:
            self._drained = self._drained or asyncio.Event()
            self._drained.clear()
            await self._drained.wait()

    def taken(self) -> None:
        """Go on reading: the application has taken what had come of a body."""
        if not self._ending:
            self._settle()

    def answered(self, exchange: Exchange) -> None:
        """Go on to the next request, or end."""
        self.server_state.total_requests += 1
        self._idle_since = self.loop.time()
        if not self._write_paused:
            self._unread = _cancelled(self._unread)
        exchange.body = bytearray()
        if not exchange.keep_alive or self._stopping:
            self._end()
        else:
            self._advance()

    def finished(self, exchange: Exchange) -> None:
        """End where the application has given no whole answer."""
        if exchange.answered or exchange.gone:
            return
        if exchange.started:
            self.abort()
        else:
            self._refuse(500)

    # Reading

    def _advance(self) -> None:
        """Read what has come as far as there is room for it."""
        if self._ending:
            return
        try:
            while self._step():
                pass
        except BadRequest as bad:
            self._refuse(bad.status)
        else:
            self._settle()

    def _take_turn(self) -> None:
        self._turn = None
        self._advance()

    def _step(self) -> bool:
        """Read a piece of a body, or a head if it is the turn of one; return whether to go on."""
        exchange = self.exchange
        if self._reader is not None:
            assert exchange is not None
            piece = self._reader.take(self._buffer)
            if piece and not exchange.answered:
                exchange.body += piece
                exchange.tell()
            if not self._reader.ended:
                if self._reader.has_more and self._turn is None:
                    self._turn = self.loop.call_soon(self._take_turn)
                return False
            self._reader = None
            self._late = _cancelled(self._late)
            exchange.more_body = False
            exchange.tell()
            return True
        if exchange is not None and exchange.answered:
            self.exchange = exchange = None
        if exchange is not None or self._write_paused or not self._buffer:
            return False
        found = find_head(self._buffer, self._searched)
        if found is None:
            self._searched = len(self._buffer)
            return False
        start, end = found
        head = parse_head(bytes(self._buffer[start:end]))
        del self._buffer[: end + 4]
        self._searched = 0
        self._begin(head)
        return True

    def _begin(self, head: Head) -> None:
        """Hand a request to the application; its body follows."""
        self._reader = ChunkedBody() if head.chunked else LengthBody(head.length)
        server, client = self._address
        scope: Scope = {
            "type": "http",
            "asgi": {"version": self.config.asgi_version, "spec_version": "2.3"},
            "http_version": head.version,
            "server": server,
            "client": client,
            "scheme": "http",
            "root_path": self.config.root_path,
            "method": head.method,
            "path": self.config.root_path + head.path,
            "raw_path": self.config.root_path.encode() + head.raw_path,
            "query_string": head.query,
            "headers": head.headers,
            "state": self.app_state.copy(),
        }
        reservation = Reservation(self.shared.budget, self.client)
        self.exchange = Exchange(
            self, scope, reservation, head.keep_alive and not self._stopping, head.expects_continue
        )
        task = self.loop.create_task(self.exchange.run(self.config.loaded_app))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    def _settle(self) -> None:
        """Set timers, reading and what is counted by what the connection now waits for."""
        exchange = self.exchange
        in_work = exchange is not None and self._reader is None
        if in_work:
            self.shared.waiting.pop(self, None)
        else:
            self.shared.waiting.setdefault(self)
        is_coming = self._reader is not None or (
            exchange is None and bool(self._buffer) and not self._write_paused
        )
        if not is_coming:
            self._late = _cancelled(self._late)
        elif self._late is None:
            self._late = self.loop.call_later(self.shared.receive_s, self._refuse, 408)
        if (self._reader is not None) != self._is_receiving:
            self._is_receiving = not self._is_receiving
            self.shared.receiving += 1 if self._is_receiving else -1
        pause = (
            self._waits_for_turn
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
        """Count what is held; return whether it was left. A body counts anyway: the application
        soon takes it, and answers 429 where it must.
        """
        held = len(self._buffer) + (0 if self.exchange is None else len(self.exchange.body))
        held = held if held > FREE_BYTES else 0
        unread = self.transport.get_write_buffer_size() if self._write_paused else 0
        more = held + unread - self._held
        if more <= 0 or unread or self._reader is not None:
            self.shared.budget.force(more)
        elif not self.shared.budget.try_acquire(more):
            return False
        self._held += more
        return True

    # Ending

    def give_way(self) -> None:
        """End for another's sake: nothing of this one is in work."""
        self.shared.forget(self)
        if self.exchange is None and not self._buffer:
            self._ending = True
            self.transport.close()
        else:
            self._refuse(408)

    def abort(self) -> None:
        """End at once, whatever has not been sent."""
        self.shared.forget(self)
        self._ending = True
        self.transport.abort()

    def _refuse(self, status: int) -> None:
        """Answer a request that has not come whole, unless its answer has begun, and hang up."""
        if self._ending or self.transport.is_closing():
            return
        exchange = self.exchange
        if exchange is None or not exchange.started:
            retry = b"retry-after: 1\r\n" if status == 503 else b""
            content, media_type = b"", b""
            if exchange is not None and is_of_others(
                exchange.scope["path"]
            ):  # whose clients look for a text
                _, content, name = error_form(exchange.scope["path"], status, REFUSED[status])
                media_type = b"content-type: %s\r\n" % name.encode()
            length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(content)
            self.write(STATUS_LINES[status] + retry + media_type + length + content)
        if exchange is not None and not exchange.answered:
            self._leave(exchange)
        self._end()

    def _leave(self, exchange: Exchange) -> None:
        """Tell the application that its client is gone."""
        exchange.gone = True
        exchange.body = bytearray()
        exchange.tell()

    def _end(self) -> None:
        """End the connection once all is sent; while a request still comes it is passed over for a
        moment."""
        if self._ending or self.transport.is_closing():
            return
        self._ending = True
        self._late = _cancelled(self._late)
        is_coming = self._reader is not None or bool(self._buffer) or self in self.shared.refused
        self._buffer.clear()
        if is_coming and len(self.shared.refused) < MOST_REFUSED:
            if self._read_paused:
                self.transport.resume_reading()
            self.transport.write_eof()
            self._late = self.loop.call_later(LINGER_S, self._look_whether_sent)
        else:
            self.transport.close()

    # Timers

    def _look_whether_idle(self) -> None:
        idle_s = self.loop.time() - self._idle_since
        is_idle = self.exchange is None and not self._buffer
        if is_idle and idle_s >= self.config.timeout_keep_alive:
            if self._write_paused:
                self.abort()
            else:
                self.transport.close()
            return
        wait_s = (
            self.config.timeout_keep_alive - idle_s if is_idle else self.config.timeout_keep_alive
        )
        self._idle = self.loop.call_later(wait_s, self._look_whether_idle)

    def _look_whether_read(self, before: int) -> None:
        """Hang up on a client that reads its answer too slowly."""
        passed_s = self.loop.time() - self._unread_since
        read = self._written - self.transport.get_write_buffer_size()
        if self._write_paused and (
            read <= before or read < LEAST_BYTES_S * (passed_s - self.shared.receive_s)
        ):
            self.abort()
        else:
            self._unread = self.loop.call_later(
                self.shared.receive_s, self._look_whether_read, read
            )
            self._account()

    def _look_whether_sent(self) -> None:
        if self._write_paused:
            self._late = self.loop.call_later(LINGER_S, self._look_whether_sent)
        else:
            self.transport.close()


def _cancelled(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer; return that there is none now."""
    if timer is not None:
        timer.cancel()
    return None
