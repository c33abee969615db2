"""Conformal prediction under label shift, where class shares change but p(x | y) does not.

If the class shares are pi' instead of pi, calibration rows and new rows of class k have the weight
w_k = pi'_k / pi_k (Podkopaev and Ramdas, "Distribution-free uncertainty quantification for
classification under label shift", 2021; Tibshirani et al., "Conformal prediction under covariate
shift", 2019). If a new row has class k, then for any a

    p_k = (sum of w_i over calibration rows i at least as large + w_k) / (sum of all w_i + w_k)

satisfies P(p_k <= a) <= a. The class is unknown. Therefore:

* A prediction set contains each class k whose p_k, computed from k's nonconformity, exceeds
  1 - coverage. It contains the true class with probability `coverage` or more. If all weights are
  1, it is the usual set (`rank_tables`).
* A score's p-value is the largest p_k, which belongs to the largest weight. So the flag's rate
  does not exceed fpr, and is usually smaller.

The guarantees treat the weights as exact. In practice, pi is estimated from finite data.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from model_store.conformal.calibration import Calibration
from model_store.conformal.rank_tables import ConformalPValues
from model_store.scores.records import check_tensor

Shares = Float64[np.ndarray, "C"]
Values = Float64[np.ndarray, "N"]
LABELS, SHARES = "label_shift.labels", "label_shift.shares"


@dataclass(frozen=True, eq=False)
class WeightedRows:
    """Weighted calibration rows for one draw count, with class weights for new rows."""

    num_draws: int
    statistic: Float64[np.ndarray, "m"]
    surprisals: dict[str, Float64[np.ndarray, "m"]]
    nonconformity: Float64[np.ndarray, "m"]
    weights: Float64[np.ndarray, "m"]
    class_weights: Shares

    def p_values(self, statistic: Values, surprisals: dict[str, Values]) -> ConformalPValues:
        max_weight = float(self.class_weights.max())
        by_detector = {
            name: weighted_p_value(surprisal, self.surprisals[name], self.weights, max_weight)
            for name, surprisal in surprisals.items()
        }
        p_value = weighted_p_value(statistic, self.statistic, self.weights, max_weight)
        return ConformalPValues(p_value, by_detector)

    def prediction_sets(
        self,
        mass: Float64[np.ndarray, "N C"],
        coverage: float,
        confidence: float | None = None,
        categories: Int64[np.ndarray, "N"] | None = None,
    ) -> Bool[np.ndarray, "N C"]:
        """Compute each row's prediction set from the total probability of more probable classes.

        Classes that new rows never have are not in any set.
        """
        assert confidence is None and categories is None
        inside = np.zeros(mass.shape, dtype=bool)
        for k, weight in enumerate(self.class_weights.tolist()):
            if weight > 0:
                p_value = weighted_p_value(mass[:, k], self.nonconformity, self.weights, weight)
                inside[:, k] = p_value > 1.0 - coverage
        return inside


@dataclass(frozen=True, eq=False)
class LabelShift:
    """The calibration rows' classes and each class's share of the population."""

    labels: Int64[np.ndarray, "m"]
    shares: Shares

    def unknown_classes(self, priors: Shares) -> Int64[np.ndarray, "U"]:
        """Return the indices of classes with a positive prior but no calibration rows."""
        return np.flatnonzero((priors > 0) & (self.shares == 0))

    def weigh_rows(self, calibration: Calibration, num_draws: int, priors: Shares) -> WeightedRows:
        assert len(self.unknown_classes(priors)) == 0
        j = calibration.draw_counts.tolist().index(num_draws)
        zeros = np.zeros_like(priors)
        class_weights = np.divide(priors, self.shares, out=zeros, where=self.shares > 0)
        return WeightedRows(
            num_draws,
            calibration.statistic[j],
            {name: surprisals[j] for name, surprisals in calibration.surprisals.items()},
            calibration.nonconformity[j],
            class_weights[self.labels],
            class_weights,
        )

    def tensors(self) -> dict[str, np.ndarray]:
        return {LABELS: self.labels, SHARES: self.shares}

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, np.ndarray], rows: int, num_labels: int
    ) -> "LabelShift | None":
        if LABELS not in tensors and SHARES not in tensors:
            return None
        labels = check_tensor(tensors, LABELS, np.int64, (rows,), 0, num_labels - 1)
        shares = check_tensor(tensors, SHARES, np.float64, (num_labels,), 0, 1)
        if abs(float(shares.sum()) - 1.0) > 1e-6 or np.any(shares[labels] == 0):
            expected = "shares that sum to 1, positive for classes of ranking rows"
            raise ValueError(f"{SHARES}: expected {expected}")
        return cls(labels, shares)


def weighted_p_value(
    score: Values,
    calibration: Float64[np.ndarray, "m"],
    weights: Float64[np.ndarray, "m"],
    row_weight: float,
) -> Values:
    """Compute the weighted p-value p_k (see above) for new rows with weight `row_weight`."""
    order = np.argsort(calibration, kind="stable")
    upper_weight = np.concatenate([weights[order][::-1].cumsum()[::-1], [0.0]])
    weight = upper_weight[calibration[order].searchsorted(score)]
    return (weight + row_weight) / (upper_weight[0] + row_weight)


def shift_log_probs(
    log_probs: Float[np.ndarray, "K N C"],
    training_priors: tuple[float, ...],
    priors: tuple[float, ...],
) -> Float64[np.ndarray, "K N C"]:
    """Adjust the log class probabilities of each draw to new class shares with Bayes' rule.

    p'(y | x) = p(y | x) pi'_y / pi_y, normalised
    """
    ratio = np.zeros(len(priors))  # 0 if both shares are 0
    np.divide(priors, training_priors, out=ratio, where=np.array(priors) > 0)
    with np.errstate(divide="ignore"):
        shifted = log_probs.astype(np.float64) + np.log(ratio)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
