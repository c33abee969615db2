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
from tests.support.process import anonymous_bytes
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
    offsets, content = np.array([0, LARGE]), np.full(LARGE, ord("a"), np.uint8)
    text = pa.LargeStringArray.from_buffers(1, pa.py_buffer(offsets), pa.py_buffer(content))
    options = {"use_dictionary": False, "write_statistics": False}
    yield parquet_bytes({"text": text}, compression="zstd", **options)
    pa.default_memory_pool().release_unused()


@pytest.fixture
def preflights():
    with closing(FilePreflights(threading.Event())) as preflights:
        yield preflights


def request_context(seconds=60.0):
    context = RequestContext()
    context.deadline = time.monotonic() + seconds
    return context


def test_memory_for_reading_a_file_is_reserved(preflights):
    sizes = []
    for content in (rows_file(3), rows_file(60_000)):
        context = request_context()
        preflights.reserve(content, FLAT, "pool", context)
        sizes.append(context.reservation.used_bytes)
    bytes_read = 60_000 * 64 * np.dtype(np.float32).itemsize
    assert sizes[0] < bytes_read // 2 and bytes_read < sizes[1] - sizes[0] < MAX_FILE_BYTES


def test_file_over_the_memory_limit_is_refused_and_next_file_is_read(preflights, bomb):
    assert len(bomb) < LARGE // 10_000
    with pytest.raises(
        InvalidInput, match="pool: expected a Parquet file that is read in 268435456"
    ):
        preflights.reserve(bomb, TEXT, "pool", request_context())
    preflights.reserve(rows_file(), FLAT, "pool", request_context())


def test_damaged_file_is_left_to_the_reader(preflights):
    context = request_context()
    preflights.reserve(b"PAR1, but not for long", FLAT, "pool", context)
    assert context.reservation.used_bytes < 4 << 20


def test_killed_process_is_restarted(preflights):
    preflights.reserve(rows_file(), FLAT, "pool", request_context())
    preflights._process._process.kill()
    with pytest.raises(InvalidInput, match="its process ended"):
        preflights.reserve(rows_file(), FLAT, "pool", request_context())
    preflights.reserve(rows_file(), FLAT, "pool", request_context())


def test_no_route_allocates_the_memory_declared_by_a_file(serve, store, bomb):
    publish_tiny(store, "texts", TEXTS, {"tokenizer.json": tokenizer().to_str().encode()})
    publish_tiny(store, "rows", {"shape": [3]})
    small = rows_file(width=3)
    with serve(store.root) as (url, process), httpx.Client(base_url=url, timeout=60) as client:

        def post(route, content, **query):
            return client.post(route, content=content, params=query, headers=HEADERS)

        assert post("/acquire", small, model="rows", k=1).status_code == 200
        baseline_bytes = anonymous_bytes(process.pid)
        for route, fields in ROUTES:
            answer = post(route, bomb, model="texts", **fields)
            assert answer.status_code == 422, answer.text
            field = "inputs" if route.startswith("/predict") else "pool"
            assert answer.json()["detail"].startswith(f"{field}: expected a Parquet file that is")
        assert anonymous_bytes(process.pid) - baseline_bytes < LARGE // 5
        assert post("/acquire", small, model="rows", k=1).status_code == 200
