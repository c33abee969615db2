"""Concurrent clients that compare each response with its reference, byte for byte."""

import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.raw import Connection, Ended, request

MOST_KEPT = 300  # answers under fresh draws, to be asked for again
RETRY_S = 0.02  # before a new connection where the last failed


@dataclass(frozen=True)
class Reference:
    """A request with a seed, and its response by one version."""

    content: dict
    expected: bytes

    def bytes(self, **fields):
        """Return the request as bytes, with additional fields."""
        return request("POST", "/predict", json.dumps({**self.content, **fields}).encode())


def references(port, rows, count=40, **fields):
    """Create requests with different rows, draws and seeds, with the responses of an idle service."""
    created, chooser = [], random.Random(0)
    with Connection(port) as connection:
        for seed in range(count):
            size = chooser.choice((1, 1, 2, 5, 16))
            start = chooser.randrange(len(rows) - size)
            content = {"inputs": rows[start : start + size].astype(int).tolist(), **fields}
            content["num_samples"] = chooser.choice((20, 100))
            content["seed"] = seed
            answer = connection.ask(Reference(content, b"").bytes())
            assert answer.status == 200, answer
            created.append(Reference(content, answer.body))
    assert len({reference.expected for reference in created}) == count
    return created


@dataclass
class Told:
    """Counts of correct responses, other statuses and closed connections."""

    right: int = 0
    hung_up: int = 0
    statuses: Counter = field(default_factory=Counter)
    ended: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    fresh: list[tuple[Reference, bytes]] = field(default_factory=list)
    right_at: list[float] = field(default_factory=list)


class Crowd:
    """Clients that send requests on keep-alive connections until the block ends.

    Some clients disconnect at a random moment. Some omit the seed; `replayed` repeats their requests
    with the seed in the response.
    """

    def __init__(self, port, references, clients=8, hang_up=0.0, fresh=0.2, until_closed=False):
        self.port, self.references, self.hang_up, self.fresh = port, references, hang_up, fresh
        self.until_closed = until_closed
        self.told = [Told() for _ in range(clients)]
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self._ask, args=(i, output))
            for i, output in enumerate(self.told)
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
    def right(self):
        """Number of correct responses so far."""
        return sum(output.right for output in self.told)

    def totals(self):
        full = Told()
        for output in self.told:
            for name, value in vars(output).items():
                setattr(full, name, getattr(full, name) + value)
        full.right_at.sort()
        return full

    def _ask(self, number, told):
        chooser, connection = random.Random(number), None
        while not self.stop.is_set():
            if connection is None:
                try:
                    connection = Connection(self.port, timeout_s=60.0)
                except OSError:
                    told.refused += 1
                    if self.until_closed:
                        return
                    time.sleep(RETRY_S)
                    continue
            reference = chooser.choice(self.references)
            if chooser.random() < self.hang_up:
                _hang_up(connection, reference.bytes(), chooser)
                told.hung_up += 1
                connection = None
                continue
            is_fresh = chooser.random() < self.fresh
            try:
                answer = connection.ask(
                    reference.bytes(seed=None) if is_fresh else reference.bytes()
                )
            except (Ended, OSError) as error:
                told.ended += 1
                if isinstance(error, TimeoutError):
                    told.wrong.append("no answer and no end")
                connection.close()
                connection = None
                continue
            told.statuses[answer.status] += 1
            if answer.status == 200:
                told.right_at.append(time.monotonic())
                if is_fresh:
                    if len(told.fresh) < MOST_KEPT:
                        told.fresh.append((reference, answer.body))
                elif answer.body == reference.expected:
                    told.right += 1
                else:
                    told.wrong.append(
                        f"{answer.body[:300]!r} in place of {reference.expected[:300]!r}"
                    )
            if answer.closes:
                connection.close()
                connection = None
                if self.until_closed:
                    return
        if connection is not None:
            connection.close()


def replayed(port, told, most=200):
    """Count responses with fresh draws that are identical when replayed."""
    with Connection(port) as connection:
        for reference, body in told.fresh[:most]:
            again = connection.ask(reference.bytes(seed=json.loads(body)["seed"]))
            assert again.body == body, (again.body[:300], body[:300])
    return len(told.fresh[:most])


def _hang_up(connection, content, chooser):
    """Send a request partly or completely, wait briefly, and disconnect."""
    cut = chooser.choice((chooser.randrange(len(content)), len(content)))
    try:
        connection.send(content[:cut])
        time.sleep(chooser.choice((0.0, 0.001, 0.005, 0.02, 0.06)) * chooser.random())
        if chooser.random() < 0.3:
            connection.socket.settimeout(0.01)
            connection.socket.recv(100)
    except (Ended, OSError):
        pass
    if chooser.random() < 0.5:
        connection.reset()
    else:
        connection.close()


def reference_answers(serve, store, rows):
    """Send requests to an idle service, and return them with their responses."""
    with serve(store) as (url, _):
        return references(urlsplit(url).port, rows)
