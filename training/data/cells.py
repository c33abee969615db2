"""Cells of a table to columns of numbers or of categories.

A column of text is numeric where every value is a number. Where most are and a few are not,
somebody has to say what those few are: it is refused, with the cells, rather than taken for a
column of as many categories as it has numbers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from model_store.artifacts.manifest import NumberWriting
from model_store.errors import InvalidInput
from model_store.sources.columns import Categories, Numbers, category_text
from model_store.sources.missing import MISSING
from model_store.sources.numbers import number_of
from training import log
from training.data.dates import times_of
from training.data.writing import writing_of

BOOLEANS = {"true", "false"}
# share of a column's values that are numbers from which on the others are taken for mistakes
MOSTLY = 0.9
NAMED_CELLS = 3  # of those that an error names
# What pandas calls an index that nobody named: in a CSV file it wrote, in one it read and wrote, in
# Parquet.
INDEX_NAMES = re.compile(r"|Unnamed: 0|__index_level_0__")


def index_column(names: list[str], wanted: set[str]) -> str | None:
    """Return the name of pandas' unnamed index, a table's first or last column, unless it is one of
    those wanted."""
    for name in (names[0], names[-1]) if names else ():
        if INDEX_NAMES.fullmatch(name) and name not in wanted and (name or names[0] == name):
            return name
    return None


def trimmed(table: Any, as_written: set[str | None]) -> Any:
    """Return a table of text without blanks around cells, but for some columns; one of blanks alone
    is missing."""
    import pyarrow as pa
    from pyarrow import compute

    for i, name in enumerate(table.column_names):
        if name in as_written or as_text(table.column(i)) is None:
            continue
        column = compute.utf8_trim_whitespace(table.column(i))
        nothing = compute.is_in(column, pa.array(MISSING, column.type))
        table = table.set_column(
            i, name, compute.if_else(nothing, pa.scalar(None, column.type), column)
        )
    return table


def with_missing(table: Any, values: list[str]) -> tuple[Any, set[str]]:
    """Return a table without the cells of text that say one of `values`, and the names of columns
    that had such."""
    import pyarrow as pa
    from pyarrow import compute

    changed = set()
    for i, name in enumerate(table.column_names if values else ()):
        column = as_text(table.column(i))
        if column is None:
            continue
        is_missing = compute.is_in(
            compute.utf8_trim_whitespace(column), pa.array(values, column.type)
        )
        if compute.any(is_missing).as_py():
            changed.add(name)
            table = table.set_column(
                i, name, compute.if_else(is_missing, pa.scalar(None, column.type), column)
            )
    return table, changed


def as_text(column: Any) -> Any:
    """Return a column of text, also one that was written as a dictionary; None for any other."""
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column if types.is_string(column.type) or types.is_large_string(column.type) else None


@dataclass(frozen=True)
class NumberFormat:
    """How numbers are written: what stands before their decimals, and what groups their digits, if
    anything does."""

    decimal: str = "."
    thousands: str | None = None
    is_known: bool = False  # that decimal is such: as told, or as other numbers show

    @property
    def is_plain(self) -> bool:
        """Whether numbers are written as Python writes them."""
        return self.decimal == "." and self.thousands is None

    def plain(self, text: str) -> str:
        """Return a number as Python reads it; of other texts, something that is no number
        either."""
        text = text.strip()
        if self.thousands is not None and re.search(r"\d", text):
            head, mark, tail = text.partition(self.decimal)
            if self.thousands in head:
                if not re.fullmatch(
                    rf"[+-]?\d{{1,3}}(?:{re.escape(self.thousands)}\d{{3}})+", head, re.ASCII
                ):
                    return text + " "  # not a number: 1,23
                text = head.replace(self.thousands, "") + mark + tail
        if self.decimal != ".":
            return text + "?" if "." in text else text.replace(self.decimal, ".")
        return text


PLAIN = NumberFormat()
WRITTEN = b"written"  # in a field's metadata: how its numbers were


def typed(
    table: Any,
    names: set[str],
    kinds: dict[str, str],
    booleans: set[str],
    written: NumberFormat = PLAIN,
) -> Any:
    """Return a table whose text columns of these names, if of numbers or booleans, are such, but
    for those of a kind.

    Columns known as `booleans` are named as booleans are, whatever else is in them.
    """
    import pyarrow as pa
    from pyarrow import compute

    for i, name in enumerate(table.column_names):
        text = as_text(table.column(i))
        if name not in names or text is None:
            continue
        column = compute.utf8_trim_whitespace(text)
        if name in booleans:
            table = table.set_column(i, name, compute.utf8_lower(column))
            continue
        if kinds.get(name) in ("categorical", "time"):
            continue
        distinct = column.unique().to_pylist() if len(column) else []
        texts = {value.lower() for value in distinct[:3] if value is not None}
        if (
            texts
            and texts <= BOOLEANS
            and {value.lower() for value in distinct if value is not None} <= BOOLEANS
        ):
            table = table.set_column(i, name, compute.utf8_lower(column).cast(pa.bool_()))
        elif all(value is None or _is_float(written.plain(value)) for value in distinct):
            table = table.set_column(i, name, _floats(column, written))
        elif kinds.get(name) != "ignored" and (writing := _writing(distinct, written)) is not None:
            table = table.set_column(i, *_written(name, column, writing))
        elif not written.is_plain and kinds.get(name) != "ignored":
            table = table.set_column(i, name, _with_points(column, written))
    return table


def _writing(distinct: list[str | None], written: NumberFormat) -> NumberWriting | None:
    texts = [text for text in distinct if text is not None]
    known = (written.decimal if written.is_known else None), written.thousands
    return writing_of(texts, *known) if texts else None


def _written(name: str, column: Any, writing: NumberWriting) -> tuple[Any, Any]:
    """Return a column of text that are all numbers so written as numbers, and its field, which
    keeps how."""
    import pyarrow as pa

    cells = column.to_pylist()
    first = next(text for text in cells if text is not None)
    log.info(
        "column %s: %r is read as %g, and the others alike (`categorical` in data.columns keeps "
        "text)",
        *(name, first[:40], number_of(first, writing)),
    )
    field = pa.field(name, pa.float64(), metadata={WRITTEN: writing.model_dump_json()})
    return field, pa.array(
        [None if text is None else number_of(text, writing) for text in cells], pa.float64()
    )


def writing_in(table: Any, name: str) -> NumberWriting | None:
    """Return how the numbers of a table's column were written, None of plain ones."""
    metadata = table.schema.field(name).metadata or {}
    return NumberWriting.model_validate_json(metadata[WRITTEN]) if WRITTEN in metadata else None


