"""`csv:FILE`, `parquet:FILE` and `uci:DIR`: rows of named columns, numeric and categorical.

The encoding of columns is fitted here, on the training split alone; `model_store.sources.columns`
applies it.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    Cycle,
    NumberWriting,
    NumericColumn,
    TimeColumn,
    column_width,
)
from model_store.errors import InvalidInput
from model_store.sources.columns import Categories, Columns, Numbers, category_text, encode
from model_store.sources.times import CYCLES_S, DAY_S
from training import log
from training.data.arrays import dataset_of_arrays
from training.data.cells import (
    BOOLEANS,
    NumberFormat,
    index_column,
    trimmed,
    typed,
    values_of,
    with_missing,
    with_times,
    writing_in,
)
from training.data.rows import Dataset, Rows, class_numbers, classes_without
from training.data.splitting import Keys, SplitSizes, hold_out
from training.data.text_files import decimal_of, has_points, read_text_table
from training.data.texts import TextRows

if TYPE_CHECKING:
    from training.recipe import DataSection

MAX_CATEGORIES = 256
MAX_GROUPS = 1000  # that are told apart in calibration and evaluation
MANY_CATEGORIES = 64  # of a column with more than MAX_CATEGORIES, how many are told apart at most
FREQUENT = 5  # training rows from which on one of these is
TWO_WEEKS_S = 14 * DAY_S


@dataclass(frozen=True, eq=False)
class Table:
    """Columns by name, without the target: numbers (NaN where missing) or categories (None where
    missing).

    Those of `times` are numbers of seconds; it says how their dates were written, None in ISO 8601.
    """

    columns: dict[str, Numbers | Categories]
    rows: int
    times: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    written: Mapping[str, NumberWriting] = dataclasses.field(
        default_factory=dict
    )  # of numbers, if not plainly

    def take(self, index: Int64[np.ndarray, "M"]) -> "Table":
        """Return the rows of these numbers, in their order."""
        taken: dict[str, Numbers | Categories] = {
            name: values[index]
            if isinstance(values, np.ndarray)
            else [values[i] for i in index.tolist()]
            for name, values in self.columns.items()
        }
        return Table(taken, len(index), self.times, self.written)


def csv(
    path: Path,
    task: str,
    section: "DataSection",
    sizes: SplitSizes,
    columns: Columns = (),
    texts: TextRows | None = None,
) -> Dataset:
    """Read a CSV file with a header. Empty cells, NA, N/A, NaN and null are missing values.

    A column is numeric where every value is a number, one of times where every value is a date or
    time, and else categorical, if not nearly every value is a number. Encoding, delimiter and
    decimal commas are recognised, or as the recipe says.

    Raises:
        InvalidInput: naming the column or row that is not as it should be.
    """
    return dataset_of(csv_table(path, task, section, columns), task, section, sizes, columns, texts)


def csv_table(path: Path, task: str | None, section: "DataSection", columns: Columns = ()) -> Any:
    """Return a CSV file as an Arrow table with numbers and booleans where columns are such.

    Without a task the target is as any other column.
    """
    table = read_text_table(path, section)
    kinds: dict[str, str] = {**section.columns}
    for name in (section.id, section.text):
        if name is not None:
            kinds[name] = "categorical"  # as it is written
    if section.target is not None and task is not None:
        kinds[section.target] = "numeric" if task == "regression" else "categorical"
    booleans = {
        c.name
        for c in columns
        if isinstance(c, CategoricalColumn) and set(c.categories) <= BOOLEANS
    }
    table = trimmed(table, {section.id, section.text})
    table, _ = with_missing(table, section.missing_values)
    has_commas = any("," in name for name in table.column_names)
    decimal = decimal_of(table, section, is_comma_free=not has_commas)
    is_known = section.decimal is not None or decimal == "," or has_points(table)
    written = NumberFormat(decimal, section.thousands, is_known)
    return typed(table, set(table.column_names), kinds, booleans, written)


def parquet(
    path: Path,
    task: str,
    section: "DataSection",
    sizes: SplitSizes,
    columns: Columns = (),
    texts: TextRows | None = None,
) -> Dataset:
    """Read a Parquet file. Numbers are numeric; booleans and strings are categorical; nulls and NaN
    are missing.

    Strings that are numbers but for `data.missing_values`, or that a recipe calls numeric, are
    numeric.

    Raises:
        InvalidInput: naming the column or row that is not as it should be.
    """
    table = parquet_table(path, task, section)
    if section.integers:
        return dataset_of_arrays(_lists(table, task, section), task, section)
    return dataset_of(table, task, section, sizes, columns, texts)


def _lists(table: Any, task: str, section: "DataSection") -> dict[str, np.ndarray]:
    """Return the one column of lists of integers, x, and the target, y, of rows that have one.

    Raises:
        InvalidInput: if there is none or several, or naming the row that has no such list, or one
            of another length.
    """
    from pyarrow import types

    target = section.target
    if target is None or target not in table.column_names:
        raise InvalidInput(
            "data.target", f"one of the columns {table.column_names[:20]}", repr(target)[:100]
        )
    used = [name for name in table.column_names if section.columns.get(name) != "ignored"]
    lists = [
        name
        for name in used
        if types.is_list(of := table.schema.field(name).type)
        or types.is_large_list(of)
        or types.is_fixed_size_list(of)
    ]
    if len(lists) != 1 or not types.is_integer(table.schema.field(lists[0]).type.value_type):
        expected = "one column of lists of integers (`ignored` in data.columns leaves one out)"
        raise InvalidInput("data.source", expected, f"{lists or used}"[:200])
    others = [name for name in used if name not in (lists[0], target)]
    if others:
        log.info("left out: %s, since rows are the ids of %r", ", ".join(others)[:300], lists[0])
    y = values_of(
        table.column(target), target, "numeric" if task == "regression" else "categorical"
    )
    kept = _with_target(y, target)
    rows = table.column(lists[0]).combine_chunks().take(kept)
    lengths = rows.value_lengths().to_numpy(zero_copy_only=False)  # NaN of none
    length = lengths[0]
    for row, of in enumerate(lengths.tolist()):
        if of != length or rows[row].values.null_count:
            expected = f"as many ids in every row, {length:.0f} as in the first"
            raise InvalidInput(
                f"column {lists[0]}", expected, f"{of:.0f} in row {kept[row]}, or missing ones"
            )
    x = rows.flatten().to_numpy(zero_copy_only=False).reshape(len(kept), int(length))
    return {
        "x": x,
        "y": y[kept] if isinstance(y, np.ndarray) else np.array([y[i] for i in kept.tolist()]),
    }


def parquet_table(path: Path, task: str | None, section: "DataSection") -> Any:
    """Return a Parquet file as an Arrow table with numbers where columns of text are wanted or
    known as such."""
    from pyarrow import ArrowException
    from pyarrow import parquet as arrow

    try:
        with arrow.ParquetFile(str(path)) as file:
            table = file.read()
    except (ArrowException, OSError, ValueError) as error:
        raise InvalidInput(
            "data.source", f"a readable Parquet file, {str(path)!r}", _reason(error)
        ) from None
    table, changed = with_missing(table, section.missing_values)
    numeric = {name for name, kind in section.columns.items() if kind == "numeric"}
    target = {section.target} if task == "regression" else set()
    classes = set() if task == "regression" else {section.target}
    names = {*changed, *numeric, *(name for name in target if name)} - classes
    return typed(table, names, {**section.columns}, set())


def uci(folder: Path, split: int, sizes: SplitSizes, columns: Columns = ()) -> Dataset:
    """Read one of the standard splits of a UCI regression set (Hernandez-Lobato and Adams 2015).

    `data.txt` holds all rows; `index_features.txt` and `index_target.txt` say which columns are
    what, `index_train_I.txt` and `index_test_I.txt` the rows of split I. Columns are named x0, x1,
    ...

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
    train, test = (
        _index(folder / f"index_{part}_{split}.txt", len(data)) for part in ("train", "test")
    )
    if set(train.tolist()) & set(test.tolist()):
        raise InvalidInput(
            f"index_test_{split}.txt", "rows that are not in the training index", "some that are"
        )
    table = Table(
        {f"x{i}": data[:, column] for i, column in enumerate(features.tolist())}, len(data)
    )
    y = data[:, target[0]].astype(np.float32)
    return _encoded(table, y[train], y[test], (), train, test, sizes, columns)


