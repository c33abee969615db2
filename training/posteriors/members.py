"""Fitted networks as draws: deep ensembles, and a single network."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.inference.noise import DRAW_INDEX


class MemberPosterior(nn.Module):
    """Draw k is member k (Lakshminarayanan et al. 2017), so there are no more draws than
    members."""

    algorithm = DRAW_INDEX

    def __init__(self, members: int) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = 1
        self.max_draws: int | None = members

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        """Return the number of each draw's member."""
        return eps * 1.0  # a graph needs an operator between its input and its output

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        """Return the members' numbers, and 0: what regularises them is their weight decay."""
        return eps, eps.new_zeros(len(eps))

    def spread_parameters(self) -> list[nn.Parameter]:
        """Return none: members are points."""
        return []

    def centre(self) -> Float[Tensor, "D"]:
        """Return the first member's number: numbers have no mean."""
        return torch.zeros(1)

    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        """Do nothing: members start by themselves."""
