"""The context of a request.

Parsers and encoders call `RequestContext.pause` every few milliseconds. On the event loop this does
nothing. In the threads of `service.engine.threads`, it lets other work run, and cancels work whose
client has disconnected.
"""

import asyncio
import math
import time
from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Scope

from model_store.sources.row_file import Bounds
from model_store.types import Pause
from service import limits
from service.server.budget import SCOPE_KEY, ByteBudget, Reservation
from service.server.shares import KEY_NAME, address_client

T = TypeVar("T")

RECORD_KEY = "dubito.record"
PREFIX_KEY = "dubito.prefix"  # removed from the path before routing
DISCONNECT_DELAY_S = 0.05  # before disconnects are detected; most requests end sooner


@dataclass(frozen=True)
class Phase:
    queued_at: float
    started_at: float
    ended_at: float


@dataclass(slots=True)
class RequestRecord:
    """A request's data for metrics, logs and traces. Times are from `time.perf_counter`."""

    request_id: str
    method: str
    started: float
    key: str | None = None  # name of the key
    model: str | None = None
    version: str | None = None
    rows: int | None = None
    draws: int | None = None
    flags: int | None = None
    reason: str | None = None  # of a failure
    trace_id: str | None = None
    queue_s: float = 0.0
    compute_s: float = 0.0

    def add_phases(self, phases: Iterable[Phase]) -> None:
        for phase in phases:
            self.queue_s += phase.started_at - phase.queued_at
            self.compute_s += phase.ended_at - phase.started_at

    def set_usage(
        self, model: str, version: str, rows: int, draws: int, flags: int | None = None
    ) -> None:
        self.model, self.version = model, version
        self.rows, self.draws, self.flags = rows, draws, flags

    @property
    def usage(self) -> dict[str, str | int | None]:
        names = ("key", "model", "version", "rows", "draws", "flags")
        return {name: getattr(self, name) for name in names}


def get_record(scope: Scope) -> RequestRecord:
    return scope[RECORD_KEY]


def get_link_prefix(scope: Scope) -> str:
    """Return the path prefix for links: the proxy's, plus /v1 if the request used it."""
    return str(scope.get(PREFIX_KEY, ""))


async def _never() -> Message:
    return await asyncio.Future[Message]()


NO_REQUEST = Request({"type": "http", "headers": []}, _never)


@dataclass(eq=False, slots=True)
class RequestContext(Bounds):
    """The context of a request or of a job's computation."""

    reservation: Reservation = field(default_factory=lambda: Reservation(ByteBudget(1 << 62)))
    client: Hashable = None  # for fair shares
    deadline: float = math.inf  # from time.monotonic, like `started`
    started: float = 0.0
    length: int = 0  # Content-Length, or 0
    max_pixels: float = math.inf  # in all image files that are read together
    request: Request = NO_REQUEST
    record: RequestRecord = field(default_factory=lambda: RequestRecord("", "", 0.0))
    on_pause: Pause | None = None  # set by the thread that does the work

    @classmethod
    def from_request(cls, request: Request, deadline_s: float) -> "RequestContext":
        scope, started = request.scope, time.monotonic()
        reservation: Reservation | None = scope.get(SCOPE_KEY)
        if reservation is None:  # another ASGI server, which does not limit memory
            reservation = Reservation(ByteBudget(1 << 62), address_client(scope.get("client")))
        if KEY_NAME in scope:
            reservation.client = "key", scope[KEY_NAME]
        lengths = (int(value) for name, value in scope["headers"] if name == b"content-length")
        return cls(
            reservation,
            reservation.client,
            started + deadline_s,
            started,
            next(lengths, 0),
            limits.MAX_IMAGE_PIXELS,
            request,
            scope[RECORD_KEY],
        )

    def reserve(self, size: int, field: str) -> None:
        self.reservation.reserve(size, field)

    def hold(self, size: int, field: str) -> AbstractContextManager[None]:
        return self.reservation.hold(size, field)

    def pause(self) -> None:
        """Let other work run. Long work must call this every few milliseconds."""
        if self.on_pause is not None:
            self.on_pause()

    async def wait(self, future: "asyncio.Future[T]") -> T:
        """Wait for a future, or cancel it if the client disconnects."""
        loop = asyncio.get_running_loop()
        watchers: list[asyncio.Task[None]] = []

        def watch() -> None:
            watchers.append(loop.create_task(self._disconnect()))
            watchers[0].add_done_callback(lambda _: future.cancel())

        timer = loop.call_later(DISCONNECT_DELAY_S, watch)
        try:
            return await future
        except asyncio.CancelledError:
            if watchers and watchers[0].done():
                raise ClientDisconnect from None
            raise
        finally:
            timer.cancel()
            for task in watchers:
                task.cancel()

    async def _disconnect(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
