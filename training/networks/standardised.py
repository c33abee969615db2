"""What all networks share: rows are standardised before they reach a module, of which some layers
may be frozen.

Ids, which are float32 like all rows on their way here, become integers instead.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn


class Standardised(nn.Module):
    """A network of rows of a shape, less `mean` and divided by `std`: a number each, or one a
    channel.

    One that `takes_ids` gets them as they are, as int64.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, shape: Sequence[int], takes_ids: bool = False) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.takes_ids = takes_ids
        self.frozen: list[nn.Module] = []  # layers that a fit does not change, nor their statistics
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def standardised(self, x: Float[Tensor, "N I"]) -> Num[Tensor, "N ..."]:
        """Return rows as the module takes them."""
        if self.takes_ids:
            return x.unflatten(1, self.shape).long()
        return (x.unflatten(1, self.shape) - self.mean) / self.std

    @torch.no_grad()
    def standardise(self, x: Float[Tensor, "N I"]) -> None:
        """Bring rows like those of a batch to mean 0 and deviation 1, over all their numbers."""
        self.mean.copy_(x.mean())
        self.std.copy_(x.std().clamp(min=1e-12))

    def train(self, mode: bool = True) -> "Standardised":
        """Set the mode, in which frozen layers stay as they are served."""
        super().train(mode)
        for layer in self.frozen:
            layer.training = False
        return self
