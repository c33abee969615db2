"""Send as many requests as possible from a local address.

    python -m tests.support.greedy PORT KIND ADDRESS

Prints a line after the first response, and runs until it is killed.
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
    """Send the largest npy pools on many connections."""
    content = npy_bytes(np.full((100_000, 64), 8, np.uint8))
    return 33, request(
        "POST", "/acquire?num_samples=100", content, content_type="application/x-npy"
    )


def json_pools():
    """Send large JSON pools one after the other."""
    return 1, request(
        "POST", "/acquire", b'{"pool":[' + b",".join([ROW] * 90_000) + b'],"num_samples":2}'
    )


def samples():
    """Request large responses one after the other."""
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
