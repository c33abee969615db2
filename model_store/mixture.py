"""Predictive scores of a regression from its Monte Carlo draws: a mixture of Gaussians, as sums that merge.

Axes: K draws, N rows, G groups of draws. Under draw k a row's target is Gaussian with mean m_k and variance s_k^2, in
the target's units. The predictive distribution is the mixture of the K Gaussians, and its scores are

    mean            m = mean_k m_k
    aleatoric_std   sqrt(mean_k s_k^2)                          doubt of the draws: noise in the data
    epistemic_std   sqrt(mean_k (m_k - m)^2)                    disagreement of the draws
    std             sqrt(aleatoric_std^2 + epistemic_std^2)     total doubt

(Kendall and Gal, "What uncertainties do we need in Bayesian deep learning for computer vision?", 2017, equation 9).
More is more uncertain. All are 0 or more, but for the mean. The plug-in epistemic variance E is biased by -E / K.

Draws are grouped, and sums merged, as in `scores`; standard errors come from each group's influence. That of a draw
on the variance std^2 is s_k^2 + (m_k - m)^2 - std^2; on a standard deviation it is half of that over the deviation.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int64

from model_store.scores import GROUPS, concatenated, scatter

MIXTURE_SCORE_NAMES = ("std", "aleatoric_std", "epistemic_std")
MIXTURE_ERROR_NAMES = ("mean", *MIXTURE_SCORE_NAMES)
LEAST_STD = 1e-300


@dataclass(frozen=True)
class MixtureSums:
    """Sums over draws of N rows, in float64, by group of draws, groups last: see `scores.PredictiveSums`."""

    num_draws: Int64[np.ndarray, "G"]
    mean: Float64[np.ndarray, "N G"]
    squared_deviations: Float64[np.ndarray, "N G"]  # sum over the group's draws of (m - the group's mean)^2
    variance: Float64[np.ndarray, "N G"]  # mean of s^2

    @classmethod
    def from_outputs(
        cls, outputs: Float[np.ndarray, "K N 2"], first_draw: int = 0, groups: int = GROUPS
    ) -> "MixtureSums":
        """Sum draws `first_draw`, `first_draw + 1`, ... given by mean and log variance of each draw and row.

        Args:
            outputs: the mean in the target's units, and the natural logarithm of the variance in their square.
            first_draw: index of the first draw within its seed, which decides the groups.
            groups: G, into how many groups draws are sorted; sums merge only with sums of the same G.
        """
        num_draws, num_rows, _ = outputs.shape
        if num_draws > groups:
            first = groups * (-(-num_draws // groups) // 2)
            return cls.from_outputs(outputs[:first], first_draw, groups).merge(
                cls.from_outputs(outputs[first:], first_draw + first, groups)
            )
        mean_N_K, log_variance_N_K = outputs.transpose(2, 1, 0).astype(np.float64, order="C")
        order = (first_draw + np.arange(num_draws)) % groups
        return cls(
            np.bincount(order, minlength=groups),
            scatter(mean_N_K, order, groups),
            np.zeros((num_rows, groups)),
            scatter(np.exp(log_variance_N_K), order, groups),
        )

    def merge(self, other: "MixtureSums") -> "MixtureSums":
        """Return the sums over the draws of both, which must be of the same rows and share no draw."""
        if self.mean.shape != other.mean.shape:
            raise ValueError(f"expected sums of shape (rows, groups) {self.mean.shape}, got {other.mean.shape}")
        num_draws_G = self.num_draws + other.num_draws
        share_G = other.num_draws / np.maximum(num_draws_G, 1)
        difference = other.mean - self.mean
        return MixtureSums(
            num_draws_G,
            self.mean + share_G * difference,
            self.squared_deviations + other.squared_deviations + (self.num_draws * share_G) * difference**2,
            self.variance + share_G * (other.variance - self.variance),
        )


@dataclass(frozen=True)
class MixtureScores:
    """The predictive scores of N rows, as in the table above; standard errors are None with one group of draws.

    With one draw there is nothing to disagree with, and `epistemic_std` is 0.
    """

    num_draws: int
    mean: Float64[np.ndarray, "N"]
    std: Float64[np.ndarray, "N"]
    aleatoric_std: Float64[np.ndarray, "N"]
    epistemic_std: Float64[np.ndarray, "N"]
    standard_error: dict[str, Float64[np.ndarray, "N"]] | None

    def by_name(self) -> dict[str, Float64[np.ndarray, "N"]]:
        """Return the scores of doubt, more meaning more uncertain, by name."""
        return {name: getattr(self, name) for name in MIXTURE_SCORE_NAMES}

    @classmethod
    def concatenate(cls, parts: list["MixtureScores"]) -> "MixtureScores":
        """Return the scores of all parts' rows, in order; the parts must be of the same number of draws."""
        return concatenated(parts)


