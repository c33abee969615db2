"""Rows that mean something where noise does not: every column drawn by itself, evenly over its
values.

Uniform noise over 0 and 1 is no row of a table: a one among zeros is never .37, so anything tells
    such rows apart,
and that says nothing. Here a category, or a number that has few values, is one of its values, each
as probable; any other number is uniform over its own range; a time as well, with the sines and
cosines that belong to it. No value is missing.
"""

import numpy as np
from jaxtyping import Float32, Num

from model_store.artifacts.manifest import (
    CategoricalColumn,
    InputSpec,
    NumericColumn,
    TimeColumn,
    column_width,
)
from model_store.sources.columns import encode
from training.seeds import EvaluationStream, generator

FEW_VALUES = 10  # up to which a number is one of them
SAYS = (
    "In place of noise, `even`: rows whose every column is drawn by itself, evenly over its "
    "categories, its few "
    "values or its range. Noise over numbers that are only ever some few values is told apart by "
    "anything."
)


def takes_even_rows(spec: InputSpec, x: Num[np.ndarray, "N I"]) -> bool:
    """Whether even rows take the place of noise: where rows have columns, or are no images and a
    number of theirs has few values.
    """
    is_image = len(spec.shape) == 2 or (len(spec.shape) == 3 and spec.shape[0] == 3)
    return bool(spec.columns) or (
        not is_image and any(len(np.unique(number)) <= FEW_VALUES for number in x.T)
    )


def even_rows(
    spec: InputSpec, x: Num[np.ndarray, "N I"], rows: int, *seed: int
) -> Float32[np.ndarray, "M I"]:
    """Return so many rows; values and ranges are those of the rows `x`, each number a column where
    there are none."""
    random = generator(*seed)
    columns = spec.columns or [
        NumericColumn(name=str(i), mean=0.0, std=1.0, indicator=False) for i in range(x.shape[1])
    ]
    parts = np.split(
        x.astype(np.float32), np.cumsum([column_width(column) for column in columns])[:-1], axis=1
    )
    made = []
    for column, part in zip(columns, parts, strict=True):
        there = part
        if not isinstance(column, CategoricalColumn) and column.indicator:
            present = part[part[:, -1] == 0.0]
            there = present if len(present) else part
        values = np.unique(there, axis=0)
        if isinstance(column, CategoricalColumn) or len(values) <= FEW_VALUES:
            made.append(values[random.integers(len(values), size=rows)])
            continue
        first = random.uniform(there[:, 0].min(), there[:, 0].max(), rows)
        if isinstance(column, TimeColumn):
            made.append(encode([column], {column.name: first * column.std + column.mean}))
        else:
            drawn = np.zeros((rows, part.shape[1]), dtype=np.float32)
            drawn[:, 0] = first
            made.append(drawn)
    return np.concatenate(made, axis=1)


def noise_or_even(
    spec: InputSpec, x: Num[np.ndarray, "N I"], seed: int
) -> Float32[np.ndarray, "N I"] | None:
    """Return even rows, as many as `x` has, in place of noise; None where noise means something."""
    return (
        even_rows(spec, x, len(x), seed, EvaluationStream.EVEN)
        if takes_even_rows(spec, x)
        else None
    )
