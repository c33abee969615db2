import asyncio

import pytest
from fastapi import Response

from service.app import create_app
from service.server.budget import ByteBudget
from service.server.connections import Connections
from service.settings import Settings
from tests.support.http_server import http_server
from tests.support.raw import Connection, request

LIVE = request("GET", "/health/live")


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    app = create_app(Settings(store=tmp_path_factory.mktemp("store")))

    @app.get("/broken")
    async def broken():
        raise ValueError

    @app.get("/status/{status}")
    async def empty(status: int):
        return Response(status_code=status, headers={"content-length": "4"}, content=b"text")

    return app


def exchange(app, *requests, head=False):
    async def run():
        shared = Connections(60.0, 10, ByteBudget(1 << 20))
        async with http_server(app, shared) as (port, _):
            with Connection(port, 5.0) as connection:
                first = await asyncio.to_thread(connection.ask, requests[0], head)
                rest = [await asyncio.to_thread(connection.ask, item) for item in requests[1:]]
        return [first, *rest]

    return asyncio.run(run())


@pytest.mark.parametrize("path", ["/broken", "/nothing", "/health/ready", "/predict", "/models"])
def test_head_response_has_no_body(app, path):
    response, live = exchange(app, request("HEAD", path), LIVE, head=True)
    assert response.status == {"/broken": 500, "/models": 200}.get(path, response.status)
    assert int(response.headers[b"content-length"]) > 0
    assert (live.status, live.body) == (200, b'{"status":"live"}')


@pytest.mark.parametrize("status", [204, 304])
def test_204_and_304_responses_have_no_body(app, status):
    response, live = exchange(app, request("GET", f"/status/{status}"), LIVE, head=True)
    assert response.status == status
    assert (status == 204) <= (b"content-length" not in response.headers)
    assert (live.status, live.body) == (200, b'{"status":"live"}')
