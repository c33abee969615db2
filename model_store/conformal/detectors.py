"""Convert detector scores to surprisals and combine them into the flag's statistic.

A *detector* is a score that is larger for rows unlike the calibration data. For a two-sided
detector, small scores are unusual too. The *surprisal* of a score is -log of its tail probability
in the reference split. It is interpolated to be continuous, and strictly increasing beyond the
reference scores. A small split determines this increase from few rows. `Tail` allows for that:
otherwise rows slightly beyond two nearly equal reference scores would be very surprising.

Scores of density detectors are standardised first: z = (log score - centre) / spread, with the
centre and spread of reference rows with the same predicted label. A score that is common among
eights can be rare among ones.

The flag's statistic is minus the logarithm of the harmonic mean p-value of the combined detectors,

    log mean_j exp(surprisal_j)

(Wilson, "The harmonic mean p-value for combining dependent tests", 2019). A single surprised
detector suffices, detectors that notice nothing dilute it little, and dependent detectors do not
count twice. The statistic is ranked, so its distribution needs no approximation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

TAIL_FRACTION = 0.1  # of the reference scores, fits the tail
PRIOR_EXCESSES = 5  # weight of the prior scale, in excesses
MIN_SCORE = 1e-300
SHRINKAGE_ROWS = 20  # weight of the mean over labels, in rows

Scores = Float64[np.ndarray, "N"]
Labels = Int64[np.ndarray, "N"]


@dataclass(frozen=True)
class Tail:
    """The surprisal of scores beyond the largest reference score, in nats.

    Excesses over a high score are modelled as exponential. If their mean s were known, the
    surprisal of an excess e would be e / s. The rate 1 / s has the prior Gamma(P, P unit) with P =
    `PRIOR_EXCESSES`, and k excesses of reference rows have mean m. The predictive probability that
    a new excess is larger than e is

        (1 + e / (n s))^-n        n = P + k,  s = (P unit + k m) / n

    With few rows the prior's unit dominates. As k grows, the probability tends to exp(-e / m). The
    prior protects against scales that are small by chance, or because nearly all scores are 0.
    """

    scale: float  # s, in units of the score
    excesses: float  # n

    @classmethod
    def fit(cls, reference: Float64[np.ndarray, "n"], unit: float) -> "Tail":
        """Fit the tail to sorted reference scores. `unit` is the prior mean excess."""
        rows = len(reference)
        count = int(TAIL_FRACTION * rows)
        tail = reference[rows - count :] - reference[rows - count - 1] if count else 0.0
        total = float(np.sum(tail))
        excesses = float(PRIOR_EXCESSES + count)
        return cls((PRIOR_EXCESSES * unit + total) / excesses, excesses)

    def __call__(self, excess: Scores) -> Scores:
        return self.excesses * np.log1p(excess / (self.excesses * self.scale))


@dataclass(frozen=True, eq=False)
class Surprisal:
    """The surprisal of a score in nats: -log of its tail probability in the reference split.

    It is linear between the sorted reference scores. Beyond the largest, a `Tail` fitted to the
    largest tenth still distinguishes scores. A two-sided surprisal also has a tail below the
    smallest score, and uses the smaller of both tail probabilities, doubled.
    """

    reference: Float64[np.ndarray, "n"]
    surprisals: Float64[np.ndarray, "n"]  # of the reference scores
    upper_tail: Tail
    lower_tail: Tail | None  # None if one-sided

    @classmethod
    def fit(
        cls,
        reference: Float64[np.ndarray, "n"],
        is_two_sided: bool = False,
        unit: float | None = None,
    ) -> "Surprisal":
        size = unit or abs(float(reference[-1])) or 1.0
        n = len(reference)
        upper = -np.log((n - np.arange(n)) / (n + 1.0))
        if not is_two_sided:
            return cls(reference, upper, Tail.fit(reference, size), None)
        surprisals = np.maximum(np.maximum(upper, upper[::-1]) - np.log(2.0), 0.0)
        lower_tail = Tail.fit(-reference[::-1], size)
        return cls(reference, surprisals, Tail.fit(reference, size), lower_tail)

    def __call__(self, score: Scores) -> Scores:
        surprisal = np.interp(score, self.reference, self.surprisals)
        surprisal += self.upper_tail(np.maximum(score - self.reference[-1], 0.0))
        if self.lower_tail is not None:
            surprisal += self.lower_tail(np.maximum(self.reference[0] - score, 0.0))
        return surprisal

    def is_low(self, score: Scores) -> Bool[np.ndarray, "N"]:
        """Mark the scores of a two-sided detector that are closer to the lower tail."""
        return (score < np.median(self.reference)) & (self.lower_tail is not None)


@dataclass(frozen=True, eq=False)
class Standard:
    """The location and spread of a density detector's log scores for each predicted label."""

    centre: Float64[np.ndarray, "C"]
    spread: Float64[np.ndarray, "C"]

    @classmethod
    def fit(
        cls, score: Float64[np.ndarray, "n"], label: Int64[np.ndarray, "n"], num_labels: int
    ) -> "Standard":
        """Fit to non-negative scores. Estimates are shrunk for labels that have few rows."""
        z = np.log(np.maximum(score, MIN_SCORE))
        count = np.bincount(label, minlength=num_labels)
        share = count / (count + SHRINKAGE_ROWS)
        mean = np.bincount(label, z, num_labels) / np.maximum(count, 1)
        variance = np.bincount(label, np.square(z - mean[label]), num_labels) / np.maximum(count, 1)
        overall = float(z.var())
        variance = share * variance + (1 - share) * (overall if overall > 0 else 1.0)
        return cls(share * mean + (1 - share) * z.mean(), np.sqrt(variance))

    def __call__(self, score: Scores, label: Labels) -> Scores:
        return (np.log(np.maximum(score, MIN_SCORE)) - self.centre[label]) / self.spread[label]


@dataclass(frozen=True, eq=False)
class FittedDetector:
    standard: Standard | None  # only for density detectors
    surprisal: Surprisal

    def __call__(self, score: Scores, label: Labels) -> Scores:
        return self.surprisal(self._standardise(score, label))

    def is_low(self, score: Scores, label: Labels) -> Bool[np.ndarray, "N"]:
        return self.surprisal.is_low(self._standardise(score, label))

    def _standardise(self, score: Scores, label: Labels) -> Scores:
        return score if self.standard is None else self.standard(score, label)


def flag_statistic(surprisals: Mapping[str, Scores], combined: tuple[str, ...]) -> Scores:
    """Compute log mean_j exp(surprisal_j) over the combined detectors."""
    values = [surprisals[name] for name in combined]
    return np.logaddexp.reduce(values, axis=0) - np.log(len(values))


def harmonic_shares(surprisals: Mapping[str, Scores]) -> dict[str, Scores]:
    largest = np.max([*surprisals.values()], axis=0)
    parts = {name: np.exp(surprisal - largest) for name, surprisal in surprisals.items()}
    total = np.sum([*parts.values()], axis=0)
    return {name: part / total for name, part in parts.items()}
