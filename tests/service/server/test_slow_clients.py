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
from tests.support.process import open_files, wait_until_stable
from tests.support.raw import Connection, ConnectionClosed, request

BODY = b'{"inputs": [[0]]}'
POST = request("POST", "/predict", BODY)
HEAD = POST[: -len(BODY)]
CHUNKED = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def get_port(url):
    return httpx.URL(url).port


@pytest.fixture(scope="module")
def impatient_service(digits_store):
    from tests.support.serving import serving

    settings = {"DUBITO_DEADLINE_S": "0.5", "DUBITO_KEEP_ALIVE_S": "1"}
    with serving(digits_store, **settings) as (url, process):
        yield get_port(url), process


def test_idle_connection_is_closed_after_the_keep_alive_time(impatient_service):
    port, _ = impatient_service
    with Connection(port, timeout_s=10.0) as connection:
        assert connection.ask(request("GET", "/health/live")).status == 200
        with pytest.raises(ConnectionClosed):
            connection.answer()


@pytest.mark.parametrize(
    "part", [b"G", HEAD[:-1], HEAD, HEAD + BODY[:5], CHUNKED + b"2\r\n{}\r\n", b"\r\n"]
)
def test_incomplete_request_gets_408_and_closes_the_connection(impatient_service, part):
    port, _ = impatient_service
    with Connection(port) as connection:
        assert connection.ask(request("GET", "/health/live")).status == 200
        answer = connection.ask(part)
        assert (answer.status, answer.closes) == (408, True)
        with pytest.raises(ConnectionClosed):
            connection.answer()


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v2/models/digits/infer", "error"), ("/invocations", "message"), ("/predict", "detail")],
)
def test_incomplete_request_is_refused_in_the_format_of_its_protocol(
    impatient_service, path, field
):
    """One service waits for the rest of the body; the other lacks memory for pipelined bytes."""
    port, _ = impatient_service
    with Connection(port) as connection:
        check_refusal(connection.ask(request("POST", path, BODY)[:-1]), 408, field)

    create_app(Settings())  # registers the error forms of integrations

    async def never_respond(scope, receive, send):
        await asyncio.Event().wait()

    async def send_excess():
        content = request("POST", path, BODY) + b"G" * (FREE_BYTES + 1)
        async with http_server(never_respond, Connections(60.0, 10, ByteBudget(0))) as (port, _):
            with Connection(port) as connection:
                check_refusal(await asyncio.to_thread(connection.ask, content), 503, field)

    asyncio.run(send_excess())


def check_refusal(response, status, field):
    assert (response.status, response.closes) == (status, True)
    media_type = b"application/json" if field != "detail" else b"application/problem+json"
    assert response.headers[b"content-type"] == media_type
    assert json.loads(response.body)[field] == REFUSALS[status]


@pytest.mark.parametrize(
    ("start", "start_bytes"),
    [
        (b"GET /", 5),
        (b"GET / HTTP/1.1\r\nX: ", 19),
        (CHUNKED + b"2\r\n{}\r\n0\r\nX: ", 0),
    ],
)
def test_endless_head_gets_431(client, start, start_bytes):
    with Connection(client.base_url.port) as connection:
        connection.send(start)
        connection.send(b"a" * (MAX_HEAD_BYTES + 1 - start_bytes))
        while not select.select([connection.socket], [], [], 0.1)[0]:
            connection.send(b"a" * 8192)
        answer = connection.answer()
        assert (answer.status, answer.closes) == (431, True)


def test_requests_sent_in_pieces_are_answered(impatient_service):
    port, _ = impatient_service
    with Connection(port) as connection:
        for _ in range(3):
            for i in range(0, len(POST), 40):
                connection.send(POST[i : i + 40])
            assert connection.answer().status == 422
        connection.send(POST + POST[:50])
        assert connection.answer().status == 422
        connection.send(POST[50:])
        assert connection.answer().status == 422


def test_client_that_does_not_read_its_response_is_disconnected(impatient_service, digits_rows):
    port, process = impatient_service
    files = wait_until_stable(lambda: open_files(process.pid))
    rows = digits_rows.astype(int).tolist()
    content = httpx.Request(
        "POST", "http://x", json={"inputs": rows, "num_samples": 100, "return_samples": True}
    )
    with Connection(port, receive_bytes=4096) as connection:
        connection.send(request("POST", "/predict", content.content))
        assert wait_until_stable(lambda: open_files(process.pid), quiet_s=2.0) == files
