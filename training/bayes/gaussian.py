"""Gaussians over weights: factorial (Bayes by Backprop), and matrix-variate."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from training.bayes.layers import Slot, Stochastic
from training.bayes.posterior import METHODS, Method, Posterior, log_normal
from training.sections import LogStd, Positive, Section

if TYPE_CHECKING:
    from training.networks.networks import DrawnNetwork

LEAST_EXPONENT = -20.0


@dataclass(frozen=True)
class GaussianPrior:
    """N(0, std^2 I)."""

    std: float
    has_analytic_kl = True

    def log_density(self, theta: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return -0.5 * (theta / self.std).square() - math.log(self.std * math.sqrt(2 * math.pi))

    def kl(
        self, theta: Float[Tensor, "K D"], mu: Float[Tensor, "D"], sigma: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        """Return KL(N(mu, sigma^2) || p), the same for each draw."""
        ratio = (sigma / self.std).square()
        kl = 0.5 * (ratio + (mu / self.std).square() - 1.0 - ratio.log()).sum()
        return kl.expand(len(theta))


@dataclass(frozen=True)
class ScaleMixturePrior:
    """pi N(0, std_1^2) + (1 - pi) N(0, std_2^2) for each weight (Blundell et al. 2015, equation
    7)."""

    pi: float
    std_1: float
    std_2: float
    has_analytic_kl = False

    def log_density(self, theta: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return the log density of each weight: that of the wider part, and how much the narrower
        adds to it."""
        parts = sorted(((self.std_1, self.pi), (self.std_2, 1.0 - self.pi)), reverse=True)
        (wide, of_wide), (narrow, of_narrow) = parts
        first = math.log(of_wide / (wide * math.sqrt(2 * math.pi)))
        offset = math.log(of_narrow * wide / (of_wide * narrow))
        square = theta.square()
        exponent = offset - 0.5 * (narrow**-2 - wide**-2) * square
        # Less than this adds nothing; its exponential is a denormal number, which takes ten times
        # as long.
        added = functional.softplus(exponent.clamp(min=LEAST_EXPONENT))
        return first - 0.5 * wide**-2 * square + added

    def kl(
        self, theta: Float[Tensor, "K D"], mu: Float[Tensor, "D"], sigma: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        """Return log q(theta) - log p(theta) of each draw.

        Of theta = mu + sigma eps, log q is that of eps less log sigma: no gradient passes through
        the quotient.
        """
        eps = ((theta - mu) / sigma).detach()
        log_q = -0.5 * eps.square().sum(-1) - (sigma.log() + 0.5 * math.log(2 * math.pi)).sum()
        return log_q - self.log_density(theta).sum(-1)


class GaussianPosterior(Posterior):
    """theta = mu + softplus(rho) eps (Blundell et al. 2015, "Weight uncertainty in neural
    networks", section 3.2)."""

    def __init__(
        self, dimension: int, initial_log_std: float, prior: GaussianPrior | ScaleMixturePrior
    ) -> None:
        super().__init__()
        self.noise_dimension = dimension
        self.theta_dimension = dimension
        self.prior = prior
        self.trains_without_noise = prior.has_analytic_kl
        self.mu = nn.Parameter(torch.zeros(dimension))
        rho = math.log(math.expm1(math.exp(initial_log_std)))
        self.rho = nn.Parameter(torch.full((dimension,), rho))

    @property
    def sigma(self) -> Float[Tensor, "D"]:
        return functional.softplus(self.rho)

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return self.mu + self.sigma * eps

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        sigma = self.sigma
        theta = self.mu + sigma * eps
        return theta, self.prior.kl(theta, self.mu, sigma)

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        return self.mu, self.sigma

    def divergence(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K"]:
        sigma = self.sigma
        theta = self.mu.expand(len(eps), -1) if self.trains_without_noise else self.mu + sigma * eps
        return self.prior.kl(theta, self.mu, sigma)

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.rho]

    def location(self) -> Float[Tensor, "D"]:
        return self.mu

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        return self.prior.log_density(theta).sum(-1)

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        return self.mu.detach().clone()

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        self.mu.copy_(theta)


class MatrixNormalPosterior(Posterior):
    """W = M + A^1/2 E B^1/2 for each layer, A and B diagonal (Louizos and Welling 2016, section
    3.1).

    A layer's biases are the last row of its W. The prior is MVN(0, prior_std^2 I, I).
    """

    trains_without_noise = True

    def __init__(self, slots: Sequence[Slot], initial_log_std: float, prior_std: float) -> None:
        super().__init__()
        shapes = [slot.shape for slot in slots]
        self.noise_dimension = self.theta_dimension = sum(slot.size for slot in slots)
        self.prior_std = prior_std
        self.means = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        # of standard deviations: half the logarithms of A and B
        rows = (torch.full((rows,), initial_log_std) for rows, _ in shapes)
        self.log_rows = nn.ParameterList(rows)
        self.log_columns = nn.ParameterList(torch.zeros(columns) for _, columns in shapes)

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        parts = eps.split([mean.numel() for mean in self.means], dim=1)
        drawn = [
            (mean + std * part.unflatten(1, mean.shape)).flatten(1)
            for part, mean, std in zip(parts, self.means, self._stds(), strict=True)
        ]
        return torch.cat(drawn, dim=1)

    def _stds(self) -> Iterator[Float[Tensor, "i o"]]:
        for log_row, log_column in zip(self.log_rows, self.log_columns, strict=True):
            yield torch.exp(log_row)[:, None] * torch.exp(log_column)

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        return self(eps), self.kl().expand(len(eps))

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        return self.location(), torch.cat([std.flatten() for std in self._stds()])

    def divergence(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K"]:
        return self.kl().expand(len(eps))

    def spread_parameters(self) -> list[nn.Parameter]:
        return [*self.log_rows, *self.log_columns]

    def location(self) -> Float[Tensor, "D"]:
        return torch.cat([mean.flatten() for mean in self.means])

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        return log_normal(theta, self.prior_std)

    def kl(self) -> Float[Tensor, ""]:
        """Return KL(q || p) = 1/2 sum_l (tr A tr B + |M|^2) / s^2 - i o - o log |A| - i log |B| + i
        o log s^2."""
        total = self.means[0].new_zeros(())
        variance = self.prior_std**2
        for mean, log_row, log_column in zip(
            self.means, self.log_rows, self.log_columns, strict=True
        ):
            rows, columns = mean.shape
            trace = torch.exp(2 * log_row).sum() * torch.exp(2 * log_column).sum()
            log_det = 2 * columns * log_row.sum() + 2 * rows * log_column.sum()
            constant = mean.numel() * (torch.log(torch.tensor(variance)) - 1.0)
            total = total + 0.5 * ((trace + mean.square().sum()) / variance - log_det + constant)
        return total

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        return self.location()

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        parts = theta.split([mean.numel() for mean in self.means])
        for mean, part in zip(self.means, parts, strict=True):
            mean.copy_(part.view_as(mean))


class GaussianSection(Section):
    """`[posterior]` of bbb-gaussian and mvn."""

    initial_log_std: LogStd = -5.0
    prior_std: Positive = 1.0


class MixtureSection(Section):
    """`[posterior]` of bbb-mixture."""

    initial_log_std: LogStd = -5.0
    pi: Annotated[float, Field(gt=0, lt=1)] = 0.5
    std_1: Positive = 1.0
    std_2: Positive = 0.0025


def by_backprop(
    section: GaussianSection | MixtureSection, network: "DrawnNetwork", _: torch.Generator
) -> GaussianPosterior:
    prior: GaussianPrior | ScaleMixturePrior
    if isinstance(section, GaussianSection):
        prior = GaussianPrior(section.prior_std)
    else:
        prior = ScaleMixturePrior(section.pi, section.std_1, section.std_2)
    return GaussianPosterior(network.theta_dimension, section.initial_log_std, prior)


for name, kind in (("gaussian", GaussianSection), ("mixture", MixtureSection)):
    METHODS[f"bbb-{name}"] = Method(
        kind,
        by_backprop,
        lambda _: Stochastic("weights"),
        is_variational=True,
        ramps_kl=True,
        samples=2,
    )
METHODS["mvn"] = Method(
    GaussianSection,
    lambda section, network, _: MatrixNormalPosterior(
        network.slots, section.initial_log_std, section.prior_std
    ),
    lambda _: Stochastic("weights"),
    is_variational=True,
    ramps_kl=True,
    samples=2,
)
