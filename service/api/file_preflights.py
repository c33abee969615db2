"""Read Parquet files from callers in another process first, within bounds on memory and time.

pyarrow allocates whatever a file's pages announce, and has no limit of its own. The other formats
are read in parts of known size.
"""

import threading
import time

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.processes import ChildProcess, NoAnswer, StopRequested
from service.errors import NotReady, PastDeadline
from service.request_context import RequestContext

MODULE = "model_store.sources.preflight"
MAX_BYTES = 256 << 20  # of memory that reading a file takes
MAX_S = 10.0
GRACE_S = 5.0  # that the process gets to say that it took longer


class FilePreflights:
    """The process that files are first read in, started when the first one comes. One thread at a
    time may call it."""

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._process: ChildProcess | None = None

    def reserve(
        self, content: bytes | bytearray, spec: InputSpec, field: str, call: RequestContext
    ) -> None:
        """Reserve the memory that reading a file takes.

        Raises:
            InvalidInput: if it takes more than `MAX_BYTES` or `MAX_S`.
            PastDeadline: if the request's deadline is before that.
            NotReady: if the service is about to end.
        """
        try:
            found = self._ask(content, spec, call)
        except StopRequested:
            raise NotReady("the service is about to end") from None
        if isinstance(found, int):
            call.reservation.reserve(found, field)
        elif time.monotonic() > call.deadline:
            raise PastDeadline
        else:
            most = f"{MAX_BYTES} bytes of memory and {MAX_S:g} s"
            expected = f"a Parquet file that is read in {most}"
            raise InvalidInput(field, expected, f"one that takes more ({found})")

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _ask(self, content: bytes | bytearray, spec: InputSpec, call: RequestContext) -> int | str:
        if self._process is None:
            # No threads: a copy of the process has none of them
            alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            alone["ARROW_DEFAULT_MEMORY_POOL"] = "system"
            self._process = ChildProcess(MODULE, alone)
        seconds = max(0.001, min(MAX_S, call.deadline - time.monotonic()))
        bounds = {"max_bytes": MAX_BYTES, "seconds": seconds}
        request = {"spec": spec.model_dump(mode="json"), "size": len(content), **bounds}
        try:
            answer: int | str = self._process.ask(request, seconds + GRACE_S, self._ending, content)
        except NoAnswer:  # for example, the system has no memory left
            self._process.close()
            self._process = None
            return "its process ended"
        return answer
