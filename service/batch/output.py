"""Write results as records or Parquet."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from model_store.artifacts.disk import make_folder, replace_file
from model_store.artifacts.manifest import Manifest
from model_store.inference.answers import join_names
from service.api.predictions import part_names

LAYOUT, RECORDS = "layout.json", "records.bin"


class ResultRecords:
    """Append-only records in a folder. Synced records survive a crash.

    `records.bin` has one record per row. `layout.json` has the number of rows and the name, type
    and row shape of each column.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = 0
        self.note: dict[str, Any] = {}
        self._dtype = np.dtype([])
        make_folder(folder)
        if (folder / LAYOUT).exists():
            layout = json.loads((folder / LAYOUT).read_text())
            self.rows, self.note = layout["rows"], layout["note"]
            self._dtype = np.dtype([(n, t, *map(tuple, shape)) for n, t, *shape in layout["dtype"]])
        if self.rows > 0:
            os.truncate(folder / RECORDS, self.rows * self._dtype.itemsize)
        self._file = (folder / RECORDS).open("ab" if self.rows > 0 else "wb")

    def append(self, columns: Mapping[str, np.ndarray]) -> None:
        if not self._dtype.names:
            fields = [(name, array.dtype, array.shape[1:]) for name, array in columns.items()]
            self._dtype = np.dtype(fields)
        records = np.empty(len(next(iter(columns.values()))), self._dtype)
        for name, array in columns.items():
            records[name] = array
        self._file.write(records.tobytes())
        self.rows += len(records)

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        layout = {"rows": self.rows, "note": self.note, "dtype": self._dtype.descr}
        replace_file(self.folder / LAYOUT, json.dumps(layout).encode())

    def columns(self) -> dict[str, np.ndarray]:
        """Map the synced columns into memory."""
        if self.rows == 0:
            records = np.empty(0, self._dtype)
        else:
            records = np.memmap(self.folder / RECORDS, self._dtype, "r", shape=(self.rows,))
        return {name: records[name] for name in self._dtype.names or ()}

    def close(self) -> None:
        self._file.close()


def to_table(columns: Mapping[str, Any], metadata: Mapping[str, str]) -> Any:
    """Convert columns to an Arrow table. Lists become text."""
    import pyarrow

    arrays = {
        name: pyarrow.array(column, pyarrow.string() if isinstance(column, list) else None)
        for name, column in columns.items()
    }
    return pyarrow.table(arrays).replace_schema_metadata(dict(metadata))


def table_columns(manifest: Manifest, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Convert arrays to table columns. A matrix becomes columns such as `probabilities.cat`."""
    parts = part_names(manifest)
    table: dict[str, Any] = {}
    for name, values in arrays.items():
        if name == "missing":
            table[name] = join_names(manifest, values)
        elif values.ndim == 1:
            table[name] = values.tolist() if values.dtype.kind == "U" else values
        else:
            table |= {f"{name}.{part}": values[:, i] for i, part in enumerate(parts[name])}
    return table


def table_metadata(metadata: Mapping[str, np.ndarray]) -> dict[str, str]:
    return {f"dubito.{name}": str(value.tolist()) for name, value in metadata.items()}
