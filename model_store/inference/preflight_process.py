"""Test versions in a separate process before they are served.

A graph is untrusted data. Only a run shows its time and memory, so it first runs in a process that
can be killed. That process limits its memory, and this module limits its time.
"""

import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from model_store.artifacts.store import ModelStore
from model_store.processes import ChildProcess, NoAnswer

PREFLIGHT = "model_store.inference.preflight"
WORKING_BYTES = 1 << 30  # in addition to the files
TIMEOUT_S = 120.0  # for commands


@dataclass(frozen=True)
class Failure:
    """The reason why a version cannot be served, and the file responsible."""

    file: str
    reason: str
    is_read: bool = True  # whether the files match the manifest

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


class PreflightProcess(ChildProcess):
    """A process that checks several versions in turn and exits after the first failure."""

    def __init__(self) -> None:
        super().__init__(PREFLIGHT, {"CUDA_VISIBLE_DEVICES": ""})  # run on the CPU

    def run(
        self,
        store: Path,
        name: str,
        version: str,
        seconds: float,
        working_bytes: int = WORKING_BYTES,
        stopping: threading.Event | None = None,
    ) -> Failure | None:
        """Check a version. Return the failure, or None if the version can be served.

        Raises:
            StopRequested: if `stopping` is set during the check.
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
            reason = f"the preflight process with {working_bytes} bytes ended ({error})"
            if error.is_late:
                reason = f"expected a prediction within {seconds:g} s, got none"
            return Failure("network.onnx", reason)
        return None if failure is None else Failure(**failure)


def check_version(store: ModelStore, name: str, version: str) -> None:
    """Check a version in a new preflight process. `version` can be an alias.

    Raises:
        NotFound: if the version does not exist.
        BrokenArtifact: if it cannot be served.
    """
    manifest = store.manifest(name, store.resolve(name, version))
    with closing(PreflightProcess()) as process, closing(store.storage.lease(manifest)) as lease:
        failure = process.run(lease.root, name, manifest.version, TIMEOUT_S)
    if failure is not None:
        raise manifest.broken(failure.file, failure.reason)
