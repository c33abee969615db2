"""GET /metrics: each counter counts what it says."""

import httpx
import numpy as np
import pytest
from conftest import metric


@pytest.fixture
def fresh(serve, digits_store):
    """A client of a service that nobody has asked anything but whether it lives."""
    with serve(digits_store) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_counters_move_by_what_requests_use(fresh, digits_rows):
    of_model = {"model": "digits", "version": "1"}
    noise = np.random.default_rng(0).uniform(0, 16, (30, 64))
    rows = np.concatenate([digits_rows[:30], noise]).tolist()
    answer = fresh.post("/predict", json={"inputs": rows, "num_samples": 50, "fpr": 0.1})
    flags = sum(prediction["flag"] for prediction in answer.json()["predictions"])
    assert flags > 0
    fresh.post("/predict", json={"inputs": rows[:1]})
    fresh.post("/acquire", json={"pool": rows, "num_samples": 10})
    page = fresh.get("/metrics").text
    assert metric(page, "dubito_rows_total", **of_model) == 60 + 1 + 60
    assert metric(page, "dubito_draws_total", **of_model) == 50 + 100 + 10
    assert flags <= metric(page, "dubito_flags_total", **of_model) <= flags + 1
    assert metric(page, "dubito_requests_total", route="/predict", status="200") == 2
    assert metric(page, "dubito_requests_total", route="/acquire", status="200") == 1
    assert metric(page, "dubito_request_seconds_count", route="/predict") == 2
    assert metric(page, "dubito_request_seconds_sum", route="/predict") > 0
    assert metric(page, "dubito_queued_row_draws") == 0


def test_refused_requests_are_counted_by_route_and_status_and_never_by_path(fresh):
    for _ in range(3):
        fresh.post("/predict", json={"inputs": [[1]]})
    fresh.post("/predict", content=b"{}")
    fresh.get("/predict")
    for name in ("nothing", "else"):
        fresh.get(f"/models/{name}")
        fresh.get(f"/{name}")
    page = fresh.get("/metrics").text
    counts = {("/predict", "422"): 3, ("/predict", "415"): 1, ("/predict", "405"): 1}
    counts |= {("/models/{name}", "404"): 2, ("other", "404"): 2}
    for (route, status), count in counts.items():
        assert metric(page, "dubito_requests_total", route=route, status=status) == count
    assert "nothing" not in page
    assert metric(page, "dubito_rows_total", model="digits", version="1") == 0


def test_the_page_is_prometheus_text(client):
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    for name in ("requests_total", "request_seconds", "rows_total", "draws_total", "flags_total", "queued_row_draws"):
        assert f"# TYPE dubito_{name} " in answer.text
