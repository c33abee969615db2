"""Tiny versions without training, with valid graphs and calibration.

paired     theta scales the logits of a linear model; rows may have separate draws
unpaired   theta is the weight matrix; all rows of a batch share draws
"""

from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save

from model_store.artifacts.manifest import CategorySpec, Description, DetectorNames
from model_store.artifacts.store import ModelStore
from model_store.conformal.abstention import Answers
from model_store.conformal.calibration import Calibration, DetectorScores
from model_store.conformal.mondrian import Categories
from model_store.conformal.rank_tables import class_nonconformity
from model_store.inference.model import NEEDED, Model, detector_scores
from model_store.inference.noise import NOISE_ALGORITHM
from model_store.inference.runtime import Runtime
from model_store.scores.classification import predictive_scores, predictive_sums

INPUTS, HIDDEN, CLASSES, NOISE = 3, 6, 4, 5
COUNTS = [1, 2, 5, 10, 20]
DRAWS = COUNTS[-1]
REFERENCE, RANKING = 60, 99
GROUPS, SMALL = ("red", "green", "blue"), 18  # rows of the last group
NAMES = DetectorNames(combined=("entropy", "distance"), density=("distance",))


def rows(generator: np.random.Generator, count: int) -> np.ndarray:
    """Draw rows from the calibration distribution."""
    return generator.normal(size=(count, INPUTS)).astype(np.float32)


def create_store(folder: Path, paired: bool = True, versions: int = 1) -> ModelStore:
    """Create a store with versions of `tiny`."""
    store = ModelStore(folder)
    for _ in range(versions):
        publish(store, paired=paired)
    return store


def publish(
    store: ModelStore, name: str = "tiny", paired: bool = True, kind: str | None = None
) -> str:
    """Publish a version, optionally calibrated by category. Return the version number."""
    spec = description(paired)
    if kind is not None:
        categories = _calibration(_runtime(paired), kind).categories
        spec = spec.model_copy(
            update={
                "categories": CategorySpec(
                    kind=kind,
                    names=categories.names,
                    column="colour" if kind == "group" else None,
                    judged_rows=tuple(categories.judged_rows.tolist()),
                    true_rows=tuple(categories.true_rows.tolist()),
                )
            }
        )
    return store.publish(name, spec, files(paired, kind)).version


def load_model(folder: Path, paired: bool = True) -> Model:
    """Publish a version and load it like the service."""
    return Model.load(create_store(folder, paired).open("tiny", "1", files=NEEDED), threads=1)


@cache
def files(paired: bool = True, kind: str | None = None) -> dict[str, bytes]:
    """Create the files of a version."""
    graphs = {"sampler.onnx": sampler(paired), "network.onnx": network(paired)}
    calibration = save(_calibration(_runtime(paired), kind).tensors())
    return {**graphs, "weights.safetensors": save({}), "calibration.safetensors": calibration}


def _runtime(paired: bool) -> Runtime:
    return Runtime(sampler(paired), network(paired), NOISE, threads=1, paired=paired)


def description(paired: bool = True) -> Description:
    return Description.model_validate(
        {
            "method": "test",
            "task": "classification",
            "input": {"shape": [INPUTS], "minimum": -10, "maximum": 10},
            "output": {"classes": [f"class {c}" for c in range(CLASSES)]},
            "noise": {
                "algorithm": NOISE_ALGORITHM,
                "dimension": NOISE,
                "theta_dimension": _theta_dimension(paired),
                "paired": paired,
                "default_draws": DRAWS,
            },
            "detectors": {
                "density": NAMES.density,
                "combined": NAMES.combined,
                "draw_counts": COUNTS,
                "reference_rows": REFERENCE,
                "ranking_rows": RANKING,
                "smallest_fpr": 1 / (RANKING + 1),
            },
            "abstention": {"confidence": 0.95, "smallest_risk": 0.4},
            "training": {},
            "quality": {},
            "parity": {},
        }
    )


def sampler(paired: bool = True) -> bytes:
    """theta = eps A + b."""
    generator, size = np.random.default_rng(0), _theta_dimension(paired)
    constants = {"A": 0.5 * generator.normal(size=(NOISE, size)), "b": generator.normal(size=size)}
    nodes = [
        helper.make_node("MatMul", ["eps", "A"], ["product"]),
        helper.make_node("Add", ["product", "b"], ["theta"]),
    ]
    return _packed(
        "sampler", nodes, [_value("eps", "K", NOISE)], [_value("theta", "K", size)], constants
    )


