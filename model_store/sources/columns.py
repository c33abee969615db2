"""Encode rows with named columns, in training and in the service.

The manifest's column classes define the encoding. `training.data.tables` computes means, standard
deviations and categories from the training rows. Arithmetic is float64, rounded once to float32.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int64

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    NumberStyle,
    NumericColumn,
    StandardisedColumn,
    TimeColumn,
    column_width,
)
from model_store.errors import MAX_ERRORS, InvalidInput, describe_value, merge_errors
from model_store.sources.cells import (
    ISO,
    TIME_EXAMPLE,
    Categories,
    Numbers,
    category_text,
    date_example,
    match_category,
    number_example,
    parse_number,
    parse_time,
    phases,
)

Columns = Sequence[AnyColumn]
Rows = Float32[np.ndarray, "N I"]
OR_NULL = ", or null"
MAX_SHOWN = 10


def encode(columns: Columns, values: Mapping[str, Numbers | Categories]) -> Rows:
    """Encode all columns and concatenate them in order.

    Missing values are NaN in columns without missing training values. See `fill_missing`.
    """
    rows, width = len(values[columns[0].name]), sum(map(column_width, columns))
    encoded, end = np.empty((rows, width), dtype=np.float32), 0
    for column in columns:
        start, end = end, end + column_width(column)
        cells = values[column.name]
        if isinstance(column, CategoricalColumn):
            encoded[:, start:end] = _one_hot(column, cells)  # type: ignore[arg-type]
        else:
            encoded[:, start:end] = _numbers(column, cells)  # type: ignore[arg-type]
        if column.missing is False:
            encoded[~presence(cells), start:end] = np.nan
    return encoded


def _numbers(column: StandardisedColumn, values: Numbers) -> Float32[np.ndarray, "N J"]:
    missing = np.isnan(values)[:, None]
    with np.errstate(over="ignore"):  # the caller rejects infinity
        parts = [((values - column.mean) / column.std)[:, None]]
        if isinstance(column, TimeColumn):
            parts += [phases(values, cycle) for cycle in column.cycles]
        encoded = np.where(missing, 0.0, np.concatenate(parts, axis=1)).astype(np.float32)
    if not column.indicator:
        return encoded
    return np.concatenate([encoded, missing.astype(np.float32)], axis=1)


def _one_hot(column: CategoricalColumn, values: Categories) -> Float32[np.ndarray, "N J"]:
    index = {category: i for i, category in enumerate(column.categories)}
    encoded = np.zeros((len(values), column_width(column)), dtype=np.float32)
    known, unknown = index.keys(), len(index)
    places = [
        -1 if value is None else index.get(match_category(value, known), unknown)
        for value in values
    ]
    encoded[np.arange(len(values)), places] = 1.0
    return encoded


def missing_cells(x: Rows, columns: Columns) -> Bool[np.ndarray, "N C"] | None:
    """Find missing cells in columns that were complete in training.

    Returns None if there are none.
    """
    if not columns:
        return None
    missing = np.isnan(x[:, _ends(columns) - 1])
    return missing if missing.any() else None


def fill_missing(x: Rows, columns: Columns) -> Bool[np.ndarray, "N C"] | None:
    """Replace the `missing_cells` with the median or most frequent value, in place."""
    missing = missing_cells(x, columns)
    if missing is not None:
        np.copyto(x, usual_row(columns), where=np.isnan(x))
    return missing


def check_complete(x: Rows, columns: Columns, field: str, first_row: int = 0) -> None:
    """Raise InvalidInput if a cell is missing in a column that was complete in training."""
    missing = missing_cells(x, columns)
    if missing is None:
        return
    expected = "a value, because all training rows have one"
    errors = [
        InvalidInput(f"{field}.{first_row + int(np.argmax(is_missing))}.{name}", expected, "none")
        for name, is_missing in zip((c.name[:80] for c in columns), missing.T, strict=True)
        if is_missing.any()
    ]
    raise merge_errors(errors)


def _ends(columns: Columns) -> Int64[np.ndarray, "C"]:
    return np.cumsum([column_width(column) for column in columns])


def column_at(columns: Columns, place: int) -> AnyColumn:
    """Find the column of a number in an encoded row."""
    return columns[int(np.searchsorted(_ends(columns), place, side="right"))]


def columns_expected(field: str, received: str) -> InvalidInput:
    """Create the error for numeric rows where the model expects objects keyed by column."""
    expected = "rows as objects keyed by column"
    return InvalidInput(field, expected, received)


def encode_objects(
    rows: Sequence[Any],
    columns: Columns,
    field: str,
    first_row: int = 0,
    ignored: Collection[str] = (),
) -> Rows:
    """Encode JSON objects keyed by column. Row numbers in errors start at `first_row`."""
    names = {column.name for column in columns}
    for n, row in enumerate(rows, start=first_row):
        if not isinstance(row, dict):
            expected = "an object keyed by column, like the previous row"
            raise InvalidInput(f"{field}.{n}", expected, describe_value(row))
        if row.keys() != names and row.keys() - names.union(ignored) | names - row.keys():
            _raise_for_keys(row, columns, f"{field}.{n}", ignored)
    cells = {column.name: [row[column.name] for row in rows] for column in columns}
    return encode_cells(cells, columns, field, first_row)


def encode_cells(
    cells: Mapping[str, Sequence[Any] | Numbers], columns: Columns, field: str, first_row: int = 0
) -> Rows:
    """Encode columns that contain JSON values, or numbers with NaN for missing values."""
    values: dict[str, Numbers | Categories] = {}
    errors: list[InvalidInput] = []  # the first of each column
    for column in columns:
        try:
            values[column.name] = _read(column, cells[column.name], field, first_row)
        except InvalidInput as error:
            errors.append(error)
    if errors:
        raise merge_errors(errors)
    encoded = encode(columns, values)
    is_infinite = np.isinf(encoded)
    if is_infinite.any():
        n, i = np.argwhere(is_infinite)[0].tolist()
        name = column_at(columns, i).name
        expected = "a number closer to the training data"
        raise InvalidInput(f"{field}.{first_row + n}.{name}", expected, "a number too far away")
    return encoded


def _read(
    column: AnyColumn, cells: Sequence[Any] | Numbers, field: str, first_row: int
) -> Numbers | Categories:
    name, placed = column.name, enumerate(cells, start=first_row)
    if isinstance(cells, np.ndarray):
        return cells
    if isinstance(column, StandardisedColumn):
        parse = _number if isinstance(column, NumericColumn) else _time
        read: Callable[[Any, str], float] = partial(parse, column.written)  # type: ignore[arg-type]
        return np.array([read(cell, f"{field}.{n}.{name}") for n, cell in placed])
    return [_category(cell, f"{field}.{n}.{name}") for n, cell in placed]


def usual_row(columns: Columns) -> Float32[np.ndarray, "I"]:
    """Encode a row with the usual value of each column.

    Without a usual value, numeric columns have their mean, and categorical columns no category.
    """
    values: dict[str, Numbers | Categories] = {}
    for column in columns:
        if isinstance(column, CategoricalColumn):
            values[column.name] = [column.usual or ""]
        else:
            usual = column.mean if column.usual is None else column.usual
            values[column.name] = np.array([usual], dtype=np.float64)
    return encode(columns, values)[0]


def indicated_cells(x: Rows, columns: Columns) -> Bool[np.ndarray, "N C"]:
    """Find missing cells in columns that had missing values in training."""
    has_indicator = np.array([column.indicator for column in columns])
    return (x[:, _ends(columns) - 1] == 1.0) & has_indicator


def unknown_cells(x: Rows, columns: Columns) -> Bool[np.ndarray, "N C"]:
    """Find unknown categories, and missing categories in columns without an indicator."""
    is_categorical = np.array([isinstance(column, CategoricalColumn) for column in columns])
    has_indicator = np.array([column.indicator for column in columns], dtype=int)
    return (x[:, _ends(columns) - 1 - has_indicator] != 0.0) & is_categorical


def unknown_categories(x: Rows, columns: Columns) -> dict[str, int]:
    """Count the `unknown_cells` of each column, omitting zeros."""
    if not columns:
        return {}
    counts = unknown_cells(x, columns).sum(axis=0).tolist()
    return {column.name: count for column, count in zip(columns, counts, strict=True) if count}


def category_indices(x: Rows, columns: Columns, name: str) -> Int64[np.ndarray, "N"]:
    """Return the index of each row's category in a column, or -1 if it is unknown or missing."""
    place = [column.name for column in columns].index(name)
    column, end = columns[place], int(_ends(columns)[place])
    assert isinstance(column, CategoricalColumn)
    one_hot = x[:, end - column_width(column) :][:, : len(column.categories)]
    return np.where((one_hot == 1.0).any(axis=1), one_hot.argmax(axis=1), -1)


def count_unknown(counts: dict[str, int], x: Rows, columns: Columns) -> None:
    for name, count in unknown_categories(x, columns).items():
        counts[name] = counts.get(name, 0) + count


def presence(values: Numbers | Categories) -> Bool[np.ndarray, "N"]:
    if isinstance(values, np.ndarray):
        return ~np.isnan(values)
    return np.array([value is not None for value in values], dtype=bool)


def _raise_for_keys(
    row: dict[str, Any], columns: Columns, field: str, ignored: Collection[str]
) -> None:
    ordered = [column.name for column in columns]
    expected = f"a value{OR_NULL} if it is missing"
    missing = [name for name in ordered if name not in row]
    errors = [InvalidInput(f"{field}.{name}", expected, "no such column") for name in missing]
    known = ", ".join(ordered[:MAX_SHOWN]) + (", ..." if len(ordered) > MAX_SHOWN else "")
    errors += [
        InvalidInput(f"{field}.{name[:80]}", f"only the columns {known[:500]}", "an unknown one")
        for name in nsmallest(MAX_ERRORS, map(str, row.keys() - {*ordered, *ignored}))
    ]
    raise merge_errors(errors)


def _number(style: NumberStyle | None, cell: Any, field: str) -> float:
    if cell is None:
        return float("nan")
    if style is not None and type(cell) is str:
        try:
            return parse_number(cell, style)
        except ValueError:
            example = number_example(style)
            text = f"text as the training data had it, such as {example!r}{OR_NULL}"
            expected = f"a number, or {text}"
            raise InvalidInput(field, expected, describe_value(cell)) from None
    if type(cell) not in (int, float):
        raise InvalidInput(field, f"a number{OR_NULL}", describe_value(cell))
    return float(cell)


def _time(date_format: str | None, cell: Any, field: str) -> float:
    if cell is None or cell != cell:
        return float("nan")
    as_text = ""
    if date_format is not None:
        as_text = f", or as the training data had it, such as {date_example(date_format)!r}"
    expected = f"a date or time in ISO 8601, such as {TIME_EXAMPLE}{as_text}{OR_NULL}"
    if date_format is not None and type(cell) in (int, float):  # such as 20240531
        cell = category_text(cell)
    if type(cell) is not str:
        raise InvalidInput(field, expected, describe_value(cell))
    try:
        return parse_time(None if ISO.fullmatch(cell) else date_format, cell)
    except (ValueError, OverflowError):
        raise InvalidInput(field, expected, describe_value(cell)) from None


def _category(cell: Any, field: str) -> str | None:
    if cell is None:
        return None
    if type(cell) not in (str, int, float, bool):
        raise InvalidInput(field, f"a string, number or boolean{OR_NULL}", describe_value(cell))
    return category_text(cell)
