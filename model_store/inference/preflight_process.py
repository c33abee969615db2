"""The process of preflights from outside: start it, ask it, and end it when it takes too long.

A graph is data from elsewhere, and nothing short of running it tells how long it takes or how much
memory. So it first runs in a process that can be killed: within a limit of memory that it sets
itself, and of time that is kept here.
"""

import json
import os
import select
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from model_store.processes import describe_exit, start_module, write_line

PREFLIGHT = "model_store.inference.preflight"
WORKING_BYTES = 1 << 30  # besides what the files take
# in which the process must be ready: it imports for a second, on an idle machine for less
START_S = 120.0
LOOK_S = 0.05  # between looks at whether a preflight is to be given up


@dataclass(frozen=True)
class Failure:
    """Why a version cannot be served: the file and the reason."""

    file: str
    reason: str
    is_read: bool = True  # else the files are not those of the manifest, which every reader is told

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class GivenUp(Exception):
    """A preflight that was told to stop."""


class PreflightProcess:
    """A process that checks versions one after the other; after the first that failed it is of no
    more use."""

    def __init__(self) -> None:
        secret = ("DUBITO_", "AWS_", "AZURE_", "GOOGLE_")  # keys, and what opens buckets
        kept = {name: value for name, value in os.environ.items() if not name.startswith(secret)}
        self._process = start_module(
            PREFLIGHT,
            {**kept, "CUDA_VISIBLE_DEVICES": ""},  # preflights run on the processor
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._is_ready = False
        self._received = b""

    def run(
        self,
        store: Path,
        name: str,
        version: str,
        seconds: float,
        working_bytes: int = WORKING_BYTES,
        stopping: threading.Event | None = None,
    ) -> Failure | None:
        """Return why a version cannot be served, None if it can.

        Raises:
            GivenUp: if `stopping` is set meanwhile.
        """
        stopping = stopping or threading.Event()
        if not self._is_ready and self._line(START_S, stopping) is None:
            return _failure(f"the process that was to try it did not start ({self._end()})")
        self._is_ready = True
        version_of = {"store": str(store.resolve()), "name": name, "version": version}
        begun = time.monotonic()
        write_line(self._process, {**version_of, "working_bytes": working_bytes})
        line = self._line(seconds, stopping)
        if line is not None:
            failure = json.loads(line)
            return None if failure is None else Failure(**failure)
        if time.monotonic() - begun >= seconds:
            return _failure(f"expected a prediction within {seconds:g} s, got none")
        return _failure(f"the process that tried it in {working_bytes} bytes ended ({self._end()})")

    @property
    def is_there(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _line(self, seconds: float, stopping: threading.Event) -> bytes | None:
        """Return the next line; None if none came in time, or the process has ended."""
        assert self._process.stdout is not None
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            if stopping.is_set():
                raise GivenUp
            left = end - time.monotonic()
            if left <= 0:
                return None
            if select.select([self._process.stdout], [], [], min(left, LOOK_S))[0]:
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    return None
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _end(self) -> str:
        """Say how the process ended; one that has not is killed."""
        try:
            return describe_exit(self._process.wait(1.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return "not in time"


def _failure(reason: str) -> Failure:
    return Failure("network.onnx", reason)
