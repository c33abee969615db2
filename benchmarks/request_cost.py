"""Measure the server's processor time per one-row request and per row of large requests.

    python -m benchmarks.request_cost [--store DIR] [--write]

The benchmark sends one-row JSON requests on 64 connections, and requests of 640 rows with npz
responses, to one worker in alternating rounds. The result is the ratio of processor times. It
excludes the client and waiting time.
"""

import http.client
import io

import numpy as np
import orjson

from benchmarks.common import NAME, Service, open_or_publish, report, serve, size_parser
from benchmarks.load import HOST, closed_loop, post
from model_store.artifacts.store import ModelStore

CONNECTIONS = 64
ROWS, REQUESTS = 640, 10


def count_answers(service: Service) -> float:
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in service.ask("GET", "/metrics").decode().splitlines()
        if line.startswith('dubito_requests_total{route="/predict",status="200"')
    )


def ask_large(port: int, body: bytes, requests: int) -> None:
    connection = http.client.HTTPConnection(HOST, port)
    for _ in range(requests):
        headers = {"Content-Type": "application/x-npy", "Accept": "application/x-npz"}
        connection.request("POST", "/predict", body, headers)
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise RuntimeError(f"expected 200, got {answer.status}")


def measure(store: ModelStore, rounds: int, seconds: float) -> list[tuple[float, float, float]]:
    """Return milliseconds per one-row request and per row, and requests per second."""
    generator = np.random.default_rng(0)
    row = generator.integers(0, 256, 784).tolist()
    item = post("/predict", orjson.dumps({"inputs": [row]}))
    packed = io.BytesIO()
    np.save(packed, generator.integers(0, 256, (ROWS, 784)).astype(np.float32))
    large = packed.getvalue()
    measured = []
    with serve(store.root, DUBITO_DEFAULT_MODEL=NAME) as service:
        closed_loop(service.port, [item], CONNECTIONS, 2.0, warm_up_s=0.0)
        ask_large(service.port, large, 3)
        for _ in range(rounds):
            count, started_at = count_answers(service), service.processor_seconds()
            closed_loop(service.port, [item], CONNECTIONS, seconds, warm_up_s=0.0)
            ended, requests = service.processor_seconds(), count_answers(service) - count
            small = (ended - started_at) / requests
            started_at = service.processor_seconds()
            ask_large(service.port, large, REQUESTS)
            per_row = (service.processor_seconds() - started_at) / (REQUESTS * ROWS)
            measured.append((1e3 * small, 1e3 * per_row, requests / seconds))
    return measured


def table(measured: list[tuple[float, float, float]]) -> str:
    ratios = [item / row for item, row, _ in measured]
    request, row, rate = np.median(measured, axis=0)
    lines = [
        "# A request's processor time",
        "",
        "`python -m benchmarks.request_cost --write` measures the server's processor time for a "
        f"one-row JSON request on {CONNECTIONS} connections, and for a row in requests of {ROWS} "
        "rows with npz answers. One worker serves a model of MNIST's size (int8, 100 draws).",
        "",
        f"Medians of {len(measured)} rounds: {request:.3f} ms per request, {row:.3f} ms per row and "
        f"{rate:.0f} requests/s. The ratio is {np.median(ratios):.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = size_parser(__doc__, "request-cost.md")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one-row requests in a round")
    options = parser.parse_args()
    with open_or_publish(options) as store:
        text = table(measure(store, options.rounds, options.seconds))
    report(options, "request-cost", text)


if __name__ == "__main__":
    main()
