"""Export of modules to ONNX, with a cache of graphs that omit the weights.

torch's exporter takes seconds for a graph. The cache, in memory and in a folder, contains graphs
without weights. Its key is a digest of:

* the submodules with their plain attributes
* the names and shapes of parameters and buffers
* the versions of the libraries and of this code

Modules with code of other packages are not cached.

Constants are folded after weights are inserted, so a cached graph yields the same bytes as a new
one.
"""

import functools
import hashlib
import io
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx import numpy_helper
from onnx.helper import make_node
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from model_store.artifacts.disk import replace_file
from model_store.inference.runtime import LARGEST_RESULT
from training.bayes.layers import matmul
from training.networks.probes import without_fast_path

ROWS, DRAWS = "rows", "draws"  # axes whose length varies
OPSET = 20
LIBRARIES = ("torch", "onnx", "onnx_ir", "onnxscript")
KNOWN_PACKAGES = ("torch", "training")
CODE_FOLDERS = ("bayes", "networks", "detectors", "export")
MAX_FILES = 500  # of about 100 kB each
COUNTERS = "name_counters"
NOISY_LOGGERS = ("torch.onnx", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir")

DynamicShapes = Mapping[str, dict[int, torch.export.Dim]]

_in_memory: dict[str, bytes] = {}


@without_fast_path
def export_graph(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: DynamicShapes, outputs: list[str]
) -> onnx.ModelProto:
    """Export a module to an ONNX graph with named inputs, dynamic axes and outputs."""
    discarded = io.StringIO()
    with (
        warnings.catch_warnings(),
        _quiet_loggers(),
        redirect_stdout(discarded),
        redirect_stderr(discarded),
        ExportSubstitutes(),
    ):
        warnings.simplefilter("ignore")
        program = export_program(module, inputs, dynamic_shapes)
    for value, name in zip(program.model.graph.inputs, dynamic_shapes, strict=True):
        value.name = name
    for value, name in zip(program.model.graph.outputs, outputs, strict=True):
        value.name = name
    graph: onnx.ModelProto = program.model_proto
    _pool_globally(graph.graph)
    _strip_notes(graph)
    largest = _largest_result(graph.graph)
    if largest:
        graph.metadata_props.add(key=LARGEST_RESULT, value=str(largest))
    del graph.graph.value_info[:]  # shapes of intermediate results, which can be too specific
    onnx.checker.check_model(graph)
    return graph


def _largest_result(graph: onnx.GraphProto) -> int:
    sizes = []
    for value in graph.value_info:
        axes = value.type.tensor_type.shape.dim
        varies = " ".join(axis.dim_param for axis in axes)
        if ROWS in varies and DRAWS in varies:
            sizes.append(math.prod(axis.dim_value for axis in axes if not axis.dim_param))
    return max(sizes, default=0)


def _pool_globally(graph: onnx.GraphProto) -> None:
    """Replace means over image axes with global average pooling.

    The order of sums in onnxruntime's ReduceMean depends on memory addresses.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in graph.value_info}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        is_mean = node.op_type == "ReduceMean" and len(node.input) == 2
        axes = constants.get(node.input[1]) if is_mean else None
        rank = 0 if axes is None else ranks.get(node.input[0], 0)
        if axes is None or rank < 3 or sorted(int(a) % rank for a in axes) != list(range(2, rank)):
            nodes.append(node)
            continue
        keeps = all(a.i for a in node.attribute if a.name == "keepdims")
        pooled = node.output[0] if keeps else f"{node.output[0]}.pooled"
        nodes.append(make_node("GlobalAveragePool", [node.input[0]], [pooled]))
        if not keeps:
            nodes.append(make_node("Squeeze", [pooled, node.input[1]], [node.output[0]]))
    del graph.node[:]
    graph.node.extend(nodes)


def export_program(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: DynamicShapes
) -> torch.onnx.ONNXProgram:
    """Export a module to ONNX with weights and folded constants."""
    key = structure(module, inputs, dynamic_shapes)
    cached = None if key is None else _read(key)
    if cached is None:
        _cache_operators()
        exported = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=tuple(dynamic_shapes.values()),
            verbose=False,
            optimize=False,
        )
        assert exported is not None
        program = exported
        if key is not None and (cached := _without_weights(program.model, module)) is not None:
            _write(key, cached)
    if cached is not None:
        program = torch.onnx.ONNXProgram(_with_weights(cached, module), None)
    program.optimize()
    return program


@functools.cache
def _cache_operators() -> None:
    """Make torch list its operators and ONNX functions once per process, not once per graph."""
    from torch._export import utils
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry: Any = ONNXRegistry
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)


def _without_weights(model: ir.Model, module: nn.Module) -> bytes | None:
    proto, weights = ir.serde.serialize_model(model), dict(_all_tensors(module))
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            if tensor.raw_data != TorchTensor(weights[tensor.name].detach()).tobytes():
                return None
            tensor.raw_data = b""
    _strip_notes(proto)
    # Store the exporter's private counters, since a deserialised graph numbers new values from 0.
    names = model.graph._name_authority
    counters = f"{names._value_counter} {names._node_counter}"
    onnx.helper.set_model_props(proto, {COUNTERS: counters})
    return bytes(proto.SerializeToString())


def _with_weights(cached: bytes, module: nn.Module) -> ir.Model:
    model = ir.serde.deserialize_model(onnx.load_model_from_string(cached))
    names = model.graph._name_authority
    counters = map(int, model.metadata_props.pop(COUNTERS).split())
    names._value_counter, names._node_counter = counters
    weights = dict(_all_tensors(module))
    for name, value in model.graph.initializers.items():
        if name in weights:
            value.const_value = TorchTensor(weights[name].detach(), name=name)
    return model


def _strip_notes(graph: onnx.ModelProto) -> None:
    """Remove the exporter's metadata, which contains local file names."""
    graph.doc_string = ""
    parts = graph.graph
    for part in (parts, *parts.input, *parts.output, *parts.value_info, *parts.node):
        del part.metadata_props[:]
        part.doc_string = ""


def folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("DUBITO_GRAPHS") or Path(caches) / "dubito" / "graphs")


