"""Rows as users have them, encoded for a request: as an array, as JSON, or as files of a form."""

import base64
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from os import PathLike
from pathlib import Path
from typing import Any, Literal

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
    ".tsv": "text/csv",  # whatever stands between cells is recognised
    ".zip": "application/zip",
}
PART_BYTES = 8 << 20  # of the rows of a request, unless there is only one

RowsLike = np.ndarray | Iterable[Any]
"""An array of rows, or an object that numpy converts, such as a tensor; a DataFrame of pandas or
polars, or a table of pyarrow; a list of arrays, of objects keyed by column, of strings, of PIL
images, or of files as `bytes` or paths."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Encoded rows: numbers (N, ...), or the bytes of each row's JSON or file."""

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
    """Encode rows."""
    rows = _as_array(_from_frame(rows, field), field)
    if isinstance(rows, np.ndarray) and rows.dtype.kind not in "biuf":
        rows = rows.tolist()  # strings, or whatever objects
    if isinstance(rows, np.ndarray):
        return Rows(_numbers(rows, field), "numbers")
    is_single = isinstance(rows, str | bytes | Mapping | PathLike) or _is_image(rows)
    if is_single or not isinstance(rows, Iterable):
        raise InvalidInput(field, "rows, such as a list of one", f"a single {type(rows).__name__}")
    listed = list(rows)
    if not listed:
        raise InvalidInput(field, "at least one row", "none")
    if isinstance(listed[0], bytes | PathLike) or _is_image(listed[0]):
        return Rows([_file(row, f"{field}.{n}") for n, row in enumerate(listed)], "files")
    listed = [_as_array(row, f"{field}.{n}") for n, row in enumerate(listed)]
    if isinstance(listed[0], list | tuple | np.ndarray | int | float):
        array = _array(listed)
        if array is not None:
            return Rows(_numbers(array, field), "numbers")
    return Rows([_json(row, f"{field}.{n}") for n, row in enumerate(listed)], "json")


def encode_row(row: Any, field: str) -> Any:
    """Return a row as a JSON value; a file or an image as base64."""
    if isinstance(row, bytes | PathLike) or _is_image(row):
        return base64.b64encode(_file(row, field)).decode()
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(row, pandas.Series):  # a row of a frame
        row = row.to_dict()
    return plain(_as_array(row, field), field)


def encode_id(value: Any, field: str) -> str:
    """Return an id as a string."""
    pandas = sys.modules.get("pandas")
    is_nothing = pandas is not None and (value is pandas.NA or value is pandas.NaT)
    if value is None or is_nothing or (isinstance(value, float) and math.isnan(value)):
        raise InvalidInput(field, "a name", "none")
    return str(value)


def split_rows(rows: Rows, max_rows: int) -> Iterator[slice]:
    """Yield slices of up to `max_rows` rows and `PART_BYTES`, in order, each of at least a row."""
    first, held = 0, 0
    for n in range(len(rows)):
        size = rows.row_bytes(n)
        if n > first and (n - first >= max_rows or held + size > PART_BYTES):
            yield slice(first, n)
            first, held = n, 0
        held += size
    yield slice(first, len(rows))


def make_request(
    path: str, field: str, rows: Rows, options: Mapping[str, Any], headers: Mapping[str, str]
) -> Callable[[float | None], Request]:
    """Return a function that makes a request of rows from the remaining seconds.

    Arrays are sent as npy with the options in the query, or as npz with ids. Other lists among the
    options would make the query too long, so these requests are JSON.
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
        listed = json.dumps(field).encode() + b":[" + b",".join(content) + b"]}"

        def make(left_s: float | None) -> Request:
            head = _json(with_deadline(options, left_s), "options")[:-1]
            body = head + (b"," if len(head) > 1 else b"") + listed
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


def plain(value: Any, field: str) -> Any:
    """Return a JSON value: None if it is missing, ISO 8601 text for dates and times."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise InvalidInput(field, "a finite number", repr(value))
        return None if math.isnan(value) else value
    if isinstance(value, np.datetime64):
        return None if np.isnat(value) else value.astype("datetime64[us]").item().isoformat()
    if isinstance(value, np.generic):
        return plain(value.item(), field)
    if isinstance(value, date | time):
        return value.isoformat() if value == value else None  # pandas' NaT is a date unlike itself
    if isinstance(value, Mapping):
        return {str(name): plain(part, f"{field}.{name}") for name, part in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(part, f"{field}.{n}") for n, part in enumerate(value)]
    if isinstance(value, Decimal):
        return plain(float(value), field)
    pandas = sys.modules.get("pandas")
    if pandas is not None and value is pandas.NA:
        return None
    raise InvalidInput(field, "a number, a string, a date, or nothing", type(value).__name__)


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: value if isinstance(value, str) else _json(value, name).decode()
        for name, value in options.items()
    }


