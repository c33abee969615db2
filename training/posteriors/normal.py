"""Noise for training, and densities of normal variables."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from training.seeds import hash_key


def log_normal(x: Float[Tensor, "K D"], std: float) -> Float[Tensor, "K"]:
    """Return log N(x; 0, std^2 I) of each row, in nats."""
    return -0.5 * (x / std).square().sum(-1) - x.shape[-1] * (
        math.log(std) + 0.5 * math.log(2 * math.pi)
    )


def standard_noise(num_draws: int, dimension: int, *key: int) -> Float[Tensor, "K D"]:
    """Return N(0, I) noise for training, a function of the integers in `key` alone, the same on
    every device."""
    generator = torch.Generator().manual_seed(hash_key(*key))
    return torch.randn(num_draws, dimension, generator=generator)
