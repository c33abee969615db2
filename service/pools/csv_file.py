"""CSV files of columns or texts: encoding, delimiter and decimal commas are recognised."""

import codecs
import csv
import io
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, InputSpec, NumericColumn
from model_store.errors import InvalidInput
from model_store.inputs.delimiters import delimiter_of
from model_store.inputs.numbers import number_of
from service.pools.pool_file import ID, Part, PoolFile, Source, binary, refuse_absent

MISSING = ("", "NA", "N/A", "NaN", "nan", "null")  # cells that hold nothing, as in training
COMMA_NUMBER = re.compile(r"[+-]?\d*,\d+(?:[eE][+-]?\d+)?")
CLOSED = "a CSV file with quotes that are closed"
SAMPLE_BYTES = 1 << 16  # of a file, that its delimiter is recognised by


class CsvFile(PoolFile):
    """A table of a model of columns, or a text in each row, with a line of names at its top."""

    ENDING = ".csv"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        if not spec.columns and spec.text is None:
            raise self._rows_error("a CSV file for a model of columns or text alone", "one for another model")
        wanted = [c.name for c in spec.columns] if spec.columns else [spec.text.column if spec.text else ""]
        self._encoding, self._delimiter = _form(source)
        names: list[str] = []
        plain = [c.name for c in spec.columns if isinstance(c, NumericColumn) and c.written is None]
        has_points = has_commas = False
        for row in self._lines():
            if not names:
                names = row
                if len(set(names)) < len(names):
                    raise self._rows_error("columns of different names", "some that are the same")
                refuse_absent(wanted, names, field)
                places = [names.index(name) for name in plain]
                continue
            if len(row) != len(names):
                raise InvalidInput(f"{field}.{self.rows}", f"{len(names)} cells, as the first line", f"{len(row)}")
            has_points = has_points or any("." in row[i] for i in places)
            has_commas = has_commas or any(COMMA_NUMBER.fullmatch(row[i].strip()) for i in places)
            self.rows += 1
        if has_points and has_commas and self._delimiter != ",":
            raise self._rows_error("numbers with decimal points or with decimal commas", "both")
        self._has_commas = has_commas and self._delimiter != ","  # else 1,234 may be a thousand and more
        self._names, self._columns, self.has_ids = names, wanted, ID in names
        self.ignored = [name for name in names if name not in (*wanted, ID)]
        self.read_as = f"{len(wanted)} columns by name" if spec.columns else f"the column {wanted[0]}"
        if self._has_commas:
            self.read_as += ", with decimal commas"
        if self._encoding != "utf-8-sig":
            self.read_as += f", as {self._encoding}"

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
            c.name: [cell_of(row[places[c.name]], c, self._has_commas) for row in part] for c in self.spec.columns
        }

    def _rows(self) -> Iterator[list[str]]:
        lines = self._lines()
        next(lines)
        yield from lines

    def _lines(self) -> Iterator[list[str]]:
        try:
            with (
                binary(self.source) as content,
                io.TextIOWrapper(content, encoding=self._encoding, newline="") as file,
            ):
                end = ["end", "of file"]  # a line of its own, unless a quote before it is still open
                before: list[str] = []
                for row in csv.reader(chain(file, [self._delimiter.join(end)]), delimiter=self._delimiter):
                    if before:
                        yield before
                    before = row
        except UnicodeDecodeError as error:
            raise self._rows_error("a CSV file in UTF-8, UTF-16 or cp1252", "something else") from error
        except csv.Error as error:
            raise self._rows_error(CLOSED, f"a cell of more than {csv.field_size_limit()} characters") from error
        if before != end:
            raise self._rows_error(CLOSED, "one that is open at the end")


def cell_of(text: str, column: AnyColumn, has_commas: bool = False) -> Any:
    """Return a cell that came as text as JSON would have it; plain numbers may have decimal commas."""
    stripped = text.strip()
    if isinstance(column, CategoricalColumn):
        return None if text in MISSING and text not in column.categories else text
    if stripped in MISSING:
        return None
    if isinstance(column, NumericColumn):
        try:
            if column.written is not None:
                return number_of(stripped, column.written)
            if "_" in stripped:  # which Python takes for a number
                return text
            return float(stripped.replace(",", ".") if has_commas else stripped)
        except ValueError:
            return text  # which is refused, and named
    return stripped


def _form(source: Source) -> tuple[str, str]:
    """Return a file's encoding and delimiter: UTF-8, UTF-16 where it begins so, else cp1252, as in training."""
    with binary(source) as file:
        sample = file.read(SAMPLE_BYTES)
        encoding = "utf-16" if sample.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
        file.seek(0)
        decoder = codecs.getincrementaldecoder(encoding)()
        try:
            while block := file.read(SAMPLE_BYTES):
                decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            encoding = "cp1252"
    text = sample.decode(encoding, "ignore")
    return encoding, delimiter_of(text if len(sample) < SAMPLE_BYTES else text[: text.rfind("\n") + 1] or text)
