"""Preflights, which test versions in separate processes before they are loaded."""

import json
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

from model_store.artifacts.disk import locked
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import open_store
from model_store.errors import StoreUnreachable
from model_store.inference.preflight import Failure, PreflightProcess
from model_store.processes import StopRequested
from service import limits
from service.errors import ShuttingDown
from service.settings import Settings

MAX_RUNNING = 2
RETRY_UNREACHABLE_S = 1.0
RETRY_FAILED_S = 600.0  # before a requested version is tried again


class Preflights:
    """Runs preflights and stores their outcomes by version digest. Thread-safe."""

    def __init__(
        self, settings: Settings, ending: threading.Event, folder: Path | None = None
    ) -> None:
        self.settings = settings
        self.store = open_store(
            settings.store, settings.cache, settings.cache_bytes, settings.verify_key_file
        )
        self.wakeup = threading.Event()  # set after each preflight
        self._ending = ending  # cancels preflights
        self._folder = folder  # shared with other workers
        self._pool = ThreadPoolExecutor(MAX_RUNNING, "preflights")
        self._lock = threading.Lock()  # protects the outcomes
        # Start time and outcome by digest
        self._outcomes: dict[str, tuple[float, Future[Failure | None]]] = {}

    def submit(self, manifest: Manifest) -> "Future[Failure | None]":
        """Return the future outcome of a version's preflight, starting it if necessary."""
        with self._lock:
            start, future = self._outcomes.get(manifest.digest, (0.0, None))
            if future is not None and time.monotonic() - start <= _lifetime_s(future):
                return future
            if self.settings.preflight_timeout_s > 0:
                future = self._pool.submit(self._run, manifest)
            else:
                future = Future()
                future.set_result(None)
            self._outcomes[manifest.digest] = time.monotonic(), future
            return future

    def check(self, manifest: Manifest) -> None:
        """Wait for a version's preflight to pass.

        Raises:
            BrokenArtifact: if it failed.
            ShuttingDown: if the service is shutting down.
            StoreError: if the files are unavailable.
        """
        try:
            failure = self.submit(manifest).result()
        except StopRequested:
            raise ShuttingDown from None
        # Otherwise the files are invalid, and loading the version raises a better error.
        if failure is not None and failure.is_read:
            raise manifest.broken(failure.file, failure.reason)

    def forget_failures(self) -> None:
        """Allow failed versions to be tested again."""
        with self._lock:
            digests = [name for name, (_, future) in self._outcomes.items() if _has_failed(future)]
            for digest in digests:
                del self._outcomes[digest]
        if self._folder is not None:
            for digest in digests:
                (self._folder / f"{digest}.preflight").unlink(missing_ok=True)

    def close(self) -> None:
        """Stop all preflights once `ending` is set."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, manifest: Manifest) -> Failure | None:
        try:
            if self._folder is None:
                return self._run_in_process(manifest)
            return self._run_shared(self._folder, manifest)
        except OSError as error:
            reason = f"cannot start a process for the preflight: {error.strerror}"
            return Failure("network.onnx", reason)
        finally:
            self.wakeup.set()

    def _run_shared(self, folder: Path, manifest: Manifest) -> Failure | None:
        """Return another worker's outcome, or run the preflight and share the outcome."""
        record = folder / f"{manifest.digest}.preflight"
        with locked(record.with_suffix(".lock")):
            with suppress(OSError):
                content = json.loads(record.read_bytes())
                if content is None or abs(time.time() - record.stat().st_mtime) < RETRY_FAILED_S:
                    return None if content is None else Failure(**content)
            failure = self._run_in_process(manifest)
            with suppress(OSError):  # without a record, each worker runs the preflight itself
                draft = record.with_suffix(".draft")
                draft.write_text(json.dumps(None if failure is None else asdict(failure)))
                draft.rename(record)
            return failure

    def _run_in_process(self, manifest: Manifest) -> Failure | None:
        with (
            closing(PreflightProcess()) as process,
            closing(self.store.storage.lease(manifest)) as lease,
        ):
            return process.run(
                lease.root,
                manifest.name,
                manifest.version,
                self.settings.preflight_timeout_s,
                limits.PREFLIGHT_BYTES,
                self._ending,
            )


def _has_failed(future: "Future[Failure | None]") -> bool:
    return future.done() and (
        future.cancelled() or future.exception() is not None or future.result() is not None
    )


def _lifetime_s(future: "Future[Failure | None]") -> float:
    if not _has_failed(future):
        return math.inf
    is_unreachable = not future.cancelled() and isinstance(future.exception(), StoreUnreachable)
    return RETRY_UNREACHABLE_S if is_unreachable else RETRY_FAILED_S
