"""Serve: `dubito serve`, or `python -m service`. Settings are environment variables, `DUBITO_...`;
docs/settings.md lists them."""

import argparse
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from integrations.label_studio import studio
from model_store.artifacts.place import VERIFY_KEY_VARIABLE, open_store
from model_store.artifacts.signature import read_public_key
from model_store.errors import DubitoError, InvalidInput, StoreUnreachable
from model_store.inference.preflight_process import PreflightProcess
from model_store.processes import open_standard_files
from service.auth import keys
from service.auth.keys import OF_HEALTH, KeyRing, print_new_key
from service.server.process import allow_open_files, cannot_listen, keep_heaps_whole
from service.server.supervisor import WorkerPlace, supervise
from service.settings import SWITCH_S, Settings, read_settings
from service.telemetry.logs import configure
from service.telemetry.tracing import check_tracing

logger = logging.getLogger("dubito")

DEFAULT_PORT = 8000
ABOUT = {
    "backup": "Write the state folder to standard output, as a tar file.",
    "restore": "Make a state folder of what `backup` wrote, from standard input.",
}
# `acquire` is another name of `rank`.
COMMANDS = ("key", "label-studio", "cluster", "score", "rank", "acquire", "backup", "restore")


def main(arguments: list[str] | None = None, prog: str | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or do another command.

    Args:
        prog: what the command line is called where it is not `python -m service`.

    Returns:
        The exit code: 0 stopped, 2 a wrong setting, 3 it cannot start.
    """
    open_standard_files()
    arguments = sys.argv[1:] if arguments is None else arguments
    command, others = next(iter(arguments), None), arguments[1:]
    if command == "serve":
        arguments, command = others, None
    place = WorkerPlace.from_arguments(others) if command == WorkerPlace.OPTION else None
    try:
        if command in COMMANDS:
            return run(command, others, prog or f"python -m service {command}")
        if place is None:
            set_options(arguments, prog)
        settings = read_settings()
        check(settings, place is None)
    except DubitoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    configure(settings)
    if place is not None:
        return serve(settings, place)
    taken = cannot_listen(settings.host, settings.port)
    if taken is not None:  # before models are loaded
        print(f"error: {taken}", file=sys.stderr)
        return 3
    if isinstance(settings.store, Path) and not settings.store.exists():
        logger.warning(
            "DUBITO_STORE: the folder %s does not exist; waiting for it", settings.store.absolute()
        )
    if settings.page and settings.port != 0:
        here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
        logger.info("the page for people: http://%s:%s/", here, settings.port)
    return serve(settings) if settings.workers == 1 else supervise(settings)


def run(command: str, arguments: list[str], prog: str) -> int:
    """Run a command, which imports what it alone needs; return the exit code."""
    if command == "key":
        print_new_key(arguments, prog)
        return 0
    settings = read_settings()
    if command == "label-studio":
        studio.run(arguments, settings, prog)
        return 0
    if command == "cluster":
        from integrations.ray import command as cluster

        check(settings)
        return cluster.run(arguments, settings, prog)
    if command in ("backup", "restore"):
        from model_store.state.backup import back_up, restore

        copy, file = {
            "backup": (back_up, sys.stdout.buffer),
            "restore": (restore, sys.stdin.buffer),
        }[command]
        parser_of(command, prog).parse_args(arguments)
        copy(settings.state, file)
        return 0
    from service.batch import command as data_sets

    return data_sets.run(command, arguments, settings, prog)


def set_options(arguments: list[str], prog: str | None) -> None:
    also = (
        "`python -m service key NAME ...` makes a key for DUBITO_KEYS_FILE; `python -m service "
        "label-studio NAME ...` brings a project of Label Studio and a model together; `python -m "
        "service cluster` serves by replicas on Ray; `python -m service score SRC --out DST` "
        "predicts and `python -m service acquire SRC` ranks a whole data set; `python -m service "
        "backup > FILE` copies the state, and `python -m service restore < FILE` brings it back."
    )
    parser = parser_of("serve", prog or "python -m service")
    parser.epilog = None if prog else also
    options = parser.parse_args(arguments)
    if options.port is not None:
        os.environ["DUBITO_PORT"] = str(options.port)


def parser_of(command: str, prog: str) -> argparse.ArgumentParser:
    match command:
        case "key":
            return keys.parser_of(prog)
        case "label-studio":
            return studio.parser_of(prog, DEFAULT_PORT)
        case "cluster":
            from integrations.ray import command as cluster

            return cluster.parser_of(prog)
        case "score" | "rank" | "acquire":
            from service.batch import command as data_sets

            return data_sets.parser_of(command, prog)
        case "backup" | "restore":
            return argparse.ArgumentParser(prog=prog, description=ABOUT[command])
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    help = "port to listen on, in place of DUBITO_PORT (8000)"
    parser.add_argument("--port", type=int, metavar="N", help=help)
    return parser


def check(settings: Settings, is_first: bool = True) -> None:
    """Raise InvalidInput for settings that a service, or its workers, could not start with."""
    KeyRing(settings)
    check_tracing(settings)
    check_store(settings, is_first)
    settings.label_studio_secret()
    if settings.verify_key_file is not None:
        read_public_key(settings.verify_key_file, VERIFY_KEY_VARIABLE)


def check_store(settings: Settings, is_first: bool) -> None:
    """Raise InvalidInput if the store is a file, or a bucket that refuses to be read.

    A bucket is asked by the first process alone; one that cannot be reached may be later.
    """
    store = settings.store
    if isinstance(store, Path):
        if store.exists() and not store.is_dir():
            raise InvalidInput("DUBITO_STORE", "a folder", str(store.absolute()))
        return
    bucket = open_store(store, cache=settings.cache, cache_bytes=settings.cache_bytes)
    if is_first:
        try:
            bucket.names()
        except StoreUnreachable as error:
            if error.is_refused:
                expected = "a bucket that can be read"
                raise InvalidInput("DUBITO_STORE", expected, str(error)) from None


def serve(settings: Settings, place: WorkerPlace | None = None) -> int:
    keep_heaps_whole()
    sys.setswitchinterval(SWITCH_S)
    # uvicorn raises it again when it has stopped in good order
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if place is not None:
        place.start_heartbeat()
    store = settings.store
    has_store = isinstance(store, str) or store.is_dir()
    spare = PreflightProcess() if place is None and settings.trial_s > 0 and has_store else None
    import uvicorn  # not needed by a supervisor, and heartbeats begin before it

    from service.app import create_app
    from service.server.budget import ByteBudget
    from service.server.connections import Connections, HttpConnection
    from service.shared_state import FolderBackend

    budget = ByteBudget(settings.memory_budget_bytes)
    of_health = OF_HEALTH | {"/metrics"}
    connections = Connections(settings.deadline_s, settings.max_connections, budget, of_health)
    allow_open_files(settings.max_connections)
    folder = None if place is None else place.folder
    backend = None if place is None else FolderBackend(str(place.worker), place.folder)
    config = uvicorn.Config(
        create_app(settings, backend, folder, spare),
        host=settings.host,
        port=settings.port,
        http=partial(HttpConnection, connections),  # type: ignore[arg-type]
        ws="none",
        timeout_graceful_shutdown=settings.drain_s,
        # longer than proxies keep idle connections, so that they close them and not we
        timeout_keep_alive=75,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here goes by a client's address
        log_config=None,
    )
    server = uvicorn.Server(config)
    with suppress(KeyboardInterrupt):
        server.run(None if place is None else [socket.socket(fileno=place.listener)])
    return 0 if server.started else 3


if __name__ == "__main__":
    sys.exit(main())
