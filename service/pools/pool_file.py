"""What all files of rows have in common: rows, ids, and parts of bounded memory."""

import io
import math
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np

from model_store.artifacts.manifest import InputSpec
from model_store.errors import InvalidInput
from service.api.requests import shapes_of

ID = "id"  # the column of a table that names its rows
IDS = "ids"  # the array of an npz that does, and the field of a request
# Indices that pandas wrote without a name: no features.
INDEX = re.compile(r"|Unnamed: 0|__index_level_\d+__")
# Names under which rows are looked for where there are several.
ROWS = ("pool", "inputs", "x", "X", "rows", "features")
NUMBERS_AT_ONCE = 1 << 21  # of a part: 8 MB as float32
MOST_AT_ONCE = 1 << 14  # rows of a part
FILES_AT_ONCE = 64  # of a part, where rows come as files

Source = Path | bytes | bytearray  # a file, or what is in one
Part = (
    list[Any] | np.ndarray | dict[str, list[Any] | np.ndarray]
)  # rows as requests have them, or cells by column


class PoolFile(ABC):
    """A file of rows, as a model reads them.

    Attributes:
        source: the file, or what is in it.
        spec: what the model takes.
        field: of the request that it came by.
        rows: how many.
        read_as: what the rows are taken from, in words.
        ignored: columns of the file that are not read.
        has_ids: whether it names its rows.
        id_column: of a table, the column that does; None where there is none.
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

    @property
    def at_once(self) -> int:
        """How many rows a part has at most; fewer of files, which may be large."""
        most = FILES_AT_ONCE if self._is_files else MOST_AT_ONCE
        return min(most, max(1, NUMBERS_AT_ONCE // self.row_size))

    @property
    def _is_files(self) -> bool:
        """Whether rows come as files."""
        return False

    @property
    def row_size(self) -> int:
        """How many numbers a flat row has."""
        return math.prod(self.spec.shape)

    @abstractmethod
    def ids(self) -> list[str] | None:
        """Return each row's id, None where the file has none."""

    @abstractmethod
    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield the rows from `first` on, in parts of at most `at_once` rows."""

    @property
    def _named(self) -> list[str]:
        """The column of ids, if there is one."""
        return [] if self.id_column is None else [self.id_column]

    def _id_column(self, names: list[str]) -> str | None:
        """Return which of a table's columns names its rows: the one called `id`, or the one that
        did in training."""
        return next((name for name in (ID, self.spec.id_column) if name in names), None)

    def _say_ids(self) -> None:
        """Note whether rows have names, and say so where the column is not called as it usually
        is."""
        self.has_ids = self.id_column is not None
        if self.id_column not in (None, ID):
            self.read_as += f", named by {self.id_column}"

    def _rows_error(self, expected: str, got: str) -> InvalidInput:
        return InvalidInput(self.field, expected, got)

    def _array_of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Take in an array's shape, if it is one of rows."""
        spec = self.spec
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            raise self._rows_error(
                "float or integer numbers of at most 64 bits", f"dtype {dtype.str[:20]}"
            )
        if shape[1:] not in (spec.shape, (self.row_size,)):
            expected = f"an array of shape {shapes_of(spec.shape)}"
            raise self._rows_error(expected, f"shape {shape}")
        self.rows = shape[0]


def refuse_repeated(wanted: list[str], names: list[str], field: str) -> None:
    """Raise InvalidInput, naming the first wanted column that is there more than once."""
    repeated = [name for name in wanted if names.count(name) > 1]
    if repeated:
        raise InvalidInput(
            f"{field}.{repeated[0][:80]}", "one column of that name", f"{names.count(repeated[0])}"
        )


def refuse_absent(wanted: list[str], names: list[str], field: str) -> None:
    """Raise InvalidInput, naming the first wanted column that is not among those of a file."""
    absent = [name for name in wanted if name not in names]
    if absent:
        known = ", ".join(map(str, names[:10])) + (", ..." if len(names) > 10 else "")
        raise InvalidInput(
            f"{field}.{absent[0][:80]}", "a column of that name", f"columns {known[:300]}"
        )


def opened(source: Source) -> Path | io.BytesIO:
    """Return what libraries take in place of a file's name."""
    return source if isinstance(source, Path) else io.BytesIO(source)


def binary(source: Source) -> BinaryIO:
    """Return what is in a file, to be read byte by byte."""
    return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)


@contextmanager
def zip_of(source: Source, expected: str, field: str) -> Iterator[zipfile.ZipFile]:
    """Open a zip; raises InvalidInput if it is none, or turns out not to be whole."""
    try:
        with zipfile.ZipFile(opened(source)) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise InvalidInput(field, expected, "something else") from error


def texts_of(values: list[Any], column: str, first: int) -> list[str]:
    """Return ids as text.

    Raises:
        InvalidInput: naming a row that has none, or one that is no text or number, counted from
            `first`.
    """
    found = []
    for row, value in enumerate(values, start=first):
        if value is None or value != value:
            raise InvalidInput(column, "a name for each row", f"none of row {row}")
        name = text_of(value)
        if name is None:
            raise InvalidInput(
                column, "a text or a number as the name of each row", f"another in row {row}"
            )
        found.append(name)
    return found


def text_of(value: Any) -> str | None:
    """Return an id as text; None of what is no name, such as a list, or bytes that are no text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return None if isinstance(value, list | dict | tuple) else str(value)
