import socket
import time
from contextlib import ExitStack, suppress

import httpx
import pytest

from service.server.connections import MAX_BEYOND
from tests.support.process import pss_bytes
from tests.support.raw import Connection, Ended, request
from tests.support.serving import serving, wait_until

ROW = b"[" + b",".join([b"8"] * 64) + b"]"
GOOD = request("POST", "/predict", b'{"inputs": [' + ROW + b'], "seed": 7}')
LIVE = request("GET", "/health/live")
BUDGET = 64 << 20
GROWTH = 48 << 20


@pytest.fixture(scope="module")
def bounded(digits_store):
    settings = {"DUBITO_MEMORY_BUDGET_BYTES": str(BUDGET), "DUBITO_DEADLINE_S": "30"}
    with serving(digits_store, **settings) as (url, process):
        port = int(url.rpartition(":")[2])
        with Connection(port) as connection:
            for _ in range(20):
                assert connection.ask(GOOD).status == 200
        yield port, process


def is_well(port):
    with Connection(port) as connection:
        assert connection.ask(LIVE).status == 200
        assert connection.ask(GOOD).status == 200
        end = time.monotonic() + 10
        large = request("POST", "/predict", bytes(30 << 20), content_type="application/x-npy")
        while connection.ask(large).status == 429:
            assert time.monotonic() < end
            time.sleep(0.1)


def test_unfinished_bodies_count_in_one_budget(bounded):
    port, process = bounded
    before = pss_bytes(process.pid)
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-npy\r\nContent-Length: 60000000\r\n\r\n"
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(port)) for _ in range(20)]
        for connection in connections:
            connection.send(head + bytes(10 << 20))
        with Connection(port) as honest:
            assert honest.ask(GOOD).status == 200
        assert pss_bytes(process.pid) - before < BUDGET + GROWTH
        refused = [c for c in connections if _has_answer(c)]
        assert len(refused) >= 20 - BUDGET // (10 << 20)
        for connection in refused:
            answer = connection.answer()
            assert answer.status == 429
            assert int(answer.headers[b"retry-after"]) >= 1
    is_well(port)


