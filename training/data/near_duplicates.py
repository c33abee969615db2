"""Rows that a fit has seen nearly the same already: what calibrates and measures on them flatters
the model."""

import numpy as np
from jaxtyping import Float32, UInt8

from training.data.rows import Rows, Splits

DIGITS = 3  # of numbers that are compared, in standard deviations of all of them
CHUNK_ROWS = 1024
TOLD_SHARE = 0.01  # of a split's rows from which on, and more than one, they are worth a word
ADVICE = (
    "calibration and test rows that the fit has seen look surer than new ones will; data.group "
    "keeps what belongs "
    "together in one split"
)


def near_duplicates(splits: Splits, takes_ids: bool = False) -> dict[str, int]:
    """Return how many rows of each other split are nearly the same as a training row, in all their
    numbers.

    Of ids, which are not near to each other, they are the same.
    """
    scale = 1.0 if takes_ids else _scale(splits.train.x)
    seen = set(_keys(splits.train, scale))
    others = {name: rows for name, rows in vars(splits).items() if name != "train"}
    return {name: sum(key in seen for key in _keys(rows, scale)) for name, rows in others.items()}


def told(splits: Splits, takes_ids: bool = False) -> list[str]:
    """Return a line if a split has more than a few such rows."""
    counts = near_duplicates(splits, takes_ids)
    many = [
        f"{count} of {len(getattr(splits, name))} {name}"
        for name, count in counts.items()
        if count > max(1.0, TOLD_SHARE * len(getattr(splits, name)))
    ]
    return [f"rows nearly the same as a training row: {', '.join(many)}; {ADVICE}"] if many else []


def _scale(x: Float32[np.ndarray, "N I"] | UInt8[np.ndarray, "N I"]) -> float:
    spread = float(np.std(x[:CHUNK_ROWS].astype(np.float64)))
    return 10.0**DIGITS / spread if spread > 0 else 1.0


def _keys(rows: Rows, scale: float) -> list[int]:
    """Return a number for each row, the same of rows that are alike."""
    keys = []
    for first in range(0, len(rows), CHUNK_ROWS):
        chunk = (
            np.round(rows.x[first : first + CHUNK_ROWS].astype(np.float64) * scale) + 0.0
        )  # no -0
        keys += [hash(row.tobytes()) for row in chunk]
    return keys