def _read(key: str) -> bytes | None:
    if key not in _in_memory:
        with suppress(OSError):
            content = (folder() / key).read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                _in_memory[key] = content[32:]
    return _in_memory.get(key)


def _write(key: str, graph: bytes) -> None:
    _in_memory[key] = graph
    cache = folder()
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        replace_file(cache / key, hashlib.sha256(graph).digest() + graph)
        newest_first = sorted(cache.iterdir(), key=lambda path: -path.stat().st_mtime)
        for path in newest_first[MAX_FILES:]:
            path.unlink()


def structure(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: DynamicShapes
) -> str | None:
    """Compute the cache key for a module's graph, or return None if it cannot be cached."""
    dims = {name: {i: dim.__name__ for i, dim in d.items()} for name, d in dynamic_shapes.items()}
    names: dict[int, str] = {}  # shared tensors have the name of the first
    tensors = [
        (name, names.setdefault(id(tensor), name), type(tensor), tensor.shape, tensor.dtype)
        for name, tensor in _all_tensors(module)
    ]
    try:
        layers = [
            (name, _plain(type(layer)), _plain(vars(layer)))
            for name, layer in module.named_modules(remove_duplicate=False)
        ]
    except _UnknownCodeError:
        return None
    shapes = [(x.shape, x.dtype) for x in inputs]
    content = repr((_versions(), OPSET, shapes, dims, tensors, layers))
    return hashlib.sha256(content.encode()).hexdigest()


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """List parameters and buffers, including every name of a shared tensor."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


@functools.cache
def _versions() -> str:
    digest = hashlib.sha256()
    for name in CODE_FOLDERS:
        for path in sorted((Path(__file__).parent.parent / name).glob("*.py")):
            digest.update(path.read_bytes())
    return f"{[version(name) for name in LIBRARIES]} {digest.hexdigest()}"


class _UnknownCodeError(Exception):
    """Raised for an object whose code can change while the libraries stay the same."""


def _plain(value: object) -> object:
    """Convert a value to an object with a stable `repr`, which omits the values of tensors."""
    if value is None or isinstance(value, bool | int | float | str | slice | torch.dtype | Enum):
        return value
    if isinstance(value, dict):
        return [(str(key), _plain(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set):
        return sorted(map(str, value))
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(type(value)), _plain(vars(value))
    code = value if isinstance(value, type | FunctionType | BuiltinFunctionType) else type(value)
    name = f"{code.__module__}.{code.__qualname__}"
    if name.partition(".")[0] not in KNOWN_PACKAGES:
        raise _UnknownCodeError(name)
    return name


class ExportSubstitutes(TorchFunctionMode):
    """Replacements for functions that the exporter or onnxruntime does not support reliably.

    The exporter supports `scaled_dot_product_attention` only with four axes. The order of
    onnxruntime's sums depends on the number of rows, unless they are over the last axes.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        if func in (torch.mean, torch.Tensor.mean, torch.sum, torch.Tensor.sum):
            return _reduce_last_axes(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _reduce_last_axes(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a mean or sum after moving the reduced axes to the end."""
    names = ("input", "dim", "keepdim")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    dim = arguments.get("dim", arguments.get("axis"))
    if len(args) > len(names) or dim is None or not isinstance(arguments.get("input"), Tensor):
        return func(*args, **kwargs)
    x = arguments["input"]
    axes = sorted(axis % x.ndim for axis in ((dim,) if isinstance(dim, int) else dim))
    last = list(range(x.ndim - len(axes), x.ndim))
    if not axes or axes == last:
        return func(*args, **kwargs)
    x, dtype = x.movedim(axes, last), arguments.get("dtype")
    if func in (torch.sum, torch.Tensor.sum) and (dtype or x.dtype).is_floating_point:
        # onnxruntime would fuse the transpose into a sum, but not into a product.
        flat = x.to(dtype or x.dtype).flatten(-len(axes))
        value = matmul(flat, torch.ones(flat.shape[-1], 1, dtype=flat.dtype))[..., 0]
    else:
        value = func(x, last, dtype=dtype)
    if arguments.get("keepdim"):
        for axis in axes:
            value = value.unsqueeze(axis)
    return value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute attention by operators for any number of axes, without dropout."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf)
    compute = torch.ops.aten._scaled_dot_product_attention_math
    return compute(query, key, value, attn_mask, 0.0, is_causal, **options)[0]


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    with ExitStack() as stack:
        for logger in map(logging.getLogger, NOISY_LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield
