"""Convert typed Arrow columns to numbers, times and categories."""

from datetime import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pyarrow import compute, types

from model_store.sources.cells import Categories, Numbers, category_text, seconds_since

Column = Any  # a pyarrow array or chunked array
ColumnType = Literal["numbers", "integers", "times", "categories", "text"]

EXACT_INTEGERS = 1 << 53  # float64 cannot represent all larger integers
IN_ONE_SECOND = {"s": 1, "ms": 10**3, "us": 10**6}
MIN_TIME, MAX_TIME = seconds_since(datetime.min), seconds_since(datetime.max) + 1
SCALARS = (
    *(types.is_integer, types.is_floating, types.is_decimal, types.is_null, types.is_boolean),
    *(types.is_string, types.is_large_string, types.is_string_view),
    *(types.is_date, types.is_timestamp),
)


def column_type(column: Column) -> ColumnType | None:
    """Classify a column by its type.

    Categories are booleans and the category types of pandas and polars. Integers are whole numbers
    that float64 cannot represent, such as account numbers. Returns None for other types, such as
    lists, durations and bytes.
    """
    kind = column.type
    if types.is_dictionary(kind):
        is_scalar = any(is_kind(kind.value_type) for is_kind in SCALARS)
        return "categories" if is_scalar else None
    if types.is_boolean(kind):
        return "categories"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "times"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if types.is_integer(kind) or (types.is_decimal(kind) and kind.scale <= 0):
        ends = compute.min_max(column).values()
        is_exact = all(abs(end.as_py() or 0) <= EXACT_INTEGERS for end in ends)
        return "numbers" if is_exact else "integers"
    return "numbers" if any(is_kind(kind) for is_kind in SCALARS) else None


def as_text(column: Column) -> Column | None:
    if types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column if column_type(column) == "text" else None


def read_numbers(column: Column) -> Numbers:
    numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(numbers, dtype=np.float64)


def read_times(column: Column) -> Numbers:
    """Convert times to seconds since 1970. Raise OverflowError for years outside 1 to 9999."""
    if types.is_date(column.type) or column.type.unit == "ns":
        unit = "s" if types.is_date(column.type) else "us"
        column = column.cast(pa.timestamp(unit), safe=False)
    integers = column.cast(pa.int64())
    seconds: Numbers = read_numbers(integers) / IN_ONE_SECOND[column.type.unit]
    if ((seconds < MIN_TIME) | (seconds >= MAX_TIME)).any():
        raise OverflowError("expected times from year 1 to 9999")
    return seconds


def read_categories(column: Column) -> Categories:
    """Convert values to category names, or None if they are missing."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if types.is_timestamp(column.type) and column.type.unit == "ns":  # too precise for Python
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    if not types.is_dictionary(column.type):
        column = column.dictionary_encode()
    names = [
        None if value is None or value != value else category_text(value)
        for value in column.dictionary.to_pylist()
    ]
    codes = compute.fill_null(column.indices, len(names)).to_numpy(zero_copy_only=False)
    return np.array([*names, None], dtype=object)[codes].tolist()


def name_categories(column: Column) -> Column:
    """Convert the categories of a column to text. Other columns are returned unchanged."""
    if not types.is_dictionary(column.type) or column_type(column) is None:
        return column
    if types.is_string(column.type.value_type) or types.is_large_string(column.type.value_type):
        return column
    return pa.array(read_categories(column), pa.string()).dictionary_encode()
