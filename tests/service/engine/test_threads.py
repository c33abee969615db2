import asyncio
import gc
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from traceback import clear_frames

import pytest
from starlette.requests import ClientDisconnect, Request

from service.engine.threads import SLICE_BYTES, FairThreads, Threads
from service.errors import PastDeadline
from service.request_context import RequestContext
from tests.support.serving import wait_until


@pytest.fixture
def threads():
    threads = FairThreads("tested", 1)
    yield threads
    threads.close()


def spin(seconds):
    """Be busy for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def run(threads, work, client=None, size=SLICE_BYTES, **of_call):
    call = RequestContext(client=client, **of_call)
    return threads.run(call, size, partial(work, call))


def steps(count, log, name):
    """Work of steps that take about a slice each and note that they were done."""

    def work(call):
        for _ in range(count):
            spin(0.005)
            log.append(name)
            call.pause()
        return name

    return work


def test_anothers_small_work_is_done_before_the_rest_of_large_work(threads):
    log = []

    async def ask():
        large = [
            asyncio.create_task(run(threads, steps(20, log, "large"), "greedy")) for _ in range(10)
        ]
        await asyncio.sleep(0.02)
        before = len(log)
        assert await run(threads, steps(1, log, "other"), "other", 100) == "other"
        assert await run(threads, steps(1, log, "own"), "greedy", 100) == "own"
        assert log[before:].index("other") <= 2
        assert len(log) < 200
        return await asyncio.gather(*large)

    assert asyncio.run(ask()) == ["large"] * 10
    assert log.count("large") == 200


def test_of_two_clients_large_works_each_has_half(threads):
    log = []

    async def ask():
        greedy = [run(threads, steps(10, log, "greedy"), "greedy") for _ in range(5)]
        await asyncio.gather(*greedy, run(threads, steps(10, log, "other"), "other"))

    asyncio.run(ask())
    last = len(log) - log[::-1].index("other")
    assert 16 <= last <= 36  # of 60, and a loaded machine is slower


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_no_more_run_at_a_time_than_may(at_once):
    threads, running, largest = FairThreads("tested", at_once), 0, 0
    lock = threading.Lock()

    def work(call):
        nonlocal running, largest
        for _ in range(5):
            with lock:
                running += 1
                largest = max(largest, running)
            time.sleep(0.005)
            with lock:
                running -= 1
            call.pause()

    async def ask():
        await asyncio.gather(*(run(threads, work, client) for client in range(6)))

    asyncio.run(ask())
    threads.close()
    assert largest == at_once


def test_work_ends_with_its_deadline_and_its_client(threads):
    ended = threading.Event()

    def endless(call):
        try:
            while True:
                call.pause()
        finally:
            ended.set()

    async def receive():
        return {"type": "http.disconnect"}

    with pytest.raises(PastDeadline):
        asyncio.run(run(threads, endless, deadline=time.monotonic() + 0.05))
    assert ended.wait(5.0)
    ended.clear()
    with pytest.raises(ClientDisconnect):
        asyncio.run(run(threads, endless, request=Request({"type": "http"}, receive)))
    assert ended.wait(5.0)


def test_work_past_its_deadline_is_not_begun(threads):
    with pytest.raises(PastDeadline):
        asyncio.run(run(threads, lambda _: pytest.fail("begun"), deadline=time.monotonic() - 1.0))


def test_an_error_is_the_works_own_and_what_waits_is_dropped_at_the_end(threads):
    def wrong(call):
        call.pause()
        raise ValueError("wrong")

    async def ask():
        with pytest.raises(ValueError, match="wrong"):
            await run(threads, wrong)
        assert await run(threads, steps(1, [], "next")) == "next"
        waiting = [
            asyncio.create_task(run(threads, steps(10_000, [], "endless"))) for _ in range(3)
        ]
        await asyncio.sleep(0.02)
        threads.close()
        for task in waiting:
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask())


class Body:
    """What a request holds."""


@pytest.mark.parametrize("error", [None, ValueError()])
def test_nothing_is_held_of_work_that_is_done(threads, error):
    def reading(body, call):
        call.pause()
        if error is not None:
            raise error
        return body

    async def ask():
        body = Body()
        stored = weakref.ref(body)
        work = partial(reading, body)
        del body
        with suppress(ValueError):
            await run(threads, work)
        del work
        return stored

    gc.disable()
    try:
        stored = asyncio.run(ask())
        if error is not None:
            clear_frames(error.__traceback__)
        wait_until(lambda: stored() is None, 5)
    finally:
        gc.enable()


def test_quick_questions_wait_for_nothing_long_and_end_with_their_deadline():
    threads, stored = Threads(0.2), threading.Event()

    async def ask():
        long = [asyncio.create_task(threads.state(stored.wait)) for _ in range(5)]
        assert await threads.jobs(lambda: 1) == 1
        pools = (threads.jobs, threads.files, threads.loads, threads.integrations)
        questions = [pool(stored.wait) for pool in pools]
        actual = await asyncio.gather(*questions, *long, return_exceptions=True)
        assert [type(error) for error in actual] == [PastDeadline] * 9
        stored.set()

    asyncio.run(ask())
    threads.close()
