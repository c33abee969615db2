"""Base class for data file readers, with helpers for row ids and zip archives."""

import io
import math
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from sys import getsizeof
from typing import Any, ClassVar, TypeVar

import numpy as np

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from model_store.sources.columns import columns_expected
from model_store.types import Content

T = TypeVar("T")

ID = "id"  # the column of row ids in a table
IDS = "ids"  # the array of row ids in an npz file, and the field in requests
# Preferred names, if several columns or arrays could contain the rows
ROWS = ("pool", "inputs", "x", "X", "rows", "features")
ID_LETTERS = 1000
PART_NUMBERS = 1 << 21  # 8 MB as float32
PART_ROWS = 1 << 14
PART_FILES = 64  # if rows are files
IGNORED, IGNORED_LETTERS = 1000, 80  # limits for reported names of unused columns
COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
MEMBER_BYTES = 800  # memory per member of a zip archive
ZIP64_END_BYTES = 76  # between the directory of a large zip archive and its end

# Errors of zipfile for damaged files; ValueError for invalid UTF-8 and negative offsets
DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, NotImplementedError)

Source = Path | Content  # a file, or its content
# Rows like in a request, or cells by column
Part = list[Any] | np.ndarray | dict[str, list[Any] | np.ndarray]


class Bounds:
    """Limits for readers. The base class has none."""

    max_pixels: float = math.inf  # in all image files that are read together

    def reserve(self, size: int, field: str) -> None:
        """Reserve bytes for data decoded from a field."""

    def hold(self, _size: int, _field: str) -> AbstractContextManager[None]:
        """Reserve bytes for the duration of a `with` block."""
        return nullcontext()

    def pause(self) -> None:
        """Let other work run. Readers call this every few milliseconds."""


UNBOUNDED = Bounds()


class RowFile(ABC):
    """Base class for a model's data files.

    Attributes:
        source: the file, or its content.
        spec: the model's input.
        field: the request's field, for errors.
        rows: number of rows.
        read_as: description of the part of the file that has the rows.
        ignored: the first `IGNORED` unused columns.
        has_ids: True if the file has row ids.
        id_column: the table's column of row ids, if any.
    """

    ENDING: ClassVar[str]

    def __init__(
        self, source: Source, spec: InputSpec, field: str, bounds: Bounds = UNBOUNDED
    ) -> None:
        self.source = source
        self.spec = spec
        self.field = field
        self.bounds = bounds
        self.rows = 0
        self.read_as = ""
        self.ignored: list[str] = []
        self.has_ids = False
        self.id_column: str | None = None
        self._open()

    def __len__(self) -> int:
        return self.rows

    @abstractmethod
    def _open(self) -> None:
        """Read the metadata of the file and set the attributes."""

    def ids(self) -> list[str] | None:
        """Return the row ids, or None if the file has none."""
        if not self.has_ids:
            return None
        ids: list[str] = []
        for part in self.id_parts():
            self.bounds.reserve(text_bytes(part), IDS)
            self.bounds.pause()
            ids += part
        return ids

    def id_parts(self) -> Iterator[list[str]]:
        """Yield the row ids in chunks."""
        return iter(())

    @abstractmethod
    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield the rows, starting at row `first`, in chunks of up to `part_rows` rows."""

    @property
    def part_rows(self) -> int:
        limit = PART_FILES if self._holds_files else PART_ROWS
        return min(limit, max(1, PART_NUMBERS // self.row_size))

    @property
    def row_size(self) -> int:
        return math.prod(self.spec.shape)

    @property
    def _holds_files(self) -> bool:
        return False

    def _find_ids(self, names: list[str]) -> None:
        self.id_column = next((name for name in (ID, self.spec.id_column) if name in names), None)
        self.has_ids = self.id_column is not None

    def _use(self, columns: list[str], names: list[str]) -> None:
        """Select a table's data and id columns, whose names must be unique."""
        used, counts = {*columns, *self._id_columns}, Counter(names)
        repeated = next((name for name in used if counts[name] > 1), None)
        if repeated is not None:
            field, count = f"{self.field}.{repeated[:80]}", f"{counts[repeated]}"
            raise InvalidInput(field, "one column with that name", count)
        unused = (name[:IGNORED_LETTERS] for name in names if name not in used)
        self.ignored = list(islice(unused, IGNORED))

    @property
    def _id_columns(self) -> list[str]:
        return [] if self.id_column is None else [self.id_column]

    def _name_ids(self) -> str:
        return "" if self.id_column in (None, ID) else f", named by {self.id_column}"

    def _require(self, columns: list[str], names: list[str]) -> None:
        present = set(names)
        absent = next((name for name in columns if name not in present), None)
        if absent is not None:
            present_names = ", ".join(map(str, names[:10])) + (", ..." if len(names) > 10 else "")
            expected, received = "a column with that name", f"columns {present_names[:300]}"
            raise InvalidInput(f"{self.field}.{absent[:80]}", expected, received)

    def _refuse(self, expected: str, received: str) -> InvalidInput:
        return InvalidInput(self.field, expected, received)

    def _check_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if self.spec.columns:
            raise columns_expected(self.field, f"an array of shape {shape}")
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            expected = "float or integer numbers of at most 64 bits"
            raise self._refuse(expected, f"dtype {dtype.str[:20]}")
        if shape[1:] not in (self.spec.shape, (self.row_size,)) or shape[0] < 0:
            expected = f"an array of shape {describe_shapes(self.spec.shape)}"
            raise self._refuse(expected, f"shape {shape}")
        self.rows = shape[0]


