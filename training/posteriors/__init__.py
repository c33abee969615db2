"""Approximate posteriors: theta as a function of noise, and the divergence from the prior. A module
a family."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.inference.noise import DRAW_INDEX, NOISE_ALGORITHM
from training.posteriors.laplace import LaplacePosterior
from training.posteriors.normal import standard_noise


@runtime_checkable
class Posterior(Protocol):
    """What every family gives. All are `torch.nn.Module`s."""

    noise_dimension: int
    theta_dimension: int
    algorithm: str  # of the noise, by its name in the manifest
    max_draws: int | None  # how many different draws there are; None: without end

    def __call__(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        """Return one draw of theta for each row of noise, as served."""

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        """Return draws of theta for training, and of each an estimate of KL(q || p), in nats,
        unbiased on average."""

    def spread_parameters(self) -> list[nn.Parameter]:
        """Return what says how wide draws are, on a log scale: parameters with a learning rate of
        their own."""

    def centre(self) -> Float[Tensor, "D"]:
        """Return one theta that stands for all draws: their mean, or the first where they have
        none."""

    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        """Move the posterior's centre."""


@runtime_checkable
class FactorialGaussian(Protocol):
    """A posterior under which weights are independent and normal: a layer's value can be drawn in
    place of them."""

    has_analytic_kl: bool

    def moments(self) -> tuple[Float[Tensor, "D"], Float[Tensor, "D"]]:
        """Return mean and standard deviation of each weight."""

    def divergence(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K"]:
        """Return what `sample` says of KL(q || p); the noise itself is not used where the KL is
        analytic."""


@runtime_checkable
class LocationScale(Protocol):
    """A posterior with a density whose draws are a location plus a scale times something."""

    def location(self) -> Float[Tensor, "D"] | None:
        """Return what draws deviate from; none where theta is not all that is random."""

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        """Return log p(theta), up to a constant."""


def step_noise(posterior: Posterior, num_draws: int, *key: int) -> Float[Tensor, "K E"]:
    """Return the noise of a training step: 0 numbers a draw where layers draw their values
    themselves, or none."""
    if isinstance(posterior, LaplacePosterior) or (
        isinstance(posterior, FactorialGaussian) and posterior.has_analytic_kl
    ):
        return torch.empty(num_draws, 0)
    return noise(posterior, num_draws, *key)


def noise(posterior: Posterior, num_draws: int, *key: int) -> Float[Tensor, "K E"]:
    """Return a posterior's noise for training: of the integers in `key` alone, or the numbers of
    its draws."""
    if posterior.algorithm == DRAW_INDEX:
        return torch.arange(num_draws, dtype=torch.float32)[:, None]
    assert posterior.algorithm == NOISE_ALGORITHM
    return standard_noise(num_draws, posterior.noise_dimension, *key)
