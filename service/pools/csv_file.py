"""CSV files of columns or texts: encoding, delimiter and decimal commas are recognised."""

import codecs
import csv
import io
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from model_store.artifacts.manifest import AnyColumn, CategoricalColumn, InputSpec, NumericColumn
from model_store.errors import InvalidInput
from model_store.sources.delimiters import delimiter_of
from model_store.sources.missing import MISSING
from model_store.sources.numbers import COMMA_NUMBER, number_of
from service.pools.pool_file import Part, PoolFile, Source, binary, refuse_absent, refuse_repeated

BOOLEANS = {"true", "false"}
THOUSANDS = re.compile(r"[+-]?\d{1,3},\d{3}")  # which a number with a decimal comma may look like
CLOSED = "a CSV file with quotes that are closed"
SAMPLE_BYTES = 1 << 16  # of a file, that its delimiter is recognised by
ENCODINGS = (
    "utf-8-sig",
    "cp1252",
    "latin-1",
)  # in the order in which they are tried, as in training
MARKS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}

csv.field_size_limit(
    1 << 24
)  # characters of a cell: more than any row may have, so that others say so


class CsvFile(PoolFile):
    """A table of a model of columns, or a text in each row, with a line of names at its top."""

    ENDING = ".csv"

    def __init__(self, source: Source, spec: InputSpec, field: str) -> None:
        super().__init__(source, spec, field)
        if not spec.columns and spec.text is None:
            raise self._rows_error(
                "a CSV file for a model of columns or text alone", "one for another model"
            )
        wanted = (
            [c.name for c in spec.columns]
            if spec.columns
            else [spec.text.column if spec.text else ""]
        )
        self._encoding, self._delimiter = _form(source)
        names: list[str] = []
        plain = [c.name for c in spec.columns if isinstance(c, NumericColumn) and c.written is None]
        has_points = has_commas = has_decimals = False
        for row in self._lines():
            if not names:
                names = [name.strip() for name in row]
                self.id_column = self._id_column(names)
                refuse_absent(wanted, names, field)
                refuse_repeated([*wanted, *self._named], names, field)
                places = [names.index(name) for name in plain]
                continue
            if len(row) != len(names):
                raise InvalidInput(
                    f"{field}.{self.rows}", f"{len(names)} cells, as the first line", f"{len(row)}"
                )
            has_points = has_points or any("." in row[i] for i in places)
            if not has_decimals:
                commas = [text for i in places if COMMA_NUMBER.fullmatch(text := row[i].strip())]
                has_commas = has_commas or bool(commas)
                has_decimals = any(not THOUSANDS.fullmatch(text) for text in commas)
            self.rows += 1
        if has_points and has_commas and self._delimiter != ",":
            raise self._rows_error("numbers with decimal points or with decimal commas", "both")
        # Between commas 1,234 alone may be a thousand and more, and so it may beside points.
        self._has_commas = has_commas if self._delimiter != "," else has_decimals and not has_points
        self._names, self._columns = names, wanted
        self.ignored = [name for name in names if name not in (*wanted, *self._named)]
        self.read_as = (
            f"{len(wanted)} columns by name" if spec.columns else f"the column {wanted[0]}"
        )
        if self._has_commas:
            self.read_as += ", with decimal commas"
        if self._encoding != "utf-8-sig":
            self.read_as += f", as {self._encoding}"
        self._say_ids()

    def ids(self) -> list[str] | None:
        """Return the column of ids.

        Raises:
            InvalidInput: naming a row that has none.
        """
        if self.id_column is None:
            return None
        place, found = self._names.index(self.id_column), []
        for n, row in enumerate(self._rows()):
            if not row[place].strip():
                raise InvalidInput(self.id_column, "a name for each row", f"none of row {n}")
            found.append(row[place])
        return found

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
        cells: dict[str, list[Any] | Any] = {}
        for column in self.spec.columns:
            read = reader_of(column, self.spec.missing_values, self._has_commas)
            cells[column.name] = [read(row[places[column.name]]) for row in part]
        return cells

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
                end = [
                    "end",
                    "of file",
                ]  # a line of its own, unless a quote before it is still open
                before: list[str] = []
                for row in csv.reader(
                    chain(file, [self._delimiter.join(end)]), delimiter=self._delimiter
                ):
                    if before:
                        yield before
                    before = row
        except UnicodeDecodeError as error:
            raise self._rows_error(
                "a CSV file in UTF-8, UTF-16 or cp1252", "something else"
            ) from error
        except csv.Error as error:
            raise self._rows_error(CLOSED, str(error)[:100]) from error
        if before != end:
            raise self._rows_error(CLOSED, "one that is open at the end")


def reader_of(
    column: AnyColumn, missing: tuple[str, ...], has_commas: bool = False
) -> Callable[[str], Any]:
    """Return what reads cells of a column that came as text, so that they are as JSON would have
    them.

    Args:
        missing: what cells say that hold nothing, beside what always does.
        has_commas: whether plain numbers have decimal commas.
    """
    nothing = {*MISSING, *missing}
    if not isinstance(column, CategoricalColumn):
        return lambda text: (
            None if text.strip() in nothing else _number_or_time(text.strip(), column, has_commas)
        )
    categories = set(column.categories)
    is_boolean = categories <= BOOLEANS

    def category(text: str) -> str | None:
        """A category as it stands, or as it is known without blanks, a boolean without regard to
        case."""
        if text in categories:
            return text
        stripped = text.strip()
        if stripped in nothing:
            return None
        if is_boolean and stripped.lower() in BOOLEANS:
            return stripped.lower()
        return stripped if stripped in categories else text

    return category


def _number_or_time(text: str, column: AnyColumn, has_commas: bool) -> Any:
    if not isinstance(column, NumericColumn):
        return text
    try:
        if column.written is not None:
            return number_of(text, column.written)
        if "_" in text:  # which Python takes for a number
            return text
        return float(text.replace(",", ".") if has_commas else text)
    except ValueError:
        return text  # which is refused, and named


def _form(source: Source) -> tuple[str, str]:
    """Return a file's encoding and delimiter; the encoding as in training, by the first bytes or by
    what is whole."""
    with binary(source) as file:
        sample = file.read(SAMPLE_BYTES)
        encoding = MARKS.get(sample[:2])
        if encoding is None and b"\x00" in sample[:1000]:
            encoding = "utf-16-le" if sample[1:2] == b"\x00" else "utf-16-be"
        if encoding is None:
            encoding = next(name for name in ENCODINGS if _is_in(file, name))
    text = sample.decode(encoding, "ignore")
    return encoding, delimiter_of(
        text if len(sample) < SAMPLE_BYTES else text[: text.rfind("\n") + 1] or text
    )


def _is_in(file: Any, encoding: str) -> bool:
    """Whether all of a file can be read in an encoding."""
    file.seek(0)
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while block := file.read(SAMPLE_BYTES):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
