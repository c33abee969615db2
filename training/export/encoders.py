"""Export of encoders from torch modules or ONNX files.

The graph maps raw rows `x` (rows, I) to encoded rows `encoded` (rows, F), both float32.
"""

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.compose
import onnxruntime as ort
import torch
from jaxtyping import Float32
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import load_external_data_for_model
from torch import nn

from model_store.artifacts.manifest import ENCODER, EncoderSpec
from model_store.errors import InvalidInput, one_line
from model_store.inference.encoder import INPUT, OUTPUT, Encoder
from model_store.inference.graphs import GraphError, extract_subgraph, find_problem
from model_store.inference.runtime import providers, session_options
from training.export.exporter import export_graph

FIELD = "network.encoder"
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
INTEGERS = (TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8, TensorProto.INT8)
MASK, TYPES = "attention_mask", "token_type_ids"  # inputs that are derived from ids
ROWS_AT_ONCE = 8  # if rows are independent
ADDED, FILE = "rows.", "file."  # prefixes of added names, and of names in the file
MAX_NAMES = 20  # in an error


@dataclass(frozen=True, eq=False)
class EncoderInput:
    """The parameters for converting raw rows to encoder input."""

    shape: tuple[int, ...]
    mean: Float32[np.ndarray, "..."] | None = None
    std: Float32[np.ndarray, "..."] | None = None
    takes_ids: bool = False
    pad_id: int = 0


def module_graph(encoder: nn.Module, shape: tuple[int, ...], rows: EncoderInput) -> onnx.ModelProto:
    """Export a torch encoder, and prepend nodes that convert raw rows to its input."""
    x = torch.zeros(3, *shape, dtype=torch.int64 if rows.takes_ids else torch.float32)
    shapes = {"x": {0: torch.export.Dim("rows")}}
    return _prepend_conversion(export_graph(encoder.eval(), (x,), shapes, ["y"]), rows)


def file_graph(path: Path, rows: EncoderInput, output: str | None = None) -> onnx.ModelProto:
    """Read an ONNX encoder, and prepend nodes that convert raw rows to its input.

    The input can have any numeric type, channels first or last, and a first axis of length 1. The
    mask and token types of a text encoder are derived from the ids. `output` is the name of an
    output or inner value, by default the only output.
    """
    return _prepend_conversion(_read(path), rows, output)


def _prepend_conversion(
    model: onnx.ModelProto, rows: EncoderInput, output: str | None = None
) -> onnx.ModelProto:
    model = onnx.compose.add_prefix(model, FILE)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in weights}
    derived = {name: value for name, value in inputs.items() if _plain(name) in (MASK, TYPES)}
    mains = [value for name, value in inputs.items() if name not in derived]
    if len(mains) != 1:
        expected = f"one input, in addition to {MASK} and {TYPES}"
        received = [_plain(value.name) for value in mains][:MAX_NAMES]
        raise InvalidInput(FIELD, expected, f"{received}")
    encoded = _find_output(model, output)
    nodes, tensors, source = _prefix(mains[0], rows)
    for name, value in derived.items():
        nodes += _derive_from_ids(name, value, source, rows.pad_id, tensors)
    nodes += model.graph.node
    nodes.append(helper.make_node("Flatten", [encoded], [f"{ADDED}flat"], axis=1))
    nodes.append(helper.make_node("Cast", [f"{ADDED}flat"], [OUTPUT], to=TensorProto.FLOAT))
    graph = helper.make_graph(
        nodes,
        "encoder",
        [helper.make_tensor_value_info(INPUT, TensorProto.FLOAT, ["rows", math.prod(rows.shape)])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["rows", "numbers"])],
        [*model.graph.initializer, *tensors],
    )
    merged = helper.make_model(graph, ir_version=model.ir_version, opset_imports=model.opset_import)
    return extract_subgraph(merged, [INPUT], [OUTPUT])


def serialise(model: onnx.ModelProto) -> bytes:
    try:
        content: bytes = model.SerializeToString()
    except ValueError:  # protobuf's size limit
        raise InvalidInput(FIELD, "a model of up to 2 GB", "a larger one") from None
    return content


def examine(content: bytes, row_size: int, examples: Float32[np.ndarray, "N I"]) -> EncoderSpec:
    """Test an encoder, and return its manifest entry.

    If batching changes the bits of a row, the service must encode rows one at a time.
    """
    try:
        width = _width(content, examples[:1])
        spec = EncoderSpec(outputs=width, rows_at_once=1)
        encoder = Encoder(content, spec, row_size, threads=1)
    except GraphError as error:
        expected = "a model that the service can run on these rows"
        raise InvalidInput(FIELD, expected, one_line(error)) from None
    alone = encoder(examples)
    if not np.isfinite(alone).all():
        raise InvalidInput(FIELD, "finite numbers for every row", "infinite or missing ones")
    rows_at_once = ROWS_AT_ONCE if _has_independent_rows(encoder, examples, alone) else 1
    return EncoderSpec(outputs=width, rows_at_once=rows_at_once)


def _has_independent_rows(
    encoder: Encoder, x: Float32[np.ndarray, "N I"], alone: Float32[np.ndarray, "N F"]
) -> bool:
    orders = (np.arange(len(x)), np.arange(len(x))[::-1])
    for count, order in itertools.product({2, 3, ROWS_AT_ONCE}, orders):
        batches = np.split(order, range(count, len(order), count))
        try:
            encoded = np.concatenate([encoder.run(x[batch]) for batch in batches])
        except Exception:  # the graph accepts only one row
            return False
        if not np.array_equal(encoded, alone[order]):
            return False
    return True


