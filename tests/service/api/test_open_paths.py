import asyncio
import time

import pytest

from service.app import create_app
from service.auth.scopes import needed_scope
from service.settings import Settings

FILES = (
    "/static-offline-docs/swagger-ui-bundle.js",
    "/static-offline-docs/redoc.standalone.js",
    "/page/vendor/d3-7.9.0.min.js",
)
TRIES = 20


@pytest.fixture(scope="module")
def app(digits_store):
    app = create_app(Settings(store=digits_store, preflight_timeout_s=0))
    context = app.state.context
    context.watcher.start()
    yield app
    context.ending.set()
    context.watcher.stop()


async def cost(app, path):
    """The smallest processor time of a request, in seconds."""

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"accept-encoding", b"gzip")]
    costs, scope = [], {"type": "http", "method": "GET", "query_string": b"", "headers": headers}
    for _ in range(TRIES):
        sent, started = [], time.process_time()
        await app({**scope, "path": path, "state": {}}, receive, send)
        costs.append(time.process_time() - started)
    assert sent[0]["status"] < 500
    return min(costs)


def test_no_open_path_costs_much_more_than_a_health_request(app):
    open_paths = [route.path for route in app.state.routes if needed_scope(route) is None]
    assert {"/openapi.json", "/docs", "/problems", "/"} <= set(open_paths)

    async def measure():
        live = await cost(app, "/health/live")
        return {path: await cost(app, path) / live for path in (*open_paths, *FILES, "/nothing")}

    costs = asyncio.run(measure())
    assert {path: ratio for path, ratio in costs.items() if ratio > 5} == {}


def test_the_document_follows_the_models_and_the_prefix(app, monkeypatch):
    contents = [app.openapi.content(prefix) for prefix in ("", "/v1", "")]
    assert contents[0] is contents[2]
    assert b'"servers":[{"url":"/v1"}]' in contents[1].body
    assert b'"digits"' in contents[0].body
    models = app.state.context.models
    monkeypatch.setattr(models, "_latest", {})
    assert app.openapi.content("").body != contents[0].body
