"""Compare the latency and memory of local draws and weight draws.

`python -m benchmarks.methods [--rounds N] [--store DIR] [--write]` publishes untrained models of
MNIST's size. Each round sends `POST /predict` with 100 fresh draws to every version in turn. Memory
is measured in a new process that loads a version and predicts the same rows.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np

from benchmarks.common import bare_parser, publish_untrained, report, serve, spread
from benchmarks.predict import DRAWS, Client, seconds
from model_store.artifacts.store import ModelStore
from training.networks.local import localise

METHODS = ("bbb-gaussian", "bbb-mixture", "mvn", "variational-hypernet", "laplace")
REFERENCE = "bhn-realnvp"
WEIGHTS = "-weights"  # suffix of models with weight draws
ROWS = (1, 128)
CALLS = {"local": {1: 40, 128: 3}, "weights": {1: 1, 128: 1}}
MEMORY = """
import sys, numpy as np
from pathlib import Path
from model_store.artifacts.store import ModelStore
from model_store.inference.model import NEEDED, Model
store, name = ModelStore(Path(sys.argv[1])), sys.argv[2]
model = Model.load(store.open(name, "1", files=NEEDED))
for rows in (1, 128):
    model.runtime.run_set(np.zeros((rows, 784), np.float32), model.runtime.draw_set(0, 100))
status = Path("/proc/self/status").read_text()
print(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")))
"""
Times = dict[str, dict[int, list[float]]]  # milliseconds by version and rows


def publish_missing(store: ModelStore) -> None:
    names = store.names()
    for name in (REFERENCE, *METHODS, *(f"{method}{WEIGHTS}" for method in METHODS)):
        method = name.removesuffix(WEIGHTS)
        convert = localise if name == method else lambda model, _: model
        if name not in names:
            with patch("training.publishing.publish.localise", convert):
                publish_untrained(store, "float32", method, name)


def measure(store: ModelStore, rounds: int) -> Times:
    x = np.random.default_rng(0).integers(0, 256, (max(ROWS), 784)).tolist()
    times: Times = {name: {n: [] for n in ROWS} for name in store.names()}
    with serve(store.root) as service:
        for turn in range(rounds + 1):
            for n in ROWS:
                for name, by_rows in times.items():
                    request = {"model": name, "inputs": x[:n], "num_samples": DRAWS}
                    client = Client(service.port, json.dumps(request).encode())
                    calls = CALLS["weights" if name.endswith(WEIGHTS) else "local"][n]
                    used = seconds(client.predict, calls if turn else 1)
                    if turn:  # The first round is a warm-up.
                        by_rows[n].append(1e3 * median(used))
    return times


def megabytes(store: ModelStore, name: str) -> float:
    command = [sys.executable, "-c", MEMORY, str(store.root), name]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout) / 1024


def table(store: ModelStore, times: Times, rounds: int) -> str:
    lines = [
        "# Local draws and draws of weights, 784-800-800-10, 100 fresh draws",
        "",
        f"`python -m benchmarks.methods --rounds {rounds} --write`; `POST /predict` by turns, 2 "
        "cores. Milliseconds: median of rounds (minimum–maximum). Ratios are to "
        f"`{REFERENCE}` in the same round. Files: the two graphs. Memory: the peak of a process "
        "that predicts 1 and 128 rows.",
        "",
        "| version | 1 row, ms | ratio | 128 rows, ms | ratio | noise per draw | files, MB | memory, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, by_rows in times.items():
        manifest = store.manifest(name, "1")
        cells = [name.replace(WEIGHTS, ", draws of weights")]
        for n in ROWS:
            pairs = zip(by_rows[n], times[REFERENCE][n], strict=True)
            ratio = median(value / reference for value, reference in pairs)
            cells += [spread(by_rows[n], 1), f"{ratio:.2f}"]
        size = sum(manifest.files[file].size for file in ("sampler.onnx", "network.onnx"))
        cells += [f"{manifest.noise.dimension:,}", f"{size / 1e6:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{megabytes(store, name):.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = bare_parser(__doc__, "methods.md")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", type=Path, help="folder that keeps the models for other runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = ModelStore(options.store or Path(folder))
        publish_missing(store)
        times = measure(store, options.rounds)
        text = table(store, times, options.rounds)
    report(options, "methods", text)


if __name__ == "__main__":
    main()
