import io
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from tests.support.serving import metric, wait_until

ROW = [0.0] * 64
NPY = {"Content-Type": "application/x-npy"}


@pytest.fixture(scope="session")
def large_pool():
    """Return an npy body that takes the service seconds to rank."""
    file = io.BytesIO()
    np.save(
        file,
        np.random.default_rng(0).integers(0, 17, (15_000, 64), dtype=np.uint8),
        allow_pickle=False,
    )
    return file.getvalue()


def rank(url, pool):
    """Send a request that takes seconds."""
    return httpx.post(f"{url}/acquire?k=3", content=pool, headers=NPY, timeout=120)


def row_draws(url):
    return metric(httpx.get(f"{url}/metrics", timeout=60).text, "dubito_queued_row_draws")


def post_and_hang_up(url, content):
    with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=30) as raw:
        raw.sendall(content)
        raw.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # reset, like a crash


def test_overload_refuses_predictions_but_answers_health_checks(serve, digits_store, large_pool):
    with (
        serve(digits_store, limits={"MAX_QUEUED_ROW_DRAWS": 1}) as (url, _),
        ThreadPoolExecutor() as pool,
    ):
        slow = pool.submit(rank, url, large_pool)
        wait_until(lambda: row_draws(url) > 0)
        refused = httpx.post(f"{url}/predict", json={"inputs": [ROW]}, timeout=60)
        assert httpx.get(f"{url}/health/ready", timeout=60).status_code == 200
        assert not slow.done()
        assert refused.status_code == 429
        assert refused.headers["content-type"] == "application/problem+json"
        assert int(refused.headers["retry-after"]) >= 1
        assert slow.result().status_code == 200  # a single request is admitted at any size
        assert row_draws(url) == 0
        assert httpx.post(f"{url}/predict", json={"inputs": [ROW]}, timeout=60).status_code == 200


def test_concurrent_requests_are_answered_or_get_retry_after(serve, digits_store):
    with (
        serve(digits_store, limits={"MAX_QUEUED_ROW_DRAWS": 3000}) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
        ThreadPoolExecutor(24) as pool,
    ):
        requests = [{"inputs": [ROW] * (1 + i % 20), "num_samples": 100} for i in range(120)]
        answers = list(pool.map(lambda request: client.post("/predict", json=request), requests))
        assert {answer.status_code for answer in answers} <= {200, 429}
        assert any(answer.status_code == 200 for answer in answers)
        for request, answer in zip(requests, answers, strict=True):
            if answer.status_code == 200:
                assert len(answer.json()["predictions"]) == len(request["inputs"])
            else:
                assert int(answer.headers["retry-after"]) >= 1
        assert row_draws(url) == 0


def test_concurrent_requests_with_one_seed_get_identical_responses(client, digits_rows):
    request = {"inputs": digits_rows[:3].tolist(), "seed": 7}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: client.post("/predict", json=request).content, range(40)))
    assert len(set(answers)) == 1


def test_disconnecting_clients_do_not_affect_others(serve, digits_store, large_pool):
    body = b'{"inputs": [%s], "num_samples": 1000}' % str(ROW).encode()
    head = b"Host: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    full = b"POST /predict HTTP/1.1\r\n" + head + body
    slow = b"POST /acquire HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-npy\r\n"
    slow += b"Content-Length: %d\r\n\r\n" % len(large_pool) + large_pool[: 1 << 20]
    with serve(digits_store) as (url, process), httpx.Client(base_url=url, timeout=60) as client:
        for content in (full[:10], full[: -len(body)], full[:-1], slow, full):
            for _ in range(5):
                post_and_hang_up(url, content)
            assert client.post("/predict", json={"inputs": [ROW]}).status_code == 200
        wait_until(lambda: row_draws(url) == 0)
        labels = {"route": "/predict", "status": "none"}
        wait_until(
            lambda: metric(client.get("/metrics").text, "dubito_requests_total", **labels) >= 5
        )
        assert 'status="500"' not in client.get("/metrics").text
        process.terminate()
        log = process.communicate(timeout=60)[1]
        assert "Traceback" not in log
        assert "unexpected" not in log


def test_request_in_flight_is_answered_during_shutdown(serve, digits_store, large_pool):
    with (
        serve(digits_store, DUBITO_SHUTDOWN_TIMEOUT_S="100") as (url, process),
        ThreadPoolExecutor() as pool,
    ):
        slow = pool.submit(rank, url, large_pool)
        wait_until(lambda: row_draws(url) > 0)
        process.terminate()
        answer = slow.result()
        assert answer.status_code == 200
        assert answer.json()["pool_size"] == 15_000
        process.communicate(timeout=60)
        assert process.returncode == 0
