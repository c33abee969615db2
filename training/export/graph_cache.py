"""ONNX export of modules, with a cache of graphs that omit the weights.

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
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from importlib.metadata import version
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn

OPSET = 20
LIBRARIES = ("torch", "onnx", "onnx_ir", "onnxscript")
KNOWN_PACKAGES = ("torch", "training")
CODE_FOLDERS = ("bayes", "networks", "detectors", "export")
MAX_FILES = 500  # of about 100 kB each
COUNTERS = "name_counters"

DynamicShapes = Mapping[str, dict[int, torch.export.Dim]]

_in_memory: dict[str, bytes] = {}


def export_program(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: DynamicShapes
) -> torch.onnx.ONNXProgram:
    """Export a module to ONNX with weights and folded constants."""
    key = structure(module, inputs, dynamic_shapes)
    cached = None if key is None else _read(key)
    if cached is None:
        _cache_registry()
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
def _cache_registry() -> None:
    """Make torch build its ONNX function registry once per process, not once per graph."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry: Any = ONNXRegistry
    registry.from_torchlib = staticmethod(functools.cache(registry.from_torchlib))


def _without_weights(model: ir.Model, module: nn.Module) -> bytes | None:
    """Strip the weights from a graph, or return None if an initialiser was modified."""
    proto, weights = ir.serde.serialize_model(model), dict(_all_tensors(module))
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            if tensor.raw_data != TorchTensor(weights[tensor.name].detach()).tobytes():
                return None
            tensor.raw_data = b""
    strip_notes(proto)
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


def strip_notes(graph: onnx.ModelProto) -> None:
    """Remove the exporter's metadata, which contains local file names."""
    graph.doc_string = ""
    parts = graph.graph
    for part in (parts, *parts.input, *parts.output, *parts.value_info, *parts.node):
        del part.metadata_props[:]
        part.doc_string = ""


def folder() -> Path | None:
    """Return the cache folder, or None if `DUBITO_GRAPHS` is empty."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = os.environ.get("DUBITO_GRAPHS", str(Path(caches) / "dubito" / "graphs"))
    return Path(path) if path else None


def _read(key: str) -> bytes | None:
    """Read a graph from the cache, or return None if it is missing or corrupt."""
    if key not in _in_memory and (cache := folder()) is not None:
        with suppress(OSError):
            content = (cache / key).read_bytes()
            if hashlib.sha256(content[32:]).digest() == content[:32]:
                _in_memory[key] = content[32:]
    return _in_memory.get(key)


def _write(key: str, graph: bytes) -> None:
    """Cache a graph in memory, and on disk if the folder is writable."""
    _in_memory[key] = graph
    if (cache := folder()) is None:
        return
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(graph).digest() + graph)
        Path(file.name).replace(cache / key)
        newest_first = sorted(cache.iterdir(), key=lambda path: -path.stat().st_mtime)
        for path in newest_first[MAX_FILES:]:
            path.unlink()


def structure(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: DynamicShapes
) -> str | None:
    """Compute the cache key for a module's graph, or return None if it cannot be cached."""
    dims = [
        (name, [(i, dim.__name__) for i, dim in d.items()]) for name, d in dynamic_shapes.items()
    ]
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
    if value is None or isinstance(value, bool | int | float | str | slice | torch.dtype):
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
