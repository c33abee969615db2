"""Modify graphs to exhaust time or memory."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

SIDE = 2000
PRODUCTS = 2000  # of matrices, 0.1 s each or more


def make_endless(graph: bytes) -> bytes:
    """Add minutes of matrix products that run before the first output.

    Their shapes depend on the input, so that the runtime cannot compute them at load time.
    """
    nodes = [*_shape_when_run(graph), helper.make_node("ConstantOfShape", ["odd.long"], ["odd.0"])]
    nodes += [
        helper.make_node("MatMul", [f"odd.{i}", f"odd.{i}"], [f"odd.{i + 1}"])
        for i in range(PRODUCTS)
    ]
    nodes.append(helper.make_node("ReduceSum", [f"odd.{PRODUCTS}"], ["odd.sum"], keepdims=0))
    return _before_output(graph, nodes, [SIDE, SIDE])


def add_allocation(graph: bytes, numbers: int, when_loaded: bool) -> bytes:
    """Allocate float32 numbers before the first output, at load or run time."""
    nodes = (
        [helper.make_node("Identity", ["odd.shape"], ["odd.long"])]
        if when_loaded
        else _shape_when_run(graph)
    )
    nodes.append(helper.make_node("ConstantOfShape", ["odd.long"], ["odd.0"]))
    nodes.append(helper.make_node("ReduceSum", ["odd.0"], ["odd.sum"], keepdims=0))
    return _before_output(graph, nodes, [numbers])


def add_allocation_for_rows(graph: bytes, rows: int, numbers: int) -> bytes:
    """Allocate float32 numbers before the first output if the input has exactly this many rows."""
    input_name = onnx.load_model_from_string(graph).graph.input[0].name
    nodes = [
        helper.make_node("Shape", [input_name], ["odd.rows"], start=0, end=1),
        helper.make_node("Equal", ["odd.rows", "odd.at"], ["odd.is"]),
        helper.make_node("Cast", ["odd.is"], ["odd.first"], to=onnx.TensorProto.INT64),
        helper.make_node("Mul", ["odd.first", "odd.shape"], ["odd.long"]),
        helper.make_node("ConstantOfShape", ["odd.long"], ["odd.0"]),
        helper.make_node("ReduceSum", ["odd.0"], ["odd.sum"], keepdims=0),
    ]
    return _before_output(graph, nodes, [numbers], rows)


def _shape_when_run(graph):
    """Let a shape depend on the input to prevent constant folding."""
    rows = onnx.load_model_from_string(graph).graph.input[0].name
    return [
        helper.make_node("Shape", [rows], ["odd.rows"], start=0, end=1),
        helper.make_node("Min", ["odd.rows", "odd.one"], ["odd.first"]),
        helper.make_node("Mul", ["odd.first", "odd.shape"], ["odd.long"]),
    ]


def _before_output(graph, nodes, shape, row_count=0):
    """Add `odd.sum`, which is 0, to the first output."""
    model = onnx.load_model_from_string(graph)
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["odd.output" if name == output else name for name in node.output]
        node.input[:] = ["odd.output" if name == output else name for name in node.input]
    constants = {
        "odd.shape": np.array(shape, dtype=np.int64),
        "odd.one": np.array([1], dtype=np.int64),
        "odd.at": np.array([row_count], dtype=np.int64),
    }
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in constants.items()
    )
    model.graph.node.extend([*nodes, helper.make_node("Add", ["odd.output", "odd.sum"], [output])])
    return model.SerializeToString()
