"""Threads for what would keep the event loop busy: each kind of work has its own, and waits for no
other kind.

Reading requests and writing answers is done in steps of some milliseconds, and a thread goes from
one piece of work to another after a slice of time, by its client's share (`service.server.shares`):
so nobody's large body or images keep another waiting for more than a slice. Between slices what is
past its deadline or hung up on ends.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from model_store.types import Steps
from service.engine.waiting import HungUp, finish, wait_for
from service.errors import PastDeadline
from service.server.shares import Shares

T = TypeVar("T")

READERS = 2  # of requests: one that is slow to read does not keep the others waiting
SLICE_S = 0.004  # of steps of one piece of work, before it is another's turn
SLICE_BYTES = 64 << 10  # that are about read in it


@dataclass(eq=False)
class _Work(Generic[T]):
    steps: Steps[T]
    client: Hashable
    deadline: float
    future: "asyncio.Future[T]"


class SharedThreads:
    """Threads that do work step by step, by shares of clients."""

    def __init__(self, name: str, threads: int) -> None:
        self._waiting: Shares[_Work[Any]] = Shares()
        self._something = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(
        self,
        steps: Steps[T],
        client: Hashable = None,
        size: int = SLICE_BYTES,
        deadline: float = math.inf,
        hung_up: HungUp | None = None,
    ) -> T:
        """Return what steps come to.

        Args:
            steps: the work; what it yields does not matter.
            client: whose work it is.
            size: of what is read or written, in bytes: little goes before much.
            deadline: on the clock of time.monotonic.
            hung_up: returns when the client does.

        Raises:
            PastDeadline: if it is not done by the deadline.
            ClientDisconnect: if the client hangs up before.
        """
        work = _Work(steps, client, deadline, asyncio.get_running_loop().create_future())
        self._put(work, min(SLICE_BYTES, max(1, size)))
        result: T = await wait_for(work.future, hung_up)
        return result

    def close(self) -> None:
        """End, after the slices that are being done; what waits is dropped."""
        with self._something:
            self._closed = True
            self._something.notify_all()
        for thread in self._threads:
            thread.join()
        for piece in self._waiting.turns():
            piece.work.steps.close()
            piece.work.future.cancel()

    def _put(self, work: _Work[Any], size: int) -> None:
        with self._something:
            self._waiting.put(work, work.client, size)
            self._something.notify()

    def _work(self) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Do a slice of what is next, of which nothing is held afterwards; False once closed."""
        with self._something:
            while not self._waiting and not self._closed:
                self._something.wait()
            if self._closed:
                return False
            piece = self._waiting.turns()[0]
            self._waiting.take([piece])
        self._slice(piece.work)
        return True

    def _slice(self, work: _Work[Any]) -> None:
        """Do steps for a while, and put the rest back."""
        end = time.perf_counter() + SLICE_S
        try:
            while not work.future.cancelled():
                if time.monotonic() > work.deadline:
                    raise PastDeadline
                next(work.steps)
                if time.perf_counter() > end:
                    self._put(work, SLICE_BYTES)
                    return
            work.steps.close()
        except StopIteration as ended:
            finish(work.future, ended.value)
        except BaseException as error:
            work.steps.close()
            traceback = error.__traceback__
            assert traceback is not None
            finish(
                work.future, error=error.with_traceback(traceback.tb_next)
            )  # this frame holds the future


class Threads:
    """The threads beside the event loop and the engine's own."""

    def __init__(self) -> None:
        self._files = ThreadPoolExecutor(1, "files")
        self._loads = ThreadPoolExecutor(1, "loads")
        self._state = ThreadPoolExecutor(2, "state")
        self.requests = SharedThreads(
            "requests", READERS
        )  # takes large requests apart, and decodes images
        self.answers = SharedThreads("answers", 1)  # writes large answers
        for pool in (self._files, self._loads, self._state):
            pool.submit(int).result()  # its thread is there from the beginning

    async def files(self, work: Callable[[], T]) -> T:
        """Run work that reads the model store."""
        return await asyncio.get_running_loop().run_in_executor(self._files, work)

    async def loads(self, work: Callable[[], T]) -> T:
        """Run work that loads versions."""
        return await asyncio.get_running_loop().run_in_executor(self._loads, work)

    async def state(self, work: Callable[[], T]) -> T:
        """Run work that reads or writes the service's state, or a pool's file."""
        return await asyncio.get_running_loop().run_in_executor(self._state, work)

    def close(self) -> None:
        """End, after what is being done; what has not begun is dropped."""
        for pool in (self._files, self._loads, self._state):
            pool.shutdown(cancel_futures=True)
        self.requests.close()
        self.answers.close()
