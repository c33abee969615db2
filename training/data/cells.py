"""Read CSV and Parquet files as Arrow tables with typed columns, and their cells as numbers or
categories.

A text column is numeric if every value is a number. If only most values are, the column is refused
and the error lists the others, because a person must decide what they mean. A column holds times if
every value is a time in one format. If two formats fit, as for 03/04/2024, `data.date_format` must
name one.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

from model_store.artifacts.manifest import CategoricalColumn, Decimal, NumberWriting, Thousands
from model_store.errors import InvalidInput
from model_store.sources.cells import (
    BOOLEANS,
    COMMA_NUMBER,
    ISO,
    MISSING,
    POINT_NUMBER,
    THOUSANDS,
    TIME_EXAMPLE,
    is_number,
    number_of,
    seconds_as_written,
    seconds_of,
    sign_of,
)
from model_store.sources.columns import Categories, Columns, Numbers, category_text
from model_store.sources.csv import CsvTable
from model_store.sources.parquet import read_table
from training import log

if TYPE_CHECKING:
    from training.recipe import DataSection

MIN_NUMBER_SHARE = 0.9  # of a column, from which other values count as mistakes
SHOWN_CELLS = 3  # in an error
CHUNK_ROWS = 1 << 14  # of a CSV file, converted at a time
SAMPLE_ROWS = 10_000  # that decide the decimal mark
# Names of pandas' unnamed index: in CSV, in CSV that was read and written again, in Parquet.
INDEX_NAMES = re.compile(r"|Unnamed: 0|__index_level_0__")
WRITTEN = b"written"  # metadata key of a number format
CLOCK = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2})?)?"
DATES = {  # patterns of text, and the formats that may read it
    re.compile(r"\d{4}/\d{1,2}/\d{1,2}" + CLOCK, re.ASCII): ("%Y/%m/%d",),
    re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}" + CLOCK, re.ASCII): ("%d.%m.%Y",),
    re.compile(r"\d{1,2}/\d{1,2}/\d{4}" + CLOCK, re.ASCII): ("%d/%m/%Y", "%m/%d/%Y"),
    re.compile(r"\d{1,2}-\d{1,2}-\d{4}" + CLOCK, re.ASCII): ("%d-%m-%Y", "%m-%d-%Y"),
}
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}", re.ASCII)  # the point may group thousands
SMALL_WHOLE = re.compile(r"[+-]?\d{1,3}", re.ASCII)
MIN_GROUPED = 5  # different numbers, more than an accident
SHOWN = 40  # characters of a cell
NUMERIC = (types.is_integer, types.is_floating, types.is_decimal, types.is_null)

Column = Any  # an array of pyarrow, whole or in chunks


@dataclass(frozen=True)
class NumberFormat:
    decimal: str = "."
    thousands: str | None = None
    is_known: bool = False  # configured, or implied by other numbers
    is_ambiguous: bool = False  # every point may also group thousands, as in 2.471

    @property
    def is_plain(self) -> bool:
        return self.decimal == "." and self.thousands is None

    def plain(self, text: str) -> str | None:
        """Return a number's text with a point and without groups; None for other text."""
        text = text.strip()
        if self.thousands is not None and re.search(r"\d", text):
            head, mark, tail = text.partition(self.decimal)
            if self.thousands in head:
                groups = rf"[+-]?\d{{1,3}}(?:{re.escape(self.thousands)}\d{{3}})+"
                if not re.fullmatch(groups, head, re.ASCII):
                    return None  # such as 1,23
                text = head.replace(self.thousands, "") + mark + tail
        if self.decimal != ".":
            if "." in text:
                return None
            text = text.replace(self.decimal, ".")
        return text if is_number(text) else None


PLAIN = NumberFormat()


def csv_table(
    path: Path, task: str | None, section: "DataSection", columns: Columns = ()
) -> pa.Table:
    """Read a CSV file with typed columns; without a task the target is an ordinary column."""
    table = _read_text(path, section)
    kinds: dict[str, str] = {**section.columns}
    as_written = {name for name in (section.id, section.text) if name is not None}
    kinds |= dict.fromkeys(as_written, "categorical")
    if section.target is not None and task is not None:
        kinds[section.target] = "numeric" if task == "regression" else "categorical"
    table = _trim(table, as_written)
    table, _ = _without(table, section.missing_values)
    table = _empty_without(table, section.target)
    known = [column for column in columns if isinstance(column, CategoricalColumn)]
    booleans = {column.name for column in known if set(column.categories) <= BOOLEANS}
    written = _number_format(table, section)
    return _infer_types(table, set(table.column_names), kinds, booleans, written)


