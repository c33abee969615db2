"""Laplace approximation and Hamiltonian Monte Carlo for a trained network's last layer."""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from model_store.errors import InvalidInput
from training import log
from training.bayes.hamiltonian import SampledPosterior, sample, split_r_hat
from training.bayes.laplace import (
    Eigen,
    LaplacePosterior,
    best_precision,
    log_marginal_likelihood,
    output_hessian,
)
from training.bayes.layers import WeightLayer
from training.bayes.network import CHUNK_ROWS, BayesianModel
from training.bayes.posterior import noise
from training.fitting.stopping import fixed_epochs, is_as_good
from training.methods import Laplace
from training.networks.networks import DrawnNetwork
from training.networks.probes import watch
from training.recipe import Recipe
from training.seeds import Stream, hash_key
from training.versions import Parent

PRIOR_STDS = [10.0 ** (i / 2) for i in range(-6, 5)]  # candidates for held-out rows
STD_TOLERANCE = 0.03  # of log10(prior_std)
LOST_NATS = 0.01  # tolerated loss per held-out row
CHAINS = 10  # of Hamiltonian Monte Carlo
WARM_UP, DRAWS = 200, 200  # per chain
MAX_STEPS = 20  # long enough for layers of a few thousand weights
MAX_OUTPUTS = 5_000_000  # training rows * outputs, each in float64 per chain
VALIDATION_ROWS = 200  # whose outputs determine R-hat
MAX_R_HAT = 1.05


def check_trained(recipe: Recipe, parent: Parent | None) -> None:
    """Check that a post-hoc recipe trains its network or starts from a trained one."""
    if not recipe.posterior.is_post_hoc or fixed_epochs(recipe, parent) != 0:
        return
    if parent is None and not recipe.network.is_trained:
        expected = (
            "1 or more, or a trained network: network.weights, network.start, "
            "or --warm-start of an mle version"
        )
        raise InvalidInput("training.epochs", expected, "0")
    if recipe.data.target_transform == "auto" and parent is None:
        expected = "the transform of the trained network's targets"
        raise InvalidInput("data.target_transform", expected, "'auto'")


@torch.no_grad()
def last_layer_batches(
    model: BayesianModel, x: Tensor
) -> Iterator[tuple[Float[Tensor, "B I"], Float[Tensor, "B O"]]]:
    """Yield the last layer's inputs, with a 1 for any bias, and the outputs for batches of rows."""
    assert isinstance(model.network, DrawnNetwork)
    (layer,) = model.network.get_layers(WeightLayer)
    theta, was_training = model.posterior.centre()[None, None], model.training
    inputs: list[Tensor] = []
    model.eval()
    with watch({"": layer}, lambda _, h: inputs.append(h)):
        for rows in x.split(CHUNK_ROWS):
            outputs = model.network(rows.float(), theta)[0]
            h = inputs.pop().reshape(len(rows), -1)
            yield torch.cat([h, h.new_ones(len(h), 1)], dim=1) if layer.has_bias else h, outputs
    model.train(was_training)


@torch.no_grad()
def curvature(model: BayesianModel, x: Tensor, y: Tensor) -> tuple[Eigen, float]:
    """Compute the loss curvature with respect to the last layer's weights at a model's centre.

    The second result is the log-likelihood in nats, summed over rows with class weights.
    """
    posterior, likelihood = model.posterior, model.likelihood
    assert isinstance(posterior, LaplacePosterior)
    input_sum, output_sum = (
        torch.zeros(size, size, dtype=torch.float64, device=x.device) for size in posterior.shape
    )
    log_likelihood = 0.0
    batches = last_layer_batches(model, x)
    for (a, outputs), targets in zip(batches, y.split(CHUNK_ROWS), strict=True):
        # In float32, p - p^2 and log p are 0 for very confident networks.
        values = outputs.double()
        input_sum += a.T @ a
        output_sum += output_hessian(likelihood, values, targets)
        predictions = likelihood(values[None])
        log_likelihood += likelihood.weighted_log_likelihood(predictions, targets).sum().item()
    return Eigen.from_factors(input_sum, output_sum, len(x)), log_likelihood


