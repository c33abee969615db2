"""What a module shows of itself when it runs on rows."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from model_store.errors import InvalidInput, one_line
from training.bayes.layers import DRAWABLE
from training.bayes.likelihoods import Likelihood
from training.networks.selection import (
    NOT_DRAWN,
    is_named,
    layers_by_name,
    unsupported,
)

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout)
REPEATED_ROWS = 3
ROWS = 32  # so that hardly a unit is 0 in all of them by chance

READS_VALUES = ("_local_scalar_dense", "is_nonzero")  # operators that let values decide

Layers = Mapping[str, nn.Module]


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
    """Check that the module of a user's factory gives the outputs of a likelihood for each row, of
    classes their logits."""
    width = likelihood.outputs
    layers = {n: layer for n, layer in module.named_modules() if n and not any(layer.children())}
    ran: list[str] = []
    with watch(layers, lambda name, _: ran.append(name)):
        outputs: object = run_on_rows(module, examples)
    rows = len(examples)
    if not isinstance(outputs, Tensor):
        got = f"a {type(outputs).__name__}"
    elif outputs.shape == (rows, width):
        if likelihood.task == "classification" and _are_probabilities(outputs):
            expected = f"{factory} to make a module of logits, without a softmax at its end"
            raise InvalidInput("network.factory", expected, "probabilities: each row's add up to 1")
        return
    elif outputs.ndim == 2 and len(outputs) == rows:
        got = str(outputs.shape[1])
    else:
        got = f"shape {tuple(outputs.shape)} for {rows} rows"
    after = f" after layer {ran[-1]}: {type(layers[ran[-1]]).__name__}" if ran else ""
    expected = f"{factory} to make a module of {width} outputs for each row ({likelihood.meaning})"
    raise InvalidInput("network.factory", expected, f"{got}{after}")


def _are_probabilities(outputs: Num[Tensor, "R C"]) -> bool:
    add_up = (outputs.sum(1) - 1).abs() < 1e-4
    return bool(add_up.all() and (outputs >= 0).all())


def output_layer(module: nn.Module, examples: Num[Tensor, "R ..."]) -> str:
    """Return the name of the Linear layer whose values are the module's outputs."""
    ran: list[tuple[str, object]] = []
    layers = {name: layer for name, layer in module.named_modules() if type(layer) in DRAWABLE}
    with watch(layers, lambda name, gave: ran.append((name, gave)), of_outputs=True):
        outputs: object = run_on_rows(module, examples)
    for name, values in ran[-1:]:
        if values is outputs and isinstance(layers[name], nn.Linear):
            return name
    expected = "a Linear layer at the end, whose values are the outputs"
    got = "no such layer" if not ran else f"layer {ran[-1][0]}: {layers[ran[-1][0]]}"
    raise InvalidInput("network", expected, got[:300])


def check_ids(module: nn.Module, shape: Sequence[int], largest: int) -> None:
    """Check that a module takes every id, up to the largest, in every place of a row."""
    try:
        run_on_rows(module, torch.tensor([0, largest]).view(2, *[1] * len(shape)).expand(2, *shape))
    except InvalidInput as error:
        expected = f"a module that takes ids from 0 to {largest} in rows of shape {tuple(shape)}"
        raise InvalidInput("network", expected, error.got) from error


