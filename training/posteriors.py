"""Approximate posteriors: theta as a function of noise, and the divergence from the prior."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.flows import Composition, ElementwiseAffine


class HypernetworkPosterior(nn.Module):
    """A Bayesian hypernetwork: an invertible flow from noise to theta (Krueger et al. 2017, section 3.2).

    The prior on theta is N(0, prior_std^2 I).
    """

    def __init__(self, flow: Composition, dimension: int, prior_std: float) -> None:
        super().__init__()
        self.flow = flow
        self.noise_dimension = dimension
        self.theta_dimension = dimension
        self.prior_std = prior_std

    def forward(self, eps: Float[Tensor, "K D"]) -> Float[Tensor, "K D"]:
        """Return one draw of theta for each row of noise."""
        return self.flow(eps)[0]

    def sample(self, eps: Float[Tensor, "K D"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        """Return draws of theta, and of each log q(theta) - log p(theta), whose mean is the KL, in nats."""
        theta, log_det = self.flow(eps)
        log_q = log_normal(eps, 1.0) - log_det
        return theta, log_q - log_normal(theta, self.prior_std)

    @property
    def output(self) -> ElementwiseAffine:
        """The last, elementwise affine layer: its shift is where theta starts."""
        last = self.flow.transforms[-1]
        assert isinstance(last, ElementwiseAffine)
        return last


def log_normal(x: Float[Tensor, "K D"], std: float) -> Float[Tensor, "K"]:
    """Return log N(x; 0, std^2 I) of each row, in nats."""
    return -0.5 * (x / std).square().sum(-1) - x.shape[-1] * (math.log(std) + 0.5 * math.log(2 * math.pi))


def standard_noise(num_draws: int, dimension: int, *key: int) -> Float[Tensor, "K D"]:
    """Return N(0, I) noise for training, a function of the integers in `key` alone, the same on every device."""
    generator = torch.Generator().manual_seed(hash_key(*key))
    return torch.randn(num_draws, dimension, generator=generator)


def hash_key(*key: int) -> int:
    """Mix integers into a seed of 63 bits, in the manner of splitmix64."""
    state = 0
    for part in key:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1
