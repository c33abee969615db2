"""Column encodings, fitted on training rows and applied by `model_store.sources.columns`."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, get_args
from unicodedata import normalize

import numpy as np
from jaxtyping import Int64

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    Cycle,
    NumberStyle,
    NumericColumn,
    TimeColumn,
)
from model_store.errors import InvalidInput
from model_store.sources.cells import CYCLES_S, DAY_S, Categories, Numbers
from training import log

MAX_CATEGORIES = 256
MAX_KEPT_CATEGORIES = 64  # if a column has more than MAX_CATEGORIES
MIN_CATEGORY_ROWS = 5  # training rows of a kept category
TWO_WEEKS_S = 14 * DAY_S


@dataclass(frozen=True, eq=False)
class Table:
    """The input columns of a table: numbers (NaN if missing) or categories (None if missing).

    Attributes:
        formats: date formats of columns in seconds, "" for ISO 8601, and formats of numbers.
    """

    columns: dict[str, Numbers | Categories]
    formats: dict[str, NumberStyle | str | None] = field(default_factory=dict)

    def take(self, index: Int64[np.ndarray, "M"]) -> "Table":
        columns = {name: take(values, index) for name, values in self.columns.items()}
        return Table(columns, self.formats)


def take(values: Any, index: Int64[np.ndarray, "M"]) -> Any:
    return values[index] if isinstance(values, np.ndarray) else [values[i] for i in index.tolist()]


def fit_columns(table: Table, rows: Int64[np.ndarray, "M"]) -> list[AnyColumn]:
    return [_fit_column(table, name, rows) for name in table.columns]


def _fit_column(table: Table, name: str, rows: Int64[np.ndarray, "M"]) -> AnyColumn:
    values = take(table.columns[name], rows)
    if isinstance(values, list):
        return _fit_categories(name, values)
    written = table.formats.get(name)
    if isinstance(written, str):
        cycles, date_format = _cycles(values[~np.isnan(values)]), written or None
        return TimeColumn(name=name, **_moments(name, values), cycles=cycles, written=date_format)
    return NumericColumn(name=name, written=written, **_moments(name, values))


def _cycles(seconds: Numbers) -> tuple[Cycle, ...]:
    span = np.ptp(seconds) if len(seconds) else 0.0
    is_varying = {
        "year": span >= CYCLES_S["year"],
        "week": span >= TWO_WEEKS_S,
        "day": (np.mod(seconds, DAY_S) != 0).any(),
    }
    return tuple(cycle for cycle in get_args(Cycle) if is_varying[cycle])


def _moments(name: str, values: Numbers) -> dict[str, Any]:
    """Compute the fields shared by number and time columns.

    These are mean, standard deviation (1 for a constant), median, 5 and 95 % quantiles, and whether
    values are missing.
    """
    present = values[~np.isnan(values)]
    if len(present) == 0:
        expected = "a value in at least one training row (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, "none")
    with np.errstate(over="ignore", invalid="ignore"):  # An overflow is an error below.
        mean, std = float(present.mean()), float(present.std())
    if not np.isfinite([mean, std]).all():
        expected = "numbers with a variance in float64's range"
        raise InvalidInput(f"column {name}", expected, "larger numbers")
    low, usual, high = np.quantile(present, (0.05, 0.5, 0.95)).tolist()
    missing = len(present) < len(values)
    return {
        "mean": mean,
        "std": std or 1.0,
        "usual": usual,
        "mostly": (low, high),
        "indicator": missing,
        "missing": missing,
    }


def _fit_categories(name: str, values: Categories) -> CategoricalColumn:
    counts = Counter(normalize("NFC", value) for value in values if value is not None)
    ranked = sorted(counts, key=lambda value: (-counts[value], value))
    if len(counts) > MAX_CATEGORIES:
        kept = ranked[:MAX_KEPT_CATEGORIES]
        ranked = [value for value in kept if counts[value] >= MIN_CATEGORY_ROWS]
        message = "column %s: merging all but the %d most frequent of %d categories"
        log.info(message, name, len(ranked), len(counts))
    if not ranked:
        rare = f", none in at least {MIN_CATEGORY_ROWS} training rows" if counts else ""
        expected = f"1 to {MAX_CATEGORIES} categories (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, f"{len(counts)}{rare}")
    categories, missing = tuple(sorted(ranked)), None in values
    return CategoricalColumn(
        name=name, categories=categories, usual=ranked[0], indicator=missing, missing=missing
    )
