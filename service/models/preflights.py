"""Preflights, which test versions and uploaded files in separate processes."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

from model_store.artifacts.manifest import InputSpec, Manifest
from model_store.artifacts.store import open_store
from model_store.errors import InvalidInput
from model_store.inference.preflight import Failure, PreflightProcess
from model_store.processes import ChildProcess, NoAnswer, StopRequested
from model_store.types import Content
from service import limits
from service.errors import PastDeadline, ShuttingDown
from service.request_context import RequestContext
from service.settings import Settings

MAX_RUNNING = 2
FILE_PREFLIGHT = "model_store.sources.preflight"
MAX_FILE_BYTES = 256 << 20  # memory to read a file
MAX_FILE_S = 10.0
GRACE_S = 5.0  # for the process to report a timeout


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
            self._outcomes = {d: f for d, f in self._outcomes.items() if not f.done()}

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


class FilePreflights:
    """Measures the memory needed by uploaded Parquet files, in a process that starts on demand.

    pyarrow allocates the sizes that a file declares, without any limit. The other formats are read
    in parts of known size. Not thread-safe.
    """

    def __init__(self, ending: threading.Event) -> None:
        self._ending = ending
        self._process: ChildProcess | None = None

    def reserve(self, content: Content, spec: InputSpec, field: str, call: RequestContext) -> None:
        """Reserve the memory needed to read a file."""
        try:
            outcome = self._run(content, spec, call)
        except StopRequested:
            raise ShuttingDown from None
        if isinstance(outcome, int):
            call.reservation.reserve(outcome, field)
        elif time.monotonic() > call.deadline:
            raise PastDeadline
        else:
            limits = f"{MAX_FILE_BYTES} bytes of memory and {MAX_FILE_S:g} s"
            expected = f"a Parquet file that is read in {limits}"
            raise InvalidInput(field, expected, f"a file that takes more ({outcome})")

    def close(self) -> None:
        if self._process is not None:
            self._process.close()

    def _run(self, content: Content, spec: InputSpec, call: RequestContext) -> int | str:
        if self._process is None:
            # The process must be single-threaded, because it forks.
            environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
            self._process = ChildProcess(FILE_PREFLIGHT, environment)
        seconds = max(0.001, min(MAX_FILE_S, call.deadline - time.monotonic()))
        bounds = {"max_bytes": MAX_FILE_BYTES, "seconds": seconds}
        request = {"spec": spec.model_dump(mode="json"), "size": len(content), **bounds}
        try:
            answer: int | str = self._process.ask(request, seconds + GRACE_S, self._ending, content)
        except NoAnswer:  # for example if the system runs out of memory
            self._process.close()
            self._process = None
            return "its process ended"
        return answer
