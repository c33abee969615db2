"""Measure the memory needed by uploaded Parquet files, in a separate process.

pyarrow allocates the sizes that a file declares, without any limit. The other formats are read in
parts of known size.
"""

import threading
import time

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.processes import ChildProcess, NoAnswer, StopRequested
from model_store.types import Content
from service.errors import PastDeadline, ShuttingDown
from service.request_context import RequestContext

MODULE = "model_store.sources.preflight"
MAX_BYTES = 256 << 20  # memory to read a file
MAX_S = 10.0
GRACE_S = 5.0  # for the process to report a timeout


class FilePreflights:
    """Runs preflights of Parquet files in a process that starts on demand. Not thread-safe."""

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._process: ChildProcess | None = None

    def reserve(self, content: Content, spec: InputSpec, field: str, call: RequestContext) -> None:
        """Reserve the memory needed to read a file."""
        try:
            outcome = self._run(content, spec, call)
        except StopRequested:
            raise ShuttingDown from None
        if isinstance(outcome, int):
            call.reservation.reserve(outcome, field)
        elif time.monotonic() > call.deadline:
            raise PastDeadline
        else:
            limits = f"{MAX_BYTES} bytes of memory and {MAX_S:g} s"
            expected = f"a Parquet file that is read in {limits}"
            raise InvalidInput(field, expected, f"a file that takes more ({outcome})")

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _run(self, content: Content, spec: InputSpec, call: RequestContext) -> int | str:
        if self._process is None:
            # The process must be single-threaded, because it forks.
            environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
            self._process = ChildProcess(MODULE, environment)
        seconds = max(0.001, min(MAX_S, call.deadline - time.monotonic()))
        bounds = {"max_bytes": MAX_BYTES, "seconds": seconds}
        request = {"spec": spec.model_dump(mode="json"), "size": len(content), **bounds}
        try:
            answer: int | str = self._process.ask(request, seconds + GRACE_S, self._ending, content)
        except NoAnswer:  # for example if the system runs out of memory
            self._process.close()
            self._process = None
            return "its process ended"
        return answer
