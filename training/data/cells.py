"""Read CSV and Parquet files as Arrow tables with typed columns.

A text column is numeric if every value is a number. If most but not all values are numbers, an
error lists the others.
"""

import gzip
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args
from zipfile import is_zipfile

import numpy as np
import pyarrow as pa
from pyarrow import compute

from model_store.artifacts.manifest import Decimal, NumberStyle, NumericColumn, Thousands
from model_store.errors import InvalidInput
from model_store.sources.arrow import EXACT_INTEGERS, Column, as_text, column_type, name_categories
from model_store.sources.cells import (
    CLOCK,
    COMMA_NUMBER,
    PLAIN,
    POINT_NUMBER,
    THOUSANDS,
    WHOLE,
    find_sign,
    is_number,
    missing_texts,
    number_example,
    parse_number,
    parse_plain,
)
from model_store.sources.columns import Columns
from model_store.sources.csv import CsvTable
from model_store.sources.parquet import INDEX_NAMES, read_table
from training import log
from training.data.columns import MAX_SHOWN, WRITTEN, check_cells

if TYPE_CHECKING:
    from training.sections import DataSection

CHUNK_ROWS = 1 << 14  # converted at once
SAMPLE_ROWS = 10_000  # for the decimal mark
PARQUET_START, GZIP_START = b"PAR1", b"\x1f\x8b"
UNSUPPORTED = {  # kinds of files by their first bytes
    b"BZh": "a bzip2",
    b"\xfd7zX": "an xz",
    b"\x28\xb5\x2f\xfd": "a Zstandard",
    b"\xd0\xcf\x11\xe0": "an Excel",
}
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}[.,]\d{3}", re.ASCII)  # the mark may group thousands
SMALL_WHOLE = re.compile(r"[+-]?\d{1,3}", re.ASCII)
CODE = re.compile(r"0\d+|\d+E\d+", re.ASCII)  # such as a postal code, or 12E4
MIN_GROUPED = 5  # fewer grouped numbers may be accidental


@dataclass(frozen=True)
class NumberFormat:
    style: NumberStyle = PLAIN
    is_known: bool = False  # configured, or implied by other numbers
    is_ambiguous: bool = False  # every decimal mark may group thousands, as in 2.471

    def parse(self, texts: Sequence[str]) -> dict[str, float]:
        """Parse numeric texts, such as "1.234,5" as 1234.5, and skip all others."""
        is_plain = self.style == PLAIN
        if is_plain:
            with suppress(pa.ArrowInvalid):  # Arrow refuses some numbers, such as +1.
                floats = pa.array(texts, pa.string()).cast(pa.float64())
                return dict(zip(texts, floats.to_numpy().tolist(), strict=True))
        numbers = {}
        for text in texts:
            with suppress(ValueError):
                numbers[text] = parse_plain(text) if is_plain else parse_number(text, self.style)
        return numbers


class RawTable(NamedTuple):
    """The texts of a CSV file, or the content of a Parquet file."""

    cells: pa.Table
    delimiter: str | None = None  # of a CSV file


def read_raw(kind: str, path: Path, section: "DataSection") -> RawTable:
    """Read a CSV or Parquet file (`kind`)."""
    if kind == "csv":
        return _read_text(path, section)
    return RawTable(read_table(path, "data.source", path))


def typed_table(
    raw: RawTable, task: str | None, section: "DataSection", version_columns: Columns = ()
) -> pa.Table:
    """Infer the column types of a table. Without a task, the target is an ordinary column.

    A version's columns keep their number formats, unless the section has others.
    """
    styles: dict[str, NumberStyle | None] = {}
    if section.decimal is None and section.thousands is None:
        styles = {c.name: c.written for c in version_columns if isinstance(c, NumericColumn)}
    kinds: dict[str, str] = {**section.columns}
    if section.target is not None and task is not None:
        kinds[section.target] = "numeric" if task == "regression" else "categorical"
    if raw.delimiter is None:
        table, names = _clear_missing(_declare_categories(raw.cells), section.missing_values)
        names |= {name for name, kind in kinds.items() if kind == "numeric"}
    else:
        texts = {name for name in (section.id, section.text) if name is not None}
        table, _ = _clear_missing(raw.cells, missing_texts(section.missing_values), untrimmed=texts)
        names = set(table.column_names) - texts
    table = _clear_rows_without_target(table, section.target)
    number_format = NumberFormat()
    if raw.delimiter is not None:
        number_format = _infer_number_format(table, section, raw.delimiter)
    for i, name in enumerate(table.column_names):
        text, kind = as_text(table.column(i)), kinds.get(name)
        if name in names and text is not None and kind not in ("categorical", "time"):
            column = compute.utf8_trim_whitespace(text)
            style = styles.get(name)
            if style is not None:
                field, cells = name, _parse_cells(name, column, style)
            else:
                is_target = name == section.target
                option = "--task classification" if is_target else f"--column {name}=categorical"
                field, cells = _infer_type(name, column, kind, number_format, option)
            table = table if cells is column else table.set_column(i, field, cells)
    return table


