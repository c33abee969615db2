"""What a request costs in each HTTP server: processor time of an application that reads a body and
answers.

    python -m benchmarks.http_servers [--rounds 5] [--requests 20000] [--write]

serves one small ASGI application by uvicorn with our connections, with httptools, with h11, and by
others where they are installed (hypercorn, granian), and sends each the same requests in rounds: of
3 kB on 64 connections as soon as the one before was answered, and of 2 MB one after the other. It
divides the processor time of the server, with its children, by the requests. The client's time does
not count, nor does waiting.
"""

import argparse
import http.client
import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
from starlette.types import Receive, Scope, Send

from benchmarks.load import HOST, closed_loop, post
from benchmarks.model import ROOT
from benchmarks.options import RESULTS
from benchmarks.request_cost import processor_seconds

SMALL_BYTES, LARGE_BYTES = 3_000, 2_000_000
CONNECTIONS, LARGE_REQUESTS = 64, 100
APPLICATION = "benchmarks.http_servers:application"

OURS = """
import sys, uvicorn
from functools import partial
from service.server.budget import ByteBudget
from service.server.connections import Connections, HttpConnection
connections = Connections(60.0, 1000, ByteBudget(512 << 20))
uvicorn.run("benchmarks.http_servers:application", port=int(sys.argv[1]), log_level="error", access_log=False,
            http=partial(HttpConnection, connections), ws="none", lifespan="off")
"""
UVICORN = [
    "-m",
    "uvicorn",
    APPLICATION,
    "--log-level",
    "error",
    "--no-access-log",
    "--ws",
    "none",
    "--lifespan",
    "off",
]
COMMANDS = {
    "ours": ["-c", OURS, "{port}"],
    "httptools": [*UVICORN, "--http", "httptools", "--port", "{port}"],
    "h11": [*UVICORN, "--http", "h11", "--port", "{port}"],
    "hypercorn": ["-m", "hypercorn", "--bind", f"{HOST}:{{port}}", APPLICATION],
    "granian": [
        "-m",
        "granian",
        "--interface",
        "asginl",
        "--no-ws",
        "--port",
        "{port}",
        APPLICATION,
    ],
}
PACKAGES = {
    "ours": "uvicorn",
    "httptools": "httptools",
    "h11": "h11",
    "hypercorn": "hypercorn",
    "granian": "granian",
}


async def application(_: Scope, receive: Receive, send: Send) -> None:
    """Read a request's body, and say how long it was."""
    length, more = 0, True
    while more:
        message = await receive()
        length, more = length + len(message.get("body", b"")), message.get("more_body", False)
    body = b'{"length": %d}' % length
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def running(name: str) -> Iterator[tuple[int, int]]:
    """Run a server, and yield its port and process."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        *(part.format(port=port) if "{port}" in part else part for part in COMMANDS[name]),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex((HOST, port)) == 0:
                        break
                time.sleep(0.1)
            yield port, process.pid
        finally:
            process.terminate()


def taken(pid: int) -> float:
    """Return the processor seconds of a process and its children so far."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return processor_seconds(pid) + sum(processor_seconds(int(child)) for child in children)


def measure(name: str, requests: int) -> tuple[float, float]:
    """Return milliseconds of processor time for a small request and for a large one."""
    small = post("/", b"x" * SMALL_BYTES)
    with running(name) as (port, pid):
        closed_loop(port, [small], CONNECTIONS, 1.0, warm_up_s=0.0)
        begun, seconds, answered = taken(pid), 1.0, 0
        while answered < requests:
            load = closed_loop(port, [small], CONNECTIONS, seconds, warm_up_s=0.0)
            if set(load.counts) != {"200"}:
                raise RuntimeError(f"{name}: expected 200, got {load.counts}")
            answered += load.counts["200"]
        each = 1e3 * (taken(pid) - begun) / answered
        connection = http.client.HTTPConnection(HOST, port)
        begun = taken(pid)
        for _ in range(LARGE_REQUESTS):
            connection.request("POST", "/", b"x" * LARGE_BYTES)
            connection.getresponse().read()
        return each, 1e3 * (taken(pid) - begun) / LARGE_REQUESTS


def main() -> None:
    """Measure in rounds, print a table, and with `--write` keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--requests", type=int, default=20_000, help="small ones of a round, at least"
    )
    parser.add_argument("--write", action="store_true", help="write docs/results/http-servers.md")
    options = parser.parse_args()
    names = [name for name in COMMANDS if importlib.util.find_spec(PACKAGES[name])]
    measured = {name: [] for name in names}
    for _ in range(options.rounds):
        for name in names:
            measured[name].append(measure(name, options.requests))
            print(name, measured[name][-1], flush=True)
    lines = [
        "# HTTP servers: processor time of a request",
        "",
        f"`python -m benchmarks.http_servers --rounds {options.rounds} --requests "
        f"{options.requests} --write`: "
        f"milliseconds of the server's processor time for a request of {SMALL_BYTES // 1000} kB "
        f"on {CONNECTIONS} "
        f"connections, and for one of {LARGE_BYTES // 1_000_000} MB; medians of the rounds and "
        "their range. The "
        "application reads the body and answers with its length.",
        "",
        "| server | 3 kB, ms | 2 MB, ms |",
        "|---|---|---|",
    ]
    for name in names:
        small, large = np.array(measured[name]).T
        package = f"{PACKAGES[name]} {version(PACKAGES[name])}"
        cells = (
            f"{np.median(part):.3f} ({part.min():.3f} to {part.max():.3f})"
            for part in (small, large)
        )
        lines.append(f"| {name} ({package}) | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        (RESULTS / "http-servers.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
