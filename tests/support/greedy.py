"""A process that asks a service for as much as it can get, in one of several ways, from an address
of its own.

    python -m tests.support.greedy PORT KIND ADDRESS

It prints a line once it has been answered or refused, and goes on until it is killed.
"""

import sys
import threading
import time

import numpy as np

from tests.support.files import npy_bytes
from tests.support.raw import Connection, Ended, request

ROW = b"[" + b",".join([b"8"] * 64) + b"]"
REST_S = 0.05


def pools():
    """The largest pools as arrays, from many connections."""
    content = npy_bytes(np.full((100_000, 64), 8, np.uint8))
    return 33, request(
        "POST", "/acquire?num_samples=100", content, content_type="application/x-npy"
    )


def json_pools():
    """Large pools as JSON, one after the other."""
    return 1, request(
        "POST", "/acquire", b'{"pool":[' + b",".join([ROW] * 90_000) + b'],"num_samples":2}'
    )


def samples():
    """Large answers, one after the other."""
    return 1, request(
        "POST",
        "/predict",
        b'{"inputs":[' + b",".join([ROW] * 4000) + b'],"num_samples":100,"return_samples":true}',
    )


KINDS = {kind.__name__: kind for kind in (pools, json_pools, samples)}


def main():
    port, kind, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    connections, content = KINDS[kind]()

    def ask():
        while True:
            try:
                with Connection(port, 120.0, source=address) as connection:
                    while True:
                        status = connection.ask(content).status
                        print(status, flush=True)
                        time.sleep(0.0 if status == 200 else REST_S)
            except (Ended, OSError):
                time.sleep(REST_S)

    threads = [threading.Thread(target=ask) for _ in range(connections)]
    for thread in threads:
        thread.start()


if __name__ == "__main__":
    main()
