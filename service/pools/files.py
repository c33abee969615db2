"""Files of rows: npy, npz, parquet, CSV, and zips of images or texts. Read from begin to end in parts.

What a file's rows are taken from is chosen by the model, and said: `read_as`. Ids come from the file where it has
them: an array `ids` of an npz, the column `id` of a table, the names of a zip's files.
"""

import csv
import io
import math
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
from jaxtyping import Int64

from model_store.artifacts.manifest import CategoricalColumn, InputSpec, NumericColumn
from model_store.errors import InvalidInput
from model_store.inputs.numbers import number_of

ID = "id"  # the column of a table that names its rows
IDS = "ids"  # the array of an npz that does
ROWS = (
    "pool",
    "inputs",
    "x",
    "X",
    "rows",
    "features",
)  # names under which rows are looked for, where there are several
NUMBERS_AT_ONCE = 1 << 21  # of a part: 8 MB as float32
MOST_AT_ONCE = 1 << 14  # rows of a part
MOST_MEMBER_BYTES = 64 << 20  # of a file in a zip, once inflated
FILES_AT_ONCE = 64  # of a part
FILE_BYTES_AT_ONCE = 32 << 20  # of a part of a zip, about
TEXT_ENDS = (".txt", ".text", ".md")
MISSING = ("", "NA", "N/A", "NaN", "nan", "null")  # cells of a CSV file that hold nothing, as in training
COMMA_NUMBER = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")

