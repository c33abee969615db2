"""Readers of CSV and Parquet files, which return Arrow tables with typed columns.

A text column is numeric if every value is a number. If most but not all values are numbers, an
error lists the others. A column contains times if every value is a time in one format. If two
formats match, as for 03/04/2024, `data.date_format` must select one.
"""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args
from zipfile import is_zipfile

import numpy as np
import pyarrow as pa
from pyarrow import compute

from model_store.artifacts.manifest import Decimal, NumberStyle, Thousands
from model_store.errors import InvalidInput
from model_store.sources.arrow import (
    EXACT_INTEGERS,
    Column,
    as_text,
    column_type,
    name_categories,
    read_categories,
    read_numbers,
    read_times,
)
from model_store.sources.cells import (
    CLOCK,
    COMMA_NUMBER,
    ISO,
    POINT_NUMBER,
    THOUSANDS,
    TIME_EXAMPLE,
    WHOLE,
    Categories,
    Numbers,
    category_text,
    find_sign,
    is_number,
    missing_texts,
    parse_number,
    parse_plain,
    parse_time,
)
from model_store.sources.csv import CsvTable
from model_store.sources.parquet import read_table
from training import log

if TYPE_CHECKING:
    from training.recipe import DataSection

MIN_NUMBER_SHARE = 0.9  # with more numbers, other values count as mistakes
MAX_SHOWN_CELLS = 3  # per error
CHUNK_ROWS = 1 << 14  # converted at once
SAMPLE_ROWS = 10_000  # for the decimal mark
# Names of pandas' unnamed index in CSV, in re-exported CSV, and in Parquet.
INDEX_NAMES = re.compile(r"|Unnamed: 0|__index_level_0__")
PARQUET_START, GZIP_START = b"PAR1", b"\x1f\x8b"
WRITTEN = b"written"  # metadata key of a number format
TIME_OF_DAY = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2})?)?"
DATES = {  # date formats by pattern
    re.compile(r"\d{4}/\d{1,2}/\d{1,2}" + TIME_OF_DAY, re.ASCII): ("%Y/%m/%d",),
    re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}" + TIME_OF_DAY, re.ASCII): ("%d.%m.%Y",),
    re.compile(r"\d{1,2}/\d{1,2}/\d{4}" + TIME_OF_DAY, re.ASCII): ("%d/%m/%Y", "%m/%d/%Y"),
    re.compile(r"\d{1,2}-\d{1,2}-\d{4}" + TIME_OF_DAY, re.ASCII): ("%d-%m-%Y", "%m-%d-%Y"),
}
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}\.\d{3}", re.ASCII)  # the point may group thousands
SMALL_WHOLE = re.compile(r"[+-]?\d{1,3}", re.ASCII)
CODE = re.compile(r"0\d+", re.ASCII)  # such as a postal code
MIN_GROUPED = 5  # fewer grouped numbers may be accidental
HAS_OFFSET = re.compile(r":\d{2}.*(?:Z|[+-]\d{2}:?\d{2})$")
MAX_SHOWN = 40  # characters per cell
ISO_FORMAT = ""  # instead of a `strptime` format


@dataclass(frozen=True)
class NumberFormat:
    decimal: Decimal = "."
    thousands: Thousands | None = None
    is_known: bool = False  # configured, or implied by other numbers
    is_ambiguous: bool = False  # every point may group thousands, as in 2.471

    @property
    def is_plain(self) -> bool:
        return self.decimal == "." and self.thousands is None

    def parse(self, texts: Sequence[str]) -> dict[str, float]:
        """Convert numeric text to numbers, such as "1.234,5" to 1234.5."""
        if self.is_plain:
            with suppress(pa.ArrowInvalid):  # Arrow refuses some numbers, such as +1.
                floats = pa.array(texts, pa.string()).cast(pa.float64())
                return dict(zip(texts, floats.to_numpy().tolist(), strict=True))
        style = NumberStyle(decimal=self.decimal, thousands=self.thousands)
        numbers = {}
        for text in texts:
            with suppress(ValueError):
                numbers[text] = parse_plain(text) if self.is_plain else parse_number(text, style)
        return numbers


PLAIN = NumberFormat()


