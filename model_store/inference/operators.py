"""What a graph may be made of. It is data from elsewhere, so it holds operators of a list and
nothing else.

On the list are operators that compute numbers from numbers, the same each time: none that is
random, that chooses or repeats graphs (`If`, `Loop`, `Scan`), or that has to do with text, files,
sequences or optional values; and no functions, which give an operator another meaning. How long a
graph takes, and how much memory, `model_store.inference.preflight` finds out.
"""

from collections.abc import Iterator
from typing import Any

import onnx

ONNX_DOMAINS = ("", "ai.onnx")  # two names of one
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


def refusal(model: onnx.ModelProto) -> str | None:
    """Return why a graph is not one to be run, None where nothing speaks against it."""
    parts = [*_messages(model)]
    if any(
        isinstance(p, onnx.TensorProto) and p.data_location == onnx.TensorProto.EXTERNAL
        for p in parts
    ):
        return "keeps weights in another file, which is refused"
    for part in parts:
        if isinstance(part, onnx.FunctionProto):
            return f"expected no functions, got {_shown(part.name)}"
        if isinstance(part, onnx.NodeProto) and (name := _full_name(part)) not in OPERATORS:
            return f"expected operators of those that are served, got {_shown(name)}"
    return None


def _full_name(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}.{node.op_type}"


def _shown(name: str) -> str:
    return ascii(name[:80])[1:-1]


def _messages(message: Any) -> Iterator[Any]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if hasattr(value, "extend") else [value]:
                yield from _messages(part)