Source = Path | bytes | bytearray  # a file, or what is in one
Part = list[Any] | np.ndarray | dict[str, list[Any] | np.ndarray]  # rows as requests have them, or cells by column


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

    def _rows_error(self, expected: str, got: str) -> InvalidInput:
        return InvalidInput(self.field, expected, got)

    def _array_of(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Take in an array's shape, if it is one of rows."""
        spec = self.spec
        if dtype.kind not in "fiub" or dtype.itemsize > 8:
            raise self._rows_error("float or integer numbers of at most 64 bits", f"dtype {dtype.str[:20]}")
        if shape[1:] not in (spec.shape, (self.row_size,)):
            expected = f"an array of shape (N, {', '.join(map(str, spec.shape))}) or (N, {self.row_size})"
            raise self._rows_error(expected, f"shape {shape}")
        self.rows = shape[0]


class NpyFile(PoolFile):
    """An array, looked at without reading it whole."""

    ENDING = ".npy"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        try:
            is_file = isinstance(source, Path)
            self._array = np.load(_opened(source), mmap_mode="r" if is_file else None, allow_pickle=False)
        except Exception as error:  # numpy's reader of headers lets many kinds through
            raise self._rows_error("a whole npy file of numbers", "something else") from error
        self._array_of(self._array.shape, self._array.dtype)
        self.read_as = f"the array, {self._array.dtype}"

    def ids(self) -> list[str] | None:
        """Return None: an npy file has no names."""
        return None

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield rows as arrays; of a file in C order they are read, since mapped pages stay in memory."""
        array = self._array
        if not isinstance(array, np.memmap) or not array.flags.c_contiguous:
            for start in range(first, self.rows, self.at_once):
                yield np.asarray(array[start : start + self.at_once])
            return
        row_numbers = math.prod(array.shape[1:])
        with _binary(self.source) as file:
            file.seek(array.offset + first * row_numbers * array.itemsize)
            for start in range(first, self.rows, self.at_once):
                n = min(self.at_once, self.rows - start)
                part = np.fromfile(file, array.dtype, n * row_numbers)
                yield part.reshape(n, *array.shape[1:])


class NpzFile(PoolFile):
    """An array of an npz file, with another one of ids beside it, if there is one."""

    ENDING = ".npz"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        with self._archive() as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            self.has_ids = IDS in names
            arrays = [name for name in names if name != IDS]
            named = [name for name in ROWS if name in arrays]
            if len(arrays) != 1 and len(named) != 1:
                expected = f"one array of rows, or one of several that is named {' or '.join(ROWS)}"
                raise self._rows_error(expected, f"arrays {sorted(arrays)[:10]}")
            self._name = arrays[0] if len(arrays) == 1 else named[0]
            with self._member(archive, self._name) as (_, shape, fortran, dtype):
                if fortran:
                    raise self._rows_error("an array in C order (np.ascontiguousarray)", "one in Fortran order")
                self._array_of(shape, dtype)
            self.ignored = sorted(set(arrays) - {self._name})
            if self.has_ids:
                with self._member(archive, IDS) as (_, shape, _, dtype):
                    if dtype.kind not in "UiuS" or shape != (self.rows,):
                        got = f"{dtype} of shape {shape}"
                        raise InvalidInput(IDS, f"{self.rows} strings or whole numbers, one for each row", got)
        self.read_as = f"the array {self._name}, {'' if self.has_ids else dtype}".rstrip(", ")

    def ids(self) -> list[str] | None:
        """Return the array `ids` as strings."""
        if not self.has_ids:
            return None
        with self._archive() as archive, self._member(archive, IDS) as (file, shape, _, dtype):
            array = np.frombuffer(_read(file, shape[0] * dtype.itemsize), dtype=dtype)
        return [_text_of(value) for value in array.tolist()]

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield rows as arrays, inflated as they come."""
        with self._archive() as archive, self._member(archive, self._name) as (file, shape, _, dtype):
            row_bytes = dtype.itemsize * math.prod(shape[1:])
            for start in range(0, self.rows, self.at_once):
                n = min(self.at_once, self.rows - start)
                if start + n <= first and start + self.at_once <= first:
                    _read(file, n * row_bytes)
                    continue
                array = np.frombuffer(_read(file, n * row_bytes), dtype=dtype).reshape(n, *shape[1:])
                yield array[max(0, first - start) :]

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        with _zip_of(self.source, "a whole npz file", self.field) as archive:
            yield archive

    @contextmanager
    def _member(
        self, archive: zipfile.ZipFile, name: str
    ) -> Iterator[tuple[Any, tuple[int, ...], bool, np.dtype[Any]]]:
        """Open an array's member, read up to its numbers, and what its header says."""
        with archive.open(f"{name}.npy") as file:
            try:
                version = np.lib.format.read_magic(file)
                readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, fortran, dtype = readers[version](file)
            except (zipfile.BadZipFile, zlib.error):
                raise
            except Exception as error:
                raise InvalidInput(name[:80], "an array of format 1.0 or 2.0", "something else") from error
            if dtype.hasobject:
                raise InvalidInput(name[:80], "an array of numbers or strings", "one of Python objects")
            yield file, shape, fortran, dtype


class ParquetFile(PoolFile):
    """A table; pyarrow reads it."""

    ENDING = ".parquet"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        try:
            import pyarrow.parquet
        except ImportError:
            raise InvalidInput(
                field, "npy, npz, CSV or zip, since pyarrow is not installed here", ".parquet"
            ) from None
        with self._told(), pyarrow.parquet.ParquetFile(_opened(source)) as file:
            self.rows = file.metadata.num_rows
            schema = file.schema_arrow
        self.has_ids = ID in schema.names
        self._columns, self.read_as = self._wanted(schema)
        self.ignored = [name for name in schema.names if name not in (*self._columns, ID)]

    def ids(self) -> list[str] | None:
        """Return the column `id` as strings."""
        if not self.has_ids:
            return None
        found: list[str] = []
        for batch in self._batches([ID]):
            values = batch.column(0).to_pylist()
            if None in values:
                raise InvalidInput(ID, "a name for each row", f"none of row {len(found) + values.index(None)}")
            found += map(_text_of, values)
        return found

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield rows as arrays, lists of files or texts, or cells by column."""
        start = 0
        for batch in self._batches(self._columns):
            ahead = max(0, first - start)
            start += batch.num_rows
            if ahead < batch.num_rows:
                yield self._part(batch.slice(ahead), start - batch.num_rows + ahead)

    def _part(self, batch: Any, first: int) -> Part:
        spec = self.spec
        if spec.columns:
            return {c.name: _cells_of(batch.column(i), c) for i, c in enumerate(spec.columns)}
        if spec.text is not None or (spec.image is not None and self._is_files):
            values = batch.column(0).to_pylist()
            values = [value.get("bytes") if isinstance(value, dict) else value for value in values]
            if None in values:
                row = first + values.index(None)
                raise InvalidInput(f"{self.field}.{row}", f"a value in column {self._columns[0]}", "none")
            return values
        if len(self._columns) > 1 or self.row_size == 1:
            cells = [_numbers_of(batch.column(i), name, first, self.field) for i, name in enumerate(self._columns)]
            return np.stack(cells, axis=1)
        column = batch.column(0)
        if column.null_count:
            row = first + column.is_null().to_pylist().index(True)
            raise InvalidInput(f"{self.field}.{row}", f"{self.row_size} numbers in {self._columns[0]}", "none")
        flat = _flat(column)
        if len(flat) != len(column) * self.row_size or set(np.diff(_offsets(column)).tolist()) - {self.row_size}:
            lengths = [_length(value) for value in column.to_pylist()]
            row = next(i for i, length in enumerate(lengths) if length != self.row_size)
            raise InvalidInput(f"{self.field}.{first + row}", f"{self.row_size} numbers", f"{lengths[row]}")
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), self.row_size)

    @property
    def _is_files(self) -> bool:
        return self.read_as.startswith("files")

    def _wanted(self, schema: Any) -> tuple[list[str], str]:
        """Return the columns that rows are taken from, and what that is in words."""
        import pyarrow.types as types

        spec, names = self.spec, [name for name in schema.names if name != ID]
        if spec.columns:
            _refuse_absent([c.name for c in spec.columns], schema.names, self.field)
            return [c.name for c in spec.columns], f"the {len(spec.columns)} columns that the model was fitted with"
        if spec.text is not None:
            _refuse_absent([spec.text.column], schema.names, self.field)
            return [spec.text.column], f"the column {spec.text.column}"

        def is_file(kind: Any) -> bool:
            has_bytes = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            return has_bytes or types.is_binary(kind) or types.is_large_binary(kind)

        def is_list(kind: Any) -> bool:
            return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)

        def is_number(kind: Any) -> bool:
            return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)

        of = {name: schema.field(name).type for name in names}
        files = [name for name in names if is_file(of[name])] if spec.image is not None else []
        lists = [name for name in names if is_list(of[name])]
        for kind, found in (("files in the column", files), ("the column", lists)):
            chosen = found if len(found) == 1 else [name for name in (*ROWS, "image") if name in found]
            if len(chosen) == 1:
                return chosen, f"{kind} {chosen[0]}"
        numbers = [name for name in names if is_number(of[name])]
        if len(numbers) == self.row_size:
            return numbers, f"the {len(numbers)} columns of numbers, in the file's order"
        expected = f"one column of lists of {self.row_size} numbers, or {self.row_size} columns of numbers"
        if spec.image is not None:
            expected += ", or one of image files"
        raise self._rows_error(expected, f"{len(lists)} of lists and {len(numbers)} of numbers")

    def _batches(self, columns: list[str]) -> Iterator[Any]:
        import pyarrow.parquet

        with self._told(), pyarrow.parquet.ParquetFile(_opened(self.source), memory_map=True) as file:
            for batch in file.iter_batches(self.at_once, columns=columns):
                yield batch.select(columns)

    @contextmanager
    def _told(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise self._rows_error("a whole parquet file", "something else") from error


class CsvFile(PoolFile):
    """A table of a model of columns, or a text in each row, with a line of names at its top."""

    ENDING = ".csv"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        if not spec.columns and spec.text is None:
            raise self._rows_error("a CSV file for a model of columns or text alone", "one for another model")
        wanted = [c.name for c in spec.columns] if spec.columns else [spec.text.column if spec.text else ""]
        names: list[str] = []
        plain = [c.name for c in spec.columns if isinstance(c, NumericColumn) and c.written is None]
        has_points = has_commas = False
        for row in self._lines():
            if not names:
                names = row
                if len(set(names)) < len(names):
                    raise self._rows_error("columns of different names", "some that are the same")
                _refuse_absent(wanted, names, field)
                places = [names.index(name) for name in plain]
                continue
            if len(row) != len(names):
                raise InvalidInput(f"{field}.{self.rows}", f"{len(names)} cells, as the first line", f"{len(row)}")
            has_points = has_points or any("." in row[i] for i in places)
            has_commas = has_commas or any(COMMA_NUMBER.fullmatch(row[i].strip()) for i in places)
            self.rows += 1
        if has_points and has_commas:
            raise self._rows_error("numbers with decimal points or with decimal commas", "both")
        self._has_commas = has_commas
        self._names, self._columns, self.has_ids = names, wanted, ID in names
        self.ignored = [name for name in names if name not in (*wanted, ID)]
        self.read_as = f"{len(wanted)} columns by name" if spec.columns else f"the column {wanted[0]}"
        if has_commas:
            self.read_as += ", with decimal commas"

    def ids(self) -> list[str] | None:
        """Return the column `id`."""
        if not self.has_ids:
            return None
        place = self._names.index(ID)
        return [row[place] for row in self._rows()]

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield cells by column, or texts."""
        part: list[list[str]] = []
        for i, row in enumerate(self._rows()):
            if i >= first:
                part.append(row)
                if (i + 1) % self.at_once == 0:
                    yield self._cells(part)
                    part = []
        if part:
            yield self._cells(part)

    def _cells(self, part: list[list[str]]) -> Part:
        places = {name: self._names.index(name) for name in self._columns}
        if not self.spec.columns:
            return [row[places[self._columns[0]]] for row in part]
        return {
            c.name: [_csv_cell(row[places[c.name]], c, self._has_commas) for row in part] for c in self.spec.columns
        }

    def _rows(self) -> Iterator[list[str]]:
        lines = self._lines()
        next(lines)
        yield from lines

    def _lines(self) -> Iterator[list[str]]:
        try:
            with (
                _binary(self.source) as content,
                io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as file,
            ):
                sample = file.read(1 << 16)
                file.seek(0)
                delimiter = max(",;\t|", key=sample.partition("\n")[0].count)
                for row in csv.reader(file, delimiter=delimiter):
                    if row:
                        yield row
        except (UnicodeDecodeError, csv.Error) as error:
            raise self._rows_error("a CSV file in UTF-8", "something else") from error


class ZipOfFiles(PoolFile):
    """A zip of image files, or of texts; each is a row, its name the id."""

    ENDING = ".zip"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        if spec.image is None and spec.text is None:
            raise self._rows_error("a zip for a model of images or text alone", "one for another model")
        with _zip_of(source, "a whole zip file", field) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir() and not _is_of_system(info.filename)]
        encrypted = [info for info in infos if info.flag_bits & 1]
        if encrypted:
            raise self._rows_error("a zip of files without passwords", "one with")
        self._names, self.has_ids = sorted(info.filename for info in infos), True
        self.rows = len(self._names)
        self.read_as = "its files, in the order of their names"

    @property
    def _is_files(self) -> bool:
        return True

    def ids(self) -> list[str] | None:
        """Return the files' names."""
        return self._names

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield the bytes of files."""
        with _zip_of(self.source, "a whole zip file", self.field) as archive:
            part, held = [], 0
            for name in self._names[first:]:
                part.append(self._content(archive, name))
                held += len(part[-1])
                if len(part) == self.at_once or held > FILE_BYTES_AT_ONCE:
                    yield part
                    part, held = [], 0
            if part:
                yield part

    def _content(self, archive: zipfile.ZipFile, name: str) -> bytes:
        with archive.open(name) as file:
            content = file.read(MOST_MEMBER_BYTES + 1)
        if len(content) > MOST_MEMBER_BYTES:
            raise self._rows_error(f"files of at most {MOST_MEMBER_BYTES} bytes", f"a larger one, {name[:200]}")
        return content


KINDS: dict[str, type[PoolFile]] = {
    kind.ENDING: kind for kind in (NpyFile, NpzFile, ParquetFile, CsvFile, ZipOfFiles)
}


def open_pool(source: Source, spec: InputSpec, field: str, ending: str | None = None) -> PoolFile:
    """Open a file of rows of a model's kind; of what is in one, `ending` says what it is.

    Raises:
        InvalidInput: if it is none, is not whole, or has rows of another width; names `field`.
    """
    if isinstance(source, Path):
        ending = source.suffix
    kind = KINDS.get((ending or "").lower())
    if kind is None:
        raise InvalidInput(field, f"a file that ends in {', '.join(KINDS)}", (ending or "another")[:20])
    try:
        pool = kind(source, spec, field)
    except OSError as error:
        raise InvalidInput(field, "a file that can be read", error.strerror or "another") from error
    if pool.rows == 0:
        raise InvalidInput(field, "at least one row", "none")
    return pool


def path_in(folder: Path | None, name: str, field: str) -> Path:
    """Return the file of a name under the operator's folder.

    Raises:
        InvalidInput: if there is no such folder or file, or the name, or a link, leads out of it.
    """
    if folder is None:
        raise InvalidInput(field, "none, since the service has no folder of pools (DUBITO_POOLS)", "a name")
    if "\0" in name or not name:
        raise InvalidInput(field, "the name of a file", "none")
    root = folder.resolve()
    try:
        path = (root / name).resolve()
    except (OSError, RuntimeError):
        raise InvalidInput(field, "the name of a file", "another") from None
    if Path(name).is_absolute() or not path.is_relative_to(root) or path == root:
        raise InvalidInput(field, "the name of a file in the folder of pools", "a path that leads out of it")
    if not path.is_file():
        raise InvalidInput(field, "the name of a file in the folder of pools", "one that is not there")
    return path


def stamp_of(path: Path) -> str:
    """Return what changes when a file does: its size and time."""
    stat = path.stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def check_ids(ids: list[str], rows: int) -> None:
    """Raise InvalidInput unless there is a different name for each row."""
    if len(ids) != rows:
        raise InvalidInput(IDS, f"one for each of the {rows} pool rows", f"{len(ids)}")
    digests = np.frombuffer(
        b"".join(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest() for name in ids), dtype="V16"
    )
    _, firsts, counts = np.unique(digests, return_index=True, return_counts=True)
    if len(firsts) < rows:
        again = ids[int(firsts[np.argmax(counts)])]
        raise InvalidInput(IDS, "different names", f"some that are the same, {again[:80]!r} among them")


def _refuse_absent(wanted: list[str], names: list[str], field: str) -> None:
    absent = [name for name in wanted if name not in names]
    if absent:
        known = ", ".join(map(str, names[:10])) + (", ..." if len(names) > 10 else "")
        raise InvalidInput(f"{field}.{absent[0][:80]}", "a column of that name", f"columns {known[:300]}")


def _opened(source: Source) -> Path | io.BytesIO:
    """Return what libraries take in place of a file's name."""
    return source if isinstance(source, Path) else io.BytesIO(source)


