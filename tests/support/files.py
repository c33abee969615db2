"""Create npy, npz and Parquet files."""

import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

NPY, NPZ, PARQUET = "application/x-npy", "application/x-npz", "application/vnd.apache.parquet"
ZIP, CSV = "application/zip", "text/csv"
ENDINGS = {NPY: ".npy", NPZ: ".npz", PARQUET: ".parquet", ZIP: ".zip", CSV: ".csv"}


def npy_bytes(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def npz_bytes(**arrays: Any) -> bytes:
    members = {
        f"{name}.npy": array if isinstance(array, bytes) else npy_bytes(array)
        for name, array in arrays.items()
    }
    return zip_bytes(members)


def zip_bytes(members: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def npy_header(shape: Any, dtype: Any = "<f4", fortran: Any = False) -> bytes:
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran!r}, 'shape': {shape!r}, }}"
    content = text.encode("latin-1") + b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(content).to_bytes(2, "little") + content


def parquet_bytes(table: Any, **options: Any) -> bytes:
    """Create a Parquet file from a table or columns."""
    file = io.BytesIO()
    data = table if isinstance(table, pa.Table) else pa.table(table)
    parquet.write_table(data, file, **options)
    return file.getvalue()
