"""Factorial Gaussian posteriors over weights (Bayes by Backprop)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional

from training.bayes.posterior import FactorialGaussian

MIN_EXPONENT = -80.0
CHUNK_NUMBERS = 1 << 15


class _GaussianMoments(torch.autograd.Function):
    """The weight means and variances of layers, and KL(N(mu, sigma^2) || N(0, std^2)).

    With sigma = softplus(rho), the gradients of a loss L are

        dL/dmu  = dL/dmean + dL/dKL mu / std^2
        dL/drho = (2 sigma dL/dvariance + dL/dKL (sigma / std^2 - 1 / sigma)) (1 - exp(-sigma))

    All operations on a chunk follow each other, because on CPUs the vectors do not fit into the
    cache. Separate passes would take half of a training step.
    """

    @staticmethod
    def forward(ctx: Any, mu: Tensor, rho: Tensor, std: float, *sizes: int) -> tuple[Tensor, ...]:
        sigma, variance = torch.empty_like(rho), torch.empty_like(rho)
        ctx.save_for_backward(mu, sigma)
        ctx.precision = std**-2
        kl = mu.new_tensor(len(mu) * (math.log(std) - 0.5))
        for mu_part, rho_part, sigma_part, variance_part in _chunks(mu, rho, sigma, variance):
            sigma_part.copy_(functional.softplus(rho_part))
            torch.square(sigma_part, out=variance_part)
            squares = torch.dot(mu_part, mu_part) + variance_part.sum()
            kl += 0.5 * ctx.precision * squares - sigma_part.log().sum()
        return *mu.detach().split(sizes), *variance.split(sizes), kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *moment_grads, kl_grad = grads
        layers = len(moment_grads) // 2
        sizes = [len(grad) for grad in moment_grads[:layers]]
        vectors = *ctx.saved_tensors, *map(torch.empty_like, ctx.saved_tensors)
        mu_grad, rho_grad = vectors[2:]
        by_layer = *(vector.split(sizes) for vector in vectors), *_halves(moment_grads)
        for layer in zip(*by_layer, strict=True):
            for mu, sigma, d_mu, d_rho, d_mean, d_variance in _chunks(*layer):
                torch.mul(mu, ctx.precision * kl_grad, out=d_mu).add_(d_mean)
                torch.reciprocal(sigma, out=d_rho).sub_(sigma, alpha=ctx.precision).mul_(kl_grad)
                d_rho.addcmul_(sigma, d_variance, value=-2.0).mul_(sigma.neg().expm1_())
        return mu_grad, rho_grad, None, *[None] * layers


def _chunks(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split vectors into chunks that fit into a CPU's cache."""
    size = CHUNK_NUMBERS if vectors[0].device.type == "cpu" else len(vectors[0])
    return zip(*(vector.split(size) for vector in vectors), strict=True)


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

    See Blundell et al. 2015, "Weight uncertainty in neural networks", section 3.2. The prior is
    N(0, prior_std^2 I).
    """

    trains_without_noise = True

    def __init__(
        self, dimension: int, initial_log_std: float, prior_std: float | None = 1.0
    ) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = dimension
        self.prior_std = prior_std
        self.mu = nn.Parameter(torch.zeros(dimension))
        rho = math.log(math.expm1(math.exp(initial_log_std)))
        self.rho = nn.Parameter(torch.full((dimension,), rho))

    @property
    def sigma(self) -> Float[Tensor, "D"]:
        return functional.softplus(self.rho)

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        return self.mu, self.sigma

    def layer_moments(
        self, eps: Float[Tensor, "K E"], sizes: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Float[Tensor, "K"]]:
        assert self.prior_std is not None
        *parts, kl = _GaussianMoments.apply(  # type: ignore[no-untyped-call]
            self.mu, self.rho, self.prior_std, *sizes
        )
        return *_halves(parts), kl.expand(len(eps))

    def kl(
        self, eps: Float[Tensor, "K E"], mean: Float[Tensor, "D"], std: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        assert self.prior_std is not None
        prior = Normal(torch.zeros_like(mean), self.prior_std)
        return kl_divergence(Normal(mean, std), prior).sum().expand(len(eps))

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.rho]

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        self.mu.copy_(theta)


class MixturePriorPosterior(GaussianPosterior):
    """A factorial Gaussian posterior with a scale mixture as the prior."""

    trains_without_noise = False

    def __init__(self, dimension: int, initial_log_std: float, prior: ScaleMixturePrior) -> None:
        super().__init__(dimension, initial_log_std, prior_std=None)
        self.prior = prior

    layer_moments = FactorialGaussian.layer_moments

    def kl(
        self, eps: Float[Tensor, "K D"], mean: Float[Tensor, "D"], std: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        """Compute log q(theta) - log p(theta) for each draw."""
        kl: Tensor = _MixtureKL.apply(mean, std, eps, self.prior)  # type: ignore[no-untyped-call]
        return kl

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        return self.prior.log_density(theta).sum(-1)
