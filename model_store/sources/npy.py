"""Read npy and npz files without pickle."""

import io
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from model_store.errors import InvalidInput
from model_store.sources.row_file import (
    ID,
    ID_LETTERS,
    IDS,
    IGNORED,
    IGNORED_LETTERS,
    ROWS,
    Part,
    RowFile,
    binary,
    convert_ids,
    convert_zip_errors,
    open_zip,
)
from model_store.types import Content

MAX_DIMENSIONS = 32
MAX_HEADER_BYTES = 128 << 10  # numpy reads less
MAX_INFLATION = 1032  # the ratio of deflate
IDS_AT_ONCE = 1 << 20  # bytes per chunk of ids
LAST_LETTER = 0x10FFFF  # of Unicode

Header = tuple[tuple[int, ...], bool, np.dtype[Any]]  # shape, whether in Fortran order, type


def read_header(file: Any) -> Header:
    """Read an npy header in format 1.0 or 2.0. Raise various numpy errors if invalid."""
    form = np.lib.format
    readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    return readers[form.read_magic(file)](file)


def _split_header(content: Content) -> tuple[Header, memoryview]:
    stream = io.BytesIO(memoryview(content)[:MAX_HEADER_BYTES])
    return read_header(stream), memoryview(content)[stream.tell() :]


def parse_npy(body: Content, field: str) -> np.ndarray:
    """Parse the content of an npy file without copying the array."""
    try:
        (shape, fortran, dtype), data = _split_header(body)
    except Exception:
        raise InvalidInput("body", "an npy file of format 1.0 or 2.0", "something else") from None
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        expected = "float or integer numbers of at most 64 bits"
        raise InvalidInput(field, expected, f"dtype {dtype.str[:20]}")
    if not 1 <= len(shape) <= MAX_DIMENSIONS or any(type(n) is not int or n < 1 for n in shape):
        expected = "at least one row of at least one number"
        raise InvalidInput(field, expected, "an array of another shape")
    if dtype.itemsize * math.prod(shape) != len(data):
        expected = "as many bytes as the npy header says"
        raise InvalidInput(field, expected, f"{len(data)} bytes of data")
    return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if fortran else "C")


def read_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except OSError as error:
        expected = f"a readable npz file, {str(path)!r}"
        raise InvalidInput("data.source", expected, error.strerror or "damage") from None
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        expected = "an npz file of arrays of numbers and strings"
        raise InvalidInput(path.name, expected, reason) from None


