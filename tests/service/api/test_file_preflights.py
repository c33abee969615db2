import threading
import time
from contextlib import closing

import httpx
import numpy as np
import pyarrow as pa
import pytest

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from service.models.preflights import MAX_FILE_BYTES, FilePreflights
from service.request_context import RequestContext
from tests.support.files import PARQUET, parquet_bytes
from tests.support.kinds import TEXTS, publish_tiny
from tests.support.process import own_bytes
from tests.support.texts import tokenizer

FLAT, TEXT = InputSpec(shape=(64,), minimum=0, maximum=16), InputSpec.model_validate(TEXTS)
LARGE = MAX_FILE_BYTES + (1 << 20)
HEADERS = {"Content-Type": PARQUET}
ROUTES = [
    ("/acquire", {"k": 1}),
    ("/acquire/preview", {}),
    ("/acquire/jobs", {"k": 1}),
    ("/predict/jobs", {}),
]


def rows_file(rows=3, width=64):
    return parquet_bytes({"x": list(np.zeros((rows, width), np.float32))})


@pytest.fixture(scope="module")
def bomb():
    ends, content = np.array([0, LARGE]), np.full(LARGE, ord("a"), np.uint8)
    text = pa.LargeStringArray.from_buffers(1, pa.py_buffer(ends), pa.py_buffer(content))
    options = {"use_dictionary": False, "write_statistics": False}
    yield parquet_bytes({"text": text}, compression="zstd", **options)
    pa.default_memory_pool().release_unused()


@pytest.fixture
def preflights():
    with closing(FilePreflights(threading.Event())) as preflights:
        yield preflights


def call_within(seconds=60.0):
    call = RequestContext()
    call.deadline = time.monotonic() + seconds
    return call


def test_what_reading_takes_is_reserved(preflights):
    stored = []
    for content in (rows_file(3), rows_file(60_000)):
        call = call_within()
        preflights.reserve(content, FLAT, "pool", call)
        stored.append(call.reservation.used_bytes)
    bytes_read = 60_000 * 64 * np.dtype(np.float32).itemsize
    assert stored[0] < bytes_read // 2 and bytes_read < stored[1] - stored[0] < MAX_FILE_BYTES


def test_a_file_that_takes_more_than_it_may_is_refused_and_the_next_is_read(preflights, bomb):
    assert len(bomb) < LARGE // 10_000
    with pytest.raises(
        InvalidInput, match="pool: expected a Parquet file that is read in 268435456"
    ):
        preflights.reserve(bomb, TEXT, "pool", call_within())
    preflights.reserve(rows_file(), FLAT, "pool", call_within())


def test_a_damaged_file_is_left_to_its_reader(preflights):
    call = call_within()
    preflights.reserve(b"PAR1, but not for long", FLAT, "pool", call)
    assert call.reservation.used_bytes < 4 << 20


def test_a_process_that_was_killed_is_started_again(preflights):
    preflights.reserve(rows_file(), FLAT, "pool", call_within())
    preflights._process._process.kill()
    with pytest.raises(InvalidInput, match="its process ended"):
        preflights.reserve(rows_file(), FLAT, "pool", call_within())
    preflights.reserve(rows_file(), FLAT, "pool", call_within())


def test_no_route_takes_the_memory_that_a_file_asks_for(serve, store, bomb):
    publish_tiny(store, "texts", TEXTS, {"tokenizer.json": tokenizer().to_str().encode()})
    publish_tiny(store, "rows", {"shape": [3]})
    small = rows_file(width=3)
    with serve(store.root) as (url, process), httpx.Client(base_url=url, timeout=60) as client:

        def post(route, content, **query):
            return client.post(route, content=content, params=query, headers=HEADERS)

        assert post("/acquire", small, model="rows", k=1).status_code == 200
        before = own_bytes(process.pid)
        for route, fields in ROUTES:
            answer = post(route, bomb, model="texts", **fields)
            assert answer.status_code == 422, answer.text
            field = "inputs" if route.startswith("/predict") else "pool"
            assert answer.json()["detail"].startswith(f"{field}: expected a Parquet file that is")
        assert own_bytes(process.pid) - before < LARGE // 5
        assert post("/acquire", small, model="rows", k=1).status_code == 200
