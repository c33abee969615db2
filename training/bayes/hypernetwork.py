"""Hypernetworks: an invertible flow from noise to theta."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.bayes.flows import Composition, ElementwiseAffine
from training.bayes.posterior import Posterior, log_normal, standard_noise

CENTRE_DRAWS = 500


class HypernetworkPosterior(Posterior):
    """theta = flow(eps), log q(theta) = log N(eps; 0, I) - log |det dtheta/deps| (Krueger et al.
    2017, section 3.2).

    The prior on theta is N(0, prior_std^2 I). With noise of fewer dimensions than theta, theta = c
    + A flow(eps) lies on a subspace whose centre c and directions A are parameters, as a network's
    directions V are; random are the subspace's coordinates, and the prior is theirs.

    With `follows_paths` the gradient of log q is that along theta alone, without the score of the
    flow's parameters, which is 0 on average (Roeder et al. 2017, "Sticking the landing"): where q
    is the exact posterior each draw's gradient is then 0.
    """

    def __init__(
        self,
        flow: Composition,
        dimension: int,
        prior_std: float,
        lift: "Subspace | None" = None,
        follows_paths: bool = False,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.follows_paths = follows_paths
        self.lift = lift
        self.noise_dimension = dimension
        self.theta_dimension = dimension if lift is None else lift.centre.numel()
        self.prior_std = prior_std

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        z = self.flow(eps)[0]
        return z if self.lift is None else self.lift(z)

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        if self.follows_paths and torch.is_grad_enabled():
            z, log_det, score = self.flow.with_score(eps)
            path = (score * z).sum(-1)
            log_q = (log_normal(eps, 1.0) - log_det - path).detach() + path
        else:
            z, log_det = self.flow(eps)
            log_q = log_normal(eps, 1.0) - log_det
        log_ratio = log_q - log_normal(z, self.prior_std)
        return z if self.lift is None else self.lift(z), log_ratio

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.output.log_scale]

    def location(self) -> Float[Tensor, "D"] | None:
        """Return the last layer's shift; None on a subspace, whose coordinates are not theta."""
        return self.output.shift if self.lift is None else None

    def log_prior(self, theta: Float[Tensor, "K D"]) -> Float[Tensor, "K"]:
        return log_normal(theta, self.prior_std)

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        eps = standard_noise(CENTRE_DRAWS, self.noise_dimension, 0)
        return self(eps.to(self.output.shift.device)).mean(0)

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
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
        return self.centre + z @ self.directions
