"""Normalizing flows that map noise to parameters.

A transform maps z of shape (..., D) to (z', log |det dz'/dz|) with shapes (..., D) and (...). The
inverse is not needed, because variational inference evaluates the density of samples only (Krueger
et al. 2017, "Bayesian hypernetworks", equation 6):

    log q(theta) = log N(eps; 0, I) - log |det dtheta/deps|

Couplings can also propagate the score s = d log q(z)/dz without the flow's inverse. With J =
dz'/dz, the next score is J^-T (s - d log |det J|/dz) (Vaitl et al. 2024, "Fast and unified path
gradient estimators for normalizing flows", arXiv 2403.15881).
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from training.bayes.layers import product_and_norm

LOG_SCALE_BOUND = 2.0  # a coupling scales a coordinate by up to e^2
NEAR_IDENTITY = 0.01  # initial weight-norm scale of a conditioner's output layer


class WeightNormLinear(nn.Module):
    """A linear layer with weight g V / |V| (Salimans and Kingma 2016).

    A mask of shape (out, in) is applied to V before normalisation.
    """

    mask: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        generator: torch.Generator,
        scale: float,
        mask: Tensor | None = None,
    ) -> None:
        super().__init__()
        direction = torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)
        self.direction = nn.Parameter(direction)
        self.scale = nn.Parameter(torch.full((outputs,), scale))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.register_buffer("mask", mask, persistent=False)
        self.folded = False

    def forward(self, x: Float[Tensor, "*batch in"]) -> Float[Tensor, "*batch out"]:
        if self.folded:
            return functional.linear(x, self.direction, self.bias)
        product, norm = product_and_norm(x, self._masked())
        # If the mask removes all inputs of a unit, V is 0 and the unit returns its bias.
        return product * (self.scale / norm.clamp(min=1e-12)) + self.bias

    @torch.no_grad()
    def fold(self) -> None:
        """Store the normalised weight in V so that it is not recomputed."""
        direction = self._masked()
        norm = torch.linalg.vector_norm(direction, dim=1).clamp(min=1e-12)
        self.direction.copy_(direction * (self.scale / norm)[:, None])
        self.scale.copy_(torch.linalg.vector_norm(self.direction, dim=1))
        self.folded = True

    def _masked(self) -> Float[Tensor, "out in"]:
        return self.direction if self.mask is None else self.direction * self.mask


class Conditioner(nn.Module):
    """An MLP with one hidden layer that computes the shifts and log-scales of a flow step."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: int,
        generator: torch.Generator,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__()
        into, out = masks or (None, None)
        out = None if out is None else out.repeat(2, 1)
        self.hidden = WeightNormLinear(inputs, hidden, generator, 1.0, into)
        self.output = WeightNormLinear(hidden, 2 * outputs, generator, NEAR_IDENTITY, out)

    def forward(
        self, z: Float[Tensor, "*batch in"]
    ) -> tuple[Float[Tensor, "*batch out"], Float[Tensor, "*batch out"]]:
        """Compute shifts, and log-scales that tanh bounds to +-`LOG_SCALE_BOUND`."""
        shift, log_scale = self.output(torch.relu(self.hidden(z))).chunk(2, dim=-1)
        return shift, LOG_SCALE_BOUND * torch.tanh(log_scale * (1.0 / LOG_SCALE_BOUND))


Halves = tuple[Tensor, Tensor]  # (*batch, middle) and (*batch, D - middle)


class Coupling(nn.Module):
    """An affine coupling (Dinh et al. 2016, "Density estimation using Real NVP", equations 7-8).

    The first half of the coordinates stays fixed and determines the scale and shift of the second
    half. If `flipped` is true, the halves swap roles.
    """

    def __init__(
        self, dimension: int, hidden: int, generator: torch.Generator, flipped: bool = False
    ) -> None:
        super().__init__()
        self.flipped = flipped
        sizes = dimension // 2, dimension - dimension // 2
        fixed, moving = reversed(sizes) if flipped else sizes
        self.conditioner = Conditioner(fixed, moving, hidden, generator)

    def forward(self, z: Halves) -> tuple[Halves, Float[Tensor, "*batch"]]:
        fixed, moving = self._in_order(z)
        shift, log_scale = self.conditioner(fixed)
        moving = moving * torch.exp(log_scale) + shift
        return self._in_order((fixed, moving)), log_scale.sum(-1)

    def with_score(
        self, z: Halves, score: Halves
    ) -> tuple[Halves, Float[Tensor, "*batch"], Halves]:
        fixed, moving = self._in_order(z)
        score_fixed, score_moving = self._in_order(score)
        shift, log_scale = self.conditioner(fixed)
        moving = moving * torch.exp(log_scale) + shift
        score_moving = score_moving * torch.exp(-log_scale.detach())
        through = log_scale.sum() + (moving * score_moving).sum()
        (gradient,) = torch.autograd.grad(through, fixed, retain_graph=True)
        score = self._in_order((score_fixed - gradient, score_moving))
        return self._in_order((fixed, moving)), log_scale.sum(-1), score

    def _in_order(self, halves: Halves) -> Halves:
        return halves[::-1] if self.flipped else halves