def mixture_scores(sums: MixtureSums, standard_errors: bool = True) -> MixtureScores:
    """Return the scores of the draws summed in `sums`; raises ValueError where it holds none."""
    num_draws = int(sums.num_draws.sum())
    if num_draws == 0:
        raise ValueError("expected at least one draw, got none")
    used = sums.num_draws > 0
    num_draws_G = sums.num_draws[used]
    mean_N_G, variance_N_G, squared_N_G = (
        np.compress(used, values, axis=-1) for values in (sums.mean, sums.variance, sums.squared_deviations)
    )

    def mean_over_draws(values: Float64[np.ndarray, "*shape G"]) -> Float64[np.ndarray, "*shape"]:
        return np.add.reduce(values * num_draws_G, axis=-1) / num_draws

    # Means are taken about the first group's, so that those of equal draws are exactly theirs.
    first_N_1 = mean_N_G[:, :1]
    mean_N = first_N_1[:, 0] + mean_over_draws(mean_N_G - first_N_1)
    deviation_N_G = mean_N_G - mean_N[:, None]
    square_N_G = np.square(deviation_N_G) + squared_N_G / num_draws_G
    aleatoric_N, epistemic_N = mean_over_draws(variance_N_G), mean_over_draws(square_N_G)
    variance_N = aleatoric_N + epistemic_N
    std_N, aleatoric_std_N, epistemic_std_N = (np.sqrt(v) for v in (variance_N, aleatoric_N, epistemic_N))

    errors = None
    if standard_errors and len(num_draws_G) > 1:

        def of_deviation(
            influence_N_G: Float64[np.ndarray, "N G"], std_N: Float64[np.ndarray, "N"]
        ) -> Float64[np.ndarray, "N G"]:
            return influence_N_G / (2.0 * np.maximum(std_N, LEAST_STD))[:, None]

        influence_S_N_G = np.stack(
            [
                deviation_N_G,
                of_deviation(variance_N_G + square_N_G - variance_N[:, None], std_N),
                of_deviation(variance_N_G - aleatoric_N[:, None], aleatoric_std_N),
                of_deviation(square_N_G - epistemic_N[:, None], epistemic_std_N),
            ]
        )
        # With weights w = K_G / K unbiased for independent draws: E sum w^2 I^2 = (1 - sum w^2) sigma^2 / K.
        weight_G = num_draws_G / num_draws
        squares_S_N = mean_over_draws(np.square(influence_S_N_G) * weight_G)
        errors = dict(zip(MIXTURE_ERROR_NAMES, np.sqrt(squares_S_N / (1.0 - np.square(weight_G).sum())), strict=True))
    return MixtureScores(num_draws, mean_N, std_N, aleatoric_std_N, epistemic_std_N, errors)


def log_density(outputs: Float[np.ndarray, "K N 2"], y: Float[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
    """Return the log density of targets under the mixture, log mean_k N(y; m_k, s_k^2), in nats.

    It is of a density in the target's units: in other units it is another number.
    """
    mean, log_variance = np.moveaxis(outputs.astype(np.float64), -1, 0)
    terms = -0.5 * (math.log(2.0 * math.pi) + log_variance + np.square(y - mean) * np.exp(-log_variance))
    largest = terms.max(axis=0)
    return largest + np.log(np.exp(terms - largest).mean(axis=0))
