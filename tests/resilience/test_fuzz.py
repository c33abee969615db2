"""Send generated requests to all routes with a body. No request may cause an unexpected error,
exceed the memory budget or block other requests.

`EXAMPLES=N` sends N requests of each kind.
"""

import json
import shutil
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.app import create_app
from service.settings import Settings
from tests.support.files import PARQUET, parquet_bytes
from tests.support.fuzz import (
    CANARY,
    FILE_ROUTES,
    ROUTES,
    damaged_requests,
    files,
    routes_with_json,
)
from tests.support.kinds import PEOPLE, PICTURES, TEXTS, publish_tiny
from tests.support.process import anonymous_bytes
from tests.support.raw import Connection, ConnectionClosed
from tests.support.record import parameter
from tests.support.serving import serving
from tests.support.texts import tokenizer

BUDGET = 64 << 20
SLACK = 64 << 20  # allocator and libraries beyond the budget
MAX_SILENCE_S = 0.1
EXPECTED_ERRORS = {503, 504, 507}
OTHER_ERROR_FORMATS = ({"error"}, {"error_code", "message"})  # V2 and MLflow
FILES_ONLY = {"/acquire/preview"}
WITHOUT_BODY = {"/jobs/{job}/cancel"}
VALID_REQUEST = {"model": "digits", "inputs": [[8] * 64], "seed": 7}


class Monitor(threading.Thread):
    def __init__(self, url, process):
        super().__init__(daemon=True)
        self.url, self.process = url, process
        self.is_over, self.waits, self.max_bytes = False, [], anonymous_bytes(process.pid)

    def run(self):
        with httpx.Client(base_url=self.url, timeout=30) as client:
            while not self.is_over:
                start, processor_s = time.perf_counter(), self._get_processor_s()
                assert client.get("/health/live").status_code == 200
                wait_s = time.perf_counter() - start
                self.waits.append(min(wait_s, self._get_processor_s() - processor_s))
                self.max_bytes = max(self.max_bytes, anonymous_bytes(self.process.pid))
                time.sleep(0.01)

    def _get_processor_s(self):
        """Sum the processor time of the service's threads."""
        total_ns = 0
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with suppress(OSError):  # The thread has ended.
                total_ns += int((thread / "schedstat").read_text().split()[0])
        return total_ns / 1e9

    def close(self):
        self.is_over = True
        self.join()


@pytest.fixture(scope="module")
def service(digits_store, tmp_path_factory):
    from model_store.artifacts.store import ModelStore

    folder = tmp_path_factory.mktemp("fuzz")
    shutil.copytree(digits_store, folder / "models")
    store = ModelStore(folder / "models")
    publish_tiny(store, "texts", TEXTS, {"tokenizer.json": tokenizer().to_str().encode()})
    for name, spec in (("people", PEOPLE), ("pictures", PICTURES), ("rows", {"shape": [3]})):
        publish_tiny(store, name, spec)
    limits = {
        "DUBITO_MEMORY_BUDGET_BYTES": str(BUDGET),
        "DUBITO_JOBS_AT_ONCE": "0",
        "DUBITO_MAX_JOBS": "100000",
        "DUBITO_STATE": str(folder / "state"),
        "DUBITO_DEFAULT_MODEL": "digits",
    }
    with (
        serving(store.root, **limits) as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        small = parquet_bytes({"x": [[0.0] * 3]})  # The first requests load libraries.
        for route, query in list(FILE_ROUTES.items())[:4]:
            query, headers = {"model": "rows", **query}, {"Content-Type": PARQUET}
            response = client.post(route, content=small, params=query, headers=headers)
            assert response.is_success, response.text
        for route, body in ROUTES.items():
            assert client.post(route, json=body).status_code < 500
        yield client, process


def check_response(status, media_type, body):
    assert status < 500 or status in EXPECTED_ERRORS, body
    if status >= 400:
        assert CANARY.encode() not in body
        assert b"Traceback" not in body
        content = json.loads(body) if body else None
        if media_type == "application/problem+json":
            assert content["status"] == status
            assert {"type", "title", "detail"} <= set(content)
        elif content is not None:
            assert set(content) in OTHER_ERROR_FORMATS, body


def check_limits(service, examples, *strategies):
    client, process = service
    url = str(client.base_url)
    max_examples = parameter("EXAMPLES", examples)
    options = {"database": None, "suppress_health_check": list(HealthCheck)}

    def run(send):
        expected = client.post("/predict", json=VALID_REQUEST).content
        before = anonymous_bytes(process.pid)
        with closing(Monitor(url, process)) as monitor:
            monitor.start()
            test = given(*strategies)(send)
            settings(max_examples=max_examples, derandomize=max_examples == examples, **options)(
                test
            )()
        assert client.post("/predict", json=VALID_REQUEST).content == expected
        assert monitor.max_bytes - before < BUDGET + SLACK
        assert np.quantile(monitor.waits, 0.95) < MAX_SILENCE_S
        assert process.poll() is None

    return run


def test_every_route_with_json_body_is_fuzzed():
    routes = create_app(Settings(state=None)).state.routes
    templates = {route.path for route in routes if "POST" in route.methods}
    fuzzed = {
        route.replace("digits", "{name}").replace("versions/1", "versions/{version}")
        for route in ROUTES
    }
    assert templates == fuzzed | FILES_ONLY | WITHOUT_BODY


def test_json_with_extreme_values_is_answered_within_limits(service):
    client, _ = service

    @check_limits(service, 75, routes_with_json())
    def send(case):
        route, body = case
        headers = {"Content-Type": "application/json"}
        response = client.post(route, content=body, headers=headers)
        check_response(response.status_code, response.headers["content-type"], response.content)


def test_files_that_announce_or_expand_to_huge_data_stay_within_limits(service):
    client, _ = service
    models = st.sampled_from(["rows", "people", "pictures", "texts"])

    @check_limits(service, 30, files(), st.sampled_from(list(FILE_ROUTES)), models)
    def send(file, route, model):
        media_type, content = file
        query = {"model": model, **FILE_ROUTES[route]}
        headers = {"Content-Type": media_type}
        response = client.post(route, content=content, params=query, headers=headers)
        check_response(response.status_code, response.headers["content-type"], response.content)


def test_damaged_requests_are_answered_or_rejected(service):
    client, _ = service

    @check_limits(service, 75, damaged_requests())
    def send(content):
        with Connection(client.base_url.port) as connection:
            try:
                connection.send(content)
                responses = connection.answers_until_end(0.1)
            except ConnectionClosed:
                return
        for response in responses:
            media_type = response.headers.get(b"content-type", b"").decode()
            check_response(response.status, media_type, response.body)
