"""Read Parquet files that contain columns, lists of numbers or embedded files."""

import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet, types

from model_store.artifacts.manifest import AnyColumn, InputSpec
from model_store.errors import InvalidInput
from model_store.sources.arrow import column_type, read_categories, read_numbers, read_times
from model_store.sources.cells import cell_reader
from model_store.sources.row_file import (
    ROWS,
    UNBOUNDED,
    Bounds,
    Part,
    RowFile,
    Source,
    as_file,
    convert_ids,
)

# Names that pandas gives to an unnamed index, which is not a feature
INDEX_NAMES = re.compile(r"|Unnamed: 0|__index_level_\d+__")
BUFFER_BYTES = 64 << 10  # read-ahead per column, because row groups can exceed the memory
UNSUPPORTED = re.compile("not (yet )?implemented|not supported|unsupported", re.IGNORECASE)


def read_table(source: Source, field: str, name: object) -> pa.Table:
    with _open_file(source, field, f", {str(name)!r}") as file:
        return file.read()


@contextmanager
def _open_file(
    source: Source | io.RawIOBase, field: str, name: str = "", **options: Any
) -> Iterator[parquet.ParquetFile]:
    try:
        content = source if isinstance(source, io.RawIOBase) else as_file(source)
        # In nanoseconds, the default, years after 2262 overflow without an error.
        with parquet.ParquetFile(content, coerce_int96_timestamp_unit="us", **options) as file:
            yield file
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        expected, reason = _describe(error)
        raise InvalidInput(field, f"{expected}{name}", reason) from error


