"""Stochastic replacements for Linear, Conv1d and Conv2d layers.

Axes: K draws and N rows. P is 1 if all rows share their draws, and N if draws differ by row (a
paired theta). Draws are folded into the batch. After the first layer that reads theta, the batch
has K N rows ordered by draw, so a module's forward needs no axis for draws. Layers before it have
`shared` inputs of N rows.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

Convolution = nn.Conv1d | nn.Conv2d
Drawable = nn.Linear | nn.Conv1d | nn.Conv2d
DRAWABLE = (nn.Linear, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Stochastic:
    """A selection of layers to randomise, with the kind of random parameters to use."""

    kind: Literal["scales", "weights", "masks", "hypernet"]
    layers: Sequence[str] | None = None  # name patterns; None for all
    rate: float = 0.5  # masks: before layers without a preceding Dropout
    input_rate: float = 0.0  # masks: before the first layer
    hidden: int = 50  # hypernet: units of the inference network

    initial_log_std: float = -4.0  # hypernet


@dataclass(frozen=True)
class Slot:
    """The part of theta that belongs to one layer.

    The shape is (units,) for scales and masks, and (inputs, outputs) for weights. A bias is the
    last input.
    """

    name: str
    shape: tuple[int, ...]
    keep: float = 1.0  # probability that a mask is 1

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass
class ForwardContext:
    """The state that a network's layers share during a forward pass."""

    theta: dict[str, Tensor] = field(default_factory=dict)  # by layer, shape (K, P, slot size)
    # By layer, shape (slot size). If set, theta is the mean of the weights.
    variance: dict[str, Tensor] | None = None
    num_draws: int = 1
    kl: Tensor | None = None  # from layers whose posterior depends on their input
    start: dict[str, Tensor] | None = None  # scales by layer, filled during initialisation
    trial_rows: int = 0  # N in the trial that detects shared inputs, otherwise 0

    def clear(self) -> None:
        self.theta, self.variance, self.kl, self.start = {}, None, None, None
        self.num_draws = 1  # an export leaves a symbolic number, which cannot be copied


@dataclass(eq=False)
class LayerContext:
    """The position of a layer's parameters in theta, and the layout of its input."""

    slot: Slot
    forward: ForwardContext
    folded: bool  # if false, the input has an axis for draws, (K, N, units)
    shared: bool = False  # all draws share the layer's input

    def theta(self) -> Tensor:
        return self.forward.theta[self.slot.name]

    def weight(self) -> Tensor:
        return self.theta().squeeze(1).unflatten(-1, self.slot.shape)

    def detect_shared_input(self, h: Tensor) -> None:
        """In a trial run, detect whether all draws share the layer's input."""
        if self.forward.trial_rows:
            self.shared = len(h) == self.forward.trial_rows

    def by_draw(self, h: Tensor) -> Tensor:
        """Reshape a batch to (K, N, ...), unless all draws share it."""
        is_batch = self.folded and not self.shared
        return h.unflatten(0, (self.forward.num_draws, -1)) if is_batch else h

    def repeated(self, value: Tensor) -> Tensor:
        """Repeat a batch for each draw if all draws share it."""
        if not self.shared:
            return value
        num_draws = self.forward.num_draws
        return self.batch(value.expand(num_draws, *value.shape[0 if self.folded else 1 :]))

    def batch(self, h: Tensor) -> Tensor:
        return h.flatten(0, 1) if self.folded else h


class RandomLayer(nn.Module):
    """The base class for layers whose weights depend on theta."""

    context: LayerContext


