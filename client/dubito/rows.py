"""Encode arrays, DataFrames, objects, images and files for requests."""

import base64
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import numpy as np

from dubito.errors import InvalidInput
from dubito.retries import JSON, NPZ, Request

NPY = "application/x-npy"
MEDIA_TYPES = {
    ".npy": NPY,
    ".npz": NPZ,
    ".parquet": "application/vnd.apache.parquet",
    ".csv": "text/csv",
    ".tsv": "text/csv",  # The service detects the delimiter.
    ".zip": "application/zip",
}
PART_BYTES = 8 << 20  # maximum size of the rows in a request

RowsLike = np.ndarray | Iterable[Any]
"""An array, a tensor, a DataFrame, a pyarrow table, or a list of arrays, objects keyed by column,
strings, PIL images, or files (`bytes` or paths)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Encoded rows: one numeric array (N, ...), or each row's JSON or file content."""

    content: np.ndarray | Sequence[bytes]
    kind: Literal["numbers", "json", "files"]

    def __len__(self) -> int:
        return len(self.content)

    def take(self, part: slice) -> "Rows":
        return Rows(self.content[part], self.kind)

    def row_bytes(self, n: int) -> int:
        if isinstance(self.content, np.ndarray):
            return self.content.nbytes // len(self.content)
        return len(self.content[n])


def encode_rows(rows: RowsLike, field: str) -> Rows:
    rows = _as_array(_from_frame(rows, field), field)
    if isinstance(rows, np.ndarray) and rows.dtype.kind not in "biuf":
        rows = rows.tolist()
    if isinstance(rows, np.ndarray):
        return Rows(_numbers(rows, field), "numbers")
    is_single = isinstance(rows, str | bytes | Mapping | PathLike) or _is_image(rows)
    if is_single or not isinstance(rows, Iterable):
        raise InvalidInput(field, "a list of rows", f"a single {type(rows).__name__}")
    items = list(rows)
    if not items:
        raise InvalidInput(field, "at least one row", "none")
    if isinstance(items[0], bytes | PathLike) or _is_image(items[0]):
        return Rows([_file(row, f"{field}.{n}") for n, row in enumerate(items)], "files")
    items = [_as_array(row, f"{field}.{n}") for n, row in enumerate(items)]
    if isinstance(items[0], list | tuple | np.ndarray | int | float):
        array = _array(items)
        if array is not None:
            return Rows(_numbers(array, field), "numbers")
    return Rows([_json(row, f"{field}.{n}") for n, row in enumerate(items)], "json")


def encode_row(row: Any, field: str) -> Any:
    """Convert a row to a JSON value. Files and images are encoded as base64."""
    if isinstance(row, bytes | PathLike) or _is_image(row):
        return base64.b64encode(_file(row, field)).decode()
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(row, pandas.Series):
        row = row.to_dict()
    return to_json(_as_array(row, field), field)


def encode_id(value: Any, field: str) -> str:
    pandas = sys.modules.get("pandas")
    is_missing = pandas is not None and (value is pandas.NA or value is pandas.NaT)
    if value is None or is_missing or (isinstance(value, float) and math.isnan(value)):
        raise InvalidInput(field, "a name", "none")
    return str(value)


def split_rows(rows: Rows, max_rows: int) -> Iterator[slice]:
    """Split rows into slices of at most `max_rows` rows and `PART_BYTES` bytes."""
    first, part_bytes = 0, 0
    for n in range(len(rows)):
        size = rows.row_bytes(n)
        if n > first and (n - first >= max_rows or part_bytes + size > PART_BYTES):
            yield slice(first, n)
            first, part_bytes = n, 0
        part_bytes += size
    yield slice(first, len(rows))


def rows_request(
    path: str, field: str, rows: RowsLike | Path | None, options: Mapping[str, Any]
) -> Request:
    """Build a request that sends rows or a file, or names a file on the server."""
    file_field = f"{field}_file"
    if rows is None:
        if options.get(file_field) is None:
            raise InvalidInput(field, f"rows, or a {file_field}", "none")
        return replace(json_request(path, options), has_rows=True)
    if options.get(file_field) is not None:
        raise InvalidInput(file_field, f"either {field} or {file_field}", "both")
    if isinstance(rows, Path):
        media_type = MEDIA_TYPES.get(rows.suffix.lower())
        if media_type is None:
            expected = f"a file that ends in {', '.join(MEDIA_TYPES)}"
            raise InvalidInput(field, expected, repr(rows.name))
        return _body_request(path, rows.read_bytes(), media_type, options)
    return make_request(path, field, encode_rows(rows, field), options)


def make_request(path: str, field: str, rows: Rows, options: Mapping[str, Any]) -> Request:
    """Build a request that sends encoded rows.

    Arrays are sent as npy with the options in the query, or as npz if there are ids. Lists would
    make the query too long, so requests with other lists are JSON.
    """
    content, others = rows.content, {n: v for n, v in options.items() if n != "ids"}
    if isinstance(content, np.ndarray) and any(isinstance(v, list) for v in others.values()):
        content = [_json(row.tolist(), "rows") for row in content]
    if isinstance(content, np.ndarray):
        ids = options.get("ids")
        if ids is None:
            return _body_request(path, _npy(content), NPY, others)
        return _body_request(path, _npz(field, content, ids), NPZ, others)
    if rows.kind == "files":
        parts = [(str(n), file, "application/octet-stream") for n, file in enumerate(content)]
        files = [(field, part) for part in parts]
        return Request("POST", path, form=texts(options), files=files, has_rows=True)
    head = _json(options, "options")[:-1] + (b"," if options else b"")
    body = head + _json(field, "field") + b":[" + b",".join(content) + b"]}"
    return Request("POST", path, headers={"Content-Type": JSON}, content=body, has_rows=True)


