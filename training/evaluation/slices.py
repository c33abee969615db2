"""Where a model of columns is worst: slices of the test rows by one column.

A slice is a category, a range between quantiles, or the rows whose value is missing. With many
slices some look bad by chance, and the worst of them always does. So they are chosen on one half of
the rows, a random one, and measured on the other, which had no part in the choice; and the
intervals of all that are reported hold together (Bonferroni).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float32, Float64

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, TimeColumn, column_width
from model_store.sources.columns import Columns
from training.evaluation.evidence import Slice, Slices
from training.evaluation.figures import LEVEL, Resamples, RootMean, percentiles, share_interval
from training.seeds import EvaluationStream, generator

MOST = 5  # slices that are reported
RANGES = 4  # between quantiles of a column of numbers
FEWEST_ROWS = 15  # of a slice, in either half
FEW_VALUES = 10  # of a column of numbers, up to which each is a slice


@dataclass(frozen=True, eq=False)
class _Candidate:
    column: str
    rows_are: str
    inside: Bool[np.ndarray, "N"]


def worst_slices(
    x: Float32[np.ndarray, "N I"],
    columns: Columns,
    loss: Float64[np.ndarray, "N"],
    is_squared: bool,
    seed: int,
) -> Slices | None:
    """Return the slices where the mean loss is most surely above that of all rows, the worst first.

    `x` are test rows, encoded by `columns`; `loss` is of each row 1 where the label is wrong, or
    the squared error (`is_squared`), given as its root. None where no slice has rows enough.
    """
    half = np.zeros(len(x), dtype=bool)
    half[generator(seed, EvaluationStream.SLICES).permutation(len(x))[: len(x) // 2]] = True
    parts = np.split(x, np.cumsum([column_width(column) for column in columns])[:-1], axis=1)
    candidates = [
        candidate
        for column, part in zip(columns, parts, strict=True)
        for candidate in _candidates(column, part.astype(np.float64), half)
        if min((candidate.inside & half).sum(), (candidate.inside & ~half).sum()) >= FEWEST_ROWS
    ]
    if not candidates:
        return None
    worst = _worst(candidates, loss[half], half)
    level = 1.0 - (1.0 - LEVEL) / len(worst)

    def mean(rows: Bool[np.ndarray, "N"]) -> float:
        return float(np.sqrt(loss[rows].mean()) if is_squared else loss[rows].mean())

    slices = []
    for candidate in worst:
        inside = loss[candidate.inside & ~half]
        if is_squared:
            ends = percentiles(Resamples.of(len(inside), seed).values(RootMean(inside)), level)
        else:
            ends = share_interval(int(inside.sum()), len(inside), level)
        measured = Slice(
            column=candidate.column,
            rows_are=candidate.rows_are,
            rows=len(inside),
            loss=mean(candidate.inside & ~half),
            where_chosen=mean(candidate.inside & half),
            confidence_intervals={"loss": ends},
        )
        slices.append(measured)
    return Slices(
        candidates=len(candidates),
        chosen_rows=int(half.sum()),
        rows=int((~half).sum()),
        interval_level=level,
        all_rows=mean(~half),
        slices=slices,
    )


def _candidates(
    column: AnyColumn, part: Float64[np.ndarray, "N J"], half: Bool[np.ndarray, "N"]
) -> list[_Candidate]:
    """Return a column's slices; where ranges end is decided on the half that chooses."""
    name = column.name
    if isinstance(column, CategoricalColumn):
        names = [*column.categories, "another or missing"]
        return [_Candidate(name, text, part[:, i] == 1.0) for i, text in enumerate(names)]
    is_missing = part[:, -1] == 1.0 if column.indicator else np.zeros(len(part), dtype=bool)
    found = [_Candidate(name, "missing", is_missing)] if column.indicator else []
    values, is_known = part[:, 0], half & ~is_missing
    present = np.unique(values[is_known]).tolist()
    if len(present) <= FEW_VALUES:
        inside = {_show(column, v): values == v for v in present}
    else:
        edges = np.unique(np.quantile(values[is_known], np.linspace(0, 1, RANGES + 1)[1:-1]))
        index = np.searchsorted(edges, values, side="left")
        shown = [_show(column, edge) for edge in edges.tolist()]
        between = [f"above {low}, at most {high}" for low, high in pairwise(shown)]
        texts = [f"at most {shown[0]}", *between, f"above {shown[-1]}"]
        inside = {text: index == i for i, text in enumerate(texts)}
    return found + [_Candidate(name, text, rows & ~is_missing) for text, rows in inside.items()]


def _show(column: AnyColumn, encoded: float) -> str:
    assert not isinstance(column, CategoricalColumn)
    value = encoded * column.std + column.mean
    if isinstance(column, TimeColumn):
        return str(np.datetime64(round(value), "s"))
    return f"{value:.4g}"


def _worst(
    candidates: list[_Candidate], loss: Float64[np.ndarray, "H"], half: Bool[np.ndarray, "N"]
) -> list[_Candidate]:
    """Return the slices whose mean loss is the most standard errors above that of all; one of a
    column."""
    spread = loss.std() or 1.0
    excess = []
    for candidate in candidates:
        inside = loss[candidate.inside[half]]
        excess.append((inside.mean() - loss.mean()) * np.sqrt(len(inside)) / spread)
    worst: dict[str, _Candidate] = {}
    for i in np.argsort(excess, kind="stable")[::-1].tolist():
        worst.setdefault(candidates[i].column, candidates[i])
    return [*worst.values()][:MOST]