class ScaledLayer(RandomLayer):
    """A layer with random scales: g_u (x . V_u / |V_u|) + b_u.

    Directions V and biases b are parameters (Krueger et al. 2017, equation 7 and appendix B). All
    draws share the product x . V.
    """

    def __init__(self, layer: Drawable, context: LayerContext, is_trained: bool = False) -> None:
        super().__init__()
        if is_trained:
            direction = layer.weight.detach().clone()
        else:
            direction = torch.randn(layer.weight.shape) / layer.weight[0].numel() ** 0.5
        self.direction = nn.Parameter(direction)
        self.bias = nn.Parameter(torch.zeros(len(layer.weight)))
        if is_trained and layer.bias is not None:
            self.bias.data.copy_(layer.bias.detach())
        self.convolution = _weightless_convolution(layer)
        self.context = context

    def forward(self, h: Tensor) -> Tensor:
        self.context.detect_shared_input(h)
        if self.convolution is None:
            product, norm = product_and_norm(h, self.direction)
        else:
            product = self.convolution._conv_forward(h, self.direction, None)
            norm = self.lengths()
        if self.context.forward.start is not None:
            return self._start(product, norm)
        scale = self._along(self.context.theta() / norm, h)
        return self.context.batch(self.context.by_draw(product) * scale + self._along(self.bias, h))

    def _along(self, units: Tensor, h: Tensor) -> Tensor:
        if self.convolution is not None:
            return units[(..., *[None] * len(self.convolution.kernel_size))]
        return units[(..., *[None] * (h.ndim - 2), slice(None))] if self.context.folded else units

    def _start(self, product: Tensor, norm: Tensor) -> Tensor:
        axis = product.ndim - 1 if self.convolution is None else 1
        product = product.movedim(axis, -1) / norm
        std, mean = torch.std_mean(product.flatten(0, -2), dim=0)
        std = std.clamp(min=1e-6)
        self.bias.data.copy_(-mean / std)
        assert self.context.forward.start is not None
        self.context.forward.start[self.context.slot.name] = 1.0 / std
        return (product / std + self.bias).movedim(-1, axis)

    def lengths(self) -> Float[Tensor, "U"]:
        """Compute |V_u|, the scales at which the layer's weights equal its directions."""
        return torch.linalg.vector_norm(self.direction.flatten(1), dim=1)

    @torch.no_grad()
    def fold(self) -> None:
        """Normalise the directions without changing the layer's output."""
        self.direction.div_(self.lengths().view(-1, *[1] * (self.direction.ndim - 1)))


def pairs(half: Tensor, count: int) -> Tensor:
    """Build antithetic noise, whose second half is the negated first half."""
    return torch.cat([half, -half])[:count]


def randn_in_pairs(like: Float[Tensor, "B ..."], num_draws: int) -> Float[Tensor, "B ..."]:
    """Sample antithetic noise in the shape of `like`, whose first axis has length K or K N."""
    half = len(like) // num_draws * -(-num_draws // 2)
    return pairs(torch.randn_like(like[:half]), len(like))


def seed_layers(seed: int, device: torch.device) -> None:
    """Seed the random noise that layers draw.

    `torch.manual_seed` also tries to seed missing accelerators, which is slow.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def product_and_norm(x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Compute x . V_u and |V_u| for each unit, with a fast gradient.

    Shapes: x (*batch, in) and V (out, in) give (*batch, out) and (out,). A weight-normalised unit
    computes g x . V / |V| + b (Salimans and Kingma 2016). Scaling the product instead of V saves a
    pass over V. The gradient of |V| is V / |V|, so the gradient of V is a matrix product plus a
    multiple of V.
    """
    if torch.compiler.is_exporting():
        return functional.linear(x, direction), torch.linalg.vector_norm(direction, dim=1)
    product, norm = _ProductAndNorm.apply(x, direction)  # type: ignore[no-untyped-call]
    return product, norm


