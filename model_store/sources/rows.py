"""Convert rows to float32 arrays."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from jaxtyping import Float32

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput, TooLarge, describe_value, merge_errors
from model_store.sources.columns import (
    Columns,
    columns_expected,
    encode_cells,
    encode_objects,
    fill_missing,
)
from model_store.sources.images import (
    decoded_pixels,
    decoding_bytes,
    image_content,
    open_image,
    pixels,
    resized_pixels,
)
from model_store.sources.row_file import UNBOUNDED, Bounds, Part, RowFile, describe_shapes
from model_store.types import Pause

if TYPE_CHECKING:
    from model_store.sources.text import TextEncoder

# Checked in Python, because numpy would release the GIL and wait for it
FEW_NUMBERS = 4096
NUMBERS_AT_ONCE = 1 << 16  # per block, about a millisecond
MAX_FAST_BYTES = 4 * NUMBERS_AT_ONCE  # of arrays converted on the event loop
ROW_NAME_BYTES = 8  # of the hash


class Parts(Protocol):
    """Rows that are read part by part."""

    def __len__(self) -> int: ...

    def parts(self) -> Iterator[Part]: ...


Rows = list[Any] | np.ndarray | Parts


def count_rows(part: Part) -> int:
    return len(next(iter(part.values()))) if isinstance(part, dict) else len(part)


def take_rows(part: Part, rows: slice) -> Part:
    if isinstance(part, dict):
        return {name: cells[rows] for name, cells in part.items()}
    return part[rows]


def name_rows(
    blocks: Iterable[Float32[np.ndarray, "n I"]], columns: Columns, pause: Pause
) -> list[str]:
    """Name rows by their content. The second copy of a row gets the suffix `-2`, and so on."""
    counts, names = Counter[bytes](), list[str]()
    for x in blocks:
        fill_missing(x, columns)
        for row in np.ascontiguousarray(x):
            digest = blake2b(row, digest_size=ROW_NAME_BYTES)
            counts[digest.digest()] += 1
            copy = counts[digest.digest()]
            names.append(f"row-{digest.hexdigest()}" + (f"-{copy}" if copy > 1 else ""))
        pause()
    return names


@dataclass(eq=False)
class RowReader:
    """Converts rows to flat float32 arrays.

    Rows are flat or in the model's input shape. Tabular models take objects or columns of cells.
    Image models also take image files. Text models also take strings, text files and objects with
    one string. All rows must have the form of the first row.
    """

    spec: InputSpec
    field: str  # for errors
    bounds: Bounds = UNBOUNDED
    encoder: "TextEncoder | None" = None
    pixels: int = 0  # in the images so far
    first: Any = None  # first row

    def read_all(self, rows: Rows) -> Float32[np.ndarray, "N I"]:
        size = math.prod(self.spec.shape)
        is_small = len(rows) * size <= NUMBERS_AT_ONCE
        if isinstance(rows, list) and is_small and not self._is_long(rows):
            return self.read(rows, 0)
        if isinstance(rows, np.ndarray) and rows.dtype == "<f4" and rows.flags.c_contiguous:
            for _ in self.read_blocks(rows):
                pass  # only check the values
            return rows.reshape(len(rows), size)
        x, count = np.empty((len(rows), size), dtype=np.float32), 0
        for block in self.read_blocks(rows):
            x[count : count + len(block)] = block
            count += len(block)
        assert count == len(rows)
        return x

    def read_blocks(self, rows: Rows) -> Iterator[Float32[np.ndarray, "n I"]]:
        """Convert rows in small blocks, pausing after each."""
        first = 0
        for part in [rows] if isinstance(rows, list | np.ndarray) else rows.parts():
            if isinstance(rows, RowFile):
                self.pixels = 0  # the limit holds for each part of a file
            at_once = max(1, NUMBERS_AT_ONCE // math.prod(self.spec.shape))
            at_once = 1 if self._is_long(part) else at_once
            for start in range(0, count_rows(part), at_once):
                block = self.read(take_rows(part, slice(start, start + at_once)), first)
                yield block
                first += len(block)
                self.bounds.pause()

    def read(self, rows: Part, first_row: int) -> Float32[np.ndarray, "n I"]:
        """Convert a block. Row numbers in errors start at `first_row`."""
        spec = self.spec
        if isinstance(rows, dict):
            return encode_cells(rows, spec.columns, self.field, first_row)
        if isinstance(rows, np.ndarray):
            return self._array(rows, first_row)
        if self.first is None:
            self.first = rows[0]
        first = self.first
        if spec.columns:
            if not isinstance(first, dict):
                raise columns_expected(self.field, _describe_row(first))
            return encode_objects(rows, spec.columns, self.field, first_row, spec.ignored)
        if spec.image is not None and isinstance(first, str | bytes):
            read = self._image
        elif spec.text is not None and isinstance(first, str | bytes | dict):
            read = self._text
        else:
            is_nested = isinstance(first, list) and first != [] and isinstance(first[0], list)
            lengths = spec.shape if is_nested else (math.prod(spec.shape),)
            return _numbers(rows, first_row, lengths, spec, self.field)
        numbered = enumerate(rows, start=first_row)
        return np.stack([read(row, f"{self.field}.{n}") for n, row in numbered])

    def _is_long(self, part: Part) -> bool:
        """Check whether rows are texts or images, which take long to convert."""
        first = part[0] if isinstance(part, list) and part else None
        is_text = self.spec.text is not None and isinstance(first, dict)
        return is_text or isinstance(first, str | bytes)

    def _array(self, rows: np.ndarray, first_row: int) -> Float32[np.ndarray, "n I"]:
        spec, size = self.spec, math.prod(self.spec.shape)
        if spec.columns:
            raise columns_expected(self.field, f"an array of shape {rows.shape}")
        if rows.shape[1:] not in (spec.shape, (size,)):
            expected = f"an array of shape {describe_shapes(spec.shape)}"
            raise InvalidInput(self.field, expected, f"shape {rows.shape}")
        if rows.dtype.kind not in "fiub":
            raise InvalidInput(self.field, "numbers", f"dtype {rows.dtype.str[:20]}")
        flat = rows.reshape(len(rows), size)
        if spec.takes_ids:
            _check_ids(flat, spec, self.field, first_row)
        with np.errstate(over="ignore"):
            x = np.ascontiguousarray(flat, dtype=np.float32)
        _check_finite(x, self.field, first_row)
        return x

    def _text(self, row: Any, field: str) -> Float32[np.ndarray, "I"]:
        assert self.spec.text is not None
        assert self.encoder is not None
        if isinstance(row, dict):
            name = self.spec.text.column
            row, field = _single_value(row, name, field), f"{field}.{name}"
        if isinstance(row, bytes):
            try:
                row = row.decode("utf-8-sig")  # without a byte order mark
            except UnicodeDecodeError:
                raise InvalidInput(field, "text in UTF-8", "other bytes") from None
        if type(row) is not str:
            raise InvalidInput(field, "a string, like the first row", describe_value(row))
        with self.bounds.hold(self.encoder.bytes_for(row, field), field):
            try:
                return self.encoder.row(row)
            except ValueError:
                expected = "text that the version's tokenizer supports"
                raise InvalidInput(field, expected, "other text") from None

    def _image(self, row: Any, field: str) -> Float32[np.ndarray, "I"]:
        assert self.spec.image is not None
        content = image_content(row, field)
        image = open_image(content, field)
        shape, spec = self.spec.shape, self.spec.image
        resized = resized_pixels(image, shape, spec, field)
        self.pixels += decoded_pixels(image) + resized
        if self.pixels > self.bounds.max_pixels:
            expected = f"images of at most {self.bounds.max_pixels} pixels in total"
            raise TooLarge(self.field, expected, "more")
        with self.bounds.hold(2 * len(content) + decoding_bytes(image, resized), field):
            return pixels(image, shape, spec, field).astype(np.float32)


def _single_value(row: dict[str, Any], name: str, field: str) -> Any:
    if name not in row:
        raise InvalidInput(f"{field}.{name[:80]}", "a string", "no such column")
    unknown = next((key for key in row if key != name), None)
    if unknown is not None:
        expected = f"only the column {name[:80]}"
        raise InvalidInput(f"{field}.{unknown[:80]}", expected, "an unknown column")
    return row[name]


def _numbers(
    rows: list[Any], first_row: int, lengths: tuple[int, ...], spec: InputSpec, field: str
) -> Float32[np.ndarray, "N I"]:
    shape, size = spec.shape, math.prod(spec.shape)

    def path(i: int, axis: int) -> str:
        row, *places = np.unravel_index(i, (len(rows), *lengths[:axis]))
        return ".".join(map(str, (field, first_row + row, *places)))

    level: list[Any] = rows
    for axis, length in enumerate(lengths):
        for i, part in enumerate(level):
            if type(part) is not list or len(part) != length:
                expected = f"an array of {length}"
                if axis == 0:
                    expected += f" (rows have shape {shape}{_alternatives(spec)})"
                raise InvalidInput(path(i, axis), expected, _describe_row(part))
        level = level[0] if len(level) == 1 else list(chain.from_iterable(level))
    if not set(map(type, level)) <= {int, float}:
        i = next(i for i, value in enumerate(level) if type(value) not in (int, float))
        raise InvalidInput(path(i, len(lengths)), "a number", describe_value(level[i]))
    if spec.takes_ids:
        ids = np.array(level, dtype=np.float64).reshape(len(rows), size)
        _check_ids(ids, spec, field, first_row)
    # `array` is twice as fast as numpy and converts large numbers to infinity without a warning.
    numbers = array("f", level)
    flat = np.frombuffer(numbers, dtype=np.float32).reshape(len(rows), size)
    if len(numbers) > FEW_NUMBERS or not math.isfinite(sum(numbers)):
        _check_finite(flat, field, first_row)
    return flat


def _describe_row(row: Any) -> str:
    advice = "; send a file of many rows as the body" if isinstance(row, bytes) else ""
    return describe_value(row) + advice


def _check_finite(flat: Float32[np.ndarray, "N I"], field: str, first_row: int = 0) -> None:
    finite = np.isfinite(flat)
    if not finite.all():
        n, i = np.argwhere(~finite)[0]
        expected = "a finite number in float32's range"
        raise InvalidInput(f"{field}.{n + first_row}.{i}", expected, "another value")


def _check_ids(flat: np.ndarray, spec: InputSpec, field: str, first_row: int = 0) -> None:
    is_id = (flat >= spec.minimum) & (flat <= spec.maximum) & (flat == np.floor(flat))
    if not is_id.all():
        n, i = np.argwhere(~is_id)[0]
        expected = f"an integer id from {spec.minimum:.0f} to {spec.maximum:.0f}"
        raise InvalidInput(f"{field}.{n + first_row}.{i}", expected, f"{flat[n, i]:.17g}"[:40])


def _alternatives(spec: InputSpec) -> str:
    flat = f", or {math.prod(spec.shape)} numbers flat" if len(spec.shape) > 1 else ""
    texts = "" if spec.text is None else f", or are strings, or objects of {spec.text.column[:80]}"
    return flat + texts + (", or are image files" if spec.image is not None else "")


def add_row_id(error: InvalidInput, ids: Sequence[str] | None) -> InvalidInput:
    """Add row ids to the messages of an error and its `other_errors`."""
    if not ids:
        return error

    def add_id(error: InvalidInput) -> InvalidInput:
        row = next((part for part in error.field.split(".")[1:2] if part.isdigit()), None)
        if row is None:
            return error
        row_id = ids[int(row)][:200]
        return InvalidInput(error.field, error.expected, f"{error.received} (id {row_id!r})")

    return merge_errors([add_id(each) for each in (error, *error.other_errors)])