def parquet_table(path: Path, task: str | None, section: "DataSection") -> pa.Table:
    table, changed = _without(read_table(path, "data.source"), section.missing_values)
    table = _empty_without(table, section.target)
    names = changed | {name for name, kind in section.columns.items() if kind == "numeric"}
    if section.target is not None:
        names = names | {section.target} if task == "regression" else names - {section.target}
    return _infer_types(table, names, {**section.columns}, set(), PLAIN)


def index_column(names: list[str], wanted: set[str]) -> str | None:
    """Return the name of pandas' unnamed index (a first or last column), unless it is wanted."""
    for name in (names[0], names[-1]) if names else ():
        if INDEX_NAMES.fullmatch(name) and name not in wanted and (name or names[0] == name):
            return name
    return None


def as_text(column: Column) -> Column | None:
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column if types.is_string(column.type) or types.is_large_string(column.type) else None


def stored_writing(table: pa.Table, name: str) -> NumberWriting | None:
    metadata = table.schema.field(name).metadata or {}
    return NumberWriting.model_validate_json(metadata[WRITTEN]) if WRITTEN in metadata else None


def with_times(
    table: pa.Table, names: set[str], kinds: Mapping[str, str], date_format: str | None
) -> tuple[pa.Table, dict[str, str | None]]:
    """Convert dates and times to seconds; return the table and each such column's date format.

    The format is None if requests must use ISO 8601. A text column is converted if every value is a
    date or time; kind `time` refuses other values.
    """
    formats: dict[str, str | None] = {}
    for i, name in enumerate(table.column_names):
        column, kind = table.column(i), kinds.get(name)
        if name not in names or kind not in (None, "time"):
            continue
        form = None
        if types.is_date(column.type) or types.is_timestamp(column.type):
            micros = pa.timestamp("us", getattr(column.type, "tz", None))
            numbers = compute.cast(compute.cast(column, micros, safe=False), pa.int64())
            seconds = compute.divide(compute.cast(numbers, pa.float64()), 1e6)
        elif (text := as_text(column)) is not None:
            cells = compute.utf8_trim_whitespace(text).to_pylist()
            times = _times(cells, name, date_format, kind == "time")
            if times is None:
                continue
            seconds, form = pa.array(times[0], from_pandas=True), times[1]
        elif kind == "time":
            raise InvalidInput(f"column {name}", "dates or times", f"type {column.type}"[:80])
        else:
            continue
        formats[name] = form
        table = table.set_column(i, name, seconds)
    return table, formats


def values_of(column: Column, name: str, kind: str | None) -> Numbers | Categories:
    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    of, text = column.type, as_text(column)
    if not (is_numeric(of) or types.is_boolean(of) or text is not None):
        expected = "numbers, booleans, strings or dates (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, f"type {of}"[:80])
    if is_numeric(of) and kind != "categorical":
        numbers = floats_of(column)
        if np.isinf(numbers).any():
            row = int(np.argmax(np.isinf(numbers)))
            raise InvalidInput(f"column {name}", "finite numbers", f"infinity in row {row}")
        return numbers
    cells = column.to_pylist()
    if kind == "numeric":
        _refuse_others(cells, name, _is_finite)
        return np.array([np.nan if cell is None else float(cell) for cell in cells])
    if kind is None and text is not None:
        refuse_mostly_numbers(cells, name, is_number)
    return [None if cell is None or cell != cell else category_text(cell) for cell in cells]


def is_numeric(of: pa.DataType) -> bool:
    return any(is_kind(of) for is_kind in NUMERIC)


def floats_of(column: Column) -> Numbers:
    numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(numbers, dtype=np.float64)


