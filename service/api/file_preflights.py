"""Parquet files that callers send are first read in a process of its own, within bounds of memory
and time.

pyarrow takes what memory a file's pages ask for, however small the file is, and cannot be told to
take less. The other formats are read in parts whose size is known before.
"""

import json
import threading
import time

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.processes import AnsweringProcess, GivenUp
from service.call import Call
from service.errors import NotReady, PastDeadline

MODULE = "model_store.sources.preflight"
MOST_BYTES = 256 << 20  # of memory that reading a file takes
MOST_S = 10.0
GRACE_S = 5.0  # that the process gets to say that it took longer


class FilePreflights:
    """The process that files are first read in, started when the first one comes. One thread at a
    time may call it."""

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._process: AnsweringProcess | None = None

    def reserve(self, content: bytes | bytearray, spec: InputSpec, field: str, call: Call) -> None:
        """Reserve the memory that reading a file takes.

        Raises:
            InvalidInput: if it takes more than `MOST_BYTES` or `MOST_S`.
            PastDeadline: if the request's deadline is before that.
            NotReady: if the service is about to end.
        """
        try:
            found = self._ask(content, spec, call)
        except GivenUp:
            raise NotReady("the service is about to end") from None
        if isinstance(found, int):
            call.reservation.reserve(found, field)
        elif time.monotonic() > call.deadline:
            raise PastDeadline
        else:
            most = f"{MOST_BYTES} bytes of memory and {MOST_S:g} s"
            expected = f"a Parquet file that is read in {most}"
            raise InvalidInput(field, expected, f"one that takes more ({found})")

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _ask(self, content: bytes | bytearray, spec: InputSpec, call: Call) -> int | str:
        if self._process is None:
            # No threads: a copy of the process has none of them
            alone = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            alone["ARROW_DEFAULT_MEMORY_POOL"] = "system"
            self._process = AnsweringProcess(MODULE, alone)
        process, line = self._process, None
        seconds = max(0.001, min(MOST_S, call.deadline - time.monotonic()))
        bounds = {"most_bytes": MOST_BYTES, "seconds": seconds}
        asked = {"spec": spec.model_dump(mode="json"), "size": len(content), **bounds}
        if process.is_ready(self._ending):
            process.send(asked, content)
            line = process.line(seconds + GRACE_S, self._ending)
        if line is None:  # it ended, as where the system has no memory left
            self._process = None
            process.close()
            return "its process ended"
        found: int | str = json.loads(line)
        return found