def describe_shapes(shape: tuple[int, ...]) -> str:
    flat = f" or (N, {math.prod(shape)})" if len(shape) > 1 else ""
    return f"(N, {', '.join(map(str, shape))}){flat}"


def as_file(source: Source) -> Path | io.BytesIO:
    return source if isinstance(source, Path) else io.BytesIO(source)


def binary(source: Source) -> io.BufferedReader | io.BytesIO:
    return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)


def open_zip(source: Source, expected: str, field: str, bounds: Bounds) -> zipfile.ZipFile:
    with convert_zip_errors(expected, field):
        bounds.reserve(MEMBER_BYTES * _count_members(source), field)
        archive = zipfile.ZipFile(as_file(source))
    if any(m.flag_bits & 1 or m.compress_type not in COMPRESSIONS for m in archive.infolist()):
        raise InvalidInput(field, f"{expected}, stored or deflated, without a password", "another")
    return archive


@contextmanager
def convert_zip_errors(expected: str, field: str) -> Iterator[None]:
    """Raise InvalidInput if a zip archive is damaged."""
    try:
        yield
    except DAMAGE as error:
        raise InvalidInput(field, expected, "something else") from error


def _count_members(source: Source) -> int:
    """Return an upper bound on the number of files in a zip archive."""
    with binary(source) as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
        if end is None:
            return 0
        size, place = end[zipfile._ECD_SIZE], end[zipfile._ECD_LOCATION]  # type: ignore[attr-defined]
        file.seek(max(0, place - size - ZIP64_END_BYTES))
        return file.read(size + ZIP64_END_BYTES).count(b"PK\x01\x02")


def cut(
    rows: Iterable[T], get_size: Callable[[T], int], max_rows: int, max_size: int
) -> Iterator[list[T]]:
    """Yield chunks of up to `max_rows` rows and a total size of about `max_size`."""
    part, size = list[T](), 0
    for row in rows:
        part.append(row)
        size += get_size(row)
        if len(part) == max_rows or size > max_size:
            yield part
            part, size = [], 0
    if part:
        yield part


def text_bytes(texts: Sequence[str]) -> int:
    return sum(map(getsizeof, texts)) + 8 * len(texts)


def convert_ids(values: Sequence[Any], column: str, first: int) -> list[str]:
    """Convert row ids to text. Row numbers in errors start at `first`."""
    ids = []
    for row, value in enumerate(values, start=first):
        if value is None or value != value:
            raise InvalidInput(column, "an id for each row", f"none in row {row}")
        name = _id_as_text(value)
        if name is None:
            expected = "text or numbers as row ids"
            raise InvalidInput(column, expected, f"another type in row {row}")
        if len(name) > ID_LETTERS:
            expected = f"ids of at most {ID_LETTERS} letters"
            raise InvalidInput(column, expected, f"one of {len(name)}")
        ids.append(name)
    return ids


def _id_as_text(value: Any) -> str | None:
    if isinstance(value, list | dict | tuple):
        return None
    try:
        text = value.decode() if isinstance(value, bytes) else str(value)
        text.encode()  # fails for lone surrogates
    except UnicodeError:
        return None
    return text
