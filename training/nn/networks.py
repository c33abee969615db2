"""Primary networks as functions of an input and theta: outputs[k, n] = f(x[n], theta[k]).

Any module of Linear and Conv2d layers becomes one: those layers are replaced in a copy by layers that read their part
of theta (`training.nn.layers`), and everything else, the module's own forward included, stays as it is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.errors import InvalidInput
from training.nn.layers import FeatureLayer, HyperLayer, MaskLayer, Pass, Position, ScaledLayer, Slot, WeightLayer
from training.nn.layers import initial_weights as weights_of
from training.nn.probes import (
    DROPOUTS,
    check_calls,
    check_repeatable,
    copied,
    dropped_units,
    kept_inputs,
    run_on_rows,
)

Drawn = Literal["scales", "weights", "masks", "hypernet"]
# Layers with parameters or statistics of their own, which stay point estimates.
POINT_ESTIMATES = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.PReLU,
    nn.GRU,
    nn.LSTM,
    nn.RNN,
)
ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Identity)
TRIAL_ROWS, TRIAL_DRAWS = 3, 2


@dataclass(frozen=True)
class Stochastic:
    """What of a module is drawn: which layers take the place of its own."""

    drawn: Drawn
    rate: float = 0.5  # of masks before every layer but the first, where a module has no Dropout of its own
    input_rate: float = 0.0  # of masks before the first
    hidden: int = 50  # units of a hypernet's inference network
    vector_scaling: bool = True
    initial_log_std: float = -4.0  # of a hypernet's weights


class DrawnNetwork(nn.Module):
    """A module whose Linear and Conv2d layers read theta; `slots` says which part is whose."""

    mean: Tensor
    std: Tensor

    def __init__(self, module: nn.Module, stochastic: Stochastic, shape: Sequence[int]) -> None:
        """Convert a copy of a module that takes rows of `shape`.

        Raises:
            InvalidInput: naming the layer that is not supported, or what fails when the module runs on several draws.
        """
        super().__init__()
        module = nn.Sequential(module) if isinstance(module, nn.Linear | nn.Conv2d) else module
        self.shape = tuple(shape)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        self.current = Pass()
        self.is_paired = stochastic.drawn in ("scales", "masks")  # rows may have draws of their own
        folded = stochastic.drawn == "hypernet" or not _is_chain(module)
        self.folded = folded
        self.shares_input = True
        self.places: list[Position] = []
        self.initial: dict[str, Tensor] = {}  # the module's own weights, by slot, where weights are drawn
        # weights that are not drawn, and with what probability masks keep each of their inputs
        self.masked_weights: list[tuple[str, Tensor]] = []
        layers = [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name]
        _check_supported(module, layers)
        check_repeatable(module, self.shape)
        check_calls(module, self.shape)
        self.module = self._converted(copied(module), stochastic)
        self.slots = [place.slot for place in self.places if place.slot.size]
        self.theta_dimension = sum(slot.size for slot in self.slots)
        if not self.theta_dimension:
            if self.masked_weights:
                raise InvalidInput(
                    "network", "a place for a mask: a second layer, or posterior.input_rate", "neither"
                )
            raise InvalidInput("network", "a Linear or Conv2d layer to draw", "none")
        self._try()

    def forward(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"]]:
        """Return the outputs of each draw and row, and features: what is known of a row before any draw.

        Features are the first layer's product, or the standardised row where that depends on the draw.
        """
        outputs, features, _ = self.run(x, theta)
        return outputs, features

    def run(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"], Tensor | None]:
        """Return outputs, features, and the KL of layers whose posterior depends on their input (K), if any."""
        self.current.num_draws = theta.shape[0]
        return self._run(x, theta)

    def _run(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        current = self.current
        current.theta = self._by_layer(theta)
        try:
            standard = self._standardised(x)
            h = standard if self.shares_input else standard.expand(current.num_draws, *standard.shape).flatten(0, 1)
            outputs = self.module(h)
            features = standard.flatten(1) if current.features is None else current.features
            return outputs.unflatten(0, (current.num_draws, -1)) if self.folded else outputs, features, current.kl
        finally:
            current.clear()

    def _by_layer(self, theta: Tensor) -> dict[str, Tensor]:
        parts = torch.split(theta, [slot.size for slot in self.slots], dim=-1)
        return {slot.name: part for slot, part in zip(self.slots, parts, strict=True)}

    def drawn_locally(
        self, x: Float[Tensor, "N I"], mean: Float[Tensor, "D"], std: Float[Tensor, "D"], num_draws: int
    ) -> Float[Tensor, "K N C"]:
        """Return outputs for training where weights are independent and normal: layers draw values, row by row."""
        self.current.std = self._by_layer(std)
        self.current.num_draws = num_draws
        return self._run(x, mean[None, None])[0]

    def embed(self, x: Float[Tensor, "N I"], theta: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        """Return what the last layer takes in under one draw."""
        # onnxruntime multiplies few rows with the drawn weights of a lone draw in another order than many
        draws = theta if self.is_paired else theta.expand(2, -1, -1)
        h = last_input(self.module, lambda: self.run(x, draws))
        return (h[: x.shape[0]] if self.folded or h.ndim == 2 else h[0]).flatten(1)

    def _standardised(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).unflatten(1, self.shape)

    @torch.no_grad()
    def initialise(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "D"] | None:
        """Set standardisation from a batch, and return where theta starts: None where it has no such place.

        Scales, and biases with them, are set so that each unit's value before its nonlinearity has mean 0 and
        variance 1 over the batch (Salimans and Kingma 2016, section 3); weights start as the module's own.
        """
        self.mean.copy_(x.mean())
        self.std.copy_(x.std().clamp(min=1e-12))
        if self.initial:
            return torch.cat([self.initial[slot.name].flatten() for slot in self.slots])
        if not any(isinstance(layer, ScaledLayer) for layer in self.modules()):
            return None
        was_training = self.training
        statistics = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        start: dict[str, Tensor] = {}
        self.current.start = start
        try:
            self.module.train()(self._standardised(x))
        finally:
            self.current.clear()
            self.module.train(was_training)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(statistics[name])
        return torch.cat([start[slot.name] for slot in self.slots])

    def fold(self) -> None:
        """Normalise directions for good; the network computes the same."""
        for layer in self.modules():
            if isinstance(layer, ScaledLayer):
                layer.normalise()

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Return sum_l sum_i keep_li |W_li|^2 / (2 prior_std^2) over inputs i of layers whose weights are not drawn.

        It is the KL of a dropout posterior from the prior N(0, prior_std^2 I) on weights, up to a constant (Gal and
        Ghahramani 2016, "Dropout as a Bayesian approximation", appendix, equation 13).
        """
        squares = [_kept_square(self.module.get_parameter(name), kept) for name, kept in self.masked_weights]
        return torch.stack(squares).sum() / (2.0 * prior_std**2)

    def _converted(self, module: nn.Module, stochastic: Stochastic) -> nn.Module:
        layers = [(name, layer) for name, layer in module.named_modules(remove_duplicate=False) if name]
        rates = [layer.p for _, layer in layers if isinstance(layer, DROPOUTS)]
        has_dropout = stochastic.drawn == "masks" and bool(rates)
        units = dropped_units(module, self.shape) if has_dropout else {}
        kept = kept_inputs(module, self.shape) if has_dropout else {}
        first = True
        for name, layer in layers:
            if isinstance(layer, DROPOUTS):
                keep = 1.0 - layer.p
                if has_dropout and len(units[name]) != 1:
                    times = len(units[name])
                    raise unsupported(name, layer, f"it runs {times} times; each place needs a Dropout of its own")
                replaced = self._mask(name, units[name][0], keep) if has_dropout and keep < 1 else nn.Identity()
                module = _with(module, name, replaced)
            elif isinstance(layer, nn.Linear | nn.Conv2d):
                module = _with(module, name, self._layer(name, layer, stochastic, first, kept.get(name)))
                first = False
        return module

    def _layer(
        self, name: str, layer: nn.Linear | nn.Conv2d, stochastic: Stochastic, first: bool, kept: Tensor | None
    ) -> nn.Module:
        """Return what takes a layer's place; `kept` says how the module's own Dropouts keep its inputs, if any do."""
        units = len(layer.weight)
        if stochastic.drawn == "scales":
            return ScaledLayer(layer, self._place(Slot(name, (units,)), first))
        if stochastic.drawn == "weights":
            if isinstance(layer, nn.Conv2d) and (layer.groups != 1 or layer.padding_mode != "zeros"):
                raise unsupported(name, layer, "weights are drawn for convolutions of one group, padded with zeros")
            self.initial[name] = weights_of(layer)
            return WeightLayer(layer, self._place(Slot(name, tuple(self.initial[name].shape)), first))
        if stochastic.drawn == "hypernet":
            if not isinstance(layer, nn.Linear):
                raise unsupported(name, layer, "a variational hypernetwork has Linear layers")
            place = self._place(Slot(name, (layer.in_features, layer.out_features)), first)
            return HyperLayer(layer, place, stochastic.hidden, stochastic.vector_scaling, stochastic.initial_log_std)
        rate = 0.0 if kept is not None else stochastic.input_rate if first else stochastic.rate
        inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        inner: nn.Module = layer
        path = name
        if first and rate == 0:
            is_masked = bool(self.places)  # by a Dropout of the module's own
            place = self._place(Slot(f"{name}.features", (0,)), not is_masked)
            inner, path = FeatureLayer(layer, place), f"{name}.layer"
        elif rate > 0:
            mask = self._mask(name, inputs, 1.0 - rate, isinstance(layer, nn.Linear))
            inner, path = nn.Sequential(mask, layer), f"{name}.1"
        kept = torch.full((inputs,), 1.0 - rate) if kept is None else kept
        self.masked_weights.append((f"{path}.weight", kept))
        return inner

    def _mask(self, name: str, units: int, keep: float, of_last: bool = False) -> MaskLayer:
        return MaskLayer(self._place(Slot(name, (units,), keep), False), of_last)

    def _place(self, slot: Slot, first: bool) -> Position:
        self.places.append(Position(slot, self.current, self.folded, first))
        return self.places[-1]

    @torch.no_grad()
    def _try(self) -> None:
        """Find out which layers see rows that all draws share, and check that draws and rows stay apart."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TRIAL_ROWS, math.prod(self.shape), generator=generator)
        theta = torch.rand(TRIAL_DRAWS, 1, self.theta_dimension, generator=generator)
        was_training = self.training
        self.eval()
        try:
            outputs = self._tried(x, theta)
            if outputs is None:  # rows that all draws share meet rows that they do not, as in a residual addition
                self.shares_input, self.folded = False, True
                for place in self.places:
                    place.shared, place.folded = False, True
                outputs = run_on_rows(lambda: self(x, theta)[0])
            one_by_one = torch.cat([self(x, theta[k : k + 1])[0] for k in range(TRIAL_DRAWS)])
            alone = torch.cat([self(x[n : n + 1], theta)[0] for n in range(TRIAL_ROWS)], dim=1)
        finally:
            self.train(was_training)
        for expected in (one_by_one, alone):
            if (
                outputs.ndim != 3
                or outputs.shape != expected.shape
                or not torch.allclose(outputs, expected, atol=1e-3)
            ):
                raise InvalidInput(
                    "network",
                    "one output row for each input row, whatever stands beside it",
                    "a module that mixes rows",
                )

    def _tried(self, x: Tensor, theta: Tensor) -> Tensor | None:
        self.current.trial_rows = TRIAL_ROWS
        try:
            outputs: Tensor = self(x, theta)[0]
        except (RuntimeError, IndexError, ValueError):
            return None
        finally:
            self.current.trial_rows = 0
        return outputs if outputs.shape[:2] == (TRIAL_DRAWS, TRIAL_ROWS) else None


class MemberNetwork(nn.Module):
    """Several fitted modules; theta is the number of one. With one member it is a plain network."""

    mean: Tensor
    std: Tensor

    def __init__(self, members: Sequence[nn.Module], shape: Sequence[int]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.shape = tuple(shape)
        self.theta_dimension = 1
        self.is_paired = False
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))
        check_repeatable(members[0], shape)
        copied(members[0])  # as what is served is tried in a copy

    def forward(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"]]:
        """Return the outputs of each drawn member and row, and the standardised row as features."""
        outputs, features, _ = self.run(x, theta)
        return outputs, features

    def run(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"], None]:
        """Return outputs and features; there is no KL."""
        standard = ((x - self.mean) / self.std).unflatten(1, self.shape)
        outputs = torch.stack([member(standard) for member in self.members])
        return outputs.index_select(0, theta[:, 0, 0].long()), standard.flatten(1), None

    def embed(self, x: Float[Tensor, "N I"], _: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        """Return what the first member's last layer takes in; members share no space to take a mean in."""
        standard = ((x - self.mean) / self.std).unflatten(1, self.shape)
        return last_input(self.members[0], lambda: self.members[0](standard)).flatten(1)

    @torch.no_grad()
    def initialise(self, x: Float[Tensor, "N I"]) -> None:
        """Set standardisation from a batch."""
        self.mean.copy_(x.mean())
        self.std.copy_(x.std().clamp(min=1e-12))

    def fold(self) -> None:
        """Do nothing: there is nothing to fold."""

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Return sum |W|^2 / (2 prior_std^2) over the weight matrices of all members."""
        squares = [p.square().sum() for p in self.parameters() if p.ndim > 1]
        return torch.stack(squares).sum() / (2.0 * prior_std**2)


def last_input(module: nn.Module, run: Callable[[], object]) -> Tensor:
    """Return what the last of a module's layers takes in while it runs."""
    seen: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) for layer in _outermost(module)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen[-1]


