"""A network cut in two: the *encoder*, what comes before all that is drawn or trained, and the
*head*, all else.

The cut is made in the module's own forward, traced with torch.fx: layers that a fit leaves alone
are not looked into, so they may do what they like. Values that the head takes of the encoder are
laid side by side, as one row of numbers.
"""

import copy
import operator
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Num
from torch import Tensor, fx, nn

from model_store.errors import DubitoError, one_line
from training.networks.selection import is_within

TRIED_ROWS = (2, 3)  # rows that the module is run on, to see which values grow with them


class NotSplit(DubitoError):
    """A network that cannot be cut in two; it says why."""


@dataclass(frozen=True, eq=False)
class SplitNetwork:
    """An encoder, a module from rows of the network's shape to rows of `width` numbers, and the
    head that takes them.

    Layers of the head have the names that they had.
    """

    encoder: nn.Module
    head: nn.Module
    width: int


@dataclass(frozen=True)
class _Value:
    """What the head takes of the encoder: a tensor's shape after its rows and its type, or the
    number of rows, or a number or the like that is always the same.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    is_rows: bool = False
    constant: Any = None

    @property
    def size(self) -> int:
        return 0 if self.shape is None else int(torch.Size(self.shape).numel())


class _Tracer(fx.Tracer):
    """Looks only into modules that have something in them that stays in the head."""

    def __init__(self, stays: Collection[str]) -> None:
        super().__init__()
        self.stays = stays

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        own = module_qualified_name
        has_some = any(name.startswith(f"{own}.") for name in self.stays)
        is_torchs = m.__module__.startswith("torch.nn") and not isinstance(m, nn.Sequential)
        return own in self.stays or is_torchs or not has_some


@torch.no_grad()
def split_module(
    module: nn.Module, stays: Collection[str], examples: Num[Tensor, "R ..."]
) -> SplitNetwork | None:
    """Cut a module before all layers whose names are in `stays`; None where no layer with weights
    comes before.

    Args:
        module: what is cut; it is left as it is.
        stays: names of the layers that are drawn or trained, at least one.
        examples: at least three rows that it takes.
    """
    module = copy.deepcopy(module).eval()
    try:
        graph = _Tracer(stays).trace(module)
        traced = fx.GraphModule(module, graph)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise NotSplit(f"its forward cannot be followed: {reason}"[:300]) from error
    (placeholder,) = [node for node in graph.nodes if node.op == "placeholder"][:1]
    of_x: set[fx.Node] = {placeholder}
    in_head: set[fx.Node] = set()
    for node in graph.nodes:
        needs = set(node.all_input_nodes)
        is_layer = node.op == "call_module"
        stays_here = is_layer and any(is_within(name, str(node.target)) for name in stays)
        if node.op == "output" or stays_here or needs & in_head:
            in_head.add(node)
        elif needs & of_x:
            of_x.add(node)
    cut = [node for node in graph.nodes if node in of_x and in_head.intersection(node.users)]
    before = of_x - in_head
    if not any(_has_weights(module, node) for node in before):
        return None
    values = dict(zip(cut, _values_at(traced, cut, examples), strict=True))
    if placeholder in cut:
        raise NotSplit("the layers that are drawn or trained also take the row itself")
    encoder = _encoder(traced, before, [node for node, value in values.items() if value.size])
    width = sum(value.size for value in values.values())
    return SplitNetwork(encoder.eval(), _head(traced, in_head, values), width)


def _has_weights(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and any(
        True for _ in module.get_submodule(str(node.target)).parameters()
    )


class _Recorder(fx.Interpreter):
    """Keeps what some nodes give."""

    def __init__(self, module: fx.GraphModule, wanted: Collection[fx.Node]) -> None:
        super().__init__(module)
        self.wanted = wanted
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self.wanted:
            self.found[n] = value
        return value


def _values_at(traced: fx.GraphModule, cut: list[fx.Node], examples: Tensor) -> list[_Value]:
    runs = []
    for rows in TRIED_ROWS:
        recorder = _Recorder(traced, cut)
        recorder.run(examples[:rows])
        runs.append(recorder.found)
    values = []
    for node in cut:
        few, more = (found[node] for found in runs)
        if isinstance(few, Tensor):
            sizes = (len(few), len(more)) if few.ndim else ()
            if sizes != TRIED_ROWS or few.shape[1:] != more.shape[1:]:
                raise NotSplit(f"what comes of {node.name} is no row of numbers for each row")
            if few.is_complex():
                raise NotSplit(f"what comes of {node.name} are complex numbers")
            values.append(_Value(tuple(few.shape[1:]), few.dtype))
        elif type(few) is int and (few, more) == TRIED_ROWS:
            values.append(_Value(is_rows=True))
        elif type(few) in (int, float, bool, str, torch.Size) and few == more:
            values.append(_Value(constant=few))
        else:
            raise NotSplit(f"what comes of {node.name} is a {type(few).__name__}")
    return values


def _encoder(traced: fx.GraphModule, before: set[fx.Node], given: list[fx.Node]) -> nn.Module:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        # of the row, or of nothing: weights and constants
        if node in before or not node.all_input_nodes:
            copies[node] = graph.node_copy(node, lambda of: copies[of])
    rows = [
        graph.call_method("to", (graph.call_method("flatten", (copies[node], 1)), torch.float32))
        for node in given
    ]
    graph.output(rows[0] if len(rows) == 1 else graph.call_function(torch.cat, (rows, 1)))
    return _module_of(traced, graph)


def _head(
    traced: fx.GraphModule, in_head: set[fx.Node], values: dict[fx.Node, _Value]
) -> nn.Module:
    """Return the module from the values at the cut, side by side, to the outputs."""
    graph = fx.Graph()
    encoded = graph.placeholder("encoded")
    copies: dict[fx.Node, Any] = {}
    whole, place = sum(value.size for value in values.values()), 0
    for node, value in values.items():
        if value.shape is None:
            rows = graph.call_method("size", (encoded, 0)) if value.is_rows else None
            copies[node] = value.constant if rows is None else rows
            continue
        part: fx.Node = encoded
        if value.size < whole:
            columns = (slice(None), slice(place, place + value.size))
            part = graph.call_function(operator.getitem, (encoded, columns))
            place += value.size
        if len(value.shape) != 1:
            part = graph.call_method("reshape", (part, (-1, *value.shape)))
        if value.dtype != torch.float32:
            part = graph.call_method("to", (part, value.dtype))
        copies[node] = part
    for node in traced.graph.nodes:
        if node in in_head or (not node.all_input_nodes and node.op != "placeholder"):
            copies[node] = graph.node_copy(node, lambda of: copies[of])
    return _as_sequence(_module_of(traced, graph))


def _module_of(traced: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """Return a module of a graph, with copies of the layers that it needs."""
    made = copy.deepcopy(fx.GraphModule(traced, graph))
    made.graph.eliminate_dead_code()
    made.recompile()
    made.delete_all_unused_submodules()
    return made


def _as_sequence(head: fx.GraphModule) -> nn.Module:
    """Return a head that is one layer after the other as what it is: such are computed faster under
    many draws."""
    nodes = list(head.graph.nodes)
    layers = nodes[1:-1]
    targets = [str(node.target) for node in layers]
    is_sequence = all(
        node.op == "call_module"
        and "." not in str(node.target)
        and node.args == (before,)
        and not node.kwargs
        for before, node in zip(nodes, layers, strict=False)
    )
    ends = bool(layers) and nodes[-1].args == (layers[-1],)
    if not is_sequence or not ends or len(set(targets)) < len(targets):
        return head
    return nn.Sequential(OrderedDict((name, head.get_submodule(name)) for name in targets))
