"""Infer the kinds of columns, and warn about possible mistakes in columns and rows."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from time import time
from typing import Any, Literal
from unicodedata import category, normalize

import numpy as np
import pyarrow as pa
from jaxtyping import Float64, Int64
from pyarrow import types

from model_store.errors import InvalidInput
from model_store.sources.arrow import EXACT_INTEGERS, as_text, column_type, read_numbers
from model_store.sources.cells import WHOLE, Categories, Numbers, find_sign, is_number
from model_store.sources.columns import presence
from training.data.cells import infer_number_style
from training.data.columns import MAX_CATEGORIES, MIN_CATEGORY_ROWS, read_column, take

Index = Int64[np.ndarray, "N"]
Kind = Literal["numeric", "categorical", "time", "ignored", "refused"]
ID_NAME = re.compile(r"(?i)(^|.*[_ -])(id|uuid|guid|key|index|row|nr|no|number)$")
RARE = 4 * MIN_CATEGORY_ROWS  # rows of a value; about half of them train
CONFIGURED = "as configured"  # the reason for a kind or task
MIN_ROWS = 20  # with fewer rows, distinct values are not unusual
DATE_LIKE = re.compile(  # dates that need `data.date_format`
    r"\d{1,4}[-/. ]+(?:\d{1,2}|[A-Za-z]{3,9})[-/., ]+\d{2,4}(?:\D.*)?"
    r"|[A-Za-z]{3,9}\.? \d{1,2},? \d{4}(?:\D.*)?|\d{4}[-/]\d{2}"
)
BOOLEAN_SPELLINGS = {  # in lower case
    **dict.fromkeys(("1", "t", "true", "y", "yes"), "true"),
    **dict.fromkeys(("0", "f", "false", "n", "no"), "false"),
}
HEAVY = 30.0  # interquartile ranges from the median to the furthest value
FORMATTED_NUMBER = re.compile(  # with currency signs, percent signs or grouped thousands
    r"(?=.*\d)[+-]?[$€£¥]?\s?(?:\d{1,3}(?:[,.' ]\d{3})+|\d*)(?:[.,]\d+)?\s?[%$€£¥]?", re.ASCII
)
WITH_UNIT = re.compile(  # such as 12.5 kg, 10k, USD 1,200 or ₹500
    r"([^\W\d_]{1,3}\.? |[^\w\s.,:;/()<>+='-])?[+-]?\d+(?:[.,]\d{3})*(?:[.,]\d+)?"
    r"(\s?[^\d\s.,:;/()<>+='-]\D{0,5})?"
)
MAX_UNITS = 3
MAX_NUMERIC_CLASSES = 10  # more distinct whole numbers mean regression
MIN_WORDS = 4  # mean number in free text
LEAK_ROWS = 5_000
LEAK = 0.99  # share of the target that a column predicts
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


@dataclass(frozen=True, eq=False)
class ColumnFinding:
    name: str
    kind: Kind
    reason: str
    values: Numbers | list[str | None]
    notes: list[str] = field(default_factory=list)
    is_id: bool = False  # by its name, or because it numbers the rows

    @property
    def missing(self) -> float:
        return float((~presence(self.values)).mean()) if len(self.values) else 0.0


def inspect_column(
    table: pa.Table, name: str, date_format: str | None, rows: Index, config: Any = None
) -> ColumnFinding:
    """Infer a column's kind from some of its rows, unless the kind is configured."""
    column = table.column(name)
    if column_type(column) is None:
        reason = f"type {column.type} is not numeric, categorical or a date"
        return ColumnFinding(name, "ignored", reason, [])
    try:
        kind = None if config == "ignored" else config
        values, written = read_column(table, name, kind, date_format)
    except InvalidInput as error:
        text, is_numeric = as_text(column), column_type(column) == "numbers"
        values = read_numbers(column) if is_numeric else [] if text is None else text.to_pylist()
        values = take(values, rows) if len(values) else values
        if config == "ignored":
            return ColumnFinding(name, "ignored", CONFIGURED, values)
        reason = f"expected {error.expected}, got {error.received}"
        return ColumnFinding(name, "refused", reason, values)
    values = take(values, rows)
    if isinstance(values, list):
        if config is not None:
            return ColumnFinding(name, config, CONFIGURED, values)
        return _inspect_categories(name, values, types.is_dictionary(column.type))
    if isinstance(written, str):
        present = values[~np.isnan(values)]
        ends = (present.min(), present.max()) if len(present) else (0.0, 0.0)
        first, last = (str(np.datetime64(int(s), "s"))[:16].replace("T00:00", "") for s in ends)
        reason = f"dates or times, {first} to {last}"
        finding = ColumnFinding(name, "time", reason, values)
        if tail_length(present) > HEAVY:
            far = "the first or last is far from the others"
            finding.notes.append(f"{far}; if it means missing, set --missing-value or clear it")
        if "%y" in written and ends[1] > time():
            finding.notes.append("dates in the future, because two-digit years up to 68 are 20xx")
    else:
        finding = _inspect_numbers(name, values, rows)
    if config is None:
        return finding
    is_id = finding.is_id and config == "ignored"
    return replace(finding, kind=config, reason=CONFIGURED, is_id=is_id)


