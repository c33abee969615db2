"""Threads for what would keep the event loop busy: each kind of work has its own, and waits for no other kind."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

READERS = 2  # of requests: one that is slow to read does not keep the others waiting


class Threads:
    """The threads beside the event loop and the engine's own."""

    def __init__(self) -> None:
        self._files = _started("files", 1)
        self._loads = _started("loads", 1)
        self._requests = _started("requests", READERS)
        self._answers = _started("answers", 1)

    async def files(self, work: Callable[[], T]) -> T:
        """Run work that reads the model store."""
        return await _run(self._files, work)

    async def loads(self, work: Callable[[], T]) -> T:
        """Run work that loads versions."""
        return await _run(self._loads, work)

    async def requests(self, work: Callable[[], T]) -> T:
        """Run work that takes a large request apart, or decodes its images."""
        return await _run(self._requests, work)

    async def answers(self, work: Callable[[], T]) -> T:
        """Run work that writes a large answer."""
        return await _run(self._answers, work)

    def close(self) -> None:
        """End, after what is being done; what has not begun is dropped."""
        for pool in (self._files, self._loads, self._requests, self._answers):
            pool.shutdown(cancel_futures=True)


def _started(name: str, threads: int) -> ThreadPoolExecutor:
    """Return a pool whose threads are all there from the beginning."""
    pool = ThreadPoolExecutor(threads, name)
    together = threading.Barrier(threads + 1)
    for _ in range(threads):
        pool.submit(together.wait)
    together.wait()
    return pool


async def _run(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)
