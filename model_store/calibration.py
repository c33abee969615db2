"""Conformal p-values of uncertainty scores, and the flag.

The calibration data are two splits that the model was not fitted on, scored as served (same draws per row, same
precision, same runtime), once for each number of draws in a grid, from prefixes of the same draws:

* the *reference* split fits each detector: `detection` says what a detector and its surprise are;
* the *ranking* split ranks: a detector's p-value is (1 + #{ranking surprises >= surprise}) / (n + 1), and the flag's
  the same of the combined statistic of the named detectors' surprises.

For inputs exchangeable with the ranking split P(p <= fpr) = floor(fpr (n + 1)) / (n + 1), whatever the dependence
between detectors (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005, chapter 2; ties make
it smaller, never larger). The smallest usable fpr is therefore 1 / (n + 1).

The ranking split's labels also give prediction sets and intervals (`conformal_sets`), and the doubt beyond which the
service abstains (`abstention`). Each of the guarantees holds by itself, on average over or with confidence in the
choice of one and the same ranking split; they are not independent of each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store import conformal_sets
from model_store.abstention import Abstention, Answers
from model_store.detection import Standard, Surprise, combined_surprise


@dataclass(frozen=True)
class Judgement:
    """What the detectors say of N rows. P-values lie in (0, 1]; small ones mean unlike the calibration data."""

    p_value: Float64[np.ndarray, "N"]
    detector_p_values: dict[str, Float64[np.ndarray, "N"]]

    def take(self, rows: slice) -> "Judgement":
        """Return the judgement of some rows."""
        return Judgement(
            self.p_value[rows], {name: p_value[rows] for name, p_value in self.detector_p_values.items()}
        )

    @classmethod
    def concatenate(cls, parts: list["Judgement"]) -> "Judgement":
        """Return the judgement of all parts' rows, in order."""
        names = parts[0].detector_p_values
        return cls(
            np.concatenate([part.p_value for part in parts]),
            {name: np.concatenate([part.detector_p_values[name] for part in parts]) for name in names},
        )


@dataclass(frozen=True)
class DetectorNames:
    """Which detectors the flag combines, which are densities, and which of those are two-sided."""

    combined: tuple[str, ...]
    density: tuple[str, ...] = ()
    two_sided: tuple[str, ...] = ()


@dataclass(frozen=True)
class DetectorScores:
    """Each detector's scores of n rows at J numbers of draws, and the rows' predicted labels (0 in a regression)."""

    by_name: dict[str, Float64[np.ndarray, "J n"]]
    labels: Int64[np.ndarray, "J n"]

    def take(self, rows: Int64[np.ndarray, "m"]) -> "DetectorScores":
        """Return the scores of these rows."""
        return DetectorScores({name: s[:, rows] for name, s in self.by_name.items()}, self.labels[:, rows])


@dataclass(frozen=True)
class FittedDetector:
    """A detector fitted on the reference split, at one number of draws."""

    standard: Standard | None  # of density detectors
    surprise: Surprise

    def __call__(self, score: Float64[np.ndarray, "N"], label: Int64[np.ndarray, "N"]) -> Float64[np.ndarray, "N"]:
        """Return the surprise of each score."""
        return self.surprise(score if self.standard is None else self.standard(score, label))


