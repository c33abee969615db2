"""Start the service."""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from model_store.artifacts.store import open_store
from model_store.errors import InvalidInput
from model_store.processes import TOKENIZING
from service.auth.keys import HEALTH_PATHS, KeyRing
from service.integrations import installed_integrations
from service.server.process import allow_open_files, cannot_listen, keep_heaps_whole
from service.server.supervisor import WorkerPlace, supervise
from service.settings import SWITCH_S, Settings, read_settings
from service.telemetry.logs import configure
from service.telemetry.tracing import check_tracing

if TYPE_CHECKING:
    from uvicorn import Server

logger = logging.getLogger("dubito")


def serve(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT. The exit code is 3 if the service cannot start."""
    if options.port is not None:
        os.environ["DUBITO_PORT"] = str(options.port)
    settings = read_settings()
    check(settings)
    configure(settings)
    problem = cannot_listen(settings.host, settings.port)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 3
    if isinstance(settings.store, Path) and not settings.store.exists():
        message = "DUBITO_STORE: the folder %s does not exist; waiting for it"
        logger.warning(message, settings.store.absolute())
    if settings.page and settings.port != 0:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
        logger.info("web page: http://%s:%s/", host, settings.port)
    return _serve(settings) if settings.workers == 1 else supervise(settings)


def serve_as_worker(options: argparse.Namespace) -> int:
    *numbers, folder = options.place
    worker, listener, heartbeat = map(int, numbers)
    settings = read_settings()
    check(settings)
    configure(settings)
    return _serve(settings, WorkerPlace(worker, listener, heartbeat, Path(folder)))


def check(settings: Settings) -> None:
    """Raise InvalidInput if the service cannot start with these settings."""
    KeyRing(settings)
    check_tracing(settings)
    store = settings.store
    if isinstance(store, Path) and store.exists() and not store.is_dir():
        raise InvalidInput("DUBITO_STORE", "a folder", str(store.absolute()))
    open_store(**settings.store_options())  # raises for an invalid URL or key file


def _serve(settings: Settings, place: WorkerPlace | None = None) -> int:
    keep_heaps_whole()
    os.environ |= TOKENIZING
    sys.setswitchinterval(SWITCH_S)
    # uvicorn raises the signal again after its shutdown.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    import uvicorn  # imported late, because most commands do not need it

    from service.app import create_app
    from service.server.budget import ByteBudget
    from service.server.connections import Connections
    from service.server.protocol import HttpConnection
    from service.shared_state import FolderBackend

    budget = ByteBudget(settings.memory_budget_bytes)
    health_paths = set(HEALTH_PATHS)
    for integration in installed_integrations().values():
        health_paths |= {*integration.health_paths}
    max_connections = allow_open_files(settings.max_connections)
    backend = None if place is None else FolderBackend(str(place.worker), place.folder)
    app = create_app(settings, backend)
    connections = Connections(
        settings.deadline_s, max_connections, budget, health_paths, app.state.context.key_ring
    )
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="asyncio",  # uvloop accepts one connection per step, so a flood delays all others
        http=partial(HttpConnection, connections),  # type: ignore[arg-type]
        ws="none",
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
        timeout_keep_alive=settings.keep_alive_s,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
    )
    server = uvicorn.Server(config)
    with (
        suppress(KeyboardInterrupt),
        asyncio.Runner(loop_factory=config.get_loop_factory()) as runner,
    ):
        runner.run(_run(server, place))
    return 0 if server.started else 3


async def _run(server: "Server", place: WorkerPlace | None) -> None:
    if place is None:
        await server.serve()
        return
    beating = asyncio.create_task(place.beat())
    await server.serve([socket.socket(fileno=place.listener)])
    beating.cancel()
