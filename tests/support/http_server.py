import asyncio
from contextlib import asynccontextmanager
from functools import partial

from uvicorn import Config
from uvicorn.server import ServerState

from service.server.protocol import HttpConnection


@asynccontextmanager
async def http_server(app, connections):
    """Serve an ASGI application with our HTTP protocol, and yield the port and uvicorn's state."""
    config = Config(app, log_config=None, lifespan="off", interface="asgi3")
    state = ServerState()
    create_connection = partial(HttpConnection, connections, config, state, {})
    server = await asyncio.get_running_loop().create_server(create_connection, "127.0.0.1")
    yield server.sockets[0].getsockname()[1], state
    server.close()
    for task in state.tasks:
        task.cancel()
