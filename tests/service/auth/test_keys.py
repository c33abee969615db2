import json
import socket
from hashlib import sha256
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import APIRouter

from model_store.errors import InvalidInput
from service.auth.keys import KeyRing, list_keys
from service.auth.scopes import needed_scope
from service.settings import Settings
from tests.support.environment import run_service

FIRST, SECOND, ADMIN = (
    "first-key-of-the-api",
    "second+key/of=the~api",
    "the-key-of-the-administrator",
)
ROW = [0.0] * 64
OPEN_PATHS = (
    "/health/live",
    "/health/ready",
    "/docs",
    "/openapi.json",
    "/static-offline-docs/swagger-ui.css",
)


@pytest.fixture(scope="module")
def locked_url(digits_store):
    """The base URL of a service with keys."""
    from tests.support.serving import serving

    keys = {"DUBITO_API_KEYS": f"{FIRST}, {SECOND}", "DUBITO_ADMIN_KEY": ADMIN}
    with serving(digits_store, **keys) as (url, _):
        yield url


@pytest.fixture
def locked(locked_url):
    """A client without a key for a service with keys."""
    with httpx.Client(base_url=locked_url, timeout=60) as client:
        yield client


def test_only_health_and_documentation_are_open_without_a_key(locked):
    for path in OPEN_PATHS:
        assert locked.get(path).status_code == 200, path
    document = locked.get("/openapi.json").json()
    num_refusals = 0
    for path, operations in [
        *document["paths"].items(),
        *((path, ["get"]) for path in ("/metrics", "/nothing", "/page")),
    ]:
        for method in operations:
            answer = locked.request(method, path)
            if path not in OPEN_PATHS:
                assert answer.status_code == 401, path
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["WWW-Authenticate"].startswith("Bearer")
                assert {"type", "title", "status", "detail"} <= set(answer.json())
                num_refusals += 1
    assert num_refusals >= 10


@pytest.mark.parametrize("key", [FIRST, SECOND])
@pytest.mark.parametrize(
    "header", [{"X-API-Key": "{}"}, {"Authorization": "Bearer {}"}, {"authorization": "bearer  {}"}]
)
def test_each_key_is_accepted_in_either_header(locked, key, header):
    headers = {name: value.format(key) for name, value in header.items()}
    assert locked.post("/predict", json={"inputs": [ROW]}, headers=headers).status_code == 200
    assert locked.get("/metrics", headers=headers).status_code == 200
    assert locked.get("/nothing", headers=headers).status_code == 404
    assert locked.post("/admin/refresh", headers=headers).status_code == 403


def test_admin_key_allows_only_administration_metrics_and_reading(locked):
    headers = {"X-API-Key": ADMIN}
    assert locked.post("/admin/refresh", headers=headers).status_code == 200
    assert locked.get("/metrics", headers=headers).status_code == 200
    assert locked.post("/predict", json={"inputs": [ROW]}, headers=headers).status_code == 403
    assert locked.get("/jobs", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        FIRST[:-1],
        FIRST + "x",
        FIRST.upper(),
        f"{FIRST},{SECOND}",
        f"{FIRST}, {SECOND}",
        "é" * 20,
        "x" * 5000,
    ],
    ids=repr,
)
def test_invalid_keys_are_refused(locked, value):
    for header, form in (
        ("X-API-Key", "{}"),
        ("Authorization", "Bearer {}"),
        ("Authorization", "Basic {}"),
    ):
        answer = locked.get("/models", headers={header: form.format(value).rstrip().encode()})
        assert answer.status_code == 401
        assert len(value) < 16 or value not in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "//models",
        "/health/../models",
        "/health/live/",
        "/docs/x",
        "/%6dodels",
        "/admin",
        "/Admin/refresh",
    ],
)
def test_path_variants_do_not_bypass_authentication(locked_url, path):
    with socket.create_connection(
        (urlsplit(locked_url).hostname, urlsplit(locked_url).port), timeout=30
    ) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert raw.makefile("rb").readline().split()[1] == b"401"


