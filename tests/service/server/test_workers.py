import json
import os
import re
import signal
import time

import httpx
import numpy as np
import pytest

from model_store.processes import processors
from service.settings import Settings
from service.shared_state import merge_metrics
from tests.support.process import children, is_running
from tests.support.raw import Connection, request
from tests.support.serving import is_responding, metric, wait_until
from tests.support.stores import publish_again

ROW = [0.0] * 64
TWO_WORKERS = {"DUBITO_WORKERS": "2", "DUBITO_POLL_INTERVAL_S": "0.05"}


def get_workers(page):
    """Return the worker labels on a metrics page."""
    return set(re.findall(r'worker="(\d+)"', page))


def ready_workers(url, headers=None):
    for _ in range(8):
        httpx.get(f"{url}/health/ready", timeout=60)
    return get_workers(httpx.get(f"{url}/metrics", headers=headers, timeout=60).text)


def test_killed_or_stopped_worker_is_replaced_while_the_other_answers(serve, digits_store):
    request = {"inputs": [ROW], "seed": 7}
    with serve(digits_store, **TWO_WORKERS) as (url, process):
        wait_until(
            lambda: is_responding(f"{url}/health/ready") and ready_workers(url) == {"0", "1"}
        )
        expected = httpx.post(f"{url}/predict", json=request, timeout=60).content
        for number in (signal.SIGKILL, signal.SIGSTOP):
            before = children(process.pid)
            assert len(before) == 2
            victim = min(before)
            os.kill(victim, number)
            while victim in children(process.pid):
                response = httpx.post(f"{url}/predict", json=request, timeout=60)
                assert (response.status_code, response.content) == (200, expected)
            wait_until(lambda: len(children(process.pid)) == 2)
            assert not is_running(victim)
        page = httpx.get(f"{url}/metrics", timeout=60).text
        counts = [
            metric(page, "dubito_requests_total", route="/predict", status="200", worker=w)
            for w in "01"
        ]
        assert sum(counts) > 0
        workers = children(process.pid)
        process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in workers))


def test_service_is_not_ready_but_answers_during_the_shutdown_grace(serve, digits_store):
    with (
        serve(digits_store, DUBITO_SHUTDOWN_GRACE_S="300") as (url, process),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert "connection" not in client.get("/health/ready").headers
        process.terminate()
        wait_until(lambda: client.get("/health/ready").status_code == 503)
        assert "shutting down" in client.get("/health/ready").json()["detail"]
        answer = client.post("/predict", json={"inputs": [ROW]})
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert client.get("/health/live").status_code == 200
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0


def test_metrics_pages_are_merged_with_a_worker_label():
    page = '# HELP a_total What.\n# TYPE a_total counter\na_total{x="1"} 2.0\n# HELP b Less.\n# TYPE b gauge\nb 1.0\n'
    pages = {"1": page.replace("1.0", "3.5").encode(), "0": page.encode()}
    assert merge_metrics(pages).decode() == (
        "# HELP a_total What.\n# TYPE a_total counter\n"
        'a_total{worker="0",x="1"} 2.0\na_total{worker="1",x="1"} 2.0\n'
        '# HELP b Less.\n# TYPE b gauge\nb{worker="0"} 1.0\nb{worker="1"} 3.5\n'
    )


@pytest.mark.parametrize(("threads", "workers"), [(0, 1), (0, 2), (0, 10_000), (3, 2)])
def test_workers_share_the_processors(threads, workers):
    count = processors()
    expected = threads or max(1, count // workers)
    assert Settings.model_construct(threads=threads, workers=workers).worker_threads == expected


def test_admin_requests_reach_all_workers(serve, writable_store, digits_store):
    admin = {"X-API-Key": "the-key-of-the-administrator"}
    settings = {"DUBITO_WORKERS": "2", "DUBITO_POLL_INTERVAL_S": "0.2"}
    generator = np.random.default_rng(0)

    def worker_metrics(name, version):
        """Return a metric of each worker."""
        page = httpx.get(f"{url}/metrics", headers=admin, timeout=60).text
        labels = {"model": "digits", "version": version}
        return [metric(page, name, **labels, worker=worker) for worker in "01"]

    def predict(version):
        row = generator.uniform(0, 16, 64).tolist()
        assert (
            httpx.post(
                f"{url}/predict", json={"inputs": [row], "version": version}, timeout=60
            ).status_code
            == 200
        )
        time.sleep(0.02)

    def is_set_on_both(version, name):
        predict(version)
        return min(worker_metrics(name, version)) >= 1

    with serve(writable_store.root, **settings, DUBITO_ADMIN_KEY=admin["X-API-Key"]) as (url, _):
        wait_until(lambda: is_set_on_both("1", "dubito_loaded_version"), 60)
        publish_again(writable_store, digits_store)
        assert httpx.post(f"{url}/admin/refresh", headers=admin, timeout=60).status_code == 200
        wait_until(lambda: worker_metrics("dubito_loaded_version", "2") == [1, 1])
        wait_until(lambda: is_set_on_both("1", "dubito_loaded_version"), 60)
        wait_until(lambda: is_set_on_both("2", "dubito_flag_p_value_count"), 60)
        path = f"{url}/admin/models/digits/versions"
        assert httpx.post(f"{path}/2/drift/reset", headers=admin).json()["reset"]
        wait_until(lambda: worker_metrics("dubito_flag_p_value_count", "2") == [0, 0])


def test_requests_cut_off_by_the_shutdown_get_503_and_are_logged(serve, digits_store):
    settings = {"DUBITO_LOG": "json", "DUBITO_SHUTDOWN_TIMEOUT_S": "1"}
    with (
        serve(digits_store, **settings) as (url, process),
        Connection(httpx.URL(url).port) as connection,
    ):
        headers = [("Expect", "100-continue")]
        connection.send(request("POST", "/predict", b" " * 100, headers)[:-50])
        assert connection.socket.recv(25).startswith(b"HTTP/1.1 100")
        process.terminate()
        answer = connection.answer()
        log = process.communicate(timeout=60)[1]
    assert (answer.status, answer.headers[b"retry-after"]) == (503, b"1")
    assert json.loads(answer.body)["code"] == "shutting_down"
    lines = [json.loads(line) for line in log.splitlines()]
    (record,) = [line for line in lines if line.get("route") == "/predict"]
    assert (record["status"], record["reason"]) == (503, "shutting_down")
