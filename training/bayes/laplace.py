"""Laplace's approximation: a Gaussian around trained weights, whose covariance comes from the
curvature there.

theta ~ N(mean, (H + I / prior_std^2)^-1), where H is the generalised Gauss-Newton matrix of the
training rows' negative log-likelihood (MacKay 1992, "A practical Bayesian framework for
backpropagation networks"; Daxberger et al. 2021, "Laplace redux"). Training moves the mean alone;
`training.fitting.laplace` then finds the rest. A spread is a module, one for each structure of H
and each layer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Float64
from pydantic import field_validator
from torch import Tensor, nn

from model_store.errors import InvalidInput
from training.bayes.layers import Slot, Stochastic, WeightLayer
from training.bayes.posterior import METHODS, Method, Posterior
from training.sections import Section

if TYPE_CHECKING:
    from training.networks.networks import DrawnNetwork

Structure = Literal["full", "kronecker", "diagonal"]
CHOICES = ("auto", "marginal-likelihood", "held-out")  # of the prior's standard deviation, by data
# weights: their matrix in float64 takes 1 GB, finding its eigenvectors three times that
MOST_FULL = 11_000


@dataclass(frozen=True, eq=False)
class Eigen:
    """A layer's H in its eigenbasis: eigenvalues, laid out as the spread's noise is, and
    eigenvectors as columns."""

    values: Float64[Tensor, "..."]
    vectors: tuple[Float64[Tensor, "..."], ...] = ()

    def std(self, precision: float) -> Float64[Tensor, "..."]:
        """Return the posterior's standard deviation along each eigenvector, (lambda +
        precision)^-1/2."""
        return (self.values + precision).rsqrt()


class Diagonal(nn.Module):
    """Independent weights: std eps."""

    std: Tensor

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.register_buffer("std", torch.zeros(slot.shape))

    def forward(self, eps: Float[Tensor, "K D"]) -> Float[Tensor, "K D"]:
        return self.std.flatten() * eps

    def widen(self, eigen: Eigen, precision: float) -> None:
        self.std.copy_(eigen.std(precision))


class Full(nn.Module):
    """Any covariance, R' R: eps R."""

    root: Tensor

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        if slot.size > MOST_FULL:
            expected = f"kronecker or diagonal for {slot.size} weights (full: up to {MOST_FULL})"
            got = f"'full' of layer {slot.name}: {8 * slot.size**2 / 1e9:.3g} GB for its matrix"
            raise InvalidInput("posterior.structure", expected, got)
        self.register_buffer("root", torch.zeros(slot.size, slot.size))

    def forward(self, eps: Float[Tensor, "K D"]) -> Float[Tensor, "K D"]:
        return eps @ self.root

    def widen(self, eigen: Eigen, precision: float) -> None:
        (vectors,) = eigen.vectors
        self.root.copy_(eigen.std(precision)[:, None] * vectors.T)


class Kronecker(nn.Module):
    """H = A x B of inputs and outputs: U_A (S . E) U_B', S_io = (a_i b_o + precision)^-1/2.

    A and B are those of Ritter, Botev and Barber (2018), "A scalable Laplace approximation for
    neural networks". The prior is added in the eigenbasis of A x B, not to the factors, which would
    add products of them and it. A convolution has a pair of factors for each of its groups, whose
    outputs are concatenated.
    """

    of_inputs: Tensor
    of_outputs: Tensor
    std: Tensor

    def __init__(self, slot: Slot, groups: int) -> None:
        super().__init__()
        self.shape = slot.shape
        inputs, outputs = slot.shape[0], slot.shape[1] // groups
        self.groups = groups
        # eigenvectors as rows: what draws are multiplied with from the right
        self.register_buffer("of_inputs", torch.eye(inputs).repeat(groups, 1, 1))
        self.register_buffer("of_outputs", torch.eye(outputs).repeat(groups, 1, 1))
        self.register_buffer("std", torch.zeros(slot.shape))

    def forward(self, eps: Float[Tensor, "K D"]) -> Float[Tensor, "K D"]:
        scaled = eps.unflatten(1, self.shape) * self.std
        if self.groups == 1:
            rotated = _times(scaled, self.of_outputs[0]).transpose(1, 2)
            return _times(rotated, self.of_inputs[0]).mT.flatten(1)
        by_group = scaled.unflatten(2, (self.groups, -1)).transpose(1, 2)  # (K, G, inputs, outputs)
        rotated = _times(_times(by_group, self.of_outputs).mT, self.of_inputs)
        return rotated.flatten(1, 2).mT.flatten(1)

    def widen(self, eigen: Eigen, precision: float) -> None:
        of_inputs, of_outputs = eigen.vectors
        self.of_inputs.copy_(of_inputs.mT)
        self.of_outputs.copy_(of_outputs.mT)
        self.std.copy_(eigen.std(precision))


