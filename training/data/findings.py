"""What a source of data is taken for: `python -m training inspect`, and what `fit` says before it
fits."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from model_store.errors import InvalidInput
from model_store.sources.npy import read_npz
from model_store.types import Task
from training.data.arrays import SPLIT
from training.data.cells import csv_table, index_column, parquet_table, values_of
from training.data.column_findings import ColumnFinding, find, leaks
from training.data.images import looked_at
from training.data.paths import path_below
from training.recipe import DataSection

MOST_CLASSES_OF_NUMBERS = 10  # whole numbers with more different values are a target of regression
FEW = 10  # rows of a class below which it is named
DUPLICATE_ROWS = 200_000  # rows that are compared
CLOSE_STEPS = 1000.0  # of float32 that a target's standard deviation should have
DIGITS = 3  # of numbers that are compared, in standard deviations
KINDS = ("csv", "parquet", "npz", "images")


@dataclass(frozen=True, eq=False)
class Findings:
    """What a source holds: columns of a table, or a row's shape; its task and classes; what is odd
    about it."""

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
        """The columns that a model looks at."""
        return [column for column in self.columns if column.kind not in ("ignored", "refused")]


def findings_of(section: DataSection, root: Path, task: Task | None = None) -> Findings:
    """Look at a source, up to its rows' target; nothing of it is refused that can be said instead.

    Raises:
        InvalidInput: if it cannot be read, or has no such column.
    """
    kind, _, rest = section.source.partition(":")
    if kind not in KINDS or not rest:
        raise InvalidInput(
            "--data", "csv:FILE, parquet:FILE, npz:FILE or images:FOLDER", repr(section.source)
        )
    path = path_below(root, rest)
    if kind == "images":
        return _of_images(section, path)
    if kind == "npz":
        return _of_arrays(section, path, task)
    return _of_table(
        section,
        csv_table(path, None, section) if kind == "csv" else parquet_table(path, None, section),
        task,
    )


def _of_table(section: DataSection, table: Any, task: Task | None) -> Findings:
    names, notes = list(table.column_names), []
    asked = {section.target, section.group, section.time, *section.columns}
    index = index_column(names, {name for name in asked if name})
    if index is not None:
        notes.append(f"column {index!r} is left out: pandas' unnamed index")
        names.remove(index)
    repeated = sorted({name for name in names if names.count(name) > 1 or not name})
    if repeated:
        expected = "columns with different names"
        raise InvalidInput(
            "data.source", expected, f"{repeated[0]!r} twice or without a name"[:100]
        )
    for key, name in (
        ("--target", section.target),
        ("--group", section.group),
        ("--time", section.time),
    ):
        if name is not None and name not in names:
            raise InvalidInput(key, f"one of the columns {names[:20]}", repr(name)[:100])
    keyed = {
        name
        for name in (section.target, section.group, section.time)
        if name and name not in section.columns
    }
    columns = [
        find(table, name, section.date_format, section.columns.get(name))
        for name in names
        if name not in keyed
    ]
    rows = table.num_rows
    warnings: list[str] = []
    if section.target is None:
        why = "no target is named (--target COLUMN)"
        return Findings(section.source, rows, None, why, columns, notes=notes, warnings=warnings)
    target = find(table, section.target, section.date_format)
    is_there = _present(target.values)
    if not is_there.all():
        notes.append(
            f"{rows - int(is_there.sum())} rows have no value of {section.target} and are dropped"
        )
    task, why = (task, "as told") if task else task_of(target.values, section.target)
    if target.kind in ("time", "refused") and task == "regression":
        raise InvalidInput(
            f"column {section.target}", "numbers or classes as the target", target.why
        )
    found = Findings(
        section.source,
        int(is_there.sum()),
        task,
        why,
        columns,
        section.target,
        notes=notes,
        warnings=warnings,
    )
    if task == "regression":
        values = values_of(table.column(section.target), section.target, "numeric")
        assert isinstance(values, np.ndarray)
        found = replace(found, targets=values[is_there])
        warnings += _close_targets(values[is_there])
    else:
        labels = values_of(table.column(section.target), section.target, "categorical")
        kept = [str(labels[i]) for i in np.flatnonzero(is_there).tolist()]
        found = replace(found, classes=dict(Counter(kept).most_common()), labels=kept)
    y = found.targets if found.labels is None else np.unique(found.labels, return_inverse=True)[1]
    assert y is not None
    for column in found.used:
        values_there = _taken(column.values, is_there)
        leak = leaks(
            ColumnFinding(column.name, column.kind, "", 0.0, values_there), y, task == "regression"
        )
        if leak is not None:
            warnings.append(f"column {column.name} may hold the target in other words: {leak}")
    warnings += _duplicates([_taken(column.values, is_there) for column in found.used], y)
    return replace(found, warnings=warnings + _of_classes(found.classes))


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
    classes = dict(Counter(str(v) for v in y.tolist()).most_common())
    return replace(found, classes=classes, warnings=_of_classes(classes))


def _of_images(section: DataSection, path: Path) -> Findings:
    classes, sizes, is_grey, has_test = looked_at(path)
    notes, size = [], None
    if len(sizes) > 1 or max(next(iter(sizes))) > MOST_PIXELS:
        widths, heights = (np.median([s[i] for s in sizes.elements()]) for i in (0, 1))
        scale = min(1.0, MOST_PIXELS / max(widths, heights))
        size = (max(8, round(float(heights * scale))), max(8, round(float(widths * scale))))
        notes.append(
            f"images of {len(sizes)} sizes are resized to {size[1]} x {size[0]} (width x height)"
        )
    width, height = next(iter(sizes)) if size is None else (size[1], size[0])
    shape = (height, width) if is_grey else (3, height, width)
    why = "folders are classes"
    found = Findings(
        section.source, sum(classes.values()), "classification", why, shape=shape, classes=classes
    )
    return replace(
        found, image_size=size, has_test=has_test, notes=notes, warnings=_of_classes(classes)
    )


MOST_PIXELS = 64  # of a side of images that are larger, or of several sizes


def task_of(values: Any, name: str) -> tuple[Task, str]:
    """Return the task that a target's values speak for, and why."""
    if isinstance(values, list):
        return "classification", f"{name} is not of numbers"
    present = values[np.isfinite(values)]
    distinct = np.unique(present)
    if (present == np.round(present)).all() and len(distinct) <= MOST_CLASSES_OF_NUMBERS:
        return (
            "classification",
            f"{name} has {len(distinct)} different whole numbers (--task regression says "
            "otherwise)",
        )
    return (
        "regression",
        f"{name} has {len(distinct)} different numbers (--task classification says otherwise)",
    )


