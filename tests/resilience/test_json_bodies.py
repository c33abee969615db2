"""Whatever JSON comes, by whatever route: no 5xx, within the budget of memory, and health goes on."""

import itertools
import json
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from service.app import create_app
from service.settings import Settings
from tests.support.json_bodies import ROUTES, bodies
from tests.support.raw import Connection, Ended, request

BUDGET = 128 << 20
GROWTH = 64 << 20  # beyond the budget: what the allocator and the system's buffers add
LONGEST_S = 0.1  # that health may take
OF_FILES = {"/acquire/preview"}  # and no JSON
WITHOUT_BODY = {"/jobs/{job}/cancel"}


@pytest.fixture(scope="module")
def service(digits_store, tmp_path_factory):
    from tests.support.serving import serving

    settings = {
        "DUBITO_MEMORY_BUDGET_BYTES": str(BUDGET),
        "DUBITO_STATE": str(tmp_path_factory.mktemp("state")),
        "DUBITO_JOBS_AT_ONCE": "0",
        "DUBITO_LOG_LEVEL": "error",
    }
    with serving(digits_store, **settings) as (url, process):
        yield int(url.rpartition(":")[2]), process.pid


class Health:
    """Asks for health all the time. What the machine gave to others is not counted: a silence is as
    long as the service worked meanwhile."""

    def __init__(self, port, pid):
        self.port, self.pid, self.longest_s = port, pid, 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ending.set()
        self._thread.join()

    def _ask(self):
        with Connection(self.port) as connection:
            while not self._ending.wait(0.002):
                begun, worked = time.monotonic(), self._worked_s()
                assert connection.ask(request("GET", "/health/live")).status == 200
                passed = time.monotonic() - begun
                self.longest_s = max(self.longest_s, min(passed, self._worked_s() - worked))

    def _worked_s(self):
        """Processor time of all threads, which the system tells in nanoseconds."""
        found = 0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with suppress(OSError):  # it has ended
                found += int((thread / "schedstat").read_text().split()[0])
        return found / 1e9


def kilobytes(pid, name):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def send(port, cases, statuses, wrong):
    connection = Connection(port)
    for route, body in cases:
        try:
            answer = connection.ask(request("POST", route, body))
        except Ended:  # a refusal that the rest of the body was on its way to
            connection.close()
            connection = Connection(port)
            statuses["ended"] += 1
            continue
        statuses[answer.status] += 1
        if answer.status >= 500:
            wrong.append((route, answer.status, answer.body[:200], body[:200]))
        if answer.closes:
            connection.close()
            connection = Connection(port)
    connection.close()


def hold(service, count, seed, clients=1):
    """Send bodies of several clients, and assert what holds whatever they are."""
    port, pid = service
    with Connection(port) as connection:  # what stays of the first requests is not growth
        for route, body in ROUTES.items():
            connection.ask(request("POST", route, json.dumps(body).encode()))
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is what there is now
    before, statuses, wrong = kilobytes(pid, "VmRSS"), Counter(), []
    with Health(port, pid) as health:
        threads = [
            threading.Thread(
                target=send,
                args=(port, itertools.islice(bodies(seed + i), count // clients), statuses, wrong),
            )
            for i in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    grown = 1024 * (kilobytes(pid, "VmHWM") - before)
    assert not wrong, wrong[:3]
    assert sum(statuses.values()) == count // clients * clients
    assert grown < BUDGET + GROWTH
    assert health.longest_s < LONGEST_S


def test_every_route_with_a_json_body_is_tried():
    templates = {
        route.path
        for route in create_app(Settings(state=None)).state.routes
        if "POST" in route.methods
    }
    tried = {
        route.replace("digits", "{name}").replace("versions/1", "versions/{version}")
        for route in ROUTES
    }
    assert templates == tried | OF_FILES | WITHOUT_BODY


def test_whatever_json_comes_is_answered_in_bounds(service):
    hold(service, 150, seed=1)


@pytest.mark.slow
def test_ten_thousand_bodies_are_answered_in_bounds(service):
    for seed in range(100, 110):
        hold(service, 1000, seed=seed, clients=2)
