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
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def run(threads, work, client=None, size=SLICE_BYTES, **options):
    context = RequestContext(client=client, **options)
    return threads.run(context, size, partial(work, context))


def steps(count, log, name):
    """Return work that logs each step and takes about one slice per step."""

    def work(context):
        for _ in range(count):
            spin(0.005)
            log.append(name)
            context.pause()
        return name

    return work


def test_small_work_overtakes_the_rest_of_large_work(threads):
    log = []

    async def run_all():
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

    assert asyncio.run(run_all()) == ["large"] * 10
    assert log.count("large") == 200


def test_two_clients_with_large_work_get_equal_shares(threads):
    log = []

    async def run_all():
        greedy = [run(threads, steps(10, log, "greedy"), "greedy") for _ in range(5)]
        await asyncio.gather(*greedy, run(threads, steps(10, log, "other"), "other"))

    asyncio.run(run_all())
    last = len(log) - log[::-1].index("other")
    assert 16 <= last <= 36  # of 60, with a margin for loaded machines


@pytest.mark.parametrize("max_running", [1, 2, 3])
def test_number_of_running_threads_is_limited(max_running):
    threads, running, largest = FairThreads("tested", max_running), 0, 0
    lock = threading.Lock()

    def work(context):
        nonlocal running, largest
        for _ in range(5):
            with lock:
                running += 1
                largest = max(largest, running)
            time.sleep(0.005)
            with lock:
                running -= 1
            context.pause()

    async def run_all():
        await asyncio.gather(*(run(threads, work, client) for client in range(6)))

    asyncio.run(run_all())
    threads.close()
    assert largest == max_running


def test_work_stops_at_its_deadline_or_when_its_client_disconnects(threads):
    ended = threading.Event()

    def endless(context):
        try:
            while True:
                context.pause()
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


def test_work_past_its_deadline_is_not_started(threads):
    with pytest.raises(PastDeadline):
        asyncio.run(run(threads, lambda _: pytest.fail("started"), deadline=time.monotonic() - 1.0))


def test_error_affects_only_its_work_and_close_cancels_waiting_work(threads):
    def fail(context):
        context.pause()
        raise ValueError("wrong")

    async def run_all():
        with pytest.raises(ValueError, match="wrong"):
            await run(threads, fail)
        assert await run(threads, steps(1, [], "next")) == "next"
        waiting = [
            asyncio.create_task(run(threads, steps(10_000, [], "endless"))) for _ in range(3)
        ]
        await asyncio.sleep(0.02)
        threads.close()
        for task in waiting:
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run_all())


class Body:
    pass


@pytest.mark.parametrize("error", [None, ValueError()])
def test_finished_work_keeps_no_references(threads, error):
    def read(body, context):
        context.pause()
        if error is not None:
            raise error
        return body

    async def run_one():
        body = Body()
        reference = weakref.ref(body)
        work = partial(read, body)
        del body
        with suppress(ValueError):
            await run(threads, work)
        del work
        return reference

    gc.disable()
    try:
        reference = asyncio.run(run_one())
        if error is not None:
            clear_frames(error.__traceback__)
        wait_until(lambda: reference() is None, 5)
    finally:
        gc.enable()


def test_calls_do_not_wait_for_other_pools_and_end_at_their_deadline():
    threads, release = Threads(0.2), threading.Event()

    async def run_all():
        state_calls = [asyncio.create_task(threads.state(release.wait)) for _ in range(5)]
        assert await threads.jobs(lambda: 1) == 1
        pools = (threads.jobs, threads.files, threads.loads, threads.integrations)
        calls = [pool(release.wait) for pool in pools]
        results = await asyncio.gather(*calls, *state_calls, return_exceptions=True)
        assert [type(error) for error in results] == [PastDeadline] * 9
        release.set()

    asyncio.run(run_all())
    threads.close()
