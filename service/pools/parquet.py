"""Parquet files: columns by name, lists of numbers, or files in a column. Read by pyarrow, which may be missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
from jaxtyping import Int64

from model_store.artifacts.manifest import InputSpec, NumericColumn
from model_store.errors import InvalidInput
from service.pools.pool_file import ID, ROWS, Part, PoolFile, Source, opened, refuse_absent, text_of


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
        with self._told(), pyarrow.parquet.ParquetFile(opened(source)) as file:
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
            found += map(text_of, values)
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
            refuse_absent([c.name for c in spec.columns], schema.names, self.field)
            return [c.name for c in spec.columns], f"the {len(spec.columns)} columns that the model was fitted with"
        if spec.text is not None:
            refuse_absent([spec.text.column], schema.names, self.field)
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

        with self._told(), pyarrow.parquet.ParquetFile(opened(self.source), memory_map=True) as file:
            for batch in file.iter_batches(self.at_once, columns=columns):
                yield batch.select(columns)

    @contextmanager
    def _told(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError) as error:
            raise self._rows_error("a whole parquet file", "something else") from error


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
