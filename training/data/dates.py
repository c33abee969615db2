"""Columns of text that are dates or times, as numbers of seconds.

A column is one of times if every value is, in one way of writing them. Where two ways are possible, as of 03/04/2024,
somebody has to say which (`data.date_format`).
"""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial

import numpy as np

from model_store.errors import InvalidInput
from model_store.inputs.columns import Numbers
from model_store.inputs.times import EXAMPLE, ISO, seconds_of, seconds_since

CLOCK = r"(?:[T ]\d{1,2}:\d{2}(?::\d{2})?)?"
WRITTEN = {  # what text looks like, and the formats that it may be read by
    re.compile(r"\d{4}/\d{1,2}/\d{1,2}" + CLOCK, re.ASCII): ("%Y/%m/%d",),
    re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}" + CLOCK, re.ASCII): ("%d.%m.%Y",),
    re.compile(r"\d{1,2}/\d{1,2}/\d{4}" + CLOCK, re.ASCII): ("%d/%m/%Y", "%m/%d/%Y"),
    re.compile(r"\d{1,2}-\d{1,2}-\d{4}" + CLOCK, re.ASCII): ("%d-%m-%Y", "%m-%d-%Y"),
}
CLOCKS = ("", " %H:%M", " %H:%M:%S")
SHOWN = 40


def times_of(values: Sequence[str | None], name: str, date_format: str | None, is_wanted: bool) -> Numbers | None:
    """Return a column's times, NaN where missing; None if it is not one of times.

    Raises:
        InvalidInput: if it could be read in two ways, or is wanted as one of times and is not.
    """
    distinct = {value for value in values if value is not None}
    readers: list[Callable[[str], float]]
    readers = [reader for reader in _readers(distinct, date_format) if all(_reads(reader, v) for v in distinct)]
    if not distinct or not readers:
        if is_wanted:
            row, bad = _first_bad(values, date_format)
            expected = f"dates or times, such as {EXAMPLE}" + (f" ({date_format!r})" if date_format else "")
            raise InvalidInput(f"column {name}", expected, f"{bad[:SHOWN]!r} in row {row}")
        return None
    tables = [{value: reader(value) for value in distinct} for reader in readers]
    if any(table != tables[0] for table in tables[1:]):
        example = next(v for v in values if v is not None and len({table[v] for table in tables}) > 1)
        expected = (
            'dates that can be read in one way (data.date_format = "%d/%m/%Y" says that the day is first, "%m/%d/%Y" '
            "the month; `ignored` in data.columns leaves the column out)"
        )
        raise InvalidInput(f"column {name}", expected, repr(example[:SHOWN]))
    return np.array([np.nan if value is None else tables[0][value] for value in values], dtype=np.float64)


def _readers(distinct: set[str], date_format: str | None) -> list[Callable[[str], float]]:
    """Return the ways in which values may be read, by how one of them looks."""
    example = next(iter(sorted(distinct)), "")
    if ISO.fullmatch(example):
        return [seconds_of]
    if date_format is not None:
        return [partial(_read, date_format)]
    formats = next((formats for looks, formats in WRITTEN.items() if looks.fullmatch(example)), ())
    return [partial(_read, form) for form in formats]


def _read(date_format: str, text: str) -> float:
    for clock in CLOCKS:
        try:
            return seconds_since(datetime.strptime(text.replace("T", " "), date_format + clock))
        except ValueError:
            continue
    raise ValueError(text)


def _reads(reader: Callable[[str], float], text: str) -> bool:
    try:
        reader(text)
    except (ValueError, OverflowError):
        return False
    return True


def _first_bad(values: Sequence[str | None], date_format: str | None) -> tuple[int, str]:
    """Return a row and its value that is not a time, in any way of writing them that is known."""
    formats = [date_format] if date_format else [form for forms in WRITTEN.values() for form in forms]
    for row, value in enumerate(values):
        readers: list[Callable[[str], float]] = [seconds_of, *(partial(_read, form) for form in formats)]
        if value is not None and not any(_reads(reader, value) for reader in readers):
            return row, value
    return 0, str(next((value for value in values if value is not None), ""))
