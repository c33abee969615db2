import socket
import time
from contextlib import ExitStack, suppress

import httpx
import pytest

from service.server.connections import MAX_OVER_LIMIT
from tests.support.process import pss_bytes
from tests.support.raw import Connection, ConnectionClosed, request
from tests.support.serving import serving, wait_until

ROW = b"[" + b",".join([b"8"] * 64) + b"]"
GOOD = request("POST", "/predict", b'{"inputs": [' + ROW + b'], "seed": 7}')
LIVE = request("GET", "/health/live")
BUDGET = 64 << 20
GROWTH = 48 << 20


@pytest.fixture(scope="module")
def limited_service(digits_store):
    settings = {"DUBITO_MEMORY_BUDGET_BYTES": str(BUDGET), "DUBITO_DEADLINE_S": "30"}
    with serving(digits_store, **settings) as (url, process):
        port = int(url.rpartition(":")[2])
        with Connection(port) as connection:
            for _ in range(20):
                assert connection.ask(GOOD).status == 200
        yield port, process


def check_service(port):
    with Connection(port) as connection:
        assert connection.ask(LIVE).status == 200
        assert connection.ask(GOOD).status == 200
        end = time.monotonic() + 10
        large = request("POST", "/predict", bytes(30 << 20), content_type="application/x-npy")
        while connection.ask(large).status == 429:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_unfinished_bodies_share_memory_budget(limited_service):
    port, process = limited_service
    before = pss_bytes(process.pid)
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-npy\r\nContent-Length: 60000000\r\n\r\n"
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(port)) for _ in range(20)]
        for connection in connections:
            connection.send(head + bytes(10 << 20))
        with Connection(port) as probe:
            assert probe.ask(GOOD).status == 200
        assert pss_bytes(process.pid) - before < BUDGET + GROWTH
        rejected = [c for c in connections if _has_response(c)]
        assert len(rejected) >= 20 - BUDGET // (10 << 20)
        for connection in rejected:
            response = connection.answer()
            assert response.status == 429
            assert int(response.headers[b"retry-after"]) >= 1
    check_service(port)


def _has_response(connection, patience_s=0.2):
    connection.socket.settimeout(patience_s)
    try:
        return bool(connection.socket.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        connection.socket.settimeout(30)


def test_json_with_many_empty_parts_is_rejected_before_parsing(limited_service):
    port, process = limited_service
    before = pss_bytes(process.pid)
    with Connection(port) as connection:
        for part in (b"[],", b"{},", b"[[]],", b'{"a":[]},'):
            body = b'{"inputs":[' + part * ((15 << 20) // len(part)) + b"0]}"
            response = connection.ask(request("POST", "/predict", body))
            assert response.status == 413
            assert b"inputs: expected at most 262144 arrays and objects" in response.body
    assert pss_bytes(process.pid) - before < GROWTH
    check_service(port)


def test_json_that_would_exceed_budget_is_rejected_before_parsing(limited_service):
    port, process = limited_service
    before = pss_bytes(process.pid)
    for row in (b"1," * (7 << 20), b'"ab",' * (3 << 20), b"0.1," * (3 << 20)):
        with Connection(port) as connection:
            response = connection.ask(request("POST", "/predict", b'{"inputs":[[' + row + b"0]]}"))
            assert (response.status, b" bytes " in response.body) == (413, True)
    assert pss_bytes(process.pid) - before < GROWTH
    check_service(port)


def test_json_has_smaller_limit_than_arrays(client):
    with Connection(client.base_url.port) as connection:
        body = b'{"inputs": [' + b" " * (16 << 20) + b"]}"
        response = connection.ask(request("POST", "/predict", body))
        assert (response.status, b"body: expected at most 16777216 bytes" in response.body) == (
            413,
            True,
        )
        response = connection.ask(
            request("POST", "/predict", body, content_type="application/x-npy")
        )
        assert response.status == 422


@pytest.mark.slow
def test_pipelining_clients_that_never_read_use_bounded_memory(limited_service):
    port, process = limited_service
    before = pss_bytes(process.pid)
    with ExitStack() as stack:
        connections = [
            stack.enter_context(Connection(port, receive_bytes=4096)) for _ in range(100)
        ]
        for connection in connections:
            connection.socket.setblocking(False)
        end, pipeline = time.monotonic() + 4, request("GET", "/") * 2000
        while time.monotonic() < end:
            for connection in connections:
                with suppress(BlockingIOError, ConnectionResetError, BrokenPipeError):
                    connection.socket.send(pipeline)
            time.sleep(0.02)
        assert pss_bytes(process.pid) - before < BUDGET + GROWTH
        with Connection(port) as probe:
            assert probe.ask(GOOD).status == 200
    check_service(port)


def test_unread_responses_use_bounded_memory(limited_service):
    port, process = limited_service
    before = pss_bytes(process.pid)
    body = (
        b'{"inputs": [' + b",".join([ROW] * 200) + b'], "num_samples": 100, "return_samples": true}'
    )
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(port, receive_bytes=4096)) for _ in range(40)]
        with Connection(port) as probe:
            for connection in connections:
                connection.send(request("POST", "/predict", body))
                assert probe.ask(GOOD).status == 200
            assert pss_bytes(process.pid) - before < BUDGET + 2 * GROWTH
            response = probe.ask(request("POST", "/predict", body))
            assert response.status in (200, 429)
    check_service(port)


