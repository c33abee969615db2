import json
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from tests.support.environment import ROOT
from tests.support.raw import Connection, request
from tests.support.record import record

BODY = b'{"inputs": [[' + b",".join([b"8"] * 64) + b"], [" + b",".join([b"0"] * 64) + b"]]}"
KEY = "key-of-the-other-client"
GREEDY_ADDRESS, NORMAL_ADDRESS = "127.0.0.2", "127.0.0.3"
FLOODS = ("rows", "wrong_keys", "pages", "documents", "pools")


@contextmanager
def run_greedy_client(port, kind, address, seconds):
    command = [sys.executable, "-m", "tests.support.greedy", str(port), kind, address, str(seconds)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(2.0)  # for imports and the first connections
        yield process
    finally:
        process.kill()
        process.communicate()


def send_requests(port, seconds, address):
    statuses, predicted, health = Counter(), [], []
    content = request("POST", "/predict", BODY, headers=[("X-API-Key", KEY)])
    live = request("GET", "/health/live")
    end = time.monotonic() + seconds
    with Connection(port, source=address) as connection:
        while time.monotonic() < end:
            start = time.perf_counter()
            statuses[connection.ask(content).status] += 1
            predicted.append(time.perf_counter() - start)
            start = time.perf_counter()
            with Connection(port, source=address) as prober:
                statuses[prober.ask(live).status] += 1
            health.append(time.perf_counter() - start)
            time.sleep(0.01)
    return statuses, 1e3 * np.array(predicted), 1e3 * np.array(health)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pools", "connections"])
def test_small_requests_are_accepted_during_flood(serve, digits_store, kind):
    with serve(digits_store) as (url, _):
        port = int(url.rpartition(":")[2])
        with run_greedy_client(port, kind, GREEDY_ADDRESS, 10.0):
            statuses, _, _ = send_requests(port, 2.0, NORMAL_ADDRESS)
    assert set(statuses) == {200}
    assert statuses[200] >= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOODS)
def test_flood_does_not_stall_another_client(serve, digits_store, kind):
    keys = {"DUBITO_API_KEYS": KEY} if kind == "wrong_keys" else {}
    with serve(digits_store, **keys) as (url, _):
        port = int(url.rpartition(":")[2])
        send_requests(port, 1.0, NORMAL_ADDRESS)
        _, unloaded, _ = send_requests(port, 10.0, NORMAL_ADDRESS)
        with run_greedy_client(port, kind, GREEDY_ADDRESS, 12.0) as process:
            statuses, predicted, health = send_requests(port, 9.0, NORMAL_ADDRESS)
            counts, processor_s = json.loads(process.communicate(timeout=30)[0])
    (p50, p99), (unloaded_p50, unloaded_p99) = (
        np.quantile(latencies, (0.5, 0.99)) for latencies in (predicted, unloaded)
    )
    record(
        f"flood: {kind}",
        f"p50 {p50:.1f} ms ({unloaded_p50:.1f} without), p99 {p99:.1f} ms ({unloaded_p99:.1f}); "
        f"health p99 {np.quantile(health, 0.99):.1f} ms",
    )
    print(f"{counts}, {processor_s:.1f} s of processor time", file=sys.stderr)
    assert set(statuses) == {200}
    assert p50 < 3 * unloaded_p50
    assert p99 < 3 * unloaded_p99
    assert np.quantile(health, 0.99) < 200


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pools", "json_pools", "samples"])
def test_small_requests_do_not_wait_for_large_requests_of_same_client(serve, digits_store, kind):
    with serve(digits_store) as (url, _):
        port = int(url.rpartition(":")[2])
        with run_greedy_client(port, kind, NORMAL_ADDRESS, 15.0):
            statuses, predicted, health = send_requests(port, 10.0, NORMAL_ADDRESS)
    assert set(statuses) == {200}
    assert np.quantile(health, 0.99) < 100
    assert np.quantile(predicted, 0.99) < 200