class LaplacePosterior(Posterior):
    """theta = mean + spread(eps); before the curvature is known, every draw is the mean.

    While the mean is fitted, its KL is -log p(mean), up to a constant: the loss is then that of the
    maximum a posteriori, or of maximum likelihood where the prior is chosen after it.
    """

    trains_without_noise = True

    def __init__(
        self,
        slots: Sequence[Slot],
        groups: Sequence[int],
        structure: Structure,
        prior_std: float | None,  # None where it will be chosen by the data
    ) -> None:
        super().__init__()
        self.sizes = [slot.size for slot in slots]
        self.noise_dimension = self.theta_dimension = sum(self.sizes)
        self.structure: Structure = structure
        self.prior_std = prior_std
        self.mean = nn.Parameter(torch.zeros(self.theta_dimension))
        made: Sequence[Diagonal | Full | Kronecker]
        if structure == "full":
            made = [Full(slot) for slot in slots]
        elif structure == "kronecker":
            made = [Kronecker(slot, count) for slot, count in zip(slots, groups, strict=True)]
        else:
            made = [Diagonal(slot) for slot in slots]
        self.spreads = nn.ModuleList(made)

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        parts = zip(self.spreads, eps.split(self.sizes, dim=1), strict=True)
        return self.mean + torch.cat([spread(part) for spread, part in parts], dim=1)

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        decay = self.mean.new_zeros(())
        if self.prior_std:
            decay = self.mean.square().sum() / (2.0 * self.prior_std**2)
        return self.mean.expand(len(eps), -1), decay.expand(len(eps))

    @torch.no_grad()
    def widen(self, eigens: Sequence[Eigen], precision: float) -> None:
        for spread, eigen in zip(self.spreads, eigens, strict=True):
            assert isinstance(spread, Diagonal | Full | Kronecker)
            spread.widen(eigen, precision)

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        return self.mean.detach().clone()

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        self.mean.copy_(theta)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows times eigenvectors: a lone one is 1 or -1, which is all the same to noise."""
    return rows if matrix.shape[-1] == 1 else rows @ matrix


class LaplaceSection(Section):
    """`[posterior]` of laplace."""

    structure: Structure = "kronecker"
    prior_std: float | Literal["auto", "marginal-likelihood", "held-out"] = "auto"

    @field_validator("prior_std", mode="before")
    @classmethod
    def _is_a_number_or_says_how(cls, value: Any) -> Any:
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if value in CHOICES or (is_number and 0 < value < math.inf):
            return value
        raise ValueError("a number above 0, 'auto', 'marginal-likelihood' or 'held-out'")


def laplace(
    section: LaplaceSection, network: "DrawnNetwork", _: torch.Generator
) -> LaplacePosterior:
    """Return the posterior of a network's drawn layers."""
    names = [slot.name for slot in network.slots]
    if section.structure == "full" and names != [network.output_layer]:
        expected = "kronecker or diagonal, or a last layer alone whose values are the outputs"
        raise InvalidInput("posterior.structure", expected, f"'full' of {', '.join(names)}")
    groups = [layer.groups for layer in network.layers_of(WeightLayer)]
    prior_std = section.prior_std if isinstance(section.prior_std, float | int) else None
    return LaplacePosterior(network.slots, groups, section.structure, prior_std)


METHODS["laplace"] = Method(
    LaplaceSection,
    laplace,
    lambda _: Stochastic("weights"),
    draws_last_layer=True,
    is_fitted_after=True,
)
