"""Whether a variational posterior has converged, and how well it covers what it approximates.

A bound that is level proves little where the learning rate has decayed to nothing. So the spread is
asked too: where theta = c + s z and the bound's slope along log s is 0, the mean of
(theta - c) d(-log p(theta, data))/dtheta is 1 for every coordinate. What it exceeds 1 by is `pull`:
for a quadratic log-density it is variance / best variance - 1. How well it covers is k-hat, of
Pareto-smoothed importance sampling.
"""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from training.bayes.network import BayesianModel
from training.bayes.posterior import FactorialGaussian, LocationScale, log_normal, standard_noise
from training.bayes.variational_hypernet import HyperLayer
from training.fitting.steps import seed_layers
from training.seeds import Stream, hash_key

ROWS = 10_000  # training rows, at most, that the bound is measured on
CHUNK_ROWS = 512
DRAWS = 10  # of the bound
PULL_DRAWS = 40  # each with a minibatch of its own
SPREAD_DRAWS = 40
WINDOW = 0.2  # share of the epochs, the last, over which curves must be level
HALF_WINDOW = 0.05  # share of the epochs, around half of the path and at its end
# a bound's fall over half of the path, a spread's rise an epoch: shares below which they are level
LEVEL = 0.01
EXPONENT = 0.5  # of the path, to minus which what is left falls, as on digits
SETTLED_PULL = 0.25
RATIO_DRAWS = 200  # of importance ratios
RATIO_CHUNK_ROWS = 2048
MOST_FLOPS = 4e12  # of the ratios of all rows and draws: half a minute on two cores
LEAST_TAIL = 5  # ratios that a tail is fitted to
TINY = 1e-300  # of ratios over the largest: less counts as this


def log_std_by_layer(model: BayesianModel, seed: int) -> dict[str, float]:
    """Return the mean of theta's log standard deviation over each layer's numbers; nothing if it
    has no width."""
    posterior = model.posterior
    if not posterior.spread_parameters():
        return {}
    with torch.no_grad():
        if isinstance(posterior, FactorialGaussian):
            std = posterior.moments()[1]
        else:
            device = next(model.parameters()).device
            eps = standard_noise(SPREAD_DRAWS, posterior.noise_dimension, seed, device=device)
            std = posterior(eps).std(0)
    parts = _by_layer(model, std.clamp(min=1e-30))
    return {name: part.log().mean().item() for name, part in parts.items()}


def mean_log_std(model: BayesianModel, by_layer: dict[str, float]) -> float:
    slots = getattr(model.network, "slots", [])
    return sum(slot.size * by_layer[slot.name] for slot in slots) / sum(slot.size for slot in slots)


@torch.no_grad()
def bound(model: BayesianModel, x: Tensor, y: Tensor, rows: int, seed: int) -> dict[str, float]:
    """Return the negative evidence lower bound per row of `rows`, in nats, with its parts and Monte
    Carlo error."""
    model.eval()
    for module in model.modules():
        if isinstance(module, HyperLayer):
            module.train()  # else it says no KL
    seed_layers(seed, x.device)
    eps = standard_noise(DRAWS, model.posterior.noise_dimension, seed, device=x.device)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    taken = order[:ROWS].to(x.device)
    nll, kl = torch.zeros(2, DRAWS, dtype=torch.float64)
    for chunk in taken.split(CHUNK_ROWS):
        served, divergence = model.sample(x[chunk].float(), eps)
        nll -= model.likelihood.weighted_log_likelihood(served, y[chunk]).double().sum(1).cpu()
        kl += len(chunk) * divergence.double().cpu()
    nll, kl = nll / len(taken), kl / len(taken)
    total = nll + kl / rows
    return {
        "negative_elbo": total.mean().item(),
        "negative_elbo_error": total.std().item() / math.sqrt(DRAWS),
        "nll": nll.mean().item(),
        "kl": kl.mean().item(),
    }


