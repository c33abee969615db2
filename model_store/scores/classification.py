"""Predictive scores of a classifier from its Monte Carlo draws, as sums over draws that merge.

Axes: K draws, N rows, C classes, G groups of draws. Quantities of information are in nats. With p_k
the class probabilities of draw k, p their mean and H the Shannon entropy, a row's scores are

    entropy            H(p)                     total uncertainty,         0 .. log C
    expected_entropy   mean_k H(p_k)            uncertainty of the draws,  0 .. log C
    bald               H(p) - mean_k H(p_k)     disagreement,              0 .. log C
                       = mean_k KL(p_k || p)    (Houlsby et al. 2011)
    mean_std           mean_c std_k(p_kc)       disagreement,              0 .. 1/2
    variation_ratio    1 - max_c p_c            total uncertainty,         0 .. 1 - 1/C

(Gal, Islam and Ghahramani, "Deep Bayesian active learning with image data", 2017, section 4). More
is more uncertain.

**Bias.** H(p) of few draws is too small on average, and BALD by as much: the draws' own entropies
have no bias. BALD is biased by about -BALD / K. The jackknife removes what goes with 1 / K:

    bald_corrected     BALD + sum_j (1 - K_j / K) KL(p_-j || p)

with p_-j the mean without group j of K_j draws (Quenouille 1956; for groups of several draws
Busing, Meijer and van der Leeden 1999). It is never less than BALD, and twice BALD of two draws.
H(p) would be corrected by as many nats.

Draws are summed by group (`sums`): `prediction` is p and `uncertainty` H(p). Standard errors are a
jackknife's: each score is made again without each group.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.scores.joint import BatchBald, ClassMaxDet
from model_store.scores.predictive import Predictive
from model_store.scores.sums import FEWEST_FOR_SPREAD, GROUPS, Average, DrawSums

SCORE_NAMES = ("entropy", "bald", "mean_std", "variation_ratio")
DISAGREEMENTS = ("bald", "mean_std")  # of which few groups do not say how they scatter
LEAST_LOG = -1e300
LEAST_PROBABILITY = 1e-300


@dataclass(frozen=True, eq=False)
class Scores:
    """The predictive scores of N rows, as in the table above.

    Standard errors are None with one group of draws. With two there are none of `bald` and
    `mean_std`: one draw alone has nothing to disagree with.
    """

    num_draws: Int64[np.ndarray, "N"]
    probabilities: Float64[np.ndarray, "N C"]
    label: Int64[np.ndarray, "N"]  # the number of the most probable class, the first of several
    entropy: Float64[np.ndarray, "N"]
    expected_entropy: Float64[np.ndarray, "N"]
    bald: Float64[np.ndarray, "N"]
    mean_std: Float64[np.ndarray, "N"]
    variation_ratio: Float64[np.ndarray, "N"]
    # made with standard errors
    bald_corrected: Float64[np.ndarray, "N"] | None
    standard_error: dict[str, Float64[np.ndarray, "N"]] | None

    error_names: ClassVar = SCORE_NAMES  # of which there are standard errors
    overall: ClassVar = "entropy"  # the score of all uncertainty

    @property
    def labels(self) -> Int64[np.ndarray, "N"]:
        return self.label

    @property
    def in_units(self) -> "Scores":
        return self

    def by_name(self) -> dict[str, Float64[np.ndarray, "N"]]:
        return {name: getattr(self, name) for name in SCORE_NAMES}


def predictive_sums(
    log_probs: Float[np.ndarray, "K N C"], first_draw: int = 0, groups: int = GROUPS
) -> DrawSums:
    """Sum draws `first_draw`, `first_draw + 1`, ... of a seed into G `groups`, given by their
    log class probabilities, -inf of a probability of 0."""
    log_probs_N_C_K = log_probs.transpose(1, 2, 0).astype(np.float64, order="C")
    probs_N_C_K = np.exp(log_probs_N_C_K)
    np.maximum(log_probs_N_C_K, LEAST_LOG, out=log_probs_N_C_K)  # so that 0 log 0 is 0
    log_probs_N_C_K *= probs_N_C_K
    return DrawSums.of(probs_N_C_K, -np.add.reduce(log_probs_N_C_K, axis=1), first_draw, groups)


def predictive_scores(sums: DrawSums, standard_errors: bool | Collection[str] = True) -> Scores:
    """Return the scores of the draws summed in `sums`, with the standard errors of all, of none or
    of those that are named; raises ValueError where it holds none.

    `bald_corrected` is made with the errors of `entropy` and `bald`.
    """
    sums = sums.drawn()
    mean_over_draws = Average(sums.num_draws)
    mean_N_C_G, entropy_N_G = sums.prediction, sums.uncertainty

    probs_N_C = mean_over_draws(mean_N_C_G)
    deviation_N_C_G = mean_N_C_G - probs_N_C[..., None]
    square_N_C_G = np.square(deviation_N_C_G)
    if not mean_over_draws.one_each:  # else no group has a spread of its own
        square_N_C_G += sums.squared_deviations / sums.num_draws
    log_probs_N_C = np.log(np.maximum(probs_N_C, LEAST_PROBABILITY))  # so that 0 log 0 is 0
    # The group's mean of the cross entropy -sum_c p_kc log p_c; its mean over groups is H(p).
    cross_entropy_N_G = -np.add.reduce(mean_N_C_G * log_probs_N_C[..., None], axis=1)
    variance_N_C = mean_over_draws(square_N_C_G)
    std_N_C = np.sqrt(variance_N_C)
    entropy_N = np.maximum(mean_over_draws(cross_entropy_N_G), 0.0)  # turns -0.0 into 0.0
    expected_entropy_N = np.maximum(mean_over_draws(entropy_N_G), 0.0)
    bald_N = np.maximum(entropy_N - expected_entropy_N, 0.0)  # below 0 by rounding only
    if mean_over_draws.num_draws == 1:
        bald_N = np.zeros_like(bald_N)  # one draw agrees with itself: what is left is rounding
    label_N = probs_N_C.argmax(axis=1)

    errors = corrected_N = None
    wanted = set(SCORE_NAMES if standard_errors is True else standard_errors or ())
    if wanted and len(sums.num_draws) > 1:
        odds_G = mean_over_draws.odds_G
        without_N_C_G = np.maximum(probs_N_C[..., None] - odds_G * deviation_N_C_G, 0.0)
        change: dict[str, Float64[np.ndarray, "N G"]] = {}  # by leaving out a group
        if wanted & {"entropy", "bald"}:
            divergence_N_G = _divergence(without_N_C_G, probs_N_C)
            corrected_N = bald_N + mean_over_draws.jackknife_bias(divergence_N_G)
            change["entropy"] = (entropy_N[:, None] - cross_entropy_N_G) * odds_G - divergence_N_G
            change["bald"] = (entropy_N_G - expected_entropy_N[:, None]) * odds_G
            change["bald"] += change["entropy"]
        if "mean_std" in wanted:
            std_without_N_C_G = mean_over_draws.variances_without(
                variance_N_C, square_N_C_G, deviation_N_C_G
            )
            np.sqrt(std_without_N_C_G, out=std_without_N_C_G)
            change["mean_std"] = std_without_N_C_G.sum(axis=1) - std_N_C.sum(axis=1)[:, None]
            change["mean_std"] /= len(std_N_C[0])
        if "variation_ratio" in wanted:
            most_N = probs_N_C.max(axis=1)
            change["variation_ratio"] = most_N[:, None] - without_N_C_G.max(axis=1)
        errors = {}
        for name in SCORE_NAMES:
            if name in wanted:
                errors[name] = mean_over_draws.standard_error(change[name])
        if len(sums.num_draws) < FEWEST_FOR_SPREAD:
            errors = {name: of for name, of in errors.items() if name not in DISAGREEMENTS}
    return Scores(
        num_draws=np.full(len(probs_N_C), mean_over_draws.num_draws),
        probabilities=probs_N_C,
        label=label_N,
        entropy=entropy_N,
        expected_entropy=expected_entropy_N,
        bald=bald_N,
        mean_std=std_N_C.sum(axis=1) / std_N_C.shape[1],
        variation_ratio=1.0 - probs_N_C.max(axis=1),
        bald_corrected=corrected_N,
        standard_error=errors,
    )


def _divergence(
    without_N_C_G: Float64[np.ndarray, "N C G"], probs_N_C: Float64[np.ndarray, "N C"]
) -> Float64[np.ndarray, "N G"]:
    """Return KL(p_-j || p), of the class probabilities without group j from those of all groups."""
    log_ratio_N_C_G = without_N_C_G / np.maximum(probs_N_C, LEAST_PROBABILITY)[..., None]
    np.maximum(log_ratio_N_C_G, LEAST_PROBABILITY, out=log_ratio_N_C_G)  # so that 0 log 0 is 0
    np.log(log_ratio_N_C_G, out=log_ratio_N_C_G)
    log_ratio_N_C_G *= without_N_C_G
    divergence_N_G: np.ndarray = np.add.reduce(log_ratio_N_C_G, axis=1)
    return divergence_N_G


class Classes(Predictive):
    output = "log_probs"
    score_names = SCORE_NAMES
    acquisition_scores: ClassVar = {name: name for name in (*SCORE_NAMES, "bald_corrected")} | {
        "power_bald": "bald"
    }
    joint_scores: ClassVar = {"batchbald": BatchBald, "max_det": ClassMaxDet}
    default_acquisition = "bald"
    sampled = ("power_bald",)
    raced = SCORE_NAMES
    jackknifed: ClassVar = {"bald_corrected": "bald"}

    def sums(self, outputs: Float[np.ndarray, "K N C"], first_draw: int = 0) -> DrawSums:
        return predictive_sums(outputs, first_draw)

    def scores(self, sums: DrawSums, standard_errors: bool | Collection[str] = True) -> Scores:
        return predictive_scores(sums, standard_errors)

    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float32[np.ndarray, "K N C"]:
        return np.exp(outputs)

    def acquisition(self, scores: Any, name: str) -> Float64[np.ndarray, "N"]:
        score: Float64[np.ndarray, "N"] | None = getattr(scores, self.acquisition_scores[name])
        return scores.by_name()["bald"] if score is None else score
