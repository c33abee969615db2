"""Predictive scores for classification from mergeable sums over Monte Carlo draws.

Axes: K draws, N rows, C classes, G groups of draws. Information is in nats. Let p_k be the class
probabilities of draw k, p their mean and H the Shannon entropy. The scores of a row are

    entropy            H(p)                     total uncertainty,         0 .. log C
    expected_entropy   mean_k H(p_k)            uncertainty of the draws,  0 .. log C
    bald               H(p) - mean_k H(p_k)     disagreement,              0 .. log C
                       = mean_k KL(p_k || p)    (Houlsby et al. 2011)
    mean_std           mean_c std_k(p_kc)       disagreement,              0 .. 1/2
    variation_ratio    1 - max_c p_c            total uncertainty,         0 .. 1 - 1/C

(Gal, Islam and Ghahramani, "Deep Bayesian active learning with image data", 2017, section 4).
Larger values are more uncertain.

**Bias.** With few draws, H(p) and BALD are too small on average, by the same amount, because the
entropies of single draws are unbiased. The bias of BALD is about -BALD / K. The jackknife removes
the term in 1 / K:

    bald_corrected     BALD + sum_j (1 - K_j / K) KL(p_-j || p)

where p_-j is the mean without group j of K_j draws (Quenouille 1956; for groups of several draws
Busing, Meijer and van der Leeden 1999). It is never less than BALD. For two draws it is twice BALD.
The same correction applies to H(p).

Draws are summed by group (`sums`): `prediction` is p and `uncertainty` is H(p). A jackknife, which
recomputes each score without each group, estimates standard errors.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from model_store.scores.sums import GROUPS, MIN_SPREAD_GROUPS, Average, DrawSums

SCORE_NAMES = ("entropy", "bald", "mean_std", "variation_ratio")
DISAGREEMENTS = ("bald", "mean_std")  # standard errors need more groups
MIN_LOG = -1e300
MIN_PROBABILITY = 1e-300


@dataclass(frozen=True, eq=False)
class Scores:
    """The predictive scores of N rows, as defined above.

    Standard errors are None with one group of draws. Errors of `bald` and `mean_std` need
    `MIN_SPREAD_GROUPS` groups.
    """

    num_draws: Int64[np.ndarray, "N"]
    probabilities: Float64[np.ndarray, "N C"]
    label: Int64[np.ndarray, "N"]  # index of the (first) most probable class
    entropy: Float64[np.ndarray, "N"]
    expected_entropy: Float64[np.ndarray, "N"]
    bald: Float64[np.ndarray, "N"]
    mean_std: Float64[np.ndarray, "N"]
    variation_ratio: Float64[np.ndarray, "N"]
    # Computed together with standard errors
    bald_corrected: Float64[np.ndarray, "N"] | None
    standard_error: dict[str, Float64[np.ndarray, "N"]] | None

    error_names: ClassVar = SCORE_NAMES  # scores with standard errors
    overall: ClassVar = "entropy"  # score of the total uncertainty

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
    """Sum the log class probabilities of consecutive draws into G groups."""
    log_probs_N_C_K = log_probs.transpose(1, 2, 0).astype(np.float64, order="C")
    probs_N_C_K = np.exp(log_probs_N_C_K)
    np.maximum(log_probs_N_C_K, MIN_LOG, out=log_probs_N_C_K)  # 0 log 0 = 0
    log_probs_N_C_K *= probs_N_C_K
    entropy_N_K = -np.add.reduce(log_probs_N_C_K, axis=1)
    return DrawSums.from_draws(probs_N_C_K, entropy_N_K, first_draw, groups)


def predictive_scores(sums: DrawSums, standard_errors: bool | Collection[str] = True) -> Scores:
    """Compute the scores, with standard errors for all scores or only the named ones.

    `bald_corrected` needs the standard error of `entropy` or `bald`.
    """
    sums = sums.drop_empty_groups()
    mean_over_draws = Average(sums.num_draws)
    mean_N_C_G, entropy_N_G = sums.prediction, sums.uncertainty

    probs_N_C = mean_over_draws(mean_N_C_G)
    deviation_N_C_G = mean_N_C_G - probs_N_C[..., None]
    square_N_C_G = np.square(deviation_N_C_G)
    if not mean_over_draws.has_single_draws:
        square_N_C_G += sums.squared_deviations / sums.num_draws
    log_probs_N_C = np.log(np.maximum(probs_N_C, MIN_PROBABILITY))  # 0 log 0 = 0
    # Each group's mean cross entropy -sum_c p_kc log p_c, whose mean over groups is H(p)
    cross_entropy_N_G = -np.add.reduce(mean_N_C_G * log_probs_N_C[..., None], axis=1)
    variance_N_C = mean_over_draws(square_N_C_G)
    std_N_C = np.sqrt(variance_N_C)
    entropy_N = np.maximum(mean_over_draws(cross_entropy_N_G), 0.0)  # removes -0.0
    expected_entropy_N = np.maximum(mean_over_draws(entropy_N_G), 0.0)
    bald_N = np.maximum(entropy_N - expected_entropy_N, 0.0)  # removes rounding errors
    if mean_over_draws.num_draws == 1:
        bald_N = np.zeros_like(bald_N)  # only rounding errors
    label_N = probs_N_C.argmax(axis=1)

    errors = corrected_N = None
    names = set(SCORE_NAMES if standard_errors is True else standard_errors or ())
    if names and len(sums.num_draws) > 1:
        odds_G = mean_over_draws.odds_G
        without_N_C_G = np.maximum(probs_N_C[..., None] - odds_G * deviation_N_C_G, 0.0)
        change: dict[str, Float64[np.ndarray, "N G"]] = {}  # if a group is left out
        if names & {"entropy", "bald"}:
            divergence_N_G = _divergence(without_N_C_G, probs_N_C)
            corrected_N = bald_N + mean_over_draws.jackknife_bias(divergence_N_G)
            change["entropy"] = (entropy_N[:, None] - cross_entropy_N_G) * odds_G - divergence_N_G
            change["bald"] = (entropy_N_G - expected_entropy_N[:, None]) * odds_G
            change["bald"] += change["entropy"]
        if "mean_std" in names:
            std_without_N_C_G = mean_over_draws.leave_one_out_variances(
                variance_N_C, square_N_C_G, deviation_N_C_G
            )
            np.sqrt(std_without_N_C_G, out=std_without_N_C_G)
            change["mean_std"] = std_without_N_C_G.sum(axis=1) - std_N_C.sum(axis=1)[:, None]
            change["mean_std"] /= len(std_N_C[0])
        if "variation_ratio" in names:
            max_prob_N = probs_N_C.max(axis=1)
            change["variation_ratio"] = max_prob_N[:, None] - without_N_C_G.max(axis=1)
        if len(sums.num_draws) < MIN_SPREAD_GROUPS:
            names -= set(DISAGREEMENTS)
        ordered = [name for name in SCORE_NAMES if name in names]
        errors = {name: mean_over_draws.standard_error(change[name]) for name in ordered}
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
    """Compute the divergence KL(p_-j || p) for each left-out group j."""
    log_ratio_N_C_G = without_N_C_G / np.maximum(probs_N_C, MIN_PROBABILITY)[..., None]
    np.maximum(log_ratio_N_C_G, MIN_PROBABILITY, out=log_ratio_N_C_G)  # 0 log 0 = 0
    np.log(log_ratio_N_C_G, out=log_ratio_N_C_G)
    log_ratio_N_C_G *= without_N_C_G
    return np.add.reduce(log_ratio_N_C_G, axis=1)


class Classes:
    """The categorical predictive distribution of a classification.

    Attributes:
        output: the name of the network's output.
        score_names: the uncertainty scores that detectors use.
        acquisition_scores: the score of each acquisition that ranks rows separately.
        joint_acquisitions: acquisitions that score rows given the rows selected before.
        default_acquisition: used if a request names none.
        sampling_acquisitions: acquisitions that sample rows with weights.
        race_acquisitions: acquisitions whose scores have standard errors.
        jackknife_scores: the score whose standard error an acquisition needs.
    """

    output = "log_probs"
    score_names = SCORE_NAMES
    acquisition_scores: ClassVar = {name: name for name in (*SCORE_NAMES, "bald_corrected")} | {
        "power_bald": "bald"
    }
    joint_acquisitions = ("batchbald",)
    default_acquisition = "bald"
    sampling_acquisitions = ("power_bald",)
    race_acquisitions = SCORE_NAMES
    jackknife_scores: ClassVar = {"bald_corrected": "bald"}
    sums = staticmethod(predictive_sums)
    scores = staticmethod(predictive_scores)

    def samples(self, outputs: Float32[np.ndarray, "K N C"]) -> Float32[np.ndarray, "K N C"]:
        return np.exp(outputs)

    def acquisition(self, scores: Any, name: str) -> Float64[np.ndarray, "N"]:
        """Return the scores for ranking a pool. Rows with high scores should be labelled first."""
        score: Float64[np.ndarray, "N"] | None = getattr(scores, self.acquisition_scores[name])
        return scores.by_name()["bald"] if score is None else score

    def ranking_scores(self, race_scores: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        return race_scores
