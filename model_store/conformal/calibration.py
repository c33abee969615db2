"""Calibrate the uncertainty scores and the flag with conformal p-values.

The calibration data are two splits that the model was not fitted on, scored as served (same draws
per row, same precision, same runtime), once for each number of draws in a grid, from prefixes of
the same draws:

* the *reference* split fits each detector (`detectors` defines detectors and surprisals);
* the *calibration* split, `ranking` in recipes and files, ranks new rows. A detector's p-value is
  (1 + #{its surprisals >= surprisal}) / (n + 1). The flag's p-value ranks the combined statistic
  in the same way.

For inputs exchangeable with the calibration split, P(p <= fpr) = floor(fpr (n + 1)) / (n + 1),
however detectors depend on each other (Vovk, Gammerman and Shafer, "Algorithmic learning in a
random world", 2005, chapter 2). Ties make the probability smaller, never larger. The smallest
usable fpr is therefore 1 / (n + 1).

The calibration split's labels also determine prediction sets and intervals (`rank_tables`), and the
uncertainty above which the service abstains (`abstention`). Each guarantee is valid separately.
All of them use the same calibration split, so they are not independent.
"""

import math
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import cached_property

import numpy as np
from jaxtyping import Float64, Int64

from model_store.artifacts.manifest import DetectorNames
from model_store.conformal.abstention import Answers
from model_store.conformal.detectors import FittedDetector, Standard, Surprisal, flag_statistic
from model_store.conformal.mondrian import Categories, CategoryKind
from model_store.conformal.rank_tables import RankTables
from model_store.scores.records import SMALLEST, check_tensor
from model_store.scores.tasks import DETECTED

DEFAULT_FPR = 0.05  # of flags
DEFAULT_COVERAGE = 0.95  # of sets and intervals; needs as many rows as the default fpr
IN_TARGET_UNITS = frozenset(DETECTED["regression"])  # detectors in units of the target

Labels = Int64[np.ndarray, "N"]
ByDetector = dict[str, Float64[np.ndarray, "N"]]


def format_rate(rate: float) -> str:
    """Format a rate with up to six significant digits, rounding up if necessary.

    >>> format_rate(1 / 5), format_rate(1 / 3)
    ('0.2', '0.333334')
    """
    rounded = f"{rate:.6g}"
    if float(rounded) < rate:
        rounded = str(Context(prec=6, rounding=ROUND_CEILING).create_decimal(rate).normalize())
    return rounded


def few_rows_warning(ranking_rows: int) -> str | None:
    """Return a warning if there are too few ranking rows for the default rates."""
    smallest = 1.0 / (ranking_rows + 1)
    if smallest <= DEFAULT_FPR:
        return None
    rows = "1 ranking row" if ranking_rows == 1 else f"{ranking_rows} ranking rows"
    min_rows = math.ceil(1.0 / DEFAULT_FPR) - 1
    return (
        f"with {rows} the smallest fpr is {format_rate(smallest)}: requests without fpr are "
        f"rejected (the default is {DEFAULT_FPR:g}), and sets and intervals of coverage "
        f"{DEFAULT_COVERAGE:g} contain everything; use at least {min_rows} ranking rows"
    )


@dataclass(frozen=True, eq=False)
class DetectorScores:
    """The detector scores and predicted labels of n rows for each of J draw counts."""

    by_name: dict[str, Float64[np.ndarray, "J n"]]
    labels: Int64[np.ndarray, "J n"]


