"""Conversion of modules to networks: outputs[k, n] = f(x[n], theta[k]).

In a copy of the module, selected Linear and convolution layers are replaced by layers that read a
part of theta (`training.bayes.layers`).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from model_store.errors import InvalidInput
from training.bayes.layers import (
    DRAWABLE,
    Drawable,
    ForwardContext,
    LayerContext,
    MaskLayer,
    RandomLayer,
    ScaledLayer,
    Slot,
    Stochastic,
    WeightLayer,
)
from training.bayes.layers import initial_weights as layer_weights
from training.bayes.network import Network
from training.bayes.variational_hypernet import HyperLayer
from training.networks.fixed_layers import PiecewiseLinear, RandomFeatures
from training.networks.probes import (
    DROPOUTS,
    ROWS,
    SEPARATE_ROWS,
    are_close,
    check_calls,
    check_repeatable,
    check_training,
    copy_module,
    count_dropout_units,
    keep_probabilities,
    mask_dropouts,
    run_on_rows,
    turn_off_dropout,
    watch,
    without_fast_path,
)
from training.networks.selection import freeze, layers_by_name, select_layers, unsupported

Inputs = Float[Tensor, "N I"]
Outputs = Float[Tensor, "K N C"]
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
CHAINED = (nn.Linear, PiecewiseLinear, RandomFeatures, *ELEMENTWISE, *DROPOUTS)
# Layers whose inputs can be an embedding.
WEIGHTED = (nn.Linear, _ConvNd, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention, RandomLayer)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
TRIAL_ROWS, TRIAL_DRAWS = 3, 2
Layer = TypeVar("Layer", ScaledLayer, WeightLayer)


class DrawnNetwork(Network):
    """A network with random layers, each of which has a slot in theta."""

    def __init__(
        self,
        module: nn.Module,
        stochastic: Stochastic,
        shape: Sequence[int],
        trained: Sequence[str] | None = None,
        examples: Num[Tensor, "R ..."] | None = None,
        is_trained: bool = False,
    ) -> None:
        """Convert a copy of a module that returns one output row for each input row.

        `trained` has name patterns of other layers to train; None for all. `examples` are valid
        rows for tests of the module, by default normal noise. If `is_trained`, theta starts at the
        module's weights.
        """
        examples = noise_rows(shape) if examples is None else examples
        super().__init__(shape, takes_ids=not examples.is_floating_point())
        module = nn.Sequential(module) if isinstance(module, DRAWABLE) else module
        self.is_trained = is_trained
        self.forward_context = ForwardContext()
        self.is_paired = stochastic.kind in ("scales", "masks")
        self.draws_one_by_one = not self.is_paired
        self.folded = stochastic.kind == "hypernet" or not _is_chain(module)
        self.shares_input = True
        self.contexts: list[LayerContext] = []
        self.initial: dict[str, Tensor] = {}  # the module's weights by slot, if weights are random
        self.keep: dict[str, float] = {}  # probability that an input is kept, by weight name
        selection = select_layers(module, stochastic.layers)
        check_repeatable(module, examples)
        dropouts = mask_dropouts(module, stochastic.layers) if stochastic.kind == "masks" else {}
        check_calls(module, {**selection, **dropouts}, examples)
        module = copy_module(module)
        self.frozen = freeze(module, trained, list(selection))
        check_training(module, self.frozen, examples)
        for layer in module.modules():
            turn_off_dropout(layer)
        self.module = self._convert(module, stochastic, list(selection), list(dropouts), examples)
        self.slots = [context.slot for context in self.contexts]
        self.theta_dimension = sum(slot.size for slot in self.slots)
        if not self.theta_dimension:
            if self.keep:
                expected = "a second layer to mask, or posterior.input_rate"
                raise InvalidInput("network", expected, "neither")
            raise InvalidInput("network", "a Linear, Conv1d or Conv2d layer to draw", "none")
        self._try(examples)

    def run(self, x: Inputs, theta: Float[Tensor, "K P D"]) -> tuple[Outputs, Tensor | None]:
        self.forward_context.num_draws = theta.shape[0]
        return self._run(x, theta.split(self.layer_sizes, dim=-1))

    @without_fast_path
    def _run(self, x: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        forward_context = self.forward_context
        forward_context.theta = self._by_layer(theta)
        try:
            h = self.scale(x)
            if not self.shares_input:
                h = h.expand(forward_context.num_draws, *h.shape).flatten(0, 1)
            outputs = self.module(h)
            if self.folded:
                outputs = outputs.unflatten(0, (forward_context.num_draws, -1))
            return outputs, forward_context.kl
        finally:
            forward_context.clear()

    @property
    def layer_sizes(self) -> list[int]:
        return [slot.size for slot in self.slots]

    def _by_layer(self, parts: Iterable[Tensor]) -> dict[str, Tensor]:
        return {slot.name: part for slot, part in zip(self.slots, parts, strict=True)}

    def sample_locally(
        self, x: Inputs, means: Sequence[Tensor], variances: Sequence[Tensor], num_draws: int
    ) -> Outputs:
        self.forward_context.variance = self._by_layer(variances)
        self.forward_context.num_draws = num_draws
        return self._run(x, [mean[None, None] for mean in means])[0]

    def embed(self, x: Inputs, theta: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        # With a single draw, onnxruntime's summation order would depend on the number of rows.
        draws = theta if self.is_paired else theta.expand(2, -1, -1)
        h = last_input(self.module, lambda: self.run(x, draws))
        return (h[: x.shape[0]] if self.folded or h.ndim == 2 else h[0]).flatten(1)

    @torch.no_grad()
    def initialise(self, x: Inputs, standardise: bool = True) -> Float[Tensor, "D"] | None:
        """Initialise the standardisation from a batch, and return theta's initial value, if any.

        Random weights start at the module's weights. Random scales start at values for which
        pre-activations have mean 0 and variance 1 over the batch (Salimans and Kingma 2016,
        section 3), or at the scales of the trained module.
        """
        if standardise:
            self.fit_scale(x)
        if self.initial:
            return torch.cat([self.initial[slot.name].flatten() for slot in self.slots])
        scaled = self.get_layers(ScaledLayer)
        if not scaled:
            return None
        if self.is_trained:
            return torch.cat([layer.lengths() for layer in scaled])
        was_training = self.training
        statistics = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        start: dict[str, Tensor] = {}
        self.forward_context.start = start
        try:
            self.module.train()(self.scale(x))
        finally:
            self.forward_context.clear()
            self.module.train(was_training)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(statistics[name])
        return torch.cat([start[slot.name] for slot in self.slots])

    def get_layers(self, kind: type[Layer]) -> list[Layer]:
        """Return all random layers of a given class, in their order in theta."""
        layers = [layer for layer in self.modules() if isinstance(layer, kind)]
        order = [slot.name for slot in self.slots]
        return sorted(layers, key=lambda layer: order.index(layer.context.slot.name))

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Compute sum_l |W_l|^2 / (2 keep_l prior_std^2) over masked layers l.

        A draw of an input's weights is W / keep with probability keep, else 0. Up to a constant,
        this is the KL between that posterior and the prior N(0, prior_std^2 I) on weights (Gal and
        Ghahramani 2016, "Dropout as a Bayesian approximation", appendix, equation 13). If only some
        inputs of a layer are masked, the KL is approximate.
        """
        squares = [
            self.module.get_parameter(name).square().sum() / keep
            for name, keep in self.keep.items()
        ]
        return torch.stack(squares).sum() / (2.0 * prior_std**2)

    def _convert(
        self,
        module: nn.Module,
        stochastic: Stochastic,
        selection: Sequence[str],
        dropouts: Sequence[str],
        examples: Tensor,
    ) -> nn.Module:
        units = count_dropout_units(module, dropouts, examples) if dropouts else {}
        keep = keep_probabilities(module, selection, dropouts, examples) if dropouts else {}
        first = True
        for name, layer in layers_by_name(module).items():
            replacement: nn.Module
            if name in dropouts:
                assert isinstance(layer, DROPOUTS)
                replacement = self._mask(name, units[name], 1.0 - layer.p)
            elif isinstance(layer, DROPOUTS):
                replacement = nn.Dropout(0.0)  # the user's forward may read its rate
            elif name in selection:
                assert isinstance(layer, DRAWABLE)
                replacement = self._layer(name, layer, stochastic, first, keep.get(name))
                first = False
            else:
                continue
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, replacement)
        return module

    def _layer(
        self, name: str, layer: Drawable, stochastic: Stochastic, first: bool, keep: float | None
    ) -> nn.Module:
        if stochastic.kind == "scales":
            context = self._context(Slot(name, (len(layer.weight),)))
            return ScaledLayer(layer, context, self.is_trained)
        if stochastic.kind == "weights":
            self.initial[name] = weights = layer_weights(layer)
            return WeightLayer(layer, self._context(Slot(name, tuple(weights.shape))))
        if stochastic.kind == "hypernet":
            if not isinstance(layer, nn.Linear):
                raise unsupported(name, layer, "a variational hypernetwork needs Linear layers")
            context = self._context(Slot(name, (layer.in_features, layer.out_features)))
            return HyperLayer(layer, context, stochastic, self.is_trained)
        rate = 0.0 if keep is not None else stochastic.input_rate if first else stochastic.rate
        inputs = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        inner: nn.Module = layer
        path = name
        if rate > 0:
            mask = self._mask(name, inputs, 1.0 - rate, isinstance(layer, nn.Linear))
            inner, path = nn.Sequential(mask, layer), f"{name}.1"
        self.keep[f"{path}.weight"] = 1.0 - rate if keep is None else keep
        return inner

    def _mask(self, name: str, units: int, keep: float, on_last_axis: bool = False) -> MaskLayer:
        return MaskLayer(self._context(Slot(name, (units,), keep)), on_last_axis)

    def _context(self, slot: Slot) -> LayerContext:
        self.contexts.append(LayerContext(slot, self.forward_context, self.folded))
        return self.contexts[-1]

    @torch.no_grad()
    def _try(self, examples: Num[Tensor, "R ..."]) -> None:
        generator = torch.Generator().manual_seed(0)
        x = examples[:TRIAL_ROWS].flatten(1).float()
        x = x.repeat(TRIAL_ROWS, 1)[:TRIAL_ROWS]
        theta = torch.rand(TRIAL_DRAWS, 1, self.theta_dimension, generator=generator)
        was_training = self.training
        self.eval()
        try:
            outputs = self._run_shared(x, theta)
            if outputs is None:
                # The module combines shared and per-draw rows, for example in a residual addition.
                self.shares_input, self.folded = False, True
                for context in self.contexts:
                    context.shared, context.folded = False, True
                outputs = run_on_rows(self, x, theta)
            one_by_one = torch.cat([self(x, theta[k : k + 1]) for k in range(TRIAL_DRAWS)])
            alone = torch.cat([self(x[n : n + 1], theta) for n in range(TRIAL_ROWS)], dim=1)
        finally:
            self.train(was_training)
        for separate in (one_by_one, alone):
            if outputs.ndim != 3 or not are_close(outputs, separate):
                raise InvalidInput("network", SEPARATE_ROWS, "a module that mixes rows")

    def _run_shared(self, x: Tensor, theta: Tensor) -> Tensor | None:
        self.forward_context.trial_rows = TRIAL_ROWS
        try:
            outputs: Tensor = self(x, theta)
        except (RuntimeError, IndexError, ValueError):
            return None
        finally:
            self.forward_context.trial_rows = 0
        return outputs if outputs.shape[:2] == (TRIAL_DRAWS, TRIAL_ROWS) else None


