"""The same Bayesian model and number of draws served by Dubito and by what people use today, one after the other.

    python -m benchmarks.peers [--store DIR --model NAME] [--only NAME ...] [--seconds N] [--rounds N] [--write]

Every server predicts one-row requests (784 pixels as JSON numbers) from 100 fresh draws for each request or
micro-batch, on all processors, its weights those of one published version. The peers run torch in two ways: the
textbook loop (100 times sample the weights, make them, run the network) and a batched version (all draws in one call,
the first layer's product made once). They answer mean probabilities alone; Dubito adds scores, p-values and the flag.
Their servers, configurations and pinned requirements stand in `benchmarks/peers/NAME`; the first run makes an
environment for each there.

Rounds alternate: in each, every server is started, asked, measured and ended. The client is this process.
"""

import argparse
import hashlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

from benchmarks.load import HOST, Load, closed_loop, open_loop, post
from benchmarks.model import NAME, ROOT, publish_untrained
from benchmarks.peers.posterior import DRAWS, Posterior
from model_store.model import NEEDED, Model
from model_store.store import ModelStore

FOLDER = Path(__file__).parent
RESULTS = ROOT / "docs" / "results"
CONNECTIONS = 64
BODIES = 64  # different rows in the load
CHECKED_ROWS, CHECKED_ROUNDS, REFERENCE_DRAWS = 8, 10, 4000
SIGMAS, ROUNDING = 6.0, 0.003  # what answers may differ by: Monte Carlo error, and integers
READY_S = 180.0
LOW_LOAD_ANSWERS = 30  # at a fifth of capacity: slow servers are given up to four times the seconds for them


@dataclass(frozen=True)
class Peer:
    """A server: how to start it on a port, and what its requests and answers look like."""

    name: str
    package: str  # whose version is named; its folder here
    command: Callable[[int], list[str]]
    path: str = "/predict"
    body: Callable[[list[int]], Any] = lambda row: {"inputs": [row]}
    probabilities: Callable[[Any], list[float]] = lambda answer: answer["probabilities"][0]
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its server, configuration and environment are."""
        return FOLDER / self.package

    @property
    def title(self) -> str:
        """Its name and version."""
        pins = (self.folder / "requirements.txt").read_text().splitlines()
        (version,) = [pin.split("==")[1] for pin in pins if pin.startswith(f"{self.package}==")]
        return f"{self.name} {version}"


@dataclass(frozen=True)
class Contender:
    """A server and the way in which it predicts."""

    title: str
    way: str
    peer: Peer
    environment: dict[str, str]
    command: Callable[[int], list[str]]


@dataclass(frozen=True)
class Measured:
    """A round of a contender; times are in seconds."""

    capacity: float  # requests a second
    alone: Load
    low: Load
    low_rate: float
    ready_s: float
    megabytes: float
    failures: int


def python(peer: str) -> str:
    """Return the interpreter of a peer's environment."""
    return str(FOLDER / peer / ".venv" / "bin" / "python")


def mlserver_command(_: int) -> list[str]:
    """Return MLServer's command; its port is a setting."""
    return [str(FOLDER / "mlserver" / ".venv" / "bin" / "mlserver"), "start", str(FOLDER / "mlserver" / "model")]


def bentoml_command(port: int) -> list[str]:
    """Return BentoML's command."""
    options = ["--host", HOST, "--port", str(port)]
    return [python("bentoml"), "-m", "bentoml", "serve", "benchmarks.peers.bentoml.server:Classifier", *options]


