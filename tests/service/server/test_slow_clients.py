import asyncio
import json
import select

import httpx
import pytest

from service.app import create_app
from service.server.budget import ByteBudget
from service.server.connections import Connections
from service.server.http1 import MAX_HEAD_BYTES
from service.server.protocol import FREE_BYTES, REFUSALS
from service.settings import Settings
from tests.support.http_server import http_server
from tests.support.process import open_files, settled
from tests.support.raw import Connection, Ended, request

BODY = b'{"inputs": [[0]]}'
POST = request("POST", "/predict", BODY)
HEAD = POST[: -len(BODY)]
CHUNKED = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def get_port(url):
    return httpx.URL(url).port


@pytest.fixture(scope="module")
def impatient(digits_store):
    from tests.support.serving import serving

    settings = {"DUBITO_DEADLINE_S": "0.5", "DUBITO_KEEP_ALIVE_S": "1"}
    with serving(digits_store, **settings) as (url, process):
        yield get_port(url), process


def test_an_idle_connection_is_closed_after_the_set_time(impatient):
    port, _ = impatient
    with Connection(port, timeout_s=10.0) as connection:
        assert connection.ask(request("GET", "/health/live")).status == 200
        with pytest.raises(Ended):
            connection.answer()


@pytest.mark.parametrize(
    "part", [b"G", HEAD[:-1], HEAD, HEAD + BODY[:5], CHUNKED + b"2\r\n{}\r\n", b"\r\n"]
)
def test_a_request_that_does_not_come_whole_is_answered_408_and_the_connection_ended(
    impatient, part
):
    port, _ = impatient
    with Connection(port) as connection:
        assert connection.ask(request("GET", "/health/live")).status == 200
        answer = connection.ask(part)
        assert (answer.status, answer.closes) == (408, True)
        with pytest.raises(Ended):
            connection.answer()


@pytest.mark.parametrize(
    ("path", "named"),
    [("/v2/models/digits/infer", "error"), ("/invocations", "message"), ("/predict", "detail")],
)
def test_what_is_refused_before_it_is_whole_is_refused_as_its_protocol_has_it(
    impatient, path, named
):
    """By a service that waits for the rest of a body, and by one that has no memory for what
    follows a request."""
    port, _ = impatient
    with Connection(port) as connection:
        refused_as(connection.ask(request("POST", path, BODY)[:-1]), 408, named)

    create_app(Settings())  # registers the error forms of integrations

    async def hears_nothing(scope, receive, send):
        await asyncio.Event().wait()

    async def ask():
        content = request("POST", path, BODY) + b"G" * (FREE_BYTES + 1)
        async with http_server(hears_nothing, Connections(60.0, 10, ByteBudget(0))) as (port, _):
            with Connection(port) as connection:
                refused_as(await asyncio.to_thread(connection.ask, content), 503, named)

    asyncio.run(ask())


def refused_as(answer, status, named):
    assert (answer.status, answer.closes) == (status, True)
    media_type = b"application/json" if named != "detail" else b"application/problem+json"
    assert answer.headers[b"content-type"] == media_type
    assert json.loads(answer.body)[named] == REFUSALS[status]


@pytest.mark.parametrize(
    ("start", "counted"),
    [
        (b"GET /", 5),
        (b"GET / HTTP/1.1\r\nX: ", 19),
        (CHUNKED + b"2\r\n{}\r\n0\r\nX: ", 0),
    ],
)
def test_a_head_without_end_is_answered_431(client, start, counted):
    with Connection(client.base_url.port) as connection:
        connection.send(start)
        connection.send(b"a" * (MAX_HEAD_BYTES + 1 - counted))
        while not select.select([connection.socket], [], [], 0.1)[0]:
            connection.send(b"a" * 8192)
        answer = connection.answer()
        assert (answer.status, answer.closes) == (431, True)


def test_requests_in_pieces_are_answered(impatient):
    port, _ = impatient
    with Connection(port) as connection:
        for _ in range(3):
            for i in range(0, len(POST), 40):
                connection.send(POST[i : i + 40])
            assert connection.answer().status == 422
        connection.send(POST + POST[:50])
        assert connection.answer().status == 422
        connection.send(POST[50:])
        assert connection.answer().status == 422


def test_whoever_does_not_read_the_answer_is_hung_up_on(impatient, digits_rows):
    port, process = impatient
    files = settled(lambda: open_files(process.pid))
    rows = digits_rows.astype(int).tolist()
    content = httpx.Request(
        "POST", "http://x", json={"inputs": rows, "num_samples": 100, "return_samples": True}
    )
    with Connection(port, receive_bytes=4096) as connection:
        connection.send(request("POST", "/predict", content.content))
        assert settled(lambda: open_files(process.pid), quiet_s=2.0) == files
