"""Primary networks as functions of an input and theta: outputs[k, n] = f(x[n], theta[k]).

Any module becomes one: its Linear and convolution layers, or those of them that are named, are
replaced in a copy by layers that read their part of theta (`training.bayes.layers`), and
everything else, the module's own forward included, stays as it is.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from model_store.errors import InvalidInput
from training.bayes.layers import (
    DRAWABLE,
    Drawable,
    FeatureLayer,
    MaskLayer,
    Pass,
    Position,
    ScaledLayer,
    Slot,
    Stochastic,
    WeightLayer,
)
from training.bayes.layers import initial_weights as weights_of
from training.bayes.network import Network
from training.bayes.variational_hypernet import HyperLayer
from training.networks.piecewise import PiecewiseLinear
from training.networks.probes import (
    DROPOUTS,
    ROWS,
    are_alike,
    check_calls,
    check_repeatable,
    copy_module,
    count_dropout_units,
    dropouts_of,
    keep_probabilities,
    run_on_rows,
    watch,
)
from training.networks.selection import (
    NOT_DRAWN,
    drawn_layers,
    freeze,
    layers_by_name,
    unsupported,
)

ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Identity,
)
WEIGHTED = (
    *DRAWABLE,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Bilinear,
    nn.RNNBase,
    nn.MultiheadAttention,
    ScaledLayer,
    WeightLayer,
    HyperLayer,
)
TRIAL_ROWS, TRIAL_DRAWS = 3, 2
Layer = TypeVar("Layer", ScaledLayer, WeightLayer)

torch.backends.mha.set_fastpath_enabled(False)  # one operator, unknown to ONNX


class DrawnNetwork(Network):
    """A module whose drawn layers read theta; `slots` says which part is whose."""

    def __init__(
        self,
        module: nn.Module,
        stochastic: Stochastic,
        shape: Sequence[int],
        trained: Sequence[str] | None = None,
        examples: Num[Tensor, "R ..."] | None = None,
        is_trained: bool = False,
    ) -> None:
        """Convert a copy of a module that takes rows of `shape`.

        Args:
            module: any module whose outputs are a row for each input row.
            stochastic: which of its layers are drawn, and how.
            shape: of a row.
            trained: patterns of the layers that are not drawn whose parameters a fit may change;
                None of all.
            examples: rows that the module takes, to find out what it does; by default normal noise.
                Where they are integers, it takes ids.
            is_trained: whether theta starts where the network computes what the module does.
        """
        examples = noise_rows(shape) if examples is None else examples
        super().__init__(shape, takes_ids=not examples.is_floating_point())
        module = nn.Sequential(module) if isinstance(module, DRAWABLE) else module
        self.is_trained = is_trained
        self.current = Pass()
        self.is_paired = stochastic.drawn in ("scales", "masks")  # rows may have draws of their own
        self.folded = stochastic.drawn == "hypernet" or not _is_chain(module)
        self.shares_input = True
        self.places: list[Position] = []
        # the module's own weights, by slot, where weights are drawn
        self.initial: dict[str, Tensor] = {}
        # weights that are not drawn, and the buffer of how probably masks keep each of their inputs
        self.masked_weights: list[tuple[str, str]] = []
        drawn = drawn_layers(module, stochastic.layers)
        _check_supported(module, drawn)
        check_repeatable(module, examples)
        check_calls(module, drawn, examples)
        module = copy_module(module)
        self.frozen = freeze(module, trained, list(drawn))
        self.module = self._convert(module, stochastic, list(drawn), examples)
        self.slots = [place.slot for place in self.places if place.slot.size]
        self.theta_dimension = sum(slot.size for slot in self.slots)
        if not self.theta_dimension:
            if self.masked_weights:
                expected = "a place for a mask: a second layer, or posterior.input_rate"
                raise InvalidInput("network", expected, "neither")
            raise InvalidInput("network", "a Linear, Conv1d or Conv2d layer to draw", "none")
        self._try(examples)

    def run(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"], Tensor | None]:
        """Return outputs, features and KL.

        Features are the first layer's product, or the standardised row where that depends on the
        draw.
        """
        self.current.num_draws = theta.shape[0]
        return self._run(x, theta)

    def _run(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        current = self.current
        current.theta = self._by_layer(theta)
        try:
            h = standard = self.scale(x)
            if not self.shares_input:
                h = standard.expand(current.num_draws, *standard.shape).flatten(0, 1)
            outputs = self.module(h)
            features = standard.flatten(1).float() if current.features is None else current.features
            if self.folded:
                outputs = outputs.unflatten(0, (current.num_draws, -1))
            return outputs, features, current.kl
        finally:
            current.clear()

    def _by_layer(self, theta: Tensor) -> dict[str, Tensor]:
        parts = torch.split(theta, [slot.size for slot in self.slots], dim=-1)
        return {slot.name: part for slot, part in zip(self.slots, parts, strict=True)}

    def sample_locally(
        self,
        x: Float[Tensor, "N I"],
        mean: Float[Tensor, "D"],
        std: Float[Tensor, "D"],
        num_draws: int,
    ) -> Float[Tensor, "K N C"]:
        """Return outputs for training where weights are independent and normal: layers draw values,
        row by row."""
        self.current.std = self._by_layer(std)
        self.current.num_draws = num_draws
        return self._run(x, mean[None, None])[0]

    def embed(self, x: Float[Tensor, "N I"], theta: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        # onnxruntime multiplies few rows with the drawn weights of a lone draw in another order
        # than many
        draws = theta if self.is_paired else theta.expand(2, -1, -1)
        h = last_input(self.module, lambda: self.run(x, draws))
        return (h[: x.shape[0]] if self.folded or h.ndim == 2 else h[0]).flatten(1)

    @torch.no_grad()
    def initialise(
        self, x: Float[Tensor, "N I"], standardise: bool = True
    ) -> Float[Tensor, "D"] | None:
        """Set standardisation from a batch, and return where theta starts: None where it has no
        such place.

        Scales, and biases with them, are set so that each unit's value before its nonlinearity has
        mean 0 and variance 1 over the batch (Salimans and Kingma 2016, section 3); weights start as
        the module's own. Those of a trained network start where it computes the same.
        """
        if standardise:
            self.fit_scale(x)
        if self.initial:
            return torch.cat([self.initial[slot.name].flatten() for slot in self.slots])
        scaled = self.layers_of(ScaledLayer)
        if not scaled:
            return None
        if self.is_trained:
            return torch.cat([layer.lengths() for layer in scaled])
        was_training = self.training
        statistics = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        start: dict[str, Tensor] = {}
        self.current.start = start
        try:
            self.module.train()(self.scale(x))
        finally:
            self.current.clear()
            self.module.train(was_training)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(statistics[name])
        return torch.cat([start[slot.name] for slot in self.slots])

    @property
    def draws_one_by_one(self) -> bool:
        return not self.is_paired

    def layers_of(self, kind: type[Layer]) -> list[Layer]:
        """Return the drawn layers of a kind, in theta's order."""
        layers = [layer for layer in self.modules() if isinstance(layer, kind)]
        order = [slot.name for slot in self.slots]
        return sorted(layers, key=lambda layer: order.index(layer.place.slot.name))

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Return sum_l sum_i keep_li |W_li|^2 / (2 prior_std^2) over inputs i of layers whose
        weights are not drawn.

        It is the KL of a dropout posterior from the prior N(0, prior_std^2 I) on weights, up to a
        constant (Gal and Ghahramani 2016, "Dropout as a Bayesian approximation", appendix, equation
        13).
        """
        weights = self.module.get_parameter
        squares = [
            _sum_squares(weights(name), getattr(self, kept)) for name, kept in self.masked_weights
        ]
        return torch.stack(squares).sum() / (2.0 * prior_std**2)

    def _convert(
        self, module: nn.Module, stochastic: Stochastic, drawn: Sequence[str], examples: Tensor
    ) -> nn.Module:
        layers = layers_by_name(module)
        own = dropouts_of(module, stochastic.layers) if stochastic.drawn == "masks" else []
        units = count_dropout_units(module, own, examples) if own else {}
        kept = keep_probabilities(module, drawn, own, examples) if own else {}
        first = True
        for name, layer in layers.items():
            made: nn.Module = nn.Dropout(0.0)  # which has a rate for a forward that reads it
            if isinstance(layer, DROPOUTS):
                if name in own:
                    times = len(units[name])
                    if times == 0:
                        why = "it never runs, as a mask does; call it in forward"
                        raise unsupported(name, layer, f"{why}{NOT_DRAWN}")
                    if times > 1:
                        why = f"it runs {times} times; each place needs a Dropout of its own"
                        raise unsupported(name, layer, why)
                    made = self._mask(name, units[name][0], 1.0 - layer.p)
            elif name in drawn:
                assert isinstance(layer, DRAWABLE)
                made = self._layer(name, layer, stochastic, first, kept.get(name))
                first = False
            else:
                continue
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, made)
        return module

    def _layer(
        self, name: str, layer: Drawable, stochastic: Stochastic, first: bool, kept: Tensor | None
    ) -> nn.Module:
        if stochastic.drawn == "scales":
            place = self._place(Slot(name, (len(layer.weight),)), first)
            return ScaledLayer(layer, place, self.is_trained)
        if stochastic.drawn == "weights":
            self.initial[name] = weights = weights_of(layer)
            return WeightLayer(layer, self._place(Slot(name, tuple(weights.shape)), first))
        if stochastic.drawn == "hypernet":
            if not isinstance(layer, nn.Linear):
                raise unsupported(name, layer, "a variational hypernetwork has Linear layers")
            place = self._place(Slot(name, (layer.in_features, layer.out_features)), first)
            return HyperLayer(layer, place, stochastic, self.is_trained)
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
        buffer = f"kept_{len(self.masked_weights)}"
        self.register_buffer(buffer, kept, persistent=False)
        self.masked_weights.append((f"{path}.weight", buffer))
        return inner

    def _mask(self, name: str, units: int, keep: float, on_last_axis: bool = False) -> MaskLayer:
        return MaskLayer(self._place(Slot(name, (units,), keep), False), on_last_axis)

    def _place(self, slot: Slot, first: bool) -> Position:
        self.places.append(Position(slot, self.current, self.folded, first))
        return self.places[-1]

    @torch.no_grad()
    def _try(self, examples: Num[Tensor, "R ..."]) -> None:
        """Find out which layers see rows that all draws share, and check that draws and rows stay
        apart."""
        generator = torch.Generator().manual_seed(0)
        x = examples[:TRIAL_ROWS].flatten(1).float()
        x = x.repeat(TRIAL_ROWS, 1)[:TRIAL_ROWS]
        theta = torch.rand(TRIAL_DRAWS, 1, self.theta_dimension, generator=generator)
        was_training = self.training
        self.eval()
        try:
            outputs = self._run_shared(x, theta)
            if outputs is None:
                # rows that all draws share meet rows that they do not, as in a residual addition
                self.shares_input, self.folded = False, True
                for place in self.places:
                    place.shared, place.folded = False, True
                outputs = run_on_rows(lambda: self(x, theta)[0])
            one_by_one = torch.cat([self(x, theta[k : k + 1])[0] for k in range(TRIAL_DRAWS)])
            alone = torch.cat([self(x[n : n + 1], theta)[0] for n in range(TRIAL_ROWS)], dim=1)
        finally:
            self.train(was_training)
        for other in (one_by_one, alone):
            if outputs.ndim != 3 or not are_alike(outputs, other):
                expected = "one output row for each input row, whatever the other rows are"
                raise InvalidInput("network", expected, "a module that mixes rows")

    def _run_shared(self, x: Tensor, theta: Tensor) -> Tensor | None:
        self.current.trial_rows = TRIAL_ROWS
        try:
            outputs: Tensor = self(x, theta)[0]
        except (RuntimeError, IndexError, ValueError):
            return None
        finally:
            self.current.trial_rows = 0
        return outputs if outputs.shape[:2] == (TRIAL_DRAWS, TRIAL_ROWS) else None


class MemberNetwork(Network):
    """Several fitted modules; theta is the number of one. With one member it is a plain network."""

    def __init__(
        self,
        members: Sequence[nn.Module],
        shape: Sequence[int],
        trained: Sequence[str] | None = None,
        examples: Num[Tensor, "R ..."] | None = None,
        anchor_std: float | None = None,
    ) -> None:
        """Make a network of modules that are alike, whose weights differ.

        With `anchor_std` each member has a draw of the prior, at which it starts and towards which
        it decays in place of 0 (Pearce, Leibfried and Brintrup 2020, "Uncertainty in neural
        networks: approximately Bayesian ensembling", equation 9). Weights of a unit with I inputs
        are N(0, 2 anchor_std^2 / I), biases N(0, anchor_std^2).
        """
        examples = noise_rows(shape) if examples is None else examples
        super().__init__(shape, takes_ids=not examples.is_floating_point())
        self.members = nn.ModuleList(members)
        self.anchors: list[tuple[nn.Parameter, str, float]] = []  # its buffer and prior's scale
        if anchor_std is not None:
            self._draw_anchors(anchor_std)
        self.frozen = [layer for member in members for layer in freeze(member, trained, [])]
        self.theta_dimension = 1
        self.is_paired = False
        check_repeatable(members[0], examples)
        copy_module(members[0])  # as what is served is tried in a copy

    def run(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"], None]:
        standard = self.scale(x)
        outputs = torch.stack([member(standard) for member in self.members])
        return outputs.index_select(0, theta[:, 0, 0].long()), standard.flatten(1).float(), None

    def embed(self, x: Float[Tensor, "N I"], _: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        """Return what the first member's last layer takes in; members share no space to take a mean
        in."""
        standard = self.scale(x)
        return last_input(self.members[0], lambda: self.members[0](standard)).flatten(1)

    @torch.no_grad()
    def initialise(self, x: Float[Tensor, "N I"], standardise: bool = True) -> None:
        if standardise:
            self.fit_scale(x)

    @torch.no_grad()
    def _draw_anchors(self, prior_std: float) -> None:
        for layer in self.members.modules():
            own = dict(layer.named_parameters(recurse=False))
            if "weight" not in own or own["weight"].ndim < 2:  # what normalises has no prior
                continue
            for parameter in own.values():
                inputs = parameter[0].numel() if parameter.ndim > 1 else 2
                scale = math.sqrt(2.0 / inputs)
                parameter.copy_(prior_std * scale * torch.randn(parameter.shape))
                anchor = f"anchor_{len(self.anchors)}"
                self.register_buffer(anchor, parameter.detach().clone(), persistent=False)
                self.anchors.append((parameter, anchor, scale))

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Return sum |W|^2 / (2 prior_std^2) over the weight matrices of a member, the mean over
        members, as the likelihood's term is; of anchored members minus the log of their prior
        around the anchors."""
        if self.anchors:
            squares = [
                ((parameter - getattr(self, anchor)) / scale).square().sum()
                for parameter, anchor, scale in self.anchors
            ]
        else:
            squares = [p.square().sum() for p in self.parameters() if p.ndim > 1]
        return torch.stack(squares).sum() / (2.0 * prior_std**2 * len(self.members))


def noise_rows(shape: Sequence[int]) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(0))


