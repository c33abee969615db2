"""Compare table fits with histogram gradient boosting in time and memory.

Run `python -m benchmarks.fits [--sizes ROWSxCOLUMNS ...] [--write]`. Each table is a Parquet file
with random numbers and a class that depends on the first ten columns. Each fit runs in a separate
process, which also reads the file: `dubito fit` with default settings, including calibration and
baselines, or scikit-learn's HistGradientBoostingClassifier. Time is the elapsed time, with the
processor time in parentheses. Memory is the peak of the process. It is followed by the increase
over 1,000 rows of 10 columns, divided by the table's size in float64. The log-likelihoods are those
of test rows, in nats, and boosting's are those of the fit's baseline.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import ROOT, bare_parser, report
from model_store.artifacts.store import ModelStore

SMALLEST = "1000x10"
BY_ROWS = ["1000x20", "10000x20", "100000x20", "1000000x20"]
BY_COLUMNS = ["2000x500", "10000x10", "10000x100", "10000x1000"]
MEASURE = """
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
elapsed = time.perf_counter() - start
print(code, elapsed, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
"""
BOOSTING = """
import sys, pyarrow.parquet as pq
from sklearn.ensemble import HistGradientBoostingClassifier
table = pq.read_table(sys.argv[1]).to_pandas()
y = table.pop("y")
HistGradientBoostingClassifier().fit(table, y)
"""


def write_table(path: Path, rows: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns))
    score = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3:10].sum(1) / 4
    y = score + rng.logistic(size=rows) / 4 > 0
    numbers = {f"x{i}": x[:, i] for i in range(columns)}
    pq.write_table(pa.table(numbers | {"y": np.where(y, "yes", "no")}), path)


def measure(command: list[str], folder: Path) -> tuple[float, float, float]:
    """Run a command, and return its seconds, processor seconds and peak memory in bytes."""
    environment = os.environ | {"DUBITO_STORE": str(folder / "models"), "PYTHONPATH": str(ROOT)}
    output = subprocess.check_output(
        [sys.executable, "-c", MEASURE, *command], cwd=folder, env=environment, text=True
    )
    code, elapsed, seconds, memory = map(float, output.split())
    assert code == 0, command
    return elapsed, seconds, memory


def main() -> None:
    parser = bare_parser(__doc__, "fits.md")
    parser.add_argument("--sizes", nargs="+", default=[*BY_ROWS, *BY_COLUMNS])
    options = parser.parse_args()
    header = "rows | columns | fit | memory | log-likelihood | boosting | memory | log-likelihood"
    lines = [f"| {header} |", "|---|---|---|---|---|---|---|---|"]
    base: list[float] = []
    for size in [SMALLEST, *options.sizes]:
        rows, columns = map(int, size.split("x"))
        cells = [f"{rows:,}", f"{columns:,}"]
        with tempfile.TemporaryDirectory() as name:
            folder, file = Path(name), Path(name) / "table.parquet"
            write_table(file, rows, columns)
            fit = ["-m", "training", "fit", "--data", f"parquet:{file}", "--target", "y"]
            boosting = ["-c", BOOSTING, str(file)]
            for i, arguments in enumerate((fit, boosting)):
                elapsed, seconds, memory = measure([sys.executable, *arguments], folder)
                if size == SMALLEST:
                    base.append(memory)
                multiple = (memory - base[i]) / (8 * rows * columns)
                cells += [
                    f"{elapsed:.1f} s ({seconds:.1f} s)",
                    f"{memory / 2**20:,.0f} MiB, {multiple:.1f}",
                ]
                manifest = ModelStore(folder / "models").manifest("table", "1")
                figures = (manifest.quality, manifest.baselines["boosting"])[i]
                cells.append(f"{figures['test_log_likelihood']:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    report(options, "fits", "# Fits of tables\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
