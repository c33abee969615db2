"""Which layers of a module are drawn, and which of its other parameters a fit may change."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from model_store.errors import InvalidInput
from training.bayes.layers import DRAWABLE, Drawable

SHOWN = 12  # names in an error
NOT_DRAWN = ", or leave it out by network.bayesian"  # of a layer that is refused


def unsupported(name: str, layer: nn.Module, why: str) -> InvalidInput:
    expected = "supported layers (docs/networks.md lists them)"
    return InvalidInput("network", expected, f"layer {name}: {type(layer).__name__}: {why}")


def layers_by_name(module: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in module.named_modules(remove_duplicate=False) if name}


def drawn_layers(module: nn.Module, patterns: Sequence[str] | None) -> dict[str, Drawable]:
    """Return the layers that are drawn, by name: those that patterns name, or all that can be.

    A pattern names a layer, or all layers inside one; `*` and `?` stand for any text and character
    of a name.
    """
    there = layers_by_name(module)
    # attention reads the weights of its layers itself
    attentions = [name for name, layer in there.items() if isinstance(layer, nn.MultiheadAttention)]
    can: dict[str, Drawable] = {
        name: layer
        for name, layer in there.items()
        if isinstance(layer, DRAWABLE)
        and type(layer) in DRAWABLE
        and not any(is_within(name, outer) for outer in attentions)
    }
    if patterns is None:
        return can
    found: set[str] = set()
    for i, pattern in enumerate(patterns):
        field = f"network.bayesian.{i}"
        named = [name for name in there if fnmatchcase(name, pattern)]
        if not named:
            expected = f"the name of a layer ({_join(can)} can be drawn)"
            raise InvalidInput(field, expected, repr(pattern))
        within = {name for name in can if any(is_within(name, outer) for outer in named)}
        expected = f"a layer that can be drawn ({_join(can)} can)"
        for name in named:
            if name == pattern and not any(is_within(inner, name) for inner in within):
                raise InvalidInput(field, expected, f"{name}: {type(there[name]).__name__}")
        if not within:
            kinds = ", ".join(sorted({type(there[name]).__name__ for name in named}))
            raise InvalidInput(field, expected, f"{pattern!r}, of {kinds}")
        found |= within
    return {name: layer for name, layer in can.items() if name in found}


def is_named(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether patterns name something or a layer around it; without patterns, anything."""
    if patterns is None:
        return True
    parts = name.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return any(fnmatchcase(outer, pattern) for pattern in patterns for outer in names)


def is_within(name: str, outer: str) -> bool:
    """Whether a layer is another or inside it."""
    return name == outer or name.startswith(f"{outer}.")


def freeze(
    module: nn.Module, patterns: Sequence[str] | None, drawn: Sequence[str]
) -> list[nn.Module]:
    """Freeze the parameters of layers that are not drawn and that no pattern names.

    Without patterns none is. Return the layers that are frozen, whose statistics stay too.
    """
    if patterns is None:
        return []
    there = layers_by_name(module)
    kept = set(drawn)
    for i, pattern in enumerate(patterns):
        named = [name for name in there if fnmatchcase(name, pattern)]
        if not named:
            known = [name for name, layer in there.items() if any(True for _ in layer.parameters())]
            expected = f"the name of a layer (such as {_join(known)})"
            raise InvalidInput(f"network.trained.{i}", expected, repr(pattern))
        kept.update(named)
    frozen = []
    for name, layer in [("", module), *there.items()]:
        if not any(is_within(name, outer) for outer in kept):
            frozen.append(layer)
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)
    return frozen


def _join(layers: Iterable[str]) -> str:
    names = list(layers)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "none"
