"""From a network's trained weights to Laplace's approximation around them, and the prior that goes
with it.

With H = U diag(lambda) U', theta's centre m and a prior N(0, I / precision), Laplace's log marginal
likelihood is

    log p(data) = log p(data | m) - (sum_i log(1 + lambda_i / precision) + precision |m|^2) / 2

(MacKay 1992, "A practical Bayesian framework for backpropagation networks"). Its one maximum over
the precision is where sum_i lambda_i / (lambda_i + precision), the number of weights that the data
determine, is precision |m|^2. It is exact where outputs are linear in theta, noise is Gaussian and
m is the posterior's mean.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor

from model_store.errors import InvalidInput
from training import log
from training.bayes.laplace import CHOICES, Eigen, LaplacePosterior, LaplaceSection
from training.bayes.layers import WeightLayer
from training.bayes.likelihoods import SPEED, Gaussian
from training.bayes.posterior import noise
from training.fitting.curvature import Curvature, curvature
from training.fitting.early_stopping import is_as_good
from training.model import CHUNK_ROWS, BayesianModel
from training.networks.networks import DrawnNetwork
from training.recipe import Recipe
from training.seeds import Stream, hash_key
from training.versions import Parent

MOST = 1e4  # of the prior's standard deviation, and 1 / MOST the least
GRID = [10.0 ** (i / 2) for i in range(-6, 5)]  # standard deviations tried on held-out rows
FINER = 0.03  # of the logarithm to base 10
# a held-out row, by which a posterior may be worse than its centre or a narrower one in silence
LOST_NATS = 0.01
HELD_NUMBERS = 16_000_000  # of theta at a time


def check_trained(recipe: Recipe, parent: Parent | None) -> None:
    """Check that a recipe of laplace either trains its network or has one that is trained."""
    if not recipe.inference.is_fitted_after or epochs_told(recipe, parent) != 0:
        return
    if parent is None and not recipe.network.is_trained:
        expected = (
            "1 or more, or a trained network: network.weights, network.start, "
            "or --warm-start of an mle version"
        )
        raise InvalidInput("training.epochs", expected, "0")
    if recipe.data.target_transform == "auto" and parent is None:
        expected = "what the trained network's outputs are of"
        raise InvalidInput("data.target_transform", expected, "'auto'")


def epochs_told(recipe: Recipe, parent: Parent | None) -> int | None:
    """Return how many epochs a fit is told to have: none of laplace for a network that was trained
    before."""
    is_trained = recipe.network.is_trained or parent is not None
    is_done = recipe.inference.is_fitted_after and is_trained
    return 0 if is_done and recipe.training.epochs is None else recipe.training.epochs


def fit_laplace(
    model: BayesianModel,
    section: LaplaceSection,
    train: tuple[Tensor, Tensor],
    validation: tuple[Tensor, Tensor],
    seed: int,
    draws: int,
    times: float = 1.0,
    finds_noise: bool = False,
) -> dict[str, Any]:
    """Give a model of trained weights its posterior, and return what the manifest says of it.

    Args:
        model: whose posterior has its mean.
        section: the structure, and how the prior is chosen.
        train: rows and targets that the curvature is of.
        validation: rows and targets that choose the prior where they are asked to.
        seed: of draws on these, and of random columns.
        draws: how many.
        times: what the log-likelihood is multiplied with, 1 unless it is tempered.
        finds_noise: whether a regression's lone noise is the root mean squared error, since nothing
            fitted it.
    """
    begun = time.monotonic()
    posterior = model.posterior
    assert isinstance(posterior, LaplacePosterior)
    assert isinstance(model.network, DrawnNetwork)
    log.info("curvature of %d weights over %d rows", posterior.theta_dimension, len(train[0]))
    found = curvature(model, *train, hash_key(seed, Stream.CURVATURE))
    if finds_noise:
        found = _with_found_noise(model, found, len(train[0]))
    eigens = [Eigen(times * eigen.values, eigen.vectors) for eigen in found.eigens]
    square = posterior.centre().double().square().sum().item()
    facts: dict[str, Any] = {"structure": posterior.structure, "weights": posterior.theta_dimension}
    if section.prior_std in CHOICES:
        device = train[0].device
        eps = noise(posterior, draws, seed, Stream.VALIDATION_NOISE, device=device)
        losses = _Losses(model, eigens, validation, eps)
        precision, how = best_precision(eigens, square), "by marginal likelihood"
        if section.prior_std == "held-out":
            precision, how = losses.best_precision(), "by held-out likelihood"
        elif section.prior_std == "auto":
            widest = losses.widest_precision(precision)
            if widest != precision:
                how = f"by held-out likelihood, which loses by the {precision**-0.5:.3g} of "
                precision, how = widest, f"{how}marginal likelihood"
    else:
        precision, how = float(section.prior_std) ** -2, "as told"
    posterior.widen(eigens, precision)
    evidence = log_marginal_likelihood(times * found.log_likelihood, eigens, square, precision)
    return facts | {
        "prior_std": precision**-0.5,
        "log_marginal_likelihood": evidence,
        "log_likelihood": found.log_likelihood,
        "determined_weights": effective_parameters(eigens, precision),
        "layers": {
            slot.name: {"std": eigen.std(precision).log().mean().exp().item()}
            for slot, eigen in zip(model.network.slots, eigens, strict=True)
        },
        "random_columns": found.columns,
        "seconds": round(time.monotonic() - begun, 1),
        "says": f"laplace, {posterior.structure}, of {posterior.theta_dimension} weights: "
        f"prior_std {precision**-0.5:.3g} {how}, "
        f"log marginal likelihood {evidence / len(train[0]):.4g} nats a row",
    }


def effective_parameters(eigens: list[Eigen], precision: float) -> float:
    """Return how many weights the data determine, sum_i lambda_i / (lambda_i + precision)."""
    return sum((eigen.values / (eigen.values + precision)).sum().item() for eigen in eigens)


def log_marginal_likelihood(
    log_likelihood: float, eigens: list[Eigen], square: float, precision: float
) -> float:
    """Return log p(data) in nats, given log p(data | m) and |m|^2."""
    log_det = sum(torch.log1p(eigen.values / precision).sum().item() for eigen in eigens)
    return log_likelihood - 0.5 * (log_det + precision * square)


def best_precision(eigens: list[Eigen], square: float) -> float:
    """Return the prior's precision of the largest marginal likelihood, within MOST^-2 and
    MOST^2."""

    def excess(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return effective_parameters(eigens, precision) - precision * square

    low, high = -2.0 * math.log(MOST), 2.0 * math.log(MOST)
    if excess(low) <= 0.0:
        return math.exp(low)
    if excess(high) >= 0.0:
        return math.exp(high)
    return math.exp(brentq(excess, low, high, xtol=1e-6))


@dataclass(frozen=True, eq=False)
class _Losses:
    """How unlikely held-out rows are under each width of the prior, by the same noise for all; a
    width is the logarithm of its standard deviation to base 10."""

    model: BayesianModel
    eigens: list[Eigen]
    rows: tuple[Tensor, Tensor]
    eps: Tensor

    def __call__(self, width: float) -> Float[Tensor, "N"]:
        posterior = self.model.eval().posterior
        assert isinstance(posterior, LaplacePosterior)
        posterior.widen(self.eigens, 10.0 ** (-2.0 * width))
        served = predict_rows(self.model, self.rows[0], self.eps)
        return -self.model.likelihood.mixture_log_likelihood(served, self.rows[1])

    def mean(self, width: float) -> float:
        value = self(width).mean().item()
        return value if math.isfinite(value) else math.inf

    def best_precision(self) -> float:
        tried = [math.log10(std) for std in GRID]
        losses = [self.mean(width) for width in tried]
        best = min(range(len(tried)), key=losses.__getitem__)
        bounds = tried[max(best - 1, 0)], tried[min(best + 1, len(tried) - 1)]
        found = minimize_scalar(
            self.mean, bounds=bounds, method="bounded", options={"xatol": FINER}
        )
        return 10.0 ** (-2.0 * (float(found.x) if found.fun <= losses[best] else tried[best]))

    def widest_precision(self, precision: float) -> float:
        """Return a precision, or if rows are less likely under it than under the best of larger
        ones, beyond a standard error and `LOST_NATS`, the smallest at which they are not.

        The very best would often be infinite: draws that all agree predict a little better, and
        doubt nothing.
        """
        told = -0.5 * math.log10(precision)
        widths = [*(math.log10(std) for std in GRID if math.log10(std) < told), told]
        losses = [self(width) for width in widths]
        lowest = min(losses, key=lambda loss: torch.nan_to_num(loss, torch.inf).mean().item())

        def is_good(loss: Float[Tensor, "N"]) -> bool:
            if not loss.isfinite().all():
                return False
            lost = (loss - lowest).mean().item()
            return lost <= LOST_NATS or is_as_good(loss, lowest, paired=True)

        good = max((i for i, loss in enumerate(losses) if is_good(loss)), default=0)
        if good == len(widths) - 1:
            return precision
        low, high = widths[good], widths[good + 1]
        while high - low > FINER:
            middle = (low + high) / 2
            low, high = (middle, high) if is_good(self(middle)) else (low, middle)
        return 10.0 ** (-2.0 * low)


@torch.no_grad()
def predict_rows(model: BayesianModel, x: Tensor, eps: Tensor) -> Tensor:
    """Return what is served of each draw and row: what comes before the first drawn layer once for
    all draws."""
    theta = model.posterior(eps)[:, None]
    assert isinstance(model.network, DrawnNetwork)
    layers = model.network.layers_of(WeightLayer)
    if any(layer.convolution is not None for layer in layers) or theta.numel() > HELD_NUMBERS:
        return model.predict(x, eps)
    return model.serve(x, theta, max(1, 8 * CHUNK_ROWS // len(theta)))


def _with_found_noise(model: BayesianModel, found: Curvature, rows: int) -> Curvature:
    """Set a regression's noise to the root mean squared error, and return the curvature under
    it."""
    likelihood = model.likelihood
    assert isinstance(likelihood, Gaussian)
    assert likelihood.log_variance is not None
    target_variance = likelihood.target_std.item() ** 2
    variance = max(found.square_error / rows, 1e-12 * target_variance)
    outputs = torch.zeros(1, 1, 1).to(likelihood.target_std)
    with torch.no_grad():
        before = likelihood(outputs)[0, 0, 1].exp().item()
        likelihood.log_variance.fill_(math.log(variance / target_variance) / SPEED)
        after = likelihood(outputs)[0, 0, 1].exp().item()
    log_likelihood = -0.5 * (rows * math.log(2 * math.pi * after) + found.square_error / after)
    eigens = tuple(Eigen(eigen.values * (before / after), eigen.vectors) for eigen in found.eigens)
    return Curvature(eigens, log_likelihood, found.square_error, found.columns)