def _inspect_numbers(name: str, numbers: Numbers, rows: Index) -> ColumnFinding:
    present = numbers[~np.isnan(numbers)]
    distinct = np.unique(present)
    if len(distinct) < 2:
        same = f"the same in every row ({distinct[0]:g})" if len(distinct) else ""
        reason = same or "no value in any row"
        return ColumnFinding(name, "ignored", reason, numbers)
    reason = f"numbers, {distinct[0]:g} to {distinct[-1]:g}"
    kind: Kind = "numeric"
    notes = []
    is_integer = bool((present == np.round(present)).all())
    if is_integer and len(distinct) == len(present) >= MIN_ROWS:
        steps, row_steps = np.diff(present), np.diff(rows[~np.isnan(numbers)])
        if any((steps == step).all() for step in (1, -1, row_steps, -row_steps)):
            reason, kind = "it numbers the rows", "ignored"
        elif ID_NAME.fullmatch(name):
            reason, kind = "an id by its name, different in every row", "ignored"
        else:
            notes.append("whole numbers, different in every row: an id? (`ignored` leaves it out)")
    elif is_integer and ID_NAME.fullmatch(name) and len(distinct) > MAX_CATEGORIES:
        notes.append("an id by its name, which has no order (set `categorical` or `ignored`)")
    if kind == "numeric" and (tail := tail_length(present)) > HEAVY:
        distance = f"{np.round(tail):.6g} interquartile ranges from the median"
        notes.append(f"a heavy tail: its furthest value is {distance}")
    is_id = kind == "ignored" and len(present) == len(numbers)
    return ColumnFinding(name, kind, reason, numbers, notes, is_id)


def tail_length(present: Numbers) -> float:
    """Compute the largest distance from the median in interquartile ranges, or 0 if these are 0."""
    low, median, high = np.percentile(present, [25, 50, 75]) if len(present) else np.zeros(3)
    return float(np.abs(present - median).max() / (high - low)) if high > low else 0.0


def _inspect_categories(name: str, values: Categories, is_declared: bool) -> ColumnFinding:
    counts = Counter(value for value in values if value is not None)
    present = counts.total()
    if len(counts) < 2:
        reason = "no value in any row"
        if counts:
            reason = f"the same in every row ({next(iter(counts))[:40]!r})"
        return ColumnFinding(name, "ignored", reason, values)
    notes = [] if is_declared else format_hints(counts)
    is_rare = len(counts) > MAX_CATEGORIES and max(counts.values()) < RARE
    if is_rare or len(counts) == present >= MIN_ROWS:
        reason = f"an id or free text: {len(counts)} different values in {present} rows"
        mean_words = float(np.mean([len(value.split()) for value in counts]))
        if mean_words >= MIN_WORDS:
            remedy = "set data.text to use it with your network"
            reason = f"free text of {mean_words:.0f} words on average; {remedy}"
        is_id = ID_NAME.fullmatch(name) is not None and len(counts) == len(values)
        return ColumnFinding(name, "ignored", reason, values, notes, is_id)
    if len(counts) > MAX_CATEGORIES:
        notes.append(f"{len(counts)} categories, of which only the most frequent are kept")
    elif len(counts) > present / 2:
        notes.append("most values occur once: free text?")
    if group_similar(counts):
        notes.append("some categories differ only in their spelling")
    return ColumnFinding(name, "categorical", f"{len(counts)} categories", values, notes)