@dataclass(frozen=True)
class Calibration:
    """Calibration scores by number of draws. J numbers of draws, n reference rows, m ranking rows, C labels.

    All are sorted. `reference` holds each detector's scores of the reference split, of density detectors standardised
    by `standards`; `surprises` its surprises at the ranking split, and `ranking` their combined statistic.
    """

    draw_counts: Int64[np.ndarray, "J"]
    combined: tuple[str, ...]
    two_sided: tuple[str, ...]
    standards: dict[str, list[Standard]]
    reference: dict[str, Float64[np.ndarray, "J n"]]
    surprises: dict[str, Float64[np.ndarray, "J m"]]
    ranking: Float64[np.ndarray, "J m"]
    nonconformity: Float64[np.ndarray, "J m"]
    abstention: Abstention | None = None  # of a classification

    @classmethod
    def fit(
        cls,
        draw_counts: list[int],
        reference: DetectorScores,
        ranking: DetectorScores,
        nonconformity: Float64[np.ndarray, "J m"],
        detectors: DetectorNames,
        num_labels: int,
        answers: Answers | None = None,
    ) -> "Calibration":
        """Fit detectors on the reference split's scores and rank the ranking split's combined statistic.

        Args:
            draw_counts: the J numbers of draws that the scores were made with, rising.
            reference: the detectors' scores of the reference split.
            ranking: the same of the ranking split.
            nonconformity: how far each ranking row's label or target is from its prediction, (J, m).
            detectors: which detectors are combined, and which are densities.
            num_labels: C, 1 in a regression.
            answers: of a classification, the rows' doubt and which labels are wrong.
        """
        standards = {
            name: [
                Standard.fit(score, label, num_labels)
                for score, label in zip(reference.by_name[name], reference.labels, strict=True)
            ]
            for name in detectors.density
        }
        sorted_reference = {
            name: np.sort(
                [s(score, label) for s, score, label in zip(standards[name], scores, reference.labels, strict=True)]
                if name in standards
                else scores,
                axis=1,
            )
            for name, scores in reference.by_name.items()
        }
        surprises: dict[str, list[Float64[np.ndarray, "m"]]] = {name: [] for name in sorted_reference}
        for j in range(len(draw_counts)):
            fitted = _fitted(sorted_reference, standards, detectors.two_sided, j)
            for name, detector in fitted.items():
                surprises[name].append(detector(ranking.by_name[name][j], ranking.labels[j]))
        combined = np.stack(
            [combined_surprise([surprises[name][j] for name in detectors.combined]) for j in range(len(draw_counts))]
        )
        order = np.argsort(combined, axis=1, kind="stable")
        return cls(
            np.array(draw_counts, dtype=np.int64),
            detectors.combined,
            detectors.two_sided,
            standards,
            sorted_reference,
            {name: np.sort(by_count, axis=1) for name, by_count in surprises.items()},
            np.take_along_axis(combined, order, axis=1),
            np.sort(nonconformity, axis=1),
            None if answers is None else Abstention.fit(answers, order),
        )

    @cached_property
    def _detectors(self) -> list[dict[str, FittedDetector]]:
        """The detectors by number of draws."""
        return [_fitted(self.reference, self.standards, self.two_sided, j) for j in range(len(self.draw_counts))]

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

    def surprises_of(
        self, scores: dict[str, Float64[np.ndarray, "N"]], labels: Int64[np.ndarray, "N"], num_draws: int
    ) -> dict[str, Float64[np.ndarray, "N"]]:
        """Return each detector's surprises, in nats, of N rows.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        return {name: detector(scores[name], labels) for name, detector in self.detectors(num_draws).items()}

    def detectors(self, num_draws: int) -> dict[str, FittedDetector]:
        """Return the detectors as they are for scores of `num_draws` draws.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        return self._detectors[self._index(num_draws)]

    def judge(
        self, scores: dict[str, Float64[np.ndarray, "N"]], labels: Int64[np.ndarray, "N"], num_draws: int
    ) -> Judgement:
        """Return p-values of N rows whose scores and labels were made with `num_draws` draws, a calibrated number.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        j = self._index(num_draws)
        surprises = self.surprises_of(scores, labels, num_draws)
        statistic = combined_surprise([surprises[name] for name in self.combined])
        return Judgement(
            conformal_p_value(statistic, self.ranking[j]),
            {name: conformal_p_value(surprise, self.surprises[name][j]) for name, surprise in surprises.items()},
        )

    def prediction_sets(
        self, probs: Float64[np.ndarray, "N C"], num_draws: int, coverage: float
    ) -> Bool[np.ndarray, "N C"]:
        """Return which classes belong to each row's prediction set, given mean probabilities of `num_draws` draws.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        return conformal_sets.prediction_sets(probs, self.nonconformity[self._index(num_draws)], coverage)

    def intervals(
        self, mean: Float64[np.ndarray, "N"], std: Float64[np.ndarray, "N"], num_draws: int, coverage: float
    ) -> Float64[np.ndarray, "N 2"]:
        """Return the lower and upper end of each row's interval, given mean and std of `num_draws` draws.

        They are infinite where there are too few calibration rows for `coverage`.

        Raises:
            ValueError: if that number of draws was not calibrated.
        """
        return conformal_sets.intervals(mean, std, self.nonconformity[self._index(num_draws)], coverage)

    @cached_property
    def largest_doubt(self) -> Callable[[int, float, float], float]:
        """The largest doubt to answer at, -inf for none: a function of number of draws, fpr and risk.

        It raises ValueError if that number of draws was not calibrated, or nothing was of which labels are wrong.
        """
        return lru_cache(maxsize=1024)(self._largest_doubt)

    def _largest_doubt(self, num_draws: int, fpr: float, risk: float) -> float:
        return self._abstention().threshold(self._index(num_draws), self.flagged(fpr), risk)

    def smallest_risk(self, num_draws: int, fpr: float) -> float:
        """Return the smallest risk that can be certified, 1 for none; raises ValueError as `largest_doubt` does."""
        return self._abstention().smallest_risk(self._index(num_draws), self.flagged(fpr))

    def flagged(self, fpr: float) -> int:
        """Return how many p-values are at most `fpr`: as many of the ranking rows are at least as surprising."""
        rows = self.ranking.shape[1]
        return int((np.arange(1, rows + 1) / (rows + 1)).searchsorted(fpr, side="right"))

    def _abstention(self) -> Abstention:
        if self.abstention is None:
            raise ValueError("expected a calibration with answers that are right or wrong, got one without")
        return self.abstention

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
            **{f"surprise.{name}": surprises for name, surprises in self.surprises.items()},
            **{f"centre.{name}": np.stack([s.centre for s in by_count]) for name, by_count in self.standards.items()},
            **{f"spread.{name}": np.stack([s.spread for s in by_count]) for name, by_count in self.standards.items()},
            **({} if self.abstention is None else self.abstention.tensors()),
        }

    @classmethod
    def from_tensors(cls, tensors: dict[str, np.ndarray], detectors: DetectorNames, num_labels: int) -> "Calibration":
        """Read back what `tensors` gave; raises ValueError for anything inconsistent."""
        reference, surprises = (
            {key.removeprefix(part): value for key, value in tensors.items() if key.startswith(part)}
            for part in ("reference.", "surprise.")
        )
        missing = [name for name in ("draw_counts", "ranking", "nonconformity") if name not in tensors]
        missing += [
            f"reference.{name}" for name in (*detectors.combined, *detectors.density) if name not in reference
        ]
        missing += [f"surprise.{name}" for name in reference if name not in surprises]
        by_label = [f"{part}.{name}" for name in detectors.density for part in ("centre", "spread")]
        missing += [name for name in by_label if name not in tensors]
        if missing:
            raise ValueError(f"expected tensors {missing}, which are not there")
        draw_counts, ranking, nonconformity = (tensors[n] for n in ("draw_counts", "ranking", "nonconformity"))
        rising = draw_counts.ndim == 1 and draw_counts.size > 0 and draw_counts[0] == 1
        if not rising or draw_counts.dtype != np.int64 or np.any(np.diff(draw_counts) <= 0):
            raise ValueError("draw_counts: expected rising int64 numbers from 1")
        named = {name: scores for name, scores in tensors.items() if name.startswith(("reference.", "surprise."))}
        for name, array in {"ranking": ranking, "nonconformity": nonconformity, **named}.items():
            shaped = array.ndim == 2 and len(array) == len(draw_counts) and array.shape[1] > 0
            finite = shaped and array.dtype == np.float64 and np.all(np.isfinite(array))
            if not finite or not np.all(np.diff(array, axis=1) >= 0):
                raise ValueError(f"{name}: expected sorted, finite float64 rows, one for each of draw_counts")
        for name in by_label:
            array, shape = tensors[name], (len(draw_counts), num_labels)
            good = array.shape == shape and array.dtype == np.float64 and np.all(np.isfinite(array))
            if not good or (name.startswith("spread.") and np.any(array <= 0)):
                raise ValueError(f"{name}: expected finite float64 numbers of shape {shape}, spreads above 0")
        standards = {
            name: [Standard(*pair) for pair in zip(tensors[f"centre.{name}"], tensors[f"spread.{name}"], strict=True)]
            for name in detectors.density
        }
        return cls(
            draw_counts,
            detectors.combined,
            detectors.two_sided,
            standards,
            reference,
            surprises,
            ranking,
            nonconformity,
            Abstention.from_tensors(tensors, ranking.shape),
        )


def _fitted(
    reference: dict[str, Float64[np.ndarray, "J n"]],
    standards: dict[str, list[Standard]],
    two_sided: tuple[str, ...],
    j: int,
) -> dict[str, FittedDetector]:
    """Return the detectors at one number of draws."""
    return {
        name: FittedDetector(
            standards[name][j] if name in standards else None, Surprise.fit(scores[j], name in two_sided)
        )
        for name, scores in reference.items()
    }


def conformal_p_value(
    score: Float64[np.ndarray, "N"], calibration: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "N"]:
    """Return (1 + #{calibration >= score}) / (n + 1), `calibration` sorted."""
    n = len(calibration)
    return (n + 1 - calibration.searchsorted(score)) / (n + 1)
