"""Dates and times as numbers: one reading for training and for the service.

A time is text in ISO 8601, a date alone (2024-05-01) or with a time of day, to seconds or their
parts, with or without an offset from UTC (2024-05-01T13:30, 2024-05-01 13:30:05.25+02:00). Without
an offset it is taken for UTC. Where the training data had dates in another form, such as
31.05.2024, text so written is a time too, with a time of day behind it or not. Its number is that
of the seconds since the beginning of 1970, in UTC.
"""

import re
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Float64

EXAMPLE = "2024-05-01 or 2024-05-01T13:30"
ISO = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
    re.ASCII,
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0
CLOCKS = ("", " %H:%M", " %H:%M:%S")
HAS_CLOCK = re.compile("%[HIMSXcfp]")
BEFORE_CLOCK = re.compile(r"(?<=\d)T(?=\d)")
LONGEST = 100  # characters of a text that is looked at
SHOWN = datetime(2024, 5, 31)  # a date of which nobody takes the day for the month
CYCLES_S = {"year": 365.2425 * DAY_S, "week": 7 * DAY_S, "day": DAY_S}


def seconds_of(text: str) -> float:
    """Return a time's number.

    Raises:
        ValueError: if the text is not a time in ISO 8601.
    """
    if not ISO.fullmatch(text):
        raise ValueError(text)
    return seconds_since(datetime.fromisoformat(text))


def seconds_as_written(date_format: str, text: str) -> float:
    """Return the number of a time that is written in a format of strptime's; one of dates takes a
    time of day too.

    Raises:
        ValueError: if the text is not so written.
    """
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
    """Return a date so written."""
    return SHOWN.strftime(date_format)


def seconds_since(time: datetime) -> float:
    """Return a time's number; without an offset it is taken for UTC."""
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH).total_seconds()


def phases(seconds: Float64[np.ndarray, "N"], cycle: str) -> Float64[np.ndarray, "N 2"]:
    """Return sine and cosine of where in a cycle times are."""
    angles = 2.0 * np.pi * np.mod(seconds, CYCLES_S[cycle]) / CYCLES_S[cycle]
    return np.stack([np.sin(angles), np.cos(angles)], axis=1)
