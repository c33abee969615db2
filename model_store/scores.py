"""Predictive scores of a classifier from its Monte Carlo draws, as sums over draws that merge.

Axes: K draws, N rows, C classes, G groups of draws. Quantities of information are in nats. With p_k the class
probabilities of draw k, p their mean and H the Shannon entropy, a row's scores are

    entropy            H(p)                                 total doubt,           0 .. log C
    expected_entropy   mean_k H(p_k)                        doubt of the draws,    0 .. log C
    bald               H(p) - mean_k H(p_k)                 disagreement,          0 .. log C
                       = mean_k KL(p_k || p)                (Houlsby et al. 2011)
    mean_std           mean_c std_k(p_kc)                   disagreement,          0 .. 1/2
    variation_ratio    1 - max_c p_c                        total doubt,           0 .. 1 - 1/C

(Gal, Islam and Ghahramani, "Deep Bayesian active learning with image data", 2017, section 4). More is more
uncertain. Plug-in BALD is biased by about -BALD / K.

Draw k belongs to group k mod G, and a `PredictiveSums` holds, for each group, the mean, the centred sum of
squares and the mean entropy. Two of them over disjoint draws merge exactly, so draws may be split over time,
threads or machines. Standard errors come from each group's influence on a score (the infinitesimal jackknife):
of a draw on BALD it is KL(p_k || p) - BALD. Up to G draws a group is one draw; beyond, a group is its draws' mean.
They hold to first order, for independent draws.
"""

from dataclasses import dataclass, fields

import numpy as np
from jaxtyping import Float, Float64, Int64

SCORE_NAMES = ("entropy", "bald", "mean_std", "variation_ratio")
GROUPS = 100