def network(paired: bool = True) -> bytes:
    """log_probs = log softmax(theta * (features W)) or log softmax(features theta); density =
    |x|^2."""
    generator = np.random.default_rng(1)
    constants = {"V": generator.normal(size=(INPUTS, HIDDEN)), "last": np.array([1])}
    nodes = [
        helper.make_node("MatMul", ["x", "V"], ["product"]),
        helper.make_node("Relu", ["product"], ["features"]),
        helper.make_node("ReduceSumSquare", ["x", "last"], ["density"], keepdims=1),
    ]
    if paired:
        constants["W"] = generator.normal(size=(HIDDEN, CLASSES))
        nodes.append(helper.make_node("MatMul", ["features", "W"], ["unscaled"]))
        nodes.append(helper.make_node("Mul", ["unscaled", "theta"], ["logits"]))
    else:
        constants["shape"] = np.array([-1, HIDDEN, CLASSES])
        nodes.append(helper.make_node("Reshape", ["theta", "shape"], ["matrices"]))
        nodes.append(helper.make_node("MatMul", ["features", "matrices"], ["logits"]))
    nodes.append(helper.make_node("LogSoftmax", ["logits"], ["log_probs"], axis=-1))
    inputs = [
        _value("x", "N", INPUTS),
        _value("theta", "K", "P" if paired else 1, _theta_dimension(paired)),
    ]
    outputs = [
        _value("log_probs", "K", "N", CLASSES),
        _value("features", "N", HIDDEN),
        _value("density", "N", 1),
    ]
    return _packed("network", nodes, inputs, outputs, constants)


def _theta_dimension(paired: bool) -> int:
    return CLASSES if paired else HIDDEN * CLASSES


def _calibration(runtime: Runtime, kind: str | None = None) -> Calibration:
    generator = np.random.default_rng(2)
    reference, ranking = (
        _Split(runtime, rows(generator, n), seed) for seed, n in enumerate((REFERENCE, RANKING))
    )
    y = generator.integers(CLASSES, size=RANKING)
    return Calibration.fit(
        COUNTS,
        reference.detected(),
        ranking.detected(),
        np.stack([class_nonconformity(s.probabilities, y) for s in ranking.scores]),
        NAMES,
        CLASSES,
        Answers.from_splits(
            np.stack([s.variation_ratio for s in reference.scores]),
            np.stack([s.variation_ratio for s in ranking.scores]),
            np.stack([s.label != y for s in ranking.scores]),
        ),
        {
            None: None,
            "class": Categories(
                "class", description().classes, np.stack([s.label for s in ranking.scores]), y
            ),
            "group": Categories.by_group(GROUPS, _groups(), len(COUNTS)),
        }[kind],
    )


def _groups() -> np.ndarray:
    """Return two groups and a group that is too small to calibrate."""
    rows = np.arange(RANKING)
    return np.where(rows < SMALL, len(GROUPS) - 1, rows % 2)


class _Split:
    """Runtime outputs of a split by number of draws."""

    def __init__(self, runtime: Runtime, x: np.ndarray, seed: int) -> None:
        outputs, self.density = runtime.run_set(x, runtime.draw_set(seed, DRAWS))
        self.scores = [predictive_scores(predictive_sums(outputs[:count])) for count in COUNTS]

    def detected(self) -> DetectorScores:
        by_count = [detector_scores(scores, self.density, NAMES.density) for scores in self.scores]
        return DetectorScores(
            {name: np.stack([scores[name] for scores in by_count]) for name in by_count[0]},
            np.stack([scores.label for scores in self.scores]),
        )


def _value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _packed(name, nodes, inputs, outputs, constants: dict[str, np.ndarray]) -> bytes:
    tensors = [
        numpy_helper.from_array(a if a.dtype == np.int64 else a.astype(np.float32), key)
        for key, a in constants.items()
    ]
    graph = helper.make_graph(nodes, name, inputs, outputs, tensors)
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    ).SerializeToString()
