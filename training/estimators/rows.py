"""Rows of programs, arrays and DataFrames, as files that readers of data take."""

import io
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from jaxtyping import Shaped

from model_store.inference.frames import parquet_of
from training.recipe import DataSection


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
    content = parquet_of(table.append_column(called, pa.array(y)))
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
