"""Selection of the layers to draw or train."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from model_store.errors import InvalidInput
from training.bayes.layers import DRAWABLE, Drawable

MAX_NAMES = 12  # in an error
EXCLUDE = ", or exclude it with network.bayesian"  # advice in errors


def unsupported(name: str, layer: nn.Module, reason: str) -> InvalidInput:
    expected = "supported layers (docs/networks.md lists them)"
    return InvalidInput("network", expected, f"layer {name}: {type(layer).__name__}: {reason}")


def layers_by_name(module: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in module.named_modules(remove_duplicate=False) if name}


def select_layers(module: nn.Module, patterns: Sequence[str] | None) -> dict[str, Drawable]:
    """Select the drawable layers that match a pattern, or all if `patterns` is None.

    A pattern (see `fnmatch`) selects the matching layers and all layers inside them.
    """
    layers = layers_by_name(module)
    # Attention reads the weights of its inner layers directly, so they are not drawable.
    attentions = [n for n, layer in layers.items() if isinstance(layer, nn.MultiheadAttention)]
    drawable: dict[str, Drawable] = {
        name: layer
        for name, layer in layers.items()
        if isinstance(layer, DRAWABLE)
        and type(layer) in DRAWABLE
        and not any(is_within(name, outer) for outer in attentions)
    }
    if patterns is None:
        return drawable
    selection: set[str] = set()
    for i, pattern in enumerate(patterns):
        field = f"network.bayesian.{i}"
        expected = f"the name of a layer ({_join(drawable)} can be drawn)"
        matches = _match(layers, pattern, field, expected)
        within = {name for name in drawable if any(is_within(name, outer) for outer in matches)}
        if not within:
            kinds = ", ".join(sorted({type(layers[name]).__name__ for name in matches}))
            expected = f"a layer that can be drawn ({_join(drawable)})"
            raise InvalidInput(field, expected, f"{pattern!r}, which matches {kinds}")
        selection |= within
    return {name: layer for name, layer in drawable.items() if name in selection}


def _match(layers: Iterable[str], pattern: str, field: str, expected: str) -> list[str]:
    matches = [name for name in layers if fnmatchcase(name, pattern)]
    if not matches:
        raise InvalidInput(field, expected, repr(pattern))
    return matches


def is_within(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def freeze(
    module: nn.Module, patterns: Sequence[str] | None, random_layers: Sequence[str]
) -> list[nn.Module]:
    """Freeze all layers except random layers and those matched by a pattern.

    If `patterns` is None, no layer is frozen. Returns the frozen layers.
    """
    if patterns is None:
        return []
    layers = layers_by_name(module)
    trained = set(random_layers)
    for i, pattern in enumerate(patterns):
        trainable = [n for n, layer in layers.items() if any(True for _ in layer.parameters())]
        expected = f"the name of a layer (such as {_join(trainable)})"
        trained.update(_match(layers, pattern, f"network.trained.{i}", expected))
    frozen = []
    for name, layer in [("", module), *layers.items()]:
        if not any(is_within(name, outer) for outer in trained):
            frozen.append(layer)
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)
    return frozen


def _join(layers: Iterable[str]) -> str:
    names = list(layers)
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + rest if names else "none"
