import re
import shutil
import time
from itertools import product

import numpy as np
import pytest
from prometheus_client import generate_latest

from model_store.state.labels import Accepted
from service import limits
from service.engine.admission import BATCH_ROW_DRAWS
from service.telemetry.metrics import NATS, Metrics
from tests.support.environment import ROOT
from tests.support.serving import FAST_POLLING, metric, open_client, wait_until
from tests.support.stores import publish_again

VERSION_LABELS = {"model": "digits", "version": "1"}


@pytest.fixture(scope="module")
def service(digits_store):
    with open_client(digits_store) as client:
        yield client


@pytest.fixture
def increase(service):
    """Return a function that computes how much a metric rose during the test."""
    before = service.get("/metrics").text

    def get_increase(name, **labels):
        page = service.get("/metrics").text
        return metric(page, name, **labels) - metric(before, name, **labels)

    return get_increase


@pytest.fixture
def metrics():
    return Metrics()


def buckets(page, name, **labels):
    """Return a histogram's rows per bucket, with the overflow bucket last."""
    edges = re.findall(rf'{name}_bucket{{le="([^"]*)"', page)
    counts = [metric(page, f"{name}_bucket", le=edge, **labels) for edge in dict.fromkeys(edges)]
    return np.diff(counts, prepend=0)


def test_counters_increase_by_the_work_of_requests(service, increase, digits_rows):
    noise = np.random.default_rng(0).uniform(0, 16, (30, 64))
    rows = np.concatenate([digits_rows[:30], noise]).tolist()
    answer = service.post("/predict", json={"inputs": rows, "num_samples": 50, "fpr": 0.1})
    flags = sum(prediction["flag"] for prediction in answer.json()["predictions"])
    assert flags > 0
    service.post("/predict", json={"inputs": rows[:1]})
    service.post("/acquire", json={"pool": rows, "num_samples": 10})
    assert increase("dubito_rows_total", **VERSION_LABELS) == 60 + 1
    assert increase("dubito_pool_rows_total", **VERSION_LABELS) == 60
    assert increase("dubito_draws_total", **VERSION_LABELS) == 50 + 100 + 10
    assert flags <= increase("dubito_flags_total", **VERSION_LABELS) <= flags + 1
    assert increase("dubito_requests_total", route="/predict", status="200") == 2
    assert increase("dubito_requests_total", route="/acquire", status="200") == 1
    assert increase("dubito_request_seconds_count", route="/predict") == 2
    assert increase("dubito_request_seconds_sum", route="/predict") > 0
    page = service.get("/metrics").text
    assert metric(page, "dubito_queued_row_draws") == 0
    assert metric(page, "dubito_queued_requests") == 0
    assert metric(page, "dubito_loaded_version", **VERSION_LABELS) == 1
    assert 0 <= metric(page, "dubito_flag_rate", **VERSION_LABELS) <= 1
    assert metric(page, "process_resident_memory_bytes") > 1 << 20


def test_rows_are_counted_in_their_entropy_buckets(service, increase, digits_rows):
    noise = np.random.default_rng(0).uniform(0, 16, (100, 64))
    before = buckets(service.get("/metrics").text, "dubito_entropy", **VERSION_LABELS)
    entropies = []
    for rows in (np.concatenate([digits_rows, noise]), digits_rows[:3], noise[:1]):
        answer = service.post("/predict", json={"inputs": rows.tolist()}).json()
        entropies += [prediction["entropy"] for prediction in answer["predictions"]]
    page = service.get("/metrics").text
    expected = np.bincount(
        [sum(edge < value for edge in NATS) for value in entropies], minlength=len(NATS) + 1
    )
    assert np.count_nonzero(expected) > 3
    received = buckets(page, "dubito_entropy", **VERSION_LABELS)
    assert (received - before if len(before) else received).tolist() == expected.tolist()
    total = increase("dubito_entropy_sum", **VERSION_LABELS)
    assert total == pytest.approx(sum(entropies), rel=1e-9)
    assert "dubito_std_bucket" not in page


