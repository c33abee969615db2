"""Standard architectures, user factories and weight files."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from model_store.errors import InvalidInput, one_line


def mlp(
    inputs: int, hidden: Sequence[int], outputs: int, dropout: float | None = None
) -> nn.Sequential:
    """Build an MLP with ReLU activations, each followed by Dropout if `dropout` is set."""
    sizes = [inputs, *hidden, outputs]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes[:-1]):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(sizes[-2], outputs))


def papers_cnn(shape: Sequence[int], outputs: int) -> nn.Sequential:
    """Build the CNN from Krueger et al. 2017."""
    channels, height, width = shape
    layers: list[nn.Module] = []
    for inputs, filters in ((channels, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, filters, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(filters, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    units = 128 * (height // 4) * (width // 4)
    return nn.Sequential(*layers, nn.Flatten(), *mlp(units, [512], outputs))


def gal_cnn(shape: Sequence[int], outputs: int) -> nn.Sequential:
    """Build the CNN from Gal et al. 2017."""
    channels, height, width = shape
    units = 32 * ((height - 6) // 2) * ((width - 6) // 2)
    convolutions = [nn.Conv2d(channels, 32, 4), nn.ReLU(), nn.Conv2d(32, 32, 4), nn.ReLU()]
    dense = [nn.Linear(units, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, outputs)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), *dense)


def gal_cnn_without_dropout(shape: Sequence[int], outputs: int) -> nn.Sequential:
    layers = gal_cnn(shape, outputs)
    return nn.Sequential(*(layer for layer in layers if not isinstance(layer, nn.Dropout)))


ARCHITECTURES: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "papers-cnn": papers_cnn,
    "gal-cnn": gal_cnn,
    "gal-cnn-without-dropout": gal_cnn_without_dropout,
}


def call_factory(field: str, path: str, *arguments: object) -> nn.Module:
    """Call a user's `package.module:function`, and check that it returns a module."""
    function = _import_function(field, path)
    call = f"{path}({', '.join(map(str, arguments))})"
    try:
        module = function(*arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InvalidInput(field, f"{call} to return a module", reason) from error
    if not isinstance(module, nn.Module):
        expected = f"{path} to return a torch.nn.Module"
        raise InvalidInput(field, expected, f"a {type(module).__name__}")
    return module


def source_digest(path: str) -> str:
    """Hash the source file of a factory.

    Checkpoints depend on it, so that weights are never restored into changed code.
    """
    _import_function("network.factory", path)
    file = getattr(sys.modules[path.partition(":")[0]], "__file__", None)
    # An interactive session has no file.
    return "" if file is None else sha256(Path(file).read_bytes()).hexdigest()


def _import_function(field: str, path: str) -> Callable[..., object]:
    module_name, _, name = path.partition(":")
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(field, "an importable `package.module:function`", str(error)) from None
    return function


def load_weights(module: nn.Module, path: Path) -> None:
    field = "network.weights"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidInput(field, f"a safetensors file at {path}", one_line(error)) from None
    load_state(module, tensors, field, "the tensors of the network's state_dict")


def load_state(module: nn.Module, tensors: Mapping[str, Tensor], field: str, expected: str) -> None:
    """Load tensors into a module, like `load_state_dict`."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise InvalidInput(field, expected, one_line(error)[:300]) from None


def channels_first(shape: Sequence[int]) -> tuple[int, ...]:
    return (1, *shape) if len(shape) == 2 else tuple(shape)