def csv_table(path: Path, task: str | None, section: "DataSection") -> pa.Table:
    """Read a CSV file with typed columns.

    Without a task, the target is an ordinary column.
    """
    table, delimiter = _read_text(path, section)
    kinds: dict[str, str] = {**section.columns}
    text_names = {name for name in (section.id, section.text) if name is not None}
    kinds |= dict.fromkeys(text_names, "categorical")
    if section.target is not None and task is not None:
        kinds[section.target] = "numeric" if task == "regression" else "categorical"
    table = _trim(table, text_names, missing_texts(section.missing_values))
    table = _drop_rows_without_target(table, section.target)
    number_format = _infer_number_format(table, section, delimiter)
    return _infer_types(table, set(table.column_names), kinds, number_format)


def parquet_table(path: Path, task: str | None, section: "DataSection") -> pa.Table:
    table = _declare_categories(read_table(path, "data.source"))
    table, changed = _clear_values(table, section.missing_values)
    table = _drop_rows_without_target(table, section.target)
    names = changed | {name for name, kind in section.columns.items() if kind == "numeric"}
    if section.target is not None:
        names = names | {section.target} if task == "regression" else names - {section.target}
    return _infer_types(table, names, {**section.columns}, PLAIN)


def _declare_categories(table: pa.Table) -> pa.Table:
    """Restore the categories of pandas, which Parquet stores as plain numbers."""
    columns = (table.schema.pandas_metadata or {}).get("columns", ())
    declared = {
        column["field_name"] for column in columns if column["pandas_type"] == "categorical"
    }
    for i, name in enumerate(table.column_names):
        if name in declared and column_type(table.column(i)) in ("numbers", "integers"):
            categories = table.column(i).dictionary_encode()
            table = table.set_column(i, name, name_categories(categories))
    return table


def find_index_column(names: list[str], used_names: set[str]) -> str | None:
    """Find an unnamed pandas index (first or last column) that the recipe does not use."""
    for name in (names[0], names[-1]) if names else ():
        if INDEX_NAMES.fullmatch(name) and name not in used_names and (name or names[0] == name):
            return name
    return None


def stored_style(table: pa.Table, name: str) -> NumberStyle | None:
    metadata = table.schema.field(name).metadata or {}
    return NumberStyle.model_validate_json(metadata[WRITTEN]) if WRITTEN in metadata else None


def read_column(
    column: Column, name: str, kind: str | None = None, date_format: str | None = None
) -> tuple[Numbers | Categories, str | None]:
    """Read a column as numbers, times or categories.

    Without a kind, text becomes times if every value is a time, and categories otherwise. Integers
    that float64 cannot represent become categories.

    Returns:
        The values and their date format: "" for ISO 8601, and None if they are not times.

    Raises:
        InvalidInput: if a value does not have the kind, or the type is not supported.
    """
    column_kind, text = column_type(column), as_text(column)
    if kind == "text" and text is not None:
        return text.to_pylist(), None
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
        return numbers, None
    if kind == "numeric":
        cells = column.to_pylist()
        _check_numbers(cells, name, _is_finite)
        return np.array([np.nan if cell is None else float(cell) for cell in cells]), None
    if kind is None and text is not None:
        check_mixed(text.to_pylist(), name)
    return _merge_equal(name, column), None


def find_times(
    column: Column, name: str, date_format: str | None, is_required: bool = False
) -> tuple[Numbers, str] | None:
    """Parse times and detect their date format, or return None if the column has no times.

    With a date format, whole numbers such as 20240531 can be times.
    """
    kind, text = column_type(column), as_text(column)
    if kind == "times":
        try:
            return read_times(column), ISO_FORMAT
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
    """Read categories, and warn about texts that are equal, such as 1 and 1.0."""
    text = as_text(column)
    texts = [] if text is None else text.drop_null().unique().to_pylist()
    categories = list(map(category_text, texts))
    repeated = [c for c, count in Counter(categories).items() if count > 1]
    if repeated:
        equal = [repr(t) for t, c in zip(texts, categories, strict=True) if c == repeated[0]]
        message = "column %s: %s are one category"
        log.warning(message, name, " and ".join(equal[:MAX_SHOWN_CELLS]))
    return read_categories(column)


