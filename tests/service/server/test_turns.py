import asyncio

import pytest

from service.auth.keys import KeyRing
from service.server import connections
from service.server.budget import ByteBudget
from service.server.connections import ALONE, MAX_FAILED_KEYS, SHARED, Connections
from service.settings import Settings
from tests.support.http_server import http_server
from tests.support.raw import request

KEYS = "key-of-the-first-client", "key-of-the-second-client"
LIVE = request("GET", "/health/live")


def get(key=KEYS[0], path="/"):
    return request("GET", path, headers=[("X-API-Key", key)])


class Server:
    """A server that answers once `is_open` is set, with its client connections."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(connections, "ALONE", (ALONE[0], 60.0))
        monkeypatch.setattr(connections, "SHARED", (SHARED[0], 60.0))
        ring = KeyRing(Settings(api_keys=",".join(KEYS)))
        shared = Connections(60.0, 1000, ByteBudget(1 << 20), ["/health/live"], ring)
        self.server = http_server(self.app, shared)
        self.is_open = asyncio.Event()
        self.running, self.paths, self.writers = 0, [], []

    async def app(self, scope, receive, send):
        self.running += 1
        self.paths.append(scope["path"])
        if scope["path"] != "/health/live":
            await self.is_open.wait()
        self.running -= 1
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def __aenter__(self):
        self.port, self.state = await self.server.__aenter__()
        return self

    async def __aexit__(self, *_):
        for writer in self.writers:
            writer.close()
        await asyncio.gather(*self.state.tasks)
        await self.server.__aexit__(None, None, None)
        await asyncio.sleep(0.1)

    async def send(self, *contents, source="127.0.0.1"):
        """Open a connection for each request."""
        readers = []
        for content in contents:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self.port, local_addr=(source, 0)
            )
            writer.write(content)
            self.writers.append(writer)
            readers.append(reader)
        await asyncio.sleep(0.1)
        return readers


async def read_status(reader):
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    return int(head[9:12])


def test_client_gets_fewer_turns_while_another_client_is_active(monkeypatch):
    async def run():
        async with Server(monkeypatch) as server:
            first = await server.send(*[get()] * (ALONE[0] + 5))
            assert server.running == ALONE[0]
            second = await server.send(*[get(KEYS[1])] * (SHARED[0] + 5))
            assert server.running == ALONE[0] + SHARED[0]
            (live,) = await server.send(LIVE)
            assert await read_status(live) == 204
            for connection in [*server.state.connections]:
                connection.shutdown()
            server.is_open.set()
            assert {await read_status(connection) for connection in [*first, *second]} == {204}

    asyncio.run(run())


def test_pipeline_waits_behind_other_requests_of_its_client(monkeypatch):
    monkeypatch.setattr(connections, "ALONE", (1, 60.0))

    async def run():
        async with Server(monkeypatch) as server:
            pipeline = b"".join(get(path=path) for path in ("/1", "/2", "/3"))
            readers = await server.send(pipeline, get(path="/single"))
            server.is_open.set()
            assert [await read_status(readers[i]) for i in (0, 0, 0, 1)] == [204] * 4
            assert server.paths == ["/1", "/single", "/2", "/3"]

    asyncio.run(run())


@pytest.mark.parametrize("is_closed", [False, True])
def test_turns_end_after_a_time_limit_and_with_the_request(monkeypatch, is_closed):
    async def run():
        async with Server(monkeypatch) as server:
            monkeypatch.setattr(connections, "ALONE", (1, 0.3))
            first, second = await server.send(get(), get())
            assert server.running == 1
            if is_closed:
                server.writers[1].close()
                (second,) = await server.send(get())
            await asyncio.sleep(0.4)
            assert server.running == 2
            server.is_open.set()
            assert [await read_status(first), await read_status(second)] == [204, 204]

    asyncio.run(run())


def test_address_with_many_wrong_keys_needs_a_valid_key(monkeypatch, caplog):
    async def run():
        async with Server(monkeypatch) as server:
            server.is_open.set()
            wrong = await server.send(*[get("an-unknown-key-of-a-client")] * (MAX_FAILED_KEYS + 3))
            statuses = [await read_status(connection) for connection in wrong]
            assert statuses == [204] * MAX_FAILED_KEYS + [429] * 3
            assert b"too many wrong keys" in await wrong[-1].read()
            valid, live = await server.send(get(), LIVE)
            assert [await read_status(valid), await read_status(live)] == [204, 204]
            (remote,) = await server.send(get("an-unknown-key-of-a-client"), source="127.0.0.2")
            assert await read_status(remote) == 204

    asyncio.run(run())
    assert caplog.text.count("wrong keys") == 1
