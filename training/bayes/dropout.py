"""Posteriors over Bernoulli dropout masks."""

from collections.abc import Sequence
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor

from training.bayes.layers import Slot
from training.bayes.posterior import Posterior


class MaskPosterior(Posterior):
    """The distribution of a dropout mask: theta_i = 1 / keep_i with probability keep_i, else 0.

    See Gal and Ghahramani 2016, "Dropout as a Bayesian approximation". The KL is the network's
    weight decay. If `is_served` is false, masks are used only in training, and the only draw of
    theta is its mean, 1.
    """

    keep: Tensor
    threshold: Tensor

    def __init__(self, slots: Sequence[Slot], is_served: bool = True) -> None:
        super().__init__()
        keep = torch.cat([torch.full((slot.size,), slot.keep) for slot in slots])
        self.noise_dimension = self.theta_dimension = len(keep)
        self.max_draws = None if is_served else 1
        quantiles = [torch.full((slot.size,), NormalDist().inv_cdf(slot.keep)) for slot in slots]
        self.register_buffer("keep", keep)
        self.register_buffer("threshold", torch.cat(quantiles))

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return self._masks(eps) if self.max_draws is None else torch.ones_like(eps)

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        return self._masks(eps), eps.new_zeros(len(eps))

    def centre(self) -> Float[Tensor, "D"]:
        return torch.ones(self.theta_dimension)

    def _masks(self, eps: Float[Tensor, "K D"]) -> Float[Tensor, "K D"]:
        return (eps < self.threshold).to(eps.dtype) / self.keep
