"""Save the figures of slow tests to a results page."""

import os
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "results" / "trust.md"


def record(label, figure):
    """Print a figure and update its row on the page."""
    row = f"| {label} | {figure} |"
    print(row)
    lines = PAGE.read_text().splitlines()
    (index,) = (i for i, line in enumerate(lines) if line.startswith(f"| {label} |"))
    lines[index] = row
    PAGE.write_text("\n".join(lines) + "\n")


def parameter(name, default):
    """Read a number from the environment."""
    return type(default)(os.environ.get(name, default))
