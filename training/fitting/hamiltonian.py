"""Hamiltonian Monte Carlo over the weights of a network's last layer."""

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from model_store.errors import InvalidInput
from training import log
from training.bayes.hamiltonian import SampledPosterior, sample, split_r_hat
from training.bayes.network import BayesianModel
from training.seeds import Stream, hash_key

CHAINS = 10
WARM_UP, DRAWS = 200, 200  # per chain
MAX_STEPS = 20  # long enough for layers of a few thousand weights
MAX_OUTPUTS = 5_000_000  # training rows * outputs, each in float64 per chain
VALIDATION_ROWS = 200
MAX_R_HAT = 1.05


def sample_last_layer(
    model: BayesianModel,
    train: tuple[Float[Tensor, "N I"], Tensor],
    tests: Float[Tensor, "M I"],
    prior_std: float,
    seed: int,
    times: float = 1.0,
) -> dict[str, Any]:
    """Sample the last layer's posterior, and return a summary for the manifest.

    With theta = mean + spread(u), the chains sample

        log p(u | data) = times sum_n log p(y_n | x_n, theta) - |theta|^2 / (2 prior_std^2)

    where `spread` comes from the Laplace approximation, so u is nearly N(0, I).

    Args:
        model: a model with a fitted Laplace approximation.
        train: the last layer's inputs for the training rows, in float64, and the targets.
        tests: its inputs for the rows for whose outputs R-hat is computed.
        prior_std: the standard deviation of the prior on the weights.
        seed: the seed of the chains.
        times: the factor of the log-likelihood, 1 unless it is tempered.
    """
    posterior, (a, y) = model.posterior, train
    assert isinstance(posterior, SampledPosterior)
    outputs = posterior.shape[1]
    if len(a) * outputs > MAX_OUTPUTS:
        expected = f"laplace for more than {MAX_OUTPUTS // outputs:,} training rows"
        raise InvalidInput("method", expected, f"last-layer-hmc for {len(a):,}")
    log.info("sampling %d chains of %d weights", CHAINS, posterior.theta_dimension)
    mean, spread = posterior.mean.detach().double(), copy.deepcopy(posterior.spread).double()
    likelihood = copy.deepcopy(model.likelihood).double()

    def weights(u: Tensor) -> Tensor:
        return mean + spread(u)

    def log_density(u: Tensor) -> Tensor:
        theta = weights(u)
        predictions = likelihood(a @ theta.unflatten(1, posterior.shape))
        log_likelihood = likelihood.weighted_log_likelihood(predictions, y).sum(1)
        return times * log_likelihood - theta.square().sum(1) / (2.0 * prior_std**2)

    random = torch.Generator().manual_seed(hash_key(seed, Stream.CHAINS))
    start = torch.randn(CHAINS, posterior.theta_dimension, generator=random, dtype=torch.float64)
    chains, accepted = sample(log_density, start.to(a), WARM_UP, DRAWS, random, MAX_STEPS)
    with torch.no_grad():
        theta = weights(chains.flatten(0, 1))
        values = tests @ theta.unflatten(1, posterior.shape)
        r_hat = split_r_hat(values.unflatten(0, chains.shape[:2])).max().item()
    kept = torch.linspace(0, len(theta) - 1, len(posterior.deviations)).round().long()
    posterior.keep(theta[kept.to(theta.device)])
    summary = f"; {CHAINS} chains: largest R-hat {r_hat:.3f}, {100 * accepted:.0f} % accepted"
    if r_hat > MAX_R_HAT:
        summary += "; ! the chains have not converged; try a smaller posterior.prior_std"
    return {"chains": CHAINS, "r_hat": r_hat, "accepted": accepted, "summary": summary}
