"""Write results as column files, Parquet or npz."""

import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from model_store.artifacts.disk import make_folder, replace_file
from model_store.artifacts.manifest import Manifest
from model_store.inference.answers import join_names
from service.api.predictions import part_names

LAYOUT = "columns.json"


class ColumnFiles:
    """Append-only columns in a folder. Synced rows survive a crash.

    Each column is a file of raw numbers, starting with `0.bin`. `columns.json` has the number of
    rows, and the name, type and row shape of each column.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = 0
        self.note: dict[str, Any] = {}
        self._layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._files: dict[str, BinaryIO] = {}
        make_folder(folder)
        if (folder / LAYOUT).exists():
            layout = json.loads((folder / LAYOUT).read_text())
            self.rows, self.note = layout["rows"], layout["note"]
            self._layout = {
                name: (np.dtype(dtype), tuple(shape)) for name, dtype, shape in layout["columns"]
            }
            for name in self._layout:
                self._open(name).truncate(self.rows * self._row_bytes(name))
        else:
            for entry in folder.iterdir():
                entry.unlink()

    @property
    def names(self) -> list[str]:
        return list(self._layout)

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        if not self._layout:
            self._layout = {name: (array.dtype, array.shape[1:]) for name, array in columns.items()}
        for name, (dtype, shape) in self._layout.items():
            array = columns[name]
            if array.dtype != dtype or array.shape[1:] != shape:
                raise ValueError(
                    f"{name}: expected {dtype} of shape {shape}, got {array.dtype} of "
                    f"{array.shape[1:]}"
                )
            self._open(name).write(array.tobytes())
        self.rows += len(next(iter(columns.values())))

    def sync(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        columns = [[name, dtype.str, shape] for name, (dtype, shape) in self._layout.items()]
        layout = {"rows": self.rows, "note": self.note, "columns": columns}
        replace_file(self.folder / LAYOUT, json.dumps(layout).encode())

    def column(self, name: str) -> np.ndarray:
        dtype, shape = self._layout[name]
        if self.rows == 0:
            return np.empty((0, *shape), dtype=dtype)
        if name in self._files:
            self._files[name].flush()
        return np.memmap(self._path(name), dtype=dtype, mode="r", shape=(self.rows, *shape))

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = self._path(name).open("ab")
        return self._files[name]

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.names.index(name)}.bin"

    def _row_bytes(self, name: str) -> int:
        dtype, shape = self._layout[name]
        return int(dtype.itemsize * np.prod(shape, dtype=np.int64))


def write_parquet(
    sink: Any, groups: Iterable[Mapping[str, Any]], metadata: Mapping[str, str]
) -> None:
    """Write a table from the columns of its row groups.

    The bytes are reproducible.
    """
    import pyarrow

    from model_store.sources.parquet import write_tables

    def table(columns: Mapping[str, Any]) -> Any:
        arrays = {
            name: pyarrow.array(column, pyarrow.string() if isinstance(column, list) else None)
            for name, column in columns.items()
        }
        return pyarrow.table(arrays).replace_schema_metadata(dict(metadata))

    write_tables(sink, map(table, groups))


def parquet_bytes(columns: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    sink = io.BytesIO()
    write_parquet(sink, [columns], metadata)
    return sink.getvalue()


def table_columns(manifest: Manifest, arrays: Iterable[tuple[str, np.ndarray]]) -> dict[str, Any]:
    """Convert arrays to table columns.

    A two-dimensional array becomes several columns, such as `probabilities.cat`.
    """
    parts = part_names(manifest)
    table: dict[str, Any] = {}
    for name, values in arrays:
        if name == "missing":
            table[name] = join_names(manifest, values)
        elif values.ndim == 1:
            table[name] = values.tolist() if values.dtype.kind == "U" else values
        else:
            table |= {f"{name}.{part}": values[:, i] for i, part in enumerate(parts[name])}
    return table


def table_metadata(about: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {f"dubito.{name}": str(value.tolist()) for name, value in about.items()}