def infer_writing(
    texts: Collection[str], decimal: str | None, thousands: str | None
) -> NumberWriting | None:
    """Return the number format of texts; None if they are no numbers or the format is ambiguous.

    All must have the same sign of money or percent, or none. All formats that fit must give the
    same numbers: 1,234 alone may be 1234 or 1.234. A known `decimal` or `thousands` rules formats
    out.
    """
    signs = {sign_of(text) for text in texts}
    if len(signs) != 1 or (sign := signs.pop()) is None:
        return None
    matches: dict[tuple[float, ...], NumberWriting] = {}
    for point in get_args(Decimal):
        for mark in (None, *get_args(Thousands)):
            is_told = decimal in (None, point) and (thousands is None or thousands == mark)
            if mark == point or not is_told:
                continue
            writing = NumberWriting(sign=sign, decimal=point, thousands=mark)  # type: ignore[arg-type]
            try:
                numbers = tuple(number_of(text, writing) for text in texts)
            except ValueError:
                continue
            matches.setdefault(numbers, writing)
    return next(iter(matches.values())) if len(matches) == 1 else None


def _read_text(path: Path, section: "DataSection") -> pa.Table:
    try:
        file = CsvTable(csv_source(path), "data.source", section.encoding, section.delimiter)
        names, parts = file.names, list(_chunks(file))
    except (OSError, EOFError, zlib.error) as error:
        expected = f"a readable CSV file, {str(path)!r}"
        got = getattr(error, "strerror", None) or str(error) or "an error"
        raise InvalidInput("data.source", expected, got) from None
    if not names or (section.target not in names and all(map(is_number, names))):
        expected = f"a first line of {path.name} that names the columns"
        raise InvalidInput("data.source", expected, "numbers alone" if names else "none")
    if section.encoding is None and file.encoding != "utf-8-sig":
        said = "%s is read as %s, since it is not UTF-8 (data.encoding says otherwise)"
        log.info(said, path.name, file.encoding)
    if section.delimiter is None and file.delimiter != ",":
        log.info("cells are separated by %r (data.delimiter says otherwise)", file.delimiter)
    by_column = ([part[i] for part in parts] for i in range(len(names)))
    columns = [pa.chunked_array(cells, pa.string()) for cells in by_column]
    return pa.Table.from_arrays(columns, names=names)


def csv_source(path: Path) -> Path | bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path


def _chunks(file: CsvTable) -> Iterator[list[pa.Array]]:
    rows = file.rows()
    while part := list(islice(rows, CHUNK_ROWS)):
        yield [pa.array(cells, pa.string()) for cells in zip(*part, strict=True)]


def _trim(table: pa.Table, as_written: set[str]) -> pa.Table:
    """Strip blanks around cells, except in `as_written`, and clear missing values."""
    for i, name in enumerate(table.column_names):
        column = table.column(i)
        if name not in as_written:
            column = compute.utf8_trim_whitespace(column)
        table = table.set_column(i, name, _null_where(column, column, MISSING))
    return table


def _without(table: pa.Table, values: Collection[str]) -> tuple[pa.Table, set[str]]:
    """Clear text cells that equal one of `values`; return the table and the changed columns."""
    changed = set()
    for i, name in enumerate(table.column_names if values else ()):
        column = as_text(table.column(i))
        if column is None:
            continue
        cleared = _null_where(column, compute.utf8_trim_whitespace(column), values)
        if cleared.null_count > column.null_count:
            changed.add(name)
            table = table.set_column(i, name, cleared)
    return table, changed


def _empty_without(table: pa.Table, target: str | None) -> pa.Table:
    """Clear rows without a target, so that they do not decide column types."""
    if table.column_names.count(target) != 1:
        return table
    is_dropped = compute.is_null(table.column(target), nan_is_null=True).to_numpy()
    if not is_dropped.any():
        return table
    return table.take(pa.array(np.arange(table.num_rows), mask=is_dropped))


def _null_where(column: Column, looked_at: Column, values: Collection[str]) -> Column:
    is_one = compute.is_in(looked_at, pa.array(values, column.type))
    return compute.if_else(is_one, pa.scalar(None, column.type), column)