def with_times(
    table: Any, names: set[str], kinds: Mapping[str, str], date_format: str | None
) -> tuple[Any, dict[str, str | None]]:
    """Return a table whose columns of dates and times are numbers of seconds, and by the names of
    these columns the format of their dates, None of those that requests write in ISO 8601 alone.

    Text is so where every value is a date or time; in a column of kind `time` another value is
    refused.
    """
    import pyarrow as pa
    from pyarrow import compute, types

    found: dict[str, str | None] = {}
    for i, name in enumerate(table.column_names):
        column, kind = table.column(i), kinds.get(name)
        if name not in names or kind not in (None, "time"):
            continue
        form = None
        if types.is_date(column.type) or types.is_timestamp(column.type):
            seconds = compute.cast(
                column, pa.timestamp("us", getattr(column.type, "tz", None)), safe=False
            )
            numbers = compute.divide(
                compute.cast(compute.cast(seconds, pa.int64()), pa.float64()), 1e6
            )
        elif as_text(column) is not None:
            trimmed = compute.utf8_trim_whitespace(as_text(column)).to_pylist()
            times = times_of(trimmed, name, date_format, kind == "time")
            if times is None:
                continue
            numbers, form = pa.array(times.seconds, from_pandas=True), times.written
        elif kind == "time":
            raise InvalidInput(f"column {name}", "dates or times", f"type {column.type}"[:80])
        else:
            continue
        found[name] = form
        table = table.set_column(i, name, numbers)
    return table, found