def fit_columns(table: Table) -> list[AnyColumn]:
    """Return how to encode the columns of training rows: means, standard deviations, categories,
    cycles.

    Raises:
        InvalidInput: naming the column that has no values, or too many categories.
    """
    return [
        _fit_categories(name, values)
        if isinstance(values, list)
        else _fit_times(name, values, table.times[name])
        if name in table.times
        else _fit_numbers(name, values, table.written.get(name))
        for name, values in table.columns.items()
    ]


def _fit_numbers(name: str, values: Numbers, written: NumberWriting | None) -> NumericColumn:
    return NumericColumn(name=name, written=written, **_moments(name, values))


def _fit_times(name: str, values: Numbers, written: str | None) -> TimeColumn:
    moments = _moments(name, values)
    present = values[~np.isnan(values)]
    span = np.ptp(present)
    is_seen = {
        "year": span >= CYCLES_S["year"],
        "week": span >= TWO_WEEKS_S,
        "day": (np.mod(present, DAY_S) != 0).any(),
    }
    cycles: tuple[Cycle, ...] = tuple(cycle for cycle in get_args(Cycle) if is_seen[cycle])
    return TimeColumn(name=name, cycles=cycles, written=written, **moments)


def _moments(name: str, values: Numbers) -> dict[str, Any]:
    """Return what columns of numbers and of times both say: mean, standard deviation (1 of a
    constant), median, where nine tenths of the values lie, and whether some are missing.
    """
    present = values[~np.isnan(values)]
    if len(present) == 0:
        raise InvalidInput(
            f"column {name}", "a value in some training row (or `ignored` in data.columns)", "none"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # refused below
        mean, std = float(present.mean()), float(present.std())
    if not np.isfinite([mean, std]).all():
        raise InvalidInput(
            f"column {name}", "numbers whose variance float64 can hold", "larger ones"
        )
    low, usual, high = (float(x) for x in np.quantile(present, (0.05, 0.5, 0.95)))
    missing = len(present) < len(values)
    return {
        "mean": mean,
        "std": std or 1.0,
        "usual": usual,
        "mostly": (low, high),
        "indicator": missing,
    }


def _fit_categories(name: str, values: Categories) -> CategoricalColumn:
    counts = Counter(value for value in values if value is not None)
    kept = sorted(counts)
    if len(counts) > MAX_CATEGORIES:
        frequent = sorted(counts, key=lambda value: (-counts[value], value))[:MANY_CATEGORIES]
        kept = sorted(value for value in frequent if counts[value] >= FREQUENT)
        log.info(
            "column %s: of %d categories the %d most frequent are told apart, the others are one",
            *(name, len(counts), len(kept)),
        )
    if not kept:
        found = f"{len(counts)}" + (f", none in {FREQUENT} training rows or more" if counts else "")
        expected = f"1 to {MAX_CATEGORIES} categories (or `ignored` in data.columns)"
        raise InvalidInput(f"column {name}", expected, found)
    usual = min(kept, key=lambda value: (-counts[value], value))
    return CategoricalColumn(name=name, categories=tuple(kept), usual=usual)


def dataset_of(
    table: Any,
    task: str,
    section: "DataSection",
    sizes: SplitSizes,
    known: Columns = (),
    texts: TextRows | None = None,
) -> Dataset:
    """Return the rows of an Arrow table whose text columns of numbers are such; with `texts`, of
    the text alone.

    Raises:
        InvalidInput: naming the column or row that is not as it should be.
    """
    names = list(table.column_names)
    named = {section.target, section.group, section.time, section.calibration_group, section.id}
    wanted = {*named, *section.columns, *(column.name for column in known)}
    index = index_column(names, {name for name in wanted if name})
    if index is not None:
        log.info("left out: the column %r, which is pandas' unnamed index", index)
        names.remove(index)
    if section.target is None:
        raise InvalidInput("data.target", "the name of a column (or --target COLUMN)", "none")
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        raise InvalidInput(
            "data.source",
            "columns with different names",
            f"{repeated[0]!r} twice or without a name"[:100],
        )
    keys = [("data.group", section.group), ("data.time", section.time), ("data.id", section.id)]
    of_calibration = ("data.calibration_group", section.calibration_group)
    asked = [
        ("data.target", section.target),
        *(("data.columns", name) for name in section.columns),
        ("data.text", section.text),
        *keys,
        of_calibration,
    ]
    for field, name in asked:
        if name is not None and name not in names:
            raise InvalidInput(field, f"one of the columns {names[:20]}", repr(name)[:100])
    for field, name in [*keys, of_calibration, ("data.text", section.text)]:
        if name == section.target:
            raise InvalidInput(field, "another column than the target", repr(name)[:100])
    if section.columns.get(section.target) is not None:
        raise InvalidInput("data.columns", "no kind for the target", repr(section.target)[:100])
    if table.num_rows < 2:
        raise InvalidInput("data.source", "at least two rows", f"{table.num_rows}")
    keyed = {name for _, name in keys if name is not None and name not in section.columns}
    features = [
        name
        for name in names
        if name != section.target and name not in keyed and section.columns.get(name) != "ignored"
    ]
    if not features:
        raise InvalidInput("data.source", "a column beside the target", "none")
    if texts is not None:
        others = [name for name in features if name != section.text]
        if others:
            log.info(
                "left out: %s, since the model reads %r alone",
                ", ".join(others)[:300],
                section.text,
            )
        features = [texts.spec.column]
    kinds = {c.name: c.kind for c in known if isinstance(c, CategoricalColumn)} | section.columns
    if texts is not None:
        kinds |= {texts.spec.column: "categorical"}  # as it is written
    whole = table
    table, times = with_times(table, set(features), kinds, section.date_format)
    columns = {
        name: values_of(table.column(name), name, "numeric" if name in times else kinds.get(name))
        for name in features
    }
    kind = "numeric" if task == "regression" else "categorical"
    given = values_of(table.column(section.target), section.target, kind)
    kept = _with_target(given, section.target)
    ties = _keys(whole, section, given, kept)
    train, test = hold_out(len(kept), section.test_fraction, ties)
    classes: tuple[str, ...] = ()
    left_out = np.zeros(0, dtype=np.int64)
    targets: Any
    if isinstance(given, np.ndarray):
        if section.leave_out:
            raise InvalidInput(
                "data.leave_out",
                "none, since a regression has no classes",
                str(section.leave_out)[:80],
            )
        targets = _targets(given[kept])
        y, y_test = targets[train], targets[test]
    else:
        labels = [str(given[i]) for i in kept.tolist()]
        if section.leave_out:
            classes_without(sorted(set(labels)), section.leave_out)
            is_out = np.array([label in section.leave_out for label in labels])
            left_out, train, test = test[is_out[test]], train[~is_out[train]], test[~is_out[test]]
        y, y_test, classes = class_numbers(
            [labels[i] for i in train.tolist()], [labels[i] for i in test.tolist()], "data.target"
        )
    written = {
        name: writing for name in features if (writing := writing_in(table, name)) is not None
    }
    rows = Table(columns, table.num_rows, times, written).take(kept)
    if texts is None:
        data = _encoded(rows, y, y_test, classes, train, test, sizes, known, ties)
    else:
        data = _tokenised(rows, y, y_test, classes, train, test, texts)
    of_train = ties.take(train)
    if section.leave_out:
        out = rows.take(left_out)
        x_out = (
            encode(data.columns, out.columns) if texts is None else texts.encode(_texts(out, texts))
        )
        data = replace(data, left_out=x_out)
    ids = kept[train] if section.id is None else _ids(whole.column(section.id), kept[train])
    data = replace(
        data, train=replace(data.train, ids=ids), groups=of_train.groups, times=of_train.times
    )
    data = replace(data, missing_values=tuple(section.missing_values), id_column=section.id)
    group_names, numbers = _groups(whole, section, kept)
    if numbers is None:
        return data
    parts = [
        replace(part, groups=numbers[index])
        for part, index in ((data.train, train), (data.test, test))
    ]
    return replace(data, train=parts[0], test=parts[1], group_names=group_names)


def _groups(
    table: Any, section: "DataSection", kept: Int64[np.ndarray, "M"]
) -> tuple[tuple[str, ...], Int64[np.ndarray, "M"] | None]:
    """Return the groups that rows with a target belong to, by name, and the number of each row's,
    where they have such.

    Groups that rows are split by may be very many; then they are not told apart beyond the split.
    """
    column = section.group_column
    if column is None:
        return (), None
    field = "data.group" if section.calibration_group is None else "data.calibration_group"
    values = values_of(table.column(column), column, "categorical")
    _refuse_missing([values[i] for i in kept.tolist()], field, column)
    names, numbers = np.unique([str(values[i]) for i in kept.tolist()], return_inverse=True)
    if len(names) > MAX_GROUPS:
        if section.calibration_group is None:
            return (), None
        raise InvalidInput(
            field, f"a column of at most {MAX_GROUPS} groups", f"{column!r} of {len(names)}"[:200]
        )
    return tuple(names.tolist()), numbers.astype(np.int64)


def _ids(column: Any, index: Int64[np.ndarray, "R"]) -> Shaped[np.ndarray, "R"]:
    """Return what a column calls rows of these numbers; one without a value is called by its
    number."""
    given = column.to_pylist()
    return np.array([str(row) if given[row] is None else _id(given[row]) for row in index.tolist()])


def _id(value: Any) -> str:
    return category_text(value) if isinstance(value, str | int | float) else str(value)


def _keys(
    table: Any, section: "DataSection", given: Numbers | Categories, kept: Int64[np.ndarray, "M"]
) -> Keys:
    """Return what rows with a target are split by."""
    if section.group is not None:
        groups = values_of(table.column(section.group), section.group, "categorical")
        _refuse_missing([groups[i] for i in kept.tolist()], "data.group", section.group)
        return Keys(
            groups=np.unique([str(groups[i]) for i in kept.tolist()], return_inverse=True)[1]
        )
    if section.time is not None:
        table, _ = with_times(table, {section.time}, {}, section.date_format)
        times = values_of(table.column(section.time), section.time, "numeric")
        assert isinstance(times, np.ndarray)
        _refuse_missing(
            [None if t != t else t for t in times[kept].tolist()], "data.time", section.time
        )
        return Keys(times=times[kept])
    if section.is_stratified and isinstance(given, list):
        return Keys(
            labels=np.unique([str(given[i]) for i in kept.tolist()], return_inverse=True)[1]
        )
    return Keys()


def _refuse_missing(values: Sequence[str | float | None], field: str, name: str) -> None:
    absent = next((row for row, value in enumerate(values) if value is None), None)
    if absent is not None:
        raise InvalidInput(
            field,
            f"a value of {name} in every row with a target",
            f"none in the {absent}th of these",
        )


def _encoded(
    table: Table,
    y: np.ndarray,
    y_test: np.ndarray,
    classes: tuple[str, ...],
    train: Int64[np.ndarray, "R"],
    test: Int64[np.ndarray, "T"],
    sizes: SplitSizes,
    known: Columns,
    ties: Keys | None = None,
) -> Dataset:
    """Encode a table's rows by known columns or, without them, by what the training split says of
    its columns."""
    names = {column.name for column in known}
    if known and names != set(table.columns):
        differing = sorted(names ^ set(table.columns))
        expected = f"the columns {sorted(names)[:20]} and no others (`ignored` in data.columns leaves one out)"
        raise InvalidInput("data.source", expected, f"a difference in {differing[:20]}")
    of_train = (ties or Keys()).take(train)
    columns = known or fit_columns(table.take(train[sizes.split(len(train), of_train)[-1]]))
    x, x_test = (encode(columns, table.take(index).columns) for index in (train, test))
    for part in (x, x_test):
        if not np.isfinite(part).all():
            raise InvalidInput(
                "data.source", "numbers in float32's range once standardised", "some out of it"
            )
    shape = (sum(column_width(column) for column in columns),)
    return Dataset(
        Rows(x, y),
        Rows(x_test, y_test),
        shape,
        classes,
        float(x.min()),
        float(x.max()),
        tuple(columns),
    )


def _tokenised(
    table: Table,
    y: np.ndarray,
    y_test: np.ndarray,
    classes: tuple[str, ...],
    train: Int64[np.ndarray, "R"],
    test: Int64[np.ndarray, "T"],
    texts: TextRows,
) -> Dataset:
    """Return a table's text as rows of ids."""
    x, x_test = (texts.encode(_texts(table.take(index), texts)) for index in (train, test))
    return Dataset(
        Rows(x, y),
        Rows(x_test, y_test),
        shape=(texts.spec.max_tokens,),
        classes=classes,
        minimum=0.0,
        maximum=float(texts.encoder.vocabulary - 1),
        takes_ids=True,
        text=texts.spec,
        tokenizer=texts.tokenizer,
    )


def _texts(table: Table, texts: TextRows) -> Categories:
    values = table.columns[texts.spec.column]
    assert isinstance(values, list)
    return values


def _with_target(values: Numbers | Categories, name: str) -> Int64[np.ndarray, "M"]:
    """Return the rows that have a target, and say how many have none."""
    is_there = (
        ~np.isnan(values)
        if isinstance(values, np.ndarray)
        else np.array([v is not None for v in values])
    )
    kept = np.flatnonzero(is_there)
    if len(kept) < 2:
        raise InvalidInput(
            "data.target",
            f"a value of {name} in at least two rows",
            f"{len(kept)} of {len(values)}",
        )
    if len(kept) < len(values):
        log.info(
            "dropped %d of %d rows, which have no value of %s",
            len(values) - len(kept),
            len(values),
            name,
        )
    return kept


def _targets(values: Numbers) -> Float32[np.ndarray, "N"]:
    with np.errstate(over="ignore"):
        targets = values.astype(np.float32)
    if not np.isfinite(targets).all():
        raise InvalidInput("data.target", "numbers in float32's range", "some out of it")
    return targets


def _text(path: Path, ndmin: int) -> Float64[np.ndarray, "..."]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file, which is refused below
            array = np.loadtxt(path, dtype=np.float64, ndmin=ndmin)  # type: ignore[call-overload]
    except (OSError, ValueError) as error:
        raise InvalidInput(
            "data.source", f"a readable file of numbers, {str(path)!r}", _reason(error)
        ) from None
    if array.size == 0 or not np.isfinite(array).all():
        raise InvalidInput("data.source", f"finite numbers in {str(path)!r}", "none or others")
    return array


def _index(path: Path, length: int) -> Int64[np.ndarray, "M"]:
    values = _text(path, 1)
    index = values.astype(np.int64)
    if values.ndim != 1 or (index != values).any() or index.min() < 0 or index.max() >= length:
        raise InvalidInput(
            "data.source", f"whole numbers from 0 to {length - 1} in {str(path)!r}", "others"
        )
    return index


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0][:200]
