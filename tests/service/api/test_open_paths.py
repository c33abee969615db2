import asyncio

import pytest

from service.api.page import StaticContent
from service.app import create_app
from service.auth.scopes import needed_scope
from service.settings import Settings

FILES = (
    "/static-offline-docs/swagger-ui-bundle.js",
    "/static-offline-docs/redoc.standalone.js",
    "/page/vendor/d3-7.9.0.min.js",
)


@pytest.fixture(scope="module")
def app(digits_store):
    app = create_app(Settings(store=digits_store, preflight_timeout_s=0))
    context = app.state.context
    context.watcher.start()
    yield app
    context.ending.set()
    context.watcher.stop()


async def get_status(app, path):
    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        messages.append(message)

    messages, headers = [], [(b"host", b"localhost"), (b"accept-encoding", b"gzip")]
    scope = {"type": "http", "method": "GET", "query_string": b"", "headers": headers}
    await app({**scope, "path": path, "state": {}}, receive, send)
    return messages[0]["status"]


def test_open_paths_build_and_compress_their_content_only_once(app, monkeypatch):
    open_paths = [route.path for route in app.state.routes if needed_scope(route) is None]
    assert {"/openapi.json", "/docs", "/problems", "/"} <= set(open_paths)

    async def get_all():
        return {path: await get_status(app, path) for path in (*open_paths, *FILES, "/nothing")}

    first = asyncio.run(get_all())
    assert first["/openapi.json"] == first["/"] == first[FILES[0]] == 200

    def fail(*_):
        raise AssertionError("built again")

    monkeypatch.setattr(StaticContent, "__init__", fail)
    monkeypatch.setattr(app.openapi, "_build", fail)
    assert asyncio.run(get_all()) == first


def test_openapi_document_is_cached_per_prefix(app):
    contents = [app.openapi.content(prefix) for prefix in ("", "/v1", "")]
    assert contents[0] is contents[2]
    assert b'"servers":[{"url":"/v1"}]' in contents[1].body