def _with_points(column: Any, written: NumberFormat) -> Any:
    """Return a column of text whose numbers are written with a point, as far as they are
    numbers."""
    import pyarrow as pa

    plain = {text: written.plain(text) for text in column.unique().to_pylist() if text is not None}
    if not any(_is_float(text) for text in plain.values()):
        return column
    cells = (
        None if text is None else plain[text] if _is_float(plain[text]) else text
        for text in column.to_pylist()
    )
    return pa.array(cells, column.type)


def _floats(column: Any, written: NumberFormat) -> Any:
    """Return a column of text that are all numbers as numbers."""
    import pyarrow as pa

    try:
        if written.is_plain:
            return column.cast(pa.float64())
    except pa.ArrowInvalid:  # such as +1, which is none to Arrow
        pass
    cells = column.to_pylist()
    return pa.array(
        [None if text is None else float(written.plain(text)) for text in cells], pa.float64()
    )


def values_of(column: Any, name: str, kind: str | None) -> Numbers | Categories:
    """Return a column of an Arrow table as numbers or as categories; without a kind its type
    decides."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    of = column.type
    is_number = (
        types.is_integer(of) or types.is_floating(of) or types.is_decimal(of) or types.is_null(of)
    )
    if not (is_number or types.is_boolean(of) or types.is_string(of) or types.is_large_string(of)):
        expected = "numbers, booleans, strings or dates (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, f"type {of}"[:80])
    if is_number and kind != "categorical":
        numbers = (
            column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        )
        if np.isinf(numbers).any():
            raise InvalidInput(
                f"column {name}",
                "finite numbers",
                f"infinity in row {np.argmax(np.isinf(numbers))}",
            )
        return numbers
    if kind == "numeric":
        row, bad = next(
            (n, value) for n, value in enumerate(column.to_pylist()) if not _is_number(value)
        )
        raise InvalidInput(f"column {name}", "numbers", f"{str(bad)[:40]!r} in row {row}")
    if kind is None and as_text(column) is not None:
        _refuse_mostly_numbers(column, name)
    return [
        None if value is None or value != value else category_text(value)
        for value in column.to_pylist()
    ]


def _refuse_mostly_numbers(column: Any, name: str) -> None:
    """Raise InvalidInput for a column of text that is numeric but for a few cells."""
    counts = [(pair["values"], pair["counts"]) for pair in column.value_counts().to_pylist()]
    present = sum(count for text, count in counts if text is not None)
    others = {text for text, _ in counts if text is not None and not _is_float(text)}
    bad = sum(count for text, count in counts if text in others)
    if not 0 < bad <= (1.0 - MOSTLY) * present + 1e-9:
        return
    cells = [(row, text) for row, text in enumerate(column.to_pylist()) if text in others][
        :NAMED_CELLS
    ]
    named = ", ".join(f"{text[:40]!r} in row {row}" for row, text in cells)
    missing = json.dumps(
        list(dict.fromkeys(text.strip()[:40] for _, text in cells)), ensure_ascii=False
    )
    expected = (
        f"numbers, as {present - bad} of its {present} values are (data.missing_values = "
        f"{missing} reads such cells "
        "as missing; `categorical` in data.columns makes every value a category)"
    )
    raise InvalidInput(
        f"column {name}",
        expected,
        named + (f" and {bad - len(cells)} more" if bad > len(cells) else ""),
    )


def _is_float(text: str) -> bool:
    """Whether a text is a number; infinities are, and are refused as such."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def _is_number(value: object) -> bool:
    """Whether a value of a column of text or booleans is missing, or a number."""
    try:
        return value is None or (isinstance(value, str) and np.isfinite(float(value)))
    except ValueError:
        return False
