"""Columns of text that are dates or times, as numbers of seconds.

A column is one of times if every value is, in one way of writing them. Where two ways are possible,
as of 03/04/2024, somebody has to say which (`data.date_format`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model_store.errors import InvalidInput
from model_store.sources.columns import Numbers
from model_store.sources.times import EXAMPLE, ISO, seconds_as_written, seconds_of

CLOCK = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2})?)?"
WRITTEN = {  # what text looks like, and the formats that it may be read by
    re.compile(r"\d{4}/\d{1,2}/\d{1,2}" + CLOCK, re.ASCII): ("%Y/%m/%d",),
    re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}" + CLOCK, re.ASCII): ("%d.%m.%Y",),
    re.compile(r"\d{1,2}/\d{1,2}/\d{4}" + CLOCK, re.ASCII): ("%d/%m/%Y", "%m/%d/%Y"),
    re.compile(r"\d{1,2}-\d{1,2}-\d{4}" + CLOCK, re.ASCII): ("%d-%m-%Y", "%m-%d-%Y"),
}
SHOWN = 40


@dataclass(frozen=True, eq=False)
class Times:
    """A column's times, NaN where missing, and the format of its dates: None of ISO 8601, and where
    several fit."""

    seconds: Numbers
    written: str | None


def times_of(
    values: Sequence[str | None], name: str, date_format: str | None, is_wanted: bool
) -> Times | None:
    """Return a column's times; None if it is not one of times.

    Raises:
        InvalidInput: if it could be read in two ways, or is wanted as one of times and is not.
    """
    distinct = {value for value in values if value is not None}
    forms = [
        form
        for form in _forms(distinct, date_format)
        if all(_reads(form, value) for value in distinct)
    ]
    if not distinct or not forms:
        if is_wanted:
            row, bad = _first_bad(values, date_format)
            expected = f"dates or times, such as {EXAMPLE}" + (
                f" ({date_format!r})" if date_format else ""
            )
            raise InvalidInput(f"column {name}", expected, f"{bad[:SHOWN]!r} in row {row}")
        return None
    tables = [{value: _seconds(form, value) for value in distinct} for form in forms]
    if any(table != tables[0] for table in tables[1:]):
        example = next(
            v for v in values if v is not None and len({table[v] for table in tables}) > 1
        )
        expected = (
            'dates that can be read in one way (data.date_format = "%d/%m/%Y" says that the day '
            'is first, "%m/%d/%Y" '
            "the month; `ignored` in data.columns leaves the column out)"
        )
        raise InvalidInput(f"column {name}", expected, repr(example[:SHOWN]))
    seconds = np.array(
        [np.nan if value is None else tables[0][value] for value in values], dtype=np.float64
    )
    return Times(seconds, forms[0] if len(forms) == 1 else None)


def _forms(distinct: set[str], date_format: str | None) -> tuple[str | None, ...]:
    """Return the ways in which values may be read, by how one of them looks: formats, None for ISO
    8601."""
    example = next(iter(sorted(distinct)), "")
    if ISO.fullmatch(example):
        return (None,)
    if date_format is not None:
        return (date_format,)
    return next((formats for looks, formats in WRITTEN.items() if looks.fullmatch(example)), ())


def _seconds(form: str | None, text: str) -> float:
    return seconds_of(text) if form is None else seconds_as_written(form, text)


def _reads(form: str | None, text: str) -> bool:
    try:
        _seconds(form, text)
    except (ValueError, OverflowError):
        return False
    return True


def _first_bad(values: Sequence[str | None], date_format: str | None) -> tuple[int, str]:
    """Return a row and its value that is not a time, in any way of writing them that is known."""
    forms = [
        None,
        *([date_format] if date_format else [form for some in WRITTEN.values() for form in some]),
    ]
    for row, value in enumerate(values):
        if value is not None and not any(_reads(form, value) for form in forms):
            return row, value
    return 0, str(next((value for value in values if value is not None), ""))
