"""What Ray Serve costs: the service alone, and as two replicas behind Ray's proxies, in the same
rounds.

`python -m benchmarks.cluster [--rounds 7] [--seconds 3] [--write]` serves an untrained model of
MNIST's size by one process of one thread; by two worker processes of one thread; and by two
replicas of one thread on Ray, behind HAProxy and then behind Ray's own proxy. A client in this
process sends requests of one row and 100 draws, in turns to the service alone and to one of the
others:

* one after the other, for the time that an answer takes;
* from eight connections at once, for answers a second.

It needs Ray beside the rest: `make .venv-ray/installed`.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.load import closed_loop, post
from benchmarks.model import NAME, ROOT, publish_untrained
from benchmarks.options import RESULTS
from benchmarks.predict import server
from model_store.artifacts.store import ModelStore

PYTHON = ROOT / ".venv-ray" / "bin" / "python"
AT_ONCE = 8
OTHERS = ("two workers", "Ray with HAProxy", "Ray with its own proxy")
Figures = list[
    tuple[float, float, float, float]
]  # of rounds: p50 alone and other, rate alone and other


def main() -> None:
    """Measure and print a table; with `--write` keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="of each service in each round, twice"
    )
    parser.add_argument("--write", action="store_true", help="write docs/results/cluster.md")
    options = parser.parse_args()
    found: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        publish_untrained(ModelStore(store))
        one = {"DUBITO_THREADS": "1"}
        with server(store, **one) as alone:
            for name in OTHERS:
                with (
                    server(store, DUBITO_WORKERS="2", **one)
                    if name == "two workers"
                    else replicas(store, name) as other
                ):
                    port = other if isinstance(other, int) else other.port
                    found[name] = [
                        measured(alone.port, port, options.seconds) for _ in range(options.rounds)
                    ]
    text = table(found, options.rounds, options.seconds)
    print(text)
    if options.write:
        path = RESULTS / "cluster.md"
        kept = path.read_text().partition("\n## When something is lost")[2] if path.exists() else ""
        path.write_text(text + (f"\n## When something is lost{kept}" if kept else ""))


@contextmanager
def replicas(store: Path, name: str) -> Iterator[int]:
    """Run two replicas of one thread on Ray; yields their port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [str(PYTHON), "-m", "service", "cluster", "--replicas", "2", "--port", str(port)]
    environment = {
        **os.environ,
        "DUBITO_STORE": str(store),
        "DUBITO_DEFAULT_MODEL": NAME,
        "DUBITO_THREADS": "1",
    }
    process = subprocess.Popen(
        [*command, *(["--by-model"] if name == OTHERS[2] else [])],
        env=environment,
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5):
                    break
            except (OSError, urllib.error.HTTPError):
                time.sleep(0.3)
        time.sleep(5.0)  # until both are there
        yield port
    finally:
        process.terminate()
        process.wait()


def measured(alone: int, other: int, seconds: float) -> tuple[float, float, float, float]:
    """Return the median milliseconds of an answer, alone and other, and answers a second, alone and
    other."""
    body = json.dumps(
        {"inputs": np.random.default_rng(0).integers(0, 256, (1, 784)).tolist()}
    ).encode()
    request = [post("/predict", body)]
    figures = []
    for connections in (1, AT_ONCE):
        for port in (alone, other):
            load = closed_loop(port, request, connections, seconds, warm_up_s=0.5)
            assert set(load.counts) == {"200"}, load.counts
            figures.append(1e3 * load.percentile(50) if connections == 1 else load.rate)
    return figures[0], figures[1], figures[2], figures[3]


def table(found: dict[str, Figures], rounds: int, seconds: float) -> str:
    """Return the page."""
    lines = [
        "# Replicas on Ray Serve",
        "",
        f"`python -m benchmarks.cluster --rounds {rounds} --seconds {seconds:g} --write`; "
        "784-800-800-10, one row",
        f"and 100 draws, {os.cpu_count()} processors of the client and Ray. Median of rounds "
        "(least - most).",
        "More is what an answer takes beyond the service alone in the same round, one request "
        "after the other; times",
        f"is the rate of {AT_ONCE} connections over the service alone in the same round.",
        "",
        "| | p50, ms | alone, ms | more, ms | answers a second | alone | times |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        alone, other, rate_alone, rate = (list(column) for column in zip(*figures, strict=True))
        more = [b - a for a, b in zip(alone, other, strict=True)]
        times = [b / a for a, b in zip(rate_alone, rate, strict=True)]
        cells = [
            shown(other, 2),
            shown(alone, 2),
            shown(more, 2),
            shown(rate, 0),
            shown(rate_alone, 0),
            shown(times, 2),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def shown(values: list[float], digits: int) -> str:
    """Return the median, least and most of some figures."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
