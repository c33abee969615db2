"""Preflights, as their parent sees them: start the process, ask it, end it if it takes too long.

A graph is untrusted data, and only running it shows how long it takes and how much memory. So it
first runs in a process that can be killed. That process limits its own memory; its time is limited
here.
"""

import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from model_store.artifacts.store import ModelStore
from model_store.processes import ChildProcess, NoAnswer

PREFLIGHT = "model_store.inference.preflight"
WORKING_BYTES = 1 << 30  # in addition to the files
SECONDS = 120.0  # for commands


@dataclass(frozen=True)
class Failure:
    """Why a version cannot be served: the file and the reason."""

    file: str
    reason: str
    is_read: bool = True  # whether the files match the manifest; every reader checks that

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class PreflightProcess(ChildProcess):
    """A process that tries versions one after the other, until one fails."""

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
            StopRequested: if `stopping` is set meanwhile.
        """
        request = {
            "store": str(store.resolve()),
            "name": name,
            "version": version,
            "working_bytes": working_bytes,
        }
        try:
            failure = self.ask(request, seconds, stopping or threading.Event())
        except NoAnswer as error:
            reason = f"the process that tried it in {working_bytes} bytes ended ({error})"
            if error.is_late:
                reason = f"expected a prediction within {seconds:g} s, got none"
            return Failure("network.onnx", reason)
        return None if failure is None else Failure(**failure)


def check_version(store: ModelStore, name: str, version: str) -> None:
    """Load a version (a number or an alias) and predict with it in another process.

    Raises:
        NotFound: if there is none.
        BrokenArtifact: if it cannot be served.
    """
    manifest = store.manifest(name, store.resolve(name, version))
    with closing(PreflightProcess()) as process, closing(store.storage.lease(manifest)) as lease:
        failure = process.run(lease.root, name, manifest.version, SECONDS)
    if failure is not None:
        raise manifest.broken(failure.file, failure.reason)
