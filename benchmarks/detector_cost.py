"""What the detectors add to the time of a prediction: 16 rows, 100 draws, in process and over HTTP.

`python -m benchmarks.detector_cost NAME [--write]` takes the published network apart: the same
graph with the density detectors cut off, and a flag that goes by entropy alone, against the whole,
in alternating rounds.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from safetensors.numpy import save

from benchmarks.common import parser_of, report, serve
from benchmarks.predict import Client
from model_store.artifacts.manifest import FILES, Description
from model_store.artifacts.store import ModelStore
from model_store.conformal.calibration import Calibration
from model_store.inference.model import CALIBRATION_FILE, Model
from model_store.inference.runtime import Runtime
from model_store.types import DetectorNames

ROWS, ROUNDS, CALLS = 16, 100, 5
WHOLE, BARE = "whole", "bare"


def without_detectors(network: bytes) -> bytes:
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


def without_densities(calibration: Calibration) -> Calibration:
    scores = [name for name in calibration.reference if name not in calibration.standards]
    return replace(
        calibration,
        names=DetectorNames(("entropy",)),
        standards={},
        reference={name: calibration.reference[name] for name in scores},
        surprisals={name: calibration.surprisals[name] for name in scores},
    )


def milliseconds(predict: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        predict()
    return 1e3 * (time.perf_counter() - start) / CALLS


def measure(store: ModelStore, name: str) -> str:
    artifact = store.open(name, store.resolve(name), wanted=FILES)
    whole, noise = Model.load(artifact), artifact.manifest.noise
    small = without_detectors(artifact.files["network.onnx"])
    runtime = Runtime(
        artifact.files["sampler.onnx"], small, noise.dimension, 0, noise.algorithm, noise.paired
    )
    alone = {"density": (), "two_sided": (), "combined": ("entropy",)}
    detectors = artifact.manifest.detectors.model_copy(update=alone)
    manifest = artifact.manifest.model_copy(update={"detectors": detectors})
    bare = Model(manifest, runtime, without_densities(whole.calibration))
    spec = artifact.manifest.input
    rows = (
        np.random.default_rng(0)
        .uniform(spec.minimum, spec.maximum, (ROWS, whole.row_size))
        .astype(np.float32)
    )
    theta = whole.runtime.draw(1, 0, noise.default_draws)
    within = rounds_of(lambda: whole.predict(rows, theta), lambda: bare.predict(rows, theta))
    with tempfile.TemporaryDirectory() as folder:
        both = ModelStore(Path(folder))
        description = Description.model_validate(
            manifest.model_dump(include=set(Description.model_fields))
        )
        cut = {"network.onnx": small, CALIBRATION_FILE: save(bare.calibration.tensors())}
        both.publish(
            WHOLE,
            description.model_copy(update={"detectors": artifact.manifest.detectors}),
            artifact.files,
        )
        both.publish(BARE, description, {**artifact.files, **cut})
        with serve(both.root) as service:
            asked = {"inputs": rows.tolist(), "encoded": True}
            clients = [
                Client(service.port, json.dumps({"model": model, **asked}).encode())
                for model in (WHOLE, BARE)
            ]
            over_http = rounds_of(*(client.predict for client in clients))
    return "\n".join(
        [
            f"# What the detectors cost: {name} version {artifact.manifest.version}",
            "",
            f"`python -m benchmarks.detector_cost {name} --write`: {ROWS} rows, "
            f"{noise.default_draws} draws, {ROUNDS} alternating rounds of {CALLS} calls one after "
            "the other; a round's ratio, median (first and last tenth).",
            "",
            "| | all detectors, ms | no densities, ms | ratio |",
            "|---|---|---|---|",
            f"| in process | {line(within)} |",
            f"| `/predict` over HTTP, fresh draws | {line(over_http)} |",
            "",
        ]
    )


def rounds_of(whole: Callable[[], object], bare: Callable[[], object]) -> list[tuple[float, float]]:
    for _ in range(CALLS):  # until both are warm
        whole()
        bare()
    return [(milliseconds(whole), milliseconds(bare)) for _ in range(ROUNDS)]


def line(times: list[tuple[float, float]]) -> str:
    """Return medians and the ratio of rounds, as cells."""
    whole, bare = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = [with_all / without for with_all, without in times]
    low, middle, high = np.quantile(ratios, (0.1, 0.5, 0.9))
    return f"{whole:.2f} | {bare:.2f} | {middle:.2f} ({low:.2f} - {high:.2f})"


def main() -> None:
    parser = parser_of(__doc__, "detector-cost-NAME.md")
    options = parser.parse_args()
    text = measure(ModelStore(options.store), options.name)
    report(options, f"detector-cost-{options.name}", text)


if __name__ == "__main__":
    main()
