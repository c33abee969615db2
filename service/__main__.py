"""Serve: `python -m service`."""

import resource
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

from model_store.errors import DubitoError
from service.middleware.keys import read_keys
from service.observability.logs import configure
from service.observability.tracing import check_tracing
from service.process.supervisor import WorkerPlace, supervise
from service.settings import Settings, read_settings

SPARE_FILES = 256  # that a process has open beside its connections
SWITCH_S = 0.0005  # how long a thread may hold the interpreter while another waits: threads of arithmetic wait often


def main() -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0 stopped, 2 a wrong setting, 3 it cannot start."""
    try:
        settings = read_settings()
        read_keys(settings)  # here, not in a worker that would be started again and again
        check_tracing(settings)
    except DubitoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    configure(settings)
    if len(sys.argv) > 1:  # the arguments that a supervisor gives its workers
        return serve(settings, WorkerPlace.of_arguments(sys.argv[1:]))
    return serve(settings) if settings.workers == 1 else supervise(settings)


def serve(settings: Settings, place: WorkerPlace | None = None) -> int:
    """Serve in this process, alone or as one of several workers."""
    sys.setswitchinterval(SWITCH_S)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it again when it has stopped in good order
    if place is not None:
        place.beat()
    import uvicorn  # not needed by a supervisor, and heartbeats begin before it

    from service.app import create_app
    from service.process.budget import ByteBudget
    from service.process.connections import Connections, HttpConnection

    connections = Connections(settings.deadline_s, settings.max_connections, ByteBudget(settings.memory_budget_bytes))
    allow_open_files(settings.max_connections)
    config = uvicorn.Config(
        create_app(settings, place),
        host=settings.host,
        port=settings.port,
        http=partial(HttpConnection, connections),  # type: ignore[arg-type]
        ws="none",
        timeout_graceful_shutdown=settings.drain_s,
        timeout_keep_alive=75,  # longer than proxies keep idle connections, so that they close them and not we
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here goes by a client's address
        log_config=None,
    )
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):
        server.run(None if place is None else [socket.socket(fileno=place.listener)])
    return 0 if server.started else 3


def allow_open_files(connections: int) -> None:
    """Have the system allow this process a file for each connection beside those of models, if it will."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
