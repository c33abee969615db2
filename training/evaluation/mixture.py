"""What a regression's predictive distribution, the mixture of its draws' Gaussians, says of its
targets.

K draws, N rows; outputs are mean and log variance of each draw and row, in the target's units, or
of a transformed target of that.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy import stats
from scipy.special import ndtr

from model_store.scores.regression import log_density
from model_store.scores.transforms import Transform, to_fitted, to_target
from training.evaluation.intervals import share_interval
from training.evaluation.records import Pit, PitBin
from training.networks.likelihoods import crps

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PIT_BINS = 10
LEVELS = 200
HALVINGS = 60  # of the range that a quantile is looked for in
BEYOND = 10.0  # standard deviations of a Gaussian in which all of it is


@dataclass(frozen=True, eq=False)
class TargetMeasures:
    """What is measured of each of N targets.

    `pit` is the share of the predictive distribution below the target, and `pinball` by quantile
    the loss, in the target's units: q times the distance of a target above the predicted quantile,
    1 - q times that of one below.
    """

    log_likelihood: Float64[np.ndarray, "N"]  # nats, of a density in the target's units
    crps: Float64[np.ndarray, "N"]  # in the target's units
    pit: Float64[np.ndarray, "N"]
    pinball: dict[float, Float64[np.ndarray, "N"]]

    @classmethod
    def of(
        cls,
        outputs: Float[np.ndarray, "K N 2"],
        y: Float[np.ndarray, "N"],
        transform: Transform | None = None,
    ) -> "TargetMeasures":
        """Measure targets.

        The CRPS of a transformed target is twice the mean of the pinball losses at `LEVELS`
        quantiles that are as far apart (Laio and Tamea, "Verification tools for probabilistic
        forecasts of continuous hydrological variables", 2007, equation 17): quantiles are exact,
        and a mean of h has no closed form.
        """
        moments = outputs.astype(np.float64)
        target = y.astype(np.float64)
        if transform is not None:
            levels = (np.arange(LEVELS) + 0.5) / LEVELS
            losses = [
                pinball_loss(to_target(transform, quantile(moments, q)), target, q)
                for q in levels.tolist()
            ]
            return cls(
                log_density(moments, target, transform),
                2.0 * np.mean(losses, axis=0),
                distribution_function(moments, to_fitted(transform, target)),
                {
                    q: pinball_loss(to_target(transform, quantile(moments, q)), target, q)
                    for q in QUANTILES
                },
            )
        return cls(
            log_density(moments, target),
            crps(torch.from_numpy(moments), torch.from_numpy(target)).numpy(),
            distribution_function(moments, target),
            {q: pinball_loss(quantile(moments, q), target, q) for q in QUANTILES},
        )

    @classmethod
    def concatenate(cls, parts: list["TargetMeasures"]) -> "TargetMeasures":
        """Return the measures of all parts' targets, in order."""
        return cls(
            np.concatenate([part.log_likelihood for part in parts]),
            np.concatenate([part.crps for part in parts]),
            np.concatenate([part.pit for part in parts]),
            {q: np.concatenate([part.pinball[q] for part in parts]) for q in QUANTILES},
        )


def distribution_function(
    outputs: Float64[np.ndarray, "K N 2"], y: Float64[np.ndarray, "N"]
) -> Float64[np.ndarray, "N"]:
    """Return the share of each row's predictive distribution at or below y."""
    mean, std = outputs[..., 0], np.exp(0.5 * outputs[..., 1])
    below: np.ndarray = ndtr((y - mean) / std).mean(axis=0)
    return below


def quantile(outputs: Float64[np.ndarray, "K N 2"], q: float) -> Float64[np.ndarray, "N"]:
    """Return where the distribution function of each row is q, by bisection."""
    mean, std = outputs[..., 0], np.exp(0.5 * outputs[..., 1])
    low, high = (mean - BEYOND * std).min(axis=0), (mean + BEYOND * std).max(axis=0)
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        is_below = distribution_function(outputs, middle) < q
        low, high = np.where(is_below, middle, low), np.where(is_below, high, middle)
    return 0.5 * (low + high)


def pinball_loss(
    predicted: Float64[np.ndarray, "N"], y: Float64[np.ndarray, "N"], q: float
) -> Float64[np.ndarray, "N"]:
    """Return the loss of a predicted quantile (Koenker and Bassett, "Regression quantiles",
    1978)."""
    return np.maximum(q * (y - predicted), (q - 1.0) * (y - predicted))


def pit_measures(pit: Float64[np.ndarray, "N"]) -> Pit:
    """Return the histogram of probability integral transforms, and how far they are from
    uniform."""
    test = stats.kstest(pit, "uniform")
    counts = np.bincount(
        np.minimum((pit * PIT_BINS).astype(int), PIT_BINS - 1), minlength=PIT_BINS
    ).tolist()
    rows = len(pit)
    bins = [
        PitBin(share=c / rows, confidence_intervals={"share": share_interval(c, rows)})
        for c in counts
    ]
    return Pit(distance=float(test.statistic), p_value=float(test.pvalue), bins=bins)