def _binary(source: Source) -> BinaryIO:
    return source.open("rb") if isinstance(source, Path) else io.BytesIO(source)


def _is_of_system(name: str) -> bool:
    """Whether a member of a zip is no file of the user's, but one that macOS or Windows put there."""
    parts = name.split("/")
    return parts[0] == "__MACOSX" or parts[-1].startswith(".") or parts[-1] in ("Thumbs.db", "desktop.ini")


@contextmanager
def _zip_of(source: Source, expected: str, field: str) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(_opened(source)) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        raise InvalidInput(field, expected, "something else") from error


def _read(file: Any, size: int) -> bytes:
    """Read so many bytes of a member of a zip."""
    content: bytes = file.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _text_of(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _flat(column: Any) -> Any:
    """Return the numbers of a column of lists, however deep, one after the other."""
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    return column


def _offsets(column: Any) -> Int64[np.ndarray, "N"]:
    """Return where each row's numbers begin and end, of a column of lists, in units of the innermost."""
    lengths = np.array([_length(value) for value in column.to_pylist()]) if _is_nested(column) else _lengths(column)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _is_nested(column: Any) -> bool:
    return hasattr(column.type.value_type, "value_type")


def _lengths(column: Any) -> np.ndarray:
    import pyarrow.compute as compute

    return np.asarray(compute.list_value_length(column).to_numpy(zero_copy_only=False))


def _length(value: Any) -> int:
    """How many numbers nested lists hold."""
    return sum(map(_length, value)) if isinstance(value, list) else 1


def _numbers_of(column: Any, name: str, first: int, field: str) -> np.ndarray:
    if column.null_count:
        row = first + column.is_null().to_pylist().index(True)
        raise InvalidInput(f"{field}.{row}", f"a number in column {name[:80]}", "none")
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _cells_of(column: Any, of: Any) -> list[Any] | np.ndarray:
    """Return cells as JSON would have them; of plain numbers an array, NaN where one is missing."""
    import pyarrow.types as types

    kind = column.type
    if isinstance(of, NumericColumn) and (types.is_floating(kind) or types.is_integer(kind)):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    cells = column.to_pylist()
    if types.is_floating(kind):
        return [None if cell is None or cell != cell else cell for cell in cells]
    if types.is_timestamp(kind) or types.is_date(kind):
        return [cell.isoformat() if isinstance(cell, date | datetime) else None for cell in cells]
    if types.is_decimal(kind):
        return [float(cell) if isinstance(cell, Decimal) else None for cell in cells]
    if isinstance(of, NumericColumn) and types.is_boolean(kind):
        return [None if cell is None else int(cell) for cell in cells]
    return cells


def _csv_cell(text: str, column: Any, has_commas: bool) -> Any:
    """Return a cell of a CSV file as JSON would have it; plain numbers may have decimal commas."""
    stripped = text.strip()
    if isinstance(column, CategoricalColumn):
        return None if text in MISSING and text not in column.categories else text
    if stripped in MISSING:
        return None
    if isinstance(column, NumericColumn):
        try:
            if column.written is not None:
                return number_of(stripped, column.written)
            return float(stripped.replace(",", ".") if has_commas else stripped)
        except ValueError:
            return text  # which is refused, and named
    return stripped
