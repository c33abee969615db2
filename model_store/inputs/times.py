"""Dates and times as numbers: one reading for training and for the service.

A time is text in ISO 8601, a date alone (2024-05-01) or with a time of day, to seconds or their parts, with or
without an offset from UTC (2024-05-01T13:30, 2024-05-01 13:30:05.25+02:00). Without an offset it is
taken for UTC. Its number is that of the seconds since the beginning of 1970, in UTC.
"""

import re
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Float64

EXAMPLE = "2024-05-01 or 2024-05-01T13:30"
ISO = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?:Z|[+-]\d{2}:?\d{2})?)?", re.ASCII)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY_S = 86_400.0
CYCLES_S = {"year": 365.2425 * DAY_S, "week": 7 * DAY_S, "day": DAY_S}


def seconds_of(text: str) -> float:
    """Return a time's number.

    Raises:
        ValueError: if the text is not a time in ISO 8601.
    """
    if not ISO.fullmatch(text):
        raise ValueError(text)
    return seconds_since(datetime.fromisoformat(text))


def seconds_since(time: datetime) -> float:
    """Return a time's number; without an offset it is taken for UTC."""
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - EPOCH).total_seconds()


def phases(seconds: Float64[np.ndarray, "N"], cycle: str) -> Float64[np.ndarray, "N 2"]:
    """Return sine and cosine of where in a cycle times are."""
    angles = 2.0 * np.pi * np.mod(seconds, CYCLES_S[cycle]) / CYCLES_S[cycle]
    return np.stack([np.sin(angles), np.cos(angles)], axis=1)
