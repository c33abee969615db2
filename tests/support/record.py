"""The page of figures that the long tests of trust keep: each has a row."""

import os
from pathlib import Path

from model_store.processes import processors

PAGE = Path(__file__).parent.parent.parent / "docs" / "results" / "trust.md"


def record(what, command, conditions, figure):
    """Print a test's figure, and put it into the page in place of its row; the test's row must be
    there."""
    cores = processors()
    row = f"| {what} | `{command}` | {cores} cores, {conditions} | {figure} |"
    print(row)
    lines = PAGE.read_text().splitlines()
    (place,) = (i for i, line in enumerate(lines) if line.startswith(f"| {what} |"))
    lines[place] = row
    PAGE.write_text("\n".join(lines) + "\n")


def parameter(name, default):
    """A number that the environment may set."""
    return type(default)(os.environ.get(name, default))
