"""Decide the kind of each column of a table, and note what a person should know about it."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Int64
from pyarrow import types

from model_store.errors import InvalidInput
from model_store.sources.cells import is_number
from model_store.sources.columns import Numbers, category_text
from training.data.cells import as_text, floats_of, is_numeric, refuse_mostly_numbers, with_times
from training.data.columns import FREQUENT, MAX_CATEGORIES

Index = Int64[np.ndarray, "N"]
Kind = Literal["numeric", "categorical", "time", "ignored", "refused"]
ID_NAME = re.compile(r"(?i)(^|.*[_ -])(id|uuid|guid|key|index|row|nr|no|number)$")
RARE = 4 * FREQUENT  # rows of the most frequent value; about half of them train
MIN_ROWS = 20  # from which distinct values are remarkable
DATE_LIKE = re.compile(  # dates that need `data.date_format`
    r"\d{1,4}[-/. ]+(?:\d{1,2}|[A-Za-z]{3,9})[-/., ]+\d{2,4}(?:\D.*)?"
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}(?:\D.*)?|\d{4}[-/]\d{2}"
)
HEAVY = 30.0  # interquartile ranges from the median to the furthest value
# Numbers as text with signs of money, percent signs or groups of thousands.
DRESSED = re.compile(
    r"[+-]?[$€£¥]?\s?(?:\d{1,3}(?:[,.' ]\d{3})+|\d+)(?:[.,]\d+)?\s?[%$€£¥]?", re.ASCII
)
MIN_WORDS = 4  # of free text, on average
LEAK_ROWS = 5_000
LEAK = 0.99  # share of the target that a leaking column determines


@dataclass(frozen=True, eq=False)
class ColumnFinding:
    name: str
    kind: Kind
    why: str
    missing: float
    values: Numbers | list[str | None]
    notes: list[str] = field(default_factory=list)
    tail: float = 0.0  # interquartile ranges from the median to the furthest value
    is_id: bool = False  # by its name, or because it numbers the rows


def find(
    table: Any, name: str, date_format: str | None, rows: Index, told: Any = None
) -> ColumnFinding:
    """Return the kind of a typed column: configured, or inferred from its values.

    `rows` are the row numbers in the file.
    """
    column = table.column(name)
    missing = column.null_count / max(1, len(column))
    kinds = {} if told in (None, "time") else {name: "-"}
    texts = as_text(column)
    try:
        timed, times = with_times(table.select([name]), {name}, kinds, date_format)
    except InvalidInput as error:
        return _refused(error, name, missing, [] if texts is None else texts.to_pylist())
    if name in times:
        seconds = floats_of(timed.column(name))
        ends = (0.0, 0.0) if np.isnan(seconds).all() else (np.nanmin(seconds), np.nanmax(seconds))
        first, last = (str(np.datetime64(int(s), "s"))[:16].replace("T00:00", "") for s in ends)
        return ColumnFinding(name, "time", f"dates or times, {first} to {last}", missing, seconds)
    if is_numeric(column.type):
        return _of_numbers(name, floats_of(column), rows, told)
    if not (types.is_boolean(column.type) or texts is not None):
        why = f"type {column.type} is none of numbers, categories or dates"
        return ColumnFinding(name, "ignored", why, missing, [])
    cells = (column if texts is None else texts).to_pylist()
    return _of_text(name, [None if c is None else category_text(c) for c in cells], rows, told)


def _of_numbers(name: str, numbers: Numbers, rows: Index, told: Any) -> ColumnFinding:
    present = numbers[np.isfinite(numbers)]
    missing = float(np.isnan(numbers).mean()) if len(numbers) else 0.0
    distinct = np.unique(present)
    if told is None and len(distinct) < 2:
        why = f"the same in every row ({distinct[0]:g})" if len(distinct) else "no value in any row"
        return ColumnFinding(name, "ignored", why, missing, numbers)
    why = f"numbers, {distinct[0]:g} to {distinct[-1]:g}" if len(distinct) else "numbers"
    kind: Kind = "numeric"
    notes = []
    if np.isinf(numbers).any():
        row = rows[int(np.argmax(np.isinf(numbers)))]
        notes.append(f"infinity in row {row}: such a cell stops a fit")
    is_whole = bool((present == np.round(present)).all())
    if is_whole and len(distinct) == len(present) >= MIN_ROWS:
        steps, of_rows = np.diff(present), np.diff(rows[np.isfinite(numbers)])
        if any((steps == step).all() for step in (1, -1, of_rows, -of_rows)):
            why, kind = "it numbers the rows", "ignored"
        elif ID_NAME.fullmatch(name):
            why, kind = "an id by its name, different in every row", "ignored"
        else:
            notes.append("whole numbers, different in every row: an id? (`ignored` leaves it out)")
    elif is_whole and ID_NAME.fullmatch(name) and len(distinct) > MAX_CATEGORIES:
        said = "an id by its name: numbers of things have no order"
        notes.append(f"{said} (`categorical` or `ignored`)")
    tail = tail_of(present)
    if kind == "numeric" and tail > HEAVY:
        away = f"{np.round(tail):.6g} interquartile ranges from the median"
        notes.append(f"a heavy tail: its furthest value is {away}")
    is_id = kind == "ignored" and told in (None, "ignored") and len(present) == len(numbers)
    if told in ("numeric", "categorical", "ignored"):
        kind = told
    why = why if told is None else "as told"
    return ColumnFinding(name, kind, why, missing, numbers, notes, tail, is_id)


def _refused(
    error: InvalidInput, name: str, missing: float, values: list[str | None]
) -> ColumnFinding:
    reason = f"expected {error.expected}, got {error.got}"
    return ColumnFinding(name, "refused", reason, missing, values)


def tail_of(present: Numbers) -> float:
    """Return the distance of the furthest value from the median in interquartile ranges, or 0."""
    low, median, high = np.percentile(present, [25, 50, 75]) if len(present) else np.zeros(3)
    return float(np.abs(present - median).max() / (high - low)) if high > low else 0.0


def _of_text(name: str, values: list[str | None], rows: Index, told: Any) -> ColumnFinding:
    counts = Counter(value for value in values if value is not None)
    present = counts.total()
    missing = 1.0 - present / max(1, len(values))
    if told is not None:
        return ColumnFinding(name, told, "as told", missing, values)
    if len(counts) < 2:
        why = "no value in any row"
        if counts:
            why = f"the same in every row ({next(iter(counts))[:40]!r})"
        return ColumnFinding(name, "ignored", why, missing, values)
    try:
        refuse_mostly_numbers(values, name, is_number, rows.tolist())
    except InvalidInput as error:
        return _refused(error, name, missing, values)
    notes = []
    if all(DRESSED.fullmatch(value.strip()) for value in counts):
        notes.append(
            f"numbers ({next(iter(counts))[:30]!r})? They can be read in several ways, or have "
            "several signs: data.decimal and data.thousands say which"
        )
    if all(DATE_LIKE.fullmatch(value.strip()) for value in counts):
        notes.append(
            f"dates ({next(iter(counts))[:30]!r})? data.date_format or --date-format reads them, "
            "such as %d/%m/%y"
        )
    is_rare = len(counts) > MAX_CATEGORIES and max(counts.values()) < RARE
    if is_rare or len(counts) == present >= MIN_ROWS:
        why = f"an id or free text: {len(counts)} different values in {present} rows"
        mean_words = float(np.mean([len(value.split()) for value in counts]))
        if mean_words >= MIN_WORDS:
            reads = "data.text reads it, for a network of your own"
            why = f"free text of {mean_words:.0f} words on average; {reads}"
        is_id = ID_NAME.fullmatch(name) is not None and len(counts) == len(values)
        return ColumnFinding(name, "ignored", why, missing, values, notes, is_id=is_id)
    if len(counts) > MAX_CATEGORIES:
        notes.append(f"{len(counts)} categories: only the most frequent are told apart")
    elif len(counts) > present / 2:
        notes.append("most values occur once: free text?")
    if alike(counts):
        notes.append("some categories differ in spaces or capitals alone")
    return ColumnFinding(name, "categorical", f"{len(counts)} categories", missing, values, notes)


def alike(values: Iterable[str]) -> list[list[str]]:
    """Group the values that differ only in spaces or capitals."""
    same = defaultdict(list)
    for value in sorted(values):
        same["".join(value.split()).casefold()].append(value)
    return [some for some in same.values() if len(some) > 1]


def leak_of(values: Any, target: np.ndarray, is_regression: bool) -> str | None:
    """Return a note on a column that almost determines the target; None for other columns.

    A small tree on this column is fitted on one half of the rows and measured on the other.
    """
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    y = target.astype(np.float64)
    if is_regression and len(y):
        y = y / (np.abs(y).max() or 1.0)  # so that no square overflows
    if isinstance(values, list):
        codes = {value: i for i, value in enumerate(sorted({v for v in values if v is not None}))}
        if len(codes) > MAX_CATEGORIES:
            return None
        x = np.array([codes.get(value, -1) for value in values], dtype=np.float64)
    else:
        x = np.where(np.abs(values) < np.finfo(np.float32).max, values, np.nan)  # as trees take it
    order = np.random.default_rng(0).permutation(len(y))[:LEAK_ROWS]
    half = len(order) // 2
    if half < MIN_ROWS:
        return None
    fitted, measured = order[:half], order[half:]
    if not is_regression and len(np.unique(y[fitted])) > half / 2:  # no classes to speak of
        return None
    make = DecisionTreeRegressor if is_regression else DecisionTreeClassifier
    tree = make(max_leaf_nodes=64, min_samples_leaf=3, random_state=0)
    predicted = tree.fit(x[fitted, None], y[fitted]).predict(x[measured, None])
    if is_regression:
        base = float(np.var(y[measured]))
        share = 1.0 - float(np.mean((predicted - y[measured]) ** 2)) / base if base > 0 else 0.0
        said = f"alone it explains {100 * share:.1f} % of the target's variance"
        return said if share > LEAK else None
    share = float(np.mean(predicted == y[measured]))
    base = float(np.max(np.unique(y[measured], return_counts=True)[1]) / len(measured))
    if share < LEAK or base > LEAK - 0.05:
        return None
    return f"alone it gives the right class in {100 * share:.1f} % of the rows"
