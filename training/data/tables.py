"""`csv:FILE`, `parquet:FILE` and `uci:DIR`: rows of named columns, numeric and categorical.

The encoding of columns is fitted here, on the training split alone; `model_store.inputs.columns` applies it.
"""

import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from model_store.artifacts.manifest import CategoricalColumn, NumericColumn, column_width
from model_store.errors import InvalidInput
from model_store.inputs.columns import Categories, Columns, Numbers, category_text, encode
from training.data.rows import Dataset, Rows, SplitSizes, class_numbers, hold_out

if TYPE_CHECKING:
    from training.recipe import DataSection

MAX_CATEGORIES = 256
BOOLEANS = {"true", "false"}


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, without the target: numbers (NaN where missing) or categories (None where missing)."""

    columns: dict[str, Numbers | Categories]
    rows: int

    def take(self, index: Int64[np.ndarray, "M"]) -> "Table":
        """Return the rows of these numbers, in their order."""
        taken: dict[str, Numbers | Categories] = {
            name: values[index] if isinstance(values, np.ndarray) else [values[i] for i in index.tolist()]
            for name, values in self.columns.items()
        }
        return Table(taken, len(index))


def csv(path: Path, task: str, section: "DataSection", sizes: SplitSizes, columns: Columns = ()) -> Dataset:
    """Read a CSV file with a header, in UTF-8. Empty cells, NA, N/A, NaN and null are missing values.

    A column is numeric where every value is a number, and else categorical.

    Raises:
        InvalidInput: naming the column or row that is not as it should be.
    """
    from pyarrow import ArrowException, string
    from pyarrow import csv as arrow

    parsing = arrow.ParseOptions(newlines_in_values=True)  # between quotes
    try:
        with arrow.open_csv(str(path), parse_options=parsing) as reader:
            names = reader.schema.names
        options = arrow.ConvertOptions(column_types=dict.fromkeys(names, string()), strings_can_be_null=True)
        table = arrow.read_csv(str(path), parse_options=parsing, convert_options=options)
    except (ArrowException, OSError, ValueError) as error:
        raise InvalidInput("data.source", f"a readable CSV file, {str(path)!r}", _reason(error)) from None
    kinds: dict[str, str] = {**section.columns}
    if section.target is not None:
        kinds[section.target] = "numeric" if task == "regression" else "categorical"
    booleans = {c.name for c in columns if isinstance(c, CategoricalColumn) and set(c.categories) <= BOOLEANS}
    return _dataset(_typed(table, kinds, booleans), task, section, sizes, columns)


def parquet(path: Path, task: str, section: "DataSection", sizes: SplitSizes, columns: Columns = ()) -> Dataset:
    """Read a Parquet file. Numbers are numeric; booleans and strings are categorical; nulls and NaN are missing.

    Raises:
        InvalidInput: naming the column or row that is not as it should be.
    """
    from pyarrow import ArrowException
    from pyarrow import parquet as arrow

    try:
        with arrow.ParquetFile(str(path)) as file:
            table = file.read()
    except (ArrowException, OSError, ValueError) as error:
        raise InvalidInput("data.source", f"a readable Parquet file, {str(path)!r}", _reason(error)) from None
    return _dataset(table, task, section, sizes, columns)


def uci(folder: Path, split: int, sizes: SplitSizes, columns: Columns = ()) -> Dataset:
    """Read one of the standard splits of a UCI regression set (Hernandez-Lobato and Adams 2015).

    `data.txt` holds all rows; `index_features.txt` and `index_target.txt` say which columns are what,
    `index_train_I.txt` and `index_test_I.txt` the rows of split I. Columns are named x0, x1, ...

    Raises:
        InvalidInput: naming the file that is missing or not as it should be.
    """
    data = _text(folder / "data.txt", 2)
    features, target = (
        _index(folder / "index_features.txt", data.shape[1]),
        _index(folder / "index_target.txt", data.shape[1]),
    )
    if len(target) != 1:
        raise InvalidInput("index_target.txt", "one column", f"{len(target)}")
    train, test = (_index(folder / f"index_{part}_{split}.txt", len(data)) for part in ("train", "test"))
    if set(train.tolist()) & set(test.tolist()):
        raise InvalidInput(f"index_test_{split}.txt", "rows that are not in the training index", "some that are")
    table = Table({f"x{i}": data[:, column] for i, column in enumerate(features.tolist())}, len(data))
    y = data[:, target[0]].astype(np.float32)
    return _encoded(table, y[train], y[test], (), train, test, sizes, columns)


def fit_columns(table: Table) -> list[NumericColumn | CategoricalColumn]:
    """Return how to encode the columns of training rows: means, standard deviations, categories.

    Raises:
        InvalidInput: naming the column that has no values, or too many categories.
    """
    return [_fit_column(name, values) for name, values in table.columns.items()]


def _fit_column(name: str, values: Numbers | Categories) -> NumericColumn | CategoricalColumn:
    if isinstance(values, np.ndarray):
        present = values[~np.isnan(values)]
        if len(present) == 0:
            raise InvalidInput(
                f"column {name}", "a value in some training row (or `ignored` in data.columns)", "none"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            mean, std = float(present.mean()), float(present.std())
        if not np.isfinite([mean, std]).all():
            raise InvalidInput(f"column {name}", "numbers whose variance float64 can hold", "larger ones")
        return NumericColumn(name=name, mean=mean, std=std or 1.0, indicator=len(present) < len(values))
    categories = sorted({value for value in values if value is not None})
    if not 1 <= len(categories) <= MAX_CATEGORIES:
        expected = f"1 to {MAX_CATEGORIES} categories (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, f"{len(categories)}")
    return CategoricalColumn(name=name, categories=tuple(categories))


def _dataset(table: Any, task: str, section: "DataSection", sizes: SplitSizes, known: Columns) -> Dataset:
    names = list(table.column_names)
    if section.target is None:
        raise InvalidInput("data.target", "the name of a column (or --target COLUMN)", "none")
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        raise InvalidInput(
            "data.source", "columns with different names", f"{repeated[0]!r} twice or without a name"[:100]
        )
    for field, name in [("data.target", section.target), *(("data.columns", name) for name in section.columns)]:
        if name not in names:
            raise InvalidInput(field, f"one of the columns {names[:20]}", repr(name)[:100])
    if section.columns.get(section.target) is not None:
        raise InvalidInput("data.columns", "no kind for the target", repr(section.target)[:100])
    if table.num_rows < 2:
        raise InvalidInput("data.source", "at least two rows", f"{table.num_rows}")
    features = [name for name in names if name != section.target and section.columns.get(name) != "ignored"]
    if not features:
        raise InvalidInput("data.source", "a column beside the target", "none")
    columns = {name: _values(table.column(name), name, section.columns.get(name)) for name in features}
    train, test = hold_out(table.num_rows, section.test_fraction)
    classes: tuple[str, ...] = ()
    targets: Any
    if task == "regression":
        targets = _targets(_values(table.column(section.target), section.target, "numeric"))
        y, y_test = targets[train], targets[test]
    else:
        labels = _labels(_values(table.column(section.target), section.target, "categorical"))
        y, y_test, classes = class_numbers(
            [labels[i] for i in train.tolist()], [labels[i] for i in test.tolist()], "data.target"
        )
    return _encoded(Table(columns, table.num_rows), y, y_test, classes, train, test, sizes, known)


def _encoded(
    table: Table,
    y: np.ndarray,
    y_test: np.ndarray,
    classes: tuple[str, ...],
    train: Int64[np.ndarray, "R"],
    test: Int64[np.ndarray, "T"],
    sizes: SplitSizes,
    known: Columns,
) -> Dataset:
    """Encode a table's rows by known columns or, without them, by what the training split says of its columns."""
    names = {column.name for column in known}
    if known and names != set(table.columns):
        differing = sorted(names ^ set(table.columns))
        expected = f"the columns {sorted(names)[:20]} and no others (`ignored` in data.columns leaves one out)"
        raise InvalidInput("data.source", expected, f"a difference in {differing[:20]}")
    columns = known or fit_columns(table.take(train[sizes.split(len(train))[-1]]))
    x, x_test = (encode(columns, table.take(index).columns) for index in (train, test))
    for part in (x, x_test):
        if not np.isfinite(part).all():
            raise InvalidInput("data.source", "numbers in float32's range once standardised", "some out of it")
    shape = (sum(column_width(column) for column in columns),)
    return Dataset(Rows(x, y), Rows(x_test, y_test), shape, classes, float(x.min()), float(x.max()), tuple(columns))


