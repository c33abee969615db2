"""A published model on a GPU, against the same machine's processors.

    python -m benchmarks.gpu NAME [--store DIR] [--write]

It needs `onnxruntime-gpu`, a GPU, and the data that the model was fitted on. Two processes of their
own load the model, one of them without the GPU: 100 draws of 1 to 8,192 rows, with scores and
p-values; one-row JSON requests over HTTP, one after the other. Answers are compared under the same
draws; Monte Carlo error is that of a class's mean probability over 100 draws.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import onnxruntime as ort
from matplotlib.figure import Figure

from benchmarks.common import ROOT, open_model, parser_of, report, serve, unseen_rows
from benchmarks.kernel import fastest
from model_store.inference.sessions import CUDA
from model_store.processes import processors

DRAWS = 100
ROWS = (1, 16, 128, 1024, 8192)
COMPARED_ROWS = 2000
SECONDS = 1.0  # of calls of one kind
REQUESTS = 300
PLACES = {"processors": {"CUDA_VISIBLE_DEVICES": ""}, "GPU": {}}


def measure(options: Any) -> dict[str, Any]:
    """Return what one process measures, and keep its answers in `options.kept`."""
    model = open_model(options)
    x = unseen_rows(model).x.astype(np.float32)
    x = np.resize(x, (max(max(ROWS), len(x)), x.shape[1]))
    theta = model.runtime.draw(0, 0, DRAWS)
    network, answers = {}, {}
    for n in ROWS:
        network[n] = fastest(lambda n=n: model.runtime.run(x[:n], theta[:, None]), SECONDS)
        answers[n] = fastest(
            lambda n=n: model.predict(x[:n], model.runtime.draw(0, 0, DRAWS)), SECONDS
        )
    outputs, density = model.runtime.run(x[:COMPARED_ROWS], theta[:, None])
    p_value = model.prediction(outputs, density).p_values.p_value
    np.savez(options.kept / "answers.npz", outputs=outputs, p_value=p_value)
    with serve(options.store) as service:
        body = json.dumps({"model": options.name, "inputs": x[:1].tolist(), "num_samples": DRAWS})
        taken = []
        for _ in range(REQUESTS):
            begun = time.perf_counter()
            service.ask("POST", "/predict", body)
            taken.append(time.perf_counter() - begun)
        memory = {"resident": service.memory()[0], "GPU": float(gpu_says("memory.used"))}
    return {"network": network, "answers": answers, "request": taken, "memory": memory}


def gpu_says(field: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure_at(place: str, options: Any, folder: Path) -> tuple[dict[str, Any], Any]:
    kept = folder / place
    kept.mkdir()
    command = [sys.executable, "-m", "benchmarks.gpu", options.name, "--store", str(options.store)]
    environment = {**os.environ, **PLACES[place]}
    subprocess.run([*command, "--kept", str(kept)], env=environment, cwd=ROOT, check=True)
    return json.loads((kept / "figures.json").read_text()), np.load(kept / "answers.npz")


def table(found: dict[str, Any], answers: dict[str, Any], name: str) -> str:
    lines = [
        "# A published model on a GPU",
        "",
        f"`python -m benchmarks.gpu {name} --write`: {DRAWS} draws, onnxruntime {ort.__version__}, "
        f"{gpu_says('name')} and {processors()} processors. Rows a second of whole answers, fastest "
        "calls.",
        "",
        "| rows | processors | GPU | GPU over processors | network alone, GPU over processors |",
        "|---|---|---|---|---|",
    ]
    for n in map(str, ROWS):
        ours = [int(n) / found[place]["answers"][n] for place in PLACES]
        ratio = found["processors"]["network"][n] / found["GPU"]["network"][n]
        lines.append(
            f"| {n} | {ours[0]:,.0f} | {ours[1]:,.0f} | {ours[1] / ours[0]:.1f} | {ratio:.1f} |"
        )
    requests = {place: statistics.median(found[place]["request"]) for place in PLACES}
    probabilities = [np.exp(answers[place]["outputs"].astype(np.float64)) for place in PLACES]
    error = probabilities[0].std(axis=0, ddof=1) / DRAWS**0.5
    apart = np.abs(probabilities[0].mean(axis=0) - probabilities[1].mean(axis=0))
    p_values = [answers[place]["p_value"] for place in PLACES]
    sure = apart[error > 1e-4] / error[error > 1e-4]
    lines += [
        "",
        "| | processors | GPU |",
        "|---|---|---|",
        "| a one-row request, one after the other, median, ms | "
        + " | ".join(f"{1e3 * requests[place]:.2f}" for place in PLACES)
        + " |",
        *(
            f"| {kind} memory, MB | "
            + " | ".join(f"{found[place]['memory'][kind]:.0f}" for place in PLACES)
            + " |"
            for kind in ("resident", "GPU")
        ),
        "",
        f"Of {COMPARED_ROWS} rows under the same draws, mean probabilities are {apart.max():.1e} "
        f"apart at most, {sure.max():.1e} of their Monte Carlo error at most (where it is above "
        f"1e-4); p-values are {np.abs(p_values[0] - p_values[1]).max():.1e} apart at most.",
        "",
        "![Rows a second](gpu.png)",
    ]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any]) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for place in PLACES:
        axis.plot(ROWS, [n / found[place]["answers"][str(n)] for n in ROWS], "o-", label=place)
    axis.set(xscale="log", yscale="log", xlabel="rows at once", ylabel="rows a second")
    axis.legend()
    return figure


def main() -> None:
    parser = parser_of(__doc__, "gpu.{md,png}")
    parser.add_argument("--kept", type=Path, help="what a process of its own leaves")
    options = parser.parse_args()
    if options.kept:
        (options.kept / "figures.json").write_text(json.dumps(measure(options)))
        return
    assert CUDA in ort.get_available_providers(), "expected onnxruntime-gpu"
    with tempfile.TemporaryDirectory() as folder:
        both = {place: measure_at(place, options, Path(folder)) for place in PLACES}
        found = {place: figures for place, (figures, _) in both.items()}
        answers = {place: kept for place, (_, kept) in both.items()}
        report(options, "gpu", table(found, answers, options.name), lambda: plot(found))


if __name__ == "__main__":
    main()
