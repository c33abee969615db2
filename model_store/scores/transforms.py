"""Transformed regression targets, where the network learns z = g(y) to predict y.

Under draw k, z is Gaussian with mean m_k and variance s_k^2. The prediction is y = h(z), where h is
the inverse of g, clipped below at the target's smallest possible value, if it has one. It follows:

* Quantiles are exact: h maps quantiles of z to quantiles of y. This includes the median and the
  ends of intervals. y is in h([a, b]) if and only if z is in [a, b].
* The density of y is the density of z times g'(y), so log-likelihoods add log g'(y). The
  distribution function of y at y equals the distribution function of z at g(y).
* Mean and variance of y under a draw use Gauss-Hermite quadrature,
  E h(z) = sum_i w_i h(m_k + s_k t_i). Squares about the quadrature's mean keep the variance
  nonnegative, and the target's scale cancels.

Axes: K draws, N rows. All functions are elementwise in float64, so a row has the same bits alone
and in a batch.
"""

import math
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float, Float64
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

NODES = 24  # variance of a log-normal with log std 1: exact to 1e-9
MAX_LOG = 300.0  # targets are clipped at e^300, whose square is finite
NUM_BISECTIONS = 40  # to find a median

Array = Float64[np.ndarray, "*shape"]

# Nodes and weights of the Gauss-Hermite quadrature for N(0, 1)
_nodes, _weights = np.polynomial.hermite_e.hermegauss(NODES)
QUADRATURE = list(zip(_nodes.tolist(), (_weights / _weights.sum()).tolist(), strict=True))


class TransformRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LogTransform(TransformRecord):
    """The transform z = log(y + offset), where y is at least `least`."""

    kind: Literal["log"] = "log"
    offset: Annotated[FiniteFloat, Field(ge=0)]
    least: FiniteFloat | None = 0.0


class RankTransform(TransformRecord):
    """A rank transform to normal scores, with linear interpolation between `values`.

    The first and last pieces extend beyond these values. y is at least `least`.
    """

    kind: Literal["rank"] = "rank"
    values: Annotated[tuple[FiniteFloat, ...], Field(min_length=2)]
    scores: Annotated[tuple[FiniteFloat, ...], Field(min_length=2)]
    least: FiniteFloat | None = None


Transform = LogTransform | RankTransform


def to_fitted(transform: Transform, y: Float[np.ndarray, "*shape"]) -> Array:
    """Compute z = g(y), or -inf where the logarithm is undefined."""
    y = np.asarray(y, dtype=np.float64)
    if isinstance(transform, LogTransform):
        shifted = y + transform.offset
        return np.log(shifted, out=np.full(y.shape, -math.inf), where=shifted > 0)
    return _piecewise_linear(y, np.array(transform.values), np.array(transform.scores))


def to_target(transform: Transform, z: Array) -> Array:
    """Compute y = h(z) in the target's units. Infinite values are kept."""
    if isinstance(transform, LogTransform):
        y = np.exp(np.minimum(z, MAX_LOG)) - transform.offset
    else:
        y = _piecewise_linear(z, np.array(transform.scores), np.array(transform.values))
    if transform.least is not None:
        y = np.maximum(y, transform.least)
    return np.where(np.isinf(z), z, y)


def log_slope(transform: Transform, y: Float[np.ndarray, "*shape"]) -> Array:
    """Compute log g'(y), the difference between the log-densities of y and z."""
    y = np.asarray(y, dtype=np.float64)
    if isinstance(transform, LogTransform):
        return -to_fitted(transform, y)
    values, scores = np.array(transform.values), np.array(transform.scores)
    return np.log(np.diff(scores) / np.diff(values))[_segment(y, values)]


def target_moments(transform: Transform, mean: Array, variance: Array) -> tuple[Array, Array]:
    std = np.sqrt(variance)
    with np.errstate(over="ignore", invalid="ignore"):
        target_mean = np.zeros(mean.shape)
        for node, weight in QUADRATURE:
            target_mean += weight * to_target(transform, mean + node * std)
        target_variance = np.zeros(mean.shape)
        for node, weight in QUADRATURE:
            deviation = to_target(transform, mean + node * std) - target_mean
            target_variance += weight * np.square(deviation)
    return target_mean, target_variance


def mixture_median(
    mean: Float64[np.ndarray, "N K"],
    variance: Float64[np.ndarray, "N K"],
    weight: Float64[np.ndarray, "K"],
) -> Float64[np.ndarray, "N"]:
    """Compute the median of a mixture of Gaussians by bisection."""
    std = np.sqrt(variance)
    low, high = mean.min(axis=1), mean.max(axis=1)
    for _ in range(NUM_BISECTIONS):
        middle = 0.5 * (low + high)
        below = np.add.reduce(weight * normal_cdf((middle[:, None] - mean) / std), axis=1)
        is_below = below < 0.5
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return 0.5 * (low + high)


def normal_cdf(z: Array) -> Array:
    """Compute the standard normal cumulative distribution with an error below 8e-8.

    Abramowitz and Stegun, "Handbook of mathematical functions", 1964, 26.2.17.
    """
    size = np.abs(z)
    t = 1.0 / (1.0 + 0.2316419 * size)
    series = t * (
        0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    )
    tail = np.exp(-0.5 * np.square(size)) / math.sqrt(2.0 * math.pi) * series
    return np.where(z > 0, 1.0 - tail, tail)


def _piecewise_linear(
    x: Array, knots: Float64[np.ndarray, "J"], values: Float64[np.ndarray, "J"]
) -> Array:
    segment = _segment(x, knots)
    slope = (np.diff(values) / np.diff(knots))[segment]
    with np.errstate(invalid="ignore"):
        return values[segment] + slope * (x - knots[segment])


def _segment(x: Array, knots: Float64[np.ndarray, "J"]) -> np.ndarray:
    return np.clip(knots.searchsorted(x, side="right") - 1, 0, len(knots) - 2)
