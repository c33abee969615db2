import random
import time
from contextlib import ExitStack

import pytest

from service.server.http1 import MAX_HEAD_BYTES
from tests.support.raw import Connection, ConnectionClosed, request

ROW = b"[" + b",".join([b"8"] * 64) + b"]"
BODY = b'{"inputs": [' + ROW + b'], "seed": 7}'
LIVE = request("GET", "/health/live")
INNER = request("GET", "/smuggled")
POST = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADES = [
    [("Connection", "Upgrade"), ("Upgrade", "foo")],
    [("Connection", "upgrade"), ("Upgrade", "websocket"), ("Sec-WebSocket-Version", "13")],
    [
        ("Connection", "Upgrade, HTTP2-Settings"),
        ("Upgrade", "h2c"),
        ("HTTP2-Settings", "AAMAAABk"),
    ],  # Java, curl
    [("Connection", "keep-alive, Upgrade"), ("Upgrade", "TLS/1.3, h2c"), ("Upgrade", "foo")],
]


@pytest.fixture
def connection(client):
    with Connection(client.base_url.port, timeout_s=10.0) as connection:
        yield connection


def assert_rejected(connection, content, status=400):
    connection.send(content)
    response = connection.answer()
    assert (response.status, response.closes) == (status, True), content[:200]
    with pytest.raises(ConnectionClosed):
        connection.answer()


@pytest.mark.parametrize("headers", UPGRADES, ids=lambda headers: headers[1][1])
@pytest.mark.parametrize("is_split", [False, True])
def test_upgrade_headers_are_ignored_and_bodies_are_read(connection, headers, is_split):
    expected = connection.ask(request("POST", "/predict", BODY))
    assert expected.status == 200
    for body in (BODY, INNER):
        message = request("POST", "/predict", body, headers)
        connection.send(message[: -len(body)] if is_split else message)
        if is_split:
            time.sleep(0.05)
            connection.send(body)
        response = connection.answer()
        assert response.status == (200 if body == BODY else 422)
        assert response.body == expected.body or body == INNER
        assert connection.ask(LIVE).body == b'{"status":"live"}'
    assert connection.ask(request("GET", "/health/live", None, headers)).status == 200
    assert connection.ask(LIVE).status == 200


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\xff\x16\x03", b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\n bad: x\r\n\r\n", b"}" * 50],
)
def test_garbage_after_request_gets_separate_error(connection, garbage):
    connection.send(request("POST", "/predict", BODY) + garbage)
    assert connection.answer().status == 200
    assert connection.answer().status == 400
    with pytest.raises(ConnectionClosed):
        connection.answer()


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 300 + b"\r\n",
        CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        CHUNKED + b"2\r\n{}\r\n0\r\nX: " + b"y" * 120_000 + b"\r\n\r\n",
        CHUNKED + b"1;" + b"e" * 5_000 + b"\r\n{\r\n0\r\n\r\n",
        CHUNKED + (b"1;" + b"e" * 2_000 + b"\r\n \r\n") * 40,
    ],
    ids=lambda content: content[60:100],
)
def test_oversized_heads_trailers_and_chunk_extensions_are_rejected(connection, content):
    assert len(content) > MAX_HEAD_BYTES or content.count(b"A:") > 256 or b";" in content
    connection.send(content)
    with pytest.raises(ConnectionClosed):
        assert connection.answer().status == 431
        connection.answer()


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n",
        b"Content-Length: 2\r\nContent-Length: 2\r\n",
        b"Content-Length: 2, 2\r\n",
        b"Content-Length: +2\r\n",
        b"Content-Length: 2\r\n\t\r\n",
        b"Content-Length: 2\r\nX: a\r\n b\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Content-Length: 2\nX: y\r\n",
        b"Content-Length: 2\r\nX: a\x00b\r\n",
        b"Content-Length: 2\r\nX: a\rb\r\n",
        b"Content-Length: 2\r\nHost: y\r\n",
        b"Content-\xffLength: 2\r\n",
    ],
)
def test_ambiguous_framing_is_rejected(connection, head):
    assert_rejected(connection, POST + head + b"\r\n{}" + LIVE)


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n",  # missing host
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET /\x0b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /#a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1 \r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        *(
            b"GET http://x" + byte + b"y/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
            for byte in (b"\x00", b"\t", b"\r", b"\n", b"\x7f", b"\x80", b" ")
        ),
        b"POST /predict HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        *(
            CHUNKED + chunk
            for chunk in (
                b"2\n{}\r\n",
                b"0x2\r\n{}\r\n",
                b"2 \r\n{}\r\n",
                b"2\r\n{}0\r\n\r\n",
                b"-2\r\n",
            )
        ),
        CHUNKED + b"0\r\nX y\r\n\r\n",
        CHUNKED + b"2;a\nb\r\n{}\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS, rejected without a timeout
    ],
)
def test_invalid_http_is_rejected(connection, content):
    assert_rejected(connection, content)


def test_pipelined_requests_are_answered_in_order_for_any_segmentation(connection):
    expected = [connection.ask(content) for content in (request("POST", "/predict", BODY), LIVE)]
    chunks = b"".join(b"%x;x=y\r\n%s\r\n" % (len(p), p) for p in (BODY[:7], BODY[7:8], BODY[8:]))
    pipeline = (
        request("POST", "/predict", BODY)
        + LIVE
        + CHUNKED
        + chunks
        + b"0\r\nX: y\r\n\r\n"
        + b"\r\n"
        + LIVE
    )
    content = pipeline * 3
    for seed in range(10):
        cuts = sorted(random.Random(seed).sample(range(len(content)), 25))
        for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            connection.send(content[begin:end])
        for _ in range(6):
            assert [connection.answer().body, connection.answer().body] == [
                response.body for response in expected
            ]


def test_complete_pipeline_is_answered_despite_deadline(serve, digits_store):
    body = b'{"inputs": [' + b",".join([ROW] * 500) + b'], "num_samples": 1000}'
    with ExitStack() as stack:
        url, _ = stack.enter_context(
            serve(digits_store, DUBITO_DEADLINE_S="0.5", DUBITO_THREADS="1")
        )
        connection = stack.enter_context(Connection(int(url.rpartition(":")[2])))
        connection.send(
            request("POST", "/predict", body) * 8 + LIVE
        )  # The work takes longer than the deadline.
        assert {connection.answer().status for _ in range(8)} <= {200, 504}
        assert connection.answer().status == 200


def test_paths_with_trailing_slash_do_not_redirect_to_another_host(connection):
    for path in ("/models/", "/predict/", "/health/live/", "/docs/"):
        response = connection.ask(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: evil\r\n\r\n")
        assert response.status == 404
        assert b"location" not in response.headers
