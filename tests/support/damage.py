"""Corrupt the content of versions, with matching digests."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from safetensors.numpy import load, save

from model_store.artifacts.manifest import NO_DIGEST, manifest_digest

GRAPHS = ("sampler.onnx", "network.onnx")
ARRAYS = ("calibration.safetensors", "weights.safetensors")
FILES = (*GRAPHS, *ARRAYS)
MANIFEST = "manifest.json"
EDGE_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 1e308, 1e-308, 2**31, 2**53, 2**63, 2**64, -(2**63)),
    *("", "x", "x" * 5000, "\ud800", "\0", "..", "1", "entropy"),
    *([], {}, [[]], [None], [1] * 1000, [0], ["a", "a"], {"": None}),
)
OPERATORS = ("Add", "Mul", "MatMul", "Softmax", "Relu", "Loop", "Tile", "Expand", "Nothing")


def damage(folder: Path, seed: int, kinds: "tuple[Kind, ...]") -> str:
    """Corrupt a version's folder. Return the kind of damage."""
    random = Random(seed)
    kind = random.choice(kinds)
    kind(folder, random)
    return kind.__name__


def seal(folder: Path, content: dict[str, Any] | None = None) -> None:
    path = folder / MANIFEST
    content = json.loads(path.read_text()) if content is None else content
    files = content.get("files")
    for file in FILES:
        file_path = folder / file
        if isinstance(files, dict) and isinstance(files.get(file), dict) and file_path.is_file():
            data = file_path.read_bytes()
            files[file] |= {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    if "digest" in content:
        content["digest"] = NO_DIGEST
    text = json.dumps(content, indent=2).encode()
    digest = manifest_digest(text, NO_DIGEST)
    path.write_bytes(text.replace(NO_DIGEST.encode(), digest.encode(), 1))


def change_manifest(folder: Path, random: Random) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    for _ in range(random.choice((1, 1, 3))):
        _change_leaf(content, random)
    seal(folder, content)


def _change_leaf(content: Any, random: Random) -> None:
    while isinstance(content, dict | list) and content:
        keys = list(content) if isinstance(content, dict) else range(len(content))
        key = random.choice(keys)
        if not isinstance(content[key], dict | list) or random.random() < 0.2:
            if random.random() < 0.2:
                del content[key]
            else:
                content[key] = random.choice(EDGE_VALUES)
            return
        content = content[key]


def change_arrays(folder: Path, random: Random) -> None:
    path = folder / "calibration.safetensors"
    arrays = load(path.read_bytes())
    name = random.choice(sorted(arrays))
    array = arrays[name]
    match random.randrange(7):
        case 0:
            del arrays[name]
        case 1:
            arrays[name] = np.full_like(array, random.choice((0, 1, -1, 127)))
        case 2:
            arrays[name] = array[:0]
        case 3:
            arrays[name] = array.astype(random.choice(("f4", "f8", "i1", "i8", "?")))
        case 4:
            arrays[name] = np.ascontiguousarray(array[::-1])
        case 5:
            arrays[name] = array[None]
        case 6 if array.dtype.kind == "f":
            arrays[name] = np.full_like(array, random.choice((np.nan, np.inf, -np.inf, 1e300)))
    path.write_bytes(save(arrays))
    seal(folder)


def corrupt_header(folder: Path, random: Random) -> None:
    path = folder / random.choice(ARRAYS)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = bytes(content[8 : 8 + length])
    match random.randrange(3):
        case 0:
            content[:8] = random.choice((0, 1, 2**31, 2**63)).to_bytes(8, "little")
        case 1:
            header = header.replace(b"[0,", b"[99999999999,", 1)
            content = bytearray(len(header).to_bytes(8, "little") + header + content[8 + length :])
        case 2:
            content[8 + random.randrange(max(length, 1))] ^= 1 << random.randrange(8)
    path.write_bytes(content)
    seal(folder)


def change_graph(folder: Path, random: Random) -> None:
    path = folder / random.choice(GRAPHS)
    model = onnx.load_model_from_string(path.read_bytes())
    graph = model.graph
    node = random.choice(graph.node)
    match random.randrange(7):
        case 0:
            node.op_type = random.choice(OPERATORS)
        case 1:
            node.input[random.randrange(len(node.input))] = random.choice(("x", "theta", "none"))
        case 2:
            graph.node.remove(node)
        case 3:
            tensor = random.choice(graph.initializer)
            array = numpy_helper.to_array(tensor)
            values = (0, 3, np.nan, 1e30) if array.dtype.kind == "f" else (0, 3, -1)
            replacement = np.full_like(array, random.choice(values))
            tensor.CopyFrom(numpy_helper.from_array(replacement, tensor.name))
        case 4:
            tensor = random.choice(graph.initializer)
            tensor.dims[:] = [random.choice((0, 1, 7, 2**40))] * random.randrange(4)
        case 5:
            axis = random.choice(
                random.choice((*graph.input, *graph.output)).type.tensor_type.shape.dim
            )
            axis.dim_value = random.choice((0, 1, 7, 2**40))
        case 6:
            model.opset_import[0].version = random.choice((0, 1, 7, 13, 999))
    path.write_bytes(model.SerializeToString())
    seal(folder)


def change_graph_bytes(folder: Path, random: Random) -> None:
    path = folder / random.choice(GRAPHS)
    content = bytearray(path.read_bytes())
    for _ in range(random.choice((1, 5, 50))):
        content[random.randrange(len(content))] = random.randrange(256)
    path.write_bytes(content)
    seal(folder)


Kind = Callable[[Path, Random], None]
GRAPH_DAMAGE: tuple[Kind, ...] = (change_graph, change_graph_bytes)  # only preflights run these
FILE_DAMAGE: tuple[Kind, ...] = (change_manifest, change_manifest, change_arrays, corrupt_header)
