"""Checks that run modules on example rows."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Num
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from model_store.errors import InvalidInput, one_line
from model_store.overrides import Override
from training.bayes.layers import DRAWABLE
from training.bayes.likelihoods import Likelihood
from training.networks.selection import EXCLUDE, is_within, layers_by_name, unsupported

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
REPEATED_ROWS = 3
ROWS = 32  # so many that a live unit is unlikely to be 0 in all of them

SEPARATE_ROWS = "one output row for each input row, independent of other rows"

Layers = Mapping[str, nn.Module]


# torch's fast path for attention has no equivalent in ONNX.
without_fast_path = Override(
    torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
)


@without_fast_path
def run_on_rows(run: Callable[..., Any], *rows: Tensor) -> Any:
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


def check_outputs(
    module: nn.Module, factory: str, examples: Num[Tensor, "R ..."], likelihood: Likelihood
) -> None:
    width = likelihood.outputs
    layers = {n: layer for n, layer in module.named_modules() if n and not any(layer.children())}
    calls: list[str] = []
    with watch(layers, lambda name, _: calls.append(name)):
        outputs: object = run_on_rows(module, examples)
    rows = len(examples)
    if not isinstance(outputs, Tensor):
        actual = f"a {type(outputs).__name__}"
    elif outputs.shape == (rows, width):
        if likelihood.task == "classification" and _are_probabilities(outputs):
            expected = f"{factory} to return a module without a final softmax"
            raise InvalidInput("network.factory", expected, "probabilities that add up to 1")
        return
    elif outputs.ndim == 2 and len(outputs) == rows:
        actual = str(outputs.shape[1])
    else:
        actual = f"shape {tuple(outputs.shape)} for {rows} rows"
    after = f" after layer {calls[-1]}: {type(layers[calls[-1]]).__name__}" if calls else ""
    expected = f"{factory} to return a module with {width} outputs per row ({likelihood.meaning})"
    raise InvalidInput("network.factory", expected, f"{actual}{after}")


def _are_probabilities(outputs: Num[Tensor, "R C"]) -> bool:
    add_up = (outputs.sum(1) - 1).abs() < 1e-4
    return bool(add_up.all() and (outputs >= 0).all())


def output_layer(module: nn.Module, examples: Num[Tensor, "R ..."]) -> str:
    """Return the name of the Linear layer that computes a module's outputs."""
    calls: list[tuple[str, object]] = []
    layers = {name: layer for name, layer in module.named_modules() if type(layer) in DRAWABLE}
    with watch(layers, after=lambda name, _, values: calls.append((name, values))):
        outputs: object = run_on_rows(module, examples)
    for name, values in calls[-1:]:
        if values is outputs and isinstance(layers[name], nn.Linear):
            return name
    expected = "a final Linear layer, which computes the outputs"
    actual = "no layer" if not calls else f"layer {calls[-1][0]}: {layers[calls[-1][0]]}"
    raise InvalidInput("network", expected, actual[:300])


def check_ids(module: nn.Module, shape: Sequence[int], largest: int) -> None:
    """Check that a module accepts the smallest and largest ids."""
    try:
        run_on_rows(module, torch.tensor([0, largest]).view(2, *[1] * len(shape)).expand(2, *shape))
    except InvalidInput as error:
        expected = f"a module that accepts ids from 0 to {largest} in rows of shape {tuple(shape)}"
        raise InvalidInput("network", expected, error.received) from error


