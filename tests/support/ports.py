"""Ports for servers that tests start."""

import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
CHOICE = random.SystemRandom()  # no test's own seed leads two processes to the same ports


def free_port() -> int:
    """Return a port of 127.0.0.1 that nothing listens on, and that nothing takes before a server
    does.

    It lies below those that the system gives to connections, which would else take it now and then;
    and processes that run tests side by side have ports of their own.
    """
    ephemeral = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    while True:
        port = CHOICE.randrange(10_000, ephemeral - 16) // 16 * 16 + process
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _GIVEN:
            _GIVEN.add(port)
            return port


_GIVEN: set[int] = set()
