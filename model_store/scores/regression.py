"""Predictive scores for regression from mergeable sums over Monte Carlo draws.

Axes: K draws, N rows, G groups of draws. Under draw k, a row's target is Gaussian with mean m_k and
variance s_k^2, in the target's units. The predictive distribution is the mixture of the K
Gaussians. Its scores are

    mean            m = mean_k m_k
    aleatoric_std   sqrt(mean_k s_k^2)                       uncertainty of each draw: noise
    epistemic_std   sqrt(sum_k (m_k - m)^2 / (K - 1))        disagreement of the draws
    std             sqrt(aleatoric_std^2 + epistemic_std^2)  total uncertainty

(Kendall and Gal, "What uncertainties do we need in Bayesian deep learning for computer vision?",
2017, equation 9; they divide by K, which is too small by a factor 1 - 1 / K on average). Larger
values are more uncertain. All scores except the mean are 0 or more.

Draws are summed by group (`sums`): `prediction` is m and `uncertainty` is s^2. Standard errors come
from a jackknife, which recomputes each score without each group.

**Transformed targets** (`transforms`). If the target was transformed, m_k and s_k describe the
fitted target, and detectors and intervals use its scores. The reported scores, `in_units`, are in
the target's units. They use each draw's mean and variance in these units, and include the median.
The sums then have an axis of two for both scales.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.scores.sums import GROUPS, MIN_SPREAD_GROUPS, Average, DrawSums
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
    """The predictive scores of N rows, as defined above.

    With one draw, `epistemic_std` is 0. Standard errors are None with one group of draws. Errors of
    `std` and `epistemic_std` need `MIN_SPREAD_GROUPS` groups.
    """

    num_draws: Int64[np.ndarray, "N"]
    mean: Float64[np.ndarray, "N"]
    std: Float64[np.ndarray, "N"]
    aleatoric_std: Float64[np.ndarray, "N"]
    epistemic_std: Float64[np.ndarray, "N"]
    standard_error: dict[str, Float64[np.ndarray, "N"]] | None
    # In the target's units, computed together with standard errors
    median: Float64[np.ndarray, "N"] | None = None
    reported: "MixtureScores | None" = None  # in the units of a transformed target

    error_names: ClassVar = MIXTURE_ERROR_NAMES  # scores with standard errors
    overall: ClassVar = "std"  # score of the total uncertainty

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
    """Sum the means and log variances of consecutive draws into G groups.

    With a `transform`, `outputs` describe the fitted target, and the sums have an axis of two: the
    fitted target, and the target in its units.
    """
    mean_N_K, log_variance_N_K = outputs.transpose(2, 1, 0).astype(np.float64, order="C")
    variance_N_K = np.exp(log_variance_N_K)
    if transform is None:
        return DrawSums.from_draws(mean_N_K, variance_N_K, first_draw, groups)
    target_mean_N_K, target_variance_N_K = target_moments(transform, mean_N_K, variance_N_K)
    means = np.stack([mean_N_K, target_mean_N_K], axis=1)
    variances = np.stack([variance_N_K, target_variance_N_K], axis=1)
    return DrawSums.from_draws(means, variances, first_draw, groups)


def target_scores(
    sums: DrawSums, transform: Transform, standard_errors: bool = True
) -> MixtureScores:
    """Compute the scores for a transformed target from the sums on both scales.

    The median uses one Gaussian per group, so with more than `GROUPS` draws it is approximate.
    """
    transformed, in_units = sums.component(0).drop_empty_groups(), sums.component(1)
    scores = mixture_scores(transformed, standard_errors)
    with np.errstate(invalid="ignore"):
        reported = mixture_scores(in_units, standard_errors)
    if standard_errors:
        variance = transformed.uncertainty + transformed.squared_deviations / transformed.num_draws
        share = transformed.num_draws / transformed.num_draws.sum()
        median = to_target(transform, mixture_median(transformed.prediction, variance, share))
        reported = replace(reported, median=median)
    return replace(scores, reported=reported)


def mixture_scores(sums: DrawSums, standard_errors: bool = True) -> MixtureScores:
    sums = sums.drop_empty_groups()
    mean_over_draws = Average(sums.num_draws)
    mean_N_G, variance_N_G = sums.prediction, sums.uncertainty

    # Centring at the first group makes the mean of equal draws exact.
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
        epistemic_N_G = mean_over_draws.leave_one_out_variances(
            plug_in_N, square_N_G, deviation_N_G
        )
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
        if len(sums.num_draws) < MIN_SPREAD_GROUPS:
            errors = {name: errors[name] for name in ("mean", "aleatoric_std")}
    num_draws_N = np.full(len(mean_N), mean_over_draws.num_draws)
    return MixtureScores(num_draws_N, mean_N, std_N, aleatoric_std_N, epistemic_std_N, errors)


def _bessel(num_draws: int | Int64[np.ndarray, "G"]) -> Float64[np.ndarray, "*G"] | float:
    """Compute Bessel's correction K / (K - 1), or 1 for a single draw."""
    return num_draws / np.maximum(num_draws - 1, 1)


def log_density(
    outputs: Float[np.ndarray, "K N 2"],
    y: Float[np.ndarray, "N"],
    transform: Transform | None = None,
) -> Float64[np.ndarray, "N"]:
    """Compute the log density of the targets, in nats.

        log mean_k N(y; m_k, s_k^2)                  without a transform
        log mean_k N(g(y); m_k, s_k^2) + log g'(y)   with a transform g

    The value depends on the target's units.
    """
    if transform is not None:
        return log_density(outputs, to_fitted(transform, y)) + log_slope(transform, y)
    mean, log_variance = np.moveaxis(outputs.astype(np.float64), -1, 0)
    squares = np.square(y - mean) * np.exp(-log_variance)
    terms = -0.5 * (math.log(2.0 * math.pi) + log_variance + squares)
    largest = terms.max(axis=0)
    return largest + np.log(np.exp(terms - largest).mean(axis=0))


class Target:
    """The predictive distribution of a regression. See `Classes` for the attributes."""

    output = "mean_log_variance"
    score_names = MIXTURE_SCORE_NAMES
    acquisition_scores: ClassVar = {"variance": "std", "epistemic_variance": "epistemic_std"}
    joint_acquisitions: tuple[str, ...] = ()
    sampling_acquisitions: tuple[str, ...] = ()
    race_acquisitions = ("variance", "epistemic_variance")
    default_acquisition = "epistemic_variance"
    jackknife_scores: ClassVar[dict[str, str]] = {}

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
        """Return each draw's means and standard deviations, in the target's units."""
        if self.transform is not None:
            mean, log_variance = np.moveaxis(outputs.astype(np.float64), -1, 0)
            mean, variance = target_moments(self.transform, mean, np.exp(log_variance))
            return np.stack([mean, np.sqrt(variance)], axis=-1)
        return np.stack([outputs[..., 0], np.exp(0.5 * outputs[..., 1])], axis=-1)

    def acquisition(self, scores: Any, name: str) -> Float64[np.ndarray, "N"]:
        score = self.acquisition_scores[name]
        return self.ranking_scores(scores.in_units.by_name()[score])

    def ranking_scores(self, race_scores: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Convert race scores to acquisition scores. This does not change the ranking."""
        return np.square(race_scores)
