"""What people read in a terminal: tables, and a progress bar. Both are rich's where it is installed
and somebody looks; without it tables are plain text."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import numpy as np

LONGEST_CELL = 40


def format_cell(value: object) -> str:
    """Return a value as a cell: numbers to four digits, flags as `yes` or nothing, no control
    characters."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else ""
    if isinstance(value, float | np.floating):
        return "" if math.isnan(value) else f"{value:.4g}"
    text = printable(str(value))
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."


def printable(text: str) -> str:
    """Return a text without control characters, which a terminal would obey."""
    return "".join(mark if mark.isprintable() else "?" for mark in text)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows below their heads, numbers to the right."""
    cells = [[format_cell(value) for value in row] for row in rows]
    is_number = [
        all(isinstance(row[i], int | float | np.number) for row in rows) for i in range(len(heads))
    ]
    if not (sys.stdout.isatty() and find_spec("rich")):
        print(plain_table(heads, cells, is_number))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for head, right in zip(heads, is_number, strict=True):
        table.add_column(head, justify="right" if right else "left", no_wrap=True)
    for row in cells:
        table.add_row(*map(escape, row))
    Console().print(table)


def plain_table(
    heads: Sequence[str], cells: Sequence[Sequence[str]], is_number: Sequence[bool]
) -> str:
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]

    def line(values: Sequence[str]) -> str:
        columns = zip(values, widths, is_number, strict=True)
        padded = [v.rjust(width) if right else v.ljust(width) for v, width, right in columns]
        return "  ".join(padded).rstrip()

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, cells)])


@contextlib.contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float], object]]:
    """Give what shows that a share is done, from 0 to 1; nothing is shown where nobody looks."""
    if not (sys.stderr.isatty() and find_spec("rich")):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda share: progress.update(task, completed=share)