def test_request_without_a_key_is_refused_before_its_body_arrives(locked_url):
    with socket.create_connection(
        (urlsplit(locked_url).hostname, urlsplit(locked_url).port), timeout=30
    ) as raw:
        raw.sendall(
            b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        assert raw.makefile("rb").readline().split()[1] == b"401"


def test_openapi_document_marks_operations_that_need_a_key(locked, client):
    document = locked.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"] == {
        "type": "apiKey",
        "in": "header",
        "name": "X-API-Key",
    }
    assert document["components"]["securitySchemes"]["bearer"] == {
        "type": "http",
        "scheme": "bearer",
    }
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("security" in operation) == (path not in OPEN_PATHS)
    text = json.dumps(document)
    assert not any(key in text for key in (FIRST, SECOND, ADMIN))
    assert "securitySchemes" not in client.get("/openapi.json").json()["components"]


# Scopes of path prefixes that the scope `read` does not cover
PREFIX_SCOPES = {
    "/labels": "label",
    "/predict/examples": "rows",
    "/models/{name}/drift": "rows",
    "/metrics": "metrics",
    "/admin/": "admin",
}


def test_read_scope_covers_only_get_requests_and_jobs(locked):
    for path, operations in locked.get("/openapi.json").json()["paths"].items():
        for method, operation in operations.items():
            if path not in OPEN_PATHS:
                (scope,) = operation["security"][0]["bearer"]
                expected = [name for start, name in PREFIX_SCOPES.items() if path.startswith(start)]
                if expected:
                    assert [scope] == expected, path
                    continue
                # Starting the job already required another scope.
                is_job_path = path.startswith("/jobs/")
                assert (scope == "read") == (method == "get" or is_job_path), path


def test_find_returns_a_configured_key_or_none():
    keys = list_keys(Settings(api_keys=f"{FIRST},{SECOND}", admin_key=ADMIN))
    actual = [keys.find(key.encode()) for key in (FIRST, SECOND, ADMIN, "", FIRST[:-1])]
    names = [f"api-{sha256(key.encode()).hexdigest()[:12]}" for key in (FIRST, SECOND)]
    assert [key and key.name for key in actual] == [*names, "admin", None, None]
    assert ["admin" in key.scopes for key in actual[:3]] == [False, False, True]


def test_route_without_a_scope_is_refused():
    router = APIRouter()
    router.add_api_route("/new", lambda: None)
    with pytest.raises(AssertionError, match="/new: add needs"):
        needed_scope(router.routes[0])


def test_keys_do_not_appear_in_repr_or_dumps():
    settings = Settings(api_keys=f"{FIRST},{SECOND}", admin_key=ADMIN)
    text = f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()} {KeyRing(settings)!r}"
    text += repr(list_keys(settings).find(FIRST.encode()))
    assert not any(key in text for key in (FIRST, SECOND, ADMIN))


SECRET = "a-secret-that-is-not-shown"


@pytest.mark.parametrize(
    ("settings", "variable"),
    [
        ({"DUBITO_API_KEYS": ""}, "DUBITO_API_KEYS"),
        ({"DUBITO_API_KEYS": f"{SECRET},"}, "DUBITO_API_KEYS"),
        ({"DUBITO_API_KEYS": f"{SECRET},short"}, "DUBITO_API_KEYS"),
        ({"DUBITO_API_KEYS": f"{SECRET} {SECRET}"}, "DUBITO_API_KEYS"),
        ({"DUBITO_API_KEYS": f"{SECRET}é"}, "DUBITO_API_KEYS"),
        ({"DUBITO_ADMIN_KEY": "short"}, "DUBITO_ADMIN_KEY"),
        ({"DUBITO_ADMIN_KEY": f"{SECRET}1,{SECRET}2"}, "DUBITO_ADMIN_KEY"),
        ({"DUBITO_ADMIN_KEY": SECRET, "DUBITO_API_KEYS": f"{FIRST},{SECRET}"}, "DUBITO_ADMIN_KEY"),
    ],
    ids=repr,
)
def test_invalid_key_settings_are_refused_without_being_shown(monkeypatch, settings, variable):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=f"^{variable}: ") as raised:
        KeyRing(Settings())
    assert SECRET not in str(raised.value)


def test_service_does_not_start_with_invalid_keys():
    completed = run_service(DUBITO_API_KEYS="short")
    assert completed.returncode == 2
    assert len(completed.stderr.splitlines()) == 1
    assert completed.stderr.startswith("error: DUBITO_API_KEYS: ")
