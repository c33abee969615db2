"""Compare Dubito with other model servers on the same Bayesian model.

    python -m benchmarks.peers [--store DIR --model NAME] [--only NAME ...] [--seconds N] [--rounds
    N] [--write]

Every server predicts one-row requests (784 pixels as JSON numbers) with 100 fresh draws per request
or micro-batch, on all processors, with the weights of the same published version. The peers use
torch in two ways: a loop over draws, and a batched version that computes all draws in one call.
They return mean probabilities only; Dubito also returns scores, p-values and the flag. Servers,
configurations and pinned requirements are in `benchmarks/peers/NAME`. The first run creates a
virtual environment for each peer.

Rounds alternate between the servers. Each round starts, checks, measures and stops every server.
"""

import json
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.common import NAME, open_or_publish, report, size_parser
from benchmarks.load import closed_loop, open_loop, post
from benchmarks.peers.check import Reference, check, compute_reference
from benchmarks.peers.posterior import DRAWS
from benchmarks.peers.report import CONNECTIONS, Measured, plot, table
from benchmarks.peers.servers import (
    DUBITO,
    PEERS,
    Contender,
    NotStarted,
    make_environment,
    memory_megabytes,
    run_server,
)
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.processes import processors

BODIES = 64  # number of different requests
LOW_LOAD_ANSWERS = (
    30  # at a fifth of capacity: slow servers are given up to four times the seconds for them
)


def measure(
    contender: Contender, rows: list[list[int]], reference: Reference | None, seconds: float
) -> Measured:
    bodies = [json.dumps(contender.peer.body(row)).encode() for row in rows]
    requests = [post(contender.peer.path, body) for body in bodies]
    with run_server(contender, bodies[0]) as (port, process, ready_s):
        if reference is not None:
            check(contender, port, reference)
        full = closed_loop(
            port, requests, CONNECTIONS, seconds, warm_up_s=max(1.0, seconds / 4), timeout_s=120
        )
        time.sleep(0.5)
        alone_s = seconds if full.rate > 100 else 2 * seconds
        alone = closed_loop(port, requests, 1, alone_s, timeout_s=120)
        low_rate = full.rate / 5
        low_s = (
            max(seconds, min(4 * seconds, LOW_LOAD_ANSWERS / low_rate)) if low_rate > 0 else seconds
        )
        time.sleep(0.5)
        low = open_loop(port, requests, max(low_rate, 0.1), low_s, warm_up_s=0.5, timeout_s=120)
        failures = sum(
            n for load in (full, alone, low) for how, n in load.counts.items() if how != "200"
        )
        return Measured(
            full.rate, alone, low, low_rate, ready_s, memory_megabytes(process.pid), failures
        )


def kernel_rate(model: Model, rows: np.ndarray, seconds: float) -> float:
    theta, x = model.runtime.draw(0, 0, DRAWS)[:, None], rows[:CONNECTIONS].astype(np.float32)
    model.runtime.run(x, theta)
    started_at, completed = time.perf_counter(), 0
    while time.perf_counter() - started_at < seconds:
        model.runtime.run(x, theta)
        completed += len(x)
    return completed / (time.perf_counter() - started_at)


def main() -> None:
    parser = size_parser(__doc__, "peers.{md,png}")
    packages = [peer.package for peer in PEERS]
    parser.add_argument("--model", default=NAME)
    parser.add_argument(
        "--only", nargs="+", choices=packages, default=packages, help="peers, by default all"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also stops the servers
    selected = set(options.only)
    with open_or_publish(options) as store:
        text = compare(store, options.model, selected, options.seconds, options.rounds)
    report(options, "peers", text, lambda: plot(text))


def compare(store: ModelStore, name: str, wanted: set[str], seconds: float, rounds: int) -> str:
    """Measure Dubito and the selected peers, and return the page."""
    artifact = store.open(name, store.resolve(name), files=(*NEEDED, "weights.safetensors"))
    model = Model.load(artifact)
    rows = np.random.default_rng(0).integers(0, 256, (300, 784))
    reference = compute_reference(artifact.files["weights.safetensors"], rows)
    results: dict[str, list[Measured]] = {}
    broken: dict[str, str] = {}
    kernel: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        weights.write_bytes(artifact.files["weights.safetensors"])
        contenders = make_contenders(store, name, wanted, weights, broken)
        for turn in range(rounds):
            kernel.append(kernel_rate(model, rows, min(2.0, seconds)))
            for label, contender in contenders.items():
                if label in broken:
                    continue
                print(f"round {turn + 1} of {rounds}: {label}", flush=True)
                try:
                    measured = measure(
                        contender, rows[:BODIES].tolist(), None if turn else reference, seconds
                    )
                except NotStarted as reason:
                    broken[label] = str(reason)
                    print(f"    {reason}", flush=True)
                else:
                    results.setdefault(label, []).append(measured)
                    print(f"    {measured.capacity:.1f} requests/s", flush=True)
    return table(results, broken, kernel, artifact.manifest.precision, seconds, rounds)


def make_contenders(
    store: ModelStore, name: str, wanted: set[str], weights: Path, broken: dict[str, str]
) -> dict[str, Contender]:
    settings = {"DUBITO_STORE": str(store.root.resolve()), "DUBITO_DEFAULT_MODEL": name}
    contenders = {}
    for workers in sorted({1, processors()}):
        label = "Dubito" if workers == 1 else f"Dubito, {workers} workers"
        contenders[label] = Contender(
            label, "", DUBITO, {**settings, "DUBITO_WORKERS": str(workers)}, DUBITO.command
        )
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
                "PEER_THREADS": str(processors()),
                "BENTOML_DO_NOT_TRACK": "True",
                "RAY_USAGE_STATS_ENABLED": "0",
            }
            label = f"{peer.title}, {way}"
            contenders[label] = Contender(peer.title, way, peer, environment, peer.command)
    return contenders


if __name__ == "__main__":
    main()
