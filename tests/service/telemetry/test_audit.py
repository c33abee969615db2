import json
import logging
from queue import Queue

import httpx
import pytest

from service.app import create_app
from service.errors import NotReady
from service.settings import Settings
from service.telemetry import logs
from tests.support.stores import publish_again

ADMIN, UNKNOWN = "the-key-of-the-boss", "a-key-of-nobody-here"
ROW = [0.0] * 64
VERSION = "/admin/models/digits/versions/{}/{}"
CANDIDATE = "/admin/models/digits/candidate"
# POST routes that change neither models nor labels nor jobs
UNAUDITED = {
    *("/predict", "/acquire", "/acquire/preview", "/predict/jobs", "/acquire/jobs"),
    *("/admin/refresh", "/invocations", "/v2/repository/index"),
    *("/v2/models/{name}/infer", "/v2/models/{name}/versions/{version}/infer"),
    *("/label-studio/{name}/setup", "/label-studio/{name}/predict"),
}
LABEL = {"id": "a", "label": "3", "input": ROW}


def test_every_change_and_refusal_has_an_audit_line(serve, writable_store, digits_store, tmp_path):
    publish_again(writable_store, digits_store)
    settings = {"DUBITO_ADMIN_KEY": ADMIN, "DUBITO_JOBS_AT_ONCE": "0", "DUBITO_LOG": "json"}
    with serve(writable_store.root, **settings) as (url, process):
        with httpx.Client(base_url=url, timeout=60, headers={"X-API-Key": ADMIN}) as client:
            answers = [
                client.post(VERSION.format(1, "promote")),
                client.post("/predict", json={"inputs": [ROW], "version": "2", "seed": 1}),
                client.post(VERSION.format(2, "drift/reset")),
                client.post(CANDIDATE),
                client.delete(CANDIDATE),
                client.post("/labels", json={"labels": [LABEL]}),
                client.post("/labels/delete", json={"ids": ["a", "b"]}),
            ]
            job = client.post("/predict/jobs", json={"inputs": [ROW]}).json()["id"]
            answers += [client.post(f"/jobs/{job}/cancel"), client.delete(f"/jobs/{job}")]
            assert all(answer.is_success for answer in answers), [a.text for a in answers]
            client.headers["X-API-Key"] = UNKNOWN
            assert client.post("/admin/refresh%0A").status_code == 401
            headers = {"Origin": "http://evil.example"}
            assert client.post("/predict", headers=headers).status_code == 403
        process.terminate()
        text = process.communicate(timeout=60)[1]
    lines = [json.loads(line) for line in text.splitlines()]
    audit = [line for line in lines if line["logger"] == "dubito.audit"]
    assert {line["address"] for line in audit} == {"127.0.0.1"}
    assert [line["key"] for line in audit] == ["admin"] * 8 + [None] * 2
    assert all(line["request_id"] and line["time"] for line in audit)
    changes = [
        (line["message"], line["version"], line["before"], line["after"]) for line in audit[:-2]
    ]
    assert {line["model"] for line in audit[:-2]} == {"digits"}
    counts = {"accepted": 1, "known": 0, "replaced": 0, "labels": 1}
    assert changes == [
        ("promote", "1", "2", "1"),
        ("reset drift", "2", {"rows": 0, "alarm": False}, None),
        ("fit candidate", "1", None, "queued"),
        ("cancel job", "1", "queued", "cancelled"),
        ("store labels", "1", 0, counts),
        ("delete labels", None, 1, 0),
        ("cancel job", "1", "queued", "cancelled"),
        ("delete job", "1", "cancelled", None),
    ]
    assert [line["job"] for line in audit[-4:-2]] == [job] * 2
    assert [(line["path"], line["reason"]) for line in audit[-2:]] == [
        ("/admin/refresh%0A", "unauthorized"),
        ("/predict", "forbidden"),
    ]


def test_every_route_that_changes_state_is_audited(tmp_path):
    app = create_app(Settings(store=tmp_path, admin_key=ADMIN))
    routes = [route for route in app.state.routes if route.methods - {"GET", "HEAD"}]
    dependencies = {r.path: {d.name for d in r.dependant.dependencies} for r in routes}
    assert {path for path, names in dependencies.items() if "audit" not in names} == UNAUDITED


def test_text_format_escapes_newlines_in_fields():
    record = logging.makeLogRecord({"msg": "promote", "fields": {"key": "a\nb", "before": None}})
    assert logs.TextFormatter("%(message)s").format(record) == 'promote key="a\\nb" before=null'


def test_dropped_records_are_reported_and_leave_room_for_the_audit_log(monkeypatch):
    records, before = Queue(3), logs.DROPPED._value.get()
    monkeypatch.setattr(logs, "MAX_WAITING", 2)
    monkeypatch.setattr(logs, "_waiting", records)
    handler = logs._Queue(records)
    for _ in range(5):
        handler.handle(logging.makeLogRecord({"name": "dubito", "msg": "text"}))
    assert (records.qsize(), logs.DROPPED._value.get() - before) == (2, 3)
    with pytest.raises(NotReady, match="the log is not being read"):
        logs.AuditLog({})
    handler.handle(
        logging.makeLogRecord({"name": "dubito.audit", "levelno": logging.INFO, "msg": "promote"})
    )
    assert [records.get().msg for _ in range(3)] == ["text", "text", "promote"]
    handler.handle(logging.makeLogRecord({"name": "dubito", "msg": "later"}))
    assert [records.get().msg for _ in range(2)] == ["3 log records were dropped", "later"]
