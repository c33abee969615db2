"""Predictive scores of a regression from its Monte Carlo draws: a mixture of Gaussians, as sums
that merge.

Axes: K draws, N rows, G groups of draws. Under draw k a row's target is Gaussian with mean m_k and
variance s_k^2, in the target's units. The predictive distribution is the mixture of the K
Gaussians, and its scores are

    mean            m = mean_k m_k
    aleatoric_std   sqrt(mean_k s_k^2)                       uncertainty of each draw: noise
    epistemic_std   sqrt(sum_k (m_k - m)^2 / (K - 1))        disagreement of the draws
    std             sqrt(aleatoric_std^2 + epistemic_std^2)  total uncertainty

(Kendall and Gal, "What uncertainties do we need in Bayesian deep learning for computer vision?",
2017, equation 9, which divides by K: on average that is a share 1 / K too small). More is more
uncertain. All except the mean are 0 or more.

Draws are summed by group (`sums`): `prediction` is m and `uncertainty` s^2. Standard errors are a
jackknife's: each score is made again without each group.

**Transformed targets** (`transforms`). The m_k and s_k are then of the target as it was fitted, and
so are the scores that detectors and intervals go by. The reported scores, `in_units`, are of the
target itself: the same scores of each draw's mean and variance in its units, and the median. Sums
then hold both, along an axis of two.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.scores.joint import TargetMaxDet
from model_store.scores.predictive import Predictive
from model_store.scores.sums import FEWEST_FOR_SPREAD, GROUPS, Average, DrawSums
from model_store.scores.transforms import (
    Transform,
    log_slope,
    mixture_median,
    target_moments,
    to_fitted,
    to_target,
)

MIXTURE_SCORE_NAMES = ("std", "aleatoric_std", "epistemic_std")
MIXTURE_ERROR_NAMES = ("mean", *MIXTURE_SCORE_NAMES)


@dataclass(frozen=True, eq=False)
class MixtureScores:
    """The predictive scores of N rows, as in the table above.

    One draw alone has nothing to disagree with: its `epistemic_std` is 0. So standard errors are
    None with one group of draws, and with two there are none of `std` and `epistemic_std`.
    """

    num_draws: Int64[np.ndarray, "N"]
    mean: Float64[np.ndarray, "N"]
    std: Float64[np.ndarray, "N"]
    aleatoric_std: Float64[np.ndarray, "N"]
    epistemic_std: Float64[np.ndarray, "N"]
    standard_error: dict[str, Float64[np.ndarray, "N"]] | None
    # in the target's units, made with standard errors
    median: Float64[np.ndarray, "N"] | None = None
    reported: "MixtureScores | None" = None  # in the target's units, of one that was transformed

    error_names: ClassVar = MIXTURE_ERROR_NAMES  # of which there are standard errors
    overall: ClassVar = "std"  # the score of all uncertainty

    @property
    def labels(self) -> Int64[np.ndarray, "N"]:
        return np.zeros(len(self.mean), dtype=int)

    @property
    def in_units(self) -> "MixtureScores":
        return self if self.reported is None else self.reported

    def by_name(self) -> dict[str, Float64[np.ndarray, "N"]]:
        return {name: getattr(self, name) for name in MIXTURE_SCORE_NAMES}


def mixture_sums(
    outputs: Float[np.ndarray, "K N 2"],
    first_draw: int = 0,
    groups: int = GROUPS,
    transform: Transform | None = None,
) -> DrawSums:
    """Sum draws `first_draw`, `first_draw + 1`, ... of a seed into G `groups`, given by mean and
    log variance of each draw and row.

    Of a transformed target `outputs` are those of the transformed one, and the sums have an axis of
    two: the target as it was fitted, and in its units.
    """
    mean_N_K, log_variance_N_K = outputs.transpose(2, 1, 0).astype(np.float64, order="C")
    variance_N_K = np.exp(log_variance_N_K)
    if transform is None:
        return DrawSums.of(mean_N_K, variance_N_K, first_draw, groups)
    target_mean_N_K, target_variance_N_K = target_moments(transform, mean_N_K, variance_N_K)
    means = np.stack([mean_N_K, target_mean_N_K], axis=1)
    variances = np.stack([variance_N_K, target_variance_N_K], axis=1)
    return DrawSums.of(means, variances, first_draw, groups)


def target_scores(
    sums: DrawSums, transform: Transform, standard_errors: bool = True
) -> MixtureScores:
    """Return the scores of a transformed target, given sums of both; raises ValueError where they
    hold no draw.

    Beyond `GROUPS` draws the median is that of as many Gaussians, one for the draws of each group.
    """
    fitted, in_units = sums.along(0).drawn(), sums.along(1)
    scores = mixture_scores(fitted, standard_errors)
    with np.errstate(invalid="ignore"):
        reported = mixture_scores(in_units, standard_errors)
    if standard_errors:
        variance = fitted.uncertainty + fitted.squared_deviations / fitted.num_draws
        share = fitted.num_draws / fitted.num_draws.sum()
        median = to_target(transform, mixture_median(fitted.prediction, variance, share))
        reported = replace(reported, median=median)
    return replace(scores, reported=reported)


def mixture_scores(sums: DrawSums, standard_errors: bool = True) -> MixtureScores:
    """Return the scores of the draws summed."""
    sums = sums.drawn()
    mean_over_draws = Average(sums.num_draws)
    mean_N_G, variance_N_G = sums.prediction, sums.uncertainty

    # Means are taken about the first group's, so that those of equal draws are exactly theirs.
    first_N_1 = mean_N_G[:, :1]
    mean_N = first_N_1[:, 0] + mean_over_draws(mean_N_G - first_N_1)
    deviation_N_G = mean_N_G - mean_N[:, None]
    square_N_G = np.square(deviation_N_G) + sums.squared_deviations / sums.num_draws
    aleatoric_N, plug_in_N = mean_over_draws(variance_N_G), mean_over_draws(square_N_G)
    epistemic_N = plug_in_N * _bessel(mean_over_draws.num_draws)
    variance_N = aleatoric_N + epistemic_N
    std_N, aleatoric_std_N, epistemic_std_N = map(np.sqrt, (variance_N, aleatoric_N, epistemic_N))

    errors = None
    if standard_errors and len(sums.num_draws) > 1:
        odds_G = mean_over_draws.odds_G
        above_N_G = variance_N_G - aleatoric_N[:, None]
        aleatoric_N_G = np.maximum(aleatoric_N[:, None] - odds_G * above_N_G, 0.0)
        epistemic_N_G = mean_over_draws.variances_without(plug_in_N, square_N_G, deviation_N_G)
        epistemic_N_G *= _bessel(mean_over_draws.num_draws - sums.num_draws)
        change_S_N_G = np.stack(
            [
                -odds_G * deviation_N_G,
                np.sqrt(aleatoric_N_G + epistemic_N_G) - std_N[:, None],
                np.sqrt(aleatoric_N_G) - aleatoric_std_N[:, None],
                np.sqrt(epistemic_N_G) - epistemic_std_N[:, None],
            ]
        )
        error_S_N = mean_over_draws.standard_error(change_S_N_G)
        errors = dict(zip(MIXTURE_ERROR_NAMES, error_S_N, strict=True))
        if len(sums.num_draws) < FEWEST_FOR_SPREAD:
            errors = {name: errors[name] for name in ("mean", "aleatoric_std")}
    num_draws_N = np.full(len(mean_N), mean_over_draws.num_draws)
    return MixtureScores(num_draws_N, mean_N, std_N, aleatoric_std_N, epistemic_std_N, errors)


def _bessel(num_draws: int | Int64[np.ndarray, "G"]) -> Float64[np.ndarray, "*G"] | float:
    """Return K / (K - 1), by which a mean of squares over K draws is multiplied; 1 for one draw."""
    corrected: Float64[np.ndarray, "*G"] = num_draws / np.maximum(num_draws - 1, 1)
    return corrected


def log_density(
    outputs: Float[np.ndarray, "K N 2"],
    y: Float[np.ndarray, "N"],
    transform: Transform | None = None,
) -> Float64[np.ndarray, "N"]:
    """Return the log density of targets under the mixture, log mean_k N(y; m_k, s_k^2), in nats; of
    a transformed target log mean_k N(g(y); m_k, s_k^2) + log g'(y).

    It is of a density in the target's units: in other units it is another number.
    """
    if transform is not None:
        return log_density(outputs, to_fitted(transform, y)) + log_slope(transform, y)
    mean, log_variance = np.moveaxis(outputs.astype(np.float64), -1, 0)
    squares = np.square(y - mean) * np.exp(-log_variance)
    terms = -0.5 * (math.log(2.0 * math.pi) + log_variance + squares)
    largest = terms.max(axis=0)
    return largest + np.log(np.exp(terms - largest).mean(axis=0))


class Target(Predictive):
    """A regression's predictive distribution; `transform` is that of its target, if any."""

    output = "mean_log_variance"
    score_names = MIXTURE_SCORE_NAMES
    acquisition_scores: ClassVar = {"variance": "std", "epistemic_variance": "epistemic_std"}
    joint_scores: ClassVar = {"max_det": TargetMaxDet}
    raced = ("variance", "epistemic_variance")
    default_acquisition = "epistemic_variance"

    def __init__(self, transform: Transform | None = None) -> None:
        self.transform = transform

    def sums(self, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> DrawSums:
        return mixture_sums(outputs, first_draw, transform=self.transform)

    def scores(
        self, sums: DrawSums, standard_errors: bool | Collection[str] = True
    ) -> MixtureScores:
        if self.transform is not None:
            return target_scores(sums, self.transform, bool(standard_errors))
        return mixture_scores(sums, bool(standard_errors))

    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float[np.ndarray, "K N C"]:
        if self.transform is not None:
            mean, log_variance = np.moveaxis(outputs.astype(np.float64), -1, 0)
            mean, variance = target_moments(self.transform, mean, np.exp(log_variance))
            return np.stack([mean, np.sqrt(variance)], axis=-1)
        return np.stack([outputs[..., 0], np.exp(0.5 * outputs[..., 1])], axis=-1)

    def acquisition(self, scores: Any, name: str) -> Float64[np.ndarray, "N"]:
        score = self.acquisition_scores[name]
        return self.of_raced(scores.in_units.by_name()[score])

    def of_raced(self, raced: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        return np.square(raced)
