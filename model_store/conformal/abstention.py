"""Abstention with an upper bound on a classifier's selective risk.

The service answers a row if the flag does not fire and the row's *uncertainty*, 1 - the largest
mean probability, does not exceed a threshold. Otherwise it abstains. The selective risk is the
probability that the label of an answered row is wrong. With probability `CONFIDENCE` or more over
the choice of the calibration split, the selective risk does not exceed the requested level. This
assumes that calibration rows and new rows are independent and identically distributed.

Sequential testing selects the threshold (Angelopoulos, Bates, Candes, Jordan and Lei, "Learn
then test: calibrating predictive algorithms to achieve risk control", 2021, section 2.3; for the
setting: Geifman and El-Yaniv, "Selective classification for deep neural networks", 2017). The
candidates are quantiles of the reference split's uncertainty, so they do not depend on the
calibration split. For each candidate, the calibration rows that it answers test the hypothesis
"the risk exceeds the level". With k wrong labels among n rows, the p-value is
P(Binomial(n, level) <= k). The fallback procedure (Wiens and Dmitrienko, "The fallback procedure
for evaluating a single family of hypotheses", 2005) divides the error 1 - CONFIDENCE between two
starts: the smallest candidate at which the expected number of answered rows allows a wrong label,
and the candidate that answers `LATE_START` of the rows. From a start, tests continue to larger
thresholds until one fails to reject. A sequence that reaches the second start adds the second
start's error to its own. So with probability CONFIDENCE, no true hypothesis is rejected. The result
is the largest threshold whose hypothesis is rejected.

**Flagged rows.** Among n calibration rows, the flag fires on rows whose statistic exceeds the h-th
largest calibration statistic, h = floor(fpr (n + 1)). Given that value, the other n - h calibration
rows are independent samples of unflagged rows, if the statistic is continuous. Only these rows
enter the tests.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.scores.records import check_tensor

CONFIDENCE = 0.95
NUM_CANDIDATES = 100
LATE_START, LATE_SHARE = 0.75, 0.3  # share of the rows, and of the error
DECIMALS = 4  # of the smallest risk
NO_THRESHOLD = -math.inf  # answers no row
TENSORS = ("abstention.candidates", "abstention.doubt", "abstention.is_wrong")


@dataclass(frozen=True, eq=False)
class Abstention:
    """The candidate thresholds, with m calibration rows sorted by the flag's statistic."""

    candidates: Float64[np.ndarray, "T"]  # rising; the last answers all unflagged rows
    uncertainty: Float64[np.ndarray, "m"]
    is_wrong: Bool[np.ndarray, "m"]

    def threshold(self, num_flagged: int, risk: float) -> float:
        """Return the largest uncertainty at which the service still answers, or `NO_THRESHOLD`.

        `num_flagged` is the number of flagged calibration rows (h above).
        """
        unflagged = len(self.uncertainty) - num_flagged
        uncertainty, is_wrong = self.uncertainty[:unflagged], self.is_wrong[:unflagged]
        order = np.argsort(uncertainty, kind="stable")
        num_answered = uncertainty[order].searchsorted(self.candidates, side="right")
        num_wrong = np.concatenate([[0], is_wrong[order].cumsum()])[num_answered]
        p_values = binomial_cdf(num_wrong, num_answered, risk)
        expected = unflagged * np.arange(1, NUM_CANDIDATES + 1) // NUM_CANDIDATES
        one_wrong = np.minimum(1, expected)
        allows_one = binomial_cdf(one_wrong, expected, risk) <= 1.0 - CONFIDENCE
        start = int(allows_one.argmax()) if allows_one.any() else NUM_CANDIDATES - 1
        weights = np.zeros(NUM_CANDIDATES)
        weights[start] = 1.0 - LATE_SHARE
        weights[max(start, round(LATE_START * NUM_CANDIDATES) - 1)] += LATE_SHARE
        threshold, share = NO_THRESHOLD, 0.0
        for i, p_value in enumerate(p_values):
            share += weights[i]
            if share > 0 and p_value <= share * (1.0 - CONFIDENCE):
                threshold = float(self.candidates[i])
            else:
                share = 0.0
        return threshold

    def smallest_risk(self, num_flagged: int, above: float = 0.0) -> float:
        """Find a risk level above a bound at which the service answers rows, by bisection.

        Risks are multiples of 10^-DECIMALS. With the next smaller one, the service answers no row.
        Smaller risks could be possible, because answers need not be monotone in the risk. Returns 1
        if there is none.
        """
        steps = 10**DECIMALS
        risks = range(math.floor(above * steps) + 1, steps)
        answers = lambda i: self.threshold(num_flagged, i / steps) != NO_THRESHOLD  # noqa: E731
        return (risks.start + bisect_left(risks, True, key=answers)) / steps


@dataclass(frozen=True, eq=False)
class Answers:
    """The candidate thresholds and calibration rows for each of J draw counts."""

    candidates: Float64[np.ndarray, "J T"]
    uncertainty: Float64[np.ndarray, "J m"]
    is_wrong: Bool[np.ndarray, "J m"]

    @classmethod
    def from_splits(
        cls,
        reference_uncertainty: Float64[np.ndarray, "J n"],
        ranking_uncertainty: Float64[np.ndarray, "J m"],
        is_wrong: Bool[np.ndarray, "J m"],
    ) -> "Answers":
        rows = reference_uncertainty.shape[1]
        ranks = np.ceil(rows * np.arange(1, NUM_CANDIDATES + 1) / NUM_CANDIDATES).astype(int) - 1
        candidates = np.take(np.sort(reference_uncertainty, axis=1), ranks, axis=1)
        candidates[:, -1] = 1.0  # above every uncertainty
        return cls(candidates, ranking_uncertainty, is_wrong)

    def abstention(self, j: int, order: Int64[np.ndarray, "k"]) -> Abstention:
        """Select the calibration rows for the j-th draw count, in the given order."""
        return Abstention(self.candidates[j], self.uncertainty[j, order], self.is_wrong[j, order])

    def tensors(self) -> dict[str, np.ndarray]:
        return dict(zip(TENSORS, (self.candidates, self.uncertainty, self.is_wrong), strict=True))

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, np.ndarray], shape: tuple[int, ...]
    ) -> "Answers | None":
        if not any(name in tensors for name in TENSORS):
            return None
        candidates, uncertainty, is_wrong = TENSORS
        return cls(
            check_tensor(tensors, candidates, np.float64, (shape[0], NUM_CANDIDATES), 0, 1),
            check_tensor(tensors, uncertainty, np.float64, shape, 0, 1),
            check_tensor(tensors, is_wrong, np.bool_, shape),
        )


def binomial_cdf(
    wrong: Int64[np.ndarray, "T"], rows: Int64[np.ndarray, "T"], risk: float
) -> Float64[np.ndarray, "T"]:
    log_factorial = np.concatenate([[0.0], np.log(np.arange(1, rows.max(initial=0) + 1)).cumsum()])
    k = np.arange(wrong.max(initial=0) + 1)
    rest = rows[:, None] - k
    log_pmf = (
        log_factorial[rows][:, None]
        - log_factorial[k]
        - log_factorial[np.maximum(rest, 0)]
        + k * math.log(risk)
        + rest * math.log1p(-risk)
    )
    return np.exp(np.where(k <= wrong[:, None], log_pmf, -np.inf)).sum(axis=1)
