"""Factorial Gaussian posteriors over weights (Bayes by Backprop)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from training.bayes.posterior import FactorialGaussian

MIN_EXPONENT = -80.0


class _GaussianMoments(torch.autograd.Function):
    """The weight means and variances of layers, and KL(N(mu, sigma^2) || N(0, std^2)).

    With sigma = softplus(rho), the gradients of a loss L are

        dL/dmu  = dL/dmean + dL/dKL mu / std^2
        dL/drho = (2 sigma dL/dvariance + dL/dKL (sigma / std^2 - 1 / sigma)) (1 - exp(-sigma))

    They are computed in place, because autograd's separate operations take a third more time.
    """

    @staticmethod
    def forward(ctx: Any, mu: Tensor, rho: Tensor, std: float, *sizes: int) -> tuple[Tensor, ...]:
        sigma = functional.softplus(rho)
        variance = sigma.square()
        ctx.save_for_backward(mu, sigma)
        ctx.precision = std**-2
        squares = torch.dot(mu, mu) + variance.sum()
        log_ratios = sigma.log().sum() - len(mu) * math.log(std)
        kl = 0.5 * (ctx.precision * squares - len(mu)) - log_ratios
        return *mu.detach().split(sizes), *variance.split(sizes), kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mu, sigma = ctx.saved_tensors
        *moment_grads, kl_grad = grads
        mean_grads, variance_grads = _halves(moment_grads)
        sizes = [len(grad) for grad in mean_grads]
        mu_grad = mu * (ctx.precision * kl_grad)
        for part, grad in zip(mu_grad.split(sizes), mean_grads, strict=True):
            part.add_(grad)
        rho_grad = sigma.reciprocal().sub_(sigma, alpha=ctx.precision).mul_(kl_grad)
        parts = rho_grad.split(sizes), sigma.split(sizes), variance_grads
        for part, sigma_part, grad in zip(*parts, strict=True):
            part.addcmul_(sigma_part, grad, value=-2.0)
        rho_grad.mul_(sigma.neg().expm1_())
        return mu_grad, rho_grad, None, *[None] * len(sizes)


def _halves(items: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return items[: len(items) // 2], items[len(items) // 2 :]


class _MixtureKL(torch.autograd.Function):
    """The log-ratio log q(theta) - log p(theta) at theta = mu + sigma eps, for a scale mixture p.

    The gradient of -log p is (wide^-2 + share * gap) theta, where `share` is the probability of the
    narrow component given theta.
    """

    @staticmethod
    def forward(
        ctx: Any, mu: Tensor, sigma: Tensor, eps: Tensor, prior: "ScaleMixturePrior"
    ) -> Tensor:
        first, offset, precision, gap = prior.coefficients
        theta = torch.addcmul(mu, sigma, eps)
        square = theta.square()
        # Larger exponents have no effect, and denormal exponentials are ten times slower.
        wide_share = (0.5 * gap * square).sub_(offset).clamp_(max=-MIN_EXPONENT).sigmoid_()
        log_p = -0.5 * precision * square.sum(-1) - wide_share.log().sum(-1) + len(mu) * first
        log_q = -0.5 * eps.square().sum(-1) - sigma.log().sum()
        slope = wide_share.mul_(-gap).add_(precision + gap).mul_(theta)
        ctx.save_for_backward(sigma, eps, slope)
        return log_q - 0.5 * len(mu) * math.log(2 * math.pi) - log_p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        sigma, eps, slope = ctx.saved_tensors
        sigma_grad = (grad @ (slope * eps)).sub_(grad.sum() / sigma)
        return grad @ slope, sigma_grad, None, None


@dataclass(frozen=True)
class ScaleMixturePrior:
    """The prior pi N(0, std_1^2) + (1 - pi) N(0, std_2^2) (Blundell et al. 2015, equation 7)."""

    pi: float
    std_1: float
    std_2: float

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """The coefficients c, o, a and b in log p = c - a t^2 / 2 + softplus(o - b t^2 / 2)."""
        parts = sorted(((self.std_1, self.pi), (self.std_2, 1.0 - self.pi)), reverse=True)
        (wide, wide_share), (narrow, narrow_share) = parts
        first = math.log(wide_share / (wide * math.sqrt(2 * math.pi)))
        offset = math.log(narrow_share * wide / (wide_share * narrow))
        return first, offset, wide**-2, narrow**-2 - wide**-2

    def log_density(self, theta: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Compute each weight's log prior density, log(wide) + softplus(log(narrow / wide))."""
        first, offset, precision, gap = self.coefficients
        square = theta.square()
        narrow_part = functional.softplus((offset - 0.5 * gap * square).clamp(min=MIN_EXPONENT))
        return first - 0.5 * precision * square + narrow_part


class GaussianPosterior(FactorialGaussian):
    """A factorial Gaussian posterior, theta = mu + softplus(rho) eps.

    See Blundell et al. 2015, "Weight uncertainty in neural networks", section 3.2.
    """

    def __init__(self, dimension: int, initial_log_std: float) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = dimension
        self.mu = nn.Parameter(torch.zeros(dimension))
        rho = math.log(math.expm1(math.exp(initial_log_std)))
        self.rho = nn.Parameter(torch.full((dimension,), rho))

    @property
    def sigma(self) -> Float[Tensor, "D"]:
        return functional.softplus(self.rho)

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        return self.mu, self.sigma

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.rho]

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        self.mu.copy_(theta)


class NormalPriorPosterior(GaussianPosterior):
    """A factorial Gaussian posterior with the prior N(0, prior_std^2 I)."""

    trains_without_noise = True

    def __init__(self, dimension: int, initial_log_std: float, prior_std: float) -> None:
        super().__init__(dimension, initial_log_std)
        self.prior_std: float = prior_std

    def layer_moments(
        self, eps: Float[Tensor, "K E"], sizes: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Float[Tensor, "K"]]:
        *parts, kl = _GaussianMoments.apply(  # type: ignore[no-untyped-call]
            self.mu, self.rho, self.prior_std, *sizes
        )
        return *_halves(parts), kl.expand(len(eps))

    def kl(
        self, eps: Float[Tensor, "K E"], mean: Float[Tensor, "D"], std: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        prior = Normal(torch.zeros_like(mean), self.prior_std)
        return kl_divergence(Normal(mean, std), prior).sum().expand(len(eps))


class MixturePriorPosterior(GaussianPosterior):
    """A factorial Gaussian posterior with a scale mixture as the prior."""

    def __init__(self, dimension: int, initial_log_std: float, prior: ScaleMixturePrior) -> None:
        super().__init__(dimension, initial_log_std)
        self.prior = prior

    def kl(
        self, eps: Float[Tensor, "K D"], mean: Float[Tensor, "D"], std: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        """Compute log q(theta) - log p(theta) for each draw."""
        kl: Tensor = _MixtureKL.apply(mean, std, eps, self.prior)  # type: ignore[no-untyped-call]
        return kl

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        return self.prior.log_density(theta).sum(-1)
