"""Data sets: `score` and `acquire` beside the kernel, here and on Ray, and the memory of each
worker.

    python -m benchmarks.data_sets [--rows 1000000] [--precision int8] [--draws 100] [--shard-rows
    N] [--write]

The data set is `--rows` rows of 784 random pixels (bytes) in one Parquet file, in row groups of
65,536. In one run:

* the kernel: the published version's own graph on the rows that are computed at once, again and again, on all
  processors, before each job and after it. A job's figure is its rows a second over the mean of
  both;
* the job, as a command of its own: all of its time, and what is left of it without that of a job of 64 rows, which
  has started, loaded the model and written its output. On Ray that starts a cluster too;
* the same by processor time: rows for each processor second of the job's shards, by its own count, over those of the
  kernel. It is the ratio of rates where nothing else runs; where something does, it hardly depends
  on it;
* the largest resident memory of its workers' processes, looked at every half second.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.model import NAME, ROOT, publish_untrained
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
from model_store.processors import available_processors
from service.engine.batching import part_rows
from tests.support.environment import environment_with

RESULTS = ROOT / "docs" / "results"
RAY = ROOT / ".venv-ray" / "bin" / "python"
WORKERS = (b"multiprocessing.spawn", b"ray::MapWorker")
GROUP_ROWS = 1 << 16
LOOK_S = 0.5
KERNEL_S = 5.0


def main() -> None:
    """Measure each command in both ways and print a table; with `--write` keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--shard-rows", type=int)
    parser.add_argument("--write", action="store_true", help="write docs/results/data-sets.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = ModelStore(folder / "models")
        publish_untrained(store, options.precision)
        model = Model.load(
            store.open(NAME, store.resolve(NAME), wanted=NEEDED), available_processors()
        )
        write_rows(folder / "few.parquet", 64)
        write_rows(folder / "rows.parquet", options.rows)
        measured = [
            measure(folder, model, command, where, options)
            for where in ("here", *(("Ray",) if RAY.exists() else ()))
            for command in ("score", "acquire")
        ]
    text = table(measured, options)
    print(text)
    if options.write:
        (RESULTS / "data-sets.md").write_text(text)
        (RESULTS / "data-sets.json").write_text(json.dumps(measured, indent=1) + "\n")


def write_rows(path: Path, rows: int) -> None:
    """Write rows of random pixels, a row group at a time."""
    generator = np.random.default_rng(0)
    schema = pa.schema({"x": pa.list_(pa.uint8(), 784)})
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, GROUP_ROWS):
            flat = generator.integers(0, 256, min(GROUP_ROWS, rows - first) * 784, dtype=np.uint8)
            writer.write_table(
                pa.table({"x": pa.FixedSizeListArray.from_arrays(flat, 784)}, schema=schema)
            )


def measure(
    folder: Path, model: Model, command: str, where: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what was measured of a command."""
    few_s, _, _ = run(folder, command, where, "few.parquet", options)
    before = kernel_rates(model, options.draws)
    whole_s, cpu_s, largest = run(folder, command, where, "rows.parquet", options)
    after = kernel_rates(model, options.draws)
    kernel, kernel_cpu = ((before[i] + after[i]) / 2 for i in range(2))
    return {
        "command": command,
        "where": where,
        "rows": options.rows,
        "kernel_rows_s": [before[0], after[0]],
        "kernel_rows_cpu_s": [before[1], after[1]],
        "cpu_s": cpu_s,
        "cpu_ratio": options.rows / cpu_s / kernel_cpu,
        "whole_s": whole_s,
        "few_s": few_s,
        "ratio": options.rows / (whole_s - few_s) / kernel,
        "whole_ratio": options.rows / whole_s / kernel,
        "largest_bytes": largest,
    }


def kernel_rates(model: Model, draws: int) -> tuple[float, float]:
    """Return rows a second, and a processor second, of the published graph, on the rows that are
    computed at once."""
    rows = part_rows(model, draws)
    x = np.random.default_rng(0).integers(0, 256, (rows, model.row_size)).astype(np.float32)
    drawn = model.runtime.draw_set(0, draws)
    model.runtime.run_set(x, drawn)
    calls, begun, worked = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < KERNEL_S:
        model.runtime.run_set(x, drawn)
        calls += 1
    return calls * rows / (time.perf_counter() - begun), calls * rows / (
        time.process_time() - worked
    )


def run(
    folder: Path, command: str, where: str, data: str, options: argparse.Namespace
) -> tuple[float, float, int]:
    """Return the seconds of a command, the processor seconds of its shards, and its workers'
    largest memory."""
    out = tempfile.mkdtemp(dir=folder)
    arguments = [
        str(folder / data),
        "--out",
        out,
        "--seed",
        "0",
        "--num-samples",
        str(options.draws),
    ]
    arguments += [] if options.shard_rows is None else ["--shard-rows", str(options.shard_rows)]
    arguments += ["--ray", "local"] if where == "Ray" else []
    python = str(RAY) if where == "Ray" else sys.executable
    begun, largest = time.perf_counter(), 0
    process = subprocess.Popen(
        [python, "-m", "service", command, *arguments],
        cwd=ROOT,
        env=environment_with(DUBITO_STORE=str(folder / "models")),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    while True:
        try:
            assert process.wait(LOOK_S) == 0
            took = time.perf_counter() - begun
            with process.stdout as output:
                said = re.search(r"([\d,]+) processor seconds", output.read())
            assert said is not None
            return took, float(said[1].replace(",", "")), largest
        except subprocess.TimeoutExpired:
            largest = max(largest, largest_bytes())


def largest_bytes() -> int:
    """Return the largest resident memory so far of the workers that there are, 0 where there are
    none."""
    largest = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(name in (process / "cmdline").read_bytes() for name in WORKERS):
                lines = (process / "status").read_text().splitlines()
                high = next(line for line in lines if line.startswith("VmHWM"))
                largest = max(largest, 1024 * int(high.split()[1]))
        except (OSError, StopIteration):
            continue
    return largest


def table(measured: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the page."""
    more = "" if options.shard_rows is None else f"--shard-rows {options.shard_rows} "
    lines = [
        f"# Data sets of 784 numbers a row, {options.draws} draws",
        "",
        f"`python -m benchmarks.data_sets --rows {options.rows} --precision {options.precision} "
        f"{more}--write`; "
        f"{available_processors()} processors, 784-800-800-10, {options.precision}. "
        "`benchmarks/data_sets.py` says "
        "how it is measured.",
        "",
        "| command | where | kernel, rows/s, before and after | the job, s | of these start and "
        "end, s | "
        "of the kernel's rows/s | in all | by processor time | largest memory of a worker |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in measured:
        kernel = " and ".join(f"{rate:.0f}" for rate in one["kernel_rows_s"])
        lines.append(
            f"| `{one['command']}` | {one['where']} | {kernel} | {one['whole_s']:.1f} | "
            f"{one['few_s']:.1f} | "
            f"{one['ratio']:.2f} | {one['whole_ratio']:.2f} | {one['cpu_ratio']:.2f} | "
            f"{one['largest_bytes'] / 2**20:.0f} MiB |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