class _ProductAndNorm(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        return functional.linear(x, direction), torch.linalg.vector_norm(direction, dim=1)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]
    ) -> None:
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(
        ctx: Any, product_grad: Tensor, norm_grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        x, direction, norm = ctx.saved_tensors
        x_grad = direction_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = product_grad @ direction
        if ctx.needs_input_grad[1]:
            multiple = direction * (norm_grad / norm.clamp(min=1e-12))[:, None]
            direction_grad = multiple.addmm_(
                product_grad.reshape(-1, len(norm)).T, x.reshape(-1, x.shape[-1])
            )
        return x_grad, direction_grad


class WeightLayer(RandomLayer):
    """A layer with random weights, h W + b.

    A draw of theta is W with b as its last row. A convolution is computed as a product of patches
    and W, because ONNX has no convolution with different kernels for each draw. After pruning, a
    draw consists of the remaining weights and the biases.

    For independent Gaussian weights W ~ N(M, S^2), training samples outputs from N(h M, h^2 S^2)
    instead of weights. This reduces the variance of gradients (Kingma et al. 2015, "Variational
    dropout and the local reparameterization trick", section 2.2).
    """

    index: Tensor | None

    def __init__(self, layer: Drawable, context: LayerContext) -> None:
        super().__init__()
        self.convolution = _weightless_convolution(layer)
        self.has_bias = layer.bias is not None
        self.context = context
        inputs, outputs = context.slot.shape
        self.shape = (inputs - self.has_bias, outputs)  # of the matrix without biases
        self.register_buffer("index", None, persistent=False)

    def keep(self, mask: Tensor) -> None:
        """Randomise all biases, but only the weights selected by `mask` (inputs, outputs)."""
        self.shape = (mask.shape[0], mask.shape[1])
        self.index = mask.flatten().nonzero()[:, 0].int()
        numbers = len(self.index) + self.has_bias * self.shape[1]
        self.context.slot = Slot(self.context.slot.name, (numbers,))

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight matrices (K, inputs, outputs) and biases (K, 1, outputs)."""
        return self._split_bias(self.matrix(self.context.theta().squeeze(1)))

    def matrix(self, theta: Tensor) -> Tensor:
        """Convert draws (*batch, numbers) to weight matrices, with any bias as the last row."""
        shape = (self.shape[0] + self.has_bias, self.shape[1])
        if self.index is None:
            return theta.unflatten(-1, shape)
        # Biases follow the weights, at the end of the matrix.
        ends = torch.arange(math.prod(self.shape), math.prod(shape), device=theta.device)
        index = torch.cat([self.index.long(), ends]).expand_as(theta)
        zeros = theta.new_zeros(*theta.shape[:-1], math.prod(shape))
        return zeros.scatter(-1, index, theta).unflatten(-1, shape)

    def _split_bias(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Split off the bias row. The gradient is faster than with slicing."""
        if not self.has_bias:
            return matrix, None
        weight, bias = matrix.split([self.shape[0], 1], dim=1)
        return weight, bias

    def forward(self, h: Tensor) -> Tensor:
        self.context.detect_shared_input(h)
        variance = self.context.forward.variance
        if variance is not None:
            matrix = variance[self.context.slot.name].view(1, *self.context.slot.shape)
            return self._sample_value(h, self.matrix(self.context.theta().squeeze(1)), matrix)
        return self._value(h, *self.weights())

    def _sample_value(self, h: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """Sample values given the moments of the weights, with any bias as the last row."""
        if self.convolution is None and self.has_bias:
            h = functional.pad(h, (0, 1), value=1.0)  # faster than splitting off the bias
            value, square = self._value(h, mean, None), self._value(h.square(), variance, None)
        else:
            value = self._value(h, *self._split_bias(mean))
            square = self._value(h.square(), *self._split_bias(variance))
        value, std = self.context.repeated(value), self.context.repeated((square + 1e-12).sqrt())
        return value + std * randn_in_pairs(value, self.context.forward.num_draws)

    def _value(self, h: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        if self.convolution is not None and not torch.compiler.is_exporting() and len(matrix) == 1:
            return self._convolve(h, matrix[0], None if bias is None else bias[0, 0])
        shape: tuple[int, ...] = ()
        groups = offsets = 1
        if self.convolution is not None:
            h, shape = patches(h, self.convolution)
            groups, offsets = self.convolution.groups, math.prod(self.convolution.kernel_size)
        elif self.context.folded and h.ndim > 2:
            h, shape = h.flatten(1, -2), tuple(h.shape[1:-1])
        # (N M, inputs) or (K, N M, inputs), where a row has M patches or vectors
        h = self.context.by_draw(h)
        rows = h.flatten(-3, -2) if shape else h
        if groups == 1:
            value = matmul(rows, matrix)
        else:
            value = grouped_matmul(rows, matrix, groups, offsets)
        value = value if bias is None else value + bias
        value = self.context.batch(value.unflatten(1, (-1, *shape)) if shape else value)
        return value if self.convolution is None else value.movedim(-1, 1)

    def _convolve(self, h: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        assert self.convolution is not None
        size = self.convolution.kernel_size
        kernel = matrix.unflatten(0, (*size, -1)).movedim((-1, -2), (0, 1))
        value: Tensor = self.convolution._conv_forward(h, kernel, bias)
        return value


def matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply matrices so that results in onnxruntime do not depend on the number of rows.

    With a single column, onnxruntime's summation order depends on that number. The column is
    therefore duplicated.
    """
    if matrix.shape[-1] > 1:
        return torch.matmul(rows, matrix)
    return torch.matmul(rows, torch.cat([matrix, matrix], dim=-1))[..., :1]


def grouped_matmul(rows: Tensor, matrix: Tensor, groups: int, offsets: int) -> Tensor:
    """Multiply patches by a grouped convolution's weight matrices.

    Patches are (..., N, offsets * channels), and matrices (K, offsets * channels / groups,
    outputs). Both are ordered by offset.
    """
    # (..., G, N, inputs) and (K, G, inputs, outputs of a group)
    by_group = rows.unflatten(-1, (offsets, groups, -1)).movedim(-2, -4).flatten(-2)
    parts = matrix.unflatten(-1, (groups, -1)).movedim(-2, -3)
    return matmul(by_group, parts).movedim(-3, -2).flatten(-2)


def initial_weights(layer: Drawable) -> Tensor:
    """Return a layer's weights as a `WeightLayer` matrix, with any bias as the last row."""
    weight = layer.weight.detach()
    # `patches` has the same order: by offset, then by channel.
    is_linear = isinstance(layer, nn.Linear)
    matrix = weight.T if is_linear else weight.movedim((0, 1), (-1, -2)).flatten(0, -2)
    return matrix if layer.bias is None else torch.cat([matrix, layer.bias.detach()[None]])


def patches(h: Tensor, convolution: Convolution) -> tuple[Tensor, tuple[int, ...]]:
    """Return a convolution's patches (B, positions, offsets * channels) and its output size."""
    padding, mode = convolution._reversed_padding_repeated_twice, convolution.padding_mode
    if any(padding):
        h = functional.pad(h, padding, "constant" if mode == "zeros" else mode)
    axes = range(len(convolution.kernel_size))
    reaches = [convolution.dilation[axis] * (convolution.kernel_size[axis] - 1) for axis in axes]
    shape = tuple(
        (h.shape[2 + axis] - reaches[axis] - 1) // convolution.stride[axis] + 1 for axis in axes
    )
    parts = []
    for offset in itertools.product(*(range(size) for size in convolution.kernel_size)):
        window = [slice(None), slice(None)]
        for axis in axes:
            start, stride = offset[axis] * convolution.dilation[axis], convolution.stride[axis]
            window.append(slice(start, start + (shape[axis] - 1) * stride + 1, stride))
        parts.append(h[tuple(window)])
    return torch.cat(parts, dim=1).flatten(2).transpose(1, 2), shape


class MaskLayer(nn.Module):
    """A layer that multiplies its units or channels by a random mask.

    The mask applies to the last axis if `on_last_axis`, otherwise to the axis after the batch.
    """

    def __init__(self, context: LayerContext, on_last_axis: bool = False) -> None:
        super().__init__()
        self.context = context
        self.on_last_axis = on_last_axis

    def forward(self, h: Tensor) -> Tensor:
        self.context.detect_shared_input(h)
        mask, h = self.context.theta(), self.context.by_draw(h)
        middle = [None] * (h.ndim - (2 if self.context.shared else 3))
        along = (..., *middle, slice(None)) if self.on_last_axis else (..., *middle)
        return self.context.batch(h * mask[along])


def _weightless_convolution(layer: Drawable) -> Convolution | None:
    if isinstance(layer, nn.Linear):
        return None
    convolution = copy.deepcopy(layer).to("meta")
    convolution.weight = convolution.bias = None  # type: ignore[assignment]
    return convolution
