"""Load and check ONNX graphs, and extract subgraphs.

Graphs are untrusted data, so only listed operators are allowed. They compute numbers from numbers
deterministically. Random operators, control flow (`If`, `Loop`, `Scan`), text, files, sequences,
optional values and functions are not allowed. `model_store.inference.preflight` limits time and
memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx

MAX_DIGITS = 18  # of numbers in the metadata
ONNX_DOMAINS = ("", "ai.onnx")  # synonyms
BY_FULL_NAME = """
Abs Add BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Clip CumProd CumSum Div Erf Exp
Floor Log Max Mean Min Mod Mul Neg Pow Reciprocal Round Sign Sqrt Sub Sum

Acos Acosh Asin Asinh Atan Atanh Cos Cosh Sin Sinh Tan Tanh

And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Where Xor

Celu Elu Gelu HardSigmoid HardSwish Hardmax LeakyRelu LogSoftmax Mish PRelu Relu Selu Shrink
Sigmoid Softmax Softplus Softsign Swish ThresholdedRelu

ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
ReduceProd ReduceSum ReduceSumSquare TopK

Attention Det Einsum Gemm MatMul RotaryEmbedding

AffineGrid AveragePool BatchNormalization Col2Im Conv ConvTranspose DFT DeformConv GRU
GlobalAveragePool GlobalLpPool GlobalMaxPool GridSample GroupNormalization InstanceNormalization
LRN LSTM LayerNormalization LpNormalization LpPool MaxPool MaxUnpool MeanVarianceNormalization
RMSNormalization RNN Resize STFT

CenterCropPad Compress Concat DepthToSpace Expand Flatten Gather GatherElements GatherND Identity
NonZero OneHot Pad Reshape ReverseSequence ScatterElements ScatterND Shape Size Slice SpaceToDepth
Split Squeeze Tile Transpose Trilu Unsqueeze

BlackmanWindow Cast CastLike Constant ConstantOfShape EyeLike HammingWindow HannWindow Range

ConvInteger DequantizeLinear DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul
QuantizeLinear com.microsoft.MatMulIntegerToFloat
"""
OPERATORS = frozenset(BY_FULL_NAME.split())


class GraphError(ValueError):
    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


def load_graph(
    file: str,
    content: bytes,
    inputs: set[str],
    *outputs: set[str],
    optional: frozenset[str] = frozenset(),
) -> onnx.ModelProto:
    """Load a graph. Raise GraphError for other inputs or outputs, except the `optional` ones."""
    try:
        model = onnx.load_model_from_string(content)
    except Exception:
        raise GraphError(file, "is not an ONNX model") from None
    graph = model.graph
    problem = find_problem(model)
    if problem is not None:
        raise GraphError(file, problem)
    in_names, out_names = ({v.name for v in vs} - optional for vs in (graph.input, graph.output))
    if in_names != inputs or out_names not in outputs:
        expected = " or ".join(str(sorted(names)) for names in outputs)
        raise GraphError(file, f"expected inputs {sorted(inputs)} and outputs {expected}")
    return model


def extract_subgraph(
    model: onnx.ModelProto,
    inputs: Sequence[str],
    outputs: Sequence[str],
    names: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """Extract a subgraph and rename its values. Raise GraphError if it needs more than `inputs`."""
    graph = model.graph
    needed: set[str] = set(outputs)
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):  # in topological order
        if needed.difference(inputs).intersection(node.output):
            nodes.insert(0, node)
            needed.update(node.input)
    extra = needed.intersection(i.name for i in graph.input).difference(inputs)
    if extra:
        expected = f"expected {', '.join(outputs)} that depend only on {', '.join(inputs)}"
        raise GraphError("network.onnx", f"{expected}, got {', '.join(sorted(extra))} too")
    described = {value.name: value for value in (*graph.input, *graph.output)}
    part = onnx.helper.make_graph(
        nodes,
        graph.name,
        list({(names or {}).get(name, name): described[name] for name in inputs}.values()),
        [described[name] for name in outputs],
        [tensor for tensor in graph.initializer if tensor.name in needed.difference(inputs)],
    )
    for value in (*part.input, *part.output):
        value.name = (names or {}).get(value.name, value.name)
    for node in part.node:
        for values in (node.input, node.output):
            values[:] = [(names or {}).get(value, value) for value in values]
    extracted = onnx.helper.make_model(
        part, ir_version=model.ir_version, opset_imports=model.opset_import
    )
    extracted.metadata_props.extend(model.metadata_props)
    return extracted


def metadata_number(model: onnx.ModelProto, key: str) -> int:
    """Read a number from a network's metadata. The default is 0."""
    text = next((entry.value for entry in model.metadata_props if entry.key == key), "0")
    if not text.isdecimal() or len(text) > MAX_DIGITS:  # Python limits the digits of integers.
        raise GraphError("network.onnx", f"expected a number as {key}")
    return int(text)


def last_dimension(values: Iterable[onnx.ValueInfoProto], name: str) -> int:
    axes = axes_of_row(values, name)
    if len(axes) != 2 or axes[1] < 1:
        raise GraphError("network.onnx", f"expected {name} with 3 axes, the last of fixed length")
    return axes[1]


def axes_of_row(values: Iterable[onnx.ValueInfoProto], name: str) -> tuple[int, ...]:
    """Return the length of each axis after the first, with 0 for variable lengths."""
    (value,) = (value for value in values if value.name == name)
    return tuple(int(axis.dim_value) for axis in value.type.tensor_type.shape.dim[1:])


def find_problem(model: onnx.ModelProto) -> str | None:
    """Return the reason why a graph is not allowed, or None if it is allowed."""
    parts = [*_messages(model)]
    tensors = [part for part in parts if isinstance(part, onnx.TensorProto)]
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors):
        return "expected weights inside the graph, got weights in another file"
    for part in parts:
        if isinstance(part, onnx.FunctionProto):
            return f"expected no functions, got {_printable(part.name)}"
        if isinstance(part, onnx.NodeProto) and (name := _full_name(part)) not in OPERATORS:
            return f"expected supported operators, got {_printable(name)}"
    return None


def _full_name(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}.{node.op_type}"


def _printable(name: str) -> str:
    return ascii(name[:80])[1:-1]


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if hasattr(value, "extend") else [value]:
                yield from _messages(part)
