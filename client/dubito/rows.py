"""Encode arrays, DataFrames, objects, images and files for requests."""

import base64
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import numpy as np

from dubito.errors import InvalidInput
from dubito.retries import Request

JSON = "application/json"
NPY = "application/x-npy"
NPZ = "application/x-npz"
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
    """Encoded rows, either numbers (N, ...) or the JSON or file content of each row."""

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


def make_request(
    path: str, field: str, rows: Rows, options: Mapping[str, Any], headers: Mapping[str, str]
) -> Callable[[float | None], Request]:
    """Return a function that builds a request, given the remaining seconds.

    Arrays are sent as npy with the options in the query, or as npz if there are ids. Lists would
    make the query too long, so requests with other lists are JSON.
    """
    content, others = rows.content, {n: v for n, v in options.items() if n != "ids"}
    if isinstance(content, np.ndarray) and any(isinstance(v, list) for v in others.values()):
        content = [_json(row.tolist(), "rows") for row in content]
    if isinstance(content, np.ndarray):
        ids = options.get("ids")
        if ids is None:
            return body_request(path, _npy(content), NPY, others, headers)
        return body_request(path, _npz(field, content, ids), NPZ, others, headers)
    if rows.kind != "files":
        tail = json.dumps(field).encode() + b":[" + b",".join(content) + b"]}"

        def make(left_s: float | None) -> Request:
            head = _json(with_deadline(options, left_s), "options")[:-1]
            body = head + (b"," if len(head) > 1 else b"") + tail
            return Request("POST", path, headers={**headers, "Content-Type": JSON}, content=body)

        return make
    files = [(field, (str(n), file, "application/octet-stream")) for n, file in enumerate(content)]
    return lambda left_s: Request(
        "POST", path, {}, headers, None, texts(with_deadline(options, left_s)), files
    )


def body_request(
    path: str,
    content: bytes,
    media_type: str,
    options: Mapping[str, Any],
    headers: Mapping[str, str],
) -> Callable[[float | None], Request]:
    typed = {**headers, "Content-Type": media_type}
    return lambda left_s: Request(
        "POST", path, texts(with_deadline(options, left_s)), typed, content
    )


def json_request(path: str, content: Mapping[str, Any]) -> Request:
    return Request("POST", path, headers={"Content-Type": JSON}, content=_json(content, "body"))


def to_json(value: Any, field: str) -> Any:
    """Convert a value to JSON types. Missing values become None, dates ISO 8601 strings."""
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


def with_deadline(options: Mapping[str, Any], left_s: float | None) -> dict[str, Any]:
    return dict(options) if left_s is None else {**options, "deadline_s": left_s}


def _from_frame(rows: Any, field: str) -> Any:
    """Convert DataFrames, series and pyarrow tables to lists without importing their packages."""
    pandas, polars, pyarrow = map(sys.modules.get, ("pandas", "polars", "pyarrow"))
    if pandas is not None:
        if isinstance(rows, pandas.DataFrame):
            _check_distinct_names([str(name) for name in rows.columns], field)
            return rows.to_dict("records")
        if isinstance(rows, pandas.Series):
            return rows.tolist()
    if polars is not None:
        if isinstance(rows, polars.DataFrame):
            return rows.to_dicts()
        if isinstance(rows, polars.Series):
            return rows.to_list()
    if pyarrow is not None and isinstance(rows, pyarrow.Table | pyarrow.RecordBatch):
        _check_distinct_names(rows.schema.names, field)
        return rows.to_pylist()
    return rows


def _check_distinct_names(names: Sequence[str], field: str) -> None:
    duplicates = [name for n, name in enumerate(names) if name in names[:n]]
    if duplicates:
        raise InvalidInput(field, "unique column names", f"more than one {duplicates[0]!r}")


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
    """Check an array's shape, and convert it to numbers of up to 64 bits."""
    if array.ndim < 2 or array.size == 0:
        expected = "rows of numbers, in an array of shape (N, ...)"
        raise InvalidInput(field, expected, f"an array of shape {array.shape}")
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    return array.astype(np.float64) if array.dtype.itemsize > 8 else array


def _array(rows: list[Any]) -> np.ndarray | None:
    """Convert rows to a numeric array, or return None if that is not possible."""
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