def last_input(module: nn.Module, run: Callable[[], object]) -> Tensor:
    seen: list[Tensor] = []
    layers = {str(i): layer for i, layer in enumerate(_outermost(module))}
    with watch(layers, lambda _, taken: seen.append(taken)):
        run()
    return seen[-1]


def _outermost(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, WEIGHTED):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child)]


def _sum_squares(weight: Tensor, kept: Float[Tensor, "I"]) -> Float[Tensor, ""]:
    """Return the sum of a layer's squared weights, each by its input's factor; convolutions may
    have groups."""
    squares = weight.square().flatten(2).sum(2) if weight.ndim > 2 else weight.square()
    groups = len(kept) // squares.shape[1]
    return torch.dot(squares.unflatten(0, (groups, -1)).sum(1).flatten(), kept)


def _check_supported(module: nn.Module, drawn: dict[str, Drawable]) -> None:
    """Check that nothing else has a drawn layer's weights: what is not drawn may be any layer."""
    names: dict[int, str] = {}
    owners: dict[int, str] = {}  # of parameters
    for name, layer in drawn.items():
        names.setdefault(id(layer), name)
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
    for name, part in layers_by_name(module).items():
        other = names.get(id(part), name)
        if other != name:
            why = f"it is also layer {other}; layers that share weights are not"
            raise unsupported(name, part, f"{why}{NOT_DRAWN}")
        for kind, parameter in part.named_parameters(recurse=False):
            owner = owners.get(id(parameter), name)
            if owner != name:
                why = f"its {kind} is also layer {owner}'s; each needs its own"
                raise unsupported(name, part, f"{why}{NOT_DRAWN}")


def _is_chain(module: nn.Module) -> bool:
    """Whether a module is nothing but Linear layers and elementwise nonlinearities, one after the
    other, behind an encoding of the row."""
    return isinstance(module, nn.Sequential) and all(
        isinstance(layer, (nn.Linear, PiecewiseLinear, *ELEMENTWISE, *DROPOUTS)) for layer in module
    )
