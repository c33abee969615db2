"""Conformal p-values of uncertainty scores, and the flag.

The calibration data are two splits that the model was not fitted on, scored as served (same draws
per row, same precision, same runtime), once for each number of draws in a grid, from prefixes of
the same draws:

* the *reference* split fits each detector: `detectors` says what a detector and its surprisal are;
* the *calibration* split, `ranking` in recipes and files, ranks: a detector's p-value is
  (1 + #{its surprisals >= surprisal}) / (n + 1), and the flag's the same of the combined statistic
  of the named detectors' surprisals.

For inputs exchangeable with the calibration split P(p <= fpr) = floor(fpr (n + 1)) / (n + 1),
whatever the dependence between detectors (Vovk, Gammerman and Shafer, "Algorithmic learning in a
random world", 2005, chapter 2; ties make it smaller, never larger). The smallest usable fpr is
therefore 1 / (n + 1).

The calibration split's labels also give prediction sets and intervals (`sets`), and the
uncertainty beyond which the service abstains (`abstention`). Each of the guarantees holds by
itself, on average over or with confidence in the choice of one and the same calibration split;
they are not independent of each other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Float64, Int64

from model_store.conformal.abstention import Answers, require
from model_store.conformal.detectors import FittedDetector, Standard, Surprisal, flag_statistic
from model_store.conformal.mondrian import Categories, CategoryKind
from model_store.conformal.rank_tables import ConformalPValues, RankTables
from model_store.scores.tasks import DETECTED
from model_store.types import DetectorNames

DEFAULT_FPR = 0.05  # at which flags fire where nothing else is asked for
DEFAULT_COVERAGE = 0.95  # of sets and intervals; as many rows bear it as bear the default rate
# detectors whose scores have no unit of their own
IN_TARGET_UNITS = frozenset(DETECTED["regression"])
KEPT_TABLES = 64  # ways of taking draws whose sorted calibration rows are kept

Labels = Int64[np.ndarray, "N"]
ByDetector = dict[str, Float64[np.ndarray, "N"]]


def at_least(rate: float) -> str:
    """Return a rate in six digits, rounded up where it must be: what it says is never below the
    rate.

    >>> at_least(1 / 5), at_least(1 / 3)
    ('0.2', '0.333334')
    """
    rounded = f"{rate:.6g}"
    if float(rounded) < rate:
        rounded = str(Context(prec=6, rounding=ROUND_CEILING).create_decimal(rate).normalize())
    return rounded


def default_not_kept(ranking_rows: int) -> str | None:
    """Say that there are too few rows for requests without `fpr` and `coverage`; None if enough."""
    smallest = 1.0 / (ranking_rows + 1)
    if smallest <= DEFAULT_FPR:
        return None
    rows = "1 ranking row" if ranking_rows == 1 else f"{ranking_rows} ranking rows"
    enough = math.ceil(1.0 / DEFAULT_FPR) - 1
    return (
        f"with {rows} no rate below {at_least(smallest)} can be kept: a request that names no fpr "
        "is judged at "
        f"{DEFAULT_FPR:g}, and refused, and sets and intervals of coverage {DEFAULT_COVERAGE:g} "
        "hold everything; "
        f"{enough} rows would bear both"
    )


@dataclass(frozen=True, eq=False)
class DetectorScores:
    """Each detector's scores of n rows at J numbers of draws, and the rows' predicted labels (0 in
    a regression)."""

    by_name: dict[str, Float64[np.ndarray, "J n"]]
    labels: Int64[np.ndarray, "J n"]

    def take(self, rows: Int64[np.ndarray, "m"]) -> "DetectorScores":
        by_name = {name: scores[:, rows] for name, scores in self.by_name.items()}
        return DetectorScores(by_name, self.labels[:, rows])


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration scores by number of draws. J numbers of draws, n reference rows, m calibration
    rows, C labels.

    `reference` holds each detector's scores of the reference split, sorted, of density detectors
    standardised by `standards`. Of the calibration split, in its order, `surprisals` holds the
    detectors' surprisals and `statistic` the flag's statistic.
    """

    draw_counts: Int64[np.ndarray, "J"]
    names: DetectorNames
    standards: dict[str, list[Standard]]
    reference: dict[str, Float64[np.ndarray, "J n"]]
    surprisals: dict[str, Float64[np.ndarray, "J m"]]
    statistic: Float64[np.ndarray, "J m"]
    nonconformity: Float64[np.ndarray, "J m"]
    answers: Answers | None = None  # of a classification
    categories: Categories | None = None  # None: guarantees hold of all rows together

    @classmethod
    def fit(
        cls,
        draw_counts: list[int],
        reference: DetectorScores,
        ranking: DetectorScores,
        nonconformity: Float64[np.ndarray, "J m"],
        names: DetectorNames,
        num_labels: int,
        answers: Answers | None = None,
        categories: Categories | None = None,
    ) -> "Calibration":
        """Fit detectors on the reference split's scores, and keep what ranks rows of the
        calibration split's."""
        counts, labels = range(len(draw_counts)), reference.labels
        standards: dict[str, list[Standard]] = {}
        sorted_reference = {}
        for name, scores in reference.by_name.items():
            if name in names.density:
                fits = [Standard.fit(scores[j], labels[j], num_labels) for j in counts]
                scores = np.stack([fits[j](scores[j], labels[j]) for j in counts])
                standards[name] = fits
            sorted_reference[name] = np.sort(scores, axis=1)
        detectors = [_fit_detectors(sorted_reference, standards, names, j) for j in counts]
        surprisals = [_surprisals(detectors[j], ranking, j) for j in counts]
        return cls(
            np.array(draw_counts, dtype=np.int64),
            names,
            standards,
            sorted_reference,
            {name: np.stack([of[name] for of in surprisals]) for name in sorted_reference},
            np.stack([flag_statistic(of, names.combined) for of in surprisals]),
            nonconformity,
            answers,
            categories,
        )

    @property
    def combined(self) -> tuple[str, ...]:
        return self.names.combined

    @cached_property
    def _detectors(self) -> list[dict[str, FittedDetector]]:
        return [
            _fit_detectors(self.reference, self.standards, self.names, j)
            for j in range(len(self.draw_counts))
        ]

    @property
    def smallest_fpr(self) -> float:
        """The smallest false-positive rate above 0, of the category with the most rows."""
        return 1.0 / (self.most_judged_rows + 1)

    @cached_property
    def most_judged_rows(self) -> int:
        """How many rows flags are ranked among, of the category with the most rows."""
        if self.categories is None:
            return self.statistic.shape[1]
        return int(self.categories.judged_rows.max())

    @cached_property
    def most_true_rows(self) -> int:
        """How many rows calibrate sets and intervals, of the category with the most rows."""
        if self.categories is None:
            return self.statistic.shape[1]
        return int(self.categories.true_rows.max())

    def draws_used(self, num_draws: int) -> int:
        """How many of a request's draws the detectors look at: the largest calibrated number.

        The first draws of a seed are draws of that seed, so a request with a number of draws that
        was not calibrated is judged by its first ones, exactly as calibrated.
        """
        return int(self.draw_counts[self.draw_counts.searchsorted(num_draws, side="right") - 1])

    def surprisals_of(self, scores: ByDetector, labels: Labels, num_draws: int) -> ByDetector:
        detectors = self.detectors(num_draws)
        return {name: detector(scores[name], labels) for name, detector in detectors.items()}

    def detectors(self, num_draws: int) -> dict[str, FittedDetector]:
        return self._detectors[self._index(num_draws)]

    @cached_property
    def rank_tables(self) -> Callable[..., RankTables]:
        """The calibration rows under a number of draws."""
        return lru_cache(maxsize=KEPT_TABLES)(self._rank_tables)

    def _rank_tables(self, num_draws: int) -> RankTables:
        j = self._index(num_draws)
        statistic, nonconformity = self.statistic[j], self.nonconformity[j]

        def tables(judged: np.ndarray, true: np.ndarray) -> RankTables:
            order = judged[np.argsort(statistic[judged], kind="stable")]
            return RankTables(
                num_draws,
                statistic[order],
                {name: np.sort(by_count[j, judged]) for name, by_count in self.surprisals.items()},
                np.sort(nonconformity[true]),
                None if self.answers is None else self.answers.abstention(j, order),
            )

        rows = np.arange(len(statistic))
        everything = tables(rows, rows)
        if self.categories is None:
            return everything
        judged, true = self.categories.judged[j], self.categories.true
        parts = tuple(
            tables(np.flatnonzero(judged == c), np.flatnonzero(true == c))
            for c in range(len(self.categories.names))
        )
        return replace(everything, kind=self.categories.kind, by_category=parts)

    def p_values(
        self, scores: ByDetector, labels: Labels, num_draws: int, groups: Labels | None = None
    ) -> ConformalPValues:
        """Return p-values of N rows whose scores and labels were made with `num_draws` draws, a
        calibrated number.

        Where there are categories, rows are ranked within their own; `groups` are those of a
        calibration by group.
        """
        surprisals = self.surprisals_of(scores, labels, num_draws)
        categories = None if self.categories is None else self.categories.of_rows(labels, groups)
        statistic = flag_statistic(surprisals, self.combined)
        return self.rank_tables(num_draws).p_values(statistic, surprisals, categories)

    def _index(self, num_draws: int) -> int:
        j = int(self.draw_counts.searchsorted(num_draws))
        if j == len(self.draw_counts) or self.draw_counts[j] != num_draws:
            raise ValueError(f"expected one of {self.draw_counts.tolist()} draws, got {num_draws}")
        return j

    def tensors(self) -> dict[str, np.ndarray]:
        tensors = {
            "draw_counts": self.draw_counts,
            "statistic": self.statistic,
            "nonconformity": self.nonconformity,
            **{f"reference.{name}": scores for name, scores in self.reference.items()},
            **{f"surprise.{name}": surprisals for name, surprisals in self.surprisals.items()},
        }
        for name, by_count in self.standards.items():
            tensors[f"centre.{name}"] = np.stack([standard.centre for standard in by_count])
            tensors[f"spread.{name}"] = np.stack([standard.spread for standard in by_count])
        for part in (self.answers, self.categories):
            tensors |= {} if part is None else part.tensors()
        return tensors

    @classmethod
    def from_tensors(
        cls,
        tensors: dict[str, np.ndarray],
        names: DetectorNames,
        num_labels: int,
        categories: tuple[CategoryKind, tuple[str, ...]] | None = None,
    ) -> "Calibration":
        reference, surprisals = (
            {key.removeprefix(part): x for key, x in tensors.items() if key.startswith(part)}
            for part in ("reference.", "surprise.")
        )
        by_label = [f"{part}.{name}" for name in names.density for part in ("centre", "spread")]
        require(
            tensors,
            "draw_counts",
            "statistic",
            "nonconformity",
            *(f"reference.{name}" for name in (*names.combined, *names.density)),
            *(f"surprise.{name}" for name in reference),
            *by_label,
        )
        draw_counts, statistic = tensors["draw_counts"], tensors["statistic"]
        rising = draw_counts.ndim == 1 and draw_counts.size > 0 and draw_counts[0] == 1
        if not rising or draw_counts.dtype != np.int64 or np.any(np.diff(draw_counts) <= 0):
            raise ValueError("draw_counts: expected rising int64 numbers from 1")
        of_ranking = [*(f"surprise.{name}" for name in surprisals), "statistic", "nonconformity"]
        for name in (*of_ranking, *(f"reference.{name}" for name in reference)):
            array = tensors[name]
            shaped = array.ndim == 2 and len(array) == len(draw_counts) and array.shape[1] > 0
            if not shaped or not _is_finite(array):
                expected = "expected finite float64 rows, one for each of draw_counts"
                raise ValueError(f"{name}: {expected}")
            if name in of_ranking:
                if array.shape != statistic.shape:
                    expected = f"expected as many numbers as statistic has, {statistic.shape}"
                    raise ValueError(f"{name}: {expected}")
            elif not np.all(np.diff(array, axis=1) >= 0):
                raise ValueError(f"{name}: expected sorted rows")
        shape = (len(draw_counts), num_labels)
        for name in by_label:
            good = tensors[name].shape == shape and _is_finite(tensors[name])
            if not good or (name.startswith("spread.") and np.any(tensors[name] <= 0)):
                expected = f"expected finite float64 numbers of shape {shape}, spreads above 0"
                raise ValueError(f"{name}: {expected}")
        return cls(
            draw_counts,
            names,
            {
                name: list(map(Standard, tensors[f"centre.{name}"], tensors[f"spread.{name}"]))
                for name in names.density
            },
            reference,
            surprisals,
            statistic,
            tensors["nonconformity"],
            Answers.from_tensors(tensors, statistic.shape),
            None
            if categories is None
            else Categories.from_tensors(tensors, *categories, statistic.shape),
        )


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype == np.float64 and bool(np.all(np.isfinite(array)))


def _surprisals(
    detectors: dict[str, FittedDetector], rows: DetectorScores, j: int
) -> dict[str, Float64[np.ndarray, "n"]]:
    return {
        name: detector(rows.by_name[name][j], rows.labels[j])
        for name, detector in detectors.items()
    }


def _fit_detectors(
    reference: dict[str, Float64[np.ndarray, "J n"]],
    standards: dict[str, list[Standard]],
    names: DetectorNames,
    j: int,
) -> dict[str, FittedDetector]:
    detectors = {}
    for name, scores in reference.items():
        # 1 is a standard deviation of a density's log scores, or a nat or probability of a
        # classification's.
        unit = None if name in IN_TARGET_UNITS else 1.0
        surprisal = Surprisal.fit(scores[j], name in names.two_sided, unit)
        standard = standards[name][j] if name in standards else None
        detectors[name] = FittedDetector(standard, surprisal)
    return detectors
