"""The Open Inference Protocol beside our own route: the same rows as bytes, in turns.

`python -m benchmarks.open_inference [--rounds 5] [--seconds 1] [--write]` serves an untrained model
of MNIST's size and sends it 1 and 64 rows of 784 numbers, with 100 draws and with 1, which leaves
little but the protocols' cost:

* `POST /predict` with an npy body, answered in JSON, and answered in npz;
* `POST /v2/models/mnist/infer` with the same rows as a binary tensor, answered in binary tensors, all that there are.

A client in this process keeps one request under way on each of two connections. Figures are answers
a second and the server's processor time for each, and the npy route's beside the protocol's in the
same round.
"""

import argparse
import io
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.load import closed_loop, post
from benchmarks.model import NAME, publish_untrained
from benchmarks.options import RESULTS
from benchmarks.predict import Running, server
from benchmarks.request_cost import processor_seconds
from model_store.artifacts.store import ModelStore

ROWS, DRAWS, CONNECTIONS = (1, 64), (100, 1), 2
WAYS = ("npy, answered in JSON", "npy, answered in npz", "V2, binary")


def main() -> None:
    """Measure and print a table; with `--write` keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in each round")
    parser.add_argument("--write", action="store_true", help="write docs/results/open-inference.md")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        publish_untrained(ModelStore(Path(folder)))
        with server(Path(folder)) as running:
            for rows in ROWS:
                for draws in DRAWS:
                    requests = requests_of(rows, draws)
                    for request in requests:
                        asked(running, request, 0.2)  # warm up
                    found[rows, draws] = [
                        [asked(running, request, options.seconds) for request in requests]
                        for _ in range(options.rounds)
                    ]
    text = table(found, options.rounds, options.seconds)
    print(text)
    if options.write:
        (RESULTS / "open-inference.md").write_text(text)


def requests_of(rows: int, draws: int) -> list[bytes]:
    """Return a request for each of `WAYS`."""
    x = np.random.default_rng(0).integers(0, 256, (rows, 784)).astype(np.float32)
    file = io.BytesIO()
    np.save(file, x)
    path, npy = f"/predict?num_samples={draws}", "Content-Type: application/x-npy\r\n"
    tensor = {
        "name": "x",
        "datatype": "FP32",
        "shape": [rows, 784],
        "parameters": {"binary_data_size": x.nbytes},
    }
    content = {"inputs": [tensor], "parameters": {"num_samples": draws, "binary_data_output": True}}
    text = json.dumps(content).encode()
    length = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return [
        post(path, file.getvalue(), npy),
        post(path, file.getvalue(), f"{npy}Accept: application/x-npz\r\n"),
        post(f"/v2/models/{NAME}/infer", text + x.tobytes(), length),
    ]


def asked(running: Running, request: bytes, seconds: float) -> tuple[float, float]:
    """Return answers a second, all of which must be good, and the server's processor milliseconds
    for each."""
    begun = processor_seconds(running.pid)
    load = closed_loop(running.port, [request], CONNECTIONS, seconds, warm_up_s=0.0)
    assert set(load.counts) == {"200"}, load.counts
    return load.rate, 1e3 * (processor_seconds(running.pid) - begun) / len(load.kinds)


def table(
    found: dict[tuple[int, int], list[list[tuple[float, float]]]], rounds: int, seconds: float
) -> str:
    """Return the page."""
    command = (
        f"`python -m benchmarks.open_inference --rounds {rounds} --seconds {seconds:g} --write`"
    )
    lines = [
        "# The Open Inference Protocol beside our own route",
        "",
        f"{command}; 784-800-800-10, {CONNECTIONS} connections, median over rounds (least - most).",
        "Times: the npy route's rate over the protocol's in the same round, and the protocol's "
        "processor time over",
        "the npy route's; below 1 the protocol is faster. Processor time is the server's.",
    ]
    for part, (what, digits) in enumerate((("answers a second", 1), ("processor ms an answer", 2))):
        lines += [
            "",
            f"| rows | draws | {' | '.join(f'{way}: {what}' for way in WAYS)} | JSON, times | "
            "npz, times |",
        ]
        lines.append("|---|---|---|---|---|---|---|")
        for (rows, draws), measured in found.items():
            columns = [[way[part] for way in one] for one in zip(*measured, strict=True)]
            ratios = [
                [own / its for own, its in zip(columns[i], columns[2], strict=True)] for i in (0, 1)
            ]
            if part == 1:  # of times, less is more
                ratios = [[1.0 / ratio for ratio in one] for one in ratios]
            cells = [shown(one, digits) for one in columns] + [shown(one, 2) for one in ratios]
            lines.append(f"| {rows} | {draws} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def shown(values: list[float], digits: int) -> str:
    """Return the median, least and most of some figures."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
