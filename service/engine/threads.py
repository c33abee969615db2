"""Threads for what would keep the event loop busy: each kind of work has its own.

Reading requests and writing answers may take a second. Each piece of work has a thread, but few run
at a time: at a pause, after a slice of some milliseconds, a piece lets the next one run, by the
fair shares of clients (`service.server.shares`). So no large body keeps another client waiting for
more than a slice.
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

READERS = 2  # pieces of reading that run at a time: a slow step does not keep the others waiting
SLICE_S = 0.004  # that a piece runs before it lets others run
SLICE_BYTES = 64 << 10  # that are about read in it
MOST_THREADS = 1 << 12  # more than there are connections: work never waits for a thread


class FairThreads:
    """Threads of which `at_once` run at a time, by fair shares of clients."""

    def __init__(self, name: str, at_once: int) -> None:
        self._pool = ThreadPoolExecutor(MOST_THREADS, name)
        self._lock = threading.Lock()  # of what follows
        self._waiting: Shares[_Piece] = Shares()
        self._free = at_once
        self.is_closed = False

    async def run(self, call: RequestContext, size: int, work: Callable[[], T]) -> T:
        """Return the result of work that calls `call.pause` every few milliseconds.

        Args:
            call: whose work it is; it has one piece of work at a time.
            size: of what is read or written, in bytes: little goes before much.
            work: what to run.

        Raises:
            PastDeadline: at a pause after the deadline.
            ClientDisconnect: if the client hangs up before.
        """
        piece = _Piece(self, call)
        self.put(piece, min(SLICE_BYTES, max(1, size)))
        running = asyncio.get_running_loop().run_in_executor(self._pool, piece.run, work)
        try:
            return await call.wait(running)
        finally:
            piece.is_wanted = False

    def close(self) -> None:
        """Cancel all work at its next pause, and wait for it."""
        with self._lock:
            self.is_closed = True
            self._let_run()
        self._pool.shutdown(cancel_futures=True)

    def put(self, piece: "_Piece", size: int) -> None:
        """Have a piece wait for its turn."""
        with self._lock:
            self._waiting.put(piece, piece.call.client, size)
            self._let_run()

    def free(self) -> None:
        """Have the next piece run in place of one that did."""
        with self._lock:
            self._free += 1
            self._let_run()

    def _let_run(self) -> None:
        if self.is_closed:
            for waiting in self._waiting.turns():
                waiting.work.is_next.set()
        elif self._free > 0 and self._waiting:
            self._free -= 1
            (piece, *_) = self._waiting.turns()
            self._waiting.take([piece])
            piece.work.is_next.set()


class _Piece:
    def __init__(self, threads: FairThreads, call: RequestContext) -> None:
        self.threads = threads
        self.call = call
        self.is_wanted = True
        self.is_next = threading.Event()
        self._slice_end = 0.0

    def run(self, work: Callable[[], T]) -> T:
        self._await_turn()
        self.call.on_pause = self._pause
        try:
            self._pause()
            return work()
        finally:
            self.call.on_pause = None
            self.threads.free()

    def _pause(self) -> None:
        if not self.is_wanted or self.threads.is_closed:
            raise CancelledError
        if time.monotonic() > self.call.deadline:
            raise PastDeadline
        if time.perf_counter() > self._slice_end:
            self.threads.put(self, SLICE_BYTES)
            self.threads.free()
            self._await_turn()

    def _await_turn(self) -> None:
        self.is_next.wait()
        self.is_next.clear()
        self._slice_end = time.perf_counter() + SLICE_S


class Threads:
    """The service's threads, without the event loop's and the engine's."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._questions = ThreadPoolExecutor(2, "questions")
        self._files = ThreadPoolExecutor(1, "files")
        self._loads = ThreadPoolExecutor(1, "loads")
        self._state = ThreadPoolExecutor(2, "state")
        self.requests = FairThreads("requests", READERS)  # parse large requests, decode images
        self.answers = FairThreads("answers", 1)  # write large answers
        self.preflights = FairThreads("preflights", 1)  # of files
        self._own = (self._questions, self._files, self._loads, self._state)
        for pool in self._own:
            pool.submit(int).result()  # its thread is there from the beginning

    async def ask(self, question: Callable[[], T]) -> T:
        """Return the answer to a quick question about jobs, which waits for none of what is read
        and written at length.

        Raises:
            PastDeadline: if it takes longer than a request may.
        """
        asked = asyncio.get_running_loop().run_in_executor(self._questions, question)
        await asyncio.wait([asked], timeout=self._deadline_s)
        if not asked.done():
            asked.cancel()
            raise PastDeadline
        return asked.result()

    async def files(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    async def loads(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._loads, work)

    async def state(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._state, work)

    def close(self) -> None:
        """End, after what is being done; what has not begun is dropped."""
        for pool in self._own:
            pool.shutdown(cancel_futures=True)
        self.requests.close()
        self.answers.close()
        self.preflights.close()