def _outermost(module: nn.Module) -> list[nn.Module]:
    """Return a module's layers with weights, not looking inside those that are made of others."""
    if isinstance(module, nn.Linear | nn.Conv2d | ScaledLayer | WeightLayer | HyperLayer):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child)]


def unsupported(name: str, layer: nn.Module, why: str) -> InvalidInput:
    """Return the error for a layer that cannot be made Bayesian."""
    return InvalidInput(
        "network", "supported layers (docs/training.md lists them)", f"layer {name}: {type(layer).__name__}: {why}"
    )


def _kept_square(weight: Tensor, kept: Float[Tensor, "I"]) -> Float[Tensor, ""]:
    """Return the sum of a layer's squared weights, each by its input's factor; convolutions may have groups."""
    squares = weight.square().flatten(2).sum(2) if weight.ndim > 2 else weight.square()
    groups = len(kept) // squares.shape[1]
    return torch.dot(squares.unflatten(0, (groups, -1)).sum(1).flatten(), kept.to(weight))


def _check_supported(module: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
    seen: dict[int, str] = {}
    owners: dict[int, str] = {}  # of parameters
    for name, layer in [("(the module itself)", module), *layers]:
        if id(layer) in seen and any(True for _ in layer.parameters()):
            raise unsupported(name, layer, f"it is also layer {seen[id(layer)]}; layers that share weights are not")
        seen[id(layer)] = name
        for part, parameter in layer.named_parameters(recurse=False):
            owner = owners.setdefault(id(parameter), name)
            if owner != name:
                raise unsupported(name, layer, f"its {part} is also layer {owner}'s; each layer needs its own")
        if isinstance(layer, nn.MultiheadAttention):
            raise unsupported(name, layer, "use Linear layers and scaled_dot_product_attention in its place")
        if isinstance(layer, nn.RNNCellBase):
            raise unsupported(name, layer, "use the layer of all steps (GRU, LSTM, RNN) in its place")
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        known = type(layer) in (nn.Linear, nn.Conv2d) or isinstance(layer, POINT_ESTIMATES)
        if own and not known:
            raise unsupported(name, layer, "it has parameters of its own, and is not one of them")


def _is_chain(module: nn.Module) -> bool:
    """Whether a module is nothing but Linear layers and elementwise nonlinearities, one after the other."""
    return isinstance(module, nn.Sequential) and all(
        isinstance(layer, (nn.Linear, *ELEMENTWISE, *DROPOUTS)) for layer in module
    )


def _with(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Return a module with the layer of that name replaced."""
    parent, _, last = name.rpartition(".")
    setattr(module.get_submodule(parent), last, layer)
    return module
