"""Measure the throughput and memory of a large job, and request latency during the job.

    python -m benchmarks.jobs [--rows 200000] [--precision int8 float32] [--rounds 3] [--draws 100]
        [--write]

A job ranks `--rows` rows of 784 random pixels by BALD on an idle service. The kernel is the
network's graph alone, with the job's batch size and threads. Memory is the peak of the job's
process, compared with a pool of 64 rows. One-row requests are sent at a quarter of the capacity for
one client, alternately with and without a job.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    NAME,
    Service,
    bare_parser,
    publish_untrained,
    report,
    serve,
    spread,
)
from benchmarks.load import closed_loop, open_loop, post
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.processes import processors
from service.engine.batching import part_rows

REQUESTS_S = 10.0  # duration of each measurement
KERNEL_S = 5.0
FEW_ROWS = 64
JOB_PROCESS = b"service.batch.job_process"


def main() -> None:
    parser = bare_parser(__doc__, "jobs.md")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--precision", nargs="+", default=["int8", "float32"])
    parser.add_argument("--rounds", type=int, default=3, help="of one-row requests")
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args()
    lines = [
        f"# Jobs on pools of 784 numbers a row, {options.draws} draws",
        "",
        f"`python -m benchmarks.jobs --rows {options.rows} --rounds {options.rounds} --write`; "
        f"{processors()} processors, 784-800-800-10. "
        "Latencies are in ms, median of rounds (minimum–maximum).",
        "",
        "| precision | kernel, rows/s | job, rows/s | job over kernel | memory, MiB "
        f"| of {FEW_ROWS} rows | p99 alone | p99 with a job |",
        "|---|---|---|---|---|---|---|---|",
        *(table_line(precision, options) for precision in options.precision),
    ]
    report(options, "jobs", "\n".join(lines) + "\n")


def table_line(precision: str, options: argparse.Namespace) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = ModelStore(folder / "models")
        publish_untrained(store, precision)
        pools = folder / "pools"
        pools.mkdir()
        write_pool(pools / "pool.npy", options.rows)
        write_pool(pools / "few.npy", FEW_ROWS)
        model = Model.load(store.open(NAME, store.resolve(NAME), files=NEEDED), processors())
        state = {"DUBITO_STATE": str(folder / "state"), "DUBITO_POOLS": str(pools)}
        with serve(folder / "models", **state) as service:
            _, few_mib = rank(service, "few.npy", options.draws, poll_s=0.05)
            before = kernel_rate(model, options.draws)
            job_s, mib = rank(service, "pool.npy", options.draws, poll_s=1.0)
            kernel = statistics.mean((before, kernel_rate(model, options.draws)))
            alone, with_job = latencies_ms(service, options.rounds, options.draws)
    rate = options.rows / job_s
    return (
        f"| {precision} | {kernel:.0f} | {rate:.0f} | {rate / kernel:.2f} | {mib:.0f} | "
        f"{few_mib:.0f} | {spread(alone)} | {spread(with_job)} |"
    )


def write_pool(path: Path, rows: int) -> None:
    generator = np.random.default_rng(0)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, 784))
    for first in range(0, rows, 10_000):
        part = array[first : first + 10_000]
        part[:] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    array.flush()


def kernel_rate(model: Model, draws: int) -> float:
    """Measure rows per second of the graph alone, with the job's batch size."""
    rows = part_rows(model, draws)
    x = np.random.default_rng(0).integers(0, 256, (rows, model.row_size)).astype(np.float32)
    draw_set = model.runtime.draw_set(0, draws)
    model.runtime.run_set(x, draw_set)
    calls, started_at = 0, time.perf_counter()
    while time.perf_counter() - started_at < KERNEL_S:
        model.runtime.run_set(x, draw_set)
        calls += 1
    return calls * rows / (time.perf_counter() - started_at)


def rank(service: Service, pool: str, draws: int, poll_s: float) -> tuple[float, float]:
    """Rank a pool by a job. Return its run time and peak memory in MiB."""
    job = start_job(service, pool, draws)
    largest = 0
    while job["state"] in ("queued", "running"):
        largest = max(largest, job_memory_bytes())
        time.sleep(poll_s)
        job = request(service, "GET", f"/jobs/{job['id']}")
    assert job["state"] == "done", job
    return job["worked_s"], largest / 2**20


def start_job(service: Service, pool: str, draws: int) -> dict[str, Any]:
    body = {"pool_file": pool, "k": 10, "seed": 0, "num_samples": draws}
    return request(service, "POST", "/acquire/jobs", body)


def request(
    service: Service, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    content = None if body is None else json.dumps(body)
    answer: dict[str, Any] = json.loads(service.ask(method, path, content))
    return answer


def job_memory_bytes() -> int:
    """Peak resident memory of the running job's process, or 0."""
    for process in Path("/proc").iterdir():
        try:
            if JOB_PROCESS in (process / "cmdline").read_bytes():
                lines = (process / "status").read_text().splitlines()
                peak = next(line for line in lines if line.startswith("VmHWM"))
                return 1024 * int(peak.split()[1])
        except (OSError, StopIteration):
            continue
    return 0


def latencies_ms(service: Service, rounds: int, draws: int) -> tuple[list[float], list[float]]:
    """Measure the p99 of one-row requests in each round, without and with a job."""
    row = np.random.default_rng(1).integers(0, 256, 784).tolist()
    requests = [post("/predict", json.dumps({"inputs": [row], "num_samples": draws}).encode())]
    rate = closed_loop(service.port, requests, 1, 3.0).rate / 4

    def measure() -> float:
        load = open_loop(service.port, requests, rate, REQUESTS_S, connections=16, poisson=False)
        assert set(load.counts) == {"200"}, load.counts
        return 1e3 * load.percentile(99)

    alone, with_job = [], []
    for _ in range(rounds):
        alone.append(measure())
        path = f"/jobs/{start_job(service, 'pool.npy', draws)['id']}"
        while request(service, "GET", path)["progress"] == 0.0:
            time.sleep(0.1)
        with_job.append(measure())
        assert request(service, "GET", path)["state"] == "running", "use a larger pool"
        request(service, "POST", f"{path}/cancel")
        while request(service, "GET", path)["state"] == "running":
            time.sleep(0.1)
    return alone, with_job


if __name__ == "__main__":
    main()