def _typed(table: Any, kinds: dict[str, str], booleans: set[str]) -> Any:
    """Return a table of text with its columns of numbers and of booleans as such, but for those of a kind.

    Columns known as `booleans` are named as booleans are, whatever else is in them.
    """
    import pyarrow as pa
    from pyarrow import compute

    for i, name in enumerate(table.column_names):
        if name in booleans:
            table = table.set_column(i, name, compute.utf8_lower(compute.utf8_trim_whitespace(table.column(i))))
            continue
        if kinds.get(name) == "categorical":
            continue
        column = compute.utf8_trim_whitespace(table.column(i))
        texts = {text.as_py().lower() for text in column.unique() if text.is_valid} if len(column) else set()
        if texts and texts <= BOOLEANS:
            table = table.set_column(i, name, compute.utf8_lower(column).cast(pa.bool_()))
        else:
            with suppress(pa.ArrowInvalid):
                table = table.set_column(i, name, column.cast(pa.float64()))
    return table


def _values(column: Any, name: str, kind: str | None) -> Numbers | Categories:
    """Return a column of an Arrow table as numbers or as categories; without a kind its type decides."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    of = column.type
    is_number = types.is_integer(of) or types.is_floating(of) or types.is_decimal(of) or types.is_null(of)
    if not (is_number or types.is_boolean(of) or types.is_string(of) or types.is_large_string(of)):
        expected = "numbers, booleans or strings (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, f"type {of}"[:80])
    if is_number and kind != "categorical":
        numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float64)
        if np.isinf(numbers).any():
            raise InvalidInput(f"column {name}", "finite numbers", f"infinity in row {np.argmax(np.isinf(numbers))}")
        return numbers
    if kind == "numeric":
        row, bad = next((n, value) for n, value in enumerate(column.to_pylist()) if not _is_number(value))
        raise InvalidInput(f"column {name}", "numbers", f"{str(bad)[:40]!r} in row {row}")
    return [None if value is None or value != value else category_text(value) for value in column.to_pylist()]


def _is_number(value: object) -> bool:
    """Whether a value of a column of text or booleans is missing, or a number."""
    try:
        return value is None or (isinstance(value, str) and np.isfinite(float(value)))
    except ValueError:
        return False


def _targets(values: Any) -> Float32[np.ndarray, "N"]:
    missing = np.isnan(values)
    if missing.any():
        raise InvalidInput("data.target", "a value in every row", f"none in row {np.argmax(missing)}")
    with np.errstate(over="ignore"):
        targets = values.astype(np.float32)
    if not np.isfinite(targets).all():
        raise InvalidInput("data.target", "numbers in float32's range", "some out of it")
    return targets


def _labels(values: Any) -> list[str]:
    labels = [value for value in values if value is not None]
    if len(labels) < len(values):
        raise InvalidInput("data.target", "a value in every row", f"none in row {values.index(None)}")
    return labels


def _text(path: Path, ndmin: int) -> Float64[np.ndarray, "..."]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file, which is refused below
            array = np.loadtxt(path, dtype=np.float64, ndmin=ndmin)  # type: ignore[call-overload]
    except (OSError, ValueError) as error:
        raise InvalidInput("data.source", f"a readable file of numbers, {str(path)!r}", _reason(error)) from None
    if array.size == 0 or not np.isfinite(array).all():
        raise InvalidInput("data.source", f"finite numbers in {str(path)!r}", "none or others")
    return array


def _index(path: Path, length: int) -> Int64[np.ndarray, "M"]:
    values = _text(path, 1)
    index = values.astype(np.int64)
    if values.ndim != 1 or (index != values).any() or index.min() < 0 or index.max() >= length:
        raise InvalidInput("data.source", f"whole numbers from 0 to {length - 1} in {str(path)!r}", "others")
    return index


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0][:200]
