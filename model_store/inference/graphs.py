"""What a sampler's or a network's graph must be, and parts of it."""

from collections.abc import Iterable, Sequence

import onnx

from model_store.inference.operators import refusal

MOST_DIGITS = 18  # of a number in the metadata


class GraphError(ValueError):
    """A graph that cannot be a sampler or a network: the file and the reason."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason


def load_graph(file: str, content: bytes, inputs: set[str], *outputs: set[str]) -> onnx.ModelProto:
    """Return a graph that has these inputs, and one of these sets of outputs.

    Raises:
        GraphError: if it has others, or what `operators.refusal` refuses.
    """
    try:
        model = onnx.load_model_from_string(content)
    except Exception:
        raise GraphError(file, "is not an ONNX model") from None
    graph = model.graph
    refused = refusal(model)
    if refused is not None:
        raise GraphError(file, refused)
    if {i.name for i in graph.input} != inputs or {o.name for o in graph.output} not in outputs:
        expected = " or ".join(str(sorted(names)) for names in outputs)
        raise GraphError(file, f"expected inputs {sorted(inputs)} and outputs {expected}")
    return model


def between(
    model: onnx.ModelProto, inputs: Sequence[str], outputs: Sequence[str]
) -> onnx.ModelProto | None:
    """Return the part of a graph that leads from values it names to outputs; None where it needs
    other inputs."""
    graph = model.graph
    needed: set[str] = set(outputs)
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):  # in topological order
        if needed.difference(inputs).intersection(node.output):
            nodes.insert(0, node)
            needed.update(node.input)
    if needed.intersection(i.name for i in graph.input).difference(inputs):
        return None
    described = {value.name: value for value in (*graph.input, *graph.output)}
    part = onnx.helper.make_graph(
        nodes,
        graph.name,
        [described[name] for name in inputs],
        [described[name] for name in outputs],
        [tensor for tensor in graph.initializer if tensor.name in needed],
    )
    return onnx.helper.make_model(
        part, ir_version=model.ir_version, opset_imports=model.opset_import
    )


def metadata_number(model: onnx.ModelProto, key: str) -> int:
    """Return a number of a network's metadata, 0 if there is none of that name."""
    noted = next((entry.value for entry in model.metadata_props if entry.key == key), "0")
    if not noted.isdecimal() or len(noted) > MOST_DIGITS:  # which Python may refuse to read
        raise GraphError("network.onnx", f"expected a number as {key}")
    return int(noted)


def last_dimension(values: Iterable[onnx.ValueInfoProto], name: str) -> int:
    (named,) = (value for value in values if value.name == name)
    dimensions = named.type.tensor_type.shape.dim
    if len(dimensions) != 3 or dimensions[2].dim_value < 1:
        raise GraphError("network.onnx", f"expected {name} of 3 axes, the last of a fixed length")
    return int(dimensions[2].dim_value)


def axes_of_row(values: Iterable[onnx.ValueInfoProto], name: str) -> tuple[int, ...]:
    """Return the axes after the first; 0 for one whose length is not fixed."""
    (named,) = (value for value in values if value.name == name)
    return tuple(int(axis.dim_value) for axis in named.type.tensor_type.shape.dim[1:])
