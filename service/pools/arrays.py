"""Arrays of rows: npy and npz files. Nothing is unpickled."""

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from service.pools.pool_file import (
    ID,
    IDS,
    ROWS,
    Part,
    PoolFile,
    Source,
    binary,
    opened,
    texts_of,
    zip_of,
)


class NpyFile(PoolFile):
    """An array, looked at without reading it whole."""

    ENDING = ".npy"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        try:
            is_file = isinstance(source, Path)
            self._array = np.load(
                opened(source), mmap_mode="r" if is_file else None, allow_pickle=False
            )
        except Exception as error:  # numpy's reader of headers lets many kinds through
            raise self._rows_error("a whole npy file of numbers", "something else") from error
        self._array_of(self._array.shape, self._array.dtype)
        self.read_as = f"the array, {self._array.dtype}"

    def ids(self) -> list[str] | None:
        """Return None: an npy file has no names."""
        return None

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield rows as arrays; of a file in C order they are read, since mapped pages stay in
        memory."""
        array = self._array
        if not isinstance(array, np.memmap) or not array.flags.c_contiguous:
            for start in range(first, self.rows, self.at_once):
                yield np.asarray(array[start : start + self.at_once])
            return
        row_numbers = math.prod(array.shape[1:])
        with binary(self.source) as file:
            file.seek(array.offset + first * row_numbers * array.itemsize)
            for start in range(first, self.rows, self.at_once):
                n = min(self.at_once, self.rows - start)
                part = np.fromfile(file, array.dtype, n * row_numbers)
                if len(part) < n * row_numbers:  # it was cut off meanwhile
                    raise self._rows_error(
                        "a whole npy file of numbers", "one that has become shorter"
                    )
                yield part.reshape(n, *array.shape[1:])


class NpzFile(PoolFile):
    """An array of an npz file, with another one of ids beside it, if there is one."""

    ENDING = ".npz"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        with self._archive() as archive:
            names = [
                name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")
            ]
            self._ids = next((name for name in (IDS, ID) if name in names), "")
            self.has_ids = self._ids != ""
            arrays = [name for name in names if name != self._ids]
            named = [name for name in ROWS if name in arrays]
            if len(arrays) != 1 and len(named) != 1:
                expected = f"one array of rows, or one of several that is named {' or '.join(ROWS)}"
                raise self._rows_error(expected, f"arrays {sorted(arrays)[:10]}")
            self._name = arrays[0] if len(arrays) == 1 else named[0]
            with self._member(archive, self._name) as (_, shape, fortran, dtype):
                if fortran:
                    raise self._rows_error(
                        "an array in C order (np.ascontiguousarray)", "one in Fortran order"
                    )
                self._array_of(shape, dtype)
            self.ignored = sorted(set(arrays) - {self._name})
            if self.has_ids:
                with self._member(archive, self._ids) as (_, shape, _, dtype):
                    if dtype.kind not in "UiuS" or shape != (self.rows,):
                        got = f"{dtype} of shape {shape}"
                        raise InvalidInput(
                            self._ids,
                            f"{self.rows} strings or whole numbers, one for each row",
                            got,
                        )
        self.read_as = f"the array {self._name}, {'' if self.has_ids else dtype}".rstrip(", ")

    def ids(self) -> list[str] | None:
        """Return the array of ids as strings.

        Raises:
            InvalidInput: naming a row whose id is no text.
        """
        if not self.has_ids:
            return None
        with (
            self._archive() as archive,
            self._member(archive, self._ids) as (file, shape, _, dtype),
        ):
            array = np.frombuffer(_read(file, shape[0] * dtype.itemsize), dtype=dtype)
        return texts_of(array.tolist(), self._ids, 0)

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield rows as arrays, inflated as they come."""
        with (
            self._archive() as archive,
            self._member(archive, self._name) as (file, shape, _, dtype),
        ):
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            for start in range(0, self.rows, self.at_once):
                n = min(self.at_once, self.rows - start)
                if start + n <= first:
                    _read(file, n * row_bytes)
                    continue
                array = np.frombuffer(_read(file, n * row_bytes), dtype=dtype).reshape(
                    n, *shape[1:]
                )
                yield array[max(0, first - start) :]

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        with zip_of(self.source, "a whole npz file", self.field) as archive:
            yield archive

    @contextmanager
    def _member(
        self, archive: zipfile.ZipFile, name: str
    ) -> Iterator[tuple[Any, tuple[int, ...], bool, np.dtype[Any]]]:
        """Open an array's member, read up to its numbers, and what its header says."""
        with archive.open(f"{name}.npy") as file:
            try:
                version = np.lib.format.read_magic(file)
                readers = {
                    (1, 0): np.lib.format.read_array_header_1_0,
                    (2, 0): np.lib.format.read_array_header_2_0,
                }
                shape, fortran, dtype = readers[version](file)
            except (zipfile.BadZipFile, zlib.error):
                raise
            except Exception as error:
                raise InvalidInput(
                    name[:80], "an array of format 1.0 or 2.0", "something else"
                ) from error
            if dtype.hasobject:
                raise InvalidInput(
                    name[:80], "an array of numbers or strings", "one of Python objects"
                )
            yield file, shape, fortran, dtype


def _read(file: Any, size: int) -> bytes:
    """Read so many bytes of a member of a zip."""
    content: bytes = file.read(size)
    if len(content) < size:
        raise EOFError
    return content