@pytest.mark.slow
def test_connection_that_reads_too_slowly_is_closed(serve, digits_store):
    body = (
        b'{"inputs": [' + b",".join([ROW] * 400) + b'], "num_samples": 100, "return_samples": true}'
    )
    with ExitStack() as stack:
        url, _ = stack.enter_context(serve(digits_store, DUBITO_DEADLINE_S="2"))
        with Connection(int(url.rpartition(":")[2]), receive_bytes=4096) as connection:
            connection.send(request("POST", "/predict", body))
            start, read_bytes = time.monotonic(), 0
            while time.monotonic() < start + 30:
                try:
                    data = connection.socket.recv(8192)
                except ConnectionResetError:
                    break
                read_bytes += len(data)
                if not data:
                    break
                time.sleep(0.25)  # 32 kB/s
            assert time.monotonic() < start + 25
            assert read_bytes < 2 << 20


@pytest.mark.slow
def test_idle_and_incomplete_connections_yield_to_complete_requests(serve, digits_store):
    with serve(digits_store, DUBITO_MAX_CONNECTIONS="10") as (url, _), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for data in (
            b"",
            b"GET / HT",
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        ):
            connections = [stack.enter_context(Connection(port)) for _ in range(30)]
            for connection in connections:
                try:
                    connection.send(data)
                except ConnectionClosed:
                    continue
            with Connection(port) as probe:
                for _ in range(3):
                    assert probe.ask(LIVE).status == 200
                    assert probe.ask(GOOD).status == 200
            closed = [c for c in connections if _has_response_or_end(c)]
            assert len(closed) >= 20


def _has_response_or_end(connection):
    connection.socket.settimeout(0.2)
    try:
        connection.socket.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_busy_service_answers_only_health_and_metrics_on_extra_connections(serve, digits_store):
    body = b'{"inputs": [' + b",".join([ROW] * 1000) + b'], "num_samples": 1000}'
    with serve(digits_store, DUBITO_MAX_CONNECTIONS="2") as (url, _), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        time.sleep(0.3)  # for the connection of `serve` itself to close
        busy = [stack.enter_context(Connection(port)) for _ in range(2)]
        for connection in busy:
            connection.send(request("POST", "/predict", body))
        time.sleep(0.3)
        for content in (LIVE, request("GET", "/metrics")):
            with Connection(port) as extra:
                response = extra.ask(content)
                assert (response.status, response.closes) == (200, True)
        with Connection(port) as extra:
            response = extra.ask(GOOD)
            assert (response.status, response.closes, response.headers[b"retry-after"]) == (
                503,
                True,
                b"1",
            )
        assert {connection.answer().status for connection in busy} == {200}
        with Connection(port) as retry:
            assert retry.ask(LIVE).status == 200


def test_client_with_all_connections_yields_to_others_and_health_checks(serve, digits_store):
    with serve(digits_store, DUBITO_MAX_CONNECTIONS="160") as (url, _), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        idle = [stack.enter_context(Connection(port)) for _ in range(260)]
        wait_until(lambda: sum(map(_has_ended, idle)) >= 260 - 120 - MAX_OVER_LIMIT)
        connections = [stack.enter_context(Connection(port, source="127.0.0.2")) for _ in range(60)]
        for connection in connections * 2:
            assert connection.ask(GOOD).status == 200
        assert httpx.get(f"{url}/health/ready").is_success


def _has_ended(connection):
    connection.socket.setblocking(False)
    try:
        while connection.socket.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionResetError:
        pass
    return True
