"""Threads for what would keep the event loop busy: each kind of work has its own, and waits for no other kind."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

READERS = 2  # of requests: one that is slow to read does not keep the others waiting


class Threads:
    """The threads beside the event loop and the engine's own."""

    def __init__(self) -> None:
        self._files = ThreadPoolExecutor(max_workers=1, thread_name_prefix="files")
        self._requests = ThreadPoolExecutor(max_workers=READERS, thread_name_prefix="requests")
        self._answers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")

    async def files(self, work: Callable[[], T]) -> T:
        """Run work that reads the model store."""
        return await _run(self._files, work)

    async def requests(self, work: Callable[[], T]) -> T:
        """Run work that takes a large request apart, or decodes its images."""
        return await _run(self._requests, work)

    async def answers(self, work: Callable[[], T]) -> T:
        """Run work that writes a large answer."""
        return await _run(self._answers, work)

    def close(self) -> None:
        """End, after what is being done; what has not begun is dropped."""
        for pool in (self._files, self._requests, self._answers):
            pool.shutdown(cancel_futures=True)


async def _run(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work)
