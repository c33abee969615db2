"""The ONNX operators that are allowed in graphs.

Graphs are untrusted data, so only listed operators are allowed. They compute numbers from numbers
deterministically. Random operators, control flow (`If`, `Loop`, `Scan`), text, files, sequences,
optional values and functions are not allowed. `model_store.inference.preflight` limits time and
memory.
"""

from collections.abc import Iterator
from typing import Any

import onnx

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


def find_problem(model: onnx.ModelProto) -> str | None:
    """Return the reason why a graph is not allowed, or None if it is allowed."""
    parts = [*_messages(model)]
    if any(
        isinstance(p, onnx.TensorProto) and p.data_location == onnx.TensorProto.EXTERNAL
        for p in parts
    ):
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