def _number_format(table: pa.Table, section: "DataSection") -> NumberFormat:
    """Return the configured number format, or decimal commas if no number has a point."""
    if section.decimal is not None:
        return NumberFormat(section.decimal, section.thousands, is_known=True)
    distinct = (column[:SAMPLE_ROWS].unique().to_pylist() for column in table.columns)
    texts = [text.strip() for values in distinct for text in values if text is not None]
    points = list(filter(POINT_NUMBER.fullmatch, texts))
    commas = list(filter(COMMA_NUMBER.fullmatch, texts))
    may_be_grouped = all(map(GROUPED.fullmatch, points))
    has_decimal_commas = not all(map(THOUSANDS.fullmatch, commas))
    is_comma_free = not any("," in name for name in table.column_names)
    if is_comma_free and commas and (not points or (may_be_grouped and has_decimal_commas)):
        between = " and points between thousands" if points else ""
        said = 'numbers are read with decimal commas%s (data.decimal = "." says otherwise)'
        log.info(said, between)
        thousands = section.thousands or ("." if points else None)
        return NumberFormat(",", thousands, is_known=True)
    is_ambiguous = may_be_grouped and section.thousands is None
    return NumberFormat(".", section.thousands, bool(points), is_ambiguous)


def _infer_types(
    table: pa.Table,
    names: set[str],
    kinds: Mapping[str, str],
    booleans: set[str],
    written: NumberFormat,
) -> pa.Table:
    """Convert text columns of numbers or booleans, except those with a configured kind.

    Columns known as `booleans` only get lower-case text.
    """
    for i, name in enumerate(table.column_names):
        text, kind = as_text(table.column(i)), kinds.get(name)
        if name not in names or text is None:
            continue
        column = compute.utf8_trim_whitespace(text)
        if name in booleans:
            table = table.set_column(i, name, compute.utf8_lower(column))
        elif kind not in ("categorical", "time"):
            field, cells = _infer_type(name, column, kind, written)
            table = table if cells is column else table.set_column(i, field, cells)
    return table


def _infer_type(
    name: str, column: Column, kind: str | None, written: NumberFormat
) -> tuple[str | pa.Field, Column]:
    texts = [text for text in column.unique().to_pylist() if text is not None]
    if texts and all(text.lower() in BOOLEANS for text in texts):
        return name, compute.utf8_lower(column).cast(pa.bool_())
    read = ((text, written.plain(text)) for text in texts)
    plain = {text: number for text, number in read if number is not None}
    is_grouped = written.thousands is not None and any(written.thousands in t for t in texts)
    if len(plain) == len(texts) and not is_grouped:
        if written.is_ambiguous and kind != "ignored":
            _refuse_ambiguous(name, texts)
        return name, _floats(column, plain, written)
    if kind == "ignored":
        return name, column
    decimal = written.decimal if written.is_known else None
    writing = infer_writing(texts, decimal, written.thousands)
    if writing is not None:
        numbers = {text: number_of(text, writing) for text in texts}
        first = next(text for text in column.to_pylist() if text is not None)
        said = "column %s: %r is read as %g, and the others alike"
        otherwise = " (`categorical` in data.columns keeps text)"
        log.info(said + otherwise, name, first[:SHOWN], numbers[first])
        field = pa.field(name, pa.float64(), metadata={WRITTEN: writing.model_dump_json()})
        return field, _map_cells(column, numbers, pa.float64())
    if len(plain) == len(texts):
        return name, _floats(column, plain, written)
    if not written.is_plain:
        refuse = refuse_mostly_numbers if kind is None else _refuse_others
        refuse(column.to_pylist(), name, plain.__contains__)
    return name, column


def _refuse_ambiguous(name: str, texts: Sequence[str]) -> None:
    """Refuse a column whose points may group thousands: its whole numbers have up to three
    digits."""
    grouped = [text for text in texts if GROUPED.fullmatch(text)]
    others = [text for text in texts if not GROUPED.fullmatch(text)]
    if len(grouped) >= MIN_GROUPED and others and all(map(SMALL_WHOLE.fullmatch, others)):
        expected = (
            'numbers that can be read in one way (data.decimal = "," and data.thousands = ".", or '
            f"--decimal , --thousands . reads {grouped[0]} as {grouped[0].replace('.', '')}; "
            'data.decimal = "." or --decimal . as it is)'
        )
        raise InvalidInput(f"column {name}", expected, f"{grouped[0]!r} and {others[0]!r}")


def _floats(column: Column, plain: Mapping[str, str], written: NumberFormat) -> Column:
    try:
        if written.is_plain:
            return column.cast(pa.float64())
    except pa.ArrowInvalid:  # such as +1, which is none to Arrow
        pass
    return _map_cells(column, {text: float(number) for text, number in plain.items()}, pa.float64())


