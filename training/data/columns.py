"""Encodings of columns, fitted on the training rows; `model_store.sources.columns` applies them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from jaxtyping import Int64

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    Cycle,
    NumberWriting,
    NumericColumn,
    TimeColumn,
)
from model_store.errors import InvalidInput
from model_store.sources.cells import CYCLES_S, DAY_S
from model_store.sources.columns import Categories, Numbers
from training import log

MAX_CATEGORIES = 256
MANY_CATEGORIES = 64  # of a column with more than MAX_CATEGORIES, how many are told apart at most
FREQUENT = 5  # training rows from which on one of these is
TWO_WEEKS_S = 14 * DAY_S


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, without the target: numbers (NaN where missing) or categories (None where
    missing).

    Attributes:
        times: the columns that are numbers of seconds, and the format of their dates, None of ISO
            8601.
        written: of columns of numbers that were not written plainly, how they were.
    """

    columns: dict[str, Numbers | Categories]
    times: Mapping[str, str | None] = field(default_factory=dict)
    written: Mapping[str, NumberWriting] = field(default_factory=dict)

    def take(self, index: Int64[np.ndarray, "M"]) -> "Table":
        columns = {name: take(values, index) for name, values in self.columns.items()}
        return Table(columns, self.times, self.written)


def take(values: Any, index: Int64[np.ndarray, "M"]) -> Any:
    return values[index] if isinstance(values, np.ndarray) else [values[i] for i in index.tolist()]


def fit_columns(table: Table) -> list[AnyColumn]:
    return [_fit_column(table, name) for name in table.columns]


def _fit_column(table: Table, name: str) -> AnyColumn:
    values = table.columns[name]
    if isinstance(values, list):
        return _fit_categories(name, values)
    if name in table.times:
        cycles, written = _cycles(values[~np.isnan(values)]), table.times[name]
        return TimeColumn(name=name, **_moments(name, values), cycles=cycles, written=written)
    return NumericColumn(name=name, written=table.written.get(name), **_moments(name, values))


def _cycles(seconds: Numbers) -> tuple[Cycle, ...]:
    span = np.ptp(seconds) if len(seconds) else 0.0
    is_seen = {
        "year": span >= CYCLES_S["year"],
        "week": span >= TWO_WEEKS_S,
        "day": (np.mod(seconds, DAY_S) != 0).any(),
    }
    return tuple(cycle for cycle in get_args(Cycle) if is_seen[cycle])


def _moments(name: str, values: Numbers) -> dict[str, Any]:
    """Return what columns of numbers and of times share: mean, standard deviation (1 of a
    constant), median, where nine tenths of the values lie, and whether some are missing."""
    found = values[~np.isnan(values)]
    if len(found) == 0:
        expected = "a value in some training row (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, "none")
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        mean, std = float(found.mean()), float(found.std())
    if not np.isfinite([mean, std]).all():
        expected = "numbers whose variance float64 can hold"
        raise InvalidInput(f"column {name}", expected, "larger ones")
    low, usual, high = np.quantile(found, (0.05, 0.5, 0.95)).tolist()
    missing = len(found) < len(values)
    return {
        "mean": mean,
        "std": std or 1.0,
        "usual": usual,
        "mostly": (low, high),
        "indicator": missing,
        "missing": missing,
    }


def _fit_categories(name: str, values: Categories) -> CategoricalColumn:
    counts = Counter(value for value in values if value is not None)
    ranked = sorted(counts, key=lambda value: (-counts[value], value))
    if len(counts) > MAX_CATEGORIES:
        ranked = [value for value in ranked[:MANY_CATEGORIES] if counts[value] >= FREQUENT]
        said = "column %s: of %d categories the %d most frequent are told apart, the others are one"
        log.info(said, name, len(counts), len(ranked))
    if not ranked:
        found = f"{len(counts)}" + (f", none in {FREQUENT} training rows or more" if counts else "")
        expected = f"1 to {MAX_CATEGORIES} categories (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, found)
    categories, missing = tuple(sorted(ranked)), None in values
    return CategoricalColumn(name=name, categories=categories, usual=ranked[0], missing=missing)
