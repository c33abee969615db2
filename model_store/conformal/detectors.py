"""Detectors: from scores of N rows to surprisals in nats, and the statistic behind the flag.

A *detector* is a score of which more means more unlike the calibration data; of a two-sided one
less does too. Its *surprisal* is -log of the tail probability of a score among those of the
reference split, interpolated so that it is continuous, and strictly increasing beyond them. How
fast it increases there is estimated, of a small split from few rows; `Tail` takes that into
account, so that no row a little beyond the reference rows is more surprising than noise because two
reference scores happened to be nearly equal.

Scores of density detectors are first made comparable: z = (log score - centre) / spread, with
centre and spread those of the reference rows of the same predicted label, since a score that is
common among eights may be rare among ones.

The flag's statistic is minus the logarithm of the harmonic mean p-value of the combined detectors,

    log mean_j exp(surprisal_j)

(Wilson, "The harmonic mean p-value for combining dependent tests", 2019): one detector that is sure
is enough, those that see nothing dilute it little, and dependent ones do not count twice. It is
ranked, so that no approximation of its distribution is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

TAIL_FRACTION = 0.1  # of the reference scores, from which the tail beyond the last is extrapolated
PRIOR_EXCESSES = 5  # how many excesses the unit of a score weighs as much as
LEAST_SCORE = 1e-300
SHRINKAGE_ROWS = 20  # how many rows of a label weigh as much as all labels' rows together

Scores = Float64[np.ndarray, "N"]
Labels = Int64[np.ndarray, "N"]


@dataclass(frozen=True)
class Tail:
    """Nats beyond the last reference score, as a function of how far beyond.

    Excesses beyond a high score are taken for exponential. With a known mean s the surprisal of an
    excess e is e / s. Here the rate 1 / s has the law Gamma(P, P unit) beforehand, P =
    `PRIOR_EXCESSES`, and k excesses of the reference rows of mean m are known. The predictive
    probability that a new excess is more than e is then

        (1 + e / (n s))^-n        n = P + k,  s = (P unit + k m) / n

    With few rows it is that of the unit, and it tends to exp(-e / m) as k grows. So a scale that
    came out small by chance, or because nearly all scores are 0, does little harm.
    """

    scale: float  # s, in units of score
    excesses: float  # n

    @classmethod
    def fit(cls, reference: Float64[np.ndarray, "n"], unit: float) -> "Tail":
        """Fit on sorted reference scores; `unit` is the mean excess that is expected beforehand."""
        rows = len(reference)
        count = int(TAIL_FRACTION * rows)
        beyond = (
            float(np.sum(reference[rows - count :] - reference[rows - count - 1])) if count else 0.0
        )
        excesses = float(PRIOR_EXCESSES + count)
        return cls((PRIOR_EXCESSES * unit + beyond) / excesses, excesses)

    def __call__(self, excess: Scores) -> Scores:
        return self.excesses * np.log1p(excess / (self.excesses * self.scale))


@dataclass(frozen=True, eq=False)
class Surprisal:
    """-log of the smoothed tail probability of a detector's reference scores, in nats, 0 or more.

    Linear between the sorted reference scores; beyond the largest a `Tail` fitted to the largest
    tenth, so that scores never seen are still told apart. A two-sided surprisal has such a tail
    below the smallest too, and is that of the smaller of the two tail probabilities, doubled.
    """

    reference: Float64[np.ndarray, "n"]
    tail: Float64[np.ndarray, "n"]
    above: Tail
    below: Tail | None  # None of a one-sided surprisal

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
        tail = np.maximum(np.maximum(upper, upper[::-1]) - np.log(2.0), 0.0)
        above, below = (Tail.fit(scores, size) for scores in (reference, -reference[::-1]))
        return cls(reference, tail, above, below)

    def __call__(self, score: Scores) -> Scores:
        surprisal = np.interp(score, self.reference, self.tail)
        surprisal += self.above(np.maximum(score - self.reference[-1], 0.0))
        if self.below is not None:
            surprisal += self.below(np.maximum(self.reference[0] - score, 0.0))
        return surprisal

    def is_low(self, score: Scores) -> Bool[np.ndarray, "N"]:
        """Return which scores of a two-sided detector are surprising, if at all, for being
        small."""
        return (score < np.median(self.reference)) & (self.below is not None)


@dataclass(frozen=True, eq=False)
class Standard:
    """Location and spread of a density detector's log scores, by predicted label."""

    centre: Float64[np.ndarray, "C"]
    spread: Float64[np.ndarray, "C"]

    @classmethod
    def fit(
        cls, score: Float64[np.ndarray, "n"], label: Int64[np.ndarray, "n"], num_labels: int
    ) -> "Standard":
        """Fit on reference scores, 0 or more; labels with few rows are drawn to what holds of all
        rows."""
        z = np.log(np.maximum(score, LEAST_SCORE))
        count = np.bincount(label, minlength=num_labels)
        share = count / (count + SHRINKAGE_ROWS)
        mean = np.bincount(label, z, num_labels) / np.maximum(count, 1)
        variance = np.bincount(label, np.square(z - mean[label]), num_labels) / np.maximum(count, 1)
        overall = float(z.var())
        variance = share * variance + (1 - share) * (overall if overall > 0 else 1.0)
        return cls(share * mean + (1 - share) * z.mean(), np.sqrt(variance))

    def __call__(self, score: Scores, label: Labels) -> Scores:
        return (np.log(np.maximum(score, LEAST_SCORE)) - self.centre[label]) / self.spread[label]


@dataclass(frozen=True, eq=False)
class FittedDetector:
    standard: Standard | None  # of density detectors
    surprisal: Surprisal

    def __call__(self, score: Scores, label: Labels) -> Scores:
        return self.surprisal(self._standardise(score, label))

    def is_low(self, score: Scores, label: Labels) -> Bool[np.ndarray, "N"]:
        return self.surprisal.is_low(self._standardise(score, label))

    def _standardise(self, score: Scores, label: Labels) -> Scores:
        return score if self.standard is None else self.standard(score, label)


def combine_surprisals(surprisals: list[Scores]) -> Scores:
    """Return log mean_j exp(surprisal_j)."""
    return np.logaddexp.reduce(surprisals, axis=0) - np.log(len(surprisals))


def flag_statistic(surprisals: Mapping[str, Scores], combined: tuple[str, ...]) -> Scores:
    return combine_surprisals([surprisals[name] for name in combined])


def harmonic_shares(surprisals: Mapping[str, Scores]) -> dict[str, Scores]:
    """Return each combined detector's share of exp(statistic) = mean_j exp(surprisal_j); a row's
    shares sum to 1."""
    largest = np.max([*surprisals.values()], axis=0)
    parts = {name: np.exp(surprisal - largest) for name, surprisal in surprisals.items()}
    total = np.sum([*parts.values()], axis=0)
    return {name: part / total for name, part in parts.items()}
