"""Parquet files: columns by name, lists of numbers, or files in a column. Read by pyarrow, which
may be missing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
from jaxtyping import Int64

from model_store.artifacts.manifest import AnyColumn, InputSpec, NumericColumn
from model_store.errors import InvalidInput
from service.pools.csv_file import reader_of
from service.pools.pool_file import (
    INDEX,
    ROWS,
    Part,
    PoolFile,
    Source,
    opened,
    refuse_absent,
    refuse_repeated,
    texts_of,
)

BUFFERED_BYTES = (
    32 << 20
)  # of a row group, which may be larger than memory, that are read ahead, of all columns
LEAST_BUFFER, MOST_BUFFER = 16 << 10, 1 << 20  # of each


class ParquetFile(PoolFile):
    """A table; pyarrow reads it.

    Attributes:
        groups: how many rows each row group has.
        columns: those that rows are taken from.
        of_all: columns that the file has not, and what they say of all its rows, as text; None:
            nothing.
    """

    ENDING = ".parquet"

    def __init__(
        self,
        source: Source,
        spec: InputSpec,
        field: str,
        of_all: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__(source, spec, field)
        self.of_all = of_all or {}
        try:
            import pyarrow.parquet
        except ImportError:
            raise InvalidInput(
                field, "npy, npz, CSV or zip, since pyarrow is not installed here", ".parquet"
            ) from None
        with self._told(), pyarrow.parquet.ParquetFile(opened(source)) as file:
            self.rows = file.metadata.num_rows
            self.groups = [
                file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)
            ]
            schema = file.schema_arrow
        self.id_column = self._id_column(schema.names)
        self.columns, self.read_as = self._wanted(schema)
        refuse_repeated([*self.columns, *self._named], schema.names, field)
        self.ignored = [name for name in schema.names if name not in (*self.columns, *self._named)]
        self._say_ids()

    def ids(self) -> list[str] | None:
        """Return the column of ids as strings."""
        if self.id_column is None:
            return None
        found: list[str] = []
        for batch in self._batches([self.id_column]):
            found += self.names_of(batch, len(found))
        return found

    def parts(self, first: int = 0) -> Iterator[Part]:
        """Yield rows as arrays, lists of files or texts, or cells by column."""
        start = 0
        for batch in self._batches(self.columns):
            ahead = max(0, first - start)
            start += batch.num_rows
            if ahead < batch.num_rows:
                yield self.part(batch.slice(ahead), start - batch.num_rows + ahead)

    def batches(self, first: int, rows: int) -> Iterator[tuple[int, Any]]:
        """Yield so many rows from `first` on in pyarrow's batches, with the place of the first row
        of each.

        A batch has the columns that `part` takes, and behind them that of ids, if there is one. No
        other row groups are read than those that the rows are in.
        """
        ends = np.cumsum([0, *self.groups])
        groups = [
            i for i in range(len(self.groups)) if ends[i] < first + rows and ends[i + 1] > first
        ]
        start = int(ends[groups[0]]) if groups else 0
        for batch in self._batches([*self.columns, *self._named], groups):
            begin, end = max(first - start, 0), min(first + rows - start, batch.num_rows)
            if begin < end:
                yield start + begin, batch.slice(begin, end - begin)
            start += batch.num_rows

    def names_of(self, batch: Any, first: int) -> list[str]:
        """Return the ids of a batch whose last column they are; its first row is row `first` of the
        file.

        Raises:
            InvalidInput: naming a row that has none.
        """
        import pyarrow as pa
        from pyarrow import types

        assert self.id_column is not None
        column = batch.column(batch.num_columns - 1)
        if types.is_timestamp(column.type) and column.type.unit == "ns":
            column = column.cast(pa.string())
        values = column.to_pylist()
        if types.is_fixed_size_binary(column.type):
            values = [None if value is None else value.hex() for value in values]
        return texts_of(values, self.id_column, first)

    def part(self, batch: Any, first: int) -> Part:
        """Return a batch's rows, the first of which is row `first` of the file.

        Raises:
            InvalidInput: naming a row that is none.
        """
        spec = self.spec
        if spec.columns:
            missing = spec.missing_values
            place = {name: i for i, name in enumerate(self.columns)}
            return {
                c.name: _cells_of(batch.column(place[c.name]), c, missing)
                if c.name in place
                else self._cells_of_all(c, batch.num_rows)
                for c in spec.columns
            }
        if spec.text is not None or (spec.image is not None and self._is_files):
            values = batch.column(0).to_pylist()
            values = [value.get("bytes") if isinstance(value, dict) else value for value in values]
            if None in values:
                row = first + values.index(None)
                raise InvalidInput(
                    f"{self.field}.{row}", f"a value in column {self.columns[0]}", "none"
                )
            return values
        if len(self.columns) > 1 or self.row_size == 1:
            cells = [
                _numbers_of(batch.column(i), name, first, self.field)
                for i, name in enumerate(self.columns)
            ]
            return np.stack(cells, axis=1)
        column = batch.column(0)
        if column.null_count:
            row = first + column.is_null().to_pylist().index(True)
            raise InvalidInput(
                f"{self.field}.{row}", f"{self.row_size} numbers in {self.columns[0]}", "none"
            )
        flat = _flat(column)
        if len(flat) != len(column) * self.row_size or set(np.diff(_offsets(column)).tolist()) - {
            self.row_size
        }:
            lengths = [_length(value) for value in column.to_pylist()]
            row = next(i for i, length in enumerate(lengths) if length != self.row_size)
            raise InvalidInput(
                f"{self.field}.{first + row}", f"{self.row_size} numbers", f"{lengths[row]}"
            )
        return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), self.row_size)

    @property
    def _is_files(self) -> bool:
        return self.read_as.startswith("files")

    def _wanted(self, schema: Any) -> tuple[list[str], str]:
        """Return the columns that rows are taken from, and what that is in words."""
        import pyarrow.types as types

        spec = self.spec
        if spec.columns:
            names = [c.name for c in spec.columns]
            refuse_absent(names, [*schema.names, *self.of_all], self.field)
            there = [name for name in names if name in schema.names]
            return there, f"the {len(names)} columns that the model was fitted with"
        if spec.text is not None:
            refuse_absent([spec.text.column], schema.names, self.field)
            return [spec.text.column], f"the column {spec.text.column}"

        def is_file(kind: Any) -> bool:
            has_bytes = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            return has_bytes or types.is_binary(kind) or types.is_large_binary(kind)

        def is_number(kind: Any) -> bool:
            return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)

        def is_list(kind: Any) -> bool:
            has_items = (
                types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
            )
            return has_items and (is_number(kind.value_type) or is_list(kind.value_type))

        names = [
            name for name in schema.names if name != self.id_column and not INDEX.fullmatch(name)
        ]
        of = {field.name: field.type for field in schema}
        files = [name for name in names if is_file(of[name])] if spec.image is not None else []
        lists = [name for name in names if is_list(of[name])]
        for kind, found in (("files in the column", files), ("the column", lists)):
            chosen = (
                found if len(found) == 1 else [name for name in (*ROWS, "image") if name in found]
            )
            if len(chosen) == 1:
                return chosen, f"{kind} {chosen[0]}"
        numbers = [name for name in names if is_number(of[name])]
        if len(numbers) == self.row_size:
            return numbers, f"the {len(numbers)} columns of numbers, in the file's order"
        expected = (
            f"one column of lists of {self.row_size} numbers, or {self.row_size} columns of numbers"
        )
        if spec.image is not None:
            expected += ", or one of image files"
        raise self._rows_error(expected, f"{len(lists)} of lists and {len(numbers)} of numbers")

    def _cells_of_all(self, column: AnyColumn, rows: int) -> list[Any]:
        """Return the cells of a column that says the same of all rows."""
        text = self.of_all[column.name]
        return [None if text is None else reader_of(column, self.spec.missing_values)(text)] * rows

    def _batches(self, columns: list[str], groups: list[int] | None = None) -> Iterator[Any]:
        import pyarrow.parquet

        size = min(MOST_BUFFER, max(LEAST_BUFFER, BUFFERED_BYTES // max(1, len(columns))))
        with (
            self._told(),
            pyarrow.parquet.ParquetFile(
                opened(self.source), buffer_size=size, pre_buffer=False
            ) as file,
        ):
            for batch in file.iter_batches(
                self.at_once, row_groups=groups, columns=columns, use_threads=False
            ):
                yield batch.select(columns)

    @contextmanager
    def _told(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise self._rows_error("a whole parquet file", "something else") from error


def byte_range(source: Source, groups: range) -> tuple[int, int]:
    """Return from which byte to which, exclusive, a run of row groups lies in a file, whatever
    their columns."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(opened(source)) as file:
        chunks = [
            file.metadata.row_group(i).column(j)
            for i in groups
            for j in range(file.metadata.num_columns)
        ]
    starts = [
        min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
        for chunk in chunks
    ]
    ends = [
        start + chunk.total_compressed_size for start, chunk in zip(starts, chunks, strict=True)
    ]
    return min(starts), max(ends)


