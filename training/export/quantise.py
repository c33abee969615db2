"""Quantisation of the network's graph to int8 weights and 7-bit activations.

All draws share the directions V of a hidden layer. Large products are replaced by

    h V^T  ~  s_row (q_h q_V^T) s_unit

with q_h = round(h / s_row) in 0..127 and q_V in -127..127. Each row has a scale, its largest
activation / 127, so results are independent of other rows. The first layer, which runs once for all
draws, and small layers stay in float32.

The sampler stays in float32.

Integer sums are exact. Processors without VNNI add pairs of products in 16 bits. With 7-bit
activations these sums cannot overflow, so all processors compute the same result.
"""

import math
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnx.helper import make_node

from model_store.inference.graphs import extract_subgraph
from model_store.inference.runtime import Runtime
from model_store.scores.classification import Scores, predictive_scores, predictive_sums
from training.data.rows import Rows

MIN_SIZE = 64  # inputs and outputs of a product; smaller ones stay in float32
LEVELS = 127
CHECKED_ROWS = 512
FUSED = "com.microsoft"  # onnxruntime's operators, including MatMulIntegerToFloat


@dataclass(frozen=True)
class QuantisationError:
    """The RMS errors of mean probabilities due to quantisation and Monte Carlo sampling."""

    int8_probabilities: float
    int8_monte_carlo: float
    int8_same_label: float

    @property
    def is_hidden(self) -> bool:
        return self.int8_probabilities < self.int8_monte_carlo


def quantise_network(network: bytes) -> bytes:
    model = onnx.load_model_from_string(network)
    graph = model.graph
    weights = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    inputs = {
        kind: {n.output[0]: n.input[0] for n in graph.node if n.op_type == kind}
        for kind in ("Transpose", "ReduceL2", "Relu")
    }
    transposed, lengths = (
        {output: name for output, name in inputs[kind].items() if name in weights}
        for kind in ("Transpose", "ReduceL2")
    )
    nodes: list[onnx.NodeProto] = []
    added: dict[str, np.ndarray] = {
        "levels": np.array(LEVELS, dtype=np.float32),
        "least": np.array(1e-30, dtype=np.float32),
        "one": np.array(1.0, dtype=np.float32),
        "zero": np.array(0, dtype=np.uint8),
        "last_axis": np.array([-1], dtype=np.int64),
    }
    scales: dict[str, str] = {}  # by name of g / |V|
    for node in graph.node:
        name = transposed.get(node.input[1], "") if node.op_type == "MatMul" else ""
        if node.op_type == "Div" and node.input[1] in lengths:
            scales[node.output[0]] = node.input[0]
        elif name not in lengths.values() or min(weights[name].shape) < MIN_SIZE:
            nodes.append(node)
        else:
            direction = weights[name]
            unit_scale = np.abs(direction).max(axis=1) / LEVELS
            added[f"{name}.int8"] = _to_int8(direction, unit_scale)
            added[f"{name}.unit_scale"] = (unit_scale / _length(direction)).astype(np.float32)
            activation = inputs["Relu"].get(node.input[0], node.input[0])
            nodes += _integer_product(activation, name, node.output[0])
    if len(nodes) == len(graph.node) - len(scales):  # no large product
        return network
    for name in lengths.values():
        length = _length(weights[name]).reshape(-1, *[1] * (weights[name].ndim - 1))
        added[name] = (weights[name] / length).astype(np.float32)
    for node in nodes:
        for i, name in enumerate(node.input):
            node.input[i] = scales.get(name, name)
    return _with_nodes(model, nodes, added)


def _to_int8(weight: np.ndarray, unit_scale: np.ndarray) -> np.ndarray:
    return np.round(weight / unit_scale[:, None]).astype(np.int8).T.copy()


def _length(direction: np.ndarray) -> np.ndarray:
    return np.linalg.norm(direction.reshape(len(direction), -1).astype(np.float64), axis=1)


def _integer_product(activation: str, weight: str, product: str) -> list[onnx.NodeProto]:
    """Build the nodes that multiply an activation by an int8 weight.

    Negative activations are rounded to 0, which replaces a preceding Relu.
    """
    parts = ("largest", "range", "inverse", "scaled", "levels", "sums", "scale")
    largest, span, inverse, scaled, levels, sums, scale = (f"{product}.{part}" for part in parts)
    factors = [levels, f"{weight}.int8", "one", f"{weight}.unit_scale", "zero"]
    return [
        make_node("ReduceMax", [activation, "last_axis"], [largest], keepdims=1),
        make_node("Max", [largest, "least"], [span]),
        make_node("Div", ["levels", span], [inverse]),
        make_node("Mul", [activation, inverse], [scaled]),
        make_node("QuantizeLinear", [scaled, "one", "zero"], [levels]),
        make_node("MatMulIntegerToFloat", factors, [sums], domain=FUSED),
        make_node("Div", [span, "levels"], [scale]),
        make_node("Mul", [sums, scale], [product]),
    ]


def _with_nodes(
    model: onnx.ModelProto, nodes: list[onnx.NodeProto], added: dict[str, np.ndarray]
) -> bytes:
    graph = model.graph
    del graph.node[:]
    graph.node.extend(nodes)
    tensors = [tensor for tensor in graph.initializer if tensor.name not in added]
    tensors += [numpy_helper.from_array(np.asarray(a), name) for name, a in added.items()]
    del graph.initializer[:]
    graph.initializer.extend(tensors)
    model.opset_import.append(helper.make_opsetid(FUSED, 1))
    inputs, outputs = ([value.name for value in part] for part in (graph.input, graph.output))
    pruned = extract_subgraph(model, inputs, outputs)
    onnx.checker.check_model(pruned)
    return bytes(pruned.SerializeToString())


def quantisation_error(
    exact: Runtime, quantised: Runtime, rows: Rows, num_draws: int
) -> QuantisationError:
    x = rows.x[:CHECKED_ROWS].astype(np.float32)
    expected = _scores(exact, x, exact.draw(0, 0, num_draws))
    actual = _scores(quantised, x, quantised.draw(0, 0, num_draws))
    fresh = _scores(exact, x, exact.draw(1, 0, num_draws))
    # The difference between two draw sets is sqrt(2) times the Monte Carlo error.
    return QuantisationError(
        int8_probabilities=_rms(actual.probabilities - expected.probabilities),
        int8_monte_carlo=_rms(fresh.probabilities - expected.probabilities) / math.sqrt(2.0),
        int8_same_label=float(np.mean(actual.label == expected.label)),
    )


def _scores(runtime: Runtime, x: np.ndarray, theta: np.ndarray) -> Scores:
    log_probs, _ = runtime.run(x, theta[:, None])
    return predictive_scores(predictive_sums(log_probs), standard_errors=False)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
