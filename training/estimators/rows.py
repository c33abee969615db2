"""Rows of programs, arrays and DataFrames, as files that readers of data take."""

import io
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Shaped

from model_store.artifacts.manifest import InputSpec
from model_store.sources.columns import from_cells
from model_store.sources.parquet import ParquetFile, write_tables
from training.data.arrays import numbers
from training.recipe import DataSection


def is_frame(X: Any) -> bool:
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def table_of(X: Any, names: list[str] | None) -> pa.Table:
    """Return a DataFrame of pandas or polars, or an array, as a table; without names, its columns
    are called x0, x1, ..."""
    if not is_frame(X):
        columns = [pa.array(column, from_pandas=True) for column in X.astype(np.float64).T]
        table = pa.Table.from_arrays(columns, names=[""] * len(columns))
    elif hasattr(X, "to_arrow"):  # polars
        table = X.to_arrow()
    else:
        table = pa.Table.from_pandas(X, preserve_index=False).replace_schema_metadata(None)
    return table.rename_columns(names or [f"x{i}" for i in range(table.num_columns)])


def keep_table(
    table: pa.Table,
    y: Shaped[np.ndarray, "N"],
    target: object,
    kinds: Mapping[str, str],
    given: Mapping[str, Any],
    folder: Path,
) -> DataSection:
    """Write a table and its targets to a folder, and return the `[data]` that names them, with what
    else is given of it."""
    names = table.column_names
    called = target if isinstance(target, str) and target not in names else "y"
    while called in names:
        called += "_"
    content = _parquet(table.append_column(called, pa.array(y)))
    file = f"rows-{sha256(content).hexdigest()[:16]}.parquet"
    columns = {**kinds, **given.get("columns", {})}
    section = {**given, "source": f"parquet:{file}", "target": called, "columns": columns}
    return _keep(content, section, folder / file)


def keep_arrays(
    x: Shaped[np.ndarray, "N ..."],
    y: Shaped[np.ndarray, "N"],
    given: Mapping[str, Any],
    folder: Path,
) -> DataSection:
    content = io.BytesIO()
    np.savez(content, x=x, y=y)
    digest = sha256(np.ascontiguousarray(x).data)
    digest.update(repr((x.shape, x.dtype, y.tolist())).encode())
    file = f"rows-{digest.hexdigest()[:16]}.npz"
    return _keep(content.getvalue(), {**given, "source": f"npz:{file}"}, folder / file)


def _keep(content: bytes, section: dict[str, Any], path: Path) -> DataSection:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return DataSection.model_validate(section)


def encoded(X: Any, spec: InputSpec, names: list[str] | None) -> Float32[np.ndarray, "N I"]:
    """Return rows as a model takes them, by the way of files that are sent to the service.

    Raises:
        InvalidInput: naming the row and column that cannot be used.
    """
    if not spec.columns:
        return numbers(X, "X").astype(np.float32)
    parts, first = [], 0
    for part in ParquetFile(_parquet(table_of(X, names)), spec, "X").parts():
        assert isinstance(part, dict)
        parts.append(from_cells(part, spec.columns, "X", first))
        first += len(parts[-1])
    return np.concatenate(parts)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    write_tables(sink, [table])
    content: bytes = sink.getvalue().to_pybytes()
    return content
