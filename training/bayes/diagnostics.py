"""Diagnostics for a variational fit: the bound, active units and distance to the posterior.

k-hat of Pareto-smoothed importance sampling detects parts of the exact posterior in the tails of
the draws. It does not detect parts that no draw reaches.
"""

import math

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from training.bayes.layers import seed_layers
from training.bayes.network import CHUNK_ROWS, BayesianModel
from training.bayes.posterior import (
    FactorialGaussian,
    log_normal,
    standard_noise,
)
from training.bayes.variational_hypernet import HyperLayer

MAX_ROWS = 10_000  # training rows for the bound
BOUND_DRAWS = 10
SPREAD_DRAWS = 40
UNIT_DRAWS = 200  # for active units
MIN_KL = 0.05  # nats; such as a std of .79 or a mean of .32 prior standard deviations
TINY_VARIANCE = 1e-30
RATIO_DRAWS = 200  # of importance ratios
RATIO_CHUNK_ROWS = 2048
MAX_FLOPS = 4e12  # for importance ratios; half a minute on two cores
TINY = 1e-300  # smallest ratio relative to the largest


@torch.no_grad()
def bound(model: BayesianModel, x: Tensor, y: Tensor, seed: int) -> dict[str, float]:
    """Estimate the negative evidence lower bound, E[-log p(y | x, theta)] + KL / N.

    Returns the bound per row in nats, its terms and its Monte Carlo error.
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, HyperLayer):
            module.train()  # because the layer computes its KL only in training
    seed_layers(seed, x.device)
    eps = standard_noise(BOUND_DRAWS, model.posterior.noise_dimension, seed, device=x.device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    batch = order[:MAX_ROWS].to(x.device)
    nll, kl = torch.zeros(2, BOUND_DRAWS, dtype=torch.float64)
    for chunk in batch.split(CHUNK_ROWS):
        predictions, divergence = model.sample(x[chunk].float(), eps)
        nll -= model.likelihood.weighted_log_likelihood(predictions, y[chunk]).double().sum(1).cpu()
        kl += len(chunk) * divergence.double().cpu()
    nll, kl = nll / len(batch), kl / len(batch)
    total = nll + kl / len(x)
    return {
        "negative_elbo": total.mean().item(),
        "negative_elbo_error": total.std().item() / math.sqrt(BOUND_DRAWS),
        "nll": nll.mean().item(),
        "kl": kl.mean().item(),
    }


def guess_nll(y: Tensor) -> float:
    """Compute the negative log-likelihood of the best constant prediction, in nats.

    The prediction is the class frequencies or a Gaussian with the targets' mean and variance.
    """
    if y.is_floating_point():
        variance = max(y.double().var(correction=0).item(), TINY)
        return 0.5 * math.log(2.0 * math.pi * math.e * variance)
    shares = torch.bincount(y).double() / len(y)
    return float(torch.special.entr(shares).sum())


@torch.no_grad()
def mean_log_std(model: BayesianModel, seed: int) -> float | None:
    """Compute theta's mean log standard deviation, or return None for point estimates."""
    if not model.posterior.spread_parameters():
        return None
    std = _moments(model, seed, SPREAD_DRAWS)[1]
    return std.clamp(min=1e-30).log().mean().item()


@torch.no_grad()
def active_units(model: BayesianModel, seed: int) -> dict[str, tuple[int, int]]:
    """Count each layer's active and total units, if the prior is Gaussian.

    A unit is active if one of its parameters has moved away from the prior N(0, s^2). For the
    parameter's posterior mean m and variance v, this means KL(N(m, v) || N(0, s^2)) > `MIN_KL`.
    """
    posterior = model.posterior
    if posterior.prior_std is None or not posterior.spread_parameters():
        return {}
    mean, std = _moments(model, seed, UNIT_DRAWS)
    variance = (std / posterior.prior_std).square().clamp(min=TINY_VARIANCE)
    kl = 0.5 * (variance + (mean / posterior.prior_std).square() - 1.0 - variance.log())
    slots = getattr(model.network, "slots", [])
    parts = zip(slots, kl.split([slot.size for slot in slots]), strict=True)
    # The last axis of a slot has one entry per unit.
    largest = {slot.name: part.view(-1, slot.shape[-1]).amax(0) for slot, part in parts}
    return {name: (int((part > MIN_KL).sum()), len(part)) for name, part in largest.items()}


