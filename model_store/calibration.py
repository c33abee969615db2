"""Conformal p-values of uncertainty scores, and the combined statistic behind the flag.

The calibration data are two splits that the model was not fitted on, scored as served (same draws per row, same
precision, same runtime), once for each number of draws in a grid, from prefixes of the same draws:

* the *reference* split fits each detector: a detector is a score of which more means more unlike the data. Its
  p-value for a score s is (1 + #{reference scores >= s}) / (n + 1); its surprise is -log of the same tail
  probability, interpolated so that it is continuous and strictly increasing beyond the reference scores;
* the *ranking* split ranks the combined statistic, the sum of the named detectors' surprises. The flag's p-value
  is (1 + #{ranking statistics >= t}) / (n + 1).

For inputs exchangeable with the ranking split P(p <= fpr) = floor(fpr (n + 1)) / (n + 1), whatever the dependence
between detectors (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005, chapter 2; ties make
it smaller, never larger). The smallest usable fpr is therefore 1 / (n + 1).

The ranking split's labels also give prediction sets and intervals, from the ceil((n + 1) coverage)-th smallest of its
*nonconformities*, q. For inputs exchangeable with the ranking split they hold the true label or target with a
probability of at least `coverage`:

* of a classification the nonconformity is 1 - p(true label); the set is all classes whose probability is at least
  1 - q, and the most probable one in any case (Sadinle, Lei and Wasserman, "Least ambiguous set-valued classifiers
  with bounded error levels", 2019);
* of a regression it is |y - mean| / std; the interval is mean -/+ q std (Lei et al., "Distribution-free predictive
  inference for regression", 2018, section 5.2).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float64, Int64

TAIL_FRACTION = 0.1  # of the reference scores, from which the tail beyond the largest is extrapolated


@dataclass(frozen=True)
class Surprise:
    """-log of the smoothed tail probability of a detector's reference scores, in nats, 0 or more.

    Linear between the sorted reference scores; beyond the largest an exponential tail whose mean excess is that of
    the largest tenth, so that scores never seen are still told apart.
    """

    reference: Float64[np.ndarray, "n"]
    tail: Float64[np.ndarray, "n"]
    scale: float

    @classmethod
    def fit(cls, reference: Float64[np.ndarray, "n"]) -> "Surprise":
        """Fit on sorted reference scores."""
        n = len(reference)
        tail = -np.log((n - np.arange(n)) / (n + 1.0))
        top = reference[-max(1, int(TAIL_FRACTION * n)) :]
        scale = float(np.mean(top) - top[0])
        if scale <= 0.0:  # equal scores say nothing of the tail: take their size as its unit
            scale = max(abs(float(reference[-1])), 1.0)
        return cls(reference, tail, scale)

    def __call__(self, score: Float64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return the surprise of each score."""
        beyond = np.maximum(score - self.reference[-1], 0.0) / self.scale
        return np.interp(score, self.reference, self.tail) + beyond


def combined_surprise(
    surprises: dict[str, Surprise], scores: dict[str, Float64[np.ndarray, "N"]]
) -> Float64[np.ndarray, "N"]:
    """Return the sum of the named detectors' surprises."""
    return np.sum([surprise(scores[name]) for name, surprise in surprises.items()], axis=0)


@dataclass(frozen=True)
class Judgement:
    """What the detectors say of N rows. P-values lie in (0, 1]; small ones mean unlike the calibration data."""

    p_value: Float64[np.ndarray, "N"]
    detector_p_values: dict[str, Float64[np.ndarray, "N"]]

    @classmethod
    def concatenate(cls, parts: list["Judgement"]) -> "Judgement":
        """Return the judgement of all parts' rows, in order."""
        names = parts[0].detector_p_values
        return cls(
            np.concatenate([part.p_value for part in parts]),
            {name: np.concatenate([part.detector_p_values[name] for part in parts]) for name in names},
        )