def _declare_categories(table: pa.Table) -> pa.Table:
    """Restore pandas categories, which Parquet stores as plain numbers."""
    columns = (table.schema.pandas_metadata or {}).get("columns", ())
    declared = {c["field_name"] for c in columns if c["pandas_type"] == "categorical"}
    for i, name in enumerate(table.column_names):
        if name in declared and column_type(table.column(i)) in ("numbers", "integers"):
            categories = table.column(i).dictionary_encode()
            table = table.set_column(i, name, name_categories(categories))
    return table


def column_names(table: pa.Table, used_names: set[str | None]) -> list[str]:
    """Return the column names, without an unused, unnamed pandas index at either end."""
    names = list(table.column_names)
    for name in (names[0], names[-1]) if names else ():
        if INDEX_NAMES.fullmatch(name) and name not in used_names and (name or names[0] == name):
            log.info("ignoring the column %r, which is pandas' unnamed index", name)
            names.remove(name)
            break
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        received = f"{repeated[0]!r} more than once" if repeated[0] else "a column without a name"
        raise InvalidInput("data.source", "columns with unique names", received[:100])
    return names


def infer_number_style(
    texts: Collection[str], decimal: str | None, thousands: str | None
) -> NumberStyle | None:
    """Infer the number format of texts, or return None if no single format fits.

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


def _read_text(path: Path, section: "DataSection") -> RawTable:
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
    return RawTable(pa.Table.from_arrays(columns, names=names), file.delimiter)


def csv_source(path: Path) -> Path | bytes:
    """Return a CSV file's path, or its decompressed content if it is compressed."""
    if is_zipfile(path):
        raise InvalidInput("data.source", "a CSV file (unpack the archive)", "a zip archive")
    with path.open("rb") as file:
        start = file.read(4)
    if start == PARQUET_START:
        raise InvalidInput("data.source", f"a CSV file (parquet:{path.name})", "a Parquet file")
    for magic, kind in UNSUPPORTED.items():
        if start.startswith(magic):
            raise InvalidInput("data.source", "a CSV or gzip file", f"{kind} file")
    return gzip.decompress(path.read_bytes()) if start[:2] == GZIP_START else path


def _chunks(file: CsvTable) -> Iterator[list[pa.Array]]:
    rows = file.rows()
    while part := list(islice(rows, CHUNK_ROWS)):
        yield [pa.array(cells, pa.string()) for cells in zip(*part, strict=True)]


def _clear_missing(
    table: pa.Table, missing: Collection[str], untrimmed: Collection[str] | None = None
) -> tuple[pa.Table, set[str]]:
    """Set missing values in text columns to null.

    Returns the table and the names of the changed columns. If `untrimmed` is set, spaces around
    the cells of all other columns are removed.
    """
    changed = set()
    for i, name in enumerate(table.column_names):
        column = as_text(table.column(i))
        if column is None:
            continue
        trimmed = compute.utf8_trim_whitespace(column)
        is_missing = compute.is_in(trimmed, pa.array(list(missing), column.type))
        if compute.any(is_missing).as_py():
            changed.add(name)
        if untrimmed is not None and name not in untrimmed:
            column = trimmed
        cleared = compute.if_else(is_missing, pa.scalar(None, column.type), column)
        table = table.set_column(i, name, cleared)
    return table, changed


def _clear_rows_without_target(table: pa.Table, target: str | None) -> pa.Table:
    if table.column_names.count(target) != 1:
        return table
    is_absent = compute.is_null(table.column(target), nan_is_null=True).to_numpy()
    if not is_absent.any():
        return table
    return table.take(pa.array(np.arange(table.num_rows), mask=is_absent))


