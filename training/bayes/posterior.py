"""The base classes for posteriors, and the noise that they use."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.inference.noise import DRAW_INDEX, NOISE_ALGORITHM
from training.bayes.layers import pairs
from training.seeds import hash_key

CPU = torch.device("cpu")


class Posterior(nn.Module):
    """An approximate posterior, which maps noise to theta."""

    noise_dimension: int
    theta_dimension: int
    algorithm = NOISE_ALGORITHM  # name of the noise in the manifest
    max_draws: int | None = None  # number of different draws; None if unlimited
    trains_without_noise = False  # `sample` ignores its noise
    prior_std: float | None = None  # of a Gaussian prior on theta

    def __call__(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        """Map each row of noise to a draw of theta."""
        theta: Tensor = super().__call__(eps)
        return theta

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        """Sample theta for training, and return an unbiased estimate of KL(q || p) in nats."""
        raise NotImplementedError

    def spread_parameters(self) -> list[nn.Parameter]:
        """Return the log standard deviation parameters, which need a higher learning rate."""
        return []

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        """Compute log p(theta), up to a constant."""
        assert self.prior_std is not None
        return log_normal(theta, self.prior_std)

    def centre(self) -> Float[Tensor, "D"]:
        """Return the posterior mean, or the first member of an ensemble."""
        raise NotImplementedError

    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        """Move the centre to `theta`, if the posterior supports this."""


class FactorialGaussian(Posterior):
    """A Gaussian with independent parameters, which supports local reparametrisation."""

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        """Return the mean and the standard deviation of each parameter."""
        raise NotImplementedError

    def kl(
        self, eps: Float[Tensor, "K E"], mean: Float[Tensor, "D"], std: Float[Tensor, "D"]
    ) -> Float[Tensor, "K"]:
        """Compute KL(q || p) as `sample` does, given the moments of q."""
        raise NotImplementedError

    def layer_moments(
        self, eps: Float[Tensor, "K E"], sizes: Sequence[int]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Float[Tensor, "K"]]:
        """Return the means and variances for layers of the given sizes, and the KL."""
        mean, std = self.moments()
        return mean.split(sizes), std.square().split(sizes), self.kl(eps, mean, std)

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        mean, std = self.moments()
        return mean + std * eps

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        mean, std = self.moments()
        return mean + std * eps, self.kl(eps, mean, std)

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        return self.moments()[0].clone()


def step_noise(
    posterior: Posterior,
    num_draws: int,
    *key: int,
    in_pairs: bool = False,
    device: torch.device = CPU,
) -> Float[Tensor, "K E"]:
    """Generate the noise for a training step.

    Depending on the posterior it is normal noise (in antithetic pairs if `in_pairs`), member
    indices, or empty.
    """
    if posterior.trains_without_noise:
        return torch.empty(num_draws, 0, device=device)
    if posterior.algorithm == DRAW_INDEX:
        return noise(posterior, num_draws, device=device)
    fresh = num_draws - num_draws // 2 if in_pairs else num_draws
    eps = standard_noise(fresh, posterior.noise_dimension, *key, device=device)
    return pairs(eps, num_draws)


def noise(
    posterior: Posterior, num_draws: int, *key: int, device: torch.device = CPU
) -> Float[Tensor, "K E"]:
    """Generate normal noise or member indices for up to `max_draws` draws.

    Normal noise is a function of the integers in `key`.
    """
    num_draws = min(num_draws, posterior.max_draws or num_draws)
    if posterior.algorithm == DRAW_INDEX:
        return torch.arange(num_draws, dtype=torch.float32, device=device)[:, None]
    assert posterior.algorithm == NOISE_ALGORITHM
    return standard_noise(num_draws, posterior.noise_dimension, *key, device=device)


def standard_noise(
    num_draws: int, dimension: int, *key: int, device: torch.device = CPU
) -> Float[Tensor, "K D"]:
    generator = torch.Generator(device).manual_seed(hash_key(*key))
    return torch.randn(num_draws, dimension, generator=generator, device=device)


def log_normal(x: Float[Tensor, "K D"], std: float) -> Float[Tensor, "K"]:
    """Compute log N(x; 0, std^2 I) for each row, in nats."""
    constant = math.log(std) + 0.5 * math.log(2 * math.pi)
    return -0.5 * (x / std).square().sum(-1) - x.shape[-1] * constant