def check_repeatable(module: nn.Module, examples: Num[Tensor, "R ..."]) -> None:
    """Check that a module says the same of the same rows again, whatever the other rows are."""
    rows = examples[:REPEATED_ROWS]
    layers = {name: layer for name, layer in module.named_modules() if name}  # inner ones end first
    first, ran = _run_with_seed(module, layers, rows, 1)
    if not isinstance(first, Tensor):
        raise InvalidInput("network", "a module that gives a tensor", f"a {type(first).__name__}")
    again, ran_again = _run_with_seed(module, layers, rows, 2)
    if not _same(first, again):
        random = (
            f"at layer {name}: {type(layers[name]).__name__}"
            for (name, took, gave), (_, took_again, gave_again) in zip(ran, ran_again, strict=False)
            if _same(took, took_again) and not _same(gave, gave_again)
        )
        where = next(random, "in forward itself")
        expected = (
            "the same outputs for the same rows: no random numbers and nothing kept between calls "
            "in forward"
        )
        raise InvalidInput("network", expected, f"others the second time, {where}")
    alone = torch.cat([run_on_rows(module, rows[n : n + 1]) for n in range(len(rows))])
    if not are_alike(alone, first):
        expected = "one output row for each input row, whatever the other rows are"
        # a layer that takes steps along its first axis, where rows are
        steps_first = (
            f" (layer {name}: {type(layer).__name__} has batch_first=False)"
            for name, layer in layers.items()
            if getattr(layer, "batch_first", True) is False
        )
        got = f"a module that mixes rows{next(steps_first, '')}"
        raise InvalidInput("network", expected, got)


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether outputs are the same but for rounding, which the largest of them decides."""
    if one.shape != other.shape:
        return False
    rounding = 1e-3 + 1e-5 * float(other.nan_to_num().abs().max())
    return torch.allclose(one, other, rtol=0, atol=rounding, equal_nan=True)


def _run_with_seed(
    module: nn.Module, layers: Layers, rows: Tensor, seed: int
) -> tuple[Any, list[tuple[str, object, object]]]:
    """Return what a module says of rows, and what each layer took and gave, by name."""
    ran: list[tuple[str, object, object]] = []
    with ExitStack() as stack, torch.random.fork_rng(devices=[]):
        for name, layer in layers.items():
            hook = layer.register_forward_hook(
                lambda _, took, gave, name=name: ran.append((name, took, gave))
            )
            stack.enter_context(hook)
        torch.manual_seed(seed)
        return run_on_rows(module, rows), ran


def copy_module(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise InvalidInput("network", "a module that copy.deepcopy can copy", reason) from error


def check_calls(
    module: nn.Module, drawn: Mapping[str, nn.Module], examples: Num[Tensor, "R ..."]
) -> None:
    """Check that each drawn layer runs once, and that nothing but its own run reads its weights.

    Such a layer is replaced by one that reads theta, and has no weights of its own any more.
    """
    calls: Counter[str] = Counter()
    running: list[str] = []  # layers that run at the moment
    reads: Counter[str] = Counter()  # of weights, from outside

    def begin(name: str) -> None:
        calls[name] += 1
        running.append(name)

    owners: dict[int, str] = {}
    for name, layer in drawn.items():
        owners |= {id(parameter): name for parameter in layer.parameters(recurse=False)}

    def note_reads(_: Any, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            for part in argument if isinstance(argument, list | tuple) else (argument,):
                owner = owners.get(id(part))
                reads.update([owner] if owner is not None and owner not in running else [])

    with (
        watch(drawn, lambda name, _: begin(name)),
        watch(drawn, lambda name, _: running.remove(name), of_outputs=True),
        Functions(note_reads),
    ):
        run_on_rows(module, examples)
    for name, layer in drawn.items():
        if reads[name]:
            why = "forward reads its weights itself; call the layer instead"
        elif not calls[name]:
            why = "it never runs; call it in forward, leave it out of the module"
        elif calls[name] > 1:
            why = f"it runs {calls[name]} times; each place needs a layer of its own"
        else:
            continue
        raise unsupported(name, layer, f"{why}{NOT_DRAWN}")


def layer_of_operator(module: nn.Module, run: Callable[[], object], operator: str) -> str | None:
    """Return the innermost layer of a module in which an operator such as `cumprod` runs, if it is
    seen to."""
    layers = {name: layer for name, layer in module.named_modules() if name}
    running: list[str] = []
    found: list[str] = []

    with (
        watch(layers, lambda name, _: running.append(name)),
        watch(layers, lambda name, _: running.remove(name), of_outputs=True),
        _Operators(lambda name: found.extend(running[-1:] if name == operator else [])),
    ):
        run()
    return f"layer {found[0]}: {type(layers[found[0]]).__name__}" if found else None


def reads_values(run: Callable[[], object]) -> bool:
    """Whether something asks for the value of a tensor while it runs, as `if`, `int` and `item`
    do."""
    asked: list[str] = []
    with _Operators(lambda name: asked.extend([name] if name in READS_VALUES else [])):
        run()
    return bool(asked)


class _Operators(TorchDispatchMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes the functions of torch that are called, and with what."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(func, (*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))


def _same(one: object, other: object) -> bool:
    """Whether two values that a layer took or gave are the same; of what is no tensor, the tensors
    within."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return all(_same(a, b) for a, b in zip(one, other, strict=False))
    return True


def dropouts_of(module: nn.Module, patterns: Sequence[str] | None) -> list[str]:
    """Return the names of a module's Dropouts that are masks; one of rate 0 drops nothing."""
    return [
        name
        for name, layer in layers_by_name(module).items()
        if isinstance(layer, DROPOUTS) and layer.p > 0 and is_named(name, patterns)
    ]


def count_dropout_units(
    module: nn.Module, names: Sequence[str], examples: Num[Tensor, "R ..."]
) -> dict[str, list[int]]:
    """Return how many units, or channels, some Dropouts of a module see, by name, whenever they
    run."""
    dropouts = {name: module.get_submodule(name) for name in names}
    units: dict[str, list[int]] = {name: [] for name in dropouts}
    with watch(dropouts, lambda name, inputs: units[name].append(inputs.shape[1])):
        run_on_rows(module, examples)
    return units


def keep_probabilities(
    module: nn.Module, drawn: Sequence[str], dropouts: Sequence[str], examples: Num[Tensor, "R ..."]
) -> dict[str, Float[Tensor, "I"]]:
    """Return with what probability each drawn layer's inputs, or channels, pass some of the
    module's Dropouts.

    An input counts as dropped with a unit that it is 0 without. What weighted layers give is noise
    here, so that only Dropouts between one and the next are seen.
    """
    layers = {name: module.get_submodule(name) for name in drawn}
    kept: dict[str, Tensor] = {}
    for name, layer in layers.items():
        assert isinstance(layer, DRAWABLE)
        inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        kept[name] = torch.ones(inputs)
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
            for of, units in live.items():
                kept[of][alive[of] & ~units] *= 1.0 - dropout.p
    return kept


@contextmanager
def watch(
    layers: Layers, note: Callable[[str, Any], None], of_outputs: bool = False
) -> Iterator[None]:
    """Note what each layer takes in as its first argument, or what it gives."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            if of_outputs:
                hook = layer.register_forward_hook(
                    lambda _, __, outputs, name=name: note(name, outputs)
                )
            else:
                hook = layer.register_forward_pre_hook(
                    lambda _, inputs, name=name: note(name, inputs[0] if inputs else None)
                )
            stack.enter_context(hook)
        yield
