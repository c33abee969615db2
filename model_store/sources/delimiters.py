"""What stands between the cells of CSV files. One recognition for training and for the service."""

import csv
import io

SAMPLE_LINES = 100
DELIMITERS = (",", ";", "\t", "|")


def delimiter_of(sample: str) -> str:
    """Return the delimiter by which all lines of a sample have as many cells, most of all
    delimiters; or a comma."""
    best, cells = ",", 1
    for delimiter in DELIMITERS:
        rows = [
            row for row in csv.reader(io.StringIO(sample, newline=""), delimiter=delimiter) if row
        ]
        widths = {len(row) for row in rows[: max(1, min(SAMPLE_LINES, len(rows) - 1))]}
        if len(widths) == 1 and (width := widths.pop()) > cells:
            best, cells = delimiter, width
    return best
