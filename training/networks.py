"""Primary networks as functions of an input and theta: outputs[k, n] = f(x[n], theta[k]).

Axes: K draws, N rows, P is 1 where all rows share a draw and N where each row has its own (a paired theta).
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional


class MLP(nn.Module):
    """A classifier of ReLU layers with weight-normalised units: unit u computes g_u (x . V_u / |V_u|) + b_u.

    Directions V and biases b are parameters; the scales g of all layers, first layer first, are theta (Krueger et
    al. 2017, equation 7 and appendix B). A scale multiplies a product that does not depend on the draw, so the
    first layer's product is computed once for all draws.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, sizes: Sequence[int], generator: torch.Generator) -> None:
        """Make a network of layer sizes (inputs, hidden ..., classes)."""
        super().__init__()
        self.sizes = tuple(sizes)
        self.directions = nn.ParameterList(
            torch.randn(outputs, inputs, generator=generator) / math.sqrt(inputs)
            for inputs, outputs in pairwise(sizes)
        )
        self.biases = nn.ParameterList(torch.zeros(outputs) for outputs in sizes[1:])
        self.theta_dimension = sum(sizes[1:])
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("std", torch.ones(()))

    def forward(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"]]:
        """Return log class probabilities of each draw and row, and the first layer's product as features."""
        h = (x - self.mean) / self.std
        features = None
        scales = torch.split(theta, list(self.sizes[1:]), dim=-1)
        for direction, bias, scale in zip(self.directions, self.biases, scales, strict=True):
            if features is not None:
                h = torch.relu(h)
            product = functional.linear(h, direction)
            features = product if features is None else features
            h = product * (scale / torch.linalg.vector_norm(direction, dim=1)) + bias
        assert features is not None
        return functional.log_softmax(h, dim=-1), features

    @torch.no_grad()
    def initialise(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "D"]:
        """Set standardisation and biases from a batch, and return the scales that go with them.

        With them each unit's value before its nonlinearity has mean 0 and variance 1 over the batch (Salimans and
        Kingma 2016, section 3).
        """
        self.mean.copy_(x.mean())
        self.std.copy_(x.std().clamp(min=1e-12))
        h = (x - self.mean) / self.std
        scales = []
        for direction, bias in zip(self.directions, self.biases, strict=True):
            norm = torch.linalg.vector_norm(direction, dim=1)
            std, mean = torch.std_mean(functional.linear(h, direction) / norm, dim=0)
            std = std.clamp(min=1e-6)
            bias.copy_(-mean / std)
            scales.append(1.0 / std)
            h = torch.relu(functional.linear(h, direction) / norm / std + bias)
        return torch.cat(scales)

    @torch.no_grad()
    def normalise(self) -> None:
        """Divide every direction by its length: the same function, with directions of one size to store."""
        for direction in self.directions:
            direction.div_(torch.linalg.vector_norm(direction, dim=1, keepdim=True))
