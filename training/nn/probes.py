"""What a module shows of itself when it runs on rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.errors import InvalidInput, one_line

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
ROWS = 32  # so that hardly a unit is 0 in all of them by chance

Layers = dict[str, nn.Module]


def run_on_rows(run: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return what a module says of rows.

    Raises:
        InvalidInput: if it fails.
    """
    training = run.training if isinstance(run, nn.Module) else False
    try:
        with torch.no_grad():
            return (run.eval() if isinstance(run, nn.Module) else run)(*rows)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InvalidInput("network", "a module that runs on a batch of rows", reason) from error
    finally:
        if isinstance(run, nn.Module):
            run.train(training)


def check_width(module: nn.Module, factory: str, shape: Sequence[int], width: int, meaning: str) -> None:
    """Check that the module of a user's factory gives `width` numbers for each row; `meaning` says what they are.

    Raises:
        InvalidInput: if the module fails, or naming the factory and the last layer that ran.
    """
    layers = {name: layer for name, layer in module.named_modules() if name and not any(layer.children())}
    ran: list[str] = []
    with _noted(layers, lambda name, _: ran.append(name)):
        outputs: object = run_on_rows(module, torch.zeros(ROWS, *shape))
    if isinstance(outputs, Tensor) and outputs.shape == (ROWS, width):
        return
    if not isinstance(outputs, Tensor):
        given = f"a {type(outputs).__name__}"
    elif outputs.ndim == 2 and len(outputs) == ROWS:
        given = str(outputs.shape[1])
    else:
        given = f"shape {tuple(outputs.shape)} for {ROWS} rows"
    after = f" after layer {ran[-1]}: {type(layers[ran[-1]]).__name__}" if ran else ""
    expected = f"{factory} to make a module of {width} outputs for each row ({meaning})"
    raise InvalidInput("network.factory", expected, f"{given}{after}")


def dropped_units(module: nn.Module, shape: Sequence[int]) -> dict[str, list[int]]:
    """Return how many units, or channels, each Dropout of a module sees, by name, whenever it runs."""
    dropouts = _of(module, DROPOUTS)
    units: dict[str, list[int]] = {name: [] for name in dropouts}
    with _noted(dropouts, lambda name, inputs: units[name].append(inputs.shape[1])):
        run_on_rows(module, torch.zeros(ROWS, *shape))
    return units


def kept_inputs(module: nn.Module, shape: Sequence[int]) -> dict[str, Float[Tensor, "I"]]:
    """Return with what probability each Linear or Conv2d layer's inputs, or channels, pass the module's Dropouts.

    An input counts as dropped with a unit that it is 0 without. What weighted layers give is noise here, so that only
    Dropouts between one and the next are seen.
    """
    layers = _of(module, (nn.Linear, nn.Conv2d))
    kept = {name: torch.ones(_inputs(layer)) for name, layer in layers.items()}
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, *shape, generator=generator)
    live: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        axis = -1 if isinstance(layers[name], nn.Linear) else 1
        live[name] = (inputs != 0).movedim(axis, 0).flatten(1).any(1)

    def noise(_: nn.Module, __: tuple[Tensor], outputs: Tensor) -> Tensor:
        return torch.randn(outputs.shape, generator=generator)

    noises = [layer.register_forward_hook(noise) for layer in layers.values()]
    try:
        with _noted(layers, note):
            run_on_rows(module, rows)
            alive = dict(live)
            for dropout in _of(module, DROPOUTS).values():
                assert isinstance(dropout, DROPOUTS)
                with _zeroed(dropout):
                    run_on_rows(module, rows)
                for name, units in live.items():
                    kept[name][alive[name] & ~units] *= 1.0 - dropout.p
    finally:
        for hook in noises:
            hook.remove()
    return kept


def _of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Layers:
    return {name: layer for name, layer in module.named_modules(remove_duplicate=False) if isinstance(layer, kinds)}


def _inputs(layer: nn.Module) -> int:
    assert isinstance(layer, nn.Linear | nn.Conv2d)
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


@contextmanager
def _noted(layers: Layers, note: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Note what each layer takes in."""
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _zeroed(layer: nn.Module) -> Iterator[None]:
    """Give zeros in place of a layer's value."""
    hook = layer.register_forward_hook(lambda _, __, outputs: torch.zeros_like(outputs))
    try:
        yield
    finally:
        hook.remove()
