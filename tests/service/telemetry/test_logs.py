import asyncio
import json
import logging
import re

import httpx
import pytest

from service.app import create_app
from service.settings import Settings
from tests.support.serving import metric

CANARY = "canary-3f9a"
KEY = f"{CANARY}-key-of-a-client"
ROW = [0.0] * 64
FIELDS = {
    *(
        "time",
        "level",
        "logger",
        "message",
        "request_id",
        "route",
        "method",
        "status",
        "seconds",
        "queue_seconds",
    ),
    *("compute_seconds", "model", "version", "rows", "draws", "flags", "reason", "key"),
}


@pytest.fixture
def logged(serve, digits_store):
    def log(send, **settings):
        with serve(digits_store, **settings, DUBITO_API_KEYS=KEY) as (url, process):
            with httpx.Client(base_url=url, timeout=60, headers={"X-API-Key": KEY}) as client:
                send(client)
            process.terminate()
            return process.communicate(timeout=60)[1].splitlines()

    return log


def request_lines(lines):
    actual = [json.loads(line) for line in lines]
    return [
        line
        for line in actual
        if line["logger"] == "dubito.requests" and line["route"] != "/health/live"
    ]


def send_canaries(client):
    """Send a text in every place that a client can fill."""
    headers = {"User-Agent": CANARY, "traceparent": CANARY, "Authorization": f"Bearer {KEY}"}
    client.headers.update({**headers, "X-Request-ID": f"{CANARY} {CANARY}"})
    assert client.post("/predict", json={"inputs": [[CANARY]], CANARY: 1}).status_code == 422
    assert client.post("/predict", json={"inputs": [ROW], "model": CANARY}).status_code == 404
    assert client.post("/acquire", json={"pool": [ROW], "ids": [CANARY]}).status_code == 200
    for path in (f"/{CANARY}", f"/models/{CANARY}", f"/models?{CANARY}={CANARY}"):
        client.get(path)
    client.request(CANARY, "/models")
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    for body in (f"--b{CANARY}\r\n\r\n", f"{CANARY}--b\r\n", CANARY):
        assert client.post("/predict", content=body, headers=form).status_code == 422
    headers = {"Content-Type": CANARY}
    client.post(f"/predict?seed={CANARY}", content=CANARY.encode(), headers=headers)


def test_every_line_is_an_object_and_every_request_has_one(logged):
    def send(client):
        answer = client.post(
            "/predict",
            json={"inputs": [ROW] * 3, "num_samples": 50},
            headers={"X-Request-ID": "a.B-3_"},
        )
        assert answer.headers["X-Request-ID"] == "a.B-3_"
        client.post("/acquire", json={"pool": [ROW] * 5, "num_samples": 10})
        client.post("/predict", json={"inputs": [[1]]})
        client.get("/nothing")
        client.get("/models/digits")
        send_canaries(client)

    lines = logged(send, DUBITO_LOG="json")
    assert CANARY not in "\n".join(lines)
    events = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= set(event) for event in events)
    assert {"uvicorn.error", "dubito"} <= {event["logger"] for event in events}
    predicted, ranked, invalid, unknown, model, *_ = request_lines(lines)
    assert set(predicted) == FIELDS
    assert predicted["request_id"] == "a.B-3_"
    used = {
        "model": "digits",
        "version": "1",
        "rows": 3,
        "draws": 50,
        "status": 200,
        "reason": None,
    }
    assert used.items() <= predicted.items()
    assert 0 <= predicted["flags"] <= 3
    assert 0 < predicted["compute_seconds"] <= predicted["seconds"] - predicted["queue_seconds"]
    assert {
        "route": "/acquire",
        "method": "POST",
        "rows": 5,
        "draws": 10,
        "flags": None,
    }.items() <= ranked.items()
    failed = {
        "route": "/predict",
        "status": 422,
        "reason": "invalid_input",
        "model": None,
        "rows": None,
    }
    assert failed.items() <= invalid.items()
    assert {
        "route": "other",
        "method": "GET",
        "status": 404,
        "reason": "not_found",
    }.items() <= unknown.items()
    assert {"route": "/models/{name}", "status": 200}.items() <= model.items()
    assert len({line["request_id"] for line in (ranked, invalid, unknown, model)}) == 4


def test_a_log_of_text_has_no_requests_and_nothing_that_a_client_sends(logged):
    text = logged(send_canaries)
    assert CANARY not in "\n".join(text)
    assert not any("Did not find" in line for line in text)  # by python-multipart
    assert any("INFO dubito: serving model digits version 1" in line for line in text)
    assert not any("/predict" in line for line in text)


@pytest.mark.parametrize(
    "given", [None, "", "a b", "a" * 65, "é", "a\tb", '"', "../x", "a;b", "a|b"]
)
def test_a_request_without_a_plain_id_is_given_one(client, given):
    headers = (
        [] if given is None else [("X-Request-ID", item.encode()) for item in given.split("|")]
    )
    created = [
        client.get("/health/live", headers=headers).headers["X-Request-ID"] for _ in range(2)
    ]
    assert len(set(created)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", item) for item in created)


def test_every_answer_has_the_id(client):
    for answer in (
        client.get("/nothing"),
        client.post("/predict", json={}),
        client.get("/metrics"),
        client.get("/docs"),
    ):
        assert len(answer.headers["X-Request-ID"]) == 32


def test_an_unexpected_error_is_answered_500_and_logged_without_its_text(tmp_path, caplog):
    app = create_app(Settings(store=tmp_path))

    @app.get("/broken")
    async def broken():
        raise ValueError(CANARY)

    async def ask():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:
            return await client.get("/broken"), await client.get("/metrics")

    with caplog.at_level(logging.INFO):
        answer, page = asyncio.run(ask())
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["X-Request-ID"] in caplog.text
    assert "ValueError" in caplog.text
    assert "in broken" in caplog.text
    assert CANARY not in caplog.text + answer.text
    assert metric(page.text, "dubito_failures_total", route="/broken", reason="unexpected") == 1
    assert metric(page.text, "dubito_requests_total", route="/broken", status="500") == 1


def test_a_log_that_nobody_reads_blocks_neither_requests_nor_the_end(serve, tmp_path):
    with serve(tmp_path, DUBITO_LOG="json") as (url, process):
        with httpx.Client(base_url=url, timeout=10) as client:
            for _ in range(400):  # more than a pipe holds
                client.get("/health/live")
        process.terminate()
        assert process.wait(30) == 0
