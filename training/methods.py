"""All methods by name; each family of posteriors registers its own."""

import math
from typing import Any, Literal

import torch
from pydantic import field_validator

from training.bayes import dropout, gaussian, hypernetwork, members
from training.bayes.laplace import LaplacePosterior, Structure
from training.bayes.layers import Stochastic
from training.bayes.posterior import METHODS, Method
from training.networks.networks import DrawnNetwork
from training.sections import Section

__all__ = ["METHODS", "Method", "dropout", "gaussian", "hypernetwork", "members"]

PRIOR_CHOICES = ("auto", "marginal-likelihood", "held-out")


class LaplaceSection(Section):
    """`[posterior]` of laplace."""

    structure: Structure = "kronecker"
    prior_std: float | Literal["auto", "marginal-likelihood", "held-out"] = "auto"

    @field_validator("prior_std", mode="before")
    @classmethod
    def _check_prior_std(cls, value: Any) -> Any:
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if value in PRIOR_CHOICES or (is_number and 0 < value < math.inf):
            return value
        raise ValueError("a number above 0, 'auto', 'marginal-likelihood' or 'held-out'")


def laplace(section: LaplaceSection, network: DrawnNetwork, _: torch.Generator) -> LaplacePosterior:
    prior_std = None if isinstance(section.prior_std, str) else section.prior_std
    (slot,) = network.slots
    return LaplacePosterior(slot, section.structure, prior_std)


METHODS["laplace"] = Method(
    LaplaceSection,
    laplace,
    lambda _: Stochastic("weights"),
    draws_last_layer=True,
    is_fitted_after=True,
)