def write_tables(sink: Any, tables: Iterable[pa.Table]) -> None:
    writer = None
    for table in tables:
        writer = writer or parquet.ParquetWriter(sink, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def to_parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    write_tables(sink, [table])
    return sink.getvalue().to_pybytes()


class ParquetFile(RowFile):
    """A Parquet file that is read in chunks.

    Attributes:
        groups: number of rows in each row group.
        columns: selected columns.
    """

    ENDING = ".parquet"

    def __init__(
        self, source: Source | io.RawIOBase, spec: InputSpec, field: str, bounds: Bounds = UNBOUNDED
    ) -> None:
        self._remote = source if isinstance(source, io.RawIOBase) else None
        super().__init__(b"" if isinstance(source, io.RawIOBase) else source, spec, field, bounds)

    def _open(self) -> None:
        with _open_file(self._remote or self.source, self.field) as file:
            metadata, schema = file.metadata, file.schema_arrow
            names = schema.names  # raises for invalid UTF-8
        self.rows = metadata.num_rows
        self.groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        self._find_ids(names)
        self.columns, self.read_as = self._select_columns(schema)
        self._use(self.columns, names)
        self.read_as += self._name_ids()

    def id_parts(self) -> Iterator[list[str]]:
        first = 0
        for batch in self._batches(self._id_columns) if self.has_ids else ():
            yield self.convert_ids_column(batch, first)
            first += batch.num_rows

    def parts(self, first: int = 0) -> Iterator[Part]:
        for start, batch in self.batches(first, self.rows - first, self.columns):
            yield self.part(batch, start)

    def batches(
        self, first: int, rows: int, columns: list[str] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches from the `rows` rows that start at row `first`.

        A batch has the selected columns, followed by the ids, if any. Only the necessary row groups
        are read.
        """
        ends = np.cumsum([0, *self.groups])
        groups = np.flatnonzero((ends[:-1] < first + rows) & (ends[1:] > first)).tolist()
        start = int(ends[groups[0]]) if groups else 0
        for batch in self._batches(columns or [*self.columns, *self._id_columns], groups):
            begin, end = max(first - start, 0), min(first + rows - start, batch.num_rows)
            if begin < end:
                yield start + begin, batch.slice(begin, end - begin)
            start += batch.num_rows

    def convert_ids_column(self, batch: pa.RecordBatch, first: int) -> list[str]:
        """Return the row ids in a batch's last column. Row numbers in errors start at `first`."""
        assert self.id_column is not None
        column = batch.column(batch.num_columns - 1)
        with _python_values(self.id_column):
            if types.is_timestamp(column.type) and column.type.unit == "ns":
                column = column.cast(pa.string())
            values = column.to_pylist()
        if types.is_fixed_size_binary(column.type):
            values = [None if value is None else value.hex() for value in values]
        return convert_ids(values, self.id_column, first)

    def part(self, batch: pa.RecordBatch, first: int) -> Part:
        """Convert a batch to rows. Row numbers in errors start at `first`."""
        spec = self.spec
        if spec.columns:
            return {column.name: self._cells(batch, column) for column in spec.columns}
        if self._holds_files:
            with _python_values(f"{self.field}.{self.columns[0][:80]}"):
                values = batch.column(0).to_pylist()
            values = [value.get("bytes") if isinstance(value, dict) else value for value in values]
            if None in values:
                row = first + values.index(None)
                raise self._refuse_row(row, f"a value in column {self.columns[0]}")
            return values
        if not is_list(batch.column(0).type):
            cells = []
            for column, name in zip(batch.columns, self.columns, strict=False):
                self._check_present(column, first, f"a number in column {name[:80]}")
                numbers = column.to_numpy(zero_copy_only=False)
                cells.append(np.asarray(numbers, dtype=np.float64))
            return np.stack(cells, axis=1)
        return self._lists(batch.column(0), first)

    def _lists(self, column: Any, first: int) -> np.ndarray:
        size = self.row_size
        self._check_present(column, first, f"{size} numbers in {self.columns[0]}")
        flat = column
        while hasattr(flat.type, "value_type"):
            flat = flat.flatten()
        is_nested = hasattr(column.type.value_type, "value_type")
        if is_nested:
            lengths = [_length(value) for value in column.to_pylist()]
        else:
            lengths = column.value_lengths().to_pylist()
        row = next((row for row, length in enumerate(lengths) if length != size), None)
        if row is not None:
            raise self._refuse_row(first + row, f"{size} numbers", f"{lengths[row]}")
        if len(flat) != len(column) * size:
            raise self._refuse(f"lists of {size} numbers", "missing lists in lists")
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), size)

    def _check_present(self, column: Any, first: int, expected: str) -> None:
        if column.null_count:
            raise self._refuse_row(first + column.is_null().to_pylist().index(True), expected)

    def _refuse_row(self, row: int, expected: str, received: str = "none") -> InvalidInput:
        return InvalidInput(f"{self.field}.{row}", expected, received)

    @property
    def _holds_files(self) -> bool:
        return self.spec.text is not None or self.read_as.startswith("files")

    def _select_columns(self, schema: pa.Schema) -> tuple[list[str], str]:
        spec = self.spec
        if spec.columns:
            names = [column.name for column in spec.columns]
            self._require(names, schema.names)
            return names, f"the {len(names)} columns that the model was fitted with"
        if spec.text is not None:
            self._require([spec.text.column], schema.names)
            return [spec.text.column], f"the column {spec.text.column}"
        fields = [field for field in schema if field.name != self.id_column]
        kinds = {
            field.name: field.type for field in fields if not INDEX_NAMES.fullmatch(field.name)
        }
        files = [name for name, kind in kinds.items() if spec.image is not None and _is_file(kind)]
        lists = [name for name, kind in kinds.items() if _is_list(kind)]
        for kind, candidates in (("files in the column", files), ("the column", lists)):
            preferred = [name for name in (*ROWS, "image") if name in candidates]
            column = candidates if len(candidates) == 1 else preferred
            if len(column) == 1:
                return column, f"{kind} {column[0]}"
        numbers = [name for name, kind in kinds.items() if _is_number(kind)]
        if len(numbers) == self.row_size:
            return numbers, f"the {len(numbers)} columns of numbers, in the file's order"
        size = self.row_size
        expected = f"one column of lists of {size} numbers, or {size} columns of numbers"
        if spec.image is not None:
            expected += ", or one of image files"
        raise self._refuse(expected, f"{len(lists)} of lists and {len(numbers)} of numbers")

    def _cells(self, batch: pa.RecordBatch, column: AnyColumn) -> list[Any] | np.ndarray:
        cells = batch.column(self.columns.index(column.name))
        with _python_values(f"{self.field}.{column.name[:80]}"):
            return _cells(cells, column, self.spec.missing_values)

    def _batches(
        self, columns: list[str], groups: list[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        # Read the necessary ranges of a remote file at once, because each read is a request.
        options: dict[str, Any] = {
            "buffer_size": BUFFER_BYTES,
            "pre_buffer": self._remote is not None,
        }
        with _open_file(self._remote or self.source, self.field, **options) as file:
            for batch in file.iter_batches(
                self.part_rows, row_groups=groups, columns=columns, use_threads=False
            ):
                yield batch.select(columns)


@contextmanager
def _python_values(field: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        expected = "UTF-8 text, times up to the year 9999 and known time zones"
        raise InvalidInput(field, expected, "other values") from error


def _is_file(kind: pa.DataType) -> bool:
    has_bytes = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    return has_bytes or types.is_binary(kind) or types.is_large_binary(kind)


def _is_number(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind)


def is_list(kind: pa.DataType) -> bool:
    """Check whether a type is a list type of variable or fixed length."""
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_list(kind: pa.DataType) -> bool:
    return is_list(kind) and (_is_number(kind.value_type) or _is_list(kind.value_type))


def _length(value: Any) -> int:
    return sum(map(_length, value)) if isinstance(value, list) else 1


def _cells(column: Any, spec: AnyColumn, missing: tuple[str, ...]) -> list[Any] | np.ndarray:
    kind = column_type(column)
    if kind == "text":
        read = cell_reader(spec, missing)
        return [None if cell is None else read(cell) for cell in column.to_pylist()]
    if spec.kind == "numeric" and kind in ("numbers", "integers"):
        return read_numbers(column)
    if spec.kind == "time" and kind == "times":
        return read_times(column)
    if kind == "times" or (kind is not None and spec.kind == "categorical"):
        return read_categories(column)
    return column.to_pylist()


def _describe(error: Exception) -> tuple[str, str]:
    """Describe the expected file and the reason why pyarrow rejected the given one."""
    if isinstance(error, OSError) and error.errno:
        return "a readable parquet file", os.strerror(error.errno)  # pyarrow's text has the path
    reason = (str(error) or type(error).__name__).splitlines()[0][:200]
    is_unsupported = isinstance(error, pa.ArrowNotImplementedError) or UNSUPPORTED.search(reason)
    return f"a {'supported' if is_unsupported else 'whole'} parquet file", reason
