"""Warn about rows that contain totals, and rows that depend on each other."""

import re
from collections.abc import Iterable, Iterator

import numpy as np
from jaxtyping import Float64, Int64

from training.data.column_findings import ID_NAME, MIN_ROWS, ColumnFinding, as_numbers
from training.data.columns import take

TOTAL = re.compile(r"(?i)\s*((grand |sub-?)?totals?|sums?|averages?|means?)\s*:?\s*")
TIME_NAME = re.compile(r"(?i)(.*[_ -])?(year|quarter|month|week|day|date|time|timestamp|period)$")
GROUP_NAME = re.compile(
    r"(?i).*(patient|subject|participant|person|user|customer|client|account|household|family"
    r"|device|sensor|machine|camera|session|speaker|student|school|site|store|animal|player).*"
    r"|.*[a-z](?-i:ID|Id)"
)
CODE = re.compile(r"[A-Za-z]+[-_ ]?\d+")  # such as P017
MIN_GROUPS = 10
MAX_GROUP_ROWS, MAX_SPLIT_ROWS = 20, 1_000  # of the rows that compare splits
FOLDS, TREES = 5, 30
MIN_CLASS_ROWS = 4  # on average
MIN_DROP, MIN_DROP_ERRORS = 0.05, 3.0  # of a score that causes a warning, and standard errors

Index = Int64[np.ndarray, "N"]


def total_warnings(columns: Iterable[ColumnFinding], rows: Index) -> list[str]:
    """Warn if the last row contains totals of the other rows."""
    reason = next(filter(None, map(_describe_total, columns)), None)
    if reason is None:
        return []
    return [f"row {rows[-1]}, the last, looks like a total ({reason}); remove it"]


def _describe_total(column: ColumnFinding) -> str | None:
    values = column.values
    if column.kind == "time" or len(values) <= MIN_GROUPS:
        return None
    if isinstance(values, list):
        text = values[-1]
        if text is None or not TOTAL.fullmatch(text) or values.count(text) > 1:
            return None
        return f"column {column.name} is {text!r}"
    parts, last = np.nan_to_num(values[:-1]), values[-1]
    with np.errstate(over="ignore"):
        is_sum = np.isclose(last, parts.sum(), rtol=1e-6) and abs(last) > np.abs(parts).max()
    if not is_sum or np.count_nonzero(parts) <= len(parts) / 2:
        return None
    return f"column {column.name} is the sum of the other rows"


def split_warnings(
    columns: list[ColumnFinding], y: np.ndarray, is_regression: bool
) -> Iterator[str]:
    """Warn if a random split overestimates quality on later rows or new groups.

    Candidate columns contain sorted times or repeated ids. Extremely randomised trees predict the
    same rows after a random split and after a split by the candidate column.
    """
    if len(y) < MIN_ROWS or not np.isfinite(y).all():
        return
    for column in columns:
        option = _option_for(column)
        if option is None:
            continue
        codes = np.unique(as_numbers(column.values), return_inverse=True)[1]
        if not _is_key(codes, option):
            continue
        rows = _sample_rows(codes, option == "--time")
        if not is_regression and len(np.unique(y[rows])) > len(rows) / MIN_CLASS_ROWS:
            continue
        features = [take(c.values, rows) for c in columns if len(c.values)]
        x = np.stack([as_numbers(values) for values in features], axis=1)
        random, split = _compare(x, y[rows], codes[rows], is_regression, option == "--time")
        drop = random - split
        if drop.mean() <= max(MIN_DROP, MIN_DROP_ERRORS * drop.std() / np.sqrt(len(drop))):
            continue
        score = "explained variance" if is_regression else "accuracy"
        kind, purpose = "new groups", "rows of new groups"
        if option == "--time":
            kind = purpose = "later rows"
        yield (
            f"the split matters: a small model's {score} is {random.mean():.2f} after a random "
            f"split, and {split.mean():.2f} on {kind} by {column.name}; if the model will predict "
            f"{purpose}, set {option} {column.name} (data.{option[2:]})"
        )


def _option_for(column: ColumnFinding) -> str | None:
    """Return `--time` or `--group` if a column contains times or ids, or None."""
    name, values = column.name, column.values
    if column.kind == "time" or (isinstance(values, np.ndarray) and TIME_NAME.fullmatch(name)):
        return "--time"
    is_id = ID_NAME.fullmatch(name) or GROUP_NAME.fullmatch(name)
    if isinstance(values, np.ndarray):
        return "--group" if is_id and (values == np.round(values)).all() else None
    codes = {value for value in values if value is not None}
    return "--group" if codes and (is_id or all(map(CODE.fullmatch, codes))) else None


def _is_key(codes: Index, option: str) -> bool:
    """Check whether a column's times are sorted or its ids repeat."""
    distinct, steps = codes.max() + 1, np.diff(codes)
    is_sorted = bool((steps >= 0).all() or (steps <= 0).all())
    repeats = bool(distinct <= len(codes) / 2)
    return distinct >= MIN_GROUPS and (is_sorted if option == "--time" else repeats)


def _sample_rows(codes: Index, is_time: bool) -> Index:
    """Sample rows in time order, or several rows from each of some random groups."""
    random = np.random.default_rng(0)
    if is_time:
        rows = random.permutation(len(codes))[:MAX_SPLIT_ROWS]
        return rows[np.argsort(codes[rows], kind="stable")]
    groups = random.permutation(codes.max() + 1)[codes]
    order = np.lexsort((random.random(len(codes)), groups))
    first = np.searchsorted(groups[order], groups[order])
    return order[np.arange(len(order)) - first < MAX_GROUP_ROWS][:MAX_SPLIT_ROWS]


def _compare(
    x: Float64[np.ndarray, "N I"],
    y: np.ndarray,
    codes: Index,
    is_regression: bool,
    is_time: bool,
) -> tuple[Float64[np.ndarray, "M"], Float64[np.ndarray, "M"]]:
    """Score each row after a random split and after a split by `codes`.

    The score is 1 or 0 for a class, and 1 minus the squared error, in variances, for a target. If
    the split is by time, only the latest rows are scored.
    """
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
    from sklearn.model_selection import GroupKFold, KFold

    trees = ExtraTreesRegressor if is_regression else ExtraTreesClassifier
    if is_regression:
        y = y / (np.abs(y).max() or 1.0)  # Squares must not overflow.
        y = (y - y.mean()) / (y.std() or 1.0)

    def score(folds: Iterable[tuple[Index, Index]]) -> Float64[np.ndarray, "N"]:
        scores = np.full(len(y), np.nan)
        for train, test in folds:
            model = trees(TREES, random_state=0).fit(x[train], y[train])
            predicted = model.predict(x[test])
            is_right = predicted == y[test]
            scores[test] = 1.0 - np.square(predicted - y[test]) if is_regression else is_right
        return scores

    rows = np.arange(len(y))
    first_test = len(y) - len(y) // FOLDS
    by_time = [(rows[:first_test], rows[first_test:])]
    random = score(KFold(FOLDS, shuffle=True, random_state=0).split(x))
    split = score(by_time if is_time else GroupKFold(FOLDS).split(x, groups=codes))
    is_scored = ~np.isnan(split)
    return random[is_scored], split[is_scored]
