"""Preflights, which test versions in separate processes before they are loaded."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import open_store
from model_store.inference.preflight import Failure, PreflightProcess
from model_store.processes import StopRequested
from service import limits
from service.errors import ShuttingDown
from service.settings import Settings

MAX_RUNNING = 2


class Preflights:
    """Runs preflights and stores their outcomes by version digest. Thread-safe."""

    def __init__(self, settings: Settings, ending: threading.Event) -> None:
        self.settings = settings
        self.store = open_store(
            settings.store, settings.cache, settings.cache_bytes, settings.verify_key_file
        )
        self.wakeup = threading.Event()  # set after each preflight
        self._ending = ending  # cancels preflights
        self._pool = ThreadPoolExecutor(MAX_RUNNING, "preflights")
        self._lock = threading.Lock()  # protects the outcomes
        self._outcomes: dict[str, Future[Failure | None]] = {}  # by digest

    def submit(self, manifest: Manifest) -> "Future[Failure | None]":
        """Return the future outcome of a version's preflight, starting it if necessary."""
        with self._lock:
            future = self._outcomes.get(manifest.digest)
            if future is None:
                if self.settings.preflight_timeout_s > 0:
                    future = self._pool.submit(self._run, manifest)
                else:
                    future = Future()
                    future.set_result(None)
                self._outcomes[manifest.digest] = future
            return future

    def check(self, manifest: Manifest) -> None:
        """Wait for a version's preflight to pass. After a failure, the next call repeats it."""
        has_passed, future = False, self.submit(manifest)
        try:
            failure = future.result()
            # Otherwise the files are invalid, and loading the version raises a better error.
            if failure is not None and failure.is_read:
                raise manifest.broken(failure.file, failure.reason)
            has_passed = failure is None
        except StopRequested:
            raise ShuttingDown from None
        finally:
            with self._lock:
                if not has_passed and self._outcomes.get(manifest.digest) is future:
                    del self._outcomes[manifest.digest]

    def forget_finished(self) -> None:
        with self._lock:
            self._outcomes = {
                d: future for d, future in self._outcomes.items() if not future.done()
            }

    def close(self) -> None:
        """Stop all preflights once `ending` is set."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, manifest: Manifest) -> Failure | None:
        try:
            with (
                closing(self.store.storage.lease(manifest)) as lease,
                closing(PreflightProcess()) as process,
            ):
                version = lease.root, manifest.name, manifest.version
                timeout_s = self.settings.preflight_timeout_s
                return process.run(*version, timeout_s, limits.PREFLIGHT_BYTES, self._ending)
        except OSError as error:
            reason = f"cannot start a process for the preflight: {error.strerror}"
            return Failure("network.onnx", reason)
        finally:
            self.wakeup.set()
