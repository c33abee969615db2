"""Detectors: from scores of N rows to surprisals in nats, and the statistic behind the flag.

A *detector* is a score of which more means more unlike the calibration data; of a two-sided one less does too. Its
*surprisal* is -log of the tail probability of a score among those of the reference split, interpolated so that it is
continuous, and strictly increasing beyond them.

Scores of density detectors are first made comparable: z = (log score - centre) / spread, with centre and spread those
of the reference rows of the same predicted label, since a score that is common among eights may be rare among ones.

The flag's statistic is minus the logarithm of the harmonic mean p-value of the combined detectors,

    log mean_j exp(surprisal_j)

(Wilson, "The harmonic mean p-value for combining dependent tests", 2019): one detector that is sure is enough, those
that see nothing dilute it little, and dependent ones do not count twice. It is ranked, so that no approximation of
its distribution is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

TAIL_FRACTION = 0.1  # of the reference scores, from which the tail beyond the last is extrapolated
LEAST_SCORE = 1e-300
SHRINKAGE_ROWS = 20  # how many rows of a label weigh as much as all labels' rows together


@dataclass(frozen=True, eq=False)
class Surprisal:
    """-log of the smoothed tail probability of a detector's reference scores, in nats, 0 or more.

    Linear between the sorted reference scores; beyond the largest an exponential tail whose mean excess is that of
    the largest tenth, so that scores never seen are still told apart. A two-sided surprisal has the same tail below
    the smallest, and is that of the smaller of the two tail probabilities, doubled.
    """

    reference: Float64[np.ndarray, "n"]
    tail: Float64[np.ndarray, "n"]
    above: float  # nats a unit of score beyond the largest
    below: float  # nats a unit of score beyond the smallest; 0 of a one-sided surprisal

    @classmethod
    def fit(cls, reference: Float64[np.ndarray, "n"], is_two_sided: bool = False) -> "Surprisal":
        """Fit on sorted reference scores."""
        n = len(reference)
        upper = -np.log((n - np.arange(n)) / (n + 1.0))
        if not is_two_sided:
            return cls(reference, upper, _slope(reference), 0.0)
        tail = np.maximum(np.maximum(upper, upper[::-1]) - np.log(2.0), 0.0)
        return cls(reference, tail, _slope(reference), _slope(-reference[::-1]))

    def __call__(self, score: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return the surprisal of each score."""
        surprisal = np.interp(score, self.reference, self.tail) + self.above * np.maximum(
            score - self.reference[-1], 0.0
        )
        return surprisal + self.below * np.maximum(self.reference[0] - score, 0.0) if self.below else surprisal

    def is_low(self, score: Float64[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
        """Return which scores of a two-sided detector are surprising, if at all, for being small."""
        return (score < np.median(self.reference)) & bool(self.below)


def _slope(reference: Float64[np.ndarray, "n"]) -> float:
    """Return nats a unit of score beyond the largest of the sorted reference scores."""
    top = reference[-max(1, int(TAIL_FRACTION * len(reference))) :]
    scale = float(np.mean(top) - top[0])
    if scale <= 0.0:  # equal scores say nothing of the tail: take their size as its unit
        scale = max(abs(float(reference[-1])), 1.0)
    return 1.0 / scale


@dataclass(frozen=True, eq=False)
class Standard:
    """Location and spread of a density detector's log scores, by predicted label."""

    centre: Float64[np.ndarray, "C"]
    spread: Float64[np.ndarray, "C"]

    @classmethod
    def fit(cls, score: Float64[np.ndarray, "n"], label: Int64[np.ndarray, "n"], num_labels: int) -> "Standard":
        """Fit on reference scores, 0 or more; labels with few rows are drawn to what holds of all rows."""
        z = np.log(np.maximum(score, LEAST_SCORE))
        count = np.bincount(label, minlength=num_labels)
        share = count / (count + SHRINKAGE_ROWS)
        mean = np.bincount(label, z, num_labels) / np.maximum(count, 1)
        variance = np.bincount(label, np.square(z - mean[label]), num_labels) / np.maximum(count, 1)
        overall = float(z.var())
        variance = share * variance + (1 - share) * (overall if overall > 0 else 1.0)
        return cls(share * mean + (1 - share) * z.mean(), np.sqrt(variance))

    def __call__(self, score: Float64[np.ndarray, "N"], label: Int64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return standardised log scores."""
        return (np.log(np.maximum(score, LEAST_SCORE)) - self.centre[label]) / self.spread[label]


@dataclass(frozen=True, eq=False)
class FittedDetector:
    """A detector fitted on the reference split, at one number of draws."""

    standard: Standard | None  # of density detectors
    surprisal: Surprisal

    def __call__(self, score: Float64[np.ndarray, "N"], label: Int64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return the surprisal of each score."""
        return self.surprisal(self._standardised(score, label))

    def is_low(self, score: Float64[np.ndarray, "N"], label: Int64[np.ndarray, "N"]) -> Bool[np.ndarray, "N"]:
        """Return which scores are surprising, if at all, for being small."""
        return self.surprisal.is_low(self._standardised(score, label))

    def _standardised(
        self, score: Float64[np.ndarray, "N"], label: Int64[np.ndarray, "N"]
    ) -> Float64[np.ndarray, "N"]:
        return score if self.standard is None else self.standard(score, label)


def combined_surprisal(surprisals: list[Float64[np.ndarray, "N"]]) -> Float64[np.ndarray, "N"]:
    """Return log mean_j exp(surprisal_j)."""
    return np.logaddexp.reduce(surprisals, axis=0) - np.log(len(surprisals))


def flag_statistic(
    surprisals: Mapping[str, Float64[np.ndarray, "N"]], combined: tuple[str, ...]
) -> Float64[np.ndarray, "N"]:
    """Return the statistic of rows, given each detector's surprisals and the names of those to combine."""
    return combined_surprisal([surprisals[name] for name in combined])


def harmonic_shares(surprisals: Mapping[str, Float64[np.ndarray, "N"]]) -> dict[str, Float64[np.ndarray, "N"]]:
    """Return each combined detector's share of exp(statistic) = mean_j exp(surprisal_j); a row's shares sum to 1."""
    largest = np.max([*surprisals.values()], axis=0)
    parts = {name: np.exp(surprisal - largest) for name, surprisal in surprisals.items()}
    total = np.sum([*parts.values()], axis=0)
    return {name: part / total for name, part in parts.items()}