def _moments(model: BayesianModel, seed: int, draws: int) -> tuple[Tensor, Tensor]:
    posterior = model.posterior
    if isinstance(posterior, FactorialGaussian):
        return posterior.moments()
    device = next(model.parameters()).device
    theta = posterior(standard_noise(draws, posterior.noise_dimension, seed, device=device))
    return theta.mean(0), theta.std(0)


@torch.no_grad()
def log_ratios(
    model: BayesianModel, x: Tensor, y: Tensor, kl_weight: float, draws: int, seed: int
) -> Float64[np.ndarray, "K"] | None:
    """Compute log p(theta, data) - log q(theta) for each draw, up to a constant.

    The likelihood is tempered as in the fit: its mean over rows, divided by `kl_weight`. Returns
    None if the computation would take too long.
    """
    posterior = model.posterior
    if _flops(model, x) * draws > MAX_FLOPS:
        return None
    model.eval()
    eps = standard_noise(draws, posterior.noise_dimension, seed, device=x.device)
    total = torch.zeros(draws, dtype=torch.float64)
    for part, target in zip(x.split(RATIO_CHUNK_ROWS), y.split(RATIO_CHUNK_ROWS), strict=True):
        predictions = model.predict(part, eps, RATIO_CHUNK_ROWS)
        total += model.likelihood.weighted_log_likelihood(predictions, target).double().sum(1).cpu()
    return (total / len(x) / kl_weight - _divergence(model, eps).double().cpu()).numpy()


def pareto_k(log_ratios: Float64[np.ndarray, "K"]) -> float:
    """Estimate k-hat, the generalised Pareto shape of the largest importance ratios.

    Weighted means are reliable below `pareto_k_threshold` (Vehtari et al. 2024, "Pareto smoothed
    importance sampling"; Yao et al. 2018, "Yes, but did it work?"). A small k-hat does not imply
    that the draws cover the exact posterior. The tail consists of the min(K / 5, 3 sqrt(K)) largest
    ratios. The error at 200 draws is about 0.2.
    """
    largest = np.sort(log_ratios)
    tail = math.ceil(min(0.2 * len(largest), 3.0 * math.sqrt(len(largest))))
    # The first ratio is the threshold of the tail.
    ratios = np.exp(largest[-tail - 1 :] - largest[-1])
    excess = ratios[1:] - ratios[0]
    if excess[-1] < np.finfo(float).eps:
        return 0.0  # all ratios are equal
    return pareto_shape(np.maximum(excess, TINY))


def pareto_k_threshold(draws: int) -> float:
    """Compute the largest acceptable k-hat for S draws, min(1 - 1 / log10 S, 0.7).

    See Vehtari et al. 2024, section 3.2.4.
    """
    return min(1.0 - 1.0 / math.log10(draws), 0.7)


def pareto_shape(excess: Float64[np.ndarray, "M"]) -> float:
    """Estimate the shape of a generalised Pareto distribution from its sorted excesses.

    The estimate is k given the posterior mean of theta = -k / sigma, by quadrature (Zhang and
    Stephens 2009, "A new and efficient estimation method for the generalized Pareto distribution",
    equations 8 and 9). It is regularised by ten pseudo-observations of k = 0.5 (Vehtari et al.
    2024, appendix C).
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


def _divergence(model: BayesianModel, eps: Float[Tensor, "K E"]) -> Float[Tensor, "K"]:
    posterior = model.posterior
    if not isinstance(posterior, FactorialGaussian):
        return posterior.sample(eps)[1]
    log_q = log_normal(eps, 1.0) - posterior.moments()[1].log().sum()
    return log_q - posterior.log_prior(posterior(eps))


def _flops(model: BayesianModel, x: Tensor) -> float:
    theta = model.posterior.centre()[None, None]
    with FlopCounterMode(display=False) as counter:
        model.network(x[:1].float(), theta)
    return float(counter.get_total_flops()) * len(x)
