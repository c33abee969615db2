"""What `network.onnx` computes."""

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from training.detectors import KINDS
from training.likelihoods import Likelihood
from training.model import BayesianModel
from training.networks import DrawnNetwork, MemberNetwork

EMBEDDED_ROWS = 10_000  # of the training rows
CHUNK_ROWS = 1000


class ServedNetwork(nn.Module):
    """The primary network, and beside it the density detectors."""

    centre: Tensor

    def __init__(
        self,
        network: DrawnNetwork | MemberNetwork,
        likelihood: Likelihood,
        density: dict[str, nn.Module],
        centre: Float[Tensor, "D"],
    ) -> None:
        """Put a network's parts together: detectors by name, and the theta under which rows are embedded."""
        super().__init__()
        self.network = network
        self.likelihood = likelihood
        self.density = nn.ModuleDict(density)
        self.register_buffer("centre", centre[None, None])

    @property
    def two_sided(self) -> tuple[str, ...]:
        """Names of the detectors of which small scores too mean unlike the data."""
        return tuple(name for name in self.density if KINDS[name].is_two_sided)

    def forward(
        self, x: Float[Tensor, "N I"], theta: Float[Tensor, "K P D"]
    ) -> tuple[Float[Tensor, "K N C"], Float[Tensor, "N H"], Float[Tensor, "N M"]]:
        """Return what is served of each draw, features, and one density score for each detector, in their order."""
        outputs, features = self.network(x, theta)
        embedding = self.network.embed(x, self.centre)
        space = {"input": x, "embedding": embedding}
        density = [detector(space[KINDS[name].space]) for name, detector in self.density.items()]
        return self.likelihood(outputs), features, torch.stack(density, dim=1)


@torch.no_grad()
def served_network(
    model: BayesianModel, x: Num[Tensor, "N I"], seed: int, labels: Int[Tensor, "N"] | None = None
) -> ServedNetwork:
    """Return a model's network beside the detectors, fitted on training rows and on their classes if there are."""
    network, centre = model.network, model.posterior.centre()
    few = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:EMBEDDED_ROWS]
    parts = x[few].split(CHUNK_ROWS)
    embedding = torch.cat([network.embed(part.float(), centre[None, None]) for part in parts])
    known = None if labels is None else labels[few]
    rows = {"input": x, "embedding": embedding}
    generator = torch.Generator().manual_seed(seed)
    density = {}
    for name, kind in KINDS.items():
        of_classes = (known,) if kind.has_classes else ()
        density[name] = kind.fit(rows[kind.space], generator, *of_classes)
    return ServedNetwork(network, model.likelihood, density, centre).eval()
