"""Generate load on a local HTTP server, in an open or a closed loop.

    python -m benchmarks.load PORT PATH BODY_FILE --rate 200 [--poisson]      (open loop)
    python -m benchmarks.load PORT PATH BODY_FILE --connections 64            (closed loop)

An open loop sends requests at scheduled times. Latency is measured from the scheduled time, even if
no connection is free, so that a stall counts for all delayed requests (no coordinated omission). In
a closed loop, each connection sends its next request after the previous response.

The client is a single thread that uses epoll, with a resolution of microseconds. It parses only the
status and the end of a response.
"""

import argparse
import gc
import json
import re
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HOST = "127.0.0.1"
RETRY_S = 0.02  # after a refused connection
CLOSED, REFUSED, TIMEOUT = "closed", "refused", "timeout"  # outcomes without an HTTP status


@dataclass(frozen=True)
class Load:
    """Outcomes of the requests after the warm-up.

    Attributes:
        kinds: HTTP status, `closed`, `refused` or `timeout`.
        latencies_s: seconds from the scheduled time to the end of the response.
        rate: responses with status 200 per second, from the end of the warm-up to the last scheduled
            time.
    """

    kinds: list[str]
    latencies_s: np.ndarray
    rate: float

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(self.kinds))

    def of(self, kind: str) -> np.ndarray:
        """Return the latencies of one kind of outcome, in seconds."""
        return self.latencies_s[np.array(self.kinds, dtype=object) == kind]

    def percentile(self, percent: float, kind: str = "200") -> float:
        """Return a percentile of the latencies of one kind; NaN if there are none."""
        latencies = self.of(kind)
        return (
            float(np.quantile(latencies, percent / 100, method="inverted_cdf"))
            if len(latencies)
            else float("nan")
        )

    def summary(self) -> dict[str, object]:
        percentiles = {
            f"p{percent:g}_ms": 1e3 * self.percentile(percent) for percent in (50, 90, 99, 99.9)
        }
        return {"counts": self.counts, "rate": self.rate, **percentiles}


def arrival_times(rate: float, seconds: float, poisson: bool, seed: int = 0) -> np.ndarray:
    """Schedule requests in seconds from the start, evenly or as a Poisson process."""
    if not poisson:
        return np.arange(0.0, seconds, 1.0 / rate)
    generator = np.random.default_rng(seed)
    return np.sort(generator.uniform(0.0, seconds, generator.poisson(rate * seconds)))


def post(path: str, body: bytes, headers: str = "Content-Type: application/json\r\n") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\n{headers}Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def open_loop(
    port: int,
    requests: Sequence[bytes],
    rate: float,
    seconds: float,
    *,
    warm_up_s: float = 1.0,
    connections: int = 256,
    poisson: bool = True,
    timeout_s: float = 10.0,
    seed: int = 0,
    source: str = HOST,
) -> Load:
    """Send `rate` requests per second. Requests wait if all connections are busy."""
    times = arrival_times(rate, warm_up_s + seconds, poisson, seed)
    return _Run(port, requests, connections, timeout_s, source).open(times, warm_up_s, seconds)


def closed_loop(
    port: int,
    requests: Sequence[bytes],
    connections: int,
    seconds: float,
    *,
    warm_up_s: float = 1.0,
    timeout_s: float = 10.0,
    source: str = HOST,
) -> Load:
    """Keep one request in flight on each connection."""
    return _Run(port, requests, connections, timeout_s, source).closed(warm_up_s, seconds)