def infer_number_style(
    texts: Collection[str], decimal: str | None, thousands: str | None
) -> NumberStyle | None:
    """Infer the number format of texts, or return None if they are not consistently numbers.

    Texts can have one currency sign, or percent signs if the other numbers are shares. All matching
    formats must yield the same numbers: 1,234 alone may be 1234 or 1.234. A configured `decimal` or
    `thousands` excludes other formats.
    """
    if texts and all(map(CLOCK.fullmatch, texts)):
        return NumberStyle(sign=":")
    signs = {find_sign(text) for text in texts}
    if not signs or None in signs or len(signs - {""}) > 1:
        return None
    sign, is_share = "".join(filter(None, signs)), signs == {"", "%"}
    matches: dict[tuple[float, ...], NumberStyle] = {}
    for point in get_args(Decimal):
        for mark in (None, *get_args(Thousands)):
            fits_config = decimal in (None, point) and (thousands is None or thousands == mark)
            if mark == point or not fits_config:
                continue
            style = NumberStyle(sign=sign, decimal=point, thousands=mark, is_share=is_share)  # type: ignore[arg-type]
            try:
                numbers = tuple(parse_number(text, style) for text in texts)
            except ValueError:
                continue
            plain = (n for n, text in zip(numbers, texts, strict=True) if "%" not in text)
            if is_share and max(map(abs, plain)) > 1:
                continue
            matches.setdefault(numbers, style)
    return next(iter(matches.values())) if len(matches) == 1 else None


def _read_text(path: Path, section: "DataSection") -> tuple[pa.Table, str]:
    """Read cells as text, and return the delimiter too."""
    try:
        file = CsvTable(csv_source(path), "data.source", section.encoding, section.delimiter)
        names, parts = file.names, list(_chunks(file))
    except (OSError, EOFError, zlib.error) as error:
        expected = f"a readable CSV file, {str(path)!r}"
        received = getattr(error, "strerror", None) or str(error) or "an error"
        raise InvalidInput("data.source", expected, received) from None
    if not names or (section.target not in names and all(map(is_number, names))):
        expected = f"a first line of {path.name} that names the columns"
        raise InvalidInput("data.source", expected, "only numbers" if names else "an empty file")
    if section.encoding is None and file.encoding != "utf-8-sig":
        message = "reading %s as %s because it is not UTF-8 (set data.encoding to change this)"
        log.info(message, path.name, file.encoding)
    if section.delimiter is None and file.delimiter != ",":
        message = "reading cells separated by %r (set data.delimiter to change this)"
        log.info(message, file.delimiter)
    by_column = ([part[i] for part in parts] for i in range(len(names)))
    columns = [pa.chunked_array(cells, pa.string()) for cells in by_column]
    return pa.Table.from_arrays(columns, names=names), file.delimiter


def csv_source(path: Path) -> Path | bytes:
    """Return a CSV file, or its content if it is compressed.

    Raises:
        InvalidInput: for a zip archive or a Parquet file.
    """
    if is_zipfile(path):
        raise InvalidInput("data.source", "a CSV file (unpack the archive)", "a zip archive")
    with path.open("rb") as file:
        start = file.read(4)
    if start == PARQUET_START:
        raise InvalidInput("data.source", f"a CSV file (parquet:{path.name})", "a Parquet file")
    return gzip.decompress(path.read_bytes()) if start[:2] == GZIP_START else path


def _chunks(file: CsvTable) -> Iterator[list[pa.Array]]:
    rows = file.rows()
    while part := list(islice(rows, CHUNK_ROWS)):
        yield [pa.array(cells, pa.string()) for cells in zip(*part, strict=True)]


def _trim(table: pa.Table, text_names: set[str], missing: Collection[str]) -> pa.Table:
    """Strip spaces from cells, except in `text_names`, and clear missing values."""
    for i, name in enumerate(table.column_names):
        trimmed = compute.utf8_trim_whitespace(table.column(i))
        column = table.column(i) if name in text_names else trimmed
        table = table.set_column(i, name, _null_where(column, trimmed, missing))
    return table


def _clear_values(table: pa.Table, values: Collection[str]) -> tuple[pa.Table, set[str]]:
    """Clear text cells equal to a value, and return the table and the changed columns."""
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


def _drop_rows_without_target(table: pa.Table, target: str | None) -> pa.Table:
    """Drop rows without a target, so that they do not affect column types."""
    if table.column_names.count(target) != 1:
        return table
    is_dropped = compute.is_null(table.column(target), nan_is_null=True).to_numpy()
    if not is_dropped.any():
        return table
    return table.take(pa.array(np.arange(table.num_rows), mask=is_dropped))


def _null_where(column: Column, trimmed: Column, values: Collection[str]) -> Column:
    is_match = compute.is_in(trimmed, pa.array(list(values), column.type))
    return compute.if_else(is_match, pa.scalar(None, column.type), column)


