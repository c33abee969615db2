"""A posterior: theta as a function of noise, and its divergence from the prior."""

import math
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.inference.noise import DRAW_INDEX, NOISE_ALGORITHM
from training.bayes.layers import pairs
from training.seeds import hash_key

CPU = torch.device("cpu")


class Posterior(nn.Module):
    """An approximate posterior: theta as a function of noise, and its divergence from the prior."""

    noise_dimension: int
    theta_dimension: int
    algorithm = NOISE_ALGORITHM  # of the noise; the manifest has its name
    max_draws: int | None = None  # number of different draws; None if unlimited
    trains_without_noise = False

    def __call__(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        """Return one draw of theta for each row of noise."""
        theta: Tensor = super().__call__(eps)
        return theta

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        """Return draws of theta for training, each with an unbiased estimate of KL(q || p) in
        nats."""
        raise NotImplementedError

    def spread_parameters(self) -> list[nn.Parameter]:
        """Return the log-scale width parameters, which need a higher learning rate."""
        return []

    def centre(self) -> Float[Tensor, "D"]:
        """Return the mean of draws, or the first draw if the mean is undefined."""
        raise NotImplementedError

    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        """Move the posterior's centre, if it is movable."""


@runtime_checkable
class FactorialGaussian(Protocol):
    """A factorial Gaussian, which lets a layer draw its output instead of its weights."""

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]: ...

    def divergence(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K"]:
        """Return the KL(q || p) of `sample`; an analytic one ignores the noise."""


@runtime_checkable
class LocationScale(Protocol):
    """A posterior with a density and draws of the form location + scale * noise."""

    def location(self) -> Float[Tensor, "D"] | None:
        """Return the location of theta, or None if the network has other random parts."""

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        """Return log p(theta), up to a constant."""


def step_noise(
    posterior: Posterior,
    num_draws: int,
    *key: int,
    in_pairs: bool = False,
    device: torch.device = CPU,
) -> Float[Tensor, "K E"]:
    """Return the noise of a training step: normal noise, member indices, or an empty tensor.

    With `in_pairs`, normal noise consists of antithetic pairs.
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
    """Return noise for up to `max_draws` draws: indices, or a function of the integers in `key`."""
    num_draws = min(num_draws, posterior.max_draws or num_draws)
    if posterior.algorithm == DRAW_INDEX:
        return torch.arange(num_draws, dtype=torch.float32, device=device)[:, None]
    assert posterior.algorithm == NOISE_ALGORITHM
    return standard_noise(num_draws, posterior.noise_dimension, *key, device=device)


def standard_noise(
    num_draws: int, dimension: int, *key: int, device: torch.device = CPU
) -> Float[Tensor, "K D"]:
    """Return N(0, I) noise, a function of the integers in `key` and the kind of device."""
    generator = torch.Generator(device).manual_seed(hash_key(*key))
    return torch.randn(num_draws, dimension, generator=generator, device=device)


def log_normal(x: Float[Tensor, "K D"], std: float) -> Float[Tensor, "K"]:
    """Return log N(x; 0, std^2 I) of each row, in nats."""
    constant = math.log(std) + 0.5 * math.log(2 * math.pi)
    return -0.5 * (x / std).square().sum(-1) - x.shape[-1] * constant