@dataclass(frozen=True)
class PredictiveSums:
    """Sums over draws of N rows, in float64, by group of draws."""

    num_draws: Int64[np.ndarray, "G"]
    mean_probs: Float64[np.ndarray, "G N C"]
    squared_deviations: Float64[np.ndarray, "G N C"]  # sum over the group's draws of (p - the group's mean)^2
    mean_entropy: Float64[np.ndarray, "G N"]

    @classmethod
    def from_log_probs(
        cls, log_probs: Float[np.ndarray, "K N C"], first_draw: int = 0, groups: int = GROUPS
    ) -> "PredictiveSums":
        """Sum draws `first_draw`, `first_draw + 1`, ... given by their log class probabilities.

        Args:
            log_probs: natural logarithms, -inf allowed for a probability of 0.
            first_draw: index of the first draw within its seed, which decides the groups.
            groups: G, into how many groups draws are sorted; sums merge only with sums of the same G.
        """
        num_draws, num_rows, _ = log_probs.shape
        if num_draws > groups:
            first = groups * (-(-num_draws // groups) // 2)
            return cls.from_log_probs(log_probs[:first], first_draw, groups).merge(
                cls.from_log_probs(log_probs[first:], first_draw + first, groups)
            )
        log_probs_K_N_C = log_probs.astype(np.float64)
        probs_K_N_C = np.exp(log_probs_K_N_C)
        entropy_K_N = -np.sum(_p_log(probs_K_N_C, log_probs_K_N_C), axis=2)
        order = (first_draw + np.arange(num_draws)) % groups  # each group holds one draw at most
        mean_G_N_C = np.zeros((groups, *probs_K_N_C.shape[1:]))
        mean_G_N_C[order] = probs_K_N_C
        entropy_G_N = np.zeros((groups, num_rows))
        entropy_G_N[order] = entropy_K_N
        return cls(np.bincount(order, minlength=groups), mean_G_N_C, np.zeros_like(mean_G_N_C), entropy_G_N)

    def merge(self, other: "PredictiveSums") -> "PredictiveSums":
        """Return the sums over the draws of both, which must be of the same rows and share no draw."""
        if self.mean_probs.shape != other.mean_probs.shape:
            raise ValueError(
                f"expected sums of shape (groups, rows, classes) {self.mean_probs.shape}, "
                f"got {other.mean_probs.shape}"
            )
        num_draws_G = self.num_draws + other.num_draws
        share_G = other.num_draws / np.maximum(num_draws_G, 1)
        share_G_1_1 = share_G[:, None, None]
        difference = other.mean_probs - self.mean_probs
        return PredictiveSums(
            num_draws_G,
            self.mean_probs + share_G_1_1 * difference,
            self.squared_deviations
            + other.squared_deviations
            + (self.num_draws[:, None, None] * share_G_1_1) * difference**2,
            self.mean_entropy + share_G[:, None] * (other.mean_entropy - self.mean_entropy),
        )


@dataclass(frozen=True)
class Scores:
    """The predictive scores of N rows, as in the table above; standard errors are None with one group of draws."""

    num_draws: int
    probabilities: Float64[np.ndarray, "N C"]
    entropy: Float64[np.ndarray, "N"]
    expected_entropy: Float64[np.ndarray, "N"]
    bald: Float64[np.ndarray, "N"]
    mean_std: Float64[np.ndarray, "N"]
    variation_ratio: Float64[np.ndarray, "N"]
    standard_error: dict[str, Float64[np.ndarray, "N"]] | None

    def by_name(self) -> dict[str, Float64[np.ndarray, "N"]]:
        """Return the scores of doubt, more meaning more uncertain, by name."""
        return {name: getattr(self, name) for name in SCORE_NAMES}

    @classmethod
    def concatenate(cls, parts: list["Scores"]) -> "Scores":
        """Return the scores of all parts' rows, in order; the parts must be of the same number of draws."""
        first = parts[0]
        if len(parts) == 1:
            return first
        kept = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(cls)
            if isinstance(getattr(first, field.name), np.ndarray)
        }
        errors = None
        if first.standard_error is not None:
            errors = {
                name: np.concatenate([(part.standard_error or {})[name] for part in parts])
                for name in first.standard_error
            }
        return cls(num_draws=first.num_draws, standard_error=errors, **kept)


def predictive_scores(sums: PredictiveSums, standard_errors: bool = True) -> Scores:
    """Return the scores of the draws summed in `sums`; raises ValueError where it holds none."""
    used = sums.num_draws > 0
    num_draws = int(sums.num_draws.sum())
    if num_draws == 0:
        raise ValueError("expected at least one draw, got none")
    num_draws_G = sums.num_draws[used]
    mean_G_N_C = sums.mean_probs[used]
    num_classes = mean_G_N_C.shape[2]

    probs_N_C = _mean_over_draws(mean_G_N_C, num_draws_G)
    deviation_G_N_C = mean_G_N_C - probs_N_C
    square_G_N_C = np.square(deviation_G_N_C)
    if num_draws > len(num_draws_G):  # else no group has a spread of its own
        square_G_N_C += sums.squared_deviations[used] / num_draws_G[:, None, None]
    log_probs_N_C = np.log(probs_N_C, out=np.zeros_like(probs_N_C), where=probs_N_C > 0)
    # The group's mean of the cross entropy -sum_c p_kc log p_c; its mean over groups is H(p).
    cross_entropy_G_N = -np.sum(mean_G_N_C * log_probs_N_C, axis=2)
    entropy_G_N = sums.mean_entropy[used]
    moments_N_M = _mean_over_draws(
        np.concatenate([square_G_N_C, cross_entropy_G_N[:, :, None], entropy_G_N[:, :, None]], axis=2), num_draws_G
    )
    std_N_C = np.sqrt(moments_N_M[:, :num_classes])
    entropy_N, expected_entropy_N = moments_N_M[:, num_classes], moments_N_M[:, num_classes + 1]
    bald_N = np.maximum(entropy_N - expected_entropy_N, 0.0)  # below 0 by rounding only
    if num_draws == 1:
        bald_N = np.zeros_like(bald_N)  # one draw agrees with itself: what is left is rounding
    label_N = np.argmax(probs_N_C, axis=1)

    errors = None
    if standard_errors and len(num_draws_G) > 1:
        std_slope_N_C = np.divide(0.5, std_N_C, out=np.zeros_like(std_N_C), where=std_N_C > 0)
        influence_G_N_S = np.empty((*cross_entropy_G_N.shape, len(SCORE_NAMES)))
        influence_G_N_S[:, :, 0] = cross_entropy_G_N - entropy_N
        # The group's mean of KL(p_k || p), less BALD.
        influence_G_N_S[:, :, 1] = cross_entropy_G_N - entropy_G_N - (entropy_N - expected_entropy_N)
        influence_G_N_S[:, :, 2] = np.mean((square_G_N_C - moments_N_M[:, :num_classes]) * std_slope_N_C, axis=2)
        influence_G_N_S[:, :, 3] = deviation_G_N_C[:, np.arange(len(label_N)), label_N]
        # With weights w = K_G / K unbiased for independent draws: E sum w^2 I^2 = (1 - sum w^2) sigma^2 / K.
        weight_G = num_draws_G / num_draws
        influence_G_N_S *= np.sqrt(weight_G)[:, None, None]
        variance_N_S = _mean_over_draws(np.square(influence_G_N_S), num_draws_G) / (1.0 - np.sum(weight_G**2))
        errors = dict(zip(SCORE_NAMES, np.sqrt(variance_N_S).T, strict=True))
    return Scores(
        num_draws=num_draws,
        probabilities=probs_N_C,
        entropy=entropy_N,
        expected_entropy=expected_entropy_N,
        bald=bald_N,
        mean_std=np.mean(std_N_C, axis=1),
        variation_ratio=1.0 - np.max(probs_N_C, axis=1),
        standard_error=errors,
    )


def _mean_over_draws(
    values: Float64[np.ndarray, "G *shape"], num_draws: Int64[np.ndarray, "G"]
) -> Float64[np.ndarray, "*shape"]:
    """Return the mean over draws of what each group holds the mean of.

    Draws are laid out last: then numpy adds them pairwise, in an order that their number alone decides. Along any
    other axis the order depends on how many rows there are, and a row alone would get other bits than in a batch.
    Summing before dividing gives exactly 1 for probabilities of 1.
    """
    by_draw_last = np.ascontiguousarray((values.reshape(len(values), -1)).T) * num_draws
    mean = by_draw_last.sum(axis=1) / np.sum(num_draws)
    return mean.reshape(values.shape[1:]) + 0.0  # turns -0.0 into 0.0


def _p_log(
    probs: Float64[np.ndarray, "*shape"], log_probs: Float64[np.ndarray, "*shape"]
) -> Float64[np.ndarray, "*shape"]:
    """Return p log p, 0 where p is 0."""
    return np.multiply(probs, log_probs, out=np.zeros_like(probs), where=probs > 0)