def test_micro_batch_metrics_count_rows_requests_and_seconds(service, increase, digits_rows):
    service.post("/predict", json={"inputs": digits_rows[:3].tolist()})
    pool = np.tile(digits_rows, (3, 1))
    service.post("/acquire", json={"pool": pool.tolist()})
    parts = -(-len(pool) // (BATCH_ROW_DRAWS // 100))
    assert increase("dubito_batch_rows_count", **VERSION_LABELS) == 1 + parts
    assert increase("dubito_batch_rows_sum", **VERSION_LABELS) == 3 + len(pool)
    assert increase("dubito_batch_requests_sum", **VERSION_LABELS) == 1 + parts
    assert increase("dubito_queue_seconds_count", **VERSION_LABELS) == 1 + parts
    assert increase("dubito_compute_seconds_count", **VERSION_LABELS) == 1 + parts
    queue_s, compute_s = (
        increase(f"dubito_{kind}_seconds_sum", **VERSION_LABELS) for kind in ("queue", "compute")
    )
    request_s = sum(
        increase("dubito_request_seconds_sum", route=route) for route in ("/predict", "/acquire")
    )
    assert queue_s > 0
    assert compute_s > 0
    assert queue_s + compute_s < request_s


def test_refusals_are_counted_by_route_status_and_reason_but_not_path(service, increase):
    service.post("/predict", json={"inputs": [[0] * 64], "model": "nothing"})
    service.post("/predict", json={"inputs": [[0]] * 5000})
    service.post("/predict", content=b"{}")
    for _ in range(3):
        service.post("/predict", json={"inputs": [[1]]})
    service.post("/acquire", json={})
    service.get("/predict")
    for name in ("nothing", "else"):
        service.get(f"/models/{name}")
        service.get(f"/{name}")
    expected = {
        ("/predict", "404", "not_found"): 1,
        ("/predict", "413", "too_large"): 1,
        ("/predict", "415", "unsupported"): 1,
        ("/predict", "422", "invalid_input"): 3,
        ("/acquire", "422", "invalid_input"): 1,
        ("/predict", "405", "method_not_allowed"): 1,
        ("/models/{name}", "404", "not_found"): 2,
        ("other", "404", "not_found"): 2,
    }
    for (route, status, reason), count in expected.items():
        assert increase("dubito_requests_total", route=route, status=status) == count
        assert increase("dubito_failures_total", route=route, reason=reason) == count
    assert increase("dubito_rows_total", **VERSION_LABELS) == 0
    assert "nothing" not in service.get("/metrics").text


def test_deleted_versions_have_no_series(writable_store):
    with open_client(writable_store.root, **FAST_POLLING) as client:
        publish_again(writable_store, writable_store.root)
        wait_until(
            lambda: (
                metric(
                    client.get("/metrics").text,
                    "dubito_loaded_version",
                    model="digits",
                    version="2",
                )
                == 1
            )
        )
        for version in ("1", "2"):
            client.post("/predict", json={"inputs": [[0] * 64], "version": version})
        assert 'version="1"' in client.get("/metrics").text
        shutil.rmtree(writable_store.root / "digits" / "1")
        wait_until(lambda: 'version="1"' not in client.get("/metrics").text)
        assert 'version="2"' in client.get("/metrics").text


def test_models_without_a_version_have_no_series(metrics):
    for model in ("kept", "gone"):
        metrics.count_labels(model, Accepted(1, 0, 0, 1))
        metrics.count((model, "1"), rows=1)
    metrics.retain({("kept", "1")})
    page = generate_latest(metrics.registry).decode()
    assert 'model="kept"' in page
    assert 'model="gone"' not in page


def test_every_metric_is_documented(client):
    guide = (ROOT / "docs" / "api.md").read_text()
    kinds = re.findall(r"^# TYPE (dubito_\w+) (\w+)$", client.get("/metrics").text, re.M)
    assert len(kinds) > 20
    assert [name for name, _ in kinds if f"`{name}`" not in guide] == []


def test_labels_and_acquired_rows_are_counted(service, increase, digits_rows):
    pool = {
        "pool": digits_rows[:20].tolist(),
        "ids": [f"r{i}" for i in range(20)],
        "k": 10,
        "num_samples": 10,
    }
    service.post("/acquire", json=pool)
    service.post("/acquire", json={**pool, "keep": True, "control": 0.5})
    assert increase("dubito_acquired_rows_total", **VERSION_LABELS) == 10
    assert increase("dubito_control_rows_total", **VERSION_LABELS) == 5
    rows = digits_rows[:3].tolist()
    labels = [{"id": f"own{n}", "label": "3", "input": row} for n, row in enumerate(rows)]
    for body in (
        {"labels": labels},
        {"labels": labels[:2]},
        {"labels": [{"id": "unknown", "label": "3"}]},
    ):
        service.post("/labels", json=body)
    service.post("/labels", json={"labels": [{**labels[0], "label": "4"}], "replace": True})
    counts = {
        outcome: increase("dubito_labels_total", model="digits", outcome=outcome)
        for outcome in ("accepted", "known", "replaced")
    }
    assert counts == {"accepted": 3, "known": 2, "replaced": 1}


def test_metrics_describe_served_versions_and_their_calibration(service, digits_rows):
    service.post("/predict", json={"inputs": digits_rows[:3].tolist()})
    page = service.get("/metrics").text
    assert metric(page, "dubito_ready") == 1
    assert metric(page, "dubito_alias", model="digits", alias="latest", version="1") == 1
    assert "dubito_broken_version{" not in page
    assert time.time() - 60 < metric(page, "dubito_store_seen_timestamp_seconds") <= time.time()
    assert metric(page, "dubito_max_queued_row_draws") == limits.MAX_QUEUED_ROW_DRAWS
    calibration = metric(page, "dubito_calibration_rows", **VERSION_LABELS)
    assert (
        calibration == service.get("/models/digits").json()["manifest"]["detectors"]["ranking_rows"]
    )
    expected = metric(page, "dubito_expected_flag_rate", **VERSION_LABELS)
    assert 0.05 - 1 / calibration < expected <= 0.05


def test_metrics_report_broken_versions_and_unusable_state(writable_store, digits_store, tmp_path):
    publish_again(writable_store, digits_store, network=b"nothing")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "state.sqlite").write_text("no database" * 100)
    with open_client(
        writable_store.root, **FAST_POLLING, DUBITO_STATE=str(tmp_path / "state")
    ) as client:
        wait_until(lambda: "dubito_state_usable 0.0" in client.get("/metrics").text)
        page = client.get("/metrics").text
    assert 0 < metric(page, "dubito_state_free_ratio") < 1
    assert metric(page, "dubito_broken_version", model="digits", version="2") == 1
    assert metric(page, "dubito_degraded_alias", model="digits", alias="latest") == 1
    assert "dubito_ready 0.0" in page
    assert "dubito_alias{" not in page


def test_job_counters_start_at_0(metrics):
    page = generate_latest(metrics.registry).decode()
    for kind, state in product(("acquire", "predict"), ("done", "failed", "cancelled")):
        assert f'dubito_jobs_total{{kind="{kind}",state="{state}"}} 0.0' in page


def test_regression_rows_are_counted_by_standard_deviation(metrics):
    std = np.array([1e-5, 0.5, 2.0, 1e9, np.inf])
    metrics.count_prediction(("m", "3"), "std", std, draws=10, flags=2)
    page = generate_latest(metrics.registry).decode()
    labels = {"model": "m", "version": "3"}
    assert metric(page, "dubito_rows_total", **labels) == 5
    assert metric(page, "dubito_std_count", **labels) == 4
    assert metric(page, "dubito_std_bucket", le="1.0", **labels) == 2
    assert "dubito_entropy_bucket" not in page
