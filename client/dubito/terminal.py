"""What people read in a terminal: tables, numbers, and a progress bar."""

import math
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

import numpy as np

BAR_WIDTH = 30
LONGEST_CELL = 40


def shown(value: object) -> str:
    """Return a value as a cell: numbers to four digits, flags as `yes` or nothing, no control
    characters."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else ""
    if isinstance(value, float | np.floating):
        return "" if math.isnan(value) else f"{value:.4g}"
    text = "".join(mark if mark.isprintable() else "?" for mark in str(value))
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return rows below their heads, numbers to the right."""
    cells = [[shown(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    is_number = [
        all(isinstance(row[i], int | float | np.number) for row in rows) for i in range(len(heads))
    ]

    def line(values: Sequence[str]) -> str:
        columns = zip(values, widths, is_number, strict=True)
        return "  ".join(
            v.rjust(width) if right else v.ljust(width) for v, width, right in columns
        ).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, cells)])


class ProgressBar:
    """A bar that says how much is done and how long the rest will take; nothing where nobody
    looks."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self.title = title
        self.stream = sys.stderr if stream is None else stream
        self.is_seen = self.stream.isatty()
        self.begun = time.monotonic()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        if self.is_seen:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def __call__(self, share: float) -> None:
        """Show that a share is done, from 0 to 1."""
        if not self.is_seen:
            return
        self.stream.write(f"\r{bar(self.title, share, time.monotonic() - self.begun)}\x1b[K")
        self.stream.flush()


def bar(title: str, share: float, passed_s: float) -> str:
    """Return the bar's line, when a share is done after so many seconds."""
    full = round(BAR_WIDTH * share)
    left = f"{math.ceil(passed_s * (1 - share) / share)} s left" if share > 0 else ""
    return f"{title} [{'#' * full}{'.' * (BAR_WIDTH - full)}] {share:4.0%} {left}".rstrip()