class MemberNetwork(Network):
    """An ensemble of networks; theta is the member index."""

    def __init__(
        self,
        members: Sequence[nn.Module],
        shape: Sequence[int],
        trained: Sequence[str] | None = None,
        examples: Num[Tensor, "R ..."] | None = None,
        anchor_std: float | None = None,
    ) -> None:
        """Build a network from modules that differ only in their weights.

        With `anchor_std`, each member starts at a draw from the prior, its anchor, and weight decay
        is relative to the anchor (Pearce, Leibfried and Brintrup 2020, "Uncertainty in neural
        networks: approximately Bayesian ensembling", equation 9). The prior is
        N(0, 2 anchor_std^2 / I) for weights of a unit with I inputs, and N(0, anchor_std^2) for
        biases and embeddings.
        """
        examples = noise_rows(shape) if examples is None else examples
        super().__init__(shape, takes_ids=not examples.is_floating_point())
        self.members = nn.ModuleList(members)
        # For each parameter, the buffer name of its anchor and the relative scale of the prior.
        self.anchors: list[tuple[nn.Parameter, str, float]] = []
        if anchor_std is not None:
            self._draw_anchors(anchor_std)
        frozen = [freeze(member, trained, []) for member in members]
        self.frozen = [layer for layers in frozen for layer in layers]
        self.theta_dimension = 1
        self.is_paired = False
        check_repeatable(members[0], examples)
        copy_module(members[0])  # fails early, since the export check needs a copy
        check_training(members[0], frozen[0], examples)

    @without_fast_path
    def run(self, x: Inputs, theta: Float[Tensor, "K P D"]) -> tuple[Outputs, None]:
        standard = self.scale(x)
        outputs = torch.stack([member(standard) for member in self.members])
        return outputs.index_select(0, theta[:, 0, 0].long()), None

    @without_fast_path
    def embed(self, x: Inputs, _: Float[Tensor, "1 1 D"]) -> Float[Tensor, "N H"]:
        """Compute the last layer's input for the first member."""
        standard = self.scale(x)
        return last_input(self.members[0], lambda: self.members[0](standard)).flatten(1)

    @torch.no_grad()
    def _draw_anchors(self, prior_std: float) -> None:
        for layer in self.members.modules():
            own = dict(layer.named_parameters(recurse=False))
            # Names include `in_proj_weight` (attention) and `weight_hh_l0` (recurrent layers).
            weights = [name for name in own if "weight" in name and own[name].ndim > 1]
            if not weights or isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
                continue
            for name in (*weights, *(name for name in own if "bias" in name)):
                parameter = own[name]
                has_inputs = name in weights and not isinstance(layer, EMBEDDINGS)
                scale = math.sqrt(2.0 / parameter[0].numel()) if has_inputs else 1.0
                parameter.copy_(prior_std * scale * torch.randn(parameter.shape))
                if isinstance(layer, EMBEDDINGS) and layer.padding_idx is not None:
                    parameter[layer.padding_idx] = 0.0
                anchor = f"anchor_{len(self.anchors)}"
                self.register_buffer(anchor, parameter.detach().clone(), persistent=False)
                self.anchors.append((parameter, anchor, scale))

    def weight_decay(self, prior_std: float) -> Float[Tensor, ""]:
        """Compute sum |W|^2 / (2 prior_std^2) over weight matrices, averaged over members.

        Anchored members use (W - anchor) / scale instead of W.
        """
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
    inputs: list[Tensor] = []
    layers = {str(i): layer for i, layer in enumerate(_outermost(module))}
    with watch(layers, lambda _, h: inputs.append(h)):
        run()
    return inputs[-1]


def _outermost(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, WEIGHTED):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child)]


def _is_chain(module: nn.Module) -> bool:
    """Check whether a module chains only Linear layers, encodings and elementwise functions."""
    return isinstance(module, nn.Sequential) and all(isinstance(layer, CHAINED) for layer in module)