def _map_cells(column: Column, values: Mapping[str, object], of: pa.DataType) -> Column:
    cells = column.to_pylist()
    return pa.array([None if text is None else values[text] for text in cells], of)


def _times(
    values: Sequence[str | None], name: str, date_format: str | None, is_wanted: bool
) -> tuple[Numbers, str | None] | None:
    """Return a column's times (NaN if missing) and its date format (None for ISO 8601, or if
    several fit); None if some value is no time."""
    distinct = {value for value in values if value is not None}
    forms = _date_forms(min(distinct, default=""), date_format)
    tables = {form: _all_seconds(form, distinct) for form in forms}
    read = {form: table for form, table in tables.items() if table}
    if not read:
        if is_wanted:
            row, bad = _first_bad(values, date_format)
            written = f" ({date_format!r})" if date_format else ""
            expected = f"dates or times, such as {TIME_EXAMPLE}{written}"
            raise InvalidInput(f"column {name}", expected, f"{bad[:SHOWN]!r} in row {row}")
        return None
    first, *others = read.values()
    if any(other != first for other in others):
        two = next(v for v in values if v and len({table[v] for table in read.values()}) > 1)
        expected = (
            'dates that can be read in one way (data.date_format = "%d/%m/%Y" or --date-format '
            'says that the day is first, "%m/%d/%Y" the month; `ignored` in data.columns or '
            "--ignore leaves the column out)"
        )
        raise InvalidInput(f"column {name}", expected, repr(two[:SHOWN]))
    seconds = [np.nan if value is None else first[value] for value in values]
    return np.array(seconds, dtype=np.float64), next(iter(read)) if len(read) == 1 else None


def _date_forms(example: str, date_format: str | None) -> tuple[str | None, ...]:
    if ISO.fullmatch(example):
        return (None,)
    if date_format is not None:
        return (date_format,)
    return next((formats for looks, formats in DATES.items() if looks.fullmatch(example)), ())


def _all_seconds(form: str | None, texts: Collection[str]) -> dict[str, float] | None:
    read = seconds_of if form is None else partial(seconds_as_written, form)
    try:
        return {text: read(text) for text in texts}
    except (ValueError, OverflowError):
        return None


def _first_bad(values: Sequence[str | None], date_format: str | None) -> tuple[int, str]:
    known = [date_format] if date_format else [form for some in DATES.values() for form in some]
    present = [(row, value) for row, value in enumerate(values) if value is not None]
    for row, value in present:
        if all(_all_seconds(form, [value]) is None for form in (None, *known)):
            return row, value
    return 0, present[0][1] if present else ""


def _refuse_others(
    cells: Sequence[str | None], name: str, is_number: Callable[[str], bool]
) -> None:
    for row, cell in enumerate(cells):
        if cell is not None and not is_number(cell):
            raise InvalidInput(f"column {name}", "numbers", f"{str(cell)[:SHOWN]!r} in row {row}")


def refuse_mostly_numbers(
    texts: Sequence[str | None],
    name: str,
    is_number: Callable[[str], bool],
    rows: Iterable[int] | None = None,
) -> None:
    """Refuse a column of numbers with a few other texts; `rows` are its row numbers."""
    present = sum(text is not None for text in texts)
    numbered = zip(count() if rows is None else rows, texts, strict=False)
    cells = [(row, text) for row, text in numbered if text is not None and not is_number(text)]
    if not 0 < len(cells) <= (1.0 - MIN_NUMBER_SHARE) * present + 1e-9:
        return
    named = ", ".join(f"{text[:SHOWN]!r} in row {row}" for row, text in cells[:SHOWN_CELLS])
    if len(cells) > SHOWN_CELLS:
        named += f" and {len(cells) - SHOWN_CELLS} more"
    examples = list(dict.fromkeys(text.strip()[:SHOWN] for _, text in cells[:SHOWN_CELLS]))
    missing = json.dumps(examples, ensure_ascii=False)
    expected = (
        f"numbers, as {present - len(cells)} of its {present} values are (data.missing_values = "
        f"{missing} or --missing-value reads such cells as missing; `categorical` in data.columns "
        "makes every value a category)"
    )
    raise InvalidInput(f"column {name}", expected, named)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(np.isfinite(float(value)))
    except ValueError:
        return False
