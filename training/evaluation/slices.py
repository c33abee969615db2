"""Where a model of columns is worst: slices of the test rows by one column.

A slice is a category, a range between quantiles, or the rows whose value is missing. With many
slices some look bad by chance, and the worst of them always does. So they are chosen on one half of
the rows, a random one, and measured on the other, which had no part in the choice; and the
intervals of all that are reported hold together (Bonferroni).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, TimeColumn, column_width
from model_store.sources.columns import Columns
from training.evaluation.figures import RootMean
from training.evaluation.intervals import LEVEL, Resamples, percentiles, share_interval
from training.evaluation.records import Slice, Slices
from training.seeds import EvaluationStream, generator

MOST = 5  # slices that are reported
RANGES = 4  # between quantiles of a column of numbers
FEWEST_ROWS = 15  # of a slice, in either half
FEW_VALUES = 10  # of a column of numbers, up to which each is a slice


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A slice of N rows."""

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

    Args:
        x: test rows, encoded.
        columns: how they are.
        loss: of each row: 1 where the label is wrong, or the squared error (`is_squared`), given as
            its root.
        is_squared: of a regression.
        seed: of the evaluation.

    Returns:
        None where no slice has rows enough.
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
    chosen = _chosen(candidates, loss[half], half)
    level = 1.0 - (1.0 - LEVEL) / len(chosen)
    return Slices(
        candidates=len(candidates),
        chosen_rows=int(half.sum()),
        rows=int((~half).sum()),
        interval_level=level,
        all_rows=_loss(loss[~half], is_squared),
        slices=[_measured(candidate, loss, half, is_squared, level, seed) for candidate in chosen],
    )


def _candidates(
    column: AnyColumn, part: Float64[np.ndarray, "N J"], half: Bool[np.ndarray, "N"]
) -> list[_Candidate]:
    """Return a column's slices; where ranges end is decided on the half that chooses."""
    name = column.name
    if isinstance(column, CategoricalColumn):
        names = [*column.categories, "another or missing"]
        return [_Candidate(name, said, part[:, i] == 1.0) for i, said in enumerate(names)]
    is_missing = part[:, -1] == 1.0 if column.indicator else np.zeros(len(part), dtype=bool)
    found = [_Candidate(name, "missing", is_missing)] if column.indicator else []
    values = part[:, 0]
    present = np.unique(values[half & ~is_missing])
    if len(present) <= FEW_VALUES:
        return found + [
            _Candidate(name, _shown(column, v), (values == v) & ~is_missing)
            for v in present.tolist()
        ]
    edges = np.unique(np.quantile(values[half & ~is_missing], np.linspace(0, 1, RANGES + 1)[1:-1]))
    index: Int64[np.ndarray, "N"] = np.searchsorted(edges, values, side="left")
    shown = [_shown(column, edge) for edge in edges.tolist()]
    said = [f"at most {shown[0]}"]
    said += [f"above {low}, at most {high}" for low, high in pairwise(shown)]
    said += [f"above {shown[-1]}"]
    return found + [
        _Candidate(name, text, (index == i) & ~is_missing) for i, text in enumerate(said)
    ]


def _shown(column: AnyColumn, encoded: float) -> str:
    assert not isinstance(column, CategoricalColumn)
    value = encoded * column.std + column.mean
    return (
        str(np.datetime64(round(value), "s")) if isinstance(column, TimeColumn) else f"{value:.4g}"
    )


def _chosen(
    candidates: list[_Candidate], loss: Float64[np.ndarray, "H"], half: Bool[np.ndarray, "N"]
) -> list[_Candidate]:
    """Return the slices whose mean loss is the most standard errors above that of all; one of a
    column."""
    spread = loss.std() or 1.0
    excess = []
    for candidate in candidates:
        inside = loss[candidate.inside[half]]
        excess.append((inside.mean() - loss.mean()) * np.sqrt(len(inside)) / spread)
    chosen: dict[str, _Candidate] = {}
    for i in np.argsort(excess, kind="stable")[::-1].tolist():
        chosen.setdefault(candidates[i].column, candidates[i])
    return [*chosen.values()][:MOST]


def _measured(
    candidate: _Candidate,
    loss: Float64[np.ndarray, "N"],
    half: Bool[np.ndarray, "N"],
    is_squared: bool,
    level: float,
    seed: int,
) -> Slice:
    inside = loss[candidate.inside & ~half]
    if is_squared:
        ends = percentiles(Resamples.of(len(inside), seed).values(RootMean(inside)), level)
    else:
        ends = share_interval(int(inside.sum()), len(inside), level)
    return Slice(
        column=candidate.column,
        rows_are=candidate.rows_are,
        rows=len(inside),
        loss=_loss(inside, is_squared),
        where_chosen=_loss(loss[candidate.inside & half], is_squared),
        confidence_intervals={"loss": ends},
    )


def _loss(loss: Float64[np.ndarray, "n"], is_squared: bool) -> float:
    return float(np.sqrt(loss.mean()) if is_squared else loss.mean())
