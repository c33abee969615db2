"""Predictions as a table of Parquet: a column for each number of a row, such as
`probabilities.cat`."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from model_store.artifacts.manifest import Manifest
from service.api.predictions import part_names


def table_columns(manifest: Manifest, of_rows: Iterable[tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Return the columns of a table, given `row_arrays`: what has several numbers a row becomes
    several columns."""
    parts = part_names(manifest)
    table: dict[str, Any] = {}
    for name, values in of_rows:
        if values.ndim == 1:
            table[name] = values.tolist() if values.dtype.kind == "U" else values
        else:
            table |= {f"{name}.{part}": values[:, i] for i, part in enumerate(parts[name])}
    return table


def table_metadata(about: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return what is said of all rows, given `about_arrays` and the like."""
    return {f"dubito.{name}": str(value.tolist()) for name, value in about.items()}
