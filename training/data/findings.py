"""Inspect a source of data: its task, its columns, and warnings (`dubito inspect` and `fit`)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8

from model_store.errors import InvalidInput
from model_store.sources.cells import is_number
from model_store.sources.columns import category_text, presence
from model_store.sources.npy import read_npz
from model_store.types import Task
from training.data.arrays import SPLIT, path_below, refuse_workbook
from training.data.cells import csv_table, index_column, parquet_table, values_of
from training.data.column_findings import ColumnFinding, alike, find, leak_of
from training.data.images import survey
from training.data.rows import Rows, Splits
from training.data.tables import check_names
from training.recipe import DataSection

MAX_NUMERIC_CLASSES = 10  # more distinct whole numbers are a regression
MIN_CLASS_ROWS = 10  # below which a class is listed
MIN_STEPS = 1000.0  # of float32, in a standard deviation of the target
MAX_PIXELS = 64  # per side, for large images or several sizes
NEAR_DIGITS = 3  # decimals that are compared, in standard deviations
CHUNK_ROWS = 1024
MIN_SHARE = 0.01  # of a split, from which duplicates are reported
ADVICE = (
    "calibration and test rows that the fit has seen look surer than new ones will; "
    "name what tells things apart (data.group or --group COLUMN)"
)
KINDS = ("csv", "parquet", "npz", "images")
USED_KINDS = ("numeric", "categorical", "time")
SHOWN = 12  # names in a line
NAME_WIDTH = 24


@dataclass(frozen=True, eq=False)
class Findings:
    source: str
    rows: int
    task: Task | None
    why: str
    columns: list[ColumnFinding] = field(default_factory=list)
    target: str | None = None
    shape: tuple[int, ...] = ()
    classes: dict[str, int] = field(default_factory=dict)
    targets: np.ndarray | None = None  # of a regression
    labels: list[str] | None = None  # of a classification's table, a row each
    image_size: tuple[int, int] | None = None  # that images are to be resized to
    has_test: bool = False
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def used(self) -> list[ColumnFinding]:
        """The columns that a model takes."""
        return [column for column in self.columns if column.kind not in ("ignored", "refused")]

    def report(self, is_full: bool) -> list[str]:
        """Describe the source in lines: every column, or only those that are left out."""
        shape = f" of shape {self.shape}" if self.shape else ""
        task = self.task or "no task"
        lines = [f"{self.source}: {self.rows} rows{shape}; {task}: {self.why}"]
        if self.classes:
            counts = [f"{label} {count}" for label, count in self.classes.items()]
            lines.append(f"{len(counts)} classes: {_shorten(counts, ', ')}")
        elif self.targets is not None and len(self.targets):
            y = self.targets
            moments = f"mean {y.mean():.4g}, standard deviation {y.std():.4g}"
            lines.append(f"target: {y.min():.4g} to {y.max():.4g}, {moments}")
        lines += self._all_columns() if is_full else self._left_out()
        return [*lines, *self.notes, *(f"! {warning}" for warning in self.warnings)]

    def _all_columns(self) -> list[str]:
        if not self.columns:
            return []
        lines = ["columns:"]
        width = min(NAME_WIDTH, max(len(column.name) for column in self.columns))
        for column in self.columns:
            missing = f"; {100 * column.missing:.2g} % missing" if column.missing else ""
            name = f"  {column.name[:width]:<{width}}  {column.kind:<11}"
            lines.append(f"{name}  {column.why}{missing}")
            if column.kind != "ignored":  # whose notes are among the warnings
                lines += [f"  {'':<{width}}  {'':<11}  ! {note}" for note in column.notes]
        tails = sorted((c for c in self.used if c.tail > 5), key=lambda column: -column.tail)[:3]
        if tails:
            shown = ", ".join(f"{column.name} ({np.round(column.tail):.6g})" for column in tails)
            unit = "interquartile ranges from the median to the furthest value"
            lines.append(f"heaviest tails ({unit}): {shown}")
        return lines

    def _left_out(self) -> list[str]:
        if not self.columns:
            return []
        kinds = [column.kind for column in self.columns]
        counts = [f"{kinds.count(kind)} {kind}" for kind in USED_KINDS if kind in kinds]
        lines = [f"columns: {', '.join(counts) or 'none'}"]
        ignored = [f"{c.name} ({c.why})" for c in self.columns if c.kind == "ignored"]
        if ignored:
            lines.append(f"left out: {_shorten(ignored, '; ')}")
        notes = [f"! column {c.name}: {note}" for c in self.columns for note in c.notes]
        return lines + notes[:SHOWN]


def _shorten(texts: list[str], separator: str) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return separator.join(texts[:SHOWN]) + more


def findings_of(section: DataSection, root: Path, task: Task | None = None) -> Findings:
    """Inspect a source; problems become findings where possible, not errors."""
    refuse_workbook(section.source, "--data")
    kind, _, rest = section.source.partition(":")
    if kind not in KINDS or not rest:
        expected = "csv:FILE, parquet:FILE, npz:FILE or images:FOLDER"
        raise InvalidInput("--data", expected, repr(section.source))
    path = path_below(root, rest)
    if kind == "images":
        return _of_images(section, path)
    if kind == "npz":
        return _of_arrays(section, path, task)
    read = csv_table if kind == "csv" else parquet_table
    return _of_table(section, read(path, None, section), task)


def _of_table(section: DataSection, table: Any, task: Task | None) -> Findings:
    names, notes = list(table.column_names), []
    keys = {"--target": section.target, "--group": section.group, "--time": section.time}
    index = index_column(names, {name for name in (*keys.values(), *section.columns) if name})
    if index is not None:
        notes.append(f"column {index!r} is left out: pandas' unnamed index")
        names.remove(index)
    check_names(names)
    for key, name in keys.items():
        if name is not None and name not in names:
            raise InvalidInput(key, f"one of the columns {names[:20]}", repr(name)[:100])
    target, rows = None, np.arange(table.num_rows)
    if section.target is not None:
        target = find(table, section.target, section.date_format, rows)
        rows = np.flatnonzero(presence(target.values))
        if len(rows) < table.num_rows:
            dropped = f"{table.num_rows - len(rows)} rows have no value of {section.target}"
            notes.append(f"{dropped} and are dropped")
            table = table.take(rows)
    keyed = set(keys.values()) - set(section.columns)
    columns = [
        find(table, name, section.date_format, rows, section.columns.get(name))
        for name in names
        if name not in keyed
    ]
    why = "no target is named (--target COLUMN)"
    found = Findings(section.source, len(rows), None, why, columns, section.target, notes=notes)
    for column in columns:
        if column.kind == "ignored" and column.why != "as told":
            found.warnings.extend(f"column {column.name} is left out: {n}" for n in column.notes)
    return found if target is None else _with_target(found, target, table.column(target.name), task)


def _with_target(
    found: Findings, target: ColumnFinding, column: Any, task: Task | None
) -> Findings:
    name = target.name
    if target.kind == "refused" and task is None:
        way_out = "(--task classification makes every value a class)"
        return replace(found, why=f"{target.why} {way_out}")
    task, why = (task, "as told") if task else task_of(target.values, name)
    found = replace(found, task=task, why=why)
    is_regression = task == "regression"
    if target.kind in ("time", "refused") and is_regression:
        raise InvalidInput(f"column {name}", "numbers or classes as the target", target.why)
    kind = "numeric" if is_regression else "categorical"
    values: Any = values_of(column, name, kind)
    if is_regression:
        found, y = replace(found, targets=values, warnings=_close_targets(values)), values
    else:
        counts = dict(Counter(values).most_common())
        found = replace(found, classes=counts, labels=values)
        y = np.unique(values, return_inverse=True)[1]
    features = {column.name: column.values for column in found.used}
    leaks = {feature: leak_of(values, y, is_regression) for feature, values in features.items()}
    warnings = [
        f"column {feature} may hold the target in other words: {leak}"
        for feature, leak in leaks.items()
        if leak is not None
    ]
    if isinstance(target.values, list) and task != "regression":
        warnings += _nearly_numbers(name, target.values)
    return replace(found, warnings=found.warnings + warnings + _rare(found.classes))


def _of_arrays(section: DataSection, path: Path, task: Task | None) -> Findings:
    arrays = read_npz(path)
    has_test = set(arrays) == set(SPLIT)
    x, y = (arrays.get(f"{name}_train" if has_test else name) for name in "xy")
    if x is None or y is None or y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        shapes = {name: array.shape for name, array in arrays.items()}
        expected = f"arrays x (N, ...) and y (N,), or {', '.join(SPLIT)}"
        raise InvalidInput("data.source", expected, str(shapes)[:200])
    values = [str(v) for v in y.tolist()] if y.dtype.kind == "U" else y.astype(np.float64)
    task, why = (task, "as told") if task else task_of(values, "y")
    found = Findings(section.source, len(x), task, why, shape=x.shape[1:], has_test=has_test)
    if task == "regression":
        return replace(found, targets=np.asarray(values, dtype=np.float64))
    classes = dict(Counter(map(category_text, y.tolist())).most_common())
    return replace(found, classes=classes, warnings=_rare(classes))


def _of_images(section: DataSection, path: Path) -> Findings:
    classes, sizes, is_grey, has_test = survey(path)
    notes, size = [], None
    width, height = next(iter(sizes))
    if len(sizes) > 1 or max(width, height) > MAX_PIXELS:
        widths, heights = (float(np.median([s[i] for s in sizes.elements()])) for i in (0, 1))
        scale = min(1.0, MAX_PIXELS / max(widths, heights))
        height, width = size = max(8, round(heights * scale)), max(8, round(widths * scale))
        resized = f"resized to {width} x {height} (width x height)"
        notes.append(f"images of {len(sizes)} sizes are {resized}")
    return Findings(
        section.source,
        sum(classes.values()),
        "classification",
        "folders are classes",
        shape=(height, width) if is_grey else (3, height, width),
        classes=classes,
        image_size=size,
        has_test=has_test,
        notes=notes,
        warnings=_rare(classes),
    )


def task_of(values: Any, name: str) -> tuple[Task, str]:
    if isinstance(values, list):
        return "classification", f"{name} is not of numbers"
    finite = values[np.isfinite(values)]
    distinct = len(np.unique(finite))
    if (finite == np.round(finite)).all() and distinct <= MAX_NUMERIC_CLASSES:
        why = f"{name} has {distinct} different whole numbers (--task regression says otherwise)"
        return "classification", why
    why = f"{name} has {distinct} different numbers (--task classification says otherwise)"
    return "regression", why


def _nearly_numbers(name: str, values: list[str | None]) -> list[str]:
    """Warn if at least half of the classes are numbers."""
    words = {value: is_number(value) for value in values if value is not None}
    numbers = sum(words.values())
    if not len(words) > numbers > max(MAX_NUMERIC_CLASSES, len(words) / 2):
        return []
    others = ", ".join(repr(word[:30]) for word, is_one in words.items() if not is_one)
    said = f"column {name} has {numbers} different numbers, and {others[:100]}"
    return [f"{said}: is it a regression? (--missing-value reads a cell's text as missing)"]


def _rare(classes: dict[str, int]) -> list[str]:
    few = [f"{label!r} ({count})" for label, count in classes.items() if count < MIN_CLASS_ROWS]
    return [f"classes with fewer than {MIN_CLASS_ROWS} rows: {', '.join(few[:10])}"] if few else []


def alike_lines(classes: Iterable[str]) -> list[str]:
    groups = [", ".join(map(repr, some)) for some in alike(classes)]
    said = "classes that differ in spaces or capitals alone"
    return [f"{said}: {'; '.join(groups[:10])}"] if groups else []


def _close_targets(y: np.ndarray) -> list[str]:
    """Warn if targets differ by little more than the steps of float32."""
    finite = y[np.abs(y) <= np.finfo(np.float32).max]  # others are refused when they are read
    if not len(finite):
        return []
    step, spread = float(np.spacing(np.float32(np.abs(finite).max()))), float(finite.std())
    if not 0 < spread < MIN_STEPS * step:
        return []
    return [
        f"targets are fitted in float32, in steps of {step:.2g} so far from 0, and their standard "
        f"deviation is {spread:.2g}: subtract what all have in common"
    ]


def near_duplicates(
    train: Rows, others: Mapping[str, Rows], takes_ids: bool = False
) -> dict[str, int]:
    """Count the rows of each set that are nearly the same as a training row; rows of ids must be
    equal."""
    scale = 1.0 if takes_ids else _scale(train.x)
    known = set(_keys(train, scale))
    return {name: sum(key in known for key in _keys(rows, scale)) for name, rows in others.items()}


def describe_duplicates(train: Rows, others: Mapping[str, Rows], takes_ids: bool = False) -> str:
    return ", ".join(
        f"{count} of {len(others[name])} {name}"
        for name, count in near_duplicates(train, others, takes_ids).items()
        if count > max(1.0, MIN_SHARE * len(others[name]))
    )


def duplicate_lines(splits: Splits, takes_ids: bool = False) -> list[str]:
    others = {name: rows for name, rows in vars(splits).items() if name != "train"}
    counts = describe_duplicates(splits.train, others, takes_ids)
    return [f"rows nearly the same as a training row: {counts}; {ADVICE}"] if counts else []


def _scale(x: Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"]) -> float:
    spread = float(np.std(x[:CHUNK_ROWS].astype(np.float64)))
    return 10.0**NEAR_DIGITS / spread if spread > 0 else 1.0


def _keys(rows: Rows, scale: float) -> list[int]:
    """Return a key for each row; rows that are alike share it."""
    keys = []
    for first in range(0, len(rows), CHUNK_ROWS):
        chunk = rows.x[first : first + CHUNK_ROWS].astype(np.float64)
        keys += [hash(row.tobytes()) for row in np.round(chunk * scale) + 0.0]  # no -0
    return keys
