"""Process setup: port, open files, memory and graceful shutdown.

After SIGTERM the service reports that it is not ready, and closes each connection after its answer.
After the grace period, it stops listening and finishes the accepted requests.
"""

import asyncio
import ctypes
import errno
import gc
import logging
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

logger = logging.getLogger("dubito")

SPARE_FILES = 256  # in addition to connections
TRIM_S = 5.0
LARGE_BYTES = 8 << 20  # larger than a micro-batch, smaller than large bodies and pools
HEAPS = 2  # instead of eight per core, so that threads reuse freed memory

_C = ctypes.CDLL(None)
_TRIM, _OPTION = getattr(_C, "malloc_trim", None), getattr(_C, "mallopt", None)  # glibc has them
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8


def cannot_listen(host: str, port: int) -> str | None:
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"DUBITO_PORT: expected a free port of {host}, got {port}, which is in use "
                "(--port N takes another)"
            )
        return f"cannot listen on {host} port {port}: {error.strerror}"
    return None


def allow_open_files(connections: int) -> int:
    """Raise the limit on open files and return how many connections it allows.

    If more connections could open, idle ones would leave no files for health requests.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = connections + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError):  # macOS has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    if soft == resource.RLIM_INFINITY:
        return connections
    usable = max(1, min(connections, soft - min(SPARE_FILES, soft // 2)))
    if usable < connections:
        logger.warning(
            "DUBITO_MAX_CONNECTIONS: using %s instead of %s, because the process may open only %s "
            "files; raise the hard limit (`ulimit -Hn`)",
            usable,
            connections,
            soft,
        )
    return usable


def keep_heaps_whole() -> None:
    """Make glibc return large freed blocks and share heaps between threads.

    By default glibc allocates blocks of up to 32 MiB in per-thread heaps, which fragment. Call this
    before threads start.
    """
    if _OPTION is not None:
        _OPTION(_MMAP_THRESHOLD, LARGE_BYTES)
        _OPTION(_ARENA_MAX, HEAPS)


@contextmanager
def trim_memory() -> Iterator[None]:
    """Run a thread that returns freed memory to the system every few seconds."""
    ending = threading.Event()

    def run() -> None:
        while not ending.wait(TRIM_S):
            gc.collect()
            if _TRIM is not None:
                _TRIM(0)

    thread = threading.Thread(target=run, name="trim-memory", daemon=True)
    thread.start()
    yield
    ending.set()
    thread.join()


def end_with_notice(ending: threading.Event, shutdown_grace_s: float) -> None:
    """Stop after the grace period on SIGTERM, or at once on SIGINT or a second SIGTERM."""
    # Only the main thread can set signal handlers; tests run in others.
    if threading.current_thread() is not threading.main_thread():
        return
    stop = signal.getsignal(signal.SIGTERM)
    loop = asyncio.get_running_loop()

    def on_signal(number: int, _: FrameType | None) -> None:
        is_urgent = number == signal.SIGINT or ending.is_set()
        wait_s = 0.0 if is_urgent else shutdown_grace_s
        ending.set()
        if callable(stop):
            loop.call_soon_threadsafe(loop.call_later, wait_s, stop, number, None)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