class _Connection:
    """A keep-alive connection with up to one request in flight."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.unsent = memoryview(b"")  # rest of the request
        self.is_watched = False  # epoll waits until the socket is writable
        self.content = bytearray()
        self.length: int | None = None  # of the complete response
        self.status = ""
        self.due = 0.0
        self.sent = 0.0
        self.busy = False

    def receive(self) -> str | None:
        assert self.socket is not None
        try:
            data = self.socket.recv(1 << 18)
        except OSError:
            return CLOSED
        if not data:
            return CLOSED
        self.content += data
        if not self.status:
            end = self.content.find(b"\r\n\r\n")
            if end < 0:
                return None
            head = bytes(self.content[:end])
            self.status = head[9:12].decode()
            match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            self.length = end + 4 + int(match[1]) if match else None
        completed = (
            self.content.endswith(b"\r\n0\r\n\r\n")
            if self.length is None
            else len(self.content) >= self.length
        )  # Responses without a length are chunked.
        return self.status if completed else None


class _Run:
    def __init__(
        self,
        port: int,
        requests: Sequence[bytes],
        connections: int,
        timeout_s: float,
        source: str,
    ) -> None:
        self.port = port
        self.source = source
        self.requests = requests
        self.timeout_s = timeout_s
        self.epoll = select.epoll()
        self.idle = [_Connection() for _ in range(connections)]  # used as a stack
        self.busy: dict[int, _Connection] = {}
        self.watched: dict[int, _Connection] = {}
        self.count = 0
        self.ends: list[tuple[float, float, str]] = []  # scheduled time, end time, outcome
        self.checked = 0.0

    def open(self, times: np.ndarray, warm_up_s: float, seconds: float) -> Load:
        with _no_garbage_collection():
            started_at = time.perf_counter()
            due, waiting = deque((times + started_at).tolist()), deque[float]()
            while due or waiting or self.busy:
                now = time.perf_counter()
                while due and due[0] <= now:
                    waiting.append(due.popleft())
                while waiting and self.idle:
                    self.send(self.idle.pop(), waiting.popleft())
                while waiting and waiting[0] + self.timeout_s < now:
                    self.ends.append((waiting.popleft(), now, TIMEOUT))
                self.wait(max(0.0, due[0] - time.perf_counter()) if due else 0.1)
        return self.load(started_at + warm_up_s, seconds)

    def closed(self, warm_up_s: float, seconds: float) -> Load:
        with _no_garbage_collection():
            started_at = time.perf_counter()
            stop = started_at + warm_up_s + seconds
            while (now := time.perf_counter()) < stop or self.busy:
                while now < stop and self.idle:
                    if self.send(self.idle.pop(), now) == REFUSED:
                        break
                self.wait(max(0.0, min(0.1, stop - now)) if now < stop else 0.1)
        return self.load(started_at + warm_up_s, seconds)

    def send(self, connection: _Connection, due: float) -> str | None:
        request = self.requests[self.count % len(self.requests)]
        self.count += 1
        try:
            if connection.socket is None:
                self.connect(connection)
        except OSError:
            time.sleep(RETRY_S)
            return self.end(connection, due, REFUSED)
        assert connection.socket is not None
        connection.due, connection.sent, connection.busy = due, time.perf_counter(), True
        connection.content.clear()
        connection.status, connection.length = "", None
        self.busy[connection.socket.fileno()] = connection
        connection.unsent = memoryview(request)
        return self.write(connection)

    def write(self, connection: _Connection) -> str | None:
        """Send as much of the request as the server accepts."""
        assert connection.socket is not None
        try:
            connection.unsent = connection.unsent[connection.socket.send(connection.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return self.end(connection, connection.due, CLOSED)
        if bool(connection.unsent) != connection.is_watched:
            connection.is_watched = bool(connection.unsent)
            events = select.EPOLLIN | (select.EPOLLOUT if connection.is_watched else 0)
            self.epoll.modify(connection.socket, events)
        return None

    def connect(self, connection: _Connection) -> None:
        opened = socket.create_connection(
            (HOST, self.port), timeout=self.timeout_s, source_address=(self.source, 0)
        )
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.socket = opened
        self.watched[opened.fileno()] = connection
        self.epoll.register(opened.fileno(), select.EPOLLIN)

    def wait(self, seconds: float) -> None:
        # epoll's own timeout has a resolution of milliseconds.
        select.select([self.epoll], [], [], seconds)
        for number, events in self.epoll.poll(0):
            connection = self.watched[number]
            if not events & ~select.EPOLLOUT:
                self.write(connection)
                continue
            how = connection.receive() if connection.busy else CLOSED
            if connection.busy and how is not None:
                self.end(connection, connection.due, how)
            elif how == CLOSED:  # The server closed an idle connection.
                self.disconnect(connection)
        now = time.perf_counter()
        if now - self.checked > 0.5:
            self.checked = now
            for connection in [c for c in self.busy.values() if c.sent + self.timeout_s < now]:
                self.end(connection, connection.due, TIMEOUT)

    def end(self, connection: _Connection, due: float, how: str) -> str:
        self.ends.append((due, time.perf_counter(), how))
        if connection.socket is not None:
            self.busy.pop(connection.socket.fileno(), None)
        connection.busy = False
        # After an early response, part of the request is unsent.
        if how in (CLOSED, TIMEOUT) or connection.unsent:
            self.disconnect(connection)
        self.idle.append(connection)
        return how

    def disconnect(self, connection: _Connection) -> None:
        if connection.socket is not None:
            del self.watched[connection.socket.fileno()]
            self.epoll.unregister(connection.socket.fileno())
            connection.socket.close()
            connection.socket, connection.is_watched = None, False

    def load(self, warm: float, seconds: float) -> Load:
        for connection in list(self.watched.values()):
            self.disconnect(connection)
        self.epoll.close()
        counted = [(ended - due, how) for due, ended, how in self.ends if due >= warm]
        good = sum(warm <= ended <= warm + seconds for _, ended, how in self.ends if how == "200")
        latencies = np.array([latency for latency, _ in counted], dtype=np.float64)
        return Load([how for _, how in counted], latencies, good / seconds)


class _no_garbage_collection:
    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("path")
    parser.add_argument("body", type=Path, help="a file with the JSON body of the request")
    parser.add_argument(
        "--rate", type=float, help="requests a second, open loop; without it closed loop"
    )
    parser.add_argument(
        "--poisson", action="store_true", help="a Poisson process instead of even times"
    )
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=1.0)
    options = parser.parse_args()
    requests = [post(options.path, options.body.read_bytes())]
    if options.rate is None:
        load = closed_loop(
            options.port, requests, options.connections, options.seconds, warm_up_s=options.warm_up
        )
    else:
        load = open_loop(
            options.port,
            requests,
            options.rate,
            options.seconds,
            warm_up_s=options.warm_up,
            connections=options.connections,
            poisson=options.poisson,
        )
    print(json.dumps(load.summary()))


if __name__ == "__main__":
    main()
