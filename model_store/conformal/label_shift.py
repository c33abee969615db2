"""Label shift: rows whose classes have other shares than among the calibration rows, but look as
theirs do.

With shares pi' of the classes where the calibration rows' population has pi, and p(x | y) the same,
a calibration row of class k counts as w_k = pi'_k / pi_k rows, and so does the new row (Podkopaev
and Ramdas, "Distribution-free uncertainty quantification for classification under label shift",
2021; Tibshirani et al., "Conformal prediction under covariate shift", 2019). If the new row is of
class k, then

    p_k = (sum of w_i over calibration rows i at least as large + w_k) / (sum of all w_i + w_k)

is at most a with a probability of at most a. Its class is not known, so

* a prediction set holds the classes k for which p_k, of k's nonconformity, is above 1 - coverage:
  it holds the true one with a probability of at least `coverage`. With all weights 1 it is the set
  of `sets`;
* the p-value of a score is the largest p_k, that of the largest weight. The flag's rate is thus
  kept, with room.

Both hold for the weights as they are: shares of the calibration rows' population are counted of
finite data.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.conformal.calibration import Calibration
from model_store.conformal.rank_tables import ConformalPValues

LABELS, SHARES = "label_shift.labels", "label_shift.shares"


@dataclass(frozen=True, eq=False)
class WeightedRows:
    """The calibration rows under one number of draws, each of which counts as `weights` rows;
    what new rows are ranked among. Not sorted. `class_weights` are those of new rows of each
    class."""

    num_draws: int
    statistic: Float64[np.ndarray, "m"]
    surprisals: dict[str, Float64[np.ndarray, "m"]]
    nonconformity: Float64[np.ndarray, "m"]
    weights: Float64[np.ndarray, "m"]
    class_weights: Float64[np.ndarray, "C"]

    def p_values(
        self, statistic: Float64[np.ndarray, "N"], surprisals: dict[str, Float64[np.ndarray, "N"]]
    ) -> ConformalPValues:
        """Return p-values of N rows, given the flag's statistic and each detector's surprisal."""
        largest = float(self.class_weights.max())
        return ConformalPValues(
            weighted_p_value(statistic, self.statistic, self.weights, largest),
            {
                name: weighted_p_value(surprisal, self.surprisals[name], self.weights, largest)
                for name, surprisal in surprisals.items()
            },
        )

    def prediction_sets(
        self, mass: Float64[np.ndarray, "N C"], coverage: float
    ) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set, given the mass above each.

        One that new rows are never of does not.
        """
        inside = np.zeros(mass.shape, dtype=bool)
        for k, weight in enumerate(self.class_weights.tolist()):
            if weight > 0:
                p_value = weighted_p_value(mass[:, k], self.nonconformity, self.weights, weight)
                inside[:, k] = p_value > 1.0 - coverage
        return inside


@dataclass(frozen=True, eq=False)
class LabelShift:
    """The calibration rows' classes, in their split's order, and each class's share of the
    population they are from."""

    labels: Int64[np.ndarray, "m"]
    shares: Float64[np.ndarray, "C"]

    def unknown(self, priors: Float64[np.ndarray, "C"]) -> Int64[np.ndarray, "U"]:
        """Return the numbers of classes that new rows may be of, and of which no calibration row
        could be."""
        return np.flatnonzero((priors > 0) & (self.shares == 0))

    def weighted(
        self, calibration: Calibration, num_draws: int, priors: Float64[np.ndarray, "C"]
    ) -> WeightedRows:
        if len(self.unknown(priors)):
            raise ValueError(f"expected no share of the classes {self.unknown(priors)}, got one")
        at = calibration.draw_counts.tolist().index(num_draws)
        none = np.zeros_like(priors)
        class_weights = np.divide(priors, self.shares, out=none, where=self.shares > 0)
        return WeightedRows(
            num_draws,
            calibration.statistic[at],
            {name: surprisals[at] for name, surprisals in calibration.surprisals.items()},
            calibration.nonconformity[at],
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
        labels, shares = tensors.get(LABELS), tensors.get(SHARES)
        if labels is None or labels.dtype != np.int64 or labels.shape != (rows,):
            raise ValueError(f"{LABELS}: expected an int64 number for each ranking row")
        if not np.all((labels >= 0) & (labels < num_labels)):
            raise ValueError(f"{LABELS}: expected numbers of the {num_labels} classes")
        if shares is None or shares.dtype != np.float64 or shares.shape != (num_labels,):
            expected = f"expected a float64 number for each of {num_labels} classes"
            raise ValueError(f"{SHARES}: {expected}")
        sums_to_1 = abs(float(shares.sum()) - 1.0) <= 1e-6
        if not (np.all(shares >= 0) and sums_to_1 and np.all(shares[labels] != 0)):
            expected = "expected shares that sum to 1, above 0 of the ranking rows' classes"
            raise ValueError(f"{SHARES}: {expected}")
        return cls(labels, shares)


def weighted_p_value(
    score: Float64[np.ndarray, "N"],
    calibration: Float64[np.ndarray, "m"],
    weights: Float64[np.ndarray, "m"],
    own_weight: float,
) -> Float64[np.ndarray, "N"]:
    """Return the weight of the calibration rows whose score is at least as large and of the row's
    own, as a share."""
    order = np.argsort(calibration, kind="stable")
    from_here = np.concatenate([weights[order][::-1].cumsum()[::-1], [0.0]])
    at_least = from_here[calibration[order].searchsorted(score)]
    return (at_least + own_weight) / (from_here[0] + own_weight)


def shift_log_probs(
    log_probs: Float64[np.ndarray, "K N C"], log_ratio: Float64[np.ndarray, "C"]
) -> Float64[np.ndarray, "K N C"]:
    """Return the log class probabilities of each draw under other shares of the classes, by Bayes'
    rule:

        p'(y | x) = p(y | x) pi'_y / pi_y, normalised,

    given log(pi' / pi), -inf of a class that no row is of.
    """
    shifted = log_probs + log_ratio
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
