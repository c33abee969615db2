"""The training objective."""

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
    """Compute the loss per row in nats, and its likelihood term.

        mean_n -1/alpha log mean_k p(y_n | x_n, theta_k)^alpha + kl_weight mean_k KL_k

    This is the reparametrised objective of Li and Gal 2017, "Dropout inference in Bayesian neural
    networks with alpha-divergences". For alpha = 0, the likelihood term is the mean of -log p over
    draws. With `kl_weight` = 1 / (training rows), the loss is then the negative evidence lower
    bound.
    """
    if alpha == 0:
        nll = -log_likelihood.mean()
    else:
        num_draws = len(log_likelihood)
        nll = -(torch.logsumexp(alpha * log_likelihood, dim=0) - math.log(num_draws)).mean() / alpha
    return nll + kl_weight * kl.mean(), nll
