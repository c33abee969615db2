"""Bayesian hypernetworks: an invertible flow from noise to theta."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from model_store.inference.noise import NOISE_ALGORITHM
from training.networks.flows import Composition, ElementwiseAffine
from training.posteriors.normal import log_normal, standard_noise

CENTRE_DRAWS = 500


class HypernetworkPosterior(nn.Module):
    """theta = flow(eps), log q(theta) = log N(eps; 0, I) - log |det dtheta/deps| (Krueger et al.
    2017, section 3.2).

    The prior on theta is N(0, prior_std^2 I). With noise of fewer dimensions than theta, theta = c
    + A flow(eps) lies on a subspace whose centre c and directions A are parameters, as a network's
    directions V are; random are the subspace's coordinates, and the prior is theirs.
    """

    algorithm = NOISE_ALGORITHM
    max_draws: int | None = None

    def __init__(
        self, flow: Composition, dimension: int, prior_std: float, lift: "Subspace | None" = None
    ) -> None:
        """Make a posterior of a flow over `dimension` numbers: theta's, or those of the lift's
        subspace."""
        super().__init__()
        self.flow = flow
        self.lift = lift
        self.noise_dimension = dimension
        self.theta_dimension = dimension if lift is None else lift.centre.numel()
        self.prior_std = prior_std

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        """Return one draw of theta for each row of noise."""
        z = self.flow(eps)[0]
        return z if self.lift is None else self.lift(z)

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        """Return draws of theta, and of each log q - log p, whose mean is the KL, in nats."""
        z, log_det = self.flow(eps)
        log_ratio = log_normal(eps, 1.0) - log_det - log_normal(z, self.prior_std)
        return z if self.lift is None else self.lift(z), log_ratio

    def spread_parameters(self) -> list[nn.Parameter]:
        """Return the log-scale of the flow's last layer."""
        return [self.output.log_scale]

    def location(self) -> Float[Tensor, "D"] | None:
        """Return the last layer's shift: none on a subspace, whose coordinates are no theta."""
        return self.output.shift if self.lift is None else None

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        """Return log p(theta) of a posterior over all of theta."""
        return log_normal(theta, self.prior_std)

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        """Return the mean of `CENTRE_DRAWS` draws."""
        return self(standard_noise(CENTRE_DRAWS, self.noise_dimension, 0)).mean(0)

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        """Move the flow's last shift, or the subspace's centre."""
        (self.output.shift if self.lift is None else self.lift.centre).copy_(theta)

    @property
    def output(self) -> ElementwiseAffine:
        """The last, elementwise affine layer: its shift is where theta starts."""
        last = self.flow.transforms[-1]
        assert isinstance(last, ElementwiseAffine)
        return last


class Subspace(nn.Module):
    """c + A z: coordinates of a subspace to theta."""

    def __init__(self, coordinates: int, dimension: int, generator: torch.Generator) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(dimension))
        self.directions = nn.Parameter(torch.randn(coordinates, dimension, generator=generator))

    def forward(self, z: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        """Return the points of these coordinates."""
        return self.centre + z @ self.directions
