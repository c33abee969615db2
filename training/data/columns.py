"""Table columns: their values, and encodings fitted on training rows.

A column contains times if every value is a time in one format. If two formats match, as for
03/04/2024, `data.date_format` must select one. If most but not all values are numbers or times, an
error lists the others. `model_store.sources.columns` applies the encodings.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, get_args
from unicodedata import normalize

import numpy as np
import pyarrow as pa
from jaxtyping import Int64
from pyarrow import compute

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    Cycle,
    NumberStyle,
    NumericColumn,
    TimeColumn,
)
from model_store.errors import InvalidInput
from model_store.sources.arrow import (
    Column,
    as_text,
    column_type,
    read_categories,
    read_numbers,
    read_times,
)
from model_store.sources.cells import (
    CYCLES_S,
    DAY_S,
    ISO,
    TIME_EXAMPLE,
    Categories,
    Numbers,
    category_text,
    is_number,
    parse_plain,
    parse_time,
)
from training import log

MAX_CATEGORIES = 256
MAX_KEPT_CATEGORIES = 64  # if a column has more than MAX_CATEGORIES
MIN_CATEGORY_ROWS = 5  # training rows of a kept category
TWO_WEEKS_S = 14 * DAY_S
MIN_VALID_SHARE = 0.9  # with more numbers or times, other values count as mistakes
MAX_SHOWN_CELLS = 3  # per error
MAX_SHOWN = 40  # characters per cell
WRITTEN = b"written"  # metadata key of a number format
ISO_FORMAT = ""  # instead of a `strptime` format
HAS_OFFSET = re.compile(r":\d{2}.*(?:Z|[+-]\d{2}(?::?\d{2})?)$")
TIME_OF_DAY = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2})?)?"
DATES = {  # date formats by pattern
    re.compile(r"\d{4}/\d{1,2}/\d{1,2}" + TIME_OF_DAY, re.ASCII): ("%Y/%m/%d",),
    re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}" + TIME_OF_DAY, re.ASCII): ("%d.%m.%Y",),
    re.compile(r"\d{1,2}/\d{1,2}/\d{4}" + TIME_OF_DAY, re.ASCII): ("%d/%m/%Y", "%m/%d/%Y"),
    re.compile(r"\d{1,2}-\d{1,2}-\d{4}" + TIME_OF_DAY, re.ASCII): ("%d-%m-%Y", "%m-%d-%Y"),
}


class Values(NamedTuple):
    """A column's values: numbers (NaN if missing) or categories (None if missing).

    Attributes:
        written: the format of numbers or times, "" for ISO 8601, and None for others.
    """

    cells: Numbers | Categories
    written: NumberStyle | str | None = None

    def take(self, index: Int64[np.ndarray, "M"]) -> "Values":
        return Values(take(self.cells, index), self.written)


def take(values: Any, index: Int64[np.ndarray, "M"]) -> Any:
    return values[index] if isinstance(values, np.ndarray) else [values[i] for i in index.tolist()]


def read_column(
    table: pa.Table, name: str, kind: str | None = None, date_format: str | None = None
) -> Values:
    """Read a column as numbers, times or categories.

    If `kind` is None, text becomes times if every value is a time, and categories otherwise.
    Integers that float64 cannot represent become categories. Raise InvalidInput if a value does not
    match the kind, or the type is not supported.
    """
    column = table.column(name)
    column_kind, text = column_type(column), as_text(column)
    if kind == "text" and text is not None:
        return Values(text.to_pylist())
    if column_kind is None:
        expected = "numbers, booleans, strings or dates (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, f"type {column.type}"[:80])
    if kind in (None, "time"):
        times = find_times(column, name, date_format, kind == "time")
        if times is not None:
            return times
    if kind != "categorical" and (
        column_kind == "numbers" or (column_kind == "integers" and kind == "numeric")
    ):
        numbers = read_numbers(column)
        if np.isinf(numbers).any():
            row = int(np.argmax(np.isinf(numbers)))
            raise InvalidInput(f"column {name}", "finite numbers", f"infinity in row {row}")
        metadata = table.schema.field(name).metadata or {}
        written = metadata.get(WRITTEN)
        return Values(numbers, written and NumberStyle.model_validate_json(written))
    if kind == "numeric":
        cells = [None if cell is None else str(cell) for cell in column.to_pylist()]
        check_cells(cells, name, _is_finite, "numbers", is_required=True)
        return Values(np.array([np.nan if c is None else parse_plain(c) for c in cells]))
    if kind is None and text is not None:
        cells = text.to_pylist()
        check_cells(cells, name, is_number, "numbers")
        check_cells(cells, name, _is_iso_time, "dates or times")
    return Values(_merge_equal(name, column))


def find_times(
    column: Column, name: str, date_format: str | None, is_required: bool = False
) -> Values | None:
    """Parse a column's times and detect their format, or return None if it has none.

    If a date format is set, whole numbers such as 20240531 can be times.
    """
    kind, text = column_type(column), as_text(column)
    if kind == "times":
        try:
            return Values(read_times(column), ISO_FORMAT)
        except OverflowError:
            expected = "times from year 1 to 9999 (or `ignored` in data.columns)"
            raise InvalidInput(f"column {name}", expected, "another year") from None
    if text is not None:
        texts = compute.utf8_trim_whitespace(text).to_pylist()
        return _times(texts, name, date_format, is_required)
    if kind == "numbers" and date_format is not None:
        return _times(read_categories(column), name, date_format, is_required)
    if is_required:
        raise InvalidInput(f"column {name}", "dates or times", f"type {column.type}"[:80])
    return None


def _merge_equal(name: str, column: Column) -> Categories:
    """Read categories, and warn if texts denote the same one, such as 1 and 1.0.

    Categories are in Unicode's normal form C.
    """
    text = as_text(column)
    texts = [] if text is None else text.drop_null().unique().to_pylist()
    categories = [normalize("NFC", category_text(value)) for value in texts]
    repeated = [c for c, count in Counter(categories).items() if count > 1]
    if repeated:
        equal = [repr(t) for t, c in zip(texts, categories, strict=True) if c == repeated[0]]
        message = "column %s: %s are one category"
        log.warning(message, name, " and ".join(equal[:MAX_SHOWN_CELLS]))
    return [value and normalize("NFC", value) for value in read_categories(column)]


def _times(
    values: Sequence[str | None], name: str, date_format: str | None, is_required: bool
) -> Values | None:
    """Parse times and infer their format, or return None if a value is not a time.

    Missing values become NaN. The format is "" for ISO 8601, or if several formats fit.
    """
    distinct = {value for value in values if value is not None}
    forms = _date_forms(min(distinct, default=""), date_format)
    tables = {form: _parse_seconds(form, distinct) for form in forms}
    parsed = {form: table for form, table in tables.items() if table}
    if not parsed:
        if is_required:
            known_formats = sum(DATES.values(), start=(ISO_FORMAT,))
            formats = (ISO_FORMAT, date_format) if date_format else known_formats
            kind = f"dates or times, such as {TIME_EXAMPLE}"
            kind += f" ({date_format!r})" if date_format else ""
            check_cells(
                values,
                name,
                lambda text: any(_parse_seconds(form, [text]) for form in formats),
                kind,
                is_required=True,
            )
            received = "several formats" if distinct else "no value"
            raise InvalidInput(f"column {name}", f"{kind}, in one format", received)
        return None
    seconds_by_text, *alternatives = parsed.values()
    if any(alternative != seconds_by_text for alternative in alternatives):
        ambiguous = (v for v in values if v and len({t[v] for t in parsed.values()}) > 1)
        expected = (
            'unambiguous dates (set data.date_format or --date-format to "%d/%m/%Y" if the day is '
            'first, to "%m/%d/%Y" if the month is first; or leave the column out by `ignored` in '
            "data.columns or by --ignore)"
        )
        raise InvalidInput(f"column {name}", expected, repr(next(ambiguous)[:MAX_SHOWN]))
    local_times = [text for text in distinct if not HAS_OFFSET.search(text)]
    if 0 < len(local_times) < len(distinct):
        message = "column %s: %d of %d times, such as %r, have no UTC offset and are read as UTC"
        log.warning(message, name, len(local_times), len(distinct), min(local_times))
    seconds = [np.nan if value is None else seconds_by_text[value] for value in values]
    date_form = next(iter(parsed)) if len(parsed) == 1 else ISO_FORMAT
    return Values(np.array(seconds, dtype=np.float64), date_form)


def _date_forms(example: str, date_format: str | None) -> tuple[str, ...]:
    if ISO.fullmatch(example):
        return (ISO_FORMAT,)
    if date_format is not None:
        return (date_format,)
    matches = (formats for pattern, formats in DATES.items() if pattern.fullmatch(example))
    return next(matches, ())


def _parse_seconds(form: str, texts: Collection[str]) -> dict[str, float] | None:
    try:
        return {text: parse_time(form or None, text) for text in texts}
    except (ValueError, OverflowError):
        return None


def _is_iso_time(text: str) -> bool:
    return ISO.fullmatch(text) is not None and _parse_seconds(ISO_FORMAT, [text]) is not None


def check_cells(
    texts: Sequence[str | None],
    name: str,
    is_valid: Callable[[str], bool],
    kind: str,
    *,
    is_required: bool = False,
    is_fixed: bool = False,
) -> None:
    """Raise InvalidInput if most values are valid but some are not.

    If `is_required`, all values must be valid. If `is_fixed`, the error suggests no other kind.
    """
    present = sum(text is not None for text in texts)
    cells = [
        (row, text) for row, text in enumerate(texts) if text is not None and not is_valid(text)
    ]
    if not cells:
        return
    if not is_required and len(cells) > (1.0 - MIN_VALID_SHARE) * present + 1e-9:
        return
    shown = cells[:MAX_SHOWN_CELLS]
    received = ", ".join(f"{text[:MAX_SHOWN]!r} in row {row}" for row, text in shown)
    if len(cells) > MAX_SHOWN_CELLS:
        received += f" and {len(cells) - MAX_SHOWN_CELLS} more"
    expected, valid = kind, present - len(cells)
    if valid and not is_fixed:
        texts_to_clear = list(dict.fromkeys(text.strip()[:MAX_SHOWN] for _, text in shown))
        missing = json.dumps(texts_to_clear, ensure_ascii=False)
        expected += (
            f", like {valid} of its {present} values (set data.missing_values = {missing} or "
            "--missing-value to read these cells as missing, or `categorical` in data.columns to "
            "make every value a category)"
        )
    raise InvalidInput(f"column {name}", expected, received)


def _is_finite(text: str) -> bool:
    return is_number(text) and bool(np.isfinite(parse_plain(text)))


def fit_column(name: str, values: Values) -> AnyColumn:
    cells, written = values
    if isinstance(cells, list):
        return _fit_categories(name, cells)
    if isinstance(written, str):
        cycles, date_format = _cycles(cells[~np.isnan(cells)]), written or None
        return TimeColumn(name=name, **_moments(name, cells), cycles=cycles, written=date_format)
    return NumericColumn(name=name, written=written, **_moments(name, cells))


def _cycles(seconds: Numbers) -> tuple[Cycle, ...]:
    span = np.ptp(seconds) if len(seconds) else 0.0
    is_varying = {
        "year": span >= CYCLES_S["year"],
        "week": span >= TWO_WEEKS_S,
        "day": (np.mod(seconds, DAY_S) != 0).any(),
    }
    return tuple(cycle for cycle in get_args(Cycle) if is_varying[cycle])


def _moments(name: str, values: Numbers) -> dict[str, Any]:
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
    counts = Counter(value for value in values if value is not None)
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
