"""Which layers of a module are drawn, and which of its other parameters a fit may change."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from model_store.errors import InvalidInput

Drawable = nn.Linear | nn.Conv1d | nn.Conv2d
DRAWABLE = (nn.Linear, nn.Conv1d, nn.Conv2d)
SHOWN = 12  # names in an error
NOT_DRAWN = ", or leave it out by network.bayesian"  # of a layer that is refused


def drawn_layers(module: nn.Module, patterns: Sequence[str] | None) -> dict[str, Drawable]:
    """Return the layers that are drawn, by name: those that patterns name, or all that can be.

    A pattern names a layer, or all layers inside one; `*` and `?` stand for any text and character
    of a name.

    Raises:
        InvalidInput: naming a pattern that names no layer, or a layer that cannot be drawn.
    """
    there = {name: layer for name, layer in module.named_modules(remove_duplicate=False) if name}
    inside = {
        inner
        for name, layer in there.items()
        if isinstance(layer, nn.MultiheadAttention)  # reads the weights of its layers itself
        for inner in there
        if inner.startswith(f"{name}.")
    }
    can = {n: layer for n, layer in there.items() if type(layer) in DRAWABLE and n not in inside}
    if patterns is None:
        return can
    found: dict[str, Drawable] = {}
    for i, pattern in enumerate(patterns):
        field = f"network.bayesian.{i}"
        named = [name for name in there if fnmatchcase(name, pattern)]
        if not named:
            raise InvalidInput(
                field, f"the name of a layer ({_listed(can)} can be drawn)", repr(pattern)
            )
        within = {
            name: layer
            for name, layer in can.items()
            if any(_is_within(name, outer) for outer in named)
        }
        for name in named:
            if name == pattern and not any(_is_within(inner, name) for inner in within):
                kind = type(there[name]).__name__
                raise InvalidInput(
                    field, f"a layer that can be drawn ({_listed(can)} can)", f"{name}: {kind}"
                )
        if not within:
            kinds = sorted({type(there[name]).__name__ for name in named})
            raise InvalidInput(
                field,
                f"a layer that can be drawn ({_listed(can)} can)",
                f"{pattern!r}, of {', '.join(kinds)}",
            )
        found |= within
    return {name: layer for name, layer in can.items() if name in found}


def is_named(name: str, patterns: Sequence[str] | None) -> bool:
    """Whether patterns name something or a layer around it; without patterns, anything."""
    if patterns is None:
        return True
    parts = name.split(".")
    return any(
        fnmatchcase(".".join(parts[: i + 1]), pattern)
        for pattern in patterns
        for i in range(len(parts))
    )


def freeze(
    module: nn.Module, patterns: Sequence[str] | None, drawn: Sequence[str]
) -> list[nn.Module]:
    """Have a fit change no parameters of layers but those that are drawn and those that patterns
    name.

    Without patterns it may change all. Return the layers that are frozen, whose statistics stay
    too.

    Raises:
        InvalidInput: naming a pattern that names no layer.
    """
    if patterns is None:
        return []
    there = {name: layer for name, layer in module.named_modules(remove_duplicate=False) if name}
    kept = set(drawn)
    for i, pattern in enumerate(patterns):
        named = [name for name in there if fnmatchcase(name, pattern)]
        if not named:
            names = _listed(
                {
                    name: layer
                    for name, layer in there.items()
                    if any(True for _ in layer.parameters())
                }
            )
            raise InvalidInput(
                f"network.trained.{i}", f"the name of a layer (such as {names})", repr(pattern)
            )
        kept.update(named)
    frozen = []
    for name, layer in [("", module), *there.items()]:
        if any(_is_within(name, outer) for outer in kept):
            continue
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(False)
        frozen.append(layer)
    return frozen


def _is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _listed(layers: dict[str, nn.Module]) -> str:
    names = list(layers)
    if not names:
        return "none"
    return ", ".join(names[:SHOWN]) + (
        f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    )
