"""Posteriors defined by a normalizing flow from noise to theta."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from training.bayes.flows import Composition, ElementwiseAffine
from training.bayes.posterior import Posterior, log_normal, standard_noise

CENTRE_DRAWS = 500


class HypernetworkPosterior(Posterior):
    """A flow posterior with the prior N(0, prior_std^2 I) (Krueger et al. 2017, section 3.2).

    With `follows_paths`, the gradient of log q omits the score of the flow's parameters, whose mean
    is 0 (Roeder et al. 2017, "Sticking the landing"). If q is the exact posterior, the gradient of
    each draw is then 0.
    """

    def __init__(
        self,
        flow: Composition,
        dimension: int,
        prior_std: float,
        follows_paths: bool = False,
    ) -> None:
        super().__init__()
        self.flow = flow
        self.follows_paths = follows_paths
        self.noise_dimension = self.theta_dimension = dimension
        self.prior_std = prior_std

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return self.flow(eps)[0]

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        if self.follows_paths and torch.is_grad_enabled():
            theta, log_det, score = self.flow.with_score(eps)
            path = (score * theta).sum(-1)
            log_q = (log_normal(eps, 1.0) - log_det - path).detach() + path
        else:
            theta, log_det = self.flow(eps)
            log_q = log_normal(eps, 1.0) - log_det
        return theta, log_q - self.log_prior(theta)

    def spread_parameters(self) -> list[nn.Parameter]:
        return [self.output.log_scale]

    @torch.no_grad()
    def centre(self) -> Float[Tensor, "D"]:
        eps = standard_noise(CENTRE_DRAWS, self.noise_dimension, 0)
        return self(eps.to(self.output.shift.device)).mean(0)

    @torch.no_grad()
    def start_at(self, theta: Float[Tensor, "D"]) -> None:
        self.output.shift.copy_(theta)

    @property
    def output(self) -> ElementwiseAffine:
        return self.flow.affine
