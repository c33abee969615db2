"""Read CSV files, detecting their encoding, delimiter and decimal mark."""

import codecs
import csv
import io
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from model_store.artifacts.manifest import NumericColumn
from model_store.errors import InvalidInput
from model_store.overrides import Override
from model_store.sources.cells import COMMA_NUMBER, POINT_NUMBER, THOUSANDS, cell_reader
from model_store.sources.row_file import Part, RowFile, Source, binary, convert_ids, cut
from model_store.types import Pause, no_pause

DELIMITERS = (",", ";", "\t", "|")
MARK = re.compile(r'"?sep=(.)"?\r?\n')  # first line written by Excel
CLOSED = "a CSV file with closed quotes"
TO_CLOSING_QUOTE = re.compile(r'(?:[^"]|"")*+"')
SAMPLE_BYTES = 1 << 16  # to detect the delimiter
SAMPLE_LINES = 100
ENCODINGS = ("utf-8-sig", "cp1252", "latin-1")  # tried in this order
MARKS = {  # longer marks first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
END = ["end", "of file"]  # an extra line, to detect an unclosed quote

MAX_CELLS = 1 << 17  # per row
MAX_LETTERS = 1 << 24  # per line and per cell
LETTER_BYTES = 4  # upper bound in memory
PART_CELLS = 1 << 18
CELL_BYTES = 100  # memory per cell, without its letters
PART_LETTERS = 1 << 23

_long_cells = Override(csv.field_size_limit, csv.field_size_limit, MAX_LETTERS)


class CsvTable:
    """A CSV file with a header. Extra empty cells at the end of a line are ignored.

    Attributes:
        names: stripped column names, empty for an empty file.
        encoding, delimiter: the options, or the detected ones.
    """

    def __init__(
        self,
        source: Source,
        field: str,
        encoding: str | None = None,
        delimiter: str | None = None,
        pause: Pause = no_pause,
    ) -> None:
        self.source = source
        self.field = field
        self.pause = pause
        self._has_encoding = encoding is not None
        self._cells = 0  # of the current row
        self._line = ""  # the last one read
        with binary(source) as file:
            sample = file.read(SAMPLE_BYTES)
            known = _normalise_encoding(encoding, field) if encoding else None
            self.encoding = known or _detect_encoding(sample, file)
        mark = MARK.match(sample.decode(self.encoding, "ignore"))
        self._is_marked = mark is not None
        self.delimiter = delimiter or (mark[1] if mark else self._detect_delimiter(sample))
        self.names = [name.strip() for name in _strip_empty_cells(next(self._lines(), []), 1)]

    def rows(self) -> Iterator[list[str]]:
        for n, line in enumerate(islice(self._lines(), 1, None)):
            row = _strip_empty_cells(line, len(self.names))
            if len(row) != len(self.names):
                expected, received = f"{len(self.names)} cells, as the first line", f"{len(row)}"
                if len(self.names) == 1:  # often a title
                    expected = f"1 cell, as the first line, {self.names[0][:60]!r}"
                for start in (self.names[0], row[0]):
                    if start.startswith("#"):
                        received += f"; {start[:60]!r} may be a comment, which is not skipped"
                raise InvalidInput(f"{self.field}.{n}", expected, received)
            yield row

    def _lines(self) -> Iterator[list[str]]:
        before: list[str] = []
        first = 1  # line of the current row
        try:
            with (
                _long_cells,
                binary(self.source) as content,
                io.TextIOWrapper(content, encoding=self.encoding, newline="") as file,
            ):
                if self._is_marked:
                    file.readline()
                lines = chain(self._bounded(file), [self.delimiter.join(END)])
                skipped = int(self._is_marked)
                reader = csv.reader(lines, delimiter=self.delimiter, skipinitialspace=True)
                for row in reader:
                    if before:
                        yield before
                    if reader.line_num > first:
                        self._check_last_line(first + skipped)
                    before, self._cells, first = row, 0, reader.line_num + 1
                    self.pause()
        except UnicodeDecodeError as error:
            if self._has_encoding:
                received = f"bytes that are not {self.encoding}"
                raise InvalidInput(self.field, "a readable CSV file", received) from error
            expected = "a CSV file in UTF-8, UTF-16, UTF-32 or cp1252"
            raise InvalidInput(self.field, expected, "something else") from error
        except csv.Error as error:
            raise InvalidInput(self.field, CLOSED, str(error)[:100]) from error
        if before != END:
            raise InvalidInput(self.field, CLOSED, "an open quote at the end")

    def _bounded(self, file: io.TextIOBase) -> Iterator[str]:
        while line := file.readline(MAX_LETTERS + 1):
            self._cells += line.count(self.delimiter)
            if len(line) > MAX_LETTERS or self._cells > MAX_CELLS:
                expected = f"lines of at most {MAX_LETTERS} letters and {MAX_CELLS} cells"
                raise InvalidInput(self.field, expected, "a longer one, or a quote that is open")
            self._line = line
            yield line

    def _check_last_line(self, first: int) -> None:
        """Raise InvalidInput if text follows a quote, so that stray quotes do not merge rows."""
        closing = TO_CLOSING_QUOTE.match(self._line)
        rest = self._line[closing.end() :] if closing else ""
        if rest.strip() and not re.match(rf" *{re.escape(self.delimiter)}", rest):
            received = f"an unmatched quote in the row that starts in line {first}"
            raise InvalidInput(self.field, CLOSED, received)

    def _detect_delimiter(self, sample: bytes) -> str:
        text = sample.decode(self.encoding, "ignore")
        if len(sample) == SAMPLE_BYTES:
            text = text[: text.rfind("\n") + 1] or text
        try:
            return detect_delimiter(text)
        except csv.Error as error:
            raise InvalidInput(self.field, CLOSED, str(error)[:100]) from error


def detect_delimiter(sample: str) -> str:
    """Return the delimiter that splits every line into the same number of cells."""
    best, cells = ",", 1
    for delimiter in DELIMITERS:
        file = io.StringIO(sample, newline="")
        lines = csv.reader(file, delimiter=delimiter, skipinitialspace=True)
        rows = [row for row in lines if row]
        columns = len(_strip_empty_cells(rows[0], 1)) if rows else 0
        sample_rows = rows[: max(1, min(SAMPLE_LINES, len(rows) - 1))]
        widths = {len(_strip_empty_cells(row, columns)) for row in sample_rows}
        if len(widths) == 1 and (width := widths.pop()) > cells:
            best, cells = delimiter, width
    return best


def _strip_empty_cells(row: list[str], width: int) -> list[str]:
    end = len(row)
    while end > width and not row[end - 1].strip():
        end -= 1
    return row[:end] if end < len(row) else row


def _normalise_encoding(encoding: str, field: str) -> str:
    try:
        name = codecs.lookup(encoding).name
    except LookupError as error:
        raise InvalidInput(field, "a readable CSV file", str(error)) from None
    return "utf-8-sig" if name == "utf-8" else encoding


def _detect_encoding(sample: bytes, file: io.BufferedIOBase) -> str:
    for mark, encoding in MARKS.items():
        if sample.startswith(mark):
            return encoding
    if sample[:1000].count(0) > len(sample[:1000]) / 10:
        return "utf-16-le" if sample[1:2] == b"\x00" else "utf-16-be"
    return next(name for name in ENCODINGS if _can_decode(file, name))


def _can_decode(file: io.BufferedIOBase, encoding: str) -> bool:
    file.seek(0)
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while block := file.read(SAMPLE_BYTES):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


class CsvFile(RowFile):
    ENDING = ".csv"

    def _open(self) -> None:
        source, spec, field = self.source, self.spec, self.field
        if not spec.columns and spec.text is None:
            expected = "a CSV file for a model of columns or text alone"
            raise self._refuse(expected, "one for another model")
        text = [] if spec.text is None else [spec.text.column]
        self._selected_columns = [column.name for column in spec.columns] or text
        size = source.stat().st_size if isinstance(source, Path) else len(source)
        self.bounds.reserve(LETTER_BYTES * min(size, MAX_LETTERS), field)
        self._table = table = CsvTable(source, field, pause=self.bounds.pause)
        if not table.names:
            return
        self._find_ids(table.names)
        self._require(self._selected_columns, table.names)
        self._use(self._selected_columns, table.names)
        self._has_commas = self._find_commas()
        self.read_as = f"{len(self._selected_columns)} columns by name"
        if not spec.columns:
            self.read_as = f"the column {self._selected_columns[0]}"
        if self._has_commas:
            self.read_as += ", with decimal commas"
        if table.encoding != "utf-8-sig":
            self.read_as += f", as {table.encoding}"
        self.read_as += self._name_ids()

    def _find_commas(self) -> bool:
        """Count the rows and detect whether numbers use decimal commas.

        In comma-separated files, 1,234 can be a thousand and is not sufficient evidence.
        """
        plain = [c for c in self.spec.columns if isinstance(c, NumericColumn) and c.written is None]
        places = [self._table.names.index(column.name) for column in plain]
        has_points = has_commas = has_decimals = False
        for row in self._table.rows():
            self.rows += 1
            has_points = has_points or any(
                "." in row[i] and POINT_NUMBER.fullmatch(row[i].strip()) for i in places
            )
            if not has_decimals:
                commas = [text for i in places if COMMA_NUMBER.fullmatch(text := row[i].strip())]
                has_commas = has_commas or bool(commas)
                has_decimals = any(not THOUSANDS.fullmatch(text) for text in commas)
        if self._table.delimiter == ",":
            return has_decimals and not has_points
        if has_points and has_commas:
            raise self._refuse("numbers with decimal points or with decimal commas", "both")
        return has_commas

    def id_parts(self) -> Iterator[list[str]]:
        assert self.id_column is not None
        place, first = self._table.names.index(self.id_column), 0
        names = (row[place] for row in self._table.rows())
        for part in cut(names, len, PART_CELLS, PART_LETTERS):
            values = [name if name.strip() else None for name in part]
            yield convert_ids(values, self.id_column, first)
            first += len(part)

    @property
    def part_rows(self) -> int:
        return min(super().part_rows, max(1, PART_CELLS // self.row_size))

    def parts(self, first: int = 0) -> Iterator[Part]:
        places = [self._table.names.index(name) for name in self._selected_columns]
        rows = ([row[i] for i in places] for row in islice(self._table.rows(), first, None))
        max_rows = self.part_rows
        cells = CELL_BYTES * len(places) * min(max_rows, self.rows)
        self.bounds.reserve(cells + LETTER_BYTES * PART_LETTERS, self.field)
        for part in cut(rows, lambda row: sum(map(len, row)), max_rows, PART_LETTERS):
            yield self._part(part)

    def _part(self, rows: list[list[str]]) -> Part:
        if not self.spec.columns:
            return [text for (text,) in rows]
        cells: dict[str, list[Any] | Any] = {}
        for i, column in enumerate(self.spec.columns):
            read = cell_reader(column, self.spec.missing_values, self._has_commas)
            cells[column.name] = [read(row[i]) for row in rows]
        return cells
