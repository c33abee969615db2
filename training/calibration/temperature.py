"""Temperature scaling of a fitted model.

Each draw's p(y | x, theta) becomes p(y | x, theta)^(1/T), normalised. For classes, logits are
divided by T (Guo et al. 2017, "On calibration of modern neural networks"). For a Gaussian,
variances are multiplied by T. T maximises

    sum_n log mean_k p_T(y_n | x_n, theta_k) - (log T)^2 / (2 PRIOR_STD^2)

over validation rows. The second term is a normal prior on log T. It matters if there are few rows:
if all are predicted correctly, the likelihood alone would favour T = 0.

T stays 1 unless it improves the log-likelihood in two-fold cross-validation by more than the
standard error.
"""

import math

import torch
from jaxtyping import Float
from scipy.optimize import minimize_scalar
from torch import Tensor

from training.bayes.likelihoods import Likelihood
from training.bayes.network import BayesianModel
from training.bayes.posterior import noise
from training.data.rows import Rows
from training.seeds import Stream
from training.versions import TemperatureChoice

Outputs = Float[Tensor, "K N C"]
PRIOR_STD = 0.5  # of log T
MAX_TEMPERATURE = 10.0  # the minimum is its inverse
PRECISION = 1e-3  # of log T
MAX_OUTPUTS = 20_000_000  # numbers in memory, over draws and validation rows


def set_temperature(
    model: BayesianModel, validation: Rows, draws: int, seed: int
) -> TemperatureChoice:
    likelihood = model.likelihood
    likelihood.temperature.fill_(1.0)
    draws = min(draws, model.posterior.max_draws or draws)
    device = likelihood.temperature.device
    rows = max_rows_for(likelihood, draws)
    x, y = (torch.from_numpy(part[:rows]).to(device) for part in (validation.x, validation.y))
    eps = noise(model.posterior, draws, seed, Stream.TEMPERATURE, device=device)
    temperature = choose_temperature(likelihood, model.predict(x, eps).double(), y)
    likelihood.temperature.fill_(temperature.value)
    return temperature


def max_rows_for(likelihood: Likelihood, draws: int) -> int:
    return max(2, MAX_OUTPUTS // (draws * likelihood.outputs))


def choose_temperature(
    likelihood: Likelihood, predictions: Outputs, y: Tensor
) -> TemperatureChoice:
    if len(y) < 2:
        return TemperatureChoice(value=1.0, fitted=1.0, gain=0.0, standard_error=0.0)
    before = likelihood.mixture_log_likelihood(predictions, y)
    gain = torch.empty_like(before)
    halves = torch.arange(len(y), device=y.device) % 2 == 0
    for train, test in ((halves, ~halves), (~halves, halves)):
        t = fit_temperature(likelihood, predictions[:, train], y[train])
        tempered = likelihood.tempered(predictions[:, test], t)
        after = likelihood.mixture_log_likelihood(tempered, y[test])
        gain[test] = after - before[test]
    mean, error = gain.mean().item(), gain.std().item() / math.sqrt(len(gain))
    optimum = fit_temperature(likelihood, predictions, y)
    value = optimum if mean > error else 1.0
    return TemperatureChoice(value=value, fitted=optimum, gain=mean, standard_error=error)


def fit_temperature(likelihood: Likelihood, predictions: Outputs, y: Tensor) -> float:
    def loss(log_t: float) -> float:
        tempered = likelihood.tempered(predictions, math.exp(log_t))
        log_likelihood = likelihood.mixture_log_likelihood(tempered, y).sum().item()
        return 0.5 * (log_t / PRIOR_STD) ** 2 - log_likelihood

    bound, options = math.log(MAX_TEMPERATURE), {"xatol": PRECISION}
    optimum = minimize_scalar(loss, bounds=(-bound, bound), method="bounded", options=options)
    return math.exp(optimum.x)