def _infer_number_format(table: pa.Table, section: "DataSection", delimiter: str) -> NumberFormat:
    """Use the configured number format, or decimal commas if no number has a decimal point.

    If commas separate cells, all numbers such as 1,234 have thousands separators.
    """
    if section.decimal is not None:
        return NumberFormat(section.decimal, section.thousands, is_known=True)
    distinct = (column[:SAMPLE_ROWS].unique().to_pylist() for column in table.columns)
    texts = [text.strip() for values in distinct for text in values if text is not None]
    points = list(filter(POINT_NUMBER.fullmatch, texts))
    commas = list(filter(COMMA_NUMBER.fullmatch, texts))
    may_be_grouped = all(map(GROUPED.fullmatch, points))
    has_decimal_commas = not all(map(THOUSANDS.fullmatch, commas))
    is_comma_free = not any("," in name for name in table.column_names)
    is_grouped = delimiter == "," and bool(commas) and not has_decimal_commas
    has_no_points = not points or (may_be_grouped and has_decimal_commas)
    if is_comma_free and commas and has_no_points and not is_grouped:
        grouping = " and points between thousands" if points else ""
        message = 'reading numbers with decimal commas%s (set data.decimal = "." to change this)'
        log.info(message, grouping)
        thousands = section.thousands or ("." if points else None)
        return NumberFormat(",", thousands, is_known=True)
    is_ambiguous = may_be_grouped and section.thousands is None
    return NumberFormat(".", section.thousands, bool(points) or is_grouped, is_ambiguous)


def _infer_types(
    table: pa.Table,
    names: set[str],
    kinds: Mapping[str, str],
    number_format: NumberFormat,
) -> pa.Table:
    """Convert text columns to numbers, unless their kind is configured."""
    for i, name in enumerate(table.column_names):
        text, kind = as_text(table.column(i)), kinds.get(name)
        if name in names and text is not None and kind not in ("categorical", "time"):
            column = compute.utf8_trim_whitespace(text)
            field, cells = _infer_type(name, column, kind, number_format)
            table = table if cells is column else table.set_column(i, field, cells)
    return table


def _infer_type(
    name: str, column: Column, kind: str | None, number_format: NumberFormat
) -> tuple[str | pa.Field, Column]:
    texts = [text for text in column.unique().to_pylist() if text is not None]
    plain = number_format.parse(texts)
    thousands = number_format.thousands
    is_grouped = thousands is not None and any(thousands in text for text in texts)
    if len(plain) == len(texts) and not is_grouped:
        if number_format.is_ambiguous and kind != "ignored":
            _check_grouping(name, texts)
        code = next(filter(CODE.fullmatch, texts), None)
        if code is not None and kind is None:
            message = "column %s: reading %r as %d (set --column %s=categorical if it is a code)"
            log.info(message, name, code, int(code), name)
        floats = _floats(column, plain)
        is_large = max(map(abs, plain.values()), default=0.0) > EXACT_INTEGERS
        is_exact = kind == "numeric" or not (is_large and all(map(WHOLE.fullmatch, texts)))
        return name, floats if is_exact else column
    if kind == "ignored":
        return name, column
    decimal = number_format.decimal if number_format.is_known else None
    style = infer_number_style(texts, decimal, thousands)
    if style is not None:
        numbers = {text: parse_number(text, style) for text in texts}
        first = next(text for text in column.to_pylist() if text is not None)
        message = "column %s: reading %r as %g (set `categorical` in data.columns to keep text)"
        log.info(message, name, first[:MAX_SHOWN], numbers[first])
        field = pa.field(name, pa.float64(), metadata={WRITTEN: style.model_dump_json()})
        return field, _map_cells(column, numbers)
    if len(plain) == len(texts):
        return name, _map_cells(column, plain)
    if not number_format.is_plain:
        if kind is None:
            check_mostly(column.to_pylist(), name, plain.__contains__, "numbers")
        else:
            _check_numbers(column.to_pylist(), name, plain.__contains__)
    return name, column


def _check_grouping(name: str, texts: Sequence[str]) -> None:
    """Raise InvalidInput if the points are probably thousands separators.

    In such a column the other numbers have up to three digits and no point.
    """
    grouped = [text for text in texts if GROUPED.fullmatch(text)]
    plain = [text for text in texts if not GROUPED.fullmatch(text)]
    if len(grouped) >= MIN_GROUPED and plain and all(map(SMALL_WHOLE.fullmatch, plain)):
        expected = (
            f"unambiguous numbers (to read {grouped[0]} as {grouped[0].replace('.', '')}, set "
            'data.decimal = "," and data.thousands = ".", or --decimal , --thousands .; for a '
            'decimal point, set data.decimal = "." or --decimal .)'
        )
        raise InvalidInput(f"column {name}", expected, f"{grouped[0]!r} and {plain[0]!r}")