def with_deadline(options: Mapping[str, Any], left_s: float | None) -> dict[str, Any]:
    return dict(options) if left_s is None else {**options, "deadline_s": left_s}


def _from_frame(rows: Any, field: str) -> Any:
    """Return frames and series of pandas and polars, and tables of pyarrow, as lists.

    None of these packages is imported here."""
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
    """Raise InvalidInput if two columns share a name: an object per row would keep only one."""
    double = [name for n, name in enumerate(names) if name in names[:n]]
    if double:
        raise InvalidInput(field, "columns of different names", f"more than one {double[0]!r}")


def _as_array(value: Any, field: str) -> Any:
    """Convert objects such as tensors to arrays; return others unchanged."""
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "__array__") or isinstance(value, np.generic) or _is_image(value):
            return value
        try:
            value = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # of a GPU, or of bfloat16
            received = f"{type(value).__name__}: {error}"
            raise InvalidInput(field, "what numpy can make an array of", received) from None
    if isinstance(value, np.ma.MaskedArray):
        if value.mask.any():
            raise InvalidInput(field, "an array without masked values", "one with some")
        value = value.data
    if value.dtype.kind in "mM":  # whose numbers are of no unit that a model knows
        expected = "numbers; dates as texts, or in a DataFrame"
        raise InvalidInput(field, expected, f"an array of {value.dtype}")
    return value


def _numbers(array: np.ndarray, field: str) -> np.ndarray:
    """Return an array of rows with floats or integers of up to 64 bits."""
    if array.ndim < 2 or array.size == 0:
        expected = "rows of numbers, in an array of shape (N, ...)"
        raise InvalidInput(field, expected, f"an array of shape {array.shape}")
    if array.dtype.kind == "b":
        return array.astype(np.uint8)
    return array.astype(np.float64) if array.dtype.itemsize > 8 else array


def _array(rows: list[Any]) -> np.ndarray | None:
    """Return lists of numbers as an array; None if lengths differ or items are not numbers."""
    try:
        array = np.asarray(rows)
    except ValueError:
        return None
    return array if array.dtype.kind in "biuf" else None


def _is_image(row: object) -> bool:
    images = sys.modules.get("PIL.Image")
    return images is not None and isinstance(row, images.Image)


def _file(row: Any, field: str) -> bytes:
    """Return the content of a file, or an image as a PNG file, which is lossless."""
    if isinstance(row, bytes):
        return row
    if isinstance(row, PathLike):
        return Path(row).read_bytes()
    if not _is_image(row):
        raise InvalidInput(field, "an image or a file, as the first row", type(row).__name__)
    file = io.BytesIO()
    try:
        row.save(file, "PNG")
    except (OSError, ValueError):
        expected = "an image that PNG can hold (Image.convert)"
        raise InvalidInput(field, expected, f"one of mode {row.mode}") from None
    return file.getvalue()


def _json(value: Any, field: str) -> bytes:
    return json.dumps(plain(value, field), allow_nan=False, separators=(",", ":")).encode()


def _npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _npz(name: str, array: np.ndarray, ids: Sequence[str]) -> bytes:
    file = io.BytesIO()
    arrays = {name: np.ascontiguousarray(array), "ids": np.array(ids, dtype=np.str_)}
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()