@dataclass(frozen=True, eq=False)
class Calibration:
    """A model's calibration data for J draw counts.

    `reference` contains each detector's sorted scores of the reference split; scores of density
    detectors are standardised by `standards`. The detectors' surprisals and the flag's `statistic`
    belong to the calibration split, in its order.
    """

    draw_counts: Int64[np.ndarray, "J"]
    names: DetectorNames
    standards: dict[str, list[Standard]]
    reference: dict[str, Float64[np.ndarray, "J n"]]
    surprisals: dict[str, Float64[np.ndarray, "J m"]]
    statistic: Float64[np.ndarray, "J m"]
    nonconformity: Float64[np.ndarray, "J m"]
    answers: Answers | None = None  # only in a classification
    categories: Categories | None = None  # None: guarantees on average over all rows

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
        """Fit the detectors on the reference split and apply them to the calibration split."""
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
        by_count = [
            {n: d(ranking.by_name[n][j], ranking.labels[j]) for n, d in detectors[j].items()}
            for j in counts
        ]
        return cls(
            np.array(draw_counts, dtype=np.int64),
            names,
            standards,
            sorted_reference,
            {name: np.stack([values[name] for values in by_count]) for name in sorted_reference},
            np.stack([flag_statistic(values, names.combined) for values in by_count]),
            nonconformity,
            answers,
            categories,
        )

    @cached_property
    def detectors(self) -> dict[int, dict[str, FittedDetector]]:
        """The detectors by draw count."""
        return {
            count: _fit_detectors(self.reference, self.standards, self.names, j)
            for j, count in enumerate(self.draw_counts.tolist())
        }

    @cached_property
    def rank_tables(self) -> dict[int, RankTables]:
        """The rank tables by draw count."""
        return {count: self._tables_for(j) for j, count in enumerate(self.draw_counts.tolist())}

    @cached_property
    def smallest_fpr(self) -> float:
        """The smallest nonzero false positive rate that any category supports."""
        return 1.0 / (self.max_judged_rows + 1)

    @cached_property
    def max_judged_rows(self) -> int:
        """The largest number of calibration rows for the flag in any category."""
        if self.categories is None:
            return self.statistic.shape[1]
        return int(self.categories.judged_rows.max())

    @cached_property
    def max_true_rows(self) -> int:
        """The largest number of calibration rows for sets and intervals in any category."""
        if self.categories is None:
            return self.statistic.shape[1]
        return int(self.categories.true_rows.max())

    def calibrated_draws(self, num_draws: int) -> int:
        """Return the largest calibrated draw count that does not exceed `num_draws`.

        Detectors use this many of a request's first draws. Draws of a seed do not depend on their
        number, so these draws are distributed as in calibration.
        """
        return int(self.draw_counts[self.draw_counts.searchsorted(num_draws, side="right") - 1])

    def compute_surprisals(self, scores: ByDetector, labels: Labels, num_draws: int) -> ByDetector:
        detectors = self.detectors[num_draws]
        return {name: detector(scores[name], labels) for name, detector in detectors.items()}

    def _tables_for(self, j: int) -> RankTables:
        statistic, nonconformity = self.statistic[j], self.nonconformity[j]

        def tables(judged: np.ndarray, true: np.ndarray) -> RankTables:
            order = judged[np.argsort(statistic[judged], kind="stable")]
            return RankTables(
                int(self.draw_counts[j]),
                statistic[order],
                {name: np.sort(by_count[j, judged]) for name, by_count in self.surprisals.items()},
                np.sort(nonconformity[true]),
                None if self.answers is None else self.answers.abstention(j, order),
            )

        rows = np.arange(len(statistic))
        all_rows = tables(rows, rows)
        if self.categories is None:
            return all_rows
        judged, true = self.categories.judged[j], self.categories.true
        parts = tuple(
            tables(np.flatnonzero(judged == c), np.flatnonzero(true == c))
            for c in range(len(self.categories.names))
        )
        return replace(all_rows, kind=self.categories.kind, by_category=parts)

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
        draw_counts = check_tensor(tensors, "draw_counts", np.int64, (0,))
        if draw_counts[0] != 1 or np.any(np.diff(draw_counts) <= 0):
            raise ValueError("draw_counts: expected rising numbers from 1")
        counts = len(draw_counts)
        statistic = check_tensor(tensors, "statistic", np.float64, (counts, 0))
        prefix = "reference."
        present = [key.removeprefix(prefix) for key in tensors if key.startswith(prefix)]
        detectors = dict.fromkeys([*present, *names.combined, *names.density])
        reference, surprisals, standards = {}, {}, {}
        for name in detectors:
            reference[name] = check_tensor(tensors, f"reference.{name}", np.float64, (counts, 0))
            key = f"surprise.{name}"
            surprisals[name] = check_tensor(tensors, key, np.float64, statistic.shape)
        for name in names.density:
            shape = counts, num_labels
            centre = check_tensor(tensors, f"centre.{name}", np.float64, shape)
            spread = check_tensor(tensors, f"spread.{name}", np.float64, shape, low=SMALLEST)
            standards[name] = list(map(Standard, centre, spread))
        return cls(
            draw_counts,
            names,
            standards,
            reference,
            surprisals,
            statistic,
            check_tensor(tensors, "nonconformity", np.float64, statistic.shape),
            Answers.from_tensors(tensors, statistic.shape),
            None
            if categories is None
            else Categories.from_tensors(tensors, *categories, statistic.shape),
        )


def _fit_detectors(
    reference: dict[str, Float64[np.ndarray, "J n"]],
    standards: dict[str, list[Standard]],
    names: DetectorNames,
    j: int,
) -> dict[str, FittedDetector]:
    detectors = {}
    for name, scores in reference.items():
        # Density scores are in standard deviations, scores of a classification in nats or
        # probabilities. A regression's scores have the target's unit, whose size is unknown.
        unit = None if name in IN_TARGET_UNITS else 1.0
        surprisal = Surprisal.fit(scores[j], name in names.two_sided, unit)
        standard = standards[name][j] if name in standards else None
        detectors[name] = FittedDetector(standard, surprisal)
    return detectors
