import asyncio
import gc
import signal
import time

import numpy as np
import orjson
import pytest

from model_store.artifacts.manifest import InputSpec
from model_store.sources.rows import RowReader
from service import limits
from service.api.json_blocks import COUNT_STEP_BYTES, JSON_OBJECT_BYTES, reserve_json, split_json
from service.app import create_app
from service.request_context import RequestContext
from service.settings import Settings

ROW = b"[" + b",".join([b"8"] * 64) + b"]"


class Stopwatch:
    def __init__(self):
        self.longest, self._step_start = 0.0, time.thread_time()

    def __call__(self):
        current = time.thread_time()
        self.longest, self._step_start = max(self.longest, current - self._step_start), current


def longest_step(work):
    watch = Stopwatch()
    result = work(RequestContext(on_pause=watch))
    watch()
    return result, watch.longest


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(ROW, id="flat"),
        pytest.param(b"[" + ROW + b"]", id="nested", marks=pytest.mark.slow),
        pytest.param(b"[1,2]", id="wrong length", marks=pytest.mark.slow),
    ],
)
def test_largest_body_is_read_in_steps_much_shorter_than_parsing(row):
    body = b'{"pool": [' + b",".join([row] * (limits.MAX_JSON_BYTES // (len(row) + 1) - 10)) + b"]}"
    start = time.thread_time()
    orjson.loads(body)
    parse_s = time.thread_time() - start
    (_, rows), split_s = longest_step(
        lambda context: split_json(body, "pool", 10_000_000, context.pause)
    )
    assert split_s < parse_s / 5
    spec = InputSpec(shape=(1, 64) if row[1:2] == b"[" else (64,), minimum=0, maximum=16)
    if row[1:2] == b"1":
        with pytest.raises(Exception, match=r"pool\.0: expected an array of 64"):
            RowReader(spec, "pool").read_all(rows)
        return
    _, reserve_s = longest_step(lambda context: reserve_json(body, "pool", 10_000_000, context))
    assert reserve_s < parse_s / 5
    x, read_s = longest_step(lambda context: RowReader(spec, "pool", context).read_all(rows))
    assert read_s < parse_s / 5
    assert x.shape == (len(rows), 64)
    assert np.all(x == 8.0)


def test_memory_is_reserved_for_marks_on_both_sides_of_step_boundaries():
    marks = "".join(JSON_OBJECT_BYTES).encode()
    body = marks * (2 * COUNT_STEP_BYTES // len(marks) + 3)
    pauses: list[int] = []
    context = RequestContext(on_pause=lambda: pauses.append(1))
    reserve_json(body, "pool", len(body), context)
    expected = {mark: body.count(mark.encode()) for mark in JSON_OBJECT_BYTES}
    assert context.reservation.used_bytes == sum(
        JSON_OBJECT_BYTES[m] * n for m, n in expected.items()
    )
    assert len(pauses) == 3


def test_startup_objects_are_excluded_from_garbage_collection(tmp_path):
    app, stop = create_app(Settings(store=tmp_path)), signal.getsignal(signal.SIGTERM)

    async def serve():
        before = gc.get_freeze_count()
        async with app.router.lifespan_context(app):
            assert gc.get_freeze_count() > before
            assert len(gc.get_objects()) < 10_000
        assert gc.get_freeze_count() == 0

    try:
        asyncio.run(serve())
    finally:
        signal.signal(signal.SIGTERM, stop)
