"""Threads beside the event loop: work is done in slices, by clients' shares, and ends with its
deadline or client."""

import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress
from traceback import clear_frames

import pytest
from starlette.requests import ClientDisconnect

from service.engine.threads import SharedThreads
from service.errors import PastDeadline
from tests.support.serving import wait_until


@pytest.fixture
def threads():
    threads = SharedThreads("tested", 1)
    yield threads
    threads.close()


def spin(seconds):
    """Be busy for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def steps(count, log, name):
    """Steps that take about a slice each and note that they were done."""
    for _ in range(count):
        spin(0.005)
        log.append(name)
        yield
    return name


def test_anothers_small_work_is_done_before_the_rest_of_large_work(threads):
    log = []

    async def ask():
        large = [
            asyncio.create_task(threads.run(steps(20, log, "large"), "greedy")) for _ in range(10)
        ]
        await asyncio.sleep(0.02)
        before = len(log)
        assert await threads.run(steps(1, log, "other"), "other", 100) == "other"
        assert await threads.run(steps(1, log, "own"), "greedy", 100) == "own"
        assert log[before:].index("other") <= 2
        assert len(log) < 200  # of which most would have been done first in the order of arrival
        return await asyncio.gather(*large)

    assert asyncio.run(ask()) == ["large"] * 10
    assert log.count("large") == 200


def test_work_ends_with_its_deadline_and_its_client(threads):
    ended = threading.Event()

    def endless():
        try:
            while True:
                yield
        finally:
            ended.set()

    async def gone():
        return None

    with pytest.raises(PastDeadline):
        asyncio.run(threads.run(endless(), deadline=time.monotonic() + 0.05))
    assert ended.wait(5.0)
    ended.clear()
    with pytest.raises(ClientDisconnect):
        asyncio.run(threads.run(endless(), hung_up=gone))
    assert ended.wait(5.0)


def test_an_error_is_the_works_own_and_what_waits_is_dropped_at_the_end(threads):
    def wrong():
        yield
        raise ValueError("wrong")

    async def ask():
        with pytest.raises(ValueError, match="wrong"):
            await threads.run(wrong())
        assert await threads.run(steps(1, [], "next")) == "next"
        waiting = asyncio.create_task(threads.run(steps(10_000, [], "endless")))
        await asyncio.sleep(0.02)
        threads.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(ask())


class Body:
    """What a request holds."""


@pytest.mark.parametrize("error", [None, ValueError()])
def test_nothing_is_held_of_work_that_is_done(threads, error):
    def reading(body):
        yield
        if error is not None:
            raise error
        return body

    async def ask():
        body = Body()
        held = weakref.ref(body)
        work = reading(body)
        del body
        with suppress(ValueError):
            await threads.run(work)
        del work
        return held

    gc.disable()
    try:
        held = asyncio.run(ask())
        if error is not None:
            clear_frames(error.__traceback__)  # as is done where it is answered
        wait_until(lambda: held() is None, 5)
    finally:
        gc.enable()
