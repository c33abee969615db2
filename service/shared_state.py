"""State shared by a service's processes: metrics and drift tests.

Workers of a supervisor share a folder. Replicas on Ray use `integrations.ray.shared_state`.
"""

import fcntl
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from safetensors.numpy import load, save

from service.models.drift import Drift, DriftReport, DriftTarget, Evidence, LiveRows

logger = logging.getLogger("dubito")


class StateBackend(Evidence, Protocol):
    """Storage for the shared state, including drift tests.

    Calls block, and raise OSError if the state is unreachable.

    Attributes:
        name: unique name of this process, the label `worker` of its metrics.
        update_s: seconds between updates of this process's metrics and live rows.
    """

    name: str
    update_s: float

    def put_metrics(self, page: bytes) -> None:
        """Store this process's metrics in Prometheus text format."""

    def metrics(self) -> dict[str, bytes]:
        """Return each process's latest metrics, by process name."""


class FolderBackend:
    """Shared state in a folder.

    Each worker's metrics and each version's drift test have a file.
    """

    update_s = 1.0

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)  # /tmp may have been cleaned

    def put_metrics(self, page: bytes) -> None:
        self._write(self.folder / f"{self.name}.prom", page)

    def metrics(self) -> dict[str, bytes]:
        return {path.stem: path.read_bytes() for path in sorted(self.folder.glob("*.prom"))}

    def take(self, target: DriftTarget, rows: LiveRows) -> None:
        with self._evidence(target) as (drift, path):
            drift.take(rows)
            self._write(path, save(drift.state()))

    def report(self, target: DriftTarget) -> DriftReport:
        with self._evidence(target) as (drift, _):
            return drift.report()

    def reset(self, target: DriftTarget) -> None:
        with self._evidence(target) as (_, path):
            path.unlink(missing_ok=True)

    @contextmanager
    def _evidence(self, target: DriftTarget) -> Iterator[tuple[Drift, Path]]:
        """Lock a version's drift test and yield it with the path of its file."""
        digest = hashlib.blake2b(f"{target.name} {target.version} ".encode(), digest_size=16)
        digest.update(target.gaps.tobytes())  # a deleted version's number can be reused
        path = self.folder / f"{digest.hexdigest()}.drift"
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            drift = Drift(target)
            if path.exists():
                drift.restore(load(path.read_bytes()))
            yield drift, path

    def _write(self, path: Path, content: bytes) -> None:
        draft = path.with_suffix(f".draft-{self.name}")
        draft.write_bytes(content)
        draft.rename(path)


class SharedState:
    """Exchanges state with other processes in a background thread.

    Args:
        backend: None if there is only one process.
        local_metrics: returns the metrics of this process.
        send_drift_rows: sends the live rows of this process to the shared drift tests.
    """

    def __init__(
        self,
        backend: StateBackend | None,
        local_metrics: Callable[[], bytes],
        send_drift_rows: Callable[[], None],
    ) -> None:
        self.backend = backend
        self._local_metrics = local_metrics
        self._send_drift_rows = send_drift_rows
        self._metrics_lock = threading.Lock()  # an older page must not replace a newer one
        self._is_reachable = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-state", daemon=True)

    def start(self) -> None:
        if self.backend is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()

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

    def _run(self) -> None:
        assert self.backend is not None
        while not self._stopping.wait(self.backend.update_s):
            try:
                self._send_drift_rows()
                self._put_metrics(self.backend)
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
