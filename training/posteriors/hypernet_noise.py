"""The noise of a variational hypernetwork, whose layers make their own posterior of their input."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.inference.noise import NOISE_ALGORITHM


class NoisePosterior(nn.Module):
    """theta = eps, the E of every layer's M + A^1/2 E B^1/2: M, A, B and the KL come from the
    network's layers."""

    algorithm = NOISE_ALGORITHM
    max_draws: int | None = None

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = dimension

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        """Return the noise."""
        return eps * 1.0  # a graph needs an operator between its input and its output

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        """Return the noise, and 0: the KL depends on the input."""
        return eps, eps.new_zeros(len(eps))

    def spread_parameters(self) -> list[nn.Parameter]:
        """Return none: layers make their spread of their input."""
        return []

    def centre(self) -> Float[Tensor, "D"]:
        """Return 0, the mean."""
        return torch.zeros(self.theta_dimension)

    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        """Do nothing: the layers start by themselves."""