def _body_request(
    path: str, content: bytes, media_type: str, options: Mapping[str, Any]
) -> Request:
    headers = {"Content-Type": media_type}
    return Request("POST", path, texts(options), headers, content, has_rows=True)


def json_request(path: str, content: Mapping[str, Any]) -> Request:
    return Request("POST", path, headers={"Content-Type": JSON}, content=_json(content, "body"))


def to_json(value: Any, field: str) -> Any:
    """Convert a value to JSON types: missing values to None, and dates to ISO 8601 strings."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise InvalidInput(field, "a finite number", repr(value))
        return None if math.isnan(value) else value
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else value.astype("datetime64[us]").item().isoformat()
    if isinstance(value, np.generic):
        return to_json(value.item(), field)
    if isinstance(value, date | time):
        return value.isoformat() if value == value else None  # NaT != NaT
    if isinstance(value, Mapping):
        return {str(name): to_json(part, f"{field}.{name}") for name, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [to_json(part, f"{field}.{n}") for n, part in enumerate(value)]
    if isinstance(value, Decimal):
        return to_json(float(value), field)
    pandas = sys.modules.get("pandas")
    if pandas is not None and value is pandas.NA:
        return None
    # Categories of pandas.cut, and values of columns that a fit leaves out
    kinds = () if pandas is None else (pandas.Interval, pandas.Period)
    if isinstance(value, (bytes, timedelta, UUID, *kinds)):
        return str(value)
    raise InvalidInput(field, "a number, a string, a date or None", type(value).__name__)


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else _json(value, name).decode()
        for name, value in options.items()
    }


def _from_frame(rows: Any, field: str) -> Any:
    """Convert frames, series and pyarrow tables to lists without importing their packages."""
    if not hasattr(rows, "columns"):
        return rows.to_list() if hasattr(rows, "to_list") else rows  # a series
    if hasattr(rows, "to_dicts"):  # polars
        return rows.to_dicts()
    names = rows.schema.names if hasattr(rows, "schema") else list(map(str, rows.columns))
    duplicates = [name for n, name in enumerate(names) if name in names[:n]]
    if duplicates:
        raise InvalidInput(field, "unique column names", f"more than one {duplicates[0]!r}")
    return rows.to_pylist() if hasattr(rows, "to_pylist") else rows.to_dict("records")


def _as_array(value: Any, field: str) -> Any:
    """Convert tensors and similar objects to arrays. Other objects are returned unchanged."""
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "__array__") or isinstance(value, np.generic) or _is_image(value):
            return value
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor on a GPU
            received = f"{type(value).__name__}: {error}"
            raise InvalidInput(field, "an object that numpy can convert", received) from None
    if isinstance(value, np.ma.MaskedArray):
        if value.mask.any():
            raise InvalidInput(field, "an array without masked values", "masked values")
        value = value.data
    if value.dtype.kind in "mM":
        expected = "numbers; send dates as strings or in a DataFrame"
        raise InvalidInput(field, expected, f"an array of {value.dtype}")
    return value


def _numbers(array: np.ndarray, field: str) -> np.ndarray:
    """Check an array's shape and convert it to a dtype that a request can contain."""
    if array.ndim < 2 or array.size == 0:
        expected = "rows of numbers, in an array of shape (N, ...)"
        raise InvalidInput(field, expected, f"an array of shape {array.shape}")
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    return array.astype(np.float64) if array.dtype.itemsize > 8 else array


def _array(rows: list[Any]) -> np.ndarray | None:
    try:
        array = np.asarray(rows)
    except ValueError:
        return None
    return array if array.dtype.kind in "biuf" else None


def _is_image(row: object) -> bool:
    images = sys.modules.get("PIL.Image")
    return images is not None and isinstance(row, images.Image)


def _file(row: Any, field: str) -> bytes:
    """Return the content of a file. Images are converted to PNG."""
    if isinstance(row, bytes):
        return row
    if isinstance(row, PathLike):
        return Path(row).read_bytes()
    if not _is_image(row):
        raise InvalidInput(field, "an image or a file, like the first row", type(row).__name__)
    file = io.BytesIO()
    try:
        row.save(file, "PNG")
    except (OSError, ValueError):
        expected = "an image with a mode that PNG supports (Image.convert)"
        raise InvalidInput(field, expected, f"mode {row.mode}") from None
    return file.getvalue()


def _json(value: Any, field: str) -> bytes:
    return json.dumps(to_json(value, field), allow_nan=False, separators=(",", ":")).encode()


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _npz(name: str, array: np.ndarray, ids: Sequence[str]) -> bytes:
    file = io.BytesIO()
    arrays = {name: np.ascontiguousarray(array), "ids": np.array(ids, dtype=np.str_)}
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()
