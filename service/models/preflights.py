"""Preflights: a version is run in a process of its own before this one loads it, once for all
workers.

The outcome holds for a version's digest: for what its files are, not for its name. Two preflights
run at a time, so that one that takes long does not keep the others waiting.
"""

import fcntl
import json
import math
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path

from model_store.artifacts.manifest import Manifest
from model_store.artifacts.place import open_store
from model_store.errors import StoreUnreachable
from model_store.inference.preflight_process import Failure, PreflightProcess
from model_store.processes import LOOK_S, GivenUp
from service import limits
from service.errors import NotReady
from service.settings import Settings

AT_ONCE = 2
RETRY_UNREACHABLE_S = 1.0
# After which a version that failed is tried again, should it want to be served
RETRY_FAILED_S = 600.0


class Preflights:
    """The preflights of versions and their outcomes. Any thread may call its methods."""

    def __init__(
        self,
        settings: Settings,
        ending: threading.Event,
        folder: Path | None = None,
        spare: PreflightProcess | None = None,
    ) -> None:
        """Begin; preflights are given up once `ending` is set, and other workers' outcomes are in
        `folder`.

        `spare` is a process for the first preflight, started ahead.
        """
        self.settings = settings
        self.store = open_store(
            settings.store, settings.cache, settings.cache_bytes, settings.verify_key_file
        )
        self.news = threading.Event()  # set when a preflight is over
        self._ending = ending
        self._folder = folder
        self._pool = ThreadPoolExecutor(AT_ONCE, "preflights")
        self._lock = threading.Lock()  # of these, held for moments
        # By digest, and since when
        self._known: dict[str, tuple[float, Future[Failure | None]]] = {}
        self._idle = [] if spare is None else [spare]
        self._wanted = 0  # preflights that are not over

    def of(self, manifest: Manifest) -> "Future[Failure | None]":
        """Return the outcome of a version's preflight; one begins where there was none of late."""
        with self._lock:
            begun, future = self._known.get(manifest.digest, (0.0, None))
            if future is not None and time.monotonic() - begun <= _lasts_s(future):
                return future
            if self.settings.preflight_timeout_s > 0:
                future = self._pool.submit(self._run, manifest)
                self._wanted += 1
            else:
                future = Future()
                future.set_result(None)
            self._known[manifest.digest] = time.monotonic(), future
            return future

    def check(self, manifest: Manifest) -> None:
        """Wait for a version's preflight.

        Raises:
            BrokenArtifact: if it failed.
            NotReady: if the service is about to end.
            StoreError: if there is no copy of it to be had.
        """
        try:
            failure = self.of(manifest).result()
        except GivenUp:  # and StoreError: there is no copy to try
            raise NotReady("the service is about to end") from None
        if failure is not None and failure.is_read:  # else reading it says so too
            raise manifest.broken(failure.file, failure.reason)

    def forget_failures(self) -> None:
        """Have versions that failed tried again when they are wanted."""
        with self._lock:
            failed = [digest for digest, (_, future) in self._known.items() if _has_failed(future)]
            for digest in failed:
                del self._known[digest]
        if self._folder is not None:
            for digest in failed:
                (self._folder / f"{digest}.preflight").unlink(missing_ok=True)

    def rest(self) -> None:
        """End the processes that wait for a preflight, unless there will be one."""
        with self._lock:
            idle, self._idle = ([], self._idle) if self._wanted > 0 else (self._idle, [])
        for process in idle:
            process.close()

    def close(self) -> None:
        """Give up what is running; `ending` is set."""
        self._pool.shutdown(cancel_futures=True)
        self._wanted = 0
        self.rest()

    def _run(self, manifest: Manifest) -> Failure | None:
        try:
            if self._folder is None:
                return self._run_in_process(manifest)
            return self._run_once(self._folder, manifest)
        except OSError as error:
            reason = f"no process could be started to try it: {error.strerror}"
            return Failure("network.onnx", reason)
        finally:
            with self._lock:
                self._wanted -= 1
            self.rest()
            self.news.set()

    def _run_once(self, folder: Path, manifest: Manifest) -> Failure | None:
        """Return the outcome of another worker's late preflight; run it where there was none."""
        said = folder / f"{manifest.digest}.preflight"
        with said.with_suffix(".lock").open("w") as lock:
            while not _try_lock(lock.fileno()):
                if self._ending.wait(LOOK_S):
                    raise GivenUp
            with suppress(OSError):
                content = json.loads(said.read_bytes())
                if content is None or abs(time.time() - said.stat().st_mtime) < RETRY_FAILED_S:
                    return None if content is None else Failure(**content)
            failure = self._run_in_process(manifest)
            with suppress(OSError):  # then each tries it for itself
                draft = said.with_suffix(".draft")
                draft.write_text(json.dumps(None if failure is None else asdict(failure)))
                draft.rename(said)
            return failure

    def _run_in_process(self, manifest: Manifest) -> Failure | None:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or not process.is_running:
            process = PreflightProcess()
        settings, version = self.settings, (manifest.name, manifest.version)
        try:
            with closing(self.store.storage.lease(manifest)) as lease:
                failure = process.run(
                    lease.root,
                    *version,
                    settings.preflight_timeout_s,
                    limits.PREFLIGHT_BYTES,
                    self._ending,
                )
        except BaseException:
            process.close()
            raise
        if failure is None:
            with self._lock:
                self._idle.append(process)
        else:
            process.close()
        return failure


def _has_failed(future: "Future[Failure | None]") -> bool:
    return future.done() and (
        future.cancelled() or future.exception() is not None or future.result() is not None
    )


def _lasts_s(future: "Future[Failure | None]") -> float:
    """Return how long an outcome holds."""
    if not _has_failed(future):
        return math.inf
    is_unreachable = not future.cancelled() and isinstance(future.exception(), StoreUnreachable)
    return RETRY_UNREACHABLE_S if is_unreachable else RETRY_FAILED_S


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
