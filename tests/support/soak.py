"""All kinds of requests for a long time, and what the service's process holds before and after."""

import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from tests.support.files import npy_bytes
from tests.support.fuzz import json_bodies
from tests.support.process import open_files, pss_bytes, settled, threads
from tests.support.raw import Connection, Ended, request

CLIENTS = 4
INTENDED = {503, 504}


@dataclass(frozen=True)
class Held:
    """What a process holds while nothing is asked of it."""

    pss_bytes: int
    threads: int
    open_files: int


@dataclass(frozen=True)
class Soak:
    """What was held after the warm-up and at the end, and how the requests between ended."""

    before: Held
    after: Held
    statuses: Counter
    failures: list[str]

    @property
    def growth(self):
        """The memory at the end over that after the warm-up."""
        return self.after.pss_bytes / self.before.pss_bytes

    def __str__(self):
        counts = ", ".join(
            f"{status}: {count:,}" for status, count in sorted(self.statuses.items())
        )
        before, after = self.before, self.after
        return (
            f"answers {counts}, {len(self.failures)} failures; memory "
            f"{before.pss_bytes / 2**20:.0f} MB after "
            f"warm-up, {after.pss_bytes / 2**20:.0f} MB at the end "
            f"({100 * (self.growth - 1):+.1f} %); threads "
            f"{before.threads} and {after.threads}, open files {before.open_files} and "
            f"{after.open_files}"
        )


def soak(port, pid, rows, seconds):
    """Ask for a third of the time to warm up, then for the rest."""
    warm_up = load(port, rows, seconds / 3, seed=0)
    before = held(pid)
    statuses, failures = load(port, rows, 2 * seconds / 3, seed=1)
    return Soak(before, held(pid), warm_up[0] + statuses, warm_up[1] + failures)


def held(pid):
    """What a process holds once it has come to rest: connections ended, idle work done."""
    files = settled(lambda: open_files(pid))
    settled(lambda: threads(pid))
    time.sleep(2.0)  # draws are made ahead, freed memory is given back
    return Held(pss_bytes(pid), threads(pid), files)


def load(port, rows, seconds, seed):
    """Ask from several clients; return statuses and what failed."""
    found = [(Counter(), []) for _ in range(CLIENTS)]
    end = time.monotonic() + seconds
    asking = [
        threading.Thread(target=_ask, args=(port, rows, end, f"{seed}.{i}", *found[i]))
        for i in range(CLIENTS)
    ]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    return sum((statuses for statuses, _ in found), Counter()), list(
        itertools.chain(*(f for _, f in found))
    )


def _ask(port, rows, end, seed, statuses, failures):
    chooser, bad = random.Random(seed), json_bodies(seed, max_bytes=1000)
    connection = Connection(port)
    while time.monotonic() < end:
        good, content = _request(chooser, rows, bad)
        try:
            if content is None:  # hang up, and come again
                connection.send(_predict(chooser, rows)[:-1])
                connection.reset()
                connection = Connection(port)
                continue
            answer = connection.ask(content)
        except (Ended, OSError) as error:
            failures.append(f"{type(error).__name__} {error} after {content and content[:200]!r}")
            connection.close()
            connection = Connection(port)
            continue
        statuses[answer.status] += 1
        if (good and answer.status != 200) or (
            answer.status >= 500 and answer.status not in INTENDED
        ):
            failures.append(f"{answer.status} {answer.body[:200]!r} to {content[:200]!r}")
        if answer.closes:
            connection.close()
            connection = Connection(port)
    connection.close()


def _request(chooser, rows, bad):
    """Whether a request is good, and its bytes; None in place of one whose client hangs up."""
    kind = chooser.random()
    if kind < 0.55:
        return True, _predict(chooser, rows)
    if kind < 0.65:
        content = npy_bytes(_some(chooser, rows, 32).astype(np.uint8))
        accept = [("Accept", "application/x-npz")] if chooser.random() < 0.5 else []
        query = "" if chooser.random() < 0.5 else "?seed=7&return_samples=true"
        return True, request("POST", "/predict" + query, content, accept, "application/x-npy")
    if kind < 0.72:
        content = {
            "pool": _some(chooser, rows, 300).astype(int).tolist(),
            "k": chooser.randrange(1, 20),
        }
        return True, request("POST", "/acquire", json.dumps(content).encode())
    if kind < 0.85:
        return True, request(
            "GET",
            chooser.choice(
                ("/models", "/models/digits", "/metrics", "/health/ready", "/openapi.json")
            ),
        )
    if kind < 0.98:
        route, body = next(bad)
        return False, request("POST", route, body)
    return True, None


def _predict(chooser, rows):
    content = {"inputs": _some(chooser, rows, 32).astype(int).tolist()}
    content |= chooser.choice(
        ({}, {"seed": chooser.randrange(1000)}, {"num_samples": chooser.choice((1, 20, 200))})
    )
    content |= chooser.choice(
        ({}, {"fdr": 0.1}, {"return_samples": True}, {"risk": 0.1, "coverage": 0.8})
    )
    return request("POST", "/predict", json.dumps(content).encode())


def _some(chooser, rows, most):
    start = chooser.randrange(len(rows) - 1)
    return rows[start : start + chooser.randrange(1, most + 1)]