def _has_answer(connection, patience_s=0.2):
    connection.socket.settimeout(patience_s)
    try:
        return bool(connection.socket.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        connection.socket.settimeout(30)


def test_json_of_many_empty_parts_is_refused_before_it_is_parsed(bounded):
    port, process = bounded
    before = pss_bytes(process.pid)
    with Connection(port) as connection:
        for part in (b"[],", b"{},", b"[[]],", b'{"a":[]},'):
            body = b'{"inputs":[' + part * ((15 << 20) // len(part)) + b"0]}"
            answer = connection.ask(request("POST", "/predict", body))
            assert answer.status == 413
            assert b"inputs: expected at most 262144 arrays and objects" in answer.body
    assert pss_bytes(process.pid) - before < GROWTH
    is_well(port)


def test_json_that_becomes_more_than_there_is_is_refused_before_it_is_parsed(bounded):
    port, process = bounded
    before = pss_bytes(process.pid)
    for row in (b"1," * (7 << 20), b'"ab",' * (3 << 20), b"0.1," * (3 << 20)):
        with Connection(port) as connection:
            answer = connection.ask(request("POST", "/predict", b'{"inputs":[[' + row + b"0]]}"))
            assert (answer.status, b" bytes " in answer.body) == (413, True)
    assert pss_bytes(process.pid) - before < GROWTH
    is_well(port)


def test_json_has_a_smaller_limit_than_arrays(client):
    with Connection(client.base_url.port) as connection:
        body = b'{"inputs": [' + b" " * (16 << 20) + b"]}"
        answer = connection.ask(request("POST", "/predict", body))
        assert (answer.status, b"body: expected at most 16777216 bytes" in answer.body) == (
            413,
            True,
        )
        answer = connection.ask(request("POST", "/predict", body, content_type="application/x-npy"))
        assert answer.status == 422


@pytest.mark.slow
def test_connections_that_pipeline_and_never_read_hold_little(bounded):
    port, process = bounded
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
        with Connection(port) as honest:
            assert honest.ask(GOOD).status == 200
    is_well(port)


def test_answers_that_nobody_reads_count_and_the_oldest_go(bounded):
    port, process = bounded
    before = pss_bytes(process.pid)
    body = (
        b'{"inputs": [' + b",".join([ROW] * 200) + b'], "num_samples": 100, "return_samples": true}'
    )
    with ExitStack() as stack:
        connections = [stack.enter_context(Connection(port, receive_bytes=4096)) for _ in range(40)]
        with Connection(port) as honest:
            for connection in connections:
                connection.send(request("POST", "/predict", body))
                assert honest.ask(GOOD).status == 200
            assert pss_bytes(process.pid) - before < BUDGET + 2 * GROWTH
            answer = honest.ask(request("POST", "/predict", body))
            assert answer.status in (200, 429)
    is_well(port)


@pytest.mark.slow
def test_an_answer_must_be_read_at_a_least_rate(serve, digits_store):
    body = (
        b'{"inputs": [' + b",".join([ROW] * 400) + b'], "num_samples": 100, "return_samples": true}'
    )
    with ExitStack() as stack:
        url, _ = stack.enter_context(serve(digits_store, DUBITO_DEADLINE_S="2"))
        with Connection(int(url.rpartition(":")[2]), receive_bytes=4096) as connection:
            connection.send(request("POST", "/predict", body))
            start, read = time.monotonic(), 0
            while time.monotonic() < start + 30:
                try:
                    data = connection.socket.recv(8192)
                except ConnectionResetError:
                    break
                read += len(data)
                if not data:
                    break
                time.sleep(0.25)  # 32 kB a second
            assert time.monotonic() < start + 25
            assert read < 2 << 20


@pytest.mark.slow
def test_connections_are_bounded_and_those_who_keep_us_waiting_make_room(serve, digits_store):
    with serve(digits_store, DUBITO_MAX_CONNECTIONS="10") as (url, _), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        for sent in (
            b"",
            b"GET / HT",
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
        ):
            stored = [stack.enter_context(Connection(port)) for _ in range(30)]
            for connection in stored:
                try:
                    connection.send(sent)
                except Ended:
                    continue
            with Connection(port) as honest:
                for _ in range(3):
                    assert honest.ask(LIVE).status == 200
                    assert honest.ask(GOOD).status == 200
            ended = [c for c in stored if _has_answer_or_end(c)]
            assert len(ended) >= 20


def _has_answer_or_end(connection):
    connection.socket.settimeout(0.2)
    try:
        connection.socket.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_when_all_connections_are_in_work_a_further_one_may_ask_for_health_alone(
    serve, digits_store
):
    body = b'{"inputs": [' + b",".join([ROW] * 1000) + b'], "num_samples": 1000}'
    with serve(digits_store, DUBITO_MAX_CONNECTIONS="2") as (url, _), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        time.sleep(0.3)  # the test's own look at it has ended
        busy = [stack.enter_context(Connection(port)) for _ in range(2)]
        for connection in busy:
            connection.send(request("POST", "/predict", body))
        time.sleep(0.3)
        for content in (LIVE, request("GET", "/metrics")):
            with Connection(port) as late:
                answer = late.ask(content)
                assert (answer.status, answer.closes) == (200, True)
        with Connection(port) as late:
            answer = late.ask(GOOD)
            assert (answer.status, answer.closes, answer.headers[b"retry-after"]) == (
                503,
                True,
                b"1",
            )
        assert {connection.answer().status for connection in busy} == {200}
        with Connection(port) as again:
            assert again.ask(LIVE).status == 200


def test_whoever_has_all_connections_makes_room_for_others_and_health(serve, digits_store):
    with serve(digits_store, DUBITO_MAX_CONNECTIONS="160") as (url, _), ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        idle = [stack.enter_context(Connection(port)) for _ in range(260)]
        wait_until(lambda: sum(map(_has_ended, idle)) >= 260 - 120 - MAX_BEYOND)
        rest = [stack.enter_context(Connection(port, source="127.0.0.2")) for _ in range(60)]
        for connection in rest * 2:
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
