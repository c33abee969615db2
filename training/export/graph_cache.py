"""ONNX export of modules, with a cache of graphs that omit the weights.

torch's exporter takes seconds for a graph. The cache, in memory and in a folder, contains graphs
without weights. Its key is a digest of:

* the submodules with their plain attributes
* the names and shapes of parameters and buffers
* the operators that run on the example inputs, with the values of other tensors
* the versions of the libraries and of this code

Constants are folded after weights are inserted, so a cached graph yields the same bytes as a new
one.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from training.networks.probes import READS_VALUES, FunctionRecorder

OPSET = 20
LIBRARIES = ("torch", "onnx", "onnx_ir", "onnxscript")
CODE_FOLDERS = ("bayes", "networks", "detectors", "export")
MAX_FILES = 500  # of about 100 kB each
COUNTERS = "name_counters"
MAX_DEPTH = 3  # of nested attributes

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


@torch.no_grad()
def structure(
    module: nn.Module, inputs: tuple[Tensor, ...], dynamic_shapes: DynamicShapes
) -> str | None:
    """Compute the cache key for a module's graph.

    Returns None if the module reads tensor values, which can change its graph.
    """
    names: dict[int, str] = {}
    for name, tensor in _all_tensors(module):
        names.setdefault(id(tensor), name)
    run = _Run({**names, **{id(x): f"input {i}" for i, x in enumerate(inputs)}})
    run.note(_versions(), OPSET, [(x.shape, x.dtype) for x in inputs])
    for name, dims in dynamic_shapes.items():
        run.note(name, [(axis, dim.__name__) for axis, dim in dims.items()])
    for name, layer in module.named_modules(remove_duplicate=False):
        run.note(name, _plain(type(layer)), _plain(vars(layer)))
    for name, tensor in _all_tensors(module):
        run.note(name, names[id(tensor)], type(tensor).__name__, tensor.shape, tensor.dtype)
    try:
        with (
            FunctionRecorder(lambda func, _: run.note(getattr(func, "__qualname__", str(func)))),
            run,
        ):
            run.note([run.describe(output) for output in tree_iter(module(*inputs))])
    except Exception:  # the exporter will raise a better error
        return None
    return None if run.reads_values else run.digest.hexdigest()


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


def _plain(value: object, depth: int = 0) -> object:
    """Convert a value to an object with a stable `repr`."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict) and depth < MAX_DEPTH:
        return [(str(key), _plain(inner, depth + 1)) for key, inner in value.items()]
    if isinstance(value, list | tuple) and depth < MAX_DEPTH:
        return [_plain(inner, depth + 1) for inner in value]
    return _plain(type(value)), getattr(value, "__qualname__", "")


class _Run(TorchDispatchMode):
    """A hash of a run's operators and arguments, in which tensors are identified by origin."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.tensors: list[Tensor] = []  # alive, so that ids stay unique
        self.digest = hashlib.sha256()
        self.reads_values = False

    def note(self, *values: object) -> None:
        self.digest.update(repr(values).encode())

    def describe(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return _plain(value) if isinstance(value, str | dict) else str(value)
        if id(value) not in self.names:  # a constant
            content = hashlib.sha256(value.detach().cpu().contiguous().numpy().tobytes())
            self._keep(value, content.hexdigest())
        return self.names[id(value)], value.shape, value.dtype

    def _keep(self, tensor: Tensor, name: str) -> None:
        self.names[id(tensor)] = name
        self.tensors.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.reads_values |= func.overloadpacket.__name__ in READS_VALUES
        self.note(str(func), sorted(kwargs), *map(self.describe, tree_iter((args, kwargs))))
        outputs = func(*args, **kwargs)
        for output in tree_iter(outputs):
            if isinstance(output, Tensor) and id(output) not in self.names:
                self._keep(output, f"result {len(self.tensors)}")
        return outputs