def _width(content: bytes, x: Float32[np.ndarray, "1 I"]) -> int:
    try:
        session = ort.InferenceSession(content, session_options(1), providers=providers())
        encoded = session.run([OUTPUT], {INPUT: x})[0]
    except Exception as error:
        raise GraphError(ENCODER, f"onnxruntime: {one_line(error)}"[:300]) from None
    if encoded.ndim != 2 or len(encoded) != 1 or encoded.shape[1] == 0:
        shape = f"expected a row of numbers for each row, got shape {encoded.shape} for one"
        raise GraphError(ENCODER, shape)
    return int(encoded.shape[1])


def _read(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError as error:
        actual = error.strerror or "an unreadable file"
        raise InvalidInput(FIELD, f"a file at {path}", actual) from None
    except Exception:
        model = onnx.ModelProto()
    if not model.graph.node:
        raise InvalidInput(FIELD, "an ONNX model", f"a file of another format, {path}")
    try:
        load_external_data_for_model(model, str(path.parent))
    except Exception as error:
        expected = f"the weights of {path.name} in the file, or in a second file of the same folder"
        raise InvalidInput(FIELD, expected, one_line(error)) from None
    reason = find_problem(model)
    if reason is not None:
        expected = "a model that the service can run"
        raise InvalidInput(FIELD, expected, f"{path}: {reason}")
    return model


def _find_output(model: onnx.ModelProto, name: str | None) -> str:
    outputs = [_plain(value.name) for value in model.graph.output]
    expected = f"one of {outputs[:MAX_NAMES]}"
    if name is None:
        if len(outputs) != 1:
            raise InvalidInput("network.output", expected, "no name")
        name = outputs[0]
    if not any(FILE + name in node.output for node in model.graph.node):
        raise InvalidInput("network.output", f"{expected}, or an inner value", repr(name))
    return FILE + name


def _plain(name: str) -> str:
    return name.removeprefix(FILE)


def _prefix(
    value: onnx.ValueInfoProto, rows: EncoderInput
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto], str]:
    kind = value.type.tensor_type
    dims = [axis.dim_value if axis.HasField("dim_value") else None for axis in kind.shape.dim]
    form = f"{TensorProto.DataType.Name(kind.elem_type).lower()} {[d or '?' for d in dims]}"
    actual = f"input {_plain(value.name)}: {form}"
    if kind.elem_type not in (*FLOATS, *INTEGERS):
        raise InvalidInput(FIELD, "a numeric input", actual)
    if not dims or dims[0] not in (None, 1):
        expected = "an input whose first axis, of rows, has variable length or length 1"
        raise InvalidInput(FIELD, expected, actual)
    shapes = [rows.shape] if len(rows.shape) != 2 else [rows.shape, (1, *rows.shape)]
    layouts = [(shape, tuple(range(len(shape)))) for shape in shapes]
    layouts += [(shape, (1, 2, 0)) for shape in shapes if len(shape) == 3]  # channels last
    for shape, order in layouts:
        sizes = [shape[i] for i in order]
        if len(sizes) == len(dims) - 1 and all(
            d in (None, n) for d, n in zip(dims[1:], sizes, strict=True)
        ):
            break
    else:
        raise InvalidInput(FIELD, f"an input for rows of shape {rows.shape}", actual)
    tensors = [numpy_helper.from_array(np.array([-1, *shape], dtype=np.int64), f"{ADDED}shape")]
    nodes = [helper.make_node("Reshape", [INPUT, f"{ADDED}shape"], [f"{ADDED}rows"])]
    name = f"{ADDED}rows"
    if rows.mean is not None and rows.std is not None:
        tensors.append(numpy_helper.from_array(rows.mean, f"{ADDED}mean"))
        tensors.append(numpy_helper.from_array(rows.std, f"{ADDED}std"))
        nodes.append(helper.make_node("Sub", [name, f"{ADDED}mean"], [f"{ADDED}centred"]))
        name = f"{ADDED}standard"
        nodes.append(helper.make_node("Div", [f"{ADDED}centred", f"{ADDED}std"], [name]))
    if order != tuple(range(len(shape))):
        axes = [0, *(i + 1 for i in order)]
        nodes.append(helper.make_node("Transpose", [name], [f"{ADDED}places"], perm=axes))
        name = f"{ADDED}places"
    nodes.append(helper.make_node("Cast", [name], [value.name], to=kind.elem_type))
    return nodes, tensors, name


def _derive_from_ids(
    name: str, value: onnx.ValueInfoProto, ids: str, pad_id: int, tensors: list[onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Build the nodes that derive the mask (0 for padding, else 1) or token types (all 0)."""
    kind = value.type.tensor_type.elem_type
    if kind not in (*FLOATS, *INTEGERS):
        actual = TensorProto.DataType.Name(kind).lower()
        raise InvalidInput(FIELD, f"a numeric input {_plain(name)}", actual)
    if _plain(name) == TYPES:
        return [
            helper.make_node("Sub", [ids, ids], [f"{ADDED}{name}.none"]),
            helper.make_node("Cast", [f"{ADDED}{name}.none"], [name], to=kind),
        ]
    pad = np.array(pad_id, dtype=np.float32)
    tensors.append(numpy_helper.from_array(pad, f"{ADDED}{name}.pad"))
    return [
        helper.make_node("Equal", [ids, f"{ADDED}{name}.pad"], [f"{ADDED}{name}.is_padding"]),
        helper.make_node("Not", [f"{ADDED}{name}.is_padding"], [f"{ADDED}{name}.is_token"]),
        helper.make_node("Cast", [f"{ADDED}{name}.is_token"], [name], to=kind),
    ]
