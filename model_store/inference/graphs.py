"""Load and check ONNX graphs, and extract parts of them."""

from collections.abc import Iterable, Mapping, Sequence

import onnx

from model_store.inference.operators import find_problem

MAX_DIGITS = 18  # of numbers in the metadata


class GraphError(ValueError):
    """The error raised for an invalid graph."""

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
    """Load a graph, and check its inputs and outputs except `optional` ones.

    Raises:
        GraphError: if the graph is invalid, or has other inputs or outputs.
    """
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
) -> onnx.ModelProto | None:
    """Extract the subgraph from `inputs` to `outputs`, or None if it needs more inputs.

    Values are renamed by `names`.
    """
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
    """Read a number from the metadata of a network. The default is 0."""
    text = next((entry.value for entry in model.metadata_props if entry.key == key), "0")
    if not text.isdecimal() or len(text) > MAX_DIGITS:  # Python limits the digits of integers.
        raise GraphError("network.onnx", f"expected a number as {key}")
    return int(text)


def last_dimension(values: Iterable[onnx.ValueInfoProto], name: str) -> int:
    (value,) = (value for value in values if value.name == name)
    dimensions = value.type.tensor_type.shape.dim
    if len(dimensions) != 3 or dimensions[2].dim_value < 1:
        raise GraphError("network.onnx", f"expected {name} with 3 axes, the last of fixed length")
    return int(dimensions[2].dim_value)


def axes_of_row(values: Iterable[onnx.ValueInfoProto], name: str) -> tuple[int, ...]:
    """Return the length of each axis of a value after the first, with 0 for variable lengths."""
    (value,) = (value for value in values if value.name == name)
    return tuple(int(axis.dim_value) for axis in value.type.tensor_type.shape.dim[1:])