@dataclass(frozen=True)
class Calibration:
    """Sorted calibration scores by number of draws. J numbers of draws, n rows of either split."""

    draw_counts: Int64[np.ndarray, "J"]
    combined: tuple[str, ...]
    reference: dict[str, Float64[np.ndarray, "J n"]]
    ranking: Float64[np.ndarray, "J m"]
    nonconformity: Float64[np.ndarray, "J m"]

    @classmethod
    def fit(
        cls,
        draw_counts: list[int],
        reference_scores: dict[str, Float64[np.ndarray, "J n"]],
        ranking_scores: dict[str, Float64[np.ndarray, "J m"]],
        nonconformity: Float64[np.ndarray, "J m"],
        combined: tuple[str, ...],
    ) -> "Calibration":
        """Fit detectors on the reference split's scores and rank the ranking split's combined statistic.

        Args:
            draw_counts: the J numbers of draws that the scores were made with, rising.
            reference_scores: each detector's scores of the reference split, (J, n).
            ranking_scores: the same of the ranking split, (J, m).
            nonconformity: how far each ranking row's label or target is from its prediction, as above, (J, m).
            combined: names of the detectors whose surprises are added up for the flag.
        """
        reference = {name: np.sort(scores, axis=1) for name, scores in reference_scores.items()}
        ranking = [
            combined_surprise(
                {name: Surprise.fit(reference[name][j]) for name in combined},
                {name: ranking_scores[name][j] for name in combined},
            )
            for j in range(len(draw_counts))
        ]
        return cls(
            np.array(draw_counts, dtype=np.int64),
            combined,
            reference,
            np.sort(np.stack(ranking), axis=1),
            np.sort(nonconformity, axis=1),
        )

    @cached_property
    def _surprises(self) -> list[dict[str, Surprise]]:
        """The combined detectors' surprises, by number of draws."""
        return [
            {name: Surprise.fit(self.reference[name][j]) for name in self.combined}
            for j in range(len(self.draw_counts))
        ]

    @property
    def smallest_fpr(self) -> float:
        """The smallest false-positive rate that this calibration can tell apart from 0."""
        return 1.0 / (self.ranking.shape[1] + 1)

    def draws_used(self, num_draws: int) -> int:
        """How many of a request's draws the detectors look at: the largest calibrated number it has.

        The first draws of a seed are draws of that seed, so a request with a number of draws that was not
        calibrated is judged, exactly as calibrated, by its first ones.
        """
        return int(self.draw_counts[self.draw_counts.searchsorted(num_draws, side="right") - 1])

    def judge(self, scores: dict[str, Float64[np.ndarray, "N"]], num_draws: int) -> Judgement:
        """Return p-values of N rows whose scores were made with `num_draws` draws, a calibrated number.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        j = self._index(num_draws)
        reference = {name: sorted_scores[j] for name, sorted_scores in self.reference.items()}
        statistic = combined_surprise(self._surprises[j], scores)
        return Judgement(
            conformal_p_value(statistic, self.ranking[j]),
            {name: conformal_p_value(scores[name], reference[name]) for name in reference},
        )

    def prediction_sets(
        self, probs: Float64[np.ndarray, "N C"], num_draws: int, coverage: float
    ) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set, given mean probabilities of `num_draws` draws.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        largest = self._largest_nonconformity(num_draws, coverage)
        inside = 1.0 - probs <= largest
        inside[np.arange(len(probs)), probs.argmax(axis=1)] = True
        return inside

    def intervals(
        self, mean: Float64[np.ndarray, "N"], std: Float64[np.ndarray, "N"], num_draws: int, coverage: float
    ) -> Float64[np.ndarray, "N 2"]:
        """Return the lower and upper end of each row's interval, given mean and std of `num_draws` draws.

        They are infinite where there are too few calibration rows for `coverage`.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        half = self._largest_nonconformity(num_draws, coverage) * std
        return np.stack([mean - half, mean + half], axis=1)

    def _largest_nonconformity(self, num_draws: int, coverage: float) -> float:
        nonconformity = self.nonconformity[self._index(num_draws)]
        position = math.ceil((len(nonconformity) + 1) * coverage)
        return math.inf if position > len(nonconformity) else float(nonconformity[position - 1])

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {count: j for j, count in enumerate(self.draw_counts.tolist())}

    def _index(self, num_draws: int) -> int:
        if num_draws not in self._positions:
            raise ValueError(f"expected one of {self.draw_counts.tolist()} draws, got {num_draws}")
        return self._positions[num_draws]

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the arrays of `calibration.safetensors`."""
        return {
            "draw_counts": self.draw_counts,
            "ranking": self.ranking,
            "nonconformity": self.nonconformity,
            **{f"reference.{name}": scores for name, scores in self.reference.items()},
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray], combined: tuple[str, ...]) -> "Calibration":
        """Read back what `tensors` gave; raises ValueError for anything inconsistent."""
        reference = {
            key.removeprefix("reference."): value for key, value in tensors.items() if key.startswith("reference.")
        }
        missing = [name for name in ("draw_counts", "ranking", "nonconformity") if name not in tensors]
        missing += [f"reference.{name}" for name in combined if name not in reference]
        if missing:
            raise ValueError(f"expected tensors {missing}, which are not there")
        draw_counts, ranking, nonconformity = (tensors[n] for n in ("draw_counts", "ranking", "nonconformity"))
        rising = draw_counts.ndim == 1 and draw_counts.size > 0 and draw_counts[0] == 1
        if not rising or draw_counts.dtype != np.int64 or np.any(np.diff(draw_counts) <= 0):
            raise ValueError("draw_counts: expected rising int64 numbers from 1")
        named = {f"reference.{name}": scores for name, scores in reference.items()}
        for name, array in {"ranking": ranking, "nonconformity": nonconformity, **named}.items():
            shaped = array.ndim == 2 and len(array) == len(draw_counts) and array.shape[1] > 0
            finite = shaped and array.dtype == np.float64 and np.all(np.isfinite(array))
            if not finite or not np.all(np.diff(array, axis=1) >= 0):
                raise ValueError(f"{name}: expected sorted, finite float64 rows, one for each of draw_counts")
        return cls(draw_counts, combined, reference, ranking, nonconformity)


def conformal_p_value(
    score: Float64[np.ndarray, "N"], calibration: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "N"]:
    """Return (1 + #{calibration >= score}) / (n + 1), `calibration` sorted."""
    n = len(calibration)
    return (n + 1 - calibration.searchsorted(score)) / (n + 1)
