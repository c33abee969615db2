"""How well a posterior covers what it approximates: Pareto-smoothed importance sampling's k-hat."""

import math

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from training.model import BayesianModel
from training.posteriors import FactorialGaussian, LocationScale
from training.posteriors.base import log_normal, standard_noise

DRAWS = 200
CHUNK_ROWS = 2048
MOST_FLOPS = 4e12  # of all rows and draws: half a minute on two cores
LEAST_TAIL = 5  # ratios that a tail is fitted to
TINY = 1e-300  # of ratios over the largest: less counts as so much


def pareto_k(log_ratios: Float64[np.ndarray, "K"]) -> float:
    """Return k-hat: the shape of the generalised Pareto distribution that the largest importance
    ratios follow.

    Below .5 the ratios have a variance, below .7 what they weigh can be trusted at practical
    numbers of draws (Vehtari et al. 2024, "Pareto smoothed importance sampling"; of posteriors Yao
    et al. 2018, "Yes, but did it work?"). The tail is the largest min(K / 5, 3 sqrt(K)). Its error
    at 200 draws is about .2.
    """
    largest = np.sort(log_ratios)
    tail = math.ceil(min(0.2 * len(largest), 3.0 * math.sqrt(len(largest))))
    if tail < LEAST_TAIL:
        raise ValueError(
            f"log_ratios: expected at least {5 * LEAST_TAIL} draws, got {len(log_ratios)}"
        )
    ratios = np.exp(
        largest[-tail - 1 :] - largest[-1]
    )  # the largest is 1, and the first the tail's threshold
    excess = ratios[1:] - ratios[0]
    if excess[-1] < np.finfo(float).eps:
        return 0.0  # ratios that are equal have no tail
    return pareto_shape(np.maximum(excess, TINY))


def pareto_shape(excess: Float64[np.ndarray, "M"]) -> float:
    """Return the shape of a generalised Pareto distribution from a sorted sample of what exceeds
    its threshold.

    Zhang and Stephens (2009), "A new and efficient estimation method for the generalized Pareto
    distribution", equations 8 and 9: the posterior mean of theta = -k / sigma under their prior, by
    quadrature over m points, and k given theta. Ten further values of .5 draw k towards .5 (Vehtari
    et al. 2024, appendix C).
    """
    count = len(excess)
    points = 30 + int(math.sqrt(count))
    quartile = excess[int(count / 4 + 0.5) - 1]
    steps = np.arange(1, points + 1) - 0.5
    theta = 1.0 / excess[-1] + (1.0 - np.sqrt(points / steps)) / (3.0 * quartile)
    k = np.log1p(-theta[:, None] * excess).mean(1)
    log_likelihood = count * (np.log(-theta / k) - k - 1.0)
    weights = np.exp(log_likelihood - log_likelihood.max())
    best = float(theta @ (weights / weights.sum()))
    shape = float(np.log1p(-best * excess).mean())
    return (count * shape + 10 * 0.5) / (count + 10)


@torch.no_grad()
def log_ratios(
    model: BayesianModel, x: Tensor, y: Tensor, kl_weight: float, draws: int, seed: int
) -> Float64[np.ndarray, "K"] | None:
    """Return log p(theta, data) - log q(theta) of draws, up to a constant; none without a density
    or of many rows.

    The likelihood is tempered as the fit's was: its mean over rows over `kl_weight`.
    """
    posterior = model.posterior
    if not isinstance(posterior, LocationScale) or _flops(model, x) * draws > MOST_FLOPS:
        return None
    model.eval()
    eps = standard_noise(draws, posterior.noise_dimension, seed).to(x.device)
    total = torch.zeros(draws, dtype=torch.float64)
    for part, target in zip(x.split(CHUNK_ROWS), y.split(CHUNK_ROWS), strict=True):
        total += (
            model.likelihood.weighted_log_likelihood(model.predict(part, eps, CHUNK_ROWS), target)
            .double()
            .sum(1)
            .cpu()
        )
    return (total / len(x) / kl_weight - _divergence(model, eps).double().cpu()).numpy()


def _divergence(model: BayesianModel, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K"]:
    """Return log q - log p of draws of theta, up to a constant; of the densities also where the KL
    is analytic."""
    posterior = model.posterior
    if not isinstance(posterior, FactorialGaussian):
        return posterior.sample(eps)[1]
    assert isinstance(posterior, LocationScale)
    log_q = log_normal(eps, 1.0) - posterior.moments()[1].log().sum()
    return log_q - posterior.log_prior(posterior(eps))


def _flops(model: BayesianModel, x: Tensor) -> float:
    """Return the operations of all rows under one draw."""
    theta = model.posterior.centre()[None, None]
    with FlopCounterMode(display=False) as counter:
        model.network(x[:1].float(), theta)
    return float(counter.get_total_flops()) * len(x)
