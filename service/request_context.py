"""A request while it is answered: client, deadline, memory and record, and where long work pauses.

Reading and writing is plain code that calls `RequestContext.pause` every few milliseconds. Few
bytes are read on the event loop. Long work runs in `service.engine.threads`, where a pause lets
other work run, and ends work that nobody waits for any more.
"""

import asyncio
import math
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Message, Scope

from model_store.types import Pause
from service.server.budget import SCOPE_KEY, ByteBudget, Reservation
from service.server.shares import KEY_NAME, address_client

T = TypeVar("T")

RECORD_KEY = "dubito.record"
PREFIX_KEY = "dubito.prefix"  # what came before the path that is routed
MAX_PHASES = 32  # kept, of a request that is worked on in many parts
QUEUE, COMPUTE, READ, ANSWER = "queue", "compute", "read", "answer"
PATIENCE_S = 0.05  # before watching for a disconnect: most requests are answered by then


@dataclass(frozen=True)
class Phase:
    queued: float
    begun: float
    ended: float


@dataclass(slots=True)
class RequestRecord:
    """A request's facts for metrics, log and traces. Times are those of `time.perf_counter`, in
    seconds."""

    request_id: str
    method: str
    begun: float
    key: str | None = None  # name of the key that it came with
    model: str | None = None
    version: str | None = None
    rows: int | None = None
    draws: int | None = None
    flags: int | None = None
    reason: str | None = None  # of a failure
    trace_id: str | None = None
    begun_ns: int = 0  # `begun` on the clock of time.time_ns, where there are spans
    queue_s: float = 0.0
    compute_s: float = 0.0
    read: float | None = None  # when the body was read and taken apart
    worked: float | None = None  # when the last phase ended
    phases: list[tuple[str, float, float]] = field(default_factory=list)

    def add_phases(self, phases: Iterable[Phase]) -> None:
        for phase in phases:
            self.queue_s += phase.begun - phase.queued
            self.compute_s += phase.ended - phase.begun
            self.worked = phase.ended
            if len(self.phases) < MAX_PHASES:
                self.phases += (
                    (QUEUE, phase.queued, phase.begun),
                    (COMPUTE, phase.begun, phase.ended),
                )

    def add_usage(
        self, model: str, version: str, rows: int, draws: int, flags: int | None = None
    ) -> None:
        self.model, self.version = model, version
        self.rows, self.draws, self.flags = rows, draws, flags


def record_of(scope: Scope) -> RequestRecord:
    record: RequestRecord = scope[RECORD_KEY]
    return record


def prefix_of(scope: Scope) -> str:
    """Return what a link in an answer begins with: the proxy's prefix, and /v1 where that came."""
    return str(scope.get(PREFIX_KEY, ""))


async def _never() -> Message:
    return await asyncio.Future[Message]()


NO_REQUEST = Request({"type": "http", "headers": []}, _never)


@dataclass(eq=False, slots=True)
class RequestContext:
    """The context of a request, or of work without one, such as a job."""

    reservation: Reservation = field(default_factory=lambda: Reservation(ByteBudget(1 << 62)))
    client: Hashable = None  # whose share its work is part of
    deadline: float = math.inf  # on the clock of time.monotonic, as `begun`
    begun: float = 0.0
    length: int = 0  # of its body, as it was said: 0 where nothing was
    request: Request = NO_REQUEST
    record: RequestRecord = field(default_factory=lambda: RequestRecord("", "", 0.0))
    on_pause: Pause | None = None  # of the thread that works on it

    @classmethod
    def from_request(cls, request: Request, deadline_s: float) -> "RequestContext":
        scope, begun = request.scope, time.monotonic()
        reservation: Reservation | None = scope.get(SCOPE_KEY)
        if reservation is None:  # without a server that bounds memory, as in tests
            reservation = Reservation(ByteBudget(1 << 62), address_client(scope.get("client")))
        if KEY_NAME in scope:
            reservation.assign(("key", scope[KEY_NAME]))
        lengths = (int(value) for name, value in scope["headers"] if name == b"content-length")
        return cls(
            reservation,
            reservation.client,
            begun + deadline_s,
            begun,
            next(lengths, 0),
            request,
            scope[RECORD_KEY],
        )

    def pause(self) -> None:
        """Let others work; long work calls it every few milliseconds.

        Raises:
            PastDeadline: after the deadline.
            CancelledError: if nobody waits for the work any more.
        """
        if self.on_pause is not None:
            self.on_pause()

    async def wait(self, future: "asyncio.Future[T]") -> T:
        """Return the result of a future.

        Raises:
            ClientDisconnect: if the client hangs up before; the future is cancelled then.
        """
        loop = asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []

        def watch() -> None:
            watching.append(loop.create_task(self._disconnect()))
            watching[0].add_done_callback(lambda _: future.cancel())

        timer = loop.call_later(PATIENCE_S, watch)
        try:
            return await future
        except asyncio.CancelledError:
            if watching and watching[0].done():
                raise ClientDisconnect from None
            raise
        finally:
            timer.cancel()
            for task in watching:
                task.cancel()

    async def _disconnect(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
