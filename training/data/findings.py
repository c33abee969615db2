"""Inspection of a data source (`dubito inspect`)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from model_store.errors import InvalidInput
from model_store.sources.cells import category_text
from model_store.sources.columns import presence
from model_store.sources.npy import read_npz
from model_store.types import Task
from training.data.arrays import SPLIT, check_not_workbook, resolve_path
from training.data.cells import RawTable, column_names, read_raw, typed_table
from training.data.column_findings import (
    CONFIGURED,
    MAX_NUMERIC_CLASSES,
    ColumnFinding,
    Index,
    describe_leak,
    format_hints,
    group_similar,
    inspect_column,
    split_warnings,
    total_warnings,
)
from training.data.columns import read_column, take
from training.data.images import survey_images
from training.data.rows import Rows, Splits, row_digest
from training.sections import DataSection

MIN_CLASS_ROWS = 10  # smaller classes cause a warning
MAX_PIXELS = 64  # per side, for large images or several sizes
MIN_SHARE = 0.01  # share of duplicates in a split that causes a warning
ADVICE = (
    "duplicates in calibration and test rows make a model look too certain; keep related rows in "
    "one split by data.group or --group COLUMN"
)
KINDS = ("csv", "parquet", "npz", "images")
MAX_SHOWN = 12  # names per line
MAX_COLUMNS = 30  # in the log of a fit
NAME_WIDTH = 24


@dataclass(frozen=True, eq=False)
class Findings:
    source: str
    rows: int
    task: Task | None
    reason: str
    columns: list[ColumnFinding] = field(default_factory=list)
    target: str | None = None
    shape: tuple[int, ...] = ()
    classes: dict[str, int] = field(default_factory=dict)
    targets: np.ndarray | None = None  # for regression
    image_size: tuple[int, int] | None = None  # to which images are resized
    has_test: bool = False
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    raw: RawTable | None = None

    @property
    def used(self) -> list[ColumnFinding]:
        return [column for column in self.columns if column.kind not in ("ignored", "refused")]

    def report(self, max_columns: int = MAX_COLUMNS) -> list[str]:
        """Describe the data source and up to `max_columns` columns in lines of text.

        If there are more, the ignored ones come first.
        """
        shape = f" of shape {self.shape}" if self.shape else ""
        task = self.task or "no task"
        lines = [f"{self.source}: {self.rows} rows{shape}; {task}: {self.reason}"]
        if self.classes:
            counts = [f"{label} {count}" for label, count in self.classes.items()]
            rest = f" and {len(counts) - MAX_SHOWN} more" if len(counts) > MAX_SHOWN else ""
            lines.append(f"{len(counts)} classes: {', '.join(counts[:MAX_SHOWN])}{rest}")
        elif self.targets is not None and len(self.targets):
            y = self.targets
            with np.errstate(over="ignore"):  # A fit refuses such targets.
                moments = f"mean {y.mean():.4g}, standard deviation {y.std():.4g}"
            lines.append(f"target: {y.min():.4g} to {y.max():.4g}, {moments}")
        columns = self.columns
        if len(columns) > max_columns:
            columns = sorted(columns, key=lambda column: column.kind != "ignored")
        lines += self._column_lines(columns[:max_columns])
        if len(columns) > max_columns:
            lines.append(f"  and {len(columns) - max_columns} more (see `dubito inspect`)")
        return [*lines, *self.notes, *(f"! {warning}" for warning in self.warnings)]

    def _column_lines(self, columns: list[ColumnFinding]) -> list[str]:
        lines = ["columns:"] if columns else []
        width = min(NAME_WIDTH, max((len(column.name) for column in columns), default=0))
        for column in columns:
            missing = f"; {100 * column.missing:.3g} % missing" if column.missing else ""
            name = f"  {column.name[:width]:<{width}}  {column.kind:<11}"
            lines.append(f"{name}  {column.reason}{missing}")
            if column.kind != "ignored":  # The warnings contain the notes of ignored columns.
                lines += [f"  {'':<{width}}  {'':<11}  ! {note}" for note in column.notes]
        return lines


def inspect_source(section: DataSection, root: Path, task: Task | None = None) -> Findings:
    """Inspect a data source, and report most problems as findings instead of errors."""
    check_not_workbook(section.source, "--data")
    kind, _, rest = section.source.partition(":")
    if kind not in KINDS or not rest:
        expected = "csv:FILE, parquet:FILE, npz:FILE or images:FOLDER"
        raise InvalidInput("--data", expected, repr(section.source))
    path = resolve_path(root, rest)
    if kind == "images":
        return _inspect_images(section, path)
    if kind == "npz":
        return _inspect_arrays(section, path, task)
    raw = read_raw(kind, path, section)
    return replace(_inspect_table(section, typed_table(raw, None, section), task), raw=raw)


def _inspect_table(section: DataSection, table: pa.Table, task: Task | None) -> Findings:
    notes = []
    keys = {f"--{key}": getattr(section, key) for key in ("target", "group", "time", "weight")}
    names = column_names(table, {*keys.values(), *section.columns})
    for key, name in keys.items():
        if name is not None and name not in names:
            raise InvalidInput(key, f"one of the columns {names[:20]}", repr(name)[:100])
    target, rows = None, np.arange(table.num_rows)
    if section.target is not None:
        target = inspect_column(table, section.target, section.date_format, rows)
        rows = np.flatnonzero(presence(target.values))
        if len(rows) < table.num_rows:
            dropped = table.num_rows - len(rows)
            notes.append(f"{dropped} rows without a value of {section.target} are dropped")
    keyed = set(keys.values()) - set(section.columns)
    columns = [
        inspect_column(table, name, section.date_format, rows, section.columns.get(name))
        for name in names
        if name not in keyed
    ]
    reason = "no target (set --target COLUMN)"
    findings = Findings(
        section.source, len(rows), None, reason, columns, section.target, notes=notes
    )
    for column in columns:
        if column.kind == "ignored" and column.reason != CONFIGURED:
            findings.warnings.extend(f"column {column.name} is ignored: {n}" for n in column.notes)
    targets = [] if target is None else [replace(target, values=take(target.values, rows))]
    findings.warnings.extend(total_warnings([*columns, *targets], rows))
    if target is None:
        return findings
    has_random_splits = section.group is None and section.time is None
    return _add_target(findings, target, table, rows, task, has_random_splits)


def _add_target(
    findings: Findings,
    target: ColumnFinding,
    table: pa.Table,
    rows: Index,
    task: Task | None,
    has_random_splits: bool,
) -> Findings:
    name = target.name
    if target.kind == "refused" and task is None:
        remedy = "(--task classification makes every value a class)"
        return replace(findings, reason=f"{target.reason} {remedy}")
    task, reason = (task, CONFIGURED) if task else infer_task(target.values, name)
    findings = replace(findings, task=task, reason=reason)
    is_regression = task == "regression"
    if target.kind in ("time", "refused") and is_regression:
        raise InvalidInput(f"column {name}", "numbers or classes as the target", target.reason)
    kind = "numeric" if is_regression else "categorical"
    values: Any = take(read_column(table, name, kind)[0], rows)
    if is_regression:
        findings, y = replace(findings, targets=values), values
    else:
        findings = replace(findings, classes=dict(Counter(values).most_common()))
        y = np.unique(values, return_inverse=True)[1]
    warnings = []
    for column in findings.used:
        leak = describe_leak(column.values, y, is_regression)
        if leak is not None:
            warnings.append(f"column {column.name} may leak the target: {leak}")
    if isinstance(target.values, list) and reason != CONFIGURED:
        hints = format_hints(Counter(v for v in target.values if v is not None))
        warnings += [f"column {name}: {hint}" for hint in hints]
    warnings += _rare(findings.classes)
    if has_random_splits:
        warnings += split_warnings(findings.columns, y, is_regression)
    return replace(findings, warnings=findings.warnings + warnings)


def _inspect_arrays(section: DataSection, path: Path, task: Task | None) -> Findings:
    arrays = read_npz(path)
    has_test = set(arrays) == set(SPLIT)
    x, y = (arrays.get(f"{name}_train" if has_test else name) for name in "xy")
    if x is None or y is None or y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
        shapes = {name: array.shape for name, array in arrays.items()}
        expected = f"arrays x (N, ...) and y (N,), or {', '.join(SPLIT)}"
        raise InvalidInput("data.source", expected, str(shapes)[:200])
    values = [str(v) for v in y.tolist()] if y.dtype.kind == "U" else y.astype(np.float64)
    task, reason = (task, CONFIGURED) if task else infer_task(values, "y")
    findings = Findings(section.source, len(x), task, reason, shape=x.shape[1:], has_test=has_test)
    if task == "regression":
        return replace(findings, targets=np.asarray(values, dtype=np.float64))
    classes = dict(Counter(map(category_text, y.tolist())).most_common())
    return replace(findings, classes=classes, warnings=_rare(classes))


def _inspect_images(section: DataSection, path: Path) -> Findings:
    classes, sizes, is_grey, has_test = survey_images(path)
    notes, size = [], None
    width, height = next(iter(sizes))
    if len(sizes) > 1 or max(width, height) > MAX_PIXELS:
        widths, heights = (float(np.median([s[i] for s in sizes.elements()])) for i in (0, 1))
        scale = min(1.0, MAX_PIXELS / max(widths, heights))
        height, width = size = max(8, round(heights * scale)), max(8, round(widths * scale))
        notes.append(f"images of {len(sizes)} sizes are resized to {width} x {height} pixels")
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


def infer_task(values: Any, name: str) -> tuple[Task, str]:
    if isinstance(values, list):
        return "classification", f"{name} is not numeric"
    finite = values[np.isfinite(values)]
    distinct = len(np.unique(finite))
    if (finite == np.round(finite)).all() and distinct <= MAX_NUMERIC_CLASSES:
        reason = f"{name} has {distinct} different whole numbers (or set --task regression)"
        return "classification", reason
    reason = f"{name} has {distinct} different numbers (or set --task classification)"
    return "regression", reason


def _rare(classes: dict[str, int]) -> list[str]:
    rare = [f"{label!r} ({count})" for label, count in classes.items() if count < MIN_CLASS_ROWS]
    message = f"classes with fewer than {MIN_CLASS_ROWS} rows"
    return [f"{message}: {', '.join(rare[:10])}"] if rare else []


def similar_class_warnings(classes: Iterable[str]) -> list[str]:
    groups = [", ".join(map(repr, group)) for group in group_similar(classes)]
    message = "classes that differ only in their spelling"
    return [f"{message}: {'; '.join(groups[:10])}"] if groups else []


def describe_duplicates(train: Rows, other_splits: Mapping[str, Rows]) -> str:
    """Count the rows of each split that equal a training row."""
    digests = set(map(row_digest, train.x))
    counts = {
        name: sum(row_digest(row) in digests for row in rows.x)
        for name, rows in other_splits.items()
    }
    return ", ".join(
        f"{count} of {len(other_splits[name])} {name}"
        for name, count in counts.items()
        if count > max(1.0, MIN_SHARE * len(other_splits[name]))
    )


def duplicate_warnings(splits: Splits) -> list[str]:
    other_splits = {name: rows for name, rows in vars(splits).items() if name != "train"}
    counts = describe_duplicates(splits.train, other_splits)
    return [f"rows that equal a training row: {counts}; {ADVICE}"] if counts else []
