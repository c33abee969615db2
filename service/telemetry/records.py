"""The record of a request: filled in by the routes, read by metrics, log and traces."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from starlette.types import Scope

SCOPE_KEY = "dubito.record"
MAX_PHASES = 32  # kept, of a request that is worked on in many parts
QUEUE, COMPUTE, READ, ANSWER = "queue", "compute", "read", "answer"


@dataclass(frozen=True)
class Phase:
    queued: float
    begun: float
    ended: float


@dataclass(slots=True)
class RequestRecord:
    """A request's record. Times are those of `time.perf_counter`, in seconds."""

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
    record: RequestRecord = scope[SCOPE_KEY]
    return record
