"""Loaders for tables: `csv:FILE`, `parquet:FILE` and `uci:DIR`."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int64, Shaped
from pyarrow import types

from model_store.artifacts.manifest import CategoricalColumn, column_width
from model_store.errors import InvalidInput
from model_store.sources.cells import Categories, Numbers, category_text
from model_store.sources.columns import Columns, encode, fill_missing, presence
from model_store.sources.parquet import is_list
from training import log
from training.data.cells import find_index_column, find_times, read_column, stored_style
from training.data.columns import Table, fit_columns, take
from training.data.rows import Dataset, Rows, class_numbers, classes_without
from training.data.splitting import Keys, SplitSizes, hold_out
from training.data.targets import needs_float64
from training.data.texts import TextRows

if TYPE_CHECKING:
    from training.recipe import DataSection

MAX_GROUPS = 1000  # for calibration and evaluation by group

Index = Int64[np.ndarray, "M"]


def id_lists(table: pa.Table, task: str, section: "DataSection") -> dict[str, np.ndarray]:
    target, names = section.target, table.column_names
    if target is None or target not in names:
        raise InvalidInput("data.target", f"one of the columns {names[:20]}", repr(target)[:100])
    used = [name for name in names if section.columns.get(name) != "ignored"]
    lists = [name for name in used if is_list(table.schema.field(name).type)]
    if len(lists) != 1 or not types.is_integer(table.schema.field(lists[0]).type.value_type):
        expected = "one column of lists of integers (set others to `ignored` in data.columns)"
        raise InvalidInput("data.source", expected, f"{lists or used}"[:200])
    unused = [name for name in used if name not in (lists[0], target)]
    if unused:
        log.info("ignoring %s, because rows are the ids of %r", ", ".join(unused)[:300], lists[0])
    y, _ = read_column(table.column(target), target, _target_kind(task))
    index = _rows_with_target(y, target)
    rows = table.column(lists[0]).combine_chunks().take(index)
    lengths = rows.value_lengths().to_numpy(zero_copy_only=False)  # NaN for missing lists
    for row, length in enumerate(lengths.tolist()):
        if length != lengths[0] or rows[row].values.null_count:
            expected = f"{lengths[0]:.0f} ids in every row, as in the first"
            received = f"{length:.0f} ids, or missing ids, in row {index[row]}"
            raise InvalidInput(f"column {lists[0]}", expected, received)
    x = rows.flatten().to_numpy(zero_copy_only=False).reshape(len(index), int(lengths[0]))
    return {"x": x, "y": np.array(take(y, index))}


def uci(folder: Path, split: int, sizes: SplitSizes, columns: Columns = ()) -> Dataset:
    """Load a standard split of a UCI regression set (Hernandez-Lobato and Adams 2015).

    `data.txt` contains all rows. `index_features.txt` and `index_target.txt` list columns, and
    `index_train_I.txt` and `index_test_I.txt` list the rows of split I. Columns are named x0, x1,
    ...
    """
    data = _read_numbers(folder / "data.txt", 2)

    def index(name: str, length: int) -> Index:
        return _read_index(folder / f"index_{name}.txt", length)

    features, target = (index(part, data.shape[1]) for part in ("features", "target"))
    if len(target) != 1:
        raise InvalidInput("index_target.txt", "one column", f"{len(target)}")
    train, test = (index(f"{part}_{split}", len(data)) for part in ("train", "test"))
    if set(train.tolist()) & set(test.tolist()):
        expected = "rows that are not training rows"
        raise InvalidInput(f"index_test_{split}.txt", expected, "training rows")
    table = Table({f"x{i}": data[:, column] for i, column in enumerate(features.tolist())})
    y = data[:, target[0]].astype(np.float32)
    return _encode(table, _Targets(y[train], y[test], (), train, test), sizes, columns)


@dataclass(frozen=True, eq=False)
class _Targets:
    y: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]
    train: Int64[np.ndarray, "R"]
    test: Int64[np.ndarray, "T"]
    left_out: Int64[np.ndarray, "L"] | None = None


def make_table_dataset(
    table: pa.Table,
    task: str,
    section: "DataSection",
    sizes: SplitSizes,
    version_columns: Columns = (),
    texts: TextRows | None = None,
) -> Dataset:
    features = _features(table, section, version_columns)
    assert section.target is not None
    categorical = [c for c in version_columns if isinstance(c, CategoricalColumn)]
    kinds: dict[str, str] = {c.name: c.kind for c in categorical}
    kinds |= section.columns
    if texts is not None:
        unused = [name for name in features if name != section.text]
        if unused:
            names = ", ".join(unused)[:300]
            log.info("ignoring %s, because the model reads only %r", names, section.text)
        features = [texts.spec.column]
        kinds |= {texts.spec.column: "text"}
    rows = Table({})
    for name in features:
        kind, column = kinds.get(name), table.column(name)
        rows.columns[name], form = read_column(column, name, kind, section.date_format)
        rows.formats[name] = stored_style(table, name) if form is None else form
    values, _ = read_column(table.column(section.target), section.target, _target_kind(task))
    index = _rows_with_target(values, section.target)
    split_keys = _keys(table, section, take(values, index), index)
    targets = _targets(take(values, index), section, split_keys)
    rows = rows if len(index) == table.num_rows else rows.take(index)
    if texts is None:
        data = _encode(rows, targets, sizes, version_columns, split_keys)
    else:
        data = _tokenise(rows, targets, texts)
    if targets.left_out is not None:
        out = rows.take(targets.left_out).columns
        x = encode(data.columns, out) if texts is None else texts.encode_table(out)
        fill_missing(x, data.columns)
        data = replace(data, left_out=x)
    ids: np.ndarray = index[targets.train]
    if section.id is not None:
        ids = _ids(table.column(section.id), ids)
    group_names, groups = _groups(table, section, index)
    train, test = replace(data.train, ids=ids), data.test
    if groups is not None:
        train = replace(train, groups=groups[targets.train])
        test = replace(test, groups=groups[targets.test])
    split_by = split_keys.take(targets.train)
    return replace(
        data,
        train=train,
        test=test,
        groups=split_by.groups,
        times=split_by.times,
        group_names=group_names,
        missing_values=tuple(section.missing_values),
        id_column=section.id,
        ignored=tuple(name for name in table.column_names if name not in features),
        is_held_out=True,
    )


def _features(table: pa.Table, section: "DataSection", version_columns: Columns) -> list[str]:
    names, target = list(table.column_names), section.target
    keys = [("data.group", section.group), ("data.time", section.time), ("data.id", section.id)]
    group = ("data.calibration_group", section.calibration_group)
    special = [*keys, group, ("data.text", section.text)]
    recipe_names = {target, *(name for _, name in special[:-1]), *section.columns}
    used_names = {*recipe_names, *(column.name for column in version_columns)}
    index = find_index_column(names, {name for name in used_names if name})
    if index is not None:
        log.info("ignoring the column %r, which is pandas' unnamed index", index)
        names.remove(index)
    if target is None:
        raise InvalidInput("data.target", "the name of a column (or --target COLUMN)", "none")
    check_names(names)
    configured = [
        ("data.columns", name)
        for name, kind in section.columns.items()
        if not version_columns or kind != "ignored"
    ]
    for field, name in [("data.target", target), *configured, *special]:
        if name is not None and name not in names:
            raise InvalidInput(field, f"one of the columns {names[:20]}", repr(name)[:100])
    for field, name in special:
        if name == target:
            raise InvalidInput(field, "a column other than the target", repr(name)[:100])
    if section.columns.get(target) is not None:
        raise InvalidInput("data.columns", "kinds without the target's", repr(target)[:100])
    if table.num_rows < 2:
        raise InvalidInput("data.source", "at least two rows", f"{table.num_rows}")
    keyed = {name for _, name in keys if name not in section.columns}
    features = [
        name
        for name in names
        if name != target and name not in keyed and section.columns.get(name) != "ignored"
    ]
    if not features:
        raise InvalidInput("data.source", "a column in addition to the target", "none")
    return features


def check_names(names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        received = f"{repeated[0]!r} more than once" if repeated[0] else "a column without a name"
        raise InvalidInput("data.source", "columns with unique names", received[:100])


def _targets(values: Numbers | Categories, section: "DataSection", split_keys: Keys) -> _Targets:
    train, test = hold_out(len(values), section.test_fraction, split_keys)
    if isinstance(values, np.ndarray):
        if section.leave_out:
            expected = "an empty list for regression, which has no classes"
            raise InvalidInput("data.leave_out", expected, str(section.leave_out)[:80])
        with np.errstate(over="ignore"):
            y = values.astype(np.float32)
        if not np.isfinite(y).all():
            raise InvalidInput("data.target", "numbers in float32's range", "larger numbers")
        y = values if needs_float64(values) else y
        return _Targets(y[train], y[test], (), train, test)
    left_out = None
    if section.leave_out:
        classes_without(sorted(set(map(str, values))), section.leave_out)
        is_out = np.array([label in section.leave_out for label in values])
        left_out, train, test = test[is_out[test]], train[~is_out[train]], test[~is_out[test]]
    numbers = class_numbers(take(values, train), take(values, test), "data.target")
    return _Targets(*numbers, train, test, left_out)


def _groups(
    table: pa.Table, section: "DataSection", index: Index
) -> tuple[tuple[str, ...], Index | None]:
    """Return the group names and each row's group number.

    Without a calibration group, more than `MAX_GROUPS` groups are no error but are not returned.
    """
    column = section.group_column
    if column is None:
        return (), None
    field = "data.group" if section.calibration_group is None else "data.calibration_group"
    names, numbers = _number_groups(table, column, field, index)
    if len(names) <= MAX_GROUPS:
        return tuple(names.tolist()), numbers
    if section.calibration_group is None:
        return (), None
    expected = f"a column of up to {MAX_GROUPS} groups"
    raise InvalidInput(field, expected, f"{len(names)} groups in {column!r}"[:200])


def _number_groups(
    table: pa.Table, column: str, field: str, index: Index
) -> tuple[Shaped[np.ndarray, "G"], Index]:
    values = take(read_column(table.column(column), column, "categorical")[0], index)
    _check_complete(values, field, column)
    names, numbers = np.unique(values, return_inverse=True)
    return names, numbers.astype(np.int64)


def _keys(
    table: pa.Table, section: "DataSection", values: Numbers | Categories, index: Index
) -> Keys:
    if section.group is not None:
        return Keys(groups=_number_groups(table, section.group, "data.group", index)[1])
    if section.time is not None:
        column, name = table.column(section.time), section.time
        found = find_times(column, name, section.date_format)
        times = take(found[0] if found else read_column(column, name, "numeric")[0], index)
        _check_complete([None if t != t else t for t in times.tolist()], "data.time", section.time)
        return Keys(times=times)
    if section.is_stratified and isinstance(values, list):
        return Keys(labels=np.unique(np.array(values), return_inverse=True)[1])
    return Keys()


def _check_complete(values: Sequence[Any], field: str, name: str) -> None:
    absent = next((row for row, value in enumerate(values) if value is None), None)
    if absent is not None:
        expected = f"a value of {name} in every row with a target"
        raise InvalidInput(field, expected, f"none in row {absent} of these")


def _encode(
    table: Table,
    targets: _Targets,
    sizes: SplitSizes,
    version_columns: Columns,
    split_keys: Keys | None = None,
) -> Dataset:
    names, train = {column.name for column in version_columns}, targets.train
    if version_columns and names != set(table.columns):
        differing = sorted(names ^ set(table.columns))
        expected = f"only the columns {sorted(names)[:20]} (`ignored` in data.columns removes one)"
        raise InvalidInput("data.source", expected, f"a difference in {differing[:20]}")
    train_keys = (split_keys or Keys()).take(train)
    columns = version_columns
    if not columns:
        fit_rows = train[sizes.split(len(train), train_keys)[-1]]
        columns = fit_columns(table, fit_rows)
    for column in columns:
        absent = int((~presence(table.columns[column.name])).sum())
        if absent and column.missing is False:
            message = "%d rows lack %s, which all training rows have; using its usual value"
            log.info(message, absent, column.name)
    encoded = encode(columns, table.columns)
    fill_missing(encoded, columns)
    x, x_test = encoded[train], encoded[targets.test]
    if not (np.isfinite(x).all() and np.isfinite(x_test).all()):
        expected = "numbers in float32's range after standardisation"
        raise InvalidInput("data.source", expected, "larger numbers")
    return Dataset(
        Rows(x, targets.y),
        Rows(x_test, targets.y_test),
        shape=(sum(map(column_width, columns)),),
        classes=targets.classes,
        minimum=float(x.min()),
        maximum=float(x.max()),
        columns=tuple(columns),
    )


def _tokenise(table: Table, targets: _Targets, texts: TextRows) -> Dataset:
    x, x_test = (
        texts.encode_table(table.take(part).columns) for part in (targets.train, targets.test)
    )
    return Dataset(
        Rows(x, targets.y),
        Rows(x_test, targets.y_test),
        shape=(texts.spec.max_tokens,),
        classes=targets.classes,
        minimum=0.0,
        maximum=float(texts.encoder.vocabulary - 1),
        takes_ids=True,
        text=texts.spec,
        tokenizer=texts.tokenizer,
    )


def _ids(column: pa.ChunkedArray, index: Index) -> Shaped[np.ndarray, "M"]:
    values = column.to_pylist()
    ids = [str(row) if values[row] is None else _id(values[row]) for row in index.tolist()]
    return np.array(ids)


def _id(value: Any) -> str:
    return category_text(value) if isinstance(value, int | float) else str(value)


def _target_kind(task: str) -> str:
    return "numeric" if task == "regression" else "categorical"


def _rows_with_target(values: Numbers | Categories, name: str) -> Index:
    index, rows = np.flatnonzero(presence(values)), len(values)
    if len(index) < 2:
        expected = f"a value of {name} in at least two rows"
        raise InvalidInput("data.target", expected, f"{len(index)} of {rows}")
    if len(index) < rows:
        missing = rows - len(index)
        log.info("dropping %d of %d rows without a value of %s", missing, rows, name)
    return index


def _read_numbers(path: Path, ndmin: int) -> Float64[np.ndarray, "..."]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # An empty file is an error below.
            array = np.loadtxt(path, dtype=np.float64, ndmin=ndmin)  # type: ignore[call-overload]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        expected = f"a readable file of numbers, {str(path)!r}"
        raise InvalidInput("data.source", expected, reason.splitlines()[0][:200]) from None
    if array.size == 0 or not np.isfinite(array).all():
        received = "other numbers" if array.size else "an empty file"
        raise InvalidInput("data.source", f"finite numbers in {str(path)!r}", received)
    return array


def _read_index(path: Path, length: int) -> Index:
    values = _read_numbers(path, 1)
    index = values.astype(np.int64)
    if values.ndim != 1 or (index != values).any() or index.min() < 0 or index.max() >= length:
        expected = f"whole numbers from 0 to {length - 1} in {str(path)!r}"
        raise InvalidInput("data.source", expected, "other numbers")
    return index
