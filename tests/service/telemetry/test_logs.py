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
def collect_log(serve, digits_store):
    def log(send, **settings):
        with serve(digits_store, **settings, DUBITO_API_KEYS=KEY) as (url, process):
            with httpx.Client(base_url=url, timeout=60, headers={"X-API-Key": KEY}) as client:
                send(client)
            process.terminate()
            return process.communicate(timeout=60)[1].splitlines()

    return log


def request_lines(lines):
    events = [json.loads(line) for line in lines]
    return [
        line
        for line in events
        if line["logger"] == "dubito.requests" and line["route"] != "/health/live"
    ]


def send_canaries(client):
    """Send the canary in every field that a client controls."""
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


def test_json_log_has_one_object_per_line_and_one_line_per_request(collect_log):
    def send(client):
        response = client.post(
            "/predict",
            json={"inputs": [ROW] * 3, "num_samples": 50},
            headers={"X-Request-ID": "a.B-3_"},
        )
        assert response.headers["X-Request-ID"] == "a.B-3_"
        client.post("/acquire", json={"pool": [ROW] * 5, "num_samples": 10})
        client.post("/predict", json={"inputs": [[1]]})
        client.get("/nothing")
        client.get("/models/digits")
        send_canaries(client)

    lines = collect_log(send, DUBITO_LOG="json")
    assert CANARY not in "\n".join(lines)
    events = [json.loads(line) for line in lines]
    assert all({"time", "level", "logger", "message"} <= set(event) for event in events)
    assert {"uvicorn.error", "dubito"} <= {event["logger"] for event in events}
    predicted, ranked, invalid, unknown, model, *_ = request_lines(lines)
    assert set(predicted) == FIELDS
    assert predicted["request_id"] == "a.B-3_"
    expected = {
        "model": "digits",
        "version": "1",
        "rows": 3,
        "draws": 50,
        "status": 200,
        "reason": None,
    }
    assert expected.items() <= predicted.items()
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


def test_text_log_has_no_requests_and_no_client_data(collect_log):
    text = collect_log(send_canaries)
    assert CANARY not in "\n".join(text)
    assert not any("Did not find" in line for line in text)  # logged by python-multipart
    assert any("INFO dubito: serving model digits version 1" in line for line in text)
    assert not any("/predict" in line for line in text)


@pytest.mark.parametrize(
    "request_id", [None, "", "a b", "a" * 65, "é", "a\tb", '"', "../x", "a;b", "a|b"]
)
def test_request_without_a_valid_id_gets_a_new_one(client, request_id):
    headers = (
        []
        if request_id is None
        else [("X-Request-ID", item.encode()) for item in request_id.split("|")]
    )
    ids = [client.get("/health/live", headers=headers).headers["X-Request-ID"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", item) for item in ids)


def test_every_response_has_a_request_id(client):
    for response in (
        client.get("/nothing"),
        client.post("/predict", json={}),
        client.get("/metrics"),
        client.get("/docs"),
    ):
        assert len(response.headers["X-Request-ID"]) == 32


def test_unexpected_error_gets_500_and_is_logged_without_its_message(tmp_path, caplog):
    app = create_app(Settings(store=tmp_path))

    @app.get("/broken")
    async def broken():
        raise ValueError(CANARY)

    async def get_pages():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:
            return await client.get("/broken"), await client.get("/metrics")

    with caplog.at_level(logging.INFO):
        response, page = asyncio.run(get_pages())
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["X-Request-ID"] in caplog.text
    assert "ValueError" in caplog.text
    assert "in broken" in caplog.text
    assert CANARY not in caplog.text + response.text
    assert metric(page.text, "dubito_failures_total", route="/broken", reason="unexpected") == 1
    assert metric(page.text, "dubito_requests_total", route="/broken", status="500") == 1


def test_unread_log_blocks_neither_requests_nor_shutdown(serve, tmp_path):
    with serve(tmp_path, DUBITO_LOG="json") as (url, process):
        with httpx.Client(base_url=url, timeout=10) as client:
            for _ in range(400):  # more than fits into a pipe
                client.get("/health/live")
        process.terminate()
        assert process.wait(30) == 0
