"""Density detectors: how unlike the training data an input is, whatever the model says of it.

A detector is a module from (x, features) to one score a row, more meaning more unlike; it is fitted on the training
rows and exported into the network's graph, so that it costs no further pass and runs wherever the network does.
"""

import torch
from jaxtyping import Float, Num
from torch import Tensor, nn

from training.likelihoods import Likelihood
from training.networks import DrawnNetwork, MemberNetwork

EXPLAINED = 0.9  # share of the training rows' variance inside the leading components
CHUNK_ROWS = 4096
ROUNDING = 1e-9  # of an input's square: a smaller residual would be float32's rounding


class Residual(nn.Module):
    """Squared distance of an input from the span of the training rows' leading principal components.

    Natural data lie near few directions; noise, other data and perturbations have energy in all of them. As many
    components are kept as explain `EXPLAINED` of the variance.
    """

    mean: Tensor
    components: Tensor

    def __init__(self, mean: Float[Tensor, "I"], components: Float[Tensor, "I D"]) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("components", components)

    @classmethod
    def fit(cls, x: Num[Tensor, "N I"]) -> "Residual":
        """Fit on training rows, in float64."""
        parts = torch.split(x, CHUNK_ROWS)  # rows may be bytes, and eight times as large in float64
        mean = sum((part.double().sum(0) for part in parts), torch.zeros(x.shape[1], dtype=torch.float64)) / len(x)
        scatter = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
        for part in parts:
            centred = part.double() - mean
            scatter += centred.T @ centred
        variances, directions = torch.linalg.eigh(scatter)
        share = variances.flip(0).cumsum(0) / variances.sum()
        kept = min(int((share < EXPLAINED).sum()) + 1, x.shape[1] - 1)
        return cls(mean.float(), directions.flip(1)[:, :kept].float().contiguous())

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N"]:
        """Return the squared residual of each row, in squared units of the data."""
        centred = x - self.mean
        residual = centred - (centred @ self.components) @ self.components.T
        least = ROUNDING * centred.square().sum(1)
        return torch.maximum(residual.square().sum(1), least)


class ServedNetwork(nn.Module):
    """What `network.onnx` computes: the primary network, and beside it the density detectors."""

    def __init__(
        self, network: DrawnNetwork | MemberNetwork, likelihood: Likelihood, density: dict[str, Residual]
    ) -> None:
        super().__init__()
        self.network = network
        self.likelihood = likelihood
        self.density = nn.ModuleDict(density)

    def forward(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"], Float[Tensor, "N M"]]:
        """Return what is served of each draw, features, and one density score for each detector, in their order."""
        outputs, features = self.network(x, theta)
        return (
            self.likelihood(outputs),
            features,
            torch.stack([detector(x) for detector in self.density.values()], dim=1),
        )
