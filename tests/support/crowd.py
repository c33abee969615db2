"""Concurrent clients that compare each response with its reference, byte for byte."""

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.raw import Connection, ConnectionClosed, request

MAX_FRESH = 300  # responses with fresh draws to replay
RETRY_S = 0.02  # after a failed connection


@dataclass(frozen=True)
class Reference:
    """A request with a seed, and its response by one version."""

    content: dict
    expected: bytes

    def bytes(self, **fields):
        """Encode the request with additional fields."""
        return request("POST", "/predict", json.dumps({**self.content, **fields}).encode())


def references(port, rows, count=40, **fields):
    """Create requests with different rows, draws and seeds, with the responses of an idle service."""
    created, rng = [], random.Random(0)
    with Connection(port) as connection:
        for seed in range(count):
            size = rng.choice((1, 1, 2, 5, 16))
            start = rng.randrange(len(rows) - size)
            content = {"inputs": rows[start : start + size].astype(int).tolist(), **fields}
            content["num_samples"] = rng.choice((20, 100))
            content["seed"] = seed
            answer = connection.ask(Reference(content, b"").bytes())
            assert answer.status == 200, answer
            created.append(Reference(content, answer.body))
    assert len({reference.expected for reference in created}) == count
    return created


@dataclass
class Tally:
    """Counts of correct responses, other statuses and closed connections."""

    correct: int = 0
    disconnects: int = 0
    statuses: Counter = field(default_factory=Counter)
    closed: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    fresh: list[tuple[Reference, bytes]] = field(default_factory=list)
    correct_at: list[float] = field(default_factory=list)


class Crowd:
    """Clients that send requests on keep-alive connections until the block ends.

    Some clients disconnect at a random moment. Some omit the seed; `count_replayed` repeats their
    requests with the seed of the response.
    """

    def __init__(self, port, references, clients=8, hang_up=0.0, fresh=0.2, until_closed=False):
        self.port, self.references, self.hang_up, self.fresh = port, references, hang_up, fresh
        self.until_closed = until_closed
        self.tallies = [Tally() for _ in range(clients)]
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self._send, args=(i, tally))
            for i, tally in enumerate(self.tallies)
        ]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join()

    @property
    def correct(self):
        """Return the number of correct responses."""
        return sum(tally.correct for tally in self.tallies)

    def totals(self):
        total = Tally()
        for tally in self.tallies:
            for name, value in vars(tally).items():
                setattr(total, name, getattr(total, name) + value)
        total.correct_at.sort()
        return total

    def _send(self, number, tally):
        rng, connection = random.Random(number), None
        while not self.stop.is_set():
            if connection is None:
                try:
                    connection = Connection(self.port, timeout_s=60.0)
                except OSError:
                    tally.refused += 1
                    if self.until_closed:
                        return
                    time.sleep(RETRY_S)
                    continue
            reference = rng.choice(self.references)
            if rng.random() < self.hang_up:
                _hang_up(connection, reference.bytes(), rng)
                tally.disconnects += 1
                connection = None
                continue
            is_fresh = rng.random() < self.fresh
            try:
                answer = connection.ask(
                    reference.bytes(seed=None) if is_fresh else reference.bytes()
                )
            except (ConnectionClosed, OSError) as error:
                tally.closed += 1
                if isinstance(error, TimeoutError):
                    tally.wrong.append("no response and no disconnect")
                connection.close()
                connection = None
                continue
            tally.statuses[answer.status] += 1
            if answer.status == 200:
                tally.correct_at.append(time.monotonic())
                if is_fresh:
                    if len(tally.fresh) < MAX_FRESH:
                        tally.fresh.append((reference, answer.body))
                elif answer.body == reference.expected:
                    tally.correct += 1
                else:
                    tally.wrong.append(
                        f"{answer.body[:300]!r} instead of {reference.expected[:300]!r}"
                    )
            if answer.closes:
                connection.close()
                connection = None
                if self.until_closed:
                    return
        if connection is not None:
            connection.close()


def count_replayed(port, tally, max_count=200):
    """Count responses with fresh draws that are identical when replayed."""
    with Connection(port) as connection:
        for reference, body in tally.fresh[:max_count]:
            again = connection.ask(reference.bytes(seed=json.loads(body)["seed"]))
            assert again.body == body, (again.body[:300], body[:300])
    return len(tally.fresh[:max_count])


def _hang_up(connection, content, rng):
    """Send a request partly or completely, wait briefly, and disconnect."""
    cut = rng.choice((rng.randrange(len(content)), len(content)))
    try:
        connection.send(content[:cut])
        time.sleep(rng.choice((0.0, 0.001, 0.005, 0.02, 0.06)) * rng.random())
        if rng.random() < 0.3:
            connection.socket.settimeout(0.01)
            connection.socket.recv(100)
    except (ConnectionClosed, OSError):
        pass
    if rng.random() < 0.5:
        connection.reset()
    else:
        connection.close()


def reference_answers(serve, store, rows):
    """Send requests to an idle service, and return them with their responses."""
    with serve(store) as (url, _):
        return references(urlsplit(url).port, rows)
