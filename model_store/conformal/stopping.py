"""When a row needs no further draws: its label, its flag and its scores are settled.

Draws are taken in stages, the calibrated numbers of draws from `FEWEST_DRAWS` on. At each a row
stops if

* the two largest mean probabilities are more than w standard errors of their difference apart
  (label);
* the flag's statistic lies above its threshold with every posterior score w standard errors lower,
  or below with every one w standard errors higher (flag);
* no score's standard error is more than the tolerance: in nats and probabilities, of a regression
  in multiples of the row's predicted standard deviation (scores).

w is Student's t quantile of K - 1 degrees of freedom whose tail is `TAIL`: with few draws a
standard error is itself uncertain. Few draws may also agree by chance, so a score's standard error
counts as no less than what is usual at that number of draws, relative to the score: the median over
the reference rows.

The threshold at a false-positive rate is estimated from the reference rows' statistics. It will
differ a little from the one that the calibration rows give, so a row's flag counts as settled only
if it is at all rates within `GUARD` standard errors of such an estimate of the rate asked for.

**Why p-values stay exact.** Whether a row stops depends on the row, its draws and the reference
split. So, whatever tolerance and rate are asked for, the statistic at the stage where a row stops
is one fixed function of the row and its draws, and its rank among the calibration rows' statistics,
each at the stage where that row stops, is a conformal p-value as ever. The same holds of
surprisals, nonconformities and uncertainty. For that a calibration keeps what the rule looks at of
each calibration row at each stage, and the rule is replayed over them (`EarlyStopping.stages_of`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float64, Int64

from model_store.conformal.detectors import FittedDetector, flag_statistic
from model_store.scores.sums import DrawSums
from model_store.scores.tasks import AnyScores

FEWEST_DRAWS = 5  # fewer say too little of their own spread
TAIL = 0.001
KEPT_RATES = 1024  # whose bounds are kept
GUARD = 2.0  # standard errors of the share of reference rows beyond the threshold
PREFIX = "settling."
RELATIVE_ERROR = PREFIX + "relative_error."

Bounds = tuple[Float64[np.ndarray, "S"], Float64[np.ndarray, "S"]]


@dataclass(frozen=True)
class StoppingRule:
    """When to stop: the rate of the flag that is to be settled, and the largest standard error of a
    score."""

    fpr: float
    tolerance: float


@dataclass(frozen=True, eq=False)
class Spread:
    """How far N rows' scores may be off at one number of draws.

    `unit` is what a tolerance of 1 means of each row: 1 nat or probability, or a regression's
    predicted deviation. `label_margin` is that of `scores.label_margin`, infinite in a regression.
    """

    errors: dict[str, Float64[np.ndarray, "N"]]
    label_margin: Float64[np.ndarray, "N"]
    unit: Float64[np.ndarray, "N"]

    @classmethod
    def of(cls, scores: AnyScores, sums: DrawSums) -> "Spread":
        if scores.standard_error is None:
            raise ValueError("expected scores with standard errors, got some without")
        return cls(scores.standard_error, scores.label_margin(sums), scores.unit)


@dataclass(frozen=True, eq=False)
class Look:
    """What the rule looks at: the flag's statistic if the posterior scores were lower or higher by
    their error.

    `error` is the largest standard error, as a tolerance is. The axis of rows, or of stages and
    rows.
    """

    is_label_settled: Bool[np.ndarray, "*S N"]
    lowest: Float64[np.ndarray, "*S N"]
    highest: Float64[np.ndarray, "*S N"]
    error: Float64[np.ndarray, "*S N"]

    def stops(
        self, below: np.ndarray | float, above: np.ndarray | float, tolerance: float
    ) -> Bool[np.ndarray, "*S N"]:
        """Return which rows are, where statistics up to `below` are not flagged and those from
        `above` on are."""
        is_flag_settled = (self.lowest >= above) | (self.highest <= below)
        return self.is_label_settled & is_flag_settled & (self.error <= tolerance)


@dataclass(frozen=True, eq=False)
class StageScores:
    scores: Mapping[str, Float64[np.ndarray, "N"]]
    labels: Int64[np.ndarray, "N"]
    surprisals: Mapping[str, Float64[np.ndarray, "N"]]
    spread: Spread


@dataclass(frozen=True, eq=False)
class EarlyStopping:
    stages: tuple[int, ...]  # numbers of draws
    relative_error: dict[str, Float64[np.ndarray, "S"]]  # of each posterior score
    reference: Float64[np.ndarray, "S n"]  # the flag's statistic, sorted
    ranking: Look

    @classmethod
    def fit(
        cls,
        stages: list[int],
        detectors: list[dict[str, FittedDetector]],
        combined: tuple[str, ...],
        reference: list[StageScores],
        ranking: list[StageScores],
    ) -> "EarlyStopping":
        names = [name for name in ranking[0].spread.errors if name in ranking[0].scores]
        relative = {
            name: np.array([_usual(r.spread.errors[name], r.scores[name]) for r in reference])
            for name in names
        }
        looks = []
        for s, stage in enumerate(stages):
            usual = {name: relative[name][s] for name in names}
            looks.append(look(stage, detectors[s], combined, ranking[s], usual))
        statistics = [np.sort(flag_statistic(r.surprisals, combined)) for r in reference]
        by_field = (np.stack([getattr(one, f.name) for one in looks]) for f in fields(Look))
        return cls(tuple(stages), relative, np.stack(statistics), Look(*by_field))

    @cached_property
    def bounds(self) -> Callable[[float], Bounds]:
        """For each stage up to where a statistic is not flagged at a rate, and from where on it
        is."""
        return lru_cache(maxsize=KEPT_RATES)(self._bounds)

    def _bounds(self, fpr: float) -> Bounds:
        rows = self.reference.shape[1]
        guard = GUARD * np.sqrt(fpr * (1.0 - fpr) / rows)
        rates = np.clip([fpr + guard, fpr - guard], 0.0, 1.0)
        below, above = np.quantile(self.reference, 1.0 - rates, axis=1)
        return below, above

    def stops(
        self,
        stage: StageScores,
        num_draws: int,
        rule: StoppingRule,
        detectors: Mapping[str, FittedDetector],
        combined: tuple[str, ...],
    ) -> Bool[np.ndarray, "N"]:
        s = self.stages.index(num_draws)
        below, above = self.bounds(rule.fpr)
        relative_error = {name: float(errors[s]) for name, errors in self.relative_error.items()}
        seen = look(num_draws, detectors, combined, stage, relative_error)
        return seen.stops(float(below[s]), float(above[s]), rule.tolerance)

    def stages_of(self, rule: StoppingRule, num_stages: int) -> Int64[np.ndarray, "m"]:
        """Return the stage at which each calibration row stops of the first `num_stages`, or
        `num_stages` if at none."""
        below, above = self.bounds(rule.fpr)
        settled = self.ranking.stops(below[:, None], above[:, None], rule.tolerance)
        settled[num_stages:] = True
        return np.where(settled.any(axis=0), settled.argmax(axis=0), num_stages)

    def tensors(self) -> dict[str, np.ndarray]:
        looks = {PREFIX + field.name: getattr(self.ranking, field.name) for field in fields(Look)}
        relative = {RELATIVE_ERROR + name: errors for name, errors in self.relative_error.items()}
        return {PREFIX + "reference": self.reference, **looks, **relative}

    @classmethod
    def from_tensors(
        cls, tensors: dict[str, np.ndarray], stages: list[int], rows: int
    ) -> "EarlyStopping | None":
        if not any(name.startswith(PREFIX) for name in tensors):
            return None
        names = [PREFIX + "reference", *(PREFIX + field.name for field in fields(Look))]
        require(tensors, *names)
        reference = tensors[names[0]]
        shaped = reference.ndim == 2 and len(reference) == len(stages) and reference.shape[1] > 0
        if not shaped or not is_finite(reference) or not np.all(np.diff(reference, axis=1) >= 0):
            expected = "expected sorted, finite float64 rows, one for each stage"
            raise ValueError(f"{names[0]}: {expected}")
        for name in names[1:]:
            array, is_flag = tensors[name], name == PREFIX + "is_label_settled"
            good = array.dtype == np.bool_ if is_flag else is_finite(array)
            if not good or array.shape != (len(stages), rows):
                expected = "booleans" if is_flag else "finite float64 numbers"
                raise ValueError(f"{name}: expected {expected}, one for each stage and ranking row")
        relative = {
            key.removeprefix(RELATIVE_ERROR): array
            for key, array in tensors.items()
            if key.startswith(RELATIVE_ERROR)
        }
        for name, array in relative.items():
            if array.shape != (len(stages),) or not is_finite(array) or np.any(array < 0):
                expected = "expected a finite float64 number from 0 for each stage"
                raise ValueError(f"{RELATIVE_ERROR}{name}: {expected}")
        return cls(tuple(stages), relative, reference, Look(*(tensors[name] for name in names[1:])))


def stages_among(draw_counts: list[int]) -> list[int]:
    """Return the stages among the calibrated numbers of draws; at the last of these all rows stop
    anyway."""
    return [count for count in draw_counts[:-1] if count >= FEWEST_DRAWS]


def look(
    num_draws: int,
    detectors: Mapping[str, FittedDetector],
    combined: tuple[str, ...],
    stage: StageScores,
    relative_error: Mapping[str, float],
) -> Look:
    """Return what the rule looks at of N rows, given detectors and usual relative errors at that
    number of draws."""
    width = student_quantile(num_draws - 1)
    scores, spread = stage.scores, stage.spread
    errors = {
        name: np.maximum(error, relative_error[name] * scores[name])
        if name in relative_error
        else error
        for name, error in spread.errors.items()
    }

    def statistic(deviations: float) -> Float64[np.ndarray, "N"]:
        moved = {
            name: detectors[name](scores[name] + deviations * errors[name], stage.labels)
            for name in combined
            if name in errors
        }
        return flag_statistic({**stage.surprisals, **moved}, combined)

    largest = np.max([error / spread.unit for error in errors.values()], axis=0)
    return Look(spread.label_margin > width, statistic(-width), statistic(width), largest)


def student_quantile(degrees_of_freedom: int, tail: float = TAIL) -> float:
    """Return the t that Student's distribution exceeds with probability `tail`: within 1 % from 4
    degrees on for a tail of .001, from 9 on within 3 % down to 5e-9.

    The expansion in 1 / degrees of Abramowitz and Stegun, "Handbook of mathematical functions",
    1964, 26.7.5.
    """
    x = NormalDist().inv_cdf(1.0 - tail)
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return sum(term / degrees_of_freedom**power for power, term in enumerate(terms))


def _usual(error: Float64[np.ndarray, "n"], score: Float64[np.ndarray, "n"]) -> float:
    """Return the median of errors relative to their scores, 0 where all scores are 0."""
    above = score > 0
    return float(np.median(error[above] / score[above])) if above.any() else 0.0


def require(tensors: Mapping[str, np.ndarray], *names: str) -> None:
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"expected tensors {missing}, which are not there")


def is_finite(array: np.ndarray) -> bool:
    return array.dtype == np.float64 and bool(np.all(np.isfinite(array)))
