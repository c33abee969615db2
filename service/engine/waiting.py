"""Waiting on the event loop for what a thread does, as long as the client does."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect

T = TypeVar("T")
HungUp = Callable[[], Coroutine[Any, Any, None]]

PATIENCE_S = 0.05  # before a look at whether the client is still there


async def wait_for(future: "asyncio.Future[T]", hung_up: HungUp | None) -> T:
    """Return what a future comes to; when `hung_up` returns before, cancel it and raise
    ClientDisconnect."""
    if hung_up is None:
        return await future
    loop = asyncio.get_running_loop()
    watching: list[asyncio.Task[None]] = []

    def watch() -> None:
        watching.append(loop.create_task(hung_up()))
        watching[0].add_done_callback(lambda _: future.cancel())

    waiting = loop.call_later(PATIENCE_S, watch)  # most are answered before
    try:
        return await future
    except asyncio.CancelledError:
        if watching and watching[0].done():
            raise ClientDisconnect from None
        raise
    finally:
        waiting.cancel()
        for task in watching:
            task.cancel()


def finish(
    future: "asyncio.Future[Any]", result: Any = None, error: BaseException | None = None
) -> None:
    """Tell whoever waits for a future what it came to, from another thread; their event loop may be
    gone."""
    try:
        future.get_loop().call_soon_threadsafe(_finish, future, result, error)
    except RuntimeError:
        return  # an answer after the end of the service


def _finish(future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
