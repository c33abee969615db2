"""Objectives: what a step of training minimises."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def alpha_objective(
    log_likelihood: Float[Tensor, "K N"],
    kl: Float[Tensor, "K"],
    kl_weight: float | Tensor,
    alpha: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the loss per row, in nats, and its likelihood term alone.

    The likelihood term is the mean over rows of -1/alpha log mean_k p(y | x, theta_k)^alpha (Li and
    Gal 2017, "Dropout inference in Bayesian neural networks with alpha-divergences", the
    reparametrised objective). At alpha 0, its limit, it is the mean over draws of -log p, and the
    loss is the negative evidence lower bound. `kl_weight` is 1 / (rows of the training set), or
    less while a ramp lasts, or what a recipe says.
    """
    if alpha == 0:
        nll = -log_likelihood.mean()
    else:
        num_draws = len(log_likelihood)
        nll = -(torch.logsumexp(alpha * log_likelihood, dim=0) - math.log(num_draws)).mean() / alpha
    return nll + kl_weight * kl.mean(), nll
