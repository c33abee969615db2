"""What each column of a table is taken for, and what about it a person should know."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from model_store.sources.columns import Numbers, category_text
from training.data.cells import MOSTLY, as_text, with_times
from training.data.columns import FREQUENT, MAX_CATEGORIES

Kind = Literal["numeric", "categorical", "time", "ignored", "refused"]
ID_NAME = re.compile(r"(?i)(^|.*[_ -])(id|uuid|guid|key|index|row|nr|no|number)$")
FEWEST_ROWS = 20  # from which on values that are all different are worth a word
HEAVY = 30.0  # interquartile ranges that the furthest value is away from the median
# Numbers as text with signs of money, percent signs or groups of thousands.
DRESSED = re.compile(
    r"[+-]?[$€£¥]?\s?(?:\d{1,3}(?:[,.' ]\d{3})+|\d+)(?:[.,]\d+)?\s?[%$€£¥]?", re.ASCII
)
SHOWN_VALUES = 4
WORDS_OF_TEXT = 4  # on average, of values that are nearly all different
LEAK_ROWS = 5_000
LEAK = (
    0.99  # of what one column says of the target, from which on it may be the target in other words
)


@dataclass(frozen=True, eq=False)
class ColumnFinding:
    """A column: what it is taken for and why, the share of its cells that miss, and what is odd
    about it."""

    name: str
    kind: Kind
    why: str
    missing: float
    values: Numbers | list[str | None]
    notes: list[str] = field(default_factory=list)
    tail: float = 0.0  # interquartile ranges from the median to the furthest value
    is_id: bool = False  # it tells the rows apart, by its name or since it numbers them


def find(table: Any, name: str, date_format: str | None, told: str | None = None) -> ColumnFinding:
    """Return what a column of an Arrow table, whose texts of numbers are numbers, is taken for.

    With a kind that a recipe tells, that is what it is taken for.
    """
    import pyarrow as pa
    from pyarrow import types

    column = table.column(name)
    rows = len(column)
    missing = column.null_count / max(1, rows)
    only, times = with_times(
        table.select([name]), {name}, {} if told in (None, "time") else {name: "-"}, date_format
    )
    if name in times:
        seconds = only.column(name).to_numpy(zero_copy_only=False).astype(np.float64)
        spans = [str(np.datetime64(int(s), "s"))[:16].replace("T00:00", "") for s in _ends(seconds)]
        return ColumnFinding(
            name, "time", f"dates or times, {spans[0]} to {spans[1]}", missing, seconds
        )
    of = column.type
    if types.is_integer(of) or types.is_floating(of) or types.is_decimal(of) or types.is_null(of):
        numbers = (
            column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        )
        return _of_numbers(name, numbers, told)
    if not (types.is_boolean(of) or as_text(column) is not None):
        return ColumnFinding(
            name, "ignored", f"type {of} is none of numbers, categories or dates", missing, []
        )
    texts = as_text(column)
    values = [
        None if v is None else category_text(v)
        for v in (column if texts is None else texts).to_pylist()
    ]
    return _of_text(name, values, told)


def _of_numbers(name: str, numbers: Numbers, told: str | None) -> ColumnFinding:
    present = numbers[np.isfinite(numbers)]
    missing = float(np.isnan(numbers).mean()) if len(numbers) else 0.0
    distinct = np.unique(present)
    if len(distinct) < 2 and told is None:
        why = (
            "no value in any row"
            if len(distinct) == 0
            else f"the same in every row ({distinct[0]:g})"
        )
        return ColumnFinding(name, "ignored", why, missing, numbers)
    notes, why, kind = (
        [],
        f"numbers, {distinct[0]:g} to {distinct[-1]:g}" if len(distinct) else "numbers",
        "numeric",
    )
    if np.isinf(numbers).any():
        notes.append(
            f"infinity in row {int(np.argmax(np.isinf(numbers)))}: such a cell stops a fit"
        )
    is_whole = bool((present == np.round(present)).all())
    if is_whole and len(distinct) == len(present) >= FEWEST_ROWS:
        steps = np.diff(present)
        if (steps == 1).all() or (steps == -1).all():
            why, kind = "it numbers the rows", "ignored"
        elif ID_NAME.fullmatch(name):
            why, kind = "an id by its name, different in every row", "ignored"
        else:
            notes.append("whole numbers, different in every row: an id? (`ignored` leaves it out)")
    elif is_whole and ID_NAME.fullmatch(name) and len(distinct) > MAX_CATEGORIES:
        notes.append(
            "an id by its name: numbers of things have no order (`categorical` or `ignored`)"
        )
    tail = tail_of(present)
    if kind == "numeric" and tail > HEAVY:
        notes.append(
            f"a heavy tail: its furthest value is {tail:.0f} interquartile ranges from the median"
        )
    taken: Kind = told if told in ("numeric", "categorical", "ignored") else kind  # type: ignore[assignment]
    is_id = kind == "ignored" and len(present) == len(numbers)
    return ColumnFinding(
        name, taken, why if told is None else "as told", missing, numbers, notes, tail, is_id
    )


def tail_of(present: Numbers) -> float:
    """Return how many interquartile ranges the furthest value is away from the median; 0 where
    these are 0."""
    quartiles = np.percentile(present, [25, 50, 75]) if len(present) else np.zeros(3)
    spread = quartiles[2] - quartiles[0]
    return float(np.abs(present - quartiles[1]).max() / spread) if spread > 0 else 0.0


def _of_text(name: str, values: list[str | None], told: str | None) -> ColumnFinding:
    present = [value for value in values if value is not None]
    missing = 1.0 - len(present) / max(1, len(values))
    counts: dict[str, int] = {}
    for value in present:
        counts[value] = counts.get(value, 0) + 1
    if told is not None:
        return ColumnFinding(name, told, "as told", missing, values)  # type: ignore[arg-type]
    if len(counts) < 2:
        why = (
            f"the same in every row ({next(iter(counts))[:40]!r})"
            if counts
            else "no value in any row"
        )
        return ColumnFinding(name, "ignored", why, missing, values)
    words = [value for value in counts if not _is_number(value)]
    odd = sum(counts[value] for value in words)
    if 0 < odd <= (1.0 - MOSTLY) * len(present) + 1e-9:
        cells = [
            f"{v[:30]!r} in row {n}"
            for n, v in enumerate(values)
            if v is not None and not _is_number(v)
        ]
        shown = ", ".join(cells[:SHOWN_VALUES]) + (
            f" and {len(cells) - SHOWN_VALUES} more" if len(cells) > 4 else ""
        )
        listed = ", ".join(f'"{word}"' for word in sorted(words)[:SHOWN_VALUES])
        why = f"numbers but for {shown}: data.missing_values = [{listed}] reads these as missing"
        return ColumnFinding(name, "refused", why, missing, values)
    notes = []
    if all(DRESSED.fullmatch(value.strip()) for value in counts):
        notes.append(
            f"numbers ({next(iter(counts))[:30]!r})? They can be read in several ways, or have "
            "several signs: "
            "data.decimal and data.thousands say which"
        )
    frequent = sum(count >= FREQUENT for count in counts.values())
    if (len(counts) > MAX_CATEGORIES and frequent == 0) or (
        len(counts) == len(present) >= FEWEST_ROWS
    ):
        why = f"an id or free text: {len(counts)} different values in {len(present)} rows"
        mean_words = float(np.mean([len(value.split()) for value in counts]))
        if mean_words >= WORDS_OF_TEXT:
            why = f"free text of {mean_words:.0f} words on average; data.text reads it, for a network of your own"
        is_id = ID_NAME.fullmatch(name) is not None and len(counts) == len(values)
        return ColumnFinding(name, "ignored", why, missing, values, notes, is_id=is_id)
    if len(counts) > MAX_CATEGORIES:
        notes.append(f"{len(counts)} categories: only the most frequent are told apart")
    elif len(counts) > len(present) / 2:
        notes.append("most values occur once: free text?")
    if len({value.strip().lower() for value in counts}) < len(counts):
        notes.append("some categories differ in spaces or capitals alone")
    return ColumnFinding(name, "categorical", f"{len(counts)} categories", missing, values, notes)


def leaks(finding: ColumnFinding, target: np.ndarray, is_regression: bool) -> str | None:
    """Return what to say of a column that alone determines the target almost; None of others.

    A small tree of this column alone is fitted on one half of the rows and measured on the other.
    """
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    y = target.astype(np.float64)
    if is_regression and len(y):
        y = y / (np.abs(y).max() or 1.0)  # so that no square overflows
    values = finding.values
    if isinstance(values, list):
        codes = {value: i for i, value in enumerate(sorted({v for v in values if v is not None}))}
        if len(codes) > MAX_CATEGORIES:
            return None
        x = np.array([-1 if value is None else codes[value] for value in values], dtype=np.float64)
    else:
        x = np.where(np.isfinite(values), values, np.nan)
    order = np.random.default_rng(0).permutation(len(y))[:LEAK_ROWS]
    half = len(order) // 2
    if half < FEWEST_ROWS:
        return None
    fitted, measured = order[:half], order[half:]
    make = DecisionTreeRegressor if is_regression else DecisionTreeClassifier
    tree = make(max_leaf_nodes=64, min_samples_leaf=3, random_state=0).fit(
        x[fitted, None], y[fitted]
    )
    said = tree.predict(x[measured, None])
    if is_regression:
        base = float(np.var(y[measured]))
        share = 1.0 - float(np.mean((said - y[measured]) ** 2)) / base if base > 0 else 0.0
        return (
            f"alone it explains {100 * share:.1f} % of the target's variance"
            if share > LEAK
            else None
        )
    share = float(np.mean(said == y[measured]))
    base = float(np.max(np.unique(y[measured], return_counts=True)[1]) / len(measured))
    if share < LEAK or base > LEAK - 0.05:
        return None
    return f"alone it gives the right class in {100 * share:.1f} % of the rows"


def _ends(seconds: Numbers) -> tuple[float, float]:
    present = seconds[~np.isnan(seconds)]
    return (float(present.min()), float(present.max())) if len(present) else (0.0, 0.0)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
