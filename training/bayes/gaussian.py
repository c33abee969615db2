"""Factorial Gaussian posteriors over weights (Bayes by Backprop)."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from training.bayes.posterior import Posterior

MIN_EXPONENT = -20.0


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
        """Compute KL(N(mu, sigma^2) || p), which is the same for each draw."""
        ratio = (sigma / self.std).square()
        kl = 0.5 * (ratio + (mu / self.std).square() - 1.0 - ratio.log()).sum()
        return kl.expand(len(theta))


@dataclass(frozen=True)
class ScaleMixturePrior:
    """The prior pi N(0, std_1^2) + (1 - pi) N(0, std_2^2) (Blundell et al. 2015, equation 7)."""

    pi: float
    std_1: float
    std_2: float
    has_analytic_kl = False

    def log_density(self, theta: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute each weight's log prior density, log(wide) + softplus(log(narrow / wide))."""
        parts = sorted(((self.std_1, self.pi), (self.std_2, 1.0 - self.pi)), reverse=True)
        (wide, wide_share), (narrow, narrow_share) = parts
        first = math.log(wide_share / (wide * math.sqrt(2 * math.pi)))
        offset = math.log(narrow_share * wide / (wide_share * narrow))
        square = theta.square()
        exponent = offset - 0.5 * (narrow**-2 - wide**-2) * square
        # Smaller exponents have no effect, and denormal exponentials are ten times slower.
        narrow_part = functional.softplus(exponent.clamp(min=MIN_EXPONENT))
        return first - 0.5 * wide**-2 * square + narrow_part

    def kl(
        self, theta: Float[Tensor, "K D"], mu: Float[Tensor, "D"], sigma: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        """Compute log q(theta) - log p(theta) for each draw.

        With theta = mu + sigma eps, log q(theta) = log N(eps; 0, I) - sum log sigma. Hence
        eps = (theta - mu) / sigma has no gradient.
        """
        eps = ((theta - mu) / sigma).detach()
        log_q = -0.5 * eps.square().sum(-1) - (sigma.log() + 0.5 * math.log(2 * math.pi)).sum()
        return log_q - self.log_density(theta).sum(-1)


class GaussianPosterior(Posterior):
    """A factorial Gaussian posterior, theta = mu + softplus(rho) eps.

    See Blundell et al. 2015, "Weight uncertainty in neural networks", section 3.2.
    """

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
