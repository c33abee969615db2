"""Cells of text, as people write them: missing values, booleans, numbers such as $1,200.50, 12 % or
1.234,5, and times. One reading for training and for the service.

A sign of money or percent stands before or after the digits, the same in all of a column's cells,
and counts for nothing: 12 % is 12, and not .12.

A time is text in ISO 8601, a date alone (2024-05-01) or with a time of day, to seconds or their
parts, with or without an offset from UTC (2024-05-01T13:30, 2024-05-01 13:30:05.25+02:00). Without
an offset it is in UTC. Where the training data had dates in another form, such as 31.05.2024, text
so written is a time too, with a time of day after it or not. Its number is that of the seconds
since the beginning of 1970, in UTC.
"""

import re
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Float64

from model_store.artifacts.manifest import (
    AnyColumn,
    CategoricalColumn,
    NumberWriting,
    NumericColumn,
)

MISSING = (
    *("", "NA", "N/A", "n/a", "NULL", "null", "NaN", "nan", "-NaN", "-nan"),
    *("#NA", "#N/A", "#N/A N/A"),
)
BOOLEANS = {"true", "false"}
SIGNS = "$€£¥%"
SPACES = "\u00a0\u202f"  # that no line is broken at: as good as a space
COMMA_NUMBER = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?", re.ASCII)
THOUSANDS = re.compile(r"[+-]?\d{1,3},\d{3}", re.ASCII)  # which one of a comma may look like
POINT_NUMBER = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?", re.ASCII)
LONGEST = 100  # characters of a text that is looked at
TIME_EXAMPLE = "2024-05-01 or 2024-05-01T13:30"
ISO = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
    re.ASCII,
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0
CLOCKS = ("", " %H:%M", " %H:%M:%S")
HAS_CLOCK = re.compile("%[HIMSXcfp]")
BEFORE_CLOCK = re.compile(r"(?<=\d)T(?=\d)")
SHOWN = datetime(2024, 5, 31)  # a date of which nobody takes the day for the month
CYCLES_S = {"year": 365.2425 * DAY_S, "week": 7 * DAY_S, "day": DAY_S}


def cell_reader(
    column: AnyColumn, missing: tuple[str, ...], has_commas: bool = False
) -> Callable[[str], Any]:
    """Return a function from a column's cells as text to cells as JSON would have them.

    Args:
        missing: values that mean a missing cell, besides those that always do.
        has_commas: whether plain numbers have decimal commas.
    """
    nothing = {*MISSING, *missing}
    if isinstance(column, CategoricalColumn):
        return _category_reader(column, nothing)

    def read(text: str) -> Any:
        text = text.strip()
        if text in nothing:
            return None
        return _number(text, column, has_commas) if isinstance(column, NumericColumn) else text

    return read


def _category_reader(column: CategoricalColumn, nothing: set[str]) -> Callable[[str], str | None]:
    categories = frozenset(column.categories)

    def read(text: str) -> str | None:
        if text in categories:
            return text
        return None if text.strip() in nothing else as_trained(text, categories)

    return read


def as_trained(text: str, categories: AbstractSet[str]) -> str:
    """Return a text as training read it: it trims cells, and has booleans in lower case. One that
    is none of the categories even so stays as it is."""
    if text in categories:
        return text
    trimmed = text.strip()
    if categories <= BOOLEANS:
        trimmed = trimmed.lower()
    return trimmed if trimmed in categories else text


def _number(text: str, column: NumericColumn, has_commas: bool) -> float | str:
    """Return a number, or a text that is none as it is, which is refused and named later."""
    try:
        if column.written is not None:
            return number_of(text, column.written)
        return text if "_" in text else float(text.replace(",", ".") if has_commas else text)
    except ValueError:
        return text


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def number_of(text: str, writing: NumberWriting) -> float:
    """Return the number of a text; the sign may be left out. ValueError if it is not so written."""
    trimmed = "" if len(text) > LONGEST else text.translate(_TO_SPACE).strip()
    match = _pattern(writing).fullmatch(trimmed)
    if match is None:
        raise ValueError(text)
    whole = match["whole"].replace(writing.thousands, "") if writing.thousands else match["whole"]
    return float(f"{match['minus'] or ''}{whole}.{match['part'] or '0'}")


def number_example(writing: NumberWriting) -> str:
    digits = f"1{writing.thousands or ''}200{writing.decimal}5"
    return f"{digits} %" if writing.sign == "%" else f"{writing.sign}{digits}"


def sign_of(text: str) -> str | None:
    """Return the sign in a text, "" where there is none, None where there are several."""
    found = [character for character in text if character in SIGNS]
    return None if len(found) > 1 else "".join(found)


_TO_SPACE = str.maketrans(dict.fromkeys(SPACES, " "))


@lru_cache(maxsize=256)
def _pattern(writing: NumberWriting) -> re.Pattern[str]:
    grouped = rf"\d{{1,3}}(?:{re.escape(writing.thousands)}\d{{3}})+|" if writing.thousands else ""
    sign = re.escape(writing.sign)
    before = "" if writing.sign in ("", "%") else f"(?:{sign} ?)?"
    after = f"(?: ?{sign})?" if writing.sign else ""
    number = rf"(?P<whole>{grouped}\d+)(?:{re.escape(writing.decimal)}(?P<part>\d+))?"
    return re.compile(rf"(?P<minus>[+-])?{before}{number}{after}", re.ASCII)


def seconds_of(text: str) -> float:
    """Return the number of a time in ISO 8601; ValueError of another text."""
    if not ISO.fullmatch(text):
        raise ValueError(text)
    return seconds_since(datetime.fromisoformat(text))


def seconds_as_written(date_format: str, text: str) -> float:
    """Return the number of a time that is written in a format of strptime's, else ValueError;
    one of dates takes a time of day too."""
    stripped = "" if len(text) > LONGEST else text.strip()
    is_of_dates = HAS_CLOCK.search(date_format) is None
    if is_of_dates:
        stripped = BEFORE_CLOCK.sub(" ", stripped)
    for clock in CLOCKS if is_of_dates else ("",):
        try:
            return seconds_since(datetime.strptime(stripped, date_format + clock))
        except (ValueError, re.error):  # the second of a format that names something twice
            continue
    raise ValueError(text)


def is_date_format(date_format: str) -> bool:
    """Return whether a date that is written in a format of strptime's can be read again."""
    try:
        return seconds_as_written(date_format, date_example(date_format)) == seconds_since(SHOWN)
    except ValueError:
        return False


def date_example(date_format: str) -> str:
    return SHOWN.strftime(date_format)


def seconds_since(time: datetime) -> float:
    """Return a time's number; without an offset it is taken for UTC."""
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH).total_seconds()


def phases(seconds: Float64[np.ndarray, "N"], cycle: str) -> Float64[np.ndarray, "N 2"]:
    """Return sine and cosine of where in a cycle times are."""
    angles = 2.0 * np.pi * np.mod(seconds, CYCLES_S[cycle]) / CYCLES_S[cycle]
    return np.stack([np.sin(angles), np.cos(angles)], axis=1)
