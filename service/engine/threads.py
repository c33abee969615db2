"""Thread pools for work that would block the event loop.

Parsing requests and encoding answers is time-sliced: after a few milliseconds a thread pauses, and
the next one runs by the fair shares of clients. A large body therefore delays other clients only
briefly.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

from service.errors import PastDeadline
from service.request_context import RequestContext
from service.server.shares import Shares

T = TypeVar("T")

MAX_READERS = 2  # running at a time, so that a slow step does not block all reading
SLICE_S = 0.004  # time that a piece runs before it pauses
SLICE_BYTES = 64 << 10  # typically read in a slice
MAX_THREADS = 1 << 12  # more than connections, so that a thread is always free


class FairThreads:
    """Threads that clients share fairly. Up to `max_running` of them run at a time."""

    def __init__(self, name: str, max_running: int) -> None:
        self._pool = ThreadPoolExecutor(MAX_THREADS, name)
        self._lock = threading.Lock()  # protects the fields below
        self._waiting: Shares[_Piece] = Shares()
        self._free = max_running
        self.is_closed = False

    async def run(self, context: RequestContext, size: int, work: Callable[[], T]) -> T:
        """Run work in a thread. The work must call `context.pause` every few milliseconds.

        `size` is the number of bytes of the input or output. Small work runs first.
        """
        piece = _Piece(self, context)
        self.put(piece, min(SLICE_BYTES, max(1, size)))
        running = asyncio.get_running_loop().run_in_executor(self._pool, piece.run, work)
        try:
            return await context.wait(running)
        finally:
            piece.is_active = False

    def close(self) -> None:
        """Cancel all work and wait for the threads."""
        with self._lock:
            self.is_closed = True
            self._run_next()
        self._pool.shutdown(cancel_futures=True)

    def put(self, piece: "_Piece", size: int) -> None:
        with self._lock:
            self._waiting.put(piece, piece.context.client, size)
            self._run_next()

    def free(self) -> None:
        with self._lock:
            self._free += 1
            self._run_next()

    def _run_next(self) -> None:
        if self.is_closed:
            for waiting in self._waiting.turns():
                waiting.work.is_next.set()
        elif self._free > 0 and self._waiting:
            self._free -= 1
            (piece, *_) = self._waiting.turns()
            self._waiting.take([piece])
            piece.work.is_next.set()


class _Piece:
    def __init__(self, threads: FairThreads, context: RequestContext) -> None:
        self.threads = threads
        self.context = context
        self.is_active = True
        self.is_next = threading.Event()
        self._slice_end = 0.0

    def run(self, work: Callable[[], T]) -> T:
        self._await_turn()
        self.context.on_pause = self._pause
        try:
            self._pause()
            return work()
        finally:
            self.context.on_pause = None
            self.threads.free()

    def _pause(self) -> None:
        if not self.is_active or self.threads.is_closed:
            raise CancelledError
        if time.monotonic() > self.context.deadline:
            raise PastDeadline
        if time.perf_counter() > self._slice_end:
            self.threads.put(self, SLICE_BYTES)
            self.threads.free()
            self._await_turn()

    def _await_turn(self) -> None:
        self.is_next.wait()
        self.is_next.clear()
        self._slice_end = time.perf_counter() + SLICE_S


class Pool:
    def __init__(self, name: str, threads: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._executor = ThreadPoolExecutor(threads, name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run work in a thread. Raise PastDeadline after the default deadline."""
        try:
            async with asyncio.timeout(self._deadline_s) as limit:
                return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        except TimeoutError:
            if limit.expired():
                raise PastDeadline from None
            raise

    def close(self) -> None:
        """Cancel queued work and wait for running work."""
        self._executor.shutdown(cancel_futures=True)


class Threads:
    def __init__(self, deadline_s: float) -> None:
        self.jobs = Pool("jobs", 2, deadline_s)  # short queries about jobs
        self.files = Pool("files", 1, deadline_s)
        self.loads = Pool("loads", 1, deadline_s)
        self.state = Pool("state", 2, deadline_s)
        self.integrations = Pool("integrations", 4, deadline_s)  # such as requests to other servers
        self.requests = FairThreads("requests", MAX_READERS)  # parse bodies, decode images
        self.answers = FairThreads("answers", 1)  # encode large answers
        self.preflights = FairThreads("preflights", 1)  # check uploaded files

    def close(self) -> None:
        for pool in vars(self).values():
            pool.close()