def format_hints(counts: Iterable[str]) -> list[str]:
    """Describe numbers and dates among distinct values that are read as text."""
    advice = "set --missing-value to read such cells as missing"
    notes = [f"{note} ({advice})" for note in _describe_nearly_numbers(counts)]
    examples = {find_sign(value): value for value in counts}
    if all(map(WHOLE.fullmatch, counts)) and max(map(float, counts)) > EXACT_INTEGERS:
        notes.append("whole numbers that float64 cannot represent (set `numeric` to round them)")
    elif all(map(is_number, counts)):
        notes.append("numbers stored as text (set `numeric`)")
    elif all(FORMATTED_NUMBER.fullmatch(value.strip()) for value in counts):
        remedy = "Their format is ambiguous (set data.decimal and data.thousands)"
        if infer_number_style(list(counts), None, None) is not None:  # in a column of text
            remedy = "Set `numeric` in data.columns to read them"
        if len(examples) > 1:
            remedy = "Write all of them with the same sign"
        text_list = ", ".join(repr(example[:30]) for example in examples.values())
        notes.append(f"numbers ({text_list})? {remedy}")
    elif not notes and _have_units(counts):
        notes.append(f"numbers with units ({next(iter(counts))[:30]!r})? Write them without units")
    if all(DATE_LIKE.fullmatch(value.strip()) for value in counts):
        example = next(iter(counts))
        year = "%Y" if re.search(r"\d{4}", example) else "%y"
        advice = f"Set data.date_format or --date-format, such as %d/%m/{year}"
        notes.append(f"dates ({example[:30]!r})? {advice}")
    return notes


def _have_units(values: Iterable[str]) -> bool:
    matches = [WITH_UNIT.fullmatch(value) for value in values]
    units = {match and match.groups() for match in matches}
    return len(matches) > MAX_NUMERIC_CLASSES and None not in units and len(units) <= MAX_UNITS


def _describe_nearly_numbers(values: Iterable[str]) -> list[str]:
    """Describe a column in which most, but not all, distinct values are numbers."""
    distinct = list(values)
    texts = [value for value in distinct if not is_number(value)]
    numbers = len(distinct) - len(texts)
    if not len(distinct) > numbers > max(MAX_NUMERIC_CLASSES, len(distinct) / 2):
        return []
    text_list = ", ".join(repr(text[:30]) for text in texts)
    return [f"{numbers} different numbers, and {text_list[:100]}"]


def group_similar(values: Iterable[str]) -> list[list[str]]:
    """Group values that differ only in spaces, capitals, Unicode forms or boolean spellings."""
    keys = {value: _spelling(value) for value in sorted(values)}
    is_boolean = BOOLEAN_SPELLINGS.keys() >= set(keys.values())
    groups = defaultdict(list)
    for value, key in keys.items():
        groups[BOOLEAN_SPELLINGS[key] if is_boolean else key].append(value)
    return [group for group in groups.values() if len(group) > 1]


def _spelling(value: str) -> str:
    text = "".join(c for c in normalize("NFKC", value) if category(c) != "Cf")  # invisible
    return "".join(text.split()).casefold()


def as_numbers(values: Numbers | Categories) -> Float64[np.ndarray, "N"]:
    """Encode values as finite numbers, using codes for categories and -1 if missing."""
    if isinstance(values, list):
        index = {value: i for i, value in enumerate(dict.fromkeys(values))} | {None: -1}
        return np.array([index[value] for value in values], dtype=np.float64)
    low, high = np.finfo(np.float32).min, np.finfo(np.float32).max
    return np.clip(np.nan_to_num(values, nan=-1.0), low, high)