def check_repeatable(module: nn.Module, examples: Num[Tensor, "R ..."]) -> None:
    """Check that each row's outputs are deterministic and independent of other rows."""
    rows = examples[:REPEATED_ROWS]
    with torch.random.fork_rng(devices=[]):
        first, second = (run_on_rows(module, rows) for _ in range(2))
    if not isinstance(first, Tensor):
        actual = f"a {type(first).__name__}"
        raise InvalidInput("network", "a module that returns a tensor", actual)
    if not _are_equal(first, second):
        expected = "a forward pass without random numbers or state between calls"
        raise InvalidInput("network", expected, _explain_difference(module, module, rows))
    alone = torch.cat([run_on_rows(module, rows[n : n + 1]) for n in range(len(rows))])
    if not are_close(alone, first):
        steps_first = (
            f" (layer {name}: {type(layer).__name__} has batch_first=False)"
            for name, layer in module.named_modules()
            if getattr(layer, "batch_first", True) is False
        )
        actual = f"a module that mixes rows{next(steps_first, '')}"
        raise InvalidInput("network", SEPARATE_ROWS, actual)


def check_training(
    module: nn.Module, frozen: Sequence[nn.Module], examples: Num[Tensor, "R ..."]
) -> None:
    """Check that outputs in training mode are deterministic if dropout is disabled."""
    rows = examples[:REPEATED_ROWS]
    trials = []
    for _ in range(2):
        # Separate copies, because layers such as spectral norms update their state in training.
        trial, evaluated = copy.deepcopy((module, list(frozen)))
        trial.train()
        for layer in evaluated:
            layer.training = False
        for layer in trial.modules():
            turn_off_dropout(layer)
            if isinstance(layer, DROPOUTS):
                layer.p = 0.0
        trials.append(trial)
    with torch.random.fork_rng(devices=[]):
        # `__call__` keeps the training mode.
        first, second = (run_on_rows(trial.__call__, rows) for trial in trials)
    if not _are_equal(first, second):
        expected = "a forward pass without random numbers in training (use Dropout layers)"
        actual = _explain_difference(trials[0], trials[0].__call__, rows)
        raise InvalidInput("network", expected, actual)


def _explain_difference(module: nn.Module, run: Callable[..., Any], rows: Tensor) -> str:
    reason = "different outputs in a second call"
    for operator, place in list_operators(module, lambda: run_on_rows(run, rows)):
        if torch.Tag.nondeterministic_seeded in operator.tags:
            return f"{reason}, from {place}"
    return reason


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def turn_off_dropout(layer: nn.Module) -> None:
    if isinstance(layer, (nn.MultiheadAttention, nn.RNNBase)):
        layer.dropout = 0.0


def are_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = 1e-3 + 1e-5 * float(b.nan_to_num().abs().max())
    return torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)


