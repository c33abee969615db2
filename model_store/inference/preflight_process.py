"""The process of preflights from outside: start it, ask it, and end it when it takes too long.

A graph is data from elsewhere, and nothing short of running it tells how long it takes or how much
memory. So it first runs in a process that can be killed: within a limit of memory that it sets
itself, and of time that is kept here.
"""

import json
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from model_store.artifacts.store import ModelStore
from model_store.processes import AnsweringProcess

PREFLIGHT = "model_store.inference.preflight"
WORKING_BYTES = 1 << 30  # besides what the files take
SECONDS = 120.0  # where nobody waits for an answer


@dataclass(frozen=True)
class Failure:
    """Why a version cannot be served: the file and the reason."""

    file: str
    reason: str
    is_read: bool = True  # else the files are not those of the manifest, which every reader is told

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class PreflightProcess(AnsweringProcess):
    """A process that checks versions one after the other; after the first that failed it is of no
    more use."""

    def __init__(self) -> None:
        super().__init__(PREFLIGHT, {"CUDA_VISIBLE_DEVICES": ""})  # preflights run on the processor

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
        if not self.is_ready(stopping):
            return _failure(f"the process that was to try it did not start ({self.end()})")
        version_of = {"store": str(store.resolve()), "name": name, "version": version}
        begun = time.monotonic()
        self.send({**version_of, "working_bytes": working_bytes})
        line = self.line(seconds, stopping)
        if line is not None:
            failure = json.loads(line)
            return None if failure is None else Failure(**failure)
        if time.monotonic() - begun >= seconds:
            return _failure(f"expected a prediction within {seconds:g} s, got none")
        return _failure(f"the process that tried it in {working_bytes} bytes ended ({self.end()})")


def check_version(store: ModelStore, name: str, version: str) -> None:
    """Have a version that a number or an alias names loaded, and predict, in a process of its own.

    Raises:
        NotFound: if there is none.
        BrokenArtifact: if it cannot be served.
    """
    manifest = store.manifest(name, store.resolve(name, version))
    with closing(PreflightProcess()) as process, closing(store.storage.lease(manifest)) as lease:
        failure = process.run(lease.root, name, manifest.version, SECONDS)
    if failure is not None:
        raise manifest.broken(failure.file, failure.reason)


def _failure(reason: str) -> Failure:
    return Failure("network.onnx", reason)
