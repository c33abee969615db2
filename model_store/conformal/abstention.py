"""When to answer "undecided": uncertainty beyond which a classification's risk would exceed what
was asked for.

A row is answered if its *uncertainty*, 1 - the largest mean probability, is at most a threshold and
the flag does not fire on it; otherwise the service abstains. The selective risk is the probability
that the label of an answered row is wrong. The threshold is chosen such that, with a probability of
at least `CONFIDENCE` over the calibration split, the selective risk is at most the level asked for.
Rows must be independent and of one distribution, those of the calibration split and new ones.

It is chosen by fixed-sequence testing (Angelopoulos, Bates, Candes, Jordan and Lei, "Learn then
test: calibrating predictive algorithms to achieve risk control", 2021, section 2.3; Geifman and
El-Yaniv, "Selective classification for deep neural networks", 2017, have the setting). Candidates
are quantiles of the reference split's uncertainty, so that they do not depend on the calibration
split. Of each the hypothesis "the risk is more than the level" is tested on the calibration rows
that it answers: with k wrong of n the p-value is P(Binomial(n, level) <= k). Tests begin at each of
`STARTS` and go on to larger thresholds while they reject; the largest threshold that any of these
sequences rejects is taken. Each has an equal share of 1 - CONFIDENCE, so with that confidence no
hypothesis is rejected that is true.

**Flagged rows.** With n calibration rows a false-positive rate flags those whose statistic is
above the h-th largest ranking statistic, h = floor(fpr (n + 1)). Given that number, the n - h
calibration rows below it are independent rows of the distribution of unflagged rows (of a
continuous statistic): the tests look at these alone.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

CONFIDENCE = 0.95
STARTS = (0.125, 0.25, 0.5, 1.0)  # shares of the reference rows that a candidate answers
CANDIDATES = 100
DECIMALS = 4  # of the smallest risk
NOTHING = -math.inf  # the threshold that answers no row
TENSORS = ("abstention.candidates", "abstention.doubt", "abstention.is_wrong")


@dataclass(frozen=True, eq=False)
class Abstention:
    """What thresholds are chosen from.

    The m calibration rows are in the order of their flag's statistic, the rows most like the
    reference rows first.
    """

    candidates: Float64[np.ndarray, "T"]  # rising; the last answers every row that is not flagged
    uncertainty: Float64[np.ndarray, "m"]
    is_wrong: Bool[np.ndarray, "m"]

    def threshold(self, flagged: int, risk: float) -> float:
        """Return the largest uncertainty to answer at, or `NOTHING`.

        Args:
            flagged: how many calibration rows the flag would fire on (h above).
            risk: the level, in (0, 1).
        """
        unflagged = len(self.uncertainty) - flagged
        uncertainty, is_wrong = self.uncertainty[:unflagged], self.is_wrong[:unflagged]
        order = np.argsort(uncertainty, kind="stable")
        answered = uncertainty[order].searchsorted(self.candidates, side="right")
        wrong = np.concatenate([[0], is_wrong[order].cumsum()])[answered]
        is_rejected = binomial_cdf(wrong, answered, risk) <= (1.0 - CONFIDENCE) / len(STARTS)
        ends = [_end(is_rejected, math.ceil(share * CANDIDATES) - 1) for share in STARTS]
        return NOTHING if max(ends) < 0 else float(self.candidates[max(ends)])

    def smallest_risk(self, flagged: int) -> float:
        """Return the smallest level at which any row is answered, in steps of 10^-DECIMALS; 1 if
        there is none."""
        steps = 10**DECIMALS
        answers = lambda i: self.threshold(flagged, i / steps) != NOTHING  # noqa: E731
        return (1 + bisect_left(range(1, steps), True, key=answers)) / steps


@dataclass(frozen=True, eq=False)
class Answers:
    """Of J numbers of draws the candidates for thresholds, the calibration rows' uncertainty, and
    which labels are wrong.

    Rows are in the calibration split's order.
    """

    candidates: Float64[np.ndarray, "J T"]
    uncertainty: Float64[np.ndarray, "J m"]
    is_wrong: Bool[np.ndarray, "J m"]

    @classmethod
    def of(
        cls,
        reference_uncertainty: Float64[np.ndarray, "J n"],
        ranking_uncertainty: Float64[np.ndarray, "J m"],
        is_wrong: Bool[np.ndarray, "J m"],
    ) -> "Answers":
        rows = reference_uncertainty.shape[1]
        places = np.ceil(rows * np.arange(1, CANDIDATES + 1) / CANDIDATES).astype(int) - 1
        candidates = np.take(np.sort(reference_uncertainty, axis=1), places, axis=1)
        candidates[:, -1] = 1.0  # uncertainty is less
        return cls(candidates, ranking_uncertainty, is_wrong)

    def abstention(self, j: int, order: Int64[np.ndarray, "k"]) -> Abstention:
        """Return what thresholds are chosen from at the j-th number of draws; `order` has the rows
        that count, by their statistic."""
        return Abstention(self.candidates[j], self.uncertainty[j, order], self.is_wrong[j, order])

    def tensors(self) -> dict[str, np.ndarray]:
        return dict(zip(TENSORS, (self.candidates, self.uncertainty, self.is_wrong), strict=True))

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, np.ndarray], shape: tuple[int, ...]
    ) -> "Answers | None":
        if not any(name in tensors for name in TENSORS):
            return None
        require(tensors, *TENSORS)
        candidates, uncertainty, is_wrong = (tensors[name] for name in TENSORS)
        is_shaped = candidates.shape == (shape[0], CANDIDATES)
        rises = is_shaped and np.all(np.diff(candidates, axis=1) >= 0)
        fits = (rises, uncertainty.shape == shape)
        for name, array, is_right in zip(TENSORS, (candidates, uncertainty), fits, strict=False):
            if not is_right or array.dtype != np.float64 or not np.all((array >= 0) & (array <= 1)):
                expected = "float64 numbers from 0 to 1, rows of them for each of draw_counts"
                raise ValueError(f"{name}: expected {expected}")
        if is_wrong.shape != shape or is_wrong.dtype != np.bool_:
            expected = "a boolean for each of the ranking statistics"
            raise ValueError(f"{TENSORS[2]}: expected {expected}")
        return cls(candidates, uncertainty, is_wrong)


def require(tensors: Mapping[str, np.ndarray], *names: str) -> None:
    """Raise ValueError if tensors of a calibration are missing."""
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"expected tensors {missing}, which are not there")


def binomial_cdf(
    wrong: Int64[np.ndarray, "T"], rows: Int64[np.ndarray, "T"], risk: float
) -> Float64[np.ndarray, "T"]:
    """Return P(Binomial(rows, risk) <= wrong), risk in (0, 1)."""
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


def _end(is_rejected: Bool[np.ndarray, "T"], start: int) -> int:
    accepted = np.flatnonzero(~is_rejected[start:])
    stop = start + int(accepted[0]) if len(accepted) else len(is_rejected)
    return stop - 1 if stop > start else -1
