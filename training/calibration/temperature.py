"""Temperature: one for what a fitted model says, where held-out log-likelihood asks for it.

Each draw's p(y | x, theta) becomes p(y | x, theta)^(1/T), normalised: of classes, logits are
divided by T (Guo et al., "On calibration of modern neural networks", 2017); of a Gaussian,
variances are multiplied by T. T maximises

    sum_n log mean_k p_T(y_n | x_n, theta_k) - (log T)^2 / (2 PRIOR_STD^2)

over validation rows, the mean over draws being what is served. The second term, a normal prior on
log T, counts only where rows are few: of rows that are all predicted rightly the likelihood alone
would take T to 0.

T is kept if it pays on rows that it was not fitted on: with one half of the rows fitted, the other
measured, and the other way about, the mean gain in log-likelihood must be more than its standard
error. Else T is 1.
"""

import math

import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from torch import Tensor

from training.bayes.likelihoods import Likelihood
from training.bayes.network import BayesianModel
from training.bayes.posterior import noise
from training.data import Rows
from training.provenance import TemperatureChoice
from training.seeds import Stream

PRIOR_STD = 0.5  # of log T
LARGEST = 10.0  # T, and the smallest is its inverse
PRECISION = 1e-3  # of log T
HELD_OUTPUTS = 20_000_000  # numbers, of all draws of validation rows


def set_temperature(
    model: BayesianModel, validation: Rows, draws: int, seed: int
) -> TemperatureChoice:
    likelihood = model.likelihood
    likelihood.temperature.fill_(1.0)
    draws = min(draws, model.posterior.max_draws or draws)
    device = likelihood.temperature.device
    rows = max_rows_for(likelihood, draws)
    x, y = (torch.from_numpy(of[:rows]).to(device) for of in (validation.x, validation.y))
    eps = noise(model.posterior, draws, seed, Stream.TEMPERATURE, device=device)
    temperature = choose_temperature(likelihood, model.predict(x, eps).double(), y)
    likelihood.temperature.fill_(temperature.value)
    return temperature


def max_rows_for(likelihood: Likelihood, draws: int) -> int:
    return max(2, HELD_OUTPUTS // (draws * likelihood.outputs))


def choose_temperature(
    likelihood: Likelihood, served: Float[Tensor, "K N C"], y: Tensor
) -> TemperatureChoice:
    if len(y) < 2:
        return TemperatureChoice(value=1.0, fitted=1.0, gain=0.0, standard_error=0.0)
    before = likelihood.mixture_log_likelihood(served, y)
    gain = torch.empty_like(before)
    halves = torch.arange(len(y), device=y.device) % 2 == 0
    for fitted, measured in ((halves, ~halves), (~halves, halves)):
        t = fit_temperature(likelihood, served[:, fitted], y[fitted])
        tempered = likelihood.tempered(served[:, measured], t)
        after = likelihood.mixture_log_likelihood(tempered, y[measured])
        gain[measured] = after - before[measured]
    mean, error = gain.mean().item(), gain.std().item() / math.sqrt(len(gain))
    fitted_t = fit_temperature(likelihood, served, y)
    value = fitted_t if mean > error else 1.0
    return TemperatureChoice(value=value, fitted=fitted_t, gain=mean, standard_error=error)


def fit_temperature(likelihood: Likelihood, served: Float[Tensor, "K N C"], y: Tensor) -> float:
    """Return the T that maximises the penalised log-likelihood, by a bounded search over log T."""

    def loss(log_t: float) -> float:
        tempered = likelihood.tempered(served, math.exp(log_t))
        held_out = likelihood.mixture_log_likelihood(tempered, y).sum().item()
        return 0.5 * (log_t / PRIOR_STD) ** 2 - held_out

    bound = math.log(LARGEST)
    found = minimize_scalar(
        loss, bounds=(-bound, bound), method="bounded", options={"xatol": PRECISION}
    )
    return math.exp(found.x)
