"""Overload a service and measure its behaviour."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.load import Load, closed_loop, open_loop, post
from tests.support.environment import ROOT

FACTOR = 10
CLOSED_CONNECTIONS = 32
OPEN_CONNECTIONS = 256


@dataclass(frozen=True)
class Overload:
    """Measurements of one run.

    Attributes:
        capacity: responses per second in a closed loop; maximum of three rounds.
        unloaded: open loop at a tenth of the capacity.
        loaded: open loop at ten times the capacity.
        health_s: latencies of /health/live during the overload, from a separate process.
        health_statuses, predicted: responses to that process by status.
        without_retry_after: responses with 429 and no valid `Retry-After`.
    """

    capacity: float
    unloaded: Load
    loaded: Load
    health_s: np.ndarray
    health_statuses: dict[str, int]
    predicted: dict[str, int]
    without_retry_after: int

    @property
    def goodput(self):
        return self.loaded.rate / self.capacity

    @property
    def slowdown(self):
        return self.loaded.percentile(99) / self.unloaded.percentile(99)

    def __str__(self):
        unloaded, loaded = self.unloaded, self.loaded
        return (
            f"capacity {self.capacity:.0f}/s; unloaded {_milliseconds(unloaded)}; at {FACTOR} "
            "times the capacity "
            f"{loaded.counts} of {len(loaded.kinds):,}, goodput {self.goodput:.2f} of capacity, "
            "accepted "
            f"{_milliseconds(loaded)}: {self.slowdown:.1f} times unloaded; refused "
            f"{_milliseconds(loaded, '429')}; "
            f"/health/live p50 {1e3 * np.median(self.health_s):.1f} ms, p99 "
            f"{1e3 * np.quantile(self.health_s, 0.99):.1f} ms, at most "
            f"{1e3 * self.health_s.max():.1f} ms"
        )


def _milliseconds(load, kind="200"):
    return f"p50 {1e3 * load.percentile(50, kind):.1f} ms, p99 {1e3 * load.percentile(99, kind):.1f} ms"


def overload(port, body, seconds, folder):
    """Measure the capacity and the unloaded latency, then overload the service for `seconds`."""
    requests, file = [post("/predict", body)], folder / "body.json"
    file.write_bytes(body)
    round_s = min(10.0, max(0.5, seconds / 6))
    capacity = max(
        closed_loop(port, requests, CLOSED_CONNECTIONS, round_s, warm_up_s=0.5).rate
        for _ in range(3)
    )
    time.sleep(1.5)
    unloaded = open_loop(port, requests, capacity / 10, 3 * round_s, connections=OPEN_CONNECTIONS)
    with run_probe(port, 1.0 + seconds, file) as probe:
        loaded = open_loop(
            port, requests, FACTOR * capacity, seconds, connections=OPEN_CONNECTIONS, timeout_s=30.0
        )
    return Overload(
        capacity,
        unloaded,
        loaded,
        np.array(probe["latencies_s"]),
        probe["health"],
        probe["predicted"],
        probe["without"],
    )


@contextmanager
def run_probe(port, seconds, file):
    """Run `tests.support.probe` during a block. Its output is in the mapping afterwards."""
    command = [sys.executable, "-m", "tests.support.probe", str(port), str(seconds), str(file)]
    probe = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    results = {}
    try:
        yield results
        results.update(json.loads(probe.communicate(timeout=60)[0]))
    finally:
        probe.kill()
        probe.communicate()
