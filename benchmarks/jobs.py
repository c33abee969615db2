"""A job on a large pool: its rows a second against the kernel's, its memory, and one-row requests
meanwhile.

    python -m benchmarks.jobs [--rows 200000] [--whole 1000000] [--precision int8 float32] [--rounds
    3] [--draws 100]
        [--write]

The pool is `--rows` rows of 784 random pixels in an npy file, ranked by BALD with `--draws` draws;
with `--whole` the first precision ranks one of that many rows too. In one run:

* the kernel: the published version's own graph on the rows that are computed at once, again and again, before the
  job and after it, on the same threads; a job's figure is its rows a second over the mean of both.
  A job's time is from its process' first look at a row to its last, by its own clock, and from its
  start to its end;
* the job, over HTTP, the service idle meanwhile; its process' largest resident memory, and the same of a job of 64
  rows, which has loaded the model and scored a part: the rest is the pool's;
* one-row requests at a quarter of the rate that one client gets, evenly, without the job and with it, in turns.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import (
    NAME,
    RESULTS,
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

SECONDS = 10.0  # of one-row requests, each way and round
KERNEL_S = 5.0
RUN = "service.batch.job_process"


def main() -> None:
    parser = bare_parser(__doc__, "jobs.{md,png,json}")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--whole", type=int, help="rows of a further pool, of the first precision")
    parser.add_argument("--precision", nargs="+", default=["int8", "float32"])
    parser.add_argument("--rounds", type=int, default=3, help="of one-row requests")
    parser.add_argument("--draws", type=int, default=100)
    options = parser.parse_args()
    measured = [
        measure(name, options.rows, options.rounds, options.draws) for name in options.precision
    ]
    if options.whole is not None:
        measured.append(measure(options.precision[0], options.whole, 0, options.draws))
    report(options, "jobs", table(measured, options), lambda: plot(measured))
    if options.write:
        (RESULTS / "jobs.json").write_text(json.dumps(measured, indent=1) + "\n")


def measure(precision: str, rows: int, rounds: int, draws: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = ModelStore(folder / "models")
        publish_untrained(store, precision)
        pools = folder / "pools"
        pools.mkdir()
        write_pool(pools / "pool.npy", rows)
        write_pool(pools / "few.npy", 64)
        model = Model.load(store.open(NAME, store.resolve(NAME), wanted=NEEDED), processors())
        state = {"DUBITO_STATE": str(folder / "state"), "DUBITO_POOLS": str(pools)}
        with serve(folder / "models", **state) as service:
            few = rank(service, "few.npy", draws, 0.05)
            before = kernel_rate(model, draws)
            job = rank(service, "pool.npy", draws, 1.0)
            after = kernel_rate(model, draws)
            latencies = compare(service, rounds, draws)
    kernel = (before + after) / 2
    return {
        "precision": precision,
        "rows": rows,
        "kernel_rows_s": [before, after],
        "job_rows_s": rows / job["worked_s"],
        "whole_rows_s": rows / job["whole_s"],
        "ratio": rows / job["worked_s"] / kernel,
        "whole_ratio": rows / job["whole_s"] / kernel,
        "largest_bytes": job["largest_bytes"],
        "largest_bytes_of_few": few["largest_bytes"],
        "latencies_ms": latencies,
    }


def write_pool(path: Path, rows: int) -> None:
    generator = np.random.default_rng(0)
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, 784))
    for first in range(0, rows, 10_000):
        part = array[first : first + 10_000]
        part[:] = generator.integers(0, 256, part.shape, dtype=np.uint8)
    array.flush()


def kernel_rate(model: Model, draws: int) -> float:
    rows = part_rows(model, draws)
    x = np.random.default_rng(0).integers(0, 256, (rows, model.row_size)).astype(np.float32)
    drawn = model.runtime.draw_set(0, draws)
    model.runtime.run_set(x, drawn)
    calls, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < KERNEL_S:
        model.runtime.run_set(x, drawn)
        calls += 1
    return calls * rows / (time.perf_counter() - begun)


def rank(service: Service, pool: str, draws: int, look_s: float) -> dict[str, Any]:
    """Have a job rank a pool, and return what it took; looking often takes the processor from
    it."""
    asked = {"pool_file": pool, "k": 10, "seed": 0, "num_samples": draws}
    job = request(service, "POST", "/acquire/jobs", asked)
    largest = 0
    while job["state"] in ("queued", "running"):
        largest = max(largest, largest_bytes())
        time.sleep(look_s)
        job = request(service, "GET", f"/jobs/{job['id']}")
    assert job["state"] == "done", job
    begun, ended = (datetime.fromisoformat(job[when]) for when in ("begun", "ended"))
    return {
        "worked_s": job["worked_s"],
        "whole_s": (ended - begun).total_seconds(),
        "largest_bytes": largest,
    }


def request(
    service: Service, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    content = None if body is None else json.dumps(body)
    answer: dict[str, Any] = json.loads(service.ask(method, path, content))
    return answer


def largest_bytes() -> int:
    for process in Path("/proc").iterdir():
        try:
            if RUN.encode() in (process / "cmdline").read_bytes():
                lines = (process / "status").read_text().splitlines()
                return 1024 * int(
                    next(line for line in lines if line.startswith("VmHWM")).split()[1]
                )
        except (OSError, StopIteration):
            continue
    return 0


def compare(service: Service, rounds: int, draws: int) -> dict[str, list[list[float]]]:
    """Return p50 and p99 of one-row requests in milliseconds, without a job and with one, a pair
    a round."""
    row = np.random.default_rng(1).integers(0, 256, 784).tolist()
    requests = [post("/predict", json.dumps({"inputs": [row], "num_samples": draws}).encode())]
    rate = closed_loop(service.port, requests, 1, 3.0).rate / 4 if rounds else 0.0
    found: dict[str, list[list[float]]] = {"alone": [], "with_job": []}
    for _ in range(rounds):
        for how in ("alone", "with_job"):
            job = None
            if how == "with_job":
                asked = {"pool_file": "pool.npy", "num_samples": draws}
                job = request(service, "POST", "/acquire/jobs", asked)
                while request(service, "GET", f"/jobs/{job['id']}")["progress"] == 0.0:
                    time.sleep(0.1)
            load = open_loop(service.port, requests, rate, SECONDS, connections=16, poisson=False)
            assert set(load.counts) == {"200"}, load.counts
            found[how].append([1e3 * load.percentile(50), 1e3 * load.percentile(99)])
            if job is not None:
                job = request(service, "GET", f"/jobs/{job['id']}")
                assert job["state"] == "running", (
                    "the pool is too small: the job ended before the requests did"
                )
                request(service, "POST", f"/jobs/{job['id']}/cancel")
                while request(service, "GET", f"/jobs/{job['id']}")["state"] == "running":
                    time.sleep(0.1)
    return found


def table(measured: list[dict[str, Any]], options: argparse.Namespace) -> str:
    whole = "" if options.whole is None else f"--whole {options.whole} "
    whole += "" if options.draws == 100 else f"--draws {options.draws} "
    lines = [
        f"# Jobs on pools of 784 numbers a row, {options.draws} draws",
        "",
        f"`python -m benchmarks.jobs --rows {options.rows} {whole}--rounds {options.rounds} "
        f"--write`; {processors()} processors, 784-800-800-10. `benchmarks/jobs.py` "
        "says how it is measured.",
        "",
        "| rows | precision | kernel, rows/s, before and after | job, rows/s | of the kernel's | "
        "in all | largest memory | of a job of 64 rows |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in measured:
        kernel = " and ".join(f"{rate:.0f}" for rate in one["kernel_rows_s"])
        memory = " | ".join(
            f"{one[key] / 2**20:.0f} MiB" for key in ("largest_bytes", "largest_bytes_of_few")
        )
        lines.append(
            f"| {one['rows']:,} | {one['precision']} | {kernel} | {one['job_rows_s']:.0f} | "
            f"{one['ratio']:.2f} | {one['whole_ratio']:.2f} | {memory} |"
        )
    lines += [
        "",
        "The kernel computes densities too, which rank nothing: a job does not, and is ahead of it.",
        "",
        "One-row requests at a quarter of the rate that one client gets, ms, median of the rounds "
        "(least - most):",
        "",
        "| precision | p50 alone | with the job | p99 alone | with the job | p99, times (each "
        "round) |",
        "|---|---|---|---|---|---|",
    ]
    for one in measured:
        if not one["latencies_ms"]["alone"]:
            continue
        alone, with_job = (np.array(one["latencies_ms"][how]) for how in ("alone", "with_job"))
        cells = [spread(values[:, i].tolist()) for i in (0, 1) for values in (alone, with_job)]
        times = ", ".join(f"{ratio:.2f}" for ratio in with_job[:, 1] / alone[:, 1])
        lines.append(f"| {one['precision']} | {' | '.join(cells)} | {times} |")
    return "\n".join([*lines, "", "![rates against the kernel's, and latencies](jobs.png)", ""])


def plot(measured: list[dict[str, Any]]) -> Figure:
    figure, (rates, latencies) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    places = np.arange(len(measured))
    kernel = [statistics.mean(one["kernel_rows_s"]) for one in measured]
    rates.bar(places - 0.2, kernel, 0.4, label="kernel")
    rates.bar(places + 0.2, [one["job_rows_s"] for one in measured], 0.4, label="job")
    names = [f"{one['precision']}\n{one['rows']:,}" for one in measured]
    rates.set(ylabel="rows a second", xticks=places, xticklabels=names)
    measured = [one for one in measured if one["latencies_ms"]["alone"]]
    places = np.arange(len(measured))
    for i, how in enumerate(("alone", "with_job")):
        values = [
            statistics.median([p99 for _, p99 in one["latencies_ms"][how]]) for one in measured
        ]
        latencies.bar(places + 0.4 * i - 0.2, values, 0.4, label=f"{how}{' a job' if i else ''}")
    latencies.set(
        ylabel="p99 of one row, ms",
        xticks=places,
        xticklabels=[one["precision"] for one in measured],
    )
    for axis in (rates, latencies):
        axis.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    main()