def _flat(column: Any) -> Any:
    """Return the numbers of a column of lists, however deep, one after the other."""
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    return column


def _offsets(column: Any) -> Int64[np.ndarray, "N"]:
    """Return where each row's numbers begin and end, of a column of lists, in units of the
    innermost."""
    lengths = (
        np.array([_length(value) for value in column.to_pylist()])
        if _is_nested(column)
        else _lengths(column)
    )
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


def _cells_of(column: Any, of: AnyColumn, missing: tuple[str, ...]) -> list[Any] | np.ndarray:
    """Return cells as JSON would have them; of plain numbers an array, NaN where one is missing."""
    import pyarrow as pa
    import pyarrow.types as types

    kind = column.type
    if types.is_timestamp(kind) and kind.unit == "ns":  # which Python has no type for
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    if isinstance(of, NumericColumn) and (types.is_floating(kind) or types.is_integer(kind)):
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)
    cells = column.to_pylist()
    if types.is_floating(kind):
        return [None if cell is None or cell != cell else cell for cell in cells]
    if types.is_timestamp(kind) or types.is_date(kind):
        return [cell.isoformat() if isinstance(cell, date | datetime) else None for cell in cells]
    if types.is_decimal(kind):
        return [float(cell) if isinstance(cell, Decimal) else None for cell in cells]
    if any(type(cell) is str for cell in cells):
        read = reader_of(of, missing)
        return [read(cell) if type(cell) is str else cell for cell in cells]
    if isinstance(of, NumericColumn) and types.is_boolean(kind):
        return [None if cell is None else int(cell) for cell in cells]
    return cells