def _of_classes(classes: dict[str, int]) -> list[str]:
    few = [f"{label!r} ({count})" for label, count in classes.items() if count < FEW]
    return [f"classes with fewer than {FEW} rows: {', '.join(few[:10])}"] if few else []


def _duplicates(columns: list[Any], y: np.ndarray) -> list[str]:
    """Return what to say of rows that are alike in all columns, numbers up to thousandths of a
    standard deviation."""
    if not columns or not len(y):
        return []
    codes = []
    for values in columns:
        if isinstance(values, np.ndarray):
            scale = np.nanstd(values[np.isfinite(values)]) or 1.0
            rounded = np.round(
                np.nan_to_num(values, nan=np.inf, posinf=np.inf, neginf=-np.inf) / scale, DIGITS
            )
            codes.append(np.unique(rounded[:DUPLICATE_ROWS], return_inverse=True)[1])
        else:
            codes.append(
                np.unique([v or "" for v in values[:DUPLICATE_ROWS]], return_inverse=True)[1]
            )
    _, inverse, counts = np.unique(
        np.stack(codes, 1), axis=0, return_inverse=True, return_counts=True
    )
    alike = int((counts[inverse.ravel()] > 1).sum())
    if alike == 0:
        return []
    share = alike / len(inverse)
    told = f"{alike} rows ({100 * share:.2g} %) are nearly the same as another in all columns"
    more = (
        ": where that is one thing seen twice, name what tells things apart by --group COLUMN"
        if share > 0.05
        else ""
    )
    return [told + more]


def _close_targets(y: np.ndarray) -> list[str]:
    """Say that targets differ by little more than float32, in which they are fitted, can tell
    apart."""
    finite = y[np.abs(y) <= np.finfo(np.float32).max]  # others are refused when they are read
    if not len(finite):
        return []
    step, spread = float(np.spacing(np.float32(np.abs(finite).max()))), float(finite.std())
    if not 0 < spread < CLOSE_STEPS * step:
        return []
    return [
        f"targets are fitted in float32, in steps of {step:.2g} so far from 0, and their standard "
        "deviation is "
        f"{spread:.2g}: subtract what all have in common"
    ]


def _present(values: Any) -> np.ndarray:
    return (
        ~np.isnan(values)
        if isinstance(values, np.ndarray)
        else np.array([v is not None for v in values], dtype=bool)
    )


def _taken(values: Any, is_there: np.ndarray) -> Any:
    if isinstance(values, np.ndarray):
        return values[is_there]
    return [value for value, there in zip(values, is_there.tolist(), strict=True) if there]