def _floats(column: Column, numbers: Mapping[str, float]) -> Column:
    try:
        return column.cast(pa.float64())
    except pa.ArrowInvalid:  # Arrow refuses some numbers, such as +1 or 1,5.
        return _map_cells(column, numbers)


def _map_cells(column: Column, numbers: Mapping[str, float]) -> Column:
    encoded = column.combine_chunks().dictionary_encode()
    mapped = pa.array([numbers[text] for text in encoded.dictionary.to_pylist()], pa.float64())
    return mapped.take(encoded.indices)


def _times(
    values: Sequence[str | None], name: str, date_format: str | None, is_required: bool
) -> tuple[Numbers, str] | None:
    """Parse times and infer their date format, or return None if a value is not a time.

    Missing values become NaN. The format is "" for ISO 8601, or if several formats fit.
    """
    distinct = {value for value in values if value is not None}
    forms = _date_forms(min(distinct, default=""), date_format)
    tables = {form: _parse_seconds(form, distinct) for form in forms}
    parsed = {form: table for form, table in tables.items() if table}
    if not parsed:
        if is_required:
            row, value = _first_invalid_time(values, date_format)
            format_hint = f" ({date_format!r})" if date_format else ""
            expected = f"dates or times, such as {TIME_EXAMPLE}{format_hint}"
            raise InvalidInput(f"column {name}", expected, f"{value[:MAX_SHOWN]!r} in row {row}")
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
    return np.array(seconds, dtype=np.float64), date_form


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


def _first_invalid_time(values: Sequence[str | None], date_format: str | None) -> tuple[int, str]:
    formats = [date_format] if date_format else [f for forms in DATES.values() for f in forms]
    present = [(row, value) for row, value in enumerate(values) if value is not None]
    for row, value in present:
        if all(_parse_seconds(form, [value]) is None for form in (ISO_FORMAT, *formats)):
            return row, value
    return 0, present[0][1] if present else ""


def _check_numbers(
    cells: Sequence[str | None], name: str, is_number: Callable[[str], bool]
) -> None:
    for row, cell in enumerate(cells):
        if cell is not None and not is_number(cell):
            raise InvalidInput(
                f"column {name}", "numbers", f"{str(cell)[:MAX_SHOWN]!r} in row {row}"
            )


def check_mixed(texts: Sequence[str | None], name: str, rows: Iterable[int] | None = None) -> None:
    """Raise InvalidInput if a few values of a column are not numbers or times.

    `rows` are the row numbers in the file.
    """
    rows = range(len(texts)) if rows is None else list(rows)
    check_mostly(texts, name, is_number, "numbers", rows)
    check_mostly(texts, name, _is_iso_time, "dates or times", rows)


def _is_iso_time(text: str) -> bool:
    return ISO.fullmatch(text) is not None and _parse_seconds(ISO_FORMAT, [text]) is not None


def check_mostly(
    texts: Sequence[str | None],
    name: str,
    is_valid: Callable[[str], bool],
    kind: str,
    rows: Iterable[int] | None = None,
) -> None:
    """Raise InvalidInput if most but not all values of a column are valid."""
    present = sum(text is not None for text in texts)
    numbered = zip(count() if rows is None else rows, texts, strict=False)
    cells = [(row, text) for row, text in numbered if text is not None and not is_valid(text)]
    if not 0 < len(cells) <= (1.0 - MIN_NUMBER_SHARE) * present + 1e-9:
        return
    shown = cells[:MAX_SHOWN_CELLS]
    received = ", ".join(f"{text[:MAX_SHOWN]!r} in row {row}" for row, text in shown)
    if len(cells) > MAX_SHOWN_CELLS:
        received += f" and {len(cells) - MAX_SHOWN_CELLS} more"
    texts_to_clear = list(dict.fromkeys(text.strip()[:MAX_SHOWN] for _, text in shown))
    missing = json.dumps(texts_to_clear, ensure_ascii=False)
    expected = (
        f"{kind}, like {present - len(cells)} of its {present} values (set data.missing_values = "
        f"{missing} or --missing-value to read these cells as missing, or `categorical` in "
        "data.columns to make every value a category)"
    )
    raise InvalidInput(f"column {name}", expected, received)


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(np.isfinite(float(value)))
    except ValueError:
        return False