def copy_module(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InvalidInput("network", "a module that copy.deepcopy can copy", reason) from error


def check_calls(module: nn.Module, selection: Layers, examples: Num[Tensor, "R ..."]) -> None:
    """Check that each selected layer runs once, and that nothing else reads its weights.

    Its replacement reads theta and has no weights.
    """
    owners: dict[int, str] = {}  # by id of the layer or parameter
    for name, layer in selection.items():
        original = owners.setdefault(id(layer), name)
        if original != name:
            reason = f"it is also layer {original}; use a separate layer{EXCLUDE}"
            raise unsupported(name, layer, reason)
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    calls: Counter[str] = Counter()
    running: list[str] = []
    readers: dict[str, str] = {}  # of a layer's weights while the layer does not run

    def begin(name: str) -> None:
        calls[name] += 1
        running.append(name)

    def note_reads(_: Any, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            for part in argument if isinstance(argument, list | tuple) else (argument,):
                owner = owners.get(id(part))
                if owner is not None and owner not in running:
                    readers[owner] = running[-1] if running else "forward"

    with (
        watch(selection, lambda name, _: begin(name), lambda name, *_: running.remove(name)),
        _OperatorRecorder(note_reads),
    ):
        run_on_rows(module, examples)
    for name, layer in selection.items():
        if name in readers:
            reason = f"{readers[name]} reads its weights directly; call the layer instead"
        elif not calls[name]:
            reason = "it never runs; call it in forward, remove it from the module"
        elif calls[name] > 1:
            reason = f"it runs {calls[name]} times; use a separate layer for each call"
        else:
            continue
        raise unsupported(name, layer, f"{reason}{EXCLUDE}")


def list_operators(module: nn.Module, run: Callable[[], object]) -> list[tuple[Any, str]]:
    """List the operators of a run, each with the innermost layer that calls it."""
    layers = {name: layer for name, layer in module.named_modules() if name}
    running = ["forward itself"]
    operators: list[tuple[Any, str]] = []

    def begin(name: str, _: object) -> None:
        running.append(f"layer {name}: {type(layers[name]).__name__}")

    def end(*_: object) -> None:
        running.pop()

    with (
        watch(layers, begin, end),
        _OperatorRecorder(lambda operator, _: operators.append((operator, running[-1]))),
    ):
        run()
    return operators


class _OperatorRecorder(TorchDispatchMode):
    """A mode that passes each operator and its arguments to `note`."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def mask_dropouts(module: nn.Module, patterns: Sequence[str] | None) -> dict[str, nn.Module]:
    layers = layers_by_name(module)
    patterns = ["*"] if patterns is None else patterns
    matches = [name for name in layers if any(fnmatchcase(name, p) for p in patterns)]
    inner = {n: layer for n, layer in layers.items() if any(is_within(n, m) for m in matches)}
    return {n: d for n, d in inner.items() if isinstance(d, DROPOUTS) and d.p > 0}


def count_dropout_units(
    module: nn.Module, names: Sequence[str], examples: Num[Tensor, "R ..."]
) -> dict[str, int]:
    units: dict[str, int] = {}
    dropouts = {name: module.get_submodule(name) for name in names}
    with watch(dropouts, lambda name, inputs: units.update({name: inputs.shape[1]})):
        run_on_rows(module, examples)
    return units


def keep_probabilities(
    module: nn.Module, names: Sequence[str], dropouts: Sequence[str], examples: Num[Tensor, "R ..."]
) -> dict[str, float]:
    """For each layer, compute the probability that Dropout keeps an input or channel.

    A layer depends on a Dropout if zeroing the Dropout's output zeroes one of the layer's inputs.
    Outputs of Linear and convolution layers are replaced by noise, so that only Dropouts between
    successive layers count.
    """
    layers = {name: module.get_submodule(name) for name in names}
    keep = dict.fromkeys(names, 1.0)
    generator = torch.Generator().manual_seed(0)
    live: dict[str, Tensor] = {}

    def note(name: str, inputs: Tensor) -> None:
        axis = -1 if isinstance(layers[name], nn.Linear) else 1
        live[name] = (inputs != 0).movedim(axis, 0).flatten(1).any(1)

    with ExitStack() as stack, watch(layers, note):
        for layer in module.modules():
            if isinstance(layer, DRAWABLE):
                noise = layer.register_forward_hook(
                    lambda _, __, outputs: torch.randn(outputs.shape, generator=generator)
                )
                stack.enter_context(noise)
        run_on_rows(module, examples)
        alive = dict(live)
        for name in dropouts:
            dropout = module.get_submodule(name)
            assert isinstance(dropout, DROPOUTS)
            with dropout.register_forward_hook(lambda _, __, outputs: torch.zeros_like(outputs)):
                run_on_rows(module, examples)
            for layer_name, units in live.items():
                if (alive[layer_name] & ~units).any():
                    keep[layer_name] *= 1.0 - dropout.p
    return keep


@contextmanager
def watch(
    layers: Layers,
    before: Callable[[str, Any], object] = lambda *_: None,
    after: Callable[[str, Any, Any], object] = lambda *_: None,
) -> Iterator[None]:
    """Call `before` and `after` whenever one of the layers runs.

    `before` receives the layer's name and first argument, `after` its name, inputs and outputs.
    """
    with ExitStack() as stack:
        for name, layer in layers.items():
            hooks = (
                layer.register_forward_pre_hook(
                    lambda _, inputs, name=name: before(name, inputs[0] if inputs else None)
                ),
                layer.register_forward_hook(
                    lambda _, inputs, outputs, name=name: after(name, inputs, outputs)
                ),
            )
            for hook in hooks:
                stack.enter_context(hook)
        yield
