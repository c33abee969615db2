"""Tables and progress bars for the terminal."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import numpy as np

MAX_CELL_CHARACTERS = 40


def format_cell(value: object) -> str:
    """Format a value for a table cell."""
    if value is None:
        return ""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else ""
    if isinstance(value, float | np.floating):
        return "" if math.isnan(value) else f"{value:.4g}"
    text = printable(str(value))
    return text if len(text) <= MAX_CELL_CHARACTERS else text[: MAX_CELL_CHARACTERS - 3] + "..."


def printable(text: str) -> str:
    """Replace control characters, because they could alter the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with right-aligned numbers."""
    cells = [[format_cell(value) for value in row] for row in rows]
    is_number = [
        all(isinstance(row[i], int | float | np.number) for row in rows) for i in range(len(heads))
    ]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    for line in (heads, ["-" * width for width in widths], *cells):
        columns = zip(line, widths, is_number, strict=True)
        padded = [v.rjust(width) if right else v.ljust(width) for v, width, right in columns]
        print("  ".join(padded).rstrip())


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], object]]:
    """Show a progress bar if rich is installed and standard error is a terminal.

    Yields a function that takes the completed share, from 0 to 1.
    """
    if not (sys.stderr.isatty() and find_spec("rich")):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda share: progress.update(task, completed=share)