class NpyFile(RowFile):
    ENDING = ".npy"
    WHOLE = "a whole npy file of numbers"

    def _open(self) -> None:
        try:
            self._array = self._load_array()
        except Exception as error:
            raise self._refuse(self.WHOLE, "something else") from error
        self._check_array(self._array.shape, self._array.dtype)
        self.read_as = f"the array, {self._array.dtype}"

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield the array in chunks. C-order arrays are not memory-mapped, to save memory."""
        array, max_rows = self._array, self.part_rows
        parts = (array[n : n + max_rows] for n in range(first, self.rows, max_rows))
        if not isinstance(array, np.memmap) or not array.flags.c_contiguous:
            yield from map(np.asarray, parts)
            return
        with binary(self.source) as file:
            file.seek(array.offset + first * math.prod(array.shape[1:]) * array.itemsize)
            for part in parts:
                numbers = np.fromfile(file, array.dtype, part.size)
                if len(numbers) < part.size:
                    raise self._refuse(self.WHOLE, "a file that was truncated while it was read")
                yield numbers.reshape(part.shape)

    def _load_array(self) -> np.ndarray:
        if isinstance(self.source, Path):
            return np.lib.format.open_memmap(self.source, mode="r")
        (shape, fortran, dtype), data = _split_header(self.source)
        array = np.frombuffer(data, dtype, math.prod(shape))
        return array.reshape(shape, order="F" if fortran else "C")


class NpzFile(RowFile):
    """An npz file with an array of rows and an optional array of ids."""

    ENDING = ".npz"
    WHOLE = "a whole npz file"

    def _open(self) -> None:
        self._archive = open_zip(self.source, self.WHOLE, self.field, self.bounds)
        files = self._archive.namelist()
        names = [name.removesuffix(".npy") for name in files if name.endswith(".npy")]
        self._ids = next((name for name in (IDS, ID) if name in names), "")
        self.has_ids = self._ids != ""
        arrays = [name for name in names if name != self._ids]
        row_arrays = [name for name in ROWS if name in arrays]
        if len(arrays) != 1 and len(row_arrays) != 1:
            expected = f"one array of rows, or one of several that is named {' or '.join(ROWS)}"
            names_shown = [name[:IGNORED_LETTERS] for name in sorted(arrays)[:10]]
            raise self._refuse(expected, f"arrays {names_shown}")
        self._name = arrays[0] if len(arrays) == 1 else row_arrays[0]
        with self._member(self._name) as (_, shape, fortran, dtype):
            if fortran:
                expected = "an array in C order (np.ascontiguousarray)"
                raise self._refuse(expected, "one in Fortran order")
            self._check_array(shape, dtype)
        ignored = sorted(set(arrays) - {self._name})[:IGNORED]
        self.ignored = [name[:IGNORED_LETTERS] for name in ignored]
        self.read_as = f"the array {self._name}"
        if not self.has_ids:
            self.read_as += f", {dtype}"
            return
        with self._member(self._ids) as (_, shape, _, dtype):
            if dtype.kind not in "UiuS" or shape != (self.rows,) or dtype.itemsize == 0:
                expected = f"{self.rows} strings or whole numbers, one for each row"
                raise InvalidInput(self._ids, expected, f"{dtype} of shape {shape}"[:200])
            if dtype.itemsize > 4 * ID_LETTERS:  # four bytes per character
                expected = f"ids of at most {ID_LETTERS} letters"
                raise InvalidInput(self._ids, expected, f"{dtype}")

    def id_parts(self) -> Iterator[list[str]]:
        first = 0
        with self._member(self._ids) as (file, _, _, dtype):
            max_rows = max(1, IDS_AT_ONCE // dtype.itemsize)
            while left := self.rows - first:
                content = _read(file, min(max_rows, left) * dtype.itemsize)
                if dtype.kind == "U":
                    letters = np.dtype("u4").newbyteorder(dtype.byteorder)
                    if (np.frombuffer(content, letters) > LAST_LETTER).any():
                        expected = "Unicode text as row ids"
                        raise InvalidInput(self._ids, expected, "invalid characters")
                values = np.frombuffer(content, dtype).tolist()
                yield convert_ids(values, self._ids, first)
                first += len(values)

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Decompress the array and yield it in chunks."""
        with self._member(self._name) as (file, shape, _, dtype):
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            self.bounds.reserve(2 * min(self.part_rows, self.rows) * row_bytes, self.field)
            for start in range(0, self.rows, self.part_rows):
                n = min(self.part_rows, self.rows - start)
                content = _read(file, n * row_bytes)
                if start + n > first:
                    array = np.frombuffer(content, dtype=dtype).reshape(n, *shape[1:])
                    yield array[max(0, first - start) :]
                self.bounds.pause()

    @contextmanager
    def _member(self, name: str) -> Iterator[tuple[Any, tuple[int, ...], bool, np.dtype[Any]]]:
        member = self._archive.getinfo(f"{name}.npy")
        with convert_zip_errors(self.WHOLE, self.field), self._archive.open(member) as file:
            try:
                shape, fortran, dtype = read_header(file)
            except (zipfile.BadZipFile, zlib.error):
                raise
            except Exception as error:
                expected = "an array of format 1.0 or 2.0"
                raise InvalidInput(name[:80], expected, "something else") from error
            if dtype.hasobject:
                expected = "an array of numbers or strings"
                raise InvalidInput(name[:80], expected, "one of Python objects")
            size = file.tell() + math.prod(shape) * dtype.itemsize
            if size > MAX_INFLATION * (member.compress_size + 1):
                expected = "as many bytes as the npy header says"
                raise InvalidInput(name[:80], expected, f"{member.compress_size}, compressed")
            yield file, shape, fortran, dtype


def _read(file: Any, size: int) -> bytes:
    content: bytes = file.read(size)
    if len(content) < size:
        raise EOFError
    return content
