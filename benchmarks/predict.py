"""Measure the latency of one row with 100 fresh draws.

`python -m benchmarks.predict [--store DIR] [--short] [--write]` alternates between

* a loop over draws in torch, in this process;
* batched draws in torch, in this process;
* onnxruntime on precomputed draws, in this process;
* `POST /predict` over a keep-alive connection: a burst of requests after idle time, one client
  that sends continuously, and a fifth of that client's rate.

Times depend on the machine, so the result is a ratio of times in one run.
"""

import json
import os
import re
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import NAME, open_or_publish, report, serve, size_parser, spread, torch_model
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.inference.noise import standard_normal
from training.bayes.network import BayesianModel

DRAWS = 100
BURST = 50  # fewer requests than prepared draw sets


def seconds(work: Callable[[], object], times: int, interval_s: float = 0.0) -> list[float]:
    """Return the duration of each call. Calls start `interval_s` apart, or back to back."""
    used = []
    for _ in range(times):
        started_at = time.perf_counter()
        work()
        used.append(time.perf_counter() - started_at)
        time.sleep(max(0.0, interval_s - used[-1]))
    return used


class Client:
    """A client with minimal overhead that sends the same request repeatedly."""

    def __init__(self, port: int, body: bytes) -> None:
        self.port = port
        head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self.connect()

    def connect(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def predict(self) -> None:
        self.socket.sendall(self.request)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self.socket.recv(1 << 16)
        head, _, content = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), answer
        (length,) = re.findall(rb"content-length: (\d+)", head.lower())
        while len(content) < int(length):
            content += self.socket.recv(1 << 16)


def textbook(model: BayesianModel, x: Tensor) -> Tensor:
    """Compute mean probabilities by a loop over draws."""
    return torch.stack([batched(model, x, draws=1) for _ in range(DRAWS)]).mean(0)


@torch.inference_mode()
def batched(model: BayesianModel, x: Tensor, draws: int = DRAWS) -> Tensor:
    theta = model.posterior(torch.randn(draws, model.posterior.noise_dimension))
    return model.likelihood(model.network(x, theta[:, None])).exp().mean(0)


def main() -> None:
    parser = size_parser(__doc__, "predict.md")
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    rounds, calls = (3, 50) if options.short else (5, 150)
    with open_or_publish(options) as store:
        result = measure(store, rounds, calls)
    report(options, "predict", table(result))


def measure(store: ModelStore, rounds: int, calls: int) -> dict[str, object]:
    result = Model.load(store.open(NAME, store.resolve(NAME), files=NEEDED))
    reference = torch_model(store, NAME)
    row = np.random.default_rng(0).integers(0, 256, (1, 784)).astype(np.float32)
    x, theta = torch.from_numpy(row), result.runtime.draw(0, 0, DRAWS)
    eps = standard_normal(0, 0, DRAWS, result.manifest.noise.dimension)
    body = json.dumps({"inputs": row.astype(int).tolist(), "num_samples": DRAWS}).encode()
    with serve(store.root, DUBITO_DEFAULT_MODEL=NAME) as service:
        client = Client(service.port, body)
        request = client.predict

        def fresh(work: Callable[[], list[float]]) -> list[float]:
            client.connect()  # The server may have closed an idle connection.
            request()
            return work()

        def burst() -> list[float]:
            time.sleep(2.0)  # Let the service prepare draws.
            return fresh(lambda: seconds(request, BURST))

        ways: dict[str, Callable[[], list[float]]] = {
            "textbook loop, torch": lambda: seconds(lambda: textbook(reference, x), 1),
            "batched, torch": lambda: seconds(lambda: batched(reference, x), 20),
            "network alone, onnxruntime": lambda: seconds(
                lambda: result.runtime.run(row, theta[:, None]), calls
            ),
            "a draw set's noise": lambda: seconds(
                lambda: standard_normal(0, 0, DRAWS, eps.shape[1]), 20
            ),
            "a draw set's sampler, onnxruntime": lambda: seconds(
                lambda: result.runtime.sample(eps), 20
            ),
            f"HTTP, bursts of {BURST}": burst,
            "HTTP, no pauses": lambda: fresh(lambda: seconds(request, calls)),
            "HTTP, a fifth of capacity": lambda: fresh(
                lambda: seconds(request, calls, interval_s=5.0 * busy_s())
            ),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}

        def busy_s() -> float:
            return statistics.median(times["HTTP, no pauses"]) if times["HTTP, no pauses"] else 0.02

        for way in ways.values():
            way()  # warm up
        for _ in range(rounds):
            for name, way in ways.items():
                times[name].append(statistics.median(way()))
    return {
        "seconds": times,
        "rounds": rounds,
        "cores": os.cpu_count(),
    }


def table(result: dict[str, object]) -> str:
    times = result["seconds"]
    assert isinstance(times, dict)
    loop = times["textbook loop, torch"]
    lines = [
        "# One row, 100 fresh draws, 784-800-800-10, RealNVP 4",
        "",
        f"`python -m benchmarks.predict --write`; {result['rounds']} rounds, {result['cores']} "
        "cores.",
        "Ratios are relative to the loop's fastest round.",
        "",
        "| way | ms, median of rounds (minimum–maximum) | times faster than the loop (minimum–maximum) |",
        "|---|---|---|",
    ]
    for name, used in times.items():
        ratios = spread([min(loop) / t for t in used], 0)
        lines.append(f"| {name} | {spread([1e3 * t for t in used])} | {ratios} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