def _infer_number_format(table: pa.Table, section: "DataSection", delimiter: str) -> NumberFormat:
    """Return the configured number format, or infer it from the cells.

    Commas are decimal commas if no number has a decimal point. In a comma-delimited file, they
    are thousands separators if every number with a comma looks like 1,234.
    """
    if section.decimal is not None:
        style = NumberStyle(decimal=section.decimal, thousands=section.thousands)
        return NumberFormat(style, is_known=True)
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
        style = NumberStyle(decimal=",", thousands=thousands)
        return NumberFormat(style, is_known=True, is_ambiguous=not has_decimal_commas)
    is_ambiguous = may_be_grouped and section.thousands is None
    style = NumberStyle(thousands=section.thousands)
    return NumberFormat(style, bool(points) or is_grouped, is_ambiguous)


def _infer_type(
    name: str, column: Column, kind: str | None, number_format: NumberFormat, option: str
) -> tuple[str | pa.Field, Column]:
    """Convert a column's texts to numbers if possible, and return its name or field, and cells.

    Messages suggest `option` to keep the texts.
    """
    texts = column.unique().drop_null().to_pylist()
    numbers, thousands = number_format.parse(texts), number_format.style.thousands
    is_complete = len(numbers) == len(texts)
    if is_complete and not (thousands is not None and any(thousands in text for text in texts)):
        if number_format.is_ambiguous and kind != "ignored":
            _check_grouping(name, texts, number_format.style.decimal)
        code = next(filter(CODE.fullmatch, texts), None)
        if code is not None and kind is None:
            message = "column %s: reading %r as %.15g (set %s if it is a code)"
            log.info(message, name, code[:MAX_SHOWN], numbers[code], option)
        is_large = max(map(abs, numbers.values()), default=0.0) > EXACT_INTEGERS
        is_exact = kind == "numeric" or not (is_large and all(map(WHOLE.fullmatch, texts)))
        if not is_exact:
            return name, column
        with suppress(pa.ArrowInvalid):  # Arrow refuses some numbers, such as +1 or 1,5.
            return name, column.cast(pa.float64())
        return name, _map_cells(column, numbers)
    if kind == "ignored":
        return name, column
    decimal = number_format.style.decimal if number_format.is_known else None
    style = infer_number_style(texts, decimal, thousands)
    if style is not None:
        numbers = {text: parse_number(text, style) for text in texts}
        first = column.drop_null()[0].as_py()
        message = "column %s: reading %r as %g (set %s to keep text)"
        log.info(message, name, first[:MAX_SHOWN], numbers[first], option)
        field = pa.field(name, pa.float64(), metadata={WRITTEN: style.model_dump_json()})
        return field, _map_cells(column, numbers)
    if is_complete:
        return name, _map_cells(column, numbers)
    if number_format.style != PLAIN:
        is_required, cells = kind is not None, column.to_pylist()
        check_cells(cells, name, numbers.__contains__, "numbers", is_required=is_required)
    return name, column


def _parse_cells(name: str, column: Column, style: NumberStyle) -> Column:
    numbers = {}
    for text in column.unique().drop_null().to_pylist():
        with suppress(ValueError):
            numbers[text] = parse_number(text, style)
    kind, cells = f"numbers such as {number_example(style)!r}", column.to_pylist()
    check_cells(cells, name, numbers.__contains__, kind, is_required=True, is_fixed=True)
    return _map_cells(column, numbers)


def _check_grouping(name: str, texts: Sequence[str], mark: Decimal) -> None:
    """Raise InvalidInput if the decimal marks in numbers are probably thousands separators.

    This is likely if the other numbers have up to three digits and no mark.
    """
    grouped = [text for text in texts if GROUPED.fullmatch(text)]
    plain = [text for text in texts if not GROUPED.fullmatch(text)]
    if len(grouped) >= MIN_GROUPED and plain and all(map(SMALL_WHOLE.fullmatch, plain)):
        decimal, kind = (",", "point") if mark == "." else (".", "comma")
        expected = (
            f"unambiguous numbers (to read {grouped[0]} as {grouped[0].replace(mark, '')}, set "
            f'data.decimal = "{decimal}" and data.thousands = "{mark}", or --decimal {decimal} '
            f'--thousands {mark}; for a decimal {kind}, set data.decimal = "{mark}" or '
            f"--decimal {mark})"
        )
        raise InvalidInput(f"column {name}", expected, f"{grouped[0]!r} and {plain[0]!r}")


def _map_cells(column: Column, numbers: Mapping[str, float]) -> Column:
    encoded = column.combine_chunks().dictionary_encode()
    mapped = pa.array([numbers[text] for text in encoded.dictionary.to_pylist()], pa.float64())
    return mapped.take(encoded.indices)
