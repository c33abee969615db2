"""Ray clusters with replicas of the service, and load with known responses."""

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx

from tests.support.environment import ROOT, environment_with
from tests.support.ports import free_port
from tests.support.serving import WITHOUT_PREFLIGHTS, is_responding, wait_until

PYTHON = ROOT / ".venv-ray" / "bin" / "python"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}


@contextmanager
def nodes(*cpus: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start Ray nodes. Yields the cluster's address and the process of `ray_nodes.py`."""
    command = [str(PYTHON), str(ROOT / "tests" / "support" / "ray_nodes.py"), *map(str, cpus)]
    process = subprocess.Popen(
        command,
        env={**environment_with(), **QUIET, "RAY_SERVE_ENABLE_HA_PROXY": "0"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send_command(process: subprocess.Popen[str], command: str) -> None:
    """Kill or add nodes, and wait for completion."""
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write(f"{command}\n")
    process.stdin.flush()
    while (line := process.stdout.readline()) != "done\n":
        assert line, "ray_nodes.py has ended"


@contextmanager
def cluster(
    store: Path, folder: Path, options: Sequence[str] = (), **settings: str
) -> Iterator[tuple[str, Path]]:
    """Run `python -m service cluster`. Yields its URL and its log file."""
    port, log = free_port(), folder / "cluster.log"
    basics = {
        "DUBITO_STORE": str(store),
        "DUBITO_STATE": str(folder / "state"),
        "DUBITO_SHUTDOWN_GRACE_S": "0",
    }
    environment = {**environment_with(**basics, **WITHOUT_PREFLIGHTS, **settings), **QUIET}
    with log.open("w") as file:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "service", "cluster", "--port", str(port), *options],
            env=environment,
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or is_responding(f"{url}/health/ready"), 300)
        assert process.poll() is None, log.read_text()
        yield url, log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def replicas() -> list[int]:
    """Return the process ids of all local replicas."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"ray::ServeReplica:dubito:Replica" in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return sorted(pids)


@dataclass
class Load:
    """Threads that send requests continuously and verify each response."""

    url: str
    expected: dict[str, list[tuple[dict[str, object], bytes]]]
    threads: int = 4
    statuses: Counter[str] = field(default_factory=Counter)
    correct: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    retry_after: set[str] = field(default_factory=set)
    refusals: dict[str, str] = field(default_factory=dict)  # latest error by status

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(n,)) for n in range(self.threads)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self, first: int) -> None:
        versions = list(self.expected)
        number = first
        while not self._stop.is_set():
            number = (number + self.threads) % len(self.expected[versions[0]])
            request = self.expected[versions[0]][number][0]
            try:
                answer = httpx.post(f"{self.url}/predict", json=request, timeout=20)
            except httpx.HTTPError as error:
                self.statuses[type(error).__name__] += 1
                time.sleep(0.02)
                continue
            self.statuses[str(answer.status_code)] += 1
            if answer.status_code != 200:
                self.refusals[str(answer.status_code)] = answer.text[:300]
                self.retry_after.add(answer.headers.get("retry-after", ""))
                time.sleep(0.02)
                continue
            version = answer.json()["version"]
            if version in self.expected and answer.content == self.expected[version][number][1]:
                self.correct.append((time.monotonic(), version))
            else:
                self.wrong.append(answer.text[:200])

    def wait_for(self, count: int, seconds: float = 60) -> None:
        """Wait for more correct responses."""
        target = len(self.correct) + count
        wait_until(lambda: len(self.correct) >= target, seconds)

    def longest_pause_s(self, since: float) -> float:
        """Return the longest time without a correct response."""
        times = [since, *(received_at for received_at, _ in self.correct if received_at >= since)]
        return max((b - a for a, b in pairwise(times)), default=float("inf"))


def get_expected_answers(
    url: str, rows: Sequence[Sequence[float]], **fields: object
) -> list[tuple[dict[str, object], bytes]]:
    requests = [
        {"inputs": [list(map(float, row))], "seed": seed, **fields} for seed, row in enumerate(rows)
    ]
    with httpx.Client(base_url=url, timeout=60) as client:
        return [(request, client.post("/predict", json=request).content) for request in requests]