def fit_laplace(
    model: BayesianModel,
    section: Laplace,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    seed: int,
    draws: int,
    times: float = 1.0,
) -> dict[str, Any]:
    """Fit a model's Laplace posterior, and return a summary for the manifest.

    Training rows determine the curvature. Validation rows, predicted with `draws` draws, determine
    the prior. `times` is the factor of a tempered log-likelihood.
    """
    start = time.monotonic()
    posterior = model.posterior
    assert isinstance(posterior, LaplacePosterior)
    weights = posterior.theta_dimension
    log.info("computing the curvature of %d weights on %d rows", weights, len(train[0]))
    eigen, log_likelihood = curvature(model, *train)
    eigen = replace(eigen, values=times * eigen.values)
    square = posterior.centre().double().square().sum().item()
    if isinstance(section.prior_std, str):
        precision, reason = best_precision(eigen, square), "by marginal likelihood"
        if not isinstance(posterior, SampledPosterior):
            eps = noise(posterior, draws, seed, Stream.VALIDATION_NOISE, device=train[0].device)
            widest = widest_precision(model, eigen, validation, eps, precision)
            if widest != precision:
                reason = "by held-out likelihood, since marginal likelihood chose a worse "
                precision, reason = widest, f"{reason}{precision**-0.5:.3g}"
    else:
        precision, reason = float(section.prior_std) ** -2, "as configured"
    posterior.spread.widen(eigen, precision)
    evidence = log_marginal_likelihood(times * log_likelihood, eigen, square, precision)
    summary = {
        "weights": weights,
        "prior_std": precision**-0.5,
        "log_marginal_likelihood": evidence,
        "log_likelihood": log_likelihood,
        "determined_weights": eigen.effective_parameters(precision),
        "std": eigen.std(precision).log().mean().exp().item(),
        "seconds": round(time.monotonic() - start, 1),
        "summary": f"laplace, {weights} weights: "
        f"prior_std {precision**-0.5:.3g} {reason}, "
        f"log marginal likelihood {evidence / len(train[0]):.4g} nats a row",
    }
    if isinstance(posterior, SampledPosterior):
        chains = sample_last_layer(model, train, validation[0], precision**-0.5, seed, times)
        summary["summary"] += chains.pop("summary")
        summary["hamiltonian"] = chains
    return summary


def sample_last_layer(
    model: BayesianModel,
    train: tuple[Tensor, Tensor],
    validation: Tensor,
    prior_std: float,
    seed: int,
    times: float = 1.0,
) -> dict[str, Any]:
    """Sample the last layer's posterior, and return a summary for the manifest.

    With theta = mean + spread(u), the chains sample

        log p(u | data) = times sum_n log p(y_n | x_n, theta) - |theta|^2 / (2 prior_std^2)

    where `spread` comes from the Laplace approximation, so u is nearly N(0, I).
    """
    posterior, (x, y) = model.posterior, train
    assert isinstance(posterior, SampledPosterior)
    outputs = posterior.shape[1]
    if len(x) * outputs > MAX_OUTPUTS:
        expected = f"laplace for more than {MAX_OUTPUTS // outputs:,} training rows"
        raise InvalidInput("method", expected, f"last-layer-hmc for {len(x):,}")
    log.info("sampling %d chains of %d weights", CHAINS, posterior.theta_dimension)
    a, tests = (
        torch.cat([inputs.double() for inputs, _ in last_layer_batches(model, rows)])
        for rows in (x, validation[:VALIDATION_ROWS])
    )
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


def widest_precision(
    model: BayesianModel,
    eigen: Eigen,
    rows: tuple[Tensor, Tensor],
    eps: Float[Tensor, "K E"],
    precision: float,
) -> float:
    """Find the smallest acceptable precision that is at least `precision`.

    A precision is acceptable if its mean held-out loss is within `LOST_NATS` or one standard error
    of the lowest loss. The precision with the lowest loss is often infinite, which would remove all
    uncertainty.
    """
    posterior = model.eval().posterior
    assert isinstance(posterior, LaplacePosterior)

    @torch.no_grad()
    def loss_at(width: float) -> Float[Tensor, "N"]:
        posterior.spread.widen(eigen, 10.0 ** (-2.0 * width))
        # All draws share the forward pass up to the last layer.
        theta = posterior(eps)[:, None]
        predictions = model.serve(rows[0], theta, max(1, 8 * CHUNK_ROWS // len(theta)))
        return -model.likelihood.mixture_log_likelihood(predictions, rows[1])

    start = -0.5 * math.log10(precision)
    widths = [*(math.log10(std) for std in PRIOR_STDS if math.log10(std) < start), start]
    losses = [loss_at(width) for width in widths]
    lowest = min(losses, key=lambda loss: torch.nan_to_num(loss, torch.inf).mean().item())

    def is_good(loss: Float[Tensor, "N"]) -> bool:
        if not loss.isfinite().all():
            return False
        excess = (loss - lowest).mean().item()
        return excess <= LOST_NATS or is_as_good(loss, lowest, paired=True)

    good = max((i for i, loss in enumerate(losses) if is_good(loss)), default=0)
    if good == len(widths) - 1:
        return precision
    low, high = widths[good], widths[good + 1]
    while high - low > STD_TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if is_good(loss_at(middle)) else (low, middle)
    return 10.0 ** (-2.0 * low)
