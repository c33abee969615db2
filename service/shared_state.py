"""State shared by a service's processes: metrics and resets of drift tests.

Workers of a supervisor share a folder. Replicas on Ray use `integrations.ray.shared_state`.
"""

import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from model_store.errors import DubitoError

logger = logging.getLogger("dubito")


class StateBackend(Protocol):
    """Storage for the shared state.

    Calls block, and raise OSError if the state is unreachable.

    Attributes:
        name: unique name of this process, the label `worker` of its metrics.
        update_s: seconds between updates of this process.
    """

    name: str
    update_s: float

    def put_metrics(self, page: bytes) -> None:
        """Store this process's metrics in Prometheus text format."""

    def metrics(self) -> dict[str, bytes]:
        """Return each process's latest metrics, by process name."""

    def add_reset(self, name: str, version: str) -> None:
        """Ask all processes to reset a version's drift test."""

    def resets(self) -> list[list[str]]:
        """Return the arguments of all calls of `add_reset`."""


class FolderBackend:
    """Shared state in a folder: a file of metrics for each worker, and a file of drift resets."""

    update_s = 1.0

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)  # /tmp may have been cleaned
        self._resets = self.folder / "resets"
        self._resets.touch()

    def put_metrics(self, page: bytes) -> None:
        draft = self.folder / f"{self.name}.draft"
        draft.write_bytes(page)
        draft.rename(draft.with_suffix(".prom"))

    def metrics(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in sorted(self.folder.glob("*.prom"))}

    def add_reset(self, name: str, version: str) -> None:
        with self._resets.open("ab", buffering=0) as file:
            file.write(json.dumps([name, version]).encode() + b"\n")  # one write is atomic

    def resets(self) -> list[list[str]]:
        return [json.loads(line) for line in self._resets.read_bytes().splitlines()]


class SharedState:
    """Exchanges state with other processes, if there are any, in a background thread."""

    def __init__(
        self,
        backend: StateBackend | None,
        local_metrics: Callable[[], bytes],
        reset_drift: Callable[[str, str], Any],
    ) -> None:
        self.backend = backend
        self._local_metrics = local_metrics
        self._reset_drift = reset_drift
        self._num_resets = 0  # finished
        self._metrics_lock = threading.Lock()  # an older page must not replace a newer one
        self._is_reachable = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-state", daemon=True)

    def start(self) -> None:
        if self.backend is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

    def reset_drift(self, name: str, version: str) -> None:
        """Reset a version's drift test in all processes of the service."""
        if self.backend is not None:
            try:
                self.backend.add_reset(name, version)
            except OSError as error:
                logger.error("the drift reset did not reach the other processes: %s", error)

    def metrics(self) -> bytes:
        """Return the merged metrics of all processes.

        Counters never decrease between scrapes, even if a load balancer distributes them.
        """
        if self.backend is None:
            return self._local_metrics()
        try:
            self._put_metrics(self.backend)
            pages = self.backend.metrics()
        except OSError:
            pages = {self.backend.name: self._local_metrics()}
        return merge_metrics(pages)

    def _put_metrics(self, backend: StateBackend) -> None:
        with self._metrics_lock:
            backend.put_metrics(self._local_metrics())

    def _follow_resets(self, backend: StateBackend) -> None:
        resets = backend.resets()
        for reset in resets[self._num_resets :]:
            with suppress(DubitoError):  # this process may not have the version
                self._reset_drift(*reset)
        self._num_resets = len(resets)

    def _run(self) -> None:
        assert self.backend is not None
        while not self._stopping.wait(self.backend.update_s):
            try:
                self._put_metrics(self.backend)
                self._follow_resets(self.backend)
            except OSError as error:
                if self._is_reachable:
                    logger.error("the shared state is unreachable: %s; trying again", error)
                self._is_reachable = False
            except Exception:
                logger.exception("updating the shared state failed; trying again")
            else:
                if not self._is_reachable:
                    logger.info("the shared state is reachable again")
                self._is_reachable = True


def merge_metrics(pages: dict[str, bytes]) -> bytes:
    """Merge Prometheus pages and add a `worker` label to each sample."""
    families: dict[str, list[str]] = {}
    for worker, page in sorted(pages.items()):
        samples: list[str] = []
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                samples = families.setdefault(line.split(" ")[2], [line])
            elif line.startswith("# "):
                if line not in samples:
                    samples.append(line)
            else:
                name, bracket, rest = line.partition("{")
                if bracket:
                    samples.append(f'{name}{{worker="{worker}",{rest}')
                else:
                    name, _, value = line.partition(" ")
                    samples.append(f'{name}{{worker="{worker}"}} {value}')
    return "".join(f"{line}\n" for lines in families.values() for line in lines).encode()