def describe_leak(values: Any, target: np.ndarray, is_regression: bool) -> str | None:
    """Describe a column from which a small decision tree predicts the target of unseen rows."""
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    if isinstance(values, list) and len(set(values)) > MAX_CATEGORIES:
        return None
    x, y = as_numbers(values), target.astype(np.float64)
    if is_regression and len(y):
        y = y / (np.abs(y).max() or 1.0)  # Squares must not overflow.
    order = np.random.default_rng(0).permutation(len(y))[:LEAK_ROWS]
    half = len(order) // 2
    if half < MIN_ROWS or (y == y[0]).all():
        return None
    fit_rows, test_rows = order[:half], order[half:]
    if not is_regression and len(np.unique(y[fit_rows])) > half / 2:
        return None
    tree_class = DecisionTreeRegressor if is_regression else DecisionTreeClassifier
    tree = tree_class(max_leaf_nodes=64, min_samples_leaf=3, random_state=0)
    score = tree.fit(x[fit_rows, None], y[fit_rows]).score(x[test_rows, None], y[test_rows])
    if score < LEAK:
        return None
    if is_regression:
        return f"it alone explains {100 * score:.1f} % of the target's variance"
    most_common = np.unique(y[test_rows], return_counts=True)[1].max() / len(test_rows)
    if most_common > LEAK - 0.05:
        return None
    return f"it alone predicts the class of {100 * score:.1f} % of the rows"


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
    if not (is_sum and np.isfinite(last)) or np.count_nonzero(parts) <= len(parts) / 2:
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
        is_time = option == "--time"
        codes = np.unique(as_numbers(column.values), return_inverse=True)[1]
        distinct, steps = codes.max() + 1, np.diff(codes)
        is_sorted = (steps >= 0).all() or (steps <= 0).all()
        if distinct < MIN_GROUPS or not (is_sorted if is_time else distinct <= len(codes) / 2):
            continue
        rows = _sample_rows(codes, is_time)
        if not is_regression and len(np.unique(y[rows])) > len(rows) / MIN_CLASS_ROWS:
            continue
        features = [take(c.values, rows) for c in columns if len(c.values)]
        x = np.stack([as_numbers(values) for values in features], axis=1)
        random, split = _compare(x, y[rows], codes[rows], is_regression, is_time)
        drop = random - split
        if drop.mean() <= max(MIN_DROP, MIN_DROP_ERRORS * drop.std() / np.sqrt(len(drop))):
            continue
        score = "explained variance" if is_regression else "accuracy"
        kind = "later rows" if is_time else "new groups"
        purpose = kind if is_time else "rows of new groups"
        yield (
            f"the split matters: a small model's {score} is {random.mean():.2f} after a random "
            f"split, and {split.mean():.2f} on {kind} by {column.name}; if the model will predict "
            f"{purpose}, set {option} {column.name} (data.{option[2:]})"
        )


def _option_for(column: ColumnFinding) -> str | None:
    name, values = column.name, column.values
    if column.kind == "time" or (isinstance(values, np.ndarray) and TIME_NAME.fullmatch(name)):
        return "--time"
    is_id = ID_NAME.fullmatch(name) or GROUP_NAME.fullmatch(name)
    if isinstance(values, np.ndarray):
        return "--group" if is_id and (values == np.round(values)).all() else None
    codes = {value for value in values if value is not None}
    return "--group" if codes and (is_id or all(map(CODE.fullmatch, codes))) else None


def _sample_rows(codes: Index, is_time: bool) -> Index:
    random = np.random.default_rng(0)
    if is_time:
        rows = random.permutation(len(codes))[:MAX_SPLIT_ROWS]
        return rows[np.argsort(codes[rows], kind="stable")]
    groups = random.permutation(codes.max() + 1)[codes]
    order = np.lexsort((random.random(len(codes)), groups))
    first = np.searchsorted(groups[order], groups[order])
    return order[np.arange(len(order)) - first < MAX_GROUP_ROWS][:MAX_SPLIT_ROWS]


def _compare(
    x: Float64[np.ndarray, "N I"], y: np.ndarray, codes: Index, is_regression: bool, is_time: bool
) -> tuple[Float64[np.ndarray, "M"], Float64[np.ndarray, "M"]]:
    """Score each row after a random split and after a split by `codes`.

    The score is 1 or 0 for a class, and 1 minus the squared error, in variances, for a target. If
    the split is by time, only the latest rows are scored.
    """
    from sklearn.ensemble import ExtraTreesClassifier, ExtraTreesRegressor
    from sklearn.model_selection import GroupKFold, KFold, cross_val_predict

    model = (ExtraTreesRegressor if is_regression else ExtraTreesClassifier)(TREES, random_state=0)
    if is_regression:
        y = y / (np.abs(y).max() or 1.0)  # Squares must not overflow.
        y = (y - y.mean()) / (y.std() or 1.0)

    def score(predicted: np.ndarray, target: np.ndarray) -> Float64[np.ndarray, "M"]:
        is_right = (predicted == target).astype(np.float64)
        return 1.0 - np.square(predicted - target) if is_regression else is_right

    folds = KFold(FOLDS, shuffle=True, random_state=0)
    random = score(cross_val_predict(model, x, y, cv=folds), y)
    if not is_time:
        by_group = cross_val_predict(model, x, y, groups=codes, cv=GroupKFold(FOLDS))
        return random, score(by_group, y)
    earlier, later = np.split(np.arange(len(y)), [len(y) - len(y) // FOLDS])
    predicted = model.fit(x[earlier], y[earlier]).predict(x[later])
    return random[later], score(predicted, y[later])
