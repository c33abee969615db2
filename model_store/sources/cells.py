"""Parse the text of table cells, such as numbers, dates, booleans and missing values.

Numbers can have a currency or percent sign, which is ignored: "$1,200.50" is 1200.5 and "12 %" is
12. If other numbers of the column are shares such as .129, "12 %" is .12. All numbers of a column
have the same format.

Times are ISO 8601 dates with an optional time of day, in UTC unless they have an offset. If the
training data uses another date format, such as 31.05.2024, that format is accepted too. A time is
converted to seconds since 1970.
"""

import re
from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from math import isfinite
from typing import Any
from unicodedata import normalize

import numpy as np
from jaxtyping import Float64

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, NumberStyle, NumericColumn

MISSING = (
    *("", "NA", "N/A", "n/a", "NULL", "null", "NaN", "nan", "-NaN", "-nan"),
    *("#NA", "#N/A", "#N/A N/A", "<NA>", "NaT"),
)
BOOLEANS = {"true", "false"}
BITS = {"true": "1", "false": "0", "1": "true", "0": "false"}
SIGNS = "$€£¥%"
MINUS = "\u2212"  # minus sign, in contrast to the hyphen
CLOCK = re.compile(r"(-?)(\d{1,5}):([0-5]\d)(?::([0-5]\d(?:\.\d+)?))?", re.ASCII)  # H:MM:SS
SPACES = "\u00a0\u202f\u2009"  # non-breaking and thin spaces
COMMA_NUMBER = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?", re.ASCII)
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}", re.ASCII)  # or a decimal comma
POINT_NUMBER = re.compile(r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?", re.ASCII)
MAX_CHARACTERS = 100  # per number or time
TIME_EXAMPLE = "2024-05-01 or 2024-05-01T13:30"
ISO = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}(?::?\d{2})?)?)?",
    re.ASCII,
)
Numbers = Float64[np.ndarray, "N"]  # numbers or times, NaN for missing values
Categories = list[str | None]  # None for missing values
# Numbers as programs write them, in contrast to codes such as 007 and 1E5
WHOLE = re.compile(r"([+-]?(?:0|[1-9]\d{0,99}))(?:\.0{0,99})?", re.ASCII)
DECIMAL = re.compile(
    r"[+-]?(?=[\d.])(?:0|[1-9]\d{0,99})?(?:\.\d{1,99})?(?:e[+-]\d{2,3})?", re.ASCII
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0
CLOCKS = ("", " %H:%M", " %H:%M:%S")
HAS_CLOCK = re.compile("%[HIMSXcfp]")
BEFORE_CLOCK = re.compile(r"(?<=\d)T(?=\d)")
EXAMPLE = datetime(2024, 5, 31)  # the day is not a valid month
CYCLES_S = {"year": 365.2425 * DAY_S, "week": 7 * DAY_S, "day": DAY_S}
PLAIN = NumberStyle()


def cell_reader(
    column: AnyColumn, missing: tuple[str, ...], has_commas: bool = False
) -> Callable[[str], Any]:
    """Return a function that converts a column's text cells to JSON values.

    Args:
        missing: texts of missing values, in addition to `MISSING` unless they contain "".
        has_commas: True if plain numbers have decimal commas.
    """
    texts = missing_texts(missing)
    categories = {*column.categories} if isinstance(column, CategoricalColumn) else set()

    def read(text: str) -> Any:
        if text in categories:
            return text
        stripped = text.strip()
        if stripped in texts:
            return None
        if isinstance(column, NumericColumn):
            return _number(stripped, column, has_commas)
        return match_category(text, categories) if categories else stripped

    return read


def missing_texts(missing: Collection[str]) -> set[str]:
    """Return the texts that denote a missing value.

    The default texts are included unless `missing` contains "".
    """
    return {*missing} if "" in missing else {*MISSING, *missing}


def category_text(value: str | float | Decimal | date) -> str:
    """Convert a value to a category name.

    Equal numbers have the same name, such as 3 for 3.0, and so do `True` and `TRUE`. Text with
    leading zeros, such as 007, is not a number.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        if value.lower() in BOOLEANS:
            return value.lower()
        if match := WHOLE.fullmatch(value):
            return str(int(match[1]))
        if not DECIMAL.fullmatch(value):
            return value
        value = float(value)
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return str(int(value)) if int(value) == value else repr(float(value))


def match_category(text: str, categories: AbstractSet[str]) -> str:
    """Return the category that matches a text, or the text itself if there is none.

    A match can differ in surrounding spaces, Unicode normal form, or the notation of a number or
    boolean. If all categories are booleans, 1 matches "true" and 0 matches "false", and vice versa.
    """
    if text in categories:
        return text
    trimmed = text.strip()
    plain = category_text(trimmed)
    forms = [trimmed, normalize("NFC", trimmed), normalize("NFD", trimmed), plain]
    if plain in BITS and (categories <= BOOLEANS or categories <= {"0", "1"}):
        forms.append(BITS[plain])
    return next((form for form in forms if form in categories), text)


def _number(text: str, column: NumericColumn, has_commas: bool) -> float | str:
    """Parse a number. Invalid text is returned unchanged so that the caller rejects it."""
    try:
        if column.written is not None:
            return parse_number(text, column.written)
        plain = text.replace(",", ".") if has_commas else text
        return parse_plain(plain) if is_number(plain) else parse_number(plain, PLAIN)
    except ValueError:
        return text


def is_number(text: str) -> bool:
    try:
        parse_plain(text)
    except ValueError:
        return False
    return True


def parse_plain(text: str) -> float:
    """Parse a number in Python's notation. Raise ValueError for other text."""
    if "_" in text:
        raise ValueError(text)
    return float(text.replace(MINUS, "-"))


def parse_number(text: str, style: NumberStyle) -> float:
    """Parse a formatted number with an optional sign.

    Accounting formats, such as (5) and 5-, are also accepted for -5. Raise ValueError for other
    text.
    """
    trimmed = "" if len(text) > MAX_CHARACTERS else text.translate(_TO_PLAIN).strip()
    if style.sign == ":":
        clock = CLOCK.fullmatch(trimmed)
        if clock is None:
            raise ValueError(text)
        seconds = 3600.0 * int(clock[2]) + 60.0 * int(clock[3]) + float(clock[4] or 0)
        return -seconds if clock[1] else seconds
    if trimmed.startswith("(") and trimmed.endswith(")"):
        trimmed = f"{trimmed[1:-1]}-"
    if trimmed.endswith("-") and trimmed[0] not in "+-":
        trimmed = f"-{trimmed[:-1]}"
    match = _pattern(style).fullmatch(trimmed)
    if match is None:
        raise ValueError(text)
    digits = match["whole"].replace(style.thousands or " ", "") or "0"
    number = float(f"{match['minus'] or ''}{digits}.{match['part'] or '0'}{match['power'] or ''}")
    return number / 100 if style.is_share and "%" in trimmed else number


def number_example(style: NumberStyle) -> str:
    if style.sign == ":":
        return "1:30:00"
    digits = f"1{style.thousands or ''}200{style.decimal}5"
    return f"{digits} %" if style.sign == "%" else f"{style.sign}{digits}"


def find_sign(text: str) -> str | None:
    """Return a formatted number's sign, "" if it has none, or None if it has several."""
    signs = [character for character in text if character in SIGNS]
    return None if len(signs) > 1 else "".join(signs)


_TO_PLAIN = str.maketrans({**dict.fromkeys(SPACES, " "), MINUS: "-"})


@lru_cache(maxsize=256)
def _pattern(style: NumberStyle) -> re.Pattern[str]:
    mark = re.escape(style.thousands or "")
    inner = r"\d{2,3}" if mark == "," else r"\d{3}"  # Indian groups, such as 1,23,456
    grouped = rf"\d{{1,3}}(?:{mark}{inner})*{mark}\d{{3}}|" if mark else ""
    sign = re.escape(style.sign)
    before = "" if style.sign in ("", "%") else f"(?:{sign} ?)?"
    after = f"(?: ?{sign})?" if style.sign else ""
    decimal = re.escape(style.decimal)
    digits = rf"(?P<whole>{grouped}\d*)(?:{decimal}(?P<part>\d*))?(?P<power>[eE][+-]?\d+)?"
    number = rf"(?={decimal}?\d){digits}"
    return re.compile(rf"(?P<minus>[+-])?{before}{number}{after}", re.ASCII)


def parse_time(date_format: str | None, text: str) -> float:
    """Convert a time to seconds since 1970, using a `strptime` format or ISO 8601.

    Formats without a time of day accept an optional one. Raise ValueError for other text.
    """
    if date_format is None:
        if not ISO.fullmatch(text):
            raise ValueError(text)
        return seconds_since(datetime.fromisoformat(text))
    stripped = "" if len(text) > MAX_CHARACTERS else text.strip()
    is_date_only = HAS_CLOCK.search(date_format) is None
    if is_date_only:
        stripped = BEFORE_CLOCK.sub(" ", stripped)
    for clock in CLOCKS if is_date_only else ("",):
        try:
            return seconds_since(datetime.strptime(stripped, date_format + clock))
        except (ValueError, re.error):  # re.error for repeated directives
            continue
    raise ValueError(text)


def is_date_format(date_format: str) -> bool:
    """Check whether a `strptime` format can represent dates without loss."""
    try:
        return parse_time(date_format, date_example(date_format)) == seconds_since(EXAMPLE)
    except ValueError:
        return False


def date_example(date_format: str) -> str:
    return EXAMPLE.strftime(date_format)


def seconds_since(time: datetime) -> float:
    """Convert a time to seconds since 1970. Times without a UTC offset are in UTC."""
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH).total_seconds()


def phases(seconds: Float64[np.ndarray, "N"], cycle: str) -> Float64[np.ndarray, "N 2"]:
    """Return the sine and cosine of a time's phase within a cycle."""
    angles = 2.0 * np.pi * np.mod(seconds, CYCLES_S[cycle]) / CYCLES_S[cycle]
    return np.stack([np.sin(angles), np.cos(angles)], axis=1)