PEERS = (
    Peer("FastAPI", "fastapi", lambda _: [python("fastapi"), "-m", "benchmarks.peers.fastapi.server"]),
    Peer("LitServe", "litserve", lambda _: [python("litserve"), "-m", "benchmarks.peers.litserve.server"]),
    Peer("BentoML", "bentoml", bentoml_command, probabilities=lambda answer: answer[0]),
    Peer(
        "MLServer",
        "mlserver",
        mlserver_command,
        path="/v2/models/mnist/infer",
        body=lambda row: {"inputs": [{"name": "inputs", "shape": [1, len(row)], "datatype": "FP32", "data": row}]},
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
    """Make a peer's environment where it is not made yet; return why it cannot be, if so."""
    requirements, folder = peer.folder / "requirements.txt", peer.folder / ".venv"
    digest, mark = hashlib.sha256(requirements.read_bytes()).hexdigest(), folder / "made-of"
    if mark.exists() and mark.read_text() == digest:
        return None
    print(f"making {peer.name}'s environment", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)]
    for command in ([sys.executable, "-m", "venv", str(folder)], [str(folder / "bin" / "python"), *pip]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            return last_line(done.stderr)
    mark.write_text(digest)
    return None


def last_line(text: str) -> str:
    """Return the last line of an error, or that there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class NotStarted(Exception):
    """A server that did not come up, and why."""


@contextmanager
def running(contender: Contender, body: bytes) -> Iterator[tuple[int, subprocess.Popen[bytes], float]]:
    """Run a server in processes of its own; yield its port, its process and the seconds until it answered."""
    port = free_port()
    others = {f"MLSERVER_{name}_PORT": str(free_port()) for name in ("GRPC", "METRICS")}
    environment = {**os.environ, **contender.environment, **others, "PYTHONPATH": str(ROOT)}
    environment |= {"PEER_PORT": str(port), "DUBITO_PORT": str(port), "MLSERVER_HTTP_PORT": str(port)}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as output:
        environment |= {"BENTOML_HOME": folder, "RAY_TMPDIR": folder}
        begun = time.perf_counter()
        process = subprocess.Popen(
            contender.command(port), env=environment, cwd=folder, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while ask(port, contender.peer.path, body, timeout_s=60) is None:
                if process.poll() is not None or time.perf_counter() - begun > READY_S:
                    output.seek(0)
                    raise NotStarted(last_line(output.read().decode(errors="replace")))
                time.sleep(0.1)
            yield port, process, time.perf_counter() - begun
        finally:
            end(process)


def family(process: int) -> list[int]:
    """Return the ids of a process and of all in its session or that came from it."""
    parents, sessions = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                _, parent, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            parents[int(folder.name)], sessions[int(folder.name)] = int(parent), int(session)
    found = [process, *(one for one, session in sessions.items() if session == process and one != process)]
    for one in found:  # grows while it is read
        found += [child for child, parent in parents.items() if parent == one and child not in found]
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all its processes."""
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
    """Return the memory of a server's processes, shared pages counted once (their proportional set sizes)."""
    total = 0
    for member in family(process):
        try:
            lines = Path(f"/proc/{member}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def ask(port: int, path: str, body: bytes, timeout_s: float = 60.0) -> Any | None:
    """Return the JSON answer to a request, or None where there is none of status 200."""
    request = urllib.request.Request(f"http://{HOST}:{port}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except (urllib.error.URLError, OSError):
        return None


@dataclass(frozen=True)
class Reference:
    """What many draws in process say of some rows: mean probabilities (N, C) and each draw's deviation from them."""

    rows: list[list[int]]
    mean: np.ndarray
    std: np.ndarray


def reference_of(weights: bytes, rows: np.ndarray) -> Reference:
    """Return the reference for those rows, of a few hundred, on which draws differ most."""
    torch.manual_seed(0)
    posterior = Posterior(weights)
    x = torch.from_numpy(rows.astype(np.float32))
    doubted = (
        posterior.probabilities(x, torch.randn(100, sum(posterior.sizes)))
        .std(0)
        .mean(-1)
        .argsort(descending=True)[:CHECKED_ROWS]
    )
    eps = torch.randn(REFERENCE_DRAWS, sum(posterior.sizes))
    probabilities = posterior.probabilities(x[doubted], eps).numpy()
    return Reference(rows[doubted.numpy()].tolist(), probabilities.mean(0), probabilities.std(0))


def check(contender: Contender, port: int, reference: Reference) -> None:
    """Ask for the same rows again and again, all at a time, and compare the means of answers with the reference's.

    Raises:
        NotStarted: if answers are off by more than Monte Carlo error, or are the same again, and so no fresh draws.
    """
    bodies = [json.dumps(contender.peer.body(row)).encode() for row in reference.rows]

    def answer(body: bytes) -> list[float]:
        given = ask(port, contender.peer.path, body)
        if given is None:
            raise NotStarted("a request of the check was not answered")
        return contender.peer.probabilities(given)

    with ThreadPoolExecutor(CHECKED_ROWS) as pool:
        answers = np.array([list(pool.map(answer, bodies)) for _ in range(CHECKED_ROUNDS)])
    error = np.sqrt(1.0 / (CHECKED_ROUNDS * DRAWS) + 1.0 / REFERENCE_DRAWS) * reference.std
    excess = np.abs(answers.mean(0) - reference.mean) - SIGMAS * error - ROUNDING
    if not (excess <= 0).all():
        raise NotStarted(f"answers are off by {float(excess.max()):.3f} more than Monte Carlo error explains")
    if (answers.std(0).max(-1) == 0).any():
        raise NotStarted("answers repeat: draws are not fresh")


def measure(contender: Contender, rows: list[list[int]], reference: Reference | None, seconds: float) -> Measured:
    """Start a server, check its answers where there is a reference, and put load on it."""
    bodies = [json.dumps(contender.peer.body(row)).encode() for row in rows]
    requests = [post(contender.peer.path, body) for body in bodies]
    with running(contender, bodies[0]) as (port, process, ready_s):
        if reference is not None:
            check(contender, port, reference)
        full = closed_loop(port, requests, CONNECTIONS, seconds, warm_up_s=max(1.0, seconds / 4), timeout_s=120)
        time.sleep(0.5)
        alone_s = seconds if full.rate > 100 else 2 * seconds
        alone = closed_loop(port, requests, 1, alone_s, timeout_s=120)
        low_rate = full.rate / 5
        low_s = max(seconds, min(4 * seconds, LOW_LOAD_ANSWERS / low_rate)) if low_rate > 0 else seconds
        time.sleep(0.5)
        low = open_loop(port, requests, max(low_rate, 0.1), low_s, warm_up_s=0.5, timeout_s=120)
        failures = sum(n for load in (full, alone, low) for how, n in load.counts.items() if how != "200")
        return Measured(full.rate, alone, low, low_rate, ready_s, memory_megabytes(process.pid), failures)


def kernel_rate(model: Model, rows: np.ndarray, seconds: float) -> float:
    """Return how many rows a second the network alone does, in process, `CONNECTIONS` rows at a time."""
    theta, x = model.runtime.draw(0, 0, DRAWS)[:, None], rows[:CONNECTIONS].astype(np.float32)
    model.runtime.run(x, theta)
    begun, done = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        model.runtime.run(x, theta)
        done += len(x)
    return done / (time.perf_counter() - begun)


def main() -> None:
    """Make environments, measure, print a table, and with `--write` keep it with a plot in docs/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packages = [peer.package for peer in PEERS]
    parser.add_argument("--store", type=Path, help="serve a published model; by default one of the same size")
    parser.add_argument("--model", default=NAME)
    parser.add_argument("--only", nargs="+", choices=packages, default=packages, help="peers, by default all")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write docs/results/peers.{md,png}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers end too
    wanted = set(options.only)
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(options.store or Path(folder))
        if options.store is None:
            publish_untrained(store)
        text, figures = compare(store, options.model, wanted, options.seconds, options.rounds)
    print(text)
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "peers.md").write_text(text)
        plot(figures, RESULTS / "peers.png")


def compare(
    store: ModelStore, name: str, wanted: set[str], seconds: float, rounds: int
) -> tuple[str, dict[str, list[Measured]]]:
    """Measure Dubito and the wanted peers; return the table and what it is made of."""
    artifact = store.open(name, store.resolve(name), wanted=(*NEEDED, "weights.safetensors"))
    model = Model.load(artifact)
    rows = np.random.default_rng(0).integers(0, 256, (300, 784))
    reference = reference_of(artifact.files["weights.safetensors"], rows)
    results: dict[str, list[Measured]] = {}
    broken: dict[str, str] = {}
    kernel: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        weights.write_bytes(artifact.files["weights.safetensors"])
        contenders = contenders_of(store, name, wanted, weights, broken)
        for turn in range(rounds):
            kernel.append(kernel_rate(model, rows, min(2.0, seconds)))
            for label, contender in contenders.items():
                if label in broken:
                    continue
                print(f"round {turn + 1} of {rounds}: {label}", flush=True)
                try:
                    measured = measure(contender, rows[:BODIES].tolist(), None if turn else reference, seconds)
                except NotStarted as reason:
                    broken[label] = str(reason)
                    print(f"    {reason}", flush=True)
                else:
                    results.setdefault(label, []).append(measured)
                    print(f"    {measured.capacity:.1f} requests/s", flush=True)
    return table(results, broken, kernel, artifact.manifest.precision, seconds, rounds), results


def contenders_of(
    store: ModelStore, name: str, wanted: set[str], weights: Path, broken: dict[str, str]
) -> dict[str, Contender]:
    """Return who takes part, Dubito first, and note in `broken` whose environment cannot be made."""
    settings = {"DUBITO_STORE": str(store.root.resolve()), "DUBITO_DEFAULT_MODEL": name}
    found = {"Dubito": Contender("Dubito", "", DUBITO, settings, DUBITO.command)}
    for peer in PEERS:
        if peer.package not in wanted:
            continue
        if (reason := make_environment(peer)) is not None:
            broken[peer.title] = reason
            continue
        for way in ("batched", "textbook"):
            environment = {
                "PEER_WEIGHTS": str(weights),
                "PEER_WAY": way,
                "PEER_THREADS": str(len(os.sched_getaffinity(0))),
                "BENTOML_DO_NOT_TRACK": "True",
                "RAY_USAGE_STATS_ENABLED": "0",
            }
            label = f"{peer.title}, {way}"
            found[label] = Contender(peer.title, way, peer, environment, peer.command)
    return found


def spread(values: list[float], digits: int) -> str:
    """Return the median of rounds, and the least and the most."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def table(
    results: dict[str, list[Measured]],
    broken: dict[str, str],
    kernel: list[float],
    precision: str,
    seconds: float,
    rounds: int,
) -> str:
    """Return the result as Markdown."""
    ours = statistics.median(m.capacity for m in results["Dubito"]) if "Dubito" in results else float("nan")
    lines = [
        "# One-row requests, 100 fresh draws, 784-800-800-10, RealNVP 4: Dubito beside other servers",
        "",
        f"`python -m benchmarks.peers --seconds {seconds:g} --rounds {rounds} --write`; "
        f"{len(os.sched_getaffinity(0))} processors, torch {torch.__version__.split('+')[0]}, Dubito's weights in "
        f"{precision}.",
        "",
        f"Capacity: closed loop, {CONNECTIONS} connections. Latencies in ms, p50 / p99: of one connection that never "
        "pauses, and at a fifth of the server's own capacity (Poisson arrivals, from the time at which a request was "
        "to be sent). Medians of rounds (least - most). Memory is of all the server's processes after the load.",
        "",
        "| server | requests/s | Dubito is faster by | p50 / p99, one connection | p50 / p99, a fifth | ready, s "
        "| memory, MB | not 200 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, measured in results.items():
        capacity = statistics.median(m.capacity for m in measured)
        lines.append(
            f"| {label} | {spread([m.capacity for m in measured], 1 if capacity < 100 else 0)} "
            f"| {ours / capacity if capacity else float('nan'):.1f} | {latencies([m.alone for m in measured])} "
            f"| {latencies([m.low for m in measured])} | {statistics.median(m.ready_s for m in measured):.1f} "
            f"| {statistics.median(m.megabytes for m in measured):.0f} | {sum(m.failures for m in measured)} |"
        )
    lines += [f"| {label} | {reason} | | | | | | |" for label, reason in broken.items()]
    lines += [
        "",
        f"The network alone, in process, {CONNECTIONS} rows at a time, draws made ahead: "
        f"{spread(kernel, 0)} rows/s; Dubito's requests/s over HTTP are {ours / statistics.median(kernel):.2f} "
        "of that.",
        "",
        f"Checked in the first round, before the load: {CHECKED_ROUNDS} answers to each of {CHECKED_ROWS} rows, all "
        f"asked at a time, agree in their means with {REFERENCE_DRAWS} draws in process within Monte Carlo "
        "error, and differ from one another.",
    ]
    return "\n".join(lines) + "\n"


def latencies(loads: list[Load]) -> str:
    """Return p50 and p99 in milliseconds, medians of rounds."""
    return " / ".join(f"{1e3 * statistics.median(load.percentile(p) for load in loads):.1f}" for p in (50, 99))


def plot(results: dict[str, list[Measured]], path: Path) -> None:
    """Draw capacity and latency of all rounds, on logarithmic axes."""
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.4 * len(results) + 1.5), layout="constrained", sharey=True)
    figures: list[tuple[str, Callable[[Measured], float]]] = [
        (f"requests/s, {CONNECTIONS} connections", lambda m: m.capacity),
        ("p50 at a fifth of capacity, ms", lambda m: 1e3 * m.low.percentile(50)),
    ]
    for axis, (title, value) in zip(axes, figures, strict=True):
        for position, (label, measured) in enumerate(results.items()):
            colour = "C3" if label == "Dubito" else "C0" if label.endswith("batched") else "C7"
            axis.plot([value(m) for m in measured], [position] * len(measured), "o", color=colour, alpha=0.7)
        axis.set(xscale="log", xlabel=title, yticks=range(len(results)), yticklabels=list(results))
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
