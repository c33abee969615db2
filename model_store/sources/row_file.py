"""What all files of rows have in common: rows, ids, and parts of bounded memory."""

import io
import math
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput

ID = "id"  # the column of a table that names its rows
IDS = "ids"  # the array of an npz that does, and the field of a request
# Names under which rows are looked for where there are several.
ROWS = ("pool", "inputs", "x", "X", "rows", "features")
ID_LETTERS = 1000  # of a row's id in a file, at most
PART_NUMBERS = 1 << 21  # 8 MB as float32
PART_ROWS = 1 << 14
PART_FILES = 64  # where rows come as files, which may be large

Source = Path | bytes | bytearray  # a file, or its content
# Rows as requests have them, or cells by column.
Part = list[Any] | np.ndarray | dict[str, list[Any] | np.ndarray]


class RowFile(ABC):
    """A file of rows, as a model reads them.

    Attributes:
        source: the file, or its content.
        spec: the model's input.
        field: the request's field, for errors.
        rows: the number of rows.
        read_as: what the rows are taken from, in words.
        ignored: columns of the file that are not read.
        has_ids: whether the file names its rows.
        id_column: the column of a table that names them, None where there is none.
    """

    ENDING: ClassVar[str]

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        self.source = source
        self.spec = spec
        self.field = field
        self.rows = 0
        self.read_as = ""
        self.ignored: list[str] = []
        self.has_ids = False
        self.id_column: str | None = None

    @abstractmethod
    def ids(self) -> list[str] | None:
        """Return each row's id, None where the file has none."""

    @abstractmethod
    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield the rows from `first` on, in parts of at most `part_rows` rows."""

    @property
    def part_rows(self) -> int:
        most = PART_FILES if self._holds_files else PART_ROWS
        return min(most, max(1, PART_NUMBERS // self.row_size))

    @property
    def row_size(self) -> int:
        return math.prod(self.spec.shape)

    @property
    def _holds_files(self) -> bool:
        return False

    def _find_ids(self, names: list[str]) -> None:
        """Find the column of ids: the one called `id`, or the one that named the training rows."""
        self.id_column = next((name for name in (ID, self.spec.id_column) if name in names), None)
        self.has_ids = self.id_column is not None

    def _use(self, wanted: list[str], names: list[str]) -> None:
        """Take these columns, and that of ids, of a table's.

        Raises:
            InvalidInput: if one of them is there more than once.
        """
        used = [*wanted, *self._id_columns]
        repeated = next((name for name in used if names.count(name) > 1), None)
        if repeated is not None:
            count = f"{names.count(repeated)}"
            raise InvalidInput(f"{self.field}.{repeated[:80]}", "one column of that name", count)
        self.ignored = [name for name in names if name not in used]

    @property
    def _id_columns(self) -> list[str]:
        return [] if self.id_column is None else [self.id_column]

    def _name_ids(self) -> str:
        return "" if self.id_column in (None, ID) else f", named by {self.id_column}"

    def _require(self, wanted: list[str], names: list[str]) -> None:
        absent = next((name for name in wanted if name not in names), None)
        if absent is not None:
            known = ", ".join(map(str, names[:10])) + (", ..." if len(names) > 10 else "")
            expected = "a column of that name"
            raise InvalidInput(f"{self.field}.{absent[:80]}", expected, f"columns {known[:300]}")

    def _refuse(self, expected: str, got: str) -> InvalidInput:
        return InvalidInput(self.field, expected, got)

    def _check_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            expected = "float or integer numbers of at most 64 bits"
            raise self._refuse(expected, f"dtype {dtype.str[:20]}")
        if shape[1:] not in (self.spec.shape, (self.row_size,)):
            expected = f"an array of shape {shapes_of(self.spec.shape)}"
            raise self._refuse(expected, f"shape {shape}")
        self.rows = shape[0]


def shapes_of(shape: tuple[int, ...]) -> str:
    flat = f" or (N, {math.prod(shape)})" if len(shape) > 1 else ""
    return f"(N, {', '.join(map(str, shape))}){flat}"


def opened(source: Source) -> Path | io.BytesIO:
    """Return what libraries take in place of a file's name."""
    return source if isinstance(source, Path) else io.BytesIO(source)


def binary(source: Source) -> io.BufferedReader | io.BytesIO:
    return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)


@contextmanager
def zip_of(source: Source, expected: str, field: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip; raise InvalidInput if it is not a whole one, now or when a member is read."""
    try:
        with zipfile.ZipFile(opened(source)) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise InvalidInput(field, expected, "something else") from error


def ids_as_text(values: list[Any], column: str, first: int) -> list[str]:
    """Return ids as text.

    Raises:
        InvalidInput: naming a row, counted from `first`, whose id is missing, or no text or number.
    """
    ids = []
    for row, value in enumerate(values, start=first):
        if value is None or value != value:
            raise InvalidInput(column, "a name for each row", f"none of row {row}")
        name = _id_as_text(value)
        if name is None:
            expected = "a text or a number as the name of each row"
            raise InvalidInput(column, expected, f"another in row {row}")
        ids.append(name)
    return ids


def _id_as_text(value: Any) -> str | None:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return None if isinstance(value, list | dict | tuple) else str(value)
