"""Run the service in a separate process."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.support.environment import ROOT, environment_with
from tests.support.forking import ForkedService
from tests.support.ports import free_port

FAST_POLLING = {
    "DUBITO_POLL_INTERVAL_S": "0.05",
    "DUBITO_THREADS": "1",
}

WITHOUT_PREFLIGHTS = {"DUBITO_PREFLIGHT_TIMEOUT_S": "0"}
WITH_PREFLIGHTS = {"DUBITO_PREFLIGHT_TIMEOUT_S": "30"}


@contextmanager
def serving(
    store: Path,
    limits: Mapping[str, float] | None = None,
    **settings: str,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `python -m service` on a free local port, and wait until it is live.

    Args:
        limits: values of constants in `service.limits`, by name.
    """
    port = free_port()
    custom = TemporaryDirectory(prefix="state-")
    basics = {
        "DUBITO_STORE": str(store),
        "DUBITO_PORT": str(port),
        "DUBITO_SHUTDOWN_GRACE_S": "0",
        **WITHOUT_PREFLIGHTS,
    }
    environment = environment_with(**basics | {"DUBITO_STATE": custom.name} | settings)
    if limits or any(not name.startswith("DUBITO_") for name in settings):
        process = start(environment, limits or {})
    else:
        process = ForkedService(environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: process.poll() is not None or is_responding(f"{url}/health/live"))
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        yield url, process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        custom.cleanup()


def start(environment: dict[str, str], limits: Mapping[str, float]) -> subprocess.Popen[str]:
    """Start a new interpreter, because imports and the start of Python read these values."""
    changes = "".join(f"limits.{name} = {value}; " for name, value in limits.items())
    run = "from service.__main__ import main; raise SystemExit(main([]))"
    command = [sys.executable, "-c", f"from service import limits; {changes}{run}"]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)


@contextmanager
def open_client(
    store: Path,
    headers: Mapping[str, str] | None = None,
    limits: Mapping[str, float] | None = None,
    **settings: str,
) -> Iterator[httpx.Client]:
    """Run a service and yield a client. See `serving`."""
    with (
        serving(store, limits=limits, **settings) as (url, _),
        httpx.Client(base_url=url, timeout=60, headers=headers) as client,
    ):
        yield client


def is_responding(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until a condition is true, or fail."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def predict_blank(client: httpx.Client, **fields: object) -> httpx.Response:
    """Predict one blank digit and return the response."""
    return client.post("/predict", json={"inputs": [[0.0] * 64], **fields})


def metric(text: str, name: str, **labels: str) -> float:
    """Return the value of a Prometheus sample, or 0."""
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")) == labels:
            return float(match[2])
    return 0.0
