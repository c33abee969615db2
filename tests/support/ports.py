"""Free ports for test servers."""

import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RANDOM = random.SystemRandom()  # independent of seeds, so that processes choose different ports


def free_port() -> int:
    """Return a free port of 127.0.0.1.

    It is below the range of ephemeral ports, so connections cannot use it. Parallel test
    processes use separate ranges.
    """
    ephemeral = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 16
    while True:
        port = RANDOM.randrange(10_000, ephemeral - 16) // 16 * 16 + process
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _USED:
            _USED.add(port)
            return port


_USED: set[int] = set()