def guess_nll(y: Tensor) -> float:
    """Return -log p of a row, in nats, by the best answer that is the same for all: the classes'
    shares, or a Gaussian of the targets."""
    if y.is_floating_point():
        variance = max(y.double().var(correction=0).item(), TINY)
        return 0.5 * math.log(2.0 * math.pi * math.e * variance)
    shares = torch.bincount(y).double() / len(y)
    return float(torch.special.entr(shares).sum())


def pulls(
    model: BayesianModel, x: Tensor, y: Tensor, kl_weight: float, seed: int
) -> dict[str, tuple[float, float]]:
    """Return each layer's mean pull and its Monte Carlo error; nothing if the posterior is not of
    that form."""
    posterior = model.posterior
    if not isinstance(posterior, LocationScale) or (location := posterior.location()) is None:
        return {}
    model.eval()
    seen: dict[str, list[float]] = {}
    for i in range(PULL_DRAWS):
        generator = torch.Generator().manual_seed(hash_key(seed, Stream.PULL, i))
        chunk = torch.randperm(len(x), generator=generator)[:CHUNK_ROWS].to(x.device)
        eps = torch.randn(1, model.posterior.noise_dimension, generator=generator).to(x.device)
        theta = model.posterior(eps).detach().requires_grad_()
        served = model.likelihood(model.network(x[chunk].float(), theta[:, None])[0])
        log_joint = model.likelihood.weighted_log_likelihood(served, y[chunk]).mean() / kl_weight
        log_joint = log_joint + posterior.log_prior(theta).sum()
        (slope,) = torch.autograd.grad(-log_joint, theta)
        pull = ((theta.detach() - location.detach()) * slope)[0] - 1.0
        for name, part in _by_layer(model, pull).items():
            seen.setdefault(name, []).append(part.mean().item())
    return {
        name: (float(np.mean(v)), float(np.std(v, ddof=1) / math.sqrt(len(v))))
        for name, v in seen.items()
    }


def convergence(
    model: BayesianModel,
    train: tuple[Tensor, Tensor],
    history: list[dict[str, float | int]],
    kl_weight: float,
    start: dict[str, float],
    seed: int,
) -> dict[str, Any]:
    """Return what the manifest says of a variational fit's end; `says` is one line of it."""
    facts: dict[str, Any] = bound(model, *train, len(train[0]), seed)
    if getattr(model.likelihood, "log_weights", None) is None:
        facts["guess_nll"] = guess_nll(train[1])
    slopes = {
        key: slope([m[key] for m in history])
        for key in ("objective", "log_std")
        if key in history[-1]
    }
    facts["objective_slope"], facts["objective_slope_error"] = slopes["objective"]
    if "log_std" in slopes:
        facts["spread_rise"] = math.expm1(slopes["log_std"][0])
    ends, pulled = log_std_by_layer(model, seed), pulls(model, *train, kl_weight, seed)
    prior_std = getattr(model.posterior, "prior_std", None)
    facts["layers"] = {
        name: {
            "std": math.exp(end),
            **({"start_std": math.exp(start[name])} if name in start else {}),
            **({} if prior_std is None else {"prior_std": prior_std}),
            **({"pull": pulled[name][0], "pull_error": pulled[name][1]} if name in pulled else {}),
        }
        for name, end in ends.items()
    }
    ratios = log_ratios(model, *train, kl_weight, RATIO_DRAWS, hash_key(seed, Stream.IMPORTANCE))
    if ratios is not None:
        facts["pareto_k"] = pareto_k(ratios)
    faults = list(_faults(facts, history))
    facts["settled"] = not faults
    facts["says"] = "the posterior has settled"
    if faults:
        facts["says"] = "the posterior had not converged: " + "; ".join(faults)
    return facts


