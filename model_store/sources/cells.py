"""Cells of text, as people write them: missing values, booleans, and numbers such as $1,200.50,
12 % or 1.234,5. One reading for training and for the service.

A sign of money or percent stands before or after the digits, the same in all of a column's cells,
and counts for nothing: 12 % is 12, and not .12.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

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
LONGEST = 100  # characters of a text that is looked at


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
    categories = set(column.categories)
    is_boolean = categories <= BOOLEANS

    def read(text: str) -> str | None:
        if text in categories:
            return text
        stripped = text.strip()
        if stripped in nothing:
            return None
        if is_boolean and stripped.lower() in BOOLEANS:
            return stripped.lower()
        return stripped if stripped in categories else text

    return read


def _number(text: str, column: NumericColumn, has_commas: bool) -> float | str:
    """Return a number, or a text that is none as it is, which is refused and named later."""
    try:
        if column.written is not None:
            return number_of(text, column.written)
        return text if "_" in text else float(text.replace(",", ".") if has_commas else text)
    except ValueError:
        return text


def is_number(text: str) -> bool:
    """Whether a text is a number as Python writes it, also an infinite one."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def number_of(text: str, writing: NumberWriting) -> float:
    """Return the number of a text; the sign may be left out.

    Raises:
        ValueError: if it is not so written.
    """
    trimmed = "" if len(text) > LONGEST else text.translate(_TO_SPACE).strip()
    match = _pattern(writing).fullmatch(trimmed)
    if match is None:
        raise ValueError(text)
    whole = match["whole"].replace(writing.thousands, "") if writing.thousands else match["whole"]
    return float(f"{match['minus'] or ''}{whole}.{match['part'] or '0'}")


def number_example(writing: NumberWriting) -> str:
    """Return a number so written."""
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
