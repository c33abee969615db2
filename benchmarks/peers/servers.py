"""Install, start and stop the servers of the comparison."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.load import HOST
from benchmarks.peers.posterior import DRAWS

FOLDER = Path(__file__).parent
READY_S = 180.0


@dataclass(frozen=True)
class Peer:
    """A server: its start command, and the format of requests and responses."""

    name: str
    package: str  # also the name of its folder
    command: Callable[[int], list[str]]
    path: str = "/predict"
    body: Callable[[list[int]], Any] = lambda row: {"inputs": [row]}
    probabilities: Callable[[Any], list[float]] = lambda answer: answer["probabilities"][0]
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return FOLDER / self.package

    @property
    def title(self) -> str:
        pins = (self.folder / "requirements.txt").read_text().splitlines()
        (version,) = [pin.split("==")[1] for pin in pins if pin.startswith(f"{self.package}==")]
        return f"{self.name} {version}"


@dataclass(frozen=True)
class Contender:
    """A server with its prediction method."""

    title: str
    way: str
    peer: Peer
    environment: dict[str, str]
    command: Callable[[int], list[str]]


def python(peer: str) -> str:
    return str(FOLDER / peer / ".venv" / "bin" / "python")


def mlserver_command(_: int) -> list[str]:
    return [
        str(FOLDER / "mlserver" / ".venv" / "bin" / "mlserver"),
        "start",
        str(FOLDER / "mlserver" / "model"),
    ]


def bentoml_command(port: int) -> list[str]:
    options = ["--host", HOST, "--port", str(port)]
    return [
        python("bentoml"),
        "-m",
        "bentoml",
        "serve",
        "benchmarks.peers.bentoml.server:Classifier",
        *options,
    ]


PEERS = (
    Peer(
        "FastAPI", "fastapi", lambda _: [python("fastapi"), "-m", "benchmarks.peers.fastapi.server"]
    ),
    Peer(
        "LitServe",
        "litserve",
        lambda _: [python("litserve"), "-m", "benchmarks.peers.litserve.server"],
    ),
    Peer("BentoML", "bentoml", bentoml_command, probabilities=lambda answer: answer[0]),
    Peer(
        "MLServer",
        "mlserver",
        mlserver_command,
        path="/v2/models/mnist/infer",
        body=lambda row: {
            "inputs": [{"name": "inputs", "shape": [1, len(row)], "datatype": "FP32", "data": row}]
        },
        probabilities=lambda answer: answer["outputs"][0]["data"],
    ),
    Peer("Ray Serve", "ray", lambda _: [python("ray"), "-m", "benchmarks.peers.ray.server"]),
)
DUBITO = Peer(
    "Dubito",
    "dubito",
    lambda _: [sys.executable, "-m", "service"],
    body=lambda row: {"inputs": [row], "num_samples": DRAWS},
    probabilities=lambda answer: answer["predictions"][0]["probabilities"],
)


def make_environment(peer: Peer) -> str | None:
    """Create a peer's virtual environment. Return the reason if that fails."""
    requirements, folder = peer.folder / "requirements.txt", peer.folder / ".venv"
    digest, mark = hashlib.sha256(requirements.read_bytes()).hexdigest(), folder / "made-of"
    if mark.exists() and mark.read_text() == digest:
        return None
    print(f"making {peer.name}'s environment", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-r",
        str(requirements),
    ]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), *pip],
    ):
        completed = subprocess.run(command, capture_output=True, text=True)
        if completed.returncode != 0:
            return last_line(completed.stderr)
    mark.write_text(digest)
    return None


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class NotStarted(Exception):
    """A server failed to start."""


@contextmanager
def run_server(
    contender: Contender, body: bytes
) -> Iterator[tuple[int, subprocess.Popen[bytes], float]]:
    """Run a server. Yield its port, its process and the startup time in seconds."""
    port = free_port()
    ports = {f"MLSERVER_{name}_PORT": str(free_port()) for name in ("GRPC", "METRICS")}
    environment = {**os.environ, **contender.environment, **ports, "PYTHONPATH": str(ROOT)}
    environment |= {
        "PEER_PORT": str(port),
        "DUBITO_PORT": str(port),
        "MLSERVER_HTTP_PORT": str(port),
    }
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as output,
    ):
        environment |= {"BENTOML_HOME": folder, "RAY_TMPDIR": folder}
        started_at = time.perf_counter()
        process = subprocess.Popen(
            contender.command(port),
            env=environment,
            cwd=folder,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while ask(port, contender.peer.path, body, timeout_s=60) is None:
                if process.poll() is not None or time.perf_counter() - started_at > READY_S:
                    output.seek(0)
                    raise NotStarted(last_line(output.read().decode(errors="replace")))
                time.sleep(0.1)
            yield port, process, time.perf_counter() - started_at
        finally:
            end(process)


def family(process: int) -> list[int]:
    """Return the ids of a process, its session and its descendants."""
    parents, sessions = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                _, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            parents[int(folder.name)], sessions[int(folder.name)] = int(parent), int(session)
    family_ids = [
        process,
        *(
            process_id
            for process_id, session in sessions.items()
            if session == process and process_id != process
        ),
    ]
    for process_id in family_ids:  # grows while it is read
        family_ids += [
            child
            for child, parent in parents.items()
            if parent == process_id and child not in family_ids
        ]
    return family_ids


def end(process: subprocess.Popen[bytes]) -> None:
    members = family(process.pid)
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in members[1:]:
        try:
            os.kill(member, 9)
        except ProcessLookupError:
            continue


def memory_megabytes(process: int) -> float:
    """Sum the proportional set sizes of a server's processes."""
    total = 0
    for member in family(process):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def ask(port: int, path: str, body: bytes, timeout_s: float = 60.0) -> Any | None:
    request = urllib.request.Request(
        f"http://{HOST}:{port}{path}", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError):
        return None
