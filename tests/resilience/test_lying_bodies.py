"""Generated bodies of at most a megabyte, over all routes that take files of rows: none takes the
worker beyond its budget, keeps it from answering, or is answered 5xx.

`EXAMPLES=N` sends others; the slow version tens of thousands. Of twenty questions of health nineteen
must be answered within `SILENT_S`: the machine has other work too."""

import threading
import time
from contextlib import closing

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.files import PARQUET, parquet_bytes
from tests.support.kinds import PEOPLE, PICTURES, TEXTS, publish_tiny
from tests.support.lying_bodies import bodies
from tests.support.process import own_bytes
from tests.support.record import parameter
from tests.support.texts import tokenizer

BUDGET = 64 << 20
SLACK = 64 << 20  # beyond the budget: what the allocator keeps, libraries that are loaded
SILENT_S = 0.1
ROUTES = {
    "/acquire": {"k": 1},
    "/acquire/preview": {},
    "/acquire/jobs": {"k": 1},
    "/predict/jobs": {},
    "/predict": {},
    "/invocations": {},
}
BY_DESIGN = {503, 504, 507}


class Watch(threading.Thread):
    """Asks a service's health and memory all the time."""

    def __init__(self, url, process):
        super().__init__(daemon=True)
        self.url, self.process = url, process
        self.is_over, self.waits, self.most = False, [], own_bytes(process.pid)

    def run(self):
        with httpx.Client(base_url=self.url, timeout=30) as client:
            while not self.is_over:
                begun = time.perf_counter()
                assert client.get("/health/live").status_code == 200
                self.waits.append(time.perf_counter() - begun)
                self.most = max(self.most, own_bytes(self.process.pid))
                time.sleep(0.01)

    def close(self):
        self.is_over = True
        self.join()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    from model_store.artifacts.store import ModelStore
    from tests.support.serving import serving

    store = ModelStore(tmp_path_factory.mktemp("lying") / "models")
    publish_tiny(store, "texts", TEXTS, {"tokenizer.json": tokenizer().to_str().encode()})
    for name, spec in (("people", PEOPLE), ("pictures", PICTURES), ("rows", {"shape": [3]})):
        publish_tiny(store, name, spec)
    limits = {"DUBITO_MEMORY_BUDGET_BYTES": str(BUDGET), "DUBITO_JOBS_AT_ONCE": "0"}
    with (
        serving(store.root, DUBITO_LOG_LEVEL="error", DUBITO_MAX_JOBS="100000", **limits) as served,
        httpx.Client(base_url=served[0], timeout=60) as client,
    ):
        small = parquet_bytes({"x": [[0.0] * 3] * 9})
        for route, query in list(ROUTES.items())[:4]:
            query = {"model": "rows", **query}
            headers = {"Content-Type": PARQUET}
            answer = client.post(route, content=small, params=query, headers=headers)
            assert answer.is_success, answer.text
        yield *served, client


def sends(service, examples, **options):
    """Send generated bodies; return how long health took to answer, and the most memory."""
    url, process, client = service
    models = st.sampled_from(["rows", "people", "pictures", "texts"])

    @settings(
        max_examples=examples,
        database=None,
        suppress_health_check=list(HealthCheck),
        **options,
    )
    @given(bodies(), st.sampled_from(list(ROUTES)), models)
    def send(body, route, model):
        media_type, content = body
        query = {} if media_type == "application/json" else {"model": model, **ROUTES[route]}
        headers = {"Content-Type": media_type}
        answer = client.post(route, content=content, params=query, headers=headers)
        assert answer.status_code < 500 or answer.status_code in BY_DESIGN, answer.text

    before = own_bytes(process.pid)
    with closing(Watch(url, process)) as watch:
        watch.start()
        send()
    return np.array(watch.waits), watch.most - before


def test_no_body_takes_memory_or_time_that_is_not_its(service):
    waits, growth = sends(service, parameter("EXAMPLES", 60), derandomize=True)
    assert growth < BUDGET + SLACK
    assert np.quantile(waits, 0.95) < SILENT_S


@pytest.mark.slow
def test_tens_of_thousands_of_bodies(service):
    waits, growth = sends(service, parameter("EXAMPLES", 30_000))
    print(
        f"health within {waits.max():.3f} s, 99 % {np.quantile(waits, 0.99):.3f}; {growth >> 20} MiB"
    )
    assert growth < BUDGET + SLACK
    assert np.quantile(waits, 0.95) < SILENT_S