class Autoregressive(nn.Module):
    """An inverse autoregressive flow step, z' = mean + std z (Kingma et al. 2016, equation 10).

    Mean and std of coordinate i depend only on coordinates before i, by MADE's masks (Germain et
    al. 2015, equations 8 and 9). The degrees of hidden units are spread evenly from D - 1 to 1. If
    `flipped` is true, the order of coordinates is reversed.
    """

    def __init__(
        self, dimension: int, hidden: int, generator: torch.Generator, flipped: bool = False
    ) -> None:
        super().__init__()
        degree_in = torch.arange(1, dimension + 1)
        degree_in = degree_in.flip(0) if flipped else degree_in
        highest = max(dimension - 1, 1)
        degree_hidden = highest - torch.arange(hidden) * (highest - 1) // max(hidden - 1, 1)
        into = (degree_hidden[:, None] >= degree_in[None, :]).float()
        out = (degree_in[:, None] > degree_hidden[None, :]).float()
        self.conditioner = Conditioner(dimension, dimension, hidden, generator, (into, out))

    def forward(
        self, z: Float[Tensor, "*batch D"]
    ) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch"]]:
        mean, log_std = self.conditioner(z)
        return mean + torch.exp(log_std) * z, log_std.sum(-1)


class ElementwiseAffine(nn.Module):
    """An elementwise affine transform, z' = shift + exp(log_scale) z."""

    def __init__(self, dimension: int, log_scale: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(dimension))
        self.log_scale = nn.Parameter(torch.full((dimension,), float(log_scale)))

    def forward(
        self, z: Float[Tensor, "*batch D"]
    ) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch"]]:
        return self.shift + torch.exp(self.log_scale) * z, self.log_scale.sum().expand(z.shape[:-1])


class Composition(nn.Module):
    """A sequence of flow steps, followed by an elementwise affine transform."""

    def __init__(self, steps: Sequence[nn.Module], affine: ElementwiseAffine) -> None:
        super().__init__()
        self.steps = nn.ModuleList(steps)
        self.affine = affine

    def forward(
        self, z: Float[Tensor, "*batch D"]
    ) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch"]]:
        log_det = z.new_zeros(z.shape[:-1])
        moving = _halves(z) if any(isinstance(step, Coupling) for step in self.steps) else z
        for step in self.steps:
            moving, step_log_det = step(moving)
            log_det = log_det + step_log_det
        z = torch.cat(moving, dim=-1) if isinstance(moving, tuple) else moving
        theta, affine_log_det = self.affine(z)
        return theta, log_det + affine_log_det

    def with_score(
        self, eps: Float[Tensor, "*batch D"]
    ) -> tuple[Float[Tensor, "*batch D"], Float[Tensor, "*batch"], Float[Tensor, "*batch D"]]:
        """Map noise to theta, and compute the detached score d log q(theta)/dtheta.

        Steps must be couplings.
        """
        log_det = eps.new_zeros(eps.shape[:-1])
        z, score = _halves(eps.detach().requires_grad_()), _halves(-eps)
        for step in self.steps:
            assert isinstance(step, Coupling)
            z, step_log_det, score = step.with_score(z, score)
            log_det = log_det + step_log_det
        theta, affine_log_det = self.affine(torch.cat(z, dim=-1))
        theta_score = torch.cat(score, dim=-1) * torch.exp(-self.affine.log_scale)
        return theta, log_det + affine_log_det, theta_score.detach()


def _halves(z: Float[Tensor, "*batch D"]) -> Halves:
    middle = z.shape[-1] // 2
    return z[..., :middle], z[..., middle:]


def flow(
    kind: type[Coupling | Autoregressive],
    dimension: int,
    couplings: int,
    hidden: int,
    log_scale: float,
    generator: torch.Generator,
) -> Composition:
    """Build a normalizing flow.

    If there are no couplings, or only one dimension, it is a factorial Gaussian.
    """
    couplings = couplings if dimension > 1 else 0
    steps = [kind(dimension, hidden, generator, flipped=i % 2 == 1) for i in range(couplings)]
    return Composition(steps, ElementwiseAffine(dimension, log_scale))


realnvp = partial(flow, Coupling)
iaf = partial(flow, Autoregressive)
