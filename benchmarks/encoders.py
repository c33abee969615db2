"""One row of a version with an encoder, over HTTP, against the encoder alone in onnxruntime, in one
run.

`python -m benchmarks.encoders NAME --store DIR [--image FILE] [--short] [--write]` takes turns
between

* the encoder's graph alone: a session with the service's threads, on a row that is decoded already;
* `POST /predict` of that row, 100 fresh draws, over a kept-alive connection; an image goes as its file, in base64.

Then 64 connections ask without pause, and their rows a second are compared with those that the
encoder alone makes, as many rows at once as the service takes. Times depend on the machine and on
what else it does; ratios of one run are the result.
"""

import base64
import json
import statistics
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Float32
from matplotlib.figure import Figure

from benchmarks.common import bare_parser, report, serve
from benchmarks.load import closed_loop, post
from benchmarks.predict import Client, seconds
from model_store.artifacts.manifest import Manifest
from model_store.artifacts.store import ModelStore
from model_store.inference.encoder import Encoder
from model_store.inference.model import NEEDED, Model
from model_store.sources.images import as_row, open_image

DRAWS, CONNECTIONS = 100, 64
ALONE, SERVED = "the encoder alone, one row", "POST /predict, one row of 100 draws"
MANY_ALONE, MANY = "the encoder alone, many rows", f"POST /predict, {CONNECTIONS} connections"


def main() -> None:
    parser = bare_parser(__doc__, "encoders-NAME.{md,png}")
    parser.add_argument("name", help="a published version's model, with an encoder")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--image", type=Path, help="what is sent; without it, numbers")
    parser.add_argument("--short", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    store = ModelStore(options.store)
    artifact = store.open(options.name, store.resolve(options.name), NEEDED)
    encoder = Model.load(artifact).encoder
    assert encoder is not None
    spec = artifact.manifest.input
    if options.image is None:
        row = np.random.default_rng(0).integers(
            int(spec.minimum), int(spec.maximum) + 1, int(np.prod(spec.shape))
        )
        sent: object = row.tolist()
    else:
        assert spec.image is not None
        content = options.image.read_bytes()
        row, sent = (
            as_row(open_image(content, "image"), spec.shape, spec.image),
            base64.b64encode(content).decode(),
        )
    x = np.array(row, dtype=np.float32)[None]
    body = json.dumps({"model": options.name, "inputs": [sent], "num_samples": DRAWS}).encode()
    times = measure(options.store, encoder, x, body, 3 if options.short else 7)
    page = table(artifact.manifest, encoder, times, sends_image=options.image is not None)
    report(options, f"encoders-{options.name}", page, lambda: plot(times))


def measure(
    store: Path, encoder: Encoder, x: Float32[np.ndarray, "1 I"], body: bytes, rounds: int
) -> dict[str, list[float]]:
    many = x.repeat(CONNECTIONS, axis=0)
    calls = max(5, min(50, int(1.0 / encoder.row_s)))
    found: dict[str, list[float]] = {name: [] for name in (ALONE, SERVED, MANY_ALONE, MANY)}
    with serve(store) as service:
        client = Client(service.port, body)
        for n in range(rounds + 1):
            alone, served = seconds(lambda: encoder(x), calls), seconds(client.predict, calls)
            together = seconds(lambda: encoder(many), 2)
            rate = closed_loop(service.port, [post("/predict", body)], CONNECTIONS, 4.0).rate
            if n > 0:  # the first round warms up
                found[ALONE].append(statistics.median(alone))
                found[SERVED].append(statistics.median(served))
                found[MANY_ALONE].append(min(together) / CONNECTIONS)
                found[MANY].append(1.0 / rate)
    return found


def table(
    manifest: Manifest, encoder: Encoder, times: dict[str, list[float]], sends_image: bool
) -> str:
    """Return the page: medians of rounds, their range, and the ratios."""

    def ratio(over: str, under: str) -> str:
        of_rounds = sorted(a / b for a, b in zip(times[over], times[under], strict=True))
        return f"{statistics.median(of_rounds):.2f} ({of_rounds[0]:.2f} to {of_rounds[-1]:.2f})"

    numbers = int(np.prod(manifest.input.shape))
    lines = [
        f"# Encoders: {manifest.name}",
        "",
        f"`python -m benchmarks.encoders {manifest.name} --store DIR"
        f"{' --image FILE' if sends_image else ''}`: {numbers} numbers to "
        f"{encoder.spec.outputs}, {encoder.spec.rows_at_once} rows at once, method "
        f"{manifest.method}, {DRAWS} draws.",
        "",
        "| what | ms a row, median of rounds (range) |",
        "|---|---|",
    ]
    for name, of_rounds in times.items():
        ms = sorted(1e3 * s for s in of_rounds)
        lines.append(f"| {name} | {statistics.median(ms):.2f} ({ms[0]:.2f} to {ms[-1]:.2f}) |")
    lines += [
        "",
        f"* One row takes **{ratio(SERVED, ALONE)}** times the encoder alone (asked: 1.25 at "
        "most).",
        f"* {CONNECTIONS} connections get **{ratio(MANY_ALONE, MANY)}** of its rows a second "
        "(asked: .8).",
        "",
        f"![Milliseconds a row](encoders-{manifest.name}.png)",
        "",
    ]
    return "\n".join(lines)


def plot(times: dict[str, list[float]]) -> Figure:
    figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
    for i, of_rounds in enumerate(times.values()):
        ms = sorted(1e3 * s for s in of_rounds)
        middle = statistics.median(ms)
        axes.barh(i, middle, color="#4477aa" if i % 2 else "#bbbbbb", height=0.6)
        axes.plot([ms[0], ms[-1]], [i, i], color="black", linewidth=1.5)
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.set_xlabel("ms a row")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
