"""Flood a service from a local address, with a low priority.

    python -m tests.support.greedy PORT KIND ADDRESS SECONDS

Prints the responses by status, and the processor time in seconds.
"""

import json
import os
import sys
import time
from contextlib import suppress

import numpy as np

from benchmarks.load import closed_loop
from tests.support.files import npy_bytes
from tests.support.raw import Connection, request

ROW = b"[" + b",".join([b"8"] * 64) + b"]"
BODY = b'{"inputs":[' + ROW + b"]}"
PIPELINES, PIPELINE_LENGTH = 150, 2000


def rows():
    """Send one-row requests."""
    return 64, request("POST", "/predict", BODY)


def connections():
    """Send one-row requests on many connections."""
    return 600, request("POST", "/predict", BODY)


def wrong_keys():
    """Send one-row requests with an unknown key."""
    return 600, request("POST", "/predict", BODY, headers=[("X-API-Key", "unknown-key-0123456789")])


def documents():
    return 64, request("GET", "/openapi.json")


def pools():
    """Send the largest npy pools."""
    content = npy_bytes(np.full((100_000, 64), 8, np.uint8))
    return 33, request(
        "POST", "/acquire?num_samples=100", content, content_type="application/x-npy"
    )


def json_pools():
    """Send large JSON pools sequentially."""
    return 1, request(
        "POST", "/acquire", b'{"pool":[' + b",".join([ROW] * 90_000) + b'],"num_samples":2}'
    )


def samples():
    """Request large responses sequentially."""
    return 1, request(
        "POST",
        "/predict",
        b'{"inputs":[' + b",".join([ROW] * 4000) + b'],"num_samples":100,"return_samples":true}',
    )


def pages(port, address, seconds):
    """Pipeline requests for the page without reading the responses."""
    content = request("GET", "/") * PIPELINE_LENGTH
    end = time.monotonic() + seconds
    unsent = {Connection(port, source=address): memoryview(content) for _ in range(PIPELINES)}
    for connection in unsent:
        connection.socket.setblocking(False)
    while time.monotonic() < end:
        for connection, remaining in unsent.items():
            with suppress(OSError):
                unsent[connection] = remaining[connection.socket.send(remaining) :]
        time.sleep(0.05)


KINDS = (rows, connections, wrong_keys, documents, pools, json_pools, samples)
LOOPS = {kind.__name__: kind for kind in KINDS}


def main():
    port, kind, address, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
    os.nice(10)
    counts = {}
    if kind == pages.__name__:
        pages(port, address, seconds)
    else:
        connections, content = LOOPS[kind]()
        counts = closed_loop(
            port, [content], connections, seconds, source=address, timeout_s=5.0, warm_up_s=0.0
        ).counts
    print(json.dumps([counts, time.process_time()]))


if __name__ == "__main__":
    main()
