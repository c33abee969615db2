"""Loaders for tables: `csv:FILE` and `parquet:FILE`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Float64, Int64, Shaped

from model_store.artifacts.manifest import LARGEST_ID, TextSpec, TimeColumn
from model_store.errors import InvalidInput, one_line, refuse_unreadable
from model_store.sources.cells import Categories, Numbers, category_text
from model_store.sources.columns import Columns, column_at, encode, fill_missing, presence
from training import log
from training.data.arrays import resolve_path
from training.data.cells import column_names
from training.data.columns import Values, find_times, fit_column, read_column, take
from training.data.rows import (
    NO_KEYS,
    Dataset,
    Keys,
    Rows,
    SplitSizes,
    class_numbers,
    classes_without,
    hold_out,
    split_sizes,
)
from training.data.targets import needs_float64

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder
    from training.recipe import Recipe
    from training.sections import DataSection

MAX_GROUPS = 1000  # for calibration and evaluation by group

Index = Int64[np.ndarray, "M"]


@dataclass(frozen=True, eq=False)
class TextRows:
    encoder: "TextEncoder"
    tokenizer: bytes

    @classmethod
    def load(cls, section: "DataSection", root: Path, tokenizer: bytes | None) -> "TextRows":
        from model_store.sources.text import TextEncoder, text_spec  # This import is slow.

        assert section.text is not None
        content = _content(section, root) if tokenizer is None else tokenizer
        try:
            spec = text_spec(content, section.text, section.max_tokens)
            encoder = TextEncoder(content, spec)
        except ValueError as error:
            expected, _, received = one_line(error).removeprefix("expected ").partition(", got ")
            raise InvalidInput("data.tokenizer", expected, received) from None
        if encoder.vocabulary > LARGEST_ID + 1:
            largest = f"{encoder.vocabulary - 1}"
            raise InvalidInput("data.tokenizer", f"token ids up to {LARGEST_ID}", largest)
        return cls(encoder, content)

    @property
    def spec(self) -> TextSpec:
        return self.encoder.spec

    def encode(self, texts: Sequence[str | None]) -> Float32[np.ndarray, "N I"]:
        """Tokenise texts, truncating long ones and treating missing ones as empty."""
        x = np.empty((len(texts), self.spec.max_tokens), dtype=np.float32)
        truncated_texts = 0
        for n, text in enumerate(texts):
            field = f"column {self.spec.column}, row {n}"
            self.encoder.bytes_for(text or "", field)
            try:
                x[n], is_truncated = self.encoder.encoded(text or "")
            except ValueError:
                expected = "text that the tokenizer can encode"
                raise InvalidInput(field, expected, "other text") from None
            truncated_texts += is_truncated
        if truncated_texts:
            max_tokens = self.spec.max_tokens
            message = "truncating %d of %d texts to %d tokens"
            log.info(message, truncated_texts, len(texts), max_tokens)
        return x


def _content(section: "DataSection", root: Path) -> bytes:
    assert section.tokenizer is not None
    from model_store.sources.text import MAX_TOKENIZER_BYTES

    path = resolve_path(root, section.tokenizer, "data.tokenizer")
    expected = f"a tokenizer.json at {path}"
    with refuse_unreadable("data.tokenizer", expected), path.open("rb") as file:
        return file.read(MAX_TOKENIZER_BYTES + 1)


@dataclass(frozen=True, eq=False)
class Targets:
    y: np.ndarray
    y_test: np.ndarray
    classes: tuple[str, ...]
    train: Int64[np.ndarray, "R"]
    test: Int64[np.ndarray, "T"]
    left_out: Int64[np.ndarray, "L"] | None = None

    def dataset(
        self, x: Float32[np.ndarray, "N I"], low: float, high: float, **fields: Any
    ) -> Dataset:
        return Dataset(
            Rows(x[self.train], self.y),
            Rows(x[self.test], self.y_test),
            (x.shape[1],),
            self.classes,
            low,
            high,
            left_out=None if self.left_out is None else x[self.left_out],
            **fields,
        )


def make_table_dataset(
    table: pa.Table, recipe: "Recipe", version_columns: Columns = (), texts: TextRows | None = None
) -> Dataset:
    section = recipe.data
    features = _features(table, section, version_columns)
    assert section.target is not None
    kinds: dict[str, str] = {**section.columns}
    if texts is not None:
        unused = [name for name in features if name != section.text]
        if unused:
            names = ", ".join(unused)[:300]
            log.info("ignoring %s, because the model reads only %r", names, section.text)
        features = [texts.spec.column]
        kinds |= {texts.spec.column: "text"}
    values, index = _read_target(table, section.target, recipe.task)
    formats = dict.fromkeys(table.column_names, section.date_format)
    if section.date_format is None:
        formats |= {c.name: c.written for c in version_columns if isinstance(c, TimeColumn)}
    split_keys = _keys(table, section, values, index, formats)
    targets = _targets(values, section, split_keys)
    rows = {
        name: read_column(table, name, kinds.get(name), formats[name]).take(index)
        for name in features
    }
    if texts is None:
        data = encode_table(rows, targets, split_sizes(recipe), version_columns, split_keys)
    else:
        x = texts.encode(cast("Categories", rows[texts.spec.column].cells))
        ids = {"takes_ids": True, "text": texts.spec, "tokenizer": texts.tokenizer}
        data = targets.dataset(x, 0.0, float(texts.encoder.vocabulary - 1), **ids)
    row_ids: np.ndarray = index[targets.train]
    if section.id is not None:
        row_ids = _ids(table.column(section.id), row_ids)
    group_names, groups = _groups(table, section, index)
    weights = None
    if section.weight is not None:
        weights = _weights(table, section.weight, index)[targets.train]
    train, test = replace(data.train, ids=row_ids, weights=weights), data.test
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
    target = section.target
    keys = [(f"data.{key}", getattr(section, key)) for key in ("group", "time", "id", "weight")]
    group = ("data.calibration_group", section.calibration_group)
    special = [*keys, group, ("data.text", section.text)]
    if target is None:
        raise InvalidInput("data.target", "the name of a column (or --target COLUMN)", "none")
    recipe_names = {target, *(name for _, name in special[:-1]), *section.columns}
    names = column_names(table, {*recipe_names, *(column.name for column in version_columns)})
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


def _targets(values: Numbers | Categories, section: "DataSection", split_keys: Keys) -> Targets:
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
        return Targets(y[train], y[test], (), train, test)
    left_out = None
    if section.leave_out:
        classes_without(sorted(set(map(str, values))), section.leave_out)
        is_out = np.array([label in section.leave_out for label in values])
        left_out, train, test = test[is_out[test]], train[~is_out[train]], test[~is_out[test]]
    numbers = class_numbers(take(values, train), take(values, test), "data.target")
    return Targets(*numbers, train, test, left_out)


def _groups(
    table: pa.Table, section: "DataSection", index: Index
) -> tuple[tuple[str, ...], Index | None]:
    column = section.group_column
    if column is None:
        return (), None
    field = "data.group" if section.calibration_group is None else "data.calibration_group"
    names, numbers = _number_groups(table, column, field, index)
    return (tuple(names.tolist()), numbers) if len(names) <= MAX_GROUPS else ((), None)


def _number_groups(
    table: pa.Table, column: str, field: str, index: Index
) -> tuple[Shaped[np.ndarray, "G"], Index]:
    values = take(read_column(table, column, "categorical")[0], index)
    _check_complete(values, field, column)
    names, numbers = np.unique(values, return_inverse=True)
    return names, numbers.astype(np.int64)


def _keys(
    table: pa.Table,
    section: "DataSection",
    values: Numbers | Categories,
    index: Index,
    date_formats: Mapping[str, str | None],
) -> Keys:
    if section.group is not None:
        return Keys(groups=_number_groups(table, section.group, "data.group", index)[1])
    if section.time is not None:
        name = section.time
        times, _ = find_times(table.column(name), name, date_formats[name]) or read_column(
            table, name, "numeric"
        )
        times = take(times, index)
        _check_complete([None if t != t else t for t in times.tolist()], "data.time", name)
        return Keys(times=times)
    if section.is_stratified and isinstance(values, list):
        return Keys(labels=np.unique(np.array(values), return_inverse=True)[1])
    return Keys()


def _weights(table: pa.Table, name: str, index: Index) -> Float64[np.ndarray, "N"]:
    weights, _ = read_column(table, name, "numeric")
    weights = np.asarray(take(weights, index), dtype=np.float64)
    if not (np.isfinite(weights).all() and weights.min() >= 0 < weights.max()):
        expected = f"numbers of at least 0 in column {name}, some of them larger"
        raise InvalidInput("data.weight", expected, "other values")
    return weights


def _check_complete(values: Sequence[Any], field: str, name: str) -> None:
    absent = next((row for row, value in enumerate(values) if value is None), None)
    if absent is not None:
        expected = f"a value of {name} in every row with a target"
        raise InvalidInput(field, expected, f"none in row {absent} of these")


def encode_table(
    table: Mapping[str, Values],
    targets: Targets,
    sizes: SplitSizes,
    version_columns: Columns,
    split_keys: Keys = NO_KEYS,
) -> Dataset:
    names, train = {column.name for column in version_columns}, targets.train
    if version_columns and names != table.keys():
        differing = sorted(names ^ table.keys())
        expected = f"only the columns {sorted(names)[:20]} (`ignored` in data.columns removes one)"
        raise InvalidInput("data.source", expected, f"a difference in {differing[:20]}")
    train_keys = split_keys.take(train)
    columns = version_columns
    if not columns:
        fit_rows = train[sizes.split(len(train), train_keys)[-1]]
        columns = [fit_column(name, column.take(fit_rows)) for name, column in table.items()]
    cells = {name: column.cells for name, column in table.items()}
    for column in columns:
        absent = int((~presence(cells[column.name])).sum())
        if absent and column.missing is False:
            message = "%d rows lack %s, which all training rows have; using its usual value"
            log.info(message, absent, column.name)
    x = encode(columns, cells)
    fill_missing(x, columns)
    if not np.isfinite(x).all():
        row, place = np.argwhere(~np.isfinite(x))[0].tolist()
        name = column_at(columns, place).name
        expected = f"numbers in float32's range after standardisation in column {name!r}"
        raise InvalidInput("data.source", expected, f"{cells[name][row]:g}")
    train_x = x[train]
    return targets.dataset(x, float(train_x.min()), float(train_x.max()), columns=tuple(columns))


def _ids(column: pa.ChunkedArray, index: Index) -> Shaped[np.ndarray, "M"]:
    ids = []
    for row, value in zip(index.tolist(), column.take(index).to_pylist(), strict=True):
        text = category_text(value) if isinstance(value, int | float) else str(value)
        ids.append(str(row) if value is None else text)
    return np.array(ids)


def _read_target(table: pa.Table, name: str, task: str) -> tuple[Numbers | Categories, Index]:
    kind = "numeric" if task == "regression" else "categorical"
    values, _ = read_column(table, name, kind)
    index, rows = np.flatnonzero(presence(values)), table.num_rows
    if len(index) < 2:
        expected = f"a value of {name} in at least two rows"
        raise InvalidInput("data.target", expected, f"{len(index)} of {rows}")
    if len(index) < rows:
        missing = rows - len(index)
        log.info("dropping %d of %d rows without a value of %s", missing, rows, name)
    return take(values, index), index
