"""Fitted networks as draws: ensembles, and a single network."""

from dataclasses import replace
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from model_store.inference.noise import DRAW_INDEX
from training.bayes.posterior import METHODS, Method, Posterior
from training.sections import Positive, Section


class MemberPosterior(Posterior):
    """Draw k is member k (Lakshminarayanan et al. 2017), so there are no more draws than
    members."""

    algorithm = DRAW_INDEX

    def __init__(self, members: int) -> None:
        super().__init__()
        self.noise_dimension = self.theta_dimension = 1
        self.max_draws = members

    def forward(self, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K D"]:
        return eps * 1.0  # a graph needs an operator between its input and its output

    def sample(self, eps: Float[Tensor, "K E"]) -> tuple[Float[Tensor, "K D"], Float[Tensor, "K"]]:
        return eps, eps.new_zeros(len(eps))

    def centre(self) -> Float[Tensor, "D"]:
        return torch.zeros(1)


class PointSection(Section):
    """`[posterior]` of mle."""

    prior_std: Positive | None = None


class EnsembleSection(PointSection):
    """`[posterior]` of ensemble."""

    members: Annotated[int, Field(ge=2, le=100)] = 5


class AnchoredSection(EnsembleSection):
    """`[posterior]` of anchored-ensemble."""

    members: Annotated[int, Field(ge=2, le=100)] = 10
    prior_std: Positive = 1.0


class BatchEnsembleSection(EnsembleSection):
    """`[posterior]` of batch-ensemble."""

    members: Annotated[int, Field(ge=2, le=100)] = 16


METHODS["mle"] = Method(
    PointSection,
    lambda section, _, __: MemberPosterior(getattr(section, "members", 1)),
    decays=True,
    is_point=True,
)
METHODS["ensemble"] = replace(METHODS["mle"], section=EnsembleSection, is_point=False)
METHODS["anchored-ensemble"] = replace(
    METHODS["ensemble"], section=AnchoredSection, is_anchored=True
)
METHODS["batch-ensemble"] = replace(
    METHODS["ensemble"], section=BatchEnsembleSection, shares_weights=True
)
