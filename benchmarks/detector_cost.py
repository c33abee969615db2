"""What the detectors add to the time of a prediction: 16 rows, 100 draws, in process.

`python -m benchmarks.detector_cost NAME [--write]` takes the published network apart: the same graph with the density
detectors cut off, and a calibration of entropy alone, against the whole, in alternating rounds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.model import ROOT
from model_store.calibration import Calibration
from model_store.model import NEEDED, Model
from model_store.runtime import Runtime
from model_store.store import ModelStore

ROWS, ROUNDS, CALLS = 16, 15, 10


def without_detectors(network: bytes) -> bytes:
    """Return the graph with a density of no columns, and nothing that led to the others."""
    model = onnx.load_model_from_string(network)
    graph = model.graph
    wanted = {output.name for output in graph.output if output.name != "density"}
    kept = []
    for node in reversed(graph.node):
        if wanted & set(node.output):
            kept.append(node)
            wanted |= set(node.input)
    shape = helper.make_node("Shape", ["x"], ["rows"], start=0, end=1)
    size = helper.make_node("Concat", ["rows", "no_columns"], ["density_shape"], axis=0)
    empty = helper.make_node("ConstantOfShape", ["density_shape"], ["density"])
    del graph.node[:]
    graph.node.extend([*reversed(kept), shape, size, empty])
    initializers = [tensor for tensor in graph.initializer if tensor.name in wanted]
    del graph.initializer[:]
    graph.initializer.extend([*initializers, numpy_helper.from_array(np.array([0]), "no_columns")])
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())


def entropy_alone(calibration: Calibration) -> Calibration:
    """Return a calibration that judges entropy and nothing else."""
    only = {"entropy": calibration.reference["entropy"]}
    surprises = {"entropy": calibration.surprises["entropy"]}
    return replace(
        calibration,
        combined=("entropy",),
        two_sided=(),
        standards={},
        reference=only,
        surprises=surprises,
        settling=None,
    )


def milliseconds(predict: Callable[[], object]) -> float:
    """Return the mean time of a call."""
    start = time.perf_counter()
    for _ in range(CALLS):
        predict()
    return 1e3 * (time.perf_counter() - start) / CALLS


def measure(store: ModelStore, name: str) -> str:
    """Measure a published model and return the result as Markdown."""
    artifact = store.open(name, store.resolve(name), wanted=NEEDED)
    whole, noise = Model.load(artifact), artifact.manifest.noise
    small = without_detectors(artifact.files["network.onnx"])
    runtime = Runtime(artifact.files["sampler.onnx"], small, noise.dimension, 0, noise.algorithm, noise.paired)
    alone = {"density": (), "two_sided": (), "combined": ("entropy",)}
    detectors = artifact.manifest.detectors.model_copy(update=alone)
    manifest = artifact.manifest.model_copy(update={"detectors": detectors})
    bare = Model(manifest, runtime, entropy_alone(whole.calibration))
    spec = artifact.manifest.input
    rows = np.random.default_rng(0).uniform(spec.minimum, spec.maximum, (ROWS, whole.row_size)).astype(np.float32)
    theta = whole.runtime.draw(1, 0, noise.default_draws)
    times = [
        (milliseconds(lambda: whole.predict(rows, theta)), milliseconds(lambda: bare.predict(rows, theta)))
        for _ in range(ROUNDS)
    ]
    ratios = sorted(with_all / without for with_all, without in times)
    best = [min(column) for column in zip(*times, strict=True)]
    return "\n".join(
        [
            f"# What the detectors cost: {name} version {artifact.manifest.version}",
            "",
            f"`python -m benchmarks.detector_cost {name} --write`: {ROWS} rows, {noise.default_draws} draws, "
            f"in process, {ROUNDS} alternating rounds of {CALLS} calls.",
            "",
            "| | fastest round, ms |",
            "|---|---|",
            f"| all detectors | {best[0]:.2f} |",
            f"| entropy alone, no densities in the graph | {best[1]:.2f} |",
            "",
            f"Ratio of a round: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}; "
            f"of the fastest rounds {best[0] / best[1]:.3f}.",
            "",
        ]
    )


def main() -> None:
    """Measure, print, and with `--write` keep it in docs/results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--store", type=Path, default=Path(os.environ.get("DUBITO_STORE", "models")))
    parser.add_argument("--write", action="store_true", help="write docs/results/detector-cost-NAME.md")
    options = parser.parse_args()
    text = measure(ModelStore(options.store), options.name)
    print(text)
    if options.write:
        (ROOT / "docs" / "results" / f"detector-cost-{options.name}.md").write_text(text)


if __name__ == "__main__":
    main()