def slope(values: list[float | int], share: float = WINDOW) -> tuple[float, float]:
    """Return the slope an epoch of the last epochs' values, a share of all, and its error, by least
    squares."""
    last = np.array(values[-_window(len(values), share) :], dtype=np.float64)
    if len(last) < 3:
        return math.nan, math.nan
    epochs = np.arange(len(last)) - (len(last) - 1) / 2
    fitted = float(epochs @ last / (epochs @ epochs))
    residuals = last - last.mean() - fitted * epochs
    variance = float(residuals @ residuals) / (len(last) - 2) / float(epochs @ epochs)
    return fitted, math.sqrt(variance)


def later_fall(history: list[dict[str, float | int]]) -> tuple[float, float]:
    """Return by how much the bound fell while means went the later half of their path, the sum of
    learning rates, and its error.

    Rates that have decayed hide in an epoch's slope what is left to fall, but not in this: a path
    twice as long would bring about as much again, less where it slows down.
    """
    path = np.cumsum([m["learning_rate"] for m in history])
    half, window = int(np.searchsorted(path, path[-1] / 2)), _window(len(history), HALF_WINDOW)
    begin = max(0, half - window // 2)
    bounds = np.array([m["objective"] for m in history], dtype=np.float64)
    then, now = bounds[begin : begin + window], bounds[-window:]
    return float(then.mean() - now.mean()), float(now.std(ddof=1) * math.sqrt(2 / window))


def _window(epochs: int, share: float = WINDOW) -> int:
    return max(3, math.ceil(share * epochs))


def _faults(facts: dict[str, Any], history: list[dict[str, float | int]]) -> list[str]:
    if len(history) < 3:
        return ["too few epochs to tell"]
    faults = []
    size = abs(float(np.mean([m["objective"] for m in history[-_window(len(history)) :]])))
    fall, error = later_fall(history)
    if fall > max(2 * error, LEVEL * size):
        share, times = 100 * fall / size, math.ceil((fall / (LEVEL * size)) ** (1 / EXPONENT))
        longer = "more than ten" if times > 10 else f"about {times}"
        fell = f"its bound fell {share:.2g} % over the later half of its means' path"
        wants = f"so it wants {longer} times as many epochs"
        faults.append(f"{fell}, {wants} (fit --warm-start goes on from its version)")
    rise = facts.get("spread_rise", 0.0)
    if abs(rise) > LEVEL:
        went = "rose" if rise > 0 else "fell"
        faults.append(f"its spread still {went} {100 * abs(rise):.2g} % an epoch")
    for name, layer in facts["layers"].items():
        pull = layer.get("pull", 0.0)
        if abs(pull) > max(SETTLED_PULL, 3 * layer.get("pull_error", 0.0)):
            wants = "less" if pull > 0 else "more"
            faults.append(f"the bound wants {wants} spread in layer {name}")
    return faults


def _by_layer(model: BayesianModel, values: Tensor) -> dict[str, Tensor]:
    slots = getattr(model.network, "slots", [])
    parts = values.split([slot.size for slot in slots])
    return {slot.name: part for slot, part in zip(slots, parts, strict=True)}


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
        expected = f"expected at least {5 * LEAST_TAIL} draws"
        raise ValueError(f"log_ratios: {expected}, got {len(log_ratios)}")
    # the largest is 1, and the first the tail's threshold
    ratios = np.exp(largest[-tail - 1 :] - largest[-1])
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
    eps = standard_noise(draws, posterior.noise_dimension, seed, device=x.device)
    total = torch.zeros(draws, dtype=torch.float64)
    for part, target in zip(x.split(RATIO_CHUNK_ROWS), y.split(RATIO_CHUNK_ROWS), strict=True):
        served = model.predict(part, eps, RATIO_CHUNK_ROWS)
        total += model.likelihood.weighted_log_likelihood(served, target).double().sum(1).cpu()
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
    theta = model.posterior.centre()[None, None]
    with FlopCounterMode(display=False) as counter:
        model.network(x[:1].float(), theta)
    return float(counter.get_total_flops()) * len(x)
